"""The runner of the GPU tests: how it reads their outcomes, without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rbn

NAMES = [
    "tests/ops/test_a.py::test_one[a b]",
    "tests/ops/test_a.py::test_two",
    "tests/ops/test_b.py::test_the_same_bits_every_time[x]",
    "tests/ops/test_b.py::test_four",
    "tests/ops/test_b.py::test_five",
]
LOGS = [
    """
tests/ops/test_a.py::test_one[a b] PASSED                                [ 50%]
tests/ops/test_b.py::test_the_same_bits_every_time[x] PASSED             [100%]
""",
    """
tests/ops/test_a.py::test_two FAILED                                     [ 50%]
tests/ops/test_b.py::test_four SKIPPED (needs Hopper)                    [100%]
=========================== short test summary info ============================
FAILED tests/ops/test_a.py::test_two - AssertionError: gradient of wx: 0.5
""",
]
DEMO = {"test": 0.94, "images": 300, "seconds": 3.0}


@pytest.fixture
def tests(bench):
    return bench("gpu_tests")


def test_outcomes(tests):
    found = tests.outcomes(NAMES, LOGS)
    assert (found["tests"], found["passed"], found["skipped"]) == (5, 2, 1)
    assert found["failed"] == ["tests/ops/test_a.py::test_two: AssertionError: gradient of wx: 0.5"]
    assert found["unfinished"] == ["tests/ops/test_b.py::test_five"]
    assert found["same_bits_every_time"] == {"test_the_same_bits_every_time[x]": "passed"}


@pytest.mark.slow
def test_outcomes_of_real_tests(tests, tmp_path):
    """In the format that pytest currently writes."""
    file = Path(__file__).relative_to(tests.ROOT)
    names = [f"{file}::test_outcomes", f"{file}::test_that_is_not_there"]
    done = tests.run_tests(names[:1], 120, tests.run)
    assert done.rc == 0, done.output
    found = tests.outcomes(names, [done.output])
    assert found["passed"] == 1
    assert found["unfinished"] == names[1:]


@pytest.mark.slow
def test_a_process_is_stopped_at_its_time(tests):
    script = "import os, time; print(os.environ['WHO'], flush=True); time.sleep(600)"
    for limit in (2, 60):  # the second on a machine so busy that nothing was printed by then
        done = tests.run([sys.executable, "-c", script], limit, WHO="me")
        assert done.rc is None
        if done.output:
            break
    assert done.output == "me\n"
    assert tests.last_json(done) == {"error": "stopped at its time"}


@pytest.mark.slow
def test_what_a_stopped_process_started_is_stopped_too(tests, tmp_path):
    """Such as a program that compute-sanitizer runs."""
    beat = f"""import time
for n in range(6000):
    open({str(tmp_path / "beat")!r}, "w").write(str(n))
    time.sleep(0.1)"""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {beat!r}])"
    for limit in (3, 60):  # the second on a machine so busy that nothing was started by then
        assert tests.run([sys.executable, "-c", script], limit).rc is None
        if (tmp_path / "beat").exists():
            break
    last = (tmp_path / "beat").read_text()
    time.sleep(0.5)
    assert (tmp_path / "beat").read_text() == last


def test_what_a_case_prints(tests):
    assert tests.last_json(tests.Done(0, 'words\n{"seconds": 2}\n', 3.0)) == {"seconds": 2}
    found = tests.last_json(tests.Done(1, "a\nOops: no card\n", 3.0))
    assert found == {"error": "exit 1: a | Oops: no card"}


def demos(cuda, cpu):
    def runs(accuracy):
        return {f"seed {k}": DEMO | {"test": accuracy} for k in (1, 2)}

    return {
        device: {"LSTM": runs(0.8), "BN-LSTM": runs(accuracy)}
        for device, accuracy in (("cuda", cuda), ("cpu", cpu))
    }


def test_the_demo_is_judged_by_its_standard_error(tests):
    found = tests.compare_demos(demos(0.95, 0.94))
    assert found["same"]
    assert found["BN-LSTM"]["cuda"] == 0.95
    assert 0.03 < found["BN-LSTM"]["two_standard_errors"] < 0.04
    assert not tests.compare_demos(demos(0.85, 0.94))["same"]
    broken = demos(0.95, 0.94)
    broken["cuda"]["LSTM"]["seed 2"] = {"error": "exit 1"}
    assert not tests.compare_demos(broken)["same"]


@pytest.mark.parametrize(
    ("rc", "output", "outcome"),
    [
        (0, '{"ran": ["bf16 LSTM"]}\n===== ERROR SUMMARY: 0 errors', "clean"),
        (0, '{"ran": []}\n===== ERROR SUMMARY: 0 errors', "not run"),
        (0, "===== ERROR SUMMARY: 0 errors", "failed"),  # nothing ran
        (9, "===== Invalid read\n===== ERROR SUMMARY: 2 errors", "errors"),
        (1, "Device not supported", "failed"),
        (None, "===== COMPUTE-SANITIZER", "stopped"),
    ],
)
def test_the_sanitizers_words(bench, tests, rc, output, outcome):
    commands = []

    def run(command, timeout, **environment):
        commands.append((command, environment))
        return tests.Done(rc, output, 1.0)

    check = bench("gpu_sanitizer").check_tool
    found = check("/x/compute-sanitizer", "memcheck", "small", "case.py", run, 9)
    assert found["outcome"] == outcome
    assert ("log" in found) == (outcome not in ("clean", "not run"))
    ((command, environment),) = commands
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"]
    assert command[-3:] == ["case.py", "kernels", "small"]
    assert environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_an_absent_sanitizer_is_said(bench, monkeypatch):
    sanitizer = bench("gpu_sanitizer")
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitizer.glob, "glob", lambda pattern, recursive: [])
    assert sanitizer.find_sanitizer() is None
    found = sanitizer.check_tool(None, "racecheck", "small", "case.py", None, 9)
    assert found["outcome"] == "absent"
    assert sanitizer.version(None, None) == "absent"


RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at small_forward+0x6250
=========     and Read access at small_forward+0x3b10 [256 hazards]
=========     and Read access at small_forward+0x3b00 [128 hazards]
=========
========= Warning: (Warp Level Programming) Race reported between \
Read access at void f<(int)2>(float *)+0x44f0 in f.cu:3
=========     and Write access at void f<(int)2>(float *)+0x6630 in f.cu:9 [64 hazards]
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:  [0x1] in libcuda.so.1
========= Error: Race reported between Write access at small_forward+0x6250
=========     and Read access at small_forward+0x3b00 [32 hazards]
=========     and Read access at small_forward+0x3b10 [16 hazards]
========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)
"""


