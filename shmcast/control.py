"""
The control socket: how readers of this host attach. Messages are not known here.

A reader connects to the writer's socket (abstract, so nothing is left in the file system), and the
two of them step through the handshake::

    reader                                   writer
      connect, check the writer's user   →
      CLAIM rank, token                  →   check the reader's user, the token, the rank
                                         ←   SEGMENT epoch, with three descriptors
      map, lock the rank's byte, MAPPED  →   check the lock, wait for this rank from now on
                                         ←   ADMISSION the first message's number
      start there                        ←   FILE nonce, with a descriptor: one per large message
      FAILED text                        →   why it can't attach, or is about to leave
                                         ←   CLOSING to those not admitted; with a text if it failed

An end takes its steps, none of which waits, in its own calls, and the door thread takes them while
there is no call.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import errno
import hmac
import logging
import math
import os
import socket
import struct
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Self

import attrs

from shmcast._system import EVENT_READABLE, Poller, is_readable, pidfd_open, sleep
from shmcast.door import say
from shmcast.errors import (
    AuthenticationError,
    ProtocolError,
    QueueClosed,
    ShmcastError,
    WriterFailed,
    WriterLost,
    is_foreign,
)
from shmcast.layout import MOST_FAILURE_BYTES
from shmcast.locks import (
    WRITER_BYTE,
    LockFile,
    Process,
    Unlocked,
    is_exiting,
    is_gone,
    name_in_maps,
    rank_byte,
)
from shmcast.membership import Membership

__all__ = [
    "FailedAttempt",
    "Holder",
    "ReaderControl",
    "WriterControl",
    "failure_text",
    "named",
    "peer_of",
]

_log = logging.getLogger("shmcast.control")


_FRAME: Final = struct.Struct("=8sIIQ")  # magic and version, kind, rank, number; then a body
_MAGIC: Final = b"shmcast\x01"
_MOST_FRAME_BYTES: Final = 1024

_SILENCE_S: Final = 5.0  # an accepted connection that makes no claim for this long is closed
_BACKLOG: Final = 64
_NONCE_BYTES: Final = 8
_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in `socket` (asm-generic/socket.h)
_INT: Final = struct.Struct("=i")


def failure_text(error: BaseException | str) -> str:
    """
    What the other side is told of an error: its type and text, on one line.

    It is printable and has at most `MOST_FAILURE_BYTES` bytes; a cut shows as "…".
    """
    if isinstance(error, BaseException):
        error = "".join(traceback.format_exception_only(error))
    head = error[: MOST_FAILURE_BYTES + 1]  # before all else: it may be huge
    text = " ".join("".join(c if c.isprintable() else " " for c in head).split()) or "no text"
    if len(error) > MOST_FAILURE_BYTES or len(text.encode()) > MOST_FAILURE_BYTES:
        text = text.encode()[: MOST_FAILURE_BYTES - 3].decode(errors="ignore") + "…"
    return text


def _new_socket() -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    new.setblocking(False)  # not by a flag, which a gevent socket does not look at
    return new


def named(pid: int | str | None) -> str:
    """What texts call a process; the kernel says 0 of one in a pid namespace that we can't see."""
    return "in another pid namespace" if pid == 0 else f"pid {pid}"


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user on the other side, as the kernel knows them."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def _pidfd_of(connection: socket.socket, pid: int) -> int | None:
    """A descriptor of the peer's process, or None if it is of another pid namespace."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # Linux before 6.5; the peer's number cannot have been reused this early
        try:
            return pidfd_open(pid)
        except OSError:
            return None


# --- frames ---------------------------------------------------------------------------------------


class _Kind(enum.IntEnum):
    CLAIM = 1  # the reader's: a rank, and the token
    SEGMENT = 2  # the rank's epoch, with the files that a reader maps
    MAPPED = 3  # the reader's: it has mapped them and locked its byte
    ADMISSION = 4  # the message that the reader starts with
    FILE = 5  # of a message, sent before that is published
    REFUSAL = 6  # the rank can't be had
    DENIAL = 7  # the token is wrong
    CLOSING = 8  # the writer has closed, and why if it failed
    FAILED = 9  # the reader's: it can't attach, or is about to leave by an error


@attrs.frozen
class _Frame:
    kind: int  # a _Kind, or whatever a peer sent
    rank: int
    number: int
    body: bytes
    descriptors: tuple[int, ...]

    @property
    def name(self) -> str:
        """What errors call it."""
        return _Kind(self.kind).name if self.kind in list(_Kind) else f"unknown kind {self.kind}"

    def close_descriptors(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _send(
    connection: socket.socket,
    kind: int,
    *,
    rank: int = 0,
    number: int = 0,
    body: bytes = b"",
    descriptors: Sequence[int] = (),
) -> bool:
    """Send one frame. False if it would have to wait; raises OSError if the peer is gone."""
    data = _FRAME.pack(_MAGIC, kind, rank, number) + body[: _MOST_FRAME_BYTES - _FRAME.size]
    try:
        socket.send_fds(connection, [data], descriptors, socket.MSG_NOSIGNAL)
    except OSError as error:
        # ETOOMANYREFS: too many descriptors are under way; the peer takes them some time.
        if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS):
            return False
        raise
    return True


def _send_file(connection: socket.socket, nonce: int, descriptor: int, last_nonce: int) -> bool:
    """
    Send the file of a message; False if that would have to wait.

    Args:
        connection: to a reader.
        nonce: the number of this attempt to publish the message; they only grow.
        descriptor: the file's.
        last_nonce: the number of the last attempt that succeeded. Those between the two timed out,
            so the reader drops what it has of them.
    """
    body = last_nonce.to_bytes(_NONCE_BYTES, "little")
    return _send(connection, _Kind.FILE, number=nonce, body=body, descriptors=(descriptor,))


class _Gone(Exception):
    """The connection has ended."""


class _NoDescriptors(Exception):
    """A frame came whose descriptors this process had no room for."""

    def __init__(self, frame: _Frame) -> None:
        super().__init__(frame)
        self.frame = frame


def _receive_raw(
    connection: socket.socket, most_descriptors: int
) -> tuple[bytes, tuple[int, ...], int]:
    """The data, the descriptors and the flags of what comes next."""
    # Not `socket.recv_fds`: it drops the flags, so a program that is started meanwhile would
    # inherit the descriptors (CPython 3.13 still does that).
    arguments = (
        _MOST_FRAME_BYTES + 1,
        socket.CMSG_SPACE(most_descriptors * _INT.size),
        socket.MSG_CMSG_CLOEXEC,
    )
    try:
        data, ancillary, flags, _ = connection.recvmsg(*arguments)
    except ConnectionResetError:
        # The peer closed without reading all that we sent. The kernel says so once, and before
        # what the peer sent last.
        data, ancillary, flags, _ = connection.recvmsg(*arguments)
    descriptors: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = content[: len(content) // _INT.size * _INT.size]
            descriptors += (descriptor for (descriptor,) in _INT.iter_unpack(whole))
    return data, tuple(descriptors), flags


def _receive(connection: socket.socket, most_descriptors: int) -> _Frame | None:
    """
    The next frame, or None if there is none now.

    Raises:
        _Gone: the connection has ended.
        _NoDescriptors: this process is out of descriptors; the frame's are lost.
        ProtocolError: something else than a frame came.
    """
    try:
        data, received, flags = _receive_raw(connection, most_descriptors)
    except BlockingIOError:
        return None
    except ConnectionError:
        raise _Gone from None
    try:
        if not data:
            raise _Gone
        if not _FRAME.size <= len(data) <= _MOST_FRAME_BYTES:
            raise ProtocolError(f"a frame of {len(data)} bytes came over the control socket")
        magic, kind, rank, number = _FRAME.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolError(f"no shmcast peer of this version: its frame starts with {magic!r}")
        if flags & socket.MSG_CTRUNC:
            raise _NoDescriptors(_Frame(kind, rank, number, data[_FRAME.size :], ()))
    except BaseException:
        for descriptor in received:
            os.close(descriptor)
        raise
    return _Frame(kind, rank, number, data[_FRAME.size :], received)


# --- the writer's side ----------------------------------------------------------------------------


@attrs.define(eq=False)
class _Connection:
    """A connection that the writer has accepted."""

    socket: socket.socket
    process: Process
    accepted_at: float
    claimed_rank: int | None = None  # a valid claim, waiting for the rank to become vacant
    holder: Holder | None = None
    is_open: bool = True

    @property
    def has_gone(self) -> bool:
        """Whether its process has surely ended; a forked child may hold the connection open."""
        pid, pidfd = self.process.pid, self.process.pidfd
        return pidfd is not None and (is_gone(pidfd) or is_exiting(pid))

    def close(self) -> None:
        """Close the socket; the process is closed with the last that asks for its end."""
        self.is_open = False
        self.socket.close()
        self.holder = None  # no reference cycle


@attrs.define(eq=False)
class Holder:
    """
    The attachment of a rank: offered to a claimant, or admitted.

    Attributes:
        n_files_sent: how many of the kept files it has been sent.
        is_mapped: whether it has said that it is mapped.
        is_admitted: whether the writer waits for it.
        start: the message that it starts with, once admitted.
        is_told: whether it knows that.
        failure: why it is about to leave, if it has said so.
    """

    rank: int
    epoch: int
    connection: _Connection
    n_files_sent: int = 0
    is_mapped: bool = False
    is_admitted: bool = False
    start: int = 0
    is_told: bool = False
    failure: str | None = None
    unlocked: Unlocked = attrs.field(factory=Unlocked)

    @property
    def pid(self) -> int:
        """The process that claimed the rank."""
        return self.connection.process.pid


@attrs.frozen
class FailedAttempt:
    """An attempt to attach that failed, and why."""

    text: str
    pid: int | str  # with the host that it is on, if that is another one
    at: float = attrs.field(factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.text} ({named(self.pid)}, {time.monotonic() - self.at:.3g} s ago)"


@attrs.define(eq=False)
class WriterControl:
    """
    The writer's side of the control socket: serves claims and says who holds which rank.

    Used under the lock of the writer's end.

    Args:
        address: the name of the socket in the abstract namespace.
        token: the secret that a claimant must show.
        ranks: the ranks that may be claimed here.
        descriptors: the data and the control file.
        lock_file: whose bytes tell who is alive.
        members: which ranks the writer waits for.
        greeting: what a reader is told when it is admitted.
    """

    address: str
    token: str
    ranks: tuple[int, ...]
    descriptors: tuple[int, int]
    lock_file: LockFile
    members: Membership
    greeting: bytes = b""

    holders: dict[int, Holder] = attrs.field(init=False, factory=dict)
    #: The last one of each rank that has not been admitted since.
    failed_attempts: dict[int, FailedAttempt] = attrs.field(init=False, factory=dict)
    _kept_files: dict[int, int] = attrs.field(init=False, factory=dict)  # nonce → descriptor
    _last_nonce: int = attrs.field(init=False, default=0)  # of the last file that was published
    _connections: dict[int, _Connection] = attrs.field(init=False, factory=dict)
    #: The processes of attachments that are over, while there are blocks that they keep.
    _past: weakref.WeakSet[Process] = attrs.field(init=False, factory=weakref.WeakSet)
    _is_starved: bool = attrs.field(init=False, default=False)
    _listener: socket.socket = attrs.field(init=False)
    _poller: Poller = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listener = _new_socket()
        try:
            self._listener.bind("\0" + self.address)
            self._listener.listen(len(self.ranks) + _BACKLOG)
            self._poller = Poller()
            self.watch(self._listener.fileno())
        except BaseException:
            self._listener.close()
            raise

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that no admitted reader holds, as far as is known without asking the locks."""
        attached = {
            holder.rank for holder in self.admitted() if not self.members.has_left(holder.rank)
        }
        return tuple(rank for rank in self.ranks if rank not in attached)

    def admitted(self) -> Iterator[Holder]:
        """The holders that the writer waits for."""
        return (holder for holder in list(self.holders.values()) if holder.is_admitted)

    def watch(self, descriptor: int) -> None:
        """Let `descriptor` be readable whenever this one is."""
        self._poller.add(descriptor, EVENT_READABLE, descriptor)

    @property
    def descriptor(self) -> int:
        """What is readable when there is something to serve, or a reader's process has ended."""
        return self._poller.descriptor

    @property
    def sees_every_death(self) -> bool:
        """Whether `descriptor` becomes readable when any admitted reader's process ends."""
        return all(holder.connection.process.pidfd is not None for holder in self.admitted())

    @property
    def _has_new_ranks(self) -> bool:
        return not self.members.new_ranks.isdisjoint(self.ranks)

    def serve(self) -> float:
        """
        Answer everything that has arrived; never waits.

        Returns when to do it again at the latest, as a time of `time.monotonic`.
        """
        was_starved = self._is_starved
        if was_starved:
            with contextlib.suppress(FileExistsError):  # a signal came before the next line
                self.watch(self._listener.fileno())
            self._is_starved = False
        descriptors = self._poller.wait(0)
        for descriptor in descriptors:
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._guarded(connection, self._take_frames)
        if self._listener.fileno() in descriptors:
            self._accept(was_starved)
        for connection in list(self._connections.values()):
            self._guarded(connection, self._take_up)
        silent_until = self._drop_silent()
        return 0.0 if self._is_starved or self._has_to_wait() else silent_until

    def _has_to_wait(self) -> bool:
        """Whether somebody waits for what nothing tells of, such as a lock or a full socket."""
        return any(
            connection.claimed_rank is not None
            or ((holder := connection.holder) and holder.is_mapped and not holder.is_told)
            for connection in self._connections.values()
        )

    def _drop_silent(self) -> float:
        """
        Close connections that say nothing, after a while or if they are many.

        Returns when the next one is due.
        """
        silent = [
            connection
            for connection in self._connections.values()
            if connection.claimed_rank is None and connection.holder is None
        ]
        now = time.monotonic()
        due_at = math.inf
        for index, connection in enumerate(silent):
            until = connection.accepted_at + _SILENCE_S
            if until <= now or len(silent) - index > _BACKLOG:
                self._forget(connection)
            else:
                due_at = min(due_at, until)
        return due_at

    def _accept(self, was_starved: bool) -> None:
        for _ in range(len(self.ranks) + _BACKLOG):
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, or the peer has gone: it stays in the backlog, or is no more.
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    raise
                self._is_starved = error.errno != errno.ECONNABORTED
                if self._is_starved:  # what can't be accepted now would end each poll
                    self._poller.remove(self._listener.fileno())
                    if not was_starved:
                        say(
                            _log.warning,
                            "writer @%s can't accept a reader: %s (RLIMIT_NOFILE)",
                            self.address,
                            error.strerror,
                        )
                return
            accepted.setblocking(False)
            pid, uid = peer_of(accepted)
            if uid != os.geteuid():
                accepted.close()
                continue
            pidfd = _pidfd_of(accepted, pid)
            process = Process(pid, pidfd, name_in_maps(self.descriptors[0]))
            connection = _Connection(accepted, process, time.monotonic())
            self._connections[accepted.fileno()] = connection
            self.watch(accepted.fileno())
            if pidfd is not None:
                self.watch(pidfd)
            self._guarded(connection, self._take_frames)

    def _forget(self, connection: _Connection) -> None:
        """Close a connection that holds no admitted rank."""
        # resumable: this is done again until the connection is closed.
        holder = connection.holder
        if holder is not None and self.holders.get(holder.rank) is holder:
            del self.holders[holder.rank]
        self._connections.pop(connection.socket.fileno(), None)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._unwatch(connection)
        if connection.process.pidfd is not None:
            # Not left to the closing: a forked child may have a copy for a moment.
            with contextlib.suppress(OSError):
                self._poller.remove(connection.process.pidfd)
        connection.close()

    def _unwatch(self, connection: _Connection) -> None:
        # It was unwatched before, or the caller's program closed it.
        with contextlib.suppress(OSError):
            self._poller.remove(connection.socket.fileno())

    def _guarded(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        try:
            step(connection)
        except (_Gone, _NoDescriptors, ProtocolError, OSError) as error:
            if is_foreign(error):
                self._refuse_cut(connection)
                raise
            # The end of a connection is no death, and garbage none either: a holder that was
            # admitted stays one for as long as its lock says so.
            if connection.holder is not None and connection.holder.is_admitted:
                self._unwatch(connection)
            elif connection.is_open:
                self._forget(connection)
        except BaseException:
            self._refuse_cut(connection)
            raise

    def _refuse_cut(self, connection: _Connection) -> None:
        # A frame may be lost. Who waits for its answer shall not wait for ever.
        if connection.is_open and not (connection.holder and connection.holder.is_admitted):
            with contextlib.suppress(OSError):  # it has gone
                text = b"the writer was interrupted in the handshake"
                _send(connection.socket, _Kind.REFUSAL, body=text)
            self._forget(connection)

    def _take_up(self, connection: _Connection) -> None:
        """Go on with what had to wait: a claim, or an admission."""
        holder = connection.holder
        if (holder is None or not holder.is_admitted) and connection.has_gone:
            self._take_frames(connection)  # what it said last
            raise _Gone
        if connection.claimed_rank is not None:
            self._decide(connection, connection.claimed_rank)
        elif holder is not None and not holder.is_told:
            self._try_admit(holder)

    def _take_frames(self, connection: _Connection) -> None:
        while connection.is_open:
            holder = connection.holder
            frame = _receive(connection.socket, 0)
            if frame is None:
                return
            if frame.kind == _Kind.CLAIM and holder is None and connection.claimed_rank is None:
                self._claim(connection, frame)
            elif frame.kind == _Kind.MAPPED and holder is not None and frame.number == holder.epoch:
                holder.is_mapped = True
                self._try_admit(holder)
                if not holder.is_admitted and not self.lock_file.is_held(rank_byte(holder.rank)):
                    raise ProtocolError(f"rank {holder.rank} says it is mapped, but has no lock")
            elif frame.kind == _Kind.FAILED:
                self._take_failure(connection, failure_text(frame.body.decode(errors="replace")))
            else:
                raise ProtocolError(f"a frame {frame.name} is out of turn")

    def _take_failure(self, connection: _Connection, text: str) -> None:
        holder = connection.holder
        rank = connection.claimed_rank if holder is None else holder.rank
        if rank is None:
            raise ProtocolError("it failed without a claim")
        if holder is not None and holder.is_admitted:
            holder.failure = holder.failure or text
            return
        pid = connection.process.pid
        self.failed_attempts[rank] = FailedAttempt(text, pid)
        say(_log.warning, "rank %d (%s) can't attach: %s", rank, named(pid), text)
        self._forget(connection)

    def _claim(self, connection: _Connection, frame: _Frame) -> None:
        if not hmac.compare_digest(frame.body, self.token.encode()):
            self._refuse(connection, _Kind.DENIAL, "the token is not the one of this queue")
        elif frame.rank not in self.ranks:
            self._refuse(
                connection, _Kind.REFUSAL, f"rank {frame.rank} is not one of {list(self.ranks)}"
            )
        else:
            self._decide(connection, frame.rank)

    def _decide(self, connection: _Connection, rank: int) -> None:
        """Offer the rank, refuse it, or let the claim wait until a death has been handled."""
        connection.claimed_rank = rank
        holder = self.holders.get(rank)
        if holder is not None and holder.is_admitted and self.members.has_left(rank):
            if self.failure_of(holder) is not None:
                return  # its loss is handled first
            self.vacate(rank)
            holder = None
        if holder is not None and not holder.is_admitted and holder.connection.has_gone:
            self._guarded(holder.connection, self._take_up)
            holder = None
        if holder is None:
            # One that has left gives its byte back a little later.
            if not self.lock_file.is_held(rank_byte(rank)):
                self._offer(connection, rank)
        elif not holder.is_admitted or self.lock_file.is_held(rank_byte(rank)):
            verb = "held" if holder.is_admitted else "being claimed"
            self._refuse(
                connection,
                _Kind.REFUSAL,
                f"rank {rank} is {verb} by process {holder.pid or named(0)}, which is alive",
            )

    def _refuse(self, connection: _Connection, kind: int, text: str) -> None:
        _send(connection.socket, kind, body=text.encode())
        self._forget(connection)

    def _offer(self, connection: _Connection, rank: int) -> None:
        holder = Holder(rank, self.members.new_epoch(rank), connection)
        connection.claimed_rank, connection.holder = None, holder
        self.holders[rank] = holder
        for process in list(self._past):
            if process.pid == holder.pid:  # it may run another program, and maps the queue again
                process.may_touch(at_once=True)
        with contextlib.suppress(ConnectionError):  # it has gone; what it said last is read next
            if not _send(
                connection.socket,
                _Kind.SEGMENT,
                rank=rank,
                number=holder.epoch,
                descriptors=(*self.descriptors, self.lock_file.descriptor),
            ):
                self._forget(connection)

    def _try_admit(self, holder: Holder) -> None:
        """Admit a reader that is mapped; the next step goes on if its socket is full."""
        connection = holder.connection.socket
        if holder.is_told or not (holder.is_admitted or self._can_admit(holder)):
            return
        holder.is_told = _send(
            connection, _Kind.ADMISSION, rank=holder.rank, number=holder.start, body=self.greeting
        )

    def _can_admit(self, holder: Holder) -> bool:
        # A rank is offered while its byte is free, so this is the claimant, and it has mapped. Its
        # frame only wakes us: a signal may have lost it.
        if not self.lock_file.is_held(rank_byte(holder.rank)):
            return False
        if holder.rank in self.members.new_ranks:
            for nonce, descriptor in list(self._kept_files.items())[holder.n_files_sent :]:
                if not _send_file(holder.connection.socket, nonce, descriptor, nonce - 1):
                    return False
                holder.n_files_sent += 1
        # The cursor is set before the reader learns where to start: from then on it is its own.
        holder.start = self.members.admit(holder.rank)
        holder.is_admitted = True
        self.members.new_ranks.discard(holder.rank)
        self.failed_attempts.pop(holder.rank, None)
        if not self._has_new_ranks:
            self._drop_kept_files()
        return True

    def vacate(self, rank: int) -> None:
        """
        End a rank's attachment, whether or not it lives; the rank may be claimed from now on.

        What the reader received stays its own for as long as its process may touch it.
        """
        holder = self.holders[rank]
        has_gone = holder.connection.has_gone
        if holder.connection.process.pidfd is None and not self.members.has_left(rank):
            has_gone = not self.lock_file.is_held(rank_byte(rank))  # all that tells
        self._past.add(holder.connection.process)
        self.members.strike(rank, None if has_gone else holder.connection.process)
        self._connections.pop(holder.connection.socket.fileno(), None)
        self._close(holder.connection)
        del self.holders[rank]  # last: what a signal cuts off is done again

    def is_dead(self, holder: Holder) -> bool:
        """
        Whether an admitted holder has died.

        Raises:
            ProtocolError: it lost its lock though it is alive.
        """
        who = f"rank {holder.rank} ({named(holder.pid)})"
        pidfd = holder.connection.process.pidfd
        return holder.unlocked.is_dead(
            self.lock_file, rank_byte(holder.rank), holder.pid, pidfd, who
        )

    def failure_of(self, holder: Holder) -> str | None:
        """Why a holder that has left or died did so, or None if it did not say."""
        self._guarded(holder.connection, self._take_frames)
        return holder.failure

    def send_file(self, nonce: int, descriptor: int, done: set[Holder]) -> bool:
        """
        Send a message's file to every admitted reader, but for those in `done`, which grows.

        Returns False if some reader's socket is full: try again later.
        """
        for holder in self.admitted():
            if holder in done:
                continue
            try:
                if not _send_file(holder.connection.socket, nonce, descriptor, self._last_nonce):
                    return False
            except OSError as error:
                if is_foreign(error):
                    raise
                # It is dying, or it closed its socket and finds the file missing.
            done.add(holder)
        return True

    def keep_file(self, nonce: int, descriptor: int) -> None:
        """
        Keep a message's file for the ranks that have never attached; owns it now.

        The message is published next.
        """
        self._last_nonce = nonce
        if self._has_new_ranks:
            self._kept_files[nonce] = descriptor
        else:
            os.close(descriptor)

    def _drop_kept_files(self) -> None:
        while self._kept_files:
            os.close(self._kept_files.popitem()[1])

    def close(self, failure: str | None = None) -> None:
        """Close the socket and every connection; their readers are told, and why if it failed."""
        body = (failure or "").encode()
        with contextlib.suppress(OSError):  # until none is left, or it is closed already
            while True:
                late, _ = self._listener.accept()
                with late, contextlib.suppress(OSError):
                    _send(late, _Kind.CLOSING, body=body)
        self._listener.close()
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # it has gone before us
                _send(connection.socket, _Kind.CLOSING, body=body)
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close what this process has open, and say nothing: all that a forked child may do."""
        self._listener.close()
        while self._connections:
            connection = self._connections.popitem()[1]
            connection.close()
            connection.process.close()
        for process in list(self._past):
            process.close()
        self._poller.close()
        self._drop_kept_files()


# --- the reader's side ----------------------------------------------------------------------------


@attrs.define(eq=False)
class ReaderControl:
    """
    The reader's side of the control socket. Used under the lock of the reader's end.

    Args:
        address: the name of the writer's socket.
        token: the secret to show.
        rank: the rank to claim.
    """

    address: str
    token: str
    rank: int

    epoch: int = attrs.field(init=False, default=0)
    #: The data and the control file, once offered; the caller takes them over and then confirms.
    offered: tuple[int, int] | None = attrs.field(init=False, default=None)
    start: int | None = attrs.field(init=False, default=None)
    #: What the writer said with it.
    greeting: bytes = attrs.field(init=False, default=b"")
    writer_pid: int | None = attrs.field(init=False, default=None)
    lock_file: LockFile | None = attrs.field(init=False, default=None)
    _holds_byte: bool = attrs.field(init=False, default=False)
    _is_connected: bool = attrs.field(init=False, default=False)
    _has_said_failure: bool = attrs.field(init=False, default=False)
    _socket: socket.socket = attrs.field(init=False)
    _writer_pidfd: int | None = attrs.field(init=False, default=None)
    _unlocked: Unlocked = attrs.field(init=False, factory=Unlocked)
    _files: collections.deque[tuple[int, int | None]] = attrs.field(
        init=False, factory=collections.deque
    )

    @classmethod
    def connect(cls, address: str, token: str, rank: int) -> Self:
        """
        Connect to a writer and claim the rank, without waiting for the answer.

        Raises:
            WriterLost: nobody listens at this address.
            AuthenticationError: another user does.
        """
        control = cls(address, token, rank)
        control._socket = _new_socket()
        try:
            control._try_connect()
        except BaseException:
            control._socket.close()
            raise
        return control

    def _try_connect(self) -> None:
        try:
            self._socket.connect("\0" + self.address)
        except BlockingIOError:
            return  # the backlog is full; the next step tries again
        except ConnectionRefusedError:
            raise WriterLost(
                f"rank {self.rank} found no writer at @{self.address}: it has closed or died, or "
                f"is in another network namespace (such a reader is a remote one)"
            ) from None
        pid, uid = peer_of(self._socket)
        if uid != os.geteuid():
            raise AuthenticationError(
                f"the socket @{self.address} belongs to user {uid}, not to {os.geteuid()}"
            )
        self.writer_pid = pid
        self._writer_pidfd = _pidfd_of(self._socket, pid)
        self._is_connected = True
        self._say(_Kind.CLAIM, body=self.token.encode())

    def _say(self, kind: int, *, number: int = 0, body: bytes = b"") -> None:
        """Send a frame. If the writer has gone, what is received next says so."""
        with contextlib.suppress(ConnectionError):
            _send(self._socket, kind, rank=self.rank, number=number, body=body)

    @property
    def is_admitted(self) -> bool:
        """Whether the handshake is done."""
        return self.start is not None

    @property
    def descriptor(self) -> int:
        """What is readable when the handshake can go on; nothing, once it is done."""
        return self._socket.fileno()

    @property
    def writer_pidfd(self) -> int | None:
        """What is readable once the writer's process has ended; None in another pid namespace."""
        return self._writer_pidfd

    @property
    def has_writer_ended(self) -> bool:
        """Whether the writer's process has ended, as far as its pidfd tells."""
        return self._writer_pidfd is not None and is_gone(self._writer_pidfd)

    @property
    def is_connected(self) -> bool:
        """Whether the writer's socket had room for this reader so far."""
        return self._is_connected

    def wait(self, timeout_s: float) -> None:
        """Wait until something arrives on the socket."""
        if self._is_connected:
            is_readable(self.descriptor, timeout_s)
        else:
            sleep(min(timeout_s, 0.01))

    def step(self) -> None:
        """
        Take the handshake as far as it goes without waiting.

        Raises:
            ProtocolError: the writer refused the rank, or is no shmcast peer of this version.
            AuthenticationError: the token is not the queue's.
            QueueClosed: the writer closed before it admitted this reader.
            WriterFailed: it closed with an error.
            WriterLost: the writer died before.
        """
        if not self._is_connected:
            self._try_connect()
        while self._is_connected and not self.is_admitted and self.offered is None:
            try:
                frame = _receive(self._socket, 3)
                # A forked child of the writer may hold the socket open after its death. What it
                # sent before that counts.
                if frame is None and self._writer_pidfd is not None and is_gone(self._writer_pidfd):
                    frame = _receive(self._socket, 3)
                    if frame is None:
                        raise _Gone
            except _Gone:
                raise WriterLost(
                    f"the writer {self._whom} ended before it admitted {self._me}"
                ) from None
            except _NoDescriptors:
                raise ShmcastError(
                    f"{self._me} has no room for descriptors (RLIMIT_NOFILE)"
                ) from None
            if frame is None:
                return
            self._take(frame)

    def confirm(self) -> None:
        """Lock the rank's byte and say that the offered segment is mapped."""
        assert self.lock_file is not None  # it came with the offer
        self.offered = None
        self._holds_byte = True  # first, or a signal between the two would leave it locked for ever
        try:
            self.lock_file.hold(rank_byte(self.rank))
        except ProtocolError:
            self._holds_byte = False
            raise
        self._say(_Kind.MAPPED, number=self.epoch)

    @property
    def _me(self) -> str:
        return f"rank {self.rank}"

    @property
    def _whom(self) -> str:
        return f"({named(self.writer_pid)})"

    def _take(self, frame: _Frame) -> None:
        n_descriptors = len(frame.descriptors)
        if frame.kind == _Kind.SEGMENT and n_descriptors == 3 and self.lock_file is None:
            data, control, locks = frame.descriptors
            # Closing this one on an error would drop the locks of an end in this very process.
            self.lock_file = LockFile.of(locks)
            self.epoch, self.offered = frame.number, (data, control)
            return
        if frame.kind == _Kind.FILE and n_descriptors == 1:
            self._add_file(frame)
            return
        frame.close_descriptors()
        if frame.kind == _Kind.ADMISSION and self._holds_byte:
            self.greeting, self.start = frame.body, frame.number
        elif frame.kind == _Kind.REFUSAL:
            raise ProtocolError(frame.body.decode(errors="replace"))
        elif frame.kind == _Kind.DENIAL:
            raise AuthenticationError(frame.body.decode(errors="replace"))
        elif frame.kind == _Kind.CLOSING and frame.body:
            raise WriterFailed(
                f"the writer {self._whom} failed before it admitted {self._me}: "
                f"{frame.body.decode(errors='replace')}"
            )
        elif frame.kind == _Kind.CLOSING:
            raise QueueClosed(f"the writer closed before it admitted {self._me}")
        else:
            raise ProtocolError(f"the writer sent a frame {frame.name} out of turn")

    def collect_files(self) -> None:
        """Take what has arrived, so that the socket does not fill while this reader waits."""
        while True:
            try:
                frame = _receive(self._socket, 1)
            except (_Gone, OSError) as error:
                if is_foreign(error):
                    raise
                return  # what is missing is said by the message that misses it
            except _NoDescriptors as cut:
                self._add_file(cut.frame)
                continue
            if frame is None:
                return
            if frame.kind == _Kind.FILE and len(frame.descriptors) == 1:
                self._add_file(frame)
            else:
                frame.close_descriptors()

    def _add_file(self, frame: _Frame) -> None:
        """Put a file behind those before it, less those of attempts that timed out."""
        last_nonce = int.from_bytes(frame.body[:_NONCE_BYTES], "little")
        while self._files and self._files[-1][0] > last_nonce:
            self._close_file(self._files.pop()[1])
        descriptor = frame.descriptors[0] if frame.descriptors else None  # there was no room for it
        self._files.append((frame.number, descriptor))

    def _close_file(self, descriptor: int | None) -> None:
        if descriptor is not None:
            os.close(descriptor)

    def take_file(self, nonce: int) -> int:
        """
        The descriptor sent under this nonce, which the caller owns; older ones are dropped.

        It was sent before its message was published, so it is there.

        Raises:
            ShmcastError: this process had no room for the descriptor.
            ProtocolError: it is not there.
        """
        self.collect_files()
        # Nonces only grow. An older file belongs to an attempt that was given up.
        while self._files and self._files[0][0] <= nonce:
            number, descriptor = self._files.popleft()
            if number == nonce and descriptor is not None:
                return descriptor
            self._close_file(descriptor)
            if number == nonce:
                raise ShmcastError(
                    f"{self._me} lost a message: no room for its descriptor (RLIMIT_NOFILE)"
                )
        raise ProtocolError(
            f"{self._me} lost a message: its file did not come over the control socket"
        )

    def is_writer_dead(self) -> bool:
        """
        Whether the writer has died.

        Raises:
            ProtocolError: it lost its lock though it is alive.
        """
        assert self.lock_file is not None  # after the handshake it is there
        who = f"the writer {self._whom}"
        assert self.writer_pid is not None  # likewise
        return self._unlocked.is_dead(
            self.lock_file, WRITER_BYTE, self.writer_pid, self._writer_pidfd, who
        )

    def say_failed(self, text: str) -> None:
        """Tell the writer why this reader can't attach or is about to leave. From any thread."""
        if self._has_said_failure or not self._is_connected:
            return
        try:
            _send(self._socket, _Kind.FAILED, rank=self.rank, body=text.encode())
        except OSError as error:
            if is_foreign(error):
                raise
            # The writer has gone, or this end was closed.
        self._has_said_failure = True

    def close(self) -> None:
        """Give the rank's byte back and close the connection."""
        if self.lock_file is not None:
            if self._holds_byte:
                self.lock_file.give_back(rank_byte(self.rank))
                self._holds_byte = False
            lock_file, self.lock_file = self.lock_file, None
            lock_file.drop()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close what this process has open, and say nothing: all that a forked child may do."""
        self._socket.close()
        pidfd, self._writer_pidfd = self._writer_pidfd, None
        if pidfd is not None:
            os.close(pidfd)
        offered, self.offered = self.offered, None
        for descriptor in offered or ():
            os.close(descriptor)
        while self._files:
            self._close_file(self._files.popleft()[1])
