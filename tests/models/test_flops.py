"""Model FLOPs by hand, and MFU."""

import importlib
import types

import jax
import pytest

from seqjax.config import from_config_dict
from seqjax.models import Model, flops
from tests import support


def test_transformer_flops_by_hand():
    """2 per matrix parameter, 4 d (T + 1) / 2 per layer for attention; training takes three times that."""
    from configs import transformer_pp

    config = from_config_dict(transformer_pp.get_config("110m"))
    model = Model(config.model, max_len=2048)
    matrices = 12 * (4 * 768**2 + 3 * 768 * 2048) + 32_000 * 768
    assert flops.matmul_params(model) == matrices
    forward = 2 * matrices + 12 * 4 * 768 * 2049 / 2
    assert flops.flops_per_token(model, 2048, train=False) == pytest.approx(forward)
    assert flops.flops_per_token(model, 2048) == pytest.approx(3 * forward)


# Forward FLOPs per token and layer in addition to products with parameters, at 110m and T = 2,048, by hand. A product
# of an [m, n] state and a vector takes 2 m n; chunks of C compute (C + 1) / 2 pairs per token.
T = 2048
# NSA's keys: block means, available from a block's last of 32 tokens on; the own block and seven earlier blocks
MEANS = sum(T + 1 - 32 * c for c in range(1, 65)) / T
SELECTED = 33 / 2 + sum(T - 32 * n for n in range(1, 8)) * 32 / T
MIXER_FLOPS = {
    "transformer_pp": 4 * 768 * (T + 1) / 2,
    "top1_element": 4 * 768 * (T + 1) / 2,
    "fox": 4 * 768 * (T + 1) / 2,
    # attention, plus per chunk six 128 x 64 triangles, three 128 x 128 triangles, its product, and 7.5 chunk products
    "path": 4 * 768 * (T + 1) / 2 + 12 * (6 * 64 * 128 + 3 * 128**2 + 2 * 64**2 + 7.5 * 2 * 64**2),
    "mla": 2 * 12 * (64 + 32 + 64) * (T + 1) / 2,
    "nsa": 4 * 768 * (MEANS + SELECTED + 256 - 256 * 255 / (2 * T)),
    # k^T S, the correction of S, q^T S
    "deltanet": 3 * 2 * 8 * 96 * 96,
    "gated_deltanet": 3 * 2 * 6 * 96 * 192,
    # k^T S and the correction twice
    "gated_deltaproduct": (2 * 2 + 1) * 2 * 4 * 96 * 120,
    # scores and their product with v, then S <- S + k v^T and q^T S
    "gla": 2 * 4 * (96 + 192) * 65 / 2 + 2 * 2 * 4 * 96 * 192,
    "kda": 3 * 2 * 6 * 128 * 128,
    # scores and their product with gradients in mini-batches of 16; k W, q W and k^T d, of which one counts as a matrix
    "ttt_linear": 4 * 768 * 17 / 2 + 2 * 2 * 768 * 64,
    "parallax": 6 * 768 * (T + 1) / 2,
    "wall": 4 * 768 * (T + 1) / 2,
    "comba": 3 * 2 * 6 * 96 * 192,
    # decay, product and sum of each key channel's curvature
    "precond_gated_deltanet": 3 * 2 * 6 * 96 * 192 + 3 * 576,
    "precond_kda": 3 * 2 * 12 * 64 * 64 + 3 * 768,
    # as GLA, with the normalizer as an additional value
    "mlstm": 2 * 4 * (96 + 193) * 65 / 2 + 2 * 2 * 4 * 96 * 193,
    # nine operations per channel and state
    "mamba1": 9 * 1536 * 16,
    # C B^T once for all heads and its product with x, then S <- S + B x^T and C S
    "mamba2": 2 * (128 + 1536) * 129 / 2 + 2 * 2 * 128 * 1536,
    # scores of each of 24 heads and their product with x, S <- S + k x^T and q S, and q k of each token
    "log_linear_mamba2": 2 * (128 + 1536) * 65 / 2 + 2 * 128 * 1536 * (1 + 5 / 2),
    "mamba3": 2 * (24 * 128 + 1536) * 65 / 2 + 2 * 2 * 128 * 1536 + 2 * 24 * 128,
    "rwkv5": 2 * 2 * 768 * 65 / 2 + 2 * 2 * 12 * 64 * 64,
    "rwkv6": 2 * 2 * 768 * 65 / 2 + 2 * 2 * 12 * 64 * 64,
    # decay 1, a^T S 2, two updates of rank one 4, r^T S 2
    "rwkv7": 9 * 12 * 64 * 64,
}


