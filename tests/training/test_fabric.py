"""The construction of Fabric."""

import logging

import pytest
import torch

from rbn.training import make_fabric


@pytest.mark.parametrize("name", ["lightning.fabric", "lightning.pytorch"])
def test_advice_on_every_gpu_is_left_out(name):
    """Four lines of advice about float32 products, whatever the precision."""
    logging.getLogger(name).setLevel(logging.INFO)  # as set by Lightning
    speaking = logging.getLogger(f"{name}.utilities.rank_zero")
    assert speaking.isEnabledFor(logging.INFO)
    make_fabric(torch.device("cpu"))
    assert not speaking.isEnabledFor(logging.INFO)
    assert speaking.isEnabledFor(logging.WARNING)
