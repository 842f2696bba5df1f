"""THE contract: every reader gets every message once, whole, in order, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from typing import Any, Literal

import attrs
import numpy as np
import pytest
import torch
from conftest import PATIENCE_S, Child
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    ShmcastError,
)
from shmcast._ring import image_bytes
from shmcast.arena import LEAST_BLOCK_BYTES, LEAST_SHARED_BYTES
from shmcast.pickler import Pickler
from shmcast.writer import QueueStats

DTYPES = [
    torch.uint8,
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
ARRAY_DTYPES = ["u1", "f4", "i8", "c16", "?"]
KINDS = ["bytes", "bytearray", "buffer", "text", "tensor", "array", "strided", "nested", "empty"]
PAGE = mmap.PAGESIZE


@attrs.frozen
class Plan:
    """All that one run of the contract depends on; everything else follows from the seed."""

    seed: int
    n_readers: int
    n_chunks: int
    chunk_bytes: int
    oob_threshold_bytes: int
    arena_bytes: int
    receive: Literal["private", "copy"]
    spin_us: int
    keeps: float  # how many of the messages a reader keeps, for how long
    stalls: float  # how often an end stalls before a call
    patient: bool  # whether the ends wait for ever, or try again and again
    messages: tuple[tuple[str, int], ...]  # kind and size in bytes

    @property
    def config(self) -> QueueConfig:
        return QueueConfig(
            n_readers=self.n_readers,
            n_chunks=self.n_chunks,
            chunk_bytes=self.chunk_bytes,
            oob_threshold_bytes=self.oob_threshold_bytes,
            arena_bytes=self.arena_bytes,
            receive=self.receive,
            spin_us=self.spin_us,
        )

    def new_message(self, index: int, queue: MessageQueue) -> Any:
        """The message with this number as the writer has it, maybe in the memory of the queue."""
        message = self.expected(index)
        if self.messages[index][0] != "empty":
            return message
        tensor = queue.empty(message.shape, message.dtype)
        tensor.view(torch.uint8).copy_(message.view(torch.uint8))
        return tensor

    def expected(self, index: int) -> Any:
        """The message with this number, made anew."""
        kind, size = self.messages[index]
        return new_message(f"{self.seed} {index}", kind, size)

    def stalls_of(self, who: str) -> Iterator[None]:
        """Stalls now and then, each time it is asked."""
        choice = random.Random(f"{self.seed} {who}")
        while True:
            if choice.random() < self.stalls:
                time.sleep(choice.choice((0, 0.0001, 0.001, 0.003)))
            yield


def new_tensor(choice: random.Random, size: int, dtype: torch.dtype) -> torch.Tensor:
    raw = bytearray(choice.randbytes(size - size % dtype.itemsize))
    if dtype is torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def new_array(choice: random.Random, size: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(choice.choice(ARRAY_DTYPES))
    raw = bytearray(choice.randbytes(size - size % dtype.itemsize))
    if dtype == np.bool_:
        raw = bytearray(byte & 1 for byte in raw)
    return np.frombuffer(raw, dtype)


def new_message(seed: str, kind: str, size: int) -> Any:
    """A message of about this many bytes; the same one for the same arguments."""
    choice = random.Random(seed)
    if kind == "bytes":
        return choice.randbytes(size)
    if kind == "bytearray":
        return bytearray(choice.randbytes(size))
    if kind == "buffer":
        return PickleBuffer(bytearray(choice.randbytes(size)))
    if kind == "text":
        return choice.randbytes(size).decode("latin-1")
    if kind in ("tensor", "empty"):
        return new_tensor(choice, size, choice.choice(DTYPES))
    if kind == "array":
        return new_array(choice, size)
    if kind == "strided":
        return new_tensor(choice, 2 * size, choice.choice(DTYPES))[::2]
    same = new_tensor(choice, size // 3, choice.choice(DTYPES))
    return {
        "step": choice.getrandbits(70),
        "none": None,
        "parts": [same, new_array(choice, size // 3), choice.randbytes(size // 3), same],
        "more": {key: new_tensor(choice, choice.randrange(40), torch.int16) for key in range(3)},
    }


def print_of(message: Any) -> Any:
    """What says all about a message: types, dtypes, shapes, strides and every bit."""
    if isinstance(message, torch.Tensor):
        flat = message.clone(memory_format=torch.contiguous_format).reshape(-1)
        raw = flat.view(torch.uint8).numpy().tobytes()
        return "tensor", message.dtype, tuple(message.shape), raw
    if isinstance(message, np.ndarray):
        return "array", message.dtype.str, message.shape, message.strides, message.tobytes()
    if isinstance(message, list):
        is_first = [part is message[0] for part in message]  # the same object twice stays one
        return [print_of(part) for part in message], is_first
    if isinstance(message, dict):
        return {key: print_of(value) for key, value in message.items()}
    if isinstance(message, PickleBuffer | memoryview | bytearray):
        # A bare PickleBuffer arrives as any object that `memoryview` takes.
        return "buffer", bytes(memoryview(message))
    return type(message), message


def overwrite(message: Any) -> None:
    """Change all memory of a message that can be changed."""
    if isinstance(message, torch.Tensor):
        message.zero_()
    elif isinstance(message, np.ndarray):
        message[...] = 0
    elif isinstance(message, bytearray):
        message[:] = bytes(len(message))
    elif isinstance(message, PickleBuffer):
        memoryview(message)[:] = bytes(message.raw().nbytes)
    elif isinstance(message, dict):
        for part in (*message["parts"], *message["more"].values()):
            overwrite(part)


# --- the two ends ---------------------------------------------------------------------------------


def write(plan: Plan, queue: MessageQueue) -> QueueStats:
    """Enqueue every message of the plan, overwrite it at once, and close when all are attached."""
    stalls = plan.stalls_of("writer")
    for index in range(len(plan.messages)):
        message = plan.new_message(index, queue)
        next(stalls)
        if plan.patient:
            queue.enqueue(message, timeout=PATIENCE_S)
        else:
            give_up_at = time.monotonic() + PATIENCE_S
            for timeout in itertools.cycle((0, 0.0005)):
                assert time.monotonic() < give_up_at
                with contextlib.suppress(QueueFull):
                    queue.enqueue(message, timeout)
                    break
        overwrite(message)
    queue.wait_until_ready(PATIENCE_S)
    stats = queue.stats()
    queue.close()
    return stats


def dequeue(plan: Plan, reader: MessageReader) -> Any:
    """The next message, in the plan's way of waiting."""
    if plan.patient:
        return reader.dequeue(PATIENCE_S)
    give_up_at = time.monotonic() + PATIENCE_S
    for timeout in itertools.cycle((0, 0.0005)):
        assert time.monotonic() < give_up_at
        with contextlib.suppress(QueueEmpty):
            return reader.dequeue(timeout)
    raise AssertionError


