"""The writer's sockets: the peers, what is on its way to them, and strangers."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import enum
import hmac
import ipaddress
import logging
import math
import secrets
import signal
import socket as net
import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import attrs
import zmq

from shmcast._ring import RingReader
from shmcast.control import FailedAttempt
from shmcast.errors import ConfigError, ProtocolError
from shmcast.remote.addresses import addresses_of, is_wildcard, join, split
from shmcast.remote.frames import (
    ADMITTED,
    ALIASED_BYTES,
    HEADER,
    MAGIC,
    MOST_ASKED_BYTES,
    MOST_TEXT_BYTES,
    VOID,
    Header,
    Kind,
    RingSizes,
    clean,
    name_of,
    pack,
    unpack,
    who,
)
from shmcast.remote.loop import (
    BATCH,
    Event,
    Link,
    Loop,
    allow,
    has_come,
    monitored,
    set_common_options,
)

__all__ = ["Connection", "CurveKeys", "Message", "Peer", "Seat", "State", "WriterLink"]

_log = logging.getLogger("shmcast.remote")

_MOST_UNPROVED: Final = 64  # connections, besides one for each rank, that have shown no key
_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
_DROP_ALL: Final = struct.pack("=HBBI", 0x06, 0, 0, 0)  # a filter of one instruction: return 0
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class CurveKeys(NamedTuple):
    """The keys of one queue, in ZeroMQ's text form: the writer's and the readers'."""

    server_public: str
    client_public: str
    client_secret: str


class Message(NamedTuple):
    """What was published; its memory stays as it is until it is released."""

    stream: memoryview
    buffers: list[memoryview]


class Seat(NamedTuple):
    """What an admitted peer has in the ring."""

    place: RingReader
    start: int  # the number of its first message


class State(enum.Enum):
    """How far an attachment is. A cut changes nothing here."""

    CLAIMED = enum.auto()  # it has asked for its rank
    STARTED = enum.auto()  # it is admitted, and the messages are sent to it
    LOST = enum.auto()  # it did not come back in time, or failed
    OVER = enum.auto()  # it has left, or was refused or evicted


@attrs.define(eq=False)
class Connection:
    """One connection of a peer, thrown away with that."""

    identity: bytes
    next_number: int = 0  # to send
    is_told: bool = False  # that nothing follows
    has_heard_of_the_end: bool = False  # of this process
    via: Peer | None = None  # who relays to it what comes from this number on
    via_from: int = 0
    # The messages that were sent over it, with what tells that ZeroMQ has let go of their memory.
    sent: collections.deque[tuple[int, list[zmq.MessageTracker]]] = attrs.field(
        factory=collections.deque
    )


@attrs.define(eq=False)
class Peer:
    """
    One attachment of a remote rank; or its claim, until it is admitted.

    Stored under the link's lock, but for `seat` and `is_admitted`, which are the writer's end's.
    """

    rank: int
    session: int
    pid: str  # with the host that it is on
    claimed_at: float
    heard_at: float
    state: State = State.CLAIMED
    connection: Connection | None = None
    known_as: bytes = b""  # by its last connection: what it said before the end is read after it
    cut_at: float | None = None
    fault: str | None = None  # what it did against the protocol
    failure: str | None = None  # the error with which it left
    is_leaving: bool = False  # its process ends
    asked_at: float = -math.inf  # when it was last asked whether it is there, for another claim
    is_asked: bool = False
    done_number: int = -1  # how many messages had arrived when it was told that nothing follows
    sent_number: int = 0  # the first that was never sent to it
    acked: int = 0
    # Those of earlier connections that ZeroMQ has not let go of.
    unfinished: list[zmq.MessageTracker] = attrs.field(factory=list)
    seat: Seat | None = None
    is_admitted: bool = False

    @property
    def released(self) -> int:
        """How many messages it has given back; once started."""
        assert self.seat is not None
        return self.seat.place.next_sequence


