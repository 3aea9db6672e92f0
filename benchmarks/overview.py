"""Draws the README's figure from committed data: learning curves, and times of a training step.

The peer is the fastest that cuDNN offers in 16 bits: bfloat16 or float16, time or batch first. A
user of `torch.autocast` gets float16 from cuDNN even with bfloat16 requested.
"""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/assets/overview.png"
SHAPES = {  # names in gpu.csv, and in the figure
    "mnist": "MNIST\n784 steps, 100 units",
    "ptb": "Penn Treebank\n100 steps, 1000 units",
    "text8": "text8\n180 steps, 2000 units",
    "cnn": "CNN reader\n300 steps, 240 units",
    "cnn, both ways": "CNN reader,\nboth directions",
}
LAYOUTS = ("torch.nn.LSTM (cuDNN)", "torch.nn.LSTM (cuDNN), batch first")


def times(way=""):
    """Milliseconds of forward and backward in 16 bits: ``{shape: (cuDNN, BatchNormLSTM)}``.

    way: ``""`` for eager PyTorch, ``", CUDA graph"`` for a captured step.
    """
    with (ROOT / "benchmarks/results/gpu.csv").open(newline="") as file:
        rows = {(r["shape"], r["precision"], r["what"]): r for r in csv.DictReader(file)}

    def fastest(shape, names):
        return min(
            float(rows[shape, precision, f"{name}{way}"]["fwdbwd_ms"])
            for precision in ("bf16", "fp16")
            for name in names
        )

    return {s: (fastest(s, LAYOUTS), fastest(s, ["rbn.BatchNormLSTM"])) for s in SHAPES}


def curves(panel="permuted MNIST"):
    """Our validation accuracies of Figure 2 in percent: ``{model: (steps, values)}``.

    The BN-LSTM's are those with population statistics, as in `eval()`.
    """
    names = {"LSTM": "LSTM", "BN-LSTM, population statistics": "BN-LSTM"}
    found = {}
    with (ROOT / "docs/report/fig2.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["panel"] == panel and row["source"] == "ours" and row["series"] in names:
                steps, values = found.setdefault(names[row["series"]], ([], []))
                steps.append(float(row["x"]))
                values.append(100 * float(row["y"]))
    return found


def main():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    grey, blue = "#8a8f98", "#2463eb"
    for (name, (steps, values)), color in zip(curves().items(), (grey, blue), strict=True):
        left.plot([step / 1000 for step in steps], values, color=color, label=name)
    left.set(xlabel="thousand steps", ylabel="validation accuracy, %", ylim=(60, 100))
    left.set_title("Permuted MNIST: learns in fewer steps", loc="left", fontsize=11)
    left.legend(frameon=False, loc="lower right")

    eager = times()
    places = range(len(eager))
    for k, (label, color) in enumerate((("torch.nn.LSTM (cuDNN)", grey), ("BatchNormLSTM", blue))):
        at = [place + (k - 0.5) * 0.38 for place in places]
        bars = right.barh(at, [pair[k] for pair in eager.values()], 0.36, color=color, label=label)
        right.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    right.set_yticks(list(places), [SHAPES[s] for s in eager], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("milliseconds of a training step (16 bits, eager, H200)")
    right.set_title("Faster than cuDNN at the paper's shapes", loc="left", fontsize=11)
    right.legend(frameon=False, loc="upper right")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=150, metadata={"Software": None})
    for way in ("", ", CUDA graph"):
        ratios = [cudnn / ours for cudnn, ours in times(way).values()]
        print(f"{way[2:] or 'eager'}: {min(ratios):.1f} to {max(ratios):.1f} times as fast")


if __name__ == "__main__":
    main()
