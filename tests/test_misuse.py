"""Strangers, fake peers, damaged memory, scarce resources: a clear error, and the rest goes on."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import resource
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest
from conftest import PATIENCE_S, MakeQueue, StartChild, answer_only_in_calls

import shmcast
import shmcast.attachment as attachment_module
import shmcast.control as control_module
import shmcast.segment as segment_module
import shmcast.writer as writer_module
from shmcast import (
    AuthenticationError,
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ShmcastError,
    WriterLost,
)
from shmcast.handle import TOKEN_BYTES
from shmcast.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

_FRAME = struct.Struct("=8sIIQ")
_MAGIC = b"shmcast\x01"
_CLAIM, _SEGMENT, _MAPPED, _ADMISSION, _FILE = 1, 2, 3, 4, 5
#: Does not fit a chunk of the small queues here: it takes a block, or else a memory file.
LARGE_BYTES = 100_000


def frame(kind: int, *, rank: int = 0, number: int = 0, body: bytes = b"") -> bytes:
    """A frame as it travels."""
    return _FRAME.pack(_MAGIC, kind, rank, number) + body


def open_connection(handle: Handle) -> socket.socket:
    """A connection to the writer that has sent nothing."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect("\0" + handle.local_address)
    return connection


def wait_for_the_end(connection: socket.socket) -> None:
    """Receive until the other side closes."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(2048):
            pass


def use(queue: MessageQueue, readers: list[MessageReader]) -> None:
    """Send a few messages of both kinds and receive them."""
    for message in (1, bytes(LARGE_BYTES), "three"):
        queue.enqueue(message, PATIENCE_S)
        for reader in readers:
            assert message == reader.dequeue(PATIENCE_S)


# --- strangers at the writer's socket -------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="text"),
        pytest.param(bytes(24), id="zeros"),
        pytest.param(b"x" * 60_000, id="long"),
        pytest.param(frame(_CLAIM)[:-3], id="truncated"),
        pytest.param(b"shmcast\x02" + frame(_CLAIM)[8:], id="another version"),
        pytest.param(frame(_CLAIM, body=b"wrong token"), id="wrong token"),
        pytest.param(frame(_MAPPED, number=1), id="out of turn"),
    ],
)
def test_garbage_while_the_queue_works(make_queue: MakeQueue, data: bytes) -> None:
    """Garbage from a stranger ends its connection and disturbs no message."""
    queue, readers = make_queue(n_readers=2, n_chunks=4, chunk_bytes=4096)
    with open_connection(queue.export_handle()) as stranger:
        stranger.send(data)
        queue.wait_until_ready(PATIENCE_S)
        wait_for_the_end(stranger)
    use(queue, readers)


def test_flood_of_garbage(make_queue: MakeQueue) -> None:
    """A connection that sends without end can't keep the writer in its socket."""
    queue, readers = make_queue(n_chunks=4, chunk_bytes=4096)
    with open_connection(queue.export_handle()) as stranger:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # it is full, or was closed
            while True:
                stranger.send(frame(_CLAIM, body=b"x" * 900))
        queue.wait_until_ready(PATIENCE_S)
        use(queue, readers)


def connect_in_silence(pipe: Connection, handle: Handle, n_connections: int) -> None:
    """Open this many connections, say nothing, and keep them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    connections = []
    for _ in range(n_connections):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connections.append(stranger)
        stranger.connect("\0" + handle.local_address)  # waits while the backlog is full
    pipe.send("connected")
    signal.pause()


def n_pidfds() -> int:
    """How many descriptors of processes this process has."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(str(path.readlink()))
    return links.count("anon_inode:[pidfd]")


