"""How objects become a stream and buffers, and come back: tensors, arrays, plain objects."""

from __future__ import annotations

import array
import contextlib
import copyreg
import ctypes
import gc
import itertools
import math
import mmap
import pickle
import random
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from conftest import PATIENCE_S, MakeQueue, StartChild
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shmcast import (
    DEFAULT_OOB_THRESHOLD_BYTES,
    MessageQueue,
    MessageReader,
    ProtocolError,
    QueueFull,
    ShmcastError,
)
from shmcast import pickler as pickler_module
from shmcast._ring import Memory, StreamParts, copy_strided, new_bytearray
from shmcast.pickler import Pickler, loads, rebuild_parameter, rebuild_tensor, reduce_tensor

_MIB = 1 << 20
#: A threshold that no buffer of these tests reaches: everything stays in the stream.
_NEVER = 1 << 40
_THRESHOLDS = [pytest.param(_NEVER, id="in the stream"), pytest.param(0, id="out of band")]


def _round_trip(obj: object, threshold_bytes: int = DEFAULT_OOB_THRESHOLD_BYTES) -> Any:
    """Through the pickler alone; the buffers become memory of the receiver's own."""
    stream, buffers = Pickler(threshold_bytes).dumps(obj)
    return loads(b"".join(stream), buffers=[bytearray(buffer) for buffer in buffers])


def _as_pickle_alone(obj: object) -> Any:
    return pickle.loads(pickle.dumps(obj, 5))


def _is_quantized(dtype: torch.dtype) -> bool:
    return torch.frombuffer(bytearray(64), dtype=dtype).is_quantized


# The installed torch says which there are. It has several names for some.
_ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
_DTYPES = [dtype for dtype in _ALL_DTYPES if not _is_quantized(dtype)]
_QUANTIZED_DTYPES = [dtype for dtype in _ALL_DTYPES if _is_quantized(dtype)]


def _torch_alone_carries(dtype: torch.dtype) -> bool:
    try:
        return bool(_as_pickle_alone(torch.frombuffer(bytearray(64), dtype=dtype)).dtype == dtype)
    except Exception:
        return False


_REFUSED_DTYPES = [dtype for dtype in _DTYPES if not _torch_alone_carries(dtype)]


