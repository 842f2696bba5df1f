"""The errors: what they are caught as, what they carry, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle
import queue

import pytest

import shmcast
from shmcast import (
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

TEXT = "rank 3 (pid 4711) is 12 messages behind, last seen 61 s ago"
WITH_RANKS = [ReaderLost, QueueFull, QueueNotReady]
ALL = [
    ShmcastError,
    AuthenticationError,
    ConfigError,
    MessageTooLarge,
    ProtocolError,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    WriterFailed,
    WriterLost,
]
PARENTS = [
    (ConfigError, ValueError),
    (QueueClosed, EOFError),
    (QueueFull, TimeoutError),
    (QueueFull, queue.Full),
    (QueueEmpty, TimeoutError),
    (QueueEmpty, queue.Empty),
    (QueueNotReady, TimeoutError),
    (WriterFailed, WriterLost),
]


def test_every_error_is_exported() -> None:
    """What `shmcast` exports as errors is this list and nothing else."""
    exported = {
        value
        for name in shmcast.__all__
        if isinstance(value := getattr(shmcast, name), type) and issubclass(value, BaseException)
    }
    assert set(ALL) == exported


@pytest.mark.parametrize("error", ALL)
def test_one_base_catches_all(error: type[ShmcastError]) -> None:
    """Every error is caught by `except ShmcastError`."""
    with pytest.raises(ShmcastError):
        raise error(TEXT)


@pytest.mark.parametrize(("error", "parent"), PARENTS)
def test_a_wider_error_catches(error: type[ShmcastError], parent: type[Exception]) -> None:
    """An error is also caught as the builtin, or the wider one of ours, that means the same."""
    with pytest.raises(parent):
        raise error(TEXT)


@pytest.mark.parametrize(
    "error", [ReaderLost, WriterFailed, WriterLost, ProtocolError, AuthenticationError]
)
def test_death_is_neither_an_end_nor_a_timeout(error: type[ShmcastError]) -> None:
    """Closed, late and dead are told apart: a loss is no EOFError, no timeout, no full queue."""
    assert not issubclass(error, EOFError | OSError | ValueError | queue.Full | queue.Empty)


@pytest.mark.parametrize(("late", "other"), [(QueueFull, QueueEmpty), (QueueEmpty, QueueFull)])
def test_the_timeouts_are_told_apart(late: type[Exception], other: type[Exception]) -> None:
    """A full queue is not caught as an empty one, nor the other way round."""
    assert not issubclass(late, other)
    assert not issubclass(late, queue.Empty if late is QueueFull else queue.Full)


@pytest.mark.parametrize("error", ALL)
def test_the_text_is_what_is_shown(error: type[ShmcastError]) -> None:
    """`str` of an error is its text alone, also where the parent is an OSError."""
    assert TEXT == str(error(TEXT))


@pytest.mark.parametrize("error", WITH_RANKS)
def test_ranks_are_a_tuple(error: type[ReaderLost | QueueFull | QueueNotReady]) -> None:
    """`ranks` is the tuple that was given, and () without one."""
    assert ((0, 7), ()) == (error(TEXT, (0, 7)).ranks, error(TEXT).ranks)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ALL)
def test_an_error_survives_pickling(error: type[ShmcastError], protocol: int) -> None:
    """A pickled error comes back with its type and text."""
    back = pickle.loads(pickle.dumps(error(TEXT), protocol))
    assert (error, TEXT) == (type(back), str(back))


@pytest.mark.parametrize("error", WITH_RANKS)
@pytest.mark.parametrize(
    "travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy]
)
def test_ranks_survive_pickling_and_copying(travel, error) -> None:  # type: ignore[no-untyped-def]
    """`ranks` comes back from pickle and copy."""
    back = travel(error(TEXT, (1, 3)))
    assert (error, TEXT, (1, 3)) == (type(back), str(back), back.ranks)
