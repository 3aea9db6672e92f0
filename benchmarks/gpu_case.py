"""Short jobs for gpu_tests.py, each in a separate process.

gpu_case.py kernels FAMILY [--all-wait]  each kernel once on small layers, for compute-sanitizer
gpu_case.py first T B I H TYPE           seconds of the first training step, with nothing compiled
gpu_case.py demo DEVICE MODEL SEED       the test accuracy of one of the digits demo's models
"""

import argparse
import contextlib
import functools
import json
import time
from unittest import mock

import torch
from gpu_sanitizer import FAMILIES

import rbn
import rbn.models

TYPES = {"tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kernels(family, all_wait):
    """A training and an inference call through every kernel of a family.

    small, cuda and wide are in CUDA C++, steps is step by step.
    The result is only loosely compared with the reference's: the sanitizer does the actual check.

    all_wait: compile the CUDA C++ kernels with barriers at which all threads wait.
    """
    from rbn.ops.gpu.bn_rnn import rnn_single
    from rbn.ops.gpu.lstm import cuda_kernels, plan
    from rbn.ops.gpu.lstm.cluster import cluster_kernels
    from rbn.ops.gpu.lstm.grid import grid_kernels
    from rbn.ops.gpu.lstm.portable import portable_kernels
    from rbn.ops.gpu.runtime import nvrtc

    compiled = nvrtc.compiled
    if all_wait:
        nvrtc.compiled = lambda name, defines, arch: compiled(name, defines | {"ALL_WAIT": 1}, arch)

    capability = torch.cuda.get_device_capability()
    in_memory = (cluster_kernels, "choose", lambda term: None)
    patches = {
        "small": [],
        "cuda": [in_memory],
        "wide": [in_memory, (portable_kernels, "fits", lambda term: False)],
        "steps": [
            (cuda_kernels, "family", lambda term, a: None),
            (rnn_single, "tiling_for", lambda a: None),
        ],
    }[family]
    types, layers = dict(TYPES), [rbn.LSTM, rbn.BatchNormLSTM]
    if all_wait and family == "wide":  # racecheck takes a minute for a few of them
        types, layers = {"bf16": torch.bfloat16}, [rbn.BatchNormLSTM]
    if family == "cuda":
        layers.append(rbn.BatchNormRNN)
    if family == "steps":
        layers += [rbn.LayerNormLSTM, rbn.BatchNormRNN, rbn.BatchNormGRU]
    cases = {
        f"{precision} {make.__name__}": (make, 3, 24, dtype, [])
        for precision, dtype in types.items()
        for make in layers
    }
    normalized = {}  # more of them, in bf16: inputs, units, what is patched
    if family == "small":
        normalized["one feature"] = (1, 24, [(cluster_kernels, "ONE_FEATURE", (torch.bfloat16,))])
        if not all_wait:  # racecheck of this one takes minutes
            normalized["16 units"] = (3, 136, [])
    if family == "wide":
        normalized["64 rows"] = (3, 24, [(grid_kernels, "PREFERRED", {64: 1})])
    for name, (inputs, hidden, more) in normalized.items():
        case = (rbn.BatchNormLSTM, inputs, hidden, torch.bfloat16, more)
        cases[f"bf16 BatchNormLSTM, {name}"] = case
    works = {
        name: (more, functools.partial(make_and_compare, make, inputs, hidden, dtype))
        for name, (make, inputs, hidden, dtype, more) in cases.items()
    }
    if family == "steps":
        works["bf16 symbols and their loss"] = ([], train_on_symbols)
    if family == "wide" and not all_wait:
        works["bf16 BatchNormLSTM, zoneout"] = ([], train_zoned)
        split = functools.partial(make_and_compare, rbn.BatchNormLSTM, 3, 24, torch.bfloat16, 130)
        works["bf16 BatchNormLSTM, 130 rows"] = ([], split)
    if (family == "wide" and capability != (9, 0)) or (family == "small" and capability < (9, 0)):
        works = {}
    for more, work in works.values():
        with contextlib.ExitStack() as stack:
            for patch in ((plan, "_CACHE", {}), *patches, *more):
                stack.enter_context(mock.patch.object(*patch))
            work()
    print(json.dumps({"ran": list(works)}))


def make_and_compare(make, inputs, hidden, dtype, rows=20):
    compare(make(inputs, hidden).to("cuda", dtype), rows)


def compare(layer, rows=20):
    like = next(layer.parameters())
    torch.manual_seed(0)
    x = torch.randn(3, rows, layer.input_size).to(like)
    lengths = torch.randint(1, 4, (rows,), device=like.device)
    for given in (None, lengths):
        layer.train()
        output = layer(x, lengths=given)[0]
        output.float().square().mean().backward()
        with torch.no_grad():
            layer.eval()(x, lengths=given)
    with torch.no_grad(), rbn.backend("reference"), rbn.batch_statistics(layer):
        expected = layer.double()(x.double(), lengths=lengths)[0]
    error = ((output.double() - expected).norm() / expected.norm()).item()
    assert error < 0.05, f"the output is off by {error}"  # 8 bits through three steps; not NaN


def train_on_symbols(device="cuda"):
    model = rbn.models.LanguageModel(rbn.BatchNormLSTM(27, 24)).to(device)
    symbols, targets = torch.randint(27, (2, 3, 20), device=device)
    with torch.autocast(device, torch.bfloat16):
        loss, _ = model(symbols, targets=targets)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def train_zoned(device="cuda"):
    layer = rbn.BatchNormLSTM(3, 24, zoneout=(0.5, 0.05)).to(device, torch.bfloat16)
    x = torch.randn(3, 20, 3, device=device, dtype=torch.bfloat16)
    layer(x)[0].float().square().mean().backward()
    with torch.no_grad():
        assert layer.eval()(x)[0].isfinite().all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name


def first(T, B, I, H, precision):  # noqa: E741
    torch.zeros(1, device="cuda")
    layer = rbn.BatchNormLSTM(I, H, max_length=T).to("cuda", TYPES[precision])
    x = torch.randn(T, B, I, device="cuda", dtype=TYPES[precision])
    began = time.perf_counter()
    layer(x)[0].sum().backward()
    torch.cuda.synchronize()
    print(json.dumps({"seconds": round(time.perf_counter() - began, 2)}))


def demo(device, model, seed):
    from rbn.data import digits
    from rbn.experiments.demo import Settings
    from rbn.experiments.demo.train import fit

    torch.set_num_threads(1)
    began, data = time.perf_counter(), digits()
    accuracy = fit(model, Settings(seed=seed), data, device=device).test_accuracy
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"test": accuracy, "images": len(data.test), "seconds": seconds}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    work = parser.add_subparsers(dest="work", required=True)
    one = work.add_parser("kernels")
    one.add_argument("family", choices=FAMILIES)
    one.add_argument("--all-wait", action="store_true")
    one = work.add_parser("first")
    for name in "TBIH":
        one.add_argument(name, type=int)
    one.add_argument("precision", choices=TYPES)
    one = work.add_parser("demo")
    one.add_argument("device")
    one.add_argument("model", choices=("LSTM", "BN-LSTM"))
    one.add_argument("seed", type=int)
    arguments = vars(parser.parse_args())
    {"kernels": kernels, "first": first, "demo": demo}[arguments.pop("work")](**arguments)


if __name__ == "__main__":
    main()
