"""The runs of a judgement (seqjax/study/judge.py): a mixer's config beside two of attention on the same data.

The references are Transformer++ with QK norm, which is attention as published, and the same with the short convolution
that recurrent mixers have, which is attention with the same block. Both have the size of the mixer's config and its
settings of data, training, evaluation and optimiser but for the learning rate, which is recorded for each size and
reference.

The runs are those of a study file, DIR/study.py, to which they are appended: the index of a run never changes.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import seqjax
from seqjax.config import Config, from_config_dict, presets
from seqjax.config.settings import to_dict
from seqjax.data import open_corpus
from seqjax.study.runner import Run
from seqjax.study.studies import make_run
from seqjax.utils import UserError, replacing

PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
REFERENCES = {
    SAME_BLOCK: "model.mixer.qk_norm=True,model.mixer.conv=True",
    PUBLISHED: "model.mixer.qk_norm=True",
}
IN_WORDS = {SAME_BLOCK: "attention with the same block", PUBLISHED: "attention as published"}
MODEL_ENDS = (0.5, 0.8, 1.0)
REFERENCE_ENDS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# Without evaluations between the ends, which a comparison does not read. The trunk's newest checkpoint suffices to
# resume; decayed ends have none.
COMMON = "eval.every=0,checkpoint.keep=1,checkpoint.ends=none,log.sample_tokens=0,log.tensorboard=False"
SHARED = ("data", "train", "eval", "optim")  # groups of settings that the references take from the mixer's config
OWN = ("optim.lr", "train.ends", "train.seed", "data.seed")  # written for every run
MOST_SEEDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """The recorded learning rates of a size, and where a judgement is shorter than the size's own runs.

    `reference_rates` has one for each of `REFERENCES`, `batch_tokens` is the number of tokens of a step at which the
    rates were recorded, and `took` a sentence about the time of a judgement.
    """

    reference_rates: Mapping[str, float]
    rates: tuple[float, ...]
    batch_tokens: int
    steps: int | None = None
    eval_tokens: int | None = None
    took: str = ""  # what was measured


SCALES: dict[str, Scale] = {
    # docs/results/trunks_110m: with the convolution 2e-3 is the best of four rates, without 1e-3 the best of three, and
    # Gated DeltaNet is best at 2e-3.
    "110m": Scale(reference_rates={SAME_BLOCK: 2e-3, PUBLISHED: 1e-3}, rates=(1e-3, 2e-3, 4e-3), batch_tokens=65_536),
    # Measured with Transformer++ and QK norm, one seed, a trunk of 150 steps with an end: loss in domain 2.185 at 2e-3,
    # 2.056 at 4e-3 and 2.261 at 8e-3. A judgement takes 150 steps and 16,384 tokens of each domain, half of what the
    # size has: with three seeds it trains 16.5 times the steps of a run, on two CPU cores.
    "demo": Scale(
        reference_rates=dict.fromkeys(REFERENCES, 4e-3),
        rates=(2e-3, 4e-3, 8e-3),
        batch_tokens=4_096,
        steps=150,
        eval_tokens=16_384,
        took="On two CPU cores a first mixer took 46 minutes, of which attention's runs were 31.",
    ),
    # The same with the size's 20 steps: 3.699 at 2e-3, 3.570 at 4e-3, 3.526 at 8e-3 and 3.615 at 1.6e-2.
    "debug": Scale(reference_rates=dict.fromkeys(REFERENCES, 8e-3), rates=(4e-3, 8e-3, 16e-3), batch_tokens=512),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is judged, against what, and where; the texts of configs are without rate, ends and seeds."""

    model: str
    text: str
    config: Config
    references: Mapping[str, str]
    domains: tuple[str, ...]
    against: tuple[str, ...]
    manifest: str
    rates: tuple[float, ...]
    reference_rates: Mapping[str, float]
    seeds: int
    out: Path
    cache: Path
    warnings: tuple[str, ...]

    @property
    def study(self) -> Path:
        """The study file."""
        return self.out / "study.py"

    @property
    def judged(self) -> dict[str, Any]:
        """The identity of the judgement: a directory holds one."""
        settings = hashlib.sha256(json.dumps(to_dict(self.config), sort_keys=True).encode()).hexdigest()[:16]
        return {
            "config": self.text,
            "settings": settings,
            "manifest": self.manifest,
            "rates": list(self.rates),
            "reference_rates": dict(self.reference_rates),
        }

    @property
    def unit(self) -> float:
        """The learning rate of which the field `rate` of a run is a multiple."""
        return self.reference_rates[PUBLISHED]

    def of_mixer(self, rate: float, *, seed: int, ends: Sequence[float]) -> tuple[str, dict[str, Any]]:
        """Return the label and the entry of a run of the mixer; its workdir is chosen when it is added."""
        config = _text(self.text, rate=rate, ends=ends, seed=seed)
        entry = {"config": config, "model": self.model, "seed": seed, "rate": rate / self.unit}
        return f"{self.model}, rate {rate:g}, seed {seed}", entry

    def of_reference(self, model: str, *, seed: int) -> tuple[str, dict[str, Any]]:
        """Return the label and the entry of a run of a reference, whose workdir is in the cache."""
        rate = self.reference_rates[model]
        text = _text(self.references[model], rate=rate, ends=REFERENCE_ENDS, seed=seed)
        workdir = self.cache / workdir_name(model, read(text), manifest=self.manifest)
        entry = {"workdir": str(workdir), "config": text, "model": model, "seed": seed, "rate": rate / self.unit}
        return f"{model}, seed {seed}", entry


