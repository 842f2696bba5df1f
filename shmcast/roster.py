"""The readers that a writer waits for: who has left, died or failed, and how far each one is."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from shmcast._ring import EndLock, RingWriter
from shmcast.control import FailedAttempt, named
from shmcast.errors import ProtocolError
from shmcast.membership import Membership

__all__ = ["Door", "Member", "Roster", "log_after", "ranks_text"]

_log = logging.getLogger("shmcast.queue")


class Member(Protocol):
    """A reader that a door has let in."""

    rank: int

    @property
    def pid(self) -> int | str:
        """Its process, with the host if that is another one."""


M = TypeVar("M", bound=Member)


class Door(Protocol[M]):
    """Where readers come in: the control socket of this host, or the one for others."""

    @property
    def holders(self) -> Mapping[int, M]:
        """The reader that has, or was offered, each rank."""

    @property
    def missing_ranks(self) -> Sequence[int]:
        """The ranks that nobody holds."""

    @property
    def failed_attempts(self) -> Mapping[int, FailedAttempt]:
        """What kept ranks from attaching."""

    def admitted(self) -> Iterator[M]:
        """Those that are waited for."""

    def is_dead(self, holder: M, /) -> bool:
        """Whether it has died; raises ProtocolError if it broke the protocol."""

    def failure_of(self, holder: M, /) -> str | None:
        """Why one that has left or died did so, if it said."""

    def vacate(self, rank: int, /) -> None:
        """End the rank's attachment; it may be claimed again."""


class Roster:
    """
    Everything about the readers of one writer. Used in the turns of its end.

    Args:
        ring: where their cursors are.
        members: which of them it waits for.
        doors: where they come in.
        lock: of the writer's end.

    Attributes:
        losses: how many readers were lost.
        unreported: the losses that no call has reported so far: rank → (text, whether its memory
            is damaged).
    """

    def __init__(
        self,
        ring: RingWriter,
        members: Membership,
        doors: Sequence[Door[Any]],
        lock: EndLock,
    ) -> None:
        self.losses = 0
        self.unreported: dict[int, tuple[str, bool]] = {}
        self._ring, self._members, self._doors = ring, members, doors
        self._lock = lock
        self._last_lost: Member | None = None
        # Each one's cursor at the last look, and when it had moved.
        self._seen: weakref.WeakKeyDictionary[Member, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )

    def survey(self) -> None:
        """See who has left, died or failed since the last time."""
        ring = self._ring
        now = time.monotonic()
        lags = ring.lags()
        for door, member in self._admitted():
            rank = member.rank
            cursor = ring.messages - lags[rank]
            if self._seen.get(member, (None,))[0] != cursor:
                self._seen[member] = cursor, now
            text, is_damage = None, False
            try:
                # A reader that left before it died has left.
                is_dead = door.is_dead(member)
                has_left = self._members.has_left(rank)
                failure = door.failure_of(member) if is_dead or has_left else None
                if failure is not None:
                    text = f"{self._who(rank)} failed {lags[rank]} messages behind: {failure}"
                elif has_left:
                    log_after(self._lock, logging.INFO, "%s has left", self._who(rank))
                    door.vacate(rank)
                    continue
                elif is_dead:
                    text = f"{self._who(rank)} died {lags[rank]} messages behind"
            except ProtocolError as error:
                text, is_damage = str(error), True
            if rank == ring.damaged():
                text = f"{self._who(rank)} stored a cursor that is out of range"
                is_damage = True
            if text is not None:
                if self._last_lost is not member:  # else a signal came before it was vacated
                    self.losses += 1
                    self._last_lost = member
                self.unreported[rank] = text, is_damage
                door.vacate(rank)
                self._last_lost = None

    def evict(self, rank: int) -> None:
        """End the attachment of a reader that is alive."""
        for door in self._doors:
            if rank in door.holders:
                door.vacate(rank)

    def take_lost(self) -> dict[int, tuple[str, bool]]:
        """The unreported losses, which count as reported from now on."""
        lost, self.unreported = dict(sorted(self.unreported.items())), {}
        return lost

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that no reader holds."""
        return tuple(sorted(rank for door in self._doors for rank in door.missing_ranks))

    @property
    def ranks_behind(self) -> tuple[int, ...]:
        """The ranks that are furthest behind; all of them if none is attached."""
        lags = self._ring.lags()
        if not self._ring.expected_ranks():
            return tuple(range(len(lags)))
        return tuple(rank for rank, lag in enumerate(lags) if lag and lag == max(lags))

    @property
    def missed(self) -> dict[int, int]:
        """How many messages each rank that has no reader did not get."""
        attached = {member.rank for _, member in self._admitted()}
        lags = enumerate(self._ring.lags())
        return {rank: lag for rank, lag in lags if lag and rank not in attached}

    def attempts_text(self, ranks: Iterable[int]) -> str:
        """What kept these ranks from attaching, as far as it is known."""
        attempts = {
            rank: text for door in self._doors for rank, text in door.failed_attempts.items()
        }
        return "".join(
            f"; rank {rank} could not attach: {attempts[rank]}"
            for rank in ranks
            if rank in attempts
        )

    def lag_text(self, ranks: tuple[int, ...]) -> str:
        """How far behind these ranks are, and since when."""
        if not self._ring.expected_ranks():
            return f"nobody is attached, {ranks_text(ranks)} left or died"
        lags, now = self._ring.lags(), time.monotonic()
        texts = []
        for rank in ranks:
            text = f"{self._who(rank)} is {lags[rank]} messages behind"
            member = self._holder_of(rank)
            if member is not None and member in self._seen:
                text += f", last seen {now - self._seen[member][1]:.3g} s ago"
            texts.append(text)
        return "; ".join(texts) + self.attempts_text(ranks)

    def _admitted(self) -> Iterator[tuple[Door[Any], Member]]:
        """Every admitted reader, with the door that it came through."""
        return ((door, member) for door in self._doors for member in door.admitted())

    def _holder_of(self, rank: int) -> Member | None:
        holders = (door.holders.get(rank) for door in self._doors)
        return next((holder for holder in holders if holder is not None), None)

    def _who(self, rank: int) -> str:
        holder = self._holder_of(rank)
        return f"rank {rank} ({named(holder.pid)})" if holder else f"rank {rank} (not attached)"


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as errors name them."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def log_after(lock: EndLock, level: int, text: str, *arguments: object) -> None:
    """Log something after the present turn, for a handler may wait for it."""
    lock.defer(functools.partial(_log.log, level, text, *arguments))
