"""Models of the core's protocols: every run keeps the promises, and a flaw in any breaks them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import pytest
from explorer import (
    ACQUIRE,
    FULL,
    RELAXED,
    RELEASE,
    Add,
    Ended,
    Explorer,
    Fence,
    IsDead,
    Load,
    Program,
    Read,
    Sleep,
    Step,
    Store,
    Violation,
    Wake,
    Write,
    require,
)

pytestmark = pytest.mark.proof

Round = Generator[Step, Any, Any]
Record = Callable[[str, object], None]


# --- the memory model itself ----------------------------------------------------------------------


def outcomes(words: str, **threads: list[Step]) -> set[tuple[int, ...]]:
    """What the loads of these straight programs may find, thread after thread."""

    def program(steps: tuple[Step, ...]) -> Round:
        found = []
        for step in steps:
            result = yield step
            if isinstance(step, Load):
                found.append(result)
        return Ended(tuple(found))

    seen: set[tuple[int, ...]] = set()
    Explorer(
        dict.fromkeys(words, 0),
        {name: (program, tuple(steps)) for name, steps in threads.items()},
        mortal=(),
        check=lambda verdicts, _: seen.add(tuple(itertools.chain(*verdicts.values()))),
    ).explore()
    return seen


@pytest.mark.parametrize(
    ("release", "acquire"), [(RELEASE, ACQUIRE), (RELEASE, RELAXED), (RELAXED, ACQUIRE)]
)
def test_a_flag_brings_its_data_only_by_release_and_acquire(release: str, acquire: str) -> None:
    """Who sees a flag sees what came before it if both sides are ordered, and only then."""
    found = outcomes(
        "xy",
        a=[Store("x", 1), Store("y", 1, release)],
        b=[Load("y", acquire), Load("x")],
    )
    expected = {(0, 0), (0, 1), (1, 1)}
    if (release, acquire) != (RELEASE, ACQUIRE):
        expected |= {(1, 0)}
    assert expected == found


@pytest.mark.parametrize("fences", [(), ("a",), ("b",), ("a", "b")])
def test_two_marks_miss_each_other_without_two_fences(fences: tuple[str, ...]) -> None:
    """Of two threads that each store a mark and look for the other's, one sees it by two fences."""

    def steps(name: str, own: str, other: str) -> list[Step]:
        fence = [Fence(FULL)] if name in fences else []
        return [Store(own, 1, RELEASE), *fence, Load(other, ACQUIRE)]

    found = outcomes("xy", a=steps("a", "x", "y"), b=steps("b", "y", "x"))
    expected = {(0, 1), (1, 0), (1, 1)} | ({(0, 0)} if len(fences) < 2 else set())
    assert expected == found


def test_relaxed_loads_and_an_acquire_fence_are_one_acquire() -> None:
    """Loads that found something new make later loads find it after an acquire fence."""
    found = outcomes(
        "xy",
        a=[Store("y", 1), Fence(FULL), Store("x", 1)],
        b=[Load("x"), Fence(ACQUIRE), Load("y")],
    )
    assert {(0, 0), (0, 1), (1, 1)} == found


def test_a_word_has_one_order() -> None:
    """Two threads that load a word twice never find its two stores in different orders."""
    found = outcomes(
        "x",
        a=[Store("x", 1)],
        b=[Store("x", 2)],
        c=[Load("x"), Load("x")],
        d=[Load("x"), Load("x")],
    )
    assert (1, 2, 1, 2) in found
    assert (1, 2, 2, 1) not in found
    assert all(pair not in {(1, 0), (2, 0)} for pair in {run[:2] for run in found})


def test_additions_are_never_lost() -> None:
    """Two threads that add to a word make it 2."""
    last = []
    Explorer(
        {"x": 0},
        dict.fromkeys("ab", (adding, None)),
        mortal=(),
        check=lambda _, words: last.append(words["x"]),
    ).explore()
    assert {2} == set(last)


def adding(_: None) -> Round:
    yield Add("x")
    return Ended(None)


