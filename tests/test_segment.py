"""`segment`: seals, reservations, refused descriptors, and what the machine says is available."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import pickle
import re
import resource
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import PATIENCE_S, MakeQueue, StartChild, wait_for_remote_ends

from shmcast import ConfigError, MessageQueue, MessageTooLarge, ProtocolError, QueueConfig, segment
from shmcast.layout import Layout
from shmcast.segment import (
    FIXED_SIZE,
    FROZEN,
    Segment,
    add_seals,
    cpus_available,
    map_file,
    memory_available_bytes,
    new_memory_file,
    reserve,
    seals_of,
)

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
LAYOUT = Layout.of(QueueConfig(n_readers=2, n_chunks=3, chunk_bytes="64 KiB"))
BOTH = mmap.PROT_READ | mmap.PROT_WRITE


def open_descriptors() -> set[str]:
    """The descriptors of this process and where they lead."""
    wait_for_remote_ends()
    gc.collect()  # a mapping has a descriptor of its own, and an error of an earlier test a mapping
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this very listing
            found.add(f"{link.name} {link.readlink()}")
    return found


def is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError as error:
        return error.errno == errno.EBADF
    return False


@pytest.fixture
def made() -> Iterator[Segment]:
    """A segment of LAYOUT, as its writer has it."""
    made = Segment.create(LAYOUT)
    yield made
    made.close_descriptors()


@pytest.fixture
def attached(made: Segment) -> Iterator[Segment]:
    """The same as a reader in this process has it."""
    reader = Segment.attach(os.dup(made.data_descriptor), os.dup(made.control_descriptor))
    yield reader
    reader.close_descriptors()


def reopened(descriptor: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


# Seals


@pytest.mark.parametrize("way", [os.dup, reopened])
def test_nobody_else_can_map_the_data_file_to_write(
    made: Segment, way: Callable[[int], int]
) -> None:
    """The kernel refuses a second shared writable mapping, also of the file opened anew."""
    descriptor = way(made.data_descriptor)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, LAYOUT.data_bytes, flags=mmap.MAP_SHARED, prot=BOTH)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", LAYOUT.chunks_offset)
    finally:
        os.close(descriptor)


def test_a_readers_mapping_can_not_be_made_writable(made: Segment, attached: Segment) -> None:
    """`mprotect` of a reader's mapping is refused, so no reader can change what another reads."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = next(
        int(line.split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if " r--s " in line and "memfd:shmcast-data" in line
    )
    results = libc.mprotect(address, mmap.PAGESIZE, BOTH), ctypes.get_errno()
    assert (-1, errno.EACCES) == results


def test_the_writer_still_writes_and_readers_see_it(made: Segment, attached: Segment) -> None:
    """The mapping from before the seal stays writable, and a reader's shows what it stores."""
    offset = LAYOUT.chunk_offset(1)
    memoryview(made.data)[offset : offset + 5] = b"bytes"
    assert b"bytes" == memoryview(attached.data)[offset : offset + 5]
    with pytest.raises(TypeError):
        memoryview(attached.data)[offset] = 1


def test_both_sides_store_in_the_control_file(made: Segment, attached: Segment) -> None:
    """What a reader stores in the control file the writer sees, and the other way round."""
    memoryview(made.control)[0] = 7
    memoryview(attached.control)[LAYOUT.rank_offset(1)] = 8
    assert (7, 8) == (
        memoryview(attached.control)[0],
        memoryview(made.control)[LAYOUT.rank_offset(1)],
    )


@pytest.mark.parametrize("change", [-mmap.PAGESIZE, -1, mmap.PAGESIZE])
@pytest.mark.parametrize("which", ["data_descriptor", "control_descriptor"])
def test_the_size_is_fixed(made: Segment, which: str, change: int) -> None:
    """Neither file can shrink under somebody who has mapped it, nor grow."""
    descriptor = getattr(made, which)
    size_bytes = os.fstat(descriptor).st_size
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size_bytes + change)
    assert size_bytes == os.fstat(descriptor).st_size


@pytest.mark.parametrize("which", ["data_descriptor", "control_descriptor"])
def test_the_seals_are_final(made: Segment, which: str) -> None:
    """No reader can add a seal, such as one that stops the others from writing."""
    with pytest.raises(PermissionError):
        add_seals(getattr(made, which), fcntl.F_SEAL_WRITE)


