"""
Object ⇄ stream and out-of-band buffers; how tensors are pickled. The only file that imports pickle.

A stream is trusted if it comes from the same user on the same host, or from a writer that proved to
have the queue's key. Any other may name only what an allow-list has.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from shmcast._ring import Memory, StreamParts, copy_strided, new_bytearray
from shmcast.errors import ProtocolError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Pickler",
    "checked_loads",
    "loads",
    "rebuild_parameter",
    "rebuild_tensor",
    "reduce_tensor",
]

_PROTOCOL: Final = 5
#: How many bytes of buffers a stream keeps before all further ones leave it too: what stays is
#: copied into the stream, into the chunk, out of it and out of the stream.
MOST_KEPT_BYTES: Final = 64 * 1024
#: A kept pickler is thrown away after a longer stream: clearing a large memo costs every later
#: message (739 µs after one of 300,000 strings). A stream this short has a memo of 32 KiB at most,
#: and next to a longer one a new pickler costs nothing.
_KEPT_STREAM_BYTES: Final = 1024

_Reduced = tuple[Any, ...]
#: A pickler's `dump` and `clear_memo`, and what it fills: the list of stream parts and the sink.
_Kept = tuple[Callable[[object], None], Callable[[], None], list[bytes], "_BufferSink"]


class _DispatchTable:
    """
    How each class is reduced: first what users registered with `copyreg`, then tensors.

    pickle looks up `table[class]`; a KeyError means "as the class itself does it". Nothing is
    registered globally, and torch is not imported: without torch there are no tensors.
    """

    def __init__(self, reduce_exact_tensor: Callable[[torch.Tensor], _Reduced]) -> None:
        self._reduce_exact_tensor = reduce_exact_tensor
        self._tensor_class: type | None = None  # torch's, once that is imported

    def __getitem__(self, cls: type) -> Callable[[Any], Any]:
        registered = copyreg.dispatch_table.get(cls)
        if registered is not None:
            return registered
        if cls is self._tensor_class:
            return self._reduce_exact_tensor
        if self._tensor_class is None:
            self._tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
            if self._tensor_class is not None:
                return self[cls]
        elif issubclass(cls, self._tensor_class):
            return _reduce_tensor_subclass
        raise KeyError(cls)


class Pickler:
    """
    Pickles one message after another; neither thread-safe nor reentrant.

    The C pickler is kept between messages, which halves the time of a small one.

    Args:
        oob_threshold_bytes: buffers of at least this size leave the stream; 0 means every
            non-empty buffer.
        allocate: makes a buffer of so many bytes for a tensor that leaves the stream but can't be
            exposed in place.
        reduce_exact_tensor: how a tensor that is exactly `torch.Tensor` is reduced; benchmarks
            compare with torch's own way.
    """

    def __init__(
        self,
        oob_threshold_bytes: int,
        *,
        allocate: Callable[[int], Any] = new_bytearray,
        reduce_exact_tensor: Callable[[torch.Tensor], _Reduced] | None = None,
    ) -> None:
        self._threshold_bytes = max(oob_threshold_bytes, 1)
        # Not a bound method: that cycle would keep the queue's memory until it is collected.
        allocate_by_size = functools.partial(_allocate_by_size, self._threshold_bytes, allocate)
        reduce = functools.partial(reduce_tensor, allocate=allocate_by_size)
        self._table = _DispatchTable(reduce_exact_tensor or reduce)
        self._kept: _Kept | None = None

    def dumps(self, obj: object) -> tuple[list[bytes], list[memoryview]]:
        """
        The stream of `obj` in parts, and its out-of-band buffers as memoryviews of bytes.

        The views pin their memory, which its owner can't resize while they live. The parts are
        valid until the next call.
        """
        kept = self._kept or self._new()
        # Not kept while in use: after an error, or a signal at any line, its memo would refer to
        # objects that were never sent.
        self._kept = None
        dump, clear_memo, parts, sink = kept
        parts.clear()
        sink.kept_bytes = 0
        dump(obj)
        # A kept pickler refers to no views: with it they could become part of a garbage cycle, and
        # views of views in one crash Python (before 3.13).
        buffers, sink.buffers = sink.buffers, []
        if len(parts) == 1 and len(parts[0]) <= _KEPT_STREAM_BYTES:
            clear_memo()
            self._kept = kept
        return parts, buffers

    def _new(self) -> _Kept:
        stream = StreamParts()
        sink = _BufferSink(self._threshold_bytes)
        pickler = pickle.Pickler(stream, _PROTOCOL, buffer_callback=sink)
        pickler.dispatch_table = self._table  # type: ignore[assignment]  # wants a Mapping
        return pickler.dump, pickler.clear_memo, stream.parts, sink


def _allocate_by_size(threshold_bytes: int, allocate: Callable[[int], Any], n_bytes: int) -> Any:
    """Memory for a tensor; for one that leaves the stream it is asked of `allocate`."""
    return allocate(n_bytes) if n_bytes >= threshold_bytes else new_bytearray(n_bytes)


class _BufferSink:
    """Takes large buffers out of the stream; pickle calls it for each buffer."""

    def __init__(self, threshold_bytes: int) -> None:
        self.buffers: list[memoryview] = []
        self.kept_bytes = 0
        self._threshold_bytes = threshold_bytes

    def __call__(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether the buffer stays in the stream."""
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous: it stays, and pickle raises its own error
            return True
        n_bytes = raw.nbytes
        if n_bytes < self._threshold_bytes and (self.kept_bytes < MOST_KEPT_BYTES or n_bytes == 0):
            self.kept_bytes += n_bytes
            return True
        self.buffers.append(raw)
        return False


