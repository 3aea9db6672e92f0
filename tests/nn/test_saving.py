"""State dicts, files, copies, devices and dtypes."""

import copy
import io
import pickle
import re

import pytest
import torch

import rbn

LAYERS = [rbn.LSTM, rbn.BatchNormLSTM, rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
NORMALIZED = [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]


def trained(layer_class, **options):
    """A layer with statistics that grew twice, the second time for some rows only."""
    torch.manual_seed(0)
    if layer_class in NORMALIZED:
        options = {"refresh_stats": False} | options  # running averages
    layer = layer_class(3, 4, num_layers=2, bidirectional=True, **options)
    layer(torch.randn(3, 5, 3))
    layer(torch.randn(6, 5, 3), lengths=[5, 2, 5, 4, 3])
    return layer


def same(a, b, x=None):
    x = torch.randn(8, 5, 3) if x is None else x
    a, b = a.eval(), b.eval()
    assert torch.equal(a(x)[0], b(x)[0])


@pytest.mark.parametrize("layer_class", LAYERS)
def test_a_state_dict_loads_into_a_fresh_module(layer_class):
    layer = trained(layer_class)
    fresh = trained(layer_class)
    fresh.reset_parameters()
    result = fresh.load_state_dict(layer.state_dict())
    assert not result.missing_keys
    assert not result.unexpected_keys
    same(layer, fresh)
    if layer_class in NORMALIZED:
        assert fresh.stats_h_l0.count.tolist() == [2, 2, 2, 1, 1, 0]
        x = torch.randn(7, 5, 3)  # training continues from the same averages
        a, b = layer.train(), fresh.train()
        a(x), b(x)
        for key, value in a.state_dict().items():
            assert torch.equal(b.state_dict()[key], value), key


@pytest.mark.parametrize("layer_class", NORMALIZED)
def test_statistics_shrink_and_grow_with_what_is_loaded(layer_class):
    layer, longer = trained(layer_class), trained(layer_class)
    longer(torch.randn(11, 5, 3))
    short = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.load_state_dict(longer.state_dict())
    same(layer, longer, torch.randn(12, 5, 3))
    layer.load_state_dict(short)
    assert layer.stats_h_l0.mean.shape[0] == 6


def test_an_untrained_state_dict_leaves_a_module_untrained():
    layer = trained(rbn.BatchNormLSTM)
    fresh = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True)
    layer.load_state_dict(fresh.state_dict())
    with pytest.warns(UserWarning, match="was not trained"):
        layer.eval()(torch.randn(3, 5, 3))


@pytest.mark.parametrize("layer_class", LAYERS)
def test_files_without_pickled_code(layer_class, tmp_path):
    layer = trained(layer_class)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    fresh = layer_class(3, 4, num_layers=2, bidirectional=True)
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    same(layer, fresh)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_safetensors(layer_class, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    layer = trained(layer_class)
    safetensors.save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    fresh = layer_class(3, 4, num_layers=2, bidirectional=True)
    fresh.load_state_dict(safetensors.load_file(tmp_path / "layer.safetensors"))
    same(layer, fresh)
    safetensors.save_model(layer, tmp_path / "model.safetensors")
    fresh = layer_class(3, 4, num_layers=2, bidirectional=True)
    safetensors.load_model(fresh, tmp_path / "model.safetensors")
    same(layer, fresh)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_copies_stand_alone(layer_class):
    layer = trained(layer_class)
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        same(layer, clone)
        before = {k: v.clone() for k, v in layer.state_dict().items()}
        clone.train()(torch.randn(9, 5, 3))
        assert all(torch.equal(layer.state_dict()[k], v) for k, v in before.items())
    whole = io.BytesIO()
    torch.save(layer, whole)
    whole.seek(0)
    same(layer, torch.load(whole, weights_only=False))


def test_shapes_that_do_not_fit_are_named():
    layer = trained(rbn.BatchNormLSTM)
    other = rbn.BatchNormLSTM(3, 6, 2, bidirectional=True)
    with pytest.raises(RuntimeError) as error:
        other.load_state_dict(layer.state_dict())
    assert re.search(r"stats_h_l0\.mean.*\[steps, 24\]", str(error.value))
    assert "size mismatch for weight_hh_l0" in str(error.value)
    assert not other.stats_h_l0.estimated
    bad = dict(layer.state_dict())
    bad["stats_c_l0.var"] = bad["stats_c_l0.var"][:2]
    with pytest.raises(RuntimeError, match=r"stats_c_l0\.mean, var and count"):
        layer.load_state_dict(bad)
    del bad["stats_c_l0.var"]
    with pytest.raises(RuntimeError, match=r"Missing key.*stats_c_l0\.var"):
        layer.load_state_dict(bad)


def test_a_plain_lstm_checkpoint_is_refused_with_the_missing_names():
    with pytest.raises(RuntimeError, match=r"Missing key.*gamma_x_l0"):
        rbn.BatchNormLSTM(3, 4).load_state_dict(torch.nn.LSTM(3, 4).state_dict())


def test_max_length_limits_what_loads():
    layer = trained(rbn.BatchNormLSTM)
    roomy = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True, max_length=9)
    roomy.load_state_dict(layer.state_dict())
    assert roomy.stats_h_l0.mean.shape[0] == 9
    same(layer, roomy)
    tight = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True, max_length=4)
    with pytest.raises(RuntimeError, match=r"5 steps.* 4 .*max_length"):
        tight.load_state_dict(layer.state_dict())
    enough = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True, max_length=5)
    enough.load_state_dict(roomy.state_dict())  # whose last four steps are empty
    assert enough.stats_h_l0.mean.shape[0] == 5
    same(layer, enough)


