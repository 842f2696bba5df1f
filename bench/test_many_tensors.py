"""Messages of many tensors, beside one plain memcpy of each of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from bench.peer import checksum_of

if TYPE_CHECKING:
    from bench.conftest import Connect, SideBySide

KIB = 1 << 10


def minilm() -> list[torch.Tensor]:
    """Tensors of the shapes that a sentence encoder of six layers and 384 columns has."""
    n_columns, n_inner = 384, 1536
    column, inner = [(n_columns,)], [(n_inner,)]
    square, wide, narrow = [(n_columns,) * 2], [(n_inner, n_columns)], [(n_columns, n_inner)]
    embeddings = [(30522, n_columns), (512, n_columns), (2, n_columns), *(2 * column)]
    layer = [*(4 * (square + column)), *(2 * column), *wide, *inner, *narrow, *(3 * column)]
    shapes = [*embeddings, *(6 * layer), *square, *column]
    return [torch.randn(shape) for shape in shapes]


def of_size(count: int, size_kib: int) -> list[torch.Tensor]:
    """So many tensors of so many KiB."""
    return [torch.randn(size_kib * KIB // 4) for _ in range(count)]


MESSAGES = {
    "a state dict": (minilm, "1.5 x"),
    "256 x 128 KiB": (lambda: of_size(256, 128), "1.8 x"),
    "64 x 768 KiB": (lambda: of_size(64, 768), "1.5 x"),
    "1000 x 32 KiB": (lambda: of_size(1000, 32), ""),
    "1000 x 4 KiB": (lambda: of_size(1000, 4), "5 x"),
}


@pytest.mark.parametrize("n_readers", [1, 2, 4], ids=lambda n_readers: f"{n_readers}_readers")
@pytest.mark.parametrize("kind", MESSAGES)
def test_many_tensors(
    connect: Connect, side_by_side: SideBySide, kind: str, n_readers: int
) -> None:
    """A dict of tensors goes out, until the last reader has read a byte of every page."""
    make, target = MESSAGES[kind]
    tensors = make()
    message = {f"tensor {number}": tensor for number, tensor in enumerate(tensors)}
    warm = [tensor.clone() for tensor in tensors]
    checksum = checksum_of(tensors)
    size_mib = sum(tensor.nbytes for tensor in tensors) / (1 << 20)
    connected = connect("touch", n_readers=n_readers, settings={})

    def broadcast() -> float:
        start_ns = time.perf_counter_ns()
        connected.queue.enqueue(message)
        touched_ns = max(reader.dequeue()[1] for reader in connected.readers)
        connected.queue.enqueue("check")
        assert [checksum] * n_readers == [reader.dequeue() for reader in connected.readers]
        return (touched_ns - start_ns) / 1e9

    def memcpy() -> float:
        start_ns = time.perf_counter_ns()
        for mine, theirs in zip(warm, tensors, strict=True):
            mine.copy_(theirs)
        return (time.perf_counter_ns() - start_ns) / 1e9

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    side_by_side(
        f"{kind}, {len(tensors)} tensors, {size_mib:.3g} MiB, to {n_readers}",
        broadcast,
        {"one warm memcpy of each": memcpy},
        blocks=11,
        target=target,
    )
    torch.set_num_threads(n_threads)
    connected.end()


@pytest.mark.parametrize("size_mib", [512])
def test_larger_than_the_arena(connect: Connect, side_by_side: SideBySide, size_mib: int) -> None:
    """A state dict that goes into a memory file of its own, until both readers have touched it."""
    message = {f"layer {number}": torch.randn(4 * KIB * KIB) for number in range(size_mib // 16)}
    warm = [tensor.clone() for tensor in message.values()]
    checksum = checksum_of(message.values())
    connected = connect("touch", n_readers=2, settings={"arena_bytes": "256 MiB"})

    def broadcast() -> float:
        start_ns = time.perf_counter_ns()
        connected.queue.enqueue(message)
        touched_ns = max(reader.dequeue()[1] for reader in connected.readers)
        connected.queue.enqueue("check")
        assert [checksum] * 2 == [reader.dequeue() for reader in connected.readers]
        return (touched_ns - start_ns) / 1e9

    def memcpy() -> float:
        start_ns = time.perf_counter_ns()
        for mine, theirs in zip(warm, message.values(), strict=True):
            mine.copy_(theirs)
        return (time.perf_counter_ns() - start_ns) / 1e9

    def fresh_memcpy() -> float:
        start_ns = time.perf_counter_ns()
        clones = [tensor.clone() for tensor in message.values()]
        taken_ns = time.perf_counter_ns() - start_ns
        del clones
        return taken_ns / 1e9

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    side_by_side(
        f"{size_mib} MiB in a file, to 2",
        broadcast,
        {"one warm memcpy": memcpy, "one memcpy to new memory": fresh_memcpy},
        blocks=5,
        target="1.5 x one warm memcpy",
    )
    torch.set_num_threads(n_threads)
    connected.end()
