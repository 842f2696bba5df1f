"""How the public API is used, with the types that a checker has to find. Never run."""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import os
import queue as queues
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, assert_type

import torch
import torch.distributed as dist

import shmcast
from shmcast import (
    DEFAULT_OOB_THRESHOLD_BYTES,
    AuthenticationError,
    ConfigError,
    Handle,
    MessageQueue,
    MessageReader,
    MessageTooLarge,
    ProtocolError,
    QueueClosed,
    QueueConfig,
    QueueEmpty,
    QueueFull,
    QueueNotReady,
    ReaderLost,
    ShmcastError,
    WriterFailed,
    WriterLost,
)

assert_type(DEFAULT_OOB_THRESHOLD_BYTES, Literal[1048576])


def configure(path: Path, like: os.PathLike[str]) -> QueueConfig:
    """Every field by keyword, every way to load."""
    config = QueueConfig(
        n_readers=3,
        local_reader_ranks=(0, 1),
        chunk_bytes=1 << 21,
        n_chunks=16,
        oob_threshold_bytes=0,
        arena_bytes=1 << 30,
        receive="private",
        spin_us=30,
        on_reader_loss="evict",
        warn_after_s=0.5,
        bind="tcp://192.0.2.1:0",
        security="curve",
    )
    assert_type(config, QueueConfig)
    assert_type(config.n_readers, int)
    assert_type(config.local_reader_ranks, tuple[int, ...] | None)
    assert_type(config.chunk_bytes, int)
    assert_type(config.n_chunks, int)
    assert_type(config.oob_threshold_bytes, int)
    assert_type(config.arena_bytes, int)
    assert_type(config.receive, Literal["private", "copy"])
    assert_type(config.spin_us, int)
    assert_type(config.on_reader_loss, Literal["raise", "evict"])
    assert_type(config.warn_after_s, float)
    assert_type(config.bind, str | None)
    assert_type(config.security, Literal["curve", "none"])
    assert_type(QueueConfig.load(), QueueConfig)
    assert_type(QueueConfig.load(path, n_readers=2), QueueConfig)
    assert_type(QueueConfig.load("shmcast.toml", chunk_bytes="4 MiB"), QueueConfig)
    return QueueConfig.load(like)


def sizes_with_units() -> QueueConfig:
    """Sizes may be written with a unit; the attribute is an int."""
    config = QueueConfig(chunk_bytes="64 KiB", oob_threshold_bytes="1 MiB", arena_bytes="1 GiB")
    assert_type(config.chunk_bytes, int)
    return config


def write(config: QueueConfig) -> None:
    """The writer's side."""
    with MessageQueue(config) as queue:
        assert_type(queue, MessageQueue)
        assert_type(queue.export_handle(), Handle)
        assert_type(queue.closed, bool)
        queue.wait_until_ready()
        queue.wait_until_ready(timeout=30)
        queue.enqueue({"step": 1})
        queue.enqueue(None, timeout=0.5)
        queue.enqueue([], None)
        tensor = queue.empty((2, 3), torch.bfloat16)
        assert_type(tensor, torch.Tensor)
        assert_type(queue.empty([1 << 20], dtype=torch.uint8), torch.Tensor)
        assert_type(queue.empty(shape=tensor.shape, dtype=tensor.dtype), torch.Tensor)
        queue.enqueue({"step": 1, "prompt_embeds": tensor})
        stats = queue.stats()
        assert_type(stats.messages, int)
        assert_type(stats.bytes, int)
        assert_type(stats.oob_buffers, int)
        assert_type(stats.oob_bytes, int)
        assert_type(stats.waits, int)
        assert_type(stats.wait_s, float)
        assert_type(stats.lag, tuple[int, ...])
        assert_type(stats.blocks_in_use, int)
        assert_type(stats.arena_bytes_in_use, int)
        assert_type(stats.fallbacks, int)
        assert_type(stats.losses, int)
        queue.close(timeout=30)
        queue.close(None, error="no disk")
    queue.close()
    queue.close(error=RuntimeError("no disk"))


