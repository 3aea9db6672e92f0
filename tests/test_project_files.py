"""Files for GitHub and for citation: they parse, and the files they name exist."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import rbn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))


def workflow(path: Path) -> dict:
    found = yaml.safe_load(path.read_text())
    found["on"] = found.pop(True)  # YAML 1.1 reads `on` as true
    return found


def steps(path: Path) -> list[dict]:
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


def commands(path: Path) -> list[str]:
    return [line for step in steps(path) for line in step.get("run", "").splitlines()]


def test_there_is_a_workflow_for_tests_and_one_for_releases():
    assert [path.name for path in WORKFLOWS] == ["release.yml", "test.yml"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_complete(path):
    found = workflow(path)
    assert found["name"]
    assert found["on"]
    for job in found["jobs"].values():
        assert job["runs-on"]
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            assert re.fullmatch(r"[\w-]+/[\w-]+@\S+", step.get("uses", "owner/action@v1"))
    needed = {name for job in found["jobs"].values() for name in job.get("needs", [])}
    assert needed <= found["jobs"].keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_commands_of_workflows_exist(path):
    for command in commands(path):
        words = command.split()
        if words[0] == "make":
            assert words[1] in TARGETS, command
        elif words[0] == "python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), command
        elif "/" in words[0]:
            assert (ROOT / words[0]).is_file(), command
            assert "make test" in (ROOT / words[0]).read_text()


def test_the_release_builds_every_platform_and_publishes_without_a_secret():
    path = GITHUB / "workflows" / "release.yml"
    jobs = workflow(path)["jobs"]
    platforms = {one["platform"] for one in jobs["wheels"]["strategy"]["matrix"]["include"]}
    assert platforms == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"}
    assert any("cibuildwheel" in step.get("uses", "") for step in jobs["wheels"]["steps"])
    assert any("--sdist" in command for command in commands(path))
    publish = jobs["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "refs/tags/v" in publish["if"]
    assert set(publish["needs"]) == {"wheels", "sdist"}
    assert "secrets." not in path.read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    env = jobs["wheels"]["steps"][2]["env"]["CIBW_BUILD"]
    assert env.startswith(settings["build"].removesuffix("*"))


@pytest.mark.parametrize("name", ["bug_report", "feature_request"])
def test_issue_templates(name):
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    identifiers = [field["id"] for field in form["body"]]
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["attributes"]["label"] for field in form["body"])


def test_make_targets_of_the_pull_request_template_exist():
    named = re.findall(r"`make ([a-z-]+)`", (GITHUB / "pull_request_template.md").read_text())
    assert named
    assert set(named) <= TARGETS


def test_the_citation_is_that_of_this_version_and_of_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == rbn.__version__
    assert cited["license"] == "Apache-2.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [author["name"] for author in cited["authors"]] == [
        author["name"] for author in project["authors"]
    ]
    paper = cited["preferred-citation"]
    assert paper["url"] in (ROOT / "hatch_build.py").read_text()
    readme = (ROOT / "README.md").read_text()
    assert paper["title"] in readme
    assert all(author["family-names"] for author in paper["authors"])
    released = re.search(r"^## \[(\S+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released is not None
    assert released.groups() == (rbn.__version__, str(cited["date-released"]))
