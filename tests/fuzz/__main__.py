"""
Fuzz one target: `PYTHONPATH=tests python -m fuzz handle -max_total_time=600 [folder of inputs]`.

The targets are the other modules of this folder; the options are libFuzzer's. With atheris (the
extra `fuzz`) what an input covers leads to the next one. Without it, inputs are the target's seeds
changed at random, and of the options only `-max_total_time` and `-seed` count.
"""

import importlib
import importlib.util
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MOST_MB = 512
WORDS = [0, 1, 3, 40, 64, 255, 4096, 2**31 - 1, 2**32 - 1, 2**61, 2**63, 2**64 - 1]


def changed(seeds: Sequence[bytes], chance: random.Random) -> bytes:
    """One of the seeds with a few changes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        start = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[start : start + 1] = chance.randbytes(1)
            case 1:
                n_bytes = chance.choice((1, 4, 8))
                word = chance.choice(WORDS) % 256**n_bytes
                aligned = start // n_bytes * n_bytes
                data[aligned : aligned + n_bytes] = word.to_bytes(n_bytes, "little")
            case 2:
                del data[start : start + chance.choice((1, 8, 1000))]
            case 3:
                other = chance.choice(seeds)
                data[start:start] = other[chance.randrange(len(other) + 1) :][:64]
            case 4:
                data[start : start + 8] = data[chance.randrange(len(data) + 1) :][:8]
    return bytes(data)


def fuzz_blindly(
    one_input: Callable[[bytes], None], seeds: Sequence[bytes], options: Sequence[str]
) -> None:
    """Run inputs until the time is up. The one that ends it is left in the file `crash`."""
    given = dict(option.lstrip("-").split("=", 1) for option in options if "=" in option)
    chance = random.Random(int(given.get("seed", random.randrange(2**32))))
    end = time.monotonic() + float(given.get("max_total_time", "inf"))
    _, _, used = Path("/proc/self/status").read_text().partition("VmData:")
    most_bytes = int(used.split()[0]) * 1024 + MOST_MB * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    last = os.open("crash", os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
    n_runs = 0
    while time.monotonic() < end:
        data = seeds[n_runs] if n_runs < len(seeds) else changed(seeds, chance)
        os.ftruncate(last, 0)
        os.pwrite(last, data, 0)
        one_input(data)
        n_runs += 1
    Path("crash").unlink()
    sys.stderr.write(f"Done {n_runs} runs\n")


def main() -> None:
    name, *options = sys.argv[1:]
    logging.disable()
    if importlib.util.find_spec("atheris") is None:
        target = importlib.import_module(f"fuzz.{name}")
        fuzz_blindly(target.one_input, target.SEEDS, options)
        return
    import atheris

    chance = random.Random()

    def mutate(data: bytes, most_bytes: int, seed: int) -> bytes:
        # What is compiled shows no coverage, so many inputs begin with a seed.
        chance.seed(seed)
        if chance.random() < 0.3:
            return bytes(atheris.Mutate(data, most_bytes))
        return changed([data, *target.SEEDS], chance)[:most_bytes]

    with atheris.instrument_imports(include=["shmcast"]):
        target = importlib.import_module(f"fuzz.{name}")
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate(target.SEEDS):
            Path(folder, str(index)).write_bytes(seed)
        limits = [f"-rss_limit_mb={MOST_MB}", "-timeout=10", "-max_len=2048"]
        atheris.Setup(
            [sys.argv[0], *limits, *options, folder], target.one_input, custom_mutator=mutate
        )
        atheris.Fuzz()


main()
