"""A flag for XLA on a CPU, without which compiled programs can be wrong.

From jaxlib 0.10.2 on, XLA hands fusions of products with sums to a library, YNNPACK, and some come back wrong:

* a product whose right operand is one number broadcast along both its last axes (a state that starts at zero),
  followed by a sum, reads memory that nobody wrote: garbage, often NaN. Seen with jaxlib 0.10.2 and 0.12.0, in float32
  and bfloat16; it hit the gradients of Mamba-2, RWKV-5 and RWKV-6 in bfloat16 where one chunk is the whole sequence;
* a sum of squares after small products misses the end of long arrays (jax-ml/jax issue 39103; 0.10.2, not 0.12.0).

The flag leaves YNNPACK the products alone, one at a time. It costs the forward pass of dense attention by itself a
factor of up to two; the demo trains as fast with it as without, within 10%.
"""

import importlib.util
import os
import warnings

import jax

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def use_safe_fusions() -> None:
    """Add the flag to XLA_FLAGS unless it is there; warns where XLA has read them already, which it does once.

    Not where TPUs are, whose library reads XLA_FLAGS too and may not know it. GPU programs ignore it.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if FLAG in given or importlib.util.find_spec("libtpu") is not None:
        return
    os.environ["XLA_FLAGS"] = f"{given} {SAFE}".strip()
    if _has_started() and jax.default_backend() == "cpu":
        warnings.warn(
            "JAX had started before seqjax was imported, so XLA does not know a flag without which it compiles some "
            f"programs wrong on a CPU. Import seqjax's modules first, or start Python with XLA_FLAGS={SAFE}",
            stacklevel=2,
        )


def _has_started() -> bool:
    """Whether JAX has its backends; there is no public way to ask that does not start them."""
    bridge = importlib.import_module("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", lambda: False)()
