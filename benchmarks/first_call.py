"""Times the first training step of a layer with empty caches, and then that of another shape.

Each measurement is a new process. It times a training step (forward, backward and the running
averages), then a call in evaluation mode; then the same for other shapes: "longer" has more steps,
"wider" more units.

Without a GPU the kernels are compiled for an H200 but not launched, and matrix products do nothing.
The time is then that of the host: Python, NVRTC and Triton, without CUDA's own start. Each compiled
kernel is listed with its seconds.

seconds is what a user waits; cpu_seconds the time of the processor, and busiest_thread that of the
busiest thread, which other work on the machine changes little. Appends to
benchmarks/results/first-call.csv (the calls) and, without a GPU, first-call-kernels.csv.
"""

import argparse
import contextlib
import csv
import functools
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
import triton
from gpu_rows import OTHERS, SHAPES
from kernel_resources import find_nvrtc
from machine import cpu

import rbn
from rbn.experiments.results import commit

RESULTS = Path(__file__).parent / "results"
TYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = [
    *("mnist", "ptb", "text8", "cnn", "100, 64, 256, 512", "1024, 16, 512, 512"),
    *("50, 32, 128, 128", "30, 1024, 64, 64", "100, 64, 64, 32"),
]
ALL = {name: (SHAPES | OTHERS)[name] for name in NAMES}
LAYERS = ("BatchNormLSTM", "LSTM", "LayerNormLSTM", "BatchNormRNN")
H200 = types.SimpleNamespace(multi_processor_count=132)
STEPS = (
    *("layer", "shape", "precision", "call", "seconds", "cpu_seconds", "busiest_thread"),
    *("nvrtc", "triton", "device", "cpu", "versions", "commit", "date"),
)
KERNELS = (
    *("layer", "shape", "precision", "call", "compiler", "kernel", "specialization", "seconds"),
    *("cpu_seconds", "cpu", "versions", "commit", "date"),
)


# Without a GPU ---------------------------------------------------------------------------------


class _Kernel:
    """Stands in for a loaded kernel."""

    at_once, together = 132, True

    def __init__(self, code, name, threads, shared, cluster=0, **options):
        self.cluster = cluster

    def launch(self, *arguments):
        pass


