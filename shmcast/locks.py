"""
Who is alive: the lock file, and processes as the kernel knows them.

Alive is who holds a POSIX record lock on a byte of the lock file. The kernel drops it when the
process dies, however it dies, and does not hand it on to a forked child that still has the socket.
Two traps of these locks shape this file: a process sees its own locks as free, and closing any
descriptor of the file drops all of them. So `LockFile` is one per file and process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from _thread import RLock  # gevent replaces the one in `threading`
from pathlib import Path
from typing import ClassVar, Final

import attrs

from shmcast._system import is_readable
from shmcast.errors import ProtocolError, is_foreign

__all__ = [
    "WRITER_BYTE",
    "LockFile",
    "Process",
    "Unlocked",
    "is_exiting",
    "is_gone",
    "name_in_maps",
    "rank_byte",
]

WRITER_BYTE: Final = 0
_UNLOCKED_S: Final = 1.0  # a process may be seen without its lock for this long while it dies
_MAPS_PAUSE_S: Final = 1.0  # between two looks at a process's mappings: each may take milliseconds
_PF_EXITING: Final = 0x4  # linux/sched.h, in the flags of /proc/PID/stat
_F_LOCK: Final = struct.Struct("hhqqi4x")


def rank_byte(rank: int) -> int:
    """The byte of the lock file that the rank's reader holds."""
    return 1 + rank


class LockFile:
    """
    The lock file of one queue in this process; there is never a second object for the same file.

    `of` takes over a descriptor. Every one stays open until the last end of this process has gone,
    since closing any of them would drop the locks of all.
    """

    _registry: ClassVar[dict[tuple[int, int], LockFile]] = {}
    # Reentrant: the garbage collector may close an end wherever it likes.
    _registry_lock: ClassVar[RLock] = RLock()

    def __init__(self, key: tuple[int, int]) -> None:
        self._key = key
        self._descriptors: list[int] = []
        self._held: set[int] = set()
        self._users = 0

    @classmethod
    def of(cls, descriptor: int) -> LockFile:
        """The object for the file behind this descriptor, which it owns from now on."""
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        with cls._registry_lock:
            lock_file = cls._registry.setdefault(key, cls(key))
            lock_file._users += 1
            if cls._registry.get(key) is not lock_file:  # closed a moment ago, as said above
                lock_file = cls._registry[key] = cls(key)
                lock_file._users += 1
            lock_file._descriptors.append(descriptor)
            return lock_file

    @property
    def descriptor(self) -> int:
        """A descriptor to hand to others; not to be closed."""
        return self._descriptors[0]

    def hold(self, byte: int) -> None:
        """
        Lock a byte until `give_back` or the end of this process.

        Raises:
            ProtocolError: another end holds it.
        """
        with self._registry_lock:
            if byte in self._held:
                raise ProtocolError(f"byte {byte} of the lock file is held by this process")
            try:
                self._fcntl(fcntl.F_SETLK, fcntl.F_WRLCK, byte)
            except OSError as error:
                if is_foreign(error):
                    raise
                is_held = error.errno in (errno.EAGAIN, errno.EACCES)
                reason = "is held elsewhere" if is_held else f"can't be locked: {error.strerror}"
                raise ProtocolError(f"byte {byte} of the lock file {reason}") from error
            self._held.add(byte)

    def give_back(self, byte: int) -> None:
        """Unlock a byte."""
        with self._registry_lock:
            self._held.discard(byte)
            self._fcntl(fcntl.F_SETLK, fcntl.F_UNLCK, byte)

    def is_held(self, byte: int) -> bool:
        """Whether an end that is alive holds the byte, in this process or in another one."""
        if byte in self._held:
            return True
        kind, *_ = _F_LOCK.unpack(self._fcntl(fcntl.F_GETLK, fcntl.F_WRLCK, byte))
        return bool(kind != fcntl.F_UNLCK)

    def drop(self) -> None:
        """One user less; the last one closes the file."""
        with self._registry_lock:
            self._users -= 1
            if self._users:
                return
            del self._registry[self._key]
            for descriptor in self._descriptors:
                os.close(descriptor)

    def _fcntl(self, command: int, kind: int, byte: int) -> bytes:
        request = _F_LOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        return fcntl.fcntl(self._descriptors[0], command, request)

    @classmethod
    def _after_fork_in_child(cls) -> None:
        """
        The child holds none of the locks, and its parent's attachments are others' to it.

        The descriptors stay open: if the child attaches to the same queue, closing one of them
        would drop the child's own lock.
        """
        cls._registry_lock = RLock()
        for lock_file in cls._registry.values():
            lock_file._held.clear()
            lock_file._users += 1  # nobody's: the file stays until the child ends