class Runs:
    """The runs of a judgement, by label in the order of their indices, and their study file.

    Those of the file are kept. Raises `UserError` if it is that of another judgement, or of no judgement.
    """

    def __init__(self, plan: Plan):
        self.plan, self._entries, self._runs = plan, dict[str, dict[str, Any]](), dict[str, Run]()
        if plan.study.is_file():
            module = presets.load_file(plan.study)
            found = getattr(module, "JUDGED", None)
            if found != plan.judged:
                other = f"judges {found['config']}" if isinstance(found, dict) else "was not written by seqjax judge"
                raise UserError(
                    f"--out={plan.out}: its study.py {other}, with other settings than {plan.text}; give another --out."
                )
            self._entries |= module.RUNS
        # The references, seed by seed, are first, so that the file is a study from the beginning.
        pairs = [(model, seed) for seed in range(plan.seeds) for model in plan.references]
        self.references = [self.add(*plan.of_reference(model, seed=seed)) for model, seed in pairs]

    def add(self, label: str, entry: Mapping[str, Any]) -> Run:
        """Return the run of that label, appended if there is none yet."""
        if label not in self._entries:
            where = {"workdir": str(self.plan.out / "runs" / f"{len(self._entries):02d}")}
            self._entries[label] = where | dict(entry)
        if label not in self._runs:
            index = list(self._entries).index(label)
            self._runs[label] = make_run(self.plan.study, index, label, self._entries[label])
        return self._runs[label]

    def mixer(self, rate: float, *, seed: int, ends: Sequence[float]) -> Run:
        """Return a run of the mixer."""
        return self.add(*self.plan.of_mixer(rate, seed=seed, ends=ends))

    def expected(self) -> list[Run]:
        """Return the seeds of the mixer that are still to come, at a rate that stands for the best; none is added."""
        plan = self.plan
        entries = [plan.of_mixer(plan.rates[0], seed=seed, ends=MODEL_ENDS)[1] for seed in range(1, plan.seeds)]
        found = []
        for seed, entry in enumerate(entries, start=1):
            where = {"workdir": str(plan.out / "runs" / f"expected{seed}")}
            found.append(
                make_run(plan.study, len(self._entries) + seed, f"{plan.model}, best rate, seed {seed}", where | entry)
            )
        return found

    def write(self) -> None:
        """Write the study file."""
        plan = self.plan
        plan.out.mkdir(parents=True, exist_ok=True)
        text = STUDY.format(
            title=f"{plan.model} judged at {plan.config.size}",
            path=plan.study,
            out=plan.out,
            judged=plan.judged,
            runs="\n".join(f"    {label!r}: {entry!r}," for label, entry in self._entries.items()),
            references=tuple(plan.references),
            against=plan.against,
            domains=plan.domains,
        )
        with replacing(plan.study) as file:
            file.write(text.encode())


