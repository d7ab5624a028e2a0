"""report.html: a finished study as a single page without network or other files.

First come the verdicts in words and the forest plot of the gaps, then losses and speed, then the tables of gaps.md.
Hovering over a point names the run, its tokens and its losses; models are switched in the legend with all their seeds,
domains in the menu of a picture. The page has several megabytes, because it contains the plotting library. One command
makes it again, so it need not be kept with the results.
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.pictures import COLORS
from seqjax.study import comparison, end_points, equal_loss, forest
from seqjax.study.protocol import Point, Record
from seqjax.study.records import Records
from seqjax.study.verdict import in_words
from seqjax.utils import UserError

# plotly's names of the styles in figures.ROUNDS and OF_SEEDS, and of learning rates below and above the common one
ROUNDS = ("circle", "triangle-up-open", "square", "diamond-open")
OF_SEEDS = ("solid", "dash", "dot")
OF_RATES = ("dashdot", "longdashdot")
# Of the marks of the forest plot; dark ones are the gaps themselves, as in forest.LOOKS.
OF_MARKS: dict[str, dict[str, Any]] = {
    forest.SEVERAL_SEEDS: {"color": "#222", "symbol": "circle", "size": 9},
    forest.ONE_SEED: {"color": "#222", "symbol": "circle-open", "size": 9},
    forest.BEST_RATE: {"color": COLORS[1], "symbol": "diamond", "size": 7},
    forest.END_POINTS: {"color": COLORS[0], "symbol": "star", "size": 9},
    forest.ENOUGH: {"color": "#222", "symbol": "circle", "size": 9},
    forest.FEW: {"color": "#222", "symbol": "circle-open", "size": 9},
    forest.OVER_RATES: {"color": COLORS[1], "symbol": "line-ns-open", "size": 7},
    forest.EQUAL_TOKENS: {"color": "#888", "symbol": "diamond-open", "size": 8},
}
IN_DOMAIN, TOKENS = "loss in domain", "training tokens (millions)"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { border-bottom: 1px solid #888; text-align: left; }
li span { white-space: nowrap; }
.table { overflow-x: auto; }
"""
CLICKS = "A click on a model in the legend hides or shows all its seeds together, and a double click shows it alone."
OTHERS = "Its runs at other learning rates or schedules have an entry of their own and are hidden at first."
ZOOM = "Dragging over a picture enlarges a part of it, and a double click there shows all of it again."


def write(path: str | Path, records: Records, *, text: str) -> None:
    """Write the page with `text`, the tables in Markdown; raise `UserError` if a package is missing."""
    try:
        import markdown_it
        import plotly.graph_objects as go
    except ImportError as error:
        raise UserError(
            f"--page needs the package {error.name}: install seqjax with the extra `study`, e.g. "
            "pip install 'seqjax[study]'."
        ) from error
    html = markdown_it.MarkdownIt("commonmark").enable("table").render(text)
    html = html.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    has_others = len(_groups(records)) > len(comparison.models(records))
    clicks = " ".join([CLICKS, OTHERS, ZOOM] if has_others else [CLICKS, ZOOM])
    pictures = {
        "Loss out of domain over loss in domain": (clicks, _lines(go, records, IN_DOMAIN)),
        "Loss over training": ("", _lines(go, records, TOKENS)),
    }
    if forest.references(records):
        about = f"{forest.title(records).capitalize()}."
        if records.protocol == 2:
            about += f" The grey band is a cost of up to {equal_loss.limit(records):.2g}."
        pictures = {"Gaps": (about, _forest(go, records))} | pictures
    if speeds := end_points.run_speeds(records):
        pictures["Gap over training speed"] = ("", _cost(go, records, speeds))
    parts = [_verdicts(records)]
    for i, (title, (about, picture)) in enumerate(pictures.items()):
        # With a given id the page is the same, byte for byte, whenever it is made.
        html_of_it = picture.to_html(full_html=False, include_plotlyjs=i == 0, div_id=f"picture{i}")
        parts.append(f"<h2>{title}</h2>\n<p>{escape(about)}</p>\n{html_of_it}\n")
    heading, _, rest = html.partition("</h1>")
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(records.title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{heading}</h1>\n{''.join(parts)}\n{rest}</body></html>\n",
        encoding="utf-8",
    )


