"""Code that uses the package, for a type checker; `test_typing.py` runs mypy on it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import assert_type

import rbn

Pair = tuple[Tensor, Tensor]


def layers(
    x: Tensor, packed: PackedSequence, states: Pair, h: Tensor, lengths: Sequence[int]
) -> None:
    for lstm in (rbn.BatchNormLSTM(3, 4), rbn.BatchNormLSTM.from_lstm(nn.LSTM(3, 4), gamma=0.2)):
        assert_type(lstm(x), tuple[Tensor, Pair])
        assert_type(lstm(x, states, lengths, start=2), tuple[Tensor, Pair])
        assert_type(lstm.forward(packed, states), tuple[PackedSequence, Pair])
        assert_type(lstm(packed), tuple[PackedSequence, Pair])
    assert_type(rbn.LSTM(3, 4)(x, lengths=torch.ones(2, dtype=torch.int64)), tuple[Tensor, Pair])
    assert_type(rbn.LayerNormLSTM(3, 4)(packed), tuple[PackedSequence, Pair])
    assert_type(rbn.BatchNormRNN(3, 4)(x, h), tuple[Tensor, Tensor])
    assert_type(rbn.BatchNormRNN(3, 4)(packed), tuple[PackedSequence, Tensor])
    assert_type(rbn.BatchNormGRU.from_gru(nn.GRU(3, 4))(x, h), tuple[Tensor, Tensor])
    assert_type(rbn.BatchNormGRU(3, 4)(packed), tuple[PackedSequence, Tensor])
    assert_type(rbn.LSTM(3, 4).to_lstm(), nn.LSTM)
    assert_type(rbn.BatchNormLSTM(3, 4).state_dict(), dict[str, Any])


def cells(x: Tensor, states: Pair, h: Tensor) -> None:
    assert_type(rbn.BatchNormLSTMCell(3, 4)(x, states, 2), Pair)
    assert_type(rbn.LSTMCell(3, 4)(x), Pair)
    assert_type(rbn.LayerNormLSTMCell(3, 4)(x, step=1), Pair)
    assert_type(rbn.BatchNormRNNCell(3, 4, nonlinearity="relu")(x, h), Tensor)
    assert_type(rbn.BatchNormGRUCell(3, 4)(x, h), Tensor)


def conversion(x: Tensor, cells: list[rbn.BatchNormLSTMCell]) -> None:
    assert_type(rbn.BatchNormLSTM.from_cells(cells, batch_first=True), rbn.BatchNormLSTM)
    for cell in rbn.BatchNormLSTM(3, 4).to_cells():
        assert_type(cell(x), Pair)


def options(model: nn.Module, batches: list[Pair]) -> None:
    rbn.BatchNormLSTM(
        3,
        4,
        input_stats="sequence",
        padding="include",
        initial_state="zeros",
        ablations=["shared_stats", "raw_output"],
    )
    count = rbn.update_population_stats(model, batches, forward=lambda m, pair: m(pair[0]))
    assert_type(count, int)
    with rbn.batch_statistics(model), rbn.backend("reference"):
        pass


def mistakes(x: Tensor, packed: PackedSequence, states: Pair, batches: list[Tensor]) -> None:
    rbn.BatchNormLSTM(3, 4, input_stats="steps")  # expected: arg-type
    rbn.BatchNormLSTM(3, 4, padding="skip")  # expected: arg-type
    rbn.LSTM(3, 4, initial_state="zero")  # expected: arg-type
    rbn.BatchNormRNN(3, 4, nonlinearity="gelu")  # expected: arg-type
    rbn.BatchNormRNN(3, 4, ablations=["raw_output"])  # expected: list-item
    rbn.BatchNormGRU(3, 4, zoneout=(0.1, 0.1))  # expected: arg-type
    rbn.backend("cuda")  # expected: arg-type
    rbn.BatchNormLSTM(3, 4)(x, x)  # expected: call-overload
    rbn.BatchNormLSTM(3, 4)(packed, lengths=[1])  # expected: call-overload
    rbn.BatchNormRNNCell(3, 4)(x, states)  # expected: arg-type
    model = nn.Linear(1, 1)
    rbn.update_population_stats(model, batches, forward=lambda m, b: b.no)  # expected: attr-defined