def receive_one(pipe: Connection, handle: Handle) -> None:
    """Send back one message."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        pipe.send("claimed")
        pipe.send(reader.dequeue(PATIENCE_S))


def test_silent_connections(start_child: StartChild, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand connections that say nothing do not keep a real reader from attaching."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue:
        handle = queue.export_handle()
        before = n_pidfds()
        strangers = start_child(connect_in_silence, handle, 1000, method="forkserver")
        with contextlib.suppress(QueueNotReady):
            queue.wait_until_ready(0.05)
        reader = start_child(receive_one, handle, method="forkserver")
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("arrives", PATIENCE_S)
        assert ["claimed", "arrives"] == [reader.receive(), reader.receive()]
        while not strangers.pipe.poll(0):
            with contextlib.suppress(QueueNotReady):  # the reader has left
                queue.wait_until_ready(0.001)
        assert "connected" == strangers.receive()
        monkeypatch.setattr(control_module, "_SILENCE_S", 0.0)
        deadline = time.monotonic() + PATIENCE_S
        while n_pidfds() > before:  # the writer has one for every connection
            with contextlib.suppress(QueueNotReady):
                queue.wait_until_ready(0.001)
            assert time.monotonic() < deadline


def test_silence_is_ended(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing is closed when its time is over, by a call of the writer."""
    queue, readers = make_queue(n_chunks=4, chunk_bytes=4096)
    with open_connection(queue.export_handle()) as stranger:
        queue.wait_until_ready(PATIENCE_S)
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        monkeypatch.setattr(control_module, "_SILENCE_S", 0.0)
        queue.wait_until_ready(PATIENCE_S)
        stranger.setblocking(True)
        wait_for_the_end(stranger)
    use(queue, readers)


def test_wrong_token(make_queue: MakeQueue) -> None:
    """A reader with a handle whose token is not the queue's is denied, and the rank stays free."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue:
        handle = attrs.evolve(queue.export_handle(), token=secrets.token_hex(TOKEN_BYTES))
        with (
            MessageQueue.create_from_handle(handle, 0) as stranger,
            pytest.raises(AuthenticationError, match="token"),
        ):
            stranger.wait_until_ready(PATIENCE_S)
        with MessageQueue.create_from_handle(queue.export_handle(), 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            use(queue, [reader])


def test_refusal_during_anothers_wait(make_queue: MakeQueue) -> None:
    """A refusal that arrives while another end waits is raised by the refused reader's calls."""
    with MessageQueue(QueueConfig(n_readers=2, n_chunks=4, chunk_bytes=4096)) as queue:
        handle = queue.export_handle()
        with (
            MessageQueue.create_from_handle(handle, 0) as reader,
            MessageQueue.create_from_handle(handle, 0) as second,
        ):
            with pytest.raises(QueueNotReady):
                queue.wait_until_ready(0.02)
            reader.wait_until_ready(PATIENCE_S)
            for _ in range(2):
                with pytest.raises(ProtocolError, match=f"process {os.getpid()}"):
                    second.wait_until_ready(PATIENCE_S)


