"""The CUDA driver's calls that torch has no name for: load code, launch it cooperatively."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_COOPERATIVE, _CLUSTER = 2, 4  # CU_LAUNCH_ATTRIBUTE_...


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


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
    """A function of a piece of machine code, loaded on the current device.

    cluster: blocks that share their memory and run on neighbouring multiprocessors.
    """

    def __init__(self, code: bytes, name: str, threads: int, shared: int, cluster: int = 1) -> None:
        cuda = _driver()
        self.threads, self.shared, self.cluster = threads, shared, cluster
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
        self.at_once = self._blocks_at_once(name)

    def _blocks_at_once(self, name: str) -> int:
        """How many blocks fit on the card."""
        cuda, count = _driver(), ctypes.c_int()
        what = f"asking how many blocks of {name} fit"
        if self.cluster > 1:
            config = self._config((self.cluster, 1), None)
            status = cuda.cuOccupancyMaxActiveClusters(
                ctypes.byref(count), self._function, ctypes.byref(config)
            )
            _check(status, what)
            return count.value * self.cluster
        status = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(count), self._function, self.threads, ctypes.c_size_t(self.shared)
        )
        _check(status, what)
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return count.value * int(properties.multi_processor_count)

    def _config(self, grid: tuple[int, int], stream: int | None) -> _Config:
        values: dict[int, tuple[int, ...]] = {_COOPERATIVE: (1,)}
        if self.cluster > 1:
            values[_CLUSTER] = (self.cluster, 1, 1)
        attributes = (_Attribute * len(values))(
            *(_Attribute(key, 0, (ctypes.c_uint * 16)(*value)) for key, value in values.items())
        )
        return _Config(
            (ctypes.c_uint * 3)(*grid, 1),
            (ctypes.c_uint * 3)(self.threads, 1, 1),
            self.shared,
            stream,
            attributes,
            len(values),
        )

    def launch(self, grid: tuple[int, int], arguments: ctypes.Structure) -> None:
        """Run all blocks at the same time on torch's current stream, or raise."""
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        config = self._config(grid, torch.cuda.current_stream().cuda_stream)
        status = _driver().cuLaunchKernelEx(
            ctypes.byref(config), self._function, parameters, ctypes.c_void_p()
        )
        _check(status, "launching a recurrence")


def structure(name: str, fields: list[tuple[str, Any]]) -> type[ctypes.Structure]:
    """A C struct of the given members."""
    return type(name, (ctypes.Structure,), {"_fields_": fields})
