"""`--dry_run`: the numbers are those of the run, their source is said, and nothing is written."""

import dataclasses
import json
import math
import re
import sys

import jax
import pytest

from seqjax.commands import train
from seqjax.config import from_config_dict, presets
from seqjax.errors import UserError
from seqjax.models import Model, flops
from seqjax.training import dry_run
from seqjax.training import workdir as workdirs
from tests import support

ARGUMENT = "debug,train.batch_size=8"


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """A function that runs the command in an empty directory and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*args, config=f"top1_chunk:{ARGUMENT}"):
        before = {path: path.stat().st_mtime for path in tmp_path.rglob("*")}
        train.main([f"--config={config}", f"--config.data.cache_dir={tmp_path / 'cache'}", "--dry_run", *args])
        assert {path: path.stat().st_mtime for path in tmp_path.rglob("*")} == before, "something was written"
        return capsys.readouterr().out

    return run


def test_numbers_of_a_run(report, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)  # no step is timed
    out = report("--workdir=runs/x")
    config = train.from_config_dict(train.presets.read_config(f"top1_chunk:{ARGUMENT}"))
    workdirs.save_config(tmp_path / "runs" / "y", config)
    assert dry_run._workdir("runs/y", config) == "runs/y, which holds a run: it would be resumed"
    other = dataclasses.replace(config, size="other")
    assert dry_run._workdir("runs/y", other).startswith("NOT READY: runs/y holds a run with another config: size")
    argument = f"top1_chunk:{ARGUMENT},optim.warmup_steps=1,train.ends=(1.0,)"
    ends, longer = (from_config_dict(presets.read_config(argument + more)) for more in ("", ",train.steps=30"))
    workdirs.save_config(tmp_path / "runs" / "z", ends)
    assert dry_run._workdir("runs/z", longer) == "runs/z, which holds a run with other ends: it would be extended"
    model = Model(config.model, max_len=128)
    assert f"parameters   {flops.n_params(model):,}, of which {flops.matmul_params(model):,} multiply" in out
    assert "steps        20 of 8 x 128 = 1,024 tokens" in out
    assert "tokens       20,480, " in out
    assert f"FLOPs        {flops.flops_per_token(model, 128):,.0f} per token" in out
    assert re.search("workdir +runs/x, .*no run", out)
    assert "data         builtin" in out
    assert f"devices      {jax.device_count()} x cpu" in out
    assert "mesh         data=8 x fsdp=1 x" in out
    assert "each step    1 micro-batch of 8 sequences, 1 on each device" in out
    assert "time         unknown" in out
    # Parameters, Adam's two moments and its count, step and key, on every device of the data axis; and the batch.
    state, batch = exact(out)
    assert (state, batch) == (3 * 4 * flops.n_params(model) + 4 + 4 + 8, 4 * 129)
    kept = float(re.search(r"per device: ([\d.]+) MiB parameters, optimiser and batch", out)[1])
    assert kept == pytest.approx((state + batch) / 2**20, abs=0.01)
    assert "blocks.*.mixer.{k,q,v}.w x2 " in out
    whole, temporary = (float(re.search(rf"([\d.]+) MiB {what}", out)[1]) for what in ("per device", "gradients"))
    assert whole == pytest.approx(kept + temporary, abs=0.02)
    assert temporary > 0


def test_groups_and_where_weight_decay_applies(report, tmp_path, monkeypatch):
    """Arrays count per layer. A run that began by an earlier rule is described by it."""
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    monkeypatch.setattr(dry_run.Step, "compile", lambda step: None)  # three programs, for lines that do not need them
    monkeypatch.setattr(dry_run, "_memory", lambda compiled, **given: (0, "not measured"))
    mamba = "mamba1:debug,train.batch_size=8,model.dim=32,model.n_layers=2,model.vocab_size=258"
    out = report("--config.optim.weight_decay=0.1", config=mamba)
    groups = {
        "matrix": (12, 2 * (32 * 64 * 2 + 64 * 2 + 64 * 32 + 2 * 64 + 64 * 32)),  # x, z, delta, bc, dt, out
        "vector": (11, 2 * (64 + 64 + 64 * 16 + 64 + 32) + 32),  # conv.b, dt_bias, a_log, skip, norm; the last norm
        "embedding": (1, 258 * 32),
        "convolution": (2, 2 * 64 * 4),
    }
    lines = [f"{group:<11} {arrays} arrays, {elements:,} parameters" for group, (arrays, elements) in groups.items()]
    heads = ["groups       ", *[" " * 13] * 3]
    assert "\n".join(head + line for head, line in zip(heads, lines, strict=True)) in out
    assert "\ndecay        0.1 on matrices\n" in out
    assert "\ndecay        none\n" in report(config=mamba)
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "run.json").write_text("{}")
    out = report("--config.optim.weight_decay=0.1", "--workdir=runs/old", config=mamba)
    assert "\ndecay        0.1 on every array with more than one axis per layer" in out


def test_muon_and_its_memory(report, monkeypatch):
    """Muon keeps one moment of its matrices, Adam two of the other parameters; the table has each parameter's rule."""
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    monkeypatch.setattr(dry_run.Step, "compile", lambda step: None)
    monkeypatch.setattr(dry_run, "_memory", lambda compiled, **given: (0, "not measured"))
    small = f"transformer_pp:{ARGUMENT},model.dim=64,model.n_layers=2,model.vocab_size=258,model.mlp.dim=128"
    out = report(config=f"{small},optim.name=muon,optim.lr=0.02,optim.adam_lr=1e-3,optim.schedule=cosine")
    matrices, others = 2 * (4 * 64**2 + 3 * 64 * 128), 258 * 64 + 2 * 2 * 64 + 64
    state = f"{matrices * 4 / 1024 + 4 / 1024:.2f} KiB"
    assert f"optimiser    muon        14 arrays, {matrices:,} parameters, lr 0.02, state {state} on each" in out
    state = f"{others * 8 / 1024 + 4 / 1024:.2f} KiB"
    assert f"             adam        6 arrays, {others:,} parameters, lr 0.001, state {state} on each" in out
    assert exact(out)[0] == 4 * (matrices + others) + 4 * matrices + 8 * others + 4 + 4 + 4 + 8
    assert "schedule     cosine, " in out
    rules = {line.split()[0]: line.split()[-3] for line in out.splitlines() if line.startswith(("blocks.", "embed "))}
    assert rules["blocks.*.mixer.{k,q,v}.w"] == "muon" and rules["embed"] == rules["blocks.*.{norm1,norm2}.g"] == "adam"
    with pytest.raises(UserError, match=r"config\.optim\.name='muon'.*config\.model\.dim"):
        report(config=f"transformer_pp:{ARGUMENT},model.dim=32,optim.name=muon")


