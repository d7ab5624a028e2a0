"""Plan a judgement's runs: a mixer's config, and two references on the same data.

The references are Transformer++ with QK norm (attention as published), and the same model with the short convolution
from recurrent mixers (attention with the same block). Both have the size and the data, training, evaluation and
optimiser settings of the mixer's config. Their norms and MLP are the defaults of the size; changes of them in the
mixer's config are not copied.

A run trains at a constant learning rate. At each step in `train.ends` a copy of it decays the rate to zero and is
evaluated; this is an end.

The runs are in a study file, DIR/study.py. New runs are appended, so a run's index never changes.
"""

import dataclasses
import hashlib
import json
import math
import os
import pprint
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import seqjax
from seqjax import mixers
from seqjax.config import Config, from_config_dict, presets
from seqjax.config.settings import to_dict
from seqjax.data import open_corpus, regimes
from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.study.judge import joined, matching
from seqjax.study.judge.joined import UNIT, Joined, rounded
from seqjax.study.judge.matching import Match
from seqjax.study.runs import identity
from seqjax.study.runs.runner import Run
from seqjax.study.runs.studies import ENDS, make_run
from seqjax.training import schedule
from seqjax.training.identity import without_added

PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
REFERENCES = {
    SAME_BLOCK: "model.mixer.qk_norm=True,model.mixer.conv=True",
    PUBLISHED: "model.mixer.qk_norm=True",
}
IN_WORDS = {SAME_BLOCK: "attention with the same block", PUBLISHED: "attention as published"}
# A comparison reads only the ends, so the constant rate has no evaluations. The newest checkpoint at the constant rate
# suffices to resume, so ends keep none.
COMMON = "eval.every=0,checkpoint.keep=1,checkpoint.ends=none,log.sample_tokens=0,log.tensorboard=False"
SHARED = ("data", "train", "eval", "optim")  # groups of settings that the references take from the mixer's config
MOST_SEEDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """Hold a size's recorded learning rates, and the judgement's shorter settings.

    Args:
        rates: The two learning rates at which the mixer and the references are trained.
        batch_tokens: Tokens per step at which the rates were recorded.
        steps, eval_tokens: Settings that a judgement uses instead of the size's; None keeps the size's setting.
    """

    rates: tuple[float, float]
    batch_tokens: int
    steps: int | None = None
    eval_tokens: int | None = None


