"""Split the loss difference of two models by token class (`seqjax.training.eval_losses`).

For token class k in a domain, S_k is the model's summed loss, S'_k the reference's after the same tokens, n_k the token
count, and N the domain's token count. A family is a way to sort all tokens into classes.

    difference = sum_k (S_k - S'_k) / N = sum_k (n_k / N) * (S_k - S'_k) / n_k

Each class in a family thus contributes its token share times its mean difference. Confidence intervals cover documents
and seeds; both are samples.

A study keeps the sums in `classes.npz`, next to `blocks.npz`. The arrays are "runs" and "steps" [runs], the class names
of each "FAMILY" [classes], and per domain "DOMAIN/blocks" [groups], "DOMAIN/FAMILY/tokens" [groups, classes] and
"DOMAIN/FAMILY/losses" [runs, groups, classes]. A group is one document. With more than `MAX_GROUPS` documents, a group
has several consecutive documents; "DOMAIN/blocks" counts the blocks of each group.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqjax.errors import UserError
from seqjax.files import replacing
from seqjax.reading import read_arrays
from seqjax.study.gaps import statistics
from seqjax.study.gaps.statistics import Estimate, Part
from seqjax.study.runs.files import FIX
from seqjax.training import token_classes
from seqjax.training.token_classes import ClassSums, DomainSums

FILE = "classes.npz"
MAX_GROUPS = 256  # document groups per domain: the file is committed with the results, so it must stay small
REPEAT = "repeat"  # family; its last class holds the tokens that continue an earlier bigram


class ClassPart(NamedTuple):
    """Hold a token class: token share, mean losses (nats per token), contribution.

    `difference` is model minus reference within the class. `contribution` is `share * difference`, with its confidence
    interval.
    """

    name: str
    share: float
    model_loss: float
    reference_loss: float
    difference: float
    contribution: Estimate


def collect(workdirs: Mapping[str, str | Path]) -> tuple[dict[str, ClassSums], list[str]]:
    """Return class sums by run label, and messages about runs without sums.

    Raises `UserError` if two runs have sums over different tokens.
    """
    by_label = {label: token_classes.read_classes(workdir) for label, workdir in workdirs.items()}
    known = {label: sums for label, sums in by_label.items() if sums is not None}
    without = [label for label in by_label if label not in known]
    _require_same(known)
    return known, [f"No losses by class of token (eval.classes): {', '.join(without)}."] if without else []


def parts(
    model_sums: Sequence[ClassSums], reference_sums: Sequence[ClassSums], domain: str, family: str
) -> list[ClassPart]:
    """Return a family's non-empty classes, in order.

    Each side has one or more seeds. Raises `UserError` if the sums cover different tokens.
    """
    _require_same({f"run {i}": sums for i, sums in enumerate((*model_sums, *reference_sums))})
    first = model_sums[0].domains[domain]
    tokens_DC, blocks_D = first.tokens[family], first.blocks
    sides = [np.stack([sums.domains[domain].losses[family] for sums in side]) for side in (model_sums, reference_sums)]
    estimates = _estimates(sides[0], sides[1], tokens_DC, blocks_D)
    n_tokens_C = tokens_DC.sum(0)
    shares_C = n_tokens_C / n_tokens_C.sum()
    class_parts = []
    for k, name in enumerate(model_sums[0].names[family]):
        if n := n_tokens_C[k]:
            one, other = (float(x[..., k].sum(1).mean() / n) for x in sides)
            class_parts.append(ClassPart(name, float(shares_C[k]), one, other, one - other, estimates[k]))
    return class_parts


def total(model_sums: Sequence[ClassSums], reference_sums: Sequence[ClassSums], domain: str) -> ClassPart:
    """Return a domain's tokens as a single class; its contribution is the difference."""
    family = next(iter(model_sums[0].names))
    model_total, reference_total = (
        [_one_class(sums, domain, family) for sums in side] for side in (model_sums, reference_sums)
    )
    return parts(model_total, reference_total, domain, "all")[0]


def copy_share(
    model_sums: Sequence[ClassSums], reference_sums: Sequence[ClassSums], *, domains: Sequence[str]
) -> float | None:
    """Return the share of the mean difference that comes from copied bigrams.

    A copied bigram is a token that continues an earlier bigram. The mean is over `domains`. The result is None if a run
    lacks these sums or the difference is zero.
    """
    if any(REPEAT not in sums.names for sums in (*model_sums, *reference_sums)):
        return None
    copied = total = 0.0
    for domain in domains:
        domain_parts = parts(model_sums, reference_sums, domain, REPEAT)
        total += sum(part.contribution.value for part in domain_parts)
        copied += sum(part.contribution.value for part in domain_parts if part.name == model_sums[0].names[REPEAT][-1])
    return copied / total if total else None


def _one_class(sums: ClassSums, domain: str, family: str) -> ClassSums:
    domain_sums = sums.domains[domain]
    losses, tokens = ({"all": x[family].sum(1, keepdims=True)} for x in (domain_sums.losses, domain_sums.tokens))
    return ClassSums(
        sums.step, {"all": ("all",)}, {domain: DomainSums(domain_sums.documents, domain_sums.blocks, losses, tokens)}
    )


