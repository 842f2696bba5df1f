"""A signal handler that raises, at any line: what the next calls find is in order."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import PATIENCE_S, MakeQueue

from shmcast import (
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
)
from shmcast._ring import EndLock
from shmcast.control import WriterControl
from shmcast.segment import Segment

#: So many interrupted calls are tried; each seed is printed when it fails.
ROUNDS = 400

# What the library's `Path.read_text` had open when it was interrupted closes itself, and warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Interrupt(BaseException):
    """What the handler raises: no ShmcastError and no Exception, like KeyboardInterrupt."""


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """An alarm raises Interrupt, wherever the program is, but for one place."""

    def handler(_: int, frame: FrameType | None) -> None:
        where = frame
        while where is not None:
            # The library's own `accept` loses an open descriptor if it is interrupted.
            if where.f_code is socket.socket.accept.__code__:
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                return
            where = where.f_back
        raise Interrupt

    previous = signal.signal(signal.SIGALRM, handler)
    before = memory_files()
    yield
    signal.signal(signal.SIGALRM, previous)
    gc.collect()  # here, where the warnings about what was cut off are expected
    for descriptor in memory_files() - before:  # other tests look for them
        os.close(descriptor)


def interrupted(call: Callable[[], object], delay_s: float) -> bool:
    """Run a call with an alarm set; whether that ended it. Afterwards no alarm is left."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        call()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        return True
    return False


def memory_files() -> set[int]:
    """The descriptors of memory files, but for those of locks, which have an owner for ever."""
    names = ("data", "control", "message")
    paths = {f"/memfd:shmcast-{name} (deleted)" for name in names}
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory's own
            if str(entry.readlink()) in paths:
                found.add(int(entry.name))
    return found


def n_descriptors() -> int:
    """How many descriptors are open, the one that counts them too."""
    return len(list(Path("/proc/self/fd").iterdir()))


def drained(reader: MessageReader) -> list[Any]:
    """Everything that can be read now."""
    messages = []
    with contextlib.suppress(QueueEmpty):
        while True:
            messages.append(reader.dequeue(0))
    return messages


