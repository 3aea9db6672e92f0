"""Hugging Face Accelerate: a training loop, its checkpoints, and models loaded in parts."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import rbn

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32 against float64, through six steps
DATA = torch.Generator().manual_seed(5)
X = torch.randn(44, 6, 3, generator=DATA)
N = torch.randint(2, 7, (44,), generator=DATA)
Y = (X[:, 0, 0] > 0).long()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = rbn.BatchNormLSTM(3, 5, batch_first=True)
        self.head = nn.Linear(5, 2)

    def forward(self, x, lengths=None):
        return self.head(self.layer(x, lengths=lengths)[1][0][-1])


def loader():
    rows = [{"x": x, "lengths": n, "labels": y} for x, n, y in zip(X, N, Y, strict=True)]
    return DataLoader(rows, batch_size=8, shuffle=True)


def fitted(**options):
    """A plain training loop; also returns what `prepare` returned."""
    torch.manual_seed(1)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, **options)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    prepared, optimizer, data = accelerator.prepare(model, optimizer, loader())
    for batch in data:
        with accelerator.accumulate(prepared):
            logits = prepared(batch["x"], batch["lengths"])
            accelerator.backward(nn.functional.cross_entropy(logits, batch["labels"]))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator, prepared, data


@torch.no_grad()
def logits(model):
    return model.eval()(X[:9], N[:9])


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3}])
def test_exact_statistics_after_a_loop(options):
    _, prepared, data = fitted(**options)
    batches = []
    recorded = (batches.append(batch) or batch for batch in data)
    assert rbn.update_population_stats(prepared, recorded) == 6
    model = Classifier().double()
    model.load_state_dict(prepared.state_dict())
    rbn.update_population_stats(model, [batch | {"x": batch["x"].double()} for batch in batches])
    for name, value in model.layer.state_dict().items():
        if name.endswith(("mean", "var")):
            found = prepared.layer.state_dict()[name].double()
            torch.testing.assert_close(found, value, **TOLERANCE)


def test_a_loop_in_bfloat16():
    accelerator, prepared, data = fitted(mixed_precision="bf16")
    assert rbn.update_population_stats(prepared, data) == 6
    assert prepared.layer.stats_h_l0.mean.dtype == torch.float32
    assert logits(prepared).isfinite().all()
    assert accelerator.unwrap_model(prepared).layer is prepared.layer


def test_saved_and_loaded_state(tmp_path):
    accelerator, prepared, _ = fitted()
    expected = logits(prepared)
    accelerator.save_state(tmp_path)
    accelerate.state.AcceleratorState._reset_state(True)
    again = accelerate.Accelerator(cpu=True)
    model = again.prepare(Classifier())
    optimizer = again.prepare(torch.optim.Adam(model.parameters()))
    assert optimizer is not None
    again.prepare(loader())
    again.load_state(tmp_path)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(
    ("shard", "device_map"),
    [("1GB", {"": "cpu"}), ("2KB", {"": "cpu"}), ("1GB", None)],
)
def test_load_checkpoint_and_dispatch(shard, safe, device_map, tmp_path):
    accelerator, prepared, _ = fitted()
    expected = logits(prepared)
    accelerator.save_model(prepared, tmp_path, max_shard_size=shard, safe_serialization=safe)
    with accelerate.init_empty_weights():
        model = Classifier()
    rbn.match_statistics(model, tmp_path)
    model = accelerate.load_checkpoint_and_dispatch(model, tmp_path, device_map=device_map)
    assert torch.equal(logits(model), expected)


def test_what_happens_without_match_statistics(tmp_path):
    """The reason for `match_statistics`."""
    accelerator, prepared, _ = fitted()
    accelerator.save_model(prepared, tmp_path)
    with pytest.raises(ValueError, match="shape"):
        accelerate.load_checkpoint_and_dispatch(Classifier(), tmp_path, device_map={"": "cpu"})


def test_offloaded_to_the_disk(tmp_path):
    accelerator, prepared, _ = fitted()
    expected = logits(prepared)
    accelerator.save_model(prepared, tmp_path / "model")
    model = Classifier()
    rbn.match_statistics(model, tmp_path / "model")
    model = accelerate.load_checkpoint_and_dispatch(
        model,
        tmp_path / "model",
        device_map={"layer": "disk", "head": "cpu"},
        offload_folder=tmp_path / "disk",
        offload_buffers=True,
        preload_module_classes=["BatchNormLSTM"],
    )
    assert model.layer.weight_hh_l0.is_meta
    assert torch.equal(logits(model), expected)
