"""Generates text: prefills the caches with the prompt, then decodes one token at a time.

`seqjax generate --workdir=DIR --prompt="Once" --max_new_tokens=200` works for every mixer.
"""

import math
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from seqjax.arguments import command_parser
from seqjax.data.tokenizer import load_tokenizer
from seqjax.errors import UserError, run_command
from seqjax.evaluate import restore
from seqjax.models import Model
from seqjax.training import workdir as workdirs
from seqjax.types import Array, Params, PRNGKey


def sample(logits_BO: Array, key: PRNGKey, *, temperature: float, top_k: int) -> Array:
    """Sample a token per row, int32 [B]; temperature 0 takes the most likely one, and `top_k` = 0 considers all."""
    if temperature == 0.0:
        return jnp.argmax(logits_BO, axis=-1).astype(jnp.int32)
    if top_k:
        kth_largest_B1 = jax.lax.top_k(logits_BO, top_k)[0][:, -1:]
        logits_BO = jnp.where(logits_BO < kth_largest_B1, -jnp.inf, logits_BO)
    return jax.random.categorical(key, logits_BO / temperature).astype(jnp.int32)


@partial(jax.jit, static_argnames=("model", "n_new", "temperature", "top_k"))
def generate(
    params: Params,
    prompt_BT: Array,
    key: PRNGKey,
    *,
    model: Model,
    n_new: int,
    temperature: float = 1.0,
    top_k: int = 0,
) -> Array:
    """Generate `n_new` tokens after each prompt of a batch, int32 [B, n_new], in one program on the device."""
    n_batch, n_prompt = prompt_BT.shape
    cache = model.init_cache(n_batch, n_prompt + n_new)
    logits_BO, cache = model.prefill(params, prompt_BT, cache)

    def body(carry, step_key):
        logits_BO, cache, position = carry
        token_B = sample(logits_BO, step_key, temperature=temperature, top_k=top_k)
        logits_BO, cache = model.step(params, token_B, position, cache)
        return (logits_BO, cache, position + 1), token_B

    carry = (logits_BO, cache, jnp.asarray(n_prompt, jnp.int32))
    _, tokens_NB = jax.lax.scan(body, carry, jax.random.split(key, n_new))
    return tokens_NB.T


def text(
    model: Model,
    params: Params,
    tokenizer,
    prompt: str,
    key: PRNGKey,
    *,
    n_new: int,
    temperature: float = 0.8,
    top_k: int = 0,
) -> str:
    """Return the continuation of a prompt, up to the end of the document.

    Raises `UserError` for a number of new tokens, a temperature or a `top_k` that cannot be.
    """
    if n_new < 1:
        raise UserError(f"max_new_tokens must be at least 1, not {n_new}.")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be at least 0 and finite, not {temperature}; 0 takes the most likely token.")
    if not 0 <= top_k <= model.config.vocab_size:
        raise UserError(f"top_k={top_k} must be 0 (all) to {model.config.vocab_size}, the vocabulary.")
    ids = np.concatenate([[tokenizer.bos], tokenizer.encode(prompt)]).astype(np.int32)
    new = generate(params, ids[None], key, model=model, n_new=n_new, temperature=temperature, top_k=top_k)
    new = np.asarray(new[0])
    ends = np.flatnonzero(new == tokenizer.eos)
    return tokenizer.decode(new[: ends[0]] if len(ends) else new)


def main(argv: list[str]) -> None:
    """Print the prompt and its continuation."""
    parser = command_parser("generate", description=__doc__)
    workdirs.add_arguments(parser)
    parser.add_argument("--prompt", default="", help="text to continue; empty = the start of a document")
    parser.add_argument("--max_new_tokens", default=200, type=int, help="at most; fewer where the document ends (200)")
    parser.add_argument("--temperature", default=0.8, type=float, help="0 takes the most likely token")
    parser.add_argument("--top_k", default=0, type=int, help="sample from the k most likely tokens; 0 = all")
    parser.add_argument("--seed", default=0, type=int, help="of the sampling")
    args = parser.parse_args(argv)
    config, model, params, _, mesh = restore(args.workdir, allow_code=args.allow_code)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.tokenizer_path)
    with jax.set_mesh(mesh):
        new = text(
            model,
            params,
            tokenizer,
            args.prompt,
            jax.random.key(args.seed),
            n_new=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
        )
    sys.stdout.write(args.prompt + new + "\n")


if __name__ == "__main__":
    run_command(main)
