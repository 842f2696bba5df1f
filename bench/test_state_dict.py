"""The weights of a model: many tensors, small and large, in one message."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from bench.peer import checksum_of

if TYPE_CHECKING:
    from bench.conftest import Connect, SideBySide


@pytest.mark.parametrize("n_readers", [1, 2])
def test_state_dict(connect: Connect, side_by_side: SideBySide, n_readers: int) -> None:
    """The state dict of torch's own transformer, until every reader has touched every page."""
    connected = connect("touch", n_readers=n_readers, settings={})
    weights = {
        name: part.detach()
        for name, part in torch.nn.Transformer(batch_first=True).state_dict().items()
    }
    warm = {name: part.clone() for name, part in weights.items()}
    checksum = checksum_of(weights.values())
    size_mib = sum(part.nbytes for part in weights.values()) >> 20

    def broadcast() -> float:
        start_ns = time.perf_counter_ns()
        connected.queue.enqueue(weights)
        touched_ns = max(reader.dequeue()[1] for reader in connected.readers)
        connected.queue.enqueue("check")
        for reader in connected.readers:
            assert checksum == reader.dequeue()
        return (touched_ns - start_ns) / 1e9

    def memcpy() -> float:
        start_ns = time.perf_counter_ns()
        for name, part in weights.items():
            warm[name].copy_(part)
        return (time.perf_counter_ns() - start_ns) / 1e9

    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    side_by_side(
        f"{len(weights)} tensors, {size_mib} MiB, to {n_readers} reader{'s'[: n_readers - 1]}",
        broadcast,
        {"one warm memcpy of each": memcpy},
        blocks=9,
    )
    torch.set_num_threads(n_threads)
    assert connected.queue.stats().fallbacks == 0
