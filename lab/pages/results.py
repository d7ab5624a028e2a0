"""Write the numbers of README.md, docs/results.md and two pages of the lab: `python -m lab.pages.results`.

A page has its generated text between `<!--NAME-->` and `<!--/NAME-->`, where NAME is a key of `BLOCKS`. Gaps come from
lab/results/STUDY/leaderboard.csv and speeds from benchmarks/results (all_mixers.py chooses the files). If the numbers
no longer support a sentence, the script stops; rewrite the sentence here.
"""

import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import plot
from lab.pages import all_mixers, parts, steps
from seqjax.study import gaps
from seqjax.study.report import forest, leaderboard
from seqjax.study.report.tables import markdown
from seqjax.study.runs import files

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "lab" / "results"
PUBLISHED, SAME_BLOCK = "Transformer++, QK norm", "Transformer++, QK norm, conv"
ATTENTION = (PUBLISHED, SAME_BLOCK, "Transformer++")
EXACT, BEST_KEY, WINDOW = "Top-1 Chunk, exact", "Top-1 Chunk, best key", "W=256, QK norm"
# Rows of README's table: model -> name in the table.
SHORT = {
    SAME_BLOCK: "attention, with short convolution (reference)",
    PUBLISHED: "attention (Transformer++, QK norm)",
    EXACT: "Top-1 Chunk, exact selection",
    WINDOW: "attention, window of 256 tokens",
    "KDA": "KDA",
    "Gated DeltaNet": "Gated DeltaNet",
    "Mamba-2": "Mamba-2",
    "Mamba-3": "Mamba-3",
}
NAMES = {BEST_KEY: "Top-1 Chunk with the best key", EXACT: "Top-1 Chunk with exact selection"}  # in sentences
MAP = "size_map_256x6"
MAPPED = {PUBLISHED: "attention (Transformer++, QK norm)"}  # names in the table of the map
WORDS = {3: "three", 8: "eight", 9: "nine"}
# Model -> model with a recorded speed. Attention was timed without QK norm.
TIMED = {PUBLISHED: "Transformer++"}
# Speed record -> day: date of the measured commit, or of the file if it names no commit.
DAYS = {
    "train_step": "2026-11-29",
    "train_step_blocks": "2026-11-29",
    "train_step_kernels": "2026-11-29",
    "train_step_ttt": "2026-11-29",
    "train_step_h100_rest": "2026-11-28",
    "train_step_135m_100k_selection": "2026-11-25",
    "train_step_135m_100k_recurrent": "2026-11-25",
    "train_step_135m_100k": "2026-11-25",
}


# ------------------------------------------------------------------------------------------------------------- numbers
@cache
def known() -> all_mixers.Known:
    """Return the speeds and parameters of all mixers."""
    return all_mixers.read()


@cache
def board(study: str) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return the rows of a study's leaderboard by reference and model."""
    return {(row["reference"], row["model"]): row for row in leaderboard.read(RESULTS / study / leaderboard.FILE)}


def row(model: str, reference: str = SAME_BLOCK, study: str = "trunks_110m") -> Mapping[str, Any]:
    """Return the comparison of a model with a reference."""
    return board(study)[reference, model]


def gap(line: Mapping[str, Any]) -> str:
    """Return a gap with its interval; a single seed has none."""
    if line["gap"] is None:
        return ""
    half = "" if line["lo"] is None else f" ± {(line['hi'] - line['lo']) / 2:.2f}"
    return f"{line['gap']:+.2f}{half}"


def tokens_per_s(model: str, card: str = "") -> str:
    """Return the training speed at 2,048 tokens, or "" without a record on that GPU."""
    speed = known().speeds.get(TIMED.get(model, model))
    return "" if speed is None or card not in device(speed.file) else f"{speed.tokens_per_s / 1e3:.0f}k"


def device(file: str) -> str:
    """Return the GPU of a speed record."""
    return all_mixers.recorded(file)["machine"]["device"]


def measured(file: str) -> str:
    """Return GPU and day of a speed record."""
    if file not in DAYS:
        raise ValueError(f"{file}.json has no day; add it to DAYS in {Path(__file__).name}.")
    return f"{device(file).removeprefix('NVIDIA ').partition(' ')[0]}, {DAYS[file]}"


def require(claim: object, sentence: str) -> None:
    """Raise `ValueError` if a sentence is no longer true."""
    if not claim:
        raise ValueError(f"The results no longer support {sentence!r}; rewrite it in {Path(__file__).name}.")


