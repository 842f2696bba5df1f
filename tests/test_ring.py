"""The compiled core by itself: images, both sides of a ring, the lock of an end, buffers."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import os
import random
import signal
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import numpy as np
import pytest
from conftest import PATIENCE_S, StartChild
from hypothesis import given, settings
from hypothesis import strategies as st

from shmcast import ProtocolError, QueueClosed, QueueConfig, QueueFull, ShmcastError
from shmcast._ring import (
    IMAGE_HEADER_BYTES,
    Claim,
    EndLock,
    Mapping,
    Memory,
    RingReader,
    RingWriter,
    StreamParts,
    copy_strided,
    image_bytes,
    image_pieces,
    new_bytearray,
    read_image,
)
from shmcast.layout import Layout
from shmcast.segment import Segment, new_memory_file

# torch may have started threads in this process; the forked children call nothing they could hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

WORD = struct.Struct("=Q")
HEADER = struct.Struct("=QQQQQ")
ENTRY_BYTES = 24  # a buffer's length, offset and slot
KIND_HERE, KIND_FILE, KIND_BLOCK = 1, 2, 3
PAGE = mmap.PAGESIZE
SLEEP_NS = int(10 * PATIENCE_S * 1e9)  # longer than a test may last


@attrs.define
class Ring:
    """A writer's segment and, for each rank, a reader that maps it too."""

    segment: Segment
    writer: RingWriter
    readers: list[RingReader]

    @property
    def layout(self) -> Layout:
        return self.segment.layout

    @property
    def data(self) -> memoryview:
        return memoryview(self.segment.data)

    @property
    def control(self) -> memoryview:
        return memoryview(self.segment.control)

    def reserve(self, size_bytes: int) -> None:
        """Reserve the next chunk up to this size, as the writer's end does."""
        index = self.writer.messages % self.layout.n_chunks
        self.writer.set_reserved(self.segment.reserve_chunk(index, size_bytes))

    def publish(self, stream: bytes, *buffers: bytes) -> Claim:
        """Publish a message as far as there is space; what the ring answered."""
        views = [memoryview(buffer) for buffer in buffers]
        size_bytes = image_bytes([stream], views)
        if self.writer.try_claim(size_bytes, True) == Claim.RESERVE:
            self.reserve(size_bytes)
        is_published = self.writer.try_publish([stream], views, True)
        return Claim.DONE if is_published else Claim(self.writer.try_claim(size_bytes, True))

    def publish_in_blocks(
        self, stream: bytes, *buffers: bytes, image_at: int | None = None
    ) -> None:
        """
        Publish a message whose buffers lie in blocks of the arena, a page for each.

        Args:
            stream: its stream.
            buffers: buffer i takes the slot i, and page i of the arena.
            image_at: the slot and page of the image, or None if it lies in the chunk.
        """
        views = [memoryview(buffer) for buffer in buffers]
        places = [(self.layout.arena_offset + slot * PAGE, slot) for slot in range(len(buffers))]
        self.segment.reserve_arena(self.layout.arena_offset, self.layout.arena_bytes)
        for (offset, _), view in zip(places, views, strict=True):
            self.writer.copy_to_block(offset, view)
        self.reserve(IMAGE_HEADER_BYTES if image_at is not None else 1024)
        block = None if image_at is None else self.place(image_at)
        descriptor = self.segment.data_descriptor
        self.writer.publish([stream], views, places, block, [], descriptor)

    def place(self, slot: int) -> tuple[int, int]:
        """The place of the block in this slot, as `publish_in_blocks` has it."""
        return self.layout.arena_offset + slot * PAGE, slot

    def lease(self) -> None:
        """Have every reader lease blocks."""
        for reader in self.readers:
            assert reader.lease_from(self.segment.data_descriptor)

    def given_up(self, *slots: int, rank: int = 0) -> list[int]:
        """The last uses of these slots that the rank has given up."""
        start = self.layout.rank_given_up_offset(rank)
        return [WORD.unpack_from(self.control, start + 8 * slot)[0] for slot in slots]

    def n_given_up(self, rank: int = 0) -> int:
        """How often the rank has given up a block."""
        offset = self.layout.rank_offset(rank) + self.layout.given_ups_in_rank
        return int(WORD.unpack_from(self.control, offset)[0])

    def set_data_word(self, offset: int, value: int) -> None:
        self.data[offset : offset + 8] = WORD.pack(value)

    def set_cursor(self, rank: int, value: int) -> None:
        offset = self.layout.rank_offset(rank) + self.layout.cursor_in_rank
        self.control[offset : offset + 8] = WORD.pack(value)

    def cursor(self, rank: int) -> int:
        offset = self.layout.rank_offset(rank) + self.layout.cursor_in_rank
        return WORD.unpack(self.control[offset : offset + 8])[0]


@contextlib.contextmanager
def ring_of(
    *, n_readers: int = 1, n_chunks: int = 2, chunk_bytes: int = 1024, arena_bytes: int = 0
) -> Iterator[Ring]:
    """A ring whose readers are all admitted from the first message on."""
    config = QueueConfig(
        n_readers=n_readers, n_chunks=n_chunks, chunk_bytes=chunk_bytes, arena_bytes=arena_bytes
    )
    with contextlib.ExitStack() as segments:
        segment = Segment.create(Layout.of(config))
        segments.callback(segment.close_descriptors)
        writer = RingWriter(segment)
        readers = []
        for rank in range(n_readers):
            own = Segment.attach(
                os.dup(segment.data_descriptor), os.dup(segment.control_descriptor)
            )
            segments.callback(own.close_descriptors)
            reader = RingReader(own, rank, writer.new_epoch(rank))
            reader.begin(writer.admit(rank, True))
            readers.append(reader)
        yield Ring(segment, writer, readers)


def taken(reader: RingReader) -> tuple[bytes, list[bytes]]:
    """The next message, released; its stream and its buffers."""
    message = reader.try_take()
    assert message is not None
    stream, buffers = message if isinstance(message, tuple) else (message, [])
    result = bytes(stream), [bytes(buffer) for buffer in buffers]
    assert reader.release()
    return result


def image_of(sequence: int, stream: list[bytes], buffers: list[bytes]) -> bytearray:
    views = [memoryview(buffer) for buffer in buffers]
    image = bytearray(image_bytes(stream, views))
    for offset, piece in image_pieces(sequence, stream, views):
        image[offset : offset + len(piece)] = piece
    return image


messages = st.tuples(
    st.lists(st.binary(max_size=80), max_size=4), st.lists(st.binary(max_size=150), max_size=5)
)


# --- images ---------------------------------------------------------------------------------------


@given(messages, st.integers(0, 2**64 - 1))
def test_image_round_trip(message: tuple[list[bytes], list[bytes]], sequence: int) -> None:
    """An image reads back as the stream and the buffers that it was made of."""
    stream, buffers = message
    read_stream, read_buffers = read_image(image_of(sequence, stream, buffers), sequence)
    assert b"".join(stream) == bytes(read_stream)
    assert buffers == [bytes(buffer) for buffer in read_buffers]


@given(messages)
def test_image_in_chunk_is_the_image_in_a_file(message: tuple[list[bytes], list[bytes]]) -> None:
    """What `try_publish` writes into a chunk is what `image_pieces` says, byte for byte."""
    stream, buffers = message
    with ring_of(chunk_bytes=4096) as ring:
        ring.reserve(4096)
        views = [memoryview(buffer) for buffer in buffers]
        assert ring.writer.try_publish(stream, views, True)
        expected = image_of(0, stream, buffers)
        offset = ring.layout.chunk_offset(0)
        assert bytes(expected) == ring.data[offset : offset + len(expected)]


@given(messages)
def test_image_buffers_are_aligned(message: tuple[list[bytes], list[bytes]]) -> None:
    """Every buffer of an image starts at a multiple of 64 bytes."""
    stream, buffers = message
    views = [memoryview(buffer) for buffer in buffers]
    offsets = [offset for offset, _ in image_pieces(0, stream, views)]
    assert [0] * len(buffers) == [offset % 64 for offset in offsets[1 + len(stream) :]]


