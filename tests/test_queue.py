"""The two ends of a queue on one host: being ready, waiting, leaving, closing, and every option."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import logging
import math
import mmap
import os
import pickle
import queue as standard_queue
import random
import re
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import (
    PATIENCE_S,
    MakeQueue,
    StartChild,
    count_descriptors,
    enqueue_until,
    wait_for_descriptors,
    wait_until,
)

import shmcast
import shmcast.waiting
from shmcast import (
    AuthenticationError,
    ConfigError,
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
    ShmcastError,
    WriterLost,
)
from shmcast._ring import image_bytes
from shmcast.locks import LockFile
from shmcast.pickler import Pickler

#: Where a message goes that fits no chunk: into a memory file, or into the arena.
on_both_paths = pytest.mark.parametrize("arena_bytes", [0, 16 << 20])


def in_thread(function: Callable[..., Any], *arguments: Any) -> concurrent.futures.Future[Any]:
    """Call a function in a thread that no hang of it can keep this process from ending."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def call() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def await_that(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that nothing signals."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(0.001)


def seconds_until(error: type[ShmcastError], call: Callable[[], object]) -> float:
    """How long a call took that ended with this error."""
    start = time.monotonic()
    with pytest.raises(error):
        call()
    return time.monotonic() - start


def is_waiting(end: MessageQueue | MessageReader) -> bool:
    """Whether the end has polled or slept at least once for a message or for space."""
    return end.stats().waits > 0


def fill(queue: MessageQueue, *, first: int = 0) -> int:
    """Enqueue numbers until the ring is full; how many fitted."""
    for number in itertools.count(first):
        try:
            queue.enqueue(number, timeout=0)
        except QueueFull:
            return number - first
    raise AssertionError


def drain(reader: MessageReader) -> list[Any]:
    """Every message that is there now."""
    messages = []
    with contextlib.suppress(QueueEmpty):
        while True:
            messages.append(reader.dequeue(timeout=0))
    return messages


