"""Chunked attention: values and gradients against float64 numpy.

The tests also cover tiles, memory and transformations.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import xla_tiles
from kernels_pallas.attention import chunked, reference, xla
from seqjax.sharding import make_mesh
from tests import support
from tests.kernels.common import count_primitive, fast_jit, temporary_bytes

SLOPES = (0.5, 0.25, 2.0, 1.0)
TOLERANCE = {"float32": 2e-5, "float16": 6e-3, "bfloat16": 4e-2}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use tiles of 16 positions; 50 tokens then need ten."""
    monkeypatch.setattr(chunked, "UNIT", 8)
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {"cpu": 2**11})


def operands(n_tokens, n_kv=4, dtype="float32", gain=1.0, n_batch=2):
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((n_batch, n_tokens, 4, 6)) for _ in range(2))
    k, v = (rng.standard_normal((n_batch, n_tokens, n_kv, 6)) for _ in range(2))
    return tuple(jnp.asarray(x, dtype) for x in (gain * q, k, v, do))


def by_hand(q, k, v, do, log_f=None, *, window, scale, slopes):
    """Return the output and the gradients of sum(do * o), from all scores in float64.

    Log gates between each key and query are summed separately, and so are their gradients.
    """
    q, k, v, do = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, do))
    n_batch, n_tokens, n_heads, head_dim = q.shape
    shared = n_heads // k.shape[2]
    wide_k, wide_v = (np.repeat(x, shared, axis=2) for x in (k, v))
    i, j = np.arange(n_tokens)[:, None], np.arange(n_tokens)
    s = scale * np.einsum("bihk,bjhk->bhij", q, wide_k)
    s -= np.asarray(slopes or (0.0,) * n_heads)[:, None, None] * (i - j)
    between = (j[:, None] < np.arange(n_tokens)) & (np.arange(n_tokens) <= i[..., None])  # [i, j, l]
    if log_f is not None:
        s += np.einsum("ijl,blh->bhij", between, np.asarray(log_f, np.float64))
    s = np.where((j <= i) & (i - j < (window or n_tokens)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o = np.einsum("bhij,bjhk->bihk", p, wide_v)
    dp = np.einsum("bihk,bjhk->bhij", do, wide_v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dlog_f = () if log_f is None else (np.einsum("ijl,bhij->blh", between, ds),)
    ds *= scale
    summed = lambda x: x.reshape(n_batch, n_tokens, -1, shared, head_dim).sum(3)  # noqa: E731
    dk, dv = (summed(np.einsum("bhij,bihk->bjhk", a, b)) for a, b in ((ds, q), (p, do)))
    return o, np.einsum("bhij,bjhk->bihk", ds, wide_k), dk, dv, *dlog_f


def output_and_gradients(q, k, v, do, *log_f, attend=chunked.attend, **options):
    o, pull = jax.vjp(partial(attend, **options), q, k, v, *log_f)
    return o, *pull(do)


@pytest.mark.parametrize(
    ("n_tokens", "window", "slopes", "n_kv", "dtype"),
    support.slow_unless(
        lambda n_tokens, window, slopes, n_kv, dtype: (n_tokens, window) in ((50, 0), (50, 13)),
        [
            (50, 0, (), 4, "float32"),
            (50, 13, SLOPES, 2, "bfloat16"),
            (48, 0, SLOPES, 1, "float32"),
            (49, 1, (), 4, "float32"),
            (50, 16, (), 2, "float32"),
            (47, 17, SLOPES, 2, "float32"),
            (50, 60, (), 2, "float16"),
            (5, 0, (), 4, "bfloat16"),
            (1, 3, SLOPES, 4, "float32"),
        ],
    ),
)
def test_values_and_gradients(n_tokens, window, slopes, n_kv, dtype):
    inputs = operands(n_tokens, n_kv, dtype)
    options = {"window": window, "scale": 0.7, "slopes": slopes}
    got = fast_jit(partial(output_and_gradients, **options))(*inputs)
    for x, like, want in zip(got, (inputs[3], *inputs[:3]), by_hand(*inputs, **options), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
        scale = max(1.0, np.abs(want).max())
        np.testing.assert_allclose(x.astype(jnp.float32), want, atol=TOLERANCE[dtype] * scale, rtol=0)


def log_gates(n_tokens, low=-6.0, high=6.0):
    """Draw log gates from logits in the range."""
    logits = np.random.default_rng(1).uniform(low, high, (2, n_tokens, 4))
    return jax.nn.log_sigmoid(jnp.asarray(logits, jnp.float32))


BACKENDS = {"chunked": chunked.attend, "xla": xla.attend, "reference": reference.causal_attention}


@pytest.mark.parametrize(
    ("backend", "n_tokens", "window", "slopes", "n_kv", "dtype"),
    [
        ("chunked", 50, 0, (), 4, "float32"),
        ("chunked", 49, 13, SLOPES, 2, "bfloat16"),
        ("chunked", 1, 0, (), 4, "float32"),
        ("xla", 50, 13, SLOPES, 2, "float32"),
        ("reference", 20, 7, SLOPES, 2, "float32"),
    ],
)
def test_forget_gates(backend, n_tokens, window, slopes, n_kv, dtype):
    inputs = (*operands(n_tokens, n_kv, dtype), log_gates(n_tokens))
    options = {"window": window, "scale": 0.7, "slopes": slopes}
    got = fast_jit(partial(output_and_gradients, attend=BACKENDS[backend], **options))(*inputs)
    assert got[-1].dtype == jnp.float32
    for x, want in zip(got, by_hand(*inputs, **options), strict=True):
        np.testing.assert_allclose(
            x.astype(jnp.float32), want, atol=TOLERANCE[dtype] * max(1.0, np.abs(want).max()), rtol=0
        )


def test_open_gates_equal_no_gates():
    """Log gates of 0 change nothing except rounding, on either backend."""
    inputs, options = operands(50, n_kv=2), {"window": 13, "scale": 0.7, "slopes": ()}
    for attend in (chunked.attend, xla.attend):
        run = fast_jit(partial(output_and_gradients, attend=attend, **options))
        for x, want in zip(run(*inputs, jnp.zeros((2, 50, 4))), run(*inputs), strict=False):
            np.testing.assert_allclose(x, want, atol=1e-6 * float(jnp.abs(want).max()), rtol=0)


@pytest.mark.parametrize(("low", "high"), [(-100, -90), (90, 100), (-100, 100)])
def test_gates_near_zero_and_one(low, high):
    """Closed gates leave a query only its own value.

    Later tokens change no output bits and do not overflow.
    """
    inputs, options = (*operands(50), log_gates(50, low, high)), {"window": 0, "scale": 0.7, "slopes": ()}
    run = fast_jit(partial(output_and_gradients, **options))
    got = run(*inputs)
    for x, want in zip(got, by_hand(*inputs, **options), strict=True):
        # Sums reach 1,600 within a tile, where adjacent float32 numbers are 1.2e-4 apart.
        np.testing.assert_allclose(x, want, atol=2e-4 * max(1.0, np.abs(want).max()), rtol=0)
    if high < 0:
        np.testing.assert_allclose(got[0], inputs[2], atol=1e-6)
    q, k, v, do, log_f = inputs
    changed = run(q, k, v, do, log_f.at[:, 17].add(-1.0))[0]
    np.testing.assert_array_equal(changed[:, :17], got[0][:, :17])


def test_near_keys_stay_accurate_after_a_long_past():
    """Near keys stay accurate although the gate sum reaches 16,000.

    Adjacent float32 numbers are 1e-3 apart there.
    """
    inputs = operands(160, n_batch=2)
    log_f = jnp.where(jnp.arange(160)[:, None] < 144, -111.0, -0.01 * jnp.arange(1, 5)) + jnp.zeros((2, 160, 4))
    options = {"window": 0, "scale": 0.7, "slopes": ()}
    o, *_ = fast_jit(partial(output_and_gradients, **options))(*inputs, log_f)
    want = by_hand(*inputs, log_f, **options)[0]
    np.testing.assert_allclose(o[:, 144:], want[:, 144:], atol=2e-6)


def test_bfloat16_gate_gradients_do_not_accumulate_rounding():
    """Rounding makes row sums of ds nonzero.

    These errors must not accumulate over tokens.
    """
    rng = np.random.default_rng(0)
    q, k, v, do = (jnp.asarray(rng.standard_normal((1, 1024, 1, 16)), jnp.bfloat16) for _ in range(4))
    log_f = jnp.full((1, 1024, 1), np.log(0.5), jnp.float32)
    options = {"window": 0, "scale": 0.25, "slopes": ()}
    got = fast_jit(partial(output_and_gradients, **options))(q, k, v, do, log_f)[-1]
    wide = (x.astype(jnp.float32) for x in (q, k, v, do))
    want = fast_jit(partial(output_and_gradients, attend=reference.causal_attention, **options))(*wide, log_f)[-1]
    assert jnp.sqrt(jnp.mean((got - want) ** 2)) < 0.01 * jnp.sqrt(jnp.mean(want**2))


def test_large_scores_and_a_changed_token():
    """Scores in the thousands do not overflow.

    Later tokens change no output bits.
    """
    inputs = operands(50, gain=2000.0)
    options = {"window": 20, "scale": 1.0, "slopes": ()}
    run = fast_jit(partial(output_and_gradients, **options))
    got = run(*inputs)
    for x, want in zip(got, by_hand(*inputs, **options), strict=True):
        # float32 stores such scores, and thus their exponentials, to 1e-3.
        np.testing.assert_allclose(x, want, atol=2e-3 * max(1.0, np.abs(want).max()), rtol=0)
    for token in (0, 17, 49):
        changed = run(*(x.at[:, token].add(1.0) for x in inputs[:3]), inputs[3])[0]
        np.testing.assert_array_equal(changed[:, :token], got[0][:, :token])
        assert not (changed[:, token] == got[0][:, token]).all()


@pytest.mark.parametrize("window", [1, 5, 8, 16, 17, 40, 100])
@pytest.mark.parametrize("n_tokens", [1, 7, 16, 50, 64])
def test_tiles_of_a_window_hold_every_visible_pair_once(window, n_tokens):
    tiles = xla_tiles.causal_tiles(n_tokens, min(n_tokens, 8), 8, window=window)
    count = np.zeros((tiles.padded, tiles.padded), int)
    for row, col in zip(tiles.rows * tiles.side, tiles.cols * tiles.side, strict=True):
        count[row : row + tiles.side, col : col + tiles.side] += 1
    distance = np.arange(tiles.padded)[:, None] - np.arange(tiles.padded)
    assert count.max() == 1
    assert (count[(distance >= 0) & (distance < window)] == 1).all()


def test_work_of_a_window_is_linear_in_length():
    def scores(n_tokens, window):
        tiles = xla_tiles.causal_tiles(n_tokens, 8, 8, window=window)
        return len(tiles.rows) * tiles.side**2

    assert max(b / a for a, b in pairwise(scores(n, 20) for n in (256, 512, 1024, 2048))) < 2.1
    assert scores(2048, 20) < 2048 * 64
    assert scores(2048, 0) > 2048**2 / 2


def test_the_reference_matches_numpy():
    inputs = operands(20, n_kv=2)
    options = {"window": 7, "scale": 0.7, "slopes": SLOPES}
    got = fast_jit(partial(output_and_gradients, attend=reference.causal_attention, **options))(*inputs)
    for x, want in zip(got, by_hand(*inputs, **options), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5)


@pytest.mark.parametrize("n_gates", [0, 1])
def test_memory_is_linear_in_length(monkeypatch, n_gates):
    monkeypatch.setattr(xla_tiles, "TILE_ELEMENTS", {"cpu": 2**14})

    def total(*inputs):
        return (chunked.attend(*inputs, window=0, scale=1.0, slopes=()) ** 2).sum()

    sizes = []
    for n_tokens in (2048, 4096):
        shapes = [(1, n_tokens, 2, 8)] * 3 + [(1, n_tokens, 2)] * n_gates
        inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        sizes.append(temporary_bytes(jax.value_and_grad(total, argnums=tuple(range(len(inputs)))), *inputs))
    assert sizes[1] / sizes[0] < 2.2
    assert sizes[1] < 4 * 2 * 4096**2 / 10, "a tenth of the scores"


def layers(x, *, remat=lambda f: f):
    """Return the sum of squares after two layers in a scan."""

    def layer(x, w):
        return x + chunked.attend(w * x, x, x, window=11, scale=1.0, slopes=()), None

    return (jax.lax.scan(remat(layer), x, jnp.asarray([0.5, 1.0]))[0] ** 2).sum()


NAMES = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")


def test_saved_residuals_spare_the_forward_pass():
    x = operands(30, n_batch=1)[0]
    remats = (lambda f: f, partial(jax.checkpoint, policy=NAMES), jax.checkpoint)
    plain, saved, full = (
        count_primitive(jax.make_jaxpr(jax.grad(partial(layers, remat=remat)))(x).jaxpr, "dot_general")
        for remat in remats
    )
    assert plain == saved < full


@pytest.mark.slow
def test_vmap_over_a_scan_with_rematerialisation():
    x = operands(30, n_batch=1)[0]
    xs = jnp.stack([x, 2 * x])
    got = fast_jit(jax.vmap(jax.grad(partial(layers, remat=partial(jax.checkpoint, policy=NAMES)))))(xs)
    one = fast_jit(jax.grad(layers))
    np.testing.assert_allclose(got, jnp.stack([one(x) for x in xs]), atol=1e-4 * float(jnp.abs(got).max()))


def test_batch_and_heads_are_sharded_without_collectives():
    inputs = operands(50, n_kv=2, n_batch=4)
    options = {"window": 0, "scale": 1.0, "slopes": SLOPES}
    run = partial(output_and_gradients, **options)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    split = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
    program = jax.jit(run, in_shardings=split, out_shardings=split).lower(*inputs).compile()
    text = program.as_text()
    assert not any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    got = program(*(jax.device_put(x, split) for x in inputs))
    for x, want in zip(got, by_hand(*inputs, **options), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5 * max(1.0, np.abs(want).max()), rtol=0)


def test_inside_shard_map():
    inputs = operands(20, n_batch=2)
    run = partial(output_and_gradients, window=5, scale=1.0, slopes=())
    mesh = make_mesh(data=2, devices=jax.devices()[:2])
    split = jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    for x, want in zip(fast_jit(split)(*inputs), by_hand(*inputs, window=5, scale=1.0, slopes=()), strict=True):
        np.testing.assert_allclose(x, want, atol=2e-5 * max(1.0, np.abs(want).max()), rtol=0)
