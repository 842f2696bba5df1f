"""`MessageQueue` and `MessageReader`: the two ends of a queue, joined from the parts below."""

from __future__ import annotations

import logging
import math
import operator
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import attrs

from shmcast._ring import EndLock
from shmcast.arena import LEAST_BLOCK_BYTES
from shmcast.attachment import Attachment, Source
from shmcast.config import QueueConfig
from shmcast.door import Watch, say
from shmcast.ends import Exit, QueueEnd
from shmcast.errors import (
    ConfigError,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
)
from shmcast.handle import TOKEN_BYTES, Handle
from shmcast.pickler import Pickler, checked_loads, loads, rebuild_tensor
from shmcast.relay import RemoteAttachment
from shmcast.roster import ranks_text
from shmcast.waiting import Wait, check_open, deadline_of
from shmcast.writer import QueueStats, Writer

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["MessageQueue", "MessageReader", "ReaderStats"]

_log = logging.getLogger("shmcast.queue")


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
    counts as closed: a status such as that of `sys.exit(3)` is seen by `with` alone. From Python
    3.13 on a child of `multiprocessing` that ends by an error outside of `with` counts as killed.

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
        whose ranks are counted from 0 in the group's order. A rank that can't reach the
        writer's control socket is on another host. An error on one rank is raised on all of them.

        The queue's secrets travel as the group's own messages do (with gloo in clear): anyone
        who can read these can read the queue.

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
            if buffers or not writer.ring.try_publish(stream, buffers):
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
        writer = self._transport
        if writer is None or self.closed:
            raise QueueClosed("this writer is closed")
        return writer

    def _step_alone(self) -> float:
        return self._writer.step_alone()

    def _finish(self) -> None:
        writer = self._transport
        if writer is not None:  # else the constructor failed, or a signal came after the last line
            writer.say_closing()
        self._watch.close()
        if writer is not None:
            writer.close()
        # The mappings end here, unless another thread is still on its way out of a call. The last
        # lines, since a signal may interrupt this and `close` come again.
        for name in ("_pickler", "_writer"):
            self.__dict__.pop(name, None)

    @property
    def _transport(self) -> Writer | None:
        return getattr(self, "_writer", None)

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
    sends its claim here, and does not wait for the writer. The first reader of a rank gets every
    message; one that comes after it gets those that are published after its `wait_until_ready`.

    Leave it by `close` or as a context manager. A `with` block that ends by an exception fails the
    reader, as `close(error=...)` does; so does an uncaught exception that ends the process while it
    is open. No failures are `GeneratorExit`, `sys.exit()` with status 0, and `QueueClosed` after
    this queue has ended. A reader that is dropped, or open when the program ends otherwise, counts
    as closed: a status such as that of `sys.exit(3)` is seen by `with` alone. From Python 3.13 on a
    child of `multiprocessing` that ends by an error outside of `with` counts as killed.

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
        self._loads = loads
        self._take: Callable[[], Any] = _nothing  # the ring's, once admitted
        self._release: Callable[[], object] = _nothing
        self._is_told = False  # whether the door thread watches the writer's process
        self._watch = Watch(self)
        self._lock = EndLock("reader", self._watch.is_free)
        Exit.expect()
        self._source: Source
        if self._rank in handle.local_reader_ranks:
            self._source = Attachment(self._address, handle.token, self._rank)
        else:
            if not handle.curve_keys:  # nobody vouches for what comes
                self._loads = checked_loads(allow)
            self._source = RemoteAttachment(handle, self._rank)
        try:
            self._watch.watch(*self._source.watched)
        except BaseException:
            self.close()
            raise

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
            ProtocolError: the rank is taken, or the writer is of another version.
            AuthenticationError: the handle's token is not the queue's.
            WriterLost: the writer died before.
            WriterFailed: the writer failed before.
            QueueClosed: this end is closed, or the writer closed before.
        """
        deadline = deadline_of(timeout)
        with self._lock.until(deadline, QueueNotReady):
            self._attach(deadline)
            self._source.settle(deadline)

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
                if self.closed or not self._source.is_attached:
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
        source = self._transport
        if source is None or self.closed:
            raise QueueClosed("this reader is closed")
        ring = source.ring
        return ReaderStats(
            messages=ring.messages if ring else 0,
            bytes=ring.bytes if ring else 0,
            oob_buffers=ring.oob_buffers if ring else 0,
            oob_bytes=ring.oob_bytes if ring else 0,
            waits=ring.waits if ring else 0,
            wait_s=ring.wait_s if ring else 0.0,
            lag=ring.lag if ring else 0,
            fallbacks=source.fallbacks,
        )

    def _load(self, taken: Any) -> Any:
        """The object of what was taken from the ring, whose chunk is given back in any case."""
        try:
            if type(taken) is bytes:
                return self._loads(taken)
            stream, buffers = self._source.parts_of_file(taken) if type(taken) is int else taken
            return self._loads(stream, buffers=buffers)
        except Exception as error:
            self._add_notes(error)
            raise
        finally:
            self._release()

    def _add_notes(self, error: Exception) -> None:
        ring = self._source.ring
        assert ring is not None  # the message was in it
        error.add_note(f"while loading message {ring.next_sequence} of {self!r}")
        if isinstance(error, AttributeError | ImportError):
            error.add_note(
                "A class is found by its module and name: what the writer's main program defines "
                "is looked up in this one. Put it into a module that both import."
            )

    def _wait_for_message(self, deadline: float) -> Any:
        if self._take is _nothing:
            try:
                self._attach(deadline)
            except QueueNotReady as error:
                raise QueueEmpty(str(error)) from error
        source, ring = self._source, self._source.ring
        assert ring is not None  # it is attached
        source.settle(deadline)
        wait = Wait(deadline, source.warn_after_s, source.spin_ns)
        while True:
            slice_s = wait.slice_s(is_told=self._is_told)
            is_nudged = slice_s > 0 and ring.wait(*wait.spin_and_sleep_ns(slice_s))
            taken = self._take()
            if taken is not None:
                return taken
            check_open(self._lock, repr(self))
            source.check_not_over()
            if slice_s and not is_nudged and wait.has_just_begun:
                continue
            if source.look(deadline):
                continue
            if not slice_s:
                raise QueueEmpty(f"no message came in {wait.elapsed_s:.3g} s")
            if wait.is_long():
                self._say_wait(wait, f"for message {ring.next_sequence} of")

    def _attach(self, deadline: float) -> None:
        """Go through the handshake, if that is not done; raises QueueNotReady if time is up."""
        if not self._step():
            self._wait_for_admission(deadline)

    def _wait_for_admission(self, deadline: float) -> None:
        wait = Wait(deadline, self._source.warn_after_s)
        while not self._step():
            check_open(self._lock, repr(self))
            slice_s = wait.slice_s(is_told=False)
            if not slice_s:
                raise QueueNotReady(
                    f"rank {self._rank} is not attached after {wait.elapsed_s:.3g} s: the writer "
                    f"({self._source.writer_name}) {self._source.state_text}",
                    (self._rank,),
                )
            self._source.wait_for_step(slice_s)
            check_open(self._lock, repr(self))
            if wait.is_long():
                self._say_wait(wait, "to attach to")

    def _say_wait(self, wait: Wait, what_for: str) -> None:
        text = (
            f"reader @{self._address} rank {self._rank} has waited {wait.elapsed_s:.3g} s "
            f"{what_for} the writer ({self._source.writer_name})"
        )
        say(_log.warning, text)

    def _step_alone(self) -> float:
        source = self._source
        assert isinstance(source, Attachment)  # nothing else is watched
        if not source.is_attached:
            self._step()
            return math.inf if source.control.is_connected else 0.0
        if source.control.has_writer_ended:  # which is told once
            self._watch.watch()
            self._is_told = False
            source.nudge()
        return math.inf

    def _step(self) -> bool:
        """Take the handshake as far as it goes without waiting; whether it is done."""
        if self._take is not _nothing:
            return True
        source = self._source
        try:
            if not source.step():
                return False
        except BaseException:
            self._watch.watch()
            raise
        assert source.ring is not None  # it is attached
        self._watch.watch(*source.watched)
        self._is_told = bool(source.watched)
        self._release = source.ring.release
        self._take = source.ring.try_take
        return True

    @property
    def _is_over(self) -> bool:
        source = self._transport
        return self.closed or (source is not None and source.is_over)

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a MessageReader can't be pickled: send the queue's handle and a rank instead, and "
            "attach in the other process with create_from_handle"
        )

    def _finish(self) -> None:
        self._watch.close()
        if (source := self._transport) is not None:
            source.close()
        # The mappings end here, unless another thread is still on its way out of a call. The last
        # lines, as for the writer.
        self._take = self._release = _nothing
        self.__dict__.pop("_source", None)

    @property
    def _transport(self) -> Source | None:
        return getattr(self, "_source", None)


def _nothing() -> None:
    """What a reader takes before it is admitted."""