def read(plan: Plan, handle: Handle, rank: int) -> list[str]:
    """
    Attach and read until the writer closes; what differs from the plan.

    It overwrites some of what it gets, keeps some for a while, and some till after its close; and
    looks at everything again when it lets go of it.
    """
    stalls = plan.stalls_of(f"rank {rank}")
    choice = random.Random(f"{plan.seed} keeps of rank {rank}")
    prints: list[Any] = []
    kept: list[tuple[int, Any, Any]] = []  # number, message, what it is to be in the end
    faults: list[str] = []

    def let_go(number: int, message: Any, expected: Any) -> None:
        if print_of(message) != expected:
            faults.append(f"rank {rank}: message {number} changed while it was kept")

    next(stalls)
    with MessageReader(handle, rank) as reader, contextlib.suppress(QueueClosed):
        while True:
            next(stalls)
            message = dequeue(plan, reader)
            prints.append(print_of(message))
            if choice.random() < plan.keeps:
                kept.append((len(prints) - 1, message, prints[-1]))
            if choice.random() < 0.5:
                overwrite(message)
                if kept and kept[-1][1] is message:
                    kept[-1] = (len(prints) - 1, message, print_of(message))
            if kept and choice.random() < 1 - plan.keeps:
                let_go(*kept.pop(choice.randrange(len(kept))))
            del message
    while kept:
        let_go(*kept.pop(choice.randrange(len(kept))))
    if len(prints) != len(plan.messages):
        faults.append(f"{len(prints)} messages of {len(plan.messages)}")
    for index, got in enumerate(prints[: len(plan.messages)]):
        expected = print_of(plan.expected(index))
        if got != expected:
            came_at = prints.index(expected) if expected in prints else None
            faults.append(f"rank {rank}: message {index} is another; it came {came_at}")
    return faults


