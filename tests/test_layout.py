"""`Layout`: nothing overlaps, everything is aligned, and a damaged header is refused."""

from __future__ import annotations

import itertools
import math
import mmap
import re
import struct

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcast import ConfigError, ProtocolError, QueueConfig
from shmcast.layout import HEADER_BYTES, LINE_BYTES, MOST_FAILURE_BYTES, Layout, round_up

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORD_BYTES = 8
#: As `layout` documents it: magic, version, four counts, seconds, two counts.
HEADER = struct.Struct("=8sQQQQQdQQ")
LAYOUT = Layout.of(QueueConfig(n_readers=3, n_chunks=5, chunk_bytes=5000, arena_bytes=100_000))

CONFIGS = st.builds(
    QueueConfig,
    n_readers=st.integers(1, 600) | st.just(4096),
    n_chunks=st.integers(1, 40),
    chunk_bytes=st.integers(KIB, 1024 * GIB),
    spin_us=st.integers(0, 1_000_000),
    warn_after_s=st.floats(0, 1e300, exclude_min=True) | st.integers(1, 10**6),
    receive=st.sampled_from(["private", "copy"]),
    arena_bytes=st.integers(0, 3 * mmap.PAGESIZE + 1) | st.integers(0, 1 << 46),
)

Part = tuple[int, int]  # from, to


def overlaps(parts: list[Part]) -> list[tuple[Part, Part]]:
    """The pairs of neighbours that share a byte."""
    return [(a, b) for a, b in itertools.pairwise(sorted(parts)) if a[1] > b[0]]


def word(offset: int) -> Part:
    return offset, offset + WORD_BYTES


def words_in_rank(layout: Layout) -> list[int]:
    """Where the words lie within a rank's line."""
    return [
        layout.cursor_in_rank,
        layout.sleeps_in_rank,
        layout.left_in_rank,
        layout.given_ups_in_rank,
        layout.leased_in_rank,
        layout.cpu_in_rank,
    ]


@pytest.mark.parametrize(
    ("number", "multiple", "expected"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (2**62 + 1, 4096, 2**62 + 4096)],
)
def test_rounding_up(number: int, multiple: int, expected: int) -> None:
    """`round_up` gives the smallest multiple that is not below the number."""
    assert expected == round_up(number, multiple)


@given(config=CONFIGS)
@example(config=QueueConfig(n_readers=4096, n_chunks=1, chunk_bytes=KIB))
@example(config=QueueConfig(n_chunks=1, chunk_bytes="1024 GiB"))
def test_nothing_in_the_data_file_overlaps(config: QueueConfig) -> None:
    """Header, words, epochs, chunks and arena share no byte and lie inside the data file."""
    layout = Layout.of(config)
    parts = [
        (0, HEADER_BYTES),
        word(layout.published_offset),
        word(layout.writer_cpu_offset),
        word(layout.closing_offset),
        word(layout.writer_sleeps_offset),
        (layout.failure_offset, layout.failure_offset + WORD_BYTES + MOST_FAILURE_BYTES),
        *(word(layout.epoch_offset(rank)) for rank in range(config.n_readers)),
        *(
            (layout.chunk_offset(index), layout.chunk_offset(index) + config.chunk_bytes)
            for index in range(config.n_chunks)
        ),
    ]
    if config.arena_bytes:
        arena = layout.arena_offset, layout.arena_offset + config.arena_bytes
        parts += [word(layout.guard_offset), arena]
    assert [] == overlaps(parts)
    assert layout.data_bytes >= max(end for _, end in parts)


@given(config=CONFIGS)
def test_nothing_in_the_control_file_overlaps(config: QueueConfig) -> None:
    """The words to sleep on and the ranks' words share no byte and lie inside the control file."""
    layout = Layout.of(config)
    parts = [
        word(layout.readers_word_offset),
        word(layout.writer_word_offset),
        *(
            word(layout.rank_offset(rank) + offset)
            for rank in range(config.n_readers)
            for offset in words_in_rank(layout)
        ),
        *(
            (start, start + layout.n_slots * WORD_BYTES)
            for start in map(layout.rank_given_up_offset, range(config.n_readers))
        ),
    ]
    assert [] == overlaps(parts)
    assert layout.control_bytes >= max(end for _, end in parts)


@given(config=CONFIGS)
def test_words_are_aligned(config: QueueConfig) -> None:
    """Every word is on a multiple of 8, so that the processor stores it whole."""
    layout = Layout.of(config)
    last = config.n_readers - 1
    offsets = [
        layout.published_offset,
        layout.writer_cpu_offset,
        layout.closing_offset,
        layout.writer_sleeps_offset,
        layout.failure_offset,
        layout.epoch_offset(0),
        layout.epoch_offset(last),
        layout.readers_word_offset,
        layout.writer_word_offset,
        layout.guard_offset,
        layout.rank_offset(0),
        layout.rank_offset(last),
        layout.rank_given_up_offset(0),
        layout.rank_given_up_offset(last),
        *words_in_rank(layout),
    ]
    assert [0] * len(offsets) == [offset % WORD_BYTES for offset in offsets]


