"""Times a training call on a GPU, eager or compiled: `host_gpu.py eager|compiled`."""

import sys
import time

import torch
from torch import nn

import rbn

SHAPES = [(50, 32, 128, 128), (100, 64, 256, 512), (30, 1024, 64, 64), (100, 64, 64, 32)]
SHAPES += [(100, 64, 50, 1000)]
began = time.time()


def measure(name, call, layer, x, g, rounds=7):
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

    for _ in range(8):
        both()
    torch.cuda.synchronize()
    found = [parts() for _ in range(60)]
    mid = [sorted(v)[30] * 1e3 for v in zip(*found, strict=True)]
    rows = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        a = time.perf_counter()
        for _ in range(20):
            both()
        torch.cuda.synchronize()
        rows.append((time.perf_counter() - a) / 20 * 1e3)
    rows.sort()
    print(
        f"{name:<44} step {rows[rounds // 2]:.3f} (least {rows[0]:.3f}) forward {mid[0]:.3f} "
        f"backward {mid[1]:.3f} one alone {mid[2]:.3f}",
        flush=True,
    )


def case(make, dtype, T, B, I, H):  # noqa: E741
    options = {"max_length": T} if make is rbn.BatchNormLSTM else {}
    layer = make(I, H, **options).to("cuda", dtype)
    x = torch.randn(T, B, I, device="cuda", dtype=dtype)
    return layer, x, torch.randn(T, B, H, device="cuda", dtype=dtype)


def main():
    torch.manual_seed(0)
    mode, peers = sys.argv[1], len(sys.argv) > 2
    small, ptb = SHAPES[0], SHAPES[-1]
    ours = [(rbn.BatchNormLSTM, torch.float16, small), (rbn.BatchNormLSTM, torch.float16, ptb)]
    ours += [(rbn.BatchNormLSTM, torch.float32, small), (rbn.LSTM, torch.float16, small)]
    if mode == "warm":
        make, dtype, shape = ours[int(sys.argv[2])]
        layer, x, g = case(make, dtype, *shape)
        for _ in range(2):
            layer(x)[0].backward(g)
        return
    if mode == "eager":
        ours += [(nn.LSTM, d, small) for d in (torch.float16, torch.float32)] if peers else []
        for make, dtype, shape in ours:
            layer, x, g = case(make, dtype, *shape)
            name = f"{make.__module__.split('.')[0]}.{make.__name__} {str(dtype)[6:]} {shape}"
            measure(name, layer, layer, x, g)
        return
    layer, x, g = case(rbn.BatchNormLSTM, torch.float16, *small)
    for name, wrap in (
        ("compiled", torch.compile),
        ("fullgraph", lambda m: torch.compile(m, fullgraph=True)),
    ):
        torch._dynamo.reset()
        measure(f"{name} {small}", wrap(layer), layer, x, g)


if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = True
    main()
    print(f"{time.time() - began:.0f} s")
