"""Work around two errors of XLA's CPU compiler with an XLA flag.

From jaxlib 0.10.2 on, XLA passes fusions of products and sums to the library YNNPACK, and some results are wrong:

* A product followed by a sum reads uninitialised memory if its right operand is a number broadcast along its last two
  axes (for example a state that starts at zero). The result is garbage, often NaN. Observed with jaxlib 0.10.2 and
  0.12.0, in float32 and bfloat16. It affected bfloat16 gradients of Mamba-2, RWKV-5 and RWKV-6 when one chunk was the
  whole sequence.
* A sum of squares after small products omits the end of long arrays (jax-ml/jax issue 39103; 0.10.2, not 0.12.0).

The ops of this package avoid the first error without the flag: `state_scan/xla.py` hides a constant state from XLA,
forward and backward. They cannot protect the rest of a model (a norm after a projection is a sum of squares after
products). Commands, and the functions that train and load, therefore call `use_safe_fusions` before JAX starts.
Importing this package changes nothing.

With the flag, YNNPACK gets single products only. Dense attention's forward pass, timed separately, then takes
up to twice as long. The demo trains equally fast, within 10%.
"""

import importlib
import importlib.util
import os
import warnings

import jax

FLAG = "--xla_cpu_experimental_ynn_fusion_type"
SAFE = f"{FLAG}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
# XLA ends the process if XLA_FLAGS contains an unknown name, so other versions do not get the flag.
AFFECTED = ((0, 10, 2), (0, 13, 0))  # first affected version, first version not affected


def use_safe_fusions() -> None:
    """Add the flag to XLA_FLAGS unless it is set.

    Commands call this before JAX starts and reads XLA_FLAGS. Does nothing on machines with the TPU library, because it
    also reads XLA_FLAGS and may reject the flag. GPU programs ignore the flag. Warns if JAX has already started on a
    CPU: then the flag has no effect.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG in flags or importlib.util.find_spec("libtpu") is not None:
        return
    if not AFFECTED[0] <= jax.__version_info__ < AFFECTED[1]:
        return
    if not has_started():
        os.environ["XLA_FLAGS"] = f"{flags} {SAFE}".strip()
    elif jax.default_backend() == "cpu":
        warnings.warn(
            "JAX has started without a flag that XLA needs to compile some programs correctly on a CPU. Start Python "
            f"with XLA_FLAGS={SAFE}, or call kernels_pallas.cpu_compiler.use_safe_fusions() before JAX computes "
            "anything.",
            stacklevel=2,
        )


def has_started() -> bool:
    """Return whether JAX has started its backends.

    This uses a private function, because every public one would start them.
    """
    bridge = importlib.import_module("jax._src.xla_bridge")
    return getattr(bridge, "backends_are_initialized", lambda: False)()