def test_image_bytes_by_hand() -> None:
    """The size of an image is that of header, table and stream, then each buffer after padding."""
    assert 40 == IMAGE_HEADER_BYTES == image_bytes([], [])
    assert 40 + 3 == image_bytes([b"ab", b"c"], [])
    assert 64 + 1 == image_bytes([], [memoryview(b"y")])
    assert 128 + 1 == image_bytes([b"x"], [memoryview(b"y")])
    assert 128 + 64 + 2 == image_bytes([b"x"], [memoryview(b"y" * 64), memoryview(b"zz")])


def test_image_bytes_without_blocks() -> None:
    """A buffer that has a block takes an entry in the image's table, and nothing else of it."""
    views = [memoryview(b"y" * 5000), memoryview(b"zz"), memoryview(b"y" * 5000)]
    places = [(PAGE, 0), None, (3 * PAGE, 1)]
    assert 40 + 24 == image_bytes([], views[:1], places[:1])
    assert 128 + 2 == image_bytes([b"x"], views, places)
    for wrong in (places[:2], [*places, None]):
        with pytest.raises(ValueError, match="places for 3 buffers"):
            image_bytes([], views, wrong)


def test_read_image_gives_views() -> None:
    """What `read_image` returns is memory of the image itself, not a copy."""
    image = image_of(0, [b"stream"], [b"buffer"])
    _, (buffer,) = read_image(image, 0)
    buffer[:] = b"BUFFER"
    assert image.endswith(b"BUFFER")


def test_read_image_of_another_message() -> None:
    """An image with another number than the expected one is refused, and the text names both."""
    with pytest.raises(ProtocolError, match="number 4 instead of 5"):
        read_image(image_of(4, [b"s"], []), 5)


interesting_words = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
    st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64 - 64, 2**61, 2**32]),
)


@settings(max_examples=300)
@given(
    messages,
    st.lists(st.tuples(st.integers(0, 22), interesting_words), max_size=4),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=4),
    st.integers(0, 1000),
)
def test_read_image_of_damaged_bytes(
    message: tuple[list[bytes], list[bytes]],
    words: list[tuple[int, int]],
    bytes_: list[tuple[int, int]],
    size_bytes: int,
) -> None:
    """A damaged image gives a ProtocolError, or parts that lie inside it."""
    image = image_of(7, *message)
    for index, word in words:
        if 8 * index + 8 <= len(image):
            WORD.pack_into(image, 8 * index, word)
    for index, byte in bytes_:
        if index < len(image):
            image[index] = byte
    del image[size_bytes:]
    try:
        stream, buffers = read_image(image, 7)
    except ProtocolError:
        return
    table_bytes = ENTRY_BYTES * len(buffers)
    assert 40 + table_bytes + len(stream) + sum(map(len, buffers)) <= len(image)


@pytest.mark.parametrize("n_buffers", [1, 2**61, 2**61 + 1, 2**64 - 1])
def test_read_image_of_too_many_buffers(n_buffers: int) -> None:
    """A count of buffers whose table would not fit is refused before any length of it is read."""
    with pytest.raises(ProtocolError, match=f"{n_buffers} buffers in 40 bytes"):
        read_image(HEADER.pack(0, KIND_HERE, 0, n_buffers, 0), 0)


@pytest.mark.parametrize("offset", [1, 64, PAGE, 2**63, 2**64 - 1])
def test_read_image_with_a_block(offset: int) -> None:
    """An image of a memory file whose table names a block is refused: it has none."""
    image = image_of(0, [b"s"], [b"buffer"])
    WORD.pack_into(image, 40 + 8, offset)
    with pytest.raises(ProtocolError, match="a block of 6 bytes"):
        read_image(image, 0)


# --- the writer's side ----------------------------------------------------------------------------


def test_claim_of_a_full_ring() -> None:
    """Exactly n_chunks messages fit; the next claim says FULL until a reader has released one."""
    for n_chunks in (1, 2, 3, 7):
        with ring_of(n_chunks=n_chunks) as ring:
            for number in range(n_chunks):
                assert Claim.DONE == ring.publish(b"%d" % number)
            assert Claim.FULL == ring.publish(b"too many")
            assert (b"0", []) == taken(ring.readers[0])
            assert Claim.DONE == ring.publish(b"%d" % n_chunks)
            assert Claim.FULL == ring.publish(b"too many")
            assert [b"%d" % number for number in range(1, n_chunks + 1)] == [
                taken(ring.readers[0])[0] for _ in range(n_chunks)
            ]


def test_claim_waits_for_the_slowest() -> None:
    """A chunk is free only when every rank has released it."""
    with ring_of(n_readers=3, n_chunks=1) as ring:
        ring.publish(b"0")
        for reader in ring.readers[:2]:
            taken(reader)
            assert Claim.FULL == ring.publish(b"1")
        taken(ring.readers[2])
        assert Claim.DONE == ring.publish(b"1")


def test_claim_of_a_rank_that_never_attached() -> None:
    """A rank that has never attached holds the ring at message 0."""
    with ring_of(n_chunks=2) as ring:
        writer = RingWriter(ring.segment)
        ring.writer = writer
        assert [Claim.DONE, Claim.DONE, Claim.FULL] == [ring.publish(b"m") for _ in range(3)]
        assert (2,) == writer.lags()


@pytest.mark.parametrize("chunk_bytes", [1024, 1025, 1087, 4096])
def test_claim_at_the_edge_of_a_chunk(chunk_bytes: int) -> None:
    """An image of chunk_bytes fits and leaves the next chunk alone; one byte more is TOO_LARGE."""
    with ring_of(chunk_bytes=chunk_bytes) as ring:
        first, second = (b"\xaa" * (chunk_bytes - IMAGE_HEADER_BYTES), b"\x55" * 16)
        assert Claim.TOO_LARGE == ring.publish(first + b"x")
        assert 0 == ring.writer.messages
        ring.reserve(chunk_bytes)
        after = ring.layout.chunk_offset(1)
        ring.data[after : after + 16] = second
        assert Claim.DONE == ring.publish(first)
        assert second == ring.data[after : after + 16]
        assert (first, []) == taken(ring.readers[0])
        fitting = chunk_bytes - 128
        assert Claim.TOO_LARGE == ring.publish(b"s", b"b" * (fitting + 1))
        assert Claim.DONE == ring.publish(b"s", b"b" * fitting)
        assert (b"s", [b"b" * fitting]) == taken(ring.readers[0])


def test_claim_reserves_first() -> None:
    """A chunk says RESERVE until as many bytes are reserved as the image needs."""
    with ring_of() as ring:
        assert Claim.RESERVE == ring.writer.try_claim(100, True)
        ring.writer.set_reserved(100)
        assert Claim.DONE == ring.writer.try_claim(100, True)
        assert Claim.RESERVE == ring.writer.try_claim(101, True)
        assert not ring.writer.try_publish([b"x" * 100], [], True)
        assert 0 == ring.writer.messages
        assert ring.writer.try_publish([b"x" * 60], [], True)
        assert Claim.RESERVE == ring.writer.try_claim(40, True)  # it was the first chunk's


def test_skip_to() -> None:
    """The next message has the number that was skipped to, for whoever is admitted then."""
    with ring_of(n_chunks=2) as ring:
        assert Claim.DONE == ring.publish(b"before")
        for number in (0, 7):
            with pytest.raises(ValueError, match=f"1 readers wait for message 1, not {number}"):
                ring.writer.skip_to(number)
        ring.writer.strike(0)
        ring.writer.skip_to(7)
        with pytest.raises(ValueError, match="not 6"):
            ring.writer.skip_to(6)
        reader = RingReader(ring.segment, 0, ring.writer.new_epoch(0))
        reader.begin(ring.writer.admit(0, False))
        assert (7, 0) == (reader.next_sequence, reader.lag)
        for number in (7, 8, 9):
            assert Claim.DONE == ring.publish(b"%d" % number)
            assert number == reader.next_sequence
            assert b"%d" % number == reader.try_take()
            reader.release()


