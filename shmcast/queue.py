"""`MessageQueue` and `MessageReader`: the two ends of a queue, joined from the parts below."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import logging
import math
import mmap
import operator
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, SupportsIndex

import attrs

from shmcast._ring import (
    IMAGE_HEADER_BYTES,
    Claim,
    EndLock,
    Mapping,
    RingReader,
    RingWriter,
    image_bytes,
    image_pieces,
    new_bytearray,
    read_image,
)
from shmcast._system import sleep
from shmcast.arena import LEAST_BLOCK_BYTES, Arena, Block
from shmcast.config import QueueConfig
from shmcast.control import (
    WRITER_BYTE,
    Holder,
    LockFile,
    ReaderControl,
    WriterControl,
    failure_text,
    is_foreign,
    named,
)
from shmcast.door import Watch, all_ends, say
from shmcast.errors import (
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
from shmcast.handle import TOKEN_BYTES, Handle
from shmcast.layout import Layout
from shmcast.pickler import Pickler, checked_loads, loads, rebuild_tensor
from shmcast.segment import (
    FIXED_SIZE,
    FROZEN,
    Segment,
    add_seals,
    cpus_available,
    map_file,
    new_frozen_file,
    new_memory_file,
    seals_of,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    # zmq is imported only where there are remote readers.
    from shmcast.remote import Arrived, Peer, RemoteReader, RemoteRing, RemoteWriter, RingSizes

__all__ = ["MessageQueue", "MessageReader", "QueueStats", "ReaderStats"]

_log = logging.getLogger("shmcast.queue")

_LOOK_PAUSE_NS: Final = 10_000_000  # a publishing writer looks around at most this often
_JOIN_S: Final = 0.2  # how long a relay's answer is waited for
_JOIN_PAUSE_S: Final = 1.0
_MOST_COPIED_BYTES: Final = 1024**2  # a larger buffer is not copied out of a message's file
_NUMBER_BYTES: Final = 8  # before each stream that a relay passes on
_FIRST_PROBE_S: Final = 0.001  # who has waited for less does not ask who is alive
# A sleep is cut in slices only to notice what nobody tells; a wake-up never depends on it. An end
# whom the door thread tells of a death needs none, but a lock that is lost, or a clock that jumped.
_TOLD_SLICE_S: Final = 1.0
# Slices of 10 ms for ever would cost 1.0 to 1.6 % of a core, 40 ms cost 0.5 %.
_SHORT_SLICE_S: Final = 0.010
_LONG_SLICE_S: Final = 0.040
_SHORT_SLICES_UNTIL_S: Final = 0.100


@attrs.frozen
class QueueStats:
    """
    What a writer has done so far.

    Attributes:
        messages: how many messages were published.
        bytes: how many bytes of stream and buffers they had.
        oob_buffers: how many buffers left the stream.
        oob_bytes: how many bytes these had.
        waits: how often the writer polled or slept because the ring was full.
        wait_s: for how many seconds, all together.
        lag: how many messages each rank has still to finish, by rank; 0 for one that is gone.
        blocks_in_use: how many blocks of the arena were in use when the writer looked last.
        arena_bytes_in_use: how many bytes these have.
        blocks_held: how many of them each rank has not given up, by rank; those of tensors that
            outlived their reader too.
        fallbacks: how many messages went into a memory file of their own.
        losses: how many readers were lost.
    """

    messages: int
    bytes: int
    oob_buffers: int
    oob_bytes: int
    waits: int
    wait_s: float
    lag: tuple[int, ...]
    blocks_in_use: int
    arena_bytes_in_use: int
    blocks_held: tuple[int, ...]
    fallbacks: int
    losses: int


@attrs.frozen
class ReaderStats:
    """
    What a reader has done so far.

    Attributes:
        messages: how many messages were taken.
        bytes: how many bytes of stream and buffers they had.
        oob_buffers: how many buffers came out of band.
        oob_bytes: how many bytes these had.
        waits: how often the reader polled or slept because there was no message.
        wait_s: for how many seconds, all together.
        lag: how many messages are published and not yet taken.
        fallbacks: how many messages came in a memory file of their own.
    """

    messages: int
    bytes: int
    oob_buffers: int
    oob_bytes: int
    waits: int
    wait_s: float
    lag: int
    fallbacks: int


def _deadline(timeout: Any) -> float:
    """The time of `time.monotonic` when a timeout is over; infinity for None."""
    if timeout is None:
        return math.inf
    refusal = f"timeout = {timeout!r} is not allowed; allowed is None or seconds from 0"
    if isinstance(timeout, str | bytes):
        raise TypeError(refusal)
    try:
        seconds = float(timeout)  # of a numpy or torch scalar too, which may be of low precision
    except TypeError:
        raise TypeError(refusal) from None
    except OverflowError:
        return math.inf
    if not seconds >= 0:  # NaN too
        raise ValueError(refusal)
    return time.monotonic() + seconds


class _Wait:
    """One wait of an end: how long it has taken, how long to sleep next, when to warn."""

    def __init__(self, deadline: float, warn_after_s: float, spin_ns: int = 0) -> None:
        self.start = time.monotonic()
        self._spin_until = self.start + spin_ns / 1e9
        self._deadline = deadline
        self._warn_after_s = warn_after_s
        self._warn_at = self.start + warn_after_s
        self._is_first = True
        self.has_had_last_try = False  # whether the end looked around once after the deadline

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.start

    def slice_s(self, *, is_told: bool) -> float:
        """
        How long to wait now: a slice, but not past the deadline. 0 when the time is up.

        Args:
            is_told: whether the door thread ends the wait when the other side has died.
        """
        now = time.monotonic()
        if self._is_first:
            self._is_first = False
            most = _FIRST_PROBE_S
        elif is_told:
            most = _TOLD_SLICE_S
        elif now - self.start < _SHORT_SLICES_UNTIL_S:
            most = _SHORT_SLICE_S
        else:
            most = _LONG_SLICE_S
        return max(0.0, min(most, self._deadline - now, max(_FIRST_PROBE_S, self._warn_at - now)))

    def spin_and_sleep_ns(self, slice_s: float) -> tuple[int, int]:
        """For how long of this slice to poll, and how long to sleep after that."""
        spin_s = max(0.0, min(self._spin_until - time.monotonic(), slice_s))
        return int(spin_s * 1e9), int((slice_s - spin_s) * 1e9)

    def is_long(self) -> bool:
        """Whether to warn now; true once per interval."""
        now = time.monotonic()
        if now < self._warn_at:
            return False
        self._warn_at = now + self._warn_after_s  # not the next of many, after a stop
        return True


class _Exit:
    """What becomes of the ends that are open when the interpreter ends."""

    _finalizer: object = None

    @classmethod
    def expect(cls) -> None:
        """See to one more end."""
        # Anew for each end: what is registered last runs first, and has to run before the I/O
        # thread's own, which takes an open end for abandoned.
        atexit.unregister(cls._fail_all)
        atexit.register(cls._fail_all)
        # The children of `multiprocessing` have it, and leave `atexit` out.
        util = sys.modules.get("multiprocessing.util")
        if util is not None and cls._finalizer is None:
            cls._finalizer = util.Finalize(None, cls._fail_all, exitpriority=1)

    @classmethod
    def after_fork_in_child(cls) -> None:
        cls._finalizer = None

    @staticmethod
    def _fail_all() -> None:
        """Close every end with the error that ends the interpreter, if one is known to."""
        error = _uncaught()
        for end in all_ends():
            if isinstance(end, _QueueEnd) and end._is_failure(error):
                end._close(error)


os.register_at_fork(after_in_child=_Exit.after_fork_in_child)


def _uncaught() -> BaseException | None:
    """The exception that ends the interpreter or a child of `multiprocessing`, if it shows."""
    process = sys.modules.get("multiprocessing.process")
    error = sys.exception()
    if process is not None and error is not None:
        start = error.__traceback__
        # Else the process was forked while its parent handled this error.
        if start and start.tb_frame.f_code is process.BaseProcess._bootstrap.__code__:
            return error
    error = getattr(sys, "last_value", None)
    start = None if error is None else error.__traceback__
    # An error that a framework stored here began in one of its functions, not at the program's
    # start; a prompt stores those that it went on after.
    if start and start.tb_frame.f_back is None and not hasattr(sys, "ps1"):
        return error
    return None


@attrs.define
class _Message:
    """
    A message on its way.

    Attributes:
        stream: its parts.
        buffers: those that left the stream.
        places: where each buffer lies in a block, or None for one that is in the image; empty if
            no buffer has a block.
        blocks: the message's blocks, that of the image too.
        image_bytes: the size of its image, without what lies in blocks.
        image_place: of the block of an image that is too large for a chunk.
        is_in_file: whether the image goes into a memory file.
        sent: who has been sent that.
    """

    stream: list[bytes]
    buffers: list[memoryview]
    places: list[tuple[int, int] | None] = attrs.field(factory=list)
    blocks: list[Block] = attrs.field(factory=list)
    image_bytes: int = 0
    image_place: tuple[int, int] | None = None
    is_in_file: bool = False
    sent: set[Holder] = attrs.field(factory=set)


class _TurnTaken(Exception):
    """The end is in use."""


class _QueueEnd:
    """What both ends share: turns, steps, closing, the context manager."""

    _lock: EndLock
    _watch: Watch

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._lock.is_closing

    def _close(self, error: BaseException | str | None = None) -> None:
        if not isinstance(error, BaseException | str | None):
            raise TypeError(f"error = {error!r} is not allowed; allowed is an exception or a text")
        if self._lock.is_forked:
            return
        if error is not None:  # first: whoever sees the closing mark has to see this too
            self._say_failed(failure_text(error))
        self._lock.close(self._finish)
        self._stop_waits()
        self._watch.close()  # again: the door thread may have closed this end, and ends itself

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error if self._is_failure(error) else None)

    def __del__(self) -> None:
        if hasattr(self, "_lock"):  # not if the constructor failed
            self._close()

    def _is_failure(self, error: BaseException | None) -> bool:
        """Whether a program that leaves by this error has failed this end."""
        if isinstance(error, SystemExit):
            return error.code not in (None, 0)
        if isinstance(error, QueueClosed):
            return not self._is_over
        return error is not None and not isinstance(error, GeneratorExit)

    @property
    def _is_over(self) -> bool:
        """Whether its calls raise QueueClosed."""
        return self.closed

    def _say_failed(self, text: str) -> None:
        """Have the other side told why this end closes. From any thread."""
        raise NotImplementedError

    def _check_open(self) -> None:
        self._lock.check_not_forked()  # a signal handler may have forked meanwhile
        if self._lock.is_closing:
            raise QueueClosed(f"{self!r} was closed while it waited")

    def take_step(self) -> float | None:
        """For the door thread; see `door.End`."""
        try:
            with self._lock.step(_TurnTaken):
                return self._step_alone()
        except _TurnTaken:
            self._nudge()
            return None
        except (ShmcastError, OSError):
            return math.inf  # the end's next call meets it again, and says so

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        raise NotImplementedError

    def _step_alone(self) -> float:
        """Take a step while no call of the end does; returns when it is due again."""
        raise NotImplementedError

    def _nudge(self) -> None:
        """End the present wait, for something has come."""
        ring = getattr(self, "_ring", None)
        if ring is not None:
            ring.nudge()

    def _log_after(self, level: int, text: str, *arguments: object) -> None:
        """Log something after the present turn, for a handler may wait for it."""
        self._lock.defer(functools.partial(_log.log, level, text, *arguments))

    def _stop_waits(self) -> None:
        ring = getattr(self, "_ring", None)
        if ring is not None:
            ring.stop()

    def _finish(self) -> None:
        raise NotImplementedError


class MessageQueue(_QueueEnd):
    """
    The writer: the one end of a queue that enqueues.

    Any number of threads may use it. It creates the queue; readers attach with its handle.

    Leave it by `close` or as a context manager. A `with` block that ends by an exception fails the
    queue, as `close(error=...)` does; so does an uncaught exception that ends the process while the
    queue is open. No failures are `GeneratorExit`, `sys.exit()` with status 0, and `QueueClosed`
    after this end was closed. An end that is dropped, or open when the program ends otherwise,
    counts as closed: a status such as that of `sys.exit(3)` is seen by `with` alone.

    Args:
        config: the settings.

    Raises:
        ConfigError: there is not enough memory for such a queue, or `bind` is not an address of
            this host, or a wildcard without keys.
    """

    def __init__(self, config: QueueConfig) -> None:
        if not isinstance(config, QueueConfig):
            raise TypeError(f"config = {config!r} is not allowed; allowed is a QueueConfig")
        self._config = config
        self._ranks = tuple(range(config.n_readers))
        local_ranks = config.local_reader_ranks
        self._local_ranks = self._ranks if local_ranks is None else tuple(sorted(local_ranks))
        self._address, self._token = self._new_names()
        self._spin_ns = _spin_ns(config.spin_us, len(self._local_ranks))
        self._nonce = 0
        # Losses that no call has reported so far: a signal may come between. By rank; with each
        # text whether it is no death, but damage.
        self._unreported: dict[int, tuple[str, bool]] = {}
        self._file: int | None = None  # the memory file of the message that is on its way
        self._has_warned = False
        self._fallbacks = 0
        self._losses = 0
        self._last_lost: Holder | Peer | None = None
        # Each holder's cursor at the last look, and when it had moved.
        self._seen: weakref.WeakKeyDictionary[Holder | Peer, tuple[int, float]] = (
            weakref.WeakKeyDictionary()
        )
        self._failure: str | None = None  # why it was closed, if by an error
        self._remote: RemoteWriter | None = None
        self._n_handed_on = 0  # how many messages the remote ranks' link was given
        self._images: dict[int, Mapping] = {}  # of those in files, until they are handed on
        try:
            self._create(Layout.of(config))
        except OSError as error:
            raise ConfigError(
                f"a queue can't be made: {error} (it needs some descriptors: RLIMIT_NOFILE)"
            ) from error
        self._pickler = Pickler(config.oob_threshold_bytes, allocate=self._arena.allocate_buffer)
        self._open_door()

    def _open_door(self) -> None:
        """From here on the door thread serves this end."""
        self._watch = Watch(self)
        _Exit.expect()
        self._lock = EndLock("writer", self._watch.is_free)
        try:
            self._watch.watch(self._control.descriptor)
        except OSError as error:
            self.close()
            raise ConfigError(f"a queue can't be made: {error}") from error

    def _new_names(self) -> tuple[str, str]:
        """The control socket's address and the token for it."""
        return f"shmcast-{secrets.token_hex(16)}", secrets.token_hex(TOKEN_BYTES)

    def _create(self, layout: Layout) -> None:
        with contextlib.ExitStack() as undo:
            self._segment = Segment.create(layout)
            undo.callback(self._segment.close_descriptors)
            self._ring = RingWriter(self._segment)
            self._arena = Arena(layout, self._ring, self._segment.reserve_arena)
            lock_file = LockFile.of(new_memory_file("shmcast-locks", layout.locks_bytes))
            undo.callback(lock_file.drop)
            add_seals(lock_file.descriptor, FIXED_SIZE)
            lock_file.hold(WRITER_BYTE)
            self._lock_file: LockFile | None = lock_file
            self._control = WriterControl(
                address=self._address,
                token=self._token,
                ranks=self._local_ranks,
                descriptors=(self._segment.data_descriptor, self._segment.control_descriptor),
                lock_file=lock_file,
                new_epoch=self._ring.new_epoch,
                admit=self._ring.admit,
                strike=self._arena.strike,
                has_left=self._ring.has_left,
            )
            undo.callback(self._control.close_descriptors)
            if len(self._local_ranks) < len(self._ranks):
                self._open_to_remote_ranks()
            undo.pop_all()

    def _open_to_remote_ranks(self) -> None:
        from shmcast.remote import RemoteWriter, RingSizes

        config, segment = self._config, self._segment
        assert config.bind is not None  # the config has seen to that
        self._remote = RemoteWriter(
            bind=config.bind,
            security=config.security,
            ranks=tuple(sorted({*self._ranks} - {*self._local_ranks})),
            token=self._token,
            sizes=RingSizes(
                config.n_chunks,
                config.chunk_bytes,
                config.arena_bytes,
                config.spin_us,
                copies=config.receive == "copy",
                warn_after_us=int(min(config.warn_after_s, 1e12) * 1e6),
            ),
            place_of=lambda rank, epoch: RingReader(segment, rank, epoch),
            new_epoch=self._ring.new_epoch,
            admit=self._ring.admit,
            strike=self._arena.strike,
            has_left=self._ring.has_left,
        )
        self._control.watch(self._remote.claimed.descriptor)

    @staticmethod
    def create_from_handle(
        handle: Handle, rank: SupportsIndex, allow: Iterable[str] = ()
    ) -> MessageReader:
        """Attach a reader to the handle's queue; the same as `MessageReader(...)`."""
        return MessageReader(handle, rank, allow)

    @staticmethod
    def create_from_process_group(
        group: ProcessGroup | None, config: QueueConfig | None = None, writer_rank: int = 0
    ) -> MessageQueue | MessageReader:
        """
        One queue for the ranks of a `torch.distributed` process group: each gets its end, ready.

        Every rank of the group makes this call. One becomes the writer, the others become readers,
        whose ranks are counted from 0 in the group's order. Who can't reach the writer's control
        socket is on another host. An error on one rank is raised on all of them.

        The queue's secrets travel as the group's own messages do (with gloo in clear): whoever can
        read these can read the queue.

        Args:
            group: any kind of group that exchanges objects, such as gloo's; None is the default
                group.
            config: the writer's settings; those of the other ranks have no effect. `n_readers` and
                `local_reader_ranks` are what the group has; leave them out. Where there are other
                hosts and no `bind`, it is a free port at the address by which the writer's host
                reaches `MASTER_ADDR`.
            writer_rank: the rank in the group that becomes the writer.

        Raises:
            ConfigError: this process is not in the group, or nobody else is; `writer_rank` is not a
                rank of it, or not the same on all ranks; a setting contradicts the group; `bind` is
                needed, or no address of the writer's host.
            QueueNotReady: the ends did not reach each other within 60 s.
            WriterLost: a rank can't reach the writer.
        """
        from shmcast.distributed import create_from_process_group

        return create_from_process_group(group, config, writer_rank)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<MessageQueue @{self._address}, n_readers={self._config.n_readers}, {state}>"

    def export_handle(self) -> Handle:
        """
        What readers need in order to attach; any number of times, from any thread.

        Raises:
            QueueClosed: this end is closed.
        """
        self._lock.check_not_forked()
        if self.closed:
            raise QueueClosed("this writer is closed")
        remote = self._remote
        return Handle(
            endpoint=remote.endpoint if remote else None,
            n_readers=self._config.n_readers,
            local_reader_ranks=self._local_ranks,
            local_address=self._address,
            token=self._token,
            curve_keys=remote.keys or () if remote else (),
        )

    def close(self, timeout: float | None = 0, *, error: BaseException | str | None = None) -> None:
        """
        End this end: every wait of it ends with `QueueClosed`, and later calls raise that too.

        Readers that are attached get everything that was published, then the end. Ranks that have
        never attached get nothing any more; a warning is logged for what they miss.

        It may be called again and from any thread. In a forked child it does nothing to the queue.

        Args:
            timeout: in seconds, how long to wait first until every rank has taken every message,
                also those that have not attached yet; None waits for ever. With 0 it never waits.
            error: why the queue ends early. After the last message readers get `WriterFailed`
                with its type and text, instead of a normal end.

        Raises:
            QueueFull: it took longer; `ranks` and the text name those that are behind. The queue is
                still open.
            ReaderLost: readers died or failed while it waited. The queue is still open, and the
                next call goes on without them.
            QueueClosed: another thread closed this end while it waited.
        """
        deadline = _deadline(timeout)
        if timeout == 0 or self.closed or self._lock.is_forked:
            self._close(error)
            return
        with self._lock.until(deadline, QueueFull):
            self._wait_until_read(deadline)
            self._close(error)  # this turn's end finishes it

    def _wait_until_read(self, deadline: float) -> None:
        wait = _Wait(deadline, self._config.warn_after_s, self._spin_ns)
        while True:
            self._look()
            self._watch.arm()
            behind = tuple(rank for rank, lag in enumerate(self._ring.lags()) if lag)
            if not behind:
                return
            self._check_open()
            slice_s = wait.slice_s(is_told=self._control.sees_every_death)
            if slice_s == 0:
                raise QueueFull(
                    f"not everything was read in {wait.elapsed_s:.3g} s: {self._lag_text(behind)}",
                    behind,
                )
            self._ring.wait_for_space(*wait.spin_and_sleep_ns(slice_s), self._config.n_chunks)
            self._check_open()
            if wait.is_long():
                self._say_wait(wait, f"until everything is read: {self._lag_text(behind)}")

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """
        Wait until every rank is attached and alive, also after a loss.

        A loss that it finds is logged and counts as handled, so the rank may be claimed again.

        Args:
            timeout: in seconds; None waits for ever, 0 tries once.

        Raises:
            QueueNotReady: it took longer; `ranks` and the text name the missing ranks, and what
                kept one from attaching.
            QueueClosed: this end is closed.
        """
        deadline = _deadline(timeout)
        wait = _Wait(deadline, self._config.warn_after_s)
        while True:
            with self._lock.until(deadline, QueueNotReady):
                self._survey()
                self._evict_lost()
                missing = self._missing_ranks()
                attempts = self._attempts_text(missing)
                turns = self._lock.turns + 1  # this one too
            if not missing:
                return
            slice_s = wait.slice_s(is_told=self._control.sees_every_death)
            if slice_s == 0:
                raise QueueNotReady(
                    f"{_ranks_text(missing)} not attached after {wait.elapsed_s:.3g} s{attempts}",
                    missing,
                )
            self._lock.wait_for_turn(turns, slice_s)  # the door thread's, which admits them
            self._check_open()
            if wait.is_long():
                _log.warning(
                    "writer @%s has waited %.0f s for %s to attach%s",
                    self._address,
                    wait.elapsed_s,
                    _ranks_text(missing),
                    attempts,
                )

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """
        Publish an object to every reader. When it returns, the caller may change what it passed.

        Args:
            obj: anything that can be pickled, with tensors and arrays anywhere in it.
            timeout: in seconds; None waits for ever while the ring is full, or nobody is attached
                with `on_reader_loss="evict"`; 0 tries once.

        Raises:
            QueueFull: there was no free chunk in time; `ranks` are those that are behind, or all
                if none is attached.
            ReaderLost: readers died or failed, which this call noticed; or nobody is left to
                publish to. Not with `on_reader_loss="evict"`: then it waits for the next reader.
            ProtocolError: a reader's memory is damaged, or it lost its lock; it is not waited for
                any more.
            MessageTooLarge: memory for this message cannot be reserved.
            QueueClosed: this end is closed.
            ShmcastError: the call came from inside another one in the same thread, or from a
                forked child.
            TypeError: torch itself cannot carry a tensor in it.

        Whatever it raises, nothing was published; what pickling the object raises passes through.
        Only a signal handler's exception may come just after the message was published, and a
        ShmcastError may say that it was, but a tensor of `empty` in it can't be used any more.
        """
        deadline = math.inf if timeout is None else _deadline(timeout)
        with self._lock if timeout is None else self._lock.until(deadline, QueueFull):
            if self._arena.pending:  # of a message that was interrupted
                self._arena.settle()
            if self._remote is not None:
                self._hand_on()  # what a signal left undone, while it lies where it was published
            try:
                stream, buffers = self._pickler.dumps(obj)
            except BaseException:
                self._arena.settle()
                raise
            if buffers or self._ring.try_publish(stream, buffers):
                self._publish_slowly(stream, buffers, deadline)
            elif self._remote is not None:
                self._hand_on(stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """
        An uninitialised tensor in the memory of the queue: publishing it copies nothing.

        It is an ordinary tensor, and stays one: what is written to it after `enqueue` is seen by
        nobody else. It may be enqueued once without a copy, in any message, as it is or as a view
        that begins with its first element; after that it is copied like any other tensor. If there
        is no room for it in the arena, or it is smaller than the threshold, it is copied too.

        It has no timeout, and waits while another thread waits in `enqueue`.

        Args:
            shape: the length of each dimension.
            dtype: of the elements.

        Raises:
            QueueClosed: this end is closed.
            ShmcastError: the call came from inside another one in the same thread, or from a
                forked child.

        A wrong shape or dtype raises what `torch.empty` raises.
        """
        import torch

        model = torch.empty(shape, dtype=dtype, device="meta")
        n_bytes = model.numel() * model.element_size()
        with self._lock:
            least_bytes = max(self._config.oob_threshold_bytes, LEAST_BLOCK_BYTES)
            if n_bytes >= least_bytes and not model.is_quantized:
                draft = self._arena.new_draft(n_bytes)
                if draft is not None:
                    name = str(model.dtype).removeprefix("torch.")
                    return rebuild_tensor(draft, tuple(model.shape), None, name)
        return torch.empty(shape, dtype=dtype, device="cpu")

    def stats(self) -> QueueStats:
        """
        What this end has done so far. Never waits.

        Raises:
            QueueClosed: this end is closed.
        """
        self._lock.check_not_forked()
        ring, arena = getattr(self, "_ring", None), getattr(self, "_arena", None)
        if ring is None or arena is None:
            raise QueueClosed("this writer is closed")
        blocks = arena.blocks
        return QueueStats(
            messages=ring.messages,
            bytes=ring.bytes,
            oob_buffers=ring.oob_buffers,
            oob_bytes=ring.oob_bytes,
            waits=ring.waits,
            wait_s=ring.wait_s,
            lag=ring.lags(),
            blocks_in_use=len(blocks),
            arena_bytes_in_use=sum(block.n_bytes for block in blocks),
            blocks_held=tuple(
                sum(rank in block.holders or rank in block.disowned for block in blocks)
                for rank in self._ranks
            ),
            fallbacks=self._fallbacks,
            losses=self._losses,
        )

    def _publish_slowly(
        self, stream: list[bytes], buffers: list[memoryview], deadline: float
    ) -> None:
        """Publish what has large buffers, or what the first try could not."""
        message = _Message(stream, buffers)
        try:
            self._place(message)
            self._publish(message, deadline)
            self._hand_on()
        finally:
            self._images.pop(self._ring.messages, None)  # of one that was not published
            self._drop_file()
            self._arena.settle()

    def _place(self, message: _Message) -> None:
        """
        Copy the large buffers into blocks of the arena, and find a place for a large image.

        If there are not enough blocks, all of the message goes another way.
        """
        chunk_bytes = self._config.chunk_bytes
        placed = self._arena.place(message.buffers)
        message.places, message.blocks = placed or ([], [])
        has_blocks = placed is not None
        message.image_bytes = image_bytes(message.stream, message.buffers, message.places)
        if message.image_bytes > chunk_bytes and has_blocks:
            self._arena.reclaim()
            block = self._arena.allocate(message.image_bytes)
            if block is not None:
                message.image_place = block.offset, block.slot
                message.blocks.append(block)
            else:
                has_blocks, message.places, message.blocks = False, [], []
                message.image_bytes = image_bytes(message.stream, message.buffers)
        message.is_in_file = not has_blocks and message.image_bytes > chunk_bytes

    def _publish(self, message: _Message, deadline: float) -> None:
        """Wait for a chunk and publish a message that has been placed."""
        wait: _Wait | None = None  # one that need not wait asks for no time
        is_elsewhere = message.is_in_file or message.image_place is not None
        needed_bytes = IMAGE_HEADER_BYTES if is_elsewhere else message.image_bytes
        has_looked = False
        while True:
            match self._ring.try_claim(needed_bytes, has_looked):
                case Claim.DONE:
                    if self._publish_claimed(message):
                        return
                    for_chunk = False
                case Claim.FULL:
                    for_chunk = True
                case Claim.LOOK:
                    self._look()
                    has_looked = True
                    continue
                case Claim.RESERVE:
                    index = self._ring.messages % self._config.n_chunks
                    self._ring.set_reserved(self._segment.reserve_chunk(index, needed_bytes))
                    continue
                case Claim.NOBODY if self._config.on_reader_loss == "evict":
                    for_chunk = False
                case Claim.NOBODY:
                    raise ReaderLost(
                        f"nobody is left to publish to: {_ranks_text(self._ranks)} left or "
                        f"died; wait_until_ready waits until they attach again",
                        self._ranks,
                    )
                case claim:
                    raise AssertionError(f"{claim!r} of {needed_bytes} bytes in a chunk")
            wait = wait or _Wait(deadline, self._config.warn_after_s, self._spin_ns)
            self._pause(wait, for_chunk=for_chunk)

    def _publish_claimed(self, message: _Message) -> bool:
        """Publish into the claimed chunk. False if there is no room for its file for now."""
        ring, stream, buffers = self._ring, message.stream, message.buffers
        if message.is_in_file and self._remote and not self._remote.has_room(message.image_bytes):
            return False
        if not message.is_in_file:
            # Before it is published: afterwards a signal could come between.
            self._arena.assign(message.blocks, ring.messages + 1, ring.expected_ranks())
            drafts = [block.draft() for block in message.blocks if block.draft is not None]
            descriptor = self._segment.data_descriptor
            try:
                ring.publish(
                    stream, buffers, message.places, message.image_place, drafts, descriptor
                )
            except OSError as error:
                raise ShmcastError(
                    f"the message was published, but a tensor of `empty` in it can't be used any "
                    f"more: {error}"
                ) from error
            return True
        if self._file is None:
            self._warn_of_fallback()
            self._nonce += 1
            pieces = image_pieces(ring.messages, stream, buffers)
            self._file = new_frozen_file(pieces, message.image_bytes)
        # Sent before it is published, so that a reader never waits for it, and has it even if the
        # writer dies.
        if not self._control.send_file(self._nonce, self._file, message.sent):
            return False
        # Let go of first: whoever is interrupted must not close it twice.
        file, self._file = self._file, None
        if self._remote is not None:
            self._images[ring.messages] = map_file(file, message.image_bytes, writable=False)
        self._control.keep_file(self._nonce, file)
        ring.publish_file(self._nonce, stream, buffers)
        self._fallbacks += 1
        return True

    def _warn_of_fallback(self) -> None:
        """Say once that the arena is too small for what the readers keep."""
        if self._has_warned or not self._config.arena_bytes:
            return
        self._has_warned = True
        stats = self.stats()
        self._log_after(
            logging.WARNING,
            "writer @%s has no free block for a message, so it goes into a memory file, which is "
            "slower: %d of at most %d blocks and %d bytes of arena_bytes = %d are in use, blocks "
            "held by rank: %s",
            self._address,
            stats.blocks_in_use,
            self._segment.layout.n_slots,
            stats.arena_bytes_in_use,
            self._config.arena_bytes,
            stats.blocks_held,
        )

    def _hand_on(self, last_stream: Sequence[bytes] = ()) -> None:
        """
        Have what was published sent to the remote ranks; also what a signal left undone.

        Args:
            last_stream: the parts of the last message, if it has no buffers.
        """
        remote = self._remote
        if remote is None:
            return
        if len(last_stream) == 1 and self._n_handed_on == self._ring.messages - 1:
            remote.publish(self._n_handed_on, memoryview(last_stream[0]), [])
            self._n_handed_on += 1
            return
        while self._n_handed_on < self._ring.messages:
            number = self._n_handed_on
            image = self._images.get(number)
            if image is None:  # chunk and blocks stay as they are until all have acknowledged it
                stream, buffers = self._ring.published_parts(number)
            else:
                stream, buffers = read_image(image, number)
            file_bytes = len(memoryview(image)) if image else 0
            remote.publish(number, stream, buffers, file_bytes)
            self._n_handed_on += 1
        self._images.clear()  # last: a signal may come between

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _pause(self, wait: _Wait, *, for_chunk: bool) -> None:
        """Sleep a slice for the readers to go on, then look around; QueueFull if time is up."""
        self._check_open()
        slice_s = wait.slice_s(is_told=for_chunk and self._control.sees_every_death)
        if slice_s == 0 and wait.has_had_last_try:
            behind = self._ranks_behind()
            raise QueueFull(
                f"the message was not published in {wait.elapsed_s:.3g} s: "
                f"{self._lag_text(behind)}",
                behind,
            )
        is_nudged = False
        if self._remote is not None:
            self._remote.leave_to_thread()
        if slice_s and for_chunk:
            is_nudged = self._ring.wait_for_space(*wait.spin_and_sleep_ns(slice_s))
        else:  # a reader takes a file from its socket without a word
            is_early = wait.elapsed_s < _SHORT_SLICES_UNTIL_S
            sleep(min(slice_s, _FIRST_PROBE_S) if is_early else slice_s)
        self._check_open()
        if is_nudged or slice_s == 0 or wait.elapsed_s >= _FIRST_PROBE_S:
            wait.has_had_last_try = slice_s == 0
            self._look()
            self._watch.arm()
        if wait.is_long():
            lag_text = self._lag_text(self._ranks_behind())
            self._say_wait(wait, f"to publish message {self._ring.messages}: {lag_text}")

    def _say_wait(self, wait: _Wait, what_for: str) -> None:
        text = f"writer @{self._address} has waited {wait.elapsed_s:.3g} s {what_for}"
        say(_log.warning, text)

    def _look(self) -> None:
        """
        See to what others wait for.

        Raises:
            ReaderLost, ProtocolError: readers were lost, unless `on_reader_loss` is "evict".
        """
        self._survey()
        if self._config.on_reader_loss == "evict":
            self._evict_lost()
            return
        lost = self._take_lost()
        if not lost:
            return
        report = _report(lost)
        if any(is_damage for _, is_damage in lost.values()):
            raise ProtocolError(report)
        raise ReaderLost(report, tuple(lost))

    def _step_alone(self) -> float:
        known = dict(self._unreported)
        due_at = self._survey()
        if self._config.on_reader_loss == "evict":
            self._evict_lost()
        new = {rank: loss for rank, loss in self._unreported.items() if known.get(rank) != loss}
        if self._unreported:
            self._ring.look_again_in(0)  # so that the next call raises it
        if new:
            self._log_after(
                logging.WARNING,
                "writer @%s lost a reader, which its next call raises: %s",
                self._address,
                _report(new),
            )
        return due_at

    def _evict_lost(self) -> None:
        """Go on without the readers that were lost, and say so."""
        lost = self._take_lost()
        if lost:
            self._log_after(
                logging.WARNING,
                "writer @%s goes on without a reader: %s",
                self._address,
                _report(lost),
            )

    def _take_lost(self) -> dict[int, tuple[str, bool]]:
        lost, self._unreported = dict(sorted(self._unreported.items())), {}
        return lost

    def _survey(self) -> float:
        """
        See who has left or died, and serve the control socket.

        Returns when to do it again at the latest.
        """
        self._ring.look_again_in(_LOOK_PAUSE_NS)
        now = time.monotonic()
        lags = self._ring.lags()
        for control, holder in self._holders():
            rank = holder.rank
            cursor = self._ring.messages - lags[rank]
            if self._seen.get(holder, (None,))[0] != cursor:
                self._seen[holder] = cursor, now
            text, is_damage = None, False
            try:
                # Who left before it died has left.
                is_dead = control.is_dead(holder)
                has_left = self._ring.has_left(rank)
                failure = control.failure_of(holder) if is_dead or has_left else None
                if failure is not None:
                    text = f"{self._who(rank)} failed {lags[rank]} messages behind: {failure}"
                elif has_left:
                    self._log_after(logging.INFO, "%s has left", self._who(rank))
                    control.vacate(rank)
                    continue
                elif is_dead:
                    text = f"{self._who(rank)} died {lags[rank]} messages behind"
            except ProtocolError as error:
                text, is_damage = str(error), True
            if rank == self._ring.damaged():
                text = f"{self._who(rank)} stored a cursor that is out of range"
                is_damage = True
            if text is not None:
                if self._last_lost is not holder:  # else a signal came before it was vacated
                    self._losses += 1
                    self._last_lost = holder
                self._unreported[rank] = text, is_damage
                control.vacate(rank)
                self._last_lost = None
        self._arena.strike_ended()
        return self._step()

    def _holders(self) -> Iterator[tuple[Any, Holder | Peer]]:
        """Every admitted reader, and who is in charge of it."""
        for holder in self._control.admitted():
            yield self._control, holder
        if self._remote is not None:
            for peer in self._remote.admitted():
                yield self._remote, peer

    def _holder_of(self, rank: int) -> Holder | Peer | None:
        holder = self._control.holders.get(rank)
        return holder or (self._remote.holders.get(rank) if self._remote else None)

    def _missing_ranks(self) -> tuple[int, ...]:
        missing, remote = self._control.missing_ranks, self._remote
        return tuple(sorted((*missing, *remote.missing_ranks))) if remote else missing

    def _ranks_behind(self) -> tuple[int, ...]:
        """The ranks that are furthest behind; all of them if none is attached."""
        if not self._ring.expected_ranks():
            return self._ranks
        lags = self._ring.lags()
        return tuple(rank for rank, lag in enumerate(lags) if lag and lag == max(lags))

    def _who(self, rank: int) -> str:
        holder = self._holder_of(rank)
        return f"rank {rank} ({named(holder.pid)})" if holder else f"rank {rank} (not attached)"

    def _attempts_text(self, ranks: Iterable[int]) -> str:
        """What kept these ranks from attaching, as far as it is known."""
        attempts = dict(self._control.failed_attempts)
        if self._remote is not None:
            attempts |= self._remote.failed_attempts
        return "".join(
            f"; rank {rank} could not attach: {attempts[rank]}"
            for rank in ranks
            if rank in attempts
        )

    def _lag_text(self, ranks: tuple[int, ...]) -> str:
        if not self._ring.expected_ranks():
            return f"nobody is attached, {_ranks_text(ranks)} left or died"
        lags, now = self._ring.lags(), time.monotonic()
        texts = []
        for rank in ranks:
            text = f"{self._who(rank)} is {lags[rank]} messages behind"
            holder = self._holder_of(rank)
            if holder is not None and holder in self._seen:
                text += f", last seen {now - self._seen[holder][1]:.3g} s ago"
            texts.append(text)
        return "; ".join(texts) + self._attempts_text(ranks)

    def _step(self) -> float:
        self._hand_on()  # before a rank is taken in that does not get it
        due_at = self._control.serve()
        remote = self._remote
        if remote is not None:
            remote.serve()
        return due_at

    def _finish(self) -> None:
        if not hasattr(self, "_ring"):
            return  # a signal interrupted an earlier call after its last line
        self._hand_on()
        # Nothing can be published any more, so what the closing mark says is true.
        self._ring.say_closing()
        self._watch.close()
        with contextlib.ExitStack() as parts:
            parts.callback(self._segment.close)
            parts.callback(self._drop_lock_file)
            parts.callback(self._control.close, self._failure)
            if self._remote is not None:
                parts.callback(self._remote.close, self._failure)
        self._warn_of_missed()
        # The mappings end here, unless another thread is still on its way out of a call. The last
        # lines, since a signal may interrupt this and `close` come again.
        self._remote = None
        for name in ("_pickler", "_arena", "_ring"):
            self.__dict__.pop(name, None)

    def _say_failed(self, text: str) -> None:
        self._failure = self._failure or text
        ring = getattr(self, "_ring", None)
        if ring is not None:
            ring.say_failed(self._failure)

    def _warn_of_missed(self) -> None:
        """Say what is left behind. An attached reader still takes it; others never can."""
        attached = {holder.rank for _, holder in self._holders()}
        missed = {
            rank: lag for rank, lag in enumerate(self._ring.lags()) if lag and rank not in attached
        }
        if missed:
            _log.warning(
                "writer @%s closed before %s attached, which will never get what was published: "
                "%s; close(timeout=...) waits for that%s",
                self._address,
                _ranks_text(tuple(missed)),
                ", ".join(f"{lag} messages for rank {rank}" for rank, lag in missed.items()),
                self._attempts_text(missed),
            )

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a MessageQueue can't be pickled: it stays in the process that made it. To read in "
            "another process, send it the handle from export_handle(). To write there, make the "
            "queue there and send its handle here"
        )

    def _drop_lock_file(self) -> None:
        if self._lock_file is not None:
            self._lock_file.give_back(WRITER_BYTE)
            lock_file, self._lock_file = self._lock_file, None
            lock_file.drop()

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        self._drop_file()
        self._control.close_descriptors()
        self._segment.close_descriptors()


