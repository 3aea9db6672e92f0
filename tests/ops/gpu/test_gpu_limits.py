"""Other guarantees of the GPU's kernels: sizes, sharing a GPU, error messages."""

import copy
import logging
import os
import subprocess
import sys
import types

import pytest
import torch
from recurrence_cases import (
    CALM,
    TOLERANCES,
    assert_same,
    call,
    calm,
    differentiate,
    fresh_seed,
    make_case,
    poisoned_memory,
)

import rbn

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import differentiate_together, products

from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
UNITS = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # float32 is tf32


# Sizes ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize(
    ("batch", "hidden"),
    [(5, 1), (5, 3), (9, 1055), (9, 1058), (3, 2115), (3, 4095), (3, 4096), (129, 40), (400, 24)],
)
def test_any_hidden_size_and_batch(batch, hidden, dtype):
    """Beyond what the kernels in CUDA C++ take, too; a batch of a few steps in every precision."""
    case = make_case("bn_lstm", 3, batch, hidden, fresh_seed(), dtype=dtype, **calm("bn_lstm"))
    with poisoned_memory():
        found = differentiate(case.on("cuda"), "gpu")
    expected = differentiate(case.to(torch.float64), "reference")
    assert_same(found[0], expected[0], 16 * UNITS[dtype])
    for name, want in expected[1].items():
        error = (found[1][name].double().cpu() - want).norm() / want.norm().clamp(min=1)
        assert error <= 8 * UNITS[dtype], f"gradient of {name}: {error:.2g}"


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM])
def test_a_hundred_thousand_steps_in_inference(layer_class, dtype):
    torch.manual_seed(fresh_seed())
    layer = layer_class(2, 24).cuda().to(dtype)
    layer(torch.randn(10, 8, 2, device="cuda", dtype=dtype))
    layer.eval()
    x = torch.randn(100_000, 2, 2, device="cuda", dtype=dtype)
    with torch.no_grad():
        output, _ = layer(x)
        head, _ = layer(x[:50])
    assert torch.equal(output[:50], head)
    assert output.isfinite().all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("layer_class", "batch", "hidden", "dtype"),
    [
        (rbn.BatchNormLSTM, 2, 17, torch.float32),  # in Triton
        (rbn.BatchNormLSTM, 2, 300, torch.float32),  # in CUDA C++, 8 units to a block
        (rbn.BatchNormLSTM, 33, 264, torch.bfloat16),  # the same, a grid of 16 units to a block
        (rbn.BatchNormLSTM, 33, 264, torch.float32),
        (rbn.BatchNormLSTM, 600, 4, torch.float32),  # step by step, as are those below
        (rbn.LayerNormLSTM, 2, 16, torch.float32),
        (rbn.BatchNormRNN, 2, 16, torch.float32),
        (rbn.BatchNormGRU, 2, 16, torch.float32),
    ],
)
def test_a_hundred_thousand_steps_by_other_kernels(layer_class, batch, hidden, dtype):
    torch.manual_seed(fresh_seed())
    layer = layer_class(2, hidden).cuda().to(dtype)
    layer(torch.randn(10, 8, 2, device="cuda", dtype=dtype))
    layer.eval()
    x = torch.randn(100_000, batch, 2, device="cuda", dtype=dtype)
    with torch.no_grad():
        output, _ = layer(x)
        head, _ = layer(x[:50])
    near = 16 * UNITS[dtype]  # the input's product may sum in another order
    torch.testing.assert_close(output[:50], head, rtol=0, atol=near)
    assert output.isfinite().all()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("hidden", [100, 101])  # in CUDA C++, in Triton
def test_more_numbers_than_32_bits_count(hidden):
    """The input term has 2.6e9 elements: the last steps must match a run on their own."""
    torch.manual_seed(fresh_seed())
    layer = rbn.LSTM(2, hidden).to("cuda", torch.bfloat16)
    x = torch.randn(100_000, 64, 2, device="cuda", dtype=torch.bfloat16)
    assert x.shape[0] * x.shape[1] * 4 * hidden > 2**31
    with torch.no_grad():
        output, _ = layer(x)
        tail, _ = layer(x[-400:])
    # The state 300 steps ago has no effect.
    near = 16 * UNITS[torch.bfloat16]
    torch.testing.assert_close(output[-100:], tail[-100:], rtol=0, atol=near)
    assert output.isfinite().all()


