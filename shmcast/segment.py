"""
Create, reserve, map, seal and check the memory files of a segment. Cursors are not known here.

Memory files have no name, so the kernel removes them with their last user, however that one ends,
and the size of `/dev/shm` does not count. Memory is reserved before it is written: without that,
too little of it would show as SIGBUS at the first touch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import attrs

from shmcast.errors import ConfigError, MessageTooLarge, ProtocolError
from shmcast.layout import HEADER_BYTES, Layout

__all__ = [
    "Segment",
    "cpus_available",
    "map_file",
    "memory_available_bytes",
    "new_memory_file",
    "reserve",
]

# Not in `fcntl` or `os` of Python 3.11 (linux/fcntl.h, linux/memfd.h).
_F_SEAL_FUTURE_WRITE: Final = 0x10
_MFD_NOEXEC_SEAL: Final = 0x8

#: Nobody can shrink the file under somebody who has mapped it.
FIXED_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
#: What a message's own file carries before it is sent: nobody can ever change it.
FROZEN: Final = FIXED_SIZE | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

_CGROUPS: Final = Path("/sys/fs/cgroup")


def new_memory_file(name: str, size_bytes: int) -> int:
    """
    The descriptor of a new memory file of this size, mode 0600. No memory is reserved yet.

    Raises:
        OSError: the kernel refused.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3 does not know the flag
            raise
        descriptor = os.memfd_create(name, flags)
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

    A memory limit of a control group is not seen by `fallocate`: the process would be killed. So
    what is left is asked first, which is advice, and `fallocate` is the reservation.

    Args:
        descriptor: the memory file.
        offset: where the part starts, in bytes.
        size_bytes: how long it is.
        setting: what the error tells the caller to change.

    Raises:
        MessageTooLarge: there is not enough memory; the text says how much is needed and left.
    """
    available_bytes = memory_available_bytes()
    try:
        if size_bytes > available_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        os.posix_fallocate(descriptor, offset, size_bytes)
    except OSError as error:
        raise MessageTooLarge(
            f"{size_bytes} bytes can't be reserved ({error.strerror}); "
            f"{available_bytes} bytes are available; {setting}"
        ) from error


def map_file(descriptor: int, size_bytes: int, flags: int, protection: int) -> mmap.mmap:
    """
    A mapping that stays out of core dumps and forked children.

    A child must never unmap it, since something else may lie there by then (`_ring` sees to that).

    Raises:
        OSError: the kernel refused it.
    """
    mapping = mmap.mmap(descriptor, size_bytes, flags=flags, prot=protection)
    mapping.madvise(mmap.MADV_DONTDUMP)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def seals_of(descriptor: int) -> int:
    """The seals of a memory file. Raises ProtocolError if it is none."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"the descriptor is no memory file: {error.strerror}") from error