class _Relay(MessageQueue):
    """
    The ring through which a remote reader passes on what it receives to the others of its host.

    It never waits: who is too slow for it is evicted, and gets its messages from the writer then.
    The I/O thread of that reader uses it, as a `remote.Relay`.

    Args:
        handle: of this ring.
        sizes: of the writer's ring.
        session: of the reader that relays.

    Raises:
        ConfigError: another reader of this host is the relay, or there is not enough memory.
    """

    def __init__(self, handle: Handle, sizes: RingSizes, session: int) -> None:
        self._own_handle = handle
        super().__init__(
            QueueConfig(
                n_readers=handle.n_readers,
                chunk_bytes=sizes.chunk_bytes + mmap.PAGESIZE,  # for the number of each message
                n_chunks=sizes.n_chunks,
                arena_bytes=sizes.arena_bytes,
                receive="copy" if sizes.copies else "private",
                spin_us=sizes.spin_us,
                warn_after_s=sizes.warn_after_us / 1e6,
                on_reader_loss="evict",
            )
        )
        self._control.keep_nothing()
        self._control.greeting = session.to_bytes(8, "little")

    def _new_names(self) -> tuple[str, str]:
        return self._own_handle.local_address, self._own_handle.token

    def _open_door(self) -> None:
        # The I/O thread sees to all that.
        self._watch = Watch(self)
        self._lock = EndLock("relay", self._watch.is_free)

    @property
    def descriptor(self) -> int:
        return self._control.descriptor

    @property
    def has_readers(self) -> bool:
        return bool(self._ring.expected_ranks())

    def tend(self) -> None:
        with self._lock:
            self._look()

    def pass_on(self, number: int, stream: Any, buffers: list[Any]) -> None:
        with self._lock:
            for rank, lag in enumerate(self._ring.lags()):
                if lag >= self._config.n_chunks:
                    self._evict(rank)
            if not self._ring.expected_ranks():
                return
            parts = [number.to_bytes(_NUMBER_BYTES, "little"), bytes(stream)]
            views = [memoryview(buffer) for buffer in buffers]
            try:
                if views or self._ring.try_publish(parts, views):
                    self._publish_slowly(parts, views, time.monotonic())
            except (QueueFull, MessageTooLarge, ReaderLost) as error:
                _log.info("relay @%s can't pass on message %d: %s", self._address, number, error)
                for rank in self._ring.expected_ranks():
                    self._evict(rank)

    def _evict(self, rank: int) -> None:
        """End the attachment of a reader that is alive."""
        self._control.vacate(rank)


