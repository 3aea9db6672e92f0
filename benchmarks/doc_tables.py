"""Writes tables in the documentation from the data files.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``. A test compares the
pages with this program's output.

    python3 benchmarks/doc_tables.py            # write all tables
"""

import csv
import math
import re
from pathlib import Path

from gpu_rows import (
    AUTOCAST,
    BN_LSTM,
    COMPILED,
    CUDNN,
    GRAPH,
    LENGTHS,
    LSTM,
    OPTIONS_SHAPE,
    OTHERS,
    PACKED,
    SCRIPTED,
    SEQUENCE_STATISTICS,
    SHAPES,
    SIZES,
    SWEEPS,
    ZONEOUT,
)

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "docs/results/speed.md",
    "docs/results/comparison.md",
    "docs/lab-notes/kernels.md",
    "docs/lab-notes/scaling.md",
    "docs/explanation/per-step-statistics.md",
    "docs/explanation/running-averages.md",
)
NAMES = {"mnist": "MNIST", "ptb": "Penn Treebank", "text8": "text8", "cnn": "CNN reader"}
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)
WAYS = ("", GRAPH)  # eager PyTorch, a captured step


def read(name):
    """The rows of a file by shape, precision and layer."""
    with (RESULTS / name).open(newline="") as file:
        return {(r["shape"], r["precision"], r["what"]): r for r in csv.DictReader(file)}


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def ms(row, column="fwdbwd_ms"):
    value = float(row[column])
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def times(row):
    """How many times as fast as cuDNN: two decimals below 1.05, where they decide who is faster."""
    value = float(row["times_as_fast"])
    return f"{value:.2f}" if value < 1.05 else f"{value:.1f}"


def fastest(rows, row):
    """The row of cuDNN to compare a row with."""
    precision, _, options = row["fastest_cudnn"].partition(",")
    what = CUDNN + ("," + options if options else "")
    if row["what"].endswith(GRAPH):
        what += GRAPH
    return rows[row["shape"], precision, what]


def label(row, shape):
    sizes = ", ".join(row[size] for size in SIZES[:4])
    if shape not in SHAPES:
        return sizes
    both = row["directions"] == "2"
    return "the same in two directions" if both else f"{NAMES[shape]}: {sizes}"


def summary():
    """Ranges over the paper's shapes and over all of them."""
    rows, lines = read("gpu.csv"), []
    for name, precision, what in (
        ("16 bits, a module in bf16", "bf16", BN_LSTM),
        ("16 bits, under autocast", "bf16", BN_LSTM + AUTOCAST),
        ("tf32", "tf32", BN_LSTM),
    ):
        cells = [name]
        for shapes in (SHAPES, OTHERS):
            for way in WAYS:
                found = [rows[shape, precision, what + way] for shape in shapes]
                low, high = sorted(found, key=lambda row: float(row["times_as_fast"]))[
                    :: len(found) - 1
                ]
                cells.append(f"{float(low['times_as_fast']):.1f} to {times(high)}")
        lines.append(cells)
    heads = ["", "paper's shapes, eager", "in a CUDA graph", "others, eager", "in a CUDA graph"]
    return table(heads, lines)


def gpu():
    rows, lines = read("gpu.csv"), []
    for shape in SHAPES | OTHERS:
        for precision in ("bf16", "tf32"):
            ours = [rows[shape, precision, BN_LSTM + way] for way in WAYS]
            plain = [rows[shape, precision, LSTM + way] for way in WAYS]
            cells = [label(ours[0], shape) if precision == "bf16" else ""]
            cells.append("16 bits" if precision == "bf16" else precision)
            for one, other in zip(ours, plain, strict=True):
                peer = fastest(rows, one)
                cells += [ms(peer), ms(one), f"**{times(one)}**", times(other)]
            lines.append([*cells, f"{float(ours[0]['memory_ratio']):.1f}"])
    heads = ["T, B, inputs, units", "", "cuDNN, ms", "BN-LSTM, ms", "times as fast", "LSTM"]
    heads += ["in a graph: cuDNN, ms", "BN-LSTM, ms", "times as fast", "LSTM", "memory"]
    return table(heads, lines)


def options():
    rows, lines = read("gpu.csv"), []
    for name, option in (
        ("none", ""),
        ("under autocast", AUTOCAST),
        ("`zoneout`", ZONEOUT),
        ('`input_stats="sequence"`', SEQUENCE_STATISTICS),
        ("`lengths`", LENGTHS),
        ("`PackedSequence`", PACKED),
    ):
        cells = [name]
        for way in WAYS:
            row = rows.get((OPTIONS_SHAPE, "bf16", BN_LSTM + option + way))
            plain = rows[OPTIONS_SHAPE, "bf16", BN_LSTM + way]
            if row is None:
                cells += ["not measured", "", ""]
                continue
            more = float(row["fwdbwd_ms"]) / float(plain["fwdbwd_ms"])
            cells += [ms(row), f"{more:.2f}", times(row)]
        lines.append(cells)
    heads = ["option", "eager, ms", "of the plain layer's time", "times as fast as cuDNN"]
    heads += ["in a graph, ms", "of the plain layer's time", "times as fast as cuDNN"]
    return table(heads, lines)


