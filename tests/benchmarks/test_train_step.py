"""Test benchmarks.train_step: its step equals the trainer's step; its reports and layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import train_step
from benchmarks.harness import report
from seqjax.errors import UserError
from seqjax.models import Model, flops
from seqjax.sharding import batch_sharding, make_mesh
from seqjax.training import schedule
from seqjax.training.step import init_state, make_train_step

SMALL = ":model.n_layers=1,model.vocab_size=64"


@pytest.mark.slow  # compiles both steps on eight devices
def test_sharded_step_equals_the_trainer_step() -> None:
    """Compare data 2 x fsdp 2 x tensor 2 with a plain jit on one device."""
    settings = f"{SMALL},mesh.data=2,mesh.fsdp=2,mesh.tensor=2"
    config = train_step.configured("transformer_pp" + settings, "debug", batch=8, seq_len=16)
    stepper = train_step.Stepper(config)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    assert stepper.tokens.sharding == batch_sharding(mesh, leading=1)
    split = [x for x in jax.tree.leaves(stepper.state.params) if not x.sharding.is_fully_replicated]
    assert len(split) > 3, "too few parameters are split"
    (state_in, _, _), _ = stepper.compiled.input_shardings
    for spec, x in zip(jax.tree.leaves(state_in), jax.tree.leaves(stepper.state), strict=True):
        assert spec.is_equivalent_to(x.sharding, x.ndim)

    model = Model(config.model, max_len=16)
    optimizer = schedule.optimizer(config.optim)
    state = init_state(model, optimizer, jax.random.key(config.train.seed))
    _, want = jax.jit(make_train_step(model, optimizer))(state, np.asarray(stepper.tokens), config.optim.lr)
    before = stepper.state
    got = stepper()
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-4)
    assert int(stepper.state.step) == 1
    assert jax.tree.leaves(before.params)[0].is_deleted(), "the step does not reuse the buffers of its state"


@pytest.mark.slow
def test_small_run_is_written_plotted_and_compared(tmp_path, capsys) -> None:
    path = tmp_path / "new.json"
    name = "transformer_pp:train.batch_size=8"  # one sequence per device of the tests
    train_step.main(["--quick", f"--mixers=transformer_pp:train.batch_size=7,{name}", f"--json={path}"])
    written = report.load(path)
    assert written["settings"]["size"] == "debug"
    assert "batch_size=7 sequences cannot" in written["results"]["transformer_pp:train.batch_size=7"]["error"]
    result = written["results"][name]
    assert result["tokens_per_s"] == np.median(result["runs"])
    assert np.isfinite(result["loss"])
    config = train_step.configured("transformer_pp", "debug", batch=0, seq_len=0)
    assert result["flops_per_token"] == flops.flops_per_token(
        Model(config.model, max_len=config.train.seq_len), config.train.seq_len
    )
    assert path.with_suffix(".png").stat().st_size > 1000
    report.save(path, {**written, "results": {name: {"tokens_per_s": 1e-3 * result["tokens_per_s"]}}})
    capsys.readouterr()
    train_step.main(["--quick", f"--mixers={name}", f"--against={path}", f"--json={tmp_path}/again.json"])
    again = report.load(tmp_path / "again.json")["results"][name]["tokens_per_s"]
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("transformer_pp"))
    assert float(line.split()[-1]) == pytest.approx(1e3 * again / result["tokens_per_s"], rel=1e-3)


@pytest.mark.slow
def test_scaling_is_relative_to_one_device_in_the_same_run(tmp_path, capsys) -> None:
    name, path = "transformer_pp:model.n_layers=1", tmp_path / "x.json"
    train_step.main(["--quick", "--devices=4", "--layouts=fsdp", f"--mixers={name}", f"--json={path}"])
    results = report.load(path)["results"]
    one, four = results[name], results[f"{name} fsdp=4"]
    assert (one["devices"], four["devices"], "scaling" in one) == (1, 4, False)
    assert four["scaling"] == four["tokens_per_s"] / (4 * one["tokens_per_s"])
    assert four["compiled_bytes"] < one["compiled_bytes"], "memory is per device, and parameters are split"
    line = next(line for line in capsys.readouterr().out.splitlines() if "fsdp=4" in line)
    assert float(line.split()[-3]) == pytest.approx(four["scaling"], abs=1e-3)


def test_layouts_set_mesh_and_batch() -> None:
    config = train_step.configured("mamba2:mesh.tensor=2", "debug", batch=3, seq_len=16)
    layouts = train_step.layouts(config, 4, ["data", "fsdp", "seq"])
    sizes = {name: (*dataclasses.astuple(c.mesh), c.train.batch_size) for name, c in layouts.items()}
    assert sizes == {
        "": (1, 1, 1, 1, 3),
        "data=4": (4, 1, 1, 1, 12),
        "fsdp=4": (1, 4, 1, 1, 12),
        "seq=4": (1, 1, 4, 1, 3),
    }


def test_too_many_devices_are_refused() -> None:
    with pytest.raises(UserError, match=r"--devices=9.* 8"):
        train_step.main(["--devices=9"])
    with pytest.raises(UserError, match=r"--layouts=tensor"):
        train_step.main(["--devices=2", "--layouts=tensor"])


def test_exceeded_budget_is_reported(tmp_path, capsys) -> None:
    train_step.main(["--mixers=mamba2", "--seconds=-1", f"--json={tmp_path}/x.json"])
    assert "--seconds=-1.0" in capsys.readouterr().out


def test_parts_of_a_hybrid_have_one_mixer_each() -> None:
    config = train_step.configured("gated_deltanet_hybrid", "debug", batch=0, seq_len=0)
    of = train_step.parts(config)
    assert {key: part.share for key, part in of.items()} == {"layers=0": 0.75, "layers=1": 0.25}
    assert [part.config.model.mixer for part in of.values()] == list(dict.fromkeys(config.model.mixer))
    assert train_step.parts(train_step.configured("transformer_pp", "debug", batch=0, seq_len=0)) == {}


def test_a_hybrid_is_compared_with_the_weighted_mean_of_its_layers() -> None:
    results = {
        "h layers=0": {"tokens_per_s": 10.0, "share": 0.75},
        "h layers=1": {"tokens_per_s": 5.0, "share": 0.25},
    }
    result = {"tokens_per_s": 4.0, "devices": 1}
    train_step.add_ratio(results, "h", "", result)
    assert result["of_layers"] == pytest.approx((1 / 4) / (0.75 / 10 + 0.25 / 5))
    failed = {"tokens_per_s": 4.0, "devices": 1}
    train_step.add_ratio(results | {"h layers=1": {"error": "x"}}, "h", "", failed)
    assert "of_layers" not in failed


def test_cache_bytes_of_attention() -> None:
    config = train_step.configured("transformer_pp", "debug", batch=0, seq_len=0)
    model = Model(config.model, max_len=64)
    got = train_step.cache_bytes(model, 64)
    keys_and_values = 2 * 64 * config.model.dim * jnp.dtype(model.dtype).itemsize
    assert got == config.model.n_layers * (keys_and_values + 4), "4 bytes: the cache's length"


def test_parts_are_not_measured_on_several_devices() -> None:
    with pytest.raises(UserError, match="--parts"):
        train_step.main(["--quick", "--devices=2", "--parts", "--mixers=transformer_pp"])