# --- the ring: RingWriter._publish and _refresh, RingReader.try_take and release ------------------


class Ring:
    """
    A writer and its readers, any of which may be killed: `MessageQueue.enqueue`, `_look`, `_finish`
    and `MessageReader._wait_for_message`.

    A message is its number, in two words of a chunk.
    """

    def __init__(self, flaw: str, n_readers: int, n_chunks: int, n_messages: int) -> None:
        self.flaw, self.n_chunks, self.n_messages = flaw, n_chunks, n_messages
        self.readers = [f"reader {rank}" for rank in range(n_readers)]

    def order(self, name: str, order: str) -> str:
        return RELAXED if self.flaw == f"{name} is relaxed" else order

    def chunk(self, number: int) -> tuple[str, str]:
        return f"head {number % self.n_chunks}", f"body {number % self.n_chunks}"

    def explore(self) -> int:
        words = dict.fromkeys(
            ["published", "closing", *map("cursor of {}".format, self.readers)], 0
        )
        words |= dict.fromkeys(itertools.chain(*map(self.chunk, range(self.n_chunks))), -1)
        threads: dict[str, tuple[Program, Any]] = {
            reader: (self.reader(reader), 0) for reader in self.readers
        }
        cursors = tuple((reader, 0) for reader in self.readers)
        threads["writer"] = self.writer, (0, cursors)
        return Explorer(words, threads, mortal=threads, check=self.check).explore()

    def writer(self, state: tuple[int, tuple[tuple[str, int], ...]]) -> Round:
        published, cursors = state
        if published == self.n_messages or not cursors:
            yield Store("closing", 1, self.order("the closing store", RELEASE))
            return Ended("closed")
        room = self.n_chunks + (self.flaw == "one chunk too many")
        if published - min(cursor for _, cursor in cursors) >= room:
            return published, (yield from self.refreshed(cursors))
        publish = Store("published", published + 1, self.order("the publishing store", RELEASE))
        if self.flaw == "published before it is copied":
            yield publish
        for word in self.chunk(published):
            yield Write(word, published, tuple(reader for reader, _ in cursors))
        if self.flaw != "published before it is copied":
            yield publish
        return published + 1, cursors

    def refreshed(self, cursors: tuple[tuple[str, int], ...]) -> Round:
        """The cursors of the readers that are alive."""
        fresh = []
        for reader, _ in cursors:
            acquire = self.order("the load of a cursor", ACQUIRE)
            cursor = yield Load(f"cursor of {reader}", acquire)
            if not (yield IsDead(reader)):
                fresh.append((reader, cursor))
        return tuple(fresh)

    def reader(self, name: str) -> Program:
        def take(cursor: int) -> Round:
            lag = 0
            if self.flaw == "closing is looked at after the counter":
                lag = (yield Load("published", ACQUIRE)) - cursor
            acquire = self.order("the load of the counter", ACQUIRE)
            if (yield Load("published", acquire)) > cursor:
                release = Store(
                    f"cursor of {name}", cursor + 1, self.order("the releasing store", RELEASE)
                )
                if self.flaw == "released before it is copied":
                    yield release
                for word in self.chunk(cursor):
                    number = yield Read(word)
                    require(number == cursor, f"{name} takes {number} for {cursor}")
                if self.flaw != "released before it is copied":
                    yield release
                return cursor + 1
            is_closing = yield Load("closing", self.order("the load of the closing mark", ACQUIRE))
            if self.flaw != "closing is looked at after the counter":
                lag = (yield Load("published", ACQUIRE)) - cursor
            if is_closing and not lag:
                return Ended(("closed", cursor))
            is_dead = yield IsDead("writer")
            if self.flaw != "no second look at the counter":
                lag = (yield Load("published", ACQUIRE)) - cursor
                is_closing = yield Load("closing", ACQUIRE)
            if lag or is_closing or not is_dead:
                return cursor
            return Ended(("lost", cursor))

        return take

    def check(self, verdicts: dict[str, Any], words: dict[str, int]) -> None:
        right = "closed" if words["closing"] else "lost"
        for reader in self.readers:
            end, taken = verdicts.get(reader, (right, words["published"]))
            text = f"{reader}: {end} after {taken} of {words['published']}"
            require((end, taken) == (right, words["published"]), text)


