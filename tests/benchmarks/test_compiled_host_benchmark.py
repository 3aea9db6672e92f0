"""The benchmark of torch.compile's host overhead runs."""

import pytest

pytest.importorskip("triton", reason="the GPU's kernels need triton")


def test_times_of_eager_calls(bench):
    host, compiled_host = bench("host"), bench("compiled_host")
    with host.stand_ins("cluster"):
        best = compiled_host.least(compiled_host.calls(["eager"]), rounds=1)
    assert len(best) == 6
    assert all(us > 0 for us in best.values())
