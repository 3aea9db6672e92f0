"""The recurrences in NumPy, one row at a time: written from the paper, not from `rbn`.

The names are the paper's. Every gate is a separate product and padding is handled by listing, for
each step, the rows that run and the rows that are counted in its statistics.

All operations are analytic (relu branches on the real part), so complex arguments work too: with
``x + 1j * step * direction`` and a tiny step, the imaginary part of a result divided by the step is
its derivative along the direction, exact up to rounding (no difference is taken). These gradients
are independent of autograd.
"""

import numpy as np

GATES = ("i", "f", "g", "o")  # torch's order; the paper uses f, i, o, g


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2  # 1 / (1 + exp(-x)) without its overflow


def relu(x):
    return np.where(x.real > 0, x, 0.0)


def BN(h, gamma, beta, mean, var, eps):
    """Equation 5."""
    return beta + gamma * (h - mean) / np.sqrt(var + eps)


def LN(h, gamma, beta, eps):
    """Equation 5 with the moments over the row's own features (Ba et al. 2016)."""
    mean = sum(h) / len(h)
    var = sum((v - mean) ** 2 for v in h) / len(h)
    return beta + gamma * (h - mean) / np.sqrt(var + eps)


def sample_statistics(rows, features):
    """Mean and biased variance of the listed rows; zeros without rows."""
    if not rows:
        return np.zeros(features), np.zeros(features)
    mean = sum(rows) / len(rows)
    return mean, sum((row - mean) ** 2 for row in rows) / len(rows)


class Term:
    """One normalized term: the source of its statistics, and those it has used."""

    def __init__(self, features, population=None, shared=None, enough=1, eps=0.0):
        """enough: steps with fewer rows use the statistics of all earlier steps instead."""
        self.features, self.population, self.shared = features, population, shared
        self.enough, self.eps = enough, eps
        self.means, self.vars, self.seen = [], [], []
        if shared is not None:
            self._keep(*shared)

    def statistics(self, t, rows):
        if self.population is not None:  # beyond T_max, use the statistics of T_max
            means, variances = self.population
            T_max = len(means)
            return (means[t], variances[t]) if t < T_max else (means[T_max - 1], variances[-1])
        if self.shared is not None:
            return self.shared
        if len(rows) >= self.enough:
            self.seen += rows
            return self._keep(*sample_statistics(rows, self.features))
        mean, var = sample_statistics([row.real for row in self.seen], self.features)  # constants
        return self._keep(mean, np.where(var > 5e-6 * self.eps, var, 1e30))

    def _keep(self, mean, var):
        self.means.append(mean)
        self.vars.append(var)
        return mean, var

    def kept(self):
        if self.population is not None or not self.means:
            return None, None
        return np.stack(self.means), np.stack(self.vars)


class Batch:
    """A minibatch's rows: which run at each step, which enter statistics, and their states."""

    def __init__(self, wx, lengths, padding, **states):
        self.T, self.B, self.features = wx.shape
        self.lengths = [self.T] * self.B if lengths is None else [int(n) for n in lengths]
        self.padding = padding
        self.states = {name: list(state) for name, state in states.items()}
        hidden = len(states["h"][0])
        self.output = np.zeros((self.T, self.B, hidden), dtype=np.result_type(wx, *states["h"]))

    def running(self, t):
        return [b for b in range(self.B) if t < self.lengths[b]]

    def counted(self, t):
        """Padded rows, if included in statistics, run like others; their results are discarded."""
        return list(range(self.B)) if self.padding == "include" else self.running(t)

    def unpadded(self, wx):
        return [wx[t, b] for b in range(self.B) for t in range(self.lengths[b])]

    def advance(self, t, **new):
        for b in self.running(t):
            for name, rows in new.items():
                self.states[name][b] = rows[b]
            self.output = self.output.astype(np.result_type(self.output, new["h"][b]), copy=False)
            self.output[t, b] = self.states["h"][b]

    def final(self, name):
        return np.stack(self.states[name])


def input_term(batch, wx, population, input_stats, enough, eps):
    shared = None
    if population is None and input_stats == "sequence":
        shared = sample_statistics(batch.unpadded(wx), batch.features)
    return Term(batch.features, population, shared, enough, eps)


def zoneout(z, t, b, previous, new):
    """Krueger et al. 2016: z * previous + (1 - z) * new; z is a mask or, in inference, its mean."""
    z_t = z if np.isscalar(z) else np.asarray(z[t, b], dtype=float)
    return z_t * previous + (1 - z_t) * new


