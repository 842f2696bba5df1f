"""Large tensors with the reducer, with torch's own copying reduction, and one plain memcpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from shmcast import DEFAULT_OOB_THRESHOLD_BYTES
from shmcast.pickler import Pickler

if TYPE_CHECKING:
    from bench.conftest import Connect, Connected, SideBySide

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The memcpy beside it runs in one thread, as the queue's does."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module", params=[1, 2], ids=["one_reader", "two_readers"])
def connected(connect: Connect, request: pytest.FixtureRequest) -> Connected:
    """A queue to so many readers, which touch every page of what comes, drop it, and answer."""
    return connect("touch", n_readers=request.param, settings={})


def _median_s(operation: Callable[[], object], count: int) -> float:
    times_s = []
    for _ in range(count):
        start_s = time.perf_counter()
        operation()
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


@pytest.mark.parametrize("size_mib", [1, 4, 8, 15, 30, 60, 240])
def test_tensor(connected: Connected, side_by_side: SideBySide, size_mib: int) -> None:
    """A bfloat16 tensor goes out, and every reader has touched it and answered."""
    queue, readers = connected.queue, connected.readers
    tensor = torch.ones(size_mib * MIB // 2, dtype=torch.bfloat16)
    warm = tensor.clone()
    count = max(1, 15 // size_mib)

    def broadcast() -> None:
        queue.enqueue(tensor)
        for reader in readers:
            assert tensor.nbytes == reader.dequeue()

    def with_pickler(pickler: Pickler) -> Callable[[], float]:
        def block() -> float:
            queue._pickler = pickler
            return _median_s(broadcast, count)

        return block

    side_by_side(
        f"{size_mib:3d} MiB to {len(readers)} reader{'s' if len(readers) > 1 else ''}",
        with_pickler(Pickler(DEFAULT_OOB_THRESHOLD_BYTES)),
        {
            "torch's copying reduction": with_pickler(
                Pickler(
                    DEFAULT_OOB_THRESHOLD_BYTES,
                    reduce_exact_tensor=lambda tensor: tensor.__reduce_ex__(5),
                )
            ),
            "one warm memcpy": lambda: _median_s(lambda: warm.copy_(tensor), count),
        },
        blocks=15 if size_mib < 60 else 7,
    )
