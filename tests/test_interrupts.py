"""A signal handler that raises, at any line: what the next calls find is in order."""

from __future__ import annotations

import contextlib
import dis
import functools
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
from pickle import PickleBuffer
from types import CodeType, FrameType
from typing import Any

import attrs
import pytest
import torch
from conftest import PATIENCE_S, MakeQueue, tracing, wait_for_remote_ends

import shmcast
import shmcast.writer as writer_module
from shmcast import (
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterFailed,
)
from shmcast._ring import EndLock
from shmcast.control import WriterControl
from shmcast.door import Watch
from shmcast.segment import Segment

#: So many interrupted calls are tried; each seed is printed when it fails.
ROUNDS = 400

# What the library's `Path.read_text` had open when it was interrupted closes itself, and warns.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


#: Whether an alarm is to raise now.
_armed: list[bool] = []


class Interrupt(BaseException):
    """What the handler raises: no ShmcastError and no Exception, like KeyboardInterrupt."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """An alarm raises Interrupt, wherever the program is, but for one place."""

    def handler(_: int, frame: FrameType | None) -> None:
        where = frame
        while where is not None:
            # The library's own `accept` loses an open descriptor if it is interrupted.
            if where.f_code is socket.socket.accept.__code__:
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                return
            where = where.f_back
        if _armed:  # one that comes too late is nobody's
            raise Interrupt

    previous = signal.signal(signal.SIGALRM, handler)
    before = memory_files()
    yield
    signal.signal(signal.SIGALRM, previous)
    gc.collect()  # here, where the warnings about what was cut off are expected
    wait_for_remote_ends()  # they close their own files
    gc.collect()
    for descriptor in memory_files() - before:  # other tests look for them
        os.close(descriptor)


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    with alarm():
        yield


def interrupted(call: Callable[[], object], delay_s: float) -> bool:
    """Run a call with an alarm set; whether that ended it. Afterwards no alarm is left."""
    try:
        _armed.append(True)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            _armed.clear()
    except Interrupt:
        return True
    return False


OURS = str(Path(shmcast.__file__).parent)


class AtPoint:
    """
    Raises Interrupt at a point of shmcast where Python may run a signal handler, once.

    That is after a call of compiled code, a jump back and the start of a function; the points of
    one call are counted from 1 on. Elsewhere, such as between the body of a `with` block and its
    `__exit__`, no handler runs.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self._previous: dict[FrameType, int] = {}  # where each frame was
        self.where = ""

    def ends(self, call: Callable[[], object]) -> bool:
        """Run the call; whether it was ended. If it was over before, there is no such point."""
        try:
            with tracing(self._trace):
                call()
        except Interrupt:
            return True
        finally:
            self._previous.clear()
        return False

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = True
        if event == "call" and frame.f_back is not None:
            self._previous.pop(frame.f_back, None)  # no handler runs when this one returns
        if event == "opcode":
            previous = self._previous.get(frame)
            self._previous[frame] = frame.f_lasti
            if previous is not None and is_point(code, previous, frame.f_lasti):
                self._left -= 1
                if self._left == 0:
                    self.where = f"{Path(code.co_filename).name}:{frame.f_lineno}"
                    raise Interrupt
        return self._trace