def _relay_handle(handle: Handle) -> Handle:
    """The handle of the ring that a host's remote readers share: each of them knows it."""
    # Everybody on the host sees the address, which must not tell the token.
    digest = hmac.digest(handle.token.encode(), b"relay", "sha256").hex()
    return attrs.evolve(
        handle,
        endpoint=None,
        local_reader_ranks=tuple(range(handle.n_readers)),
        local_address=f"shmcast-relay-{digest[:32]}",
        curve_keys=(),
    )


class MessageReader(_QueueEnd):
    """
    A reader: an end of a queue that dequeues. It holds one rank.

    Any number of threads may use it; each message goes to exactly one of them. It connects and
    sends its claim here, and does not wait for the writer.

    Leave it by `close` or as a context manager. A `with` block that ends by an exception fails the
    reader, as `close(error=...)` does; so does an uncaught exception that ends the process while it
    is open. No failures are `GeneratorExit`, `sys.exit()` with status 0, and `QueueClosed` after
    this queue has ended. A reader that is dropped, or open when the program ends otherwise, counts
    as closed: a status such as that of `sys.exit(3)` is seen by `with` alone.

    Args:
        handle: from the writer's `export_handle`.
        rank: which reader this is.
        allow: for a remote rank of a queue with security "none": what its messages may name
            besides plain data and tensors, such as "my.package:Step". With the names of numpy's
            arrays a message can run any code, so without `allow` these are refused.

    Raises:
        ValueError: the queue has no such rank, or the handle's address can't be one.
        WriterLost: there is no writer at this address.
        AuthenticationError: the socket belongs to another user.
    """

    def __init__(self, handle: Handle, rank: SupportsIndex, allow: Iterable[str] = ()) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle = {handle!r} is not allowed; allowed is a Handle")
        is_number = isinstance(rank, SupportsIndex) and not isinstance(rank, bool)
        ranks = handle.local_reader_ranks if handle.endpoint is None else range(handle.n_readers)
        if not is_number or operator.index(rank) not in ranks:
            raise ValueError(f"rank = {rank!r} is not allowed; allowed is one of {tuple(ranks)}")
        if isinstance(allow, str | bytes):
            raise TypeError(f"allow = {allow!r} is not allowed; allowed is a sequence of names")
        self._rank = operator.index(rank)
        self._address = handle.local_address
        self._fallbacks = 0
        # Why it can never be admitted: the error's class and arguments.
        self._failure: tuple[type[Exception], tuple[Any, ...]] | None = None
        self._take: Callable[[], Any] = _nothing  # the ring's, once admitted
        self._loads = loads
        self._warn_after_s = QueueConfig().warn_after_s
        self._spin_ns = 0
        self._control: ReaderControl | RemoteReader
        self._ring: RingReader | RemoteRing
        self._remote: RemoteReader | None = None  # `_control`, if that is one
        self._handle = handle
        self._candidate: MessageReader | None = None  # of a relay that has not answered yet
        self._join_at = 0.0  # when a remote reader looks for its host's relay
        self._is_attached = False
        self._is_told = False  # whether the door thread watches the writer's process
        self._watch = Watch(self)
        _Exit.expect()
        if self._rank in handle.local_reader_ranks:
            self._control = ReaderControl.connect(self._address, handle.token, self._rank)
        else:
            self._connect_to(handle, allow)
        self._lock = EndLock("reader", self._watch.is_free)
        if isinstance(self._control, ReaderControl):
            try:
                self._watch.watch(self._control.descriptor)
            except BaseException:
                self.close()
                raise

    def _connect_to(self, handle: Handle, allow: Iterable[str]) -> None:
        from shmcast.remote import CurveKeys, RemoteReader

        assert handle.endpoint is not None  # else there is no such rank
        keys = CurveKeys(*handle.curve_keys) if handle.curve_keys else None
        if keys is None:  # nobody vouches for what comes
            self._loads = checked_loads(allow)
        self._control = self._remote = remote = RemoteReader(
            endpoint=handle.endpoint, keys=keys, token=handle.token, rank=self._rank
        )
        self._ring = remote.ring
        self._take = remote.ring.try_take  # nothing, until this reader is admitted

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<MessageReader @{self._address}, rank={self._rank}, {state}>"

    @property
    def rank(self) -> int:
        """Which reader this is, 0 … n_readers - 1."""
        return self._rank

    def close(self, *, error: BaseException | str | None = None) -> None:
        """
        End this end: every wait of it ends with `QueueClosed`, and later calls raise that too.

        The writer goes on without it, and its rank may be claimed again. It never waits, and may be
        called again and from any thread. In a forked child it does nothing to the queue.

        Args:
            error: why this reader can't go on. The writer gets `ReaderLost` with its type and text,
                as for a reader that died.
        """
        self._close(error)

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """
        Wait until the writer has admitted this reader.

        Args:
            timeout: in seconds; None waits for ever, 0 tries once.

        Raises:
            QueueNotReady: it took longer.
            ProtocolError: the rank is taken, or the writer is none of this version.
            AuthenticationError: the handle's token is not the queue's.
            WriterLost: the writer died before.
            WriterFailed: the writer failed before.
            QueueClosed: this end is closed, or the writer closed before.
        """
        deadline = _deadline(timeout)
        with self._lock.until(deadline, QueueNotReady):
            self._attach(deadline)

    def dequeue(self, timeout: float | None = None) -> Any:
        """
        The next message. It is the caller's own, whatever becomes of the queue.

        A tensor that is kept keeps the block that it shares with its neighbours in the message, up
        to 16 times its own size. Of a message in a memory file, one above 1 MiB or an eighth of the
        file keeps the file. Smaller ones are copied out, as are all below 8 KiB.

        Args:
            timeout: in seconds; None waits for ever, 0 tries once.

        Raises:
            QueueEmpty: none came in time. Nothing was lost.
            QueueClosed: the writer closed and everything has been read, or this end is closed.
            WriterLost: the writer died and everything has been read.
            WriterFailed: the writer closed with an error and everything has been read.
            ProtocolError: this attachment was ended by the writer, or a message is damaged.
            ShmcastError: the call came from inside another one in the same thread, or from a
                forked child; or this process had no room for a large message's descriptor.

        What loading the message raises passes through, with a note that names the message; the
        message counts as received.
        """
        if timeout is None:
            with self._lock:
                return self._load(self._take() or self._wait_for_message(math.inf))
        deadline = _deadline(timeout)
        with self._lock.until(deadline, QueueEmpty):
            return self._load(self._take() or self._wait_for_message(deadline))

    def __iter__(self) -> Iterator[Any]:
        """
        Every message until the writer closes.

        Raises:
            WriterFailed: the writer closed with an error.
            WriterLost: the writer died.
            QueueClosed: this end was closed, or the writer closed before it admitted this reader.
        """
        while True:
            try:
                message = self.dequeue()
            except QueueClosed:
                if self.closed or not self._control.is_admitted:
                    raise
                return
            yield message
            del message  # what the caller has let go of shall not wait for the next one

    def stats(self) -> ReaderStats:
        """
        What this end has done so far. Never waits.

        Raises:
            QueueClosed: this end is closed.
        """
        self._lock.check_not_forked()
        if self.closed:
            raise QueueClosed("this reader is closed")
        ring = getattr(self, "_ring", None)
        return ReaderStats(
            messages=ring.messages if ring else 0,
            bytes=ring.bytes if ring else 0,
            oob_buffers=ring.oob_buffers if ring else 0,
            oob_bytes=ring.oob_bytes if ring else 0,
            waits=ring.waits if ring else 0,
            wait_s=ring.wait_s if ring else 0.0,
            lag=ring.lag if ring else 0,
            fallbacks=self._fallbacks,
        )

    def _load(self, taken: Any) -> Any:
        """The object of what was taken from the ring, whose chunk is given back in any case."""
        try:
            if type(taken) is bytes:
                return self._loads(taken)
            if type(taken) is int:
                return self._load_file(taken)
            stream, buffers = taken
            return self._loads(stream, buffers=buffers)
        except Exception as error:
            self._add_notes(error)
            raise
        finally:
            self._ring.release()

    def _add_notes(self, error: Exception) -> None:
        error.add_note(f"while loading message {self._ring.next_sequence} of {self!r}")
        if isinstance(error, AttributeError | ImportError):
            error.add_note(
                "A class is found by its module and name: what the writer's main program defines "
                "is looked up in this one. Put it into a module that both import."
            )

    def _wait_for_message(self, deadline: float) -> Any:
        try:
            self._attach(deadline)
        except QueueNotReady as error:
            raise QueueEmpty(str(error)) from error
        ring = self._ring
        wait = _Wait(deadline, self._warn_after_s, self._spin_ns)
        while True:
            slice_s = wait.slice_s(is_told=self._is_told)
            is_nudged = slice_s > 0 and ring.wait(*wait.spin_and_sleep_ns(slice_s))
            taken = self._take()
            if taken is not None:
                return taken
            self._check_open()
            if ring.is_struck:
                raise ProtocolError(
                    f"rank {self._rank} was evicted: the writer does not wait for this reader "
                    f"any more"
                )
            if ring.is_closing and not ring.lag:
                self._check_not_failed(ring)
                raise QueueClosed("the writer has closed, and everything was read")
            if slice_s and not is_nudged and wait.elapsed_s < _FIRST_PROBE_S:
                continue
            self._control.collect_files()
            if self._remote is not None:
                self._leave_relay_that_is_over(self._remote)
                self._find_relay(self._remote, deadline)
            # Dead first, then the counter once more: what it published last is not lost.
            is_dead = self._control.is_writer_dead()
            if ring.lag or ring.is_closing:
                continue
            if is_dead:
                self._check_not_failed(ring)
                raise WriterLost(
                    f"the writer ({named(self._control.writer_pid)}) died, and everything was read"
                )
            if not slice_s:
                raise QueueEmpty(f"no message came in {wait.elapsed_s:.3g} s")
            if wait.is_long():
                self._say_wait(wait, f"for message {ring.next_sequence} of")

    def _check_not_failed(self, ring: RingReader | RemoteRing) -> None:
        if ring.failure is not None:
            raise WriterFailed(
                f"the writer ({named(self._control.writer_pid)}) failed, and everything that it "
                f"published was read: {ring.failure}"
            )

    def _load_file(self, nonce: int) -> Any:
        stream, buffers = self._parts_of_file(nonce)
        return loads(stream, buffers=buffers)

    def _parts_of_file(self, nonce: int) -> tuple[Any, list[Any]]:
        assert isinstance(self._control, ReaderControl)  # no other reader takes files
        assert isinstance(self._ring, RingReader)
        file = self._control.take_file(nonce)
        try:
            if seals_of(file) & FROZEN != FROZEN:
                raise ProtocolError("the file of a message is not sealed, so it may change")
            image = _own_image(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        stream, buffers = read_image(image, self._ring.next_sequence)
        self._ring.count_stream(len(stream))
        for buffer in buffers:
            self._ring.count_buffer(len(buffer))
        self._fallbacks += 1
        # A buffer that is kept keeps the whole file.
        most_bytes = min(len(memoryview(image)) // 8, _MOST_COPIED_BYTES)
        own = [buffer if len(buffer) > most_bytes else bytearray(buffer) for buffer in buffers]
        return stream, own

    def _attach(self, deadline: float) -> None:
        """Go through the handshake, if that is not done; raises QueueNotReady if time is up."""
        if not self._step():
            self._wait_for_admission(deadline)
        if self._remote is not None:
            self._find_relay(self._remote, deadline)

    def _wait_for_admission(self, deadline: float) -> None:
        wait = _Wait(deadline, QueueConfig().warn_after_s)
        while not self._step():
            self._check_open()
            slice_s = wait.slice_s(is_told=False)
            if not slice_s:
                raise QueueNotReady(
                    f"rank {self._rank} is not attached after {wait.elapsed_s:.3g} s: the writer "
                    f"({named(self._control.writer_pid)}) has not answered: it may be stopped",
                    (self._rank,),
                )
            self._control.wait(slice_s)
            self._check_open()
            if wait.is_long():
                self._say_wait(wait, "to attach to")

    def _say_wait(self, wait: _Wait, what_for: str) -> None:
        text = (
            f"reader @{self._address} rank {self._rank} has waited {wait.elapsed_s:.3g} s "
            f"{what_for} the writer ({named(self._control.writer_pid)})"
        )
        say(_log.warning, text)

    def _step_alone(self) -> float:
        control = self._control
        assert isinstance(control, ReaderControl)  # nothing else is watched
        if not self._is_attached:
            self._step()
            return math.inf if control.is_connected else 0.0
        if control.has_writer_ended:  # which is told once
            self._watch.watch()
            self._is_told = False
            self._nudge()
        return math.inf

    def _step(self) -> bool:
        """Take the handshake as far as it goes without waiting; whether it is done."""
        if not self._is_attached:
            if not self._control.is_admitted:
                self._try_step()
            if self._control.is_admitted:
                self._begin()
        return self._is_attached

    def _try_step(self) -> None:
        if self._failure is not None:
            error_class, arguments = self._failure
            raise error_class(*arguments)
        try:
            self._take_frames()
        except BaseException as error:
            # Kept, since a step of this end may be taken by another one, or a frame is lost.
            if isinstance(error, ShmcastError | OSError) and not is_foreign(error):
                self._failure = type(error), error.args
            else:
                text = f"attaching rank {self._rank} was interrupted: make a new reader"
                self._failure = ShmcastError, (text,)
            self._control.say_failed(failure_text(error))
            self._watch.watch()
            raise

    def _take_frames(self) -> None:
        self._control.step()
        if self._control.offered is not None:
            data, control = self._control.offered
            self._control.offered = None
            self._segment = Segment.attach(data, control)
            self._ring = RingReader(self._segment, self._rank, self._control.epoch)
            layout = self._segment.layout
            self._warn_after_s = layout.warn_after_s
            if layout.n_slots and layout.receive == "private":
                self._lease_blocks()
            self._segment.close_descriptors()  # what is mapped stays mapped
            self._spin_ns = _spin_ns(layout.spin_us, layout.n_readers)
            self._control.confirm()
            self._control.step()

    def _begin(self) -> None:
        assert self._control.start is not None
        self._ring.begin(self._control.start)
        self._take = self._ring.try_take
        if isinstance(self._control, ReaderControl) and self._control.writer_pidfd is not None:
            self._watch.watch(self._control.writer_pidfd)
            self._is_told = True
        else:
            self._watch.watch()
        self._is_attached = True

    def _leave_relay_that_is_over(self, remote: RemoteReader) -> None:
        relayed = remote.ring.relayed
        if relayed is not None and relayed.is_over():
            self._join_at = 0.0
            remote.take_from(None)
            relayed.close()

    def _find_relay(self, remote: RemoteReader, deadline: float) -> None:
        """Look for the relay of this host, or become it."""
        now = time.monotonic()
        if now < self._join_at or remote.is_relay or remote.ring.relayed is not None:
            return
        self._join_at = now + _JOIN_PAUSE_S
        try:
            self._join(remote, deadline)
        except (ShmcastError, OSError) as error:
            if is_foreign(error):
                raise
            self._candidate = None
            _log.info("rank %d takes its messages from the writer itself: %s", self._rank, error)

    def _join(self, remote: RemoteReader, deadline: float) -> None:
        is_new = self._candidate is None
        if is_new:
            self._candidate = self._new_candidate(remote)
        reader = self._candidate
        if reader is None:
            return
        # A relay answers at once. One that is stopped is asked again, without waiting.
        patience_s = _JOIN_S if is_new else 0.0
        with contextlib.suppress(QueueNotReady):
            reader.wait_until_ready(max(0.0, min(patience_s, deadline - time.monotonic())))
            remote.take_from(_Relayed(reader))
            self._candidate = None

    def _new_candidate(self, remote: RemoteReader) -> MessageReader | None:
        """A reader of this host's relay, or None if this end has become that."""
        assert remote.sizes is not None  # it is admitted
        handle = _relay_handle(self._handle)
        with contextlib.suppress(WriterLost):  # there is none
            return MessageReader(handle, self._rank)
        try:
            remote.pass_on_to(_Relay(handle, remote.sizes, remote.session))
        except ConfigError:  # another one was faster
            return MessageReader(handle, self._rank)
        return None

    def _lease_blocks(self) -> None:
        assert isinstance(self._ring, RingReader)  # no other has an arena
        try:
            if self._ring.lease_from(self._segment.data_descriptor):
                return
            reason = "this kernel does not drop private pages"
        except OSError as error:
            reason = f"a private mapping was refused ({error})"
        _log.warning(
            "reader @%s rank %d copies large buffers: %s", self._address, self._rank, reason
        )

    @property
    def _is_over(self) -> bool:
        ring = getattr(self, "_ring", None)
        return self.closed or (ring is not None and ring.is_closing and not ring.lag)

    def _say_failed(self, text: str) -> None:
        self._control.say_failed(text)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a MessageReader can't be pickled: send the queue's handle and a rank instead, and "
            "attach in the other process with create_from_handle"
        )

    def _finish(self) -> None:
        self._watch.close()
        with contextlib.ExitStack() as parts:
            parts.callback(self._control.close)
            if self._candidate is not None:
                parts.callback(self._candidate.close)
            if self._remote is not None and self._remote.ring.relayed is not None:
                parts.callback(self._remote.ring.relayed.close)
            if hasattr(self, "_segment"):
                parts.callback(self._segment.close)
            if hasattr(self, "_ring"):
                self._ring.leave()  # what was received lives on
        # The mappings end here, unless another thread is still on its way out of a call. The last
        # line, as for the writer.
        self._take = _nothing
        if hasattr(self, "_ring"):
            del self._ring

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        self._control.close_descriptors()
        if hasattr(self, "_segment"):
            self._segment.close_descriptors()


class _Relayed:
    """What the relay of this host passes on to one of its other readers: a `remote.Relayed`."""

    def __init__(self, reader: MessageReader) -> None:
        from shmcast.remote import Arrived

        self._arrived = Arrived.of
        assert isinstance(reader._control, ReaderControl)  # a relay is on this host
        assert isinstance(reader._ring, RingReader)
        self._reader, self._control, self._ring = reader, reader._control, reader._ring
        self._head: Arrived | None = None  # taken and not released
        self._is_broken = self.is_ahead = False
        self.session = int.from_bytes(self._control.greeting, "little")

    @property
    def lag(self) -> int:
        return self._ring.lag

    def take(self, number: int) -> Arrived | None:
        while not self._is_broken:
            if self._head is None:
                self._head = self._next()
            self.is_ahead = self._head is not None and self._head.number > number
            if self._head is None or self._head.number >= number:
                return None if self.is_ahead else self._head
            self.release()
        return None

    def _next(self) -> Arrived | None:
        try:
            taken = self._ring.try_take()
            if taken is None:
                return None
            if type(taken) is int:
                taken = self._reader._parts_of_file(taken)
        except (ShmcastError, OSError) as error:
            if is_foreign(error):
                raise
            _log.warning("%r can't be used as a relay's: %s", self._reader, error)
            self._is_broken = True
            return None
        stream, buffers = (taken, []) if type(taken) is bytes else taken
        number = int.from_bytes(stream[:_NUMBER_BYTES], "little")
        return self._arrived(number, stream[_NUMBER_BYTES:], buffers)

    def release(self) -> None:
        self._head = None
        self._ring.release()

    def wait(self, sleep_ns: int) -> None:
        spin_ns = min(self._reader._spin_ns, sleep_ns)
        self._ring.wait(spin_ns, sleep_ns - spin_ns)

    def nudge(self) -> None:
        self._ring.nudge()

    def is_over(self) -> bool:
        self._control.collect_files()
        try:
            has_ended = self._ring.is_closing or self._control.is_writer_dead()
        except ProtocolError:  # the relay lost its lock
            return True
        return self._is_broken or self._ring.is_struck or (has_ended and not self._ring.lag)

    def close(self) -> None:
        self._reader.close()


def _report(lost: dict[int, tuple[str, bool]]) -> str:
    return "; ".join(text for text, _ in lost.values())


def _nothing() -> None:
    """What a reader takes before it is admitted."""


def _spin_ns(spin_us: int, n_readers: int) -> int:
    """How long to poll before sleeping: not at all if the ends on this host have to share CPUs."""
    return spin_us * 1000 if cpus_available() >= 1 + n_readers else 0


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _own_image(file: int, size_bytes: int) -> Mapping | bytearray:
    """The file's bytes, writable and this process's own."""
    try:
        return Mapping(file, size_bytes, shared=False, writable=True)
    except OSError as error:
        # RLIMIT_AS, RLIMIT_DATA or overcommit: maybe there is room in the heap.
        _log.warning("a private mapping was refused (%s), so a message is copied", error)
        image = new_bytearray(size_bytes)
        offset = 0
        while offset < size_bytes:
            offset += os.preadv(file, [memoryview(image)[offset:]], offset)
        return image
