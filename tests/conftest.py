import gc
import os
import secrets
import signal
import sys

# Small tensors gain nothing from a second thread, and lose much where other work shares the cores.
# This holds for what tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles here, not in processes that import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from warm_commands import WarmProcess

# Without a GPU its kernels run in Triton's interpreter, which has to be said before it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Deterministic algorithms, which poison new memory, ask for this of cuBLAS.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# What is random on a GPU is so anew in each run; said at its beginning, to be had again.
os.environ.setdefault("RBN_TEST_SEED", str(secrets.randbelow(2**31)))

# A shell that starts the tests in the background has Ctrl-C ignored, here and in what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Commands print to pipes here: nothing must make them take one for a terminal.
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)

torch.set_num_threads(1)

# Parameters whose every value is a kind of case of its own; of the others one value stands for all.
KINDS = frozenset(
    {
        *("backend", "cell_class", "classes", "dtype", "layer", "layer_class", "model", "op"),
        *("task", "variant", "way"),
    }
)
_FIRST_OF_KIND = pytest.StashKey[bool]()

# No deadline: a timing is never a test. Few examples: the options have tests of their own.
settings.register_profile("usual", deadline=None, max_examples=25, derandomize="CI" in os.environ)
settings.register_profile("fast", deadline=None, max_examples=3)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("usual")


def pytest_addoption(parser):
    parser.addoption(
        "--fast", action="store_true", help="one case of each kind of every test that is not slow"
    )


def pytest_configure(config):
    if config.getoption("--fast"):
        settings.load_profile("fast")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Find the first case of each kind of every test; with --fast, select these."""
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        kinds = {(test, k, repr(parameters[k])) for k in KINDS & parameters.keys()} | {test}
        item.stash[_FIRST_OF_KIND] = not kinds <= seen
        seen |= kinds
    if config.getoption("--fast"):
        chosen = [i for i in items if i.stash[_FIRST_OF_KIND] and not i.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen


def pytest_collection_finish():
    """The garbage collector runs less often, and leaves out what is there by now, which stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_report_header():
    if torch.cuda.is_available():
        return f"the same random inputs again: RBN_TEST_SEED={os.environ['RBN_TEST_SEED']}"
    return None


@pytest.fixture(autouse=True)
def own_choice_of_kernels(monkeypatch):
    """No plan is left over from a test that changed how kernels are chosen."""
    plan = sys.modules.get("rbn.ops.gpu.lstm.plan")
    if plan is not None:
        monkeypatch.setattr(plan, "_CACHE", {})


@pytest.fixture(autouse=True)
def same_signal_handlers():
    """A handler that a test leaves behind would reach every process that later tests start."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.hookimpl(wrapper=True, trylast=True)  # inside of pytest-cov's
def pytest_runtest_call(item):
    """Coverage counts the first case of each kind, and none that is marked no_cover.

    Further cases run the same lines, and tracing them would take half as long again. The tracer has
    to be removed: pytest-cov leaves one in xdist's workers.
    """
    if item.get_closest_marker("no_cover") is None and item.stash[_FIRST_OF_KIND]:
        return (yield)
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)


@pytest.fixture(scope="session")
def make_once(tmp_path_factory, request):
    """Fills a folder of that name once, for all workers that pytest has; returns its path."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if hasattr(request.config, "workerinput") else base

    def make(name, fill):
        folder, unfinished = shared / name, tmp_path_factory.mktemp(name)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                fill(unfinished)
                unfinished.rename(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def warm_process():
    """What `warm_commands.Command` forks; it starts with the first of them."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture
def capture():
    """A step as a CUDA graph, and what it returned, which every replay writes anew."""

    def captured(step):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step()
        return graph, found

    return captured
