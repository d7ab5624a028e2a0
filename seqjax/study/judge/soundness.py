"""Run the contract tests (seqjax/testing.py) on a config's mixers before training."""

import itertools
import os
import subprocess
import sys
import tempfile
from typing import Any

from seqjax import mixers, testing
from seqjax.errors import UserError
from seqjax.mixers import base
from seqjax.study.judge.plan import Plan, read
from seqjax.terminal import tell

# Skipped, because a sound mixer may fail them: XLA cannot count FLOPs in loops, and a chunk may be part of the model.
UNCHECKED = ("flops", "chunk_size")
LENGTHS = ("chunk_size", "window")  # settings in tokens
SHORT = 8  # replaces a length above testing.LENGTH


PASSED = "all checks passed\n"  # needed besides status 0, which a mixer can cause with `sys.exit(0)`
# Runs in another process, on a CPU, so that this process takes no GPU memory from the runs.
CHECK = "import sys; from seqjax.study.judge import soundness; soundness.check(sys.argv[1])"


def require_sound(plan: Plan) -> None:
    """Raise `UserError` unless every mixer passes the contract tests."""
    tell(f"Checking the mixer of {plan.model}: causality, decoding, gradients.")
    sys.stdout.flush()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    passed = False
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        command = [sys.executable, "-c", CHECK, plan.text]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:
            for line in process.stdout or ():
                passed = line == PASSED
                tell(f"  {line.rstrip()}")
                sys.stdout.flush()
        if process.returncode or not passed:
            errors.seek(0)
            last_line = errors.read().strip().rpartition("\n")[2]
            last_line = last_line if process.returncode and last_line else f"it ended with status {process.returncode}"
            raise UserError(f"The mixer cannot be judged before it passes seqjax.testing.check_mixer: {last_line}")


def check(text: str) -> None:
    """Run the contract tests on the mixers of a config; print a line per passed check, and `PASSED` at the end.

    On a failure, the last line on stderr says what fails, and the exit status is 1.
    """
    for mixer in read(text).model.mixers:
        try:
            checked_mixer(mixer)
        except (AssertionError, UserError) as error:
            sys.stderr.write("\n" + " ".join(str(error).splitlines()))
            sys.exit(1)
    sys.stdout.write(PASSED)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def checked_mixer(mixer: Any) -> list[str]:
    """Run the contract tests on a mixer with its config's settings.

    Returns the test names. The tests use small models, mostly with sequences of 23 tokens. Therefore a longer chunk or
    window is shortened. If a small model refuses the settings, they return to their defaults one by one, from the last
    on, until it accepts; some settings that fit are then tested at their defaults. `heads` and `rope_base` come from
    the size, so the small model has its own.
    """
    cls: type[base.Mixer] = mixers.load(mixer.name)
    settings = {key: value for key, value in vars(mixer).items() if key not in ("name", "heads", "rope_base")}
    known = mixers.settings_class(mixer.name)
    defaults = {key: getattr(known, key, None) for key in settings}
    changed = {key: value for key, value in settings.items() if value != defaults[key]}
    changed |= {key: SHORT for key in LENGTHS if isinstance(settings.get(key), int) and settings[key] > testing.LENGTH}
    changed = dict(sorted(changed.items(), key=lambda item: item[0] not in LENGTHS))  # lengths are dropped last
    dims = (32, 64)
    error: UserError | None = None
    for n_settings, dim in itertools.product(range(len(changed), -1, -1), dims):
        try:
            subset = dict(list(changed.items())[:n_settings])
            return testing.check_mixer(cls, settings=subset, dim=dim, skip=UNCHECKED, say=_print_line)
        except UserError as refused:
            error = refused
    raise error or UserError(f"The mixer {mixer.name} cannot be checked.")