def test_the_seals_of_a_queues_files(made: Segment) -> None:
    """The data file is sealed against size and future writing, the control file against size."""
    future_write = 0x10
    assert FIXED_SIZE | future_write == seals_of(made.data_descriptor) & (
        FROZEN | future_write
    ) & ~(fcntl.F_SEAL_SEAL)
    assert FIXED_SIZE == seals_of(made.control_descriptor) & (FIXED_SIZE | fcntl.F_SEAL_WRITE)


def test_the_lock_file_of_a_queue_can_not_shrink() -> None:
    """Every memory file of a queue is sealed against shrinking."""
    before = open_descriptors()
    with MessageQueue(QueueConfig()):
        files = [name for name in open_descriptors() - before if "memfd:" in name]
        assert {"data", "control", "locks"} <= set(re.findall(r"shmcast-(\w+)", " ".join(files)))
        for name in files:
            assert FIXED_SIZE == seals_of(int(name.split()[0])) & FIXED_SIZE


# Files and mappings


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_memory_files_are_private(umask: int) -> None:
    """A memory file has mode 0600, is closed by exec, and has the size that was asked for."""
    before = os.umask(umask)
    try:
        descriptor = new_memory_file("test", 12345)
    finally:
        os.umask(before)
    status = os.fstat(descriptor)
    got = stat.S_IMODE(status.st_mode), status.st_size, status.st_blocks
    inheritable = os.get_inheritable(descriptor)
    os.close(descriptor)
    assert ((0o600, 12345, 0), False) == (got, inheritable)


def test_a_size_that_no_file_has_leaks_nothing() -> None:
    """Where the kernel refuses the size, the descriptor is closed again."""
    before = open_descriptors()
    for size_bytes in (-1, 1 << 63):
        with pytest.raises((OSError, OverflowError)):
            new_memory_file("test", size_bytes)
    assert before == open_descriptors()


def test_both_files_of_a_segment_are_private(made: Segment) -> None:
    """The files that travel to the readers have mode 0600."""
    modes = [
        stat.S_IMODE(os.fstat(descriptor).st_mode)
        for descriptor in (made.data_descriptor, made.control_descriptor)
    ]
    assert [0o600, 0o600] == modes


def test_mappings_stay_out_of_core_dumps_and_forks(made: Segment, attached: Segment) -> None:
    """Every mapping of a segment is marked DONTDUMP and DONTFORK."""
    descriptors = (made.data_descriptor, made.control_descriptor)
    inodes = [[str(os.fstat(descriptor).st_ino)] for descriptor in descriptors]
    flags = [
        set(re.findall(r"^VmFlags: (.*)$", area, re.MULTILINE)[0].split())
        for area in re.split(
            r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
        )
        if area.partition("\n")[0].split()[4:5] in inodes
    ]
    assert 4 == len(flags)
    assert [True] * 4 == [{"dd", "dc"} <= each for each in flags]


def test_a_new_segment_starts_as_zeros(made: Segment) -> None:
    """Behind the header every word of both files is 0."""
    header = LAYOUT.header()
    assert header == memoryview(made.data)[: len(header)]
    assert not any(memoryview(made.data)[len(header) : LAYOUT.chunks_offset])
    assert not any(memoryview(made.control)[:])


def test_chunks_and_blocks_take_no_memory_until_used(made: Segment) -> None:
    """Ring and arena are address space until they are reserved, but for the page of the guard."""
    assert LAYOUT.arena_bytes > 0
    used_bytes = 512 * os.fstat(made.data_descriptor).st_blocks
    assert LAYOUT.chunks_offset + mmap.PAGESIZE == used_bytes
    made.reserve_arena(LAYOUT.arena_offset, 5 * mmap.PAGESIZE)
    grown_bytes = 512 * os.fstat(made.data_descriptor).st_blocks - used_bytes
    assert 5 * mmap.PAGESIZE == grown_bytes


# Attaching


def test_a_reader_gets_the_writers_layout(attached: Segment) -> None:
    """What `attach` finds in the header is the layout that the writer has."""
    assert LAYOUT == attached.layout


def file_with(content: bytes, size_bytes: int, seals: int) -> int:
    descriptor = new_memory_file("test", size_bytes)
    os.pwrite(descriptor, content, 0)
    add_seals(descriptor, seals)
    return descriptor


