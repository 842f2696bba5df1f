"""A reader's transport: one life of a rank on this host, which gives parts and no objects."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, Final

from shmcast._ring import Mapping, RingReader, new_bytearray, read_image
from shmcast.config import QueueConfig
from shmcast.control import ReaderControl, failure_text, named
from shmcast.errors import (
    ProtocolError,
    QueueClosed,
    ShmcastError,
    WriterFailed,
    WriterLost,
    is_foreign,
)
from shmcast.segment import FROZEN, Segment, seals_of
from shmcast.waiting import spin_ns_of

if TYPE_CHECKING:
    from shmcast.remote import RemoteRing

__all__ = ["Attachment", "Source"]

_log = logging.getLogger("shmcast.queue")

_MOST_COPIED_BYTES: Final = 1024**2  # a larger buffer is not copied out of a message's file


class Source:
    """
    Where a reader's messages come from: one life of its rank, from the claim to the close.

    Its methods are called in the turns of the end that has it, but for `nudge`, `stop`,
    `say_failed` and `close_inherited`.

    Args:
        rank: which one.

    Attributes:
        ring: what has arrived; None until the writer has answered.
        is_attached: whether the writer has admitted it.
        spin_ns: how long to poll before sleeping.
        warn_after_s: how long to wait before saying so.
        fallbacks: how many messages came in a memory file.
    """

    ring: RingReader | RemoteRing | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_attached = False
        self.spin_ns = 0
        self.warn_after_s = QueueConfig().warn_after_s
        self.fallbacks = 0

    @property
    def watched(self) -> tuple[int, ...]:
        """The descriptors that the door thread waits for; once attached, the writer's process."""
        return ()

    @property
    def writer_name(self) -> str:
        """What texts call the writer's process."""
        raise NotImplementedError

    @property
    def state_text(self) -> str:
        """What is known of a writer that has not admitted this rank."""
        return "has not answered: it may be stopped"

    def step(self) -> bool:
        """Take the handshake as far as it goes without waiting; whether it is done."""
        raise NotImplementedError

    def wait_for_step(self, timeout_s: float) -> None:
        """Wait until the handshake may go on."""
        raise NotImplementedError

    def settle(self, deadline: float) -> None:
        """Do what else there is to do once attached."""

    def parts_of_file(self, nonce: int) -> tuple[Any, list[Any]]:
        """The parts of a message that `try_take` has found to be in a memory file."""
        raise NotImplementedError

    def look(self, deadline: float) -> bool:
        """
        See what has become of the writer; whether there is more to take, or the end.

        Raises:
            WriterLost, WriterFailed: it is no more, and everything was read.
        """
        raise NotImplementedError

    def say_failed(self, text: str) -> None:
        """Have the writer told why this end closes."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave, and let everything go but the mappings, which end with this object."""
        raise NotImplementedError

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether the writer has closed, and everything was read."""
        return self.ring is not None and self.ring.is_closing and not self.ring.lag

    def check_not_over(self) -> None:
        """Raise what ends this attachment, if it is over and everything was read."""
        assert self.ring is not None  # it is attached
        if self.ring.is_struck:
            raise ProtocolError(
                f"rank {self.rank} was evicted: the writer does not wait for this reader any more"
            )
        if self.is_over:
            self.check_not_failed()
            raise QueueClosed("the writer has closed, and everything was read")

    def check_not_failed(self) -> None:
        """Raise WriterFailed if the writer has said why it ends."""
        if self.ring is not None and self.ring.failure is not None:
            raise WriterFailed(
                f"the writer ({self.writer_name}) failed, and everything that it published was "
                f"read: {self.ring.failure}"
            )

    def stop(self) -> None:
        """End the present wait and all later ones."""
        if self.ring is not None:
            self.ring.stop()

    def nudge(self) -> None:
        """End the present wait, for something has come."""
        if self.ring is not None:
            self.ring.nudge()


class Attachment(Source):
    """
    A rank of a writer on this host.

    Args:
        address: of the control socket.
        token: the secret to show.
        rank: the one to claim.

    Raises:
        ValueError: the address can't be one.
        WriterLost: there is no writer at this address.
        AuthenticationError: the socket belongs to another user.
    """

    ring: RingReader | None = None
    segment: Segment | None = None

    def __init__(self, address: str, token: str, rank: int) -> None:
        super().__init__(rank)
        self._name = f"reader @{address} rank {rank}"
        # Why it can never be admitted: the error's class and arguments.
        self._failure: tuple[type[Exception], tuple[Any, ...]] | None = None
        self.control = ReaderControl.connect(address, token, rank)

    @property
    def watched(self) -> tuple[int, ...]:
        """The descriptors that the door thread waits for; once attached, the writer's process."""
        if not self.is_attached:
            return (self.control.descriptor,)
        pidfd = self.control.writer_pidfd
        return () if pidfd is None else (pidfd,)

    @property
    def writer_name(self) -> str:
        """What texts call the writer's process."""
        return named(self.control.writer_pid)

    def step(self) -> bool:
        """
        Take the handshake as far as it goes without waiting; whether it is done.

        Raises:
            ShmcastError, OSError: this rank can't be had. Later calls raise it again.
        """
        if not self.control.is_admitted:
            self._try_step()
        if self.control.is_admitted and not self.is_attached:
            assert self.ring is not None  # the segment was offered before
            assert self.control.start is not None
            self.ring.begin(self.control.start)
            self.is_attached = True
        return self.is_attached

    def _try_step(self) -> None:
        if self._failure is not None:
            error_class, arguments = self._failure
            raise error_class(*arguments)
        try:
            self._take_frames()
        except BaseException as error:
            # Kept for the next call: the door thread may have met it, or a frame was lost.
            if isinstance(error, ShmcastError | OSError) and not is_foreign(error):
                self._failure = type(error), error.args
            else:
                text = f"attaching rank {self.rank} was interrupted: make a new reader"
                self._failure = ShmcastError, (text,)
            self.control.say_failed(failure_text(error))
            raise

    def _take_frames(self) -> None:
        self.control.step()
        if self.control.offered is not None:
            data, control = self.control.offered
            self.control.offered = None
            self.segment = segment = Segment.attach(data, control)
            self.ring = RingReader(segment, self.rank, self.control.epoch)
            layout = segment.layout
            self.warn_after_s = layout.warn_after_s
            if layout.n_slots and layout.receive == "private":
                self._lease_blocks(segment, self.ring)
            segment.close_descriptors()  # what is mapped stays mapped
            self.spin_ns = spin_ns_of(layout.spin_us, layout.n_readers)
            self.control.confirm()
            self.control.step()

    def _lease_blocks(self, segment: Segment, ring: RingReader) -> None:
        try:
            if ring.lease_from(segment.data_descriptor):
                return
            reason = "this kernel does not drop private pages"
        except OSError as error:
            if is_foreign(error):
                raise
            reason = f"a private mapping was refused ({error})"
        _log.warning("%s copies large buffers: %s", self._name, reason)

    def wait_for_step(self, timeout_s: float) -> None:
        """Wait until the handshake may go on."""
        self.control.wait(timeout_s)

    def parts_of_file(self, nonce: int) -> tuple[Any, list[Any]]:
        """The parts of a message that `try_take` has found to be in a memory file."""
        ring = self.ring
        assert ring is not None  # that found it
        file = self.control.take_file(nonce)
        try:
            if seals_of(file) & FROZEN != FROZEN:
                raise ProtocolError("the file of a message is not sealed, so it may change")
            image = _own_image(file, os.fstat(file).st_size)
        finally:
            os.close(file)
        stream, buffers = read_image(image, ring.next_sequence)
        ring.count_stream(len(stream))
        for buffer in buffers:
            ring.count_buffer(len(buffer))
        self.fallbacks += 1
        # A buffer that is kept keeps the whole file.
        most_bytes = min(len(memoryview(image)) // 8, _MOST_COPIED_BYTES)
        own = [buffer if len(buffer) > most_bytes else bytearray(buffer) for buffer in buffers]
        return stream, own

    def look(self, deadline: float) -> bool:  # noqa: ARG002  # nothing here waits
        """
        See what has become of the writer; whether there is more to take, or the end.

        Raises:
            WriterLost, WriterFailed: it is no more, and everything was read.
        """
        ring = self.ring
        assert ring is not None  # it is attached
        self.control.collect_files()
        # Dead first, then the counter once more: what it published last is not lost.
        is_dead = self.control.is_writer_dead()
        if ring.lag or ring.is_closing:
            return True
        if is_dead:
            self.check_not_failed()
            raise WriterLost(f"the writer ({self.writer_name}) died, and everything was read")
        return False

    def say_failed(self, text: str) -> None:
        """Have the writer told why this end closes."""
        self.control.say_failed(text)

    def close(self) -> None:
        """Leave, and let everything go but the mappings, which end with this object."""
        with contextlib.ExitStack() as parts:
            parts.callback(self.control.close)
            if self.segment is not None:
                parts.callback(self.segment.close)
            if self.ring is not None:
                self.ring.leave()  # what was received lives on

    def close_inherited(self) -> None:
        """Close what a forked child has of it."""
        self.control.close_descriptors()
        if self.segment is not None:
            self.segment.close_descriptors()


def _own_image(file: int, size_bytes: int) -> Mapping | bytearray:
    """The file's bytes, writable and this process's own."""
    try:
        return Mapping(file, size_bytes, shared=False, writable=True)
    except OSError as error:
        if is_foreign(error):
            raise
        # RLIMIT_AS, RLIMIT_DATA or overcommit: maybe there is room in the heap.
        _log.warning("a private mapping was refused (%s), so a message is copied", error)
        image = new_bytearray(size_bytes)
        offset = 0
        while offset < size_bytes:
            offset += os.preadv(file, [memoryview(image)[offset:]], offset)
        return image
