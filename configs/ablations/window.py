"""Transformer++ with a sliding attention window.

The argument sets the window: 32, 64, 128, 256 (default), 512, 1024 ... or full. A window includes the query's position.
arXiv 2505.18522, section 3, figure 3(d); the study is configs/studies/figure3d.py.

    seqjax train --config=ablations/window
    seqjax train --config=ablations/window:64,110m

Results: lab/results/mixers.md (demo)
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config for `[WINDOW,]SIZE[,REGIME][,key=value ...]`."""
    first, _, rest = arg.partition(",")
    has_window = first.strip() == "full" or first.strip().isdecimal()
    window = first.strip() if has_window else "256"
    return presets.get_config(
        rest if has_window else arg,
        name=f"window_{window}" if has_window else "window",
        base="transformer_pp",
        settings={"model.mixer.window": None if window == "full" else int(window)},
    )
