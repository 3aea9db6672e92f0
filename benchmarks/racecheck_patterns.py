"""What racecheck reports as a race: minimal correct programs, and incorrect ones as a control.

    PYTHONPATH=src python3 benchmarks/racecheck_patterns.py

needs a GPU of compute capability 9.0 or later and compute-sanitizer, and takes half a minute. The
programs are in racecheck_patterns.cu. Each runs as blocks and as a cluster of three, with no warp
late for its barrier, with the last warp late, or with the others late: reports depend on the order
of arrival. Exits with 1 if a correct program read wrong numbers, or if something did not run.
"""

import collections
import re
import sys
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cu")
LATE = ("nobody", "server", "others")
BLOCKS, THREADS, ROUNDS = 3, 96, 4
# Report each hazard separately, not grouped by location, and all of them.
OPTIONS = ("--racecheck-report", "hazard", "--show-backtrace", "no", "--print-limit", "60000")
_PATTERN = re.compile(r"^// (right|WRONG)(, cluster)?: (.*)\nstruct (\w+)", re.M)
# Within a warp it is "Warning: (Warp Level Programming) Potential ...".
_HAZARD = re.compile(r"(Error|Warning|Info): (?:\([^)]*\) )?Potential (\w+) hazard")
_THREAD = re.compile(r"(?:Read|Write) Thread \((\d+),.*? at (?:void )?(\w+?)(?:\(.*?\))?\+0x")
_COUNTED = re.compile(r"^numbers (\w+) (\d+)$", re.M)


@dataclass(frozen=True)
class Pattern:
    """One program: its name in the source, whether it is correct, whether it needs a cluster."""

    name: str
    right: bool
    only_cluster: bool
    words: str

    def launches(self, clustered):
        """The names of its kernels, one for each of LATE; none if it needs a cluster."""
        if self.only_cluster and not clustered:
            return []
        return [f"{self.name}_{'cluster' if clustered else 'blocks'}_{who}" for who in LATE]


def patterns(text):
    """All patterns of the source, in order."""
    return [
        Pattern(name, right == "right", bool(cluster), words)
        for right, cluster, words, name in _PATTERN.findall(text)
    ]


def with_kernels(text, pattern):
    """The source, with the kernels of one pattern."""
    for clustered in (False, True):
        for late, name in enumerate(pattern.launches(clustered)):
            run = f"run<{pattern.name}, {int(clustered)}, {late}>(args);"
            text += f'extern "C" __global__ void {name}(Args args) {{ {run} }}\n'
    return text


def launch_all():
    """Run every pattern once under racecheck; prints how many numbers were wrong."""
    import torch

    from rbn.ops.gpu.runtime import driver, nvrtc

    major, minor = torch.cuda.get_device_capability()
    wrong = torch.zeros(1, device="cuda", dtype=torch.int32)
    memory = torch.arange(8 * ROUNDS, device="cuda", dtype=torch.int32)
    members = driver.structure("Args", ("wrong", "memory"), ("rounds",))
    arguments = members(wrong.data_ptr(), memory.data_ptr(), ROUNDS)
    text = SOURCE.read_text()
    for pattern in patterns(text):
        whole = with_kernels(text, pattern)
        code = nvrtc.compile_source(whole, pattern.name, {}, f"sm_{major}{minor}")
        for clustered in (False, True):
            for name in pattern.launches(clustered):
                wrong.zero_()
                kernel = driver.Kernel(code, name, THREADS, 0, BLOCKS if clustered else 0)
                kernel.launch((BLOCKS, 1), arguments)
                torch.cuda.synchronize()
                print("numbers", name, wrong.item(), flush=True)


def hazards(output):
    """What racecheck printed for each kernel: the number of hazards by kind and warps.

    A Counter by kind (RAW, WAR, WAW) and warps in the order of the two accesses, such as
    ``WAR 0>2``; warnings and notes are marked as such.
    """
    found, kind, threads = collections.defaultdict(collections.Counter), None, []
    for line in output.splitlines():
        if hazard := _HAZARD.search(line):
            severity = hazard[1].lower()
            kind = hazard[2] if severity == "error" else f"{hazard[2]} {severity}"
            threads = []
        elif kind and (thread := _THREAD.search(line)):
            threads.append((int(thread[1]) // 32, thread[2]))
            if len(threads) == 2:
                (first, kernel), (second, _) = threads
                found[kernel][f"{kind} {first}>{second}"] += 1
                kind = None
    return found


def table(all_patterns, output):
    """A line on racecheck's reports per pattern, and whether all are as expected."""
    found, counted = hazards(output), dict(_COUNTED.findall(output))
    lines, well = [f"late: {', '.join(LATE)}"], True
    for pattern in all_patterns:
        lines.append(f"{'right' if pattern.right else 'WRONG'}: {pattern.words} [{pattern.name}]")
        for clustered in (False, True):
            cells = []
            for name in pattern.launches(clustered):
                cell = ", ".join(f"{kind} x{n}" for kind, n in sorted(found[name].items())) or "-"
                if name not in counted:
                    cell, well = "did not run", False
                elif pattern.right and counted[name] != "0":
                    cell, well = f"{cell} ({counted[name]} wrong numbers)", False
                cells.append(cell)
            if cells:
                lines.append(f"    {'cluster' if clustered else 'blocks '}  {' / '.join(cells)}")
    return lines, well


def main():
    from gpu_sanitizer import find_sanitizer, version
    from gpu_tests import run

    binary = find_sanitizer()
    if binary is None:
        sys.exit("no compute-sanitizer was found")
    command = [binary, "--tool", "racecheck", *OPTIONS, sys.executable, __file__, "launch"]
    done = run(command, 300)
    lines, well = table(patterns(SOURCE.read_text()), done.output)
    print(f"compute-sanitizer {version(binary, run)}, {done.seconds:.0f} s")
    print("\n".join(lines))
    if not well:
        print("\n".join(done.output.splitlines()[-20:]))
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:] == ["launch"]:
        launch_all()
    elif len(sys.argv) > 1:
        sys.exit(__doc__)
    else:
        main()
