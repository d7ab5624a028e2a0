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


def _hybrid(mixer: str, other: str, *, every: int, layers: int = 4, **settings: int | bool) -> str:
    """Return a config of `mixer` whose last layer of each group of `every` has `other`."""
    groups = (*[{"name": mixer}] * (every - 1), {"name": other} | settings)
    return f"{mixer}:model.n_layers={layers},model.mixer={groups}"


# label -> config; two layers of the width, for Mamba-2 and Mamba-1 four, as in all configs of these, and for hybrids
# four or eight. The labels are those of the studies, so that scores and losses of a mixer can be put together.
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
    # Attention with the short convolution of the recurrent mixers: the reference with the same block.
    "Transformer++, QK norm, conv": "transformer_pp:model.mixer.qk_norm=True,model.mixer.conv=True",
    # Windows of the studies. They see all of a sequence that is not longer, as most here are.
    "W=256": "transformer_pp:model.mixer.window=256",
    "W=256, QK norm": "transformer_pp:model.mixer.qk_norm=True,model.mixer.window=256",
    # Softmax with a forget gate and no positions: a decay without a state of fixed size.
    "FoX": "fox",
    # Positions that are products of reflections from the data: attention that can follow permutations.
    "PaTH": "path:model.mixer.chunk_size=32",  # of sequences of 144 tokens: a quarter of the time
    # Softmax over selected blocks: by their mean keys, and beside means of blocks and a window.
    "MoBA": "moba",
    "NSA": "nsa",
    # A decay per channel from the data without the correction of the delta rule, and with it.
    "GLA": "gla",
    "KDA": "kda",
    # KDA with a gate per channel of what is erased and what is written.
    "Gated DeltaNet-2": "kda:model.mixer.channel_gates=True",
    "Gated DeltaNet-2, heads of 128": "kda:model.mixer.channel_gates=True,model.mixer.heads=1",
    # xLSTM: exponential input gates, forget gates and a normaliser.
    "mLSTM": "mlstm",
    # Two steps of the delta rule a token: transitions that one step does not have.
    "Gated DeltaProduct": "gated_deltaproduct",
    # Mamba-2 with a state for each block of a Fenwick tree: more of them the longer the sequence.
    "Log-linear Mamba-2": "log_linear_mamba2",
    # Rotations from the data, in place of Mamba-2's real decay.
    "Mamba-3": "mamba3",
    # Other selections of Top-1 Chunk: the chunk of the single best key, of all and of those in a few listed chunks.
    "Top-1 Chunk, best key": "top1_chunk:model.mixer.selection=best_key",
    "Top-1 Chunk, shortlist": "top1_chunk:model.mixer.selection=shortlist",
    "Top-1 Chunk, approx, k=4": "top1_chunk:model.mixer.selection=approx,model.mixer.top_k=4",
    "Top-1 Chunk, best key, k=4": "top1_chunk:model.mixer.selection=best_key,model.mixer.top_k=4",
    "Top-1 Chunk, best key, 32, k=4": "top1_chunk:model.mixer.selection=best_key,model.mixer.top_k=4,"
    "model.mixer.chunk_size=4",  # a quarter of the chunk at this size, as 32 is at 110m
    # As in the study `hybrids`: a layer that looks at all tokens, at few or at those that it selects, beside a state.
    "Gated DeltaNet, attention 1 in 2": _hybrid("gated_deltanet", "transformer_pp", every=2),
    "Gated DeltaNet, attention 1 in 4": _hybrid("gated_deltanet", "transformer_pp", every=4),
    "Gated DeltaNet, QK norm 1 in 4": _hybrid("gated_deltanet", "transformer_pp", every=4, qk_norm=True),
    "Gated DeltaNet, W=256 1 in 4": _hybrid("gated_deltanet", "transformer_pp", every=4, window=256),
    "Gated DeltaNet, Top-1 Chunk 1 in 4": _hybrid("gated_deltanet", "top1_chunk", every=4, chunk_size=16),
    "KDA, attention 1 in 2": _hybrid("kda", "transformer_pp", every=2),
    "KDA, attention 1 in 4": _hybrid("kda", "transformer_pp", every=4),
    "Mamba-2, attention 1 in 4": _hybrid("mamba2", "transformer_pp", every=4),
    "Mamba-2, attention 1 in 8": _hybrid("mamba2", "transformer_pp", every=8, layers=8),
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


def is_file(label: str) -> bool:
    """Return whether a label is a config in a file of the user, `FILE.py[:SETTINGS]`."""
    return label.partition(":")[0].endswith(".py")