os.register_at_fork(after_in_child=LockFile._after_fork_in_child)


def is_gone(pidfd: int | None) -> bool:
    """Whether the process has ended; also true where there is nothing to ask."""
    return pidfd is None or is_readable(pidfd)


def is_exiting(pid: int) -> bool:
    """
    Whether a process that has not ended runs no more of its program.

    Closing its files may take seconds, with much shared memory or a GPU: its locks fall then, but
    its pidfd says nothing until all are closed. By that time it has no memory left to store into.
    """
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(") ")[2].split()
            if not int(fields[6]) & _PF_EXITING:
                return False
    except OSError as error:  # it ended just now, or /proc is hidden: then the pidfd decides
        if is_foreign(error):
            raise
        return False
    return True


def name_in_maps(descriptor: int) -> bytes:
    """How `/proc/PID/maps` names a file: by device and inode."""
    status = os.fstat(descriptor)
    major, minor = os.major(status.st_dev), os.minor(status.st_dev)
    return f" {major:02x}:{minor:02x} {status.st_ino} ".encode()


@attrs.define(eq=False)
class Process:
    """
    A reader's process, which may still have the queue mapped when its attachment is over.

    Attributes:
        pid: its number here; 0 if it is in another pid namespace.
        pidfd: a descriptor of it, closed with this object; None if there is none to be had.
        data_file: how `/proc/PID/maps` names the queue's data file.
    """

    pid: int
    pidfd: int | None
    data_file: bytes
    _look_again_at: float = attrs.field(init=False, default=0.0)
    _is_over: bool = attrs.field(init=False, default=False)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        pidfd, self.pidfd = self.pidfd, None
        if pidfd is not None:
            os.close(pidfd)

    def may_touch(self, *, at_once: bool = False) -> bool:
        """
        Whether it may still use what it received, as far as is known.

        It can't once it has ended, or runs another program since `exec`.

        Args:
            at_once: look, even if it was looked at a moment ago.
        """
        if self._is_over or self.pidfd is None:
            return not self._is_over
        now = time.monotonic()
        if is_readable(self.pidfd):
            self._is_over = True
        elif at_once or now >= self._look_again_at:
            self._look_again_at = now + _MAPS_PAUSE_S
            self._is_over = not self._may_have_mapped()
        return not self._is_over

    def _may_have_mapped(self) -> bool:
        try:
            # Its number for this /proc, which may be of another pid namespace than this process.
            fields = Path(f"/proc/self/fdinfo/{self.pidfd}").read_text().split()
            maps = Path(f"/proc/{fields[fields.index('Pid:') + 1]}/maps").read_bytes()
        except (OSError, ValueError) as error:  # it ended just now, or /proc is hidden
            if is_foreign(error):
                raise
            return True
        # Nothing is mapped where the main thread has ended; other threads may go on.
        return not maps or self.data_file in maps


@attrs.define(eq=False)
class Unlocked:
    """Tells a process that is dying from one that lost its lock though it lives."""

    since: float | None = None

    def is_dead(
        self, lock_file: LockFile, byte: int, pid: int, pidfd: int | None, who: str
    ) -> bool:
        """
        Whether the holder of the byte has died.

        Raises:
            ProtocolError: it has not held its lock for a second and yet is alive.
        """
        if lock_file.is_held(byte):
            self.since = None
            return False
        if is_gone(pidfd) or is_exiting(pid):
            return True
        now = time.monotonic()
        if self.since is None:
            self.since = now
        if now - self.since < _UNLOCKED_S:
            return False
        self.since = None
        raise ProtocolError(
            f"{who} is alive but its lock is gone: "
            f"its program closed a descriptor that is not its own"
        )
