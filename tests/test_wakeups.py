"""Lost wake-ups: both ends sleep until they are woken, and nothing looks again meanwhile."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from conftest import PATIENCE_S, StartChild

import shmcast.waiting
from shmcast import Handle, MessageQueue, QueueConfig

pytestmark = pytest.mark.proof

#: Up to so many steps of an empty loop before each call, some 50 µs: the two ends have to meet at
#: every point of what they do.
MOST_STEPS = 2000

RecordProperty = Callable[[str, object], None]


@contextlib.contextmanager
def one_slice() -> Iterator[None]:
    """The ends of this process sleep in slices that are longer than the test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_FIRST_PROBE_S", "_SHORT_SLICE_S", "_LONG_SLICE_S"):
            patch.setattr(shmcast.waiting, name, 1000 * PATIENCE_S)
        yield


def call_each(count: int, seed: int, call: Callable[[int], object]) -> None:
    """Call it with every number, and see that no sleep ends by itself."""
    chance = random.Random(seed)
    for number in range(count):
        for _ in range(chance.randrange(MOST_STEPS)):
            pass
        start_s = time.monotonic()
        call(number)
        # Who is not woken sleeps until the timeout, even if the call succeeds then.
        assert time.monotonic() - start_s < PATIENCE_S, f"number {number}"


def read(pipe: Connection, handle: Handle, count: int, seed: int) -> None:
    """A reader of so many numbers; sends how often it has waited."""
    with one_slice(), MessageQueue.create_from_handle(handle, 0) as reader:

        def take(number: int) -> None:
            assert number == reader.dequeue(PATIENCE_S)

        call_each(count, seed, take)
        pipe.send(reader.stats().waits)


def hand_over(count: int, start_child: StartChild, record_property: RecordProperty) -> None:
    """Hand numbers over to a reader in another process, through a ring of one chunk."""
    seed = random.getrandbits(32)
    sys.stdout.write(f"seed {seed}\n")
    with MessageQueue(QueueConfig(n_chunks=1, chunk_bytes=1024, spin_us=0)) as queue:
        child = start_child(read, queue.export_handle(), count, seed + 1)
        queue.wait_until_ready(PATIENCE_S)
        with one_slice():
            call_each(count, seed, lambda number: queue.enqueue(number, PATIENCE_S))
        waits = queue.stats().waits, child.receive()
    record_property("seed", seed)
    record_property("waits", waits)
    assert min(waits) > count // 100, "hardly any hand-over was slept for"


def test_no_wake_up_is_lost(start_child: StartChild, record_property: RecordProperty) -> None:
    """In 100,000 hand-overs between ends that sleep, nobody sleeps on."""
    hand_over(100_000, start_child, record_property)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_wake_up_of_millions_is_lost(
    start_child: StartChild, record_property: RecordProperty
) -> None:
    """In two million hand-overs between ends that sleep, nobody sleeps on."""
    hand_over(2_000_000, start_child, record_property)