@pytest.fixture
def make_writer() -> Iterator[Callable[..., tuple[MessageQueue, Handle]]]:
    """A queue that no reader has attached to, and its handle."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[MessageQueue, Handle]:
            queue = ends.enter_context(MessageQueue(QueueConfig(**settings)))
            return queue, queue.export_handle()

        yield make


MakeWriter = Callable[..., tuple[MessageQueue, Handle]]


@pytest.fixture
def attach() -> Iterator[Callable[..., MessageReader]]:
    """A reader, not yet admitted, that is closed with the test."""
    with contextlib.ExitStack() as ends:
        yield lambda handle, rank=0: ends.enter_context(MessageReader(handle, rank))


Attach = Callable[..., MessageReader]


# --- being ready ----------------------------------------------------------------------------------


def test_ready_in_one_thread(make_writer: MakeWriter, attach: Attach) -> None:
    """Both ends in one thread get ready in whichever end waits, without help of the other."""
    for waits in ("writer", "reader", "both by messages"):
        queue, handle = make_writer(n_readers=2)
        readers = [attach(handle, rank) for rank in (0, 1)]
        if waits == "writer":
            queue.wait_until_ready(PATIENCE_S)
        elif waits == "reader":
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
        queue.enqueue("first")
        assert ["first", "first"] == [reader.dequeue(PATIENCE_S) for reader in readers]
        queue.wait_until_ready(0)


def test_ready_names_the_missing_ranks(make_writer: MakeWriter, attach: Attach) -> None:
    """A writer that is not ready in time names the missing ranks, in `ranks` and in the text."""
    queue, handle = make_writer(n_readers=4)
    with pytest.raises(QueueNotReady, match="ranks 0, 1, 2, 3 not attached") as raised:
        queue.wait_until_ready(0)
    assert (0, 1, 2, 3) == raised.value.ranks
    for rank in (1, 3):
        attach(handle, rank).wait_until_ready(PATIENCE_S)
    with pytest.raises(QueueNotReady, match="ranks 0, 2 not attached") as raised:
        queue.wait_until_ready(0.02)
    assert (0, 2) == raised.value.ranks
    attach(handle, 0).wait_until_ready(PATIENCE_S)
    with pytest.raises(QueueNotReady, match="rank 2 not attached") as raised:
        queue.wait_until_ready(0.02)
    assert (2,) == raised.value.ranks


def test_ready_reader_needs_its_writer(make_writer: MakeWriter, attach: Attach) -> None:
    """A reader that the writer does not answer is not ready in time, and can try again."""
    queue, handle = make_writer()
    serving, go_on = threading.Event(), threading.Event()

    class Blocker:
        def __reduce__(self) -> Any:
            serving.set()
            go_on.wait(PATIENCE_S)
            return int, ()

    busy = in_thread(queue.enqueue, Blocker())  # the writer's end is in use, so nobody serves
    assert serving.wait(PATIENCE_S)
    reader = attach(handle)
    with pytest.raises(QueueNotReady, match="rank 0 is not attached") as raised:
        reader.wait_until_ready(0.02)
    assert (0,) == raised.value.ranks
    with pytest.raises(QueueEmpty, match="rank 0 is not attached"):
        reader.dequeue(timeout=0.02)
    go_on.set()
    busy.result(PATIENCE_S)
    reader.wait_until_ready(PATIENCE_S)
    assert 0 == reader.dequeue(timeout=PATIENCE_S)


def claim_in_vain(pipe: Connection, handle: Handle) -> None:
    """Claim rank 0, say so, and send what comes of it."""
    with MessageReader(handle, 0) as reader:
        pipe.send("claimed")
        try:
            reader.wait_until_ready(PATIENCE_S)
        except ShmcastError as error:
            pipe.send((type(error), str(error)))


def test_ready_answers_everything(make_queue: MakeQueue, start_child: StartChild) -> None:
    """When all ranks are there, the writer still answers what has arrived before it returns."""
    queue, _ = make_queue()
    child = start_child(claim_in_vain, queue.export_handle())
    assert "claimed" == child.receive()
    queue.wait_until_ready(PATIENCE_S)
    expected = f"rank 0 is held by process {os.getpid()}, which is alive"
    assert (ProtocolError, expected) == child.receive()


def hold_rank(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach and stay until told; then leave."""
    with MessageReader(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send(os.getpid())
        pipe.recv()


def test_ready_after_a_loss(
    make_writer: MakeWriter,
    attach: Attach,
    start_child: StartChild,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A loss that wait_until_ready finds is logged and counted; the rank may be claimed."""
    queue, handle = make_writer(n_chunks=4)
    child = start_child(hold_rank, handle, 0)
    queue.wait_until_ready(PATIENCE_S)
    assert child.pid == child.receive()
    queue.enqueue("lost")
    child.kill()
    with caplog.at_level(logging.WARNING, "shmcast"):
        with pytest.raises(QueueNotReady, match="rank 0 not attached") as raised:
            queue.wait_until_ready(0.1)
        assert (0,) == raised.value.ranks
    assert any(f"rank 0 (pid {child.pid})" in message for message in caplog.messages)
    assert 1 == queue.stats().losses
    reader = attach(handle)
    queue.wait_until_ready(PATIENCE_S)
    queue.enqueue("found")
    assert "found" == reader.dequeue(PATIENCE_S)


def test_enqueue_before_the_first_attachment(make_writer: MakeWriter, attach: Attach) -> None:
    """Before anybody attaches the ring fills and enqueue waits; then the reader gets it all."""
    queue, handle = make_writer(n_readers=2, n_chunks=3)
    assert 3 == fill(queue)
    waiting = in_thread(queue.enqueue, 3)
    readers = [attach(handle, rank) for rank in (0, 1)]
    got = [in_thread(lambda r=r: [r.dequeue(PATIENCE_S) for _ in range(4)]) for r in readers]
    assert [[0, 1, 2, 3]] * 2 == [future.result(PATIENCE_S) for future in got]
    waiting.result(PATIENCE_S)


@on_both_paths
def test_late_first_attachment_gets_everything(
    make_writer: MakeWriter, attach: Attach, arena_bytes: int
) -> None:
    """A rank that attaches late gets every message from the first, also in files and blocks."""
    queue, handle = make_writer(n_readers=2, n_chunks=8, chunk_bytes=1024, arena_bytes=arena_bytes)
    sent = [bytes([number]) * (5000 if number % 2 else 50) for number in range(8)]
    early = attach(handle, 0)
    for message in sent[:4]:
        queue.enqueue(message)
    assert sent[:4] == [early.dequeue(PATIENCE_S) for _ in range(4)]
    for message in sent[4:]:
        queue.enqueue(message)
    late = attach(handle, 1)
    assert sent == [late.dequeue(PATIENCE_S) for _ in range(8)]
    assert sent[4:] == [early.dequeue(PATIENCE_S) for _ in range(4)]


@pytest.mark.usefixtures("many_descriptors")
def test_a_kept_part_does_not_keep_its_file(make_queue: MakeQueue) -> None:
    """A small buffer of a message in a memory file is the reader's own, and the file is freed."""

    def has_file() -> bool:
        return "memfd:shmcast-message" in Path("/proc/self/maps").read_text()

    queue, (reader,) = make_queue(arena_bytes=0, chunk_bytes=4096, oob_threshold_bytes=1000)
    contents = [bytearray(b"a" * 1000), bytearray(b"b" * 100_000)]
    queue.enqueue([pickle.PickleBuffer(content) for content in contents])
    small, large = reader.dequeue(PATIENCE_S)
    assert 1 == reader.stats().fallbacks
    assert contents == [bytes(small), bytes(large)]
    assert has_file()
    del large
    assert not has_file()
    memoryview(small)[0] = 7
    assert contents[0][1:] == bytes(small)[1:]


def test_many_files_kept_for_a_late_attachment(make_writer: MakeWriter, attach: Attach) -> None:
    """More kept files than fit a socket reach a late reader in order, and are given back."""
    queue, handle = make_writer(n_chunks=350, chunk_bytes=1024, arena_bytes=0)
    before = count_descriptors()
    for number in range(350):
        queue.enqueue(number.to_bytes(2) * 600)
    assert before + 350 == count_descriptors()
    reader = attach(handle)
    assert [number.to_bytes(2) * 600 for number in range(350)] == [
        reader.dequeue(PATIENCE_S) for _ in range(350)
    ]
    assert 350 == reader.stats().fallbacks == queue.stats().fallbacks
    reader.close()
    queue.close()
    wait_for_descriptors(before - 1)


@on_both_paths
def test_second_attachment_starts_now(
    make_queue: MakeQueue, attach: Attach, arena_bytes: int
) -> None:
    """A rank that attaches again gets what is published from then on, and nothing from before."""
    queue, (first,) = make_queue(n_chunks=4, chunk_bytes=1024, arena_bytes=arena_bytes)
    queue.enqueue("read")
    queue.enqueue("not read")
    queue.enqueue(b"not read, and large" * 100)
    assert "read" == first.dequeue(PATIENCE_S)
    first.close()
    second = attach(queue.export_handle())
    second.wait_until_ready(PATIENCE_S)
    with pytest.raises(QueueEmpty):
        second.dequeue(timeout=0)
    queue.enqueue(b"new and large" * 100)
    queue.enqueue("new")
    assert [b"new and large" * 100, "new"] == [second.dequeue(PATIENCE_S) for _ in range(2)]


def attach_again_and_again(pipe: Connection, handle: Handle) -> None:
    """Attach, take one message and leave, 200 times; send how many descriptors that left open."""
    before = count_descriptors()
    for number in range(200):
        with MessageReader(handle, 0) as reader:
            assert number == reader.dequeue(PATIENCE_S)
        pipe.send(count_descriptors() - before)


def test_attachments_without_end(make_writer: MakeWriter, start_child: StartChild) -> None:
    """A rank can be attached and left hundreds of times, and neither side keeps anything of it."""
    queue, handle = make_writer(n_chunks=2)
    child = start_child(attach_again_and_again, handle)
    before = count_descriptors()
    for number in range(200):
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(number)
        assert 0 == child.receive()
    assert before + 2 >= count_descriptors()


def write_and_read(pipe: Connection) -> None:
    """A writer whose reader is the other process, which is a writer too."""
    with MessageQueue(QueueConfig(n_chunks=2)) as queue:
        pipe.send(queue.export_handle())
        with MessageReader(pipe.recv(), 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            for number in range(20):
                queue.enqueue((os.getpid(), number))
                assert number == reader.dequeue(PATIENCE_S)[1]
            pipe.send("done")
            pipe.recv()


def test_two_writers_that_read_each_other(start_child: StartChild) -> None:
    """Two processes that each wait as the writer of a queue which the other reads get ready."""
    children = [start_child(write_and_read) for _ in range(2)]
    handles = [child.receive() for child in children]
    for child, handle in zip(children, reversed(handles), strict=True):
        child.pipe.send(handle)
    assert ["done", "done"] == [child.receive() for child in children]
    for child in children:
        child.pipe.send(None)


# --- claims ---------------------------------------------------------------------------------------


def test_claim_of_a_held_rank(
    make_writer: MakeWriter, attach: Attach, start_child: StartChild
) -> None:
    """A claim on a rank whose holder is alive is a ProtocolError with the holder's pid."""
    queue, handle = make_writer()
    child = start_child(hold_rank, handle, 0)
    queue.wait_until_ready(PATIENCE_S)
    child.receive()
    late = attach(handle)
    with pytest.raises(ProtocolError, match=f"rank 0 is held by process {child.pid}"):
        late.wait_until_ready(PATIENCE_S)
    child.pipe.send(None)
    child.join()


def test_claim_of_a_held_rank_when_the_writer_waits(make_queue: MakeQueue, attach: Attach) -> None:
    """A refusal that arrives while another end of the process waits is not lost."""
    queue, (reader,) = make_queue()
    late = attach(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(ProtocolError, match=f"rank 0 is held by process {os.getpid()}"):
            late.wait_until_ready(PATIENCE_S)
    queue.enqueue("for the holder")
    assert "for the holder" == reader.dequeue(PATIENCE_S)


def wrong(handle: Handle) -> Handle:
    return attrs.evolve(handle, token=handle.token.translate(str.maketrans("01", "10")))


def test_wrong_token(make_writer: MakeWriter, attach: Attach) -> None:
    """A claim with a wrong token is an AuthenticationError, and the rank stays free."""
    queue, handle = make_writer()
    stranger = attach(wrong(handle))
    with pytest.raises(AuthenticationError, match="token"):
        stranger.wait_until_ready(PATIENCE_S)
    attach(handle).wait_until_ready(PATIENCE_S)
    queue.wait_until_ready(0)


def test_wrong_token_when_the_writer_waits(make_writer: MakeWriter, attach: Attach) -> None:
    """A denial that arrives while another end of the process waits is not lost."""
    queue, handle = make_writer()
    stranger = attach(wrong(handle))
    with pytest.raises(QueueNotReady):
        queue.wait_until_ready(0.02)
    with pytest.raises(AuthenticationError, match="token"):
        stranger.dequeue(PATIENCE_S)


def test_attach_to_a_queue_that_is_gone(make_writer: MakeWriter) -> None:
    """Attaching to a queue that has closed is WriterLost at once, and says where none was found."""
    queue, handle = make_writer()
    queue.close()
    with pytest.raises(WriterLost, match=f"rank 0 found no writer at @{handle.local_address}"):
        MessageReader(handle, 0)


@pytest.mark.parametrize("rank", [-1, 2, 10**30, None, "0", 0.5, True])
def test_rank_that_is_none(make_writer: MakeWriter, rank: Any) -> None:
    """A rank that the queue has not is a ValueError that names it and those that there are."""
    _, handle = make_writer(n_readers=2)
    with pytest.raises(ValueError, match=r"rank = .* is not allowed; allowed is one of \(0, 1\)"):
        MessageReader(handle, rank)


@pytest.mark.parametrize("handle", [None, "text", ("a", 1), object()])
def test_handle_that_is_none(handle: Any) -> None:
    """What is no handle is a TypeError that shows it."""
    with pytest.raises(TypeError, match="allowed is a Handle"):
        MessageReader(handle, 0)


@pytest.mark.parametrize("config", [None, {}, {"n_readers": 1}, QueueConfig])
def test_config_that_is_none(config: Any) -> None:
    """What is no config is a TypeError that shows it."""
    with pytest.raises(TypeError, match="allowed is a QueueConfig"):
        MessageQueue(config)


@pytest.mark.usefixtures("only_in_calls")
def test_writer_closes_between_offer_and_answer(make_writer: MakeWriter, attach: Attach) -> None:
    """A reader that was offered the segment and not admitted gets QueueClosed."""
    queue, handle = make_writer()
    reader = attach(handle)
    queue.enqueue("never read")  # serves the claim
    queue.close()
    for _ in range(2):
        with pytest.raises(QueueClosed):
            reader.wait_until_ready(PATIENCE_S)


def test_other_ends_do_not_feel_a_failed_handshake(make_writer: MakeWriter, attach: Attach) -> None:
    """What fails in the handshake of one queue is no error of another queue's writer."""
    queue, handle = make_writer()
    attach(handle)
    queue.enqueue("never read")
    queue.close()
    other, handle = make_writer()
    with pytest.raises(QueueNotReady):
        other.wait_until_ready(0.02)
    assert "m" == round_trip(other, attach(handle), "m")


def round_trip(queue: MessageQueue, reader: MessageReader, message: Any) -> Any:
    """The message as the reader gets it."""
    queue.enqueue(message, timeout=PATIENCE_S)
    return reader.dequeue(timeout=PATIENCE_S)


def test_attach_while_the_writer_closes() -> None:
    """However attaching and closing meet, the reader gets WriterLost or QueueClosed, and soon."""
    for repetition in range(150):
        queue = MessageQueue(QueueConfig())
        handle = queue.export_handle()
        barrier = threading.Barrier(2)

        def close(queue: MessageQueue = queue, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(PATIENCE_S)
            queue.enqueue("serves the claim, if it is there by now")
            queue.close()

        closing = in_thread(close)
        barrier.wait(PATIENCE_S)
        reader = None
        try:
            reader = MessageReader(handle, 0)
            assert "serves the claim, if it is there by now" == reader.dequeue(PATIENCE_S)
            reader.dequeue(PATIENCE_S)
        except (WriterLost, QueueClosed):
            pass
        else:
            raise AssertionError(f"repetition {repetition}: no error")
        closing.result(PATIENCE_S)
        if reader is not None:
            reader.close()


# --- leaving --------------------------------------------------------------------------------------


def test_reader_leaves_while_the_writer_waits(make_queue: MakeQueue) -> None:
    """A writer that waits for a reader which leaves goes on, and raises and counts no loss."""
    queue, (stays, leaves) = make_queue(n_readers=2, n_chunks=2)
    assert 2 == fill(queue)
    assert [0, 1] == drain(stays)
    waiting = in_thread(queue.enqueue, 2)
    await_that(lambda: is_waiting(queue))
    leaves.close()
    waiting.result(PATIENCE_S)
    assert 2 == stays.dequeue(PATIENCE_S)
    assert (0, 0) == (queue.stats().losses, queue.stats().lag[1])


def test_last_reader_leaves(make_queue: MakeQueue, attach: Attach) -> None:
    """When the last reader has left, enqueue raises ReaderLost until one attaches again."""
    queue, readers = make_queue(n_readers=2, n_chunks=2)
    readers[0].close()
    queue.enqueue("for rank 1")
    readers[1].close()
    error = enqueue_until(queue, ReaderLost)
    assert isinstance(error, ReaderLost)
    assert (0, 1) == error.ranks
    assert "nobody is left" in str(error)
    published = queue.stats().messages
    with pytest.raises(ReaderLost):
        queue.enqueue("for nobody")
    assert published == queue.stats().messages
    assert 0 == queue.stats().losses
    back = attach(queue.export_handle(), 1)
    back.wait_until_ready(PATIENCE_S)
    assert "again" == round_trip(queue, back, "again")


def test_last_reader_leaves_while_the_writer_waits(make_queue: MakeQueue) -> None:
    """A writer that waits for the last reader, which leaves, publishes nothing: ReaderLost."""
    queue, (reader,) = make_queue(n_chunks=2)
    fill(queue)
    waiting = in_thread(queue.enqueue, "for nobody")
    await_that(lambda: is_waiting(queue))
    reader.close()
    with pytest.raises(ReaderLost, match="nobody is left"):
        waiting.result(PATIENCE_S)
    assert 2 == queue.stats().messages


def test_last_reader_leaves_an_evicting_writer(make_queue: MakeQueue, attach: Attach) -> None:
    """With "evict" a writer whose last reader leaves publishes what it had to the next one."""
    queue, (reader,) = make_queue(n_chunks=2, on_reader_loss="evict")
    fill(queue)
    waiting = in_thread(queue.enqueue, "for the next one")
    await_that(lambda: is_waiting(queue))
    reader.close()
    with attach(queue.export_handle()) as back:
        assert "for the next one" == back.dequeue(PATIENCE_S)
        waiting.result(PATIENCE_S)
    assert 0 == queue.stats().losses


@pytest.mark.usefixtures("only_in_calls")
def test_reader_leaves_before_it_is_admitted(make_writer: MakeWriter, attach: Attach) -> None:
    """A claim that is withdrawn at any step leaves the rank free, and its first messages there."""
    for step in range(3):
        queue, handle = make_writer()
        first = attach(handle)
        if step:
            queue.enqueue("0")  # serves the claim
        if step == 2:
            first._step()  # maps, and says so; the writer has not read it
        first.close()
        second = attach(handle)
        queue.enqueue("1")
        while not second._step():
            queue._writer.survey()
        assert (["0"] if step else []) + ["1"] == drain(second)


# --- timeouts -------------------------------------------------------------------------------------


def calls_that_wait(queue: MessageQueue, reader: MessageReader) -> list[Callable[..., Any]]:
    """Every call with a timeout, for ends that have nothing to do."""
    return [
        queue.wait_until_ready,
        reader.wait_until_ready,
        reader.dequeue,
        lambda timeout: queue.enqueue("m", timeout=timeout),
    ]


@pytest.mark.parametrize("timeout", [-1, -1e-9, -math.inf, math.nan])
def test_timeout_that_is_negative(make_queue: MakeQueue, timeout: float) -> None:
    """A timeout below 0 or that is no number is a ValueError, and nothing is done."""
    queue, (reader,) = make_queue()
    for call in calls_that_wait(queue, reader):
        with pytest.raises(ValueError, match=r"timeout = .* is not allowed"):
            call(timeout=timeout)
    assert 0 == queue.stats().messages


@pytest.mark.parametrize("timeout", ["1", b"1", [1], object()])
def test_timeout_that_is_no_number(make_queue: MakeQueue, timeout: Any) -> None:
    """A timeout that is no number at all is a TypeError, and nothing is done."""
    queue, (reader,) = make_queue()
    for call in calls_that_wait(queue, reader):
        with pytest.raises(TypeError):
            call(timeout=timeout)
    assert 0 == queue.stats().messages


@pytest.mark.parametrize("timeout", [0, 0.0, 1, math.inf, 1e300, None])
def test_timeout_that_is_not_needed(make_queue: MakeQueue, timeout: float | None) -> None:
    """With any timeout, also 0, a call that need not wait succeeds."""
    queue, (reader,) = make_queue()
    queue.wait_until_ready(timeout)
    reader.wait_until_ready(timeout)
    queue.enqueue("m", timeout)
    assert "m" == reader.dequeue(timeout)


@pytest.mark.parametrize("timeout", [None, math.inf, 1e300, 2 * PATIENCE_S])
def test_timeout_that_is_long(make_queue: MakeQueue, timeout: float | None) -> None:
    """With a long timeout or none, a call waits until there is something to do."""
    queue, (reader,) = make_queue(n_chunks=1)
    got = in_thread(reader.dequeue, timeout)
    await_that(lambda: is_waiting(reader))
    assert not got.done()
    queue.enqueue("first")
    assert "first" == got.result(PATIENCE_S)
    queue.enqueue("second")
    put = in_thread(queue.enqueue, "third", timeout)
    await_that(lambda: is_waiting(queue))
    assert not put.done()
    assert "second" == reader.dequeue(PATIENCE_S)
    put.result(PATIENCE_S)


@on_both_paths
@pytest.mark.parametrize("timeout", [0, 0.001, 0.05])
def test_timeout_loses_nothing(make_queue: MakeQueue, timeout: float, arena_bytes: int) -> None:
    """A timeout publishes nothing and takes nothing: the calls after it go on where they were."""
    queue, (reader,) = make_queue(n_chunks=2, chunk_bytes=1024, arena_bytes=arena_bytes)
    for number in range(5):
        with pytest.raises(QueueEmpty) as empty:
            reader.dequeue(timeout)
        assert isinstance(empty.value, TimeoutError | standard_queue.Empty)
        queue.enqueue((number, "a"))
        queue.enqueue(bytes([number]) * 2000)
        for message in ("too much", b"too much and large" * 100):
            with pytest.raises(QueueFull) as full:
                queue.enqueue(message, timeout)
            assert isinstance(full.value, TimeoutError | standard_queue.Full)
            assert (0,) == full.value.ranks
            assert f"rank 0 (pid {os.getpid()}) is 2 messages behind" in str(full.value)
            assert (1 if arena_bytes else 0) == queue.stats().blocks_in_use
        assert 2 * number + 2 == queue.stats().messages
        assert [(number, "a"), bytes([number]) * 2000] == drain(reader)


def test_timeout_ends_in_time(make_queue: MakeQueue) -> None:
    """A timeout is not over early, and not very late."""
    queue, (reader,) = make_queue(n_chunks=1)
    queue.enqueue("m")
    for call, error in ((lambda: queue.enqueue("n", 0.05), QueueFull), (reader.dequeue, None)):
        if error is None:
            assert "m" == call()
            call, error = lambda: reader.dequeue(0.05), QueueEmpty  # noqa: PLW2901
        start = time.monotonic()
        with pytest.raises(error):
            call()
        assert 0.05 <= time.monotonic() - start < PATIENCE_S


def test_timeout_covers_another_thread(make_queue: MakeQueue) -> None:
    """A timeout covers waiting for another thread of the same end, also 0, and loses nothing."""
    queue, (reader,) = make_queue(n_chunks=1)
    got = in_thread(reader.dequeue)
    await_that(lambda: is_waiting(reader))
    for timeout in (0, 0.02):
        with pytest.raises(QueueEmpty, match="another thread"):
            reader.dequeue(timeout)
        with pytest.raises(QueueNotReady, match="another thread"):
            reader.wait_until_ready(timeout)
    queue.enqueue("m")
    assert "m" == got.result(PATIENCE_S)
    queue.enqueue("n")
    put = in_thread(queue.enqueue, "o")
    await_that(lambda: is_waiting(queue))
    for timeout in (0, 0.02):
        with pytest.raises(QueueFull, match="another thread") as full:
            queue.enqueue("p", timeout)
        assert () == full.value.ranks
        with pytest.raises(QueueNotReady, match="another thread"):
            queue.wait_until_ready(timeout)
    assert ["n", "o"] == [reader.dequeue(PATIENCE_S) for _ in range(2)]
    put.result(PATIENCE_S)
    assert [] == drain(reader)


def test_timeout_between_the_files_of_two_readers(make_queue: MakeQueue) -> None:
    """A large message that reached only one reader's socket in time is not seen there."""
    queue, (quick, slow) = make_queue(n_readers=2, n_chunks=1000, chunk_bytes=1024, arena_bytes=0)
    sent = []
    for number in range(1000):
        message = number.to_bytes(2) * 600
        try:
            queue.enqueue(message, timeout=0.02)
        except QueueFull:
            break
        sent.append(message)
        assert message == quick.dequeue(PATIENCE_S)
    assert 0 < len(sent) < 1000, "the socket of the slow reader never was full"
    with pytest.raises(QueueFull):
        queue.enqueue(b"given up" * 1000, timeout=0)
    assert sent == drain(slow)
    for message in (b"after it" * 1000, b"short"):
        queue.enqueue(message, timeout=PATIENCE_S)
        assert [message] * 2 == [reader.dequeue(PATIENCE_S) for reader in (quick, slow)]
    assert len(sent) + 1 == queue.stats().fallbacks


# --- threads of one end ---------------------------------------------------------------------------


def test_threads_of_a_writer(make_queue: MakeQueue) -> None:
    """Messages of many threads of one writer all arrive once, those of each thread in order."""
    queue, readers = make_queue(n_readers=2, n_chunks=3, chunk_bytes=1024)

    def write(thread: int) -> None:
        for number in range(100):
            queue.enqueue((thread, number, b"x" * random.choice((1, 100, 2000))))

    writing = [in_thread(write, thread) for thread in range(4)]
    reading = [
        in_thread(lambda r=r: [r.dequeue(PATIENCE_S)[:2] for _ in range(400)]) for r in readers
    ]
    for future in writing:
        future.result(PATIENCE_S)
    first, second = (future.result(PATIENCE_S) for future in reading)
    assert first == second
    for thread in range(4):
        assert list(range(100)) == [number for by, number in first if by == thread]


def test_threads_of_a_reader(make_queue: MakeQueue) -> None:
    """Each message goes to exactly one of many threads of one reader, and to each in order."""
    queue, (reader, other) = make_queue(n_readers=2, n_chunks=3)
    got: list[list[int]] = [[] for _ in range(4)]

    def read(thread: int) -> None:
        for message in reader:
            got[thread].append(message)

    reading = [in_thread(read, thread) for thread in range(4)]
    alone = in_thread(lambda: list(other))
    for number in range(400):
        queue.enqueue(number)
    queue.close()
    for future in reading:
        future.result(PATIENCE_S)
    assert list(range(400)) == alone.result(PATIENCE_S)
    assert list(range(400)) == sorted(itertools.chain(*got))
    assert got == [sorted(part) for part in got]


# --- closing --------------------------------------------------------------------------------------


def test_close_ends_a_waiting_dequeue(make_queue: MakeQueue) -> None:
    """close() of a reader from another thread ends its dequeue with QueueClosed."""
    for repetition in range(50):
        _, (reader,) = make_queue()
        got = [in_thread(reader.dequeue) for _ in range(3)]
        if repetition % 2:
            await_that(lambda r=reader: is_waiting(r))
        reader.close()
        for future in got:
            with pytest.raises(QueueClosed):
                future.result(PATIENCE_S)


def test_close_ends_a_waiting_enqueue(make_queue: MakeQueue) -> None:
    """close() of a writer from another thread ends its enqueue with QueueClosed."""
    for repetition in range(50):
        queue, (reader,) = make_queue(n_chunks=1)
        queue.enqueue("m")
        put = [in_thread(queue.enqueue, "n") for _ in range(3)]
        if repetition % 2:
            await_that(lambda q=queue: is_waiting(q))
        queue.close()
        for future in put:
            with pytest.raises(QueueClosed):
                future.result(PATIENCE_S)
        assert ["m"] == list(reader)


def test_close_ends_a_waiting_handshake(make_writer: MakeWriter, attach: Attach) -> None:
    """close() from another thread ends wait_until_ready of either end with QueueClosed."""
    for repetition in range(20):
        queue, _ = make_writer()
        waiting = in_thread(queue.wait_until_ready)
        if repetition % 2:
            time.sleep(0.003)  # nothing tells from outside that it waits
        queue.close()
        with pytest.raises(QueueClosed):
            waiting.result(PATIENCE_S)


def test_close_ends_a_waiting_attachment(
    make_writer: MakeWriter, attach: Attach, start_child: StartChild
) -> None:
    """close() of a reader that is not admitted ends its waits with QueueClosed."""
    child = start_child(own_queue)
    handle = child.receive()
    os.kill(child.pid, signal.SIGSTOP)  # so that it serves nobody
    while "T" != Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0]:
        time.sleep(0.001)
    for call in ("wait_until_ready", "dequeue"):
        for repetition in range(10):
            reader = attach(handle)
            waiting = in_thread(getattr(reader, call))
            if repetition % 2:
                time.sleep(0.003)
            reader.close()
            with pytest.raises(QueueClosed):
                waiting.result(PATIENCE_S)


def own_queue(pipe: Connection) -> None:
    """A queue that is there until told to end."""
    with MessageQueue(QueueConfig()) as queue:
        pipe.send(queue.export_handle())
        pipe.recv()


def test_close_during_a_long_poll(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """close() ends a wait that is still polling, before the time for polling is over."""
    monkeypatch.setattr(shmcast.waiting, "cpus_available", lambda: 64.0)
    _, (reader,) = make_queue(spin_us=1_000_000)
    queue, _ = make_queue(n_chunks=1, spin_us=1_000_000)
    queue.enqueue("m")
    started = threading.Event()

    def call_and_time(call: Callable[[], Any]) -> float:
        started.set()
        return seconds_until(QueueClosed, call)

    for end, call in ((reader, reader.dequeue), (queue, lambda: queue.enqueue("n"))):
        started.clear()
        future = in_thread(call_and_time, call)
        assert started.wait(PATIENCE_S)
        end.close()
        assert future.result(PATIENCE_S) < 1.0


def enqueue_until_closed(queue: MessageQueue, barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE_S)
    while True:
        queue.enqueue(b"x" * random.choice((1, 2000)))
        queue.stats()
        queue.export_handle()
        repr(queue)


def dequeue_until_closed(reader: MessageReader, barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE_S)
    while True:
        reader.dequeue()
        reader.stats()
        repr(reader)


def test_close_at_the_same_time_as_enqueue(make_queue: MakeQueue) -> None:
    """A writer that is closed in the middle of anything raises QueueClosed, and nothing else."""
    for repetition in range(60):
        queue, (reader,) = make_queue(n_chunks=2, chunk_bytes=1024)
        barrier = threading.Barrier(4)
        calls = [in_thread(enqueue_until_closed, queue, barrier) for _ in range(2)]
        reads = in_thread(dequeue_until_closed, reader, barrier)
        barrier.wait(PATIENCE_S)
        if repetition % 2:
            time.sleep(random.random() / 500)
        queue.close()
        for future in (*calls, reads):
            with pytest.raises(QueueClosed):
                future.result(PATIENCE_S)


def test_close_at_the_same_time_as_dequeue(make_queue: MakeQueue) -> None:
    """A reader that is closed in the middle of anything raises QueueClosed, and nothing else."""
    for repetition in range(60):
        queue, (reader, other) = make_queue(n_readers=2, n_chunks=2, chunk_bytes=1024)
        barrier = threading.Barrier(5)
        calls = [in_thread(dequeue_until_closed, reader, barrier) for _ in range(2)]
        reads = in_thread(dequeue_until_closed, other, barrier)
        writes = in_thread(enqueue_until_closed, queue, barrier)
        barrier.wait(PATIENCE_S)
        if repetition % 2:
            time.sleep(random.random() / 500)
        reader.close()
        for future in calls:
            with pytest.raises(QueueClosed):
                future.result(PATIENCE_S)
        queue.close()
        for future in (reads, writes):
            with pytest.raises(QueueClosed):
                future.result(PATIENCE_S)


def test_close_twice_and_calls_after_it(make_queue: MakeQueue) -> None:
    """close() may be called again, `closed` says so, and every later call raises QueueClosed."""
    queue, (reader,) = make_queue()
    assert [False, False] == [queue.closed, reader.closed]
    for _ in range(2):
        reader.close()
    for call in (reader.dequeue, reader.wait_until_ready, reader.stats, lambda: next(iter(reader))):
        with pytest.raises(QueueClosed, match="closed"):
            call()
    for timeout in (0, 1, None):
        with pytest.raises(QueueClosed):
            reader.dequeue(timeout)
    for _ in range(2):
        queue.close()
    for call in (
        lambda: queue.enqueue(1),
        queue.wait_until_ready,
        queue.stats,
        queue.export_handle,
    ):
        with pytest.raises(QueueClosed, match="closed"):
            call()
    for timeout in (0, 1, None):
        with pytest.raises(QueueClosed):
            queue.enqueue(1, timeout)
    assert [True, True] == [queue.closed, reader.closed]
    assert 0 == reader.rank
    assert ["closed" in repr(end) for end in (queue, reader)] == [True, True]


def test_close_by_a_context_manager(make_writer: MakeWriter) -> None:
    """Leaving a `with` block closes the end, also with an exception, which passes through."""
    queue, handle = make_writer()
    with pytest.raises(KeyError), MessageReader(handle, 0) as reader:
        raise KeyError
    with queue as entered:
        assert entered is queue
    assert [True, True] == [queue.closed, reader.closed]


def test_close_leaves_what_was_published(make_queue: MakeQueue) -> None:
    """Readers drain what was published, in chunks and files, then get QueueClosed."""
    queue, readers = make_queue(n_readers=2, n_chunks=4, chunk_bytes=1024)
    sent = ["a", b"b" * 3000, np.arange(4), b"d" * 4000]
    for message in sent:
        queue.enqueue(message)
    queue.close()
    for reader in readers:
        assert str(sent) == str([reader.dequeue(PATIENCE_S) for _ in range(4)])
        for timeout in (None, 0, 1):
            with pytest.raises(QueueClosed, match="the writer has closed"):
                reader.dequeue(timeout)
        assert not reader.closed


def test_close_between_two_looks(make_queue: MakeQueue) -> None:
    """What was published after a reader's last look at the ring, and before the end, is read."""
    queue, (reader,) = make_queue()
    take, looks = reader._take, iter(("at the ring", "in the wait"))

    def look_too_early() -> None:
        if next(looks) == "in the wait":
            reader._take = take
            queue.enqueue("last")
            queue.close()

    reader._take = look_too_early
    assert "last" == reader.dequeue(PATIENCE_S)
    with pytest.raises(QueueClosed):
        reader.dequeue(PATIENCE_S)


def test_close_wakes_readers_that_wait(make_queue: MakeQueue) -> None:
    """Readers that wait when the writer closes get QueueClosed."""
    for repetition in range(30):
        queue, readers = make_queue(n_readers=2)
        got = [in_thread(reader.dequeue) for reader in readers]
        if repetition % 2:
            await_that(lambda rs=readers: all(map(is_waiting, rs)))
        queue.close()
        for future in got:
            with pytest.raises(QueueClosed, match="the writer has closed"):
                future.result(PATIENCE_S)


def test_iteration(make_queue: MakeQueue) -> None:
    """Iterating gives every message and ends when the writer has closed."""
    queue, (reader,) = make_queue()
    for number in range(5):
        queue.enqueue(number)
    queue.close()
    assert list(range(5)) == list(reader)
    assert [] == list(reader)


def test_iteration_of_a_reader_that_is_closed(make_queue: MakeQueue) -> None:
    """When the reader itself is closed, iterating raises QueueClosed: it did not see the end."""
    queue, (reader,) = make_queue()
    queue.enqueue("m")
    messages = iter(reader)
    assert "m" == next(messages)
    reader.close()
    with pytest.raises(QueueClosed):
        next(messages)


@contextlib.contextmanager
def handler_of(number: int, handle: Callable[[], object]) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        handle()

    before = signal.signal(number, on_signal)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_close_in_a_signal_handler(make_queue: MakeQueue, make_writer: MakeWriter) -> None:
    """A signal handler that closes the end which it interrupts ends the call: QueueClosed."""
    main = threading.get_ident()
    queue, (reader,) = make_queue(n_chunks=1)
    fill(queue)
    full, _ = make_queue(n_chunks=1)
    fill(full)
    alone, _ = make_writer()
    drain(reader)
    waits = reader.stats().waits, full.stats().waits
    cases: list[tuple[Any, Callable[[], Any], Callable[[], bool]]] = [
        (reader, reader.dequeue, lambda: reader.stats().waits > waits[0] + 2),
        (full, lambda: full.enqueue("m"), lambda: full.stats().waits > waits[1] + 2),
        (alone, alone.wait_until_ready, lambda: True),
    ]
    for end, call, is_there in cases:
        with handler_of(signal.SIGUSR1, end.close):

            def send(is_there: Callable[[], bool] = is_there) -> None:
                await_that(is_there)
                signal.pthread_kill(main, signal.SIGUSR1)

            sending = in_thread(send)
            with pytest.raises(QueueClosed):
                call()
            sending.result(PATIENCE_S)
        assert end.closed


def test_call_in_a_signal_handler(make_queue: MakeQueue) -> None:
    """A signal handler that calls the end which it interrupts gets a ShmcastError."""
    queue, (reader,) = make_queue(n_chunks=1)
    main, errors = threading.get_ident(), []

    def call() -> None:
        for function in (reader.dequeue, lambda: reader.dequeue(PATIENCE_S)):
            try:
                function()
            except ShmcastError as error:
                errors.append(type(error))

    def send() -> None:
        await_that(lambda: is_waiting(reader))
        signal.pthread_kill(main, signal.SIGUSR1)
        await_that(lambda: len(errors) == 2)
        queue.enqueue("m")

    with handler_of(signal.SIGUSR1, call):
        sending = in_thread(send)
        assert "m" == reader.dequeue(PATIENCE_S)
        sending.result(PATIENCE_S)
    assert [ShmcastError, ShmcastError] == errors


def close_where_a_lock_is_held(pipe: Connection, how: str) -> None:
    """Close one end of this process in the middle of making and closing another one."""

    class Cycle:
        def __init__(self) -> None:
            self.queue = MessageQueue(QueueConfig())
            self.cycle = self

    gc.disable()
    if how == "collected":
        Cycle()
        original = LockFile.__init__

        def collect(self: LockFile, key: tuple[int, int]) -> None:
            gc.collect()  # at any allocation it may come
            original(self, key)

        LockFile.__init__ = collect  # type: ignore[method-assign]
    else:
        first = MessageQueue(QueueConfig())
        original_call = LockFile._fcntl

        def interrupt(self: LockFile, command: int, kind: int, byte: int) -> bytes:
            signal.raise_signal(signal.SIGUSR1)  # at any instruction it may come
            return original_call(self, command, kind, byte)

        signal.signal(signal.SIGUSR1, lambda *_: first.close())
        LockFile._fcntl = interrupt  # type: ignore[method-assign]
    MessageQueue(QueueConfig()).close()
    pipe.send("done")


@pytest.mark.parametrize("how", ["collected", "signal handler"])
def test_close_in_the_middle_of_another_end(start_child: StartChild, how: str) -> None:
    """An end that is closed by a signal handler or the garbage collector waits for no other end."""
    assert "done" == start_child(close_where_a_lock_is_held, how).receive()


def count_threads() -> int:
    """How many threads this process has, also those that Python does not know of."""
    return len(list(Path("/proc/self/task").iterdir()))


def test_collected_ends_are_closed() -> None:
    """An end that is dropped without close() is closed: its descriptors are given back."""
    gc.collect()
    before = count_descriptors()
    queue = MessageQueue(QueueConfig())
    reader = MessageReader(queue.export_handle(), 0)
    queue.wait_until_ready(PATIENCE_S)
    queue.enqueue("m")
    queue.enqueue(b"m" * 3_000_000)
    assert "m" == reader.dequeue(PATIENCE_S)
    references = [weakref.ref(queue), weakref.ref(reader)]
    del queue
    gc.collect()
    assert b"m" * 3_000_000 == reader.dequeue(PATIENCE_S)
    with pytest.raises(QueueClosed, match="the writer has closed"):
        reader.dequeue(PATIENCE_S)
    del reader
    wait_for_descriptors(before)
    assert [None, None] == [reference() for reference in references]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # Python's own, for the sockets
def test_ends_collected_in_a_cycle() -> None:
    """Ends that are garbage in a reference cycle, as after an error, are closed without a word."""
    gc.collect()
    before = count_descriptors()
    for _ in range(20):
        queue = MessageQueue(QueueConfig())
        reader = MessageReader(queue.export_handle(), 0)
        assert "m" == round_trip(queue, reader, "m")
        cycle: list[Any] = [queue, reader]
        cycle.append(cycle)
        try:
            reader.dequeue(timeout=0)
        except QueueEmpty as error:  # its traceback refers to all that the call used
            cycle.append(error)
        del queue, reader, cycle
    wait_for_descriptors(before)


@pytest.mark.usefixtures("many_descriptors")
def test_200_queues_in_one_process() -> None:
    """200 queues need a fixed few descriptors and one thread for all of them, and give all back."""
    gc.collect()
    before, threads = count_descriptors(), count_threads()
    with contextlib.ExitStack() as ends:
        queues = [ends.enter_context(MessageQueue(QueueConfig())) for _ in range(200)]
        assert 5 * 200 + 2 >= count_descriptors() - before
        readers = [ends.enter_context(MessageReader(queue.export_handle(), 0)) for queue in queues]
        for number, (queue, reader) in enumerate(zip(queues, readers, strict=True)):
            assert number == round_trip(queue, reader, number)
        assert 12 * 200 >= count_descriptors() - before
        assert threads + 1 == count_threads()
    wait_for_descriptors(before)
    wait_until(lambda: threads == count_threads())  # the system clears it away a little later


def test_failed_creation_gives_back(make_writer: MakeWriter) -> None:
    """A queue or a reader that could not be made leaves no descriptor behind."""
    _, handle = make_writer()
    gc.collect()
    before = count_descriptors()
    for _ in range(3):
        with pytest.raises(ConfigError, match="n_chunks = 1048576"):
            MessageQueue(QueueConfig(chunk_bytes="1024 GiB", n_chunks=1 << 20))
        with pytest.raises(WriterLost):
            MessageReader(attrs.evolve(handle, local_address="shmcast-nobody"), 0)
    wait_for_descriptors(before)


def test_ends_are_not_pickled(make_queue: MakeQueue) -> None:
    """An end can't be pickled, and the error says what to send instead; the handle can."""
    queue, (reader,) = make_queue()
    for end, text in (
        (
            queue,
            r"send it the handle from export_handle\(\)\. To write there, make the queue there",
        ),
        (reader, "send the queue's handle and a rank instead"),
    ):
        with pytest.raises(TypeError, match=f"can't be pickled: .*{text}"):
            pickle.dumps(end)
        with pytest.raises(TypeError, match=text):
            queue.enqueue(end)
    assert queue.export_handle() == round_trip(queue, reader, queue.export_handle())


def test_calls_from_inside_a_call(make_queue: MakeQueue) -> None:
    """Calling an end from inside its own pickling or loading is a ShmcastError, and it goes on."""
    queue, (reader,) = make_queue()
    errors: list[type] = []

    class Reenters:
        def __reduce__(self) -> Any:
            for call in (queue.wait_until_ready, lambda: queue.enqueue(1, timeout=1)):
                try:
                    call()
                except ShmcastError as error:
                    errors.append(type(error))
            return reenter, ()

    loading.update(reader=reader, errors=errors)
    assert "loaded" == round_trip(queue, reader, Reenters())
    assert [ShmcastError] * 4 == errors
    assert 1 == queue.stats().messages


loading: dict[str, Any] = {}


def reenter() -> str:
    """What a test's message loads as: calls on the reader that loads it."""
    for call in (loading["reader"].dequeue, lambda: loading["reader"].dequeue(timeout=1)):
        try:
            call()
        except ShmcastError as error:
            loading["errors"].append(type(error))
    return "loaded"


def fail() -> None:
    """What a test's message loads as."""
    raise LookupError("while loading")


def test_failing_messages_cost_nothing(make_queue: MakeQueue) -> None:
    """What pickling or loading raises passes through, and the queue goes on."""
    import torch

    queue, (reader,) = make_queue(n_chunks=1)
    # Copied into a block while it is pickled.
    strided = torch.frombuffer(bytearray(4 << 20), dtype=torch.uint8)[::2]

    class Fails:
        def __init__(self, *, in_pickling: bool) -> None:
            self.in_pickling = in_pickling

        def __reduce__(self) -> Any:
            if self.in_pickling:
                raise ZeroDivisionError("while pickling")
            return fail, ()

    for number in range(3):
        with pytest.raises(ZeroDivisionError, match="while pickling"):
            queue.enqueue([number, strided, Fails(in_pickling=True)])
        assert (2 * number, 0) == (queue.stats().messages, queue.stats().blocks_in_use)
        queue.enqueue([number, strided, Fails(in_pickling=False)])
        with pytest.raises(LookupError, match="while loading"):
            reader.dequeue(PATIENCE_S)
        assert number == round_trip(queue, reader, number)
    assert 6 == reader.stats().messages
    queue.enqueue([strided])  # which looks at what was given up
    assert 1 == queue.stats().blocks_in_use


def test_an_error_of_loading_names_its_message(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What loading raises has a note with queue, rank and number; a missing class one more."""
    queue, readers = make_queue(n_readers=2)
    module = types.ModuleType("only_the_writers")
    module.Step = type("Step", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for message in ("first", module.Step(), module.Step()):
        queue.enqueue(message)
    del module.Step  # type: ignore[attr-defined]
    assert ["first"] * 2 == [reader.dequeue(PATIENCE_S) for reader in readers]
    for number, error in ((1, AttributeError), (2, ModuleNotFoundError)):
        for reader in readers:
            with pytest.raises(error) as failed:
                reader.dequeue(PATIENCE_S)
            which, how = failed.value.__notes__
            assert f"while loading message {number} of {reader!r}" == which
            assert "a module that both import" in how
        monkeypatch.undo()


# --- large and odd messages -----------------------------------------------------------------------


def size_of(message: Any, threshold_bytes: int = 1 << 20) -> int:
    """How large the image of a message is."""
    return image_bytes(*Pickler(threshold_bytes).dumps(message))


@on_both_paths
@pytest.mark.parametrize("n_chunks", [1, 2, 5])
def test_messages_larger_than_a_chunk(
    make_queue: MakeQueue, n_chunks: int, arena_bytes: int
) -> None:
    """Messages that fit no chunk arrive in order between those that do, in rings of any size."""
    queue, readers = make_queue(
        n_readers=2,
        n_chunks=n_chunks,
        chunk_bytes=1024,
        oob_threshold_bytes=512,
        arena_bytes=arena_bytes,
    )
    choice = random.Random(n_chunks)
    sizes = [choice.choice((1, 500, 600, 1100, 5000, 100_000)) for _ in range(60)]
    sent = [
        np.frombuffer(choice.randbytes(size), np.uint8) if size % 2 else choice.randbytes(size)
        for size in sizes
    ]

    def read(reader: MessageReader) -> list[bytes]:
        return [bytes(message) for message in reader]

    reading = [in_thread(read, reader) for reader in readers]
    for message in sent:
        queue.enqueue(message, timeout=PATIENCE_S)
    n_large = sum(size_of(message, 512) > 1024 for message in sent)
    assert 0 < n_large < 60
    expected_fallbacks = 0 if arena_bytes else n_large
    assert expected_fallbacks == queue.stats().fallbacks
    queue.close()
    assert [[bytes(message) for message in sent]] * 2 == [f.result(PATIENCE_S) for f in reading]
    assert [expected_fallbacks] * 2 == [reader.stats().fallbacks for reader in readers]


@on_both_paths
@pytest.mark.parametrize("chunk_bytes", ["1 KiB", "16 MiB"])
def test_more_buffers_than_16_bits(
    make_queue: MakeQueue, chunk_bytes: str, arena_bytes: int
) -> None:
    """More than 65,535 buffers in one message arrive, in a chunk, in a block and in a file."""
    queue, (reader,) = make_queue(
        n_chunks=1, chunk_bytes=chunk_bytes, oob_threshold_bytes=0, arena_bytes=arena_bytes
    )
    numbers = range(70_000)
    sent = [pickle.PickleBuffer(number.to_bytes(3)) for number in numbers]
    got = round_trip(queue, reader, sent)
    assert list(numbers) == [int.from_bytes(memoryview(part)) for part in got]
    assert 70_000 == queue.stats().oob_buffers == reader.stats().oob_buffers
    assert (chunk_bytes == "1 KiB" and not arena_bytes) == queue.stats().fallbacks
    assert (chunk_bytes == "1 KiB" and arena_bytes > 0) == queue.stats().blocks_in_use


def test_sizes_around_the_ring(make_queue: MakeQueue) -> None:
    """Messages of ever other sizes wrap the ring thousands of times, whole and in order."""
    queue, (reader,) = make_queue(n_chunks=3, chunk_bytes=1024, oob_threshold_bytes=300)
    choice = random.Random(11)
    for number in range(0, 9000, 3):
        burst = [
            (number + index, bytearray(choice.randbytes(choice.randrange(900))))
            for index in range(3)
        ]
        for message in burst:
            queue.enqueue(message, timeout=0)
        assert burst == [reader.dequeue(timeout=0) for _ in burst]
    assert 9000 == queue.stats().messages == reader.stats().messages


@pytest.mark.parametrize("receive", ["private", "copy"])
@on_both_paths
def test_received_is_the_readers_own(make_queue: MakeQueue, arena_bytes: int, receive: str) -> None:
    """What was received is unaffected by the writer, by its ring and by other readers."""
    queue, readers = make_queue(
        n_readers=2,
        n_chunks=1,
        chunk_bytes=8192,
        oob_threshold_bytes=100,
        arena_bytes=arena_bytes,
        receive=receive,
    )
    # In the stream, in the chunk, in a block with the image or else a file, in blocks or a file.
    for size in (50, 4000, 50_000, 100_000):
        array = np.full(size, 7, np.uint8)
        raw = bytearray(array)
        queue.enqueue([array, pickle.PickleBuffer(raw)])
        array[:] = 0
        raw[:] = bytes(size)
        first, second = (reader.dequeue(PATIENCE_S) for reader in readers)
        first[0][:] = 1
        for _ in range(2):
            queue.enqueue([array, pickle.PickleBuffer(raw)])
            for reader in readers:
                reader.dequeue(PATIENCE_S)
        assert np.full(size, 7, np.uint8).tobytes() == second[0].tobytes() == bytes(second[1])
        assert np.full(size, 1, np.uint8).tobytes() == first[0].tobytes()
    queue.close()
    for reader in readers:
        reader.close()
    assert np.full(size, 7, np.uint8).tobytes() == second[0].tobytes() == bytes(second[1])


@pytest.mark.parametrize("receive", ["private", "copy"])
@on_both_paths
def test_read_only_array_stays_read_only(
    make_queue: MakeQueue, arena_bytes: int, receive: str
) -> None:
    """A numpy array arrives writable or read-only as it was sent, on every path."""
    queue, (reader,) = make_queue(
        chunk_bytes=8192, oob_threshold_bytes=100, arena_bytes=arena_bytes, receive=receive
    )
    for size in (50, 4000, 50_000):
        for is_writable in (True, False):
            array = np.arange(size)
            array.flags.writeable = is_writable
            assert is_writable == round_trip(queue, reader, array).flags.writeable


# --- options --------------------------------------------------------------------------------------


def test_option_n_readers(make_queue: MakeQueue) -> None:
    """n_readers is how many ranks the queue waits for and reports on."""
    for n_readers in (1, 3, 9):
        queue, readers = make_queue(n_readers=n_readers, n_chunks=2)
        assert n_readers == queue.export_handle().n_readers == len(queue.stats().lag)
        assert list(range(n_readers)) == [reader.rank for reader in readers]
        queue.enqueue("m")
        queue.enqueue("n")
        for reader in readers[:-1]:
            reader.dequeue(PATIENCE_S)
        with pytest.raises(QueueFull, match=f"rank {n_readers - 1} ") as raised:
            queue.enqueue("o", timeout=0)
        assert (n_readers - 1,) == raised.value.ranks


def test_option_local_reader_ranks(make_queue: MakeQueue) -> None:
    """All ranks may be named as local ones; any other is a remote one and has an address."""
    queue, readers = make_queue(n_readers=2, local_reader_ranks=(1, 0))
    assert {0, 1} == set(queue.export_handle().local_reader_ranks)
    queue.enqueue("m")
    assert ["m", "m"] == [reader.dequeue(PATIENCE_S) for reader in readers]
    assert queue.export_handle().endpoint is None
    for ranks in ((0,), ()):
        config = QueueConfig(n_readers=2, local_reader_ranks=ranks, bind="tcp://127.0.0.1:0")
        with MessageQueue(config) as mixed:
            assert ranks == mixed.export_handle().local_reader_ranks
            assert mixed.export_handle().endpoint is not None


@on_both_paths
@pytest.mark.parametrize("chunk_bytes", [1024, 1500, 100_000])
def test_option_chunk_bytes(make_queue: MakeQueue, chunk_bytes: int, arena_bytes: int) -> None:
    """An image of up to chunk_bytes goes into a chunk, a larger one into a block or a file."""
    queue, (reader,) = make_queue(chunk_bytes=chunk_bytes, n_chunks=2, arena_bytes=arena_bytes)
    payload = bytes(chunk_bytes - (size_of(b"x" * chunk_bytes) - chunk_bytes))
    assert chunk_bytes == size_of(payload)
    for message, is_large in ((payload[1:], False), (payload, False), (payload + b"x", True)):
        assert message == round_trip(queue, reader, message)
        fallbacks = is_large and not arena_bytes
        assert fallbacks == queue.stats().fallbacks == reader.stats().fallbacks
        assert (is_large and arena_bytes > 0) == queue.stats().blocks_in_use


@pytest.mark.parametrize("n_chunks", [1, 3, 64])
def test_option_n_chunks(make_queue: MakeQueue, n_chunks: int) -> None:
    """Exactly n_chunks messages fit, however large; the next one is QueueFull."""
    queue, (reader,) = make_queue(n_chunks=n_chunks, chunk_bytes=1024)
    assert n_chunks == fill(queue)
    assert list(range(n_chunks)) == drain(reader)
    for _ in range(n_chunks):
        queue.enqueue(b"x" * 3000, timeout=0)
    with pytest.raises(QueueFull, match=f"is {n_chunks} messages behind"):
        queue.enqueue(b"x" * 3000, timeout=0)


def test_option_oob_threshold_bytes(make_queue: MakeQueue) -> None:
    """A buffer leaves the stream from oob_threshold_bytes on; 0 takes all but empty ones."""
    for threshold_bytes in (0, 1, 1000, 1 << 20):
        queue, (reader,) = make_queue(oob_threshold_bytes=threshold_bytes)
        edge = max(threshold_bytes, 1)
        counts = []
        for size in (0, edge - 1, edge, edge + 1):
            before = queue.stats()
            array = np.zeros(size, np.uint8)
            assert size == len(round_trip(queue, reader, array))
            after = queue.stats()
            counts.append(
                (after.oob_buffers - before.oob_buffers, after.oob_bytes - before.oob_bytes)
            )
        assert [(0, 0), (0, 0), (1, edge), (1, edge + 1)] == counts
        assert 2 == reader.stats().oob_buffers
        assert 2 * edge + 1 == reader.stats().oob_bytes


@on_both_paths
def test_option_oob_threshold_above_the_chunk(make_queue: MakeQueue, arena_bytes: int) -> None:
    """A threshold above chunk_bytes keeps a buffer in a stream that takes a block or a file."""
    queue, (reader,) = make_queue(
        chunk_bytes=1024, oob_threshold_bytes=1 << 40, arena_bytes=arena_bytes
    )
    array = np.arange(50_000)
    assert array.tobytes() == round_trip(queue, reader, array).tobytes()
    stats = queue.stats()
    expected = (0, 1, 0) if arena_bytes else (0, 0, 1)
    assert expected == (stats.oob_buffers, stats.blocks_in_use, stats.fallbacks)


def cpu_s(call: Callable[[], Any], error: type[Exception]) -> float:
    """For how long this thread runs in a call that times out."""
    start = time.thread_time()
    with pytest.raises(error):
        call()
    return time.thread_time() - start


def test_option_spin_us(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting end polls for spin_us, so it runs; with 0, or too few CPUs, it sleeps."""
    used = {}
    for name, spin_us, cpus in (("spin", 300_000, 64.0), ("sleep", 0, 64.0), ("few", 300_000, 1.0)):
        monkeypatch.setattr(shmcast.waiting, "cpus_available", lambda cpus=cpus: cpus)
        queue, (reader,) = make_queue(n_chunks=1, spin_us=spin_us)
        empty = cpu_s(lambda r=reader: r.dequeue(0.3), QueueEmpty)
        queue.enqueue("m")
        full = cpu_s(lambda q=queue: q.enqueue("n", 0.3), QueueFull)
        used[name] = empty, full
    for index in (0, 1):
        assert used["spin"][index] > 2 * used["sleep"][index], used
        assert used["spin"][index] > 2 * used["few"][index], used


@pytest.mark.parametrize("spin_us", [0, 30, 1_000_000])
def test_option_spin_us_does_not_stretch_timeouts(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, spin_us: int
) -> None:
    """A timeout that is shorter than spin_us ends a wait before the time for polling is over."""
    monkeypatch.setattr(shmcast.waiting, "cpus_available", lambda: 64.0)
    queue, (reader,) = make_queue(n_chunks=1, spin_us=spin_us)
    start = time.monotonic()
    with pytest.raises(QueueEmpty):
        reader.dequeue(timeout=0.01)
    assert time.monotonic() - start < 1.0
    queue.enqueue("m")
    start = time.monotonic()
    with pytest.raises(QueueFull):
        queue.enqueue("n", timeout=0.01)
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("on_reader_loss", ["raise", "evict"])
def test_option_on_reader_loss(
    make_writer: MakeWriter,
    attach: Attach,
    start_child: StartChild,
    caplog: pytest.LogCaptureFixture,
    on_reader_loss: str,
) -> None:
    """After a death the next call raises or, with "evict", logs; both go on without the reader."""
    queue, handle = make_writer(n_readers=2, n_chunks=4, on_reader_loss=on_reader_loss)
    child = start_child(hold_rank, handle, 1)
    reader = attach(handle, 0)
    queue.wait_until_ready(PATIENCE_S)
    child.receive()
    child.kill()
    with caplog.at_level(logging.WARNING, "shmcast"):
        if on_reader_loss == "raise":
            error = enqueue_until(queue, ReaderLost)
            assert isinstance(error, ReaderLost)
            assert (1,) == error.ranks
            assert f"rank 1 (pid {child.pid})" in str(error)
            published = queue.stats().messages
            assert published == len(drain(reader))
            assert all("its next call raises" in message for message in caplog.messages)
        for number in range(10):  # more than the ring holds
            assert number == round_trip(queue, reader, number)
    if on_reader_loss == "evict":
        said = f"rank 1 (pid {child.pid})"
        wait_until(lambda: any(said in message for message in caplog.messages))
    assert 1 == queue.stats().losses


def warnings_of(caplog: pytest.LogCaptureFixture, role: str) -> list[str]:
    """The warnings of an end, all of them from the logger of the package."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.split(".")[0] == "shmcast"
        and record.levelno == logging.WARNING
        and record.getMessage().startswith(role)
    ]


def test_option_warn_after_s(make_queue: MakeQueue, caplog: pytest.LogCaptureFixture) -> None:
    """A wait of warn_after_s is logged once per interval: role, ranks, pids, lag, elapsed time."""
    queue, readers = make_queue(n_readers=3, n_chunks=2, warn_after_s=0.05)
    with caplog.at_level(logging.WARNING, "shmcast"):
        fill(queue)
        assert [] == warnings_of(caplog, "")
        drain(readers[1])
        took_s = seconds_until(QueueFull, lambda: queue.enqueue("m", timeout=0.3))
        texts = warnings_of(caplog, "writer")
        assert 1 <= len(texts) <= took_s / 0.05
        for expected in (
            f"rank 0 (pid {os.getpid()}) is 2 messages behind",
            f"rank 2 (pid {os.getpid()}) is 2 messages behind",
            "publish message 2",
            "last seen",
        ):
            assert expected in texts[0]
        assert re.search(r"has waited [\d.]+ s", texts[0])
        assert "rank 1 " not in texts[0]
        took_s = seconds_until(QueueEmpty, lambda: readers[1].dequeue(timeout=0.3))
        texts = warnings_of(caplog, "reader")
        assert 1 <= len(texts) <= took_s / 0.05
        for expected in ("rank 1", "message 2", f"pid {os.getpid()}"):
            assert expected in texts[0]
        assert re.search(r"has waited [\d.]+ s", texts[0])


def test_option_warn_after_s_of_a_handshake(
    make_writer: MakeWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that waits for ranks to attach says which, once per interval."""
    queue, _ = make_writer(n_readers=2, warn_after_s=0.05)
    with caplog.at_level(logging.WARNING, "shmcast"):
        took_s = seconds_until(QueueNotReady, lambda: queue.wait_until_ready(0.3))
    texts = warnings_of(caplog, "writer")
    assert 1 <= len(texts) <= took_s / 0.05
    assert "ranks 0, 1" in texts[0]


def test_option_warn_after_s_is_long(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait that is shorter than warn_after_s is not logged."""
    queue, (reader,) = make_queue(n_chunks=1)
    with caplog.at_level(logging.WARNING, "shmcast"):
        with pytest.raises(QueueEmpty):
            reader.dequeue(timeout=0.2)
        fill(queue)
        with pytest.raises(QueueFull):
            queue.enqueue("m", timeout=0.2)
    assert [] == warnings_of(caplog, "")


# --- stats and repr -------------------------------------------------------------------------------


@on_both_paths
def test_stats(make_queue: MakeQueue, arena_bytes: int) -> None:
    """`stats()` of both ends count messages, bytes, buffers, files and lag alike, on every path."""
    queue, readers = make_queue(
        n_readers=2,
        n_chunks=4,
        chunk_bytes=4096,
        oob_threshold_bytes=1000,
        arena_bytes=arena_bytes,
    )
    sent = ["small", np.zeros(1000, np.uint8), b"x" * 5000, [np.zeros(3000, np.uint8)] * 2]
    n_bytes = 0
    for message in sent:
        stream, buffers = Pickler(1000).dumps(message)
        n_bytes += sum(map(len, stream)) + sum(buffer.nbytes for buffer in buffers)
        queue.enqueue(message)
    stats = queue.stats()
    assert (4, n_bytes, 2, 4000) == (
        stats.messages,
        stats.bytes,
        stats.oob_buffers,
        stats.oob_bytes,
    )
    block_bytes = -(-5000 // mmap.PAGESIZE) * mmap.PAGESIZE
    assert ((1, block_bytes, (1, 1), 0, 0) if arena_bytes else (0, 0, (0, 0), 1, 0)) == (
        stats.blocks_in_use,
        stats.arena_bytes_in_use,
        stats.blocks_held,
        stats.fallbacks,
        stats.losses,
    )
    assert (4, 4) == stats.lag
    for number in range(4):
        assert 4 - number == readers[0].stats().lag
        readers[0].dequeue(PATIENCE_S)
    assert (0, 4) == queue.stats().lag
    got = readers[0].stats()
    assert (4, n_bytes, 2, 4000, 0 if arena_bytes else 1, 0) == (
        got.messages,
        got.bytes,
        got.oob_buffers,
        got.oob_bytes,
        got.fallbacks,
        got.lag,
    )
    readers[1].dequeue(PATIENCE_S)
    queue.enqueue(b"x" * 5000)  # which looks at what was given up
    stats = queue.stats()
    assert ((2, (1, 2)) if arena_bytes else (0, (0, 0))) == (
        stats.blocks_in_use,
        stats.blocks_held,
    )


def test_stats_of_waits(make_queue: MakeQueue) -> None:
    """Waiting is counted, and how long it took is between nothing and the time that passed."""
    queue, (reader,) = make_queue(n_chunks=1)
    assert [(0, 0.0)] * 2 == [(s.waits, s.wait_s) for s in (queue.stats(), reader.stats())]
    start = time.monotonic()
    with pytest.raises(QueueEmpty):
        reader.dequeue(timeout=0.1)
    queue.enqueue("m")
    with pytest.raises(QueueFull):
        queue.enqueue("n", timeout=0.1)
    passed_s = time.monotonic() - start
    for stats in (queue.stats(), reader.stats()):
        assert stats.waits >= 1
        assert 0.05 < stats.wait_s < passed_s


def test_stats_are_a_frozen_snapshot(make_queue: MakeQueue) -> None:
    """A snapshot does not change with the queue and can't be changed."""
    queue, (reader,) = make_queue()
    for end in (queue, reader):
        stats = end.stats()
        queue.enqueue("m")
        reader.dequeue()
        assert 0 == stats.messages or stats.messages < end.stats().messages
        with pytest.raises(attrs.exceptions.FrozenInstanceError):
            stats.messages = 5  # type: ignore[misc]


def test_stats_never_wait(make_queue: MakeQueue, make_writer: MakeWriter, attach: Attach) -> None:
    """`stats()` and `export_handle()` do not wait for a call that another thread is in."""
    queue, (reader,) = make_queue(n_chunks=1)
    queue.enqueue("m")
    put = in_thread(queue.enqueue, "n")
    await_that(lambda: is_waiting(queue))
    assert 1 == queue.stats().messages
    assert queue.export_handle() == queue.export_handle()
    assert not put.done()
    assert ["m", "n"] == [reader.dequeue(PATIENCE_S) for _ in range(2)]
    put.result(PATIENCE_S)
    _, handle = make_writer()
    assert 0 == attach(handle).stats().messages  # also before it is admitted


def test_handle_of_a_queue(make_writer: MakeWriter, attach: Attach) -> None:
    """One handle serves every rank and every re-attachment, also after it went through JSON."""
    queue, handle = make_writer(n_readers=2)
    assert handle == queue.export_handle()
    again = Handle.from_json(handle.to_json())
    for number in range(3):
        readers = [attach(again if number % 2 else handle, rank) for rank in (0, 1)]
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(number)
        assert [number] * 2 == [reader.dequeue(PATIENCE_S) for reader in readers]
        for reader in readers:
            reader.close()


def test_repr_shows_no_secret(make_queue: MakeQueue) -> None:
    """`repr` and `str` of ends and handle name the queue and show no secret."""
    queue, (reader,) = make_queue(n_readers=1)
    handle = queue.export_handle()
    for shown in (queue, reader, handle):
        for text in (repr(shown), str(shown)):
            assert handle.local_address in text
            assert handle.token not in text


def test_create_from_handle(make_writer: MakeWriter) -> None:
    """`MessageQueue.create_from_handle` makes a MessageReader of the rank, and keywords work."""
    queue, handle = make_writer(n_readers=2)
    with MessageQueue.create_from_handle(handle, rank=1) as reader:
        assert MessageReader is type(reader)
        assert 1 == reader.rank
        reader.wait_until_ready(timeout=PATIENCE_S)
        queue.enqueue({"step": 1}, timeout=None)
        assert {"step": 1} == reader.dequeue(timeout=None)


@pytest.mark.usefixtures("only_in_calls")
def test_iteration_says_that_it_was_never_admitted() -> None:
    """Iterating over a reader that the writer closed before admitting it is no empty queue."""
    queue = MessageQueue(QueueConfig())
    with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
        queue.enqueue("not received")
        queue.close()
        with pytest.raises(QueueClosed, match="before it admitted rank 0"):
            list(reader)


@pytest.mark.parametrize("timeout", [np.float16(0.3), np.float32(0.3), np.int64(0)])
def test_a_timeout_of_low_precision(make_queue: MakeQueue, timeout: Any) -> None:
    """A numpy scalar is a number of seconds like any other, whatever the clock says."""
    _, (reader,) = make_queue()
    start = time.monotonic()
    with pytest.raises(QueueEmpty):
        reader.dequeue(timeout)
    assert time.monotonic() - start >= float(timeout) * 0.99


@pytest.mark.parametrize("timeout", ["1", b"1", [1], object()])
def test_a_timeout_that_is_no_number(make_queue: MakeQueue, timeout: Any) -> None:
    """What is no number is a TypeError that names the timeout, and nothing happens."""
    queue, (reader,) = make_queue()
    for call in (
        lambda: queue.enqueue(1, timeout),
        lambda: reader.dequeue(timeout),
        lambda: queue.wait_until_ready(timeout),
        lambda: reader.wait_until_ready(timeout),
    ):
        with pytest.raises(TypeError, match=r"timeout = .* is not allowed"):
            call()
    assert 0 == queue.stats().messages