def test_claim_says_look() -> None:
    """A claim says LOOK before anything else, once the pause is over and unless it was done."""
    with ring_of() as ring:
        ring.reserve(1024)
        assert Claim.LOOK == ring.writer.try_claim(40, False)
        assert not ring.writer.try_publish([b"x"], [])
        assert Claim.DONE == ring.writer.try_claim(40, True)
        ring.writer.look_again_in(SLEEP_NS)
        assert Claim.DONE == ring.writer.try_claim(40, False)
        ring.writer.look_again_in(0)
        assert Claim.LOOK == ring.writer.try_claim(40, False)


def test_claim_without_readers() -> None:
    """A claim says NOBODY when every rank was struck, and goes on when one is admitted again."""
    with ring_of(n_readers=2) as ring:
        ring.publish(b"0")
        ring.writer.strike(0)
        assert Claim.DONE == ring.publish(b"1")
        ring.writer.strike(1)
        assert Claim.NOBODY == ring.publish(b"2")
        ring.writer.new_epoch(1)
        ring.writer.admit(1, False)
        assert Claim.DONE == ring.publish(b"2")


def test_admit_says_where_to_start() -> None:
    """The first attachment of a rank starts with message 0, a later one with the next message."""
    with ring_of(n_chunks=4) as ring:
        ring.publish(b"0")
        ring.publish(b"1")
        assert 0 == ring.writer.admit(0, True)
        ring.writer.strike(0)
        ring.writer.new_epoch(0)
        assert 2 == ring.writer.admit(0, False)
        assert 2 == ring.cursor(0)


@pytest.mark.parametrize("arena_bytes", [0, 8 * PAGE])
def test_rank_out_of_range(arena_bytes: int) -> None:
    """A rank that the queue has not is a ValueError, never a store beyond the table."""
    with ring_of(n_readers=2, arena_bytes=arena_bytes) as ring:
        for rank in (-1, 2, 1 << 20):
            for call in (ring.writer.new_epoch, ring.writer.has_left, ring.writer.strike):
                with pytest.raises(ValueError, match="no rank"):
                    call(rank)
            with pytest.raises(ValueError, match="no rank"):
                RingReader(ring.segment, rank, 1)


def test_admit_rank_out_of_range() -> None:
    """Admitting a rank that the queue has not is a ValueError, and changes nothing."""
    with ring_of(n_readers=2) as ring:
        for rank in (-1, 2):
            with pytest.raises(ValueError, match="no rank"):
                ring.writer.admit(rank, True)
        assert (0, 0) == ring.writer.lags()


def test_mapping_of_another_size() -> None:
    """Ends refuse mappings that do not have the sizes of their layout."""
    with ring_of() as ring:
        larger = Layout.of(QueueConfig(n_chunks=64, chunk_bytes=4096))
        segment = attrs.evolve(ring.segment, layout=larger)
        for make in (lambda: RingWriter(segment), lambda: RingReader(segment, 0, 1)):
            with pytest.raises(ValueError, match="sizes of the layout"):
                make()


def test_lags() -> None:
    """`lags` counts what each rank has not released; a rank that was struck counts 0."""
    with ring_of(n_readers=3, n_chunks=4) as ring:
        for number in range(3):
            ring.publish(b"%d" % number)
        taken(ring.readers[0])
        assert (2, 3, 3) == ring.writer.lags()
        taken(ring.readers[0])
        taken(ring.readers[1])
        assert (1, 2, 3) == ring.writer.lags()
        ring.writer.strike(2)
        assert (1, 2, 0) == ring.writer.lags()


def test_cursor_out_of_range() -> None:
    """A cursor beyond what was published is reported, frees nothing, and ends with a strike."""
    with ring_of(n_readers=2, n_chunks=1) as ring:
        ring.publish(b"0")
        assert ring.writer.damaged() is None
        taken(ring.readers[0])
        ring.set_cursor(1, 2)
        assert Claim.FULL == ring.publish(b"1")
        assert 1 == ring.writer.damaged()
        assert 0 <= ring.writer.lags()[1] <= 1
        ring.writer.strike(1)
        assert ring.writer.damaged() is None
        assert Claim.DONE == ring.publish(b"1")


@given(st.integers(0, 2**64 - 1))
def test_cursor_of_any_value(value: int) -> None:
    """Whatever a reader stores as its cursor: lags stay in range, and too large is damage."""
    with ring_of(n_chunks=2) as ring:
        ring.publish(b"0")
        ring.publish(b"1")
        ring.set_cursor(0, value)
        claim = ring.publish(b"2")
        assert (Claim.DONE if 1 <= value <= 2 else Claim.FULL) == claim
        assert (0 if value > 2 else None) == ring.writer.damaged()
        assert 0 <= ring.writer.lags()[0] <= ring.writer.messages


def test_cursor_that_goes_back() -> None:
    """A cursor smaller than one that was seen takes nothing back: it is a struck attachment's."""
    with ring_of(n_chunks=2) as ring:
        ring.publish(b"0")
        ring.publish(b"1")
        taken(ring.readers[0])
        taken(ring.readers[0])
        assert Claim.DONE == ring.publish(b"2")
        ring.set_cursor(0, 0)
        assert Claim.DONE == ring.publish(b"3")
        assert Claim.FULL == ring.publish(b"4")
        assert ring.writer.damaged() is None


def test_cursor_that_a_struck_attachment_stored_last() -> None:
    """Before it sleeps a reader puts its cursor right, or the writer would wait for ever."""
    with ring_of(n_chunks=1) as ring:
        ring.publish(b"0")
        taken(ring.readers[0])
        ring.set_cursor(0, 0)
        assert Claim.FULL == ring.publish(b"1")
        ring.readers[0].wait(0, 1)
        assert Claim.DONE == ring.publish(b"1")
        ring.writer.strike(0)
        ring.set_cursor(0, 0)
        ring.readers[0].wait(0, 1)
        assert 0 == ring.cursor(0)  # it is the next attachment's by now


def test_strike_ends_an_attachment() -> None:
    """A struck reader takes nothing more and its release is refused and moves no cursor."""
    with ring_of(n_readers=2, n_chunks=2) as ring:
        ring.publish(b"0")
        reader = ring.readers[0]
        assert b"0" == reader.try_take()
        assert not reader.is_struck
        ring.writer.strike(0)
        assert reader.is_struck
        assert not reader.release()
        assert 0 == ring.cursor(0) == reader.next_sequence == reader.messages
        assert reader.try_take() is None
        assert (b"0", []) == taken(ring.readers[1])


def test_new_epoch_ends_the_one_before() -> None:
    """Epochs of a rank count up, and an attachment of an earlier one is over."""
    with ring_of(n_readers=2) as ring:
        assert 2 == ring.writer.new_epoch(0)
        assert 3 == ring.writer.new_epoch(0)
        assert [True, False] == [reader.is_struck for reader in ring.readers]


def test_has_left() -> None:
    """A rank has left from its reader's `leave` to its next epoch, and no other rank has."""
    with ring_of(n_readers=2) as ring:
        assert not ring.writer.has_left(0)
        ring.readers[0].leave()
        assert [True, False] == [ring.writer.has_left(rank) for rank in (0, 1)]
        ring.writer.new_epoch(0)
        assert not ring.writer.has_left(0)
        ring.readers[0].leave()  # of an attachment that is over
        assert not ring.writer.has_left(0)


def test_writer_counters() -> None:
    """The writer counts messages, the bytes of streams and buffers, and buffers on their own."""
    with ring_of(n_chunks=4) as ring:
        ring.publish(b"abc")
        ring.publish(b"de", b"x" * 10, b"")
        ring.writer.publish_file(9, [b"f", b"gh"], [memoryview(b"y" * 100)])
        writer = ring.writer
        assert 3 == writer.messages
        assert (3 + 2 + 10 + 3 + 100, 3, 110) == (
            writer.bytes,
            writer.oob_buffers,
            writer.oob_bytes,
        )