def gate(values, name):
    """The part of ``[4H]`` (or of ``[4H, H]``) that belongs to one gate."""
    H = len(values) // 4
    k = GATES.index(name)
    return values[k * H : (k + 1) * H]


def bn_lstm(
    wx,
    weight_hh,
    bias,
    gamma_x,
    gamma_h,
    gamma_c,
    beta_c,
    h0,
    c0,
    *,
    lengths=None,
    population=None,
    eps=1e-5,
    input_stats="step",
    padding="exclude",
    min_rows=1,
    zoneout_c=0.0,
    zoneout_h=0.0,
    pass_normalized_cell=False,
):
    """Equations 6 to 8. population: dict of (mean, var) for "x", "h" and "c"."""
    batch = Batch(wx, lengths, padding, h=h0, c=c0)
    T, H = batch.T, h0.shape[1]
    pop = population or {}
    enough = min(min_rows, batch.B), eps
    x_term = Term(0)
    if gamma_x is not None:
        x_term = input_term(batch, wx, pop.get("x"), input_stats, *enough)
    h_term, c_term = Term(4 * H, pop.get("h"), None, *enough), Term(H, pop.get("c"), None, *enough)
    b_vector = np.zeros(4 * H) if bias is None else bias
    beta = np.zeros(H) if beta_c is None else beta_c

    for t in range(T):
        counted = batch.counted(t)
        everyone = sorted({*counted, *batch.running(t)})
        h, c = batch.states["h"], batch.states["c"]

        W_h_h = {b: weight_hh @ h[b] for b in everyone}
        W_x_x = {b: wx[t, b] for b in everyone}
        if gamma_x is None:  # both terms together
            summed = {b: W_h_h[b] + W_x_x[b] for b in everyone}
            mean, var = h_term.statistics(t, [summed[b] for b in counted])
            tilde = {b: BN(summed[b], gamma_h, b_vector, mean, var, eps) for b in everyone}
        else:
            mean_h, var_h = h_term.statistics(t, [W_h_h[b] for b in counted])
            mean_x, var_x = x_term.statistics(t, [W_x_x[b] for b in counted])
            tilde = {
                b: BN(W_h_h[b], gamma_h, 0.0, mean_h, var_h, eps)
                + BN(W_x_x[b], gamma_x, 0.0, mean_x, var_x, eps)
                + b_vector
                for b in everyone
            }

        c_t, o_t = {}, {}
        for b in everyone:
            f_tilde, i_tilde = gate(tilde[b], "f"), gate(tilde[b], "i")
            o_tilde, g_tilde = gate(tilde[b], "o"), gate(tilde[b], "g")
            c_t[b] = sigmoid(f_tilde) * c[b] + sigmoid(i_tilde) * np.tanh(g_tilde)
            o_t[b] = sigmoid(o_tilde)

        if gamma_c is None:
            seen = {b: c_t[b] + beta for b in everyone}
        else:
            mean_c, var_c = c_term.statistics(t, [c_t[b] for b in counted])
            seen = {b: BN(c_t[b], gamma_c, beta, mean_c, var_c, eps) for b in everyone}

        new_h, new_c = {}, {}
        for b in batch.running(t):
            h_t = o_t[b] * np.tanh(seen[b])  # uses the cell before zoneout
            passed_on = seen[b] if pass_normalized_cell else c_t[b]
            new_c[b] = zoneout(zoneout_c, t, b, c[b], passed_on)
            new_h[b] = zoneout(zoneout_h, t, b, h[b], h_t)
        batch.advance(t, h=new_h, c=new_c)

    return {
        "output": batch.output,
        "h_n": batch.final("h"),
        "c_n": batch.final("c"),
        **statistics(x=x_term, h=h_term, c=c_term),
    }


def statistics(**terms):
    found = {}
    for name in ("x", "h", "c"):
        kept = terms[name].kept() if name in terms else (None, None)
        found[f"mean_{name}"], found[f"var_{name}"] = kept
    return found


def lstm(wx, weight_hh, bias, beta_c, h0, c0, *, lengths=None, zoneout_c=0.0, zoneout_h=0.0):
    """Equations 2 to 4, with the additive cell bias of the authors' baseline."""
    batch = Batch(wx, lengths, "exclude", h=h0, c=c0)
    for t in range(batch.T):
        h, c, new_h, new_c = batch.states["h"], batch.states["c"], {}, {}
        for b in batch.running(t):
            tilde = weight_hh @ h[b] + wx[t, b]
            if bias is not None:
                tilde = tilde + bias
            f, i, o = (sigmoid(gate(tilde, name)) for name in ("f", "i", "o"))
            c_t = f * c[b] + i * np.tanh(gate(tilde, "g"))
            h_t = o * np.tanh(c_t if beta_c is None else c_t + beta_c)
            new_c[b] = zoneout(zoneout_c, t, b, c[b], c_t)
            new_h[b] = zoneout(zoneout_h, t, b, h[b], h_t)
        batch.advance(t, h=new_h, c=new_c)
    return {"output": batch.output, "h_n": batch.final("h"), "c_n": batch.final("c")}


