"""The frames of both remote ends: `PYTHONPATH=tests python -m fuzz frames`."""

import contextlib
import struct
import time
from typing import Any, ClassVar

import zmq

from shmcast import ProtocolError, QueueConfig, ShmcastError, remote
from shmcast._ring import RingReader, RingWriter
from shmcast.layout import Layout
from shmcast.remote import RemoteReader, RemoteWriter
from shmcast.segment import Segment

RANKS = (0, 2)
TOKEN = "f" * 64
CONFIG = QueueConfig(n_readers=3, n_chunks=4, chunk_bytes=1024, arena_bytes=0)


class Nowhere:
    """Stands for a socket and for the I/O thread: what is sent goes nowhere, and nobody runs."""

    allowed_keys: ClassVar[dict[str, str]] = {}

    def send(self, *_: object, **__: object) -> None: ...

    send_multipart = add = wake = leave = send


NOWHERE: Any = Nowhere()
remote._Loop.enter = classmethod(lambda _: NOWHERE)  # type: ignore[method-assign, assignment]


class Writer(RemoteWriter):
    def _bind(self, bind: str, _security: str) -> None:
        self._socket, self._monitor, self.endpoint = NOWHERE, NOWHERE, bind


#: To whom; kind, rank, session, number; how many bytes follow here and in a frame of their own.
STEP = struct.Struct("<BBBBQBB")
TO_WRITER, TO_READER, PUBLISH, SERVE, TAKE, RAW = range(6)


def step(
    action: int, kind: int = 0, rank: int = 0, number: int = 0, body: bytes = b"", more: bytes = b""
) -> bytes:
    return STEP.pack(action, kind, rank, 1, number, len(body), len(more)) + body + more


_HELLO = step(TO_WRITER, 1, body=TOKEN.encode() + b"4711 on host") + step(SERVE)
_ADMISSION = step(TO_READER, 7, body=bytes([4, 0, 0, 0, 0, 0, 0, 0]) + b"4711 on host")
SEEDS = [
    _HELLO + step(PUBLISH) * 3 + step(TO_WRITER, 3, number=2) + step(TO_WRITER, 4),
    _HELLO + step(PUBLISH) + step(TO_WRITER, 2, number=1, body=TOKEN.encode()) + step(TO_WRITER, 6),
    _HELLO
    + step(TO_WRITER, 5)
    + step(SERVE)
    + _HELLO
    + step(PUBLISH) * 4
    + step(TO_WRITER, 3, 0, 4),
    _ADMISSION + step(TO_READER, 8, body=b"stream") + step(TAKE) + step(TO_READER, 9, number=1),
    _ADMISSION + step(TO_READER, 8, more=b"b" * 9) + step(TO_READER, 8, number=1) + step(TAKE) * 2,
    step(TO_READER, 11, body=b"no") + step(TO_READER, 12, body=b"\xff") + step(TO_READER, 10),
    step(RAW, body=b"shmcast\x02" + bytes(36)) + step(RAW, body=bytes(60)) + step(RAW),
]


def one_input(data: bytes) -> None:
    """Whatever comes, an end goes on, or says that its peer breaks the protocol."""
    with contextlib.closing(Segment.create(Layout.of(CONFIG))) as segment:
        run(segment, data)


def run(segment: Segment, data: bytes) -> None:
    ring = RingWriter(segment)
    writer = Writer(
        bind="tcp://127.0.0.1:1",
        security="none",
        ranks=RANKS,
        token=TOKEN,
        n_chunks=CONFIG.n_chunks,
        window_bytes=0,
        place_of=lambda rank, epoch: RingReader(segment, rank, epoch),
        new_epoch=ring.new_epoch,
        admit=ring.admit,
        strike=ring.strike,
        has_left=ring.has_left,
    )
    reader = RemoteReader(endpoint="tcp://127.0.0.1:1", keys=None, token=TOKEN, rank=0)
    reader._socket, reader._session = NOWHERE, 1
    for index in range(CONFIG.n_chunks):
        ring.set_reserved(segment.reserve_chunk(index, CONFIG.chunk_bytes))
    offset = 0
    while offset + STEP.size <= len(data):
        action, kind, rank, session, number, n_body, n_more = STEP.unpack_from(data, offset)
        start, middle = offset + STEP.size, offset + STEP.size + n_body
        offset = middle + n_more
        body, more = data[start:middle], data[middle:offset]
        length = len(body) + len(more)
        head = remote._HEADER.pack(remote._MAGIC, kind, rank, session, number, length)
        frames = [body if action % 6 == RAW else head + body, *[more] * bool(more)]
        match action % 6:
            case 2:
                if not ring.try_publish([body], []):
                    writer.publish(ring.messages - 1, memoryview(body), [])
            case 3:
                serve(writer)
            case 4:
                take(reader)
            case to:
                if to != TO_READER:
                    writer._take(time.monotonic(), bytes([session]), list(frames))
                if to != TO_WRITER:
                    reader._try_take_frames([zmq.Frame(frame) for frame in frames])
    serve(writer)
    take(reader)
    assert ring.damaged() is None


def serve(writer: RemoteWriter) -> None:
    """What a call of the writer's end and its I/O thread do."""
    writer.serve()
    for peer in list(writer.admitted()):
        try:
            has_ended = writer.is_dead(peer) or writer._has_left(peer.rank)
        except ProtocolError:
            has_ended = True
        if has_ended:
            writer.vacate(peer.rank)
    writer.run(time.monotonic(), {})
    for peer in writer._peers.values():
        assert peer.released <= peer.acked <= peer.sent_number <= writer._published


def take(reader: RemoteReader) -> None:
    """What a call of the reader's end does."""
    with contextlib.suppress(ShmcastError):
        reader.step()
    if reader.ring.try_take() is not None:
        reader.ring.release()