def read(handle: Handle) -> Iterator[object]:
    """A reader's side."""
    with MessageQueue.create_from_handle(handle, rank=0) as reader:
        assert_type(reader, MessageReader)
        assert_type(reader.rank, int)
        assert_type(reader.closed, bool)
        reader.wait_until_ready(timeout=30)
        assert_type(reader.dequeue(), Any)
        assert_type(reader.dequeue(timeout=None), Any)
        assert_type(reader.stats().lag, int)
        assert_type(reader.stats().wait_s, float)
        for message in reader:
            assert_type(message, Any)
            yield message
    reader.close()
    reader.close(error="no disk")
    reader.close(error=KeyboardInterrupt())
    allowing = MessageQueue.create_from_handle(handle, 1, allow=("my.package:Step",))
    assert_type(allowing, MessageReader)


def take_part(group: dist.ProcessGroup) -> None:
    """A rank of a process group."""
    end = MessageQueue.create_from_process_group(group, QueueConfig(), writer_rank=1)
    assert_type(end, MessageQueue | MessageReader)
    MessageQueue.create_from_process_group(None)
    MessageQueue.create_from_process_group(group, {})  # type: ignore[arg-type]


def carry(handle: Handle, path: Path, like: os.PathLike[str]) -> Handle:
    """A handle's ways to the readers."""
    assert_type(handle.to_json(), str)
    assert_type(Handle.from_json(handle.to_json()), Handle)
    assert_type(handle.endpoint, str | None)
    assert_type(handle.n_readers, int)
    assert_type(handle.local_reader_ranks, tuple[int, ...])
    assert_type(handle.local_address, str)
    handle.save(path)
    handle.save("handle.json")
    handle.save(like)
    assert_type(Handle.load(path), Handle)
    return Handle.load("handle.json")


def catch(queue: MessageQueue, reader: MessageReader) -> object:
    """Every error, caught as itself and as what it also is."""
    try:
        queue.enqueue(1, timeout=1)
    except (QueueFull, ReaderLost, QueueNotReady) as error:
        assert_type(error.ranks, tuple[int, ...])
    except MessageTooLarge as error:
        as_base: ShmcastError = error
        return as_base
    try:
        return reader.dequeue(timeout=1)
    except QueueEmpty as error:
        as_empty: queues.Empty = error
        as_timeout: TimeoutError = error
        return as_empty, as_timeout
    except QueueClosed as error:
        as_end: EOFError = error
        return as_end
    except WriterFailed as error:
        as_loss: WriterLost = error
        return as_loss
    except (WriterLost, ProtocolError, AuthenticationError):
        return None
    except ConfigError as error:
        as_value: ValueError = error
        return as_value


def misuse(queue: MessageQueue, reader: MessageReader, handle: Handle) -> None:
    """What a checker has to refuse; an ignore that is not needed is an error too."""
    QueueConfig(2)  # type: ignore[call-arg]
    QueueConfig(n_reader=2)  # type: ignore[call-arg]
    QueueConfig(receive="alias")  # type: ignore[arg-type]
    QueueConfig(n_readers="2")  # type: ignore[arg-type]
    QueueConfig().n_readers = 2  # type: ignore[misc]
    MessageQueue()  # type: ignore[call-arg]
    MessageQueue(handle)  # type: ignore[arg-type]
    queue.empty((2, 3))  # type: ignore[call-arg]
    queue.empty((2, 3), "uint8")  # type: ignore[arg-type]
    queue.empty((2.5,), torch.uint8)  # type: ignore[arg-type]
    queue.empty(2, torch.uint8)  # type: ignore[arg-type]
    # The two ends are two types: each can do only what is its own.
    queue.dequeue()  # type: ignore[attr-defined]
    reader.enqueue(1)  # type: ignore[attr-defined]
    reader.empty((2, 3), torch.uint8)  # type: ignore[attr-defined]
    reader.export_handle()  # type: ignore[attr-defined]
    reader.rank = 1  # type: ignore[misc]
    reader.close(timeout=1)  # type: ignore[call-arg]
    queue.close(0, "no disk")  # type: ignore[misc]
    queue.close(error=RuntimeError)  # type: ignore[arg-type]
    shmcast.create_from_handle(handle, 0)  # type: ignore[attr-defined]
