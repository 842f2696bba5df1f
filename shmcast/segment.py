"""
Create, reserve, map, seal and check the memory files of a segment. Knows nothing of cursors.

Memory files have no name, so the kernel frees them with their last user, however that one ends, and
the size of `/dev/shm` does not matter. Memory is reserved before it is written; otherwise running
out of it would be a SIGBUS at the first touch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import attrs

from shmcast._ring import Mapping
from shmcast._system import memory_file
from shmcast.errors import ConfigError, MessageTooLarge, ProtocolError, is_foreign
from shmcast.layout import HEADER_BYTES, Layout

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "FIXED_SIZE",
    "FROZEN",
    "Segment",
    "add_seals",
    "cpus_available",
    "map_file",
    "memory_available_bytes",
    "new_frozen_file",
    "new_memory_file",
    "reserve",
    "seals_of",
]

# From linux/fcntl.h and linux/memfd.h. `fcntl` and `os` have some of them in newer versions, and
# none where Python was built against an old C library.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_F_SEAL_SEAL: Final = 0x1
_F_SEAL_SHRINK: Final = 0x2
_F_SEAL_GROW: Final = 0x4
_F_SEAL_WRITE: Final = 0x8
_F_SEAL_FUTURE_WRITE: Final = 0x10
_MFD_CLOEXEC: Final = 0x1
_MFD_ALLOW_SEALING: Final = 0x2
_MFD_NOEXEC_SEAL: Final = 0x8

#: Nobody can shrink the file while others have it mapped.
FIXED_SIZE: Final = _F_SEAL_SHRINK | _F_SEAL_GROW
#: The seals of a message's own file before it is sent: nobody can ever change it.
FROZEN: Final = FIXED_SIZE | _F_SEAL_WRITE | _F_SEAL_SEAL

_CGROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT_BYTES: Final = 1 << 62  # in version 1, "no limit" is a number near the largest
#: What one `fallocate` is asked for, which takes half a millisecond. On kernels from before 2024 a
#: signal ends and undoes it, so beside a timer a longer one would begin again for ever.
_RESERVE_STEP_BYTES: Final = 2 * 1024**2
#: Asking takes 0.2 ms, so it is not done for less; a process this near its limit dies of anything.
_ASK_EVERY_BYTES: Final = 256 * 1024


def new_memory_file(name: str, size_bytes: int) -> int:
    """
    The descriptor of a new memory file of this size, mode 0600. No memory is reserved yet.

    Raises:
        OSError: the kernel refused.
    """
    flags = _MFD_CLOEXEC | _MFD_ALLOW_SEALING
    try:
        descriptor = memory_file(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3 does not know the flag
            raise
        descriptor = memory_file(name, flags)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, offset: int, size_bytes: int, setting: str) -> None:
    """
    Make sure that this part of a memory file can be written.

    `fallocate` does not see the memory limit of a control group, and the process would be killed.
    So the memory that is left is checked first, which is a guess; `fallocate` is the reservation.
    What was reserved before an error, or before a signal handler raised, stays reserved.

    Args:
        descriptor: the memory file.
        offset: where the part starts, in bytes.
        size_bytes: how long it is.
        setting: what the error advises the caller to change.

    Raises:
        MessageTooLarge: there is not enough memory; the text says how much is needed and available.
    """
    with _short_of_memory(size_bytes, setting):
        end = offset + size_bytes
        for start in range(offset, end, _RESERVE_STEP_BYTES):
            os.posix_fallocate(descriptor, start, min(_RESERVE_STEP_BYTES, end - start))


class _Budget:
    """How much may be reserved before the system is asked again how much memory is left."""

    def __init__(self) -> None:
        self._left_bytes = 0

    def spend(self, size_bytes: int) -> None:
        if size_bytes > self._left_bytes:
            available_bytes = memory_available_bytes()
            if size_bytes > available_bytes:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            self._left_bytes = min(available_bytes - size_bytes, _ASK_EVERY_BYTES)
        else:
            self._left_bytes -= size_bytes


_budget = _Budget()


@contextlib.contextmanager
def _short_of_memory(size_bytes: int, setting: str) -> Iterator[None]:
    """Check that this much memory is left, and turn the kernel's errors into MessageTooLarge."""
    try:
        _budget.spend(size_bytes)
        yield
    except OSError as error:
        # The source was freed, or the program closed the descriptor: not a lack of memory.
        if is_foreign(error) or error.errno in (errno.EFAULT, errno.EBADF):
            raise
        available_bytes = memory_available_bytes()
        left = "?" if available_bytes == sys.maxsize else available_bytes
        raise MessageTooLarge(
            f"{size_bytes} bytes can't be reserved ({error.strerror}); "
            f"{left} bytes are available; {setting}"
        ) from error


