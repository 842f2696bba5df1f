"""The reader's socket: connecting again and again, and what comes over each connection."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import math
import secrets
import socket as net
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs
import zmq

from shmcast.errors import (
    AuthenticationError,
    ProtocolError,
    QueueClosed,
    ShmcastError,
    WriterFailed,
    WriterLost,
)
from shmcast.remote.addresses import addresses_of, join, split
from shmcast.remote.frames import (
    ADMITTED,
    ALIASED_BYTES,
    HEADER,
    MOST_TEXT_BYTES,
    VOID,
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
    Link,
    Loop,
    check_descriptors,
    has_come,
    monitored,
    set_common_options,
)
from shmcast.remote.ring import Arrived, Relay, Relayed, RemoteRing
from shmcast.remote.writer_link import CurveKeys

__all__ = ["Connection", "ReaderLink"]

_log = logging.getLogger("shmcast.remote")

_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
#: How long an owner keeps the lock while it waits for a message.
_SLICE_S: Final = 0.010


@attrs.define(eq=False)
class Connection:
    """One connection to the writer, thrown away with that."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    descriptor: int
    began_at: float  # of the wall clock, as ZeroMQ counts
    stands: bool = False  # somebody has accepted it
    has_ended: bool = False
    was_heard: bool = False  # the writer
    is_greeted: bool = False  # it has answered the last greeting of an admitted reader
    hello_at: float = 0.0  # when to greet again
    relayed: Relayed | None = None  # where the writer takes this end to get its messages
    acked: int = 0
    done_number: int = -1  # which end of the messages it was told to have arrived
    leave_by: float = math.inf  # when to stop waiting for the answer to LEAVE
    has_said_ending: bool = False
    is_ending_heard: bool = False
    is_muted: bool = False  # the thread does not watch it
    is_receiving: bool = False  # a signal may have cut this off
    timeout_ms: int = -1


