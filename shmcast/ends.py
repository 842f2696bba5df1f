"""The ends of this process: turns, steps, closing, and what becomes of them when it exits."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
from types import TracebackType
from typing import Protocol, Self

from shmcast._ring import EndLock
from shmcast.control import failure_text
from shmcast.door import Watch, all_ends
from shmcast.errors import QueueClosed, ShmcastError

__all__ = ["Exit", "QueueEnd", "Transport"]

_log = logging.getLogger("shmcast.queue")


class _TurnTaken(Exception):
    """The end is in use."""


class Transport(Protocol):
    """What an end needs of its transport outside of its turns: from any thread, at any time."""

    def nudge(self) -> None:
        """End the present wait, for something has come."""

    def stop(self) -> None:
        """End the present wait and all later ones."""

    def say_failed(self, text: str) -> None:
        """Have the other side told why this end closes."""

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""


class QueueEnd:
    """What all ends share: turns, steps, closing, the context manager."""

    _lock: EndLock
    _watch: Watch

    @property
    def _transport(self) -> Transport | None:
        """Its transport; None before the constructor has made it and after `close`."""
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._lock.is_closing

    def _close(self, error: BaseException | str | None = None) -> None:
        if not isinstance(error, BaseException | str | None):
            raise TypeError(f"error = {error!r} is not allowed; allowed is an exception or a text")
        if self._lock.is_forked:
            return
        if error is not None and (transport := self._transport) is not None:
            # First: a peer that sees the closing mark has to see this too.
            transport.say_failed(failure_text(error))
        self._lock.close(self._finish)
        if (transport := self._transport) is not None:  # another call has the turn, and finishes it
            transport.stop()
        self._watch.close()  # again: the door thread may have closed this end, and ends itself

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error if self._is_failure(error) else None)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):  # not if the constructor failed
            self._close()

    def _is_failure(self, error: BaseException | None) -> bool:
        """Whether a program that leaves by this error has failed this end."""
        if isinstance(error, SystemExit):
            return error.code not in (None, 0)
        if isinstance(error, QueueClosed):
            return not self._is_over
        return error is not None and not isinstance(error, GeneratorExit)

    @property
    def _is_over(self) -> bool:
        """Whether its calls raise QueueClosed."""
        return self.closed

    def take_step(self) -> float | None:
        """For the door thread; see `door.End`."""
        try:
            with self._lock.step(_TurnTaken):
                return self._step_alone()
        except _TurnTaken:
            if (transport := self._transport) is not None:
                transport.nudge()
            return None
        except (ShmcastError, OSError):
            return math.inf  # the end's next call meets it again, and says so

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        if (transport := self._transport) is not None:
            transport.close_inherited()

    def _step_alone(self) -> float:
        """Take a step while no call of the end does; returns when it is due again."""
        raise NotImplementedError

    def _finish(self) -> None:
        raise NotImplementedError


class Exit:
    """What becomes of the ends that are open when the interpreter ends."""

    _finalizer: object = None

    @classmethod
    def expect(cls) -> None:
        """See to one more end."""
        # Anew for each end: what is registered last runs first, and has to run before the I/O
        # thread's own, which takes an open end for abandoned.
        atexit.unregister(cls._fail_all)
        atexit.register(cls._fail_all)
        # The children of `multiprocessing` have it, and leave `atexit` out.
        util = sys.modules.get("multiprocessing.util")
        if util is not None and cls._finalizer is None:
            cls._finalizer = util.Finalize(None, cls._fail_all, exitpriority=1)

    @classmethod
    def after_fork_in_child(cls) -> None:
        """The child's own ends register anew."""
        cls._finalizer = None

    @staticmethod
    def _fail_all() -> None:
        """Close every end with the error that ends the interpreter, if one is known to."""
        error = _uncaught()
        for end in all_ends():
            if isinstance(end, QueueEnd) and end._is_failure(error):
                try:
                    end._close(error)
                except Exception:  # the others are closed whatever that raises
                    _log.exception("%r can't be closed", end)


os.register_at_fork(after_in_child=Exit.after_fork_in_child)


def _uncaught() -> BaseException | None:
    """The exception that ends the interpreter or a child of `multiprocessing`, if it shows."""
    process = sys.modules.get("multiprocessing.process")
    error = sys.exception()
    if process is not None and error is not None:
        start = error.__traceback__
        # Else the process was forked while its parent handled this error.
        if start and start.tb_frame.f_code is process.BaseProcess._bootstrap.__code__:
            return error
    error = getattr(sys, "last_value", None)
    start = None if error is None else error.__traceback__
    # An error that a framework stored here began in one of its functions, not at the program's
    # start; a prompt stores those that it went on after.
    if start and start.tb_frame.f_back is None and not hasattr(sys, "ps1"):
        return error
    return None