@pytest.mark.parametrize(
    ("n_bytes", "most_s"),
    [(10, 30e-6), (3000, 60e-6), (40_000, 300e-6)],
    ids=["small", "oob", "file"],
)
def test_interrupted_enqueue(make_queue: MakeQueue, n_bytes: int, most_s: float) -> None:
    """An interrupted enqueue published its message or did not; every other one arrives whole."""
    queue, (reader,) = make_queue(chunk_bytes=16384, oob_threshold_bytes=1000, n_chunks=8)
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    before = n_descriptors()
    for index in range(ROUNDS):
        sent = [index, bytearray(index.to_bytes(4, "little") * (n_bytes // 4))]
        delay_s = delays.uniform(1e-6, most_s)
        is_cut = interrupted(lambda sent=sent: queue.enqueue(sent), delay_s)
        queue.enqueue("next")
        arrived = drained(reader)
        allowed = [[sent, "next"], ["next"]] if is_cut else [[sent, "next"]]
        assert arrived in allowed, f"seed {seed}, round {index}"
    # One that was being made when its call was interrupted may leak, but not one a round.
    assert n_descriptors() - before < ROUNDS // 4


def test_interrupted_dequeue(make_queue: MakeQueue) -> None:
    """An interrupted dequeue loses at most the message that it was about to return."""
    queue, (reader,) = make_queue(chunk_bytes=16384, n_chunks=8)
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    for index in range(ROUNDS):
        queue.enqueue(("first", index))
        queue.enqueue(("second", index))
        got: list[object] = []
        delay_s = delays.uniform(1e-6, 20e-6)
        interrupted(lambda got=got: got.append(reader.dequeue()), delay_s)
        got += drained(reader)
        allowed = [[("first", index), ("second", index)], [("second", index)]]
        assert got in allowed, f"seed {seed}, round {index}"
        assert 0 == reader.stats().lag
    assert queue.stats().bytes == reader.stats().bytes


def test_interrupted_close() -> None:
    """A close that was interrupted is finished by the next one; nothing stays open or waits."""
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    before = n_descriptors()
    for index in range(ROUNDS // 4):
        queue = MessageQueue(QueueConfig(chunk_bytes=4096, n_chunks=2))
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
        first, second = (reader, queue) if index % 2 else (queue, reader)
        interrupted(first.close, delays.uniform(1e-6, 150e-6))
        first.close()
        if first is queue:
            with pytest.raises(QueueClosed):
                reader.dequeue(PATIENCE_S)
        else:
            time.sleep(0.011)  # from then on an enqueue looks around
            with pytest.raises(ReaderLost, match="nobody is left"):
                queue.enqueue(1)
        second.close()
    # A descriptor that was between two Python lines may leak, but not one a round.
    assert n_descriptors() - before < ROUNDS // 16, f"seed {seed}"


def test_interrupted_handshake() -> None:
    """After an interrupt a reader is admitted, or says at once that it never will be."""
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    outcomes = set()
    for index in range(ROUNDS // 4):
        with (
            MessageQueue(QueueConfig(chunk_bytes=4096, n_chunks=2)) as queue,
            MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
        ):
            delay_s = delays.uniform(1e-6, 600e-6)
            interrupted(lambda reader=reader: reader.wait_until_ready(PATIENCE_S), delay_s)
            try:
                reader.wait_until_ready(PATIENCE_S / 3)
                queue.enqueue(index)
                outcomes.add(reader.dequeue(PATIENCE_S) == index)
            except QueueNotReady:
                pytest.fail(f"it hangs: seed {seed}, round {index}")
            except ShmcastError as error:
                outcomes.add("interrupted" in str(error) or "ended before" in str(error))
    assert outcomes == {True}


def test_finish_that_fails_is_repeated() -> None:
    """What closes an end is called until it has returned once."""
    calls = []

    def finish() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise Interrupt

    lock = EndLock("writer")
    with pytest.raises(Interrupt):
        lock.close(finish)
    for _ in range(3):
        lock.close(finish)
    assert [0, 1] == calls


def test_a_loss_is_reported_later(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that an interrupted call found is raised by the next one."""
    queue, _ = make_queue(n_readers=2)
    monkeypatch.setattr(WriterControl, "is_dead", lambda _, holder: holder.rank == 1)

    def interrupt(_: WriterControl) -> None:
        monkeypatch.undo()
        raise Interrupt

    monkeypatch.setattr(WriterControl, "serve", interrupt)
    time.sleep(0.011)  # from then on an enqueue looks around
    with pytest.raises(Interrupt):
        queue.enqueue(1)
    time.sleep(0.011)
    with pytest.raises(ReaderLost) as lost:
        queue.enqueue(1)
    assert (1,) == lost.value.ranks
    queue.enqueue(1)


def test_an_alarm_is_no_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's TimeoutError in the handshake comes once, and is not kept as the reason."""

    def attach(*_: int) -> Segment:
        raise TimeoutError("my alarm")

    with (
        MessageQueue(QueueConfig()) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        monkeypatch.setattr(Segment, "attach", attach)
        with pytest.raises(TimeoutError, match="my alarm"):
            reader.wait_until_ready(PATIENCE_S)
        with pytest.raises(ShmcastError, match="interrupted"):
            reader.wait_until_ready(PATIENCE_S)


def test_a_rank_is_offered_when_its_byte_is_free(make_queue: MakeQueue) -> None:
    """A claim waits while one that has left still holds the rank's byte."""
    queue, (leaver,) = make_queue()
    leaver._ring.leave()
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as newcomer:
        with pytest.raises(QueueNotReady):
            newcomer.wait_until_ready(0.05)
        leaver.close()
        newcomer.wait_until_ready(PATIENCE_S)
        queue.enqueue("for the newcomer")
        assert "for the newcomer" == newcomer.dequeue(PATIENCE_S)


def test_a_reader_that_was_never_accepted_hears_of_the_end() -> None:
    """A reader that connected just before the writer closed gets QueueClosed."""
    queue = MessageQueue(QueueConfig())
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.close()
        with pytest.raises(QueueClosed):
            reader.wait_until_ready(PATIENCE_S)


def test_iteration_lets_go_of_each_message(make_queue: MakeQueue) -> None:
    """A reader that is iterated over keeps no message while it waits for the next one."""
    queue, (reader,) = make_queue()
    queue.enqueue({1, 2})
    alive = []

    def is_alive() -> bool:
        return any(reference() is not None for reference in alive)

    def look_and_close() -> None:
        seen.append(is_alive())
        queue.close()

    seen: list[bool] = []
    closer = threading.Timer(0.1, look_and_close)
    for message in reader:
        alive.append(weakref.ref(message))
        del message
        closer.start()
    closer.join()  # the iteration ends while the close is still under way
    assert [False] == seen
