"""Argument checks with clear error messages.

They run before any work is done and never read values from an accelerator, which would make the
host wait. For mistakes that `torch.nn.LSTM` detects too, error type and wording are torch's.
"""

from __future__ import annotations

import itertools
import operator
import sys
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rbn.ops.types import check_lengths, readable, to_device

_KNOWN = "_rbn_values"  # attribute of the tensors that `lengths` returns
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_REAL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})  # few torch operations take them


def positive_integer(name: str, value: Any) -> int:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def layer_size(name: str, value: Any) -> int:
    """Like `positive_integer`, for an argument of `torch.nn.LSTM`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} should be of type int, got: {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be greater than zero, got {value}")
    return value


def layer_flag(name: str, value: Any) -> bool:
    """Like `boolean`, for an argument of `torch.nn.LSTM`."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} should be of type bool, got: {type(value).__name__} {value!r}")
    return value


def dropout_rate(value: Any) -> float:
    """Like `probability`, for the `dropout` of `torch.nn.LSTM`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not 0 <= float(value) <= 1:
        raise ValueError(f"dropout should be a number in range [0, 1], got {value!r}")
    return float(value)


def integer(name: str, value: Any) -> int:
    """A Python or NumPy integer, an integer tensor, or a `SymInt` of a traced program."""
    result: int = value
    if type(value) in (int, torch.SymInt):
        return result
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def boolean(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def number(name: str, value: Any) -> float:
    """A real Python or NumPy number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def not_negative(name: str, value: Any) -> float:
    """A finite number of at least 0."""
    result = number(name, value)
    if result < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    if not result < float("inf"):
        raise ValueError(f"{name} must be finite, got {value}")
    return result


def positive(name: str, value: Any) -> float:
    """A finite number above 0."""
    result = not_negative(name, value)
    if result == 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return result


def probability(name: str, value: Any) -> float:
    """A number from 0 to 1."""
    result = number(name, value)
    if not 0 <= result <= 1:
        raise ValueError(f"{name} must lie between 0 and 1, got {value}")
    return result


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    """One of the options."""
    if not isinstance(value, str) or value not in options:
        listed = ", ".join(map(repr, options))
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return str(value)


def zoneout_rates(value: float | Sequence[float], states: int) -> tuple[float, ...]:
    """One rate per state: (cell, hidden) for an LSTM, one number for a simple RNN."""
    if states == 1:
        if not isinstance(value, Real):
            raise ValueError(f"zoneout must be one rate, got {value!r}")
        return (probability("zoneout", value),)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != states:
        raise ValueError(f"zoneout must be a pair of rates (cell, hidden), got {value!r}")
    return tuple(probability("zoneout", rate) for rate in value)


def sequence_input(input: Tensor, input_size: int, weight: Tensor, autocast: bool) -> None:
    """Check the rank, feature size, dtype and device of a layer's input."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a Tensor or a PackedSequence, got {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        kind = "nested" if input.is_nested else str(input.layout).removeprefix("torch.")
        raise ValueError(
            f"input must be a dense Tensor, got a {kind} one: pad it and pass lengths, or pack it"
        )
    if input.dim() not in (2, 3):
        raise ValueError(
            f"input must have 3 dimensions (or 2 without a batch), got shape {tuple(input.shape)}"
        )
    features(input, input_size, weight, autocast)


def is_integer_vector(value: Any) -> bool:
    """Whether a value is a list, tuple, one-dimensional tensor or NumPy array of integers."""
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(each, int) for each in value)
    if isinstance(value, Tensor):
        return value.dim() == 1 and value.dtype in _INTEGERS | _UNSIGNED
    return getattr(getattr(value, "dtype", None), "kind", "") in ("i", "u")


def floating(name: str, dtype: torch.dtype | None) -> None:
    """Reject a dtype that the parameters of recurrent layers cannot have."""
    if dtype is not None and dtype not in _REAL:
        error = RuntimeError if isinstance(dtype, torch.dtype) else TypeError
        raise error(f"{name} must be a real floating-point type such as torch.float32, got {dtype}")


def is_symbols(input: Any) -> bool:
    """Whether an input holds symbols: integers that stand for one-hot vectors."""
    return isinstance(input, Tensor) and input.dtype in _INTEGERS and input.dim() in (1, 2)


def symbols(input: Tensor, input_size: int, weight: Tensor) -> Tensor:
    """Convert symbols to int64 with a last dimension of one. Checks values on the CPU only."""
    same_device("input", input, weight)
    symbols_within("input", input, input_size)
    return input.to(torch.int64)[..., None]


def symbols_within(name: str, values: Tensor, count: int) -> None:
    """Reject symbols outside 0 to ``count - 1``, if the host can read them."""
    if readable(values) and values.numel():
        least, most = (int(v) for v in values.aminmax())
        if least < 0 or most >= count:
            raise ValueError(
                f"{name} must hold symbols from 0 to {count - 1}, got {least} to {most}"
            )


def features(input: Tensor, input_size: int, weight: Tensor, autocast: bool) -> None:
    """Check the last dimension, dtype and device of an input."""
    if input.dtype in _UNSIGNED:
        raise ValueError(f"input must be floating-point, or symbols of int64, got {input.dtype}")
    if input.shape[-1] != input_size:
        raise RuntimeError(
            f"input.size(-1) must be equal to input_size. Expected {input_size}, got "
            f"{input.shape[-1]} in an input of shape {tuple(input.shape)}"
        )
    if not _fits(input, weight, autocast):
        raise ValueError(
            f"RNN input dtype ({input.dtype}) does not match weight dtype ({weight.dtype}). "
            f"Convert input: input.to({weight.dtype}), or convert model: model.to({input.dtype})"
        )
    same_device("input", input, weight)


def _fits(value: Tensor, weight: Tensor, autocast: bool) -> bool:
    """Whether a tensor has the parameters' dtype, or any floating-point one in autocast."""
    return value.is_floating_point() and (value.dtype == weight.dtype or autocast)


