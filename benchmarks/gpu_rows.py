"""What the GPU benchmark found: rows of a CSV file that grows while it runs, and their picture."""

import csv
import os
import statistics
from pathlib import Path

SHAPES = {
    "mnist": (784, 100, 1, 100, 1),
    "ptb": (100, 64, 50, 1000, 1),
    "text8": (180, 128, 27, 2000, 1),
    "cnn": (300, 64, 240, 240, 1),
    "cnn, both ways": (300, 64, 240, 240, 2),
}  # T, B, I, H, directions
SWEEPS = {
    **{f"H={h}": (100, 64, 64, h, 1) for h in (32, 128, 512, 1024, 1536, 2048, 4096)},
    **{f"B={b}": (100, b, 64, 256, 1) for b in (2, 16, 128, 256, 512)},
    **{f"T={t}": (t, 64, 64, 256, 1) for t in (1, 10, 1000, 5000)},
}
PRECISIONS = ("bf16", "tf32", "fp16")
CUDNN, CUDNN_BATCH_FIRST = "torch.nn.LSTM (cuDNN)", "torch.nn.LSTM (cuDNN), batch first"
LSTM, BN_LSTM = "rbn.LSTM", "rbn.BatchNormLSTM"
COMPILED, SCRIPTED = "compiled BN-LSTM cell", "scripted LayerNorm LSTM"
LAYERS = (CUDNN, CUDNN_BATCH_FIRST, LSTM, BN_LSTM)
PEERS = (COMPILED, SCRIPTED)
GRAPH = ", CUDA graph"

SIZES = ("T", "B", "I", "H", "directions")
KEY = ("shape", *SIZES, "precision", "what")
COLUMNS = [
    *(*KEY, "fwd_ms", "fwdbwd_ms", "infer_ms", "peak_mb", "ratio_to_cudnn"),
    *("gpu", "versions", "commit", "date"),
    *("fwd_spread", "fwdbwd_spread", "infer_spread", "memory_ratio"),
    *("fwd_floor", "fwdbwd_floor", "infer_floor"),
]
ALL_SHAPES = SHAPES | SWEEPS


def sizes_of(shape):
    return dict(zip(SIZES, ALL_SHAPES[shape], strict=True))


def captured(what):
    return what.endswith(GRAPH)


class Rows:
    """The rows of a file, one for each shape, precision and layer.

    Every row that is put in is on disk before the next is measured; one of an earlier run stays
    until its own place is measured again.
    """

    def __init__(self, path, fresh=False):
        self.path = Path(path)
        self.found = {}
        if not fresh and self.path.exists():
            with self.path.open(newline="") as file:
                for row in csv.DictReader(file):
                    self.found[_key(row)] = row

    def put(self, row):
        unknown = row.keys() - set(COLUMNS)
        if unknown:
            raise ValueError(f"there is no column {', '.join(sorted(unknown))}")
        self.found[_key(row)] = {name: row.get(name, "") for name in COLUMNS}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(self.sorted())
        os.replace(part, self.path)

    def sorted(self):
        return sorted(self.found.values(), key=_order)


def _key(row):
    return tuple(str(row[name]) for name in KEY)


def _order(row):
    """As in the lists above; what is in none of them comes last."""
    lists = list(ALL_SHAPES), list(PRECISIONS), [*LAYERS, *PEERS]
    values = row["shape"], row["precision"], row["what"].removesuffix(GRAPH)
    places = [
        names.index(value) if value in names else len(names)
        for names, value in zip(lists, values, strict=True)
    ]
    return (*places, captured(row["what"]), row["what"])


def median_and_spread(samples):
    """The median, and half the distance between the quartiles."""
    ordered = sorted(samples)
    n = len(ordered)
    return statistics.median(ordered), (ordered[3 * n // 4] - ordered[n // 4]) / 2


def figures_of(found, floors):
    """The columns of what was measured.

    found: for "fwd", "fwdbwd" and "infer" the samples in milliseconds; "peak_mb" if known.
    floors: for the same the milliseconds that no implementation can go below.
    """
    row = {}
    for name in ("fwd", "fwdbwd", "infer"):
        if name not in found:
            continue
        median, spread = median_and_spread(found[name])
        row[f"{name}_ms"] = round(median, 4)
        row[f"{name}_spread"] = round(spread, 4)
        row[f"{name}_floor"] = round(floors[name] / median, 3)
    if "peak_mb" in found:
        row["peak_mb"] = round(found["peak_mb"], 1)
    return row


def ratios(row, cudnn):
    """How the row stands to cuDNN's rows of the same run, shape and precision: like with like.

    A training step that is called is compared with the faster of cuDNN's layouts, called; one in a
    CUDA graph with the faster of them in a CUDA graph. Memory likewise with the smaller one's.
    """
    found = {}
    times = [
        r["fwdbwd_ms"]
        for r in cudnn
        if "fwdbwd_ms" in r and captured(r["what"]) == captured(row["what"])
    ]
    if times and "fwdbwd_ms" in row:
        found["ratio_to_cudnn"] = round(row["fwdbwd_ms"] / min(times), 4)
    peaks = [r["peak_mb"] for r in cudnn if "peak_mb" in r]
    if peaks and "peak_mb" in row:
        found["memory_ratio"] = round(row["peak_mb"] / min(peaks), 3)
    return found