@pytest.mark.parametrize(("n_readers", "n_chunks", "n_messages"), [(1, 1, 3), (1, 2, 5), (2, 1, 2)])
def test_the_ring(n_readers: int, n_chunks: int, n_messages: int, record_property: Record) -> None:
    """Every reader gets every message whole and in order, and the right end, whoever is killed."""
    record_property("states", Ring("", n_readers, n_chunks, n_messages).explore())


@pytest.mark.parametrize(
    ("flaw", "violation"),
    [
        ("the publishing store is relaxed", "takes -1 for 0"),
        ("the load of the counter is relaxed", "takes -1 for 0"),
        ("published before it is copied", "takes -1 for 0"),
        ("the releasing store is relaxed", "comes before reader 0 has read"),
        ("the load of a cursor is relaxed", "comes before reader 0 has read"),
        ("released before it is copied", "takes 2 for 0"),
        ("one chunk too many", "takes 2 for 0"),
        ("the closing store is relaxed", "closed after 2 of 3"),
        ("the load of the closing mark is relaxed", "closed after 2 of 3"),
        ("closing is looked at after the counter", "closed after 2 of 3"),
        ("no second look at the counter", "lost after 0 of 1"),
    ],
)
def test_a_flawed_ring(flaw: str, violation: str) -> None:
    """The ring needs each of its orders and steps."""
    with pytest.raises(Violation, match=f"{violation}$"):
        Ring(flaw, n_readers=1, n_chunks=2, n_messages=3).explore()


# --- the sleep marks ------------------------------------------------------------------------------


class SleepMark:
    """
    RingReader._sleep and RingWriter._wake_readers; or, which is the same, _sleep_for_space and
    RingReader.release. If `is_stopped`, _End._stop from another thread instead.

    The end looks again only when it is woken, or when its peer has died: the slices of the code's
    sleeps are for that alone.
    """

    def __init__(self, flaw: str, *, is_stopped: bool) -> None:
        self.flaw, self.is_stopped = flaw, is_stopped

    def explore(self) -> int:
        words = dict.fromkeys(["counter", "closing", "stopped", "sleeps", "word"], 0)
        threads = {
            "sleeper": (self.sleeper, 0),
            "peer": (self.closer, None) if self.is_stopped else (self.peer, 0),
        }
        return Explorer(words, threads, threads).explore()

    def peer(self, count: int) -> Round:
        is_last = count == 1
        yield Store("closing", 1, RELEASE) if is_last else Store("counter", count + 1, RELEASE)
        if self.flaw != "no fence before the mark is loaded":
            yield Fence(FULL)
        if (yield Load("sleeps")):
            yield from self.woken()
        return Ended(None) if is_last else count + 1

    def sleeper(self, count: int) -> Round:
        if (yield Load("stopped", ACQUIRE)):
            return Ended(None)
        if (yield Load("counter", ACQUIRE)) > count:
            return count + 1
        if (yield Load("closing", ACQUIRE)) or (yield IsDead("peer")):
            return count if (yield Load("counter", ACQUIRE)) > count else Ended(None)
        yield Store("sleeps", 1)
        if self.flaw != "no fence after the mark is stored":
            yield Fence(FULL)
        acquire = RELAXED if self.flaw == "the word is loaded relaxed" else ACQUIRE
        seen = 0
        if self.flaw != "the word is loaded after the look":
            seen = yield Load("word", acquire)
        is_idle = (
            (yield Load("counter", ACQUIRE)) == count
            and not (yield Load("closing", ACQUIRE))
            and not (yield Load("stopped", ACQUIRE))
        )
        if self.flaw == "the word is loaded after the look":
            seen = yield Load("word", acquire)
        if is_idle:
            yield Sleep("word", seen, "peer")
        yield Store("sleeps", 0)
        return count

    def closer(self, _: None) -> Round:
        yield Store("stopped", 1, RELEASE)
        yield from self.woken()
        return Ended(None)

    def woken(self) -> Round:
        if self.flaw != "the word is not counted up":
            yield Add("word", RELAXED if self.flaw == "the word is counted up relaxed" else RELEASE)
        yield Wake("word")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_sleep_marks(is_stopped: bool, record_property: Record) -> None:
    """No wake-up is lost, and whoever is killed, asleep or awake, lets nobody sleep for ever."""
    record_property("states", SleepMark("", is_stopped=is_stopped).explore())


