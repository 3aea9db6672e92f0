"""Every CUDA C++ kernel compiles for every GPU that it supports, and fits on it."""

import pytest
import torch

pytest.importorskip("triton", reason="the GPU's kernels need triton")

from rbn.ops.gpu.runtime import nvrtc


@pytest.fixture(scope="module")
def resources(bench):
    module = bench("kernel_resources")
    library = module.find_nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrtc, "library", lambda: library)
        for asked in (nvrtc.version, nvrtc.architectures):
            asked.cache_clear()
        yield module
    for asked in (nvrtc.version, nvrtc.architectures):
        asked.cache_clear()


@pytest.mark.slow
@pytest.mark.no_cover
@pytest.mark.parametrize("number", range(6))
def test_every_kernel_compiles_and_fits(resources, number):
    """Compiles only kernels that are not in the committed table with the same sources."""
    recorded = resources.recorded()
    gpu = resources.GPUS[number]
    kernels = resources.kernels(gpu, (torch.bfloat16,))
    names = {kernel.name.split("_")[0] for kernel in kernels}
    assert {"portable", "rnn"} <= names
    assert ("grid" in names) == (gpu.capability == (9, 0))
    for name in ("cluster", "ln"):
        assert (name in names) == (gpu.capability >= (9, 0))
    for kernel in kernels:
        registers, stack = recorded.get(resources.inputs(kernel)) or resources.resources(kernel)
        of_a_warp = 32 * -(-registers // 8) * 8
        assert 32 < registers <= 255, kernel
        assert of_a_warp * kernel.threads // 32 <= resources.REGISTERS, kernel
        assert stack <= 128, kernel  # a few spilled registers
        assert kernel.shared <= gpu.shared, kernel


@pytest.mark.slow
@pytest.mark.no_cover
def test_the_table_has_what_the_compiler_gives(resources):
    """If this fails: python benchmarks/kernel_resources.py."""
    recorded = resources.recorded()
    kernel = next(k for k in resources.kernels(resources.GPUS[0]) if k.name == "rnn_forward")
    found = resources.resources(kernel)
    assert recorded.get(resources.inputs(kernel), found) == found


def test_a_kernel_that_does_not_compile_is_named(resources):
    with pytest.raises(RuntimeError, match="portable_forward"):
        nvrtc.compile_source(nvrtc.source("portable_forward"), "portable_forward", {}, "sm_90")
