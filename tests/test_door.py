"""The door thread: ends do what they owe to others while their program does something else."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, Child, MakeQueue, StartChild, count_descriptors, wait_until

from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    ReaderLost,
)

#: What is promised is 50 ms.
NOTICED_S = 20 * 0.05


def read_all(pipe: Connection, handle: Handle, rank: int) -> None:
    """Send what arrives, until the writer closes."""
    with MessageReader(handle, rank) as reader:
        for message in reader:
            pipe.send(message)
    pipe.send("end")


def hold(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, and wait to be killed."""
    with MessageReader(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send("attached")
        signal.pause()


def sleep_in_c(child: Child) -> None:
    """The whole process stands still: nobody else gets the GIL."""
    ctypes.PyDLL(None).sleep(2)
    assert "attached" == child.receive()


def wait_in_asyncio(child: Child) -> None:
    async def wait() -> Any:
        await asyncio.sleep(0.1)
        return await asyncio.to_thread(child.receive)

    assert "attached" == asyncio.run(wait())


def wait_in_input(child: Child) -> None:
    """As `input()` does: a read from a descriptor."""
    assert "attached" == child.receive()


def sleep_in_python(child: Child) -> None:
    wait_until(child.pipe.poll)
    assert "attached" == child.receive()


# --- readers attach -------------------------------------------------------------------------------


def test_the_first_program(start_child: StartChild) -> None:
    """A writer publishes and waits for its child; the child attaches and gets the message."""
    with MessageQueue(QueueConfig()) as queue:
        child = start_child(read_all, queue.export_handle(), 0)
        queue.enqueue("hello")
        assert "hello" == child.receive()


WAITS = [sleep_in_python, sleep_in_c, wait_in_asyncio, wait_in_input]


@pytest.mark.parametrize("wait", WAITS)
def test_a_rank_is_restarted_while_the_writer_waits(
    start_child: StartChild, wait: Callable[[Child], None]
) -> None:
    """A reader that is started anew attaches, whatever the writer's program does meanwhile."""
    with MessageQueue(QueueConfig(on_reader_loss="evict")) as queue:
        first = start_child(hold, queue.export_handle(), 0)
        assert "attached" == first.receive()
        first.kill()
        second = start_child(hold, queue.export_handle(), 0)
        wait(second)
        queue.enqueue("goes on")
        assert 1 == queue.stats().losses


def test_a_reader_attaches_while_its_program_sleeps(start_child: StartChild) -> None:
    """The writer is ready as soon as the reader exists, though the reader makes no call."""
    with MessageQueue(QueueConfig()) as queue:
        reader = MessageReader(queue.export_handle(), 0)
        child = start_child(make_a_reader_and_sleep, queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        reader.close()
        child.pipe.send("again")
        queue.wait_until_ready(PATIENCE_S)


def make_a_reader_and_sleep(pipe: Connection, handle: Handle) -> None:
    pipe.recv()
    reader = MessageReader(handle, 0)
    signal.pause()
    reader.close()


def test_both_ends_in_one_thread() -> None:
    """With both ends in one thread either one may wait for the other."""
    for first in ("writer", "reader"):
        with (
            MessageQueue(QueueConfig()) as queue,
            MessageReader(queue.export_handle(), 0) as reader,
        ):
            (queue if first == "writer" else reader).wait_until_ready(PATIENCE_S)
            queue.enqueue(first)
            assert first == reader.dequeue(PATIENCE_S)


def test_a_busy_writer_answers_after_its_call(make_queue: MakeQueue) -> None:
    """A claim that comes while the writer pickles is answered when that is over."""

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            time.sleep(0.3)
            return str, ()

    queue, (_, reader) = make_queue(n_readers=2)
    reader.close()
    caller = threading.Thread(target=queue.enqueue, args=(Slow(),))
    caller.start()
    with MessageReader(queue.export_handle(), 1) as again:
        again.wait_until_ready(PATIENCE_S)
        caller.join()
        queue.enqueue("m")
        messages = [again.dequeue(PATIENCE_S)]
        if messages == [""]:  # it attached before that was published
            messages = [again.dequeue(PATIENCE_S)]
        assert ["m"] == messages


def test_silence_is_closed_while_the_writer_sleeps() -> None:
    """A connection that says nothing is closed after 5 s, though the writer makes no call."""
    with (
        MessageQueue(QueueConfig()) as queue,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
    ):
        stranger.connect("\0" + queue.export_handle().local_address)
        stranger.settimeout(PATIENCE_S)
        assert b"" == stranger.recv(1)


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_reader_loss", ["raise", "evict"])
def test_a_death_is_noticed_while_the_writer_sleeps(
    start_child: StartChild,
    caplog: pytest.LogCaptureFixture,
    record_property: Any,
    on_reader_loss: str,
) -> None:
    """A death is logged at once; the next call raises it, or the queue has gone on without it."""
    with (
        MessageQueue(QueueConfig(n_readers=2, on_reader_loss=on_reader_loss)) as queue,
        MessageReader(queue.export_handle(), 0) as reader,
    ):
        child = start_child(hold, queue.export_handle(), 1)
        assert "attached" == child.receive()
        with caplog.at_level(logging.WARNING, "shmcast"):
            start = time.monotonic()
            child.kill()
            wait_until(lambda: caplog.messages)
            noticed_s = time.monotonic() - start
        record_property("noticed_s", noticed_s)
        assert noticed_s < NOTICED_S
        (text,) = caplog.messages
        assert f"rank 1 (pid {child.pid})" in text
        if on_reader_loss == "raise":
            second = start_child(hold, queue.export_handle(), 1)
            assert "attached" == second.receive()  # before the loss was raised
            with pytest.raises(ReaderLost, match=rf"rank 1 \(pid {child.pid}\)"):
                queue.enqueue("is not published")
        queue.enqueue("arrives")
        assert "arrives" == reader.dequeue(PATIENCE_S)
        assert 1 == queue.stats().losses


def test_a_rank_is_lost_twice_between_two_calls(
    start_child: StartChild, caplog: pytest.LogCaptureFixture
) -> None:
    """Two losses of a rank between two calls are logged and counted as two, and raised once."""
    with MessageQueue(QueueConfig()) as queue:
        for _ in range(2):
            child = start_child(hold, queue.export_handle(), 0)
            assert "attached" == child.receive()
            child.kill()
        wait_until(lambda: len(caplog.messages) == 2)
        assert 2 == queue.stats().losses
        with pytest.raises(ReaderLost, match=rf"rank 0 \(pid {child.pid}\)"):
            queue.enqueue("is not published")


def test_a_step_that_comes_after_the_handshake(start_child: StartChild) -> None:
    """A step that a call of the reader made needless leaves the watch for the writer's death."""
    writer = start_child(write_nothing)
    with MessageReader(writer.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        for _ in range(3):
            reader.take_step()
        wait_until(door_threads)  # it may be about to give itself its name
        waits = reader.stats().waits
        with pytest.raises(QueueEmpty):
            reader.dequeue(0.5)
        assert 6 > reader.stats().waits - waits  # in slices it would have waited a dozen times


def write_nothing(pipe: Connection) -> None:
    """Have a queue, and wait to be killed."""
    with MessageQueue(QueueConfig()) as queue:
        pipe.send(queue.export_handle())
        signal.pause()


def test_several_deaths_during_one_call(start_child: StartChild) -> None:
    """Each of several deaths ends the wait of one and the same call at once."""
    config = QueueConfig(n_readers=3, n_chunks=1, on_reader_loss="evict")
    with MessageQueue(config) as queue:
        children = [start_child(hold, queue.export_handle(), rank) for rank in (0, 1)]
        for child in children:
            assert "attached" == child.receive()
        with MessageReader(queue.export_handle(), 2) as reader:
            queue.enqueue("fills the ring")
            assert "fills the ring" == reader.dequeue(PATIENCE_S)

            def kill_one_by_one() -> None:
                for child in children:
                    time.sleep(0.3)
                    child.kill()
                killed_at.append(time.monotonic())

            killed_at: list[float] = []
            killer = threading.Thread(target=kill_one_by_one)
            killer.start()
            queue.enqueue("goes on", PATIENCE_S)
            noticed_s = time.monotonic()
            killer.join()
            assert noticed_s - killed_at[0] < NOTICED_S
            assert 2 == queue.stats().losses


# --- the thread -----------------------------------------------------------------------------------


def door_threads() -> list[int]:
    """The threads of this process that serve ends."""
    return [
        int(task.name)
        for task in Path("/proc/self/task").iterdir()
        if (task / "comm").read_text() == "shmcast-door\n"
    ]


def switches_of(thread: int) -> int:
    """How often the thread was woken."""
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.usefixtures("many_descriptors")
def test_a_hundred_idle_writers() -> None:
    """A hundred writers share one thread, which is not woken while nothing comes."""
    gc.collect()
    with contextlib.ExitStack() as ends:
        for _ in range(100):
            ends.enter_context(MessageQueue(QueueConfig()))
        wait_until(door_threads)  # it may be about to give itself its name
        (thread,) = door_threads()
        time.sleep(0.1)
        before = switches_of(thread)
        time.sleep(10)
        assert before == switches_of(thread)
    wait_until(lambda: not door_threads())  # the system clears it away a little later


@pytest.mark.usefixtures("many_descriptors")
def test_a_hundred_waiting_readers(record_property: Any) -> None:
    """A hundred readers that wait in one process cost a hundredth of a core together."""
    with contextlib.ExitStack() as ends:
        queues = [ends.enter_context(MessageQueue(QueueConfig())) for _ in range(100)]
        readers = [ends.enter_context(MessageReader(queue.export_handle(), 0)) for queue in queues]
        threads = [threading.Thread(target=lambda reader: [*reader], args=(r,)) for r in readers]
        for thread in threads:
            thread.start()
        for queue in queues:
            queue.wait_until_ready(PATIENCE_S)
        time.sleep(1)
        start, used_s = time.monotonic(), time.process_time()
        time.sleep(3)
        share = (time.process_time() - used_s) / (time.monotonic() - start)
        record_property("cpu_share", share)
        for queue in queues:
            queue.close()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert share < 20 * 0.01


def test_what_is_open_after_close() -> None:
    """After close() nothing of an end is open, also while the closed object is referenced."""
    gc.collect()
    before = count_descriptors()
    closed = []
    for _ in range(200):
        queue = MessageQueue(QueueConfig())
        reader = MessageReader(queue.export_handle(), 0)
        queue.enqueue("m")
        assert "m" == reader.dequeue(PATIENCE_S)
        reader.close()
        queue.close()
        closed += [queue, reader]
        assert before >= count_descriptors()
    wait_until(lambda: not door_threads())  # the system clears it away a little later


def write_in_a_forked_child(pipe: Connection, parent: MessageQueue) -> None:
    assert [] == door_threads()
    with MessageQueue(QueueConfig()) as queue, MessageReader(queue.export_handle(), 0) as reader:
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("of the child")
        pipe.send(reader.dequeue(PATIENCE_S))
        wait_until(door_threads)  # it may be about to give itself its name
        assert 1 == len(door_threads())


def test_a_forked_child_has_its_own(start_child: StartChild) -> None:
    """A forked child has no such thread and starts one for a writer of its own."""
    with MessageQueue(QueueConfig()) as queue:
        child = start_child(write_in_a_forked_child, queue, method="fork")
        assert "of the child" == child.receive()
        with MessageReader(queue.export_handle(), 0) as reader:
            queue.enqueue("of the parent")
            assert "of the parent" == reader.dequeue(PATIENCE_S)


PROGRAM = """
import os, sys, threading, time
from shmcast import *
queues = [MessageQueue(QueueConfig()) for _ in range(5)]
readers = [MessageReader(queue.export_handle(), 0) for queue in queues]
for queue in queues:
    queue.enqueue(1)
threading.Thread(target=readers[0].dequeue, daemon=True).start()
threading.Thread(target=lambda: [*readers[1]], daemon=True).start()
print("leaves", flush=True)
{}
"""


@pytest.mark.parametrize("end", ["", "os._exit(0)", "sys.exit(0)"])
def test_the_interpreter_ends(end: str) -> None:
    """A program with open ends and waiting threads ends at once and quietly, however it ends."""
    for _ in range(5):
        program = [sys.executable, "-c", PROGRAM.format(end)]
        result = subprocess.run(
            program, check=False, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert (0, "leaves\n", "") == (result.returncode, result.stdout, result.stderr)


# --- what programs do to Python -------------------------------------------------------------------


OLD_LIBRARY = """
import fcntl, os
for module in fcntl, os:
    for name in list(vars(module)):
        if "SEAL" in name or name.startswith("MFD_") or name in ("memfd_create", "pidfd_open"):
            delattr(module, name)
"""
GEVENT = "from gevent import monkey; monkey.patch_all()\n"
ROUND_TRIP = """
import os, signal, time
from shmcast import *
with MessageQueue(QueueConfig(n_readers=2, on_reader_loss="evict")) as queue:
    reader = MessageReader(queue.export_handle(), 0)
    handle = queue.export_handle()
    child = os.fork()
    if not child:
        other = MessageReader(handle, 1)
        other.wait_until_ready(30)
        signal.pause()
    queue.wait_until_ready(30)
    queue.enqueue(["m"] * 100_000)
    assert ["m"] * 100_000 == reader.dequeue(30)
    os.kill(child, signal.SIGKILL)
    while not queue.stats().losses:
        time.sleep(0.01)
    queue.enqueue("goes on", 30)
    print(reader.dequeue(30))
"""


@pytest.mark.parametrize("before", [OLD_LIBRARY, GEVENT], ids=["old library", "gevent"])
def test_a_python_that_lacks_or_replaces_calls(before: str) -> None:
    """A queue works on a Python built against an old C library, and in one that gevent patched."""
    if before is GEVENT:
        pytest.importorskip("gevent")
    program = [sys.executable, "-W", "ignore", "-c", before + ROUND_TRIP]
    result = subprocess.run(
        program, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert "goes on\n" == result.stdout, result.stderr


REMOTE = """
from shmcast import *
config = QueueConfig(n_readers=1, local_reader_ranks=(), bind="tcp://127.0.0.1:0")
with MessageQueue(config) as queue, MessageReader(queue.export_handle(), 0) as reader:
    queue.enqueue("arrives")
    print(reader.dequeue(30))
"""


@pytest.mark.parametrize(
    ("patched", "expected"),
    [("", "which gevent has replaced in this process"), ("select=False, thread=False", "arrives")],
    ids=["all", "allowed"],
)
def test_remote_ranks_under_gevent(patched: str, expected: str) -> None:
    """Remote ranks say what gevent must leave alone, and work if it does."""
    pytest.importorskip("gevent")
    before = GEVENT.replace("patch_all()", f"patch_all({patched})")
    assert patched in before
    program = [sys.executable, "-W", "ignore", "-c", before + REMOTE]
    result = subprocess.run(
        program, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert expected in result.stdout + result.stderr


def write_and_read(pipe: Connection) -> None:
    """Write one queue and read another process's."""
    with MessageQueue(QueueConfig()) as queue:
        pipe.send(queue.export_handle())
        with MessageReader(pipe.recv(), 0) as reader:
            queue.enqueue("from the other")
            pipe.send(reader.dequeue(PATIENCE_S))
            pipe.recv()


def test_two_processes_that_read_each_other(start_child: StartChild) -> None:
    """Two processes each write a queue and read the other's: neither waits for ever."""
    children = [start_child(write_and_read) for _ in range(2)]
    handles = [child.receive() for child in children]
    for child, handle in zip(children, reversed(handles), strict=True):
        child.pipe.send(handle)
    for child in children:
        assert "from the other" == child.receive()
    for child in children:
        child.pipe.send("end")


# --- turns ----------------------------------------------------------------------------------------


def test_timeout_0_is_not_lost_to_a_step(make_queue: MakeQueue) -> None:
    """A call that tries once does not fail because the door thread is taking a step just then."""
    queue, (reader,) = make_queue(n_chunks=1000)
    is_over = threading.Event()

    def come_and_go() -> None:
        while not is_over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
            ):
                stranger.connect("\0" + queue.export_handle().local_address)

    strangers = threading.Thread(target=come_and_go)
    strangers.start()
    try:
        for number in range(2000):
            queue.enqueue(number, timeout=0)
            assert number == reader.dequeue(PATIENCE_S)
    finally:
        is_over.set()
        strangers.join()


def test_a_log_handler_that_enqueues(make_queue: MakeQueue) -> None:
    """A handler that sends records to the readers can't lock out a writer that logs its wait."""
    queue, (reader,) = make_queue(n_chunks=1, warn_after_s=0.05)
    lost = []

    class Sending(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                queue.enqueue(record.getMessage(), timeout=PATIENCE_S)
            except (QueueFull, QueueClosed) as error:
                lost.append(error)

    handler = Sending()
    logger = logging.getLogger("test_door")
    for each in (logger, logging.getLogger("shmcast")):
        each.addHandler(handler)
    try:
        queue.enqueue("fills the ring")
        waiting = threading.Thread(target=queue.enqueue, args=("waits",))
        waiting.start()
        time.sleep(0.02)
        saying = threading.Thread(target=logger.warning, args=("said",))
        saying.start()
        time.sleep(0.1)
        received = {reader.dequeue(PATIENCE_S) for _ in range(3)}
        waiting.join(PATIENCE_S)
        saying.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert not saying.is_alive()
        assert received >= {"fills the ring", "waits"}
        while not lost and reader.stats().lag:
            reader.dequeue(PATIENCE_S)
        assert [] == lost
    finally:
        for each in (logger, logging.getLogger("shmcast")):
            each.removeHandler(handler)
        reader.close()