StartReaders = Callable[[Plan, Handle], list[Callable[[], list[str]]]]


def run(plan: Plan, start_readers: StartReaders) -> QueueStats | None:
    """Hold the contract once; each started reader is given as what waits for its faults."""
    stats = None
    with MessageQueue(plan.config) as queue:
        readers = start_readers(plan, queue.export_handle())
        error = None
        try:
            if plan.seed % 2:
                queue.wait_until_ready(PATIENCE_S)
            stats = write(plan, queue)
        except (ShmcastError, AssertionError) as raised:
            error = raised
            queue.close()
        assert (None, [[]] * plan.n_readers) == (error, [reader() for reader in readers])
    return stats


def start_threads(plan: Plan, handle: Handle) -> list[Callable[[], list[str]]]:
    """Readers that are threads of this process."""

    def start(rank: int) -> Callable[[], list[str]]:
        faults: list[str] = [f"rank {rank} did not end"]

        def call() -> None:
            try:
                faults[:] = read(plan, handle, rank)
            except BaseException as error:
                faults[:] = [f"rank {rank} raised {error!r}"]

        thread = threading.Thread(target=call, daemon=True)
        thread.start()

        def wait() -> list[str]:
            thread.join(2 * PATIENCE_S)
            return faults

        return wait

    return [start(rank) for rank in range(plan.n_readers)]


def serve(pipe: Connection) -> None:
    """A reader's process, for one plan after another."""
    torch.set_num_threads(1)
    while True:
        number, plan, handle, rank = pipe.recv()
        try:
            pipe.send((number, read(plan, handle, rank)))
        except BaseException as error:
            pipe.send((number, [f"rank {rank} raised {error!r}"]))


@pytest.fixture(scope="module")
def start_processes() -> Iterator[StartReaders]:
    """Readers that are processes; the same ones for all the tests here."""
    children = [Child("spawn", serve) for _ in range(4)]
    numbers = itertools.count()

    def start(plan: Plan, handle: Handle) -> list[Callable[[], list[str]]]:
        number = next(numbers)

        def wait(child: Child) -> list[str]:
            faults: list[str]
            answered, faults = child.receive(2 * PATIENCE_S)
            while answered != number:  # of a plan whose end nobody saw
                answered, faults = child.receive(2 * PATIENCE_S)
            return faults

        for rank in range(plan.n_readers):
            children[rank].pipe.send((number, plan, handle, rank))
            # Remote readers that attach all at once may miss each other's relay, and then wait for
            # ever: a fault, which the handbook names.
            time.sleep(0.05)
        return [functools.partial(wait, children[rank]) for rank in range(plan.n_readers)]

    yield start
    for child in children:
        child.kill()
        child.pipe.close()


# --- plans ----------------------------------------------------------------------------------------


