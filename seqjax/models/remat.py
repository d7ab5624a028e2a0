"""Rematerialisation: the values of a block that are saved for the backward pass.

    none       save everything that autodiff needs
    full       save only the block's input
    attention  also save attention's output, logsumexp and selection, which take quadratic time to recompute
    dots       also save every matrix product without batch dimensions; except in attention, only elementwise
               operations are recomputed

All other values are recomputed, except the choices of an index: every policy saves them, because a recomputed choice
could differ in a near tie. The kernels name the values that "attention" saves; for cuDNN's attention, all results
of the primitive are saved.
"""

from collections.abc import Callable
from typing import Any

import jax

from seqjax.nn.layers import CHOICE
from seqjax.sharding import layer_gradients_first
from seqjax.types import Array, Params

ATTENTION_NAMES = (CHOICE, "attention_out", "attention_lse", "top1_selection", "index_gradients")
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
KEEP_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES),
    lambda prim, *_, **__: prim.name == CUDNN_ATTENTION,
)
POLICIES = {
    "full": jax.checkpoint_policies.save_only_these_names(CHOICE),
    "attention": KEEP_ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        KEEP_ATTENTION, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def rematerialize(apply: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """Return `apply(template, params, x_BTD, carry, layer)` with rematerialisation.

    `apply` is one layer. Outside a scan, common subexpression elimination would merge the recomputation with the first
    computation, so it is prevented there. A layer's gradients are then completed before the previous layer's backward
    pass begins, as in a scan.
    """
    if policy != "none":
        apply = jax.checkpoint(apply, policy=POLICIES[policy], prevent_cse=not in_scan, static_argnums=0)
    if in_scan:
        return apply

    def apply_in_order(template: Any, params: Params, x_BTD: Array, carry: Any, layer: Array) -> Any:
        return apply(template, *layer_gradients_first(params, x_BTD, carry), layer)

    return apply_in_order
