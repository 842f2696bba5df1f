"""How an end waits: for how long, in what slices, and when it says so."""

from __future__ import annotations

import math
import time
from typing import Any, Final

from shmcast._ring import EndLock
from shmcast.errors import QueueClosed
from shmcast.segment import cpus_available

__all__ = ["Wait", "check_open", "deadline_of", "spin_ns_of"]

_FIRST_PROBE_S: Final = 0.001  # after a shorter wait nobody asks who is alive
# A sleep is cut in slices only to notice what nobody tells; a wake-up never depends on it. An end
# whom the door thread tells of a death needs none, but a lock that is lost, or a clock that jumped.
_TOLD_SLICE_S: Final = 1.0
# Slices of 10 ms for ever would cost 1.0 to 1.6 % of a core, 40 ms cost 0.5 %.
_SHORT_SLICE_S: Final = 0.010
_LONG_SLICE_S: Final = 0.040
_SHORT_SLICES_UNTIL_S: Final = 0.100


def deadline_of(timeout: Any) -> float:
    """The time of `time.monotonic` when a timeout is over; infinity for None."""
    if timeout is None:
        return math.inf
    refusal = f"timeout = {timeout!r} is not allowed; allowed is None or seconds from 0"
    if isinstance(timeout, str | bytes):
        raise TypeError(refusal)
    try:
        seconds = float(timeout)  # of a numpy or torch scalar too, which may be of low precision
    except TypeError:
        raise TypeError(refusal) from None
    except OverflowError:
        return math.inf
    if not seconds >= 0:  # NaN too
        raise ValueError(refusal)
    return time.monotonic() + seconds


class Wait:
    """One wait of an end: how long it has taken, how long to sleep next, when to warn."""

    def __init__(self, deadline: float, warn_after_s: float, spin_ns: int = 0) -> None:
        self.start = time.monotonic()
        self._spin_ns = spin_ns  # what is left of it
        self._deadline = deadline
        self._warn_after_s = warn_after_s
        self._warn_at = self.start + warn_after_s
        self._is_first = True
        self.has_had_last_try = False  # whether the end looked around once after the deadline

    @property
    def elapsed_s(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.start

    @property
    def has_just_begun(self) -> bool:
        """Whether it is too early to ask who is alive."""
        return self.elapsed_s < _FIRST_PROBE_S

    def slice_s(self, *, is_told: bool) -> float:
        """
        How long to wait now: a slice, but not past the deadline. 0 when the time is up.

        Args:
            is_told: whether the door thread ends the wait when the other side has died.
        """
        if self._is_first:  # so nothing has been waited for: most messages ask for no time here
            self._is_first = False
            return max(0.0, min(_FIRST_PROBE_S, self._deadline - self.start))
        now = time.monotonic()
        if is_told:
            most = _TOLD_SLICE_S
        elif now - self.start < _SHORT_SLICES_UNTIL_S:
            most = _SHORT_SLICE_S
        else:
            most = _LONG_SLICE_S
        return max(0.0, min(most, self._deadline - now, max(_FIRST_PROBE_S, self._warn_at - now)))

    def untold_s(self, slice_s: float) -> float:
        """How long of this slice to wait for what comes without a word."""
        is_early = self.elapsed_s < _SHORT_SLICES_UNTIL_S
        return min(slice_s, _FIRST_PROBE_S) if is_early else slice_s

    def spin_and_sleep_ns(self, slice_s: float) -> tuple[int, int]:
        """For how long of this slice to poll, and how long to sleep after that."""
        slice_ns = int(slice_s * 1e9)
        spin_ns = min(self._spin_ns, slice_ns)
        self._spin_ns -= spin_ns
        return spin_ns, slice_ns - spin_ns

    def is_long(self) -> bool:
        """Whether to warn now; true once per interval."""
        now = time.monotonic()
        if now < self._warn_at:
            return False
        self._warn_at = now + self._warn_after_s  # not the next of many, after a stop
        return True


def check_open(lock: EndLock, name: str) -> None:
    """Raise QueueClosed if the end was closed meanwhile."""
    lock.check_not_forked()  # a signal handler may have forked meanwhile
    if lock.is_closing:
        raise QueueClosed(f"{name} was closed while it waited")


def spin_ns_of(spin_us: int, n_readers: int) -> int:
    """How long to poll before sleeping: not at all if the ends on this host have to share CPUs."""
    return spin_us * 1000 if cpus_available() >= 1 + n_readers else 0
