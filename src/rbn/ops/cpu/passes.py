"""What both passes of every recurrence on the CPU share: the input term and the statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rbn.ops.cpu import memory
from rbn.ops.definition import Arguments
from rbn.ops.identical_rows import variance
from rbn.ops.input_term import through_term, with_states, with_term
from rbn.ops.operator import Implementation, Incoming, Results


def implementation(
    saved_type: type[Any],
    fastest: Callable[[Arguments], Any],
    fake: Callable[[Arguments], Results],
    takes_input: Callable[[Arguments], bool] = lambda a: False,
) -> Implementation:
    """fastest: returns the module whose `forward` and `backward` run a call. See `Implementation`.

    These get the input term as input, or the input itself if `takes_input`. In custom operators,
    whose backward pass could not know, it is always the term.
    """

    def forward(calls: Sequence[Arguments], separate: bool) -> Results:
        (call,) = calls
        direct = not separate and takes_input(call)
        if direct:
            a, kept = with_states(call.definition, call), None
        else:
            a, kept = with_term(call.definition, call, linear=memory.linear)
        output, states, saved = fastest(a).forward(a)
        moments: list[Tensor | None] = []
        for term in call.definition.terms:
            mean, rstd = getattr(saved, f"mean_{term}"), getattr(saved, f"rstd_{term}")
            own = rstd is not None and a.batch_stats
            moments += [mean, variance(rstd, a.eps)] if own else [None, None]
        if a.save and kept:
            saved = saved._replace(wx=kept["wx"])
        return Results(output, states, tuple(moments), saved, direct)

    def backward(
        calls: Sequence[Arguments], saved: Any, direct: bool | None, incoming: Incoming
    ) -> list[dict[str, Tensor | None]]:
        (call,) = calls
        if direct:
            a = with_states(call.definition, call)
        else:
            a, _ = with_term(call.definition, call, saved.wx)
        gradients = fastest(a).backward(a, saved, incoming.output, *incoming.states)
        return [through_term(call, gradients, incoming.input)]

    return Implementation(saved_type, forward, backward, fake)
