"""Conversion errors, and the import and export commands end to end."""

import importlib
import json
import re
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from seqjax.config import from_config_dict
from seqjax.convert import __main__ as command
from seqjax.convert import export_weights, import_weights, public_config
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
    assert re.search(rf"missing: {up}\.weight \[40, 24\] \(nearest[^)]*{up}ection\.weight\)", text)
    assert re.search(rf"not expected: {up}ection\.weight \[40, 24\] \([^)]*{up}\.weight\)", text)
    assert "model.norm.weight [25], expected [24]" in text


def test_integer_weights_are_refused(tmp_path):
    path, tensors = copied("llama", tmp_path)
    tensors["model.norm.weight"] = np.ones(24, np.int8)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"model\.norm\.weight.* I8.*F32, BF16, F16"):
        import_weights(path, config_of("llama"))


def test_missing_head_suggests_tied_embeddings(tmp_path):
    path, tensors = copied("llama", tmp_path)
    del tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight.*config\.model\.tie_embeddings=True"):
        import_weights(path, config_of("llama"))
    del tensors["model.norm.weight"]  # More missing tensors: another model, so no such hint.
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match=r"missing: lm_head\.weight(?!.*tie_embeddings)"):
        import_weights(path, config_of("llama"))


@pytest.mark.parametrize(
    ("family", "overrides", "fix"),
    [
        ("llama", {"model__dim": 32}, r"hidden_size .*24.*32 \(model\.dim=24\)"),
        ("llama", {"model__norm_eps": 1e-5}, r"rms_norm_eps .*1e-06.*1e-05 \(model\.norm_eps=1e-06\)"),
        ("llama", {"model__mixer__rope_base": 1e4}, r"\(model\.mixer\.rope_base=50000\.0\)"),
        ("llama", {"model__mixer__kv_heads": None}, r"\(model\.mixer\.kv_heads=2\)"),
        ("llama", {"model__mlp__kind": "geglu"}, r"\(model\.mlp\.kind=swiglu\)"),
        ("llama", {"model__tie_embeddings": True}, r"\(model\.tie_embeddings=False\)"),
        ("llama", {"model__mixer__qk_norm": True}, r"config\.model\.mixer\.qk_norm .*False.*True"),
        ("llama", {"model__mixer__rope_share": 2 / 3}, r"config\.model\.mixer\.rope_share .*1\.0.*0\.6"),
        ("llama", {"model__mixer__rope_scaling": "linear"}, r"\(model\.mixer\.rope_scaling=none\)"),
        ("llama3", {"model__mixer__rope_scaling": "none"}, r"\(model\.mixer\.rope_scaling=llama3,model\.mixer\.rope_f"),
        ("llama3", {"model__mixer__rope_original_len": 8192}, r",model\.mixer\.rope_original_len=16\)"),
        ("qwen2", {"model__mixer__qkv_bias": None}, r"config\.model\.mixer\.qkv_bias .*True.*None"),
        ("qwen3", {"model__mixer__qk_norm_eps": 1e-5}, r"1e-05 \(model\.mixer\.qk_norm_eps=1e-06\)"),
        ("qwen3", {"model__mixer__bias": True}, r"attention_bias .*False.*True \(model\."),
        ("gpt2", {"train__seq_len": 64}, r"\(train\.seq_len=32\)"),
        ("gpt2", {"model__mlp__approximate_gelu": False}, r"\(model\.mlp\.approximate_gelu=True\)"),
        ("mamba", {"model__mixer__dt_rank": None}, r"time_step_rank .*3.*1 \(model\.mixer\.dt_rank=3\)"),
        ("rwkv7", {"model__mixer__heads": 4}, r"\(model\.mixer\.heads=2\)"),
        ("deltanet", {"model__mixer__value_dim": 64}, r"\(model\.mixer\.value_dim=32\)"),
        ("gated_deltanet", {"model__mixer__value_heads": 4}, r"config\.model\.mixer\.value_heads .*None.*4"),
        ("gated_deltanet", {"model__mixer__key_dim": 16, "model__mixer__value_dim": 48}, r"\(model\.mixer\.key_dim=24"),
    ],
)  # fmt: skip
def test_config_mismatch_lists_overrides(family, overrides, fix):
    with pytest.raises(UserError, match=rf"{fix}(?s:.*)Add to --config: "):
        import_weights(GOLDEN / family, config_of(family, **overrides))


