"""Compiles what calls would launch on other GPUs, without a GPU, and runs nothing.

Run as a separate program by `test_older_cards.py`, so that Triton compiles instead of interpreting.
Arguments: compute capabilities, each as one number. For each, prints the bytes of shared memory
of each kernel. Takes from `older_card.csv` what the compiler would give again. With --write, it
compiles everything and writes that file:

    .venv/bin/python tests/ops/gpu/older_card.py --write 75 70
"""

import csv
import hashlib
import json
import os
import sys
import types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("RBN_TEST_SEED", "0")
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # else the machine code has the source's path

import torch
import triton
from recurrence_cases import calm, differentiate, make_case
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rbn.ops import dispatch
from rbn.ops.cpu.inference import Row, Weights
from rbn.ops.gpu.lstm_cell import step
from rbn.ops.gpu.runtime import device, triton_compiler
from rbn.ops.gpu.symbols import look_up

TABLE = Path(__file__).with_suffix(".csv")
COLUMNS = ("kernel", "inputs", "shared_bytes", "machine_code")


def digest(content):
    return hashlib.sha256(content).hexdigest()[:20]


def with_table(compile_source, table):
    """Triton's compiler. It compiles what is not in the table, and adds it."""

    def compile_new(source, target=None, options=None, **others):
        backend = make_backend(target)
        parsed = backend.parse_options(dict(options or {}, **source.parse_options()))
        inputs = (source.hash(), backend.hash(), parsed.hash(), triton.__version__)
        key = source.name, digest(repr(inputs).encode())
        if key not in table:
            code = compile_source(source, target=target, options=options, **others)
            table[key] = code.metadata.shared, digest(code.asm["cubin"])
        shared, cubin = table[key]
        return types.SimpleNamespace(
            metadata=types.SimpleNamespace(shared=shared), asm={"cubin": cubin}
        )

    return compile_new


def main(table, *capabilities):
    found = {}
    current = None
    card = types.SimpleNamespace(
        get_current_device=lambda: current,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", current, 32),
    )
    compiled, compile_for, compared = JITFunction.run, triton_compiler.compile_for, set()

    def run(kernel, *args, grid, warmup, **options):
        if "FUSED" in options:
            options["FUSED"] = True  # as on any GPU
        code = compiled(kernel, *args, grid=grid, warmup=True, **options)
        found[current].append((kernel.__name__, code.metadata.shared))

    def compare(kernel, tensors, numbers, flags):
        """Once for each kernel: our compiler gives the code of Triton's, which then launches it."""
        if kernel.__name__ not in compared:
            compared.add(kernel.__name__)
            if "FUSED" in flags:
                flags = flags | {"FUSED": True}
            code = compile_for(kernel, tensors, numbers, flags)
            expected = compiled(kernel, *tensors, *numbers, grid=(1,), warmup=True, **flags)
            assert code.asm["cubin"] == expected.asm["cubin"], kernel.__name__

    def product_on_card(where, dtype):
        return device.has_product(torch.device("cuda", 0), dtype)

    compile_new = with_table(triton.compile, table)
    driver.set_active(card)
    os.environ["TRITON_INTERPRET"] = "1"  # else tensors on the CPU are rejected
    patches = [(JITFunction, "run", run), (look_up, "has_product", product_on_card)]
    patches += [(triton_compiler, "compile_for", compare), (torch.cuda, "current_device", int)]
    patches += [(torch.cuda, "get_device_capability", lambda device: divmod(current, 10))]
    patches += [(triton, "compile", compile_new), (triton.compiler, "compile", compile_new)]
    for patch in patches:
        mock.patch.object(*patch).start()
    for current in capabilities:
        found[current] = []
        dispatch._capability.cache_clear()
        launch_normalized_lstms()
        launch_others()
    return list(found.values())


def launch_normalized_lstms():
    options = calm("bn_lstm") | {"lengths": "random", "zoneout": ("mask", 0.3)}
    differentiate(make_case("bn_lstm", 2, 9, 17, dtype=torch.bfloat16, **options), "gpu")
    differentiate(make_case("ln_lstm", 1, 9, 17, dtype=torch.bfloat16, **calm("ln_lstm")), "gpu")


def launch_others():
    for dtype in (torch.float32, torch.float16):
        differentiate(make_case("lstm", 2, 200, 60, dtype=dtype), "gpu")
    half = torch.bfloat16
    for op in ("bn_rnn", "bn_gru"):
        differentiate(make_case(op, 1, 9, 17, dtype=half, **calm(op)), "gpu")
    grad = torch.zeros(100, 64, dtype=half)
    look_up.gradient(torch.zeros(100, dtype=torch.int64), grad, 256, half)
    vectors = [torch.zeros(n) for n in (68, 68, 68, 17, 17)]
    weights = Weights(torch.zeros(68, 3), torch.zeros(68, 17), *vectors)
    rows = [Row(torch.zeros(2, n), torch.ones(2, n), 1) for n in (68, 68, 17)]
    states = torch.zeros(2, 4, 17).unbind()
    for given, rates in ((rows, (0.1, 0.2)), ((None, None, None), (0.0, 0.0))):
        own = weights if given is rows else Weights(*weights[:2], *[None] * 5)
        step.step(torch.zeros(4, 3), own, states, given, 1e-5, rates, False)


def read_table():
    with TABLE.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {(name, inputs): (int(shared), code) for name, inputs, shared, code in rows}


def write_table(table):
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows([*key, *value] for key, value in sorted(table.items()))


if sys.argv[1] == "--write":
    new = {}
    main(new, *map(int, sys.argv[2:]))
    write_table(new)
else:
    print(json.dumps(main(read_table(), *map(int, sys.argv[1:]))))
