"""What is noted of steps, by PyTorch's operations and by a kernel."""

import math

import pytest
import torch

from rbn.training.ledger import Ledger

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
STEPS = [(1.0, 0.5), (2.0, 8.0), (3.0, math.inf), (4.0, math.nan), (math.nan, 1.0), (5.0, 2.0)]


def entered(ledger, device):
    for loss, norm in STEPS:
        loss, norm = (torch.tensor(v, device=device) for v in (loss, norm))
        yield [float(v) for v in ledger.enter(loss, norm, clip=2.0)]


def check(ledger, device):
    counts, scales = [], [1.0]
    for (loss, norm), (divisor, found) in zip(STEPS, entered(ledger, device), strict=True):
        assert found == (not math.isfinite(norm)), (loss, norm)
        if not found:
            scale = scales[-1]
            assert divisor == pytest.approx(max(scale, (norm + scale * 1e-6) / 2), rel=1e-6)
        counts.append((int(ledger.skipped), int(ledger.in_a_row), int(ledger.bad)))
        scales.append(float(ledger.loss_scale))
    assert scales[1:] == [1, 1, 2**-20, 2**-40, 2**-39, 2**-38]
    assert counts == [(0, 0, -1), (0, 0, -1), (1, 1, -1), (2, 2, -1), (2, 0, 4), (2, 0, 4)]
    assert int(ledger.number) == 6
    assert math.isnan(float(ledger.total))


def check_the_ends(ledger, device):
    """The scale goes no lower and no higher than it may, and stays while there is little room."""
    scales = []
    for norm in [math.inf] * 5 + [1e10] + [1.0] * 90:
        ledger.enter(torch.tensor(1.0, device=device), torch.tensor(norm, device=device))
        scales.append(float(ledger.loss_scale))
    assert scales[:8] == [2**-20, 2**-40, 2**-60, 2**-80, 2**-80, 2**-80, 2**-79, 2**-78]
    assert scales[-11:] == [1.0] * 11


@pytest.mark.parametrize("device", DEVICES)
def test_operations_and_kernel(device):
    check(Ledger(torch.device(device)), device)
    check_the_ends(Ledger(torch.device(device)), device)


def test_the_kernel_by_the_interpreter():
    pytest.importorskip("triton", reason="the kernel is in Triton's language")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    ledger = Ledger(torch.device("cpu"))
    ledger._in_one = True
    check(ledger, "cpu")
    ledger = Ledger(torch.device("cpu"))
    ledger._in_one = True
    check_the_ends(ledger, "cpu")
    ledger = Ledger(torch.device("cpu"))
    ledger._in_one = True
    check_parts(ledger, "cpu")


def check_parts(ledger, device):
    """Of norms of parts, and of the norm of all."""
    parts = torch.arange(1.0, 701.0, device=device)
    parts[3] = 1e-30
    divisor, found = (float(v) for v in ledger.enter(parts[0], parts, clip=0.5))
    assert divisor == pytest.approx(2 * math.sqrt(float((parts.double() ** 2).sum())), rel=1e-6)
    assert found == 0
    parts[699] = math.nan
    assert float(ledger.enter(parts[0], parts)[1]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_parts(device):
    check_parts(Ledger(torch.device(device)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_without_clipping(device):
    ledger = Ledger(torch.device(device))
    for value in (1.5, 2.5):
        ledger.enter(torch.tensor(value, device=device))
    assert float(ledger.total) == 4
    assert int(ledger.number) == 2
    assert int(ledger.skipped) == 0
