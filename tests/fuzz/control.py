"""
Stores into the control file of a queue in use, and strangers at its socket.

`PYTHONPATH=tests python -m fuzz control`
"""

import contextlib
import socket
import struct
import sys
from pickle import PickleBuffer

import shmcast.segment
import shmcast.waiting
from shmcast import Handle, MessageQueue, MessageReader, QueueConfig, ShmcastError
from shmcast.layout import WORD_BYTES, Layout

# Asked for every queue, which takes most of its time.
shmcast.waiting.cpus_available = lambda: 2.0  # type: ignore[attr-defined]
shmcast.segment.memory_available_bytes = lambda: sys.maxsize

CONFIG = QueueConfig(
    n_readers=2, n_chunks=2, chunk_bytes=1024, oob_threshold_bytes=1000, arena_bytes="288 KiB"
)
LAYOUT = Layout.of(CONFIG)
N_WORDS = LAYOUT.rank_given_up_offset(CONFIG.n_readers) // WORD_BYTES

#: What is done, to which word or rank, and which value is stored.
STEP = struct.Struct("=BBQ")
STORE, SMALL, LARGE, LEASED, TAKE, DROP, LEAVE, READY, STRANGER = range(9)
WORD, FRAME = struct.Struct("=Q"), struct.Struct("=8sIIQ")


def steps(*some: tuple[int, ...]) -> bytes:
    return b"".join(STEP.pack(*(*step, 0, 0)[:3]) for step in some)


def _words(offset: int) -> int:
    return offset // WORD_BYTES


_BOTH = [(TAKE, 0), (TAKE, 1)]
SEEDS = [
    steps((SMALL,), *_BOTH, (STORE, _words(LAYOUT.rank_offset(0)), 1), (SMALL,), (SMALL,), *_BOTH),
    steps((LEASED,), (LEASED,), *_BOTH, *_BOTH, (DROP,), (LEASED,), (LEASED,), *_BOTH, *_BOTH),
    steps(*[(LARGE,), *_BOTH] * 3, (STORE, _words(LAYOUT.given_up_offset), 2), (LARGE,), *_BOTH),
    steps((STRANGER, 1, 99), (READY,), (LEAVE, 0), (STRANGER, 17, 3), (STRANGER, 0, 99), (READY,)),
    steps((SMALL,), (LEAVE, 0), (READY,), (SMALL,), (TAKE, 0), (TAKE, 1)),
    steps(*[(STORE, word, 2**64 - 1) for word in range(0, N_WORDS, 4)], (SMALL,), (READY,), *_BOTH),
]


def one_input(data: bytes) -> None:
    """Whatever is stored there, each call ends with a message in its turn or an error of ours."""
    with contextlib.ExitStack() as ends:
        queue = ends.enter_context(MessageQueue(CONFIG))
        handle = queue.export_handle()
        readers = [ends.enter_context(MessageReader(handle, rank)) for rank in range(2)]
        queue.wait_until_ready(10)
        for reader in readers:
            reader.wait_until_ready(10)
        control = memoryview(queue._writer.segment.control)  # type: ignore[arg-type]  # None after close
        kept: list[object] = []
        strangers = ends.enter_context(contextlib.ExitStack())
        for action, place, word in STEP.iter_unpack(data[: len(data) // STEP.size * STEP.size]):
            rank = place % 2
            with contextlib.suppress(ShmcastError):
                match action % 9:
                    case 0:
                        WORD.pack_into(control, place % N_WORDS * WORD_BYTES, word)
                    case 1:
                        queue.enqueue((queue.stats().messages,), 0)
                    case 2:
                        queue.enqueue((queue.stats().messages, "x" * 5000), 0)
                    case 3:
                        buffer = PickleBuffer(bytearray(70_000))
                        queue.enqueue((queue.stats().messages, buffer), 0)
                    case 4:
                        take(readers[rank], kept)
                    case 5:
                        kept.clear()
                    case 6:
                        readers[rank].close()
                        readers[rank] = ends.enter_context(MessageReader(handle, rank))
                    case 7:
                        queue.wait_until_ready(0)
                    case 8:
                        say(strangers, handle, kind=place % 16, rank=rank, number=word)


def say(
    strangers: contextlib.ExitStack, handle: Handle, *, kind: int, rank: int, number: int
) -> None:
    """Connect with a frame in the form of a reader's, or cut short."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    strangers.enter_context(stranger)
    with contextlib.suppress(BlockingIOError):  # too many
        stranger.connect("\0" + handle.local_address)
        frame = FRAME.pack(b"shmcast\x01", kind, rank, number) + handle.token.encode()
        stranger.send(frame[: number % 200 + 1])


def take(reader: MessageReader, kept: list[object]) -> None:
    """Receive a message, which is the one whose turn it is."""
    reader.wait_until_ready(0)
    number = reader._source.ring.next_sequence
    message = reader.dequeue(0)
    assert number == message[0]
    kept.append(message)
