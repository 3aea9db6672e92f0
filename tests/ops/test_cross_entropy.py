"""A linear layer with its cross-entropy: the GPU's kernels, and behaviour like torch elsewhere."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrence_cases import poisoned_memory

import rbn
from rbn.models import LanguageModel
from rbn.ops import linear_cross_entropy

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from gpu_cases import DEVICE, products

import rbn.ops.gpu.cross_entropy.loss as fused

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
on_the_card = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
# Half a unit in the last place, relative, and below what a number may become zero. Triton's
# interpreter does not round to bfloat16, it cuts off: a whole unit.
HALF = 2**-7 if DEVICE == "cpu" else 2**-8
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: HALF, torch.float16: 2**-11}
LEAST = {torch.float32: 2**-126, torch.bfloat16: 2**-126, torch.float16: 2**-24}
SINGLE = ROUNDING[torch.float32]
TYPES = list(ROUNDING)
CLASSES = (1, 2, 27, 50, 65, 1000)


def make(rows, H, C, dtype=torch.float32, bias=True, size=1.0, seed=0):
    """Input, weight and bias with gradients, and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*rows, H), (C, H), (C,))[: 3 if bias else 2]
    tensors = [size * torch.randn(shape, generator=generator) for shape in shapes]
    targets = torch.randint(C, rows, generator=generator)
    tensors = [t.to(DEVICE, dtype).requires_grad_() for t in tensors]
    return [*tensors, *([] if bias else [None])], targets.to(DEVICE)


def differentiate(tensors, targets, reduction="mean", dloss=1.0):
    """The loss from the GPU's kernels, and the existing gradients."""
    present = [t for t in tensors if t is not None]
    with poisoned_memory(), rbn.backend("gpu"):
        loss = linear_cross_entropy(*tensors, targets, reduction)
        return loss.detach(), torch.autograd.grad(dloss * loss, present)


def in_double(tensors, targets, dtype, reduction, dloss):
    """The same in float64, and a bound on the effect of rounding on each.

    The kernels round the gradient of the scores, and their results, to the type; all else is in
    float32, of which errors follow from the scores' own, sums of H products.
    """
    x, w, *b = (t.detach().double().cpu() for t in tensors if t is not None)
    x, targets = x.flatten(0, -2), targets.flatten().cpu().long()
    bias = b[0] if b else torch.zeros(len(w), dtype=torch.float64)
    logits = x @ w.t() + bias
    far = logits.amax(1, keepdim=True) - logits
    p, hot = logits.softmax(1), F.one_hot(targets, len(w))
    scale = dloss / (len(x) if reduction == "mean" else 1)
    g = (p - hot) * scale
    off = (x.shape[1] + 3) * SINGLE * (x.abs() @ w.abs().t() + bias.abs())
    off = off.amax(1, keepdim=True)
    off_g = abs(scale) * (p * (2 * off + SINGLE * (32 + 4 * far)) + 4 * SINGLE * hot)
    losses = F.cross_entropy(logits, targets, reduction="none")
    off_loss = (2 * off[:, 0] + SINGLE * (16 + 8 * losses + len(x) * losses)).sum() * abs(scale)
    unit, least = ROUNDING[dtype], LEAST[dtype]
    off_rounded = off_g + unit * g.abs() + max(1, abs(scale)) * least
    results = [
        (g @ w, off_rounded @ w.abs() + len(w) * SINGLE * (g.abs() @ w.abs())),
        (g.t() @ x, off_rounded.t() @ x.abs() + len(x) * SINGLE * (g.abs().t() @ x.abs())),
        (g.sum(0), (off_g + len(x) * SINGLE * g.abs()).sum(0)),
    ]
    off_by = [1.01 * off + 1.01 * unit * value.abs() + least for value, off in results]
    loss = losses.sum() / (len(x) if reduction == "mean" else 1)
    return loss, off_loss / abs(dloss), [value for value, _ in results], off_by


def compare(tensors, targets, reduction="mean", dloss=1.0):
    dtype = tensors[0].dtype
    loss, found = differentiate(tensors, targets, reduction, dloss)
    wanted, off_loss, gradients, off_by = in_double(tensors, targets, dtype, reduction, dloss)
    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert abs(loss.double().cpu() - wanted) <= off_loss
    for tensor, one, value, off in zip(tensors, found, gradients, off_by, strict=False):
        assert one.shape == tensor.shape
        assert one.dtype == dtype
        one = one.double().cpu().view(value.shape)
        # A gradient that the dtype cannot hold is infinite, with the right sign.
        overflows = (value.abs() + off > torch.finfo(dtype).max) & (one == value.sign() * torch.inf)
        assert (((one - value).abs() <= off) | overflows).all()


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 20),
    st.sampled_from(CLASSES) | st.integers(1, 130),
    st.sampled_from(TYPES),
    st.booleans(),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([0.1, 1.0, 5.0]),
    st.sampled_from([1.0, -3.0, 2.0**10]),
    st.integers(0, 1000),
)
def test_against_float64(rows, H, C, dtype, bias, reduction, size, dloss, seed):
    compare(*make(tuple(rows), H, C, dtype, bias, size, seed), reduction, dloss)


