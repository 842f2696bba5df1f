"""Killed before each instruction of the core, and at each system call of attaching and closing."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from conftest import PATIENCE_S, StartChild
from victims import (
    ReaderScenario,
    Scenario,
    WriterScenario,
    kill_at_each_instruction,
    kill_at_each_system_call,
    may_trace,
)

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        not may_trace(), reason="a child may not be traced here, or the processor is another one"
    ),
]


@pytest.mark.parametrize(
    "new_scenario",
    [
        functools.partial(WriterScenario, in_block=False),
        functools.partial(ReaderScenario, "take", in_block=False),
        functools.partial(ReaderScenario, "give up", in_block=True),
        functools.partial(ReaderScenario, "leave", in_block=False),
        pytest.param(functools.partial(WriterScenario, in_block=True), marks=pytest.mark.slow),
        pytest.param(
            functools.partial(ReaderScenario, "take", in_block=True), marks=pytest.mark.slow
        ),
    ],
    ids=["publish", "take", "give up", "leave", "publish a block", "take a block"],
)
def test_each_instruction(
    new_scenario: Callable[[], Scenario],
    start_child: StartChild,
    record_property: Callable[[str, object], None],
) -> None:
    """Whatever instruction an end is killed at, its work is done or not, and the others go on."""
    outcomes = start_child(kill_at_each_instruction, new_scenario).receive(2 * PATIENCE_S)
    record_property("instructions", len(outcomes) - 1)
    first_done = outcomes.index(1)
    assert [0] * first_done + [1] * (len(outcomes) - first_done) == outcomes
    assert first_done > 0


@pytest.mark.parametrize("action", ["attach", "close"])
def test_each_system_call(
    action: str, start_child: StartChild, record_property: Callable[[str, object], None]
) -> None:
    """Killed at any system call of attaching or closing, a reader leaves its rank to others."""
    n_stops = start_child(kill_at_each_system_call, action).receive(2 * PATIENCE_S)
    record_property("stops", n_stops)
    assert n_stops > 0
