"""Runs PyTorch's own tests of `torch.nn.LSTM` on `rbn.LSTM`.

Needs expecttest and the `test` folder of PyTorch's sources, in the installed version:

    PYTHONPATH=src python benchmarks/torch_tests.py PYTORCH/test --revision "2.13.0 (a1b2c3d)"

Every test that creates an `nn.LSTM` gets an `rbn.LSTM(cell_bias=False, initial_state="zeros")`
instead. `rbn.LSTM` has no `proj_size`: an LSTM with one is torch's own, and a test that creates no
other is counted as "proj_size". Failed tests run again with torch's LSTM, to exclude those that
do not pass on this machine anyway. Writes benchmarks/results/torch-tests.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rbn

OUT = Path(__file__).parent / "results" / "torch-tests.json"
FILES = {
    "test_modules.py": "nn_LSTM_",
    "test_nn.py": "(rnn or lstm or cudnn or variable_sequence or flat_weights) and not cell",
    "nn/test_load_state_dict.py": "",
    "nn/test_packed_sequence.py": "",
    "nn/test_pruning.py": "",
}
DOUBLE_BACKWARD = "no second derivative"  # in the error
TORCH_LSTM = nn.LSTM

current: dict[str, bool] = {"ours": False, "projection": False}


class _WithProjections(type):
    """Creates torch's LSTM if `proj_size` is given."""

    def __call__(cls, *args: Any, **options: Any) -> nn.Module:
        if len(args) > 7 or options.get("proj_size"):
            current["projection"] = True
            return TORCH_LSTM(*args, **options)
        current["ours"] = True
        options.pop("proj_size", None)
        created: nn.Module = super().__call__(*args, **options)
        return created

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or isinstance(instance, TORCH_LSTM)


class _Meta(_WithProjections, type(rbn.LSTM)):  # type: ignore[misc]
    pass


class LSTM(rbn.LSTM, metaclass=_Meta):
    """`rbn.LSTM` as `torch.nn.LSTM`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, cell_bias=False, initial_state="zeros", **options)


class Recorder:
    """Keeps the outcome of each test, and whether it created an LSTM."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        current.update(ours=False, projection=False)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup" and report.passed:
            return
        if report.when == "teardown" and not report.failed:
            return
        last = str(report.longrepr).strip().splitlines() if report.failed else []
        errors = [line for line in last if line.startswith("E ")]
        self.tests[report.nodeid] = {
            **current,
            "outcome": report.outcome,
            "error": errors[0][1:].strip() if errors else "".join(last[-1:]),
        }


def run(folder: Path, file: str, selection: str, ours: bool) -> dict[str, dict[str, Any]]:
    """Run one test file in a new process. Returns the outcome of every test."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "tests.json"
        command = [sys.executable, __file__, str(folder), "--only", file, "--select", selection]
        command += ["--out", str(out), *([] if ours else ["--with-torchs"])]
        subprocess.run(command, check=False)
        tests: dict[str, dict[str, Any]] = json.loads(out.read_text())
        return tests


def run_here(folder: Path, file: str, selection: str, ours: bool, out: Path) -> None:
    if ours:
        LSTM.__module__, LSTM.__qualname__ = "torch.nn.modules.rnn", "LSTM"
        for module in (torch.nn, torch.nn.modules, torch.nn.modules.rnn):
            module.LSTM = LSTM  # type: ignore[misc]
        TORCH_LSTM.__qualname__ = "TorchLSTM"  # pickle finds classes by name
        torch.nn.modules.rnn.TorchLSTM = TORCH_LSTM
    recorder = Recorder()
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={folder}"]
    arguments += [str(folder / file), *(["-k", selection] if selection else [])]
    try:
        pytest.main(arguments, plugins=[recorder])
    finally:
        out.write_text(json.dumps(recorder.tests))


def kind(name: str, test: dict[str, Any], without: set[str]) -> str:
    """The class of one test's outcome."""
    if test["outcome"] == "skipped":
        return "skipped"
    if not test["ours"]:
        return "proj_size"
    if test["outcome"] == "passed":
        return "passed"
    if name in without:
        return "fails with torch's LSTM too"
    return "double backward" if DOUBLE_BACKWARD in test["error"] else "failed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the test folder of PyTorch's sources")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--revision", default="", help="version and commit of these sources")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--select", default="", help=argparse.SUPPRESS)
    parser.add_argument("--with-torchs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.only:
        run_here(folder, options.only, options.select, not options.with_torchs, options.out)
        return
    kinds: dict[str, str] = {}
    errors: dict[str, str] = {}
    for file, selection in FILES.items():
        tests = run(folder, file, selection, ours=True)
        tests = {n: t for n, t in tests.items() if t["ours"] or t["projection"]}
        failed = [n for n, t in tests.items() if kind(n, t, set()) == "failed"]
        without = set()
        if failed:
            names = " or ".join(name.rpartition("::")[2] for name in failed)
            again = run(folder, file, names, ours=False)
            without = {n for n in failed if again.get(n, {}).get("outcome") != "passed"}
        for name, test in tests.items():
            kinds[name] = kind(name, test, without)
            if kinds[name] in ("failed", "double backward"):
                errors[name] = test["error"][:300]
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "rbn": rbn.__version__,
        "torch": torch.__version__,
        "tests": options.revision,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "files": FILES,
        "counts": dict(sorted(Counter(kinds.values()).items())),
        "errors": errors,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["counts"], indent=2))


if __name__ == "__main__":
    main()
