"""The commit in a result is of this project, or unknown."""

import shutil
import subprocess

import pytest

from rbn.experiments import results

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
_AUTHOR = ("-c", "user.name=someone", "-c", "user.email=someone@example.org")


@pytest.fixture
def git(tmp_path, monkeypatch):
    """Runs git in a new repository with one commit, with the package in its folder ``own``."""
    monkeypatch.delenv("RBN_COMMIT", raising=False)

    def run(*words):
        command = ["git", *_AUTHOR, *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    run("init", "--quiet")
    (tmp_path / "theirs.txt").touch()
    run("add", "theirs.txt")
    run("commit", "--quiet", "-m", "first")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "results.py").touch()
    monkeypatch.setattr(results, "__file__", str(tmp_path / "own" / "results.py"))
    return run


@pytest.mark.parametrize("ignored", [False, True])
def test_installed_inside_of_another_project(git, tmp_path, ignored):
    if ignored:
        (tmp_path / ".gitignore").write_text("own/\n")
    assert results.commit() == "unknown"


def test_in_a_clone(git, tmp_path):
    git("add", "own")
    git("commit", "--quiet", "-m", "second")
    head = git("rev-parse", "--short=10", "HEAD").stdout.strip()
    assert results.commit() == head
    (tmp_path / "theirs.txt").write_text("changed")
    assert results.commit() == f"{head}-dirty"


def test_what_is_said_counts(git, monkeypatch):
    monkeypatch.setenv("RBN_COMMIT", "0123456")
    assert results.commit() == "0123456"


def test_outside_of_any_repository(tmp_path, monkeypatch):
    monkeypatch.delenv("RBN_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    assert results.commit() == "unknown"
