"""Workdirs: ownership, recorded settings that may change, and errors of commands."""

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


def test_default_workdir_name(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workdir = workdirs.fresh(config)
    assert re.fullmatch(r"runs/top1_chunk-debug-\d{8}-\d{6}", str(workdir))
    assert workdir.is_dir()


def test_simultaneous_runs_get_separate_directories(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workdirs.time, "strftime", lambda form: "20260102-030405")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        workdirs_made = sorted(map(str, pool.map(workdirs.fresh, [config] * 4)))
    first = "runs/top1_chunk-debug-20260102-030405"
    assert workdirs_made == [first, f"{first}-2", f"{first}-3", f"{first}-4"]


SUBDIRECTORIES = ("", "eval_losses/", "ends/4/", "ends/4/eval_losses/")


def test_temporary_files_of_a_killed_run_are_removed(tmp_path):
    """Files of other runs in subdirectories stay, because those runs may be active."""
    leftovers = [files.temporary_beside(tmp_path / f"{subdirectory}classes.npz") for subdirectory in SUBDIRECTORIES]
    temporary_name = f".x.{'0' * 32}.tmp"
    other_files = [
        tmp_path / name
        for name in ("metrics.jsonl", ".x.tmp", ".x.y.tmp", "x.tmp", f"notes/{temporary_name}", f"a/{temporary_name}")
    ]
    other_files += [tmp_path / "ends" / "other" / temporary_name, tmp_path / "checkpoints" / "4" / temporary_name]
    for path in (*leftovers, *other_files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    link = tmp_path / f".link.{'1' * 32}.tmp"
    link.symlink_to(other_files[0])
    mirror = mirrors.Mirror(tmp_path)
    with mirror.locked():
        mirror.remove_temporaries()
        assert all(path.exists() for path in leftovers), "a directory without run.json is no run"
        (tmp_path / "run.json").touch()
        mirror.remove_temporaries()
        assert not any(path.exists() for path in leftovers)
        assert all(path.exists() for path in (*other_files, link))


def test_temporary_files_of_another_user_are_kept(tmp_path, monkeypatch):
    temporary = files.temporary_beside(tmp_path / "x")
    temporary.touch()
    monkeypatch.setattr(os, "getuid", lambda: temporary.stat().st_uid + 1)
    files.remove_temporaries(tmp_path)
    assert temporary.exists()
    monkeypatch.undo()
    files.remove_temporaries(tmp_path)
    assert not temporary.exists()


@pytest.mark.parametrize(
    "name", ["checkpoints", "metrics.jsonl", "eval_losses", "tensorboard", "ends/4", "ends/4/wandb"]
)
def test_links_out_of_the_workdir_are_rejected(config, tmp_path, name):
    (tmp_path / "outside").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=rf"{link} .*link .*/outside"):
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
def test_results_without_config_are_rejected(config, tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=rf"has {name.partition('/')[0]} .*config\.json"):
        workdirs.check_config(tmp_path, config)


def test_foreign_run_json_is_not_replaced(config, tmp_path):
    (tmp_path / "run.json").write_text('{"mine": 1}')
    with pytest.raises(UserError, match=r"run\.json: versions "):
        workdirs.check_config(tmp_path, config)
    (tmp_path / "run.json").write_text(json.dumps(provenance.run_metadata(parameters=1)))
    workdirs.check_config(tmp_path, config)


def test_recorded_cache_directory_is_used_only_if_it_is_a_cache(config, tmp_path):
    """Otherwise a stranger's config could choose where an evaluation writes its data."""
    data = dataclasses.replace(config.data, cache_dir=str(tmp_path / "cache"))
    config = dataclasses.replace(config, data=data)
    workdirs.save_config(tmp_path / "run", config)
    assert workdirs.load_config(tmp_path / "run").data.cache_dir == ""
    (tmp_path / "cache" / "other").mkdir(parents=True)
    (tmp_path / "cache" / "blocks").symlink_to(tmp_path / "cache" / "other")
    assert workdirs.load_config(tmp_path / "run").data.cache_dir == ""
    (tmp_path / "cache" / "builtin-byte-0123").mkdir()
    assert workdirs.load_config(tmp_path / "run") == config


def test_empty_workdir_is_rejected():
    """`Path("")` would be the current directory."""
    with pytest.raises(UserError, match="empty value"):
        mirrors.Mirror("")


def test_default_workdir_fails_if_runs_is_a_file(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"^runs is a .*--workdir"):
        workdirs.fresh(config)


def test_saving_the_same_config_twice(config, tmp_path):
    workdir = tmp_path / "deep" / "run"
    workdirs.save_config(workdir, config)
    workdirs.save_config(workdir, config)
    assert workdirs.load_config(workdir) == config
    assert [p.name for p in workdir.iterdir()] == ["config.json"], "no temporary file remains"


@pytest.mark.parametrize(
    "key", ["log.every", "log.tensorboard", "checkpoint.every", "checkpoint.keep", "mesh.fsdp", "data.path"]
)
def test_changeable_settings_can_change_and_are_saved(config, tmp_path, key):
    workdirs.save_config(tmp_path, config)
    values = to_dict(config)
    group, name = key.split(".")
    old = values[group][name]
    values[group][name] = not old if isinstance(old, bool) else old + type(old)(1)
    changed = from_config_dict(values)
    workdirs.save_config(tmp_path, changed)
    assert workdirs.load_config(tmp_path) == changed


def test_every_other_changed_setting_is_rejected(config, tmp_path):
    """Change each number of the config in turn; the error names the setting. Only Muon has all numbers."""
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, name="muon"))
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
def test_run_from_an_unreleased_version_is_rejected(config, tmp_path, version):
    """Resuming and reading are rejected, and nothing is written."""
    values = to_dict(config) | ({"version": version} if version else {})
    text = json.dumps(values)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json .*before 0\.1\.0"):
        workdirs.load_config(tmp_path)
    with pytest.raises(UserError, match=r"before 0\.1\.0"):
        workdirs.save_config(tmp_path, config)
    assert (tmp_path / "config.json").read_text() == text