STUDY = '''"""{title}.

Written by `seqjax judge`, which appends runs and never changes the index of one. It is an ordinary study as well, which
also trains the runs that the judge dropped:

    seqjax study --study={path} --out={out}
"""

JUDGED = {judged}
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
    reference_rate: float | None = None,
) -> Plan:
    """Return the plan of judging the config `FILE_OR_NAME[:SIZE[,...]]`.

    Raises `UserError` for a config that cannot be read or takes no argument, a size without recorded rates, or data
    without domains in and out of training.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds must be 1 to {MOST_SEEDS}, not {seeds}.")
    own, argument = _own_text(text)
    given = read(own)
    size = given.size
    if size not in presets.SIZES:
        raise UserError(f"--config={text}: its size is {size!r}; a judgement needs one of {', '.join(presets.SIZES)}.")
    scale = SCALES.get(size)
    if scale is None and (not rates or reference_rate is None):
        raise UserError(
            f"--config={text}: no learning rates are recorded for the size {size}; give those to try, --rates=A,B,C, "
            "and that of the references, --reference_rate=X."
        )
    recorded = scale.reference_rates if scale is not None else {}
    reference_rates = recorded if reference_rate is None else dict.fromkeys(REFERENCES, reference_rate)
    rates = tuple(rates or (scale.rates if scale is not None else ()))
    if min((*rates, *reference_rates.values())) <= 0 or len(set(rates)) < len(rates):
        raise UserError("--rates and --reference_rate are learning rates above 0, each named once.")
    common = COMMON
    if scale is not None and scale.steps is not None and given.train.steps == presets.SIZES[size].steps:
        common += f",train.steps={scale.steps}"
    if scale is not None and scale.eval_tokens is not None and given.eval.tokens == presets.SIZES[size].eval_tokens:
        common += f",eval.tokens={scale.eval_tokens}"
    own = f"{own},{common}"
    config = read(_text(own, rate=sorted(rates)[len(rates) // 2], ends=MODEL_ENDS, seed=0))
    corpus = open_corpus(config.data, seq_len=config.train.seq_len, vocab_size=config.model.vocab_size)
    against = tuple(name for name in corpus.eval_domains if name in corpus.in_domain)
    domains = tuple(name for name in corpus.eval_domains if name not in corpus.in_domain)
    if not domains or not against:
        raise UserError(
            f"--config={text} is evaluated on {', '.join(corpus.eval_domains)}; a judgement needs domains that it is "
            "trained on and domains that it is not, as in the regime limited."
        )
    warnings = []
    batch = config.train.batch_size * config.train.seq_len
    if scale is not None and batch != scale.batch_tokens:
        warnings.append(
            f"The learning rates of the size {size} were recorded with {scale.batch_tokens:,} tokens a step, and a "
            f"step has {batch:,} here; others may be better."
        )
    return Plan(
        model=_name(own, argument),
        text=own,
        config=config,
        references={model: reference_text(config, settings, common) for model, settings in REFERENCES.items()},
        domains=domains,
        against=against,
        manifest=corpus.manifest_hash,
        rates=rates,
        reference_rates=reference_rates,
        seeds=seeds,
        out=Path(out).resolve(),
        cache=(cache or default_cache()).resolve(),
        warnings=tuple(warnings),
    )


def read(text: str) -> Config:
    """Return the checked config of `FILE_OR_NAME:ARG`."""
    return from_config_dict(presets.read_config(text))


def default_cache() -> Path:
    """Return the directory of the runs of references, which all judgements share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seqjax" / "references"


def workdir_name(model: str, config: Config, *, manifest: str) -> str:
    """Return the name of a reference's workdir: model, size, and a hash of all settings, the data and the version."""
    whole = {"config": to_dict(config), "manifest": manifest, "version": seqjax.__version__}
    key = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]
    name = "".join(c if c.isalnum() else "_" for c in model.lower())
    return f"{name}-{config.size}-seed{config.train.seed}-{key}"


def reference_text(config: Config, settings: str, common: str) -> str:
    """Return the text of a reference's config: its mixer's `settings`, and what `config` shares with it.

    Raises `UserError` if a setting cannot be written on the command line.
    """
    text = f"transformer_pp:{config.size},{settings},{common}"
    base, ours = _flat(read(text)), _flat(config)
    shared = [key for key in ours if key.partition(".")[0] in SHARED and key not in OWN]
    # Its tokenizer decides the vocabulary.
    changes = {key: ours[key] for key in [*shared, "model.vocab_size"] if ours[key] != base[key]}
    text = ",".join([text, *(f"{key}={value}" for key, value in changes.items())])
    made = _flat(read(text))
    if wrong := [key for key in changes if made[key] != ours[key]]:
        raise UserError(
            f"config.{wrong[0]}={ours[wrong[0]]!r} cannot be given to the references as text; choose a value "
            "without commas or brackets."
        )
    return text


def _flat(config: Config) -> dict[str, Any]:
    """Return the settings of all groups but `model`, of which the vocabulary alone, by dotted key."""
    found: dict[str, Any] = {"model.vocab_size": config.model.vocab_size}
    for group in SHARED:
        values = getattr(config, group)
        found |= {f"{group}.{field.name}": getattr(values, field.name) for field in dataclasses.fields(values)}
    return found


def _own_text(text: str) -> tuple[str, str]:
    """Return the config's text with an argument and an absolute path if it is a file, and the argument as given."""
    name, _, argument = text.partition(":")
    path = presets.find(name)
    if Path(name).suffix == ".py" and Path(name).is_file():
        name = str(path.resolve())
    try:
        # A config that is given no argument may have another default than the presets'.
        default = from_config_dict(presets.read_config(name))
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
    words = [size, regime, *(f"{key}={value}" for key, value in overrides)]
    return f"{name}:{','.join(words)}", argument


def _name(text: str, argument: str) -> str:
    """Return the name of the model: that of its file, and the settings of the model that were given."""
    given = [part for part in presets.parts(argument) if part.strip().startswith("model.")]
    name = ", ".join([Path(text.partition(":")[0]).stem, *given])
    return name if name not in REFERENCES else f"{name} (judged)"


def _text(text: str, *, rate: float, ends: Sequence[float], seed: int) -> str:
    return f"{text},optim.lr={rate:g},train.ends={tuple(ends)},train.seed={seed},data.seed={seed}"
