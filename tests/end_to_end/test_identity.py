"""Exchanged, edited or foreign files: every command that would read them as the run's files refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import seqjax
from seqjax.config import Config, from_config_dict, presets, to_dict
from seqjax.errors import UserError
from seqjax.study.runs import collect, files
from seqjax.study.runs.runner import Run
from seqjax.training import eval_losses, identity, token_classes
from seqjax.training.loop import train
from tests import support

STEPS, FIRST = 8, 4
SETTINGS = {
    "train__steps": STEPS,
    "train__ends": (0.5, 1.0),
    "optim__cooldown": 0.5,
    "optim__warmup_steps": 1,
    "checkpoint__every": 2,
    "checkpoint__ends": "all",
    "eval__every": 2 * 8 * support.SEQ_LEN,
    "eval__tokens": 4 * support.SEQ_LEN,
    "eval__classes": True,
    "model__n_layers": 1,
}
LINEAR = SETTINGS | {"train__ends": (), "train__steps": 6}
DOMAINS = ["commoncrawl", "c4", "arxiv", "github", "stackexchange"]


class Trained(NamedTuple):
    """Finished runs: with ends, the same with another seed, with linear decay, and the same with another seed."""

    config: Config
    linear_config: Config
    mine: Path
    theirs: Path
    linear: Path
    other_linear: Path


@pytest.fixture(scope="module")
def trained(blocks_dir, tmp_path_factory) -> Trained:
    root = tmp_path_factory.mktemp("identity")
    for name, settings, seed in (("mine", SETTINGS, 0), ("theirs", SETTINGS, 1), ("a", LINEAR, 0), ("b", LINEAR, 1)):
        config = support.run_config(blocks_dir, "transformer_pp", **settings, train__seed=seed, data__seed=seed)
        assert train(config, root / name) is True
    config, linear = (support.run_config(blocks_dir, "transformer_pp", **s) for s in (SETTINGS, LINEAR))
    return Trained(config, linear, *(root / name for name in ("mine", "theirs", "a", "b")))


# Config -> the settings' hash in seqjax 0.1.0. A setting that is newer belongs in `identity.ADDED`.
HASHES = {
    "based": "bee8122e890f889127f46864703d04e05a29d56955264767dc067d49de393eca",
    "gated_deltanet": "257933079cf4dacdbee5e23b21c94ccd71e1a9e2b652e70770ac5fdeee87716a",
    "kda": "30329eaecad4f19e749662ca91cccef26a09b3e8790de82c47d284e331154858",
    "nsa": "5aa1f54d2c25a0e928ca9265da563a52e3fa347dc01467bdbb91428c7f094615",
    "rwkv7": "1fd79041ec11ad8ec5fa70d7428df99faf5474498067c29687d9d05b1250a87c",
    "top1_chunk": "3c8b27bcd4ac0dd789b8f8e2ce6b3225a68679ff1f00e30e0966f13ba6c93185",
    "top1_element": "96ef0d6a1c6b124be6d5ff85a5ac5f80c279536113e9b02b8369271f99583350",
    "transformer": "e71e8cfdd85626a145867ed67e872af6b3743b53e66d6f711c53c400f7a14228",
    "transformer_pp": "582690317f7d108205d75b2a50ca55caff68452eecaace4df6c274c3e356c385",
}


@pytest.mark.parametrize("name", HASHES)
def test_new_settings_at_their_defaults_keep_the_identity(name):
    """Other values change it."""
    values = to_dict(from_config_dict(presets.read_config(f"{name}:debug")))
    assert identity.settings_of(values) == HASHES[name]
    changed = values | {"optim": values["optim"] | {"schedule": "cosine"}}
    assert identity.settings_of(changed) != HASHES[name]


def run_of(config: Config, workdir: Path) -> Run:
    return Run(0, "mine", workdir, config, "mine")


def of_study(config: Config, workdir: Path, out: Path) -> None:
    """Return what `seqjax study` computes from a finished run."""
    run = run_of(config, workdir)
    records = collect.collect([run], DOMAINS)
    study = {"title": "t", "references": ["mine"], "domains": DOMAINS[2:], "against": DOMAINS[:2]}
    files.write(out, records, study=study, missing={}, workdirs={"mine": workdir})
    assert token_classes.read_classes(workdir) is not None


def replace(path: Path, other: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(other, path) if other.is_dir() else shutil.copy(other, path)


def edit_losses(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    arrays = dict(np.load(path))
    change(arrays)
    np.savez(path, allow_pickle=False, **arrays)


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def losses_of(directory: Path, step: int) -> Path:
    return eval_losses.path(directory, step)


def halves(arrays: dict[str, np.ndarray]) -> None:
    """Exchange the losses of two blocks, which keeps their mean."""
    arrays["arxiv"][[0, 1]] = arrays["arxiv"][[1, 0]]


def emptied(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").write_text('{"crc32": {}}')


# Changes to a run with ends, and the file that the error names.
OF_ENDS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "an end of another seed": (lambda m, t: replace(m / "ends/4", t / "ends/4"), "ends/4"),
    "another end": (lambda m, t: replace(m / "ends/4", m / "ends/8"), "ends/4"),
    "an end that is the trunk": (lambda m, t: replace(m / "ends/4/run.json", m / "run.json"), "ends/4"),
    "the settings of another run": (lambda m, t: replace(m / "config.json", t / "config.json"), r"config|data\.seed"),
    "the metadata of another run": (lambda m, t: replace(m / "run.json", t / "run.json"), "run.json"),
    "the settings of an end": (
        lambda m, t: edit_json(m / "ends/8/config.json", lambda c: c["optim"].update(lr=0.5)),
        "ends/8/config.json",
    ),
}
OF_LOSSES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "losses of another run": (
        lambda m, t: replace(losses_of(m / "ends/4", 4), losses_of(t / "ends/4", 4)),
        "ends/4/eval_losses/00000004.npz",
    ),
    "losses of the trunk": (
        lambda m, t: replace(losses_of(m / "ends/4", 4), losses_of(m, 4)),
        "ends/4/eval_losses/00000004.npz",
    ),
    "losses of another end": (
        lambda m, t: replace(losses_of(m / "ends/4", 4), losses_of(m / "ends/8", 8)),
        "ends/4/eval_losses/00000004.npz",
    ),
    "edited losses": (
        lambda m, t: edit_losses(losses_of(m / "ends/8", 8), lambda a: a["c4"].__iadd__(0.1)),
        "ends/8/eval_losses/00000008.npz",
    ),
    "exchanged blocks": (lambda m, t: edit_losses(losses_of(m / "ends/8", 8), halves), "00000008.npz"),
    "losses without a run": (
        lambda m, t: edit_losses(losses_of(m / "ends/8", 8), lambda a: [a.pop(k) for k in [*a] if k[:4] == "run/"]),
        "00000008.npz",
    ),
    "classes of another run": (
        lambda m, t: replace(m / "ends/8/eval_losses/classes.npz", t / "ends/8/eval_losses/classes.npz"),
        "ends/8/eval_losses/classes.npz",
    ),
    "edited classes": (
        lambda m, t: edit_losses(m / "ends/8/eval_losses/classes.npz", lambda a: a["c4/repeat/losses"].__imul__(0.9)),
        "ends/8/eval_losses/classes.npz",
    ),
    "rows of another run": (
        lambda m, t: replace(m / "ends/8/metrics.jsonl", t / "ends/8/metrics.jsonl"),
        "metrics.jsonl",
    ),
}


def copies(trained: Trained, tmp_path: Path) -> tuple[Path, Path]:
    """Copy the two runs with ends."""
    shutil.copytree(trained.mine, tmp_path / "mine")
    shutil.copytree(trained.theirs, tmp_path / "theirs")
    return tmp_path / "mine", tmp_path / "theirs"


def test_an_undamaged_run_is_read(trained, tmp_path):
    """Its identities, including those of its ends, differ from the identities of a run with another seed."""
    mine, theirs = copies(trained, tmp_path)
    assert identity.require(mine) and identity.require(theirs)
    of_study(trained.config, mine, tmp_path / "out")
    assert seqjax.load(mine).step == STEPS
    assert train(trained.config, mine) is True
    directories = [root / part for root in (mine, theirs) for part in ("", "ends/4", "ends/8")]
    assert len({identity.recorded(directory) for directory in directories}) == 6


def test_equal_runs_have_equal_identities(trained, blocks_dir, tmp_path):
    """The identity depends only on settings and data, not on the path or on settings that a resumed run may change."""
    settings = LINEAR | {"mesh__data": 4, "mesh__fsdp": 2, "log__every": 3, "checkpoint__every": 3}
    config = support.run_config(blocks_dir, "transformer_pp", **settings)
    assert train(config, tmp_path / "again") is True
    assert identity.recorded(tmp_path / "again") == identity.recorded(trained.linear)


@pytest.mark.parametrize("what", OF_ENDS)
def test_directories_of_another_run_are_refused(what, trained, tmp_path):
    mine, theirs = copies(trained, tmp_path)
    change, named = OF_ENDS[what]
    change(mine, theirs)
    for command in (
        lambda: train(trained.config, mine),
        lambda: seqjax.load(mine),
        lambda: of_study(trained.config, mine, tmp_path / "out"),
    ):
        with pytest.raises(UserError, match=named):
            command()


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_lost_identity_files_are_refused(name, trained, tmp_path):
    mine, _ = copies(trained, tmp_path)
    (mine / "ends/4" / name).unlink()
    (mine / name).unlink()
    with pytest.raises(UserError, match=f"{name.replace('.', '[.]')} is missing"):
        of_study(trained.config, mine, tmp_path / "out")


@pytest.mark.parametrize("what", OF_LOSSES)
def test_losses_of_another_run_are_refused(what, trained, tmp_path):
    mine, theirs = copies(trained, tmp_path)
    change, named = OF_LOSSES[what]
    change(mine, theirs)
    with pytest.raises(UserError, match=named):
        of_study(trained.config, mine, tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        lambda mine, theirs: replace(mine / "checkpoints/6", theirs / "checkpoints/6"),
        lambda mine, theirs: emptied(mine / "checkpoints/6"),
        lambda mine, theirs: (mine / "checkpoints/6/params/more").write_text("x"),
    ],
    ids=["another run", "no checksums", "a file that nobody wrote"],
)
def test_checkpoints_of_another_run_are_refused(change, trained, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    shutil.copytree(trained.linear, mine)
    shutil.copytree(trained.other_linear, theirs)
    change(mine, theirs)
    for command in (lambda: train(trained.linear_config, mine), lambda: seqjax.load(mine)):
        with pytest.raises(UserError, match=r"checkpoints/6 .*damaged: .* 4, delete"):
            command()
    shutil.rmtree(mine / "checkpoints/6")  # the remedy in the error
    assert train(trained.linear_config, mine) is True


def test_a_run_with_other_settings_in_a_study_workdir_is_refused(trained, blocks_dir, tmp_path):
    """The study file was edited after the run."""
    for key, value in (("optim__lr", 0.005), ("train__seed", 2), ("model__mlp__dim", 48), ("eval__seed", 3)):
        config = support.run_config(blocks_dir, "transformer_pp", **SETTINGS | {key: value})
        with pytest.raises(UserError, match=key.replace("__", ".")):
            of_study(config, trained.mine, tmp_path / "out")
    other = support.run_config(blocks_dir, "transformer", **SETTINGS)
    with pytest.raises(UserError, match=r"model\.mixer\.name: 'transformer_pp' -> 'transformer'"):
        of_study(other, trained.mine, tmp_path / "out")


def test_a_run_resumes_without_run_json(trained, tmp_path):
    """The identity is read from the checkpoint."""
    shutil.copytree(trained.linear, tmp_path / "mine")
    before = identity.recorded(tmp_path / "mine")
    (tmp_path / "mine" / "run.json").unlink()
    shutil.rmtree(tmp_path / "mine" / "checkpoints" / "6")
    assert train(trained.linear_config, tmp_path / "mine") is True
    assert identity.recorded(tmp_path / "mine") == before


def test_an_extended_run_keeps_its_identity(trained, blocks_dir, tmp_path):
    shutil.copytree(trained.mine, tmp_path / "mine")
    settings = SETTINGS | {"train__steps": 12, "train__ends": (1 / 3, 2 / 3, 1.0)}
    assert train(support.run_config(blocks_dir, "transformer_pp", **settings), tmp_path / "mine") is True
    assert identity.recorded(tmp_path / "mine") == identity.recorded(trained.mine)
    assert identity.require(tmp_path / "mine")


def test_files_from_before_identities_are_read_with_one_line(trained, tmp_path, capsys):
    mine = tmp_path / "mine"
    shutil.copytree(trained.linear, mine)
    edit_json(mine / "run.json", lambda values: [values.pop(key) for key in ("identity", "settings")])
    for checkpoint in (mine / "checkpoints").iterdir():
        edit_json(checkpoint / "_CHECKPOINT_METADATA", lambda values: values["custom_metadata"].pop("identity"))
    for path in (mine / "eval_losses").glob("*.npz"):
        edit_losses(path, lambda arrays: [arrays.pop(key) for key in [*arrays] if key.startswith("run/")])
    capsys.readouterr()
    assert seqjax.load(mine).step == 6
    assert capsys.readouterr().err.count(identity.NOT_CHECKED) == 1
    shutil.rmtree(mine / "checkpoints" / "6")
    assert train(trained.linear_config, mine) is True
    assert capsys.readouterr().err.count(identity.NOT_CHECKED) == 1
    assert not identity.require(mine)
