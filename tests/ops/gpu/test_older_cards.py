"""GPUs before Hopper, and GPUs not from NVIDIA: what runs there, tested without having one."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import rbn
from rbn.ops import dispatch, reference
from rbn.ops.definition import LSTM, LSTMArguments

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops import gpu
from rbn.ops.gpu.lstm import cuda_kernels
from rbn.ops.gpu.lstm.portable import portable_kernels
from rbn.ops.gpu.lstm.term import Term
from rbn.ops.gpu.runtime import nvrtc
from rbn.ops.gpu.runtime.device import has_product
from rbn.ops.gpu.symbols import look_up

ON_A_CARD = types.SimpleNamespace(device=torch.device("cuda", 0))


@pytest.fixture
def card(monkeypatch):
    """Makes the GPU appear as one of another compute capability."""
    caches = (dispatch._capability, nvrtc.supports, portable_kernels._fits)

    def of(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        for cache in caches:
            cache.cache_clear()

    yield of
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(
    ("capability", "name"),
    [((6, 1), "reference"), ((7, 0), "gpu"), ((7, 5), "gpu"), ((9, 0), "gpu")],
)
def test_kernels_run_from_compute_capability_7_on(capability, name, card):
    card(*capability)
    assert dispatch.backend_for(ON_A_CARD) == name
    module = {"reference": reference, "gpu": gpu}[name]
    for function in ("symbol_rows", "linear_cross_entropy"):
        assert dispatch.select(function, ON_A_CARD) is getattr(module, function)


def test_asked_for_a_card_too_old_is_said(card):
    card(6, 1)
    with rbn.backend("gpu"), pytest.raises(RuntimeError, match="needs triton and a card it suppor"):
        dispatch.backend_for(ON_A_CARD)


def test_cards_of_another_maker_run_the_reference(card, monkeypatch):
    """Their capabilities look like Hopper's."""
    card(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert dispatch.backend_for(ON_A_CARD) == "reference"


@pytest.mark.parametrize(
    ("capability", "compiler", "family"),
    [
        ((7, 0), True, None),
        ((7, 5), True, None),
        ((8, 0), True, cuda_kernels.PORTABLE),
        ((8, 0), False, None),
    ],
)
def test_cuda_needs_ampere_and_its_compiler(capability, compiler, family, card, monkeypatch):
    card(*capability)
    properties = types.SimpleNamespace(multi_processor_count=80)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(portable_kernels, "shared_limit", lambda device: 96 * 1024)
    monkeypatch.setattr(nvrtc, "works", lambda number: compiler and number == capability)
    term = Term((5, 100, 400), torch.float16, torch.device("cuda", 0))
    a = LSTMArguments(**dict.fromkeys(LSTM.tensors))
    assert cuda_kernels.family(term, a) == family


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.bfloat16, False),
        ((7, 5), torch.float16, False),
        ((7, 5), torch.float32, True),
        ((8, 0), torch.bfloat16, True),
        ((8, 0), torch.float16, True),
    ],
)
def test_where_products_of_half_precision_are_made(capability, dtype, expected, card):
    """Elsewhere factors are converted to a wider dtype."""
    card(*capability)
    assert has_product(torch.device("cuda", 0), dtype) is expected


def test_widened_symbols_are_multiplied_fewer_rows_at_a_time():
    assert look_up._tile(256, torch.bfloat16, False)[1] == 64
    assert look_up._tile(256, torch.bfloat16, True)[1] == 32


KERNELS = {
    *("raise_variances", "count_rows", "input_moments", "write_constants"),
    *("ln_lstm_step", "ln_lstm_step_backward", "ln_input_backward", "ln_input_moments"),
    *(
        "ln_parameter_sums",
        "lstm_step",
        "lstm_step_backward",
        "bn_rnn_step",
        "bn_rnn_step_backward",
    ),
    *("symbol_sums", "add_shares", "lstm_cell_step"),
}
CARDS = {75: 64, 70: 96}  # KB of shared memory, by compute capability


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.skipif(torch.cuda.is_available(), reason="of a card that is not there")
def test_kernels_compile_for_older_cards(tmp_path):
    """Compiled to machine code; none uses more shared memory than such a GPU has."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("older_card.py")
    done = subprocess.run(
        [sys.executable, program, *map(str, CARDS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kilobytes, kernels in zip(CARDS.values(), found, strict=True):
        assert {name for name, _ in kernels} == KERNELS
        for name, shared in kernels:
            assert shared <= 1024 * kilobytes, name
