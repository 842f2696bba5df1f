"""An end that fails says so: the other side gets what was published, and then the reason."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pickle import PickleBuffer
from typing import Any

import pytest
from conftest import PATIENCE_S, MakeQueue, StartChild

import shmcast.control as control_module
import shmcast.layout as layout_module
from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterFailed,
    WriterLost,
)
from shmcast._ring import RingReader, RingWriter
from shmcast.attachment import Attachment
from shmcast.control import failure_text
from shmcast.layout import MOST_FAILURE_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

#: A writer that has just looked does so again after 10 ms.
LOOK_PAUSE_S = 0.010


class Mute(Exception):
    """An error that has no text to show."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def drained(reader: MessageReader) -> tuple[list[Any], str]:
    """Everything that comes, and the error at the end of it."""
    messages: list[Any] = []
    try:
        messages.extend(reader)
    except ShmcastError as error:
        return messages, f"{type(error).__name__}: {error}"
    return messages, "the end"


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(RuntimeError("disk full"), "RuntimeError: disk full", id="builtin"),
        pytest.param(
            subprocess.SubprocessError("no"), "subprocess.SubprocessError: no", id="module"
        ),
        pytest.param(KeyboardInterrupt(), "KeyboardInterrupt", id="no text"),
        pytest.param("disk full", "disk full", id="text"),
        pytest.param("", "no text", id="empty"),
        pytest.param("a\nb\t c\x1b[31m\u202e\ud800d", "a b c [31m d", id="unprintable"),
        pytest.param("é" * 500, "é" * 500, id="as long as allowed"),
        pytest.param("é" * 501, "é" * 498 + "…", id="too long"),
        pytest.param("x" * 10**6, "x" * 997 + "…", id="far too long"),
        pytest.param(" " * 10**6 + "x", "no text…", id="cut before its first letter"),
    ],
)
def test_failure_text(error: BaseException | str, expected: str) -> None:
    """What is said of an error is its type and text, printable, on one line and not too long."""
    assert expected == failure_text(error)
    assert len(failure_text(error).encode()) <= MOST_FAILURE_BYTES


def test_an_error_that_can_not_be_shown_still_closes(make_queue: MakeQueue) -> None:
    """An error whose `str` raises fails the queue as any other does."""
    queue, (reader,) = make_queue()
    with pytest.raises(Mute), queue:
        raise Mute
    assert "Mute" in drained(reader)[1]


@pytest.mark.parametrize("error", [5, b"disk full", RuntimeError])
def test_what_is_no_error_is_refused(make_queue: MakeQueue, error: Any) -> None:
    """`close` refuses what is neither an exception nor a text, and closes nothing."""
    for end in (queue := make_queue()[0], make_queue()[1][0]):
        with pytest.raises(TypeError, match="error = "):
            end.close(error=error)
        assert not end.closed
    queue.close(error=None)


# --- the writer fails -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("disk full"), "RuntimeError: disk full"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (SystemExit("bye"), "SystemExit: bye"),
        (QueueClosed("another queue's"), "QueueClosed: another queue's"),
        (SystemExit(0), None),
        (SystemExit(), None),
        (GeneratorExit(), None),
    ],
    ids=repr,
)
def test_a_block_that_is_left_by_an_error(
    make_queue: MakeQueue, error: BaseException, expected: str | None
) -> None:
    """Readers get all that was published, then the error that the writer's block ended with."""
    queue, readers = make_queue(n_readers=2)
    for number in range(5):
        queue.enqueue(number)
    with pytest.raises(type(error)), queue:
        raise error
    for reader in readers:
        messages, end = drained(reader)
        assert [0, 1, 2, 3, 4] == messages
        if expected is None:
            assert "the end" == end
        else:
            assert re.fullmatch(
                rf"WriterFailed: the writer \(pid {os.getpid()}\) failed, and everything that it "
                rf"published was read: (shmcast\.errors\.)?{re.escape(expected)}",
                end,
            )


def test_a_failure_is_seen_by_every_call(make_queue: MakeQueue) -> None:
    """`close(error=...)` takes a text; every later `dequeue` raises it, and it is a WriterLost."""
    queue, (reader,) = make_queue()
    queue.close(error="the source has ended early")
    for timeout in (0, PATIENCE_S, None):
        with pytest.raises(WriterFailed, match="the source has ended early"):
            reader.dequeue(timeout)
    with pytest.raises(WriterLost):
        reader.dequeue()