def good_data() -> int:
    return file_with(LAYOUT.header(), LAYOUT.data_bytes, FIXED_SIZE)


def good_control() -> int:
    return file_with(b"", LAYOUT.control_bytes, FIXED_SIZE)


def pipe_end() -> int:
    end, other = os.pipe()
    os.close(other)
    return end


def device() -> int:
    return os.open("/dev/zero", os.O_RDWR)


def directory() -> int:
    return os.open("/", os.O_RDONLY)


def disk_file() -> int:
    return os.open(__file__, os.O_RDONLY)


def local_socket() -> int:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).detach()


NOT_MEMORY_FILES = [pipe_end, device, directory, disk_file, local_socket]
OTHER_VERSION = bytearray(LAYOUT.header())
OTHER_VERSION[8] += 1
WRONG_DATA = [
    *NOT_MEMORY_FILES,
    lambda: file_with(LAYOUT.header(), LAYOUT.data_bytes, 0),
    lambda: file_with(LAYOUT.header(), LAYOUT.data_bytes, fcntl.F_SEAL_SHRINK),
    lambda: file_with(LAYOUT.header(), LAYOUT.data_bytes, fcntl.F_SEAL_GROW),
    lambda: file_with(LAYOUT.header(), LAYOUT.data_bytes - mmap.PAGESIZE, FIXED_SIZE),
    lambda: file_with(LAYOUT.header(), LAYOUT.data_bytes + mmap.PAGESIZE, FIXED_SIZE),
    lambda: file_with(LAYOUT.header(), 1 << 40, FIXED_SIZE),
    lambda: file_with(b"", 0, FIXED_SIZE),
    lambda: file_with(LAYOUT.header(), len(LAYOUT.header()), FIXED_SIZE),
    lambda: file_with(b"", LAYOUT.data_bytes, FIXED_SIZE),
    lambda: file_with(b"\xff" * 4096, LAYOUT.data_bytes, FIXED_SIZE),
    lambda: file_with(b"\x7fELF", LAYOUT.data_bytes, FIXED_SIZE),
    lambda: file_with(bytes(OTHER_VERSION), LAYOUT.data_bytes, FIXED_SIZE),
    good_control,
]
WRONG_CONTROL = [
    *NOT_MEMORY_FILES,
    lambda: file_with(b"", LAYOUT.control_bytes, 0),
    lambda: file_with(b"", LAYOUT.control_bytes, fcntl.F_SEAL_SHRINK),
    lambda: file_with(b"", 0, FIXED_SIZE),
    lambda: file_with(b"", LAYOUT.control_bytes - 1, FIXED_SIZE),
    lambda: file_with(b"", LAYOUT.control_bytes + mmap.PAGESIZE, FIXED_SIZE),
    good_data,
]


@pytest.mark.parametrize(
    ("make_data", "make_control"),
    [
        *((make, good_control) for make in WRONG_DATA),
        *((good_data, make) for make in WRONG_CONTROL),
    ],
)
def test_wrong_descriptors_are_refused_and_closed(
    make_data: Callable[[], int], make_control: Callable[[], int]
) -> None:
    """What is no sealed segment of the right size is a ProtocolError, and nothing stays open."""
    before = open_descriptors()
    descriptors = make_data(), make_control()
    with pytest.raises(ProtocolError):
        Segment.attach(*descriptors)
    assert (True, True) == (is_closed(descriptors[0]), is_closed(descriptors[1]))
    assert before == open_descriptors()


def test_the_good_descriptors_are_taken() -> None:
    """What the test above varies is taken when nothing is wrong with it, and then kept open."""
    taken = Segment.attach(good_data(), good_control())
    assert LAYOUT == taken.layout
    descriptors = taken.data_descriptor, taken.control_descriptor
    assert [False, False] == [is_closed(descriptor) for descriptor in descriptors]
    taken.close_descriptors()
    assert [True, True] == [is_closed(descriptor) for descriptor in descriptors]
    taken.close_descriptors()  # again, and nobody else's


