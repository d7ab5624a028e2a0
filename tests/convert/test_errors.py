"""What a conversion refuses and what it says then, and the commands from end to end."""

import importlib
import json
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from seqjax.config import from_config_dict
from seqjax.convert import __main__ as command
from seqjax.convert import export_weights, import_weights
from seqjax.convert.weights import FAMILIES, family_of
from seqjax.errors import UserError
from seqjax.models import Model
from seqjax.training import evaluate
from seqjax.training.loop import train
from tests import support
from tests.convert.cases import CASES, GOLDEN, config_of, copied


# -------------------------------------------------------------------------------------------------------------- errors
def test_wrong_tensors_are_named(tmp_path):
    path, tensors = copied("llama", tmp_path)
    tensors["model.layers.1.mlp.up_projection.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.weight"] = np.ones(25, np.float32)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError) as error:
        import_weights(path, config_of("llama"))
    text = str(error.value)
    up = "model.layers.1.mlp.up_proj"
    assert f"missing: {up}.weight [40, 24] (nearest in the file: {up}ection.weight)" in text
    assert f"not expected: {up}ection.weight [40, 24] (nearest expected: {up}.weight)" in text
    assert "another shape: model.norm.weight [25], expected [24]" in text


def test_a_type_that_is_no_weight(tmp_path):
    path, tensors = copied("llama", tmp_path)
    tensors["model.norm.weight"] = np.ones(24, np.int8)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"model\.norm\.weight in .* is I8; known: F32, BF16, F16"):
        import_weights(path, config_of("llama"))


def test_a_missing_head_may_be_tied(tmp_path):
    path, tensors = copied("llama", tmp_path)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight.*config\.model\.tie_embeddings=True"):
        import_weights(path, config_of("llama"))
    del tensors["model.norm.weight"]  # a file that lacks more is of another model
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight(?!.*tie_embeddings)"):
        import_weights(path, config_of("llama"))


@pytest.mark.parametrize(
    ("family", "ours", "fix"),
    [
        ("llama", {"model__dim": 32}, "hidden_size is 24, this config has 32 (model.dim=24)"),
        ("llama", {"model__norm_eps": 1e-5}, "rms_norm_eps is 1e-06, this config has 1e-05 (model.norm_eps=1e-06)"),
        ("llama", {"model__mixer__rope_base": 1e4}, "(model.mixer.rope_base=50000.0)"),
        ("llama", {"model__mixer__kv_heads": None}, "(model.mixer.kv_heads=2)"),
        ("llama", {"model__mlp__kind": "geglu"}, "(model.mlp.kind=swiglu)"),
        ("llama", {"model__tie_embeddings": True}, "(model.tie_embeddings=False)"),
        ("llama", {"model__mixer__qk_norm": True}, "config.model.mixer.qk_norm must be False, not True"),
        ("llama", {"model__mixer__rope_scaling": "linear"}, "(model.mixer.rope_scaling=none)"),
        ("llama3", {"model__mixer__rope_scaling": "none"}, "(model.mixer.rope_scaling=llama3,model.mixer.rope_f"),
        ("llama3", {"model__mixer__rope_original_len": 8192}, ",model.mixer.rope_original_len=16)"),
        ("qwen2", {"model__mixer__qkv_bias": None}, "config.model.mixer.qkv_bias must be True, not None"),
        ("qwen3", {"model__mixer__qk_norm_eps": 1e-5}, "1e-05 (model.mixer.qk_norm_eps=1e-06)"),
        ("qwen3", {"model__mixer__bias": True}, "attention_bias is False, this config has True (model."),
        ("gpt2", {"train__seq_len": 64}, "(train.seq_len=32)"),
        ("gpt2", {"model__mlp__approximate_gelu": False}, "(model.mlp.approximate_gelu=True)"),
        ("mamba", {"model__mixer__dt_rank": None}, "time_step_rank is 3, this config has 1 (model.mixer.dt_rank=3)"),
        ("rwkv7", {"model__mixer__heads": 4}, "(model.mixer.heads=2)"),
        ("deltanet", {"model__mixer__value_dim": 64}, "(model.mixer.value_dim=32)"),
        ("gated_deltanet", {"model__mixer__key_dim": 16, "model__mixer__value_dim": 48}, "(model.mixer.key_dim=24)"),
    ],
)  # fmt: skip
def test_the_public_config_names_what_to_change(family, ours, fix):
    with pytest.raises(UserError) as error:
        import_weights(GOLDEN / family, config_of(family, **ours))
    assert fix in str(error.value)
    assert "Add to --config: " in str(error.value)


