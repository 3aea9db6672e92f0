"""Which backend runs."""

import importlib
import inspect
import threading

import pytest
import torch
from recurrence_cases import (
    NORMALIZED_BY_BATCH,
    OPS,
    RESULTS,
    arguments,
    call,
    definition_of,
    make_case,
    operator_call,
)

import rbn
from rbn.ops import cpu, dispatch, reference

ON_CPU, ON_META = torch.empty(1), torch.empty(1, device="meta")


def selected(like=ON_CPU):
    return dispatch.backend_for(like)


def test_the_names():
    assert set(rbn.backends()) >= {"reference", "cpu"}
    assert rbn.backend is rbn.ops.backend


def test_the_device_chooses_by_default():
    assert selected(ON_CPU) == "cpu"
    assert selected(ON_META) == "reference"


@pytest.mark.parametrize("name", ["symbol_rows", "linear_cross_entropy"])
def test_every_function_is_found_by_its_name(name):
    assert dispatch.select(name, ON_CPU) is getattr(cpu, name)
    with rbn.backend("reference"):
        assert dispatch.select(name, ON_CPU) is getattr(reference, name)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_an_operator(op):
    case = make_case(op, 2, 3, 2)
    assert operator_call(case, "cpu")[0] == f"cpu_{definition_of(op).name}"
    assert reference.operator_for(definition_of(op), [arguments(case)]) is None


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_backend_is_asked_the_same(name):
    if name == "gpu":
        pytest.importorskip("triton", reason="the GPU's kernels need triton")
    module = importlib.import_module(f"rbn.ops.{name}")
    for function, names in (
        ("operator_for", ["definition", "calls"]),
        ("joins", ["definition", "calls"]),
        ("tf32_allowed", []),
    ):
        assert list(inspect.signature(getattr(module, function)).parameters) == names


@pytest.mark.parametrize("op", NORMALIZED_BY_BATCH)
def test_rows_of_several_processes_run_the_reference_alone(op):
    case = make_case(op, 2, 3, 2)
    with (
        rbn.backend("cpu"),
        pytest.raises(RuntimeError, match=r'"cpu".* several processes'),
    ):
        call(case.with_options(group=object()))


def test_blocks_nest():
    with rbn.backend("reference"):
        assert selected() == "reference"
        with rbn.backend("cpu"):
            assert selected() == "cpu"
            with rbn.backend("reference"):
                assert selected() == "reference"
            assert selected() == "cpu"
        assert selected() == "reference"
    assert selected() == "cpu"


def test_a_block_is_of_its_thread():
    inside, outside = threading.Event(), threading.Event()
    found = []

    def other():
        with rbn.backend("reference"):
            inside.set()
            outside.wait(60)
            found.append(selected())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(60)
    assert selected() == "cpu"
    with rbn.backend("cpu"):
        outside.set()
        thread.join()
        assert dispatch._forced == "cpu"  # what compiled functions see
    assert found == ["reference"]
    assert dispatch._forced is None


def test_an_exception_ends_the_block_too():
    with rbn.backend("cpu"):
        with pytest.raises(KeyError), rbn.backend("reference"):
            raise KeyError
        assert selected() == "cpu"
        assert dispatch._forced == "cpu"
    assert dispatch._forced is None


def test_an_unknown_name_is_refused_and_changes_nothing():
    with (
        rbn.backend("reference"),
        pytest.raises(ValueError, match=r"backend.*reference, cpu.*got 'cuda'"),
        rbn.backend("cuda"),
    ):
        pytest.fail("the block must not be entered")
    with rbn.backend("reference"):
        with pytest.raises(ValueError, match="'CPU'"), rbn.backend("CPU"):
            pytest.fail("the block must not be entered")
        assert selected() == "reference"
    assert selected() == "cpu"


def test_the_cpu_operator_takes_no_tensor_from_elsewhere():
    with rbn.backend("cpu"), pytest.raises(RuntimeError, match=r'rbn.backend\("cpu"\).* on meta'):
        selected(ON_META)


@pytest.mark.parametrize("op", OPS)
def test_other_devices_run_the_reference(op):
    case = make_case(op, 3, 4, 2)
    meta = case.with_tensors(**{name: v.to("meta") for name, v in case.present().items()})
    results, expected = call(meta), call(case)
    for name in RESULTS[op]:
        assert results[name].device.type == "meta"
        assert results[name].shape == expected[name].shape
        assert results[name].dtype == expected[name].dtype


def test_the_block_decides_what_a_call_runs(monkeypatch):
    case, ran = make_case("lstm", 2, 2, 2), []
    for module, name in ((reference, "run"), (cpu, "operator_for")):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, _run=original, _name=module.__name__: ran.append(_name) or _run(*args),
        )
    call(case)
    call(case, "reference")
    call(case, "cpu")
    assert ran == ["rbn.ops.cpu", "rbn.ops.reference", "rbn.ops.cpu"]


def test_under_torch_func_the_reference_runs():
    def chosen(x):
        found.append(selected(x))
        return x.sum()

    found = []
    torch.func.grad(chosen)(torch.ones(2))
    torch.func.vmap(chosen)(torch.ones(2, 2))
    assert found == ["reference", "reference"]
    with rbn.backend("cpu"), pytest.raises(RuntimeError, match=r'only rbn\.backend\("reference"\)'):
        torch.func.grad(chosen)(torch.ones(2))