def test_the_first_close_counts(make_queue: MakeQueue) -> None:
    """A queue that was closed does not fail afterwards, and a failure is not taken back."""
    queue, (reader,) = make_queue()
    queue.close()
    queue.close(error="too late")
    assert ([], "the end") == drained(reader)
    queue, (reader,) = make_queue()
    queue.close(error="first")
    queue.close(error="second")
    queue.close()
    assert drained(reader)[1].endswith(": first")


def test_a_queue_that_was_closed_by_another_thread(make_queue: MakeQueue) -> None:
    """A block that ends by QueueClosed since its queue was closed is no failure."""
    queue, (reader,) = make_queue(n_chunks=1)
    queue.enqueue(0)
    closer = threading.Timer(0.05, queue.close)
    closer.start()
    with pytest.raises(QueueClosed), queue:
        queue.enqueue(1)
    closer.join()
    assert ([0], "the end") == drained(reader)


@pytest.mark.usefixtures("only_in_calls")
def test_a_reader_that_is_not_admitted_yet() -> None:
    """A reader whose claim has not been answered when the writer fails is told why too."""
    queue = MessageQueue(QueueConfig())
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.close(error=MemoryError("no room"))
        for call in (reader.wait_until_ready, reader.dequeue, lambda: list(reader)):
            with pytest.raises(WriterFailed, match="before it admitted rank 0: MemoryError: no"):
                call()