# -------------------------------------------------------------------------------------------------------------- blocks
def answer() -> str:
    """Return the first paragraph of the results page."""
    others = {model: line for (ref, model), line in board("trunks_110m").items() if ref == SAME_BLOCK}
    others = {model: line for model, line in others.items() if model not in ATTENTION}
    require(all(line["verdict"] in ("costs", "undecided") for line in others.values()), "no mixer matches attention")
    seeds = {model: line for model, line in others.items() if line["seeds"] >= 3}
    by_gap = sorted(seeds, key=lambda model: seeds[model]["gap"])
    best = [model for model in by_gap if f"{seeds[model]['gap']:.2f}" == f"{seeds[by_gap[0]]['gap']:.2f}"]
    names, sizes = _listed([NAMES.get(m, m) for m in best]), _listed([gap(seeds[m]).lstrip("+") for m in best])
    closest = (
        f"{names} comes closest: its OOD loss is {sizes}"
        if len(best) == 1
        else f"{names} come closest: their OOD losses are {sizes}"
    )
    return _wrapped(
        "At 110M parameters no mixer is shown to match attention with the same block. Of the mixers with three seeds, "
        f"{closest} nats per token higher. These are small models on little text; read the "
        "[open questions](#open-questions) before you generalise."
    )


def all_gaps() -> str:
    """Return the leaderboard: every model of trunks_110m."""
    header = ["model", "parameters (M)", "learning rates", "seeds", "gap, same block", "verdict", "gap, as published"]
    lines = []
    for model in all_mixers.order(known().study):
        of_both = [board("trunks_110m").get((reference, model)) for reference in (SAME_BLOCK, PUBLISHED)]
        same, published = of_both
        one = same or published
        assert one is not None
        rates = one["rates"].replace(";", ", ")
        verdict = "reference" if same is None else same["verdict"] + ("\\*" if same["provisional"] == "yes" else "")
        size = f"{one['parameters'] / 1e6:.0f}"
        published_gap = "reference" if published is None else gap(published)
        lines.append(
            [
                model,
                size,
                rates,
                str(one["seeds"]),
                "0" if same is None else gap(same),
                verdict,
                published_gap,
                tokens_per_s(model, "H200"),
            ]
        )
    return markdown([*header, "tokens/s"], lines).rstrip()


def speeds() -> str:
    """Return the table of training speeds, fastest first."""
    attention = known().long_speeds[all_mixers.YARDSTICK].tokens_per_s
    lines = []
    times = {model: speed.ratio or 0.0 for model, speed in known().speeds.items()}
    for model in sorted(known().configs, key=lambda name: -times.get(name, 0.0)):
        short, long = known().speeds.get(model), known().long_speeds.get(model)
        cells = ["", "", "", "", ""]
        if short:
            ratio = "" if short.ratio is None else f"{short.ratio:.2f}"
            cells[:4] = [f"{short.tokens_per_s / 1e3:.0f}k", ratio, f"{short.gib:.1f}", measured(short.file)]
        if long:
            cells[4] = f"{long.tokens_per_s / 1e3:.0f}k ({long.tokens_per_s / attention:.1f})"
        if short or long:
            lines.append([model, *cells])
    header = [
        "model",
        "tokens/s at 2,048",
        "times attention",
        "GiB",
        "card, day",
        "tokens/s at 102,400 (times attention)",
    ]
    return markdown(header, lines).rstrip()


def speed() -> str:
    """Return the sentences about speed."""
    exact, mamba = (known().speeds[name].ratio for name in (EXACT, "Mamba-2"))
    full = known().long_speeds["Transformer++"].tokens_per_s
    of_rules = [
        record.tokens_per_s / full for name, record in known().long_speeds.items() if name.startswith("Top-1 Chunk")
    ]
    days = sorted({measured(record.file) for record in known().long_speeds.values()})
    return _wrapped(
        f"At 2,048 tokens, Top-1 Chunk with exact selection trains at {exact:.2f} times and Mamba-2 at {mamba:.2f} "
        "times the speed of attention. At 102,400 tokens a step with Top-1 Chunk is "
        f"{min(of_rules):.1f} to {max(of_rules):.1f} times as fast as with cuDNN attention "
        f"(135M parameters, {'; '.join(days)})."
    )


