"""CUDA driver calls that torch does not expose: loading code, cooperative and cluster launches.

Through ctypes, not cuda-bindings: torch depends on that only from 2.10 on, and `rbn` supports 2.6
and needs only torch. The same goes for `nvrtc`. A launch would take about as long.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_LIMIT = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_NON_PORTABLE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE = 8  # blocks per cluster that every GPU with clusters supports
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
# CUDA_ERROR_INVALID_CONTEXT: on the default stream, in a thread that has not used CUDA yet.
_NO_CONTEXT = 201


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


_HERE = contextlib.nullcontext()


def device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """`torch.cuda.device_of`, cheaper if the device is already the current one."""
    return _HERE if on_current_device(tensor) else torch.cuda.device_of(tensor)


def on_current_device(tensor: Tensor) -> bool:
    """Whether a tensor is on the current CUDA device, or not on a CUDA device at all."""
    return not tensor.is_cuda or tensor.get_device() == torch._C._cuda_getDevice()


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
    """Bytes of shared memory that a block may use."""
    cuda, handle, result = _driver(), ctypes.c_int(), ctypes.c_int()
    torch.cuda.init()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
    status = cuda.cuDeviceGetAttribute(ctypes.byref(result), _SHARED_LIMIT, handle)
    _check(status, "asking for the limit of shared memory")
    return result.value


def enter() -> None:
    """Enter the context of torch's current device; a thread that has not used CUDA has none."""
    cuda, context, handle = _driver(), ctypes.c_void_p(), ctypes.c_int()
    _check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "asking for the context")
    if context.value is not None:
        return
    device = torch.cuda.current_device()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), device), f"finding device {device}")
    status = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    _check(status, f"asking for the context of device {device}")
    _check(cuda.cuCtxSetCurrent(context), f"entering the context of device {device}")


def load(code: bytes, name: str, shared: int) -> ctypes.c_void_p:
    """Load machine code on the current device, for good. Returns the kernel's handle."""
    cuda, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    enter()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), code), f"loading {name}")
    status = cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode())
    _check(status, f"finding {name}")
    status = cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared)
    _check(status, f"{shared} bytes of shared memory for {name}")
    return function


