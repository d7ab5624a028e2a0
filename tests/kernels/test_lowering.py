"""Every Triton call lowers for CUDA through the jax_triton that is installed, on a machine without a GPU."""

import pytest

from tests import extras
from tests.kernels.compile_triton import CASES
from tests.kernels.test_triton_compiles import reports

# by its spec: jax-triton 0.3 does not import without jaxlib's CUDA plugin, which lower_triton.py replaces
pytestmark = extras.mark("jax_triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_every_launch_becomes_a_custom_call(capability) -> None:
    results = reports(capability, module="lower_triton")
    assert {r["case"] for r in results} == {case.name for case in CASES}
    for r in results:
        assert r["launches"], r
        assert r["calls"] == len(r["launches"]), r