def test_a_refused_mapping_leaks_nothing(made: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel has no room for a reader's mapping, both descriptors are closed."""
    monkeypatch.setattr(segment, "map_file", failing_at(map_file, 1, OSError))
    before = open_descriptors()
    descriptors = os.dup(made.data_descriptor), os.dup(made.control_descriptor)
    with pytest.raises(OSError, match="no room today"):
        Segment.attach(*descriptors)
    assert before == open_descriptors()


# Reserving


def blocks_of(descriptor: int) -> int:
    return 512 * os.fstat(descriptor).st_blocks


@pytest.fixture
def file() -> Iterator[int]:
    """A memory file of 1 TiB, of which nothing is reserved."""
    descriptor = new_memory_file("test", TIB)
    yield descriptor
    os.close(descriptor)


def test_reserved_memory_is_there(file: int) -> None:
    """After `reserve` the file has the memory for that part, and only for that."""
    reserve(file, 3 * MIB, MIB, "")
    assert MIB == blocks_of(file)
    reserve(file, 3 * MIB, MIB, "")
    assert MIB == blocks_of(file)


def test_a_timer_does_not_keep_memory_from_being_reserved(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A signal each 10 ms does not hold a large message up for ever, on an older kernel either.

    There a signal ends `fallocate`, which undoes what it did, and Python begins it again.
    """
    fallocate, n_ticks = os.posix_fallocate, 0

    def tick(*_: object) -> None:
        nonlocal n_ticks
        n_ticks += 1

    def fallocate_of_old_kernels(descriptor: int, offset: int, size_bytes: int) -> None:
        for _ in range(50):
            before = n_ticks
            time.sleep(size_bytes / 2.5e9)
            if n_ticks == before:
                return fallocate(descriptor, offset, size_bytes)
        pytest.fail(f"{size_bytes} bytes were begun 50 times")

    monkeypatch.setattr(os, "posix_fallocate", fallocate_of_old_kernels)
    queue, (reader,) = make_queue()
    previous = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        queue.enqueue(pickle.PickleBuffer(bytes(64 * MIB)), PATIENCE_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert 64 * MIB == memoryview(reader.dequeue(PATIENCE_S)).nbytes
    assert n_ticks > 0


def test_a_long_part_is_reserved_to_its_last_byte(file: int) -> None:
    """A part of many steps, the last of them short, has all its memory."""
    reserve(file, 4096, 5 * MIB + 4096, "")
    assert 5 * MIB + 4096 == blocks_of(file)


def test_more_than_there_is_can_not_be_reserved(file: int) -> None:
    """The error names what is needed, what there is and the setting, and nothing was reserved."""
    with pytest.raises(MessageTooLarge) as caught:
        reserve(file, 0, TIB, "a smaller n_chunks needs less")
    text = str(caught.value)
    assert [] == [part for part in (str(TIB), "a smaller n_chunks needs less") if part not in text]
    found = re.search(r"([0-9]+) bytes are available", text)
    assert found is not None
    assert 0 < int(found[1]) < TIB
    assert 0 == blocks_of(file)


@pytest.mark.parametrize(("size_bytes", "fits"), [(MIB, True), (MIB + 1, False)])
def test_the_limit_is_exact(
    file: int, monkeypatch: pytest.MonkeyPatch, size_bytes: int, fits: bool
) -> None:
    """Just what is available can be reserved, one byte more can't."""
    monkeypatch.setattr(segment, "memory_available_bytes", lambda: MIB)
    with contextlib.nullcontext() if fits else pytest.raises(MessageTooLarge) as caught:
        reserve(file, 0, size_bytes, "setting")
    if not fits:
        assert f"{MIB} bytes are available" in str(caught.value)
    assert (MIB if fits else 0) == blocks_of(file)


def test_what_the_kernel_refuses_is_a_clear_error(file: int) -> None:
    """A reservation that the kernel itself refuses is a MessageTooLarge with the kernel's words."""
    add_seals(file, FIXED_SIZE)
    with pytest.raises(MessageTooLarge, match=os.strerror(errno.EPERM)):
        reserve(file, TIB, 4096, "setting")


def test_a_chunk_is_reserved_as_far_as_needed(made: Segment) -> None:
    """What `reserve_chunk` says is reserved is, is enough, and is never more than the chunk."""
    before = blocks_of(made.data_descriptor)
    for needed_bytes in (1, 4096, 5000, 40_000, LAYOUT.chunk_bytes):
        reserved_bytes = made.reserve_chunk(2, needed_bytes)
        assert needed_bytes <= reserved_bytes <= LAYOUT.chunk_bytes
        assert blocks_of(made.data_descriptor) - before >= reserved_bytes
    offset = LAYOUT.chunk_offset(2)
    memoryview(made.data)[offset : offset + LAYOUT.chunk_bytes] = bytes(LAYOUT.chunk_bytes)


def test_a_chunk_is_not_refused_for_memory_that_it_does_not_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message that fits what is left is not refused because the reservation rounds up."""
    monkeypatch.setattr(segment, "memory_available_bytes", lambda: 3 * MIB)
    made = Segment.create(Layout.of(QueueConfig(chunk_bytes="8 MiB")))
    try:
        assert 5 * MIB // 2 <= made.reserve_chunk(0, 5 * MIB // 2) <= 3 * MIB
    finally:
        made.close_descriptors()


@pytest.mark.parametrize("size_bytes", [MIB, 3 * MIB], ids=["chunk", "file"])
def test_a_message_without_memory_is_refused_and_the_queue_goes_on(
    make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    """MessageTooLarge names what is needed, what there is and a setting; nothing was published."""
    queue, (reader,) = make_queue(chunk_bytes="2 MiB", n_chunks=2)
    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(segment, "memory_available_bytes", lambda: 4096)
        with pytest.raises(MessageTooLarge) as caught:
            queue.enqueue(bytes(size_bytes), timeout=0)
    text = str(caught.value)
    parts = ("4096 bytes are available", "chunk_bytes")
    assert [] == [part for part in parts if part not in text]
    needed = re.match("([0-9]+) bytes", text)
    assert needed is not None
    assert size_bytes <= int(needed[1]) <= 2 * size_bytes
    assert (0, before) == (queue.stats().messages, open_descriptors())
    queue.enqueue(bytes(size_bytes), timeout=5)
    assert bytes(size_bytes) == reader.dequeue(timeout=5)


# Creating


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_bytes": "1024 GiB", "n_chunks": 1 << 20},
        {"chunk_bytes": "1024 GiB", "n_chunks": 1000},
        {"chunk_bytes": "1 GiB", "n_chunks": 1 << 20},
    ],
)
@pytest.mark.parametrize("make", [MessageQueue, lambda config: Segment.create(Layout.of(config))])
def test_an_absurd_size_is_a_config_error(
    make: Callable[[QueueConfig], object], settings: dict[str, Any]
) -> None:
    """A ring that no address space holds is refused by name, and leaks no descriptor or mapping."""
    config = QueueConfig(**settings)
    before = open_descriptors()
    maps = Path("/proc/self/maps").read_text().count("memfd:shmcast")
    with pytest.raises(ConfigError) as caught:
        make(config)
    text = str(caught.value)
    parts = (f"n_chunks = {config.n_chunks}", f"chunk_bytes = {config.chunk_bytes}", "n_readers")
    assert [] == [part for part in parts if part not in text]
    del caught
    assert before == open_descriptors()
    assert maps == Path("/proc/self/maps").read_text().count("memfd:shmcast")


def test_a_queue_without_memory_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not even the queue's words fit, the constructor says how much there is."""
    monkeypatch.setattr(segment, "memory_available_bytes", lambda: 100)
    before = open_descriptors()
    with pytest.raises(ConfigError, match="100 bytes are available"):
        MessageQueue(QueueConfig(n_readers=4096))
    assert before == open_descriptors()


def failing_at(
    function: Callable[..., Any], call: int, error: type[Exception]
) -> Callable[..., Any]:
    """The function, but its given call (from 0) raises."""
    calls = itertools.count()

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == call:
            raise error("no room today")
        return function(*arguments, **keywords)

    return wrapped


@pytest.mark.parametrize("call", [0, 1])
@pytest.mark.parametrize("name", ["new_memory_file", "reserve", "map_file", "add_seals"])
def test_a_segment_that_fails_half_way_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, call: int
) -> None:
    """Whatever step fails for lack of memory, it is a ConfigError and everything is closed."""
    error = MessageTooLarge if name == "reserve" else OSError
    monkeypatch.setattr(segment, name, failing_at(getattr(segment, name), call, error))
    before = open_descriptors()
    with pytest.raises(ConfigError, match="no room today"):
        Segment.create(LAYOUT)
    assert before == open_descriptors()


def test_a_process_without_descriptors_leaks_none() -> None:
    """However few descriptors are left, a constructor that fails gives all of them back."""
    before = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name.split()[0]) for name in before}
    free = [number for number in range(3, max(used) + 20) if number not in used]
    outcomes = []
    for limit in free[:16]:  # so that none is left, then one, …
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            MessageQueue(QueueConfig()).close()
            outcomes.append("made")
        except (ConfigError, OSError):
            outcomes.append("failed")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert before == open_descriptors()
    assert ("failed", "made") == (outcomes[0], outcomes[-1])
    assert sorted(outcomes) == outcomes  # once there are enough, more do no harm


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def resident_bytes() -> int:
    gc.collect()
    return mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[1])


