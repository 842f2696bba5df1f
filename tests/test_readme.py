"""What the documentation shows runs as printed."""

from __future__ import annotations

import importlib.util
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
from planted.bugs import BUGS

from shmcast import QueueConfig, demo

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in (
        "README.md",
        "shmcast/README.md",
        "tests/README.md",
        "bench/README.md",
        ".github/CONTRIBUTING.md",
        ".github/SECURITY.md",
        ".github/CHANGELOG.md",
    )
}
README = PAGES["README.md"]
HANDBOOK = PAGES["shmcast/README.md"]
MOST_WORDS = 1400  # of the README: what is longer has a page of its own


def block(first_line: str) -> str:
    """The code block of the README or the handbook that starts with this line."""
    pattern = rf"^```\w+\n({re.escape(first_line)}\n.*?)^```$"
    found = re.findall(pattern, README + HANDBOOK, re.DOTALL | re.M)
    assert 1 == len(found)
    return str(found[0])


def run(program: Path) -> tuple[int, str]:
    """The exit status of a program, and what it wrote."""
    done = subprocess.run(
        [sys.executable, program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", ["in_place.py", "child_writes.py", "tied_weights.py"])
def test_a_program(tmp_path: Path, name: str) -> None:
    """A program that is complete in itself runs without a word."""
    program = tmp_path / name
    program.write_text(block(f"# {name}"), encoding="utf-8")
    assert (0, "") == run(program)


#: A recipe's package, what is sent, what is compared, and the most bytes that it takes.
RECIPES = {
    "arrow_tables": (
        "pyarrow",
        "pyarrow.table({'n': range(1_000_000)}).slice(5, 10)",
        "got.equals(sent)",
        10_000,
    ),
    "pillow_images": (
        "PIL.Image",
        "PIL.Image.linear_gradient('L').resize((2000, 1000)).convert('RGB')",
        "(got.mode, got.size, got.tobytes()) == (sent.mode, sent.size, sent.tobytes())",
        6_010_000,
    ),
    "jax_arrays": (
        "jax.numpy",
        "jax.numpy.arange(1_000_000).astype('bfloat16')",
        "type(got) is type(sent) and got.dtype == sent.dtype and bool((got == sent).all())",
        2_010_000,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe(tmp_path: Path, name: str) -> None:
    """A rule for a class of another package sends it whole, and no more of it than needed."""
    package, sent, comparison, most_bytes = RECIPES[name]
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / f"{name}.py").write_text(block(f"# {name}.py"), encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(
        f"""
import {name}
import {package}
from shmcast import MessageQueue, QueueConfig

sent = {sent}
with MessageQueue(QueueConfig()) as queue:
    with MessageQueue.create_from_handle(queue.export_handle(), rank=0) as reader:
        queue.enqueue(sent)
        got = reader.dequeue()
        stats = queue.stats()
assert {comparison}
assert stats.bytes < {most_bytes}, stats
assert stats.bytes < 10_000 or stats.oob_bytes > 0.9 * stats.bytes, stats
"""
    )
    assert (0, "") == run(program)


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
    """The handbook's sample of the demo's output has the words that the demo prints."""
    monkeypatch.setenv("COLUMNS", "200")
    # Two of each kind, of which the first is left out.
    demo.show([demo.Sent(size, [0.001, 0.002]) for size in (1 << 20, 1 << 20, 100, 100)])
    printed = capsys.readouterr().out
    assert "bit for bit at 2 readers" in printed
    (sample,) = re.findall(r"^```text\n(┏.*?)^```$", HANDBOOK, re.DOTALL | re.M)
    assert without_figures(printed) == without_figures(sample)


def test_extra_for_files() -> None:
    """The extra that the handbook names has every package that the demo's files need."""
    assert 'pip install -c constraints.txt ".[files]"' in HANDBOOK
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


def test_the_readme_is_short() -> None:
    """The README has no more words than a newcomer reads."""
    assert len(README.split()) <= MOST_WORDS


def anchors_of(page: str) -> set[str]:
    """What a link can name in a page: its headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links(name: str) -> None:
    """Every link of a page leads to a file of the repository, and to a heading in it."""
    links = re.findall(r"\]\(([^)#]*)#?([^)]*)\)", PAGES[name])
    targets = [(ROOT / name).parent / path if path else ROOT / name for path, _ in links]
    assert [] == [target for target in targets if not target.exists()]
    pairs = zip(targets, (anchor for _, anchor in links), strict=True)
    assert [] == [
        (target, anchor)
        for target, anchor in pairs
        if anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))
    ]


def test_the_planted_bugs_are_counted() -> None:
    """The page about the tests says how many bugs are planted."""
    assert f"`test_planted` puts {len(BUGS)} bugs into" in PAGES["tests/README.md"]
