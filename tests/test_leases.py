"""Leases: what a reader received stays its own while it is referenced, and then comes back."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import itertools
import logging
import mmap
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import MAY_FORK, PATIENCE_S, MakeQueue, StartChild, tracing

import shmcast.attachment as attachment_module
import shmcast.queue as queue_module
from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    ReaderLost,
    WriterLost,
)
from shmcast.arena import LEAST_BLOCK_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

PAGE = mmap.PAGESIZE
MIB = 1024**2
BLOCK_BYTES = 10 * LEAST_BLOCK_BYTES  # what most tensors here have: too much to share a block

#: Every buffer that is worth a block gets one; chunks and arena are small.
SMALL: dict[str, Any] = {
    "n_chunks": 4,
    "chunk_bytes": 16384,
    "oob_threshold_bytes": LEAST_BLOCK_BYTES,
    "arena_bytes": 8 * BLOCK_BYTES,
}

Array = np.ndarray[Any, np.dtype[Any]]


def content(number: int, n_bytes: int = BLOCK_BYTES) -> Array:
    """Bytes that differ from those of any other message at every word."""
    return np.arange(n_bytes // 8, dtype=np.int64) * 0x0101_0101 + (number << 44)


def tensor_of(number: int, n_bytes: int = BLOCK_BYTES) -> torch.Tensor:
    """A tensor with that content."""
    return torch.from_numpy(content(number, n_bytes))


def check(received: torch.Tensor, number: int) -> None:
    """Assert that every byte of a received tensor is what was sent under this number."""
    # numpy, since torch's threads do not survive a fork.
    found = received.detach().numpy()
    assert np.array_equal(content(number, found.nbytes), found), f"of number {number}"


def held(queue: MessageQueue) -> tuple[int, ...]:
    """How many blocks each rank holds now."""
    # The writer looks when it needs a block.
    queue.empty((MIB,), torch.uint8)
    return queue.stats().blocks_held


def go_on(queue: MessageQueue, readers: list[MessageReader], n_messages: int = 20) -> None:
    """Send messages that the readers check and let go of, so that blocks are used again."""
    for number in range(1000, 1000 + n_messages):
        queue.enqueue(tensor_of(number), PATIENCE_S)
        for reader in readers:
            check(reader.dequeue(PATIENCE_S), number)


# --- whose memory is it ---------------------------------------------------------------------------

PATHS: dict[str, dict[str, Any]] = {
    "block": {},
    "image in a block": {"oob_threshold_bytes": 1, "arena_bytes": "16 MiB"},
    "stream in a block": {"oob_threshold_bytes": "1 GiB", "arena_bytes": "16 MiB"},
    "copied from a block": {"receive": "copy"},
    "chunk": {"arena_bytes": 0, "chunk_bytes": "2 MiB"},
    "file": {"arena_bytes": 0},
    "file for want of a block": {"arena_bytes": LEAST_BLOCK_BYTES},
}


@pytest.mark.parametrize("path", PATHS)
def test_whose_memory(make_queue: MakeQueue, path: str) -> None:
    """Writer and readers overwrite what they have, on each path, and nobody else sees it."""
    n_bytes = LEAST_BLOCK_BYTES // 2 if path == "image in a block" else BLOCK_BYTES
    queue, readers = make_queue(n_readers=2, **{**SMALL, **PATHS[path]})
    kept: list[list[Any]] = [[], []]
    for number in range(6):
        tensor = tensor_of(number, n_bytes)
        wide = torch.stack([tensor_of(number, n_bytes), torch.zeros_like(tensor)], dim=1)
        array, raw = content(number, n_bytes), bytearray(content(number, n_bytes).tobytes())
        parameter = torch.nn.Parameter(tensor_of(number, n_bytes), requires_grad=False)
        queue.enqueue([tensor, wide[:, 0], parameter, array, pickle.PickleBuffer(raw)], PATIENCE_S)
        for mine in (tensor, wide, parameter):
            mine.fill_(-1)
        array[:] = -1
        raw[:] = bytes(len(raw))
        for reader, own in zip(readers, kept, strict=True):
            message = reader.dequeue(PATIENCE_S)
            for received in message[:3]:
                check(received, number)
            assert np.array_equal(content(number, n_bytes), message[3])
            assert content(number, n_bytes).tobytes() == bytes(memoryview(message[4]))
            for received in message[:3]:
                received.fill_(100 * reader.rank + number)
            message[3][:] = 100 * reader.rank + number
            own.append(message)
    for reader in readers:
        reader.close()
    queue.close()
    for rank, own in enumerate(kept):
        for number, message in enumerate(own):
            for received in message[:4]:
                assert np.all(np.asarray(received) == 100 * rank + number)
            assert content(number, n_bytes).tobytes() == bytes(memoryview(message[4]))


ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "view": lambda tensor: tensor.view(2, -1),
    "slice": lambda tensor: tensor[100:200],
    "last item": lambda tensor: tensor[-1],
    "transposed": lambda tensor: tensor.view(2, -1).T,
    "other dtype": lambda tensor: tensor.view(torch.uint8),
    "detached": lambda tensor: tensor.detach(),
    "Parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "module": lambda tensor: torch.nn.ParameterList([torch.nn.Parameter(tensor, False)]),
    "storage": lambda tensor: tensor.untyped_storage(),
    "another on its storage": lambda tensor: torch.empty(0, dtype=torch.int64).set_(
        tensor.untyped_storage()
    ),
    "numpy": lambda tensor: tensor.numpy(),
    "numpy slice": lambda tensor: tensor.numpy()[3::7],
    "memoryview": lambda tensor: memoryview(tensor.numpy()),
    "dlpack": torch.from_dlpack,
    "numpy and back": lambda tensor: torch.from_numpy(tensor.numpy()[:9]),
}


def values_of(alias: Any) -> Array:
    """A copy of what an alias shows."""
    if isinstance(alias, torch.UntypedStorage):
        alias = torch.empty(0, dtype=torch.int64).set_(alias)
    if isinstance(alias, torch.nn.ParameterList):
        alias = alias[0]
    return np.array(alias.numpy() if isinstance(alias, torch.Tensor) else alias)


@pytest.mark.parametrize("how", ALIASES)
def test_the_last_alias_releases(make_queue: MakeQueue, how: str) -> None:
    """A block is held until the last alias of its tensor has gone, and no longer."""
    queue, (reader,) = make_queue(**SMALL)
    queue.enqueue([tensor_of(1), "x"])
    received = reader.dequeue(PATIENCE_S)[0]
    alias = ALIASES[how](received)
    before = values_of(alias)
    assert (1,) == held(queue)
    del received
    assert (1,) == held(queue)
    go_on(queue, [reader])
    assert np.array_equal(before, values_of(alias))
    del alias
    assert (0,) == held(queue)
    assert 0 == queue.stats().fallbacks


def test_arrays_and_buffers_are_leased(make_queue: MakeQueue) -> None:
    """The last slice of an array or view of a buffer releases its block as well."""
    queue, (reader,) = make_queue(**SMALL)
    raw = content(2).tobytes()
    queue.enqueue([content(1), pickle.PickleBuffer(raw)])
    array, buffer = reader.dequeue(PATIENCE_S)
    array, buffer = array[10:20], memoryview(buffer)[5:9]
    assert (2,) == held(queue)
    go_on(queue, [reader])
    assert np.array_equal(content(1)[10:20], array)
    assert raw[5:9] == bytes(buffer)
    del array
    assert (1,) == held(queue)
    del buffer
    assert (0,) == held(queue)


def test_every_kth_is_kept_for_ever(make_queue: MakeQueue) -> None:
    """A reader that keeps every fifth tensor keeps it as it was, and the writer never stops."""
    queue, (hoarder, other) = make_queue(n_readers=2, **SMALL)
    kept = {}
    for number in range(100):
        queue.enqueue(tensor_of(number), PATIENCE_S)
        received = hoarder.dequeue(PATIENCE_S)
        check(other.dequeue(PATIENCE_S), number)
        if number % 5 == 0:
            kept[number] = received
    for number, tensor in kept.items():
        check(tensor, number)
    assert (8, 0) == held(queue)
    stats = queue.stats()
    assert (8, 8 * BLOCK_BYTES) == (stats.blocks_in_use, stats.arena_bytes_in_use)
    assert stats.fallbacks > 0


def test_resize(make_queue: MakeQueue) -> None:
    """A leased tensor can't be resized, and stays as it is."""
    queue, (reader,) = make_queue(**SMALL)
    queue.enqueue(tensor_of(1))
    received = reader.dequeue(PATIENCE_S)
    alias = received.view(-1)  # torch gives the tensor its new shape before it refuses
    with pytest.raises(RuntimeError, match="resiz"):
        received.resize_(received.numel() + 1)
    with pytest.raises(RuntimeError, match="resiz"):
        alias.untyped_storage().resize_(2 * BLOCK_BYTES)
    check(alias, 1)