def _verdicts(records: Records) -> str:
    """Return a list of the verdicts in words against each reference, with the models that they are on."""
    about = (
        f"Numbers are gaps in {records.unit.name}: the difference of the loss out of domain at the same loss in "
        "domain, positive where a model is worse than the reference. ± is half of the 95% interval."
    )
    parts = ["<h2>Verdicts</h2>\n", f"<p>{about}</p>\n"]
    for reference in (name for name in records.references if equal_loss.shown_runs(records, name)):
        parts.append(f"<h3>Against {escape(reference)}</h3>\n<ul>\n")
        for words, models in in_words(records, reference).items():
            named = "; ".join(f"<span>{escape(model)}</span>" for model in models)
            parts.append(f"<li><b>{escape(words)}</b> {named}</li>\n")
        parts.append("</ul>\n")
    return "".join(parts)


def _forest(go: Any, records: Records) -> Any:
    """Return a figure with the gaps of every model to each reference, as in gaps.png."""
    shown, lines, found = forest.references(records), forest.order(records), forest.marks(records)
    figure = go.Figure()
    width = 1 / len(shown)
    for i, reference in enumerate(shown):
        axis = str(i + 1) if i else ""
        for what, look in OF_MARKS.items():
            drawn = [mark for mark in found if (mark.reference, mark.what) == (reference, what)]
            if not drawn:
                continue
            figure.add_scatter(
                x=[mark.gap for mark in drawn],
                y=[lines.index(mark.model) + forest.OFFSETS.get(what, 0.0) for mark in drawn],
                error_x={"type": "data", "array": [mark.half_width for mark in drawn], "thickness": 1.5, "width": 0},
                text=[_of_mark(mark, records) for mark in drawn],
                hoverinfo="text",
                mode="markers",
                name=what,
                legendgroup=what,
                showlegend=not any(trace.name == what for trace in figure.data),
                marker=look,
                xaxis=f"x{axis}",
                yaxis=f"y{axis}",
            )
        x_axis = {"title": f"gap to {reference} ({records.unit.name})", "zeroline": True, "zerolinecolor": "#888"}
        x_axis |= {"domain": [i * width, (i + 0.96) * width], "anchor": f"y{axis}"}
        y_axis = {"tickvals": list(range(len(lines))), "ticktext": lines if i == 0 else [""] * len(lines)}
        y_axis |= {"range": [len(lines) - 0.4, -0.6], "anchor": f"x{axis}", "zeroline": False, "ticklabelstandoff": 6}
        if i:
            y_axis["matches"] = "y"
        figure.update_layout({f"xaxis{axis}": x_axis, f"yaxis{axis}": y_axis})
        if records.protocol == 2:  # the gaps that are no more than what is called a cost
            ends = {"x0": 0, "x1": equal_loss.limit(records), "y0": 0, "y1": 1}
            figure.add_shape(
                type="rect",
                **ends,
                xref=f"x{axis}",
                yref=f"y{axis} domain",
                fillcolor="#eee",
                line_width=0,
                layer="below",
            )
    figure.update_layout(
        template="plotly_white",
        height=26 * len(lines) + 150,
        margin={"t": 10, "l": 10},
        legend={"orientation": "h", "y": -60 / (26 * len(lines) + 60), "yanchor": "top"},
    )
    figure.update_yaxes(automargin=True)
    return figure


def _of_mark(mark: forest.Mark, records: Records) -> str:
    width = "" if mark.half_width is None else f" ± {mark.half_width:.3f}"
    return f"<b>{mark.model}</b><br>{mark.gap:+.3f}{width} {records.unit.name}<br>{mark.what}"


def _quantities(records: Records) -> dict[str, list[str]]:
    """Return the domains whose mean is shown, by the name of the choice in the menu."""
    single = {domain: [domain] for domain in records.domains}
    return ({comparison.EQUAL: list(records.domains)} if len(records.domains) > 1 else {}) | single


def _groups(records: Records) -> dict[str, list[Record]]:
    """Return the runs that are switched together by their name in the legend: a model's seeds, and its other runs."""
    models, others = dict[str, list[Record]](), dict[str, list[Record]]()
    for model in comparison.models(records):
        shown = equal_loss.shown_runs(records, model)
        more = [run for run in records.runs if run.model == model and run not in shown]
        if shown:
            models[model] = shown
        if more:
            rates, schedules = any(run.rate != 1 for run in more), any(run.schedule != 1 for run in more)
            what = "rates and schedules" if rates and schedules else "schedules" if schedules else "rates"
            others[f"{model}, other {what}"] = more
    return models | others


