"""Write lab/results/all_mixers.md and .png: `python -m lab.pages.all_mixers`.

All numbers come from recorded results or from model shapes: losses, gaps and verdicts from trunks_110m; speed, memory
and kernels from `benchmarks/results`; scores from recall. A row is a model in trunks_110m, or a shipped config with a
recorded speed or score. Run the command again after any of these change.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.foretell import foretell
from lab.foretell.foretell import LATER, PRIMARY, Mixer
from seqjax.config import Config, from_config_dict, presets, to_dict
from seqjax.evals.recall import report
from seqjax.evals.recall.setups import MODELS, SETUPS
from seqjax.evals.recall.tasks import TaskSetup
from seqjax.evals.recall.train import state_size
from seqjax.models import Model, flops
from seqjax.pictures import COLORS, log_ticks
from seqjax.study import gaps
from seqjax.study.gaps import Row
from seqjax.study.gaps.verdicts import LIMIT
from seqjax.study.report import figures, forest
from seqjax.study.report.tables import markdown
from seqjax.study.runs import files
from seqjax.study.runs.record import Records

RESULTS = Path(__file__).parents[1] / "results"
BENCHMARKS = RESULTS.parents[1] / "benchmarks" / "results"
SHORT, LONG = 2_048, 102_400
# Recorded training steps -> footnote marks in the table. A mixer's speed comes from the first file that has it: one run
# of all mixers with kernels, then the mixers that it left out.
SPEEDS = {
    "train_step": "",
    "train_step_blocks": "¹",
    "train_step_kernels": "²",
    "train_step_ttt": "³",
    "train_step_h100_rest": "⁴",
}
LONG_SPEEDS = ("train_step_135m_100k_selection", "train_step_135m_100k_recurrent", "train_step_135m_100k")
# Labels of configs that no study has.
TITLES = {
    "comba": "Comba",
    "dsa": "DSA",
    "gated_attention": "Gated attention",
    "gated_deltanet_hybrid": "Gated DeltaNet, gated attention 1 in 4",
    "kimi_k3": "Kimi K3",
    "kimi_linear": "Kimi Linear",
    "mesa_net": "MesaNet",
    "mla": "MLA",
    "msa": "MSA",
    "olmo_hybrid": "Olmo Hybrid",
    "parallax": "Parallax",
    "precond_gated_deltanet": "Preconditioned Gated DeltaNet",
    "precond_kda": "Preconditioned KDA",
    "qwen3_next": "Qwen3-Next",
    "ttt_linear": "TTT-Linear",
    "wall": "Wall attention",
}
YARDSTICK = "Transformer++"  # in all files, to compare speeds across GPUs
SETUP = SETUPS["small"]
WIDTH = SETUP.rounds[0][0]


class Speed(NamedTuple):
    """A recorded training step.

    Attributes:
        file: Name of the results file.
        tokens_per_s: Training throughput.
        ratio: Throughput relative to Transformer++ in the same file.
        gib: GiB reserved by XLA.
        kernels: Number of launched kernels.
    """

    file: str
    tokens_per_s: float
    ratio: float | None
    gib: float
    kernels: int | None


class Score(NamedTuple):
    """A task score; `trained` is False if the runs failed the easiest training test."""

    value: float
    trained: bool = True


class Known(NamedTuple):
    """All recorded data by mixer label; `configs` has all labels, in row order."""

    configs: dict[str, Config]
    study: Records
    speeds: dict[str, Speed]
    long_speeds: dict[str, Speed]
    parameters: dict[str, int]
    states: dict[str, tuple[int, int]]
    tasks: dict[str, dict[str, Score]]


def read() -> Known:
    """Read all recorded data."""
    study, configs = files.read(RESULTS / "trunks_110m"), _configs()
    speeds, long_speeds, scores = _speeds(SPEEDS, configs), _speeds(LONG_SPEEDS, configs), _scores(configs)
    of_gaps = order(study)
    recorded = {*speeds, *long_speeds, *(label for of_task in scores.values() for label in of_task)}
    others = sorted(recorded - {*of_gaps}, key=lambda label: _slowness(speeds, label))
    configs = {label: configs[label] for label in (*of_gaps, *others)}
    models = {label: Model(config.model, max_len=SHORT) for label, config in configs.items()}
    states = {
        label: (state_size(model, SHORT), state_size(Model(model.config, max_len=LONG), LONG))
        for label, model in models.items()
    }
    parameters = {label: flops.n_params(model) for label, model in models.items()}
    return Known(configs, study, speeds, long_speeds, parameters, states, scores)


def order(study: Records) -> list[str]:
    """Return the models by gap to the last reference (at zero); models without a gap come last."""
    reference = study.references[-1]
    rows = gaps.compare(study, reference)
    values = {reference: 0.0} | {row.model: row.gap.value for row in rows if row.gap is not None}
    return [*sorted(values, key=values.__getitem__), *(row.model for row in rows if row.model not in values)]


def _slowness(speeds: Mapping[str, Speed], label: str) -> tuple[float, str]:
    return -(speeds[label].ratio or 0.0) if label in speeds else 0.0, label


def _configs() -> dict[str, Config]:
    """Return the study's models and all other shipped configs by label.

    Other configs have their labels from other studies, or their names.
    """
    configs = {label: _config(text) for label, text in presets.load("studies/trunks_110m").MODELS.items()}
    of_others = presets.load("studies/limited_110m").RUNS | {
        label: text for label, text in MODELS.items() if "n_layers" not in text
    }
    named = [(label, _config(text)) for label, text in of_others.items()]
    for name in presets.names():
        shipped = _config(name)
        if all(shipped.model != config.model for config in configs.values()):
            label = next((label for label, config in named if config.model == shipped.model), TITLES.get(name, name))
            configs[label] = shipped
    return configs


def _config(text: str) -> Config:
    """Return the config at size 110m.

    `text` is a config with or without that size, or the name of a benchmark result.
    """
    name, _, settings = text.partition(":")
    settings = settings.removeprefix("110m").removeprefix(",")
    return from_config_dict(presets.read_config(f"{name}:{','.join(filter(None, ('110m', settings)))}"))


def _speeds(files: Iterable[str], configs: Mapping[str, Config]) -> dict[str, Speed]:
    """Return each mixer's speed from the first file that has it.

    Among several backends, the fastest counts.
    """
    speeds: dict[str, Speed] = {}
    for file in files:
        results = {name: result for name, result in recorded(file)["results"].items() if " " not in name}
        models = {name: _config(re.sub("[,:]model.mixer.implementation=[^,]*", "", name)).model for name in results}
        of_label = {
            label: results[name]
            for label, config in configs.items()
            for name, model in sorted(models.items(), key=lambda named: results[named[0]].get("tokens_per_s", 0.0))
            if model == config.model and "error" not in results[name]
        }
        yardstick = of_label.get(YARDSTICK, {}).get("tokens_per_s")
        for label, result in of_label.items():
            speed = result["tokens_per_s"]
            ratio = speed / yardstick if yardstick else None
            speeds.setdefault(label, Speed(file, speed, ratio, result["compiled_bytes"] / 2**30, result.get("kernels")))
    return speeds


def _scores(configs: Mapping[str, Config]) -> dict[str, dict[str, Score]]:
    """Return scores by task.

    A score is the task's primary score if there is one, otherwise the mean accuracy over all tests. `LATER` is a
    separate entry after its task.
    """
    results = report.results(RESULTS / "recall")
    # Leave out labels with different mixer settings in the study: their scores belong to another mixer.
    same = [label for label, config in configs.items() if label in MODELS and not _differs(label, config)]
    mixers = [Mixer(label, np.zeros(0), np.zeros((0, 0))) for label in same]
    every, passed = (
        {mixer.label: mixer.scores for mixer in foretell.with_scores(mixers, results, SETUP, passed=passed)}
        for passed in (False, True)
    )
    of_tasks: dict[str, dict[str, Score]] = {}
    for task in SETUP.tasks:
        of_task = [primary.name for primary in (*PRIMARY, LATER) if primary.task == task.name]
        for name in of_task:
            of_tasks[name] = {
                label: Score(scores[name].mean, name in passed[label])
                for label, scores in every.items()
                if name in scores
            }
        if not of_task:
            of_tasks[task.name] = _mean_accuracies(results, task, same)
    return {name: scores for name, scores in of_tasks.items() if scores}


def _differs(label: str, config: Config) -> str:
    return foretell.other_settings(to_dict(config), label)


def _mean_accuracies(results: Sequence[Mapping[str, Any]], task: TaskSetup, labels: Sequence[str]) -> dict[str, Score]:
    best = report.by_model(results, task)
    scores = {}
    for label in labels:
        for result in best.get(label, ()):
            if result["dim"] == WIDTH:
                mean = np.mean([test["accuracy"] for test in result["tests"].values()]).item()
                scores[label] = Score(mean, report.passed(task, result))
    return scores


# ------------------------------------------------------------------------------------------------------------- the page
ABOUT = """\
# All mixers: gaps, speed, memory, state and tasks

    python -m lab.pages.all_mixers       # writes this page and picture from recorded results

