"""The frames of both remote ends: `PYTHONPATH=tests python -m fuzz frames`."""

import collections
import contextlib
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import zmq

from shmcast import ProtocolError, QueueConfig, ShmcastError
from shmcast._ring import RingWriter
from shmcast.arena import Arena
from shmcast.layout import Layout
from shmcast.membership import Membership
from shmcast.remote import RemoteReader, RemoteWriter, RingSizes
from shmcast.remote.frames import ADMITTED, HEADER, MAGIC, Kind
from shmcast.remote.loop import Link, Loop
from shmcast.remote.reader_link import Connection
from shmcast.remote.writer_link import WriterLink
from shmcast.segment import Segment

RANKS = (0, 2)
TOKEN = "f" * 64
CONFIG = QueueConfig(n_readers=3, n_chunks=4, chunk_bytes=1024, arena_bytes=0)


class Nowhere:
    """Stands for a socket: what is sent goes nowhere, and nothing comes."""

    def send(self, *_: object, **__: object) -> None: ...

    send_multipart = disable_monitor = close = send

    def getsockopt(self, _: int) -> int:
        return 0


class Nobody:
    """Stands for the loop: nobody runs the links but this program."""

    is_exiting = False
    affinities: Iterator[int] = itertools.repeat(0)

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: collections.deque[Link] = collections.deque(maxlen=1)

    def wake(self, *_: object, **__: object) -> None: ...

    add = watch = mute = forget = drop = wake


NOWHERE: Any = Nowhere()
NOBODY: Any = Nobody()
Loop.enter = classmethod(lambda _: NOBODY)  # type: ignore[method-assign, assignment]


def bind_nowhere(self: WriterLink, bind: str, _security: str) -> None:
    self._socket = self._monitor = self._listener = NOWHERE
    self._descriptor, self.endpoint = -1, bind


WriterLink._bind = bind_nowhere  # type: ignore[method-assign]


#: To whom; kind, rank, session, number; how many bytes follow here and in a frame of their own.
STEP = struct.Struct("<BBBBQBB")
TO_WRITER, TO_READER, PUBLISH, SERVE, TAKE, RAW = range(6)


def step(
    action: int,
    kind: int = 0,
    number: int = 0,
    body: bytes = b"",
    more: bytes = b"",
    *,
    rank: int = 0,
    session: int = 1,
) -> bytes:
    return STEP.pack(action, kind, rank, session, number, len(body), len(more)) + body + more


def hello(rank: int, session: int) -> bytes:
    body = TOKEN.encode() + b"4711 on host"
    return step(TO_WRITER, Kind.HELLO, body=body, rank=rank, session=session) + step(SERVE)


_ADMISSION = step(TO_READER, Kind.ADMISSION, body=ADMITTED.pack(4, 1024, 0, 30, 0, 1, 0) + b"4711")
_RESUME = step(TO_WRITER, Kind.RESUME, 1, TOKEN.encode())
_VIA = step(TO_WRITER, Kind.VIA, 1, rank=2, session=2)
_ACKS = [step(TO_WRITER, Kind.ACK, number) for number in range(5)]
_LEAVE, _DONE = step(TO_WRITER, Kind.LEAVE), step(TO_WRITER, Kind.DONE)
_BEAT = step(TO_WRITER, Kind.BEAT) + step(TO_READER, Kind.BEAT)
_MESSAGE, _CLOSING = Kind.MESSAGE, Kind.CLOSING
SEEDS = [
    hello(0, 1) + step(PUBLISH) * 3 + step(SERVE) + _ACKS[2] + _BEAT + _DONE,
    hello(0, 1) + step(PUBLISH) + step(SERVE) + _RESUME + _ACKS[1],
    hello(0, 1) + _LEAVE + step(SERVE) + hello(0, 1) + step(PUBLISH) * 4 + step(SERVE) + _ACKS[4],
    hello(0, 1) + hello(2, 2) + _VIA + step(PUBLISH) * 2 + step(SERVE) + _ACKS[1] + _LEAVE,
    _ADMISSION
    + step(TO_READER, _MESSAGE, 0, b"stream")
    + step(TAKE)
    + step(TO_READER, _CLOSING, 1),
    _ADMISSION + step(TO_READER, _MESSAGE, 0, more=b"b" * 9) + step(TO_READER, _MESSAGE, 1) + _BEAT,
    step(TO_READER, Kind.REFUSAL, body=b"no") + step(TO_READER, Kind.EVICTION),
    step(TO_READER, Kind.DENIAL, body=b"\xff"),
    step(RAW, body=b"shmcast\x02" + bytes(36)) + step(RAW, body=bytes(60)) + step(RAW),
]


def one_input(data: bytes) -> None:
    """Whatever comes, an end goes on, or says that its peer breaks the protocol."""
    with contextlib.closing(Segment.create(Layout.of(CONFIG))) as segment:
        run(segment, data)


def run(segment: Segment, data: bytes) -> None:
    ring = RingWriter(segment)
    arena = Arena(segment.layout, ring, segment.reserve_arena)
    writer = RemoteWriter(
        bind="tcp://127.0.0.1:1",
        security="none",
        ranks=RANKS,
        token=TOKEN,
        sizes=RingSizes(CONFIG.n_chunks, CONFIG.chunk_bytes, CONFIG.arena_bytes),
        members=Membership(segment, ring, arena, RANKS),
    )
    reader = RemoteReader(endpoint="tcp://127.0.0.1:1", keys=None, token=TOKEN, rank=0)
    link, connection = reader.link, Connection(NOWHERE, NOWHERE, -1, 0.0)
    link._connection, link.session = connection, 1
    for index in range(CONFIG.n_chunks):
        ring.set_reserved(segment.reserve_chunk(index, CONFIG.chunk_bytes))
    offset = 0
    while offset + STEP.size <= len(data):
        action, kind, rank, session, number, n_body, n_more = STEP.unpack_from(data, offset)
        start, middle = offset + STEP.size, offset + STEP.size + n_body
        offset = middle + n_more
        body, more = data[start:middle], data[middle:offset]
        length = len(body) + len(more)
        head = HEADER.pack(MAGIC, kind, rank, session, number, length)
        frames = [body if action % 6 == RAW else head + body, *[more] * bool(more)]
        match action % 6:
            case 2:
                if ring.try_publish([body], []):
                    writer.publish(ring.messages - 1, memoryview(body), [])
            case 3:
                serve(writer)
            case 4:
                take(reader)
            case to:
                if to != TO_READER:
                    writer.link._take(NOBODY.now, bytes([session]), list(frames))
                if to != TO_WRITER:
                    link._try_take_frames(connection, [zmq.Frame(frame) for frame in frames])
    serve(writer)
    take(reader)
    assert ring.damaged() is None


def serve(writer: RemoteWriter) -> None:
    """What a call of the writer's end and its I/O thread do."""
    writer.serve()
    for peer in list(writer.admitted()):
        try:
            has_ended = writer.is_dead(peer) or writer._members.has_left(peer.rank)
        except ProtocolError:
            has_ended = True
        if has_ended:
            writer.vacate(peer.rank)
    NOBODY.now += 1
    writer.link.run(NOBODY.now)
    for peer in writer.link._peers.values():
        if peer.seat is not None:
            assert peer.released <= peer.acked <= writer.link.published


def take(reader: RemoteReader) -> None:
    """What a call of the reader's end does."""
    with contextlib.suppress(ShmcastError):
        reader.step()
    if reader.ring.try_take() is not None:
        reader.ring.release()
