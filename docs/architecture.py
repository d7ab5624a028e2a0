"""Draw docs/architecture.png: `python docs/architecture.py`."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image

INK, SOFT, LINE = "#1f2933", "#5b6773", "#8a97a5"
DATA, MODEL, KERNEL, RUN, FILE = "#dcebf7", "#fdebd3", "#f7dcdc", "#e0f0e0", "#eef0f3"

figure = Figure(figsize=(12.4, 8.9))
axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 124), ylim=(0, 89))
axes.axis("off")


def box(x, y, width, height, color, title, lines=(), *, mono=(), size=9.0):
    """A rounded box with a title, plain lines, and lines in a fixed width, centred."""
    style = "round,pad=0,rounding_size=0.9"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=color, ec=LINE, lw=0.9))
    rows = [(title, INK, "bold", "sans-serif", size)]
    rows += [(text, SOFT, "normal", "sans-serif", size - 1.5) for text in lines]
    rows += [(text, INK, "normal", "monospace", size - 1.9) for text in mono]
    top = y + height / 2 + (len(rows) - 1) * 1.02
    for i, (text, ink, weight, family, points) in enumerate(rows):
        style = {"color": ink, "weight": weight, "family": family, "size": points}
        axes.text(x + width / 2, top - 2.04 * i, text, ha="center", va="center", **style)


def arrow(start, end, *, bend=0.0):
    """An arrow between two points."""
    curve = f"arc3,rad={bend}"
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "color": LINE, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=curve, **style))


def heading(x, y, text):
    """The title of a panel."""
    axes.text(x, y, text, size=12.5, weight="bold", color=INK, va="center")


def note(x, y, text, *, ha="center"):
    """A small remark."""
    axes.text(x, y, text, size=7.6, color=SOFT, ha=ha, va="center", linespacing=1.35)


# ------------------------------------------------------------------------------------- a batch, from disk to loss
heading(3, 85.6, "A batch, from disk to loss")
PATH = [
    (DATA, "text", ("SlimPajama shards", "or built-in texts"), ("*.jsonl.zst",)),
    (DATA, "token blocks", ("tokenize, pack, once", "data/prepare"), ("uint16 [T+1]",)),
    (DATA, "batch", ("shuffle, mix domains", "data/pipeline"), ("int32 [B, T+1]",)),
    (MODEL, "embed", ("on the mesh (sharding)", "models/embedder"), ("x_BTD",)),
    (MODEL, "L layers", ("norm, mixer, norm, MLP", "models, mixers, nn"), ("x_BTD",)),
    (MODEL, "loss", ("norm, head in chunks", "ops/cross_entropy"), ("nats per token",)),
    (RUN, "update", ("gradient, Adam", "training/step"), ("params, moments",)),
]
WIDTH, GAP, TOP = 14.6, 2.6, 69.5
for i, (color, title, lines, mono) in enumerate(PATH):
    x = 3 + i * (WIDTH + GAP)
    box(x, TOP, WIDTH, 12.2, color, title, lines, mono=mono)
    if i:
        arrow((x - GAP + 0.2, TOP + 6.1), (x - 0.2, TOP + 6.1))


def middle(i):
    """The centre of the box `i` of the path."""
    return 3 + i * (WIDTH + GAP) + WIDTH / 2


# what the mixer calls
box(middle(3) - 7.3, 54.2, 14.6, 8.6, MODEL, "array ops", ("no parameters",), mono=("seqjax/ops",))
box(middle(4) - 7.3, 54.2, 14.6, 8.6, KERNEL, "kernel op", ("picks a backend",), mono=("kernels_pallas/<op>",))
box(middle(5) - 7.3, 54.2, 14.6, 8.6, KERNEL, "backend", ("forward and backward",), mono=("triton|pallas|xla",))
arrow((middle(4) - 2, TOP - 0.2), (middle(3) + 2.5, 63.0), bend=-0.12)
arrow((middle(3) + 7.5, 58.5), (middle(4) - 7.5, 58.5))
arrow((middle(4) + 7.5, 58.5), (middle(5) - 7.5, 58.5))
note(middle(4) - 1.2, 66.2, "the mixer calls ops", ha="left")

# what is kept
box(3, 54.2, 2 * WIDTH + GAP, 8.6, DATA, "evaluation blocks", ("the same at every evaluation, spread",))
note(middle(0) + WIDTH / 2 + GAP / 2, 55.9, "over all documents of every domain")
arrow((middle(1), TOP - 0.2), (middle(1), 63.0))
box(middle(6) - 7.3, 54.2, 14.6, 8.6, FILE, "workdir", ("checkpoints, metrics,", "eval_losses, report"))
arrow((middle(6), TOP - 0.2), (middle(6), 63.0))
axes.plot([middle(0), middle(0), middle(6)], [54.0, 51.6, 51.6], color=LINE, lw=1.2, ls="--")
arrow((middle(6), 51.6), (middle(6), 54.0))
note(middle(3), 50.2, "evaluate: the loss of every block and the means per domain, every config.eval.every tokens")

# --------------------------------------------------------------------------------------------- a mixer author's day
heading(3, 45.2, "A mixer author's day")
DAY = [
    (MODEL, "Write the mixer", "seqjax/mixers/ema.py", "class Ema(base.Mixer): __call__, init_cache, step"),
    (MODEL, "Name it in a config", "configs/ema.py", "only what differs from a size and a Transformer++"),
    (RUN, "Check the contract", "pytest tests/mixers/test_contract.py -k ema", "causal, step = parallel, sharding"),
    (RUN, "Train for minutes", "seqjax train --config=ema", "a laptop; report.md with every domain"),
    (RUN, "Train for real", "seqjax train --config=ema:110m", "a GPU; stop and resume at any time"),
    (FILE, "Judge", "seqjax judge --config=ema", "its cost out of domain beside attention, and its speed"),
]
for i, (color, title, command, what) in enumerate(DAY):
    y = 37.0 - 6.9 * i
    style = "round,pad=0,rounding_size=0.9"
    axes.add_patch(FancyBboxPatch((3, y), 66, 5.4, boxstyle=style, fc=color, ec=LINE, lw=0.9))
    axes.text(5.3, y + 2.7, str(i + 1), size=13, weight="bold", color=LINE, ha="center", va="center")
    axes.text(8, y + 2.7, title, size=9.4, weight="bold", color=INK, va="center")
    axes.text(27, y + 3.75, command, size=7.9, family="monospace", color=INK, va="center")
    axes.text(27, y + 1.6, what, size=7.9, color=SOFT, va="center")
    if i:
        arrow((36, y + 6.7), (36, y + 5.5))

# --------------------------------------------------------------------------------------------------- packages, imports
heading(76, 45.2, "Packages; imports run downwards")
PACKAGES = [
    (RUN, "commands"),
    (RUN, "evals   study"),
    (RUN, "testing   pretrained   convert"),
    (RUN, "training"),
    (RUN, "decoding"),
    (MODEL, "models"),
    (FILE, "config"),
    (MODEL, "mixers"),
    (MODEL, "ops   nn"),
    (FILE, "sharding"),
    (FILE, "types  errors  files  store"),
]
for i, (color, name) in enumerate(PACKAGES):
    y = 39.6 - 3.72 * i
    style = "round,pad=0,rounding_size=0.6"
    width = 13.6 if name == "models" else 28
    axes.add_patch(FancyBboxPatch((76, y), width, 2.7, boxstyle=style, fc=color, ec=LINE, lw=0.9))
    axes.text(76 + width / 2, y + 1.3, name, size=8.6, family="monospace", color=INK, ha="center", va="center")
    if name == "models":
        axes.add_patch(FancyBboxPatch((90.4, y), 13.6, 2.7, boxstyle=style, fc=DATA, ec=LINE, lw=0.9))
        axes.text(97.2, y + 1.3, "data", size=8.6, family="monospace", color=INK, ha="center", va="center")
    if name == "ops   nn":
        box(108, y - 2.6, 13.5, 8.6, KERNEL, "kernels_pallas", ("a package apart,", "knows no seqjax"), size=8.6)
        arrow((104.2, y + 1.3), (107.8, y + 1.3))
    if name == "commands":
        box(108, y - 4.9, 13.5, 7.6, FILE, "lab", ("not in the wheel,", "nothing imports it"), size=8.6)
        arrow((107.8, y + 1.3), (104.2, y + 1.3))
    if name == "mixers":
        arrow((104.2, y + 1.3), (107.8, y + 1.3))
arrow((73.6, 42.6), (73.6, 2.4))
figure.patch.set_facecolor("white")

if __name__ == "__main__":
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130)
    Image.open(picture).convert("RGB").quantize(64).save(Path(__file__).with_suffix(".png"), optimize=True)
