"""Plots the GPU benchmark's rows."""

from gpu_rows import BN_LSTM, CUDNN, GRAPH, LSTM, OTHERS, PRECISIONS, SHAPES, SWEEPS

# From the Okabe-Ito palette, which colour-blind readers can tell apart.
COLOURS = {"bf16": "#0072B2", "tf32": "#D55E00", "fp16": "#009E73"}
LINES = {CUDNN: "#767676", LSTM: "#56B4E9", BN_LSTM: "#0072B2"}
AXES = {"H": "units (T 100, batch 64)", "B": "batch (T 100, H 256)", "T": "steps (batch 64, H 256)"}


def draw(rows, path):
    """The shapes as speed relative to cuDNN, and the sweeps, if any, in milliseconds."""
    from matplotlib.figure import Figure

    if not rows:
        return
    swept = any(row["shape"] in SWEEPS for row in rows)
    figure = Figure(figsize=(14, 7.5 if swept else 4), dpi=130, layout="constrained")
    above, *below = figure.subfigures(1 + swept, 1, squeeze=False)[:, 0]
    _speed(above.subplots(), rows)
    for part in below:
        for letter, axes in zip(AXES, part.subplots(1, 3), strict=True):
            _sweep(axes, rows, letter)
    figure.suptitle(f"Batch-normalized LSTM, forward and backward, {rows[0]['gpu']}")
    figure.savefig(path, format="png")


def _number(row, name):
    value = row.get(name, "")
    return None if value in ("", None) else float(value)


def _speed(axes, rows):
    """Bars: how many times as fast as cuDNN the BN-LSTM is, eager and in a CUDA graph."""
    shapes = SHAPES | OTHERS
    series = [(p, graph) for p in PRECISIONS for graph in ("", GRAPH)]
    width = 0.85 / len(series)
    for k, (precision, graph) in enumerate(series):
        speeds = {
            row["shape"]: _number(row, "times_as_fast")
            for row in rows
            if row["what"] == BN_LSTM + graph and row["precision"] == precision
        }
        known = [(place, speeds[shape]) for place, shape in enumerate(shapes) if speeds.get(shape)]
        shift = (k - (len(series) - 1) / 2) * width
        if known:
            axes.bar(
                [place + shift for place, _ in known],
                [speed for _, speed in known],
                width,
                color=COLOURS[precision],
                alpha=1 if graph else 0.45,
                label=f"{precision}{graph or ', called'}",
            )
    axes.axhline(1, color="black", linewidth=1)
    labels = [f"{n}\n{', '.join(map(str, SHAPES[n][:4]))}" if n in SHAPES else n for n in shapes]
    axes.set_xticks(range(len(shapes)), labels, fontsize=7)
    axes.set_xlim(-0.5, len(shapes) - 0.5)
    axes.margins(y=0.2)
    axes.set_ylabel("times as fast as cuDNN's plain LSTM")
    axes.spines[["top", "right"]].set_visible(False)
    if axes.containers:
        axes.legend(frameon=False, fontsize=8, ncols=3)


def _sweep(axes, rows, letter):
    """Milliseconds over one of the sizes, in CUDA graphs, in bf16."""
    for what, colour in LINES.items():
        points = sorted(
            (float(row[letter]), _number(row, "fwdbwd_ms"))
            for row in rows
            if row["shape"] in SWEEPS
            and row["shape"].startswith(f"{letter}=")
            and row["what"] == what + GRAPH
            and row["precision"] == "bf16"
            and _number(row, "fwdbwd_ms")
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=what, markersize=4)
            axes.set(xscale="log", yscale="log")
    axes.set_xlabel(AXES[letter])
    axes.set_ylabel("ms, bf16, CUDA graph")
    axes.spines[["top", "right"]].set_visible(False)
    if letter == "H" and axes.lines:
        axes.legend(frameon=False, fontsize=8)