# --- private pages --------------------------------------------------------------------------------


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """Nothing can be opened, so /proc/self/pagemap can't be read either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("has_pagemap", [True, False], ids=["pagemap", "no pagemap"])
@pytest.mark.parametrize(
    "n_bytes", [16 * PAGE, 37 * PAGE + 123, 1100 * PAGE + 1], ids=["pages", "odd", "long"]
)
def test_written_pages_never_show_again(
    make_queue: MakeQueue, n_bytes: int, has_pagemap: bool
) -> None:
    """What a reader wrote into a block is not seen in the next message in the same block."""
    settings = {**SMALL, "arena_bytes": n_bytes}
    queue, (writing, reading) = make_queue(n_readers=2, **settings)
    starts = range(0, n_bytes, PAGE)
    patterns = [
        [(0, n_bytes)],
        [(n_bytes - 1, n_bytes)],
        [(0, 1)],
        *([(start, start + 1) for start in starts[::k]] for k in (1, 2, 3, 7)),
        [(start + PAGE - 1, start + PAGE) for start in starts[511:514]],
        [(starts[-1], n_bytes), (0, PAGE + 1)],
        [],
    ]
    for number, pattern in enumerate(patterns, start=1):
        sent = torch.full((n_bytes,), number, dtype=torch.uint8)
        queue.enqueue(sent, PATIENCE_S)
        received, other = writing.dequeue(PATIENCE_S), reading.dequeue(PATIENCE_S)
        assert torch.equal(sent, received), f"before pattern {number}"
        for start, end in pattern:
            received[start:end] = 255 - number
        for start, end in pattern:
            assert np.all(received.numpy()[start:end] == 255 - number)
        assert torch.equal(sent, other)
        assert (1, 1) == held(queue)
        with contextlib.nullcontext() if has_pagemap else no_descriptor():
            del received, other
    stats = queue.stats()
    assert (0, 1) == (stats.fallbacks, stats.blocks_in_use)


def test_pages_that_cannot_be_dropped(make_queue: MakeQueue) -> None:
    """A block whose written page is locked is never used again; the reader copies from then on."""
    queue, (locking, other) = make_queue(n_readers=2, **SMALL)
    libc = ctypes.CDLL(None, use_errno=True)
    queue.enqueue(tensor_of(1))
    received = locking.dequeue(PATIENCE_S)
    check(other.dequeue(PATIENCE_S), 1)
    page = received.data_ptr() + PAGE
    if libc.mlock(ctypes.c_void_p(page), ctypes.c_size_t(PAGE)):
        pytest.skip(f"mlock: {os.strerror(ctypes.get_errno())}")
    received.fill_(-1)
    del received
    assert (1, 0) == held(queue)
    for number in range(20):
        queue.enqueue(tensor_of(number), PATIENCE_S)
        received = locking.dequeue(PATIENCE_S)
        check(received, number)
        assert (1, 1) == held(queue)  # what it copied it has given up
        check(other.dequeue(PATIENCE_S), number)
        received.fill_(-1)
    libc.munlock(ctypes.c_void_p(page), ctypes.c_size_t(PAGE))


ATTACK_ROUNDS = 2000


# What runs in forked children leaves large tensors to numpy: torch's threads do not survive a fork.


def attack(pipe: Connection, handle: Handle, rank: int) -> None:
    """Overwrite everything that comes, keep some of it, and say what was not as it should be."""
    choice = random.Random(rank)
    kept: list[tuple[int, Array, torch.Tensor]] = []
    wrong = []
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for number, tensor in reader:
            if not np.array_equal(content(number, tensor.nbytes), tensor.numpy()):
                wrong.append(f"number {number} came wrong")
            tensor.numpy()[:: choice.choice([1, 1, 512, 1000])] = ~number
            if choice.random() < 0.3:
                kept.insert(
                    choice.randrange(len(kept) + 1), (number, tensor.numpy().copy(), tensor)
                )
            if len(kept) > 6:
                old, copy, own = kept.pop()
                if not np.array_equal(copy, own.numpy()):
                    wrong.append(f"number {old} changed")
            del tensor
    for old, copy, own in kept:
        if not np.array_equal(copy, own.numpy()):
            wrong.append(f"number {old} changed")
    pipe.send(wrong)


def test_everybody_writes_at_once(start_child: StartChild) -> None:
    """The writer overwrites its source, two readers what they got, at the same time, for long."""
    config = QueueConfig(n_readers=2, **{**SMALL, "arena_bytes": 40 * BLOCK_BYTES})
    with MessageQueue(config) as queue:
        children = [
            start_child(attack, queue.export_handle(), rank, method="fork") for rank in range(2)
        ]
        queue.wait_until_ready(PATIENCE_S)
        words = BLOCK_BYTES // 8
        base, source = content(0), np.empty(words, dtype=np.int64)
        for number in range(ATTACK_ROUNDS):
            n_words = words - number % 7 * 100
            np.add(base[:n_words], number << 44, out=source[:n_words])
            queue.enqueue((number, torch.from_numpy(source[:n_words])), PATIENCE_S)
            source[:] = -1
        assert 0 == queue.stats().fallbacks
    assert [[], []] == [child.receive() for child in children]
    assert [0, 0] == [child.join() for child in children]


# --- ends of ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["reader", "writer"])
def test_tensors_outlive_their_ends(make_queue: MakeQueue, first: str) -> None:
    """After both ends were closed, in either order, a tensor stays as it was, and writable."""
    queue, (leaver, other) = make_queue(n_readers=2, **SMALL)
    kept = []
    for number in range(3):
        queue.enqueue(tensor_of(number))
        kept.append(leaver.dequeue(PATIENCE_S))
        check(other.dequeue(PATIENCE_S), number)
    kept[0][7::512] = 99
    if first == "reader":
        leaver.close()
        assert (3, 0) == held(queue)
        go_on(queue, [other], 40)  # in the other blocks
        assert (3, 0) == held(queue)
        assert 0 == queue.stats().fallbacks
    queue.close()
    leaver.close()
    del queue, leaver
    gc.collect()
    assert np.all(kept[0].numpy()[7::512] == 99)
    kept[0][7::512] = torch.from_numpy(content(0))[7::512]
    for number, tensor in enumerate(kept):
        check(tensor, number)
        tensor.fill_(number)
        assert np.all(tensor.numpy() == number)
    del kept[1]
    assert np.all(kept[1].numpy() == 2)


def write_and_wait(pipe: Connection) -> None:
    """A writer that sends three tensors, and never ends."""
    queue = MessageQueue(QueueConfig(**SMALL))
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for number in range(3):
        queue.enqueue(tensor_of(number))
    pipe.send("sent")
    signal.pause()


def test_tensors_outlive_a_killed_writer(start_child: StartChild) -> None:
    """After the writer was killed, what was taken and what is taken then stay right."""
    writer = start_child(write_and_wait, method="fork")
    with MessageQueue.create_from_handle(writer.receive(), 0) as reader:
        first = reader.dequeue(PATIENCE_S)
        assert "sent" == writer.receive()
        first[5] = -1
        writer.kill()
        rest = [reader.dequeue(PATIENCE_S) for _ in range(2)]
        with pytest.raises(WriterLost):
            reader.dequeue(PATIENCE_S)
    gc.collect()
    assert -1 == first[5]
    first[5] = content(0)[5].item()
    for number, tensor in enumerate([first, *rest]):
        check(tensor, number)
        tensor.fill_(7)
        assert np.all(tensor.numpy() == 7)


def test_late_first_attachment(make_queue: MakeQueue) -> None:
    """Blocks wait for a rank that has never attached, and it gets what lies in them."""
    config = QueueConfig(**SMALL)
    with MessageQueue(config) as queue:
        for number in range(4):
            queue.enqueue(tensor_of(number), 0)
        assert (4,) == held(queue)
        with pytest.raises(QueueFull):
            queue.enqueue(tensor_of(4), 0)
        assert (4,) == held(queue)
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            for number in range(4):
                check(reader.dequeue(PATIENCE_S), number)
            assert (0,) == held(queue)


# --- forked children ------------------------------------------------------------------------------


def fork(function: Callable[[], object]) -> Callable[[], None]:
    """Run a function in a forked child; what is returned waits for it, and raises as it did."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(here)
            try:
                function()
            except BaseException as error:
                os.write(there, repr(error).encode()[:4000])
            os._exit(0)
        finally:
            os._exit(1)
    os.close(there)

    def join() -> None:
        with os.fdopen(here, "rb") as file:
            text = file.read().decode()
        _, status = os.waitpid(pid, 0)
        assert ("", 0) == (text, os.waitstatus_to_exitcode(status))

    return join


