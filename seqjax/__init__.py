"""Does a sequence mixer cost base capabilities, and how fast is it?

Method: arXiv 2505.18522.

    m = seqjax.load("runs/x")                                       a trained model: m.generate(text), m.loss(text)
    mixer = seqjax.mixers.Mamba2(dim=256, rngs=nnx.Rngs(0))         a standalone mixer
    seqjax.judge("my_mixer.py:110m")                                its capability cost and speed: docs/judge.md
    seqjax.testing.check_mixer(MyMixer)                             contract tests for your mixer
    seqjax.presets                                                  imported by config files

These names are imported on first use. `import seqjax` is therefore cheap and does not start JAX. The first use adds a
flag for XLA's CPU compiler (kernels_pallas/cpu_compiler.py) if JAX has not started.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqjax import mixers, ops, testing
    from seqjax.config import Config, presets
    from seqjax.models import Model
    from seqjax.pretrained import load
    from seqjax.study.judge import judge

__version__ = "0.1.0"
__all__ = ["Config", "Model", "__version__", "judge", "load", "mixers", "ops", "presets", "testing"]

_MODULES = {
    "mixers": "seqjax.mixers",
    "ops": "seqjax.ops",
    "presets": "seqjax.config.presets",
    "testing": "seqjax.testing",
}
_MEMBERS = {
    "Config": "seqjax.config",
    "Model": "seqjax.models",
    "judge": "seqjax.study.judge",
    "load": "seqjax.pretrained",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES and name not in _MEMBERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cpu_compiler = importlib.import_module("kernels_pallas.cpu_compiler")
    if not cpu_compiler.has_started():  # otherwise functions that compute will warn
        cpu_compiler.use_safe_fusions()
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    return getattr(importlib.import_module(_MEMBERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
