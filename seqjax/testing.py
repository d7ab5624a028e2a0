"""Contract tests for mixers: `seqjax.testing.check_mixer(MyMixer)`.

Each check takes a `Case`, a language model with two small layers around the mixer. A failed check raises an
`AssertionError` with the difference and its size. The checks run in float32 on any device, in a minute or two on a
laptop.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kernels_pallas import counting
from seqjax.command_line import use_safe_fusions
from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError, first_line, nearest
from seqjax.mixers import as_registered, base, name_of
from seqjax.models import Model, flops
from seqjax.nn import params as params_lib
from seqjax.sharding import batch_sharding, make_mesh, shardings
from seqjax.terminal import StatusLine
from seqjax.training.step import TrainState, init_state, make_train_step
from seqjax.types import Array, Params

BATCH = 8
LENGTH = 23  # tokens; prime, so no chunk size divides it
LONG = 277  # tokens; a prime above chunks, windows and tiles of 128 and 256
VOCABULARY, LONG_VOCABULARY = 48, 288
TOLERANCE = 2e-4  # for float32 logits of two forms of the same computation
SMALLEST_FLOPS = 0.6  # share of XLA's count; XLA also counts norms, activations and masked products


def random_params(model: Model, seed: int = 0) -> Params:
    """Return parameters with the size of trained parameters.

    At initialisation attention is uniform and many outputs are zero: this would hide errors.
    """
    # Not under jit: models then share the small single-operation programs, which compile once.
    leaves, tree = jax.tree.flatten(model.init(jax.random.key(seed)))
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [x + 0.2 * rng.standard_normal(x.shape, np.float32) for x in leaves])


class Case:
    """A language model around the mixer, with the parameters of `random_params`."""

    def __init__(self, model: Model, *, seed: int = 0):
        self.model, self.params = model, random_params(model, seed)
        self.logits, self.step, self.prefill = jax.jit(model.logits), jax.jit(model.step), jax.jit(model.prefill)
        self.prefill_next = jax.jit(model.prefill_next)

    def tokens(self, shape: tuple[int, ...], seed: int = 0) -> Array:
        """Return random tokens, int32."""
        return jnp.asarray(np.random.default_rng(seed).integers(0, self.model.config.vocab_size, shape, dtype=np.int32))

    def changed(self, **settings: Any) -> Model:
        """Return the model with other settings of its `ModelConfig`."""
        return Model(dataclasses.replace(self.model.config, **settings), max_len=self.model.max_len)

    @functools.cached_property
    def reference(self) -> tuple[Array, Array, Params]:
        """Tokens [B, T + 1], and the unmodified model's loss and gradients on one device."""
        tokens = self.tokens((BATCH, LENGTH + 1))
        return tokens, *loss_and_grads(self.model, self.params, tokens)


def objective(model: Model, params: Params, tokens_BT1: Array) -> Array:
    """Return the summed loss in nats plus any auxiliary loss."""
    total, _, auxiliary = model.training_loss(params, tokens_BT1[:, :-1], tokens_BT1[:, 1:])
    return sum(auxiliary.values(), total)


def loss_and_grads(model: Model, params: Params, tokens_BT1: Array) -> tuple[Array, Params]:
    """Return the `objective` and its gradients."""
    return jax.jit(jax.value_and_grad(lambda p: objective(model, p, tokens_BT1)))(params)


# --------------------------------------------------------------------------------------------------------------- output
def check_output(case: Case) -> None:
    """Check that the mixer's output has the shape of its input, at any length."""
    block = case.model.blocks["0"]
    for length in (1, LENGTH):
        x_BTD = jax.ShapeDtypeStruct((BATCH, length, case.model.config.dim), jnp.float32)
        y_BTD = jax.eval_shape(lambda p, x: block.bind(p).mixer(x), block.shapes, x_BTD)
        made = getattr(y_BTD, "shape", type(y_BTD).__name__)
        assert made == x_BTD.shape, f"the output of __call__ is {made} for an input of the shape {x_BTD.shape}"


