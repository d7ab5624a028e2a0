"""`seqjax study`: study files, training, signals, and bad input."""

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqjax.errors import UserError
from seqjax.study import __main__ as study
from seqjax.study.report import leaderboard
from seqjax.study.runs import collect, files, runner
from seqjax.study.runs.studies import ENDS, load_study
from seqjax.training import eval_losses, metrics
from seqjax.training.lock import Holder
from seqjax.training.loop import train
from tests import support
from tests.study.synthetic import write_run, write_study


@pytest.fixture
def runs(tmp_path):
    fast = write_run(tmp_path / "fast", [5.0, 4.0, 3.0, 2.0], offset={"arxiv": 0.25, "github": 0.5})
    slow = write_run(tmp_path / "slow", [5.5, 4.5, 3.5, 2.5])
    return {"fast": fast, "slow": slow}


def test_bad_study_files_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match=r"--study: .*absent\.py"):
        load_study(str(tmp_path / "absent.py"))
    with pytest.raises(UserError, match=r"references \['other'\]"):
        load_study(str(write_study(tmp_path / "study.py", runs, references=("other",))))
    with pytest.raises(UserError, match=r"references .*'slow'"):
        load_study(str(write_study(tmp_path / "study.py", runs, references="slow")))
    with pytest.raises(UserError, match=r"\['reference'\]"):
        load_study(str(write_study(tmp_path / "study.py", runs, reference="slow")))
    with pytest.raises(UserError, match="'x' has workdir, sede"):
        load_study(str(write_study(tmp_path / "study.py", {**runs, "x": {"workdir": "d", "sede": 1}})))
    speeds = {"c": {"card": "H100", "tokens_per_s": {"slow": 1.0}}}
    with pytest.raises(UserError, match=r"speeds: c.*study/runs/studies\.py"):
        load_study(str(write_study(tmp_path / "study.py", runs, speeds=speeds)))
    for speeds in ({"c": {"slwo": 1.0}}, {"c": {"card": "H100", "length": 8, "tokens_per_s": {"slwo": 1.0}}}):
        with pytest.raises(UserError, match=r"speeds\['c'\] .*\['slwo'\]"):
            load_study(str(write_study(tmp_path / "study.py", runs, speeds=speeds)))
    twice = {name: {"workdir": name, "model": "slow", "seed": 1} for name in ("x", "y")}
    with pytest.raises(UserError, match=r"'x' and 'y' .*model, seed, rate"):
        load_study(str(write_study(tmp_path / "study.py", {**runs, **twice})))
    with pytest.raises(UserError, match=r"--study=NAME_OR_FILE.* or --analyse=DIR"):
        study.main([])


TINY = (
    "data.corpus=blocks,data.path={data},train.seq_len=32,train.steps=4,train.batch_size=8,model.dim=16,model.n_layers=1,"
    "model.mixer.heads=2,optim.warmup_steps=1,eval.every=512,eval.tokens=256,log.every=1,log.sample_tokens=0,"
    "log.tensorboard=False"
)


@pytest.fixture
def trained_study(blocks_dir, tmp_path):
    """Write a study with two runs that train and one that diverges."""
    tiny = TINY.format(data=blocks_dir)
    configs = {
        "slow": f"{support.ROOT}/configs/transformer_pp.py:debug,{tiny}",
        "bad": f"{support.ROOT}/configs/transformer_pp.py:debug,{tiny},optim.lr=1e30,optim.clip_norm=None",
        "fast": f"{support.ROOT}/configs/top1_chunk.py:debug,{tiny},model.mixer.chunk_size=8",
    }
    entries = {k: {"workdir": str(tmp_path / k), "config": config} for k, config in configs.items()}
    values = {"title": "t", "references": ("slow",), "domains": ("arxiv",), "runs": entries}
    path = tmp_path / "study.py"
    path.write_text(f"def get_study():\n    return {values!r}\n")
    return path


