"""Process groups: who gets which end, who is local, errors on one rank, and two hosts."""

from __future__ import annotations

import codecs
import collections
import contextlib
import ctypes
import datetime
import errno
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch.distributed as dist
from conftest import PATIENCE_S, Child, StartChild
from test_readme import HANDBOOK, block
from test_remote import wait_for

from shmcast import (
    ConfigError,
    Handle,
    MessageQueue,
    MessageReader,
    QueueConfig,
    ReaderLost,
    WriterLost,
    distributed,
)
from shmcast.door import all_ends
from shmcast.remote.loop import Link

MESSAGES = [{"step": 0}, bytes(range(256)) * 5000, b"", bytearray(3 << 20), "the last one"]
#: What the command is, whatever the path.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
BROADCAST_RANDOM = Path(__file__).with_name("broadcast_random.py")
LOOPBACK = "tcp://127.0.0.1:0"
NOBODY = 65534

create = MessageQueue.create_from_process_group

Play = Callable[[int, Connection], Any]


# --- ranks ----------------------------------------------------------------------------------------


def member(
    pipe: Connection, store: Path, rank: int, size: int, play: Play, host: Host | None
) -> None:
    """One rank: join the default group, play, send what came of it, stay until told to go."""
    if host is not None:
        host.enter()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host is None else "eth0"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )
    try:
        pipe.send(play(rank, pipe))
    except Exception as error:
        pipe.send(error)
    pipe.recv()
    dist.destroy_process_group()


class StartRanks:
    """Starts the ranks of a process group, forked, so that they can play any function."""

    def __init__(self, start_child: StartChild, folder: Path) -> None:
        self._start_child, self._folder = start_child, folder

    def __call__(self, size: int, play: Play, hosts: list[Host] | None = None) -> list[Child]:
        store = self._folder / f"store-{os.urandom(4).hex()}"
        return [
            self._start_child(
                member, store, rank, size, play, hosts[rank] if hosts else None, method="fork"
            )
            for rank in range(size)
        ]

    def outcomes(self, size: int, play: Play, hosts: list[Host] | None = None) -> list[Any]:
        """What came of it on each rank."""
        children = self(size, play, hosts)
        outcomes = [child.receive(2 * PATIENCE_S) for child in children]
        for child in children:
            child.pipe.send("go")
        assert [0] * size == [child.join() for child in children]
        return outcomes


@pytest.fixture
def start_ranks(start_child: StartChild, tmp_path: Path) -> StartRanks:
    return StartRanks(start_child, tmp_path)


def use(end: MessageQueue | MessageReader) -> Any:
    """Broadcast, and say who is local; or read to the end, and say what came."""
    with end:
        if isinstance(end, MessageReader):
            return end.rank, list(end)
        for message in MESSAGES:
            end.enqueue(message, PATIENCE_S)
        return end.export_handle().local_reader_ranks


def read_by(rank: int) -> Any:
    """What `use` returns for a reader of this rank."""
    return rank, MESSAGES


