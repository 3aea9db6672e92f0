"""Trial: few rows in the portable kernels, by tiling. Not kept."""
import sys, time, itertools, dataclasses
from concurrent.futures import ThreadPoolExecutor
import torch, rbn
from rbn.ops.gpu.lstm import cuda_kernels, plan
from rbn.ops.gpu.lstm.portable import portable_kernels as pk
from rbn.ops.gpu.lstm.grid import grid_kernels
from rbn.ops.gpu.lstm.cluster import cluster_kernels
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
P = pk.PortableTiling
def blocks(direction, dtype, H): return -(-(H if direction=="forward" else 4*H)//(32 if dtype!=torch.float32 else 16))
def tiling(direction, dtype, H, KS, reg, bar, most=16):
    per=-(-blocks(direction,dtype,H)//KS)
    return P(1,1,KS,min(per,most),reg,bar)
def steps(T,H,dtype,I=None,kind=rbn.BatchNormLSTM):
    torch.manual_seed(0); I=I or H
    layer=kind(I,H,max_length=T,refresh_stats=False) if kind is not torch.nn.LSTM else kind(I,H)
    layer=layer.to("cuda",dtype)
    x=torch.randn(T,16,I,device="cuda",dtype=dtype); g=torch.randn(T,16,H,device="cuda",dtype=dtype)
    def fwd(): layer(x)
    def both():
        layer.zero_grad(set_to_none=True); layer(x)[0].backward(g)
    return layer,x,g,fwd,both
def ms(fn,n=5):
    s=torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for _ in range(2): fn()
    torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
    G=torch.cuda.CUDAGraph()
    with torch.cuda.graph(G): fn()
    t=[]
    for _ in range(n):
        a,b=(torch.cuda.Event(enable_timing=True) for _ in range(2)); a.record(); G.replay(); b.record(); torch.cuda.synchronize(); t.append(a.elapsed_time(b))
    return sorted(t)[len(t)//2]
def result(H,dtype):
    layer,x,g,_,_=steps(12,H,dtype); out=layer(x)[0]; out.backward(g)
    return [out.detach().double()]+[p.grad.double() for p in layer.parameters()]
chosen={}
original=pk.choose
pk.choose=lambda d,*a,**k: chosen.get(d) or original(d,*a,**k)
cluster_kernels.choose=lambda t: None
def use(family,f=None,b=None):
    plan._CACHE.clear(); chosen.clear()
    if f: chosen["forward"]=f
    if b: chosen["backward"]=b
    cuda_kernels.fits_grid=grid_kernels.fits if family=="grid" else (lambda t: False)

@dataclasses.dataclass(frozen=True)
class X(pk.PortableTiling):
    extra: tuple = ()
macros=pk.macros
pk.macros=lambda t,d: macros(t,d)|dict(getattr(t,"extra",()))
def x(direction,dtype,H,KS=8,reg=0,bar=0,most=16,**extra):
    t=tiling(direction,dtype,H,KS,bool(reg),bool(bar),most)
    return X(**dataclasses.asdict(t),extra=tuple(extra.items()))
h,f=torch.float16,torch.float32
def F(H=512,dtype=h,**k): return ("forward",dtype,H,x("forward",dtype,H,**k))
def B(H=512,dtype=h,**k): return ("backward",dtype,H,x("backward",dtype,H,**k))
PAIRS=[
 ("1 probe / probe, late",F(reg=1),B()),
 ("2 no probe / no probe, late",F(reg=1,PROBE=0),B(PROBE=0)),
 ("3 no probe / probe, not late",F(reg=1,PROBE=0,LATE=0),B(LATE=0)),
 ("4 KS 4 no probe, not late / barrier late",F(KS=4,reg=1,PROBE=0,LATE=0),B(bar=1)),
 ("5 barrier late / barrier not late",F(reg=1,bar=1),B(bar=1,LATE=0)),
 ("6 no waiting (wrong numbers)",F(reg=1,PROBE=0,NO_WAIT=1),B(NO_WAIT=1)),
 ("7 no gather (wrong numbers)",F(reg=1,NO_GATHER=1),B(NO_GATHER=1)),
 ("8 no sum (wrong numbers)",F(reg=1,PROBE=0,NO_SUM=1),B(NO_SUM=1)),
 ("9 768 probe / probe, late",F(768,reg=1),B(768)),
 ("10 768 no probe / no probe, not late",F(768,reg=1,PROBE=0,LATE=0),B(768,PROBE=0,LATE=0)),
 ("11 768 no probe / barrier late",F(768,reg=1,PROBE=0),B(768,bar=1)),
 ("12 tf32 512 probe / probe, late",F(512,f,reg=0),B(512,f,most=8)),
 ("13 tf32 512 no probe / barrier, late",F(512,f,PROBE=0),B(512,f,most=8,bar=1)),
]
def prebuild(jobs):
    from rbn.ops.gpu.runtime import nvrtc
    nvrtc.version()
    def one(j):
        d,dtype,H,t=j
        defs={"TYPE":{torch.float32:0,torch.bfloat16:1,torch.float16:2}[dtype],"H":H,"LENGTHS":0,"DOUTPUT":int(d=="backward")}|dict.fromkeys(("MODE_X","MODE_H","MODE_C","BIAS","BETA","SAVE"),1)
        try: nvrtc.compiled(f"portable_{d}",pk.macros(t,tuple(defs.items())),"sm_90")
        except Exception as e: print("build",repr(e)[:300])
    with ThreadPoolExecutor(14) as pool: list(pool.map(one,jobs))
def main():
    T=1024; began=time.time()
    prebuild([j for _,a,b in PAIRS for j in (a,b)])
    print(f"built {time.time()-began:.1f}s",flush=True)
    made={}
    for name,a,b in PAIRS:
        d,dtype,H,ft=a; bt=b[3]
        use("portable",ft,bt)
        try:
            if (dtype,H) not in made: made[dtype,H]=steps(T,H,dtype)
            _,_,_,fwd,both=made[dtype,H]; u=ms(fwd,3); v=ms(both,3)
            print(f"{name}: {u/T*1e3:.2f} + {(v-u)/T*1e3:.2f} us, {v:.3f} ms [{time.time()-began:.1f}s]",flush=True)
        except Exception as e: print("failed",name,repr(e)[:200],flush=True)
    rnn(began)
OLD="""__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float tanh_(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }
"""
def rnn(began):
    from rbn.ops.gpu.bn_rnn import rnn_single
    from rbn.ops.gpu.runtime import nvrtc
    new=nvrtc.source
    def old(name):
        t=new(name); a=t.index("__device__ __forceinline__ float exp2_("); b=t.index("#else",a)
        return t[:a]+OLD+t[b:]
    for source,label in ((new,"new"),(old,"old"),(new,"new"),(old,"old")):
        nvrtc.source=source; rnn_single.kernel.cache_clear()
        torch.manual_seed(0); layer=rbn.BatchNormRNN(1,100,max_length=784,refresh_stats=False).cuda(); xx=torch.randn(784,100,1,device="cuda"); g=torch.randn(784,100,100,device="cuda")
        def both():
            layer.zero_grad(set_to_none=True); layer(xx)[0].backward(g)
        print(f"BatchNormRNN mnist tf32, {label} tanh: {ms(both,5):.3f} ms [{time.time()-began:.1f}s]",flush=True)
main()