class ReaderLink(Link):
    """
    The reader's socket. Methods are called under the lock, but for those that take it.

    A signal may end `receive_within` and `acknowledge` at any line, since the link's owner calls
    them; the thread's methods run on.

    Args:
        loop: of this process; the link is added to it by the reader.
        ring: where to put what arrives.
        endpoint: the address of the writer.
        keys: of the queue, or None with security "none".
        token: the secret to show.
        rank: the rank to claim.

    Raises:
        ValueError: the host's name can't be one.
    """

    may_be_held = True

    def __init__(
        self,
        loop: Loop,
        ring: RemoteRing,
        *,
        endpoint: str,
        keys: CurveKeys | None,
        token: str,
        rank: int,
    ) -> None:
        super().__init__(loop)
        self._ring, self._endpoint, self._keys = ring, endpoint, keys
        self._token, self._rank = token.encode(), rank
        self.session = secrets.randbits(64)  # what names this attachment
        self.start: int | None = None
        self.sizes: RingSizes | None = None  # of the writer's ring, once admitted
        self.writer_pid: str | None = None
        self.failure: tuple[type[ShmcastError], str] | None = None
        self.note = ""  # what the writer says that a claim waits for
        self.new_relay: Relay | None = None  # stored by the reader's end; the thread takes it out
        self.last_word = b""  # the error with which this end leaves
        self._relay: Relay | None = None
        self._is_feeding = False  # somebody takes from the relay
        self._connection: Connection | None = None
        self._connect_at = 0.0
        self._n_addresses_tried = 0
        # Since when nobody has been there; None while the writer is connected. Somebody who
        # accepts a connection and is silent is there.
        self._gone_since: float | None = loop.now
        self._refusal: type[ShmcastError] = WriterLost
        self._was_heard = False  # the writer, over any connection
        self._n_published = 0  # by the writer when the present connection began
        self._n_at_end: int | None = None  # how many when its process said that it ends
        # How many ended one after the other over which a message was due, and none arrived.
        self._n_vain_cuts = self._arrived_before = 0
        self._ack_every = 1  # half of the ring's chunks
        self._ack_at = math.inf
        self._timed_number = 0  # what arrived before had its time to be released
        self._is_ack_due_soon = False
        self._leave_until = math.inf  # when a closed end stops to connect again for that
        self._settle_by = math.inf  # when a process that ends waits no more
        self._is_driven = False  # by its owner, since the thread looked last
        self._drive_until = 0.0  # of the wall clock
        host, self.port = split(endpoint)
        self._addresses = _literal(host)
        if not self._addresses:
            try:
                host.encode("idna")
            except UnicodeError as error:
                raise ValueError(f"endpoint = {endpoint!r} is not allowed: {error}") from error
            threading.Thread(
                target=self._resolve, args=(host,), name="shmcast-resolve", daemon=True
            ).start()

    def _resolve(self, host: str) -> None:
        """Look the name up, in a thread of its own, since that may take long."""
        try:
            self._addresses = addresses_of(host, self.port)
        except (OSError, UnicodeError) as error:
            text = getattr(error, "strerror", None) or str(error)
            self._fail(WriterLost, f"rank {self._rank} found no writer at {self._endpoint}: {text}")
        self._gone_since = self.loop.now
        self.ask()

    # --- what the thread does ---

    def run(self, now: float) -> float:
        """Connect, take frames, acknowledge what was taken."""
        if self.is_closing and self._leave_until == math.inf:
            self._leave_until = now + self.timing.resume_s
        if self.loop.is_exiting and self._settle_by == math.inf:
            self._settle_by = now + self.timing.goodbye_s
        self._tend_relay()
        connection = self._connection
        self.is_settled = self._is_settled(now, connection)
        if connection is None:
            return self._run_without_connection(now)
        if connection.is_receiving:
            self._ask_again(connection)
        self._take_events(connection)
        # What arrived before the end of the connection counts.
        is_all_read = self._receive(connection)
        if not is_all_read:
            return now
        self._acknowledge(now, connection)
        if self.is_closing and self._has_left(now, connection):
            self._disconnect(linger_ms=1000)
            self._end()
            return now
        if self.failure is not None:
            self._disconnect()
            return now + self._pause_s
        if connection.has_ended:
            self._cut(now, connection)
            return self._connect_at
        if self._is_gone(now):
            self._give_up()
        elif not connection.is_greeted:
            if now >= connection.hello_at:
                self._greet(now, connection)
        else:
            self._say_what_is_due(now, connection)
        if has_come(connection.socket):  # by then its descriptor does not tell any more
            return now
        next_at = min(self._ack_at, now + self._pause_s)
        if connection.is_muted:
            if self._is_driven:
                self._is_driven = False
                return min(next_at, now + self.timing.owner_s)
            self.loop.mute(connection.descriptor, is_muted=False)
            connection.is_muted = False
        return next_at

    def _is_settled(self, now: float, connection: Connection | None) -> bool:
        """Whether a process that ends need not wait for this link; a closed one ends by itself."""
        if self.is_closing:
            return False
        is_over = self.failure is not None or self._ring.is_struck or self._ring.is_closing
        is_heard = connection is None or connection.is_ending_heard
        return self.start is None or is_over or is_heard or now >= self._settle_by

    def _run_without_connection(self, now: float) -> float:
        if self.is_closing and not self._has_to_leave(now, None):
            self._end()
        elif self.failure is None and not self._ring.is_closing:
            if self._is_gone(now):
                self._give_up()
            elif now >= self._connect_at and self._addresses:
                self._try_connect(now)
                return self._connect_at if self._connection is None else now
        return now + self._pause_s

    @property
    def _pause_s(self) -> float:
        return self.timing.retry_s if self.is_closing else self.timing.beat_s

    def _receive(self, connection: Connection) -> bool:
        """Take the messages that have come; whether these were all."""
        n_taken = 0
        while has_come(connection.socket):
            if n_taken == BATCH and not connection.has_ended:
                return False
            n_taken += 1
            self._try_take_frames(connection, connection.socket.recv_multipart(copy=False))
        return True

    def _say_what_is_due(self, now: float, connection: Connection) -> None:
        relayed = self._ring.relayed
        if connection.relayed is not None and connection.relayed is not relayed:
            self._greet(now, connection)
        if relayed is not None and connection.relayed is None:
            connection.relayed = relayed
            self._say(connection, Kind.VIA, relayed.session)
        n_all = self._ring.n_all if self._ring.n_all is not None else self._n_at_end
        if n_all is not None and connection.done_number != n_all <= self._ring.n_reached:
            connection.done_number = n_all
            self._say(connection, Kind.DONE, n_all)
        if self.loop.is_exiting and not (self.is_closing or connection.has_said_ending):
            connection.has_said_ending = True
            self._say(connection, Kind.ENDING)

    # --- the relay ---

    @property
    def is_relay(self) -> bool:
        """Whether what is received is passed on."""
        return self._relay is not None or self.new_relay is not None

    def _tend_relay(self) -> None:
        if self.new_relay is not None:
            self._relay, self.new_relay = self.new_relay, None
            self.loop.watch(self, self._relay.descriptor)
        relay = self._relay
        if relay is None:
            return
        if self.failure is not None or self._ring.is_struck or self.is_closing:
            self._drop_relay()
            return
        self._use_relay(lambda: relay.tend(self._ring.n_arrived))
        self._is_feeding = self._relay is not None and relay.has_readers

    def _use_relay(self, use: Callable[[], None]) -> None:
        try:
            use()
        except Exception:
            _log.exception("rank %d can't relay to the readers of its host", self._rank)
            self._drop_relay()

    def _drop_relay(self) -> None:
        relay, self._relay = self._relay, None
        self._is_feeding = False
        if relay is not None:
            self.loop.forget(relay.descriptor)
            relay.close()
        new_relay, self.new_relay = self.new_relay, None
        if new_relay is not None:  # not looked at yet
            new_relay.close()

    # --- leaving ---

    def _has_left(self, now: float, connection: Connection) -> bool:
        """Say that this end leaves; whether the writer has heard it, or is given up."""
        is_struck = self._ring.is_struck
        has_to_leave = self._has_to_leave(now, connection)
        is_connected = not (has_to_leave or connection.has_ended or is_struck)
        if is_connected and connection.leave_by == math.inf:
            self._say(connection, Kind.LEAVE, text=self.last_word)  # it answers by an eviction
            connection.leave_by = now + self.timing.goodbye_s
        return not self._has_to_leave(now, connection) and (
            is_struck
            or connection.has_ended
            or not self._was_heard
            or self.failure is not None
            or self._ring.is_closing
            or now >= connection.leave_by
        )

    def _has_to_leave(self, now: float, connection: Connection | None) -> bool:
        """Whether the writer waits for this end, and has to be reached again to hear of its end."""
        return (
            self._was_heard
            and now < self._leave_until
            and (connection is None or connection.has_ended or not connection.was_heard)
            and self.failure is None
            and not (self._ring.is_closing or self._ring.is_struck)
        )

    def abort(self, error: str) -> None:
        """Close at once."""
        self._fail(ShmcastError, error)
        if self._connection is not None:
            self._disconnect()
        self._end()

    def _end(self) -> None:
        self._drop_relay()  # `close` may have come since it was looked at
        if self.is_closing:  # no call uses them any more, and they keep memory
            self._ring.relayed = None
            self._ring.arrived.clear()
        self.is_done = True

    # --- connections ---

    def owns(self, found: net.socket) -> bool:
        """Whether it is connected to the writer's address."""
        addresses = [address.partition("%")[0] for address in self._addresses]
        address, port = found.getpeername()[:2]
        return bool(port == self.port and address.partition("%")[0] in addresses)

    def _try_connect(self, now: float) -> None:
        try:
            self._connect(now)
        except (OSError, zmq.ZMQError) as error:  # this process may be out of descriptors
            _log.info("rank %d can't connect to %s: %s", self._rank, self._endpoint, error)
            self._connect_at = now + self.timing.retry_s

    def _connect(self, now: float) -> None:
        check_descriptors()
        address = self._addresses[self._n_addresses_tried % len(self._addresses)]
        with contextlib.ExitStack() as undo:
            socket = self.loop.context.socket(zmq.DEALER)
            undo.callback(socket.close, 0)
            set_common_options(socket, address, self)
            socket.reconnect_ivl = -1  # each connection has a socket of its own
            if self._keys is not None:
                socket.curve_serverkey = self._keys.server_public.encode()
                socket.curve_publickey = self._keys.client_public.encode()
                socket.curve_secretkey = self._keys.client_secret.encode()
            else:
                socket.plain_username, socket.plain_password = b"reader", self._token
            monitor = socket.get_monitor_socket(_EVENTS)
            undo.callback(monitor.close, 0)
            undo.callback(socket.disable_monitor)
            socket.connect(join(address, self.port))
            connection = Connection(socket, monitor, int(socket.FD), time.monotonic())
            self.loop.watch(self, connection.descriptor)
            undo.callback(self.loop.forget, connection.descriptor)
            self.loop.watch(self, int(monitor.FD))
            undo.pop_all()
        self._ring.ack_from = 0
        self._greet(now, connection)
        self._connection = connection

    def _greet(self, now: float, connection: Connection) -> None:
        connection.hello_at = now + self.timing.beat_s
        connection.is_greeted = False
        connection.relayed, connection.done_number = None, -1
        self._ring.n_arrived = self._ring.n_reached
        kind = Kind.HELLO if self.start is None else Kind.RESUME
        self._say(connection, kind, self._ring.n_arrived, self._token + who())

    def _say(self, connection: Connection, kind: Kind, number: int = 0, text: bytes = b"") -> None:
        try:
            connection.socket.send(pack(kind, self._rank, self.session, number, text), zmq.NOBLOCK)
        except zmq.Again:  # the connection has ended, and there is no other one
            connection.has_ended = True

    def _take_events(self, connection: Connection) -> None:
        """See whether somebody is there, and why the connection has ended."""
        for event in monitored(connection.monitor):
            kind = event["event"]
            if kind == zmq.EVENT_CONNECTED:
                connection.stands = True
                continue
            connection.has_ended = True
            if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                if self.start is None:
                    self._fail(
                        AuthenticationError, f"the writer at {self._endpoint} refused the keys"
                    )
                else:
                    self._lose("another queue is at its address")
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refusal = ProtocolError
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                # Silence is no answer: somebody whose program does not run is silent too.
                self._refusal = WriterLost if self._was_silent(connection) else AuthenticationError
            elif kind == zmq.EVENT_CLOSED:  # nobody listens
                self._refusal = WriterLost

    def _was_silent(self, connection: Connection) -> bool:
        """Whether it stood until ZeroMQ gave the handshake up, and nobody said a word."""
        lasted_s = time.monotonic() - connection.began_at
        is_unheard = connection.stands and not connection.was_heard
        return is_unheard and lasted_s >= 0.9 * self.timing.greeting_s

    def _cut(self, now: float, connection: Connection) -> None:
        self._disconnect()
        ring = self._ring
        if connection.was_heard or self._was_silent(connection) or self._gone_since is None:
            self._gone_since = now
        if not connection.was_heard:
            self._n_addresses_tried += 1
            if not connection.stands and self._has_ended_as_said():
                return
        if ring.n_arrived > self._arrived_before:
            self._n_vain_cuts, self._arrived_before = 0, ring.n_arrived
        if connection.was_heard and ring.relayed is None and ring.n_reached < self._n_published:
            self._n_vain_cuts += 1
        is_first = connection.was_heard and self._n_vain_cuts < 2
        self._connect_at = now if is_first else now + self.timing.retry_s
        if self._n_vain_cuts == self.timing.vain_cuts:
            self._fail(
                ShmcastError,
                f"rank {self._rank} can't receive message {ring.n_arrived}: each time the "
                f"connection ends; this process may be short of memory (RLIMIT_AS, RLIMIT_DATA), "
                f"or something between the hosts cuts connections sooner than it arrives",
            )
        ring.nudge()

    def _is_gone(self, now: float) -> bool:
        """Whether nobody has been there for so long that the writer is given up."""
        connection = self._connection
        return (
            self._gone_since is not None
            and now >= self._gone_since + self.timing.resume_s
            and (connection is None or not connection.stands)
        )

    def _give_up(self) -> None:
        if self._has_ended_as_said():
            return
        if self.start is not None:
            self._lose("it could not be reached again")
        else:
            reason = (
                "it has closed or died, or can't be reached from here"
                if self._refusal is WriterLost
                else "somebody is there who does not have the queue's keys"
            )
            self._fail(
                self._refusal, f"rank {self._rank} found no writer at {self._endpoint}: {reason}"
            )

    def _has_ended_as_said(self) -> bool:
        """Whether the writer's process has ended, and had said so, and all has arrived."""
        if self._n_at_end is None or self._ring.n_reached != self._n_at_end:
            return False  # what came after that may not be all
        self._ring.n_all = self._n_at_end
        self._ring.nudge()
        return True

    def _lose(self, why: str) -> None:
        self._fail(
            WriterLost,
            f"the writer (pid {self.writer_pid}) died: {why}; all that arrived was read, and what "
            f"was published after that may be missing",
        )

    def _disconnect(self, linger_ms: int = 0) -> None:
        connection, self._connection = self._connection, None
        assert connection is not None
        connection.socket.disable_monitor()
        self.loop.drop(connection.monitor)
        self.loop.drop(connection.socket, linger_ms=linger_ms)

    def _fail(self, error_class: type[ShmcastError], text: str) -> None:
        self.failure = self.failure or (error_class, text)
        self._ring.nudge()

    # --- what the reader's end does ---

    def receive_within(self, timeout_s: float) -> bool:
        """
        Receive what comes first, for the reader's end; False if that is left to the thread.

        It is while messages come at short intervals, and none is passed on to others. It may
        return early.
        """
        connection = self._connection
        if (
            connection is None
            or not connection.is_greeted
            or self.is_wanted
            or self._is_feeding
            or time.monotonic() >= self._drive_until
        ):
            return False
        with self.lock:
            if connection is not self._connection or self._ring.arrived:
                return True
            self._is_driven = True
            if not connection.is_muted:
                connection.is_muted = True
                self.loop.mute(connection.descriptor, is_muted=True)
                self.due_at = 0.0
                self.loop.wake()
            if connection.is_receiving:
                self._ask_again(connection)
            self._receive_as_owner(connection, min(timeout_s, _SLICE_S))
        return True

    def _receive_as_owner(self, connection: Connection, timeout_s: float) -> None:
        if self._ring.next_sequence > connection.acked:
            timeout_s = min(timeout_s, self.timing.ack_s)
        socket, timeout_ms = connection.socket, max(1, int(timeout_s * 1e3))
        if timeout_ms != connection.timeout_ms:
            connection.timeout_ms = timeout_ms
            socket.rcvtimeo = timeout_ms
        # resumable: a frame that a signal has cut off is asked for again.
        connection.is_receiving = True
        try:
            frames = socket.recv_multipart(copy=False)
        except zmq.Again:
            connection.is_receiving = False
            self._say_acked(connection)  # no message came that it could wait for
            return
        self._try_take_frames(connection, frames)
        n_taken = 0
        while n_taken < BATCH and has_come(socket):
            n_taken += 1
            self._try_take_frames(connection, socket.recv_multipart(copy=False))
        connection.is_receiving = False

    def _ask_again(self, connection: Connection) -> None:
        """Have what a signal made of a call that received sent again."""
        while connection.socket.getsockopt(zmq.RCVMORE):
            connection.socket.recv(zmq.NOBLOCK)
        self._greet(self.loop.now, connection)
        connection.is_receiving = False

    def acknowledge(self) -> None:
        """Acknowledge what was released, or have it done a little later."""
        with self.lock:
            connection, ring = self._connection, self._ring
            if connection is None or not connection.is_greeted:
                return
            is_due = ring.next_sequence >= connection.acked + self._ack_every
            if ring.relayed is None or ring.ack_from == 0 or is_due:
                self._say_acked(connection)
                if connection.is_muted:
                    return  # the thread looks soon
                if ring.n_reached > connection.acked:  # nothing would set the time for the rest
                    ring.ack_from = connection.acked + 1
                if has_come(connection.socket):
                    self.ask()
            else:  # nothing arrives here that would set the time
                ring.ack_from = connection.acked + self._ack_every
                self._is_ack_due_soon = True
                self.ask()

    def _say_acked(self, connection: Connection) -> None:
        ring = self._ring
        released = ring.next_sequence
        if released > connection.acked:
            self._say(connection, Kind.ACK, released)
            connection.acked = released
        ring.ack_from = connection.acked + (1 if ring.relayed is not None else self._ack_every)

    def _acknowledge(self, now: float, connection: Connection) -> None:
        """Acknowledge what was released a while ago; who was not in time, when it is."""
        ring = self._ring
        if self._is_ack_due_soon:
            self._is_ack_due_soon = False
            self._ack_at = min(self._ack_at, now + self.timing.ack_s)
        is_left = connection.is_muted and not self._is_driven
        # Over a new connection too: the writer may not have heard of it over the last one.
        is_due = ring.next_sequence >= max(ring.ack_from, connection.acked + 1)
        if is_due or now >= self._ack_at or self.is_closing or is_left:
            self._ack_at, self._timed_number = math.inf, ring.n_arrived
            self._say_acked(connection)
            while ring.n_reached > connection.acked:
                ring.ack_from = connection.acked + 1
                if ring.next_sequence == connection.acked:
                    break
                self._say_acked(connection)  # released before that was stored
        elif self._ack_at == math.inf and ring.n_arrived > self._timed_number:
            self._ack_at = now + self.timing.ack_s

    # --- frames ---

    def _try_take_frames(self, connection: Connection, frames: list[zmq.Frame]) -> None:
        try:
            self._take(connection, frames)
        except ProtocolError as error:
            self._fail(ProtocolError, f"the peer at {self._endpoint}: {error}")

    def _take(self, connection: Connection, frames: list[zmq.Frame]) -> None:
        if len(frames[-1]) == len(VOID) and bytes(frames[-1].buffer) == VOID:
            return
        header = unpack(frames)
        if header.session not in (self.session, 0):
            raise ProtocolError("a frame is for another session")
        if self.failure is not None:
            return
        connection.was_heard = self._was_heard = True
        self._gone_since = None
        kind, ring = header.kind, self._ring
        if kind == Kind.MESSAGE and self.start is not None:
            self._take_message(connection, header.number, frames)
            return
        body = bytes(frames[0].buffer[HEADER.size :])
        if kind == Kind.BEAT:
            self.note = clean(body)
            connection.is_ending_heard = connection.has_said_ending
            self._say(connection, Kind.BEAT)
        elif kind == Kind.REPEAT:
            connection.leave_by = math.inf
            self._greet(self.loop.now, connection)
            connection.acked = 0
            ring.ack_from = 0
            self.ask()
        elif kind == Kind.ADMISSION:
            self._take_admission(connection, header.number, body)
        elif kind == Kind.CLOSING:
            self._take_closing(connection, header.number, clean(body, MOST_TEXT_BYTES))
        elif kind == Kind.ENDING:
            self._n_at_end = header.number
        elif kind == Kind.EVICTION:
            ring.is_struck = True
        elif kind == Kind.REFUSAL:
            raise ProtocolError(clean(body, MOST_TEXT_BYTES))
        elif kind == Kind.DENIAL:
            if self.start is None:
                self._fail(AuthenticationError, clean(body, MOST_TEXT_BYTES))
            else:
                self._lose("another queue is at its address")
        else:
            raise ProtocolError(f"a frame {name_of(kind)} is out of turn")
        ring.nudge()
        if self.loop.is_exiting or ring.n_all is not None or self._n_at_end is not None:
            self.ask()

    def _take_closing(self, connection: Connection, n_all: int, failure: str) -> None:
        if self.start is not None:
            self._ring.failure = failure or None
            self._ring.n_all = n_all  # last: then the failure counts
            return
        self._say(connection, Kind.DONE)
        before = f"before it admitted rank {self._rank}"
        if failure:
            self._fail(WriterFailed, f"the writer failed {before}: {failure}")
        else:
            self._fail(QueueClosed, f"the writer closed {before}")

    def _take_admission(self, connection: Connection, start: int, body: bytes) -> None:
        numbers, pid = body[: ADMITTED.size], body[ADMITTED.size :]
        if len(numbers) < ADMITTED.size:
            raise ProtocolError("an admission came without the sizes of the ring")
        *sizes, self._n_published = ADMITTED.unpack(numbers)
        connection.is_greeted = True
        self._drive_until = time.monotonic() + self.timing.driving_s
        if self.start is None:
            ring = self._ring
            self.sizes = RingSizes(*sizes)
            self._ack_every = max(1, self.sizes.n_chunks // 2)
            self.writer_pid = clean(pid)
            ring.n_arrived = ring.next_sequence = connection.acked = self._timed_number = start
            self.start = start

    def _take_message(self, connection: Connection, number: int, frames: list[zmq.Frame]) -> None:
        # resumable: a message that is taken twice is dropped when its number has been released.
        ring, sizes = self._ring, self.sizes
        assert sizes is not None  # it is admitted
        if number < ring.n_arrived:  # sent again after a cut
            return
        if number > ring.n_reached and not connection.is_greeted:  # it was asked for again
            return
        if number - ring.next_sequence >= sizes.n_chunks:
            raise ProtocolError(f"message {number} came outside the window of {sizes.n_chunks}")
        if number > ring.n_reached:
            raise ProtocolError(f"message {number} came instead of {ring.n_arrived}")
        stream: Any
        buffers: list[Any] = []
        if len(frames) == 1:
            stream = bytes(frames[0].buffer[HEADER.size :])
        else:
            stream = frames[1].buffer
            buffers = [
                frame.buffer if len(frame) >= ALIASED_BYTES else bytearray(frame.buffer)
                for frame in frames[2:]
            ]
        relay = self._relay
        if relay is not None:  # first, since whoever gets the buffers may write to them
            self._use_relay(lambda: relay.pass_on(number, stream, buffers))
            self._is_feeding = self._relay is not None and relay.has_readers
        ring.arrived.append(Arrived.of(number, stream, buffers))
        ring.n_arrived = number + 1
        self._drive_until = time.monotonic() + self.timing.driving_s
        ring.nudge()


def _literal(host: str) -> list[str]:
    """The address, if the host is one."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return []
    return [host]
