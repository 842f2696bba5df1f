"""How long the ends of other hosts wait for what. A test makes its own."""

from __future__ import annotations

import attrs

__all__ = ["Timing"]


@attrs.frozen(kw_only=True)
class Timing:
    """
    Times in seconds of which the I/O thread ran: what it slept through is nobody's silence.

    Attributes:
        resume_s: how long an end whose connection was cut is waited for.
        beat_s: how often a connection is tried, and a greeting without an answer repeated.
        greeting_s: how long ZeroMQ's own handshake may take.
        connect_s: how long a TCP connection may take; before Linux 6.5 the kernel's second and
            third try come too late to be back in `resume_s`.
        retry_s: between two tries to connect.
        linger_s: how long a closed end goes on without any progress until it is heard by all.
        goodbye_s: how long a reader that leaves waits for the writer's answer.
        ack_s: how long an acknowledgement waits for the next one.
        tracker_s: when to ask again whether ZeroMQ has let go of a message's memory.
        owner_s: how long a link is left to its owner after a call of that.
        driving_s: how long after the last message a wait drives the socket itself.
        storm_s: how often cuts, which anybody can make, have all connections tried.
        vain_cuts: how many connections may end, one after the other, over which a message was due
            and none arrived.
    """

    resume_s: float = 5.0
    beat_s: float = 1.0
    greeting_s: float = 5.0
    connect_s: float = 1.0
    retry_s: float = 0.05
    linger_s: float = 10.0
    goodbye_s: float = 1.0
    ack_s: float = 0.005
    tracker_s: float = 0.001
    owner_s: float = 0.005
    driving_s: float = 1.0
    storm_s: float = 0.05
    vain_cuts: int = 40
