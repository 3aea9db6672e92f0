"""Training steps that only one or a few sequences of a minibatch reach."""

import copy
import math

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import rbn
from rbn.ops.few_rows import NO_SCALE, Constants, pooled

LAYERS = [rbn.BatchNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
EPS = 1e-5


class ByHand:
    """The equations, one step at a time, with the statistics of each term written out."""

    def __init__(self, layer, lengths):
        self.w = {name.removesuffix("_l0"): p for name, p in layer.named_parameters()}
        self.lengths, self.layer, self.seen = lengths, layer, {}

    def bn(self, name, term, rows, beta=0.0):
        if len(rows) >= max(2, min(4, len(self.lengths) / 4)):
            mean, var = term[rows].mean(0), term[rows].var(0, correction=0)
            self.seen.setdefault(name, []).append(term[rows].detach())
        else:
            everything = torch.cat(self.seen[name])  # all rows of all steps
            mean, var = everything.mean(0), everything.var(0, correction=0)
            var[var <= 1e-10] = math.inf
        return beta + self.w[f"gamma_{name}"] * (term - mean) / (var + EPS).sqrt()

    def step(self, x, states, rows):
        w, h = self.w, states[0]
        of_x = self.bn("x", x @ w["weight_ih"].T, rows) + w["bias"]
        of_h = self.bn("h", h @ w["weight_hh"].T, rows)
        if isinstance(self.layer, rbn.BatchNormRNN):
            return ((of_x + of_h).tanh(),)
        if isinstance(self.layer, rbn.BatchNormGRU):
            (r, z, v), (r_h, z_h, u) = of_x.chunk(3, 1), of_h.chunk(3, 1)
            z = (z + z_h).sigmoid()
            n = (v + (r + r_h).sigmoid() * (u + w["beta_n"])).tanh()
            return ((1 - z) * n + z * h,)
        i, f, g, o = (of_x + of_h).chunk(4, 1)
        c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * self.bn("c", c, rows, w["beta_c"]).tanh(), c

    def run(self, x):
        steps, batch = x.shape[:2]
        names = [name for name in ("h0", "c0") if name in self.w]
        states = tuple(self.w[name].expand(batch, -1) for name in names)
        outputs = []
        for t in range(steps):
            rows = [b for b, length in enumerate(self.lengths) if t < length]
            keep = torch.tensor([t < length for length in self.lengths])[:, None]
            if rows:
                new = self.step(x[t], states, rows)
                states = tuple(torch.where(keep, a, b) for a, b in zip(new, states, strict=True))
            outputs.append(torch.where(keep, states[0], 0))
        return torch.stack(outputs), states


def random_(layer):
    """Parameters for which every term and gradient matters."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def gradients(layer, x, run):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    output, states = run(x)
    states = states if isinstance(states, tuple) else (states,)
    loss = output.square().sum() + sum((k + 1.5) * s.sum() for k, s in enumerate(states))
    loss.backward()
    named = {name: p.grad.clone() for name, p in layer.named_parameters()}
    return {"output": output, "state": states[-1].reshape(-1), "x": x.grad, **named}


def same(found, expected, **tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("layer_class", LAYERS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "lengths",
    [[2, 7, 4, 4], [3, 8], [1, 5, 1], [4, 6, 4], [1, 2], [2, 5, 1, 3, 7, 2, 5, 3, 1]],
    ids=str,
)
def test_by_hand(layer_class, backend, lengths):
    torch.manual_seed(0)
    layer = random_(layer_class(3, 5, dtype=torch.float64))
    x = torch.randn(max(lengths) + 1, len(lengths), 3, dtype=torch.float64)
    with rbn.backend(backend):
        found = gradients(layer, x, lambda x: layer(x, lengths=lengths))
    expected = gradients(layer, x, ByHand(layer, lengths).run)
    same(found, expected, rtol=1e-7, atol=1e-9)
    assert (found["output"][max(lengths) - 1].abs().sum(1) > 0).sum() == 1


@pytest.mark.parametrize("layer_class", LAYERS)
def test_gradients_do_not_explode_where_few_sequences_are_left(layer_class):
    """With statistics of two or three sequences, gradients become infinite."""
    for few in (1, 3):
        torch.manual_seed(0)
        layer = layer_class(4, 16)
        _, states = layer(torch.randn(400, 16, 4), lengths=[400] * few + [20] * (16 - few))
        (states[0] if isinstance(states, tuple) else states)[0, 0].sum().backward()
        norms = [p.grad.norm() for p in layer.parameters()]
        assert torch.stack(norms).isfinite().all()
        assert layer.weight_hh_l0.grad.norm() < 1e4


@pytest.mark.parametrize("layer_class", LAYERS)
def test_every_input_of_the_longest_sequence_counts(layer_class):
    torch.manual_seed(0)
    layer = layer_class(3, 8)
    x = torch.randn(9, 4, 3)
    results = gradients(layer, x, lambda x: layer(x, lengths=[2, 9, 3, 5]))
    assert (results["x"][:, 1].abs().amax(1) > 1e-6).all()
    assert (results["x"][5:, 1].abs().amax(1) > 1e-3).all()


@pytest.mark.parametrize("layer_class", LAYERS)
def test_the_statistics_are_those_of_the_other_steps(layer_class):
    """Steps that one sequence reaches change no statistic, in training and afterwards."""
    torch.manual_seed(0)
    layer = layer_class(3, 4)
    other = copy.deepcopy(layer)
    x = torch.randn(6, 4, 3)
    layer(x, lengths=[2, 6, 4, 1])
    other(x[:4], lengths=[2, 4, 4, 1])
    for one, two in zip(layer._all_statistics(), other._all_statistics(), strict=True):
        n = len(two.mean)
        assert torch.equal(one.count[:n], two.count)
        assert not one.count[n:].any()
        torch.testing.assert_close(one.mean[:n], two.mean)
    y = torch.randn(8, 3, 3)
    torch.testing.assert_close(layer.eval()(y)[0], other.eval()(y)[0])


def test_symbols_and_two_directions_and_layers():
    torch.manual_seed(0)
    layer = random_(rbn.BatchNormLSTM(6, 5, 2, bidirectional=True, dtype=torch.float64))
    x, lengths = torch.randint(6, (9, 4)), [2, 9, 5, 3]
    one_hot = torch.nn.functional.one_hot(x, 6).double()
    results = []
    for backend in ("reference", "cpu"):
        for given in (x, one_hot):
            layer.zero_grad()
            with rbn.backend(backend):
                output, (h, c) = layer(given, lengths=lengths)
            (output.square().sum() + h.sum() + c.square().sum()).backward()
            results.append([output.detach(), h.detach(), c.detach()])
            results[-1] += [p.grad.clone() for p in layer.parameters()]
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            torch.testing.assert_close(two, one, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_a_packed_sequence_gives_the_same(layer_class):
    torch.manual_seed(0)
    layer, lengths = layer_class(3, 4), [3, 7, 2]
    x = torch.randn(7, 3, 3)
    padded, states = layer(x, lengths=lengths)
    packed, packed_states = layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
    torch.testing.assert_close(pad_packed_sequence(packed)[0], padded)
    torch.testing.assert_close(packed_states, states)


def test_zoneout_keeps_its_units():
    """With rates 0 and 1: the cell changes, the hidden state never does."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4, zoneout=(0.0, 1.0))
    output, (h, c) = layer(torch.randn(7, 3, 3), lengths=[3, 7, 2])
    assert torch.equal(h[0], layer.h0_l0.expand(3, -1))
    assert torch.equal(output[:, 1], layer.h0_l0.expand(7, -1))
    assert len(c[0].unique()) == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 16)
    low = copy.deepcopy(layer).to(dtype)
    x = torch.randn(9, 5, 3)
    expected, _ = layer(x, lengths=[2, 9, 5, 3, 1])
    found, (h, c) = low(x.to(dtype), lengths=[2, 9, 5, 3, 1])
    assert found.dtype == h.dtype == c.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.03)


