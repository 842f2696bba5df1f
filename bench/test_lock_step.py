"""
A small message to every reader and back, over and over, the ends where the scheduler puts them.

That is how an engine drives its workers: each step waits for all answers, and computes a little
before the next one. The pipes beside it carry the same objects, one pipe for each reader.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import statistics
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.conftest import Connect, SideBySide, Start

MESSAGE = bytes(64)
BLOCK = range(500)
MOST_GAP_NS = 50_000


def compute(random_: random.Random) -> None:
    """What a program does between two messages: it keeps its CPU."""
    end_ns = time.perf_counter_ns() + random_.randrange(MOST_GAP_NS)
    while time.perf_counter_ns() < end_ns:
        pass


@pytest.mark.parametrize("is_busy", [False, True], ids=["quiet", "busy"])
@pytest.mark.parametrize("n_readers", [1, 2])
def test_lock_step(
    connect: Connect, start_peer: Start, side_by_side: SideBySide, n_readers: int, is_busy: bool
) -> None:
    """A message goes to each reader and comes back; also beside a busy process for each CPU."""
    connected = connect("echo", n_readers=n_readers, settings={})
    queue, readers = connected.queue, connected.readers
    pipes = []
    for _ in range(n_readers):
        ours, theirs = multiprocessing.Pipe()
        start_peer("echo_by_pipe", (theirs.fileno(),), descriptor=theirs.fileno())
        theirs.close()
        pipes.append(ours)
    busy = [start_peer("be_busy") for _ in os.sched_getaffinity(0)] if is_busy else []
    random_ = random.Random(7)

    def steps(step: Callable[[], None]) -> float:
        times_ns = []
        for _ in BLOCK:
            compute(random_)
            start_ns = time.perf_counter_ns()
            step()
            times_ns.append(time.perf_counter_ns() - start_ns)
        return statistics.median(times_ns) / 1e9

    def by_queue() -> None:
        queue.enqueue(MESSAGE)
        for reader in readers:
            reader.dequeue()

    def by_pipes() -> None:
        for pipe in pipes:
            pipe.send(MESSAGE)
        for pipe in pipes:
            pipe.recv()

    side_by_side(
        f"64 bytes to {n_readers} reader{'s' if n_readers > 1 else ''} and back, "
        f"{'a busy process for each CPU' if is_busy else 'nothing else running'}",
        lambda: steps(by_queue),
        {"multiprocessing.Pipe": lambda: steps(by_pipes)},
        blocks=40,
        target="ahead",
    )
    for peer in busy:
        peer.end()
