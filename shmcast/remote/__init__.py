"""
Frames over ZeroMQ: how messages reach readers on other hosts. Pickle is not known here.

The writer has a ROUTER socket, each reader a DEALER. A connection may be cut at any time; the
attachment, which its session names, goes on over the next one::

    reader                                      writer
      HELLO session, token                  →     wait for its end to decide
                                            ←   ADMISSION the first message's number
                                            ←   MESSAGE number, stream, buffers
      ACK the next number to be taken       →     the messages below it are released
      RESUME the next number to arrive      →     after a cut: go on from there
                                            ←   CLOSING how many messages there are
      DONE that number                      →     all of them have arrived
      LEAVE                                 →     do not wait for this reader any more
                                            ←   EVICTION it is not; or a lost one has come back
      VIA the session of another reader     →     send what follows to that one alone
      ENDING                               ←→     this process ends; what a cut means then
      BEAT                                 ←→     every second
                                            ←   REPEAT what was said: a signal made it be lost

To the ring a remote rank is a reader like any other: the writer's link holds its place there and
moves its cursor when the messages are acknowledged and ZeroMQ has let go of their memory. So the
ring is the window, a full one makes the writer wait, and nothing is copied on the way.

Of the readers on one host the first is the relay: it puts what it receives into a ring of the host,
from which the others take it. Each of them keeps its own connection for everything else, so nothing
depends on the relay: who finds it gone, or is too slow for its ring, resumes and gets the messages
themselves from the writer, which keeps them until each reader has acknowledged them.

A connection that ends is no death: the reader connects again. Lost is who can't be reached, or does
not come back, within 5 s in which the I/O thread ran; who is connected but silent is stalled, and
is waited for, as one on this host would be.

Who calls, drives its end's sockets, under the lock of their link: `writer` and `reader` are the
ends, `writer_link` and `reader_link` their sockets, `ring` what has arrived. The one thread of
`loop` minds the links that nobody is minding.
"""

from shmcast.remote.frames import RingSizes
from shmcast.remote.reader import RemoteReader
from shmcast.remote.ring import Arrived, Relay, Relayed, RemoteRing
from shmcast.remote.writer import RemoteWriter
from shmcast.remote.writer_link import CurveKeys, Peer

__all__ = [
    "Arrived",
    "CurveKeys",
    "Peer",
    "Relay",
    "Relayed",
    "RemoteReader",
    "RemoteRing",
    "RemoteWriter",
    "RingSizes",
]
