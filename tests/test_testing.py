"""The mixer contract tests: each check fails on a mixer that violates it."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from seqjax import mixers, testing
from seqjax.errors import UserError
from seqjax.mixers import _registry, base
from seqjax.nn import Linear, auxiliary, constant, param
from tests.mixers.probed import Probed


class Sum(NamedTuple):
    total_BD: jax.Array


class Sound(base.Mixer):
    """A correct mixer, a decaying sum: h_t = h_{t-1} / 2 + x_t U, y_t = h_t W."""

    def __init__(self, dim, *, chunk_size: int = 4, rngs):
        self.dim, self.chunk_size = dim, chunk_size
        self.up = Linear(dim, dim, axes=("embed", "heads"), rngs=rngs)
        self.out = Linear(dim, dim, axes=("heads", "embed"), rngs=rngs)

    def __call__(self, x_BTD):
        def combine(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        u_BTD = self.up(x_BTD)
        _, h_BTD = jax.lax.associative_scan(combine, (jnp.full_like(u_BTD, 0.5), u_BTD), axis=1)
        return self.out(h_BTD)

    def init_cache(self, batch, max_len, dtype):
        return Sum(jnp.zeros((batch, self.dim), dtype))

    def step(self, x_BD, cache):
        total_BD = 0.5 * cache.total_BD + self.up(x_BD)
        return self.out(total_BD), Sum(total_BD)

    def flops_per_token(self, seq_len):
        return 3.0 * self.dim


class Anticausal(Sound):
    def __call__(self, x_BTD):
        return super().__call__(x_BTD) + 1e-3 * jnp.roll(x_BTD, -1, axis=1)


class Forgetful(Sound):
    def step(self, x_BD, cache):
        total_BD = cache.total_BD + self.up(x_BD)
        return self.out(total_BD), Sum(total_BD)


class Chunked(Sound):
    """Forget at the start of each chunk."""

    def __call__(self, x_BTD):
        chunks = [x_BTD[:, i : i + self.chunk_size] for i in range(0, x_BTD.shape[1], self.chunk_size)]
        return jnp.concatenate([super(Chunked, self).__call__(x) for x in chunks], axis=1)


class LateLeak(Sound):
    """Read the next token from position 128 on, so shorter sequences show no error."""

    late = 128

    def leak(self, x_BTD):
        return 1e-3 * jnp.roll(x_BTD, -1, axis=1).at[:, -1].set(0.0)

    def __call__(self, x_BTD):
        return super().__call__(x_BTD).at[:, self.late :].add(self.leak(x_BTD)[:, self.late :])


class LateGradientLeak(LateLeak):
    """Give correct values, but gradients that depend on the next token."""

    def leak(self, x_BTD):
        leak_BTD = super().leak(x_BTD)
        return leak_BTD - jax.lax.stop_gradient(leak_BTD)


class LateForgetful(LateLeak):
    """Differ in the parallel form from position 250 on, while staying causal."""

    late = 250

    def leak(self, x_BTD):
        return 0.1 * x_BTD


class NewestLast(Sound):
    """Keep tokens at the end of the cache, so a longer cache moves them."""

    def init_cache(self, batch, max_len, dtype):
        return Sum(jnp.zeros((batch, max_len, self.dim), dtype))

    def step(self, x_BD, cache):
        u_BSD = jnp.concatenate([cache.total_BD[:, 1:], self.up(x_BD)[:, None]], axis=1)
        weight_S = 0.5 ** jnp.arange(u_BSD.shape[1])[::-1]
        return self.out(jnp.einsum("s,bsd->bd", weight_S.astype(u_BSD.dtype), u_BSD)), Sum(u_BSD)


class Nothing(Sound):
    def __call__(self, x_BTD):
        return None


class Narrow(Sound):
    def __call__(self, x_BTD):
        return super().__call__(x_BTD)[..., :-1]


class Float32(Sound):
    def __call__(self, x_BTD):
        return super().__call__(x_BTD).astype(jnp.float32)


class Unused(Sound):
    def __init__(self, dim, *, rngs):
        super().__init__(dim, rngs=rngs)
        self.unused = param(rngs, constant(1.0), (dim,), ("embed",))


class OfFlax(Sound):
    """Use flax layers, whose parameters have no logical axes."""

    def __init__(self, dim, *, rngs):
        self.dim = dim
        self.up, self.out = (nnx.Linear(dim, dim, use_bias=False, dtype=None, rngs=rngs) for _ in range(2))


class Boastful(Sound):
    def flops_per_token(self, seq_len):
        return 50.0 * self.dim * seq_len


class Unequal(Sound):
    """Change the value with every call, so gradients and rematerialised values do not match."""

    calls = 0

    def __call__(self, x_BTD):
        type(self).calls += 1
        return super().__call__(x_BTD) * (1 + 0.01 * type(self).calls)


class Leaky(Probed):
    """Train the sum with the auxiliary loss."""

    def target(self, h):
        return h.astype(jnp.float32).mean(-1, keepdims=True)


class Steered(Probed):
    """Train the probe with the language loss."""

    def read(self, x, h):
        return super().read(x, h) + self.guess(x).astype(x.dtype)


class Untrained(Sound):
    def __init__(self, dim, *, rngs):
        super().__init__(dim, rngs=rngs)
        self.unused = auxiliary(Linear(dim, 1, axes=("embed", None), rngs=rngs))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(_registry, "_registered", {})


def check(mixer, *names, **options):
    mixers.register("mine")(mixer)
    return testing.check_mixer(mixer, dim=16, skip=set(testing.CHECKS) - set(names), **options)


@pytest.mark.slow
def test_flax_layers_are_replicated():
    names = ["parameters", "causality", "step", *(["sharding"] if jax.device_count() > 1 else [])]
    assert check(OfFlax, *names) == names


def test_a_correct_mixer_passes():
    names = ["flops", "parameters", "causality", "step", "chunk_size"]
    assert check(Sound, *names, n_params=2 * 16 * 16) == names


def test_each_check_reports_when_it_ends(capsys):
    check(Sound, "output", "parameters")
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(
        r"\noutput +passed +\d+\.\d s\nparameters +passed +\d+\.\d s\n$", captured.err
    )
    lines = []
    with pytest.raises(AssertionError):
        check(Narrow, "output", "parameters", say=lines.append)
    assert [line.split()[:2] for line in lines[1:]] == [["output", "FAILED"]]
    assert capsys.readouterr().err == ""


def test_an_auxiliary_loss_passes():
    assert check(Probed, "auxiliary_loss") == ["auxiliary_loss"]


@pytest.mark.slow
def test_an_auxiliary_loss_has_equal_forms():
    names = ["causality", "step", "bfloat16", "sharding", "forms"]
    assert check(Probed, *names) == names


@pytest.mark.slow
def test_a_correct_mixer_passes_all_checks():
    mixers.register("mine")(Sound)
    assert testing.check_mixer(Sound, dim=16) == list(testing.CHECKS)


@pytest.mark.parametrize(
    ("mixer", "name", "says"),
    [
        (Anticausal, "causality", r"token 1 .* position 0, .*\d"),
        pytest.param(
            Anticausal,
            "gradient_causality",
            r"output \d+ .* input \d+: .* \d",
            marks=pytest.mark.slow,
        ),
        (Forgetful, "step", r"position 1 .* 0 tokens: .* \d"),
        (NewestLast, "long_cache", r"position 20, .* 20 tokens .* 64:"),
        (LateLeak, "long", r"token 129 .* position 128,"),
        pytest.param(
            LateGradientLeak,
            "long",
            r"position \d+ .* input \d+: .* \d",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            LateForgetful,
            "long",
            r"position 250 .* 237 tokens:",
            marks=pytest.mark.slow,
        ),
        (Nothing, "output", r"__call__ .*NoneType .*\(8, 1, 16\)"),
        (Narrow, "output", r"__call__ .*\(8, 1, 15\) .*\(8, 1, 16\)"),
        (Chunked, "chunk_size", r"chunk_size=1 .* 23 tokens: .* \d"),
        (Float32, "bfloat16", "output is float32 .*bfloat16"),
        (Unused, "bfloat16", r"blocks\.0\.mixer\.unused .*no gradient"),
        (Leaky, "auxiliary_loss", r"\w+\.w .*auxiliary loss, .*\d.*stop_gradient"),
        (Steered, "auxiliary_loss", r"probe\.b .*language loss, .*\d"),
        (Untrained, "auxiliary_loss", r"unused\.w .*group auxiliary,"),
        (Boastful, "flops", r" \d+\.\d\d .* \d+ .*XLA .* 0\.6 to 1"),
        pytest.param(Unequal, "forms", r"scan_layers=False: .*loss is [\d.]+ .*[\d.]+", marks=pytest.mark.slow),
    ],
)
def test_violations_name_the_check_and_the_size(mixer, name, says):
    with pytest.raises(AssertionError, match=rf"^{mixer.__name__} fails 1 of 1 checks\.\n{name}: .*{says}"):
        check(mixer, name)


def test_the_parameter_count_is_checked():
    with pytest.raises(AssertionError, match=r"parameters: .*512 .*255"):
        check(Sound, n_params=255)


def test_an_exception_in_a_mixer_names_the_check():
    class Broken(Sound):
        def step(self, x_BD, cache):
            raise NotImplementedError("no step yet")

    with pytest.raises(AssertionError, match=r"\nstep: NotImplementedError: no step yet$") as error:
        check(Broken, "step")
    assert isinstance(error.value.__cause__, NotImplementedError)


def test_a_wrong_output_ends_the_checks():
    with pytest.raises(AssertionError, match=r"^Nothing .* 1 of 1 .*\noutput: [^\n]*$"):
        check(Nothing, "output", "causality", "step")


def test_errors_name_wrong_arguments():
    mixers.register("mine")(Sound)
    with pytest.raises(UserError, match=r"'casuality'.*'causality'"):
        testing.check_mixer(Sound, skip=["casuality"])
    with pytest.raises(UserError, match=r"window .*setting"):
        testing.check_mixer(Sound, settings={"window": 3})
    nowhere = type("Nowhere", (Sound,), {"__module__": "__main__"})  # of no file
    with pytest.raises(UserError, match=re.escape("@seqjax.mixers.register('a_name')")):
        testing.check_mixer(nowhere)


def test_flops_of_a_mamba1_subclass_pass():
    """With many states, so the scan has a third of all FLOPs."""

    class Mine(mixers.Mamba1):
        pass

    assert check(Mine, "flops", settings={"state": 64}) == ["flops"]


def test_a_shipped_mixer_is_checked_by_its_class():
    skip = set(testing.CHECKS) - {"parameters"}
    assert testing.check_mixer(mixers.Top1Chunk, settings={"chunk_size": 4}, skip=skip) == ["parameters"]
