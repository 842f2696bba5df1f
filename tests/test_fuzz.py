"""Each fuzz target for a few seconds: led by coverage if there is atheris, else blindly."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE_S

pytestmark = pytest.mark.proof

TESTS = Path(__file__).parent
FUZZ_S = 4


@pytest.mark.parametrize("target", ["handle", "header", "chunk", "control", "frames", "pickles"])
def test_target(target: str, tmp_path: Path) -> None:
    """No input crashes, hangs or takes 512 MB, and each is taken or refused as the target says."""
    seed = random.randrange(1, 2**31)
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", target, f"-max_total_time={FUZZ_S}", f"-seed={seed}"],
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=FUZZ_S + PATIENCE_S,
        check=False,
    )
    inputs = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (0, {}) == (done.returncode, inputs), f"-seed={seed}\n{done.stderr[-3000:]}"
    runs = re.search(r"Done (\d+) runs", done.stderr)
    assert runs is not None
    assert int(runs[1]) > 50
