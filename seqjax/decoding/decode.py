"""Decode one token at a time after a prompt that is prefilled in pieces.

Programs are compiled for few shapes. A prompt is prefilled in pieces of `prefill_chunk`, then of `SMALL_PIECE` tokens;
decoding steps process the remainder. Cache lengths are powers of two: a full cache doubles, so a token's cost depends
on the tokens so far, not on the requested number. Decoding compiles one program per cache length and nothing per token.
Prompts with other lengths compile almost nothing.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from seqjax.decoding.sampling import Sampling, sample
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.sharding import replicate
from seqjax.types import Array, Cache, Params, PRNGKey

PREFILL_CHUNK = 256  # prompt tokens per prefill call
SMALL_PIECE = 32
SMALLEST_CACHE = 256


@dataclasses.dataclass
class Phase:
    """The number of tokens in a phase, and its seconds without compilation."""

    tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return the rate as text."""
        return f"{self.tokens:,} tokens, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s"


@dataclasses.dataclass
class Timing:
    """The time of prefill and decode, with compilation counted separately."""

    prefill: Phase = dataclasses.field(default_factory=Phase)
    decode: Phase = dataclasses.field(default_factory=Phase)
    compile_seconds: float = 0.0

    def __str__(self) -> str:
        """Return the rates as text."""
        compiling = f" (without compiling, {self.compile_seconds:.1f} s)" if self.compile_seconds else ""
        return f"prefill {self.prefill}; decode {self.decode}{compiling}"


def tokens(
    params: Params,
    prompt_BT: Any,
    key: PRNGKey,
    *,
    model: Model,
    n_new: int,
    sampling: Sampling,
    lengths_B: Any = None,
    prefill_chunk: int = PREFILL_CHUNK,
    mesh: Mesh | None = None,
    timing: Timing | None = None,
) -> Iterator[np.ndarray]:
    """Yield `n_new` tokens after each prompt, one per prompt at a time, int32 [B].

    Prompts with different lengths share a batch without padding, because padding would enter a recurrent state. They
    are prefilled together up to the end of the shortest prompt. From there, each step yields one token per row: a
    longer prompt's next token or a sampled token. It ends when the longest prompt has `n_new` new tokens.

    Args:
        params: The parameters of `model`.
        prompt_BT: Prompts of at least one token, int32 [B, T].
        key: Token i is drawn with `fold_in(key, i)`.
        model: The model.
        n_new: Number of tokens. The device computes the next token while the caller handles this one; stopping early
            wastes one step.
        sampling: How tokens are drawn.
        lengths_B: Prompt lengths if they differ, at least 1; later tokens in `prompt_BT` are ignored.
        prefill_chunk: Prompt tokens per prefill call; 0 = all, in a program for that length. More is faster and takes
            more memory: attention computes scores of piece length by cache length.
        mesh: The mesh over which the parameters are sharded, if any; every device holds the whole cache.
        timing: Receives the time of both phases.

    Raises `UserError` for more tokens than a position table has, and for logits that are NaN or infinite.
    """
    timing = Timing() if timing is None else timing
    on_mesh = contextlib.nullcontext if mesh is None else functools.partial(jax.set_mesh, mesh)
    prompt_BT = np.asarray(prompt_BT, np.int32)
    n_batch, n_prompt = prompt_BT.shape
    lengths_B = np.full(n_batch, n_prompt) if lengths_B is None else np.asarray(lengths_B)
    n_shared = int(lengths_B.min())
    call = functools.partial(_call, timing)
    with _measured(timing, timing.prefill), on_mesh():
        model.check_length(n_prompt + n_new)
        length = _cache_length(model, n_prompt + min(n_new, SMALLEST_CACHE))
        cache = call(_empty_cache, model=model, batch=n_batch, max_len=length)
        position, logits_BO = 0, None
        for size in _pieces(n_shared, prefill_chunk):
            piece_BT, at = prompt_BT[:, position : position + size], np.int32(position)
            if size == 1:
                logits_BO, cache = call(_step, params, piece_BT[:, 0], at, cache, model=model)
            elif position == 0 and size != SMALL_PIECE:
                logits_BO, cache = call(_prefill, params, piece_BT, cache, model=model)
            else:
                logits_BO, cache = call(_prefill_next, params, piece_BT, at, cache, model=model)
            position += size
        jax.block_until_ready(logits_BO)
    timing.prefill.tokens += n_batch * n_shared
    n_steps = n_prompt - n_shared + n_new
    following_B = is_finite = None
    for i in range(n_steps):
        with _measured(timing, timing.decode), on_mesh():
            if i == 0:
                following_B, is_finite = call(_sample, logits_BO, key, np.int32(0), sampling=sampling)
            token_B, was_finite, at = following_B, is_finite, n_shared + i
            if at < n_prompt:
                token_B = call(_prompt_or_sampled, prompt_BT[:, at], lengths_B > at, token_B)
            if i + 1 < n_steps:
                if at == length:
                    length = _cache_length(model, length + 1)
                    cache = call(_grow_cache, cache, model=model, batch=n_batch, max_len=length)
                logits_BO, cache = call(_step, params, token_B, np.int32(at), cache, model=model)
                following_B, is_finite = call(_sample, logits_BO, key, np.int32(i + 1), sampling=sampling)
            host_token_B, was_finite = jax.device_get((token_B, was_finite))
        if not was_finite:
            raise UserError(
                f"The logits after {at} tokens are NaN or infinite: the weights diverged, overflow or are damaged. Use "
                "an earlier checkpoint, or train again with a lower config.optim.lr."
            )
        timing.decode.tokens += n_batch
        yield host_token_B


