"""Signals end or interrupt every wait as they should, and an idle end costs next to nothing."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest
from conftest import PATIENCE_S, StartChild

from shmcast import (
    MessageQueue,
    MessageReader,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
)
from shmcast.writer import Writer

# The promise is 10 ms; a test asserts twenty times that.
INTERRUPTED_S = 20 * 0.010
# The promise is 1 % of a core; a test asserts twenty times that.
IDLE_SHARE = 20 * 0.01
#: Does not fit a chunk of the queues here: it takes a block, or without an arena a memory file.
LARGE_BYTES = 10_000

WAITS = [
    "enqueue, full ring",
    "enqueue, full ring, in a block",
    "enqueue, full socket",
    "dequeue",
    "dequeue before the handshake",
    "writer's wait_until_ready",
    "reader's wait_until_ready",
    "writer's turn",
    "reader's turn",
]


@attrs.define
class Situation:
    """Ends in a state in which a call waits, and what must work afterwards."""

    call: Callable[[float | None], Any]
    check: Callable[[], None]


@contextlib.contextmanager
def situation(wait: str) -> Iterator[Situation]:
    """A queue in this process in which `call` waits until its timeout."""
    n_chunks, arena_bytes = (600, 0) if wait == "enqueue, full socket" else (2, "1 MiB")
    with contextlib.ExitStack() as ends:
        config = QueueConfig(
            n_readers=2, n_chunks=n_chunks, chunk_bytes=4096, arena_bytes=arena_bytes
        )
        queue = ends.enter_context(MessageQueue(config))
        readers: list[MessageReader] = []

        def attach(rank: int) -> None:
            reader = MessageQueue.create_from_handle(queue.export_handle(), rank)
            readers.append(ends.enter_context(reader))

        def take(number: int) -> None:
            assert [number] * 2 == [reader.dequeue(PATIENCE_S)[0] for reader in readers]

        def use() -> None:
            for number in range(5):
                queue.enqueue((number, bytes(LARGE_BYTES)), PATIENCE_S)
                take(number)

        is_unanswered = wait in ("reader's wait_until_ready", "dequeue before the handshake")
        if is_unanswered:  # from before there is a claim
            answer = Writer.survey
            ends.callback(setattr, Writer, "survey", answer)
            Writer.survey = lambda _: 0.0  # type: ignore[method-assign]  # it is busy
        attach(0)
        if wait == "writer's wait_until_ready":

            def attach_the_other() -> None:
                attach(1)
                use()

            yield Situation(queue.wait_until_ready, attach_the_other)
            return
        attach(1)
        if is_unanswered:

            def answer_again() -> None:
                Writer.survey = answer  # type: ignore[method-assign]
                use()

            is_dequeue = wait.startswith("dequeue")
            call = readers[0].dequeue if is_dequeue else readers[0].wait_until_ready
            yield Situation(call, answer_again)
            return
        queue.wait_until_ready(PATIENCE_S)
        for reader in readers:
            reader.wait_until_ready(PATIENCE_S)
        if wait == "dequeue":
            yield Situation(readers[0].dequeue, use)
            return
        if wait == "reader's turn":
            thread = threading.Thread(target=readers[0].dequeue)
            thread.start()
            while not readers[0].stats().waits:
                time.sleep(0.001)

            def end_the_turn() -> None:
                queue.enqueue("for the thread")
                thread.join(PATIENCE_S)
                assert "for the thread" == readers[1].dequeue(PATIENCE_S)
                use()

            yield Situation(readers[0].dequeue, end_the_turn)
            return
        content = bytes(1 if wait in ("enqueue, full ring", "writer's turn") else LARGE_BYTES)
        n_published = 0
        with contextlib.suppress(QueueFull):
            while True:
                queue.enqueue((n_published, content), 0)
                n_published += 1

        def enqueue(timeout: float | None) -> None:
            queue.enqueue(("is not published", content), timeout)

        def take_all() -> None:
            if wait == "enqueue, full ring, in a block":
                assert n_published == queue.stats().blocks_in_use  # none of an interrupted call
            for number in range(n_published):
                take(number)
            use()

        if wait == "writer's turn":
            thread = threading.Thread(target=queue.enqueue, args=((n_published, content),))
            waits = queue.stats().waits
            thread.start()
            while queue.stats().waits == waits:
                time.sleep(0.001)

            def end_both_turns() -> None:
                take(0)
                thread.join(PATIENCE_S)
                for number in range(1, n_published + 1):
                    take(number)
                use()

            yield Situation(enqueue, end_both_turns)
        else:
            yield Situation(enqueue, take_all)


# --- Ctrl-C ---------------------------------------------------------------------------------------


def be_interrupted(pipe: Connection, wait: str, timeout: float | None, n_times: int) -> None:
    """Wait, report when the interruption came, and check the queue in the end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent may ignore it
    with situation(wait) as this:
        for _ in range(n_times):
            try:
                pipe.send("waiting")
                this.call(timeout)
            except KeyboardInterrupt:
                pipe.send(time.monotonic())
        this.check()
    pipe.send("good")


