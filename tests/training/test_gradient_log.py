"""The gradient log, with PyTorch operations and with the kernel."""

import math

import pytest
import torch

from rbn.training.gradient_log import GradientLog

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


def recorded(log, device):
    for loss, norm in STEPS:
        loss, norm = (torch.tensor(v, device=device) for v in (loss, norm))
        yield [float(v) for v in log.record(loss, norm, clip=2.0)]


def check(log, device):
    counts, scales = [], [1.0]
    for (loss, norm), (divisor, found) in zip(STEPS, recorded(log, device), strict=True):
        assert found == (not math.isfinite(norm)), (loss, norm)
        if not found:
            scale = scales[-1]
            assert divisor == pytest.approx(max(scale, (norm + scale * 1e-6) / 2), rel=1e-6)
        counts.append((int(log.skipped), int(log.in_a_row), int(log.bad)))
        scales.append(float(log.loss_scale))
    assert scales[1:] == [1, 1, 2**-20, 2**-40, 2**-39, 2**-38]
    assert counts == [(0, 0, -1), (0, 0, -1), (1, 1, -1), (2, 2, -1), (2, 0, 4), (2, 0, 4)]
    assert int(log.number) == 6
    assert math.isnan(float(log.total))


def check_the_ends(log, device):
    """The loss scale stays within its limits, and does not grow while the norm is large."""
    scales = []
    for norm in [math.inf] * 5 + [1e10] + [1.0] * 90:
        log.record(torch.tensor(1.0, device=device), torch.tensor(norm, device=device))
        scales.append(float(log.loss_scale))
    assert scales[:8] == [2**-20, 2**-40, 2**-60, 2**-80, 2**-80, 2**-80, 2**-79, 2**-78]
    assert scales[-11:] == [1.0] * 11


@pytest.mark.parametrize("device", DEVICES)
def test_operations_and_kernel(device):
    check(GradientLog(torch.device(device)), device)
    check_the_ends(GradientLog(torch.device(device)), device)


def test_the_kernel_by_the_interpreter():
    pytest.importorskip("triton", reason="the kernel is in Triton's language")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    log = GradientLog(torch.device("cpu"))
    log._uses_kernel = True
    check(log, "cpu")
    log = GradientLog(torch.device("cpu"))
    log._uses_kernel = True
    check_the_ends(log, "cpu")
    log = GradientLog(torch.device("cpu"))
    log._uses_kernel = True
    check_parts(log, "cpu")


def check_parts(log, device):
    """With the norms of parts instead of the norm of all gradients."""
    parts = torch.arange(1.0, 701.0, device=device)
    parts[3] = 1e-30
    divisor, found = (float(v) for v in log.record(parts[0], parts, clip=0.5))
    assert divisor == pytest.approx(2 * math.sqrt(float((parts.double() ** 2).sum())), rel=1e-6)
    assert found == 0
    parts[699] = math.nan
    assert float(log.record(parts[0], parts)[1]) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_norms_of_parts(device):
    check_parts(GradientLog(torch.device(device)), device)


@pytest.mark.parametrize("device", DEVICES)
def test_without_clipping(device):
    log = GradientLog(torch.device(device))
    for value in (1.5, 2.5):
        log.record(torch.tensor(value, device=device))
    assert float(log.total) == 4
    assert int(log.number) == 2
    assert int(log.skipped) == 0