def test_failure_of_another_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that can't map the segment says so itself, and no other end's call does."""

    def refuse(*descriptors: int) -> None:
        for descriptor in descriptors:  # it owns them, also when it fails
            os.close(descriptor)
        raise OSError(12, "Cannot allocate memory")

    with (
        MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        monkeypatch.setattr(segment_module.Segment, "attach", refuse)
        with pytest.raises(QueueNotReady):
            queue.wait_until_ready(0.02)
        for _ in range(2):
            with pytest.raises(OSError, match="Cannot allocate memory"):
                reader.wait_until_ready(PATIENCE_S)


def become_nobody() -> None:
    """Give up all rights of root in this process."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def connect_as_another_user(pipe: Connection, handle: Handle) -> None:
    """Show the right token as another user, and report what comes back."""
    become_nobody()
    with open_connection(handle) as connection:
        with contextlib.suppress(OSError):
            connection.send(frame(_CLAIM, body=handle.token.encode()))
        pipe.send("claimed")
        try:
            pipe.send(connection.recv(2048))
        except ConnectionError:
            pipe.send(b"")
    try:
        MessageQueue.create_from_handle(handle, 0)
    except AuthenticationError as error:
        pipe.send(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user(start_child: StartChild) -> None:
    """Another user gets nothing from the writer, even with the token, and its reader says why."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue:
        handle = queue.export_handle()
        child = start_child(connect_as_another_user, handle, method="forkserver")
        assert "claimed" == child.receive()
        with pytest.raises(QueueNotReady):
            queue.wait_until_ready(0.02)
        assert b"" == child.receive()
        assert f"belongs to user {os.geteuid()}, not to 65534" in child.receive()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            use(queue, [reader])


# --- a fake writer --------------------------------------------------------------------------------


class FakeWriter:
    """Listens at an address of its own and answers the first claim as a test tells it."""

    def __init__(self) -> None:
        self.address = f"shmcast-test-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + self.address)
        self.listener.listen(1)
        self.files: list[int] = []
        self.handle = Handle(
            endpoint=None,
            n_readers=1,
            local_reader_ranks=(0,),
            local_address=self.address,
            token="0" * 2 * TOKEN_BYTES,
        )

    def answer(self, *answers: tuple[bytes, list[int]]) -> socket.socket:
        """Accept the reader and send it these frames with these files."""
        connection, _ = self.listener.accept()
        for data, files in answers:
            socket.send_fds(connection, [data], files)
        return connection

    def memory_file(self, content: bytes, size_bytes: int, seals: int) -> int:
        """A memory file that starts with this content."""
        file = segment_module.new_memory_file("shmcast-test", size_bytes)
        os.pwrite(file, content, 0)
        segment_module.add_seals(file, seals)
        self.files.append(file)
        return file

    def segment(
        self, header: bytes | None = None, seals: int = segment_module.FIXED_SIZE
    ) -> list[int]:
        """The three files of a small segment."""
        layout = Layout.of(QueueConfig(n_chunks=1, chunk_bytes=4096, arena_bytes=ARENA_BYTES))
        data = self.memory_file(header or layout.header(), layout.data_bytes, seals)
        control = self.memory_file(b"", layout.control_bytes, seals)
        return [data, control, self.memory_file(b"", layout.locks_bytes, seals)]


@pytest.fixture
def fake() -> Iterator[FakeWriter]:
    """A fake writer, which takes its files with it."""
    fake = FakeWriter()
    yield fake
    fake.listener.close()
    for file in fake.files:
        os.close(file)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="text"),
        pytest.param(bytes(24), id="zeros"),
        pytest.param(b"x" * 60_000, id="long"),
        pytest.param(frame(_ADMISSION), id="admission without a segment"),
        pytest.param(frame(_SEGMENT), id="segment without files"),
        pytest.param(frame(77), id="unknown kind"),
    ],
)
def test_nonsense_from_a_fake_writer(fake: FakeWriter, data: bytes) -> None:
    """A reader that meets nonsense at the address says so, and says it again."""
    with MessageQueue.create_from_handle(fake.handle, 0) as reader, fake.answer((data, [])):
        for _ in range(2):
            with pytest.raises(ProtocolError):
                reader.dequeue(PATIENCE_S)


def test_fake_writer_hangs_up(fake: FakeWriter) -> None:
    """A fake writer that hangs up at once is a lost writer."""
    with MessageQueue.create_from_handle(fake.handle, 0) as reader:
        fake.answer().close()
        with pytest.raises(WriterLost):
            reader.wait_until_ready(PATIENCE_S)


def test_fake_writer_says_nothing(fake: FakeWriter) -> None:
    """A fake writer that says nothing keeps a reader no longer than its timeout."""
    with MessageQueue.create_from_handle(fake.handle, 0) as reader, fake.answer():
        with pytest.raises(QueueNotReady, match=f"pid {os.getpid()}"):
            reader.wait_until_ready(0.05)
        with pytest.raises(QueueEmpty):
            reader.dequeue(0.05)


def test_fake_writer_accepts_nobody(fake: FakeWriter) -> None:
    """Readers that stand in a full backlog wait for their timeout and no longer."""
    with contextlib.ExitStack() as ends:
        for _ in range(4):
            reader = ends.enter_context(MessageQueue.create_from_handle(fake.handle, 0))
            with pytest.raises(QueueNotReady):
                reader.wait_until_ready(0.03)


ARENA_BYTES = 8 * mmap.PAGESIZE
_HEADER = struct.Struct("=8sQQQQQdQQ")
_NAN = float("nan")


def header_of(*values: float, receive: int = 0, arena_bytes: int = ARENA_BYTES) -> bytes:
    """A header with these values."""
    return _HEADER.pack(b"shmcast\0", *values, receive, arena_bytes)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        pytest.param(bytes(_HEADER.size), "not a shmcast segment", id="zeros"),
        pytest.param(b"notours\0" + b"\1" * 64, "not a shmcast segment", id="magic"),
        pytest.param(header_of(99, 1, 1, 4096, 0, 60.0), "version 99", id="version"),
        pytest.param(header_of(3, 2**63, 1, 4096, 0, 60.0), "n_readers", id="readers"),
        pytest.param(header_of(3, 1, 0, 4096, 0, 60.0), "n_chunks", id="no chunk"),
        pytest.param(header_of(3, 1, 1, 2**40, 0, 60.0), "the file has", id="large chunks"),
        pytest.param(header_of(3, 1, 1, 4096, 0, _NAN), "warn_after_s", id="not a time"),
        pytest.param(header_of(3, 1, 1, 4096, 2**63, 60.0), "spin_us", id="endless polling"),
        pytest.param(header_of(3, 1, 1, 4096, 0, 60.0, receive=2), "receive", id="receive"),
        pytest.param(
            header_of(3, 1, 1, 4096, 0, 60.0, arena_bytes=2**63), "arena_bytes", id="arena"
        ),
        pytest.param(
            header_of(3, 1, 1, 4096, 0, 60.0, arena_bytes=9 * mmap.PAGESIZE),
            "the file has",
            id="large arena",
        ),
    ],
)
def test_damaged_header(fake: FakeWriter, header: bytes, text: str) -> None:
    """A segment whose header is damaged or of another version is refused, and the error says it."""
    answer = frame(_SEGMENT, number=1), fake.segment(header)
    with MessageQueue.create_from_handle(fake.handle, 0) as reader, fake.answer(answer):
        for _ in range(2):
            with pytest.raises(ProtocolError, match=text):
                reader.wait_until_ready(1.0)


def test_unsealed_segment(fake: FakeWriter) -> None:
    """A segment that might shrink under its reader is refused."""
    answer = frame(_SEGMENT, number=1), fake.segment(seals=0)
    with (
        MessageQueue.create_from_handle(fake.handle, 0) as reader,
        fake.answer(answer),
        pytest.raises(ProtocolError, match="not sealed"),
    ):
        reader.wait_until_ready(PATIENCE_S)


@pytest.mark.parametrize("which", ["data", "control", "locks"])
def test_other_kinds_of_files(fake: FakeWriter, which: str) -> None:
    """A pipe in the place of a memory file is refused by an error of ours."""
    files = fake.segment()
    read_end, write_end = os.pipe()
    fake.files += [read_end, write_end]
    files[["data", "control", "locks"].index(which)] = read_end
    with (
        MessageQueue.create_from_handle(fake.handle, 0) as reader,
        fake.answer((frame(_SEGMENT, number=1), files)),
        pytest.raises(ShmcastError),
    ):
        reader.wait_until_ready(PATIENCE_S)


def test_one_file_thrice(fake: FakeWriter) -> None:
    """A writer that sends one file in all three places is refused, and nothing crashes."""
    data, _, _ = fake.segment()
    answer = frame(_SEGMENT, number=1), [data] * 3
    with (
        MessageQueue.create_from_handle(fake.handle, 0) as reader,
        fake.answer(answer),
        pytest.raises(ProtocolError),
    ):
        reader.wait_until_ready(PATIENCE_S)


def test_unsealed_message(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large message in a file that may still change is refused, and the next one arrives."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096, arena_bytes=0)
    real = segment_module.new_memory_file
    for seals in (0, segment_module.FIXED_SIZE):

        def new_unsealed_file(*_: object, seals: int = seals) -> int:
            file = real("shmcast-message", LARGE_BYTES)
            segment_module.add_seals(file, seals)
            return file

        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "new_frozen_file", new_unsealed_file)
            queue.enqueue(bytes(LARGE_BYTES))
        with pytest.raises(ProtocolError, match="not sealed"):
            reader.dequeue(PATIENCE_S)
        use(queue, [reader])


@pytest.mark.parametrize("size_bytes", [1, 39, 40, 64, 5000])
def test_frozen_garbage(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    """A large message whose file holds something else is damaged, and the next one arrives."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096, arena_bytes=0)
    real = segment_module.new_frozen_file

    def new_garbage(*_: object) -> int:
        return real([(0, b"\xff" * size_bytes)], size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(writer_module, "new_frozen_file", new_garbage)
        queue.enqueue(bytes(LARGE_BYTES))
    with pytest.raises(ProtocolError, match="damaged"):
        reader.dequeue(PATIENCE_S)
    use(queue, [reader])


# --- damaged memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [2**64 - 1, 1000, 2**63, 3])
def test_scribbled_cursor(make_queue: MakeQueue, value: int) -> None:
    """A cursor that is out of range is reported by its rank, and the writer goes on without it."""
    queue, (first, second) = make_queue(n_readers=2, n_chunks=2, chunk_bytes=4096)
    for number in range(2):
        queue.enqueue(number)
        assert number == second.dequeue(PATIENCE_S)
    layout = queue._writer.segment.layout
    offset = layout.rank_offset(0) + layout.cursor_in_rank
    scribble(queue._writer.segment.control_descriptor, offset, value)
    with pytest.raises(ProtocolError, match=rf"rank 0 \(pid {os.getpid()}\) .*out of range"):
        queue.enqueue("lost", PATIENCE_S)
    use(queue, [second])
    with pytest.raises(ProtocolError, match="rank 0 was evicted"):
        first.dequeue(PATIENCE_S)


def scribble(descriptor: int, offset: int, value: int) -> None:
    """Store a word into a file of the segment."""
    os.pwrite(descriptor, struct.pack("=Q", value), offset)


def test_scribbled_cursor_is_evicted(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """With "evict" a damaged cursor is logged by its rank, and the same call publishes."""
    queue, (_, second) = make_queue(
        n_readers=2, n_chunks=1, chunk_bytes=4096, on_reader_loss="evict"
    )
    queue.enqueue(0)
    assert 0 == second.dequeue(PATIENCE_S)
    layout = queue._writer.segment.layout
    scribble(queue._writer.segment.control_descriptor, layout.rank_offset(0), 2**40)
    with caplog.at_level(logging.WARNING, "shmcast"):
        queue.enqueue("arrives", PATIENCE_S)
    assert "rank 0" in caplog.text
    assert "out of range" in caplog.text
    assert "arrives" == second.dequeue(PATIENCE_S)


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 1000])
def test_scribbled_given_up_word(make_queue: MakeQueue, value: int) -> None:
    """A given-up word beyond what was published does not free a block that is being read."""
    queue, (reader,) = make_queue(
        n_chunks=8, chunk_bytes=4096, oob_threshold_bytes=1000, arena_bytes="1 MiB"
    )
    content = bytes(LARGE_BYTES)
    queue.enqueue(pickle.PickleBuffer(bytearray(content)))
    kept = reader.dequeue(PATIENCE_S)
    layout = queue._writer.segment.layout
    control = queue._writer.segment.control_descriptor
    for slot in range(layout.n_slots):
        scribble(control, layout.rank_given_up_offset(0) + 8 * slot, value)
    scribble(control, layout.rank_offset(0) + layout.given_ups_in_rank, value)
    for number in range(1, 5):
        queue.enqueue(pickle.PickleBuffer(bytearray([number]) * LARGE_BYTES), PATIENCE_S)
        assert bytes([number]) * LARGE_BYTES == reader.dequeue(PATIENCE_S)
    assert content == kept


def test_everything_scribbled(make_queue: MakeQueue) -> None:
    """A reader that fills the whole control file with ones makes no call crash or hang."""
    queue, (first, second) = make_queue(n_readers=2, n_chunks=2, chunk_bytes=4096)
    size_bytes = queue._writer.segment.layout.control_bytes
    os.pwrite(queue._writer.segment.control_descriptor, b"\xff" * size_bytes, 0)
    outcomes = []
    for _ in range(4):
        try:
            queue.enqueue("message", 0.05)
        except ShmcastError as error:
            outcomes.append(error)
    assert any("out of range" in str(error) for error in outcomes)
    for reader in (first, second):
        with pytest.raises(ShmcastError):
            [reader.dequeue(0.05) for _ in range(4)]
    assert isinstance(queue.stats().lag, tuple)


def test_readers_cannot_write_what_others_read(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader can change the data file neither through its descriptor nor by a new mapping."""
    received: list[int] = []
    attach = segment_module.Segment.attach

    def keep_and_attach(data: int, control: int) -> segment_module.Segment:
        received.append(os.dup(data))
        return attach(data, control)

    monkeypatch.setattr(segment_module.Segment, "attach", keep_and_attach)
    queue, readers = make_queue(n_chunks=2, chunk_bytes=4096)
    (file,) = received
    layout = queue._writer.segment.layout
    for offset in (0, layout.chunks_offset, layout.arena_offset):
        with pytest.raises(PermissionError):
            os.pwrite(file, b"x", offset)
        with pytest.raises(PermissionError):
            mmap.mmap(file, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE, offset=offset)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    os.close(file)
    use(queue, readers)


# --- scarce resources -----------------------------------------------------------------------------


def read_without_descriptors(pipe: Connection, handle: Handle) -> None:
    """Receive large messages with room for a descriptor, without, and with it again."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        pipe.send(len(reader.dequeue(PATIENCE_S)))
        free = os.dup(0)
        os.close(free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        pipe.send("no room")
        for _ in range(2):
            try:
                pipe.send(len(reader.dequeue(PATIENCE_S)))
            except ShmcastError as error:
                pipe.send((type(error).__name__, str(error)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        pipe.send("room")
        pipe.send(len(reader.dequeue(PATIENCE_S)))


def test_reader_out_of_descriptors(start_child: StartChild) -> None:
    """A reader without room for a descriptor loses that message with an error, and no other one."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096, arena_bytes=0)) as queue:
        child = start_child(read_without_descriptors, queue.export_handle(), method="forkserver")
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(bytes(LARGE_BYTES))
        assert [LARGE_BYTES, "no room"] == [child.receive(), child.receive()]
        queue.enqueue(bytes(LARGE_BYTES))
        queue.enqueue(b"small")
        name, text = child.receive()
        assert "ShmcastError" == name
        assert "RLIMIT_NOFILE" in text
        assert 5 == child.receive()
        assert "room" == child.receive()
        queue.enqueue(bytes(LARGE_BYTES))
        assert LARGE_BYTES == child.receive()


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Leave this process no room for a new descriptor."""
    free = os.dup(0)
    os.close(free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_writer_out_of_descriptors(make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer without room for a descriptor can't publish a large message, and goes on."""
    queue, readers = make_queue(n_readers=2, n_chunks=4, chunk_bytes=4096, arena_bytes=0)
    # How much memory is left is not known from before, and can't be asked now.
    monkeypatch.setattr(segment_module, "_budget", type(segment_module._budget)())
    with no_more_descriptors():
        with pytest.raises((OSError, ShmcastError)):
            queue.enqueue(bytes(LARGE_BYTES), 0.05)
        queue.enqueue("small", PATIENCE_S)
    assert ["small"] * 2 == [reader.dequeue(PATIENCE_S) for reader in readers]
    assert 1 == queue.stats().messages
    use(queue, readers)


def test_blocks_need_no_descriptors(make_queue: MakeQueue) -> None:
    """Large messages in blocks are sent, received, written to and given up without a descriptor."""
    queue, readers = make_queue(
        n_readers=2, n_chunks=4, chunk_bytes=4096, oob_threshold_bytes=1000, arena_bytes="1 MiB"
    )
    use(queue, readers)
    with no_more_descriptors():
        for number in range(50):  # more than the arena can hold at once
            content = bytes([number]) * LARGE_BYTES
            queue.enqueue(pickle.PickleBuffer(bytearray(content)), PATIENCE_S)
            for reader in readers:
                received = reader.dequeue(PATIENCE_S)
                assert content == received
                received[:5] = b"dirty"
                del received
    assert 0 == queue.stats().fallbacks


@pytest.mark.usefixtures("only_in_calls")
def test_reader_attaches_without_descriptors() -> None:
    """A reader without room for the segment's descriptors says so."""
    with (
        MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096)) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        queue._writer.survey()  # it offers the segment, without a step of its reader here
        with no_more_descriptors(), pytest.raises(ShmcastError, match="RLIMIT_NOFILE"):
            reader.wait_until_ready(PATIENCE_S)


def test_full_socket(make_queue: MakeQueue) -> None:
    """Hundreds of unread large messages make the writer wait, and every one of them arrives."""
    queue, (first, second) = make_queue(n_readers=2, n_chunks=1000, chunk_bytes=1024, arena_bytes=0)

    def publish(first_number: int, count: int, timeout: float) -> None:
        for number in range(first_number, first_number + count):
            queue.enqueue((number, bytes(3000)), timeout)

    with pytest.raises(QueueFull, match="messages behind") as full:
        publish(0, 1000, 0.1)
    n_published = queue.stats().messages
    assert 100 < n_published < 1000
    assert (0, 1) == full.value.ranks
    # One of two sockets is still full.
    assert (0, bytes(3000)) == first.dequeue(PATIENCE_S)
    with pytest.raises(QueueFull):
        queue.enqueue((n_published, bytes(3000)), 0.01)
    thread = threading.Thread(target=publish, args=(n_published, 300, PATIENCE_S))
    thread.start()
    for number in range(1, n_published + 300):
        assert (number, bytes(3000)) == first.dequeue(PATIENCE_S)
        assert number - 1 == second.dequeue(PATIENCE_S)[0]
    assert n_published + 299 == second.dequeue(PATIENCE_S)[0]
    thread.join(PATIENCE_S)
    assert n_published + 300 == queue.stats().messages
    for reader in (first, second):
        with pytest.raises(QueueEmpty):
            reader.dequeue(0)


def read_with_little_memory(pipe: Connection, handle: Handle, limit: int) -> None:
    """Receive a huge message and a small one with no room for the huge one."""
    with MessageQueue.create_from_handle(handle, 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        field = "VmSize" if limit == resource.RLIMIT_AS else "VmData"
        used_bytes = 1024 * int(fields[field].split()[0])
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (used_bytes + (16 << 20), hard))
        pipe.send("limited")
        try:
            message = reader.dequeue(PATIENCE_S)
            pipe.send("whole" if bytes(message) == bytes(64 << 20) else "torn")
        except MemoryError as error:
            pipe.send(type(error).__name__)
        pipe.send(reader.dequeue(PATIENCE_S))
        resource.setrlimit(limit, (hard, hard))
        message = reader.dequeue(PATIENCE_S)
        pipe.send(len(message))


@pytest.mark.parametrize("arena_bytes", [0, 1 << 30])
@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_reader_out_of_address_space(start_child: StartChild, limit: int, arena_bytes: int) -> None:
    """A reader without memory for a huge message gets MemoryError, and then the next messages."""
    with MessageQueue(QueueConfig(n_chunks=4, chunk_bytes=4096, arena_bytes=arena_bytes)) as queue:
        handle = queue.export_handle()
        child = start_child(read_with_little_memory, handle, limit, method="forkserver")
        queue.wait_until_ready(PATIENCE_S)
        assert "limited" == child.receive()
        huge = pickle.PickleBuffer(bytes(64 << 20))
        queue.enqueue(huge)
        queue.enqueue("small")
        queue.enqueue(bytes(64 << 20))
        assert child.receive() in ("MemoryError", "whole")
        assert ["small", 64 << 20] == [child.receive(), child.receive()]


def test_private_mapping_refused(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the kernel refuses a private mapping, large messages are copied, with a warning."""
    queue, (reader,) = make_queue(
        n_chunks=4, chunk_bytes=4096, oob_threshold_bytes=1000, arena_bytes=0
    )

    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(attachment_module, "Mapping", refuse)
    content = os.urandom(LARGE_BYTES)
    with caplog.at_level(logging.WARNING, "shmcast"):
        queue.enqueue([pickle.PickleBuffer(bytearray(content)), content])
        buffer, whole = reader.dequeue(PATIENCE_S)
    assert "private mapping was refused" in caplog.text
    assert (content, content) == (bytes(buffer), whole)


def attach_with_little_address_space(pipe: Connection, handle: Handle) -> None:
    """Attach with room for one mapping of the arena, and receive and overwrite two messages."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    answer_only_in_calls()  # so that it attaches below, not before
    logging.getLogger("shmcast").addHandler(handler)
    with MessageQueue.create_from_handle(handle, 0) as reader:
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        used_bytes = 1024 * int(fields["VmSize"].split()[0])
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (1536 << 20), hard))
        reader.wait_until_ready(PATIENCE_S)
        for _ in range(2):
            received = reader.dequeue(PATIENCE_S)
            pipe.send((type(received), bytes(received[:5]), len(received)))
            received[:5] = b"dirty"
        pipe.send(texts)


def test_private_mapping_of_the_arena_refused(start_child: StartChild) -> None:
    """A reader that can't map the arena a second time copies the buffers, and warns once."""
    config = QueueConfig(n_chunks=4, chunk_bytes=4096, oob_threshold_bytes=1000)
    with MessageQueue(config) as queue:
        child = start_child(
            attach_with_little_address_space, queue.export_handle(), method="forkserver"
        )
        queue.wait_until_ready(PATIENCE_S)
        for content in (b"first", b"other"):
            queue.enqueue(pickle.PickleBuffer(bytearray(content * 20_000)))
            assert (bytearray, content, LARGE_BYTES) == child.receive()
        (text,) = child.receive()
        assert "rank 0 copies large buffers: a private mapping was refused" in text
        assert 0 == queue.stats().fallbacks


# --- not built, not here --------------------------------------------------------------------------


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """A directory with the sources of the package alone."""
    source = Path(shmcast.__file__).parent
    shutil.copytree(
        source, tmp_path / "shmcast", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    return tmp_path


def import_error(directory: Path, before: str = "") -> str:
    """The last line of what a failed import in a fresh interpreter prints."""
    # -S: an installed shmcast must not be found instead.
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{before}\nimport shmcast"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,  # it fails, which is the point
    )
    assert 1 == done.returncode
    return done.stderr.splitlines()[-1]


def test_unbuilt_tree(unbuilt: Path) -> None:
    """An import from a tree whose extension is not built says what to run."""
    text = import_error(unbuilt)
    assert text.startswith("ImportError: shmcast's extension is not built here")
    assert "pip install" in text


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
def test_other_platform(unbuilt: Path, platform: str) -> None:
    """On another platform the import says which one it needs, before anything else fails."""
    text = import_error(unbuilt, f"import sys; sys.platform = {platform!r}")
    assert text.startswith("ImportError: shmcast runs on Linux only")
    assert text.endswith(f"not on {platform}")


def test_broken_extension(unbuilt: Path) -> None:
    """A missing module inside a built extension is not taken for an unbuilt tree."""
    (unbuilt / "shmcast" / "_ring.py").write_text("import a_module_that_is_not_there\n")
    text = import_error(unbuilt)
    assert "ModuleNotFoundError: No module named 'a_module_that_is_not_there'" == text


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("-inf")])
def test_impossible_timeouts(make_queue: MakeQueue, timeout: float) -> None:
    """A negative timeout, or one that is no number, is a ValueError of every waiting call."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096)
    calls: list[Callable[[float], Any]] = [
        lambda timeout: queue.enqueue(1, timeout),
        queue.wait_until_ready,
        reader.dequeue,
        reader.wait_until_ready,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="timeout"):
            call(timeout)
    use(queue, [reader])


@pytest.mark.parametrize("rank", [-1, 1, 2**40, True, None, "0", 0.5])
def test_impossible_ranks(make_queue: MakeQueue, rank: Any) -> None:
    """A rank that the queue does not have is a ValueError before anything is connected."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096)
    with pytest.raises(ValueError, match="rank"):
        MessageQueue.create_from_handle(queue.export_handle(), rank)
    use(queue, [reader])


def test_not_what_is_wanted() -> None:
    """A config or a handle of another type is a TypeError that names what is allowed."""
    with pytest.raises(TypeError, match="QueueConfig"):
        MessageQueue({"n_readers": 1})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(TypeError, match="Handle"):
        MessageQueue.create_from_handle("handle", 0)  # type: ignore[arg-type]  # likewise


def test_ends_are_not_pickled(make_queue: MakeQueue) -> None:
    """An end can't be pickled, and the error names the handle."""
    queue, (reader,) = make_queue(n_chunks=4, chunk_bytes=4096)
    for end in (queue, reader):
        with pytest.raises(TypeError, match="handle"):
            pickle.dumps(end)
    with pytest.raises(TypeError, match="handle"):
        queue.enqueue(reader)
    use(queue, [reader])
