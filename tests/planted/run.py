"""
Run pytest in one fork after another of a program that has imported what takes long.

Reads lines of PLANTED and the tests, separated by tabs; answers each with the exit status.
"""

import os
import sys

import hypothesis  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import torch  # noqa: F401

# Else pytest complains that hypothesis is there already.
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
OPTIONS = ["-q", "-x", "-p", "pytest_timeout", "-p", "xdist.plugin", "-m", "slow or not slow"]

for line in sys.stdin:
    os.environ["PLANTED"], *tests = line.rstrip("\n").split("\t")
    pid = os.fork()
    if pid == 0:
        status = -1
        try:
            os.dup2(2, 1)
            status = pytest.main([*OPTIONS, *tests])
        finally:
            os._exit(status)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    sys.stdout.flush()