def peers():
    """Time relative to cuDNN in bf16, in the same run, of implementations without a kernel."""
    rows, lines = read("gpu-sweeps.csv"), []
    for shape in SHAPES:
        found = [
            rows[shape, "bf16", what + way]
            for what, way in ((COMPILED, ""), (COMPILED, GRAPH), (SCRIPTED, ""))
        ]
        lines.append([shape] + [f"{1 / float(row['times_as_fast']):.1f}" for row in found])
    return table(["", COMPILED, "in a CUDA graph", SCRIPTED], lines)


def sweeps():
    rows, lines = read("gpu-sweeps.csv"), []
    for shape in SWEEPS:
        cells = [shape.replace("=", " = ")]
        for precision in ("bf16", "tf32"):
            ours = {way: rows.get((shape, precision, BN_LSTM + way)) for way in WAYS}
            plain = rows.get((shape, precision, LSTM + GRAPH))
            if ours[GRAPH] is None or plain is None:
                cells += [""] * 4
                continue
            peer = fastest(rows, ours[GRAPH])
            cells += [ms(peer), times(ours[GRAPH]), times(plain), times(ours[""])]
        if any(cells[1:]):
            lines.append(cells)
    heads = ["", "bf16: cuDNN in a graph, ms", "BN-LSTM", "LSTM", "BN-LSTM, eager"]
    heads += ["tf32: cuDNN in a graph, ms", "BN-LSTM", "LSTM", "BN-LSTM, eager"]
    return table(heads, lines)


def second_gpu():
    """The batch size from which a second GPU pays off, calculated from the times of one."""
    rows, lines = read("gpu.csv"), []
    for shape, name, exchange, slow in (  # ms to exchange gradients at 300 and at 25 GB/s, assumed
        ("ptb", "Penn Treebank", 0.06, 0.68),
        ("cnn", "CNN, one encoder", 0.01, 0.07),
        ("mnist", "MNIST", 0.0, 0.0),
        ("text8", "text8", 0.22, 2.6),
    ):
        both = [rows[shape, "bf16", BN_LSTM + way] for way in WAYS]
        eager, graph = (float(row["fwdbwd_ms"]) for row in both)
        batch = int(both[0]["B"])
        pays = [
            round(2 * batch * (eager - graph + cost) / (part * graph))
            for cost, part in ((exchange, 1), (exchange, 0.5), (slow, 0.5))
        ]
        cells = [name, str(batch), f"{eager:.2f}", f"{graph:.2f}", f"{exchange:.2f}"]
        lines.append(cells + [str(value) for value in pays])
    heads = ["shape, bf16", "B0", "eager, ms (measured)", "graph, ms (measured)"]
    heads += ["exchange at 300 GB/s, ms (assumed)", "pays from B, part = 1", "part = 0.5"]
    return table([*heads, "part = 0.5, exchange at 25 GB/s"], lines)


def source():
    """The origin of the rows of gpu.csv."""
    rows = list(read("gpu.csv").values())
    (commit,), (gpu,), (versions,) = (
        {row[name] for row in rows} for name in ("commit", "gpu", "versions")
    )
    return f"All rows: {gpu}, {versions}, commit {commit}, {rows[0]['date']}.\n"


def by_seed(rows, digits):
    """The results at the best rate of the first seed; diverged runs have none."""
    first = [row for row in rows if row["seed"] == "1" and row["valid"]]
    sign = -1 if first[0]["unit"] == "%" else 1
    best = min(first, key=lambda row: sign * float(row["valid"]))
    found = [row for row in rows if row["rate"] == best["rate"]]
    found.sort(key=lambda row: int(row["seed"]))
    values = [f"{float(row['valid']):.{digits}f}" if row["valid"] else "diverged" for row in found]
    return [best["rate"], ", ".join(values)]


def grouped(name, *keys):
    """The rows of a file by the values of some columns, in the file's order."""
    groups = {}
    with (RESULTS / name).open(newline="") as file:
        for row in csv.DictReader(file):
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def few_sequences():
    found = grouped("few-sequences.csv", "sequences", "steps", "statistics")
    lines = []
    for sequences in dict.fromkeys(key[0] for key in found):
        cells = [sequences]
        for steps in ("300", "600"):
            for way in ("own", "layer's"):
                norms = [float(row["gradient_norm"]) for row in found[sequences, steps, way]]
                broken = [value for value in norms if not math.isfinite(value)]
                value = broken[0] if broken else max(norms)
                words = {"inf": "infinite", "nan": "not a number"}
                cells.append(words.get(str(value), f"{value:.2g}"))
        lines.append(cells)
    heads = ["sequences that reach all steps"]
    heads += ["their own statistics, 300 steps", "the layer", "own, 600 steps", "the layer"]
    return table(heads, lines)


