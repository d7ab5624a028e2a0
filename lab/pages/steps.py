"""Tables of training steps and profiles, before and after a change of kernels; results.py puts them into its pages.

The data are one run of `benchmarks.train_step` for all configs, and two of `lab.benchmarks.profile_step`.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.configs import configured, label
from lab.pages import all_mixers
from seqjax.study.report.tables import markdown

STEPS, STEPS_BEFORE = "train_step_all", "train_step_all_before"
PROFILES, PROFILES_BEFORE = "profile_step_kernels", "profile_step_kernels_before"
YARDSTICK = "transformer_pp"
FLOPS, BYTES = 790e12, 4.1e12  # per second, as measured on an H200


def steps() -> str:
    """Return one row per config, fastest first; configs that did not run are left out."""
    now, before = (_measured(file) for file in (STEPS, STEPS_BEFORE))
    settings = all_mixers.recorded(STEPS)["settings"]
    tokens = settings["batch"] * settings["seq_len"]
    lines = []
    for name in sorted(now, key=lambda name: -now[name]["tokens_per_s"]):
        result, old = now[name], before.get(name)
        layers = configured(name, settings["size"], batch=0, seq_len=0).model.n_layers
        rate = result["tokens_per_s"]
        lines.append(
            [
                _title(name),
                f"{rate / 1e3:.0f}k",
                f"{rate / now[YARDSTICK]['tokens_per_s']:.2f}",
                f"{old['tokens_per_s'] / 1e3:.0f}k" if old else "",
                f"{rate / old['tokens_per_s']:.2f}" if old else "",
                f"{result['mfu']:.1%}",
                f"{result['compiled_bytes'] / 2**30:.1f}",
                f"{result['cache_bytes'] / 1e6:.2f}",
                f"{result['kernels'] / layers:,.0f}",
                f"{old['kernels'] / layers:,.0f}" if old else "",
                f"{1e3 * tokens / rate:.1f}",
                f"{1e3 * tokens * result['flops_per_token'] / FLOPS:.0f}",
                f"{1e3 * result['moved_bytes'] / BYTES:.0f}",
            ]
        )
    header = ["config", "tokens/s", "of Transformer++", "before", "times", "MFU", "GiB", "state MB", "kernels a layer"]
    return markdown([*header, "before", "ms a step", "FLOPs", "bytes"], lines).rstrip()


def profiles(longest: int = 6) -> str:
    """Return each model's time by part and its longest kernels, before and after."""
    now, before = (all_mixers.recorded(file)["results"] for file in (PROFILES, PROFILES_BEFORE))
    lines = []
    for name, result in now.items():
        old = before[name]
        lines.append([f"**{_title(name)}**, the step", f"{old['step_ms']:.1f}", f"{result['step_ms']:.1f}", ""])
        for part in sorted({*result["parts"], *old["parts"]}, key=lambda part: -old["parts"].get(part, 0.0)):
            values = (f"{of.get(part, 0.0):.1f}" for of in (old["parts"], result["parts"]))
            lines.append([part, *values, _longest(result, part, longest)])
    return markdown(["part", "before, ms", "now, ms", "longest kernels now (ms)"], lines).rstrip()


def _longest(result: Mapping[str, Any], part: str, longest: int) -> str:
    kernels = [row for row in result["kernels"] if row["part"] == part][:longest]
    return ", ".join(f"`{row['kernel']}` {row['ms']:.1f}" for row in kernels)


def _measured(file: str) -> dict[str, Any]:
    return {name: result for name, result in all_mixers.recorded(file)["results"].items() if "error" not in result}


def _title(name: str) -> str:
    stem, *words = label(name).split(" ")
    return ", ".join([f"`{stem}`", *words])
