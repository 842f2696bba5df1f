"""`Handle`: what a reader needs to attach. Anyone who has it can read the queue."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final, Self

import attrs

from shmcast.config import ENDPOINT, MOST_READERS
from shmcast.errors import ProtocolError

__all__ = ["Handle"]

_VERSION: Final = 1
TOKEN_BYTES: Final = 32
_KEY_NAMES: Final = ("server_public_key", "client_public_key", "client_secret_key")
_KEY_LENGTH: Final = 40


@attrs.frozen(kw_only=True)
class Handle:
    """
    The address of a queue and the secrets that open it; one handle serves every rank.

    It can be pickled, written as JSON and saved. `repr` shows everything but the secrets.

    Attributes:
        endpoint: the address for remote readers, or None if there are none.
        n_readers: how many readers the queue has.
        local_reader_ranks: the ranks that attach on the writer's host.
        local_address: the name of the control socket in the abstract Unix namespace.
        token: the secret that a reader presents, in hexadecimal.
        curve_keys: the writer's public key and the readers' public and secret key, in ZeroMQ's text
            form; () without remote readers, or with security "none".
    """

    endpoint: str | None
    n_readers: int
    local_reader_ranks: tuple[int, ...]
    local_address: str
    token: str = attrs.field(repr=False)
    curve_keys: tuple[str, ...] = attrs.field(repr=False, default=())

    def to_json(self) -> str:
        """The handle as a JSON object, with all secrets under `secrets`."""
        return json.dumps(
            {
                "shmcast_handle": _VERSION,
                "endpoint": self.endpoint,
                "n_readers": self.n_readers,
                "local_reader_ranks": list(self.local_reader_ranks),
                "local_address": self.local_address,
                "secrets": {
                    "token": self.token,
                    **dict(zip(_KEY_NAMES, self.curve_keys, strict=False)),
                },
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """
        The handle that `to_json` wrote.

        Raises:
            ProtocolError: the text is not a handle of this version; the error says why.
        """
        try:
            content = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            # The text is left out: it may hold a secret.
            raise ProtocolError(f"not a handle: malformed JSON ({type(error).__name__})") from None
        return cls(**_checked(content))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the handle to a file that only its owner can read and write (mode 0600)."""
        target = Path(path)
        # Written to a new file that then replaces the target, so nobody ever sees a half-written
        # file, or the mode of an old one.
        scratch = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, 0o600)  # whatever the umask
                file.write(self.to_json())
            scratch.replace(target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """
        The handle that `save` wrote.

        Raises:
            ProtocolError: the file does not hold a handle of this version.
            OSError: the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ProtocolError(f"{os.fspath(path)} is not a handle: not UTF-8 text") from None
        return cls.from_json(text)


def _checked(content: Any) -> dict[str, Any]:
    def need(condition: bool, what: str) -> None:
        if not condition:
            raise ProtocolError(f"not a handle: {what}")

    def shown(value: object) -> str:
        # Not strings: one may be a secret in the wrong place.
        if value is None or isinstance(value, bool | float):
            return repr(value)
        if isinstance(value, int) and abs(value) < 1 << 63:
            return repr(value)
        return f"a {type(value).__name__}"

    def is_count(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    need(isinstance(content, dict), "expected a JSON object")
    version = content.get("shmcast_handle")
    need(
        is_count(version) and version == _VERSION,
        f"shmcast_handle is {shown(version)}; this version of shmcast reads {_VERSION}",
    )
    endpoint, n_readers = content.get("endpoint"), content.get("n_readers")
    ranks, address = content.get("local_reader_ranks"), content.get("local_address")
    secrets = content.get("secrets")
    need(
        endpoint is None
        or (isinstance(endpoint, str) and ENDPOINT.fullmatch(endpoint) is not None),
        f"endpoint is {shown(endpoint)}",
    )
    need(is_count(n_readers) and 0 < n_readers <= MOST_READERS, f"n_readers is {shown(n_readers)}")
    need(
        isinstance(ranks, list)
        and all(is_count(rank) and 0 <= rank < n_readers for rank in ranks)
        and len(set(ranks)) == len(ranks),
        f"local_reader_ranks is {shown(ranks)}, n_readers is {n_readers}",
    )
    # A Unix address has room for 107 bytes after the leading zero byte.
    need(
        isinstance(address, str) and address.isascii() and 0 < len(address) <= 107,
        f"local_address is {shown(address)}",
    )
    token = secrets.get("token") if isinstance(secrets, dict) else None
    need(
        isinstance(token, str)
        and len(token) == 2 * TOKEN_BYTES
        and all(digit in "0123456789abcdef" for digit in token),
        "secrets.token is not a token",
    )
    keys = tuple(secrets[name] for name in _KEY_NAMES if name in secrets)
    need(
        len(keys) in (0, len(_KEY_NAMES))
        and all(isinstance(key, str) and len(key) == _KEY_LENGTH and key.isascii() for key in keys),
        "secrets contains malformed CURVE keys",
    )
    return {
        "endpoint": endpoint,
        "n_readers": n_readers,
        "local_reader_ranks": tuple(ranks),
        "local_address": address,
        "token": token,
        "curve_keys": keys,
    }
