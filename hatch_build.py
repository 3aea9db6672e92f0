"""Builds the optional compiled step of the CPU operator into the wheel.

Where there is no C compiler the wheel is built without it, for any platform, and the operator runs
on PyTorch's own operations. `RBN_BUILD_KERNEL=0` asks for that wheel. `python hatch_build.py`
builds the file in place, for running from the source folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
SOURCE = ROOT / "src/rbn/ops/cpu/kernel.c"
LIBRARY = SOURCE.with_name("_kernel.so")
# -fno-trapping-math lets comparisons become vector selects. Nothing that could lose a NaN is here.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden"]
# The threshold of constant terms, which types.py defines for all backends.
CONSTANT = re.search(r"^CONSTANT = (\S+)$", (ROOT / "src/rbn/ops/types.py").read_text(), re.M)
assert CONSTANT is not None
FLAGS += [f"-DCONSTANT={CONSTANT[1]}f"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]


def build() -> bool:
    """Compile kernel.c beside its source. Says why where that is not possible."""
    named = os.environ.get("CC", "").split()
    compilers = [named] if named else [[name] for name in ("cc", "gcc", "clang")]
    compiler = next((c for c in compilers if shutil.which(c[0])), None)
    if os.environ.get("RBN_BUILD_KERNEL") == "0" or compiler is None or os.name == "nt":
        print("rbn: building without the compiled CPU step", file=sys.stderr)
        return False
    fresh = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(fresh), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"rbn: no compiled CPU step, {compiler[0]} said:\n{done.stderr}", file=sys.stderr)
        fresh.unlink(missing_ok=True)
        return False
    fresh.replace(LIBRARY)
    return True


class KernelHook(BuildHookInterface):
    """Called by hatchling for every wheel, editable ones included."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled file and name the platform it is for."""
        if self.target_name != "wheel" or not build():
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(ROOT)))
        if version != "editable":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    sys.exit(0 if build() else 1)
