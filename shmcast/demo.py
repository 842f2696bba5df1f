"""
The demo: broadcast to reader processes, which check every byte that arrives.

Each reader makes the message that it expects by itself, from the seed or from the files, and
compares bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import random
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from shmcast.config import DEFAULT_OOB_THRESHOLD_BYTES, GIB, MIB, QueueConfig
from shmcast.errors import QueueClosed, QueueNotReady, ShmcastError, WriterLost
from shmcast.handle import Handle
from shmcast.queue import MessageQueue, MessageReader

if TYPE_CHECKING:
    import torch

__all__ = ["Failure", "InputError", "Plan", "Sent", "run", "show"]

_LARGE_EVERY: Final = 100  # one message of so many carries a large tensor
_EMBEDS_SHAPE: Final = (8192, 3840)  # 60 MiB of bfloat16
_LARGE_BYTES: Final = DEFAULT_OOB_THRESHOLD_BYTES  # what the table calls a large message

# Hang limits: many readers import torch at once, and a reader may compare gigabytes.
_START_S: Final = 120.0
_ANSWER_S: Final = 60.0

_START_SLICE_S: Final = 0.1  # how often to check whether a reader that starts has ended
_PROGRESS_EVERY_S: Final = 0.2


def run(config: QueueConfig, plan: Plan) -> list[Sent]:
    """
    Broadcast to readers in processes of their own, and have them check everything.

    Raises:
        InputError: a file can't be read, or holds no tensor.
        Failure: something did not arrive as it should.
    """
    _import_torch()
    make_message = plan.message_maker()
    with MessageQueue(config) as queue, _started_readers(queue, plan) as readers:
        return _broadcast(queue, readers, make_message, plan.n_messages)


def _import_torch() -> None:
    """Import torch. Without numpy it warns, which is no news to anybody who runs the demo."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch  # noqa: F401


# --- The messages -------------------------------------------------------------------------------

Message = dict[str, Any]


class InputError(ShmcastError):
    """A file that can't be broadcast."""


class Failure(ShmcastError):
    """Something did not arrive as it should."""


@attrs.frozen
class Plan:
    """
    What is broadcast. Every process makes the messages for itself from it.

    Attributes:
        seed: what messages are made from if there are no files.
        files: whose tensors are sent, in turn.
        n_messages: how many messages.
    """

    seed: int
    files: tuple[Path, ...]
    n_messages: int

    def message_maker(self) -> Callable[[int], Message]:
        """
        What makes message 0, 1, ….

        Raises:
            InputError: a file can't be read, or holds no tensor.
        """
        if not self.files:
            return functools.partial(_step_message, self.seed)
        contents = [(str(file), load_file(file)) for file in self.files]

        def make(index: int) -> Message:
            file, content = contents[index % len(contents)]
            return {"step": index, "file": file, "content": content}

        return make


def _step_message(seed: int, index: int) -> Message:
    """What an engine tells its workers in a step."""
    random_ = random.Random(f"{seed}/{index}")  # noqa: S311  # not for secrets
    message: Message = {
        "step": index,
        "request_ids": [
            f"request-{random_.getrandbits(64):016x}" for _ in range(random_.randint(1, 8))
        ],
        "token_ids": [random_.randrange(152_064) for _ in range(random_.randint(8, 64))],
        "temperature": random_.random(),
        "top_p": random_.random(),
        "is_prefill": random_.random() < 0.1,
        "has_logprobs": random_.random() < 0.5,
    }
    if index % _LARGE_EVERY == 0:
        message["prompt_embeds"] = _random_embeds(random_.getrandbits(63))
    return message


def _random_embeds(seed: int) -> torch.Tensor:
    """Random bits, so that not-a-numbers are among the values."""
    import torch

    n_words = _EMBEDS_SHAPE[0] * _EMBEDS_SHAPE[1] // 4
    bits = torch.empty(n_words, dtype=torch.int64)
    bits.random_(-(2**63), None, generator=torch.Generator().manual_seed(seed))
    return bits.view(torch.bfloat16).view(_EMBEDS_SHAPE)


