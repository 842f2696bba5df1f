"""The command: what the demo checks, how it fails, what it prints and what it leaves behind."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import click.testing
import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import PATIENCE_S, MakeQueue

from shmcast import ConfigError, Handle, MessageQueue, QueueConfig, cli

MIB = 1 << 20


def shmcast(*arguments: object) -> click.testing.Result:
    """Run the command in this process; its readers are processes that have imported torch."""
    forkserver = multiprocessing.get_context("forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _method: forkserver)
        return click.testing.CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def script() -> str:
    """The path of the installed command."""
    found = shutil.which("shmcast", path=str(Path(sys.executable).parent))
    assert found is not None, "the package is not installed"
    return found


@contextlib.contextmanager
def running_demo(until: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A long demo, as soon as it has written this, and its readers' pids."""
    command = [script(), "demo", "--messages", "1000000"]
    with subprocess.Popen(
        command,
        env={**os.environ, "FORCE_COLOR": "1"},  # so that progress is drawn while it goes on
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group, as a shell makes
        # The parent may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads
    ) as process:
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            pids = [int(pid) for pid in re.findall(r"rank \d \(pid (\d+)\)", first)]
            assert len(pids) == 2, first
            line = first
            while until not in line:
                line = process.stderr.readline()
                assert line, "it ended too early"
            yield process, pids
        finally:
            process.kill()


