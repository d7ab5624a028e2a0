"""Write report.html: a finished study as a single page that needs no network or other files.

The verdicts and the gaps' forest plot come first, then losses and speed, then the tables from leaderboard.md. Hovering
over a point shows the run, its tokens and its losses. The legend switches a model with all its seeds; a picture's menu
switches domains. The page includes the plotting library (several megabytes), and one command makes it again.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.errors import UserError
from seqjax.escape import html as escape
from seqjax.escape import plotly
from seqjax.pictures import COLORS
from seqjax.study import gaps
from seqjax.study.gaps.statistics import Estimate
from seqjax.study.gaps.verdicts import LIMIT
from seqjax.study.report import forest, leaderboard, points
from seqjax.study.report.figures import BETTER
from seqjax.study.report.leaderboard import Compared
from seqjax.study.report.words import in_words
from seqjax.study.runs.record import Point, Record, Records, in_domain, losses

# Plotly names for the styles in figures.ROUNDS and SEED_STYLES. RATE_DASHES: rates below and above the shown rate.
ROUNDS = ("circle", "triangle-up-open", "square", "diamond-open")
SEED_DASHES = ("solid", "dash", "dot")
RATE_DASHES = ("dashdot", "longdashdot")
# Looks of the forest plot's marks, as in forest.LOOKS.
MARK_LOOKS: dict[str, dict[str, Any]] = {
    forest.GAP: {"color": "#222", "symbol": "circle", "size": 9},
    forest.ONE_SEED: {"color": "#222", "symbol": "circle-open", "size": 9},
    forest.TUNED: {"color": COLORS[1], "symbol": "diamond", "size": 5},
    forest.TOKENS: {"color": "#888", "symbol": "diamond-open", "size": 8},
    forest.REFERENCE: {"color": "#888", "symbol": "square", "size": 8},
}
IN_DOMAIN, TOKENS = "in-domain loss", "training tokens (millions)"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { border-bottom: 1px solid #888; text-align: left; }
li span { white-space: nowrap; }
.table { overflow-x: auto; }
"""
CLICKS = "Click a model in the legend to hide or show all its seeds; double-click to show only this model."
OTHER_RATES = "Its runs at other learning rates have a separate entry and are hidden at first."
ZOOM = "Drag over a picture to zoom in; double-click the picture to zoom out."


def write(path: str | Path, records: Records, *, text: str, compared: Compared | None = None) -> None:
    """Write the page with `text`, the tables in Markdown.

    Raises `UserError` if a package is missing.
    """
    try:
        import markdown_it
        import plotly.graph_objects as go
    except ImportError as error:
        raise UserError(
            f"--page needs the package {error.name}: install seqjax with the extra `study`, e.g. "
            "pip install 'seqjax[study]'."
        ) from error
    compared = compared or leaderboard.compared(records)
    html = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    html = html.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    clicks = " ".join([CLICKS, OTHER_RATES, ZOOM] if len(_groups(records)) > len(records.models) else [CLICKS, ZOOM])
    pictures = {
        "OOD loss over in-domain loss": (clicks, _lines(go, records, IN_DOMAIN)),
        "Loss over training": ("", _lines(go, records, TOKENS)),
    }
    if forest.marks(compared):
        about = f"{forest.title(records, compared)}. Grey band: gaps from 0 to {LIMIT * records.unit.scale:.2g}."
        pictures = {"Gaps": (about, _forest(go, records, compared))} | pictures
    if speeds := points.run_speeds(records):
        pictures["Gap over training speed"] = ("", _cost(go, records, compared, speeds))
    parts = [_verdicts(records, compared)]
    for i, (title, (about, picture)) in enumerate(pictures.items()):
        # A fixed id makes the page reproducible, byte for byte.
        picture_html = picture.to_html(full_html=False, include_plotlyjs=i == 0, div_id=f"picture{i}")
        parts.append(f"<h2>{title}</h2>\n<p>{escape(about)}</p>\n{picture_html}\n")
    heading, _, rest = html.partition("</h1>")
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(records.title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{heading}</h1>\n{''.join(parts)}\n{rest}</body></html>\n",
        encoding="utf-8",
    )


