"""Runs kernels in CUDA C++ on the CPU, each CUDA thread as a fiber: for machines without a GPU.

What is written in PTX is replaced by the functions of ``cuda_emulation_functions.h``.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from filelock import FileLock

from rbn.ops.gpu.runtime import nvrtc

COMPILER = shutil.which("g++")
_HERE = Path(__file__).parent
_FUNCTION = re.compile(
    r"^__device__ __forceinline__ [\w ]+ (\w+)\([^{]*?\) \{(?:[^\n]*\}\n|\n.*?^\}\n)", re.M | re.S
)


def emulated_source(name):
    """The kernel's source for a C++ compiler, with a function ``run`` that starts its grid."""
    text = nvrtc.source(name)
    own = (_HERE / "cuda_emulation_functions.h").read_text()
    first = [True]

    def replaced(match):
        if "asm" not in match[0]:
            return match[0]
        before, first[0] = own if first[0] else "", False
        return before

    text = _FUNCTION.sub(replaced, text)
    assert "asm" not in text
    text = re.sub(
        r"extern __shared__ uint4 (\w+)\[\];", r"uint4* \1 = current->block->memory.data();", text
    )
    struct = re.search(rf"{name}\(const (\w+) p\)", text)[1]
    run = f"""
static {struct} arguments;
extern "C" int run(const void* p, int blocks, int threads, int shared, unsigned seed) {{
  memcpy(&arguments, p, sizeof arguments);
  body = [] {{ {name}(arguments); }};
  return run_grid(blocks, threads, shared, seed);
}}
"""
    return (_HERE / "cuda_emulation.h").read_text() + text + run


def compiled(folder, name, defines):
    """The path of the compiled kernel; one process compiles it, and all others wait for that."""
    options = [o for o in nvrtc._OPTIONS if o.startswith("-D")]
    options += [f"-D{k}={v}" for k, v in sorted(defines.items())]
    source = emulated_source(name)
    key = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:20]
    library = Path(folder) / f"{name}-{key}.so"
    with FileLock(f"{library}.lock"):
        if not library.exists():
            path, unfinished = library.with_suffix(".cpp"), library.with_suffix(".unfinished")
            path.write_text(source)
            flags = ["-std=c++14", "-Og", "-w", "-fPIC", "-shared"]
            subprocess.run([COMPILER, *flags, *options, path, "-o", unfinished], check=True)
            unfinished.replace(library)
    return str(library)


class EmulatedKernel:
    """In the place of `driver.Kernel`."""

    at_once, together = 10**6, True

    def __init__(self, folder, name, defines, threads, shared):
        self._run = ctypes.CDLL(compiled(folder, name, defines)).run
        self.threads, self.shared, self.seed = threads, shared, 0

    def launch(self, grid, arguments):
        """Run all blocks; the order of their threads differs from launch to launch."""
        self.seed += 1
        assert self._run(bytes(arguments), grid[0], self.threads, self.shared, self.seed) == 0, (
            "all threads wait for ever"
        )
