"""Runs kernels in CUDA C++ on the CPU, each CUDA thread as a fiber: for machines without a GPU.

What is written in PTX is replaced by the functions of ``cuda_emulation_functions.h``.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

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


class EmulatedKernel:
    """In the place of `driver.Kernel`."""

    at_once, together = 10**6, True

    def __init__(self, folder, name, defines, threads, shared):
        key = "-".join(f"{k}{v}" for k, v in sorted(defines.items()))
        library = Path(folder) / f"{name}-{key}.so"
        if not library.exists():
            source = library.with_suffix(".cpp")
            source.write_text(emulated_source(name))
            macros = [f"-D{k}={v}" for k, v in defines.items()]
            options = [o for o in nvrtc._OPTIONS if o.startswith("-D")]
            flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared"]
            command = [COMPILER, *flags, *options, *macros, str(source), "-o", str(library)]
            subprocess.run(command, check=True)
        self._run = ctypes.CDLL(str(library)).run
        self.threads, self.shared, self.seed = threads, shared, 0

    def launch(self, grid, arguments):
        """Run all blocks; the order of their threads differs from launch to launch."""
        self.seed += 1
        assert self._run(bytes(arguments), grid[0], self.threads, self.shared, self.seed) == 0, (
            "all threads wait for ever"
        )