# --- the reader's side ----------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_ring_wraps(n_chunks: int, n_readers: int, seed: int) -> None:
    """A ring of any size gives every message once, whole and in order, however often it wraps."""
    choice = random.Random(seed)
    with ring_of(n_readers=n_readers, n_chunks=n_chunks) as ring:
        sent: list[tuple[bytes, list[bytes]]] = []
        got: list[list[tuple[bytes, list[bytes]]]] = [[] for _ in range(n_readers)]
        for _ in range(100 * n_chunks):
            rank = choice.randrange(n_readers + 1)
            if rank < n_readers:
                if ring.readers[rank].lag:
                    got[rank].append(taken(ring.readers[rank]))
                continue
            message = (
                choice.randbytes(choice.choice((0, 1, 63, 64, 300))),
                [
                    choice.randbytes(choice.choice((0, 1, 63, 64, 65)))
                    for _ in range(choice.choice((0, 0, 1, 3)))
                ],
            )
            if ring.publish(message[0], *message[1]) == Claim.DONE:
                sent.append(message)
        for rank, reader in enumerate(ring.readers):
            got[rank] += [taken(reader) for _ in range(reader.lag)]
        assert [sent] * n_readers == got


def test_take_of_nothing() -> None:
    """An empty ring gives None, and the same message again until it is released."""
    with ring_of() as ring:
        reader = ring.readers[0]
        assert reader.try_take() is None
        ring.publish(b"0")
        assert [b"0", b"0", 1] == [reader.try_take(), reader.try_take(), reader.lag]
        assert reader.release()
        assert reader.try_take() is None


def test_streams_are_copies() -> None:
    """A stream comes as bytes that the writer cannot change, however long it is."""
    with ring_of(n_chunks=1, chunk_bytes=65536) as ring:
        for size_bytes, buffers in itertools.product((0, 100, 50_000), ((), (b"b",))):
            ring.publish(b"s" * size_bytes, *buffers)
            message = ring.readers[0].try_take()
            stream = message[0] if buffers else message
            assert ring.readers[0].release()
            ring.publish(b"t" * size_bytes)
            assert b"s" * size_bytes == stream
            assert bytes is type(stream)
            taken(ring.readers[0])


def test_buffers_are_copies() -> None:
    """A buffer is the reader's own: writable, and unchanged when the writer reuses the chunk."""
    with ring_of(n_readers=2, n_chunks=1, chunk_bytes=65536) as ring:
        for size_bytes in (10, 20000):
            ring.publish(b"s", b"a" * size_bytes)
            (_, (first,)), (_, (second,)) = [reader.try_take() for reader in ring.readers]
            first[:1] = b"X"
            assert b"a" * size_bytes == second
            assert [True, True] == [reader.release() for reader in ring.readers]
            ring.publish(b"s", b"b" * size_bytes)
            assert b"X" + b"a" * (size_bytes - 1) == first
            assert b"a" * size_bytes == second
            assert [(b"s", [b"b" * size_bytes])] * 2 == [taken(reader) for reader in ring.readers]


def test_take_of_a_file() -> None:
    """A message in a file takes a chunk in its turn and gives its nonce."""
    with ring_of() as ring:
        ring.reserve(1024)
        ring.writer.publish_file(2**64 - 1, [b"s"], [])
        ring.publish(b"next")
        reader = ring.readers[0]
        assert 2**64 - 1 == reader.try_take()
        assert reader.release()
        assert b"next" == reader.try_take()


def test_reader_counters() -> None:
    """A reader counts what it took as the writer counts what it published."""
    with ring_of(n_chunks=4) as ring:
        reader = ring.readers[0]
        ring.publish(b"abc")
        ring.publish(b"de", b"x" * 10, b"")
        taken(reader)
        taken(reader)
        assert 2 == reader.messages == reader.next_sequence
        assert (15, 2, 10) == (reader.bytes, reader.oob_buffers, reader.oob_bytes)
        ring.publish(b"")
        for _ in range(2):  # a message that is taken again counts once
            assert b"" == reader.try_take()
            reader.count_stream(5)
            reader.count_buffer(7)
        assert (15, 2, 10) == (reader.bytes, reader.oob_buffers, reader.oob_bytes)
        assert reader.release()
        assert (27, 3, 17) == (reader.bytes, reader.oob_buffers, reader.oob_bytes)