def test_loading_by_assignment_from_the_meta_device():
    layer = trained(rbn.BatchNormLSTM)
    with torch.device("meta"):
        fresh = rbn.BatchNormLSTM(3, 4, 2, bidirectional=True)
    fresh.load_state_dict(layer.state_dict(), assign=True)
    same(layer, fresh)


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_types(layer_class, dtype):
    layer = trained(layer_class)
    x = torch.randn(6, 5, 3).to(dtype)
    cast = copy.deepcopy(layer).eval().to(dtype)
    expected, _ = copy.deepcopy(cast).double()(x.double())  # of the rounded weights and input
    output, hx = cast(x)
    assert output.dtype == dtype
    assert all(s.dtype == dtype for s in (hx if isinstance(hx, tuple) else (hx,)))
    # What is rounded is W_x x_t and the first layer's output, to within eps / 2; normalization by
    # the smallest deviations here, and the recurrence, magnify that by less than 30.
    tolerance = 0 if dtype == torch.float64 else 30 * torch.finfo(dtype).eps / 2
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=tolerance)
    cast.train()
    y, _ = cast(x)
    y.float().square().mean().backward()
    for name, parameter in cast.named_parameters():
        assert parameter.grad.dtype == dtype, name
        assert parameter.grad.isfinite().all(), name
    if layer_class in NORMALIZED:
        wanted = torch.float64 if dtype == torch.float64 else torch.float32
        assert cast.stats_h_l0.mean.dtype == wanted
        if dtype != torch.float64:  # moved, not rounded
            again = copy.deepcopy(layer).to(dtype)
            assert torch.equal(again.stats_h_l0.var, layer.stats_h_l0.var)


def test_half_bfloat16_and_double_methods_keep_the_statistics():
    layer = trained(rbn.BatchNormLSTM)
    before = layer.stats_x_l0.mean.clone()
    layer.half().bfloat16().double()
    assert layer.weight_ih_l0.dtype == torch.float64
    assert torch.equal(layer.stats_x_l0.mean, before.double())
    assert layer.stats_x_l0.count.dtype == torch.int64


def test_made_with_a_type():
    assert rbn.BatchNormLSTM(3, 4, dtype=torch.bfloat16).stats_h_l0.mean.dtype == torch.float32
    assert rbn.BatchNormLSTM(3, 4, dtype=torch.float64).stats_h_l0.mean.dtype == torch.float64
    assert rbn.LSTM(3, 4, dtype=torch.float16).weight_ih_l0.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_assigned_statistics_are_kept_in_float32(dtype):
    layer, other = rbn.BatchNormLSTM(3, 4), rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 6, 3))
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in layer.state_dict().items()}
    other.load_state_dict(state, assign=True)
    assert other.weight_hh_l0.dtype == dtype
    for name in ("mean", "var"):
        found = getattr(other.stats_h_l0, name)
        assert found.dtype == torch.float32
        assert torch.equal(found, state[f"stats_h_l0.{name}"].float())


def test_a_state_loaded_in_inference_mode_can_be_trained():
    layer, other = rbn.BatchNormLSTM(3, 4), rbn.BatchNormLSTM(3, 4)
    x = torch.randn(5, 6, 3)
    layer(x)
    with torch.inference_mode():
        other.load_state_dict(layer.state_dict())
    other(x)
    assert other.stats_h_l0.count.tolist() == [2] * 5


def test_a_count_without_a_dimension_is_refused():
    layer = rbn.BatchNormLSTM(3, 4)
    layer(torch.randn(5, 6, 3))
    state = layer.state_dict() | {"stats_h_l0.count": torch.tensor(3)}
    with pytest.raises(RuntimeError, match=r"\[steps\], got \[5, 16\], \[5, 16\] and \[\]"):
        rbn.BatchNormLSTM(3, 4).load_state_dict(state)
