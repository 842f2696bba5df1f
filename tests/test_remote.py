"""Remote readers: the contract over TCP, cuts, deaths, wrong peers, and what an address may be."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import pickle
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import zmq
from conftest import (
    PATIENCE_S,
    StartChild,
    count_descriptors,
    wait_for_descriptors,
    wait_for_remote_ends,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import (
    KINDS,
    Plan,
    StartReaders,
    plans,
    run,
    start_processes,  # noqa: F401  # a fixture
    start_threads,
)
from test_interrupts import Interrupt, alarm, interrupted, n_descriptors

from shmcast import (
    AuthenticationError,
    ConfigError,
    Handle,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterFailed,
    WriterLost,
    remote,
)
from shmcast.pickler import checked_loads, rebuild_tensor
from shmcast.relay import RemoteAttachment
from shmcast.remote.frames import ADMITTED, MAGIC, Kind, RingSizes, pack, unpack
from shmcast.remote.loop import Link, Loop, allow
from shmcast.remote.writer_link import State
from shmcast.roster import Roster

BIND = "tcp://127.0.0.1:0"
SECURITIES = ["curve", "none"]


def has_left(queue: MessageQueue, rank: int) -> bool:
    """Whether the writer has heard that the rank's reader left, or has even let it go."""
    assert queue._writer.remote is not None
    return queue._writer.ring.has_left(rank) or rank not in queue._writer.remote.holders


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def new_queue(n_readers: int = 1, **settings: Any) -> MessageQueue:
    """A queue all of whose ranks are remote, if nothing else is said."""
    given = {"local_reader_ranks": (), "bind": BIND, **settings}
    return MessageQueue(QueueConfig(n_readers=n_readers, **given))


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[MessageQueue, list[MessageReader]]]]:
    """A queue with remote ranks and all its readers, attached, in this process."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[MessageQueue, list[MessageReader]]:
            queue = ends.enter_context(new_queue(**settings))
            handle = queue.export_handle()
            readers = [
                ends.enter_context(MessageReader(handle, rank))
                for rank in range(settings.get("n_readers", 1))
            ]
            queue.wait_until_ready(PATIENCE_S)
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
            return queue, readers

        yield make


Connect = Callable[..., tuple[MessageQueue, list[MessageReader]]]


@pytest.fixture
def quick_loss(monkeypatch: pytest.MonkeyPatch) -> float:
    """Who was cut off is waited for only so long, by the ends of this process."""
    monkeypatch.setattr(Link, "timing", attrs.evolve(Link.timing, resume_s=1.0))
    return 1.0


class Proxy:
    """
    A TCP proxy before an endpoint, which can cut all its connections, or hold everything back.

    Args:
        endpoint: where the writer listens.
    """

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.n_cuts = 0
        self.n_bytes = 0  # that came from the writer
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, function: Callable[..., None], *arguments: Any, **flags: bool) -> None:
        thread = threading.Thread(target=function, args=arguments, kwargs=flags, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self._listener.accept()
            except OSError:
                return
            try:
                other = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                one.close()
                continue
            self._ends += [one, other]
            self._pairs.append((one, other))
            self._start(self._pump, one, other)
            self._start(self._pump, other, one, counts=True)

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counts:
                    self.n_bytes += len(data)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self, choice: random.Random | None = None) -> int:
        """Cut every connection, or each with a chance of a half; how many there were."""
        pairs = [pair for pair in self._pairs if choice is None or choice.random() < 0.5]
        self._pairs = [pair for pair in self._pairs if pair not in pairs]
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    # A reset, so that nothing on its way arrives.
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
        self.n_cuts += len(pairs)
        return len(pairs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(PATIENCE_S)
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for end in self._ends:
            end.close()


@pytest.fixture
def behind_proxy() -> Iterator[Callable[[Handle], tuple[Handle, Proxy]]]:
    """The handle through a proxy, and that."""
    proxies: list[Proxy] = []

    def make(handle: Handle) -> tuple[Handle, Proxy]:
        assert handle.endpoint is not None
        proxies.append(Proxy(handle.endpoint))
        return attrs.evolve(handle, endpoint=proxies[-1].endpoint), proxies[-1]

    yield make
    for proxy in proxies:
        proxy.close()


BehindProxy = Callable[[Handle], tuple[Handle, Proxy]]


# --- the contract ---------------------------------------------------------------------------------


@attrs.frozen
class RemotePlan(Plan):
    """A plan some of whose ranks are remote."""

    n_local: int
    security: str

    @property
    def config(self) -> QueueConfig:
        local = tuple(range(min(self.n_local, self.n_readers - 1)))
        return attrs.evolve(
            super().config,
            local_reader_ranks=local,
            bind=BIND,
            security=self.security,
        )


Messages = tuple[tuple[str, int], ...]


@st.composite
def remote_plans(draw: st.DrawFn, most_messages: int) -> RemotePlan:
    """A plan with remote ranks, or with both kinds."""
    plan = draw(plans(most_messages=most_messages))
    security = draw(st.sampled_from(SECURITIES))
    plan = attrs.evolve(plan, messages=allowed(plan.messages, security))
    return RemotePlan(
        **attrs.asdict(plan, recurse=False), n_local=draw(st.integers(0, 2)), security=security
    )


def allowed(messages: Messages, security: str) -> Messages:
    """The kinds and sizes of messages, with bytes for the arrays that are refused without keys."""
    refused = {"array": "bytes", "nested": "strided"} if security == "none" else {}
    return tuple((refused.get(kind, kind), size) for kind, size in messages)


@settings(max_examples=40)
@given(remote_plans(most_messages=40))
def test_contract_with_threads(plan: RemotePlan) -> None:
    """With remote readers in threads: every message once, whole, in order, then the end."""
    run(plan, start_threads)


@settings(max_examples=40)
@given(plan=remote_plans(most_messages=60))
def test_contract_with_processes(start_processes: StartReaders, plan: RemotePlan) -> None:  # noqa: F811  # the fixture
    """With remote readers in processes: every message once, whole, in order, then the end."""
    run(plan, start_processes)


# --- cuts -----------------------------------------------------------------------------------------


def cut_now_and_then(seed: int, proxies: list[Proxy], is_over: threading.Event) -> None:
    """Cut a connection at random moments; now and then a handshake has the time that it needs."""
    choice = random.Random(seed)
    pauses_s = [*(0.001, 0.02, 0.05, 0.1, 0.5) * 4, 2.0]
    while True:
        choice.shuffle(pauses_s)
        for pause_s in pauses_s:
            if is_over.wait(pause_s):
                return
            choice.choice(proxies).cut(choice)


def hold_contract_over_cuts(
    seed: int, n_cuts: int, start: StartReaders, behind_proxy: BehindProxy
) -> None:
    """Hold the contract again and again, until so many connections have been cut."""
    choice = random.Random(seed)
    n_done = 0
    while n_done < n_cuts:
        kinds_and_sizes = [
            (choice.choice(KINDS), choice.choice((0, 10, 1000, 5000, 70_000, 300_000)))
            for _ in range(150)
        ]
        security = choice.choice(SECURITIES)
        plan = RemotePlan(
            seed=choice.getrandbits(32),
            n_readers=2,
            n_chunks=choice.choice((1, 3, 16)),
            chunk_bytes=100_000,
            oob_threshold_bytes=choice.choice((0, 2000)),
            arena_bytes=choice.choice((0, 1 << 20, 64 << 20)),
            receive="private",
            spin_us=0,
            keeps=0.1,
            stalls=0.1,
            patient=True,
            messages=allowed(tuple(kinds_and_sizes), security),
            n_local=0,
            security=security,
        )
        proxies: list[Proxy] = []

        def start_behind(plan: Plan, handle: Handle) -> list[Callable[[], list[str]]]:
            handle, proxy = behind_proxy(handle)
            proxies.append(proxy)  # noqa: B023  # called in this round
            return start(plan, handle)

        is_over = threading.Event()

        def cut() -> None:
            wait_for(lambda: proxies, "no reader was started")  # noqa: B023
            cut_now_and_then(plan.seed, proxies, is_over)  # noqa: B023

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            run(plan, start_behind)
        finally:
            is_over.set()
            cutter.join(PATIENCE_S)
        n_done += sum(proxy.n_cuts for proxy in proxies)


@pytest.mark.parametrize("quarter", range(4))
def test_cuts(
    quarter: int,
    start_processes: StartReaders,  # noqa: F811  # the fixture
    behind_proxy: BehindProxy,
    record_property: Callable[[str, object], None],
) -> None:
    """Over 100 cut connections nothing is lost, repeated, reordered or torn: 25 at a time."""
    seed = random.getrandbits(32)
    sys.stdout.write(f"seed {seed}\n")
    record_property("seed", seed)
    hold_contract_over_cuts(seed, 25, start_processes, behind_proxy)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_cuts(start_processes: StartReaders, behind_proxy: BehindProxy) -> None:  # noqa: F811  # the fixture
    """Over 10,000 cut connections nothing is lost, repeated, reordered or torn."""
    seed = random.getrandbits(32)
    sys.stdout.write(f"seed {seed}\n")
    hold_contract_over_cuts(seed, 10_000, start_processes, behind_proxy)


# --- the same as on one host ----------------------------------------------------------------------


@pytest.mark.parametrize("security", SECURITIES)
def test_mixed_ranks_get_the_same(connect: Connect, security: str) -> None:
    """Local and remote ranks get the same messages in the same order, and the lag says how far."""
    queue, readers = connect(n_readers=3, local_reader_ranks=(1,), security=security)
    assert (0, 0, 0) == queue.stats().lag
    for number in range(5):
        queue.enqueue(number)
    assert (5, 5, 5) == queue.stats().lag
    for number in range(5):
        assert [number] * 3 == [reader.dequeue(PATIENCE_S) for reader in readers]
    wait_for(lambda: (0, 0, 0) == queue.stats().lag, "the messages were not acknowledged")
    assert [5, 5, 5] == [reader.stats().messages for reader in readers]
    assert (5,) * 3 == tuple(reader.stats().bytes // 5 for reader in readers)


def test_full_window_names_the_rank(connect: Connect) -> None:
    """The window is n_chunks messages: the next one is QueueFull with the rank that is behind."""
    queue, readers = connect(n_readers=2, n_chunks=3)
    for number in range(3):
        queue.enqueue(number)
    for _ in range(2):
        readers[0].dequeue(PATIENCE_S)
    wait_for(lambda: (1, 3) == queue.stats().lag, "the messages were not acknowledged")
    with pytest.raises(
        QueueFull, match=rf"rank 1 \(pid {os.getpid()} on .*\) is 3 messages behind, last seen"
    ) as raised:
        queue.enqueue("late", timeout=0.05)
    assert (1,) == raised.value.ranks
    assert 0 == readers[1].dequeue(PATIENCE_S)
    queue.enqueue("in time", timeout=PATIENCE_S)
    assert [2, "in time"] == [readers[0].dequeue(PATIENCE_S) for _ in range(2)]
    assert [1, 2, "in time"] == [readers[1].dequeue(PATIENCE_S) for _ in range(3)]
    with pytest.raises(QueueEmpty):
        readers[1].dequeue(0)
    with pytest.raises(QueueEmpty):
        readers[1].dequeue(0.02)


def test_messages_before_the_first_attachment(connect: Connect) -> None:
    """A rank that attaches for the first time gets every message from the first."""
    with new_queue(n_readers=2, n_chunks=2) as queue:
        queue.enqueue("a")
        queue.enqueue(torch.arange(1 << 19))
        with pytest.raises(QueueFull) as raised:
            queue.enqueue("c", timeout=0.02)
        assert (0, 1) == raised.value.ranks
        with pytest.raises(QueueNotReady) as not_ready:
            queue.wait_until_ready(0.02)
        assert (0, 1) == not_ready.value.ranks
        for rank in range(2):
            with MessageReader(queue.export_handle(), rank) as reader:
                assert "a" == reader.dequeue(PATIENCE_S)
                assert torch.equal(torch.arange(1 << 19), reader.dequeue(PATIENCE_S))


def test_what_enqueue_took_may_change(connect: Connect) -> None:
    """Overwritten right after `enqueue`, a large tensor arrives as it was, by either path."""
    for chunk_bytes in ("64 KiB", "8 MiB"):
        queue, (reader,) = connect(chunk_bytes=chunk_bytes, n_chunks=2)
        for number in range(20):
            tensor = torch.full((1 << 19,), number)
            queue.enqueue(tensor)
            tensor.fill_(-1)
            got = reader.dequeue(PATIENCE_S)
            assert torch.equal(torch.full((1 << 19,), number), got)


def test_tensors_alias_their_frame(connect: Connect) -> None:
    """A large tensor that arrives lies in its frame: writable, aligned, and the reader's own."""
    queue, readers = connect(n_readers=2, security="curve")
    for dtype in (torch.float64, torch.bfloat16, torch.complex64):
        queue.enqueue(torch.ones(1 << 20, dtype=dtype))
        one, other = (reader.dequeue(PATIENCE_S) for reader in readers)
        assert 0 == one.data_ptr() % one.itemsize
        one.zero_()
        assert torch.equal(torch.ones(1 << 20, dtype=dtype), other)
    queue.close()
    readers[0].close()
    del queue, readers
    assert 0 == one.count_nonzero()


