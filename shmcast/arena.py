"""
Which block of the arena a buffer gets, and when it is free again. Only the writer allocates.

A block is free when every rank that was to read it has given it up or can't have it any more.
Lower addresses go first: their pages are reserved and warm; each fresh page costs a fault.
"""

from __future__ import annotations

import bisect
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from shmcast._ring import BUFFER_ALIGNMENT, Draft, RingWriter, address_of, new_bytearray
from shmcast.errors import MessageTooLarge
from shmcast.layout import Layout, round_up

if TYPE_CHECKING:
    from shmcast.locks import Process

__all__ = ["LEAST_BLOCK_BYTES", "LEAST_SHARED_BYTES", "Arena", "Block", "Places"]

#: `empty` makes no smaller tensor in a block of its own.
LEAST_BLOCK_BYTES: Final = 64 * 1024

# Buffers of one message share blocks, since each block costs the writer and every reader some µs.
# Who keeps one buffer keeps its block, so a block is small beside each that lies in it.
_MOST_SHARED_BYTES: Final = 1024**2
_LEAST_SHARE: Final = 16
#: A smaller buffer lies in the image, and is copied out of it sooner than it would be leased.
LEAST_SHARED_BYTES: Final = 8 * 1024

#: The holder, besides the readers, of a draft's block.
_WRITER: Final = -1

#: Where each buffer of a message lies: the offset in the data file and the block's slot; None for
#: one in the image.
Places = list[tuple[int, int] | None]

_MOST_AHEAD_BYTES: Final = 64 * 1024**2  # reserved beyond what is needed now


@attrs.define(eq=False)
class Block:
    """
    A range of whole pages in the data file.

    Attributes:
        offset: where it starts in the data file.
        n_bytes: how long it is.
        slot: its place in the table of given-up words.
        use: the number of its message + 1; 0 before there is one.
        holders: the ranks that have not given it up; `_WRITER` while there is a draft.
        disowned: the ranks that were struck while they may have had a lease of it, each with the
            process that has it.
        draft: the memory of the writer's tensor that lies in it.
    """

    offset: int
    n_bytes: int
    slot: int
    use: int = 0
    holders: set[int] = attrs.field(factory=set)
    disowned: dict[int, Process] = attrs.field(factory=dict)
    draft: weakref.ref[Draft] | None = None


