"""Forked children: they disturb no end of their parent, keep what it received, have their own."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, MakeQueue, StartChild

from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ShmcastError,
)
from shmcast.writer import Writer

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

#: Does not fit a chunk of the small queues here: it takes a block, or else a memory file.
LARGE_BYTES = 100_000
#: Where large messages lie.
PATHS: dict[str, dict[str, Any]] = {
    "blocks": {"oob_threshold_bytes": 1000, "arena_bytes": "1 MiB"},
    "copied blocks": {"oob_threshold_bytes": 1000, "arena_bytes": "1 MiB", "receive": "copy"},
    "files": {"oob_threshold_bytes": 1000, "arena_bytes": 0},
}


class Forked:
    """A forked child that runs a function and sends back what it returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        here, there = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(here)
                try:
                    answer = function()
                except BaseException as error:
                    answer = error
                with os.fdopen(there, "wb") as file:
                    pickle.dump(answer, file)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(there)
        self._pipe = here

    def answer(self) -> Any:
        """What the function returned or raised; the child has ended, and well."""
        with os.fdopen(self._pipe, "rb") as file:
            data = file.read()
        _, status = os.waitpid(self.pid, 0)
        assert 0 == os.waitstatus_to_exitcode(status)
        return pickle.loads(data)


def errors_of(calls: list[Callable[[], Any]]) -> list[str]:
    """What kind of error each call raises, and its text."""
    texts = []
    for call in calls:
        try:
            texts.append(f"no error but {call()!r}")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def memory_files_of(pid: int) -> set[str]:
    """The names of shmcast's memory files that a process has open or mapped."""
    names = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(path.readlink())
            if "memfd:shmcast" in target:
                names.add(target.split()[0].removeprefix("/memfd:"))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:shmcast" in line:
            names.add(line.split()[5].removeprefix("/memfd:"))
    return names


def check_queue(queue: MessageQueue, readers: list[MessageReader]) -> None:
    """Send small and large messages through more than a lap of the ring, and of a small arena."""
    for number in range(10):
        content = bytes([number]) * (LARGE_BYTES if number % 3 == 0 else number)
        queue.enqueue((number, content, pickle.PickleBuffer(bytearray(content))), PATIENCE_S)
        for reader in readers:
            got, same, buffer = reader.dequeue(PATIENCE_S)
            assert (number, content, content) == (got, same, bytes(buffer))
    time.sleep(0.012)  # the next enqueue looks at who is alive
    queue.enqueue("end", PATIENCE_S)
    assert ["end"] * len(readers) == [reader.dequeue(PATIENCE_S) for reader in readers]


