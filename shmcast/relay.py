"""The ring through which one remote reader passes on what it receives to the others of its host."""

from __future__ import annotations

import hmac
import logging
import mmap
import time
from typing import TYPE_CHECKING, Any, Final

import attrs

from shmcast._ring import EndLock
from shmcast.config import QueueConfig
from shmcast.door import Watch
from shmcast.ends import QueueEnd
from shmcast.errors import MessageTooLarge, QueueFull, ReaderLost
from shmcast.handle import Handle
from shmcast.writer import Writer

if TYPE_CHECKING:
    from shmcast.remote import RingSizes

__all__ = ["NUMBER_BYTES", "Relay", "relay_handle"]

_log = logging.getLogger("shmcast.queue")

NUMBER_BYTES: Final = 8  # of the message's number, before each stream that a relay passes on


class Relay(QueueEnd):
    """
    A writer of parts that never waits: who is too slow for it is evicted, and asks its own writer.

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
                chunk_bytes=sizes.chunk_bytes + mmap.PAGESIZE,  # for the number of each message
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
        self._writer.control.keep_nothing()
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

    def tend(self) -> None:
        """Answer the readers of this host, and see who has left or died; never waits."""
        with self._lock:
            self._writer.look()

    def pass_on(self, number: int, stream: Any, buffers: list[Any]) -> None:
        """Put a message into the ring; never waits."""
        with self._lock:
            writer = self._writer
            for rank, lag in enumerate(writer.ring.lags()):
                if lag >= self._n_chunks:
                    writer.roster.evict(rank)
            if not self.has_readers:
                return
            parts = [number.to_bytes(NUMBER_BYTES, "little"), bytes(stream)]
            views = [memoryview(buffer) for buffer in buffers]
            try:
                if views or writer.try_publish(parts, views):
                    writer.publish(parts, views, time.monotonic())
            except (QueueFull, MessageTooLarge, ReaderLost) as error:
                _log.info("%s can't pass on message %d: %s", self._name, number, error)
                for rank in writer.ring.expected_ranks():
                    writer.roster.evict(rank)

    def close(self) -> None:
        """Tell the readers that nothing follows."""
        self._close()

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        self._writer.close_inherited()

    def _step_alone(self) -> float:
        return self._writer.step_alone()

    def _nudge(self) -> None:
        self._writer.nudge()

    def _stop_waits(self) -> None:
        """There are none."""

    def _say_failed(self, text: str) -> None:
        self._writer.say_failed(text)

    def _finish(self) -> None:
        if hasattr(self, "_writer"):  # else the constructor failed
            self._writer.say_closing()
            self._writer.close()
        self._watch.close()


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
