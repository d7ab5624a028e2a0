"""Every Triton kernel compiles for A100 and H100 without a GPU.

Each kernel fits the shared memory of these GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import extras
from tests.kernels.compile_triton import KINDS, SHARED_BYTES, kind_name

extras.need("triton")


# Allowed spilled bytes per thread with 16-bit inputs, by kernel or case. Kernels with larger limits are faster on an
# H200 than tiles without spills (lab/log/kernels.md). keys_kernel spills in its code for chunks that decay by more than
# e^-59.
SPILLED = {"out_kernel": 432, "rows_kernel": 200, "columns_kernel": 420, "keys_kernel": 480}
SPILLED_IN = {"linear-attention-low-rank": 230, "linear-attention-any-decay": 1150}
# log_linear, on an A100 and a Hopper GPU; Triton 3.7 has 120 for the second, 3.8 and 3.9 have 128
SPILLED |= {"inside_bwd_kernel": 220, "reads_bwd_kernel": 128}
SPILLED_IN |= {"kda": 1900, "kda-channels": 1900}  # keys_kernel, most of it where decays are below e^-101
SPILLED_IN |= {"path-walk": 180, "path-walk-gates": 200}  # dq_kernel on an A100


def reports(*arguments: str, module: str = "compile_triton") -> list[dict]:
    """Run in a separate process: in this process, kernels belong to the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    strict = []
    if module == "lower_triton":  # fix deprecations in jax_triton or Triton
        strict = [f"-Werror::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")]
    command = [sys.executable, *strict, "-m", f"tests.kernels.{module}", *arguments]
    done = subprocess.run(
        command,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=1800,  # a kind compiles for up to ten minutes on a busy machine
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# Newest PTX version that CUDA 12.9's assembler accepts (jax[cuda12] installs it). Triton 3.9 writes 9.4 for Hopper.
PTX = [8, 8]

OF_TOP1_CHUNK = {"exact_kernel", "best_key_kernel", "table_kernel", "listed_kernel", "remote_bwd_kernel"}
OF_ALL = OF_TOP1_CHUNK | {"forward_kernel", "dq_kernel", "dk_kernel"}


def check(results: list[dict], *, named: set[str] = OF_ALL) -> None:
    assert {r["kernel"] for r in results} >= named
    for r in results:
        assert r["ptx"] <= PTX, r
        assert r["shared"] <= SHARED_BYTES[r["capability"]], r
        most = SPILLED_IN.get(r["case"], SPILLED.get(r["kernel"], 64))
        assert r["dtype"] == "float32" or r["spilled"] <= most, r  # fp32 is only for tests


def test_kernels_of_top1_chunk() -> None:
    check(reports("90", "--quick", "--case=chunk"), named=OF_TOP1_CHUNK)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_of_the_common_case(capability) -> None:
    """Compile every kernel once; the slow test below adds other sizes and constants."""
    check(reports(str(capability), "--quick"))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on an idle machine, and slow tests run beside each other
@pytest.mark.parametrize("kind", [kind_name(kind) for kind in KINDS])
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_kernels_of_every_dtype_and_dim(capability, kind) -> None:
    """Each kind is a separate test, because it compiles for minutes.

    A kind has hundreds of kernels.
    """
    check(reports(str(capability), f"--kind={kind}"), named=OF_TOP1_CHUNK)
