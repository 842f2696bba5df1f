"""The reader's end of the remote side: how far the handshake is, and where messages come from."""

from __future__ import annotations

import sys

from shmcast.remote.frames import RingSizes
from shmcast.remote.loop import Loop
from shmcast.remote.reader_link import ReaderLink
from shmcast.remote.ring import Relay, Relayed, RemoteRing
from shmcast.remote.writer_link import CurveKeys

__all__ = ["RemoteReader"]


class RemoteReader:
    """
    The reader's side of a connection.

    The methods are for the reader's end, under its lock, but for `close`.

    Args:
        endpoint: the address of the writer.
        keys: of the queue, or None with security "none".
        token: the secret to show.
        rank: the rank to claim.

    Raises:
        ValueError: the host's name can't be one.
    """

    def __init__(self, *, endpoint: str, keys: CurveKeys | None, token: str, rank: int) -> None:
        self.ring = RemoteRing()
        loop = Loop.enter()
        try:
            self.link = ReaderLink(
                loop, self.ring, endpoint=endpoint, keys=keys, token=token, rank=rank
            )
        except BaseException:
            loop.leave()
            raise
        self.ring.link = self.link
        loop.add(self.link)

    @property
    def is_admitted(self) -> bool:
        """Whether the handshake is done."""
        return self.link.start is not None

    @property
    def note(self) -> str:
        """What the writer says that this claim waits for."""
        return self.link.note

    @property
    def writer_pid(self) -> str | None:
        """The writer's process, with its host, once that is known."""
        return self.link.writer_pid

    @property
    def session(self) -> int:
        """What names this attachment."""
        return self.link.session

    @property
    def sizes(self) -> RingSizes | None:
        """The settings of the writer's ring, once admitted."""
        return self.link.sizes

    def wait(self, timeout_s: float) -> None:
        """Wait until something changes."""
        self.ring.changed.clear()
        if not self.is_admitted and self.link.failure is None:
            self.ring.changed.wait(timeout_s)

    def step(self) -> None:
        """
        See how far the handshake is.

        Raises:
            ProtocolError: the writer refused the rank, or is no shmcast peer of this version.
            AuthenticationError: one of the two did not show the right key or token.
            QueueClosed: the writer closed before it admitted this reader.
            WriterLost: nobody answers.
        """
        self._raise_failure()

    def check_alive(self) -> None:
        """Raise WriterLost, or what else has ended the attachment, when all was read."""
        if not self.ring.lag:
            self._raise_failure()

    def _raise_failure(self) -> None:
        failure = self.link.failure
        if failure is not None:
            error_class, text = failure
            raise error_class(text)

    @property
    def is_relay(self) -> bool:
        """Whether what is received is passed on."""
        return self.link.is_relay

    def pass_on_to(self, relay: Relay) -> None:
        """Put what is received from now on into this host's ring too, which is closed here."""
        self.link.new_relay = relay
        self.link.ask()

    def take_from(self, relayed: Relayed | None) -> None:
        """Have what follows sent to the relay alone; or, with None, what is missing to this end."""
        self.ring.relayed = relayed
        self.link.ask()

    def say_failed(self, text: str) -> None:
        """Have the writer told why this reader can't attach or is about to leave."""
        self.link.last_word = text.encode()

    def close(self) -> None:
        """Leave; does not wait, but where the process ends."""
        link = self.link
        if sys.is_finalizing():  # the thread is gone, and a lock may have gone with its owner
            return
        if not link.is_closing:
            link.is_closing = True
            link.ask()
        if link.loop.is_exiting:
            link.loop.wait_until_settled(link)
