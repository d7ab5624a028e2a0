"""The mixer of an importable module in docs/add_a_mixer.md: train; refuse unless its name is allowed.

The tests run the text of the pages; only lengths and the path of the built-in corpus are changed.
"""

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seqjax
from seqjax import testing
from seqjax.commands import evaluate, generate
from seqjax.config import from_config_dict, presets
from seqjax.convert import __main__ as convert
from seqjax.errors import UserError
from seqjax.mixers import _registry
from seqjax.models import flops
from seqjax.training import workdir as workdirs
from tests import support
from tests.end_to_end.conftest import write_checkpoint

NAME = "my_package.ema"
SMALL = {
    "train.steps": 2,
    "train.batch_size": 8,
    "train.seq_len": 32,
    "eval.tokens": 256,
    "model.n_layers": 1,
    "log.sample_tokens": 0,
    "log.tensorboard": False,
}


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (support.ROOT / page).read_text(), re.S)


PAGE = "docs/add_a_mixer.md"
FILE, CELL, TRAIN = (support.page_block(PAGE, text) for text in ("class Ema(", "class SlowEma(", 'name="slow_ema"'))
LOAD = 'm = seqjax.load("runs/ema", mixers=(ema.Ema,))'
_, README_LOAD = snippets("README.md")
QUICKSTART, _ = snippets("docs/quickstart.md")


@pytest.fixture(scope="module")
def page_directory(tmp_path_factory) -> Path:
    """Return a directory with `my_package/ema.py`, the page's mixer."""
    package = tmp_path_factory.mktemp("outside") / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ema.py").write_text(FILE)
    return package.parent


@contextlib.contextmanager
def importable(page_directory: Path) -> Iterator[None]:
    """Make `my_package` importable, and remove it from this process afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(page_directory)
        patch.setattr(_registry, "_registered", {})
        yield
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def run(page_directory, blocks_dir) -> Path:
    """Return the workdir of a model with that mixer, as written by training."""
    with importable(page_directory):
        config = support.run_config(blocks_dir, "transformer_pp", model__mixer={"name": NAME, "expand": 2})
        return write_checkpoint(page_directory / "runs" / "ema", config, 2).workdir


@pytest.fixture
def here(page_directory, monkeypatch):
    """Make the page's directory the current one, without the package in this process."""
    monkeypatch.chdir(page_directory)
    with importable(page_directory):
        yield page_directory


@pytest.mark.slow
def test_the_command_trains_the_mixer_with_its_own_settings(page_directory, corpus_cache):
    """Trains in another process; the run loads once the mixer is allowed."""
    small = [f"--config.{key}={value}" for key, value in (SMALL | {"data.cache_dir": corpus_cache}).items()]
    command = [sys.executable, "-m", "seqjax", "train", "--config=transformer_pp", f"--config.model.mixer.name={NAME}"]
    command += [*small, "--workdir=runs/trained"]
    done = support.run(command, cwd=page_directory, env=support.environment() | {"PYTHONPATH": str(support.ROOT)})
    assert done.returncode == 0, done.stderr
    run = page_directory / "runs" / "trained"
    mixer = json.loads((run / "config.json").read_text())["model"]["mixer"]
    assert mixer == {"name": NAME, "expand": 2}
    content = (page_directory / "my_package" / "ema.py").read_bytes()
    assert json.loads((run / "run.json").read_text())["mixers"] == {NAME: hashlib.sha256(content).hexdigest()}
    assert (run / "report.md").is_file()
    with importable(page_directory):
        from my_package import ema

        m = seqjax.load(run, mixers=(ema.Ema,))
        assert np.isfinite(m.loss("text"))


@pytest.mark.slow  # another process; the modules are tested above
def test_the_installed_command_imports_the_mixer_from_the_current_directory(page_directory):
    """A console script, like `python -P`, does not put the current directory on the path."""
    small = [f"--config.{key}={value}" for key, value in SMALL.items()]
    command = [sys.executable, "-P", "-m", "seqjax", "train", "--dry_run", "--config=transformer_pp:debug", *small]
    env = support.environment() | {"PYTHONPATH": str(support.ROOT)}
    done = support.run([*command, f"--config.model.mixer.name={NAME}"], cwd=page_directory, env=env)
    assert done.returncode == 0, done.stderr
    assert NAME in done.stdout


def test_a_run_with_foreign_code_is_refused_without_importing_it(run, here):
    out = f"--out={here / 'model.safetensors'}"
    for command in (
        lambda: seqjax.load(run),
        lambda: evaluate.main([f"--workdir={run}"]),
        lambda: generate.main([f"--workdir={run}"]),
        lambda: generate.main([f"--workdir={run}", "--allow-code=my_package", "--allow-code=json"]),
        lambda: convert.main(["export", f"--workdir={run}", out]),
        # training another mixer in this workdir does not run it either
        lambda: workdirs.save_config(run, from_config_dict(presets.read_config("mamba2:debug"))),
    ):
        with pytest.raises(UserError, match=f"'{NAME}'.*--allow-code={NAME}.*allow_code='{NAME}'"):
            command()
    assert not any(name.startswith("my_package") for name in sys.modules)


