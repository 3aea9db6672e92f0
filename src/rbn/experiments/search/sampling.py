"""Optuna's samplers and pruners by the names of sweep files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rbn.experiments.search.space import Value
from rbn.experiments.search.sweep import Sweep

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

SAMPLERS = ("grid", "random", "tpe")
PRUNERS = ("none", "median", "percentile", "halving", "hyperband")


def need_optuna() -> None:
    """Check that Optuna is installed, and make it quiet."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("sweeps need Optuna: pip install 'recurrent-batchnorm[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def make_sampler(sweep: Sweep, number: int) -> BaseSampler:
    """The sampler of one trial.

    Its random numbers depend only on the sweep's seed and the trial's number, so it does not matter
    which worker takes the trial.
    """
    from optuna import samplers

    if sweep.sampler.name == "grid":
        assert sweep.points is not None
        return _fixed(sweep.points[number])
    kind: Any = samplers.RandomSampler
    options = dict(sweep.sampler.options)
    if sweep.sampler.name == "tpe":
        kind = samplers.TPESampler
        options.setdefault("constant_liar", True)  # assumes bad results for running trials
    # Seeds of neighbouring sweeps and trials are far apart, and below 2**32, as NumPy requires.
    seed = (sweep.seed * 1_000_003 + number * 7919) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about experimental features
        sampler: BaseSampler = kind(seed=seed, **options)
    return sampler


def make_pruner(sweep: Sweep) -> BasePruner:
    """The pruner of a sweep. Its steps are evaluations on the validation data, from 0."""
    from optuna import pruners

    kinds: dict[str, Any] = {
        "none": pruners.NopPruner,
        "median": pruners.MedianPruner,
        "percentile": pruners.PercentilePruner,
        "halving": pruners.SuccessiveHalvingPruner,
        "hyperband": pruners.HyperbandPruner,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner: BasePruner = kinds[sweep.pruner.name](**sweep.pruner.options)
    return pruner


def check(sweep: Sweep) -> None:
    """Reject options that Optuna's classes do not have."""
    for kind, method in (("sampler", sweep.sampler), ("pruner", sweep.pruner)):
        try:
            if "seed" in method.options:
                raise TypeError("seed is set by the sweep")
            if method.name == "grid" and method.options:
                raise TypeError("it has none")
            if kind == "pruner":
                make_pruner(sweep)
            elif method.name != "grid":
                make_sampler(sweep, 0)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the options of the {kind} {method.name} are not valid: {error}"
            ) from error


def _fixed(point: Mapping[str, Value]) -> BaseSampler:
    """A sampler that chooses the values of one point of a grid."""
    from optuna.samplers import BaseSampler

    class Fixed(BaseSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(
            self, study: Any, trial: Any, param_name: str, param_distribution: Any
        ) -> Any:
            return point[param_name]

    return Fixed()
