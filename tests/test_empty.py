"""Tensors of `MessageQueue.empty`: published without a copy, and the writer's own afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import faulthandler
import gc
import itertools
import logging
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
import torch
from conftest import PATIENCE_S, MakeQueue, StartChild, count_descriptors, tracing
from hypothesis import given, settings
from hypothesis import strategies as st

import shmcast
from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueFull,
    ReaderLost,
    ShmcastError,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

KIB = 1024
SIZE = 256 * KIB
THRESHOLD = 64 * KIB

#: Too small for a tensor in it: what is not in the arena goes into a memory file, and is counted.
SETTINGS: dict[str, Any] = {
    "chunk_bytes": 32 * KIB,
    "n_chunks": 8,
    "oob_threshold_bytes": THRESHOLD,
    "arena_bytes": 8 * SIZE,
}


def place_of(thing: Any) -> tuple[int, int] | None:
    """The memory file (its inode) and the offset in it where a tensor's bytes are; else None."""
    address = thing.ctypes.data if isinstance(thing, np.ndarray) else thing.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:shmcast-data" in line:
            addresses, _, offset, _, inode, *_ = line.split()
            start, end = (int(part, 16) for part in addresses.split("-"))
            if start <= address < end:
                return int(inode), int(offset, 16) + address - start
    return None


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether what is written to a tensor goes into the queue's memory file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split()
        start, end = (int(part, 16) for part in addresses.split("-"))
        if start <= tensor.data_ptr() < end:
            return permissions.endswith("s")
    raise AssertionError("nothing is mapped there")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a dense tensor of any dtype."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def pattern(seed: int, n_bytes: int = SIZE) -> np.ndarray[Any, Any]:
    """Random bytes, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, n_bytes, dtype=np.uint8)


def new_tensor(queue: MessageQueue, seed: int, n_bytes: int = SIZE) -> torch.Tensor:
    """A tensor in the arena, with a pattern in it."""
    tensor = queue.empty((n_bytes,), torch.uint8)
    tensor.numpy()[:] = pattern(seed, n_bytes)
    assert is_shared(tensor)
    return tensor


def check(tensor: torch.Tensor, seed: int) -> None:
    """A tensor has this pattern, in every byte."""
    assert np.array_equal(pattern(seed, tensor.numel()), tensor.numpy())


def blocks_left(queue: MessageQueue, readers: list[MessageReader]) -> int:
    """How many blocks are in use, found out by a message that has the writer look."""
    queue.enqueue(np.zeros(THRESHOLD, np.uint8), PATIENCE_S)
    messages = [reader.dequeue(PATIENCE_S) for reader in readers]
    assert [0] * len(readers) == [int(message.sum()) for message in messages]
    return queue.stats().blocks_in_use - 1


def flip(tensor: torch.Tensor) -> None:
    """Change every byte of a tensor, without a thread of torch."""
    array = np.frombuffer(
        (ctypes.c_uint8 * tensor.untyped_storage().nbytes()).from_address(
            tensor.untyped_storage().data_ptr()
        ),
        dtype=np.uint8,
    )
    array ^= 0xFF


def send(tensor: Any, queue: MessageQueue, reader: MessageReader) -> Any:
    """What a reader gets of a message."""
    queue.enqueue(tensor, PATIENCE_S)
    return reader.dequeue(PATIENCE_S)


@pytest.fixture
def pair(make_queue: MakeQueue) -> tuple[MessageQueue, MessageReader]:
    """A queue with one reader and room for some blocks."""
    queue, (reader,) = make_queue(**SETTINGS)
    return queue, reader


# --- nothing is copied ----------------------------------------------------------------------------


def test_the_readers_block_is_the_tensors_own(make_queue: MakeQueue) -> None:
    """A reader gets the very pages that the writer filled, in an arena with no room for others."""
    queue, readers = make_queue(**{**SETTINGS, "arena_bytes": SIZE, "n_readers": 2})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    queue.enqueue({"tensor": tensor})
    received = [reader.dequeue(PATIENCE_S)["tensor"] for reader in readers]
    assert [place] * 2 == [place_of(each) for each in received]
    assert place is not None
    for each in received:
        check(each, 1)
    stats = queue.stats()
    assert (0, 1, SIZE, (1, 1)) == (
        stats.fallbacks,
        stats.blocks_in_use,
        stats.arena_bytes_in_use,
        stats.blocks_held,
    )


def test_an_ordinary_tensor_is_copied(pair: tuple[MessageQueue, MessageReader]) -> None:
    """The places of an ordinary tensor and of what is received of it are told apart."""
    queue, reader = pair
    ordinary = torch.from_numpy(pattern(1))
    received = send(ordinary, queue, reader)
    assert place_of(ordinary) is None
    assert place_of(received) is not None
    check(received, 1)
    again = send(ordinary, queue, reader)
    assert place_of(again) not in (None, place_of(received))


def test_a_reader_that_copies_needs_no_second_block(make_queue: MakeQueue) -> None:
    """With receive="copy" the reader has its own memory, and the arena had room for one block."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": SIZE, "receive": "copy"})
    tensor = new_tensor(queue, 1)
    received = send(tensor, queue, reader)
    assert place_of(received) is None
    check(received, 1)
    flip(tensor)
    check(received, 1)
    assert (0, 1) == (queue.stats().fallbacks, queue.stats().blocks_in_use)
    del tensor
    assert 0 == blocks_left(queue, [reader])


def read_place_and_bytes(pipe: Connection, handle: Handle) -> None:
    with MessageQueue.create_from_handle(handle, 0) as reader:
        tensor = reader.dequeue(PATIENCE_S)
        pipe.send((place_of(tensor), bytes_of(tensor)))
        pipe.recv()
        pipe.send(bytes_of(tensor))


def test_another_process_reads_the_tensors_pages(start_child: StartChild) -> None:
    """A reader of another process maps the writer's pages, and keeps them as they were."""
    with MessageQueue(QueueConfig(**{**SETTINGS, "arena_bytes": SIZE})) as queue:
        child = start_child(read_place_and_bytes, queue.export_handle(), method="fork")
        queue.wait_until_ready(PATIENCE_S)
        tensor = new_tensor(queue, 1)
        place = place_of(tensor)
        queue.enqueue(tensor)
        assert (place, pattern(1).tobytes()) == child.receive()
        flip(tensor)
        child.pipe.send("look again")
        assert pattern(1).tobytes() == child.receive()
        assert 0 == queue.stats().fallbacks


