"""The README says what is so."""

import re
from pathlib import Path

import torch

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
