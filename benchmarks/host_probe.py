"""Times the host's share of a call on a GPU, piece by piece."""

import cProfile
import io
import pstats
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import rbn

D = "cuda"


def least(f, n=150, rounds=7):
    for _ in range(10):
        f()
    best = 1e9
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(n):
            f()
        best = min(best, (time.perf_counter() - began) / n)
        torch.cuda.synchronize()
    return best * 1e6


def profiled(name, f, n=100, rows=60):
    p = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            f()
        p.enable()
        for _ in range(n):
            f()
        p.disable()
    out = io.StringIO()
    pstats.Stats(p, stream=out).sort_stats("tottime").print_stats(rows)
    print("PROFILE", name)
    print("\n".join(line for line in out.getvalue().splitlines()[4:] if line.strip()), flush=True)


class Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *ts):
        ctx.save_for_backward(*ts)
        return tuple(torch.empty_like(ts[0]) for _ in range(3))

    @staticmethod
    def backward(ctx, *g):
        saved = ctx.saved_tensors
        return (None, *[torch.empty_like(t) for t in saved[1:]])


def micro():
    bf = torch.bfloat16
    x = torch.randn(1600, 128, device=D, dtype=bf)
    w = torch.randn(512, 128, device=D, dtype=bf)
    x3 = x.view(50, 32, 128)
    d = torch.randn(1600, 512, device=D, dtype=bf)
    o = torch.empty(1600, 512, device=D, dtype=bf)
    dev = x.device
    ps = [nn.Parameter(torch.randn(128, device=D)) for _ in range(9)]
    apply = super(torch.autograd.Function, Node).apply
    g = torch.randn(1600, 128, device=D)
    xf = torch.randn(1600, 128, device=D)

    def node():
        for p in ps:
            p.grad = None
        apply(xf, *ps)[0].backward(g)

    def node_one():
        with torch.autograd.set_multithreading_enabled(False):
            node()

    layer = rbn.BatchNormLSTM(128, 128, max_length=50).to(D, bf)
    tests = {
        "empty": lambda: torch.empty(1000, dtype=bf, device=dev),
        "empty_like": lambda: torch.empty_like(x),
        "new_empty": lambda: x.new_empty(1000),
        "zeros": lambda: torch.zeros(1000, dtype=torch.float32, device=dev),
        "full view": lambda: torch.full((51, 32, 128), -1, dtype=torch.int16, device=dev).view(bf),
        "as_strided": lambda: x.as_strided((3, 16), (1, 1), 0),
        "view": lambda: x.view(50, 32, 128),
        "data_ptr": lambda: x.data_ptr(),
        "F.linear 3d": lambda: F.linear(x3, w),
        "mm": lambda: torch.mm(x, w.t()),
        "w.t()": lambda: w.t(),
        "mm out": lambda: torch.mm(x, w.t(), out=o),
        "mm dW": lambda: torch.mm(d.t(), x),
        "mm dh0": lambda: torch.mm(d[:32], w),
        "t contiguous": lambda: w.transpose(-2, -1).contiguous(),
        "fill": lambda: o.fill_(0),
        "zero_": lambda: o.zero_(),
        "stream": lambda: torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice()),
        "zero_grad": lambda: layer.zero_grad(),
        "node": node,
        "node, one thread": node_one,
    }
    print("MICRO", sys.version.split()[0], torch.__version__)
    for name, f in tests.items():
        print(f"{name:<18}{least(f):8.2f}", flush=True)


def launches():
    from rbn.ops.gpu.lstm import forward as fw
    from rbn.ops.gpu.runtime import driver, launch_cache

    totals = {}

    def timed(owner, name, label):
        own = getattr(owner, name)

        def run(*a, **k):
            t = time.perf_counter()
            r = own(*a, **k)
            key = label(*a)
            totals.setdefault(key, []).append((time.perf_counter() - t) * 1e6)
            return r

        setattr(owner, name, run)
        return lambda: setattr(owner, name, own)

    undo = [timed(driver.Kernel, "launch", lambda s, *a: f"Kernel.launch cluster {s.cluster}")]
    original = launch_cache.launch_by_key
    import rbn.ops.gpu.lstm.backward as bw
    import rbn.ops.gpu.lstm.constant_terms as ct
    import rbn.ops.gpu.lstm.prepare as pr

    for module in (fw, bw, ct, pr, launch_cache):
        undo.append(timed(module, "launch_by_key", lambda k, *a: "triton " + k.__name__))
    layer = rbn.BatchNormLSTM(128, 128, max_length=50).to(D, torch.bfloat16)
    x = torch.randn(50, 32, 128, device=D, dtype=torch.bfloat16)
    for _ in range(300):
        layer.zero_grad()
        y = layer(x)[0]
        y.backward(y.detach())
        torch.cuda.synchronize()
    for u in undo:
        u()
    assert original is launch_cache.launch_by_key
    print("LAUNCHES, median us in the call")
    for name, values in totals.items():
        print(f"{name:<30}{sorted(values)[len(values) // 2]:8.1f}")


def layers():
    for T, B, I, H in ((50, 32, 128, 128), (100, 64, 50, 1000)):  # noqa: E741
        for make, dtype in (
            (rbn.BatchNormLSTM, torch.bfloat16),
            (rbn.BatchNormLSTM, torch.float32),
            (rbn.LSTM, torch.bfloat16),
            (nn.LSTM, torch.float16),
            (nn.LSTM, torch.float32),
        ):
            options = {"max_length": T} if make is rbn.BatchNormLSTM else {}
            layer = make(I, H, **options).to(D, dtype)
            x = torch.randn(T, B, I, device=D, dtype=dtype)
            modes = {"eager": lambda m: m}
            if make is rbn.BatchNormLSTM and dtype == torch.bfloat16:
                modes |= {
                    "compiled": torch.compile,
                    "fullgraph": lambda m: torch.compile(m, fullgraph=True),
                }
            for mode, wrap in modes.items():
                torch._dynamo.reset()
                call = wrap(layer)
                g = torch.randn(T, B, H, device=D, dtype=dtype)

                def fwd():
                    return call(x)

                def both():
                    layer.zero_grad()
                    call(x)[0].backward(g)

                def parts():
                    a = time.perf_counter()
                    layer.zero_grad()
                    y = call(x)[0]
                    b = time.perf_counter()
                    y.backward(g)
                    c = time.perf_counter()
                    torch.cuda.synchronize()
                    return b - a, c - b, time.perf_counter() - a

                for _ in range(5):
                    both()
                found = [parts() for _ in range(200)]
                mid = [sorted(v)[100] * 1e6 for v in zip(*found, strict=True)]
                wait = least(both, 30)
                print(
                    f"{make.__name__} {dtype} {T, B, I, H} {mode}: forward {mid[0]:.0f} "
                    f"backward {mid[1]:.0f} until done {mid[2]:.0f}, in a row {wait:.0f}",
                    flush=True,
                )
                if make is rbn.BatchNormLSTM and H == 128 and dtype == torch.bfloat16:
                    profiled(mode, both)


if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = True
    for part in (micro, launches, layers):
        try:
            part()
        except Exception as error:
            print(part.__name__, type(error), error, flush=True)
