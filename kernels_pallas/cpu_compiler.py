"""A flag for XLA on a CPU, without which compiled programs can be wrong.

From jaxlib 0.10.2 on, XLA hands fusions of products with sums to a library, YNNPACK, and some come back wrong:

* a product whose right operand is one number broadcast along both its last axes (a state that starts at zero),
  followed by a sum, reads memory that nobody wrote: garbage, often NaN. Seen with jaxlib 0.10.2 and 0.12.0, in float32
  and bfloat16; it hit the gradients of Mamba-2, RWKV-5 and RWKV-6 in bfloat16 where one chunk is the whole sequence;
* a sum of squares after small products misses the end of long arrays (jax-ml/jax issue 39103; 0.10.2, not 0.12.0).

The flag leaves YNNPACK the products alone, one at a time. The demo trains as fast with it as without, within noise.
"""

import importlib.util
import os

FLAG = "--xla_cpu_experimental_ynn_fusion_type"


def use_safe_fusions() -> None:
    """Add the flag to XLA_FLAGS, which XLA reads once, before its first computation; one that is there stays.

    Not where TPUs are, whose library reads XLA_FLAGS too and may not know it. GPU programs ignore it.
    """
    given = os.environ.get("XLA_FLAGS", "")
    if FLAG not in given and importlib.util.find_spec("libtpu") is None:
        os.environ["XLA_FLAGS"] = f"{given} {FLAG}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT".strip()