@functools.cache
def is_point(code: CodeType, previous: int, following: int) -> bool:
    """Whether a signal handler may run after an operation, and raises there what we raise next."""
    operation = dis.opname[code.co_code[previous]]
    if operation not in {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME"}:
        return False
    return handler_of(code, previous) == handler_of(code, following)


def handler_of(code: CodeType, offset: int) -> int | None:
    """Where the code goes on after an error here."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # not in the stub
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


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


@attrs.frozen
class Case:
    """
    A way that messages take.

    Attributes:
        new: makes message `index` for a queue.
        most_s: about how long its enqueue takes.
        settings: of the queue.
    """

    new: Callable[[MessageQueue, int], Any]
    most_s: float
    settings: dict[str, Any] = attrs.field(factory=dict)


def content(index: int, n_bytes: int) -> bytearray:
    """What a message with this number holds."""
    return bytearray(index.to_bytes(4, "little") * (n_bytes // 4))


def buffers(n_bytes: int, count: int = 1) -> Callable[[MessageQueue, int], Any]:
    return lambda _, index: [PickleBuffer(content(index, n_bytes)) for _ in range(count)]


def strided(_: MessageQueue, index: int) -> Any:
    """A tensor with gaps, which is copied into a block while it is pickled."""
    return [torch.frombuffer(content(index, 160_000), dtype=torch.int32)[::2], index]


def in_place(queue: MessageQueue, index: int) -> Any:
    """A tensor that lies in the queue's memory from the start."""
    tensor = queue.empty((20_000,), torch.int32)
    tensor.copy_(torch.frombuffer(content(index, 80_000), dtype=torch.int32))
    return [index, tensor]


CASES = {
    "small": Case(lambda _, index: [index, content(index, 10)], 30e-6),
    "oob": Case(buffers(3000), 60e-6),
    "file": Case(buffers(40_000), 300e-6, {"arena_bytes": 0}),
    "large image": Case(lambda _, index: [index, content(index, 40_000)], 200e-6),
    "block": Case(buffers(80_000), 300e-6),
    "several blocks": Case(buffers(80_000, 3), 600e-6),
    "too few blocks": Case(buffers(80_000, 3), 900e-6, {"arena_bytes": 200_000}),
    "strided": Case(strided, 300e-6),
    "empty": Case(in_place, 400e-6),
    "copied": Case(buffers(80_000), 300e-6, {"receive": "copy"}),
}
IN_BLOCKS = ["large image", "block", "several blocks", "too few blocks", "strided", "empty"]


def print_of(message: Any) -> Any:
    """What says all about a message, and keeps nothing of it."""
    if isinstance(message, list):
        return [print_of(part) for part in message]
    if isinstance(message, torch.Tensor):
        return tuple(message.shape), bytes(message.contiguous().numpy())
    if isinstance(message, PickleBuffer | memoryview | bytearray):
        return bytes(message)
    return message


def prints_of_drained(reader: MessageReader) -> list[Any]:
    return [print_of(message) for message in drained(reader)]


def ends_of(make_queue: MakeQueue, case: Case) -> tuple[MessageQueue, MessageReader]:
    settings = {"chunk_bytes": 16384, "oob_threshold_bytes": 1000, "n_chunks": 8, **case.settings}
    queue, (reader,) = make_queue(**settings)
    return queue, reader


def check_blocks(queue: MessageQueue, reader: MessageReader, hint: str) -> None:
    """When nothing is kept and one more message has gone through, no block is lost."""
    gc.collect(0)  # what an interrupted call's frames had
    queue.enqueue(PickleBuffer(content(1, 80_000)))
    in_use = queue.stats().blocks_in_use
    assert content(1, 80_000) == reader.dequeue(PATIENCE_S)
    assert (queue._config.arena_bytes > 0) == in_use, hint


@pytest.mark.parametrize("name", CASES)
def test_interrupted_enqueue(make_queue: MakeQueue, name: str) -> None:
    """An interrupted enqueue published its message or did not; every other one arrives whole."""
    case = CASES[name]
    queue, reader = ends_of(make_queue, case)
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    before = n_descriptors()
    for index in range(ROUNDS):
        sent = case.new(queue, index)
        expected = print_of(sent)
        delay_s = delays.uniform(1e-6, case.most_s)
        is_cut = interrupted(lambda sent=sent: queue.enqueue(sent), delay_s)
        queue.enqueue("next")
        arrived = prints_of_drained(reader)
        allowed = [[expected, "next"], ["next"]] if is_cut else [[expected, "next"]]
        assert arrived in allowed, f"seed {seed}, round {index}"
    del sent
    check_blocks(queue, reader, f"seed {seed}")
    # One that was being made when its call was interrupted may leak, but not one a round.
    assert n_descriptors() - before < ROUNDS // 4


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("look_pause_ns", [0, 10**15], ids=["looks", "looks at nothing"])
def test_enqueue_interrupted_at_every_point(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, name: str, look_pause_ns: int
) -> None:
    """Wherever an enqueue is cut off, its message arrives whole or not, and no block is lost."""
    # So that every enqueue has the same points.
    monkeypatch.setattr(writer_module, "_LOOK_PAUSE_NS", look_pause_ns)
    case = CASES[name]
    queue, reader = ends_of(make_queue, case)
    queue.enqueue(case.new(queue, 0))
    drained(reader)
    cut = 0
    for number in range(1, 3000):
        at_point = AtPoint(number)
        sent = case.new(queue, number)
        expected = print_of(sent)
        is_cut = at_point.ends(lambda sent=sent: queue.enqueue(sent))
        queue.enqueue("next")
        arrived = prints_of_drained(reader)
        allowed = [[expected, "next"], ["next"]] if is_cut else [[expected, "next"]]
        assert arrived in allowed, at_point.where
        del sent
        check_blocks(queue, reader, at_point.where)
        cut += is_cut
        if not is_cut:
            break
    assert cut == number - 1
    assert cut > 0 or (name == "small" and look_pause_ns)


def test_interrupted_twice(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises again while the enqueue that it cut off clears up loses no block."""
    queue, reader = ends_of(make_queue, CASES["block"])
    assign = queue._writer.arena.assign

    def assign_and_raise(*arguments: Any) -> None:
        assign(*arguments)
        raise Interrupt

    def interrupt() -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue._writer.arena, "assign", assign_and_raise)
        patch.setattr(queue._writer.arena, "settle", interrupt)
        with pytest.raises(Interrupt):
            queue.enqueue(buffers(80_000)(queue, 1))
    assert [] == drained(reader)
    queue.enqueue(buffers(80_000)(queue, 2))
    assert [[bytes(content(2, 80_000))]] == prints_of_drained(reader)
    check_blocks(queue, reader, "twice")


def test_interrupted_empty(make_queue: MakeQueue) -> None:
    """An interrupted `empty` takes no block for ever, wherever it was cut off."""
    queue, reader = ends_of(make_queue, CASES["empty"])
    cut = 0
    for number in range(1, 1000):
        at_point = AtPoint(number)
        is_cut = at_point.ends(lambda: queue.empty((20_000,), torch.int32))
        check_blocks(queue, reader, at_point.where)
        tensor = in_place(queue, number)
        queue.enqueue(tensor)
        assert [print_of(tensor)] == prints_of_drained(reader)
        del tensor
        cut += is_cut
        if not is_cut:
            break
    assert 10 < cut == number - 1
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    for _ in range(ROUNDS):
        interrupted(lambda: queue.empty((20_000,), torch.int32), delays.uniform(1e-6, 200e-6))
    check_blocks(queue, reader, f"seed {seed}")


@pytest.mark.parametrize("name", ["small", *IN_BLOCKS, "copied"])
def test_interrupted_dequeue(make_queue: MakeQueue, name: str) -> None:
    """An interrupted dequeue loses at most the message that it was about to return."""
    case = CASES[name]
    queue, reader = ends_of(make_queue, case)
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    for index in range(ROUNDS):
        queue.enqueue(["first", case.new(queue, index)])
        queue.enqueue(["second", index])
        first = print_of(["first", case.new(queue, index)])
        got: list[object] = []
        delay_s = delays.uniform(1e-6, 20e-6 if name == "small" else 100e-6)
        interrupted(lambda got=got: got.append(print_of(reader.dequeue())), delay_s)
        got += prints_of_drained(reader)
        allowed = [[first, ["second", index]], [["second", index]]]
        assert got in allowed, f"seed {seed}, round {index}"
        assert 0 == reader.stats().lag
    if name != "too few blocks":  # a file counts when it was read
        assert queue.stats().bytes == reader.stats().bytes
    check_blocks(queue, reader, f"seed {seed}")


@pytest.mark.parametrize("name", [*IN_BLOCKS, "file", "copied"])
def test_dequeue_interrupted_at_every_point(make_queue: MakeQueue, name: str) -> None:
    """Wherever a dequeue is cut off, its message comes whole or is lost, and no block is."""
    case = CASES[name]
    queue, reader = ends_of(make_queue, case)
    for number in range(1, 1000):
        at_point = AtPoint(number)
        queue.enqueue(["first", case.new(queue, number)])
        queue.enqueue(["second", number])
        first = print_of(["first", case.new(queue, number)])
        got: list[object] = []
        is_cut = at_point.ends(lambda got=got: got.append(print_of(reader.dequeue(PATIENCE_S))))
        got += prints_of_drained(reader)
        allowed = [[first, ["second", number]]]
        if is_cut:
            allowed.append([["second", number]])
        assert got in allowed, at_point.where
        assert 0 == reader.stats().lag
        check_blocks(queue, reader, at_point.where)
        if not is_cut:
            break
    assert number > 1
    assert not is_cut


def test_interrupted_close() -> None:
    """A close that was interrupted is finished by the next one; nothing stays open or waits."""
    seed = random.randrange(2**32)
    delays = random.Random(seed)
    before = n_descriptors()
    for index in range(ROUNDS // 4):
        queue = MessageQueue(QueueConfig(chunk_bytes=4096, n_chunks=2, oob_threshold_bytes=1000))
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
        queue.enqueue(PickleBuffer(content(index, 80_000)))
        kept = reader.dequeue(PATIENCE_S)
        kept[80:84] = b"mine"
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
        own = content(index, 80_000)
        own[80:84] = b"mine"
        assert own == kept
        del kept
    # A descriptor that was between two Python lines may leak, but not one a round.
    assert n_descriptors() - before < ROUNDS // 16, f"seed {seed}"


@pytest.mark.parametrize("is_writer", [False, True], ids=["reader", "writer"])
def test_close_interrupted_at_every_point(is_writer: bool) -> None:
    """Wherever a close is cut off, the next one finishes it: nothing stays held or stays open."""
    before = n_descriptors()
    is_cut = False
    for number in range(1, 1000):
        queue = MessageQueue(QueueConfig(chunk_bytes=4096, n_chunks=2, oob_threshold_bytes=1000))
        reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
        reader.wait_until_ready(PATIENCE_S)
        queue.enqueue(PickleBuffer(content(number, 80_000)))
        kept = reader.dequeue(PATIENCE_S)
        first, second = (queue, reader) if is_writer else (reader, queue)
        at_point = AtPoint(number)
        is_cut = at_point.ends(first.close)
        first.close()
        assert not hasattr(first, "_ring"), at_point.where
        second.close()
        assert content(number, 80_000) == kept
        del kept, first, second, queue, reader
        if not is_cut:
            break
    assert number > 1
    assert not is_cut
    gc.collect()
    # One that was between two Python lines may leak, but not one a round.
    assert n_descriptors() - before < number // 4


@pytest.mark.parametrize("is_writer", [False, True], ids=["reader", "writer"])
def test_failing_close_interrupted_at_every_point(is_writer: bool) -> None:
    """Wherever a close with an error is cut off, the other side sees no end without the error."""
    is_cut = False
    for number in range(1, 1000):
        with (
            MessageQueue(QueueConfig(n_readers=2)) as queue,
            MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
        ):
            reader.wait_until_ready(PATIENCE_S)
            first = queue if is_writer else reader
            at_point = AtPoint(number)
            is_cut = at_point.ends(lambda first=first: first.close(error="no disk"))
            if is_writer:
                with pytest.raises((WriterFailed, QueueEmpty)):
                    reader.dequeue(0)
            else:
                with queue._lock:  # which the door thread may have before, and then has taken note
                    writer = queue._writer
                    if writer.ring.has_left(0):
                        assert "no disk" == writer.control.failure_of(writer.control.holders[0])
            first.close(error="no disk")
            notice = functools.partial(reader.dequeue if is_writer else queue.enqueue, timeout=0)
            time.sleep(0.011)  # from then on an enqueue looks around
            with pytest.raises(WriterFailed if is_writer else ReaderLost, match="no disk"):
                notice(*[] if is_writer else [1])
        if not is_cut:
            break
    assert number > 10
    assert not is_cut


@pytest.mark.parametrize("is_read", [False, True], ids=["times out", "all is read"])
def test_close_that_waits_interrupted_at_every_point(make_queue: MakeQueue, is_read: bool) -> None:
    """Wherever a close that waits is cut off, the next one closes, and nothing was lost."""
    for number in range(1, 1000):
        queue, (reader,) = make_queue(chunk_bytes=4096, n_chunks=2)
        queue.enqueue(number)
        got = [reader.dequeue(PATIENCE_S)] if is_read else []
        at_point = AtPoint(number)
        with contextlib.suppress(QueueFull):
            at_point.ends(lambda queue=queue: queue.close(timeout=0.001))
        queue.close()
        assert not hasattr(queue, "_ring"), at_point.where
        assert [number] == [*got, *reader], at_point.where
        reader.close()
        if not at_point.where:
            break
    assert number > 10
    assert not at_point.where


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

    lock = EndLock("writer", lambda: None)
    with pytest.raises(Interrupt):
        lock.close(finish)
    for _ in range(3):
        lock.close(finish)
    assert [0, 1] == calls


def test_a_loss_is_reported_later(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss that an interrupted call found is raised by the next one."""
    queue, _ = make_queue(n_readers=2)
    monkeypatch.setattr(Watch, "serve", lambda *_: None)  # the call finds it, not the door thread
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
    leaver._source.ring.leave()
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


@pytest.mark.parametrize(
    "call",
    [
        "shmcast.segment._Budget.spend",
        "shmcast.control._receive",
        "shmcast.control.WriterControl._take_frames",
    ],
)
def test_a_handler_s_own_oserror(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The TimeoutError that a signal handler raises ends the call, wherever it comes."""

    def alarm_comes(*_: object) -> None:
        raise TimeoutError("of the handler")

    monkeypatch.setattr("shmcast.door.Watch.watch", lambda *_: None)  # in the calls, not beside
    with MessageQueue(QueueConfig(arena_bytes=0)) as queue:
        reader = MessageReader(queue.export_handle(), 0)
        with reader, monkeypatch.context() as patch:
            if call != "shmcast.control.WriterControl._take_frames":
                while not reader._step():
                    queue._writer.survey()
            patch.setattr(call, alarm_comes)
            message = PickleBuffer(bytearray(10_000_000))
            use = {
                "shmcast.segment._Budget.spend": lambda: queue.enqueue(message),
                "shmcast.control._receive": lambda: reader.dequeue(1),
                "shmcast.control.WriterControl._take_frames": lambda: queue.wait_until_ready(1),
            }
            with pytest.raises(TimeoutError, match="of the handler"):
                use[call]()