def test_races_are_listed_once_with_their_places(bench, tests):
    sanitizer = bench("gpu_sanitizer")
    commands = []

    def run(command, timeout):
        commands.append(command)
        return tests.Done(9, RACES, 1.0)

    found = sanitizer.check_tool("x", "racecheck", "small", "case.py", run, 9)
    assert commands[0][-3:] == ["kernels", "small", "--all-wait"]
    assert found["words"] == "3 hazards displayed (2 errors, 1 warning)"
    assert found["races"] == [
        {
            "kernel": "small_forward",
            "severity": "error",
            "between": "write 0x6250",
            "and": "read 0x3b00, read 0x3b10",
            "hazards": 432,
            "launches": 2,
        },
        {
            "kernel": "void f<(int)2>(float *)",
            "severity": "warning",
            "between": "read 0x44f0",
            "and": "write 0x6630",
            "hazards": 64,
            "launches": 1,
        },
    ]


def test_everything_in_one_summary(bench, tests):
    """With processes that answer immediately."""
    seen = []

    def run(command, timeout, **environment):
        seen.append(command)
        if "pytest" in command:
            given = [c for c in command if c.startswith("tests/")]
            return tests.Done(0, "".join(f"{name} PASSED [1%]\n" for name in given), 1.0)
        if "first" in command:
            assert environment["RBN_CACHE"] != environment["TRITON_CACHE_DIR"]
            return tests.Done(0, '{"seconds": 2.5}', 4.0)
        return tests.Done(0, json.dumps(DEMO), 1.0)

    summary = tests.everything(3, 60, run, lambda: NAMES, lambda: None)
    assert summary["passed"] == summary["tests"] == 5
    assert summary["processes"] == 3
    families = bench("gpu_sanitizer").FAMILIES
    absent = summary["compute_sanitizer"]
    assert absent["version"] == "absent"
    assert {absent[f][tool]["outcome"] for f in families for tool in absent[f]} == {"absent"}
    assert summary["first_call"]["ptb, bf16"] == {"seconds": 2.5}
    assert summary["digits_demo"]["same"]
    assert tests.passed(summary)
    json.dumps(summary)
    assert sum("demo" in command for command in seen) == 8
    for wrong in (
        {"failed": ["x"]},
        {"unfinished": ["x"]},
        {"compute_sanitizer": absent | {"wide": {"racecheck": {"outcome": "errors"}}}},
        {"digits_demo": {"same": False}},
        {"first_call": {"ptb": {"error": "exit 1"}}},
    ):
        assert not tests.passed(summary | wrong), wrong


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in rows that fill a tile
def test_the_case_for_the_sanitizer(bench):
    """Runs its layers, in Triton's interpreter without a GPU; wrong results are detected."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    case = bench("gpu_case")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with rbn.backend("gpu"):
        case.compare(rbn.BatchNormLSTM(3, 4).to(device))
        case.compare(rbn.LayerNormLSTM(3, 4).to(device))
        case.compare(rbn.BatchNormRNN(3, 4).to(device))
        case.compare(rbn.BatchNormGRU(3, 4).to(device))
        case.train_on_symbols(device)
        case.train_zoned(device)

    class Wrong(rbn.LSTM):
        def forward(self, *args, **options):
            output, states = super().forward(*args, **options)
            return output * (1 if self.weight_hh_l0.dtype == torch.float64 else 1.2), states

    with pytest.raises(AssertionError, match="the output is off by"):
        case.compare(Wrong(3, 4).to(device))


@pytest.mark.slow
def test_failures_are_told_at_once(tmp_path):
    """Also if the process does not reach its summary."""
    file = tmp_path / "test_it.py"
    file.write_text(
        "def test_a():\n    assert 1 == 2, 'why'\ndef test_b():\n    import os; os._exit(3)"
    )
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-v", "-p", "gpu_report", file]
    folder = str(Path(__file__).parents[2] / "benchmarks")
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": folder},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "test_it.py::test_a FAILED" in done.stdout
    assert re.search(r"^\| E +AssertionError: why", done.stdout, re.M)