def wait_for_end(pids: list[int]) -> None:
    """Wait until these processes have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                assert select.select([descriptor], [], [], PATIENCE_S)[0], f"{pid} lives on"
            finally:
                os.close(descriptor)


def save(path: Path, content: Any) -> Path:
    """Write a file of the kind that its ending says."""
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def flipped(tensor: torch.Tensor, byte: int = 5) -> torch.Tensor:
    """A copy with one bit of one byte changed."""
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[byte] ^= 0x10
    return copy


# --- The messages -------------------------------------------------------------------------------


def test_messages_depend_on_seed_and_index_alone() -> None:
    """The same seed and index make the same message bit for bit, others make another one."""
    make, again, other = (cli.Plan(seed, (), 1).message_maker() for seed in (7, 7, 8))
    for index in (0, 1, 99):
        assert cli.difference(make(index), again(index), "it") is None
        assert cli.difference(make(index), other(index), "it") is not None
    assert make(1)["token_ids"] != make(2)["token_ids"]


def test_messages_are_small_and_now_and_then_large() -> None:
    """One message in a hundred carries 60 MiB of bfloat16 with not-a-numbers, the others none."""
    make = cli.Plan(3, (), 1).message_maker()
    with_embeds = [index for index in range(1, 301) if "prompt_embeds" in make(index)]
    assert [100, 200, 300] == with_embeds
    embeds = make(100)["prompt_embeds"]
    assert (torch.bfloat16, (8192, 3840)) == (embeds.dtype, tuple(embeds.shape))
    assert 60 * MIB == embeds.nbytes
    assert bool(embeds.isnan().any())


# --- Bit for bit --------------------------------------------------------------------------------

_NAN_WITH_PAYLOAD = struct.unpack("=d", struct.pack("=Q", 0x7FF8_0000_0000_0001))[0]
_ARRAY = np.arange(6.0).reshape(2, 3)
_TENSOR = torch.arange(24.0).reshape(1, 2, 3, 4)


def test_the_same_bits_are_no_difference() -> None:
    """Whatever a message may hold is found equal to a copy of it, not-a-numbers too."""

    def make() -> dict[str, Any]:
        dense_and_not = torch.arange(64.0).reshape(8, 8)
        return {
            "plain": [1, None, "text", b"bytes", True, (2.5, math.nan, -0.0), complex(0, math.nan)],
            "nan": torch.full((3, 3), math.nan, dtype=torch.bfloat16),
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "complex": torch.ones(3, dtype=torch.complex128).conj(),
            "order": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "slice": dense_and_not[:, ::2],
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "array": np.asfortranarray(_ARRAY),
            "no array": np.empty((0, 2)),
        }

    assert cli.difference(make(), make(), "it") is None


def test_gaps_do_not_count() -> None:
    """A tensor with gaps between its elements is the same as one without them."""
    with_gaps = torch.arange(64.0).reshape(8, 8)[:, ::2]
    assert cli.difference(with_gaps, with_gaps.contiguous(), "it") is None


@pytest.mark.parametrize(
    ("expected", "got", "what"),
    [
        (1, 2, "it is 2 instead of 1"),
        (1, True, "it is of <class 'bool'> instead of <class 'int'>"),
        ([1], (1,), "it is of <class 'tuple'>"),
        ([1, 2], [1], "it has 1 members instead of 2"),
        ([1, [2, 3]], [1, [2, 4]], r"it\[1\]\[1\] is 4 instead of 3"),
        ({"a": 1}, {"b": 1}, "it has other keys"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "it has other keys"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, r"it\['a'\]\['b'\] is 'y'"),
        (0.0, -0.0, "it is -0.0 instead of 0.0"),
        (math.nan, _NAN_WITH_PAYLOAD, "it is nan instead of nan"),
        (complex(1, 0.0), complex(1, -0.0), "it is -0.0 instead of 0.0"),
        (torch.ones(4), np.ones(4, np.float32), "it is of <class 'numpy.ndarray'>"),
        (torch.ones(4), torch.ones(4).int(), "it has dtype torch.int32"),
        (torch.ones(4), torch.ones(2, 2), "it has shape"),
        (torch.ones(4), torch.ones(4, requires_grad=True), "it has requires_grad True"),
        (_TENSOR, _TENSOR.to(memory_format=torch.channels_last), "it has the memory order"),
        (_TENSOR, flipped(_TENSOR), "it differs in 1 of 96 bytes, first in byte 5: 0x10"),
        (
            torch.tensor([0x7FC0], dtype=torch.int16).view(torch.bfloat16),
            torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16),
            "it differs in 1 of 2 bytes, first in byte 0: 0xc1 instead of 0xc0",
        ),
        (torch.zeros(2, dtype=torch.complex128), torch.tensor([0, -0j]), "it has dtype"),
        (
            torch.zeros(2, dtype=torch.complex128),
            torch.tensor([complex(0, 0), complex(0, -0.0)], dtype=torch.complex128),
            "it differs in 1 of 32 bytes, first in byte 31",
        ),
        (_ARRAY, _ARRAY.astype(">f8"), "it has dtype >f8 instead of float64"),
        (_ARRAY, _ARRAY.T, "it has shape"),
        (_ARRAY, np.asfortranarray(_ARRAY), "it has the memory order F instead of C"),
        (_ARRAY, _ARRAY * -1, "it differs in 6 of 48 bytes, first in byte 7"),
    ],
)
def test_other_bits_are_a_difference(expected: Any, got: Any, what: str) -> None:
    """Every kind of difference is found, and its text says where it is."""
    text = cli.difference(expected, got, "it")
    assert text is not None
    assert re.match(what, text), text


# --- A reader that checks -----------------------------------------------------------------------


def checked(make_queue: MakeQueue, sent: list[Any], n_messages: int) -> list[cli.Answer]:
    """What a reader says about these messages."""
    queue, (reader,) = make_queue(n_chunks=len(sent))
    for message in sent:
        queue.enqueue(message, PATIENCE_S)
    make_message = cli.Plan(1, (), n_messages).message_maker()
    queue.close()
    answers: list[cli.Answer] = []
    cli.check_messages(reader, answers.append, make_message, n_messages)
    return answers


def test_a_reader_verifies_what_is_right(make_queue: MakeQueue) -> None:
    """A reader that gets what it expects answers each message, with the bytes and times so far."""
    make = cli.Plan(1, (), 4).message_maker()
    start = time.monotonic()
    answers = checked(make_queue, [make(index) for index in range(4)], 4)
    assert [(index, None) for index in range(4)] == [
        (answer.index, answer.problem) for answer in answers
    ]
    times = [answer.taken_at for answer in answers]
    assert sorted(times) == times
    assert start < times[0] < times[-1] < time.monotonic()
    assert 60 * MIB < answers[0].bytes < answers[-1].bytes < 61 * MIB


def _with_flipped_bit(messages: list[Any]) -> None:
    messages[0]["prompt_embeds"] = flipped(messages[0]["prompt_embeds"], 60 * MIB - 1)


def _with_another_token(messages: list[Any]) -> None:
    messages[2]["token_ids"][-1] += 1


def _with_two_exchanged(messages: list[Any]) -> None:
    messages[1], messages[2] = messages[2], messages[1]


def _with_one_left_out(messages: list[Any]) -> None:
    del messages[1]


def _with_one_repeated(messages: list[Any]) -> None:
    messages.insert(1, messages[1])


class _Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def _with_one_that_does_not_load(messages: list[Any]) -> None:
    messages[1]["flag"] = _Unloadable()


@pytest.mark.parametrize(
    ("plant", "verified", "problem"),
    [
        (_with_flipped_bit, 0, r"message 0\['prompt_embeds'\] differs in 1 of 62914560 bytes"),
        (_with_another_token, 2, r"message 2\['token_ids'\]"),
        (_with_two_exchanged, 1, r"message 1\['step'\] is 2 instead of 1"),
        (_with_one_left_out, 1, r"message 1\['step'\] is 2 instead of 1"),
        (_with_one_repeated, 2, r"message 2\['step'\] is 1 instead of 2"),
        (_with_one_that_does_not_load, 1, "message 1: ValueError: invalid literal"),
    ],
)
def test_a_reader_finds_what_is_wrong(
    make_queue: MakeQueue, plant: Callable[[list[Any]], None], verified: int, problem: str
) -> None:
    """A wrong bit, a message out of turn and one that does not load end the check with a text."""
    make = cli.Plan(1, (), 3).message_maker()
    messages = [make(index) for index in range(3)]
    plant(messages)
    *right, last = checked(make_queue, messages, 3)
    assert [None] * verified == [answer.problem for answer in right]
    assert last.problem is not None
    assert re.match(problem, last.problem), last.problem


def test_readers_with_another_seed_fail_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """If readers expect other messages than those that are sent, the demo fails and says where."""
    message_maker = cli.Plan.message_maker
    monkeypatch.setattr(  # in this process alone
        cli.Plan, "message_maker", lambda plan: message_maker(attrs.evolve(plan, seed=6))
    )
    result = shmcast("demo", "--seed", 5, "--messages", 3, "--readers", 1)
    assert 1 == result.exit_code
    assert re.search(r"^Error: rank 0 \(pid \d+\): message 0\['request_ids'\]", result.output, re.M)
    assert "bit for bit" not in result.output
    assert [] == multiprocessing.active_children()


# --- Readers that fail --------------------------------------------------------------------------


def end_at_once(pipe: Connection, handle: Handle, rank: int, plan: cli.Plan) -> None:
    """A reader that ends before it is ready, with exit status 3."""
    sys.exit(3)


def never_answer(pipe: Connection, handle: Handle, rank: int, plan: cli.Plan) -> None:
    """A reader that takes everything and says nothing."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for _ in reader:
            pass


