"""CUDA C++ compiled at run time, by the compiler that comes with torch for CUDA.

NVRTC turns the source into machine code for the card at hand in a second or two; the result is kept
on disk, so that the next process finds it.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path

import torch

log = logging.getLogger("rbn.ops.gpu")
_SOURCES = Path(__file__).with_name("cuda")
_INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """NVRTC, from torch's own packages or the system; None where there is none."""
    major = (torch.version.cuda or "12").split(".")[0]
    site = Path(torch.__file__).parent.parent
    found = glob.glob(str(site / "nvidia" / "*" / "lib" / f"libnvrtc.so.{major}*"))
    found += glob.glob(str(Path(torch.__file__).parent / "lib" / "libnvrtc*.so*"))
    names = [f for f in sorted(found) if "alt" not in f and "builtins" not in f]
    for name in [*names, f"libnvrtc.so.{major}", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def source(name: str) -> str:
    """The text of a kernel, its headers put in."""

    def put_in(text: str) -> str:
        return _INCLUDE.sub(lambda m: put_in((_SOURCES / m[1]).read_text()), text)

    return put_in((_SOURCES / f"{name}.cu").read_text())


def compile_source(text: str, name: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code for `arch` (such as ``sm_90``), or RuntimeError with the compiler's words."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("there is no NVRTC library")
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device"]
    options += [f"-D{key}={int(value)}" for key, value in defines.items()]

    def check(status: int) -> None:
        if status == 0:
            return
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        words = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, words)
        raise RuntimeError(f"NVRTC refused {name}: {words.value.decode(errors='replace')}")

    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None
        )
    )
    try:
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        check(nvrtc.nvrtcCompileProgram(program, len(options), array))
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cache_folder() -> Path:
    """Where compiled kernels are kept: RBN_CACHE, or the user's cache folder."""
    if os.environ.get("RBN_CACHE"):
        return Path(os.environ["RBN_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rbn"


def compiled(name: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code from the disk's cache, or compiled and put there."""
    text = source(name)
    key = repr((text, sorted(defines.items()), arch, torch.version.cuda))
    path = cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = compile_source(text, name, defines, arch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError as error:  # the kernel runs all the same
        log.debug("could not keep %s: %s", path, error)
    return code
