"""PaTH attention: positions are products of matrices that the tokens between key and query choose (arXiv 2505.16381).

    seqjax train --config=path
    seqjax train --config=path:110m
    seqjax train --config=path:110m,model.mixer.forget_gate=True

The last one is the paper's PaTH-FoX, with the forget gates of FoX.

Results: lab/results/all_mixers.md
"""

from seqjax import presets


def get_config(arg: str = ""):
    """Return the config; `arg` is `SIZE[,REGIME][,key=value ...]` (seqjax/config/presets.py)."""
    return presets.get_config(
        arg,
        name="path",
        mixer={"name": "path"},
        settings={
            "model.norm_eps": 1e-6,
            "model.mlp.kind": "swiglu",
            "model.mlp.rescale_init": False,
            # The backward pass of a layer holds its queries at every chunk: of one layer at a time.
            "model.scan_layers": True,
        },
    )
