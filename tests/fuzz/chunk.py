"""An image in a chunk, a block or a file: `PYTHONPATH=tests python -m fuzz chunk`."""

import mmap
import struct

from shmcast import ProtocolError, QueueConfig
from shmcast._ring import RingReader, image_bytes, image_pieces, read_image
from shmcast.layout import WORD_BYTES, Layout
from shmcast.segment import Segment

CHUNK_BYTES = 1024
LAYOUT = Layout.of(QueueConfig(n_chunks=1, chunk_bytes=CHUNK_BYTES, arena_bytes=4 * mmap.PAGESIZE))
SEGMENT = Segment.create(LAYOUT)
SEGMENT.reserve_chunk(0, CHUNK_BYTES)
SEGMENT.reserve_arena(LAYOUT.arena_offset, LAYOUT.arena_bytes)
DATA = memoryview(SEGMENT.data)  # type: ignore[arg-type]  # None after close


def image(stream: bytes, *buffers: bytes) -> bytes:
    views = [memoryview(buffer) for buffer in buffers]
    whole = bytearray(image_bytes([stream], views))
    for offset, piece in image_pieces(7, [stream], views):
        data = bytes(piece)
        whole[offset : offset + len(data)] = data
    return bytes(whole)


def header(kind: int, stream_bytes: int, n_buffers: int, slot: int) -> bytes:
    return struct.pack("=5Q", 7, kind, stream_bytes, n_buffers, slot)


def with_blocks(*blocks: tuple[int, int, int]) -> bytes:
    table = b"".join(struct.pack("=3Q", *block) for block in blocks)
    return header(1, 2, len(blocks), 0) + table + b"st"


_IN_BLOCK = image(b"stream", b"buffer" * 30)
_OFFSET = LAYOUT.arena_offset
SEEDS = [
    image(b"stream"),
    image(b"", b"one", b"", b"three" * 30),
    header(2, 5, 0, 0),
    header(3, _OFFSET, len(_IN_BLOCK), 1).ljust(CHUNK_BYTES, b"\0") + _IN_BLOCK,
    with_blocks((5000, _OFFSET, 0), (1, _OFFSET + 2 * mmap.PAGESIZE, 2)),
    (header(3, _OFFSET, 400, 3).ljust(CHUNK_BYTES, b"\0") + with_blocks((9, _OFFSET, 1))),
]


def check(stream: object, buffers: list[memoryview]) -> None:
    """Touch every byte."""
    assert isinstance(stream, bytes | memoryview)
    for part in (stream, *buffers):
        bytes(part)
        assert len(part) <= LAYOUT.data_bytes


def one_input(data: bytes) -> None:
    """What lies in a chunk, a block or a file is refused, or has all its parts inside of them."""
    number = int.from_bytes(data[:WORD_BYTES], "little")
    try:
        stream, buffers = read_image(data, number)
    except ProtocolError:
        pass
    else:
        assert len(stream) + sum(map(len, buffers)) <= len(data)
    DATA[LAYOUT.chunks_offset : LAYOUT.chunks_offset + CHUNK_BYTES] = data[:CHUNK_BYTES].ljust(
        CHUNK_BYTES, b"\0"
    )
    in_arena = data[CHUNK_BYTES:][: LAYOUT.arena_bytes]
    DATA[_OFFSET : _OFFSET + len(in_arena)] = in_arena
    struct.pack_into("=Q", DATA, LAYOUT.published_offset, (number + 1) % 2**64)
    for is_leased in (False, True):
        reader = RingReader(SEGMENT, 0, 0)
        reader.begin(number)
        if is_leased:
            struct.pack_into("=Q", DATA, LAYOUT.guard_offset, 2**64 - 1)
            reader.lease_from(SEGMENT.data_descriptor)
        try:
            taken = reader.try_take()
        except ProtocolError:
            pass
        else:
            if isinstance(taken, tuple):
                check(*taken)
            else:
                assert isinstance(taken, bytes | int | None)
        reader.release()
