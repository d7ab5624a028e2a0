"""Adam as the paper has it: linear warm-up, linear decay, global-norm clipping (arXiv 2505.18522, Appendix A)."""

import jax
import optax

from seqjax.config import OptimConfig


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Learning rate of step s (0-based): linear from lr / warmup up to lr, then linear to `final_lr`.

    `final_lr` is what step `steps` would have, so that with 0 the last step still learns.
    """
    warmup = max(1, min(config.warmup_steps, steps))
    rise = optax.linear_schedule(config.lr / warmup, config.lr, warmup - 1)
    fall = optax.linear_schedule(config.lr, config.final_lr, steps - warmup + 1)
    return optax.join_schedules([rise, fall], [warmup - 1])


def optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """Clip, Adam, decoupled weight decay on matrices (off in the paper's setting), learning rate."""
    parts = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm is not None else []
    parts.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=_matrices))
    parts.append(optax.scale_by_learning_rate(schedule(config, steps)))
    return optax.chain(*parts)


def _matrices(params):
    """Stacked layers add an axis, so inside `blocks` a vector has two dimensions."""
    vector = {name: 2 if name == "blocks" else 1 for name in params}
    return {name: jax.tree.map(lambda x, n=vector[name]: x.ndim > n, tree) for name, tree in params.items()}
