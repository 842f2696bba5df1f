"""Planted bugs: each of them is noticed by the tests that are named with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest
from conftest import PATIENCE_S
from planted.bugs import BUGS, Bug
from planted.tree import build, copy_package, environment, replace

# The first test builds a copy of the package.
pytestmark = [pytest.mark.proof, pytest.mark.timeout(600), pytest.mark.xdist_group("planted")]

#: A bug may show as a hang, which takes so long.
SHORT_PATIENCE_S = 6.0

RunTests = Callable[[int, Iterable[str]], int]


@pytest.fixture(scope="module")
def run_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunTests]:
    """Run tests in a copy of the package that has all bugs, one of them awake; pytest's status."""
    tree = tmp_path_factory.mktemp("planted") / "tree"
    copy_package(tree, BUGS)
    conftest = tree / "tests" / "conftest.py"
    replace(conftest, f"PATIENCE_S = {PATIENCE_S}", f"PATIENCE_S = {SHORT_PATIENCE_S}")
    build(tree)
    with subprocess.Popen(
        [sys.executable, "tests/planted/run.py"],
        cwd=tree,
        env=environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        questions, answers = program.stdin, program.stdout
        assert questions is not None
        assert answers is not None

        def status_of(number: int, tests: Iterable[str]) -> int:
            line = "\t".join([str(number), *(f"tests/{test}" for test in tests)])
            questions.write(f"{line}\n")
            questions.flush()
            return int(answers.readline())

        yield status_of


def test_no_bug_is_awake(run_tests: RunTests) -> None:
    """The same tests pass in the copy when no bug is awake."""
    tests = {test: None for bug in BUGS if not bug.is_slow for test in bug.tests}
    assert pytest.ExitCode.OK == run_tests(0, tests)


@pytest.mark.parametrize(
    ("number", "bug"),
    [
        pytest.param(number, bug, marks=pytest.mark.slow if bug.is_slow else (), id=bug.kind)
        for number, bug in enumerate(BUGS, 1)
    ],
)
def test_bug_is_noticed(run_tests: RunTests, number: int, bug: Bug) -> None:
    """With the bug awake its tests fail, or their process dies of a signal."""
    status = run_tests(number, bug.tests)
    assert status == pytest.ExitCode.TESTS_FAILED or status < 0
