"""Made-up results for the tests, in the format of `rbn publish`."""

import json

from rbn.experiments import config as configs
from rbn.experiments.config import Config
from rbn.experiments.task_kinds import TASKS


def publish(
    folder,
    task="ptb",
    model="lstm",
    tag="short",
    seed=1,
    test=1.4,
    values=(1.9, 1.5, 1.4),
    nats=None,
    **more,
):
    """A result and a learning curve in the format of `rbn publish`. nats: with losses."""
    base = configs.published(task) if task in TASKS else {"task": task}
    reader = {"data": {"sentences": more.pop("sentences")}} if "sentences" in more else {}
    config = json.loads(Config(**{**configs.published("ptb"), "task": "ptb"}).to_json())
    config |= base | reader | {"task": task, "model": model, "tag": tag}
    path = folder / task / f"{model}{'-' + tag if tag else ''}-seed{seed}.json".replace("*", "x")
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "task": task,
        "model": model,
        "tag": tag,
        "seed": seed,
        "metric": "some",
        "valid": test,
        "test": test,
        "steps": 300,
        "seconds": 60.0,
        "together": 1,
        "config": config,
        "versions": "rbn 0",
        "gpu": None,
        "commit": "abc",
        "command": f"rbn train {task} --model {model} --seed {seed}",
        "date": "2020-01-01",
        **more,
    }
    path.write_text(json.dumps(result))
    lines = ["step,seconds,train,valid_batch,valid_population"]
    lines[0] += ",valid_batch_nats,valid_population_nats" if nats else ""
    for k, value in enumerate(values, 1):
        population = value if model == "lstm" else value - 0.05
        lines.append(f"{100 * k},{k},{2 / k},{value},{population}")
        lines[-1] += f",{nats[k - 1]},{nats[k - 1] + 0.1}" if nats else ""
    path.with_suffix(".csv").write_text("\n".join(lines) + "\n")
    return path


def fill(folder):
    """Both models on Penn Treebank with two seeds, and a sweep of one gamma."""
    for seed in (1, 2):
        publish(folder, seed=seed, test=1.37 + 0.02 * seed)
        publish(folder, model="bn-lstm", seed=seed, test=1.31 + 0.01 * seed)
    publish(folder, model="bn-lstm", tag="gamma-0.3")
    return folder
