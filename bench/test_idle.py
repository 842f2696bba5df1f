"""What an end that waits costs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from bench.conftest import Connect, Share


@pytest.mark.parametrize(("end", "n_unread"), [("reader", 0), ("writer", 2)])
def test_idle(connect: Connect, cpu_share: Share, end: str, n_unread: int) -> None:
    """A reader without a message, or a writer whose ring is full, sleeps."""
    connected = connect("echo", settings={"n_chunks": 1})
    (peer,), (answers,) = connected.peers, connected.readers
    for number in range(n_unread):
        connected.queue.enqueue(number)  # sent back into a ring of one, which nobody reads
    time.sleep(0.2)
    cpu_share(
        f"a {end} that waits",
        peer.process.pid,
        blocks=4,
        block_s=0.5,
        target="at most 1 % of a core",
    )
    assert list(range(n_unread)) == [answers.dequeue(10.0) for _ in range(n_unread)]