def add_seals(descriptor: int, seals: int) -> None:
    """Seal a memory file; nothing undoes it."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


@attrs.define(eq=False)
class Segment:
    """
    The data and the control file of a queue, mapped, and the descriptors that lead to them.

    The descriptors belong to the segment. The mappings end with their last user.
    """

    layout: Layout
    data: mmap.mmap
    control: mmap.mmap
    data_descriptor: int
    control_descriptor: int

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
            setting = "n_readers is what this memory depends on"
            reserve(data_descriptor, 0, layout.chunks_offset, setting)
            reserve(control_descriptor, 0, layout.control_bytes, setting)
            both = mmap.PROT_READ | mmap.PROT_WRITE
            data = map_file(data_descriptor, layout.data_bytes, mmap.MAP_SHARED, both)
            control = map_file(control_descriptor, layout.control_bytes, mmap.MAP_SHARED, both)
            header = layout.header()
            data[: len(header)] = header
            add_seals(data_descriptor, FIXED_SIZE | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            add_seals(control_descriptor, FIXED_SIZE | fcntl.F_SEAL_SEAL)
        except (OSError, MessageTooLarge, OverflowError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConfigError(
                f"a queue with n_readers = {layout.n_readers}, n_chunks = {layout.n_chunks} and "
                f"chunk_bytes = {layout.chunk_bytes} needs {layout.data_bytes} bytes of address "
                f"space, which can't be had: {error}"
            ) from error
        return cls(layout, data, control, data_descriptor, control_descriptor)

    @classmethod
    def attach(cls, data_descriptor: int, control_descriptor: int) -> Self:
        """
        The segment behind two descriptors that a writer sent, mapped for a reader.

        The descriptors belong to the segment from the call on, also when it fails.

        Raises:
            ProtocolError: this is no segment of this version, or it is damaged.
            OSError: the kernel refused a mapping.
        """
        try:
            for descriptor in (data_descriptor, control_descriptor):
                if seals_of(descriptor) & FIXED_SIZE != FIXED_SIZE:
                    raise ProtocolError("the segment may shrink under its reader: it is not sealed")
            header = os.pread(data_descriptor, HEADER_BYTES, 0)
            layout = Layout.from_header(header, os.fstat(data_descriptor).st_size)
            control_bytes = os.fstat(control_descriptor).st_size
            if control_bytes != layout.control_bytes:
                raise ProtocolError(
                    f"the control file has {control_bytes} bytes, not {layout.control_bytes}"
                )
            data = map_file(data_descriptor, layout.data_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            control = map_file(
                control_descriptor,
                layout.control_bytes,
                mmap.MAP_SHARED,
                mmap.PROT_READ | mmap.PROT_WRITE,
            )
        except BaseException:
            os.close(data_descriptor)
            os.close(control_descriptor)
            raise
        return cls(layout, data, control, data_descriptor, control_descriptor)

    def reserve_chunk(self, index: int, size_bytes: int) -> int:
        """
        Reserve the first `size_bytes` bytes of a chunk; returns how many are reserved now.

        Raises:
            MessageTooLarge: there is not enough memory.
        """
        # Doubling keeps the number of reservations small while messages grow.
        doubled_bytes = 1 << (max(size_bytes, mmap.PAGESIZE) - 1).bit_length()
        reserved_bytes = min(doubled_bytes, self.layout.chunk_bytes)
        setting = "a smaller n_chunks or chunk_bytes needs less"
        offset = self.layout.chunk_offset(index)
        reserve(self.data_descriptor, offset, reserved_bytes, setting)
        return reserved_bytes

    def close_descriptors(self) -> None:
        """Close the descriptors; the mappings stay for those who use them."""
        os.close(self.data_descriptor)
        os.close(self.control_descriptor)


def memory_available_bytes() -> int:
    """
    How much memory this process can still get, after the machine's and its control groups' limits.

    Pages of files that can be dropped count as available.
    """
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    available_bytes = 1024 * sum(
        int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")
    )
    for group in _own_cgroups("memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number_in(group / limit_name), _number_in(group / usage_name)
            if limit is not None and usage is not None:
                left_bytes = max(0, limit - usage) + _droppable_bytes(group)
                available_bytes = min(available_bytes, left_bytes)
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
    for group in _own_cgroups("cpu"):
        quota, _, period = _text_of(group / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            cpus = min(cpus, int(quota) / int(period))
        quota_us, period_us = (
            _number_in(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")
        )
        if quota_us is not None and quota_us > 0 and period_us:
            cpus = min(cpus, quota_us / period_us)
    return cpus


def _own_cgroups(controller: str) -> Iterator[Path]:
    """The control groups of this process for one controller, from its own up to the root."""
    for line in _text_of(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2, mounted as a whole or beside version 1
            roots = [_CGROUPS, _CGROUPS / "unified"]
        elif controller in controllers.split(","):
            roots = [_CGROUPS / controller, _CGROUPS / controllers]
        else:
            continue
        # Inside a container the path may be the host's, which is not there: then the root counts.
        relative = Path(path.lstrip("/"))
        for root in roots:
            for part in (relative, *relative.parents):
                if (root / part).is_dir():
                    yield root / part


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not this version of control groups, or hidden: then it sets no limit
        return ""


def _number_in(path: Path) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
