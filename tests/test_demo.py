"""The demo: what it sends, what it finds different, and which files it takes."""

from __future__ import annotations

import math
import pickle
import re
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import PATIENCE_S, MakeQueue

from shmcast import demo

MIB = 1 << 20


def save(path: Path, content: Any) -> Path:
    """Write a file of the kind that its ending says."""
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


def flipped(tensor: torch.Tensor, byte: int = 5) -> torch.Tensor:
    """A copy with one bit of one byte changed."""
    copy = tensor.clone()
    copy.view(torch.uint8).view(-1)[byte] ^= 0x10
    return copy


# --- The messages -------------------------------------------------------------------------------


def test_messages_depend_on_seed_and_index_alone() -> None:
    """The same seed and index make the same message bit for bit, others make another one."""
    make, again, other = (demo.Plan(seed, (), 1).message_maker() for seed in (7, 7, 8))
    for index in (0, 1, 99):
        assert demo.difference(make(index), again(index), "it") is None
        assert demo.difference(make(index), other(index), "it") is not None
    assert make(1)["token_ids"] != make(2)["token_ids"]


def test_messages_are_small_and_now_and_then_large() -> None:
    """One message in a hundred carries 60 MiB of bfloat16 with not-a-numbers, the others none."""
    make = demo.Plan(3, (), 1).message_maker()
    with_embeds = [index for index in range(1, 301) if "prompt_embeds" in make(index)]
    assert [100, 200, 300] == with_embeds
    embeds = make(100)["prompt_embeds"]
    assert (torch.bfloat16, (8192, 3840)) == (embeds.dtype, tuple(embeds.shape))
    assert 60 * MIB == embeds.nbytes
    assert bool(embeds.isnan().any())


# --- Files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nested.pt", {"layers": [{"w": torch.randn(7, 8), "b": (torch.ones(2).bool(),)}], "n": 3}),
        ("parameter.pt", torch.nn.Parameter(torch.ones(2))),
        ("one.PTH", torch.full((300, 10), math.nan, dtype=torch.complex64)),
        ("array.npy", np.asfortranarray(np.random.default_rng(1).random((40, 50)))),
        ("weights.safetensors", {"w": torch.randn(64, 64).to(torch.float8_e4m3fn)}),
    ],
)
def test_a_file_of_each_kind(tmp_path: Path, name: str, content: Any) -> None:
    """What is loaded from a file is what was saved, and makes the messages in turn."""
    path = save(tmp_path / name, content)
    make = demo.Plan(0, (path,), 2).message_maker()
    expected = {"step": 1, "file": str(path), "content": content}
    assert demo.difference(expected, make(1), "it") is None


def test_files_in_turn(tmp_path: Path) -> None:
    """Several files are sent in turn."""
    files = tuple(save(tmp_path / f"{number}.npy", np.ones(number)) for number in range(1, 4))
    make = demo.Plan(0, files, 7).message_maker()
    assert [1, 2, 3, 1, 2, 3, 1] == [len(make(index)["content"]) for index in range(7)]


def damaged(path: Path) -> Path:
    path.write_bytes(b"neither this nor that, " * 9)
    return path


def cut(path: Path) -> Path:
    whole = save(path, {"w": torch.ones(3)}).read_bytes()
    path.write_bytes(whole[:-99])
    return path


def of_plain_pickle(path: Path) -> Path:
    path.write_bytes(pickle.dumps({"w": [1.5]}))
    return path


def of_several(path: Path) -> Path:
    with path.open("wb") as file:
        np.savez(file, a=np.ones(3))
    return path


