"""
The one extension of shmcast; everything else stands in pyproject.toml.

Switches for its developers, by environment variable:

* ``BUILD_SANITIZE=thread`` (or ``address,undefined``): build with these sanitizers.
* ``BUILD_TRACE=1``: with Cython's line tracing, for coverage and profilers.
* ``BUILD_ANNOTATE=1``: write ``shmcast/_ring.html``, which shows where Python is called.
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

setup(
    ext_modules=cythonize(
        [
            Extension(
                "shmcast._ring",
                ["shmcast/_ring.pyx"],
                depends=["shmcast/_atomic.h", "shmcast/_atomic.pxd"],
                include_dirs=["shmcast"],
                define_macros=[("CYTHON_TRACE_NOGIL", "1")] if trace else [],
                extra_compile_args=compile_args,
                extra_link_args=link_args,
            )
        ],
        compiler_directives={"linetrace": True} if trace else {},
        annotate=os.environ.get("BUILD_ANNOTATE") == "1",
        show_all_warnings=True,
    ),
)
