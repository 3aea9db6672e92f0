"""The distribution: what the wheel holds, what it needs, and who may import whom."""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "rbn"

# Which parts of the package each part may import. "__init__" is the public `rbn` itself.
MAY_IMPORT = {
    "ops": set(),
    "nn": {"ops"},
    "__init__": {"ops", "nn"},
    "integrations": {"nn"},
    "models": {"ops", "nn", "__init__"},
    "data": {"ops", "nn", "__init__"},
    "training": {"ops", "nn", "__init__"},
    "experiments": {"ops", "nn", "__init__", "models", "data", "training"},
    "cli": {"ops", "nn", "__init__", "models", "data", "training", "experiments"},
    "__main__": {"cli"},
}

# Distributions whose import name differs. CUDA builds of torch bring triton.
DISTRIBUTION_OF = {
    "pytorch_lightning": "lightning",  # which brings it
    "sklearn": "scikit-learn",
    "triton": "torch",
    "yaml": "PyYAML",
}

# Must be hidden from a process that has torch alone, however they were installed.
NEVER_NEEDED = {
    *("numpy", "rich", "typer", "sklearn", "matplotlib", "safetensors"),
    *("yaml", "lightning", "torchmetrics", "tensorboard", "optuna"),
    *("pytorch_lightning", "transformers", "accelerate", "skorch"),
}

TORCH_ALONE = """
import json, sys, warnings
target, hidden = sys.argv[1], set(json.loads(sys.argv[2]))
hidden -= {name.partition(".")[0] for name in sys.modules}  # the interpreter's own, by .pth files

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in hidden:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hide, sys.meta_path)
sys.path.insert(0, target)
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
import rbn

assert rbn.__file__.startswith(target), rbn.__file__
assert "torch._dynamo" not in sys.modules  # the compiler takes as long as the rest of torch
layer = rbn.BatchNormLSTM(3, 5)
output, (h, c) = layer(torch.randn(4, 2, 3))
assert output.shape == (4, 2, 5), output.shape
output.sum().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
loaded = hidden & {name.partition(".")[0] for name in sys.modules}
assert not loaded, loaded
print(rbn.__version__)
"""


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{arguments[:4]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def distributions_torch_brings() -> set[str]:
    found, queue = set(), ["torch"]
    while queue:
        name = canonicalize_name(queue.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # taken away, as by `make test-oldest`
            continue
        for line in required:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


def hidden_modules() -> set[str]:
    """Top-level names of all that is installed, less torch and what torch itself requires."""
    brought = distributions_torch_brings()
    installed = metadata.packages_distributions()
    others = {
        module
        for module, owners in installed.items()
        if not brought & {canonicalize_name(owner) for owner in owners}
    }
    return (others | NEVER_NEEDED) - {"rbn"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, anywhere in it, by absolute dotted name."""
    package = ("rbn", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from (f"{module}.{alias.name}" for alias in node.names)


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        assert "rbn = rbn_script:main" in archive.read(entry_points).decode()
    assert "rbn/py.typed" in names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {
        "rbn",
        "rbn_script.py",
        "recurrent_batchnorm",
    }
    others = [p for kind in ("*.cu", "*.cuh", "*.yaml", "*.html") for p in PACKAGE.rglob(kind)]
    assert len(others) >= 10
    expected = {f"rbn/{path.relative_to(PACKAGE).as_posix()}" for path in (*SOURCES, *others)}
    assert expected <= names, f"not in the wheel: {sorted(expected - names)}"
    parts = {part for name in names for part in name.split("/")}
    assert not [part for part in parts if part == "tests" or part.startswith("test_")]


def test_wheel_has_the_compiled_step_where_there_is_a_compiler(wheel: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler: the wheel is a pure one")
    with zipfile.ZipFile(wheel) as archive:
        assert "rbn/ops/cpu/_kernel.so" in archive.namelist()
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


@pytest.mark.parametrize("reason", [{"RBN_BUILD_KERNEL": "0"}, {"CC": "no-such-compiler"}])
def test_wheel_without_a_compiler_is_for_any_platform(tmp_path: Path, reason: dict) -> None:
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), **reason)
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_installed_wheel_needs_torch_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(
        *("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"),
        *("--target", str(target), str(wheel)),
    )
    hidden = json.dumps(sorted(hidden_modules()))
    # -I: neither the current folder nor PYTHONPATH can lend it the source tree.
    version = run("-I", "-c", TORCH_ALONE, str(target), hidden, cwd=tmp_path).strip()
    assert wheel.name.startswith(f"recurrent_batchnorm-{version}-")


def test_command_shows_its_help() -> None:
    assert "demo" in run("-m", "rbn", "--help")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} has no place in the order of imports; give it one"
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top != "rbn":
            continue
        imported = rest[0] if rest and rest[0] in MAY_IMPORT else "__init__"
        assert imported == part or imported in MAY_IMPORT[part], f"{part} imports {name}"


def declared_dependencies(dev: bool = False) -> list[Requirement]:
    """Of the package and all its extras; of `dev` on request."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"]]
    lines += [line for extra in extras if dev or extra != "dev" for line in extras[extra]]
    return [Requirement(line) for line in lines]


def test_the_oldest_versions_are_those_that_are_declared() -> None:
    lines = (ROOT / "constraints-oldest.txt").read_text().partition("\n\n")[0].splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    declared = {found.name: str(found.specifier) for found in declared_dependencies()}
    assert declared.keys() == oldest.keys()
    for name, version in oldest.items():
        least = declared[name].removeprefix(">=")
        assert f"{version}.".startswith(f"{least}."), name


def test_declared_dependencies_cover_the_imports() -> None:
    own = {"rbn", *sys.stdlib_module_names}
    tools = [path for path in SOURCES if part_of(path) == "integrations"]  # their users have them
    for paths, dev in ((set(SOURCES) - set(tools), False), (tools, True)):
        declared = {canonicalize_name(found.name) for found in declared_dependencies(dev)}
        imported = {name.partition(".")[0] for path in paths for name in imports_of(path)} - own
        needed = {canonicalize_name(DISTRIBUTION_OF.get(name, name)) for name in imported}
        assert needed <= declared, f"imported, in no extra: {sorted(needed - declared)}"
