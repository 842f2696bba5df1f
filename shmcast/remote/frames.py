"""What stands in a frame: its header, the kinds of frames, and the texts of others."""

from __future__ import annotations

import enum
import os
import socket as net
import struct
from typing import Any, Final, NamedTuple

from shmcast.errors import ProtocolError

__all__ = [
    "ADMITTED",
    "ALIASED_BYTES",
    "HEADER",
    "MAGIC",
    "MOST_ASKED_BYTES",
    "MOST_TEXT_BYTES",
    "VOID",
    "Header",
    "Kind",
    "RingSizes",
    "clean",
    "name_of",
    "pack",
    "unpack",
    "who",
]

# Magic and version, kind, rank, session, number, how many bytes follow. These stand in the same
# frame: a text, a stream; or in frames of their own: a stream and its buffers.
HEADER: Final = struct.Struct("<8sIIQQQ")
MAGIC: Final = b"shmcast\x01"
#: How an admission's text starts: the sizes of the ring, how many messages were published.
ADMITTED: Final = struct.Struct("<QQQQQQQ")
#: Ends a message that a signal has cut off; whoever gets it drops it.
VOID: Final = b"shmcast: void"

MOST_TEXT_BYTES: Final = 1024
MOST_ASKED_BYTES: Final = 2048  # of a frame that a reader sends
#: ZeroMQ copies what is smaller. Such a frame may lie at any address, so it is copied on arrival.
ALIASED_BYTES: Final = 64 * 1024


class Kind(enum.IntEnum):
    """What a frame says. The first half comes from readers, the second from the writer."""

    HELLO = 1
    RESUME = 2
    ACK = 3
    DONE = 4
    LEAVE = 5
    BEAT = 6
    VIA = 7
    ENDING = 8
    ADMISSION = 9
    MESSAGE = 10
    CLOSING = 11
    EVICTION = 12
    REFUSAL = 13
    DENIAL = 14
    REPEAT = 15


class RingSizes(NamedTuple):
    """The settings of the writer's ring that a relay takes over."""

    n_chunks: int
    chunk_bytes: int
    arena_bytes: int
    spin_us: int = 30
    copies: int = 0  # whether `receive` is "copy"
    warn_after_us: int = 60_000_000


class Header(NamedTuple):
    """The start of every message's first frame."""

    kind: int
    rank: int
    session: int
    number: int


def pack(kind: Kind, rank: int, session: int, number: int = 0, text: bytes = b"") -> bytes:
    """A frame that nothing follows."""
    return HEADER.pack(MAGIC, kind, rank, session, number, len(text)) + text


def unpack(frames: list[Any]) -> Header:
    """
    The header, which is how the first frame starts.

    Raises:
        ProtocolError: it is none of this version, or does not fit what follows.
    """
    first = memoryview(frames[0]) if frames else memoryview(b"")
    start = bytes(first[: len(MAGIC)])
    if start != MAGIC:
        if start and start[:-1] == MAGIC[:-1]:
            raise ProtocolError(f"the peer has version {start[-1]}, this one {MAGIC[-1]}")
        raise ProtocolError("the peer does not speak the shmcast protocol")
    if len(first) < HEADER.size:
        raise ProtocolError(f"a header has {len(first)} bytes instead of {HEADER.size}")
    _, kind, rank, session, number, length = HEADER.unpack_from(first)
    body_bytes = len(first) - HEADER.size + sum(map(len, frames[1:]))
    if length != body_bytes:
        raise ProtocolError(f"{body_bytes} bytes follow a header that says {length}")
    return Header(kind, rank, session, number)


def name_of(kind: int) -> str:
    """The kind of frame as errors call it."""
    return Kind(kind).name if kind in list(Kind) else f"unknown kind {kind}"


def clean(text: bytes | memoryview, most_bytes: int = 200) -> str:
    """A peer's text for errors and logs: of bounded length, and in one line."""
    shown = bytes(text[:most_bytes]).decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in shown)


def who() -> bytes:
    """What others call this process."""
    return f"{os.getpid()} on {net.gethostname()}".encode()[:200]
