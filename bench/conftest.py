"""What the benchmarks share: the other process, measuring side by side, and the summary."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from shmcast import Handle, MessageQueue, MessageReader, QueueConfig

PATIENCE_S = 60.0
_PEER = Path(__file__).with_name("peer.py")
_summary_lines = pytest.StashKey[list[str]]()


def pytest_xdist_auto_num_workers() -> int:
    """Benchmarks run in this process, one after the other."""
    return 0


class Peer:
    """A process that runs a role of `peer.py`; `first_line` is what it says first."""

    def __init__(self, role: str, descriptors: tuple[int, ...] = (), **arguments: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, _PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"role": role, **arguments}), file=self.process.stdin, flush=True)
        self.first_line = self.process.stdout.readline()

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        self.process.kill()
        self.process.communicate()


class Connected:
    """A queue to some peers, and the readers of what each of them answers, all ready."""

    def __init__(
        self, role: str, *, n_readers: int = 1, settings: dict[str, Any], **arguments: Any
    ) -> None:
        self.queue = MessageQueue(QueueConfig(n_readers=n_readers, **settings))
        self.readers: list[MessageReader] = []
        self.peers: list[Peer] = []
        handle = self.queue.export_handle().to_json()
        for rank in range(n_readers):
            peer = Peer(role, handle=handle, rank=rank, settings=settings, **arguments)
            self.peers.append(peer)
            answers = Handle.from_json(peer.first_line)
            self.readers.append(MessageQueue.create_from_handle(answers, 0))
        self.queue.wait_until_ready(PATIENCE_S)
        for reader in self.readers:
            reader.wait_until_ready(PATIENCE_S)

    def end(self) -> None:
        """End the peers and close the ends."""
        for peer in self.peers:
            peer.end()
        for end in (self.queue, *self.readers):
            end.close()


class Start(Protocol):
    """The type of the fixture `start_peer`."""

    def __call__(self, role: str, descriptors: tuple[int, ...] = (), **arguments: Any) -> Peer: ...


class Connect(Protocol):
    """The type of the fixture `connect`."""

    def __call__(
        self, role: str, *, n_readers: int = 1, settings: dict[str, Any], **arguments: Any
    ) -> Connected: ...


@pytest.fixture(scope="module")
def start_peer() -> Iterator[Start]:
    """Start a role of `peer.py`, which ends with the module."""
    with contextlib.ExitStack() as started:

        def start(role: str, descriptors: tuple[int, ...] = (), **arguments: Any) -> Peer:
            peer = Peer(role, descriptors, **arguments)
            started.callback(peer.end)
            return peer

        yield start


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """Connect with peers of one role through queues, until the module ends."""
    with contextlib.ExitStack() as started:

        def start(role: str, **settings: Any) -> Connected:
            connected = Connected(role, **settings)
            started.callback(connected.end)
            return connected

        yield start


class Pin(Protocol):
    """The type of the fixture `pin`."""

    def __call__(self, *peers: Peer, n_cpus: int = 2) -> None: ...


@pytest.fixture
def pin() -> Iterator[Pin]:
    """
    Pin this process and its peers to a CPU each, or all to one, for a test.

    Where the scheduler puts the two sides of a hand-over changes its time more than anything else.
    """
    allowed = os.sched_getaffinity(0)

    def to_cpus(*peers: Peer, n_cpus: int = 2) -> None:
        if len(allowed) < n_cpus:
            pytest.skip(f"it needs {n_cpus} CPUs")
        first, second = sorted(allowed)[0], sorted(allowed)[n_cpus - 1]
        os.sched_setaffinity(0, {first})
        for peer in peers:
            os.sched_setaffinity(peer.process.pid, {second})

    yield to_cpus
    os.sched_setaffinity(0, allowed)


class SideBySide(Protocol):
    """The type of the fixture `side_by_side`."""

    def __call__(
        self,
        title: str,
        subject: Callable[[], float],
        baselines: dict[str, Callable[[], float]],
        *,
        blocks: int,
        target: str = "",
    ) -> None: ...


@pytest.fixture
def side_by_side(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> SideBySide:
    """
    Measure a subject and its baselines in turn, block by block, and report their ratios.

    Each function runs a block and returns the seconds that one operation took in it. A ratio is
    that of the subject and a baseline in the same block, so that a change of the machine's speed
    changes both.
    """

    def measure(
        title: str,
        subject: Callable[[], float],
        baselines: dict[str, Callable[[], float]],
        *,
        blocks: int,
        target: str = "",
    ) -> None:
        times: dict[str, list[float]] = {}

        def run_subject() -> None:
            times["subject"].append(subject())

        def run_baselines() -> None:
            for name, baseline in baselines.items():
                times[name].append(baseline())

        times.update((name, []) for name in ("subject", *baselines))
        run_baselines()
        run_subject()  # once for nothing: caches, frequencies, first page faults
        times.update((name, []) for name in ("subject", *baselines))
        benchmark.pedantic(run_subject, setup=run_baselines, rounds=blocks)

        line = f"{title}: {_duration(statistics.median(times['subject']))}"
        benchmark.extra_info.update(blocks=blocks, target=target)
        for name in baselines:
            pairs = zip(times["subject"], times[name], strict=True)
            ratios = sorted(mine / other for mine, other in pairs)
            benchmark.extra_info[f"ratio to {name}"] = {
                "median": statistics.median(ratios),
                "least": ratios[0],
                "most": ratios[-1],
            }
            line += (
                f", {statistics.median(ratios):.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                f" {name} of {_duration(statistics.median(times[name]))}"
            )
        _add_to_summary(request.config, line, target)

    return measure


class Share(Protocol):
    """The type of the fixture `cpu_share`."""

    def __call__(
        self, title: str, pid: int, *, blocks: int, block_s: float, target: str
    ) -> None: ...


@pytest.fixture
def cpu_share(benchmark: BenchmarkFixture, request: pytest.FixtureRequest) -> Share:
    """Measure which share of a core a process uses."""

    def measure(title: str, pid: int, *, blocks: int, block_s: float, target: str) -> None:
        clock = (~pid << 3) | 2  # what clock_getcpuclockid(3) makes of a pid on Linux
        shares: list[float] = []

        def run_block() -> None:
            used_s, start_s = time.clock_gettime(clock), time.perf_counter()
            time.sleep(block_s)
            used_s = time.clock_gettime(clock) - used_s
            shares.append(used_s / (time.perf_counter() - start_s))

        benchmark.pedantic(run_block, rounds=blocks)
        shares.sort()
        median = statistics.median(shares)
        benchmark.extra_info.update(
            blocks=blocks,
            target=target,
            share={"median": median, "least": shares[0], "most": shares[-1]},
        )
        line = f"{title}: {median:.2%} of a core ({shares[0]:.2%} to {shares[-1]:.2%})"
        _add_to_summary(request.config, line, target)

    return measure


def _duration(seconds: float) -> str:
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _add_to_summary(config: pytest.Config, line: str, target: str) -> None:
    lines = config.stash.setdefault(_summary_lines, [])
    lines.append(f"{line}; target {target}" if target else line)


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print every ratio, and the machine that it belongs to."""
    lines = config.stash.get(_summary_lines, [])
    if not lines:
        return
    terminalreporter.section("shmcast: median (least to most) over blocks measured in turn")
    terminalreporter.write_line(
        f"{_cpu_model()}, {len(os.sched_getaffinity(0))} CPUs, Linux {platform.release()}, "
        f"Python {platform.python_version()}"
    )
    for line in sorted(lines):
        terminalreporter.write_line(line)
