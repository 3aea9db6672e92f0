"""Times the layers beside cuDNN's torch.nn.LSTM on this GPU, in one run.

For each shape, precision and layer: the forward pass, forward and backward together, inference,
and the memory a training step takes at its peak. Prints a table, writes benchmarks/results/gpu.csv
and draws benchmarks/results/gpu.png.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch

import rbn
from rbn.experiments.results import commit

SHAPES = {
    "mnist": (784, 100, 1, 100, 1),
    "ptb": (100, 64, 50, 1000, 1),
    "text8": (180, 128, 27, 2000, 1),
    "cnn": (300, 64, 240, 240, 1),
    "cnn, both ways": (300, 64, 240, 240, 2),
}  # T, B, I, H, directions
SWEEPS = {
    **{f"H={h}": (100, 64, 64, h, 1) for h in (32, 128, 512, 1024, 1536)},
    **{f"B={b}": (100, b, 64, 256, 1) for b in (1, 16, 128, 256)},
    **{f"T={t}": (t, 64, 64, 256, 1) for t in (1, 10, 1000)},
}
PRECISIONS = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PEER = "torch.nn.LSTM (cuDNN)"
RESULTS = Path(__file__).parent / "results" / "gpu.csv"
COLUMNS = [
    *("shape", "T", "B", "I", "H", "directions", "precision", "what", "fwd_ms", "fwdbwd_ms"),
    *("infer_ms", "spread", "peak_mb", "ratio_to_cudnn", "gpu", "versions", "commit", "date"),
]


class JitLayerNormLSTM(torch.nn.Module):
    """A LayerNorm LSTM as a scripted loop over its cell, the usual way without a kernel."""

    def __init__(self, inputs, hidden):
        super().__init__()
        self.weight_ih = torch.nn.Parameter(torch.randn(4 * hidden, inputs) * inputs**-0.5)
        self.weight_hh = torch.nn.Parameter(torch.randn(4 * hidden, hidden) * hidden**-0.5)
        self.norm_x = torch.nn.LayerNorm(4 * hidden)
        self.norm_h = torch.nn.LayerNorm(4 * hidden)
        self.norm_c = torch.nn.LayerNorm(hidden)
        self.hidden = hidden

    def forward(self, x: torch.Tensor):
        h = torch.zeros(x.size(1), self.hidden, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        wx = self.norm_x(torch.matmul(x, self.weight_ih.t()))
        weight = self.weight_hh.t()
        outputs: list[torch.Tensor] = []
        for t in range(x.size(0)):
            i, f, g, o = (wx[t] + self.norm_h(torch.mm(h, weight))).chunk(4, 1)
            c = self.norm_c(torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g))
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)


def make_layers(shape, peers):
    T, _, I, H, directions = shape  # noqa: E741
    both = directions == 2
    layers = {
        PEER: torch.nn.LSTM(I, H, bidirectional=both),
        "rbn.LSTM": rbn.LSTM(I, H, bidirectional=both),
        "rbn.BatchNormLSTM": rbn.BatchNormLSTM(I, H, bidirectional=both, max_length=T),
    }
    if peers and not both:
        layers["scripted LayerNorm LSTM"] = torch.jit.script(JitLayerNormLSTM(I, H))
    return layers


def measure(function, repeats):
    """Median and spread (half the distance of the quartiles) in milliseconds."""
    samples = []
    for k in range(repeats + 3):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if k >= 3:
            samples.append(start.elapsed_time(end))
    samples.sort()
    n = len(samples)
    return statistics.median(samples), (samples[3 * n // 4] - samples[n // 4]) / 2


def time_layer(layer, x, grad, repeats):
    """The figures of one layer."""

    def forward():
        return layer(x)[0]

    def both():
        layer.zero_grad(set_to_none=True)
        forward().backward(grad)

    layer.train()
    both()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    found = {"fwd_ms": measure(forward, repeats)[0], "peak_mb": round(peak, 1)}
    found["fwdbwd_ms"], found["spread"] = measure(both, repeats)
    layer.eval()
    with torch.no_grad():
        found["infer_ms"] = measure(forward, repeats)[0]
    return found


def graph_of(layer, x, grad):
    """A training step of the layer as a CUDA graph: what is left without the host's share."""

    def both():
        layer.zero_grad(set_to_none=True)
        layer(x)[0].backward(grad)

    layer.train()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    return graph