@pytest.mark.no_cover
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("C", CLASSES)
@pytest.mark.parametrize("rows", [(1,), (3, 50)])
def test_class_counts(C, dtype, rows):
    compare(*make(rows, 16, C, dtype))


def test_several_programs_and_targets_in_bytes():
    tensors, targets = make((2, 150), 8, 27)
    compare(tensors, targets.to(torch.uint8), "sum")


@pytest.mark.parametrize("dtype", TYPES)
def test_extreme_scores(dtype):
    x = torch.tensor([[1.0], [-1.0], [1.0]], device=DEVICE, dtype=dtype, requires_grad=True)
    w = torch.tensor([[1e4], [-1e4], [0.0]], device=DEVICE, dtype=dtype, requires_grad=True)
    b = torch.zeros(3, device=DEVICE, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 0, 2], device=DEVICE)
    loss, found = differentiate([x, w, b], targets, "sum")
    far = float(w[0, 0].detach())
    assert float(loss) == pytest.approx(3 * far, rel=1e-6)
    assert all(gradient.isfinite().all() for gradient in found)
    assert found[2].tolist() == [1 - 1, 1, -1]


def test_a_difference_of_large_scores_is_kept():
    """A large common offset of all scores costs the loss no digits."""
    x = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    w = torch.tensor([[2.0**20], [2.0**20 + 1]], device=DEVICE, requires_grad=True)
    loss, found = differentiate([x, w, None], torch.tensor([0], device=DEVICE))
    assert float(loss) == pytest.approx(1.3132617, rel=1e-6)
    assert float(found[1][1]) == pytest.approx(0.7310586, rel=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")  # from the interpreter
def test_nan_is_passed_on():
    (x, w, b), targets = make((5,), 4, 7)
    x.data[2, 1] = torch.nan
    loss, (dx, dw, db) = differentiate([x, w, b], targets)
    assert loss.isnan()
    assert dx.isnan().all(1).tolist() == [False, False, True, False, False]
    assert dx[[0, 1, 3, 4]].isfinite().all()
    assert dw.isnan().all()
    assert db.isnan().all()


@pytest.mark.parametrize("wrong", [-1, -100, 7, 2**40])
def test_targets_that_are_no_class(wrong):
    (x, w, b), targets = make((5,), 4, 7)
    targets[3] = wrong
    loss, (dx, *_) = differentiate([x, w, b], targets)
    assert loss.isnan()
    assert dx.isnan().all(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_autocast(dtype, own):
    """The factors are rounded; parameters and their gradients keep their dtype."""
    tensors, targets = make((30,), 16, 27)
    x = tensors[0].detach().to(own).requires_grad_()
    with torch.autocast(DEVICE, dtype), rbn.backend("gpu"):
        loss = linear_cross_entropy(x, *tensors[1:], targets)
        found = torch.autograd.grad(loss, [x, *tensors[1:]])  # under autocast, too
    assert [gradient.dtype for gradient in found] == [own, torch.float32, torch.float32]
    rounded = [x.detach().to(dtype), tensors[1].detach().to(dtype), tensors[2].detach()]
    wanted, off_loss, gradients, off_by = in_double(rounded, targets, dtype, "mean", 1.0)
    assert abs(loss.detach().double().cpu() - wanted) <= off_loss
    slack = ROUNDING[torch.bfloat16] if own == torch.bfloat16 else 0.0  # dx in the input's type
    for one, value, off in zip(found, gradients, off_by, strict=True):
        assert ((one.double().cpu() - value).abs() <= off + slack * value.abs()).all()


def test_a_scaled_loss_in_half_precision():
    """A GradScaler's factor is applied before the gradient is rounded, so it does not underflow."""
    tensors, targets = make((300,), 8, 50, torch.float16, size=0.1)
    compare(tensors, targets, dloss=2.0**14)


def test_bits_are_the_same_without_a_graph(monkeypatch):
    tensors, targets = make((40,), 8, 27)
    expected, _ = differentiate(tensors, targets, "sum")
    monkeypatch.setattr(fused, "_apply", None)
    monkeypatch.setattr(fused, "cross_entropy_backward", None)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, rbn.backend("gpu"):
            found = linear_cross_entropy(*tensors, targets, "sum")
        assert not found.requires_grad
        assert torch.equal(found, expected)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_one_gradient_alone(wanted):
    tensors, targets = make((10,), 8, 27)
    expected = differentiate(tensors, targets)[1][wanted]
    alone = [t.detach().requires_grad_(k == wanted) for k, t in enumerate(tensors)]
    with rbn.backend("gpu"):
        linear_cross_entropy(*alone, targets).backward()
    assert torch.equal(alone[wanted].grad, expected)
    assert all(t.grad is None for k, t in enumerate(alone) if k != wanted)


def test_rows_in_another_order_of_memory_and_a_single_one():
    (x, w, b), targets = make((6, 5), 8, 27)
    turned = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    one, other = differentiate([x, w, b], targets), differentiate([turned, w, b], targets)
    for value, same in zip((one[0], *one[1]), (other[0], *other[1]), strict=True):
        assert torch.equal(value, same)
    row = x.detach()[0, 0].requires_grad_()
    loss, (dx, *_) = differentiate([row, w, b], targets[0, 0])
    assert dx.shape == (8,)
    wanted = F.cross_entropy(F.linear(row, w, b)[None], targets[:1, 0])
    torch.testing.assert_close(loss, wanted.detach())


def test_a_graph_that_is_kept_and_one_that_is_differentiated():
    (x, w, b), targets = make((6,), 8, 27)
    with rbn.backend("gpu"):
        loss = linear_cross_entropy(x, w, b, targets)
    (one,) = torch.autograd.grad(loss, w, retain_graph=True)
    (again,) = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.equal(one, again)
    (grad,) = torch.autograd.grad(loss, w, create_graph=True)
    assert torch.equal(grad, one)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy.*second derivative"):
        grad.sum().backward()


def old(x, w, b, targets, reduction="mean"):
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction=reduction)


class Launched(Exception):
    pass


def launched(*args):
    raise Launched


@pytest.mark.parametrize(
    "why", ["float64", "classes", "no rows", "compiled", "reference", "targets", "kernels"]
)
def test_what_the_kernels_leave_to_torch(why, monkeypatch):
    monkeypatch.setattr(fused, "launch_cached", launched)
    rows, C = (0 if why == "no rows" else 4, 3), 1025 if why == "classes" else 9
    tensors, targets = make(rows, 5, C, torch.float64 if why == "float64" else torch.float32)
    if why == "targets":
        targets = targets.to(torch.int32)
    context = rbn.backend("reference" if why == "reference" else "gpu")
    call = linear_cross_entropy
    if why == "compiled":
        call = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    expected = pytest.raises(Launched) if why == "kernels" else contextlib.nullcontext()
    with expected, context:
        found = call(*tensors, targets, "sum")
    if why != "kernels":
        assert torch.equal(found, old(*tensors, targets.long(), "sum"))
        assert found.dtype == torch.float32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_bits_on_the_cpu(dtype, autocast, reduction):
    tensors, targets = make((6, 5), 8, 27, dtype)
    tensors, targets = [t.detach().cpu().requires_grad_() for t in tensors], targets.cpu()
    results = []
    for call in (linear_cross_entropy, old):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(*tensors, targets, reduction)
        results.append((loss, *torch.autograd.grad(loss, tensors)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_transforms_of_torch_func():
    (x, w, b), targets = make((6,), 8, 27)
    gradient = torch.func.grad(linear_cross_entropy, 1)(x.detach(), w.detach(), b, targets)
    (expected,) = torch.autograd.grad(old(x, w, b, targets), w)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"reduction": "none"}, ValueError, "reduction.*'mean'.*'sum', got 'none'"),
        ({"targets": torch.zeros(6)}, TypeError, "targets.*integers, got torch.float32"),
        (
            {"targets": torch.zeros(5, dtype=torch.int64)},
            ValueError,
            r"targets.*shape.*\[6\], got \[5\]",
        ),
    ],
)
def test_bad_arguments(changes, error, words):
    (x, w, b), targets = make((6,), 8, 27)
    given = {"input": x, "weight": w, "bias": b, "targets": targets} | changes
    with pytest.raises(error, match=words):
        linear_cross_entropy(**given)