# At 110m: MSA's 8 blocks of 32 and 3 index heads of 64; DSA's 256 keys and 8 index heads of 32.
MSA_PAST, DSA_KEYS = T / 2 - 16, 256 - 256 * 255 / (2 * T)
INDEXED = {
    # forward: index scores of past keys, and attention; training: also index scores of the own block, and two products
    # of the index and four of the attention for the keys that are read
    "msa": (
        2 * 192 * MSA_PAST + 4 * 768 * SELECTED,
        2 * 192 * (MSA_PAST + 33 / 2) + (4 * 192 + 12 * 768) * SELECTED,
    ),
    "dsa": (
        2 * 256 * (T + 1) / 2 + 4 * 768 * DSA_KEYS,
        2 * 256 * (T + 1) / 2 + (4 * 256 + 12 * 768) * DSA_KEYS,
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_flops_of_an_index_by_hand(name):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config("110m")).model
    model = Model(config, max_len=T)
    for train, want in zip((False, True), INDEXED[name], strict=True):
        mixer_flops = flops.flops_per_token(model, T, train=train) - (2 + 4 * train) * flops.matmul_params(model)
        assert mixer_flops / config.n_layers == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("name", MIXER_FLOPS)
def test_mixer_flops_by_hand(name):
    config = from_config_dict(importlib.import_module(f"configs.{name}").get_config("110m")).model
    model = Model(config, max_len=T)
    for train, times in ((False, 1), (True, 3)):
        mixer_flops = flops.flops_per_token(model, T, train=train) - times * 2 * flops.matmul_params(model)
        assert mixer_flops / config.n_layers == pytest.approx(times * MIXER_FLOPS[name], rel=1e-9)


def test_selection_counts_once_in_training():
    exact, approx = (support.tiny_model("top1_chunk", v) for v in ("exact", "approx"))
    for length in (23, 64):
        forward = flops.flops_per_token(exact, length, train=False)
        assert flops.flops_per_token(exact, length) < 3 * forward
        assert flops.flops_per_token(approx, length) < flops.flops_per_token(exact, length)
        selection = forward - flops.flops_per_token(approx, length, train=False)
        trained = flops.flops_per_token(exact, length) - flops.flops_per_token(approx, length)
        assert trained == pytest.approx(selection)  # a selection has no backward pass


def test_tables_and_vectors_add_no_matmul_params():
    plain = support.tiny_model("transformer_pp")
    more = support.tiny_model("transformer_pp", "bias_norm", model__learned_positions=True, model__norm="layernorm")
    assert flops.n_params(more) > flops.n_params(plain)
    assert flops.matmul_params(more) == flops.matmul_params(plain)
    untied = support.tiny_model("transformer_pp", model__tie_embeddings=False)
    assert flops.n_params(untied) == flops.n_params(plain) + 48 * 32
    assert flops.matmul_params(untied) == flops.matmul_params(plain)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12)],
)
def test_peak_flops_by_device_kind(kind, peak):
    assert flops.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def test_mfu(monkeypatch):
    assert flops.mfu(1e6, 1e9) is None  # a CPU has no known peak
    monkeypatch.setattr(flops, "peak_flops", lambda device=None: 1e15)
    assert flops.mfu(1e6, 1e9) == pytest.approx(1 / jax.device_count())