def ln_lstm(
    wx,
    weight_hh,
    bias,
    gamma_x,
    gamma_h,
    gamma_c,
    beta_c,
    h0,
    c0,
    *,
    lengths=None,
    eps=1e-5,
    zoneout_c=0.0,
    zoneout_h=0.0,
):
    """Equations 6 to 8 with layer normalization instead of batch normalization."""
    batch = Batch(wx, lengths, "exclude", h=h0, c=c0)
    for t in range(batch.T):
        h, c, new_h, new_c = batch.states["h"], batch.states["c"], {}, {}
        for b in batch.running(t):
            tilde = LN(weight_hh @ h[b], gamma_h, 0.0, eps) + LN(wx[t, b], gamma_x, 0.0, eps)
            if bias is not None:
                tilde = tilde + bias
            f, i, o = (sigmoid(gate(tilde, name)) for name in ("f", "i", "o"))
            c_t = f * c[b] + i * np.tanh(gate(tilde, "g"))
            h_t = o * np.tanh(LN(c_t, gamma_c, beta_c, eps))
            new_c[b] = zoneout(zoneout_c, t, b, c[b], c_t)
            new_h[b] = zoneout(zoneout_h, t, b, h[b], h_t)
        batch.advance(t, h=new_h, c=new_c)
    return {"output": batch.output, "h_n": batch.final("h"), "c_n": batch.final("c")}


def bn_rnn(wx, weight_hh, bias, gamma_x, gamma_h, h0, *, nonlinearity="tanh", **options):
    """Equation 1 with both terms normalized as in equation 6."""
    phi = {"tanh": np.tanh, "relu": relu}[nonlinearity]

    def step(W_h_h, W_x_x, h):
        return phi(W_h_h + W_x_x + (0.0 if bias is None else bias))

    return one_state(step, wx, weight_hh, gamma_x, gamma_h, h0, **options)


def bn_gru(wx, weight_hh, bias, gamma_x, gamma_h, h0, beta_n, **options):
    """`torch.nn.GRU`'s equations with both terms normalized as in equation 6."""

    def step(W_h_h, W_x_x, h):
        W_x_x = W_x_x + (0.0 if bias is None else bias)
        (h_r, h_z, h_n), (x_r, x_z, x_n) = (np.split(term, 3) for term in (W_h_h, W_x_x))
        r, z = sigmoid(h_r + x_r), sigmoid(h_z + x_z)
        n = np.tanh(x_n + r * (h_n + (0.0 if beta_n is None else beta_n)))
        return (1 - z) * n + z * h

    return one_state(step, wx, weight_hh, gamma_x, gamma_h, h0, **options)


def one_state(
    step,
    wx,
    weight_hh,
    gamma_x,
    gamma_h,
    h0,
    *,
    lengths=None,
    population=None,
    eps=1e-5,
    input_stats="step",
    padding="exclude",
    min_rows=1,
    zoneout_h=0.0,
):
    """A network whose only state is h. step: computes a row's new h from both terms and h."""
    batch = Batch(wx, lengths, padding, h=h0)
    pop = population or {}
    enough = min(min_rows, batch.B), eps
    x_term = input_term(batch, wx, pop.get("x"), input_stats, *enough)
    h_term = Term(batch.features, pop.get("h"), None, *enough)
    for t in range(batch.T):
        h, counted = batch.states["h"], batch.counted(t)
        mean_h, var_h = h_term.statistics(t, [weight_hh @ h[b] for b in counted])
        mean_x, var_x = x_term.statistics(t, [wx[t, b] for b in counted])
        new_h = {}
        for b in batch.running(t):
            W_h_h = BN(weight_hh @ h[b], gamma_h, 0.0, mean_h, var_h, eps)
            W_x_x = BN(wx[t, b], gamma_x, 0.0, mean_x, var_x, eps)
            new_h[b] = zoneout(zoneout_h, t, b, h[b], step(W_h_h, W_x_x, h[b]))
        batch.advance(t, h=new_h)
    return {
        "output": batch.output,
        "h_n": batch.final("h"),
        **statistics(x=x_term, h=h_term),
    }
