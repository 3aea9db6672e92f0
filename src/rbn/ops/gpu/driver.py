"""The CUDA driver's calls that torch has no name for: load code, launch it cooperatively."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


@functools.lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status == 0:
        return
    words = ctypes.c_char_p()
    _driver().cuGetErrorString(status, ctypes.byref(words))
    raise RuntimeError(f"{what}: {(words.value or b'unknown error').decode()}")


@functools.lru_cache(maxsize=64)
def shared_limit(device: int) -> int:
    """Bytes of shared memory that a block may have."""
    cuda, handle, found = _driver(), ctypes.c_int(), ctypes.c_int()
    torch.cuda.init()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
    status = cuda.cuDeviceGetAttribute(ctypes.byref(found), _SHARED_LIMIT, handle)
    _check(status, "asking for the limit of shared memory")
    return found.value


class Kernel:
    """A function of a piece of machine code, loaded on the current device."""

    def __init__(self, code: bytes, name: str, threads: int, shared: int) -> None:
        cuda = _driver()
        self.threads, self.shared = threads, shared
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(cuda.cuModuleLoadData(ctypes.byref(self._module), code), f"loading {name}")
        _check(
            cuda.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            f"finding {name}",
        )
        _check(
            cuda.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED, shared),
            f"{shared} bytes of shared memory for {name}",
        )
        blocks = ctypes.c_int()
        _check(
            cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(blocks), self._function, threads, ctypes.c_size_t(shared)
            ),
            f"asking how many blocks of {name} fit",
        )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.at_once = (
            blocks.value * properties.multi_processor_count
        )  # blocks that fit on the card

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Run all blocks at the same time on torch's current stream, or raise."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchCooperativeKernel(
            self._function, *grid, 1, self.threads, 1, 1, self.shared, stream, parameters
        )
        _check(status, "launching a recurrence")


def structure(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    """A C struct of the given members."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})
