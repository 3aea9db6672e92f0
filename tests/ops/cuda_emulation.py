"""Runs kernels in CUDA C++ on the CPU, each CUDA thread as a fiber: for machines without a GPU.

PTX is replaced by the functions of ``cuda_emulation_functions.h``.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from rbn.ops.gpu.runtime import nvrtc

COMPILER = shutil.which("g++")
FLAGS = ("-std=c++17", "-Og", "-w", "-fPIC")
_HERE = Path(__file__).parent
_FUNCTION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ __forceinline__ [\w ]+ (\w+)\([^{]*?\) "
    r"\{(?:[^\n]*\}\n|\n.*?^\}\n)",
    re.M | re.S,
)
_PART = re.compile(r"^// In place of (\w+):\n", re.M)
_NOTHING = re.compile(r'asm volatile\("" ?:[^;]*;')  # tells the compiler what a number is used for


def emulated(test):
    """Marks a test that compiles kernels for the CPU and runs them."""
    for mark in (pytest.mark.slow, pytest.mark.no_cover):
        test = mark(test)
    return pytest.mark.skipif(COMPILER is None, reason="needs g++")(test)


def emulated_source(name):
    """The kernel's source after the header, with a function ``run`` that starts its grid."""
    text = _NOTHING.sub(";", nvrtc.source(name))
    _, *parts = _PART.split((_HERE / "cuda_emulation_functions.h").read_text())
    own = dict(zip(parts[::2], parts[1::2], strict=True))

    def replaced(match):
        return own.pop(match[1], "") if "asm" in match[0] else match[0]

    text = _FUNCTION.sub(replaced, text)
    assert "asm" not in text
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?uint4 (\w+)\[\];",
        r"uint4* \1 = current->block->memory.data();",
        text,
    )
    struct = re.search(rf"{name}\(const (\w+) p\)", text)[1]
    run = f"""
static {struct} arguments;
extern "C" int run(const void* p, const int* sizes, unsigned seed) {{
  memcpy(&arguments, p, sizeof arguments);
  body = [] {{ {name}(arguments); }};
  return run_grid(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], seed);
}}
"""
    return text + run


def prepare(folder):
    """Compile what all kernels share: the header, and what runs their grids."""
    for name in ("cuda_emulation.h", "cuda_emulation.cpp"):
        shutil.copy(_HERE / name, folder)
    header, program = ("-x", "c++-header", "cuda_emulation.h"), ("-c", "cuda_emulation.cpp")
    for arguments in (header, program):
        subprocess.run([COMPILER, *FLAGS, *arguments], cwd=folder, check=True)


def compiled(folder, name, defines):
    """The path of the compiled kernel. One process compiles it while all others wait."""
    constants = dict(o.removeprefix("-D").split("=") for o in nvrtc._OPTIONS if o.startswith("-D"))
    # Not as options: g++ would not use the compiled header.
    macros = [f"#define {k} {v}\n" for k, v in sorted((constants | defines).items())]
    source = "".join(['#include "cuda_emulation.h"\n', *macros, emulated_source(name)])
    key = hashlib.sha256(source.encode()).hexdigest()[:20]
    library = Path(folder) / f"{name}-{key}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            path, unfinished = library.with_suffix(".cpp"), library.with_suffix(".unfinished")
            path.write_text(source)
            command = [COMPILER, *FLAGS, "-shared", path, "cuda_emulation.o", "-o", unfinished]
            subprocess.run(command, cwd=folder, check=True)
            unfinished.replace(library)
    return str(library)


class EmulatedKernel:
    """Replaces `driver.Kernel`."""

    at_once = 10**6

    def __init__(
        self, folder, name, defines, threads, shared, cluster=0, together=True, down=False
    ):
        self._run = ctypes.CDLL(compiled(folder, name, defines)).run
        self.threads, self.shared, self.cluster = threads, shared, cluster
        self.together, self.down, self.seed = together, down, 0

    def launch(self, grid, arguments):
        """Run all blocks; the order of their threads differs from launch to launch."""
        self.seed += 1
        sizes = *grid, self.threads, self.shared, self.cluster or 1, self.down
        assert self._run(bytes(arguments), (ctypes.c_int * 6)(*sizes), self.seed) == 0, (
            "all threads wait for ever"
        )
