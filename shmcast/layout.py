"""
From a config to offsets: what is where in a segment. Arithmetic only; nothing is opened here.

::

    data file: the writer stores, readers load
    ┌────────┬───────────┬─────────┬───────────────┬─────────┬────────┬───────────┬───────┬─────────
    │ header │ published │ closing │ writer_sleeps │ failure │ epochs │ chunk 0 … │ guard │ arena: …
    └────────┴───────────┴─────────┴───────────────┴─────────┴────────┴───────────┴───────┴─────────
      a line   a line      a line    a line          8 lines   8 bytes  from a new  a page  blocks
                                                               a rank   page on             of pages

    control file: every end of the queue may store, and each word has its owner
    ┌──────────────┬─────────────┬─────────────────┬───────────┬─────────────────────┬───────────
    │ readers_word │ writer_word │ rank 0: cursor, │ rank 1: … │ rank 0: given_up    │ rank 1: …
    │              │             │ sleeps, left, … │           │ of slot 0, slot 1 … │
    └──────────────┴─────────────┴─────────────────┴───────────┴─────────────────────┴───────────
      a line         a line        a line a rank                 8 bytes a slot

A line is 128 bytes: two cache lines of 64, since processors fetch them in pairs.

Each word's owner, who loads it, and its range:

=============  =====================================  ========  ===================================
word           stored by                              loaded    range
=============  =====================================  ========  ===================================
published      the writer                             readers   messages so far; only grows
writer_cpu     the writer                             readers   1 + the CPU that it published on
                                                                last, 0 for none
closing        the writer, once                       readers   0 or 1
writer_sleeps  the writer                             readers   0 or 1
failure        the writer, once, before `closing`     readers   the length of the text behind it,
                                                                0 for none
epoch          the writer                             reader    offers and ends of the rank's
                                                                attachments so far; only grows
readers_word   any end, by atomic addition            readers   any; readers sleep on it
writer_word    any end, by atomic addition            writer    any; the writer sleeps on it
cursor         the rank's reader; the writer once,    writer    messages finished, up to published
               before it admits the reader
sleeps         the rank's reader; the writer          writer    0 or 1
               clears a dead one's
left           the rank's reader                      writer    the epoch that has left, 0 for
                                                                none; only grows
leased         the rank's reader                      writer    the last use that it may have
                                                                leased, 0 for none; only grows
guard          the writer                             readers   as published, and stored before it;
                                                                a private view may be older
cpu            the rank's reader                      writer    1 + the CPU that it finished a
                                                                message on last, 0 for none
given_up       the rank's reader                      writer    the slot's last use that the rank
                                                                has given up, 0 for none; only
                                                                grows
given_ups      the rank's reader                      writer    how often it gave up; only grows
=============  =====================================  ========  ===================================

A message is an image in its chunk: a header, a table with the length and place of every buffer,
the stream, then the buffers that have no block of their own, at multiples of 64 bytes. An image
that does not fit a chunk is in a block, or in a memory file of its own. Only `_ring` writes and
parses images.

A block is whole pages of the arena and holds one buffer, some that share it, or one image. While it
is in use it has a slot in the table of given-up words. A use is the number of its message + 1.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final, Literal, Self

import attrs

from shmcast.config import QueueConfig
from shmcast.errors import ConfigError, ProtocolError

__all__ = ["Layout"]

LINE_BYTES: Final = 128
WORD_BYTES: Final = 8

_MAGIC: Final = b"shmcast\0"
_VERSION: Final = 3
_HEADER: Final = struct.Struct("=8sQQQQQdQQ")
HEADER_BYTES: Final = _HEADER.size
_RECEIVE: Final = ("private", "copy")  # as numbers in the header

#: How many blocks can be in use at once.
MOST_SLOTS: Final = 4096

#: How long the text of a failure may be, in UTF-8. It fits a frame of the control socket too.
MOST_FAILURE_BYTES: Final = 1000


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


@attrs.frozen
class Layout:
    """
    The offsets and sizes of one segment, all in bytes from the start of their file.

    Every offset follows from the one before it.
    """

    n_readers: int
    n_chunks: int
    chunk_bytes: int
    # What else a reader needs of the writer's config; see `QueueConfig`.
    spin_us: int
    warn_after_s: float
    receive: Literal["private", "copy"]
    arena_bytes: int  # as configured; the file has whole pages, and the guard page before them

    # The data file.
    published_offset: int = attrs.field(init=False, default=round_up(HEADER_BYTES, LINE_BYTES))
    writer_cpu_offset: int = attrs.field(init=False)
    closing_offset: int = attrs.field(init=False)
    writer_sleeps_offset: int = attrs.field(init=False)
    failure_offset: int = attrs.field(init=False)
    epochs_offset: int = attrs.field(init=False)
    chunks_offset: int = attrs.field(init=False)
    chunk_stride_bytes: int = attrs.field(init=False)
    guard_offset: int = attrs.field(init=False)
    arena_offset: int = attrs.field(init=False)
    data_bytes: int = attrs.field(init=False)

    # The control file.
    readers_word_offset: int = attrs.field(init=False, default=0)
    writer_word_offset: int = attrs.field(init=False, default=LINE_BYTES)
    ranks_offset: int = attrs.field(init=False, default=2 * LINE_BYTES)
    n_slots: int = attrs.field(init=False)
    given_up_offset: int = attrs.field(init=False)
    control_bytes: int = attrs.field(init=False)

    # Within a rank's line.
    cursor_in_rank: int = attrs.field(init=False, default=0)
    sleeps_in_rank: int = attrs.field(init=False, default=WORD_BYTES)
    left_in_rank: int = attrs.field(init=False, default=2 * WORD_BYTES)
    given_ups_in_rank: int = attrs.field(init=False, default=3 * WORD_BYTES)
    leased_in_rank: int = attrs.field(init=False, default=4 * WORD_BYTES)
    cpu_in_rank: int = attrs.field(init=False, default=5 * WORD_BYTES)

    # The lock file: byte 0 is the writer's, byte 1 + rank is the reader's.
    locks_bytes: int = attrs.field(init=False)

    @writer_cpu_offset.default
    def _writer_cpu_offset(self) -> int:
        return self.published_offset + WORD_BYTES  # on its line, which the writer stores anyway

    @closing_offset.default
    def _closing_offset(self) -> int:
        return self.published_offset + LINE_BYTES

    @writer_sleeps_offset.default
    def _writer_sleeps_offset(self) -> int:
        return self.closing_offset + LINE_BYTES

    @failure_offset.default
    def _failure_offset(self) -> int:
        return self.writer_sleeps_offset + LINE_BYTES

    @epochs_offset.default
    def _epochs_offset(self) -> int:
        return self.failure_offset + round_up(WORD_BYTES + MOST_FAILURE_BYTES, LINE_BYTES)

    @chunks_offset.default
    def _chunks_offset(self) -> int:
        return round_up(self.epochs_offset + self.n_readers * WORD_BYTES, mmap.PAGESIZE)

    @chunk_stride_bytes.default
    def _chunk_stride_bytes(self) -> int:
        return round_up(self.chunk_bytes, LINE_BYTES)

    @guard_offset.default
    def _guard_offset(self) -> int:
        return round_up(self.chunks_offset + self.n_chunks * self.chunk_stride_bytes, mmap.PAGESIZE)

    @arena_offset.default
    def _arena_offset(self) -> int:
        return self.guard_offset + (mmap.PAGESIZE if self.arena_bytes else 0)

    @data_bytes.default
    def _data_bytes(self) -> int:
        return self.arena_offset + round_up(self.arena_bytes, mmap.PAGESIZE)

    @n_slots.default
    def _n_slots(self) -> int:
        return min(MOST_SLOTS, (self.data_bytes - self.arena_offset) // mmap.PAGESIZE)

    @given_up_offset.default
    def _given_up_offset(self) -> int:
        return self.ranks_offset + self.n_readers * LINE_BYTES

    @control_bytes.default
    def _control_bytes(self) -> int:
        return round_up(self.rank_given_up_offset(self.n_readers), mmap.PAGESIZE)

    @locks_bytes.default
    def _locks_bytes(self) -> int:
        return 1 + self.n_readers

    @classmethod
    def of(cls, config: QueueConfig) -> Self:
        """The layout of a queue with this config."""
        return cls(
            config.n_readers,
            config.n_chunks,
            config.chunk_bytes,
            config.spin_us,
            config.warn_after_s,
            config.receive,
            config.arena_bytes,
        )

    def header(self) -> bytes:
        """The first bytes of the data file."""
        return _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.n_readers,
            self.n_chunks,
            self.chunk_bytes,
            self.spin_us,
            self.warn_after_s,
            _RECEIVE.index(self.receive),
            self.arena_bytes,
        )

    @classmethod
    def from_header(cls, header: bytes, data_bytes: int) -> Self:
        """
        The layout of a data file of `data_bytes` bytes that starts with `header`.

        Raises:
            ProtocolError: the header is not of this version, or contradicts the file's size.
        """
        if len(header) < HEADER_BYTES:
            raise ProtocolError(
                f"the segment's header is cut: {len(header)} of {HEADER_BYTES} bytes"
            )
        magic, version, *values = _HEADER.unpack(header[:HEADER_BYTES])
        if magic != _MAGIC:
            raise ProtocolError(f"not a shmcast segment: it starts with {magic!r}")
        if version != _VERSION:
            raise ProtocolError(
                f"the segment has version {version}; this version of shmcast reads {_VERSION}"
            )
        n_readers, n_chunks, chunk_bytes, spin_us, warn_after_s, receive, arena_bytes = values
        try:
            config = QueueConfig(
                n_readers=n_readers,
                n_chunks=n_chunks,
                chunk_bytes=chunk_bytes,
                spin_us=spin_us,
                warn_after_s=warn_after_s,
                receive=_RECEIVE[receive] if receive < len(_RECEIVE) else receive,
                arena_bytes=arena_bytes,
            )
        except ConfigError as error:
            raise ProtocolError(f"the segment's header is damaged: {error}") from None
        layout = cls.of(config)
        if layout.data_bytes != data_bytes:
            raise ProtocolError(
                f"the segment's header is damaged: it calls for {layout.data_bytes} bytes, but the "
                f"file has {data_bytes}"
            )
        return layout

    def epoch_offset(self, rank: int) -> int:
        """Where the rank's epoch is in the data file."""
        return self.epochs_offset + rank * WORD_BYTES

    def rank_offset(self, rank: int) -> int:
        """Where the rank's line starts in the control file."""
        return self.ranks_offset + rank * LINE_BYTES

    def rank_given_up_offset(self, rank: int) -> int:
        """Where the rank's given-up words start in the control file, one for each slot."""
        return self.given_up_offset + rank * round_up(self.n_slots * WORD_BYTES, LINE_BYTES)

    def chunk_offset(self, index: int) -> int:
        """Where a chunk starts in the data file."""
        return self.chunks_offset + index * self.chunk_stride_bytes
