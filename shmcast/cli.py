"""The command `shmcast`. The result alone goes to stdout; progress and errors go to stderr."""

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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click

from shmcast.config import DEFAULT_OOB_THRESHOLD_BYTES, GIB, MIB, QueueConfig
from shmcast.errors import (
    ConfigError,
    QueueClosed,
    QueueEmpty,
    ReaderLost,
    ShmcastError,
    WriterLost,
)
from shmcast.handle import Handle
from shmcast.queue import MessageQueue, MessageReader

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

_DEFAULT_MESSAGES: Final = 3000  # about 20 s on a machine with two cores
_DEFAULT_ROUNDS: Final = 3  # so often is each file sent
_LARGE_EVERY: Final = 100  # one message of so many carries a large tensor
_EMBEDS_SHAPE: Final = (8192, 3840)  # 60 MiB of bfloat16
_LARGE_BYTES: Final = DEFAULT_OOB_THRESHOLD_BYTES  # what the table calls a large message

# Hang limits: many readers import torch at once, and a reader may compare gigabytes.
_START_S: Final = 120.0
_ANSWER_S: Final = 60.0
_PROGRESS_EVERY_S: Final = 0.2

_INTERRUPTED_STATUS: Final = 130  # 128 + SIGINT, as shells have it


class _Group(click.Group):
    """A group whose errors are one line, and which Ctrl-C ends with exit status 130."""

    def main(self, *args: Any, **settings: Any) -> Any:
        try:
            sys.exit(super().main(*args, **{**settings, "standalone_mode": False}))
        except click.Abort:
            click.echo("Interrupted", err=True)
            sys.exit(_INTERRUPTED_STATUS)
        except click.ClickException as error:
            if isinstance(error, click.UsageError) and "\n" not in error.message:
                error.ctx = None  # leaves out the lines about the usage
            error.show()
            sys.exit(error.exit_code)


class _ManyInputs(click.Command):
    """A command that takes several files after one `--input`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeated: list[str] = []
        is_input = False
        for previous, arg in zip([None, *args], args, strict=False):
            if arg.startswith("-"):
                is_input = arg.partition("=")[0] == "--input"
            elif is_input and previous != "--input":
                repeated.append("--input")
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


@click.group("shmcast", cls=_Group)
@click.version_option(package_name="shmcast")
def main() -> None:
    """Broadcast Python objects and large CPU tensors to many processes."""


@main.command(cls=_ManyInputs)
@click.option(
    "--readers",
    "n_readers",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many reader processes.",
)
@click.option(
    "--messages",
    "n_messages",
    type=click.IntRange(min=1),
    help=f"How many messages; {_DEFAULT_MESSAGES}, or {_DEFAULT_ROUNDS} for each file of --input.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="What the messages are made from."
)
@click.option(
    "--config", type=click.Path(path_type=Path), help="A TOML file with settings of the queue."
)
@click.option(
    "--input",
    "files",
    metavar="FILE...",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Broadcast the tensors of these .pt, .pth, .npy or .safetensors files instead.",
)
def demo(
    n_readers: int,
    n_messages: int | None,
    seed: int,
    config: Path | None,
    files: tuple[Path, ...],
) -> None:
    """
    Broadcast to reader processes and check every byte that arrives.

    Messages are like those of an inference engine's step: a few hundred bytes, and now and then
    60 MiB of prompt embeddings. Each reader makes the message that it expects by itself, from the
    seed or from the files, and compares bit for bit. Exit status 0: all is well; 1: something did
    not arrive as it should; 2: the input is wrong.
    """
    _import_torch()
    try:
        queue_config = QueueConfig.load(config, n_readers=n_readers)
        default = len(files) * _DEFAULT_ROUNDS or _DEFAULT_MESSAGES
        plan = Plan(seed, files, n_messages or default)
        make_message = plan.message_maker()
        queue = MessageQueue(queue_config)
    except (ConfigError, InputError) as error:
        raise click.UsageError(str(error)) from error
    try:
        with queue, _started_readers(queue, plan) as readers:
            results = _broadcast(queue, readers, make_message, plan.n_messages)
    except (ShmcastError, OSError, TypeError) as error:  # TypeError: torch refuses a tensor
        raise click.ClickException(str(error)) from error
    _show(results)


def _import_torch() -> None:
    """Import torch. Without numpy it warns of that, which is no news to who runs the demo."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        import torch  # noqa: F401


# --- The messages -------------------------------------------------------------------------------

Message = dict[str, Any]


class InputError(ShmcastError):
    """A file of `--input` that can't be broadcast."""