#: The object of a stream and, as `buffers`, its out-of-band buffers, which the object may keep.
loads = pickle.loads

#: What an untrusted stream may name, besides torch's dtypes: nothing that can run code. Not torch's
#: own reduction of a tensor, since `_load_from_bytes` loads any pickle; not numpy's, since with an
#: object dtype the bytes of an array or scalar are taken for addresses.
_ALLOWED: Final = frozenset(
    (
        *(f"shmcast.pickler:{name}" for name in ("rebuild_tensor", "rebuild_parameter")),
        *(f"torch:{name}" for name in ("Size", "device")),
        *(f"collections:{name}" for name in ("OrderedDict", "defaultdict", "deque")),
        *(f"datetime:{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(
            f"builtins:{name}"
            # Not types that have opcodes of their own: `bytearray` and a 4-byte number could fill
            # the memory.
            for name in ("complex", "range", "slice")
        ),
    )
)


class _CheckedUnpickler(pickle.Unpickler):
    def __init__(self, stream: Any, buffers: Any, allowed: frozenset[str]) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        wanted = f"{module}:{name}"
        if module == "torch":
            import torch

            found = vars(torch).get(name)  # `getattr` may import a module
            if isinstance(found, torch.dtype):
                return found
        if wanted not in self._allowed:
            raise ProtocolError(f"the message names {wanted!r}, which is not in `allow`")
        found = super().find_class(module, name)
        # A stream can set attributes of what it names, and our functions are shared by everybody.
        return functools.partial(found) if module == __name__ else found


#: Opcodes that our pickler never writes. With PUT nine bytes make a table of 800 MB; EXT names, by
#: number, an object that `copyreg` caches, past `find_class`.
_REFUSED_OPCODES: Final = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "EXT1", "EXT2", "EXT4"))


def _check_opcodes(stream: Any) -> None:
    """Refuse what no writer sends, and a length beyond the stream's end (ValueError)."""
    import pickletools

    frame_end = 0  # of the frame that is open, 0 for none
    for opcode, argument, position in pickletools.genops(io.BytesIO(stream)):
        assert position is not None  # a file was given
        if position == frame_end:
            frame_end = 0
        # When a frame ends inside an opcode, the unpickler loses bytes, and from there on reads
        # other opcodes than these.
        is_crooked = frame_end and (position > frame_end or opcode.name == "FRAME")
        if is_crooked or opcode.name in _REFUSED_OPCODES:
            raise ProtocolError(f"shmcast never writes opcode {opcode.name}; message refused")
        if opcode.name == "FRAME":
            assert isinstance(argument, int)
            frame_end = position + 9 + argument


def checked_loads(allow: Iterable[str]) -> Callable[..., Any]:
    """
    A `loads` for untrusted streams, which may name only what is listed.

    Tensors are on the list, numpy's arrays are not: with their names a stream can run any code.

    Args:
        allow: further names, such as "my.package:Step".
    """
    allowed = _ALLOWED | frozenset(allow)

    def checked(stream: Any, *, buffers: Any = None) -> Any:
        _check_opcodes(stream)
        return _CheckedUnpickler(stream, buffers, allowed).load()

    return checked


