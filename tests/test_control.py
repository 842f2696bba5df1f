"""The control socket and the locks: the registry of lock files, both sides of the handshake."""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import mmap
import os
import resource
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from conftest import PATIENCE_S, wait_for_remote_ends, wait_until

import shmcast.control as control_module
from shmcast import locks
from shmcast._system import is_readable
from shmcast.control import (
    Process,
    ReaderControl,
    WriterControl,
)
from shmcast.errors import AuthenticationError, ProtocolError, QueueClosed, ShmcastError, WriterLost
from shmcast.handle import TOKEN_BYTES
from shmcast.locks import WRITER_BYTE, LockFile, rank_byte

# torch may have started threads in this process; these children call nothing that they could hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

_FRAME = struct.Struct("=8sIIQ")
_MAGIC = b"shmcast\x01"
_CLAIM, _SEGMENT, _MAPPED, _ADMISSION, _FILE, _FAILED = 1, 2, 3, 4, 5, 9


def memory_file(content: bytes = b"\0" * 16) -> int:
    """A new memory file with this content."""
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    return descriptor


def open_files() -> list[str]:
    """What every descriptor of this process leads to."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            links.append(str(path.readlink()))
    return sorted(links)


def newly_open(before: list[str]) -> list[str]:
    """What is open now and was not before; earlier tests' garbage may go at any time."""
    return sorted((collections.Counter(open_files()) - collections.Counter(before)).elements())