def exact(out) -> tuple[int, int]:
    """The bytes of state and batch on each device."""
    state, batch = (re.search(rf"{what} +([\d,]+) bytes on each device", out)[1] for what in ("state", "batch"))
    return int(state.replace(",", "")), int(batch.replace(",", ""))


MESHES = [{"data": 1}, {"data": 2}, {"fsdp": 4}, {"tensor": 2, "data": 2}, {"data": 1, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("mesh", support.slow_unless(lambda mesh: len(mesh) == 3, MESHES), ids=str)
def test_simulated_devices(mesh, report, monkeypatch):
    """Bytes are those that so many devices hold, of which XLA's analysis knows as well; what it compiled is said."""
    count, seen = math.prod(mesh.values()), []
    memory = dry_run._memory
    monkeypatch.setattr(dry_run, "_memory", lambda step, **given: seen.append(step) or memory(step, **given))
    sizes = [f"--config.mesh.{axis}={n}" for axis, n in mesh.items()]
    out = report(f"--devices={count}", *sizes)
    assert f"devices      {count} x simulated CPU" in out
    assert "(XLA's analysis" in out
    assert re.search("time +unknown: .*simulated", out)
    arguments = seen[0].memory_analysis().argument_size_in_bytes
    assert sum(exact(out)) + 4 == arguments, "but for the learning rate"


def test_devices_that_cannot_be_simulated(report):
    with pytest.raises(UserError, match=r"--devices=0: .*number"):
        report("--devices=0")
    with pytest.raises(UserError, match=r"JAX .* 8 CPU .* 9 "):
        report("--devices=9")
    with pytest.raises(UserError, match=r"batch_size=8 .*data=3.* 6 and 9\."):
        report("--devices=3")
    with pytest.raises(UserError, match=r"--devices .*--dry_run.*CUDA_VISIBLE_DEVICES"):
        train.main(["--config=top1_chunk:debug", "--devices=4"])


@pytest.mark.slow  # a process of its own, in which JAX has not started
def test_more_devices_than_this_machine_has(tmp_path):
    flags = support.environment("--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-m", "seqjax", "train", "--dry_run", "--devices=16", "--config.mesh.fsdp=4"]
    done = support.run([*command, "--config=top1_chunk:debug,train.batch_size=8", f"--workdir={tmp_path}"], env=flags)
    assert re.search("batch_size=8 .*data=4 x fsdp=4 ", done.stderr)
    done = support.run([*command, "--config=top1_chunk:debug,train.batch_size=32", f"--workdir={tmp_path}"], env=flags)
    assert done.returncode == 0, done.stderr
    assert "devices      16 x simulated" in done.stdout
    assert "each step    1 micro-batch of 32 sequences, 2 on each device" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_time_of_a_few_steps(report):
    out = report()
    assert re.search(r"time +\d.* at [\d,]+ tokens/s \(3 steps ", out), out
    assert re.search("workdir +a new .*runs/", out)


def test_time_that_was_recorded(report, tmp_path, monkeypatch):
    path = tmp_path / "speeds.json"
    monkeypatch.setattr(dry_run, "SPEEDS", path)
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    config = train.from_config_dict(train.presets.read_config(f"top1_chunk:{ARGUMENT}"))
    model = Model(config.model, max_len=128)
    same = {"name": "top1_chunk", "device": "cpu", "size": "debug", "seq_len": 128, "batch": 16, "remat": "none"}
    same |= {"params": flops.n_params(model), "flops_per_token": flops.flops_per_token(model, 128)}
    rule = "top1_chunk:model.mixer.selection"
    others = {"device": "NVIDIA H200"}, {"seq_len": 2048}, {"flops_per_token": 1.0}, {"name": f"{rule}=best_key"}
    entries = [same | {"tokens_per_s": 1e9} | other for other in others]
    entries += [same | {"tokens_per_s": 32.0}, same | {"name": f"{rule}=exact", "tokens_per_s": 64.0}]
    entries = [entry | {"file": f"{i}.json"} for i, entry in enumerate(entries)]
    path.write_text(json.dumps({"speeds": entries}))
    out = report()
    speed = 64 * jax.device_count()
    assert f"at {speed:,} tokens/s (5.json, batch 16, remat none;" in out


def test_a_run_that_does_not_fit(report, monkeypatch):
    monkeypatch.setattr(dry_run, "_limit", lambda device: 1000)
    out = report()
    assert re.search("MORE .* 1000 B .*config.train.per_device_batch_size", out)
    assert "time         unknown" in out, "it is not tried"
    assert "raise config.train.accumulate," in report("--config.train.accumulate=1")


def test_the_state_that_does_not_fit_is_said_before_the_step_is_compiled(report, monkeypatch):
    """A state of 48 GB is not allocated, and nothing waits for the compiler to say so."""

    def compiled(step):
        raise RuntimeError("compiles")

    monkeypatch.setattr(dry_run.Step, "compile", compiled)
    monkeypatch.setattr(dry_run, "_limit", lambda device: 2**34)
    said = []
    config = from_config_dict(presets.read_config("transformer_pp:debug,train.batch_size=8,model.vocab_size=62500000"))
    with pytest.raises(RuntimeError, match="compiles"):
        for line in dry_run.describe(config, None):
            said.append(line)
    assert "state and batch are MORE than the 16.00 GiB of this machine" in said[-1]


def test_the_memory_of_a_cpu_is_the_machines_or_the_containers(tmp_path, monkeypatch):
    whole = dry_run._limit(jax.devices("cpu")[0])
    assert whole is not None and whole > 2**28
    paths = [tmp_path / name for name in ("memory.max", "absent")]
    monkeypatch.setattr(dry_run, "CGROUP_LIMITS", paths)
    paths[0].write_text("max\n")
    machine = dry_run._limit(jax.devices("cpu")[0])
    assert machine is not None and machine >= whole
    paths[0].write_text("12345678\n")
    assert dry_run._limit(jax.devices("cpu")[0]) == 12345678
    one, several = jax.devices("cpu")[:1], jax.devices("cpu")
    assert dry_run._excess(12345678, one) == ""
    assert "11.77 MiB of this machine" in dry_run._excess(12345679, one)
    assert len(several) == 1 or dry_run._excess(12345678, several), "devices of a CPU share its memory"


def test_a_config_is_measured_on_one_device(monkeypatch):
    config = from_config_dict(
        presets.read_config("transformer_pp:debug,model.dim=16,model.n_layers=1,train.seq_len=16")
    )
    said = []
    found = dry_run.measure(config, say=said.append)
    assert found.tokens_per_s is not None and found.tokens_per_s > 0 and found.excess == "" and len(said) == 1
    monkeypatch.setattr(dry_run, "_limit", lambda device: 1000)
    found = dry_run.measure(config, say=said.append)
    assert found.tokens_per_s is None and "MORE than the 1000 B" in found.excess
    monkeypatch.setattr(dry_run, "_limit", lambda device: None)
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    assert dry_run.measure(config, say=said.append) == (None, "") and len(said) == 1


def test_a_backend_without_an_analysis():
    class Compiled:
        def memory_analysis(self):
            return None

    assert dry_run._memory(Compiled(), resident_bytes=2**30, program="the compiled step") == (
        2**30,
        "1.00 GiB at least, for parameters, optimiser and batch; this backend gives no memory analysis",
    )


def test_prepared_blocks_are_looked_at(blocks_dir, report, monkeypatch):
    monkeypatch.setattr(dry_run, "CPU_FLOPS", 0)
    settings = support.run_settings(blocks_dir, train__steps=100)
    argument = ",".join(["debug", *(f"{key}={value}" for key, value in settings.items())])
    out = report(config=f"transformer_pp:{argument}")
    assert re.search(rf"data +{blocks_dir}: [\d,]+ .*commoncrawl, c4, .*[\d.]+ times", out), out
    out = report(f"--config.data.path={blocks_dir / 'absent'}", config=f"transformer_pp:{argument}")
    assert "data         NOT READY: config.data.path: no directory" in out


def test_what_cannot_be_trained_is_refused(report):
    with pytest.raises(UserError, match=r"batch_size=4 .*data=8"):
        report(config="top1_chunk:debug")
