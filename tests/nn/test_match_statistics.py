"""`match_statistics` resizes a new model's statistics to those of a checkpoint."""

import json

import pytest
import torch
from torch import nn

import rbn


def trained(**options):
    model = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2, **options))
    model[0](torch.randn(6, 5, 3))
    model[0](torch.randn(9, 5, 3))
    return model


def rows(model):
    return {
        name: tuple(module.count.shape)
        for name, module in model.named_modules()
        if isinstance(module, rbn.PopulationStatistics)
    }


def save_torch(state, path):
    torch.save(state, path / "model.pt")
    return path / "model.pt"


def save_bin(state, path):
    torch.save(state, path / "pytorch_model.bin")
    return path


def save_safetensors(state, path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return str(path / "model.safetensors")


def save_sharded(state, path):
    safetensors = pytest.importorskip("safetensors.torch")
    names = sorted(state)
    places = {name: f"model-{k % 2}.safetensors" for k, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: state[name] for name in names if places[name] == file}
        safetensors.save_file(part, path / file)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize(
    "save", [lambda state, path: state, save_torch, save_bin, save_safetensors, save_sharded]
)
@pytest.mark.parametrize("options", [{}, {"input_stats": "sequence"}, {"bidirectional": True}])
def test_the_shapes_are_those_of_the_checkpoint(save, options, tmp_path):
    model = trained(**options)
    checkpoint = save(model.state_dict(), tmp_path)
    new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2, **options))
    growing = sum(size == (0,) for size in rows(new).values())
    assert growing > 0
    assert rbn.match_statistics(new, checkpoint) == growing
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in new.state_dict().items()} == shapes
    assert not any(value.any() for name, value in new.state_dict().items() if "stats" in name)
    assert rbn.match_statistics(new, checkpoint) == 0
    new.load_state_dict(model.state_dict())
    x = torch.randn(11, 2, 3)
    assert torch.equal(new.eval()(x)[0], model.eval()(x)[0])


def test_a_loader_that_copies_into_buffers():
    """As done by most loaders that do not call load_state_dict."""
    model = trained().eval()
    new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2)).eval()
    rbn.match_statistics(new, model.state_dict())
    with torch.no_grad():
        for name, value in new.state_dict(keep_vars=True).items():
            value.copy_(model.state_dict()[name])
    x = torch.randn(11, 2, 3)
    assert torch.equal(new(x)[0], model(x)[0])
    new.train()
    new(torch.randn(12, 4, 3))  # grows on
    assert set(rows(new).values()) == {(12,)}


def test_names_with_something_before_them():
    state = trained().state_dict()
    for prefix in ("module.", "model.encoder."):
        new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2))
        assert rbn.match_statistics(new, {prefix + k: v for k, v in state.items()}) == 6
        wrapped = nn.ModuleDict({"inner": nn.Sequential(rbn.BatchNormLSTM(3, 4, 2))})
        assert rbn.match_statistics(wrapped, state) == 6


def test_what_is_not_in_the_checkpoint_stays():
    new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2))
    assert rbn.match_statistics(new, {"0.weight_ih_l0": torch.zeros(16, 3)}) == 0
    assert rbn.match_statistics(nn.Linear(2, 2), trained().state_dict()) == 0
    two = {f"{k}.0.stats_h_l0.mean": torch.zeros(k, 16) for k in (3, 5)}  # ambiguous
    assert rbn.match_statistics(new, two) == 0
    assert set(rows(new).values()) == {(0,)}


def test_a_fixed_length_stays():
    new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2, max_length=20))
    assert rbn.match_statistics(new, trained().state_dict()) == 0
    assert set(rows(new).values()) == {(20,)}


def test_on_the_meta_device():
    with torch.device("meta"):
        new = nn.Sequential(rbn.BatchNormLSTM(3, 4, 2))
    state = trained().state_dict()
    assert rbn.match_statistics(new, state) == 6
    assert new[0].stats_h_l0.mean.is_meta
    new.load_state_dict(state, assign=True)
    assert new.eval()(torch.randn(4, 2, 3))[0].isfinite().all()


def test_paths_that_hold_no_checkpoint(tmp_path):
    model = trained()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        rbn.match_statistics(model, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="safetensors"):
        rbn.match_statistics(model, tmp_path)
    for name in ("a.pt", "b.pt"):
        torch.save({}, tmp_path / name)
    with pytest.raises(ValueError, match="several"):
        rbn.match_statistics(model, tmp_path)
