"""The recurrences as in their papers, token by token; references for the chunked forms."""

import jax
import jax.numpy as jnp


def _over_time(body, state, *arrays):
    state, y = jax.lax.scan(body, state, tuple(jnp.moveaxis(x, 1, 0) for x in arrays))
    return jnp.moveaxis(y, 0, 1), state


def ssd(x, log_a, b, c, state):
    def body(s, xs):
        x, log_a, b, c = xs
        s = jnp.exp(log_a)[..., None, None] * s + b[:, None, :, None] * x[:, :, None, :]
        return s, jnp.einsum("bn,bhnv->bhv", c, s)

    return _over_time(body, state, x, log_a, b, c)


def wkv6(r, k, v, log_w, u, state):
    def body(s, xs):
        r, k, v, log_w = xs
        kv = k[..., :, None] * v[..., None, :]
        y = jnp.einsum("bhk,bhkv->bhv", r, s + u[..., None] * kv)
        return jnp.exp(log_w)[..., None] * s + kv, y

    return _over_time(body, state, r, k, v, jnp.broadcast_to(log_w, r.shape))


def selective_scan(x, dt, a, b, c, d, state):
    def body(h, xs):
        x, dt, b, c = xs
        h = jnp.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None]
        return h, jnp.einsum("ben,bn->be", h, c) + d * x

    return _over_time(body, state, x, dt, b, c)


def taylor(q, k, v, eps=1e-12):
    """Compute the paper's definition, quadratic in T."""
    s = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
    p = jnp.tril(1 + s + s * s / 2)
    return jnp.einsum("bhts,bshv->bthv", p / (p.sum(-1, keepdims=True) + eps), v)
