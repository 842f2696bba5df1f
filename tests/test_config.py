"""`QueueConfig`: every field and rule at its edges, and the four places that a value comes from."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shmcast import DEFAULT_OOB_THRESHOLD_BYTES, ConfigError, QueueConfig

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BIND = "tcp://127.0.0.1:0"
DEFAULTS = {
    "n_readers": 1,
    "local_reader_ranks": None,
    "chunk_bytes": 2 * MIB,
    "n_chunks": 16,
    "oob_threshold_bytes": 1 * MIB,
    "arena_bytes": 1 * GIB,
    "receive": "private",
    "spin_us": 30,
    "on_reader_loss": "raise",
    "warn_after_s": 60,
    "bind": None,
    "security": "curve",
}
KEYS = list(DEFAULTS)
#: The range of every setting that is a number.
RANGES = {
    "n_readers": (1, 4096),
    "chunk_bytes": (KIB, 1024 * GIB),
    "n_chunks": (1, 1 << 20),
    "oob_threshold_bytes": (0, 1 << 62),
    "arena_bytes": (0, 1 << 46),
    "spin_us": (0, 1_000_000),
}
SIZES = ["chunk_bytes", "oob_threshold_bytes", "arena_bytes"]
CHOICES = {
    "receive": ("private", "copy"),
    "on_reader_loss": ("raise", "evict"),
    "security": ("curve", "none"),
}
#: Some words of what the error of each setting has to say is allowed.
ALLOWED = {
    **{key: f"from {least} to {most}" for key, (least, most) in RANGES.items()},
    **{key: " or ".join(f'"{word}"' for word in words) for key, words in CHOICES.items()},
    "local_reader_ranks": "distinct ranks",
    "warn_after_s": "a finite number of seconds above 0",
    "bind": "tcp://ADDRESS:PORT",
}
#: What can be written in every place, and what the attribute is then.
ACCEPTED = [
    *((key, edge, edge) for key, edges in RANGES.items() for edge in edges),
    *((key, word, word) for key, words in CHOICES.items() for word in words),
    *((key, "4096", 4096) for key in SIZES),
    *((key, "4096B", 4096) for key in SIZES),
    *((key, "4096 B", 4096) for key in SIZES),
    *((key, "64KiB", 64 * KIB) for key in SIZES),
    *((key, "64 KiB", 64 * KIB) for key in SIZES),
    *((key, "3 MiB", 3 * MIB) for key in SIZES),
    *((key, "3GiB", 3 * GIB) for key in SIZES),
    ("chunk_bytes", "1 KiB", KIB),
    ("oob_threshold_bytes", "0", 0),
    ("warn_after_s", 1, 1),
    ("warn_after_s", 0.25, 0.25),
    ("warn_after_s", 5e-324, 5e-324),
    ("warn_after_s", 1e300, 1e300),
    ("bind", "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"),
    ("bind", "tcp://[::1]:65535", "tcp://[::1]:65535"),
    ("bind", "tcp://node-7.example:41234", "tcp://node-7.example:41234"),
]
#: What can be written in every place and is refused in every place.
REFUSED = [
    *((key, RANGES[key][0] - 1) for key in RANGES),
    *((key, RANGES[key][1] + 1) for key in RANGES),
    *((key, 2.5) for key in RANGES),
    *((key, 2.0) for key in RANGES),
    *((key, 10**30) for key in RANGES),
    *((key, True) for key in RANGES),
    *((key, "") for key in KEYS if key != "local_reader_ranks"),
    *((key, "sixteen") for key in KEYS),
    *((key, "64 kib") for key in RANGES),
    *((key, "64 KB") for key in RANGES),
    *((key, "64  KiB") for key in RANGES),
    *((key, "1.5 MiB") for key in RANGES),
    *((key, "-1 KiB") for key in RANGES),
    *((key, "KiB") for key in RANGES),
    *((key, "4 TiB") for key in RANGES),
    *((key, "0x1000") for key in RANGES),
    *((key, "٤٠٩٦") for key in SIZES),
    ("chunk_bytes", "1023"),
    ("chunk_bytes", "1025 GiB"),
    *((key, words[0].upper()) for key, words in CHOICES.items()),
    *((key, words[0] + " ") for key, words in CHOICES.items()),
    *((key, 0) for key in CHOICES),
    ("local_reader_ranks", (0, 0)),
    ("local_reader_ranks", (-1,)),
    ("local_reader_ranks", (0, 1.0)),
    ("local_reader_ranks", (True,)),
    ("local_reader_ranks", (4096,)),
    ("warn_after_s", 0),
    ("warn_after_s", -1),
    ("warn_after_s", math.nan),
    ("warn_after_s", math.inf),
    ("warn_after_s", -math.inf),
    ("warn_after_s", True),
    ("bind", "127.0.0.1:5000"),
    ("bind", "udp://127.0.0.1:5000"),
    ("bind", "tcp://127.0.0.1"),
    ("bind", "tcp://127.0.0.1:"),
    ("bind", "tcp://127.0.0.1:65536"),
    ("bind", "tcp://127.0.0.1:-1"),
    ("bind", "tcp://:5000"),
    ("bind", "tcp://::1:5000"),
    ("bind", "tcp://a b:5000"),
    ("bind", 5000),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests counts."""
    for variable in [name for name in os.environ if name.startswith("SHMCAST_")]:
        monkeypatch.delenv(variable)


