"""Tables of training steps, profiles and ops with the kernels for Hopper; results.py puts them into its pages.

The data are runs of `benchmarks.train_step` and `lab.benchmarks.profile_step` with the kernels before and now, and one
of `benchmarks.scans` with FlashQLA.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.harness import limits, plot
from benchmarks.harness.configs import configured, label
from lab.pages import all_mixers
from seqjax.pictures import COLORS
from seqjax.study.report.tables import markdown

STEPS, STEPS_BEFORE = "train_step", "train_step_before"
PROFILES, PROFILES_BEFORE = "profile_step_kernels", "profile_step_kernels_before"
OPS = "scans_rivals"
YARDSTICK = "transformer_pp"
TITLES = {"kda:model.mixer.heads=12,model.mixer.channel_gates=True,model.mlp.dim=1536": "`kda`, Gated DeltaNet-2"}
PARTS = ("mixer, forward", "mixer, again", "mixer, backward")
CHANGED = 1.05  # the picture names larger ratios; repeats of one config differ by up to 6%
PRODUCTS = re.compile("custom-call|cublas|gemm|nvjet")
FLOPS, BYTES = limits.DEVICES["H200"].flops, 4.1e12  # per second; a copy alone moves 4.3e12 bytes


def steps() -> str:
    """Return one row per config, fastest first."""
    now, before = (all_mixers.recorded(file)["results"] for file in (STEPS, STEPS_BEFORE))
    settings = all_mixers.recorded(STEPS)["settings"]
    tokens = settings["batch"] * settings["seq_len"]
    lines = []
    for name in _fastest_first(now):
        result, old = now[name], before[name]
        layers = configured(name, settings["size"], batch=0, seq_len=0).model.n_layers
        rate = result["tokens_per_s"]
        lines.append(
            [
                _title(name),
                f"{rate / 1e3:.0f}k",
                f"{old['tokens_per_s'] / 1e3:.0f}k",
                f"{rate / old['tokens_per_s']:.2f}",
                f"{rate / now[YARDSTICK]['tokens_per_s']:.2f}",
                f"{result['mfu']:.1%}",
                f"{result['compiled_bytes'] / 2**30:.1f}",
                f"{result['cache_bytes'] / 1e6:.2f}",
                f"{result['kernels'] / layers:,.0f}",
                f"{old['kernels'] / layers:,.0f}",
                f"{1e3 * tokens / rate:.1f}",
                f"{1e3 * tokens * result['flops_per_token'] / FLOPS:.0f}",
                f"{1e3 * result['moved_bytes'] / BYTES:.0f}",
            ]
        )
    header = ["config", "tokens/s", "before", "times", "of Transformer++", "MFU", "GiB", "state MB", "kernels a layer"]
    return markdown([*header, "before", "ms a step", "FLOPs", "bytes"], lines).rstrip()


def picture() -> Figure:
    """Return each config's training speed before (grey) and now, fastest first."""
    now, before = (all_mixers.recorded(file)["results"] for file in (STEPS, STEPS_BEFORE))
    names = _fastest_first(now)[::-1]
    made, (axes,) = plot.figure(7, 0.9 + 0.22 * len(names))
    for i, name in enumerate(names):
        new, old = (of[name]["tokens_per_s"] / 1e3 for of in (now, before))
        axes.plot([old, new], [i, i], color="0.75", linewidth=2, zorder=1)
        if new / old > CHANGED:
            text = f"{new / old:.2f} times"
            axes.annotate(text, (new, i), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)
    for of, color, about in ((before, "0.6", "before"), (now, COLORS[5], "now")):
        axes.scatter(
            [of[name]["tokens_per_s"] / 1e3 for name in names], range(len(names)), 22, color, label=about, zorder=2
        )
    axes.set_yticks(range(len(names)), [_title(name).replace("`", "") for name in names])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=9)
    axes.set_ylim(-0.7, len(names) - 0.3)
    axes.set_xlim(0, 1.12 * max(now[name]["tokens_per_s"] for name in names) / 1e3)
    axes.set_xlabel("thousand tokens per second", fontsize=9)
    axes.legend(fontsize=9, frameon=False, loc="lower left")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    made.suptitle("Training at 110M, 16 sequences of 2,048 tokens, NVIDIA H200", fontsize=9.5, x=0.01, ha="left")
    return made


def profiles(longest: int = 5) -> str:
    """Return the time of each model's mixers and their longest kernels, before and now."""
    of_both = [all_mixers.recorded(file)["results"] for file in (PROFILES_BEFORE, PROFILES)]
    lines = []
    for name in of_both[-1]:
        before, now = (results[name] for results in of_both)
        lines.append([f"{_title(name)}, the step", *(f"{of['step_ms']:.1f}" for of in (before, now)), "", ""])
        for part in PARTS:
            times = (f"{of['parts'].get(part, 0.0):.1f}" for of in (before, now))
            lines.append([part, *times, *(_longest(of["kernels"], part, longest) for of in (before, now))])
    return markdown(["", "before, ms", "now, ms", "longest kernels before", "now"], lines).rstrip()


def ops(longest: int = 6) -> str:
    """Return each op's times by implementation, and its longest kernels in forward and backward together."""
    results = all_mixers.recorded(OPS)["results"]
    lines = []
    for case, rows in results.items():
        for name, row in ((name, row) for name, row in rows.items() if name != "xla"):
            calls = (f"{row[key]:.2f}" for key in ("forward_ms", "training_ms"))
            in_kernels = (f"{row[key]:.3f}" for key in ("device_forward_ms", "device_training_ms"))
            kernels = [*row.get("by_kernel", {}).get("training", {}).items()][:longest]
            text = ", ".join(f"`{_short(kernel)}` {1e3 * ms:.0f}" for kernel, ms in kernels)
            lines.append([f"`{case}`, {name}", *in_kernels, *calls, f"{row['difference']:.1e}", text])
    header = ["op", "forward, ms in kernels", "with gradients", "forward, ms a call", "with gradients"]
    return markdown([*header, "difference¹", "longest kernels with gradients (us)"], lines).rstrip()


def _longest(kernels: Sequence[Mapping[str, Any]], part: str, longest: int) -> str:
    """Return the longest kernels of a part in ms; the matrix products of the layers count as one."""
    total: dict[str, float] = collections.defaultdict(float)
    for row in kernels:
        if row["part"] == part:
            name = "products" if PRODUCTS.match(row["kernel"]) else f"`{_short(row['kernel'])}`"
            total[name] += row["ms"]
    return ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(total.items(), key=lambda item: -item[1])[:longest])


def _short(kernel: str) -> str:
    return re.sub("(_mosaic_gpu)?_kernel$", "", kernel)


def _fastest_first(results: Mapping[str, Any]) -> list[str]:
    return sorted(results, key=lambda name: -results[name]["tokens_per_s"])


def _title(name: str) -> str:
    if name in TITLES:
        return TITLES[name]
    stem, *words = label(name).split(" ")
    return ", ".join([f"`{stem}`", *words])
