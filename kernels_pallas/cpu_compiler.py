"""Two errors of XLA's CPU compiler, and the flag without which programs may meet them.

From jaxlib 0.10.2 on, XLA hands fusions of products with sums to a library, YNNPACK, and some come back wrong:

* a product whose right operand is a number broadcast along both its last axes (a state that starts at zero), followed
  by a sum, reads uninitialised memory: garbage, often NaN. Seen with jaxlib 0.10.2 and 0.12.0, in float32 and bfloat16;
  it hit the gradients of Mamba-2, RWKV-5 and RWKV-6 in bfloat16 where one chunk is the whole sequence;
* a sum of squares after small products misses the end of long arrays (jax-ml/jax issue 39103; 0.10.2, not 0.12.0).

The ops of this package do not need the flag for the first: `state_scan/xla.py` hides a constant state from XLA, forward
and backward. An op cannot protect the surrounding code of a model (a norm after a projection is a sum of squares after
products). Commands, and the functions that train and load, therefore call `use_safe_fusions` before JAX starts.
Importing this package changes nothing.

The flag leaves YNNPACK the products alone, one at a time. It costs the forward pass of dense attention by itself a
factor of up to two; the demo trains as fast with it as without, within 10%.
"""

import importlib
import importlib.util
import os
import warnings

import jax

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
# XLA ends the process where XLA_FLAGS hold a name that it does not know, so other versions are left alone.
AFFECTED = ((0, 10, 2), (0, 13, 0))  # from, and before


def use_safe_fusions() -> None:
    """Add the flag to XLA_FLAGS unless one is given: for a command to call, before JAX starts and reads them.

    Not where TPUs are, whose library reads XLA_FLAGS too and may not know it. GPU programs ignore it. Warns where JAX
    has started on a CPU already, because then it comes too late.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if FLAG in given or importlib.util.find_spec("libtpu") is not None:
        return
    if not AFFECTED[0] <= jax.__version_info__ < AFFECTED[1]:
        return
    if not has_started():
        os.environ["XLA_FLAGS"] = f"{given} {SAFE}".strip()
    elif jax.default_backend() == "cpu":
        warnings.warn(
            "JAX has started without a flag in whose absence XLA compiles some programs wrong on a CPU. Start Python "
            f"with XLA_FLAGS={SAFE}, or call kernels_pallas.cpu_compiler.use_safe_fusions() before JAX computes "
            "anything.",
            stacklevel=2,
        )


def has_started() -> bool:
    """Return whether JAX has started its backends; no public function tells without starting them."""
    bridge = importlib.import_module("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", lambda: False)()