@pytest.mark.parametrize("receive", ["without arena", "copy", "private"])
@settings(max_examples=150)
@given(
    messages,
    st.lists(
        st.tuples(
            st.integers(0, 22), interesting_words | st.integers(0, 12).map(lambda page: page * PAGE)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_take_from_a_damaged_chunk(
    receive: str, message: tuple[list[bytes], list[bytes]], words: list[tuple[int, int]]
) -> None:
    """A damaged chunk gives a ProtocolError or parts that fit their place, and hurts no later."""
    arena_bytes = 0 if receive == "without arena" else 8 * PAGE
    with ring_of(arena_bytes=arena_bytes) as ring:
        reader = ring.readers[0]
        if receive == "private":
            ring.lease()
        ring.publish(b"".join(message[0]), *message[1])
        ring.publish(b"next")
        for index, word in words:
            ring.set_data_word(ring.layout.chunk_offset(0) + 8 * index, word)
        try:
            parts = reader.try_take()
        except ProtocolError:
            pass
        else:
            if not isinstance(parts, int):
                stream, buffers = parts if isinstance(parts, tuple) else (parts, [])
                sizes = [len(stream), *map(len, buffers)]
                if not arena_bytes:
                    assert 1024 >= 40 + ENTRY_BYTES * len(buffers) + sum(sizes)
                assert max(1024, arena_bytes) >= max(sizes)
                for buffer in buffers:
                    bytes(buffer)
        assert reader.release()
        assert (b"next", []) == taken(reader)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("image_at", [None, 2])
@pytest.mark.parametrize("is_leased", [False, True])
def test_take_of_blocks(is_leased: bool, image_at: int | None) -> None:
    """A message in blocks arrives whole and is counted like any other, copied or leased."""
    with ring_of(arena_bytes=8 * PAGE, chunk_bytes=1024) as ring:
        if is_leased:
            ring.lease()
        ring.publish_in_blocks(b"stream", b"a" * PAGE, b"b" * 70, image_at=image_at)
        assert (b"stream", [b"a" * PAGE, b"b" * 70]) == taken(ring.readers[0])
        expected = 1, 6 + PAGE + 70, 2, PAGE + 70
        for end in (ring.writer, ring.readers[0]):
            assert expected == (end.messages, end.bytes, end.oob_buffers, end.oob_bytes)


@pytest.mark.parametrize("image_at", [None, 1])
def test_copied_blocks_are_given_up_with_the_chunk(image_at: int | None) -> None:
    """A reader that copies gives every block of a message up when it releases it, not before."""
    with ring_of(n_readers=2, arena_bytes=8 * PAGE) as ring:
        for use in (1, 2):
            ring.publish_in_blocks(b"s", b"a" * PAGE, image_at=image_at)
            _, (buffer,) = ring.readers[0].try_take()
            assert [use - 1, use - 1 if image_at else 0] == ring.given_up(0, 1)
            assert ring.readers[0].release()
            assert [use, use if image_at else 0] == ring.given_up(0, 1)
            assert [use - 1] == ring.given_up(0, rank=1)
            ring.data[ring.layout.arena_offset] = 0
            assert b"a" * PAGE == buffer
            taken(ring.readers[1])


@pytest.mark.parametrize("is_released_first", [False, True])
def test_leased_blocks_are_given_up_with_the_lease(is_released_first: bool) -> None:
    """A leased block is given up when the chunk is released and its last view has gone."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        reader = ring.readers[0]
        ring.publish_in_blocks(b"s", b"a" * PAGE, b"b" * PAGE)
        _, (first, second) = reader.try_take()
        part = first[10:20]
        del first
        if is_released_first:
            assert reader.release()
            assert [0, 0] == ring.given_up(0, 1)
            del second
            assert [0, 1] == ring.given_up(0, 1)
            assert b"a" * 10 == part
            del part
        else:
            del part, second
            assert [0, 0] == ring.given_up(0, 1)
            assert reader.release()
        assert [1, 1] == ring.given_up(0, 1)
        assert 2 == ring.n_given_up()


def test_lease_of_a_message_that_is_taken_again() -> None:
    """A message that is taken twice before its release has one set of leases, given up once."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        reader = ring.readers[0]
        ring.publish_in_blocks(b"s", b"a" * PAGE)
        first, second = reader.try_take(), reader.try_take()
        assert first is second
        assert reader.release()
        assert [0] == ring.given_up(0)
        del first
        assert [0] == ring.given_up(0)
        assert b"a" * PAGE == second[1][0]
        del second
        assert [1] == ring.given_up(0)
        assert 1 == ring.n_given_up()


def test_what_is_written_to_a_lease() -> None:
    """What a reader writes is seen by nobody else, and not in the next use of the block."""
    with ring_of(n_readers=2, arena_bytes=8 * PAGE) as ring:
        ring.lease()
        for content in (b"a", b"b", b"c"):
            ring.publish_in_blocks(b"s", content * (3 * PAGE))
            (_, (first,)), (_, (second,)) = [reader.try_take() for reader in ring.readers]
            assert content * (3 * PAGE) == first == second
            first[PAGE + 5 : PAGE + 9] = b"mine"
            assert content * (3 * PAGE) == second
            start = ring.layout.arena_offset
            assert content * (3 * PAGE) == ring.data[start : start + 3 * PAGE]
            assert b"mine" == first[PAGE + 5 : PAGE + 9]
            assert [True, True] == [reader.release() for reader in ring.readers]
            del first, second


def test_leases_outlive_their_attachment() -> None:
    """Leases of a reader that has left stay as they are, and give their blocks up when they end."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        reader = ring.readers[0]
        ring.publish_in_blocks(b"s", b"a" * PAGE, b"b" * PAGE)
        _, (first, second) = reader.try_take()
        second[:1] = b"X"
        assert reader.release()
        reader.leave()
        assert (True, [0, 0]) == (ring.writer.has_left(0), ring.given_up(0, 1))
        assert 1 == ring.writer.strike(0)
        del reader, ring.readers[0]
        assert (b"a" * PAGE, b"X" + b"b" * (PAGE - 1)) == (first, second)
        del first
        assert [1, 0] == ring.given_up(0, 1)
        del second
        assert ([1, 1], 2) == (ring.given_up(0, 1), ring.n_given_up())


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize("is_over", ["struck", "left"])
def test_last_message_of_an_attachment(is_over: str, is_released: bool) -> None:
    """A message that was taken before the end gives its blocks up, released or not."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        reader = ring.readers[0]
        for _ in range(2):
            ring.publish_in_blocks(b"s", b"a" * PAGE)
        taken = reader.try_take()
        if is_over == "struck":
            assert 1 == ring.writer.strike(0)
        if is_released:
            assert (is_over == "left") == reader.release()
        if is_over == "struck":
            assert reader.try_take() is None
        else:
            reader.leave()
            assert 1 == ring.writer.strike(0)
        assert [0] == ring.given_up(0)
        assert b"a" * PAGE == taken[1][0]
        del taken
        assert [1] == ring.given_up(0)


def test_older_use_that_is_given_up_late() -> None:
    """A struck attachment that gives an old use up stores nothing over a newer one's word."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        ring.publish_in_blocks(b"s", b"a" * PAGE)
        late = ring.readers[0].try_take()
        assert ring.readers[0].release()
        ring.writer.strike(0)
        reader = RingReader(ring.segment, 0, ring.writer.new_epoch(0))
        assert reader.lease_from(ring.segment.data_descriptor)
        reader.begin(ring.writer.admit(0, False))
        ring.publish_in_blocks(b"s", b"b" * PAGE)
        assert (b"s", [b"b" * PAGE]) == taken(reader)
        assert [2] == ring.given_up(0)
        del late
        assert [2] == ring.given_up(0)


def test_attachment_that_leaves_late() -> None:
    """A struck attachment that leaves takes nothing from a newer one that has left."""
    with ring_of() as ring:
        ring.writer.strike(0)
        reader = RingReader(ring.segment, 0, ring.writer.new_epoch(0))
        reader.begin(ring.writer.admit(0, False))
        reader.leave()
        ring.readers[0].leave()
        assert ring.writer.has_left(0)


def test_holds() -> None:
    """A hold that was given up is told until it is ended, and no other one is."""
    with ring_of(n_readers=2, arena_bytes=8 * PAGE) as ring:
        ring.publish_in_blocks(b"s", b"a" * PAGE, b"b" * PAGE)
        ring.writer.hold(0, 1, [0, 1])
        ring.writer.hold(1, 1, [1])
        assert [] == ring.writer.given_up_holds()
        taken(ring.readers[0])
        for _ in range(2):
            assert [(0, 0)] == ring.writer.given_up_holds()
        taken(ring.readers[1])
        assert [(0, 0), (0, 1), (1, 1)] == ring.writer.given_up_holds()
        ring.writer.end_hold(0, 1)
        ring.writer.hold(1, 2, [1])  # a newer use, which is not given up
        assert [(0, 0)] == ring.writer.given_up_holds()
        ring.writer.end_hold(0, 0)
        for _ in range(2):
            assert [] == ring.writer.given_up_holds()


def test_no_lease_of_what_is_older_than_the_guard() -> None:
    """Where the private mapping does not follow the file, as after mlockall, blocks are copied."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        reader = ring.readers[0]
        ring.publish_in_blocks(b"s", b"a" * PAGE)
        _, (leased,) = reader.try_take()
        assert reader.release()
        # The same that a private page of the guard would show: the word of an earlier message.
        ring.publish_in_blocks(b"s", b"a" * PAGE, b"b" * PAGE)
        ring.set_data_word(ring.layout.guard_offset, 1)
        _, buffers = reader.try_take()
        assert [memoryview, bytearray, bytearray] == [type(part) for part in (leased, *buffers)]
        assert b"b" * PAGE == buffers[1]
        assert reader.release()
        assert [2] == ring.given_up(1)


@pytest.mark.parametrize(
    ("first_page", "size_bytes", "slot"),
    [(-1, 1, 0), (0, 8 * PAGE + 1, 0), (8, 1, 0), (9, 0, 0), (0, 1, 8), (0, 1, 2**64 - 1)],
)
def test_block_outside_the_arena(first_page: int, size_bytes: int, slot: int) -> None:
    """A block that lies outside the arena or has no slot is refused when written and when read."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        offset = ring.layout.arena_offset + first_page * PAGE
        if slot == 0:
            for call in (ring.writer.block_view, ring.writer.draft):
                with pytest.raises(ProtocolError, match=f"a block of {size_bytes} bytes"):
                    call(offset, size_bytes)
            with pytest.raises(ProtocolError, match=f"a block of {size_bytes} bytes"):
                ring.writer.copy_to_block(offset, memoryview(bytes(size_bytes)))
        for is_image in (False, True):
            sequence = ring.writer.messages
            ring.publish(b"s", b"b")
            chunk = ring.layout.chunk_offset(sequence)
            if is_image:
                head = HEADER.pack(sequence, KIND_BLOCK, offset, size_bytes, slot)
                ring.data[chunk : chunk + 40] = head
            else:
                for index, word in enumerate((size_bytes, offset, slot)):
                    ring.set_data_word(chunk + 40 + 8 * index, word)
            with pytest.raises(ProtocolError, match=f"a block of {size_bytes} bytes"):
                ring.readers[0].try_take()
            assert ring.readers[0].release()


def test_no_blocks_without_an_arena() -> None:
    """A message that names a block of a queue without an arena is damaged."""
    with ring_of() as ring:
        ring.publish(b"s", b"b")
        ring.set_data_word(ring.layout.chunk_offset(0) + 40 + 8, ring.layout.data_bytes)
        with pytest.raises(ProtocolError, match="a block of 1 bytes"):
            ring.readers[0].try_take()


def test_slot_or_rank_out_of_range() -> None:
    """A hold of a slot or a rank that the queue lacks is a ValueError."""
    with ring_of(n_readers=2, arena_bytes=8 * PAGE) as ring:
        for slot, rank in ((-1, 0), (8, 0), (0, -1), (0, 2), (2**31 - 1, 0)):
            with pytest.raises(ValueError, match="no slot"):
                ring.writer.hold(slot, 1, [rank])
            with pytest.raises(ValueError, match="no slot"):
                ring.writer.end_hold(slot, rank)


def test_expected_ranks() -> None:
    """The ranks that a message is for are those that are admitted or never attached."""
    with ring_of(n_readers=3) as ring:
        assert [0, 1, 2] == ring.writer.expected_ranks()
        ring.writer.strike(1)
        assert [0, 2] == ring.writer.expected_ranks()
        ring.writer.new_epoch(1)
        ring.writer.admit(1, False)
        assert [0, 1, 2] == ring.writer.expected_ranks()


def test_draft_is_shared_until_it_is_published() -> None:
    """What is written to a draft is the message; what is written afterwards is seen by nobody."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.lease()
        ring.segment.reserve_arena(ring.layout.arena_offset, ring.layout.arena_bytes)
        draft = ring.writer.draft(ring.layout.arena_offset, 2 * PAGE)
        view = memoryview(draft)
        view[:] = b"a" * (2 * PAGE)
        ring.reserve(1024)
        descriptor = ring.segment.data_descriptor
        assert not draft.is_detached
        ring.writer.publish([b"s"], [view], [ring.place(0)], None, [draft], descriptor)
        assert draft.is_detached
        view[:5] = b"later"
        _, (got,) = ring.readers[0].try_take()
        assert b"a" * (2 * PAGE) == got
        assert b"later" + b"a" * (2 * PAGE - 5) == view
        got[:4] = b"mine"
        assert b"later" == view[:5]
        del view, draft
        assert 1 == ring.writer.ended_drafts
        assert b"mine" == got[:4]


def test_take_of_another_number() -> None:
    """A chunk that holds another message than the expected one is damage; both are named."""
    with ring_of() as ring:
        ring.publish(b"0")
        ring.set_data_word(ring.layout.chunk_offset(0), 41)
        with pytest.raises(ProtocolError, match="number 41 instead of 0"):
            ring.readers[0].try_take()


@pytest.mark.parametrize("published", [3, 4, 2**63, 2**64 - 1])
def test_take_of_an_overwritten_message(published: int) -> None:
    """A counter that is more than the ring ahead of the reader is damage, never a torn message."""
    with ring_of(n_chunks=2) as ring:
        ring.publish(b"0")
        ring.set_data_word(ring.layout.published_offset, published)
        with pytest.raises(ProtocolError, match="overwritten"):
            ring.readers[0].try_take()


# --- waiting --------------------------------------------------------------------------------------


def run(function: Callable[..., object], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def test_reader_wakes_for_a_message() -> None:
    """A reader that sleeps is woken by the next message, not by the end of its sleep."""
    with ring_of() as ring:
        reader = ring.readers[0]
        for number in range(200):
            done = run(reader.wait, 0, SLEEP_NS)
            if number % 2:  # the sleep mark is up, so the wake-up and not the first look ends it
                wait_for_mark(ring.control, ring.layout.rank_offset(0) + 8, done)
            ring.publish(b"m")
            done.join(PATIENCE_S)
            assert not done.is_alive(), f"repetition {number}"
            taken(reader)
        assert 200 == reader.waits
        assert 0 < reader.wait_s < 200 * PATIENCE_S


def test_writer_wakes_for_space() -> None:
    """A writer that sleeps is woken when a reader releases the last chunk."""
    with ring_of(n_chunks=1) as ring:
        writer = ring.writer
        for number in range(200):
            ring.publish(b"m")
            done = run(writer.wait_for_space, 0, SLEEP_NS)
            if number % 2:
                wait_for_mark(ring.data, ring.layout.writer_sleeps_offset, done)
            taken(ring.readers[0])
            done.join(PATIENCE_S)
            assert not done.is_alive(), f"repetition {number}"
        assert 200 == writer.waits
        assert 0 < writer.wait_s < 200 * PATIENCE_S


def wait_for_mark(memory: Any, offset: int, thread: threading.Thread) -> None:
    """Wait until the sleep mark at this offset is up."""
    give_up_at = time.monotonic() + PATIENCE_S
    while memory[offset : offset + 8] == bytes(8) and thread.is_alive():
        assert time.monotonic() < give_up_at
        time.sleep(0)


def test_stop_ends_a_wait() -> None:
    """`stop` from another thread ends a wait of either end, and every later one at once."""
    for _ in range(50):
        with ring_of(n_chunks=1) as ring:
            reader, writer = ring.readers[0], ring.writer
            waiting = run(reader.wait, 0, SLEEP_NS)
            reader.stop()
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive()
            reader.wait(0, SLEEP_NS)
            ring.publish(b"m")
            assert reader.try_take() is None
            waiting = run(writer.wait_for_space, 0, SLEEP_NS)
            writer.stop()
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive()
            writer.wait_for_space(0, SLEEP_NS)


def test_nudge_ends_one_wait() -> None:
    """`nudge` from another thread ends the present wait or else the next one, and no more."""
    with ring_of() as ring:
        reader = ring.readers[0]
        for number in range(50):
            waiting = run(reader.wait, 0, SLEEP_NS)
            if number % 2:
                wait_for_mark(ring.control, ring.layout.rank_offset(0) + 8, waiting)
            reader.nudge()
            waiting.join(PATIENCE_S)
            assert not waiting.is_alive()
        reader.nudge()
        reader.wait(0, SLEEP_NS)
        start = time.monotonic()
        reader.wait(0, 20_000_000)
        assert time.monotonic() - start >= 0.02


def test_closing_writer_wakes_readers() -> None:
    """`say_closing` ends the sleep of every reader, which sees the mark and the last message."""
    for number in range(50):
        with ring_of(n_readers=2) as ring:
            threads = [run(r.wait, 0, SLEEP_NS) for r in ring.readers]
            for rank, thread in enumerate(threads if number % 2 else ()):
                wait_for_mark(ring.control, ring.layout.rank_offset(rank) + 8, thread)
            assert [False, False] == [reader.is_closing for reader in ring.readers]
            ring.writer.say_closing()
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
            assert [True, True] == [reader.is_closing for reader in ring.readers]
            ring.readers[0].wait(0, SLEEP_NS)


def test_leaving_reader_wakes_the_writer() -> None:
    """A reader that leaves wakes a writer that sleeps for space."""
    with ring_of(n_chunks=1) as ring:
        ring.publish(b"m")
        waiting = run(ring.writer.wait_for_space, 0, SLEEP_NS)
        wait_for_mark(ring.data, ring.layout.writer_sleeps_offset, waiting)
        ring.readers[0].leave()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()


def test_waits_end_in_time() -> None:
    """A wait for which nothing happens ends after its poll and its sleep, and is counted."""
    with ring_of(n_chunks=1) as ring:
        ring.readers[0].wait(1_000_000, 2_000_000)
        ring.publish(b"m")
        ring.writer.wait_for_space(1_000_000, 2_000_000)
        for end in (ring.readers[0], ring.writer):
            assert 1 == end.waits
            assert 0.001 <= end.wait_s < PATIENCE_S


class Interrupted(Exception):
    """What a signal handler raises here."""


@contextlib.contextmanager
def handler_of(number: int, handle: Callable[[], object]) -> Iterator[None]:
    def on_signal(number: int, frame: FrameType | None) -> None:
        handle()

    before = signal.signal(number, on_signal)
    try:
        yield
    finally:
        signal.signal(number, before)


POLL_NS = 20_000_000


def duration_ns(function: Callable[[], object]) -> int:
    """How long it takes."""
    start_ns = time.monotonic_ns()
    function()
    return time.monotonic_ns() - start_ns


@pytest.fixture
def one_cpu() -> Iterator[int]:
    """Let this thread run on one CPU alone."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield min(allowed)
    os.sched_setaffinity(0, allowed)


def test_no_polling_on_the_cpu_of_the_other_side(one_cpu: int) -> None:
    """An end does not poll on the CPU where the other side was last, which may need it."""
    with ring_of(n_chunks=1) as ring:
        reader = ring.readers[0]
        ring.publish(b"m")
        assert b"m" == reader.try_take()
        reader.release()
        reader.wait(SLEEP_NS, 1)
        ring.publish(b"m")
        ring.writer.wait_for_space(SLEEP_NS, 1)

        offset = ring.layout.rank_offset(0) + ring.layout.cpu_in_rank
        ring.control[offset : offset + 8] = WORD.pack(one_cpu + 2)
        assert POLL_NS <= duration_ns(lambda: ring.writer.wait_for_space(POLL_NS, 0))
        assert b"m" == reader.try_take()
        reader.release()
        ring.set_data_word(ring.layout.writer_cpu_offset, one_cpu + 2)
        assert POLL_NS <= duration_ns(lambda: reader.wait(POLL_NS, 0))


def test_signal_ends_a_wait() -> None:
    """What a signal handler raises ends the wait of either end."""
    interrupted = threading.Event()

    def interrupt_once() -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise Interrupted

    with ring_of(n_chunks=1) as ring, handler_of(signal.SIGUSR1, interrupt_once):
        main = threading.get_ident()
        offsets = (
            (ring.control, ring.layout.rank_offset(0) + 8),
            (ring.data, ring.layout.writer_sleeps_offset),
        )
        waits = (ring.readers[0].wait, ring.writer.wait_for_space)
        for (memory, offset), wait in zip(offsets, waits, strict=True):
            if wait == waits[1]:
                ring.publish(b"m")

            def send(memory: Any = memory, offset: int = offset) -> None:
                wait_for_mark(memory, offset, threading.main_thread())
                # The mark is up a little before the sleep begins, which no signal ends then.
                while not interrupted.wait(0.01):
                    signal.pthread_kill(main, signal.SIGUSR1)

            interrupted.clear()
            start = time.monotonic()
            sender = run(send)
            with pytest.raises(Interrupted):
                wait(0, SLEEP_NS)
            assert time.monotonic() - start < PATIENCE_S
            sender.join(PATIENCE_S)


# --- the lock of an end ---------------------------------------------------------------------------


class Late(Exception):
    """What a turn that did not come in time raises here."""


def test_turns_exclude_each_other() -> None:
    """Never two threads have a turn at once, however they ask for it."""
    lock, inside, most = EndLock("writer", lambda: None), 0, 0

    def take_turns(number: int) -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock if number % 2 else lock.until(time.monotonic() + PATIENCE_S, Late):
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

    threads = [run(take_turns, n) for n in range(4)]
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert (0, 1) == (inside, most)


def test_turn_that_does_not_come() -> None:
    """A turn that another thread keeps raises the given error when the time is up, also at once."""
    lock, entered, leave = EndLock("reader", lambda: None), threading.Event(), threading.Event()

    def keep() -> None:
        with lock:
            entered.set()
            leave.wait(PATIENCE_S)

    thread = run(keep)
    assert entered.wait(PATIENCE_S)
    for wait_s in (-1.0, 0.0, 0.02):
        start = time.monotonic()
        turn, text = lock.until(start + wait_s, QueueFull), "did not end its call on this reader"
        with pytest.raises(QueueFull, match=text), turn:
            pass
        assert wait_s - 0.001 <= time.monotonic() - start < PATIENCE_S
    leave.set()
    with lock.until(time.monotonic() + PATIENCE_S, Late):
        pass
    thread.join(PATIENCE_S)


def test_turn_from_inside_a_turn() -> None:
    """A second turn of the same thread is a ShmcastError, and the first one stays a turn."""
    lock = EndLock("writer", lambda: None)
    with lock:
        for turn in (lock, lock.until(time.monotonic() + PATIENCE_S, Late)):
            text = "a call on this writer came from inside another"
            with pytest.raises(ShmcastError, match=text), turn:
                pass
    with lock:
        pass


def test_turn_from_a_signal_handler() -> None:
    """A signal handler that interrupts a turn cannot take another one, and does not deadlock."""
    lock, errors = EndLock("writer", lambda: None), []

    def enter() -> None:
        try:
            with lock:
                pass
        except ShmcastError as error:
            errors.append(error)

    with handler_of(signal.SIGUSR1, enter), lock:
        signal.raise_signal(signal.SIGUSR1)
    assert 1 == len(errors)
    with lock:
        pass


def test_signal_ends_the_wait_for_a_turn() -> None:
    """What a signal handler raises ends the wait for a turn, which is still there for others."""
    lock, entered, interrupted = (
        EndLock("writer", lambda: None),
        threading.Event(),
        threading.Event(),
    )
    main = threading.get_ident()

    def keep() -> None:
        with lock:
            entered.set()
            while not interrupted.wait(0.01):  # whether the main thread waits can't be seen
                signal.pthread_kill(main, signal.SIGUSR1)

    def interrupt_once() -> None:
        if entered.is_set() and not interrupted.is_set():
            interrupted.set()
            raise Interrupted

    def wait_for_a_turn() -> None:
        thread.start()
        assert entered.wait(PATIENCE_S)
        with lock:
            pass

    thread = threading.Thread(target=keep, daemon=True)
    with handler_of(signal.SIGUSR1, interrupt_once):
        with pytest.raises(Interrupted):
            wait_for_a_turn()
        thread.join(PATIENCE_S)
        with lock:
            pass


def test_close_between_turns() -> None:
    """`close` calls its function at once when no turn is taken, and nobody gets in afterwards."""
    lock, calls = EndLock("writer", lambda: None), []
    assert not lock.is_closing
    lock.close(lambda: calls.append(1))
    assert lock.is_closing
    assert [1] == calls
    for turn in (lock, lock.until(time.monotonic() + PATIENCE_S, Late)):
        with pytest.raises(QueueClosed, match="this writer is closed"), turn:
            pass
    assert [1] == calls


def test_close_during_a_turn() -> None:
    """`close` during a turn does not wait: its function is called when the turn ends, once."""
    lock, calls = EndLock("writer", lambda: None), []
    with lock:
        lock.close(lambda: calls.append(1))
        run(lambda: lock.close(lambda: calls.append(2))).join(PATIENCE_S)
        assert [] == calls
        assert lock.is_closing
    assert 1 == len(calls)
    lock.close(lambda: calls.append(3))
    assert 1 == len(calls)


def race(lock: EndLock) -> list[list[int]]:
    """Two threads that take turns and two that close; what was inside a turn at each closing."""
    barrier = threading.Barrier(4)
    inside: list[int] = []
    calls: list[list[int]] = []

    def take_turns() -> None:
        barrier.wait(PATIENCE_S)
        with contextlib.suppress(QueueClosed):
            while True:
                with lock:
                    inside.append(1)
                    inside.pop()

    def close() -> None:
        barrier.wait(PATIENCE_S)
        lock.close(lambda: calls.append(list(inside)))

    threads = [run(take_turns), run(take_turns), run(close), run(close)]
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return calls


def test_close_races_with_turns() -> None:
    """However close and turns meet, the function is called exactly once, and not inside a turn."""
    assert [[[]]] * 200 == [race(EndLock("writer", lambda: None)) for _ in range(200)]


def test_close_lets_go_of_its_function() -> None:
    """The function that closed an end is not kept, so the end is no reference cycle."""

    class Function:
        def __call__(self) -> None:
            pass

    lock, function = EndLock("writer", lambda: None), Function()
    reference = weakref.ref(function)
    lock.close(function)
    lock.close(function)
    del function
    gc.collect()
    assert reference() is None


def test_turn_from_a_signal_handler_while_closing() -> None:
    """A signal handler that interrupts the closing itself gets QueueClosed, not a deadlock."""
    lock, errors = EndLock("writer", lambda: None), []

    def enter() -> None:
        try:
            with lock.until(time.monotonic() + 1.0, Late):
                pass
        except Exception as error:
            errors.append(type(error))

    with handler_of(signal.SIGUSR1, enter):
        lock.close(lambda: signal.raise_signal(signal.SIGUSR1))
    assert [QueueClosed] == errors


def use_in_child(pipe: Connection, ring: Ring, lock: EndLock) -> None:
    """Call everything that a forked child might call, and send what came of it."""
    writer, reader = ring.writer, ring.readers[0]
    done: list[object] = []
    texts = []
    calls: list[Callable[[], object]] = [
        lambda: writer.try_publish([b"x"], [], True),
        lambda: writer.try_claim(40, True),
        lambda: writer.skip_to(1),
        lambda: writer.publish_file(1, [b"x"], []),
        lambda: writer.publish([b"x"], [], [], None, [], ring.segment.data_descriptor),
        lambda: writer.copy_to_block(ring.layout.arena_offset, memoryview(b"x")),
        lambda: writer.block_view(ring.layout.arena_offset, 1),
        lambda: writer.draft(ring.layout.arena_offset, 1),
        writer.given_up_holds,
        lambda: writer.hold(0, 1, [0]),
        lambda: writer.end_hold(0, 0),
        lambda: writer.wait_for_space(0, 1000),
        lambda: writer.admit(0, True),
        lambda: writer.strike(0),
        lambda: writer.new_epoch(0),
        lambda: writer.has_left(0),
        writer.lags,
        writer.stop,
        writer.say_closing,
        reader.try_take,
        reader.release,
        lambda: reader.wait(0, 1000),
        lambda: reader.lag,
        lambda: reader.is_struck,
        lambda: reader.is_closing,
        reader.stop,
        reader.leave,
        lock.check_not_forked,
        lock.__enter__,
        lock.until(time.monotonic() + PATIENCE_S, Late).__enter__,
    ]
    for call in calls:
        try:
            done.append(call())
        except ShmcastError as error:
            texts.append(str(error))
    lock.close(lambda: done.append("closed"))
    pipe.send((done, len(calls), texts, lock.is_forked))


def test_forked_child(start_child: StartChild) -> None:
    """In a forked child every call is a ShmcastError naming both processes, and does nothing."""
    lock = EndLock("writer", lambda: None)
    with ring_of(arena_bytes=8 * PAGE) as ring:
        ring.publish(b"0")
        child = start_child(use_in_child, ring, lock, method="fork")
        done, n_calls, texts, is_forked = child.receive()
        assert ([], n_calls, True) == (done, len(texts), is_forked)
        expected = f"belongs to process {os.getpid()}; this is process {child.pid}"
        assert [] == [text for text in texts if expected not in text]
        child.join()
        assert not lock.is_forked
        lock.check_not_forked()
        assert not ring.readers[0].is_struck
        assert (b"0", []) == taken(ring.readers[0])
        assert Claim.DONE == ring.publish(b"1")


# --- buffers --------------------------------------------------------------------------------------


def test_stream_parts_keep_bytes_and_copy_the_rest() -> None:
    """A part that is bytes is kept as it is; what could change later is copied at once."""
    parts, fixed, changing = StreamParts(), b"fixed", bytearray(b"now")
    parts.write(fixed)
    parts.write(changing)
    parts.write(memoryview(changing))
    changing[:] = b"new"
    assert [b"fixed", b"now", b"now"] == parts.parts
    assert parts.parts[0] is fixed


def test_memory_keeps_its_owner() -> None:
    """A Memory is its owner's memory, writable, and every view of it keeps the owner alive."""
    array = np.arange(8, dtype=np.uint8)
    memory = Memory(array.ctypes.data, 8, array)
    reference = weakref.ref(array)
    memoryview(memory)[0] = 7
    assert 7 == array[0]
    view = memoryview(memory)
    del array, memory
    assert reference() is not None
    assert bytes([7, 1, 2, 3, 4, 5, 6, 7]) == bytes(view)
    del view
    assert reference() is None


def test_private_mapping() -> None:
    """A private mapping shows the file, and what is written to it stays out of the file."""
    file = new_memory_file("test", 5000)
    os.pwrite(file, b"file", 4000)
    first, second = (memoryview(Mapping(file, 5000, shared=False, writable=True)) for _ in range(2))
    first[4000:4004] = b"mine"
    assert b"file" == os.pread(file, 4, 4000)
    os.close(file)
    assert (5000, b"mine", b"file") == (len(first), first[4000:4004], second[4000:4004])


def test_shared_mapping() -> None:
    """A shared mapping and the file are one, also without the descriptor; it may be read-only."""
    file = new_memory_file("test", 5000)
    first = memoryview(Mapping(file, 5000, shared=True, writable=True))
    second = memoryview(Mapping(file, 5000, shared=True, writable=False))
    first[4000:4004] = b"both"
    assert b"both" == os.pread(file, 4, 4000)
    os.close(file)
    assert (5000, b"both") == (len(second), second[4000:4004])
    assert [False, True] == [first.readonly, second.readonly]


def count_mappings(name: str) -> int:
    """How many mappings of a memory file with this name this process has."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


def count_in_child(pipe: Connection, *mappings: object) -> None:
    """Send how many of the test's mappings there are, also when their objects are gone."""
    pipe.send([count_mappings(name) for name in ("test-shared", "test-private")])


def test_mappings_in_a_forked_child(start_child: StartChild) -> None:
    """A forked child inherits private mappings and no shared one, and unmaps none elsewhere."""
    files = [new_memory_file(f"test-{name}", 5000) for name in ("shared", "private")]
    shared = Mapping(files[0], 5000, shared=True, writable=True)
    private = Mapping(files[1], 5000, shared=False, writable=True)
    child = start_child(count_in_child, shared, private, method="fork")
    assert [0, 1] == child.receive()
    assert 0 == child.join()
    assert [1, 1] == [count_mappings(name) for name in ("test-shared", "test-private")]
    del shared, private
    assert [0, 0] == [count_mappings(name) for name in ("test-shared", "test-private")]
    for file in files:
        os.close(file)


@pytest.mark.parametrize("shared", [True, False])
def test_mapping_that_is_refused(shared: bool) -> None:
    """A mapping that the kernel refuses is an OSError with the kernel's reason."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(-1, 4096, shared=shared, writable=True)


def test_new_bytearray() -> None:
    """A new bytearray has the length that was asked for, also none."""
    assert [0, 1, 100000] == [len(new_bytearray(size)) for size in (0, 1, 100000)]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 6)), max_size=5),
    st.sampled_from(["u1", "u2", "u4", "u8", "c16"]),
    st.integers(0, 2**32 - 1),
)
def test_copy_strided(dimensions: list[tuple[int, int]], dtype: str, seed: int) -> None:
    """A strided copy is numpy's contiguous copy, for every shape, stride and item size."""
    base = np.random.default_rng(seed).integers(0, 256, 20000, dtype=np.uint8).view(dtype)
    shape = tuple(length for length, _ in dimensions)
    steps = tuple(step for _, step in dimensions)
    middle = base[len(base) // 2 :]
    array = np.lib.stride_tricks.as_strided(middle, shape, tuple(s * base.itemsize for s in steps))
    target = bytearray(array.nbytes)
    copy_strided(target, middle.ctypes.data, shape, steps, base.itemsize)
    assert array.tobytes() == bytes(target)


def test_copy_strided_of_a_wrong_size() -> None:
    """A destination of another size, or a shape that does not match its strides, is refused."""
    array = np.zeros(16, np.uint8)
    many = (1,) * 65
    for size_bytes, shape, strides, text in (
        (3, (4,), (1,), "the array has 4 bytes, the destination 3"),
        (5, (4,), (1,), "the array has 4 bytes, the destination 5"),
        (4, (4,), (1, 1), "are no array"),
        (1, many, many, "are no array"),
    ):
        with pytest.raises(ValueError, match=text):
            copy_strided(bytearray(size_bytes), array.ctypes.data, shape, strides, 1)


@pytest.mark.parametrize(
    ("offsets", "slots"),
    [((0, 0), (0, 0)), ((0, 2 * PAGE), (1, 1)), ((0, PAGE + 64), (0, 1)), ((64, PAGE), (0, 1))],
    ids=["twice", "one slot", "not a page", "not from a page on"],
)
@pytest.mark.parametrize("is_leased", [True, False])
def test_damaged_places(offsets: tuple[int, int], slots: tuple[int, int], is_leased: bool) -> None:
    """Buffers that share a slot, or lie at no page, are damage: one's end would be the other's."""
    with ring_of(arena_bytes=8 * PAGE) as ring:
        if is_leased:
            ring.lease()
        ring.segment.reserve_arena(ring.layout.arena_offset, ring.layout.arena_bytes)
        ring.reserve(1024)
        places = [
            (ring.layout.arena_offset + offset, slot)
            for offset, slot in zip(offsets, slots, strict=True)
        ]
        buffers = [memoryview(b"a" * PAGE), memoryview(b"b" * PAGE)]
        descriptor = ring.segment.data_descriptor
        ring.writer.publish([b"s"], buffers, places, None, [], descriptor)
        with pytest.raises(ProtocolError, match="damaged"):
            ring.readers[0].try_take()
