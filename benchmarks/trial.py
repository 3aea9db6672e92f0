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

def compile_all(jobs):
    from concurrent.futures import ThreadPoolExecutor
    from rbn.ops.gpu.runtime import nvrtc
    arch = nvrtc.architecture(torch.cuda.get_device_capability())
    nvrtc.version(); nvrtc.works(torch.cuda.get_device_capability())
    def one(job):
        d, dt, H, tiling, lengths = job
        try: nvrtc.compiled(f"ln_{d}", s.macros(d, tiling, dt, s._defines(d, dt, H, lengths, True)), arch)
        except Exception as e: print("compile", job, repr(e)[:200])
    began = time.time()
    with ThreadPoolExecutor(14) as pool: list(pool.map(one, jobs))
    print(f"compiled {len(jobs)} in {time.time() - began:.1f} s", flush=True)

def T_(dt, H, C, tiles=1, **k):
    t = s.tiling(dt, H, C, LIMIT, tiles)
    return t and dataclasses.replace(t, **k)
variants = []
for dt in (BF, F32):
    variants += [((100, 64, 256, 512), dt, T_(dt, 512, 16)), ((100, 64, 256, 512), dt, T_(dt, 512, 16, 2))]
    variants += [((784, 100, 1, 100), dt, T_(dt, 100, 1)), ((100, 64, 50, 1000), dt, T_(dt, 1000, 16, 2)), ((100, 64, 50, 1000), dt, T_(dt, 1000, 16, 1))]
variants += [((100, 64, 256, 512), BF, T_(BF, 512, 16, registers=0)), ((100, 8, 256, 512), BF, T_(BF, 512, 16)), ((784, 100, 1, 100), BF, T_(BF, 100, 2)), ((784, 100, 1, 100), BF, T_(BF, 100, 4))]
variants += [((100, 64, 256, 256), BF, T_(BF, 256, C)) for C in (4, 8, 16)]
checks = [(9, 64, 16, 512, BF), (6, 100, 1, 100, BF), (4, 37, 5, 255, BF), (5, 33, 8, 1000, BF), (9, 64, 16, 512, F32), (6, 100, 1, 100, F32), (5, 33, 8, 1000, F32), (6, 100, 1, 100, FP), (7, 33, 3, 300, FP)]
if "compile" in sys.argv:
    jobs = [(d, dt, shape[3], t, False) for shape, dt, t in variants if t for d in ("forward", "backward")]
    for *shape, dt in checks:
        for C in (1, 2, 4, 8, 16):
            for tiles in (1,):
                t = T_(dt, shape[3], C, tiles)
                if t: jobs += [(d, dt, shape[3], t, L) for d in ("forward", "backward") for L in ((False, True) if shape[3] == 300 else (False,))]
            if T_(dt, shape[3], C): break
    compile_all(list(dict.fromkeys(jobs)))
if "check" in sys.argv:
    for c in checks: attempt(check, *c, lengths=True if c[3] == 300 else None)
    attempt(check, 6, 40, 4, 512, BF, tiling=T_(BF, 512, 16, 2))
    attempt(check, 30, 64, 16, 512, BF)
if "kernel" in sys.argv:
    for shape, dt, t in variants:
        if not t: continue
        print("at once", s.clusters_at_once(t, dt, shape[3], 0), end=" ")
        attempt(kernel_ms, *shape, dt, t)
    old = s.shares_in_half
    s.shares_in_half = lambda dt: False; s.kernel.cache_clear()
    attempt(kernel_ms, 100, 64, 256, 512, BF, T_(BF, 512, 16))
    attempt(kernel_ms, 100, 64, 50, 1000, BF, T_(BF, 1000, 16, 2))
    s.shares_in_half = old
if "steps" in sys.argv:
    from torch.profiler import profile, ProfilerActivity
    s.tiling_for = lambda a: None
    for T, B, I, H in ((180, 128, 27, 2000), (100, 64, 50, 1000)):
        layer = rbn.LayerNormLSTM(I, H).to("cuda", BF)
        x = torch.randn(T, B, I, device="cuda", dtype=BF); g = torch.randn(T, B, H, device="cuda", dtype=BF)
        both = lambda: (layer.zero_grad(set_to_none=True), layer(x)[0].backward(g))
        m = lambda v: round(sorted(v)[len(v) // 2], 3)
        print("steps", H, "called", m(sample(both, 5)), "graph", m(sample(capture(both).replay, 5)))
        with profile(activities=[ProfilerActivity.CUDA]) as prof: both(); torch.cuda.synchronize()
        for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[:7]: print(f"   {e.key[:60]:60} {e.count:5} {e.device_time_total / 1000:.3f} ms")