def _lines(go: Any, records: Records, x_title: str) -> Any:
    """Return a figure with the losses of every run over its loss in domain or its tokens, and a menu of the domains."""
    groups = _groups(records)
    runs = [run for group in groups.values() for run in group]
    inside = [run.losses_in_domain(records.against) for run in runs]
    x = inside if x_title == IN_DOMAIN else [np.array([p.tokens / 1e6 for p in run.points]) for run in runs]
    choices = {name: [run.losses(domains).mean(1) for run in runs] for name, domains in _quantities(records).items()}
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
                name=name,
                legendgroup=name,
                showlegend=k == 0,
                visible=True if name == run.model else "legendonly",
                **_look(records, run),
            )
            i += 1
    buttons = []
    for name, of_runs in choices.items():
        axis = {"yaxis.range": _range(of_runs)}
        buttons.append({"label": name, "method": "update", "args": [{"y": [y.tolist() for y in of_runs]}, axis]})
    unit = records.unit.name
    _finish(figure, f"{IN_DOMAIN} ({unit})" if x_title == IN_DOMAIN else x_title, f"loss ({unit})", buttons)
    figure.update_yaxes(range=buttons[0]["args"][1]["yaxis.range"])
    low, high = _range(x)  # Of losses inverted, so that training goes from left to right.
    figure.update_xaxes(range=[high, low] if x_title == IN_DOMAIN else [low, high])
    return figure


def _range(values: Iterable[np.ndarray]) -> list[float]:
    """Return the ends of an axis that has room for every point and its marker, the first ones too."""
    together = np.concatenate([*values])
    low, high = float(together.min()), float(together.max())
    margin = 0.04 * (high - low) or 0.1
    return [low - margin, high + margin]


def _hover(run: Record, p: Point) -> str:
    lines = [f"<b>{run.label}</b>", f"step {p.step:,}, {p.tokens / 1e6:,.1f}M tokens", f"training {p.train_loss:.3f}"]
    return "<br>".join([*lines, *(f"{domain} {loss:.3f}" for domain, loss in p.domains.items())])


def _cost(go: Any, records: Records, speeds: dict[str, float]) -> Any:
    """Return a figure with every model's gap over its speed, and a menu of the references."""
    known = [name for name in records.references if equal_loss.shown_runs(records, name)]
    gaps = {name: end_points.gaps_to(records, name) for name in known}
    models = [name for name in comparison.models(records) if name in speeds]
    titles = {name: f"gap to {name} ({records.unit.name})" for name in known}
    figure = go.Figure()
    for model in models:
        gap, width = gaps[known[0]].get(model, (None, None))
        run = equal_loss.shown_runs(records, model)[0]
        figure.add_scatter(
            x=[speeds[model]],
            y=[gap],
            error_y={"type": "data", "array": [width]},
            mode="markers",
            name=model,
            hovertemplate=f"<b>{model}</b><br>%{{x:,.0f}} tokens/s<br>%{{y:+.3f}} {records.unit.name}<extra></extra>",
            **_look(records, run),
        )
    buttons = []
    for name in known:
        of_model = [gaps[name].get(model, (None, None)) for model in models]
        data = {
            "y": [[gap] for gap, _ in of_model],
            "error_y": [{"type": "data", "array": [width]} for _, width in of_model],
        }
        args = [data, {"yaxis.title.text": titles[name]}]
        buttons.append({"label": f"gap to {name}", "method": "update", "args": args})
    _finish(figure, "training speed (tokens/s)", titles[known[0]], buttons)
    return figure


def _finish(figure: Any, x_title: str, y_title: str, buttons: Sequence[dict[str, Any]]) -> None:
    figure.update_layout(
        template="plotly_white",
        height=max(600, 19 * len({trace.name for trace in figure.data}) + 180),  # so that the legend does not scroll
        margin={"t": 60},
        hovermode="closest",
        xaxis_title=x_title,
        yaxis_title=y_title,
        updatemenus=[{"buttons": list(buttons), "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
        legend={"font": {"size": 11}, "groupclick": "togglegroup", "tracegroupgap": 0},
    )


def _look(records: Records, run: Record) -> dict[str, Any]:
    i = comparison.models(records).index(run.model)
    color = COLORS[i % len(COLORS)]
    dash = OF_RATES[run.rate > 1] if run.rate != 1 else OF_SEEDS[run.seed % len(OF_SEEDS)]
    marker = {"color": color, "symbol": ROUNDS[i // len(COLORS) % len(ROUNDS)], "size": 5 if run.seed else 7}
    return {"line": {"color": color, "dash": dash, "width": 1.5}, "marker": marker}
