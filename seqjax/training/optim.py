"""Adam as in the paper, with global-norm clipping (arXiv 2505.18522, Appendix A); segments.py has the learning rate."""

import jax
import optax

from seqjax.config import OptimConfig


def optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Return the chain of clipping, Adam, decoupled weight decay on matrices (0 in the paper) and the sign.

    Its updates are those of a learning rate of 1; the training step multiplies them by the rate that it is given.
    """
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    parts.append(optax.scale(-1.0))
    return optax.chain(*parts)


def _matrices(params):
    """Return a mask of the matrices; layers are stacked along an axis, so a vector in `blocks` has two dimensions."""
    vector_ndim = {name: 2 if name == "blocks" else 1 for name in params}
    return {name: jax.tree.map(lambda x, n=vector_ndim[name]: x.ndim > n, tree) for name, tree in params.items()}
