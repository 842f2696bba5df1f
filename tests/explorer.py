"""
Every run of a few threads under release and acquire, with the death of a thread at any step.

The memory is the release/acquire model without promises. A word is the list of its stores, in their
order. A thread has a view: how far it has seen each list at least. A load takes any store that is
not older than its view, and a store may come before others that its thread has not seen. What a
release store leaves for an acquire load is its thread's view; fences work as in C11.

In this model no load is performed after a later store of its thread. So data whose memory is used
again has steps of its own: by the views, a write comes after every read that it waits for.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

RELAXED: Final = "relaxed"
ACQUIRE: Final = "acquire"
RELEASE: Final = "release"
FULL: Final = "full"


class Load(NamedTuple):
    """An atomic load. Its result is the value."""

    word: str
    order: str = RELAXED


class Store(NamedTuple):
    """An atomic store."""

    word: str
    value: int
    order: str = RELAXED


class Add(NamedTuple):
    """An atomic addition of 1."""

    word: str
    order: str = RELEASE


class Fence(NamedTuple):
    """A fence: FULL or ACQUIRE."""

    order: str = FULL


class Read(NamedTuple):
    """A load of data. Its result is the value."""

    word: str


class Write(NamedTuple):
    """A store of data, which waits for what these threads have read."""

    word: str
    value: int
    after: tuple[str, ...]


class Sleep(NamedTuple):
    """Sleep in the kernel if the word is as seen, until `Wake` or the death of a peer."""

    word: str
    seen: int
    peer: str


class Wake(NamedTuple):
    """Wake every thread that sleeps on the word."""

    word: str


class IsDead(NamedTuple):
    """Ask the kernel about a thread. If it has died, all that it did is seen."""

    thread: str


class Ended(NamedTuple):
    """What a program returns in its last round."""

    verdict: Any


Step = Load | Store | Add | Fence | Read | Write | Sleep | Wake | IsDead
#: One round of a thread: it gets the thread's state, yields its steps, and returns the next state.
Program = Callable[[Any], Generator[Step, Any, Any]]
View = tuple[int, ...]


class Violation(Exception):
    """A run that must not be. The text tells its steps."""


def require(condition: bool, text: str) -> None:
    """What programs and checks say instead of an assertion."""
    if not condition:
        raise Violation(text)


class _Message(NamedTuple):
    value: int
    view: View  # what is seen by who acquires it
    is_addition: bool = False  # then nothing comes between the store before it and this one


class _Thread(NamedTuple):
    state: Any
    results: tuple[Any, ...]  # of the steps of this round
    view: View
    acquirable: View  # what an acquire fence makes the view
    fenced: View  # the view at the last full fence
    status: str = "running"  # or "asleep", "dead", "ended"


class _Moment(NamedTuple):
    memory: tuple[tuple[_Message, ...], ...]
    fence: View  # what a full fence gets from the ones before it
    threads: tuple[_Thread, ...]


class _Next(NamedTuple):
    state: Any  # after a round


def _join(*views: View) -> View:
    return tuple(map(max, *views))


def _at(view: View, word: int, position: int) -> View:
    return (*view[:word], position, *view[word + 1 :])


class Explorer:
    """
    All runs of some threads.

    Args:
        words: the words, with their first values.
        threads: for each thread its program and its first state.
        mortal: the threads that may be killed at any step.
        check: is called at the end of every run, with the verdicts of the threads that ended and
            the last value of each word; it says what must be with `require`.
    """

    def __init__(
        self,
        words: Mapping[str, int],
        threads: Mapping[str, tuple[Program, Any]],
        mortal: Iterable[str],
        check: Callable[[dict[str, Any], dict[str, int]], None] = lambda _verdicts, _words: None,
    ) -> None:
        self._words, self._threads = list(words), list(threads)
        self._programs = [program for program, _ in threads.values()]
        self._mortal = frozenset(self._threads.index(thread) for thread in mortal)
        self._check = check
        self._upcoming = functools.cache(self._find_upcoming)
        # How far each word is seen; then how often each thread has read it.
        nothing = (0,) * (len(words) * (1 + len(threads)))
        self._first = _Moment(
            tuple((_Message(value, nothing),) for value in words.values()),
            nothing,
            tuple(_Thread(start, (), nothing, nothing, nothing) for _, start in threads.values()),
        )
        # Of each moment, in the order in which they were met: the number of the one before it, and
        # what happened then.
        self._origins: list[tuple[int, tuple[Any, ...]]] = []

    def explore(self) -> int:
        """
        Visit every moment that a run can come to; returns how many there are.

        Raises:
            Violation: `require` was not met; data was written too early; or some thread can't get
                to its end any more, whatever is loaded and however long it waits.
        """
        numbers = {self._first: 0}
        self._origins = [(0, ())]
        ends: list[int] = []
        befores: dict[int, list[int]] = collections.defaultdict(list)
        to_visit = [self._first]
        while to_visit:
            moment = to_visit.pop()
            number = numbers[moment]
            try:
                steps = list(self._steps(moment))
                if all(thread.status in ("dead", "ended") for thread in moment.threads):
                    self._check_end(moment)
                    ends.append(number)
            except Violation as error:
                raise Violation(self._story(number, str(error))) from None
            n_steps = len(steps)
            for index, (what, after) in enumerate([*steps, *self._deaths(moment)]):
                n_met = len(numbers)
                after_number = numbers.setdefault(after, n_met)
                if after_number == n_met:
                    self._origins.append((number, what))
                    to_visit.append(after)
                if index < n_steps:  # a death is no way to the end
                    befores[after_number].append(number)
        hopeful = set(ends)
        while ends:
            new = set(befores[ends.pop()]) - hopeful
            hopeful |= new
            ends += new
        for number in range(len(numbers)):
            if number not in hopeful:
                raise Violation(self._story(number, "a thread never gets to its end"))
        return len(numbers)

    def _story(self, number: int, end: str) -> str:
        lines = [end]
        while number:
            number, what = self._origins[number]
            lines.append(" ".join(map(str, what)))
        return "\n".join(reversed(lines))

    def _check_end(self, moment: _Moment) -> None:
        verdicts = {
            name: thread.state
            for name, thread in zip(self._threads, moment.threads, strict=True)
            if thread.status == "ended"
        }
        values = (messages[-1].value for messages in moment.memory)
        self._check(verdicts, dict(zip(self._words, values, strict=True)))

    def _deaths(self, moment: _Moment) -> Iterator[tuple[tuple[Any, ...], _Moment]]:
        for index in self._mortal:
            thread = moment.threads[index]
            if thread.status in ("running", "asleep"):
                dead = thread._replace(state=None, results=(), status="dead")
                yield (self._threads[index], "is killed"), _with_thread(moment, index, dead)

    def _find_upcoming(self, index: int, state: Any, results: tuple[Any, ...]) -> Step | _Next:
        """The next step of a thread's round, or what the round returns."""
        steps = self._programs[index](state)
        try:
            step = next(steps)
            for result in results:
                step = steps.send(result)
        except StopIteration as end:
            return _Next(end.value)
        return step

    def _steps(self, moment: _Moment) -> Iterator[tuple[tuple[Any, ...], _Moment]]:
        """What may happen next."""
        for index, name in enumerate(self._threads):
            thread = moment.threads[index]
            if thread.status in ("dead", "ended"):
                continue
            step = self._upcoming(index, thread.state, thread.results)
            if thread.status == "asleep":
                assert isinstance(step, Sleep)
                peer = moment.threads[self._threads.index(step.peer)]
                afters = [self._gone_on(moment, index, None)] if peer.status == "dead" else []
            else:
                afters = list(getattr(self, f"_{type(step).__name__.lower()}")(moment, index, step))
            for after in afters:
                yield (name, step, after.threads[index].results[-1:]), after

    def _gone_on(self, moment: _Moment, index: int, result: Any, **changes: Any) -> _Moment:
        """The moment after a step of a thread."""
        thread = moment.threads[index]._replace(status="running", **changes)
        thread = thread._replace(
            results=(*thread.results, result),
            acquirable=_join(thread.acquirable, thread.view),
        )
        while thread.status == "running" and isinstance(
            upcoming := self._upcoming(index, thread.state, thread.results), _Next
        ):
            thread = thread._replace(state=upcoming.state, results=())
            if isinstance(upcoming.state, Ended):
                thread = thread._replace(state=upcoming.state.verdict, status="ended")
        return _with_thread(moment, index, thread)

    def _load(self, moment: _Moment, index: int, step: Load | Read) -> Iterator[_Moment]:
        word = self._words.index(step.word)
        thread = moment.threads[index]
        messages = moment.memory[word]
        for position in range(thread.view[word], len(messages)):
            value, carried, _ = messages[position]
            view = _at(thread.view, word, position)
            acquirable = _join(thread.acquirable, view, carried)
            if isinstance(step, Load) and step.order == ACQUIRE:
                view = _join(view, carried)
            if isinstance(step, Read):
                reads = self._reads(word, index)
                view = _at(view, reads, view[reads] + 1)
            yield self._gone_on(moment, index, value, view=view, acquirable=acquirable)

    _read = _load

    def _reads(self, word: int, thread: int) -> int:
        """Where a view says how often the thread has read the word."""
        return len(self._words) * (1 + thread) + word

    def _write(self, moment: _Moment, index: int, step: Write) -> Iterator[_Moment]:
        word = self._words.index(step.word)
        for reader in map(self._threads.index, step.after):
            reads = self._reads(word, reader)
            read, known = moment.threads[reader].view[reads], moment.threads[index].view[reads]
            require(read == known, f"{step} comes before {self._threads[reader]} has read")
        return self._store(moment, index, Store(step.word, step.value))

    def _store(self, moment: _Moment, index: int, step: Store) -> Iterator[_Moment]:
        word = self._words.index(step.word)
        for position in self._gaps(moment, index, word):
            room = _with_room(moment, word, position)
            thread = room.threads[index]
            view = _at(thread.view, word, position)
            carried = view if step.order == RELEASE else _at(thread.fenced, word, position)
            stored = _with_message(room, word, position, _Message(step.value, carried))
            yield self._gone_on(stored, index, None, view=view)

    def _add(self, moment: _Moment, index: int, step: Add) -> Iterator[_Moment]:
        word = self._words.index(step.word)
        for position in self._gaps(moment, index, word):
            room = _with_room(moment, word, position)
            thread = room.threads[index]
            view = _at(thread.view, word, position)
            value, before, _ = room.memory[word][position - 1]
            carried = view if step.order == RELEASE else _at(thread.fenced, word, position)
            message = _Message(value + 1, _join(carried, before), is_addition=True)
            added = _with_message(room, word, position, message)
            acquirable = _join(thread.acquirable, before)
            yield self._gone_on(added, index, None, view=view, acquirable=acquirable)

    @staticmethod
    def _gaps(moment: _Moment, index: int, word: int) -> list[int]:
        """The places in a word's list where a store of the thread may come."""
        messages = moment.memory[word]
        places = range(moment.threads[index].view[word] + 1, len(messages))
        return [place for place in places if not messages[place].is_addition] + [len(messages)]

    def _fence(self, moment: _Moment, index: int, step: Fence) -> Iterator[_Moment]:
        if step.order == FULL:
            moment = _fenced(moment, index)
        yield self._gone_on(moment, index, None, view=moment.threads[index].acquirable)

    # A system call on a word is a full fence.

    def _sleep(self, moment: _Moment, index: int, step: Sleep) -> Iterator[_Moment]:
        word = self._words.index(step.word)
        moment = _fenced(moment, index)
        thread = moment.threads[index]
        for position, message in enumerate(moment.memory[word]):
            if position < thread.view[word]:
                continue
            view = _at(thread.view, word, position)
            if message.value == step.seen:
                asleep = thread._replace(view=view, status="asleep")
                yield _with_thread(moment, index, asleep)
            else:
                yield self._gone_on(moment, index, None, view=view)

    def _wake(self, moment: _Moment, index: int, step: Wake) -> Iterator[_Moment]:
        moment = _fenced(moment, index)
        for sleeper, thread in enumerate(moment.threads):
            if thread.status == "asleep":
                slept = self._upcoming(sleeper, thread.state, thread.results)
                if isinstance(slept, Sleep) and slept.word == step.word:
                    moment = self._gone_on(_fenced(moment, sleeper), sleeper, None)
        yield self._gone_on(moment, index, None)

    def _isdead(self, moment: _Moment, index: int, step: IsDead) -> Iterator[_Moment]:
        other = moment.threads[self._threads.index(step.thread)]
        view = moment.threads[index].view
        if other.status == "dead":
            view = _join(view, other.view)
        yield self._gone_on(moment, index, other.status == "dead", view=view)