@given(config=CONFIGS)
def test_ends_do_not_share_lines(config: QueueConfig) -> None:
    """What different ends store is on different lines, and a rank's words are all on its own."""
    layout = Layout.of(config)
    assert 128 == LINE_BYTES
    starts = [
        layout.readers_word_offset,
        layout.writer_word_offset,
        *(layout.rank_offset(rank) for rank in range(config.n_readers)),
    ]
    if config.arena_bytes:
        starts += [layout.rank_given_up_offset(rank) for rank in range(config.n_readers)]
    assert {0} == {start % LINE_BYTES for start in starts}
    assert len(starts) == len(set(starts))
    lines = {
        offset // LINE_BYTES
        for offset in (
            0,
            layout.published_offset,
            layout.closing_offset,
            layout.writer_sleeps_offset,
            layout.failure_offset,
            layout.epochs_offset,
        )
    }
    assert 6 == len(lines)
    assert max(words_in_rank(layout)) + WORD_BYTES <= LINE_BYTES


@given(config=CONFIGS)
def test_chunks_and_files_are_aligned(config: QueueConfig) -> None:
    """Chunks start on lines; the first one, the guard, the arena and the files on pages."""
    layout = Layout.of(config)
    last = layout.chunk_offset(config.n_chunks - 1)
    assert (0, 0) == (layout.chunk_offset(0) % mmap.PAGESIZE, last % LINE_BYTES)
    assert (0, 0) == (layout.data_bytes % mmap.PAGESIZE, layout.control_bytes % mmap.PAGESIZE)
    assert (0, 0) == (layout.guard_offset % mmap.PAGESIZE, layout.arena_offset % mmap.PAGESIZE)
    spare_bytes = layout.guard_offset - (last + config.chunk_bytes)
    assert 0 <= spare_bytes < mmap.PAGESIZE + LINE_BYTES


@given(config=CONFIGS)
def test_the_arena_is_what_was_asked_for(config: QueueConfig) -> None:
    """The arena is arena_bytes in whole pages behind a page for the guard, or both are nothing."""
    layout = Layout.of(config)
    guard_bytes = mmap.PAGESIZE if config.arena_bytes else 0
    assert guard_bytes == layout.arena_offset - layout.guard_offset
    size_bytes = layout.data_bytes - layout.arena_offset
    assert 0 == size_bytes % mmap.PAGESIZE
    assert 0 <= size_bytes - config.arena_bytes < mmap.PAGESIZE


@pytest.mark.parametrize(
    ("n_pages", "expected"), [(0, 0), (1, 1), (4095, 4095), (4096, 4096), (4097, 4096)]
)
def test_slots_of_an_arena(n_pages: int, expected: int) -> None:
    """There is a slot for every page, as no block is smaller, and never more than 4096."""
    assert expected == Layout.of(QueueConfig(arena_bytes=n_pages * mmap.PAGESIZE)).n_slots


@given(config=CONFIGS)
def test_every_end_has_a_byte_to_lock(config: QueueConfig) -> None:
    """The lock file has one byte for the writer and one for each rank."""
    assert 1 + config.n_readers == Layout.of(config).locks_bytes


def test_the_largest_layout_fits_64_bits() -> None:
    """The largest config that is allowed has offsets that a signed 64-bit word holds."""
    config = QueueConfig(
        n_readers=4096, n_chunks=1 << 20, chunk_bytes="1024 GiB", arena_bytes=1 << 46
    )
    assert Layout.of(config).data_bytes < 1 << 63


# The header


@given(config=CONFIGS)
def test_the_header_tells_the_whole_layout(config: QueueConfig) -> None:
    """A reader gets from the header the very layout that the writer has."""
    layout = Layout.of(config)
    header = layout.header()
    assert HEADER_BYTES == len(header)
    assert layout == Layout.from_header(header, layout.data_bytes)


def test_the_header_is_as_documented() -> None:
    """The header is the magic, the version and what the layout follows from."""
    for receive, number in (("private", 0), ("copy", 1)):
        header = attrs.evolve(LAYOUT, receive=receive).header()
        expected = (b"shmcast\0", 3, 3, 5, 5000, 30, 60.0, number, 100_000)
        assert expected == HEADER.unpack(header)


@given(header=st.binary(max_size=200), data_bytes=st.integers(0, 1 << 63))
def test_random_bytes_are_refused(header: bytes, data_bytes: int) -> None:
    """Bytes that no writer wrote are a ProtocolError."""
    with pytest.raises(ProtocolError):
        Layout.from_header(header, data_bytes)


@pytest.mark.parametrize("size_bytes", range(HEADER_BYTES))
def test_a_short_header_is_refused(size_bytes: int) -> None:
    """A header that is cut anywhere is a ProtocolError."""
    with pytest.raises(ProtocolError):
        Layout.from_header(LAYOUT.header()[:size_bytes], LAYOUT.data_bytes)


