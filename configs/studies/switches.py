"""Five models of trunks_110m with, one at a time, the parts of a block that recurrent models have, and without theirs.

    seqjax study --study=switches --out=runs/switches --jobs=2

docs/mixers.md has the parts: Canon's convolutions, token shift, the output gate. The settings and the models without a
change are those of trunks_110m, and each model has its best rate there.

Results: lab/results/switches
"""

from seqjax import presets

BLOCK = {"Canon A": "model.canon=A", "token shift": "model.token_shift=True"}
GATE = BLOCK | {"Canon ACD": "model.canon=ACD", "gate": "model.mixer.gate=True"}
WITHOUT = BLOCK | {"no conv": "model.mixer.conv=False", "no gate": "model.mixer.gate=False"}
MODELS = {
    "Transformer++, QK norm": GATE,  # with conv it is the second reference
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