@pytest.mark.parametrize("family", CASES)
def test_listed_overrides_are_sufficient(family):
    """The overrides in the error turn the debug size into the golden model."""
    name = CASES[family][0]
    get_config = importlib.import_module(f"configs.{name}").get_config
    with pytest.raises(UserError) as error:
        import_weights(GOLDEN / family, from_config_dict(get_config("debug")))
    hint = str(error.value).partition("Add to --config: ")[2]
    import_weights(GOLDEN / family, from_config_dict(get_config(f"debug,{hint}")))


@pytest.mark.parametrize(
    ("family", "key", "changes"),
    [
        ("llama3", "rope_scaling", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}}),
        (
            "qwen2",
            "sliding_window",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
        ),
        ("mamba2", "n_groups", {"n_groups": 8}),
        ("mamba2", "time_step_limit", {"time_step_limit": [0.0, 0.1]}),
        ("mamba2", "layer_norm_epsilon", {"layer_norm_epsilon": 1e-6}),
        ("rwkv7", "norm_eps", {"norm_eps": 1e-5}),
        ("rwkv7", "value_dim", {"value_dim": [32, 32, 64]}),
        ("deltanet", "use_gate", {"use_gate": True}),
        ("gated_deltanet", "allow_neg_eigval", {"allow_neg_eigval": True}),
    ],
)
def test_unsupported_features_are_refused(family, key, changes, tmp_path):
    path, _ = copied(family, tmp_path, with_config=True, **changes)
    with pytest.raises(UserError, match=rf"[ ;]{key} is .*{re.escape(public_config.UNSUPPORTED)}") as error:
        import_weights(path, config_of(family))
    assert "Add to --config" not in str(error.value)


def test_wrong_architecture_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'llama', .*config\.model\.mixer\.name='mamba1'"):
        import_weights(GOLDEN / "llama", config_of("mamba"))
    with pytest.raises(UserError, match=r"config\.model\.mixer\.qk_norm .*False.*True"):
        import_weights(GOLDEN / "llama", config_of("llama", model__mixer__qk_norm=True))
    for family, key in (
        ("llama", "mixer.conv"),
        ("gpt2", "mixer.conv"),
        ("gpt2", "mixer.gate"),
        ("mamba", "token_shift"),
    ):
        config = config_of(family, **{f"model.{key}".replace(".", "__"): True})
        with pytest.raises(UserError, match=rf"config\.model\.{key} .*False.*True"):
            import_weights(GOLDEN / family, config)
        with pytest.raises(UserError, match=rf"config\.model\.{key} .*False.*True"):
            export_weights({}, config, tmp_path / family / "model.safetensors")
    with pytest.raises(UserError, match=r"mixer\.name='top1_chunk'"):
        import_weights(GOLDEN / "llama", support.tiny("top1_chunk"))
    with pytest.raises(UserError, match=r"mixer\.name='based_conv, based_linear, transformer_pp'"):
        import_weights(GOLDEN / "llama", from_config_dict(importlib.import_module("configs.based").get_config("debug")))
    with pytest.raises(UserError, match=r"4e-05, not config\.model\.norm_eps=1e-05"):
        import_weights(copied("rwkv7", tmp_path)[0], config_of("rwkv7", model__norm_eps=1e-5))
    config = config_of("deltanet", model__mixer__norm_eps=1e-5)
    params = import_weights(copied("deltanet", tmp_path)[0], config)
    with pytest.raises(UserError, match=r"norm_eps, .*1e-06 and 1e-05"):
        export_weights(params, config, tmp_path / "out" / "model.safetensors")


