"""What the tests share: processes that are always cleaned up, and ends that are always closed."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import hypothesis
import pytest

import shmcast.door
from shmcast import MessageQueue, MessageReader, QueueConfig, QueueFull, ShmcastError
from shmcast._system import memory_file

hypothesis.settings.register_profile(
    "shmcast",
    deadline=None,  # a loaded machine is no failure
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shmcast")

#: A hang limit, never a claim about speed.
PATIENCE_S = 30.0

#: Options of a Python that forks: from 3.12 on it warns if there is a second thread, as often is.
MAY_FORK = ("-W", "ignore:This process:DeprecationWarning")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """
    In how many processes the tests run: most wait for others more than they work.

    Files that are named run in this one.
    """
    if config.args_source is config.ArgsSource.ARGS:
        return 0
    return 2 * len(os.sched_getaffinity(0))


#: Files of which all tests that start no child make the minute after an edit: `pytest -m quick`.
QUICK = {
    *("arena", "config", "contract", "control", "errors", "handle", "interrupts", "layout"),
    *("misuse", "pickler", "queue", "relay", "ring", "segment"),
}


@pytest.hookimpl(tryfirst=True)  # before the tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the quick ones."""
    for item in items:
        if (
            item.path.stem.removeprefix("test_") in QUICK
            and not {"start_child", "start_processes"} & {*getattr(item, "fixturenames", ())}
            and not {"proof", "slow"} & {mark.name for mark in item.iter_markers()}
        ):
            item.add_marker("quick")


# What takes a child more than a second to import is there before it is forked.
multiprocessing.set_forkserver_preload(["hypothesis", "pytest", "shmcast", "torch", "zmq"])


def run_child(function: Callable[..., None], *arguments: Any) -> None:
    """Run a child's function; a memory file gets its threads' stacks on SIGUSR2."""
    file = memory_file("stacks", 0)
    faulthandler.register(signal.SIGUSR2, file)
    try:
        function(*arguments)
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        os.close(file)


class Child:
    """
    A process that runs a function of a test module, with a pipe to it.

    The function gets the other end of the pipe as its first argument.
    """

    def __init__(self, method: str, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context(method)
        self.pipe: Connection
        self.pipe, other = context.Pipe()
        arguments = (function, other, *arguments)
        self.process = context.Process(target=run_child, args=arguments, daemon=True)
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self, patience_s: float = PATIENCE_S) -> Any:
        """What the child sends next."""
        if not self.pipe.poll(patience_s):
            pytest.fail(f"the child sent nothing\n{self.state()}")
        return self.pipe.recv()

    def state(self) -> str:
        """Its masks of signals and where its threads are, to understand a hang."""
        process = Path(f"/proc/{self.pid}")
        status = process.joinpath("status").read_text(encoding="utf-8")
        os.kill(self.pid, signal.SIGUSR2)
        time.sleep(1)
        for file in process.joinpath("fd").iterdir():
            if str(file.readlink()).startswith("/memfd:stacks"):
                status += file.read_text(encoding="utf-8")
        return status

    def kill(self) -> None:
        """SIGKILL it and wait until it is gone."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive()

    def join(self) -> int | None:
        """Wait for its end; its exit code."""
        self.process.join(PATIENCE_S)
        assert not self.process.is_alive(), "the child did not end"
        return self.process.exitcode


class StartChild(Protocol):
    """The type of the fixture `start_child`."""

    def __call__(
        self, function: Callable[..., None], *arguments: Any, method: str = "forkserver"
    ) -> Child: ...


def answer_only_in_calls() -> None:
    """From now on the ends of this process do for others what their own calls do, and no more."""
    shmcast.door.Watch.watch = lambda *_: None  # type: ignore[method-assign]


@pytest.fixture
def only_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `answer_only_in_calls`, for the time of a test."""
    monkeypatch.setattr(shmcast.door.Watch, "watch", lambda *_: None)


def wait_for_remote_ends() -> None:
    """Wait until those of earlier tests are over, and their descriptors closed."""
    for thread in threading.enumerate():
        if thread.name == "shmcast-remote":
            thread.join(PATIENCE_S)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def count_descriptors() -> int:
    """How many descriptors this process has open."""
    wait_for_remote_ends()
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for_descriptors(before: int) -> None:
    """Wait until no more are open than before: the door thread may hold an end for one step."""
    wait_until(lambda: gc.collect() >= 0 and count_descriptors() <= before)


def enqueue_until(queue: MessageQueue, expected: type[ShmcastError]) -> ShmcastError:
    """Enqueue until the writer has looked around and says what it found."""
    found: list[ShmcastError] = []

    def enqueue() -> bool:
        try:
            queue.enqueue("?", timeout=0)
        except QueueFull:
            pass
        except expected as error:
            found.append(error)
        return bool(found)

    wait_until(enqueue)
    return found[0]


@contextlib.contextmanager
def tracing(trace: Callable[[FrameType, str, object], Any]) -> Iterator[None]:
    """
    Run a block under a trace function.

    The garbage collector is off meanwhile. It may run a destructor while the interpreter is about
    to call the function, and if the function raises there, CPython 3.11 calls freed memory.
    """
    previous, was_collecting = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys._getframe().f_trace_opcodes = True  # for Python 3.12, where one frame says it for all
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(previous)
        if was_collecting:
            gc.enable()


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> None:
    """The many collections of a file pass over what is there before it (200 ms each, else)."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def start_child() -> Iterator[StartChild]:
    """Start a function of the test module in another process, which ends with the test."""
    children: list[Child] = []

    def start(function: Callable[..., None], *arguments: Any, method: str = "forkserver") -> Child:
        child = Child(method, function, *arguments)
        children.append(child)
        return child

    yield start
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, 18)  # SIGCONT: a stopped process does not end
        child.process.kill()
        child.process.join(PATIENCE_S)
        child.pipe.close()


class MakeQueue(Protocol):
    """The type of the fixture `make_queue`."""

    def __call__(self, **settings: Any) -> tuple[MessageQueue, list[MessageReader]]: ...


@pytest.fixture
def make_queue() -> Iterator[MakeQueue]:
    """A queue with these settings and all its readers, attached, in this process."""
    with contextlib.ExitStack() as ends:

        def make(**settings: Any) -> tuple[MessageQueue, list[MessageReader]]:
            config = QueueConfig(**settings)
            queue = ends.enter_context(MessageQueue(config))
            handle = queue.export_handle()
            readers = [
                ends.enter_context(MessageQueue.create_from_handle(handle, rank))
                for rank in range(config.n_readers)
            ]
            queue.wait_until_ready(PATIENCE_S)
            for reader in readers:
                reader.wait_until_ready(PATIENCE_S)
            return queue, readers

        yield make


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """The most descriptors that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