def test_a_thousand_queues_leave_nothing() -> None:
    """1,000 queues, closed or just dropped, leave descriptors, mappings and memory as before."""

    def make(count: int) -> None:
        for _ in range(count // 2):
            MessageQueue(QueueConfig(n_readers=3)).close()
            MessageQueue(QueueConfig(n_readers=3))

    make(100)  # what is allocated once
    before = open_descriptors()
    mappings_before, bytes_before = mappings(), resident_bytes()
    make(1000)
    grown_bytes = resident_bytes() - bytes_before
    assert before == open_descriptors()
    # One page leaked per queue would be 4 MiB. The allocator may take or return an arena or two.
    assert grown_bytes < 2 * MIB
    assert abs(mappings() - mappings_before) < 10


# What is available


Tree = dict[str, str]
MEMINFO = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB\nSwapFree: 100 kB\nHuge: 0\n"
MACHINE_BYTES = 8100 * KIB


@pytest.fixture
def on_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Tree], None]:
    """Let this process's control groups be these, with 8100 KiB of memory and 8 CPUs."""

    def place(text: str) -> Path:
        return tmp_path / text.lstrip("/") if text.startswith("/proc/") else Path(text)

    def build(own_groups: str, files: Tree) -> None:
        if own_groups.startswith("0::"):  # version 2 alone, mounted as a whole
            files = {"cgroup.controllers": "cpu memory\n", **files}
        tree = {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": own_groups,
            **{f"cgroup/{name}": text for name, text in files.items()},
        }
        for name, text in tree.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for mounted in (tmp_path / "cgroup").glob("*,*"):  # each controller is a link, as usual
            for controller in mounted.name.split(","):
                (tmp_path / "cgroup" / controller).symlink_to(mounted.name)
        monkeypatch.setattr(segment, "Path", place)
        monkeypatch.setattr(segment, "_CGROUPS", tmp_path / "cgroup")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))

    return build


