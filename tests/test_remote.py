"""Remote readers: the contract over TCP, cuts, deaths, wrong peers, and what an address may be."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import zmq
from conftest import PATIENCE_S, StartChild
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import (
    KINDS,
    Plan,
    StartReaders,
    plans,
    run,
    serve,
    start_processes,  # noqa: F401  # a fixture
    start_threads,
)

from shmcast import (
    AuthenticationError,
    ConfigError,
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterLost,
    remote,
)

BIND = "tcp://127.0.0.1:0"
SECURITIES = ["curve", "none"]


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def new_queue(n_readers: int = 1, **settings: Any) -> MessageQueue:
    """A queue all of whose ranks are remote, if nothing else is said."""
    given = {"local_reader_ranks": (), "bind": BIND, **settings}
    return MessageQueue(QueueConfig(n_readers=n_readers, **given))


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[MessageQueue, list[MessageReader]]]]:
    """A queue with remote ranks and all its readers, attached, in this process."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[MessageQueue, list[MessageReader]]:
            queue = ends.enter_context(new_queue(**settings))
            handle = queue.export_handle()
            readers = [
                ends.enter_context(MessageReader(handle, rank))
                for rank in range(settings.get("n_readers", 1))
            ]
            queue.wait_until_ready(PATIENCE_S)
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
            return queue, readers

        yield make


Connect = Callable[..., tuple[MessageQueue, list[MessageReader]]]


@pytest.fixture
def quick_loss(monkeypatch: pytest.MonkeyPatch) -> float:
    """Who was cut off is waited for only so long."""
    monkeypatch.setattr(remote, "RESUME_S", 0.5)
    return 0.5


class Proxy:
    """
    A TCP proxy before an endpoint, which can cut all its connections, or hold everything back.

    Args:
        endpoint: where the writer listens.
    """

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.n_cuts = 0
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                one.close()
                continue
            self._ends += [one, other]
            self._pairs.append((one, other))
            self._start(self._pump, one, other)
            self._start(self._pump, other, one)

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> int:
        """Cut every connection; how many there were."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    # A reset, so that nothing on its way arrives.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
        self.n_cuts += len(pairs)
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(PATIENCE_S)
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for end in self._ends:
            end.close()


@pytest.fixture
def behind_proxy() -> Iterator[Callable[[Handle], tuple[Handle, Proxy]]]:
    """The handle through a proxy, and that."""
    proxies: list[Proxy] = []

    def make(handle: Handle) -> tuple[Handle, Proxy]:
        assert handle.endpoint is not None
        proxies.append(Proxy(handle.endpoint))
        return attrs.evolve(handle, endpoint=proxies[-1].endpoint), proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


BehindProxy = Callable[[Handle], tuple[Handle, Proxy]]


# --- the contract ---------------------------------------------------------------------------------


@attrs.frozen
class RemotePlan(Plan):
    """A plan some of whose ranks are remote."""

    n_local: int
    security: str

    @property
    def config(self) -> QueueConfig:
        local = tuple(range(min(self.n_local, self.n_readers - 1)))
        return attrs.evolve(
            super().config,
            local_reader_ranks=local,
            bind=BIND,
            security=self.security,
        )


@st.composite
def remote_plans(draw: st.DrawFn, most_messages: int) -> RemotePlan:
    """A plan with remote ranks, or with both kinds."""
    plan = draw(plans(most_messages=most_messages))
    return RemotePlan(
        **attrs.asdict(plan, recurse=False),
        n_local=draw(st.integers(0, 2)),
        security=draw(st.sampled_from(SECURITIES)),
    )


@settings(max_examples=40)
@given(remote_plans(most_messages=40))
def test_contract_with_threads(plan: RemotePlan) -> None:
    """With remote readers in threads: every message once, whole, in order, then the end."""
    run(plan, start_threads)


@settings(max_examples=60)
@given(plan=remote_plans(most_messages=60))
def test_contract_with_processes(start_processes: StartReaders, plan: RemotePlan) -> None:  # noqa: F811  # the fixture
    """With remote readers in processes: every message once, whole, in order, then the end."""
    run(plan, start_processes)


# --- cuts -----------------------------------------------------------------------------------------


def cut_now_and_then(seed: int, proxies: list[Proxy], is_over: threading.Event) -> None:
    """Cut a connection at random moments; none is spared for long."""
    choice = random.Random(seed)
    while not is_over.wait(choice.choice((0.001, 0.02, 0.05, 0.1))):
        choice.choice(proxies).cut()


def hold_contract_over_cuts(
    seed: int, n_cuts: int, start: StartReaders, behind_proxy: BehindProxy
) -> None:
    """Hold the contract again and again, until so many connections have been cut."""
    choice = random.Random(seed)
    n_done = 0
    while n_done < n_cuts:
        kinds_and_sizes = [
            (choice.choice(KINDS), choice.choice((0, 10, 1000, 5000, 70_000, 300_000)))
            for _ in range(150)
        ]
        plan = RemotePlan(
            seed=choice.getrandbits(32),
            n_readers=2,
            n_chunks=choice.choice((1, 3, 16)),
            chunk_bytes=100_000,
            oob_threshold_bytes=choice.choice((0, 2000)),
            spin_us=0,
            stalls=0.1,
            patient=True,
            messages=tuple(kinds_and_sizes),
            n_local=0,
            security=choice.choice(SECURITIES),
        )
        proxies: list[Proxy] = []

        def start_behind(plan: Plan, handle: Handle) -> list[Callable[[], list[str]]]:
            handle, proxy = behind_proxy(handle)
            proxies.append(proxy)  # noqa: B023  # called in this round
            return start(plan, handle)

        is_over = threading.Event()

        def cut() -> None:
            wait_for(lambda: proxies, "no reader was started")  # noqa: B023
            cut_now_and_then(plan.seed, proxies, is_over)  # noqa: B023

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            run(plan, start_behind)
        finally:
            is_over.set()
            cutter.join(PATIENCE_S)
        n_done += sum(proxy.n_cuts for proxy in proxies)


def test_cuts(
    start_processes: StartReaders,  # noqa: F811  # the fixture
    behind_proxy: BehindProxy,
    record_property: Callable[[str, object], None],
) -> None:
    """Over 100 cut connections nothing is lost, repeated, reordered or torn."""
    seed = random.getrandbits(32)
    print("seed", seed)
    record_property("seed", seed)
    hold_contract_over_cuts(seed, 100, start_processes, behind_proxy)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_cuts(start_processes: StartReaders, behind_proxy: BehindProxy) -> None:  # noqa: F811  # the fixture
    """Over 10,000 cut connections nothing is lost, repeated, reordered or torn."""
    seed = random.getrandbits(32)
    print("seed", seed)
    hold_contract_over_cuts(seed, 10_000, start_processes, behind_proxy)
