"""
Chaos: the ends of queues are started, stopped and killed at random, and every delivery is checked.

A program of its own, since it forks the ends and so must have no threads and no queue itself::

    python tests/chaos.py chaos bytes|tensors|remote SEED SECONDS
    python tests/chaos.py groups bytes|tensors|remote SEED KILLS
    python tests/chaos.py soak soak SEED SECONDS

What is sent follows from the seed and the message's number, and each reader makes it anew. An end
writes down what it has done in a page that it shares with this process, where that outlives it. The
figures go to stdout as JSON; a fault ends the run with a traceback and status 1.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import json
import logging
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Final

import attrs

from shmcast import (
    Handle,
    MessageQueue,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    ReaderLost,
    WriterLost,
)

#: A hang limit, never a claim about speed.
PATIENCE_S: Final = 30.0
MOST_READERS: Final = 4
MOST_KEPT: Final = 4
LONGEST_STOP_S: Final = 0.1
N_SAMPLES: Final = 40  # of what a process has, in a soak
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None)

# The words of an end's page, and what `STATE` says. `KILLS` is followed by a word for each rank.
STATE, COMMAND, FIRST, NEXT, INTENDED, PUBLISHED, LOSSES, KILLS = range(8)
HANDLE: Final = 1024  # the byte where a writer's handle begins
STARTED, ATTACHED, LEFT, CLOSED, LOST = range(5)
Page = Any  # a memoryview of int64


# --- what is sent ---------------------------------------------------------------------------------


class Bytes:
    """Messages of bytes, in chunks, blocks and memory files; they need no torch."""

    most_bytes = 200_000
    chunk_bytes: tuple[int, ...] = (1024, 65536)
    arena_bytes: tuple[int, ...] = (0, 300_000, 2_000_000)
    oob_threshold_bytes: tuple[int, ...] = (0, 20_000)
    share_of_remote_ranks = 0.0
    address = "127.0.0.1"
    n_groups = 6
    pause_s = 0.001  # of the engine between two acts, and of the ends
    pace_s = 0.03  # of the writer after a few messages

    def __init__(self) -> None:
        self.pattern: Any = random.Random(0).randbytes(self.most_bytes)

    def config(self, rng: random.Random) -> QueueConfig:
        ranks = range(rng.randint(1, MOST_READERS))
        local_ranks = [rank for rank in ranks if rng.random() >= self.share_of_remote_ranks]
        return QueueConfig(
            n_readers=len(ranks),
            local_reader_ranks=tuple(local_ranks),
            bind=None if len(local_ranks) == len(ranks) else f"tcp://{self.address}:0",
            n_chunks=rng.choice((1, 2, 16)),
            chunk_bytes=rng.choice(self.chunk_bytes),
            arena_bytes=rng.choice(self.arena_bytes),
            oob_threshold_bytes=rng.choice(self.oob_threshold_bytes),
            receive=rng.choice(("private", "copy")),
            on_reader_loss=rng.choice(("raise", "evict")),
            spin_us=rng.choice((0, 30)),
        )

    def go_to_other_host(self) -> None:
        """Move this process to where remote readers are: here."""

    def make(self, part: slice, queue: MessageQueue) -> Any:  # noqa: ARG002  # for tensors
        return PickleBuffer(bytearray(self.pattern[part]))

    def is_equal(self, part: slice, content: Any) -> bool:
        return bool(bytes(content) == self.pattern[part])

    def clear(self, content: Any) -> None:
        view = memoryview(content)
        view[:] = bytes(len(view))

    def is_clear(self, content: Any) -> bool:
        return bytes(content) == bytes(len(memoryview(content)))


class Tensors(Bytes):
    """Tensors of up to 64 MiB, some of them from `empty`."""

    most_bytes = 64 * 1024**2
    chunk_bytes = (4096, 2 * 1024**2)
    arena_bytes = (0, 1024**2, 16 * 1024**2, 256 * 1024**2)
    oob_threshold_bytes = (0, 100_000, 1024**2)
    pause_s = 0.005
    pace_s = 0.1

    def __init__(self) -> None:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # it starts its threads when it is imported
        import torch

        torch.set_num_threads(1)
        # Shared, or each fork would copy its page table.
        memory = mmap.mmap(-1, self.most_bytes)
        memory[:] = random.Random(0).randbytes(self.most_bytes)
        self.pattern = torch.frombuffer(memory, dtype=torch.uint8)

    def make(self, part: slice, queue: MessageQueue) -> Any:
        source = self.pattern[part]
        if part.start % 2:
            return source.clone()
        return queue.empty(source.shape, source.dtype).copy_(source)

    def is_equal(self, part: slice, content: Any) -> bool:
        return bool(content.equal(self.pattern[part]))

    def clear(self, content: Any) -> None:
        content.zero_()

    def is_clear(self, content: Any) -> bool:
        return not content.any()


class Remote(Tensors):
    """Tensors of up to 8 MiB, to readers of which most are remote."""

    most_bytes = 8 * 1024**2
    share_of_remote_ranks = 0.6

    def __init__(self) -> None:
        from shmcast.remote.loop import Link

        super().__init__()
        # For so long each death of a reader stops its queue, and a closed writer goes on.
        Link.timing = attrs.evolve(Link.timing, resume_s=1.0, linger_s=PATIENCE_S)


class Hosts(Remote):
    """The same with remote readers on another host: a network namespace, at OTHER_HOST."""

    address = "192.0.2.1"

    def go_to_other_host(self) -> None:
        with Path(os.environ["OTHER_HOST"]).open() as namespace:
            assert _libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0


class Soak(Remote):
    """Smaller ones, and so more of them."""

    most_bytes = 2 * 1024**2
    pace_s = 0.001

    def config(self, rng: random.Random) -> QueueConfig:
        return QueueConfig(
            n_readers=3,
            local_reader_ranks=(0, 1),
            bind="tcp://127.0.0.1:0",
            arena_bytes="32 MiB",
            oob_threshold_bytes="64 KiB",
            receive=rng.choice(("private", "copy")),
            on_reader_loss="evict",
        )


class Messages:
    """The messages of one queue; the reader of one may clear it and keep it for some time."""

    def __init__(self, kind: Bytes, seed: str) -> None:
        self._kind, self._seed = kind, seed
        self._kept: collections.deque[tuple[int, Any, bool]] = collections.deque()

    def _plan(self, number: int) -> tuple[int, list[slice]]:
        rng = random.Random(f"{self._seed} {number}")
        most_bytes = self._kind.most_bytes
        sizes = [int(most_bytes ** rng.random()) - 1 for _ in range(rng.choice((0, 1, 1, 2, 4)))]
        starts = [rng.randrange(most_bytes - size) for size in sizes]
        parts = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return rng.getrandbits(60), parts

    def make(self, number: int, queue: MessageQueue) -> tuple[int, list[Any]]:
        token, parts = self._plan(number)
        return token, [self._kind.make(part, queue) for part in parts]

    def check(self, number: int, message: tuple[int, list[Any]]) -> None:
        """Check that this is the message with the number, and whole."""
        token, parts = self._plan(number)
        assert token == message[0], f"another one came instead of message {number}"
        for part, content in zip(parts, message[1], strict=True):
            assert self._kind.is_equal(part, content), f"{part} of message {number} is torn"

    def keep(self, number: int, message: Any, *, is_cleared: bool) -> None:
        """Keep a message, cleared or as it came, and check it again when it is its turn to go."""
        if is_cleared:
            for content in message[1]:
                self._kind.clear(content)
        self._kept.append((number, message, is_cleared))
        if len(self._kept) > MOST_KEPT:
            self._drop_oldest()

    def drop_all(self) -> None:
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        number, message, is_cleared = self._kept.popleft()
        if not is_cleared:
            self.check(number, message)
            return
        for content in message[1]:
            assert self._kind.is_clear(content), f"message {number} has changed under its holder"


# --- what the ends do -----------------------------------------------------------------------------


def number_in(directory: str) -> int:
    return sum(1 for _ in Path(directory).iterdir())


def possessions() -> tuple[int, int, int]:
    """How many descriptors, threads and mappings of memory files this process has."""
    return (
        number_in("/proc/self/fd"),
        number_in("/proc/self/task"),
        Path("/proc/self/maps").read_text().count("memfd:"),
    )


@functools.cache
def possessions_at_start() -> tuple[int, int, int]:
    """Those of the engine, before it forks, and so of each end."""
    return possessions()


def wait_until_nothing_is_left() -> None:
    """Wait until a closed end has left nothing in its process."""
    gc.collect()
    if "shmcast.remote" in sys.modules:
        import zmq.utils.garbage

        wait_until(
            lambda: "shmcast-remote" not in {thread.name for thread in threading.enumerate()},
            "the thread for remote ends is left",
        )
        zmq.utils.garbage.gc.stop()  # pyzmq's own
    before = possessions_at_start()
    wait_until(lambda: possessions() == before, f"more is left than {before}")


def wait_until(condition: Callable[[], object], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.001)


def write(page: Page, kind: Bytes, seed: str, config: QueueConfig) -> None:
    """Be a writer until told to close."""
    rng, messages = random.Random(seed), Messages(kind, seed)
    queue = MessageQueue(config)
    text = queue.export_handle().to_json().encode()
    page.cast("B")[HANDLE : HANDLE + len(text)] = text
    page[STATE] = ATTACHED
    told: collections.Counter[int] = collections.Counter()
    while not page[COMMAND]:
        number = page[PUBLISHED]
        message = messages.make(number, queue)
        page[INTENDED] = number + 1
        while page[PUBLISHED] == number and not page[COMMAND]:
            try:
                queue.enqueue(message, timeout=rng.choice((0, 0.01, 0.1)))
                page[PUBLISHED] = number + 1
            except QueueFull:
                pass
            except ReaderLost as error:
                if "nobody is left" in str(error):
                    time.sleep(kind.pause_s)
                else:
                    told.update(error.ranks)
            page[LOSSES] = queue.stats().losses
            for rank, n_losses in told.items():
                assert n_losses <= page[KILLS + rank], f"rank {rank} was not killed"
            # A loss that was noticed between two calls is raised by the next one.
            assert config.on_reader_loss == "evict" or told.total() <= page[LOSSES]
        if rng.random() < 0.5:
            messages.keep(number, message, is_cleared=True)
        if rng.random() < 0.3:
            time.sleep(rng.expovariate(1 / kind.pace_s))
    page[LOSSES] = queue.stats().losses  # the door thread may have noticed some since
    queue.close()
    messages.drop_all()
    del queue, message
    wait_until_nothing_is_left()
    page[STATE] = CLOSED


def read(
    page: Page, kind: Bytes, seed: str, handle: Handle, rank: int, least: int | None, writer: Page
) -> None:
    """
    Be a reader until told to leave, or until the end.

    Args:
        page: to write down what happened.
        kind: of the messages.
        seed: of the queue.
        handle: of the queue.
        rank: to attach as.
        least: the number that the first message has at least; None for the rank's first reader.
        writer: the writer's page.
    """
    rng, messages = random.Random(f"{seed} {least}"), Messages(kind, seed)
    reader = message = None
    if rank not in handle.local_reader_ranks:
        kind.go_to_other_host()
    try:
        reader = MessageQueue.create_from_handle(handle, rank)
        reader.wait_until_ready(PATIENCE_S)
        start = reader._source.ring.next_sequence
        assert start == 0 if least is None else least <= start <= writer[INTENDED], (least, start)
        page[FIRST] = page[NEXT] = start
        page[STATE] = ATTACHED
        verdict, heard_at = LEFT, time.monotonic()
        while not page[COMMAND]:
            try:
                message = reader.dequeue(rng.choice((0.001, 0.1)))
            except QueueEmpty:
                assert time.monotonic() < heard_at + PATIENCE_S, "no message comes any more"
                continue
            heard_at = time.monotonic()
            number = page[NEXT]
            messages.check(number, message)
            page[NEXT] = number + 1
            if rng.random() < 0.2:
                messages.keep(number, message, is_cleared=rng.random() < 0.5)
            if rng.random() < 0.1:
                time.sleep(rng.expovariate(1 / kind.pause_s))
    except WriterLost:
        verdict = LOST
    except QueueClosed:
        verdict = CLOSED
    if reader is not None:
        reader.close()
    messages.drop_all()
    del reader, message
    wait_until_nothing_is_left()
    page[STATE] = verdict


class End:
    """A process that is an end of a queue."""

    def __init__(self, name: str, function: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self.page: Page = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self.page[FIRST] = -1
        self.is_killed = self.has_ended = False
        self._stopped_until: float | None = None
        self._idle_at = time.monotonic()  # when nobody waited for a change of its state
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the engine
                function(self.page, *arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)

    @property
    def is_busy(self) -> bool:
        """Whether it is attached, and neither told to go nor killed."""
        return self.page[STATE] == ATTACHED and not (self.page[COMMAND] or self.is_killed)

    def kill(self) -> None:
        self.is_killed = True
        os.kill(self.pid, signal.SIGKILL)

    def stop(self, seconds: float) -> None:
        self._stopped_until = time.monotonic() + seconds
        os.kill(self.pid, signal.SIGSTOP)

    def look(self, *, is_to_end: bool) -> None:
        """Let it go on when it is time, and see whether it has ended."""
        now = time.monotonic()
        if self._stopped_until is not None and now >= self._stopped_until:
            self._stopped_until = None
            os.kill(self.pid, signal.SIGCONT)
        if self.is_busy and not is_to_end:
            self._idle_at = now
        assert now < self._idle_at + 2 * PATIENCE_S, f"{self.name} hangs in {self.page[STATE]}"
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.has_ended = True
            code = os.waitstatus_to_exitcode(status)
            # It may have ended by itself just before it was killed.
            self.is_killed = self.is_killed and code == -signal.SIGKILL
            assert self.is_killed or code == 0, f"{self.name} ended with {code}"


class Group:
    """A queue: a writer, and a reader for each rank, which is replaced when it has gone."""

    def __init__(self, kind: Bytes, rng: random.Random) -> None:
        self.figures: collections.Counter[str] = collections.Counter()
        self._kind, self._seed, self._config = kind, f"{rng.getrandbits(64):x}", kind.config(rng)
        self.writer = End("writer", write, kind, self._seed, self._config)
        self.readers: dict[int, End] = {}
        # One by one, so that no death hides that another one hangs somebody; or at any time.
        self.is_hasty = rng.random() < 0.7
        self.is_ending = False
        self._ever_attached: set[int] = set()
        self._unreplaced: set[int] = set()  # ranks whose reader was killed
        self._n_killed = 0
        self._last_taken: list[tuple[End, int]] = []  # of those who were told the end

    @property
    def ends(self) -> list[End]:
        return [self.writer, *self.readers.values()]

    @property
    def is_whole(self) -> bool:
        """Whether a reader is attached at every rank."""
        return len(self.readers) == self._config.n_readers and all(e.is_busy for e in self.ends)

    @property
    def handle(self) -> Handle:
        text = bytes(self.writer.page.cast("B")[HANDLE:]).rstrip(b"\0")
        return Handle.from_json(text.decode())

    def kill(self, end: End) -> None:
        for rank, reader in self.readers.items():
            if reader is end:
                self.writer.page[KILLS + rank] += 1  # first: the writer may notice at once
        end.kill()
        self.is_ending |= end is self.writer
        self.figures[f"kills of {end.name}"] += 1

    def tell_to_go(self, end: End) -> None:
        """Have a reader leave, or the writer close the queue."""
        end.page[COMMAND] = 1
        self.is_ending |= end is self.writer
        self.figures["closes" if end is self.writer else "leaves"] += 1

    def stop(self, end: End, seconds: float) -> None:
        end.stop(seconds)
        self.figures["stops"] += 1

    def look(self) -> bool:
        """See who has ended, and replace readers; whether the group is over, as it should be."""
        for end in self.ends:
            if not end.has_ended:
                end.look(is_to_end=self.is_ending)
        for rank, end in list(self.readers.items()):
            if end.has_ended:
                self._take(rank, end)
        if not self.is_ending and self.writer.page[STATE] == ATTACHED:
            for rank in set(range(self._config.n_readers)) - set(self.readers):
                self._start_reader(rank)
        if not self.writer.has_ended or self.readers:
            return False
        self._check_end()
        self.figures["messages"] += self.writer.page[PUBLISHED]
        self.figures["queues"] += 1
        return True

    def _start_reader(self, rank: int) -> None:
        handle, writer = self.handle, self.writer.page
        least = writer[PUBLISHED] if rank in self._ever_attached else None
        name = "local" if rank in handle.local_reader_ranks else "remote"
        self.readers[rank] = End(name, read, self._kind, self._seed, handle, rank, least, writer)

    def _take(self, rank: int, end: End) -> None:
        """Take note of a reader that has ended."""
        del self.readers[rank]
        if end.page[FIRST] < 0:
            # A remote one may come too late on a loaded machine; the next one tries again.
            assert self.is_ending or end.name == "remote", f"{end.name} was not admitted"
            return
        self.figures["deliveries"] += end.page[NEXT] - end.page[FIRST]
        self._ever_attached.add(rank)
        self._unreplaced.discard(rank)
        if end.is_killed:
            self._n_killed += 1
            self._unreplaced.add(rank)
        elif end.page[STATE] == LEFT:
            assert end.page[COMMAND], "nobody told it to leave"
        else:
            self._last_taken.append((end, end.page[NEXT]))

    def _check_end(self) -> None:
        """Check what the readers were told, and after which message; and what the writer saw."""
        assert self.is_ending, "the writer has gone by itself"
        was_killed, n_published = self.writer.is_killed, self.writer.page[PUBLISHED]
        for end, n_taken in self._last_taken:
            assert end.page[STATE] == (LOST if was_killed else CLOSED), (end.name, was_killed)
            # What is on its way to other hosts dies with the writer.
            least = 0 if end.name == "remote" and was_killed else n_published
            most = self.writer.page[INTENDED] if was_killed else n_published
            assert least <= n_taken <= most, (end.name, least, n_taken, most)
        last_taken = {n_taken for end, n_taken in self._last_taken if end.name == "local"}
        assert len(last_taken) <= 1, f"one got less than another: {last_taken}"
        n_losses, least = self.writer.page[LOSSES], self._n_killed - len(self._unreplaced)
        assert was_killed or least <= n_losses <= self._n_killed, (least, n_losses)
        assert self.handle.local_address not in Path("/proc/net/unix").read_text()


# --- what happens to them -------------------------------------------------------------------------


def chaos(kind: Bytes, rng: random.Random, seconds: float) -> collections.Counter[str]:
    """Kill ends that are attached, in several queues at a time, and then let all others end."""
    groups: list[Group] = []
    figures: collections.Counter[str] = collections.Counter()
    until = time.monotonic() + seconds
    is_over = False
    while groups or not is_over:
        is_over = time.monotonic() > until and figures["kills of writer"] > 0
        if not is_over:
            groups += [Group(kind, rng) for _ in range(kind.n_groups - len(groups))]
            act(rng.choice(groups), rng)
        for group in list(groups):
            if is_over and group.is_whole:
                group.tell_to_go(group.writer)
            if group.look():
                groups.remove(group)
                figures.update(group.figures)
        time.sleep(rng.expovariate(1 / kind.pause_s))
    return figures


def act(group: Group, rng: random.Random) -> None:
    """Do something to one of the ends, if it is time."""
    ends = [group.writer] if rng.random() < 0.06 else list(group.readers.values())
    ends = [end for end in ends if end.is_busy]
    if not ends or not (group.is_hasty or group.is_whole):
        return
    end, chance = rng.choice(ends), rng.random()
    if chance < 0.1:
        group.tell_to_go(end)
    elif chance < 0.2:
        group.stop(end, rng.uniform(0, LONGEST_STOP_S))
    else:
        group.kill(end)


def kill_groups(kind: Bytes, rng: random.Random, n_kills: int) -> collections.Counter[str]:
    """Kill all ends of a queue at once, wherever they are in their lives, this many times."""
    names = set(Path("/dev/shm").iterdir())
    addresses: list[str] = []
    files: set[str] = set()
    for _ in range(n_kills):
        group = Group(kind, rng)
        until = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < until:
            time.sleep(0.001)
            group.look()
        if group.writer.page[STATE] == ATTACHED:
            addresses.append(group.handle.local_address)
        files |= memory_files(end.pid for end in group.ends)
        for end in group.ends:
            end.kill()
        for end in group.ends:
            os.waitpid(end.pid, 0)
    sockets = Path("/proc/net/unix").read_text()
    assert not any(address in sockets for address in addresses), "a socket is left"
    left_files = files & memory_files(path.name for path in Path("/proc").glob("[0-9]*"))
    assert not left_files, "memory is left"
    left = set(Path("/dev/shm").iterdir()) - names
    wait_until(lambda: not left.intersection(Path("/dev/shm").iterdir()), f"{left} are left")
    return collections.Counter({"kills of groups": n_kills, "memory files": len(files)})


def memory_files(pids: Iterable[int | str]) -> set[str]:
    """The inodes of shmcast's memory files that these processes have mapped or open."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:shmcast" in line:
                    found.add(line.split()[4])
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if str(descriptor.readlink()).startswith("/memfd:shmcast"):
                    found.add(str(descriptor.stat().st_ino))
    return found