def load_file(file: Path) -> Any:
    """
    The tensors of a file, in whatever structure it has.

    Raises:
        InputError: the file can't be read, or holds no tensors that can be compared.
    """
    load = _LOADERS.get(file.suffix.lower())
    if load is None:
        raise InputError(f"{file}: not one of {', '.join(_LOADERS)}")
    try:
        content = load(file)
        tensors = list(_tensors(content))
        unfit = next((tensor for tensor in tensors if not _is_comparable(tensor)), None)
    except Exception as error:  # a damaged file makes the loaders raise anything
        reason = str(error).partition("\n")[0].partition(". ")[0]  # without torch's advice
        raise InputError(f"{file}: can't be loaded: {type(error).__name__}: {reason}") from error
    if not tensors:
        raise InputError(f"{file}: holds no tensor")
    if unfit is not None:
        raise InputError(f"{file}: holds a tensor of {unfit.layout}, {unfit.device}, {unfit.dtype}")
    return content


def _load_torch(file: Path) -> Any:
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251  # runs no code


def _load_numpy(file: Path) -> Any:
    import numpy

    with file.open("rb") as stream:
        return numpy.lib.format.read_array(stream, allow_pickle=False)


def _load_safetensors(file: Path) -> Any:
    import safetensors.torch

    return safetensors.torch.load_file(file)


_LOADERS: Final[dict[str, Callable[[Path], Any]]] = {
    ".pt": _load_torch,
    ".pth": _load_torch,
    ".npy": _load_numpy,
    ".safetensors": _load_safetensors,
}


def _is_array(value: object) -> bool:
    """Whether it is a numpy array; without numpy there is none."""
    return isinstance(value, getattr(sys.modules.get("numpy"), "ndarray", ()))


def _tensors(value: object) -> Iterator[Any]:
    """Every tensor and array in there."""
    import torch

    if isinstance(value, torch.Tensor) or _is_array(value):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors(member)


def _is_comparable(tensor: Any) -> bool:
    """Whether its bits are a row of elements in this process's memory."""
    import torch

    return _is_array(tensor) or (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
    )


# --- Bit for bit --------------------------------------------------------------------------------