def _with_thread(moment: _Moment, index: int, thread: _Thread) -> _Moment:
    threads = moment.threads
    return moment._replace(threads=(*threads[:index], thread, *threads[index + 1 :]))


def _with_message(moment: _Moment, word: int, position: int, message: _Message) -> _Moment:
    messages = moment.memory[word]
    messages = (*messages[:position], message, *messages[position:])
    return moment._replace(memory=(*moment.memory[:word], messages, *moment.memory[word + 1 :]))


def _with_room(moment: _Moment, word: int, position: int) -> _Moment:
    """All views as they are once a store has come into the list at this place."""
    if position == len(moment.memory[word]):
        return moment

    def moved(view: View) -> View:
        return _at(view, word, view[word] + 1) if view[word] >= position else view

    return _Moment(
        tuple(
            tuple(message._replace(view=moved(message.view)) for message in messages)
            for messages in moment.memory
        ),
        moved(moment.fence),
        tuple(
            thread._replace(
                view=moved(thread.view),
                acquirable=moved(thread.acquirable),
                fenced=moved(thread.fenced),
            )
            for thread in moment.threads
        ),
    )


def _fenced(moment: _Moment, index: int) -> _Moment:
    """The moment after a full fence of the thread."""
    thread = moment.threads[index]
    view = _join(thread.acquirable, moment.fence)
    thread = thread._replace(view=view, acquirable=view, fenced=view)
    return _with_thread(moment, index, thread)._replace(fence=view)
