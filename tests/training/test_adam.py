"""Adam and the gradient norm as one kernel each, against PyTorch's in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rbn.training import Adam, AdamW
from rbn.training.adam import part_norms, supports, update

pytest.importorskip("triton", reason="the kernels are in Triton's language")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# In the interpreter without a GPU, with the real kernel otherwise.
either = pytest.mark.gpu if ON_GPU else lambda test: test
SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


def random_tensors(sizes, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(n, generator=generator).to(DEVICE) for n in sizes]


def exact_steps(parameters, gradients, **options):
    """PyTorch's AdamW in float64, which without decay is Adam."""
    parameters = [torch.nn.Parameter(p.double()) for p in parameters]
    optimizer = torch.optim.AdamW(parameters, foreach=False, **options)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.double()
        optimizer.step()
    return [p.detach() for p in parameters]


def check_close(found, expected, lr, steps):
    # A step is at most about lr, and its parts are rounded a few times; so is every sum.
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).abs().max() <= steps * (2e-7 * y.abs().max() + 2e-6 * lr)


@pytest.mark.slow
@pytest.mark.no_cover
@either
@settings(max_examples=20)
@given(
    SIZES,
    st.integers(0, 1000),
    st.sampled_from([(0.9, 0.999), (0.0, 0.99), (0.5, 0.0)]),
    st.sampled_from([0.0, 0.3]),
)
def test_steps_are_those_of_pytorch(sizes, seed, betas, decay):
    parameters = random_tensors(sizes, seed)
    gradients = [random_tensors(sizes, seed + k, 10.0 ** (k - 1)) for k in range(3)]
    expected = exact_steps(
        parameters, gradients, lr=0.01, betas=betas, eps=1e-8, weight_decay=decay
    )
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    divisor = torch.tensor(4.0, device=DEVICE)
    for k, step in enumerate(gradients):
        steps = [torch.tensor(k + 1.0, device=DEVICE) for _ in parameters]
        update(
            *(parameters, [4 * g for g in step], means, squares),
            steps=steps,
            rate=torch.tensor(0.01, device=DEVICE) if k == 1 else 0.01,
            betas=betas,
            eps=1e-8,
            decay=decay,
            divisor=divisor,
            skip=torch.zeros((), device=DEVICE),
        )
    check_close(parameters, expected, 0.01, 3)