@attrs.frozen
class Plan:
    """
    What is broadcast. Every process makes the messages for itself from it.

    Attributes:
        seed: what messages are made from where there are no files.
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
    The tensors of a file, in whatever they stand in there.

    Raises:
        InputError: the file can't be read, or holds no tensor.
    """
    load = _LOADERS.get(file.suffix.lower())
    if load is None:
        endings = ", ".join(_LOADERS)
        raise InputError(f"{file}: ends in none of {endings}")
    try:
        if file.stat().st_size == 0:
            raise InputError(f"{file}: is empty")
        content = load(file)
        tensors = list(_tensors(content))
        unfit = [tensor for tensor in tensors if not _is_comparable(tensor)]
    except ModuleNotFoundError as error:
        raise InputError(f"{file}: reading it needs the package {error.name}") from error
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    except ShmcastError:
        raise
    except Exception as error:  # a damaged file makes the loaders raise anything
        sentence = str(error).strip().partition("\n")[0].partition(". ")[0]
        raise InputError(f"{file}: can't be read: {type(error).__name__}: {sentence}") from error
    if not tensors:
        raise InputError(f"{file}: holds no tensor")
    if unfit:
        raise InputError(
            f"{file}: holds a tensor that is not plain and on the CPU "
            f"({unfit[0].layout}, {unfit[0].device}, {unfit[0].dtype}); the demo compares no others"
        )
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
class Summary:
    """
    What a reader says at its end.

    Attributes:
        verified: how many messages were the same bit for bit.
        bytes: how many bytes all messages had.
        problem: what ended it early, or None.
    """

    verified: int
    bytes: int
    problem: str | None


def run_reader(pipe: Connection, handle: Handle, rank: int, plan: Plan) -> None:
    """The life of a reader process."""
    _import_torch()  # here, or the first message would wait for it
    make_message = plan.message_maker()
    # These mean that the parent is gone or does not want any more: nobody is there to tell.
    with (
        contextlib.suppress(QueueClosed, ReaderLost, WriterLost),
        MessageQueue(QueueConfig(n_readers=1)) as answers,
        MessageQueue.create_from_handle(handle, rank) as reader,
    ):
        pipe.send(answers.export_handle())
        answers.enqueue(check_messages(reader, answers, make_message, plan.n_messages))


def check_messages(
    reader: MessageReader,
    answers: MessageQueue,
    make_message: Callable[[int], Message],
    n_messages: int,
) -> Summary:
    """
    Take messages until one is wrong.

    A message's index is answered twice: when it was taken, and when it was compared, so that the
    next one is not held up by it.
    """
    verified = 0
    problem = None
    try:
        while verified < n_messages and problem is None:
            got = reader.dequeue()
            answers.enqueue(verified)
            problem = difference(make_message(verified), got, f"message {verified}")
            del got  # freeing it is not the next message's time
            if problem is None:
                answers.enqueue(verified)
                verified += 1
    except (QueueClosed, ReaderLost, WriterLost):
        raise
    except Exception as error:  # whatever loading a message raises
        problem = f"message {verified}: {type(error).__name__}: {error}"
    return Summary(verified, reader.stats().bytes, problem)


class _Failure(ShmcastError):
    """Something did not arrive as it should."""


