"""cuDNN attention without a GPU: refusals and sharding.

Our refusals cover JAX's refusals. JAX checks a problem during tracing, so a simulated GPU is enough. On a mesh, the
primitives get a CPU lowering that runs XLA's attention instead of the kernel; the partitioning is JAX's own.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_in_jax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import kernels_pallas
from kernels_pallas import BackendError, device
from kernels_pallas.attention import cudnn
from kernels_pallas.backend import Problem
from seqjax.sharding import make_mesh

LENGTHS, DIMS = (1, 2, 127, 128, 1023, 1024), (4, 8, 60, 64, 128, 136, 192, 256, 264)
DTYPES = ("float16", "bfloat16", "float32", "bfloat16 float16")


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that simulates a GPU.

    Its arguments are the compute capability and the cuDNN version.
    """

    def have(capability: int, version: int = 91_900) -> None:
        monkeypatch.setattr(device, "platform", lambda: "gpu")
        monkeypatch.setattr(device, "compute_capability", lambda: capability)
        monkeypatch.setattr(device, "cudnn_version", lambda: version)
        monkeypatch.setattr(cudnn_in_jax, "check_cudnn_version", lambda: version)
        monkeypatch.setattr(cudnn_in_jax, "check_compute_capability", lambda least: capability >= 10 * float(least))
        monkeypatch.setattr(
            cudnn_in_jax, "is_cuda_compute_capability_equal", lambda same: capability == 10 * float(same)
        )

    return have


def attend(q, k, v, window=0):
    return jnp.sum(cudnn.attend(q, k, v, window=window, scale=1.0, slopes=()).astype(jnp.float32))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    ("capability", "version"), [(80, 90_100), (90, 91_900), (103, 91_000), (103, 91_100), (120, 91_900)]
)
def test_cudnn_refuses_exactly_what_jax_refuses(gpu, capability, version, window):
    """Nothing else is refused: any even length and any head dim that JAX accepts."""
    gpu(capability, version)
    accepted = 0
    for n_tokens, dim, names in itertools.product(LENGTHS, DIMS, DTYPES):
        first, *others = names.split()
        q, k = (
            jax.ShapeDtypeStruct((2, n_tokens, heads, dim), dtype)
            for heads, dtype in ((4, first), (2, others[0] if others else first))
        )
        refused = cudnn.refusal(Problem("gpu", (q, k, k), {"window": window, "slopes": (), "has_gates": False}))
        try:
            jax.eval_shape(jax.grad(partial(attend, window=window), argnums=(0, 1, 2)), q, k, k)
        except (NotImplementedError, ValueError) as error:
            assert refused is not None, (n_tokens, dim, names, error)
        else:
            assert refused is None, (n_tokens, dim, names, refused)
            accepted += 1
    dims = [dim for dim in DIMS if dim % 8 == 0 and dim <= (128 if capability == 80 else 256)]
    assert accepted == (0 if (capability, version) == (103, 91_000) else 2 * 3 * len(dims))


def test_an_odd_length_is_an_error_for_cudnn_and_runs_elsewhere(gpu):
    gpu(90)
    x = jax.ShapeDtypeStruct((1, 127, 2, 64), jnp.bfloat16)
    gradient = jax.grad(lambda x: jnp.sum(kernels_pallas.causal_attention(x, x, x).astype(jnp.float32)))
    assert jax.eval_shape(gradient, x).shape == x.shape
    assert kernels_pallas.backends_used()["causal_attention"] == "xla"
    with pytest.raises(BackendError, match=r"cudnn: .*127 tokens"):
        jax.eval_shape(partial(kernels_pallas.causal_attention, implementation="cudnn"), x, x, x)


def xla_attention(q, k, v, *_, scale, sliding_window_length, is_training=False, **__):
    window = (sliding_window_length - 1, 0) if sliding_window_length else None
    o = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, local_window_size=window)
    return (o, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)) if is_training else (o,)


def xla_gradient(q, k, v, *others, **options):
    return jax.vjp(lambda *qkv: xla_attention(*qkv, **options)[0], q, k, v)[1](others[-1])


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (8, 1), (6, 6), (6, 3)])
def test_heads_that_the_devices_do_not_divide(gpu, heads, kv_heads, window):
    """JAX requires equal shardings for queries, keys, values and gradients.

    XLA would choose different ones.
    """
    for primitive, array_code in (
        (cudnn_in_jax._dot_product_attention_fwd_p, xla_attention),
        (cudnn_in_jax._dot_product_attention_bwd_p, xla_gradient),
    ):
        mlir.register_lowering(primitive, mlir.lower_fun(array_code, multiple_results=True), platform="cpu")
    gpu(90)
    rng = np.random.default_rng(0)
    x_BTD, w_q, w_k, w_v, w_out = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) / 4
        for shape in ((4, 16, 32), (32, heads * 8), (32, kv_heads * 8), (32, kv_heads * 8), (heads * 8, 32))
    )

    def loss(weights, x_BTD, attend):
        q, k, v = (x_BTD @ w for w in weights[:3])
        o = attend(*(y.reshape(*y.shape[:2], -1, 8) for y in (q, k, v)))
        return jnp.sum(jnp.sin((o.reshape(*o.shape[:2], -1) @ weights[3]).astype(jnp.float32)))

    weights = (w_q, w_k, w_v, w_out)
    exact = lambda *qkv: xla_attention(*qkv, scale=1.0, sliding_window_length=window)[0]  # noqa: E731
    want = jax.grad(loss)(tuple(w.astype(jnp.float32) for w in weights), x_BTD.astype(jnp.float32), exact)
    split = P(("data", "fsdp"), None, "tensor" if kv_heads % 4 == 0 else None)
    with jax.set_mesh(make_mesh(data=2, tensor=4)):
        places = (P(None, "tensor"), P(None, "tensor"), P(None, "tensor"), P("tensor", None))
        placed = tuple(jax.device_put(w, place) for w, place in zip(weights, places, strict=True))
        batch = jax.device_put(x_BTD, P(("data", "fsdp")))
        attend = partial(cudnn.attend, window=window, scale=1.0, slopes=(), split=split)
        got = jax.jit(jax.grad(partial(loss, attend=attend)))(placed, batch)
    for a, b in zip(got, want, strict=True):  # rounding to bf16 costs half a percent
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=0, atol=0.01 * float(np.abs(b).max()))


@pytest.mark.parametrize(("capability", "default"), [(75, "xla"), (89, "cudnn"), (100, "cudnn"), (120, "cudnn")])
def test_gpus_without_triton_kernels_take_cudnn_where_it_runs(gpu, capability, default):
    gpu(capability)
    q, k, v = (jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16),) * 3
    jax.eval_shape(lambda *x: kernels_pallas.causal_attention(*x), q, k, v)
    assert kernels_pallas.backends_used()["causal_attention"] == default
