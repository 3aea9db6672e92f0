"""The time of a training step beyond its layer's forward and backward pass.

Times a step of `rbn train`, on random text with the data set's alphabet and length, and the
recurrent layer alone on the same minibatch in the same run; on a GPU both are CUDA graphs. Writes
benchmarks/results/loop.csv. With --profile it shows the kernels of a step, longest first.
"""

import argparse
import csv
import functools
import statistics
import tempfile
import time
from pathlib import Path

import torch
from gpu_timing import capture
from torch.profiler import ProfilerActivity, profile

from rbn import data
from rbn.experiments import build
from rbn.experiments import config as configs
from rbn.experiments.results import commit
from rbn.training import make_fabric

RESULTS = Path(__file__).parent / "results" / "loop.csv"
GROUP = 20  # calls timed together on a GPU
WARM_UP = 5  # earlier calls, which compile kernels and capture graphs
TEXTS = {"ptb": (50, 5_059_550), "text8": (27, 90_000_000)}  # symbols, training characters
COLUMNS = (
    *("task", "model", "precision", "batch_size", "length", "hidden_size", "layer_ms", "step_ms"),
    *("overhead", "device", "torch", "date", "commit"),
)


def make_task(config, device):
    """A task of the config's sizes over random text."""
    count, n = TEXTS[config.task]
    generator = torch.Generator().manual_seed(0)
    train, rest = (
        torch.randint(count, (size,), generator=generator, dtype=torch.uint8).to(device)
        for size in (n, 4 * config.length)
    )
    symbols = "".join(chr(ord("0") + k) for k in range(count))
    text = data.Text(train, rest, rest, symbols)
    return build.build(config, 1, device, loaded=text)


def median_ms(function, repeats, device):
    """Milliseconds of a call, the median of some groups.

    The calls of a group follow each other as in training: the host does not wait for the device.
    """
    group = GROUP if device.type == "cuda" else 1
    samples = []
    for k in range(repeats + 1):
        began = time.perf_counter()
        for _ in range(max(group, WARM_UP) if k == 0 else group):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if k > 0:
            samples.append(1000 * (time.perf_counter() - began) / group)
    return statistics.median(samples)


def layer_alone(task, config, device):
    """A function that runs the recurrent layer forward and backward on a minibatch."""
    layer, (symbols, _) = task.model.recurrent, task.batch(0)
    dtype = torch.bfloat16 if "bf16" in config.precision else torch.float32
    grad = torch.randn(*symbols.shape, config.hidden_size, device=device, dtype=dtype)

    def both():
        layer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            output, _ = layer(symbols)
        output.backward(grad.to(output.dtype))

    return capture(both).replay if device.type == "cuda" else both


def measure(config, device, repeats, profiled=False):
    """The results of one config, as a row without the machine."""
    task = make_task(config, device)
    layer_ms = median_ms(layer_alone(task, config, device), repeats, device)
    fabric = make_fabric(device, config.precision)
    with tempfile.TemporaryDirectory() as folder:
        graph = device.type == "cuda"
        trainer = build.make_trainer(config, task, Path(folder), fabric=fabric, graph=graph)
        trainer.task.model.train()
        step = functools.partial(next, trainer.steps())
        step_ms = median_ms(step, repeats, device)
        if profiled:
            show_profile(step)
    return {
        **{name: getattr(config, name) for name in COLUMNS[:6]},
        "layer_ms": f"{layer_ms:.3f}",
        "step_ms": f"{step_ms:.3f}",
        "overhead": f"{step_ms / layer_ms - 1:.3f}",
    }


def show_profile(step, steps=10):
    """Print the kernels of a step, longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(
        ((e.self_device_time_total / steps, e.count / steps, e.key) for e in found.key_averages()),
        reverse=True,
    )
    print(f"{sum(r[0] for r in rows):9.1f} us a step in all")
    for microseconds, count, name in rows[:25]:
        print(f"{microseconds:9.1f} us {count:6.1f} x {name[:100]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", default="ptb,text8")
    parser.add_argument("--models", default="lstm,bn-lstm")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], help="override a setting: key=value")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    where = {
        "device": name,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }
    rows = []
    for config_name in arguments.configs.split(","):
        for model in arguments.models.split(","):
            found = configs.for_model(configs.read_yaml(configs.find(config_name)), model)
            endless = ["epochs=100000", "evaluate_every=100000"]
            settings = [f"precision={arguments.precision}", *endless, *arguments.set]
            config = configs.with_settings(configs.from_mapping(found), settings)
            if config.task not in TEXTS:
                parser.error(f"{config_name} is no config of {' or '.join(TEXTS)}")
            rows.append(measure(config, device, arguments.repeats, arguments.profile) | where)
            print(rows[-1], flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