def _pattern(n_bytes: int, seed: int = 0) -> bytearray:
    """Bytes of all values, so that floats of every kind are among them: NaNs, subnormals, -0."""
    block = bytearray(range(256))
    random.Random(seed).shuffle(block)
    return bytearray((block * (n_bytes // 256 + 1))[:n_bytes])


def _tensor(dtype: torch.dtype, n_items: int, seed: int = 0) -> torch.Tensor:
    return torch.frombuffer(_pattern(n_items * dtype.itemsize, seed), dtype=dtype)


def _items(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each element in row-major order, read from memory without torch's help."""
    size, address = tensor.element_size(), tensor.data_ptr()
    return [
        ctypes.string_at(
            address + size * sum(i * s for i, s in zip(index, tensor.stride(), strict=True)), size
        )
        for index in itertools.product(*map(range, tensor.shape))
    ]


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tuple(tensor.shape), _items(tensor)


def _memory_of(obj: Any) -> memoryview:
    """The memory of a dense tensor, an array or another buffer, as bytes to overwrite."""
    if isinstance(obj, torch.Tensor):
        n_bytes = obj.element_size() * obj.numel()
        return memoryview(Memory(obj.data_ptr(), n_bytes, obj)).cast("B")
    if isinstance(obj, np.ndarray):
        obj = obj.reshape(-1).view(np.uint8)
    return memoryview(obj).cast("B")


def _run_python(code: str, *options: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        check=False,
        text=True,
        timeout=PATIENCE_S * 3,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    return done.stdout.strip()


# --- tensors: bits, shapes, strides ---------------------------------------------------------------


def _shapes_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    flat = _tensor(dtype, 24)
    return {
        "1-dim": flat,
        "0-dim": flat[3],
        "empty": flat[:0],
        "empty 2-dim": flat[:0].as_strided((3, 0, 2), (1, 1, 1)),
        "offset": flat[5:9],
        "step": flat[1::3],
        "2-dim": flat.view(4, 6),
        "transposed": flat.view(4, 6).t(),
        "column": flat.view(4, 6)[:, 2],
        "expanded": flat[:1].expand(7),
        "overlapping": flat.as_strided((5, 3), (2, 1)),
    }


@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, threshold_bytes: int) -> None:
    """A tensor of any dtype and shape arrives with the same bits, NaN payloads too."""
    for kind, sent in _shapes_of(dtype).items():
        received = _round_trip(sent, threshold_bytes)
        assert (kind, _facts(sent)) == (kind, _facts(received))


def test_torch_tells_many_dtypes() -> None:
    """The list of dtypes that these tests run over is not empty by mistake."""
    assert {torch.bfloat16, torch.bool, torch.complex64, torch.int64, torch.uint8} <= set(_DTYPES)


@st.composite
def _strided_tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view with permuted, stepped, expanded, length-1 and empty dimensions, at any offset."""
    dtype = draw(st.sampled_from([d for d in _DTYPES if d.itemsize in (1, 2, 4, 8, 16)]))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    offset = draw(st.integers(0, 3))
    tensor = _tensor(dtype, offset + math.prod(shape), draw(st.integers(0, 3)))[offset:].view(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dimension in range(tensor.ndim):
        start, step = draw(st.integers(0, 1)), draw(st.integers(1, 3))
        index = (slice(None),) * dimension + (slice(start, None, step),)
        if draw(st.booleans()):
            tensor = tensor[index]
    if draw(st.booleans()):
        place = draw(st.integers(0, tensor.ndim))
        tensor = tensor.unsqueeze(place)
        lengths = [-1] * tensor.ndim
        lengths[place] = draw(st.integers(0, 3))
        tensor = tensor.expand(lengths)
    return tensor


@given(_strided_tensors(), st.sampled_from([0, 1, 7, 64, _NEVER]))
def test_any_view_arrives_with_its_values(sent: torch.Tensor, threshold_bytes: int) -> None:
    """Whatever view of a storage is sent, its dtype, shape and values arrive, and no more bytes."""
    received = _round_trip(sent, threshold_bytes)
    assert _facts(sent) == _facts(received)
    n_bytes = received.element_size() * received.numel()
    if n_bytes:
        assert n_bytes == received.untyped_storage().nbytes()


@given(_strided_tensors())
def test_dense_strides_are_kept(sent: torch.Tensor) -> None:
    """Strides arrive unchanged where the elements fill their memory, else it is contiguous."""
    offsets = sorted(
        sum(i * s for i, s in zip(index, sent.stride(), strict=True))
        for index in itertools.product(*map(range, sent.shape))
    )
    received = _round_trip(sent)
    if offsets and offsets == list(range(len(offsets))):
        assert sent.stride() == received.stride()
    else:
        assert received.is_contiguous()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), id="2d"),
        pytest.param(torch.zeros(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), id="3d"),
        pytest.param(torch.zeros(6).as_strided((2, 3), (1, 2)), id="column-major"),
        pytest.param(torch.zeros(6).as_strided((1, 6, 1), (17, 1, 99)), id="length 1"),
        pytest.param(torch.zeros(0).as_strided((0, 5), (1, 1)), id="empty"),
        pytest.param(torch.zeros([1] * 80 + [4]), id="81 dimensions"),
    ],
)
def test_memory_formats_are_kept(sent: torch.Tensor) -> None:
    """A dense tensor in another order than row-major, such as channels_last, keeps its strides."""
    assert (sent.shape, sent.stride()) == (_round_trip(sent).shape, _round_trip(sent).stride())


def test_a_strided_tensor_of_many_dimensions_arrives() -> None:
    """A tensor with gaps may have as many dimensions as torch allows, as with pickle alone."""
    sent = torch.arange(4)[::2].view([1] * 80 + [2])
    assert _facts(_as_pickle_alone(sent)) == _facts(_round_trip(sent))


@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_received_tensors_are_aligned(dtype: torch.dtype, threshold_bytes: int) -> None:
    """The memory of a received tensor is aligned for its dtype."""
    received = _round_trip(["x", _tensor(dtype, 3)], threshold_bytes)[1]
    assert received.data_ptr() % min(dtype.itemsize, 8) == 0


@pytest.fixture
def warn_always() -> Iterator[None]:
    """Let torch give its warnings every time, not once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("warn_always")
@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
def test_receiving_makes_no_warning(threshold_bytes: int) -> None:
    """A tensor or Parameter of any dtype, an empty one too, makes no warning on its way."""
    warned = []
    for dtype in _DTYPES:
        whole = _tensor(dtype, 4)
        for sent in (whole, whole[0], whole[:0], whole[::2], torch.nn.Parameter(whole, False)):
            try:
                _round_trip(sent, threshold_bytes)
            except Warning as warning:
                warned.append((dtype, tuple(sent.shape), str(warning)))
    assert [] == warned


# --- tensors: what goes the way of torch alone ----------------------------------------------------


class PlainSubclass(torch.Tensor):
    """Nothing of its own."""


class SlotsSubclass(torch.Tensor):
    """State that is not in `__dict__`."""

    __slots__ = ("extra",)


class ParameterSubclass(torch.nn.Parameter):
    """A parameter of another type."""


class RaisingSubclass(torch.Tensor):
    """Its own pickling fails."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LookupError("the subclass says no")


class OwnWaySubclass(torch.Tensor):
    """It pickles itself without torch's help."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return str, (f"{self.dtype} in its own way",)


def _with(tensor: torch.Tensor, **attributes: Any) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def _hooked(tensor: torch.Tensor, register: str = "register_hook") -> torch.Tensor:
    getattr(tensor, register)(len)
    return tensor


def _quantized(dtype: torch.dtype) -> torch.Tensor:
    sent: torch.Tensor = torch._empty_affine_quantized([8], scale=0.5, zero_point=1, dtype=dtype)
    ctypes.memset(sent.data_ptr(), 0x35, sent.untyped_storage().nbytes())
    return sent


def _inference_tensor() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


_FALLBACKS: dict[str, Callable[[], Any]] = {
    "requires_grad": lambda: torch.ones(3, requires_grad=True),
    "requires_grad, no leaf": lambda: torch.ones(3, requires_grad=True) * 2,
    "requires_grad, hook": lambda: _hooked(torch.ones(3, requires_grad=True)),
    "subclass": lambda: torch.arange(3).as_subclass(PlainSubclass),
    "subclass with slots": lambda: _with(torch.arange(3).as_subclass(SlotsSubclass), extra=5),
    "subclass with attributes": lambda: _with(torch.arange(3).as_subclass(PlainSubclass), extra=5),
    "subclass that refuses": lambda: torch.ones(3).as_subclass(RaisingSubclass),
    "subclass in its own way": lambda: torch.ones(3).as_subclass(OwnWaySubclass),
    "attributes": lambda: _with(torch.ones(3), extra={"key": [1, 2]}),
    "lambda as attribute": lambda: _with(torch.ones(3), extra=lambda: None),
    "buffer of a module": lambda: torch.nn.Buffer(torch.ones(3)),
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "sparse bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "meta": lambda: torch.ones(3, 2, device="meta"),
    "meta, attributes": lambda: _with(torch.ones(3, device="meta"), extra=1),
    "meta, float8": lambda: torch.empty(3, dtype=torch.float8_e5m2, device="meta"),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "per channel": lambda: torch.quantize_per_channel(
        torch.ones(3, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 1, torch.qint8
    ),
    "conj": lambda: _tensor(torch.complex64, 3).conj(),
    "neg": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    "conj, whole": lambda: torch.ones(3, dtype=torch.complex128).conj().conj(),
    "zero tensor": lambda: torch._efficientzerotensor(3),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "storage": lambda: torch.ones(3).untyped_storage(),
    "uninitialized": torch.nn.UninitializedParameter,
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "parameter, no grad": lambda: torch.nn.Parameter(torch.arange(3), requires_grad=False),
    "parameter, attributes": lambda: _with(torch.nn.Parameter(torch.ones(3)), extra=1),
    "parameter, hook": lambda: _hooked(torch.nn.Parameter(torch.ones(3))),
    "parameter, late hook": lambda: _hooked(
        torch.nn.Parameter(torch.ones(3)), "register_post_accumulate_grad_hook"
    ),
    "parameter, grad": lambda: _with(torch.nn.Parameter(torch.ones(3)), grad=torch.ones(3)),
    "parameter, meta": lambda: torch.nn.Parameter(torch.ones(3, device="meta")),
    "parameter, conj": lambda: torch.nn.Parameter(torch.ones(3, dtype=torch.complex64).conj()),
    "parameter, sparse": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "parameter, subclass": lambda: ParameterSubclass(torch.ones(3)),
    "parameter of a subclass": lambda: torch.nn.Parameter(torch.ones(3).as_subclass(PlainSubclass)),
    "lazy clone": lambda: torch._lazy_clone(torch.ones(3)),
    "inference": _inference_tensor,
    "size": lambda: torch.ones(3, 4).shape,
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    **{str(dtype): lambda dtype=dtype: _quantized(dtype) for dtype in _QUANTIZED_DTYPES},
}


def _described(obj: Any) -> tuple[Any, ...]:
    """All that can be compared of a tensor of any kind."""
    if not isinstance(obj, torch.Tensor):
        return type(obj), repr(obj)
    return (
        type(obj),
        obj.dtype,
        obj.layout,
        obj.device,
        obj.requires_grad,
        obj.is_leaf,
        obj.is_conj(),
        obj.is_neg(),
        obj.is_inference(),
        obj.grad is None,
        len(obj._backward_hooks or ()),
        getattr(obj, "extra", None),
        sorted(vars(obj)),
        repr(obj),
    )


def _outcome(round_trip: Callable[[Any], Any], make: Callable[[], Any]) -> tuple[Any, ...]:
    sent = make()
    try:
        return _described(round_trip(sent))
    except Exception as error:
        return type(error), str(error)


# Sparse, nested and quantized tensors warn that they are experimental, as they are made.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
@pytest.mark.parametrize("kind", _FALLBACKS)
def test_other_tensors_go_as_torch_does(kind: str, threshold_bytes: int) -> None:
    """A tensor that is more than its bytes gives the same result or error as pickle alone."""
    make = _FALLBACKS[kind]
    ours = _outcome(lambda obj: _round_trip(obj, threshold_bytes), make)
    assert _outcome(_as_pickle_alone, make) == ours


@pytest.fixture(params=["dispatch keys", "no dispatch keys"])
def with_and_without_keys(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Once with this torch's dispatch keys, once as with a torch that does not tell them."""
    pickler_module._dispatch_keys.cache_clear()
    torch.func.grad(torch.sum)(torch.ones(1))  # torch itself imports the keys at the first use
    if request.param == "no dispatch keys":
        monkeypatch.delattr(torch._C, "_dispatch_keys")
    pickler_module._dispatch_keys()
    yield
    pickler_module._dispatch_keys.cache_clear()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("with_and_without_keys")
def test_every_kind_of_tensor_is_told_apart() -> None:
    """What a tensor is besides its bytes is noticed by its dispatch keys and without them."""
    plain = {"inference", "lazy clone", "conj, whole"}
    for kind, make in _FALLBACKS.items():
        sent = make()
        if type(sent) is torch.Tensor:
            assert (kind, kind in plain) == (kind, pickler_module._is_plain(sent))


def test_this_torch_has_the_keys_of_plain_tensors() -> None:
    """The keys that count as plain are those of this torch's plain tensors, whatever the mode."""
    pickler_module._dispatch_keys.cache_clear()
    with torch.inference_mode(), torch.device("meta"):
        keys_of, plain = pickler_module._dispatch_keys()
    assert plain == (keys_of(torch.ones(2)), keys_of(_inference_tensor()))


@pytest.mark.usefixtures("with_and_without_keys")
@pytest.mark.parametrize("wrapper", ["grad", "vmap", "functionalize"])
def test_wrapped_tensors_are_told_apart(wrapper: str) -> None:
    """A tensor that one of torch.func's transforms has wrapped is not taken for a plain one."""

    def inside(wrapped: torch.Tensor) -> torch.Tensor:
        assert not pickler_module._is_plain(wrapped)
        return wrapped.sum()

    getattr(torch.func, wrapper)(inside)(torch.ones(3))


def test_jagged_tensors_go_as_torch_does() -> None:
    """A nested tensor of the jagged layout arrives with its values and offsets."""
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    received = _round_trip(sent)
    assert (type(sent), sent.layout) == (type(received), received.layout)
    assert sent.values().tolist() == received.values().tolist()
    assert sent.offsets().tolist() == received.offsets().tolist()


def _same_as_alone(obj: Any) -> None:
    assert _outcome(_as_pickle_alone, lambda: obj) == _outcome(_round_trip, lambda: obj)


@pytest.fixture
def nothing_known() -> None:
    """The pickler knows of no dtype so far whether torch carries it."""
    pickler_module._torch_carries.cache_clear()


@pytest.mark.filterwarnings("ignore")  # torch's own, as it loads what these need
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("wrapper", ["grad", "vmap", "jvp", "functionalize"])
def test_wrapped_tensors_go_as_torch_does(wrapper: str) -> None:
    """Inside torch.func's transforms all ends as with pickle alone, and nothing is spoilt after."""
    wraps: Any = getattr(torch.func, wrapper)
    tensor = torch.ones(3)

    def inside(wrapped: torch.Tensor) -> torch.Tensor:
        for obj in (wrapped, torch.nn.Parameter(torch.ones(2)), torch.ones(2)):
            _same_as_alone(obj)
        return wrapped.sum()

    if wrapper == "jvp":
        wraps(inside, (tensor,), (tensor,))
    else:
        wraps(inside)(tensor)
    # What torch can carry must not be found out inside, where it can't.
    _same_as_alone(torch.ones(3, requires_grad=True))


def test_functional_tensors_go_as_torch_does() -> None:
    """A tensor that torch has made functional ends as with pickle alone."""
    _same_as_alone(torch._to_functional_tensor(torch.ones(3)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("nothing_known")
def test_fake_tensors_spoil_nothing() -> None:
    """Inside FakeTensorMode a real tensor goes as with pickle alone; nothing is spoilt after."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    leaf = torch.ones(3, requires_grad=True)
    with FakeTensorMode():
        _same_as_alone(torch.ones(3))
        alone = pickle.dumps(leaf, 5)
        ours = b"".join(Pickler(_NEVER).dumps(leaf)[0])
    assert _described(pickle.loads(alone)) == _described(loads(ours))
    _same_as_alone(leaf)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_plain_parameters_of_every_dtype_arrive(dtype: torch.dtype, requires_grad: bool) -> None:
    """A plain Parameter of any dtype arrives as one, with its bits and requires_grad."""
    data = _tensor(dtype, 6).view(2, 3).t()
    try:
        sent = torch.nn.Parameter(data, requires_grad)
    except RuntimeError:
        assert (True, False) == (requires_grad, dtype.is_floating_point or dtype.is_complex)
        return
    received = _round_trip(sent)
    assert (type(sent), requires_grad) == (type(received), received.requires_grad)
    assert (sent.stride(), _facts(sent.data)) == (received.stride(), _facts(received.data))


def test_a_parameter_that_was_frozen_arrives_frozen() -> None:
    """What counts is requires_grad when the Parameter is sent, not when it was made."""
    sent = torch.nn.Parameter(torch.ones(3)).requires_grad_(False)
    assert _round_trip(sent).requires_grad is False


def test_rebuild_parameter_makes_a_parameter() -> None:
    """rebuild_parameter wraps the data that it is given, without a copy."""
    data = torch.ones(3)
    parameter = rebuild_parameter(data, True)
    assert (torch.nn.Parameter, True, data.data_ptr()) == (
        type(parameter),
        parameter.requires_grad,
        parameter.data_ptr(),
    )


def test_a_module_arrives() -> None:
    """A module with parameters and buffers arrives with the same state."""
    sent = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    sent_state, received_state = sent.state_dict(), _round_trip(sent).state_dict()
    assert {k: _facts(v) for k, v in sent_state.items()} == {
        k: _facts(v) for k, v in received_state.items()
    }


def test_a_parameter_with_attributes_goes_by_its_data() -> None:
    """Its data is a tensor of its own for torch too, so any dtype arrives in such a Parameter."""
    for dtype in _DTYPES:
        received = _round_trip(_with(torch.nn.Parameter(_tensor(dtype, 3), False), extra=1))
        assert (torch.nn.Parameter, 1) == (type(received), received.extra)
        assert _facts(_tensor(dtype, 3)) == _facts(received.data)


@pytest.mark.parametrize("dtype", _REFUSED_DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["attribute", "subclass", "subclass of Parameter"])
def test_what_torch_cannot_carry_is_refused(dtype: torch.dtype, kind: str) -> None:
    """Where torch would have to carry a dtype that it can't, a TypeError names the dtype."""
    sent: torch.Tensor = _tensor(dtype, 3)
    if kind == "attribute":
        sent = _with(sent, extra=1)
    elif kind == "subclass":
        sent = sent.as_subclass(PlainSubclass)
    else:
        sent = ParameterSubclass(sent, False).as_subclass(PlainSubclass)
    with pytest.raises(TypeError, match=str(dtype)):
        _round_trip(sent)


def test_enqueue_refuses_and_goes_on(make_queue: MakeQueue) -> None:
    """The TypeError comes from enqueue, which publishes nothing, and the next message arrives."""
    queue, (reader,) = make_queue()
    sent = _with(_tensor(torch.float8_e5m2, 3), extra=1)
    with pytest.raises(TypeError, match=r"torch\.float8_e5m2"):
        queue.enqueue({"before": torch.ones(_MIB), "refused": sent}, PATIENCE_S)
    queue.enqueue("next", PATIENCE_S)
    assert ("next", 1) == (reader.dequeue(PATIENCE_S), queue.stats().messages)


def test_there_are_dtypes_that_torch_cannot_carry() -> None:
    """The list of refused dtypes does not hold those that torch carries."""
    assert torch.float32 not in _REFUSED_DTYPES
    assert torch.bfloat16 not in _REFUSED_DTYPES


def test_an_error_of_a_subclass_passes_through() -> None:
    """What a subclass's own pickling raises is not replaced, whatever its dtype."""
    for dtype in _DTYPES:
        with pytest.raises(LookupError, match="the subclass says no"):
            _round_trip(_tensor(dtype, 3).as_subclass(RaisingSubclass))


def test_a_subclass_may_carry_what_torch_cannot() -> None:
    """A subclass that pickles itself is not refused for its dtype."""
    for dtype in _DTYPES:
        sent = _tensor(dtype, 3).as_subclass(OwnWaySubclass)
        assert f"{dtype} in its own way" == _round_trip(sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e5m2], ids=str)
def test_sparse_tensors_go_by_their_parts(dtype: torch.dtype) -> None:
    """A sparse tensor's values are a tensor again, so any dtype arrives in it."""
    places = torch.tensor([[0, 2]])
    sent = torch.sparse_coo_tensor(places, _tensor(dtype, 2), (3,), check_invariants=True)
    received = _round_trip(sent)
    assert (sent.layout, sent.shape) == (received.layout, received.shape)
    assert _facts(sent._values()) == _facts(received._values())


# --- tensors: whose memory it is ------------------------------------------------------------------


def _with_storage_of(n_bytes: int) -> Callable[[], torch.Tensor]:
    def make() -> torch.Tensor:
        # So large that what lies behind a small rest of it is not all mapped.
        tensor = torch.empty(16 * _MIB)
        tensor.untyped_storage().resize_(n_bytes)
        return tensor

    return make


# Python warns of a fork where other threads run; the child touches nothing of theirs.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("n_bytes", [0, 16])
def test_a_tensor_without_its_storage_crashes_nothing(
    start_child: StartChild, n_bytes: int
) -> None:
    """A tensor whose storage was freed or cut goes as with pickle alone: nothing else is read."""
    child = start_child(_pickle_and_say, n_bytes, method="fork")
    assert child.pipe.poll(PATIENCE_S)
    alone = _as_pickle_alone(_with_storage_of(n_bytes)()).untyped_storage().nbytes()
    try:
        ours = child.pipe.recv()
    except EOFError:
        ours = f"exit code {child.join()}"
    assert alone == ours


def _pickle_and_say(pipe: Connection, n_bytes: int) -> None:
    pipe.send(_round_trip(_with_storage_of(n_bytes)()).untyped_storage().nbytes())


class _SwapsData:
    """Gives a tensor other memory when it is pickled itself."""

    def __init__(self, tensor: torch.Tensor, how: str) -> None:
        self.tensor, self.how = tensor, how

    def __reduce__(self) -> Any:
        other = torch.frombuffer(bytearray(8), dtype=torch.float32)
        if self.how == "data":
            self.tensor.data = other
        else:
            self.tensor.set_(other)
        return str, ("swapped",)


def _swap_and_say(pipe: Connection, how: str) -> None:
    # So large that the allocator gives the memory back to the kernel at once.
    tensor = torch.empty(16 * _MIB)
    _memory_of(tensor)[-4:] = b"last"
    received = _round_trip([tensor, _SwapsData(tensor, how)])
    pipe.send((bytes(_memory_of(received[0])[-4:]), received[1]))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["data", "set_"])
def test_memory_that_is_being_sent_stays_alive(start_child: StartChild, how: str) -> None:
    """A tensor that gets other memory while its message is made is sent whole."""
    child = start_child(_swap_and_say, how, method="fork")
    assert child.pipe.poll(PATIENCE_S)
    try:
        ours = child.pipe.recv()
    except EOFError:
        ours = f"exit code {child.join()}"
    assert (b"last", "swapped") == ours


def test_a_small_slice_does_not_drag_its_storage(make_queue: MakeQueue) -> None:
    """Only the bytes of a slice travel, not those of the storage around it."""
    queue, (reader,) = make_queue()
    base = torch.zeros(_MIB)
    for part in (base[5:9], base[:: _MIB // 4], base.view(1024, 1024)[3:5, 7:9]):
        before = queue.stats().bytes
        queue.enqueue(part, PATIENCE_S)
        assert part.shape == reader.dequeue(PATIENCE_S).shape
        assert queue.stats().bytes - before < 500


def test_the_same_object_twice_stays_one() -> None:
    """A tensor, parameter or array that is twice in a message is one object there too."""
    for threshold_bytes in (0, _NEVER):
        for shared in (torch.ones(3), torch.nn.Parameter(torch.ones(3)), np.ones(3), [1]):
            received = _round_trip({"a": shared, "b": [shared, (shared,)]}, threshold_bytes)
            assert received["a"] is received["b"][0]
            assert received["a"] is received["b"][1][0]


def test_two_views_of_a_storage_arrive_as_two() -> None:
    """Two tensors over one storage arrive with their values, each with memory of its own."""
    base = torch.arange(10)
    for threshold_bytes in (0, _NEVER):
        first, second = _round_trip([base[:6], base[4:]], threshold_bytes)
        first.fill_(-1)
        assert [4, 5, 6, 7, 8, 9] == second.tolist()


def test_a_container_may_hold_itself() -> None:
    """References in a circle, with a tensor on the way, come back as such a circle."""
    circle: list[Any] = [torch.ones(2), {}]
    circle[1]["back"] = circle
    received = _round_trip(circle)
    assert received[1]["back"] is received


# --- registrations --------------------------------------------------------------------------------


class Registered:
    """It is pickled by what the user registers."""


@contextlib.contextmanager
def _registered(cls: type, reduce: Callable[[Any], Any]) -> Iterator[None]:
    assert cls not in copyreg.dispatch_table
    copyreg.pickle(cls, reduce)  # type: ignore[arg-type]
    try:
        yield
    finally:
        del copyreg.dispatch_table[cls]


def _reduced_by_the_user(obj: object) -> Any:
    return str, (f"a {type(obj).__name__} of the user",)


_REGISTERED: list[Callable[[], Any]] = [
    Registered,
    lambda: torch.ones(3),
    lambda: torch.nn.Parameter(torch.ones(3)),
    lambda: torch.ones(3).as_subclass(PlainSubclass),
    lambda: np.ones(3),
]


@pytest.mark.parametrize("make", _REGISTERED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_registrations_of_the_user_count(
    make_queue: MakeQueue, make: Callable[[], Any], when: str
) -> None:
    """copyreg.pickle before or after the queue was made decides, for torch.Tensor too."""
    sent = make()
    cls = type(sent)
    with contextlib.ExitStack() as registration:
        if when == "before":
            registration.enter_context(_registered(cls, _reduced_by_the_user))
        queue, (reader,) = make_queue()
        if when == "after":
            queue.enqueue(sent, PATIENCE_S)
            assert isinstance(reader.dequeue(PATIENCE_S), cls)
            registration.enter_context(_registered(cls, _reduced_by_the_user))
        queue.enqueue([sent, sent], PATIENCE_S)
        received = reader.dequeue(PATIENCE_S)
        assert [f"a {cls.__name__} of the user"] * 2 == received
    queue.enqueue(sent, PATIENCE_S)
    assert isinstance(reader.dequeue(PATIENCE_S), cls)


@pytest.mark.usefixtures("nothing_known")
def test_a_registration_for_tensors_does_not_touch_subclasses() -> None:
    """As with pickle alone, a registration is for exactly one class."""
    subclass = torch.ones(3).as_subclass(PlainSubclass)
    parameter = torch.nn.Parameter(torch.ones(3))
    with _registered(torch.Tensor, _reduced_by_the_user):
        assert (PlainSubclass, "a Tensor of the user") == (
            type(_round_trip(subclass)),
            _round_trip(torch.ones(3)),
        )
        with _registered(torch.nn.Parameter, _reduced_by_the_user):
            assert "a Parameter of the user" == _round_trip(parameter)
    # What torch can carry was found out without the registration.
    assert PlainSubclass is type(_round_trip(subclass))


def test_nothing_is_registered_for_others() -> None:
    """Making and using a pickler leaves copyreg and torch's own reduction as they were."""
    table, tensor_reduce = dict(copyreg.dispatch_table), torch.Tensor.__reduce_ex__
    _round_trip([torch.ones(3), torch.nn.Parameter(torch.ones(3))])
    assert (table, tensor_reduce) == (copyreg.dispatch_table, torch.Tensor.__reduce_ex__)


def test_another_way_to_reduce_tensors_can_be_given() -> None:
    """A Pickler takes the function that reduces plain tensors, so that ways can be compared."""
    pickler = Pickler(0, reduce_exact_tensor=_reduced_by_the_user)
    stream, buffers = pickler.dumps([torch.ones(3), np.ones(2)])
    assert "a Tensor of the user" == loads(b"".join(stream), buffers=buffers)[0]


# --- arrays and other buffers ---------------------------------------------------------------------


def _read_only(source: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    source.flags.writeable = False
    return source


_ARRAYS: dict[str, Callable[[], Any]] = {
    "plain": lambda: np.arange(40.0),
    "read-only": lambda: _read_only(np.arange(40.0)),
    "read-only, column-major": lambda: _read_only(np.asfortranarray(np.ones((5, 8)))),
    "frombuffer of bytes": lambda: np.frombuffer(bytes(40), np.uint8),
    "column-major": lambda: np.asfortranarray(np.arange(40.0).reshape(5, 8)),
    "step": lambda: np.arange(40.0)[::3],
    "backwards": lambda: np.arange(40.0)[::-1],
    "broadcast": lambda: np.broadcast_to(np.ones(1), (9,)),
    "permuted": lambda: np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "0-dim": lambda: np.array(3.5),
    "scalar": lambda: np.float32(3.5),
    "empty": lambda: np.empty((2, 0, 3)),
    "objects": lambda: np.array([1, "a", None, (2,)], dtype=object),
    "records": lambda: np.array([(1, 2.5), (3, 4.5)], dtype="i4,f8"),
    "recarray": lambda: np.zeros(3, dtype="i4,f8").view(np.recarray),
    "text": lambda: np.array(["a", "bb"]),
    "bytes": lambda: np.array([b"a", b"bb"]),
    "dates": lambda: np.array(["2020-01-01", "NaT"], dtype="M8[D]"),
    "other byte order": lambda: np.arange(4, dtype=">i4"),
    "long double": lambda: np.ones(3, np.longdouble),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [False, True]),
    "NaN payloads": lambda: np.frombuffer(_pattern(256), np.float64),
}


def _array_facts(obj: Any) -> tuple[Any, ...]:
    flags = obj.flags
    return (
        type(obj),
        obj.dtype,
        obj.shape,
        obj.strides,
        (flags.writeable, flags.c_contiguous, flags.f_contiguous, flags.aligned),
        obj.tolist() if obj.dtype.hasobject else obj.tobytes(),
    )


@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
@pytest.mark.parametrize("kind", _ARRAYS)
def test_arrays_arrive_as_with_pickle_alone(kind: str, threshold_bytes: int) -> None:
    """A numpy array of any kind arrives with its bits, strides and flags, read-only too."""
    make = _ARRAYS[kind]
    expected = _array_facts(_as_pickle_alone(make()))
    assert expected == _array_facts(_round_trip(make(), threshold_bytes))


def test_a_read_only_array_stays_read_only(make_queue: MakeQueue) -> None:
    """On each path a read-only array can't be written to, and a writable one can."""
    for path in _PATHS.values():
        queue, (reader,) = make_queue(**path)
        queue.enqueue((_read_only(np.ones(5000)), np.ones(5000)), PATIENCE_S)
        read_only, writable = reader.dequeue(PATIENCE_S)
        with pytest.raises(ValueError, match="read-only"):
            read_only[0] = 2
        writable[0] = 2
        assert (1, 2) == (read_only[0], writable[0])


def _mmap(content: bytes) -> mmap.mmap:
    mapping = mmap.mmap(-1, len(content))
    mapping.write(content)
    return mapping


_BUFFERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "bytearray": bytearray,
    "array": lambda content: array.array("B", content),
    "memoryview": lambda content: memoryview(bytearray(content)),
    "read-only memoryview": lambda content: memoryview(bytearray(content)).toreadonly(),
    "part of a memoryview": lambda content: memoryview(bytearray(b"123" + content + b"45"))[3:-2],
    "mmap": _mmap,
    "ctypes": lambda content: (ctypes.c_char * len(content))(*content),
    "shaped": lambda content: memoryview(bytearray(content)).cast("B", (2, len(content) // 2)),
    "column-major": lambda content: np.frombuffer(content, np.uint8).reshape(-1, 2).T,
}


@pytest.mark.parametrize("n_bytes", [2, 1000, 70_000])
@pytest.mark.parametrize("threshold_bytes", _THRESHOLDS)
@pytest.mark.parametrize("kind", _BUFFERS)
def test_bare_buffers_arrive(kind: str, threshold_bytes: int, n_bytes: int) -> None:
    """A PickleBuffer of anything arrives with the bytes and the order that pickle alone gives."""
    sent = _BUFFERS[kind](bytes(_pattern(n_bytes)))
    expected = _as_pickle_alone(pickle.PickleBuffer(sent))
    received = _round_trip(pickle.PickleBuffer(sent), threshold_bytes)
    assert bytes(expected) == bytes(memoryview(received))
    assert memoryview(expected).readonly == memoryview(received).readonly


def test_empty_buffers_arrive() -> None:
    """A buffer without bytes never leaves the stream, also at threshold 0."""
    for source in (b"", bytearray()):
        stream, buffers = Pickler(0).dumps([pickle.PickleBuffer(source), torch.ones(0), np.ones(0)])
        assert [] == buffers
        received = loads(b"".join(stream))
        assert (source, (0,), (0,)) == (received[0], received[1].shape, received[2].shape)


def test_a_buffer_with_gaps_is_refused_as_by_pickle() -> None:
    """A PickleBuffer with gaps raises what pickle raises, and the pickler goes on."""
    pickler = Pickler(0)
    # No memoryview: a PickleBuffer of one in a garbage cycle makes the interpreter crash later.
    gaps = pickle.PickleBuffer(np.zeros(10)[::2])
    with pytest.raises(pickle.PicklingError) as alone:
        pickle.dumps(gaps, 5)
    with pytest.raises(pickle.PicklingError) as ours:
        pickler.dumps([torch.ones(9), gaps])
    assert str(alone.value) == str(ours.value)
    assert "next" == loads(b"".join(pickler.dumps("next")[0]))


def test_a_released_buffer_is_refused_as_by_pickle() -> None:
    """A PickleBuffer that was released raises what pickle raises."""
    released = pickle.PickleBuffer(bytearray(10))
    released.release()
    with pytest.raises(ValueError, match="released"):
        Pickler(0).dumps(released)


def test_many_buffers_arrive() -> None:
    """More than 65,535 buffers in one message are no limit."""
    sent = [pickle.PickleBuffer(struct.pack("<I", number)) for number in range(66_000)]
    stream, buffers = Pickler(0).dumps(sent)
    assert 66_000 == len(buffers)
    received = loads(b"".join(stream), buffers=buffers)
    assert list(range(66_000)) == [struct.unpack("<I", buffer)[0] for buffer in received]


class BufferOf:
    """An object of the user's own that gives its bytes out of band."""

    def __init__(self, data: bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        return BufferOf, (pickle.PickleBuffer(self.data),)


def test_after_enqueue_the_memory_is_the_callers(make_queue: MakeQueue) -> None:
    """When enqueue has returned nothing pins what was passed: it can be resized, closed, freed."""
    for path in _PATHS.values():
        queue, (reader,) = make_queue(**path)
        data, mapping = bytearray(20_000), _mmap(bytes(20_000))
        tensor = torch.ones(5000)
        freed = weakref.ref(tensor)
        buffer = pickle.PickleBuffer(mapping)
        queue.enqueue([BufferOf(data), buffer, tensor], PATIENCE_S)
        data.extend(b"more")
        buffer.release()
        mapping.close()
        del tensor
        gc.collect()
        assert freed() is None
        received = reader.dequeue(PATIENCE_S)
        assert [20_000, 20_000, 5000] == [
            len(received[0].data),
            len(memoryview(received[1])),
            len(received[2]),
        ]


# --- thresholds -----------------------------------------------------------------------------------


def _of_size(kind: str, content: bytearray) -> Any:
    """Something with just these bytes."""
    if kind == "bytearray":
        return pickle.PickleBuffer(content)
    if kind == "bytes":
        return pickle.PickleBuffer(bytes(content))
    if kind == "array":
        return np.frombuffer(content, np.uint8)
    twice = torch.tensor(list(content), dtype=torch.uint8).repeat_interleave(2)
    return twice[::2] if kind == "strided" else twice[::2].contiguous()


@pytest.mark.parametrize("threshold_bytes", [1, 1000, 70_000])
@pytest.mark.parametrize("kind", ["tensor", "strided", "array", "bytearray", "bytes"])
def test_a_buffer_leaves_the_stream_from_the_threshold_on(
    make_queue: MakeQueue, kind: str, threshold_bytes: int
) -> None:
    """A buffer one byte under the threshold stays in the stream; that size and more leave it."""
    queue, (reader,) = make_queue(oob_threshold_bytes=threshold_bytes)
    counts = []
    for n_bytes in (threshold_bytes - 1, threshold_bytes, threshold_bytes + 1, 0):
        content = _pattern(n_bytes)
        before = queue.stats()
        queue.enqueue(_of_size(kind, content), PATIENCE_S)
        assert content == bytes(_memory_of(reader.dequeue(PATIENCE_S)))
        after = queue.stats()
        counts.append((after.oob_buffers - before.oob_buffers, after.oob_bytes - before.oob_bytes))
    assert [(0, 0), (1, threshold_bytes), (1, threshold_bytes + 1), (0, 0)] == counts
    assert queue.stats().oob_bytes == reader.stats().oob_bytes


def test_the_default_threshold_is_one_mib(make_queue: MakeQueue) -> None:
    """Without a setting a buffer leaves the stream from DEFAULT_OOB_THRESHOLD_BYTES on."""
    queue, (reader,) = make_queue()
    for n_bytes, n_buffers in ((_MIB - 1, 0), (_MIB, 1), (_MIB + 1, 2)):
        queue.enqueue(np.zeros(n_bytes, np.uint8), PATIENCE_S)
        assert n_bytes == len(reader.dequeue(PATIENCE_S))
        assert n_buffers == queue.stats().oob_buffers
    assert _MIB == DEFAULT_OOB_THRESHOLD_BYTES


def test_threshold_zero_takes_every_buffer_with_bytes(make_queue: MakeQueue) -> None:
    """At threshold 0 a buffer of one byte leaves the stream and an empty one does not."""
    queue, (reader,) = make_queue(oob_threshold_bytes=0)
    queue.enqueue([torch.ones(1, dtype=torch.uint8), torch.ones(0), np.ones(0)], PATIENCE_S)
    assert [[1], [], []] == [part.tolist() for part in reader.dequeue(PATIENCE_S)]
    assert (1, 1) == (queue.stats().oob_buffers, queue.stats().oob_bytes)


# --- whose memory it is, on every path ------------------------------------------------------------

_PATHS: dict[str, dict[str, Any]] = {
    "in the stream": {"n_chunks": 2},
    "in the chunk": {"n_chunks": 2, "oob_threshold_bytes": 0, "arena_bytes": 0},
    "in blocks": {"n_chunks": 2, "oob_threshold_bytes": 0, "chunk_bytes": 1024},
    "in blocks that are copied": {
        "n_chunks": 2,
        "oob_threshold_bytes": 0,
        "chunk_bytes": 1024,
        "receive": "copy",
    },
    "as a stream in a block": {"n_chunks": 2, "chunk_bytes": 1024},
    "in a memory file": {
        "n_chunks": 2,
        "oob_threshold_bytes": 0,
        "chunk_bytes": 1024,
        "arena_bytes": 0,
    },
    "as a stream in a memory file": {"n_chunks": 2, "chunk_bytes": 1024, "arena_bytes": 0},
}


def _payload(n_bytes: int, fill: int) -> dict[str, Any]:
    """One of each kind that has memory; all of it holds `fill`."""
    content = bytes([fill]) * n_bytes
    return {
        "tensor": torch.frombuffer(bytearray(content), dtype=torch.uint8),
        "bfloat16": torch.frombuffer(bytearray(content), dtype=torch.bfloat16).view(-1, 2).t(),
        "strided": torch.frombuffer(bytearray(content * 2), dtype=torch.int16)[::2],
        "parameter": torch.nn.Parameter(torch.frombuffer(bytearray(content), dtype=torch.float32)),
        "array": np.frombuffer(bytearray(content), np.uint8),
        "column-major": np.asfortranarray(
            np.frombuffer(bytearray(content), np.uint8).reshape(-1, 4)
        ),
        "bytearray": bytearray(content),
        "array.array": array.array("B", content),
    }


def _whole_memory(part: Any) -> memoryview:
    """The memory of a part of `_payload`, the gaps of a strided tensor too."""
    if isinstance(part, torch.Tensor):
        part = part.detach()
        if not part.is_contiguous() and part.dtype is torch.int16:
            part = part.as_strided((part.numel() * 2,), (1,))
    return _memory_of(part.T if isinstance(part, np.ndarray) and part.ndim == 2 else part)


def _contents(payload: dict[str, Any]) -> dict[str, Any]:
    """How many bytes each part has, the first of them, and how many are the same."""
    seen = {}
    for name, part in payload.items():
        content = bytes(_whole_memory(part.contiguous() if name == "strided" else part))
        seen[name] = (len(content), content[:1], content.count(content[:1]))
    return seen


def _overwrite(payload: dict[str, Any], fill: int) -> None:
    for part in payload.values():
        memory = _whole_memory(part)
        memory[:] = bytes([fill]) * memory.nbytes


def _through(payload: dict[str, Any]) -> dict[str, Any]:
    """The payload with its bare buffers given to protocol 5."""
    bare = {name: pickle.PickleBuffer(payload[name]) for name in ("bytearray", "array.array")}
    return {**payload, **bare}


@pytest.mark.parametrize("n_bytes", [400, 20_000, 80_000])
@pytest.mark.parametrize("path", _PATHS)
def test_nobody_shares_memory(
    make_queue: MakeQueue, path: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caller and readers may overwrite what they have, on each path: none sees another."""
    monkeypatch.setattr(pickler_module, "MOST_KEPT_BYTES", _NEVER)
    queue, readers = make_queue(n_readers=2, **_PATHS[path])
    expected = _contents(_payload(n_bytes, 1))
    sent = _payload(n_bytes, 1)
    queue.enqueue(_through(sent), PATIENCE_S)
    _overwrite(sent, 2)
    first = readers[0].dequeue(PATIENCE_S)
    assert expected == _contents(first)
    _overwrite(first, 3)
    second = readers[1].dequeue(PATIENCE_S)
    assert expected == _contents(second)
    _overwrite(second, 4)
    # The ring laps several times over the chunks that both came from.
    for fill in (5, 6, 7, 8):
        queue.enqueue(_through(_payload(n_bytes, fill)), PATIENCE_S)
        for reader in readers:
            assert _contents(_payload(n_bytes, fill)) == _contents(reader.dequeue(PATIENCE_S))
    assert [_contents(_payload(n_bytes, fill)) for fill in (2, 3, 4)] == [
        _contents(sent),
        _contents(first),
        _contents(second),
    ]
    stats = queue.stats()
    assert ("file" in path) == (stats.fallbacks == 5)
    assert ("stream" in path) == (stats.oob_buffers == 0)
    assert ("block" in path) == (stats.blocks_in_use > 0)


@pytest.mark.parametrize("path", _PATHS)
def test_what_was_received_outlives_both_ends(make_queue: MakeQueue, path: str) -> None:
    """What dequeue returned stays whole and writable after both ends were closed and forgotten."""
    queue, readers = make_queue(**_PATHS[path])
    queue.enqueue(_through(_payload(20_000, 1)), PATIENCE_S)
    received = readers[0].dequeue(PATIENCE_S)
    queue.close()
    readers.pop().close()
    gc.collect()
    assert _contents(_payload(20_000, 1)) == _contents(received)
    _overwrite(received, 2)
    assert _contents(_payload(20_000, 2)) == _contents(received)


@pytest.mark.parametrize("path", _PATHS)
def test_every_part_outlives_the_others(make_queue: MakeQueue, path: str) -> None:
    """A part that is kept while the rest of its message is dropped stays whole."""
    queue, (reader,) = make_queue(**_PATHS[path])
    expected = _contents(_payload(20_000, 1))
    kept = {}
    for name in expected:
        queue.enqueue(_through(_payload(20_000, 1)), PATIENCE_S)
        kept[name] = reader.dequeue(PATIENCE_S)[name]
    gc.collect()
    assert expected == _contents(kept)


class _Mutates:
    """Changes a bytearray when it is pickled itself."""

    def __init__(self, change: Callable[[], Any]) -> None:
        self.change = change

    def __reduce__(self) -> Any:
        self.change()
        return str, ("changed",)


@pytest.mark.parametrize(
    "n_bytes", [1000, 64 * 1024, 64 * 1024 + 1, 300_000, _MIB - 1, _MIB, 2 * _MIB]
)
@pytest.mark.parametrize("change", ["overwrite", "grow", "clear"])
def test_a_bytearray_that_changes_meanwhile_is_whole(
    make_queue: MakeQueue, n_bytes: int, change: str
) -> None:
    """A bytearray that a later part of the same message changes arrives as it was at its turn."""
    queue, (reader,) = make_queue(chunk_bytes="4 MiB")
    data = bytearray(_pattern(n_bytes))
    changes: dict[str, Callable[[], Any]] = {
        "overwrite": lambda: data.__setitem__(slice(None), bytes(n_bytes)),
        "grow": lambda: data.extend(bytes(10 * n_bytes)),
        "clear": data.clear,
    }
    queue.enqueue(["head", data, _Mutates(changes[change]), "tail"], PATIENCE_S)
    assert ["head", _pattern(n_bytes), "changed", "tail"] == reader.dequeue(PATIENCE_S)


@pytest.mark.parametrize("n_bytes", [1000, 70_000, _MIB - 1])
def test_a_small_buffer_that_changes_meanwhile_is_whole(n_bytes: int) -> None:
    """A buffer, an array or a tensor in the stream that a later part changes arrives as it was."""
    for make in (
        lambda: bytearray(_pattern(n_bytes)),
        lambda: np.frombuffer(_pattern(n_bytes), np.uint8),
        lambda: torch.frombuffer(_pattern(n_bytes), dtype=torch.uint8),
    ):
        data = make()
        memory = _memory_of(data)
        change = _Mutates(lambda memory=memory: memory.__setitem__(slice(None), bytes(n_bytes)))
        sent = pickle.PickleBuffer(data) if isinstance(data, bytearray) else data
        received = _round_trip([sent, change])
        assert (_pattern(n_bytes), bytearray(n_bytes)) == (
            bytearray(_memory_of(received[0])),
            bytearray(memory),
        )


def test_a_large_buffer_can_not_be_resized_meanwhile() -> None:
    """A later part that resizes a bytearray which is out of band already gets a BufferError."""
    data = bytearray(10)
    pickler = Pickler(0)
    with pytest.raises(BufferError):
        pickler.dumps([BufferOf(data), _Mutates(lambda: data.extend(bytes(99)))])
    data.extend(b"free again")
    assert "next" == loads(b"".join(pickler.dumps("next")[0]))


# --- rebuild_tensor -------------------------------------------------------------------------------


class WatchedFrame(zmq.Frame):
    """A frame that a weak reference can point at."""


@pytest.mark.parametrize("n_bytes", [8, 100, 70_000])
def test_a_frame_is_aliased(n_bytes: int) -> None:
    """A zmq.Frame becomes the tensor's memory without a copy: writable, and alive as long as it."""
    frame = WatchedFrame(bytes(_pattern(n_bytes)))
    alive = weakref.ref(frame)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memoryview(frame)))
    tensor = rebuild_tensor(frame, (n_bytes,), None, "uint8")
    assert (address, bytes(_pattern(n_bytes))) == (tensor.data_ptr(), bytes(_memory_of(tensor)))
    tensor[0] = tensor[0] ^ 0xFF
    assert bytes(_memory_of(tensor)) == bytes(memoryview(frame))
    part = tensor[1:3].view(2, 1)
    del frame, tensor
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


def test_a_frame_that_came_through_a_socket_is_aliased() -> None:
    """A frame received without a copy is aliased too, and outlives socket and context."""
    with (
        zmq.Context() as context,
        context.socket(zmq.PAIR) as sender,
        context.socket(zmq.PAIR) as receiver,
    ):
        sender.bind("inproc://frames")
        receiver.connect("inproc://frames")
        sender.send(_pattern(200_000))
        assert receiver.poll(int(PATIENCE_S * 1000))
        frame = receiver.recv(copy=False)
        tensor = rebuild_tensor(frame, (100, 500), (1, 100), "float32")
    del frame
    gc.collect()
    tensor.mul_(1)
    assert ((100, 500), (1, 100)) == (tuple(tensor.shape), tensor.stride())
    rebuilt = rebuild_tensor(_pattern(200_000), (100, 500), (1, 100), "float32").mul_(1)
    assert _memory_of(rebuilt) == _memory_of(tensor)


def test_an_empty_frame_makes_an_empty_tensor() -> None:
    """A frame without bytes makes a tensor without elements."""
    assert (3, 0) == tuple(rebuild_tensor(zmq.Frame(b""), (3, 0), None, "int64").shape)


@pytest.mark.parametrize("make", [bytearray, lambda content: memoryview(bytearray(content))])
def test_writable_memory_is_wrapped(make: Callable[[bytes], Any]) -> None:
    """Writable bytes become the tensor's memory, without a copy."""
    memory = make(bytes(16))
    rebuild_tensor(memory, (4,), None, "int32").fill_(-1)
    assert b"\xff" * 16 == bytes(memory)


@pytest.mark.parametrize("make", [bytes, memoryview])
def test_read_only_memory_is_copied(make: Callable[[bytes], Any]) -> None:
    """Read-only bytes are copied, so that the tensor can be written to, without a warning."""
    memory = make(bytes(16))
    tensor = rebuild_tensor(memory, (4,), None, "int32").fill_(-1)
    assert ([-1] * 4, bytes(16)) == (tensor.tolist(), bytes(memory))


_WRONG_SIZES: list[Any] = [
    (b"", (1,), None, "uint8"),
    (b"", (), None, "uint8"),
    (b"", (2, 3), (3, 1), "float64"),
    (zmq.Frame(b""), (4,), None, "uint8"),
    (bytearray(8), (9,), None, "uint8"),
    (bytearray(8), (7,), None, "uint8"),
    (bytearray(8), (0,), None, "uint8"),
    (bytearray(8), (8,), None, "int16"),
    (bytearray(8), (2**62, 4), None, "uint8"),
    (bytearray(8), (2**64 + 8,), None, "uint8"),
]


@pytest.mark.parametrize("arguments", _WRONG_SIZES, ids=lambda arguments: repr(arguments)[:60])
def test_wrong_sizes_are_protocol_errors(arguments: Any) -> None:
    """Bytes that are too few, too many, or none without a 0 in the shape are a ProtocolError."""
    with pytest.raises(ProtocolError, match="bytes"):
        rebuild_tensor(*arguments)


@pytest.mark.parametrize(
    "name", ["nope", "", "Tensor", "nn", "__dict__", "float32.x", "torch.uint8"]
)
def test_unknown_dtypes_are_protocol_errors(name: str) -> None:
    """A name that is not one of torch's dtypes is a ProtocolError that shows it."""
    with pytest.raises(ProtocolError, match=repr(name)):
        rebuild_tensor(bytearray(4), (4,), None, name)


_BAD_NUMBERS: list[Any] = [
    (4, (-1, -4), None, "uint8"),
    (4, (-4, -1), (1, 1), "uint8"),
    (0, (-1, 0), None, "uint8"),
    (0, (0, -1), (1, 1), "uint8"),
    (4, (4,), (2,), "uint8"),
    (4, (2, 2), (3, 1), "uint8"),
    (4, (4,), (-1,), "uint8"),
    (4, (2, 2), (1,), "uint8"),
    (4, (4,), (), "uint8"),
    (4, (4,), (1, 1), "uint8"),
    (8, (2,), (2**61,), "int32"),
    # torch's own check overflows for these.
    (2, (2,), (2**63 - 1,), "uint8"),
    (8, (2,), (2**62 + 1,), "int32"),
    (16, (2, 2), (2**62, 2**62 - 1), "int32"),
    (12, (3,), (2**61 - 1,), "int32"),
]


@pytest.mark.parametrize("numbers", _BAD_NUMBERS, ids=repr)
def test_numbers_that_leave_the_buffer_are_errors(numbers: Any) -> None:
    """Negative lengths, and strides that leave the buffer, are errors."""
    n_bytes, shape, strides, name = numbers
    with pytest.raises((ProtocolError, RuntimeError)):
        rebuild_tensor(bytearray(n_bytes), shape, strides, name)


@given(
    n_bytes=st.integers(0, 24),
    shape=st.lists(st.integers(-2, 5), max_size=3),
    strides=st.none() | st.lists(st.integers(-2, 9) | st.integers(2**59, 2**63 - 1), max_size=3),
    name=st.sampled_from(["uint8", "int16", "float32", "complex128"]),
)
@settings(max_examples=150)
def test_a_rebuilt_tensor_never_leaves_its_buffer(
    n_bytes: int, shape: list[int], strides: list[int] | None, name: str
) -> None:
    """Whatever numbers come, there is an error or a tensor inside its buffer."""
    buffer = bytearray(n_bytes)
    try:
        tensor = rebuild_tensor(
            buffer, tuple(shape), None if strides is None else tuple(strides), name
        )
    except (ProtocolError, RuntimeError):
        return
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    assert tensor.numel() == 0 or (last + 1) * tensor.element_size() <= n_bytes
    assert all(length >= 0 for length in tensor.shape)


def test_the_checks_stand_under_python_o() -> None:
    """The checks of rebuild_tensor are no asserts: under `python -O` they are the same."""
    code = """
from shmcast import ProtocolError
from shmcast.pickler import rebuild_tensor
assert False, "-O is not in effect"
n_errors = 0
for arguments in [
    (b"", (1,), None, "uint8"),
    (b"", (), None, "float64"),
    (bytearray(8), (9,), None, "uint8"),
    (bytearray(8), (0,), None, "uint8"),
    (bytearray(8), (8,), None, "nope"),
]:
    try:
        rebuild_tensor(*arguments)
    except ProtocolError:
        n_errors += 1
print(n_errors)
"""
    assert "5" == _run_python(code, "-O")


def test_reduce_tensor_tells_what_it_sends() -> None:
    """A plain tensor becomes a buffer, its shape, its strides where dense, and its dtype's name."""
    dense, gaps = torch.arange(6).view(2, 3).t(), torch.arange(6, dtype=torch.bfloat16)[::2]
    rebuild, (buffer, *rest) = reduce_tensor(dense)
    assert (rebuild_tensor, [(3, 2), (1, 3), "int64"]) == (rebuild, rest)
    assert memoryview(buffer) == _memory_of(torch.arange(6))
    rebuild, (buffer, *rest) = reduce_tensor(gaps)
    assert (rebuild_tensor, [(3,), None, "bfloat16"]) == (rebuild, rest)
    assert memoryview(buffer) == _memory_of(gaps.contiguous())


# --- the reader's own settings of torch -----------------------------------------------------------


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "mode",
    [
        _default_device,
        _default_dtype,
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.device("meta"),
    ],
)
@pytest.mark.usefixtures("nothing_known")
@pytest.mark.parametrize("side", ["writer", "reader"])
@pytest.mark.parametrize("path", ["in the stream", "in the chunk"])
def test_modes_of_torch_change_nothing(
    make_queue: MakeQueue, mode: Any, side: str, path: str
) -> None:
    """With a default device, inference_mode and the like on either side the same arrives."""
    queue, (reader,) = make_queue(**_PATHS[path])
    sent = {
        "plain": torch.arange(6, dtype=torch.float32).view(2, 3).t(),
        "strided": torch.arange(6)[::2],
        "0-dim": torch.tensor(2.5, dtype=torch.float16),
        "empty": torch.empty((0, 3), dtype=torch.int16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "float8": torch.zeros(3).to(torch.float8_e4m3fn),
        "fallback": torch.ones(2, requires_grad=True),
    }
    with mode() if side == "writer" else contextlib.nullcontext():
        queue.enqueue(sent, PATIENCE_S)
    with mode() if side == "reader" else contextlib.nullcontext():
        received = reader.dequeue(PATIENCE_S)
        assert {"cpu"} == {part.device.type for part in received.values()}
        received["plain"].mul_(1)
    assert {name: (part.requires_grad, _facts(part.detach())) for name, part in sent.items()} == {
        name: (part.requires_grad, _facts(part.detach())) for name, part in received.items()
    }


def test_inference_mode_makes_inference_tensors_as_torch_does() -> None:
    """A tensor loaded inside inference_mode is as torch's own unpickling makes it there."""
    for sent in (torch.ones(3), torch.ones(0)):
        alone, ours = pickle.dumps(sent, 5), b"".join(Pickler(_NEVER).dumps(sent)[0])
        with torch.inference_mode():
            assert pickle.loads(alone).is_inference() == loads(ours).is_inference()
        assert pickle.loads(alone).is_inference() == loads(ours).is_inference()


# --- re-entrance, threads, errors -----------------------------------------------------------------


class _CallsInside:
    """Makes a call while it is pickled, and keeps what the call raised or raises it."""

    def __init__(self, call: Callable[[], Any], catches: bool = False) -> None:
        self.call, self.catches = call, catches
        self.caught: BaseException | None = None

    def __reduce__(self) -> Any:
        try:
            result = self.call()
        except Exception as error:
            self.caught = error
            if not self.catches:
                raise
            result = type(error).__name__
        return str, (str(result),)


def test_enqueue_inside_enqueue_is_refused(make_queue: MakeQueue) -> None:
    """An enqueue from a __reduce__ of the same queue is refused, and the queue goes on."""
    queue, (reader,) = make_queue()
    for timeout in (None, 0, PATIENCE_S):
        inside = _CallsInside(lambda timeout=timeout: queue.enqueue("inside", timeout))
        with pytest.raises(ShmcastError, match="same thread") as caught:
            queue.enqueue([np.ones(_MIB), inside], PATIENCE_S)
        assert inside.caught is caught.value
        queue.enqueue(["next", timeout], PATIENCE_S)
        assert ["next", timeout] == reader.dequeue(PATIENCE_S)
    assert 3 == queue.stats().messages


def test_a_caught_refusal_spoils_nothing(make_queue: MakeQueue) -> None:
    """A __reduce__ that catches the refusal ends as part of a whole message."""
    queue, (reader,) = make_queue()
    queue.enqueue(["a", _CallsInside(lambda: queue.enqueue(1), catches=True), "b"], PATIENCE_S)
    assert ["a", "ShmcastError", "b"] == reader.dequeue(PATIENCE_S)


def test_other_calls_inside_enqueue_work(make_queue: MakeQueue) -> None:
    """stats, other ends and pickle itself can be used inside a __reduce__."""
    queue, (reader,) = make_queue()
    other, (other_reader,) = make_queue()
    other.enqueue("waiting", PATIENCE_S)
    calls: list[Callable[[], Any]] = [
        lambda: queue.stats().messages,
        lambda: other.enqueue("inside", PATIENCE_S),
        lambda: other_reader.dequeue(PATIENCE_S),
        lambda: pickle.loads(pickle.dumps("by itself")),
        lambda: loads(b"".join(Pickler(0).dumps("another pickler")[0])),
    ]
    queue.enqueue([_CallsInside(call) for call in calls], PATIENCE_S)
    expected = ["0", "None", "waiting", "by itself", "another pickler"]
    assert (expected, "inside") == (reader.dequeue(PATIENCE_S), other_reader.dequeue(PATIENCE_S))


#: The reader that `_call_reader` uses while a message is loaded.
_loading_reader: list[MessageReader] = []
_loading_queue: list[MessageQueue] = []


class CallsWhileLoading:
    """Uses an end while it is loaded."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.what == "enqueue":
            _loading_queue[0].enqueue("from a __setstate__", PATIENCE_S)
        elif self.what == "catch":
            with contextlib.suppress(ShmcastError):
                _loading_reader[0].dequeue(0)
        else:
            _loading_reader[0].dequeue(None if self.what == "dequeue" else 0)


@pytest.fixture
def loading_ends(make_queue: MakeQueue) -> Iterator[tuple[MessageQueue, MessageReader]]:
    """A queue whose ends `CallsWhileLoading` can reach."""
    queue, (reader,) = make_queue()
    _loading_queue.append(queue)
    _loading_reader.append(reader)
    yield queue, reader
    _loading_queue.clear()
    _loading_reader.clear()


def test_dequeue_inside_dequeue_is_refused(
    loading_ends: tuple[MessageQueue, MessageReader],
) -> None:
    """A dequeue from a __setstate__ of the same reader is refused, and the queue goes on."""
    queue, reader = loading_ends
    for what in ("dequeue", "dequeue at once"):
        queue.enqueue([np.ones(_MIB), CallsWhileLoading(what)], PATIENCE_S)
        queue.enqueue(["next", what], PATIENCE_S)
        with pytest.raises(ShmcastError, match="same thread"):
            reader.dequeue(PATIENCE_S)
        assert ["next", what] == reader.dequeue(PATIENCE_S)
    assert 4 == reader.stats().messages


def test_a_caught_refusal_while_loading_spoils_nothing(
    loading_ends: tuple[MessageQueue, MessageReader],
) -> None:
    """A __setstate__ that catches the refusal ends as part of a whole message."""
    queue, reader = loading_ends
    queue.enqueue(["a", CallsWhileLoading("catch"), "b"], PATIENCE_S)
    queue.enqueue("next", PATIENCE_S)
    head, caller, tail = reader.dequeue(PATIENCE_S)
    assert ("a", "catch", "b", "next") == (head, caller.what, tail, reader.dequeue(PATIENCE_S))


def test_enqueue_while_loading_works(loading_ends: tuple[MessageQueue, MessageReader]) -> None:
    """The writer in the same process may be used while its reader loads a message."""
    queue, reader = loading_ends
    queue.enqueue(CallsWhileLoading("enqueue"), PATIENCE_S)
    assert "enqueue" == reader.dequeue(PATIENCE_S).what
    assert "from a __setstate__" == reader.dequeue(PATIENCE_S)


def test_another_thread_waits_for_its_turn(make_queue: MakeQueue) -> None:
    """A thread that enqueues while another one pickles waits, at most for its timeout."""
    queue, (reader,) = make_queue()
    results: list[Any] = []

    def enqueue_in_thread() -> str:
        def call() -> None:
            with pytest.raises(QueueFull) as caught:
                queue.enqueue("too early", 0.01)
            results.append(caught.value)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join(PATIENCE_S)
        return "done"

    queue.enqueue(["a", _CallsInside(enqueue_in_thread)], PATIENCE_S)
    assert (["a", "done"], 1) == (reader.dequeue(PATIENCE_S), len(results))
    queue.enqueue("next", PATIENCE_S)
    assert "next" == reader.dequeue(PATIENCE_S)


def test_threads_send_whole_messages(make_queue: MakeQueue) -> None:
    """Messages of several threads arrive whole, and those of each thread in order."""
    queue, (reader,) = make_queue(oob_threshold_bytes=1000)
    n_threads, n_messages = 4, 60

    class Yields:
        def __reduce__(self) -> Any:
            threading.Event().wait(0)  # lets another thread run, in the middle of a message
            return str, ("yielded",)

    def send(number: int) -> None:
        for count in range(n_messages):
            shared = [number, count]
            tensor = torch.full((count * 10,), number * 1000 + count)
            queue.enqueue([shared, Yields(), tensor, shared, Yields()], PATIENCE_S)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(n_threads)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {number: [] for number in range(n_threads)}
    for _ in range(n_threads * n_messages):
        first, _, tensor, again, _ = reader.dequeue(PATIENCE_S)
        number, count = first
        assert first is again
        assert [number * 1000 + count] * (count * 10) == tensor.tolist()
        seen[number].append(count)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert {number: list(range(n_messages)) for number in range(n_threads)} == seen


class _Raises:
    """Can't be pickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyError("no"), MemoryError(), KeyboardInterrupt(), SystemExit(3)],
    ids=repr,
)
@pytest.mark.parametrize("path", _PATHS)
def test_an_error_in_the_middle_leaves_nothing_behind(
    make_queue: MakeQueue, path: str, error: BaseException
) -> None:
    """What pickling raises passes through, nothing is published or pinned, the next is right."""
    queue, (reader,) = make_queue(**_PATHS[path])
    shared, text, data = [1, 2], "x" * 70_000, bytearray(30_000)
    large = [torch.ones(_MIB), torch.ones(20_000)[::2], np.ones(_MIB), BufferOf(data), text]
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            queue.enqueue([shared, large, _Raises(error), large], PATIENCE_S)
        assert error is caught.value
        # A traceback refers to what was being sent.
        error.__traceback__ = caught = None  # type: ignore[assignment]
        data.extend(b"more")
        assert (0, 0) == (queue.stats().messages, queue.stats().oob_buffers)
    queue.enqueue([shared, text, shared, torch.arange(3)], PATIENCE_S)
    first, received_text, again, tensor = reader.dequeue(PATIENCE_S)
    assert ([1, 2], text, [0, 1, 2]) == (first, received_text, tensor.tolist())
    assert first is again
    assert (1, 1) == (queue.stats().messages, reader.stats().messages)


@pytest.mark.parametrize(
    "obj",
    [lambda: None, threading.Lock(), (x for x in ()), sys._getframe()],
    ids=lambda obj: type(obj).__name__,
)
def test_what_can_not_be_pickled_raises_as_pickle_alone(make_queue: MakeQueue, obj: Any) -> None:
    """An object that can't be pickled raises what pickle raises, and the next message arrives."""
    queue, (reader,) = make_queue()
    with pytest.raises(Exception) as alone:  # noqa: PT011  # which one is what the test compares
        pickle.dumps(obj, 5)
    with pytest.raises(alone.type) as ours:
        queue.enqueue([1, obj], PATIENCE_S)
    assert str(alone.value) == str(ours.value)
    queue.enqueue("next", PATIENCE_S)
    assert "next" == reader.dequeue(PATIENCE_S)


def test_too_deep_nesting_raises_as_pickle_alone(make_queue: MakeQueue) -> None:
    """Nesting that is too deep is a RecursionError, and the next message arrives."""
    queue, (reader,) = make_queue()
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    with pytest.raises(RecursionError):
        queue.enqueue(nested, PATIENCE_S)
    while nested:
        nested = nested[0]
    queue.enqueue("next", PATIENCE_S)
    assert "next" == reader.dequeue(PATIENCE_S)


class RaisesWhileLoading:
    """Can be pickled but not loaded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return _raise, (self.error,)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [ValueError("no"), KeyError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("path", _PATHS)
def test_an_error_while_loading_counts_as_received(
    make_queue: MakeQueue, path: str, error: BaseException
) -> None:
    """What loading raises passes through, the message counts as received, the next ones arrive."""
    queue, (reader,) = make_queue(**_PATHS[path])
    for number in range(5):
        sent = [torch.ones(20_000), RaisesWhileLoading(error), np.ones(9000)]
        queue.enqueue(sent, PATIENCE_S)
        queue.enqueue([number, torch.arange(3000)], PATIENCE_S)
        with pytest.raises(type(error), match="no" if error.args else None) as caught:
            reader.dequeue(PATIENCE_S)
        assert error.args == caught.value.args
        received = reader.dequeue(PATIENCE_S)
        assert (number, list(range(3000))) == (received[0], received[1].tolist())
    assert (10, 10) == (queue.stats().messages, reader.stats().messages)


# --- the kept pickler -----------------------------------------------------------------------------


def _kept(pickler: Pickler) -> pickle.Pickler:
    if pickler._kept is None:
        pickler.dumps(None)
    assert pickler._kept is not None
    kept: pickle.Pickler = pickler._kept[0].__self__  # type: ignore[attr-defined]
    return kept


def test_the_pickler_is_kept_for_small_messages() -> None:
    """Small messages use one pickler, which has forgotten each of them."""
    pickler = Pickler(0)
    kept, shared = _kept(pickler), ["first"]
    for word in ("second", "third"):
        assert [["first"], ["first"]] == loads(b"".join(pickler.dumps([shared, shared])[0]))
        shared[0] = word
        assert [[word], [word]] == loads(b"".join(pickler.dumps([shared, shared])[0]))
        shared[0] = "first"
    assert kept is _kept(pickler)


def test_the_pickler_is_kept_for_messages_with_buffers() -> None:
    """A message with buffers uses the kept pickler, and is forgotten as soon as it is let go of."""
    pickler = Pickler(0)
    kept = _kept(pickler)
    for number in range(3):
        tensor = torch.full((100,), number)
        array, freed = np.full(9, number), weakref.ref(tensor)
        stream, buffers = pickler.dumps([tensor, array, "text"])
        received = loads(b"".join(stream), buffers=[bytearray(buffer) for buffer in buffers])
        assert ([number] * 100, [number] * 9) == (received[0].tolist(), received[1].tolist())
        n_references = sys.getrefcount(array)
        del tensor, buffers
        assert (None, n_references - 1) == (freed(), sys.getrefcount(array))
    assert kept is _kept(pickler)


def test_a_message_of_many_strings_disturbs_no_later_one() -> None:
    """After a message of 300,000 strings the pickler is a new one, and what comes next is right."""
    pickler = Pickler(DEFAULT_OOB_THRESHOLD_BYTES)
    kept, sent = _kept(pickler), [f"string {number}" for number in range(300_000)]
    assert sent == loads(b"".join(pickler.dumps(sent)[0]))
    assert kept is not _kept(pickler)
    assert sent[:3] == loads(b"".join(pickler.dumps(sent[:3])[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda n: [[] for _ in range(n)],
        lambda n: [str(number) for number in range(n)],
        lambda n: [{} for _ in range(n)],
        lambda n: [(number,) for number in range(n)],
    ],
)
def test_the_kept_pickler_stays_small(make: Callable[[int], Any]) -> None:
    """No message leaves the kept pickler with a large memo, whatever its size."""
    pickler = Pickler(DEFAULT_OOB_THRESHOLD_BYTES)
    fresh_bytes = sys.getsizeof(_kept(pickler))
    for n in (100, 1000, 3000, 10_000, 15_000, 20_000, 30_000, 40_000):
        pickler.dumps(make(n))
        # A memo of 64 KiB costs a later message some µs, one of 2 MiB 250 µs.
        assert sys.getsizeof(_kept(pickler)) - fresh_bytes <= 64 * 1024


def test_the_memory_of_a_message_is_forgotten() -> None:
    """After the next message a pickler refers to nothing of the one before, also after an error."""
    pickler = Pickler(0)
    for fails in (False, True):
        tensor = torch.ones(100)
        freed = weakref.ref(tensor)
        sent = [tensor, torch.ones(9)[::2], _Raises(ValueError("no")) if fails else "ok"]
        try:
            pickler.dumps(sent)
        except ValueError as error:
            error.__traceback__ = None
        del sent, tensor
        stream, buffers = pickler.dumps("next")
        assert ("next", []) == (loads(b"".join(stream)), buffers)
        gc.collect()
        assert freed() is None


# --- plain objects --------------------------------------------------------------------------------

_atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([b"b" * 70_000, "t" * 70_000, 1 << 4000])
)
_keys = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5)
_objects = st.recursive(
    _atoms,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(_keys | st.tuples(_keys, _keys), inner, max_size=4)
        | st.sets(_keys, max_size=4)
        | st.frozensets(_keys, max_size=4)
        | st.binary(max_size=9).map(bytearray)
    ),
    max_leaves=20,
)

_kept_picklers = {threshold_bytes: Pickler(threshold_bytes) for threshold_bytes in (0, _NEVER)}


def _typed(obj: Any) -> Any:
    """The object with the type of every part, so that 1, True and 1.0 differ, and 0.0 and -0.0."""
    if isinstance(obj, dict):
        return dict, [(_typed(key), _typed(value)) for key, value in obj.items()]
    if isinstance(obj, list | tuple):
        return type(obj), [_typed(part) for part in obj]
    if isinstance(obj, set | frozenset):
        return type(obj), {(type(part), part) for part in obj}
    return type(obj), repr(obj)


@given(_objects, st.sampled_from([0, _NEVER]))
@example([[], [[]]], 0)
@example({"": b"b" * 70_000, None: "t" * 70_000}, _NEVER)
def test_plain_objects_arrive(sent: Any, threshold_bytes: int) -> None:
    """Nested plain objects arrive equal in value and type, through one kept pickler."""
    stream, buffers = _kept_picklers[threshold_bytes].dumps(sent)
    received = loads(b"".join(stream), buffers=[bytearray(buffer) for buffer in buffers])
    assert _typed(sent) == _typed(received)


@given(st.lists(_objects, min_size=1, max_size=5))
@settings(max_examples=15)
def test_plain_objects_arrive_through_a_queue(sent: list[Any]) -> None:
    """Nested plain objects arrive through a queue whose chunks most of them do not fit."""
    with contextlib.ExitStack() as ends:
        queue = ends.enter_context(_small_queue())
        reader = ends.enter_context(MessageQueue.create_from_handle(queue.export_handle(), 0))
        queue.wait_until_ready(PATIENCE_S)
        for obj in sent:
            queue.enqueue(obj, PATIENCE_S)
            assert _typed(obj) == _typed(reader.dequeue(PATIENCE_S))


def _small_queue() -> MessageQueue:
    from shmcast import QueueConfig

    return MessageQueue(QueueConfig(chunk_bytes="4 KiB", n_chunks=3))


def test_floats_keep_every_bit() -> None:
    """A float keeps sign and payload, of a NaN too."""
    for bits in (0x7FF8000000000001, 0xFFF8DEADBEEF0001, 0x8000000000000000, 1, 0x7FEFFFFFFFFFFFFF):
        sent = struct.unpack("<d", struct.pack("<Q", bits))[0]
        received = _round_trip([sent])[0]
        assert bits == struct.unpack("<Q", struct.pack("<d", received))[0]


# --- what is imported -----------------------------------------------------------------------------

_QUEUE = """
import sys
from shmcast import MessageQueue, QueueConfig
def ends():
    queue = MessageQueue(QueueConfig())
    reader = MessageQueue.create_from_handle(queue.export_handle(), 0)
    queue.wait_until_ready(30)
    return queue, reader
def large():
    return sorted({"numpy", "torch", "zmq"} & set(sys.modules))
"""


def test_importing_shmcast_imports_none_of_the_large_ones() -> None:
    """Importing shmcast, and sending what is no tensor, imports neither torch nor zmq nor numpy."""
    code = f"""{_QUEUE}
imported = large()
queue, reader = ends()
for sent in (1, {{"key": [b"x" * 100_000, object]}}, bytearray(2_000_000), Exception("text")):
    queue.enqueue(sent, 30)
    reader.dequeue(30)
queue.close()
print(imported, large())
"""
    assert "[] []" == _run_python(code)


def test_tensors_go_without_numpy() -> None:
    """Without numpy every dtype arrives, also if torch was imported after the queue was used."""
    code = f"""{_QUEUE}
class NoNumpy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError("numpy is not installed here")
sys.meta_path.insert(0, NoNumpy())
queue, reader = ends()
queue.enqueue("no tensor", 30)
reader.dequeue(30)
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
try:
    torch.ones(3).numpy()
    print("numpy is there")
except RuntimeError:
    pass
n_right = n_sent = 0
for dtype in {{x for x in vars(torch).values() if isinstance(x, torch.dtype)}}:
    tensor = torch.frombuffer(bytearray(range(48)), dtype=dtype)
    if tensor.is_quantized:
        continue
    for sent in (tensor, tensor[1], tensor[:0], tensor[::2], torch.nn.Parameter(tensor, False)):
        n_sent += 1
        queue.enqueue(sent, 30)
        received = reader.dequeue(30)
        n_right += (received.dtype, received.shape) == (sent.dtype, sent.shape)
queue.enqueue([torch.ones(1 << 19)[::2], torch.ones(1 << 19), bytearray(5)], 30)
first, second, _ = reader.dequeue(30)
print(n_sent > 100, n_sent - n_right, first.sum().item(), second.sum().item())
print(queue.stats().oob_buffers, large())
"""
    assert "True 0 262144.0 524288.0\n2 ['torch']" == _run_python(code)


# --- what the pickler uses of the extension -------------------------------------------------------


@st.composite
def _byte_views(draw: st.DrawFn) -> torch.Tensor:
    """A view whose last dimension is the bytes of an item, without gaps; the others are anyhow."""
    item_bytes = draw(st.sampled_from([1, 2, 3, 4, 7, 8, 16, 31]))
    shape = draw(st.lists(st.integers(0, 4), max_size=5))
    n_items = math.prod(shape)
    tensor = _tensor(torch.uint8, max(n_items, 1) * item_bytes, draw(st.integers(0, 3)))
    tensor = tensor[: n_items * item_bytes].view([*shape, item_bytes])
    tensor = tensor.permute([*draw(st.permutations(range(len(shape)))), len(shape)])
    for dimension in range(len(shape)):
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 4))
        tensor = tensor[(slice(None),) * dimension + (slice(start, None, step),)]
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, tensor.ndim - 1))
        lengths = [*tensor.shape]
        lengths.insert(place, draw(st.integers(0, 3)))
        tensor = tensor.unsqueeze(place).expand(lengths)
    return tensor


@given(_byte_views())
@settings(max_examples=150)
def test_copy_strided_is_contiguous_of_torch(tensor: torch.Tensor) -> None:
    """copy_strided gives the bytes of torch's contiguous(), for any view and size of item."""
    *shape, item_bytes = tensor.shape
    *strides_bytes, _ = tensor.stride()
    strides = tuple(stride // item_bytes for stride in strides_bytes)
    # A view without gaps between rows of bytes has such strides, unless a length is 0 or 1.
    if any(s % item_bytes and n > 1 for n, s in zip(shape, strides_bytes, strict=True)):
        assert tensor.numel() == 0
    expected = bytes(tensor.contiguous().flatten().tolist())
    guarded = bytearray(b"\xa5" * (len(expected) + 16))
    target = memoryview(guarded)[8 : 8 + len(expected)]
    copy_strided(target, tensor.data_ptr(), tuple(shape), strides, item_bytes)
    assert b"\xa5" * 8 + expected + b"\xa5" * 8 == guarded


def test_copy_strided_copies_large_arrays() -> None:
    """copy_strided is right for arrays of several MiB too, in each of its ways to copy."""
    base = torch.randint(0, 255, (4 * _MIB,), generator=torch.Generator().manual_seed(7))
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        square = base[:_MIB].to(dtype).view(1024, 1024)
        for view in (
            square.t(),
            square[:, ::3],
            square[::5],
            square[:, 100:612],
            square[3].expand(9, -1),
        ):
            target = bytearray(view.numel() * view.element_size())
            copy_strided(
                target, view.data_ptr(), tuple(view.shape), view.stride(), view.element_size()
            )
            assert target == _memory_of(view.contiguous())


def test_copy_strided_checks_its_destination() -> None:
    """A destination of another size or read-only, and a shape without its strides, are errors."""
    source = torch.arange(6, dtype=torch.uint8)
    address = source.data_ptr()
    for n_bytes in (0, 5, 7):
        with pytest.raises(ValueError, match="6 bytes"):
            copy_strided(bytearray(n_bytes), address, (6,), (1,), 1)
    with pytest.raises(ValueError, match="no array"):
        copy_strided(bytearray(6), address, (6,), (1, 1), 1)
    with pytest.raises(BufferError):
        copy_strided(bytes(6), address, (6,), (1,), 1)


def test_memory_keeps_its_owner() -> None:
    """Memory is a writable buffer of the range that it was given, and keeps its owner alive."""

    class Owner:
        pass

    data = bytearray(b"0123456789")
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    owner = Owner()
    alive = weakref.ref(owner)
    view = memoryview(Memory(address + 2, 5, owner))
    assert (b"23456", False) == (view, view.readonly)
    view[0] = ord("x")
    assert b"01x3456789" == data
    del owner
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_stream_parts_are_bytes() -> None:
    """StreamParts keeps bytes as they are and copies what may change, in the order of memory."""
    parts = StreamParts()
    fixed, changing = b"fixed", bytearray(b"changing")
    columns = np.arange(6, dtype=np.uint8).reshape(3, 2).T
    parts.write(fixed)
    parts.write(changing)
    parts.write(memoryview(changing)[2:4])
    parts.write(pickle.PickleBuffer(columns))
    changing[:] = b"........"
    assert [b"fixed", b"changing", b"an", b"\0\1\2\3\4\5"] == parts.parts
    assert parts.parts[0] is fixed
    assert {bytes} == set(map(type, parts.parts))


def test_a_new_bytearray_has_the_size() -> None:
    """new_bytearray gives a bytearray of that size, empty too, whose bytes can be set."""
    for n_bytes in (0, 1, 100_000):
        made = new_bytearray(n_bytes)
        made[:] = b"x" * n_bytes
        assert (bytearray, b"x" * n_bytes) == (type(made), made)
