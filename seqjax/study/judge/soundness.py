"""Check the mixers of a config with the contract tests (seqjax/testing.py) before anything is trained."""

import itertools
import os
import subprocess
import sys
from typing import Any

from seqjax import mixers, testing
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.study.judge.plan import Plan, read
from seqjax.terminal import tell

# Not of whether the mixer is a sound one: FLOPs in loops that XLA cannot count, and a chunk that is part of the model.
UNCHECKED = ("flops", "chunk_size")
LENGTHS, SHORT = (
    ("chunk_size", "window"),
    8,
)  # settings that are numbers of tokens, and what a check takes for a long one


# In another process, on a CPU, so that this process takes no GPU memory from the runs.
PASSED = "all checks passed\n"  # status 0 is also that of code that calls `sys.exit`
CHECK = "import sys; from seqjax.study.judge import soundness; soundness.check(sys.argv[1])"


def require_sound(plan: Plan) -> None:
    """Raise `UserError` unless every mixer of the config passes the contract tests (seqjax/testing.py)."""
    tell(f"Checking the mixer of {plan.model}: causality, decoding, gradients.")
    sys.stdout.flush()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, plan.text], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode or not done.stdout.endswith(PASSED):
        ended = f"its code ended the process with status {done.returncode}"
        said = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2] or ended).splitlines()
        raise UserError(f"The mixer cannot be judged before it passes seqjax.testing.check_mixer: {' '.join(said)}")


def check(text: str) -> None:
    """Run the contract tests on the mixers of a config; write `PASSED`, or what fails with exit status 1, to stdout."""
    for mixer in read(text).model.mixers:
        try:
            checked_mixer(mixer)
        except AssertionError as error:
            sys.stdout.write(str(error))
            sys.exit(1)
    sys.stdout.write(PASSED)


def checked_mixer(mixer: Any) -> list[str]:
    """Run the contract tests on a mixer with the settings of a config, and return the names of those that ran.

    The tests have small models, and most have sequences of 23 tokens: a longer chunk or window is a short one there,
    and settings that do not fit a small model are left at their defaults.
    """
    cls: type[base.Mixer] = mixers.load(mixer.name)
    settings = {key: value for key, value in vars(mixer).items() if key not in ("name", "heads", "rope_base")}
    known = mixers.settings_class(mixer.name)
    defaults = {key: getattr(known, key, None) for key in settings}
    given = {key: value for key, value in settings.items() if value != defaults[key]}
    given |= {key: SHORT for key in LENGTHS if isinstance(settings.get(key), int) and settings[key] > testing.LENGTH}
    given = dict(sorted(given.items(), key=lambda item: item[0] not in LENGTHS))  # these are given up last
    dims = (32, 64)
    error: UserError | None = None
    for n_given, dim in itertools.product(range(len(given), -1, -1), dims):
        try:
            return testing.check_mixer(cls, settings=dict(list(given.items())[:n_given]), dim=dim, skip=UNCHECKED)
        except UserError as refused:
            error = refused
    raise error or UserError(f"The mixer {mixer.name} cannot be checked.")
