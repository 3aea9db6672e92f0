"""The compiled kernel of the CPU operator against the same operator on PyTorch's operations."""

import ctypes
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbn import ops
from rbn.ops.cpu import compiled_layer_lstm, compiled_lstm, fused_lstm
from rbn.ops.definition import LSTM, LSTMArguments

needs_kernel = pytest.mark.skipif(
    compiled_lstm.load() is None, reason="rbn was installed without a C compiler"
)


def compiled(norm):
    """The module that runs a normalization in the kernel; layer norm needs its products."""
    if norm != "layer":
        return compiled_lstm
    if not compiled_lstm.load().rbn_panel_lanes():
        pytest.skip("the kernel has no products on this machine")
    return compiled_layer_lstm


def elementary(x):
    library = compiled_lstm.load()
    sigmoid, tanh = torch.empty_like(x), torch.empty_like(x)
    pointers = (ctypes.c_void_p(v.data_ptr()) for v in (x, sigmoid, tanh))
    x_pointer, sigmoid_pointer, tanh_pointer = pointers
    library.rbn_elementary(x_pointer, ctypes.c_int64(len(x)), sigmoid_pointer, tanh_pointer)
    return sigmoid, tanh


@needs_kernel
def test_nonlinearities_are_accurate_to_a_few_units_in_the_last_place():
    grid = torch.cat([torch.linspace(-20, 20, 400_001), torch.logspace(-30, 1, 10_000)])
    grid = torch.cat([grid, -grid])
    for found, exact in zip(
        elementary(grid), (grid.double().sigmoid(), grid.double().tanh()), strict=True
    ):
        error = ((found.double() - exact) / exact).abs().max()
        assert error < 4 * torch.finfo(torch.float32).eps


@needs_kernel
def test_nonlinearities_pass_nan_on_and_saturate():
    nan, inf = float("nan"), float("inf")
    sigmoid, tanh = elementary(torch.tensor([nan, inf, -inf, 1e30, -1e30, 0.0]))
    assert sigmoid[0].isnan()
    assert tanh[0].isnan()
    assert sigmoid[1] == sigmoid[3] == tanh[1] == tanh[3] == 1
    assert tanh[2] == tanh[4] == -1
    assert sigmoid[2] < 1e-37
    assert sigmoid[5] == 0.5
    assert tanh[5] == 0


