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
def prebuild(jobs):
    from rbn.ops.gpu.runtime import nvrtc
    nvrtc.version()
    def one(j):
        d,dtype,H,t=j
        defs={"TYPE":{torch.float32:0,torch.bfloat16:1,torch.float16:2}[dtype],"H":H,"LENGTHS":0,"DOUTPUT":int(d=="backward")}|dict.fromkeys(("MODE_X","MODE_H","MODE_C","BIAS","BETA","SAVE"),1)
        try: nvrtc.compiled(f"portable_{d}",pk.macros(t,tuple(defs.items())),"sm_90")
        except Exception as e: print("build",repr(e)[:100])
    with ThreadPoolExecutor(12) as pool: list(pool.map(one,jobs))
CASES=((512,torch.float16),(768,torch.float16),(512,torch.float32))
def variants(d,dtype,H):
    return [t for KS,reg,bar in (((8,0,1),(8,0,0),(16,0,0),(8,1,0),(16,1,0),(16,0,1)))
              if not (reg and blocks(d,dtype,H)//KS*(4 if d=="forward" else 1)>32)
              for t in [tiling(d,dtype,H,KS,bool(reg),bool(bar))] if pk.shared_bytes(d,t,dtype,H)<=227*1024]
def main():
    T=1024; began=time.time()
    prebuild([(d,dtype,H,t) for H,dtype in CASES for d in ("forward","backward") for t in variants(d,dtype,H)])
    print(f"built {time.time()-began:.0f}s",flush=True)
    for H,dtype in CASES:
        n=lambda v: f"KS {v.column_warps} chunk {v.chunk} reg {int(v.registers)} bar {int(v.barrier)}"
        lim=227*1024
        V={d:variants(d,dtype,H) for d in ("forward","backward")}
        def build(j):
            torch.cuda.set_device(0); torch.zeros(1,device="cuda")
        ref=None; rows=[]
        pairs=[(None,None)]+list(itertools.zip_longest(V["forward"],V["backward"]))
        for fam in ("grid","portable"):
            use(fam)
            try:
                r=result(H,dtype); ref=ref or r
                _,_,_,fwd,both=steps(T,H,dtype); a=ms(fwd); b=ms(both); print(f"H={H} {dtype} {fam} as chosen: fwd {a/T*1e3:.2f} bwd {(b-a)/T*1e3:.2f} us/step, {b:.3f} ms",flush=True)
            except Exception as e: print(fam,repr(e)[:150])
        if H==512:
            _,_,_,fwd,both=steps(T,H,dtype,kind=torch.nn.LSTM); a=ms(fwd); b=ms(both); print(f"cuDNN fwd {a/T*1e3:.2f} bwd {(b-a)/T*1e3:.2f}, {b:.3f} ms",flush=True)
        for f,b_ in pairs[1:]:
            use("portable",f or V["forward"][0],b_ or V["backward"][0])
            try:
                r=result(H,dtype); err=max(((x-y).norm()/y.norm()).item() for x,y in zip(r,ref) if y.norm()>0)
                _,_,_,fwd,both=steps(T,H,dtype); a=ms(fwd); b=ms(both)
                print(f"  fwd {n(f) if f else '-'}: {a/T*1e3:.2f} | bwd {n(b_) if b_ else '-'}: {(b-a)/T*1e3:.2f} | err {err:.1e} [{time.time()-began:.0f}s]",flush=True)
            except Exception as e: print("  failed",f,b_,repr(e)[:200],flush=True)
            if time.time()-began>42: print("out of time"); return
main()
