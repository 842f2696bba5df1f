"""`Handle`: its round trips, its file, and that no error or text ever shows its secret."""

from __future__ import annotations

import json
import os
import pickle
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeQueue
from hypothesis import given
from hypothesis import strategies as st

from shmcast import Handle, ProtocolError

TOKEN = "0123456789abcdef" * 4
HANDLE = Handle(
    endpoint=None,
    n_readers=3,
    local_reader_ranks=(0, 1, 2),
    local_address="shmcast-00112233445566778899aabbccddeeff",
    token=TOKEN,
)
HANDLES = [
    HANDLE,
    Handle(
        endpoint="tcp://127.0.0.1:41234",
        n_readers=4,
        local_reader_ranks=(3, 1),
        local_address="x",
        token="f" * 64,
    ),
    Handle(
        endpoint="tcp://[::1]:1",
        n_readers=1,
        local_reader_ranks=(),
        local_address="y" * 107,
        token="0" * 64,
    ),
]
#: So many digits in a row are not there by chance.
TELLING_DIGITS = 12


def content() -> dict[str, Any]:
    """The JSON object of a handle."""
    loaded: dict[str, Any] = json.loads(HANDLE.to_json())
    return loaded


def shows_secret(text: str, secret: str = TOKEN) -> bool:
    """Whether the text has a part of the secret in it."""
    parts = (secret[i : i + TELLING_DIGITS] for i in range(len(secret) - TELLING_DIGITS + 1))
    return any(part in text for part in parts)


def said_by(error: BaseException) -> str:
    """All that a log shows of an error, its causes included."""
    return "".join(traceback.format_exception(error)) + repr(error) + str(error.args)


# Round trips


@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_survives_json(handle: Handle) -> None:
    """What `to_json` writes, `from_json` reads back."""
    assert handle == Handle.from_json(handle.to_json())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_survives_pickling(handle: Handle, protocol: int) -> None:
    """A pickled handle comes back whole, its secret too."""
    back = pickle.loads(pickle.dumps(handle, protocol))
    assert (handle, handle.token) == (back, back.token)


@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_survives_a_file(handle: Handle, tmp_path: Path) -> None:
    """What `save` writes, `load` reads back, by str and by Path."""
    path = tmp_path / "handle.json"
    handle.save(path)
    assert [handle, handle] == [Handle.load(path), Handle.load(str(path))]


def test_a_real_handle_survives_every_way(make_queue: MakeQueue, tmp_path: Path) -> None:
    """The handle of a queue is the same after JSON, pickle and a file, and on every export."""
    queue, _ = make_queue(n_readers=2)
    handle = queue.export_handle()
    handle.save(tmp_path / "handle")
    ways = [
        queue.export_handle(),
        Handle.from_json(handle.to_json()),
        pickle.loads(pickle.dumps(handle)),
        Handle.load(tmp_path / "handle"),
    ]
    assert [handle] * 4 == ways


def test_the_json_object_is_as_documented() -> None:
    """The object holds endpoint, readers, ranks and address, and every secret under `secrets`."""
    loaded = content()
    secrets = loaded.pop("secrets")
    expected = {
        "shmcast_handle": 1,
        "endpoint": None,
        "n_readers": 3,
        "local_reader_ranks": [0, 1, 2],
        "local_address": HANDLE.local_address,
    }
    assert expected == loaded
    assert {"token": TOKEN} == secrets
    assert not shows_secret(json.dumps(loaded))


def test_a_handle_is_frozen() -> None:
    """No field of a handle can be set."""
    with pytest.raises(AttributeError):
        HANDLE.n_readers = 5  # type: ignore[misc]


# The secret


@pytest.mark.parametrize("show", [repr, str, "{}".format, "%s".__mod__, ascii])
def test_a_handle_is_shown_without_its_secret(show: Callable[[object], str]) -> None:
    """Every text of a handle has all but the token."""
    text = show(HANDLE)
    assert not shows_secret(text)
    assert [] == [part for part in (HANDLE.local_address, "(0, 1, 2)") if part not in text]


@pytest.mark.parametrize("show", [repr, str])
def test_the_ends_are_shown_without_the_secret(
    show: Callable[[object], str], make_queue: MakeQueue
) -> None:
    """The text of a queue and of a reader has the address and not the token."""
    queue, (reader,) = make_queue()
    handle = queue.export_handle()
    for end in (queue, reader):
        assert not shows_secret(show(end), handle.token)
        assert handle.local_address in show(end)