def study_arguments(blocks_dir, out, *, seeds=1, second="top1_chunk", **changes):
    """Return arguments that compare two configs; `changes` are the second's settings."""
    tiny = TINY.format(data=blocks_dir).replace("train.steps=4", "train.steps=8")
    more = "".join(f",{key.replace('__', '.')}={value}" for key, value in changes.items())
    configs = f"transformer_pp:debug,{tiny};{second}:debug,{tiny},model.mixer.chunk_size=8{more}"
    return [f"--configs={configs}", f"--seeds={seeds}", f"--out={out}"]


NAMES = ("x'''", 'x"""', "x{}", "x#'", "x\u202e")


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_written_study_file_escapes_paths(name, blocks_dir, tmp_path):
    """A study file is Python source, so paths must be escaped."""
    study.main([*study_arguments(blocks_dir, tmp_path / name), "--list"])
    for run in load_study(tmp_path / name / "study.py").runs:
        assert Path(run.workdir).parent == tmp_path / name / "runs"


def test_configs_write_a_study_file(blocks_dir, tmp_path, capsys):
    arguments = study_arguments(blocks_dir, tmp_path, seeds=2, train__ends="(0.5,1.0)")
    study.main([*arguments, "--list"])
    assert capsys.readouterr().out.count("not begun") == 4
    loaded = load_study(tmp_path / "study.py")
    names = ("transformer_pp", "top1_chunk, model.mixer.chunk_size=8, train.ends=(0.5,1.0)")
    assert [(run.model, run.seed) for run in loaded.runs] == [(name, seed) for name in names for seed in (0, 1)]
    assert loaded.references == names[:1]
    assert loaded.against == ("commoncrawl", "c4") and loaded.domains == ("arxiv", "github", "stackexchange")
    for run in loaded.runs:
        assert run.config is not None
        assert run.config.train.seed == run.config.data.seed == run.seed
        assert run.config.train.ends == (ENDS if run.model == names[0] else (0.5, 1.0))
    assert len({run.workdir for run in loaded.runs}) == 4
    study.main([*arguments, "--list"])  # repeating the command is allowed
    inside = f"data.corpus=blocks,data.path={blocks_dir},train.seq_len=32,data.eval_domains=('c4',)"
    with pytest.raises(UserError, match=r"study\.py exists"):
        study.main([*study_arguments(blocks_dir, tmp_path, seeds=3), "--list"])
    for args, message in (
        (["--configs=transformer_pp"], "--configs=transformer_pp: "),
        (["--configs=transformer_pp,transformer_pp"], "--configs=transformer_pp;transformer_pp: "),
        (["--configs=transformer_pp,absent"], "file absent"),
        (study_arguments(blocks_dir, tmp_path, seeds=0), "--seeds "),
        (study_arguments(blocks_dir, tmp_path, data__train_domains="('c4','arxiv')"), "--configs: top1_chunk"),
        ([f"--configs=transformer_pp:debug,{inside};mamba2:debug,{inside}"], "regime limited"),
    ):
        with pytest.raises(UserError, match=message):
            study.main([*args, f"--out={tmp_path / 'new'}"])
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="needs --out=DIR"):
        study.main(["--configs=transformer_pp,mamba2"])


def test_runs_are_labelled_by_config_name(blocks_dir, tmp_path, monkeypatch):
    """A label stays if the config's file is renamed."""
    monkeypatch.chdir(tmp_path)
    text = "from seqjax import presets\ndef get_config(arg=''):\n"
    text += "    return presets.get_config(arg, name='NAME', mixer={'name': 'transformer_pp', 'window': WINDOW})\n"
    names = (("try_3", "short_memory"), ("try_4", "long_memory"), ("copy", "long_memory"))
    for window, (file, name) in enumerate(names, start=2):
        Path(f"{file}.py").write_text(text.replace("NAME", name).replace("WINDOW", str(window)))
    tiny = TINY.format(data=blocks_dir).replace("train.steps=4", "train.steps=8")
    for stems, labels in ((("try_3", "try_4"), ["short_memory", "long_memory"]), (("copy", "try_4"), None)):
        texts = [f"{file}.py:debug,{tiny}" for file in stems]
        study.main([f"--configs={';'.join(texts)}", "--seeds=1", f"--out={'-'.join(stems)}", "--list"])
        assert [run.model for run in load_study(f"{'-'.join(stems)}/study.py").runs] == (labels or texts)