@either
def test_a_step_that_is_left_out_changes_nothing():
    tensors = [random_tensors([700, 5], k) for k in range(4)]
    tensors[3] = [square.abs() for square in tensors[3]]
    tensors[1][0][3] = float("nan")
    before = copy.deepcopy(tensors)
    steps = [torch.ones((), device=DEVICE) for _ in range(2)]
    options = {"rate": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    update(*tensors, steps=steps, skip=torch.ones((), device=DEVICE), **options)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


@either
@settings(max_examples=20)
@given(SIZES, st.integers(0, 1000))
def test_norms_of_parts(sizes, seed):
    tensors = random_tensors(sizes, seed, 3.0)
    expected = torch.linalg.vector_norm(torch.cat(tensors).double())
    found = torch.linalg.vector_norm(part_norms(tensors).double())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@either
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
def test_norms_of_what_is_not_finite(value):
    tensors = random_tensors([3000, 5000, 1], 1)
    tensors[1][4999] = value
    assert not torch.isfinite(part_norms(tensors)).all()


@either
def test_many_numbers_have_no_more_parts_than_one_program_adds():
    tensors = [torch.ones(size, device=DEVICE) for size in (5_000_000, 3, 20_000_000)]
    if not ON_GPU:  # the interpreter takes a while for each program
        tensors = [t[: len(t) // 1000 + 1] for t in tensors]
    parts = part_norms(tensors)
    assert len(parts) <= 4096
    total = sum(t.numel() for t in tensors)
    assert float(torch.linalg.vector_norm(parts)) == pytest.approx(total**0.5, rel=1e-6)


def test_what_the_kernels_are_not_for():
    x = torch.zeros(4)
    assert not supports([])
    assert not supports([x])  # on a CPU


def model_and_gradients(device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 3)).to(device)
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(4)]
    return model, gradients


def make_steps(optimizer, model, gradients):
    for step in gradients:
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


KINDS = {"adam": (Adam, torch.optim.Adam), "adamw": (AdamW, torch.optim.AdamW)}


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_it_is_pytorchs_own(kind):
    model, gradients = model_and_gradients("cpu")
    twin = copy.deepcopy(model)
    ours, theirs = (
        make(m.parameters(), fused=True) for make, m in zip(KINDS[kind], (model, twin), strict=True)
    )
    assert all(
        torch.equal(x, y)
        for x, y in zip(
            make_steps(ours, model, gradients), make_steps(theirs, twin, gradients), strict=True
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_once(kind):
    """Although PyTorch's class, whose step ours uses on a CPU, has its own hooks."""
    ours, theirs = KINDS[kind]
    theirs([torch.nn.Parameter(torch.ones(2))])
    parameter, calls = torch.nn.Parameter(torch.ones(2)), []
    optimizer = ours([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["before", "after"]
    assert parameter.detach().amax() < 0.95


def test_options_as_pytorch_takes_them():
    (group,) = Adam([torch.nn.Parameter(torch.ones(2))], 0.1, fused=None).param_groups
    assert (group["lr"], group["fused"]) == (0.1, True)


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True}])
def test_it_is_always_fused(options):
    with pytest.raises(ValueError, match=r"rbn\.training\.Adam is always fused"):
        Adam([torch.nn.Parameter(torch.ones(2))], **options)


@either
def test_a_closure_is_asked_for_the_gradients_of_its_step():
    """Earlier ones do not belong to the step."""
    results = []
    for kind in (Adam, torch.optim.Adam):
        model, (old, new, *_) = model_and_gradients(DEVICE)
        optimizer = kind(model.parameters(), fused=True)
        parameters = list(model.parameters())
        parameters[0].grad = old[0].clone()

        def closure(parameters=parameters, new=new):
            for parameter, gradient in zip(parameters, new, strict=True):
                parameter.grad = gradient.clone()
            return 1.5

        assert optimizer.step(closure) == 1.5
        results.append([p.detach() for p in parameters])
    torch.testing.assert_close(*results)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
class TestOnGPU:
    @pytest.mark.parametrize("kind", KINDS)
    def test_its_steps_and_states_are_pytorchs(self, kind, monkeypatch):
        model, gradients = model_and_gradients("cuda")
        twin = copy.deepcopy(model)
        make, peer = KINDS[kind]
        ours, theirs = make(model.parameters()), peer(twin.parameters(), fused=True)
        with monkeypatch.context() as patch:  # run the kernel, not the fallback
            patch.setattr(peer, "step", lambda *_: pytest.fail("PyTorch's step ran"))
            make_steps(ours, model, gradients)
        make_steps(theirs, twin, gradients)
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
        found, expected = (make_steps(o, m, gradients) for o, m in ((ours, model), (theirs, twin)))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)

    def test_a_skipped_step_is_not_counted(self):
        model, gradients = model_and_gradients("cuda")
        optimizer = Adam(model.parameters())
        before = make_steps(optimizer, model, gradients[:1])
        optimizer.found_inf = torch.ones((), device="cuda")
        optimizer.grad_scale = torch.ones((), device="cuda")
        after = make_steps(optimizer, model, gradients[1:2])
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        assert [int(s["step"]) for s in optimizer.state.values()] == [1] * 4

    @pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"amsgrad": True}])
    def test_other_options_are_pytorchs(self, options):
        model, gradients = model_and_gradients("cuda")
        twin = copy.deepcopy(model)
        ours = Adam(model.parameters(), **options)
        theirs = torch.optim.Adam(twin.parameters(), fused=True, **options)
        found, expected = (make_steps(o, m, gradients) for o, m in ((ours, model), (theirs, twin)))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_in_a_graph_and_again_the_same_bits(self):
        results = []
        for _ in range(2):
            model, gradients = model_and_gradients("cuda")
            rate = torch.tensor(0.001, device="cuda")
            optimizer = Adam(model.parameters(), lr=rate, capturable=True)
            make_steps(optimizer, model, gradients[:1])
            for parameter, gradient in zip(model.parameters(), gradients[1], strict=True):
                parameter.grad = gradient.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                optimizer.step()
            for _ in range(3):
                graph.replay()
            results.append([p.detach().clone() for p in model.parameters()])
        eager, gradients = model_and_gradients("cuda")
        optimizer = Adam(eager.parameters(), lr=0.001)
        steps = [gradients[0], *[gradients[1]] * 3]
        results.append(make_steps(optimizer, eager, steps))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))
