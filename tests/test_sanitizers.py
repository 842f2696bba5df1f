"""
The core under the compiler's sanitizers, each of which has to report what is planted for it.

Built by one command, such as `BUILD_SANITIZE=thread python setup.py build_ext --inplace`, in a copy
of the package. Python itself is not built with them.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from planted.bugs import OVERRUN, RACES, Bug
from planted.tree import build, copy_package, environment

# The first test of each kind builds a copy of the package.
pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.xdist_group("sanitizers")]

REPORTED = 66  # the exit status after a report


def library(name: str) -> str:
    """The sanitizer's library, which has to be loaded first."""
    compiler = shlex.split(sysconfig.get_config_var("CC"))
    found = subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler[0]} has no {name}")
    return found


def run(tree: Path, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=environment(tree, **variables),
        capture_output=True,
        text=True,
        check=False,
    )


# --- threads --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def threads_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package for the thread sanitizer."""
    library("libtsan.so")
    tree = tmp_path_factory.mktemp("threads") / "tree"
    loops = Path(__file__).parent / "sanitize" / "loops.pxi"
    copy_package(tree, RACES, loops.read_text())
    build(tree, "thread")
    return tree


def run_threads(
    tree: Path, arguments: list[str], planted: int = 0
) -> subprocess.CompletedProcess[str]:
    return run(
        tree,
        arguments,
        LD_PRELOAD=library("libtsan.so"),
        TSAN_OPTIONS=f"halt_on_error=1:exitcode={REPORTED}",
        PLANTED=str(planted),
    )


def pass_messages(tree: Path, count: int, planted: int = 0) -> subprocess.CompletedProcess[str]:
    """Pass messages between threads under the thread sanitizer."""
    return run_threads(tree, ["tests/sanitize/threads.py", str(count)], planted)


def test_no_race(threads_tree: Path) -> None:
    """Over a million messages to two readers the thread sanitizer reports nothing."""
    done = pass_messages(threads_tree, 1_000_000)
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_race_for_long(threads_tree: Path) -> None:
    """Over ten million messages to two readers the thread sanitizer reports nothing."""
    done = pass_messages(threads_tree, 10_000_000)
    assert (0, "") == (done.returncode, done.stderr)


@pytest.mark.slow
def test_no_race_with_the_gil(threads_tree: Path) -> None:
    """What the core does without the GIL races with nothing that other threads do with it."""
    tests = ["tests/test_ring.py", "tests/test_queue.py"]
    chosen = "not fork and (thread or wait or close or stats or timeout)"
    done = run_threads(threads_tree, ["-m", "pytest", "-q", "-x", "-s", *tests, "-k", chosen])
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("number", "bug"), list(enumerate(RACES, 1)), ids=[bug.kind for bug in RACES]
)
def test_relaxed_store_is_a_race(threads_tree: Path, number: int, bug: Bug) -> None:
    """The thread sanitizer reports each store that is relaxed instead of a release."""
    done = pass_messages(threads_tree, 300_000, number)
    assert REPORTED == done.returncode
    assert "ThreadSanitizer: data race" in done.stderr


# --- memory ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memory_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package for the sanitizers of addresses and of undefined behaviour."""
    library("libasan.so")
    tree = tmp_path_factory.mktemp("memory") / "tree"
    copy_package(tree, [OVERRUN])
    build(tree, "address,undefined")
    return tree


def run_tests(tree: Path, tests: list[str], planted: int = 0) -> subprocess.CompletedProcess[str]:
    """Run tests under the sanitizers of addresses and of undefined behaviour."""
    return run(
        tree,
        ["-m", "pytest", "-q", "-x", "-s", *tests],
        # It looks for what throws exceptions when it starts, and only torch uses that.
        LD_PRELOAD=f"{library('libasan.so')}:{library('libstdc++.so.6')}",
        ASAN_OPTIONS=f"detect_leaks=0:exitcode={REPORTED}",
        UBSAN_OPTIONS=f"halt_on_error=1:print_stacktrace=1:exitcode={REPORTED}",
        PYTHONMALLOC="malloc",  # the sanitizer does not see into Python's own blocks
        PLANTED=str(planted),
    )


def test_memory(memory_tree: Path) -> None:
    """The tests of the core pass under the sanitizers of addresses and undefined behaviour."""
    done = run_tests(memory_tree, ["tests/test_ring.py"])
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_for_long(memory_tree: Path) -> None:
    """So do those of the arena and of the contract."""
    done = run_tests(memory_tree, ["tests/test_arena.py", "tests/test_contract.py"])
    assert 0 == done.returncode, done.stdout + done.stderr


def test_overrun_is_reported(memory_tree: Path) -> None:
    """The address sanitizer reports a copy of one item too many."""
    done = run_tests(memory_tree, ["tests/test_ring.py::test_copy_strided"], 1)
    assert REPORTED == done.returncode, done.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
