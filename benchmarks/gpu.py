"""Times the layers and cuDNN's fastest configuration for the same call, in one run.

For each shape: the forward pass, forward and backward together, and inference, in eager PyTorch and
as CUDA graphs; the peak memory of a training step; and the lower bound of gpu_floor.py as a
fraction of the time. The 16-bit baseline is the fastest of cuDNN's LSTM in float16 and bfloat16, as
a half-precision module and under autocast, with time or batch first; in tf32 the faster of both
layouts. Variable lengths are compared with its PackedSequence. Rows are written to
benchmarks/results/gpu.csv as soon as they are measured, the most important first, and name cuDNN's
fastest configuration. Draws benchmarks/results/gpu.png at the end.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from gpu_floor import floors, measured_rates
from gpu_plot import draw
from gpu_rows import (
    ALL_SHAPES,
    CLASSES,
    COMPILED,
    CUDNN,
    CUDNNS,
    LAYERS,
    OPTIONS,
    OPTIONS_SHAPE,
    OTHERS,
    PEERS,
    SCRIPTED,
    SHAPES,
    SWEEPS,
    Rows,
    beside_cudnn,
    figures_of,
    sizes_of,
)
from gpu_timing import Ready, measure, sample

import rbn
from rbn.experiments.results import commit

RESULTS = Path(__file__).parent / "results" / "gpu.csv"
PARTS = {  # shapes, and what is compared with cuDNN
    "paper": (SHAPES, LAYERS),
    "others": (OTHERS, LAYERS),
    "options": ((OPTIONS_SHAPE,), OPTIONS),
    "sweeps": (SWEEPS, LAYERS),
    "peers": (SHAPES, PEERS),
}


def plan(classes=tuple(CLASSES), parts=tuple(PARTS), only=()):
    """The measurements, most important first: shape (from ``only``), class and layers."""
    return [
        (shape, kind, layers[kind])
        for part, (shapes, layers) in PARTS.items()
        for kind in CLASSES
        for shape in shapes
        if part in parts and kind in classes and (not only or shape in only)
    ]


def run(todo, rows, rates, facts, measure, time_left):
    """Measure as much as time allows. Returns the layers that failed, and those not reached."""
    failed, missed, cudnn = [], [], {}
    for shape, kind, layers in todo:
        same = cudnn.get((shape, kind))
        if same is None:
            same = cudnn[shape, kind] = []
            layers = CUDNNS[kind] + layers
        for precision, what in layers:
            if time_left() <= 0:
                missed.append((shape, precision, what))
                continue
            floor = floors(ALL_SHAPES[shape], precision, rates)
            try:
                for label, found in measure(what, ALL_SHAPES[shape], precision):
                    row = {"shape": shape, **sizes_of(shape), "precision": precision}
                    row |= {"what": label, **figures_of(found, floor), **facts}
                    if label.startswith(CUDNN):
                        same.append(row)
                    row |= beside_cudnn(row, same)
                    rows.put(row)
                    show(row)
            except Exception as error:  # the others are still measured
                failed.append(f"{shape}, {precision}, {what}: {type(error).__name__}: {error}")
                print(f"failed: {failed[-1]}", flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        for row in same:  # now all of cuDNN's are known
            rows.put(row | beside_cudnn(row, same))
        gc.collect()
    return failed, missed


def show(row):
    numbers = [row.get(f"{name}_ms", 0) for name in ("fwd", "fwdbwd", "infer")]
    print(
        f"{row['shape']:>20} {row['precision']:5} {row['what']:<52}"
        + "".join(f"{n:10.3f}" for n in numbers)
        + f"{row.get('peak_mb', 0):10.1f}{row.get('times_as_fast', 0):8.2f}"
        f"{row.get('memory_ratio', 0):8.2f}{row.get('fwdbwd_floor', 0):8.2f}",
        flush=True,
    )


def prepare(todo, workers, seconds):
    """Compile the kernels to be timed into the caches on disk, in separate processes."""
    jobs = [
        (shape, precision, what)
        for shape, _, layers in todo
        for precision, what in layers
        if what != SCRIPTED and not what.startswith(CUDNN)
    ]
    workers = min(workers, len(jobs))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--prepare", json.dumps(jobs[k::workers])], env=environment
        )
        for k in range(workers)
    ]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # missing kernels are compiled when needed
            process.kill()
            process.wait()


def prepare_here(jobs):
    for shape, precision, what in jobs:
        T, *rest = ALL_SHAPES[shape]
        try:
            ready = Ready(what, (min(T, 2) if what == COMPILED else T, *rest), precision)
            for _, function in ready.each():
                function()
            torch.cuda.synchronize()
        except Exception as error:  # reported when it is measured
            print(f"{shape}, {precision}, {what}: {type(error).__name__}", file=sys.stderr)
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30, help="approximate time limit")
    parser.add_argument("--repeats", type=int, default=15, help="maximum samples per result")
    parser.add_argument("--classes", default=",".join(CLASSES), help="of " + ", ".join(CLASSES))
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--shapes", nargs="+", default=[], help="only these: B=256 B=512")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--fresh", action="store_true", help="discard the rows of earlier runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    classes, parts = arguments.classes.split(","), arguments.parts.split(",")
    for name, given, known in (
        ("classes", classes, CLASSES),
        ("parts", parts, PARTS),
        ("shapes", arguments.shapes, ALL_SHAPES),
    ):
        unknown = [value for value in given if value not in known]
        if unknown:
            parser.error(f"--{name} must be of {', '.join(known)}, got {', '.join(unknown)}")
    if arguments.repeats < 3:
        parser.error("--repeats must be at least 3")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    end = time.monotonic() + 60 * arguments.minutes
    # tf32 means tf32 for all products, as in cuDNN. Batches of one row are intentional here.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("ignore")
    if arguments.prepare:
        prepare_here(json.loads(arguments.prepare))
        return

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{facts['gpu']}; {facts['versions']}; {facts['commit']}")
    todo = plan(classes, parts, arguments.shapes)
    began = time.monotonic()
    prepare(todo, arguments.workers, 0.3 * (end - began))
    print(f"compiled in {time.monotonic() - began:.0f} s with {arguments.workers} processes")
    rates = measured_rates(lambda function: statistics.median(sample(function, 15)))
    print(f"ceilings: {rates}\n")
    heads = ("fwd", "fwd+bwd", "infer", "MiB")
    more = ("times", "memory", "floor")
    print(
        f"{'':>20} {'':5} {'ms':<52}"
        + "".join(f"{h:>10}" for h in heads)
        + "".join(f"{h:>8}" for h in more)
    )
    rows = Rows(arguments.out, arguments.fresh)
    failed, missed = run(
        todo,
        rows,
        rates,
        facts,
        lambda *case: measure(*case, arguments.repeats),
        lambda: end - time.monotonic(),
    )
    draw(rows.sorted(), arguments.out.with_suffix(".png"))
    print(f"\nwritten to {arguments.out}; {len(failed)} failed, {len(missed)} not reached")
    for name in failed:
        print(name)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
