"""Processes of the same user or of another one, and limits and clocks, that do an end no good."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import random
import resource
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import attrs
import pytest
from conftest import PATIENCE_S, Child, StartChild

import shmcast.control as control_module
from shmcast import (
    AuthenticationError,
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueConfig,
    QueueEmpty,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterLost,
    locks,
)

SMALL: dict[str, Any] = {
    "n_chunks": 4,
    "chunk_bytes": 4096,
    "oob_threshold_bytes": 1000,
    "arena_bytes": "1 MiB",
}
REMOTE: dict[str, Any] = {**SMALL, "local_reader_ranks": (), "bind": "tcp://127.0.0.1:0"}
MIB = 1 << 20

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can do this to a process")


def message(number: int) -> tuple[int, PickleBuffer, bytes]:
    """A message that goes through chunk, block or file, depending on its number."""
    in_place = bytes([number % 256]) * (5, 3000, 9000, 50)[number % 4]
    leased = bytearray([number % 255]) * (100, 70_000)[number // 4 % 2]
    return number, PickleBuffer(leased), in_place


def assert_is(number: int, received: Any) -> None:
    """It is that message, whole."""
    expected = message(number)
    assert number == received[0]
    assert (bytes(expected[1]), expected[2]) == (bytes(received[1]), received[2])


def write_until_told(pipe: Connection, settings: dict[str, Any]) -> None:
    """Publish until something comes through the pipe; how many messages that were."""
    with MessageQueue(QueueConfig(**settings)) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        number = 0
        while not pipe.poll(0):
            queue.enqueue(message(number), PATIENCE_S)
            number += 1
    pipe.send(number)


def read_to_the_end(pipe: Connection, handle: Handle, rank: int) -> None:
    """Receive until the writer closes; how many messages that were."""
    with MessageReader(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send("ready")
        number = 0
        for received in reader:
            assert_is(number, received)
            number += 1
    pipe.send(number)


def ask_for_files(handle: Handle, rank: int) -> tuple[socket.socket, list[int]]:
    """Claim a rank as a reader does; the connection and the descriptors that come over it."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(PATIENCE_S)
    connection.connect("\0" + handle.local_address)
    head = control_module._FRAME.pack(control_module._MAGIC, control_module._Kind.CLAIM, rank, 0)
    connection.send(head + handle.token.encode())
    _, descriptors, _, _ = socket.recv_fds(connection, 2048, 3)
    return connection, list(descriptors)


# --- another user ---------------------------------------------------------------------------------


def squat(pipe: Connection, address: str) -> None:
    """Take the name of a socket as another user, and wait for somebody's first words."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(1)
        pipe.send("listens")
        connection, _ = listener.accept()
        pipe.send(connection.recv(2048))


@needs_root
def test_another_user_at_the_name_of_a_dead_writer(start_child: StartChild) -> None:
    """A reader tells its token to no other user who took its writer's name, and names the user."""
    with MessageQueue(QueueConfig(**SMALL)) as queue:
        handle = queue.export_handle()
    child = start_child(squat, handle.local_address, method="forkserver")
    assert "listens" == child.receive()
    with pytest.raises(AuthenticationError, match="belongs to user 65534"):
        MessageReader(handle, 0)
    assert b"" == child.receive()


# --- the same user, with the files ----------------------------------------------------------------


