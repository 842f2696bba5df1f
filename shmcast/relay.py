"""
The readers of one remote host: one receives each message and passes it on to the others.

`Relay` is the ring through which it does so, `Relayed` what another reader takes from it, and
`RemoteAttachment` a rank of a writer on another host, which makes the one or takes from the other.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import attrs

from shmcast._ring import EndLock
from shmcast.attachment import Attachment, Source
from shmcast.config import QueueConfig
from shmcast.control import failure_text, named
from shmcast.door import Watch
from shmcast.ends import QueueEnd
from shmcast.errors import (
    MessageTooLarge,
    ProtocolError,
    QueueFull,
    ReaderLost,
    ShmcastError,
    WriterLost,
    is_foreign,
)
from shmcast.handle import Handle
from shmcast.writer import Writer

if TYPE_CHECKING:
    from shmcast.remote import Arrived, RemoteRing, RingSizes

__all__ = ["Relay", "Relayed", "RemoteAttachment", "relay_handle"]

_log = logging.getLogger("shmcast.queue")

_JOIN_S: Final = 0.2  # how long a relay's answer is waited for
_JOIN_PAUSE_S: Final = 1.0


class Relay(QueueEnd):
    """
    A writer of parts that never waits: it evicts a reader that is too slow, which then gets its
    messages from the remote writer.

    The I/O thread of the reader that relays uses it, as a `remote.Relay`.

    Args:
        handle: of this ring.
        sizes: of the writer's ring.
        session: of the reader that relays.

    Raises:
        ConfigError: another reader of this host is the relay, or there is not enough memory.
        OSError: there are not enough descriptors.
    """

    def __init__(self, handle: Handle, sizes: RingSizes, session: int) -> None:
        self._name = f"relay @{handle.local_address}"
        self._n_chunks = sizes.n_chunks
        self._watch = Watch(self)  # without descriptors: the I/O thread sees to all that
        self._lock = EndLock("relay", self._watch.is_free)
        self._writer = Writer(
            QueueConfig(
                n_readers=handle.n_readers,
                chunk_bytes=sizes.chunk_bytes,
                n_chunks=sizes.n_chunks,
                arena_bytes=sizes.arena_bytes,
                receive="copy" if sizes.copies else "private",
                spin_us=sizes.spin_us,
                warn_after_s=sizes.warn_after_us / 1e6,
                on_reader_loss="evict",
            ),
            self._lock,
            address=handle.local_address,
            token=handle.token,
            ranks=tuple(range(handle.n_readers)),
            on_look=self._watch.arm,
        )
        self._writer.members.keep_nothing()
        self._writer.control.greeting = session.to_bytes(8, "little")

    def __repr__(self) -> str:
        return f"<Relay {self._name}>"

    @property
    def descriptor(self) -> int:
        """What is readable when there is something to tend."""
        return self._writer.control.descriptor

    @property
    def has_readers(self) -> bool:
        """Whether anybody takes from it."""
        return bool(self._writer.ring.expected_ranks())

    def tend(self, number: int) -> None:
        """Answer the readers of this host, and see who has left or died; never waits."""
        with self._lock:
            if not self.has_readers:
                self._writer.ring.skip_to(number)
            self._writer.look()

    def pass_on(self, number: int, stream: Any, buffers: list[Any]) -> None:
        """Put a message into the ring; never waits."""
        with self._lock:
            ring, roster = self._writer.ring, self._writer.roster
            for rank, lag in enumerate(ring.lags()):
                if lag >= self._n_chunks or number != ring.messages:
                    roster.evict(rank)
            if not self.has_readers:
                return
            parts = [bytes(stream)]
            views = [memoryview(buffer) for buffer in buffers]
            try:
                if views or not ring.try_publish(parts, views):
                    self._writer.publish(parts, views, time.monotonic())
            except (QueueFull, MessageTooLarge, ReaderLost) as error:
                _log.info("%s can't pass on message %d: %s", self._name, number, error)
                for rank in ring.expected_ranks():
                    roster.evict(rank)

    def close(self) -> None:
        """Tell the readers that nothing follows."""
        self._close()

    @property
    def _transport(self) -> Writer | None:
        return getattr(self, "_writer", None)

    def _step_alone(self) -> float:
        return self._writer.step_alone()

    def _is_failure(self, error: BaseException | None) -> bool:  # noqa: ARG002
        """Never: the reader that relays says so, and its I/O thread closes this end."""
        return False

    def _finish(self) -> None:
        if (writer := self._transport) is not None:  # else the constructor failed
            writer.say_closing()
            writer.close()
        self._watch.close()


class Relayed:
    """
    What the relay of this host passes on to one of its other readers: a `remote.Relayed`.

    Args:
        attachment: to the relay's ring, done; it is closed with this object.
    """

    def __init__(self, attachment: Attachment) -> None:
        from shmcast.remote import Arrived

        self._arrived = Arrived.of
        ring = attachment.ring
        assert ring is not None  # it is attached
        self._attachment, self._ring = attachment, ring
        self._head: Arrived | None = None  # taken and not released
        self._is_broken = False
        self.is_ahead = False
        self.session = int.from_bytes(attachment.control.greeting, "little")

    @property
    def lag(self) -> int:
        """How many messages are in the ring and not released."""
        return self._ring.lag

    def take(self, number: int) -> Arrived | None:
        """The message with this number, or None if it is not there; earlier ones are released."""
        while not self._is_broken:
            if self._head is None:
                self._head = self._next()
            self.is_ahead = self._head is not None and self._head.number > number
            if self._head is None or self._head.number >= number:
                return None if self.is_ahead else self._head
            self.release()
        return None

    def _next(self) -> Arrived | None:
        try:
            taken = self._ring.try_take()
            if taken is None:
                return None
            if type(taken) is int:
                taken = self._attachment.parts_of_file(taken)
        except (ShmcastError, OSError) as error:
            if is_foreign(error):
                raise
            rank = self._attachment.rank
            _log.warning("what rank %d has from its relay can't be used: %s", rank, error)
            self._is_broken = True
            return None
        stream, buffers = (taken, []) if type(taken) is bytes else taken
        return self._arrived(self._ring.next_sequence, stream, buffers)

    def release(self) -> None:
        """Give back the message that was taken."""
        self._head = None
        self._ring.release()

    def wait(self, sleep_ns: int) -> None:
        """Wait for the next one."""
        spin_ns = min(self._attachment.spin_ns, sleep_ns)
        self._ring.wait(spin_ns, sleep_ns - spin_ns)

    def nudge(self) -> None:
        """End the present wait or else the next one, from any thread."""
        self._ring.nudge()

    def is_over(self) -> bool:
        """Whether nothing more will come from there."""
        control = self._attachment.control
        control.collect_files()
        try:
            has_ended = self._ring.is_closing or control.is_writer_dead()
        except ProtocolError:  # the relay lost its lock
            return True
        return self._is_broken or self._ring.is_struck or (has_ended and not self._ring.lag)

    def close(self) -> None:
        """Leave the ring."""
        self._attachment.close()

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""
        self._attachment.close_inherited()


class RemoteAttachment(Source):
    """
    A rank of a writer on another host.

    Args:
        handle: of the queue.
        rank: the one to claim.

    Raises:
        ValueError: the handle's address can't be one.
        OSError: there are not enough descriptors.
    """

    ring: RemoteRing

    def __init__(self, handle: Handle, rank: int) -> None:
        from shmcast.remote import CurveKeys, RemoteReader

        super().__init__(rank)
        assert handle.endpoint is not None  # else there is no such rank
        self.remote = RemoteReader(
            endpoint=handle.endpoint,
            keys=CurveKeys(*handle.curve_keys) if handle.curve_keys else None,
            token=handle.token,
            rank=rank,
        )
        self.ring = self.remote.ring
        self._handle = relay_handle(handle)
        self._candidate: Attachment | None = None  # to a relay that has not answered yet
        self._join_at = 0.0

    @property
    def writer_name(self) -> str:
        """What texts call the writer's process."""
        return named(self.remote.writer_pid)

    @property
    def state_text(self) -> str:
        """What is known of a writer that has not admitted this rank."""
        note = self.remote.note
        return f"says that {note}" if note else super().state_text

    def step(self) -> bool:
        """
        See how far the handshake is; whether it is done.

        Raises:
            ShmcastError: this rank can't be had. Later calls raise it again.
        """
        if not self.remote.is_admitted:  # else what arrived before a failure is read first
            try:
                self.remote.step()
            except ShmcastError as error:
                self.remote.say_failed(failure_text(error))
                raise
        if self.remote.sizes is not None:
            self.warn_after_s = self.remote.sizes.warn_after_us / 1e6
        self.is_attached = self.remote.is_admitted
        return self.is_attached

    def wait_for_step(self, timeout_s: float) -> None:
        """Wait until the handshake may go on."""
        self.remote.wait(timeout_s)

    def settle(self, deadline: float) -> None:
        """Look for the relay of this host, or become it."""
        if self.ring.relayed is not None:
            self._candidate = None  # it has become that: a signal may have come between
            return
        now = time.monotonic()
        if now < self._join_at or self.remote.is_relay:
            return
        self._join_at = now + _JOIN_PAUSE_S
        try:
            self._join(deadline)
        except (ShmcastError, OSError) as error:
            if is_foreign(error):
                raise
            self._drop_candidate()
            _log.info("rank %d takes its messages from the writer itself: %s", self.rank, error)

    def _join(self, deadline: float) -> None:
        # A relay answers at once. One that is stopped is asked again, without waiting.
        until = min(time.monotonic() + _JOIN_S, deadline) if self._candidate is None else 0.0
        if self._candidate is None:
            self._candidate = self._new_candidate()
        candidate = self._candidate
        if candidate is None:
            return
        while not candidate.step():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return
            candidate.wait_for_step(left_s)
        self.remote.take_from(Relayed(candidate))
        self._candidate = None

    def _new_candidate(self) -> Attachment | None:
        """To this host's relay, or None if this end has become that."""
        sizes = self.remote.sizes
        assert sizes is not None  # it is admitted
        address, token = self._handle.local_address, self._handle.token
        with contextlib.suppress(WriterLost):  # there is none
            return Attachment(address, token, self.rank)
        try:
            self.remote.pass_on_to(Relay(self._handle, sizes, self.remote.session))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return Attachment(address, token, self.rank)  # another one was faster
        return None

    def _drop_candidate(self) -> None:
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.close()

    def look(self, deadline: float) -> bool:
        """
        See to the relay and the writer; whether there is more to take, or the end.

        Raises:
            WriterLost: it can't be reached any more, and everything that arrived was read.
        """
        relayed = self.ring.relayed
        if relayed is not None and relayed.is_over():
            self._join_at = 0.0
            self.remote.take_from(None)
            relayed.close()
        self.settle(deadline)
        self.remote.check_alive()
        return bool(self.ring.lag or self.ring.is_closing)

    def say_failed(self, text: str) -> None:
        """Have the writer told why this end closes."""
        self.remote.say_failed(text)

    def close(self) -> None:
        """Leave, and let everything go."""
        with contextlib.ExitStack() as parts:
            parts.callback(self.remote.close)
            parts.callback(self._drop_candidate)
            if self.ring.relayed is not None:
                parts.callback(self.ring.relayed.close)

    def close_inherited(self) -> None:
        """Close what a forked child has of it; the I/O thread's are closed after a fork."""
        for inherited in (self._candidate, self.ring.relayed):
            if inherited is not None:
                inherited.close_inherited()


def relay_handle(handle: Handle) -> Handle:
    """The handle of the ring that a host's remote readers share: each of them knows it."""
    # Everybody on the host sees the address, which must not tell the token.
    digest = hmac.digest(handle.token.encode(), b"relay", "sha256").hex()
    return attrs.evolve(
        handle,
        endpoint=None,
        local_reader_ranks=tuple(range(handle.n_readers)),
        local_address=f"shmcast-relay-{digest[:32]}",
        curve_keys=(),
    )
