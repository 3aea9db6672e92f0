"""The GPU's step of an LSTM cell against PyTorch's operators in float64."""

import itertools

import pytest
import torch

from rbn.ops import steps
from rbn.ops.cpu.inference import Row, Weights

pytest.importorskip("triton", reason="the GPU's kernels need triton")
from rbn.ops.gpu.lstm_cell import step as cell_step
from rbn.ops.gpu.lstm_cell.step import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(B, H, row, absent=()):
    """Random arguments of a step: input, weights, states and statistics."""
    torch.manual_seed(B + H)
    shapes = {"bias": 4 * H, "gamma_x": 4 * H, "gamma_h": 4 * H, "gamma_c": H, "beta_c": H}
    vectors = {n: None if n in absent else torch.randn(f, device=DEVICE) for n, f in shapes.items()}
    weights = Weights(torch.randn(4 * H, 3), 0.1 * torch.randn(4 * H, H), **vectors)
    weights = Weights(*(None if v is None else v.to(DEVICE) for v in weights))
    rows = []
    for name, features in (("gamma_x", 4 * H), ("gamma_h", 4 * H), ("gamma_c", H)):
        mean, var = torch.randn(7, features), torch.rand(7, features) + 0.5
        normalized = vectors[name] is not None
        rows.append(Row(mean.to(DEVICE), var.to(DEVICE), row) if normalized else None)
    states = torch.randn(2, B, H, device=DEVICE)
    return torch.randn(B, 3, device=DEVICE), weights, states[0], states[1], rows


def doubled(value):
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return type(value)(*(doubled(v) for v in value))
    return value.double()


ABSENT = {
    "batch-normalized": (),
    "plain": ("gamma_x", "gamma_h", "gamma_c", "beta_c"),
    "no bias": ("bias", "beta_c"),
    "joint terms": ("gamma_x",),
    "raw output": ("gamma_c",),
}


SIZES = [(1, 1, True), (1, 9, True), (3, 5, True), (3, 5, False)]


@pytest.mark.parametrize(
    ("B", "H", "multiplies", "tile"),  # several small tiles, or the default
    [*((*size, tile) for size in SIZES for tile in (4, None)), (2, 130, False, None)],
)
@pytest.mark.parametrize("absent", ABSENT)
def test_a_step_beside_float64(absent, B, H, multiplies, tile, monkeypatch):
    if tile is not None:
        monkeypatch.setattr(cell_step, "_BLOCK_K", tile)
        monkeypatch.setattr(cell_step, "_BLOCK", tile)
    if not multiplies:
        monkeypatch.setattr(cell_step, "_MULTIPLIES", 0)
    for row, zoneout in itertools.product((0, 6), ((0.0, 0.0), (0.2, 0.3))):
        x, weights, h, c, rows = tensors(B, H, row, ABSENT[absent])
        options = (1e-3, zoneout, absent == "batch-normalized" and row == 6)
        found = step(x, weights, (h, c), rows, *options)
        exact = [doubled(r) for r in rows]
        expected = steps._lstm(
            x.double(), doubled(weights), (h.double(), c.double()), exact, *options
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_states_that_are_not_contiguous():
    x, weights, h, c, rows = tensors(4, 6, 1)
    wide = torch.stack([h, x.new_zeros(4, 6)], dim=2)
    other_order = c.t().contiguous().t()
    found = step(x, weights, (wide[..., 0], other_order), rows, 1e-3, (0.0, 0.0), False)
    expected = step(x, weights, (h, c), rows, 1e-3, (0.0, 0.0), False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_nan_reaches_both_states():
    x, weights, h, c, rows = tensors(2, 6, 1)
    c[1, 3] = torch.nan
    new_h, new_c = step(x, weights, (h, c), rows, 1e-3, (0.0, 0.0), False)
    assert new_h[1, 3].isnan()
    assert new_c[1, 3].isnan()
    assert not new_h[0].isnan().any()