def difference(expected: Any, got: Any, where: str) -> str | None:
    """
    Where `got` first differs from `expected`, and how; None if it is the same bit for bit.

    Args:
        expected: a message, or something in it.
        got: what arrived.
        where: the name of both in the text.
    """
    import torch

    if type(got) is not type(expected):
        return f"{where} is of {type(got)} instead of {type(expected)}"
    if isinstance(expected, dict):
        if list(got) != list(expected):
            return f"{where} has other keys"
        members = [(f"{where}[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, list | tuple):
        if len(got) != len(expected):
            return f"{where} has {len(got)} members instead of {len(expected)}"
        pairs = zip(expected, got, strict=True)
        members = [(f"{where}[{index}]", *pair) for index, pair in enumerate(pairs)]
    elif isinstance(expected, torch.Tensor) or _is_array(expected):
        return _array_difference(expected, got, where)
    elif isinstance(expected, complex):
        members = [(where, expected.real, got.real), (where, expected.imag, got.imag)]
    elif isinstance(expected, float):
        if struct.pack("=d", got) != struct.pack("=d", expected):
            return f"{where} is {got!r} instead of {expected!r}, or other bits of it"
        return None
    else:
        return None if got == expected else f"{where} is {got!r} instead of {expected!r}"
    differences = (difference(*member[1:], member[0]) for member in members)
    return next((text for text in differences if text is not None), None)


def _array_difference(expected: Any, got: Any, where: str) -> str | None:
    """`difference` of two tensors or two arrays."""
    import torch

    for what in ("dtype", "shape", "requires_grad"):
        of_expected, of_got = getattr(expected, what, None), getattr(got, what, None)
        if of_got != of_expected:
            return f"{where} has {what} {of_got} instead of {of_expected}"
    order, order_got = _order(expected), _order(got)
    if order is not None and order_got != order:
        return f"{where} has the memory order {order_got} instead of {order}"
    if torch.equal(_bits(got), _bits(expected)):
        return None
    bytes_expected, bytes_got = _bits(expected).view(torch.uint8), _bits(got).view(torch.uint8)
    differs = (bytes_got != bytes_expected).nonzero()
    first = int(differs[0])
    return (
        f"{where} differs in {len(differs)} of {len(bytes_expected)} bytes, first in byte {first}: "
        f"{int(bytes_got[first]):#04x} instead of {int(bytes_expected[first]):#04x}"
    )


def _order(array: Any) -> Any:
    """How its elements lie in memory; None if with gaps or overlaps, without which it arrives."""
    import torch

    if not isinstance(array, torch.Tensor):
        return "F" if array.flags.fnc else "C"
    is_dense = torch.empty_like(array, device="meta").stride() == array.stride()
    return array.stride() if is_dense else None


def _bits(array: Any) -> torch.Tensor:
    """The elements in their logical order as integers of one dimension."""
    import torch

    if not isinstance(array, torch.Tensor):
        data = bytearray(array.tobytes())
        return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
    tensor: torch.Tensor = array.detach().resolve_conj().resolve_neg()
    if tensor.itemsize == 16:  # no integer has so many bytes
        tensor = torch.view_as_real(tensor)
    # Compared up to four times as fast as bytes.
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.view(integer).reshape(-1)


# --- The readers --------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """
    What a reader says about a message.

    Attributes:
        index: which message it is.
        taken_at: when `dequeue` had returned, by the clock that all processes of a host share.
        bytes: how many bytes all messages so far had.
        problem: what is wrong with it, or None if it is the same bit for bit.
    """

    index: int
    taken_at: float
    bytes: int
    problem: str | None


def run_reader(pipe: Connection, handle: Handle, rank: int, plan: Plan) -> None:
    """The life of a reader process."""
    _import_torch()  # here, or the first message would wait for it
    make_message = plan.message_maker()
    # These mean that the parent is gone or does not want any more: nobody is there to tell.
    with (
        contextlib.suppress(QueueClosed, WriterLost, BrokenPipeError),
        MessageQueue.create_from_handle(handle, rank) as reader,
    ):
        check_messages(reader, pipe.send, make_message, plan.n_messages)


def check_messages(
    reader: MessageReader,
    tell: Callable[[Answer], None],
    make_message: Callable[[int], Message],
    n_messages: int,
) -> None:
    """Take messages, compare and answer each of them, until one is wrong."""
    for index in range(n_messages):
        taken_at = 0.0
        try:
            got = reader.dequeue()
            taken_at = time.monotonic()
            problem = difference(make_message(index), got, f"message {index}")
            del got  # freeing it is not the next message's time
        except (QueueClosed, WriterLost):
            raise
        except Exception as error:  # whatever loading a message raises
            problem = f"message {index}: {type(error).__name__}: {error}"
        tell(Answer(index, taken_at, reader.stats().bytes, problem))
        if problem is not None:
            return


class _Reader:
    """A reader process as its parent sees it."""

    def __init__(self, handle: Handle, rank: int, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, pipe_of_child = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_reader,
            args=(pipe_of_child, handle, rank, plan),
            daemon=True,
        )
        self._process.start()
        pipe_of_child.close()
        self.name = f"rank {rank} (pid {self._process.pid})"

    def check_runs(self) -> None:
        """Fail if the process has ended."""
        if not self._process.is_alive():
            raise Failure(f"{self.name} {self._end_text()} before it was ready")

    def answer(self, index: int) -> Answer:
        """What it says about this message."""
        try:
            answer: Answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise Failure(f"{self.name} {self._end_text()} before it answered") from error
        if answer.problem is not None:
            raise Failure(f"{self.name}: {answer.problem}")
        if answer.index != index:
            raise Failure(f"{self.name} answered {answer.index} instead of {index}")
        return answer

    def end(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def _end_text(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        return f"ended (exit status {code})"


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """Put Ctrl-C off until the end of the block. Children inherit that, and keep it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _started_readers(queue: MessageQueue, plan: Plan) -> Iterator[list[_Reader]]:
    """Readers that are attached. They end with the block, and with this process."""
    readers: list[_Reader] = []
    try:
        handle = queue.export_handle()
        # The tracker comes first because its start clears the mask. Ctrl-C reaches the whole
        # process group, and only the parent is to answer it.
        resource_tracker.ensure_running()
        with _no_interrupts():
            for rank in range(handle.n_readers):
                readers.append(_Reader(handle, rank, plan))  # noqa: PERF401  # so that all are ended
        click.echo(f"Starting {_names(readers)}", err=True)
        _wait_for(readers, queue)
        yield readers
    finally:
        with _no_interrupts():  # somebody may press it again
            for reader in readers:
                reader.end()


def _wait_for(readers: list[_Reader], queue: MessageQueue) -> None:
    """Wait until all are attached."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            queue.wait_until_ready(_START_SLICE_S)
        except QueueNotReady as error:
            for reader in readers:
                reader.check_runs()
            if time.monotonic() > deadline:
                late = _names([readers[rank] for rank in error.ranks])
                raise Failure(f"{late} did not attach within {_START_S:.0f} s") from error
        else:
            return


def _names(readers: list[_Reader]) -> str:
    return ", ".join(reader.name for reader in readers)


# --- The broadcast ------------------------------------------------------------------------------


@attrs.frozen
class Sent:
    """
    A message that every reader found right.

    Attributes:
        bytes: how many bytes it had.
        times_s: by rank, how long it took from `enqueue` until the reader had it.
    """

    bytes: int
    times_s: list[float]

    @property
    def is_large(self) -> bool:
        """Whether the table counts it as large."""
        return self.bytes >= _LARGE_BYTES


def _broadcast(
    queue: MessageQueue,
    readers: list[_Reader],
    make_message: Callable[[int], Message],
    n_messages: int,
) -> list[Sent]:
    """Send the messages one at a time."""
    from rich.console import Console
    from rich.progress import Progress

    sent: list[Sent] = []
    bytes_before = 0
    # A thread that draws would steal time from what is measured.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("Broadcasting", total=n_messages)
        drawn_at = time.monotonic()
        for index in range(n_messages):
            message = make_message(index)
            start = time.monotonic()
            queue.enqueue(message, _ANSWER_S)
            answers = _take_answers(readers, index)
            bytes_now = answers[0].bytes
            times_s = [answer.taken_at - start for answer in answers]
            sent.append(Sent(bytes_now - bytes_before, times_s))
            bytes_before = bytes_now
            if time.monotonic() - drawn_at > _PROGRESS_EVERY_S:
                progress.update(task, completed=index + 1, refresh=True)
                drawn_at = time.monotonic()
        progress.update(task, completed=n_messages)
    return sent


def _take_answers(readers: list[_Reader], index: int) -> list[Answer]:
    """What each reader says about this message, by rank. They are taken as they come."""
    answers: dict[_Reader, Answer] = {}
    deadline = time.monotonic() + _ANSWER_S
    while len(answers) < len(readers):
        silent = [reader for reader in readers if reader not in answers]
        ready = wait([reader.pipe for reader in silent], deadline - time.monotonic())
        if not ready:
            raise Failure(f"{_names(silent)} did not answer within {_ANSWER_S:.0f} s")
        for reader in silent:
            if reader.pipe in ready:
                answers[reader] = reader.answer(index)
    return [answers[reader] for reader in readers]


def show(sent: list[Sent]) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    # The first one of each kind pays for pages, caches and imports.
    small = [message for message in sent if not message.is_large][1:]
    large = [message for message in sent if message.is_large][1:]
    n_readers = len(sent[0].times_s)
    total_bytes = sum(message.bytes for message in sent)
    table = Table()
    table.add_column("Reader")
    for heading in ("Messages", "MiB", "Small: median", "Small: 99 %", "Large: median"):
        table.add_column(heading, justify="right")
    for rank in range(n_readers):
        small_s, large_s = ([one.times_s[rank] for one in kind] for kind in (small, large))
        table.add_row(
            f"rank {rank}",
            f"{len(sent)}",
            f"{total_bytes / MIB:.1f}",
            _quantile_text(small_s, 0.5),
            _quantile_text(small_s, 0.99),
            _quantile_text(large_s, 0.5),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print("Times are from enqueue until the reader has it; large is from 1 MiB on.")
    console.print("The first small and the first large message are warm-up, and not in the times.")
    timed = small + large
    if timed:
        total_s = sum(max(message.times_s) for message in timed)
        rate_gib = n_readers * sum(message.bytes for message in timed) / GIB / total_s
        console.print(
            f"Under way: {len(timed) / total_s:.0f} messages/s, {rate_gib:.2f} GiB/s to all."
        )
    console.print(f"Every message arrived bit for bit at {n_readers} readers.")


def _quantile_text(times_s: list[float], share: float) -> str:
    if not times_s:
        return "-"
    return f"{sorted(times_s)[int(share * len(times_s))] * 1000:.3f} ms"
