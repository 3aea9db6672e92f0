"""Fixtures for tests of the GPU's kernels, with and without a GPU."""

import contextlib
import types

import pytest
import torch


@pytest.fixture(autouse=True)
def new_plans(monkeypatch):
    """Each test makes its own plans: they refer to the kernels, which some tests replace."""
    with contextlib.suppress(ImportError):
        from rbn.ops.gpu.lstm import plan

        monkeypatch.setattr(plan, "_CACHE", {})


@pytest.fixture
def hopper(monkeypatch):
    """An H200, as far as kernel selection is concerned."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from rbn.ops.gpu.lstm.grid import grid_kernels
    from rbn.ops.gpu.lstm.portable import portable_kernels
    from rbn.ops.gpu.runtime import nvrtc

    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 8))
    caches = (grid_kernels._choose, portable_kernels._fits)
    monkeypatch.setattr(grid_kernels, "clusters", lambda size, device: 15 * (8 // size))
    for module in (grid_kernels, portable_kernels):
        monkeypatch.setattr(module, "shared_limit", lambda device: 227 * 1024)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Records the names of the kernels that run."""
    from rbn.ops.gpu.lstm import cuda_kernels

    kernels, launch_for = [], cuda_kernels.launch_for

    def counted(direction, *rest):
        kernels.append(direction)
        return launch_for(direction, *rest)

    monkeypatch.setattr(cuda_kernels, "launch_for", counted)
    return kernels


@pytest.fixture
def record_runs(monkeypatch):
    """Records the launches of a family's kernels."""
    from rbn.ops.gpu.lstm import cuda_kernels

    def record(family, what=lambda direction, call: direction):
        found, run = [], cuda_kernels.launch_for

        def recorded(direction, call, *rest):
            if call.plan.family == family:
                found.append(what(direction, call))
            return run(direction, call, *rest)

        monkeypatch.setattr(cuda_kernels, "launch_for", recorded)
        return found

    return record


@pytest.fixture
def drive(monkeypatch):
    """Replaces functions of CUDA's driver by the test's own."""
    from rbn.ops.gpu.runtime import driver

    def given(**functions):
        silent = ("cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute")
        cuda = types.SimpleNamespace(**dict.fromkeys(silent, lambda *args: 0) | functions)
        monkeypatch.setattr(driver, "_driver", lambda: cuda)
        monkeypatch.setattr(driver, "enter", lambda: None)

    return given


@pytest.fixture
def in_memory(monkeypatch):
    """Small layers also run the kernels whose blocks use global memory, as before Hopper."""
    from rbn.ops.gpu.lstm.cluster import cluster_kernels

    monkeypatch.setattr(cluster_kernels, "choose", lambda term: None)


@pytest.fixture(scope="session")
def emulated_folder(make_once):
    """The folder in which all workers find compiled emulated kernels."""
    from cuda_emulation import prepare

    return make_once("emulated", prepare)


@pytest.fixture
def emulate_hopper(emulated_folder, monkeypatch):
    """Makes every LSTM run the cluster or the grid kernels, emulated on the CPU."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from cuda_emulation import EmulatedKernel

    from rbn.ops.gpu.lstm import cuda_kernels
    from rbn.ops.gpu.lstm.cluster import cluster_kernels
    from rbn.ops.gpu.lstm.grid import grid_kernels
    from rbn.ops.gpu.runtime import nvrtc

    def kernel(macros, name, *sizes, **options):
        return EmulatedKernel(emulated_folder, name, macros, *sizes, **options)

    def given(family):
        monkeypatch.setattr(cuda_kernels, "family", lambda term, a: family)
        monkeypatch.setattr(nvrtc, "architecture_of", lambda device: "sm_90")
        monkeypatch.setattr(nvrtc, "compiled", lambda name, macros, arch: macros)
        for module in (cluster_kernels, grid_kernels):
            monkeypatch.setattr(module, "Kernel", kernel)
            monkeypatch.setattr(module, "kernel", module.kernel.__wrapped__)

    return given


@pytest.fixture
def emulate_portable(emulated_folder, monkeypatch):
    """Makes every LSTM run the portable kernels, emulated on the CPU, with these tilings."""
    pytest.importorskip("triton", reason="the GPU's kernels need triton")
    from cuda_emulation import EmulatedKernel

    from rbn.ops.gpu.lstm import cuda_kernels, plan
    from rbn.ops.gpu.lstm.portable import portable_kernels

    launches = []

    def kernel(direction, tiling, device, shared, defines):
        launches.append(direction)
        macros = portable_kernels.macros(tiling, shared, defines)
        name = f"portable_{direction}"
        return EmulatedKernel(emulated_folder, name, macros, tiling.threads, shared)

    def given(**tilings):
        choose = portable_kernels.choose
        monkeypatch.setattr(
            portable_kernels, "choose", lambda d, *sizes: tilings.get(d) or choose(d, *sizes)
        )
        monkeypatch.setattr(portable_kernels, "kernel", kernel)
        monkeypatch.setattr(cuda_kernels, "family", lambda term, a: cuda_kernels.PORTABLE)
        monkeypatch.setattr(plan, "_CACHE", {})
        return launches

    return given
