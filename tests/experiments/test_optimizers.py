"""The optimiser of a config: its parameters, and runs that are stopped."""

import pytest
import torch

from rbn.experiments.build import build, check
from rbn.experiments.config import from_mapping
from rbn.experiments.optimizers import make_optimizer

CPU = torch.device("cpu")
SMALL = {"task": "digits", "hidden_size": 4, "batch_size": 600, "epochs": 3, "decay_from": 0.3}
ADAMW = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1}


def test_weight_decay_is_of_matrices():
    config = from_mapping(SMALL | {"optimizer": ADAMW})
    model = build(config, 1, CPU).model
    decayed, others = make_optimizer(config, model).param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["lr"] == others["lr"] == 0.01
    wanted = {name for name, p in model.named_parameters() if "weight" in name}
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == wanted
    assert {names[id(p)] for p in others["params"]} == set(names.values()) - wanted


def test_what_gets_no_gradient_gets_smaller():
    """Only what should decay, and by the requested amount."""
    config = from_mapping(SMALL | {"optimizer": ADAMW})
    model = build(config, 1, CPU).model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(config, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        part = 1 - 0.01 * 0.1 if parameter.ndim > 1 else 1
        torch.testing.assert_close(parameter.detach(), part * before[name])


@pytest.mark.parametrize("optimizer", [ADAMW, {"name": "adam", "lr": 0.01}])
def test_a_stopped_run_goes_on_to_the_same_numbers(optimizer, stopped_and_whole):
    stopped_and_whole(from_mapping(SMALL | {"optimizer": optimizer}), 2)


def test_betas_may_be_whole_numbers():
    """PyTorch requires floats."""
    optimizer = {"name": "adam", "betas": [0, 0.99]}
    config = from_mapping(SMALL | {"optimizer": optimizer})
    assert make_optimizer(config, torch.nn.Linear(2, 2)).param_groups[0]["betas"] == (0.0, 0.99)


def test_options_that_do_not_go_together():
    optimizer = {"name": "adam", "fused": True, "foreach": True}
    with pytest.raises(ValueError, match=r"optimizer.*foreach"):
        check(from_mapping(SMALL | {"optimizer": optimizer}))


def test_a_model_that_is_too_large_is_named():
    for model, size in (("bn-lstm", 10**12), ("irnn", 10**12), ("lstm", 2**62)):
        config = from_mapping(SMALL | {"model": model, "hidden_size": size})
        with pytest.raises(ValueError, match=rf"not enough memory for .* hidden_size {size}$"):
            build(config, 1, CPU)


def test_options_that_an_optimiser_does_not_have_are_named():
    with pytest.raises(ValueError, match="momentum"):
        check(from_mapping(SMALL | {"optimizer": ADAMW | {"momentum": 0.9}}))
    with pytest.raises(ValueError, match="weight_decay"):
        check(from_mapping(SMALL | {"optimizer": ADAMW | {"weight_decay": -1.0}}))