# ------------------------------------------------------------------------------------------------------------ causality
def check_causality(case: Case) -> None:
    """Check that changing a token keeps all earlier outputs bit for bit.

    The change must reach the token's output and most of the following outputs.
    """
    _check_changes(case, [0, 1, 3, 4, 7, 8, 12, LENGTH - 1], LENGTH, within=3)


def _check_changes(case: Case, at: Sequence[int], length: int, *, within: int) -> None:
    tokens = case.tokens((len(at), length))
    changed = tokens.at[jnp.arange(len(at)), jnp.array(at)].add(1) % case.model.config.vocab_size
    before, after = (np.asarray(case.logits(case.params, x)) for x in (tokens, changed))
    moved_BT = np.abs(after - before).max(-1)
    for moved_T, t in zip(moved_BT, at, strict=True):
        assert not moved_T[:t].any(), (
            f"changing token {t} moved the logits at position {np.flatnonzero(moved_T[:t])[0]}, before it, by up to "
            f"{moved_T[:t].max():.2g}; the earlier outputs must keep their bits"
        )
        assert moved_T[t] > 0, f"changing token {t} did not change its own output"
    reached = [moved_T[t + 1 : t + 1 + within].any() for moved_T, t in zip(moved_BT[:-1], at, strict=False)]
    assert sum(reached) >= len(reached) // 2, (
        f"only {sum(reached)} of {len(reached)} changed tokens changed an output of the {within} positions after them"
    )


def reach(case: Case) -> np.ndarray:
    """Return how much output t moves with input s by gradient, [T, S]."""
    return _reach(case, np.eye(LENGTH))


def _reach(case: Case, outputs_NT: np.ndarray) -> np.ndarray:
    """Return how much weighted sums of outputs move with input s by gradient, [N, S].

    `outputs_NT` are the weights.
    """
    length = outputs_NT.shape[1]
    model, params, tokens = case.model, case.params, jnp.arange(length)[None]  # each once: row = position
    direction_D = jax.random.normal(jax.random.key(3), (model.config.dim,))
    cotangents_NTD = jnp.asarray(outputs_NT, jnp.float32)[:, :, None] * direction_D

    @jax.jit
    def jacobian(embed: Array) -> Array:
        _, pullback = jax.vjp(lambda e: model.hidden({**params, "embed": e}, tokens)[0], embed)
        return jax.vmap(lambda c: pullback(c)[0])(cotangents_NTD)

    return np.abs(np.asarray(jacobian(params["embed"])))[:, :length].sum(-1)


def check_gradient_causality(case: Case) -> None:
    """Check that an output's gradient is zero for all later inputs.

    It must not be zero for the input at the same position, and for most inputs just before.
    """
    reach_TS = reach(case)
    assert np.isfinite(reach_TS).all(), "the gradient of an output by the inputs is not finite"
    future_TS = np.triu(reach_TS, 1)
    t, s = np.unravel_index(future_TS.argmax(), future_TS.shape)
    assert future_TS.max() == 0, f"output {t} depends on the later input {s}: gradient {future_TS.max():.2g}"
    assert (np.diag(reach_TS) > 0).all(), f"output {np.diag(reach_TS).argmin()} does not depend on its own input"
    share = (np.diag(reach_TS, -1) > 0).mean()
    assert share > 0.5, f"only {share:.0%} of the outputs depend on the token before"


# --------------------------------------------------------------------------------------------------- the recurrent form
def check_step(case: Case, prompts: Sequence[int] = (0, 1, 5)) -> None:
    """Check that `prefill`, then `step` by token, equals the parallel form."""
    for n_prompt in prompts:
        _check_decoding(case, n_prompt, LENGTH)


def _check_decoding(case: Case, n_prompt: int, length: int) -> None:
    tokens = case.tokens((BATCH, length), seed=n_prompt)
    want = np.asarray(case.logits(case.params, tokens))
    cache = case.model.init_cache(BATCH, length)
    if n_prompt:
        logits, cache = case.prefill(case.params, tokens[:, :n_prompt], cache)
        _assert_close(logits, want[:, n_prompt - 1], f"prefill of {n_prompt} tokens, at its last one")
    for t in range(n_prompt, length):
        logits, cache = case.step(case.params, tokens[:, t], jnp.asarray(t), cache)
        _assert_close(logits, want[:, t], f"step at position {t} after a prompt of {n_prompt} tokens")


