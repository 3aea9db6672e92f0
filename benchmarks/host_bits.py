"""Records the bits of many calls in parallel, for at most some seconds."""

import json
import logging
import multiprocessing
import os
import sys
import time

import torch

sys.path.insert(0, "benchmarks")
import recorded_calls

NUMBER = {}
OUT, SECONDS, WORKERS, BEFORE = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]


def chosen():
    for case, arguments in recorded_calls.cases("cuda"):
        kind, sizes, _, call, dtype = arguments
        if dtype == torch.float16 or sizes not in recorded_calls.FEW_SHAPES["cuda"]:
            continue
        if kind in ("ln_lstm", "bn_rnn") and ", plain," not in case:
            continue
        if call.get("compiled"):
            continue
        few = ((9, 20, 16, 64), (5, 64, 50, 1000), (7, 64, 1, 100))
        if ", plain," not in case and sizes != few[NUMBER.setdefault(case.split(",")[1], len(NUMBER)) % 3]:
            continue
        yield case, arguments


def work(shard, began):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    logging.getLogger("torch").setLevel(logging.ERROR)
    with open(f"{OUT}.{shard}", "w") as file:
        for k, (case, arguments) in enumerate(chosen()):
            if k % WORKERS != shard:
                continue
            if time.time() - began > SECONDS:
                return
            try:
                found = recorded_calls.run(*arguments, "cuda")
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:200]}
            file.write(json.dumps({case: found}) + "\n")
            file.flush()


if __name__ == "__main__":
    began = time.time()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(k, began), daemon=True) for k in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, SECONDS + 6 - (time.time() - began)))
    found = {}
    for k in range(WORKERS):
        if not os.path.exists(f"{OUT}.{k}"):
            continue
        for line in open(f"{OUT}.{k}"):
            if line.endswith("\n"):
                found |= json.loads(line)
    with open(OUT, "w") as file:
        json.dump(found, file, indent=0)
    errors = {case: f["error"] for case, f in found.items() if "error" in f}
    print(
        f"{len(found)} of {len(list(chosen()))} calls, {len(errors)} raised",
        list(errors.items())[:3],
    )
    for path in BEFORE:
        before = json.load(open(path))
        differ = [case for case in found if case in before and found[case] != before[case]]
        both = sum(case in before for case in found)
        print(f"{both} compared, {len(differ)} differ")
        for case in differ[:20]:
            print(case, [n for n in found[case] if found[case][n] != before[case].get(n)])