@pytest.mark.parametrize("family", CASES)
def test_what_the_error_says_to_add_is_enough(family):
    """The debug size of every family, and the last line of the error: then it fits."""
    name = CASES[family][0]
    get_config = importlib.import_module(f"configs.{name}").get_config
    with pytest.raises(UserError) as error:
        import_weights(GOLDEN / family, from_config_dict(get_config("debug")))
    hint = str(error.value).partition("Add to --config: ")[2]
    import_weights(GOLDEN / family, from_config_dict(get_config(f"debug,{hint}")))


@pytest.mark.parametrize(
    ("family", "theirs"),
    [
        ("llama3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
        ("mamba2", {"n_groups": 8}),
        ("mamba2", {"time_step_limit": [0.0, 0.1]}),
        ("mamba2", {"layer_norm_epsilon": 1e-6}),
        ("rwkv7", {"norm_eps": 1e-5}),
        ("rwkv7", {"value_dim": [32, 32, 64]}),
        ("deltanet", {"use_gate": True}),
        ("gated_deltanet", {"allow_neg_eigval": True}),
    ],
)
def test_what_seqjax_does_not_compute_is_refused(family, theirs, tmp_path):
    path, _ = copied(family, tmp_path, with_config=True, **theirs)
    with pytest.raises(UserError, match="and cannot have that"):
        import_weights(path, config_of(family))


def test_another_architecture(tmp_path):
    with pytest.raises(UserError, match=r"of a 'llama', but config\.model\.mixer\.name='mamba1' takes mamba"):
        import_weights(GOLDEN / "llama", config_of("mamba"))
    with pytest.raises(UserError, match=r"config\.model\.mixer\.qk_norm must be False, not True"):
        import_weights(GOLDEN / "llama", config_of("llama", model__mixer__qk_norm=True))
    for family, key in (
        ("llama", "mixer.conv"),
        ("gpt2", "mixer.conv"),
        ("gpt2", "mixer.gate"),
        ("mamba", "token_shift"),
    ):
        config = config_of(family, **{f"model.{key}".replace(".", "__"): True})
        with pytest.raises(UserError, match=rf"config\.model\.{key} must be False, not True"):
            import_weights(GOLDEN / family, config)
        with pytest.raises(UserError, match=rf"config\.model\.{key} must be False, not True"):
            export_weights({}, config, tmp_path / family / "model.safetensors")
    with pytest.raises(UserError, match="'top1_chunk' has no public twin"):
        import_weights(GOLDEN / "llama", support.tiny("top1_chunk"))
    with pytest.raises(UserError, match="'based_conv, based_linear, transformer_pp' has no public twin"):
        import_weights(GOLDEN / "llama", from_config_dict(importlib.import_module("configs.based").get_config("debug")))
    with pytest.raises(UserError, match=r"heads of 16 it is 4e-05, not config\.model\.norm_eps=1e-05"):
        import_weights(copied("rwkv7", tmp_path)[0], config_of("rwkv7", model__norm_eps=1e-5))
    config = config_of("deltanet", model__mixer__norm_eps=1e-5)
    params = import_weights(copied("deltanet", tmp_path)[0], config)
    with pytest.raises(UserError, match=r"one norm_eps, .* 1e-06 and 1e-05"):
        export_weights(params, config, tmp_path / "out" / "model.safetensors")


def test_files_that_are_not_weights(tmp_path):
    config = config_of("llama")
    for name, match in (
        ("model.bin", "Pickled weights .* can run code"),
        ("model.safetensors", "not a whole .safetensors file"),
    ):
        (tmp_path / name).write_bytes(b"no weights, whatever it is called")
        with pytest.raises(UserError, match=match):
            import_weights(tmp_path / name, config)
    with pytest.raises(UserError, match="there is no file"):
        import_weights(tmp_path / "nowhere.safetensors", config)
    with pytest.raises(UserError, match=r"holds 0 \.safetensors files"):
        (tmp_path / "empty").mkdir()
        import_weights(tmp_path / "empty", config)


def test_float16_that_overflows(tmp_path):
    config = config_of("llama")
    params = import_weights(GOLDEN / "llama", config)
    params["embed"][3, 4] = 1e6
    with pytest.raises(UserError, match=r"embed_tokens\.weight holds 1e\+06, more than float16 can"):
        export_weights(params, config, tmp_path / "model.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ commands
@pytest.fixture
def imported(corpus_cache, tmp_path):
    """A workdir with the tiny Llama, whose vocabulary holds bytes, by the command; and its --config."""
    config = f"configs/transformer_pp.py:debug,{CASES['llama'][1]},data.cache_dir={corpus_cache}"
    config += ",train.steps=2,train.batch_size=8,train.seq_len=32,eval.tokens=64,log.tensorboard=False"
    config += ",log.sample_tokens=0"
    workdir = tmp_path / "imported"
    args = ["import", f"--weights={GOLDEN / 'llama'}", f"--config={support.ROOT / config}", f"--workdir={workdir}"]
    command.main(args)
    return workdir, args


@pytest.mark.slow
def test_import_evaluate_generate_export(imported, tmp_path):
    """As a user types it, in processes of their own."""
    workdir, _ = imported
    for args in (["evaluate"], ["generate", "--prompt=Once", "--max_new_tokens=3", "--temperature=0"]):
        module, *rest = args
        result = support.run([sys.executable, "-m", f"seqjax.{module}", f"--workdir={workdir}", *rest])
        assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once")
    losses = json.loads((workdir / "evaluation.json").read_text())["loss"]
    assert all(4 < loss < 12 for loss in losses.values()), "random weights know nothing of text"
    out = tmp_path / "out" / "model.safetensors"
    export = [
        sys.executable,
        "-m",
        "seqjax.convert",
        "export",
        f"--workdir={workdir}",
        f"--out={out}",
        "--dtype=float16",
    ]
    result = support.run(export)
    assert result.returncode == 0, result.stderr
    want = safetensors.numpy.load_file(GOLDEN / "llama" / "model.safetensors")
    got = safetensors.numpy.load_file(out)
    assert all((got[name] == x).all() for name, x in want.items())
    assert got.keys() == want.keys()
    result = support.run([*export[:-2], f"--out={workdir / 'model.safetensors'}"])
    assert result.returncode == 2
    assert "export into a directory of its own" in result.stderr


@pytest.mark.slow  # a whole run
def test_training_starts_from_imported_weights(imported):
    """With a fresh optimiser; afterwards the workdir is like any other."""
    workdir, args = imported
    config, model, before, step, _ = evaluate.restore(workdir)
    before = jax.device_get(before)
    assert step == 0
    assert train(config, workdir)
    _, _, after, step, _ = evaluate.restore(workdir)
    assert step == 2
    # warm-up lasts longer than this run: Adam's first steps are smaller than the learning rate
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), after, before)
    assert all(0 < x < 2 * config.optim.lr for x in jax.tree.leaves(moved))
    assert model.config == config.model
    with pytest.raises(UserError, match="holds a run; import into a --workdir of its own"):
        command.main(args)


