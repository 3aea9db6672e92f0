"""Compiles the CUDA C++ kernels for GPUs that are not present, and lists each kernel's resources.

Needs NVRTC but no GPU. For each GPU: registers, shared memory and stack of every kernel at the
largest layer that fits, in bf16 and float32. These are the compiler's numbers; of these GPUs, only
the H200 has run the kernels. Prints a table and writes benchmarks/results/kernel-resources.csv.
The tests take from there what the compiler would give again.
"""

import csv
import ctypes
import hashlib
import importlib.util
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from rbn.experiments.results import commit
from rbn.ops.gpu.bn_rnn import rnn_single
from rbn.ops.gpu.ln_lstm import ln_single
from rbn.ops.gpu.lstm.cluster import cluster_kernels
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.runtime import nvrtc

RESULTS = Path(__file__).parent / "results" / "kernel-resources.csv"
REGISTERS = 65536  # per multiprocessor, on all of these GPUs
BATCH = 64
TYPES = {torch.float32: 0, torch.bfloat16: 1}
# The macros of a training call.
TRAINING = {"MODE_X": 1, "MODE_H": 1, "MODE_C": 1, "LENGTHS": 0, "BIAS": 1, "BETA": 1, "SAVE": 1}
_REGISTER_COUNT, _FRAME_SIZE = 0x2F, 0x11  # attributes in the section .nv.info of a cubin


@dataclass(frozen=True)
class GPU:
    name: str
    capability: tuple[int, int]
    processors: int
    shared: int  # maximum bytes per block


GPUS = [
    GPU("A100", (8, 0), 108, 163 * 1024),
    GPU("RTX 3090", (8, 6), 82, 99 * 1024),
    GPU("RTX 4090", (8, 9), 128, 99 * 1024),
    GPU("H200", (9, 0), 132, 227 * 1024),
    GPU("B200", (10, 0), 148, 227 * 1024),
    GPU("RTX 5090", (12, 0), 170, 99 * 1024),
]


@dataclass(frozen=True)
class Compiled:
    """A kernel and its launch configuration."""

    name: str
    arch: str
    dtype: torch.dtype
    batch: int
    hidden: int
    defines: dict[str, int]
    threads: int
    shared: int


