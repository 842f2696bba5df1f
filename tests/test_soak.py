"""A queue that runs for a long time while readers come, leave and die does not grow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_chaos import by_hand, run

pytestmark = pytest.mark.proof


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [60, by_hand(8 * 3600, 8 * 60)])
def test_soak(seconds: int, record_property: Callable[[str, object], None]) -> None:
    """Memory, descriptors and threads of a writer and of a reader that stays are flat."""
    figures = run(record_property, "soak", "soak", seconds)
    assert {"kills of local", "kills of remote", "leaves"} <= figures.keys()
