"""Losses at the end of a run by token class.

They decompose the gap between two models. Each family of classes divides all predicted tokens of the evaluation blocks.
A block has tokens x_0 .. x_T, of which x_1 .. x_T are predicted:

    repeat     let s < t be the last place with (x_{s-2}, x_{s-1}) = (x_{t-2}, x_{t-1}). x_t continues as before if
               x_s = x_t, and continues otherwise if not. Without such a place its bigram is new.
    distance   t - s for tokens that continue as before, in tokens
    frequency  occurrences of x_t per million training tokens (`Corpus.token_rates`); without rates, no such family
    position   t - 1, the number of tokens that the model has read before the last token

A model that copies the token after the bigram's last occurrence therefore predicts the tokens that continue as before.
A block may hold several documents, and a repeat may reach into an earlier document.

A workdir's `eval_losses/classes.npz` holds the sums at the end of the run: "step", the class names of each "FAMILY"
[classes], and per domain

    DOMAIN/documents, DOMAIN/blocks    int64 [documents]: document number and its number of evaluated blocks
    DOMAIN/FAMILY/losses               float64 [documents, classes], sums in nats
    DOMAIN/FAMILY/tokens               int64 [documents, classes], numbers of predicted tokens
"""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from seqjax.data import Corpus, EvalBlocks
from seqjax.files import replacing
from seqjax.reading import Arrays
from seqjax.training import identity
from seqjax.training.eval_losses import DIRECTORY, seal, verified_arrays
from seqjax.training.mirrors import readable
from seqjax.training.schedule import ENDS

CLASSES = "classes.npz"  # in DIRECTORY
# Lower bounds of the classes. Shipped mixers see windows of 256 and chunks of 128 directly.
DISTANCES = (1, 32, 128, 256, 1024)
RATES = (1, 10, 100, 1_000, 10_000)
POSITIONS = (32, 128, 512, 1024)
LONGER = (4_096, 16_384, 65_536)  # further bounds for distances and positions in longer blocks
FAMILIES = ("repeat", "distance", "frequency", "position")


@dataclasses.dataclass(frozen=True)
class DomainSums:
    """One domain's sums; `losses` and `tokens` are [documents, classes] by family."""

    documents: np.ndarray
    blocks: np.ndarray
    losses: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ClassSums:
    """A run's sums after `step` by domain, and the class names by family."""

    step: int
    names: dict[str, tuple[str, ...]]
    domains: dict[str, DomainSums]


def edges(first: tuple[int, ...], seq_len: int) -> tuple[int, ...]:
    """Return the lower bounds of distance or position classes in a block.

    `first` are the bounds for all block lengths.
    """
    return (*first, *(edge for edge in LONGER if edge < seq_len))


def names(seq_len: int) -> dict[str, tuple[str, ...]]:
    """Return the class names by family for blocks of `seq_len` predicted tokens."""

    def between(*begins: int) -> tuple[str, ...]:
        ranges = (f"{begin:,} to {end - 1:,}" for begin, end in itertools.pairwise(begins))
        return (*ranges, f"{begins[-1]:,} and more")

    return {
        "repeat": ("new bigram", "continues otherwise", "continues as before"),
        "distance": ("not as before", *between(*edges(DISTANCES, seq_len))),
        "frequency": ("below 1", "1 to 10", "10 to 100", "100 to 1,000", "1,000 to 10,000", "10,000 and more"),
        "position": between(0, *edges(POSITIONS, seq_len)),
    }


def last_repeat(tokens_T1: np.ndarray) -> np.ndarray:
    """Return t - s for each predicted token x_t of a block, int64 [T].

    0 means that the preceding bigram is new.
    """
    distances_T = np.zeros(len(tokens_T1) - 1, np.int64)
    keys = (tokens_T1[:-2].astype(np.uint64) << np.uint64(32)) | tokens_T1[1:-1].astype(np.uint64)  # of x_2 .. x_T
    order = np.argsort(keys, kind="stable")
    repeats = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
    distances_T[order[repeats + 1] + 1] = order[repeats + 1] - order[repeats]
    return distances_T


