"""
One writer broadcasts Python objects, large CPU tensors among them, to many readers.

Words:

* writer, reader: the one end that enqueues; an end that dequeues.
* rank: which reader this is, 0 … n_readers - 1.
* attachment, epoch: one life of a rank, from its handshake to its close or death; their number.
* message: what is enqueued: one stream (the pickle bytes) and its out-of-band buffers.
* segment: the shared memory of one queue: the data file, which the writer alone stores into, the
  control file, where readers store, and the lock file, which tells who is alive.
* ring, chunk: the ring is n_chunks chunks used in rotation; one message takes one chunk.
* cursor: how many messages an end has finished. It only grows; the chunk is derived from it.
* arena, block: the part of the data file for large buffers; a block is whole pages of it and holds
  one buffer, or one image that is too large for a chunk.
* lease: a reader's right to a block, over a private mapping of it. It is the object behind the
  storage of a tensor; when that is freed, the block is given up.
* draft: a block that the writer fills before it is published: the memory of a tensor from `empty`.
* publish, release: the writer makes a message visible; a reader gives its chunk back.
* backpressure: the ring is full, so the writer waits.
* handle: what readers need in order to attach. It holds secrets.
* control socket: the local socket between the writer and each reader.
* step, door thread: what an end does for others, such as admitting a reader; the thread of this
  process that takes the steps of ends which are in no call.
* relay: of a host's remote readers the one that receives each message, and puts it into a ring of
  that host for the others.

The path of a message::

    object ─ pickler ─▶ stream ─────────────── chunk ─▶ published ─▶ reader: wait ▶ load ▶ release
                        large buffers ─ arena ─ blocks ─▶ leases ─▶ given up with the last tensor
                                                     └─▶ frames ▶ relay ▶ its host's ring ▶ readers

The modules in the order of the data: `config` and `handle` say what is wanted, `layout` where it
lies, `segment` makes the memory, `door` takes the steps of ends that are in no call, `locks` says
who is alive and `control` who is there, `_ring` holds the hot loops and `_system` the system calls,
`arena` deals out the blocks, `membership` tells ring and arena which ranks there are, `waiting`
says how long to sleep, `ends` what all ends do, `pickler` turns objects into bytes, `roster` knows
who reads, `attachment` takes what arrives on this host, `remote` sends to other hosts, `writer`
publishes, `relay` passes on, `queue` is what users hold, `distributed` gives the ranks of a process
group their ends, `cli` is the command and `demo` what it runs.
"""

import sys

if sys.platform != "linux":
    raise ImportError(f"shmcast runs on Linux only (memory files, futexes), not on {sys.platform}")

try:
    import shmcast._ring  # noqa: F401  # only to say what to do where it is not built
except ModuleNotFoundError as error:
    if error.name != "shmcast._ring":
        raise
    raise ImportError(
        f"shmcast's extension is not built here, in {__path__[0]}: after `pip install .` run your "
        f"program in another directory, since in this one Python finds the sources first; "
        f"or run `pip install -e .`, which builds it here"
    ) from None

from shmcast.config import DEFAULT_OOB_THRESHOLD_BYTES, QueueConfig
from shmcast.errors import (
    AuthenticationError,
    ConfigError,
    MessageTooLarge,
    ProtocolError,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterFailed,
    WriterLost,
)
from shmcast.handle import Handle
from shmcast.queue import MessageQueue, MessageReader, ReaderStats
from shmcast.writer import QueueStats

__all__ = [
    "DEFAULT_OOB_THRESHOLD_BYTES",
    "AuthenticationError",
    "ConfigError",
    "Handle",
    "MessageQueue",
    "MessageReader",
    "MessageTooLarge",
    "ProtocolError",
    "QueueClosed",
    "QueueConfig",
    "QueueEmpty",
    "QueueFull",
    "QueueNotReady",
    "QueueStats",
    "ReaderLost",
    "ReaderStats",
    "ShmcastError",
    "WriterFailed",
    "WriterLost",
]
