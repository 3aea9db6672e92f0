"""Times LayerNormLSTM and cuDNN's plain nn.LSTM on the GPU, forward and backward.

Our layer runs in one launch per pass if its kernels support the shape, and for comparison step by
step and with other tilings. cuDNN runs in both layouts, and also in fp16, where it has faster
kernels. Prints a table and writes benchmarks/results/gpu-ln.csv, with a row for each shape,
precision and layer.
"""

import argparse
import contextlib
import csv
import datetime
from pathlib import Path
from unittest import mock

import torch
from gpu_floor import TYPES
from gpu_rows import median_and_spread
from gpu_timing import capture, sample

import rbn
from rbn.experiments.results import commit
from rbn.ops.gpu.ln_lstm import ln_single
from rbn.ops.gpu.runtime.driver import shared_limit

SHAPES = {
    "H=512": (100, 64, 256, 512),
    "mnist": (784, 100, 1, 100),
    "ptb": (100, 64, 50, 1000),
    "text8": (180, 128, 27, 2000),
}
TILINGS = {  # blocks of a cluster, tiles of 8 rows
    "H=512": [(8, 1), (8, 2), (16, 1), (16, 2)],
    "mnist": [(1, 1), (1, 2), (2, 1), (4, 1)],
    "ptb": [(16, 1), (16, 2)],
    "text8": [],
}
LAYERS = ("cudnn", "ours", "steps", "tilings")
CUDNN, BATCH_FIRST = "torch.nn.LSTM (cuDNN)", "torch.nn.LSTM (cuDNN), batch first"
OURS, STEPS = "rbn.LayerNormLSTM", "rbn.LayerNormLSTM, step by step"
COLUMNS = [
    *("shape", "T", "B", "I", "H", "precision", "what", "called_ms", "called_spread"),
    *("graph_ms", "graph_spread", "graph_forward_ms", "gpu", "versions", "commit", "date"),
]


def tilings(name, dtype):
    """Other tilings by name, for comparison with the one that is chosen."""
    _, batch, _, hidden = SHAPES[name]
    chosen, limit = ln_single.choose(dtype, batch, hidden, 0), shared_limit(0)
    found = {}
    for cluster, tiles in TILINGS[name]:
        other = ln_single.tiling(dtype, hidden, cluster, limit, tiles)
        if other not in (None, chosen):
            found[f"{OURS}, {cluster} blocks, {8 * tiles} rows"] = other
    return found


def rows(name, precision, layers):
    """What to measure: name, precision, and a replacement for `tiling_for`'s result, if any."""
    if "cudnn" in layers:
        for each in (precision, "fp16") if precision == "bf16" else (precision,):
            yield from ((what, each, None) for what in (CUDNN, BATCH_FIRST))
    if "ours" in layers:
        yield OURS, precision, None
    if "steps" in layers:
        yield STEPS, precision, {"return_value": None}
    if "tilings" in layers:
        for what, tiling in tilings(name, TYPES[precision]).items():
            yield what, precision, {"return_value": tiling}


def measure(what, shape, precision, tiling, repeats):
    """The columns of a layer's row: milliseconds in eager mode and in a CUDA graph.

    Empty without repeats, which only compiles kernels.
    """
    T, B, I, H = shape  # noqa: E741
    torch.manual_seed(0)
    plain = what in (CUDNN, BATCH_FIRST)
    if plain:
        layer = torch.nn.LSTM(I, H, batch_first=what == BATCH_FIRST)
    else:
        layer = rbn.LayerNormLSTM(I, H)
    layer = layer.to("cuda", TYPES[precision])
    if plain:
        layer.flatten_parameters()
    first = (B, T) if what == BATCH_FIRST else (T, B)
    x = torch.randn(*first, I, device="cuda", dtype=TYPES[precision])
    grad = torch.randn(*first, H, device="cuda", dtype=TYPES[precision])

    def forward():
        return layer(x)[0]

    def both():
        layer.zero_grad(set_to_none=True)
        forward().backward(grad)

    row = {}
    with contextlib.ExitStack() as stack:
        if tiling is not None:
            stack.enter_context(mock.patch.object(ln_single, "tiling_for", **tiling))
        if not repeats:
            both()
            return row
        graphs = {"graph": capture(both).replay, "graph_forward": capture(forward).replay}
        for name, run in ({"called": both} | graphs).items():
            median, spread = median_and_spread(sample(run, repeats))
            row |= {f"{name}_ms": round(median, 4), f"{name}_spread": round(spread, 4)}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="0: only compile kernels")
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="*", choices=TYPES, default=["bf16", "tf32"])
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=LAYERS)
    default = Path(__file__).parent / "results" / "gpu-ln.csv"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    # tf32 means tf32 for all products, as in cuDNN.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    about = {
        "gpu": torch.cuda.get_device_name(),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
        writer.writeheader()
        for name in arguments.only:
            for precision in arguments.precisions:
                for what, own, tiling in rows(name, precision, arguments.layers):
                    row = dict(zip(("T", "B", "I", "H"), SHAPES[name], strict=True))
                    row |= {"shape": name, "precision": own, "what": what} | about
                    row |= measure(what, SHAPES[name], own, tiling, arguments.repeats)
                    writer.writerow(row)
                    file.flush()
                    times = [row.get(f"{k}_ms") for k in ("called", "graph", "graph_forward")]
                    print(f"{name:6} {own} {what:36}", *times, flush=True)


if __name__ == "__main__":
    main()