def test_every_queue_has_its_own_secret(make_queue: MakeQueue) -> None:
    """No two queues share a token or an address."""
    handles = [make_queue()[0].export_handle() for _ in range(5)]
    assert 5 == len({handle.token for handle in handles})
    assert 5 == len({handle.local_address for handle in handles})


# The file


@pytest.fixture(params=[0, 0o022, 0o077, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The process's umask, set for the test."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_is_private(tmp_path: Path, umask: int) -> None:
    """A saved handle has mode 0600 whatever the umask, and nothing else is left beside it."""
    path = tmp_path / "handle.json"
    HANDLE.save(path)
    assert 0o600 == mode_of(path)
    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize("old_mode", [0o644, 0o666, 0o400, 0o777])
def test_an_old_file_becomes_private(tmp_path: Path, old_mode: int, umask: int) -> None:
    """Saving over a file that others can read leaves one that they can't, with the new content."""
    path = tmp_path / "handle.json"
    path.touch()
    path.chmod(old_mode)
    HANDLE.save(path)
    assert (0o600, HANDLE) == (mode_of(path), Handle.load(path))
    assert [path] == list(tmp_path.iterdir())


def test_who_reads_an_old_file_never_gets_the_secret(tmp_path: Path) -> None:
    """A file that was opened before the handle is saved over it stays without the secret."""
    path = tmp_path / "handle.json"
    path.write_text("old")
    with path.open() as opened_before:
        HANDLE.save(path)
        assert "old" == opened_before.read()


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """Saving over a symbolic link does not write the secret where the link leads."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("old")
    path = tmp_path / "handle.json"
    path.symlink_to(elsewhere)
    HANDLE.save(path)
    assert ("old", HANDLE) == (elsewhere.read_text(), Handle.load(path))


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    """Where the handle can't be saved there is an OSError, and no file with the secret."""
    path = tmp_path / "handle.json"
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        HANDLE.save(path)
    assert [path] == list(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        HANDLE.save(tmp_path / "missing" / "handle.json")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    """Loading from nowhere says so as an OSError."""
    with pytest.raises(FileNotFoundError):
        Handle.load(tmp_path / "missing")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        HANDLE.to_json().encode()[:-1],
        HANDLE.to_json().encode() + b"\xff",
        HANDLE.to_json().encode("utf-16"),
        b"\xef\xbb\xbf" + HANDLE.to_json().encode(),
        b"\0" * 100,
        b"\x80\x05N.",
    ],
)
def test_a_wrong_file_is_a_protocol_error(tmp_path: Path, data: bytes) -> None:
    """A file that is no handle is a ProtocolError without the secret."""
    path = tmp_path / "handle.json"
    path.write_bytes(data)
    with pytest.raises(ProtocolError) as caught:
        Handle.load(path)
    assert not shows_secret(said_by(caught.value))


# Malformed input


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "true",
        "1",
        '"handle"',
        "[]",
        "{}",
        "NaN",
        "{",
        f'["{TOKEN}"]',
        f'{{"{TOKEN}": 1}}',
        f'{{"secrets": {{"token": "{TOKEN}"}}}}',
        f'{{"secrets": {{"token": "{TOKEN}"}}',
        HANDLE.to_json() + "x",
        HANDLE.to_json() * 2,
        HANDLE.to_json().replace('"', "'"),
        HANDLE.to_json().replace(TOKEN, TOKEN + "\n"),
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        '{"shmcast_handle": ' + "9" * 5000 + "}",
        "\0",
        "\ud800",
        "\N{ZERO WIDTH NO-BREAK SPACE}" + HANDLE.to_json(),
    ],
)
def test_a_wrong_text_is_a_protocol_error(text: str) -> None:
    """A text that is no JSON object of a handle is a ProtocolError without the secret."""
    with pytest.raises(ProtocolError) as caught:
        Handle.from_json(text)
    assert not shows_secret(said_by(caught.value))


@pytest.mark.parametrize("value", [None, 1, 1.5, [], {}, object(), b"", b"\xff\xff"])
def test_what_is_no_text_is_a_protocol_error(value: Any) -> None:
    """Anything but a text is a ProtocolError too."""
    with pytest.raises(ProtocolError):
        Handle.from_json(value)


@pytest.mark.parametrize("version", [0, 2, -1, "1", 1.5, True, None, [1], {}, 10**1000])
def test_another_version_is_refused(version: object) -> None:
    """A handle of another version is refused, and the error names both versions."""
    with pytest.raises(ProtocolError, match="version") as caught:
        Handle.from_json(json.dumps({**content(), "shmcast_handle": version}))
    assert "1" in str(caught.value)