@pytest.mark.parametrize("arena_bytes", [0, "3 MiB", "1 GiB"])
def test_blocks_are_sent_from_where_they_lie(connect: Connect, arena_bytes: str | int) -> None:
    """Blocks and drafts reach local and remote ranks alike, and are free when all have them."""
    queue, readers = connect(n_readers=2, local_reader_ranks=(1,), arena_bytes=arena_bytes)
    for number in range(20):
        draft = queue.empty((1 << 20,), torch.uint8)
        draft.fill_(number)
        strided = torch.arange(1 << 18)[::2] + number
        queue.enqueue([number, draft, strided, bytes(3 << 20)], PATIENCE_S)
        draft.zero_()
        for reader in readers:
            got_number, got_draft, got_strided, got_bytes = reader.dequeue(PATIENCE_S)
            assert number == got_number
            assert torch.equal(torch.full((1 << 20,), number, dtype=torch.uint8), got_draft)
            assert torch.equal(strided, got_strided)
            assert bytes(3 << 20) == got_bytes
            got_draft.fill_(99)
    del draft, got_draft, got_strided

    def are_free() -> bool:
        queue.enqueue(None, PATIENCE_S)
        assert [None, None] == [reader.dequeue(PATIENCE_S) for reader in readers]
        queue.empty((1 << 20,), torch.uint8)  # it looks what was given up
        return queue.stats().blocks_in_use <= 1

    wait_for(are_free, "blocks stay in use")


def test_slow_remote_rank_fills_the_arena(connect: Connect) -> None:
    """What a remote rank has not acknowledged stays as it is, and the writer takes other memory."""
    queue, (reader,) = connect(arena_bytes="3 MiB", n_chunks=8)
    for number in range(8):
        queue.enqueue(torch.full((1 << 20,), number, dtype=torch.uint8), PATIENCE_S)
    assert queue.stats().fallbacks > 0 or queue.stats().blocks_in_use <= 3
    for number in range(8):
        assert torch.equal(
            torch.full((1 << 20,), number, dtype=torch.uint8), reader.dequeue(PATIENCE_S)
        )


def test_many_small_buffers(connect: Connect) -> None:
    """Ten thousand buffers in one message arrive, each as it was."""
    queue, (reader,) = connect(oob_threshold_bytes=0, chunk_bytes="4 MiB")
    expected = [torch.tensor([number]) for number in range(10_000)]
    queue.enqueue(expected)
    assert torch.equal(torch.cat(expected), torch.cat(reader.dequeue(PATIENCE_S)))


def test_leaving_and_coming_back(connect: Connect) -> None:
    """A reader that closes leaves; who claims its rank next gets what is published from then on."""
    queue, readers = connect(n_readers=2)
    queue.enqueue("a")
    readers[1].close()
    wait_for(lambda: has_left(queue, 1), "the writer did not hear that it left")
    queue.enqueue("b")
    with MessageReader(queue.export_handle(), 1) as again:
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("c")
        assert "c" == again.dequeue(PATIENCE_S)
        assert list("abc") == [readers[0].dequeue(PATIENCE_S) for _ in range(3)]
        for reader in (readers[0], again):
            reader.close()
        wait_for(lambda: has_left(queue, 0) and has_left(queue, 1), "they did not leave")
        time.sleep(0.02)  # until the writer looks again
        with pytest.raises(ReaderLost, match="nobody is left"):
            queue.enqueue("d", timeout=PATIENCE_S)


def test_taken_rank_is_refused(connect: Connect) -> None:
    """A rank that a living reader holds is refused with its pid; the holder is not disturbed."""
    queue, (reader,) = connect()
    with (
        MessageReader(queue.export_handle(), 0) as late,
        pytest.raises(ProtocolError, match=f"rank 0 is held by process {os.getpid()} on "),
    ):
        late.wait_until_ready(PATIENCE_S)
    queue.enqueue("m")
    assert "m" == reader.dequeue(PATIENCE_S)


def test_close_reaches_every_reader(connect: Connect, quick_loss: float) -> None:
    """Readers drain what was published, then get QueueClosed; so does one that comes too late."""
    queue, readers = connect(n_readers=2)
    handle = queue.export_handle()
    queue.enqueue("last")
    queue.close()
    queue.close()
    for reader in readers:
        assert ["last"] == list(reader)
        with pytest.raises(QueueClosed, match="everything was read"):
            reader.dequeue(0)
    with (
        MessageReader(handle, 0) as late,
        pytest.raises((WriterLost, QueueClosed)),  # the port may still be open
    ):
        late.dequeue(PATIENCE_S)