def _verdicts(records: Records, compared: Compared) -> str:
    """Return a list with the verdicts against each reference."""
    about = (
        f"Numbers are gaps in {records.unit.name}: OOD loss minus the reference's, at the same in-domain loss and "
        "matched learning rates. A positive gap is worse. ± is half the width of the 95% interval."
    )
    parts = ["<h2>Verdicts</h2>\n", f"<p>{about}</p>\n"]
    for reference in compared:
        parts.append(f"<h3>Against {escape(reference)}</h3>\n<ul>\n")
        for words, models in in_words(records, reference).items():
            named = "; ".join(f"<span>{escape(model)}</span>" for model in models)
            parts.append(f"<li><b>{escape(words)}</b>: {named}</li>\n")
        parts.append("</ul>\n")
    return "".join(parts)


def _forest(go: Any, records: Records, compared: Compared) -> Any:
    """Return a figure with the marks from gaps.png."""
    lines, all_marks = forest.order(compared), forest.marks(compared)
    figure = go.Figure()
    width = 1 / len(compared)
    for i, (reference, rows) in enumerate(compared.items()):
        axis = str(i + 1) if i else ""
        for kind, look in MARK_LOOKS.items():
            drawn = [mark for mark in all_marks if (mark.reference, mark.kind) == (reference, kind)]
            if not drawn:
                continue
            figure.add_scatter(
                x=[mark.estimate.value for mark in drawn],
                y=[lines.index(mark.model) + forest.OFFSETS.get(kind, 0.0) for mark in drawn],
                error_x={"type": "data", "array": [mark.estimate.half for mark in drawn], "thickness": 1.5, "width": 0},
                text=[_mark_text(mark, records) for mark in drawn],
                hoverinfo="text",
                mode="markers",
                name=kind,
                legendgroup=kind,
                showlegend=not any(trace.name == kind for trace in figure.data),
                marker=look,
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
            )
        x_title = f"{plotly(leaderboard.shown_name(rows, reference))} ({records.unit.name})"
        x_axis = {"title": x_title, "zeroline": True, "zerolinecolor": "#888"}
        x_axis |= {"domain": [i * width, (i + 0.96) * width], "anchor": f"y{axis}"}
        y_axis = {
            "tickvals": list(range(len(lines))),
            "ticktext": [*map(plotly, lines)] if i == 0 else [""] * len(lines),
        }
        y_axis |= {"range": [len(lines) - 0.4, -0.6], "anchor": f"x{axis}", "zeroline": False, "ticklabelstandoff": 6}
        if i:
            y_axis["matches"] = "y"
        figure.update_layout({f"xaxis{axis}": x_axis, f"yaxis{axis}": y_axis})
        ends = {"x0": 0, "x1": LIMIT * records.unit.scale, "y0": 0, "y1": 1}
        look = {"fillcolor": "#eee", "line_width": 0, "layer": "below"}
        figure.add_shape(type="rect", **ends, xref=f"x{axis}", yref=f"y{axis} domain", **look)
    figure.update_layout(
        template="plotly_white",
        height=26 * len(lines) + 150,
        margin={"t": 10, "l": 10},
        legend={"orientation": "h", "y": -60 / (26 * len(lines) + 60), "yanchor": "top"},
    )
    figure.update_yaxes(automargin=True)
    return figure


def _mark_text(mark: forest.Mark, records: Records) -> str:
    return f"<b>{plotly(mark.model)}</b><br>{mark.estimate.text()} {records.unit.name}<br>{mark.kind}"


def _quantities(records: Records) -> dict[str, list[str]]:
    """Return menu entries -> the domains whose mean is shown."""
    return {name: [name] if name in records.domains else list(records.domains) for name in records.quantities}


def _groups(records: Records) -> dict[str, list[Record]]:
    """Return legend entries -> the runs that they switch.

    A model's seeds have one entry, its other learning rates a second entry.
    """
    models, other_rates = dict[str, list[Record]](), dict[str, list[Record]]()
    for model in records.models:
        models[model] = gaps.shown_runs(records, model)
        if more := [run for run in records.of_model(model) if run not in models[model]]:
            other_rates[f"{model}, other rates"] = more
    return models | other_rates