def draw(rows, path):
    """Bars of the speed against cuDNN for the paper's shapes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    chosen = [r for r in rows if r["what"].startswith("rbn.BatchNormLSTM") and r["shape"] in SHAPES]
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = [name for name in SHAPES if any(r["shape"] == name for r in chosen)]
    series = sorted({(r["precision"], r["what"]) for r in chosen})
    width = 0.8 / max(1, len(series))
    for k, (precision, what) in enumerate(series):
        points = {
            r["shape"]: 1 / r["ratio_to_cudnn"]
            for r in chosen
            if (r["precision"], r["what"]) == (precision, what)
        }
        at = [i + (k - (len(series) - 1) / 2) * width for i in range(len(names))]
        label = f"{precision}, {what.removeprefix('rbn.')}"
        axes.bar(at, [points.get(n, 0) for n in names], width, label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("times as fast as cuDNN's plain LSTM")
    axes.set_title(f"Batch-normalized LSTM, forward and backward, {rows[0]['gpu']}")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--sweeps", action="store_true", help="also other sizes")
    parser.add_argument("--peers", action="store_true", help="also the slow scripted peer")
    parser.add_argument("--commit", help="to be written down, where git cannot say")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "versions": f"rbn {rbn.__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "commit": arguments.commit or commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{facts['gpu']}; {facts['versions']}\n")
    header = ("fwd", "fwd+bwd", "infer", "MiB", "ratio")
    print(f"{'shape':>15} {'':5} {'what':<28}" + "".join(f"{h:>9}" for h in header))
    rows = []
    shapes = SHAPES | (SWEEPS if arguments.sweeps else {})
    for name, shape in shapes.items():
        T, B, I, H, directions = shape  # noqa: E741
        for precision in arguments.precisions.split(","):
            dtype = PRECISIONS[precision]
            torch.manual_seed(0)
            x = torch.randn(T, B, I, device="cuda", dtype=dtype)
            grad = torch.randn(T, B, H * directions, device="cuda", dtype=dtype)
            peer = None
            for what, made in make_layers(shape, arguments.peers).items():
                layer = made.to("cuda", dtype)
                if what == PEER:
                    layer.flatten_parameters()
                found = [(what, time_layer(layer, x, grad, arguments.repeats))]
                if what == PEER:
                    peer = found[0][1]
                if what != PEER and not what.startswith("scripted"):
                    graph = graph_of(layer, x, grad)
                    median, spread = measure(graph.replay, arguments.repeats)
                    found.append((f"{what}, CUDA graph", {"fwdbwd_ms": median, "spread": spread}))
                    del graph
                for label, figures in found:
                    row = {
                        "shape": name,
                        **dict(zip(("T", "B", "I", "H", "directions"), shape, strict=True)),
                        "precision": precision,
                        "what": label,
                        **{k: round(v, 4) for k, v in figures.items()},
                        "ratio_to_cudnn": round(figures["fwdbwd_ms"] / peer["fwdbwd_ms"], 4),
                        **facts,
                    }
                    rows.append(row)
                    print(
                        f"{name:>15} {precision:5} {label:<28}{row.get('fwd_ms', 0):9.3f}"
                        f"{row['fwdbwd_ms']:9.3f}{row.get('infer_ms', 0):9.3f}"
                        f"{row.get('peak_mb', 0):9.1f}{row['ratio_to_cudnn']:9.2f}",
                        flush=True,
                    )
                del layer, made
            torch.cuda.empty_cache()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, arguments.out.with_suffix(".png"))
    print(f"\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
