"""Times BatchNormRNN and cuDNN's plain nn.RNN on the GPU, forward and backward.

Our layer runs in one launch per pass, and for comparison step by step. Prints a table and writes
benchmarks/results/gpu-rnn.csv, with a row for each shape, precision and layer.
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
from rbn.ops.gpu.bn_rnn import rnn_single

SHAPES = {
    "H=512": (100, 64, 256, 512),
    "mnist": (784, 100, 1, 100),
    "ptb": (100, 64, 50, 1000),
    "text8": (180, 128, 27, 2000),
}
CUDNN, OURS, STEPS = "torch.nn.RNN (cuDNN)", "rbn.BatchNormRNN", "rbn.BatchNormRNN, step by step"
COLUMNS = [
    *("shape", "T", "B", "I", "H", "precision", "what", "called_ms", "called_spread"),
    *("graph_ms", "graph_spread", "gpu", "versions", "commit", "date"),
]


def measure(what, shape, precision, repeats):
    """The columns of a layer's row: milliseconds in eager mode and in a CUDA graph."""
    T, B, I, H = shape  # noqa: E741
    torch.manual_seed(0)
    layer = torch.nn.RNN(I, H) if what == CUDNN else rbn.BatchNormRNN(I, H, max_length=T)
    layer = layer.to("cuda", TYPES[precision])
    if what == CUDNN:
        layer.flatten_parameters()
    x = torch.randn(T, B, I, device="cuda", dtype=TYPES[precision])
    grad = torch.randn(T, B, H, device="cuda", dtype=TYPES[precision])

    def both():
        layer.zero_grad(set_to_none=True)
        layer(x)[0].backward(grad)

    row = {}
    with contextlib.ExitStack() as stack:
        if what == STEPS:
            steps = mock.patch.object(rnn_single, "tiling_for", return_value=None)
            stack.enter_context(steps)
        runs = {"called": both} if what == STEPS else {"called": both, "graph": None}
        for name, run in runs.items():
            samples = sample(run or capture(both).replay, repeats)
            median, spread = median_and_spread(samples)
            row |= {f"{name}_ms": round(median, 4), f"{name}_spread": round(spread, 4)}
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precisions", nargs="*", choices=TYPES, default=["bf16", "fp16", "tf32"])
    default = Path(__file__).parent / "results" / "gpu-rnn.csv"
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
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for name in arguments.only:
            for precision in arguments.precisions:
                for what in (CUDNN, OURS, STEPS):
                    row = dict(zip(("T", "B", "I", "H"), SHAPES[name], strict=True))
                    row |= {"shape": name, "precision": precision, "what": what} | about
                    row |= measure(what, SHAPES[name], precision, arguments.repeats)
                    writer.writerow(row)
                    file.flush()
                    times = row["called_ms"], row.get("graph_ms", "")
                    print(f"{name:6} {precision} {what:32} called {times[0]} graph {times[1]}")


if __name__ == "__main__":
    main()
