"""Where it begins to pay that a buffer leaves the stream."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from bench.conftest import Connect, Connected, SideBySide

KIB = 1 << 10


@pytest.fixture(scope="module")
def in_band(connect: Connect) -> Connected:
    """A queue whose buffers all stay in the stream."""
    return connect("touch", settings={"oob_threshold_bytes": "1 GiB"})


@pytest.fixture(scope="module")
def out_of_band(connect: Connect) -> Connected:
    """A queue whose buffers all leave it."""
    return connect("touch", settings={"oob_threshold_bytes": 0})


@pytest.mark.parametrize("size_kib", [4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384])
def test_threshold(
    in_band: Connected, out_of_band: Connected, side_by_side: SideBySide, size_kib: int
) -> None:
    """A tensor out of band against the same one in the stream."""
    tensor = torch.ones(size_kib * KIB, dtype=torch.uint8)
    count = max(5, min(200, 16384 // size_kib))

    def until_touched_s(connected: Connected) -> float:
        (reader,) = connected.readers
        times_ns = []
        for number in range(count):
            tensor[0] = number
            start_ns = time.perf_counter_ns()
            connected.queue.enqueue(tensor)
            _, touched_ns = reader.dequeue()
            times_ns.append(touched_ns - start_ns)
            connected.queue.enqueue("check")
            reader.dequeue()
        return statistics.median(times_ns) / 1e9

    side_by_side(
        f"{size_kib:5d} KiB out of band",
        lambda: until_touched_s(out_of_band),
        {"in the stream": lambda: until_touched_s(in_band)},
        blocks=21,
    )