def test_a_mixer_inside_a_pattern_is_seen_too(run, here, tmp_path):
    values = json.loads((run / "config.json").read_text())
    values["model"] |= {"mixer": [{"name": "mamba2"}, {"name": NAME}], "n_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"'{NAME}'.*--allow-code={NAME}"):
        seqjax.load(tmp_path)


def test_an_allowed_mixer_evaluates_generates_and_loads(run, here, capsys):
    evaluate.main([f"--workdir={run}", f"--allow-code={NAME}"])
    losses = json.loads((run / "evaluation.json").read_text())["loss"]
    assert all(np.isfinite(loss) for loss in losses.values())
    capsys.readouterr()
    generate.main([f"--workdir={run}", "--prompt=The ", "--max_new_tokens=5", f"--allow-code={NAME}"])
    assert capsys.readouterr().out.startswith("The ")
    with pytest.raises(UserError, match=r"config\.model\.mixer\.name="):
        convert.main(["export", f"--workdir={run}", f"--out={here / 'model.safetensors'}", f"--allow-code={NAME}"])
    workdirs.save_config(run, workdirs.load_config(run, allow_code=[NAME]))  # resume with the user's config

    space = {"seqjax": seqjax}
    exec("from my_package import ema\n" + LOAD, space)
    assert isinstance(space["m"].model.abstract_blocks()[0].mixer, space["ema"].Ema)


@pytest.mark.slow
def test_the_page_cell_passes_check_mixer_and_trains_by_name(here, corpus_cache, monkeypatch):
    few = {name: testing.CHECKS[name] for name in ("parameters", "causality")}  # tests/test_testing.py has all of them
    monkeypatch.setattr(testing, "CHECKS", few)
    settings = SMALL | {"data.cache_dir": corpus_cache}
    small = TRAIN.replace('"debug"', repr("debug," + ",".join(f"{key}={value}" for key, value in settings.items())))
    assert small != TRAIN
    space = {}
    exec(CELL + small, space)
    assert space["config"].model.mixer.to_dict() == {"name": "slow_ema", "expand": 3}
    m = seqjax.load("runs/slow_ema")  # a registered class is already in this process
    assert m.step == 2
    assert m.params["blocks"]["0"]["mixer"]["rate_E"].mean() > 3
    monkeypatch.setattr(_registry, "_registered", {})
    with pytest.raises(UserError, match=r"'slow_ema' .*no copy"):
        seqjax.load("runs/slow_ema")


def test_the_snippets_of_readme_and_quickstart(here, blocks_dir, capsys):
    write_checkpoint(here / "runs" / "first", support.run_config(blocks_dir), 1)
    space = {"seqjax": seqjax}
    exec(README_LOAD, space)
    exec(QUICKSTART, space)
    assert capsys.readouterr().out == space["m"].generate("def ", max_new_tokens=50) != ""


def test_a_loaded_model_agrees_with_the_command_and_the_evaluation(here, blocks_dir, capsys):
    run = write_checkpoint(here / "runs" / "second", support.run_config(blocks_dir), 3)
    m = seqjax.load(str(run.workdir))
    assert (m.config, m.step, m.tokenizer.name) == (run.config, 3, "byte")
    assert jax.tree.map(jnp.shape, m.params) == jax.tree.map(jnp.shape, m.model.shapes)
    first, second, third = str(m).splitlines()
    assert f"{flops.n_params(m.model):,} parameters" in first and "step 3" in first
    assert f"vocabulary {run.config.model.vocab_size}" in second and "tokenizer byte" in third

    generate.main([f"--workdir={run.workdir}", "--prompt=abc", "--max_new_tokens=9", "--temperature=1.5", "--seed=4"])
    want = capsys.readouterr().out
    assert f"abc{m.generate('abc', max_new_tokens=9, temperature=1.5, seed=4)}\n" == want
    assert m.generate("abc", max_new_tokens=9, temperature=1.5, seed=5) != want[3:-1]

    logits = jax.jit(m.model.logits)
    for text in ("a", "some text", "ä text longer than the sixty-four tokens that are the least of a program"):
        ids = np.concatenate([[m.tokenizer.bos], m.tokenizer.encode(text)]).astype(np.int32)
        padded = np.pad(ids[:-1], (0, 99 - len(ids)))  # one program for all
        log_p = jax.nn.log_softmax(logits(m.params, padded[None]))[0]
        want_loss = -float(np.mean(log_p[np.arange(len(ids) - 1), ids[1:]]))
        assert m.loss(text) == pytest.approx(want_loss, rel=1e-4)
        assert isinstance(m.loss(text), float)
    with pytest.raises(UserError, match="empty text"):
        m.loss("")
    with pytest.raises(UserError, match=r"^max_new_tokens .* 1, not 0"):
        m.generate("a", max_new_tokens=0)


def test_a_position_table_limits_the_length_of_a_loaded_model(here, config):
    m = seqjax.load(write_checkpoint(here / "runs" / "table", config, 1).workdir)
    assert m.model.longest == support.SEQ_LEN
    assert np.isfinite(m.loss("x" * support.SEQ_LEN))
    with pytest.raises(UserError, match=f" {support.SEQ_LEN} positions.*config.train.seq_len"):
        m.loss("x" * (support.SEQ_LEN + 1))
