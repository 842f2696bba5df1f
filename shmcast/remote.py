"""
Frames over ZeroMQ: how messages reach readers on other hosts. Pickle is not known here.

The writer has a ROUTER socket, each reader a DEALER. A connection may be cut at any time; the
attachment, which its session names, goes on over the next one::

    reader                                      writer
      HELLO session, token                  →     wait for a call of the writer
                                            ←   ADMISSION the first message's number
                                            ←   MESSAGE number, stream, buffers
      ACK the next number to be taken       →     the messages below it are released
      RESUME the next number to arrive      →     after a cut: go on from there
                                            ←   CLOSING how many messages there are
      DONE                                  →     all of them have arrived
      LEAVE                                 →     do not wait for this reader any more
                                            ←   EVICTION it is not; or a lost one has come back
      VIA the session of another reader     →     send what follows to that one alone
      BEAT                                 ←→     every second

To the ring a remote rank is a reader like any other: the writer's I/O thread holds its place there
and moves its cursor when the messages are acknowledged and ZeroMQ has let go of their memory. So
the ring is the window, a full one makes the writer wait, and nothing is copied on the way.

Of the readers on one host the first is the relay: it puts what it receives into a ring of the host,
from which the others take it. Each of them keeps its own connection for everything else, so nothing
depends on the relay: who finds it gone, or is too slow for its ring, resumes and gets the messages
themselves from the writer, which keeps them until each reader has acknowledged them.

A connection that ends is no death: the reader connects again. Lost is who does not come back within
5 s; who is connected but silent is stalled, and is waited for, as one on this host would be.

One thread per process, and no more, touches the sockets. It exists while there are remote ends.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hmac
import ipaddress
import logging
import math
import multiprocessing.util
import os
import secrets
import select
import signal
import socket as net
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import attrs
import zmq
import zmq.utils.garbage  # its `atexit` has to be registered before ours
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shmcast._ring import RingReader
from shmcast.control import FailedAttempt
from shmcast.errors import (
    AuthenticationError,
    ConfigError,
    ProtocolError,
    QueueClosed,
    ShmcastError,
    WriterLost,
)

__all__ = [
    "Arrived",
    "CurveKeys",
    "Peer",
    "Relay",
    "Relayed",
    "RemoteReader",
    "RemoteRing",
    "RemoteWriter",
    "RingSizes",
]

_log = logging.getLogger("shmcast.remote")

# Magic and version, kind, rank, session, number, how many bytes follow. These stand in the same
# frame: a text, a stream; or in frames of their own: a stream and its buffers.
_HEADER: Final = struct.Struct("<8sIIQQQ")
_MAGIC: Final = b"shmcast\x01"
# How an admission's text starts: the sizes of the ring, how many messages were published.
_ADMITTED: Final = struct.Struct("<QQQQ")
_HELLO, _RESUME, _ACK, _DONE, _LEAVE, _BEAT, _VIA = range(1, 8)
_ADMISSION, _MESSAGE, _CLOSING, _EVICTION, _REFUSAL, _DENIAL = range(8, 14)

_BEAT_S: Final = 1.0
#: How long an end whose connection was cut is waited for.
RESUME_S: Final = 5.0
_EXIT_LINGER_MS: Final = 500  # how long what an open end has said may take when its process ends
_LINGER_S: Final = 10.0  # how long a closed writer goes on until everything has arrived
_GREETING_S: Final = 5.0  # a peer that does not get through the handshake for this long is dropped
_RETRY_S: Final = 0.05
_MOST_VAIN_CUTS: Final = 40
_GOODBYE_S: Final = 1.0  # how long a reader that leaves waits for the writer's answer
#: An acknowledgement waits for so long for the next one, unless the window is half full.
_ACK_S: Final = 0.005
_TRACKER_S: Final = 0.001  # when to ask again whether ZeroMQ has let go of a message's memory
_MOST_ASKED_BYTES: Final = 1024  # of a frame that a reader sends
#: ZeroMQ copies what is smaller. Such a frame may lie at any address, so it is copied on arrival.
_ALIASED_BYTES: Final = 64 * 1024
_SPARE_DESCRIPTORS: Final = 24  # more than a context and an end's sockets take
_BATCH: Final = 100  # how many messages one socket is served in turn

_DISCONNECTED: Final = zmq.EVENT_DISCONNECTED
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class RingSizes(NamedTuple):
    """The settings of the writer's ring that a relay takes over."""

    n_chunks: int
    chunk_bytes: int
    arena_bytes: int


class CurveKeys(NamedTuple):
    """The keys of one queue, in ZeroMQ's text form: the writer's and the readers'."""

    server_public: str
    client_public: str
    client_secret: str


# --- frames ---------------------------------------------------------------------------------------


class _Header(NamedTuple):
    kind: int
    rank: int
    session: int
    number: int


def _unpack(frames: list[Any]) -> _Header:
    """
    The header, which is how the first frame starts.

    Raises:
        ProtocolError: it is none of this version, or does not fit what follows.
    """
    first = memoryview(frames[0]) if frames else memoryview(b"")
    start = bytes(first[: len(_MAGIC)])
    if start != _MAGIC:
        if start and start[:-1] == _MAGIC[:-1]:
            raise ProtocolError(f"the peer has version {start[-1]}, this one {_MAGIC[-1]}")
        raise ProtocolError("no shmcast peer")
    if len(first) < _HEADER.size:
        raise ProtocolError(f"a header of {len(first)} bytes instead of {_HEADER.size}")
    _, kind, rank, session, number, length = _HEADER.unpack_from(first)
    body_bytes = len(first) - _HEADER.size + sum(map(len, frames[1:]))
    if length != body_bytes:
        raise ProtocolError(f"{body_bytes} bytes follow a header that says {length}")
    return _Header(kind, rank, session, number)


def _who() -> bytes:
    """What others call this process."""
    return f"{os.getpid()} on {net.gethostname()}".encode()[:200]


def _has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive; an error that says no costs twice as much."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _received(socket: zmq.Socket[bytes], *, copy: bool) -> Iterator[list[Any]]:
    for _ in range(_BATCH):
        if not _has_come(socket):
            return
        yield socket.recv_multipart(zmq.NOBLOCK, copy=copy)


def _monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    while True:
        # A signal, whose handler has run.
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.get_monitor_socket(events)


