"""Times a training call of BatchNormLSTM on the GPU: eager and with `torch.compile`.

Also times nn.LSTM in bf16 and fp16. The modes alternate over full measurements; each is the median
of rounds of 30 calls. Prints a table and writes benchmarks/results/compiled.csv, row by row.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch

import rbn
from rbn.experiments.results import commit

SHAPES = [(100, 64, 50, 1000), (50, 32, 128, 128)]
MODES = {
    "eager": lambda layer: layer,
    "compiled": torch.compile,
    "fullgraph": lambda layer: torch.compile(layer, fullgraph=True),
    "reduce-overhead": lambda layer: torch.compile(layer, fullgraph=True, mode="reduce-overhead"),
}
RESULTS = Path(__file__).parent / "results" / "compiled.csv"
COLUMNS = ["layer", "dtype", "T", "B", "I", "H", "mode", "ms", "gpu", "versions", "commit", "date"]


def milliseconds(layer, call, x):
    def step():
        layer.zero_grad()
        output, _ = call(x)
        output.backward(output.detach())

    for _ in range(6):
        step()
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(30):
            step()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - began) / 30 * 1e3)
    return statistics.median(rounds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    origin = [torch.cuda.get_device_name(), versions, commit(), time.strftime("%Y-%m-%d")]
    rows = []
    for T, B, inputs, H in SHAPES:
        for make, dtype, modes in (
            (rbn.BatchNormLSTM, torch.bfloat16, list(MODES)),
            (torch.nn.LSTM, torch.bfloat16, ["eager", "compiled"]),
            (torch.nn.LSTM, torch.float16, ["eager"]),
        ):
            options = {"max_length": T} if make is rbn.BatchNormLSTM else {}
            layer = make(inputs, H, **options).to("cuda", dtype)
            x = torch.randn(T, B, inputs, device="cuda", dtype=dtype)
            for mode in modes:
                torch._dynamo.reset()
                ms = round(milliseconds(layer, MODES[mode](layer), x), 3)
                name = str(dtype).removeprefix("torch.")
                rows.append([make.__name__, name, T, B, inputs, H, mode, ms, *origin])
                print(*rows[-1][:8], flush=True)
                with out.open("w", newline="") as file:
                    csv.writer(file).writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