def script(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:  # as torch.jit.save makes one
        for name, content in (("constants.pkl", b""), ("data.pkl", b""), ("version", b"3")):
            archive.writestr(f"script/{name}", content)
    return path


@pytest.mark.parametrize(
    ("name", "make", "text"),
    [
        ("words.txt", damaged, "not one of .pt, .pth, .npy, .safetensors"),
        ("empty.pt", lambda path: path.touch() or path, "can't be loaded: EOFError"),
        ("damaged.pt", damaged, "can't be loaded: UnpicklingError"),
        ("damaged.npy", damaged, "can't be loaded: ValueError"),
        ("damaged.safetensors", damaged, "can't be loaded: SafetensorError"),
        ("cut.pt", cut, "can't be loaded: RuntimeError"),
        ("pickle.pt", of_plain_pickle, "can't be loaded: UnpicklingError"),
        ("several.npy", of_several, "can't be loaded: ValueError: the magic string is not"),
        ("script.pt", script, "can't be loaded: RuntimeError"),
        ("numbers.pt", lambda path: save(path, {"a": [1, 2.5]}), "holds no tensor"),
        ("set.pt", lambda path: save(path, {torch.ones(3)}), "holds no tensor"),
        ("nothing.safetensors", lambda path: save(path, {}), "holds no tensor"),
        ("code.pt", lambda path: save(path, {"code": Path("x")}), "can't be loaded: Unpickling"),
        ("module.pt", lambda path: save(path, torch.nn.Linear(2, 2)), "can't be loaded: Unpickl"),
        (
            "objects.npy",
            lambda path: save(path, np.array([{}, None])),
            "can't be loaded: ValueError: Object arrays",
        ),
        (
            "sparse.pt",
            lambda path: save(path, [torch.ones(3), torch.eye(3).to_sparse()]),
            "holds a tensor of torch.sparse_coo, cpu",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of old formats
def test_a_file_that_is_refused(
    tmp_path: Path, name: str, make: Callable[[Path], Path], text: str
) -> None:
    """A file that is damaged, holds code or no tensors is refused in one line that names it."""
    path = make(tmp_path / name)
    with pytest.raises(demo.InputError) as caught:
        demo.load_file(path)
    assert str(caught.value).startswith(f"{path}: {text}")
    assert "\n" not in str(caught.value)


# --- Bit for bit --------------------------------------------------------------------------------

_NAN_WITH_PAYLOAD = struct.unpack("=d", struct.pack("=Q", 0x7FF8_0000_0000_0001))[0]
_ARRAY = np.arange(6.0).reshape(2, 3)
_TENSOR = torch.arange(24.0).reshape(1, 2, 3, 4)


def test_the_same_bits_are_no_difference() -> None:
    """Whatever a message may hold is found equal to a copy of it, not-a-numbers too."""

    def make() -> dict[str, Any]:
        dense_and_not = torch.arange(64.0).reshape(8, 8)
        return {
            "plain": [1, None, "text", b"bytes", True, (2.5, math.nan, -0.0), complex(0, math.nan)],
            "nan": torch.full((3, 3), math.nan, dtype=torch.bfloat16),
            "scalar": torch.tensor(1.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
            "complex": torch.ones(3, dtype=torch.complex128).conj(),
            "order": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "slice": dense_and_not[:, ::2],
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "array": np.asfortranarray(_ARRAY),
            "no array": np.empty((0, 2)),
        }

    assert demo.difference(make(), make(), "it") is None


def test_gaps_do_not_count() -> None:
    """A tensor with gaps between its elements is the same as one without them."""
    with_gaps = torch.arange(64.0).reshape(8, 8)[:, ::2]
    assert demo.difference(with_gaps, with_gaps.contiguous(), "it") is None


@pytest.mark.parametrize(
    ("expected", "got", "what"),
    [
        (1, 2, "it is 2 instead of 1"),
        (1, True, "it is of <class 'bool'> instead of <class 'int'>"),
        ([1], (1,), "it is of <class 'tuple'>"),
        ([1, 2], [1], "it has 1 members instead of 2"),
        ([1, [2, 3]], [1, [2, 4]], r"it\[1\]\[1\] is 4 instead of 3"),
        ({"a": 1}, {"b": 1}, "it has other keys"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "it has other keys"),
        ({"a": {"b": "x"}}, {"a": {"b": "y"}}, r"it\['a'\]\['b'\] is 'y'"),
        (0.0, -0.0, "it is -0.0 instead of 0.0"),
        (math.nan, _NAN_WITH_PAYLOAD, "it is nan instead of nan"),
        (complex(1, 0.0), complex(1, -0.0), "it is -0.0 instead of 0.0"),
        (torch.ones(4), np.ones(4, np.float32), "it is of <class 'numpy.ndarray'>"),
        (torch.ones(4), torch.ones(4).int(), "it has dtype torch.int32"),
        (torch.ones(4), torch.ones(2, 2), "it has shape"),
        (torch.ones(4), torch.ones(4, requires_grad=True), "it has requires_grad True"),
        (_TENSOR, _TENSOR.to(memory_format=torch.channels_last), "it has the memory order"),
        (_TENSOR, flipped(_TENSOR), "it differs in 1 of 96 bytes, first in byte 5: 0x10"),
        (
            torch.tensor([0x7FC0], dtype=torch.int16).view(torch.bfloat16),
            torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16),
            "it differs in 1 of 2 bytes, first in byte 0: 0xc1 instead of 0xc0",
        ),
        (torch.zeros(2, dtype=torch.complex128), torch.tensor([0, -0j]), "it has dtype"),
        (
            torch.zeros(2, dtype=torch.complex128),
            torch.tensor([complex(0, 0), complex(0, -0.0)], dtype=torch.complex128),
            "it differs in 1 of 32 bytes, first in byte 31",
        ),
        (_ARRAY, _ARRAY.astype(">f8"), "it has dtype >f8 instead of float64"),
        (_ARRAY, _ARRAY.T, "it has shape"),
        (_ARRAY, np.asfortranarray(_ARRAY), "it has the memory order F instead of C"),
        (_ARRAY, _ARRAY * -1, "it differs in 6 of 48 bytes, first in byte 7"),
    ],
)
def test_other_bits_are_a_difference(expected: Any, got: Any, what: str) -> None:
    """Every kind of difference is found, and its text says where it is."""
    text = demo.difference(expected, got, "it")
    assert text is not None
    assert re.match(what, text), text


# --- A reader that checks -----------------------------------------------------------------------


def checked(make_queue: MakeQueue, sent: list[Any], n_messages: int) -> list[demo.Answer]:
    """What a reader says about these messages."""
    queue, (reader,) = make_queue(n_chunks=len(sent))
    for message in sent:
        queue.enqueue(message, PATIENCE_S)
    make_message = demo.Plan(1, (), n_messages).message_maker()
    queue.close()
    answers: list[demo.Answer] = []
    demo.check_messages(reader, answers.append, make_message, n_messages)
    return answers


def test_a_reader_verifies_what_is_right(make_queue: MakeQueue) -> None:
    """A reader that gets what it expects answers each message, with the bytes and times so far."""
    make = demo.Plan(1, (), 4).message_maker()
    start = time.monotonic()
    answers = checked(make_queue, [make(index) for index in range(4)], 4)
    assert [(index, None) for index in range(4)] == [
        (answer.index, answer.problem) for answer in answers
    ]
    times = [answer.taken_at for answer in answers]
    assert sorted(times) == times
    assert start < times[0] < times[-1] < time.monotonic()
    assert 60 * MIB < answers[0].bytes < answers[-1].bytes < 61 * MIB


def _with_flipped_bit(messages: list[Any]) -> None:
    messages[0]["prompt_embeds"] = flipped(messages[0]["prompt_embeds"], 60 * MIB - 1)


def _with_another_token(messages: list[Any]) -> None:
    messages[2]["token_ids"][-1] += 1


def _with_two_exchanged(messages: list[Any]) -> None:
    messages[1], messages[2] = messages[2], messages[1]


def _with_one_left_out(messages: list[Any]) -> None:
    del messages[1]


def _with_one_repeated(messages: list[Any]) -> None:
    messages.insert(1, messages[1])


class _Unloadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def _with_one_that_does_not_load(messages: list[Any]) -> None:
    messages[1]["flag"] = _Unloadable()


@pytest.mark.parametrize(
    ("plant", "verified", "problem"),
    [
        (_with_flipped_bit, 0, r"message 0\['prompt_embeds'\] differs in 1 of 62914560 bytes"),
        (_with_another_token, 2, r"message 2\['token_ids'\]"),
        (_with_two_exchanged, 1, r"message 1\['step'\] is 2 instead of 1"),
        (_with_one_left_out, 1, r"message 1\['step'\] is 2 instead of 1"),
        (_with_one_repeated, 2, r"message 2\['step'\] is 1 instead of 2"),
        (_with_one_that_does_not_load, 1, "message 1: ValueError: invalid literal"),
    ],
)
def test_a_reader_finds_what_is_wrong(
    make_queue: MakeQueue, plant: Callable[[list[Any]], None], verified: int, problem: str
) -> None:
    """A wrong bit, a message out of turn and one that does not load end the check with a text."""
    make = demo.Plan(1, (), 3).message_maker()
    messages = [make(index) for index in range(3)]
    plant(messages)
    *right, last = checked(make_queue, messages, 3)
    assert [None] * verified == [answer.problem for answer in right]
    assert last.problem is not None
    assert re.match(problem, last.problem), last.problem
