"""The distribution: contents of the wheel, its dependencies, and imports between parts."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rbn

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
    "__init__": {"ops", "nn", "pretrained_models"},
    "integrations": {"nn"},
    "models": {"ops", "nn"},
    "pretrained_models": {"nn", "models", "data"},
    "data": {"ops", "nn"},
    "training": {"ops", "nn", "__init__"},
    "experiments": {"ops", "nn", "__init__", "models", "data", "training"},
    "cli": {"ops", "nn", "__init__", "models", "data", "training", "experiments"}
    | {"pretrained_models"},
    "__main__": {"cli"},
}

# Distributions whose import name differs. CUDA builds of torch bring triton.
DISTRIBUTION_OF = {
    "pytorch_lightning": "lightning",  # which installs it
    "sklearn": "scikit-learn",
    "triton": "torch",
    "yaml": "PyYAML",
}

# Must be hidden from a process that only has torch, however they were installed.
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

from rbn.cli import main

sys.argv = ["rbn", "--version"]
main()
"""


def finished(
    *arguments: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, f"{arguments[:4]}\n{done.stdout}\n{done.stderr}"
    return done


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    return finished(*arguments, cwd=cwd, **environment).stdout


def distributions_torch_brings() -> set[str]:
    found, queue = set(), ["torch"]
    while queue:
        name = canonicalize_name(queue.pop())
        if name in found:
            continue
        found.add(name)
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # uninstalled, as by `make test-oldest`
            continue
        for line in required:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                queue.append(requirement.name)
    return found


def hidden_modules() -> set[str]:
    """Top-level names of everything that is installed, except torch and its requirements."""
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


# Files that the tests read besides the package.
TRACKED_PARTS = (
    *("benchmarks", "docs", "results", "tests", ".github", "CHANGELOG.md", "CITATION.cff"),
    *("CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt", "hatch_build.py"),
)

SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.fixture(scope="module")
def wheel(make_once: Callable[..., Path]) -> Path:
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir")
    folder = make_once("wheel", lambda folder: run(*build, str(folder)))
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
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
    others = [
        p
        for kind in ("*.cu", "*.cuh", "*.yaml", "*.html", "*.css", "*.json", "*.safetensors")
        for p in PACKAGE.rglob(kind)
    ]
    assert len(others) >= 10
    expected = {f"rbn/{path.relative_to(PACKAGE).as_posix()}" for path in (*SOURCES, *others)}
    assert expected <= names, f"not in the wheel: {sorted(expected - names)}"
    parts = {part for name in names for part in name.split("/")}
    assert not [part for part in parts if part == "tests" or part.startswith("test_")]


@pytest.mark.slow
def test_wheel_has_the_compiled_step_where_there_is_a_compiler(wheel: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler: the wheel is a pure one")
    with zipfile.ZipFile(wheel) as archive:
        assert "rbn/ops/cpu/_kernel.so" in archive.namelist()
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


@pytest.mark.parametrize(
    ("reason", "warning"),
    [
        ({"RBN_BUILD_KERNEL": "0"}, "RBN_BUILD_KERNEL=0"),
        ({"CC": "no-such-compiler"}, "no-such-compiler"),
        ({"CC": "false"}, "false failed"),
    ],
)
def test_wheel_without_a_compiler_is_for_any_platform(
    tmp_path: Path, reason: dict, warning: str
) -> None:
    build = ("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path))
    printed = finished(*build, **reason).stderr
    assert "warning" in printed
    assert warning in printed
    (path,) = tmp_path.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.slow
def test_installed_wheel_needs_torch_alone(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    run(
        *("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"),
        *("--target", str(target), str(wheel)),
    )
    hidden = json.dumps(sorted(hidden_modules()))
    # -I: neither the current folder nor PYTHONPATH can provide the source tree.
    printed = run("-I", "-c", TORCH_ALONE, str(target), hidden, cwd=tmp_path)
    assert printed == f"rbn {rbn.__version__}\n"
    assert wheel.name.startswith(f"recurrent_batchnorm-{rbn.__version__}-")


@pytest.fixture
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_is_compiled_on_windows(
    hook: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("RBN_BUILD_KERNEL", raising=False)
        patch.setattr("os.name", "nt")
        built = hook.build()
    assert not built
    assert "Windows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("platform", "archflags", "expected"),
    [
        ("linux-x86_64", None, "linux_x86_64"),
        ("macosx-11.0-arm64", None, "macosx_11_0_arm64"),
        ("macosx-10.9-universal2", None, "macosx_10_9_arm64"),
        ("macosx-10.9-universal2", "-arch arm64 -arch x86_64", "macosx_10_9_universal2"),
    ],
)
def test_the_platform_tag_is_that_of_the_compiled_file(
    hook: Any,
    platform: str,
    archflags: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sysconfig.get_platform", lambda: platform)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("sys.platform", "darwin" if "mac" in platform else "linux")
    monkeypatch.delenv("ARCHFLAGS", raising=False)
    if archflags is not None:
        monkeypatch.setenv("ARCHFLAGS", archflags)
    assert hook.platform_tag() == expected
    wanted = {} if "linux" in platform else {"MACOSX_DEPLOYMENT_TARGET": platform.split("-")[1]}
    assert hook._oldest_macos() == wanted


@pytest.mark.slow
def test_wheel_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel and the packages installed here, without the editable install of rbn."""
    if wheel.name.endswith("-any.whl"):
        pytest.skip("no C compiler: the wheel is a pure one")
    run("-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = tmp_path / "venv" / "bin" / "python"
    install = ("install", "--quiet", "--no-index", "--no-deps", "--no-compile", str(wheel))
    run("-m", "pip", "--python", str(python), *install)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # Packages of that folder become visible, but not the folders in its .pth files.
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [str(python), str(ROOT / "tests" / "check_wheel.py")],
        [str(tmp_path / "venv" / "bin" / "rbn"), "--version"],
    ):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"rbn {rbn.__version__}")


@pytest.fixture(scope="module")
def sdist(make_once: Callable[..., Path]) -> Path:
    build = ("-m", "build", "--sdist", "--no-isolation", "--outdir")
    folder = make_once("sdist", lambda folder: run(*build, str(folder)))
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.mark.slow
def test_the_description_can_be_shown(wheel: Path, sdist: Path) -> None:
    pytest.importorskip("twine")
    printed = run("-m", "twine", "--no-color", "check", "--strict", str(wheel), str(sdist))
    assert printed.count("PASSED") == 2


@pytest.mark.slow
def test_the_source_distribution_passes_its_tests(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.10.12 and 3.11.4
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    (folder,) = tmp_path.iterdir()
    missing = [name for name in TRACKED_PARTS if not (folder / name).exists()]
    assert not missing
    files = ("test_readme.py", "nn/test_like_torch.py", "test_project_files.py")
    run(
        *("-m", "pytest", "--fast", "-p", "no:cacheprovider", "-p", "no:xdist"),
        *(f"tests/{name}" for name in files),
        cwd=folder,
        PYTHONPATH=str(folder / "src"),
    )


@pytest.mark.slow
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
    """Requirements of the package and its extras except those for development; those on request."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"]]
    named = [extra for extra in extras if dev or extra not in ("dev", "docs")]
    lines += [line for extra in named for line in extras[extra]]
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


@pytest.mark.parametrize("address", ["https://forge.example/group/rbn", ""])
def test_links_of_the_description_are_absolute_in_a_release(address, monkeypatch):
    monkeypatch.setenv("RBN_REPOSITORY", address)
    monkeypatch.setenv("RBN_REF", "v9.9")
    hatch = pytest.importorskip("hatchling.metadata.core")
    plugins = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    core = hatch.ProjectMetadata(str(ROOT), plugins).core
    targets = re.findall(r"\]\(([^)]+)\)", core.readme)
    assert len(targets) > 20
    relative = [target for target in targets if "://" not in target and target[0] != "#"]
    if not address:
        assert relative
        assert "Repository" not in core.urls
        return
    assert not relative
    assert core.urls["Repository"] == address
    for target in (core.urls["Changelog"], *targets):
        if target.startswith(address):
            kind, path = re.match(rf"{address}/(blob|raw)/v9\.9/([^#]+)", target).groups()
            assert (ROOT / path).exists(), path
            assert (kind == "raw") == path.endswith(".png")
