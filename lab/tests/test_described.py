"""`lab.benchmarks.described`: what a step takes on GPUs that are not here. That XLA compiles for them is not tested."""

import json

import jax
import pytest
from jax.experimental import topologies

from lab.benchmarks import described
from seqjax.errors import UserError


def test_without_the_plugin_for_cuda_it_says_what_is_missing(monkeypatch) -> None:
    def not_there(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", not_there)
    with pytest.raises(UserError, match=r"JAX describes no GPU here .* pip install 'seqjax\[cuda13\]'"):
        described.described(2)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() != 8, reason="eight devices wanted (XLA_FLAGS was given)")
def test_the_report_has_one_device_and_several(monkeypatch, tmp_path) -> None:
    """With CPU devices in place of those that are described."""
    monkeypatch.setattr(described, "described", lambda n_devices: jax.devices()[:n_devices])
    for step in ("begin", "pretend"):
        monkeypatch.setattr(described, step, lambda: None)
    size = ["--size=debug", "--batch=2", "--seq_len=32", "--mixers=transformer_pp", f"--json={tmp_path}/x.json"]
    described.main(["--devices=2", "--layouts=data,fsdp", *size])
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert list(results) == ["transformer_pp", "transformer_pp data=2", "transformer_pp fsdp=2"]
    exchanged = [result["exchanged_bytes"] for result in results.values()]
    assert exchanged[0] == 0 and 0 < exchanged[1] < exchanged[2], "sharded parameters are gathered as well"
    assert all(result["compiled_bytes"] > result["temp_bytes"] > 0 for result in results.values())
