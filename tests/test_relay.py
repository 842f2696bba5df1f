"""The relay: of the remote readers on one host one receives each message, and passes it on."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from conftest import PATIENCE_S, StartChild
from test_interrupts import n_descriptors
from test_remote import SECURITIES, BehindProxy, behind_proxy, new_queue, wait_for  # noqa: F401

from shmcast import (
    Handle,
    MessageQueue,
    MessageReader,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    WriterLost,
)
from shmcast.attachment import Attachment
from shmcast.relay import Relay, Relayed, RemoteAttachment, relay_handle
from shmcast.remote import RingSizes
from shmcast.remote.loop import Link
from shmcast.remote.reader_link import ReaderLink

MIB = 1 << 20


def relays_to(queue: MessageQueue) -> dict[int, int]:
    """Which rank relays to which, as the writer sees it."""
    assert queue._writer.remote is not None
    peers = dict(queue._writer.remote.holders)
    connections = {rank: peer.connection for rank, peer in peers.items()}
    return {
        rank: connection.via.rank
        for rank, connection in connections.items()
        if connection is not None and connection.via is not None
    }


def is_relay(reader: MessageReader) -> bool:
    return isinstance(reader._source, RemoteAttachment) and reader._source.remote.is_relay


def is_joined(reader: MessageReader) -> bool:
    """Whether it takes from a relay."""
    with contextlib.suppress(QueueEmpty):
        reader.dequeue(0)  # it looks for one when it waits
    source = reader._source
    return isinstance(source, RemoteAttachment) and source.ring.relayed is not None


@pytest.fixture
def host() -> Iterator[Callable[..., tuple[MessageQueue, list[MessageReader]]]]:
    """A queue whose readers are all on this host; rank 0 relays to the others."""
    with contextlib.ExitStack() as ends:

        def make(n_readers: int = 2, **settings: Any) -> tuple[MessageQueue, list[MessageReader]]:
            queue = ends.enter_context(new_queue(n_readers, **settings))
            handle = queue.export_handle()
            readers = [ends.enter_context(MessageReader(handle, rank)) for rank in range(n_readers)]
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
            queue.wait_until_ready(PATIENCE_S)
            wait_for(lambda: len(relays_to(queue)) == n_readers - 1, "not all are relayed to")
            return queue, readers

        yield make


Host = Callable[..., tuple[MessageQueue, list[MessageReader]]]


def message_of(number: int, size: int = 100_000) -> list[Any]:
    """What message `number` holds."""
    values = torch.arange(number, number + size, dtype=torch.int64)
    return [number, bytes([number % 256]) * 1000, values.to(torch.int16)]


def assert_is(number: int, message: list[Any], size: int = 100_000) -> None:
    expected = message_of(number, size)
    assert expected[:2] == message[:2]
    assert torch.equal(expected[2], message[2])


# --- once per host --------------------------------------------------------------------------------


@pytest.mark.parametrize("security", SECURITIES)
def test_once_per_host(behind_proxy: BehindProxy, security: str) -> None:  # noqa: F811  # the fixture
    """Whatever the number of readers there, a host receives what is enqueued once."""
    with contextlib.ExitStack() as ends:
        queue = ends.enter_context(new_queue(3, security=security))
        readers, proxies = [], []
        for rank in range(3):
            handle, proxy = behind_proxy(queue.export_handle())
            readers.append(ends.enter_context(MessageReader(handle, rank)))
            proxies.append(proxy)
            readers[-1].wait_until_ready(PATIENCE_S)
        wait_for(lambda: {1: 0, 2: 0} == relays_to(queue), "not all are relayed to")
        for number in range(20):
            queue.enqueue(torch.full((MIB,), number, dtype=torch.uint8))
            for reader in readers:
                assert bool((reader.dequeue(PATIENCE_S) == number).all())
        on_the_wire = [proxy.n_bytes for proxy in proxies]
        assert 20 * MIB < on_the_wire[0] < 21 * MIB
        assert max(on_the_wire[1:]) < 100_000


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"oob_threshold_bytes": 1000},
        {"arena_bytes": 0},  # through memory files
        {"arena_bytes": MIB},  # through them when the readers keep much
        {"n_chunks": 1},
        {"chunk_bytes": 4096},
    ],
    ids=str,
)
def test_ways_of_a_message(host: Host, settings: dict[str, Any]) -> None:
    """Small or large, in a chunk, a block or a file: what is relayed is whole and in order."""
    queue, readers = host(3, **settings)
    kept = []
    for number in range(30):
        size = random.Random(number).choice((0, 10, 2000, 100_000, 300_000))
        queue.enqueue(message_of(number, size), PATIENCE_S)
        for reader in readers:
            message = reader.dequeue(PATIENCE_S)
            assert_is(number, message, size)
            kept.append((number, message, size))
    queue.close()
    for reader in readers:
        with pytest.raises(QueueClosed):
            reader.dequeue(PATIENCE_S)
        reader.close()
    for number, message, size in kept:
        assert_is(number, message, size)


def test_a_first_reader_that_comes_late_gets_all(host: Host) -> None:
    """A rank that attaches for the first time gets what was published before, then the rest."""
    with contextlib.ExitStack() as ends:
        queue = ends.enter_context(new_queue(2))
        handle = queue.export_handle()
        relay = ends.enter_context(MessageReader(handle, 0))
        relay.wait_until_ready(PATIENCE_S)
        for number in range(5):
            queue.enqueue(message_of(number))
            assert_is(number, relay.dequeue(PATIENCE_S))
        late = ends.enter_context(MessageReader(handle, 1))
        late.wait_until_ready(PATIENCE_S)
        wait_for(lambda: {1: 0} == relays_to(queue), "it is not relayed to")
        queue.enqueue(message_of(5))
        for number in range(6):
            assert_is(number, late.dequeue(PATIENCE_S))
        assert_is(5, relay.dequeue(PATIENCE_S))
        assert (0, 0) == queue_lag(queue)


def queue_lag(queue: MessageQueue) -> tuple[int, ...]:
    wait_for(lambda: not any(queue.stats().lag), "something was not acknowledged")
    return queue.stats().lag


# --- whose memory is it ---------------------------------------------------------------------------


def test_tensors_are_the_reader_s_own(host: Host) -> None:
    """What one reader writes, another one of its host does not see, the relay's neither."""
    queue, readers = host(3)
    queue.enqueue(torch.zeros(MIB, dtype=torch.uint8))
    tensors = [reader.dequeue(PATIENCE_S) for reader in readers]
    for value, tensor in enumerate(tensors, 1):
        tensor.add_(value)
    queue.enqueue(torch.zeros(MIB, dtype=torch.uint8))
    for reader in readers:
        assert 0 == int(reader.dequeue(PATIENCE_S).max())
    for reader in readers:
        reader.close()
    assert [{1}, {2}, {3}] == [set(tensor.unique().tolist()) for tensor in tensors]