def toml_of(value: Any) -> str:
    """The value as TOML."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{', '.join(map(toml_of, value))}]"
        case _:
            return repr(value)


def text_of(value: Any) -> str:
    """The value as the text of a variable."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)


def toml_file(directory: Path, settings: dict[str, Any]) -> Path:
    """A file with these settings."""
    path = directory / "shmcast.toml"
    lines = [f"{key} = {toml_of(value)}\n" for key, value in settings.items()]
    path.write_text("".join(["[other]\nn_chunks = -1\n[shmcast]\n", *lines]), encoding="utf-8")
    return path


@attrs.frozen
class Place:
    """One of the places that settings come from; `origin` is what an error calls it."""

    name: str
    tmp_path: Path
    monkeypatch: pytest.MonkeyPatch

    def config(self, **settings: Any) -> QueueConfig:
        match self.name:
            case "constructor":
                return QueueConfig(**settings)
            case "override":
                return QueueConfig.load(**settings)
            case "variable":
                with self.monkeypatch.context() as patch:
                    for key, value in settings.items():
                        patch.setenv(f"SHMCAST_{key.upper()}", text_of(value))
                    return QueueConfig.load()
        return QueueConfig.load(toml_file(self.tmp_path, settings))

    def origin(self, key: str) -> str:
        return {
            "constructor": "QueueConfig(",
            "override": f"load({key}=",
            "variable": f"SHMCAST_{key.upper()}",
            "file": str(self.tmp_path / "shmcast.toml"),
        }[self.name]

    def shows(self, value: Any, text: str) -> bool:
        """Whether an error shows this value, as it was written or as it was understood."""
        forms = [repr(value)]
        if self.name == "variable":
            forms.append(text_of(value))
        elif self.name == "file" and isinstance(value, tuple):
            forms = [repr(list(value))]
        return any(form in text for form in forms)