@pytest.mark.parametrize(
    ("flaw", "is_stopped"),
    [
        ("no fence after the mark is stored", False),
        ("no fence before the mark is loaded", False),
        ("the word is loaded after the look", True),
        ("the word is loaded relaxed", True),
        ("the word is counted up relaxed", True),
        ("the word is not counted up", True),
    ],
)
def test_a_flawed_sleep_mark(flaw: str, is_stopped: bool) -> None:
    """A sleep needs both fences, and its word."""
    with pytest.raises(Violation, match=r"a thread never gets to its end$"):
        SleepMark(flaw, is_stopped=is_stopped).explore()


# --- the given-up words: Arena.reclaim, give_up, Leases.end ---------------------------------------


class Block:
    """
    A block of the arena that is used again and again, and the readers that lease it.

    What lies in it is the number of its use, in two words.
    """

    def __init__(self, flaw: str, n_readers: int, n_uses: int) -> None:
        self.flaw, self.n_uses = flaw, n_uses
        self.readers = tuple(f"reader {rank}" for rank in range(n_readers))

    def order(self, name: str, order: str) -> str:
        return RELAXED if self.flaw == f"{name} is relaxed" else order

    def explore(self) -> int:
        words = dict.fromkeys(["published", "begin", "end"], 0)
        for reader in self.readers:
            words |= {f"given up by {reader}": 0, f"given ups of {reader}": 0}
        threads: dict[str, tuple[Program, Any]] = {
            reader: (self.reader(reader), 0) for reader in self.readers
        }
        threads["writer"] = self.writer, (0, self.readers, (), 0)
        return Explorer(words, threads, threads).explore()

    def writer(self, state: tuple[int, tuple[str, ...], tuple[str, ...], int]) -> Round:
        use, expected, holders, seen = state
        if holders:
            return (yield from self.reclaimed(use, expected, holders, seen))
        if use == self.n_uses:
            return Ended(None)
        use += 1
        for word in ("begin", "end"):
            yield Write(word, use, expected)
        yield Store("published", use, RELEASE)
        return use, expected, expected, seen

    def reclaimed(
        self, use: int, expected: tuple[str, ...], holders: tuple[str, ...], seen: int
    ) -> Round:
        given_ups = yield from self.given_ups()
        if given_ups == seen:
            for reader in expected:
                if (yield IsDead(reader)):
                    expected, holders = (
                        tuple(other for other in readers if other != reader)
                        for readers in (expected, holders)
                    )
            return use, expected, holders, seen
        left = []
        for reader in holders:
            word = f"given up by {reader}"
            given_up = yield Load(word, self.order("the load of the word", ACQUIRE))
            if self.flaw == "the word is a flag":
                given_up = given_up and use
            if given_up != use:
                left.append(reader)
        if self.flaw == "the count is loaded after the words":
            given_ups = yield from self.given_ups()
        return use, expected, tuple(left), given_ups

    def given_ups(self) -> Round:
        total = 0
        for reader in self.readers:
            acquire = self.order("the load of the count", ACQUIRE)
            total += yield Load(f"given ups of {reader}", acquire)
        return total

    def reader(self, name: str) -> Program:
        def lease(number: int) -> Round:
            if number == self.n_uses:
                return Ended(None)
            is_dead = yield IsDead("writer")
            if (yield Load("published", ACQUIRE)) == number:
                return Ended(None) if is_dead else number
            give_up: list[Step] = [
                Store(
                    f"given up by {name}", number + 1, self.order("the store of the word", RELEASE)
                ),
                Add(f"given ups of {name}", self.order("the count", RELEASE)),
            ]
            if self.flaw == "the count comes before the word":
                give_up.reverse()
            if self.flaw == "given up before the last look":
                yield from give_up
            for word in ("begin", "end"):
                use = yield Read(word)
                require(use == number + 1, f"{name} sees use {use} in its lease of {number + 1}")
            if self.flaw != "given up before the last look":
                yield from give_up
            return number + 1

        return lease


