"""What has arrived from the writer, or from a relay, in the form of the ring's reader."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Any, NamedTuple, Protocol

from shmcast.remote.frames import ALIASED_BYTES

__all__ = ["Arrived", "Receiver", "Relay", "Relayed", "RemoteRing"]


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
        if type(stream) is bytes and not buffers:
            return cls(number, stream, len(stream), 0, 0)
        oob_bytes = sum(map(len, buffers))
        return cls(number, (stream, buffers), len(stream) + oob_bytes, len(buffers), oob_bytes)


class Receiver(Protocol):
    """What receives the messages."""

    def receive_within(self, timeout_s: float) -> bool:
        """Receive what comes first; False if somebody else does so."""

    def acknowledge(self) -> None:
        """Acknowledge what was released, or have it done a little later."""


class Relay(Protocol):
    """The ring of this host that one reader, whose link uses it, feeds for the others."""

    @property
    def descriptor(self) -> int:
        """What is readable when there is something to tend."""

    @property
    def has_readers(self) -> bool:
        """Whether anybody takes from it."""

    def tend(self, number: int) -> None:
        """
        Answer the readers of this host, and see who has left or died; never waits.

        Args:
            number: of the message that is passed on next.
        """

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
        """The message with this number, or None if it is not there; earlier ones are released."""

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

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""


class _Signal:
    """An event of one waiter, without a descriptor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set
            self._lock.release()

    def clear(self) -> None:
        self._lock.acquire(blocking=False)

    def wait(self, timeout_s: float) -> None:
        """Wait until it is set, which clears it."""
        self._lock.acquire(timeout=timeout_s)


class RemoteRing:
    """
    The messages that have arrived, for the reader's end.

    Attributes:
        link: what receives them.
        relayed: where messages come from too, if another reader of this host passes them on.
        next_sequence: the number of the next message to be released.
        arrived, n_arrived, n_all, is_struck: stored under the link's lock.
    """

    def __init__(self) -> None:
        self.link: Receiver
        self.ack_from = 0  # the number from which on a release is acknowledged at once
        self.changed = _Signal()  # whenever something here has changed
        self._is_stopped = False
        self.messages = self.bytes = self.oob_buffers = self.oob_bytes = self.waits = 0
        self.wait_s = 0.0
        self.next_sequence = 0  # stored at first by the link, then by the reader's end
        self.relayed: Relayed | None = None
        self._taken: Arrived | None = None
        self.arrived: collections.deque[Arrived] = collections.deque()
        self.n_arrived = 0  # the number of the message that comes next from the writer itself
        self.n_all: int | None = None  # how many messages there are, once the writer has closed
        self.failure: str | None = None  # why it has, if it failed
        self.is_struck = False

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
        if message.n_bytes >= ALIASED_BYTES:  # the writer wants its memory back
            self.ack_from = 0
        if self.next_sequence >= self.ack_from:
            self.link.acknowledge()

    def wait(self, spin_ns: int, sleep_ns: int) -> bool:
        """Sleep until something changes; returns early for a signal, never for a nudge."""
        start = time.monotonic()
        relayed = self.relayed
        if relayed is not None and not (relayed.is_ahead or self.arrived):
            relayed.wait(spin_ns + sleep_ns)
        else:
            self.changed.clear()
            if not (self.arrived or self.is_struck or self.is_closing or self._is_stopped):
                timeout_s = (spin_ns + sleep_ns) / 1e9
                if not self.link.receive_within(timeout_s):
                    self.changed.wait(timeout_s)
        self.waits += 1
        self.wait_s += time.monotonic() - start
        return False

    def nudge(self) -> None:
        """End the present wait or else the next one, from any thread."""
        self.changed.set()
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
        self.nudge()
