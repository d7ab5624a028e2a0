"""Judge a mixer: does it cost base capabilities, and how fast is it?"""

from seqjax.study.judge.page import Judgement
from seqjax.study.judge.run import judge

__all__ = ["Judgement", "judge"]
