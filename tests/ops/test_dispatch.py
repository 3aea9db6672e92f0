"""Which backend runs."""

import inspect
import threading

import pytest
import torch
from recurrence_cases import OPS, RESULTS, call, make_case

import rbn
from rbn.ops import cpu, dispatch, functional, reference

ON_CPU, ON_META = torch.empty(1), torch.empty(1, device="meta")


def selected(like=ON_CPU):
    return dispatch.select("bn_lstm", like)


def test_the_names():
    assert set(rbn.backends()) >= {"reference", "cpu"}
    assert rbn.backend is rbn.ops.backend


def test_the_device_chooses_by_default():
    assert selected(ON_CPU) is cpu.bn_lstm
    assert selected(ON_META) is reference.bn_lstm


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_found_by_its_name(op):
    assert dispatch.select(op, ON_CPU) is getattr(cpu, op)
    with rbn.backend("reference"):
        assert dispatch.select(op, ON_CPU) is getattr(reference, op)


@pytest.mark.parametrize("op", OPS)
def test_all_backends_have_the_signature_of_the_public_function(op):
    def parameters(module):
        found = inspect.signature(getattr(module, op)).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    assert parameters(reference) == parameters(functional)
    # Rows of several processes are the reference's affair.
    assert parameters(cpu) == [p for p in parameters(functional) if p[0] != "group"]


@pytest.mark.parametrize("op", ["bn_lstm", "bn_rnn"])
def test_rows_of_several_processes_run_the_reference_alone(op):
    case = make_case(op, 2, 3, 2)
    with (
        rbn.backend("cpu"),
        pytest.raises(RuntimeError, match=r'"cpu".* has no statistics over several processes'),
    ):
        call(case.with_options(group=object()))


def test_blocks_nest():
    with rbn.backend("reference"):
        assert selected() is reference.bn_lstm
        with rbn.backend("cpu"):
            assert selected() is cpu.bn_lstm
            with rbn.backend("reference"):
                assert selected() is reference.bn_lstm
            assert selected() is cpu.bn_lstm
        assert selected() is reference.bn_lstm
    assert selected() is cpu.bn_lstm


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
    assert selected() is cpu.bn_lstm
    with rbn.backend("cpu"):
        outside.set()
        thread.join()
        assert dispatch._forced == "cpu"  # what compiled functions see
    assert found == [reference.bn_lstm]
    assert dispatch._forced is None


def test_an_exception_ends_the_block_too():
    with rbn.backend("cpu"):
        with pytest.raises(KeyError), rbn.backend("reference"):
            raise KeyError
        assert selected() is cpu.bn_lstm
        assert dispatch._forced == "cpu"
    assert dispatch._forced is None


def test_an_unknown_name_is_refused_and_changes_nothing():
    with (
        rbn.backend("reference"),
        pytest.raises(ValueError, match=r"backend must be one of reference, cpu.*, got 'cuda'"),
        rbn.backend("cuda"),
    ):
        pytest.fail("the block must not be entered")
    with rbn.backend("reference"):
        with pytest.raises(ValueError, match="'CPU'"), rbn.backend("CPU"):
            pytest.fail("the block must not be entered")
        assert selected() is reference.bn_lstm
    assert selected() is cpu.bn_lstm


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
    for module in (reference, cpu):
        original = module.lstm
        monkeypatch.setattr(
            module,
            "lstm",
            lambda *args, _run=original, _name=module.__name__, **options: (
                ran.append(_name) or _run(*args, **options)
            ),
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
    assert found == [reference.bn_lstm, reference.bn_lstm]
    with rbn.backend("cpu"), pytest.raises(RuntimeError, match=r'only rbn\.backend\("reference"\)'):
        torch.func.grad(chosen)(torch.ones(2))
