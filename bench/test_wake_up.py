"""
A hand-over to a process that sleeps, by the queue and by a bare futex.

A time is from just before the call that sends to just after the call that receives, on the clock
that all processes share, there and back added. Each side pauses before it sends, so that the other
one sleeps. The bare one goes through ctypes, which adds a µs or two on each side; the queue's
includes pickle and its `dequeue` in Python.

The two sides are pinned, because where the scheduler puts them changes a bare hand-over threefold.
On two CPUs it wakes a CPU. On one the sleeper runs when the sender has gone to sleep in its turn,
so that what the sender does until then counts too: there the ratio is no measure of the wake-up.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench.conftest import Connect, Pin, SideBySide, Start

PAUSE_S = 300e-6
BLOCK = range(50)


def _peer_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peer", Path(__file__).with_name("peer.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("n_cpus", "target"), [(2, "at most 1.5 x"), (1, "")])
def test_wake_up(
    connect: Connect,
    start_peer: Start,
    side_by_side: SideBySide,
    pin: Pin,
    n_cpus: int,
    target: str,
) -> None:
    """A time is handed to a sleeping process, which hands one back to this sleeping one."""
    connected = connect("answer_late", settings={"spin_us": 0}, pause_s=PAUSE_S)
    queue, (reader,) = connected.queue, connected.readers
    descriptor = os.memfd_create("bench-futex")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    bare_peer = start_peer(
        "answer_late_bare", (descriptor,), descriptor=descriptor, pause_s=PAUSE_S
    )
    bare = _peer_module().BareFutex(descriptor, 0)
    os.close(descriptor)
    pin(*connected.peers, bare_peer, n_cpus=n_cpus)

    def by_queue() -> float:
        times_ns = []
        for _ in BLOCK:
            time.sleep(PAUSE_S)
            queue.enqueue(time.perf_counter_ns())
            there_ns, sent_ns = reader.dequeue()
            times_ns.append(there_ns + time.perf_counter_ns() - sent_ns)
        return statistics.median(times_ns) / 1e9

    def by_bare_futex() -> float:
        times_ns = []
        for _ in BLOCK:
            time.sleep(PAUSE_S)
            bare.send(0)
            back_ns, there_ns = bare.receive()
            times_ns.append(there_ns + back_ns)
        return statistics.median(times_ns) / 1e9

    side_by_side(
        f"wake-up there and back on {n_cpus} CPU{'s' if n_cpus > 1 else ''}",
        by_queue,
        {"a bare futex (ctypes)": by_bare_futex},
        blocks=60,
        target=target,
    )