def test_run_from_a_later_version_is_rejected(config, tmp_path):
    later = workdirs.VERSION + 1
    (tmp_path / "config.json").write_text(json.dumps({"version": later} | to_dict(config)))
    with pytest.raises(UserError, match=rf"config\.json .*version .*\b{later}\b.*Update"):
        workdirs.load_config(tmp_path)


def test_unknown_setting_is_named(config, tmp_path):
    values = {"version": workdirs.VERSION} | to_dict(config)
    values["train"]["stepz"] = values["train"].pop("steps")
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config\.train\.stepz .*'steps'"):
        workdirs.load_config(tmp_path)


# ------------------------------------------------------------------------------------- errors
def command_that_raises(error):
    def main(argv):
        raise error

    return main


def test_user_error_prints_one_line_with_status_2(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(UserError("Do this.")), [])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: Do this.\n"


def test_full_disk_is_a_user_error(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(errno.ENOSPC, "No space left on device", "a/b")), [])
    assert caught.value.code == 2
    assert "a/b" in capsys.readouterr().err


def test_interrupt_exits_with_status_130(capsys, monkeypatch):
    """`leave` would end the test process, so `sys.exit` replaces it."""
    monkeypatch.setattr(command_line, "leave", sys.exit)
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(KeyboardInterrupt()), [])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EEXIST, errno.ENOTDIR, errno.EISDIR])
def test_unwritable_path_is_named(capsys, number):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(number, os.strerror(number), "a/b")), [])
    assert caught.value.code == 2
    assert "'a/b'. Give another" in capsys.readouterr().err


def test_read_only_file_system_is_not_a_full_disk(capsys):
    with pytest.raises(SystemExit) as caught:
        run_command(command_that_raises(OSError(errno.EROFS, "Read-only file system", "a/b")), [])
    assert caught.value.code == 2
    assert "'a/b'. Give another" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.ENOENT, "No such file")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)):
        run_command(command_that_raises(error), [])


def test_nearest_lists_known_names():
    assert nearest("stepz", ["steps", "seed"]) == " Did you mean 'steps'? Known: seed, steps."
    assert nearest("qqq", ["steps", "seed"]) == " Known: seed, steps."
