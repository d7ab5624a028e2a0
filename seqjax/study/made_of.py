"""Decomposition of the gap of two models by classes of tokens (`seqjax.training.eval_losses`).

With S_k the summed losses of the tokens of class k, n_k their number and N that of all tokens of a domain,

    gap = sum_k (S_k - S'_k) / N = sum_k (n_k / N) * (S_k - S'_k) / n_k

is the sum over the classes of a family of the share of each times the gap within it. Both are of the same tokens, and
the interval of each part is that of a gap (`seqjax.study.statistics`): documents and seeds are samples.

A study keeps the sums in `classes.npz` beside `blocks.npz`: "runs" and "steps" [runs], the names of the classes of each
"FAMILY" [classes], and per domain "DOMAIN/blocks" [groups], "DOMAIN/FAMILY/tokens" [groups, classes] and
"DOMAIN/FAMILY/losses" [runs, groups, classes]. A group is one document or, beyond `MAX_GROUPS` documents, several
consecutive ones.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqjax.reading import read_arrays
from seqjax.study import comparison, equal_loss, protocol, statistics, tables
from seqjax.study.records import FIX, Records
from seqjax.study.statistics import Estimate
from seqjax.training import eval_losses
from seqjax.training.eval_losses import ClassSums, DomainSums
from seqjax.utils import UserError, replacing

FILE = "classes.npz"
MAX_GROUPS = 256  # of documents per domain in a study's file, which is committed with the results
TITLES = {
    "repeat": "Does a token continue what followed its bigram the last time in the block?",
    "distance": "How many tokens back that was, for the tokens that continue as before.",
    "frequency": "How often the token occurs in training, per million tokens.",
    "position": "Where in the block: the number of tokens before the last one read.",
}


class Part(NamedTuple):
    """A class of tokens: its share of all, its mean losses in nats per token, and its part of the gap.

    `gap` is that within the class; the `contribution` is `share` times that, with its interval.
    """

    name: str
    share: float
    ours: float
    theirs: float
    gap: float
    contribution: Estimate


def collect(workdirs: Mapping[str, str | Path]) -> tuple[dict[str, ClassSums], list[str]]:
    """Return the sums of runs, by label, and messages about runs without sums.

    Raises `UserError` if two runs have sums of different tokens.
    """
    of_run = {label: eval_losses.read_classes(workdir) for label, workdir in workdirs.items()}
    found = {label: sums for label, sums in of_run.items() if sums is not None}
    without = [label for label in of_run if label not in found]
    _require_same(found)
    return found, [f"No losses by class of token (eval.classes): {', '.join(without)}."] if without else []


def parts(both: Sequence[tuple[ClassSums, ClassSums]], domain: str, family: str) -> list[Part]:
    """Return the classes of a family that have tokens, in order; `both` holds a model and its reference per seed.

    Raises `UserError` if the sums are not of the same tokens.
    """
    _require_same({f"run {i}": sums for i, sums in enumerate(one for pair in both for one in pair)})
    first = both[0][0].domains[domain]
    tokens_DC, blocks_D = first.tokens[family], first.blocks
    ours_SDC, theirs_SDC = (np.stack([pair[i].domains[domain].losses[family] for pair in both]) for i in (0, 1))
    estimates = _estimates(ours_SDC - theirs_SDC, tokens_DC, blocks_D)
    n_tokens_C = tokens_DC.sum(0)
    shares_C = n_tokens_C / n_tokens_C.sum()
    found = []
    for k, name in enumerate(both[0][0].names[family]):
        if n := n_tokens_C[k]:
            ours, theirs = (float(x[..., k].sum(1).mean() / n) for x in (ours_SDC, theirs_SDC))
            found.append(Part(name, float(shares_C[k]), ours, theirs, ours - theirs, estimates[k]))
    return found


def total(both: Sequence[tuple[ClassSums, ClassSums]], domain: str) -> Part:
    """Return all tokens of a domain as one class, whose contribution is the gap."""
    family = next(iter(both[0][0].names))
    merged = [tuple(_one_class(sums, domain, family) for sums in pair) for pair in both]
    return parts([(ours, theirs) for ours, theirs in merged], domain, "all")[0]


def _one_class(sums: ClassSums, domain: str, family: str) -> ClassSums:
    of = sums.domains[domain]
    losses, tokens = ({"all": x[family].sum(1, keepdims=True)} for x in (of.losses, of.tokens))
    return ClassSums(sums.step, {"all": ("all",)}, {domain: DomainSums(of.documents, of.blocks, losses, tokens)})


def _estimates(gaps_SDC: np.ndarray, tokens_DC: np.ndarray, blocks_D: np.ndarray) -> list[Estimate]:
    """Return the contribution of every class to the gap, from sums of differences per seed and document."""
    # Each block of a document gets its mean: the variance uses only sums over documents and numbers of blocks.
    per_block = tokens_DC.sum() / blocks_D.sum()
    gaps_SNC = np.repeat(gaps_SDC / (blocks_D * per_block)[:, None], blocks_D, axis=1)
    documents_N = np.repeat(np.arange(len(blocks_D)), blocks_D)
    widths_C = statistics.mean_half_width([(np.moveaxis(gaps_SNC, 2, 0), documents_N)], [1.0])
    gaps_C = gaps_SDC.mean(0).sum(0) / tokens_DC.sum()
    return [Estimate(float(g), float(w) if np.isfinite(w) else None) for g, w in zip(gaps_C, widths_C, strict=True)]


def _in_groups(sums: ClassSums) -> ClassSums:
    """Return the sums with at most `MAX_GROUPS` groups of documents in each domain."""
    domains = {}
    for domain, of in sums.domains.items():
        n = len(of.blocks)
        begins = np.unique(np.arange(min(n, MAX_GROUPS)) * n // min(n, MAX_GROUPS))
        losses = {family: np.add.reduceat(of_family, begins) for family, of_family in of.losses.items()}
        tokens = {family: np.add.reduceat(of_family, begins) for family, of_family in of.tokens.items()}
        domains[domain] = DomainSums(np.arange(len(begins)), np.add.reduceat(of.blocks, begins), losses, tokens)
    return dataclasses.replace(sums, domains=domains)


def _require_same(found: Mapping[str, ClassSums]) -> None:
    """Raise `UserError` unless all runs have sums of the same tokens in the same classes."""
    if not found:
        return
    (first, sums), *others = found.items()
    for label, other in others:
        same = other.names == sums.names and other.domains.keys() == sums.domains.keys()
        for domain, of in sums.domains.items() if same else ():
            own = other.domains[domain]
            same &= np.array_equal(of.blocks, own.blocks)
            same &= all(np.array_equal(tokens, own.tokens[family]) for family, tokens in of.tokens.items())
        if not same:
            raise UserError(
                f"The classes of tokens of {label} are not those of {first}: compare runs with the same data, "
                "eval.tokens and eval.seed, and the same version of seqjax."
            )


# ----------------------------------------------------------------------------------------------------------- files
def write(out: Path, found: Mapping[str, ClassSums]) -> None:
    """Write `classes.npz`, or remove it if there are no sums. Raises `UserError` for sums of different tokens."""
    (out / FILE).unlink(missing_ok=True)
    if not found:
        return
    found = {label: _in_groups(sums) for label, sums in found.items()}
    _require_same(found)
    first = next(iter(found.values()))
    arrays: dict[str, Any] = {"runs": np.array(list(found)), "steps": np.array([sums.step for sums in found.values()])}
    arrays |= {family: np.array(names) for family, names in first.names.items()}
    for domain, of in first.domains.items():
        arrays[f"{domain}/blocks"] = of.blocks
        for family in first.names:
            losses_RDC = np.stack([sums.domains[domain].losses[family] for sums in found.values()])
            arrays[f"{domain}/{family}/tokens"] = of.tokens[family]
            arrays[f"{domain}/{family}/losses"] = losses_RDC.astype(np.float32)
    with replacing(out / FILE) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(directory: str | Path) -> dict[str, ClassSums]:
    """Return the sums that `write` wrote, by label; empty if there are none. Documents are numbered by group."""
    path = Path(directory) / FILE
    if not path.is_file():
        return {}
    arrays = read_arrays(path, fix=FIX)
    families = eval_losses.class_names(arrays)
    domains = [key.removesuffix("/blocks") for key in arrays if key.endswith("/blocks")]
    labels = arrays.take("runs", "U", None)
    found = {}
    for i, (label, step) in enumerate(zip(labels, arrays.take("steps", "iu", len(labels)), strict=True)):
        of_domains = {}
        for domain in domains:
            blocks = arrays.take(f"{domain}/blocks", "iu", None)
            tokens, losses = {}, {}
            for family, names in families.items():
                shape = len(blocks), len(names)
                tokens[family] = arrays.take(f"{domain}/{family}/tokens", "iu", *shape)
                losses_RDC = arrays.take(f"{domain}/{family}/losses", "f", len(labels), *shape)
                losses[family] = losses_RDC[i].astype(np.float64)
            of_domains[domain] = DomainSums(np.arange(len(blocks)), blocks, losses, tokens)
        found[str(label)] = ClassSums(int(step), families, of_domains)
    return found


# --------------------------------------------------------------------------------------------------------- section
def section(records: Records, found: Mapping[str, ClassSums], reference: str) -> str:
    """Return the Markdown about the gaps of all models to a reference, with a heading; "" if no pair has sums.

    Raises `UserError` if the study has no model of that name.
    """
    comparison.require_model(records, reference)
    texts = []
    for model in comparison.models(records):
        if model == reference:
            continue
        runs = protocol.pairs(equal_loss.shown_runs(records, model), equal_loss.shown_runs(records, reference))
        both = [(found[a.label], found[b.label]) for a, b in runs if a.label in found and b.label in found]
        if both:
            texts.append(_of_model(records, both, model, reference))
    if not texts:
        return ""
    inside = f"The domains trained on ({', '.join(records.against)}) stand first. " if records.against else ""
    about = (
        "Every family of classes divides the predicted tokens of a domain, and the parts of a family add up to its "
        "gap: the share of the tokens of a class times the gap within it. Unlike the gaps at a common loss in domain, "
        "these are of the last evaluations, at which the two models may differ in domain as well. "
        f"{inside}A class that adds as much in domain as outside tells of a model that has learned less, not of one "
        "that carries over less. Losses are in nats per token; ± is half the width of an interval over documents, and "
        "over seeds where there are several."
    )
    return f"## What the gaps to {reference} are made of\n\n{about}\n\n" + "\n".join(texts)


def _of_model(records: Records, both: Sequence[tuple[ClassSums, ClassSums]], model: str, reference: str) -> str:
    known = both[0][0].domains
    domains = [domain for domain in (*records.against, *records.domains) if domain in known]
    header = ["domain", "class", "tokens", model, reference, "gap within", "of the gap"]
    totals = {domain: total(both, domain) for domain in domains}
    text = [f"### {model}\n", tables.markdown(header, [_row(d, part) for d, part in totals.items()], left=2)]
    for family in both[0][0].names:
        rows = [_row(domain, part) for domain in domains for part in parts(both, domain, family)]
        text += [f"{TITLES[family]}\n", tables.markdown(header, rows, left=2)]
    return "\n".join(text)


def _row(domain: str, part: Part) -> list[str]:
    width = part.contribution.half_width
    cell = f"{part.contribution.gap:+.3f}" + ("" if width is None else f" ± {width:.3f}")
    return [domain, part.name, f"{part.share:.1%}", f"{part.ours:.3f}", f"{part.theirs:.3f}", f"{part.gap:+.3f}", cell]
