"""
Processes that are killed at a given instruction or system call, and what the others then see.

It imports as little as it can: a process that forks a thousand victims should be small.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import multiprocessing
import os
import platform
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from pickle import PickleBuffer
from typing import Any, Final

import shmcast._ring as core
import shmcast.door
from shmcast import MessageQueue, MessageReader, QueueConfig, QueueNotReady, WriterLost

PATIENCE_S: Final = 30.0

#: For each processor: a breakpoint, and where the registers have the instruction pointer.
PROCESSORS: Final = {"x86_64": (b"\xcc", 16), "aarch64": (b"\x00\x00\x20\xd4", 32)}
TRACEME, CONT, SINGLESTEP, SYSCALL, GETREGSET, SETREGSET = 0, 7, 9, 24, 0x4204, 0x4205
PRSTATUS: Final = 1

BLOCK_BYTES: Final = 65536
NEVER_NS: Final = 10**15

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
libc.ptrace.restype = ctypes.c_long


class Registers(ctypes.Structure):
    """Room for all registers, with the iovec that tells the kernel where it is."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("n_bytes", ctypes.c_size_t),
        ("values", ctypes.c_uint64 * 64),
    )


def ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> None:
    if libc.ptrace(request, pid, address, data) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def pause() -> None:
    """In a victim: where its tracing begins and ends."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Victim:
    """A forked process that is traced, once it has run up to its first `pause`."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self.breakpoint, self.pointer_index = PROCESSORS[platform.machine()]
        self.pid = os.fork()
        if not self.pid:
            try:
                ptrace(TRACEME, 0)
                function(*arguments)
            finally:
                os._exit(1)

    def wait(self, meanwhile: Callable[[], None] | None = None) -> int:
        """Wait for its next stop; the signal that stopped it."""
        status = 0
        while not status:
            pid, status = os.waitpid(self.pid, 0 if meanwhile is None else os.WNOHANG)
            if not pid and meanwhile is not None:
                meanwhile()
        assert os.WIFSTOPPED(status), status
        return os.WSTOPSIG(status)

    def go_on(self, request: int, meanwhile: Callable[[], None] | None = None) -> bool:
        """Let it go on to its next stop. False if that is its second `pause`."""
        ptrace(request, self.pid)
        number = self.wait(meanwhile)
        assert number in (signal.SIGTRAP, signal.SIGSTOP), number
        return number == signal.SIGTRAP

    def registers(self) -> Registers:
        registers = Registers(n_bytes=ctypes.sizeof(ctypes.c_uint64 * 64))
        registers.address = ctypes.addressof(registers) + Registers.values.offset
        ptrace(GETREGSET, self.pid, PRSTATUS, ctypes.addressof(registers))
        return registers

    def instructions(self) -> list[int]:
        """Step to the second `pause`; the addresses of the core's instructions on the way."""
        path, within = core.__file__, range(0)
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split()
            if fields[-1] == path and "x" in fields[1]:
                within = range(*(int(address, 16) for address in fields[0].split("-")))
        found = []
        while self.go_on(SINGLESTEP):
            address = self.registers().values[self.pointer_index]
            if address in within:
                found.append(address)
        return found

    def run_to(self, address: int, n_passes: int) -> bool:
        """Run to an instruction, after it was passed some times. False if this run has it not."""
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            original = os.pread(memory.fileno(), len(self.breakpoint), address)
            for _ in range(n_passes):
                os.pwrite(memory.fileno(), self.breakpoint, address)
                if not self.go_on(CONT):
                    return False
                os.pwrite(memory.fileno(), original, address)
                registers = self.registers()
                registers.values[self.pointer_index] = address
                ptrace(SETREGSET, self.pid, PRSTATUS, ctypes.addressof(registers))
                assert self.go_on(SINGLESTEP)
            os.pwrite(memory.fileno(), self.breakpoint, address)
        return self.go_on(CONT)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def may_trace() -> bool:
    """Whether this processor is known, and the kernel lets a process trace its child."""
    if platform.machine() not in PROCESSORS:
        return False
    pid = os.fork()
    if not pid:
        os._exit(libc.ptrace(TRACEME, 0, 0, 0) != 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# --- what is killed, and what the others then see -------------------------------------------------


def new_queue(n_readers: int, n_chunks: int) -> MessageQueue:
    """A queue whose arena has room for few blocks, so that a block that is lost is missed."""
    return MessageQueue(
        QueueConfig(
            n_readers=n_readers,
            n_chunks=n_chunks,
            chunk_bytes=4096,
            oob_threshold_bytes=BLOCK_BYTES,
            arena_bytes=8 * BLOCK_BYTES,
            on_reader_loss="evict",
        )
    )


def wait_until_ready(queue: MessageQueue) -> None:
    """Wait by taking the writer's steps here: there may be no door thread."""
    while True:
        with contextlib.suppress(QueueNotReady):
            queue.wait_until_ready(0.001)
            return


def attach(queue: MessageQueue, reader: MessageReader) -> None:
    """Take the steps of both ends of a handshake."""
    while not reader._step():
        queue._writer.survey()
        queue._writer.log_lost()


def message(number: int, *, in_block: bool) -> Any:
    """A message that lies in a block of the arena or in its chunk, and tells its number."""
    size_bytes = BLOCK_BYTES if in_block else 1000
    content = bytearray([number % 256]) * size_bytes
    return PickleBuffer(content) if in_block else bytes(content)


class WriterScenario:
    """A writer is killed while it publishes, and its reader gets all that was published."""

    def __init__(self, *, in_block: bool) -> None:
        self.in_block = in_block
        self.pipe, self.victims_pipe = multiprocessing.Pipe()

    def start(self) -> Victim:
        victim = Victim(self.publish)
        self.reader = MessageQueue.create_from_handle(self.pipe.recv(), 0)
        self.check(0)
        victim.wait()
        return victim

    def check(self, number: int) -> None:
        received = self.reader.dequeue(PATIENCE_S)
        assert bytes(message(number, in_block=self.in_block)) == bytes(received)

    def publish(self) -> None:
        queue = new_queue(1, 1)
        self.victims_pipe.send(queue.export_handle())
        wait_until_ready(queue)
        queue.enqueue(message(0, in_block=self.in_block))
        # What it does between messages is not traced here.
        queue._writer.ring.look_again_in(NEVER_NS)
        pause()
        queue.enqueue(message(1, in_block=self.in_block))
        pause()

    def finish(self) -> int:
        """How many messages come before the loss is reported."""
        count = 0
        with self.reader, contextlib.suppress(WriterLost):
            while True:
                self.check(1 + count)
                count += 1
        return count

    def close(self) -> None:
        pass


class ReaderScenario:
    """The reader of rank 0 is killed; the writer, rank 1 and the rank's next reader go on."""

    def __init__(self, action: str, *, in_block: bool) -> None:
        self.action, self.in_block = action, in_block
        self.number = 0
        self.queue = new_queue(2, 2)
        self.handle = self.queue.export_handle()
        self.other = MessageQueue.create_from_handle(self.handle, 1)
        attach(self.queue, self.other)

    def start(self) -> Victim:
        victim = Victim(self.read)
        if self.action != "attach":
            wait_until_ready(self.queue)
            self.publish(2, [self.other])
        victim.wait()
        self.n_given_up = self.count_given_up()
        return victim

    def count_given_up(self) -> int:
        """How many blocks the rank has given up, and the writer has not reclaimed."""
        return sum(rank == 0 for _, rank in self.queue._writer.ring.given_up_holds())

    def read(self) -> None:
        if self.action == "attach":
            pause()
        reader = MessageQueue.create_from_handle(self.handle, 0)
        reader.wait_until_ready(PATIENCE_S)
        if self.action == "attach":
            pause()
        received = [reader.dequeue(PATIENCE_S)]
        pause()
        if self.action == "take":
            received.append(reader.dequeue(PATIENCE_S))
        elif self.action == "give up":
            received.clear()
        elif self.action == "leave":
            reader._source.ring.leave()
        else:
            reader.close()
        pause()

    def serve(self) -> None:
        """Take the writer's steps of a handshake."""
        with contextlib.suppress(QueueNotReady):
            self.queue.wait_until_ready(0.001)

    def publish(self, count: int, readers: list[MessageReader]) -> None:
        for _ in range(count):
            self.queue.enqueue(message(self.number, in_block=self.in_block), PATIENCE_S)
            for reader in readers:
                expected = message(self.number, in_block=self.in_block)
                assert bytes(expected) == bytes(reader.dequeue(PATIENCE_S))
            self.number += 1

    def finish(self) -> int:
        """Whether the writer sees that it was done; then that everybody goes on."""
        outcome = {
            "take": 1 - self.queue.stats().lag[0],
            "give up": self.count_given_up() - self.n_given_up,
            "leave": int(self.queue._writer.ring.has_left(0)),
        }
        with MessageQueue.create_from_handle(self.handle, 0) as again:
            attach(self.queue, again)
            self.publish(3, [self.other, again])  # more than there are chunks
        return outcome.get(self.action, 0)

    def close(self) -> None:
        """See that no block was lost on the way."""
        assert self.queue.stats().fallbacks == 0
        self.other.close()
        self.queue.close()


Scenario = WriterScenario | ReaderScenario


def kill_at_each_instruction(pipe: Connection, new_scenario: Callable[[], Scenario]) -> None:
    """Report what was seen after a kill before each instruction of the core, and after the last."""
    logging.disable()
    # The door thread of a victim is not traced, and would meet the breakpoints.
    shmcast.door.Watch.watch = lambda *_: None  # type: ignore[method-assign]
    scenario = new_scenario()
    whole = scenario.start()
    addresses = whole.instructions()
    whole.kill()
    last = scenario.finish()
    outcomes, n_passes = [], collections.Counter[int]()
    for address in addresses:
        victim = scenario.start()
        is_there = victim.run_to(address, n_passes[address])
        victim.kill()
        n_passes[address] += 1
        outcome = scenario.finish()
        if is_there:  # or it took another way, since its block has another number
            outcomes.append(outcome)
    scenario.close()
    pipe.send([*outcomes, last])


def kill_at_each_system_call(pipe: Connection, action: str) -> None:
    """Report how many stops there were: before and after each system call."""
    logging.disable()
    scenario = ReaderScenario(action, in_block=True)
    n_stops, is_over = 0, False
    while not is_over:
        victim = scenario.start()
        stops = (victim.go_on(SYSCALL, scenario.serve) for _ in range(n_stops + 1))
        is_over = not all(stops)
        victim.kill()
        scenario.finish()
        n_stops += 1
    scenario.close()
    pipe.send(n_stops - 1)