def test_the_reason_lies_in_the_memory() -> None:
    """A reader that looks when the writer is long gone finds the text of its failure whole."""
    queue = MessageQueue(QueueConfig())
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
        text = "é" * (MOST_FAILURE_BYTES // 2)
        queue.close(error=text)
        del queue
        assert drained(reader)[1].endswith(f": {text}")


def test_a_length_out_of_range(make_queue: MakeQueue) -> None:
    """A damaged length of the text leads nobody out of it."""
    queue, (reader,) = make_queue()
    data = memoryview(queue._writer.segment.data).cast("Q")  # type: ignore[arg-type]
    data[queue._writer.segment.layout.failure_offset // 8] = 2**64 - 1
    assert isinstance(reader._source.ring, RingReader)
    failure = reader._source.ring.failure
    assert failure is not None
    assert MOST_FAILURE_BYTES <= len(failure) < MOST_FAILURE_BYTES + 64
    data.release()


@pytest.mark.parametrize("text", ["", "x" * 5000])
def test_a_text_that_does_not_fit_is_refused(make_queue: MakeQueue, text: str) -> None:
    """The ring takes no text that its place in the memory has no room for."""
    queue, (reader,) = make_queue()
    with pytest.raises(ValueError, match="a failure of"):
        queue._writer.ring.say_failed(text)
    assert isinstance(reader._source.ring, RingReader)
    assert reader._source.ring.failure is None


# --- a program that ends --------------------------------------------------------------------------

PROGRAM = """
import sys
from shmcast import MessageQueue, QueueConfig

class Framework:
    def call(self):
        try:
            raise ValueError("handled")
        except ValueError as error:
            sys.last_value = error

def fail():
    queue = MessageQueue(QueueConfig())
    publish(queue)
    raise RuntimeError("in a function")

def publish(queue):
    print(queue.export_handle().to_json(), flush=True)
    queue.wait_until_ready(30)
    queue.enqueue(1)

how = sys.argv[1]
if how == "in a function":
    fail()
if how == "caught":
    try:
        fail()
    except RuntimeError:
        sys.exit()
queue = MessageQueue(QueueConfig())
publish(queue)
if how == "uncaught":
    raise RuntimeError("disk full")
if how == "interrupted":
    raise KeyboardInterrupt
if how == "status in a block":
    with queue:
        sys.exit(3)
if how == "status":
    sys.exit(3)
if how == "stored by a framework":
    Framework().call()
"""


@pytest.mark.parametrize(
    ("how", "status", "expected"),
    [
        ("uncaught", 1, "RuntimeError: disk full"),
        ("in a function", 1, "RuntimeError: in a function"),
        ("interrupted", -signal.SIGINT, "KeyboardInterrupt"),
        ("status in a block", 3, "SystemExit: 3"),
        ("status", 3, "the end"),
        ("caught", 0, "the end"),
        ("stored by a framework", 0, "the end"),
        ("normal", 0, "the end"),
    ],
)
def test_a_program_ends_with_an_open_writer(how: str, status: int, expected: str) -> None:
    """An uncaught exception fails a queue that is open; any other end of a program closes it."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stdout is not None
        handle = Handle.from_json(program.stdout.readline())
        with MessageQueue.create_from_handle(handle, 0) as reader:
            assert 1 == reader.dequeue(PATIENCE_S)
            assert status == program.wait(PATIENCE_S)
            messages, end = drained(reader)
    assert [] == messages
    assert end.endswith(expected)


open_ends: list[Any] = []


def leave_a_writer_open(pipe: Connection, error: BaseException | None) -> None:
    """End with an open queue."""
    queue = MessageQueue(QueueConfig())
    open_ends.append(queue)
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    if error is not None:
        raise error


def leave_a_reader_open(pipe: Connection, handle: Handle, error: BaseException | None) -> None:
    """End with an open reader of rank 0."""
    reader = MessageQueue.create_from_handle(handle, 0)
    open_ends.append(reader)
    reader.wait_until_ready(PATIENCE_S)
    pipe.send("ready")
    if error is not None:
        raise error


#: From Python 3.13 on the error is over before a function of `atexit` could see it.
SHOWS_ERRORS = "_exit_function" in BaseProcess._bootstrap.__code__.co_names
ERRORS_OF_A_CHILD = [
    (RuntimeError("disk full"), "RuntimeError: disk full"),
    (SystemExit(3), "SystemExit: 3"),
]


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(("error", "expected"), ERRORS_OF_A_CHILD, ids=["exception", "status"])
def test_a_child_ends_with_an_open_writer(
    start_child: StartChild, method: str, error: BaseException, expected: str
) -> None:
    """What ends a child of `multiprocessing` fails its open queue, or the child counts as dead."""
    child = start_child(leave_a_writer_open, error, method=method)
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        child.join()
        end = drained(reader)[1]
        assert end.endswith(f"was read: {expected}") if SHOWS_ERRORS else "died" in end


def test_a_child_that_is_forked_while_an_error_is_handled(start_child: StartChild) -> None:
    """An error that a child inherits is not the one that ends it."""
    try:
        raise ValueError("the parent's")
    except ValueError:
        child = start_child(leave_a_writer_open, None, method="fork")
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        child.join()
        assert "failed" not in drained(reader)[1]


# --- a reader fails -------------------------------------------------------------------------------


def lost_by(queue: MessageQueue) -> ReaderLost:
    """What the next `enqueue` that looks around raises."""
    time.sleep(1.1 * LOOK_PAUSE_S)
    with pytest.raises(ReaderLost) as lost:
        queue.enqueue("not published")
    return lost.value


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
        (SystemExit(1), "SystemExit: 1"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
    ids=repr,
)
def test_a_reader_that_leaves_by_an_error_is_lost(
    make_queue: MakeQueue, error: BaseException, expected: str
) -> None:
    """The writer's next call raises ReaderLost with rank and text; then it goes on."""
    queue, (reader, other) = make_queue(n_readers=2)
    queue.enqueue(0)
    with pytest.raises(type(error)), reader:
        raise error
    lost = lost_by(queue)
    text = f"rank 0 (pid {os.getpid()}) failed 1 messages behind: {expected}"
    assert ((0,), text) == (lost.ranks, str(lost))
    assert 1 == queue.stats().losses
    queue.enqueue(1)
    assert [0, 1] == [other.dequeue(PATIENCE_S), other.dequeue(PATIENCE_S)]
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as again:
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(2)
        assert 2 == again.dequeue(PATIENCE_S)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(), GeneratorExit()], ids=repr)
def test_a_reader_that_leaves_on_purpose(make_queue: MakeQueue, error: BaseException) -> None:
    """The end of a generator or of a program without an error is no loss."""
    queue, (reader, other) = make_queue(n_readers=2)
    with pytest.raises(type(error)), reader:
        raise error
    time.sleep(1.1 * LOOK_PAUSE_S)
    queue.enqueue(1)
    assert (1, 0) == (other.dequeue(PATIENCE_S), queue.stats().losses)