UNLIMITED_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        pytest.param("", {}, MACHINE_BYTES, id="no groups"),
        pytest.param("0::/\n", {}, MACHINE_BYTES, id="v2, nothing there"),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": "max\n", "a/memory.current": "5000\n"},
            MACHINE_BYTES,
            id="v2, no limit",
        ),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": "50000\n", "a/memory.current": "20000\n"},
            30000,
            id="v2, a limit",
        ),
        pytest.param(
            "0::/a/b/c\n",
            {
                "a/memory.max": "9000\n",
                "a/memory.current": "5000\n",
                "a/b/memory.max": "max\n",
                "a/b/memory.current": "4000\n",
                "a/b/c/memory.max": "8000\n",
                "a/b/c/memory.current": "100\n",
            },
            4000,
            id="v2, the tightest is further up",
        ),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": "5000\n", "a/memory.current": "7000\n"},
            0,
            id="v2, over the limit",
        ),
        pytest.param(
            "0::/a\n",
            {
                "a/memory.max": "50000\n",
                "a/memory.current": "50000\n",
                "a/memory.stat": "anon 20000\nshmem 9000\ninactive_file 3000\nactive_file 400\n",
            },
            3400,
            id="v2, full of file pages that can be dropped",
        ),
        pytest.param(
            "0::/docker/0123\n",
            {"memory.max": "50000\n", "memory.current": "20000\n"},
            30000,
            id="v2, in a container that sees the host's path",
        ),
        pytest.param(
            "0::/a\n",
            {"a/memory.max": f"{1 << 60}\n", "a/memory.current": "20000\n"},
            MACHINE_BYTES,
            id="v2, a limit above the machine",
        ),
        pytest.param(
            "4:memory:/a\n0::/\n",
            {
                "memory/a/memory.limit_in_bytes": "50000\n",
                "memory/a/memory.usage_in_bytes": "20000\n",
            },
            30000,
            id="v1, a limit",
        ),
        pytest.param(
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/a/memory.usage_in_bytes": "20000\n",
            },
            MACHINE_BYTES,
            id="v1, no limit",
        ),
        pytest.param(
            "4:memory:/a/b\n",
            {
                "memory/a/b/memory.limit_in_bytes": UNLIMITED_V1,
                "memory/a/b/memory.usage_in_bytes": "20000\n",
                "memory/a/memory.limit_in_bytes": "60000\n",
                "memory/a/memory.usage_in_bytes": "20000\n",
            },
            40000,
            id="v1, the parent's limit",
        ),
        pytest.param(
            "4:memory:/docker/0123\n",
            {"memory/memory.limit_in_bytes": "50000\n", "memory/memory.usage_in_bytes": "20000\n"},
            30000,
            id="v1, in a container that sees the host's path",
        ),
        pytest.param(
            "4:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "50000\n",
                "memory/a/memory.usage_in_bytes": "45000\n",
                "memory/a/memory.stat": (
                    "inactive_file 1\nactive_file 2\n"
                    "total_inactive_file 3000\ntotal_active_file 400\n"
                ),
            },
            8400,
            id="v1, file pages of the whole subtree count",
        ),
        pytest.param(
            "5:memory,hugetlb:/a\n",
            {
                "memory,hugetlb/a/memory.limit_in_bytes": "50000\n",
                "memory,hugetlb/a/memory.usage_in_bytes": "20000\n",
            },
            30000,
            id="v1, mounted with another controller",
        ),
        pytest.param(
            "3:cpu:/a\n2:name=systemd:/a\n",
            {"cpu/a/memory.limit_in_bytes": "1\n", "cpu/a/memory.usage_in_bytes": "0\n"},
            MACHINE_BYTES,
            id="v1, other controllers do not count",
        ),
        pytest.param(
            "4:memory:/a\n0::/b\n",
            {
                "memory/a/memory.limit_in_bytes": "50000\n",
                "memory/a/memory.usage_in_bytes": "20000\n",
                "unified/b/memory.max": "7000\n",
                "unified/b/memory.current": "1000\n",
            },
            6000,
            id="both versions, the tighter one",
        ),
        pytest.param(
            "0::/a:b\n",
            {"a:b/memory.max": "50000\n", "a:b/memory.current": "20000\n"},
            30000,
            id="a colon in the name",
        ),
        pytest.param(
            "0::/a\n", {"a/memory.max": "50000\n"}, MACHINE_BYTES, id="the usage can't be read"
        ),
    ],
)
def test_memory_available(
    on_machine: Callable[[str, Tree], None], own_groups: str, files: Tree, expected: int
) -> None:
    """What can still be had is the least that the machine and the control groups leave."""
    on_machine(own_groups, files)
    assert expected == memory_available_bytes()


