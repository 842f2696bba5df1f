"""What a large tensor costs in memory, at the writer and at a reader that keeps it."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from conftest import PATIENCE_S, MakeQueue, StartChild

from shmcast import MessageQueue, QueueConfig

MIB = 1 << 20
SIZE_MIB = 240


def memory_mib(field: str) -> float:
    """A line of this process's memory, such as "RssAnon", in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(field)


def file_mib() -> float:
    """The memory that this process's memory files have, mapped or not."""
    entries = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    names = {entry: str(entry.readlink()) for entry in entries}
    files = [entry for entry, name in names.items() if name.startswith("/memfd:shmcast")]
    return sum(file.stat().st_blocks for file in files) * 512 / MIB


def forget_peak() -> None:
    """Let VmHWM, the most memory so far, start again from now."""
    Path("/proc/self/clear_refs").write_text("5")


def write(pipe: Connection) -> None:
    """Publish a tensor when told, and say what that took: mapped at most, and in files."""
    tensor = torch.ones(SIZE_MIB * MIB // 2, dtype=torch.bfloat16)
    with MessageQueue(QueueConfig()) as queue:
        pipe.send(queue.export_handle())
        queue.wait_until_ready(PATIENCE_S)
        queue.enqueue(tensor[: 2 * MIB])  # what is loaded and reserved the first time
        pipe.recv()
        gc.collect()
        forget_peak()
        before_mib, before_in_files_mib = memory_mib("VmRSS"), file_mib()
        queue.enqueue(tensor)
        pipe.send((memory_mib("VmHWM") - before_mib, file_mib() - before_in_files_mib))
        pipe.recv()


@pytest.mark.parametrize("n_pages_written", [0, 1000])
def test_memory_of_a_tensor(start_child: StartChild, n_pages_written: int) -> None:
    """The writer needs one block beside its tensor, a reader only the pages that it writes."""
    child = start_child(write)
    with MessageQueue.create_from_handle(child.receive(), 0) as reader:
        reader.dequeue(PATIENCE_S)
        before_mib = memory_mib("RssAnon")
        child.pipe.send("go")
        mapped_mib, in_files_mib = child.receive()
        assert in_files_mib < SIZE_MIB + 4
        assert mapped_mib < SIZE_MIB + 4

        tensor = reader.dequeue(PATIENCE_S)
        assert tensor.count_nonzero() == tensor.numel()
        tensor.view(torch.uint8)[: n_pages_written * 4096] = 7
        assert n_pages_written / 256 + 8 > memory_mib("RssAnon") - before_mib
    child.pipe.send("end")


def test_memory_of_a_message_in_a_file(make_queue: MakeQueue) -> None:
    """A message larger than the arena is one copy: its readers copy only what is small in it."""
    sent = {f"layer {number}": torch.full((MIB,), number) for number in range(16)}
    sent |= {f"bias {number}": torch.full((1000,), number) for number in range(16)}
    queue, readers = make_queue(n_readers=2, arena_bytes="64 MiB")
    queue.enqueue("what is loaded the first time")
    for reader in readers:
        reader.dequeue(PATIENCE_S)
    before_mib, in_files_mib = memory_mib("RssAnon"), file_mib()
    queue.enqueue(sent, PATIENCE_S)
    received = [reader.dequeue(PATIENCE_S) for reader in readers]
    assert 1 == queue.stats().fallbacks
    for message in received:
        assert all(torch.equal(tensor, message[name]) for name, tensor in sent.items())
    assert memory_mib("RssAnon") - before_mib < 0.05 * 128
    assert file_mib() - in_files_mib < 1  # no block was reserved for what does not fit
    received[0]["layer 3"].fill_(-1)
    assert torch.equal(sent["layer 3"], received[1]["layer 3"])


def test_closing_frees_the_memory(make_queue: MakeQueue) -> None:
    """The memory goes with `close`, and not when the garbage collector comes by."""

    def n_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shmcast")

    before = n_mapped()
    gc.disable()
    try:
        queue, (reader,) = make_queue()
        queue.enqueue(torch.zeros(MIB))
        assert 0 == int(reader.dequeue(PATIENCE_S).max())
        assert n_mapped() > before
        queue.close()
        reader.close()
        assert before == n_mapped()
    finally:
        gc.enable()