def new_frozen_file(pieces: Iterable[tuple[int, Buffer]], size_bytes: int) -> int:
    """
    A memory file that holds these pieces, each at its offset, and that nobody can ever change.

    It is written, not mapped: a write reports a lack of memory by itself, causes no page faults and
    leaves no mapping in a child forked meanwhile, which would prevent the seal.

    Raises:
        MessageTooLarge: there is not enough memory.
        OSError: this process is out of descriptors.
    """
    descriptor = new_memory_file("shmcast-message", size_bytes)
    try:
        with _short_of_memory(
            size_bytes, "a message that fits its chunk (chunk_bytes) needs no file of its own"
        ):
            for offset, piece in pieces:
                view = memoryview(piece)
                done_bytes = 0
                while done_bytes < len(view):
                    done_bytes += os.pwrite(descriptor, view[done_bytes:], offset + done_bytes)
        add_seals(descriptor, FROZEN)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_file(descriptor: int, size_bytes: int, *, writable: bool) -> Mapping:
    """A shared mapping of a whole file. Raises OSError if the kernel refuses it."""
    return Mapping(descriptor, size_bytes, shared=True, writable=writable)


def seals_of(descriptor: int) -> int:
    """The seals of a memory file. Raises ProtocolError if it is not one."""
    try:
        return fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"not a memory file: {error.strerror}") from error