def die_on_the_way(pipe: Connection, handle: Handle, rank: int, plan: cli.Plan) -> None:
    """A reader that compares nothing, and of which rank 1 is killed at message 2."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            if (rank, index) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.send(cli.Answer(index, time.monotonic(), 0, None))


def answer_out_of_turn(pipe: Connection, handle: Handle, rank: int, plan: cli.Plan) -> None:
    """A reader that answers each message with the index of the next one."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            pipe.send(cli.Answer(index + 1, time.monotonic(), 0, None))


@pytest.mark.parametrize(
    ("run_reader", "n_readers", "text"),
    [
        (end_at_once, 1, r"rank 0 \(pid \d+\) ended \(exit status 3\) before it was ready"),
        (never_answer, 1, r"rank 0 \(pid \d+\) did not answer within 1 s"),
        (die_on_the_way, 2, r"rank 1 \(pid \d+\) was killed by signal 9 before it answered"),
        (answer_out_of_turn, 1, r"rank 0 \(pid \d+\) answered 1 instead of 0"),
    ],
    ids=["ends", "silent", "killed", "out of turn"],
)
def test_a_reader_that_does_not_answer_fails_the_demo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_reader: Callable[..., None],
    n_readers: int,
    text: str,
) -> None:
    """A reader that ends, dies, stays silent or is confused makes exit status 1 and is named."""
    monkeypatch.setattr(cli, "run_reader", run_reader)
    if run_reader is never_answer:
        monkeypatch.setattr(cli, "_ANSWER_S", 1.0)
    file = save(tmp_path / "a.npy", np.ones(9))
    result = shmcast("demo", "--readers", n_readers, "--messages", 9, "--input", file)
    assert 1 == result.exit_code
    assert re.search(rf"^Error: {text}$", result.output, re.M), result.output
    assert [] == multiprocessing.active_children()


