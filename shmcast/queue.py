"""`MessageQueue` and `MessageReader`: the two ends of a queue, joined from the parts below."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import operator
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

import attrs

from shmcast._ring import (
    EndLock,
    Mapping,
    RingReader,
    new_bytearray,
    read_image,
)
from shmcast.arena import LEAST_BLOCK_BYTES
from shmcast.config import QueueConfig
from shmcast.control import (
    ReaderControl,
    failure_text,
    is_foreign,
    named,
)
from shmcast.door import Watch, say
from shmcast.ends import Exit, QueueEnd
from shmcast.errors import (
    ConfigError,
    ProtocolError,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ShmcastError,
    WriterFailed,
    WriterLost,
)
from shmcast.handle import TOKEN_BYTES, Handle
from shmcast.pickler import Pickler, checked_loads, loads, rebuild_tensor
from shmcast.relay import NUMBER_BYTES, Relay, relay_handle
from shmcast.roster import ranks_text
from shmcast.segment import (
    FROZEN,
    Segment,
    seals_of,
)
from shmcast.waiting import Wait, check_open, deadline_of
from shmcast.writer import QueueStats, Writer, spin_ns_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    # zmq is imported only where there are remote readers.
    from shmcast.remote import Arrived, RemoteReader, RemoteRing

__all__ = ["MessageQueue", "MessageReader", "ReaderStats"]

_log = logging.getLogger("shmcast.queue")

_JOIN_S: Final = 0.2  # how long a relay's answer is waited for
_JOIN_PAUSE_S: Final = 1.0
_MOST_COPIED_BYTES: Final = 1024**2  # a larger buffer is not copied out of a message's file


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


class MessageQueue(QueueEnd):
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
        local_ranks = config.local_reader_ranks
        self._local_ranks = (
            tuple(range(config.n_readers)) if local_ranks is None else tuple(sorted(local_ranks))
        )
        self._address = f"shmcast-{secrets.token_hex(16)}"
        self._token = secrets.token_hex(TOKEN_BYTES)
        self._watch = Watch(self)
        Exit.expect()
        self._lock = EndLock("writer", self._watch.is_free)
        try:
            self._writer = Writer(
                config,
                self._lock,
                address=self._address,
                token=self._token,
                ranks=self._local_ranks,
                on_look=self._watch.arm,
            )
            self._pickler = Pickler(
                config.oob_threshold_bytes, allocate=self._writer.arena.allocate_buffer
            )
            self._watch.watch(self._writer.control.descriptor)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"a queue can't be made: {error} (it needs some descriptors: RLIMIT_NOFILE)"
            ) from error

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
        remote = self._open_writer().remote
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
        deadline = deadline_of(timeout)
        if timeout == 0 or self.closed or self._lock.is_forked:
            self._close(error)
            return
        with self._lock.until(deadline, QueueFull):
            self._writer.wait_until_read(deadline)
            self._close(error)  # this turn's end finishes it

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
        deadline = deadline_of(timeout)
        wait = Wait(deadline, self._config.warn_after_s)
        while True:
            with self._lock.until(deadline, QueueNotReady):
                writer = self._writer
                writer.survey()
                writer.log_lost()
                missing = writer.roster.missing_ranks
                attempts = writer.roster.attempts_text(missing)
                turns = self._lock.turns + 1  # this one too
            if not missing:
                return
            slice_s = wait.slice_s(is_told=writer.control.sees_every_death)
            if slice_s == 0:
                raise QueueNotReady(
                    f"{ranks_text(missing)} not attached after {wait.elapsed_s:.3g} s{attempts}",
                    missing,
                )
            self._lock.wait_for_turn(turns, slice_s)  # the door thread's, which admits them
            check_open(self._lock, repr(self))
            if wait.is_long():
                _log.warning(
                    "writer @%s has waited %.0f s for %s to attach%s",
                    self._address,
                    wait.elapsed_s,
                    ranks_text(missing),
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
        deadline = math.inf if timeout is None else deadline_of(timeout)
        with self._lock if timeout is None else self._lock.until(deadline, QueueFull):
            writer = self._writer
            if writer.arena.pending:  # of a message that was interrupted
                writer.arena.settle()
            if writer.remote is not None:
                writer.hand_on()  # what a signal left undone, while it lies where it was published
            try:
                stream, buffers = self._pickler.dumps(obj)
            except BaseException:
                writer.arena.settle()
                raise
            if buffers or writer.try_publish(stream, buffers):
                writer.publish(stream, buffers, deadline)
            elif writer.remote is not None:
                writer.hand_on(stream)

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
                draft = self._writer.arena.new_draft(n_bytes)
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
        return self._open_writer().stats()

    def _open_writer(self) -> Writer:
        self._lock.check_not_forked()
        writer: Writer | None = self.__dict__.get("_writer")
        if writer is None or self.closed:
            raise QueueClosed("this writer is closed")
        return writer

    def _step_alone(self) -> float:
        return self._writer.step_alone()

    def _nudge(self) -> None:
        if (writer := self.__dict__.get("_writer")) is not None:
            writer.nudge()

    def _stop_waits(self) -> None:
        if (writer := self.__dict__.get("_writer")) is not None:
            writer.stop()

    def _say_failed(self, text: str) -> None:
        if (writer := self.__dict__.get("_writer")) is not None:
            writer.say_failed(text)

    def _finish(self) -> None:
        writer: Writer | None = self.__dict__.get("_writer")
        if writer is not None:  # else the constructor failed, or a signal came after the last line
            writer.say_closing()
        self._watch.close()
        if writer is not None:
            writer.close()
        # The mappings end here, unless another thread is still on its way out of a call. The last
        # lines, since a signal may interrupt this and `close` come again.
        self.__dict__.pop("_pickler", None)
        self.__dict__.pop("_writer", None)

    def close_inherited(self) -> None:
        """For a forked child; see `door.End`."""
        self._writer.close_inherited()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a MessageQueue can't be pickled: it stays in the process that made it. To read in "
            "another process, send it the handle from export_handle(). To write there, make the "
            "queue there and send its handle here"
        )


class MessageReader(QueueEnd):
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
        Exit.expect()
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
        deadline = deadline_of(timeout)
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
        deadline = deadline_of(timeout)
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
        wait = Wait(deadline, self._warn_after_s, self._spin_ns)
        while True:
            slice_s = wait.slice_s(is_told=self._is_told)
            is_nudged = slice_s > 0 and ring.wait(*wait.spin_and_sleep_ns(slice_s))
            taken = self._take()
            if taken is not None:
                return taken
            check_open(self._lock, repr(self))
            if ring.is_struck:
                raise ProtocolError(
                    f"rank {self._rank} was evicted: the writer does not wait for this reader "
                    f"any more"
                )
            if ring.is_closing and not ring.lag:
                self._check_not_failed(ring)
                raise QueueClosed("the writer has closed, and everything was read")
            if slice_s and not is_nudged and wait.has_just_begun:
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
        wait = Wait(deadline, QueueConfig().warn_after_s)
        while not self._step():
            check_open(self._lock, repr(self))
            slice_s = wait.slice_s(is_told=False)
            if not slice_s:
                raise QueueNotReady(
                    f"rank {self._rank} is not attached after {wait.elapsed_s:.3g} s: the writer "
                    f"({named(self._control.writer_pid)}) has not answered: it may be stopped",
                    (self._rank,),
                )
            self._control.wait(slice_s)
            check_open(self._lock, repr(self))
            if wait.is_long():
                self._say_wait(wait, "to attach to")

    def _say_wait(self, wait: Wait, what_for: str) -> None:
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
            self._spin_ns = spin_ns_of(layout.spin_us, layout.n_readers)
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
        handle = relay_handle(self._handle)
        with contextlib.suppress(WriterLost):  # there is none
            return MessageReader(handle, self._rank)
        try:
            remote.pass_on_to(Relay(handle, remote.sizes, remote.session))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return MessageReader(handle, self._rank)  # another one was faster
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

    def _nudge(self) -> None:
        if (ring := getattr(self, "_ring", None)) is not None:
            ring.nudge()

    def _stop_waits(self) -> None:
        if (ring := getattr(self, "_ring", None)) is not None:
            ring.stop()

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
                if isinstance(self._ring, RingReader):
                    # What was received lives on, private, and the writer gets its blocks back.
                    self._ring.keep_leases()
                self._ring.leave()
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
        number = int.from_bytes(stream[:NUMBER_BYTES], "little")
        return self._arrived(number, stream[NUMBER_BYTES:], buffers)

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


def _nothing() -> None:
    """What a reader takes before it is admitted."""


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