def test_memory_available_on_this_machine() -> None:
    """Here and now it is more than nothing and not more than the machine has."""
    totals = re.findall(r"(?:MemTotal|SwapTotal): +([0-9]+)", Path("/proc/meminfo").read_text())
    assert 0 < memory_available_bytes() <= KIB * sum(map(int, totals))


@pytest.mark.parametrize(
    ("own_groups", "files", "expected"),
    [
        pytest.param("", {}, 8.0, id="no groups"),
        pytest.param("0::/a\n", {"a/cpu.max": "max 100000\n"}, 8.0, id="v2, no quota"),
        pytest.param("0::/a\n", {"a/cpu.max": "150000 100000\n"}, 1.5, id="v2, a quota"),
        pytest.param("0::/a\n", {"a/cpu.max": "1600000 100000\n"}, 8.0, id="v2, more than CPUs"),
        pytest.param(
            "0::/a/b\n",
            {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "400000 100000\n"},
            0.5,
            id="v2, the parent's quota",
        ),
        pytest.param(
            "0::/docker/0123\n", {"cpu.max": "200000 100000\n"}, 2.0, id="v2, in a container"
        ),
        pytest.param(
            "1:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            8.0,
            id="v1, no quota",
        ),
        pytest.param(
            "1:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2.5,
            id="v1, a quota",
        ),
        pytest.param(
            "1:cpu,cpuacct:/a\n",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            2.5,
            id="v1, mounted with another controller",
        ),
        pytest.param(
            "1:cpuacct:/a\n2:cpuset:/a\n",
            {
                "cpuacct/a/cpu.cfs_quota_us": "1000\n",
                "cpuacct/a/cpu.cfs_period_us": "100000\n",
                "cpuset/a/cpu.max": "1000 100000\n",
            },
            8.0,
            id="v1, other controllers do not count",
        ),
        pytest.param("0::/a\n", {"a/cpu.max": ""}, 8.0, id="an empty file"),
    ],
)
def test_cpus_available(
    on_machine: Callable[[str, Tree], None], own_groups: str, files: Tree, expected: float
) -> None:
    """The CPUs are those of the affinity, or the quota of the control groups if that is less."""
    on_machine(own_groups, files)
    assert expected == cpus_available()


