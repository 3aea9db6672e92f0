"""The machine that a benchmark ran on."""

import contextlib
import platform
from pathlib import Path


def cpu():
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.machine()
