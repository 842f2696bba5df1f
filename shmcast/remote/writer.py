"""The writer's end of the remote side: who holds which rank, and what is handed on."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator

from shmcast.control import FailedAttempt
from shmcast.errors import ProtocolError, ShmcastError
from shmcast.membership import Membership
from shmcast.remote.frames import Kind, RingSizes
from shmcast.remote.loop import Event, Loop
from shmcast.remote.writer_link import CurveKeys, Message, Peer, Seat, State, WriterLink

__all__ = ["RemoteWriter"]


class RemoteWriter:
    """
    The writer's side: who is attached from other hosts, and the messages on their way.

    The methods are for the writer's end, under its lock, but for `close`.

    Args:
        bind: the address to bind, such as "tcp://192.0.2.1:0".
        security: "curve" or "none".
        ranks: the ranks that may attach.
        token: what a reader must show.
        sizes: of the ring: as many messages may be on their way, and of those too large for a
            chunk as many bytes as the arena has.
        members: which ranks the writer waits for.

    Raises:
        ConfigError: the address can't be bound, or is a wildcard without keys.
    """

    def __init__(
        self,
        *,
        bind: str,
        security: str,
        ranks: tuple[int, ...],
        token: str,
        sizes: RingSizes,
        members: Membership,
    ) -> None:
        self.ranks = ranks
        self.holders: dict[int, Peer] = {}
        self._sizes = sizes
        self._members = members
        self._waiting: list[Peer] = []
        loop = Loop.enter()
        try:
            self.link = WriterLink(
                loop, bind=bind, security=security, ranks=ranks, token=token, sizes=sizes
            )
        except BaseException:
            loop.leave()
            raise
        loop.add(self.link)

    @property
    def endpoint(self) -> str:
        """Where readers connect."""
        return self.link.endpoint

    @property
    def port(self) -> int:
        """The port that is bound."""
        return self.link.port

    @property
    def keys(self) -> CurveKeys | None:
        """What readers need to connect; None with security "none"."""
        return self.link.keys

    @property
    def claimed(self) -> Event:
        """Set when a claim has come, or a peer has left, was lost or is at fault."""
        return self.link.claimed

    @property
    def failed_attempts(self) -> dict[int, FailedAttempt]:
        """What kept ranks from attaching."""
        return self.link.failed_attempts

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that no admitted reader holds, as far as is known."""
        attached = {
            peer.rank
            for peer in self.admitted()
            if peer.connection is not None and not self._members.has_left(peer.rank)
        }
        return tuple(rank for rank in self.ranks if rank not in attached)

    def admitted(self) -> Iterator[Peer]:
        """The peers that the writer waits for."""
        return (peer for peer in list(self.holders.values()) if peer.is_admitted)

    def is_dead(self, peer: Peer) -> bool:
        """
        Whether its connection was cut and it did not come back.

        Raises:
            ProtocolError: it does not keep to the protocol.
        """
        if peer.fault is not None:
            raise ProtocolError(f"rank {peer.rank} (pid {peer.pid}) {peer.fault}")
        return peer.state is State.LOST

    def failure_of(self, peer: Peer) -> str | None:
        """Why a peer that has left did so, or None if it did not say."""
        return peer.failure

    def vacate(self, rank: int) -> None:
        """End a rank's attachment, which has left or died; it may be claimed from now on."""
        # resumable: this is done again until the holder is out.
        self._members.strike(rank)
        peer = self.holders[rank]
        with self.link.lock:  # from here on nobody moves the rank's cursor
            peer.state = State.OVER
        self.holders.pop(rank)
        self._command(functools.partial(self.link.forget, peer, Kind.EVICTION))

    def serve(self) -> None:
        """Decide on the claims that have come; never waits."""
        link = self.link
        link.claimed.clear()
        while link.claims:
            self._waiting.append(link.claims[0])
            link.claims.popleft()
        if self._waiting:
            self._waiting = [peer for peer in self._waiting if not self._decide(peer)]

    def _decide(self, peer: Peer) -> bool:
        """Whether the claim is decided; else it waits until a death has been handled."""
        if peer.state is State.OVER or peer.is_admitted:
            return True
        holder = self.holders.get(peer.rank)
        if holder is not None and holder.is_admitted and self._members.has_left(peer.rank):
            self.vacate(peer.rank)
            holder = None
        if holder is None or holder is peer or holder.state is State.OVER:
            self._take_in(peer)
            return True
        if holder.connection is None or holder.heard_at <= peer.claimed_at:
            # It is cut off, or does not answer: nobody knows yet whether it lives.
            self._command(functools.partial(self.link.ask_for, holder, peer))
            return False
        text = f"rank {peer.rank} is held by process {holder.pid}, which is alive"
        self._command(functools.partial(self.link.forget, peer, Kind.REFUSAL, text))
        return True

    def _take_in(self, peer: Peer) -> None:
        # resumable: the reader's next HELLO leads here again.
        rank = peer.rank
        self.holders[rank] = peer
        if peer.seat is None:
            place = self._members.new_place(rank)
            start = self._members.admit(rank)
            place.begin(start)
            peer.seat = Seat(place, start)
        self._members.new_ranks.discard(rank)
        self._command(functools.partial(self.link.start, peer))
        peer.is_admitted = True

    def has_room(self, file_bytes: int) -> bool:
        """Whether a message in a file of this size may follow those that are on their way."""
        on_their_way = sum(list(self.link.filed.values()))
        return not on_their_way or on_their_way + file_bytes <= self._sizes.arena_bytes

    def publish(
        self, number: int, stream: memoryview, buffers: list[memoryview], file_bytes: int = 0
    ) -> None:
        """
        Send a message that was published; its memory stays as it is until it is released.

        Raises:
            ShmcastError: nobody sends any more, since that failed.
        """
        link = self.link
        if file_bytes:
            link.filed[number] = file_bytes
        message = Message(stream, buffers)
        if link.is_done:
            raise ShmcastError(
                f"message {number} was published, but not sent to other hosts: this end's "
                f"connections are closed"
            )
        if not link.loop.runs_here:  # else it may be anywhere in the link
            with link.lock:
                if not (link.commands or link.is_done):
                    link.publish(number, message)
                    return
        self._command(functools.partial(link.publish, number, message))  # after what was asked for

    def leave_to_thread(self) -> None:
        """Let the acknowledgements be taken while this end waits for them."""
        self.link.leave_to_thread()

    def close(self, failure: str | None = None) -> None:
        """
        Tell every reader that nothing follows; the I/O thread goes on until all have heard.

        Args:
            failure: why, if this end failed; they are told when they have read everything.
        """
        link = self.link
        if sys.is_finalizing():  # the thread is gone, and a lock may have gone with its owner
            return
        if not link.is_closing:
            self._command(functools.partial(link.begin_closing, (failure or "").encode()))
            link.is_closing = True
        if link.is_done:
            link.claimed.close()
        if link.loop.is_exiting and not link.loop.runs_here:
            link.loop.wait_until_settled(link)

    def _command(self, command: Callable[[], object]) -> None:
        self.link.commands.append(command)
        self.link.ask()