def _lines(go: Any, records: Records, x_title: str) -> Any:
    """Return a figure with every run's losses over in-domain loss or tokens.

    A menu selects the domain.
    """
    groups = _groups(records)
    runs = [run for group in groups.values() for run in group]
    inside = [in_domain(run.points, records.against) for run in runs]
    x = inside if x_title == IN_DOMAIN else [np.array([p.tokens / 1e6 for p in run.points]) for run in runs]
    choices = {
        name: [losses(run.points, domains).mean(1) for run in runs] for name, domains in _quantities(records).items()
    }
    if x_title == TOKENS:
        choices = {"in domain": inside} | choices
    first = next(iter(choices.values()))
    figure, i = go.Figure(), 0
    for name, group in groups.items():
        for k, run in enumerate(group):
            figure.add_scatter(
                x=x[i].tolist(),
                y=first[i].tolist(),
                text=[_hover(run, p) for p in run.points],
                hoverinfo="text",
                mode="lines+markers",
                name=plotly(name),
                legendgroup=name,
                showlegend=k == 0,
                visible=True if name == run.model else "legendonly",
                **_look(records, run),
            )
            i += 1
    buttons = []
    for name, curves in choices.items():
        axis = {"yaxis.range": _range(curves)}
        buttons.append({"label": plotly(name), "method": "update", "args": [{"y": [y.tolist() for y in curves]}, axis]})
    unit = records.unit.name
    title = f"{IN_DOMAIN} ({unit}; {BETTER})" if x_title == IN_DOMAIN else x_title
    _finish(figure, title, f"loss ({unit}; {BETTER})", buttons)
    figure.update_yaxes(range=buttons[0]["args"][1]["yaxis.range"])
    figure.update_xaxes(range=_range(x))
    return figure


def _range(values: Iterable[np.ndarray]) -> list[float]:
    """Return axis limits with room for every point and its marker."""
    together = np.concatenate([*values])
    low, high = float(together.min()), float(together.max())
    margin = 0.04 * (high - low) or 0.1
    return [low - margin, high + margin]


def _hover(run: Record, p: Point) -> str:
    lines = [
        f"<b>{plotly(run.label)}</b>",
        f"step {p.step:,}, {p.tokens / 1e6:,.1f}M tokens",
        f"training {p.train_loss:.3f}",
    ]
    return "<br>".join([*lines, *(f"{plotly(domain)} {loss:.3f}" for domain, loss in p.domains.items())])


def _cost(go: Any, records: Records, compared: Compared, speeds: dict[str, float]) -> Any:
    """Return a figure with every model's gap over its speed.

    A menu selects the reference.
    """
    unit = records.unit.name
    values = {name: {name: Estimate(0.0)} | leaderboard.shown(rows) for name, rows in compared.items()}
    titles = {name: f"{plotly(leaderboard.shown_name(rows, name))} ({unit})" for name, rows in compared.items()}
    models = [name for name in records.models if name in speeds]
    figure, first = go.Figure(), next(iter(compared))
    for model in models:
        estimate = values[first].get(model)
        figure.add_scatter(
            x=[speeds[model]],
            y=[estimate and estimate.value],
            error_y={"type": "data", "array": [estimate and estimate.half]},
            mode="markers",
            name=plotly(model),
            hovertemplate=f"<b>{plotly(model)}</b><br>%{{x:,.0f}} tokens/s<br>%{{y:+.3f}} {unit}<extra></extra>",
            **_look(records, gaps.shown_runs(records, model)[0]),
        )
    buttons = []
    for name, title in titles.items():
        model_estimates = [values[name].get(model) for model in models]
        data = {
            "y": [[estimate and estimate.value] for estimate in model_estimates],
            "error_y": [{"type": "data", "array": [estimate and estimate.half]} for estimate in model_estimates],
        }
        buttons.append(
            {"label": f"gap to {plotly(name)}", "method": "update", "args": [data, {"yaxis.title.text": title}]}
        )
    _finish(figure, "training speed (tokens/s)", titles[first], buttons)
    return figure


def _finish(figure: Any, x_title: str, y_title: str, buttons: Sequence[dict[str, Any]]) -> None:
    figure.update_layout(
        template="plotly_white",
        height=max(600, 19 * len({trace.name for trace in figure.data}) + 180),  # the legend must not scroll
        margin={"t": 60},
        hovermode="closest",
        xaxis_title=x_title,
        yaxis_title=y_title,
        updatemenus=[{"buttons": list(buttons), "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
        legend={"font": {"size": 11}, "groupclick": "togglegroup", "tracegroupgap": 0},
    )


def _look(records: Records, run: Record) -> dict[str, Any]:
    i, shown = records.models.index(run.model), gaps.rates(records, run.model).shown
    color = COLORS[i % len(COLORS)]
    dash = RATE_DASHES[run.rate > shown] if run.rate != shown else SEED_DASHES[run.seed % len(SEED_DASHES)]
    marker = {"color": color, "symbol": ROUNDS[i // len(COLORS) % len(ROUNDS)], "size": 5 if run.seed else 7}
    return {"line": {"color": color, "dash": dash, "width": 1.5}, "marker": marker}
