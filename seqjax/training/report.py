"""The report of a finished run: `report.md`, `report.png` and the terminal table."""

import dataclasses
import math
import operator
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from matplotlib.figure import Figure

from seqjax import mixers
from seqjax.config import Config, from_config_dict, presets
from seqjax.data import Corpus
from seqjax.decoding import stream
from seqjax.errors import UserError
from seqjax.escape import fenced, markdown, picture
from seqjax.files import replacing
from seqjax.models import Model
from seqjax.pictures import COLORS, End, label_ends
from seqjax.reading import Float, check, read_json
from seqjax.terminal import StatusLine, duration
from seqjax.training import eval_losses, metrics, origin, token_classes
from seqjax.training.mirrors import Mirror
from seqjax.training.provenance import RUN
from seqjax.training.schedule import segments
from seqjax.types import Params


def write(
    workdir: str | Path,
    config: Config,
    corpus: Corpus,
    *,
    metadata: dict[str, Any],
    sample: str | None = None,
    label: str = "",
) -> str:
    """Write `report.md` and `report.png` from `metrics.jsonl`.

    Returns the terminal text.

    `metadata` comes from `provenance.run_metadata`. `label` is the URL of a workdir in a store, while `workdir` is its
    mirror. For a run with several ends, the table shows the last end and the picture shows all ends.

    Raises `UserError` if `metrics.jsonl` lacks the rows of a finished run.
    """
    workdir, label = Path(workdir), label or str(workdir)
    directories = [segment.directory(workdir) for segment in segments(config) if segment.is_cooldown]
    curves = [[r for r in metrics.read(d) if "seconds" in r] for d in (workdir, *directories)]
    train = [*curves[0], *curves[-1]] if directories else curves[0]
    evals = [row for d in directories for row in _evaluations(d)[-1:]] if directories else _evaluations(workdir)
    if not train or not evals:
        raise UserError(f"{workdir}/metrics.jsonl lacks the rows of a finished run; put back a copy of it.")
    losses = dict.fromkeys((f"eval/{name}/loss" for name in corpus.eval_domains), float)
    for row, form in [*((row, {}) for rows in curves for row in rows), *((row, losses) for row in evals)]:
        where = f"metrics.jsonl of {label}, step {row['step']}"
        check(row, {"tokens": int, "train/loss": Float} | form, where, fix="put back a copy of it")
    bigram = corpus.bigram_loss(max_tokens=config.eval.tokens)
    _plot(workdir / "report.png", config, corpus, curves, evals, bigram)

    last = evals[-1]
    entropy_heading = "entropy" if f"eval/{corpus.eval_domains[0]}/entropy" in last else ""
    table = [
        (
            "domain",
            "loss",
            "perplexity",
            "bits per byte",
            *((entropy_heading, "of ln(i+1)") if entropy_heading else ()),
            "",
        )
    ]
    table += [_row("training", last["train/loss"], "mean since the previous evaluation", entropy_heading and ("", ""))]
    for name in corpus.eval_domains:
        side = corpus.side(name)
        entropy = entropy_heading and [
            f"{last[f'eval/{name}/{field}']:.4f}" for field in ("entropy", "entropy_relative")
        ]
        table.append(_row(name, last[f"eval/{name}/loss"], side, entropy, last.get(f"eval/{name}/bits_per_byte")))
    if bigram is not None:
        note = "in domain; a model that counts byte pairs"
        table.append(_row("byte bigram", bigram, note, entropy_heading and ("", "")))
    lines = _align(table)
    rate = sorted(r["tokens_per_s"] for r in train)[len(train) // 2]
    mfu = train[-1]["mfu"]
    summary = [
        f"{config.name}, size {config.size}: {metadata['parameters']:,} parameters, mixer {config.model.mixer_names}",
        f"{train[-1]['tokens']:,} tokens in {duration(train[-1]['seconds'])} on {metadata['devices']} x "
        f"{metadata['device']}: {rate:,.0f} tokens/s" + (f", MFU {mfu:.1%}" if mfu is not None else ""),
        f"data {corpus.name}, {config.data.regime} regime, trained on {', '.join(corpus.train_domains)}; "
        f"manifest {corpus.manifest_hash}",
    ]
    if config.optim.name != "adam" or config.optim.schedule != "linear":
        schedule = "WSD" if config.train.ends else config.optim.schedule
        summary.append(f"optimiser {config.optim.name}, {schedule} schedule")
    summary += [f"the run {line}" for line in origin.lines(metadata)]
    summary += [corpus.note] if corpus.note else []
    other_name = "top1_chunk" if config.name == "transformer_pp" else "transformer_pp"
    next_commands = [
        _generate_command(label, sorted({mixer.name for mixer in config.model.mixers})),
        _same_data_command(config, other_name),
    ]

    page = [f"# {markdown(workdir.name)}", "", *(f"* {markdown(line)}" for line in summary), ""]
    page += ["Loss in nats per token:", ""]
    head, *rows = ([markdown(cell) for cell in row] for row in table)
    rule = ("---", *("---:",) * (len(head) - 2), "---")
    page += [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
    page += ["", "![losses over tokens](report.png)", ""]
    if sample is not None:
        page += ["A sample, temperature 0.8:", "", fenced(sample, "text"), ""]
    environment = [f"{name} {version}" for name, version in metadata["versions"].items()]
    environment += [f"commit {metadata['commit'] or 'unknown'}", f"backends {metadata['backends'] or 'none chosen'}"]
    page += ["Next:", "", fenced("\n".join(next_commands)), "", "Made with:", "", fenced("\n".join(environment)), ""]
    with replacing(workdir / "report.md") as file:
        file.write("\n".join(page).encode())

    shown = ["", *summary, "", *lines]
    if sample is not None:
        shown += ["", "A sample of its text:", "", *("  " + line for line in sample.splitlines())]
    shown += ["", f"Report: {label}/report.md", "Try next:", *("  " + line for line in next_commands)]
    return "\n".join(shown)


def _same_data_command(config: Config, name: str) -> str:
    """Return the command that trains another config on this run's data."""
    arg = f"{name}:{config.size},{config.data.regime}"
    if config.size not in presets.SIZES:
        return f"seqjax train --config={shlex.quote(arg)}"
    defaults = from_config_dict(presets.read_config(arg))
    keys = [f"data.{field.name}" for field in dataclasses.fields(config.data)]
    options = []
    for key in (*keys, "model.vocab_size", "train.seq_len"):
        value, default = (operator.attrgetter(key)(source) for source in (config, defaults))
        if value != default and key != "data.corpus":  # implied by the path
            options.append(f"--config.{key}={shlex.quote(str(value))}")
    return " ".join([f"seqjax train --config={arg}", *options])


def write_for_run(
    mirror: Mirror, config: Config, corpus: Corpus, model: Model, *, params: Params | None, rng: Any, mesh: Mesh
) -> str:
    """Write the report of the finished run in `mirror`, and return the terminal text.

    `params` are the last parameters, used for a text sample, and `rng` is its key data. None leaves the sample out.

    Raises `UserError` if an evaluation file is damaged. The report does not show these files, but a study reads them.
    """
    sample = None
    prompt, n_new = "The ", config.log.sample_tokens
    if model.longest:  # The position table is finite; the prompt takes BOS and at most one token per byte.
        n_new = min(n_new, model.longest - 1 - len(prompt))
    if n_new > 0 and params is not None and jax.process_count() == 1:
        key = jax.random.wrap_key_data(jax.device_get(rng))
        try:
            sample = prompt + "".join(stream(model, params, corpus.tokenizer, prompt, key, n_new=n_new, mesh=mesh))
        except UserError as error:  # Results do not depend on the sample or on a tokenizer package.
            StatusLine().say(f"No sample of text: {error}")
    metadata = read_json(mirror.directory / "run.json", RUN)
    text = write(mirror.directory, config, corpus, metadata=metadata, sample=sample, label=str(mirror))
    for directory in {segment.directory(mirror.directory) for segment in segments(config)}:
        eval_losses.read(directory)
    token_classes.read_classes(mirror.directory)
    return text


def _evaluations(workdir: Path) -> list[dict[str, Any]]:
    return [row for row in metrics.read(workdir) if any(key.startswith("eval/") for key in row)]


def _generate_command(workdir: str | Path, mixer_names: Sequence[str]) -> str:
    """Return how to generate text with a run that uses these mixers.

    For a mixer file from outside seqjax the command has --allow-code.
    """
    external = [name for name in mixer_names if not mixers.is_shipped(name)]
    without_file = {*external} - {*mixers.sources(external)}
    if any(not mixers.is_dotted(name) for name in without_file):  # registered in this process
        return f"seqjax.load({str(workdir)!r}).generate('def ')    # in Python, with the mixer registered"
    options = "".join(f" --allow-code={shlex.quote(name)}" for name in external)
    return f'seqjax generate --workdir={shlex.quote(str(workdir))} --prompt="def "{options}'


def _row(name: str, loss: float, note: str, entropy: Sequence[str] = (), bits: float | None = None) -> tuple[str, ...]:
    per_byte = "" if bits is None else f"{bits:.4f}"
    return (name, f"{loss:.4f}", f"{math.exp(min(loss, 50.0)):.2f}", per_byte, *entropy, note)


def _align(table: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the rows as text, names aligned left and numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *numbers, note in table:
        cells = [f"{x:>{width}}" for x, width in zip(numbers, widths[1:-1], strict=True)]
        lines.append("  ".join([f"  {name:<{widths[0]}}", *cells, note]).rstrip())
    return lines


STYLES = {"in domain": "-", "out of domain": "--", "test set": ":"}  # line styles by kind of domain


def _plot(
    path: Path,
    config: Config,
    corpus: Corpus,
    curves: list[list[dict[str, Any]]],
    evals: list[dict[str, Any]],
    bigram: float | None,
) -> None:
    """Plot training loss, for trunk and cooldowns, and domain losses over tokens.

    For a run with several ends, domain lines connect the ends. Domain names are at the lines; the legend shows line
    styles.
    """
    figure = Figure(figsize=(8.5, 5.2), layout="constrained")
    axes = figure.subplots()
    scale, unit = (1e6, "millions") if evals[-1]["tokens"] >= 1e6 else (1e3, "thousands")
    for i, rows in enumerate(curves):
        tokens = [r["tokens"] / scale for r in rows]
        losses = [r["train/loss"] for r in rows]
        axes.plot(tokens, losses, color="0.6" if i else "0.75", linewidth=1, label=None if i else "training")
    ends, sides = [], set[str]()
    for i, name in enumerate(corpus.eval_domains):
        losses = [r[f"eval/{name}/loss"] for r in evals]
        axes.plot(
            [r["tokens"] / scale for r in evals],
            losses,
            color=COLORS[i % len(COLORS)],
            linestyle=STYLES[corpus.side(name)],
            marker="o",
            markersize=3.5,
        )
        sides.add(corpus.side(name))
        at = evals[-1]["tokens"] / scale
        ends.append(End(at, losses[-1], f"{name} {losses[-1]:.2f}", COLORS[i % len(COLORS)]))
    for side in (side for side in STYLES if side in sides):
        axes.plot([], [], color="0.3", linestyle=STYLES[side], marker="o", markersize=3.5, label=side)
    if bigram is not None:
        axes.axhline(bigram, color="0.4", linewidth=1, linestyle="-.", label=f"byte bigram, in domain {bigram:.2f}")
    visible = [loss for r in evals for k, loss in r.items() if k.startswith("eval/") and k.endswith("/loss")]
    visible += [r["train/loss"] for rows in curves for r in rows[len(rows) // 10 :]]
    visible += [bigram] if bigram is not None else []
    margin = 0.06 * (max(visible) - min(visible) + 0.1)
    axes.set_ylim(min(visible) - margin, max(visible) + margin)
    axes.set_xlabel(f"training tokens ({unit})")
    axes.set_ylabel("loss (nats per token; lower is better)")
    title = f"{config.name} {config.size}: {corpus.name} data, {config.data.regime} regime"
    axes.set_title(picture(title), loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    # The legend is outside, because no corner of the panel is always free.
    figure.legend(frameon=False, fontsize=9, ncols=5, loc="outside lower center", handlelength=3.2)
    label_ends({axes: ends})
    with replacing(path) as file:
        figure.savefig(file, dpi=130, format="png")