@pytest.mark.parametrize(("size", "writer_rank"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_every_rank_gets_its_end(start_ranks: StartRanks, size: int, writer_rank: int) -> None:
    """Any rank may write; the others are the readers in their order, local ones on one host."""
    outcomes = start_ranks.outcomes(size, lambda *_: use(create(None, None, writer_rank)))
    assert tuple(range(size - 1)) == outcomes.pop(writer_rank)
    assert [read_by(rank) for rank in range(size - 1)] == outcomes


def test_sub_group(start_ranks: StartRanks) -> None:
    """In a group of some ranks its own ranks count, and a process outside it gets an error."""

    def play(_rank: int, _pipe: Connection) -> Any:
        return use(create(dist.new_group([1, 2, 3]), QueueConfig(n_readers=2), writer_rank=1))

    outside, *outcomes = start_ranks.outcomes(4, play)
    assert [read_by(0), (0, 1), read_by(1)] == outcomes
    assert isinstance(outside, ConfigError)
    assert "this process is not in the process group" == str(outside)


def test_two_queues(start_ranks: StartRanks) -> None:
    """A group may have a queue in each direction at the same time."""

    def play(_rank: int, _pipe: Connection) -> Any:
        ends = [create(None, writer_rank=writer_rank) for writer_rank in range(2)]
        ends.sort(key=lambda end: isinstance(end, MessageReader))  # write first
        return [use(end) for end in ends]

    assert 2 * [[(0,), read_by(0)]] == start_ranks.outcomes(2, play)


def test_far_ranks(start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can't reach the control socket is a remote reader beside the local ones."""
    monkeypatch.setattr(distributed, "_is_near", lambda *_: dist.get_rank() == 2)
    outcomes = start_ranks.outcomes(4, lambda *_: use(create(None, QueueConfig(bind=LOOPBACK))))
    assert [(1,), *map(read_by, range(3))] == outcomes


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_user(start_ranks: StartRanks) -> None:
    """Another user's rank is a remote one, whatever host it is on."""

    def play(rank: int, _pipe: Connection) -> Any:
        codecs.lookup("idna")  # for the address; the other user may not read Python's files
        if rank == 1:
            os.setuid(NOBODY)
        return use(create(None, QueueConfig(bind=LOOPBACK)))

    assert [(1,), read_by(0), read_by(1)] == start_ranks.outcomes(3, play)


# --- errors ---------------------------------------------------------------------------------------


def texts_of(outcomes: list[Any], error: type[Exception]) -> list[str]:
    """The texts of these, which are errors of this type."""
    assert {error} == {type(outcome) for outcome in outcomes}, outcomes
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (QueueConfig(n_readers=3), "n_readers = 3 .* the writer, 2, or nothing"),
        (
            QueueConfig(n_readers=2, local_reader_ranks=(1,), bind=LOOPBACK),
            r"local_reader_ranks = \(1,\) .* the writer's host, \(0, 1\), or nothing",
        ),
        (
            QueueConfig(n_chunks=1 << 20, chunk_bytes="1024 GiB"),
            "a queue with n_readers = 2.* can't",
        ),
        ("n_readers=2", "config = 'n_readers=2' is not allowed"),
    ],
)
def test_wrong_config(start_ranks: StartRanks, config: Any, text: str) -> None:
    """The writer's wrong settings are the same error on every rank."""
    error = ConfigError if isinstance(config, QueueConfig) else TypeError
    outcomes = start_ranks.outcomes(3, lambda *_: create(None, config, writer_rank=1))
    texts = texts_of(outcomes, error)
    assert 1 == len(set(texts))
    assert re.match(text, texts[0])
    assert ["raised on rank 1 of the process group"] == outcomes[0].__notes__


@pytest.mark.parametrize(
    ("master", "text"),
    [
        (None, "does not lead to one"),
        ("localhost", r"leads to (127\.0\.0\.1|::1), which they can't reach"),
        ("no.such.host.invalid", "does not lead to one: .*"),
    ],
)
def test_no_address(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch, master: str | None, text: str
) -> None:
    """Where MASTER_ADDR gives no address for other hosts, every rank is told to set `bind`."""
    monkeypatch.setattr(distributed, "_is_near", lambda *_: False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    outcomes = start_ranks.outcomes(2, lambda *_: create(None))
    for found in texts_of(outcomes, ConfigError):
        start = r"bind = None is not allowed; allowed is an address for the readers \[0\]"
        assert re.fullmatch(f"{start} on other hosts, since MASTER_ADDR = {master!r} {text}", found)


@pytest.mark.parametrize(
    ("writer_rank", "error", "text"),
    [
        (2, ConfigError, "writer_rank = 2 is not allowed; allowed is a rank of the group, from 0 "),
        (-1, ConfigError, "writer_rank = -1 is not allowed"),
        (1.0, TypeError, ""),
    ],
)
def test_wrong_writer_rank(
    start_ranks: StartRanks, writer_rank: Any, error: type[Exception], text: str
) -> None:
    """What is no rank of the group is an error on all, even if only one asks for it as writer."""

    def play(rank: int, _pipe: Connection) -> Any:
        return create(None, writer_rank=writer_rank if rank else 1)

    texts = texts_of(start_ranks.outcomes(2, play), error)
    assert [True, True] == [found.startswith(text) for found in texts]


def test_out_of_descriptors(start_ranks: StartRanks) -> None:
    """A rank that has no descriptor left is an error on all."""

    def play(rank: int, _pipe: Connection) -> Any:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, allowed[1]))
        try:
            return create(None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)

    outcomes = start_ranks.outcomes(2, play)
    assert 2 * [errno.EMFILE] == [outcome.errno for outcome in outcomes]


def test_ranks_disagree(start_ranks: StartRanks) -> None:
    """Two ranks that both want to write are told so."""
    texts = texts_of(start_ranks.outcomes(2, lambda rank, _: create(None, None, rank)), ConfigError)
    assert 2 * ["the group's ranks disagree on writer_rank: [0, 1]"] == texts


def test_group_of_one(start_ranks: StartRanks) -> None:
    """A group without a reader is an error."""
    (text,) = texts_of(start_ranks.outcomes(1, lambda *_: create(None)), ConfigError)
    assert "a process group of one rank has no readers; allowed are two or more" == text


