"""Conversion between layers and cells, and from `torch.nn.LSTM`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from rbn.nn.batch_normalized import BatchNormalized
from rbn.nn.cell import Cell
from rbn.nn.layers import Layers
from rbn.nn.recurrence import GivenStates, Recurrence
from rbn.nn.statistics import PopulationStatistics

C = TypeVar("C", bound="CellLayers[Any]")
T = TypeVar("T", bound="LSTMLayers")


class CellLayers(Layers[GivenStates]):
    """A stack of layers that converts to and from cells."""

    _cell_class: ClassVar[type[Cell[Any]]]

    def to_cells(self) -> list[Cell[GivenStates]]:
        """Returns a cell for each layer and direction, in torch's order: l0, l0_reverse, l1.

        Each cell gets copies of the parameters and population statistics, and the options that
        cells support. In `eval()`, a loop over the cell computes the same as the layer. With
        ``input_stats="sequence"``, every step of the cell uses the same input statistics.
        """
        cells: list[Cell[GivenStates]] = []
        for suffix, input_size in self._directions():
            cell = self._cell_class(
                input_size, **_options(self, self._cell_class), **_factory(self)
            )
            _copy(self, suffix, cell, "")
            cells.append(cell.train(self.training))
        return cells

    @classmethod
    def from_cells(
        cls: type[C],
        cells: Sequence[Cell[GivenStates]],
        batch_first: bool = False,
        bidirectional: bool = False,
        **options: object,
    ) -> C:
        """Inverse of `to_cells`: a new layer with copies of the cells' parameters and statistics.

        Args:
            cells: one for each layer and direction, in the order of `to_cells`.
            batch_first: input and output as ``[B, T, features]``.
            bidirectional: every second cell runs backwards in time.
            options: options that only layers have, such as ``dropout``.
        """
        cells = list(cells)
        directions = 2 if bidirectional else 1
        if not cells or len(cells) % directions:
            raise ValueError(
                f"cells must have {directions} for each layer, got {len(cells)} in total"
            )
        for cell in cells:
            if not isinstance(cell, cls._cell_class):
                wanted = cls._cell_class.__name__
                raise TypeError(f"cells must be of type {wanted}, got {type(cell).__name__}")
        common = _options(cells[0], cls._cell_class)
        for k, cell in enumerate(cells):
            for name, value in _options(cell, cls._cell_class).items():
                if value != common[name]:
                    raise ValueError(
                        f"cells must have the same options, got {name}={common[name]!r} in cell 0 "
                        f"and {value!r} in cell {k}"
                    )
        new = cls(
            cells[0].input_size,
            num_layers=len(cells) // directions,
            batch_first=batch_first,
            bidirectional=bidirectional,
            **{**common, **options},
            **_factory(cells[0]),
        )
        for k, (cell, (suffix, size)) in enumerate(zip(cells, new._directions(), strict=True)):
            if cell.input_size != size:
                raise ValueError(
                    f"cells must fit together: cell {k} must have input_size={size}, "
                    f"got {cell.input_size}"
                )
            _copy(cell, "", new, suffix)
        return new.train(cells[0].training)

    def _directions(self) -> list[tuple[str, int]]:
        """The suffix and the input size of each layer and direction."""
        hidden = self.hidden_size * self.directions
        return [
            (suffix, self.input_size if layer == 0 else hidden)
            for layer in range(self.num_layers)
            for suffix in self._suffixes(layer)
        ]


def _options(module: Recurrence, cell_class: type[Cell[Any]]) -> dict[str, Any]:
    """The module's options as keyword arguments of a cell, except input size, device and dtype."""
    options: dict[str, Any] = {}
    for name in inspect.signature(cell_class).parameters:
        if name in ("input_size", "device", "dtype"):
            continue
        options[name] = module.has_bias if name == "bias" else getattr(module, name)
    if len(module.states) == 1:
        options["zoneout"] = module.zoneout[0]
    return options


def _factory(module: Recurrence) -> dict[str, Any]:
    weight = module._weight()
    return {"device": weight.device, "dtype": weight.dtype}


def _copy(source: Recurrence, source_suffix: str, target: Recurrence, target_suffix: str) -> None:
    """Copy the parameters and statistics of one layer and direction."""
    with torch.no_grad():
        for name, parameter in target._parameters.items():
            if parameter is not None and name.endswith(target_suffix):
                given = source._own(name.removesuffix(target_suffix) + source_suffix)
                parameter.copy_(given).requires_grad_(given.requires_grad)
    if isinstance(source, BatchNormalized):
        source.refresh()
    for name, module in target._modules.items():
        if isinstance(module, PopulationStatistics) and name.endswith(target_suffix):
            original = source.get_submodule(name.removesuffix(target_suffix) + source_suffix)
            module.load_state_dict(original.state_dict())


class LSTMLayers(CellLayers[tuple[Tensor, Tensor]]):
    """A stack whose weights have the layout of `torch.nn.LSTM`."""

    @classmethod
    def from_lstm(cls: type[T], lstm: nn.LSTM, **options: object) -> T:
        """A new module that starts from the weights of `lstm`.

        Takes sizes, layout, dropout, dtype and device from `lstm`, and adds its two biases into
        one. `options` are other options of this class.
        """
        if not isinstance(lstm, nn.LSTM):
            raise TypeError(f"lstm must be a torch.nn.LSTM, got {type(lstm).__name__}")
        if lstm.proj_size:
            raise ValueError(f"lstm must not have a proj_size, got proj_size={lstm.proj_size}")
        weight = lstm.weight_ih_l0
        new = cls(
            lstm.input_size,
            lstm.hidden_size,
            lstm.num_layers,
            lstm.bias,
            lstm.batch_first,
            lstm.dropout,
            lstm.bidirectional,
            device=weight.device,
            dtype=weight.dtype,
            **cast(dict[str, Any], options),
        )
        new.train(lstm.training)
        with torch.no_grad():
            for layer in range(new.num_layers):
                for suffix in new._suffixes(layer):
                    for name in ("weight_ih", "weight_hh"):
                        getattr(new, name + suffix).copy_(getattr(lstm, name + suffix))
                    if lstm.bias:
                        both = [getattr(lstm, name + suffix) for name in ("bias_ih", "bias_hh")]
                        getattr(new, "bias" + suffix).copy_(both[0] + both[1])
        return new
