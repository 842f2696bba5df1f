"""
`QueueConfig`: every setting of a queue, its default, its rule and where its value comes from.

typed-settings was considered for the layers. It ignores missing files and unknown variables, and
its errors name neither file nor key; making it strict took more code than attrs and tomllib.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Self, SupportsIndex, cast

import attrs

from shmcast.errors import ConfigError

__all__ = ["DEFAULT_OOB_THRESHOLD_BYTES", "QueueConfig"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

#: A buffer of this many bytes or more leaves the pickle stream.
DEFAULT_OOB_THRESHOLD_BYTES: Final = 1 * MIB

_VARIABLE_PREFIX: Final = "SHMCAST_"
#: What Kubernetes sets in every container for a Service called `shmcast` or `shmcast-…`.
_OF_KUBERNETES: Final = re.compile(
    r"SHMCAST_(?:[A-Z0-9_]+_)?"
    r"(?:SERVICE_HOST=|SERVICE_PORT(?:_[A-Z0-9_]+)?=|PORT=[a-z]+://|PORT_[0-9]+_[A-Z_]+=)"
)
_TABLE: Final = "shmcast"
_UNIT_BYTES: Final = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
#: An address for remote readers; the group is the port.
ENDPOINT: Final = re.compile(r"tcp://(?:\[[^\]\s]+\]|[^:\s\[\]]+):([0-9]{1,5})", re.ASCII)
_SIZE: Final = re.compile(r"([0-9]+) ?(B|KiB|MiB|GiB)?", re.ASCII)


@attrs.frozen
class _Rule:
    """The rule of one setting; `check` returns the value to keep, or raises."""

    allowed: str
    check: Callable[[Any], Any]
    parse: Callable[[str], Any] = str  # from the text of an environment variable


def _plain_int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _within(number: int, least: int, most: int) -> int:
    if not least <= number <= most:
        raise ValueError
    return number


def _integer(least: int, most: int) -> _Rule:
    return _Rule(
        f"an integer from {least} to {most}",
        lambda value: _within(_plain_int(value), least, most),
        int,
    )


def _size(least: int, most: int) -> _Rule:
    def check(value: Any) -> int:
        if isinstance(value, str):
            match = _SIZE.fullmatch(value.strip())
            if match is None:
                raise ValueError
            value = int(match[1]) * _UNIT_BYTES[match[2] or ""]
        return _within(_plain_int(value), least, most)

    return _Rule(
        f"an integer of bytes or a text such as '64 KiB' (units B, KiB, MiB, GiB), "
        f"from {least} to {most} bytes",
        check,
    )


def _choice(*words: str) -> _Rule:
    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return _Rule(" or ".join(f'"{word}"' for word in words), check)


def _check_seconds(value: Any) -> float:
    seconds = float(value if isinstance(value, float) else _plain_int(value))
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError
    return seconds


def _check_ranks(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    few = itertools.islice(value, MOST_READERS + 1)  # it may be endless
    ranks = tuple(_within(_plain_int(rank), 0, MOST_READERS - 1) for rank in few)
    if len(set(ranks)) != len(ranks):
        raise ValueError
    return ranks


def _parse_ranks(text: str) -> tuple[int, ...]:
    return tuple(int(rank) for rank in text.split(",")) if text.strip() else ()


def _check_bind(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError
    match = ENDPOINT.fullmatch(value)
    if match is None or int(match[1]) > 65535:
        raise ValueError
    return value


MOST_READERS: Final = 4096
_RULES: Final[Mapping[str, _Rule]] = {
    "n_readers": _integer(1, MOST_READERS),
    "local_reader_ranks": _Rule(
        "None, or distinct ranks from 0 to n_readers - 1", _check_ranks, _parse_ranks
    ),
    "chunk_bytes": _size(KIB, 1024 * GIB),
    "n_chunks": _integer(1, 1 << 20),
    "oob_threshold_bytes": _size(0, 1 << 62),
    "arena_bytes": _size(0, 1 << 46),
    "receive": _choice("private", "copy"),
    "spin_us": _integer(0, 1_000_000),
    "on_reader_loss": _choice("raise", "evict"),
    "warn_after_s": _Rule("a finite number of seconds above 0", _check_seconds, float),
    "bind": _Rule('None, or "tcp://ADDRESS:PORT"', _check_bind),
    "security": _choice("curve", "none"),
}


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # from its own `__repr__`, or an integer with too many digits
        return f"a {type(value).__name__} whose repr fails"
    return text if len(text) <= 200 else f"{text[:200]}…"


#: The setting that each environment variable sets.
_KEYS: Final = {_VARIABLE_PREFIX + key.upper(): key for key in _RULES}


def _refusal(origin: str, key: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{origin}: {key} = {_shown(value)} is not allowed; allowed is {allowed}")


def _checked(origin: str, key: str, value: object) -> Any:
    rule = _RULES[key]
    try:
        return rule.check(value)
    except Exception as error:  # a value may raise anything when it is inspected
        raise _refusal(origin, key, value, rule.allowed) from error


def _check_together(values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    n_readers, local = values["n_readers"], values["local_reader_ranks"]
    if local is None:
        return
    if local and max(local) >= n_readers:
        allowed = f"{_RULES['local_reader_ranks'].allowed}, and n_readers is {n_readers}"
        raise _refusal(origins["local_reader_ranks"], "local_reader_ranks", local, allowed)
    if len(local) < n_readers and values["bind"] is None:
        remote = sorted(set(range(n_readers)) - set(local))
        allowed = f"an address for the remote ranks {remote} (not in local_reader_ranks)"
        raise _refusal(origins["bind"], "bind", None, allowed)


_CONSTRUCTOR: Final = "QueueConfig(...)"


@attrs.frozen(kw_only=True, init=False)
class QueueConfig:
    """
    The settings of one queue, checked on construction and immutable.

    Sizes are integers in bytes, or strings such as "64 KiB" (B, KiB, MiB, GiB); the attribute is
    always an integer.

    Attributes:
        n_readers: how many readers there are, local and remote.
        local_reader_ranks: the ranks on the writer's host, distinct and below `n_readers`; None
            means all, () means none. Remote ranks need `bind`.
        chunk_bytes: the size of a chunk. A larger message goes into a block of the arena or, if
            none is free, into a memory file of its own.
        n_chunks: how many messages the ring holds, at least 1.
        oob_threshold_bytes: buffers of at least this size leave the pickle stream; 0 means every
            non-empty buffer. It may exceed `chunk_bytes`. The further buffers of a message leave
            it too once its stream has kept 64 KiB of smaller ones.
        arena_bytes: the size of the arena for large buffers; 0 turns it off, and they go into the
            chunk or a memory file.
        receive: how a reader gets large buffers: "private" maps them copy-on-write; "copy" copies
            them out and frees their blocks at once, which suits readers that overwrite them.
        spin_us: how many microseconds an end polls before it sleeps; 0 sleeps at once.
        on_reader_loss: "raise" makes the next call after a loss raise `ReaderLost`; "evict" logs a
            warning and goes on and, when no reader is left, waits for the next one to attach.
        warn_after_s: a wait is logged each time it has lasted this many seconds more.
        bind: the address for remote readers, such as "tcp://192.0.2.1:0"; port 0 picks a free one.
        security: "curve", or "none" for remote readers without keys, which unpickle only what an
            allow-list names.

    Raises:
        ConfigError: a value is not allowed; the text names the key, the value and the rule.
    """

    n_readers: int
    local_reader_ranks: tuple[int, ...] | None
    chunk_bytes: int
    n_chunks: int
    oob_threshold_bytes: int
    arena_bytes: int
    receive: Literal["private", "copy"]
    spin_us: int
    on_reader_loss: Literal["raise", "evict"]
    warn_after_s: float
    bind: str | None
    security: Literal["curve", "none"]

    def __init__(
        self,
        *,
        n_readers: SupportsIndex = 1,
        local_reader_ranks: Iterable[SupportsIndex] | None = None,
        chunk_bytes: SupportsIndex | str = 2 * MIB,
        n_chunks: SupportsIndex = 16,
        oob_threshold_bytes: SupportsIndex | str = DEFAULT_OOB_THRESHOLD_BYTES,
        arena_bytes: SupportsIndex | str = 1 * GIB,
        receive: Literal["private", "copy"] = "private",
        spin_us: SupportsIndex = 30,
        on_reader_loss: Literal["raise", "evict"] = "raise",
        warn_after_s: float = 60,
        bind: str | None = None,
        security: Literal["curve", "none"] = "curve",
    ) -> None:
        given = locals()  # before any other name is bound, these are the arguments
        values = {key: _checked(_CONSTRUCTOR, key, given[key]) for key in _RULES}
        _check_together(values, dict.fromkeys(_RULES, _CONSTRUCTOR))
        self.__attrs_init__(**values)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, **overrides: object) -> Self:
        """
        A config from up to four places; the first one that has a value wins.

        They are the overrides given here, `SHMCAST_*` environment variables (such as
        `SHMCAST_CHUNK_BYTES=4MiB`; a tuple is written `0,1`), the `[shmcast]` table of the TOML
        file at `path` (None reads no file) and the defaults. Variables that Kubernetes sets for a
        Service called `shmcast-…` are ignored.

        Raises:
            ConfigError: a value is not allowed, a key or a variable is unknown, or the file is
                missing, malformed or has no such table; the text says where.
        """
        values = {key: inspect.signature(cls).parameters[key].default for key in _RULES}
        origins = dict.fromkeys(_RULES, "default")
        for origin_of, layer in (
            (_file_origin(path), from_file(path)),
            (_variable_origin, from_environment()),
            (lambda key: f"QueueConfig.load({key}=...)", overrides),
        ):
            for key, value in layer.items():
                if key not in _RULES:
                    known = ", ".join(_RULES)
                    raise ConfigError(f"{origin_of(key)}: unknown setting {key}; known: {known}")
                values[key] = _checked(origin_of(key), key, value)
                origins[key] = origin_of(key)
        _check_together(values, origins)
        return cls(**values)


def _file_origin(path: str | os.PathLike[str] | None) -> Callable[[str], str]:
    return lambda _key: f"{os.fspath(path) if path is not None else 'no file'} [{_TABLE}]"


def from_file(path: str | os.PathLike[str] | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors; RecursionError: deep nesting.
    except (OSError, ValueError, TypeError, RecursionError) as error:
        name = os.fspath(path) if isinstance(path, os.PathLike) else path
        raise ConfigError(f"{name}: can't read it as a TOML file: {error}") from error
    table = document.get(_TABLE)
    if not isinstance(table, dict):
        raise ConfigError(f"{os.fspath(path)}: the file has no [{_TABLE}] table")
    return cast("dict[str, object]", table)


def _variable_origin(key: str) -> str:
    return f"environment variable {_VARIABLE_PREFIX}{key.upper()}"


def from_environment() -> Mapping[str, object]:
    layer: dict[str, object] = {}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(_VARIABLE_PREFIX):
            continue
        key = _KEYS.get(variable)
        if key is None and _OF_KUBERNETES.match(f"{variable}={text}"):
            continue
        if key is None:
            known = ", ".join(_KEYS)
            raise ConfigError(f"unknown environment variable {variable}; known: {known}")
        try:
            layer[key] = _RULES[key].parse(text)
        except ValueError:
            raise _refusal(_variable_origin(key), key, text, _RULES[key].allowed) from None
    return layer
