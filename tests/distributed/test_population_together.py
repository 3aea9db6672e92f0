"""Population statistics are averaged over all processes that train together."""

import population_cases as cases
import pytest
import torch
from recurrence_cases import RESULT_TOLERANCE, assert_same

import rbn


@pytest.fixture(scope="module")
def alone():
    """One process with all batches."""
    layer = cases.make(sync=False)
    return rbn.update_population_stats(layer, cases.batches()), cases.buffers(layer)


@pytest.mark.parametrize("name", ["whole batches", "none on the second", "parts", "shared out"])
def test_estimated_anew(name, pair, alone):
    (count, first), (count2, second) = (found[f"population {name}"] for found in pair)
    assert count == count2 == alone[0] == 5
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert first["stats_h_l0.count"].tolist() == [5, 5, 5, 4, 3, 0]  # 6 of 30 are too few
    assert_same(first, alone[1], RESULT_TOLERANCE)


def test_estimated_as_it_is_evaluated(pair):
    layer = cases.make(sync=False, zoneout=(0.5, 0.5), hidden_noise=1.0)
    rbn.update_population_stats(layer, cases.batches(), train_mode=False)
    for found in pair:
        assert_same(found["population without noise"], cases.buffers(layer), RESULT_TOLERANCE)


def test_parts_that_do_not_fit_are_refused_everywhere(pair):
    (said,) = {found["population refusal"] for found in pair}
    assert "sync_stats" in said
    assert "process 1 has 2, process 0 has more" in said
    assert all("batches is empty" in found["population nothing"] for found in pair)


def test_running_averages(pair):
    # The running average is linear in its inputs, so averaging along the way changes nothing: in
    # steps that both have always seen, it is half of each process's own.
    (first, own), (second, own2) = (found["population running"] for found in pair)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    seen = (own["stats_x_l0.count"][:3] == 4).all() and (own2["stats_x_l0.count"][:3] == 4).all()
    assert seen
    assert first["stats_x_l0.count"].tolist() == [4, 4, 4, 4, 2, 2]  # halves, rounded up
    halves = {key: (own[key][:3] + own2[key][:3]) / 2 for key in first if "count" not in key}
    assert_same({key: first[key][:3] for key in halves}, halves, RESULT_TOLERANCE)


def test_plain_averages_weigh_every_minibatch_alike(pair):
    # Except if a count was odd when it was halved.
    (first, own), (second, own2) = (found["population running, plain"] for found in pair)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    for term in "xhc":
        parts = [
            {k: o[f"stats_{term}_l0.{k}"] for k in ("mean", "var", "count")} for o in (own, own2)
        ]
        for k in ("mean", "var"):
            want = torch.zeros_like(first[f"stats_{term}_l0.{k}"])
            total = torch.zeros(len(want), 1, dtype=torch.float64)
            for part in parts:
                weight = part["count"][:, None].double()
                want[: len(weight)] += part[k] * weight
                total[: len(weight)] += weight
            even = [0, 1, 2, 4]
            got = {k: first[f"stats_{term}_l0.{k}"][even]}
            assert_same(got, {k: (want / total)[even]}, RESULT_TOLERANCE)


def test_evaluation_waits_for_nobody(pair):
    layer = cases.make(sync=False)
    layer(cases.batches()[0].repeat(1, 2, 1))
    by_population = layer.eval()(cases.batches()[0])[0]
    with rbn.batch_statistics(layer):
        by_batch = layer(cases.batches()[0])[0]
    for found, want in zip(pair, (by_batch, by_population), strict=True):
        assert_same({"": found["population evaluated"]}, {"": want.detach()}, RESULT_TOLERANCE)


def test_under_ddp(pair):
    layer = cases.make(sync=False)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for batch in cases.batches():
        optimizer.zero_grad()
        layer(batch)[0].square().mean().backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in layer.named_parameters()} | cases.buffers(layer)
    for found in pair:
        assert_same(found["population under DDP"], expected, RESULT_TOLERANCE)


def test_under_ddp_each_keeps_its_own_until_they_are_averaged(pair):
    (own, first), (own2, second) = (found["population under DDP, alone"] for found in pair)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    both = [o["stats_x_l0.mean"][0] for o in (own, own2)]
    assert not torch.equal(*both)
    mean = (both[0] + both[1]) / 2
    torch.testing.assert_close(
        first["stats_x_l0.mean"][0], mean, rtol=RESULT_TOLERANCE, atol=RESULT_TOLERANCE
    )


def test_estimates_that_ddp_has_emptied(pair):
    """Each of these steps counts as a first one again, and is not averaged with zeros."""
    _, second = (found["population emptied by DDP"] for found in pair)
    for batch, found in zip(cases.batches(), second, strict=False):
        layer = cases.make(sync=False)
        layer(torch.cat([batch[:3]] * 2))
        assert found["stats_h_l0.count"][3:].tolist() == [1, 1, 1]
        for name in ("stats_x_l0.var", "stats_h_l0.var", "stats_c_l0.mean"):
            want = {name: cases.buffers(layer)[name][3:]}
            assert_same({name: found[name][3:]}, want, RESULT_TOLERANCE)


def test_the_example_of_the_documentation(pair):
    first, second = (found["population documented"] for found in pair)
    assert first["stats_h_l0.count"].tolist() == [5] * 20
    assert all(torch.equal(value, second[key]) for key, value in first.items())


@pytest.mark.parametrize("name", ["refreshed", "refreshed, synchronized"])
def test_each_process_refreshes_from_its_own_inputs(name, pair):
    both = [found[f"population {name}"] for found in pair]
    for found, own, _ in both:
        assert_same(found, own, RESULT_TOLERANCE)
    (first, _, averaged), (second, _, averaged2) = both
    assert all(torch.equal(value, averaged2[key]) for key, value in averaged.items())
    for key in first:
        if "count" not in key:
            assert_same({key: averaged[key]}, {key: (first[key] + second[key]) / 2}, 1e-9)