def test_the_affinity_counts() -> None:
    """A process that is bound to one CPU has one at most."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, [min(before)])
        assert 0 < cpus_available() <= 1
    finally:
        os.sched_setaffinity(0, before)


# A real limit

LIMIT_BYTES = 64 * MIB
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of version 1 with a memory limit; its processes have to end before it."""
    group = MEMORY_GROUPS / f"shmcast-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group with a memory limit (version 1) can be made: {error}")
    yield group
    group.rmdir()


def enter(group: Path) -> None:
    """Enter it, from a spawned process: pages of a parent would be charged to it when written."""
    (group / "cgroup.procs").write_text(str(os.getpid()))


def publish_large(pipe: Connection, group: Path, chunk_sizes: Sequence[str]) -> None:
    """For each chunk size say what becomes of 200 MiB, then of a small message."""
    import torch

    tensor = torch.empty(200 * MIB, dtype=torch.uint8)  # its pages are never touched
    enter(group)
    for chunk_bytes in chunk_sizes:
        with MessageQueue(QueueConfig(chunk_bytes=chunk_bytes)) as queue:  # type: ignore[arg-type]
            outcome = "published"
            try:
                queue.enqueue(tensor, timeout=0)
            except MessageTooLarge as error:
                outcome = str(error)
            queue.enqueue("small", timeout=0)
            pipe.send((outcome, queue.stats().messages))


def publish_many(pipe: Connection, group: Path, settings: dict[str, Any], size_bytes: int) -> None:
    """Publish until something refuses it, and say what and after how many bytes."""
    # Made before, and touched: the limit is for what is published, not for the process itself.
    message = bytes(1) * size_bytes
    enter(group)
    with MessageQueue(QueueConfig(**settings)) as queue:
        try:
            while True:
                queue.enqueue(message, timeout=0)
        except Exception as error:
            pipe.send((type(error), queue.stats().messages * size_bytes))


def test_a_memory_limit_is_an_error_and_not_a_death(
    small_group: Path, start_child: StartChild
) -> None:
    """In a group of 64 MiB, 200 MiB are a MessageTooLarge for chunk and file, and nobody dies."""
    child = start_child(publish_large, small_group, ["2 MiB", "256 MiB"], method="spawn")
    for _ in range(2):
        outcome, messages = child.receive()
        available = re.search(r"([0-9]+) bytes are available", outcome)
        assert available is not None, outcome
        assert int(available[1]) < LIMIT_BYTES
        assert 1 == messages
    assert 0 == child.join()


@pytest.mark.parametrize(
    ("settings", "size_bytes"),
    [
        ({"chunk_bytes": "100 KiB", "n_chunks": 4000}, 90 * KIB),
        ({"chunk_bytes": "1 KiB", "n_chunks": 4000}, 90 * KIB),
        ({"chunk_bytes": "3 MiB", "n_chunks": 4000}, 2 * MIB),
    ],
    ids=["small chunks", "small files", "large chunks"],
)
def test_a_memory_limit_is_seen_however_small_the_messages(
    small_group: Path, start_child: StartChild, settings: dict[str, Any], size_bytes: int
) -> None:
    """Messages that fill the memory bit by bit end in a MessageTooLarge too, not in a death."""
    child = start_child(publish_many, small_group, settings, size_bytes, method="spawn")
    error, done_bytes = child.receive()
    assert MessageTooLarge is error
    assert LIMIT_BYTES // 4 < done_bytes < LIMIT_BYTES
    assert 0 == child.join()