def test_a_language_model():
    """The kernels match the plain equations, up to the order of float32 sums."""
    torch.manual_seed(0)
    model = LanguageModel(rbn.LSTM(27, 6)).to(DEVICE)
    symbols, targets = (torch.randint(27, (4, 3), device=DEVICE) for _ in range(2))
    results = []
    for name in ("gpu", "reference"):
        with rbn.backend(name), products(tf32=False):
            loss, _ = model(symbols, targets=targets)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss.detach(), *gradients))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@on_the_card
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "H", "C"), [(6400, 1000, 50), (22912, 2000, 27)])
def test_the_papers_sizes(rows, H, C, dtype):
    """Against float64, and the same bits each time."""
    tensors, targets = make((rows,), H, C, dtype, size=H**-0.25)
    compare(tensors, targets)
    first = differentiate(tensors, targets)
    for _ in range(20):
        again = differentiate(tensors, targets)
        assert torch.equal(again[0], first[0])
        assert all(map(torch.equal, again[1], first[1]))


@on_the_card
@pytest.mark.parametrize("dtype", TYPES)
def test_a_cuda_graph(capture, dtype):
    tensors, targets = make((300,), 64, 27)

    def step():
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            loss = linear_cross_entropy(*tensors, targets)
        return loss.detach(), *torch.autograd.grad(4 * loss, tensors)

    graph, found = capture(step)
    for seed in range(3):
        others, new_targets = make((300,), 64, 27, seed=seed + 1)
        with torch.no_grad():
            for tensor, other in zip(tensors, others, strict=True):
                tensor.copy_(other)
            targets.copy_(new_targets)
        graph.replay()
        assert all(map(torch.equal, found, step()))