def attack_files(pipe: Connection, handle: Handle) -> None:
    """Try to change the three files that a reader is given; what succeeded."""
    connection, files = ask_for_files(handle, 0)
    again = [os.open(f"/proc/self/fd/{file}", os.O_RDWR) for file in files]
    succeeded = []

    def attempt(what: str, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            function(*arguments)
            succeeded.append(what)

    for name, file in zip(["data", "control", "locks"] * 2, files + again, strict=True):
        size_bytes = os.fstat(file).st_size
        attempt(f"shrink {name}", os.ftruncate, file, 0)
        attempt(f"grow {name}", os.ftruncate, file, size_bytes + mmap.PAGESIZE)
        if name != "locks":  # nobody writes that one
            attempt(f"seal {name}", fcntl.fcntl, file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        if name == "data":
            attempt("write data", os.pwrite, file, b"x", 0)
            attempt("map data", mmap.mmap, file, size_bytes, mmap.MAP_SHARED, mmap.PROT_WRITE)
            attempt("map data to read and write", mmap.mmap, file, size_bytes)
            punch = ["fallocate", "--punch-hole", "--length", "4096", f"/proc/self/fd/{file}"]
            done = subprocess.run(punch, pass_fds=[file], stderr=subprocess.DEVNULL, check=False)
            if done.returncode == 0:
                succeeded.append("punch a hole into data")
    pipe.send(succeeded)
    connection.close()


@pytest.mark.skipif(shutil.which("fallocate") is None, reason="needs util-linux")
def test_files_resist_their_reader(start_child: StartChild) -> None:
    """Who is given a queue's files can neither cut, seal nor lengthen one, nor write the data."""
    with MessageQueue(QueueConfig(**SMALL)) as queue:
        child = start_child(attack_files, queue.export_handle(), method="forkserver")
        while not child.pipe.poll(0):
            with contextlib.suppress(QueueNotReady):
                queue.wait_until_ready(0.01)
        assert [] == child.receive()


def hold_all_bytes(pipe: Connection, handle: Handle) -> None:
    """Lock every rank's byte without being any of them."""
    _connection, (_, _, locks) = ask_for_files(handle, 1)
    fcntl.lockf(locks, fcntl.LOCK_EX, 2, 1)
    pipe.send("locked")
    signal.pause()


def test_locks_of_ranks_held_by_a_stranger(start_child: StartChild) -> None:
    """A process that locks ranks which it does not hold keeps them out until it ends, no longer."""
    with MessageQueue(QueueConfig(n_readers=2, **SMALL)) as queue:
        handle = queue.export_handle()
        child = start_child(hold_all_bytes, handle, method="forkserver")
        while not child.pipe.poll(0):
            with contextlib.suppress(QueueNotReady):
                queue.wait_until_ready(0.01)
        assert "locked" == child.receive()
        readers = [MessageReader(handle, 0)]
        with pytest.raises(QueueNotReady, match="rank 0 is not attached"):
            readers[0].wait_until_ready(0.1)
        child.kill()
        with contextlib.suppress(QueueNotReady):  # the stranger's claim of rank 1 ends with it
            queue.wait_until_ready(0.01)
        readers.append(MessageReader(handle, 1))
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(message(0), PATIENCE_S)
        for reader in readers:
            assert_is(0, reader.dequeue(PATIENCE_S))
            reader.close()


SCRIBBLED_S = 0.25


def use_while_scribbled(pipe: Connection, n_rounds: int) -> None:
    """Use queues whose control file the parent writes to; how many messages came."""
    logging.disable()
    counts: list[int] = []
    for _ in range(n_rounds):
        with contextlib.ExitStack() as ends:
            config = QueueConfig(n_readers=2, on_reader_loss="evict", **SMALL)
            queue = ends.enter_context(MessageQueue(config))
            handle = queue.export_handle()
            readers = [ends.enter_context(MessageReader(handle, rank)) for rank in range(2)]
            queue.wait_until_ready(PATIENCE_S)
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
            pipe.send(f"/proc/{os.getpid()}/fd/{queue._writer.segment.control_descriptor}")
            threads = [threading.Thread(target=read, args=(reader, counts)) for reader in readers]
            for thread in threads:
                thread.start()
            end = time.monotonic() + SCRIBBLED_S
            number = 0
            while time.monotonic() < end:
                with contextlib.suppress(ShmcastError):
                    queue.enqueue(message(number), 0.02)
                    number += 1
            queue.close()
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
    pipe.send(None)
    pipe.send(counts)


def read(reader: MessageReader, counts: list[int]) -> None:
    """Receive until the end, of whatever kind; how many messages came."""
    number = 0
    # A block that is given up by a stranger is used again, and what is read there is no pickle.
    with contextlib.suppress(Exception):
        while True:
            reader.dequeue()
            number += 1
    counts.append(number)


def test_scribbler(start_child: StartChild) -> None:
    """A process that scribbles on the control file of a busy queue makes no end crash or hang."""
    chance = random.Random(random.getrandbits(32))
    child = start_child(use_while_scribbled, 4, method="forkserver")
    n_stores = 0
    while path := child.receive():
        descriptor = os.open(path, os.O_RDWR)
        with mmap.mmap(descriptor, 0) as control:
            os.close(descriptor)
            ranks_words = [0, 16, *range(32, 36), *range(48, 52)]
            while not child.pipe.poll(0.0005):
                word = (
                    chance.choice(ranks_words) if chance.random() < 0.7 else chance.randrange(300)
                )
                (before,) = struct.unpack_from("=Q", control, 8 * word)
                near = before + chance.choice((-3, -1, 1, 2, 4))
                value = chance.choice((near, near, 0, 1, 2**63, chance.getrandbits(64)))
                struct.pack_into("=Q", control, 8 * word, value % 2**64)
                n_stores += 1
    counts = child.receive()
    assert (4 * 2, True) == (len(counts), sum(counts) > 0)
    assert 0 == child.join()
    assert n_stores > 100


# --- stopped by a debugger ------------------------------------------------------------------------

_PTRACE_DETACH, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 17, 0x4206, 0x4207


@contextlib.contextmanager
def stopped_by_a_debugger(child: Child) -> Iterator[None]:
    """Hold every thread of a child, as a debugger does at a breakpoint."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
    threads = [int(path.name) for path in Path(f"/proc/{child.pid}/task").iterdir()]
    for thread in threads:
        if ptrace(_PTRACE_SEIZE, thread, None, None) != 0:
            pytest.skip(f"ptrace is not allowed here: {os.strerror(ctypes.get_errno())}")
        ptrace(_PTRACE_INTERRUPT, thread, None, None)
        os.waitpid(thread, 0x40000000)  # __WALL
    yield
    for thread in threads:
        assert 0 == ptrace(_PTRACE_DETACH, thread, None, None)


#: Longer than a process may be seen without its lock, and shorter than a remote one is waited for.
STOPPED_S = locks._UNLOCKED_S + 0.2


@pytest.mark.parametrize("settings", [SMALL, REMOTE], ids=["local", "remote"])
def test_debugged_reader(start_child: StartChild, settings: dict[str, Any]) -> None:
    """A reader that a debugger stops, in whatever line, is waited for and gets everything."""
    writer = start_child(write_until_told, settings, method="forkserver")
    reader = start_child(read_to_the_end, writer.receive(), 0, method="forkserver")
    assert "ready" == reader.receive()
    for pause_s in (*[0.01] * 10, STOPPED_S):
        with stopped_by_a_debugger(reader):
            time.sleep(pause_s)
        time.sleep(0.003)  # what is being done meanwhile is the point
    writer.pipe.send("enough")
    assert writer.receive() == reader.receive() > 0


@pytest.mark.parametrize("settings", [SMALL, REMOTE], ids=["local", "remote"])
def test_debugged_writer(start_child: StartChild, settings: dict[str, Any]) -> None:
    """A writer that a debugger stops is not lost: a timeout says so, and everything arrives."""
    writer = start_child(write_until_told, settings, method="forkserver")
    with MessageReader(writer.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        number = 0
        for pause_s in (*[0.01] * 10, STOPPED_S):
            with stopped_by_a_debugger(writer):
                end = time.monotonic() + pause_s
                with contextlib.suppress(QueueEmpty):
                    while True:
                        assert_is(number, reader.dequeue(max(0.0, end - time.monotonic())))
                        number += 1
            assert_is(number, reader.dequeue(PATIENCE_S))
            number += 1
        writer.pipe.send("enough")
        for received in reader:
            assert_is(number, received)
            number += 1
    assert number == writer.receive()


# --- limits ---------------------------------------------------------------------------------------

WITH_FULL_SHM = """
mount -t tmpfs -o size=64k none /dev/shm || exit 77
head -c 1M /dev/zero > /dev/shm/full 2> /dev/null
exec "$0" -c '
from shmcast import *
with MessageQueue(QueueConfig(chunk_bytes="64 MiB")) as queue:
    with MessageReader(queue.export_handle(), 0) as reader:
        for content in (b"small", bytes(40 << 20), bytearray(90 << 20)):
            queue.enqueue(content)
            assert content == reader.dequeue(30)
'
"""


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_full_dev_shm() -> None:
    """A queue works while `/dev/shm` is 64 KiB small and full."""
    command = ["unshare", "--mount", "sh", "-c", WITH_FULL_SHM, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or done.stderr.startswith("unshare: "):
        pytest.skip(f"no mount of its own: {done.stderr}")
    assert (0, "") == (done.returncode, done.stderr)


def write_with_little_memory(pipe: Connection, limit: int) -> None:
    """Publish what there is room for, under a limit that is reached in the middle of a message."""
    config = QueueConfig(n_chunks=4, chunk_bytes="8 MiB", arena_bytes="64 MiB")
    with MessageQueue(config) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        fields = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        used_bytes = 1024 * int(
            fields["VmSize" if limit == resource.RLIMIT_AS else "VmData"].split()[0]
        )
        large = bytearray(40 * MIB)
        resource.setrlimit(limit, (used_bytes + 44 * MIB, resource.RLIM_INFINITY))
        for content in (large, "small", PickleBuffer(large), [large, large], "last"):
            try:
                queue.enqueue(content, PATIENCE_S)
            except (MemoryError, ShmcastError) as error:
                pipe.send(type(error).__name__)
            else:
                pipe.send("published")


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_writer_out_of_address_space(start_child: StartChild, limit: str) -> None:
    """A writer whose limit ends a message in the middle has published nothing, and goes on."""
    child = start_child(write_with_little_memory, getattr(resource, limit), method="forkserver")
    with MessageReader(child.receive(), 0) as reader:
        sizes = [len(received) for received in reader]
    outcomes = [child.receive() for _ in range(5)]
    assert {"MemoryError", "published"} == set(outcomes), outcomes
    assert ["published"] * 2 == [outcomes[1], outcomes[4]]
    expected = [40 * MIB, 5, 40 * MIB, 2, 4]
    arrived = [size for size, outcome in zip(expected, outcomes, strict=True) if "pub" in outcome]
    assert arrived == sizes
    assert 0 == child.join()


def new_memory_group() -> Path:
    """A control group of 64 MiB, of version 2 or 1."""
    name = f"shmcast-{secrets.token_hex(4)}"
    for root, limit in (
        ("/sys/fs/cgroup", "memory.max"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
    ):
        group = Path(root, name)
        try:
            group.mkdir()
            with (group / limit).open("r+") as file:
                file.write(str(64 * MIB))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
        else:
            return group
    pytest.skip("no control group with a memory limit can be made")


@pytest.fixture
def small_group() -> Iterator[Path]:
    group = new_memory_group()
    yield group
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            group.rmdir()
        except OSError:  # its last process is not gone yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            return


def overwrite_in_a_group(pipe: Connection, handle: Handle, group: Path) -> None:
    """Overwrite what comes, which takes memory of this process's own."""
    with MessageReader(handle, 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        pipe.send("limited")
        with memoryview(reader.dequeue(PATIENCE_S)) as received:
            for offset in range(0, len(received), mmap.PAGESIZE):
                received[offset] = 1
        pipe.send("survived")


def test_reader_killed_by_a_memory_limit(start_child: StartChild, small_group: Path) -> None:
    """A reader that the kernel kills for its memory in a message is lost; others have it whole."""
    with MessageQueue(QueueConfig(n_readers=2, n_chunks=4)) as queue:
        handle = queue.export_handle()
        child = start_child(overwrite_in_a_group, handle, small_group, method="forkserver")
        with MessageReader(handle, 1) as reader:
            queue.wait_until_ready(PATIENCE_S)
            assert "limited" == child.receive()
            queue.enqueue(PickleBuffer(bytearray(b"a") * (200 * MIB)))
            assert -signal.SIGKILL == child.join()
            time.sleep(0.011)  # from then on an enqueue looks around
            with pytest.raises(ReaderLost, match=rf"rank 0 \(pid {child.pid}\) died"):
                queue.enqueue("small", PATIENCE_S)
            received = reader.dequeue(PATIENCE_S)
            assert b"a" * (200 * MIB) == received


def pickle_in_a_group(pipe: Connection, group: Path) -> None:
    """Publish small messages, then one that needs more memory than the group has."""
    with MessageQueue(QueueConfig(**SMALL)) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("before", PATIENCE_S)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        queue.enqueue([b"%d" % number for number in range(10**8)])


def test_writer_killed_by_a_memory_limit(start_child: StartChild, small_group: Path) -> None:
    """A writer that the kernel kills in a message is lost after all that it had published."""
    child = start_child(pickle_in_a_group, small_group, method="forkserver")
    with MessageReader(child.receive(), 0) as reader:
        assert "before" == reader.dequeue(PATIENCE_S)
        with pytest.raises(WriterLost, match=f"pid {child.pid}"):
            reader.dequeue(PATIENCE_S)
    assert -signal.SIGKILL == child.join()


# --- the end's own program ------------------------------------------------------------------------


def close_everything_and_write(pipe: Connection, settings: dict[str, Any]) -> None:
    """Close all descriptors but the pipe, then go on as if nothing had happened."""
    queue = MessageQueue(QueueConfig(**settings))
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for number in range(3):
        queue.enqueue(message(number), PATIENCE_S)
    os.closerange(3, pipe.fileno())
    os.closerange(pipe.fileno() + 1, 1024)
    try:
        for number in range(3, 1000):
            queue.enqueue(message(number), 0.05)
    except (ShmcastError, OSError) as error:
        pipe.send(type(error).__name__)
    pipe.recv()
    os._exit(0)


def test_writer_whose_descriptors_were_closed(start_child: StartChild) -> None:
    """A program that closes the descriptors of its writer gets an error, and its readers too."""
    child = start_child(close_everything_and_write, SMALL, method="forkserver")
    with MessageReader(child.receive(), 0) as reader:
        for number in range(3):
            assert_is(number, reader.dequeue(PATIENCE_S))
        with pytest.raises(ProtocolError, match=rf"\(pid {child.pid}\) is alive but its lock"):
            [reader.dequeue(PATIENCE_S) for _ in range(1000)]
    assert "OSError" == child.receive()
    child.pipe.send("end")
    assert 0 == child.join()


JUMPING = """
import random, sys, time
chance = random.Random(1)
time.time = lambda: chance.choice((0.0, 1e9, 1e12))
time.time_ns = lambda: int(time.time() * 1e9)
from shmcast import *
with MessageReader(Handle.from_json(sys.stdin.readline()), 0) as reader:
    with open("/proc/uptime") as uptime:
        print(uptime.read().split()[0], flush=True)
    start = time.monotonic()
    for _ in range(8):
        try:
            reader.dequeue(0.05)
        except QueueEmpty:
            pass
    print(0.4 <= time.monotonic() - start < 20, flush=True)
    for message in reader:
        print(message, flush=True)
"""


@needs_root
@pytest.mark.parametrize("settings", [SMALL, REMOTE], ids=["local", "remote"])
def test_clocks_that_differ(settings: dict[str, Any]) -> None:
    """A reader whose clocks jump, and are 100 days ahead, waits as long as it is asked to."""
    days = 100 * 24 * 3600
    command = ["unshare", "--time", "--fork", f"--monotonic={days}", f"--boottime={days}"]
    pipe = subprocess.PIPE
    with (
        MessageQueue(QueueConfig(**settings)) as queue,
        subprocess.Popen(
            [*command, "--kill-child", sys.executable, "-c", JUMPING],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        ) as process,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(queue.export_handle().to_json() + "\n")
        process.stdin.flush()
        uptime = process.stdout.readline()
        if not uptime:
            pytest.skip("no time namespace can be made")
        assert float(uptime) > days
        queue.wait_until_ready(PATIENCE_S)
        assert "True\n" == process.stdout.readline()
        for number in range(20):
            queue.enqueue(number, PATIENCE_S)
        queue.close()
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert ([str(number) for number in range(20)], "") == (output.split(), errors)


def start_storm() -> None:
    """Run a handler every millisecond from now on."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)


def write_in_a_storm(pipe: Connection, settings: dict[str, Any]) -> None:
    start_storm()
    write_until_told(pipe, settings)


def read_in_a_storm(pipe: Connection, handle: Handle, rank: int) -> None:
    start_storm()
    read_to_the_end(pipe, handle, rank)


def test_storm_of_signals_at_remote_ends(start_child: StartChild) -> None:
    """A signal every millisecond at both ends of a connection loses and repeats nothing."""
    writer = start_child(write_in_a_storm, REMOTE, method="forkserver")
    reader = start_child(read_in_a_storm, writer.receive(), 0, method="forkserver")
    assert "ready" == reader.receive()
    time.sleep(1)
    writer.pipe.send("enough")
    assert writer.receive() == reader.receive() > 0


def write_and_fork(pipe: Connection, settings: dict[str, Any], n_forks: int) -> None:
    """Fork in one thread, at any moment of a call in another; how the children ended."""
    statuses: list[int] = []

    def fork() -> None:
        for _ in range(n_forks):
            child = os.fork()
            if not child:
                try:
                    queue.enqueue("never", 0)
                except ShmcastError:
                    queue.close()
                    os._exit(7)
                os._exit(8)
            poll = select.poll()
            pidfd = os.pidfd_open(child)
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(PATIENCE_S * 1000):
                os.kill(child, signal.SIGKILL)
            os.close(pidfd)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with MessageQueue(QueueConfig(**settings)) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        forker = threading.Thread(target=fork)
        forker.start()
        number = 0
        while forker.is_alive():
            queue.enqueue(message(number), PATIENCE_S)
            number += 1
    pipe.send((number, statuses))


@pytest.mark.parametrize("settings", [SMALL, REMOTE], ids=["local", "remote"])
def test_forks_in_a_thread(start_child: StartChild, settings: dict[str, Any]) -> None:
    """Forks by another thread than the one that enqueues lose nothing and hang no child."""
    writer = start_child(write_and_fork, settings, 30, method="forkserver")
    reader = start_child(read_to_the_end, writer.receive(), 0, method="forkserver")
    assert "ready" == reader.receive()
    number, statuses = writer.receive()
    assert (number, [7] * 30) == (reader.receive(), statuses)


EXITS = """
import os, random, sys, threading, time
from shmcast import *
settings, how, seed = eval(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if "bind" in settings:
    import shmcast.remote  # once, not in each child

def use_queue(chance):
    queue = MessageQueue(QueueConfig(n_readers=2, **settings))
    handle = queue.export_handle()
    def write():
        while True:
            queue.enqueue((bytearray(2000), bytes(chance.choice((0, 10, 9000)))))
    def read(rank):
        kept = []
        for message in MessageReader(handle, rank):
            kept = [*kept[-3:], message]
    for function, arguments in ((write, ()), (read, (0,)), (read, (1,))):
        threading.Thread(target=function, args=arguments, daemon=True).start()
    time.sleep(chance.random() * 0.03)
    if how == "os._exit":
        os._exit(7)
    sys.exit(7)

chance = random.Random(seed)
for _ in range(20):
    moments = random.Random(chance.random())
    child = os.fork()
    if not child:
        use_queue(moments)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("how", ["sys.exit", "os._exit"])
@pytest.mark.parametrize("place", ["local", "remote"])
def test_exit_at_any_moment(place: str, how: str) -> None:
    """A program may end while its threads are in any call, has its exit status, and hangs never."""
    settings = SMALL if place == "local" else {**REMOTE, "local_reader_ranks": (0,)}
    seed = random.getrandbits(32)
    done = subprocess.run(
        [sys.executable, "-c", EXITS, repr(settings), how, str(seed)],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert (0, ["7"] * 20) == (done.returncode, done.stdout.split()), f"{seed=}\n{done.stderr}"
    if place == "local":
        assert "" == done.stderr


# --- strangers at the port ------------------------------------------------------------------------


def write_with_few_descriptors(pipe: Connection) -> None:
    """Wait for a reader with room for 200 connections; then publish once."""
    from shmcast.remote.loop import Link

    Link.timing = attrs.evolve(Link.timing, greeting_s=1.0)  # that long takes a stranger's place
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with MessageQueue(QueueConfig(**REMOTE)) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("arrives", PATIENCE_S)
    pipe.send("closed")


def test_a_thousand_silent_connections_to_the_port(start_child: StartChild) -> None:
    """Of a thousand connections that say nothing a remote reader gets rid in time, and attaches."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    child = start_child(write_with_few_descriptors, method="forkserver")
    handle = child.receive()
    host, _, port = handle.endpoint.removeprefix("tcp://").rpartition(":")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as connections:
        connections.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1000):
            stranger = connections.enter_context(socket.socket())
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect((host, int(port)))
        deadline = time.monotonic() + PATIENCE_S
        received = None
        while received is None and time.monotonic() < deadline:
            with contextlib.suppress(WriterLost), MessageReader(handle, 0) as reader:
                received = reader.dequeue(PATIENCE_S)
        assert "arrives" == received
    assert "closed" == child.receive()
    assert 0 == child.join()