def few_sequences_training():
    found = grouped("few-sequences-training.csv", "batch", "normalized_with")
    lines = []
    for batch in ("4", "16"):
        cells = [batch]
        for way in ("own", "constants"):
            cells += by_seed(found[batch, way], 1)
        lines.append(cells)
    heads = ["sequences in a batch", "rate", "their own statistics", "rate", "constants"]
    return table(heads, lines)


def gru():
    lines = []
    names = {"digits": "digits, %", "pdigits": "permuted digits, %", "pydoc": "pydoc, bits"}
    for (task, model), rows in grouped("gru.csv", "task", "model").items():
        digits = 1 if rows[0]["unit"] == "%" else 3
        lines.append([names[task], f"`{model}`", *by_seed(rows, digits)])
    return table(["task", "layer", "rate", "validation, three seeds"], lines)


def state_tracking():
    """For each rate, the steps to the goal of every seed; the best rate with its test results."""
    lines = []
    for (task, model), rows in grouped("state-tracking.csv", "task", "model").items():
        rates, cells = {}, []
        for row in sorted(rows, key=lambda row: (float(row["rate"]), int(row["seed"]))):
            rates.setdefault(row["rate"], []).append(row)
        for runs in rates.values():
            goals = [row["goal_step"] if row["valid"] else "diverged" for row in runs]
            cells.append(goals[0] if set(goals) == {"never"} else ", ".join(goals))
        name, _, gamma = model.partition(", ")
        cells = [f"`{name}`" + f", `{gamma}`" * bool(gamma), *cells]
        best = rates[best_tracking_rate(rates)]
        tests = ", ".join(f"{100 * float(row['test']):.1f}" for row in best)
        lines.append([task, *cells, f"{best[0]['rate']}: {tests}"])
    heads = ["network", "layer", *rates, "test accuracy at the best rate, %"]
    return table(heads, lines)


def best_tracking_rate(rates):
    """The best mean validation result; of equal ones, the rate that reaches the goal first."""

    def order(rate):
        runs = rates[rate]
        if not all(row["valid"] for row in runs):  # one diverged
            return 1, 0, 0
        goals = [float(row["goal_step"].replace("never", "inf")) for row in runs]
        return 0, -sum(float(row["valid"]) for row in runs), sum(goals)

    return min(rates, key=order)


def decoders():
    """Bits above those with exact statistics, means over all seeds and epochs."""
    lines = []
    for key, rows in grouped("decoder-statistics.csv", "encoder", "batch", "rate").items():
        encoder, batch, rate = key
        exact = [float(row["exact"]) for row in rows]
        last = [float(row["exact"]) for row in rows if row["epoch"] == rows[-1]["epoch"]]
        cells = [f"`{encoder}`", batch, rate, f"{sum(last) / len(last):.2f}"]
        for estimate in ("running", "kept_256", "kept_64", "default", "current_256"):
            above = sum(float(row[estimate]) for row in rows) - sum(exact)
            cells.append(f"{round(above / len(rows), 2) + 0:+.2f}")  # never -0.00
        lines.append(cells)
    heads = ["encoder", "batch", "rate", "exact, last epoch", "running averages", "last 256"]
    heads += ["last 64", "the default", "last 256 through the whole model"]
    return table(heads, lines)


def masks():
    """Means over seeds after the last epoch, and the mean gain over all seeds and epochs."""
    names = {"black-pdigits": "permuted digits after three black pixels"}
    names |= {"digits": "digits", "pdigits": "permuted digits", "pydoc": "text (pydoc)"}
    found, lines = grouped("statistics-with-masks.csv", "task", "case"), []
    for case in dict.fromkeys(case for _, case in found):
        for task in names:
            if (task, case) not in found:
                continue
            rows = found[task, case]
            unit, digits = rows[0]["unit"], 1 if rows[0]["unit"] == "%" else 3
            last = [row for row in rows if row["epoch"] == rows[-1]["epoch"]]
            seeds = len({row["seed"] for row in rows})
            cells = [case.removeprefix("zoneout "), f"{names[task]}, {unit}", str(seeds)]
            for estimate in ("recent_without", "recent_with", "exact_without", "exact_with"):
                mean = sum(float(row[estimate]) for row in last) / len(last)
                cells.append(f"{mean:.{digits}f}")
            gains = [float(row["recent_with"]) - float(row["recent_without"]) for row in rows]
            cells.append(f"{sum(gains) / len(gains):+.{digits}f}")
            lines.append(cells)
    heads = ["zoneout", "task", "seeds", "recent inputs, without masks", "with masks"]
    heads += ["training set, without", "with", "recent, all epochs: with minus without"]
    return table(heads, lines)


TABLES = {
    "masks": masks,
    "decoders": decoders,
    "state-tracking": state_tracking,
    "few-sequences": few_sequences,
    "few-sequences-training": few_sequences_training,
    "gru": gru,
    "summary": summary,
    "gpu": gpu,
    "options": options,
    "peers": peers,
    "sweeps": sweeps,
    "second-gpu": second_gpu,
    "source": source,
}


def filled(text):
    """A page with its tables filled in from the data files."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]]() + m[3], text)


def main():
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main()