@pytest.fixture(params=["blocks", "files"])
def small_queue(
    make_queue: MakeQueue, request: pytest.FixtureRequest
) -> tuple[MessageQueue, MessageReader]:
    """A queue with one reader and small chunks."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096, **PATHS[request.param])
    return queue, reader


# --- the parent's ends in the child ---------------------------------------------------------------


def test_every_call_says_so(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """Every call on an inherited end raises ShmcastError with the parent's pid and the child's."""
    import torch

    strided = torch.frombuffer(bytearray(2 * LARGE_BYTES), dtype=torch.uint8)[::2]
    queue, reader = small_queue
    queue.enqueue("for the parent")
    calls: list[Callable[[], Any]] = [
        lambda: queue.enqueue(1),
        lambda: queue.enqueue(1, timeout=0),
        lambda: queue.enqueue(bytes(LARGE_BYTES)),
        lambda: queue.enqueue(pickle.PickleBuffer(bytearray(LARGE_BYTES))),
        lambda: queue.enqueue(strided),
        lambda: queue.empty((LARGE_BYTES,), torch.uint8),
        queue.wait_until_ready,
        lambda: queue.wait_until_ready(0),
        queue.export_handle,
        queue.stats,
        reader.dequeue,
        lambda: reader.dequeue(timeout=0),
        reader.wait_until_ready,
        lambda: reader.wait_until_ready(0),
        lambda: next(iter(reader)),
        reader.stats,
    ]
    child = Forked(lambda: errors_of(calls))
    texts = child.answer()
    assert len(calls) == len(texts)
    for text in texts:
        assert text.startswith("ShmcastError: ")
        assert f"belongs to process {os.getpid()}" in text
        assert f"this is process {child.pid}" in text
    assert "for the parent" == reader.dequeue(0)
    check_queue(queue, [reader])


def test_every_call_says_so_before_the_handshake() -> None:
    """An end that was inherited before it was attached says the same, and its parent attaches."""
    with (
        MessageQueue(QueueConfig()) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        calls = [reader.dequeue, lambda: reader.wait_until_ready(1), lambda: queue.enqueue(1)]
        for text in Forked(lambda: errors_of(calls)).answer():
            assert text.startswith("ShmcastError: ")
        queue.wait_until_ready(PATIENCE_S)
        check_queue(queue, [reader])


def test_in_a_child_of_a_child(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """A grandchild is no owner either."""
    queue, reader = small_queue

    def fork_again() -> list[str]:
        answer = Forked(lambda: errors_of([lambda: queue.enqueue(1), reader.dequeue])).answer()
        assert isinstance(answer, list)
        return answer

    for text in Forked(fork_again).answer():
        assert text.startswith("ShmcastError: ")
        assert f"belongs to process {os.getpid()}" in text
    check_queue(queue, [reader])


def test_closing_in_the_child(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """Closing both ends in a child, and with them the context managers, changes nothing."""
    queue, reader = small_queue
    queue.enqueue("for the parent")

    def close() -> str:
        with queue, reader:
            pass
        queue.close()
        reader.close()
        return repr(queue) + repr(reader)

    assert isinstance(Forked(close).answer(), str)
    assert (False, False) == (queue.closed, reader.closed)
    assert "for the parent" == reader.dequeue(PATIENCE_S)
    check_queue(queue, [reader])


def test_destructors_in_the_child() -> None:
    """The destructors of both ends in a child change nothing for the parent."""
    ends: list[Any] = [MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096))]
    ends.append(MessageQueue.create_from_handle(ends[0].export_handle(), 0))
    ends[1].wait_until_ready(PATIENCE_S)
    ends[0].enqueue("for the parent")

    def forget() -> int:
        ends.clear()
        return gc.collect()

    assert isinstance(Forked(forget).answer(), int)
    queue, reader = ends
    with queue, reader:
        assert "for the parent" == reader.dequeue(PATIENCE_S)
        check_queue(queue, [reader])


END_OF_A_CHILD = """
import os, sys, multiprocessing
from shmcast import MessageQueue, QueueConfig

def leave():
    pass

if __name__ == "__main__":
    queue = MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096))
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    reader.wait_until_ready(30)
    queue.enqueue(bytes(100_000))
    how = sys.argv[1]
    if how == "multiprocessing":
        process = multiprocessing.get_context("fork").Process(target=leave)
        process.start()
        process.join()
        assert process.exitcode == 0
    else:
        pid = os.fork()
        if pid == 0:
            os._exit(0) if how == "os._exit" else sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert reader.dequeue(30) == bytes(100_000)
    for number in range(50):
        queue.enqueue(number, 30)
        assert reader.dequeue(30) == number
    print("good")
"""


@pytest.mark.parametrize("how", ["os._exit", "sys.exit", "multiprocessing"])
def test_end_of_the_child(how: str, tmp_path: Path) -> None:
    """However a forked child ends, the parent's ends go on, and nothing is printed about it."""
    script = tmp_path / "script.py"
    script.write_text(END_OF_A_CHILD)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", script, how],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,  # its status is compared below
    )
    assert ("good\n", "", 0) == (done.stdout, done.stderr, done.returncode)


def test_child_of_a_closed_end(make_queue: MakeQueue, capfd: pytest.CaptureFixture[str]) -> None:
    """Ends that are closed but still referenced do not disturb a fork."""
    closed = []
    for _ in range(3):
        queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096)
        reader.close()
        queue.close()
        closed += [queue, reader]
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096)
    child = Forked(lambda: (memory_files_of(os.getpid()), errors_of([queue.stats])))
    files, (text,) = child.answer()
    assert set() == files - {"shmcast-locks"}
    assert text.startswith("ShmcastError: ")
    assert "" == capfd.readouterr().err
    check_queue(queue, [reader])


