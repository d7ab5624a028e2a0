"""Every Triton call lowers for CUDA with the installed jax_triton, without a GPU."""

import pytest

from kernels_pallas.triton import runtime
from tests import extras
from tests.kernels.compile_triton import CASES
from tests.kernels.test_triton_compiles import reports


@pytest.mark.parametrize("version", [(0, 3), (0, 4)])
def test_multiply_add_fusion_does_not_depend_on_the_default(version) -> None:
    """Triton 3.10 disables it by default."""
    options = runtime.call_options(version, ())
    assert (options | options.get("backend_options", {}))["enable_fp_fusion"] is True


@extras.mark("jax_triton")  # by its spec: jax-triton 0.3 does not import without the CUDA plugin (lower_triton.py)
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_launch_becomes_a_custom_call(capability) -> None:
    results = reports(capability, module="lower_triton")
    assert {r["case"] for r in results} == {case.name for case in CASES}
    for r in results:
        assert r["launches"], r
        assert r["calls"] == len(r["launches"]), r
