"""Test sets: directories of prepared blocks that a run is evaluated on and never trains on (`config.eval.path`).

A domain of a test set is named `SET.DOMAIN`, where SET is the name of its directory. All of its blocks may be chosen,
those of its train split too. Test sets do not enter the recorded means, so that these stay comparable between runs
with other test sets.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from seqjax import urls
from seqjax.data.corpus import Corpus, EvalBlocks
from seqjax.data.pipeline import TrainIterator
from seqjax.errors import UserError


class TestedCorpus(Corpus):
    """A corpus with test sets: trained on and evaluated as without them, then evaluated on every domain of the sets.

    Without a corpus there are the test sets alone, and nothing to train on.
    """

    __test__ = False  # for pytest, which takes a class of such a name for one with tests

    def __init__(self, corpus: Corpus | None, sets: Mapping[str, Corpus]):
        own = corpus.eval_domains if corpus is not None else ()
        shares = corpus.natural_shares if corpus is not None else {}
        corpus = corpus if corpus is not None else next(iter(sets.values()))
        self._corpus = corpus
        self._of_set = {f"{name}.{domain}": (s, domain) for name, s in sets.items() for domain in s.eval_domains}
        super().__init__(
            name=corpus.name,
            tokenizer=corpus.tokenizer,
            seq_len=corpus.seq_len,
            train_domains=corpus.train_domains,
            eval_domains=(*own, *self._of_set),
            weights=corpus.weights,
            manifest_hash=corpus.manifest_hash,
            natural_shares=shares,
            tokens=corpus.tokens,
            note=corpus.note,
            test_sets={name: s.manifest_hash for name, s in sets.items()},
        )

    def train_iterator(self, *, batch_size: int, process_index: int = 0, process_count: int = 1) -> TrainIterator:
        """Return the iterator of the corpus."""
        return self._corpus.train_iterator(
            batch_size=batch_size, process_index=process_index, process_count=process_count
        )

    def eval_blocks(self, domain: str, *, count: int, seed: int = 0) -> EvalBlocks:
        """Return the blocks of a domain of the corpus, or of `SET.DOMAIN`."""
        corpus, domain = self._of_set.get(domain, (self._corpus, domain))
        return corpus.eval_blocks(domain, count=count, seed=seed)

    def train_sample(self, domain: str, *, count: int) -> np.ndarray:
        """Return at most `count` training blocks of a domain, ids [n, T+1]."""
        return self._corpus.train_sample(domain, count=count)

    def token_rates(self) -> np.ndarray | None:
        """Return the rates of the corpus, which alone is trained on."""
        return self._corpus.token_rates()


def set_names(paths: Sequence[str]) -> dict[str, str]:
    """Return the directory or URL of every test set by its name; raise `UserError` for two of one name."""
    named: dict[str, str] = {}
    for path in map(str, paths):
        name = urls.url_of(path).rpartition("/")[2] or Path(path).resolve().name
        if name in named:
            raise UserError(
                f"config.eval.path: {named[name]} and {path} are both named {name!r}, and a domain is named after its "
                "set; rename one of the directories."
            )
        named[name] = path
    return named
