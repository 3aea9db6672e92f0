"""The README's claims hold."""

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rbn.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["prediction"].shape == (30, 1, 32)
    assert names["prediction"].isfinite().all()
    assert names["layer"].stats_h_l0.count.tolist() == [5] * 20
    assert not names["layer"].training
    assert isinstance(names["h"], torch.Tensor)


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 5
    for link in links:
        if link.startswith("http"):
            continue
        assert (ROOT / link).exists(), link


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_it_is_short():
    assert len(README.splitlines()) <= 130


@pytest.mark.slow
def test_the_output_of_a_command_is_that_of_the_page():
    commands = re.findall(r"^    \$ rbn (evaluate .*?)(?:  +#.*)?\n    (.*)$", README, re.M)
    assert commands
    for command, shown in commands:
        done = CliRunner().invoke(app, command.split())
        assert shown in done.output.splitlines()
