import sys, time, copy, dataclasses, traceback
sys.path.insert(0, "benchmarks")
import torch, rbn
from rbn.ops.gpu.ln_lstm import ln_single as s
from rbn.ops.gpu.runtime.driver import shared_limit
from gpu_timing import capture, sample
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
LIMIT = shared_limit(0)
U = {torch.float32: 2**-11, torch.float16: 2**-11, torch.bfloat16: 2**-8}

def check(T, B, I, H, dtype, lengths=None, tiling=None):
    torch.manual_seed(T + B + H)
    layer = rbn.LayerNormLSTM(I, H, eps=0.1)
    layer = layer.to(dtype)
    x = torch.randn(T, B, I).to(dtype)
    n = None if lengths is None else torch.randint(1, T + 1, (B,))
    def grads(layer, x, dev, backend):
        layer = copy.deepcopy(layer).to(dev); x = x.to(dev).requires_grad_()
        with rbn.backend(backend):
            kw = {} if n is None else {"lengths": n.to(dev)}
            out, (h, c) = layer(x, **kw)
        (out.double() * w.to(dev)).sum().backward(retain_graph=True)
        (h.double().square().sum() + c.double().square().sum()).backward()
        return {"out": out, "h": h, "c": c, "dx": x.grad} | {k: p.grad for k, p in layer.named_parameters()}
    w = torch.randn(T, B, H).double()
    old = s.tiling_for
    calls = []
    launch = s._launch
    def rec(*a): calls.append(a[0]); launch(*a)
    s._launch = rec
    if tiling: s.tiling_for = lambda a: tiling
    try: found = grads(layer, x, "cuda", "gpu")
    finally: s.tiling_for, s._launch = old, launch
    want = grads(copy.deepcopy(layer).double(), x.double(), "cuda", "reference")
    worst = {k: ((found[k].double() - v).norm() / max(1e-3, v.norm().item())).item() / U[dtype] for k, v in want.items()}
    top = max(worst, key=lambda k: worst[k] if worst[k] == worst[k] else 1e9)
    print(f"check {(T, B, I, H)} {str(dtype)[6:]} {'L' if n is not None else ' '} {calls} worst {top} {worst[top]:.2f} units", flush=True)

def kernel_ms(T, B, I, H, dtype, tiling):
    layer = rbn.LayerNormLSTM(I, H).to("cuda", dtype)
    x = torch.randn(T, B, I, device="cuda", dtype=dtype)
    old, launch, rec = s.tiling_for, s._launch, []
    s.tiling_for = lambda a: tiling
    s._launch = lambda *a: (rec.append((a[0], a[1], a[2], dict(a[3]), *a[4:])), launch(*a))
    try:
        out = layer(x)[0]; out.backward(torch.randn_like(out))
        res = []
        for r in rec:
            a = (r[0], r[1], r[2], r[3], *r[4:])
            s_ = sample(capture(lambda: launch(*a)).replay, 7)
            res.append(sorted(s_)[len(s_) // 2])
        both = lambda: (layer.zero_grad(set_to_none=True), layer(x)[0].backward(out.detach()))
        g = sample(capture(both).replay, 7); e = sample(both, 7)
    finally: s.tiling_for, s._launch = old, launch
    m = lambda v: round(sorted(v)[len(v) // 2], 3)
    print(f"kernel {(T,B,I,H)} {str(dtype)[6:]} C={tiling.cluster} U={tiling.units} tiles={tiling.tiles} split={tiling.split} regs={tiling.registers} fwd {res[0]:.3f} bwd {res[1]:.3f} graph {m(g)} called {m(e)}", flush=True)

def attempt(f, *a, **k):
    try: f(*a, **k)
    except Exception as error: print("FAILED", f.__name__, a, repr(error)[:300]); 

BF, FP, F32 = torch.bfloat16, torch.float16, torch.float32
if "check" in sys.argv:
    for dt in (BF, FP, F32):
        for shape in [(5, 7, 3, 50), (9, 64, 16, 512), (6, 100, 1, 100), (4, 37, 5, 255), (1, 1, 3, 10), (7, 33, 8, 640), (5, 5, 3, 1)]:
            attempt(check, *shape, dt)
        attempt(check, 9, 33, 4, 300, dt, lengths=True)
        attempt(check, 30, 64, 16, 512, dt)
        attempt(check, 6, 40, 4, 512, dt, tiling=s.tiling(512, 16, LIMIT, 2))
if "kernel" in sys.argv:
    for dt in (BF, F32):
        for C, tiles in ((16, 1), (16, 2)):
            t = s.tiling(512, C, LIMIT, tiles)
            if dt == BF: print("at once", C, tiles, s.clusters_at_once(t, dt, 512, 0))
            attempt(kernel_ms, 100, 64, 256, 512, dt, t)
            if tiles == 1: attempt(kernel_ms, 100, 64, 256, 512, dt, dataclasses.replace(t, registers=0))
            if tiles == 1: attempt(kernel_ms, 100, 8, 256, 512, dt, t)
        for C in (1, 2, 4):
            t = s.tiling(100, C, LIMIT)
            if t: attempt(kernel_ms, 784, 100, 1, 100, dt, t)
    for C in (4, 8, 16):
        t = s.tiling(256, C, LIMIT)
        if t: attempt(kernel_ms, 100, 64, 256, 256, BF, t)