@pytest.mark.slow
def test_configs_are_trained_and_compared(blocks_dir, tmp_path, capsys):
    study.main([*study_arguments(blocks_dir, tmp_path / "out", seeds=2), "--jobs=2"])
    assert "## Gaps to transformer_pp" in capsys.readouterr().out
    lines = leaderboard.read(tmp_path / "out" / "leaderboard.csv")
    assert [(line["model"], line["seeds"]) for line in lines] == [("top1_chunk, model.mixer.chunk_size=8", 2)]
    assert (tmp_path / "out" / "losses.png").is_file()
    assert all(len(run.ends) == len(ENDS) for run in files.read(tmp_path / "out").runs)


@pytest.mark.slow
def test_failed_run_does_not_stop_other_runs(trained_study, tmp_path, capsys):
    study.main([f"--study={trained_study}", "--list"])
    assert capsys.readouterr().out.count("not begun") == 3
    with pytest.raises(UserError, match=r"1 of 3 .*: bad"):
        study.main([f"--study={trained_study}", f"--out={tmp_path / 'out'}", "--jobs=2"])
    out = capsys.readouterr().out
    assert "bad: failed with status 2" in out
    assert "not_finite" in out, "the end of the run's output"
    rows = (tmp_path / "out" / "points.csv").read_text()
    assert "fast,fast,0,1,1,4," in rows
    assert "bad" not in rows
    assert "**Missing:** bad (failed)" in (tmp_path / "out" / "leaderboard.md").read_text()
    # Complete runs are not trained again; --only trains no other run.
    before = (tmp_path / "fast" / "metrics.jsonl").stat().st_mtime_ns
    study.main([f"--study={trained_study}", "--only=2"])
    assert (tmp_path / "fast" / "metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--only=medium: "):
        study.main([f"--study={trained_study}", "--only=medium"])


def test_only_keeps_the_requested_order():
    runs = load_study("books_16k").runs
    chosen = runner.select(runs, f"{runs[3].label}; 1;{runs[3].label}")
    assert [run.index for run in chosen] == [3, 1] and runner.select(runs, "") == runs
    with pytest.raises(UserError, match=r"--only=99: .* 0 'Transformer\+\+, QK norm'"):
        runner.select(runs, "1; 99")


def test_run_that_ended_early_has_failed(trained_study, tmp_path, monkeypatch, capsys):
    """After a signal from outside, the run saves and its status is 0."""
    monkeypatch.setattr(runner, "_start", lambda *_: subprocess.Popen([sys.executable, "-c", ""]))
    with pytest.raises(UserError, match=r"1 of 1 .*: slow"):
        study.main([f"--study={trained_study}", "--only=slow"])
    assert "slow: ended early" in capsys.readouterr().out