def _pieces(n_prompt: int, chunk: int) -> list[int]:
    """Return the sizes of the pieces in which a prompt is prefilled."""
    if n_prompt < 1:
        raise UserError("The prompt is empty: start it with the tokenizer's `bos`.")
    if chunk < 0:
        raise UserError(f"prefill_chunk={chunk} must be at least 0; 0 prefills the whole prompt at once.")
    if chunk == 0:
        return [n_prompt]
    sizes = []
    for size in (chunk, SMALL_PIECE) if chunk > SMALL_PIECE else (chunk,):
        count, n_prompt = divmod(n_prompt, size)
        sizes += [size] * count
    return sizes + [1] * n_prompt


def _cache_length(model: Model, n_tokens: int) -> int:
    length = max(SMALLEST_CACHE, 1 << (n_tokens - 1).bit_length())
    # A position table limits the cache length; `check_length` refuses more tokens.
    return max(n_tokens, min(length, model.longest)) if model.longest else length


@functools.partial(jax.jit, static_argnames=("model", "batch", "max_len"))
def _empty_cache(*, model: Model, batch: int, max_len: int) -> Cache:
    return replicate(model.init_cache(batch, max_len))


@functools.partial(jax.jit, static_argnames=("model", "batch", "max_len"))
def _grow_cache(cache: Cache, *, model: Model, batch: int, max_len: int) -> Cache:
    return replicate(model.grow_cache(cache, batch, max_len))


# The input cache is donated to the output cache, hence only one exists.
@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _prefill(params: Params, tokens_BT: Array, cache: Cache, *, model: Model) -> tuple[Array, Cache]:
    return replicate(model.prefill(params, tokens_BT, cache))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _prefill_next(
    params: Params, tokens_BT: Array, position: Array, cache: Cache, *, model: Model
) -> tuple[Array, Cache]:
    return replicate(model.prefill_next(params, tokens_BT, position, cache))


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def _step(params: Params, token_B: Array, position: Array, cache: Cache, *, model: Model) -> tuple[Array, Cache]:
    return replicate(model.step(params, token_B, position, cache))


@functools.partial(jax.jit, static_argnames="sampling")
def _sample(logits_BO: Array, key: PRNGKey, i: Array, *, sampling: Sampling) -> tuple[Array, Array]:
    """Return the tokens and whether every row's largest logit is finite.

    A NaN in a row makes its largest logit NaN.
    """
    token_B = sample(
        logits_BO,
        jax.random.fold_in(key, i),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
    )
    return replicate((token_B, jnp.isfinite(logits_BO.max(axis=-1)).all()))


@jax.jit
def _prompt_or_sampled(prompt_B: Array, in_prompt_B: Array, sampled_B: Array) -> Array:
    return replicate(jnp.where(in_prompt_B, prompt_B, sampled_B))


# -------------------------------------------------------------------------------------------------------------- timing
class _Compilations:
    """Counts the programs that JAX has compiled since this class was first used."""

    count = 0

    def listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Count a compilation; JAX calls this for every event."""
        del duration_secs, kwargs
        self.count += event == "/jax/core/compile/backend_compile_duration"


@functools.cache
def _compilations() -> _Compilations:
    compilations = _Compilations()
    jax.monitoring.register_event_duration_secs_listener(compilations.listen)
    return compilations


def _call(timing: Timing, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a compiled function; the time of a call that compiles is compile time.

    Calls are asynchronous, so other calls return before the device finishes.
    """
    compilations = _compilations()
    before, start = compilations.count, time.perf_counter()
    result = function(*args, **options)
    if compilations.count > before:
        timing.compile_seconds += time.perf_counter() - start
    return result


@contextlib.contextmanager
def _measured(timing: Timing, phase: Phase) -> Iterator[None]:
    """Add the context's time, without compilation, to a phase."""
    start, compiling = time.perf_counter(), timing.compile_seconds
    yield
    phase.seconds += time.perf_counter() - start - (timing.compile_seconds - compiling)