def fail_at_rank_1(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Play:
    """A play in which rank 1 fails there, and the writer is rank 2."""

    def fail(*_: object) -> None:
        raise WriterLost("found no writer")

    def play(rank: int, _pipe: Connection) -> Any:
        if rank == 1:
            monkeypatch.setattr(owner, method, fail)
        try:
            return create(None, writer_rank=2)
        finally:
            assert not all_ends()

    return play


def test_reader_that_cannot_attach(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that can't attach is the same error on all ranks at once, and no end stays open."""
    play = fail_at_rank_1(monkeypatch, MessageQueue, "create_from_handle")
    outcomes = start_ranks.outcomes(3, play)
    assert 3 * ["found no writer"] == texts_of(outcomes, WriterLost)


def test_reader_that_is_not_admitted(
    start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is not ready in time is the same error on all ranks."""
    monkeypatch.setattr(distributed, "READY_S", 0.5)
    play = fail_at_rank_1(monkeypatch, MessageReader, "wait_until_ready")
    outcomes = start_ranks.outcomes(3, play)
    assert 3 * ["found no writer"] == texts_of(outcomes, WriterLost)


# --- two hosts ------------------------------------------------------------------------------------


@attrs.frozen
class Host:
    """A network namespace that plays a host; addresses are those for documentation."""

    name: str
    number: int

    def connect(self) -> None:
        # Of a second holder of its address asks only IPv6, and it would wait a second for it.
        for address in (f"192.0.2.{self.number}/24", f"2001:db8::{self.number}/64 nodad"):
            ip("-n", self.name, "address", "add", "dev", "eth0", *address.split())
        for device in ("lo", "eth0"):
            ip("-n", self.name, "link", "set", device, "up")

    def enter(self) -> None:
        """Move this thread there."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as namespace:
            if libc.setns(namespace.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")

    @property
    def sent_bytes(self) -> int:
        """What has left it."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(ip("netns", "exec", self.name, "cat", path))


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, 192.0.2.1 and 192.0.2.2, which know each other's names."""
    pair = Host(f"shmcast-{os.getpid()}-1", 1), Host(f"shmcast-{os.getpid()}-2", 2)
    folders = [Path("/etc/netns", host.name) for host in pair]
    veth = "link add eth0 netns {} type veth peer name eth0 netns {}"
    try:
        try:
            for host in pair:
                ip("netns", "add", host.name)
            ip(*veth.format(*(host.name for host in pair)).split())
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        for host, folder in zip(pair, folders, strict=True):
            host.connect()
            # `ip netns exec` shows this as /etc/hosts. IPv6 alone: of two addresses IPv4 is taken.
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n2001:db8::1 one\n2001:db8::2 two\n")
        yield pair
    finally:
        for host, folder in zip(pair, folders, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", host.name)


Hosts = tuple[Host, Host]


class Programs:
    """Programs, in a folder each and maybe on a host, which end with the test."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[str]] = []

    def start(self, folder: Path, *command: str, host: Host | None = None) -> None:
        there = [] if host is None else ["ip", "netns", "exec", host.name]
        interface = "lo" if host is None else "eth0"
        self._all.append(
            subprocess.Popen(
                [*there, *command],
                cwd=folder,
                env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )

    def finish(self) -> list[str]:
        """Wait until all have ended well; what each printed."""
        outputs = [program.communicate(timeout=3 * PATIENCE_S)[0] for program in self._all]
        assert [0] * len(outputs) == [program.returncode for program in self._all], outputs
        return outputs

    def kill(self) -> None:
        for program in self._all:
            program.kill()
            program.communicate()


@pytest.fixture
def programs() -> Iterator[Programs]:
    programs = Programs()
    yield programs
    programs.kill()


def test_torchrun(
    hosts: Hosts, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on each of two hosts, started as the handbook says, get every message, by names."""
    monkeypatch.setenv("SHMCAST_BIND", "tcp://two:0")
    seed = random.getrandbits(32)
    (options,) = re.findall("^torchrun (.*) broadcast.py$", HANDBOOK, re.MULTILINE)
    for number, host in enumerate(hosts):
        here = options.replace("192.0.2.1", "one").replace("--node-rank=0", f"--node-rank={number}")
        # The writer, rank 3, is on the second host; reader 2 is beside it.
        program = str(BROADCAST_RANDOM), str(seed), "3", "2"
        programs.start(tmp_path, *TORCHRUN, *here.split(), *program, host=host)
    lines = "".join(programs.finish()).splitlines()
    expected = [f"reader {rank} got every message of seed {seed}" for rank in range(3)]
    assert expected == sorted(line for line in lines if line.startswith("reader"))


def test_remote_reader_dies(
    hosts: Hosts,
    start_ranks: StartRanks,
    start_child: StartChild,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that is killed on the other host is lost by name; its rank may be attached again."""
    monkeypatch.setenv("MASTER_ADDR", "2001:db8::2")
    saved = tmp_path / "queue.json"

    def play(rank: int, pipe: Connection) -> Any:
        with create(None) as end:
            if isinstance(end, MessageReader):
                pipe.send("ready")
                return list(collections.deque(end, len(MESSAGES)))  # the last ones
            monkeypatch.setattr(Link, "timing", attrs.evolve(Link.timing, resume_s=1.0))
            end.export_handle().save(saved)
            pipe.send(end.export_handle().endpoint)
            with pytest.raises(ReaderLost) as lost:
                enqueue_for_ever(end)
            pipe.send((lost.value.ranks, str(lost.value)))
            end.wait_until_ready(PATIENCE_S)
            return use(end)

    writer, local_reader, remote_reader = start_ranks(3, play, [hosts[0], hosts[0], hosts[1]])
    assert writer.receive().startswith("tcp://[2001:db8::1]:")
    assert ["ready"] * 2 == [child.receive() for child in (local_reader, remote_reader)]
    remote_reader.kill()
    ranks, text = writer.receive()
    assert (1,) == ranks
    assert f"rank 1 (pid {remote_reader.pid} on " in text
    again = start_child(read_from_handle, saved, 1, hosts[1], method="fork")
    assert (0,) == writer.receive()
    assert read_by(1) == again.receive()
    assert MESSAGES == local_reader.receive()
    for child in (writer, local_reader):
        child.pipe.send("go")


def enqueue_for_ever(end: MessageQueue) -> None:
    while True:
        end.enqueue(bytes(100_000), PATIENCE_S)


def read_from_handle(pipe: Connection, path: Path, rank: int, host: Host) -> None:
    host.enter()
    pipe.send(use(MessageQueue.create_from_handle(Handle.load(path), rank)))


def test_once_per_host(
    hosts: Hosts, start_ranks: StartRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two readers on another host cost the network what one of them does."""
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    messages = [os.urandom(4 << 20) for _ in range(8)]

    def play(_rank: int, _pipe: Connection) -> Any:
        with create(None) as end:
            if isinstance(end, MessageReader):
                return messages == list(end)
            for message in messages:
                end.enqueue(message, PATIENCE_S)
        return None

    sent_bytes = hosts[0].sent_bytes
    outcomes = start_ranks.outcomes(3, play, [hosts[0], hosts[1], hosts[1]])
    sent_bytes = hosts[0].sent_bytes - sent_bytes
    assert [None, True, True] == outcomes
    payload_bytes = sum(map(len, messages))
    assert payload_bytes < sent_bytes < 1.3 * payload_bytes


# --- the handbook's programs ----------------------------------------------------------------------


def save_program(name: str, folder: Path) -> None:
    (folder / name).write_text(block(f"# {name}"), encoding="utf-8")


def test_readme_torchrun(programs: Programs, tmp_path: Path) -> None:
    """The handbook's program for torchrun runs on one host with its command."""
    save_program("broadcast.py", tmp_path)
    (command,) = re.findall("`torchrun (.*?)`", HANDBOOK)
    programs.start(tmp_path, *TORCHRUN, *command.split())
    printed = programs.finish()[0]
    # The ranks write at the same time, so that lines may meet.
    assert [0, 1] == [rank for rank in range(3) if f"reader {rank} got every message" in printed]


def test_readme_carried_handle(hosts: Hosts, programs: Programs, tmp_path: Path) -> None:
    """The handbook's writer is read on its own host, and on another one with the file."""
    folders = tmp_path / "here", tmp_path / "there"
    for folder in folders:
        folder.mkdir()
        save_program("reader.py", folder)
    save_program("far_writer.py", folders[0])
    programs.start(folders[0], sys.executable, "far_writer.py", host=hosts[0])
    handle = folders[0] / "queue.json"
    wait_for(handle.exists, "the writer saved no handle")
    shutil.copy(handle, folders[1])
    for rank, (folder, host) in enumerate(zip(folders, hosts, strict=True)):
        programs.start(folder, sys.executable, "reader.py", str(rank), host=host)
    expected = [f"reader {rank} got every message\n" for rank in range(2)]
    assert ["", *expected] == programs.finish()


def test_readme_ray(programs: Programs, tmp_path: Path) -> None:
    """The handbook's program for Ray runs."""
    pytest.importorskip("ray")
    save_program("with_ray.py", tmp_path)
    programs.start(tmp_path, sys.executable, "with_ray.py")
    programs.finish()