def _monitored(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """The events that have come."""
    while _has_come(monitor):
        yield int(recv_monitor_message(monitor)["event"])


# --- addresses ------------------------------------------------------------------------------------


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def _join(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _address_of(host: str, port: int, flags: int = 0) -> str:
    """The host as a number; raises OSError, or UnicodeError for what can be no name."""
    found = net.getaddrinfo(host, port, type=net.SOCK_STREAM, flags=flags)
    # IPv4 first: a name may have both, and the other side tries one.
    found.sort(key=lambda entry: entry[0] != net.AF_INET)
    address = found[0][4]
    return str(address[0])


def _is_wildcard(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_unspecified or (mapped is not None and mapped.is_unspecified)


# --- the I/O thread -------------------------------------------------------------------------------


class _Event:
    """What one thread waits for and others set; its descriptor closes with the object."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self.descriptor, select.POLLIN)

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        _close(self.descriptor)  # kept, since this may come after the end of the module `os`

    def set(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was not set
            os.eventfd_read(self.descriptor)

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1e3)


def _check_descriptors() -> None:
    """Raise OSError if few are left: ZeroMQ would end the process where it gets none."""
    with contextlib.ExitStack() as taken:
        for _ in range(_SPARE_DESCRIPTORS):
            taken.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))


class _Link:
    """An end's sockets, which only the loop's thread touches; it calls `run`."""

    is_closing = False
    is_done = False
    port: int

    def begin(self) -> None:
        """Called once, before all else."""

    def run(self, now: float, ready: dict[Any, int]) -> float:
        """Do what there is to do; returns when to call again at the latest."""
        raise NotImplementedError

    def abort(self, error: str | None, linger_ms: int = 0) -> None:
        """
        Close the sockets at once; what they were given has so long to go out.

        Args:
            error: what the end's calls raise from now on; None when nobody is to hear of it.
            linger_ms: how long.
        """
        raise NotImplementedError

    def owns(self, found: net.socket) -> bool:
        """Whether this TCP socket is one of its own; may raise OSError."""
        raise NotImplementedError


class _Loop:
    """The one I/O thread of this process; it ends with its last link."""

    current: _Loop | None = None
    lock = threading.RLock()  # reentrant, since a signal handler may make an end too

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.allowed_keys: dict[str, str] = {}  # the readers' public key of each queue, by domain
        self.n_users = 0
        self.poller = zmq.Poller()
        self._wake = _Event()
        self.poller.register(self._wake.descriptor, zmq.POLLIN)
        self._zap = self.context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self.poller.register(self._zap, zmq.POLLIN)
        self._new_links: collections.deque[_Link] = collections.deque()
        self.links: list[_Link] = []
        self._is_exiting = False
        self._thread = threading.Thread(target=self._run, name="shmcast-remote", daemon=True)
        # It comes before pyzmq's own, which gives up the memory that is on its way. The children of
        # `multiprocessing` leave `atexit` out.
        atexit.register(self._at_exit)
        self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    @classmethod
    def enter(cls) -> _Loop:
        """The loop, for one more link; `leave` or a link that is done gives it back."""
        with cls.lock:
            _check_descriptors()
            loop = cls.current or cls()
            loop.n_users += 1
            if cls.current is None:
                loop._thread.start()
                cls.current = loop
            return loop

    def leave(self) -> None:
        with self.lock:
            self.n_users -= 1
            if self.n_users == 0 and _Loop.current is self:
                _Loop.current = None
        self.wake()

    def add(self, link: _Link) -> None:
        self._new_links.append(link)
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def watch(self, *sockets: zmq.Socket[bytes]) -> None:
        for socket in sockets:
            self.poller.register(socket, zmq.POLLIN)

    def drop(self, *sockets: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        for socket in sockets:
            self.poller.unregister(socket)
            socket.close(linger_ms)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the callers'
        next_at = 0.0
        while (self.n_users and not self._is_exiting) or self.links or self._new_links:
            timeout_ms = min(max(0.0, next_at - time.monotonic()), _BEAT_S) * 1e3
            ready = dict(self.poller.poll(int(timeout_ms) + 1 if timeout_ms else 0))
            if self._wake.descriptor in ready:
                self._wake.clear()
            if self._zap in ready:
                self._answer_zap()
            while self._new_links:
                self.links.append(self._new_links[0])
                self._new_links.popleft().begin()
            now = time.monotonic()
            next_at = now + _BEAT_S
            for link in list(self.links):
                try:
                    next_at = min(next_at, link.run(now, ready))
                    if self._is_exiting and not (link.is_closing or link.is_done):
                        link.abort(None, linger_ms=_EXIT_LINGER_MS)
                except Exception as error:
                    _log.exception("an end with remote peers failed")
                    self._abort(link, f"its I/O failed: {error!r}")
                if link.is_done:
                    self.links.remove(link)
                    self.leave()
        self._zap.close(0)
        self.context.term()
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()

    @staticmethod
    def _abort(link: _Link, error: str) -> None:
        """Abort it; the other ends go on whatever that raises."""
        try:
            link.abort(error)
        except Exception:
            _log.exception("an end with remote peers can't be closed")
            link.is_done = True

    def _answer_zap(self) -> None:
        """Let in who has the keys of the queue that was asked for (ZeroMQ's RFC 27)."""
        for request in _received(self._zap, copy=True):
            version, request_id, domain, _address, _identity, mechanism, *credentials = request
            key = self.allowed_keys.get(domain.decode("ascii", "replace"))
            allowed = (
                key is not None
                and mechanism == b"CURVE"
                and len(credentials) == 1
                and hmac.compare_digest(credentials[0], z85.decode(key))
            )
            code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
            self._zap.send_multipart([version, request_id, code, text, b"", b""])

    def _at_exit(self) -> None:
        """Wait for the writers that have closed and have not been heard by all."""
        self._is_exiting = True
        self.wake()
        self._thread.join(_LINGER_S + 1)

    @classmethod
    def after_fork_in_child(cls) -> None:
        """
        The child has no such thread, and keeps no connection of its parent open after its death.

        ZeroMQ does not say which descriptors are its own; the ports and addresses do.
        """
        cls.lock = threading.RLock()
        loop, cls.current = cls.current, None
        if loop is None:
            return
        _inherited.append(loop)  # never freed: ZeroMQ would touch what is the parent's
        links = [*loop.links, *loop._new_links]
        for path in list(Path("/proc/self/fd").iterdir()):
            descriptor = int(path.name)
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with net.socket(fileno=os.dup(descriptor)) as found:
                    is_ip = found.family in (net.AF_INET, net.AF_INET6)
                    if not is_ip or found.type != net.SOCK_STREAM:
                        continue
                    for link in links:
                        with contextlib.suppress(OSError):  # it has no peer
                            if link.owns(found):
                                os.close(descriptor)
                                break


_inherited: list[_Loop] = []
os.register_at_fork(after_in_child=_Loop.after_fork_in_child)


def _set_common_options(socket: zmq.Socket[bytes], address: str) -> None:
    socket.linger = 0
    socket.ipv6 = ":" in address
    socket.sndhwm = socket.rcvhwm = 0  # the window is the limit
    socket.handshake_ivl = int(_GREETING_S * 1e3)
    # A host that has gone without a word: 60 s. The last one limits the keepalive too, and a peer
    # that lives and takes nothing.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 10, 5, 3
    socket.set(zmq.TCP_MAXRT, 60_000)


# --- the writer's side ----------------------------------------------------------------------------


class _Message(NamedTuple):
    stream: memoryview
    buffers: list[memoryview]


@attrs.define(eq=False)
class Peer:
    """
    One attachment of a remote rank; or its claim, until it is admitted.

    The I/O thread stores where no other owner is named.
    """

    rank: int
    session: int
    pid: str  # with the host that it is on
    identity: bytes | None  # of its connection, None while that is cut
    known_as: bytes  # of its last connection: what it said before the end is read after it
    claimed_at: float
    heard_at: float
    cut_at: float | None = None
    fault: str | None = None  # what it did against the protocol
    failure: str | None = None  # why it is about to leave, if it has said so
    is_lost: bool = False  # whether it was cut off and did not come back
    is_done: bool = False  # whether everything has arrived there
    # Stored by the writer's end.
    is_over: bool = False
    is_admitted: bool = False
    start: int | None = None
    place: RingReader | None = None  # used by the I/O thread from `_start` on
    is_started: bool = False
    via: Peer | None = None  # who relays to it what comes from this number on
    via_from: int = 0
    is_told: bool = False  # over the present connection, that nothing follows
    next_number: int = 0  # to send
    sent_number: int = 0  # the same over all connections
    acked: int = 0
    released: int = 0
    # The messages that were sent over the present connection, with what tells that ZeroMQ has let
    # go of their memory; and the same of earlier connections.
    sent: collections.deque[tuple[int, list[zmq.MessageTracker]]] = attrs.field(
        factory=collections.deque
    )
    unfinished: list[zmq.MessageTracker] = attrs.field(factory=list)


class RemoteWriter(_Link):
    """
    The writer's side: who is attached from other hosts, and the messages on their way.

    The methods without an underscore are for the writer's end, under its lock, but for `close`.

    Args:
        bind: the address to bind, such as "tcp://192.0.2.1:0".
        security: "curve" or "none".
        ranks: the ranks that may attach.
        token: what a reader must show.
        sizes: of the ring: as many messages may be on their way, and of those too large for a
            chunk as many bytes as the arena has.
        place_of: what holds the place of a rank and epoch in the ring.
        new_epoch, admit, strike, has_left: the ring's.

    Raises:
        ConfigError: the address can't be bound, or is a wildcard without keys.
    """

    def __init__(
        self,
        *,
        bind: str,
        security: str,
        ranks: tuple[int, ...],
        token: str,
        sizes: RingSizes,
        place_of: Callable[[int, int], RingReader],
        new_epoch: Callable[[int], int],
        admit: Callable[[int, bool], int],
        strike: Callable[[int], None],
        has_left: Callable[[int], bool],
    ) -> None:
        self.ranks = ranks
        self.holders: dict[int, Peer] = {}
        self.keys: CurveKeys | None = None
        self._token = token.encode()
        self._sizes = sizes
        self._place_of, self._new_epoch = place_of, new_epoch
        self._admit, self._strike, self._has_left = admit, strike, has_left
        self._never_admitted = set(ranks)
        self.failed_attempts: dict[int, FailedAttempt] = {}
        self.failure: str | None = None  # of the writer, which the readers are to be told
        self._waiting: list[Peer] = []
        # The bytes of those on their way that are in files, by number; the I/O thread takes out.
        self._filed: dict[int, int] = {}
        self.claimed = _Event()  # set when a claim has come, or a peer is lost

        # From here on the I/O thread's, but for the two queues between it and the writer's end.
        self._commands: collections.deque[Callable[[], object]] = collections.deque()
        self._claims: collections.deque[Peer] = collections.deque()
        self._peers: dict[int, Peer] = {}  # by session
        self._by_identity: dict[bytes, Peer] = {}
        self._messages: dict[int, _Message] = {}
        self._least = 0  # the first message that is kept
        self._published = 0
        self._unclaimed = set(ranks)
        self._beat_at = 0.0
        self._release_at = self._lose_at = math.inf
        self._is_ending = False  # `is_closing`, in the order of the messages
        self._give_up_at = math.inf
        self._domain = f"shmcast-{secrets.token_hex(8)}"
        self._loop = _Loop.enter()
        try:
            self._bind(bind, security)
        except BaseException:
            self._loop.leave()
            raise
        self._loop.add(self)

    def _bind(self, bind: str, security: str) -> None:
        host, port = _split(bind)
        refusal = f"bind = {bind!r} is not allowed"
        try:
            address = "0.0.0.0" if host == "*" else _address_of(host, port, net.AI_PASSIVE)  # noqa: S104  # refused below, if without keys
        except OSError as error:
            raise ConfigError(f"{refusal}: {error.strerror}") from error
        except UnicodeError as error:
            raise ConfigError(f"{refusal}: {error}") from error
        if host not in (address, "localhost") and ipaddress.ip_address(address).is_loopback:
            _log.warning("bind = %r is %s here, which other hosts can't reach", bind, address)
        if security == "none" and _is_wildcard(address):
            raise ConfigError(
                f"{refusal} with security = 'none': anyone could attach on every interface; "
                f"allowed is one address of this host"
            )
        self._socket = self._loop.context.socket(zmq.ROUTER)
        self._monitor = _monitor_of(self._socket, _DISCONNECTED)
        try:
            _set_common_options(self._socket, address)
            # A stranger may send much, and read nothing.
            self._socket.rcvhwm = 1000
            self._socket.sndhwm = 4 * self._sizes.n_chunks + 1000
            self._socket.router_mandatory = True
            self._socket.maxmsgsize = _MOST_ASKED_BYTES
            if security == "curve":
                if not zmq.has("curve"):
                    raise ConfigError("security = 'curve' needs a pyzmq that has CURVE")
                server_public, server_secret = zmq.curve_keypair()
                client_public, client_secret = zmq.curve_keypair()
                self.keys = CurveKeys(
                    server_public.decode(), client_public.decode(), client_secret.decode()
                )
                self._loop.allowed_keys[self._domain] = self.keys.client_public
                self._socket.curve_server = True
                self._socket.curve_secretkey = server_secret
                self._socket.zap_domain = self._domain.encode()
            try:
                self._socket.bind(_join(address, port))
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"{refusal}: {error.strerror}; allowed is a free port at an address of "
                    f"this host"
                ) from error
            _, self.port = _split(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self._socket.disable_monitor()
            for socket in (self._monitor, self._socket):
                socket.close(0)
            raise
        # A wildcard is no address for others; the name is what they can resolve, if anything.
        self.endpoint = _join(net.gethostname() if _is_wildcard(address) else host, self.port)

    # --- for the writer's end ---

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that no admitted reader holds, as far as is known."""
        attached = {
            peer.rank
            for peer in self.admitted()
            if peer.cut_at is None and not self._has_left(peer.rank)
        }
        return tuple(rank for rank in self.ranks if rank not in attached)

    def admitted(self) -> Iterator[Peer]:
        """The peers that the writer waits for."""
        return (peer for peer in list(self.holders.values()) if peer.is_admitted)

    def is_dead(self, peer: Peer) -> bool:
        """
        Whether its connection was cut and it did not come back.

        Raises:
            ProtocolError: it does not keep to the protocol.
        """
        if peer.fault is not None:
            raise ProtocolError(f"rank {peer.rank} (pid {peer.pid}) {peer.fault}")
        return peer.is_lost

    def failure_of(self, peer: Peer) -> str | None:
        """Why a peer that has left or is lost did so, or None if it did not say."""
        return peer.failure

    def vacate(self, rank: int) -> None:
        """End a rank's attachment, which has left or died; it may be claimed from now on."""
        # A signal may come at any line: then this is done again, and the I/O thread sees the mark.
        self._strike(rank)
        peer = self.holders[rank]
        peer.is_over = True
        self.holders.pop(rank)
        self._command(functools.partial(self._forget, peer, _EVICTION, ""))

    def serve(self) -> None:
        """Decide on the claims that have come; never waits."""
        self.claimed.clear()
        while self._claims:
            self._waiting.append(self._claims[0])
            self._claims.popleft()
        self._waiting = [peer for peer in self._waiting if not self._decide(peer)]

    def _decide(self, peer: Peer) -> bool:
        """Whether the claim is decided; else it waits until a death has been handled."""
        if peer.is_over or peer.is_admitted:
            return True
        holder = self.holders.get(peer.rank)
        if holder is not None and holder.is_admitted and self._has_left(peer.rank):
            self.vacate(peer.rank)
            holder = None
        if holder is None or holder is peer or holder.is_over:
            self._take_in(peer)
            return True
        if holder.cut_at is not None:
            return False
        silence_s = time.monotonic() - peer.claimed_at
        if holder.heard_at <= peer.claimed_at and silence_s < RESUME_S:
            self._command(functools.partial(self._send, holder, _BEAT))  # it may have died just now
            return False
        text = f"rank {peer.rank} is held by process {holder.pid}, which is alive"
        self._command(functools.partial(self._forget, peer, _REFUSAL, text))
        return True

    def _take_in(self, peer: Peer) -> None:
        # A signal may come at any line. Then the reader's next HELLO leads here again.
        rank = peer.rank
        self.holders[rank] = peer
        if peer.start is None:
            place = self._place_of(rank, self._new_epoch(rank))
            start = self._admit(rank, rank in self._never_admitted)
            place.begin(start)
            peer.place, peer.start = place, start
        self._never_admitted.discard(rank)
        self._command(functools.partial(self._start, peer))
        peer.is_admitted = True

    def has_room(self, file_bytes: int) -> bool:
        """Whether a message in a file of this size may follow those that are on their way."""
        on_their_way = sum(list(self._filed.values()))
        return not on_their_way or on_their_way + file_bytes <= self._sizes.arena_bytes

    def publish(
        self, number: int, stream: memoryview, buffers: list[memoryview], file_bytes: int = 0
    ) -> None:
        """Send a message that was published; its memory stays as it is until it is released."""
        if file_bytes:
            self._filed[number] = file_bytes
        message = _Message(stream, buffers)
        self._command(functools.partial(self._take_message, number, message))

    def close(self, failure: str | None = None) -> None:
        """Tell every reader that nothing follows; the I/O thread goes on until all have heard."""
        self.failure = failure
        if not self.is_closing:
            self._command(self._begin_closing)
            self.is_closing = True

    def _command(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        self._loop.wake()

    # --- in the I/O thread ---

    def begin(self) -> None:
        """Watch the socket."""
        self._loop.watch(self._socket, self._monitor)

    def run(self, now: float, ready: dict[Any, int]) -> float:
        """Take commands and frames, send what is due, release what is done."""
        while self._commands:
            self._commands.popleft()()
        if self._socket in ready:
            for identity, *frames in _received(self._socket, copy=True):
                self._take(now, identity, frames)
        was_cut = self._monitor in ready and any([*_monitored(self._monitor)])
        if was_cut or now >= self._beat_at:
            # A connection that has ended shows only when something is sent.
            self._beat_at = now + _BEAT_S
            for peer in list(self._by_identity.values()):
                self._send(peer, _BEAT)
        self._release_at = self._lose_at = math.inf
        for peer in list(self._peers.values()):
            self._serve_peer(now, peer)
        self._prune()
        if self._is_ending and (
            now >= self._give_up_at or not any(map(self._is_awaited, self._peers.values()))
        ):
            self._finish(500)
        return min(self._beat_at, self._release_at, self._lose_at, self._give_up_at)

    def abort(self, error: str | None, linger_ms: int = 0) -> None:
        """Close at once; the readers see a cut."""
        for peer in self._peers.values():
            peer.fault = error
        self._finish(linger_ms)

    def owns(self, found: net.socket) -> bool:
        """Whether it listens on the writer's port, or was accepted there."""
        return bool(found.getsockname()[1] == self.port)

    def _finish(self, linger_ms: int) -> None:
        # The key stays: who comes while the socket closes shall find nobody, not a wrong key.
        self._socket.disable_monitor()
        self._loop.drop(self._monitor)
        self._loop.drop(self._socket, linger_ms=linger_ms)
        self._messages.clear()
        self.is_done = True

    def _is_awaited(self, peer: Peer) -> bool:
        return peer.is_started and not peer.is_over and not peer.is_done

    def _begin_closing(self) -> None:
        self._is_ending = True
        self._give_up_at = time.monotonic() + _LINGER_S
        for peer in list(self._peers.values()):
            if not peer.is_started:
                self._forget(peer, _CLOSING)

    def _take_message(self, number: int, message: _Message) -> None:
        if number >= self._published:  # else a signal had it handed on twice
            self._messages[number] = message
            self._published = number + 1
        elif number < self._least:
            self._filed.pop(number, None)

    def _start(self, peer: Peer) -> None:
        assert peer.start is not None
        self._unclaimed.discard(peer.rank)
        if peer.is_over:  # it left just before it was taken in
            assert peer.place is not None
            peer.place.leave()
            self.claimed.set()
            return
        if not peer.is_started:
            peer.is_started = True
            peer.next_number = peer.sent_number = peer.acked = peer.released = peer.start
        numbers = _ADMITTED.pack(*self._sizes, self._published)
        self._send(peer, _ADMISSION, peer.start, numbers + _who())

    def _forget(self, peer: Peer, kind: int, text: str = "") -> None:
        peer.is_over = True
        self._send(peer, kind, text=text.encode())
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        peer.is_over = True
        self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        self._peers.pop(peer.session, None)
        self._by_identity.pop(peer.known_as, None)
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        peer.identity = None
        self._forget_sent(peer)

    def _forget_sent(self, peer: Peer) -> None:
        for _, trackers in peer.sent:
            peer.unfinished += trackers
        peer.sent.clear()

    def _send(
        self,
        peer: Peer,
        kind: int,
        number: int = 0,
        text: bytes | memoryview = b"",
        *frames: zmq.Frame | memoryview,
    ) -> bool:
        """Send to a peer, unless its connection is found to have ended, or is full."""
        if peer.identity is None:
            return False
        size_bytes = len(text) + sum(len(frame) for frame in frames)
        head = _HEADER.pack(_MAGIC, kind, peer.rank, peer.session, number, size_bytes) + text
        try:
            self._socket.send(peer.identity, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(head, zmq.SNDMORE if frames else 0)
            if frames:
                self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self._disconnect(peer)
                peer.cut_at = time.monotonic()
            elif error.errno != zmq.EAGAIN:  # a reader that is stopped for long has many beats due
                raise
            return False
        return True

    def _take(self, now: float, identity: bytes, frames: list[Any]) -> None:
        peer = self._by_identity.get(identity)
        try:
            header = _unpack(frames)
            if header.kind in (_HELLO, _RESUME):
                self._greet(now, identity, header, frames[0][_HEADER.size :])
                return
            if peer is None or header.session != peer.session or header.rank != peer.rank:
                raise ProtocolError(f"a frame of kind {header.kind} is out of turn")
            self._take_from(now, peer, header)
        except ProtocolError as error:
            _log.info("the writer at %s refused a peer: %s", self.endpoint, error)
            if peer is not None:
                peer.fault = f"broke the protocol: {error}"
                self.claimed.set()
            self._answer(identity, _REFUSAL, str(error))

    def _answer(self, identity: bytes, kind: int, text: str, session: int = 0) -> None:
        """Answer somebody who is no peer, or has gone."""
        head = _HEADER.pack(_MAGIC, kind, 0, session, 0, len(text.encode()))
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([identity, head + text.encode()], zmq.NOBLOCK)

    def _greet(self, now: float, identity: bytes, header: _Header, body: bytes) -> None:
        kind, rank, session, number = header
        token, who = body[: len(self._token)], body[len(self._token) :]
        if not hmac.compare_digest(token, self._token):
            self._answer(identity, _DENIAL, "the token is not the one of this queue", session)
            return
        if rank not in self.ranks:
            text = f"rank {rank} is not one of {list(self.ranks)}"
            self._answer(identity, _REFUSAL, text, session)
            return
        peer = self._peers.get(session)
        if peer is None:
            if kind == _RESUME or self._is_ending:
                self._answer(identity, _EVICTION if kind == _RESUME else _CLOSING, "", session)
                return
            text = who.decode("utf-8", "replace")
            pid = "".join(char if char.isprintable() else "?" for char in text)
            peer = self._peers[session] = Peer(rank, session, pid, None, b"", now, now)
        if peer.rank != rank:
            raise ProtocolError(f"the session of rank {peer.rank} is shown for rank {rank}")
        # Over the same connection too: what is sent again would be waited for in no order.
        self._disconnect(peer)
        self._by_identity.pop(peer.known_as, None)
        peer.identity = peer.known_as = identity
        self._by_identity[identity] = peer
        peer.heard_at, peer.cut_at = now, None
        if not peer.is_started:
            self._claims.append(peer)
            self.claimed.set()
            self._send(peer, _BEAT)  # there is a writer, though it may not make a call for long
            return
        assert peer.start is not None
        if kind == _HELLO:  # it has not heard that it is admitted
            number = peer.start
        if not peer.acked <= number <= self._published:
            raise ProtocolError(f"it resumes at {number}, {self._published} were published")
        peer.next_number, peer.is_told, peer.via = number, False, None
        self._start(peer)

    def _take_from(self, now: float, peer: Peer, header: _Header) -> None:
        peer.heard_at = now
        if header.kind == _ACK:
            if not peer.acked <= header.number <= self._published:
                raise ProtocolError(
                    f"it acknowledges {header.number}, {self._published} were published"
                )
            peer.acked = header.number
            # It may have resumed at an earlier number, and taken more from a relay since.
            peer.next_number = max(peer.next_number, peer.acked)
        elif header.kind == _DONE:
            peer.is_done = True
        elif header.kind == _VIA:
            relay = self._peers.get(header.number)
            if relay is not None and relay.is_started and relay is not peer:
                # It was admitted to the relay's ring before it said so, and the relay had received
                # no more by then than it has been sent now.
                peer.via, peer.via_from = relay, relay.sent_number
        elif header.kind == _LEAVE:
            if peer.is_started and peer.place is not None:
                self._release(now, peer)
                peer.place.leave()
            self._send(peer, _EVICTION)
            self._drop(peer)
            self.claimed.set()
        elif header.kind != _BEAT:
            raise ProtocolError(f"a frame of kind {header.kind} is out of turn")

    def _serve_peer(self, now: float, peer: Peer) -> None:
        if peer.is_over:
            self._forget(peer, _EVICTION)
            return
        if peer.cut_at is not None:
            if now >= peer.cut_at + RESUME_S:
                # Decided here: it can't come back while the writer uses its place again.
                peer.is_lost, peer.is_over = peer.is_started, not peer.is_started
                self._remove(peer)
                self.claimed.set()
                return
            self._lose_at = min(self._lose_at, peer.cut_at + RESUME_S)
        if not peer.is_started:
            return
        if peer.via is not None and peer.via.is_lost:
            # A relay that is stopped, and not dead, keeps the others waiting.
            self._forget_sent(peer)
            peer.next_number, peer.via = peer.acked, None
        while peer.next_number < self._published:
            if peer.via is not None and peer.next_number >= peer.via_from:
                peer.next_number = self._published
            elif self._send_message(peer):
                peer.next_number += 1
            else:
                break
        peer.sent_number = max(peer.sent_number, peer.next_number)
        if self._is_ending and not peer.is_told and peer.next_number == self._published:
            peer.is_told = self._send(peer, _CLOSING, self._published)
        self._release(now, peer)

    def _send_message(self, peer: Peer) -> bool:
        number = peer.next_number
        stream, buffers = self._messages[number]
        if not buffers and len(stream) < _ALIASED_BYTES:
            return self._send(peer, _MESSAGE, number, stream)
        frames: list[zmq.Frame | memoryview] = []
        trackers: list[zmq.MessageTracker] = []
        for buffer in (stream, *buffers):
            if len(buffer) < _ALIASED_BYTES:
                frames.append(buffer)
            else:
                frame = zmq.Frame(buffer, track=True, copy=False)
                assert isinstance(frame.tracker, zmq.MessageTracker)
                frames.append(frame)
                trackers.append(frame.tracker)
        is_sent = self._send(peer, _MESSAGE, number, b"", *frames)
        if is_sent and trackers:
            peer.sent.append((number, trackers))
        return is_sent

    def _release(self, now: float, peer: Peer) -> None:
        """Give back what was acknowledged and is not used by ZeroMQ any more."""
        if peer.released == peer.acked:
            return
        assert peer.place is not None
        peer.unfinished = [tracker for tracker in peer.unfinished if not tracker.done]
        while not peer.unfinished and peer.released < peer.acked:
            if peer.sent and peer.sent[0][0] == peer.released:
                if not all(tracker.done for tracker in peer.sent[0][1]):
                    break
                peer.sent.popleft()
            peer.place.pass_over()
            peer.released += 1
        else:
            if not peer.unfinished:
                return
        self._release_at = min(self._release_at, now + _TRACKER_S)

    def _prune(self) -> None:
        wanted = [peer.released for peer in self._peers.values() if peer.is_started]
        if self._unclaimed:  # a rank that attaches for the first time gets all from the first
            wanted.append(0)
        for number in range(self._least, min([*wanted, self._published])):
            del self._messages[number]
            self._filed.pop(number, None)
            self._least = number + 1


# --- the reader's side ----------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A message: its stream, or (stream, list of buffers), and what is to be counted."""

    number: int
    content: Any
    n_bytes: int
    oob_buffers: int
    oob_bytes: int

    @classmethod
    def of(cls, number: int, stream: Any, buffers: list[Any]) -> Arrived:
        """From its parts."""
        oob_bytes = sum(map(len, buffers))
        content = stream if type(stream) is bytes and not buffers else (stream, buffers)
        return cls(number, content, len(stream) + oob_bytes, len(buffers), oob_bytes)


class Relay(Protocol):
    """The ring of this host that one reader, whose I/O thread uses it, feeds for the others."""

    @property
    def descriptor(self) -> int:
        """What is readable when there is something to tend."""

    def tend(self) -> None:
        """Answer the readers of this host, and see who has left or died; never waits."""

    def pass_on(self, number: int, stream: Any, buffers: list[Any]) -> None:
        """Put a message into the ring; never waits."""

    def close(self) -> None:
        """Tell the readers that nothing follows."""


class Relayed(Protocol):
    """What another reader of this host passes on to this one, whose end uses it."""

    @property
    def session(self) -> int:
        """The session of the reader that relays."""

    @property
    def is_ahead(self) -> bool:
        """Whether its next message is a later one, and those before come from the writer."""

    @property
    def lag(self) -> int:
        """How many messages are in the ring and not released."""

    def take(self, number: int) -> Arrived | None:
        """The message with this number, or None if it is not there; what is before it is over."""

    def release(self) -> None:
        """Give back the message that was taken."""

    def wait(self, sleep_ns: int) -> None:
        """Wait for the next one."""

    def nudge(self) -> None:
        """End the present wait or else the next one, from any thread."""

    def is_over(self) -> bool:
        """Whether nothing more will come from there."""

    def close(self) -> None:
        """Leave the ring."""


class RemoteRing:
    """
    The messages that have arrived, in the form of the ring's reader, for the reader's end.

    Attributes:
        ack: called when messages are to be acknowledged.
        relayed: where messages come from too, if another reader of this host passes them on.
    """

    def __init__(self) -> None:
        self.ack: Callable[[], None]
        self.ack_from = 0  # the number from which on a release is acknowledged at once
        self.event = _Event()  # set by the I/O thread whenever something has changed
        self._is_stopped = False
        self.messages = self.bytes = self.oob_buffers = self.oob_bytes = self.waits = 0
        self.wait_s = 0.0
        self.next_sequence = 0  # stored at first by the I/O thread, then by the reader's end
        self.relayed: Relayed | None = None
        self._taken: Arrived | None = None
        # Stored by the I/O thread.
        self.arrived: collections.deque[Arrived] = collections.deque()
        self.n_arrived = 0  # the number of the message that comes next from the writer itself
        self.n_all: int | None = None  # how many messages there are, once the writer has closed
        self.failure: str | None = None  # why it has, if it failed
        self.is_struck = False

    def begin(self, start: int) -> None:
        """Begin with message number `start`, as the I/O thread has done."""

    def try_take(self) -> Any:
        """
        The next message, or None if there is none or this attachment is over.

        Returns the stream, or (stream, list of buffers). A message that is taken and not released
        is taken again.
        """
        arrived = self.arrived
        while arrived and arrived[0].number < self.next_sequence:  # it came both ways
            arrived.popleft()
        if self.is_struck or self._is_stopped:
            return None
        if arrived:
            taken: Arrived | None = arrived[0]
        else:
            taken = self.relayed.take(self.next_sequence) if self.relayed is not None else None
        self._taken = taken
        return None if taken is None else taken.content

    def release(self) -> None:
        """Acknowledge the message that was taken."""
        message, self._taken = self._taken, None
        assert message is not None
        self.next_sequence = message.number + 1
        self.messages += 1
        self.bytes += message.n_bytes
        self.oob_buffers += message.oob_buffers
        self.oob_bytes += message.oob_bytes
        if self.arrived and self.arrived[0] is message:
            self.arrived.popleft()
        elif self.relayed is not None:
            self.relayed.release()
        if message.n_bytes >= _ALIASED_BYTES:  # the writer wants its memory back
            self.ack_from = 0
        if self.next_sequence >= self.ack_from:
            self.ack()

    def wait(self, spin_ns: int, sleep_ns: int) -> bool:
        """Sleep until something changes; returns early for a signal, never for a nudge."""
        start = time.monotonic()
        relayed = self.relayed
        if relayed is not None and not (relayed.is_ahead or self.arrived):
            relayed.wait(spin_ns + sleep_ns)
        else:
            self.event.clear()
            if not (self.arrived or self.is_struck or self.is_closing or self._is_stopped):
                self.event.wait((spin_ns + sleep_ns) / 1e9)
        self.waits += 1
        self.wait_s += time.monotonic() - start
        return False

    def notify(self) -> None:
        """End the present wait or else the next one, from any thread."""
        self.event.set()
        relayed = self.relayed
        if relayed is not None:
            relayed.nudge()

    @property
    def n_reached(self) -> int:
        """The number of the first message that has neither arrived nor been released."""
        return max(self.n_arrived, self.next_sequence)

    @property
    def lag(self) -> int:
        """How many messages have arrived and are not released."""
        relayed = self.relayed
        in_ring = 0 if relayed is None or relayed.is_ahead else relayed.lag
        return self.n_reached - self.next_sequence + in_ring

    @property
    def is_closing(self) -> bool:
        """Whether the writer has closed and all its messages have arrived."""
        return self.n_all is not None and self.n_reached >= self.n_all

    def stop(self) -> None:
        """End this end's waits, from any thread."""
        self._is_stopped = True
        self.notify()

    def leave(self) -> None:
        """Done by `RemoteReader.close`."""


class RemoteReader(_Link):
    """
    The reader's side of a connection, in the form of the control socket's, and its I/O.

    The methods without an underscore are for the reader's end, under its lock.

    Args:
        endpoint: the address of the writer.
        keys: of the queue, or None with security "none".
        token: the secret to show.
        rank: the rank to claim.

    Raises:
        WriterLost: the host's name has no address.
        ValueError: it can't be a name.
    """

    offered = None  # there is no segment to map

    def __init__(self, *, endpoint: str, keys: CurveKeys | None, token: str, rank: int) -> None:
        self._endpoint, self._keys, self._token, self._rank = endpoint, keys, token, rank
        host, self.port = _split(endpoint)
        try:
            self._address = _address_of(host, self.port)
        except OSError as error:
            raise WriterLost(
                f"rank {rank} found no writer at {endpoint}: {error.strerror}"
            ) from error
        except UnicodeError as error:
            raise ValueError(f"endpoint = {endpoint!r} is not allowed: {error}") from error
        self.writer_pid: str | None = None
        self.start: int | None = None
        self.session = secrets.randbits(64)  # what names this attachment
        self._failure: tuple[type[ShmcastError], str] | None = None
        self.failure: str | None = None  # of this end, which the writer is to be told
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes]
        self._connect_at = 0.0
        self._give_up_at = 0.0  # of the present connection, until the writer has been heard
        self._hello_at = 0.0
        self._refusal: type[ShmcastError] = WriterLost
        self._cut_at: float | None = time.monotonic()
        self._was_heard = False  # the writer, over any connection
        self._has_ended = False  # the present connection
        self._n_published = 0  # by the writer when the present connection began
        # How many ended one after the other over which a message was due, and none arrived.
        self._n_vain_cuts = self._arrived_before = 0
        self._leave_by = math.inf  # when to stop waiting for the answer to LEAVE over it
        self._acked = 0  # over it
        self._ack_at = math.inf
        self.sizes: RingSizes | None = None  # of the writer's ring, once admitted
        self._ack_every = 1  # half of its chunks
        self._has_said_done = False  # over it
        self._relay: Relay | None = None
        self._tend_at = 0.0
        # Stored by the reader's end; the I/O thread takes it out.
        self._new_relay: Relay | None = None
        self._told: Relayed | None = None  # where the writer takes this end to get its messages
        self.ring = RemoteRing()  # before the loop counts this end: it may find no descriptor
        self._loop = _Loop.enter()
        self.ring.ack = self._loop.wake
        self._loop.add(self)

    # --- for the reader's end ---

    @property
    def is_admitted(self) -> bool:
        """Whether the handshake is done."""
        return self.start is not None

    def wait(self, timeout_s: float) -> None:
        """Wait until something changes."""
        self.ring.event.clear()
        if not self.is_admitted and self._failure is None:
            self.ring.event.wait(timeout_s)

    def step(self) -> None:
        """
        See how far the handshake is.

        Raises:
            ProtocolError: the writer refused the rank, or is no shmcast peer of this version.
            AuthenticationError: one of the two did not show the right key or token.
            QueueClosed: the writer closed before it admitted this reader.
            WriterLost: nobody answers.
        """
        self._raise_failure()
        if not self.is_admitted and self._is_cut_for_long:
            raise self._refusal(
                f"rank {self._rank} found no writer at {self._endpoint}: "
                + (
                    "it has closed or died, or can't be reached from here"
                    if self._refusal is WriterLost
                    else "somebody is there who does not have the queue's keys"
                )
            )

    def is_writer_dead(self) -> bool:
        """Whether the connection was cut and could not be made again."""
        if not self.ring.lag:
            self._raise_failure()
        return self._is_cut_for_long

    def _raise_failure(self) -> None:
        if self._failure is not None:
            error_class, text = self._failure
            raise error_class(text)

    @property
    def _is_cut_for_long(self) -> bool:
        cut_at = self._cut_at
        return cut_at is not None and time.monotonic() - cut_at > RESUME_S

    def collect_files(self) -> None:
        """There are none."""

    @property
    def is_relay(self) -> bool:
        """Whether what is received is passed on."""
        return self._relay is not None or self._new_relay is not None

    def pass_on_to(self, relay: Relay) -> None:
        """Put what is received from now on into this host's ring too, which is closed here."""
        self._new_relay = relay
        self._loop.wake()

    def take_from(self, relayed: Relayed | None) -> None:
        """Have what follows sent to the relay alone; or, with None, what is missing to this end."""
        self.ring.relayed = relayed
        self._loop.wake()

    def say_failed(self, text: str) -> None:
        """Have the writer told why this reader can't attach or is about to leave."""
        self.failure = text

    def close(self) -> None:
        """Leave; never waits."""
        if not self.is_closing:
            self.is_closing = True
            self._loop.wake()

    def close_descriptors(self) -> None:
        """Nothing: the I/O thread's are closed after a fork."""

    # --- in the I/O thread ---

    def run(self, now: float, ready: dict[Any, int]) -> float:
        """Connect, take frames, acknowledge what was taken."""
        self._tend_relay(now, ready)
        if self._socket is None:
            if self.is_closing and not self._has_to_leave:
                self._end()
            elif self._failure is None and not self.ring.is_closing:
                if now >= self._connect_at:
                    self._try_connect(now)
                if self._socket is None:
                    return self._connect_at
            return now + self._pause_s
        if self._monitor in ready:
            for event in _monitored(self._monitor):
                self._take_event(event)
        # What arrived before the end of the connection counts.
        while self._has_ended or self._socket in ready:
            some = list(_received(self._socket, copy=False))
            for frames in some:
                self._try_take_frames(frames)
            if len(some) < _BATCH or not self._has_ended:
                break
        self._acknowledge(now)
        if self.is_closing and self._has_left(now):
            self._disconnect(linger_ms=1000)
            self._end()
        elif self._failure is not None:
            self._disconnect()
        elif self._has_ended or (self._cut_at is not None and now >= self._give_up_at):
            self._cut(now)
            return self._connect_at
        elif not self.is_admitted:
            if now >= self._hello_at:
                self._greet(now)
        else:
            self._say_what_is_due(now)
        return min(self._ack_at, now + self._pause_s)

    def _say_what_is_due(self, now: float) -> None:
        relayed = self.ring.relayed
        if self._told is not None and self._told is not relayed:
            self._greet(now)
        if relayed is not None and self._told is None:
            self._told = relayed
            self._say(_VIA, relayed.session)
        if self.ring.is_closing and not self._has_said_done:
            self._has_said_done = True
            self._say(_DONE)

    def _tend_relay(self, now: float, ready: dict[Any, int]) -> None:
        if self._new_relay is not None:
            self._relay, self._new_relay = self._new_relay, None
            self._loop.poller.register(self._relay.descriptor, zmq.POLLIN)
            self._tend_at = now
        relay = self._relay
        if relay is None:
            return
        is_over = self._failure is not None or self.ring.is_struck or self._is_cut_for_long
        if is_over or self.is_closing:
            self._drop_relay()
        elif relay.descriptor in ready or now >= self._tend_at:
            self._tend_at = now + _BEAT_S
            self._use_relay(relay.tend)

    def _use_relay(self, use: Callable[[], None]) -> None:
        try:
            use()
        except Exception:
            _log.exception("rank %d can't relay to the readers of its host", self._rank)
            self._drop_relay()

    def _drop_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            self._loop.poller.unregister(relay.descriptor)
            relay.close()
        if self._new_relay is not None:  # not looked at yet
            self._new_relay.close()

    @property
    def _pause_s(self) -> float:
        return _RETRY_S if self.is_closing else _BEAT_S

    def _has_left(self, now: float) -> bool:
        """Say that this end leaves; whether the writer has heard it, or is given up."""
        is_struck = self.ring.is_struck
        is_connected = not (self._has_to_leave or self._has_ended or is_struck)
        if is_connected and self._leave_by == math.inf:
            self._say(_LEAVE)  # its answer is an eviction
            self._leave_by = now + _GOODBYE_S
        return not self._has_to_leave and (
            is_struck
            or self._has_ended
            or not self._was_heard
            or self._failure is not None
            or self.ring.is_closing
            or now >= self._leave_by
        )

    @property
    def _has_to_leave(self) -> bool:
        """Whether the writer waits for this end, and has to be reached again to hear of its end."""
        return (
            self._was_heard
            and (self._has_ended or self._cut_at is not None)
            and not self._is_cut_for_long
            and self._failure is None
            and not (self.ring.is_closing or self.ring.is_struck)
        )

    def _acknowledge(self, now: float) -> None:
        """Acknowledge what was released, at once or together with what comes a little later."""
        ring = self.ring
        if (
            ring.relayed is not None  # then nothing arrives here that would set the time
            and self._ack_at == math.inf
            and 0 < ring.ack_from <= ring.next_sequence < self._acked + self._ack_every
        ):
            self._ack_at, ring.ack_from = now + _ACK_S, self._acked + self._ack_every
        if ring.next_sequence >= ring.ack_from or now >= self._ack_at or self.is_closing:
            if ring.next_sequence > self._acked:
                self._acked = ring.next_sequence
                self._say(_ACK, self._acked)
            # Who was not released in time is acknowledged when it is.
            self._ack_at = math.inf
            is_waited_for = ring.relayed is not None or ring.lag
            ring.ack_from = self._acked + (1 if is_waited_for else self._ack_every)
            if ring.next_sequence >= ring.ack_from:  # released before that was stored
                self._loop.wake()
        elif self._ack_at == math.inf and ring.n_arrived > self._acked:
            self._ack_at = now + _ACK_S

    def abort(self, error: str | None, linger_ms: int = 0) -> None:
        """Close at once."""
        if error is not None:
            self._fail(ShmcastError, error)
        if self._socket is not None:
            self._disconnect(linger_ms)
        self._end()

    def _end(self) -> None:
        self._drop_relay()  # `close` may have come since it was looked at
        self.is_done = True

    def owns(self, found: net.socket) -> bool:
        """Whether it is connected to the writer's address."""
        return bool(found.getpeername()[:2] == (self._address, self.port))

    def _try_connect(self, now: float) -> None:
        try:
            self._connect(now)
        except (OSError, zmq.ZMQError) as error:  # this process may be out of descriptors
            _log.info("rank %d can't connect to %s: %s", self._rank, self._endpoint, error)
            self._connect_at = now + _RETRY_S

    def _connect(self, now: float) -> None:
        _check_descriptors()
        with contextlib.ExitStack() as undo:
            socket = self._loop.context.socket(zmq.DEALER)
            undo.callback(socket.close, 0)
            _set_common_options(socket, self._address)
            socket.reconnect_ivl = -1  # each connection has a socket of its own
            if self._keys is not None:
                socket.curve_serverkey = self._keys.server_public.encode()
                socket.curve_publickey = self._keys.client_public.encode()
                socket.curve_secretkey = self._keys.client_secret.encode()
            monitor = _monitor_of(socket, _DISCONNECTED | zmq.EVENT_CLOSED | _FAILURES)
            undo.callback(monitor.close, 0)
            undo.callback(socket.disable_monitor)
            socket.connect(_join(self._address, self.port))
            self._loop.watch(socket, monitor)
            undo.pop_all()
        self._socket, self._monitor = socket, monitor
        self._give_up_at = now + _GREETING_S
        self._has_ended, self._acked, self.ring.ack_from = False, 0, 0
        self._leave_by = math.inf
        self._greet(now)

    def _greet(self, now: float) -> None:
        self._hello_at = now + _BEAT_S
        kind = _RESUME if self.is_admitted else _HELLO
        self._told, self._has_said_done = None, False
        self.ring.n_arrived = self.ring.n_reached
        self._say(kind, self.ring.n_arrived, self._token.encode() + _who())

    def _say(self, kind: int, number: int = 0, text: bytes = b"") -> None:
        assert self._socket is not None
        head = _HEADER.pack(_MAGIC, kind, self._rank, self.session, number, len(text))
        try:
            self._socket.send(head + text, zmq.NOBLOCK)
        except zmq.Again:  # the connection has ended, and there is no other one
            self._has_ended = True

    def _take_event(self, event: int) -> None:
        """Each of them says that the connection has ended, and some say why."""
        self._has_ended = True
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._fail(AuthenticationError, f"the writer at {self._endpoint} refused the keys")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._refusal = ProtocolError
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._refusal = AuthenticationError
        elif event == zmq.EVENT_CLOSED:  # nobody listens
            self._refusal = WriterLost

    def _cut(self, now: float) -> None:
        self._disconnect()
        was_heard = self._cut_at is None
        self._cut_at = now if self._cut_at is None else self._cut_at
        ring = self.ring
        if ring.n_arrived > self._arrived_before:
            self._n_vain_cuts, self._arrived_before = 0, ring.n_arrived
        if was_heard and ring.relayed is None and ring.n_reached < self._n_published:
            self._n_vain_cuts += 1
        self._connect_at = now if was_heard and self._n_vain_cuts < 2 else now + _RETRY_S
        if self._n_vain_cuts == _MOST_VAIN_CUTS:
            self._fail(
                ShmcastError,
                f"rank {self._rank} can't receive message {ring.n_arrived}: each time the "
                f"connection ends; this process may be short of memory (RLIMIT_AS, RLIMIT_DATA)",
            )
        self.ring.notify()

    def _disconnect(self, linger_ms: int = 0) -> None:
        socket, self._socket = self._socket, None
        assert socket is not None
        socket.disable_monitor()
        self._loop.drop(self._monitor)
        self._loop.drop(socket, linger_ms=linger_ms)

    def _fail(self, error_class: type[ShmcastError], text: str) -> None:
        self._failure = self._failure or (error_class, text)
        self.ring.notify()

    def _try_take_frames(self, frames: list[zmq.Frame]) -> None:
        try:
            self._take(frames)
        except ProtocolError as error:
            self._fail(ProtocolError, f"the peer at {self._endpoint}: {error}")

    def _take(self, frames: list[zmq.Frame]) -> None:
        header = _unpack(frames)
        if header.session not in (self.session, 0):
            raise ProtocolError("a frame is for another session")
        if self._failure is not None:
            return
        self._cut_at, self._was_heard = None, True
        kind, ring = header.kind, self.ring
        if kind == _MESSAGE and self.is_admitted:
            self._take_message(header.number, frames)
            return
        body = bytes(frames[0].buffer[_HEADER.size :])
        text = body.decode("utf-8", "replace")
        if kind == _BEAT:
            self._say(_BEAT)
        elif kind == _ADMISSION:
            numbers, who = body[: _ADMITTED.size], body[_ADMITTED.size :]
            if len(numbers) < _ADMITTED.size:
                raise ProtocolError("an admission came without the sizes of the ring")
            *sizes, self._n_published = _ADMITTED.unpack(numbers)
            if self.start is None:
                self.sizes = RingSizes(*sizes)
                self._ack_every = max(1, self.sizes.n_chunks // 2)
                self.writer_pid = who.decode("utf-8", "replace")
                ring.n_arrived = ring.next_sequence = self._acked = header.number
                self.start = header.number
        elif kind == _CLOSING:
            if self.is_admitted:
                ring.n_all = header.number
            else:
                self._fail(QueueClosed, f"the writer closed before it admitted rank {self._rank}")
        elif kind == _EVICTION:
            ring.is_struck = True
        elif kind == _REFUSAL:
            raise ProtocolError(text)
        elif kind == _DENIAL:
            self._fail(AuthenticationError, text)
        else:
            raise ProtocolError(f"a frame of kind {kind} is out of turn")
        ring.notify()

    def _take_message(self, number: int, frames: list[zmq.Frame]) -> None:
        ring, sizes = self.ring, self.sizes
        assert sizes is not None  # it is admitted
        if number < ring.n_arrived:  # sent again after a cut
            return
        if number - ring.next_sequence >= sizes.n_chunks:
            raise ProtocolError(f"message {number} came outside the window of {sizes.n_chunks}")
        if number > ring.n_reached:
            raise ProtocolError(f"message {number} came instead of {ring.n_arrived}")
        stream: Any
        if len(frames) == 1:
            stream, buffers = bytes(frames[0].buffer[_HEADER.size :]), []
        else:
            stream = frames[1].buffer
            buffers = [
                frame.buffer if len(frame) >= _ALIASED_BYTES else bytearray(frame.buffer)
                for frame in frames[2:]
            ]
        relay = self._relay
        if relay is not None:  # first, since whoever gets the buffers may write to them
            self._use_relay(lambda: relay.pass_on(number, stream, buffers))
        ring.arrived.append(Arrived.of(number, stream, buffers))
        ring.n_arrived = number + 1
        ring.notify()
