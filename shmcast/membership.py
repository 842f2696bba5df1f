"""Which ranks a writer's ring waits for: what the doors of a queue tell its ring and arena."""

from __future__ import annotations

from collections.abc import Iterable

from shmcast._ring import RingReader, RingWriter
from shmcast.arena import Arena
from shmcast.locks import Process
from shmcast.segment import Segment

__all__ = ["Membership"]


class Membership:
    """
    The attachments of the ranks of one queue. Used in the turns of the writer's end.

    Args:
        segment: the queue's memory.
        ring: waits for the ranks.
        arena: has what they received.
        ranks: all of them.

    Attributes:
        new_ranks: those that were never admitted, which the ring waits for all the same.
    """

    def __init__(
        self, segment: Segment, ring: RingWriter, arena: Arena, ranks: Iterable[int]
    ) -> None:
        self._segment, self._ring, self._arena = segment, ring, arena
        self.new_ranks = set(ranks)

    def new_epoch(self, rank: int) -> int:
        """Begin the rank's next attachment, which ends the one before it; returns its epoch."""
        return self._ring.new_epoch(rank)

    def new_place(self, rank: int) -> RingReader:
        """The same, for a reader that does not map the ring: what holds its place there."""
        return RingReader(self._segment, rank, self._ring.new_epoch(rank))

    def admit(self, rank: int) -> int:
        """
        Wait for the rank's attachment; returns the number of the message that it starts with.

        A new rank starts with message 0, any other with the next one.
        """
        # resumable: who admits takes the rank out of `new_ranks` when it has recorded the answer.
        return self._ring.admit(rank, rank in self.new_ranks)

    def has_left(self, rank: int) -> bool:
        """Whether the rank's present attachment has left."""
        return self._ring.has_left(rank)

    def strike(self, rank: int, process: Process | None = None) -> None:
        """
        End the rank's attachment, and wait for it no longer.

        Args:
            rank: the rank.
            process: the process of its attachment, which keeps what it may have leased; None if it
                keeps nothing.
        """
        self._arena.strike(rank, process)

    def keep_nothing(self) -> None:
        """Let every rank start with the next message, a new one too."""
        for rank in self.new_ranks:
            self.strike(rank)
        self.new_ranks.clear()