def test_no_page_of_the_writer_is_touched_by_publishing(make_queue: MakeQueue) -> None:
    """To publish 64 MiB takes few page faults, not those of a copy."""
    n_bytes = 64 * KIB * KIB
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 2 * n_bytes})
    send("warm", queue, reader)
    tensor = queue.empty((n_bytes,), torch.uint8)
    tensor.numpy()[:: 4 * KIB] = 7
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    queue.enqueue(tensor)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    # A copy of these 16,384 pages took 16,387, publishing 1 to 3.
    assert faults < 1000
    received = reader.dequeue(PATIENCE_S)
    assert place_of(tensor) == place_of(received)
    assert 7 * (n_bytes // (4 * KIB)) == int(received.numpy()[:: 4 * KIB].sum(dtype=np.int64))


# --- which tensors -------------------------------------------------------------------------------


def all_dtypes() -> list[torch.dtype]:
    """Every dtype of the installed torch that `torch.empty` takes."""
    dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    taken = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in sorted(dtypes, key=str):
            with contextlib.suppress(RuntimeError, TypeError):
                torch.empty((2,), dtype=dtype)
                taken.append(dtype)
    return taken


@pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:.*quantize_per_tensor")
def test_every_dtype(pair: tuple[MessageQueue, MessageReader]) -> None:
    """Each dtype that `torch.empty` takes travels bit for bit, without a copy if unquantized."""
    queue, reader = pair
    dtypes = all_dtypes()
    assert len(dtypes) > 20
    for number, dtype in enumerate(dtypes):
        tensor = queue.empty((128, THRESHOLD // 64), dtype)
        model = torch.empty((128, THRESHOLD // 64), dtype=dtype)
        assert (model.shape, model.stride(), dtype) == (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        assert (torch.device("cpu"), False) == (tensor.device, tensor.requires_grad)
        if model.is_quantized:
            assert (True, None) == (tensor.is_quantized, place_of(tensor))
            continue
        bits = pattern(number, tensor.numel() * tensor.element_size()).tobytes()
        ctypes.memmove(tensor.data_ptr(), bits, len(bits))
        place = place_of(tensor)
        assert place is not None, dtype
        received = send(tensor, queue, reader)
        assert (dtype, tensor.shape, place) == (received.dtype, received.shape, place_of(received))
        flip(tensor)
        assert bits == bytes_of(received)
        del tensor, received
    assert 0 == blocks_left(queue, [reader])


@pytest.mark.parametrize(
    "shape",
    [(), (0,), (3, 0, 2), (2**62, 0), (1,), (THRESHOLD - 1,)],
    ids=str,
)
def test_a_small_tensor_is_an_ordinary_one(
    pair: tuple[MessageQueue, MessageReader], shape: tuple[int, ...]
) -> None:
    """With no elements, or fewer bytes than the threshold, there is no block for it."""
    queue, reader = pair
    tensor = queue.empty(shape, torch.uint8).fill_(5)
    assert (None, 0) == (place_of(tensor), queue.stats().blocks_in_use)
    received = send(tensor, queue, reader)
    assert (tensor.shape, tensor.dtype) == (received.shape, received.dtype)
    assert torch.equal(tensor, received)


def test_a_tensor_of_exactly_the_threshold_has_a_block(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """The threshold itself is the least size of a tensor without a copy, in bytes."""
    queue, reader = pair
    tensor = queue.empty((THRESHOLD // 8,), torch.float64).fill_(0.5)
    place = place_of(tensor)
    assert place is not None
    assert place == place_of(send(tensor, queue, reader))


@pytest.mark.parametrize("n_bytes", [THRESHOLD + 1, THRESHOLD + 4095, THRESHOLD + 4097])
def test_a_tensor_that_ends_within_a_page(
    pair: tuple[MessageQueue, MessageReader], n_bytes: int
) -> None:
    """A size of no whole number of pages is sent without a copy too, and has its own pages."""
    queue, reader = pair
    tensors = [new_tensor(queue, seed, n_bytes) for seed in range(3)]
    for seed, tensor in enumerate(tensors):
        received = send(tensor, queue, reader)
        assert place_of(tensor) == place_of(received)
        check(received, seed)
    assert 3 == len({place_of(tensor) for tensor in tensors})


@pytest.mark.parametrize("case", ["off", "too small", "full"])
def test_without_room_in_the_arena_it_is_an_ordinary_tensor(
    make_queue: MakeQueue, case: str
) -> None:
    """With arena_bytes=0, or no free block, the tensor is an ordinary one and is copied."""
    arena_bytes = {"off": 0, "too small": SIZE - 1, "full": SIZE + 8 * KIB}[case]
    if case == "too small":
        arena_bytes -= 4 * KIB  # an arena is whole pages
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": arena_bytes})
    kept = [new_tensor(queue, 1)] if case == "full" else []
    tensor = queue.empty((SIZE,), torch.uint8)
    assert place_of(tensor) is None
    assert len(kept) == queue.stats().blocks_in_use
    tensor.numpy()[:] = pattern(2)
    received = send(tensor, queue, reader)
    flip(tensor)
    check(received, 2)
    assert [True] * len(kept) == [np.array_equal(pattern(1), each.numpy()) for each in kept]
    assert 1 == queue.stats().fallbacks
    del kept, received
    if case == "full":
        assert 0 == blocks_left(queue, [reader])
        assert place_of(queue.empty((SIZE,), torch.uint8)) is not None


def outcome(make: Callable[[], torch.Tensor]) -> tuple[Any, ...]:
    """The error of a call, or what kind of tensor it makes."""
    try:
        tensor = make()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return tensor.shape, tensor.dtype, tensor.stride(), tensor.layout


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((-1,), torch.uint8),
        ((3, -2), torch.float32),
        ((-SIZE, -1), torch.uint8),
        (1.5, torch.uint8),
        ((1.5,), torch.uint8),
        ((True, SIZE), torch.uint8),
        ("ab", torch.uint8),
        (None, torch.uint8),
        ([[SIZE]], torch.uint8),
        ({SIZE: 1}, torch.uint8),
        ((2**40, 2**10), torch.uint8),
        ((2**62, 4), torch.uint8),
        ((2**63,), torch.uint8),
        ((2**61,), torch.complex128),
        (SIZE, torch.uint8),
        ([2, SIZE], torch.uint8),
        (torch.Size([SIZE]), torch.uint8),
        ((np.int64(SIZE),), torch.uint8),
        ((SIZE,), "uint8"),
        ((SIZE,), 3),
        ((SIZE,), np.float32),
        ((SIZE,), float),
        ((SIZE,), None),
        ((3,), None),
    ],
    ids=repr,
)
def test_shapes_and_dtypes_are_taken_as_torch_does(
    pair: tuple[MessageQueue, MessageReader], shape: Any, dtype: Any
) -> None:
    """Any shape and dtype, also a wrong or a huge one, does what it does in `torch.empty`."""
    queue, reader = pair
    expected = outcome(lambda: torch.empty(shape, dtype=dtype))
    assert expected == outcome(lambda: queue.empty(shape, dtype))
    assert 0 == blocks_left(queue, [reader])


def test_the_default_dtype(pair: tuple[MessageQueue, MessageReader]) -> None:
    """None stands for torch's default dtype of the moment, whose size is what counts."""
    queue, _ = pair
    none: Any = None
    assert torch.float32 == queue.empty((SIZE,), none).dtype
    torch.set_default_dtype(torch.float64)
    try:
        tensor = queue.empty((THRESHOLD // 8,), none)
        assert torch.float64 == tensor.dtype
        assert is_shared(tensor)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("n_bytes", [SIZE, 100])
def test_torchs_default_device_is_passed_over(
    pair: tuple[MessageQueue, MessageReader], device: str, n_bytes: int
) -> None:
    """Whatever torch's default device, also a missing one, the tensor is on the CPU."""
    queue, reader = pair
    torch.set_default_device(device)
    try:
        tensor = queue.empty((n_bytes,), torch.uint8)
        received = send(tensor, queue, reader)
    finally:
        torch.set_default_device(None)
    assert ["cpu", "cpu"] == [tensor.device.type, received.device.type]
    with torch.device(device):
        assert "cpu" == queue.empty((n_bytes,), torch.uint8).device.type
    assert place_of(tensor) == place_of(received)
    assert bytes_of(tensor) == bytes_of(received)


def test_inference_mode(pair: tuple[MessageQueue, MessageReader]) -> None:
    """In inference mode an inference tensor is made, and it is published without a copy."""
    queue, reader = pair
    with torch.inference_mode():
        tensor = new_tensor(queue, 1)
        assert torch.empty(1).is_inference() == tensor.is_inference()
        place = place_of(tensor)
        received = send(tensor, queue, reader)
    assert place == place_of(received)
    flip(tensor)
    check(received, 1)
    with torch.no_grad():
        assert not new_tensor(queue, 2).requires_grad


def test_it_cannot_be_made_larger(pair: tuple[MessageQueue, MessageReader]) -> None:
    """`resize_` beyond its memory raises, and nobody reads there; a smaller one is a view."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(10)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(SIZE + 1)
    # torch has changed the shape all the same. What it then pickles has only the bytes there are.
    received = send(tensor, queue, reader)
    assert (SIZE, tensor.shape) == (tensor.untyped_storage().nbytes(), received.shape)
    assert np.array_equal(pattern(1), received.numpy()[:SIZE])
    tensor.resize_(SIZE // 2)
    received = send(tensor, queue, reader)
    assert place == place_of(received)
    assert np.array_equal(pattern(1)[: SIZE // 2], received.numpy())


def test_memory_that_torch_moves_elsewhere(pair: tuple[MessageQueue, MessageReader]) -> None:
    """A tensor that `share_memory_`, `set_` or `.data` took out of its block is an ordinary one."""
    queue, reader = pair
    shared, other, replaced = (new_tensor(queue, seed) for seed in range(3))
    shared.share_memory_()
    other.set_(torch.from_numpy(pattern(1)))  # type: ignore[call-overload]
    replaced.data = torch.from_numpy(pattern(2))
    assert [None] * 3 == [place_of(tensor) for tensor in (shared, other, replaced)]
    assert 0 == blocks_left(queue, [reader])
    for seed, tensor in enumerate((shared, other, replaced)):
        received = send(tensor, queue, reader)
        flip(tensor)
        check(received, seed)


# --- views ---------------------------------------------------------------------------------------

N_ROWS = 256


def rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(N_ROWS, -1)


#: How to enqueue a tensor so that nothing is copied: its bytes begin with the block's.
AT_THE_START: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "alias": lambda tensor: tensor.view(-1),
    "detached": lambda tensor: tensor.detach(),
    "first half": lambda tensor: tensor[: SIZE // 2],
    "all but the last byte": lambda tensor: tensor[:-1],
    "just the threshold": lambda tensor: tensor[:THRESHOLD],
    "rows": rows,
    "transposed": lambda tensor: rows(tensor).t(),
    "first rows, transposed": lambda tensor: rows(tensor)[: N_ROWS // 2].t(),
    "channels last": lambda tensor: tensor.view(4, 64, 32, 32).permute(0, 3, 1, 2),
    "another dtype": lambda tensor: tensor.view(torch.bfloat16),
    "complex": lambda tensor: tensor.view(torch.complex64),
    "reshaped": lambda tensor: tensor.reshape(2, 2, -1),
    "as_strided": lambda tensor: tensor.as_strided((8, SIZE // 8), (SIZE // 8, 1)),
    "of its storage": lambda tensor: torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), 0, (SIZE,)
    ),
    "through a view elsewhere": lambda tensor: tensor[100:].as_strided((SIZE,), (1,), 0),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "parameter with gradient": lambda tensor: torch.nn.Parameter(tensor.view(torch.float32)),
    "numpy": lambda tensor: tensor.numpy(),
    "numpy, reshaped and transposed": lambda tensor: tensor.numpy().reshape(N_ROWS, -1).T,
    "numpy, half": lambda tensor: tensor.numpy()[: SIZE // 2],
    "numpy of another dtype": lambda tensor: tensor.numpy().view(np.float16),
    "PickleBuffer": lambda tensor: pickle.PickleBuffer(tensor.numpy()),
    "PickleBuffer of a memoryview": lambda tensor: pickle.PickleBuffer(memoryview(tensor.numpy())),
    "tensor over numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "tensor over a memoryview": lambda tensor: torch.frombuffer(
        memoryview(tensor.numpy()), dtype=torch.uint8
    ),
}

#: Views that begin elsewhere or have gaps: these are copied.
ELSEWHERE: dict[str, Callable[[torch.Tensor], Any]] = {
    "all but the first byte": lambda tensor: tensor[1:],
    "second half": lambda tensor: tensor[SIZE // 2 :],
    "from the second page": lambda tensor: tensor[4096:],
    "every second": lambda tensor: tensor[::2],
    "some columns": lambda tensor: rows(tensor)[:, :1000],
    "inner rows, transposed": lambda tensor: rows(tensor)[2:].t(),
    "expanded": lambda tensor: tensor[:1024].expand(200, -1),
    "sliding": lambda tensor: tensor.unfold(0, 1024, 512),
    "numpy elsewhere": lambda tensor: tensor.numpy()[THRESHOLD:],
    "a clone": lambda tensor: tensor.clone(),
}


def raw(thing: Any) -> bytes:
    """The elements of whatever holds bytes, in the order of its indices."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().contiguous()
        return bytes_of(thing)
    if isinstance(thing, np.ndarray):
        return thing.tobytes()
    return bytes(memoryview(thing))


def at(thing: Any) -> tuple[int, int] | None:
    """The place of a received object."""
    return place_of(thing if hasattr(thing, "data_ptr") else np.asarray(memoryview(thing)))


@pytest.mark.parametrize("form", list(AT_THE_START))
def test_a_view_at_the_start_is_not_copied(make_queue: MakeQueue, form: str) -> None:
    """What begins with the tensor's first byte is published without a copy, and then private."""
    queue, readers = make_queue(**{**SETTINGS, "arena_bytes": SIZE, "n_readers": 2})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    view = AT_THE_START[form](tensor)
    expected = raw(view)
    queue.enqueue({"number": 1, "views": [view, None]}, PATIENCE_S)
    flip(tensor)
    received = [reader.dequeue(PATIENCE_S)["views"] for reader in readers]
    for each, _ in received:
        assert expected == raw(each)
        assert place == at(each)
    assert (0, 1) == (queue.stats().fallbacks, queue.stats().blocks_in_use)
    assert np.array_equal(pattern(1) ^ 0xFF, tensor.numpy())
    assert not is_shared(tensor)
    del tensor, view, received, each
    assert 0 == blocks_left(queue, readers)


@pytest.mark.parametrize("form", list(ELSEWHERE))
def test_a_view_elsewhere_is_copied(pair: tuple[MessageQueue, MessageReader], form: str) -> None:
    """Any other view is copied; its tensor stays shared, and can still go without a copy."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    view = ELSEWHERE[form](tensor)
    expected = raw(view)
    received = send([view], queue, reader)[0]
    flip(tensor)
    assert expected == raw(received)
    assert at(received) != place
    assert is_shared(tensor)
    whole = send(tensor, queue, reader)
    assert place == place_of(whole)
    flip(tensor)
    assert np.array_equal(pattern(1) ^ 0xFF, whole.numpy())
    assert expected == raw(received)
    del tensor, view, received, whole
    assert 0 == blocks_left(queue, [reader])


def test_a_small_view_at_the_start_leaves_the_tensor_alone(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """A view that stays in the stream is copied with it, and the tensor is not published."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    received = send([tensor[:100], tensor[:0], tensor[0], tensor[: THRESHOLD - 1]], queue, reader)
    flip(tensor)
    assert np.array_equal(pattern(1)[:100], received[0].numpy())
    assert np.array_equal(pattern(1)[: THRESHOLD - 1], received[3].numpy())
    assert place == place_of(send(tensor, queue, reader))


def test_a_small_view_that_leaves_the_stream(make_queue: MakeQueue) -> None:
    """With a threshold of 0 a view of one byte is out of band, right, and private afterwards."""
    queue, (reader,) = make_queue(**{**SETTINGS, "oob_threshold_bytes": 0})
    for n_bytes in (1, 100, 4096, THRESHOLD - 1):
        tensor = new_tensor(queue, n_bytes)
        received = send(tensor[:n_bytes], queue, reader)
        flip(tensor)
        assert pattern(n_bytes).tobytes()[:n_bytes] == bytes_of(received)
        del tensor, received
    assert place_of(queue.empty((THRESHOLD - 1,), torch.uint8)) is None
    assert 0 == blocks_left(queue, [reader])


@pytest.mark.parametrize("order", ["whole first", "half first", "elsewhere between"])
def test_several_views_in_one_message(make_queue: MakeQueue, order: str) -> None:
    """The first view has the block, the others have copies, and each is a reader's own."""
    queue, (reader,) = make_queue(**SETTINGS)
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    half = SIZE // 2
    views = {
        "whole first": [tensor, tensor[:half], tensor.view(torch.float32), tensor.numpy()],
        "half first": [tensor[:half], tensor, tensor[: half + 1]],
        "elsewhere between": [tensor[half:], tensor[:half], tensor[1:], tensor],
    }[order]
    expected = [raw(view) for view in views]
    received = send(views, queue, reader)
    flip(tensor)
    assert expected == [raw(each) for each in received]
    places = [at(each) for each in received]
    assert len(views) == len(set(places))
    assert place in places
    for number, each in enumerate(received):  # to write to one shows in no other
        array = each if isinstance(each, np.ndarray) else each.view(torch.uint8).numpy()
        array[:] = number
    for number, each in enumerate(received):
        assert {number} == set(raw(each)) or isinstance(each, np.ndarray)
    assert np.array_equal(pattern(1) ^ 0xFF, tensor.numpy())
    assert 0 == queue.stats().fallbacks
    del tensor, views, received, each, array
    assert 0 == blocks_left(queue, [reader])


def test_the_same_tensor_twice_in_one_message(make_queue: MakeQueue) -> None:
    """The same object twice stays one, and needs one block, in lists and dicts and deeper."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": SIZE})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    received = send([tensor, {"again": (tensor, [tensor])}, tensor], queue, reader)
    flip(tensor)
    first = received[0]
    others = [received[1]["again"][0], received[1]["again"][1][0], received[2]]
    assert [id(first)] * 3 == [id(each) for each in others]
    assert (place, 0) == (place_of(first), queue.stats().fallbacks)
    check(first, 1)


def test_the_same_tensor_in_two_messages(make_queue: MakeQueue) -> None:
    """Enqueued again it is copied, as it is then, and what was received before stays."""
    queue, readers = make_queue(**{**SETTINGS, "n_readers": 2})
    tensor = new_tensor(queue, 0)
    received = []
    for number in range(4):
        tensor.numpy()[:] = pattern(number)
        queue.enqueue([number, tensor], PATIENCE_S)
    flip(tensor)
    for reader in readers:
        received += [reader.dequeue(PATIENCE_S) for _ in range(4)]
    for number, each in received:
        check(each, number)
    assert 4 == len({place_of(each) for _, each in received})
    assert 0 == queue.stats().fallbacks
    del received, each
    assert 1 == blocks_left(queue, readers)  # the writer's tensor
    assert np.array_equal(pattern(3) ^ 0xFF, tensor.numpy())
    del tensor
    assert 0 == blocks_left(queue, readers)


def test_two_of_them_in_one_message(pair: tuple[MessageQueue, MessageReader]) -> None:
    """Several tensors of `empty` and ordinary ones in one message each keep their own bytes."""
    queue, reader = pair
    tensors = [new_tensor(queue, seed) for seed in range(3)]
    places = [place_of(tensor) for tensor in tensors]
    message = {
        "state": dict(enumerate(tensors)),
        "ordinary": torch.from_numpy(pattern(3)),
        "small": torch.arange(5),
    }
    received = send(message, queue, reader)
    for tensor in tensors:
        flip(tensor)
    assert places == [place_of(each) for each in received["state"].values()]
    for seed, each in received["state"].items():
        check(each, seed)
    check(received["ordinary"], 3)
    assert torch.equal(torch.arange(5), received["small"])


@pytest.mark.parametrize("kind", ["attribute", "gradient", "subclass"])
def test_a_tensor_that_torch_reduces_itself(
    pair: tuple[MessageQueue, MessageReader], kind: str
) -> None:
    """A tensor with other state goes as torch does it, by a copy, and may be changed afterwards."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    sent: Any = tensor.view(torch.float32)
    sent.numpy()[:] = 2.5
    if kind == "attribute":
        sent.name_of_mine = "x"
    elif kind == "gradient":
        sent.requires_grad_()
    else:
        sent = sent.as_subclass(torch.nn.Buffer)
    received = send(sent, queue, reader)
    flip(tensor)
    assert [2.5] == received.detach().unique().tolist()
    assert is_shared(tensor)


# --- afterwards ----------------------------------------------------------------------------------

N_ROUNDS = 150
ATTACK_BYTES = 512 * KIB


def check_each(pipe: Connection, handle: Handle, n_rounds: int) -> None:
    """Check every byte of every message, then overwrite it; the last ones stay, and are checked."""
    kept: list[tuple[int, np.ndarray[Any, Any]]] = []
    with MessageQueue.create_from_handle(handle, 0) as reader:
        for _ in range(n_rounds):
            number, tensor = reader.dequeue(PATIENCE_S)
            array = tensor.numpy()
            kept.append((number, array))
            for each_number, each in kept:
                if not np.array_equal(pattern(each_number, ATTACK_BYTES), each):
                    pipe.send(f"message {each_number} is wrong at message {number}")
                    return
            if len(kept) == 3:
                kept.pop(0)[1].fill(0xAA)
            if number % 2:
                kept.pop()[1].fill(0xBB)
    pipe.send("all right")


@pytest.mark.parametrize("receive", ["private", "copy"])
def test_nobody_sees_what_the_writer_does_afterwards(start_child: StartChild, receive: str) -> None:
    """A thread overwrites the tensor at once, readers overwrite theirs, and no byte is wrong."""
    config = QueueConfig(
        **{**SETTINGS, "arena_bytes": 12 * ATTACK_BYTES, "receive": receive, "n_readers": 2}
    )
    jobs: list[np.ndarray[Any, Any]] = []
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def overwrite() -> None:
        for number in range(N_ROUNDS):
            go.acquire()
            jobs[number].fill(0xEE)
            done.release()

    thread = threading.Thread(target=overwrite)
    with MessageQueue(config) as queue:
        handle = queue.export_handle()
        child = start_child(check_each, handle, N_ROUNDS, method="fork")
        thread.start()
        with MessageQueue.create_from_handle(handle, 1) as reader:
            queue.wait_until_ready(PATIENCE_S)
            wrong = []
            n_placed = 0
            for number in range(N_ROUNDS):
                tensor = queue.empty((ATTACK_BYTES,), torch.uint8)
                n_placed += place_of(tensor) is not None
                array = tensor.numpy()
                array[:] = pattern(number, ATTACK_BYTES)
                jobs.append(array)
                queue.enqueue((number, tensor), PATIENCE_S)
                go.release()
                number_received, received = reader.dequeue(PATIENCE_S)
                if not np.array_equal(pattern(number_received, ATTACK_BYTES), received.numpy()):
                    wrong.append(number_received)
                received.numpy().fill(0xCC)
                done.acquire()
                if set(np.unique(array)) != {0xEE}:
                    wrong.append(-number)
                if not np.all(received.numpy() == 0xCC):
                    wrong.append(number)
                if number % 3:
                    jobs[-1] = array[:0].copy()
                elif number >= 9:
                    jobs[number - 9] = array[:0].copy()
        thread.join(PATIENCE_S)
        assert [] == wrong
        assert "all right" == child.receive()
        # The writer is slower than its readers, so there is nearly always a block.
        assert n_placed > N_ROUNDS // 2


def test_writing_through_all_of_enqueue_ends_with_it(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """A thread that never stops to write to the tensor changes nothing once `enqueue` returned."""
    queue, reader = pair
    is_over = threading.Event()
    arrays: list[np.ndarray[Any, Any]] = []

    def write() -> None:
        value = 0
        while not is_over.is_set():
            for array in arrays[-1:]:
                value = (value + 1) % 256
                array.fill(value)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(60):
            tensor = queue.empty((SIZE,), torch.uint8)
            arrays[:] = [tensor.numpy()]
            queue.enqueue(tensor)
            received = reader.dequeue(PATIENCE_S)
            first = bytes_of(received)
            for _ in range(3):
                is_over.wait(0.001)  # the writing thread goes on meanwhile
                assert first == bytes_of(received)
            del received
    finally:
        is_over.set()
        thread.join(PATIENCE_S)


def test_what_a_reader_writes_is_its_own(make_queue: MakeQueue) -> None:
    """Readers and the writer each overwrite the same block, and nobody sees another's bytes."""
    queue, readers = make_queue(**{**SETTINGS, "n_readers": 3})
    tensor = new_tensor(queue, 1)
    queue.enqueue(tensor)
    received = [reader.dequeue(PATIENCE_S) for reader in readers]
    assert 1 == len({place_of(each) for each in [tensor, *received]})
    for number, each in enumerate([tensor, *received[:2]]):
        each.numpy().fill(number)
    assert [{0}, {1}, {2}] == [set(bytes_of(each)) for each in [tensor, *received[:2]]]
    check(received[2], 1)
    del received, each
    # The pages that the readers wrote do not show in the block's next use.
    del tensor
    assert 0 == blocks_left(queue, readers)
    again = new_tensor(queue, 2)
    queue.enqueue(again)
    for reader in readers:
        check(reader.dequeue(PATIENCE_S), 2)


# --- whose block is it ---------------------------------------------------------------------------


def test_one_that_is_never_enqueued_gives_its_block_back(make_queue: MakeQueue) -> None:
    """The block of a tensor that is dropped is free again at once, and is never anybody's else."""
    queue, readers = make_queue(**{**SETTINGS, "arena_bytes": SIZE})
    places = set()
    for seed in range(20):
        tensor = new_tensor(queue, seed)
        places.add(place_of(tensor))
        assert place_of(queue.empty((SIZE,), torch.uint8)) is None
        check(tensor, seed)
        del tensor
    assert 1 == len(places)
    assert 0 == blocks_left(queue, readers)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_block_is_free_when_all_are_done(make_queue: MakeQueue, order: tuple[int, ...]) -> None:
    """Tensor and readers let go in any order, and only then the block is used again."""
    queue, readers = make_queue(**{**SETTINGS, "n_readers": 2})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    queue.enqueue(tensor)
    holders: dict[int, Any] = {0: tensor}
    holders.update({rank + 1: reader.dequeue() for rank, reader in enumerate(readers)})
    del tensor
    for holder in order:
        assert 1 == blocks_left(queue, readers)
        other = queue.empty((SIZE,), torch.uint8)
        assert place != place_of(other)
        other.numpy().fill(0)
        del other
        for each in holders.values():
            check(each, 1)
        del each, holders[holder]
    assert 0 == blocks_left(queue, readers)
    assert place == place_of(queue.empty((SIZE,), torch.uint8))


def test_any_view_keeps_the_block(pair: tuple[MessageQueue, MessageReader]) -> None:
    """A slice, an array or a memoryview that outlives the tensor keeps the block, bytes and all."""
    queue, reader = pair
    for make in (
        lambda tensor: tensor[100:300],
        lambda tensor: tensor.numpy()[100:300],
        lambda tensor: memoryview(tensor.numpy())[100:300],
        lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)[100:300],
        lambda tensor: tensor.untyped_storage()[100:300],
    ):
        for is_sent in (False, True):
            tensor = new_tensor(queue, 1)
            if is_sent:
                send(tensor, queue, reader)
            view = make(tensor)
            del tensor
            others = [queue.empty((SIZE,), torch.uint8).fill_(0) for _ in range(6)]
            assert 7 == blocks_left(queue, [reader])
            assert bytes(pattern(1)[100:300]) == bytes(view)
            del others, view
            assert 0 == blocks_left(queue, [reader])


def test_one_that_is_dropped_before_its_message_is_read(make_queue: MakeQueue) -> None:
    """The message stays whole though the tensor is gone and others are made and filled."""
    queue, readers = make_queue(**{**SETTINGS, "n_readers": 2})
    for seed in range(3):
        queue.enqueue(new_tensor(queue, seed))
    others = [new_tensor(queue, seed) for seed in range(3, 8)]
    assert place_of(queue.empty((SIZE,), torch.uint8)) is None
    for reader in readers:
        for seed in range(3):
            check(reader.dequeue(PATIENCE_S), seed)
    for seed, tensor in enumerate(others, 3):
        check(tensor, seed)
    del others, tensor
    assert 0 == blocks_left(queue, readers)


def test_one_that_is_dropped_in_another_thread(make_queue: MakeQueue) -> None:
    """Tensors that die in another thread, while this one goes on, give their blocks back."""
    queue, (reader,) = make_queue(**SETTINGS)
    handed: list[torch.Tensor] = []
    turn = threading.Semaphore(0)
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set():
            turn.acquire(timeout=PATIENCE_S)
            while handed:
                handed.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        for seed in range(300):
            tensor = queue.empty((SIZE,), torch.uint8)
            array = tensor.numpy()
            array[:] = seed % 251
            if seed % 3 == 0:
                queue.enqueue(tensor)
            handed.append(tensor)
            del tensor, array
            turn.release()
            # What is allocated just now may lie where the dropped one was mapped.
            ordinary = bytearray([seed % 256]) * SIZE
            received = send(pickle.PickleBuffer(ordinary), queue, reader)
            if seed % 3 == 0:
                assert {seed % 251} == set(bytes_of(received))
                received = reader.dequeue(PATIENCE_S)
            assert ordinary == memoryview(received)
            del received
    finally:
        is_over.set()
        turn.release()
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
    handed.clear()
    assert 0 == blocks_left(queue, [reader])


def test_one_in_a_garbage_cycle(pair: tuple[MessageQueue, MessageReader]) -> None:
    """The collector gives the blocks of a cycle back, published or not."""
    queue, reader = pair
    gc.collect()
    for is_sent in (False, True):
        tensor = new_tensor(queue, 1)
        if is_sent:
            check(send(tensor, queue, reader), 1)
        cycle: list[Any] = [tensor, queue, reader]
        cycle.append(cycle)
        del tensor, cycle
    assert 2 == blocks_left(queue, [reader])
    gc.collect()
    assert 0 == blocks_left(queue, [reader])


def test_a_queue_in_a_cycle_with_its_tensor() -> None:
    """A queue that is never closed goes with the cycle that it and its tensor are in."""
    gc.collect()
    before = memory_files()
    queue = MessageQueue(QueueConfig(**SETTINGS))
    cycle: list[Any] = [queue, new_tensor(queue, 1)]
    cycle.append(cycle)
    assert len(before) < len(memory_files())
    del queue, cycle
    gc.collect()
    assert before == memory_files()


def memory_files() -> set[str]:
    """The memory files of shmcast that this process has open or mapped, by inode."""
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:shmcast" in line:
            found.add(line.split()[4])
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:shmcast" in str(path.readlink()):
                found.add(str(path.stat().st_ino))
    return found


def test_the_memory_of_a_closed_queue_goes_with_its_last_tensor() -> None:
    """When the tensors of a closed queue are gone its memory is free, though the ends live on."""
    gc.collect()
    before = memory_files()
    queue = MessageQueue(QueueConfig(**SETTINGS))
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue.wait_until_ready(PATIENCE_S)
    tensors = [new_tensor(queue, 1), new_tensor(queue, 2)]
    received = send(tensors[0], queue, reader)
    queue.close()
    reader.close()
    del received
    assert len(before) < len(memory_files())
    check(tensors[0], 1)
    check(tensors[1], 2)
    del tensors
    gc.collect()
    assert before == memory_files()
    assert (True, True) == (queue.closed, reader.closed)


def test_one_that_outlives_its_queue(make_queue: MakeQueue) -> None:
    """After the queue's end a tensor is written and read on, while other queues come and go."""
    queue = MessageQueue(QueueConfig(**SETTINGS))
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue.wait_until_ready(PATIENCE_S)
    unsent, sent, unread = (new_tensor(queue, seed) for seed in range(3))
    received = send(sent, queue, reader)
    queue.enqueue(unread)
    queue.close()
    for number in range(4):
        other, (other_reader,) = make_queue(**SETTINGS)
        others = [new_tensor(other, 10 + seed) for seed in range(3)]
        for each, seed in ((unsent, 0), (sent, 1), (unread, 2), (received, 1)):
            check(each, seed)
        for each in (unsent, sent, unread):
            flip(each)
        # On another queue it is a tensor like any other.
        again = send([unsent, sent], other, other_reader)
        for each in (unsent, sent, unread):
            flip(each)
        for seed, each in enumerate(again):
            assert np.array_equal(pattern(seed) ^ 0xFF, each.numpy())
        for seed, each in enumerate(others):
            check(each, 10 + seed)
        if number == 1:
            check(reader.dequeue(PATIENCE_S), 2)
            reader.close()
        other_reader.close()
        other.close()
        del others, again, each
    check(received, 1)
    with pytest.raises(QueueClosed):
        queue.enqueue(unsent)
    check(unsent, 0)


def test_one_of_another_queue_is_copied(make_queue: MakeQueue) -> None:
    """A tensor of one queue goes through another by a copy, and both can still publish theirs."""
    queue_a, (reader_a,) = make_queue(**SETTINGS)
    queue_b, (reader_b,) = make_queue(**SETTINGS)
    of_a, of_b = new_tensor(queue_a, 1), new_tensor(queue_b, 2)
    place_a, place_b = place_of(of_a), place_of(of_b)
    assert place_a is not None
    assert place_b is not None
    assert place_a[1] == place_b[1]  # the same offset in two files
    received = send([of_a, of_b], queue_b, reader_b)
    check(received[0], 1)
    check(received[1], 2)
    assert (place_b, False) == (place_of(received[1]), is_shared(of_b))
    assert place_of(received[0]) not in (place_a, place_b)
    flip(of_a)
    assert is_shared(of_a)
    check(received[0], 1)
    whole = send(of_a, queue_a, reader_a)
    assert place_a == place_of(whole)
    flip(of_a)
    assert np.array_equal(pattern(1) ^ 0xFF, whole.numpy())
    check(of_a, 1)
    again = send(of_a, queue_b, reader_b)
    check(again, 1)
    del of_a, of_b, received, whole, again
    assert [0, 0] == [blocks_left(queue_a, [reader_a]), blocks_left(queue_b, [reader_b])]


def test_two_queues_publish_the_same_tensor_at_once(make_queue: MakeQueue) -> None:
    """While one queue makes the tensor private, another one copies it, and both bring it whole."""
    queue_a, (reader_a,) = make_queue(**SETTINGS)
    queue_b, (reader_b,) = make_queue(**SETTINGS)
    barrier = threading.Barrier(2)
    tensors: list[torch.Tensor] = []

    def enqueue_on_b() -> None:
        for number in range(60):
            barrier.wait(PATIENCE_S)
            queue_b.enqueue(tensors[number], PATIENCE_S)
            barrier.wait(PATIENCE_S)

    thread = threading.Thread(target=enqueue_on_b)
    thread.start()
    for number in range(60):
        tensors.append(new_tensor(queue_a, number))
        barrier.wait(PATIENCE_S)
        queue_a.enqueue(tensors[number], PATIENCE_S)
        barrier.wait(PATIENCE_S)
        flip(tensors[number])
        for reader in (reader_a, reader_b):
            check(reader.dequeue(PATIENCE_S), number)
        tensors[number] = torch.empty(0)
    thread.join(PATIENCE_S)


def test_a_readers_end_gives_the_block_back(make_queue: MakeQueue) -> None:
    """A reader that closes keeps the tensor in its hands, and its block until it drops it."""
    queue, (first, second) = make_queue(**{**SETTINGS, "n_readers": 2})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    queue.enqueue(tensor)
    received = [reader.dequeue(PATIENCE_S) for reader in (first, second)]
    first.close()
    queue.enqueue("unread")
    second.close()
    del tensor
    third = MessageQueue.create_from_handle(queue.export_handle(), 0)
    fourth = MessageQueue.create_from_handle(queue.export_handle(), 1)
    with third, fourth:
        queue.wait_until_ready(PATIENCE_S)
        assert 1 == blocks_left(queue, [third, fourth])
        assert place != place_of(new_tensor(queue, 2))
        for each in received:
            check(each, 1)
        received.clear()
        del each
        assert 0 == blocks_left(queue, [third, fourth])
        assert place == place_of(new_tensor(queue, 3))


def hold_and_wait(pipe: Connection, handle: Handle) -> None:
    reader = MessageQueue.create_from_handle(handle, 0)
    tensor = reader.dequeue(PATIENCE_S)
    pipe.send(bytes_of(tensor))
    pipe.recv()


def test_a_readers_death_gives_the_block_back(start_child: StartChild) -> None:
    """A reader that is killed holds no block, and the writer's tensor is as it was."""
    with MessageQueue(QueueConfig(**SETTINGS)) as queue:
        child = start_child(hold_and_wait, queue.export_handle(), method="fork")
        queue.wait_until_ready(PATIENCE_S)
        tensor = new_tensor(queue, 1)
        place = place_of(tensor)
        queue.enqueue(tensor)
        assert pattern(1).tobytes() == child.receive()
        child.kill()
        unsent = new_tensor(queue, 2)
        notice_loss(queue)
        check(tensor, 1)
        check(unsent, 2)
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            del tensor
            assert 1 == blocks_left(queue, [reader])
            assert place == place_of(queue.empty((SIZE,), torch.uint8))


def notice_loss(queue: MessageQueue) -> None:
    """Publish until the writer has noticed that its only reader has gone."""
    with contextlib.suppress(ReaderLost):
        for number in itertools.count():
            queue.enqueue(number, PATIENCE_S)


def write_and_die(pipe: Connection) -> None:
    queue = MessageQueue(QueueConfig(**SETTINGS))
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    sent, unsent = new_tensor(queue, 1), new_tensor(queue, 2)
    queue.enqueue([sent, "first"])
    flip(sent)
    queue.enqueue("second")
    pipe.send("done")
    pipe.recv()
    del unsent


def test_the_writers_death_changes_nothing(start_child: StartChild) -> None:
    """What was published before SIGKILL arrives, and stays; what was not published does not."""
    child = start_child(write_and_die, method="fork")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        assert "done" == child.receive()
        child.kill()
        tensor, text = reader.dequeue(PATIENCE_S)
        assert ("first", "second") == (text, reader.dequeue(PATIENCE_S))
        check(tensor, 1)
        with pytest.raises(shmcast.WriterLost):
            reader.dequeue(PATIENCE_S)
        check(tensor, 1)


# --- when enqueue fails --------------------------------------------------------------------------


class Unpicklable:
    """What cannot be pickled, and says so late: after what stands before it."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise ZeroDivisionError("on purpose")


def check_still_unsent(tensor: torch.Tensor, seed: int, place: Any) -> None:
    """A tensor is as before: its bytes, its block, and still shared."""
    check(tensor, seed)
    assert place == place_of(tensor)
    assert is_shared(tensor)


@pytest.mark.parametrize("timeout", [0, 0.02])
def test_a_full_ring_leaves_it_as_it_was(make_queue: MakeQueue, timeout: float) -> None:
    """After QueueFull nobody got it; changed, it is published later, and then without a copy."""
    queue, (reader,) = make_queue(**{**SETTINGS, "n_chunks": 2, "arena_bytes": 3 * SIZE})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    for number in range(2):
        queue.enqueue(number)
    for _ in range(3):
        with pytest.raises(QueueFull):
            queue.enqueue([tensor, tensor[:THRESHOLD]], timeout)
        with pytest.raises(QueueFull):
            queue.enqueue(tensor, timeout)
    check_still_unsent(tensor, 1, place)
    assert (0, 1, (0,)) == (
        queue.stats().fallbacks,
        queue.stats().blocks_in_use,
        queue.stats().blocks_held,
    )
    assert [0, 1] == [reader.dequeue(PATIENCE_S) for _ in range(2)]
    # Others come and go meanwhile, and none gets this tensor's block.
    for seed in range(10, 14):
        others = [send(new_tensor(queue, seed), queue, reader), new_tensor(queue, seed)]
        assert place not in {place_of(other) for other in others}
        del others
    check_still_unsent(tensor, 1, place)
    tensor.numpy()[:] = pattern(2)
    received = send(tensor, queue, reader)
    flip(tensor)
    assert place == place_of(received)
    check(received, 2)
    assert 0 == queue.stats().fallbacks
    del tensor, received
    assert 0 == blocks_left(queue, [reader])


def test_it_may_be_dropped_after_a_full_ring(make_queue: MakeQueue) -> None:
    """The block of a tensor whose `enqueue` failed is free when the tensor is gone."""
    queue, (reader,) = make_queue(**{**SETTINGS, "n_chunks": 1})
    for _ in range(3):
        queue.enqueue("full")
        tensor = new_tensor(queue, 1)
        with pytest.raises(QueueFull) as caught:
            queue.enqueue(tensor, 0)
        assert (0,) == caught.value.ranks
        del tensor, caught
        assert "full" == reader.dequeue(PATIENCE_S)
    assert 0 == blocks_left(queue, [reader])


def test_an_unpicklable_neighbour_leaves_it_as_it_was(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """When pickling fails after it, the tensor is not published and can be, without a copy."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    for message in (
        [tensor, Unpicklable()],
        [Unpicklable(), tensor],
        {"a": tensor[::2], "b": tensor, "c": Unpicklable()},
    ):
        with pytest.raises(ZeroDivisionError):
            queue.enqueue(message)
        check_still_unsent(tensor, 1, place)
        assert 1 == queue.stats().blocks_in_use
    received = send([tensor, "and the rest"], queue, reader)
    flip(tensor)
    assert (place, "and the rest") == (place_of(received[0]), received[1])
    check(received[0], 1)


def test_a_closed_queue_leaves_it_as_it_was(pair: tuple[MessageQueue, MessageReader]) -> None:
    """`enqueue` on a closed queue changes nothing: the tensor is written and read as before."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    queue.close()
    with pytest.raises(QueueClosed):
        queue.enqueue(tensor)
    check_still_unsent(tensor, 1, place)
    flip(tensor)
    flip(tensor)
    check(tensor, 1)
    with pytest.raises(QueueClosed):
        reader.dequeue(PATIENCE_S)


def test_nobody_left_to_publish_to_leaves_it_as_it_was(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """After ReaderLost the tensor goes to the next reader, without a copy."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    reader.close()
    notice_loss(queue)  # what is published before that is for nobody
    for _ in range(3):
        with pytest.raises(ReaderLost):
            queue.enqueue(tensor, PATIENCE_S)
        check_still_unsent(tensor, 1, place)
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as other:
        queue.wait_until_ready(PATIENCE_S)
        received = send(tensor, queue, other)
        assert place == place_of(received)
        check(received, 1)


def test_a_message_that_takes_a_file_leaves_it_as_it_was(make_queue: MakeQueue) -> None:
    """When a neighbour finds no block, all goes by a file, and the tensor stays unpublished."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": SIZE})
    tensor = new_tensor(queue, 1)
    place = place_of(tensor)
    received = send([tensor, torch.from_numpy(pattern(2))], queue, reader)
    assert 1 == queue.stats().fallbacks
    flip(tensor)
    check(received[0], 1)
    check(received[1], 2)
    assert is_shared(tensor)
    flip(tensor)
    whole = send(tensor, queue, reader)
    flip(tensor)
    assert (place, 1) == (place_of(whole), queue.stats().fallbacks)
    check(whole, 1)
    del tensor, whole
    assert 0 == blocks_left(queue, [reader])


def test_a_second_view_without_a_block_of_its_own(make_queue: MakeQueue) -> None:
    """Two views in an arena with one block arrive whole, whichever way they go."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": SIZE})
    tensor = new_tensor(queue, 1)
    received = send([tensor, tensor.view(torch.int32)], queue, reader)
    flip(tensor)
    check(received[0], 1)
    assert pattern(1).tobytes() == raw(received[1])


# --- interrupted at any line ---------------------------------------------------------------------


class Interrupted(BaseException):
    """What a signal handler raises."""


#: After these instructions the interpreter looks for signals, if it called no Python function.
LOOKS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}


@contextlib.contextmanager
def interrupted_at(number: int) -> Iterator[list[str]]:
    """Raise where a handler may run for the n-th time in the package's code; says where it was."""
    where: list[str] = []
    package = str(Path(shmcast.__file__).parent)
    count = 0
    last: dict[FrameType | None, str] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        code = frame.f_code
        if event == "call":
            last.pop(frame.f_back, None)
        if not code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += last.get(frame) in LOOKS
            last[frame] = dis.opname[code.co_code[frame.f_lasti]]
            if count == number and not where:
                where.append(f"{Path(code.co_filename).name}:{frame.f_lineno}")
                raise Interrupted
        return trace

    try:
        with tracing(trace):
            yield where
    finally:
        last.clear()


def room(queue: MessageQueue) -> int:
    """How many tensors of the least size find a block."""
    tensors = []
    while place_of(tensor := queue.empty((THRESHOLD,), torch.uint8)) is not None:
        tensors.append(tensor)
    return len(tensors)


def test_empty_is_interrupted_anywhere(make_queue: MakeQueue) -> None:
    """A signal handler that raises anywhere in `empty` costs no block, and the queue goes on."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 3 * THRESHOLD})
    lost = []
    for number in itertools.count(1):
        tensor = None
        with contextlib.suppress(Interrupted), interrupted_at(number) as where:
            tensor = queue.empty((THRESHOLD,), torch.uint8)
        del tensor
        if not where:
            break
        assert 0 == blocks_left(queue, [reader]), where
        if room(queue) < 3:
            lost += where
            queue.close()
            queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 3 * THRESHOLD})
    assert number > 20
    assert [] == lost


def test_enqueue_is_interrupted_anywhere(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever `enqueue` is interrupted, the tensor was published and is private, or neither."""
    # So that every enqueue has the same points.
    monkeypatch.setattr(shmcast.writer, "_LOOK_PAUSE_NS", 10**15)
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 3 * THRESHOLD})
    n_published = 0
    for number in itertools.count(1):
        tensor = new_tensor(queue, number, 2 * THRESHOLD)
        place = place_of(tensor)
        with contextlib.suppress(Interrupted), interrupted_at(number) as where:
            queue.enqueue([tensor, tensor[THRESHOLD:]], PATIENCE_S)
        flip(tensor)
        if reader.stats().lag:
            n_published += 1
            received = reader.dequeue(PATIENCE_S)
        else:
            flip(tensor)
            check_still_unsent(tensor, number, place)
            received = send([tensor, tensor[THRESHOLD:]], queue, reader)
            flip(tensor)
        assert place == place_of(received[0]), where
        expected = pattern(number, 2 * THRESHOLD)
        assert np.array_equal(expected, received[0].numpy()), where
        assert np.array_equal(expected[THRESHOLD:], received[1].numpy()), where
        del tensor, received
        if not where:
            break
        blocks_left(queue, [reader])  # which may find the interrupted message on its way still
        assert (0, 3) == (blocks_left(queue, [reader]), room(queue)), where
    assert number > 50
    assert n_published > 1


# --- calls that are refused or wait --------------------------------------------------------------


class CallsBack:
    """What calls its queue while it is pickled."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        self._call()
        return (int, ())


@pytest.mark.parametrize("n_bytes", [SIZE, 10, 0])
def test_not_while_a_message_is_pickled(
    pair: tuple[MessageQueue, MessageReader], n_bytes: int
) -> None:
    """`empty` from inside `enqueue` raises ShmcastError, and the queue goes on."""
    queue, reader = pair
    with pytest.raises(ShmcastError) as caught:
        queue.enqueue(CallsBack(lambda: queue.empty((n_bytes,), torch.uint8)))
    assert not isinstance(caught.value, QueueClosed)
    tensor = new_tensor(queue, 1)
    check(send(tensor, queue, reader), 1)
    del tensor
    assert 0 == blocks_left(queue, [reader])


@pytest.mark.parametrize("shape", [(SIZE,), (3,), ()], ids=str)
def test_not_of_a_closed_queue(
    pair: tuple[MessageQueue, MessageReader], shape: tuple[int, ...]
) -> None:
    """`empty` of a closed queue raises QueueClosed, for small tensors too."""
    queue, _ = pair
    queue.close()
    with pytest.raises(QueueClosed):
        queue.empty(shape, torch.uint8)


def test_close_ends_the_wait_of_empty(make_queue: MakeQueue) -> None:
    """While another thread waits for the ring, `empty` waits for it; `close` ends both."""
    queue, _ = make_queue(**{**SETTINGS, "n_chunks": 1})
    queue.enqueue("full")
    errors: list[BaseException] = []
    tensor = new_tensor(queue, 1)

    def call(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=call, args=(lambda: queue.enqueue(tensor),))
    waiting.start()
    while not queue.stats().waits:
        waiting.join(0.001)
        assert waiting.is_alive()
    asking = threading.Thread(target=call, args=(lambda: queue.empty((SIZE,), torch.uint8),))
    asking.start()
    queue.close()
    for thread in (waiting, asking):
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [QueueClosed] * 2 == [type(error) for error in errors]
    check(tensor, 1)


def test_many_threads_at_once(make_queue: MakeQueue) -> None:
    """Threads that call `empty` and enqueue at once never get the same block."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 64 * THRESHOLD})
    n_threads, n_rounds = 4, 60
    failures: list[str] = []
    barrier = threading.Barrier(n_threads + 1)

    def work(number: int) -> None:
        barrier.wait(PATIENCE_S)
        kept: list[tuple[int, np.ndarray[Any, Any]]] = []
        for count in range(n_rounds):
            tensor = queue.empty((THRESHOLD,), torch.uint8)
            array = tensor.numpy()
            value = (number * n_rounds + count) % 251
            array.fill(value)
            kept.append((value, array))
            if count % 2:
                queue.enqueue((value, tensor), PATIENCE_S)
            if len(kept) > 5:
                kept.pop(0)
            failures.extend(
                f"{number}: {each}" for each, array in kept if not np.all(array == each)
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    barrier.wait(PATIENCE_S)
    for _ in range(n_threads * n_rounds // 2):
        value, tensor = reader.dequeue(PATIENCE_S)
        if not np.all(tensor.numpy() == value):
            failures.append(f"reader: {value}")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [] == failures
    del tensor, threads, thread
    assert 0 == blocks_left(queue, [reader])


# --- forked children -----------------------------------------------------------------------------


def see_and_write(pipe: Connection, arrays: list[np.ndarray[Any, Any]]) -> None:
    """Send what the arrays show, write to them, and do so again when told."""
    for number in itertools.count(1):
        pipe.send([array.tobytes() for array in arrays])
        if pipe.recv() == "end":
            return
        for array in arrays:
            array.fill(number)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_child_forked_before_and_after_enqueue(
    start_child: StartChild, make_queue: MakeQueue, is_read: bool
) -> None:
    """Parent, child and reader each keep what they had at the fork, whoever writes when."""
    queue, (reader,) = make_queue(**SETTINGS)
    sent, unsent = new_tensor(queue, 1), new_tensor(queue, 2)
    place = place_of(unsent)
    queue.enqueue(sent)
    received = reader.dequeue(PATIENCE_S) if is_read else None
    flip(sent)
    flip(unsent)
    expected = [(pattern(seed) ^ 0xFF).tobytes() for seed in (1, 2)]
    child = start_child(see_and_write, [sent.numpy(), unsent.numpy()], method="fork")
    # The parent writes first, then the child, then the parent publishes.
    sent.numpy().fill(101)
    unsent.numpy()[:] = pattern(3)
    assert expected == child.receive()
    child.pipe.send("write")
    assert [bytes([1]) * SIZE] * 2 == child.receive()
    assert {101} == set(bytes_of(sent))
    check_still_unsent(unsent, 3, place)
    queue.enqueue(unsent)
    child.pipe.send("write")
    assert [bytes([2]) * SIZE] * 2 == child.receive()
    flip(unsent)
    if received is None:
        received = reader.dequeue(PATIENCE_S)
    check(received, 1)
    published = reader.dequeue(PATIENCE_S)
    assert place == place_of(published)
    check(published, 3)
    # The blocks are used again, and the child still has its own.
    del sent, unsent, received, published
    assert 0 == blocks_left(queue, [reader])
    for seed in range(8):
        send(new_tensor(queue, seed), queue, reader)
    child.pipe.send("write")
    assert [bytes([3]) * SIZE] * 2 == child.receive()
    child.pipe.send("end")
    assert 0 == child.join()


def look_when_told(pipe: Connection, arrays: list[np.ndarray[Any, Any]]) -> None:
    while pipe.recv() != "end":
        pipe.send([array.tobytes() for array in arrays])


def test_a_child_that_only_looks_when_the_blocks_are_used_again(
    start_child: StartChild, make_queue: MakeQueue
) -> None:
    """What a child has not touched yet stays when its parent drops and reuses the blocks."""
    queue, (reader,) = make_queue(**{**SETTINGS, "arena_bytes": 3 * SIZE})
    sent, unsent, flipped = (new_tensor(queue, seed) for seed in range(3))
    send(sent, queue, reader)
    send(flipped, queue, reader)
    flipped.numpy()[: SIZE // 2] = 0
    arrays = [each.numpy() for each in (sent, unsent, flipped)]
    child = start_child(look_when_told, arrays, method="fork")
    expected = [each.tobytes() for each in arrays]
    del sent, unsent, flipped, arrays
    for seed in range(10, 13):
        send(new_tensor(queue, seed), queue, reader)
    others = [new_tensor(queue, seed) for seed in range(3)]
    for each in others:
        each.numpy().fill(0xAB)
    child.pipe.send("look")
    assert expected == child.receive()
    child.pipe.send("end")
    assert 0 == child.join()


def drop_in_child(pipe: Connection, tensors: list[torch.Tensor]) -> None:
    """Let go of inherited tensors, and use the memory where they were."""
    tensors.clear()
    gc.collect()
    others = [bytearray([7]) * SIZE for _ in range(20)]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(set(other) == {7} for other in others) else 1)
    pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_child_that_drops_what_it_inherited(
    start_child: StartChild, pair: tuple[MessageQueue, MessageReader]
) -> None:
    """A child lets its tensors go, and forks itself, and the parent's are untouched."""
    queue, reader = pair
    tensors = [new_tensor(queue, 1), new_tensor(queue, 2)]
    received = send(tensors[0], queue, reader)
    place = place_of(tensors[1])
    # The parent's list is another one: the child's argument is a copy of this one.
    kept = list(tensors)
    child = start_child(drop_in_child, tensors, method="fork")
    assert 0 == child.receive()
    assert 0 == child.join()
    check(received, 1)
    check(kept[0], 1)
    check_still_unsent(kept[1], 2, place)
    del kept, tensors, received
    assert 0 == blocks_left(queue, [reader])


def fork_again(pipe: Connection, array: np.ndarray[Any, Any]) -> None:
    """A grandchild overwrites the tensor that a child has written before."""
    array.fill(1)
    pid = os.fork()
    if pid == 0:
        is_inherited = bool(np.all(array == 1))
        array.fill(2)
        os._exit(0 if is_inherited else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    pipe.send((status, set(array.tolist())))


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_childs_child(
    start_child: StartChild, pair: tuple[MessageQueue, MessageReader], is_sent: bool
) -> None:
    """Each generation has what its parent had, and writes for itself alone."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    if is_sent:
        check(send(tensor, queue, reader), 1)
    child = start_child(fork_again, tensor.numpy(), method="fork")
    assert (0, {1}) == child.receive()
    check(tensor, 1)


def test_a_forked_child_has_no_empty(
    start_child: StartChild, pair: tuple[MessageQueue, MessageReader]
) -> None:
    """In a child `empty` raises ShmcastError, which names both processes."""
    queue, _ = pair
    child = start_child(call_empty, queue, method="fork")
    text = child.receive()
    assert str(os.getpid()) in text
    assert str(child.pid) in text


def call_empty(pipe: Connection, queue: MessageQueue) -> None:
    try:
        pipe.send(repr(queue.empty((SIZE,), torch.uint8)))
    except ShmcastError as error:
        pipe.send(str(error))


def test_the_parents_fork_costs_no_memory_for_ever(
    start_child: StartChild, pair: tuple[MessageQueue, MessageReader]
) -> None:
    """Forks leave neither mappings nor memory behind in the parent."""
    queue, reader = pair
    tensors = [new_tensor(queue, seed) for seed in range(2)]
    check(send(tensors[0], queue, reader), 0)

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    fork()
    before = usage()
    for _ in range(30):
        fork()
    after = usage()
    assert abs(after["maps"] - before["maps"]) < 10
    assert after["VmSize"] - before["VmSize"] < SIZE // KIB


class HeldFork(threading.Thread):
    """
    A thread that forks, held by the lock that `logging` takes when its turn among the hooks comes.

    That hook is older than shmcast's, so it comes later. The child runs a function and exits.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self._function = function
        self.has_begun = threading.Event()
        self.status: int | None = None

    def run(self) -> None:
        forking.append(self)
        pid = os.fork()
        if pid == 0:
            die_quietly()
            try:
                self._function()
                os._exit(0)
            finally:
                os._exit(1)
        self.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_quietly() -> None:
    """Leave no trace of a child that may have to die of SIGSEGV."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


forking: list[HeldFork] = []
# Younger than shmcast's hooks, so it comes before them.
os.register_at_fork(before=lambda: [fork.has_begun.set() for fork in forking])


@contextlib.contextmanager
def held_forks(*forks: HeldFork) -> Iterator[None]:
    """Start these, and let none go on beyond shmcast's hooks; at the end all have been done."""
    logging._acquireLock()  # type: ignore[attr-defined]  # there is no public way
    try:
        for fork in forks:
            fork.start()
            assert fork.has_begun.wait(PATIENCE_S)
            fork.join(0.1)  # on its way to the lock
        yield
    finally:
        logging._releaseLock()  # type: ignore[attr-defined]
        for fork in forks:
            fork.join(PATIENCE_S)
        forking.clear()


needs_the_lock = pytest.mark.skipif(
    not hasattr(logging, "_acquireLock"), reason="this Python's logging has another lock"
)


@needs_the_lock
def test_one_that_is_made_while_another_thread_forks(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """A child does not write into a tensor that was made while its parent was about to fork."""
    queue, reader = pair
    tensors: list[torch.Tensor] = []
    older = new_tensor(queue, 2)
    making = threading.Thread(target=lambda: tensors.append(new_tensor(queue, 1)))
    # Without the tensor, or without its memory, the child dies.
    with held_forks(HeldFork(lambda: flip(tensors[0]))):
        making.start()
        making.join(0.2)  # it may have to wait for the fork
    making.join(PATIENCE_S)
    check(tensors[0], 1)
    check(older, 2)
    check(send(tensors[0], queue, reader), 1)


@needs_the_lock
def test_one_that_is_published_while_another_thread_forks(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """A child writes to a tensor that was published while it was forked, and nobody sees it."""
    queue, reader = pair
    tensor = new_tensor(queue, 1)
    sending = threading.Thread(target=lambda: queue.enqueue(tensor, PATIENCE_S))
    fork = HeldFork(lambda: flip(tensor))
    with held_forks(fork):
        sending.start()
        sending.join(0.2)
    sending.join(PATIENCE_S)
    check(tensor, 1)
    check(reader.dequeue(PATIENCE_S), 1)
    assert 0 == fork.status


def fork_twice_at_once(pipe: Connection) -> None:
    with MessageQueue(QueueConfig(**SETTINGS)) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        sent, unsent = new_tensor(queue, 1), new_tensor(queue, 2)
        check(send(sent, queue, reader), 1)

        def check_and_write() -> None:
            for seed, tensor in ((1, sent), (2, unsent)):
                check(tensor, seed)
                flip(tensor)

        pipe.send("ready")
        sizes = []
        for _ in range(3):
            forks = [HeldFork(check_and_write) for _ in range(2)]
            with held_forks(*forks):
                pass
            pipe.send([fork.status for fork in forks])
            sizes.append(usage()["VmSize"])
        check(sent, 1)
        check(unsent, 2)
        check(send(unsent, queue, reader), 2)
        pipe.send(sizes[2] - sizes[1])
        reader.close()


@needs_the_lock
def test_two_threads_fork_at_once(start_child: StartChild) -> None:
    """Each of two children has a copy of its own of the parent's tensors, and nothing is left."""
    # In a process of its own, where shmcast is imported last: `concurrent.futures` has a hook with
    # a lock too, which keeps two forks apart where it comes before shmcast's.
    child = start_child(fork_twice_at_once)
    assert "ready" == child.receive()
    for _ in range(3):
        assert [0, 0] == child.receive()
    assert child.receive() < SIZE // KIB
    assert 0 == child.join()


@needs_the_lock
def test_one_that_dies_while_another_thread_forks(
    pair: tuple[MessageQueue, MessageReader],
) -> None:
    """A tensor that is dropped while its process is about to fork leaves no memory behind."""
    queue, reader = pair
    sizes = []
    for _ in range(4):
        tensor = new_tensor(queue, 1)
        with held_forks(HeldFork(int)):
            del tensor
        assert 0 == blocks_left(queue, [reader])
        sizes.append(usage()["VmSize"])
    assert sizes[-1] - sizes[1] < SIZE // KIB


# --- what the kernel refuses ---------------------------------------------------------------------


def fork_without_memory(pipe: Connection) -> None:
    """Fork when there is no room for a copy of a tensor; the child tries to write to it."""
    with MessageQueue(QueueConfig(**{**SETTINGS, "arena_bytes": 256 * SIZE})) as queue:
        tensor = queue.empty((128 * SIZE,), torch.uint8)
        array = tensor.numpy()
        array.fill(1)
        limit = usage()["VmSize"] * KIB + 16 * SIZE
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        logging.disable()
        pid = os.fork()
        if pid == 0:
            die_quietly()
            array.fill(9)  # it may have to die of this
            os._exit(0)
        os.waitpid(pid, 0)
        pipe.send((int(array.min()), int(array.max())))


def test_a_fork_without_room_for_a_copy(start_child: StartChild) -> None:
    """A child that cannot have its own copy of a tensor does not write into its parent's."""
    child = start_child(fork_without_memory, method="fork")
    assert (1, 1) == child.receive()


def empty_without_address_space(pipe: Connection) -> None:
    # Of a size that malloc takes from what it has, once there is some.
    warm = [bytearray(125_000) for _ in range(60)]
    with MessageQueue(QueueConfig(**SETTINGS)) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        send("warm", queue, reader)
        # What is kept of this one's mapping is too small for the next.
        is_in_arena = is_shared(queue.empty((80_000,), torch.uint8))
        send(np.ones(80_000, np.uint8), queue, reader)
        del warm[::2]
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (usage()["VmSize"] * KIB, limits[1]))
        tensor = queue.empty((120_000,), torch.uint8)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        tensor.numpy()[:] = 3
        place, n_blocks = place_of(tensor), queue.stats().blocks_in_use
        received = send(tensor, queue, reader)
        tensor.numpy()[:] = 4
        is_right = bool(np.all(received.numpy() == 3))
        del tensor, received
        pipe.send((is_in_arena, place, n_blocks, is_right, blocks_left(queue, [reader])))
        reader.close()


def test_a_refused_mapping_makes_an_ordinary_tensor(start_child: StartChild) -> None:
    """Where the kernel refuses another mapping the tensor is an ordinary one, and has no block."""
    child = start_child(empty_without_address_space, method="fork")
    is_in_arena, place, n_blocks, is_right, n_left = child.receive()
    assert (True, None, True, 0) == (is_in_arena, place, is_right, n_left)
    assert n_blocks <= 1  # that of the message before


def enqueue_without_mapping(pipe: Connection) -> None:
    """Publish when the kernel refuses to make the tensor private: it must lock what it maps."""
    queue = MessageQueue(QueueConfig(**SETTINGS))
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    first, second = new_tensor(queue, 1), new_tensor(queue, 2)
    address = first.data_ptr()
    other = new_tensor(queue, 3)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
    if os.geteuid() == 0:
        os.setuid(65534)  # root may lock what it wants
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mlockall(2) == 0, ctypes.get_errno()  # MCL_FUTURE
    try:
        queue.enqueue([first, second])
        pipe.send("no error")
    except ShmcastError as error:
        pipe.send(str(error))
    pipe.send(
        [
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.startswith(f"{address:x}-") or f"-{address + SIZE:x} " in line
        ]
    )
    libc.munlockall()
    queue.enqueue(["and on it goes", other])
    other.numpy().fill(0)
    pipe.recv()
    del first, second
    queue.close()


def test_a_tensor_that_cannot_be_made_private(start_child: StartChild) -> None:
    """If the kernel refuses that, `enqueue` says that it was published, and the bytes are safe."""
    child = start_child(enqueue_without_mapping, method="fork")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        received = reader.dequeue(PATIENCE_S)
        text = child.receive()
        assert "published" in text
        lines = child.receive()
        # Nobody can write into what was published: the tensor is inaccessible.
        assert ["---"] == [line.split()[1][:3] for line in lines]
        check(received[0], 1)
        check(received[1], 2)
        text, other = reader.dequeue(PATIENCE_S)
        assert "and on it goes" == text
        check(other, 3)
        child.pipe.send("end")
        assert 0 == child.join()


def publish_with_locked_memory(pipe: Connection) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    queue = MessageQueue(QueueConfig(**{**SETTINGS, "arena_bytes": 16 * SIZE}))
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    if libc.mlockall(3):  # MCL_CURRENT | MCL_FUTURE
        pipe.send("refused")
        return
    for number in range(10):
        tensor = new_tensor(queue, number)
        queue.enqueue((number, tensor), PATIENCE_S)
        flip(tensor)
        assert np.array_equal(pattern(number) ^ 0xFF, tensor.numpy())
    pipe.send("done")
    queue.close()


def test_a_writer_that_locks_its_memory(start_child: StartChild) -> None:
    """After `mlockall` in the writer, tensors of `empty` are published whole as before."""
    child = start_child(publish_with_locked_memory, method="fork")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        received = []
        with contextlib.suppress(QueueClosed, shmcast.WriterLost):
            received += [reader.dequeue(PATIENCE_S) for _ in range(10)]
        if child.receive() == "refused":
            pytest.skip("this user may not lock memory")
        assert list(range(10)) == [number for number, _ in received]
        for number, tensor in received:
            check(tensor, number)


# --- for a long time -----------------------------------------------------------------------------


def usage() -> dict[str, int]:
    """Descriptors, mappings, memory in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    figures = {name: int(status[name].split()[0]) for name in ("VmSize", "RssAnon", "RssShmem")}
    figures["descriptors"] = count_descriptors()
    figures["maps"] = len(Path("/proc/self/maps").read_text().splitlines())
    return figures


@pytest.mark.parametrize("receive", ["private", "copy"])
def test_a_thousand_rounds_leave_nothing_behind(make_queue: MakeQueue, receive: str) -> None:
    """Descriptors, mappings and memory are flat over 1,000 rounds of all kinds of use."""
    queue, readers = make_queue(**{**SETTINGS, "n_readers": 2, "receive": receive})

    def use(number: int) -> None:
        tensor = queue.empty((THRESHOLD,), torch.uint8)
        array = tensor.numpy()
        array[:] = value = number % 251
        kind = number % 5
        if kind == 0:
            return
        message: Any = {1: tensor, 2: tensor[1:], 3: [tensor, tensor[::2]], 4: tensor}[kind]
        if kind == 4:
            with pytest.raises(ZeroDivisionError):
                queue.enqueue([tensor, Unpicklable()])
        for _ in range(2):
            queue.enqueue([message, None], PATIENCE_S)
        array[:] = 255
        for reader in readers:
            for _ in range(2):
                received = reader.dequeue(PATIENCE_S)[0]
                first = received[0] if kind == 3 else received
                assert (value, value) == (first[0], first[-1])
                first[0] = first[-1] = 254

    def settle() -> dict[str, int]:
        gc.collect()
        return usage()

    for number in range(200):
        use(number)
    before = settle()
    for number in range(1000):
        use(number)
    after = settle()
    assert before["descriptors"] == after["descriptors"]
    assert abs(after["maps"] - before["maps"]) < 10
    # One tensor that is kept each round would be 64,000 KiB.
    growths = {name: after[name] - before[name] for name in ("VmSize", "RssAnon", "RssShmem")}
    assert max(growths.values()) < 8 * KIB, growths
    assert 0 == blocks_left(queue, readers)
    assert 0 == queue.stats().fallbacks


AT_EXIT = """
import gc, threading, torch
from shmcast import MessageQueue, QueueConfig

settings = dict(chunk_bytes=32768, oob_threshold_bytes=65536, arena_bytes=2**22)
queue = MessageQueue(QueueConfig(**settings))
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
queue.wait_until_ready(30)
unsent, sent, unread = (queue.empty((262144,), torch.uint8).fill_(n) for n in range(3))
queue.enqueue(sent)
received = reader.dequeue(30)
queue.enqueue(unread)
closed = MessageQueue(QueueConfig(**settings))
outlives = closed.empty((262144,), torch.uint8).fill_(1)
closed.close()
cycle = [queue, queue.empty((262144,), torch.uint8)]
cycle.append(cycle)
gc.disable()
class Late:
    def __init__(self, tensor):
        self.tensor = tensor
        self.bytes = bytes(tensor.numpy()[:3])
    def __del__(self):
        assert self.bytes == bytes(self.tensor.numpy()[:3])
        self.tensor.numpy()[:] = 5
late = Late(queue.empty((262144,), torch.uint8).fill_(4)), Late(outlives), Late(sent)
started = threading.Event()
def hold(tensor):
    started.set()
    threading.Event().wait()
thread = threading.Thread(target=hold, args=(queue.empty((262144,), torch.uint8),), daemon=True)
thread.start()
started.wait(30)
"""


def test_the_interpreter_ends_with_live_tensors() -> None:
    """A process exits with such tensors in globals, cycles, threads and destructors, and well."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        check=False,
    )
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


# --- anything in any order -----------------------------------------------------------------------


class Model:
    """A queue, and what each of its tensors and each received one has to show."""

    def __init__(self, receive: str) -> None:
        self.queue = MessageQueue(
            QueueConfig(
                **{**SETTINGS, "arena_bytes": 10 * THRESHOLD, "n_readers": 2, "receive": receive}
            )
        )
        handle = self.queue.export_handle()
        self.readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(2)]
        self.queue.wait_until_ready(PATIENCE_S)
        self.tensors: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], bool]] = []
        self.received: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self.unread: list[list[np.ndarray[Any, Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for end in (self.queue, *self.readers):
            end.close()

    def new(self, chance: random.Random) -> None:
        n_bytes = THRESHOLD + chance.randrange(2 * THRESHOLD)
        tensor = self.queue.empty((n_bytes,), torch.uint8)
        expected = pattern(chance.randrange(1000), n_bytes)
        tensor.numpy()[:] = expected
        self.tensors.append((tensor.numpy(), expected, place_of(tensor) is not None))

    def write(self, chance: random.Random) -> None:
        everything = [pair[:2] for pair in [*self.tensors, *self.received]]
        if everything:
            array, expected = chance.choice(everything)
            start = chance.randrange(len(array) or 1)
            end = start + chance.choice([1, 5000, len(array)])
            array[start:end] = expected[start:end] = chance.randrange(256)

    def enqueue(self, chance: random.Random) -> None:
        views = []
        for _ in range(chance.randint(1, 3)):
            if self.tensors:
                array, _, _ = chance.choice(self.tensors)
                start = chance.choice([0, 0, 0, 1, 4096])
                end = chance.choice([None, None, len(array) - 1, THRESHOLD, 10])
                views.append(array[start : end : chance.choice([1, 1, 1, 2])])
        as_tensors = [torch.from_numpy(view) for view in views]
        expected = [view.copy() for view in views]
        is_full = len(self.unread) == SETTINGS["n_chunks"]
        try:
            if chance.randrange(8) == 0:
                with pytest.raises(ZeroDivisionError):
                    self.queue.enqueue([as_tensors, Unpicklable()])
            else:
                self.queue.enqueue(as_tensors, 0 if is_full else PATIENCE_S)
                self.unread.append(expected)
        except QueueFull:
            assert is_full

    def dequeue(self, _: random.Random | None = None) -> None:
        if self.unread:
            expected = self.unread.pop(0)
            for reader in self.readers:
                message = reader.dequeue(PATIENCE_S)
                assert len(expected) == len(message)
                self.received += [
                    (tensor.numpy(), each.copy())
                    for tensor, each in zip(message, expected, strict=True)
                ]

    def drop(self, chance: random.Random) -> None:
        for things in (self.tensors, self.received):
            for _ in range(min(len(things), chance.randrange(4))):
                things.pop(chance.randrange(len(things)))

    def check(self) -> None:
        for array, expected in [pair[:2] for pair in [*self.tensors, *self.received]]:
            assert np.array_equal(expected, array)


@pytest.mark.parametrize("receive", ["private", "copy"])
@settings(max_examples=20)
@given(chance=st.randoms(use_true_random=False))
def test_anything_in_any_order(receive: str, chance: random.Random) -> None:
    """However tensors are made, written, sent, received and dropped, each shows its own bytes."""
    with Model(receive) as model:
        actions = [model.new, model.write, model.enqueue, model.dequeue, model.drop]
        weights = [3, 4, 4, 3, 1]
        for action in chance.choices(actions, weights, k=50):
            action(chance)
            model.check()
        while model.unread:
            model.dequeue()
        model.check()
        model.tensors.clear()
        model.received.clear()
        assert 0 == blocks_left(model.queue, model.readers)


def test_a_signal_handler_may_drop_and_fork(pair: tuple[MessageQueue, MessageReader]) -> None:
    """A handler that drops tensors and forks amid the use of the queue spoils nothing."""
    queue, reader = pair
    dropped: list[torch.Tensor] = []
    n_handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal n_handled
        n_handled += 1
        dropped.clear()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.003)

    previous = signal.signal(signal.SIGVTALRM, handle)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.003)
    try:
        number = 0
        while n_handled < 60:
            number += 1
            tensor = new_tensor(queue, number)
            received = send(tensor, queue, reader)
            flip(tensor)
            check(received, number)
            dropped.append(tensor)
            dropped[:-2] = []
            del tensor, received
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    dropped.clear()
    assert 0 == blocks_left(queue, [reader])