def claim_times(pipe: Connection, handle: Handle, rank: int, plan: cli.Plan) -> None:
    """A reader that says it took 5000 s for the first message; after it, rank 0 says 1000 s."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            claimed_s = 5000 if index == 0 else 1000 if rank == 0 else 0
            pipe.send(cli.Answer(index, time.monotonic() + claimed_s, 100 * index, None))


def test_a_rank_has_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank is not in the times of the ranks after it, and the first message in none."""
    monkeypatch.setattr(cli, "run_reader", claim_times)
    file = save(tmp_path / "a.npy", np.ones(9))
    result = shmcast("demo", "--readers", 2, "--messages", 5, "--input", file)
    assert 0 == result.exit_code, result.output
    slow, fast = ([float(time.split()[0]) for time in row[3:5]] for row in rows(result.output))
    assert all(1_000_000 <= time < 2_000_000 for time in slow), slow
    assert all(0 < time < 1_000_000 for time in fast), fast
    assert ["-", "-"] == [row[5] for row in rows(result.output)]


# --- The end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("until", ["Starting", "Broadcasting"])
def test_ctrl_c_ends_it_cleanly(until: str) -> None:
    """Ctrl-C, once or more, ends the demo and its readers with exit status 130."""
    with running_demo(until) as (process, pids):
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert 130 == process.returncode
    assert errors.rstrip().endswith("Interrupted")
    assert ("", False) == (output, "Traceback" in errors)
    for pid in pids:  # not even for a moment
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def run_and_interrupt(
    directory: Path, argument: str, until: str, before: signal.Handlers
) -> tuple[int, str]:
    """
    Run the command with the modules of this directory, with Ctrl-C once it has written a line.

    Returns its exit status, and what else it wrote to stderr.
    """
    with subprocess.Popen(
        [script(), argument],
        env={**os.environ, "PYTHONPATH": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, before),  # noqa: PLW1509  # no threads
    ) as process:
        try:
            assert process.stderr is not None
            assert f"{until}\n" == process.stderr.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("before", "expected"),
    [(signal.SIG_DFL, (130, "Interrupted\n")), (signal.SIG_IGN, (7, ""))],
    ids=["as usual", "ignored"],
)
def test_ctrl_c_while_importing(
    tmp_path: Path, before: signal.Handlers, expected: tuple[int, str]
) -> None:
    """Ctrl-C counts also in an import that swallows exceptions, unless the parent ignores it."""
    (tmp_path / "torch.py").write_text(
        "import sys\n"
        "print('importing', file=sys.stderr, flush=True)\n"
        "try:\n"
        "    sys.stdin.read()\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "sys.exit(7)\n"
    )
    assert expected == run_and_interrupt(tmp_path, "demo", "importing", before)


