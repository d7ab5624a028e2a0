"""Types that describe a public architecture: a tensor table and a settings table, used in both directions.

attention.py, mamba.py and linear_attention.py hold the tables. weights.py uses the tensor tables, public_config.py the
settings tables.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from seqjax.config import Config
from seqjax.mixers.base import default_mlp_dim

SIZE = range(1, 1 << 31)  # forms of values in a config.json (seqjax/reading.py)
LAYERS = range(1, 10_001)
ANY = None
ROPE: Any = (  # one group of RoPE settings, or one group per layer type
    {
        **{f"{name}?": (str, None) for name in ("rope_type", "type")},
        **{
            f"{name}?": (float, dict, None)
            for name in ("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor")
        },
        "original_max_position_embeddings?": (SIZE, dict, None),
    },
    None,
)
# Further config.json keys that settings read.
ALSO_READ: dict[str, Any] = {
    "hidden_ratio?": (float, None),
    "layer_types?": ([str], None),
    "max_position_embeddings?": (SIZE, None),
    "max_window_layers?": (int, None),
    "num_heads?": (SIZE, None),
    "original_max_position_embeddings?": (SIZE, None),
    "partial_rotary_factor?": (float, None),
    "rope_parameters?": ROPE,
    "use_sliding_window?": (bool, None),
}
MISSING = object()  # A config.json lacks the key, and it has no default: there is nothing to compare.


class Rule(NamedTuple):
    """Maps our arrays to a public tensor: `public` is the tensor's name, `ours` lists the paths of our arrays.

    {} in the name stands for the layer. Several paths, separated by spaces, are concatenated along the output. A rule
    is skipped if the config has no such arrays (biases, a tied head). `first=False`: the first layer has no such
    tensor. Forms, ours = public:

        same    [..] = [..]
        linear  [in, out] = [out, in]     torch's Linear
        conv    [E, W] = [E, 1, W]        torch's depthwise Conv1d
        row     [D] = [1, 1, D]
        heads   [H * K] = [H, K]
    """

    public: str
    ours: str
    form: str = "same"
    first: bool = True


class Setting(NamedTuple):
    """A key of the public config.json; a value of None is the same as an absent key.

    `get` returns the value for our config, `read` the value in the parsed config.json `hf_config` (or MISSING). `fix`
    returns our settings, by key, that produce the value read, or {} if none do. `form` is the value's type in a
    config.json, checked before reading: settings consist of numbers, booleans and known names, never of text from the
    file. `derived`: the value also depends on other keys of our config, so the overrides include it even if the values
    agree before. Without a `required` key, a config.json does not determine the model size.
    """

    public: str
    get: Callable[[Config], Any]
    read: Callable[[dict[str, Any]], Any]
    fix: "Fix"
    form: Any = ANY
    derived: bool = False
    required: bool = False


Fix = Callable[[Any, dict[str, Any]], dict[str, Any]]


def no_fix(value: Any, hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return no settings: none of ours produces this value."""
    return {}


class Family(NamedTuple):
    """A public architecture and its tables."""

    name: str
    prefix: str  # of all tensors except the head; absent in files of a base model without head
    types: tuple[str, ...]  # model_type in config.json
    label: Callable[[Config], tuple[str, str]]  # model_type and architecture of an export, or `UserError`
    embed: str  # the tensor that a tied lm_head.weight repeats
    rules: tuple[Rule, ...]
    settings: tuple[Setting, ...]
    needs: dict[str, tuple[Any, ...]]  # key of our config -> allowed values
    redundant: str = r"(?!)"  # regular expression: tensors of a file that carry no information
    own_tokenizer: bool = False  # transformers applies this family's tokenizer rules to any tokenizer.json


# ------------------------------------------------------------------------------------------------------------ settings
def key(
    public: str, ours: str, get: Callable[[Config], Any] | None = None, *, default: Any = MISSING, form: Any = SIZE
) -> Setting:
    """Return the setting of a public key equal to our key `ours`, or to `get(config)` if ours may be None."""
    return Setting(
        public,
        get or operator.attrgetter(ours),
        lambda hf_config: default if hf_config.get(public) is None else hf_config[public],
        lambda value, hf_config: {ours: value},
        form,
        derived=get is not None,
        required=get is None and default is MISSING,
    )


def fixed(public: str, value: Any, *synonyms: Any, default: Any = MISSING) -> Setting:
    """Return the setting of a public key with one supported value."""

    def read(hf_config: dict[str, Any]) -> Any:
        value_read = hf_config.get(public, default)
        return value if value_read in synonyms else value_read

    return Setting(public, lambda config: value, read, no_fix)


def export_only(public: str, get: Callable[[Config], Any]) -> Setting:
    """Return the setting of a public key that an export writes and an import ignores."""
    return Setting(public, get, lambda hf_config: MISSING, no_fix)


def sizes(*, tie: bool, dim: str = "hidden_size", layers: str = "num_hidden_layers") -> tuple[Setting, ...]:
    """Return the settings that all families share; `tie` is the default for `tie_word_embeddings`."""
    return (
        key("vocab_size", "model.vocab_size"),
        key(dim, "model.dim"),
        key(layers, "model.n_layers", form=LAYERS),
        key("tie_word_embeddings", "model.tie_embeddings", default=tie, form=bool),
        fixed("quantization_config", None, default=None),
    )


def mlp_dim(public: str, default_of: Callable[[dict[str, Any]], Any]) -> Setting:
    """Return the setting for the MLP width; `default_of` computes it if a config.json has none."""
    return Setting(
        public,
        lambda config: config.model.mlp.dim or default_mlp_dim(config.model),
        lambda hf_config: hf_config.get(public) or default_of(hf_config),
        lambda value, hf_config: {"model.mlp.dim": value},
        SIZE,
        derived=True,
    )


def fixed_label(model_type: str, architecture: str) -> Callable[[Config], tuple[str, str]]:
    """Return a function that gives the same label for every config."""
    return lambda config: (model_type, architecture)


# ------------------------------------------------------------------------------------------------------------- tensors
def linear(public: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of a torch Linear, with a bias if ours has one."""
    weights, biases = (" ".join(f"{p}.{leaf}" for p in ours.split()) for leaf in "wb")
    return Rule(f"{public}.weight", weights, "linear"), Rule(f"{public}.bias", biases)


def conv(public: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of a torch Conv1d with one filter per channel."""
    return tuple(rule._replace(form="conv") if rule.form == "linear" else rule for rule in linear(public, ours))


def norm(public: str, ours: str) -> tuple[Rule, ...]:
    """Return the rules of an RMSNorm, or of a LayerNorm if ours has a bias."""
    return Rule(f"{public}.weight", f"{ours}.g"), Rule(f"{public}.bias", f"{ours}.b")


def embed_and_head(embed: str, last: str) -> tuple[Rule, ...]:
    """Return the rules of the embedding, the final norm, and the head if it is not tied."""
    return Rule(f"{embed}.weight", "embed"), *norm(last, "norm"), Rule("lm_head.weight", "head", "linear")


# --------------------------------------------------------------------------------------------------------------- needs
PLAIN: dict[str, tuple[Any, ...]] = {
    "model.norm": ("rmsnorm",),
    "model.embed_norm": (False,),
    "model.learned_positions": (False,),
    "model.canon": ("none",),
    "model.token_shift": (False,),
    "model.attn_residual": (None,),
}