def proportional_kib(pids: list[int]) -> int:
    """The memory of these processes together that is no file's."""
    return sum(
        int(line.split()[1])
        for pid in pids
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss_Anon:")
    )


def test_children_share_one_copy(make_queue: MakeQueue) -> None:
    """However many children are forked, what was received before is copied once."""
    n_bytes = 32 * MIB
    queue, (reader,) = make_queue(arena_bytes="64 MiB")
    draft = queue.empty((n_bytes // 8,), torch.int64)
    draft.copy_(tensor_of(1, n_bytes))
    queue.enqueue(draft)
    kept = [draft, reader.dequeue(PATIENCE_S)]
    gc.collect()
    go_on = os.pipe()
    before = proportional_kib([os.getpid()])
    pids = []
    try:
        for _ in range(4):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    os.read(go_on[0], 1)
                    for tensor in kept:
                        check(tensor, 1)
                    os._exit(0)
                finally:
                    os._exit(1)
        grown = proportional_kib([os.getpid(), *pids]) - before
        assert grown < (len(kept) + 1) * n_bytes // 1024
    finally:
        os.write(go_on[1], b"." * len(pids))
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        for descriptor in go_on:
            os.close(descriptor)
    assert [0] * 4 == statuses


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_fork(make_queue: MakeQueue, is_closed: bool) -> None:
    """Parent and forked child each keep what they had, whatever the other one writes or drops."""
    queue, (reader, other) = make_queue(n_readers=2, **SMALL)
    queue.enqueue([tensor_of(1), content(2)])
    kept = reader.dequeue(PATIENCE_S)
    other.dequeue(PATIENCE_S)
    kept[0][3::700] = -3
    before = kept[0].numpy().copy()
    if is_closed:
        reader.close()
    to_child, to_parent = os.pipe(), os.pipe()

    def child() -> None:
        tensor, array = kept
        tensor[10] = array[10] = -10  # the parent must not see it
        os.write(to_parent[1], b".")
        assert b"." == os.read(to_child[0], 1)
        mine = before.copy()
        mine[10] = -10
        assert np.array_equal(mine, tensor.numpy())
        assert np.array_equal(content(2)[11:], array[11:])
        tensor.numpy()[:] = 8
        assert np.all(tensor.numpy() == 8)

    join = fork(child)
    os.close(to_parent[1])
    os.close(to_child[0])
    assert b"." == os.read(to_parent[0], 1)
    assert np.array_equal(before, kept[0].numpy())
    assert np.array_equal(content(2), kept[1])
    kept[0][20::300] = -20  # and the child must not see this
    kept[1][:] = 0
    kept.clear()
    assert (0, 0) == held(queue)
    go_on(queue, [other] if is_closed else [reader, other], 40)
    assert 0 == queue.stats().fallbacks
    os.write(to_child[1], b".")
    join()
    go_on(queue, [other] if is_closed else [reader, other])
    os.close(to_child[1])
    os.close(to_parent[0])


def is_mapped(address: int) -> bool:
    """Whether there is something at this address of this process."""
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def test_fork_while_a_lease_ends(make_queue: MakeQueue) -> None:
    """A child that is forked while a thread drops an array has the array, or nothing of it."""
    queue, (reader,) = make_queue(arena_bytes="64 MiB")
    for number in range(5):
        queue.enqueue(content(number, 32 * MIB))  # no tensor: torch drops one without the GIL
        arrays = [reader.dequeue(PATIENCE_S)]
        address = arrays[0].ctypes.data
        fork(lambda: None)()  # from now on children have it
        is_due = threading.Event()

        def drop(arrays: list[Any] = arrays, is_due: threading.Event = is_due) -> None:
            is_due.set()
            arrays.clear()

        def child(arrays: list[Any] = arrays, address: int = address) -> None:
            assert bool(arrays) == is_mapped(address)

        thread = threading.Thread(target=drop)
        thread.start()
        is_due.wait()
        join = fork(child)
        thread.join()
        join()


def test_fork_of_a_fork(make_queue: MakeQueue) -> None:
    """A child's child has the tensor too, and children that drop it take it from nobody."""
    queue, (reader,) = make_queue(**SMALL)
    queue.enqueue(tensor_of(1))
    tensors = [reader.dequeue(PATIENCE_S)]

    def grandchild() -> None:
        check(tensors[0], 1)
        tensors[0].numpy()[:] = 3
        tensors.clear()

    def child() -> None:
        join = fork(grandchild)
        check(tensors[0], 1)
        join()
        check(tensors[0], 1)
        tensors[0].numpy()[:] = 2
        fork(tensors.clear)()
        assert np.all(tensors[0].numpy() == 2)
        tensors.clear()

    for _ in range(2):
        fork(child)()
        check(tensors[0], 1)
        assert (1,) == held(queue)
    tensors.clear()
    assert (0,) == held(queue)
    go_on(queue, [reader])


def fork_and_end(pipe: Connection, handle: Handle) -> None:
    """Take a tensor, and end while a forked child has it."""
    reader = MessageQueue.create_from_handle(handle, 0)
    tensor = reader.dequeue(PATIENCE_S)
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    try:  # nobody cleans up after this one
        while os.getppid() == parent:
            time.sleep(0.001)
        pipe.send("orphaned")
        assert pipe.poll(PATIENCE_S)
        pipe.recv()
        tensor[0] += 1
        pipe.send(np.array_equal(content(1)[1:], tensor.numpy()[1:]))
    finally:
        os._exit(0)


def test_child_outlives_its_parent(start_child: StartChild) -> None:
    """A forked child keeps the tensor after its parent died and the block was used again."""
    with MessageQueue(QueueConfig(n_readers=2, on_reader_loss="evict", **SMALL)) as queue:
        handle = queue.export_handle()
        child = start_child(fork_and_end, handle, method="fork")
        with MessageQueue.create_from_handle(handle, 1) as other:
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue(tensor_of(1))
            check(other.dequeue(PATIENCE_S), 1)
            assert "orphaned" == child.receive()
            while child.process.is_alive():  # `join` would wait for the orphan too
                time.sleep(0.001)
            deadline = time.monotonic() + PATIENCE_S
            while queue.stats().losses == 0 and time.monotonic() < deadline:
                go_on(queue, [other], 1)
                time.sleep(0.011)  # from then on an enqueue looks around
            assert (0, 0) == held(queue)
            go_on(queue, [other], 40)
            assert 0 == queue.stats().fallbacks
            child.pipe.send("go on")
            assert child.receive()


def test_fork_while_a_thread_takes_and_drops(make_queue: MakeQueue) -> None:
    """A child forked while another thread takes and drops tensors finds what it sees unchanged."""
    settings = {**SMALL, "arena_bytes": 40 * LEAST_BLOCK_BYTES}
    queue, (reader,) = make_queue(**settings)
    recent: collections.deque[tuple[int, torch.Tensor]] = collections.deque(maxlen=8)
    is_over = threading.Event()

    def take_and_drop() -> None:
        with contextlib.suppress(QueueClosed):
            for number, tensor in reader:
                tensor[0] = -number
                recent.append((number, tensor))

    def write() -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            queue.enqueue((number, tensor_of(number, LEAST_BLOCK_BYTES)), PATIENCE_S)

    def child() -> None:
        for number, tensor in list(recent):
            assert -number == tensor[0]
            assert np.array_equal(content(number, tensor.nbytes)[1:], tensor.numpy()[1:])

    threads = [threading.Thread(target=target) for target in (take_and_drop, write)]
    for thread in threads:
        thread.start()
    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the other threads run in the middle of the fork
    try:
        while not recent:
            time.sleep(0.001)
        for _ in range(50):
            fork(child)()
    finally:
        sys.setswitchinterval(previous)
        is_over.set()
        threads[1].join()
        queue.close()
        threads[0].join()
    assert len(recent) == 8


# --- the end of a lease ---------------------------------------------------------------------------


def test_every_order_of_drops(make_queue: MakeQueue) -> None:
    """Leases that end in any order give up their own blocks and no others."""
    queue, (reader,) = make_queue(**SMALL)
    for order in itertools.permutations(range(4)):
        queue.enqueue([tensor_of(number) for number in range(4)], PATIENCE_S)
        tensors = dict(enumerate(reader.dequeue(PATIENCE_S)))
        for left, index in zip((3, 2, 1, 0), order, strict=True):
            del tensors[index]
            assert (left,) == held(queue)
            for number in tensors:
                check(tensors[number], number)
    go_on(queue, [reader])
    assert 0 == queue.stats().fallbacks


def test_drops_in_many_threads(make_queue: MakeQueue) -> None:
    """Leases that end in many threads at once are all given up, once."""
    queue, (reader,) = make_queue(**SMALL)
    for _ in range(25):
        queue.enqueue([tensor_of(number) for number in range(8)], PATIENCE_S)
        tensors = reader.dequeue(PATIENCE_S)
        barrier = threading.Barrier(8)

        def drop(box: list[torch.Tensor], barrier: threading.Barrier = barrier) -> None:
            box[0][::512] = 1
            barrier.wait()
            box.clear()

        threads = [threading.Thread(target=drop, args=([tensor],)) for tensor in tensors]
        tensors.clear()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        threads.clear()
        assert (0,) == held(queue)
    go_on(queue, [reader])
    assert 0 == queue.stats().fallbacks


def test_drops_during_close(make_queue: MakeQueue) -> None:
    """Leases that end while their reader closes leave the others as they were."""
    queue, (first, other) = make_queue(n_readers=2, **SMALL)
    first.close()
    for round_number in range(15):
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue([tensor_of(number) for number in range(8)], PATIENCE_S)
        other.dequeue(PATIENCE_S)
        tensors = dict(enumerate(reader.dequeue(PATIENCE_S)))
        barrier = threading.Barrier(2)

        def drop(
            tensors: dict[int, torch.Tensor] = tensors, barrier: threading.Barrier = barrier
        ) -> None:
            barrier.wait()
            for index in (7, 2, 4, 0):
                del tensors[index]

        thread = threading.Thread(target=drop)
        thread.start()
        barrier.wait()
        reader.close()
        thread.join()
        assert (4, 0) == held(queue)
        time.sleep(0.011)  # from then on an enqueue looks around
        go_on(queue, [other], 10)
        for number in (1, 3, 5, 6):
            check(tensors[number], number)
        tensors.clear()
        assert (0, 0) == held(queue)
        assert 0 == queue.stats().fallbacks, f"round {round_number}"


def test_garbage_cycles(make_queue: MakeQueue) -> None:
    """A lease in a garbage cycle ends with it, also in one with the reader itself."""
    queue, (reader, other) = make_queue(n_readers=2, **SMALL)
    queue.enqueue([tensor_of(1), content(2)])
    other.dequeue(PATIENCE_S)
    gc.disable()
    try:
        cycle: list[Any] = [reader.dequeue(PATIENCE_S)]
        cycle.append(cycle)
        del cycle
        assert (2, 0) == held(queue)
        gc.collect()
        assert (0, 0) == held(queue)
        with MessageQueue(QueueConfig(**SMALL)) as second:
            cycle = [MessageQueue.create_from_handle(second.export_handle(), 0)]
            second.wait_until_ready(PATIENCE_S)
            second.enqueue(tensor_of(3))
            tensor = cycle[0].dequeue(PATIENCE_S)
            second.enqueue(tensor_of(4))
            cycle += [cycle[0].dequeue(PATIENCE_S), cycle]
            del cycle
            gc.collect()
            check(tensor, 3)
            time.sleep(0.011)  # from then on an enqueue looks around
            with pytest.raises(ReaderLost):
                second.enqueue(tensor_of(5), PATIENCE_S)
            assert (1,) == held(second)
            del tensor
            assert (0,) == held(second)
    finally:
        gc.enable()
    go_on(queue, [reader, other])


EXIT_PROGRAM = """
import atexit, sys, threading, time
import torch
from shmcast import MessageQueue, QueueConfig

config = QueueConfig(n_readers=2, n_chunks=16, oob_threshold_bytes=65536, arena_bytes="8 MiB")
queue = MessageQueue(config)
readers = [MessageQueue.create_from_handle(queue.export_handle(), rank) for rank in range(2)]
queue.wait_until_ready(30)

def received(reader=readers[0]):
    queue.enqueue(torch.ones(100_000, dtype=torch.uint8))
    tensor = reader.dequeue(30)
    tensor[::3] = 2
    return tensor

kept = received()
local = threading.local()
local.tensor = received()
sys.keep_for_the_end = received()
cycle = [received()]
cycle.append(cycle)

class Node:
    def __init__(self):
        self.tensor, self.array = received(), received().numpy()
    def __del__(self):
        assert self.tensor is None or self.tensor[0] == 2

node = Node()
atexit.register(lambda tensor: print(int(tensor[0])), received())

def keep_taking():
    for tensor in readers[1]:
        recent.append(tensor[:10])

recent = []
thread = threading.Thread(target=keep_taking, daemon=True)
thread.start()
while len(recent) < 7:  # a thread that the interpreter ends inside torch takes the process with it
    time.sleep(0.001)
if sys.argv[1] == "closed":
    readers[0].close()
    queue.close()
    thread.join()  # the end of the interpreter in the midst of torch may abort the process
elif sys.argv[1] == "forked":
    import os
    pid = os.fork()
    if pid:
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@pytest.mark.parametrize("how", ["closed", "forked"])
def test_interpreter_exit(how: str) -> None:
    """A program that ends with leases everywhere ends well, and says nothing."""
    done = subprocess.run(
        [sys.executable, *MAY_FORK, "-c", EXIT_PROGRAM, how],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    expected = "2\n2\n" if how == "forked" else "2\n"
    assert (0, expected, "") == (done.returncode, done.stdout, done.stderr)


class Unloadable:
    """Loading it fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise ValueError("not loadable")


def test_loading_that_fails(make_queue: MakeQueue) -> None:
    """A message that can't be loaded gives its blocks up, also those of tensors loaded before."""
    queue, (reader,) = make_queue(**SMALL)
    for _ in range(10):
        queue.enqueue([tensor_of(1), content(2), Unloadable()])
        with pytest.raises(ValueError, match="not loadable"):
            reader.dequeue(PATIENCE_S)
        gc.collect()
        assert (0,) == held(queue)
    go_on(queue, [reader])
    assert 0 == queue.stats().fallbacks


def test_pickling_that_fails(make_queue: MakeQueue) -> None:
    """A message that can't be pickled or published leaves no block in use."""
    queue, (reader,) = make_queue(**SMALL)
    wide = torch.zeros(BLOCK_BYTES // 8, 2, dtype=torch.int64)
    for _ in range(10):
        with pytest.raises(TypeError):
            queue.enqueue([wide[:, 0], tensor_of(1), threading.Lock()])
        assert 0 == queue.stats().blocks_in_use
    for number in range(4):
        queue.enqueue(number)
    for _ in range(10):
        with pytest.raises(QueueFull):
            queue.enqueue([wide[:, 0], tensor_of(1)], 0)
        assert 0 == queue.stats().blocks_in_use
    assert [0, 1, 2, 3] == [reader.dequeue(PATIENCE_S) for _ in range(4)]
    go_on(queue, [reader])


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted(call: Callable[[], object], number: int) -> bool:
    """Run a call and raise at this instruction of the queue's code; whether it came to that."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in {queue_module.__file__, attachment_module.__file__}:
            return None
        # Not in `dequeue` itself: no signal comes between taking its lock and the block after it.
        frame.f_trace_opcodes = frame.f_code.co_name != "dequeue"
        if event == "opcode":
            count += 1
            if count == number:
                raise Interrupt
        return trace

    try:
        with tracing(trace):
            call()
    except Interrupt:
        return True
    return False


def test_interrupted_dequeue(make_queue: MakeQueue) -> None:
    """A dequeue interrupted at any instruction loses at most its message, and never a block."""
    queue, (reader,) = make_queue(**SMALL)
    for number in itertools.count(1):
        queue.enqueue(("first", [tensor_of(number), content(number)]))
        queue.enqueue(("second", tensor_of(number + 1)))
        got: list[Any] = []
        is_cut = interrupted(lambda got=got: got.append(reader.dequeue(1.0)), number)
        with contextlib.suppress(QueueEmpty):
            while True:
                got.append(reader.dequeue(0))
        assert [name for name, _ in got] in (["first", "second"], ["second"])
        go_on(queue, [reader], 6)  # would hit blocks that were given up too early
        if len(got) == 2:
            check(got[0][1][0], number)
            assert np.array_equal(content(number), got[0][1][1])
        check(got[-1][1], number + 1)
        del got
        assert (0,) == held(queue), f"interrupted at {number}"
        if not is_cut:
            assert number > 20
            break
    assert 0 == queue.stats().fallbacks


def test_a_message_that_is_taken_again(make_queue: MakeQueue) -> None:
    """A message that was taken but not released comes again, and holds its blocks once."""
    queue, (reader,) = make_queue(**SMALL)
    queue.enqueue([tensor_of(1), content(2)])
    for _ in range(3):
        taken = reader._source.ring.try_take()
        del taken
        assert (2,) == held(queue)
    go_on(queue, [], 1)  # it would go into a block that was given up
    assert (3,) == held(queue)
    taken = reader._source.ring.try_take()
    tensor, array = reader.dequeue(PATIENCE_S)
    del taken  # which an interrupted call's traceback may keep until now
    check(reader.dequeue(PATIENCE_S), 1000)
    assert (2,) == held(queue)
    go_on(queue, [reader])
    check(tensor, 1)
    assert np.array_equal(content(2), array)
    del tensor, array
    assert (0,) == held(queue)


def test_no_memory_in_a_take(make_queue: MakeQueue) -> None:
    """A take that fails for want of memory gives no block up; the message comes again."""
    testcapi = pytest.importorskip("_testcapi")
    queue, (reader,) = make_queue(**{**SMALL, "oob_threshold_bytes": 1000})
    n_failed = 0
    for start in itertools.count(1):
        parts = [tensor_of(1), tensor_of(2), content(3, 2000), content(4, 4000)]
        queue.enqueue(parts)
        taken, failed = None, False
        ring = reader._source.ring
        try:
            testcapi.set_nomemory(start, start + 1)
            taken = ring.try_take()
        except MemoryError:
            failed = True
        finally:
            testcapi.remove_mem_hooks()
        del taken
        n_failed += failed
        assert (2,) == held(queue), f"at allocation {start}"
        message = reader.dequeue(PATIENCE_S)
        go_on(queue, [reader], 8)
        for number, part in enumerate(message, start=1):
            assert np.array_equal(content(number, part.nbytes), np.asarray(part))
        del message, part
        assert (0,) == held(queue)
        if not failed:
            break
    assert n_failed > 5


# --- what the system refuses ----------------------------------------------------------------------

MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4


def lock_all(flags: int) -> str:
    """mlockall; why it was refused, or nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.mlockall(flags) else ""


def next_of(reader: MessageReader) -> Any:
    """The next message, or None at the end."""
    try:
        return reader.dequeue(PATIENCE_S)
    except QueueClosed:
        return None


def read_with_locked_memory(
    pipe: Connection, handle: Handle, flags_before: int, flags_after: int
) -> None:
    """Read and overwrite, with all memory locked before or after attaching; say what was wrong."""
    logging.getLogger("shmcast").addHandler(logging.NullHandler())
    wrong: list[str] = []
    refusal = lock_all(flags_before) if flags_before else ""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send(refusal)
        if refusal:
            return
        kept = []
        # Not by iterating, which lets go of a message only when it asks for the next one.
        while (message := next_of(reader)) is not None:
            number, tensor = message
            del message
            if not np.array_equal(content(number), tensor.numpy()):
                wrong.append(f"number {number} came wrong")
            if number % 4 == 0:
                kept.append((number, tensor))
            else:
                tensor.numpy()[:] = -1
            del tensor
            if number == 5 and flags_after:
                pipe.recv()
                refusal = lock_all(flags_after)
                pipe.send(refusal)
                if refusal:
                    return
    wrong += [
        f"number {number} changed"
        for number, tensor in kept
        if not np.array_equal(content(number), tensor.numpy())
    ]
    pipe.send(wrong)


@pytest.mark.parametrize(
    ("before", "after", "n_in_line"),
    [
        pytest.param(MCL_CURRENT, 0, 0, id="current before"),
        pytest.param(MCL_CURRENT | MCL_FUTURE, 0, 0, id="future before"),
        pytest.param(0, MCL_CURRENT, 0, id="current after"),
        pytest.param(0, MCL_CURRENT, 3, id="current after, with messages in line"),
        pytest.param(0, MCL_CURRENT | MCL_FUTURE, 1, id="future after"),
        pytest.param(0, MCL_CURRENT | MCL_ONFAULT, 3, id="on fault after"),
    ],
)
def test_locked_memory(start_child: StartChild, before: int, after: int, n_in_line: int) -> None:
    """Messages stay right in a reader that locks all of its memory, before or after attaching."""
    with MessageQueue(QueueConfig(**{**SMALL, "arena_bytes": 30 * BLOCK_BYTES})) as queue:
        child = start_child(
            read_with_locked_memory, queue.export_handle(), before, after, method="fork"
        )
        queue.wait_until_ready(PATIENCE_S)
        refusal = child.receive()
        if refusal:
            pytest.skip(f"mlockall: {refusal}")
        for number in range(6):
            queue.enqueue((number, tensor_of(number)), PATIENCE_S)
        if after:
            for number in range(6, 6 + n_in_line):
                queue.enqueue((number, tensor_of(number)), PATIENCE_S)
            child.pipe.send("lock")
            refusal = child.receive()
            if refusal:
                pytest.skip(f"mlockall: {refusal}")
        for number in range(6 + n_in_line, 60):
            queue.enqueue((number, tensor_of(number)), PATIENCE_S)
        queue.close()
        assert [] == child.receive()
        assert 0 == child.join()


def read_with_little_room(pipe: Connection, handle: Handle, limit: int, n_bytes: int) -> None:
    """Read under a memory limit; say what was wrong, and what was logged."""
    records: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("shmcast").addHandler(Recorder())
    field = "VmSize" if limit == resource.RLIMIT_AS else "VmData"
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    used = int(status[field].split()[0]) * 1024
    resource.setrlimit(limit, (used + n_bytes, used + n_bytes))
    wrong = []
    with MessageQueue.create_from_handle(handle, 0) as reader:
        kept = []
        for number, tensor in reader:
            kept.append((number, tensor))
            if len(kept) > 3:
                kept.pop(0)
            wrong += [n for n, own in kept if not np.array_equal(content(n), own.numpy())]
        kept[0][1].numpy()[:] = 1
        wrong += [n for n, own in kept[1:] if not np.array_equal(content(n), own.numpy())]
    pipe.send((wrong, records))


@pytest.mark.parametrize(
    ("limit", "more_bytes"),
    [
        pytest.param(resource.RLIMIT_DATA, 64 * MIB, id="data"),
        pytest.param(resource.RLIMIT_AS, (256 + 64) * MIB, id="address space"),
    ],
)
def test_private_mapping_is_refused(start_child: StartChild, limit: int, more_bytes: int) -> None:
    """A reader that can't map the arena privately copies, with one warning, and holds no block."""
    with MessageQueue(QueueConfig(**{**SMALL, "arena_bytes": 256 * MIB})) as queue:
        child = start_child(
            read_with_little_room, queue.export_handle(), limit, more_bytes, method="fork"
        )
        queue.wait_until_ready(PATIENCE_S)
        for number in range(30):
            queue.enqueue((number, tensor_of(number)), PATIENCE_S)
        assert 0 == queue.stats().fallbacks
        queue.close()
        wrong, records = child.receive()
        assert [] == wrong
        (warning,) = records
        assert "copies large buffers" in warning
        assert "private mapping was refused" in warning
        assert 0 == child.join()


def test_receive_copy(make_queue: MakeQueue) -> None:
    """With `receive="copy"` a tensor is the reader's own memory, and its block is free at once."""
    queue, (reader, other) = make_queue(n_readers=2, receive="copy", **SMALL)
    kept = []
    for number in range(30):
        queue.enqueue([tensor_of(number), content(number)], PATIENCE_S)
        kept.append(reader.dequeue(PATIENCE_S))
        assert (0, 2) == held(queue)
        kept[-1][0][3] = -1
        check(other.dequeue(PATIENCE_S)[0], number)
        assert (0, 0) == held(queue)
    for number, (tensor, array) in enumerate(kept):
        assert -1 == tensor[3]
        assert np.array_equal(content(number)[4:], tensor.numpy()[4:])
        assert np.array_equal(content(number), array)
    assert 0 == queue.stats().fallbacks


# --- pressure -------------------------------------------------------------------------------------


def test_readers_that_keep_everything(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """With no free block the writer goes on by memory files, warns once, and says how often."""
    with caplog.at_level(logging.WARNING, "shmcast"):
        queue, readers = make_queue(n_readers=2, **SMALL)
        kept: list[list[torch.Tensor]] = [[], []]
        for number in range(20):
            queue.enqueue(tensor_of(number), PATIENCE_S)
            for reader, own in zip(readers, kept, strict=True):
                own.append(reader.dequeue(PATIENCE_S))
    (warning,) = caplog.messages
    assert "no free block" in warning
    assert "8 of at most 1280 blocks" in warning
    assert "(8, 8)" in warning
    assert [12, 12] == [queue.stats().fallbacks, readers[0].stats().fallbacks]
    assert (8, 8) == held(queue)
    for own in kept:
        for number, tensor in enumerate(own):
            check(tensor, number)
    del own, tensor
    kept[0].clear()
    assert (0, 8) == held(queue)
    queue.enqueue(tensor_of(20))
    assert 13 == queue.stats().fallbacks  # the other one still has them
    for reader in readers:
        check(reader.dequeue(PATIENCE_S), 20)
    kept[1].clear()
    assert (0, 0) == held(queue)
    go_on(queue, readers)
    assert 13 == queue.stats().fallbacks
    assert 0 == queue.stats().losses


def test_a_new_attachment_owes_nothing(make_queue: MakeQueue) -> None:
    """A rank that leaves holds what is still referenced, and its next attachment nothing of it."""
    queue, (leaver, other) = make_queue(n_readers=2, **SMALL)
    kept = []
    for number in range(4):
        queue.enqueue(tensor_of(number))
        kept.append(leaver.dequeue(PATIENCE_S))
        check(other.dequeue(PATIENCE_S), number)
    queue.enqueue(tensor_of(4))  # which it never takes
    check(other.dequeue(PATIENCE_S), 4)
    assert (5, 0) == held(queue)
    leaver.close()
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as newcomer:
        queue.wait_until_ready(PATIENCE_S)
        assert (4, 0) == held(queue)
        queue.enqueue(tensor_of(5))
        mine = newcomer.dequeue(PATIENCE_S)
        check(other.dequeue(PATIENCE_S), 5)
        assert (5, 0) == held(queue)
        del kept[0]
        assert (4, 0) == held(queue)
        go_on(queue, [newcomer, other], 40)
        check(mine, 5)
        for number, tensor in enumerate(kept, start=1):
            check(tensor, number)
        del mine
        assert (3, 0) == held(queue)
        kept.clear()
        del tensor
        assert (0, 0) == held(queue)
    assert 0 == queue.stats().fallbacks


def test_closing_copies_nothing(make_queue: MakeQueue) -> None:
    """A reader that closes with 32 MiB in its hands makes no page of them its own."""
    queue, (reader,) = make_queue(arena_bytes="64 MiB")
    queue.enqueue(tensor_of(1, 32 * MIB))
    tensor = reader.dequeue(PATIENCE_S)
    check(tensor, 1)
    gc.collect()
    before = memory_of(0)[0]
    reader.close()
    assert memory_of(0)[0] < before + 4096
    check(tensor, 1)


def close_and_keep(pipe: Connection, handle: Handle, then: str) -> None:
    """Take a tensor, close, and then let go of it or end, as told."""
    reader = MessageQueue.create_from_handle(handle, 0)
    kept = [reader.dequeue(PATIENCE_S)]
    reader.close()
    pipe.send("closed")
    assert "go on" == pipe.recv()
    if then == "drop":
        kept.clear()
    elif then == "exec":
        os.execv("/bin/sleep", ["sleep", "600"])
    elif then == "exit":
        return
    signal.pause()


@pytest.mark.parametrize("then", ["drop", "exec", "exit", "kill"])
def test_blocks_of_a_reader_that_left(start_child: StartChild, then: str) -> None:
    """What a closed reader's process keeps stays in use until it lets go of it, however."""
    with MessageQueue(QueueConfig(n_readers=2, **SMALL)) as queue:
        handle = queue.export_handle()
        child = start_child(close_and_keep, handle, then, method="fork")
        with MessageQueue.create_from_handle(handle, 1) as other:
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue(tensor_of(0))
            check(other.dequeue(PATIENCE_S), 0)
            assert "closed" == child.receive()
            go_on(queue, [other])
            assert (1, 0) == held(queue)
            if then == "kill":
                child.kill()
            else:
                child.pipe.send("go on")
            deadline = time.monotonic() + PATIENCE_S
            while held(queue) != (0, 0):
                assert time.monotonic() < deadline
                time.sleep(0.011)  # from then on an enqueue looks around
                queue.enqueue("look")
                assert "look" == other.dequeue(PATIENCE_S)
            assert (0, 0) == (queue.stats().losses, queue.stats().fallbacks)


def keep_until_killed(pipe: Connection, handle: Handle) -> None:
    """Keep everything, and say how many there are."""
    reader = MessageQueue.create_from_handle(handle, 0)
    kept = []
    for tensor in reader:
        kept.append(tensor)
        pipe.send(len(kept))


def test_a_rank_that_dies(start_child: StartChild) -> None:
    """What a killed reader held comes back, and its rank starts anew."""
    with MessageQueue(QueueConfig(n_readers=2, on_reader_loss="evict", **SMALL)) as queue:
        handle = queue.export_handle()
        child = start_child(keep_until_killed, handle, method="fork")
        with MessageQueue.create_from_handle(handle, 1) as other:
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue(tensor_of(0))
            mine = other.dequeue(PATIENCE_S)
            assert 1 == child.receive()
            for number in range(1, 6):
                queue.enqueue(tensor_of(number))
                check(other.dequeue(PATIENCE_S), number)
                assert number + 1 == child.receive()
            assert (6, 1) == held(queue)
            child.kill()
            time.sleep(0.011)  # from then on an enqueue looks around
            queue.enqueue("look")
            assert "look" == other.dequeue(PATIENCE_S)
            assert 1 == queue.stats().losses
            assert (0, 1) == held(queue)
            go_on(queue, [other])
            with MessageQueue.create_from_handle(handle, 0) as newcomer:
                queue.wait_until_ready(PATIENCE_S)
                go_on(queue, [newcomer, other], 40)
                assert (0, 1) == held(queue)
            check(mine, 0)
            assert 0 == queue.stats().fallbacks


@pytest.mark.parametrize("receive", ["private", "copy"])
@pytest.mark.parametrize("damage", ["cursor", "lock"])
def test_a_live_reader_that_is_evicted(make_queue: MakeQueue, damage: str, receive: str) -> None:
    """A reader that is evicted although it is alive keeps its tensors as they were."""
    queue, (evicted, other) = make_queue(
        n_readers=2, on_reader_loss="evict", receive=receive, **SMALL
    )
    kept = []
    for number in range(3):
        queue.enqueue(tensor_of(number))
        kept.append(evicted.dequeue(PATIENCE_S))
        check(other.dequeue(PATIENCE_S), number)
    n_held = 3 if receive == "private" else 0
    assert (n_held, 0) == held(queue)
    if damage == "cursor":
        offset = evicted._source.segment.layout.rank_offset(0)
        control = memoryview(evicted._source.segment.control or b"").cast("Q")
        control[offset // 8] = 1 << 60
        del control
    else:
        assert evicted._source.control.lock_file is not None
        evicted._source.control.lock_file.give_back(1)
    deadline = time.monotonic() + PATIENCE_S
    while queue.stats().losses == 0 and time.monotonic() < deadline:
        queue.enqueue(tensor_of(9), PATIENCE_S)
        check(other.dequeue(PATIENCE_S), 9)
        if damage == "lock":  # by its next cursor it would mend the other damage
            with contextlib.suppress(QueueEmpty, ProtocolError):
                evicted.dequeue(0)
        time.sleep(0.011)  # from then on an enqueue looks around
    assert 1 == queue.stats().losses
    go_on(queue, [other], 300)
    for number, tensor in enumerate(kept):
        check(tensor, number)
        tensor.fill_(-1)
    del tensor
    before = queue.stats()
    kept.clear()
    held(queue)
    freed = before.blocks_in_use - queue.stats().blocks_in_use
    assert freed >= n_held
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as newcomer:
        if damage == "cursor":
            evicted.close()
        queue.wait_until_ready(PATIENCE_S)
        go_on(queue, [newcomer, other], 40)
        assert (0, 0) == held(queue)


# --- many and long --------------------------------------------------------------------------------


def test_many_threads_take_and_drop(make_queue: MakeQueue) -> None:
    """Threads that take from one reader, write, keep and drop never see another's bytes."""
    queue, (reader,) = make_queue(**{**SMALL, "arena_bytes": 40 * BLOCK_BYTES})
    wrong: list[str] = []
    n_taken: list[int] = []

    def take(seed: int) -> None:
        choice = random.Random(seed)
        kept: list[tuple[int, torch.Tensor]] = []
        count = 0
        with contextlib.suppress(QueueClosed):
            for number, tensor in reader:
                count += 1
                if not np.array_equal(content(number), tensor.numpy()):
                    wrong.append(f"number {number} came wrong")
                tensor.numpy()[:: choice.choice([1, 512])] = number
                kept.append((number, tensor))
                del tensor
                if len(kept) > 5:
                    old, own = kept.pop(choice.randrange(5))
                    if not np.all(own.numpy()[::512] == old):
                        wrong.append(f"number {old} changed")
        n_taken.append(count)

    threads = [threading.Thread(target=take, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for number in range(500):
        queue.enqueue((number, tensor_of(number)), PATIENCE_S)
    while reader.stats().lag:
        time.sleep(0.001)
    stats = queue.stats()
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [] == wrong
    assert 500 == sum(n_taken)
    assert 0 == stats.fallbacks


def memory_of(descriptor: int) -> tuple[int, int, int, int]:
    """Private memory, the file's pages in KiB, descriptors and mappings of this process."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"RssAnon:\s*(\d+)", status)
    assert match is not None
    return (
        int(match.group(1)),
        os.fstat(descriptor).st_blocks // 2,
        len(list(Path("/proc/self/fd").iterdir())),
        len(Path("/proc/self/maps").read_text().splitlines()),
    )


def test_steady_state(make_queue: MakeQueue) -> None:
    """A thousand messages to readers that keep the last few: memory and descriptors stay flat."""
    queue, readers = make_queue(n_readers=2, **{**SMALL, "arena_bytes": 256 * MIB})
    kept = [collections.deque[torch.Tensor](maxlen=k) for k in (3, 8)]
    source = torch.zeros(16 * MIB, dtype=torch.uint8)
    descriptor = queue._writer.segment.data_descriptor
    early = late = (0, 0, 0, 0)
    for number in range(1000):
        n_bytes = 15 * MIB + number * 7919 % MIB
        sent = source[:n_bytes]
        sent[::PAGE] = number % 251
        queue.enqueue(sent, PATIENCE_S)
        for reader, own in zip(readers, kept, strict=True):
            received = reader.dequeue(PATIENCE_S)
            assert np.array_equal(sent.numpy()[::PAGE], received.numpy()[::PAGE])
            received[0] = reader.rank  # each keeps one private page
            own.append(received)
            del received
        if number == 300:
            early = memory_of(descriptor)
    late = memory_of(descriptor)
    assert 0 == queue.stats().fallbacks
    grown = [after - before for before, after in zip(early, late, strict=True)]
    assert grown[0] < 8 * 1024, f"private memory: {grown}"
    assert grown[1] < 8 * 1024, f"the file: {grown}"
    assert grown[2] == 0, f"descriptors: {grown}"
    assert grown[3] < 40, f"mappings: {grown}"
    for own in kept:
        own.clear()
    assert (0, 0) == held(queue)


def state_dict(number: int) -> dict[str, torch.Tensor]:
    """Several hundred tensors of 1 KiB to 3 MiB, of several dtypes and shapes."""
    choice = random.Random(1)
    tensors = {}
    for index in range(400):
        n_bytes = 1024 << choice.randrange(7) if index % 20 else 1024 << choice.randrange(9, 12)
        raw = torch.from_numpy(content(1000 * number + index, n_bytes + 1024 * (index % 3)))
        dtype = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)[index % 4]
        tensors[f"layer.{index}.weight"] = raw.view(dtype).view(8, -1)
    return tensors


def test_state_dict(make_queue: MakeQueue) -> None:
    """A model's weights arrive exactly, again and again, and fall back to nothing."""
    queue, readers = make_queue(n_readers=2, arena_bytes="256 MiB")
    for number in range(2):
        sent = state_dict(number)
        queue.enqueue(sent, PATIENCE_S)
        for reader in readers:
            received = reader.dequeue(PATIENCE_S)
            assert list(sent) == list(received)
            for name, tensor in sent.items():
                assert (tensor.dtype, tensor.shape) == (received[name].dtype, received[name].shape)
                assert torch.equal(tensor.view(torch.uint8), received[name].view(torch.uint8))
                received[name].zero_()
            del received
    assert 0 == queue.stats().fallbacks
    assert (0, 0) == held(queue)


CALLS_PROGRAM = """
import os, sys
import torch
from shmcast import MessageQueue, QueueConfig

torch.set_num_threads(1)
config = QueueConfig(oob_threshold_bytes=65536, arena_bytes="256 MiB", chunk_bytes="2 MiB")
queue = MessageQueue(config)
reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
queue.wait_until_ready(30)
reader.wait_until_ready(30)
message = {
    f"layer.{index}": torch.ones(70_000 + 4096 * (index % 50), dtype=torch.uint8)
    for index in range(300)
}
received = None
for number in range(6):
    received = None
    os.access("/mark enqueue", os.F_OK)
    queue.enqueue(message)
    os.access("/mark dequeue", os.F_OK)
    received = reader.dequeue()
    os.access("/mark end", os.F_OK)
assert 0 == queue.stats().fallbacks
"""


def test_no_system_call_per_tensor(tmp_path: Path) -> None:
    """In the steady state 300 tensors are sent and taken with a handful of system calls."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace here")
    log = tmp_path / "calls"
    result = subprocess.run(
        [strace, "-o", log, sys.executable, "-c", CALLS_PROGRAM],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    if "ptrace" in result.stderr.lower() and result.returncode:
        pytest.skip(f"strace can't be used here: {result.stderr[:200]}")
    assert (0, "") == (result.returncode, result.stderr)
    calls: dict[str, list[list[str]]] = {"enqueue": [], "dequeue": [], "end": []}
    part: list[str] = []
    for line in log.read_text().splitlines():
        mark = re.search(r"/mark (\w+)", line)
        if mark:
            part = []
            calls[mark.group(1)].append(part)
        else:
            part.append(line)
    for name in ("enqueue", "dequeue"):
        assert 6 == len(calls[name])
        for steady in calls[name][3:]:
            assert len(steady) < 30, "\n".join(steady[:40])
