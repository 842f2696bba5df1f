"""Over TCP on loopback, beside bare pyzmq PUSH and PULL that do the same work."""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq

from bench.test_round_trip import MESSAGE

if TYPE_CHECKING:
    from bench.conftest import Connect, Connected, SideBySide, Start

MIB = 1 << 20
WINDOW = 4


class Raw:
    """The two sockets of this side, and the process on the other one."""

    def __init__(self, start_peer: Start, security: str) -> None:
        self._context = zmq.Context()
        self.push, self.pull = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        keys: list[str] = []
        if security == "curve":
            server_public, server_secret = zmq.curve_keypair()
            client_public, client_secret = zmq.curve_keypair()
            keys = [key.decode() for key in (server_public, client_public, client_secret)]
        ports = []
        for socket in (self.push, self.pull):
            socket.linger = 0
            if keys:
                socket.curve_server = True
                socket.curve_secretkey = server_secret
            ports.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        forth, back = ports
        self.peer = start_peer("raw_zmq", forth=forth, back=back, keys=keys)

    def end(self) -> None:
        self._context.destroy(0)


@pytest.fixture(scope="module", params=["none", "curve"])
def security(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def raw(start_peer: Start, security: str) -> Iterator[Raw]:
    """Bare sockets to a peer that echoes and touches."""
    raw = Raw(start_peer, security)
    yield raw
    raw.end()


def settings(security: str) -> dict[str, Any]:
    """For ends that are all remote; every message fits a chunk."""
    return {
        "local_reader_ranks": [],
        "bind": "tcp://127.0.0.1:0",
        "security": security,
        "n_chunks": WINDOW,
        "chunk_bytes": "64 MiB",
    }


@pytest.fixture(scope="module")
def sized(connect: Connect, security: str) -> Connected:
    return connect("say_size", settings=settings(security))


@pytest.mark.parametrize("size_mib", [16, 60])
def test_throughput(
    sized: Connected, raw: Raw, side_by_side: SideBySide, security: str, size_mib: int
) -> None:
    """A window of tensors goes out; each is touched page by page and answered."""
    queue, (reader,) = sized.queue, sized.readers
    tensor = torch.ones(size_mib * MIB, dtype=torch.uint8)
    bare = memoryview(tensor.numpy())

    def timed(send: Callable[[], object], receive: Callable[[], object]) -> float:
        start_s = time.perf_counter()
        for _ in range(WINDOW):
            send()
        for _ in range(WINDOW):
            assert tensor.nbytes == receive()
        return (time.perf_counter() - start_s) / WINDOW

    side_by_side(
        f"{size_mib} MiB over TCP, security {security}",
        lambda: timed(lambda: queue.enqueue(tensor), reader.dequeue),
        {
            "bare PUSH and PULL": lambda: timed(
                lambda: raw.push.send(bare, copy=False),
                lambda: pickle.loads(raw.pull.recv(copy=False).buffer),
            )
        },
        blocks=15,
        target="at most 1.25 x",
    )


def test_round_trip(connect: Connect, raw: Raw, side_by_side: SideBySide, security: str) -> None:
    """A small message goes there and back between two processes."""
    connected = connect("echo", settings=settings(security))
    queue, (reader,) = connected.queue, connected.readers

    def median_of(operation: Callable[[], object]) -> float:
        times_s = []
        for _ in range(200):
            start_s = time.perf_counter()
            assert operation() == MESSAGE
            times_s.append(time.perf_counter() - start_s)
        return statistics.median(times_s)

    def ours() -> object:
        queue.enqueue(MESSAGE)
        return reader.dequeue()

    def bare() -> object:
        raw.push.send(pickle.dumps(MESSAGE, protocol=5), copy=False)
        return pickle.loads(raw.pull.recv(copy=False).buffer)

    side_by_side(
        f"130 bytes over TCP and back, security {security}",
        lambda: median_of(ours),
        {"bare PUSH and PULL": lambda: median_of(bare)},
        blocks=25,
        target="at most 1.5 x",
    )
