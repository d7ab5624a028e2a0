"""FLOPs of the whole model by hand, and MFU."""

import types

import jax
import pytest

from seqjax.config import from_config_dict
from seqjax.models import Model, flops
from tests import support


def test_transformer_by_hand():
    """2 per matrix parameter, 4 d (T + 1) / 2 per layer for attention, and three times that to train."""
    from configs import transformer_pp

    config = from_config_dict(transformer_pp.get_config("110m"))
    model = Model(config.model, max_len=2048)
    matrices = 12 * (4 * 768**2 + 3 * 768 * 2048) + 32_000 * 768
    assert flops.matmul_params(model) == matrices
    forward = 2 * matrices + 12 * 4 * 768 * 2049 / 2
    assert flops.flops_per_token(model, 2048, train=False) == pytest.approx(forward)
    assert flops.flops_per_token(model, 2048) == pytest.approx(3 * forward)


def test_a_selection_has_no_backward():
    exact, approx = (support.tiny_model("top1_chunk", v) for v in ("exact", "approx"))
    for length in (23, 64):
        forward = flops.flops_per_token(exact, length, train=False)
        assert flops.flops_per_token(exact, length) < 3 * forward
        assert flops.flops_per_token(approx, length) < flops.flops_per_token(exact, length)
        selection = forward - flops.flops_per_token(approx, length, train=False)
        trained = flops.flops_per_token(exact, length) - flops.flops_per_token(approx, length)
        assert trained == pytest.approx(selection), "it counts once, in training too"


def test_tables_and_vectors_multiply_nothing():
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
def test_peaks(kind, peak):
    assert flops.peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def test_mfu(monkeypatch):
    assert flops.mfu(1e6, 1e9) is None, "nobody knows the peak of this CPU"
    monkeypatch.setattr(flops, "peak_flops", lambda device=None: 1e15)
    assert flops.mfu(1e6, 1e9) == pytest.approx(1 / jax.device_count())