SCALES: dict[str, Scale] = {
    # From lab/results/trunks_110m. Best rates: 2e-3 out of four with the convolution, 1e-3 out of three without it, and
    # 2e-3 for Gated DeltaNet.
    "110m": Scale(rates=(1e-3, 2e-3), batch_tokens=65_536),
    # Measured with Transformer++ and QK norm, one seed, a WSD run with 150 steps and one end: in-domain loss 2.185 at
    # 2e-3, 2.056 at 4e-3 and 2.261 at 8e-3. A judgement uses 150 steps and 16,384 tokens per domain, half the size's
    # settings, because the runs of a first mixer and its references take 21 times a run's steps on two CPU cores.
    "demo": Scale(rates=(2e-3, 4e-3), batch_tokens=4_096, steps=150, eval_tokens=16_384),
    # As above, with the size's 20 steps: 3.699 at 2e-3, 3.570 at 4e-3, 3.526 at 8e-3 and 3.615 at 1.6e-2.
    "debug": Scale(rates=(4e-3, 8e-3), batch_tokens=512),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Hold a judgement's mixer, references, data and directories.

    `text` is the mixer's config as text, without rate, ends and seeds.
    """

    model: str
    text: str
    config: Config
    references: Mapping[str, Config]
    domains: tuple[str, ...]
    against: tuple[str, ...]
    manifest: str
    rates: tuple[float, ...]
    seeds: int
    out: Path
    cache: Path
    match: Match | None = None
    joined: Joined = dataclasses.field(default_factory=Joined)
    remarks: tuple[str, ...] = ()
    code: Mapping[str, str] = dataclasses.field(default_factory=dict)  # mixer of the user -> SHA-256 of its file

    @property
    def study(self) -> Path:
        """The study file."""
        return self.out / "study.py"

    @property
    def configs(self) -> dict[str, Config]:
        """The configs of the mixer's model and the references, at rate `UNIT` and seed 0."""
        return {self.model: self.config, **self.references}

    @property
    def judged(self) -> dict[str, Any]:
        """The judgement's identity.

        A directory holds one judgement; later commands may add rates, seeds and joined runs.
        """
        return {
            "model": self.model,
            "config": self.text,
            "settings": to_dict(self.config),
            "manifest": self.manifest,
            "code": dict(self.code),
        }

    def entry(self, model: str, rate: float, *, seed: int) -> dict[str, Any]:
        """Return a run's entry. A reference's workdir is in the cache."""
        about = {"model": model, "seed": seed, "rate": rounded(rate / UNIT)}
        if model == self.model:  # text, because it contains the mixer's file name
            return {"config": _text(self.text, rate=rate, seed=seed)} | about
        config = _run_config(self.references[model], rate=rate, seed=seed)
        workdir = self.cache / workdir_name(model, config, manifest=self.manifest)
        return {"workdir": str(workdir), "config": to_dict(config)} | about


def run_label(model: str, rate: float, seed: int) -> str:
    """Return a run's label."""
    return f"{model}, rate {rate:g}, seed {seed}"


class Runs:
    """Hold a judgement's runs by label, in index order, and write their study file.

    `rates` are the learning rates from this and earlier commands. Raises `UserError` if the study file belongs to
    another judgement, or was not written by a judgement.
    """

    def __init__(self, plan: Plan):
        self.plan, self._entries, self._runs = plan, dict[str, dict[str, Any]](), dict[str, Run]()
        earlier_rates: Sequence[float] = ()
        if plan.study.is_file():
            module = presets.load_file(plan.study)
            if mismatch := _mismatch(plan, _judged(module)):
                raise UserError(f"--out={plan.out}: its study.py {mismatch}. Give another --out.")
            self._entries |= module.RUNS
            earlier_rates = module.RATES
        self.rates = sorted({*earlier_rates, *plan.rates})

    def run(self, model: str, rate: float, *, seed: int = 0) -> Run:
        """Return a run, and append it if it is new."""
        label = run_label(model, rate, seed)
        if label not in self._entries:
            location = {"workdir": str(self.plan.out / "runs" / f"{len(self._entries):02d}")}
            self._entries[label] = location | self.plan.entry(model, rate, seed=seed)
        return self._load(label)

    def known(self, model: str, rate: float, *, seed: int) -> Run | None:
        """Return a run; None if it does not exist yet."""
        label = run_label(model, rate, seed)
        return self._load(label) if label in self._entries else None

    def tried(self, model: str) -> list[float]:
        """Return the learning rates of a model's runs with seed 0."""
        entries = [entry for entry in self._entries.values() if entry["model"] == model and entry["seed"] == 0]
        return [rounded(entry["rate"] * UNIT) for entry in entries]

    def runs(self) -> list[Run]:
        """Return all runs."""
        return [self._load(label) for label in self._entries]

    def _load(self, label: str) -> Run:
        if label not in self._runs:
            index = list(self._entries).index(label)
            self._runs[label] = make_run(self.plan.study, index, label, self._entries[label])
        return self._runs[label]

    def drop(self, run: Run) -> Run:
        """Shorten a run to its finished ends, and return it.

        The study keeps the run, as a rate that is clearly worse.
        """
        assert run.config is not None, "a judgement trains its runs"
        lacking = run.lacking
        ends = [step for step in run.ends if step not in lacking]
        shares = schedule.shares_of_steps(ends, steps=ends[-1])
        entry = self._entries[run.label]
        if isinstance(entry["config"], str):  # the mixer, or an entry from an earlier version
            entry["config"] += f",train.steps={ends[-1]},train.ends={shares}"
        else:
            entry["config"]["train"] |= {"steps": ends[-1], "ends": shares}
        del self._runs[run.label]
        return self._load(run.label)

    def write(self) -> None:
        """Write the study file."""
        plan = self.plan
        plan.out.mkdir(parents=True, exist_ok=True)
        models = {entry["model"] for entry in self._entries.values()}
        text = STUDY.format(
            title=title(plan),
            judged=pprint.pformat(plan.judged, width=118, compact=True, sort_dicts=False),
            rates=self.rates,
            runs="\n".join(f"    {label!r}: {entry!r}," for label, entry in self._entries.items()),
            # A study must have a reference, but all references may come from joined studies.
            references=tuple(name for name in plan.references if name in models) or (plan.model,),
            against=plan.against,
            domains=plan.domains,
        )
        with replacing(plan.study) as file:
            file.write(text.encode())


def _judged(study: ModuleType) -> dict[str, Any]:
    """Return the identity of the judgement that wrote a study file; {} without one."""
    recorded = getattr(study, "JUDGED", None)
    return recorded if isinstance(recorded, dict) and {"config", "settings", "manifest"} <= recorded.keys() else {}


def _mismatch(plan: Plan, judged: Mapping[str, Any]) -> str:
    """Return how an existing judgement differs from a plan; "" if it is the same."""
    if not judged:
        return "was not written by seqjax judge"
    settings = judged["settings"]
    if isinstance(settings, str):  # Earlier versions wrote a hash.
        settings_text = json.dumps(without_added(to_dict(plan.config)), sort_keys=True)
        is_same = settings == hashlib.sha256(settings_text.encode()).hexdigest()[:16]
        settings = to_dict(plan.config if is_same else read(judged["config"]))
    changed = identity.changed(settings, plan.config, may_grow=False)
    if (name := judged.get("model", plan.model)) != plan.model:
        changed.insert(0, f"model: {name} -> {plan.model}")
    if (code := judged.get("code", plan.code)) != plan.code:  # earlier versions did not record it
        files = [name for name in plan.code if code.get(name) != plan.code[name]]
        changed.append(f"code: {', '.join(files)} was edited")
    if judged["manifest"] != plan.manifest:
        changed.append(f"data: manifest {judged['manifest'][:16]} -> {plan.manifest[:16]}")
    return f"judges {judged['config']}, and this command has other settings ({'; '.join(changed)})" if changed else ""


def title(plan: Plan) -> str:
    """Return the study's title."""
    return f"{plan.model} judged at {plan.config.size}"


STUDY = '''"""The runs of a judgement, written by `seqjax judge`, which appends runs and keeps their indices."""

JUDGED = {judged}
RATES = {rates}
RUNS = {{
{runs}
}}


def get_study():
    """Return the title, references, domains and runs."""
    return {{
        "title": {title!r},
        "references": {references},
        "against": {against},
        "domains": {domains},
        "runs": RUNS,
    }}
'''


def make_plan(
    text: str,
    *,
    out: Path,
    cache: Path | None = None,
    seeds: int = 3,
    rates: Sequence[float] = (),
    match: str | None = None,
    runs: Sequence[Path] = (),
    needs_data: bool = True,
) -> Plan:
    """Return the plan to judge a config `FILE_OR_NAME[:SIZE[,...]]`.

    `runs` are finished studies that join. Without `needs_data` (dry run), unreadable data only causes a remark, and the
    domains come from the config.

    Raises `UserError` for a config that cannot be read or takes no argument, a size without recorded rates, data
    without in-domain or OOD domains, a width that cannot be matched, or studies that cannot be joined.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must be 1 to {MOST_SEEDS}, not {seeds}.")
    full_text, argument = _full_text(text)
    user_config = read(full_text)
    size = user_config.size
    _require_size(text, size)
    scale = SCALES.get(size)
    if scale is None and not rates:
        raise UserError(
            f"--config={text}: no learning rates are recorded for the size {size}; give two to try, --rates=A,B."
        )
    if user_config.optim.name != "adam" and not rates:
        raise UserError(
            f"--config={text}: no learning rates are recorded for config.optim.name={user_config.optim.name!r}; give "
            "two to try, --rates=A,B."
        )
    rates = tuple(rounded(rate) for rate in rates or (scale.rates if scale is not None else ()))
    if not all(0 < rate < math.inf for rate in rates) or len(set(rates)) < len(rates):
        raise UserError("--rates must be learning rates above 0, each named once.")
    name, full_text = _name(full_text, argument), f"{full_text},{COMMON}"
    if scale is not None and scale.steps is not None and user_config.train.steps == presets.SIZES[size].steps:
        full_text += f",train.steps={scale.steps}"
    if (
        scale is not None
        and scale.eval_tokens is not None
        and user_config.eval.tokens == presets.SIZES[size].eval_tokens
    ):
        full_text += f",eval.tokens={scale.eval_tokens}"
    config = read(_text(full_text, rate=UNIT, seed=0))
    study_path = Path(out) / "study.py"
    # The built-in corpus is made from installed packages. A judgement continues with the corpus that it began with.
    recorded = _judged(presets.load_file(study_path)).get("manifest", "") if study_path.is_file() else ""
    remarks = []
    try:
        corpus = open_corpus(
            config.data,
            seq_len=config.train.seq_len,
            vocab_size=config.model.vocab_size,
            recorded=recorded,
        )
        evaluated, in_domain, manifest = corpus.eval_domains, corpus.in_domain, corpus.manifest_hash
    except UserError as error:
        if needs_data:
            raise
        remarks.append(f"The data is NOT READY, so finished reference runs cannot be identified: {error}")
        manifest, regime = recorded, regimes.REGIMES[config.data.regime]
        in_domain = frozenset(config.data.train_domains or regime.train)
        evaluated = config.data.eval_domains or tuple(dict.fromkeys((*in_domain, *regime.eval)))
    against = tuple(name for name in evaluated if name in in_domain)
    domains = tuple(name for name in evaluated if name not in in_domain)
    if not domains or not against:
        raise UserError(
            f"--config={text} is evaluated on {', '.join(evaluated)}; a judgement needs training domains and other "
            "domains, as in the regime limited."
        )
    references = {model: reference(config, settings) for model, settings in REFERENCES.items()}
    matched = matching.match(text, config, references[SAME_BLOCK], how=match)
    if matched is not None:
        full_text = f"{full_text},model.mlp.dim={matched.width}"
        config = read(_text(full_text, rate=UNIT, seed=0))
    batch = config.train.batch_size * config.train.seq_len
    if scale is not None and batch != scale.batch_tokens:
        remarks.append(
            f"The learning rates for the size {size} were recorded with {scale.batch_tokens:,} tokens per step. Here a "
            f"step has {batch:,}, so other rates may be better."
        )
    join = joined.read(runs, config, references, name=name, domains=domains, against=against, manifest=manifest)
    return Plan(
        model=name,
        text=full_text,
        config=config,
        references=references,
        domains=domains,
        against=against,
        manifest=manifest,
        rates=rates,
        seeds=seeds,
        out=Path(out).resolve(),
        cache=(cache or default_cache()).resolve(),
        match=matched,
        joined=join,
        remarks=(*remarks, *join.remarks),
        code=mixers.source_hashes(mixer.name for mixer in config.model.mixers),
    )


def read(text: str) -> Config:
    """Return the checked config `FILE_OR_NAME:ARG`."""
    return from_config_dict(presets.read_config(text))


def default_cache() -> Path:
    """Return the default directory for reference runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqjax" / "references"


def workdir_name(model: str, config: Config, *, manifest: str) -> str:
    """Return a reference's workdir name: model, size, seed and a hash.

    The hash covers all settings, the data and the version.
    """
    hashed = {"config": without_added(to_dict(config)), "manifest": manifest, "version": seqjax.__version__}
    key = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() else "_" for c in model.lower())
    return f"{name}-{config.size}-seed{config.train.seed}-{key}"


