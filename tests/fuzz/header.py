"""A segment's header: `PYTHONPATH=tests python -m fuzz header`."""

import mmap
import os
from pathlib import Path

from shmcast import ProtocolError, QueueConfig
from shmcast._ring import RingReader
from shmcast.layout import HEADER_BYTES, Layout
from shmcast.segment import FIXED_SIZE, Segment, add_seals, new_memory_file

LAYOUTS = [
    Layout.of(QueueConfig(n_readers=1, n_chunks=1, chunk_bytes=1024, arena_bytes=0)),
    Layout.of(
        QueueConfig(n_readers=3, n_chunks=40, chunk_bytes=1100, arena_bytes=5 * mmap.PAGESIZE)
    ),
    Layout.of(QueueConfig(n_chunks=2, chunk_bytes=4000, arena_bytes=1, receive="copy")),
]
SEEDS = [bytes([index]) + layout.header() for index, layout in enumerate(LAYOUTS)]


def file_of(name: str, content: bytes, size_bytes: int) -> int:
    descriptor = new_memory_file(name, size_bytes)
    os.pwrite(descriptor, content, 0)
    add_seals(descriptor, FIXED_SIZE)
    return descriptor


def n_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def one_input(data: bytes) -> None:
    """A header is refused, or a reader finds all of its words and chunks within the files."""
    layout = LAYOUTS[data[0] % len(LAYOUTS) if data else 0]
    before = n_descriptors()
    files = (
        file_of("fuzz-data", data[1 : 1 + HEADER_BYTES], layout.data_bytes),
        file_of("fuzz-control", b"", layout.control_bytes),
    )
    try:
        segment = Segment.attach(*files)
    except ProtocolError:
        assert before == n_descriptors()
        return
    for rank in range(min(segment.layout.n_readers, 8)):
        reader = RingReader(segment, rank, 0)
        if segment.layout.n_slots:
            reader.lease_from(segment.data_descriptor)
        reader.begin(0)
        assert reader.try_take() is None
        assert 0 == reader.lag
        reader.leave()
    segment.close()
    assert before == n_descriptors()
