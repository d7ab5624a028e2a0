"""Text corpora as blocks of T + 1 tokens; `open_corpus` opens one for training.

`builtin` needs no download. `blocks` reads the output of `seqjax prepare`. `stream` reads source shards directly
(`seqjax.data.sources`), and `tfds` does the same with tensorflow-datasets. All of them implement
`seqjax.data.corpus.Corpus`.

The names below are imported on first use. Settings and Grain import JAX, and the worker processes of `seqjax prepare`
do not need JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqjax.data.corpora import open_corpus, open_test_sets
    from seqjax.data.corpus import Corpus, EvalBlocks
    from seqjax.data.pipeline import TrainIterator
    from seqjax.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Corpus",
    "EvalBlocks",
    "Tokenizer",
    "TrainIterator",
    "load_tokenizer",
    "open_corpus",
    "open_test_sets",
]

_MEMBERS = {
    "Corpus": "seqjax.data.corpus",
    "EvalBlocks": "seqjax.data.corpus",
    "Tokenizer": "seqjax.data.tokenizer",
    "TrainIterator": "seqjax.data.pipeline",
    "load_tokenizer": "seqjax.data.tokenizer",
    "open_corpus": "seqjax.data.corpora",
    "open_test_sets": "seqjax.data.corpora",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name in _MEMBERS:
        return getattr(importlib.import_module(_MEMBERS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