def _estimates(
    model_SDC: np.ndarray, reference_SDC: np.ndarray, tokens_DC: np.ndarray, blocks_D: np.ndarray
) -> list[Estimate]:
    """Return each class's contribution to the difference.

    The inputs are summed losses per seed and document. The mean over documents is a ratio estimate. With document sum
    G_d and token share m_d, its variance is D / (D - 1) * sum_d (G_d - mean * m_d)^2.
    """
    n_tokens = tokens_DC.sum()
    gaps_DC = (model_SDC.mean(0) - reference_SDC.mean(0)) / n_tokens
    means_C, n = gaps_DC.sum(0), len(blocks_D)
    shares_D = blocks_D / blocks_D.sum()
    residuals_DC = gaps_DC - means_C * shares_D[:, None]
    variances_C = n / (n - 1) * (residuals_DC**2).sum(0) if n > 1 else np.full(len(means_C), np.nan)
    estimates = []
    for k, (mean, variance) in enumerate(zip(means_C, variances_C, strict=True)):
        pieces = [Part(float(variance), max(n - 1, 1))]
        for side in (model_SDC, reference_SDC):
            if len(side) > 1:
                seed_means = side[..., k].sum(1) / n_tokens
                pieces.append(Part(float(np.var(seed_means, ddof=1)) / len(side), len(side) - 1))
        combined = statistics.combined(pieces)
        known = np.isfinite(combined.variance)
        estimates.append(Estimate(float(mean), combined.variance**0.5 if known else None, combined.freedom))
    return estimates


def _in_groups(sums: ClassSums) -> ClassSums:
    """Return the sums with at most `MAX_GROUPS` document groups per domain."""
    domains = {}
    for domain, domain_sums in sums.domains.items():
        n = len(domain_sums.blocks)
        begins = np.unique(np.arange(min(n, MAX_GROUPS)) * n // min(n, MAX_GROUPS))
        losses = {family: np.add.reduceat(values, begins) for family, values in domain_sums.losses.items()}
        tokens = {family: np.add.reduceat(values, begins) for family, values in domain_sums.tokens.items()}
        domains[domain] = DomainSums(
            np.arange(len(begins)), np.add.reduceat(domain_sums.blocks, begins), losses, tokens
        )
    return dataclasses.replace(sums, domains=domains)


def _require_same(by_label: Mapping[str, ClassSums]) -> None:
    """Raise `UserError` unless all runs have the same tokens in the same classes."""
    if not by_label:
        return
    (first, sums), *others = by_label.items()
    for label, other in others:
        same = other.names == sums.names and other.domains.keys() == sums.domains.keys()
        for domain, domain_sums in sums.domains.items() if same else ():
            other_sums = other.domains[domain]
            same &= np.array_equal(domain_sums.blocks, other_sums.blocks)
            same &= all(
                np.array_equal(tokens, other_sums.tokens[family]) for family, tokens in domain_sums.tokens.items()
            )
        if not same:
            raise UserError(
                f"{label} and {first} have different token classes: compare runs with the same data, eval.tokens and "
                "eval.seed, and the same seqjax version."
            )


# ----------------------------------------------------------------------------------------------------------- files
def write(out: Path, by_label: Mapping[str, ClassSums]) -> None:
    """Write `classes.npz`, or remove it if there are no sums.

    Raises `UserError` if the sums cover different tokens.
    """
    if not by_label:
        (out / FILE).unlink(missing_ok=True)
        return
    by_label = {label: _in_groups(sums) for label, sums in by_label.items()}
    _require_same(by_label)
    first = next(iter(by_label.values()))
    arrays: dict[str, Any] = {
        "runs": np.array(list(by_label)),
        "steps": np.array([sums.step for sums in by_label.values()]),
    }
    arrays |= {family: np.array(names) for family, names in first.names.items()}
    for domain, domain_sums in first.domains.items():
        arrays[f"{domain}/blocks"] = domain_sums.blocks
        for family in first.names:
            losses_RDC = np.stack([sums.domains[domain].losses[family] for sums in by_label.values()])
            arrays[f"{domain}/{family}/tokens"] = domain_sums.tokens[family]
            arrays[f"{domain}/{family}/losses"] = losses_RDC.astype(np.float32)
    with replacing(out / FILE) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read(directory: str | Path) -> dict[str, ClassSums]:
    """Return the sums from `classes.npz` by run label; {} without the file.

    Documents are numbered by group.
    """
    path = Path(directory) / FILE
    if not path.is_file():
        return {}
    arrays = read_arrays(path, fix=FIX)
    families = token_classes.class_names(arrays)
    domains = [key.removesuffix("/blocks") for key in arrays if key.endswith("/blocks")]
    labels = arrays.take("runs", "U", None)
    by_label = {}
    for i, (label, step) in enumerate(zip(labels, arrays.take("steps", "iu", len(labels)), strict=True)):
        domain_sums = {}
        for domain in domains:
            blocks = arrays.take(f"{domain}/blocks", "iu", None)
            tokens, losses = {}, {}
            for family, names in families.items():
                shape = len(blocks), len(names)
                tokens[family] = arrays.take(f"{domain}/{family}/tokens", "iu", *shape)
                losses_RDC = arrays.take(f"{domain}/{family}/losses", "f", len(labels), *shape)
                losses[family] = losses_RDC[i].astype(np.float64)
            domain_sums[domain] = DomainSums(np.arange(len(blocks)), blocks, losses, tokens)
        by_label[str(label)] = ClassSums(int(step), families, domain_sums)
    return by_label
