"""Rematerialisation: what the backward pass keeps of a block, and what it computes again.

    none       it keeps everything that autodiff asks for
    full       it keeps nothing but the block's input
    attention  it keeps what attention would pay quadratic time to compute again: output, logsumexp and selection
    dots       it keeps those and every matrix product without batch dimensions, so that around attention only
               elementwise work is done twice

Our kernels name what "attention" keeps; of cuDNN's attention it is all that the primitive returns.
"""

from collections.abc import Callable
from typing import Any

import jax

ATTENTION_NAMES = ("attention_out", "attention_lse", "top1_selection")
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
KEEP_ATTENTION = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.save_only_these_names(*ATTENTION_NAMES),
    lambda prim, *_, **__: prim.name == CUDNN_ATTENTION,
)
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": KEEP_ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        KEEP_ATTENTION, jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


def rematerialize(apply: Callable[..., Any], policy: str, *, in_scan: bool) -> Callable[..., Any]:
    """Return `apply`, whose first argument is static, under the policy of that name.

    Outside a scan, common subexpression elimination would merge the second computation with the first, so it is
    prevented there.
    """
    if policy == "none":
        return apply
    return jax.checkpoint(apply, policy=POLICIES[policy], prevent_cse=not in_scan, static_argnums=0)