def _linear(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _mm(a, b, out=None):
    return a.new_empty(*a.shape[:-1], b.shape[-1]) if out is None else out


def _average_in(traced, kernel, terms, momentum, seen):
    return kernel(terms, momentum)


def _timed(function, processor_time):
    """The function's result, the seconds it took, and those of the processor."""
    began, used = time.perf_counter(), processor_time()
    result = function()
    seconds = time.perf_counter() - began, processor_time() - used
    return result, [round(number, 3) for number in seconds]


def compile_only(compiled):
    """Make this process compile for an H200 and launch nothing; record what it compiles."""
    from rbn.ops.gpu.runtime import direct_launch, triton_compiler

    modules = {
        name: importlib.import_module(f"rbn.ops.gpu.{name}")
        for name in (
            *("runtime.nvrtc", "runtime.driver", "lstm.term", "running_average"),
            *("lstm.cluster.cluster_kernels", "lstm.grid.grid_kernels"),
            *("lstm.portable.portable_kernels", "bn_rnn.rnn_single", "ln_lstm.ln_single"),
        )
    }
    nvrtc, averages = modules["runtime.nvrtc"], importlib.import_module("rbn.nn.statistics")
    compile_source, compile_kernel = nvrtc.compile_source, triton_compiler._compiled
    library, known = find_nvrtc(), set()

    def recorded_source(text, name, defines, arch):
        specialization = " ".join(f"{key}={value}" for key, value in sorted(defines.items()))
        code, seconds = _timed(lambda: compile_source(text, name, defines, arch), time.thread_time)
        compiled.append(["nvrtc", name, f"{arch} {specialization}", *seconds])
        return code

    def recorded_kernel(*arguments):
        result, seconds = _timed(lambda: compile_kernel(*arguments), _main_time)
        if result.hash not in known:
            known.add(result.hash)
            names = result.src.fn.arg_names
            constants = {names[k[0]]: v for k, v in result.src.constants.items()}
            by16 = [names[k[0]] for k, v in result.src.attrs.items() if v]
            numbers = [n for n in by16 if not result.src.signature[n].startswith("*")]
            text = " ".join(f"{k}={v}" for k, v in constants.items())
            text += f" | multiples of 16: {' '.join(numbers)}" if numbers else ""
            compiled.append(["triton", result.src.fn.__name__, text, *seconds])
        return result

    def launcher(*arguments):
        return lambda *addresses: None

    os.environ["TRITON_INTERPRET"] = "1"  # else tensors on the CPU are rejected
    average_in = functools.partial(
        _average_in, averages.average_in, modules["running_average"].average_in
    )
    patches = [
        (triton_compiler, "_compiled", recorded_kernel),
        (direct_launch, "kinds_of", lambda *arguments: []),
        (direct_launch, "launcher", launcher),
        (direct_launch, "launcher_at", launcher),
        (nvrtc, "compile_source", recorded_source),
        (nvrtc, "library", lambda: library),
        (modules["lstm.term"].Term, "is_cuda", True),
        (averages, "average_in", average_in),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_device_properties", lambda device: H200),
        (F, "linear", _linear),
        (torch, "matmul", _mm),
        (torch, "mm", _mm),
        (torch, "bmm", _mm),
        (torch, "addmm", lambda c, a, b: _mm(a, b)),
        (torch, "baddbmm", lambda c, a, b: _mm(a, b)),
    ]
    for module in modules.values():
        if hasattr(module, "Kernel"):
            patches.append((module, "Kernel", _Kernel))
        if hasattr(module, "shared_limit"):
            patches.append((module, "shared_limit", lambda device: 227 * 1024))
    for patch in patches:
        mock.patch.object(*patch).start()
    return rbn.backend("gpu")


# One process -----------------------------------------------------------------------------------


def train(layer, x, grad):
    layer.train()
    layer(x)[0].backward(grad)


def evaluate(layer, x, grad):
    with torch.no_grad():
        layer.eval()(x)


def others(shape):
    """Other shapes that run in the same kernel family."""
    T, B, I, H, _ = shape  # noqa: E741
    return {"longer": (T + 7, B, I, H), "wider": (T, B, I, H + 4)}


def one(layer, shape, precision):
    """Print the seconds of a step of each shape as JSON."""
    on_gpu, compiled = torch.cuda.is_available(), []
    device, dtype, sizes = "cuda" if on_gpu else "cpu", TYPES[precision], ALL[shape]
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    shapes = {"first": sizes[:4]} | others(sizes)
    found = {}
    with contextlib.nullcontext() if on_gpu else compile_only(compiled):
        if on_gpu:
            torch.zeros(1, device=device)
        for name, (T, B, I, H) in shapes.items():  # noqa: E741
            options = {"max_length": T} if layer.startswith("Batch") else {}
            made = getattr(rbn, layer)(I, H, **options).to(device, dtype)
            x = torch.zeros(T, B, I, device=device, dtype=dtype)
            grad = torch.zeros(T, B, H, device=device, dtype=dtype)
            for call in (train, evaluate):
                compiled.clear()
                began, all_threads, main = time.perf_counter(), time.process_time(), _main_time()
                children = _children_time()
                call(made, x, grad)
                if on_gpu:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                used = time.process_time() - all_threads + _children_time() - children
                longest = max([_main_time() - main, *(one[-1] for one in compiled)])
                found[f"{name} {call.__name__}"] = {
                    "times": [round(number, 2) for number in (seconds, used, longest)],
                    "compiled": list(compiled),
                }
    print(json.dumps(found))


def _main_time():
    """Processor time of this thread, and of the processes that it waited for, such as ptxas."""
    return time.thread_time() + _children_time()


def _children_time():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# All of them -----------------------------------------------------------------------------------


def measure(layer, shape, precision):
    """Each step's name and result, from a new process with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"RBN_CACHE": f"{folder}/rbn", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--one", layer, shape, precision]
        run = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE)
    if run.returncode:  # the others are still measured
        print("failed:", layer, shape, precision, flush=True)
        return ()
    return json.loads(run.stdout.splitlines()[-1]).items()


def _append(path, columns, rows):
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file).writerows(([columns] if new else []) + rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--layers", default="BatchNormLSTM", help=f"of {', '.join(LAYERS)}")
    parser.add_argument("--shapes", default=";".join(ALL), help="separated by semicolons")
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder of the results")
    arguments = parser.parse_args()
    if arguments.one:
        one(*arguments.one)
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    nvrtc = importlib.import_module("rbn.ops.gpu.runtime.nvrtc")
    library = find_nvrtc()
    with mock.patch.object(nvrtc, "library", return_value=library):
        version = ".".join(map(str, nvrtc.version()))
    versions = f"torch {torch.__version__}, triton {triton.__version__}, NVRTC {version}, "
    versions += f"Python {platform.python_version()}"
    origin = [cpu(), versions, commit(), time.strftime("%Y-%m-%d")]
    for layer in arguments.layers.split(","):
        for shape in arguments.shapes.split(";"):
            for precision in arguments.precisions.split(","):
                for call, result in measure(layer, shape, precision):
                    case = [layer, shape, precision, call]
                    compiled = result["compiled"]
                    counts = [sum(c[0] == kind for c in compiled) for kind in ("nvrtc", "triton")]
                    times = result["times"]
                    print(*case, *times, *counts, flush=True)
                    _append(
                        arguments.out / "first-call.csv",
                        STEPS,
                        [[*case, *times, *counts, device, *origin]],
                    )
                    if compiled:
                        rows = [[*case, *one, *origin] for one in compiled]
                        _append(arguments.out / "first-call-kernels.csv", KERNELS, rows)


if __name__ == "__main__":
    main()
