"""Messages of many tensors: which of them share a block, and what keeping one of them keeps."""

from __future__ import annotations

import gc
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE_S, MakeQueue

from shmcast import MessageQueue
from shmcast.arena import LEAST_SHARED_BYTES
from shmcast.pickler import MOST_KEPT_BYTES, Pickler

KIB = 1 << 10
MIB = 1 << 20


def tensor_of(number: int, n_bytes: int) -> torch.Tensor:
    """A tensor that differs from those of other numbers in every word."""
    return torch.arange(n_bytes // 8) + (number << 40)


def arena_bytes_held(queue: MessageQueue) -> int:
    """How many bytes of blocks the readers hold."""
    queue.empty((MIB,), torch.uint8)  # the writer looks when it needs a block, which counts too
    return max(0, queue.stats().arena_bytes_in_use - MIB)


def private_mib() -> float:
    """This process's own memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise LookupError


def test_a_stream_keeps_a_bounded_amount() -> None:
    """Buffers below the threshold stay in the stream until it has kept so much, then all leave."""
    pickler, size = Pickler(MIB), 10 * KIB
    for n_tensors in (1, 3, 100, 2):
        stream, buffers = pickler.dumps([tensor_of(number, size) for number in range(n_tensors)])
        n_kept = min(n_tensors, -(-MOST_KEPT_BYTES // size))
        assert n_tensors - n_kept == len(buffers)
        assert n_kept * size <= sum(map(len, stream)) < n_kept * size + 100 * n_tensors + 100
    for n_bytes, n_buffers in ((MIB - 8, 0), (MIB, 1)):
        stream, buffers = pickler.dumps(tensor_of(0, n_bytes))
        assert n_buffers == len(buffers)


SETTINGS: dict[str, dict[str, Any]] = {
    "leased": {},
    "copied": {"receive": "copy"},
    "no arena": {"arena_bytes": 0},
    "small arena": {"arena_bytes": "4 MiB"},
    "all out of band": {"oob_threshold_bytes": 0},
    "small chunks": {"chunk_bytes": "4 KiB"},
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_any_mixture_arrives(make_queue: MakeQueue, settings: str) -> None:
    """Tensors of all sizes in one message arrive bit for bit, and are each reader's own."""
    queue, readers = make_queue(n_readers=2, **SETTINGS[settings])
    choice = random.Random(7)
    sizes = [8, 100 * KIB, 0, LEAST_SHARED_BYTES - 8, LEAST_SHARED_BYTES, 16 * KIB, 64 * KIB]
    for number in range(4):
        sent = [tensor_of(number, choice.choice([*sizes, MIB, 768 * KIB])) for _ in range(40)]
        sent.append(sent[3])
        expected = [tensor.clone() for tensor in sent]
        wide = torch.stack([tensor_of(number, 200 * KIB)] * 2, dim=1)
        queue.enqueue([sent, wide[:, 0], wide.t()], PATIENCE_S)
        for tensor in (*sent, wide):
            tensor.fill_(-1)
        for reader in readers:
            received, column, transposed = reader.dequeue(PATIENCE_S)
            assert all(map(torch.equal, expected, received))
            assert torch.equal(tensor_of(number, 200 * KIB), column)
            assert (wide.t().stride(), transposed[1].tolist()) == (
                transposed.stride(),
                column.tolist(),
            )
            assert received[3] is received[-1]
            assert 0 == sum(tensor.data_ptr() % 8 for tensor in received)
            for tensor in received:
                tensor.fill_(reader.rank)
    del sent, received, column, transposed, tensor
    gc.collect()
    assert 0 == arena_bytes_held(queue)


def test_what_shares_a_block_holds_it_together(make_queue: MakeQueue) -> None:
    """A block that tensors share is free when the last of them has gone, in any order."""
    queue, (reader,) = make_queue(oob_threshold_bytes=0)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        queue.enqueue([tensor_of(number, 64 * KIB) for number in range(4)])
        received = dict(enumerate(reader.dequeue(PATIENCE_S)))
        for number in order:
            assert 256 * KIB == arena_bytes_held(queue)
            assert torch.equal(tensor_of(number, 64 * KIB), received[number])
            received[number].fill_(-1)  # its pages are others' too, and must not be dropped yet
            del received[number]
        assert 0 == arena_bytes_held(queue)


@pytest.mark.parametrize("size_kib", [1, 4, 8, 30, 128, 500, 768])
def test_keeping_one_of_each_message(make_queue: MakeQueue, size_kib: int) -> None:
    """A reader that keeps one tensor of each message keeps at most 16 times its size for it."""
    n_messages, size = 40, size_kib * KIB
    queue, (reader,) = make_queue(arena_bytes="256 MiB")
    sent = [tensor_of(number, size) for number in range(max(20, MIB // size))]
    kept = []
    before_mib = private_mib()
    for number in range(n_messages):
        queue.enqueue(sent, PATIENCE_S)
        kept.append(reader.dequeue(PATIENCE_S)[-1 - number % 10])
    gc.collect()
    assert arena_bytes_held(queue) <= n_messages * min(16 * size, size + MIB)
    if size < LEAST_SHARED_BYTES:
        assert 0 == arena_bytes_held(queue)
    assert private_mib() - before_mib < n_messages * size / MIB + 16
    assert 0 == queue.stats().fallbacks
    for number, tensor in enumerate(kept):
        assert torch.equal(sent[-1 - number % 10], tensor)


def test_many_buffers_go_through_a_queue(make_queue: MakeQueue) -> None:
    """More than 65,535 buffers in one message are no limit, in blocks and in the image."""
    queue, (reader,) = make_queue(oob_threshold_bytes=0)
    sent = [bytes([number % 256]) * 4 for number in range(66_000)]
    queue.enqueue([pickle.PickleBuffer(part) for part in sent])
    assert sent == [bytes(part) for part in reader.dequeue(PATIENCE_S)]