@pytest.fixture(params=["constructor", "override", "variable", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Each of the places in turn."""
    return Place(request.param, tmp_path, monkeypatch)


def companions(key: str) -> dict[str, Any]:
    """What else has to be set for this value to be allowed."""
    return {"n_readers": 2, "bind": BIND} if key == "local_reader_ranks" else {}


def refusal_of(place: Place, settings: dict[str, Any]) -> str:
    """What the error says, or that there was none."""
    try:
        return f"taken: {place.config(**settings)}"
    except ConfigError as error:
        return str(error)


# Fields


def test_the_defaults() -> None:
    """A config without settings has the documented defaults and no other field."""
    assert attrs.asdict(QueueConfig()) == DEFAULTS
    assert attrs.asdict(QueueConfig.load()) == DEFAULTS
    assert DEFAULT_OOB_THRESHOLD_BYTES == QueueConfig().oob_threshold_bytes


def test_a_config_is_frozen() -> None:
    """No field can be set after construction."""
    config = QueueConfig()
    for key in KEYS:
        with pytest.raises(AttributeError):
            setattr(config, key, DEFAULTS[key])
    assert QueueConfig() == config


def test_a_config_is_made_by_keyword_only() -> None:
    """A positional value is a TypeError, since nobody could read it."""
    with pytest.raises(TypeError):
        QueueConfig(2)  # type: ignore[call-arg]


def test_a_config_can_be_pickled_and_evolved() -> None:
    """A config reaches other processes as it is, and a changed copy is checked again."""
    config = QueueConfig(n_readers=2, chunk_bytes="3 MiB", local_reader_ranks=(1,), bind=BIND)
    assert config == pickle.loads(pickle.dumps(config))
    assert 5 == attrs.evolve(config, n_chunks=5).n_chunks
    with pytest.raises(ConfigError):
        attrs.evolve(config, n_chunks=0)


# Rules, in every place


@pytest.mark.parametrize("key", sorted({key for key, _, _ in ACCEPTED}))
def test_what_is_allowed_is_kept(place: Place, key: str) -> None:
    """A value up to the edge of its rule is taken, from every place, and nothing else changes."""
    cases = [(value, kept) for other, value, kept in ACCEPTED if other == key]
    configs = [place.config(**{key: value}) for value, _ in cases]
    assert [{**DEFAULTS, key: kept} for _, kept in cases] == [*map(attrs.asdict, configs)]
    assert {int, float, str} >= {type(getattr(config, key)) for config in configs}


@pytest.mark.parametrize("ranks", [(), (0,), (1, 0)])
def test_ranks_are_kept_as_a_tuple(place: Place, ranks: tuple[int, ...]) -> None:
    """Distinct ranks below `n_readers` are taken from every place; () means none."""
    config = place.config(local_reader_ranks=ranks, n_readers=2, bind=BIND)
    assert ranks == config.local_reader_ranks
    assert {int} >= {type(rank) for rank in config.local_reader_ranks}


@pytest.mark.parametrize("key", KEYS)
def test_what_is_not_allowed_is_refused(place: Place, key: str) -> None:
    """The error names the place, the key, the value and what is allowed, in every place."""
    values = [value for other, value in REFUSED if other == key]
    assert values
    for value in values:
        text = refusal_of(place, {**companions(key), key: value})
        missing = [part for part in (place.origin(key), key, ALLOWED[key]) if part not in text]
        assert ([], True, text) == (missing, place.shows(value, text), text)


@pytest.mark.parametrize(
    ("settings", "key", "value", "allowed"),
    [
        ({"local_reader_ranks": (0, 2), "n_readers": 2}, "local_reader_ranks", "(0, 2)", "is 2"),
        ({"local_reader_ranks": (0, 1)}, "local_reader_ranks", "(0, 1)", "n_readers is 1"),
        ({"local_reader_ranks": (4095,), "n_readers": 4095}, "local_reader_ranks", "4095", "4095"),
    ],
)
def test_ranks_lie_below_n_readers(
    place: Place, settings: dict[str, Any], key: str, value: str, allowed: str
) -> None:
    """A local rank from `n_readers` on is refused, and the error names that number too."""
    with pytest.raises(ConfigError) as caught:
        place.config(**settings)
    text = str(caught.value)
    missing = [part for part in (place.origin(key), key, value, allowed) if part not in text]
    assert ([], text) == (missing, text)


@pytest.mark.parametrize(
    ("ranks", "n_readers", "remote"), [((), 1, "[0]"), ((1,), 3, "[0, 2]"), ((0, 1), 3, "[2]")]
)
def test_remote_ranks_need_an_address(
    place: Place, ranks: tuple[int, ...], n_readers: int, remote: str
) -> None:
    """Without `bind` the error names the key, the ranks that are remote and who gave no address."""
    with pytest.raises(ConfigError) as caught:
        place.config(local_reader_ranks=ranks, n_readers=n_readers)
    text = str(caught.value)
    origin = "QueueConfig(" if place.name == "constructor" else "default"
    missing = [part for part in (origin, "bind", "None", remote) if part not in text]
    assert ([], text) == (missing, text)


def test_an_unknown_key_is_refused(place: Place) -> None:
    """A key that is no setting is named together with its place and the known ones."""
    if place.name == "constructor":  # the language refuses it
        with pytest.raises(TypeError, match="n_reader"):
            place.config(n_reader=1)
        return
    with pytest.raises(ConfigError) as caught:
        place.config(n_reader=1)
    text = str(caught.value)
    where = "load(n_reader=" if place.name == "override" else place.origin("n_reader")
    known = "SHMCAST_N_READERS" if place.name == "variable" else "n_readers"
    missing = [part for part in (where, known) if part not in text]
    assert ([], text) == (missing, text)


# Values that only Python can give


@pytest.mark.parametrize("key", RANGES)
def test_numpy_integers_are_integers(key: str) -> None:
    """A numpy integer is taken and kept as a plain int."""
    kept = [getattr(QueueConfig(**{key: kind(2048)}), key) for kind in (np.int64, np.uint16)]
    assert [(2048, int), (2048, int)] == [(number, type(number)) for number in kept]


def test_numpy_numbers_are_seconds() -> None:
    """A numpy number counts as seconds, as it does for every other number."""
    kept = [
        QueueConfig(warn_after_s=kind(2)).warn_after_s for kind in (np.int64, np.float64, np.int8)
    ]
    assert [2, 2, 2] == kept


def test_seconds_are_kept_as_a_float() -> None:
    """Seconds are a float, wherever they come from: one that no float has is rounded."""
    assert 2.0**53 == QueueConfig(warn_after_s=2**53 + 1).warn_after_s


def test_enumerated_integers_are_kept_plain() -> None:
    """An IntEnum member is an integer, and the attribute is a plain int."""

    class Count(IntEnum):
        TWO = 2

    assert int is type(QueueConfig(n_readers=Count.TWO).n_readers)


@pytest.mark.parametrize(
    "ranks", [[0, 1], range(2), np.arange(2), (rank for rank in (0, 1)), iter([0, 1])]
)
def test_any_finite_series_of_ranks_is_kept_as_a_tuple(ranks: Any) -> None:
    """What can be iterated once becomes a tuple of plain ints."""
    kept = QueueConfig(n_readers=2, local_reader_ranks=ranks).local_reader_ranks
    assert ((0, 1), {int}) == (kept, set(map(type, kept or ())))


def test_no_more_ranks_are_read_than_a_queue_can_have() -> None:
    """An endless iterator of ranks is refused, and not read until memory is full."""

    def endless() -> Iterator[int]:
        for _ in range(100_000):
            yield 0
        pytest.fail("100000 ranks were read")

    with pytest.raises(ConfigError):
        QueueConfig(local_reader_ranks=endless())


class BadIndex:
    def __index__(self) -> int:
        raise RuntimeError("no index today")


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr today")


class BadIterator:
    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no iterator today")


class NotAnIndex:
    def __index__(self) -> Any:
        return "4096"  # noqa: PLE0305  # that is what is wrong with it


def failing_ranks() -> Iterator[int]:
    yield 0
    raise KeyError("no more ranks today")


HOSTILE = [
    lambda: 10**5000,
    lambda: -(10**5000),
    lambda: math.nan,
    lambda: math.inf,
    lambda: -math.inf,
    lambda: 0.5 + 1j,
    lambda: Decimal(4096),
    lambda: Fraction(4096),
    lambda: "",
    lambda: " ",
    lambda: "\0",
    lambda: "4096\0",
    lambda: "\ud800",
    lambda: "9" * 5000,
    lambda: "9" * 5000 + " GiB",
    lambda: b"",
    lambda: b"4096",
    dict,
    lambda: {0: 1},
    lambda: [[0]],
    lambda: ["0"],
    lambda: [0, 10**5000],
    lambda: [np.True_],
    lambda: np.True_,
    lambda: np.array([0.5]),
    lambda: np.zeros((2, 2)),
    object,
    lambda: int,
    lambda: ...,
    lambda: NotImplemented,
    BadIndex,
    BadRepr,
    BadIterator,
    NotAnIndex,
    lambda: [BadIndex()],
    failing_ranks,
]


def outcomes_of(key: str, make: Callable[[], Any]) -> list[str]:
    """What the constructor and `load` make of this value."""
    outcomes = []
    for config in (QueueConfig, QueueConfig.load):
        try:
            config(**{key: make()})
            outcomes.append("taken")
        except ConfigError as error:
            outcomes.append("refused" if key in str(error) else "refused without the key")
        except Exception as error:
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.parametrize("make", HOSTILE, ids=[f"hostile{i}" for i in range(len(HOSTILE))])
def test_hostile_values_are_refused(make: Callable[[], Any]) -> None:
    """Whatever a value does when it is looked at, the answer is a ConfigError with the key."""
    outcomes = {key: outcomes_of(key, make) for key in KEYS}
    assert {key: ["refused", "refused"] for key in KEYS} == outcomes


def test_an_interrupt_is_not_taken_for_a_wrong_value() -> None:
    """Ctrl-C while a value is looked at passes through."""

    class Interrupted:
        def __index__(self) -> int:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        QueueConfig(n_readers=Interrupted())  # type: ignore[arg-type]


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.decimals(),
        st.text(),
        st.binary(),
        st.datetimes(),
    ),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=5,
)


@given(key=st.sampled_from(KEYS), value=ANYTHING)
def test_any_object_gives_a_config_or_a_config_error(key: str, value: object) -> None:
    """No object makes the constructor raise anything but a ConfigError, and `load` agrees."""
    try:
        made = QueueConfig(**{key: value})  # type: ignore[arg-type]
    except ConfigError:
        with pytest.raises(ConfigError):
            QueueConfig.load(**{key: value})
    else:
        assert made == QueueConfig.load(**{key: value})


@given(
    key=st.sampled_from(SIZES),
    text=st.one_of(
        st.text(), st.from_regex(r"[0-9.+_-]{1,5} {0,2}[kKMGT]?i?[bB]?", fullmatch=True)
    ),
)
@example(key="chunk_bytes", text="1024\n")
@example(key="chunk_bytes", text="1_024")
@example(key="chunk_bytes", text="+1024")
def test_a_size_is_a_number_and_a_unit(key: str, text: str) -> None:
    """A text is a size if it is digits, at most one space and a known unit, and nothing else."""
    digits = text.strip().rstrip("BKMGi").rstrip(" ")
    unit = text.strip().removeprefix(digits)
    factor = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}.get(unit.removeprefix(" "))
    if unit == " " or not (digits.isascii() and digits.isdecimal()):
        factor = None
    least, most = RANGES[key]
    if factor is not None and least <= int(digits) * factor <= most:
        assert int(digits) * factor == getattr(QueueConfig(**{key: text}), key)
    else:
        with pytest.raises(ConfigError):
            QueueConfig(**{key: text})


# Places


def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An override wins over a variable, that over the file, that over the default."""
    path = toml_file(tmp_path, {"n_readers": 2, "n_chunks": 2, "spin_us": 2})
    monkeypatch.setenv("SHMCAST_N_READERS", "3")
    monkeypatch.setenv("SHMCAST_N_CHUNKS", "3")
    config = QueueConfig.load(path, n_readers=4)
    got = config.n_readers, config.n_chunks, config.spin_us, config.chunk_bytes
    assert (4, 3, 2, 2 * MIB) == got


def test_a_place_that_is_overridden_is_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong value is an error also where another place wins over it."""
    path = toml_file(tmp_path, {"n_readers": 0})
    with pytest.raises(ConfigError, match=r"shmcast\.toml"):
        QueueConfig.load(path, n_readers=1)
    monkeypatch.setenv("SHMCAST_N_READERS", "0")
    with pytest.raises(ConfigError, match="SHMCAST_N_READERS"):
        QueueConfig.load(n_readers=1)


def test_an_error_of_two_settings_names_the_place_of_the_wrong_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a file that do not fit a variable's `n_readers` are blamed on the file."""
    path = toml_file(tmp_path, {"local_reader_ranks": (0, 1)})
    monkeypatch.setenv("SHMCAST_N_READERS", "1")
    with pytest.raises(ConfigError) as caught:
        QueueConfig.load(path)
    assert str(path) in str(caught.value)


def test_the_plain_constructor_reads_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a setting, nor a wrong value, nor an unknown variable reaches the constructor."""
    monkeypatch.setenv("SHMCAST_N_READERS", "7")
    monkeypatch.setenv("SHMCAST_N_CHUNKS", "none")
    monkeypatch.setenv("SHMCAST_UNKNOWN", "1")
    assert DEFAULTS == attrs.asdict(QueueConfig())


def test_other_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of another prefix is nobody's business here."""
    for variable in ("SHMCAST", "shmcast_n_readers", "N_READERS", "MY_SHMCAST_N_READERS"):
        monkeypatch.setenv(variable, "7")
    assert 1 == QueueConfig.load().n_readers


@pytest.mark.parametrize(
    "variable",
    [
        "SHMCAST_",
        "SHMCAST_N_READER",
        "SHMCAST_n_readers",
        "SHMCAST_N_READERS_",
        "SHMCAST__N_READERS",
        "SHMCAST_PATH",
        "SHMCAST_PORT",
        "SHMCAST_WRITER_PORT",
        "SHMCAST_WRITER_PORT_HTTP",
        "SHMCAST_SERVICE",
        "SHMCAST_SERVICE_PORTS",
        "SHMCAST_CHUN\N{KELVIN SIGN}_BYTES",
        os.fsdecode(b"SHMCAST_\xff"),
    ],
)
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A variable of the prefix that is no setting is named, together with the known ones."""
    monkeypatch.setenv(variable, "4096")
    with pytest.raises(ConfigError) as caught:
        QueueConfig.load()
    assert variable.encode("utf-8", "replace") in str(caught.value).encode("utf-8", "replace")
    assert "SHMCAST_N_READERS" in str(caught.value)


@pytest.mark.parametrize("service", ["SHMCAST", "SHMCAST_WRITER", "SHMCAST_V2_3"])
def test_what_kubernetes_sets_is_ignored(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    """A Service called `shmcast` or `shmcast-…` keeps no queue of its pods from being made."""
    for variable, text in (
        ("SERVICE_HOST", "192.0.2.7"),
        ("SERVICE_PORT", "80"),
        ("SERVICE_PORT_HTTP_2", "80"),
        ("PORT", "tcp://192.0.2.7:80"),
        ("PORT_80_TCP", "tcp://192.0.2.7:80"),
        ("PORT_80_TCP_PROTO", "tcp"),
        ("PORT_80_TCP_PORT", "80"),
        ("PORT_80_TCP_ADDR", "192.0.2.7"),
        ("PORT_53_UDP", "udp://192.0.2.7:53"),
    ):
        monkeypatch.setenv(f"{service}_{variable}", text)
    monkeypatch.setenv("SHMCAST_N_READERS", "3")
    assert QueueConfig(n_readers=3) == QueueConfig.load()


@pytest.mark.parametrize(
    ("text", "kept"), [("", ()), ("0", (0,)), ("0,1", (0, 1)), ("1, 0", (1, 0))]
)
def test_a_tuple_in_a_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, kept: tuple[int, ...]
) -> None:
    """Ranks are written with commas between them, and an empty text is ()."""
    monkeypatch.setenv("SHMCAST_LOCAL_READER_RANKS", text)
    assert kept == QueueConfig.load(n_readers=2, bind=BIND).local_reader_ranks


@pytest.mark.parametrize(
    "text", ["0,", ",0", "0,,1", "0;1", "0 1", "(0, 1)", "[0]", "0.0", "a", "None", "9" * 5000]
)
def test_a_malformed_tuple_in_a_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Anything but numbers and commas is refused, and the error shows the text as it was."""
    monkeypatch.setenv("SHMCAST_LOCAL_READER_RANKS", text)
    with pytest.raises(ConfigError) as caught:
        QueueConfig.load(n_readers=2, bind=BIND)
    assert "SHMCAST_LOCAL_READER_RANKS" in str(caught.value)
    assert text[:100] in str(caught.value)


# Files


class PathLike:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


@pytest.mark.parametrize("kind", [str, Path, PathLike])
def test_a_path_is_a_string_or_like_a_path(tmp_path: Path, kind: Any) -> None:
    """`path` is taken as str, as Path and as any other PathLike."""
    assert 3 == QueueConfig.load(kind(toml_file(tmp_path, {"n_readers": 3}))).n_readers


def test_an_error_in_a_file_of_a_path_like_names_the_path(tmp_path: Path) -> None:
    """The error shows where a PathLike leads, not the object."""
    path = toml_file(tmp_path, {"n_readers": 0})
    with pytest.raises(ConfigError, match=r"shmcast\.toml"):
        QueueConfig.load(PathLike(path))
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"shmcast\.toml"):
        QueueConfig.load(PathLike(path))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[shmcast",
        b"[shmcast]\nn_readers = \n",
        b"[shmcast]\nn_readers = 1\nn_readers = 1\n",
        b"[shmcast]\n[shmcast]\n",
        b"[shmcast]\nn_readers = 01\n",
        b"[shmcast]\nreceive = 'copy\n",
        b"[shmcast]\nreceive = '\xff'\n",
        "[shmcast]\nn_readers = 2\n".encode("utf-16"),
        b"\xef\xbb\xbf[shmcast]\n",
        b"\0",
        b"n_readers = 2\n",
        b"[other]\nn_readers = 2\n",
        b"[SHMCAST]\nn_readers = 2\n",
        b"[tool.shmcast]\nn_readers = 2\n",
        b"shmcast = 1\n",
        b"shmcast = 'x'\n",
        b"shmcast = [1]\n",
        b"[[shmcast]]\nn_readers = 2\n",
        b"[shmcast]\nn_readers = 1979-05-27\n",
        b"[shmcast]\nn_readers = {}\n",
        b"[shmcast.n_readers]\n",
        b"[shmcast]\nn_readers.x = 1\n",
        b"[shmcast]\nlocal_reader_ranks = [[0]]\n",
        b"[shmcast]\nlocal_reader_ranks = '0'\n",
        b"[shmcast]\nchunk_bytes = 1_000.0\n",
        b"[shmcast]\nwarn_after_s = nan\n",
        b"[shmcast]\nwarn_after_s = inf\n",
        b"[shmcast]\nn_chunks = " + b"9" * 5000,
        b"[shmcast]\nn_chunks = 0x" + b"F" * 5000,
        b"[shmcast]\nn_chunks = " + b"[" * 100_000,
        b"[shmcast]\nn_chunks = " + b"{a=" * 100_000,
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is no TOML, without the table, or with a wrong one, is named in the error."""
    path = tmp_path / "shmcast.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        QueueConfig.load(path)
    assert str(path) in str(caught.value)


def test_an_empty_table_is_enough(tmp_path: Path) -> None:
    """A file with an empty table gives the defaults."""
    assert DEFAULTS == attrs.asdict(QueueConfig.load(toml_file(tmp_path, {})))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """A path that leads nowhere, or to a directory, is an error that names it."""
    for path in (tmp_path / "missing.toml", tmp_path, tmp_path / "no" / "such" / "directory"):
        with pytest.raises(ConfigError) as caught:
            QueueConfig.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "path", ["", "a\0b", "\ud800", "x" * 5000, b"bytes.toml", 0, True, 1.5, [], object()]
)
def test_what_is_no_path_is_refused(path: Any) -> None:
    """Anything that can't lead to a file is a ConfigError, also a number, which is a descriptor."""
    with pytest.raises(ConfigError):
        QueueConfig.load(path)


# Round trip


def sizes(key: str) -> st.SearchStrategy[tuple[int | str, int]]:
    """A size as it is written, and what it means."""
    least, most = RANGES[key]

    def texts(unit: str, unit_bytes: int) -> st.SearchStrategy[tuple[int | str, int]]:
        return st.builds(
            lambda number, space: (f"{number}{space}{unit}", number * unit_bytes),
            st.integers(-(-least // unit_bytes), most // unit_bytes),
            st.sampled_from(["", " "] if unit else [""]),
        )

    return st.one_of(
        st.integers(least, most).map(lambda number: (number, number)),
        texts("", 1),
        texts("B", 1),
        texts("KiB", KIB),
        texts("MiB", MIB),
        texts("GiB", GIB),
    )


def same(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, Any]]:
    return values.map(lambda value: (value, value))


@st.composite
def all_settings(draw: st.DrawFn) -> dict[str, tuple[Any, Any]]:
    """Some settings that are allowed together: as written, and as kept."""
    free = {key: sizes(key) for key in SIZES}
    free |= {key: same(st.integers(*RANGES[key])) for key in ("n_chunks", "spin_us")}
    free |= {key: same(st.sampled_from(words)) for key, words in CHOICES.items()}
    seconds = st.integers(1, 10**18) | st.floats(
        0, exclude_min=True, allow_infinity=False, allow_nan=False
    )
    free["warn_after_s"] = seconds.map(lambda number: (number, float(number)))
    settings = draw(st.fixed_dictionaries({}, optional=free))
    n_readers = draw(st.integers(1, 50) | st.just(4096))
    ranks = draw(
        st.none() | st.lists(st.integers(0, n_readers - 1), unique=True, max_size=50).map(tuple)
    )
    settings["n_readers"] = n_readers, n_readers
    if ranks is not None:
        settings["local_reader_ranks"] = ranks, ranks
    if (ranks is not None and len(ranks) < n_readers) or draw(st.booleans()):
        host = draw(st.from_regex(r"[a-z0-9.-]{1,20}|\[[0-9a-f:]{1,20}\]", fullmatch=True))
        bind = f"tcp://{host}:{draw(st.integers(0, 65535))}"
        settings["bind"] = bind, bind
    return settings


@given(settings=all_settings())
def test_what_is_accepted_comes_back_from_a_file(settings: dict[str, tuple[Any, Any]]) -> None:
    """What the constructor takes, `load` takes from a file too, in the same sense."""
    written = {key: value for key, (value, _) in settings.items()}
    kept = {key: value for key, (_, value) in settings.items()}
    config = QueueConfig(**written)
    assert {**DEFAULTS, **kept} == attrs.asdict(config)
    with tempfile.TemporaryDirectory() as directory:
        assert config == QueueConfig.load(toml_file(Path(directory), written))
        attributes = {
            key: value for key, value in attrs.asdict(config).items() if value is not None
        }
        assert config == QueueConfig.load(toml_file(Path(directory), attributes))


@given(settings=all_settings())
def test_what_is_accepted_comes_back_from_variables(
    settings: dict[str, tuple[Any, Any]],
) -> None:
    """What the constructor takes, `load` takes from variables too, in the same sense."""
    written = {key: value for key, (value, _) in settings.items()}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in written.items():
            patch.setenv(f"SHMCAST_{key.upper()}", text_of(value))
        assert QueueConfig(**written) == QueueConfig.load()


@pytest.mark.parametrize(
    "split", [split for n in range(4) for split in itertools.combinations(range(3), n)]
)
def test_settings_that_are_only_right_together_may_come_from_different_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: tuple[int, ...]
) -> None:
    """Rules over several settings are checked when all places have been read."""
    settings = {"n_readers": 3, "local_reader_ranks": (2,), "bind": BIND}
    above = {key: value for i, (key, value) in enumerate(settings.items()) if i in split}
    below = {key: value for key, value in settings.items() if key not in above}
    for key, value in above.items():
        monkeypatch.setenv(f"SHMCAST_{key.upper()}", text_of(value))
    assert QueueConfig(**settings) == QueueConfig.load(toml_file(tmp_path, below))
