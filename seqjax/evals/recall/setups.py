"""Models, and the settings of a size: `demo` runs on two CPU cores, `small` on a GPU. Tasks define their own sizes."""

import dataclasses
import hashlib

from seqjax.evals.recall.tasks import TaskSetup, of_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A size: settings of the training, and the tasks.

    `rounds` lists pairs of width and learning rate, in the order of training; all models are trained on all tasks with
    each. `steps_per_call` is the number of steps in a call of the compiled program.
    """

    batch_size: int
    rounds: tuple[tuple[int, float], ...]
    test_sequences: int
    steps_per_call: int
    tasks: tuple[TaskSetup, ...]

    def task(self, name: str) -> TaskSetup:
        """Return the task with a name."""
        return next(task for task in self.tasks if task.name == name)

    def asked(self, name: str) -> str:
        """Return the identity of a task's training and tests, so that results of other versions are not mixed in."""
        task = self.task(name)
        settings = (self.batch_size, self.test_sequences, task.steps, task.train, task.tests)
        if task.depth != 1:  # without it the identity is that of results from before there was a depth
            settings += (task.depth,)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


# label -> config; two layers of the width, for Mamba-2 and Mamba-1 four, as in all configs of these.
MODELS = {
    "Transformer": "transformer",
    "Transformer++": "transformer_pp",
    "Transformer++, QK norm": "transformer_pp:model.mixer.qk_norm=True",
    "Top-1 Element": "top1_element",
    "Top-1 Chunk, exact": "top1_chunk",
    "Top-1 Chunk, approx": "top1_chunk:model.mixer.selection=approx",
    "W=32": "transformer_pp:model.mixer.window=32",
    "Based": "based",
    "Mamba-1": "mamba1",
    "Mamba-2": "mamba2",
    "RWKV-5": "rwkv5",
    "RWKV-6": "rwkv6",
    "RWKV-7": "rwkv7",
    "DeltaNet": "deltanet",
    "Gated DeltaNet": "gated_deltanet",
}

# At the demo's rate attention with QK norm learns mqar (100%) and induction (94%), of which it learns none at 1e-2.
SETUPS = {
    "demo": Setup(batch_size=64, rounds=((32, 3.2e-3),), test_sequences=256, steps_per_call=10, tasks=of_size("demo")),
    "small": Setup(
        batch_size=256,
        rounds=tuple((dim, rate) for rate in (3.2e-3, 1e-3, 1e-2) for dim in (128, 64)),
        test_sequences=1024,
        steps_per_call=10,
        tasks=of_size("small"),
    ),
}
