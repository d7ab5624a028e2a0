"""Compute expected greedy generation: the argmax of the parallel form over growing prefixes."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from seqjax.data.tokenizer import ByteTokenizer
from seqjax.training import evaluate


def greedy(workdir: Path, prompt: str, n_new: int) -> tuple[str, list[float]]:
    """Return the expected continuation of a run's newest checkpoint, and each token's margin.

    Uses one forward pass per token over a row padded at its end, which a causal model does not read.
    """
    config, model, params, _, _ = evaluate.restore(workdir)
    tokenizer = ByteTokenizer()
    ids, params = [tokenizer.bos, *prompt.encode()], jax.device_get(params)
    n_prompt, length = len(ids), max(config.train.seq_len, len(ids) + n_new)
    logits, margins = jax.jit(model.logits), []
    for _ in range(n_new):
        row = np.asarray(logits(params, jnp.asarray([ids + [0] * (length - len(ids))])))[0, len(ids) - 1]
        below, best = np.sort(row)[-2:]
        margins.append(float(best - below))
        ids.append(int(np.argmax(row)))
    new = ids[n_prompt:]
    return tokenizer.decode(new[: new.index(tokenizer.eos)] if tokenizer.eos in new else new), margins
