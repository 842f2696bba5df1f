"""
Every error that shmcast raises on its own account.

What the caller's own pickling or loading raises passes through unchanged, and a tensor that torch
itself cannot carry is a `TypeError`.
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
]


class ShmcastError(Exception):
    """The base of all errors here; by itself, a call that this end cannot take at this moment."""


class ConfigError(ShmcastError, ValueError):
    """A setting that is not allowed; the text names its origin, the key, the value and the rule."""


class QueueClosed(ShmcastError, EOFError):
    """This end was closed, or the writer closed and everything that it published has been read."""


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
    """The writer died, or none is there; everything that it published has been read."""


class WriterFailed(WriterLost):
    """
    The writer closed with an error, whose type and text are in this one's text.

    Everything that it published has been read; what it would have published is missing.
    """


class ProtocolError(ShmcastError):
    """
    The other side does not keep to the protocol.

    It is no shmcast peer or another version, its memory is damaged, the rank is taken, or an
    attachment is no longer valid.
    """


class AuthenticationError(ShmcastError):
    """The other side did not prove that it may take part."""


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
    The handshake did not end in time.

    Attributes:
        ranks: the ranks that are missing.
    """
