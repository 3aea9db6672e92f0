"""Records the exact bits of a set of calls, to show that a source change does not affect them.

Runs layers of every kind over shapes and options that reach every code path of a device, forward
and backward, and writes a hash of each result: output, last states, gradients, statistics. Two
recordings are comparable if they come from the same machine and the same versions.

    python3 benchmarks/recorded_calls.py --device cuda --out before.json
    python3 benchmarks/recorded_calls.py --device cuda --compare before.json
"""

import argparse
import hashlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path

import torch

import rbn

# (T, B, I, H): small and odd shapes; on a GPU also those that each kernel family supports.
SHAPES = {
    "cpu": [(5, 3, 4, 7), (1, 2, 3, 8), (6, 1, 3, 5), (4, 64, 5, 40)],
    "cuda": [
        (5, 3, 4, 7),
        (1, 2, 3, 8),
        (6, 1, 3, 6),
        (9, 20, 16, 64),
        (7, 64, 1, 100),
        (6, 32, 24, 200),
        (5, 16, 32, 512),
        (5, 64, 50, 1000),
        (4, 128, 27, 2000),
        (3, 300, 16, 128),
        (4, 700, 8, 64),
    ],
}
LAYERS = {
    "lstm": rbn.LSTM,
    "bn_lstm": rbn.BatchNormLSTM,
    "ln_lstm": rbn.LayerNormLSTM,
    "bn_rnn": rbn.BatchNormRNN,
    "bn_gru": rbn.BatchNormGRU,
}
BATCH = ("bn_lstm", "bn_rnn", "bn_gru")
OPTIONS = {  # options of the layer, options of the call, layers that have them
    "plain": ({}, {}, LAYERS),
    "no bias": ({"bias": False}, {}, LAYERS),
    "two layers": ({"num_layers": 2}, {}, LAYERS),
    "two directions": ({"bidirectional": True}, {}, LAYERS),
    "lengths": ({}, {"lengths": True}, LAYERS),
    "two directions, lengths": ({"bidirectional": True}, {"lengths": True}, LAYERS),
    "given states": ({}, {"states": True}, LAYERS),
    "zeros": ({"initial_state": "zeros"}, {}, LAYERS),
    "symbols": ({}, {"symbols": True}, LAYERS),
    "zoneout": ({"zoneout": 0.2}, {}, LAYERS),
    "evaluation": ({}, {"evaluation": True}, LAYERS),
    "evaluation, lengths": ({"zoneout": 0.2}, {"evaluation": True, "lengths": True}, LAYERS),
    "last state only": ({}, {"last": True}, LAYERS),
    "retained graph": ({}, {"retain": True}, LAYERS),
    "exact float32": ({}, {"ieee": True}, LAYERS),
    "input gradient": ({}, {"input_gradient": True}, LAYERS),
    "sequence": ({"input_stats": "sequence"}, {}, BATCH),
    "sequence, lengths": ({"input_stats": "sequence"}, {"lengths": True}, BATCH),
    "include": ({"padding": "include"}, {"lengths": True}, BATCH),
    "joint terms": ({"ablations": ("joint_terms",)}, {}, ("bn_lstm",)),
    "normalized cell": ({"ablations": ("pass_normalized_cell",)}, {}, ("bn_lstm",)),
    "raw output": ({"ablations": ("raw_output",)}, {}, ("bn_lstm",)),
    "relu": ({"nonlinearity": "relu"}, {}, ("bn_rnn",)),
    "compiled": ({}, {"compiled": True}, LAYERS),
}
DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16),
    "cuda": (torch.float32, torch.bfloat16, torch.float16),
}
COMPILED_SHAPES = 4  # torch.compile takes seconds
# On a GPU every case compiles kernels, so most options run on a few shapes, and few in float16.
EVERY_SHAPE = ("plain", "lengths", "two directions")
FEW_SHAPES = {
    "cpu": SHAPES["cpu"],
    "cuda": [(5, 3, 4, 7), (9, 20, 16, 64), (7, 64, 1, 100), (5, 16, 32, 512), (5, 64, 50, 1000)],
}