class WriterLink(Link):
    """
    The writer's sockets. Every method is called under the lock.

    A signal may end `publish` at any line, since its owner calls that; the thread's methods run on.

    Args:
        loop: of this process; the link is added to it by the writer.
        bind: the address to bind.
        security: "curve" or "none".
        ranks: the ranks that may attach.
        token: what a reader must show.
        sizes: the settings of the ring.

    Raises:
        ConfigError: the address can't be bound, or is a wildcard without keys.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        bind: str,
        security: str,
        ranks: tuple[int, ...],
        token: str,
        sizes: RingSizes,
    ) -> None:
        super().__init__(loop)
        self.keys: CurveKeys | None = None
        self.claimed = Event()  # set when there is something for the writer's end to see
        self.claims: collections.deque[Peer] = collections.deque()
        # What the writer's end wants done and does not wait for.
        self.commands: collections.deque[Callable[[], object]] = collections.deque()
        # The bytes of those messages on their way that are in files, by number.
        self.filed: dict[int, int] = {}
        self.failed_attempts: dict[int, FailedAttempt] = {}  # by rank
        self._ranks, self._token, self._sizes = ranks, token.encode(), sizes
        self._peers: dict[int, Peer] = {}  # by session
        self._by_identity: dict[bytes, Peer] = {}
        self._messages: dict[int, Message] = {}
        self._least = 0  # the first message that is kept
        self.published = 0
        self._unclaimed = set(ranks)
        self._beat_at = 0.0
        self._release_at = self._lose_at = math.inf
        self._is_ending = False  # `is_closing`, in the order of the messages
        self._last_word = b""  # the error that the readers are to hear, when all was read
        self._progress_at = 0.0
        self._n_at_exit: int | None = None  # how many were published when the process began to end
        # Of what a signal may have cut off.
        self._is_sending = self._is_receiving = False
        self._is_muted = True  # the thread does not watch the socket
        self._is_driven = False  # by its owner, since the thread looked last
        self._is_behind = False  # whether the thread has to send what `publish` could not
        # Strangers: when each unproved connection came, at the latest.
        self._unproved: collections.deque[float] = collections.deque()
        self._is_accepting = True
        self._has_new_cut = False
        self._bind(bind, security)

    # --- the sockets ---

    def _bind(self, bind: str, security: str) -> None:
        host, port = split(bind)
        refusal = f"bind = {bind!r} is not allowed"
        try:
            self._address = (
                "0.0.0.0" if host == "*" else addresses_of(host, port, net.AI_PASSIVE)[0]  # noqa: S104  # refused below, if without keys
            )
        except OSError as error:
            raise ConfigError(f"{refusal}: {error.strerror}") from error
        except UnicodeError as error:
            raise ConfigError(f"{refusal}: {error}") from error
        self._is_wildcard = is_wildcard(self._address)
        if host not in (self._address, "localhost") and (
            ipaddress.ip_address(self._address).is_loopback
        ):
            _log.warning("bind = %r is %s here, which other hosts can't reach", bind, self._address)
        if security == "none" and self._is_wildcard:
            raise ConfigError(
                f"{refusal} with security = 'none': anyone could attach on every interface; "
                f"allowed is one address of this host"
            )
        if security == "curve" and not zmq.has("curve"):
            raise ConfigError("security = 'curve' needs a pyzmq that has CURVE")
        with contextlib.ExitStack() as undo:
            try:
                self._listener = _new_listener(
                    self._address, port, len(self._ranks) + _MOST_UNPROVED
                )
                undo.callback(self._listener.close)
            except OSError as error:
                raise ConfigError(
                    f"{refusal}: {error.strerror}; allowed is a free port at an address of "
                    f"this host"
                ) from error
            self.port = self._listener.getsockname()[1]
            self._new_socket(security)
            undo.callback(self._close_sockets)
            # A duplicate, since it goes with ZeroMQ's socket.
            self._socket.set(zmq.USE_FD, self._listener.dup().detach())
            self._socket.bind(join(self._address, self.port))
            undo.pop_all()
        # A wildcard is no address for others; the name is what they can resolve, if anything.
        self.endpoint = join(net.gethostname() if self._is_wildcard else host, self.port)

    def _new_socket(self, security: str) -> None:
        socket = self._socket = self.loop.context.socket(zmq.ROUTER)
        self._monitor = _monitor_of(
            socket,
            zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILURES,
        )
        try:
            set_common_options(socket, self._address, self)
            # A stranger may send much, and read nothing.
            socket.rcvhwm = 1000
            socket.sndhwm = 4 * self._sizes.n_chunks + 1000
            socket.router_mandatory = True
            socket.maxmsgsize = MOST_ASKED_BYTES
            domain = f"shmcast-{secrets.token_hex(8)}"
            if security == "curve":
                server_public, server_secret = zmq.curve_keypair()
                client_public, client_secret = zmq.curve_keypair()
                self.keys = CurveKeys(
                    server_public.decode(), client_public.decode(), client_secret.decode()
                )
                socket.curve_server = True
                socket.curve_secretkey = server_secret
            else:
                socket.plain_server = True
            key = self.keys.client_public if self.keys else None
            allow(self.loop, domain, key=key, token=self._token)
            socket.zap_domain = domain.encode()
            self._descriptor = int(socket.FD)
        except BaseException:
            self._close_sockets()
            raise

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        for socket in (self._monitor, self._socket):
            socket.close(0)

    def _accept(self, *, is_on: bool) -> None:
        """
        Let connections in, or have the kernel pass over what asks for one; who is in, stays.

        ZeroMQ can't do so: when it unbinds, it ends all connections that it has accepted.
        """
        self._is_accepting = is_on
        if is_on:
            self._listener.setsockopt(net.SOL_SOCKET, _SO_DETACH_FILTER, 0)
        else:
            program = ctypes.create_string_buffer(_DROP_ALL)
            filters = struct.pack("HP", 1, ctypes.addressof(program))
            self._listener.setsockopt(net.SOL_SOCKET, _SO_ATTACH_FILTER, filters)

    def begin(self) -> None:
        """Watch the sockets."""
        self.loop.watch(self, self._descriptor)
        self.loop.watch(self, int(self._monitor.FD))
        self._is_muted = False

    def owns(self, found: net.socket) -> bool:
        """Whether it listens on the writer's port, or was accepted there."""
        address, port = found.getsockname()[:2]
        return bool(port == self.port and (self._is_wildcard or address == self._address))

    def abort(self, error: str) -> None:
        """Close at once; the readers see a cut."""
        for peer in self._peers.values():
            peer.fault = error
        self._finish(0)

    def _finish(self, linger_ms: int) -> None:
        # The credentials stay: who comes while the socket closes shall find nobody, no wrong key.
        self._socket.disable_monitor()
        self.loop.drop(self._monitor)
        self.loop.drop(self._socket, linger_ms=linger_ms)
        self._listener.close()
        # Their places keep the ring's memory.
        for kept in (self._messages, self._peers, self._by_identity, self.claims, self.commands):
            kept.clear()
        self.is_done = True
        if self.is_closing:
            self.claimed.close()

    # --- what the thread does ---

    def run(self, now: float) -> float:
        """Take commands and frames, send what is due, release what is done."""
        while self.commands:
            self.commands.popleft()()
        if self.loop.is_exiting and self._n_at_exit is None:
            self._n_at_exit, self._progress_at = self.published, now
        self._watch_strangers(now)
        is_all_read = self._receive(now)
        is_left = self._is_muted and not self._is_driven
        self._is_driven = False
        if is_left:
            self.loop.mute(self._descriptor, is_muted=False)
            self._is_muted = False
        if now >= self._beat_at:
            # A connection that has ended shows only when something is sent.
            self._beat_at, self._has_new_cut = now + self.timing.beat_s, False
            for peer in list(self._by_identity.values()):
                self._send(peer, Kind.BEAT)
        self._release_at = self._lose_at = math.inf
        for peer in list(self._peers.values()):
            self._serve_peer(now, peer, may_lose=is_all_read)
        self._prune()
        is_awaited = any(map(self._is_awaited, self._peers.values()))
        is_given_up = now >= self._progress_at + self.timing.linger_s
        self.is_settled = not is_awaited or is_given_up
        if self._is_ending and self.is_settled:
            if is_awaited:
                _log.warning(
                    "the writer at %s closed, and %s did not take everything in time",
                    self.endpoint,
                    ", ".join(
                        f"rank {peer.rank} (pid {peer.pid})"
                        for peer in self._peers.values()
                        if self._is_awaited(peer)
                    ),
                )
            self._finish(500)
        if not self.is_done and has_come(self._socket):
            return now  # its descriptor does not tell any more
        look_at = now + self.timing.owner_s if self._is_muted else math.inf
        return min(self._beat_at, self._release_at, self._lose_at, look_at)

    def _receive(self, now: float) -> bool:
        """Take the frames that have come; whether these were all."""
        if self._is_receiving:
            self._ask_again()
        for _ in range(BATCH):
            if not has_come(self._socket):
                return True
            self._is_receiving = True
            identity, *frames = self._socket.recv_multipart()
            self._take(now, identity, frames)
            self._is_receiving = False
        return False

    def _ask_again(self) -> None:
        """Have all peers say again what a signal made of a call that received."""
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK)
        self._is_receiving = False
        for peer in list(self._by_identity.values()):
            self._send(peer, Kind.REPEAT)

    def _watch_strangers(self, now: float) -> None:
        """See which connections have come and ended, and bound those that have proved nothing."""
        was_failure = False
        for event in monitored(self._monitor):
            kind = event["event"]
            if kind == zmq.EVENT_ACCEPTED:
                self._unproved.append(now)
            elif kind == zmq.EVENT_DISCONNECTED:
                # One of a stranger follows a failure, and concerns nobody.
                if not was_failure and not self._has_new_cut:
                    self._has_new_cut = True
                    self._beat_at = min(
                        self._beat_at,
                        max(now, self._beat_at - self.timing.beat_s + self.timing.storm_s),
                    )
            elif self._unproved:
                self._unproved.popleft()
            was_failure = bool(kind & _FAILURES)
        # Events are lost when very many come: what is older has ended.
        while self._unproved and self._unproved[0] < now - self.timing.greeting_s - 1:
            self._unproved.popleft()
        most = len(self._ranks) + _MOST_UNPROVED
        if self._is_accepting and len(self._unproved) > most:
            _log.warning(
                "the writer at %s lets nobody in for a moment: %d connections have shown no key",
                self.endpoint,
                len(self._unproved),
            )
            self._accept(is_on=False)
        elif not self._is_accepting and len(self._unproved) <= most // 2:
            self._accept(is_on=True)

    # --- the writer's end calls these, by a command or under the lock ---

    def publish(self, number: int, message: Message) -> None:
        """Keep a message that was published, and send it to all who have what comes before it."""
        # resumable: whoever is interrupted here is called again with the same number, or the
        # thread sends what is missing with its next beat.
        if number < self.published:  # a signal had it handed on twice
            if number < self._least:
                self.filed.pop(number, None)
            return
        self._messages[number] = message
        self.published = number + 1
        self._is_driven = True
        if not self._is_muted:
            self._is_muted = True
            self.loop.mute(self._descriptor, is_muted=True)
            self.due_at = 0.0
            self.loop.wake()
        for peer in self._peers.values():
            connection = peer.connection
            if connection is None or connection.next_number != number:
                self._is_behind = self._is_behind or peer.state is State.STARTED
            elif peer.state is State.STARTED:
                if connection.via is not None and number >= connection.via_from:
                    connection.next_number = number + 1
                elif not self._send_message(peer, connection):
                    self._is_behind = True
                    continue
                peer.sent_number = max(peer.sent_number, connection.next_number)
        if has_come(self._socket):
            self._receive(self.loop.now)
            for peer in self._peers.values():
                if peer.state is State.STARTED:
                    self._release(self.loop.now, peer)
        if self._is_behind:
            self._is_behind = False
            self.ask()

    def leave_to_thread(self) -> None:
        """Have the thread receive from now on, since the owner sleeps."""
        self._is_driven = False
        if self._is_muted:
            self.ask()

    def start(self, peer: Peer) -> None:
        """Tell a peer that it is admitted, and from which message on."""
        seat = peer.seat
        assert seat is not None
        self._unclaimed.discard(peer.rank)
        if peer.state is State.OVER:  # it left just before it was taken in
            seat.place.leave()
            self.claimed.set()
            return
        connection = peer.connection
        if peer.state is State.CLAIMED:
            peer.state = State.STARTED
            self.failed_attempts.pop(peer.rank, None)
            peer.sent_number = peer.acked = seat.start
            if connection is not None:
                connection.next_number = seat.start
        numbers = ADMITTED.pack(*self._sizes, self.published)
        self._send(peer, Kind.ADMISSION, seat.start, numbers + who())

    def ask_for(self, holder: Peer, claimant: Peer) -> None:
        """See whether a holder is alive, and tell who claims its rank what it waits for."""
        now = self.loop.now
        if now < holder.asked_at + self.timing.beat_s:
            return
        holder.asked_at, holder.is_asked = now, True
        self._send(holder, Kind.BEAT)
        state = "does not answer" if holder.connection is not None else "is cut off"
        text = f"rank {holder.rank} is held by process {holder.pid}, which {state}"
        self._send(claimant, Kind.BEAT, text=text.encode())

    def forget(self, peer: Peer, kind: Kind, text: str = "") -> None:
        """End an attachment or refuse a claim, and say so."""
        self._send(peer, kind, text=text.encode())
        self._drop(peer)

    def begin_closing(self, error: bytes = b"") -> None:
        """Nothing follows; readers hear the error, if there was one, when they have all."""
        text = error[:MOST_TEXT_BYTES].decode("utf-8", "ignore")
        self._is_ending, self._last_word = True, text.encode()
        self._progress_at = self.loop.now
        for peer in list(self._peers.values()):
            if peer.state is State.CLAIMED:
                self._send(peer, Kind.CLOSING, text=self._last_word)

    # --- peers ---

    def _is_awaited(self, peer: Peer) -> bool:
        if peer.state is State.CLAIMED:
            return self._is_ending and peer.connection is not None and peer.done_number < 0
        if peer.state is not State.STARTED:
            return False
        if not self._is_ending:  # threads may go on to publish while the process ends
            return self._n_at_exit is None or peer.done_number < self._n_at_exit
        is_told = peer.connection is None or peer.connection.is_told
        return not (is_told and peer.done_number == self.published)

    def _drop(self, peer: Peer) -> None:
        peer.state = State.OVER
        self._remove(peer)

    def _remove(self, peer: Peer) -> None:
        self._peers.pop(peer.session, None)
        self._by_identity.pop(peer.known_as, None)
        self._disconnect(peer)

    def _disconnect(self, peer: Peer) -> None:
        connection = peer.connection
        if connection is not None:
            self._forget_sent(peer, connection)
            peer.connection = None

    @staticmethod
    def _forget_sent(peer: Peer, connection: Connection) -> None:
        while connection.sent:
            peer.unfinished += connection.sent[0][1]
            connection.sent.popleft()

    def _send(
        self,
        peer: Peer,
        kind: Kind,
        number: int = 0,
        text: bytes | memoryview = b"",
        *frames: zmq.Frame | memoryview,
    ) -> bool:
        """Send to a peer, unless its connection is found to have ended, or is full."""
        connection = peer.connection
        if connection is None:
            return False
        size_bytes = len(text) + sum(map(len, frames)) if frames else len(text)
        head = HEADER.pack(MAGIC, kind, peer.rank, peer.session, number, size_bytes) + text
        socket = self._socket
        try:
            self._end_cut_message()
            self._is_sending = True
            socket.send(connection.identity, zmq.SNDMORE | zmq.NOBLOCK)
            socket.send(head, zmq.SNDMORE if frames else 0)
            if frames:
                socket.send_multipart(frames, copy=False)
            self._is_sending = False
        except zmq.ZMQError as error:
            self._is_sending = False
            if error.errno == zmq.EHOSTUNREACH:
                self._disconnect(peer)
                peer.cut_at = self.loop.now
                self._is_behind = True
            elif error.errno != zmq.EAGAIN:  # a reader that is stopped for long has many beats due
                raise
            return False
        return True

    def _end_cut_message(self) -> None:
        """End what a signal has cut off, or what follows would be a part of it."""
        if self._is_sending:
            self._socket.send(VOID)
            self._is_sending = False

    def _take(self, now: float, identity: bytes, frames: list[Any]) -> None:
        peer = self._by_identity.get(identity)
        try:
            header = unpack(frames)
            if header.kind in (Kind.HELLO, Kind.RESUME):
                self._greet(now, identity, header, frames[0][HEADER.size :])
                return
            if peer is None and header.session in self._peers:  # a signal lost its greeting
                self._answer(identity, Kind.REPEAT, "", header.session)
                return
            if peer is None or header.session != peer.session or header.rank != peer.rank:
                raise ProtocolError(f"a frame {name_of(header.kind)} is out of turn")
            self._take_from(now, peer, header, frames[0][HEADER.size :])
        except ProtocolError as error:
            _log.info("the writer at %s refused a peer: %s", self.endpoint, error)
            if peer is not None:
                peer.fault = f"broke the protocol: {error}"
                self.claimed.set()
            self._answer(identity, Kind.REFUSAL, str(error))

    def _answer(self, identity: bytes, kind: Kind, text: str, session: int = 0) -> None:
        """Answer somebody who is no peer, or has gone."""
        self._end_cut_message()
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart(
                [identity, pack(kind, 0, session, text=text.encode())], zmq.NOBLOCK
            )

    def _greet(self, now: float, identity: bytes, header: Header, body: bytes) -> None:
        kind, rank, session, number = header
        token, pid = body[: len(self._token)], body[len(self._token) :]
        if not hmac.compare_digest(token, self._token):
            self._answer(identity, Kind.DENIAL, "the token is not the one of this queue", session)
            return
        if rank not in self._ranks:
            text = f"rank {rank} is not one of {list(self._ranks)}"
            self._answer(identity, Kind.REFUSAL, text, session)
            return
        peer = self._peers.get(session)
        if peer is None:
            if kind == Kind.RESUME or self._is_ending:
                if kind == Kind.RESUME:
                    self._answer(identity, Kind.EVICTION, "", session)
                else:
                    self._answer(identity, Kind.CLOSING, self._last_word.decode(), session)
                return
            peer = self._peers[session] = Peer(rank, session, clean(pid), now, now)
        if peer.rank != rank:
            raise ProtocolError(f"the session of rank {peer.rank} is shown for rank {rank}")
        # Over the same connection too: what is sent again would be waited for in no order.
        # resumable: who is not answered greets again.
        self._disconnect(peer)
        self._by_identity.pop(peer.known_as, None)
        peer.known_as = identity
        self._by_identity[identity] = peer
        peer.connection = connection = Connection(identity)
        peer.heard_at, peer.cut_at, peer.is_leaving = now, None, False
        if peer.state is State.CLAIMED and self._is_ending:
            self._send(peer, Kind.CLOSING, text=self._last_word)
            return
        if peer.state is State.CLAIMED:
            self.claims.append(peer)
            self.claimed.set()
            self._send(peer, Kind.BEAT)  # there is a writer, though its end may be busy for long
            return
        assert peer.seat is not None
        if kind == Kind.HELLO:  # it has not heard that it is admitted
            number = peer.seat.start
        if not peer.acked <= number <= self.published:
            raise ProtocolError(f"it resumes at {number}, {self.published} were published")
        connection.next_number = number
        self.start(peer)

    def _take_from(self, now: float, peer: Peer, header: Header, body: bytes) -> None:
        peer.heard_at = self._progress_at = now
        if peer.is_asked:
            peer.is_asked = False
            self.claimed.set()
        connection = peer.connection
        if header.kind == Kind.ACK:
            if not peer.acked <= header.number <= self.published:
                raise ProtocolError(
                    f"it acknowledges {header.number}, {self.published} were published"
                )
            peer.acked = header.number
            if connection is not None:
                # It may have resumed at an earlier number, and taken more from a relay since.
                connection.next_number = max(connection.next_number, peer.acked)
        elif header.kind == Kind.DONE:
            peer.done_number = header.number
        elif header.kind == Kind.VIA:
            relay = self._peers.get(header.number)
            if (
                relay is not None
                and relay.state is State.STARTED
                and relay is not peer
                and connection is not None
            ):
                # It was admitted to the relay's ring before it said so, and the relay had received
                # no more by then than it has been sent now.
                connection.via, connection.via_from = relay, relay.sent_number
        elif header.kind == Kind.ENDING:
            peer.is_leaving = True
            self._send(peer, Kind.BEAT)
        elif header.kind == Kind.LEAVE:
            self._send(peer, Kind.EVICTION)
            self._leave(now, peer, clean(body, MOST_TEXT_BYTES))
        elif header.kind != Kind.BEAT:
            raise ProtocolError(f"a frame {name_of(header.kind)} is out of turn")

    def _leave(self, now: float, peer: Peer, error: str) -> None:
        if peer.state is State.STARTED and peer.seat is not None:
            peer.failure = error or None  # before it is seen to have left
            self._release(now, peer)
            peer.seat.place.leave()
        elif error:
            self.failed_attempts[peer.rank] = FailedAttempt(error, peer.pid)
        self._drop(peer)
        self.claimed.set()

    def _serve_peer(self, now: float, peer: Peer, *, may_lose: bool) -> None:
        if peer.state is State.OVER:
            self.forget(peer, Kind.EVICTION)
            return
        if peer.cut_at is not None:
            if peer.is_leaving:  # its process has ended, as it said
                self._leave(now, peer, "")
                return
            lose_at = peer.cut_at + self.timing.resume_s
            if now >= lose_at and may_lose:
                # Decided here: it can't come back while the writer uses its place again.
                peer.state = State.LOST if peer.state is State.STARTED else State.OVER
                self._remove(peer)
                self.claimed.set()
                return
            self._lose_at = min(self._lose_at, lose_at)
        if peer.state is State.STARTED:
            self._send_what_is_due(peer)
            self._release(now, peer)

    def _send_what_is_due(self, peer: Peer) -> None:
        connection = peer.connection
        if connection is None:
            return
        via = connection.via
        if via is not None and via.state is State.LOST:
            # A relay that is stopped, and not dead, keeps the others waiting.
            self._forget_sent(peer, connection)
            connection.next_number, connection.via = peer.acked, None
        while connection.next_number < self.published:
            if connection.via is not None and connection.next_number >= connection.via_from:
                connection.next_number = self.published
            elif not self._send_message(peer, connection):
                break
        peer.sent_number = max(peer.sent_number, connection.next_number)
        if peer.connection is None or connection.next_number < self.published:
            return
        if self._is_ending:
            if not connection.is_told:
                connection.is_told = self._send(peer, Kind.CLOSING, self.published, self._last_word)
        elif self._n_at_exit is not None and not connection.has_heard_of_the_end:
            connection.has_heard_of_the_end = self._send(peer, Kind.ENDING, self.published)

    def _send_message(self, peer: Peer, connection: Connection) -> bool:
        number = connection.next_number
        stream, buffers = self._messages[number]
        if not buffers and len(stream) < ALIASED_BYTES:
            is_sent = self._send(peer, Kind.MESSAGE, number, stream)
        else:
            frames: list[zmq.Frame | memoryview] = []
            trackers: list[zmq.MessageTracker] = []
            frame: zmq.Frame | None
            for buffer in (stream, *buffers):
                if len(buffer) < ALIASED_BYTES:
                    frames.append(buffer)
                else:
                    frame = zmq.Frame(buffer, track=True, copy=False)
                    assert isinstance(frame.tracker, zmq.MessageTracker)
                    frames.append(frame)
                    trackers.append(frame.tracker)
            if trackers:  # before it is sent: a signal may come between
                connection.sent.append((number, trackers))
            # pyzmq loses the word that a frame is free if a signal comes while it is freed. That
            # may be here, when ZeroMQ was faster.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            try:
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
                is_sent = self._send(peer, Kind.MESSAGE, number, b"", *frames)
                frame = None
                frames.clear()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_sent:
            connection.next_number = number + 1
        return is_sent

    def _release(self, now: float, peer: Peer) -> None:
        """Give back what was acknowledged and is not used by ZeroMQ any more."""
        assert peer.seat is not None
        place = peer.seat.place
        if place.next_sequence == peer.acked:
            return
        sent = peer.connection.sent if peer.connection is not None else ()
        peer.unfinished = [tracker for tracker in peer.unfinished if not tracker.done]
        while not peer.unfinished and place.next_sequence < peer.acked:
            while sent and sent[0][0] <= place.next_sequence:
                if not all(tracker.done for tracker in sent[0][1]):
                    self._release_at = min(self._release_at, now + self.timing.tracker_s)
                    return
                sent.popleft()
            if not place.pass_over():  # it was struck
                return
            self._progress_at = now
        if peer.unfinished:
            self._release_at = min(self._release_at, now + self.timing.tracker_s)

    def _prune(self) -> None:
        wanted = [peer.released for peer in self._peers.values() if peer.state is State.STARTED]
        if self._unclaimed:  # a rank that attaches for the first time gets all from the first
            wanted.append(0)
        for number in range(self._least, min([*wanted, self.published])):
            # resumable: `publish` may have been interrupted before it kept this one's bytes
            self._messages.pop(number, None)
            self.filed.pop(number, None)
            self._least = number + 1


def _monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    while True:
        # A signal, whose handler has run.
        with contextlib.suppress(zmq.error.InterruptedSystemCall):
            return socket.get_monitor_socket(events)


def _new_listener(address: str, port: int, backlog: int) -> net.socket:
    family = net.AF_INET6 if ":" in address else net.AF_INET
    with contextlib.ExitStack() as undo:
        listener = net.socket(family, net.SOCK_STREAM)
        undo.callback(listener.close)
        listener.setsockopt(net.SOL_SOCKET, net.SO_REUSEADDR, 1)
        if family == net.AF_INET6:
            listener.setsockopt(net.IPPROTO_IPV6, net.IPV6_V6ONLY, 0)
        listener.setblocking(False)
        host = net.getaddrinfo(address, port, family, net.SOCK_STREAM)[0][4]
        listener.bind(host)
        listener.listen(backlog)
        undo.pop_all()
    return listener
