"""Define the models and the sizes: `demo` runs on two CPU cores, `small` on a GPU.

Each task module defines its sequences for these sizes.
"""

import dataclasses
import hashlib

from seqjax.evals.recall.tasks import TaskSetup, of_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Training settings and tasks of one size.

    `rounds` lists (width, learning rate) pairs in training order; each pair trains all models on all tasks.
    `steps_per_call` is the number of training steps per call to the compiled program.
    """

    batch_size: int
    rounds: tuple[tuple[int, float], ...]
    test_sequences: int
    steps_per_call: int
    tasks: tuple[TaskSetup, ...]

    def task(self, name: str) -> TaskSetup:
        """Return the task called `name`."""
        return next(task for task in self.tasks if task.name == name)

    def settings_hash(self, name: str) -> str:
        """Return a hash of a task's training and tests, the key `asked` in results.

        Results with different hashes are never mixed.
        """
        task = self.task(name)
        settings = (self.batch_size, self.test_sequences, task.steps, task.train, task.tests)
        if task.depth != 1:  # older results have no depth in their hash
            settings += (task.depth,)
        return hashlib.sha256(repr(settings).encode()).hexdigest()[:16]


def _hybrid(mixer: str, other: str, *, every: int, layers: int = 4, **settings: int | bool) -> str:
    """Return a config with `mixer`, in which every `every`-th layer has `other`."""
    groups = (*[{"name": mixer}] * (every - 1), {"name": other} | settings)
    return f"{mixer}:model.n_layers={layers},model.mixer={groups}"


# label -> config. Models have the layers of their config at size debug: two, but four for Mamba-1, Mamba-2 and
# log-linear Mamba-2, and five for Based. Hybrids have four or eight. Labels are the same as in the studies, so a
# mixer's scores and losses can be joined.
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
    # The studies' window size. Most sequences here are shorter than the window.
    "W=256": "transformer_pp:model.mixer.window=256",
    "W=256, QK norm": "transformer_pp:model.mixer.qk_norm=True,model.mixer.window=256",
    # Softmax attention with a forget gate and without positional encoding: decay with a growing state.
    "FoX": "fox",
    # Position encoding by products of data-dependent reflections: attention that can track permutations.
    "PaTH": "path:model.mixer.chunk_size=32",  # takes a quarter of the time on sequences of 144 tokens
    # Softmax attention over selected blocks. MoBA selects by mean keys; NSA adds compressed blocks and a window.
    "MoBA": "moba",
    "NSA": "nsa",
    # Data-dependent decay per channel, without (GLA) and with (KDA) the delta rule.
    "GLA": "gla",
    "KDA": "kda",
    # KDA with separate erase and write gates per channel.
    "Gated DeltaNet-2": "kda:model.mixer.channel_gates=True",
    "Gated DeltaNet-2, heads of 128": "kda:model.mixer.channel_gates=True,model.mixer.heads=1",
    # xLSTM: exponential input gates, forget gates and a normaliser.
    "mLSTM": "mlstm",
    # Two delta-rule steps per token, for transitions that one step cannot express.
    "Gated DeltaProduct": "gated_deltaproduct",
    # Mamba-2 with one state per Fenwick-tree block; the number of states grows with the logarithm of the length.
    "Log-linear Mamba-2": "log_linear_mamba2",
    # Mamba-2 with data-dependent rotations in addition to the decay.
    "Mamba-3": "mamba3",
    # Other Top-1 Chunk selections: the chunk with the best key among all keys, or among a few listed chunks.
    "Top-1 Chunk, best key": "top1_chunk:model.mixer.selection=best_key",
    "Top-1 Chunk, shortlist": "top1_chunk:model.mixer.selection=shortlist",
    "Top-1 Chunk, approx, k=4": "top1_chunk:model.mixer.selection=approx,model.mixer.top_k=4",
    "Top-1 Chunk, best key, k=4": "top1_chunk:model.mixer.selection=best_key,model.mixer.top_k=4",
    "Top-1 Chunk, best key, 32, k=4": "top1_chunk:model.mixer.selection=best_key,model.mixer.top_k=4,"
    "model.mixer.chunk_size=4",  # a quarter of the default chunk at this size, as 32 is at 110m
    # As in the study `hybrids`: recurrent layers plus layers with full, windowed or selective attention.
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

# At the demo's rate, attention with QK norm learns mqar (100%) and induction (94%); at 1e-2 it learns neither.
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
    """Return whether a label is a user's config file, `FILE.py[:SETTINGS]`."""
    return label.partition(":")[0].endswith(".py")