def answer_of_child(question: Callable[[], bool]) -> bool:
    """What a forked child says."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(10 + question())
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (10, 11)
    return os.waitstatus_to_exitcode(status) == 11


def is_locked_for_others(descriptor: int, byte: int) -> bool:
    """Whether another process finds the byte locked."""

    def probe() -> bool:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except BlockingIOError:
            return True
        return False

    return answer_of_child(probe)


@contextlib.contextmanager
def held_by_another_process(descriptor: int, byte: int) -> Iterator[int]:
    """The pid of a process that holds the byte until the block ends, which kills it."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
            os.write(there, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(there)
    try:
        assert b"x" == os.read(here, 1)
        yield pid
    finally:
        os.close(here)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- the lock file --------------------------------------------------------------------------------


@pytest.fixture
def lock_file() -> Iterator[LockFile]:
    """A lock file with one user, which is dropped at the end."""
    lock_file = LockFile.of(memory_file())
    yield lock_file
    lock_file.drop()


def test_one_object_for_each_file(lock_file: LockFile) -> None:
    """Every descriptor of one file leads to one object, and another file to another object."""
    same = LockFile.of(os.dup(lock_file.descriptor))
    other = LockFile.of(memory_file())
    try:
        assert same is lock_file
        assert other is not lock_file
    finally:
        same.drop()
        other.drop()


def test_own_byte_is_held(lock_file: LockFile) -> None:
    """A byte that this process holds counts as held, though the kernel calls it free to it."""
    assert not lock_file.is_held(3)
    lock_file.hold(3)
    assert lock_file.is_held(3)
    assert is_locked_for_others(lock_file.descriptor, 3)
    assert not lock_file.is_held(2)


def test_own_byte_is_held_once(lock_file: LockFile) -> None:
    """A second end of the same process can't hold a byte that is held."""
    lock_file.hold(3)
    with pytest.raises(ProtocolError, match=r"byte 3 .*held by this process"):
        lock_file.hold(3)


def test_given_back(lock_file: LockFile) -> None:
    """A byte that was given back is free for everybody, and the other bytes stay held."""
    lock_file.hold(0)
    lock_file.hold(1)
    lock_file.give_back(1)
    assert not lock_file.is_held(1)
    assert not is_locked_for_others(lock_file.descriptor, 1)
    assert lock_file.is_held(0)
    assert is_locked_for_others(lock_file.descriptor, 0)


def test_held_elsewhere_until_death(lock_file: LockFile) -> None:
    """A byte of another process is held, can't be had, and is free when that process is dead."""
    with held_by_another_process(lock_file.descriptor, 2):
        assert lock_file.is_held(2)
        with pytest.raises(ProtocolError, match=r"byte 2 .*held elsewhere"):
            lock_file.hold(2)
    assert not lock_file.is_held(2)
    lock_file.hold(2)


def test_a_user_less_drops_no_lock(lock_file: LockFile) -> None:
    """When one end lets go of its duplicate, the locks of the others stay."""
    lock_file.hold(1)
    LockFile.of(os.dup(lock_file.descriptor)).drop()
    assert is_locked_for_others(lock_file.descriptor, 1)


def test_last_user_closes_everything() -> None:
    """The last user closes every descriptor of the file, and the registry forgets it."""
    before = open_files()
    first = memory_file()
    lock_file = LockFile.of(first)
    LockFile.of(os.dup(first))
    lock_file.drop()
    assert 2 == len(newly_open(before))
    lock_file.drop()
    assert [] == newly_open(before)
    assert lock_file not in LockFile._registry.values()


def test_forked_child_holds_nothing(lock_file: LockFile) -> None:
    """In a forked child the parent's byte is somebody else's, which the child can't get."""
    lock_file.hold(1)

    def probe() -> bool:
        try:
            lock_file.hold(1)
        except ProtocolError as error:
            return lock_file.is_held(1) and "held elsewhere" in str(error)
        return False

    assert answer_of_child(probe)


def test_forked_child_keeps_descriptors(lock_file: LockFile) -> None:
    """However often a forked child drops the file, its own lock on it stays."""
    duplicate = os.dup(lock_file.descriptor)

    def probe() -> bool:
        lock_file.hold(2)
        lock_file.drop()
        LockFile.of(os.dup(duplicate)).drop()
        return is_locked_for_others(duplicate, 2)

    try:
        assert answer_of_child(probe)
        assert not is_locked_for_others(duplicate, 2)
    finally:
        os.close(duplicate)


# --- the handshake --------------------------------------------------------------------------------


@attrs.define
class Ring:
    """Stands for the queue's Membership: epochs, who is admitted, who has left."""

    published: int = 7
    epochs: dict[int, int] = attrs.field(factory=dict)
    admissions: list[tuple[int, bool]] = attrs.field(factory=list)
    strikes: list[int] = attrs.field(factory=list)
    processes: list[Process | None] = attrs.field(factory=list)
    left: set[int] = attrs.field(factory=set)
    new_ranks: set[int] = attrs.field(factory=lambda: {0, 1})

    def new_epoch(self, rank: int) -> int:
        self.epochs[rank] = self.epochs.get(rank, 0) + 1
        self.left.discard(rank)
        return self.epochs[rank]

    def admit(self, rank: int) -> int:
        is_first = rank in self.new_ranks
        self.admissions.append((rank, is_first))
        return 0 if is_first else self.published

    def strike(self, rank: int, process: Process | None) -> None:
        self.strikes.append(rank)
        self.processes.append(process)

    def has_left(self, rank: int) -> bool:
        return rank in self.left


class Host:
    """A writer's side for ranks 0 and 1, and the readers that tests connect to it."""

    def __init__(self) -> None:
        self.ring = Ring()
        self.files = memory_file(b"data"), memory_file(b"control")
        self.data = mmap.mmap(self.files[0], 0)
        self.lock_file = LockFile.of(memory_file())
        self.lock_file.hold(WRITER_BYTE)
        self.token = secrets.token_hex(TOKEN_BYTES)
        self.is_closed = False
        self.readers: list[ReaderControl] = []
        self.sockets: list[socket.socket] = []
        self.writer = WriterControl(
            address=f"shmcast-test-{secrets.token_hex(8)}",
            token=self.token,
            ranks=(0, 1),
            descriptors=self.files,
            lock_file=self.lock_file,
            members=self.ring,
        )

    def connect(self, rank: int, token: str | None = None) -> ReaderControl:
        """A reader that has connected and sent its claim."""
        reader = ReaderControl.connect(self.writer.address, token or self.token, rank)
        self.readers.append(reader)
        return reader

    def attach(self, rank: int) -> ReaderControl:
        """A reader that is admitted."""
        reader = self.connect(rank)
        self.writer.serve()
        reader.step()
        confirm(reader)
        self.writer.serve()
        reader.step()
        assert reader.is_admitted
        return reader

    def connect_raw(self) -> socket.socket:
        """A connection that has sent nothing."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(PATIENCE_S)
        connection.connect("\0" + self.writer.address)
        self.sockets.append(connection)
        return connection

    def close_writer(self) -> None:
        """Close the writer's side, as a queue does, unless the test has done so."""
        if self.is_closed:
            return
        self.is_closed = True
        self.ring.processes.clear()
        self.writer.close()
        self.lock_file.give_back(WRITER_BYTE)
        self.lock_file.drop()
        self.data.close()
        for descriptor in self.files:
            os.close(descriptor)


def confirm(reader: ReaderControl) -> None:
    """Take over what was offered, as a reader does, and say so."""
    assert reader.offered is not None
    for descriptor in reader.offered:
        os.close(descriptor)
    reader.confirm()


def finish_handshake(reader: ReaderControl) -> None:
    """Take all steps of a reader to whom the segment was offered."""
    reader.step()
    confirm(reader)
    reader.step()


@pytest.fixture
def host() -> Iterator[Host]:
    """A writer's side; at the end nothing of it or of its readers is left open."""
    wait_for_remote_ends()  # those of earlier tests
    before = open_files()
    host = Host()
    yield host
    for reader in host.readers:
        reader.close()
    for connection in host.sockets:
        connection.close()
    host.close_writer()
    wait_until(lambda: not newly_open(before))


def frame(
    kind: int, *, rank: int = 0, number: int = 0, body: bytes = b"", magic: bytes = _MAGIC
) -> bytes:
    """A frame as it travels."""
    return _FRAME.pack(magic, kind, rank, number) + body


def is_closed_by_writer(connection: socket.socket) -> bool:
    """Whether the writer has closed this connection; whatever it said before is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(2048):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def test_handshake(host: Host) -> None:
    """A reader is offered the segment, locks its byte, and is admitted from message 0 on."""
    reader = host.connect(1)
    reader.step()
    assert reader.offered is None
    host.writer.serve()
    reader.step()
    assert reader.offered is not None
    contents = [os.pread(descriptor, 16, 0) for descriptor in reader.offered]
    assert [b"data", b"control"] == contents
    assert (1, (0, 1)) == (reader.epoch, host.writer.missing_ranks)
    confirm(reader)
    assert host.lock_file.is_held(rank_byte(1))
    reader.step()
    assert not reader.is_admitted
    host.writer.serve()
    assert (0,) == host.writer.missing_ranks
    reader.step()
    assert (True, 0) == (reader.is_admitted, reader.start)
    assert [(1, True)] == host.ring.admissions
    assert [(1, os.getpid())] == [(holder.rank, holder.pid) for holder in host.writer.admitted()]
    assert os.getpid() == reader.writer_pid


def test_nothing_is_offered_before_the_writer_serves(host: Host) -> None:
    """Connecting and stepping never wait for a writer that does something else."""
    reader = host.connect(0)
    for _ in range(3):
        reader.step()
    assert (None, False) == (reader.offered, reader.is_admitted)


def test_later_attachment_starts_at_the_next_message(host: Host) -> None:
    """A rank's second attachment has a new epoch and starts with what is published from then on."""
    host.attach(0).close()
    host.ring.left.add(0)
    second = host.attach(0)
    assert [(0, True), (0, False)] == host.ring.admissions
    assert (2, 7) == (second.epoch, second.start)
    assert [0] == host.ring.strikes


@pytest.mark.parametrize("token", ["", "0", "0" * 2 * TOKEN_BYTES, "x" * 900])
def test_wrong_token(host: Host, token: str) -> None:
    """A claim with another token is denied, holds no rank and is not left connected."""
    reader = ReaderControl.connect(host.writer.address, token, 0)
    host.readers.append(reader)
    host.writer.serve()
    with pytest.raises(AuthenticationError, match="token"):
        reader.step()
    assert ({}, {}) == (host.writer.holders, host.ring.epochs)


@pytest.mark.parametrize("rank", [2, 2**32 - 1])
def test_unknown_rank(host: Host, rank: int) -> None:
    """A claim on a rank that the queue does not have is refused by its number."""
    reader = host.connect(rank)
    host.writer.serve()
    with pytest.raises(ProtocolError, match=f"rank {rank} is not one of"):
        reader.step()


def test_held_rank(host: Host) -> None:
    """A claim on a rank whose reader is alive is refused with that reader's pid."""
    host.attach(0)
    second = host.connect(0)
    host.writer.serve()
    with pytest.raises(ProtocolError, match=f"rank 0 is held by process {os.getpid()}"):
        second.step()
    assert [0] == [holder.rank for holder in host.writer.admitted()]


def test_rank_being_claimed(host: Host) -> None:
    """A second claim during the first one's handshake is refused, and the first goes on."""
    first, second = host.connect(0), host.connect(0)
    host.writer.serve()
    with pytest.raises(ProtocolError, match=f"being claimed by process {os.getpid()}"):
        second.step()
    first.step()
    confirm(first)
    host.writer.serve()
    first.step()
    assert first.is_admitted


def test_claim_waits_for_a_loss_to_be_handled(host: Host) -> None:
    """A claim on a dead reader's rank is neither granted nor refused until the rank is vacated."""
    first = host.attach(0)
    assert first.lock_file is not None
    first.lock_file.give_back(rank_byte(0))
    second = host.connect(0)
    for _ in range(2):
        host.writer.serve()
        second.step()
        assert second.offered is None
    host.writer.vacate(0)
    host.writer.serve()
    second.step()
    confirm(second)
    assert (2, [0]) == (second.epoch, host.ring.strikes)


def test_waiting_claim_that_ends(host: Host) -> None:
    """A waiting claim whose process goes away keeps nobody else from the rank."""
    first = host.attach(0)
    assert first.lock_file is not None
    first.lock_file.give_back(rank_byte(0))
    host.connect(0).close()
    host.writer.serve()
    host.writer.vacate(0)
    host.writer.serve()
    host.attach(0)


@pytest.mark.parametrize("is_offered", [False, True])
def test_claimant_that_goes_away(host: Host, is_offered: bool) -> None:
    """A reader that ends in the middle of its handshake leaves the rank to the next one."""
    first = host.connect(0)
    if is_offered:
        host.writer.serve()
        first.step()
    first.close()
    host.writer.serve()
    second = host.attach(0)
    assert 0 == second.start


def test_close_before_admission(host: Host) -> None:
    """A writer that closes tells those who have only claimed."""
    first = host.attach(0)
    assert first.lock_file is not None
    first.lock_file.give_back(rank_byte(0))
    second = host.connect(0)
    host.writer.serve()
    host.close_writer()
    with pytest.raises(QueueClosed, match="closed before it admitted rank 0"):
        second.step()


def test_close_before_the_claim_was_read(host: Host) -> None:
    """A reader whose connection the writer never accepted hears that it is gone."""
    reader = host.connect(0)
    host.close_writer()
    with pytest.raises((QueueClosed, WriterLost)):
        reader.step()


def test_close_between_offer_and_confirmation(host: Host) -> None:
    """A reader that maps the segment of a writer that has closed meanwhile hears that it closed."""
    reader = host.connect(0)
    host.writer.serve()
    host.close_writer()
    with pytest.raises(QueueClosed, match="closed before it admitted rank 0"):
        finish_handshake(reader)


def test_nobody_listens(host: Host) -> None:
    """A reader that finds no writer at the address hears so at once."""
    with pytest.raises(WriterLost, match="found no writer at @shmcast-none"):
        ReaderControl.connect("shmcast-none", host.token, 0)


def test_writer_ends_between_connection_and_claim(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is gone before it gets the claim is a lost writer, not a broken pipe."""
    real = control_module._pidfd_of

    def end_the_writer(connection: socket.socket, pid: int) -> int | None:
        host.close_writer()
        return real(connection, pid)

    monkeypatch.setattr(control_module, "_pidfd_of", end_the_writer)
    with pytest.raises((QueueClosed, WriterLost)):
        host.connect(0).step()


def test_writer_dies_right_after_the_admission(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An admission that comes between the look at the socket and the look at the process counts."""
    reader = host.connect(0)
    host.writer.serve()
    reader.step()
    confirm(reader)

    def admit_and_die(_: int | None) -> bool:
        monkeypatch.undo()
        host.writer.serve()
        return True

    monkeypatch.setattr(control_module, "is_gone", admit_and_die)
    reader.step()
    assert reader.is_admitted


def test_writer_of_another_user(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader says nothing to a socket of another user and names that user."""
    monkeypatch.setattr(control_module, "peer_of", lambda _: (os.getpid(), os.geteuid() + 1))
    with pytest.raises(AuthenticationError, match=f"belongs to user {os.geteuid() + 1}"):
        host.connect(0)


def test_reader_of_another_user(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer closes a connection of another user before it reads the claim."""
    reader = host.connect(0)
    monkeypatch.setattr(control_module, "peer_of", lambda _: (os.getpid(), os.geteuid() + 1))
    host.writer.serve()
    with pytest.raises(WriterLost):
        reader.step()
    assert ({}, {}) == (host.writer.holders, host.ring.epochs)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n", id="text"),
        pytest.param(b"\0", id="short"),
        pytest.param(b"x" * 5000, id="long"),
        pytest.param(frame(_CLAIM)[:-1], id="truncated"),
        pytest.param(frame(_CLAIM, magic=b"shmcast\x02"), id="other version"),
        pytest.param(frame(_CLAIM, magic=b"notours\x01"), id="other magic"),
        pytest.param(frame(0), id="kind 0"),
        pytest.param(frame(2**32 - 1), id="unknown kind"),
        pytest.param(frame(_MAPPED), id="mapped before claim"),
        pytest.param(frame(_ADMISSION), id="admission to the writer"),
        pytest.param(frame(_SEGMENT), id="segment to the writer"),
        pytest.param(frame(_FAILED, body=b"no disk"), id="failure before claim"),
        pytest.param(frame(_CLAIM, body=b"\xff" * 64), id="binary token"),
    ],
)
def test_garbage(host: Host, data: bytes) -> None:
    """Who sends anything but a valid claim first is disconnected, and a real reader gets in."""
    connection = host.connect_raw()
    connection.send(data)
    host.writer.serve()
    assert is_closed_by_writer(connection)
    assert ({}, {}, {}) == (host.writer.holders, host.ring.epochs, host.writer.failed_attempts)
    host.attach(0)


@pytest.mark.parametrize(
    ("what", "number"),
    [
        pytest.param(_MAPPED, 1, id="no lock"),
        pytest.param(_MAPPED, 2, id="other epoch"),
        pytest.param(_CLAIM, 0, id="second claim"),
    ],
)
def test_garbage_after_the_claim(host: Host, what: int, number: int) -> None:
    """A claimant that breaks the order of the handshake loses its claim, and the rank is free."""
    connection = host.connect_raw()
    connection.send(frame(_CLAIM, rank=0, body=host.token.encode()))
    host.writer.serve()
    assert [0] == list(host.writer.holders)
    connection.send(frame(what, number=number, body=host.token.encode()))
    host.writer.serve()
    assert is_closed_by_writer(connection)
    assert {} == host.writer.holders
    host.attach(0)


def test_descriptors_from_a_stranger(host: Host) -> None:
    """Descriptors that come with a frame to the writer are never kept."""
    connection = host.connect_raw()
    unwanted = memory_file()
    before = open_files()
    socket.send_fds(connection, [b"nonsense"], [unwanted] * 20)
    host.writer.serve()
    os.close(unwanted)
    assert is_closed_by_writer(connection)
    assert [] == newly_open(before)


def test_connection_of_an_admitted_reader_ends(host: Host) -> None:
    """An admitted reader whose connection ends stays one for as long as it holds its lock."""
    reader = host.attach(0)
    reader._socket.close()
    for _ in range(3):
        host.writer.serve()
    (holder,) = host.writer.admitted()
    assert (0, False) == (holder.rank, host.writer.is_dead(holder))


def test_garbage_from_an_admitted_reader(host: Host) -> None:
    """Garbage from a reader that is attached does not cost it the rank."""
    reader = host.attach(0)
    reader._socket.send(b"nonsense")
    host.writer.serve()
    assert [0] == [holder.rank for holder in host.writer.admitted()]


def test_silent_connection(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that says nothing is kept for the time of silence, then closed."""
    connection = host.connect_raw()
    host.writer.serve()
    assert not is_closed_by_writer(connection)
    monkeypatch.setattr(control_module, "_SILENCE_S", 0.0)
    host.writer.serve()
    assert is_closed_by_writer(connection)


def test_many_silent_connections(host: Host) -> None:
    """Of very many silent connections the oldest are closed, so that they can't pile up."""
    oldest = host.connect_raw()
    host.writer.serve()
    before = open_files()
    for _ in range(5):
        for _ in range(40):
            host.connect_raw()
        host.writer.serve()
    assert is_closed_by_writer(oldest)
    strangers = len(newly_open(before)) - 200  # what the writer has open for them
    assert strangers <= 2 * control_module._BACKLOG
    host.attach(0)


def test_full_backlog(host: Host) -> None:
    """A reader that finds the backlog full connects later, without an error and without waiting."""
    with contextlib.suppress(BlockingIOError):
        while True:
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            host.sockets.append(stranger)
            stranger.connect("\0" + host.writer.address)
    reader = host.connect(0)
    reader.step()
    assert (False, None) == (reader.is_admitted, reader.writer_pid)
    host.writer.serve()
    reader.step()
    host.writer.serve()
    reader.step()
    confirm(reader)
    host.writer.serve()
    reader.step()
    assert reader.is_admitted


def test_writer_out_of_descriptors(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim that the writer has no descriptor for waits in the backlog until it has one again."""
    reader = host.connect(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        host.writer.serve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {} == host.writer.holders
    host.writer.serve()
    reader.step()
    assert reader.offered is not None


def test_death_of_a_holder(host: Host) -> None:
    """A holder whose lock is free and whose process has ended is dead."""
    pid = os.fork()
    if pid == 0:
        try:
            reader = host.connect(0)
            while not reader.is_admitted:
                reader.step()
                if reader.offered is not None:
                    confirm(reader)
                reader.wait(0.01)
            signal.pause()
        finally:
            os._exit(1)
    try:
        while not list(host.writer.admitted()):
            is_readable(host.writer.descriptor, 0.01)
            host.writer.serve()
        (holder,) = host.writer.admitted()
        assert (pid, False) == (holder.pid, host.writer.is_dead(holder))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert host.writer.is_dead(holder)


def attached_process(host: Host) -> Process:
    """The process of a reader that was attached until now."""
    host.attach(0).close()
    host.writer.vacate(0)
    (process,) = host.ring.processes
    assert process is not None
    return process


@pytest.mark.parametrize("is_mapped", [True, False])
def test_process_of_an_attachment_that_is_over(host: Host, is_mapped: bool) -> None:
    """A process that lives may touch the queue's memory for as long as it has it mapped."""
    process = attached_process(host)
    if not is_mapped:
        host.data.close()
    assert is_mapped == process.may_touch()


def test_how_often_mappings_are_looked_at(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may touch the memory is asked for its mappings only once in a while."""
    process = attached_process(host)
    assert process.may_touch()
    host.data.close()
    assert process.may_touch()
    monkeypatch.setattr(time, "monotonic", lambda: process._look_again_at)
    assert not process.may_touch()


def test_process_that_attaches_again_from_another_program(host: Host) -> None:
    """That a process ran another program is known although it has mapped the queue again."""
    process = attached_process(host)
    assert process.may_touch()
    host.data.close()
    host.attach(0)
    host.data = mmap.mmap(host.files[0], 0)
    assert not process.may_touch()


@pytest.mark.parametrize("hidden", ["fdinfo", "maps"])
def test_process_whose_mappings_are_hidden(
    host: Host, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    """Without /proc a process may touch the memory until it has ended."""
    process = attached_process(host)
    host.data.close()
    real = Path.open

    def hide(path: Path, *arguments: Any, **more: Any) -> Any:
        if hidden in path.parts:
            raise FileNotFoundError(errno.ENOENT, "hidden", str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", hide)
    assert process.may_touch()


@pytest.mark.parametrize("has_left", [False, True])
@pytest.mark.parametrize("is_locked", [False, True])
def test_holder_without_a_pidfd(
    host: Host, monkeypatch: pytest.MonkeyPatch, has_left: bool, is_locked: bool
) -> None:
    """Without a pidfd a reader keeps what it received if it left, or still has its lock."""
    monkeypatch.setattr(control_module, "_pidfd_of", lambda *_: None)
    reader = host.attach(0)
    assert reader.lock_file is not None
    if has_left:
        host.ring.left.add(0)
    if not is_locked:
        reader.lock_file.give_back(rank_byte(0))
    host.writer.vacate(0)
    (process,) = host.ring.processes
    assert (has_left or is_locked) == (process is not None and process.may_touch())


def test_lock_lost_by_a_living_process(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is gone though its process lives is no death at first, and then an error."""
    reader = host.attach(1)
    assert reader.lock_file is not None
    reader.lock_file.give_back(rank_byte(1))
    (holder,) = host.writer.admitted()
    assert not host.writer.is_dead(holder)
    monkeypatch.setattr(locks, "_UNLOCKED_S", 0.0)
    with pytest.raises(ProtocolError, match=rf"rank 1 \(pid {os.getpid()}\) is alive but its lock"):
        host.writer.is_dead(holder)


def test_lock_seen_again(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a lock starts anew when the lock was seen in between."""
    reader = host.attach(1)
    assert reader.lock_file is not None
    (holder,) = host.writer.admitted()
    reader.lock_file.give_back(rank_byte(1))
    assert not host.writer.is_dead(holder)
    reader.lock_file.hold(rank_byte(1))
    assert not host.writer.is_dead(holder)
    assert holder.unlocked.since is None


# --- the files of large messages ------------------------------------------------------------------


def content_of(descriptor: int) -> bytes:
    """What a file holds; closes it."""
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def send(host: Host, nonce: int) -> None:
    """Send a file to everybody and keep it, as a writer does that publishes it."""
    descriptor = memory_file(b"message %d" % nonce)
    assert host.writer.send_file(nonce, descriptor, set())
    host.writer.keep_file(nonce, descriptor)


def test_files_in_order(host: Host) -> None:
    """Each admitted reader gets every file under its nonce."""
    readers = [host.attach(rank) for rank in range(2)]
    for nonce in (1, 2, 3):
        send(host, nonce)
    for reader in readers:
        for nonce in (1, 2, 3):
            assert b"message %d" % nonce == content_of(reader.take_file(nonce))


def test_files_of_abandoned_attempts(host: Host) -> None:
    """Files of attempts that were given up are closed when a later one is taken."""
    reader = host.attach(0)
    host.attach(1)
    for nonce in (1, 2, 5):
        send(host, nonce)
    before = open_files()
    assert b"message 5" == content_of(reader.take_file(5))
    assert [] == newly_open(before)


@pytest.mark.parametrize("nonce", [1, 3])
def test_missing_file(host: Host, nonce: int) -> None:
    """A file that never came is an error at its own message alone."""
    reader = host.attach(0)
    host.attach(1)
    send(host, 2)
    with pytest.raises(ProtocolError, match="its file did not come"):
        reader.take_file(nonce)
    if nonce == 1:
        assert b"message 2" == content_of(reader.take_file(2))


def test_files_kept_for_the_first_attachment(host: Host) -> None:
    """A rank that attaches for the first time gets every file sent before; then none is kept."""
    before = open_files()
    first = host.attach(0)
    for nonce in (1, 2):
        send(host, nonce)
    second = host.attach(1)
    send(host, 3)
    for reader in (first, second):
        for nonce in (1, 2, 3):
            assert b"message %d" % nonce == content_of(reader.take_file(nonce))
    assert {} == host.writer._kept_files
    # A reader's socket, its pidfd, its lock file; the writer's socket and pidfd for it.
    assert 2 * 5 == len(newly_open(before))


def test_kept_files_in_a_small_socket(host: Host) -> None:
    """Kept files that do not fit the socket are sent bit by bit, each once, before admission."""
    nonces = range(1, 31)
    for nonce in nonces:
        send(host, nonce)
    reader = host.connect(0)
    host.writer.serve()
    connection = host.writer.holders[0].connection.socket
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
    reader.step()
    confirm(reader)
    host.writer.serve()
    assert not host.writer.holders[0].is_admitted
    n_serves = 0
    while not reader.is_admitted:
        reader.step()
        host.writer.serve()
        n_serves += 1
        assert n_serves < 100
    assert list(nonces) == [nonce for nonce, _ in reader._files]
    for nonce in nonces:
        assert b"message %d" % nonce == content_of(reader.take_file(nonce))


def test_full_socket(host: Host) -> None:
    """A file that does not fit one reader's socket is sent later, and to no reader twice."""
    readers = [host.attach(rank) for rank in range(2)]
    slow = host.writer.holders[1].connection.socket
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
    descriptor = memory_file(b"message")
    done: set[control_module.Holder] = set()
    n_sent = 0
    while host.writer.send_file(n_sent + 1, descriptor, done):
        n_sent += 1
        host.writer.keep_file(n_sent, os.dup(descriptor))
        done.clear()
        assert n_sent < 1000
    assert [0] == [holder.rank for holder in done]
    assert not host.writer.send_file(n_sent + 1, descriptor, done)
    readers[1].collect_files()
    assert host.writer.send_file(n_sent + 1, descriptor, done)
    os.close(descriptor)
    for reader in readers:
        reader.collect_files()
        assert list(range(1, n_sent + 2)) == [nonce for nonce, _ in reader._files]


def test_file_to_a_reader_that_has_gone(host: Host) -> None:
    """A reader whose socket is closed keeps nobody else from a file."""
    gone, reader = host.attach(0), host.attach(1)
    gone._socket.close()
    send(host, 1)
    assert b"message 1" == content_of(reader.take_file(1))
    with pytest.raises(ProtocolError, match="its file did not come"):
        gone.take_file(1)


def test_attempts_that_time_out_do_not_pile_up(host: Host) -> None:
    """A reader that waits has each published file, and of the attempts since then only one."""
    reader = host.attach(0)
    host.attach(1)
    before = open_files()
    nonce = 0
    for n_published in range(3):
        for _ in range(300):
            nonce += 1
            descriptor = memory_file()
            assert host.writer.send_file(nonce, descriptor, set())
            os.close(descriptor)
            for other in host.readers:
                other.collect_files()
        assert 2 * (n_published + 1) == len(newly_open(before))
        nonce += 1
        send(host, nonce)
    for other in host.readers:
        other.collect_files()
    assert 2 * 3 == len(newly_open(before))
    for number in (301, 602, 903):
        assert b"message %d" % number == content_of(reader.take_file(number))


def test_no_room_for_a_file(host: Host) -> None:
    """A reader without room for a descriptor says so at that message, and the next one arrives."""
    reader = host.attach(0)
    host.attach(1)
    send(host, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        reader.collect_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    send(host, 2)
    with pytest.raises(ShmcastError, match="no room for its descriptor"):
        reader.take_file(1)
    assert b"message 2" == content_of(reader.take_file(2))


# --- what a reader believes -----------------------------------------------------------------------


@attrs.define
class FakeWriter:
    """A listening socket that says what a test tells it to."""

    listener: socket.socket
    address: str
    reader: ReaderControl
    connection: socket.socket


@pytest.fixture
def fake() -> Iterator[FakeWriter]:
    """A fake writer that has read the claim of rank 0."""
    before = open_files()
    address = f"shmcast-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(1)
    reader = ReaderControl.connect(address, "0" * 2 * TOKEN_BYTES, 0)
    connection, _ = listener.accept()
    assert frame(_CLAIM, body=b"0" * 2 * TOKEN_BYTES) == connection.recv(2048)
    yield FakeWriter(listener, address, reader, connection)
    reader.close()
    connection.close()
    listener.close()
    assert [] == newly_open(before)


@pytest.mark.parametrize(
    ("data", "n_descriptors"),
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n", 0, id="text"),
        pytest.param(b"\0" * 24, 0, id="zeros"),
        pytest.param(b"x" * 5000, 0, id="long"),
        pytest.param(frame(_SEGMENT)[:10], 3, id="truncated"),
        pytest.param(frame(_SEGMENT), 0, id="segment without files"),
        pytest.param(frame(_SEGMENT), 2, id="segment with two files"),
        pytest.param(frame(_ADMISSION), 0, id="admission before the segment"),
        pytest.param(frame(_FILE), 0, id="no file"),
        pytest.param(frame(_FILE), 2, id="two files"),
        pytest.param(frame(_CLAIM), 1, id="a claim"),
        pytest.param(frame(_FAILED, body=b"no disk"), 1, id="a failure"),
        pytest.param(frame(2**32 - 1), 3, id="unknown kind"),
    ],
)
def test_fake_writer(fake: FakeWriter, data: bytes, n_descriptors: int) -> None:
    """Nonsense from the writer is an error, and no descriptor that came with it stays open."""
    file = memory_file()
    socket.send_fds(fake.connection, [data], [file] * n_descriptors)
    os.close(file)
    before = open_files()
    with pytest.raises(ProtocolError):
        fake.reader.step()
    assert [] == newly_open(before)


def test_admission_without_a_lock(fake: FakeWriter) -> None:
    """A reader that has confirmed nothing does not take an admission."""
    files = [memory_file(), memory_file(), memory_file()]
    socket.send_fds(fake.connection, [frame(_SEGMENT, number=1)], files)
    for descriptor in files:
        os.close(descriptor)
    fake.reader.step()
    assert fake.reader.offered is not None
    for descriptor in fake.reader.offered:
        os.close(descriptor)
    fake.reader.offered = None
    fake.connection.send(frame(_ADMISSION, number=5))
    with pytest.raises(ProtocolError, match="out of turn"):
        fake.reader.step()


def test_refusal_that_is_no_text(fake: FakeWriter) -> None:
    """A refusal with bytes that are no text is still a refusal."""
    fake.connection.send(frame(6, body=b"\xff\xfe no"))
    with pytest.raises(ProtocolError, match="no"):
        fake.reader.step()


def test_writer_that_hangs_up(fake: FakeWriter) -> None:
    """A writer that ends the connection before the admission is lost."""
    fake.connection.close()
    with pytest.raises(WriterLost, match=f"pid {os.getpid()}"):
        fake.reader.step()


def test_an_interrupted_confirmation_gives_the_byte_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal right after the byte was locked does not keep the rank from the next reader."""
    reader = host.connect(0)
    host.writer.serve()
    reader.step()
    assert reader.lock_file is not None
    hold = reader.lock_file.hold

    def hold_and_interrupt(byte: int) -> None:
        hold(byte)
        raise KeyboardInterrupt

    monkeypatch.setattr(reader.lock_file, "hold", hold_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        confirm(reader)
    lock_file = reader.lock_file
    reader.close()
    assert not lock_file.is_held(rank_byte(0))


def test_process_in_another_pid_namespace(host: Host) -> None:
    """A process that the kernel gives no number for is not called process 0."""
    host.attach(0)
    (holder,) = host.writer.admitted()
    holder.connection.process.pid = 0
    second = host.connect(0)
    host.writer.serve()
    with pytest.raises(ProtocolError, match="held by process in another pid namespace, which is"):
        second.step()
