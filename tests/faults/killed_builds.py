"""Builds questions in forks of this process, each killed at one of its changes to files.

For the test of kills, which preloads kill_at_operation.c. Arguments: the compiled library, a folder
with articles.jsonl, how many kills (0: one at every change), and whether a kill comes in the middle
of a write. A killed build is then resumed. Prints the number of changes, then a line for each kill.
"""

import ctypes
import os
import random
import shutil
import sys
import traceback
from pathlib import Path

from rbn.data.articles import build, run


def content(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main(library, place, count, torn):
    killer, articles = ctypes.CDLL(library), Path(place) / "articles.jsonl"
    run._CHUNK = 5

    def killed(out, at):
        """Run a build in a fork that is killed at a change. Returns its exit code."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                killer.arm(str(out).encode(), at, torn)
                build(articles, out, processes=1)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    whole = Path(place) / "whole"
    killer.arm(str(whole).encode(), -1, 0)
    build(articles, whole, processes=1)
    changes, expected = killer.operations(), content(whole)
    print(changes, flush=True)
    moments = range(changes)
    if count:
        moments = random.Random(os.environ["RBN_TEST_SEED"]).sample(moments, count)
    for at in moments:
        out = Path(place) / f"killed-{at}"
        code = killed(out, at)
        if (out / "build.json").exists():  # killed after the end
            same = content(out).items() >= expected.items()
        else:
            build(articles, out, processes=1)
            same = content(out) == expected
        print(at, code, "same" if same else "different", flush=True)
        shutil.rmtree(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