def test_close_ends_waits(connect: Connect) -> None:
    """`close` from another thread ends the waits of both ends with QueueClosed."""
    queue, (reader,) = connect(n_chunks=1)
    for end, call in ((reader, reader.dequeue), (queue, lambda: queue.enqueue("b"))):
        if end is queue:
            queue.enqueue("a")
        raised: list[BaseException] = []

        def wait(call: Callable[[], Any] = call, raised: list[BaseException] = raised) -> None:
            try:
                call()
            except ShmcastError as raised_error:
                raised.append(raised_error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        end.close()
        thread.join(PATIENCE_S)
        assert [QueueClosed] == [type(error) for error in raised]
        if end is reader:
            wait_for(lambda: has_left(queue, 0), "the writer did not hear that it left")
            again = MessageReader(queue.export_handle(), 0)
            queue.wait_until_ready(PATIENCE_S)
    again.close()


def test_two_threads_share_a_reader(connect: Connect) -> None:
    """Each message goes to exactly one of a remote reader's threads."""
    queue, (reader,) = connect()
    got: list[int] = []

    def read() -> None:
        with contextlib.suppress(QueueClosed):
            while True:
                got.append(reader.dequeue(PATIENCE_S))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(300):
        queue.enqueue(number, PATIENCE_S)
    queue.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert list(range(300)) == sorted(got)


# --- death ----------------------------------------------------------------------------------------


def read_on(pipe: Connection, handle: Handle, rank: int) -> None:
    """Attach, say so, and send on what comes."""
    with MessageReader(handle, rank) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send("ready")
        for message in reader:
            pipe.send(message)
    pipe.send("closed")


def enqueue_numbers(queue: MessageQueue) -> None:
    """More than a window of messages."""
    for number in range(100):
        queue.enqueue(number, PATIENCE_S)


def test_killed_reader_is_lost_and_replaced(start_child: StartChild, quick_loss: float) -> None:
    """SIGKILL of a remote reader is a ReaderLost with its rank; a new one takes its place."""
    with new_queue(n_readers=2, n_chunks=2) as queue:
        handle = queue.export_handle()
        children = [start_child(read_on, handle, rank) for rank in range(2)]
        queue.wait_until_ready(PATIENCE_S)
        assert ["ready"] * 2 == [child.receive() for child in children]
        children[1].kill()
        with pytest.raises(ReaderLost, match=rf"rank 1 \(pid {children[1].pid} on ") as raised:
            enqueue_numbers(queue)
        assert (1,) == raised.value.ranks
        assert 1 == queue.stats().losses
        queue.enqueue("after", PATIENCE_S)
        again = start_child(read_on, handle, 1)
        queue.wait_until_ready(PATIENCE_S)
        assert "ready" == again.receive()
        queue.enqueue("both", PATIENCE_S)
        assert "both" == again.receive()
        while "both" != (message := children[0].receive()):
            assert isinstance(message, int) or message == "after"


def test_evicted_reader_is_gone_on_without(start_child: StartChild, quick_loss: float) -> None:
    """With "evict" the writer goes on without a killed reader, at once after the loss."""
    with new_queue(n_readers=2, n_chunks=2, on_reader_loss="evict") as queue:
        handle = queue.export_handle()
        child = start_child(read_on, handle, 1)
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            child.kill()
            for number in range(10):
                queue.enqueue(number, PATIENCE_S)
                assert number == reader.dequeue(PATIENCE_S)
            assert 1 == queue.stats().losses


def test_stopped_reader_is_waited_for(start_child: StartChild, quick_loss: float) -> None:
    """A stopped reader is no lost one: the writer waits, and it goes on where it was."""
    with new_queue(n_chunks=2) as queue:
        child = start_child(read_on, queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        assert "ready" == child.receive()
        os.kill(child.pid, signal.SIGSTOP)
        queue.enqueue(0)
        queue.enqueue(1)
        with pytest.raises(QueueFull, match="rank 0"):
            queue.enqueue("late", timeout=2 * quick_loss)
        os.kill(child.pid, signal.SIGCONT)
        queue.enqueue(2, PATIENCE_S)
        assert [0, 1, 2] == [child.receive() for _ in range(3)]


def write_and_die(pipe: Connection, count: int) -> None:
    """Publish so many messages to a remote reader and die."""
    queue = new_queue(n_chunks=count)
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    for number in range(count):
        queue.enqueue(number)
    assert "die" == pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_writer_is_lost(start_child: StartChild, quick_loss: float) -> None:
    """After SIGKILL of the writer a reader gets all that has arrived, then WriterLost."""
    child = start_child(write_and_die, 10)
    with MessageReader(child.receive(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        wait_for(lambda: 10 == reader.stats().lag, "the messages did not arrive")
        child.pipe.send("die")
        child.join()
        time.sleep(1.5 * quick_loss)
        assert list(range(10)) == [reader.dequeue(0) for _ in range(10)]
        with pytest.raises(WriterLost, match=rf"the writer \(pid {child.pid} on .*\) died"):
            reader.dequeue(PATIENCE_S)


def fork_and_die(pipe: Connection) -> None:
    """Attach a reader, fork a child that lives on, and die."""
    reader = MessageReader(pipe.recv(), 0)
    reader.wait_until_ready(PATIENCE_S)
    pid = os.fork()
    if pid == 0:
        time.sleep(4 * PATIENCE_S)
        os._exit(0)
    pipe.send(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def test_reader_with_a_forked_child_is_lost(start_child: StartChild, quick_loss: float) -> None:
    """A dead remote reader is lost though a child that it forked lives on."""
    with new_queue(n_chunks=1) as queue:
        child = start_child(fork_and_die)
        child.pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        grandchild = child.receive()
        try:
            with pytest.raises(ReaderLost):
                enqueue_numbers(queue)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_cut_for_good_is_a_loss(behind_proxy: BehindProxy, quick_loss: float) -> None:
    """Where a connection cannot be made again both ends say so: ReaderLost and WriterLost."""
    with new_queue(n_chunks=1) as queue:
        handle, proxy = behind_proxy(queue.export_handle())
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue("a")
            assert "a" == reader.dequeue(PATIENCE_S)
            proxy.close()
            with pytest.raises(WriterLost):
                reader.dequeue(PATIENCE_S)
            with pytest.raises(ReaderLost):
                enqueue_numbers(queue)


def frame(kind: int, session: int, number: int = 0, text: bytes = b"") -> bytes:
    """A frame of rank 0."""
    return pack(Kind(kind), 0, session, number, text)


@contextlib.contextmanager
def bare_reader(handle: Handle) -> Iterator[zmq.Socket[bytes]]:
    """A reader's socket, without a reader."""
    assert handle.endpoint is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as bare:
        bare.linger = 0
        bare.rcvtimeo = int(PATIENCE_S * 1e3)
        bare.plain_username, bare.plain_password = b"reader", handle.token.encode()
        bare.connect(handle.endpoint)
        yield bare


def receive(bare: zmq.Socket[bytes], kind: int) -> None:
    """Receive until a frame of this kind comes."""
    while unpack(bare.recv_multipart()).kind != kind:
        pass


@pytest.mark.usefixtures("only_in_calls")
def test_lost_reader_cannot_come_back(behind_proxy: BehindProxy, quick_loss: float) -> None:
    """Who comes back after it was found lost is evicted, also before a call has reported it."""
    with new_queue(security="none") as queue:
        handle, proxy = behind_proxy(queue.export_handle())
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            reader.wait_until_ready(PATIENCE_S)
            assert queue._writer.remote is not None
            peer = queue._writer.remote.holders[0]
            assert not queue._writer.remote.is_dead(peer)
            proxy.close()
            wait_for(lambda: queue._writer.remote.is_dead(peer), "it was not found lost")  # type: ignore[union-attr]  # asserted above
            with bare_reader(queue.export_handle()) as bare:
                bare.send(frame(Kind.RESUME, peer.session, 0, handle.token.encode()))
                receive(bare, Kind.EVICTION)
            with pytest.raises(ReaderLost):
                enqueue_numbers(queue)


def test_a_greeting_that_was_lost() -> None:
    """A signal may cut off the call that took a greeting: what follows asks for it again."""
    with new_queue(security="none") as queue:
        handle = queue.export_handle()
        hello = frame(Kind.HELLO, 7, 0, handle.token.encode())
        with bare_reader(handle) as cut, bare_reader(handle) as bare:
            cut.send(hello)
            receive(cut, Kind.ADMISSION)
            bare.send(frame(Kind.ACK, 7, 0))
            receive(bare, Kind.REPEAT)
            bare.send(hello)
            receive(bare, Kind.ADMISSION)
            bare.send(frame(Kind.ACK, 8, 0))
            receive(bare, Kind.REFUSAL)


def test_second_hello_over_a_connection() -> None:
    """Large messages that are sent again over the same connection are released when they are."""
    with new_queue(security="none", n_chunks=2) as queue:
        hello = frame(Kind.HELLO, 7, 0, queue.export_handle().token.encode())
        with bare_reader(queue.export_handle()) as bare:
            bare.send(hello)
            queue.wait_until_ready(PATIENCE_S)
            for _ in range(2):
                queue.enqueue(bytes(1 << 20))
                receive(bare, Kind.MESSAGE)
            assert queue._writer.remote is not None
            peer = queue._writer.remote.holders[0]
            bare.send(hello)
            for _ in range(2):
                receive(bare, Kind.MESSAGE)
            bare.send(frame(Kind.ACK, 7, 2))
            wait_for(lambda: (0,) == queue.stats().lag, "the messages were not released")
            wait_for(
                lambda: not (peer.connection and peer.connection.sent),
                "what was sent twice is waited for",
            )


@contextlib.contextmanager
def bare_writer(handle: Handle) -> Iterator[tuple[zmq.Socket[bytes], Handle]]:
    """A writer's socket, without a writer, and the handle to reach it."""
    loop = Loop.enter()  # it answers who may come in
    try:
        allow(loop, "bare", key=None, token=handle.token.encode())
        with loop.context.socket(zmq.ROUTER) as bare:
            bare.linger, bare.plain_server, bare.zap_domain = 0, True, b"bare"
            bare.rcvtimeo = int(PATIENCE_S * 1e3)
            port = bare.bind_to_random_port("tcp://127.0.0.1")
            yield bare, attrs.evolve(handle, endpoint=f"tcp://127.0.0.1:{port}")
    finally:
        loop.leave()


@contextlib.contextmanager
def reader_of_numbers(*numbers: int, window: int) -> Iterator[MessageReader]:
    """A reader that was admitted, and was sent messages with these numbers and contents."""
    with new_queue(security="none") as queue:
        handle = queue.export_handle()
    with bare_writer(handle) as (bare, bare_handle), MessageReader(bare_handle, 0) as reader:
        identity, hello = bare.recv_multipart()
        session = unpack([hello]).session
        sizes = ADMITTED.pack(*RingSizes(window, 4096, 0), 0)
        bare.send_multipart([identity, frame(Kind.ADMISSION, session, 0, sizes)])
        for number in numbers:
            message = frame(Kind.MESSAGE, session, number, pickle.dumps(number))
            bare.send_multipart([identity, message])
        yield reader


def test_message_outside_the_window_is_refused() -> None:
    """A writer that sends more than the window gets no more memory of the reader's."""
    with reader_of_numbers(0, 1, 2, window=2) as reader:
        source = reader._source
        assert isinstance(source, RemoteAttachment)
        wait_for(lambda: source.remote.link.failure is not None, "the third message was taken")
        assert [0, 1] == [reader.dequeue(PATIENCE_S) for _ in range(2)]
        with pytest.raises(ProtocolError, match="outside the window of 2"):
            reader.dequeue(PATIENCE_S)


def test_message_that_is_sent_again_is_taken_once() -> None:
    """A message that comes a second time, as it may after a cut, is not taken again."""
    with reader_of_numbers(0, 1, 0, 2, window=16) as reader:
        wait_for(lambda: 3 == reader.stats().lag, "not every message was taken once")
        assert [0, 1, 2] == [reader.dequeue(PATIENCE_S) for _ in range(3)]


@pytest.mark.usefixtures("only_in_calls")
def test_reader_that_leaves_while_it_is_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that closes just before it is admitted is not waited for."""
    with new_queue(n_chunks=1) as queue:
        assert queue._writer.remote is not None
        link, members = queue._writer.remote, queue._writer.members
        admit = members.admit
        reader = MessageReader(queue.export_handle(), 0)

        def leave_and_admit(rank: int) -> int:
            reader.close()
            wait_for(
                lambda: link.holders[rank].state is State.OVER,
                "the writer did not hear that it left",
            )
            return admit(rank)

        monkeypatch.setattr(members, "admit", leave_and_admit)
        wait_for(lambda: link.link.claims, "no claim came")
        with contextlib.suppress(QueueNotReady):
            queue.wait_until_ready(0)
        wait_for(lambda: has_left(queue, 0), "it is waited for")
        monkeypatch.undo()
        with MessageReader(queue.export_handle(), 0) as again:
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue("m", PATIENCE_S)
            assert "m" == again.dequeue(PATIENCE_S)


def test_leaving_during_a_cut(behind_proxy: BehindProxy) -> None:
    """A reader that closes while its connection is cut connects again to say that it leaves."""
    with new_queue() as queue:
        handle, proxy = behind_proxy(queue.export_handle())
        for _ in range(10):
            reader = MessageReader(handle, 0)
            queue.wait_until_ready(PATIENCE_S)
            reader.wait_until_ready(PATIENCE_S)
            proxy.cut()
            reader.close()
            wait_for(lambda: has_left(queue, 0), "the writer did not hear that it left")
        assert 0 == queue.stats().losses


def test_evicted_reader_hears_of_it() -> None:
    """A reader that comes back after its loss was handled gets ProtocolError, and nothing more."""
    with new_queue() as queue, MessageReader(queue.export_handle(), 0) as reader:
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
        assert queue._writer.remote is not None
        with queue._lock:
            queue._writer.remote.vacate(0)
        with pytest.raises(ProtocolError, match="rank 0 was evicted"):
            reader.dequeue(PATIENCE_S)


def exit_after_close(pipe: Connection) -> None:
    """Publish a large message to a reader that is slow to take it, close, and leave."""
    queue = new_queue()
    pipe.send(queue.export_handle())
    queue.wait_until_ready(PATIENCE_S)
    queue.enqueue(bytes(1 << 24))  # no tensor: torch's threads do not survive a fork
    queue.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_leaving_the_process_waits(start_child: StartChild, method: str) -> None:
    """A process that closes and ends at once still delivers everything."""
    child = start_child(exit_after_close, method=method)
    with MessageReader(child.receive(), 0) as reader:
        assert [bytes(1 << 24)] == list(reader)
    assert 0 == child.join()


def test_program_that_ends_is_waited_for() -> None:
    """So does a program that is no child of `multiprocessing`."""
    program = (
        "from shmcast import *\n"
        f"queue = MessageQueue(QueueConfig(local_reader_ranks=(), bind='{BIND}'))\n"
        "print(queue.export_handle().to_json(), flush=True)\n"
        "queue.wait_until_ready(30)\n"
        "queue.enqueue(bytes(1 << 24))\n"
        "queue.close()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        with MessageReader(Handle.from_json(process.stdout.readline()), 0) as reader:
            assert [bytes(1 << 24)] == list(reader)
        assert 0 == process.wait(PATIENCE_S)


# --- forks, signals, threads ----------------------------------------------------------------------


def test_no_thread_without_remote_ranks() -> None:
    """A queue without remote ranks starts no thread and does not import zmq."""
    program = (
        "import sys, threading\n"
        "from shmcast import *\n"
        f"with MessageQueue(QueueConfig(bind='{BIND}')) as queue:\n"
        "    with MessageReader(queue.export_handle(), 0) as reader:\n"
        "        queue.enqueue(1)\n"
        "        assert 1 == reader.dequeue(30)\n"
        "    assert queue.export_handle().endpoint is None\n"
        "assert 1 == threading.active_count()\n"
        "assert not {'zmq', 'torch', 'shmcast.remote'} & set(sys.modules)\n"
    )
    assert 0 == subprocess.run([sys.executable, "-c", program], check=False).returncode


def test_one_thread_for_all(connect: Connect) -> None:
    """Any number of remote ends share one thread of ours, which ends with the last of them."""

    def ours() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "shmcast" in thread.name]

    wait_for(lambda: not ours(), "the thread of earlier ends did not end")
    ends = [connect(n_readers=2) for _ in range(3)]
    assert ["shmcast-remote"] == ours()
    for queue, readers in ends:
        for reader in readers:
            reader.close()
        queue.close()
    wait_for(lambda: not ours(), "the thread did not end")


def use_in_forked_child(pipe: Connection, queue: MessageQueue, reader: MessageReader) -> None:
    """What a forked child sees of its parent's ends; then ends of its own."""
    seen = []
    for call in (lambda: queue.enqueue(1), lambda: reader.dequeue(0), queue.export_handle):
        try:
            call()
        except ShmcastError as error:
            seen.append(type(error) is ShmcastError and str(os.getpid()) in str(error))
    queue.close()
    reader.close()
    with new_queue() as own, MessageReader(own.export_handle(), 0) as own_reader:
        own.wait_until_ready(PATIENCE_S)
        own.enqueue("own")
        seen.append(own_reader.dequeue(PATIENCE_S))
    pipe.send(seen)


def test_forked_child_has_no_part(connect: Connect, start_child: StartChild) -> None:
    """In a forked child every call raises; it may make ends of its own; the parent's go on."""
    queue, (reader,) = connect()
    child = start_child(use_in_forked_child, queue, reader, method="fork")
    assert [True, True, True, "own"] == child.receive()
    assert 0 == child.join()
    queue.enqueue("still here")
    assert "still here" == reader.dequeue(PATIENCE_S)


def interrupt_a_wait(pipe: Connection, which: str) -> None:
    """Wait for ever in one of the calls; say how long after the interrupt it ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    queue = new_queue(n_chunks=1)
    if which == "wait_until_ready":
        call: Callable[[], Any] = queue.wait_until_ready
    else:
        reader = MessageReader(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
        if which == "enqueue":
            queue.enqueue(1)
        call = {"enqueue": lambda: queue.enqueue(2), "dequeue": reader.dequeue}[which]
    pipe.send("waiting")
    try:
        call()
    except KeyboardInterrupt:
        pipe.send(time.monotonic())


@pytest.mark.parametrize("which", ["enqueue", "dequeue", "wait_until_ready"])
def test_interrupt_ends_a_wait(
    start_child: StartChild, which: str, record_property: Callable[[str, object], None]
) -> None:
    """Ctrl-C ends every wait of an end with remote peers at once."""
    child = start_child(interrupt_a_wait, which)
    assert "waiting" == child.receive()
    time.sleep(0.3)
    sent_at = time.monotonic()
    os.kill(child.pid, signal.SIGINT)
    taken_s = child.receive() - sent_at
    record_property("taken_s", taken_s)
    assert taken_s < PATIENCE_S


def cpu_of_waiting(pipe: Connection, handle: Handle) -> None:
    """Wait in `dequeue`; the share of a core that it took."""
    with MessageReader(handle, 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        start, start_cpu = time.monotonic(), time.process_time()
        with contextlib.suppress(QueueEmpty):
            reader.dequeue(2)
        pipe.send((time.process_time() - start_cpu) / (time.monotonic() - start))


def test_idle_ends_sleep(
    start_child: StartChild, record_property: Callable[[str, object], None]
) -> None:
    """A remote reader that waits, and a writer between its calls, take little of a core."""
    with new_queue() as queue:
        child = start_child(cpu_of_waiting, queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        start, start_cpu = time.monotonic(), time.process_time()
        reader_share = child.receive()
        writer_share = (time.process_time() - start_cpu) / (time.monotonic() - start)
    record_property("shares", (reader_share, writer_share))
    assert (True, True) == (reader_share < 20 * 0.01, writer_share < 20 * 0.01)


def test_message_between_publishing_and_handing_on(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a signal left published and not handed on goes out first, whoever attaches meanwhile."""
    queue, (reader,) = connect()

    def interrupt(*_: object) -> None:
        raise Interrupt

    def publish(message: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(queue._writer.remote, "publish", interrupt)
            with pytest.raises(Interrupt):
                queue.enqueue(message)

    publish("first")
    queue.wait_until_ready(PATIENCE_S)
    assert "first" == reader.dequeue(PATIENCE_S)
    publish("second")
    reader.close()
    wait_for(lambda: has_left(queue, 0), "the writer did not hear that it left")
    with MessageReader(queue.export_handle(), 0) as again:
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("third", PATIENCE_S)
        assert "third" == again.dequeue(PATIENCE_S)


def test_handed_on_twice(connect: Connect) -> None:
    """A large message that a signal has handed on twice takes its room in the window once."""
    queue, (reader,) = connect(chunk_bytes=4096, arena_bytes=0)
    queue.enqueue(bytes(1 << 20))
    reader.dequeue(PATIENCE_S)
    assert queue._writer.remote is not None
    filed = queue._writer.remote.link.filed
    wait_for(lambda: not filed, "the message was not released")
    queue._writer.remote.publish(0, memoryview(b""), [], 1 << 20)
    wait_for(lambda: not filed, "its bytes stay counted")


def test_failing_end_hurts_no_other(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """An end whose I/O fails, and whose closing fails too, disturbs no other end."""
    (queue, (reader,)), (_, (failing,)) = connect(), connect()
    assert isinstance(failing._source, RemoteAttachment)
    link = failing._source.remote.link
    abort = link.abort

    def abort_and_fail(error: str) -> None:
        abort(error)
        raise RuntimeError

    monkeypatch.setattr(link, "abort", abort_and_fail)
    monkeypatch.setattr(link, "run", lambda *_: 1 / 0)
    with pytest.raises(ShmcastError, match="its I/O failed"):
        failing.dequeue(PATIENCE_S)
    queue.enqueue("m")
    assert "m" == reader.dequeue(PATIENCE_S)


def test_reader_without_descriptors_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose process is out of descriptors for a moment connects when there are some."""
    failures = 3

    def check() -> None:
        nonlocal failures
        if threading.current_thread().name == "shmcast-remote" and failures:
            failures -= 1
            raise OSError

    monkeypatch.setattr("shmcast.remote.reader_link.check_descriptors", check)
    with new_queue() as queue, MessageReader(queue.export_handle(), 0) as reader:
        queue.wait_until_ready(PATIENCE_S)
        reader.wait_until_ready(PATIENCE_S)
    assert 0 == failures


def test_reader_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds no descriptor for its event keeps no thread alive."""
    with new_queue() as queue:

        def fail() -> None:
            raise OSError

        monkeypatch.setattr("shmcast.remote.reader.RemoteRing", fail)
        with pytest.raises(OSError):  # noqa: PT011  # the one above
            MessageReader(queue.export_handle(), 0)
    wait_for(
        lambda: "shmcast-remote" not in [thread.name for thread in threading.enumerate()],
        "the thread did not end",
    )


def test_program_that_was_interrupted_ends() -> None:
    """A process where a signal left an end half made is not kept for that."""
    program = "from shmcast.remote.loop import Loop\nLoop.enter()\n"
    start = time.monotonic()
    assert 0 == subprocess.run([sys.executable, "-c", program], check=False).returncode
    assert time.monotonic() - start < Link.timing.linger_s


def test_large_message_is_acknowledged_at_once() -> None:
    """A released message that is large does not wait for others to be acknowledged with it."""
    ring, acks = remote.RemoteRing(), []

    class Receiver:
        def receive_within(self, _timeout_s: float) -> bool:
            raise AssertionError

        def acknowledge(self) -> None:
            acks.append(ring.ack_from)

    ring.link = Receiver()
    ring.ack_from = 100
    for number, n_bytes in enumerate((10, 1 << 20)):
        ring.arrived.append(remote.Arrived(number, b"text", n_bytes, 0, 0))
        assert b"text" == ring.try_take()
        ring.release()
    assert [0] == acks


def is_open(pipe: Connection, descriptor: int) -> None:
    """Whether a forked child has it."""
    try:
        os.fstat(descriptor)
        pipe.send(True)
    except OSError:
        pipe.send(False)


def test_forked_child_keeps_other_connections(connect: Connect, start_child: StartChild) -> None:
    """A connection that is not ours stays open in a child, though its peer's port is ours."""
    queue, _ = connect()
    assert queue._writer.remote is not None
    with (
        socket.create_server(("127.0.0.2", queue._writer.remote.port)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        child = start_child(is_open, connection.fileno(), method="fork")
        assert child.receive()


# --- bounded memory -------------------------------------------------------------------------------


def resident_bytes() -> int:
    """How much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("chunk_bytes", ["4 MiB", "64 KiB"])
def test_slow_reader_bounds_memory(start_child: StartChild, chunk_bytes: str) -> None:
    """A writer to a stopped reader keeps the window and no more; all arrives in the end."""
    size = 2 << 20
    with new_queue(n_chunks=4, chunk_bytes=chunk_bytes, arena_bytes="6 MiB") as queue:
        child = start_child(count_bytes, queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        assert "ready" == child.receive()
        for _ in range(8):
            queue.enqueue(bytes(size), PATIENCE_S)
        os.kill(child.pid, signal.SIGSTOP)
        before = resident_bytes()
        n_sent = 0
        with contextlib.suppress(QueueFull):
            while True:
                queue.enqueue(bytes(size), timeout=0.2)
                n_sent += 1
        assert (True, True) == (n_sent <= 4, resident_bytes() - before < 8 * size)
        os.kill(child.pid, signal.SIGCONT)
        for _ in range(20):
            queue.enqueue(bytes(size), PATIENCE_S)
        queue.close()
        assert (8 + n_sent + 20) * size == child.receive()


def count_bytes(pipe: Connection, handle: Handle) -> None:
    """How many bytes come, all together."""
    with MessageReader(handle, 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        pipe.send("ready")
        pipe.send(sum(len(message) for message in reader))


# --- wrong peers ----------------------------------------------------------------------------------


@pytest.fixture
def unpickled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What reaches the unpickler of this process."""
    streams: list[object] = []

    def note(stream: object, **_: object) -> object:
        streams.append(stream)
        raise AssertionError

    monkeypatch.setattr("shmcast.queue.loads", note)
    return streams


def with_keys(handle: Handle, *, server: bytes, public: bytes, secret: bytes) -> Handle:
    return attrs.evolve(handle, curve_keys=(server.decode(), public.decode(), secret.decode()))


@pytest.mark.parametrize("wrong", ["unknown key", "wrong server", "no key", "wrong token"])
def test_wrong_reader_is_kept_out(quick_loss: float, unpickled: list[object], wrong: str) -> None:
    """Without the queue's keys and token nobody attaches, and the writer is not disturbed."""
    with new_queue() as queue:
        handle = queue.export_handle()
        server, public, secret = (key.encode() for key in handle.curve_keys)
        other_public, other_secret = zmq.curve_keypair()
        wrong_handle = {
            "unknown key": with_keys(
                handle, server=server, public=other_public, secret=other_secret
            ),
            "wrong server": with_keys(handle, server=other_public, public=public, secret=secret),
            "no key": attrs.evolve(handle, curve_keys=()),
            "wrong token": attrs.evolve(handle, token="0" * 64),
        }[wrong]
        queue.enqueue("secret")
        other = ProtocolError if wrong == "no key" else AuthenticationError
        with MessageReader(wrong_handle, 0) as stranger:
            with pytest.raises((AuthenticationError, other)) as raised:
                stranger.dequeue(PATIENCE_S)
            assert not [key for key in (*handle.curve_keys, handle.token) if key in str(raised)]
        with pytest.raises(QueueNotReady):
            queue.wait_until_ready(0)
        assert [] == unpickled
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            with pytest.raises(AssertionError):
                reader.dequeue(PATIENCE_S)
        assert 1 == len(unpickled)


def garbage(kind: str) -> bytes:
    """What a peer that is none says first."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x19\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    return {
        "silence": b"",
        "random": random.Random(5).randbytes(5000),
        "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "frames": greeting + ready + b"\x00\x05hello" + b"\x02" + (1 << 40).to_bytes(8, "big"),
    }[kind]


@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.parametrize("kind", ["silence", "random", "http", "frames"])
def test_garbage_reaches_nobody(unpickled: list[object], security: str, kind: str) -> None:
    """Connections that are silent or talk garbage disturb neither writer nor reader."""
    with new_queue(security=security) as queue:
        handle = queue.export_handle()
        assert queue._writer.remote is not None
        with contextlib.ExitStack() as connections:
            for _ in range(20):
                connection = connections.enter_context(
                    socket.create_connection(("127.0.0.1", queue._writer.remote.port))
                )
                connection.sendall(garbage(kind))
            with pytest.raises(QueueNotReady):
                queue.wait_until_ready(0.05)
            with MessageReader(handle, 0) as reader:
                queue.wait_until_ready(PATIENCE_S)
                reader.wait_until_ready(PATIENCE_S)
        assert [] == unpickled


@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.parametrize("kind", ["silence", "random", "http", "frames", "nobody"])
def test_writer_that_is_none(
    quick_loss: float, unpickled: list[object], security: str, kind: str
) -> None:
    """A reader whose address belongs to somebody else says so in time; nothing is unpickled."""
    with new_queue(security=security) as queue:
        handle = queue.export_handle()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    accepted.append(connection)
                    connection.sendall(garbage(kind))

        thread = threading.Thread(target=answer)
        thread.start()
        port = 1 if kind == "nobody" else listener.getsockname()[1]
        expected = WriterLost if kind == "nobody" else ShmcastError
        wrong = attrs.evolve(handle, endpoint=f"tcp://127.0.0.1:{port}")
        with MessageReader(wrong, 0) as reader, pytest.raises(expected) as raised:
            # Who says nothing may be a writer whose program does not run for a while.
            reader.dequeue(3 * quick_loss if kind == "silence" else PATIENCE_S)
        said = (WriterLost, AuthenticationError, ProtocolError)
        assert raised.type in ((QueueEmpty,) if kind == "silence" else said)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for connection in accepted:
            connection.close()
    assert [] == unpickled


@pytest.mark.parametrize("side", ["reader", "writer"])
def test_other_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, unpickled: list[object], side: str
) -> None:
    """A peer of another version is a ProtocolError that names both."""
    with new_queue(security="none") as queue:
        handle = queue.export_handle()
        old_hello = MAGIC[:-1] + b"\x63" + bytes(50)
        text = f"the peer has version 99, this one {MAGIC[-1]}"
        if side == "reader":  # an old reader at our writer
            with bare_reader(handle) as old:
                old.send(old_hello)
                assert text.encode() in old.recv()
        else:
            with bare_writer(handle) as (old, wrong), MessageReader(wrong, 0) as reader:
                identity, *_ = old.recv_multipart()
                old.send_multipart([identity, old_hello])
                with pytest.raises(ProtocolError, match=text):
                    reader.dequeue(PATIENCE_S)
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
    assert [] == unpickled


class Harmful:
    """Runs code when it is loaded, if that is allowed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


def test_allow_list(connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys a message may name what is listed, and `allow`; else it is refused and gone."""
    monkeypatch.chdir(tmp_path)
    queue, (reader,) = connect(security="none")
    queue.enqueue(Harmful())
    with pytest.raises(ProtocolError, match="posix:mkdir"):
        reader.dequeue(PATIENCE_S)
    queue.enqueue(torch.ones(3, requires_grad=True))  # in torch's own way, which can run code
    with pytest.raises(ProtocolError, match=r"torch\._utils:_rebuild_tensor_v2"):
        reader.dequeue(PATIENCE_S)
    assert [] == list(tmp_path.iterdir())
    queue.enqueue({"plain": [torch.ones(3, dtype=torch.bfloat16), 1 + 2j, {1}]})
    assert 3 == len(reader.dequeue(PATIENCE_S)["plain"])
    reader.close()
    wait_for(lambda: has_left(queue, 0), "the writer did not hear that it left")
    with MessageQueue.create_from_handle(
        queue.export_handle(), 0, allow=("posix:mkdir",)
    ) as trusting:
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(Harmful())
        trusting.dequeue(PATIENCE_S)
    assert ["harmed"] == [path.name for path in tmp_path.iterdir()]


class Reduced:
    """Pickled as this."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reduced


def hostile_arrays() -> dict[str, object]:
    """What loads an object from its address, if numpy's names are allowed."""
    array = np.arange(1)
    reconstruct, scalar = array.__reduce__()[0], array[0].__reduce__()[0]
    address = id("a living object").to_bytes(8, sys.byteorder)
    objects = Reduced(np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 0))
    fields = (3, "|", None, ("a",), {"a": (np.dtype("O8"), 0)}, 8, 1, 0)
    return {
        "scalar": Reduced(scalar, (objects, address)),
        "ndarray": Reduced(np.ndarray, ((1,), objects, bytearray(address))),
        "fields": Reduced(np.ndarray, ((1,), Reduced(np.dtype, ("V8",), fields), address)),
        "reconstruct": Reduced(
            reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), objects, False, address)
        ),
        "array": array,
    }


@pytest.mark.parametrize("kind", sorted(hostile_arrays()))
def test_numpy_is_refused(kind: str) -> None:
    """Without `allow` no name of numpy passes: an array's bytes could be taken for objects."""
    stream = pickle.dumps(hostile_arrays()[kind], protocol=5)
    with pytest.raises(ProtocolError, match="numpy"):
        checked_loads(())(stream)


def test_cuts_of_an_idle_reader(behind_proxy: BehindProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the connection of a reader ends that waits for nothing, it comes back."""
    monkeypatch.setattr(Link, "timing", attrs.evolve(Link.timing, vain_cuts=3))
    with new_queue(security="none") as queue:
        handle, proxy = behind_proxy(queue.export_handle())
        with MessageReader(handle, 0) as reader:
            reader.wait_until_ready(PATIENCE_S)
            assert isinstance(reader._source, RemoteAttachment)
            link = reader._source.remote.link
            for number in range(2):
                queue.enqueue(number)
                assert number == reader.dequeue(PATIENCE_S)
                for _ in range(5):
                    wait_for(
                        lambda: link._gone_since is None and proxy.cut(), "it is not connected"
                    )
            queue.enqueue("last")
            assert "last" == reader.dequeue(PATIENCE_S)


def receive_in_little_memory(pipe: Connection, handle: Handle) -> None:
    """Receive a small message and one that this process has no room for."""
    Link.timing = attrs.evolve(Link.timing, vain_cuts=10)
    with MessageReader(handle, 0) as reader:
        pipe.send(reader.dequeue(PATIENCE_S))
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (16 << 20), resource.RLIM_INFINITY))
        pipe.send("limited")
        try:
            reader.dequeue(PATIENCE_S)
        except ShmcastError as error:
            pipe.send((type(error), str(error)))


def test_no_memory_to_receive_is_said(start_child: StartChild) -> None:
    """A message that a reader has no memory for is an error there, not a wait without an end."""
    with new_queue() as queue:
        child = start_child(receive_in_little_memory, queue.export_handle())
        queue.enqueue("small", PATIENCE_S)
        queue.wait_until_ready(PATIENCE_S)
        assert "small" == child.receive()
        assert "limited" == child.receive()
        queue.enqueue(torch.zeros(64 << 20, dtype=torch.uint8), PATIENCE_S)
        error_class, text = child.receive()
        assert error_class is ShmcastError
        assert "rank 0 can't receive message 1" in text
        assert "RLIMIT_AS" in text


def test_a_stream_changes_no_function() -> None:
    """A stream that sets attributes of what it may name changes nothing for later messages."""
    stream = b"".join(
        (
            b"\x80\x05cshmcast.pickler\nrebuild_tensor\n",
            b"(N}X\x0c\0\0\0__defaults__(K\x01tst",  # no state, but {"__defaults__": (1,)}
            b"b.",
        )
    )
    with pytest.raises(TypeError):
        checked_loads(())(stream)
    assert rebuild_tensor.__defaults__ is None


def test_allow_is_no_text() -> None:
    """One name instead of a sequence of them is a TypeError, not a list of letters."""
    with new_queue(security="none") as queue, pytest.raises(TypeError, match="a sequence of names"):
        MessageReader(queue.export_handle(), 0, allow="my.package:Step")


def test_numpy_may_be_allowed() -> None:
    """Who names numpy's functions in `allow` gets arrays."""
    array = np.arange(3)
    names = [
        f"{part.__module__}:{part.__name__}"
        for part in (array.__reduce_ex__(5)[0], array.__reduce__()[0], np.dtype, np.ndarray)
    ]
    stream = pickle.dumps(array, protocol=5)
    assert [0, 1, 2] == checked_loads(names)(stream).tolist()


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bind", "security", "text"),
    [
        ("tcp://192.0.2.1:0", "curve", "an address of this host"),
        ("tcp://no-such-name.invalid:0", "curve", "bind = "),
        (f"tcp://{'a' * 70}.invalid:0", "curve", "bind = "),
        ("tcp://*:0", "none", "every interface"),
        ("tcp://0.0.0.0:0", "none", "every interface"),
        ("tcp://[::]:0", "none", "every interface"),
        ("tcp://0:0", "none", "every interface"),
        ("tcp://[::ffff:0.0.0.0]:0", "none", "every interface"),
    ],
)
def test_wrong_address(bind: str, security: str, text: str) -> None:
    """An address that is not this host's, and a wildcard without keys, is refused at once."""
    with pytest.raises(ConfigError, match=text):
        new_queue(bind=bind, security=security)


def test_taken_port(connect: Connect) -> None:
    """A port that is in use is a ConfigError, and the first queue is not disturbed."""
    queue, (reader,) = connect()
    endpoint = queue.export_handle().endpoint
    assert endpoint is not None
    with pytest.raises(ConfigError, match="a free port"):
        new_queue(bind=endpoint)
    queue.enqueue("m")
    assert "m" == reader.dequeue(PATIENCE_S)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"])
def test_addresses(connect: Connect, bind: str) -> None:
    """Numbers of both kinds and names work; the handle has the real port."""
    if "[" in bind:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this host has no IPv6")
    queue, (reader,) = connect(bind=bind)
    endpoint = queue.export_handle().endpoint
    assert endpoint is not None
    assert bind[:-2] == endpoint.rpartition(":")[0]
    assert 0 != int(endpoint.rpartition(":")[2])
    queue.enqueue("m")
    assert "m" == reader.dequeue(PATIENCE_S)


def test_handle_hides_the_keys(connect: Connect, tmp_path: Path) -> None:
    """The keys travel in JSON, pickle and a file of mode 0600, and stand in no repr and no log."""
    queue, (reader,) = connect()
    handle = queue.export_handle()
    assert 3 == len(handle.curve_keys)
    assert handle == Handle.from_json(handle.to_json())
    handle.save(tmp_path / "handle")
    assert 0o600 == (tmp_path / "handle").stat().st_mode & 0o777
    assert handle == Handle.load(tmp_path / "handle")
    shown = f"{handle!r} {handle} {queue!r} {reader!r}"
    assert [] == [secret for secret in (*handle.curve_keys, handle.token) if secret in shown]
    assert () == new_queue(security="none").export_handle().curve_keys


# --- signals at any line --------------------------------------------------------------------------


cut_off_things_warn = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def interrupt_after() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    """Run a call with an alarm that raises; whether that ended it."""
    with alarm():
        yield interrupted


InterruptAfter = Callable[[Callable[[], object], float], bool]


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize(
    ("n_bytes", "most_s"), [(10, 150e-6), (40_000, 600e-6)], ids=["chunk", "file"]
)
def test_interrupted_enqueue(
    interrupt_after: InterruptAfter, connect: Connect, n_bytes: int, most_s: float
) -> None:
    """An interrupted enqueue published its message or did not; every other one arrives whole."""
    queue, readers = connect(n_readers=2, local_reader_ranks=(1,), chunk_bytes=16384, n_chunks=8)
    seed = random.getrandbits(32)
    delays = random.Random(seed)
    for index in range(200):
        sent = [index, bytes(n_bytes)]
        is_cut = interrupt_after(
            lambda sent=sent: queue.enqueue(sent), delays.uniform(1e-6, most_s)
        )
        queue.enqueue("next", PATIENCE_S)
        for reader in readers:
            got = [reader.dequeue(PATIENCE_S)]
            while got[-1] != "next":
                got.append(reader.dequeue(PATIENCE_S))
            allowed = [[sent, "next"], ["next"]] if is_cut else [[sent, "next"]]
            assert got in allowed, f"seed {seed}, round {index}"
    queue.close()
    for reader in readers:
        assert [] == list(reader)


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_interrupted_dequeue(interrupt_after: InterruptAfter, connect: Connect) -> None:
    """An interrupted dequeue loses at most the message that it was about to return."""
    queue, (reader,) = connect(n_chunks=8)
    seed = random.getrandbits(32)
    delays = random.Random(seed)
    for index in range(200):
        queue.enqueue(("first", index), PATIENCE_S)
        queue.enqueue(("second", index), PATIENCE_S)
        got: list[object] = []
        interrupt_after(
            lambda got=got: got.append(reader.dequeue(PATIENCE_S)), delays.uniform(1e-6, 300e-6)
        )
        while got[-1:] != [("second", index)]:
            got.append(reader.dequeue(PATIENCE_S))
        assert got in (
            [("first", index), ("second", index)],
            [("second", index)],
        ), f"seed {seed}, round {index}"


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_interrupted_handshake(interrupt_after: InterruptAfter) -> None:
    """After an interrupt of either end's call the other calls go on, and the rank is admitted."""
    seed = random.getrandbits(32)
    delays = random.Random(seed)
    for index in range(40):
        with new_queue() as queue, MessageReader(queue.export_handle(), 0) as reader:
            call = (queue.wait_until_ready, reader.wait_until_ready)[index % 2]
            interrupt_after(lambda call=call: call(PATIENCE_S), delays.uniform(1e-6, 3e-3))
            queue.wait_until_ready(PATIENCE_S)
            queue.enqueue(index, PATIENCE_S)
            try:
                got = reader.dequeue(PATIENCE_S)
            except ShmcastError as error:
                got = index if "interrupted" in str(error) else error
            assert index == got, f"seed {seed}, round {index}"


def test_out_of_descriptors() -> None:
    """With few descriptors left a queue is refused, with some more it is made; no abort."""
    program = (
        "import os, resource\n"
        "from shmcast import *\n"
        "import shmcast.remote\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "taken = [os.open('/dev/null', 0) for _ in range(50)]\n"
        "n_refused = 0\n"
        "while True:\n"
        "    try:\n"
        f"        MessageQueue(QueueConfig(local_reader_ranks=(), bind='{BIND}')).close()\n"
        "        break\n"
        "    except ConfigError as error:\n"
        "        assert 'RLIMIT_NOFILE' in str(error)\n"
        "        n_refused += 1\n"
        "        os.close(taken.pop())\n"
        "assert n_refused > 5, n_refused\n"
    )
    assert 0 == subprocess.run([sys.executable, "-c", program], check=False).returncode


# --- processes whose Python does not run ----------------------------------------------------------


def keep_gil(seconds: float) -> None:
    """Run no Python in this process for so long, as the loading of a large library does."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def write_and_stall(pipe: Connection, security: str) -> None:
    """Make a queue, run no Python for longer than an end that is cut off is waited for; publish."""
    with new_queue(security=security) as queue:
        pipe.send(queue.export_handle())
        pipe.recv()
        keep_gil(1.3 * Link.timing.resume_s)
        pipe.send("on")
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("m", PATIENCE_S)


@pytest.mark.parametrize("security", SECURITIES)
def test_attaching_to_a_stalled_writer(start_child: StartChild, security: str) -> None:
    """A writer that runs no Python for a while is waited for by who attaches meanwhile."""
    writer = start_child(write_and_stall, security)
    handle = writer.receive()
    writer.pipe.send("stall")
    with MessageReader(handle, 0) as reader:
        assert "m" == reader.dequeue(PATIENCE_S)


def attach_and_stall(pipe: Connection, handle: Handle) -> None:
    """Make a reader, run no Python for a while, then attach."""
    with MessageReader(handle, 0) as reader:
        keep_gil(1.3 * Link.timing.resume_s)
        reader.wait_until_ready(PATIENCE_S)
        pipe.send(reader.dequeue(PATIENCE_S))


@pytest.mark.parametrize("security", SECURITIES)
def test_attaching_of_a_stalled_reader(start_child: StartChild, security: str) -> None:
    """A reader whose process runs no Python for a while after it was made attaches after that."""
    with new_queue(security=security) as queue:
        child = start_child(attach_and_stall, queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("m")
        assert "m" == child.receive()


def stall_when_told(pipe: Connection) -> None:
    """Publish; run no Python while the connection is cut; publish on."""
    with new_queue() as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue("before")
        pipe.recv()
        keep_gil(1.3 * Link.timing.resume_s)
        queue.enqueue("after", PATIENCE_S)


def test_cut_while_the_writer_stalls(start_child: StartChild, behind_proxy: BehindProxy) -> None:
    """A cut while the writer's process runs no Python is no death for either side."""
    writer = start_child(stall_when_told)
    handle, proxy = behind_proxy(writer.receive())
    with MessageReader(handle, 0) as reader:
        assert "before" == reader.dequeue(PATIENCE_S)
        writer.pipe.send("stall")
        time.sleep(0.5)
        proxy.cut()
        assert "after" == reader.dequeue(PATIENCE_S)
    assert 0 == writer.join()


# --- the end of a process -------------------------------------------------------------------------


def run_program(program: str) -> tuple[subprocess.Popen[str], Handle]:
    """A program that prints the handle of the queue that it makes."""
    text = "import atexit, sys\nfrom shmcast import *\n" + program
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Handle.from_json(process.stdout.readline())


NEW_QUEUE = (
    f"queue = MessageQueue(QueueConfig(local_reader_ranks=(), bind='{BIND}'))\n"
    "print(queue.export_handle().to_json(), flush=True)\n"
    "queue.wait_until_ready(30)\n"
)


def test_exit_handler_that_sends() -> None:
    """What an exit handler sends, which was registered before the queue was made, arrives."""
    process, handle = run_program(
        "def shut_down():\n"
        "    queue.enqueue('goodbye')\n"
        "    queue.close()\n"
        "atexit.register(shut_down)\n" + NEW_QUEUE + "queue.enqueue('hello')\n"
    )
    with process, MessageReader(handle, 0) as reader:
        assert ["hello", "goodbye"] == list(reader)
        assert 0 == process.wait(PATIENCE_S)


def test_program_that_just_ends() -> None:
    """A writer that ends without `close` is as one that closed, for remote readers too."""
    process, handle = run_program(NEW_QUEUE + "queue.enqueue('hello')\n")
    with process, MessageReader(handle, 0) as reader:
        assert "hello" == reader.dequeue(PATIENCE_S)
        with pytest.raises(QueueClosed):
            reader.dequeue(PATIENCE_S)


def test_reader_whose_program_just_ends() -> None:
    """A reader that ends without `close` has left."""
    program = (
        "import sys\n"
        "from shmcast import *\n"
        "reader = MessageReader(Handle.from_json(sys.argv[1]), 0)\n"
        "reader.wait_until_ready(30)\n"
    )
    with new_queue() as queue:
        handle = queue.export_handle().to_json()
        with subprocess.Popen([sys.executable, "-c", program, handle]) as process:
            queue.wait_until_ready(PATIENCE_S)
            assert 0 == process.wait(PATIENCE_S)
        wait_for(lambda: has_left(queue, 0), "it is waited for")
        with MessageReader(queue.export_handle(), 0):
            queue.wait_until_ready(PATIENCE_S)
        assert 0 == queue.stats().losses


def test_closed_ends_keep_no_descriptors() -> None:
    """Ends that are closed and still referenced keep no descriptor."""
    wait_for_remote_ends()
    before = n_descriptors()
    ends = []
    for _ in range(20):
        queue = new_queue()
        reader = MessageReader(queue.export_handle(), 0)
        queue.wait_until_ready(PATIENCE_S)
        ends += [queue, reader]
    for end in ends:
        end.close()
    wait_for_remote_ends()
    wait_for(lambda: n_descriptors() <= before, "some descriptors are left")


def test_failure_of_the_writer(connect: Connect) -> None:
    """Readers on other hosts drain what a writer published, then hear why it failed."""
    queue, readers = connect(n_readers=2)
    queue.enqueue("m")
    queue.close(error=ValueError("of no use"))
    for reader in readers:
        assert "m" == reader.dequeue(PATIENCE_S)
        with pytest.raises(WriterFailed, match="ValueError: of no use"):
            reader.dequeue(PATIENCE_S)


def test_failure_of_a_reader(connect: Connect) -> None:
    """The writer hears why a reader on another host failed, and that is a loss."""
    queue, readers = connect(n_readers=2)
    queue.enqueue("m")
    readers[1].close(error=ValueError("of no use"))
    wait_for(lambda: has_left(queue, 1), "the writer did not hear that it left")
    with pytest.raises(ReaderLost, match="ValueError: of no use") as lost:
        enqueue_numbers(queue)
    assert (1,) == lost.value.ranks


@pytest.mark.usefixtures("only_in_calls")
def test_failure_of_a_writer_that_nobody_reads() -> None:
    """Who has not been admitted yet hears of the failure too."""
    with new_queue() as queue, MessageReader(queue.export_handle(), 0) as reader:
        wait_for(lambda: queue._writer.remote and queue._writer.remote.link.claims, "no claim came")
        queue.close(error="of no use")
        with pytest.raises(WriterFailed, match="of no use"):
            reader.wait_until_ready(PATIENCE_S)


# --- strangers before they have proved anything ---------------------------------------------------


def test_endless_message_of_a_stranger() -> None:
    """Without the token nobody fills the memory of a writer with security "none"."""
    with new_queue(security="none") as queue, contextlib.ExitStack() as undo:
        handle = queue.export_handle()
        assert queue._writer.remote is not None
        before = resident_bytes()
        stranger = undo.enter_context(
            socket.create_connection(("127.0.0.1", queue._writer.remote.port), PATIENCE_S)
        )
        stranger.sendall(garbage("frames"))
        with contextlib.suppress(OSError):
            for _ in range(200):
                stranger.sendall((b"\x03" + (1024).to_bytes(8, "big") + bytes(1024)) * 1000)
        assert resident_bytes() - before < 50e6
        with MessageReader(handle, 0) as reader:
            queue.wait_until_ready(PATIENCE_S)
            reader.wait_until_ready(PATIENCE_S)


def test_text_of_a_peer_is_cleaned() -> None:
    """What a peer calls itself, or says, stands in an error in one line of bounded length."""
    with new_queue(security="none") as queue:
        handle = queue.export_handle()
    with bare_writer(handle) as (bare, bare_handle), MessageReader(bare_handle, 0) as reader:
        identity, hello = bare.recv_multipart()
        session = unpack([hello]).session
        bare.send_multipart([identity, frame(Kind.REFUSAL, session, 0, b"\x1b[2J\n" * 100_000)])
        with pytest.raises(ProtocolError) as raised:
            reader.wait_until_ready(PATIENCE_S)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 2000


def test_silent_holder_is_not_called_alive(behind_proxy: BehindProxy) -> None:
    """Who claims the rank of a holder that does not answer waits, and is not refused."""
    with new_queue(security="none") as queue:
        hello = frame(Kind.HELLO, 7, 0, queue.export_handle().token.encode())
        with bare_reader(queue.export_handle()) as silent:
            silent.send(hello)
            queue.wait_until_ready(PATIENCE_S)
            with MessageReader(queue.export_handle(), 0) as claimant:
                deadline = time.monotonic() + 1.2 * Link.timing.resume_s
                while time.monotonic() < deadline:
                    queue.wait_until_ready(PATIENCE_S)
                    with pytest.raises(QueueNotReady):
                        claimant.wait_until_ready(0.1)


def test_relay_takes_over_the_settings() -> None:
    """The ring of a relay has the settings of the writer's that concern its readers."""
    settings: dict[str, Any] = {"receive": "copy", "spin_us": 0, "warn_after_s": 7}
    with (
        new_queue(2, **settings) as queue,
        MessageReader(queue.export_handle(), 0) as relay,
    ):
        relay.wait_until_ready(PATIENCE_S)
        assert isinstance(relay._source, RemoteAttachment)
        link = relay._source.remote.link
        wait_for(lambda: link._relay is not None, "it does not become the relay")
        config = link._relay._writer._config  # type: ignore[union-attr]  # a `Relay` need not have one
        assert ("copy", 0, 7) == (config.receive, config.spin_us, config.warn_after_s)


def test_a_writer_whose_io_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message says that it was not sent; the queue can be closed, and local readers go on."""

    def fail(*_: object) -> float:
        raise OSError(errno.EMFILE, "Too many open files")

    queue = new_queue(2, local_reader_ranks=(0,))
    with MessageReader(queue.export_handle(), 0) as reader:
        reader.wait_until_ready(PATIENCE_S)
        assert queue._writer.remote is not None
        link = queue._writer.remote.link
        with monkeypatch.context() as patch:
            patch.setattr(link, "run", fail)
            link.ask()
            wait_for(lambda: link.is_done, "its I/O does not fail")
        for number in range(3):
            with pytest.raises(ShmcastError, match=f"message {number} was published, but not sent"):
                queue.enqueue(number)
        queue.close()
        assert [0, 1, 2] == list(reader)


def test_the_garbage_collector_closes_a_writer_in_the_io_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An end that is collected while the I/O thread runs its link does not stop that thread."""
    queue = new_queue(1)
    assert queue._writer.remote is not None
    link, run = queue._writer.remote.link, queue._writer.remote.link.run

    def close_and_run(now: float) -> float:
        queue.close()
        return run(now)

    monkeypatch.setattr(link, "run", close_and_run)
    queue.enqueue("for nobody")
    link.ask()
    wait_for(lambda: link.is_done, "the I/O thread stands still")


def test_a_writer_that_can_t_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a constructor that fails late has opened is closed: descriptors, thread and port."""
    gc.collect()
    before = count_descriptors()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Roster, "__init__", fail)
        with pytest.raises(ConfigError, match="No space left"):
            new_queue(1)
    wait_for_descriptors(before)


def test_a_remote_reader_warns_as_the_writer_wants(caplog: pytest.LogCaptureFixture) -> None:
    """`warn_after_s` of the writer counts for readers on other hosts too."""
    with (
        new_queue(1, warn_after_s=0.1) as queue,
        MessageReader(queue.export_handle(), 0) as reader,
    ):
        reader.wait_until_ready(PATIENCE_S)
        with pytest.raises(QueueEmpty):
            reader.dequeue(0.5)
        wait_for(lambda: "rank 0 has waited" in caplog.text, "it said nothing")