def parameter_sizes(function: int) -> list[int] | None:
    """Bytes of each parameter of a loaded kernel; None if the driver is too old to tell."""
    ask = getattr(_driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return None
    handle, offset, size = ctypes.c_void_p(function), ctypes.c_size_t(), ctypes.c_size_t()
    results: list[int] = []
    where = ctypes.byref(offset), ctypes.byref(size)
    while ask(handle, ctypes.c_size_t(len(results)), *where) == 0:  # until there are no more
        results.append(size.value)
    return results


def starter(
    function: int,
    grid: tuple[int, ...],
    threads: int,
    shared: int,
    stream: int,
    parameters: ctypes.Array[Any],
) -> Callable[[], None]:
    """Returns a function that launches a loaded kernel with the values that `parameters` point to.

    The values are read anew at each launch.
    """
    where = ctypes.c_void_p(stream), parameters, ctypes.c_void_p()
    start = functools.partial(
        _driver().cuLaunchKernel, ctypes.c_void_p(function), *grid, threads, 1, 1, shared, *where
    )

    def run() -> None:
        status = start()
        if status:
            _check(status, "launching a step")

    return run


def starter_on_stream(
    function: int, grid: tuple[int, ...], threads: int, shared: int
) -> Callable[[ctypes.Array[Any]], None]:
    """Like `starter`, on torch's current stream and with parameters passed at each launch."""
    start = functools.partial(
        _driver().cuLaunchKernel, ctypes.c_void_p(function), *grid, threads, 1, 1, shared
    )

    def run(parameters: ctypes.Array[Any]) -> None:
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        status = start(ctypes.c_void_p(stream), parameters, _NOTHING)
        if status == _NO_CONTEXT:
            enter()
            status = start(ctypes.c_void_p(stream), parameters, _NOTHING)
        if status:
            _check(status, "launching a kernel")

    return run


class Kernel:
    """A kernel from compiled machine code, loaded on the current device.

    cluster: blocks per thread-block cluster, or 0 for none.
    down: whether the blocks of a cluster are neighbours in the grid's second dimension instead of
        its first.
    together: whether all blocks of a launch synchronize with each other, not only within clusters.
    """

    def __init__(
        self,
        code: bytes,
        name: str,
        threads: int,
        shared: int,
        cluster: int = 0,
        together: bool = False,
        down: bool = False,
    ) -> None:
        self.threads, self.shared, self.cluster = threads, shared, cluster
        self.together = together or not cluster
        self._neighbours = (1, cluster) if down else (cluster, 1)
        self._attributes = (_Attribute * 2)()
        self._attributes[0] = _Attribute(_CLUSTER, 0, (ctypes.c_uint * 16)(*self._neighbours, 1))
        self._attributes[1] = _Attribute(_COOPERATIVE, 0, (ctypes.c_uint * 16)(1))
        self._configs: dict[tuple[int, int], bytes] = {}  # launch configs with clusters, by grid
        self._function = load(code, name, shared)
        non_portable = self._function, _NON_PORTABLE, 1
        if cluster > _PORTABLE and _driver().cuFuncSetAttribute(*non_portable):
            self.at_once = 0  # this GPU refuses the cluster size
        else:
            self.at_once = self._in_clusters() if cluster else self._blocks(name)

    def _blocks(self, name: str) -> int:
        """How many blocks fit on the GPU at once."""
        blocks = ctypes.c_int()
        _check(
            _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(blocks), self._function, self.threads, ctypes.c_size_t(self.shared)
            ),
            f"asking how many blocks of {name} fit",
        )
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return blocks.value * int(properties.multi_processor_count)

    def _in_clusters(self) -> int:
        """How many blocks fit on the GPU in full clusters; 0 if it refuses the cluster size."""
        count = ctypes.c_int()
        config = self._config(self._neighbours, None)
        config.count = 1  # leaves out the cooperative attribute
        status = _driver().cuOccupancyMaxActiveClusters(
            ctypes.byref(count), self._function, ctypes.byref(config)
        )
        return 0 if status else count.value * self.cluster

    def _config(self, grid: tuple[int, int], stream: int | None) -> _Config:
        return _Config(
            (ctypes.c_uint * 3)(*grid, 1),
            (ctypes.c_uint * 3)(self.threads, 1, 1),
            self.shared,
            stream,
            self._attributes,
            2 if self.together else 1,
        )

    def launch(self, grid: tuple[int, int], arguments: bytes | ctypes.Structure) -> None:
        """Launch on torch's current stream. Raises if blocks that synchronize cannot run at once.

        arguments: the kernel's argument struct; the driver copies it.
        """
        parameters = _Parameters(bytes(arguments))
        for _ in range(2):
            stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
            if self.cluster:
                config = self._configs.get(grid)
                if config is None:
                    config = self._configs[grid] = bytes(self._config(grid, None))
                own = _Config.from_buffer_copy(config)  # other threads may launch at the same time
                own.stream = stream
                status = _driver().cuLaunchKernelEx(
                    ctypes.byref(own), self._function, parameters, _NOTHING
                )
            else:
                sizes = (*grid, 1, self.threads, 1, 1, self.shared)
                status = _driver().cuLaunchCooperativeKernel(
                    self._function, *sizes, ctypes.c_void_p(stream), parameters
                )
            if status != _NO_CONTEXT:
                break
            enter()
        if status:
            _check(status, "launching a recurrence")


_Parameters = ctypes.c_char_p * 1
_NOTHING = ctypes.c_void_p()


def structure(
    name: str, pointers: tuple[str, ...], integers: tuple[str, ...], floats: tuple[str, ...] = ()
) -> Any:
    """Define a C struct with the given members, in this order; `pointers` is also an attribute.

    Its method `packed` builds the struct's bytes from addresses by name (null if absent) and the
    numbers in order. It is several times as fast as creating an instance.
    """
    kinds = {ctypes.c_void_p: pointers, ctypes.c_int: integers, ctypes.c_float: floats}
    fields = [(member, kind) for kind, members in kinds.items() for member in members]
    pack = struct.Struct(f"{len(pointers)}P{len(integers)}i{len(floats)}f0P").pack
    absent, in_order = dict.fromkeys(pointers, 0), operator.itemgetter(*pointers)

    def packed(at: dict[str, int], *numbers: float) -> bytes:
        return pack(*in_order(absent | at), *numbers)

    members = {"_fields_": fields, "pointers": pointers, "packed": staticmethod(packed)}
    return type(name, (ctypes.Structure,), members)
