"""Copies of the package, to be broken and built in other ways."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from planted.bugs import Bug

__all__ = ["build", "copy_package", "environment", "replace"]

ROOT = Path(__file__).parents[2]


def copy_package(tree: Path, bugs: Sequence[Bug], more_of_the_core: str = "") -> None:
    """
    Copy the package and its tests, with all these bugs asleep in it.

    Bug number i, counted from 1, is awake if PLANTED is i when `shmcast` is imported.

    Args:
        tree: a folder that does not exist.
        bugs: what to plant.
        more_of_the_core: is added to `_ring.pyx`.
    """
    built = shutil.ignore_patterns("*.so", "_ring.c", "__pycache__")
    for name in ("shmcast", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    replace(tree / "setup.py", '"-O2"', '"-O0"')  # a quarter of the time to build
    core = tree / "shmcast" / "_ring.pyx"
    number = 'cdef int planted = int(os.environ.get("PLANTED", 0))\nPLANTED = planted\n'
    replace(core, "IMAGE_HEADER_BYTES = ", f"{number}IMAGE_HEADER_BYTES = ")
    for name in {bug.file for bug in bugs} - {core.name}:
        start, more = "import annotations\n", "\nfrom shmcast._ring import PLANTED as planted\n"
        replace(tree / "shmcast" / name, start, start + more)
    for index, bug in enumerate(bugs, 1):
        _plant(tree / "shmcast" / bug.file, index, bug)
    with core.open("a") as file:
        file.write(more_of_the_core)


def _plant(path: Path, index: int, bug: Bug) -> None:
    right, wrong = bug.right.lstrip("\n"), bug.wrong.lstrip("\n")
    indent = " " * (len(right) - len(right.lstrip()))
    choice = f"{indent}if planted == {index}:\n{textwrap.indent(wrong, '    ')}"
    replace(path, right, f"{choice}{indent}else:\n{textwrap.indent(right, '    ')}")


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that the file has once."""
    text = path.read_text()
    assert 1 == text.count(old), f"{path.name} has it {text.count(old)} times: {old}"
    path.write_text(text.replace(old, new))


def build(tree: Path, sanitizers: str = "") -> None:
    """Build the extension of a copy, with these sanitizers of the compiler."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=tree,
        env={**os.environ, "BUILD_SANITIZE": sanitizers},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr


def environment(tree: Path, **variables: str) -> dict[str, str]:
    """The variables of a program that uses a copy."""
    return {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'tests'}", **variables}