def test_run_with_ends_is_complete_once_all_are_evaluated(tmp_path):
    """110 steps: a trunk of 80, and cooldowns of 10 and 20."""
    config = "transformer_pp:debug,train.steps=100,train.ends=(0.5,1.0),optim.cooldown=0.2,optim.warmup_steps=5"
    entries = {"slow": {"workdir": str(tmp_path / "slow"), "config": config}}
    (run,) = load_study(str(write_study(tmp_path / "study.py", entries))).runs
    assert (run.ends, run.lacking, run.complete, run.progress) == ([50, 100], [50, 100], False, (0, 110))
    write_run(tmp_path / "slow" / "ends" / "50", [3.0], steps=[50])
    row = '{"step": 60, "train/loss": 3.0, "tokens_per_s": 7.0}\n'
    (tmp_path / "slow" / "metrics.jsonl").write_text(row)
    assert (run.lacking, run.complete, run.progress) == ([100], False, (70, 110))
    assert run.last_row()["tokens_per_s"] == 7.0
    assert "step 70/110" in runner.table([run])
    assert collect.progress(run) == "no evaluation yet at the end after step 100"
    write_run(tmp_path / "slow" / "ends" / "100", [3.0], steps=[100])
    (tmp_path / "slow" / "metrics.jsonl").write_text(row.replace("60", "80"))
    assert run.tokens_per_s() == 5.0, "the median of the trunk's 7 and the two cooldowns' 5"
    assert (run.lacking, run.complete, run.progress) == ([], True, (110, 110))
    assert run.last_row()["tokens_per_s"] == 5.0 and collect.progress(run) == ""
    entries["slow"]["schedule"] = 0.5
    with pytest.raises(UserError, match=r"'slow': .*schedule"):
        load_study(str(write_study(tmp_path / "study.py", entries)))


def test_runs_in_a_store_are_listed(runs, memory, tmp_path, capsys):
    urls = {name: {"workdir": support.put(workdir, f"{memory}/{name}")} for name, workdir in runs.items()}
    path = write_study(tmp_path / "study.py", urls)
    (run, _) = load_study(path).runs
    assert run.workdir == urls["fast"]["workdir"] and run.log.is_relative_to(tmp_path / "cache")
    study.main([f"--study={path}", "--list"])
    assert capsys.readouterr().out.count("read only") == 2
    with pytest.raises(UserError, match="--out=s3://bucket/study: "):
        study.main([f"--study={path}", "--out=s3://bucket/study"])


@pytest.mark.slow
def test_block_losses_are_stored(trained_study, tmp_path):
    runs = load_study(str(trained_study)).runs
    config = runs[0].config
    assert config is not None
    train(config, runs[0].workdir)
    blocks, losses = eval_losses.read(runs[0].workdir)
    assert sorted(losses) == [2, 4]
    row = metrics.read(runs[0].workdir)[-1]
    for domain, domain_losses in losses[4].items():
        assert domain_losses.shape == blocks[f"{domain}/documents"].shape == blocks[f"{domain}/n_bytes"].shape
        assert float(domain_losses.astype(float).mean()) == pytest.approx(row[f"eval/{domain}/loss"], rel=1e-6)
        nats = float(domain_losses.astype(float).sum()) * 32
        bits = nats / math.log(2) / blocks[f"{domain}/n_bytes"].sum()
        assert bits == pytest.approx(row[f"eval/{domain}/bits_per_byte"], rel=1e-6)
    outside = [row[f"eval/{domain}/loss"] for domain in ("arxiv", "github", "stackexchange")]
    assert row["eval_mean/out_of_domain/equal"] == pytest.approx(sum(outside) / 3)
    assert min(outside) < row["eval_mean/out_of_domain/natural"] < max(outside)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="terminated"), pytest.param(signal.SIGKILL, id="killed")],
)
def test_signal_stops_all_runs(trained_study, tmp_path, number):
    """The first run is long, so the signal always arrives during training."""
    text = trained_study.read_text()
    assert "train.steps=4," in text
    trained_study.write_text(text.replace("train.steps=4,", "train.steps=100000,", 1))
    command = [sys.executable, "-m", "seqjax.study", f"--study={trained_study}", f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=support.ROOT)
    lock = tmp_path / "slow" / "run.lock"
    try:
        _wait(lock.exists)
        process.send_signal(number)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGTERM else -number)
    _wait(lambda: not lock.exists() or not Holder(**json.loads(lock.read_text())).alive)
    assert not load_study(str(trained_study)).runs[0].complete
    assert not (tmp_path / "bad").exists()
    assert not (tmp_path / "fast").exists()


def _wait(done) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)
