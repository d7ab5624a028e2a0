"""report.html: a finished study as a single page without network or other files.

Hovering over a point names the run, its tokens and its losses; runs are switched in the legend, domains in the menu of
a picture. The tables are those of gaps.md. The page has several megabytes, because it contains the plotting library.
One command makes it again, so it need not be kept with the results.
"""

from pathlib import Path
from typing import Any

import numpy as np

from seqjax.study import comparison, end_points, equal_loss, figures
from seqjax.study.protocol import Point, Record
from seqjax.study.records import Records
from seqjax.pictures import COLORS
from seqjax.utils import UserError

# plotly's names of the styles in figures.ROUNDS and OF_SEEDS, and of learning rates below and above the common one
ROUNDS = ("circle", "triangle-up-open", "square", "diamond-open")
OF_SEEDS = ("solid", "dash", "dot")
OF_RATES = ("dashdot", "longdashdot")
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { border-bottom: 1px solid #888; text-align: left; }
.table { overflow-x: auto; }
"""


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
    pictures = {
        "Loss out of domain over loss in domain": _lines(go, records, _in_domain(records), "loss in domain"),
        "Loss over training": _lines(go, records, _million_tokens(records), "million tokens"),
    }
    if speeds := end_points.run_speeds(records):
        pictures["Gap over training speed"] = _cost(go, records, speeds)
    parts = []
    for i, (title, picture) in enumerate(pictures.items()):
        # With a given id the page is the same, byte for byte, whenever it is made.
        html_of_it = picture.to_html(full_html=False, include_plotlyjs=i == 0, div_id=f"picture{i}")
        parts.append(f"<h2>{title}</h2>\n{html_of_it}\n")
    heading, _, rest = html.partition("</h1>")
    Path(path).write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_escaped(records.title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{heading}</h1>\n{''.join(parts)}\n{rest}</body></html>\n",
        encoding="utf-8",
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _quantities(records: Records) -> dict[str, list[str]]:
    """Return the domains whose mean is shown, by the name of the choice in the menu."""
    single = {domain: [domain] for domain in records.domains}
    return ({comparison.EQUAL: list(records.domains)} if len(records.domains) > 1 else {}) | single


def _in_domain(records: Records) -> dict[str, np.ndarray]:
    return {run.label: run.losses_in_domain(records.against) for run in records.runs}


def _million_tokens(records: Records) -> dict[str, np.ndarray]:
    return {run.label: np.array([p.tokens / 1e6 for p in run.points]) for run in records.runs}


def _lines(go: Any, records: Records, x: dict[str, np.ndarray], x_title: str) -> Any:
    """Return a figure with the losses of every run over `x`, and a menu of the domains."""
    of_loss = x_title == "loss in domain"
    choices = {
        name: {run.label: run.losses(domains).mean(1) for run in records.runs}
        for name, domains in _quantities(records).items()
    }
    if not of_loss:
        choices = {"in domain": _in_domain(records)} | choices
    # Losses before that are the first steps of training.
    limit = max(losses.min() for losses in _in_domain(records).values()) + figures.SHOWN * records.unit.range
    shown = {label: losses <= limit for label, losses in _in_domain(records).items()}
    figure = go.Figure()
    for run in records.runs:
        figure.add_scatter(
            x=x[run.label].tolist(),
            y=next(iter(choices.values()))[run.label].tolist(),
            text=[_hover(run, p) for p in run.points],
            hoverinfo="text",
            mode="lines+markers",
            name=run.label,
            # The full runs of seed 0 at the common rate are shown; the others are a click in the legend away.
            visible=True if _is_main(run) else "legendonly",
            **_look(records, run),
        )
    buttons = []
    for name, of_run in choices.items():
        values = np.concatenate([of_run[run.label][shown[run.label]] for run in records.runs])
        low, high = float(values.min()), float(values.max())
        axis = {"yaxis.range": [low - 0.04 * (high - low), high + 0.04 * (high - low)]}
        y = [of_run[run.label].tolist() for run in records.runs]
        buttons.append({"label": name, "method": "update", "args": [{"y": y}, axis]})
    _finish(figure, x_title, f"loss ({records.unit.name})", buttons)
    figure.update_yaxes(range=buttons[0]["args"][1]["yaxis.range"])
    if of_loss:  # Inverted, so that training goes from left to right.
        figure.update_xaxes(range=[limit, min(losses.min() for losses in x.values()) - 0.03])
    return figure


def _hover(run: Record, p: Point) -> str:
    lines = [f"<b>{run.label}</b>", f"step {p.step:,}, {p.tokens / 1e6:,.1f}M tokens", f"training {p.train_loss:.3f}"]
    return "<br>".join([*lines, *(f"{domain} {loss:.3f}" for domain, loss in p.domains.items())])


def _cost(go: Any, records: Records, speeds: dict[str, float]) -> Any:
    """Return a figure with every model's gap over its speed, and a menu of the references."""
    known = [name for name in records.references if equal_loss.shown_runs(records, name)]
    gaps = {name: end_points.gaps_to(records, name) for name in known}
    models = [name for name in comparison.models(records) if name in speeds]
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
        buttons.append({"label": f"gap to {name}", "method": "update", "args": [data]})
    _finish(figure, "tokens/s in training", f"gap ({records.unit.name})", buttons)
    return figure


def _finish(figure: Any, x_title: str, y_title: str, buttons: list[dict[str, Any]]) -> None:
    figure.update_layout(
        template="plotly_white",
        height=600,
        margin={"t": 60},
        hovermode="closest",
        xaxis_title=x_title,
        yaxis_title=y_title,
        updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}],
        legend={"font": {"size": 11}},
    )


def _is_main(run: Record) -> bool:
    return run.seed == 0 and run.rate == run.schedule == 1


def _look(records: Records, run: Record) -> dict[str, Any]:
    i = comparison.models(records).index(run.model)
    color = COLORS[i % len(COLORS)]
    dash = OF_RATES[run.rate > 1] if run.rate != 1 else OF_SEEDS[run.seed % len(OF_SEEDS)]
    marker = {"color": color, "symbol": ROUNDS[i // len(COLORS) % len(ROUNDS)], "size": 7 if _is_main(run) else 5}
    return {"line": {"color": color, "dash": dash, "width": 1.5}, "marker": marker}
