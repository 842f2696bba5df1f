"""The writer's transport: parts in, published messages out. It never sees an object."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from shmcast._ring import (
    IMAGE_HEADER_BYTES,
    Claim,
    EndLock,
    Mapping,
    RingWriter,
    image_bytes,
    image_pieces,
    read_image,
)
from shmcast._system import sleep
from shmcast.arena import Arena, Block
from shmcast.config import QueueConfig
from shmcast.control import Holder, WriterControl
from shmcast.door import say
from shmcast.errors import ProtocolError, QueueFull, ReaderLost, ShmcastError, is_foreign
from shmcast.layout import Layout
from shmcast.locks import WRITER_BYTE, LockFile
from shmcast.membership import Membership
from shmcast.roster import Door, Roster, log_after, ranks_text
from shmcast.segment import (
    FIXED_SIZE,
    Segment,
    add_seals,
    map_file,
    new_frozen_file,
    new_memory_file,
)
from shmcast.waiting import Wait, check_open, spin_ns_of

if TYPE_CHECKING:
    # zmq is imported only where there are remote readers.
    from shmcast.remote import RemoteWriter

__all__ = ["QueueStats", "Writer"]

_log = logging.getLogger("shmcast.queue")

_LOOK_PAUSE_NS: Final = 10_000_000  # a publishing writer looks around at most this often


@attrs.frozen
class QueueStats:
    """
    What a writer has done so far.

    Attributes:
        messages: how many messages were published.
        bytes: how many bytes of stream and buffers they had.
        oob_buffers: how many buffers left the stream.
        oob_bytes: how many bytes these had.
        waits: how often the writer polled or slept because the ring was full.
        wait_s: for how many seconds, all together.
        lag: how many messages each rank has still to finish, by rank; 0 for one that is gone.
        blocks_in_use: how many blocks of the arena were in use when the writer looked last.
        arena_bytes_in_use: how many bytes these have.
        blocks_held: how many of them each rank has not given up, by rank; those of tensors that
            outlived their reader too.
        fallbacks: how many messages went into a memory file of their own.
        losses: how many readers were lost.
    """

    messages: int
    bytes: int
    oob_buffers: int
    oob_bytes: int
    waits: int
    wait_s: float
    lag: tuple[int, ...]
    blocks_in_use: int
    arena_bytes_in_use: int
    blocks_held: tuple[int, ...]
    fallbacks: int
    losses: int


@attrs.define
class _Message:
    """
    A message on its way.

    Attributes:
        stream: its parts.
        buffers: those that left the stream.
        places: where each buffer lies in a block, or None for one that is in the image; empty if
            no buffer has a block.
        blocks: the message's blocks, that of the image too.
        image_bytes: the size of its image, without what lies in blocks.
        image_place: of the block of an image that is too large for a chunk.
        is_in_file: whether the image goes into a memory file.
        sent: the readers that have been sent that.
    """

    stream: list[bytes]
    buffers: list[memoryview]
    places: list[tuple[int, int] | None] = attrs.field(factory=list)
    blocks: list[Block] = attrs.field(factory=list)
    image_bytes: int = 0
    image_place: tuple[int, int] | None = None
    is_in_file: bool = False
    sent: set[Holder] = attrs.field(factory=set)


class Writer:
    """
    A segment and its ring, the readers that come to it, and what is on its way to them.

    Its methods are called in the turns of the end that has it, but for `nudge`, `stop`,
    `say_failed`, `stats` and `close_inherited`.

    Args:
        config: the settings.
        lock: of the end.
        address: of the control socket.
        token: what a reader must show.
        ranks: those that attach on this host; the others are remote.
        on_look: called when a wait has looked around.

    Raises:
        ConfigError: there is not enough memory, or `bind` can't be bound.
        OSError: there are not enough descriptors.

    Attributes:
        ring, arena, members, segment, control, remote: its parts; `remote` is None without remote
            ranks.
        roster: who reads.
    """

    def __init__(
        self,
        config: QueueConfig,
        lock: EndLock,
        *,
        address: str,
        token: str,
        ranks: tuple[int, ...],
        on_look: Callable[[], None],
    ) -> None:
        self._config, self._lock, self._on_look = config, lock, on_look
        self._ranks = tuple(range(config.n_readers))
        self._name = f"writer @{address}"
        self._spin_ns = spin_ns_of(config.spin_us, len(ranks))
        self._nonce = 0
        self._file: int | None = None  # the memory file of the message that is on its way
        self._has_warned = False
        self._fallbacks = 0
        self._failure: str | None = None  # why it was closed, if by an error
        self._n_handed_on = 0  # how many messages the remote ranks' link was given
        self._images: dict[int, Mapping] = {}  # of those in files, until they are handed on
        with contextlib.ExitStack() as undo:
            self.segment = Segment.create(Layout.of(config))
            undo.callback(self.segment.close_descriptors)
            self.ring = RingWriter(self.segment)
            self.arena = Arena(self.segment.layout, self.ring, self.segment.reserve_arena)
            self.members = Membership(self.segment, self.ring, self.arena, self._ranks)
            lock_file = LockFile.of(
                new_memory_file("shmcast-locks", self.segment.layout.locks_bytes)
            )
            undo.callback(lock_file.drop)
            add_seals(lock_file.descriptor, FIXED_SIZE)
            lock_file.hold(WRITER_BYTE)
            self._lock_file: LockFile | None = lock_file
            self.control = WriterControl(
                address=address,
                token=token,
                ranks=ranks,
                descriptors=(self.segment.data_descriptor, self.segment.control_descriptor),
                lock_file=lock_file,
                members=self.members,
            )
            undo.callback(self.control.close_descriptors)
            self.remote: RemoteWriter | None = None
            doors: list[Door[Any]] = [self.control]
            if len(ranks) < config.n_readers:
                self.remote = self._open_to_remote_ranks(ranks, token)
                undo.callback(self.remote.close)
                self.control.watch(self.remote.claimed.descriptor)
                doors.append(self.remote)
            self.roster = Roster(self.ring, self.members, doors, lock)
            undo.pop_all()

    def _open_to_remote_ranks(self, local_ranks: tuple[int, ...], token: str) -> RemoteWriter:
        from shmcast.remote import RemoteWriter, RingSizes

        config = self._config
        assert config.bind is not None  # the config has seen to that
        return RemoteWriter(
            bind=config.bind,
            security=config.security,
            ranks=tuple(sorted({*range(config.n_readers)} - {*local_ranks})),
            token=token,
            sizes=RingSizes(
                config.n_chunks,
                config.chunk_bytes,
                config.arena_bytes,
                config.spin_us,
                copies=config.receive == "copy",
                warn_after_us=int(min(config.warn_after_s, 1e12) * 1e6),
            ),
            members=self.members,
        )

    def wait_until_read(self, deadline: float) -> None:
        """Wait until every rank has taken every message; raises as `MessageQueue.close` does."""
        wait = Wait(deadline, self._config.warn_after_s, self._spin_ns)
        while True:
            self.look()
            self._on_look()
            behind = tuple(rank for rank, lag in enumerate(self.ring.lags()) if lag)
            if not behind:
                return
            self._check_open()
            slice_s = wait.slice_s(is_told=self.control.sees_every_death)
            if slice_s == 0:
                raise QueueFull(
                    f"not everything was read in {wait.elapsed_s:.3g} s: "
                    f"{self.roster.lag_text(behind)}",
                    behind,
                )
            self.ring.wait_for_space(*wait.spin_and_sleep_ns(slice_s), self._config.n_chunks)
            self._check_open()
            if wait.is_long():
                self._say_wait(wait, f"until everything is read: {self.roster.lag_text(behind)}")

    def publish(self, stream: list[bytes], buffers: list[memoryview], deadline: float) -> None:
        """
        Publish what has large buffers, or what the ring's `try_publish` could not.

        Raises what `MessageQueue.enqueue` does.
        """
        message = _Message(stream, buffers)
        try:
            self._place(message)
            self._publish_placed(message, deadline)
            self.hand_on()
        finally:
            self._images.pop(self.ring.messages, None)  # of one that was not published
            self._drop_file()
            self.arena.settle()

    def _place(self, message: _Message) -> None:
        """
        Copy the large buffers into blocks of the arena, and find a place for a large image.

        If there are not enough blocks, all of the message goes another way.
        """
        chunk_bytes = self._config.chunk_bytes
        placed = self.arena.place(message.buffers)
        message.places, message.blocks = placed or ([], [])
        has_blocks = placed is not None
        message.image_bytes = image_bytes(message.stream, message.buffers, message.places)
        if message.image_bytes > chunk_bytes and has_blocks:
            self.arena.reclaim()
            block = self.arena.allocate(message.image_bytes)
            if block is not None:
                message.image_place = block.offset, block.slot
                message.blocks.append(block)
            else:
                has_blocks, message.places, message.blocks = False, [], []
                message.image_bytes = image_bytes(message.stream, message.buffers)
        message.is_in_file = not has_blocks and message.image_bytes > chunk_bytes

    def _publish_placed(self, message: _Message, deadline: float) -> None:
        """Wait for a chunk and publish a message that has been placed."""
        wait: Wait | None = None  # one that need not wait asks for no time
        is_elsewhere = message.is_in_file or message.image_place is not None
        needed_bytes = IMAGE_HEADER_BYTES if is_elsewhere else message.image_bytes
        has_looked = False
        while True:
            match self.ring.try_claim(needed_bytes, has_looked):
                case Claim.DONE:
                    if self._publish_claimed(message):
                        return
                    for_chunk = False
                case Claim.FULL:
                    for_chunk = True
                case Claim.LOOK:
                    self.look()
                    has_looked = True
                    continue
                case Claim.RESERVE:
                    index = self.ring.messages % self._config.n_chunks
                    self.ring.set_reserved(self.segment.reserve_chunk(index, needed_bytes))
                    continue
                case Claim.NOBODY if self._config.on_reader_loss == "evict":
                    for_chunk = False
                case Claim.NOBODY:
                    raise ReaderLost(
                        f"nobody is left to publish to: {ranks_text(self._ranks)} left or "
                        f"died; wait_until_ready waits until they attach again",
                        self._ranks,
                    )
                case claim:
                    raise AssertionError(f"{claim!r} of {needed_bytes} bytes in a chunk")
            wait = wait or Wait(deadline, self._config.warn_after_s, self._spin_ns)
            self._pause(wait, for_chunk=for_chunk)

    def _publish_claimed(self, message: _Message) -> bool:
        """Publish into the claimed chunk. False if there is no room for its file for now."""
        ring, stream, buffers = self.ring, message.stream, message.buffers
        if message.is_in_file and self.remote and not self.remote.has_room(message.image_bytes):
            return False
        if not message.is_in_file:
            # Before it is published: afterwards a signal could come between.
            self.arena.assign(message.blocks, ring.messages + 1, ring.expected_ranks())
            drafts = [block.draft() for block in message.blocks if block.draft is not None]
            descriptor = self.segment.data_descriptor
            try:
                ring.publish(
                    stream, buffers, message.places, message.image_place, drafts, descriptor
                )
            except OSError as error:
                if is_foreign(error):
                    raise
                raise ShmcastError(
                    f"the message was published, but a tensor of `empty` in it can't be used any "
                    f"more: {error}"
                ) from error
            return True
        if self._file is None:
            self._warn_of_fallback()
            self._nonce += 1
            pieces = image_pieces(ring.messages, stream, buffers)
            self._file = new_frozen_file(pieces, message.image_bytes)
        # Sent before it is published, so that a reader never waits for it, and has it even if the
        # writer dies.
        if not self.control.send_file(self._nonce, self._file, message.sent):
            return False
        # Let go of first: a call that is cut off must not close it twice.
        file, self._file = self._file, None
        if self.remote is not None:
            self._images[ring.messages] = map_file(file, message.image_bytes, writable=False)
        self.control.keep_file(self._nonce, file)
        ring.publish_file(self._nonce, stream, buffers)
        self._fallbacks += 1
        return True

    def _warn_of_fallback(self) -> None:
        """Say once that the arena is too small for what the readers keep."""
        if self._has_warned or not self._config.arena_bytes:
            return
        self._has_warned = True
        stats = self.stats()
        log_after(
            self._lock,
            logging.WARNING,
            "%s has no free block for a message, so it goes into a memory file, which is "
            "slower: %d of at most %d blocks and %d bytes of arena_bytes = %d are in use, blocks "
            "held by rank: %s",
            self._name,
            stats.blocks_in_use,
            self.segment.layout.n_slots,
            stats.arena_bytes_in_use,
            self._config.arena_bytes,
            stats.blocks_held,
        )

    def hand_on(self, last_stream: Sequence[bytes] = ()) -> None:
        """
        Have what was published sent to the remote ranks; also what a signal left undone.

        Args:
            last_stream: the parts of the last message, if it has no buffers.
        """
        if self.remote is None:
            return
        try:
            self._hand_on(self.remote, last_stream)
        except ShmcastError:  # nobody sends any more, which is said once
            self._n_handed_on = self.ring.messages
            raise

    def _hand_on(self, remote: RemoteWriter, last_stream: Sequence[bytes]) -> None:
        if len(last_stream) == 1 and self._n_handed_on == self.ring.messages - 1:
            remote.publish(self._n_handed_on, memoryview(last_stream[0]), [])
            self._n_handed_on += 1
            return
        while self._n_handed_on < self.ring.messages:
            number = self._n_handed_on
            image = self._images.get(number)
            if image is None:  # chunk and blocks stay as they are until all have acknowledged it
                stream, buffers = self.ring.published_parts(number)
            else:
                stream, buffers = read_image(image, number)
            file_bytes = len(memoryview(image)) if image else 0
            remote.publish(number, stream, buffers, file_bytes)
            self._n_handed_on += 1
        self._images.clear()  # last: a signal may come between

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _pause(self, wait: Wait, *, for_chunk: bool) -> None:
        """Sleep a slice for the readers to go on, then look around; QueueFull if time is up."""
        self._check_open()
        slice_s = wait.slice_s(is_told=for_chunk and self.control.sees_every_death)
        if slice_s == 0 and wait.has_had_last_try:
            behind = self.roster.ranks_behind
            raise QueueFull(
                f"the message was not published in {wait.elapsed_s:.3g} s: "
                f"{self.roster.lag_text(behind)}",
                behind,
            )
        is_nudged = False
        if self.remote is not None:
            self.remote.leave_to_thread()
        if slice_s and for_chunk:
            is_nudged = self.ring.wait_for_space(*wait.spin_and_sleep_ns(slice_s))
        else:  # a reader takes a file from its socket without a word
            sleep(wait.untold_s(slice_s))
        self._check_open()
        if is_nudged or slice_s == 0 or not wait.has_just_begun:
            wait.has_had_last_try = slice_s == 0
            self.look()
            self._on_look()
        if wait.is_long():
            lag_text = self.roster.lag_text(self.roster.ranks_behind)
            self._say_wait(wait, f"to publish message {self.ring.messages}: {lag_text}")

    def _say_wait(self, wait: Wait, what_for: str) -> None:
        text = f"{self._name} has waited {wait.elapsed_s:.3g} s {what_for}"
        say(_log.warning, text)

    def look(self) -> None:
        """
        See to what others wait for.

        Raises:
            ReaderLost, ProtocolError: readers were lost, unless `on_reader_loss` is "evict".
        """
        self.survey()
        if self._config.on_reader_loss == "evict":
            self.log_lost()
            return
        lost = self.roster.take_lost()
        if not lost:
            return
        report = _report(lost)
        if any(is_damage for _, is_damage in lost.values()):
            raise ProtocolError(report)
        raise ReaderLost(report, tuple(lost))

    def step_alone(self) -> float:
        """
        Take the step of an end that is in no call, which raises what was lost later.

        Returns when it is due again.
        """
        known = dict(self.roster.unreported)
        due_at = self.survey()
        if self._config.on_reader_loss == "evict":
            self.log_lost()
        new = {
            rank: loss for rank, loss in self.roster.unreported.items() if known.get(rank) != loss
        }
        if self.roster.unreported:
            self.ring.look_again_in(0)  # so that the next call raises it
        if new:
            log_after(
                self._lock,
                logging.WARNING,
                "%s lost a reader, which its next call raises: %s",
                self._name,
                _report(new),
            )
        return due_at

    def log_lost(self) -> None:
        """Go on without the readers that were lost, and say so."""
        lost = self.roster.take_lost()
        if lost:
            log_after(
                self._lock,
                logging.WARNING,
                "%s goes on without a reader: %s",
                self._name,
                _report(lost),
            )

    def survey(self) -> float:
        """
        See who has left or died, and serve the doors.

        Returns when to do it again at the latest.
        """
        self.ring.look_again_in(_LOOK_PAUSE_NS)
        self.roster.survey()
        self.arena.strike_ended()
        self.hand_on()  # before a rank is taken in that does not get it
        due_at = self.control.serve()
        if self.remote is not None:
            self.remote.serve()
        return due_at

    def say_failed(self, text: str) -> None:
        """Have readers told why this end closes; the first reason counts."""
        self._failure = self._failure or text
        self.ring.say_failed(self._failure)

    def stop(self) -> None:
        """End the present wait and all later ones."""
        self.ring.stop()

    def nudge(self) -> None:
        """End the present wait, for something has come."""
        self.ring.nudge()

    def _check_open(self) -> None:
        check_open(self._lock, self._name)

    def say_closing(self) -> None:
        """Tell readers that nothing follows."""
        try:
            self.hand_on()
        except ShmcastError as error:
            _log.warning("%s closes: %s", self._name, error)
        # Nothing can be published any more, so what the closing mark says is true.
        self.ring.say_closing()

    def close(self) -> None:
        """Let everything go but the mappings, which end with this object."""
        with contextlib.ExitStack() as parts:
            parts.callback(self.segment.close)
            parts.callback(self._drop_lock_file)
            parts.callback(self.control.close, self._failure)
            if self.remote is not None:
                parts.callback(self.remote.close, self._failure)
        self._warn_of_missed()

    def _warn_of_missed(self) -> None:
        """Say what is left behind. An attached reader still takes it; others never can."""
        missed = self.roster.missed
        if missed:
            _log.warning(
                "%s closed before %s attached, which will never get what was published: %s; "
                "close(timeout=...) waits for that%s",
                self._name,
                ranks_text(tuple(missed)),
                ", ".join(f"{lag} messages for rank {rank}" for rank, lag in missed.items()),
                self.roster.attempts_text(missed),
            )

    def _drop_lock_file(self) -> None:
        if self._lock_file is not None:
            self._lock_file.give_back(WRITER_BYTE)
            lock_file, self._lock_file = self._lock_file, None
            lock_file.drop()

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""
        self._drop_file()
        self.control.close_descriptors()
        self.segment.close_descriptors()

    def stats(self) -> QueueStats:
        """What was done so far; from any thread."""
        ring, blocks = self.ring, self.arena.blocks
        return QueueStats(
            messages=ring.messages,
            bytes=ring.bytes,
            oob_buffers=ring.oob_buffers,
            oob_bytes=ring.oob_bytes,
            waits=ring.waits,
            wait_s=ring.wait_s,
            lag=ring.lags(),
            blocks_in_use=len(blocks),
            arena_bytes_in_use=sum(block.n_bytes for block in blocks),
            blocks_held=tuple(
                sum(rank in block.holders or rank in block.disowned for block in blocks)
                for rank in self._ranks
            ),
            fallbacks=self._fallbacks,
            losses=self.roster.losses,
        )


def _report(lost: dict[int, tuple[str, bool]]) -> str:
    return "; ".join(text for text, _ in lost.values())
