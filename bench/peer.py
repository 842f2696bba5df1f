"""
What the other process of a benchmark does.

It is a script: the first line of its input is a JSON object with the role and its arguments, and
the first line of its output is the handle of the queue that it answers through. Its parent ends it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import signal
import sys
import time
import zlib
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from shmcast import Handle, MessageQueue, MessageReader, QueueConfig

PATIENCE_S = 60.0

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.argtypes = [
    ctypes.c_long,  # the number of the call
    ctypes.c_void_p,  # the word
    ctypes.c_int,  # the operation
    ctypes.c_uint32,  # the value expected, or how many to wake
    ctypes.c_void_p,  # no timeout
]


class _Direction(ctypes.Structure):
    """What one side stores and the other one sleeps on: two cache lines of its own."""

    _fields_ = [
        ("sent_ns", ctypes.c_int64),
        ("answer_ns", ctypes.c_int64),
        ("word", ctypes.c_uint32),
        ("unused", ctypes.c_char * 108),
    ]


class BareFutex:
    """
    A hand-over of two numbers between two processes by nothing but a word and `futex`.

    Args:
        descriptor: a memory file of a page that both processes have.
        side: 0 or 1; each process is one.
    """

    def __init__(self, descriptor: int, side: int) -> None:
        both = (_Direction * 2).from_buffer(mmap.mmap(descriptor, mmap.PAGESIZE))
        self._out, self._in = both[side], both[1 - side]
        self._out_address = ctypes.addressof(self._out) + _Direction.word.offset
        self._in_address = ctypes.addressof(self._in) + _Direction.word.offset
        self._number = _SYS_FUTEX[platform.machine()]
        self._seen = 0

    def send(self, answer_ns: int) -> None:
        """Wake the other side."""
        self._out.answer_ns = answer_ns
        self._out.sent_ns = time.perf_counter_ns()
        self._out.word += 1  # no atomic addition: this side alone stores it
        _syscall(self._number, self._out_address, _FUTEX_WAKE, 1, None)

    def receive(self) -> tuple[int, int]:
        """Sleep until the other side sends; how many ns ago that was, and its `answer_ns`."""
        while self._in.word == self._seen:
            _syscall(self._number, self._in_address, _FUTEX_WAIT, self._seen, None)
        taken_ns = time.perf_counter_ns() - self._in.sent_ns
        self._seen += 1
        return taken_ns, self._in.answer_ns


def _say(line: str) -> None:
    print(line, flush=True)


def _ends(handle: str, rank: int, settings: dict[str, Any]) -> tuple[MessageReader, MessageQueue]:
    reader = MessageQueue.create_from_handle(Handle.from_json(handle), rank)
    writer = MessageQueue(QueueConfig(**settings))
    _say(writer.export_handle().to_json())
    writer.wait_until_ready(PATIENCE_S)
    return reader, writer


def echo(handle: str, rank: int, settings: dict[str, Any]) -> None:
    """Send every message back."""
    reader, writer = _ends(handle, rank, settings)
    for message in reader:
        writer.enqueue(message)


def echo_by_pipe(descriptor: int) -> None:
    """The same by a pipe of `multiprocessing`."""
    pipe = Connection(descriptor)
    _say("ready")
    while True:
        pipe.send(pipe.recv())


def be_busy() -> None:
    """Compute for ever."""
    _say("ready")
    while True:
        pass


def touch(handle: str, rank: int, settings: dict[str, Any]) -> None:
    """
    Answer with when a tensor came and when a byte of each page was read; then with its checksum.

    It may be a dict of tensors too. The checksum is answered to the next message, when all readers
    have answered, and the tensors are dropped before. Times are those of `perf_counter_ns`, which
    is one clock for all processes.
    """
    import torch

    torch.set_num_threads(1)
    reader, writer = _ends(handle, rank, settings)
    for message in reader:
        came_ns = time.perf_counter_ns()
        tensors = list(message.values()) if isinstance(message, dict) else [message]
        for tensor in tensors:
            touch_pages(tensor)
        writer.enqueue((came_ns, time.perf_counter_ns()))
        reader.dequeue()
        checksum = checksum_of(tensors)
        del message, tensor, tensors
        writer.enqueue(checksum)


def touch_pages(tensor: Any) -> None:
    """Read a byte of every page of a contiguous tensor."""
    import torch

    address, n_bytes = tensor.data_ptr(), tensor.nbytes
    if n_bytes > 16 * mmap.PAGESIZE:
        int(tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum())
        address, n_bytes = address + n_bytes - 1, 1
    # torch would take longer for a small tensor than its copy does.
    for offset in (*range(0, n_bytes, mmap.PAGESIZE), n_bytes - 1):
        ctypes.string_at(address + offset, 1)


def say_size(handle: str, rank: int, settings: dict[str, Any]) -> None:
    """Answer a tensor with its size, when a byte of each page was read and it was dropped."""
    import torch

    torch.set_num_threads(1)
    reader, writer = _ends(handle, rank, settings)
    for tensor in reader:
        size_bytes = tensor.nbytes
        int(tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum())
        del tensor
        writer.enqueue(size_bytes)


def checksum_of(tensors: Iterable[Any]) -> int:
    """A checksum of what contiguous tensors hold, one after another."""
    import torch

    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy(), checksum)
    return checksum


def answer_late(handle: str, rank: int, settings: dict[str, Any], pause_s: float) -> None:
    """Answer every time that is sent with how long it took and, after the pause, the time."""
    reader, writer = _ends(handle, rank, settings)
    for sent_ns in reader:
        taken_ns = time.perf_counter_ns() - sent_ns
        time.sleep(pause_s)
        writer.enqueue((taken_ns, time.perf_counter_ns()))


def answer_late_bare(descriptor: int, pause_s: float) -> None:
    """The same by a bare futex."""
    bare = BareFutex(descriptor, 1)
    _say("ready")
    while True:
        taken_ns, _ = bare.receive()
        time.sleep(pause_s)
        bare.send(taken_ns)


def raw_zmq(forth: str, back: str, keys: list[str]) -> None:
    """Bare PUSH and PULL: send small messages back; touch the pages of large ones, say the size."""
    import pickle

    import torch
    import zmq

    torch.set_num_threads(1)
    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, address in ((pull, forth), (push, back)):
        if keys:
            server, public, secret = (key.encode() for key in keys)
            socket.curve_serverkey, socket.curve_publickey = server, public
            socket.curve_secretkey = secret
        socket.connect(address)
    _say("ready")
    while True:
        frame = pull.recv(copy=False)
        if len(frame) < 1 << 20:
            push.send(pickle.dumps(pickle.loads(frame.buffer), protocol=5), copy=False)
            continue
        tensor = torch.frombuffer(frame.buffer, dtype=torch.uint8)
        size_bytes = tensor.nbytes
        int(tensor[:: mmap.PAGESIZE].sum())
        del tensor, frame
        push.send(pickle.dumps(size_bytes, protocol=5), copy=False)


if __name__ == "__main__":
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a bare futex does not notice a dead parent
    arguments = json.loads(sys.stdin.readline())
    functions = (
        echo,
        echo_by_pipe,
        be_busy,
        touch,
        say_size,
        answer_late,
        answer_late_bare,
        raw_zmq,
    )
    roles = {role.__name__: role for role in functions}
    roles[arguments.pop("role")](**arguments)
