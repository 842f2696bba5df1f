"""Ends that are killed and stopped at random: nothing is lost, repeated or torn, nobody hangs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_distributed import Hosts, hosts  # noqa: F401  # a fixture

pytestmark = pytest.mark.proof

#: Replays a run, as far as the timing of processes allows.
SEED = os.environ.get("CHAOS_SEED") or str(random.SystemRandom().randrange(10**9))


def by_hand(amount: int, minutes: int) -> Any:
    """An amount that takes this long, with a hang limit of four times that."""
    marks = [pytest.mark.slow, pytest.mark.timeout(4 * 60 * minutes)]
    return pytest.param(amount, marks=marks)


def run(
    record_property: Callable[[str, object], None], *arguments: object, start: Sequence[str] = ()
) -> dict[str, Any]:
    """Run `chaos.py` in a process of its own, where it can fork; its figures."""
    program = str(Path(__file__).with_name("chaos.py"))
    name, kind, amount = map(str, arguments)
    command = [*start, sys.executable, program, name, kind, SEED, amount]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert process.returncode == 0, f"replay: {' '.join(command)}"
    sys.stdout.write(process.stdout)
    figures: dict[str, Any] = json.loads(process.stdout)
    for figure in figures.items():
        record_property(*figure)
    return figures


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [40, by_hand(3600, 60)])
def test_chaos_of_the_core(seconds: int, record_property: Callable[[str, object], None]) -> None:
    """Killed readers and writers of small messages, without torch, hurt nobody else."""
    figures = run(record_property, "chaos", "bytes", seconds)
    assert {"kills of local", "kills of writer", "leaves", "stops"} <= figures.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [40, by_hand(1800, 30)])
def test_chaos_of_tensors(seconds: int, record_property: Callable[[str, object], None]) -> None:
    """Killed readers and writers of tensors up to 64 MiB, which others keep, hurt nobody else."""
    figures = run(record_property, "chaos", "tensors", seconds)
    assert {"kills of local", "kills of writer", "leaves", "stops"} <= figures.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [20, by_hand(1800, 30)])
def test_chaos_of_remote_readers(
    seconds: int, record_property: Callable[[str, object], None]
) -> None:
    """Killed readers and writers hurt nobody else where most readers are remote."""
    figures = run(record_property, "chaos", "remote", seconds)
    assert {"kills of remote", "kills of writer", "leaves", "stops"} <= figures.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [20, by_hand(1800, 30)])
def test_chaos_across_hosts(
    hosts: Hosts,  # noqa: F811  # the fixture
    seconds: int,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed readers and writers hurt nobody else where the remote readers share another host."""
    monkeypatch.setenv("OTHER_HOST", f"/run/netns/{hosts[1].name}")
    there = ("ip", "netns", "exec", hosts[0].name)
    figures = run(record_property, "chaos", "hosts", seconds, start=there)
    assert {"kills of remote", "kills of writer", "leaves", "stops"} <= figures.keys()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_kills", [200, by_hand(10_000, 15)])
def test_all_ends_killed_at_once(
    n_kills: int, record_property: Callable[[str, object], None]
) -> None:
    """Of a queue whose ends all die at one moment there is no name, socket or memory left."""
    figures = run(record_property, "groups", "bytes", n_kills)
    assert figures["memory files"] > 0  # they were there
