"""Draws the README's figure from committed data: learning curves, and times of a training step.

The baseline is cuDNN's fastest configuration in 16 bits, as determined by gpu.py.
"""

import csv
from pathlib import Path

from gpu_rows import OTHERS
from gpu_rows import SHAPES as PAPER

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/assets/overview.png"
NAMES = {
    "mnist": "MNIST",
    "ptb": "Penn Treebank",
    "text8": "text8",
    "cnn": "CNN reader",
    "cnn, both ways": "CNN reader, two directions",
}


def times(way="", shapes=tuple(PAPER)):
    """Milliseconds of forward and backward in 16 bits: ``{shape: (cuDNN, BatchNormLSTM)}``.

    way: ``""`` for eager PyTorch, ``", CUDA graph"`` for a captured step.
    """
    with (ROOT / "benchmarks/results/gpu.csv").open(newline="") as file:
        rows = {(r["shape"], r["precision"], r["what"]): r for r in csv.DictReader(file)}
    found = {}
    for shape in shapes:
        row = rows[shape, "bf16", f"rbn.BatchNormLSTM{way}"]
        ours = float(row["fwdbwd_ms"])
        found[shape] = ours * float(row["times_as_fast"]), ours
    return found


def label(shape):
    """The name of a shape, with its steps, rows, inputs and units."""
    if shape in OTHERS:
        return shape
    return f"{NAMES[shape]}: {', '.join(map(str, PAPER[shape][:4]))}"


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
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 4.6), layout="constrained", width_ratios=(4, 5)
    )
    grey, blue = "#8a8f98", "#2463eb"
    for (name, (steps, values)), color in zip(curves().items(), (grey, blue), strict=True):
        left.plot([step / 1000 for step in steps], values, color=color, label=name)
    left.set(xlabel="thousand steps", ylabel="validation accuracy, %", ylim=(60, 100))
    left.set_title("Permuted MNIST: learns in fewer steps", loc="left", fontsize=11)
    left.legend(frameon=False, loc="lower right")

    eager = times(shapes=(*PAPER, *OTHERS))
    places = range(len(eager))
    for k, (name, color) in enumerate((("torch.nn.LSTM (cuDNN)", grey), ("BatchNormLSTM", blue))):
        at = [place + (k - 0.5) * 0.38 for place in places]
        bars = right.barh(at, [pair[k] for pair in eager.values()], 0.36, color=color, label=name)
        right.bar_label(bars, fmt="%.1f", padding=2, fontsize=7)
    right.set_yticks(list(places), [label(shape) for shape in eager], fontsize=8)
    right.invert_yaxis()
    right.set_xlabel("milliseconds of a training step (16 bits, eager, H200)")
    right.set_title("Time by steps, rows, inputs and units", loc="left", fontsize=11)
    right.legend(frameon=False, loc="lower right")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=150, metadata={"Software": None})
    for shapes in (PAPER, OTHERS):
        for way in ("", ", CUDA graph"):
            ratios = [cudnn / ours for cudnn, ours in times(way, shapes).values()]
            print(f"{way[2:] or 'eager'}: {min(ratios):.1f} to {max(ratios):.1f} times as fast")


if __name__ == "__main__":
    main()