def check_long(case: Case) -> None:
    """Check causality, gradients and decoding beyond the usual chunk sizes.

    The lengths also exceed the usual windows and tiles.
    """
    config = dataclasses.replace(case.model.config, vocab_size=LONG_VOCABULARY)
    long = Case(Model(config, max_len=LONG))
    _check_changes(long, [0, 63, 127, 128, 129, 255, 256, LONG - 1], LONG, within=LONG)
    ends = np.array([64, 128, 129, 256, 257])
    reach_ES = _reach(long, np.arange(LONG) < ends[:, None])  # all outputs before each end
    later_ES = reach_ES * (np.arange(LONG) >= ends[:, None])
    end, s = np.unravel_index(later_ES.argmax(), later_ES.shape)
    assert later_ES.max() == 0, (
        f"an output before position {ends[end]} depends on the later input {s}: gradient {later_ES.max():.2g}"
    )
    _check_decoding(long, LONG - 40, LONG)


def check_pieces(case: Case) -> None:
    """Check that prefill in pieces, then `step`, equals the parallel form.

    The first piece goes through `prefill`, the remaining pieces through `prefill_next`.
    """
    piece = LENGTH // 3  # longer than a small window or chunk, and no multiple of it
    tokens = case.tokens((BATCH, LENGTH), seed=9)
    want = np.asarray(case.logits(case.params, tokens))
    logits, cache = case.prefill(case.params, tokens[:, :piece], case.model.init_cache(BATCH, LENGTH))
    for start in range(piece, LENGTH - piece + 1, piece):
        logits, cache = case.prefill_next(case.params, tokens[:, start : start + piece], jnp.asarray(start), cache)
        last = start + piece - 1
        _assert_close(logits, want[:, last], f"prefill_next of tokens {start} to {last}, at the last one")
    for t in range(LENGTH // piece * piece, LENGTH):
        logits, cache = case.step(case.params, tokens[:, t], jnp.asarray(t), cache)
        _assert_close(logits, want[:, t], f"step at position {t} after a prompt in pieces of {piece} tokens")


def check_long_cache(case: Case) -> None:
    """Check that a cache may exceed its content, and a full cache may grow."""
    tokens = case.tokens((BATCH, LENGTH), seed=5)
    want, longest = np.asarray(case.logits(case.params, tokens)), case.model.longest or 64
    n = LENGTH - 3
    logits, _ = case.prefill(case.params, tokens[:, :n], case.model.init_cache(BATCH, longest))
    _assert_close(logits, want[:, n - 1], f"prefill into a cache of {longest} tokens")
    _, cache = case.prefill(case.params, tokens[:, :n], case.model.init_cache(BATCH, n))
    cache = case.model.grow_cache(cache, BATCH, longest)
    for t in range(n, LENGTH):
        logits, cache = case.step(case.params, tokens[:, t], jnp.asarray(t), cache)
        _assert_close(logits, want[:, t], f"step at position {t}, after a cache of {n} tokens grew to {longest}")


# --------------------------------------------------------------------------------------------- forms of one computation
def check_chunk_size(case: Case, sizes: Sequence[int] = (1, 5, 64)) -> None:
    """Check that the result does not depend on `chunk_size`.

    The sizes do not divide the length.
    """
    tokens = case.tokens((BATCH, LENGTH))
    want = case.logits(case.params, tokens)
    for size in sizes:
        model = case.changed(mixer=dataclasses.replace(case.model.config.mixer, chunk_size=size))
        _assert_close(jax.jit(model.logits)(case.params, tokens), want, f"chunk_size={size} at {LENGTH} tokens")


def check_forms(case: Case) -> None:
    """Check that unrolled layers and rematerialisation keep the loss and gradients."""
    tokens, loss, grads = case.reference
    for settings in ({"scan_layers": False}, {"remat": "full"}, {"remat": "attention"}):
        got = loss_and_grads(case.changed(**settings), case.params, tokens)
        _assert_same(got, (loss, grads), " ".join(f"{key}={value}" for key, value in settings.items()))


def check_sharding(case: Case) -> None:
    """Check that sharded parameters and batch give the one-device results.

    It uses the available devices, rounded down to a power of two.
    """
    tokens, loss, grads = case.reference
    devices = jax.devices()[: min(BATCH, 1 << (jax.device_count().bit_length() - 1))]
    tensor, fsdp = 2 if len(devices) > 1 else 1, 2 if len(devices) > 3 else 1
    mesh = make_mesh(data=-1, fsdp=fsdp, tensor=tensor, devices=devices)
    params = jax.device_put(case.params, shardings(mesh, case.model.shapes, case.model.axes))
    with jax.set_mesh(mesh):
        got = loss_and_grads(case.model, params, jax.device_put(tokens, batch_sharding(mesh)))
    _assert_same(got, (loss, grads), f"{len(devices)} devices")


# ------------------------------------------------------------------------------------------------------------- training
def check_bfloat16(case: Case) -> None:
    """Check that bfloat16 gives bfloat16 output and finite nonzero gradients."""
    model, tokens = case.changed(dtype="bfloat16"), case.reference[0]
    x_BTD = jax.ShapeDtypeStruct((BATCH, LENGTH, model.config.dim), jnp.bfloat16)
    y_BTD = jax.eval_shape(lambda p, x: model.blocks["0"].bind(p).mixer(x), model.blocks["0"].shapes, x_BTD)
    assert y_BTD.dtype == jnp.bfloat16, f"the output is {y_BTD.dtype} for an input in bfloat16: cast it to x.dtype"
    _, grads = loss_and_grads(model, case.params, tokens)
    for name, grad in params_lib.names(grads):
        finite = np.isfinite(grad).mean()
        assert finite == 1, f"{1 - finite:.0%} of the gradient of {name} is not finite"
        assert np.abs(grad).max() > 0, f"{name} gets no gradient"


def check_training(case: Case) -> None:
    """Check that training on one batch is traced once and lowers the loss."""
    optimizer = optax.adam(1e-2)
    train_step, traces = make_train_step(case.model, optimizer), []

    def counted(state: TrainState, tokens_ABT1: Array) -> Any:
        traces.append(tokens_ABT1.shape)  # Python runs when the step is traced, not when it is executed.
        return train_step(state, tokens_ABT1, 1.0)

    step = jax.jit(counted, donate_argnums=0)
    state = jax.jit(lambda: init_state(case.model, optimizer, jax.random.key(0)))()
    tokens, losses = case.tokens((1, 4, LENGTH + 1)), []
    for _ in range(30):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    assert len(traces) == 1, f"the training step was traced {len(traces)} times"
    assert losses[-1] < 0.8 * losses[0], (
        f"in 30 steps on one batch the loss went from {losses[0]:.2f} to {losses[-1]:.2f}"
    )


def check_auxiliary_loss(case: Case) -> None:
    """Check that a mixer's auxiliary loss and the language loss train separate parameters.

    The auxiliary loss is finite and trains every parameter of the group `auxiliary`, and no other parameter. The
    language loss does not train this group, and it equals the loss of evaluation. Without an auxiliary loss the group
    is empty.
    """
    model, tokens = case.model, case.tokens((BATCH, LENGTH + 1))
    own = {name for name, group in params_lib.names(model.groups) if group == "auxiliary"}
    if not model.auxiliary_losses:
        assert not own, f"{min(own)} belongs to the group auxiliary, but no mixer has an auxiliary loss"
        return
    assert own, "the mixer has an auxiliary loss, but no parameter belongs to the group auxiliary"

    def losses(params: Params) -> tuple[Array, Array]:
        total, _, auxiliary = model.training_loss(params, tokens[:, :-1], tokens[:, 1:])
        return total, sum(auxiliary.values(), jnp.zeros(()))

    @jax.jit
    def values_and_grads(params: Params) -> tuple[tuple[Array, Array], Params, Params]:
        values, pull = jax.vjp(losses, params)
        return values, *(pull((jnp.float32(a), jnp.float32(1 - a)))[0] for a in (1, 0))

    (total, loss), language, auxiliary = values_and_grads(case.params)
    assert np.isfinite(loss), f"the auxiliary loss is {loss}"
    evaluated = float(jax.jit(model.loss)(case.params, tokens)[0])
    assert math.isclose(total, evaluated, rel_tol=1e-5), f"the loss is {total} in training and {evaluated} otherwise"
    for (name, x), (_, y) in zip(*map(params_lib.names, (language, auxiliary)), strict=True):
        trained, untouched = (y, x) if name in own else (x, y)
        kinds = ("auxiliary", "language") if name in own else ("language", "auxiliary")
        assert np.isfinite(trained).all(), f"the gradient of {name} from the {kinds[0]} loss is not finite"
        assert name not in own or np.abs(trained).max() > 0, f"{name} gets no gradient from the auxiliary loss"
        assert not np.any(untouched), (
            f"{name} gets a gradient from the {kinds[1]} loss, up to {np.abs(untouched).max():.2g}: apply "
            "jax.lax.stop_gradient"
        )


# ----------------------------------------------------------------------------------------------------- packed documents
def check_reset(case: Case) -> None:
    """Check that a mixer that `resets` keeps packed documents apart, forward and backward.

    At the edge of a chunk, no bit of the second document depends on the first, gradients across the boundary are zero,
    and the second document equals the same document in its own sequence. Inside a chunk, the first two hold to
    rounding: running sums contain both documents.
    """
    chunk = getattr(case.model.config.mixer, "chunk_size", 64)
    _check_reset(case, 9, LENGTH, exact=False)
    cut = max(chunk, 64)
    config = dataclasses.replace(case.model.config, vocab_size=cut + LENGTH)
    # Kernels use chunks of 64 tokens, or of a multiple of 64.
    _check_reset(Case(Model(config, max_len=cut + LENGTH)), cut, cut + LENGTH, exact=cut % chunk == 0 == cut % 64)


def _check_reset(case: Case, cut: int, length: int, *, exact: bool) -> None:
    config, max_len = case.model.config, case.model.max_len
    # Each token once: row = position. The ids that end and begin a document are those at the boundary.
    tokens, packed = jnp.arange(length)[None], Model(config, max_len=max_len, documents=(cut, cut - 1))
    direction_D = jax.random.normal(jax.random.key(3), (config.dim,))

    @jax.jit
    def second(embed: Array) -> tuple[Array, Array]:
        run = lambda embed: packed.hidden({**case.params, "embed": embed}, tokens)[0, cut:]  # noqa: E731
        h_TD, pull = jax.vjp(run, embed)
        return h_TD, pull(jnp.broadcast_to(direction_D, h_TD.shape))[0]

    embed = case.params["embed"]
    other = embed.at[:cut].set(random_params(case.model, seed=1)["embed"][:cut])
    (h_TD, grad), (other_TD, other_grad) = (map(np.asarray, second(x)) for x in (embed, other))
    slack, where = 0.0 if exact else 2e-3, f"documents of {cut} and {length - cut} tokens"
    for label, x, y in (("outputs", other_TD, h_TD), ("gradients", other_grad[cut:length], grad[cut:length])):
        moved = float(np.abs(x - y).max())
        assert moved <= slack * float(np.abs(y).max()), (
            f"{where}: other tokens in the first move the {label} of the second by up to {moved:.2g}"
        )
    crossing = float(np.abs(grad[:cut]).max())
    assert crossing <= slack * float(np.abs(grad).max()), (
        f"{where}: an output of the second depends on an input of the first: gradient {crossing:.2g}"
    )
    if exact:
        alone = Model(config, max_len=max_len)
        want_TD = jax.jit(lambda params: alone.hidden(params, tokens[:, cut:])[0])(case.params)
        error = float(np.abs(np.asarray(want_TD) - h_TD).max())
        assert error <= TOLERANCE * max(1.0, float(np.abs(h_TD).max())), (
            f"{where}: the second differs by up to {error:.2g} from the same document in its own sequence"
        )


# --------------------------------------------------------------------------------------------- the mixer's declarations
def check_parameters(case: Case) -> None:
    """Check shapes, dtype, logical axes and initial values of the parameters.

    Parameters are created as declared, float32, with one logical axis per dimension. Random parameters differ between
    layers.
    """
    init = jax.jit(case.model.init)
    made, again = init(jax.random.key(0)), init(jax.random.key(1))
    declared = dict(params_lib.names(case.model.shapes))
    for (name, axes), (_, x), (_, y) in zip(*map(params_lib.names, (case.model.axes, made, again)), strict=True):
        assert x.shape == declared[name].shape, f"{name} is made as {x.shape} and declared as {declared[name].shape}"
        assert x.dtype == jnp.float32, f"{name} is {x.dtype}; parameters are float32"
        assert len(axes) == x.ndim, f"{name} has the axes {axes} for the shape {x.shape}"
        drawn = name.startswith("blocks.") and not np.array_equal(x, y)
        assert not (drawn and np.array_equal(x[0], x[1])), f"{name} is drawn, but the same in both layers"


def check_flops(case: Case, smallest: float = SMALLEST_FLOPS) -> None:
    """Check that a layer's FLOPs are `smallest` to 1 times XLA's count.

    Before optimisation every product is a dot that XLA counts. XLA counts one iteration of a loop, so scans are
    unrolled. Ops are counted as accelerators compute them: a CPU's loop for Mamba-1's scan has fewer operations than
    usual.
    """
    length, dim = 128, 64
    config = case.model.config
    model = Model(dataclasses.replace(config, dim=dim, mlp=dataclasses.replace(config.mlp, dim=192)), max_len=length)
    x_BTD = jax.ShapeDtypeStruct((2, length, dim), jnp.float32)

    def layer(p: Params, x_BTD: Array) -> Any:
        block = model.blocks["0"].bind(p)
        return block(x_BTD, block.init_carry(x_BTD), layer=jnp.int32(1), dtype=jnp.float32)

    with (
        mock.patch.object(jax.lax, "scan", functools.partial(jax.lax.scan, unroll=True)),
        counting.as_on_accelerators(),
    ):
        analysis: Any = jax.jit(layer).lower(model.blocks["0"].shapes, x_BTD).cost_analysis()
    xla = analysis["flops"] / (2 * length)
    dense = 2 * (flops.matmul_params(model) - config.vocab_size * dim) / config.n_layers
    ours = dense + model.abstract_blocks()[0].mixer.flops_per_token(length)
    assert smallest * xla <= ours <= xla, (
        f"{dense:.0f} FLOPs per token of the products with parameters and {ours - dense:.0f} of flops_per_token are "
        f"{ours / xla:.2f} of the {xla:.0f} that XLA counts; it must be {smallest} to 1"
    )


# -------------------------------------------------------------------------------------------------------------- helpers
def _assert_close(got: Any, want: Any, label: str) -> None:
    got, want = np.asarray(got), np.asarray(want)
    excess = np.abs(got - want) - TOLERANCE * np.abs(want)
    assert not np.isnan(excess).any() and excess.max() <= TOLERANCE, (
        f"{label}: logits differ from the parallel form's by up to {np.abs(got - want).max():.2g}"
    )


def _assert_same(got: tuple[Array, Params], want: tuple[Array, Params], label: str) -> None:
    loss, reference = float(got[0]), float(want[0])
    assert math.isclose(loss, reference, rel_tol=1e-5), f"{label}: the loss is {loss:.6g} instead of {reference:.6g}"
    largest = max(float(np.abs(x).max()) for x in jax.tree.leaves(want[1]))
    for (name, a), (_, b) in zip(params_lib.names(got[1]), params_lib.names(want[1]), strict=True):
        # A gradient that cancels, such as the key bias gradient, is rounding error. The scale is therefore at least
        # 1e-3 times the largest gradient.
        scale = max(float(np.abs(b).max()), 1e-3 * largest)
        error = float(np.abs(np.asarray(a) - np.asarray(b)).max()) / scale
        assert error <= 2e-4, f"{label}: the gradient of {name} differs by {error:.2g} of its largest value"


# In order of CPU cost, from a tenth of a second to half a minute. After a wrong output no other check is useful.
CHECKS: dict[str, Callable[[Case], None]] = {
    "output": check_output,
    "flops": check_flops,
    "parameters": check_parameters,
    "causality": check_causality,
    "step": check_step,
    "long_cache": check_long_cache,
    "pieces": check_pieces,
    "gradient_causality": check_gradient_causality,
    "chunk_size": check_chunk_size,
    "long": check_long,
    "training": check_training,
    "bfloat16": check_bfloat16,
    "auxiliary_loss": check_auxiliary_loss,
    "reset": check_reset,
    "sharding": check_sharding,
    "forms": check_forms,
}


def check_mixer(
    mixer: type[base.Mixer],
    *,
    settings: Mapping[str, Any] | None = None,
    dim: int = 32,
    n_params: int | None = None,
    skip: Collection[str] = (),
    say: Callable[[str], None] | None = None,
) -> list[str]:
    """Run the contract tests on a mixer and return their names, quick tests first.

    Args:
        mixer: A registered class (`seqjax.mixers.register`), or a class from an imported file.
        settings: Mixer settings that differ from its constructor's defaults.
        dim: Width of the model.
        n_params: Expected number of parameters per mixer at that width, if known.
        skip: Names in `CHECKS` that do not apply. Skip "chunk_size" if the chunk is part of the model rather than a
            speed setting. Skip "flops" if products are inside a loop or a kernel that XLA cannot count. "chunk_size" is
            skipped automatically without a setting `chunk_size`, "reset" for a mixer that does not declare it, and
            "sharding" on one device.
        say: Receives a line with name and seconds after each check. By default it is printed on stderr, in a notebook
            on stdout.

    Raises:
        AssertionError: Some checks failed. The message lists them, with the sizes of the differences or the mixer's
            error. A wrong "output" ends the tests.
        UserError: The mixer or its settings cannot be used.
    """
    use_safe_fusions()  # as the commands do
    say = say or StatusLine().say
    for name in skip:
        if name not in CHECKS:
            raise UserError(f"skip: {name!r} is not a check.{nearest(name, CHECKS)}")
    changes = {"vocab_size": VOCABULARY, "dim": dim, "mlp.dim": dim + 16, "dtype": "float32", "loss_chunk": 32}
    with as_registered():
        config = presets.get_config(
            "debug",
            name="check",
            mixer={"name": name_of(mixer), **(settings or {})},
            settings={f"model.{key}": value for key, value in changes.items()} | {"train.seq_len": LENGTH},
        )
    model = Model(from_config_dict(config).model, max_len=LENGTH)
    inapplicable = set(skip)
    if not hasattr(model.config.mixer, "chunk_size"):
        inapplicable.add("chunk_size")
    if not mixer.resets:
        inapplicable.add("reset")
    if jax.device_count() == 1:
        inapplicable.add("sharding")
    ran, failures, cause = [], [], None
    width = max(map(len, CHECKS))
    with jax.default_matmul_precision("highest"):  # by default accelerators multiply float32 with fewer bits
        made = params_lib.count(model.blocks["0"].shapes["mixer"])
        if n_params is not None and made != n_params:
            failures.append(f"parameters: the mixer has {made:,} parameters instead of {n_params:,}")
        case = Case(model)
        chosen = {name: check for name, check in CHECKS.items() if name not in inapplicable}
        say(f"{mixer.__name__}: {len(chosen)} checks, the quick ones first")
        for name, check in chosen.items():
            ran.append(name)
            begin, before = time.perf_counter(), len(failures)
            try:
                check(case)
            except AssertionError as error:
                failures.append(f"{name}: {error}")
            except UserError:
                raise
            except Exception as error:  # an error in the mixer, shown with its traceback
                failures.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                cause = error
            outcome = "passed" if len(failures) == before else "FAILED"
            say(f"{name:<{width}} {outcome} {time.perf_counter() - begin:6.1f} s")
            if failures and name == "output":
                break
    if failures:
        text = "\n".join([f"{mixer.__name__} fails {len(failures)} of {len(ran)} checks.", *failures])
        raise AssertionError(text) from cause
    return ran
