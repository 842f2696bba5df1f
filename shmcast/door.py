"""
The door thread: an end does what it owes to others while its program does something else.

A program publishes and then computes, sleeps or waits for its child. Meanwhile a reader may want to
attach, or die. So each process has one thread that sleeps until something comes for one of its ends
and then takes that end's step. It has no period, publishes nothing and holds nothing while it
sleeps. It is there while an end has something to wait for.

An end that is in use is told, and left to its own call; the thread tries again after the call.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
import time
import weakref
from _thread import RLock, get_ident  # gevent replaces the one in `threading`
from collections.abc import Callable
from typing import Final, Protocol

from shmcast._system import EVENT_ONCE, EVENT_READABLE, Poller, Thread, name_thread
from shmcast.errors import is_foreign

__all__ = ["End", "Watch", "all_ends", "say"]

_log = logging.getLogger("shmcast.door")

# Between two tries at one end, whatever comes meanwhile; it grows while they follow each other.
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.128
_CALM_S: Final = 1.0  # after this long without a try the pause is as at first
# How long to wait for the thread's end, which is late if a log handler keeps it.
_EXIT_S: Final = 1.0
_CLOSE_S: Final = 0.1
_WAKE_KEY: Final = 0


class End(Protocol):
    """What the door knows of an end."""

    def take_step(self) -> float | None:
        """
        Take the end's next step, without waiting.

        Returns when to do it again at the latest, as a time of `time.monotonic`, or None if the end
        is in use: then its call has been told, and the watch is told when it is over.
        """

    def close_inherited(self) -> None:
        """Close what a forked child has of the end."""


class Watch:
    """
    An end of this process, and the descriptors that the thread waits for on its behalf.

    Args:
        end: it is referenced weakly.
    """

    def __init__(self, end: End) -> None:
        self.key = next(_keys)
        self._end = weakref.ref(end, lambda _: self.close())
        self._descriptors: set[int] = set()
        self._tried_at = -math.inf
        self._pause_s = 0.0
        self._has_failed = False
        self.due_at = math.inf  # when to take a step though nothing has come
        _watches[self.key] = self

    @property
    def end(self) -> End | None:
        """The end, unless it has been collected."""
        return self._end()

    def watch(self, *descriptors: int) -> None:
        """
        Take a step of the end whenever one of these is readable, and no others from now on.

        All that were watched before are still open.

        Raises:
            OSError: the system has no room for a thread, or for the descriptors that it needs.
        """
        with _Door.lock:
            door = _Door.current
            if door is None and descriptors:
                door = _Door.start()
            if door is None:  # nothing is watched
                self._descriptors.clear()
                return
            if descriptors:
                door.watches[self.key] = self
            for descriptor in descriptors:
                self._descriptors.add(descriptor)
                with contextlib.suppress(FileExistsError):  # a signal interrupted this call
                    door.poller.add(descriptor, EVENT_READABLE | EVENT_ONCE, self.key)
            for descriptor in self._descriptors.difference(descriptors):
                with contextlib.suppress(OSError):  # the program closed it
                    door.poller.remove(descriptor)
                self._descriptors.discard(descriptor)
            if not descriptors:
                door.watches.pop(self.key, None)
        if not door.watches:
            door.end(_CLOSE_S)

    def close(self) -> None:
        """The end is closed."""
        self.watch()
        _watches.pop(self.key, None)

    def arm(self) -> None:
        """Wait for what comes from now on: each time it is waited for once."""
        door = _Door.current
        if door is None:
            return
        for descriptor in list(self._descriptors):
            try:
                door.poller.modify(descriptor, EVENT_READABLE | EVENT_ONCE, self.key)
            except OSError as error:  # the program closed it
                if is_foreign(error):
                    raise

    def is_free(self) -> None:
        """The call that the end was in is over."""
        with _Door.lock:
            self.due_at = 0.0
            door = _Door.current
            if door is not None:
                door.wake()

    def serve(self, now: float) -> None:
        """Take a step, or put it off if there was one a moment ago."""
        if now < self._tried_at + self._pause_s:
            self.due_at = self._tried_at + self._pause_s
            return
        is_calm = now > self._tried_at + _CALM_S
        self._pause_s = _FIRST_PAUSE_S if is_calm else min(2 * self._pause_s, _LONGEST_PAUSE_S)
        self._tried_at = now
        self.due_at = math.inf
        end = self.end
        if end is None:
            return
        due_at: float | None = now
        try:
            due_at = end.take_step()
        except BaseException:  # tried again, and said once; the other ends go on
            if not self._has_failed:
                _log.exception("a step of %r failed", end)
            self._has_failed = True
        del end  # one that nobody else has is closed here, not after the next sleep
        if due_at is not None:
            self.due_at = min(self.due_at, due_at)
            self.arm()


class _Door:
    """
    The thread and what it sleeps on.

    Ends come and go in any thread, also in a signal handler or the garbage collector: so the tables
    are changed by single operations, and the poller may be changed while the thread sleeps in it.
    """

    current: _Door | None = None
    lock = RLock()  # reentrant, as a signal handler may make an end too

    def __init__(self) -> None:
        self.poller = Poller()
        self._thread: Thread
        self.watches: dict[int, Watch] = {}  # those with descriptors
        self.calls: list[Callable[[], object]] = []
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.add(self._wake, EVENT_READABLE, _WAKE_KEY)
        self._is_exiting = False
        self._ident: int | None = None

    @classmethod
    def start(cls) -> _Door:
        """A new thread; the caller has the lock."""
        door = cls()
        try:
            door._thread = Thread(door._run)
        except BaseException:
            door.close()
            raise
        cls.current = door
        return door

    def close(self) -> None:
        self.poller.close()
        os.close(self._wake)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        name_thread(b"shmcast-door")
        self._ident = get_ident()
        while not self._has_ended():
            due_at = min((watch.due_at for watch in list(self.watches.values())), default=math.inf)
            left_s = max(0.0, due_at - time.monotonic())
            keys = self.poller.wait(None if due_at == math.inf else left_s)
            if _WAKE_KEY in keys:
                os.eventfd_read(self._wake)
            while self.calls:
                self._call(self.calls.pop(0))
            now = time.monotonic()
            for watch in list(self.watches.values()):
                if watch.key in keys or watch.due_at <= now:
                    watch.serve(now)

    @staticmethod
    def _call(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:  # a log handler's own, which nobody else would hear of
            sys.excepthook(*sys.exc_info())

    def _has_ended(self) -> bool:
        with _Door.lock:
            if not self._is_exiting and (self.watches or self.calls):
                return False
            _Door.current = None
            self.close()
            return True

    @classmethod
    def at_exit(cls) -> None:
        """
        Let the thread end before the interpreter does.

        That would stop it anywhere, and so leave locks behind that the last destructors need.
        """
        door = cls.current
        if door is not None:
            door._is_exiting = True
            door.end(_EXIT_S)

    def end(self, timeout_s: float) -> None:
        """Wait for so long until the thread, which no end needs, has closed what it has open."""
        with self.lock:
            if _Door.current is not self:
                return
            self.wake()
        if get_ident() != self._ident:
            self._thread.join(timeout_s)


_keys = itertools.count(_WAKE_KEY + 1)
_watches: dict[int, Watch] = {}  # of all ends of this process


def all_ends() -> list[End]:
    """The ends of this process that are open."""
    ends = [watch.end for watch in list(_watches.values())]
    return [end for end in ends if end is not None]


def say(log: Callable[..., object], *arguments: object) -> None:
    """
    Log something in the door thread, if there is one.

    For a call that holds its end: a log handler may wait for a thread that waits for the end.
    """
    call = functools.partial(log, *arguments)
    with _Door.lock:
        door = _Door.current
        if door is not None:
            door.calls.append(call)
            door.wake()
            return
    call()


def _after_fork_in_child() -> None:
    """The child has no such thread; what it inherits would keep its parent's files open."""
    _Door.lock = RLock()
    door, _Door.current = _Door.current, None
    if door is not None:
        door.close()
    ends = all_ends()
    _watches.clear()
    for end in ends:
        with contextlib.suppress(OSError, AttributeError):  # one that is closing just now
            end.close_inherited()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_Door.at_exit)
