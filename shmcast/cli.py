"""The command `shmcast`. The result alone goes to stdout; progress and errors go to stderr."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Final

import click

from shmcast.config import MOST_READERS, QueueConfig, from_environment, from_file
from shmcast.demo import InputError, Plan, run, show
from shmcast.errors import ConfigError, ShmcastError

__all__ = ["main"]

_DEFAULT_READERS: Final = 2
_DEFAULT_MESSAGES: Final = 3000  # about 20 s on a machine with two cores
_DEFAULT_ROUNDS: Final = 3  # how often each file is sent

_INTERRUPTED_STATUS: Final = 130  # 128 + SIGINT, as in shells


@click.group("shmcast")
@click.version_option(package_name="shmcast")
def main() -> None:
    """Broadcast Python objects and large CPU tensors to many processes."""


@main.command()
@click.argument(
    "files",
    metavar="[FILE]...",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--readers",
    "n_readers",
    type=click.IntRange(1, MOST_READERS),
    help=f"How many reader processes; {_DEFAULT_READERS} unless a setting says otherwise.",
)
@click.option(
    "--messages",
    "n_messages",
    type=click.IntRange(min=1),
    help=f"How many messages; {_DEFAULT_MESSAGES}, or {_DEFAULT_ROUNDS} for each file.",
)
@click.option("--seed", default=0, show_default=True, help="What the messages are made from.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="A TOML file with settings of the queue. SHMCAST_* variables count too.",
)
def demo(
    files: tuple[Path, ...],
    n_readers: int | None,
    n_messages: int | None,
    seed: int,
    config: Path | None,
) -> None:
    """
    Broadcast to reader processes and check every byte that arrives.

    Messages are like those of an inference engine's step: a few hundred bytes, and now and then
    60 MiB of prompt embeddings. With FILEs (.pt, .pth, .npy or .safetensors) they are the tensors
    in these. Exit status 0: all is well; 1: something did not arrive as it should; 2: the input is
    wrong; 130: interrupted.
    """
    try:
        default = len(files) * _DEFAULT_ROUNDS or _DEFAULT_MESSAGES
        sent = run(_load_config(config, n_readers), Plan(seed, files, n_messages or default))
    except (ConfigError, InputError) as error:
        raise click.UsageError(str(error)) from error
    except (ShmcastError, OSError, TypeError) as error:  # TypeError: torch refuses a tensor
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # somebody may press it again
        click.echo("Interrupted", err=True)
        sys.exit(_INTERRUPTED_STATUS)
    show(sent)


def _load_config(file: Path | None, n_readers: int | None) -> QueueConfig:
    """The settings, with the demo's own number of readers if nothing sets one."""
    if n_readers is None and "n_readers" not in {**from_file(file), **from_environment()}:
        n_readers = _DEFAULT_READERS
    return QueueConfig.load(file, **({} if n_readers is None else {"n_readers": n_readers}))