def reduce_tensor(tensor: torch.Tensor, allocate: Callable[[int], Any] = new_bytearray) -> _Reduced:
    """
    Reduce a tensor to its bytes, shape, strides and dtype, or the way torch does.

    A strided CPU tensor that does not require grad and has no other state is reduced to a buffer of
    raw memory, whatever its dtype: only its own bytes, not the rest of its storage. Strides are
    kept if the elements fill their memory without gaps; any other tensor, such as an expanded one,
    is sent as a contiguous one.

    The idea is that of vLLM's tensor reducer (pull request 48442).

    Args:
        tensor: exactly a `torch.Tensor`, of any shape.
        allocate: makes a writable buffer of so many bytes for elements that do not fill their
            memory without gaps.

    Raises:
        TypeError: torch itself cannot pickle a tensor of this kind and dtype.
    """
    if not _is_plain(tensor):
        return _reduce_as_torch_does(tensor)
    shape = tuple(tensor.shape)
    strides: tuple[int, ...] | None = tensor.stride()
    memory: Any
    if strides == _geometry(shape)[1]:
        strides = None
    elif not _is_dense(shape, tensor.stride()):
        item_bytes = tensor.element_size()
        memory = allocate(tensor.nbytes)
        # No dimension of length 1: what is left are fewer than 64.
        steps = [step for step in zip(shape, tensor.stride(), strict=True) if step[0] != 1]
        lengths, distances = zip(*steps, strict=True)
        copy_strided(memory, tensor.data_ptr(), lengths, distances, item_bytes)
        return rebuild_tensor, (pickle.PickleBuffer(memory), shape, None, _name_of(tensor.dtype))
    # The storage, since a tensor may get another one before its bytes are copied.
    memory = Memory(tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage())
    return rebuild_tensor, (pickle.PickleBuffer(memory), shape, strides, _name_of(tensor.dtype))


def rebuild_tensor(
    buffer: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype_name: str
) -> torch.Tensor:
    """
    The tensor of `reduce_tensor`, writable.

    Args:
        buffer: its bytes. Writable ones, a `zmq.Frame` too, become the tensor's memory; read-only
            ones are copied.
        shape: the length of each dimension.
        strides: in items, or None for a contiguous tensor.
        dtype_name: such as "bfloat16".

    Raises:
        ProtocolError: the arguments contradict each other.
    """
    import torch

    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"a tensor came with dtype {dtype_name!r}, which this torch lacks")
    view = memoryview(buffer)
    n_items, contiguous_strides = _geometry(shape)
    if view.nbytes != dtype.itemsize * n_items:
        raise ProtocolError(
            f"a tensor of shape {shape} and dtype {dtype_name} came with {view.nbytes} bytes"
        )
    if strides is None:
        strides = contiguous_strides
    elif len(strides) != len(shape) or not _is_dense(shape, strides):
        raise ProtocolError(f"a tensor of shape {shape} came with strides {strides}")
    if view.nbytes == 0:  # which `frombuffer` refuses
        view = memoryview(bytearray(dtype.itemsize))
    # torch keeps the object that it is given, not the buffer: here the view, which keeps its owner
    # alive.
    memory = bytearray(view) if view.readonly else view
    tensor = torch.frombuffer(memory, dtype=dtype)
    if n_items and strides == (1,):  # it is so already
        return tensor
    return tensor.as_strided_(shape, strides)


