"""Death of a process: noticed by the other side, with names, and it hurts nobody else."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import logging
import mmap
import os
import random
import select
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import pytest
from conftest import (
    PATIENCE_S,
    Child,
    MakeQueue,
    StartChild,
    answer_only_in_calls,
    count_descriptors,
    enqueue_until,
    wait_for_descriptors,
    wait_until,
)

import shmcast.control as control_module
from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    WriterLost,
    locks,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

# The promise is 50 ms; a test asserts twenty times that.
NOTICED_S = 20 * 0.050
#: A writer that has just looked does so again after 10 ms.
LOOK_PAUSE_S = 0.010


#: Where a message goes that fits no chunk, and how it comes.
PATHS: dict[str, dict[str, Any]] = {
    "files": {"arena_bytes": 0},
    "leases": {"arena_bytes": "1 MiB"},
    "copies": {"arena_bytes": "1 MiB", "receive": "copy"},
}
on_each_path = pytest.mark.parametrize("path", PATHS)


def payload(number: int, size_bytes: int) -> bytes:
    """The content of a message, which tells whether it is whole."""
    word = struct.pack("=Q", number)
    return (word * (size_bytes // 8 + 1))[:size_bytes]


def message_of(number: int, size_bytes: int) -> Any:
    """The message with this content; a large one has it out of band."""
    content = payload(number, size_bytes)
    return PickleBuffer(bytearray(content)) if size_bytes > 50_000 else content


# --- what other processes do ----------------------------------------------------------------------


def attach_and_pause(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach and take nothing."""
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready(PATIENCE_S)
    pipe.send("ready")
    signal.pause()


