"""Write the report: which recall task predicts OOD losses."""

import csv
import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.foretell.foretell import (
    LATER,
    LEAST,
    PRIMARY,
    SEEDS,
    SEEN_MIXERS,
    Mixer,
    Row,
    foretell,
    of_every_test,
    read_study,
    with_scores,
)
from lab.foretell.rank_correlation import Statistic, least, p_text
from seqjax.errors import UserError
from seqjax.escape import markdown as escaped
from seqjax.escape import picture
from seqjax.evals.recall import report
from seqjax.evals.recall.setups import Setup
from seqjax.files import replacing
from seqjax.pictures import COLORS, Named, label_points
from seqjax.study.gaps import estimates, shown_runs
from seqjax.study.report import figures
from seqjax.study.report.tables import DASH, markdown
from seqjax.study.runs import files
from seqjax.study.runs.record import Records

FOLDER, TABLE, PICTURE = "foretell", "foretell.csv", "foretell.png"
ABOUT = (
    "rho is the partial rank correlation between a task's score and the OOD loss, controlling for the in-domain loss. "
    "It is negative if mixers with higher scores have lower OOD losses than their in-domain losses predict. The 95% "
    "interval bootstraps mixers, and seeds within mixers; `by family` bootstraps families of mixers. `left out`: the "
    "lowest and the highest rho without one mixer, or without one family. p is corrected for the largest |rho| among "
    "all tasks. `reliable` is the between-mixer fraction of a score's variance; its square root bounds the score's "
    "correlation with anything. The five tasks and scores were pre-registered (docs/recall.md)."
)
MORE = (
    "Without significance tests: rho controlling also for whether a mixer attends, that is, reads past tokens directly "
    "(attention and selection), because this is known without a task; rho over the mixers that do not attend; rho "
    "controlling also for state size, or for parameters; the plain rank correlation with the OOD loss, and with the "
    "gap to {reference}; and rho by domain."
)
EVERY = (
    "rho for each test, for exploration only. Among many tests, some |rho| are large by chance. A test that only "
    "separates mixers that attend from other mixers also has a large |rho|; the last column controls for this.\n\n"
)
TABLE_STATISTICS = ("rho", "rho, by family", "one mixer left out", "one family left out")


