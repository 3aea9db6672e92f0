import gc
import os
import secrets
import signal
import sys

# Small tensors gain nothing from a second thread, and lose much if other jobs use the cores.
# This also applies to subprocesses of the tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Let Inductor compile in this process, not in processes that would import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from filelock import FileLock
from hypothesis import settings
from warm_commands import WarmProcess

# Without a GPU, its kernels run in Triton's interpreter, to be set before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# cuBLAS requires this for deterministic algorithms, which also poison new memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# GPU tests use new random numbers in each run; the seed is printed at the start, to reproduce them.
os.environ.setdefault("RBN_TEST_SEED", str(secrets.randbelow(2**31)))

# A shell that runs the tests in the background ignores Ctrl-C, here and in subprocesses.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Commands print to pipes here: nothing must make them assume a terminal.
for _name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(_name, None)

torch.set_num_threads(1)

# Parameters whose values all are separate kinds of cases; for the others, one value is enough.
KINDS = frozenset(
    {
        *("backend", "cell_class", "classes", "dtype", "layer", "layer_class", "model", "op"),
        *("task", "variant", "way"),
    }
)
_FIRST_OF_KIND = pytest.StashKey[bool]()

# No deadline, because tests do not measure time. Few examples: the options have tests of their own.
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
    """Run the garbage collector less often, and exclude existing objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_report_header():
    if torch.cuda.is_available():
        return f"the same random inputs again: RBN_TEST_SEED={os.environ['RBN_TEST_SEED']}"
    return None


@pytest.fixture(autouse=True)
def own_choice_of_kernels(monkeypatch):
    """Discard plans of tests that change how kernels are selected."""
    plan = sys.modules.get("rbn.ops.gpu.lstm.plan")
    if plan is not None:
        monkeypatch.setattr(plan, "_CACHE", {})


@pytest.fixture(autouse=True)
def same_signal_handlers():
    """A signal handler left behind by a test would affect all processes that later tests start."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.hookimpl(wrapper=True, trylast=True)  # inside pytest-cov's hook
def pytest_runtest_call(item):
    """Measure coverage for the first case of each kind only, and never for tests marked no_cover.

    Other cases run the same lines, and tracing them would take half as long again. The tracer must
    be removed, because pytest-cov leaves one in xdist's workers.
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
    """Fills a folder of that name once for all of pytest's workers; returns its path."""
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
    """The process that `warm_commands.Command` forks; started on first use."""
    process = WarmProcess()
    yield process
    process.close()


@pytest.fixture
def capture():
    """Captures a step as a CUDA graph. Returns it and its result, which replays overwrite."""

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
