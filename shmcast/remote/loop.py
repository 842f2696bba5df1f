"""
The one I/O thread of a process, which minds every link that nobody else is minding.

A link has a lock, under which its sockets are used: by this thread, or by its owner within a call.
ZeroMQ's descriptors are readable when something has changed, not as long as there is something to
receive. So whoever has used a socket looks at its EVENTS before it lets the lock go, and receives
what there is or asks the thread to.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import hmac
import itertools
import logging
import math
import multiprocessing.util
import os
import select
import signal
import socket as net
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import zmq
import zmq.utils.garbage  # its `atexit` has to be registered before ours
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from shmcast.errors import ConfigError
from shmcast.remote.timing import Timing

__all__ = [
    "BATCH",
    "Event",
    "Link",
    "Loop",
    "allow",
    "check_descriptors",
    "has_come",
    "monitored",
    "set_common_options",
]

_log = logging.getLogger("shmcast.remote")

_SPARE_DESCRIPTORS: Final = 24  # more than a context and an end's sockets take
BATCH: Final = 100  # how many messages one socket is served in turn
_IO_THREADS: Final = 2  # a large message that one of them encrypts holds up half of the links
_MOST_SOCKETS: Final = 16_000
_MOST_LATE_S: Final = 0.1  # a thread that wakes up later than this did not run
_OWNED_PAUSE_S: Final = 0.002


def has_come(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is something to receive; an error that says no costs twice as much."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def monitored(monitor: zmq.Socket[bytes]) -> Iterator[dict[str, Any]]:
    """The events that have come."""
    while has_come(monitor):
        yield dict(recv_monitor_message(monitor))


class Event:
    """What one thread waits for and others set; whoever made it closes it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def set(self) -> None:
        """End the wait, or the next one."""
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Let the next wait wait."""
        with contextlib.suppress(BlockingIOError):  # it was not set
            os.eventfd_read(self.descriptor)

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Give the descriptor back."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor != -1:
            _close(descriptor)  # kept, since this may come after the end of the module `os`

    __del__ = close


def check_descriptors() -> None:
    """Raise OSError if few are left: ZeroMQ would end the process where it gets none."""
    with contextlib.ExitStack() as taken:
        for _ in range(_SPARE_DESCRIPTORS):
            taken.callback(os.close, os.eventfd(0, os.EFD_CLOEXEC))


class Link:
    """
    An end's sockets, used under `lock`.

    Attributes:
        timing: how long links wait for what.
        lock: whoever has it may use the sockets.
        may_be_held: whether an owner holds it while it waits for a message, a slice long.
        is_wanted: whether the thread has found the lock taken; its owner lets it go then.
        is_closing: whether the end was closed.
        is_done: whether the sockets are closed.
        is_settled: whether a process that ends need not wait for it.
    """

    timing: ClassVar[Timing] = Timing()
    may_be_held: ClassVar[bool] = False

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.lock = threading.Lock()
        self.due_at = 0.0
        self.affinity = next(loop.affinities)
        self.is_wanted = self.is_closing = self.is_done = self.is_settled = False
        self.port = 0

    def ask(self) -> None:
        """Have the thread run this link soon, from any thread."""
        if not self.is_done:
            self.loop.asked.append(self)
            self.loop.wake()

    def begin(self) -> None:
        """Called once, before all else."""

    def run(self, now: float) -> float:
        """Do what there is to do; returns when to call again at the latest."""
        raise NotImplementedError

    def abort(self, error: str) -> None:
        """Close the sockets at once; the end's calls raise this from now on."""
        raise NotImplementedError

    def owns(self, found: net.socket) -> bool:
        """Whether this TCP socket is one of its own; may raise OSError."""
        raise NotImplementedError