# --- an end of the child's own --------------------------------------------------------------------


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether a byte of a lock file is locked for a process that holds none."""

    def probe() -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except BlockingIOError:
            return True
        return False

    return bool(Forked(probe).answer())


def test_child_attaches_to_the_same_queue() -> None:
    """A child may attach a reader of its own, and its end takes nothing from the parent's ends."""
    config = QueueConfig(n_readers=2, n_chunks=4, chunk_bytes=4096)
    with (
        MessageQueue(config) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        handle = queue.export_handle()
        locks = queue._writer._lock_file.descriptor

        def receive() -> list[Any]:
            with MessageQueue.create_from_handle(handle, 1) as mine:
                return [mine.dequeue(PATIENCE_S) for _ in range(4)]

        for is_again in (False, True):
            child = Forked(receive)
            queue.wait_until_ready(PATIENCE_S)
            messages = ["a", bytes(LARGE_BYTES), 3, is_again]
            for message in messages:
                queue.enqueue(message, PATIENCE_S)
            assert messages == child.answer()
            assert messages == [reader.dequeue(PATIENCE_S) for _ in range(4)]
            assert [True, True, False] == [is_locked(locks, byte) for byte in range(3)]
            check_queue(queue, [reader])
        assert 0 == queue.stats().losses


def test_childs_end_keeps_its_lock() -> None:
    """What a child does to the ends that it inherited does not drop the lock of its own end."""
    config = QueueConfig(n_readers=2, n_chunks=4, chunk_bytes=4096)
    with (
        MessageQueue(config) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        handle = queue.export_handle()
        ends = [queue, reader]

        def receive() -> list[Any]:
            with MessageQueue.create_from_handle(handle, 1) as mine:
                mine.wait_until_ready(PATIENCE_S)
                for end in ends:
                    end.close()
                ends.clear()
                gc.collect()
                return [mine.dequeue(PATIENCE_S) for _ in range(3)]

        child = Forked(receive)
        queue.wait_until_ready(PATIENCE_S)
        for number in range(3):
            time.sleep(0.015)  # each enqueue looks at who is alive
            queue.enqueue(number, PATIENCE_S)
        assert [0, 1, 2] == child.answer()
        assert 0 == queue.stats().losses


def test_child_makes_its_own_queue(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """A child may make a queue of its own while it has inherited another one."""
    queue, reader = small_queue

    def make() -> list[Any]:
        with (
            MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as mine,
            MessageQueue.create_from_handle(mine.export_handle(), 0) as its_reader,
        ):
            mine.wait_until_ready(PATIENCE_S)
            for message in (1, bytes(LARGE_BYTES)):
                mine.enqueue(message)
            return [its_reader.dequeue(PATIENCE_S) for _ in range(2)]

    child = Forked(make)
    check_queue(queue, [reader])
    assert [1, bytes(LARGE_BYTES)] == child.answer()


def receive_two(pipe: Connection, handle: Handle) -> None:
    """Send back two messages."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        pipe.send([reader.dequeue(PATIENCE_S) for _ in range(2)])


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_reader_by_multiprocessing(start_child: StartChild, method: str) -> None:
    """A reader works in a process of each start method, with the handle as an argument."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue:
        child = start_child(receive_two, queue.export_handle(), method=method)
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("small", PATIENCE_S)
        queue.enqueue(bytes(LARGE_BYTES), PATIENCE_S)
        assert ["small", bytes(LARGE_BYTES)] == child.receive()
        assert 0 == child.join()


READ_TWO = """
import sys
from shmcast import Handle, MessageQueue
handle = Handle.load(sys.argv[1]) if sys.argv[1:] else Handle.from_json(sys.stdin.read())
with MessageQueue.create_from_handle(handle, 0) as reader:
    print([len(reader.dequeue(30)) for _ in range(2)])
"""


@pytest.mark.parametrize("way", ["standard input", "file"])
def test_reader_by_subprocess(way: str, tmp_path: Path) -> None:
    """A reader works in any program that gets the handle as JSON or as a saved file."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue:
        handle = queue.export_handle()
        handle.save(tmp_path / "handle")
        arguments = [tmp_path / "handle"] if way == "file" else []
        process = subprocess.Popen(
            [sys.executable, "-c", READ_TWO, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        if way != "file":
            process.stdin.write(handle.to_json())
        process.stdin.close()
        process.stdin = None
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("small", PATIENCE_S)
        queue.enqueue(bytes(LARGE_BYTES), PATIENCE_S)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert (f"[5, {LARGE_BYTES}]\n", 0) == (output, process.returncode)


@pytest.mark.parametrize("close_fds", [True, False])
def test_subprocess_inherits_nothing(
    small_queue: tuple[MessageQueue, MessageReader], close_fds: bool
) -> None:
    """A program started from a process with ends gets none of their files and sockets."""
    queue, reader = small_queue
    queue.enqueue(bytes(LARGE_BYTES))
    socket = Path(f"/proc/self/fd/{reader._source.control._socket.fileno()}").readlink().name
    done = subprocess.run(
        ["ls", "-l", "/proc/self/fd"],
        capture_output=True,
        text=True,
        close_fds=close_fds,
        check=True,
    )
    assert "memfd:" not in done.stdout
    assert socket not in done.stdout
    assert bytes(LARGE_BYTES) == reader.dequeue(PATIENCE_S)
    check_queue(queue, [reader])


# --- what was received ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_received_before_the_fork(make_queue: MakeQueue, path: str) -> None:
    """What was received is unchanged in a child, while the parent laps the ring and closes."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096, **PATHS[path])
    messages = [bytearray(b"small" * 100), bytearray(os.urandom(LARGE_BYTES)), b"x" * 3000]
    received = []
    for message in messages:
        queue.enqueue([pickle.PickleBuffer(message), message])
        received.append(reader.dequeue(PATIENCE_S))
    here, there = os.pipe()

    def look() -> list[tuple[bytes, bytes]]:
        os.close(there)
        os.read(here, 1)  # ends with the parent's end of the pipe
        return [(bytes(buffer), bytes(whole)) for buffer, whole in received]

    child = Forked(look)
    for index in range(2):  # the last one is read-only
        memoryview(received[index][0])[:5] = b"mine "
    received.clear()  # the blocks are given up, and used again
    check_queue(queue, [reader])
    reader.close()
    queue.close()
    os.close(there)
    os.close(here)
    assert [(bytes(message), bytes(message)) for message in messages] == child.answer()


def receive_tensors_and_fork(pipe: Connection, settings: dict[str, Any]) -> None:
    """Receive tensors, fork a child that tells what it sees after this process's death."""
    import torch

    torch.set_num_threads(1)  # the child has no other thread of this process
    queue = MessageQueue(QueueConfig(n_chunks=4, chunk_bytes="64 KiB", **settings))
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    reader.wait_until_ready(PATIENCE_S)
    tensors = []
    for n_items in (10, 1000, 30_000):
        queue.enqueue(torch.arange(n_items))
        tensors.append(reader.dequeue(PATIENCE_S))
    parent = os.getpid()
    if os.fork():
        for number in range(8):
            for n_items in (1000, 30_000):
                queue.enqueue(torch.full((n_items,), number))
                reader.dequeue(PATIENCE_S).add_(1)
            if number == 3:
                tensors.clear()  # their blocks are used again
        signal.pause()
    pipe.send(os.getpid())
    while os.getppid() == parent:
        time.sleep(0.002)
    whole = [torch.equal(tensor, torch.arange(len(tensor))) for tensor in tensors]
    for tensor in tensors:
        tensor.add_(1)
    written = [torch.equal(tensor, torch.arange(len(tensor)) + 1) for tensor in tensors]
    pipe.send((whole, written))
    os._exit(0)


@pytest.mark.parametrize("path", PATHS)
def test_tensors_outlive_the_parent(start_child: StartChild, path: str) -> None:
    """Tensors that a dead process had received are whole and writable in the child it forked."""
    # Not "spawn": there the survivor would hold the pipe that tells of its parent's end.
    child = start_child(receive_tensors_and_fork, PATHS[path], method="forkserver")
    survivor = child.receive(2 * PATIENCE_S)  # importing torch takes its time
    try:
        child.kill()
        assert ([True] * 3, [True] * 3) == child.receive()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it ends by itself if all is well
            os.kill(survivor, signal.SIGKILL)


def test_child_writes_into_its_own(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """What a child writes into a large message that it inherited stays its own."""
    queue, reader = small_queue
    queue.enqueue(pickle.PickleBuffer(bytearray(LARGE_BYTES)))
    received = memoryview(reader.dequeue(PATIENCE_S)).cast("B")
    is_readonly = received.readonly

    def write() -> bytes:
        if not is_readonly:
            received[:5] = b"child"
        return bytes(received[:5])

    assert (b"\0" * 5 if is_readonly else b"child") == Forked(write).answer()
    assert b"\0" * 5 == bytes(received[:5])


# --- a fork in the middle of something ------------------------------------------------------------


def test_fork_while_threads_wait(make_queue: MakeQueue) -> None:
    """A child forked while other threads wait in enqueue and dequeue hangs in no call."""
    queue, (reader,) = make_queue(n_chunks=1, chunk_bytes=4096)
    other_queue, (other_reader,) = make_queue(n_chunks=1, chunk_bytes=4096)
    queue.enqueue(0)
    received: list[Any] = []
    threads = [
        threading.Thread(target=queue.enqueue, args=(1,)),
        threading.Thread(target=lambda: received.append(other_reader.dequeue())),
    ]
    for thread in threads:
        thread.start()
    while not (queue.stats().waits and other_reader.stats().waits):
        time.sleep(0.001)

    def use() -> list[str]:
        texts = errors_of(
            [lambda: queue.enqueue(2), other_reader.dequeue, lambda: other_reader.dequeue(0)]
        )
        for end in (queue, reader, other_queue, other_reader):
            end.close()
        return texts

    for _ in range(5):
        for text in Forked(use).answer():
            assert text.startswith("ShmcastError: ")
    assert [0, 1] == [reader.dequeue(PATIENCE_S) for _ in range(2)]
    other_queue.enqueue("there")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ["there"] == received


def test_fork_while_threads_work(small_queue: tuple[MessageQueue, MessageReader]) -> None:
    """Forks at any moment of running enqueue and dequeue calls lose nothing and hang no child."""
    queue, reader = small_queue
    received: list[Any] = []
    is_over = threading.Event()

    def publish() -> None:
        number = 0
        while not is_over.is_set():
            content = bytearray(LARGE_BYTES if number % 10 == 0 else 20)
            queue.enqueue((number, pickle.PickleBuffer(content)), PATIENCE_S)
            number += 1
        queue.enqueue(None, PATIENCE_S)

    def receive() -> None:
        while (message := reader.dequeue(PATIENCE_S)) is not None:
            number, content = message
            received.append((number, bytes(content)))

    threads = [threading.Thread(target=publish), threading.Thread(target=receive)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            texts = Forked(
                lambda: errors_of([lambda: queue.enqueue(1), lambda: reader.dequeue(PATIENCE_S)])
            ).answer()
            assert all(text.startswith("ShmcastError: ") for text in texts)
    finally:
        is_over.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(received) > 0
    expected = [(n, bytes(LARGE_BYTES if n % 10 == 0 else 20)) for n in range(len(received))]
    assert expected == received


class ForksWhenPickled:
    """Forks in its `__reduce__`; the child goes on with its enqueue, as a copy of the parent."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def __reduce__(self) -> tuple[Any, ...]:
        self.pids.append(os.fork())
        return str, ("pickled",)


@pytest.mark.parametrize("kind", ["stream", "buffer", "strided"])
@pytest.mark.parametrize("size_bytes", [10, LARGE_BYTES])
def test_fork_while_pickling(
    small_queue: tuple[MessageQueue, MessageReader], size_bytes: int, kind: str
) -> None:
    """A fork inside pickling: the child's enqueue raises, and the parent's message arrives."""
    queue, reader = small_queue
    parent = os.getpid()
    pids: list[int] = []

    def part() -> Any:
        if kind == "strided":
            import torch

            return torch.frombuffer(bytearray(2 * size_bytes), dtype=torch.uint8)[::2]
        return bytes(size_bytes) if kind == "stream" else pickle.PickleBuffer(bytearray(size_bytes))

    try:
        queue.enqueue([part(), ForksWhenPickled(pids), part()])
    except ShmcastError as error:
        if os.getpid() == parent:
            raise
        is_right = str(parent) in str(error) and str(os.getpid()) in str(error)
        os._exit(0 if is_right else 1)
    finally:
        if os.getpid() != parent:
            os._exit(2)
    _, status = os.waitpid(pids[0], 0)
    assert 0 == os.waitstatus_to_exitcode(status)
    first, middle, last = reader.dequeue(PATIENCE_S)
    assert "pickled" == middle
    for got in (first, last):
        assert bytes(size_bytes) == bytes(got.numpy() if kind == "strided" else got)
    del first, last, got
    check_queue(queue, [reader])


FORKED_PIDS: list[int] = []


def fork_while_loading(content: bytes) -> bytes:
    """What a message is rebuilt with."""
    FORKED_PIDS.append(os.fork())
    return content


class ForksWhenLoaded:
    """Forks while it is loaded, with more of its stream still to come."""

    def __reduce__(self) -> tuple[Any, ...]:
        return fork_while_loading, (b"loaded",)


@pytest.mark.parametrize("size_bytes", [10, 30_000, 200_000])
def test_fork_while_loading(make_queue: MakeQueue, size_bytes: int) -> None:
    """A fork inside loading: the child's dequeue raises ShmcastError, and never crashes."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes="64 KiB")
    parent = os.getpid()
    FORKED_PIDS.clear()
    queue.enqueue([ForksWhenLoaded(), "x" * size_bytes, "y" * size_bytes])
    try:
        message = reader.dequeue(PATIENCE_S)
    except ShmcastError:
        if os.getpid() == parent:
            raise
        os._exit(0)
    finally:
        if os.getpid() != parent:
            os._exit(1)
    _, status = os.waitpid(FORKED_PIDS[0], 0)
    assert 0 == os.waitstatus_to_exitcode(status)
    assert [b"loaded", "x" * size_bytes, "y" * size_bytes] == message
    check_queue(queue, [reader])


@pytest.mark.parametrize("wait", ["dequeue", "enqueue", "writer's start", "reader's start"])
def test_fork_in_a_signal_handler(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork in a signal handler during a wait: the child's call raises ShmcastError."""
    config = QueueConfig(n_readers=2, n_chunks=1, chunk_bytes=4096)
    parent = os.getpid()
    pids: list[int] = []

    def fork(*_: object) -> None:
        if not pids:
            pids.append(os.fork())

    previous = signal.signal(signal.SIGUSR1, fork)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        with contextlib.ExitStack() as ends:
            queue = ends.enter_context(MessageQueue(config))
            handle = queue.export_handle()
            if wait == "reader's start":
                monkeypatch.setattr(Writer, "survey", lambda _: 0.0)  # no answer
            reader = ends.enter_context(MessageQueue.create_from_handle(handle, 0))
            if wait in ("dequeue", "enqueue"):
                other = ends.enter_context(MessageQueue.create_from_handle(handle, 1))
                queue.wait_until_ready(PATIENCE_S)
                other.wait_until_ready(PATIENCE_S)
                reader.wait_until_ready(PATIENCE_S)
            timer.start()
            try:
                if wait == "dequeue":
                    reader.dequeue(0.3)
                elif wait == "enqueue":
                    queue.enqueue(0)
                    queue.enqueue(1, 0.3)
                elif wait == "writer's start":
                    queue.wait_until_ready(0.3)
                else:
                    reader.wait_until_ready(0.3)
            except (QueueEmpty, QueueFull, QueueNotReady):
                pass
            except ShmcastError as error:
                if os.getpid() == parent:
                    raise
                os._exit(0 if f"belongs to process {parent}" in str(error) else 3)
            finally:
                if os.getpid() != parent:
                    os._exit(1)
            timer.join()
            _, status = os.waitpid(pids[0], 0)
            assert 0 == os.waitstatus_to_exitcode(status)
    finally:
        signal.signal(signal.SIGUSR1, previous)


# --- a child that survives its parent -------------------------------------------------------------


def have_ends_and_fork(pipe: Connection, case: str, path: str) -> None:
    """Have both ends of a queue, with unread messages, and fork a child that stays."""
    config = QueueConfig(n_readers=2, n_chunks=400, chunk_bytes=4096, **PATHS[path])
    queue = MessageQueue(config)
    handle = queue.export_handle()
    reader = MessageQueue.create_from_handle(handle, 0)
    with contextlib.suppress(QueueNotReady):
        queue.wait_until_ready(0.01)
    reader.wait_until_ready(PATIENCE_S)
    for _ in range(3):  # rank 1 has not attached, so the writer keeps the files
        queue.enqueue([bytes(LARGE_BYTES), pickle.PickleBuffer(bytearray(LARGE_BYTES))])
    if case == "dropped":
        for _ in range(2):
            memoryview(reader.dequeue(PATIENCE_S)[1])[:5] = b"mine "
    elif case == "collected":
        reader._source.control.collect_files()
    elif case == "closed ends":
        others = [MessageQueue(QueueConfig()) for _ in range(3)]
        for other in others:
            other.close()
    elif case == "full socket":
        with contextlib.suppress(QueueFull):
            while True:
                queue.enqueue(bytes(LARGE_BYTES), 0)
        threading.Thread(target=queue.enqueue, args=(bytes(LARGE_BYTES),), daemon=True).start()
        while queue._writer._file is None:
            time.sleep(0.001)
    if os.fork() == 0:
        pipe.send(os.getpid())
    signal.pause()


@pytest.mark.parametrize(
    ("case", "path"),
    [
        *itertools.product(("unread", "dropped", "closed ends"), PATHS),
        ("collected", "files"),
        ("full socket", "files"),
    ],
)
def test_survivor_keeps_no_memory(start_child: StartChild, case: str, path: str) -> None:
    """A child that outlives its parent keeps nothing of the queue but the file of the locks."""
    # Not "spawn": there the survivor would hold the pipe that tells of its parent's end.
    child = start_child(have_ends_and_fork, case, path, method="forkserver")
    survivor = child.receive()
    try:
        child.kill()
        assert set() == memory_files_of(survivor) - {"shmcast-locks"}
    finally:
        os.kill(survivor, signal.SIGKILL)


def test_child_process_of_multiprocessing_keeps_no_memory(
    small_queue: tuple[MessageQueue, MessageReader],
) -> None:
    """A process of the start method "fork" has nothing of its parent's queue but the locks."""
    queue, reader = small_queue
    queue.enqueue(bytes(LARGE_BYTES))
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=report_memory_files, args=(there,))
    process.start()
    assert here.poll(PATIENCE_S)
    assert {"shmcast-locks"} >= here.recv()
    process.join(PATIENCE_S)
    here.close()
    there.close()
    check_queue_after_large(queue, reader)


def report_memory_files(pipe: Connection) -> None:
    """Say which memory files this process has."""
    pipe.send(memory_files_of(os.getpid()))


def check_queue_after_large(queue: MessageQueue, reader: MessageReader) -> None:
    """Take the large message, then use the queue."""
    assert bytes(LARGE_BYTES) == reader.dequeue(PATIENCE_S)
    check_queue(queue, [reader])


@pytest.fixture(autouse=True)
def no_child_stays() -> Iterator[None]:
    """Every child that a test forked was waited for."""
    yield
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