def claims() -> str:
    """Return the table of the paper's claims."""
    published = {name: row(name, PUBLISHED) for name in ("Gated DeltaNet", "Mamba-2", "Mamba-3", WINDOW, EXACT)}
    of_states = [f"{name} {gap(published[name])}" for name in ("Gated DeltaNet", "Mamba-2", "Mamba-3")]
    require(all(published[name]["verdict"] == "costs" for name in published if name != EXACT), "recurrent mixers cost")
    require(published[EXACT]["verdict"] == "undecided" and row(EXACT)["verdict"] == "costs", "exact is undecided")
    exact = f"undecided against attention as published ({gap(published[EXACT])}); costs against attention with the same"
    lines = [
        ["trained on all domains, architectures look alike", "not run"],
        [
            "recurrent mixers cost OOD loss at equal in-domain loss",
            f"yes: against attention as published {', '.join(of_states)}",
        ],
        ["windows cost too", f"yes: 256 tokens {gap(published[WINDOW])}"],
        ["Top-1 Chunk with exact selection is close to attention", f"{exact} block ({gap(row(EXACT))})"],
        ["a lower attention temperature lowers the OOD loss", "[yes](../lab/results/figure4/README.md), one seed"],
        ["the short convolution of Mamba-2 does not matter OOD", "[no](../lab/results/switches/parts.md), one seed"],
        ["the results at 1.3B parameters", "not run"],
    ]
    head = ["claim of [arXiv 2505.18522](https://arxiv.org/abs/2505.18522)", "here, at 110M"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---", "---"], *lines))


def blocks() -> str:
    """Return the paragraph about parts of a block."""
    of_models = parts.read()
    at_equal_loss = parts.QUANTITIES["OOD, at equal in-domain loss"]
    lost = {name: at_equal_loss(of_models[name].parts["conv"])[0] for name in ("Gated DeltaNet", "Mamba-2")}
    others = [
        at_equal_loss(part)[0] for model in of_models.values() for name, part in model.parts.items() if name != "conv"
    ]
    require(max(map(abs, others)) < min(lost.values()), "other parts change less than the convolution")
    gains = gap(row(SAME_BLOCK, PUBLISHED)).lstrip("-")
    hybrid, alone = (row(name, PUBLISHED, "hybrids")["gap"] for name in ("Mamba-2, attention 1 in 8", "Mamba-2"))
    return _wrapped(
        f"Without its short convolution Gated DeltaNet loses {lost['Gated DeltaNet']:.2f} nats OOD at equal in-domain "
        f"loss, and Mamba-2 {lost['Mamba-2']:.2f}; attention gains {gains} with one. Token shift, an output gate and "
        "further convolutions change less ([all parts](../lab/results/switches/parts.md), one seed). So compare with "
        f"attention in the same block. Full attention in one layer of eight removes {1 - hybrid / alone:.0%} of "
        "Mamba-2's gap to attention as published ([hybrids](../lab/results/hybrids/README.md), one seed)."
    )


def length() -> str:
    """Return the paragraph about long contexts."""
    ours = {"attention": "RWKV-7 shell, full attention", "exact": "RWKV-7 shell, Top-1 exact", "state": "RWKV-7"}
    short = {name: _last("books_16k", model) for name, model in ours.items()}
    long = {name: _last("books_100k", ours[name]) for name in ("exact", "state")}
    inside = [losses[0] for losses in short.values()]
    require(min(short, key=lambda name: short[name][1]) == "exact", "exact selection is best OOD at 16,384 tokens")
    return _wrapped(
        "Models trained on books, one seed, compared after the same tokens. In RWKV-7's block at "
        "[16,384 tokens](../lab/results/books_16k/README.md), full attention, exact Top-1 selection and RWKV-7's state "
        f"are within {max(inside) - min(inside):.2f} nats in domain; OOD, exact selection is best and RWKV-7's state "
        f"is {short['state'][1] - short['exact'][1]:.1f} nats worse. At "
        "[102,400 tokens](../lab/results/books_100k/README.md), exact selection in that block is "
        f"{long['state'][1] - long['exact'][1]:.2f} nats better OOD than RWKV-7's state and "
        f"{long['exact'][0] - long['state'][0]:.2f} worse in domain. Without a short convolution or token shift, "
        "attention does not learn to copy at these lengths."
    )


def tokens() -> str:
    """Return the gaps at 12.9M parameters after one, five and twenty tokens per parameter."""
    records = files.read(RESULTS / MAP)
    along = forest.over_tokens(records, SAME_BLOCK, gaps.compare(records, SAME_BLOCK))
    per_parameter = 258e6 / 20
    shown = {model: [float(points[i, 1]) for i in (0, 1, -1)] for model, points in along.items()}
    for points in along.values():
        require(np.allclose(points[[0, 1, -1], 0] / per_parameter, (1, 5, 20), rtol=0.02), "ends at 1, 5 and 20")
    shares = [last / first for first, _, last in shown.values()]
    require(all(0.2 < share < 0.7 for share in shares), "a quarter to two thirds of each gap remains")
    rows = [[MAPPED.get(model, model), *(f"{gap:+.2f}" for gap in of_model)] for model, of_model in shown.items()]
    table = markdown(["gap to attention with the same block", "1 token per parameter", "5", "20"], rows)
    about = (
        f"At 12.9M parameters, {min(shares):.0%} to {max(shares):.0%} of each gap after one token per parameter "
        f"remains after twenty ([map of sizes and tokens](../lab/results/{MAP}/README.md), one or two seeds, one or "
        "two matched learning rates):"
    )
    return f"{_wrapped(about)}\n\n{table.rstrip()}"


def _last(study: str, model: str) -> tuple[float, float]:
    """Return the last in-domain and OOD losses of a model at the rate that is shown."""
    rates = gaps.rates(files.read(RESULTS / study), model)
    _, inside, outside = rates.by_rate[rates.shown]
    return inside, outside


def questions() -> str:
    """Return the open questions that have numbers."""
    of_models = {model: line for (ref, model), line in board("trunks_110m").items() if ref == SAME_BLOCK}
    seeds = [line["seeds"] for model, line in of_models.items() if model != PUBLISHED]
    slopes = [(line["as_tuned"] - line["gap"]) / line["octaves"] for line in of_models.values() if line["octaves"]]
    of_seeds = (
        f"* **Seeds.** Attention as published has {of_models[PUBLISHED]['seeds']} seeds, attention with the same block "
        f"{of_models[PUBLISHED]['reference_seeds']}, and {sum(n >= 3 for n in seeds)} of {len(seeds)} other models "
        "three or more; many verdicts are undecided or provisional."
    )
    of_rates = (
        "* **Learning rates.** Doubling the rate lowers the OOD loss at equal in-domain loss by about "
        f"{-sum(slopes) / len(slopes):.2f} nats. Some best rates are at the edge of the tried rates."
    )
    return "\n".join(_wrapped(text, "  ") for text in (of_seeds, of_rates))


def results() -> str:
    """Return README's table and the sentences about it."""
    of_models = {model: row(model) for model in SHORT if model != SAME_BLOCK}
    require(all(line["verdict"] == "costs" for line in of_models.values()), "every gap is significant")
    edges = [model for model, line in of_models.items() if line["edge"]]
    first = of_models[PUBLISHED]
    seeds = [first["reference_seeds"], *(line["seeds"] for line in of_models.values())]
    least, most = (WORDS.get(n, str(n)) for n in (min(seeds), max(seeds)))
    lines = [[SHORT[SAME_BLOCK], _millions(known().parameters[SAME_BLOCK]), "0", tokens_per_s(SAME_BLOCK, "H200")]]
    lines += [
        [SHORT[m], _millions(line["parameters"]), gap(line), tokens_per_s(m, "H200")] for m, line in of_models.items()
    ]
    head = ["model", "parameters", "OOD gap (nats per token)", "training speed (tokens/s)"]
    table = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in (head, *lines)]
    table.insert(1, "|---|---:|---:|---:|")  # one word: README has at most 900
    about = (
        "Gaps are means over the three domains; ± is a 95% interval (seeds, rates, test text). 0.1 nats is 10% higher "
        f"perplexity. Every gap differs from zero; the best rate of {' and of '.join(edges)} is at the "
        f"edge of the tried rates. All models saw {first['tokens'] / 2e6:.0f}M tokens of [openly licensed "
        "text](docs/corpus.md) twice, one token per "
        f"parameter, {least} to {most} seeds. Speed: one H200, 16 sequences of 2,048 tokens."
    )
    return "\n".join([*table, "", _wrapped(about)])


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _millions(n: float) -> str:
    return f"{n / 1e6:.0f}M"


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"results": results},
    "docs/results.md": {
        "answer": answer, "leaderboard": all_gaps, "speed": speed, "speeds": speeds, "claims": claims,
        "blocks": blocks, "tokens": tokens, "length": length, "questions": questions,
    },
    "lab/results/mixers.md": {"steps": steps.steps},
    "lab/results/kernels.md": {"ops": steps.ops, "profiles": steps.profiles},
}  # fmt: skip


def page(name: str, text: str) -> str:
    """Return a page with its generated blocks; raise `ValueError` if it lacks one."""
    for block, write in BLOCKS[name].items():
        start, end = f"<!--{block}-->", f"<!--/{block}-->"
        if text.count(start) != 1 or text.count(end) != 1:
            raise ValueError(f"{name} needs {start} and {end} once; the block {block!r} goes between them.")
        text = text[: text.index(start)] + f"{start}\n{write()}\n" + text[text.index(end) :]
    return text


if __name__ == "__main__":
    for name in BLOCKS:
        path = ROOT / name
        path.write_text(page(name, path.read_text(encoding="utf-8")), encoding="utf-8")
    plot.save(steps.picture(), RESULTS / "steps.png")