def write(directory: Path, studies: Sequence[Path], setup: Setup, *, chosen: Sequence[str] | None = None) -> Path:
    """Write report.md, foretell.csv and foretell.png; return the report's path.

    The files go to `directory`/foretell.

    Args:
        directory: Recall results.
        studies: Study directories; a mixer in several studies is taken from the first.
        setup: The recall size.
        chosen: Labels to compare; None = all models in the studies.

    Raises `UserError` as `read_study` does, if no mixer has both scores and losses, or if the studies have different
    domains.
    """
    read = {study: files.read(study) for study in studies}
    first = read[studies[0]]
    by_label: dict[str, Mixer] = {}
    gaps: dict[str, float] = {}
    for study, of_study in read.items():
        if (of_study.domains, of_study.against) != (first.domains, first.against):
            raise UserError(f"{study} has other domains than {studies[0]}; give studies of the same data.")
        by_label = {mixer.label: mixer for mixer in read_study(of_study, chosen)} | by_label
        reference = next(name for name in of_study.references if shown_runs(of_study, name))
        gaps = {name: gap.value for name, gap in estimates(of_study, reference).items()} | gaps
    mixers, results = list(by_label.values()), report.results(directory)
    every = [mixer for mixer in with_scores(mixers, results, setup) if mixer.scores]
    if not every:
        raise UserError(
            f"No mixer has both losses in {', '.join(map(str, studies))} and results in {directory / report.RESULTS} "
            f"for the tasks {', '.join(primary.task for primary in PRIMARY)} at width {setup.rounds[0][0]}."
        )
    titles = " and ".join(of_study.title for of_study in read.values())
    rows = foretell(every, first.domains, gaps)
    trained = [mixer for mixer in with_scores(mixers, results, setup, passed=True) if mixer.scores]
    again = foretell(trained, first.domains, gaps)
    later = [row for row in foretell(every, first.domains, gaps, [LATER]) if row.statistics]
    unseen = [mixer for mixer in every if mixer.label not in SEEN_MIXERS]
    new = [row for row in foretell(unseen, first.domains, gaps, [LATER]) if row.statistics]
    out = directory / FOLDER
    out.mkdir(exist_ok=True)
    sections = [
        f"# Which recall task predicts the OOD loss?\n\n{_headline(rows)}\n",
        _about(first, every, titles),
        ABOUT,
        _table(rows),
    ]
    if any(row.statistics for row in rows):
        sections += [f"{MORE.format(reference=escaped(reference))}\n", _more(rows, first.domains)]
    if later:
        sections += [f"## A score fixed later\n\n{_later(later, new)}", _table([*later, *new]), ""]
        sections += [f"{MORE.format(reference=escaped(reference))}\n", _more(later, first.domains)]
    sections += ["## Trained runs only\n", _without_untrained(rows, again)]
    if tests := of_every_test(mixers, results, setup):
        lines = [
            [primary.task, primary.about, str(n), *(_number(Statistic(rho)) for rho in rhos)]
            for primary, n, *rhos in tests
        ]
        header = ["task", "score", "mixers", "rho", "also controlling for attention"]
        sections += [f"## Every test\n\n{EVERY}" + markdown(header, lines, left=2)]
    sections += ["## Mixers\n", _mixers(every)]
    with replacing(out / "report.md") as file:
        file.write("\n".join(sections).encode())
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("runs", "task", "mixers", "near_an_edge", "answer", "statistic", "value", "low", "high"))
    for runs, of_runs in (("all", rows), ("later", later), ("new", new), ("trained", again)):
        for row in of_runs:
            start = (runs, row.name, len(row.mixers), row.near, row.answer)
            for name, numbers in (row.statistics or {"": Statistic(np.nan)}).items():
                writer.writerow([*start, name, *("" if np.isnan(x) else f"{x:.4f}" for x in numbers)])
    with replacing(out / TABLE) as file:
        file.write(table.getvalue().encode())
    draw(out / PICTURE, [*rows, *later], title=titles, unit=first.unit.name)
    return out / "report.md"


def _headline(rows: Sequence[Row]) -> str:
    """Return the main result in one or two sentences."""
    n = max(len(row.mixers) for row in rows)
    tested = [row for row in rows if row.statistics and row.informative]
    lacking = [row for row in rows if row not in tested]
    rest = f" {'; '.join(f'`{row.name}`: {row.answer}' for row in lacking)}." if lacking else ""
    if n < LEAST:
        return (
            f"**Too few mixers: the study and these results share {n}.** With {LEAST} mixers, a single |rho| is "
            f"significant from {least(LEAST):.2f}, with 20 from {least(20):.2f}.{rest}"
        )
    if not tested:
        return f"**No task was informative.**{rest}"
    best = min(tested, key=lambda row: row.statistics["p"].value)
    rho, p = best.statistics["rho"], best.statistics["p"].value
    numbers = f"rho {_number(rho)}, {p_text(p)}, {len(best.mixers)} mixers"
    if best.answer != "undecided":
        others = [row.name for row in tested if row.answer == best.answer and row is not best]
        also = f" So does {', '.join(others)}." if others else ""
        does = "predicts the OOD loss best" if rho.value < 0 else "predicts the reverse: higher scores, higher losses"
        return f"**`{best.name}` {does}** ({numbers}).{also}{rest}"
    return (
        f"**No task is shown to predict the OOD loss.** The closest is `{best.name}` ({numbers}). For a single task, "
        f"|rho| would be significant from {least(len(best.mixers)):.2f}.{rest}"
    )


def _later(rows: Sequence[Row], new: Sequence[Row]) -> str:
    """Describe the later score over all mixers and over new mixers."""
    (row,) = rows
    rho, p, known = row.statistics["rho"], row.statistics["p"].value, row.statistics["also controlling for attention"]
    return (
        f"**`{row.name}`: {row.answer}** (rho {_number(rho)}, {p_text(p)}). This score was chosen after seed 0 of "
        f"{len(SEEN_MIXERS)} mixers had run (docs/recall.md). It only uses later seeds, and p is for a single test."
        f" {_unseen(new)} Controlling also for whether a mixer attends, rho is {_number(known)}; a single "
        f"test is significant from |rho| = {least(len(row.mixers), others=2):.2f}.\n"
    )


