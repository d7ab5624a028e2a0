"""A fake trainer that writes runs with known losses, and a finished study."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqjax.config import to_dict
from seqjax.study.judge import judge, plan
from seqjax.study.judge.plan import PUBLISHED, SAME_BLOCK
from seqjax.study.runs import files, runner
from seqjax.study.runs.collect import collect
from seqjax.study.runs.runner import Run
from seqjax.study.runs.studies import ENDS
from tests.study.synthetic import write_trunk

DOMAINS = ("commoncrawl", "c4", "arxiv", "github")
LOW, HIGH = 4e-3, 8e-3  # the learning rates of the size debug


class Trainer:
    """Fake trainer: in-domain losses fall to `last`, OOD losses have a known gap."""

    def __init__(self):
        self.best = {"": HIGH}  # best learning rate by model, "" for other models
        self.mixer, self.reference, self.gap = 3.0, 3.05, 0.3
        self.per_octave, self.spread = (
            0.02,
            0.004,
        )  # in-domain loss per octave from the best rate; OOD difference between seeds
        self.diverging: set[float] = set()
        self.broken: set[str] = set()
        self.stop_after = math.inf
        self.trained: list[str] = []
        self.corpus = SimpleNamespace(eval_domains=DOMAINS, in_domain=DOMAINS[:2], manifest_hash="m")

    def last(self, run):
        best = self.best.get(run.model, self.best[""])
        base = self.reference if run.model in (PUBLISHED, SAME_BLOCK) else self.mixer
        return base + self.per_octave * abs(math.log2(run.config.optim.lr / best)) + 0.002 * run.seed

    def write(self, run, *, may_stop=lambda run: False):
        is_reference = run.model in (PUBLISHED, SAME_BLOCK)
        gap = (0.0 if is_reference else self.gap) + self.spread * (0, 1, -1)[(run.seed + is_reference) % 3]
        steps = run.config.train.steps
        for share in run.config.train.ends:
            loss = self.last(run) + 1.0 * (1 - share)
            write_trunk(run.workdir, {share: loss}, lambda name, x: x + 1 + gap, steps=steps, noise=0)
            (run.workdir / "config.json").write_text(json.dumps(to_dict(run.config)))
            if may_stop(run):
                return

    def train_all(self, study, runs, *, jobs, may_stop):
        assert all(repr(run.label) in Path(study).read_text() for run in runs)
        failed = []
        for run in runs:
            if may_stop(run):
                continue
            if len(self.trained) >= self.stop_after:
                raise KeyboardInterrupt
            self.trained.append(run.label)
            if run.label in self.broken or (run.config.optim.lr in self.diverging and "mamba2" in run.label):
                run.workdir.mkdir(parents=True, exist_ok=True)
                if run.label not in self.broken:
                    (run.workdir / "not_finite_step7.npz").touch()
                failed.append(run)
                continue
            self.write(run, may_stop=may_stop)
        return failed


@pytest.fixture
def trainer(monkeypatch):
    """Replace the data, the training, the mixer checks, the tables and the pictures."""
    instance = Trainer()
    monkeypatch.setattr(plan, "open_corpus", lambda *args, **kwargs: instance.corpus)
    monkeypatch.setattr(runner, "train_all", instance.train_all)
    monkeypatch.setattr("seqjax.study.judge.run.require_sound", lambda plan: None)
    monkeypatch.setattr("seqjax.study.judge.run.analyse", lambda directory, *, quiet: "")
    return instance


@pytest.fixture
def judged(trainer, tmp_path):
    """Judge Mamba-2."""

    def run(config="mamba2:debug", **options):
        return judge(config, **({"out": tmp_path / "out", "references": tmp_path / "cache"} | options))

    return run


@pytest.fixture
def lab(trainer, tmp_path):
    """Write a finished study: model -> config, rates, and seeds at the last rate."""

    def write(models, *, name="lab", settings="", ends=ENDS):
        runs = []
        for model, (config, rates, seeds) in models.items():
            cells = [(rate, 0) for rate in rates] + [(rates[-1], seed) for seed in range(1, seeds)]
            for rate, seed in cells:
                text = f"{config},{plan.COMMON},optim.lr={rate},train.seed={seed},data.seed={seed},train.ends={ends}"
                settings_config = plan.read(text + settings)
                label, workdir = f"{model}, rate {rate}, seed {seed}", tmp_path / f"{name}-runs" / f"{len(runs)}"
                runs.append(Run(len(runs), label, workdir, settings_config, model, seed, rate=rate / LOW))
                trainer.write(runs[-1])
        study = {"title": "t", "references": [next(iter(models))], "domains": DOMAINS[2:], "against": DOMAINS[:2]}
        out = tmp_path / name
        files.write(
            out, collect(runs, DOMAINS), study=study, missing={}, workdirs={run.label: run.workdir for run in runs}
        )
        return out

    return write


def labels(rate, *seeds, model="mamba2"):
    return [f"{model}, rate {rate:g}, seed {seed}" for seed in seeds]
