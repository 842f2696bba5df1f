"""What the README shows runs as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import attrs
import pytest
from conftest import PATIENCE_S

from shmcast import QueueConfig, cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(first_line: str) -> str:
    """The code block that starts with this line."""
    found = re.findall(rf"^```\w+\n({re.escape(first_line)}\n.*?)^```$", README, re.DOTALL | re.M)
    assert 1 == len(found)
    return str(found[0])


def test_in_place(tmp_path: Path) -> None:
    """The program with a tensor that is published in place runs without a word."""
    program = tmp_path / "in_place.py"
    program.write_text(block("# in_place.py"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert (0, b"") == (done.returncode, done.stdout)


def test_quick_start(tmp_path: Path) -> None:
    """The writer and two readers of the quick start run as three programs, and all is well."""
    for name in ("writer.py", "reader.py"):
        (tmp_path / name).write_text(block(f"# {name}"), encoding="utf-8")

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    programs = [start("writer.py")]
    try:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not (tmp_path / "queue.json").exists():
            assert programs[0].poll() is None, programs[0].stdout
            assert time.monotonic() < deadline, "the writer saved no handle"
            time.sleep(0.02)
        programs += [start("reader.py", str(rank)) for rank in range(2)]
        outputs = [program.communicate(timeout=2 * PATIENCE_S)[0] for program in programs]
        assert [0, 0, 0] == [program.returncode for program in programs], outputs
        assert ["", *(f"reader {rank} got every message\n" for rank in range(2))] == outputs
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_settings_file(tmp_path: Path) -> None:
    """The documented file and the documented variables give what they say."""
    file = tmp_path / "shmcast.toml"
    file.write_text(block("# shmcast.toml"), encoding="utf-8")
    expected = QueueConfig(
        n_readers=4, n_chunks=32, oob_threshold_bytes="256 KiB", on_reader_loss="evict"
    )
    assert expected == QueueConfig.load(file)


def test_settings_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the README give what the README's file gives."""
    line = re.search(r"`(SHMCAST_N_READERS=.*?)`", README)
    assert line is not None
    for assignment in shlex.split(line[1]):
        monkeypatch.setenv(*assignment.split("=", 1))
    assert QueueConfig(n_readers=4, oob_threshold_bytes="256 KiB") == QueueConfig.load()


def test_every_setting_is_listed() -> None:
    """The table of settings has every setting, and no other."""
    table = README.partition("| setting | default | meaning |")[2].partition("\n\n")[0]
    names = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert sorted(field.name for field in attrs.fields(QueueConfig)) == sorted(names)


def without_figures(text: str) -> list[str]:
    """The words of its lines: tables of any width, and figures of any size, give the same."""
    return [" ".join(re.findall(r"[^\W\d]+|%", line)) for line in text.splitlines()]


def test_demo_sample(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of the demo's output has the words that the demo prints, line by line."""
    monkeypatch.setenv("COLUMNS", "200")
    # Two of each kind, of which the first is left out.
    cli._show([cli._Sent(size, [0.001, 0.002]) for size in (1 << 20, 1 << 20, 100, 100)])
    printed = capsys.readouterr().out
    assert "bit for bit at 2 readers" in printed
    (sample,) = re.findall(r"^```text\n(┏.*?)^```$", README, re.DOTALL | re.M)
    assert without_figures(printed) == without_figures(sample)


def test_extra_for_files() -> None:
    """The extra that the README names has every package that the demo's files need."""
    assert 'pip install -c constraints.txt ".[files]"' in README
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["files"]
    assert ["numpy", "safetensors"] == sorted(re.split(r"\W", package)[0] for package in extra)


def test_the_two_commands() -> None:
    """The README has the two commands, word for word, and the checks run the second one."""
    commands = re.findall(r"^```console\n(.*?)\n```$", README, re.DOTALL | re.M)
    assert [
        "pip install -c constraints.txt . && shmcast demo",
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ] == commands
    checks = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'pip install -q -c constraints.txt -e ".[test]"\n' in checks
    assert "\npytest\n" in checks