def _unseen(rows: Sequence[Row]) -> str:
    """Describe the later score on mixers that did not influence its choice."""
    if not rows:
        return (
            "The seeds are new, the mixers and their losses are the same, so p does not account for the other scores "
            "that were considered."
        )
    (row,) = rows
    n = len(row.mixers)
    return (
        "For the mixers seen before, only the seeds are new, so this p does not account for the other scores that were "
        f"considered. **The other {n} mixers: {row.answer}** (rho {_number(row.statistics['rho'])}, "
        f"{p_text(row.statistics['p'].value)}; significant from |rho| = {least(n):.2f})."
    )


def _about(study: Records, every: Sequence[Mixer], titles: str) -> str:
    """Describe the compared data, and where it falls short of the plan."""
    names = {primary.name for primary in PRIMARY}
    scores = [of_task for mixer in every for name, of_task in mixer.scores.items() if name in names]
    text = [
        f"{len(every)} mixers of **{escaped(titles)}**. Losses are in {study.unit.name}. The OOD loss is the mean over "
        f"{escaped(', '.join(study.domains))}; the in-domain loss is the {escaped(study.in_domain_name)}."
    ]
    if few := sum(min(len(of_task.values), of_task.n_rates) < SEEDS for of_task in scores):
        text.append(f"**{few} of {len(scores)} scores have fewer than three seeds or learning rates.**")
    if few := sum(len(mixer.inside) < SEEDS for mixer in every):
        text.append(f"**{few} mixers have fewer than three seeds in the study.**")
    if not all(of_task.validated for of_task in scores):
        text.append(
            "Results without validation sequences use the learning rate that is best in the test like training."
        )
    return " ".join(text) + "\n"


def _number(statistic: Statistic | None) -> str:
    if statistic is None or np.isnan(statistic.value):
        return DASH
    ends = "" if np.isnan(statistic.low) else f" [{statistic.low:+.2f}, {statistic.high:+.2f}]"
    return f"{statistic.value:+.2f}{ends}"


def _table(rows: Sequence[Row]) -> str:
    header = ["task", "score", "answer", "mixers", "runs", "rates", *TABLE_STATISTICS, "p", "reliable"]
    lines = []
    for row in rows:
        scores = [mixer.scores[row.name] for mixer in row.mixers]
        p, reliable = (row.statistics.get(name, Statistic(np.nan)).value for name in ("p", "reliability of the score"))
        lines.append(
            [
                row.primary.task,
                row.primary.about,
                row.answer,
                str(len(row.mixers)),
                _span([len(of_mixer.values) for of_mixer in scores]),
                _span([of_mixer.n_rates for of_mixer in scores]),
                *(_number(row.statistics.get(name)) for name in TABLE_STATISTICS),
                DASH if np.isnan(p) else p_text(p).removeprefix("p ").removeprefix("= "),
                DASH if np.isnan(reliable) else f"{reliable:.2f}",
            ]
        )
    return "\n" + markdown(header, lines, left=3)


def _span(numbers: Sequence[int]) -> str:
    ends = sorted({min(numbers), max(numbers)}) if numbers else []
    return " to ".join(map(str, ends)) or DASH


def _more(rows: Sequence[Row], domains: Sequence[str]) -> str:
    names = (
        "also controlling for attention",
        "mixers that do not attend",
        "also controlling for state size",
        "also controlling for parameters",
    )
    names += ("plain", "plain, with the gap")
    lines = [
        [row.primary.task, *(_number(row.statistics.get(name)) for name in (*names, *domains))]
        for row in rows
        if row.statistics
    ]
    return markdown(["task", *names, *map(escaped, domains)], lines)