def sizes_at_the_edges(chunk_bytes: int, threshold_bytes: int) -> st.SearchStrategy[int]:
    """0, 1, around threshold, chunk and least block, several chunks, and anything between."""
    edges = [0, 1, 63, 64, 65]
    for edge in (
        threshold_bytes,
        LEAST_SHARED_BYTES,
        LEAST_BLOCK_BYTES,
        chunk_bytes,
        chunk_bytes - 128,
        2 * chunk_bytes,
    ):
        edges += [edge - 1, edge, edge + 1]
    edges += [3 * chunk_bytes + 1, 7 * chunk_bytes]
    allowed = sorted({edge for edge in edges if 0 <= edge <= 300_000})
    return st.one_of(st.sampled_from(allowed), st.integers(0, chunk_bytes + chunk_bytes // 4))


@st.composite
def plans(draw: st.DrawFn, most_messages: int) -> Plan:
    """A plan of any kind."""
    chunk_bytes = draw(st.sampled_from([1024, 1025, 4096, 16384, 40000]))
    threshold_bytes = draw(st.sampled_from([0, 1, 100, 1024, 5000, LEAST_BLOCK_BYTES, 1 << 20]))
    sizes = sizes_at_the_edges(chunk_bytes, threshold_bytes)
    return Plan(
        seed=draw(st.integers(0, 2**32 - 1)),
        n_readers=draw(st.integers(1, 4)),
        n_chunks=draw(st.sampled_from([1, 2, 3, 17])),
        chunk_bytes=chunk_bytes,
        oob_threshold_bytes=threshold_bytes,
        arena_bytes=draw(st.sampled_from([0, 1, 3 * PAGE, 40 * PAGE, 64 << 20])),
        receive=draw(st.sampled_from(["private", "copy"])),
        spin_us=draw(st.sampled_from([0, 30])),
        keeps=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        stalls=draw(st.sampled_from([0.0, 0.1, 0.5])),
        patient=draw(st.booleans()),
        messages=tuple(
            draw(st.lists(st.tuples(st.sampled_from(KINDS), sizes), max_size=most_messages))
        ),
    )


@settings(max_examples=80)
@given(plans(most_messages=40))
def test_contract_with_threads(plan: Plan) -> None:
    """With readers in threads: every message once, whole, in order, bit for bit, then the end."""
    run(plan, start_threads)


@settings(max_examples=100)
@given(plan=plans(most_messages=60))
def test_contract_with_processes(start_processes: StartReaders, plan: Plan) -> None:
    """With readers in processes: every message once, whole, in order, bit for bit, then the end."""
    run(plan, start_processes)


def test_contract_wraps_for_long(start_processes: StartReaders) -> None:
    """A ring of three chunks that wraps hundreds of times keeps the contract with processes."""
    choice = random.Random(6)
    sizes = (0, 1, 800, 1023, 1024, 1025, 3000)
    plan = Plan(
        seed=7,
        n_readers=2,
        n_chunks=3,
        chunk_bytes=1024,
        oob_threshold_bytes=900,
        arena_bytes=100 * PAGE,
        receive="private",
        spin_us=30,
        keeps=0.1,
        stalls=0.01,
        patient=True,
        messages=tuple((choice.choice(KINDS[:7]), choice.choice(sizes)) for _ in range(2000)),
    )
    run(plan, start_processes)


@pytest.mark.parametrize("receive", ["private", "copy"])
def test_contract_under_pressure(
    start_processes: StartReaders, receive: Literal["private", "copy"]
) -> None:
    """An arena that is full now and then keeps the contract: some messages go by memory files."""
    choice = random.Random(8)
    # The last one never fits.
    edges = [LEAST_SHARED_BYTES + more for more in (-1, 0, 1, PAGE, 3 * PAGE + 5, 50 * PAGE)]
    plan = Plan(
        seed=9,
        n_readers=2,
        n_chunks=4,
        chunk_bytes=1024,
        oob_threshold_bytes=1000,
        arena_bytes=60 * PAGE,
        receive=receive,
        spin_us=30,
        keeps=0.5,
        stalls=0.01,
        patient=True,
        messages=tuple((choice.choice(KINDS), choice.choice(edges)) for _ in range(300)),
    )
    stats = run(plan, start_processes)
    assert stats is not None
    assert 10 < stats.fallbacks < 290


# --- every edge, one by one -----------------------------------------------------------------------


def size_of(message: Any, threshold_bytes: int) -> int:
    """How large the image of a message is."""
    return image_bytes(*Pickler(threshold_bytes).dumps(message))


def sized(kind: str, image_size_bytes: int, threshold_bytes: int) -> int:
    """For which size a message of this kind has an image of this size."""
    for size in range(max(0, image_size_bytes - 500), image_size_bytes):
        if size_of(new_message("0", kind, size), threshold_bytes) == image_size_bytes:
            return size
    raise AssertionError(f"no {kind} has an image of {image_size_bytes} bytes")


@pytest.mark.parametrize("arena_bytes", [0, 1 << 20])
@pytest.mark.parametrize(("n_chunks", "spin_us"), [(1, 30), (2, 0), (3, 30)])
@pytest.mark.parametrize("chunk_bytes", [1024, 1500, 4096, 20000])
def test_edges_of_a_chunk(chunk_bytes: int, n_chunks: int, spin_us: int, arena_bytes: int) -> None:
    """Images of just less, just more and just as much as a chunk arrive by the right path."""
    for kind, threshold_bytes in (("bytes", 1 << 20), ("buffer", 1 << 20), ("buffer", 500)):
        edges = (chunk_bytes - 1, chunk_bytes, chunk_bytes + 1)
        sizes = [sized(kind, edge, threshold_bytes) for edge in edges]
        plan = Plan(
            seed=0,
            n_readers=1,
            n_chunks=n_chunks,
            chunk_bytes=chunk_bytes,
            oob_threshold_bytes=threshold_bytes,
            arena_bytes=arena_bytes,
            receive="private",
            spin_us=spin_us,
            keeps=1.0,
            stalls=0.0,
            patient=True,
            messages=tuple((kind, size) for size in (*sizes, *reversed(sizes), 0)),
        )
        run(plan, start_threads)
        with MessageQueue(plan.config) as queue, MessageReader(queue.export_handle(), 0) as reader:
            for index, is_large in enumerate((False, False, True)):
                queue.enqueue(plan.expected(index))
                assert print_of(plan.expected(index)) == print_of(reader.dequeue(PATIENCE_S))
                stats = queue.stats()
                leaves_image = threshold_bytes == 500 and chunk_bytes > LEAST_SHARED_BYTES
                expected = (is_large or leaves_image, 0) if arena_bytes else (0, is_large)
                assert expected == (stats.blocks_in_use, stats.fallbacks)


@pytest.mark.parametrize("arena_bytes", [0, 1 << 20])
@pytest.mark.parametrize("chunk_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("threshold_bytes", [0, 1, 64, 1000, LEAST_BLOCK_BYTES, 70000])
def test_edges_of_the_threshold(threshold_bytes: int, chunk_bytes: int, arena_bytes: int) -> None:
    """Buffers of one byte less and more than the threshold, and of just it, arrive bit for bit."""
    edge = max(threshold_bytes, 1)
    sizes = (0, edge - 1, edge, edge + 1, edge - 1, 0, edge)
    plan = Plan(
        seed=1,
        n_readers=2,
        n_chunks=2,
        chunk_bytes=chunk_bytes,
        oob_threshold_bytes=threshold_bytes,
        arena_bytes=arena_bytes,
        receive="private",
        spin_us=0,
        keeps=0.5,
        stalls=0.0,
        patient=True,
        messages=tuple((kind, size) for size in sizes for kind in KINDS),
    )
    run(plan, start_threads)
    buffers = [
        len(Pickler(threshold_bytes).dumps(new_message("0", "buffer", size))[1]) for size in sizes
    ]
    assert [0, 0, 1, 1, 0, 0, 1] == buffers


@pytest.mark.parametrize("receive", ["private", "copy"])
def test_edges_of_a_block(receive: Literal["private", "copy"]) -> None:
    """A buffer gets a block from LEAST_SHARED_BYTES on, of as many whole pages as it needs."""
    config = QueueConfig(
        n_chunks=2, chunk_bytes="1 MiB", oob_threshold_bytes=0, arena_bytes="1 MiB", receive=receive
    )
    least_pages = LEAST_SHARED_BYTES // PAGE
    with MessageQueue(config) as queue, MessageReader(queue.export_handle(), 0) as reader:
        for kind in ("buffer", "tensor", "array", "strided"):
            for more_bytes, n_pages in (
                (-16, 0),
                (0, least_pages),
                (16, least_pages + 1),
                (PAGE, least_pages + 1),
                (PAGE + 16, least_pages + 2),
            ):
                message = new_message("0", kind, LEAST_SHARED_BYTES + more_bytes)
                queue.enqueue(message)
                stats = queue.stats()
                expected = (1 if n_pages else 0, n_pages * PAGE, 0)
                assert expected == (
                    stats.blocks_in_use,
                    stats.arena_bytes_in_use,
                    stats.fallbacks,
                )
                assert print_of(message) == print_of(reader.dequeue(PATIENCE_S))
                queue.enqueue(new_message("0", "buffer", 2 * LEAST_SHARED_BYTES))  # it looks
                reader.dequeue(PATIENCE_S)
                assert 1 == queue.stats().blocks_in_use
                queue._writer.arena.reclaim()
                assert 0 == queue.stats().blocks_in_use