@pytest.mark.parametrize("layer_class", LAYERS)
def test_a_feature_without_variance_is_zero(layer_class):
    """All rows start identical, so after one common step h has never had any variance."""
    torch.manual_seed(0)
    layer = layer_class(1, 4)
    with torch.no_grad():
        layer.weight_ih_l0.fill_(0.0)  # no variance of the input term either
    output, _ = layer(torch.randn(9, 2, 1), lengths=[1, 9])
    output.sum().backward()
    assert output.isfinite().all()
    assert output[:, 1].abs().max() < 1
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_constants_over_all_steps():
    torch.manual_seed(0)
    lengths = torch.tensor([5, 2, 3, 5])
    rows = [torch.randn(int((lengths > t).sum()), 3, dtype=torch.float64) for t in range(5)]
    for group in rows:
        group[:, 1] = 4.0
    mean = torch.stack([group.mean(0) for group in rows])
    var = torch.stack([group.var(0, correction=0) for group in rows])
    counts = torch.tensor([4, 4, 3, 2, 2])
    everything = torch.cat(rows)
    expected = everything.mean(0), everything.var(0, correction=0)
    expected[1][1] = NO_SCALE
    found = pooled(mean, var, counts, EPS)
    step_by_step = Constants(torch.tensor([*counts, 1]), 2, EPS)
    for t in range(5):
        own = step_by_step.replace(t, mean[t], var[t])
        assert torch.equal(own[0], mean[t])
        assert torch.equal(own[1], var[t])
    last = step_by_step.replace(5, mean[0] + math.nan, var[0])
    for k in range(2):
        torch.testing.assert_close(found[k][0], expected[k], **CLOSE)
        torch.testing.assert_close(last[k], expected[k], **CLOSE)


