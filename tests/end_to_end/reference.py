"""Recompute a run's metrics from its settings: plain softmax, Adam written out in float64, no sharding.

Only the model's logits and the order of the training data come from the package; both have their own tests.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from seqjax.config import Config
from seqjax.models import Model


def mean_loss(logits_BTO: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return the loss in nats per predicted token."""
    log_p_BTO = jax.nn.log_softmax(logits_BTO)
    return -jnp.mean(jnp.take_along_axis(log_p_BTO, targets_BT[..., None], axis=-1))


class Reference:
    """Recompute runs of one model; the gradient is compiled once."""

    def __init__(self, config: Config):
        model = self.model = Model(config.model, max_len=config.train.seq_len)

        def loss(params: Any, tokens_BT1: jax.Array) -> jax.Array:
            return mean_loss(model.logits(params, tokens_BT1[:, :-1]), tokens_BT1[:, 1:])

        self._loss_and_grad = jax.jit(jax.value_and_grad(loss))
        self._init = jax.jit(lambda seed: model.init(jax.random.split(jax.random.key(seed))[0]))

    def follow(self, config: Config, batches: Iterable[np.ndarray]) -> list[dict[str, float]]:
        """Return the metrics (`train/loss` etc.) of every step of `config` on `batches`, int32 [batch_size, T + 1]."""
        optim = config.optim
        params, treedef = jax.tree.flatten(jax.tree.map(np.float64, self._init(config.train.seed)))
        decayed = [_is_matrix(path, x) for path, x in jax.tree_util.tree_leaves_with_path(treedef.unflatten(params))]
        assert any(decayed) and not all(decayed)
        first = second = [np.zeros_like(x) for x in params]
        rows = []
        for step, tokens in zip(range(1, config.train.steps + 1), batches):
            loss, grads = self._loss_and_grad(treedef.unflatten([np.float32(x) for x in params]), tokens)
            grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(grads)]
            norm = _norm(grads)
            if optim.clip_norm and norm > optim.clip_norm:
                grads = [g * optim.clip_norm / norm for g in grads]
            first = [optim.b1 * m + (1 - optim.b1) * g for m, g in zip(first, grads)]
            second = [optim.b2 * v + (1 - optim.b2) * g**2 for v, g in zip(second, grads)]
            rate = learning_rate(config, step)
            moments = zip(params, first, second, decayed)
            params = [
                x
                - rate * (m / (1 - optim.b1**step)) / (np.sqrt(v / (1 - optim.b2**step)) + optim.eps)
                - rate * optim.weight_decay * is_decayed * x
                for x, m, v, is_decayed in moments
            ]
            norms = {"train/grad_norm": norm, "train/param_norm": _norm(params)}
            rows.append({"train/loss": float(loss), **norms, "train/lr": rate})
        return rows


def learning_rate(config: Config, step: int) -> float:
    """Return the rate of steps 1, 2, ...: linear to `lr` at `warmup_steps`, then linear to `final_lr` after the last
    step.
    """
    optim, last = config.optim, config.train.steps
    warmup = max(1, optim.warmup_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    return optim.lr + (optim.final_lr - optim.lr) * (step - warmup) / (last + 1 - warmup)


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(x**2) for x in arrays)))


def _is_matrix(path: Any, x: np.ndarray) -> bool:
    """Return whether a parameter is a projection. Layers are stacked, so a vector has two dimensions."""
    return jax.tree_util.keystr(path).startswith("['blocks']") and x.ndim > 2
