"""What the models assume of each order is what the compiler makes of it, on both processors."""

from __future__ import annotations

import functools
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Final

import pytest

import shmcast._ring as core

pytestmark = pytest.mark.proof

SOURCE: Final = Path(core.__file__).parent
FLAGS: Final = ("-O2", "-std=gnu11", "-g0", "-S")


def compiler_for(processor: str) -> list[str] | None:
    """The command of a compiler for this processor, if there is one here."""
    if processor == platform.machine():
        command = shutil.which("cc")
    else:
        command = shutil.which(f"{processor}-linux-gnu-gcc")
    if command is not None:
        return [command]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{processor}-linux-gnu"]
    return None


@functools.cache
def functions(processor: str, source: Path) -> dict[str, str]:
    """The instructions of each function, a line each, without what is no instruction."""
    compiler = compiler_for(processor)
    if compiler is None:
        pytest.skip(f"there is no compiler for {processor}")
    include = (f"-I{SOURCE}", f"-I{sysconfig.get_path('include')}")
    with tempfile.TemporaryDirectory() as folder:
        # A file of our own: zig renames what it wrote to the given name, whatever that is.
        output = Path(folder) / "assembly.s"
        command = [*compiler, *FLAGS, *include, "-o", str(output), str(source)]
        subprocess.run(command, check=True, capture_output=True)
        assembly = output.read_text()
    found: dict[str, list[str]] = {}
    name = ""
    for line in assembly.splitlines():
        code = re.split(r"//|#[^0-9-]", line)[0].strip()
        if label := re.fullmatch(r"([A-Za-z_]\w*)(\.\w+)*:", code):
            name = label[1]
        elif code and not code.startswith(".") and not code.endswith(":"):
            found.setdefault(name, []).append(code.replace("\t", " "))
    return {name: "\n".join(lines) for name, lines in found.items()}


#: For each processor, what each function has, in this order and with anything between.
EXPECTED: Final = {
    "x86_64": {
        # Loads and stores are ordered by the processor, but for a store and a later load.
        "do_load_acquire": [r"movq \(%rdi\), %rax"],
        "do_store_release": [r"movq %rsi, \(%rdi\)"],
        "do_word_load_acquire": [r"movl \(%rdi\), %eax"],
        "do_raise_to": [r"lock cmpxchg"],
        "do_count_up": [r"lock"],
        "do_word_bump": [r"lock"],
        "do_fence_full": [r"lock|mfence"],
        "do_publish": [r"mov.*, \(%rdi\)", r"movq .*, \(%rsi\)", r"mov.*, 8\(%rdi\)"],
        "do_take": [r"\(%rdi\)", r"\(%rsi\)", r"\(%rdi\)"],
        "do_sleep": [r"movq .*, \(%rdi\)", r"lock|mfence", r"movq \(%rsi\), %rax"],
        "do_compare": [r"\(%rdi\)", r"\(%rsi\)"],
    },
    "aarch64": {
        "do_load_acquire": [r"ldap?r x0, \[x0\]"],
        "do_store_release": [r"stlr x1, \[x0\]"],
        "do_word_load_acquire": [r"ldap?r w0, \[x0\]"],
        "do_raise_to": [r"stlxr|casl|_rel\b"],
        "do_count_up": [r"stlxr|ldaddl|_rel\b"],
        "do_word_bump": [r"stlxr|ldaddl|_rel\b"],
        "do_fence_full": [r"dmb ish$"],
        "do_fence_acquire": [r"dmb ishld"],
        "do_publish": [r"str x2, \[x0\]", r"stlr x\d+, \[x1\]", r"str x2, \[x0, #?8\]"],
        "do_take": [r"ldr x\d+, \[x0\]", r"ldap?r x\d+, \[x1\]", r"ldr x\d+, \[x0\]"],
        "do_sleep": [r"str x\d+, \[x0\]", r"dmb ish$", r"ldr x\d+, \[x1\]"],
        "do_compare": [r"ldr x\d+, \[x0\]", r"dmb ishld", r"ldr x\d+, \[x1\]"],
    },
}


@pytest.mark.parametrize(
    ("processor", "function"),
    [(machine, name) for machine in EXPECTED for name in EXPECTED[machine]],
)
def test_each_order(processor: str, function: str) -> None:
    """Each order of the header is the instruction that the models mean, and nothing passes it."""
    code = functions(processor, Path(__file__).parent / "assembly.c")[function]
    pattern = ".*?".join(f"(?:{part})" for part in EXPECTED[processor][function])
    assert re.search(pattern, code, re.DOTALL | re.MULTILINE), code


#: The same for functions of the core, by what their names in C end with. FULL is the full fence.
FULL: Final = {"x86_64": r"lock or[lq]|mfence", "aarch64": r"dmb ish$"}
CORE: Final = {
    "x86_64": {
        "RingWriter__wake_readers": [FULL["x86_64"], r"lock add"],
        "RingReader__sleep": [r"movq \$1, ", FULL["x86_64"], r"syscall"],
        "RingWriter__sleep_for_space": [r"movq \$1, ", FULL["x86_64"], r"syscall"],
        "RingReader__parts": [FULL["x86_64"]],
        "RingReader_release": [FULL["x86_64"]],
        "RingWriter_strike": [FULL["x86_64"]],
    },
    "aarch64": {
        "RingWriter__publish": [r"stlr"],
        "RingWriter__refresh": [r"ldap?r"],
        "RingWriter__wake_readers": [FULL["aarch64"], r"ldr"],
        "RingReader__sleep": [r"str x", FULL["aarch64"], r"ldap?r", r"ldap?r", r"syscall"],
        "RingWriter__sleep_for_space": [r"str x", FULL["aarch64"], r"ldap?r", r"syscall"],
        "RingReader_try_take": [r"ldap?r", r"dmb ishld", r"ldap?r"],
        "RingReader_release": [r"ldap?r", r"stlr", FULL["aarch64"], r"ldr"],
        "RingWriter_new_epoch": [r"stlr"],
        "RingWriter_strike": [FULL["aarch64"], r"ldap?r"],
        "RingWriter_admit": [r"stlr"],
        "RingWriter_say_closing": [r"stlr"],
        "RingReader__parts": [r"stlxr|casl|_rel\b", FULL["aarch64"]],
        "RingReader_leave": [r"stlxr|casl|_rel\b"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "function"), [(machine, name) for machine in CORE for name in CORE[machine]]
)
def test_the_core(processor: str, function: str) -> None:
    """The core has the orders where the models have them, also after all that is inlined."""
    source = SOURCE / "_ring.c"
    if not source.exists():
        pytest.skip("the core was not built here")
    owner, _, method = function.partition("_")
    name = re.compile(rf".*{owner}_\d*{method}")
    code = "\n".join(
        text for key, text in functions(processor, source).items() if name.fullmatch(key)
    )
    pattern = ".*?".join(f"(?:{part})" for part in CORE[processor][function])
    assert re.search(pattern, code, re.DOTALL | re.MULTILINE), code
