"""
What `test_distributed.py` starts on each rank: random messages, and readers that make them too.

Nothing that a reader compares with comes through the queue.
"""

import random
import sys

import torch.distributed as dist
from conftest import PATIENCE_S
from test_contract import KINDS, new_message, overwrite, print_of

from shmcast import MessageQueue, QueueConfig

CONFIG = QueueConfig.load(n_chunks=4)
EDGES = (0, CONFIG.oob_threshold_bytes, CONFIG.chunk_bytes)


def plan(seed: int) -> list[tuple[str, int]]:
    """Kinds and sizes: small, at the edges, several MiB."""
    choice = random.Random(seed)
    sizes = [edge + distance for edge in EDGES for distance in (-1, 0, 1, 4096)]
    sizes += [choice.randrange(2000) for _ in range(20)]
    sizes += [choice.randrange(3 << 20, 8 << 20) for _ in range(4)]
    choice.shuffle(sizes)
    return [(choice.choice(KINDS[:-1]), max(0, size)) for size in sizes]


def main(seed: int, writer_rank: int, local_rank: int) -> None:
    dist.init_process_group("gloo")
    with MessageQueue.create_from_process_group(None, CONFIG, writer_rank) as end:
        messages = (new_message(f"{seed} {index}", *kind) for index, kind in enumerate(plan(seed)))
        if isinstance(end, MessageQueue):
            assert (local_rank,) == end.export_handle().local_reader_ranks
            for message in messages:
                end.enqueue(message, PATIENCE_S)
                overwrite(message)
        else:
            for expected, message in zip(messages, end, strict=True):
                assert print_of(expected) == print_of(message)
            sys.stdout.write(f"reader {end.rank} got every message of seed {seed}\n")
    dist.destroy_process_group()


main(*map(int, sys.argv[1:]))