# Precision --------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("features", "hidden"), [(1, 24), (3, 24), (3, 300), (3, 33)])
def test_float32_is_true_where_tf32_is_not_allowed(features, hidden, bidirectional):
    """For complete layers, controlled by cuDNN's switch, which the kernels follow."""
    torch.manual_seed(fresh_seed())
    layer = rbn.BatchNormLSTM(features, hidden, eps=CALM, bidirectional=bidirectional)
    with torch.no_grad():  # so that states are large enough for rounding to show
        for name, parameter in layer.named_parameters():
            if name.startswith("gamma"):
                parameter.fill_(1.0)
    twin = copy.deepcopy(layer).double()
    x = torch.randn(6, 33, features)
    expected = twin(x.double())[0]
    expected.square().sum().backward()
    layer, errors = layer.cuda(), {}
    for tf32 in (True, False):
        layer.zero_grad()
        with products(tf32=tf32):
            output = layer(x.cuda())[0]
            output.square().sum().backward()
        errors[tf32] = (output.double().cpu() - expected).abs().max().item()
    assert errors[False] <= TOLERANCES[torch.float32][0]
    # Products of 11 bits, beside those of 24: about a thousand times as far off.
    assert errors[True] > 30 * errors[False]
    for name, parameter in twin.named_parameters():
        found = layer.get_parameter(name).grad.double().cpu()
        error = (found - parameter.grad).abs().max()
        assert error <= TOLERANCES[torch.float32][1] * max(1.0, parameter.grad.abs().max()), name


# Several at once --------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("together", [2, 5])
def test_several_recurrences_in_one_launch_of_cuda(together, dtype, monkeypatch):
    """The directions of a layer, or models of several seeds: bit for bit as when run alone."""
    launches = []
    run = cuda_kernels.launch_for
    monkeypatch.setattr(cuda_kernels, "launch_for", lambda *a: launches.append(a[0]) or run(*a))
    made = [
        make_case("bn_lstm", 6, 33, 40, fresh_seed(), dtype=dtype, **calm("bn_lstm")).on("cuda")
        for _ in range(together)
    ]
    alone = [differentiate(case, "gpu") for case in made]
    assert launches == ["forward", "backward"] * together
    joined = differentiate_together(made)
    assert launches[2 * together :] == ["forward", "backward"]
    for (results, grads), (found, gradients) in zip(joined, alone, strict=True):
        for name in ("output", "h_n", "c_n"):
            assert torch.equal(results[name], found[name]), name
        for name, want in gradients.items():
            # weight_hh's gradient may sum in another order for several of them.
            error = (grads[name].float() - want.float()).norm() / want.float().norm()
            assert error <= (UNITS[dtype] if name in ("weight_hh", "h0") else 0), name


