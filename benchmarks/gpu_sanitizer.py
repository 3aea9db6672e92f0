"""compute-sanitizer: where it is, and what it says of a script."""

import glob
import re
import shutil
import sys
from pathlib import Path

import torch

TOOLS = ("memcheck", "racecheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


def find_sanitizer():
    """The binary: on the PATH, in a CUDA toolkit, or in a Python package; None without any."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    site = Path(torch.__file__).parents[1]
    patterns = [
        "/usr/local/cuda*/bin/compute-sanitizer",
        "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
        "/opt/nvidia/**/compute-sanitizer",
        f"{site}/nvidia/**/compute-sanitizer",
        f"{site}/triton/**/compute-sanitizer",
    ]
    for pattern in patterns:
        for path in sorted(glob.glob(pattern, recursive=True)):
            if Path(path).is_file():
                return path
    return None


def check_tool(binary, tool, script, run, timeout):
    """The outcome of one tool: clean, errors, absent, stopped, or failed, with its own words."""
    if binary is None:
        return {"outcome": "absent", "words": "no compute-sanitizer was found"}
    command = [binary, "--tool", tool, "--error-exitcode", "9", "--print-limit", "60"]
    # Each tensor its own allocation, so that a read beyond one is seen.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else {}
    done = run([*command, sys.executable, str(script), "kernels"], timeout, **alone)
    summary = _SUMMARY.findall(done.output)
    ran = '"ran"' in done.output
    if done.rc is None:
        outcome = "stopped"
    elif done.rc == 0 and ran and summary:
        outcome = "clean"
    elif done.rc == 9 and summary:
        outcome = "errors"
    else:
        outcome = "failed"
    found = {"outcome": outcome, "words": "; ".join(summary), "seconds": done.seconds}
    if outcome in ("errors", "failed", "stopped"):
        marked = [line for line in done.output.splitlines() if line.startswith("=====")]
        # Whose call it was says nothing of a kernel, and an error has dozens of such lines.
        marked = [line for line in marked if "Host Frame" not in line and line.strip("= ")]
        found["log"] = (marked or done.output.splitlines())[:80]
    return found
