"""Transformer++ over a window, which the argument names: 32, 64, 128, 256 (default), 512, 1024 ... or full.

python -m seqjax.main --config=configs/ablations/window.py:64,110m      a window counts the query's own position

Not run; configs/studies/window.py is the sweep.
"""

from configs import common
from configs.transformer_pp import MIXER

SWEEP = ("32", "64", "128", "256", "512", "1024", "full")  # arXiv 2505.18522, section 3, at T = 2,048


def get_config(arg: str = ""):
    """`[WINDOW,]` and what configs/common.py takes."""
    first, _, rest = arg.partition(",")
    named = first.strip() == "full" or first.strip().isdecimal()
    window = first.strip() if named else "256"
    mixer = MIXER | {"window": 0 if window == "full" else int(window)}
    return common.get_config(rest if named else arg, name=f"window_{window}" if named else "window", mixer=mixer)
