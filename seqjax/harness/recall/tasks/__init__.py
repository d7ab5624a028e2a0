"""The tasks: sequences of ids with targets at some positions, drawn on the fly.

Six ask for something that came before, which selection over the whole sequence finds and a state must have kept:

    mqar            values of keys, many queries per sequence (Arora et al., "Zoology", arXiv 2312.04927, section 3.2)
    copy_selected   the tokens among noise, in order (selective copying: Gu and Dao, "Mamba", arXiv 2312.00752, 4.1.1)
    induction       the token after the last appearance of a marker (induction heads: "Mamba", 4.1.2)
    ngram           the token after an n-gram (Jelassi et al., "Repeat After Me", arXiv 2402.01032, n-gram lookup)
    position        the token at a position that is given as a number
    copy            the whole string (string copying: "Repeat After Me")

One asks for a state, which a fixed number of attention layers cannot keep for long sequences:

    s5              the product so far of permutations of five things (Merrill et al., "The Illusion of State in
                    State-Space Models", arXiv 2404.08819); those given are swaps of two

Every task is a frozen dataclass; `examples` draws sequences, and a test that is longer or holds more is the same
dataclass with other numbers.
"""

from seqjax.harness.recall.tasks.base import IGNORED, Examples, Task
from seqjax.harness.recall.tasks.copies import Copy, CopySelected
from seqjax.harness.recall.tasks.lookups import MQAR, Induction, Ngram, Position
from seqjax.harness.recall.tasks.tracking import S5

__all__ = ["IGNORED", "MQAR", "S5", "Copy", "CopySelected", "Examples", "Induction", "Ngram", "Position", "Task"]