def add_seals(descriptor: int, seals: int) -> None:
    """Seal a memory file, for good."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, seals)


@attrs.define(eq=False)
class Segment:
    """
    The data and the control file of a queue, mapped, and their descriptors.

    The segment owns the descriptors. The mappings end with their last user; None after close.
    """

    layout: Layout
    data: Mapping | None
    control: Mapping | None
    _descriptors: tuple[int, ...]

    @property
    def data_descriptor(self) -> int:
        """The data file's, as long as it is open."""
        return self._descriptors[0]

    @property
    def control_descriptor(self) -> int:
        """The control file's, as long as it is open."""
        return self._descriptors[1]

    @classmethod
    def create(cls, layout: Layout) -> Self:
        """
        A new segment, mapped by its writer and sealed: no other mapping can write the data file.

        Raises:
            ConfigError: there is not enough memory or address space for it.
        """
        descriptors: list[int] = []
        try:
            for name, size_bytes in (
                ("shmcast-data", layout.data_bytes),
                ("shmcast-control", layout.control_bytes),
            ):
                descriptors.append(new_memory_file(name, size_bytes))
            data_descriptor, control_descriptor = descriptors
            setting = "a smaller n_readers needs less"
            reserve(data_descriptor, 0, layout.chunks_offset, setting)
            if layout.arena_bytes:
                guard_bytes = layout.arena_offset - layout.guard_offset
                reserve(data_descriptor, layout.guard_offset, guard_bytes, setting)
            reserve(control_descriptor, 0, layout.control_bytes, setting)
            data = map_file(data_descriptor, layout.data_bytes, writable=True)
            control = map_file(control_descriptor, layout.control_bytes, writable=True)
            header = layout.header()
            memoryview(data)[: len(header)] = header
            add_seals(data_descriptor, FIXED_SIZE | _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
            add_seals(control_descriptor, FIXED_SIZE | _F_SEAL_SEAL)
        except (OSError, MessageTooLarge, OverflowError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConfigError(
                f"a queue with n_readers = {layout.n_readers}, n_chunks = {layout.n_chunks}, "
                f"chunk_bytes = {layout.chunk_bytes} and arena_bytes = {layout.arena_bytes} can't "
                f"be made: {error} (it needs {layout.data_bytes} bytes of address space, and "
                f"descriptors: RLIMIT_NOFILE)"
            ) from error
        return cls(layout, data, control, (data_descriptor, control_descriptor))

    @classmethod
    def attach(cls, data_descriptor: int, control_descriptor: int) -> Self:
        """
        The segment behind two descriptors that a writer sent, mapped for a reader.

        The segment owns the descriptors from the call on, even if it fails.

        Raises:
            ProtocolError: not a segment of this version, or a damaged one.
            OSError: the kernel refused a mapping.
        """
        try:
            for descriptor in (data_descriptor, control_descriptor):
                if seals_of(descriptor) & FIXED_SIZE != FIXED_SIZE:
                    raise ProtocolError("the segment is not sealed: it may shrink under its reader")
            header = os.pread(data_descriptor, HEADER_BYTES, 0)
            layout = Layout.from_header(header, os.fstat(data_descriptor).st_size)
            control_bytes = os.fstat(control_descriptor).st_size
            if control_bytes != layout.control_bytes:
                raise ProtocolError(
                    f"the control file has {control_bytes} bytes instead of {layout.control_bytes}"
                )
            try:
                data = map_file(data_descriptor, layout.data_bytes, writable=False)
                control = map_file(control_descriptor, layout.control_bytes, writable=True)
            except OSError as error:
                text = (
                    f"{error.strerror or error}: the queue's {layout.data_bytes} bytes of address "
                    f"space can't be mapped (RLIMIT_AS; a smaller arena_bytes needs less)"
                )
                raise OSError(error.errno, text) from error
        except BaseException:
            os.close(data_descriptor)
            os.close(control_descriptor)
            raise
        return cls(layout, data, control, (data_descriptor, control_descriptor))

    def reserve_chunk(self, index: int, size_bytes: int) -> int:
        """
        Reserve the first `size_bytes` bytes of a chunk; returns how many are reserved now.

        Raises:
            MessageTooLarge: there is not enough memory.
        """
        # Doubling keeps reservations few while messages grow.
        doubled_bytes = 1 << (max(size_bytes, mmap.PAGESIZE) - 1).bit_length()
        reserved_bytes = min(doubled_bytes, self.layout.chunk_bytes)
        setting = "a smaller n_chunks or chunk_bytes needs less"
        offset = self.layout.chunk_offset(index)
        try:
            reserve(self.data_descriptor, offset, reserved_bytes, setting)
        except MessageTooLarge:
            if reserved_bytes == size_bytes:
                raise
            reserved_bytes = size_bytes
            reserve(self.data_descriptor, offset, reserved_bytes, setting)
        return reserved_bytes

    def reserve_arena(self, offset: int, size_bytes: int) -> None:
        """
        Reserve a part of the arena.

        Raises:
            MessageTooLarge: there is not enough memory.
        """
        reserve(self.data_descriptor, offset, size_bytes, "a smaller arena_bytes needs less")

    def close(self) -> None:
        """Let go of everything; mappings in use live on."""
        self.close_descriptors()
        self.data = self.control = None

    def close_descriptors(self) -> None:
        """Close the descriptors, once. A forked child has nothing else of a segment."""
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)


def memory_available_bytes() -> int:
    """
    How much memory this process can still get, within the machine's and its control groups' limits.

    File pages that can be dropped count as available. A process that is out of descriptors can't
    find out; then this is `sys.maxsize`.
    """
    fields = dict(
        line.split(":", 1) for line in _text_of(Path("/proc/meminfo")).splitlines() if ":" in line
    )
    if not fields:
        return sys.maxsize
    available_bytes = 1024 * sum(
        int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")
    )
    for group, is_v2 in _own_cgroups("memory"):
        limit = _number_in(group / ("memory.max" if is_v2 else "memory.limit_in_bytes"))
        if limit is None or limit >= _NO_LIMIT_BYTES:
            continue
        used = _number_in(group / ("memory.current" if is_v2 else "memory.usage_in_bytes"))
        if used is not None:
            available_bytes = min(available_bytes, max(0, limit - used) + _droppable_bytes(group))
    return available_bytes


def _droppable_bytes(group: Path) -> int:
    statistics = dict(line.split() for line in _text_of(group / "memory.stat").splitlines())
    return sum(
        int(statistics.get("total_" + name, statistics.get(name, 0)))
        for name in ("inactive_file", "active_file")
    )


def cpus_available() -> float:
    """How many CPUs this process may use: its affinity, or the quota of its control groups."""
    cpus = float(len(os.sched_getaffinity(0)))
    for group, is_v2 in _own_cgroups("cpu"):
        if is_v2:
            quota, _, period = _text_of(group / "cpu.max").strip().partition(" ")
        else:
            quota, period = (
                _text_of(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
            )
        if quota.isdecimal() and period.isdecimal():  # "max" and "-1" mean no quota
            cpus = min(cpus, int(quota) / int(period))
    return cpus


def _own_cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """
    The control groups that may limit a resource of this process, from its own up to the root.

    Each with whether it is of version 2.
    """
    for line in _text_of(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = not controllers
        if is_v2:
            root = _CGROUPS
            if not (root / "cgroup.controllers").exists():
                root = _CGROUPS / "unified"  # beside version 1
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        # Inside a container the path may be the host's and not exist here: then the root counts.
        relative = Path(path.lstrip("/"))
        for part in (relative, *relative.parents):
            if (root / part).is_dir():
                yield root / part, is_v2


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the controller is off or hidden, so it sets no limit
        return ""


def _number_in(path: Path) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.isdecimal() else None