def test_non_safetensors_files_are_refused(tmp_path):
    config = config_of("llama")
    for name, match in (
        ("model.bin", r"model\.bin: .*Pickled"),
        ("model.safetensors", r"model\.safetensors is not .*header"),
    ):
        (tmp_path / name).write_bytes(b"no weights, whatever it is called")
        with pytest.raises(UserError, match=match):
            import_weights(tmp_path / name, config)
    with pytest.raises(UserError, match=r"no file .*nowhere\.safetensors"):
        import_weights(tmp_path / "nowhere.safetensors", config)
    with pytest.raises(UserError, match=r"/empty .*\b0 \.safetensors"):
        (tmp_path / "empty").mkdir()
        import_weights(tmp_path / "empty", config)


def test_float16_overflow_is_refused(tmp_path):
    config = config_of("llama")
    params = import_weights(GOLDEN / "llama", config)
    params["embed"][3, 4] = 1e6
    with pytest.raises(UserError, match=r"embed_tokens\.weight .*1e\+06.*float16.*--dtype"):
        export_weights(params, config, tmp_path / "model.safetensors", dtype="float16")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ commands
@pytest.fixture
def imported(corpus_cache, tmp_path):
    """Import the tiny byte-vocabulary Llama by the command; return the workdir and the arguments."""
    config = f"configs/transformer_pp.py:debug,{CASES['llama'][1]},data.cache_dir={corpus_cache}"
    config += ",train.steps=2,train.batch_size=8,train.seq_len=32,eval.tokens=64,log.tensorboard=False"
    config += ",log.sample_tokens=0"
    workdir = tmp_path / "imported"
    args = ["import", f"--weights={GOLDEN / 'llama'}", f"--config={support.ROOT / config}", f"--workdir={workdir}"]
    command.main(args)
    return workdir, args


@pytest.mark.slow
def test_import_evaluate_generate_export(imported, tmp_path):
    """The commands as a user types them, each in a new process."""
    workdir, _ = imported
    for args in (["evaluate"], ["generate", "--prompt=Once", "--max_new_tokens=3", "--temperature=0"]):
        module, *rest = args
        result = support.run([sys.executable, "-m", f"seqjax.{module}", f"--workdir={workdir}", *rest])
        assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Once")
    losses = json.loads((workdir / "evaluation.json").read_text())["loss"]
    assert all(4 < loss < 12 for loss in losses.values())  # random weights
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
    assert "config.json" in result.stderr


@pytest.mark.slow  # a training run
def test_training_starts_from_imported_weights(imported):
    """The optimizer starts fresh; afterwards the workdir holds an ordinary run."""
    workdir, args = imported
    config, model, before, step, _ = evaluate.restore(workdir)
    before = jax.device_get(before)
    assert step == 0
    assert train(config, workdir)
    _, _, after, step, _ = evaluate.restore(workdir)
    assert step == 2
    # Warmup is longer than this run, so Adam's first steps are smaller than the learning rate.
    moved = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max()), after, before)
    assert all(0 < x < 2 * config.optim.lr for x in jax.tree.leaves(moved))
    assert model.config == config.model
    with pytest.raises(UserError, match=r"imported holds .*--workdir"):
        command.main(args)


def test_command_refuses_bad_arguments(tmp_path):
    with pytest.raises(UserError, match=r"--config: .*nowhere\.py"):
        command.main(["import", "--weights=x", "--config=nowhere.py:debug", f"--workdir={tmp_path}"])
    with pytest.raises(UserError, match=r"--out=weights\.bin: .*model\.safetensors"):
        command.main(["export", f"--workdir={tmp_path}", "--out=weights.bin"])


def test_docs_list_every_family():
    text = (support.ROOT / "docs" / "convert.md").read_text()
    for name, families in FAMILIES.items():
        assert f"`configs/{name}.py`" in text
        for family in families:
            assert family.name in text
            for key in family.needs:
                assert key.removeprefix("model.") in text, f"{name}: {key}"


@pytest.mark.parametrize("family", CASES)
def test_untied_head_is_detected(family, tmp_path):
    """A file may repeat the tied embedding as its head; one different value is an error."""
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
