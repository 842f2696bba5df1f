"""A message with one small tensor, there in one process, beside the same message without it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shmcast import MessageQueue, QueueConfig

if TYPE_CHECKING:
    from bench.conftest import SideBySide

BLOCK = range(2000)


def test_small_tensor(side_by_side: SideBySide) -> None:
    """Both ends are in one thread, so that nothing is waited for: this is pickling and loading."""
    with (
        MessageQueue(QueueConfig()) as queue,
        MessageQueue.create_from_handle(queue.export_handle(), 0) as reader,
    ):
        queue.wait_until_ready(60)

        def there(message: object) -> Callable[[], float]:
            def block() -> float:
                times_ns = []
                for _ in BLOCK:
                    start_ns = time.perf_counter_ns()
                    queue.enqueue(message)
                    reader.dequeue()
                    times_ns.append(time.perf_counter_ns() - start_ns)
                return statistics.median(times_ns) / 1e9

            return block

        side_by_side(
            "a message with one small tensor",
            there({"step": 1, "ids": torch.arange(16)}),
            {"the same without it": there({"step": 1, "ids": None})},
            blocks=21,
            target="12 µs",
        )