def digest(tensors):
    found = hashlib.sha256()
    for tensor in tensors:
        if tensor is None:
            found.update(b"none")
            continue
        tensor = tensor.detach().contiguous().cpu()
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def run(kind, sizes, options, call, dtype, device):
    """The hash of each result of one call, forward and backward."""
    T, B, I, H = sizes  # noqa: E741
    if kind in ("bn_rnn", "bn_gru") and "zoneout" in options:
        options = {**options, "zoneout": 0.2}
    elif "zoneout" in options:
        options = {**options, "zoneout": (0.2, 0.1)}
    torch.manual_seed(1)
    layer = LAYERS[kind](I, H, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    layer = layer.to(device, dtype)
    rbn.nn.keep_running_averages(layer)
    x = torch.randn(T, B, I).to(device, dtype)
    if call.get("symbols"):
        x = torch.randint(I, (T, B)).to(device)
    elif call.get("input_gradient"):
        x.requires_grad_()
    named = {}
    if call.get("lengths"):
        named["lengths"] = torch.randint(1, T + 1, (B,))
        named["lengths"][0] = T
    if call.get("states"):
        rows = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
        states = [torch.randn(rows, B, H).to(device, dtype) for _ in layer.states]
        named["hx"] = tuple(states) if len(states) > 1 else states[0]
    if call.get("evaluation"):
        with torch.no_grad():
            layer(x)
        layer.eval()
    forward = torch.compile(layer, backend="aot_eager") if call.get("compiled") else layer
    torch.backends.cudnn.allow_tf32 = not call.get("ieee")
    output, states = forward(x, **named)
    states = states if isinstance(states, tuple) else (states,)
    torch.manual_seed(2)
    weights = [torch.randn(r.shape).to(device, r.dtype) for r in (output, *states)]
    parts = [(r * w).sum() for r, w in zip((output, *states), weights, strict=True)]
    loss = parts[1] if call.get("last") else sum(parts)
    gradients = {}
    for k in range(2 if call.get("retain") else 1):
        layer.zero_grad(set_to_none=True)
        loss.backward(retain_graph=call.get("retain") and k == 0)
        gradients[k] = [p.grad for _, p in sorted(layer.named_parameters())]
    found = {"output": digest([output]), "states": digest(states)}
    names = sorted(name for name, _ in layer.named_parameters())
    for k, own in gradients.items():
        found |= {f"gradient {k} {n}": digest([g]) for n, g in zip(names, own, strict=True)}
    if x.requires_grad:
        found["input"] = digest([x.grad])
    found["statistics"] = digest([b for _, b in sorted(layer.named_buffers())])
    return found


def cases(device):
    """The name of every case, and its arguments of `run`."""
    for kind, name, dtype in itertools.product(LAYERS, OPTIONS, DTYPES[device]):
        layer_options, call, kinds = OPTIONS[name]
        shapes = SHAPES[device] if name in EVERY_SHAPE else FEW_SHAPES[device]
        if kind not in kinds or (dtype == torch.float16 and name not in EVERY_SHAPE):
            continue
        for sizes in shapes[:COMPILED_SHAPES] if call.get("compiled") else shapes:
            case = f"{kind}, {name}, {sizes}, {str(dtype).removeprefix('torch.')}"
            yield case, (kind, sizes, layer_options, call, dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="write the recording here")
    parser.add_argument("--compare", type=Path, help="list differences to this recording")
    parser.add_argument("--only", help="record only cases whose name contains this")
    parser.add_argument("--shard", type=int, default=0, help="which part to record, from 0")
    parser.add_argument("--shards", type=int, default=1, help="number of parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    logging.getLogger("torch").setLevel(logging.ERROR)
    found, errors = {}, 0
    for number, (case, arguments) in enumerate(cases(options.device)):
        if options.only and options.only not in case:
            continue
        if number % options.shards != options.shard:
            continue
        if arguments[3].get("compiled"):
            torch._dynamo.reset()
        try:
            found[case] = run(*arguments, options.device)
        except Exception as error:
            errors += 1
            found[case] = {"error": f"{type(error).__name__}: {error}"[:200]}
    print(f"{len(found)} calls, {errors} of them raised")
    if options.out:
        options.out.write_text(json.dumps(found, indent=0))
    if options.compare:
        before = json.loads(options.compare.read_text())
        differ = [c for c in found if c in before and found[c] != before[c]]
        for case in differ:
            print(
                case,
                {
                    n: (before[case].get(n), v)
                    for n, v in found[case].items()
                    if before[case].get(n) != v
                },
            )
        both = sum(case in before for case in found)
        print(f"{both} calls compared, {len(differ)} differ")
        return bool(differ)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