def reference(config: Config, settings: str) -> Config:
    """Return a reference's config.

    It has the mixer `settings` and shares the groups `SHARED` with `config`.
    """
    base = read(f"transformer_pp:{config.size},{settings},{COMMON}")
    # The tokenizer of `config` decides the vocabulary.
    model = dataclasses.replace(base.model, vocab_size=config.model.vocab_size)
    return dataclasses.replace(base, model=model, **{group: getattr(config, group) for group in SHARED})


def _run_config(config: Config, *, rate: float, seed: int) -> Config:
    """Return a run's config, with its learning rate and seed."""
    return dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, lr=float(f"{rate:g}")),
        train=dataclasses.replace(config.train, seed=seed),
        data=dataclasses.replace(config.data, seed=seed),
    )


def _require_size(text: str, size: str) -> None:
    if size not in presets.SIZES:
        raise UserError(f"--config={text}: its size is {size!r}; a judgement needs one of {', '.join(presets.SIZES)}.")


def _full_text(text: str) -> tuple[str, str]:
    """Return the config text with an argument, and the user's argument.

    A file has an absolute path in the text.
    """
    name, _, argument = text.partition(":")
    path = presets.find(name)
    if Path(name).suffix == ".py" and Path(name).is_file():
        name = str(path.resolve())
    try:
        # Without an argument, a config may have another default than the presets.
        default = from_config_dict(presets.read_config(name))
        if not argument:
            _require_size(text, default.size)
        presets.read_config(f"{name}:{argument or default.size}")
    except UserError as error:
        if "takes no argument" in str(error):
            raise UserError(
                f"--config: get_config() of {path} takes no argument; let it take one and pass it on, "
                "get_config(arg) and presets.get_config(arg, ...), so that a judgement can set rates and seeds."
            ) from error
        raise
    size, regime, overrides = presets.split(argument)
    size, regime = (size, regime) if argument else (default.size, default.data.regime)
    words = [size, regime, *(f"{key}={_absolute(value)}" for key, value in overrides)]
    return f"{name}:{','.join(words)}", argument


def _absolute(value: str) -> str:
    """Return a setting's value; a mixer's FILE.py:CLASS gets an absolute path."""
    file, colon, cls = value.partition(":")
    return f"{Path(file).resolve()}:{cls}" if colon and file.endswith(".py") and Path(file).is_file() else value


def _name(text: str, argument: str) -> str:
    """Return the model's name: its file's name, and the user's model settings."""
    model_settings = [part for part in presets.parts(argument) if part.strip().startswith("model.")]
    name = ", ".join([Path(text.partition(":")[0]).stem, *model_settings])
    return name if name not in REFERENCES else f"{name} (judged)"


def _text(text: str, *, rate: float, seed: int) -> str:
    return f"{text},optim.lr={rate:g},train.ends={ENDS},train.seed={seed},data.seed={seed}"
