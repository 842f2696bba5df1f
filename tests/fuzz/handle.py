"""A handle's text: `PYTHONPATH=tests python -m fuzz handle`."""

import contextlib
import json

from shmcast import Handle, MessageReader, ProtocolError, ShmcastError

CONTENT = {
    "shmcast_handle": 1,
    "endpoint": "tcp://127.0.0.1:1",
    "n_readers": 3,
    "local_reader_ranks": [0, 2],
    "local_address": "shmcast-fuzz",
    "secrets": {
        "token": "0" * 64,
        "server_public_key": "a" * 40,
        "client_public_key": "b" * 40,
        "client_secret_key": "c" * 40,
    },
}
SEEDS = [
    json.dumps(CONTENT).encode(),
    json.dumps({**CONTENT, "endpoint": None, "secrets": {"token": "f" * 64}}).encode(),
    json.dumps({**CONTENT, "n_readers": 10**8}).encode(),
    b'{"shmcast_handle": 1e999, "n_readers": [[[[{"\\ud800": NaN}]]]]}',
]


def one_input(data: bytes) -> None:
    """Any text is a handle that comes back as itself, or refused; wrong ranks are refused too."""
    try:
        handle = Handle.from_json(data.decode(errors="replace"))
    except ProtocolError:
        return
    assert handle == Handle.from_json(handle.to_json())
    with contextlib.suppress(ValueError):
        MessageReader(handle, -1)
        raise AssertionError("rank -1 was taken")
    for rank in handle.local_reader_ranks[:1]:
        with contextlib.suppress(ShmcastError):  # nobody listens
            MessageReader(handle, rank).close()