def test_the_given_up_words(record_property: Record) -> None:
    """A block is used again when nobody reads it any more, and it always is, whoever is killed."""
    record_property("states", Block("", n_readers=2, n_uses=2).explore())


@pytest.mark.parametrize(
    ("flaw", "n_readers", "n_uses", "violation"),
    [
        ("the store of the word is relaxed", 2, 2, "comes before reader 0 has read"),
        ("the load of the word is relaxed", 2, 2, "comes before reader 0 has read"),
        ("the word is a flag", 2, 3, "reader . sees use 3 in its lease of 2"),
        ("given up before the last look", 1, 2, "reader 0 sees use 2 in its lease of 1"),
        ("the count is relaxed", 1, 2, "a thread never gets to its end"),
        ("the load of the count is relaxed", 1, 2, "a thread never gets to its end"),
        ("the count comes before the word", 1, 2, "a thread never gets to its end"),
        ("the count is loaded after the words", 2, 2, "a thread never gets to its end"),
    ],
)
def test_a_flawed_given_up_word(flaw: str, n_readers: int, n_uses: int, violation: str) -> None:
    """Giving up needs the count after the word, both ordered, and the number of the use."""
    with pytest.raises(Violation, match=f"{violation}$"):
        Block(flaw, n_readers, n_uses).explore()


# --- the end of an attachment: RingWriter.strike, RingReader.try_take and release -----------------


def take(own_epoch: int, cursor: int, flaw: str) -> Round:
    """A reader's round: it takes the next message from the one chunk, or finds its end."""
    if (yield Load("epoch", ACQUIRE)) != own_epoch:
        return Ended(("struck", cursor))
    if (yield Load("published", ACQUIRE)) == cursor:
        is_closing = yield Load("closing", ACQUIRE)
        is_dead = yield IsDead("writer")
        if (yield Load("published", ACQUIRE)) != cursor or not (is_closing or is_dead):
            return cursor
        return Ended(("closed" if is_closing else "lost", cursor))
    head = yield Read("head")
    body = yield Read("body")
    if flaw != "no fence after the copy":
        yield Fence(ACQUIRE)
    is_struck = (yield Load("epoch", ACQUIRE)) != own_epoch
    if is_struck and flaw != "the epoch is not compared after the copy":
        return cursor
    require((head, body) == (cursor, cursor), f"{head} and {body} are taken for {cursor}")
    if (yield Load("epoch", ACQUIRE)) == own_epoch:
        yield Store("cursor", cursor + 1, RELEASE)
        return cursor + 1
    return cursor


def publish(number: int, after: tuple[str, ...]) -> Round:
    """The writer's part, with the chunk claimed."""
    yield Write("head", number, after)
    yield Write("body", number, after)
    yield Store("published", number + 1, RELEASE)