@pytest.mark.parametrize(
    ("wait", "timeout"),
    [(wait, None) for wait in WAITS]
    + [(wait, 60.0) for wait in ("dequeue", "enqueue, full ring", "writer's turn")],
)
def test_interrupted(
    start_child: StartChild, wait: str, timeout: float | None, record_property: Any
) -> None:
    """Ctrl-C ends this wait at once, again and again, and the queue goes on with nothing lost."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed = {seed}")  # noqa: T201  # to replay a failure
    rng = random.Random(seed)
    n_times = 3
    child = start_child(be_interrupted, wait, timeout, n_times, method="forkserver")
    delays_s = []
    for _ in range(n_times):
        assert "waiting" == child.receive()
        time.sleep(rng.uniform(0.02, 0.2))  # into short slices of sleep, or long ones
        sent_at = time.monotonic()
        os.kill(child.pid, signal.SIGINT)
        delays_s.append(child.receive() - sent_at)
    record_property("interrupted_s", max(delays_s))
    assert max(delays_s) < INTERRUPTED_S
    assert "good" == child.receive()


# --- handlers that return -------------------------------------------------------------------------


@contextlib.contextmanager
def signals_every(pause_s: float) -> Iterator[list[int]]:
    """Send this thread SIGUSR1 all the time; the list grows with every call of the handler."""
    calls: list[int] = []
    is_over = threading.Event()
    this_thread = threading.get_ident()

    def send() -> None:
        while not is_over.wait(pause_s):
            signal.pthread_kill(this_thread, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield calls
    finally:
        is_over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("wait", WAITS)
def test_handler_that_returns(wait: str) -> None:
    """A handler that does not raise runs during a wait and neither ends it nor starts it anew."""
    timeout_s = 0.25
    with situation(wait) as this:
        with signals_every(0.005) as calls:
            start = time.monotonic()
            with pytest.raises((QueueFull, QueueEmpty, QueueNotReady)):
                this.call(timeout_s)
            elapsed_s = time.monotonic() - start
        assert elapsed_s >= timeout_s
        assert len(calls) >= 3
        this.check()


def test_handler_that_raises_its_own() -> None:
    """What a handler raises comes out of the wait as it is, and nothing is lost."""

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        for wait in ("dequeue", "enqueue, full ring"):
            with situation(wait) as this:
                timer = threading.Timer(
                    0.03, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
                )
                timer.start()
                with pytest.raises(Stop):
                    this.call(PATIENCE_S)
                timer.join()
                this.check()
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_call_from_a_handler() -> None:
    """A handler that calls the end that waits gets an error instead of a deadlock."""
    texts: list[str] = []
    with MessageQueue(QueueConfig(n_chunks=1, chunk_bytes=4096)) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        with reader:
            reader.wait_until_ready(PATIENCE_S)

            def call(*_: object) -> None:
                try:
                    reader.dequeue(PATIENCE_S)
                except Exception as error:
                    texts.append(str(error))

            previous = signal.signal(signal.SIGUSR1, call)
            timer = threading.Timer(
                0.03, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
            )
            try:
                timer.start()
                with pytest.raises(QueueEmpty):
                    reader.dequeue(0.2)
                timer.join()
            finally:
                signal.signal(signal.SIGUSR1, previous)
            assert ["inside another one" in text for text in texts] == [True]
            queue.enqueue("arrives")
            assert "arrives" == reader.dequeue(PATIENCE_S)


def use_other_end_in_a_handler(pipe: Connection) -> None:
    """Wait for a message that a signal handler sends, with both ends in this thread."""
    with (
        MessageQueue(QueueConfig()) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        reader.wait_until_ready(PATIENCE_S)
        signal.signal(signal.SIGUSR1, lambda *_: queue.enqueue("from the handler"))
        pipe.send("waiting")
        pipe.send(reader.dequeue(PATIENCE_S))


def test_handler_that_uses_the_other_end(start_child: StartChild) -> None:
    """A handler may enqueue what the interrupted dequeue waits for."""
    child = start_child(use_other_end_in_a_handler, method="forkserver")
    assert "waiting" == child.receive()
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGUSR1)
    assert "from the handler" == child.receive()


#: So many messages and signals at least. On a busy machine several signals become one.
N_STORM_MESSAGES = 2000
N_STORM_SIGNALS = 11


def write_in_a_storm(pipe: Connection, arena_bytes: int) -> None:
    """Publish messages of all sizes while a signal comes every millisecond."""
    calls: list[int] = []
    config = QueueConfig(n_chunks=4, chunk_bytes=4096, arena_bytes=arena_bytes)
    with MessageQueue(config) as queue:
        pipe.send(queue.export_handle())
        signal.signal(signal.SIGALRM, lambda number, _: calls.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        queue.wait_until_ready(PATIENCE_S)
        number = 0
        while number < N_STORM_MESSAGES or len(calls) < N_STORM_SIGNALS or not pipe.poll():
            queue.enqueue((number, bytes(LARGE_BYTES if number % 20 == 0 else 10)), PATIENCE_S)
            number += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send(number)


def read_in_a_storm(pipe: Connection, handle: Any) -> None:
    """Count the messages that come in order, while a signal comes every millisecond."""
    calls: list[int] = []
    with MessageQueue.create_from_handle(handle, 0) as reader:
        signal.signal(signal.SIGALRM, lambda number, _: calls.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        n_good, is_enough = 0, False
        for message in reader:
            if message != (n_good, bytes(LARGE_BYTES if n_good % 20 == 0 else 10)):
                break
            n_good += 1
            if not is_enough and len(calls) >= N_STORM_SIGNALS:
                is_enough = True
                pipe.send("enough")
        signal.setitimer(signal.ITIMER_REAL, 0)
    pipe.send(n_good)


@pytest.mark.parametrize("arena_bytes", [0, 1 << 20])
def test_storm_of_signals(start_child: StartChild, arena_bytes: int) -> None:
    """A signal every millisecond in both processes loses, repeats and reorders no message."""
    writer = start_child(write_in_a_storm, arena_bytes, method="forkserver")
    reader = start_child(read_in_a_storm, writer.receive(), method="forkserver")
    assert "enough" == reader.receive()
    writer.pipe.send("enough")
    assert writer.receive() == reader.receive()


def test_signal_to_another_thread() -> None:
    """A wait in another thread than the main one goes on while the main thread handles signals."""
    with situation("dequeue") as this, signals_every(0.001) as calls:
        outcome: list[str] = []

        def wait() -> None:
            try:
                this.call(0.2)
            except QueueEmpty:
                outcome.append("empty")

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(PATIENCE_S)
        assert ["empty"] == outcome
        assert len(calls) > 0
    # The main thread is free again.
    with situation("dequeue") as this:
        this.check()


# --- idle -----------------------------------------------------------------------------------------


def be_idle(pipe: Connection, wait: str) -> None:
    """Wait, and report the share of a core that this process took over a second of it."""
    with situation(wait) as this:
        shares = []

        def measure() -> None:
            time.sleep(0.2)  # the promise is about the time after it
            start, cpu_s = time.monotonic(), time.process_time()
            time.sleep(1.0)
            cpu_s = time.process_time() - cpu_s
            shares.append(cpu_s / (time.monotonic() - start))

        thread = threading.Thread(target=measure)
        thread.start()
        try:
            this.call(1.4)
        except (QueueEmpty, QueueFull, QueueNotReady):
            thread.join()
            pipe.send(shares[0])
        this.check()


def test_idle(start_child: StartChild, record_property: Any) -> None:
    """A call that waits takes next to nothing of a core, whatever it waits for."""
    children = {wait: start_child(be_idle, wait, method="forkserver") for wait in WAITS}
    shares = {wait: child.receive() for wait, child in children.items()}
    for wait, share in shares.items():
        record_property(f"share_of_a_core, {wait}", share)
    assert {} == {wait: share for wait, share in shares.items() if not share < IDLE_SHARE}
