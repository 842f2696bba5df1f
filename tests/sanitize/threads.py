"""
Pass messages from a writer to two readers, all of them threads; for the thread sanitizer.

Usage: threads.py COUNT
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from shmcast import QueueConfig
from shmcast._ring import RingReader, RingWriter, read_numbers, write_numbers
from shmcast.layout import Layout
from shmcast.segment import Segment

SPIN_NS = 5_000  # some waits end while they poll, some sleep
SLEEP_NS = 10**12

count = int(sys.argv[1])
config = QueueConfig(n_readers=2, n_chunks=16, chunk_bytes=1024, arena_bytes="1 MiB")
# One mapping for all, since the sanitizer goes by addresses.
segment = Segment.create(Layout.of(config))
segment.reserve_arena(segment.layout.arena_offset, segment.layout.arena_bytes)
for index in range(config.n_chunks):
    segment.reserve_chunk(index, config.chunk_bytes)
writer = RingWriter(segment)
readers = [RingReader(segment, rank, writer.new_epoch(rank)) for rank in range(config.n_readers)]
for rank, reader in enumerate(readers):
    reader.begin(writer.admit(rank, True))
with ThreadPoolExecutor() as pool:
    results = [pool.submit(read_numbers, reader, count, SPIN_NS, SLEEP_NS) for reader in readers]
    pool.submit(write_numbers, writer, count, SPIN_NS, SLEEP_NS).result()
assert [0] * len(readers) == [result.result() for result in results]