def classify(tokens_NT1: np.ndarray, rates: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return the class of each predicted token by family, int8 [N, T].

    Values are indices into `names`.

    `rates` holds occurrences per million training tokens for each id. Without it the family "frequency" is missing.
    """
    targets_NT = tokens_NT1[:, 1:]
    n_blocks, seq_len = targets_NT.shape
    distances_NT = np.stack([last_repeat(row) for row in tokens_NT1])
    previous_NT = np.arange(1, seq_len + 1) - distances_NT
    same_NT = np.take_along_axis(tokens_NT1, previous_NT, axis=1) == targets_NT
    as_before_NT = same_NT & (distances_NT > 0)
    class_ids = {
        "repeat": np.where(distances_NT == 0, 0, 1 + as_before_NT),
        "distance": np.searchsorted(edges(DISTANCES, seq_len), distances_NT * as_before_NT, side="right"),
    }
    if rates is not None:
        class_ids["frequency"] = np.searchsorted(RATES, rates, side="right")[targets_NT]
    position_classes = np.searchsorted(edges(POSITIONS, seq_len), np.arange(seq_len), side="right")
    class_ids["position"] = np.broadcast_to(position_classes, (n_blocks, seq_len))
    return {family: classes.astype(np.int8) for family, classes in class_ids.items()}


def sums(losses_NT: np.ndarray, blocks: EvalBlocks, rates: np.ndarray | None) -> DomainSums:
    """Return a domain's loss sums in nats for each document and class."""
    documents, block_documents = np.unique(blocks.documents, return_inverse=True)
    losses, tokens = {}, {}
    for family, classes_NT in classify(blocks.tokens, rates).items():
        shape = len(documents), len(names(losses_NT.shape[1])[family])
        cells = (block_documents[:, None] * shape[1] + classes_NT).ravel()
        size = shape[0] * shape[1]
        losses[family] = np.bincount(cells, losses_NT.ravel(), minlength=size).reshape(shape)
        tokens[family] = np.bincount(cells, minlength=size).reshape(shape)
    return DomainSums(documents, np.bincount(block_documents), losses, tokens)


def write_classes(
    workdir: Path, step: int, losses: Mapping[str, np.ndarray], blocks: Mapping[str, EvalBlocks], corpus: Corpus
) -> None:
    """Write the sums by class.

    `losses` are token losses in nats, "DOMAIN" -> float32 [n, T].
    """
    rates = corpus.token_rates()
    arrays: dict[str, Any] = {"step": np.array(step)}
    for domain, losses_NT in losses.items():
        domain_sums = sums(losses_NT, blocks[domain], rates)
        arrays |= {f"{domain}/documents": domain_sums.documents, f"{domain}/blocks": domain_sums.blocks}
        for family in domain_sums.losses:
            arrays[family] = np.array(names(losses_NT.shape[1])[family])
            arrays |= {
                f"{domain}/{family}/losses": domain_sums.losses[family],
                f"{domain}/{family}/tokens": domain_sums.tokens[family],
            }
    arrays |= seal(workdir, step, arrays)
    with replacing(workdir / DIRECTORY / CLASSES) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def read_classes(workdir: str | Path) -> ClassSums | None:
    """Return the sums at the end of a run; None if it has none.

    A run with several ends (`train.ends`) returns its last end with a file.
    """
    directory = readable(workdir)
    ends = [end for end in (directory / ENDS).glob("*") if end.name.isdigit()]
    paths = [end / DIRECTORY / CLASSES for end in (directory, *sorted(ends, key=lambda end: int(end.name)))]
    existing = [path for path in paths if path.exists()]
    if not existing:
        return None
    arrays = verified_arrays(existing[-1], identity.recorded(existing[-1].parents[1]))
    names = class_names(arrays)
    domains = {}
    for key in arrays:
        domain, _, field = key.rpartition("/")
        if field == "documents":
            documents = arrays.take(key, "iu", None)
            losses, tokens = (
                {
                    family: arrays.take(f"{domain}/{family}/{field}", kinds, len(documents), len(names[family]))
                    for family in names
                }
                for field, kinds in (("losses", "f"), ("tokens", "iu"))
            )
            domains[domain] = DomainSums(
                documents, arrays.take(f"{domain}/blocks", "iu", len(documents)), losses, tokens
            )
    return ClassSums(int(arrays.take("step", "iu")), names, domains)


def class_names(arrays: Arrays) -> dict[str, tuple[str, ...]]:
    """Return the class names by family in a file.

    Raises `UserError` if they are not texts.
    """
    return {family: tuple(map(str, arrays.take(family, "U", None))) for family in FAMILIES if family in arrays}