def test_a_reader_that_reads_to_the_end(make_queue: MakeQueue) -> None:
    """A reader whose block ends by the QueueClosed of its queue has not failed."""
    queue, (reader,) = make_queue()
    queue.close()
    source = reader._source
    assert isinstance(source, Attachment)
    with pytest.raises(QueueClosed), reader:
        reader.dequeue()
    assert not source.control._has_said_failure


def test_a_failed_reader_is_evicted(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """With "evict" the text is logged, and the call succeeds."""
    queue, (reader, other) = make_queue(n_readers=2, on_reader_loss="evict")
    reader.close(error="no disk")
    time.sleep(1.1 * LOOK_PAUSE_S)
    queue.enqueue(1)
    assert 1 == other.dequeue(PATIENCE_S)
    assert "failed 0 messages behind: no disk" in caplog.text
    assert 1 == queue.stats().losses


def test_a_failed_reader_while_the_writer_waits(make_queue: MakeQueue) -> None:
    """A writer that waits for a reader is told of its failure at once."""
    queue, (reader,) = make_queue(n_chunks=1)
    queue.enqueue(0)
    failing = threading.Timer(0.05, lambda: reader.close(error="no disk"))
    failing.start()
    with pytest.raises(ReaderLost, match="failed 1 messages behind: no disk"):
        queue.enqueue(1, timeout=PATIENCE_S)
    failing.join()


def test_a_failed_rank_is_claimed_before_its_loss_is_handled(make_queue: MakeQueue) -> None:
    """A claim does not hide the failure of the one before it, and is answered after that."""
    queue, (reader,) = make_queue()
    reader.close(error="no disk")
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as again:
        assert "no disk" in str(lost_by(queue))
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(1)
        assert 1 == again.dequeue(PATIENCE_S)


def test_its_blocks_come_back(make_queue: MakeQueue) -> None:
    """A reader that fails keeps what it received, and its blocks until it drops that."""
    queue, (reader, _) = make_queue(n_readers=2, oob_threshold_bytes=1000)
    queue.enqueue(PickleBuffer(bytearray(100_000)))
    kept = reader.dequeue(PATIENCE_S)
    assert (1, 1) == queue.stats().blocks_held
    reader.close(error="no disk")
    assert (0,) == lost_by(queue).ranks
    assert (1, 1) == queue.stats().blocks_held
    assert bytes(100_000) == bytes(kept)
    del kept
    queue.enqueue(PickleBuffer(bytearray(100_000)))  # which looks at what was given up
    assert (0, 2) == queue.stats().blocks_held


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize(("error", "expected"), ERRORS_OF_A_CHILD, ids=["exception", "status"])
def test_a_child_ends_with_an_open_reader(
    start_child: StartChild, method: str, error: BaseException, expected: str
) -> None:
    """The writer reads why a reader failed after its process has ended."""
    with MessageQueue(QueueConfig()) as queue:
        child = start_child(leave_a_reader_open, queue.export_handle(), error, method=method)
        child.receive()
        child.join()
        end = f"failed 0 messages behind: {expected}" if SHOWS_ERRORS else "died 0 messages behind"
        assert str(lost_by(queue)).endswith(end)


def say_failed_and_die(pipe: Connection, handle: Handle) -> None:
    """Attach, say that this end fails, and be killed before it leaves."""
    reader = MessageQueue.create_from_handle(handle, 0)
    reader.wait_until_ready(PATIENCE_S)
    reader._source.say_failed("no disk")
    pipe.send("said")
    signal.pause()


def test_a_reader_that_dies_after_it_has_failed(start_child: StartChild) -> None:
    """What a reader said before it died is in the text of its loss."""
    with MessageQueue(QueueConfig()) as queue:
        child = start_child(say_failed_and_die, queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        child.receive()
        child.kill()
        assert str(lost_by(queue)).endswith("failed 0 messages behind: no disk")


def test_a_failure_that_is_no_text(make_queue: MakeQueue) -> None:
    """What a reader says is made printable by the writer, which does not trust it."""
    queue, (reader,) = make_queue()
    reader._source.control.say_failed("\x1b[31m\n" + "x" * 5000)
    reader.close()
    assert re.search(r"behind: \[31m x{900,}$", str(lost_by(queue)))


# --- a reader that can't attach -------------------------------------------------------------------


def attach_without_room(pipe: Connection, handle: Handle, kind: int, most: int) -> None:
    """Try to attach with a limit that leaves no room for it; report what that raises."""
    pipe.poll(0)
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    try:
        with MessageQueue.create_from_handle(handle, 0) as reader:
            reader.wait_until_ready(PATIENCE_S)
    except (OSError, ShmcastError) as error:
        pipe.send(str(error))


@pytest.mark.parametrize(
    ("kind", "most", "expected"),
    [
        pytest.param(resource.RLIMIT_AS, 8 << 30, "Cannot allocate memory", id="address space"),
    ],
)
def test_no_room_to_attach(start_child: StartChild, kind: int, most: int, expected: str) -> None:
    """The writer's QueueNotReady says per rank what kept it from attaching, until it attaches."""
    with MessageQueue(QueueConfig(n_chunks=1, arena_bytes=1 << 40)) as queue:
        child = start_child(attach_without_room, queue.export_handle(), kind, most)
        while not child.pipe.poll(0):
            with contextlib.suppress(QueueNotReady):
                queue.wait_until_ready(0.1)
        with pytest.raises(QueueNotReady) as not_ready:
            queue.wait_until_ready(0)
        assert re.search(
            rf"rank 0 not attached after .* s; rank 0 could not attach: OSError: .*{expected}.* "
            rf"\(pid {child.pid}, .* s ago\)",
            str(not_ready.value),
        )
        assert expected in child.receive()
        queue.enqueue(1)
        with pytest.raises(QueueFull, match=expected):
            queue.enqueue(2, timeout=0)
        child.join()
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            assert {} == queue._writer.control.failed_attempts
            assert 1 == reader.dequeue(PATIENCE_S)


@pytest.mark.usefixtures("only_in_calls")
def test_no_room_for_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader that has no room for the queue's descriptors is named in the log and the error."""

    def receive(*_: object) -> None:
        raise control_module._NoDescriptors(0)

    with MessageQueue(QueueConfig()) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        with monkeypatch.context() as patch:
            patch.setattr(control_module, "_receive", receive)
            with pytest.raises(ShmcastError, match="no room for descriptors"):
                reader._step()
        with pytest.raises(QueueNotReady, match=r"could not attach: .*RLIMIT_NOFILE"):
            queue.wait_until_ready(0)
        assert "can't attach: shmcast.errors.ShmcastError: rank 0 has no room" in caplog.text
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as again:
            queue._writer.survey()
            again._step()
            queue.wait_until_ready(PATIENCE_S)


@pytest.mark.usefixtures("only_in_calls")
def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of another version tells the writer so before it goes."""
    with MessageQueue(QueueConfig()) as queue:
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue._writer.survey()
        monkeypatch.setattr(layout_module, "_VERSION", 99)
        with pytest.raises(ShmcastError, match="this version of shmcast reads 99"), reader:
            reader.wait_until_ready(PATIENCE_S)
        with pytest.raises(QueueNotReady, match=r"could not attach: .*shmcast reads 99"):
            queue.wait_until_ready(0)


def test_a_reader_that_fails_before_it_attaches() -> None:
    """A block that fails while its reader is not attached yet is told as a failed attempt."""
    with MessageQueue(QueueConfig()) as queue:
        with (
            pytest.raises(OSError, match="no weights"),
            MessageQueue.create_from_handle(queue.export_handle(), 0),
        ):
            raise OSError(errno.ENOENT, "no weights")
        with pytest.raises(QueueNotReady, match=r"rank 0 could not attach: .*no weights"):
            queue.wait_until_ready(0)


# --- close that waits -----------------------------------------------------------------------------


def test_close_waits_until_all_is_read(make_queue: MakeQueue) -> None:
    """`close(timeout=...)` returns when every rank has everything, and not before."""
    queue, readers = make_queue(n_readers=2)
    for number in range(10):
        queue.enqueue(number)
    with pytest.raises(QueueFull, match=r"in 0\.0.* s: rank 0 .* 10 messages.*; rank 1") as late:
        queue.close(timeout=0.05)
    assert (0, 1) == late.value.ranks
    assert not queue.closed
    assert 0 == readers[0].dequeue(PATIENCE_S)
    closing = threading.Thread(target=queue.close, args=[PATIENCE_S])
    closing.start()
    for reader in readers:
        while reader.stats().lag:
            assert not queue.closed
            reader.dequeue(PATIENCE_S)
    closing.join()
    assert queue.closed
    assert [([], "the end")] * 2 == [drained(reader) for reader in readers]


def test_close_wakes_with_the_last_message(make_queue: MakeQueue) -> None:
    """A close that waits sleeps meanwhile, and the reader's last release wakes it."""
    queue, (reader,) = make_queue(spin_us=0)
    for number in range(3):
        queue.enqueue(number)
    times: list[float] = []

    def close() -> None:
        queue.close(timeout=None)
        times.append(time.monotonic())

    closing = threading.Thread(target=close)
    closing.start()
    time.sleep(0.2)
    assert [0, 1, 2] == [reader.dequeue(PATIENCE_S) for _ in range(3)]
    read_at = time.monotonic()
    closing.join()
    assert times[0] - read_at < 1


def test_close_waits_for_a_rank_that_has_never_attached() -> None:
    """A rank that comes while the writer closes gets everything from the first message on."""
    queue = MessageQueue(QueueConfig(n_readers=2))
    handle = queue.export_handle()
    queue.enqueue(0)
    with pytest.raises(QueueFull, match=r"rank 0 \(not attached\) is 1 messages behind"):
        queue.close(timeout=0.01)
    got: list[Any] = []

    def read(rank: int) -> None:
        with MessageQueue.create_from_handle(handle, rank) as reader:
            got.extend(reader)

    reading = [threading.Thread(target=read, args=[rank]) for rank in range(2)]
    for thread in reading:
        thread.start()
    queue.close(timeout=PATIENCE_S)
    for thread in reading:
        thread.join()
    assert [0, 0] == got


def test_close_of_a_queue_that_is_read_or_empty(make_queue: MakeQueue) -> None:
    """Where nothing is left to read, `close(timeout=...)` closes at once, and again."""
    queue, (reader,) = make_queue()
    queue.enqueue(1)
    reader.dequeue(PATIENCE_S)
    for timeout in (0.001, None, 0, 5):
        queue.close(timeout)
        assert queue.closed
    MessageQueue(QueueConfig()).close(timeout=0.001)


def test_close_that_waits_finds_a_loss(make_queue: MakeQueue) -> None:
    """Losing a reader ends the wait; the next close goes on without it."""
    queue, (reader, other) = make_queue(n_readers=2)
    queue.enqueue(1)
    reader.close(error="no disk")
    with pytest.raises(ReaderLost, match="no disk"):
        queue.close(timeout=PATIENCE_S)
    assert not queue.closed
    assert 1 == other.dequeue(PATIENCE_S)
    queue.close(timeout=PATIENCE_S)
    assert queue.closed


def test_close_that_waits_goes_on_without_the_evicted(make_queue: MakeQueue) -> None:
    """With "evict" a loss does not end the wait."""
    queue, (reader, other) = make_queue(n_readers=2, on_reader_loss="evict")
    queue.enqueue(1)
    reader.close(error="no disk")
    assert 1 == other.dequeue(PATIENCE_S)
    queue.close(timeout=PATIENCE_S)
    assert queue.closed


def test_close_that_waits_and_one_that_does_not(make_queue: MakeQueue) -> None:
    """A plain close from another thread ends the wait with QueueClosed."""
    queue, (reader,) = make_queue()
    queue.enqueue(1)
    closer = threading.Timer(0.05, queue.close)
    closer.start()
    with pytest.raises(QueueClosed):
        queue.close(timeout=PATIENCE_S)
    closer.join()
    assert ([1], "the end") == drained(reader)


def test_a_signal_interrupts_the_wait(make_queue: MakeQueue) -> None:
    """A handler's exception leaves `close(timeout=...)`, and the queue is still open."""
    queue, (reader,) = make_queue()
    queue.enqueue(1)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, handler)
    start = time.monotonic()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            queue.close(timeout=None)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert time.monotonic() - start < 20 * 0.05
    queue.enqueue(2)
    queue.close()
    assert ([1, 2], "the end") == drained(reader)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_not_allowed(make_queue: MakeQueue, timeout: float) -> None:
    """`close` refuses what no other call takes as a timeout, and stays open."""
    queue, _ = make_queue()
    with pytest.raises(ValueError, match="timeout = "):
        queue.close(timeout=timeout)
    assert not queue.closed


def test_close_with_a_timeout_in_a_forked_child(make_queue: MakeQueue) -> None:
    """In a forked child `close` does nothing, with a timeout or an error too."""
    queue, (reader,) = make_queue()
    queue.enqueue(1)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            queue.close(timeout=None, error="the child's")
            reader.close(error="the child's")
            status = 0
        finally:
            os._exit(status)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    queue.close()
    assert ([1], "the end") == drained(reader)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_close_says_what_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """A plain close names the ranks that have never attached, and how much they miss."""
    queue = MessageQueue(QueueConfig(n_readers=3))
    with MessageQueue.create_from_handle(queue.export_handle(), 1) as reader:
        with pytest.raises(QueueNotReady):
            queue.wait_until_ready(0)
        reader.wait_until_ready(PATIENCE_S)
        for number in range(14):
            queue.enqueue(number)
        queue.close()
        assert 14 == len(drained(reader)[0])
    (warning,) = warnings_of(caplog)
    assert "closed before ranks 0, 2 attached" in warning
    assert "14 messages for rank 0, 14 messages for rank 2" in warning


@pytest.mark.parametrize("how", ["nothing published", "read", "left", "waited"])
def test_close_that_leaves_nothing_behind_is_silent(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Nothing is logged where nobody misses anything."""
    queue, (reader,) = make_queue()
    if how == "nothing published":
        queue = MessageQueue(QueueConfig())
    else:
        queue.enqueue(1)
    if how == "left":
        reader.close()
    elif how != "nothing published":
        reader.dequeue(PATIENCE_S)
    queue.close(*([PATIENCE_S] if how == "waited" else []))
    assert [] == warnings_of(caplog)


# --- what a cut leaves ----------------------------------------------------------------------------


def test_the_reason_comes_before_the_mark(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that sees the closing mark of a writer that fails sees the reason too."""
    queue, (reader,) = make_queue()
    seen: list[str] = []

    class Ring:
        """The writer's ring, after each of whose steps the reader looks."""

        def __init__(self, ring: RingWriter) -> None:
            self._ring = ring

        def __getattr__(self, name: str) -> Callable[..., Any]:
            step = getattr(self._ring, name)

            def stepped(*arguments: Any) -> Any:
                done = step(*arguments)
                assert isinstance(reader._source.ring, RingReader)
                seen.append("closed" if reader._source.ring.is_closing else "open")
                seen.append(reader._source.ring.failure or "no reason")
                return done

            return stepped

    monkeypatch.setattr(queue._writer, "ring", Ring(queue._writer.ring))
    queue.close(error="no disk")
    states = list(zip(seen[::2], seen[1::2], strict=True))
    assert ("closed", "no disk") in states
    assert ("closed", "no reason") not in states


AFTER_A_READER_THAT_FOUND_NOBODY = """
import sys
from shmcast import *
try:
    MessageReader(Handle.from_json(sys.argv[1]), 0)
except WriterLost as error:
    kept = error
queue = MessageQueue(QueueConfig())
print(queue.export_handle().to_json(), flush=True)
queue.wait_until_ready(30)
raise RuntimeError("disk full")
"""


def test_an_end_that_was_never_made() -> None:
    """A reader whose constructor failed does not keep the exit from failing the other ends."""
    with MessageQueue(QueueConfig()) as closed:
        handle = closed.export_handle().to_json()
    program = [sys.executable, "-c", AFTER_A_READER_THAT_FOUND_NOBODY, handle]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        with MessageReader(Handle.from_json(process.stdout.readline().decode()), 0) as reader:
            reader.wait_until_ready(PATIENCE_S)
            _, errors = process.communicate(timeout=PATIENCE_S)
            with pytest.raises(WriterFailed, match="RuntimeError: disk full"):
                reader.dequeue(PATIENCE_S)
    assert b"AttributeError" not in errors