# --- who leaves or dies ---------------------------------------------------------------------------


def test_the_relay_leaves(host: Host) -> None:
    """When the relay leaves, another one takes over, and nothing is lost."""
    queue, readers = host(3)
    for number in range(3):
        queue.enqueue(message_of(number))
    assert_is(0, readers[1].dequeue(PATIENCE_S))
    readers[0].close()
    for number in range(3, 6):
        queue.enqueue(message_of(number))
    for number in range(1, 6):
        assert_is(number, readers[1].dequeue(PATIENCE_S))
    for number in range(6):
        assert_is(number, readers[2].dequeue(PATIENCE_S))
    for number in range(6, 100):
        queue.enqueue(message_of(number, 10))
        for reader in readers[1:]:
            assert_is(number, reader.dequeue(PATIENCE_S), 10)
        if len(relays_to(queue)) == 1 and any(map(is_relay, readers[1:])):
            break
        for reader in readers[1:]:
            with pytest.raises(QueueEmpty):
                reader.dequeue(0.05)
    else:
        pytest.fail("nobody took over")


def receive(pipe: Connection, handle: Handle, rank: int) -> None:
    """A reader that says what it gets, until the end."""
    with MessageReader(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        try:
            for number, message in enumerate(reader, reader._source.ring.next_sequence):
                assert_is(number, message, len(message[2]))
                pipe.send(number)
        except WriterLost as error:
            pipe.send(str(error))
        else:
            pipe.send("closed")


def test_the_relay_is_killed(start_child: StartChild) -> None:
    """The others get every message over the relay's death, and the writer hears who it was."""
    with new_queue(3, n_chunks=8) as queue:
        handle = queue.export_handle()
        children = []
        for rank in range(3):
            children.append(start_child(receive, handle, rank))
            wait_for(lambda: not is_missing(queue, rank), "it does not attach")  # noqa: B023
            wait_for(lambda: has_relay(queue), "nobody relays")
        wait_for(lambda: {1: 0, 2: 0} == relays_to(queue), "not all are relayed to")
        lost_ranks: list[int] = []
        kill_at = random.randrange(5, 20)
        for number in range(40):
            if number == kill_at:
                os.kill(children[0].pid, signal.SIGKILL)
            try:
                queue.enqueue(message_of(number), PATIENCE_S)
            except ReaderLost as lost:
                lost_ranks += lost.ranks
                queue.enqueue(message_of(number), PATIENCE_S)
        for child in children[1:]:
            assert [*range(40)] == [child.receive() for _ in range(40)]
        while not lost_ranks:
            with contextlib.suppress(QueueFull):
                try:
                    queue.enqueue(message_of(40, 10), 1)
                except ReaderLost as lost:
                    lost_ranks += lost.ranks
        assert [0] == lost_ranks
        assert not children[0].process.is_alive()


def has_relay(queue: MessageQueue) -> bool:
    """Whether a reader of this host has become the relay, which it does in its first wait."""
    name = relay_handle(queue.export_handle()).local_address
    return f"@{name}\n" in Path("/proc/net/unix").read_text()


def is_missing(queue: MessageQueue, rank: int) -> bool:
    """Whether the rank is missing after the writer has looked."""
    with contextlib.suppress(QueueNotReady):
        queue.wait_until_ready(0.01)
    return rank in queue._writer.roster.missing_ranks


def test_the_writer_is_killed(start_child: StartChild) -> None:
    """Who is relayed to gets what was sent, and then hears that the writer has died."""
    writer = start_child(write_and_stop)
    handle = writer.receive()
    with MessageReader(handle, 0) as relay, MessageReader(handle, 1) as reader:
        for one in (relay, reader):
            one.wait_until_ready(PATIENCE_S)
        assert is_relay(relay)
        wait_for(lambda: is_joined(reader), "it does not find the relay")
        writer.pipe.send("write")
        assert_is(0, reader.dequeue(PATIENCE_S))
        # It passes a message on before it takes it itself.
        wait_for(lambda: relay.stats().lag == 3, "not all came")
        os.kill(writer.pid, signal.SIGKILL)
        for number in (1, 2):
            assert_is(number, reader.dequeue(PATIENCE_S))
        with pytest.raises(WriterLost):
            reader.dequeue(PATIENCE_S)


def write_and_stop(pipe: Connection) -> None:
    """A writer that says no more after three messages."""
    with new_queue(2) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        pipe.recv()
        for number in range(3):
            queue.enqueue(message_of(number))
        signal.pause()


# --- slow readers ---------------------------------------------------------------------------------


def test_backpressure(host: Host) -> None:
    """A reader that takes nothing holds the writer up, and is named, wherever its messages are."""
    queue, readers = host(2, n_chunks=3)
    for number in range(3):
        queue.enqueue(message_of(number))
        assert_is(number, readers[0].dequeue(PATIENCE_S))
    with pytest.raises(QueueFull) as full:
        queue.enqueue(message_of(3), 0.2)
    assert (1,) == full.value.ranks
    for number in range(3):
        assert_is(number, readers[1].dequeue(PATIENCE_S))
    queue.enqueue(message_of(3), PATIENCE_S)
    for reader in readers:
        assert_is(3, reader.dequeue(PATIENCE_S))


def test_who_is_evicted_resumes(host: Host) -> None:
    """Who has no place in the relay's ring any more gets its messages from the writer."""
    queue, (relay, reader) = host(2)
    queue.enqueue(message_of(0))
    assert_is(0, reader.dequeue(PATIENCE_S))
    assert isinstance(relay._source, RemoteAttachment)
    ring = relay._source.remote.link._relay
    assert isinstance(ring, Relay)
    with ring._lock:
        ring._writer.roster.evict(1)
    for number in range(1, 5):
        queue.enqueue(message_of(number))
        assert_is(number, reader.dequeue(PATIENCE_S))
    for number in range(5):
        assert_is(number, relay.dequeue(PATIENCE_S))


def test_a_ring_that_is_ahead() -> None:
    """What is in the ring waits until what comes before it has come from the writer."""
    with new_queue(2) as queue:
        handle = relay_handle(queue.export_handle())
        sizes = RingSizes(n_chunks=4, chunk_bytes=4096, arena_bytes=0)
        with contextlib.closing(Relay(handle, sizes, 7)) as ring:
            ring.pass_on(3, b"nobody is there", [])
            attachment = Attachment(handle.local_address, handle.token, 1)
            with contextlib.closing(attachment):
                while not attachment.step():
                    ring.tend(5)
                relayed = Relayed(attachment)
                assert 7 == relayed.session
                for number in (5, 6):
                    ring.pass_on(number, f"stream {number}".encode(), [])
                for number, content in ((4, None), (5, b"stream 5"), (6, b"stream 6"), (7, None)):
                    taken = relayed.take(number)
                    assert content == (taken and taken.content)
                    assert (number == 4) == relayed.is_ahead
                assert not relayed.is_over()
                assert 0 == relayed.lag
            ring.pass_on(7, b"nobody is there", [])


def test_a_stopped_relay_that_is_lost(
    start_child: StartChild,
    behind_proxy: BehindProxy,  # noqa: F811  # the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the writer gives up a relay that is stopped, the others get their messages again."""
    monkeypatch.setattr(Link, "timing", attrs.evolve(Link.timing, resume_s=1.0))
    with new_queue(2) as queue:
        handle, proxy = behind_proxy(queue.export_handle())
        relay = start_child(receive, handle, 0)
        wait_for(lambda: has_relay(queue), "nobody relays")
        with MessageReader(queue.export_handle(), 1) as reader:
            reader.wait_until_ready(PATIENCE_S)
            wait_for(lambda: is_joined(reader), "it does not find the relay")
            wait_for(lambda: {1: 0} == relays_to(queue), "it is not relayed to")
            os.kill(relay.pid, signal.SIGSTOP)
            proxy.cut()
            lost: list[int] = []
            number = 0
            while not lost or number < 10:
                try:
                    queue.enqueue(message_of(number), PATIENCE_S)
                except ReaderLost as error:
                    lost += error.ranks
                    continue
                assert_is(number, reader.dequeue(PATIENCE_S))
                number += 1
            assert [0] == lost


def test_a_relay_that_closes_just_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever its reader closes, the relay's ring is closed too, or others would wait for it."""
    tend = ReaderLink._tend_relay

    def tend_and_close(self: ReaderLink) -> None:
        tend(self)
        if self._ring.is_closing:
            reader.close()

    with new_queue(1, security="none") as queue:
        reader = MessageReader(queue.export_handle(), 0)
        reader.wait_until_ready(PATIENCE_S)
        assert isinstance(reader._source, RemoteAttachment)
        link = reader._source.remote.link
        wait_for(lambda: link._relay is not None, "it does not become the relay")
        ring = link._relay
        assert isinstance(ring, Relay)
        monkeypatch.setattr(ReaderLink, "_tend_relay", tend_and_close)
        queue.close()
        wait_for(lambda: link.is_done, "it does not end")
        assert ring.closed


# --- waits ----------------------------------------------------------------------------------------


def test_waits_end(host: Host) -> None:
    """A wait for the relay's next message ends with the writer's close, or this end's."""
    for close_own in (False, True):
        queue, (_, reader) = host(2)
        closer = threading.Timer(0.3, (reader if close_own else queue).close)
        closer.start()
        with pytest.raises(QueueClosed):
            reader.dequeue(PATIENCE_S)
        closer.join()


# --- strangers ------------------------------------------------------------------------------------


def test_a_silent_squatter(host: Host) -> None:
    """Who sits on the name of the relay and says nothing keeps nobody from its messages."""
    with new_queue(1) as queue, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as squatter:
        handle = queue.export_handle()
        squatter.bind("\0" + relay_handle(handle).local_address)
        squatter.listen()
        with MessageReader(handle, 0) as reader:
            reader.wait_until_ready(PATIENCE_S)
            queue.enqueue(message_of(0))
            assert_is(0, reader.dequeue(PATIENCE_S))
            assert not is_relay(reader)
            assert isinstance(reader._source, RemoteAttachment)
            assert reader._source.remote.ring.relayed is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_s_squatter() -> None:
    """A ring on the relay's name that is another user's is not taken from."""
    with new_queue(1) as queue:
        handle = queue.export_handle()
        name = relay_handle(handle).local_address
        program = (
            "import os, socket; os.setuid(65534); one = socket.socket(socket.AF_UNIX, "
            f"socket.SOCK_SEQPACKET); one.bind('\\0{name}'); one.listen(); "
            "print('here', flush=True); input()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as squatter:
            assert squatter.stdout is not None
            assert b"here\n" == squatter.stdout.readline()
            with MessageReader(handle, 0) as reader:
                reader.wait_until_ready(PATIENCE_S)
                queue.enqueue(message_of(0))
                assert_is(0, reader.dequeue(PATIENCE_S))
                assert isinstance(reader._source, RemoteAttachment)
                assert reader._source.remote.ring.relayed is None
            squatter.communicate(b"\n", PATIENCE_S)


# --- the end --------------------------------------------------------------------------------------


def test_nothing_is_left() -> None:
    """After the ends have closed no descriptor, thread or name of the relay is left."""

    def use(n_readers: int) -> str:
        with contextlib.ExitStack() as ends:
            queue = ends.enter_context(new_queue(n_readers))
            handle = queue.export_handle()
            readers = [ends.enter_context(MessageReader(handle, rank)) for rank in range(n_readers)]
            queue.enqueue(message_of(0))
            for reader in readers:
                assert_is(0, reader.dequeue(PATIENCE_S))
        return relay_handle(handle).local_address

    def is_over(name: str, most_descriptors: float) -> bool:
        gc.collect()
        threads = {thread.name for thread in threading.enumerate()}
        has_name = name in Path("/proc/net/unix").read_text()
        has_more = n_descriptors() > most_descriptors
        return not ("shmcast-remote" in threads or has_name or has_more)

    name = use(1)
    wait_for(lambda: is_over(name, math.inf), "something of the first queue is left")
    before = n_descriptors()
    name = use(3)
    wait_for(lambda: is_over(name, before), "something is left")