def test_another_magic_is_refused() -> None:
    """A file of something else is refused, and the error shows how it starts."""
    with pytest.raises(ProtocolError, match="ELF"):
        Layout.from_header(b"\x7fELF" + LAYOUT.header()[4:], LAYOUT.data_bytes)


@pytest.mark.parametrize("version", [0, 1, 2, 4, 1 << 63])
def test_another_version_is_refused(version: int) -> None:
    """A segment of another version is refused, and the error names both versions."""
    header = HEADER.pack(b"shmcast\0", version, 3, 5, 5000, 30, 60.0, 0, 100_000)
    with pytest.raises(ProtocolError) as caught:
        Layout.from_header(header, LAYOUT.data_bytes)
    assert [] == [part for part in (str(version), "reads 3") if part not in str(caught.value)]


@pytest.mark.parametrize("difference", [-LAYOUT.data_bytes, -mmap.PAGESIZE, -1, 1, mmap.PAGESIZE])
def test_a_file_of_another_size_is_refused(difference: int) -> None:
    """A header that means another size than the file has is refused, and both are named."""
    size_bytes = LAYOUT.data_bytes + difference
    with pytest.raises(ProtocolError) as caught:
        Layout.from_header(LAYOUT.header(), size_bytes)
    numbers = [int(digits) for digits in re.findall("[0-9]+", str(caught.value))]
    assert {size_bytes, LAYOUT.data_bytes} == set(numbers)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_readers", 0),
        ("n_readers", 4097),
        ("n_chunks", 0),
        ("n_chunks", (1 << 20) + 1),
        ("chunk_bytes", 0),
        ("chunk_bytes", KIB - 1),
        ("spin_us", 1_000_001),
        ("spin_us", 1 << 63),
        ("warn_after_s", 0.0),
        ("warn_after_s", -1.0),
        ("warn_after_s", math.nan),
        ("warn_after_s", math.inf),
        ("arena_bytes", (1 << 46) + 1),
    ],
)
def test_a_value_that_no_config_allows_is_refused(field: str, value: float) -> None:
    """A header with a value that no writer can have is damaged, also where the size fits it."""
    damaged = attrs.evolve(LAYOUT, **{field: value})
    with pytest.raises(ProtocolError, match="damaged"):
        Layout.from_header(damaged.header(), damaged.data_bytes)


@pytest.mark.parametrize("receive", [2, 3, 1 << 63])
def test_another_way_to_receive_is_refused(receive: int) -> None:
    """A header with a number that stands for no way to receive is damaged."""
    header = HEADER.pack(b"shmcast\0", 3, 3, 5, 5000, 30, 60.0, receive, 100_000)
    with pytest.raises(ProtocolError, match="damaged"):
        Layout.from_header(header, LAYOUT.data_bytes)


any_count = st.integers(0, 5000) | st.integers(0, 2**64 - 1)


@given(
    values=st.tuples(*[any_count] * 4),
    warn_after_s=st.floats(),
    receive=st.integers(0, 2) | st.integers(0, 2**64 - 1),
    arena_bytes=any_count,
)
def test_a_header_is_refused_or_one_that_a_writer_has(
    values: tuple[int, int, int, int], warn_after_s: float, receive: int, arena_bytes: int
) -> None:
    """What is not refused is the layout of some config, byte for byte."""
    header = HEADER.pack(b"shmcast\0", 3, *values, warn_after_s, receive, arena_bytes)
    n_readers, n_chunks, chunk_bytes, spin_us = values
    name = "copy" if receive == 1 else "private"
    try:
        data_bytes = Layout(*values, warn_after_s, name, arena_bytes).data_bytes
        layout = Layout.from_header(header, data_bytes)
    except ProtocolError:
        return
    try:
        config = QueueConfig(
            n_readers=n_readers,
            n_chunks=n_chunks,
            chunk_bytes=chunk_bytes,
            spin_us=spin_us,
            warn_after_s=warn_after_s,
            receive=name,
            arena_bytes=arena_bytes,
        )
    except ConfigError as error:
        pytest.fail(f"a reader takes what no writer writes: {error}")
    assert (Layout.of(config), header) == (layout, layout.header())


@given(position=st.integers(0, 8 * HEADER_BYTES - 1))
def test_a_flipped_bit_leads_nobody_out_of_the_file(position: int) -> None:
    """After any bit of a header flipped, it is refused or what it means still fits the file."""
    header = bytearray(LAYOUT.header())
    header[position // 8] ^= 1 << position % 8
    try:
        layout = Layout.from_header(bytes(header), LAYOUT.data_bytes)
    except ProtocolError:
        return
    end = layout.chunk_offset(layout.n_chunks - 1) + layout.chunk_bytes
    assert end <= layout.guard_offset <= layout.arena_offset
    assert layout.arena_offset + layout.arena_bytes <= layout.data_bytes == LAYOUT.data_bytes
    assert layout.epoch_offset(layout.n_readers) <= layout.chunks_offset
