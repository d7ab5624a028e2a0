"""Whose a directory is, which settings may change in it, and the two kinds of errors of a command."""

import concurrent.futures
import dataclasses
import errno
import json
import os
import re
import sys

import pytest

from seqjax import command_line, files
from seqjax.command_line import run_command
from seqjax.config import from_config_dict, to_dict
from seqjax.errors import UserError, nearest
from seqjax.training import mirrors, provenance
from seqjax.training import workdir as workdirs
from tests import support


@pytest.fixture
def config(blocks_dir):
    return support.run_config(blocks_dir)


def test_a_fresh_directory_says_what_it_holds(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workdir = workdirs.fresh(config)
    assert re.fullmatch(r"runs/top1_chunk-debug-\d{8}-\d{6}", str(workdir))
    assert workdir.is_dir()


def test_runs_that_start_in_the_same_second_have_directories_of_their_own(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workdirs.time, "strftime", lambda form: "20260102-030405")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        made = sorted(map(str, pool.map(workdirs.fresh, [config] * 4)))
    first = "runs/top1_chunk-debug-20260102-030405"
    assert made == [first, f"{first}-2", f"{first}-3", f"{first}-4"]


PLACES = ("", "eval_losses/", "ends/4/", "ends/4/eval_losses/")


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    """And nothing else: other runs below the directory may be writing theirs."""
    left = [files.temporary_beside(tmp_path / f"{place}classes.npz") for place in PLACES]
    named = f".x.{'0' * 32}.tmp"
    kept = [
        tmp_path / name for name in ("metrics.jsonl", ".x.tmp", ".x.y.tmp", "x.tmp", f"notes/{named}", f"a/{named}")
    ]
    kept += [tmp_path / "ends" / "other" / named, tmp_path / "checkpoints" / "4" / named]
    for path in (*left, *kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    link = tmp_path / f".link.{'1' * 32}.tmp"
    link.symlink_to(kept[0])
    mirror = mirrors.Mirror(tmp_path)
    with mirror.locked():
        mirror.remove_temporaries()
        assert all(path.exists() for path in left), "without run.json it is no run"
        (tmp_path / "run.json").touch()
        mirror.remove_temporaries()
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in (*kept, link))


def test_files_of_another_user_stay(tmp_path, monkeypatch):
    theirs = files.temporary_beside(tmp_path / "x")
    theirs.touch()
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    files.remove_temporaries(tmp_path)
    assert theirs.exists()
    monkeypatch.undo()
    files.remove_temporaries(tmp_path)
    assert not theirs.exists()


@pytest.mark.parametrize(
    "name", ["checkpoints", "metrics.jsonl", "eval_losses", "tensorboard", "ends/4", "ends/4/wandb"]
)
def test_a_run_does_not_write_through_links(config, tmp_path, name):
    (tmp_path / "outside").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=rf"{link} is a link to .*outside, which is outside the workdir"):
        workdirs.check_config(tmp_path / "run", config)
    link.unlink()
    (tmp_path / "run" / "inside").mkdir()
    link.symlink_to(tmp_path / "run" / "inside")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    mirrors.require_inside(tmp_path / "run")
    mirrors.require_inside(tmp_path / "link")


@pytest.mark.parametrize(
    "name", ["checkpoints/4/x", "ends/4", "eval_losses/00000004.npz", "report.md", "metrics.jsonl"]
)
def test_results_of_unknown_settings_are_not_mixed_with_those_of_a_run(config, tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=f"has {name.partition('/')[0]} but no config.json"):
        workdirs.check_config(tmp_path, config)


def test_a_run_json_that_no_run_wrote_is_not_replaced(config, tmp_path):
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match=r"run\.json: versions is missing; it is not of a run"):
        workdirs.check_config(tmp_path, config)
    (tmp_path / "run.json").write_text(json.dumps(provenance.run_metadata(parameters=1)))
    workdirs.check_config(tmp_path, config)


def test_a_cache_that_a_config_names_is_used_if_it_is_one(config, tmp_path):
    """A stranger's config would otherwise choose where the data of an evaluation is written."""
    data = dataclasses.replace(config.data, cache_dir=str(tmp_path / "cache"))
    config = dataclasses.replace(config, data=data)
    workdirs.save_config(tmp_path / "run", config)
    assert workdirs.load_config(tmp_path / "run").data.cache_dir == ""
    (tmp_path / "cache" / "other").mkdir(parents=True)
    (tmp_path / "cache" / "blocks").symlink_to(tmp_path / "cache" / "other")
    assert workdirs.load_config(tmp_path / "run").data.cache_dir == ""
    (tmp_path / "cache" / "builtin-byte-0123").mkdir()
    assert workdirs.load_config(tmp_path / "run") == config