def test_ctrl_c_after_the_end(tmp_path: Path) -> None:
    """Ctrl-C when all is said, and the interpreter ends, changes nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        "def end():\n"
        "    print('ending', file=sys.stderr, flush=True)\n"
        "    sys.stdin.read()\n"
        "atexit.register(end)\n"
    )
    assert (0, "") == run_and_interrupt(tmp_path, "--version", "ending", signal.SIG_DFL)


def test_readers_do_not_outlive_the_demo() -> None:
    """When the demo itself is killed, its readers end, without a word."""
    with running_demo(until="Broadcasting") as (process, pids):
        process.kill()
        wait_for_end(pids)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in errors


# --- Whole runs ---------------------------------------------------------------------------------


def rows(output: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_the_demo_checks_every_reader() -> None:
    """A run verifies each message at each reader; the table goes to stdout, progress to stderr."""
    command = [script(), "demo", "--messages", "30", "--readers", "2", "--seed", "11"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert 0 == done.returncode, done.stderr
    assert "Every message arrived bit for bit at 2 readers." == done.stdout.splitlines()[-1]
    assert [["rank 0", "30"], ["rank 1", "30"]] == [row[:2] for row in rows(done.stdout)]
    for _, _, mib, *times, large in rows(done.stdout):
        assert 60 <= float(mib) <= 61
        assert all(re.fullmatch(r"\d+\.\d{3} ms", time) for time in times), times
        assert "-" == large  # the only one is warm-up
    assert re.search(r"^Under way: \d+ messages/s, \d+\.\d\d GiB/s to all\.$", done.stdout, re.M)
    assert done.stdout.startswith("┏")
    assert not re.search("Starting|Broadcasting|%\\s*0:", done.stdout)
    assert re.search(r"^Starting rank 0 \(pid \d+\), rank 1 \(pid \d+\)$", done.stderr, re.M)
    assert "Broadcasting" in done.stderr


def test_files_of_every_kind_are_broadcast(tmp_path: Path) -> None:
    """With --input, files of each kind arrive bit for bit, in turn, also with the smallest ring."""
    nested = {"layers": [{"w": torch.randn(700, 800), "b": (torch.ones(2, dtype=torch.bool),)}]}
    files = [
        save(tmp_path / "nested.pt", {**nested, "p": torch.nn.Parameter(torch.ones(2)), "n": 3}),
        save(tmp_path / "one.PTH", torch.full((300, 1000), math.nan, dtype=torch.complex64)),
        save(
            tmp_path / "array.npy", np.asfortranarray(np.random.default_rng(1).random((400, 500)))
        ),
        save(tmp_path / "w.safetensors", {"w": torch.randn(64, 64).to(torch.float8_e4m3fn)}),
    ]
    config = tmp_path / "small.toml"
    config.write_text('[shmcast]\nn_chunks = 1\nchunk_bytes = "1 KiB"\n')
    first, second, third, fourth = files
    result = shmcast("demo", "--config", config, "--input", first, second, third, "--input", fourth)
    assert 0 == result.exit_code, result.output
    assert "Every message arrived bit for bit at 2 readers." == result.output.splitlines()[-1]
    assert [["rank 0", "12"], ["rank 1", "12"]] == [row[:2] for row in rows(result.output)]


def refused_configs(monkeypatch: pytest.MonkeyPatch) -> list[QueueConfig]:
    """The configs of the queues that the demo would make, were they not refused."""
    configs: list[QueueConfig] = []

    def refuse(config: QueueConfig) -> None:
        configs.append(config)
        raise ConfigError("seen")

    monkeypatch.setattr(cli, "MessageQueue", refuse)
    return configs


@pytest.mark.parametrize(
    ("option", "variable", "in_file", "n_readers"),
    [
        (None, None, None, 2),
        (None, None, 9, 9),
        (None, None, 1, 1),
        (None, "5", 9, 5),
        (None, "1", None, 1),
        ("3", "5", 9, 3),
        ("1", None, None, 1),
    ],
)
def test_settings_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: str | None,
    variable: str | None,
    in_file: int | None,
    n_readers: int,
) -> None:
    """The queue has the file's settings; --readers wins over a variable, that over the file."""
    configs = refused_configs(monkeypatch)
    path = tmp_path / "shmcast.toml"
    line = "" if in_file is None else f"n_readers = {in_file}\n"
    path.write_text(f'[shmcast]\n{line}n_chunks = 7\nchunk_bytes = "64 KiB"\n')
    if variable is not None:
        monkeypatch.setenv("SHMCAST_N_READERS", variable)
    options = [] if option is None else ["--readers", option]
    result = shmcast("demo", "--config", path, *options)
    assert (2, "Error: seen\n") == (result.exit_code, result.output)
    assert [QueueConfig(n_readers=n_readers, n_chunks=7, chunk_bytes=64 << 10)] == configs