def rebuild_parameter(data: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    """A parameter with this data."""
    import torch

    return torch.nn.Parameter(data, requires_grad)


@functools.cache
def _dispatch_keys() -> tuple[Callable[[torch.Tensor], object], tuple[object, ...]]:
    """
    What tells a tensor's dispatch keys, and those of plain tensors: of usual and inference ones.

    A tensor has a key for everything that torch's operators have to treat in a way of its own. Not
    found out with a tensor, since the caller may be in any mode of torch's.
    """
    import torch

    try:
        key, key_set = torch._C.DispatchKey, torch._C.DispatchKeySet
        inference = key_set(key.CPU).add(key.AutocastCPU)
        usual = inference.add(key.AutogradCPU).add(key.ADInplaceOrView)
        return torch._C._dispatch_keys, (usual, inference)
    except AttributeError:  # of a torch that has none of this
        return id, ()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes, shape, strides and dtype are all that there is to this tensor."""
    keys_of, plain = _dispatch_keys()
    return (
        (keys_of(tensor) in plain or _is_plain_kind(tensor))
        and not tensor.requires_grad
        and not tensor.__dict__
        and _is_backed(tensor)
    )


def _is_plain_kind(tensor: torch.Tensor) -> bool:
    """Whether a tensor with unknown dispatch keys is a plain one nevertheless."""
    import torch

    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
        and not any(getattr(tensor, "names", ()))
    )


def _is_backed(tensor: torch.Tensor) -> bool:
    """Whether its storage reaches as far as its elements; `resize_` may have taken it away."""
    n_bytes, item_bytes = tensor.nbytes, tensor.element_size()
    end_bytes = tensor.storage_offset() * item_bytes
    if tensor.is_contiguous():
        end_bytes += n_bytes
    else:
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        end_bytes += (1 + sum((length - 1) * stride for length, stride in steps)) * item_bytes
    return n_bytes == 0 or end_bytes <= tensor.untyped_storage().nbytes()


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(1024)
def _geometry(shape: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
    """How many items a shape has, -1 if it is not one, and the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    n_items = -1 if min(shape, default=0) < 0 else math.prod(shape)
    return n_items, tuple(reversed(strides))


@functools.lru_cache(1024)
def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill a range of memory without gaps, in any order."""
    expected = 1
    for stride, length in sorted(zip(strides, shape, strict=True)):
        if length == 0:
            return True
        if length == 1:
            continue
        if stride != expected:
            return False
        expected *= length
    return True


def _reduce_tensor_subclass(tensor: torch.Tensor) -> _Reduced:
    import torch

    if (
        type(tensor) is torch.nn.Parameter
        and not tensor.__dict__
        and not tensor._backward_hooks
        and not getattr(tensor, "_post_accumulate_grad_hooks", None)
        and _is_plain(tensor.data)
    ):
        return rebuild_parameter, (tensor.data, tensor.requires_grad)
    return _reduce_as_torch_does(tensor)


def _reduce_as_torch_does(tensor: torch.Tensor) -> _Reduced:
    import torch

    try:
        reduced: _Reduced = tensor.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]  # torch's
        refused = _holds_storage(reduced) and not _carries(tensor)
        cause = None
    except Exception as error:
        if type(tensor).__reduce_ex__ is not torch.Tensor.__reduce_ex__ or _carries(tensor):
            raise
        refused, cause = True, error
    if refused:
        raise TypeError(
            f"torch {torch.__version__} can't load its own pickle of a {tensor.dtype} tensor, and "
            f"this one needs it ({type(tensor).__name__}, requires_grad={tensor.requires_grad}, "
            f"layout={tensor.layout}, device={tensor.device}): send a plain CPU tensor instead"
        ) from cause
    return reduced


def _holds_storage(reduced: Any) -> bool:
    """Whether there is a storage in it: without one, torch's pickle works for every dtype."""
    import torch

    if isinstance(reduced, tuple):
        return any(_holds_storage(part) for part in reduced)
    return isinstance(reduced, torch.UntypedStorage | torch.storage.TypedStorage)


def _carries(tensor: torch.Tensor) -> bool:
    return tensor.is_quantized or _torch_carries(tensor.dtype)


@functools.cache
def _torch_carries(dtype: torch.dtype) -> bool:
    """
    Whether torch can load its own pickle of this dtype, found out by trying.

    In a thread of its own, where no torch mode of the caller's thread is active.
    """
    import torch

    loaded: list[torch.Tensor] = []

    def try_it() -> None:
        sample = torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)
        stream = io.BytesIO()
        pickler = pickle.Pickler(stream, _PROTOCOL)
        pickler.dispatch_table = {}  # as torch alone does it
        with contextlib.suppress(Exception):  # any exception means no
            pickler.dump(sample)
            loaded.append(pickle.loads(stream.getbuffer()))

    thread = threading.Thread(target=try_it, name="shmcast-try-dtype")
    thread.start()
    thread.join()
    return [tensor.dtype for tensor in loaded] == [dtype]