def test_what_the_command_refuses(tmp_path):
    with pytest.raises(UserError, match=r"--config: there is no Python file nowhere\.py"):
        command.main(["import", "--weights=x", "--config=nowhere.py:debug", f"--workdir={tmp_path}"])
    with pytest.raises(UserError, match=r"are model\.safetensors; give the directory"):
        command.main(["export", f"--workdir={tmp_path}", "--out=weights.bin"])


def test_the_documentation_names_every_family():
    text = (support.ROOT / "docs" / "convert.md").read_text()
    for name, families in FAMILIES.items():
        assert f"`configs/{name}.py`" in text
        for family in families:
            assert family.name in text
            for key in family.needs:
                assert key.removeprefix("model.") in text, f"{name}: {key}"


@pytest.mark.parametrize("family", CASES)
def test_a_head_that_differs_in_one_number_is_not_lost(family, tmp_path):
    """Files of all families may repeat a tied embedding as their head, also without the prefix of their names."""
    config = config_of(family, model__tie_embeddings=True)
    path, prefix = tmp_path / "model.safetensors", family_of(config).prefix
    shapes = Model(config.model, max_len=config.train.seq_len).shapes
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    params["embed"] += np.random.default_rng(0).standard_normal(params["embed"].shape, np.float32)
    export_weights(params, config, path)
    (tmp_path / "config.json").unlink()
    tensors = safetensors.numpy.load_file(path)
    (embed,) = (x for x in tensors.values() if np.array_equal(x, params["embed"]))
    for names in (tensors, {name.removeprefix(prefix): x for name, x in tensors.items()}):
        safetensors.numpy.save_file(names | {"lm_head.weight": embed}, path)
        import_weights(path, config)
        for head in (embed + np.eye(*embed.shape, dtype=np.float32), embed[:-1]):
            safetensors.numpy.save_file(names | {"lm_head.weight": np.ascontiguousarray(head)}, path)
            with pytest.raises(UserError, match=r"lm_head\.weight.*config\.model\.tie_embeddings=False"):
                import_weights(path, config)
