import sys

sys.path.insert(0, "benchmarks")
import torch, rbn
from torch.profiler import profile, ProfilerActivity
from gpu_timing import capture, sample

torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
print(rbn.__file__)
for T, B, I, H in (
    (180, 128, 27, 2000),
    (100, 64, 256, 512),
    (784, 100, 1, 100),
    (100, 64, 50, 1000),
):
    layer = rbn.LayerNormLSTM(I, H).to("cuda", torch.bfloat16)
    x = torch.randn(T, B, I, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(T, B, H, device="cuda", dtype=torch.bfloat16)
    both = lambda: (layer.zero_grad(set_to_none=True), layer(x)[0].backward(g))
    m = lambda v: round(sorted(v)[len(v) // 2], 3)
    both()
    print(H)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        both()
        torch.cuda.synchronize()
    for e in sorted(prof.key_averages(), key=lambda e: -e.device_time_total)[
        : 9 if H == 2000 else 5
    ]:
        print(f"   {e.key[:64]:64} {e.count:5} {e.device_time_total / 1000:.3f} ms")
