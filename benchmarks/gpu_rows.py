"""Results of the GPU benchmark: rows of a CSV file that grows while it runs, and their plot."""

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
OTHERS = {  # for which cuDNN has its fastest kernels, or the host's time counts most
    ", ".join(map(str, sizes)): (*sizes, 1)
    for sizes in (
        *((1024, 16, 512, 512), (1024, 16, 768, 768), (100, 64, 256, 512)),
        *((256, 128, 1024, 1024), (50, 32, 128, 128), (30, 1024, 64, 64), (100, 64, 64, 32)),
    )
}
SWEEPS = {
    **{f"H={h}": (100, 64, 64, h, 1) for h in (32, 128, 512, 1024, 1536, 2048, 4096)},
    **{f"I=H={h}": (100, 64, h, h, 1) for h in (32, 128, 512, 1024, 2048)},
    **{f"T={t}": (t, 64, 64, 256, 1) for t in (1, 10, 1000, 5000)},
    **{f"B={b}": (100, b, 64, 256, 1) for b in (2, 16, 128, 256, 512)},
}
ALL_SHAPES = SHAPES | OTHERS | SWEEPS
OPTIONS_SHAPE = "100, 64, 256, 512"

PRECISIONS = ("bf16", "tf32", "fp16")
# A user who wants 16 bits may take either of them, so the baseline is cuDNN's faster one.
CLASSES = {"16 bits": ("bf16", "fp16"), "tf32": ("tf32",)}
CUDNN, LSTM, BN_LSTM = "torch.nn.LSTM (cuDNN)", "rbn.LSTM", "rbn.BatchNormLSTM"
COMPILED, SCRIPTED = "compiled BN-LSTM cell", "scripted LayerNorm LSTM"
GRAPH, BATCH_FIRST, AUTOCAST = ", CUDA graph", ", batch first", ", autocast"
PACKED, LENGTHS, ZONEOUT = ", PackedSequence", ", lengths", ", zoneout"
SEQUENCE_STATISTICS = ", input_stats sequence"

# The measurements of a class: precision and name. Under autocast, torch runs cuDNN's LSTM in
# float16 even if bfloat16 is requested.
CUDNNS = {
    "16 bits": [
        (precision, CUDNN + autocast + layout)
        for precision, autocast in (("fp16", ""), ("bf16", ""), ("fp16", AUTOCAST))
        for layout in ("", BATCH_FIRST)
    ],
    "tf32": [("tf32", CUDNN), ("tf32", CUDNN + BATCH_FIRST)],
}
LAYERS = {
    "16 bits": [
        *(("bf16", BN_LSTM), ("fp16", BN_LSTM), ("bf16", BN_LSTM + AUTOCAST)),
        *(("bf16", LSTM), ("fp16", LSTM)),
    ],
    "tf32": [("tf32", BN_LSTM), ("tf32", LSTM)],
}
OPTIONS = {
    kind: [
        (precision, name)
        for precision in precisions
        for name in (
            *(CUDNN + PACKED, BN_LSTM + PACKED, BN_LSTM + LENGTHS),
            *(BN_LSTM + ZONEOUT, BN_LSTM + SEQUENCE_STATISTICS),
        )
    ]
    for kind, precisions in CLASSES.items()
}
PEERS = {"16 bits": [("bf16", COMPILED), ("bf16", SCRIPTED)], "tf32": [("tf32", COMPILED)]}

SIZES = ("T", "B", "I", "H", "directions")
KEY = ("shape", *SIZES, "precision", "what")
COLUMNS = [
    *(*KEY, "fwd_ms", "fwdbwd_ms", "infer_ms", "peak_mb", "times_as_fast", "fastest_cudnn"),
    *("memory_ratio", "fwdbwd_floor", "fwd_spread", "fwdbwd_spread", "infer_spread"),
    *("gpu", "versions", "commit", "date"),
]


def sizes_of(shape):
    return dict(zip(SIZES, ALL_SHAPES[shape], strict=True))


def captured(what):
    return what.endswith(GRAPH)


class Rows:
    """The rows of a file, one for each shape, precision and layer.

    Every added row is on disk before the next one is measured. A row of an earlier run stays until
    it is measured again.
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
            raise ValueError(f"unknown columns: {', '.join(sorted(unknown))}")
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
    """The order of the lists above; everything else comes last."""
    names = [CUDNN, LSTM, BN_LSTM, COMPILED, SCRIPTED]
    layer = next((name for name in names if row["what"].startswith(name)), None)
    lists = (list(ALL_SHAPES), row["shape"]), (list(PRECISIONS), row["precision"]), (names, layer)
    places = [known.index(value) if value in known else len(known) for known, value in lists]
    return (*places, captured(row["what"]), row["what"])


def median_and_spread(samples):
    """The median, and half the interquartile range."""
    ordered = sorted(samples)
    n = len(ordered)
    return statistics.median(ordered), (ordered[3 * n // 4] - ordered[n // 4]) / 2


def figures_of(found, floors):
    """The columns of a measurement.

    found: for "fwd", "fwdbwd" and "infer" the samples in milliseconds; "peak_mb" if known.
    floors: the milliseconds that no implementation can go below.
    """
    row = {}
    for name in ("fwd", "fwdbwd", "infer"):
        if name not in found:
            continue
        median, spread = median_and_spread(found[name])
        row[f"{name}_ms"] = round(median, 4)
        row[f"{name}_spread"] = round(spread, 4)
        if name == "fwdbwd":
            row["fwdbwd_floor"] = round(floors[name] / median, 3)
    if "peak_mb" in found:
        row["peak_mb"] = round(found["peak_mb"], 1)
    return row


def beside_cudnn(row, cudnn):
    """Compare a row with the fastest of cuDNN's rows of the same run, shape and class.

    Eager training steps are compared with the fastest eager one, those in a CUDA graph with the
    fastest in a CUDA graph. Variable lengths are compared with cuDNN's PackedSequence, memory with
    the smallest.
    """
    packed = any(word in row["what"] for word in (PACKED, LENGTHS))
    cudnn = [r for r in cudnn if (PACKED in r["what"]) == packed]
    found = {}
    times = [
        (r["fwdbwd_ms"], f"{r['precision']}{r['what'].removeprefix(CUDNN).removesuffix(GRAPH)}")
        for r in cudnn
        if "fwdbwd_ms" in r and captured(r["what"]) == captured(row["what"])
    ]
    if times and "fwdbwd_ms" in row:
        fastest, name = min(times)
        found = {"times_as_fast": round(fastest / row["fwdbwd_ms"], 4), "fastest_cudnn": name}
    peaks = [r["peak_mb"] for r in cudnn if "peak_mb" in r]
    if peaks and "peak_mb" in row:
        found["memory_ratio"] = round(row["peak_mb"] / min(peaks), 3)
    return found