class Exclusion:
    """
    A reader that the writer waits for no longer, though it lives, since its lock is gone.

    It may be anywhere in a message when its chunk is written again.
    """

    def __init__(self, flaw: str) -> None:
        self.flaw = flaw

    def explore(self) -> int:
        words = dict.fromkeys(["published", "closing", "epoch", "cursor", "lock is gone"], 0)
        words |= {"head": -1, "body": -1}
        threads: dict[str, tuple[Program, Any]] = {
            "writer": (self.writer, (0, False)),
            "reader": (lambda cursor: take(0, cursor, self.flaw), 0),
            "program": (self.program, None),
        }
        return Explorer(words, threads, ["writer", "reader"], self.check).explore()

    def program(self, _: None) -> Round:
        yield Store("lock is gone", 1)
        return Ended(None)

    def writer(self, state: tuple[int, bool]) -> Round:
        published, is_struck = state
        if published == 3:
            yield Store("closing", 1, RELEASE)
            return Ended(None)
        if not is_struck and ((yield IsDead("reader")) or (yield Load("lock is gone"))):
            yield Store("epoch", 1, RELEASE)
            if self.flaw != "no fence after the epoch":
                yield Fence(FULL)
            is_struck = True
        if is_struck or (yield Load("cursor", ACQUIRE)) == published:
            yield from publish(published, () if is_struck else ("reader",))
            published += 1
        return published, is_struck

    def check(self, verdicts: dict[str, Any], words: dict[str, int]) -> None:
        end, taken = verdicts.get("reader", ("struck", 0))
        require(end == "struck" or taken == words["published"], f"{end} after {taken}")


def test_an_excluded_reader(record_property: Record) -> None:
    """A reader that is excluded at any step takes only whole messages, and then finds it out."""
    record_property("states", Exclusion("").explore())


@pytest.mark.parametrize(
    "flaw",
    [
        "no fence after the epoch",
        "no fence after the copy",
        "the epoch is not compared after the copy",
    ],
)
def test_a_flawed_exclusion(flaw: str) -> None:
    """The fences and the second look at the epoch are needed, or a torn message is taken."""
    with pytest.raises(Violation, match=r"are taken for [01]$"):
        Exclusion(flaw).explore()


# --- what is leased at the end: RingWriter.strike, RingReader._parts and try_take -----------------


class Eviction:
    """A reader that takes a block while the writer strikes it, and reads it from then on."""

    def __init__(self, flaw: str) -> None:
        self.flaw = flaw

    def explore(self) -> int:
        words = dict.fromkeys(["epoch", "leased", "block"], 0)
        threads: dict[str, tuple[Program, Any]] = {
            "writer": (self.writer, None),
            "reader": (self.reader, None),
        }
        return Explorer(words, threads, ["writer", "reader"]).explore()

    def writer(self, _: None) -> Round:
        yield Store("epoch", 1, RELEASE)
        if self.flaw != "no fence after the epoch":
            yield Fence(FULL)
        if (yield Load("leased", ACQUIRE)) == 0:
            yield Write("block", 1, ())
        return Ended(None)

    def reader(self, _: None) -> Round:
        if self.flaw != "leased comes last":
            yield Store("leased", 1, RELEASE)
        if self.flaw != "no fence after leased":
            yield Fence(FULL)
        is_struck = yield Load("epoch", ACQUIRE)
        if self.flaw == "leased comes last":
            yield Store("leased", 1, RELEASE)
        if not is_struck:
            require((yield Read("block")) == 0, "a leased block is used again")
        return Ended(None)


def test_what_is_leased_as_its_reader_is_struck(record_property: Record) -> None:
    """The writer sees that a block is leased, or the reader that it must not use it."""
    record_property("states", Eviction("").explore())


@pytest.mark.parametrize(
    "flaw", ["no fence after the epoch", "no fence after leased", "leased comes last"]
)
def test_a_flawed_eviction(flaw: str) -> None:
    """Both fences are needed, and the word before the epoch, or a lease changes."""
    with pytest.raises(Violation, match=r"a leased block is used again$"):
        Eviction(flaw).explore()


# --- attaching again: RingWriter.new_epoch, has_left and admit, with WriterControl ----------------


