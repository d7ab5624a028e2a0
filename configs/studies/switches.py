"""Five models of trunks_110m, each with one recurrent block part changed.

    seqjax study --study=switches --out=runs/switches --jobs=2

The parts are Canon's convolutions, token shift and the output gate (docs/mixers.md). Settings and models without a
change are as in `trunks_110m`. Each model uses its best learning rate there.

Results: lab/results/switches
"""

from seqjax import presets

BLOCK = {"Canon A": "model.canon=A", "token shift": "model.token_shift=True"}
GATE = BLOCK | {"Canon ACD": "model.canon=ACD", "gate": "model.mixer.gate=True"}
WITHOUT = BLOCK | {"no conv": "model.mixer.conv=False", "no gate": "model.mixer.gate=False"}
MODELS = {
    "Transformer++, QK norm": GATE,  # conv is not listed: with it this is the second reference
    "W=256, QK norm": GATE | {"conv": "model.mixer.conv=True"},
    "Top-1 Chunk, exact": GATE | {"conv": "model.mixer.conv=True"},
    "Gated DeltaNet": WITHOUT | {"Canon ACD": "model.canon=ACD"},
    "Mamba-2": WITHOUT,
}
ENDS = (0.8, 1.0)


def get_study():
    """Return the title, references, domains and runs."""
    trunks = presets.load("studies/trunks_110m")
    title = "110M parameters, limited regime: parts of the block"
    return trunks.variants("switches", MODELS, title=title, ends=ENDS, beside=(trunks.SAME_BLOCK,))
