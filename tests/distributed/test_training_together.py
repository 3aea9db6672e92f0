"""Training with two processes matches one: same results, one checkpoint, common decisions."""

import json
import re

import pytest
import torch
import training_cases as cases

from rbn.experiments import results
from rbn.training import checkpoint

# The models are in float64, but losses are computed from float32 logits (eps 1.2e-7). Their
# rounding goes through a few steps of Adam, and differed by 2e-7 at most.
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def together(pair):
    return [{k.removeprefix("training "): v for k, v in found.items()} for found in pair]


@pytest.mark.parametrize("name", cases.RUNS)
def test_the_run_of_two_is_that_of_one(name, together, pair_folder, tmp_path):
    trainer = cases.run(name, tmp_path)
    result = results.finish(cases.settings(*cases.RUNS[name]), 1, trainer, "")
    history, second = (found[f"run {name}"] for found in together)
    alone = trainer.progress.history
    assert len(history) == len(alone) >= 2
    for one, two, other in zip(alone, history, second, strict=True):
        assert one.keys() == two.keys() == other.keys()
        for key in one.keys() - {"seconds"}:
            assert two[key] == pytest.approx(one[key], rel=TOLERANCE)
            assert two[key] == other[key]
    written = json.loads((pair_folder / name / "result.json").read_text())
    assert (written["devices"], result["devices"]) == (2, 1)
    for key in ("valid", "valid_batch", "test", "test_batch"):
        assert written[key] == pytest.approx(result[key], rel=TOLERANCE)
    assert_same_file(pair_folder / name / "last.safetensors", tmp_path / "last.safetensors")
    for file in ("final", "best"):
        one, two = (
            checkpoint.load(folder / f"{file}.safetensors")[0]
            for folder in (tmp_path, pair_folder / name)
        )
        assert {k: v.shape for k, v in one.items()} == {k: v.shape for k, v in two.items()}


def assert_same_file(two, one):
    (tensors, metadata), (tensors2, metadata2) = checkpoint.load(two), checkpoint.load(one)
    assert metadata.keys() == metadata2.keys()
    assert metadata["progress"].keys() == metadata2["progress"].keys()
    assert metadata["seed"] == metadata2["seed"]
    assert {k: (v.shape, v.dtype) for k, v in tensors.items()} == {
        k: (v.shape, v.dtype) for k, v in tensors2.items()
    }
    for name, value in tensors.items():
        if name.endswith("count"):
            assert torch.equal(value, tensors2[name]), name


def test_going_on_with_another_number(together, pair_folder, tmp_path):
    assert [found["one, then two"] for found in together] == [6, 6]
    assert [found["two, then one"] for found in together] == [3, 3]
    whole = cases.run("digits", tmp_path).progress.history
    other = cases.run("digits", pair_folder / "two-then-one").progress.history
    lines = (pair_folder / "one-then-two" / "metrics.jsonl").read_text().splitlines()
    for found in (other, [json.loads(line) for line in lines]):
        for one, two in zip(whole, found, strict=True):
            for key in ("step", "train", "valid_batch", "valid_population"):
                assert two[key] == pytest.approx(one[key], rel=TOLERANCE)


def test_stopped_and_resumed_with_noise_of_each_process(together, pair_folder):
    folder = pair_folder / "stopped_and_resumed"
    (whole, metadata), (other, metadata2) = (
        checkpoint.load(folder / name / "last.safetensors") for name in ("whole", "stopped")
    )
    assert metadata["progress"]["step"] == metadata2["progress"]["step"] == 12
    for name, value in whole.items():
        if "stats" in name:  # averaged once more along the way: last digits of float32
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(other[name], value), name


def test_random_numbers_are_each_ones_own(together):
    first, second = (found["drawn"] for found in together)
    assert not torch.equal(first, second)


def test_one_is_interrupted_and_all_stop_after_the_same_step(together, pair_folder):
    assert [found["interrupted"] for found in together] == [5, 5]
    _, metadata = checkpoint.load(pair_folder / "interrupted" / "last.safetensors")
    assert metadata["progress"]["step"] == 5


def test_one_diverges_and_all_say_so(together, pair_folder):
    said = {found["diverged"] for found in together}
    assert len(said) == 1
    assert re.search("diverged at step 3: .*minibatch 3", said.pop())
    tensors, _ = checkpoint.load(pair_folder / "diverged" / "diverged.safetensors")
    assert all(v.isfinite().all() for k, v in tensors.items() if k.startswith("model."))


def test_one_cannot_write_and_all_say_so(together):
    said = {found["full_disk"] for found in together}
    assert len(said) == 1
    assert "could not write" in said.pop()


def test_what_cannot_be_shared_is_refused(together):
    for found in together:
        task, rows, dims = found["refused"]
        assert "Letters has no row_dims" in task
        assert "a minibatch of 1 " in rows
        assert re.search("row_dims .* 2 tensors", dims)