![gap, speed, memory and state of every mixer](all_mixers.png)

Rows are the {configs} shipped configs and the other models in [trunks_110m](trunks_110m/README.md), all at 110M
parameters. The {trained} models (of {rows}) trained in that study come first, sorted by their gap to {reference}.
The others are sorted by training speed. Empty cells were not measured.
"""
GAPS = """\
## Base capabilities

The gap is the OOD loss minus the reference's OOD loss, at equal in-domain loss and matched learning rates
([protocol](../../docs/protocol.md#the-gap-at-equal-loss)). Positive is worse, and ± is half of the 95% interval. The
gap as tuned compares both models at their own near-best rates. `*` marks a provisional verdict: a best rate is the
only one or at the edge of its grid. Losses are means over seeds at a near-best rate, in {unit}. A model with one seed
has no interval.
"""
COSTS = f"""\
## Speed, memory and state

Training speeds were recorded by `python -m benchmarks.train_step`. At {SHORT:,} tokens, brackets show the speed
relative to {YARDSTICK} in the same run, to compare runs on different GPUs. At {LONG:,} tokens, a step has one sequence
and untied embeddings. GiB is the memory that XLA reserves for the step at {SHORT:,} tokens, and kernels is the number
of kernels it launches. The state is the number of elements that decoding stores per sequence, including convolutions
and token shifts, in any precision.
"""
TASKS = f"""\
## Small-model tasks

Small models of width {WIDTH} ([recall](../../docs/recall.md), [all numbers](recall/report.md)), each at its best tried
learning rate.
{{means}}
{{untrained}}"""


def page(known: Known) -> str:
    """Return the content of all_mixers.md."""
    trained = known.study.models
    shipped = [name for name in presets.names() if _config(name).model in [c.model for c in known.configs.values()]]
    counts = {"configs": len(shipped), "rows": len(known.configs), "trained": len(trained)}
    about = ABOUT.format(**counts, reference=known.study.references[-1])
    sections = [
        about,
        GAPS.format(unit=known.study.unit.name),
        _gap_table(known),
        COSTS,
        _cost_table(known),
        _files(known),
    ]
    return "\n".join([*sections, _about_tasks(known), _task_table(known)])


def _gap_table(known: Known) -> str:
    study = known.study
    rows_of = {name: {row.model: row for row in gaps.compare(study, name)} for name in study.references}
    header = ["mixer", "rates tried", "near-best", "seeds", "in-domain loss", "OOD loss"]
    for name in study.references:
        header += [f"gap to {name}", "as tuned", "verdict"]
    rows = []
    for label in known.configs:
        cells = [""] * 5
        if label in study.models:
            rates = gaps.rates(study, label)
            seeds, inside, outside = rates.by_rate[rates.shown]
            tried, near = (", ".join(map(study.rate_text, which)) for which in (rates.by_rate, rates.near))
            cells = [tried, near, str(seeds), f"{inside:.3f}", f"{outside:.3f}"]
        for name in study.references:
            cells += _gap_cells(rows_of[name].get(label))
        rows.append([label, *cells])
    return markdown(header, rows)


def _gap_cells(row: Row | None) -> list[str]:
    """Return the cells: gap to the reference, gap as tuned, verdict."""
    if row is None:
        return ["", "", ""]
    if row.gap is None or row.as_tuned is None:
        apart = row.at_equal_tokens
        return ["" if apart is None else f"{apart.outside.text()} at equal tokens", "", row.text]
    return [row.gap.text(), f"{row.as_tuned:+.3f}", row.text]


def _cost_table(known: Known) -> str:
    header = ["mixer", "parameters (M)", f"tokens/s at {SHORT:,}", f"at {LONG:,}", "GiB", "kernels", "layers"]
    header += ["state of a layer (k)", f"of all at {SHORT:,} (M)", f"at {LONG:,} (M)"]
    rows = []
    for label, config in known.configs.items():
        cells = [f"{known.parameters[label] / 1e6:.1f}", "", "", "", ""]
        if speed := known.speeds.get(label):
            times = "" if speed.ratio is None else f" ({speed.ratio:.2f})"
            cells[1] = f"{speed.tokens_per_s / 1e3:.0f}k{times}{SPEEDS[speed.file]}"
            cells[3:] = f"{speed.gib:.1f}", "" if speed.kernels is None else f"{speed.kernels:,}"
        if long := known.long_speeds.get(label):
            cells[2] = f"{long.tokens_per_s / 1e3:.0f}k"
        layers, states = config.model.n_layers, known.states[label]
        of_states = [f"{states[0] / layers / 1e3:,.1f}", *(f"{state / 1e6:,.2f}" for state in states)]
        rows.append([label, *cells, str(layers), *of_states])
    return markdown(header, rows)


def _files(known: Known) -> str:
    """Return a sentence that lists the sources of the speeds."""
    sources, used = [], {speed.file for speed in (*known.speeds.values(), *known.long_speeds.values())}
    for file in (file for file in (*SPEEDS, *LONG_SPEEDS) if file in used):
        record = recorded(file)
        settings, machine = record["settings"], record["machine"]
        about = f"{settings['seq_len']:,} tokens, batch {settings['batch']}, {machine['device']}"
        mark = f"{SPEEDS[file]} " if SPEEDS.get(file) else ""
        sources.append(f"{mark}[{file}.json](../../benchmarks/results/{file}.json) ({about})")
    return f"Sources of the speeds: {'; '.join(sources)}.\n"


def recorded(file: str) -> Any:
    """Return the content of a file in benchmarks/results."""
    return json.loads((BENCHMARKS / f"{file}.json").read_text(encoding="utf-8"))


def _about_tasks(known: Known) -> str:
    tests = {primary.name: primary for primary in (*PRIMARY, LATER) if primary.tests}
    named = [f"`{name}` ({tests[name].about})" for name in known.tasks if name in tests]
    means = "Scores are the mean accuracy over all tests, in percent" + (
        f", except for {', '.join(named)}." if named else "."
    )
    untrained = any(not score.trained for of_task in known.tasks.values() for score in of_task.values())
    note = "Brackets: the runs failed their easiest training test, so the score says little.\n"
    return TASKS.format(means=means, untrained=note if untrained else "")


def _task_table(known: Known) -> str:
    rows = [
        [label, *(_shown(task, of_task[label]) if label in of_task else "" for task, of_task in known.tasks.items())]
        for label in known.configs
    ]
    return markdown(["mixer", *known.tasks], rows)


def _has_score(name: str) -> bool:
    """Return whether the score's task defines its own score instead of accuracy."""
    return bool(SETUP.task(name.partition(",")[0]).kind.score)


def _shown(task: str, score: Score) -> str:
    text = f"{score.value:.3f}" if _has_score(task) else f"{100 * score.value:.0f}"
    return text if score.trained else f"({text})"


# ---------------------------------------------------------------------------------------------------------- the picture
WITH_INTERVAL, ONE_SEED, AS_TUNED = "gap with its 95% interval", "gap of one seed", "gap as tuned"
GAPS_LOOKS: dict[str, dict[str, Any]] = {
    WITH_INTERVAL: {"color": "0.1", "marker": "o", "markersize": 6},
    ONE_SEED: {"color": "0.1", "marker": "o", "markersize": 6, "markerfacecolor": "white"},
    AS_TUNED: {"color": COLORS[1], "marker": "|", "markersize": 6},
}
LENGTHS: dict[int, dict[str, Any]] = {
    SHORT: {"color": COLORS[0], "marker": "o", "markersize": 5.5},
    LONG: {"color": COLORS[3], "marker": "D", "markersize": 5, "markerfacecolor": "none"},
}


def draw(path: Path, known: Known) -> None:
    """Draw gap and costs, one row per mixer. Writes a PNG at `path`, and an SVG next to it."""
    lines, reference = list(known.configs), known.study.references[-1]
    widths = (3.0, 1.8, 1.4, 1.8)
    figure = Figure(figsize=(9.6, 0.22 * len(lines) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    for panel, heading in zip(panels, ("OOD gap", "training speed", "memory of a step", "state"), strict=True):
        panel.set_title(heading, loc="left", fontsize=9)
        panel.grid(color="0.93")
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=8)
    _draw_gaps(panels[0], known, lines, reference)
    _draw_speeds(panels[1], known, lines)
    _draw_memory(panels[2], known, lines)
    _draw_states(panels[3], known, lines)
    panels[0].set_yticks(range(len(lines)), lines, fontsize=8.5)
    panels[0].set_ylim(len(lines) - 0.4, -0.6)
    looks = GAPS_LOOKS | {f"at {n:,} tokens": look for n, look in LENGTHS.items()}
    handles = [panels[0].plot([], [], label=meaning, linestyle="none", **look)[0] for meaning, look in looks.items()]
    figure.legend(handles=handles, frameon=False, fontsize=8.5, loc="outside lower center", ncols=len(handles))
    figure.suptitle("All mixers at 110M parameters; no mark: not measured", x=0.01, ha="left", fontsize=11)
    figures.save(figure, path)


def _draw_gaps(panel: Axes, known: Known, lines: Sequence[str], reference: str) -> None:
    """Draw the gaps to the reference."""
    panel.axvspan(0, LIMIT, color="0.95", linewidth=0, zorder=0)
    panel.axvline(0, color="0.6", linewidth=1)
    for row in gaps.compare(known.study, reference):
        y = lines.index(row.model)
        if row.gap is not None and row.as_tuned is not None:
            look = GAPS_LOOKS[ONE_SEED if row.gap.half is None else WITH_INTERVAL]
            panel.errorbar(row.gap.value, y, xerr=row.gap.half, elinewidth=2, linestyle="none", **look)
            panel.plot(row.as_tuned, y + 0.24, linestyle="none", **GAPS_LOOKS[AS_TUNED])
    panel.plot(0, lines.index(reference), color="0.1", marker="|", markersize=10)
    panel.set_xlabel(f"gap to {reference}\n({known.study.unit.name}; lower is better)", fontsize=8.5)


def _draw_speeds(panel: Axes, known: Known, lines: Sequence[str]) -> None:
    yardstick = known.long_speeds[YARDSTICK].tokens_per_s
    for y, label in enumerate(lines):
        if (speed := known.speeds.get(label)) and speed.ratio:
            panel.plot(speed.ratio, y, **LENGTHS[SHORT])
        if long := known.long_speeds.get(label):
            panel.plot(long.tokens_per_s / yardstick, y, **LENGTHS[LONG])
    panel.axvline(1, color="0.6", linewidth=1, zorder=0)
    panel.set_xscale("log")
    ticks = log_ticks(*panel.get_xlim())
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel(f"times {YARDSTICK}\nat that length", fontsize=8.5)


def _draw_memory(panel: Axes, known: Known, lines: Sequence[str]) -> None:
    for y, label in enumerate(lines):
        if speed := known.speeds.get(label):
            panel.plot(speed.gib, y, **LENGTHS[SHORT])
    panel.set_xlabel("GiB", fontsize=8.5)


def _draw_states(panel: Axes, known: Known, lines: Sequence[str]) -> None:
    for y, label in enumerate(lines):
        short, long = known.states[label]
        panel.plot([short, long], [y, y], color="0.8", linewidth=1.2, zorder=1)
        panel.plot(short, y, **LENGTHS[SHORT])
        if long != short:
            panel.plot(long, y, **LENGTHS[LONG])
    panel.set_xscale("log")
    ticks = log_ticks(*panel.get_xlim())
    panel.set_xticks(ticks, [forest.size_text(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("elements per sequence", fontsize=8.5)


if __name__ == "__main__":
    known = read()
    (RESULTS / "all_mixers.md").write_text(page(known), encoding="utf-8")
    draw(RESULTS / "all_mixers.png", known)