class Reattachment:
    """
    A rank whose reader dies at any step or leaves, and the next one that attaches, which may die.

    What they say over the control socket are words of their own here.
    """

    def __init__(self, flaw: str, *, leaves: bool) -> None:
        self.flaw, self.leaves = flaw, leaves

    def explore(self) -> int:
        words = dict.fromkeys(["published", "closing", "cursor", "left", "head", "body"], 0)
        words |= {"epoch": 1, "claim": 0, "offer": 0, "mapped": 0, "admission": 0}
        threads: dict[str, tuple[Program, Any]] = {
            "writer": (self.writer, (0, 0, 1, "first")),
            "first": (self.first, 0),
            "second": (self.second, ("claims", 0)),
        }
        mortal = ["writer", "second", *([] if self.leaves else ["first"])]
        return Explorer(words, threads, mortal, self.check).explore()

    def writer(self, state: tuple[int, int, int, str]) -> Round:
        published, cached, epoch, holder = state
        if holder in ("nobody", "claimant"):
            return (yield from self.attached(*state))
        left = yield Load("left", ACQUIRE)
        is_over = left != 0 if self.flaw == "left is a flag" else left == epoch
        if is_over or (yield IsDead(holder)):
            yield Store("epoch", epoch + 1, RELEASE)
            yield Fence(FULL)
            yield from publish(published, ())
            return published + 1, cached, epoch + 1, "nobody"
        cached = max(cached, (yield Load("cursor", ACQUIRE)))
        if cached == published >= 3:
            yield Store("closing", 1, RELEASE)
            return Ended(None)
        if cached == published:
            yield from publish(published, (holder,))
            published += 1
        return published, cached, epoch, holder

    def attached(self, published: int, cached: int, epoch: int, holder: str) -> Round:
        """The writer's state after a look at its control socket, while nobody has the rank."""
        if (yield IsDead("second")):
            yield Store("closing", 1, RELEASE)
            return Ended(None)
        if holder == "nobody" and (yield Load("claim", ACQUIRE)):
            yield Store("epoch", epoch + 1, RELEASE)
            yield Store("offer", epoch + 1, RELEASE)
            return published, cached, epoch + 1, "claimant"
        if holder == "claimant" and (yield Load("mapped", ACQUIRE)):
            if self.flaw != "the cursor is not set":
                yield Store("cursor", published, RELEASE)
                cached = published
            start = 0 if self.flaw == "it starts with the first message" else published
            yield Store("admission", 1 + start, RELEASE)
            return published, cached, epoch, "second"
        return published, cached, epoch, holder

    def first(self, cursor: int) -> Round:
        if cursor == 1 and self.leaves:
            yield Store("left", 1, RELEASE)
            return Ended(("left", cursor))
        return (yield from take(1, cursor, ""))

    def second(self, state: tuple[str, int]) -> Round:
        stage, number = state
        if stage == "takes":
            after = yield from take(3, number, "")
            return after if isinstance(after, Ended) else ("takes", after)
        if stage == "claims":
            yield Store("claim", 1, RELEASE)
            return "waits for an offer", 0
        is_over = (yield IsDead("writer")) or (yield Load("closing", ACQUIRE))
        if stage == "waits for an offer" and (yield Load("offer", ACQUIRE)):
            yield Store("mapped", 1, RELEASE)
            return "waits for its admission", 0
        if stage == "waits for its admission":
            admission = yield Load("admission", ACQUIRE)
            if admission:
                return "takes", admission - 1
        return Ended(("not admitted", 0)) if is_over else state

    def check(self, verdicts: dict[str, Any], words: dict[str, int]) -> None:
        for name in ("first", "second"):
            end, taken = verdicts.get(name, ("left", 0))
            is_right = end in ("left", "not admitted") or taken == words["published"]
            require(end != "struck", f"{name} is struck")
            require(is_right, f"{name}: {end} after {taken} of {words['published']}")


@pytest.mark.parametrize("leaves", [False, True])
def test_attaching_again(leaves: bool, record_property: Record) -> None:
    """A rank's next reader gets what is published from then on, however the one before it ended."""
    record_property("states", Reattachment("", leaves=leaves).explore())


@pytest.mark.parametrize(
    ("flaw", "violation"),
    [
        ("left is a flag", "second is struck"),
        ("the cursor is not set", "a thread never gets to its end"),
        ("it starts with the first message", ""),
    ],
)
def test_flawed_attaching(flaw: str, violation: str) -> None:
    """Leaving is said of an epoch, and the next reader starts where the writer says."""
    with pytest.raises(Violation, match=f"{violation}$"):
        Reattachment(flaw, leaves=True).explore()
