"""Test `lab.benchmarks.described`, except XLA's compilation for absent GPUs."""

import json

import jax
import pytest
from jax.experimental import topologies

from lab.benchmarks import described
from seqjax.errors import UserError


def test_missing_cuda_plugin_is_reported(monkeypatch) -> None:
    def unimplemented(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", unimplemented)
    with pytest.raises(UserError, match=r"seqjax\[cuda13\]"):
        described.described(2)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() != 8, reason="needs eight devices (XLA_FLAGS)")
def test_report_has_one_device_and_several(monkeypatch, tmp_path) -> None:
    """Use CPU devices instead of virtual GPUs."""
    monkeypatch.setattr(described, "described", lambda n_devices: jax.devices()[:n_devices])
    for step in ("begin", "pretend"):
        monkeypatch.setattr(described, step, lambda: None)
    size = ["--size=debug", "--batch=2", "--seq_len=32", "--mixers=transformer_pp", f"--json={tmp_path}/x.json"]
    described.main(["--devices=2", "--layouts=data,fsdp", *size])
    results = json.loads((tmp_path / "x.json").read_text())["results"]
    assert list(results) == ["transformer_pp", "transformer_pp data=2", "transformer_pp fsdp=2"]
    exchanged = [result["exchanged_bytes"] for result in results.values()]
    assert exchanged[0] == 0 and 0 < exchanged[1] < exchanged[2], "FSDP also gathers the parameters"
    assert all(result["compiled_bytes"] > result["temp_bytes"] > 0 for result in results.values())