def test_ranks_for_two_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing says how many readers there are, settings for two readers are allowed."""
    configs = refused_configs(monkeypatch)
    monkeypatch.setenv("SHMCAST_LOCAL_READER_RANKS", "0,1")
    assert "Error: seen\n" == shmcast("demo").output
    assert [QueueConfig(n_readers=2, local_reader_ranks=(0, 1))] == configs


# --- Wrong input --------------------------------------------------------------------------------

FROM_TORCH = "allowed is a file with plain CPU tensors, .+, as torch.save writes it"
FROM_NUMPY = "allowed is a file with one array, .+, as numpy.save writes it"
FROM_SAFE = "allowed is a file with tensors, as safetensors.torch.save_file writes it"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--readers", "0"], "'--readers': 0 is not in the range"),
        (["--readers", "5000"], "'--readers': 5000 is not in the range 1<=x<=4096"),
        (["--messages", "0"], "'--messages': 0 is not in the range"),
        (["--messages", "many"], "'--messages': 'many' is not a valid integer"),
        (["--nonsense"], "No such option '?--nonsense"),
        (["x.pt"], "unexpected extra argument"),
        (["--input"], "requires an argument"),
        (["--config", "missing.toml"], "missing.toml: can't be read"),
        (["--config", "bad.toml"], r"bad.toml \[shmcast\]: n_chunks = 0 is not allowed"),
        (["--input", "missing.pt"], "missing.pt: No such file"),
        (["--input", "folder.pt"], f"folder.pt: is no regular file; {FROM_TORCH}"),
        (["--input", "folder.safetensors"], f"folder.safetensors: is no regular file; {FROM_SAFE}"),
        (["--input", "words.txt"], "words.txt: ends in none of .pt, .pth, .npy, .safetensors"),
        (["--input", "good.npy", "empty.pt"], f"empty.pt: is empty; {FROM_TORCH}"),
        (["--input", "empty.npy", "good.npy"], f"empty.npy: is empty; {FROM_NUMPY}"),
        (["--input", "empty.safetensors"], f"empty.safetensors: is empty; {FROM_SAFE}"),
        (
            ["--input", "damaged.pt"],
            f"damaged.pt: was not written by torch.save, or is damaged; {FROM_TORCH}",
        ),
        (
            ["--input", "pickle.pt"],
            f"pickle.pt: was not written by torch.save, or is damaged; {FROM_TORCH}",
        ),
        (["--input", "cut.pt"], f"cut.pt: can't be read: RuntimeError: .+; {FROM_TORCH}"),
        (["--input", "damaged.npy"], f"damaged.npy: can't be read: .+; {FROM_NUMPY}"),
        (
            ["--input", "damaged.safetensors"],
            f"damaged.safetensors: can't be read: .+; {FROM_SAFE}",
        ),
        (["--input", "numbers.pt"], f"numbers.pt: holds no tensor; {FROM_TORCH}"),
        (["--input", "set.pt"], f"set.pt: holds no tensor; {FROM_TORCH}"),
        (["--input", "nothing.safetensors"], f"nothing.safetensors: holds no tensor; {FROM_SAFE}"),
        (
            ["--input", "several.npy"],
            f"several.npy: can't be read: ValueError: the magic string is not .+; {FROM_NUMPY}",
        ),
        (
            ["--input", "code.pt"],
            rf"code.pt: holds a pathlib[.\w]+Path, and loading that could run code; {FROM_TORCH}",
        ),
        (
            ["--input", "module.pt"],
            rf"module.pt: holds a torch[.\w]+Linear, and loading that could run code; {FROM_TORCH}",
        ),
        (["--input", "script.pt"], f"script.pt: can't be read: .+TorchScript .+; {FROM_TORCH}"),
        (
            ["--input", "objects.npy"],
            f"objects.npy: can't be read: ValueError: Object arrays .+; {FROM_NUMPY}",
        ),
        (
            ["--input", "sparse.pt"],
            f"sparse.pt: holds a tensor of torch.sparse_coo, .+{FROM_TORCH}",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_wrong_input_is_refused(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the input, it is said in one line, with exit status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "bad.toml").write_text("[shmcast]\nn_chunks = 0\n")
    save(tmp_path / "good.npy", np.ones(3))
    for ending in (".pt", ".npy", ".safetensors"):
        (tmp_path / f"empty{ending}").touch()
        (tmp_path / f"damaged{ending}").write_bytes(b"neither this nor that, " * 9)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps({"w": [1.5]}))
    whole = save(tmp_path / "whole.pt", {"w": torch.ones(3)}).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:-99])
    save(tmp_path / "numbers.pt", {"a": [1, 2.5]})
    save(tmp_path / "set.pt", {torch.ones(3)})
    save(tmp_path / "nothing.safetensors", {})
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.ones(3))
    save(tmp_path / "code.pt", {"w": torch.ones(3), "code": Path("x")})
    save(tmp_path / "module.pt", torch.nn.Linear(2, 2))
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:  # as torch.jit.save makes one
        archive.writestr("script/constants.pkl", b"")
        archive.writestr("script/data.pkl", b"")
        archive.writestr("script/version", b"3")
    save(tmp_path / "objects.npy", np.array([{}, None]))
    save(tmp_path / "sparse.pt", [torch.ones(3), torch.eye(3).to_sparse()])
    result = shmcast("demo", *arguments)
    assert 2 == result.exit_code
    assert re.fullmatch(rf"Error: .*{text}.*\n", result.output), result.output
    assert result.exc_info is not None
    assert SystemExit is result.exc_info[0]


@pytest.mark.parametrize(
    ("name", "content", "module", "package"),
    [
        ("w.safetensors", {"w": torch.ones(3)}, "safetensors.torch", "safetensors"),
        ("w.safetensors", {"w": torch.ones(3)}, "safetensors", "safetensors"),
        ("a.npy", np.ones(3), "numpy", "numpy"),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: Any,
    module: str,
    package: str,
) -> None:
    """A file whose package is not installed is refused with the command that installs it."""
    path = save(tmp_path / name, content)
    monkeypatch.setitem(sys.modules, module, None)
    result = shmcast("demo", "--input", path)
    text = f"Error: {path}: reading it needs the package {package}: pip install {package}\n"
    assert (2, text) == (result.exit_code, result.output)


# --- The command itself -------------------------------------------------------------------------


def test_version_and_help() -> None:
    """--version says the version, and the help of the command lists the demo."""
    assert "shmcast, version 0.1.0\n" == shmcast("--version").output
    assert re.search(r"^  demo ", shmcast("--help").output, re.M)
    assert 0 == shmcast("demo", "--help").exit_code


def test_importing_the_command_is_cheap() -> None:
    """Importing the command imports neither torch nor numpy, so --help is quick."""
    code = "import sys, shmcast.cli; print({'torch', 'numpy', 'zmq'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "set()\n" == done.stdout
