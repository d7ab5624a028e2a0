"""What is trained and tested, by size: models, tasks with their harder tests, steps.

`demo` runs on two CPU cores, `small` on a GPU. MQAR at `small` has the sequences of zoology's configs for figure 2 of
"Based" (arXiv 2402.18668; github.com/HazyResearch/zoology, commit d88d6f5): 8,192 ids, trained on 4 to 64 pairs in 64
to 256 tokens in batches of 256, tested on 4 to 256 pairs in 64 to 1,024. docs/recall.md says what differs.
"""

import dataclasses
import hashlib

from seqjax.harness.recall.tasks import MQAR, S5, Copy, CopySelected, Induction, Ngram, Position, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSetup:
    """A task: what is trained on, in turns, and the tests by name, of which `own` is like the training.

    `published` says what others found, for the report.
    """

    name: str
    question: str
    steps: int
    train: tuple[Task, ...]
    tests: dict[str, Task]
    own: str
    published: str = ""

    @property
    def vocab_size(self) -> int:
        """Ids that training and tests have together."""
        return max(task.vocab_size for task in (*self.train, *self.tests.values()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A size: settings of the training, and the tasks.

    `rounds` are the widths of the models and the learning rates, in the order in which all models are trained on all
    tasks with them; `steps_per_call` is how many steps one call of the compiled program takes.
    """

    batch_size: int
    rounds: tuple[tuple[int, float], ...]
    test_sequences: int
    steps_per_call: int
    tasks: tuple[TaskSetup, ...]

    def task(self, name: str) -> TaskSetup:
        """Return the task of a name."""
        return next(task for task in self.tasks if task.name == name)

    def asked(self, name: str) -> str:
        """Return what identifies the training and the tests of a task, so that results of others are not beside it."""
        task = self.task(name)
        settings = (self.batch_size, self.test_sequences, task.steps, task.train, task.tests)
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

# zoology trains on 100,000 sequences of the first kind and 20,000 of each other one.
_MQAR_TRAIN = ((64, 4),) * 5 + ((128, 8), (256, 16), (256, 32), (256, 64))
_MQAR_TESTS = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))

_SMALL = (
    TaskSetup(
        name="mqar",
        question="values of keys",
        steps=4_000,
        train=tuple(MQAR(length=n, pairs=k) for n, k in _MQAR_TRAIN),
        tests={f"{k} in {n}": MQAR(length=n, pairs=k) for n, k in _MQAR_TESTS},
        own="64 in 256",
        published=(
            "Published: figure 2 of Based (arXiv 2402.18668) has the mean of these seven tests against the bytes of "
            "the state at 1,024 tokens, as a picture without numbers, of models without MLPs and positions that see "
            "up to 5.8 million sequences."
        ),
    ),
    TaskSetup(
        name="copy_selected",
        question="tokens among noise, in order",
        steps=2_000,
        train=(CopySelected(length=256),),
        tests={str(n): CopySelected(length=n) for n in (256, 512, 1024)},
        own="256",
    ),
    TaskSetup(
        name="induction",
        question="what followed the marker",
        steps=2_000,
        train=tuple(Induction(length=n) for n in (32, 64, 128, 256)),
        tests={str(n): Induction(length=n) for n in (64, 256, 1024, 2048)},
        own="256",
    ),
    TaskSetup(
        name="ngram",
        question="what followed bigrams",
        steps=4_000,
        train=tuple(Ngram(length=n, queries=n // 8) for n in (16, 32, 64, 128)),
        tests={str(n): Ngram(length=n, queries=n // 8) for n in (64, 128, 256)},
        own="128",
    ),
    TaskSetup(
        name="copy",
        question="the whole string",
        steps=2_000,
        train=(Copy(length=130, shortest=8, longest=64),),
        tests={str(n): Copy(length=2 * n + 2, shortest=n, longest=n) for n in (64, 128, 256)},
        own="64",
    ),
    TaskSetup(
        name="s5",
        question="the product of permutations",
        steps=2_000,
        train=tuple(S5(length=n) for n in (4, 8, 16, 32)),
        tests={str(n): S5(length=n) for n in (16, 32, 64, 128)},
        own="32",
    ),
    TaskSetup(
        name="position",
        question="the token at a number",
        steps=2_000,
        train=tuple(Position(length=n) for n in (32, 64, 128)),
        tests={str(n): Position(length=n) for n in (32, 64, 128)},
        own="128",
    ),
)  # fmt: skip

_DEMO = (
    TaskSetup(
        name="mqar",
        question="values of keys",
        steps=800,
        train=tuple(MQAR(length=32, pairs=k, ids=32) for k in (1, 2, 4)),
        tests={f"{k} in {n}": MQAR(length=n, pairs=k, ids=32) for n, k in ((32, 2), (32, 4), (64, 8))},
        own="4 in 32",
    ),
    TaskSetup(
        name="induction",
        question="what followed the marker",
        steps=400,
        train=tuple(Induction(length=n) for n in (8, 16, 32, 64)),
        tests={str(n): Induction(length=n) for n in (64, 128, 256)},
        own="64",
    ),
    TaskSetup(
        name="s5",
        question="the product of permutations",
        steps=800,
        train=tuple(S5(length=n) for n in (2, 4, 8)),
        tests={str(n): S5(length=n) for n in (4, 8, 16)},
        own="8",
    ),
)

SETUPS = {
    "demo": Setup(batch_size=64, rounds=((32, 1e-2),), test_sequences=256, steps_per_call=10, tasks=_DEMO),
    "small": Setup(
        batch_size=256,
        rounds=tuple((dim, rate) for rate in (3.2e-3, 1e-3, 1e-2) for dim in (128, 64)),
        test_sequences=1024,
        steps_per_call=10,
        tasks=_SMALL,
    ),
}