class _Reader:
    """A reader process as its parent sees it."""

    def __init__(self, handle: Handle, rank: int, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe_of_child = context.Pipe(duplex=False)
        self._process = context.Process(
            target=run_reader,
            args=(pipe_of_child, handle, rank, plan),
            daemon=True,
        )
        self._process.start()
        pipe_of_child.close()
        self.name = f"rank {rank} (pid {self._process.pid})"

    def connect(self) -> None:
        """Attach to its answers, once it runs."""
        if not self._pipe.poll(_START_S):
            raise _Failure(f"{self.name} did not start within {_START_S:.0f} s")
        try:
            handle = self._pipe.recv()
            self._answers = MessageQueue.create_from_handle(handle, 0)
            self._answers.wait_until_ready(_START_S)
        except (EOFError, WriterLost) as error:
            raise _Failure(f"{self.name} {self._end_text()} before it was ready") from error

    def expect(self, index: int) -> None:
        """Wait for the answer to this message."""
        answer = self._answer()
        if answer != index:
            raise _Failure(f"{self.name} answered {answer} instead of {index}")

    def summary(self) -> Summary:
        """What it says at its end."""
        answer = self._answer()
        if not isinstance(answer, Summary):
            raise _Failure(f"{self.name} answered {answer} instead of a summary")
        return answer

    def end(self) -> None:
        """End the process, if it has not ended."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _answer(self) -> int | Summary:
        try:
            answer: int | Summary = self._answers.dequeue(_ANSWER_S)
        except QueueEmpty as error:
            raise _Failure(f"{self.name} did not answer within {_ANSWER_S:.0f} s") from error
        except (QueueClosed, WriterLost) as error:
            raise _Failure(f"{self.name} {self._end_text()} before it answered") from error
        if isinstance(answer, Summary) and answer.problem is not None:
            raise _Failure(f"{self.name}: {answer.problem}")
        return answer

    def _end_text(self) -> str:
        self._process.join(1)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"was killed by signal {-code}"
        return f"ended (exit status {code})"


@contextlib.contextmanager
def _started_readers(queue: MessageQueue, plan: Plan) -> Iterator[list[_Reader]]:
    """Readers that are attached. They end with the block, and with this process."""
    readers: list[_Reader] = []
    try:
        handle = queue.export_handle()
        # Ctrl-C reaches the whole process group, and only the parent shall answer it: children
        # inherit the mask and keep it. The tracker comes first because its start clears the mask.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(handle.n_readers):
                readers.append(_Reader(handle, rank, plan))  # noqa: PERF401  # so that all are ended
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        click.echo(f"Starting {', '.join(reader.name for reader in readers)}", err=True)
        for reader in readers:
            reader.connect()
        queue.wait_until_ready(_START_S)
        yield readers
    finally:
        for reader in readers:
            reader.end()


# --- The broadcast ------------------------------------------------------------------------------


@attrs.frozen
class _Result:
    """
    How one reader did.

    Attributes:
        small_s: the times there and back of small messages.
        large_s: those of large ones.
        summary: what the reader said at its end.
    """

    small_s: list[float]
    large_s: list[float]
    summary: Summary


def _broadcast(
    queue: MessageQueue,
    readers: list[_Reader],
    make_message: Callable[[int], Message],
    n_messages: int,
) -> list[_Result]:
    """
    Send the messages one at a time.

    Answers are taken in the order of the ranks, so the time of a rank has those before it inside.
    """
    from rich.console import Console
    from rich.progress import Progress

    small_s: list[list[float]] = [[] for _ in readers]
    large_s: list[list[float]] = [[] for _ in readers]
    # A thread that draws would steal time from what is measured.
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("Broadcasting", total=n_messages)
        drawn_at = time.perf_counter()
        message = make_message(0)
        for index in range(n_messages):
            bytes_before = queue.stats().bytes
            times_s = []
            start = time.perf_counter()
            queue.enqueue(message, _ANSWER_S)
            for reader in readers:
                reader.expect(index)
                times_s.append(time.perf_counter() - start)
            is_large = queue.stats().bytes - bytes_before >= _LARGE_BYTES
            for rank, time_s in enumerate(times_s):
                (large_s if is_large else small_s)[rank].append(time_s)
            if index + 1 < n_messages:  # made while the readers compare
                message = make_message(index + 1)
            for reader in readers:
                reader.expect(index)
            if time.perf_counter() - drawn_at > _PROGRESS_EVERY_S:
                progress.update(task, completed=index + 1, refresh=True)
                drawn_at = time.perf_counter()
        progress.update(task, completed=n_messages)
    return [
        _Result(small_s[rank], large_s[rank], reader.summary())
        for rank, reader in enumerate(readers)
    ]


def _show(results: list[_Result]) -> None:
    """Print the table and the verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("Reader")
    for heading in ("Messages", "MiB", "Small: median", "Small: 99 %", "Large: median"):
        table.add_column(heading, justify="right")
    for rank, result in enumerate(results):
        table.add_row(
            f"rank {rank}",
            f"{result.summary.verified}",
            f"{result.summary.bytes / MIB:.1f}",
            _quantile_text(result.small_s, 0.5),
            _quantile_text(result.small_s, 0.99),
            _quantile_text(result.large_s, 0.5),
        )
    last = results[-1]  # its times have those of the others inside
    total_s = sum(last.small_s) + sum(last.large_s)
    rate_gib = sum(result.summary.bytes for result in results) / GIB / total_s
    console = Console(highlight=False)
    console.print(table)
    console.print("Times are from enqueue to the reader's answer; large is from 1 MiB on.")
    console.print(
        f"Under way: {last.summary.verified / total_s:.0f} messages/s, {rate_gib:.2f} GiB/s to all."
    )
    console.print(f"Every message arrived bit for bit at {len(results)} readers.")


def _quantile_text(times_s: list[float], share: float) -> str:
    if not times_s:
        return "-"
    return f"{sorted(times_s)[int(share * len(times_s))] * 1000:.3f} ms"