def attach_and_keep(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, and keep every message, with a change in it."""
    kept = []
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for message in reader:
            message[:4] = b"mine"
            kept.append(message)
            pipe.send(len(kept))


def attach_and_report(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, and report every message and the end."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send("ready")
        try:
            while True:
                pipe.send(reader.dequeue(PATIENCE_S))
        except Exception as error:
            pipe.send((type(error).__name__, str(error)))


def attach_and_leave_a_child(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, then have the C library fork a child, of which no Python hook hears."""
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready(PATIENCE_S)
    pipe.send(fork_behind_python())
    signal.pause()


def attach_and_fork_a_child(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, then fork a child in Python that stays."""
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready(PATIENCE_S)
    pid = os.fork()
    if pid:
        pipe.send(pid)
    signal.pause()


def claim_and_leave_a_child(pipe: Connection, handle: Handle, rank: int) -> None:
    """Send the claim, and leave a child behind that has the socket too."""
    answer_only_in_calls()
    reader = MessageQueue.create_from_handle(handle, rank)
    pipe.send(fork_behind_python())
    signal.pause()
    reader.close()


def attach_in_a_thread(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach in a thread that ends, and report messages from another one."""
    readers = []

    def attach() -> None:
        readers.append(MessageQueue.create_from_handle(handle, rank))
        readers[0].wait_until_ready(PATIENCE_S)

    thread = threading.Thread(target=attach)
    thread.start()
    thread.join()
    pipe.send("ready")
    while True:
        pipe.send(readers[0].dequeue(PATIENCE_S))


def attach_and_close_everything(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, then close all descriptors but the pipe, as daemonizing code does."""
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready(PATIENCE_S)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, 1024)
    pipe.send("ready")
    signal.pause()
    reader.close()


def close_and_pause(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, leave, and stay alive."""
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready(PATIENCE_S)
    pipe.send("ready")
    pipe.recv()
    reader.close()
    pipe.send("closed")
    signal.pause()


def write(pipe: Connection, sizes: list[int], leaves: str, path: str) -> None:
    """Be a writer that publishes messages of these sizes, and then wait to be killed."""
    config = QueueConfig(
        n_chunks=16, chunk_bytes=16384, oob_threshold_bytes=0, spin_us=0, **PATHS[path]
    )
    queue = MessageQueue(config)
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for number, size_bytes in enumerate(sizes):
        queue.enqueue(message_of(number, size_bytes))
    pipe.send(fork_behind_python() if leaves else 0)
    signal.pause()


def write_when_told(pipe: Connection) -> None:
    """Be a writer that answers the socket once for every word from the pipe."""
    answer_only_in_calls()
    queue = MessageQueue(QueueConfig())
    pipe.send(queue.export_handle())
    while True:
        if pipe.recv() == "fork":
            pipe.send(fork_behind_python())
            continue
        with contextlib.suppress(QueueNotReady):
            queue.wait_until_ready(0)
        pipe.send("served")


def fork_behind_python() -> int:
    """The pid of a new child that sleeps in C, with every descriptor of this process."""
    libc = ctypes.PyDLL(None)
    pid = int(libc.fork())
    if pid == 0:
        libc.sleep(600)
        libc._exit(0)
    return pid


@contextlib.contextmanager
def killed_at_the_end(pid: int) -> Iterator[int]:
    """Kill this process, which a test's own child has left behind, when the block ends."""
    try:
        yield pid
    finally:
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def attach(start_child: StartChild, queue: MessageQueue, function: Any, rank: int) -> Child:
    """A child that this function runs in, once the queue's ranks are all there."""
    child = start_child(function, queue.export_handle(), rank, method="forkserver")
    queue.wait_until_ready(PATIENCE_S)
    return child


@pytest.fixture
def bystander() -> Iterator[Any]:
    """A writer for two readers, and the reader of rank 1, which nothing happens to."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[MessageQueue, MessageReader]:
            settings = {"n_readers": 2, "n_chunks": 2, "chunk_bytes": 4096, **settings}
            queue = ends.enter_context(MessageQueue(QueueConfig(**settings)))
            reader = ends.enter_context(MessageQueue.create_from_handle(queue.export_handle(), 1))
            return queue, reader

        yield make


def pause_for_the_next_look() -> None:
    """Let the time pass after which an enqueue looks at who is alive."""
    time.sleep(1.5 * LOOK_PAUSE_S)


def everything(reader: MessageReader) -> list[Any]:
    """What a reader can take now."""
    messages = []
    with contextlib.suppress(QueueEmpty):
        while True:
            messages.append(reader.dequeue(0))
    return messages


# --- a reader dies --------------------------------------------------------------------------------


def kill_when_the_writer_waits(child: Child, queue: MessageQueue, killed_at: list[float]) -> None:
    waits = queue.stats().waits
    while queue.stats().waits < waits + 2:
        time.sleep(0.001)
    killed_at.append(time.monotonic())
    os.kill(child.pid, signal.SIGKILL)


def test_reader_dies_while_the_writer_waits(
    start_child: StartChild, bystander: Any, record_property: Any
) -> None:
    """A writer that waits for a reader hears of its death by rank and pid, and goes on."""
    queue, reader = bystander()
    child = attach(start_child, queue, attach_and_pause, 0)
    assert "ready" == child.receive()
    queue.enqueue(0)
    queue.enqueue(1)
    killed_at: list[float] = []
    killer = threading.Thread(target=kill_when_the_writer_waits, args=(child, queue, killed_at))
    killer.start()
    with pytest.raises(
        ReaderLost, match=rf"rank 0 \(pid {child.pid}\) died 2 messages behind"
    ) as lost:
        queue.enqueue("lost")
    noticed_s = time.monotonic() - killed_at[0]
    killer.join()
    record_property("noticed_s", noticed_s)
    assert (0,) == lost.value.ranks
    assert noticed_s < NOTICED_S
    assert [0, 1] == everything(reader)
    queue.enqueue("after", timeout=0)
    assert ["after"] == everything(reader)
    assert 1 == queue.stats().losses


def test_reader_dies_between_two_messages(start_child: StartChild, bystander: Any) -> None:
    """An enqueue 10 ms or more after the last look notices a death, even if the ring has room."""
    queue, reader = bystander(n_chunks=16)
    child = attach(start_child, queue, attach_and_pause, 0)
    queue.enqueue(0)
    child.kill()
    pause_for_the_next_look()
    with pytest.raises(
        ReaderLost, match=rf"rank 0 \(pid {child.pid}\) died 1 messages behind"
    ) as lost:
        queue.enqueue("lost", timeout=0)
    assert (0,) == lost.value.ranks
    for number in range(1, 40):
        queue.enqueue(number, timeout=0)
        assert [number] == everything(reader)[-1:]


def test_evicted(start_child: StartChild, bystander: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With "evict" the same call goes on without the dead reader and logs who it was."""
    queue, reader = bystander(on_reader_loss="evict")
    child = attach(start_child, queue, attach_and_pause, 0)
    queue.enqueue(0)
    queue.enqueue(1)
    assert [0, 1] == everything(reader)
    child.kill()
    with caplog.at_level(logging.WARNING, "shmcast"):
        queue.enqueue(2, timeout=PATIENCE_S)
    wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert f"rank 0 (pid {child.pid}) died 2 messages behind" in record.getMessage()
    assert [2] == everything(reader)
    assert 1 == queue.stats().losses


def attach_and_kill_two(start_child: StartChild, queue: MessageQueue) -> None:
    """All readers of a queue of two attach and die."""
    children = [
        start_child(attach_and_pause, queue.export_handle(), rank, method="forkserver")
        for rank in range(2)
    ]
    queue.wait_until_ready(PATIENCE_S)
    for child in children:
        child.kill()
    pause_for_the_next_look()


def test_all_readers_die(start_child: StartChild) -> None:
    """When all readers are dead, the error has all ranks."""
    config = QueueConfig(n_readers=2, n_chunks=2, chunk_bytes=4096)
    with MessageQueue(config) as queue:
        attach_and_kill_two(start_child, queue)
        for _ in range(2):
            with pytest.raises(ReaderLost) as lost:
                queue.enqueue("lost", timeout=PATIENCE_S)
            assert (0, 1) == lost.value.ranks
        assert 0 == queue.stats().messages


def test_all_readers_are_evicted(start_child: StartChild, caplog: pytest.LogCaptureFixture) -> None:
    """With "evict" and nobody left, enqueue raises no loss: it waits for the next reader."""
    config = QueueConfig(n_readers=2, on_reader_loss="evict", warn_after_s=0.1)
    with MessageQueue(config) as queue, ThreadPoolExecutor(1) as pool:
        attach_and_kill_two(start_child, queue)
        for timeout in (0, 0.3):
            with pytest.raises(QueueFull, match="nobody is attached, ranks 0, 1 left") as full:
                queue.enqueue("for nobody", timeout)
            assert (0, 1) == full.value.ranks
        assert any("nobody is attached" in message for message in caplog.messages)
        assert 0 == queue.stats().messages
        waiting = pool.submit(queue.enqueue, "for the next one", PATIENCE_S)
        with MessageQueue.create_from_handle(queue.export_handle(), 1) as reader:
            assert "for the next one" == reader.dequeue(PATIENCE_S)
            waiting.result(PATIENCE_S)
        assert (2, 0) == (queue.stats().losses, queue.stats().lag[0])


def test_ready_again(
    start_child: StartChild, bystander: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After a loss wait_until_ready logs it, waits for the rank, and admits its next reader."""
    queue, reader = bystander(n_chunks=16)
    child = attach(start_child, queue, attach_and_report, 0)
    queue.enqueue("first")
    assert ["ready", "first"] == [child.receive(), child.receive()]
    child.kill()
    with caplog.at_level(logging.WARNING, "shmcast"), pytest.raises(QueueNotReady) as missing:
        queue.wait_until_ready(0)
    assert (0,) == missing.value.ranks
    assert f"rank 0 (pid {child.pid}) died" in caplog.text
    queue.enqueue("between")  # the loss has been handled
    second = attach(start_child, queue, attach_and_report, 0)
    queue.enqueue("again")
    assert ["ready", "again"] == [second.receive(), second.receive()]
    assert ["first", "between", "again"] == everything(reader)


def test_ready_does_not_trust_the_dead(start_child: StartChild) -> None:
    """A reader that died after it attached is missing for the next wait_until_ready."""
    with MessageQueue(QueueConfig()) as queue:
        child = attach(start_child, queue, attach_and_pause, 0)
        queue.wait_until_ready(0)
        child.kill()
        with pytest.raises(QueueNotReady, match="rank 0"):
            queue.wait_until_ready(0.02)


@pytest.mark.parametrize("function", [attach_and_leave_a_child, attach_and_fork_a_child])
def test_dead_reader_left_a_child(
    start_child: StartChild, bystander: Any, function: Any, record_property: Any
) -> None:
    """A dead reader is dead although a child that it forked has its sockets, files and mappings."""
    queue, reader = bystander()
    child = attach(start_child, queue, function, 0)
    with killed_at_the_end(child.receive()) as survivor:
        queue.enqueue(0)
        queue.enqueue(1)
        killed_at: list[float] = []
        killer = threading.Thread(target=kill_when_the_writer_waits, args=(child, queue, killed_at))
        killer.start()
        with pytest.raises(ReaderLost, match=rf"rank 0 \(pid {child.pid}\)"):
            queue.enqueue("lost")
        noticed_s = time.monotonic() - killed_at[0]
        killer.join()
        record_property("noticed_s", noticed_s)
        assert noticed_s < NOTICED_S
        os.kill(survivor, 0)  # it is there, or this test shows nothing
        assert [0, 1] == everything(reader)
        second = attach(start_child, queue, attach_and_report, 0)
        queue.enqueue("again")
        assert ["ready", "again"] == [second.receive(), second.receive()]


def test_claimant_left_a_child(start_child: StartChild) -> None:
    """A reader killed in its handshake frees the rank, although a child of it has the socket."""
    with MessageQueue(QueueConfig()) as queue:
        handle = queue.export_handle()
        child = start_child(claim_and_leave_a_child, handle, 0, method="forkserver")
        with killed_at_the_end(child.receive()):
            with pytest.raises(QueueNotReady):
                queue.wait_until_ready(0)  # the rank is offered to it
            child.kill()
            with MessageQueue.create_from_handle(handle, 0) as reader:
                reader.wait_until_ready(PATIENCE_S)
                queue.enqueue("arrives")
                assert "arrives" == reader.dequeue(PATIENCE_S)


def test_zombie(bystander: Any) -> None:
    """A process that has ended and was not waited for is dead."""
    queue, reader = bystander(n_chunks=16)
    handle = queue.export_handle()
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            mine = MessageQueue.create_from_handle(handle, 0)
            mine.wait_until_ready(PATIENCE_S)
            os.write(there, b"x")
            signal.pause()
        finally:
            os._exit(1)
    try:
        queue.wait_until_ready(PATIENCE_S)
        assert b"x" == os.read(here, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        pause_for_the_next_look()
        with pytest.raises(ReaderLost, match=rf"rank 0 \(pid {pid}\)"):
            queue.enqueue("lost", timeout=0)
        queue.enqueue("after", timeout=0)
        assert ["after"] == everything(reader)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here)
        os.close(there)


def test_stopped_reader(start_child: StartChild, bystander: Any) -> None:
    """The writer waits for a stopped reader, and everything arrives after SIGCONT."""
    queue, reader = bystander()
    child = attach(start_child, queue, attach_and_report, 0)
    assert "ready" == child.receive()
    os.kill(child.pid, signal.SIGSTOP)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)
    queue.enqueue(0)
    queue.enqueue(1)
    assert [0, 1] == everything(reader)
    with pytest.raises(
        QueueFull, match=rf"rank 0 \(pid {child.pid}\) is 2 messages behind"
    ) as full:
        # Longer than a process may be seen without its lock.
        queue.enqueue(2, timeout=locks._UNLOCKED_S + 0.2)
    assert (0,) == full.value.ranks
    os.kill(child.pid, signal.SIGCONT)
    queue.enqueue(2, timeout=PATIENCE_S)
    assert [0, 1, 2] == [child.receive() for _ in range(3)]
    assert 0 == queue.stats().losses


def test_thread_that_attached_ends(start_child: StartChild, bystander: Any) -> None:
    """The end of the thread that attached is no death."""
    queue, reader = bystander()
    child = attach(start_child, queue, attach_in_a_thread, 0)
    assert "ready" == child.receive()
    for number in range(5):
        pause_for_the_next_look()
        queue.enqueue(number)
        assert number == child.receive()
        assert [number] == everything(reader)


def test_left_before_it_died(start_child: StartChild, bystander: Any) -> None:
    """A reader that closed and was killed afterwards has left, and nothing is raised."""
    queue, reader = bystander()
    child = attach(start_child, queue, close_and_pause, 0)
    child.pipe.send("close")
    assert ["ready", "closed"] == [child.receive(), child.receive()]
    child.kill()
    for number in range(5):
        pause_for_the_next_look()
        queue.enqueue(number, timeout=0)
        assert [number] == everything(reader)
    assert 0 == queue.stats().losses


@pytest.mark.parametrize("on_reader_loss", ["raise", "evict"])
def test_reader_dies_with_leases(
    start_child: StartChild, bystander: Any, on_reader_loss: Any
) -> None:
    """The blocks that a dead reader held are free again, and what others hold of them stays."""
    queue, reader = bystander(
        n_chunks=16, oob_threshold_bytes=0, arena_bytes="1 MiB", on_reader_loss=on_reader_loss
    )
    child = attach(start_child, queue, attach_and_keep, 0)
    contents = [payload(number, 100_000) for number in range(4)]
    for number, content in enumerate(contents):
        queue.enqueue(PickleBuffer(bytearray(content)))
        assert number + 1 == child.receive()
    kept = reader.dequeue(PATIENCE_S)
    for content in contents[1:]:
        assert content == reader.dequeue(PATIENCE_S)
    queue.enqueue(PickleBuffer(bytearray(contents[0])))  # which looks at what was given up
    assert 5 == child.receive()
    assert (5, 2) == queue.stats().blocks_held
    child.kill()
    pause_for_the_next_look()
    if on_reader_loss == "raise":
        with pytest.raises(ReaderLost):
            queue.enqueue(PickleBuffer(bytearray(100_000)))
    else:
        queue.enqueue("evicts")
    assert (0, 2) == queue.stats().blocks_held
    assert contents[0] == everything(reader)[0]
    for number in range(30):  # more than the arena can hold at once
        content = payload(number, 100_000)
        queue.enqueue(PickleBuffer(bytearray(content)), PATIENCE_S)
        assert content == reader.dequeue(PATIENCE_S)
    assert contents[0] == kept
    assert (2, 0) == (queue.stats().blocks_in_use, queue.stats().fallbacks)
    second = attach(start_child, queue, attach_and_keep, 0)
    queue.enqueue(PickleBuffer(bytearray(content)), PATIENCE_S)
    assert 1 == second.receive()


def test_reader_dies_with_unread_blocks(start_child: StartChild, bystander: Any) -> None:
    """Blocks that nobody has taken are free again when the last reader who was to do so is dead."""
    queue, reader = bystander(oob_threshold_bytes=0, arena_bytes="1 MiB")
    child = attach(start_child, queue, attach_and_pause, 0)
    queue.enqueue(PickleBuffer(bytearray(payload(1, 100_000))))
    assert payload(1, 100_000) == reader.dequeue(PATIENCE_S)
    assert (1, 1) == queue.stats().blocks_held
    child.kill()
    with pytest.raises(QueueNotReady):
        queue.wait_until_ready(0)
    queue.enqueue(PickleBuffer(bytearray(payload(2, 100_000))))
    assert (1, (0, 1)) == (queue.stats().blocks_in_use, queue.stats().blocks_held)
    assert payload(2, 100_000) == reader.dequeue(PATIENCE_S)


def run_another_program(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, take two messages, and run another program in this process."""
    reader = MessageQueue.create_from_handle(handle, rank)
    kept = [reader.dequeue(PATIENCE_S) for _ in range(2)]
    pipe.send(len(kept))
    assert "go on" == pipe.recv()
    os.execv("/bin/sleep", ["sleep", "600"])


def test_reader_that_runs_another_program(
    start_child: StartChild, bystander: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a reader whose process runs another program are free again."""
    monkeypatch.setattr(locks, "_UNLOCKED_S", 0.0)
    queue, reader = bystander(
        n_chunks=16, oob_threshold_bytes=0, arena_bytes="1 MiB", on_reader_loss="evict"
    )
    child = attach(start_child, queue, run_another_program, 0)
    for number in range(3):
        content = payload(number, 100_000)
        queue.enqueue(PickleBuffer(bytearray(content)))
        assert content == reader.dequeue(PATIENCE_S)
    assert 2 == child.receive()
    assert 3 == queue.stats().blocks_held[0]
    child.pipe.send("go on")
    give_up_at = time.monotonic() + PATIENCE_S
    while queue.stats().blocks_held[0]:
        assert time.monotonic() < give_up_at
        pause_for_the_next_look()
        queue.enqueue("look", timeout=0)
        everything(reader)
    assert 1 == queue.stats().losses


# --- a lock is lost -------------------------------------------------------------------------------


def test_lock_closed_by_the_readers_program(start_child: StartChild, bystander: Any) -> None:
    """A reader that lives without its lock is reported by rank and pid, and waited for no more."""
    queue, reader = bystander()
    child = attach(start_child, queue, attach_and_close_everything, 0)
    assert "ready" == child.receive()
    queue.enqueue(0)
    queue.enqueue(1)
    assert [0, 1] == everything(reader)
    with pytest.raises(ProtocolError, match=rf"rank 0 \(pid {child.pid}\) is alive but its lock"):
        queue.enqueue("lost", timeout=20 * locks._UNLOCKED_S)
    queue.enqueue(2, timeout=0)
    assert [2] == everything(reader)


def test_closing_a_duplicate(start_child: StartChild, make_queue: MakeQueue) -> None:
    """One end's close keeps the locks of all other ends in its process."""
    queue, (first, second) = make_queue(n_readers=2, n_chunks=4, chunk_bytes=4096)
    lock_file = queue._writer._lock_file
    first.close()
    probe = start_child(report_locks, os.getpid(), lock_file.descriptor, method="spawn")
    assert [True, False, True] == probe.receive()
    pause_for_the_next_look()
    queue.enqueue("still here")
    assert "still here" == second.dequeue(PATIENCE_S)


def report_locks(pipe: Connection, pid: int, descriptor: int) -> None:
    """Say which bytes of a lock file of another process are locked."""
    with Path(f"/proc/{pid}/fd/{descriptor}").open("r+b") as file:
        held = []
        for byte in range(3):
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                held.append(False)
            except BlockingIOError:
                held.append(True)
    pipe.send(held)


def hold_much_memory(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, with a file of memory that takes the kernel half a second to give back."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        file = os.memfd_create("much")
        os.posix_fallocate(file, 0, 2 << 30)
        pipe.send("attached")
        signal.pause()


def test_slow_exit(start_child: StartChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose files take long to close is dead as soon as its lock is free."""
    monkeypatch.setattr(locks, "_UNLOCKED_S", 0.0)  # else it would have to take a second
    with MessageQueue(QueueConfig()) as queue:
        child = start_child(hold_much_memory, queue.export_handle(), 0)
        assert "attached" == child.receive()
        os.kill(child.pid, signal.SIGKILL)
        assert f"rank 0 (pid {child.pid}) died" in str(enqueue_until(queue, ReaderLost))


# --- the writer dies ------------------------------------------------------------------------------


@on_each_path
@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_writer_dies(
    start_child: StartChild, leaves_a_child: bool, path: str, record_property: Any
) -> None:
    """A reader gets all that a killed writer had published, of every size, then WriterLost."""
    sizes = [10, 0, 5000, 40_000, 16_384, 300_000, 7, 20_000, 70_000]
    leaves = "child" if leaves_a_child else ""
    child = start_child(write, sizes, leaves, path, method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        with killed_at_the_end(child.receive()):
            child.kill()
            for number, size_bytes in enumerate(sizes):
                assert payload(number, size_bytes) == reader.dequeue(PATIENCE_S)
            start = time.monotonic()
            with pytest.raises(WriterLost, match=rf"writer \(pid {child.pid}\) died"):
                reader.dequeue()
            noticed_s = time.monotonic() - start
            record_property("noticed_s", noticed_s)
            assert noticed_s < NOTICED_S
            with pytest.raises(WriterLost):
                reader.dequeue(PATIENCE_S)


@on_each_path
def test_received_before_the_writer_died(start_child: StartChild, path: str) -> None:
    """What a reader had received of a writer that was killed stays whole, writable and its own."""
    sizes = [100_000, 70_000, 100_000]
    child = start_child(write, sizes, "", path, method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        assert 0 == child.receive()
        received = [reader.dequeue(PATIENCE_S) for _ in range(2)]
        received[1][:4] = b"mine"
        child.kill()
        received.append(reader.dequeue(PATIENCE_S))
        with pytest.raises(WriterLost):
            reader.dequeue(PATIENCE_S)
        for is_closed in (False, True):
            for number, message in enumerate(received):
                expected = bytearray(payload(number, sizes[number]))
                if number == 1 or is_closed:
                    expected[:4] = b"mine"
                assert expected == message
                message[:4] = b"mine"
            reader.close()
    del received, message
    gc.collect()


def test_writer_dies_while_a_reader_waits(start_child: StartChild, record_property: Any) -> None:
    """A reader that sleeps in dequeue notices the writer's death, also with a child left behind."""
    child = start_child(write, [1], "child", "leases", method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        assert payload(0, 1) == reader.dequeue(PATIENCE_S)
        with killed_at_the_end(child.receive()):
            killed_at: list[float] = []

            def kill() -> None:
                waits = reader.stats().waits
                while reader.stats().waits < waits + 3:
                    time.sleep(0.001)
                killed_at.append(time.monotonic())
                os.kill(child.pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(WriterLost):
                reader.dequeue()
            noticed_s = time.monotonic() - killed_at[0]
            killer.join()
            record_property("noticed_s", noticed_s)
            assert noticed_s < NOTICED_S


@pytest.mark.usefixtures("only_in_calls")
@pytest.mark.parametrize("leaves_a_child", [False, True])
@pytest.mark.parametrize("is_offered", [False, True])
def test_writer_dies_while_a_reader_attaches(
    start_child: StartChild, is_offered: bool, leaves_a_child: bool
) -> None:
    """A reader in any step of its handshake hears of the writer's death and never hangs."""
    child = start_child(write_when_told, method="forkserver")
    reader = MessageQueue.create_from_handle(child.receive(), 0)
    if is_offered:
        child.pipe.send("serve")
        assert "served" == child.receive()
    survivor = 0
    if leaves_a_child:
        child.pipe.send("fork")
        survivor = child.receive()
    with killed_at_the_end(survivor), reader:
        child.kill()
        with pytest.raises(WriterLost):
            reader.wait_until_ready(PATIENCE_S)


def test_writer_dies_while_a_reader_waits_for_its_answer(start_child: StartChild) -> None:
    """A reader that sleeps in wait_until_ready wakes up when the writer dies."""
    child = start_child(write_when_told, method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        killer = threading.Timer(0.05, os.kill, (child.pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WriterLost):
            reader.wait_until_ready(PATIENCE_S)
        killer.join()


@on_each_path
@pytest.mark.parametrize("size_bytes", [10, 40_000, 100_000])
def test_last_message_of_a_dying_writer(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, size_bytes: int, path: str
) -> None:
    """What a dying writer published after the reader's last look at the ring is not lost."""
    queue, (reader,) = make_queue(
        n_chunks=4, chunk_bytes=16384, oob_threshold_bytes=0, spin_us=0, **PATHS[path]
    )

    def publish_and_die(_: object) -> bool:
        if not queue.stats().messages:
            queue.enqueue(message_of(1, size_bytes))
        return True

    monkeypatch.setattr(control_module.ReaderControl, "is_writer_dead", publish_and_die)
    assert payload(1, size_bytes) == reader.dequeue(PATIENCE_S)
    with pytest.raises(WriterLost):
        reader.dequeue(PATIENCE_S)


def enqueue_what_kills(pipe: Connection, size_bytes: int) -> None:
    """A writer that meets SIGBUS halfway through the copy of its message."""
    faulthandler.disable()  # pytest's, in a forked child
    with MessageQueue(QueueConfig(arena_bytes=0, oob_threshold_bytes=1)) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        file = os.memfd_create("shrinks")
        os.ftruncate(file, size_bytes)
        source = mmap.mmap(file, size_bytes)
        os.ftruncate(file, size_bytes // 2)
        queue.enqueue(PickleBuffer(source))


@pytest.mark.parametrize("size_bytes", [2 * mmap.PAGESIZE, 100 * mmap.PAGESIZE])
def test_writer_dies_in_the_middle_of_a_copy(start_child: StartChild, size_bytes: int) -> None:
    """A message whose writer died while it copied it is never seen."""
    child = start_child(enqueue_what_kills, size_bytes, method="fork")
    with MessageReader(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        with pytest.raises(WriterLost):
            reader.dequeue(PATIENCE_S)
    assert -signal.SIGBUS == child.join()


def test_attaching_to_a_dead_writer(start_child: StartChild) -> None:
    """A reader that comes after the writer's death hears so at once, with the address."""
    child = start_child(write_when_told, method="forkserver")
    handle = child.receive()
    child.kill()
    with pytest.raises(WriterLost, match=f"@{handle.local_address}"):
        MessageQueue.create_from_handle(handle, 0)


@on_each_path
def test_admitted_by_a_writer_that_is_dead_by_now(start_child: StartChild, path: str) -> None:
    """What was published for a reader is read, though it looks at its admission after the death."""
    child = start_child(write, [10, 40_000, 100_000], "", path, method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        while not reader._source.control._holds_byte:  # it has confirmed, and looks no further
            reader._step()
        assert 0 == child.receive()
        child.kill()
        assert payload(0, 10) == reader.dequeue(PATIENCE_S)
        assert payload(1, 40_000) == reader.dequeue(PATIENCE_S)
        assert payload(2, 100_000) == reader.dequeue(PATIENCE_S)
        with pytest.raises(WriterLost):
            reader.dequeue(PATIENCE_S)


def test_writer_that_closed_before_it_died(start_child: StartChild) -> None:
    """A writer that closed first has closed: its readers drain and get QueueClosed."""
    child = start_child(write_and_close, method="forkserver")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        assert "closed" == child.receive()
        child.kill()
        assert [0, 1, 2] == [reader.dequeue(PATIENCE_S) for _ in range(3)]
        with pytest.raises(QueueClosed):
            reader.dequeue(PATIENCE_S)


def write_and_close(pipe: Connection) -> None:
    """Publish a little, close, and stay alive."""
    queue = MessageQueue(QueueConfig())
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for number in range(3):
        queue.enqueue(number)
    queue.close()
    pipe.send("closed")
    signal.pause()


# --- killed at random moments ---------------------------------------------------------------------

N_KILLS = 60
SIZES = [0, 8, 200, 3000, 20_000, 70_000]  # the last one does not fit a chunk of 64 KiB
N_KEPT = 3  # messages that a victim holds


def check_everything(pipe: Connection, handle: Handle, rank: int) -> None:
    """Read to the end, and say how many messages came, or what was wrong with one."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        number = 0
        for message in reader:
            came, content = message
            if (came, content) != (number, payload(number, SIZES[number % len(SIZES)])):
                pipe.send(f"message {number} came as {str(message)[:50]}")
                return
            number += 1
            del message, content
    pipe.send(number)


def start_victim(handle: Handle) -> tuple[int, int]:
    """Fork a reader of rank 0; its pid, and a pipe with the number of each whole message."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(here)
            kept: collections.deque[Any] = collections.deque()
            with MessageQueue.create_from_handle(handle, 0) as reader:
                for number, content in reader:
                    is_whole = payload(number, SIZES[number % len(SIZES)]) == content
                    kept.append((number, content))
                    if len(kept) > N_KEPT:
                        old, kept_content = kept.popleft()
                        is_whole &= payload(old, SIZES[old % len(SIZES)]) == kept_content
                        del kept_content
                    os.write(there, struct.pack("=q", number if is_whole else -1))
        finally:
            os._exit(1)
    os.close(there)
    return pid, here


def read_numbers(pipe: int) -> list[int]:
    """The numbers in a pipe whose other end is closed."""
    data = b""
    while part := os.read(pipe, 65536):
        data += part
    os.close(pipe)
    return [number for (number,) in struct.iter_unpack("=q", data[: len(data) // 8 * 8])]


@on_each_path
def test_killed_at_random_moments(
    start_child: StartChild, caplog: pytest.LogCaptureFixture, record_property: Any, path: str
) -> None:
    """Each attachment of a reader that is killed and restarted gets an unbroken run of messages."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed = {seed}")  # noqa: T201  # to replay a failure
    record_property("seed", seed)
    rng = random.Random(seed)
    caplog.set_level(logging.ERROR, "shmcast")
    config = QueueConfig(
        n_readers=2,
        n_chunks=4,
        chunk_bytes="64 KiB",
        oob_threshold_bytes=1000,
        on_reader_loss="evict",
        spin_us=0,
        **PATHS[path],
    )
    with MessageQueue(config) as queue:
        handle = queue.export_handle()
        witness = start_child(check_everything, handle, 1, method="forkserver")
        pid, pipe = start_victim(handle)
        queue.wait_until_ready(PATIENCE_S)
        gc.collect()  # what earlier tests left
        n_descriptors, n_threads = count_descriptors(), threading.active_count()
        published = n_received = n_attached = 0

        def publish(timeout: float) -> None:
            nonlocal published
            content = message_of(published, SIZES[published % len(SIZES)])
            with contextlib.suppress(QueueFull):
                queue.enqueue((published, content), timeout)
                published += 1

        for _ in range(N_KILLS):
            published_before = published
            # Often it is killed in its start or its handshake, as often after some messages.
            is_patient = rng.random() < 0.5
            until = time.monotonic() + rng.uniform(0, 0.02)
            while time.monotonic() < until:
                publish(rng.choice([0, 0.002]))
            while is_patient and not select.select([pipe], [], [], 0)[0]:
                publish(0.002)
            for _ in range(rng.randrange(20)):
                publish(rng.choice([0, 0.002]))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            numbers = read_numbers(pipe)
            if numbers:
                assert list(range(numbers[0], numbers[0] + len(numbers))) == numbers
                assert published_before <= numbers[0] <= numbers[-1] < published
                n_attached += 1
                n_received += len(numbers)
            pid, pipe = start_victim(handle)
        queue.wait_until_ready(PATIENCE_S)
        for _ in range(2 * len(SIZES)):
            publish(PATIENCE_S)
        # None is lost: what is left is held by the victim, or by the ring.
        give_up_at = time.monotonic() + PATIENCE_S
        while queue.stats().blocks_in_use > N_KEPT + config.n_chunks + 1:
            assert time.monotonic() < give_up_at, queue.stats()
            publish(PATIENCE_S)
        assert n_threads == threading.active_count()
        wait_for_descriptors(n_descriptors)
        losses = queue.stats().losses
        queue.close()
        assert published == witness.receive()
        os.waitpid(pid, 0)
        numbers = read_numbers(pipe)
        assert list(range(published - 2 * len(SIZES), published)) == numbers[-2 * len(SIZES) :]
    record_property("published", published)
    record_property("attachments with messages", n_attached)
    record_property("received by them", n_received)
    assert 0 < losses <= N_KILLS
    assert n_attached >= N_KILLS // 4


@on_each_path
def test_nothing_of_the_dead_stays(start_child: StartChild, path: str) -> None:
    """When both ends were killed, no process has a memory file of the queue."""
    child = start_child(write, [100_000, 70_000], "", path, method="forkserver")
    handle = child.receive()
    reader = start_child(attach_and_keep, handle, 0, method="forkserver")
    assert [1, 2] == [reader.receive(), reader.receive()]
    assert 0 == child.receive()
    inode = next(
        path.stat().st_ino
        for path in Path(f"/proc/{child.pid}/fd").iterdir()
        if "shmcast-data" in str(path.readlink())
    )
    assert inode in inodes_in_use()
    child.kill()
    reader.kill()
    assert inode not in inodes_in_use()


def inodes_in_use() -> set[int]:
    """The inodes of all memory files of shmcast that some process has mapped or open."""
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                if "memfd:shmcast" in line:
                    inodes.add(int(line.split()[4]))
        with contextlib.suppress(OSError):
            for path in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if "memfd:shmcast" in str(path.readlink()):
                        inodes.add(path.stat().st_ino)
    return inodes