def soak(kind: Bytes, rng: random.Random, seconds: float) -> dict[str, Any]:
    """
    Let readers come and go; the writer and the reader of rank 0 stay, and must not grow.

    Args:
        kind: of the messages.
        rng: what happens.
        seconds: for how long. Nothing may grow after the first half.
    """
    group = Group(kind, rng)
    wait_until(lambda: group.look() or group.readers, "the writer does not start")
    writer, reader = group.writer, group.readers[0]
    samples: dict[str, list[int]] = collections.defaultdict(list)
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        group.look()
        if time.monotonic() > start + len(samples["threads of writer"]) * seconds / N_SAMPLES:
            for name, size in (*sizes_of("writer", writer.pid), *sizes_of("reader", reader.pid)):
                samples[name].append(size)
        # Until the death of a remote one is noticed, everybody waits.
        passer = group.readers.get(rng.choice((1,) * 9 + (2,)))
        if passer and passer.is_busy:
            rng.choice((group.kill, group.tell_to_go))(passer)
        time.sleep(rng.expovariate(1 / 0.05))
    group.tell_to_go(writer)
    wait_until(group.look, "the queue does not end")
    for name, sizes in samples.items():
        slack = 16_384 if "KiB" in name else 8
        most = max(sizes[N_SAMPLES // 4 : N_SAMPLES // 2]) + slack
        assert max(sizes[N_SAMPLES // 2 :]) <= most, f"{name} grow: {sizes}"
    return {**group.figures, **samples}


def sizes_of(name: str, pid: int) -> Iterator[tuple[str, int]]:
    """What a process has, by name."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssShmem")):
            yield f"{line.split(':')[0]} in KiB of {name}", int(line.split()[1])
    yield f"descriptors of {name}", number_in(f"/proc/{pid}/fd")
    yield f"threads of {name}", number_in(f"/proc/{pid}/task")


def main(name: str, kind_name: str, seed: str, amount: str) -> None:
    logging.disable()  # a loss is a warning
    kinds = {"bytes": Bytes, "tensors": Tensors, "remote": Remote, "hosts": Hosts, "soak": Soak}
    kind = kinds[kind_name]()
    _, n_threads, _ = possessions_at_start()
    assert n_threads == 1, "a process that forks has one thread"
    gc.freeze()
    start = time.monotonic()
    run = {"chaos": chaos, "groups": kill_groups, "soak": soak}[name]
    figures = run(kind, random.Random(seed), int(amount))
    with contextlib.suppress(ChildProcessError):
        pid, _ = os.waitpid(-1, os.WNOHANG)
        raise AssertionError(f"process {pid} is left")
    wait_until_nothing_is_left()
    seconds = round(time.monotonic() - start, 1)
    json.dump({"seed": seed, "seconds": seconds, **figures}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