@pytest.mark.parametrize("key", ["n_readers", "local_reader_ranks", "local_address", "secrets"])
def test_every_field_is_needed(key: str) -> None:
    """Without one of its fields it is no handle, and the error names the field."""
    loaded = content()
    del loaded[key]
    with pytest.raises(ProtocolError, match=key) as caught:
        Handle.from_json(json.dumps(loaded))
    assert not shows_secret(said_by(caught.value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("endpoint", value) for value in (1, True, [], {}, 0.5)),
        *(("n_readers", value) for value in (0, -1, True, 1.0, "3", None, [], {}, 1e400, 2)),
        *(
            ("local_reader_ranks", value)
            for value in (
                None,
                0,
                "012",
                {},
                [3],
                [-1],
                [0, 0],
                [True],
                [0.0],
                ["0"],
                [[0]],
                [None],
            )
        ),
        *(
            ("local_address", value)
            for value in (None, 1, "", [], {}, "x" * 108, "ä", "\ud800", True)
        ),
        *(("secrets", value) for value in (None, 1, "", TOKEN, [TOKEN], {}, {"Token": TOKEN})),
    ],
)
def test_a_wrong_field_is_refused(key: str, value: object) -> None:
    """A field of a wrong type or range is refused, and the error names a field, not the secret."""
    with pytest.raises(ProtocolError) as caught:
        Handle.from_json(json.dumps({**content(), key: value}))
    text = str(caught.value)
    assert (True, False) == (
        key in text or "n_readers" in text,
        shows_secret(said_by(caught.value)),
    )


@pytest.mark.parametrize(
    "token",
    [
        "",
        TOKEN[:-1],
        TOKEN + "0",
        TOKEN.upper(),
        TOKEN[:-1] + "g",
        TOKEN[:-1] + " ",
        TOKEN[:-1] + "\0",
        TOKEN[:-1] + "٣",
        "٣" * 64,
        int(TOKEN, 16),
        None,
        True,
        [TOKEN],
        {"token": TOKEN},
        list(TOKEN),
    ],
)
def test_a_wrong_token_is_refused_and_not_shown(token: object) -> None:
    """A token that is nearly right is refused, and no part of it is shown."""
    with pytest.raises(ProtocolError, match="token") as caught:
        Handle.from_json(json.dumps({**content(), "secrets": {"token": token}}))
    said = said_by(caught.value)
    assert (False, False) == (shows_secret(said), shows_secret(said, str(int(TOKEN, 16))))


@pytest.mark.parametrize(
    "key", ["shmcast_handle", "endpoint", "n_readers", "local_reader_ranks", "local_address"]
)
@pytest.mark.parametrize(
    "moved",
    [content, lambda: content()["secrets"], lambda: [TOKEN]],
    ids=["handle", "secrets", "token"],
)
def test_a_secret_in_the_wrong_place_is_not_shown(key: str, moved: Callable[[], Any]) -> None:
    """A handle wrapped into another one, or cut together wrongly, is refused without showing it."""
    with pytest.raises(ProtocolError) as caught:
        Handle.from_json(json.dumps({**content(), key: moved()}))
    assert not shows_secret(said_by(caught.value))


def check(text: str) -> None:
    """The text is a handle that comes back as itself, or a ProtocolError without the secret."""
    said = ""
    try:
        handle = Handle.from_json(text)
    except ProtocolError as error:
        said = said_by(error)
    else:
        assert handle == Handle.from_json(handle.to_json())
        assert not shows_secret(repr(handle), handle.token)
    assert not shows_secret(said)


@given(data=st.data())
def test_cut_and_changed_json(data: st.DataObject) -> None:
    """Whatever part of the text is lost or replaced, it is a handle or a ProtocolError."""
    text = HANDLE.to_json()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 200)))
        new = data.draw(st.one_of(st.just(""), st.sampled_from('{}[]":,0e'), st.text(max_size=5)))
        text = text[:start] + new + text[end:]
    check(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(data=st.data())
def test_changed_fields(data: st.DataObject) -> None:
    """Whatever a field is replaced by, it is a handle or a ProtocolError."""
    loaded = content()
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(content())))
        loaded[key] = data.draw(VALUES | st.sampled_from([content()[k] for k in sorted(content())]))
    check(json.dumps(loaded))


@given(text=st.text() | VALUES.map(json.dumps))
def test_any_text(text: str) -> None:
    """Any text at all is a handle or a ProtocolError."""
    check(text)