def same_device(name: str, value: Tensor, weight: Tensor) -> None:
    """Check that a tensor is on the parameters' device."""
    if value.device != weight.device:
        what = "parameter" if name == "input" else "hidden"
        raise RuntimeError(
            f"Input and {what} tensors are not at the same device, found {name} at {value.device} "
            f"and the parameters at {weight.device}"
        )


def state(name: str, value: Any, shape: tuple[int, ...], weight: Tensor, autocast: bool) -> Tensor:
    """Check that a given initial state has the expected shape, dtype and device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape:
        raise RuntimeError(f"Expected {name} size {shape}, got {list(value.shape)}")
    if not _fits(value, weight, autocast):
        raise RuntimeError(
            f"{name} must have the parameters' dtype {weight.dtype}, got {value.dtype}"
        )
    same_device(name, value, weight)
    return value


def packed(value: Any) -> None:
    """Reject a PackedSequence whose data do not match its batch_sizes."""
    if torch.compiler.is_compiling():
        return
    sizes = value.batch_sizes.tolist()
    falling = all(a >= b for a, b in itertools.pairwise(sizes))
    if not sizes or sizes[-1] < 1 or not falling:
        raise RuntimeError(
            f"batch_sizes of a PackedSequence must be positive and must not rise, got {sizes}"
        )
    if sum(sizes) != len(value.data):
        raise RuntimeError(
            f"data of a PackedSequence must have sum(batch_sizes) = {sum(sizes)} rows, "
            f"got {len(value.data)}"
        )
    _not_in_capture(value.data.device)


def lengths(value: Any, steps: int, batch: int, device: torch.device) -> Tensor | None:
    """Convert lengths to an integer tensor ``[B]`` on the device.

    Checks values on the CPU, but not those that are already on an accelerator. The result carries
    the values if the host knows them, see `known_lengths`.
    """
    if value is None:
        return None
    if not isinstance(value, Tensor):
        try:
            value = torch.as_tensor(value, device="cpu").clone()  # a NumPy array may change later
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"lengths must be integers, got {value!r}") from None
        if value.numel() == 0:  # an empty list has no integer dtype
            value = value.to(torch.int64)
    if value.dtype not in _INTEGERS | _UNSIGNED:
        raise TypeError(f"lengths must be integers, got {value.dtype}")
    if tuple(value.shape) != (batch,):
        raise ValueError(
            f"lengths must have one entry for each of the {batch} sequences, "
            f"got shape {tuple(value.shape)}"
        )
    values: list[int] | None = None
    if readable(value):
        values = value.tolist()
        check_lengths(values, steps)
        _not_in_capture(device)
    result = to_device(value.to(torch.int64), device)
    if torch.compiler.is_compiling():
        return result
    if result is value:  # values are attached to the result, never to the caller's tensor
        result = result.detach()
    if values is not None:
        setattr(result, _KNOWN, values)
    return result


def _not_in_capture(device: torch.device) -> None:
    """Reject lengths in host memory during CUDA graph capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "while a CUDA graph is captured, lengths must be a tensor on the GPU. Those of a "
            "PackedSequence are on the CPU: pad it and pass lengths instead"
        )


def known_lengths(lengths: Tensor) -> list[int] | None:
    """The values of a result of `lengths`, if the host knows them without waiting for a device."""
    return None if torch.compiler.is_compiling() else getattr(lengths, _KNOWN, None)


def warn(message: str) -> None:
    """Warn at the closest calling line outside of rbn and PyTorch."""
    warnings.warn(message, stacklevel=_callers_level())


def no_statistics(module: nn.Module, rows: int) -> None:
    """Warn once that an untrained module evaluates with minibatch statistics.

    Raises for fewer than two rows, which have no statistics.
    """
    name = type(module).__name__
    if rows < 2:
        raise RuntimeError(
            f"{name} has no population statistics yet, and a batch of {rows} is too small for "
            "minibatch statistics: train it, call rbn.update_population_stats(model, batches), or "
            "evaluate at least 2 sequences together (for Lightning's sanity check: "
            "Trainer(num_sanity_val_steps=0))"
        )
    if not torch.compiler.is_compiling() and not module.__dict__.get("_warned_untrained"):
        module.__dict__["_warned_untrained"] = True
        warn(
            f"{name} was not trained yet, so it has no population statistics: evaluating with the "
            "statistics of each batch"
        )


def refuse_one(name: str, what: str) -> NoReturn:
    """Reject training on a batch of one, which has no variance, like `nn.BatchNorm1d`."""
    raise ValueError(
        f"Expected more than 1 {what} in a batch when training {name}, got 1: it has no variance "
        "to normalize with. Use a larger batch (drop_last=True makes a DataLoader skip a last "
        "batch of one), or call eval() to normalize with population statistics"
    )


def single_row(name: str) -> None:
    """Warn about a batch of one outside of training, e.g. the last one of a data set."""
    if not torch.compiler.is_compiling():
        warn(
            f"{name} normalizes with minibatch statistics, and this minibatch has a single "
            "sequence: all normalized terms are 0, so the layer ignores its input. It does not "
            "enter population statistics of time steps. Use a batch of at least 2."
        )


def _callers_level() -> int:
    """The `stacklevel` that points a warning at the closest caller outside rbn and PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("rbn", "torch"):
        frame, level = frame.f_back, level + 1
    return level