class Arena:
    """
    The blocks of one queue. For one thread at a time, except for what `stats` reads.

    A signal handler may raise at any line; the next change then works out again what is free.

    Args:
        layout: where the arena is.
        ring: knows what was given up.
        reserve: makes sure that a range of the data file can be written; MessageTooLarge if not.
    """

    def __init__(
        self, layout: Layout, ring: RingWriter, reserve: Callable[[int, int], None]
    ) -> None:
        self._layout = layout
        self._ring = ring
        self._reserve = reserve
        self._reserved_until = layout.arena_offset
        # By offset. These two alone say which blocks exist; the rest follows from them.
        self._in_use: dict[int, Block] = {}
        self.pending: dict[int, Block] = {}  # of the message on its way
        self._drafts: weakref.WeakValueDictionary[int, Draft] = weakref.WeakValueDictionary()
        self._is_changing = True
        # Sorted by offset, and never two that touch: (offset, length).
        self._free: list[tuple[int, int]]
        self._free_slots: list[int]
        self._block_in: dict[int, Block]  # by slot
        self._ended_drafts_seen = 0
        self._watched: weakref.WeakSet[Process] = weakref.WeakSet()  # those in `Block.disowned`
        self._mend()

    @property
    def blocks(self) -> list[Block]:
        """The blocks in use."""
        return list({**self._in_use, **self.pending}.values())

    def allocate(self, n_bytes: int) -> Block | None:
        """
        A block of at least this many bytes, or None if there is none.

        Blocks that were given up are free after `reclaim`, which this calls only if it has to.
        """
        self._mend()
        n_bytes = round_up(n_bytes, mmap.PAGESIZE)
        index = self._first_fit(n_bytes)
        if index is None:
            self.reclaim()
            index = self._first_fit(n_bytes)
        if index is None:
            return None
        offset, free_bytes = self._free[index]
        if not self._has_memory_until(offset + n_bytes):
            return None
        self._is_changing = True
        rest = (offset + n_bytes, free_bytes - n_bytes)
        self._free[index : index + 1] = [rest] if rest[1] else []
        block = Block(offset, n_bytes, self._free_slots.pop())
        self.pending[offset] = self._block_in[block.slot] = block
        self._is_changing = False
        return block

    def _first_fit(self, n_bytes: int) -> int | None:
        if not self._free_slots:
            return None
        return next((i for i, (_, free) in enumerate(self._free) if free >= n_bytes), None)

    def allocate_buffer(self, n_bytes: int) -> Any:
        """Memory for a tensor that is copied while it is pickled: a block, if there is one."""
        if n_bytes < LEAST_BLOCK_BYTES:
            return new_bytearray(n_bytes)
        self.reclaim()
        block = self.allocate(n_bytes)
        if block is None:
            return new_bytearray(n_bytes)
        return self._ring.block_view(block.offset, n_bytes)

    def new_draft(self, n_bytes: int) -> Draft | None:
        """A block as the memory of a tensor; None if none is free, or it can't be mapped."""
        self.reclaim()
        block = self.allocate(n_bytes)
        if block is None:
            return None
        try:
            draft = self._ring.draft(block.offset, n_bytes)
        except OSError:
            self._give_back(block)
            return None
        self._drafts[draft.address] = draft
        block.draft = weakref.ref(draft)
        block.holders = {_WRITER}
        self._in_use[block.offset] = block
        del self.pending[block.offset]
        return draft

    def block_of(self, buffer: memoryview) -> Block | None:
        """
        The block that already holds this buffer of the message on its way, or None.

        Also None for a second buffer in the same block: each has a lease of its own.
        """
        offset = self._ring.offset_of(buffer)
        if offset is not None:
            return self.pending.get(offset)
        draft = self._drafts.get(address_of(buffer))
        if draft is None or draft.is_detached or draft.offset in self.pending:
            return None
        block = self.pending[draft.offset] = self._in_use[draft.offset]
        return block

    def place(self, buffers: Sequence[memoryview]) -> tuple[Places, list[Block]] | None:
        """
        Copy the buffers of a message into blocks, but for small ones; None if there are too few.

        A buffer that is kept keeps its block. So those that share one have each at least a 16th of
        it, and it has at most 1 MiB.

        Returns:
            Where each buffer lies, and the blocks.
        """
        places: Places = [None] * len(buffers)
        blocks: list[Block] = []
        rooms: list[list[int]] = []  # which buffers share a block
        end_bytes = most_bytes = 0
        for index, buffer in enumerate(buffers):
            n_bytes = len(buffer)
            if n_bytes < LEAST_SHARED_BYTES:
                continue
            block = self.block_of(buffer) if n_bytes >= LEAST_BLOCK_BYTES else None
            if block is not None:
                places[index] = block.offset, block.slot
                blocks.append(block)
                continue
            start_bytes = round_up(end_bytes, BUFFER_ALIGNMENT)
            most_bytes = min(most_bytes, _LEAST_SHARE * n_bytes)
            if start_bytes + n_bytes > most_bytes:
                rooms.append([])
                start_bytes, most_bytes = 0, min(_MOST_SHARED_BYTES, _LEAST_SHARE * n_bytes)
            rooms[-1].append(index)
            end_bytes = start_bytes + n_bytes
        lengths = [
            [round_up(len(buffers[index]), BUFFER_ALIGNMENT) for index in room] for room in rooms
        ]
        shared = self._allocate_all([sum(of_room) for of_room in lengths])
        if shared is None:
            return None
        for block, room, of_room in zip(shared, rooms, lengths, strict=True):
            offset = block.offset
            for index, length in zip(room, of_room, strict=True):
                self._ring.copy_to_block(offset, buffers[index])
                places[index] = offset, block.slot
                offset += length
        return places, [*blocks, *shared]

    def _allocate_all(self, sizes: Sequence[int]) -> list[Block] | None:
        """Blocks of these sizes, or None; found out before memory is reserved for any."""
        if not sizes:
            return []
        self.reclaim()
        self._mend()
        needed_bytes = sum(round_up(n_bytes, mmap.PAGESIZE) for n_bytes in sizes)
        if needed_bytes > sum(free_bytes for _, free_bytes in self._free):
            return None
        blocks = []
        for n_bytes in sizes:
            block = self.allocate(n_bytes)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def assign(self, blocks: Iterable[Block], use: int, ranks: Iterable[int]) -> None:
        """Record which use the blocks are for, and which ranks have to give them up."""
        self._settle_left()
        ranks = list(ranks)
        for block in blocks:
            self._ring.hold(block.slot, use, ranks)
            block.holders.update(ranks)
            block.use = use

    def settle(self) -> None:
        """End the message on its way: free its blocks unless it was published."""
        for block in list(self.pending.values()):
            self._settle(block)

    def _settle_left(self) -> None:
        """Settle what an interrupted message left; the one on its way has no use yet."""
        for block in list(self.pending.values()):
            if block.use:
                self._settle(block)

    def _settle(self, block: Block) -> None:
        if 0 < block.use <= self._ring.messages:
            self._in_use[block.offset] = block
            self.pending.pop(block.offset, None)
            self._free_if_unheld(block)
        elif block.draft is None:
            self._give_back(block)
        else:
            block.use = 0
            self._in_use[block.offset] = block
            block.holders.intersection_update({_WRITER} if block.draft() is not None else ())
            self.pending.pop(block.offset, None)
            self._free_if_unheld(block)

    def strike(self, rank: int, process: Process | None = None) -> None:
        """
        Stop waiting for a rank, in the ring and for the blocks that it holds.

        Args:
            rank: the rank.
            process: the process of its attachment, which keeps what it may have leased; None if it
                keeps nothing.
        """
        last_leased = self._ring.strike(rank)
        self.reclaim()
        for block in list(self._in_use.values()):
            if process is not None and rank in block.holders and block.use <= last_leased:
                self._watched.add(process)
                block.disowned[rank] = process  # before the next line: a signal may come
            block.holders.discard(rank)
            self._free_if_unheld(block)

    def strike_ended(self) -> None:
        """Free what struck ranks keep, where their process can't touch it any more."""
        for process in list(self._watched):
            if process.may_touch():
                continue
            for block in list(self._in_use.values()):
                for rank in [rank for rank, own in block.disowned.items() if own is process]:
                    del block.disowned[rank]
                self._free_if_unheld(block)
            self._watched.discard(process)

    def reclaim(self) -> None:
        """Free the blocks that were given up since the last call."""
        self._mend()
        self._settle_left()
        for slot, rank in self._ring.given_up_holds():
            block = self._block_in.get(slot)
            if block is not None:
                block.holders.discard(rank)
                block.disowned.pop(rank, None)
                self._free_if_unheld(block)
            self._ring.end_hold(slot, rank)  # last: a signal may come
        ended_drafts = self._ring.ended_drafts
        if ended_drafts == self._ended_drafts_seen:
            return
        for block in list(self._in_use.values()):
            if block.draft is not None and block.draft() is None:
                block.holders.discard(_WRITER)
                self._free_if_unheld(block)
        self._ended_drafts_seen = ended_drafts

    def _free_if_unheld(self, block: Block) -> None:
        if not (block.holders or block.disowned) and block.offset not in self.pending:
            self._give_back(block)

    def _has_memory_until(self, end: int) -> bool:
        """Whether everything below this offset can be written; reserves it if necessary."""
        start = self._reserved_until
        if end <= start:
            return True
        # A little ahead, so that a thousand new blocks do not take a thousand system calls.
        ahead_bytes = min((start - self._layout.arena_offset) // 8, _MOST_AHEAD_BYTES)
        for until in (min(end + ahead_bytes, self._layout.data_bytes), end):
            try:
                self._reserve(start, until - start)
            except MessageTooLarge:
                continue
            self._reserved_until = until
            return True
        return False

    def _give_back(self, block: Block) -> None:
        self._mend()
        self._is_changing = True
        self._in_use.pop(block.offset, None)
        self.pending.pop(block.offset, None)
        self._block_in.pop(block.slot, None)
        self._free_slots.append(block.slot)
        offset, length = block.offset, block.n_bytes
        index = bisect.bisect(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, before = self._free.pop(index)
            length += before
        self._free.insert(index, (offset, length))
        self._is_changing = False

    def _mend(self) -> None:
        """Work out again what is free, if a change was interrupted."""
        if not self._is_changing:
            return
        blocks = sorted(self.blocks, key=lambda block: block.offset)
        starts = [self._layout.arena_offset, *(block.offset + block.n_bytes for block in blocks)]
        ends = [*(block.offset for block in blocks), self._layout.data_bytes]
        gaps = zip(starts, ends, strict=True)
        self._free = [(start, end - start) for start, end in gaps if end > start]
        self._block_in = {block.slot: block for block in blocks}
        slots = set(range(self._layout.n_slots)) - self._block_in.keys()
        self._free_slots = sorted(slots, reverse=True)
        self._is_changing = False
