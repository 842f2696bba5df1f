"""The arena: which block a buffer gets, and when it is free again."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
from conftest import tracing
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

import shmcast.arena as arena_module
from shmcast import MessageTooLarge, QueueConfig
from shmcast._ring import Draft, RingWriter
from shmcast.arena import LEAST_BLOCK_BYTES, Arena, Block
from shmcast.layout import MOST_SLOTS, Layout
from shmcast.segment import Segment

PAGE = mmap.PAGESIZE
NO_LIMIT = 1 << 60

#: Holders of the model besides the ranks.
WRITER = "writer"


class CountingRing:
    """A ring that counts the blocks that were given up, and whose drafts may be refused."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self.n_given_up = 0
        self.refuses_drafts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ring, name)

    def given_up_holds(self) -> list[tuple[int, int]]:
        holds = self._ring.given_up_holds()
        self.n_given_up += len(holds)
        return holds

    def draft(self, offset: int, n_bytes: int) -> Draft:
        if self.refuses_drafts:
            raise OSError(12, "Cannot allocate memory")
        return self._ring.draft(offset, n_bytes)


@attrs.define(eq=False)
class FakeProcess:
    """A reader's process."""

    is_alive: bool = True

    def may_touch(self) -> bool:
        return self.is_alive


@attrs.define
class Held:
    """A block of a published message, as its readers see it."""

    slot: int
    use: int
    start: int
    end: int
    ranks: set[int]


