"""torch.compile over the functional ops: one graph, the same results as in eager mode."""

import pytest
import torch
from recurrence_cases import NORMALIZED_BY_BATCH, OPS, RESULTS, assert_same, call, make_case

import rbn.ops
from rbn.ops import Statistics

LENGTHS = [4, 2, 1, 4]
SETS = {
    "plain": {},
    "lengths": {"lengths": LENGTHS, "zoneout": ("mask", 0.3)},
    "population": {"population": 2},
    "padding counts": {"lengths": LENGTHS, "padding": "include", "input_stats": "sequence"},
}
CALLS = [
    pytest.param(op, SETS[name], id=f"{op}: {name}")
    for op in OPS
    for name in SETS
    if op in NORMALIZED_BY_BATCH or name in ("plain", "lengths")
]


@pytest.fixture(autouse=True)
def forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(case):
    """A function around the op, so that the graph contains more than the op."""

    def run(tensors):
        values = getattr(rbn.ops, case.op)(
            *(2 * v if v is not None else v for v in tensors), **case.options
        )
        *states, statistics = values if isinstance(values[-1], Statistics) else (*values, None)
        return [state + 1 for state in states], statistics

    return run


def run(function, case):
    leaves = {name: v.clone().requires_grad_() for name, v in case.present().items()}
    states, statistics = function(list((case.tensors | leaves).values()))
    results = dict(zip(RESULTS[case.op], states, strict=True))
    used = [results[name] for name in case.cotangents]
    gradients = torch.autograd.grad(
        used, list(leaves.values()), list(case.cotangents.values()), allow_unused=True
    )
    if statistics is not None:
        results |= statistics._asdict()
    return results, dict(zip(leaves, gradients, strict=True))


def assert_compiles(case, backend):
    compiled = torch.compile(model(case), fullgraph=True, backend=backend)
    expected, expected_gradients = run(model(case), case)
    results, gradients = run(compiled, case)
    assert_same(results, expected, 0.0)
    assert_same(gradients, expected_gradients, 0.0)


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize(("op", "options"), CALLS)
def test_aot_eager(op, options):
    assert_compiles(make_case(op, 4, 4, 3, **options), "aot_eager")


@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
def test_one_result_alone(op):
    assert_compiles(make_case(op, 4, 4, 3, used=("h_n",)), "aot_eager")


@pytest.mark.no_cover
@pytest.mark.parametrize("op", OPS)
def test_inference(op):
    options = {"population": 2} if op in NORMALIZED_BY_BATCH else {}
    case = make_case(op, 4, 4, 3, **options)
    with torch.no_grad():
        compiled = torch.compile(model(case), fullgraph=True, backend="aot_eager")
        states, _ = compiled(list(case.tensors.values()))
        expected, _ = model(case)(list(case.tensors.values()))
    for state, want in zip(states, expected, strict=True):
        assert torch.equal(state, want)


def test_one_graph_for_any_number_of_steps():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(tensors):
        return rbn.ops.bn_lstm(*tensors)[0]

    compiled = torch.compile(run, fullgraph=True, backend=count, dynamic=True)
    with torch.no_grad():
        for T in (5, 7, 9):  # different from all other sizes, which torch would treat as the same
            case = make_case("bn_lstm", T, 4, 3)
            output = compiled(list(case.tensors.values()))
            assert torch.equal(output, call(case, "cpu")["output"])
    assert len(graphs) == 1
