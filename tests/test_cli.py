"""The command: how the demo fails, what it prints and what it leaves behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import attrs
import click.testing
import numpy as np
import pytest
import torch
from conftest import PATIENCE_S

from shmcast import ConfigError, Handle, MessageQueue, QueueConfig, cli, demo

MIB = 1 << 20


def shmcast(*arguments: object) -> click.testing.Result:
    """Run the command in this process; its readers are processes that have imported torch."""
    forkserver = multiprocessing.get_context("forkserver")
    ensure_running()  # or the demo would start it with Ctrl-C blocked, for all later tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda _method: forkserver)
        return click.testing.CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def script() -> str:
    """The path of the installed command."""
    found = shutil.which("shmcast", path=str(Path(sys.executable).parent))
    assert found is not None, "the package is not installed"
    return found


def one_file(folder: Path) -> Path:
    """A file with an array."""
    np.save(folder / "a.npy", np.ones(9))
    return folder / "a.npy"


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


def test_readers_with_another_seed_fail_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """If readers expect other messages than those that are sent, the demo fails and says where."""
    message_maker = demo.Plan.message_maker
    monkeypatch.setattr(  # in this process alone
        demo.Plan, "message_maker", lambda plan: message_maker(attrs.evolve(plan, seed=6))
    )
    result = shmcast("demo", "--seed", 5, "--messages", 3, "--readers", 1)
    assert 1 == result.exit_code
    assert re.search(r"^Error: rank 0 \(pid \d+\): message 0\['request_ids'\]", result.output, re.M)
    assert "bit for bit" not in result.output
    assert [] == multiprocessing.active_children()


# --- Readers that fail --------------------------------------------------------------------------


def end_at_once(pipe: Connection, handle: Handle, rank: int, plan: demo.Plan) -> None:
    """A reader that ends before it is ready, with exit status 3."""
    sys.exit(3)


def never_answer(pipe: Connection, handle: Handle, rank: int, plan: demo.Plan) -> None:
    """A reader that takes everything and says nothing."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for _ in reader:
            pass


def die_on_the_way(pipe: Connection, handle: Handle, rank: int, plan: demo.Plan) -> None:
    """A reader that compares nothing, and of which rank 1 is killed at message 2."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            if (rank, index) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.send(demo.Answer(index, time.monotonic(), 0, None))


def answer_out_of_turn(pipe: Connection, handle: Handle, rank: int, plan: demo.Plan) -> None:
    """A reader that answers each message with the index of the next one."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            pipe.send(demo.Answer(index + 1, time.monotonic(), 0, None))


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
    monkeypatch.setattr(demo, "run_reader", run_reader)
    if run_reader is never_answer:
        monkeypatch.setattr(demo, "_ANSWER_S", 1.0)
    file = one_file(tmp_path)
    result = shmcast("demo", "--readers", n_readers, "--messages", 9, file)
    assert 1 == result.exit_code
    assert re.search(rf"^Error: {text}$", result.output, re.M), result.output
    assert [] == multiprocessing.active_children()


def claim_times(pipe: Connection, handle: Handle, rank: int, plan: demo.Plan) -> None:
    """A reader that says it took 5000 s for the first message; after it, rank 0 says 1000 s."""
    with MessageQueue.create_from_handle(handle, rank) as reader:
        for index, _ in enumerate(reader):
            claimed_s = 5000 if index == 0 else 1000 if rank == 0 else 0
            pipe.send(demo.Answer(index, time.monotonic() + claimed_s, 100 * index, None))


def test_a_rank_has_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow rank is not in the times of the ranks after it, and the first message in none."""
    monkeypatch.setattr(demo, "run_reader", claim_times)
    file = one_file(tmp_path)
    result = shmcast("demo", "--readers", 2, "--messages", 5, file)
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


def test_files_are_broadcast(tmp_path: Path) -> None:
    """Files arrive bit for bit, each three times, also with the smallest ring."""
    config = tmp_path / "small.toml"
    config.write_text('[shmcast]\nn_chunks = 1\nchunk_bytes = "1 KiB"\n')
    second = tmp_path / "nested.pt"
    torch.save({"layers": [{"w": torch.randn(700, 800)}]}, second)
    result = shmcast("demo", "--config", config, one_file(tmp_path), second)
    assert 0 == result.exit_code, result.output
    assert "Every message arrived bit for bit at 2 readers." == result.output.splitlines()[-1]
    assert [["rank 0", "6"], ["rank 1", "6"]] == [row[:2] for row in rows(result.output)]


def refused_configs(monkeypatch: pytest.MonkeyPatch) -> list[QueueConfig]:
    """The configs of the queues that the demo would make, were they not refused."""
    configs: list[QueueConfig] = []

    def refuse(config: QueueConfig) -> None:
        configs.append(config)
        raise ConfigError("seen")

    monkeypatch.setattr(demo, "MessageQueue", refuse)
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
    assert (2, "Error: seen") == (result.exit_code, result.output.splitlines()[-1])
    assert [QueueConfig(n_readers=n_readers, n_chunks=7, chunk_bytes=64 << 10)] == configs


def test_ranks_for_two_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing says how many readers there are, settings for two readers are allowed."""
    configs = refused_configs(monkeypatch)
    monkeypatch.setenv("SHMCAST_LOCAL_READER_RANKS", "0,1")
    assert "Error: seen" == shmcast("demo").output.splitlines()[-1]
    assert [QueueConfig(n_readers=2, local_reader_ranks=(0, 1))] == configs


# --- Wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--readers", "0"], "'--readers': 0 is not in the range"),
        (["--readers", "5000"], "'--readers': 5000 is not in the range 1<=x<=4096"),
        (["--messages", "0"], "'--messages': 0 is not in the range"),
        (["--messages", "many"], "'--messages': 'many' is not a valid integer"),
        (["--nonsense"], "No such option '?--nonsense"),
        (["--config", "missing.toml"], "missing.toml: can't read it as a TOML file"),
        (["--config", "bad.toml"], r"bad.toml \[shmcast\]: n_chunks = 0 is not allowed"),
        (["missing.pt"], "File 'missing.pt' does not exist"),
        (["folder.pt"], "File 'folder.pt' is a directory"),
        (["good.npy", "words.txt"], "words.txt: not one of .pt, .pth, .npy, .safetensors"),
        (["empty.pt", "good.npy"], "empty.pt: can't be loaded: EOFError"),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with the input, the last line says so, with exit status 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "words.txt").write_text("words")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "bad.toml").write_text("[shmcast]\nn_chunks = 0\n")
    np.save(tmp_path / "good.npy", np.ones(3))
    result = shmcast("demo", *arguments)
    assert 2 == result.exit_code
    assert re.match(rf"Error: .*{text}", result.output.splitlines()[-1]), result.output


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
