"""
One queue for the ranks of a `torch.distributed` process group: each gets its end.

Every rank takes the same steps, and after each of them all exchange what came of it. So an error on
one rank is an error on all, and none is left waiting::

    the writer                              every other rank
      listens at a name drawn at random
                                              tries to connect to that name
      makes the queue, with the ranks that
      could as its local ones
                                              attaches with the queue's handle
      waits until all are ready               waits until it is admitted
"""

from __future__ import annotations

import contextlib
import ipaddress
import operator
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import attrs
import torch.distributed as dist

from shmcast.config import QueueConfig
from shmcast.control import peer_of
from shmcast.errors import ConfigError
from shmcast.handle import Handle
from shmcast.queue import MessageQueue, MessageReader

__all__ = ["READY_S", "create_from_process_group"]

#: How long the ends wait for each other, once all ranks have made the call.
READY_S: Final = 60.0

_Result = TypeVar("_Result")


def create_from_process_group(
    group: dist.ProcessGroup | None, config: QueueConfig | None, writer_rank: int
) -> MessageQueue | MessageReader:
    """See `MessageQueue.create_from_process_group`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConfigError("this process is not in the process group")
    is_writer = rank == writer_rank
    end: MessageQueue | MessageReader

    def create() -> Handle | None:
        nonlocal end
        if not is_writer:
            return None
        end = undo.enter_context(MessageQueue(_fitted(config, size - 1, local_ranks)))
        return end.export_handle()

    def attach() -> None:
        nonlocal end
        if not is_writer:
            assert handle is not None
            reader_rank = rank - (rank > writer_rank)
            end = undo.enter_context(MessageQueue.create_from_handle(handle, reader_rank))

    with contextlib.ExitStack() as undo, contextlib.ExitStack() as doors:
        openings = _together(group, lambda: _open(doors, rank, size, writer_rank))
        asked_ranks = [asked for asked, _ in openings]
        if len({*asked_ranks}) > 1:
            raise ConfigError(f"the group's ranks disagree on writer_rank: {asked_ranks}")
        _, name = openings[writer_rank]
        are_near = _together(group, lambda: is_writer or _is_near(name))
        del are_near[writer_rank]
        local_ranks = tuple(reader for reader, is_near in enumerate(are_near) if is_near)
        handle = _together(group, create)[writer_rank]
        _together(group, attach)
        _together(group, lambda: end.wait_until_ready(READY_S))
        undo.pop_all()
        return end


def _together(group: dist.ProcessGroup | None, step: Callable[[], _Result]) -> list[_Result]:
    """
    Take a step that every rank of the group takes; what it returned on each.

    Raises:
        Exception: what the step raised, here or else on the first rank where it did.
    """
    outcome: _Result | Exception
    try:
        outcome = step()
    except Exception as error:
        outcome = error
    outcomes: list[_Result | Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    if isinstance(outcome, Exception):
        raise outcome
    for rank, other in enumerate(outcomes):
        if isinstance(other, Exception):
            other.add_note(f"raised on rank {rank} of the process group")
            raise other
    return outcomes  # type: ignore[return-value]  # each has been replaced


def _open(doors: contextlib.ExitStack, rank: int, size: int, writer_rank: int) -> tuple[int, str]:
    """The writer that this rank was asked for, and the name at which it listens if it is that."""
    if size < 2:
        raise ConfigError("a process group of one rank has no readers; allowed are two or more")
    if not 0 <= writer_rank < size:
        raise ConfigError(
            f"writer_rank = {writer_rank!r} is not allowed; allowed is a rank of the group, "
            f"from 0 to {size - 1}"
        )
    name = f"shmcast-{secrets.token_hex(16)}"
    if rank == writer_rank:
        door = doors.enter_context(_new_socket())
        door.bind("\0" + name)
        door.listen(size)  # nobody accepts: to be connected is all there is to it
    return operator.index(writer_rank), name


def _is_near(name: str) -> bool:
    """
    Whether the writer can be reached through a control socket, and is the same user's.

    The name exists in one network namespace of one kernel, so nothing else needs to be compared.
    """
    with _new_socket() as probe:
        try:
            probe.connect("\0" + name)
        except OSError:
            return False
        _, uid = peer_of(probe)
    return uid == os.geteuid()


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def _fitted(config: QueueConfig | None, n_readers: int, local_ranks: Sequence[int]) -> QueueConfig:
    """The settings with what the group decides."""
    config = QueueConfig() if config is None else config
    if not isinstance(config, QueueConfig):
        raise TypeError(f"config = {config!r} is not allowed; allowed is a QueueConfig or None")
    if config.n_readers not in (1, n_readers):  # 1 is the default
        raise ConfigError(
            f"n_readers = {config.n_readers} is not allowed; allowed is what the process group "
            f"has besides the writer, {n_readers}, or nothing"
        )
    if config.local_reader_ranks is not None and {*config.local_reader_ranks} != {*local_ranks}:
        raise ConfigError(
            f"local_reader_ranks = {config.local_reader_ranks} is not allowed; allowed are the "
            f"ranks that are found on the writer's host, {tuple(local_ranks)}, or nothing"
        )
    bind = config.bind
    if bind is None and len(local_ranks) < n_readers:
        bind = _reachable_address(sorted({*range(n_readers)} - {*local_ranks}))
    return attrs.evolve(config, n_readers=n_readers, local_reader_ranks=local_ranks, bind=bind)


def _reachable_address(remote_ranks: Sequence[int]) -> str:
    """A free port at this host's address on the way to MASTER_ADDR, which other hosts reach too."""
    master = os.environ.get("MASTER_ADDR")
    refusal = (
        f"bind = None is not allowed; allowed is an address for the readers {remote_ranks} on "
        f"other hosts, since MASTER_ADDR = {master!r}"
    )
    if not master:
        raise ConfigError(f"{refusal} does not lead to one")
    try:
        family, kind, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # which sends nothing
            address = str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{refusal} does not lead to one: {error}") from error
    if ipaddress.ip_address(address).is_loopback:
        raise ConfigError(f"{refusal} leads to {address}, which they can't reach")
    return f"tcp://[{address}]:0" if family == socket.AF_INET6 else f"tcp://{address}:0"