def inputs(
    seed, T, B, H, *, norm="batch", padded=False, population=0, sequence=False, absent=(), save=True
):
    """Arguments of the operator in float32. population: rows of given statistics, 0 for none."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=g)

    vectors = {"bias": 4 * H, "gamma_x": 4 * H, "gamma_h": 4 * H, "gamma_c": H, "beta_c": H}
    values = {name: randn(n) for name, n in vectors.items()}
    for name in (*absent, *(("gamma_x", "gamma_h", "gamma_c") if norm == "none" else ())):
        values[name] = None
    given = []
    if population:
        rows = [1 if sequence else population, population, population]
        for n, features in zip(rows, (4 * H, 4 * H, H), strict=True):
            given += [randn(n, features), 0.5 + torch.rand(n, features, generator=g)]
    return LSTMArguments(
        input=randn(T, B, 4 * H),
        weight_ih=None,
        weight_hh=randn(4 * H, H) / H**0.5,
        **values,
        h0=randn(B, H),
        c0=randn(B, H),
        lengths=torch.randint(1, T + 1, (B,), generator=g) if padded else None,
        **dict(zip(LSTM.moments, given, strict=False)),
        norm=norm,
        eps=1e-5,
        input_stats="sequence" if sequence else "step",
        save=save,
    )


def forward(module, a):
    """Everything that a forward pass returns, by name."""
    output, (h_n, c_n), saved = module.forward(a)
    # The first result is also saved if it holds the states.
    return saved._asdict() | {"output": output, "h_n": h_n, "c_n": c_n}, saved


def close(found, expected):
    """Both compute in float32, with another order of operations.

    Sums over rows and steps cancel, so their remainders carry the roundings of the largest terms: a
    thousand of those is 1e-4.
    """
    assert found.keys() == expected.keys()
    scale = max([1.0, *(b.abs().max().item() for b in expected.values() if b is not None)])
    for name, b in expected.items():
        a = found[name]
        assert (a is None) == (b is None), name
        if a is None:
            continue
        assert a.shape == b.shape, name
        worst = (a - b).abs().max().item()
        assert worst <= 1e-4 * scale, f"{name} differs by {worst}"


@pytest.mark.slow
@needs_kernel
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**16),
    steps=st.integers(1, 4),
    batch=st.sampled_from([3, 5, 64, 65, 130, 256, 257]),
    hidden=st.sampled_from([1, 7, 16, 17, 40]),
    norm=st.sampled_from(["batch", "none", "layer"]),
    padded=st.booleans(),
    population=st.integers(0, 5),
    sequence=st.booleans(),
    absent=st.sets(st.sampled_from(["bias", "gamma_c", "beta_c"])),
)
def test_forward_and_backward(
    seed, steps, batch, hidden, norm, padded, population, sequence, absent
):
    module = compiled(norm)
    if norm == "layer":
        hidden, absent = max(hidden, 3), absent - {"gamma_c"}  # with two units, only signs are left
    options = {"norm": norm, "padded": padded, "absent": tuple(absent)}
    if norm == "batch":
        options |= {"population": population, "sequence": sequence}
    a = inputs(seed, steps, batch, hidden, **options)
    assert module.usable(a)
    (found, _), (expected, saved) = forward(module, a), forward(fused_lstm, a)
    close(found, expected)
    light, _ = forward(module, a._replace(save=False))
    names = ("output", "h_n", "c_n")
    for name in names:
        assert torch.equal(light[name], found[name]), name
    cotangents = [torch.randn_like(found[name]) for name in names]
    for given_ in itertools.islice(itertools.product((True, False), repeat=3), 7):
        some = [c if use else None for c, use in zip(cotangents, given_, strict=True)]
        # From the same saved values, whichever of the two computed them.
        close(module.backward(a, saved, *some), fused_lstm.backward(a, saved, *some))


@needs_kernel
@pytest.mark.parametrize("norm", ["batch", "none", "layer"])
@pytest.mark.parametrize("batch", [1, 6, 300])  # more rows than a thread's buffer has
@pytest.mark.parametrize("hidden", [1, 2, 3, 5, 7, 8, 12, 17, 20, 31, 100])
def test_units_that_fill_no_register(hidden, batch, norm):
    module = compiled(norm)
    hidden += 2 * (norm == "layer" and hidden < 3)  # layer norm leaves only signs of two units
    a = inputs(hidden, 2, batch, hidden, norm=norm)
    if batch == 1 and norm == "batch":  # a variance of zero would only show rounding errors
        a = inputs(hidden, 2, batch, hidden, population=2)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1 + hidden % 3)
        (found, _), (expected, saved) = forward(module, a), forward(fused_lstm, a)
        close(found, expected)
        light, _ = forward(module, a._replace(save=False))
        assert torch.equal(light["output"], found["output"])
        cotangents = [torch.randn_like(found[name]) for name in ("output", "h_n", "c_n")]
        close(
            module.backward(a, saved, *cotangents),
            fused_lstm.backward(a, saved, *cotangents),
        )
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("batch", [5, 300])
def test_nan_shows_in_backward(batch):
    a = inputs(0, 2, batch, 20)
    output, _, saved = compiled_lstm.forward(a)
    doutput = torch.zeros_like(output)
    doutput[1, 2, 18] = float("nan")
    grads = compiled_lstm.backward(a, saved, doutput, None, None)
    for gate in range(4):
        assert grads["input"][1, :, 20 * gate + 18].isnan().all()
    assert grads["bias"][[18, 38, 58, 78]].isnan().all()
    assert grads["input"][1, :, :18].isfinite().all()


@needs_kernel
def test_nan_stays_in_its_row_with_layer_norm():
    module, nan = compiled("layer"), float("nan")
    a = inputs(0, 2, 5, 20, norm="layer")
    output, _, saved = module.forward(a)
    doutput = torch.zeros_like(output)
    doutput[1, 2, 18] = nan
    grads = module.backward(a, saved, doutput, None, None)
    others = [0, 1, 3, 4]
    assert grads["input"][:, 2].isnan().all()
    assert grads["input"][:, others].isfinite().all()
    assert grads["gamma_h"].isnan().all()
    a.input[0, 1, 3] = nan
    output = module.forward(a)[0]
    assert output[:, 1].isnan().all()
    assert output[:, [0, 2, 3, 4]].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("hidden", [1, 20])
def test_layer_norm_of_equal_features(hidden):
    """With a variance of zero, terms are 0 and pass no gradient."""
    module = compiled("layer")
    a = inputs(0, 1, 5, hidden, norm="layer", absent=("bias",))
    a = a._replace(
        input=torch.full_like(a.input, 3.0), h0=torch.zeros_like(a.h0), c0=torch.ones_like(a.c0)
    )
    output, _, saved = module.forward(a)
    torch.testing.assert_close(output, (0.5 * a.beta_c.tanh()).expand_as(output))
    grads = module.backward(a, saved, torch.ones_like(output), None, None)
    assert grads["gamma_x"].eq(0).all()
    assert grads["gamma_c"].eq(0).all()
    expected = 5 * 0.5 * (1 - a.beta_c.tanh() ** 2)
    torch.testing.assert_close(grads["beta_c"], expected)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3, 5, 40])
def test_rows_of_layer_norm_are_shared_out_by_their_lengths(threads):
    """Every row belongs to one thread, even if a few long rows are most of the work."""
    module = compiled("layer")
    a = inputs(0, 9, 30, 70, norm="layer")
    a = a._replace(lengths=torch.tensor([9, 1, 1, 2, 9, 1] * 5))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        (found, _), (expected, saved) = forward(module, a), forward(fused_lstm, a)
        close(found, expected)
        cotangents = [torch.randn_like(found[name]) for name in ("output", "h_n", "c_n")]
        close(module.backward(a, saved, *cotangents), fused_lstm.backward(a, saved, *cotangents))
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def use_version():
    """Select the kernel's instruction set, widest first; the last one has no products."""
    library = compiled_lstm.load()

    def use(index):
        if not library.rbn_use_version(ctypes.c_int64(index)):
            pytest.skip("this machine has fewer instruction sets")

    yield use
    library.rbn_use_version(ctypes.c_int64(0))


