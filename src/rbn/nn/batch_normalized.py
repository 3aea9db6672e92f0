"""The options and statistics that the batch-normalized networks share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from rbn.nn import checks, init
from rbn.nn.fresh_statistics import FreshStatistics, is_exporting, is_recomputing
from rbn.nn.recurrence import States
from rbn.nn.statistics import PopulationStatistics, Update, update_all
from rbn.ops import Statistics
from rbn.ops.few_rows import NO_SCALE, enough_rows
from rbn.ops.types import InputStats, Padding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MOST_STEPS = 100_000_000  # a larger max_length must be a mistake


class BatchNormalized(FreshStatistics):
    """A recurrence with batch-normalized terms and population statistics for each term.

    Training updates running averages. Before the layer is evaluated, saved or copied, `refresh`
    replaces them with statistics at the current weights.
    """

    terms: ClassVar[tuple[str, ...]] = ("x", "h", "c")
    ablation_names: ClassVar[tuple[str, ...]] = ("shared_stats",)

    def _set_normalization(
        self,
        max_length: int | None,
        gamma: float,
        eps: float,
        momentum: float | None,
        input_stats: str,
        padding: str,
        ablations: Iterable[str],
        sync_stats: bool,
        refresh_stats: bool,
    ) -> None:
        """Check and store the normalization options."""
        if max_length is not None:
            checks.positive_integer("max_length", max_length)
            if max_length > _MOST_STEPS:
                raise ValueError(f"max_length must be at most {_MOST_STEPS:,}, got {max_length:,}")
        self.max_length = max_length
        self.gamma = checks.not_negative("gamma", gamma)
        self.eps = checks.positive("eps", eps)
        self.momentum = momentum
        options = checks.choice("input_stats", input_stats, ("step", "sequence"))
        self.input_stats = cast(InputStats, options)
        self.padding = cast(Padding, checks.choice("padding", padding, ("exclude", "include")))
        if isinstance(ablations, str) or not isinstance(ablations, Iterable):
            raise TypeError(f"ablations must be a collection of names, got {ablations!r}")
        self.ablations = frozenset(
            checks.choice("ablations", name, self.ablation_names) for name in ablations
        )
        self.sync_stats = checks.boolean("sync_stats", sync_stats)
        self._set_refresh(refresh_stats)

    @property
    def momentum(self) -> float | None:
        """Weight of a new minibatch in the running average; None weights all equally."""
        return self._momentum

    @momentum.setter
    def momentum(self, value: float | None) -> None:
        self._momentum = None if value is None else checks.probability("momentum", value)
        for statistics in self._all_statistics():
            statistics.momentum = self._momentum

    def _normalized_terms(self) -> dict[str, int]:
        """The normalized terms and the number of features of each."""
        rows = self.gates * self.hidden_size
        return {term: self.hidden_size if term == "c" else rows for term in self.terms}

    def _add_normalization(self, suffix: str, factory: dict[str, Any]) -> None:
        for term, features in self._normalized_terms().items():
            self._add(f"gamma_{term}{suffix}", (features,), factory)
            statistics = PopulationStatistics(
                features,
                1 if term == "x" and self.input_stats == "sequence" else self.max_length,
                self.momentum,
                shared="shared_stats" in self.ablations,
                sync=self.sync_stats,
                **factory,
            )
            self.add_module(f"stats_{term}{suffix}", statistics)

    def reset_parameters(self) -> None:
        """Initialize as in the paper, set gammas to `gamma` and reset the statistics."""
        super().reset_parameters()
        init.gamma_(self, self.gamma)
        self.reset_running_stats()

    def _statistics(self, term: str, suffix: str) -> PopulationStatistics:
        return cast(PopulationStatistics, self._modules[f"stats_{term}{suffix}"])

    def _check_ready(self, batch: int) -> bool:
        """Raise if the call cannot be computed.

        Returns whether to fall back to minibatch statistics.
        """
        all_statistics = self._all_statistics()
        if all_statistics[0].uses_batch:
            if batch == 1 and self._group() is None and self._pools is None:
                name = type(self).__name__
                if all_statistics[0].trains:
                    checks.refuse_one(name, "sequence")
                checks.single_row(name)
            return False
        if not torch.compiler.is_compiling():
            self.refresh_once()
        if is_exporting() and not all(statistics.estimated for statistics in all_statistics):
            raise RuntimeError(
                f"{type(self).__name__} has no population statistics to export: train it, or call "
                "rbn.update_population_stats(model, batches), first"
            )
        if all(statistics.find_estimates() for statistics in all_statistics):
            return False
        checks.no_statistics(self, batch)
        return True

    def _group(self) -> ProcessGroup | None:
        return self._all_statistics()[0].group if self.sync_stats else None

    def _ignores_padding(self) -> bool:
        return self.padding == "exclude" or not any(s.uses_batch for s in self._all_statistics())

    def _population(self, suffix: str, start: int, steps: int) -> Statistics | None:
        """The population statistics to normalize with, or None to use minibatch statistics."""
        results: dict[str, Tensor] = {}
        for term in self.terms:
            if f"stats_{term}{suffix}" not in self._modules:  # not normalized
                continue
            statistics = self._statistics(term, suffix)
            if statistics.uses_batch:
                return None
            results[f"mean_{term}"], results[f"var_{term}"] = statistics.read(start, steps)
        return Statistics(**results)

    def _min_rows(self, batch: int) -> int:
        """How many sequences must reach a step for it to get its own minibatch statistics.

        batch: the number of sequences of this process.
        """
        rows = batch if self._all_rows is None else self._all_rows
        return enough_rows(rows) if rows > 1 and self.padding == "exclude" else 1

    def _min_rows_of(self, input: Tensor, lengths: Tensor | None) -> int:
        """`_min_rows` for one call.

        1 if all steps have the same rows or use population statistics: a program traced for any
        batch size must not depend on it then.
        """
        same = lengths is None and self._all_rows is None
        if same or not self._all_statistics()[0].uses_batch:
            return 1
        return self._min_rows(input.shape[1])

    def _results(
        self, suffix: str, results: tuple[Any, ...], lengths: Tensor | None, start: int
    ) -> tuple[Tensor, States]:
        output, *states, batch = results
        self._record(suffix, batch, lengths, start, *output.shape[:2])
        return output, tuple(states)

    def _record(
        self,
        suffix: str,
        batch: Statistics,
        lengths: Tensor | None,
        start: int,
        steps: int,
        rows: int,
    ) -> None:
        """Update the running averages of those population statistics that record."""
        results: list[tuple[str, PopulationStatistics, Tensor, Tensor]] = []
        for k, term in enumerate(self.terms):  # in the field order of Statistics; an RNN has fewer
            mean, var = batch[2 * k], batch[2 * k + 1]
            if mean is None or var is None:  # not normalized, or not with minibatch statistics
                continue
            statistics = cast(Any, self._modules[f"stats_{term}{suffix}"])
            if statistics.records:
                results.append((term, statistics, mean, var))
        if not results:
            return
        if self._pools is not None:
            self._add_to_pools(suffix, results, lengths, start, steps, rows)
            return
        if is_recomputing():
            return
        if any(statistics.rows is not None for _, statistics, _, _ in results):
            reached, _ = self._reached(lengths, steps, rows)
            for term, statistics, _, _ in results:
                if term != "x" or self.input_stats != "sequence":
                    statistics.count_rows(start, reached)
        updates = self._updates(results, lengths, start, steps, rows)
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            update_all(updates)
            return
        try:
            update_all(updates)
        except RuntimeError as error:
            raise RuntimeError(
                f"{type(self).__name__} updates its population statistics in training, which "
                "torch.func does not allow: call it in eval() or inside rbn.batch_statistics(model)"
            ) from error

    def _updates(
        self,
        results: list[tuple[str, PopulationStatistics, Tensor, Tensor]],
        lengths: Tensor | None,
        start: int,
        steps: int,
        rows: int,
    ) -> list[Update]:
        """The arguments of `update_all` for minibatch statistics of ``(term, ..., mean, var)``."""
        sequence = self.input_stats == "sequence"  # one row for x, over all positions
        if lengths is None and rows > 1 and self._group() is None:
            return [
                (statistics, mean, var, 0 if sequence and term == "x" else start, None)
                for term, statistics, mean, var in results
            ]
        last: Tensor | int | None = None
        # Running averages count steps that enough sequences reach. The average over a training set
        # counts all, with the constants that training uses for the others (`rbn.ops.few_rows`).
        counted = any(statistics.rows is not None for _, statistics, _, _ in results)
        together = self._group() is not None
        alone = rows == 1 and not together
        if together:  # some process has a sequence that reaches the step
            common = self._common_steps if self._ignores_padding() else None
            last = None if common == steps else common
        elif lengths is not None and not alone:
            fewest = 1 if counted else self._min_rows(rows)
            known = checks.known_lengths(lengths)
            last = lengths.topk(fewest).values[-1] if known is None else sorted(known)[-fewest]
        reached: Tensor | None = None
        if isinstance(last, Tensor):
            reached = torch.arange(steps, device=self._weight().device) < last
        updates: list[Update] = []
        for term, statistics, mean, var in results:
            if counted:  # a feature that never varied
                var = torch.where(var < NO_SCALE / 2, var, 0)
            if term == "x" and sequence:
                if not alone:
                    updates.append((statistics, mean, var, 0, None))
                elif steps > 1:
                    several = (
                        lengths > 1 if lengths is not None and self._ignores_padding() else None
                    )
                    updates.append((statistics, mean, var, 0, several))
            elif isinstance(last, int) and last < steps:
                if statistics.max_length is None:
                    statistics.grow(start + steps)
                updates.append((statistics, mean[:last], var[:last], start, None))
            elif not alone:
                updates.append((statistics, mean, var, start, reached))
        return updates
