"""
The extensions of shmcast; everything else stands in pyproject.toml.

Switches for its developers, by environment variable:

* ``BUILD_SANITIZE=thread`` (or ``address,undefined``): build with these sanitizers.
* ``BUILD_TRACE=1``: with Cython's line tracing, for coverage and profilers.
* ``BUILD_ANNOTATE=1``: write ``shmcast/*.html``, which show where Python is called.
"""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

sanitizers = os.environ.get("BUILD_SANITIZE")
trace = os.environ.get("BUILD_TRACE") == "1"

compile_args = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter"]
link_args = []
if sanitizers:
    # Without -fno-builtin the thread sanitizer does not see what memcpy touches.
    compile_args += [f"-fsanitize={sanitizers}", "-fno-builtin", "-fno-omit-frame-pointer", "-g"]
    link_args += [f"-fsanitize={sanitizers}"]


def extension(name: str, *headers: str) -> Extension:
    """One compiled module of the package."""
    return Extension(
        f"shmcast.{name}",
        [f"shmcast/{name}.pyx"],
        depends=[f"shmcast/{header}" for header in headers],
        include_dirs=["shmcast"],
        define_macros=[("CYTHON_TRACE_NOGIL", "1")] if trace else [],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


setup(
    ext_modules=cythonize(
        [extension("_system"), extension("_ring", "_atomic.h", "_atomic.pxd")],
        compiler_directives={"linetrace": True} if trace else {},
        annotate=os.environ.get("BUILD_ANNOTATE") == "1",
        show_all_warnings=True,
    ),
)
