"""Streams that nobody vouches for: `PYTHONPATH=tests python -m fuzz pickles`."""

import codecs
import collections
import datetime
import pickle
import sys

import torch

from shmcast.pickler import _ALLOWED, Pickler, checked_loads

LOADS = checked_loads(())


def stream_of(obj: object) -> bytes:
    """What a writer sends."""
    return b"".join(Pickler(1 << 40).dumps(obj)[0])


class Reduced:
    """Pickled as this."""

    def __init__(self, *reduced: object) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[object, ...]:
        return self.reduced


#: What a writer sends, and what runs code, names what is not listed, or takes memory.
GOOD = [
    {"step": 1, "values": [1.5, None, True, -(10**30)], "set": {1, 2}, "bytes": b"b", "é": "ü"},
    [torch.ones(2, 3), torch.nn.Parameter(torch.ones(1)), torch.Size((2, 3)), torch.device("cpu")],
    [collections.OrderedDict(a=1), collections.deque([1, 2], 3), range(3), slice(1), 1j],
    [datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC), bytearray(b"bytes"), frozenset((1, 2))],
]
HOSTILE = {
    "reduce": b"cos\nsystem\n(Vtrue\ntR.",
    "inst": b"(Vtrue\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nVtrue\no.",
    "stack global": b"\x80\x05\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "newobj": b"\x80\x05cbuiltins\nobject\n)\x81.",
    "newobj_ex": b"\x80\x05cbuiltins\nobject\n)}\x92.",
    "attribute": b"\x80\x05\x8c\x0bcollections\x8c\x16OrderedDict.__reduce__\x93.",
    "attribute of ours": b"\x80\x05\x8c\x0fshmcast.pickler\x8c\x1arebuild_tensor.__globals__\x93.",
    "module of ours": b"cshmcast.pickler\npickle\n.",
    "eval": b"cbuiltins\neval\n(V1+1\ntR.",
    "getattr": b"cbuiltins\ngetattr\n.",
    "module of torch": b"ctorch\n_inductor\n.",
    "function of torch": b"ctorch\nload\n.",
    "storage": b"ctorch.storage\n_load_from_bytes\n(C\x01xtR.",
    "extension": b"\x80\x05\x82\x01.",
    "persistent": b"Pname\n.",
    "buffer": b"\x80\x05\x97.",
    "large table": b"\x80\x05Nr\xff\xff\xff\x02.",
    "large table in text": b"Np50000000\n.",
    "large bytes": b"\x8e" + (800 << 20).to_bytes(8, "little"),
    "large bytearray": b"\x96" + (800 << 20).to_bytes(8, "little"),
    "large array": b"cbuiltins\nbytearray\n(J\x00\x00\x00\x30tR.",
    "large set": b"cbuiltins\nset\n(cbuiltins\nrange\n(J\x00\x00\x80\x00tRtR.",
    "large frozenset": b"cbuiltins\nfrozenset\n(cbuiltins\nrange\n(J\x00\x00\x80\x00tRtR.",
    # The frame ends in the length of the bytes, and four of them are taken for its other half.
    "opcodes that pickletools does not see": (
        b"\x80\x05\x95"
        + (5).to_bytes(8, "little")
        + b"\x8e"
        + (11).to_bytes(8, "little")
        + bytes(4)
        + b"Nr\xff\xff\xff\x02."
        + b"."
    ),
    "frame in a frame": b"\x80\x05" + 2 * (b"\x95" + (12).to_bytes(8, "little")) + b"N0N.",
    "large frame": b"\x80\x05\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "deep": b"(" * 5000 + b"l" * 5000 + b".",
    "deep tuples": b"N" + b"\x85" * 20_000 + b".",
    "itself": b"]\x94h\x00a.",
    "nothing": b".",
}
SEEDS = [*map(stream_of, GOOD), *HOSTILE.values(), pickle.dumps(Reduced(print, ("harm",)))]


class Watch:
    """Notes what loading a stream does besides making plain data."""

    #: What torch does when a tensor is made.
    QUIET = ("object.__getattr__", "import")

    def __init__(self) -> None:
        self.is_on = False
        self.found: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_on or event in self.QUIET:
            return
        if event == "pickle.find_class":
            module, name = arguments
            dtype = vars(torch).get(str(name))
            if f"{module}:{name}" in _ALLOWED or isinstance(dtype, torch.dtype):
                return
        self.found.append(f"{event} {arguments}")


WATCH = Watch()
for _codec in ("ascii", "latin-1", "raw-unicode-escape"):
    codecs.lookup(_codec)  # so that no stream has to import them
sys.addaudithook(WATCH)


def one_input(data: bytes) -> None:
    """A stream makes plain data, whatever it says, and resolves nothing that is not listed."""
    before = set(sys.modules)
    WATCH.is_on = True
    try:
        LOADS(data)
    except Exception as error:  # what loading raises is the caller's
        if isinstance(error, MemoryError):
            WATCH.found.append("MemoryError")
    finally:
        WATCH.is_on = False
    assert not WATCH.found, WATCH.found
    assert before == set(sys.modules), set(sys.modules) - before
