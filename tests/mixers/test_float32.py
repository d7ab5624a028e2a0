"""Float32 parts of bfloat16 models, read from each mixer's program.

Nothing is compiled or run. These are norm statistics, softmax, decays, step sizes and gates, query-key scores, states,
and logits.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from seqjax.nn import params as params_lib
from tests import support

B, T, D = 2, 23, 32
# Operations that are too coarse in 16 bits, or that sum many numbers.
SENSITIVE = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "rsqrt", "sqrt", "div", "pow", "sin"}
SENSITIVE |= {"cos", "cumsum", "cumprod", "cumlogsumexp", "reduce_sum", "triangular_solve", "integer_pow"}
# Activations inside a low-rank map. The second product takes 16-bit inputs in any case.
INSIDE = {"rwkv6": ["tanh"], "rwkv7": ["tanh", "logistic"], "rwkv7_shell": ["logistic"]}
# Projections that enter an exponential, a sigmoid or a softplus. Mamba-1's `dt`, KDA's `decay_out` and the erase gates
# of Gated DeltaNet-2 are not listed: the public kernels also read them in the model's dtype.
ISLANDS = {
    "comba": ["beta", "decay"],
    "deltanet": ["beta"],
    "dsa": ["index.w"],
    "fox": ["forget"],
    "gated_deltanet": ["beta", "decay"],
    "gated_deltaproduct": ["beta", "decay"],
    "gla": ["decay_out"],
    "kda": ["beta"],
    "log_linear_mamba2": ["dt", "level"],
    "mamba2": ["dt"],
    "mamba3": ["angle", "dt", "rate", "trap"],
    "mlstm": ["forget", "input"],
    "nsa": ["gate"],
    "path": ["beta"],
    "precond_gated_deltanet": ["beta", "decay", "precond.beta", "precond.decay"],
    "precond_kda": ["beta", "decay_out", "precond.beta", "precond.decay"],
    "rwkv6": ["d2"],
    "mesa_net": ["beta", "decay"],
    "ttt_linear": ["rate"],
    "wall": ["decay"],
    "rwkv7": ["a_lora", "v_lora", "w_lora"],
    "rwkv7_shell": ["v_lora"],
}
VARIANT_ISLANDS = {
    ("fox", "pro"): ["forget", "gate", "k_shift", "v_shift"],
    ("kda", "channel_gates"): ["write"],
    ("mamba1", "one"): ["decay"],
    ("mla", "gated"): ["gate"],
    ("path", "gqa_gates"): ["beta", "forget"],
    ("transformer_pp", "conv_window_gqa"): ["gate"],
}
# Expected number of 16-bit products without a parameter in the program of `of_mixer`. Each multiplies attention weights
# and values; query-key products are float32.
VALUES = dict.fromkeys([*ISLANDS, "based_conv", "based_linear", "mamba1", "rwkv5", "top1_chunk", "top1_element"], 0)
VALUES |= {"fox": 3, "mla": 3, "nsa": 8, "path": 2, "post_norm_attention": 3, "transformer": 3, "transformer_pp": 3}
VALUES |= {"wall": 3, "dsa": 3, "msa": 2, "parallax": 3}
# Operations that pass a parameter to a product.
PASSES = {
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "split",
    "stop_gradient",
}


def is_narrow(x: Any) -> bool:
    return getattr(x.aval, "dtype", None) == jnp.bfloat16


def inner(equation: Any) -> Iterator[Any]:
    """Yield the programs inside an operation."""
    for value in equation.params.values():
        for program in value if isinstance(value, tuple | list) else (value,):
            program = getattr(program, "jaxpr", program)
            if hasattr(program, "eqns"):
                yield program


class Reader:
    """Collect products and 16-bit values in a program.

    These are sensitive 16-bit operations and the shapes of 16-bit arrays carried by loops.
    """

    def __init__(self, function: Any, params: Any, *inputs: Any):
        self.narrow: list[str] = []
        self.carried: list[tuple[int, ...]] = []
        self.products: list[tuple[str, bool]] = []  # (parameter name or "", is float32)
        names = [name for name, _ in params_lib.names(params)]
        jaxpr = jax.make_jaxpr(function)(params, *inputs).jaxpr
        self.read(jaxpr, [*names, *[""] * (len(jaxpr.invars) - len(names))])

    def read(self, jaxpr: Any, names: list[str]) -> list[str]:
        of = dict(zip(jaxpr.invars, names, strict=True))

        def name(x: Any) -> str:
            return "" if hasattr(x, "val") else of.get(x, "")

        for equation in jaxpr.eqns:
            operation, inputs = equation.primitive.name, [name(x) for x in equation.invars]
            for program in inner(equation):
                results = self.read(program, inputs[len(inputs) - len(program.invars) :])
                if len(results) == len(equation.outvars):
                    of.update(zip(equation.outvars, results, strict=True))
            if operation in PASSES:
                of.update(dict.fromkeys(equation.outvars, inputs[0]))
            narrow = any(map(is_narrow, equation.outvars))
            if operation == "dot_general":
                self.products.append((max(inputs), not narrow))
            is_sum_of_one = operation == "reduce_sum" and equation.invars[0].aval.size == equation.outvars[0].aval.size
            if operation in SENSITIVE and narrow and not is_sum_of_one:
                self.narrow.append(operation)
            if operation == "scan":
                # A stacked output has one axis more than in the body. JAX 0.12 no longer states the number of carries.
                pairs = zip(equation.outvars, equation.params["jaxpr"].jaxpr.outvars, strict=True)
                carried = [x for x, in_body in pairs if x.aval.shape == in_body.aval.shape]
                self.carried += [x.aval.shape for x in carried if is_narrow(x)]
        return [name(x) for x in jaxpr.outvars]


def of_mixer(mixer: str, variant: str) -> Reader:
    """Read the program of all layers over a sequence, plus one decoding step."""
    model = support.tiny_model(mixer, variant, model__dtype="bfloat16")

    def both(params, tokens_BT, cache):
        return model.hidden(params, tokens_BT), model.step(params, tokens_BT[:, 0], jnp.int32(3), cache)

    cache = jax.eval_shape(lambda: model.init_cache(B, T))
    return Reader(both, model.shapes, jax.ShapeDtypeStruct((B, T), jnp.int32), cache)


@pytest.mark.parametrize(
    ("name", "variant"), [*(case for case in support.FIRST if case[0] in VALUES), *VARIANT_ISLANDS]
)
def test_sensitive_operations_are_float32(name, variant):
    program = of_mixer(name, variant)
    allowed = INSIDE.get(name, [])
    assert not [operation for operation in program.narrow if operation not in allowed]
    residual_streams = ((B, T, D), (B, D))
    states = [shape for shape in program.carried if shape not in residual_streams]
    assert not states
    assert [parameter for parameter, is_wide in program.products if not is_wide].count("") == VALUES[name]
    for part in VARIANT_ISLANDS.get((name, variant), ISLANDS.get(name, [])):
        wide = [
            is_wide
            for parameter, is_wide in program.products
            if f".mixer.{part}." in parameter and not parameter.endswith(".a")  # the first factor of a low-rank map
        ]
        assert wide, f"no product with {part}"
        assert all(wide), f"{part} in 16 bits"


HEADS = {
    "logits": lambda model, params, tokens: model.logits(params, tokens),
    "loss": lambda model, params, tokens: model.loss(params, tokens)[0],
    "gradient": lambda model, params, tokens: jax.grad(lambda params: model.loss(params, tokens)[0])(params),
    "sequence_losses": lambda model, params, tokens: model.sequence_losses(params, tokens),
    "token_losses": lambda model, params, tokens: model.token_losses(params, tokens),
    "weighted": lambda model, params, tokens: model.weighted_sequence_losses(params, tokens, jnp.ones((B, T - 1))),
    "continuation_scores": lambda model, params, tokens: model.continuation_scores(
        params, tokens, jnp.ones((B, T)), tokens[:, 0], tokens[:, :3]
    ),
    "step": lambda model, params, tokens: model.step(params, tokens[:, 0], jnp.int32(0), model.init_cache(B, T)),
    "prefill": lambda model, params, tokens: model.prefill(params, tokens, model.init_cache(B, T)),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("function", HEADS)
def test_logits_and_losses_are_float32(function, tied):
    model = support.tiny_model("transformer_pp", model__dtype="bfloat16", model__tie_embeddings=tied)
    tokens = jax.ShapeDtypeStruct((B, T), jnp.int32)
    program = Reader(lambda params, tokens: HEADS[function](model, params, tokens), model.shapes, tokens)
    heads = [is_wide for name, is_wide in program.products if name == ("embed" if tied else "head")]
    assert heads[0], "logits in 16 bits"
    assert function == "gradient" or all(heads)
    assert not program.narrow