def find_nvrtc():
    """NVRTC from its Python package or from torch; None if it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))  # which NVRTC looks up by name
            return ctypes.CDLL(str(path))
    return nvrtc.library()


def kernels(gpu, dtypes=tuple(TYPES)):
    """The kernels of each family that run on a GPU, each at the largest layer that fits."""
    found = []
    for dtype in dtypes:
        found += _portable(gpu, dtype)
        found += _rnn(gpu, dtype)
        if gpu.capability >= (9, 0):
            found += _cluster(gpu, dtype, cluster_kernels.cluster_tiling(dtype, BATCH, 128), 128)
            found += _layer_norm(gpu, dtype)
        if gpu.capability == (9, 0):
            large = cluster_kernels.cluster_tiling_16(dtype, BATCH, 256)
            found += _cluster(gpu, dtype, large, 256)
            found += _grid(gpu, dtype)
    return found


def _defines(dtype, hidden, direction, **others):
    named = {"TYPE": TYPES[dtype], "H": hidden, "DOUTPUT": int(direction == "backward")}
    return TRAINING | named | others


def _portable(gpu, dtype):
    arch = nvrtc.architecture(gpu.capability)
    for hidden in range(gpu.processors * portable_kernels.UNITS, 0, -portable_kernels.UNITS):
        cuts = {
            d: portable_kernels.choose(d, dtype, BATCH, hidden, gpu.shared)
            for d in ("forward", "backward")
        }
        if all(cuts.values()):
            break
    for direction, cut in cuts.items():
        shared = portable_kernels.shared_bytes(direction, cut, dtype, hidden)
        call = tuple(_defines(dtype, hidden, direction).items())
        defines = portable_kernels.macros(cut, shared, call)
        name = f"portable_{direction}"
        yield Compiled(name, arch, dtype, BATCH, hidden, defines, cut.threads, shared)


def _rnn(gpu, dtype):
    """The kernels of BatchNormRNN."""
    arch = nvrtc.architecture(gpu.capability)
    for hidden in range(16 * gpu.processors, 0, -16):
        cut = rnn_single.choose(dtype, BATCH, hidden, gpu.processors, gpu.shared)
        if cut is not None:
            break
    for direction in ("forward", "backward"):
        shared, threads = cut.shared(direction, dtype, hidden), cut.threads
        call = tuple(_defines(dtype, hidden, direction, RELU=0).items())
        defines = rnn_single.macros(cut, shared, call)
        yield Compiled(f"rnn_{direction}", arch, dtype, BATCH, hidden, defines, threads, shared)


def _layer_norm(gpu, dtype):
    """The kernels of LayerNormLSTM, with the tilings of 100, 256 and 512 units on an H200."""
    arch = nvrtc.architecture(gpu.capability)
    for hidden, cluster, tiles in ((100, 4, 1), (256, 4, 2), (512, 8, 1)):
        tiling = ln_single.tiling(dtype, hidden, cluster, gpu.shared, tiles)
        for direction in () if tiling.streamed(dtype) else ("forward", "backward"):
            option = ln_single.defines(direction, dtype, hidden, lengths=False, option=True)
            defines = ln_single.macros(direction, tiling, dtype, option)
            shared, threads = tiling.shared(direction, dtype), tiling.threads
            yield Compiled(f"ln_{direction}", arch, dtype, BATCH, hidden, defines, threads, shared)


def _cluster(gpu, dtype, cut, hidden):
    arch = nvrtc.architecture(gpu.capability)
    more = {"MW": cut.row_warps, "RT": cut.tiles}
    if cut.units > cluster_kernels.UNITS:
        arch, more = arch + "a", more | {"UNITS": cut.units}
    for direction in ("forward", "backward"):
        shared = cut.shared(direction)
        defines = _defines(dtype, hidden, direction, SHARED_BYTES=shared, **more)
        if shared <= gpu.shared:
            name = f"cluster_{direction}"
            yield Compiled(name, arch, dtype, BATCH, hidden, defines, cut.threads, shared)


def _grid(gpu, dtype):
    half = dtype != torch.float32
    for hidden in range(gpu.processors * grid_kernels.UNITS, 0, -grid_kernels.UNITS):
        cuts = {
            d: next(
                (
                    cut
                    for team in grid_kernels.TEAMS[d]
                    if (cut := grid_kernels.grid_tiling(d, hidden, team, gpu.shared, 64, half))
                    and cut.blocks <= gpu.processors
                ),
                None,
            )
            for d in ("forward", "backward")
        }
        if all(cuts.values()):
            break
    for direction, cut in cuts.items():
        macros = grid_kernels.macros(cut)
        defines = _defines(dtype, hidden, direction, **macros)
        name = f"grid_{direction}"
        yield Compiled(name, "sm_90a", dtype, BATCH, hidden, defines, 256, cut.shared)


def resources(kernel):
    """Registers per thread and bytes of its stack, which holds spilled registers."""
    code = nvrtc.compile_source(nvrtc.source(kernel.name), kernel.name, kernel.defines, kernel.arch)
    found = {_REGISTER_COUNT: 0, _FRAME_SIZE: 0}
    for name, content in _sections(code):
        if name == ".nv.info":
            for attribute, payload in _attributes(content):
                if attribute in found:
                    found[attribute] = max(found[attribute], struct.unpack("<II", payload)[1])
    return found[_REGISTER_COUNT], found[_FRAME_SIZE]


def inputs(kernel):
    """A digest of everything that the machine code depends on."""
    text = nvrtc.source(kernel.name)
    key = (text, sorted(kernel.defines.items()), kernel.arch, nvrtc.version(), nvrtc._OPTIONS)
    return hashlib.sha256(repr(key).encode()).hexdigest()[:20]


def recorded():
    """Registers and stack from the table, by the digest of what they depend on."""
    with RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["inputs"]: (int(row["registers"]), int(row["stack_bytes"])) for row in rows}


def _sections(elf):
    """Names and contents of the sections of a 64-bit ELF file."""
    (at,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, at + k * size) for k in range(count)]
    first = headers[names][4]
    for name, _, _, _, offset, length in headers:
        end = elf.index(b"\0", first + name)
        yield elf[first + name : end].decode(), elf[offset : offset + length]


def _attributes(content):
    """Numbers and payloads of the attributes that have a payload."""
    at = 0
    while at < len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == 4:  # a payload of `size` bytes
            yield attribute, content[at : at + size]
            at += size


def main():
    library = find_nvrtc()
    if library is None:
        raise SystemExit("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    nvrtc.library = lambda: library
    jobs = [(gpu, kernel) for gpu in GPUS for kernel in kernels(gpu)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda job: resources(job[1]), jobs))
    origin = ["compiled only, not run", ".".join(map(str, nvrtc.version())), commit()]
    origin.append(time.strftime("%Y-%m-%d"))
    columns = ["gpu", "arch", "kernel", "dtype", "batch", "hidden", "threads", "registers"]
    columns += ["stack_bytes", "shared_bytes", "shared_limit", "inputs", "how", "nvrtc"]
    columns += ["commit", "date"]
    with RESULTS.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for (gpu, kernel), (registers, stack) in zip(jobs, results, strict=True):
            dtype = str(kernel.dtype).removeprefix("torch.")
            row = [gpu.name, kernel.arch, kernel.name, dtype, kernel.batch, kernel.hidden]
            row += [kernel.threads, registers, stack, kernel.shared, gpu.shared, inputs(kernel)]
            writer.writerow([*row, *origin])
            print(*row)


if __name__ == "__main__":
    main()
