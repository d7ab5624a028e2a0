"""The Triton kernel of the cross-entropy: two passes over the logits of a token, the second backwards.

A program has one token. In the first pass each of BLOCK lanes keeps the largest of its logits and the sum of
exponentials below it, so that nothing is reduced over lanes before the end of the vocabulary; of e^{x - m} and
e^{m - x} one is 1, so a logit costs one exponential also where the maximum grows. The second pass begins with the
block that was read last, which is still in the L2 cache; of a vocabulary of 32,000, 128 KB, most is.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4e38)  # below every logit, and finite: the difference from one that is -inf is -inf, not NaN


@triton.jit
def load_block(ptr, at, n_vocab: tl.constexpr, BOUNDED: tl.constexpr, POLICY: tl.constexpr):
    """The logits of a token at these places; -inf behind the vocabulary."""
    if BOUNDED:
        return tl.load(ptr + at, mask=at < n_vocab, other=float("-inf"), eviction_policy=POLICY)
    return tl.load(ptr + at, eviction_policy=POLICY)


@triton.jit
def loss_kernel(
    logits_ptr, targets_ptr, weights_ptr, losses_ptr, gradient_ptr, O: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The losses [N] fp32 and gradient [N, O] of logits [N, O] fp32, targets [N] int32 and weights [N] fp32."""
    n_blocks: tl.constexpr = (O + BLOCK - 1) // BLOCK
    BOUNDED: tl.constexpr = O % BLOCK != 0
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * O
    gradient_ptr += token * O
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(n_blocks):
        x = load_block(logits_ptr, block * BLOCK + lane, O, BOUNDED, "evict_last")
        above = x - top
        e = tl.exp(-tl.abs(above))
        total = tl.where(above > 0, total * e + 1.0, total + e)
        top = tl.maximum(top, x)
    m = tl.max(top, 0)
    s = tl.sum(total * tl.exp(top - m), 0)

    y = tl.load(targets_ptr + token)
    weight = tl.load(weights_ptr + token)
    # As an index of jax: from the end below 0, and NaN where there is no such logit, also to read no other memory.
    place = tl.where(y < 0, y + O, y)
    x_y = tl.load(logits_ptr + place, mask=(place >= 0) & (place < O), other=float("nan"))
    tl.store(losses_ptr + token, tl.log(s) + (m - x_y))

    per_s = 1.0 / s
    for i in range(n_blocks):
        at = (n_blocks - 1 - i) * BLOCK + lane
        x = load_block(logits_ptr, at, O, BOUNDED, "evict_first")
        g = (tl.exp(x - m) * per_s - tl.where(at == y, 1.0, 0.0)) * weight
        tl.store(gradient_ptr + at, g.to(gradient_ptr.dtype.element_ty), mask=at < O)
