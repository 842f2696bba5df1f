"""
The errors that shmcast itself raises.

Exceptions from the caller's own pickling or loading pass through unchanged; a tensor that torch
cannot pickle is a `TypeError`.
"""

from __future__ import annotations

import queue

__all__ = [
    "AuthenticationError",
    "ConfigError",
    "MessageTooLarge",
    "ProtocolError",
    "QueueClosed",
    "QueueEmpty",
    "QueueFull",
    "QueueNotReady",
    "ReaderLost",
    "ShmcastError",
    "WriterFailed",
    "WriterLost",
    "is_foreign",
]


class ShmcastError(Exception):
    """The base of all errors here; by itself, a call that this end cannot serve right now."""


class ConfigError(ShmcastError, ValueError):
    """A setting is not allowed; the text names its origin, the key, the value and the rule."""


class QueueClosed(ShmcastError, EOFError):
    """This end was closed, or the writer closed and everything it published has been read."""


class _NamesRanks(ShmcastError):
    def __init__(self, text: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.ranks)


class ReaderLost(_NamesRanks):
    """
    Readers died or failed, or nobody is left to publish to. The message was not published.

    Attributes:
        ranks: the ranks that were lost.
    """


class WriterLost(ShmcastError):
    """The writer died, or there is none; everything it published has been read."""


class WriterFailed(WriterLost):
    """
    The writer closed with an error, whose type and text are in this one's text.

    Everything that it published has been read; what it would have published is missing.
    """


class ProtocolError(ShmcastError):
    """
    The other side violates the protocol.

    Not a shmcast peer, an incompatible version, damaged memory, a rank that is taken, or an
    attachment that is no longer valid.
    """


class AuthenticationError(ShmcastError):
    """The other side could not authenticate itself."""


class MessageTooLarge(ShmcastError):
    """Memory for this message cannot be reserved. Nothing was published."""


class QueueFull(_NamesRanks, TimeoutError, queue.Full):
    """
    The message could not be published in time, and was not; or not everything was read in time.

    Attributes:
        ranks: the ranks that the writer was waiting for.
    """


class QueueEmpty(ShmcastError, TimeoutError, queue.Empty):
    """No message arrived in time. Nothing was lost."""


class QueueNotReady(_NamesRanks, TimeoutError):
    """
    Not every reader attached in time, or this one did not.

    Attributes:
        ranks: the ranks that are missing.
    """


def is_foreign(error: Exception) -> bool:
    """Whether it is a signal handler's, such as the TimeoutError of an alarm."""
    return (
        isinstance(error, OSError) and error.errno is None and not isinstance(error, ShmcastError)
    )