@needs_kernel
@pytest.mark.parametrize("norm", ["batch", "none", "layer"])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_every_instruction_set(version, norm, use_version):
    """Odd sizes, rows that do not fill a tile of a product, sequences that end early."""
    use_version(version)
    module = compiled(norm)
    for batch in (2, 3, 4, 5, 7, 13):
        for hidden in (3, 17, 40, 100):
            a = inputs(hidden, 3, batch, hidden, norm=norm, padded=batch % 2 == 1)
            (found, _), (expected, saved) = forward(module, a), forward(fused_lstm, a)
            close(found, expected)
            cotangents = [torch.randn_like(found[name]) for name in ("output", "h_n", "c_n")]
            close(
                module.backward(a, saved, *cotangents),
                fused_lstm.backward(a, saved, *cotangents),
            )


@needs_kernel
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("layout", ["rows", "columns", "neither"])
@pytest.mark.parametrize(
    ("rows", "columns", "parts"), [(68, 5, 4), (40, 33, 1), (3, 1, 1), (192, 50, 4)]
)
def test_packed_weights(rows, columns, parts, layout, version, use_version):
    """Panels hold the rows of the weight one after another, and zeros."""
    use_version(version)
    weight = torch.randn(columns, rows).t() if layout == "columns" else torch.randn(rows, columns)
    if layout == "neither":
        weight = torch.randn(rows, 2 * columns)[:, ::2]
    panels = compiled_lstm.packed([weight[:, :1], weight[:, 1:]], parts, 3)
    if panels is None:
        pytest.skip("the kernel has no products on this machine")
    flat = panels.permute(2, 0, 3, 1).flatten(1, 2)  # [parts, padded rows, columns]
    assert torch.equal(flat[:, : rows // parts].flatten(0, 1), weight)
    assert not flat[:, rows // parts :].any()


@needs_kernel
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_the_number_of_threads_changes_no_bit(norm):
    module = compiled(norm)
    before = torch.get_num_threads()
    a = inputs(0, 5, 64, 50, norm=norm, padded=True)
    own_products = compiled_lstm.load().rbn_panel_lanes() > 0
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            output, _, saved = module.forward(a)
            # torch's products may depend on the threads, so use the same saved values for all.
            first = results[0][2] if results else saved
            grads = module.backward(a, first, output, None, None)
            results.append((grads, output, saved))
    finally:
        torch.set_num_threads(before)
    for grads, output, _ in results[1:]:
        if own_products:
            assert torch.equal(output, results[0][1])
            assert torch.equal(grads["h0"], results[0][0]["h0"])
        torch.testing.assert_close(output, results[0][1], rtol=0, atol=1e-5)
        close(grads, results[0][0])


@needs_kernel
def test_a_large_batch_loses_no_digits():
    """Sums over rows continue in double: 20,000 rows around 100 keep their variance."""
    a = inputs(0, 1, 20_000, 4)
    a = a._replace(input=a.input + 100)
    _, _, r = compiled_lstm.forward(a)
    mean, var = a.input[0].double().mean(0), a.input[0].double().var(0, correction=0)
    torch.testing.assert_close(r.mean_x[0].double(), mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(r.rstd_x[0].double(), (var + 1e-5).rsqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "layer"},
        {"gamma_x": None},
        {"pass_normalized_cell": True},
        {"rate_c": 0.1},
        {"rate_h": 0.1},
        {"mask_c": torch.zeros(2, 3, 4, dtype=torch.bool)},
        {"mask_h": torch.zeros(2, 3, 4, dtype=torch.bool)},
        {"padding": "include", "lengths": torch.tensor([1, 2, 2])},
        {"input": torch.zeros(2, 3, 16, dtype=torch.float64)},
    ],
)
def test_what_it_does_not_cover_is_left_to_the_other(changes):
    assert not compiled_lstm.usable(inputs(0, 2, 3, 4)._replace(**changes))
    if "norm" not in changes and "padding" not in changes:
        a = inputs(0, 2, 3, 4, norm="layer")
        assert not compiled_layer_lstm.usable(a._replace(**changes))


@pytest.mark.slow
def test_it_can_be_switched_off():
    code = (
        "import torch; from rbn.ops.cpu import compiled_lstm; assert compiled_lstm.load() is None\n"
        "import rbn; rbn.BatchNormLSTM(2, 3)(torch.randn(4, 5, 2))[0].sum().backward()"
    )
    environment = {**os.environ, "RBN_CPU_KERNEL": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@needs_kernel
@pytest.mark.parametrize("batch", [5, 300])
def test_nan_in_one_row_shows(batch):
    a = inputs(0, 2, batch, 20)
    a.input[0, 1, 3] = float("nan")
    assert compiled_lstm.forward(a)[0][:, :, 3].isnan().all()
    a = inputs(0, 2, 5, 20, population=1)
    a.input[0, 1, 3] = float("nan")
    output, _, _ = compiled_lstm.forward(a)
    assert output[1, 1].isnan().all()
    assert output[:, [0, 2, 3, 4]].isfinite().all()


def test_the_operator_uses_it(monkeypatch):
    if compiled_lstm.load() is None:
        pytest.skip("rbn was installed without a C compiler")
    called = []
    real = compiled_lstm.forward
    monkeypatch.setattr(compiled_lstm, "forward", lambda a: called.append(a) or real(a))
    a = inputs(0, 2, 3, 4)
    ops.bn_lstm(a.input, *a[2:10])
    assert len(called) == 1


@needs_kernel
def test_a_kernel_of_older_sources_is_named(monkeypatch):
    """Without it, layers are several times slower."""

    class Older:
        rbn_args_size = staticmethod(lambda: 8)

    monkeypatch.setattr(ctypes, "CDLL", lambda path: Older)
    with pytest.warns(RuntimeWarning, match="older sources"):
        assert compiled_lstm.load.__wrapped__() is None