class Loop:
    """The one I/O thread of this process; it ends with its last link."""

    current: ClassVar[Loop | None] = None
    lock = threading.RLock()  # reentrant, since a signal handler may make an end too

    def __init__(self) -> None:
        self.context = zmq.Context(io_threads=_IO_THREADS)
        self.context.max_sockets = _MOST_SOCKETS
        self.affinities = itertools.cycle(1 << number for number in range(_IO_THREADS))
        # Of each queue, by domain: the mechanism and what a reader has to show.
        self.credentials: dict[str, tuple[bytes, bytes]] = {}
        self.n_users = 0
        self.now = 0.0  # how long this thread has run, and waited for what it waits for
        self.asked: collections.deque[Link] = collections.deque()
        self.links: list[Link] = []
        self._new_links: collections.deque[Link] = collections.deque()
        self._wake = Event()
        self._wake_lock = threading.RLock()  # reentrant, since a signal handler may close an end
        self._epoll = select.epoll()
        self._watched: dict[int, Link | None] = {}
        self._zap = self.context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        for descriptor in (self._wake.descriptor, self._zap.FD):
            self._epoll.register(descriptor, select.EPOLLIN)
        self.is_exiting = False
        self._is_settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shmcast-remote", daemon=True)
        # It comes before pyzmq's own, which gives up the memory that is on its way. The children of
        # `multiprocessing` leave `atexit` out.
        atexit.register(self._at_exit)
        self._finalizer = multiprocessing.util.Finalize(None, self._at_exit, exitpriority=0)

    @classmethod
    def enter(cls) -> Loop:
        """
        The loop, for one more link; `leave` or a link that is done gives it back.

        Raises:
            ConfigError: gevent has replaced what the thread needs.
            OSError: there are not enough descriptors.
        """
        if not hasattr(select, "epoll"):
            raise ConfigError(
                "remote ranks need select.epoll and threads, which gevent has replaced in this "
                "process; allowed is monkey.patch_all(select=False, thread=False)"
            )
        with cls.lock:
            check_descriptors()
            loop = cls.current or cls()
            loop.n_users += 1
            if cls.current is None:
                loop._thread.start()
                cls.current = loop
            return loop

    def leave(self) -> None:
        """Give it back, where no link was made."""
        with self.lock:
            self.n_users -= 1
            if self.n_users == 0 and Loop.current is self:
                Loop.current = None
        self.wake()

    def add(self, link: Link) -> None:
        """Run a new link."""
        self._new_links.append(link)
        self.wake()

    def wake(self) -> None:
        """Have the thread look at what is due, from any thread."""
        with self._wake_lock:
            if self._wake.descriptor != -1:  # else the thread has ended, and its links with it
                self._wake.set()

    def watch(self, link: Link, descriptor: int) -> None:
        """Run the link when the descriptor is readable."""
        self._epoll.register(descriptor, select.EPOLLIN)
        self._watched[descriptor] = link

    def mute(self, descriptor: int, *, is_muted: bool) -> None:
        """Leave a watched descriptor to the link's owner, or no more."""
        self._epoll.modify(descriptor, 0 if is_muted else select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Watch it no more."""
        self._watched.pop(descriptor, None)
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)

    def drop(self, *sockets: zmq.Socket[bytes], linger_ms: int = 0) -> None:
        """Close sockets that are watched; what they were given has so long to go out."""
        for socket in sockets:
            if not socket.closed:
                self.forget(int(socket.FD))
                socket.close(linger_ms)

    @property
    def runs_here(self) -> bool:
        """Whether this is its thread, where the garbage collector may close an end anywhere."""
        return threading.get_ident() == self._thread.ident

    def wait_until_settled(self, link: Link) -> None:
        """Wait for a link that is closed while the process ends, when nobody else waits for it."""
        while self._thread.is_alive() and not link.is_done:
            time.sleep(link.timing.tracker_s)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the callers'
        timeout_s, last = 0.0, time.monotonic()
        while self.n_users or self.links or self._new_links:
            fired = [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]
            woken = time.monotonic()
            self.now += min(woken - last, timeout_s + _MOST_LATE_S)
            last = woken
            due = self._due(fired)
            if self._zap.FD in fired:
                self._answer_zap()
            next_at = self.now + Link.timing.beat_s
            for link in list(self.links):
                if link in due or link.due_at <= self.now:
                    self._serve(link, is_wanted=link in due)
                next_at = min(next_at, link.due_at)
            self._see_whether_settled()
            timeout_s = 0.0 if self.asked or self._new_links else max(0.0, next_at - self.now)
        self._zap.close(0)
        self._epoll.close()
        self.asked.clear()
        self.context.term()
        with self._wake_lock:
            self._wake.close()
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()

    def _due(self, fired: list[int]) -> set[Link]:
        """The links that there is something for."""
        due: set[Link] = set()
        if self._wake.descriptor in fired:
            self._wake.clear()
        while self._new_links:
            link = self._new_links[0]
            self.links.append(link)
            self._new_links.popleft()
            link.begin()
            due.add(link)
        while self.asked:
            due.add(self.asked.popleft())
        for descriptor in fired:
            watching = self._watched.get(descriptor)
            if watching is not None:
                due.add(watching)
        return due

    def _serve(self, link: Link, *, is_wanted: bool) -> None:
        if not link.lock.acquire(blocking=not link.may_be_held):
            link.is_wanted = link.is_wanted or is_wanted
            link.due_at = self.now + (_OWNED_PAUSE_S if link.is_wanted else link.timing.owner_s)
            return
        try:
            link.is_wanted = False
            try:
                link.due_at = link.run(self.now)
            except Exception as error:
                _log.exception("an end with remote peers failed")
                self._abort(link, f"its I/O failed: {error!r}")
        finally:
            link.lock.release()
        if link.is_done:
            self.links.remove(link)
            link.due_at = math.inf
            self.leave()

    @staticmethod
    def _abort(link: Link, error: str) -> None:
        """Abort it; the other ends go on whatever that raises."""
        try:
            link.abort(error)
        except Exception:
            _log.exception("an end with remote peers can't be closed")
            link.is_done = True

    def _answer_zap(self) -> None:
        """Let in who has the secret of the queue that was asked for (ZeroMQ's RFC 27)."""
        while has_come(self._zap):
            request = self._zap.recv_multipart()
            version, request_id, domain, _address, _identity, mechanism, *shown = request
            expected = self.credentials.get(domain.decode("ascii", "replace"))
            allowed = (
                expected is not None
                and mechanism == expected[0]
                and len(shown) > 0
                and hmac.compare_digest(shown[-1], expected[1])
            )
            code, text = (b"200", b"OK") if allowed else (b"400", b"unknown key")
            self._zap.send_multipart([version, request_id, code, text, b"", b""])

    def _see_whether_settled(self) -> None:
        if self.is_exiting and all(link.is_settled for link in self.links):
            self._is_settled.set()

    def _at_exit(self) -> None:
        """
        Wait until the peers have heard all that was said, also that this process is ending.

        Handlers that were registered earlier come later, and may still use and close ends.
        """
        self.is_exiting = True
        self.asked.extend(self.links)
        self.wake()
        while self._thread.is_alive() and not self._is_settled.is_set():
            self._is_settled.wait(Link.timing.beat_s)

    @classmethod
    def after_fork_in_child(cls) -> None:
        """
        The child has no such thread, and keeps no connection of its parent open after its death.

        ZeroMQ does not say which descriptors are its own; the ports and addresses do.
        """
        cls.lock = threading.RLock()
        loop, cls.current = cls.current, None
        if loop is None:
            return
        _inherited.append(loop)  # never freed: ZeroMQ would touch what is the parent's
        links = [*loop.links, *loop._new_links]
        for path in list(Path("/proc/self/fd").iterdir()):
            descriptor = int(path.name)
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with net.socket(fileno=os.dup(descriptor)) as found:
                    is_ip = found.family in (net.AF_INET, net.AF_INET6)
                    if not is_ip or found.type != net.SOCK_STREAM:
                        continue
                    for link in links:
                        with contextlib.suppress(OSError):  # it has no peer
                            if link.owns(found):
                                os.close(descriptor)
                                break


_inherited: list[Loop] = []
os.register_at_fork(after_in_child=Loop.after_fork_in_child)


def allow(loop: Loop, domain: str, *, key: str | None, token: bytes) -> None:
    """Let those into a domain who have this public key, or without one show the token."""
    loop.credentials[domain] = (b"CURVE", z85.decode(key)) if key else (b"PLAIN", token)


def set_common_options(socket: zmq.Socket[bytes], address: str, link: Link) -> None:
    """What both sides' sockets have in common."""
    timing = link.timing
    socket.linger = 0
    socket.ipv6 = ":" in address
    socket.affinity = link.affinity
    socket.sndhwm = socket.rcvhwm = 0  # the window is the limit
    socket.handshake_ivl = int(timing.greeting_s * 1e3)
    socket.connect_timeout = int(timing.connect_s * 1e3)
    # A host that has gone without a word: 60 s. The last one limits the keepalive too, and a peer
    # that lives and takes nothing.
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle, socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 10, 5, 3
    socket.set(zmq.TCP_MAXRT, 60_000)
