"""A small message there and back against its floor, which is pickle."""

from __future__ import annotations

import pickle
import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.conftest import Connect, Pin, SideBySide

MESSAGE = {
    "step": 1,
    "ids": [1, 2, 3, 4, 5],
    "req": "abcdef-1234",
    "temperature": 0.7,
    "flags": (True, False),
    "args": {"k": 1, "p": 2.5},
}
BLOCK = range(500)


def test_round_trip(connect: Connect, pin: Pin, side_by_side: SideBySide) -> None:
    """A small message goes there and back between two processes, each on its CPU."""
    connected = connect("echo", settings={})
    pin(*connected.peers)
    queue, (reader,) = connected.queue, connected.readers

    def round_trips() -> float:
        times_ns = []
        for _ in BLOCK:
            start_ns = time.perf_counter_ns()
            queue.enqueue(MESSAGE)
            reader.dequeue()
            times_ns.append(time.perf_counter_ns() - start_ns)
        return statistics.median(times_ns) / 1e9

    def pickle_twice() -> float:
        times_ns = []
        for _ in BLOCK:
            start_ns = time.perf_counter_ns()
            pickle.loads(pickle.dumps(MESSAGE, protocol=5))
            pickle.loads(pickle.dumps(MESSAGE, protocol=5))
            times_ns.append(time.perf_counter_ns() - start_ns)
        return statistics.median(times_ns) / 1e9

    side_by_side(
        f"{len(pickle.dumps(MESSAGE, protocol=5))} bytes there and back",
        round_trips,
        {"two pickle.dumps and pickle.loads": pickle_twice},
        blocks=120,
        target="at most 1.6 x",
    )
    last = {**MESSAGE, "step": 2}
    queue.enqueue(last)
    assert last == reader.dequeue()
