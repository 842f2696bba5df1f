"""THE contract: every reader gets every message once, whole, in order, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from typing import Any

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
from shmcast.pickler import Pickler

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
KINDS = ["bytes", "bytearray", "buffer", "text", "tensor", "array", "strided", "nested"]


@attrs.frozen
class Plan:
    """All that one run of the contract depends on; everything else follows from the seed."""

    seed: int
    n_readers: int
    n_chunks: int
    chunk_bytes: int
    oob_threshold_bytes: int
    spin_us: int
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
            spin_us=self.spin_us,
        )

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
    if kind == "tensor":
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


def write(plan: Plan, queue: MessageQueue) -> None:
    """Enqueue every message of the plan, overwrite it at once, and close when all are attached."""
    stalls = plan.stalls_of("writer")
    for index in range(len(plan.messages)):
        message = plan.expected(index)
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
    queue.close()


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

    A reader of an even rank keeps everything and looks at it again after its close; one of an odd
    rank overwrites all that it gets.
    """
    stalls = plan.stalls_of(f"rank {rank}")
    kept: list[Any] = []
    next(stalls)
    with MessageReader(handle, rank) as reader:
        prints = []
        with contextlib.suppress(QueueClosed):
            while True:
                next(stalls)
                message = dequeue(plan, reader)
                prints.append(print_of(message))
                kept.append(message)
                if rank % 2:
                    overwrite(message)
    expected = [print_of(plan.expected(index)) for index in range(len(plan.messages))]
    faults = [f"{len(prints)} messages of {len(expected)}"] if len(prints) != len(expected) else []
    looks = [("received", prints)]
    if rank % 2 == 0:
        looks.append(("kept", [print_of(message) for message in kept]))
    for what, got in looks:
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            if one != other:
                came_at = got.index(one) if one in got else None
                faults.append(f"rank {rank} {what}: message {index} is another; it came {came_at}")
    return faults


StartReaders = Callable[[Plan, Handle], list[Callable[[], list[str]]]]


def run(plan: Plan, start_readers: StartReaders) -> None:
    """Hold the contract once; each started reader is given as what waits for its faults."""
    with MessageQueue(plan.config) as queue:
        readers = start_readers(plan, queue.export_handle())
        error = None
        try:
            if plan.seed % 2:
                queue.wait_until_ready(PATIENCE_S)
            write(plan, queue)
        except (ShmcastError, AssertionError) as raised:
            error = raised
            queue.close()
        assert (None, [[]] * plan.n_readers) == (error, [reader() for reader in readers])


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
        return [functools.partial(wait, children[rank]) for rank in range(plan.n_readers)]

    yield start
    for child in children:
        child.kill()
        child.pipe.close()


# --- plans ----------------------------------------------------------------------------------------


def sizes_at_the_edges(chunk_bytes: int, threshold_bytes: int) -> st.SearchStrategy[int]:
    """0, 1, around the threshold and the chunk, several chunks, and anything between."""
    edges = [0, 1, 63, 64, 65]
    for edge in (threshold_bytes, chunk_bytes, chunk_bytes - 128, 2 * chunk_bytes):
        edges += [edge - 1, edge, edge + 1]
    edges += [3 * chunk_bytes + 1, 7 * chunk_bytes]
    allowed = sorted({edge for edge in edges if 0 <= edge <= 300_000})
    return st.one_of(st.sampled_from(allowed), st.integers(0, chunk_bytes + chunk_bytes // 4))


@st.composite
def plans(draw: st.DrawFn, most_messages: int) -> Plan:
    """A plan of any kind."""
    chunk_bytes = draw(st.sampled_from([1024, 1025, 4096, 16384, 40000]))
    threshold_bytes = draw(st.sampled_from([0, 1, 100, 1024, 5000, 1 << 20]))
    sizes = sizes_at_the_edges(chunk_bytes, threshold_bytes)
    return Plan(
        seed=draw(st.integers(0, 2**32 - 1)),
        n_readers=draw(st.integers(1, 4)),
        n_chunks=draw(st.sampled_from([1, 2, 3, 17])),
        chunk_bytes=chunk_bytes,
        oob_threshold_bytes=threshold_bytes,
        spin_us=draw(st.sampled_from([0, 30])),
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
        spin_us=30,
        stalls=0.01,
        patient=True,
        messages=tuple((choice.choice(KINDS[:-1]), choice.choice(sizes)) for _ in range(2000)),
    )
    run(plan, start_processes)


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


@pytest.mark.parametrize("spin_us", [0, 30])
@pytest.mark.parametrize("n_chunks", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [1024, 1500, 4096, 20000])
def test_edges_of_a_chunk(chunk_bytes: int, n_chunks: int, spin_us: int) -> None:
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
            spin_us=spin_us,
            stalls=0.0,
            patient=True,
            messages=tuple((kind, size) for size in (*sizes, *reversed(sizes), 0)),
        )
        run(plan, start_threads)
        with MessageQueue(plan.config) as queue, MessageReader(queue.export_handle(), 0) as reader:
            for index, expected_fallbacks in enumerate((0, 0, 1)):
                queue.enqueue(plan.expected(index))
                assert print_of(plan.expected(index)) == print_of(reader.dequeue(PATIENCE_S))
                assert expected_fallbacks == queue.stats().fallbacks


@pytest.mark.parametrize("chunk_bytes", [1024, 1 << 20])
@pytest.mark.parametrize("threshold_bytes", [0, 1, 64, 1000, 70000])
def test_edges_of_the_threshold(threshold_bytes: int, chunk_bytes: int) -> None:
    """Buffers of one byte less and more than the threshold, and of just it, arrive bit for bit."""
    edge = max(threshold_bytes, 1)
    sizes = (0, edge - 1, edge, edge + 1, edge - 1, 0, edge)
    plan = Plan(
        seed=1,
        n_readers=2,
        n_chunks=2,
        chunk_bytes=chunk_bytes,
        oob_threshold_bytes=threshold_bytes,
        spin_us=0,
        stalls=0.0,
        patient=True,
        messages=tuple((kind, size) for size in sizes for kind in KINDS),
    )
    run(plan, start_threads)
    buffers = [
        len(Pickler(threshold_bytes).dumps(new_message("0", "buffer", size))[1]) for size in sizes
    ]
    assert [0, 0, 1, 1, 0, 0, 1] == buffers
