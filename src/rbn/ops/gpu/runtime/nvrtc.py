"""Compiles CUDA C++ at run time with NVRTC, which ships with torch for CUDA.

NVRTC compiles the source for the installed GPU in a second or two. The result is cached on disk for
later processes. Kernels that will be needed later are compiled ahead, in threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import logging
import os
import re
import stat
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

from rbn.ops.few_rows import NO_SCALE
from rbn.ops.types import CONSTANT

log = logging.getLogger("rbn.ops.gpu")
_SOURCES = {path.name: path for path in Path(__file__).parents[1].rglob("*.cu*")}  # by name
# The first version that supports the Hopper kernels' instructions: st.async, 128-bit loads.
FOR_HOPPER = (12, 3)
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the kernels' macro TYPE
_OPTIONS = ("--std=c++17", "-default-device", f"-DCONSTANT={CONSTANT}f", f"-DNO_SCALE={NO_SCALE}f")
Program = tuple[str, dict[str, int], str]  # name, macros and architecture: see `compiled`
_DIGEST = hashlib.sha256().digest_size
_INCLUDE = re.compile(r'^#include "(.*)"$', re.MULTILINE)


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """NVRTC, from torch's own packages or the system; None if it is missing."""
    major = (torch.version.cuda or "12").split(".")[0]
    site = Path(torch.__file__).parent.parent
    result = glob.glob(str(site / "nvidia" / "*" / "lib" / f"libnvrtc.so.{major}*"))
    result += glob.glob(str(Path(torch.__file__).parent / "lib" / "libnvrtc*.so*"))
    names = [f for f in sorted(result) if "alt" not in f and "builtins" not in f]
    for name in [*names, f"libnvrtc.so.{major}", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def source(name: str) -> str:
    """The source of a kernel, with its headers inlined."""

    def put_in(text: str) -> str:
        return _INCLUDE.sub(lambda m: put_in(_SOURCES[m[1]].read_text()), text)

    return put_in(_SOURCES[f"{name}.cu"].read_text())


@functools.lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """The version of NVRTC, such as (12, 8); (0, 0) if it is missing."""
    nvrtc = library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvrtc is None or nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        return 0, 0
    return major.value, minor.value


@functools.lru_cache(maxsize=1)
def architectures() -> tuple[int, ...]:
    """The architectures that NVRTC supports, such as 90; empty if it cannot list them."""
    nvrtc, count = library(), ctypes.c_int()
    ask = getattr(nvrtc, "nvrtcGetNumSupportedArchs", None)
    if nvrtc is None or ask is None or ask(ctypes.byref(count)):
        return ()
    result = (ctypes.c_int * count.value)()
    return () if nvrtc.nvrtcGetSupportedArchs(result) else tuple(result)


def architecture(capability: tuple[int, int]) -> str | None:
    """The architecture to compile for, such as ``sm_90`` for (9, 0); None if NVRTC supports none.

    A GPU runs code compiled for an earlier GPU of the same generation.
    """
    major, minor = capability
    known = architectures() or (10 * major + minor,)
    same = [arch for arch in known if arch // 10 == major and arch % 10 <= minor]
    return f"sm_{max(same)}" if same else None


def architecture_of(device: int) -> str:
    """The architecture to compile for on a device that `supports` covers."""
    arch = architecture(torch.cuda.get_device_capability(device))
    assert arch is not None
    return arch


@functools.lru_cache(maxsize=64)
def supports(device: int) -> bool:
    """Whether CUDA C++ runs on a device: compute capability 8.0 or later, and NVRTC works."""
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and works(capability)


@functools.lru_cache(maxsize=64)
def works(capability: tuple[int, int]) -> bool:
    """Whether NVRTC is installed, complete, and supports such a GPU; otherwise logs the reason."""
    arch = architecture(capability)
    if library() is None or arch is None:
        log.debug("NVRTC %s compiles nothing for capability %s", version(), capability)
        return False
    try:
        compile_source(source("empty"), "empty", {}, arch)
    except RuntimeError as error:
        log.warning("the kernels in CUDA C++ are left out: %s", error)
        return False
    return True


def compile_source(text: str, name: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code for `arch` (such as ``sm_90``). Raises RuntimeError with the compiler's log."""
    nvrtc = library()
    if nvrtc is None:
        raise RuntimeError("there is no NVRTC library")
    program = ctypes.c_void_p()
    options = [f"--gpu-architecture={arch}", *_OPTIONS]
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


def cache_folder() -> Path | None:
    """The folder for compiled kernels: RBN_CACHE, or the user's cache folder.

    None for a user without a home, because a folder shared by all users could hold anyone's code.
    """
    if os.environ.get("RBN_CACHE"):
        return Path(os.environ["RBN_CACHE"])
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rbn"
    except RuntimeError:
        return None


def _is_own(path: Path) -> bool:
    """Whether only this user can have written the file or folder."""
    about = path.stat()
    return not hasattr(os, "getuid") or (
        about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )


# What was compiled before, or will be: the threads' results until they are used, then None.
_Key = tuple[str, tuple[tuple[str, int], ...], str]
_AHEAD: dict[_Key, Future[bytes] | None] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_AHEAD.clear)  # a child process has no such threads


def compile_ahead(name: str, defines: dict[str, int], arch: str) -> None:
    """Start compiling in a thread, unless done before. `compiled` waits and raises its errors.

    At exit the interpreter waits for the thread, because NVRTC cannot be interrupted.
    """
    key = name, tuple(sorted(defines.items())), arch
    if key in _AHEAD:
        return
    result: Future[bytes] = Future()

    def run() -> None:
        try:
            result.set_result(_load_or_compile(name, defines, arch))
        except BaseException as error:  # raised where the kernel is needed
            result.set_exception(error)

    thread = threading.Thread(target=run, name=f"rbn compiles {name}")
    with contextlib.suppress(RuntimeError):  # no more threads: `compiled` compiles it
        thread.start()
        _AHEAD[key] = result


def compiled(name: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code that was compiled ahead, or from the cache on disk, or compiled now."""
    key = name, tuple(sorted(defines.items())), arch
    ahead = _AHEAD.get(key)
    _AHEAD[key] = None
    return _load_or_compile(name, defines, arch) if ahead is None else ahead.result()


def _load_or_compile(name: str, defines: dict[str, int], arch: str) -> bytes:
    """Machine code from the cache on disk; compiles and caches it if missing."""
    text = source(name)
    key = repr((text, sorted(defines.items()), arch, torch.version.cuda, version(), _OPTIONS))
    folder = cache_folder()
    if folder is None:
        return compile_source(text, name, defines, arch)
    path = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    code = _kept(path)
    if code is None:
        code = compile_source(text, name, defines, arch)
        _keep(code, path)
    return code


def _kept(path: Path) -> bytes | None:
    """Read what `_keep` wrote; None if the file is missing or invalid."""
    try:
        content = path.read_bytes()
        own = _is_own(path) and _is_own(path.parent)
    except OSError:
        return None
    if not own:  # the checksum proves nothing: whoever can write the file can write that too
        log.warning("%s can be written by other users; it is not used", path)
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    if hashlib.sha256(code).digest() == digest:
        return code
    log.warning("%s is damaged; it is made again", path)
    return None


def _keep(code: bytes, path: Path) -> None:
    """Write a checksum and the machine code atomically."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(code).digest() + code)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:  # only the cache entry is lost
        log.debug("could not keep %s: %s", path, error)