def _without_untrained(rows: Sequence[Row], again: Sequence[Row]) -> str:
    """Return the results without untrained runs, for tasks that have such runs.

    An untrained run failed the easiest training test.
    """
    pairs = [(row, other) for row, other in zip(rows, again, strict=True) if _counted(row) != _counted(other)]
    if not pairs:
        return "No run failed its easiest training test, so all results above are for trained runs.\n"
    lines = [
        [other.name, other.answer, str(len(other.mixers)), *(_number(of.statistics.get("rho")) for of in (other, row))]
        for row, other in pairs
    ]
    return "Results without the runs that failed their easiest training test, for tasks with such runs.\n\n" + markdown(
        ["task", "answer", "mixers", "rho", "rho of all runs"], lines, left=2
    )


def _counted(row: Row) -> list[tuple[str, int]]:
    return [(mixer.label, len(mixer.scores[row.name].values)) for mixer in row.mixers]


def _mixers(every: Sequence[Mixer]) -> str:
    named = {primary.name: primary for primary in (*PRIMARY, LATER)}
    names = [name for name in named if any(name in mixer.scores for mixer in every)]
    lines = [
        [
            escaped(mixer.label),
            escaped(mixer.family),
            f"{mixer.inside.mean():.3f}",
            f"{mixer.outside.mean():.3f}",
            *(f"{mixer.scores[name].mean:.3f}" if name in mixer.scores else DASH for name in names),
        ]
        for mixer in sorted(every, key=lambda mixer: mixer.outside.mean())
    ]
    return "Sorted by OOD loss.\n\n" + markdown(
        ["mixer", "family", "in-domain loss", "OOD loss", *names], lines, left=2
    )


def draw(path: Path, rows: Sequence[Row], *, title: str, unit: str) -> None:
    """Draw one panel per score: excess OOD loss over the score.

    The excess OOD loss is the OOD loss minus its regression on the in-domain loss. Horizontal lines are the range of a
    mixer's runs. Panel titles show the rank correlation. Writes a PNG at `path`, and an SVG next to it.
    """
    shown = [row for row in rows if row.mixers]
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    height = max(4.6, 0.2 * max(len(row.mixers) for row in shown))  # room for the labels
    figure = Figure(figsize=(5.6 * columns + 0.6, height * lines + 0.9), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    named = {panel: _draw_task(panel, row) for panel, row in zip(panels, shown, strict=False)}
    for panel in panels[len(shown) :]:
        panel.set_axis_off()
    for panel in panels[::columns]:
        panel.set_ylabel(f"OOD loss minus its prediction\nfrom the in-domain loss ({unit})", fontsize=9)
    not_run = ", ".join(row.name for row in rows if not row.mixers)
    about = "which task predicts the OOD loss" + (f"\nnot run: {not_run}" if not_run else "")
    named_by = picture(textwrap.fill(title, 70 * columns))
    figure.suptitle(f"{named_by}\n{about}", x=0.01, ha="left", fontsize=10)
    label_points(named)
    figures.save(figure, path)


def _draw_task(panel: Axes, row: Row) -> dict[str, Named]:
    """Draw one panel; return its labelled points by name."""
    summary = row.answer
    if row.statistics:
        summary = f"rho {_number(row.statistics['rho'])}, {p_text(row.statistics['p'].value)}"
    summary += ", uninformative" if row.statistics and not row.informative else ""
    panel.set_title(f"{row.name}: {summary}", fontsize=9.5, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    inside, outside = (np.array([getattr(m, name).mean() for m in row.mixers]) for name in ("inside", "outside"))
    line = np.polyfit(inside, outside, 1) if np.ptp(inside) > 0 else [0.0, outside.mean()]
    above = outside - np.polyval(line, inside)
    families = list(dict.fromkeys(mixer.family for mixer in row.mixers))
    named = {}
    for mixer, y in zip(row.mixers, above, strict=True):
        color = COLORS[families.index(mixer.family) % len(COLORS)]
        scores = mixer.scores[row.name].values[:, 0]
        panel.plot([scores.min(), scores.max()], [y, y], color=color, linewidth=1)
        panel.plot(mixer.scores[row.name].mean, y, color=color, marker="o", markersize=5, linestyle="none")
        named[mixer.label] = Named([(mixer.scores[row.name].mean, float(y))], color)
    panel.margins(0.12)
    panel.grid(color="0.93")
    panel.set_axisbelow(True)
    panel.set_xlabel(row.primary.about, fontsize=9)
    return named
