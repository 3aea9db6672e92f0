"""Builds the compiled CPU kernel into the wheel, and completes the metadata.

Without a C compiler, and on Windows, the wheel has no kernel and fits any platform
(``py3-none-any``); the operator then runs PyTorch's own operations. `RBN_BUILD_KERNEL=0` selects
that wheel. `python hatch_build.py` builds the library in place, to run from the source folder.

A release sets `RBN_REPOSITORY` to the address of the repository, and `RBN_REF` to the tag. The
README's links then become absolute, as package indexes require, and the metadata name both.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:  # run as a script
    BuildHookInterface = MetadataHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
SOURCE = ROOT / "src/rbn/ops/cpu/kernel.c"
LIBRARY = SOURCE.with_name("_kernel.so")
# -fno-trapping-math lets comparisons become vector selects. None of these flags loses a NaN.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden"]
# The threshold for constant terms, which types.py defines for all backends.
CONSTANT = re.search(r"^CONSTANT = (\S+)$", (ROOT / "src/rbn/ops/types.py").read_text(), re.M)
assert CONSTANT is not None
FLAGS += [f"-DCONSTANT={CONSTANT[1]}f"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"]


def build() -> bool:
    """Compile kernel.c next to its source. Prints the reason if that is not possible."""
    named = os.environ.get("CC", "").split()
    compilers = [named] if named else [[name] for name in ("cc", "gcc", "clang")]
    compiler = next((c for c in compilers if shutil.which(c[0])), None)
    if os.environ.get("RBN_BUILD_KERNEL") == "0":
        return _without("RBN_BUILD_KERNEL=0")
    if os.name == "nt":
        return _without("it has not been ported to Windows")
    if compiler is None:
        return _without(f"no C compiler found, looked for {', '.join(c[0] for c in compilers)}")
    fresh = LIBRARY.with_suffix(f".{os.getpid()}.tmp")
    flags = [*FLAGS, *os.environ.get("ARCHFLAGS", "").split()]
    command = [*compiler, *flags, str(SOURCE), "-o", str(fresh), "-lm"]
    environment = {**os.environ, **_oldest_macos()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        return _without(f"{compiler[0]} failed:\n{done.stderr}")
    fresh.replace(LIBRARY)
    return True


def _without(reason: str) -> bool:
    print(f"rbn: warning: building without the compiled CPU kernel: {reason}", file=sys.stderr)
    return False


def platform_tag() -> str:
    """The platform of the compiled library in a wheel's name, e.g. ``linux_x86_64``."""
    tag = sysconfig.get_platform()
    if sys.platform == "darwin" and "ARCHFLAGS" not in os.environ:
        # A universal2 Python compiles for the processor it runs on.
        tag = tag.replace("universal2", platform.machine())
    return tag.replace("-", "_").replace(".", "_")


def _oldest_macos() -> dict[str, str]:
    """The macOS version of the platform tag, as an environment variable for the compiler."""
    if sys.platform != "darwin":
        return {}
    return {"MACOSX_DEPLOYMENT_TARGET": sysconfig.get_platform().split("-")[1]}


class KernelHook(BuildHookInterface):
    """Called by hatchling for every wheel, including editable ones."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the compiled library and set the platform tag."""
        if self.target_name != "wheel" or not build():
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(ROOT)))
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"


class ReadmeHook(MetadataHookInterface):
    """Called by hatchling for the metadata of every distribution."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README and the project's addresses."""
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        urls = {"Paper": "https://arxiv.org/abs/1603.09025"}
        repository = os.environ.get("RBN_REPOSITORY", "").rstrip("/")
        if repository:
            ref = os.environ.get("RBN_REF") or "main"
            text = with_absolute_links(text, repository, ref)
            urls["Repository"] = repository
            urls["Issues"] = f"{repository}/issues"
            urls["Changelog"] = f"{repository}/blob/{ref}/CHANGELOG.md"
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = urls


def with_absolute_links(text: str, repository: str, ref: str) -> str:
    """Turn relative Markdown links and images into absolute links to a repository."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({repository}/{kind}/{ref}/{link[1]})"

    return re.sub(r"\]\((?!\w+://|#)([^)]+)\)", absolute, text)


if __name__ == "__main__":
    sys.exit(0 if build() else 1)
