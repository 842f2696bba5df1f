"""Large tensors to one, two and four readers, beside one plain memcpy of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from bench.peer import checksum_of
from shmcast import DEFAULT_OOB_THRESHOLD_BYTES
from shmcast.pickler import Pickler

if TYPE_CHECKING:
    from bench.conftest import Connect, Connected, SideBySide

MIB = 1 << 20
PAGE_BYTES = 4096


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The memcpy beside it runs in one thread, as the queue's does."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n_readers: f"{n_readers}_readers")
def connected(connect: Connect, request: pytest.FixtureRequest) -> Connected:
    """A queue to so many readers, which touch every page of what comes, drop it, and answer."""
    return connect("touch", n_readers=request.param, settings={})


class Source:
    """A tensor that is another one for each message, in every page."""

    def __init__(self, size_mib: int) -> None:
        self.tensor = torch.ones(size_mib * MIB // 2, dtype=torch.bfloat16)
        self._one_of_each_page = self.tensor.view(torch.int64)[:: PAGE_BYTES // 8]

    def change(self) -> int:
        """Change every page; the checksum of what there is now."""
        self._one_of_each_page += 1
        return checksum_of([self.tensor])


def answers(connected: Connected, checksum: int) -> tuple[int, int]:
    """When the last reader had the tensor and when it had touched it; all have the right bytes."""
    times_ns = [reader.dequeue() for reader in connected.readers]
    connected.queue.enqueue("check")
    assert [checksum] * len(times_ns) == [reader.dequeue() for reader in connected.readers]
    return max(came for came, _ in times_ns), max(touched for _, touched in times_ns)


def median_s(operation: Callable[[], int], count: int) -> float:
    """The median of what an operation says it took in ns."""
    return statistics.median(operation() for _ in range(count)) / 1e9


def n_readers_text(connected: Connected) -> str:
    """Such as "to 2 readers"."""
    n_readers = len(connected.readers)
    return f"to {n_readers} reader{'s' if n_readers > 1 else ''}"


@pytest.mark.parametrize("size_mib", [1, 8, 16, 60, 240])
def test_tensor(connected: Connected, side_by_side: SideBySide, size_mib: int) -> None:
    """A bfloat16 tensor goes out, until the last reader has read a byte of every page."""
    source = Source(size_mib)
    tensor = source.tensor
    warm = tensor.clone()
    count = max(1, 30 // size_mib)

    def broadcast() -> int:
        checksum = source.change()
        start_ns = time.perf_counter_ns()
        connected.queue.enqueue(tensor)
        return answers(connected, checksum)[1] - start_ns

    def with_pickler(pickler: Pickler) -> Callable[[], float]:
        def block() -> float:
            connected.queue._pickler = pickler
            return median_s(broadcast, count)

        return block

    def memcpy() -> int:
        source.change()
        start_ns = time.perf_counter_ns()
        warm.copy_(tensor)
        return time.perf_counter_ns() - start_ns

    side_by_side(
        f"{size_mib:3d} MiB {n_readers_text(connected)}",
        with_pickler(connected.queue._pickler),
        {
            "one warm memcpy": lambda: median_s(memcpy, count),
            "torch's copying reduction": with_pickler(
                Pickler(
                    DEFAULT_OOB_THRESHOLD_BYTES,
                    reduce_exact_tensor=lambda tensor: tensor.__reduce_ex__(5),
                )
            ),
        },
        blocks=11 if size_mib < 240 else 5,
        target="at most 1.5 x one warm memcpy" if size_mib == 60 else "",
    )
    assert connected.queue.stats().fallbacks == 0


@pytest.mark.parametrize("size_mib", [1, 16, 60, 240])
def test_empty(connected: Connected, side_by_side: SideBySide, size_mib: int) -> None:
    """`empty` and `enqueue`, without the filling between, until the last reader has the tensor."""
    source = Source(size_mib)
    warm = source.tensor.clone()
    small = torch.ones(1)
    queue, count = connected.queue, 5

    def broadcast() -> int:
        checksum = source.change()
        start_ns = time.perf_counter_ns()
        tensor = queue.empty(source.tensor.shape, source.tensor.dtype)
        taken_ns = time.perf_counter_ns() - start_ns
        tensor.copy_(source.tensor)
        start_ns = time.perf_counter_ns()
        queue.enqueue(tensor)
        return taken_ns + answers(connected, checksum)[0] - start_ns

    def small_message() -> int:
        warm.copy_(source.tensor)  # leaves the same caches behind as the filling does
        start_ns = time.perf_counter_ns()
        queue.enqueue(small)
        return answers(connected, checksum_of([small]))[0] - start_ns

    side_by_side(
        f"empty of {size_mib:3d} MiB {n_readers_text(connected)}",
        lambda: median_s(broadcast, count),
        {"a small tensor after a copy as large": lambda: median_s(small_message, count)},
        blocks=11 if size_mib < 240 else 5,
        target="at most 100 µs" if size_mib == 60 else "",
    )
    assert queue.stats().fallbacks == 0