class Rig:
    """An arena over a real ring; the test stores what readers would."""

    def __init__(self, n_pages: int, n_readers: int = 3) -> None:
        config = QueueConfig(
            n_readers=n_readers, n_chunks=1, chunk_bytes=4 * PAGE, arena_bytes=n_pages * PAGE
        )
        self.layout = Layout.of(config)
        self.segment = Segment.create(self.layout)
        self.ring = CountingRing(RingWriter(self.segment))
        self.reservable_until = NO_LIMIT
        self.reserved_until = self.layout.arena_offset
        self.n_reservations = 0
        self.held: list[Held] = []
        self.is_leasing = False  # whether the readers take what is published at once
        self.arena = Arena(self.layout, self.ring, self.reserve)
        assert self.segment.control is not None
        self._words = memoryview(self.segment.control).cast("Q")

    def reserve(self, offset: int, size_bytes: int) -> None:
        assert offset <= self.reserved_until, "there is a gap"
        self.n_reservations += 1
        if offset + size_bytes > min(self.reservable_until, self.layout.data_bytes):
            raise MessageTooLarge("no memory")
        self.reserved_until = max(self.reserved_until, offset + size_bytes)

    def close(self) -> None:
        self._words.release()
        self.segment.close()

    def publish(
        self, blocks: Iterable[Block], *, between: Callable[[], None] | None = None
    ) -> None:
        """Assign and publish, as the queue does; `between` runs where a signal could come."""
        ranks = self.ring.expected_ranks()
        blocks = list(blocks)
        self.arena.assign(blocks, self.ring.messages + 1, ranks)
        if between is not None:
            between()
        places = [(block.offset, block.slot) for block in blocks]
        buffers = [memoryview(b"x")] * len(blocks)
        drafts = [block.draft() for block in blocks if block.draft is not None]
        self.ring.publish([b"."], buffers, places, None, drafts, self.segment.data_descriptor)
        self.held += [
            Held(
                block.slot,
                self.ring.messages,
                block.offset,
                block.offset + block.n_bytes,
                set(ranks),
            )
            for block in blocks
        ]
        for rank in ranks if self.is_leasing else ():
            self.lease(rank)

    def send(self, sizes: Iterable[int], drafts: Iterable[Draft] = ()) -> bool:
        """A message with blocks of these sizes; whether there was room for it."""
        try:
            blocks = [self.arena.allocate(size) for size in sizes]
            if None in blocks:
                return False
            blocks += [self.arena.block_of(memoryview(draft)) for draft in drafts]
            self.publish([block for block in blocks if block is not None])
        finally:
            self.arena.settle()
        return True

    def give_up(self, slot: int, rank: int, use: int) -> None:
        """What a reader stores when its lease ends."""
        self._words[self.layout.rank_given_up_offset(rank) // 8 + slot] = use
        self._words[(self.layout.rank_offset(rank) + self.layout.given_ups_in_rank) // 8] += 1

    def lease(self, rank: int) -> None:
        """What a reader stores when it takes the last message."""
        self._words[(self.layout.rank_offset(rank) + self.layout.leased_in_rank) // 8] = (
            self.ring.messages
        )

    def give_up_all(self, ranks: Iterable[int] = range(64)) -> None:
        """These ranks give up everything that they hold."""
        for held in self.held:
            for rank in held.ranks.intersection(ranks):
                self.give_up(held.slot, rank, held.use)
                held.ranks.discard(rank)

    def strike(self, rank: int) -> None:
        """A rank is lost with all that it holds."""
        self.arena.strike(rank)
        for held in self.held:
            held.ranks.discard(rank)

    def check(self) -> None:
        """No two blocks overlap, none lies outside, each is whole pages, and slots are unique."""
        blocks = sorted(self.arena.blocks, key=lambda block: block.offset)
        end = self.layout.arena_offset
        for block in blocks:
            assert block.offset >= end, "two blocks overlap, or one lies before the arena"
            assert (0, 0) == (block.offset % PAGE, block.n_bytes % PAGE)
            assert block.n_bytes > 0
            end = block.offset + block.n_bytes
            assert end <= self.reserved_until, "it can't be written"
        assert end <= self.layout.data_bytes
        slots = {block.slot for block in blocks}
        assert len(blocks) == len(slots)
        assert slots <= set(range(self.layout.n_slots))
        by_offset = {block.offset: block for block in blocks}
        for held in self.held:
            if held.ranks:
                block = by_offset[held.start]
                assert (held.slot, held.use) == (block.slot, block.use), "it was used again"
                assert held.end == block.offset + block.n_bytes
                assert held.ranks <= block.holders | block.disowned.keys()

    def check_all_free(self) -> None:
        """Nothing is lost: the whole arena is one free range."""
        whole = self.layout.data_bytes - self.layout.arena_offset
        block = self.arena.allocate(whole)
        assert block is not None, f"lost: {self.arena.blocks}"
        assert (self.layout.arena_offset, whole) == (block.offset, block.n_bytes)
        self.arena.settle()
        assert [] == self.arena.blocks


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Make an arena of so many pages."""
    rigs: list[Rig] = []

    def make(n_pages: int, n_readers: int = 3) -> Rig:
        rigs.append(Rig(n_pages, n_readers))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


MakeRig = Callable[..., Rig]


# --- against a model ------------------------------------------------------------------------------


@attrs.define(eq=False)
class Entry:
    """What the model knows of a block."""

    block: Block
    n_pages: int
    is_pending: bool
    holders: set[int | str] = attrs.field(factory=set)
    draft: Draft | None = None
    is_published: bool = False


class ArenaMachine(RuleBasedStateMachine):
    """The arena against a list of blocks: what is free is what no block of the list covers."""

    N_PAGES = 24
    N_READERS = 3

    drafts = Bundle("drafts")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(self.N_PAGES, self.N_READERS)
        self.entries: list[Entry] = []
        self.processes = [FakeProcess() for _ in range(self.N_READERS)]
        self.last_leased = [0] * self.N_READERS
        self.evicted: dict[FakeProcess, int] = {}
        self.expected = set(range(self.N_READERS))

    @initialize()
    def admit_all(self) -> None:
        for rank in range(self.N_READERS):
            self.rig.ring.admit(rank, True)

    def teardown(self) -> None:
        self.rig.reservable_until = NO_LIMIT
        self.settle(is_assigned=False)
        for entry in list(self.entries):
            for holder in list(entry.holders):
                if holder == WRITER:
                    entry.draft = None
                else:
                    self.give_up((entry, int(str(holder).removeprefix("evicted "))))
        self.entries.clear()
        self.rig.check_all_free()
        self.rig.close()

    def first_fit(self, n_pages: int) -> int | None:
        """Where the model puts a block now; what nobody holds is free."""
        self.entries = [entry for entry in self.entries if entry.is_pending or entry.holders]
        start = self.rig.layout.arena_offset
        taken = sorted((entry.block.offset, entry.n_pages * PAGE) for entry in self.entries)
        for offset, n_bytes in [*taken, (self.rig.layout.data_bytes, 0)]:
            if offset - start >= n_pages * PAGE:
                break
            start = offset + n_bytes
        end = start + n_pages * PAGE
        has_memory = end <= max(self.rig.reserved_until, self.rig.reservable_until)
        return start if has_memory and end <= self.rig.layout.data_bytes else None

    @rule(n_pages=st.integers(1, 9), less_bytes=st.integers(0, PAGE - 1))
    def allocate(self, n_pages: int, less_bytes: int) -> None:
        """The lowest range of free pages that is long enough, or None if there is none."""
        expected = self.first_fit(n_pages)
        self.rig.arena.reclaim()
        block = self.rig.arena.allocate(n_pages * PAGE - less_bytes)
        assert expected == (None if block is None else block.offset)
        if block is not None:
            assert (n_pages * PAGE, 0, set()) == (block.n_bytes, block.use, block.holders)
            self.entries.append(Entry(block, n_pages, is_pending=True))

    @rule(target=drafts, n_pages=st.integers(1, 9))
    def new_draft(self, n_pages: int) -> Any:
        """The same for a draft, which the writer holds."""
        expected = self.first_fit(n_pages)
        draft = self.rig.arena.new_draft(n_pages * PAGE)
        assert expected == (None if draft is None else draft.offset)
        if draft is None:
            return multiple()
        (block,) = (block for block in self.rig.arena.blocks if block.offset == draft.offset)
        entry = Entry(block, n_pages, is_pending=False, holders={WRITER}, draft=draft)
        self.entries.append(entry)
        return entry

    @rule(entry=drafts)
    def take_draft(self, entry: Entry) -> None:
        """A draft's own block is taken once, and never again."""
        if entry.draft is None:
            return
        block = self.rig.arena.block_of(memoryview(entry.draft))
        if entry.is_pending or entry.is_published:
            assert block is None
        else:
            assert entry.block is block
            entry.is_pending = True

    @rule(entry=drafts)
    def drop_draft(self, entry: Entry) -> None:
        """The writer gives a tensor up; not one of the message on its way, which pins it."""
        if entry.is_pending:
            return
        entry.draft = None
        entry.holders.discard(WRITER)

    @precondition(lambda self: self.expected)
    @rule(target=leases)
    def publish(self) -> Any:
        """Publish all that is on its way, for whoever is expected now."""
        pending = [entry for entry in self.entries if entry.is_pending]
        assert sorted(self.expected) == self.rig.ring.expected_ranks()
        self.rig.publish([entry.block for entry in pending])
        self.rig.held.clear()  # the model knows better
        self.rig.arena.settle()
        for entry in pending:
            entry.is_pending, entry.is_published = False, True
            entry.holders |= self.expected
        return multiple(*((entry, rank) for entry in pending for rank in self.expected))

    @rule(is_assigned=st.booleans())
    def settle(self, is_assigned: bool) -> None:
        """A message that fails gives back its blocks, but for drafts, which stay as they were."""
        pending = [entry for entry in self.entries if entry.is_pending]
        if is_assigned:
            blocks = [entry.block for entry in pending]
            self.rig.arena.assign(blocks, self.rig.ring.messages + 1, self.expected)
        self.rig.arena.settle()
        for entry in pending:
            entry.is_pending = False
            if entry.draft is None:
                self.entries.remove(entry)

    @rule(lease=consumes(leases))
    def give_up(self, lease: tuple[Entry, int]) -> None:
        """A reader's lease ends, also one of a live reader that is not waited for."""
        entry, rank = lease
        evicted = f"evicted {rank}"
        if not entry.holders & {rank, evicted}:
            return  # the reader died, or never took it
        self.rig.give_up(entry.block.slot, rank, entry.block.use)
        entry.holders -= {rank, evicted}

    @rule(rank=st.integers(0, N_READERS - 1))
    def lease(self, rank: int) -> None:
        """A reader takes all that there is for it."""
        if rank in self.expected:
            self.rig.lease(rank)
            self.last_leased[rank] = self.rig.ring.messages

    @rule(rank=st.integers(0, N_READERS - 1), is_alive=st.booleans())
    def strike(self, rank: int, is_alive: bool) -> None:
        """A rank is lost with what it holds; one that is alive keeps what it may have leased."""
        if rank not in self.expected:
            return
        process, self.processes[rank] = self.processes[rank], FakeProcess()
        self.rig.arena.strike(rank, process if is_alive else None)
        self.expected.discard(rank)
        self.evicted[process] = rank
        for entry in self.entries:
            if rank in entry.holders:
                entry.holders.discard(rank)
                if is_alive and entry.block.use <= self.last_leased[rank]:
                    entry.holders.add(f"evicted {rank}")

    @precondition(lambda self: self.evicted)
    @rule(choice=st.randoms(use_true_random=False))
    def end_evicted(self, choice: Any) -> None:
        """What an evicted reader had is free when its process has ended."""
        process = choice.choice(list(self.evicted))
        rank = self.evicted.pop(process)
        process.is_alive = False
        for entry in self.entries:
            if entry.block.disowned.get(rank) is process:
                entry.holders.discard(f"evicted {rank}")
        self.rig.arena.strike_ended()

    @rule(rank=st.integers(0, N_READERS - 1))
    def admit(self, rank: int) -> None:
        """A new attachment holds nothing of what its rank held before."""
        if rank not in self.expected:
            self.rig.ring.admit(rank, False)
            self.expected.add(rank)

    @rule(n_pages=st.integers(0, N_PAGES))
    def limit_memory(self, n_pages: int) -> None:
        """From now on this much can be reserved."""
        self.rig.reservable_until = self.rig.layout.arena_offset + n_pages * PAGE

    @invariant()
    def is_consistent(self) -> None:
        self.rig.check()
        blocks = {block.offset: block for block in self.rig.arena.blocks}
        for entry in self.entries:
            if entry.is_pending or entry.holders:
                assert entry.block is blocks[entry.block.offset]
                ranks = {holder for holder in entry.holders if isinstance(holder, int)}
                if not entry.is_pending:
                    assert ranks <= entry.block.holders


TestAgainstModel = ArenaMachine.TestCase
TestAgainstModel.settings = settings(max_examples=120, stateful_step_count=40)
TestAgainstModel.__doc__ = (
    "Whatever is asked of the arena, in any order, it does as the model does."
)


# --- one claim each -------------------------------------------------------------------------------


def test_lowest_first(make_rig: MakeRig) -> None:
    """A block comes from the lowest gap that is long enough, and gaps that touch become one."""
    rig = make_rig(10, n_readers=1)
    offset = rig.layout.arena_offset
    for _ in range(5):
        assert rig.send([2 * PAGE])
    assert not rig.send([PAGE])
    for index in (1, 3, 2):  # the two outer ones first, then what joins them
        rig.give_up(rig.held[index].slot, 0, rig.held[index].use)
        rig.held[index].ranks.clear()
    block = rig.arena.allocate(6 * PAGE)
    assert block is not None
    assert offset + 2 * PAGE == block.offset
    rig.check()


def test_free_after_the_last_holder(make_rig: MakeRig) -> None:
    """A block is free when every rank has given it up or is struck, and not before."""
    rig = make_rig(1)
    assert rig.send([PAGE])
    slot, use = rig.held[0].slot, rig.held[0].use
    assert rig.arena.allocate(1) is None
    rig.give_up(slot, 0, use)
    assert rig.arena.allocate(1) is None
    rig.arena.strike(1)
    assert rig.arena.allocate(1) is None
    rig.give_up(slot, 2, use)
    assert rig.arena.allocate(1) is not None


def test_an_older_use_does_not_count(make_rig: MakeRig) -> None:
    """What a rank gave up of a slot's earlier use does not free the next one."""
    rig = make_rig(1, n_readers=2)
    for _ in range(3):
        assert rig.send([PAGE])
        rig.give_up(rig.held[-1].slot, 0, rig.held[-1].use)
        rig.held[-1].ranks.discard(0)
        assert not rig.send([PAGE])
        rig.give_up_all()
    assert {rig.held[0].slot} == {held.slot for held in rig.held}


def test_reservation_that_fails(make_rig: MakeRig) -> None:
    """Where memory can't be reserved there is no block, and nothing is lost by the attempt."""
    rig = make_rig(16)
    rig.reservable_until = rig.layout.arena_offset + 4 * PAGE
    first = rig.arena.allocate(3 * PAGE)
    assert first is not None
    for _ in range(5):
        assert rig.arena.allocate(2 * PAGE) is None
    second = rig.arena.allocate(PAGE)
    assert second is not None
    assert first.offset + 3 * PAGE == second.offset
    assert rig.arena.allocate(PAGE) is None
    rig.check()
    rig.arena.settle()
    rig.reservable_until = NO_LIMIT
    rig.check_all_free()


def test_few_reservations(make_rig: MakeRig) -> None:
    """A thousand new blocks take few system calls, and reserve little that is not used."""
    rig = make_rig(16_000)
    for index in range(1000):
        assert rig.arena.allocate(10 * PAGE) is not None
        used = (index + 1) * 10 * PAGE
        ahead = rig.reserved_until - rig.layout.arena_offset - used
        assert 0 <= ahead <= max(used // 8 + PAGE, 64 * 1024**2)
    assert rig.n_reservations < 100
    before = rig.n_reservations
    rig.arena.settle()
    for _ in range(1000):
        assert rig.arena.allocate(10 * PAGE) is not None
    assert before == rig.n_reservations


def test_no_free_slot(make_rig: MakeRig) -> None:
    """With all slots in use there is no block although there is room, until one comes back."""
    rig = make_rig(MOST_SLOTS + 100, n_readers=1)
    assert MOST_SLOTS == rig.layout.n_slots
    while rig.ring.messages * 64 < MOST_SLOTS:
        assert rig.send([PAGE] * 64)
    assert rig.arena.allocate(PAGE) is None
    assert rig.arena.new_draft(PAGE) is None
    rig.check()
    rig.give_up(rig.held[1000].slot, 0, rig.held[1000].use)
    rig.held[1000].ranks.clear()
    block = rig.arena.allocate(PAGE)
    assert block is not None
    assert rig.held[1000].slot == block.slot
    assert rig.arena.allocate(PAGE) is None
    rig.check()
    rig.arena.settle()
    rig.give_up_all()
    rig.check_all_free()


def test_cost_with_many_blocks(make_rig: MakeRig) -> None:
    """With 4000 blocks held, only those that were given up are looked at, each once a rank."""
    rig = make_rig(MOST_SLOTS + 100, n_readers=2)
    for _ in range(50):
        assert rig.send([PAGE] * 80)
    rig.ring.n_given_up = 0
    rig.give_up_all([0])
    for _ in range(3):
        rig.arena.reclaim()
    assert (4000, 4000) == (rig.ring.n_given_up, len(rig.arena.blocks))
    for held in rig.held[:5]:
        rig.give_up(held.slot, 1, held.use)
        for _ in range(3):
            rig.arena.reclaim()
    assert (4005, 3995) == (rig.ring.n_given_up, len(rig.arena.blocks))


def test_ended_process(make_rig: MakeRig) -> None:
    """What a rank of a living process leased stays until that process ends; the rest is free."""
    rig = make_rig(3, n_readers=1)
    for _ in range(2):
        assert rig.send([PAGE])
    rig.lease(0)
    assert rig.send([PAGE])
    assert not rig.send([PAGE])
    process = FakeProcess()
    rig.arena.strike(0, process)
    assert [1, 2] == sorted(block.use for block in rig.arena.blocks)
    rig.arena.strike_ended()
    assert 2 == len(rig.arena.blocks)
    rig.ring.admit(0, False)
    assert rig.send([PAGE])  # of the rank's next attachment
    rig.give_up(rig.held[0].slot, 0, rig.held[0].use)
    process.is_alive = False
    rig.arena.strike_ended()
    assert [4] == [block.use for block in rig.arena.blocks]


def test_no_arena() -> None:
    """With `arena_bytes` = 0 there is no block, no draft, and memory is the heap's."""
    rig = Rig(0)
    assert rig.arena.allocate(1) is None
    assert rig.arena.new_draft(LEAST_BLOCK_BYTES) is None
    assert isinstance(rig.arena.allocate_buffer(LEAST_BLOCK_BYTES), bytearray)
    assert [] == rig.arena.blocks
    rig.close()


def test_allocated_buffer(make_rig: MakeRig) -> None:
    """Memory for a copied tensor is a block's where it is worth one and there is one."""
    rig = make_rig(LEAST_BLOCK_BYTES // PAGE + 1)
    small = rig.arena.allocate_buffer(LEAST_BLOCK_BYTES - 1)
    large = rig.arena.allocate_buffer(LEAST_BLOCK_BYTES + 1)
    none_left = rig.arena.allocate_buffer(LEAST_BLOCK_BYTES)
    assert [LEAST_BLOCK_BYTES - 1, LEAST_BLOCK_BYTES + 1, LEAST_BLOCK_BYTES] == [
        memoryview(memory).nbytes for memory in (small, large, none_left)
    ]
    assert [True, False, True] == [
        isinstance(memory, bytearray) for memory in (small, large, none_left)
    ]
    memoryview(large)[:] = b"z" * (LEAST_BLOCK_BYTES + 1)
    (block,) = rig.arena.blocks
    assert block is rig.arena.block_of(memoryview(large))
    assert rig.arena.block_of(memoryview(small)) is None
    view = memoryview(rig.segment.data or b"")
    assert b"z" * (LEAST_BLOCK_BYTES + 1) == view[block.offset : block.offset + large_bytes(large)]
    rig.arena.settle()
    assert rig.arena.block_of(memoryview(large)) is None  # its message is over
    rig.check_all_free()


def large_bytes(memory: Any) -> int:
    """How long a buffer is."""
    return memoryview(memory).nbytes


def test_draft_of_another_queue(make_rig: MakeRig) -> None:
    """Another arena's draft has no block here, and neither has other memory."""
    here, there = make_rig(4), make_rig(4)
    draft = there.arena.new_draft(PAGE)
    own = here.arena.new_draft(PAGE)
    assert draft is not None
    assert own is not None
    assert own.offset == draft.offset
    assert here.arena.block_of(memoryview(draft)) is None
    assert here.arena.block_of(memoryview(bytearray(PAGE))) is None
    assert here.arena.block_of(memoryview(own)) is not None
    here.check()


def test_draft_that_is_refused(make_rig: MakeRig) -> None:
    """A draft that the kernel does not map gives its block back."""
    rig = make_rig(2)
    rig.ring.refuses_drafts = True
    assert rig.arena.new_draft(PAGE) is None
    assert [] == rig.arena.blocks
    rig.check_all_free()


def test_draft_outlives_its_message(make_rig: MakeRig) -> None:
    """A published draft's block is free when readers and writer have let go, in any order."""
    for writer_is_first in (True, False):
        rig = make_rig(1, n_readers=2)
        draft = rig.arena.new_draft(PAGE)
        assert draft is not None
        assert rig.send([], [draft])
        assert draft.is_detached
        assert rig.arena.block_of(memoryview(draft)) is None
        if writer_is_first:
            del draft
            assert rig.arena.allocate(1) is None
            rig.give_up_all()
        else:
            rig.give_up_all()
            assert rig.arena.allocate(1) is None
            del draft
        rig.check_all_free()


# --- interrupts -----------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted(call: Callable[[], object], number: int) -> str | None:
    """Run a call and raise at this instruction of the arena's code; where that was, if it came."""
    count = 0
    place = None

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count, place
        if frame.f_code.co_filename != arena_module.__file__:
            return None
        frame.f_trace_opcodes = True
        # Before a generator's first line no handler runs.
        if event == "opcode" and frame.f_lineno is not None:
            count += 1
            if count == number:
                place = f"{frame.f_code.co_name}, line {frame.f_lineno}"
                raise Interrupt
        return trace

    with contextlib.suppress(Interrupt), tracing(trace):
        call()
    return place


def failures_of(call: Callable[[Rig], object], check: Callable[[Rig], object]) -> list[str]:
    """Where the call was interrupted, for all those places after which the check fails."""
    failures: list[str] = []
    number = 0
    while True:
        number += 1
        rig = used_rig()
        place = interrupted(lambda rig=rig: call(rig), number)
        if place is None:
            rig.close()
            assert number > 50, "hardly anything was interrupted"
            return failures
        try:
            check(rig)
        except AssertionError as error:
            text = f"{place}: {str(error)[:50].splitlines()[0]}"
            failures += [text] if text not in failures else []
        rig.close()


def used_rig() -> Rig:
    """An arena with a gap between blocks that are held."""
    rig = Rig(12, n_readers=2)
    rig.is_leasing = True
    for _ in range(3):
        assert rig.send([2 * PAGE])
    rig.give_up(rig.held[1].slot, 0, rig.held[1].use)
    rig.give_up(rig.held[1].slot, 1, rig.held[1].use)
    rig.held[1].ranks.clear()
    return rig


def send_two(rig: Rig) -> None:
    """A message with two blocks and a draft, whose tensor ends afterwards."""
    draft = rig.arena.new_draft(PAGE)
    rig.send([PAGE, 3 * PAGE], [draft] if draft is not None else [])


def test_interrupted_message() -> None:
    """A message that was interrupted at any instruction hurts no block, and loses none."""

    def check(rig: Rig) -> None:
        rig.check()
        rig.send([PAGE])
        rig.check()
        assert rig.send([PAGE])
        rig.check()
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(send_two, check)


def test_interrupted_message_is_given_up() -> None:
    """What an interrupted message published is free once the readers gave it up, even in vain."""

    def check(rig: Rig) -> None:
        rig.give_up_all()
        whole = rig.layout.data_bytes - rig.layout.arena_offset
        rig.send([whole])  # the first may find the interrupted one still on its way
        rig.check()
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(send_two, check)


def test_interrupted_message_then_a_loss() -> None:
    """A rank that is lost after an interrupted message holds none of its blocks for ever."""

    def check(rig: Rig) -> None:
        rig.strike(1)
        rig.check()
        rig.send([PAGE])
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(send_two, check)


def test_interrupted_message_then_an_eviction() -> None:
    """A live rank that is evicted after an interrupted message keeps what it holds."""

    def check(rig: Rig) -> None:
        held = [held for held in rig.held if 1 in held.ranks]
        rig.arena.strike(1, FakeProcess())
        for one in rig.held:
            one.ranks.discard(1)
        rig.give_up_all([0])
        while (block := rig.arena.allocate(PAGE)) is not None:
            for one in held:
                assert not one.start <= block.offset < one.end, "it is still read"
        rig.arena.settle()
        for one in held:
            rig.give_up(one.slot, 1, one.use)
        rig.check_all_free()

    assert [] == failures_of(send_two, check)


def test_interrupted_strike() -> None:
    """A strike that was interrupted and is made again frees what the rank held, and no more."""

    def check(rig: Rig) -> None:
        rig.strike(1)
        rig.check()
        rig.send([PAGE])
        rig.check()
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(lambda rig: rig.arena.strike(1), check)


def test_interrupted_eviction() -> None:
    """An eviction that was interrupted and is made again keeps what the live rank holds."""

    def evict(rig: Rig) -> None:
        rig.arena.strike(1, FakeProcess())

    def check(rig: Rig) -> None:
        evict(rig)
        held = [held for held in rig.held if 1 in held.ranks]
        rig.send([PAGE])
        rig.give_up_all([0])
        rig.check()
        while rig.arena.allocate(PAGE) is not None:
            rig.check()
        rig.arena.settle()
        for one in held:
            rig.give_up(one.slot, 1, one.use)
        rig.check_all_free()

    assert [] == failures_of(evict, check)


def test_interrupted_failure() -> None:
    """A message that failed and was interrupted in giving its blocks back loses none."""

    def fail(rig: Rig) -> None:
        draft = rig.arena.new_draft(PAGE)
        assert draft is not None
        try:
            rig.arena.allocate(PAGE)
            rig.arena.allocate(3 * PAGE)
            rig.arena.block_of(memoryview(draft))
            raise ValueError
        except ValueError:
            pass
        finally:
            rig.arena.settle()

    def check(rig: Rig) -> None:
        rig.check()
        rig.send([PAGE])
        rig.check()
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(fail, check)


def test_interrupted_twice() -> None:
    """A message cut off just before it was published, and again while it ends, loses no block."""

    def cut_off(rig: Rig) -> None:
        def interrupt() -> None:
            raise ValueError

        try:
            blocks = [rig.arena.allocate(PAGE), rig.arena.allocate(2 * PAGE)]
            rig.publish([block for block in blocks if block is not None], between=interrupt)
        except ValueError:
            pass
        finally:
            rig.arena.settle()

    def check(rig: Rig) -> None:
        rig.send([PAGE])
        rig.check()
        rig.give_up_all()
        rig.check_all_free()

    assert [] == failures_of(cut_off, check)