# Sharing the GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
def test_a_launch_without_room_fails_and_the_next_one_works():
    """All blocks must be on the GPU at once: more than fit are rejected, not half started."""
    kernels = []
    launch = cuda_kernels.Kernel.launch

    def counted(kernel, grid, arguments):
        kernels.append((kernel, grid, arguments))
        launch(kernel, grid, arguments)

    case = make_case("bn_lstm", 4, 20, 240, fresh_seed(), dtype=torch.bfloat16).on("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels.Kernel, "launch", counted)
        before = call(case, "gpu")
    ((kernel, _, arguments),) = kernels
    with pytest.raises(RuntimeError, match="launching a recurrence: "):
        kernel.launch((kernel.at_once + 1, 1), arguments)
    torch.cuda.synchronize()
    after = call(case, "gpu")
    assert torch.equal(before["output"], after["output"])


def test_no_room_is_said_before_anything_starts(monkeypatch):
    """The same without a GPU: the host knows how many blocks fit."""
    full = types.SimpleNamespace(at_once=7, cluster=0, together=True)
    monkeypatch.setattr(portable_kernels, "kernel", lambda *arguments: full)
    monkeypatch.setattr(portable_kernels, "shared_bytes", lambda *arguments: 0)
    term = types.SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    plan = types.SimpleNamespace(
        family=cuda_kernels.PORTABLE,
        tilings={"forward": None},
        term=term,
        sizes=((2,), 2, 1, 1, 32),
    )
    with pytest.raises(RuntimeError, match="do not fit on the GPU"):
        cuda_kernels._kernel_and_grid("forward", plan, ())  # 4 blocks for each of 2
    full.at_once = 8
    assert cuda_kernels._kernel_and_grid("forward", plan, ()) == (full, (4, 2))


ALONE = """
import torch, rbn
torch.manual_seed(0)
layer = rbn.BatchNormLSTM(16, {hidden}, max_length=50).cuda().to(torch.bfloat16)
x = torch.randn(50, 64, 16, device="cuda", dtype=torch.bfloat16)
for _ in range(200):
    layer.zero_grad()
    layer(x)[0].float().square().mean().backward()
torch.cuda.synchronize()
print(sum(p.grad.double().abs().sum().item() for p in layer.parameters()))
"""


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("hidden", [240, 1000])
def test_two_processes_share_the_card(hidden):
    """Kernels whose blocks wait for each other, in independent processes."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def start():
        return subprocess.Popen(
            [sys.executable, "-c", ALONE.format(hidden=hidden)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def outcome(process):
        try:
            found, _ = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail("the processes wait for each other")
        assert process.returncode == 0
        return float(found)

    both = [start(), start()]
    assert outcome(both[0]) == outcome(both[1])


# The same bits ----------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", UNITS)
def test_the_triton_kernels_give_the_same_bits_every_time(dtype, monkeypatch):
    monkeypatch.setattr(cuda_kernels, "family", lambda term, a: None)
    case = make_case("bn_lstm", 9, 40, 100, fresh_seed(), dtype=dtype).on("cuda")
    first = differentiate(case, "gpu")
    for _ in range(200):
        again = differentiate(case, "gpu")
        for one, other in zip(first, again, strict=True):
            for name, value in one.items():
                assert torch.equal(value, other[name]), name


# PyTorch's compiler and graphs ------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # from the compiler
@pytest.mark.parametrize("training", [True, False])
def test_two_directions_compiled_as_one_graph(training):
    torch.manual_seed(fresh_seed())
    layer = rbn.BatchNormLSTM(8, 64, bidirectional=True, max_length=12).cuda()
    x = torch.randn(12, 32, 8, device="cuda")
    layer(x)
    layer.train(training)
    twin = copy.deepcopy(layer)
    found = torch.compile(lambda v: layer(v)[0], fullgraph=True)(x)
    expected = twin(x)[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # tf32, another order
    found.square().mean().backward()
    expected.square().mean().backward()
    for name, parameter in layer.named_parameters():
        want = twin.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, want, rtol=1e-2, atol=1e-4)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layer_class", [rbn.LSTM, rbn.BatchNormLSTM])
def test_a_graph_of_inference(layer_class):
    torch.manual_seed(fresh_seed())
    layer = layer_class(8, 64, bidirectional=True).cuda()
    x = torch.randn(12, 32, 8, device="cuda")
    layer(x)
    layer.eval()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output, _ = layer(x)
        x.normal_()
        graph.replay()
        assert torch.equal(output, layer(x)[0])


# Messages ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((3, 9, 16), torch.bfloat16, "in CUDA"),
        ((3, 9, 17), torch.bfloat16, "a product and a kernel for each step"),
        ((3, 9, 16), torch.float64, "the reference runs"),
        ((3, 5000, 4), torch.float32, "a product and a kernel for each step"),
    ],
)
def test_the_log_says_which_kernel_runs(shape, dtype, words, caplog):
    case = make_case("bn_lstm", *shape, dtype=dtype, **calm("bn_lstm")).on("cuda")
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        differentiate(case, "gpu")
    assert words in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="of Triton's interpreter")
@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float32, "a product and a kernel for each step"),
        (torch.float64, "the reference runs"),
    ],
)
def test_the_log_says_what_the_interpreter_runs(dtype, words, caplog):
    case = make_case("bn_lstm", 1, 2, 3, dtype=dtype, **calm("bn_lstm"))
    with caplog.at_level(logging.DEBUG, "rbn.ops.gpu"):
        call(case, "gpu")
    assert words in caplog.text