def test_no_text_is_no_directory():
    """Path takes it for the current one."""
    with pytest.raises(UserError, match="empty text"):
        mirrors.Mirror("")


def test_no_fresh_directory_where_runs_is_a_file(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="runs is a file; give a --workdir"):
        workdirs.fresh(config)


def test_the_config_is_saved_and_saving_it_again_is_fine(config, tmp_path):
    workdir = tmp_path / "deep" / "run"
    workdirs.save_config(workdir, config)
    workdirs.save_config(workdir, config)
    assert workdirs.load_config(workdir) == config
    assert [p.name for p in workdir.iterdir()] == ["config.json"], "no temporary file stays"


@pytest.mark.parametrize(
    "key", ["log.every", "log.tensorboard", "checkpoint.every", "checkpoint.keep", "mesh.fsdp", "data.path"]
)
def test_free_settings_are_free_and_kept(config, tmp_path, key):
    workdirs.save_config(tmp_path, config)
    values = to_dict(config)
    group, name = key.split(".")
    old = values[group][name]
    values[group][name] = not old if isinstance(old, bool) else old + type(old)(1)
    changed = from_config_dict(values)
    workdirs.save_config(tmp_path, changed)
    assert workdirs.load_config(tmp_path) == changed


def test_every_other_setting_decides_the_run(config, tmp_path):
    """Each number of the config in turn: a change is refused by its name, unless it is one of the free ones."""
    workdirs.save_config(tmp_path, config)
    tried = 0
    for group, settings in to_dict(config).items():
        if not isinstance(settings, dict):
            continue
        for name, old in settings.items():
            if type(old) not in (int, float) or f"{group}.{name}".startswith(workdirs.MAY_CHANGE):
                continue
            values = to_dict(config)
            values[group][name] = (old / 2 if isinstance(old, float) else old * 2) or 1
            with pytest.raises(UserError, match=re.escape(f"{group}.{name}: {old!r} -> ")):
                workdirs.save_config(tmp_path, from_config_dict(values))
            tried += 1
    assert tried > 15


@pytest.mark.parametrize("version", [None, 1, 3, "4"])
def test_a_run_of_a_version_before_the_first_release_is_refused(config, tmp_path, version):
    """By what resumes it and by what reads it; nothing is written."""
    values = to_dict(config) | ({"version": version} if version else {})
    text = json.dumps(values)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json was written by a version of seqjax before 0\.1\.0.*train again"):
        workdirs.load_config(tmp_path)
    with pytest.raises(UserError, match=r"before 0\.1\.0"):
        workdirs.save_config(tmp_path, config)
    assert (tmp_path / "config.json").read_text() == text


def test_a_run_of_a_later_version_is_refused(config, tmp_path):
    later = workdirs.VERSION + 1
    (tmp_path / "config.json").write_text(json.dumps({"version": later} | to_dict(config)))
    with pytest.raises(UserError, match=f"by a later seqjax: its version is {later}.*Update seqjax"):
        workdirs.load_config(tmp_path)


def test_a_setting_that_does_not_exist_is_named(config, tmp_path):
    values = {"version": workdirs.VERSION} | to_dict(config)
    values["train"]["stepz"] = values["train"].pop("steps")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config\.train\.stepz is not a setting. Did you mean 'steps'"):
        workdirs.load_config(tmp_path)


# ------------------------------------------------------------------------------------- errors
def command_that_raises(error):
    def main(argv):
        raise error

    return main


def test_a_user_error_is_a_line_and_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(UserError("Do this.")), [])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: Do this.\n"


def test_a_full_disk_is_no_bug_of_ours(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(errno.ENOSPC, "No space left on device", "a/b")), [])
    assert caught.value.code == 2
    assert "a/b" in capsys.readouterr().err


def test_an_interrupt_has_the_status_of_the_shell(capsys, monkeypatch):
    """The process ends at once, which is not for the tests."""
    monkeypatch.setattr(command_line, "leave", sys.exit)
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(KeyboardInterrupt()), [])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EISDIR])
def test_a_path_that_cannot_be_written_is_named(capsys, number):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(number, os.strerror(number), "a/b")), [])
    assert caught.value.code == 2
    assert "'a/b'. Give another path" in capsys.readouterr().err


def test_a_file_system_that_is_read_only_is_not_full(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(errno.EROFS, "Read-only file system", "a/b")), [])
    assert caught.value.code == 2
    assert "'a/b'. Give another path" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "No such file")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)):
        run_command(command_that_raises(error), [])


def test_nearest_names_the_list_even_when_nothing_is_near():
    assert nearest("stepz", ["steps", "seed"]) == " Did you mean 'steps'? Known: seed, steps."
    assert nearest("qqq", ["steps", "seed"]) == " Known: seed, steps."