def test_not_a_number_stays_in_the_sequences_that_it_reaches():
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4)
    x = torch.randn(6, 3, 3)
    x[5, 1] = math.nan  # a step of the longest sequence alone
    output, _ = layer(x, lengths=[2, 6, 4])
    assert output[:5].isfinite().all()
    assert output[5, [0, 2]].isfinite().all()
    assert output[5, 1].isnan().any()


def test_a_layer_without_this_case_is_untouched():
    """With padding that counts, or two longest sequences, every step has statistics."""
    torch.manual_seed(0)
    layer = rbn.BatchNormLSTM(3, 4, padding="include")
    x = torch.randn(6, 3, 3)
    layer(x, lengths=[2, 6, 4])
    assert layer.stats_h_l0.count.tolist() == [1] * 6
    other = rbn.BatchNormLSTM(3, 4)
    other(x, lengths=[6, 6, 4])
    assert other.stats_h_l0.count.tolist() == [1] * 6


@pytest.mark.parametrize("layer_class", LAYERS)
def test_the_same_in_a_compiled_layer_and_under_torch_func(layer_class):
    torch.manual_seed(0)
    layer = random_(layer_class(3, 4, max_length=7, dtype=torch.float64))
    x, lengths = torch.randn(7, 5, 3, dtype=torch.float64), torch.tensor([2, 7, 1, 4, 4])
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    expected = gradients(layer, x, lambda x: layer(x, lengths=lengths))
    found = gradients(compiled, x, lambda x: compiled(x, lengths=lengths))
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    same(found, expected, rtol=1e-7, atol=1e-9)

    def loss(x):
        output, states = layer(x, lengths=lengths)
        states = states if isinstance(states, tuple) else (states,)
        return output.square().sum() + sum((k + 1.5) * s.sum() for k, s in enumerate(states))

    with rbn.batch_statistics(layer):
        torch.testing.assert_close(torch.func.grad(loss)(x), expected["x"], rtol=1e-7, atol=1e-9)
