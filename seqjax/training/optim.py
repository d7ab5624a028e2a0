"""Adam as in the paper, with linear warm-up, linear decay and global-norm clipping (arXiv 2505.18522, Appendix A)."""

import jax
import optax

from seqjax.config import OptimConfig


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the 0-based step: linear from lr / warmup to lr, then to `final_lr`.

    `final_lr` belongs to step `steps`, one after the last, so that with `final_lr` = 0 the last step still learns.
    """
    warmup = max(1, min(config.warmup_steps, steps))
    rise = optax.linear_schedule(config.lr / warmup, config.lr, warmup - 1)
    fall = optax.linear_schedule(config.lr, config.final_lr, steps - warmup + 1)
    return optax.join_schedules([rise, fall], [warmup - 1])


def optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Return the chain of clipping, Adam, decoupled weight decay on matrices (0 in the paper) and learning rate."""
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    parts.append(optax.scale_by_learning_rate(schedule(config, steps)))
    return optax.chain(*parts)


def _matrices(params):
    """Return a mask of the matrices; layers are stacked along an axis, so a vector in `blocks` has two dimensions."""
    vector_ndim = {name: 2 if name == "blocks" else 1 for name in params}
    return {name: jax.tree.map(lambda x, n=vector_ndim[name]: x.ndim > n, tree) for name, tree in params.items()}
