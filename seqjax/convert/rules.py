"""The words in which a public architecture is written down: a table of tensors and one of settings, for both ways.

attention.py, mamba.py and linear_attention.py hold the tables; weights.py reads those of tensors and public_config.py
those of settings.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from seqjax.config import Config
from seqjax.models.block import default_mlp_dim

MISSING = object()  # a key that a config.json lacks and that has no default: nothing to compare


class Rule(NamedTuple):
    """`public` is a tensor's name, {} the layer; `ours` the paths of our arrays in it, separated by spaces.

    Several lie side by side along the output. A rule whose arrays a config does not have (biases, a tied head) does
    not apply. `first` False: the first layer has no such tensor. Forms, ours = theirs:

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
    """A key of the public config.json; None means that the key may as well be absent.

    `get` gives its value for a config of ours, `read` what a config.json says (MISSING: nothing), and `fix` the
    override of ours that would give the value which was read, "" where there is none. `derived`: in ours other keys
    have a say in it too, so a list of overrides must have this one even where the values happen to agree before.
    """

    public: str
    get: Callable[[Config], Any]
    read: Callable[[dict[str, Any]], Any]
    fix: Callable[[Any, dict[str, Any]], str]
    derived: bool = False


class Family(NamedTuple):
    """A public architecture."""

    name: str
    prefix: str  # of every tensor but the head; files of a bare base model lack it
    types: tuple[str, ...]  # model_type in config.json
    label: Callable[[Config], tuple[str, str]]  # model_type and architecture of an export, or `UserError`
    embed: str  # the tensor that a tied lm_head.weight repeats
    rules: tuple[Rule, ...]
    settings: tuple[Setting, ...]
    needs: dict[str, tuple[Any, ...]]  # key of our config -> what it may be
    redundant: str = r"(?!)"  # regular expression: tensors that a file may hold and that say nothing


# ------------------------------------------------------------------------------------------------------------ settings
def key(public: str, ours: str, get: Callable[[Config], Any] | None = None, *, default: Any = MISSING) -> Setting:
    """A public key that our key `ours` decides: equal to it, or to what `get` makes of its None for "as usual"."""
    return Setting(
        public,
        get or operator.attrgetter(ours),
        lambda found: default if found.get(public) is None else found[public],
        lambda value, found: f"{ours}={value}",
        derived=get is not None,
    )


def only(public: str, value: Any, *also: Any, default: Any = MISSING) -> Setting:
    """A public key of which one value (or what means the same, `also`) is computed here."""

    def read(found: dict[str, Any]) -> Any:
        said = found.get(public, default)
        return value if said in also else said

    return Setting(public, lambda config: value, read, lambda value, found: "")


def told(public: str, get: Callable[[Config], Any]) -> Setting:
    """A public key that an export states and an import does not ask."""
    return Setting(public, get, lambda found: MISSING, lambda value, found: "")


def sizes(*, tie: bool, dim: str = "hidden_size", layers: str = "num_hidden_layers") -> tuple[Setting, ...]:
    """What every family has; `tie` is what its config.json means where it does not say."""
    return (
        key("vocab_size", "model.vocab_size"),
        key(dim, "model.dim"),
        key(layers, "model.n_layers"),
        key("tie_word_embeddings", "model.tie_embeddings", default=tie),
    )


def mlp_dim(public: str, usual: Callable[[dict[str, Any]], Any]) -> Setting:
    """The MLP's inner width; `usual` is what a config.json without it means."""
    return Setting(
        public,
        lambda config: config.model.mlp.dim or default_mlp_dim(config.model),
        lambda found: found.get(public) or usual(found),
        lambda value, found: f"model.mlp.dim={value}",
        derived=True,
    )


def named(model_type: str, architecture: str) -> Callable[[Config], tuple[str, str]]:
    """The same label for every config."""
    return lambda config: (model_type, architecture)


# ------------------------------------------------------------------------------------------------------------- tensors
def linear(public: str, ours: str) -> tuple[Rule, ...]:
    """A torch Linear, with its bias where ours has one."""
    weights, biases = (" ".join(f"{p}.{leaf}" for p in ours.split()) for leaf in "wb")
    return Rule(f"{public}.weight", weights, "linear"), Rule(f"{public}.bias", biases)


def conv(public: str, ours: str) -> tuple[Rule, ...]:
    """A torch Conv1d, one filter per channel."""
    return tuple(rule._replace(form="conv") if rule.form == "linear" else rule for rule in linear(public, ours))


def norm(public: str, ours: str) -> tuple[Rule, ...]:
    """RMSNorm, or LayerNorm where ours has a bias."""
    return Rule(f"{public}.weight", f"{ours}.g"), Rule(f"{public}.bias", f"{ours}.b")


def outside(embed: str, last: str) -> tuple[Rule, ...]:
    """Embedding, final norm, and the head where it is not tied."""
    return Rule(f"{embed}.weight", "embed"), *norm(last, "norm"), Rule("lm_head.weight", "head", "linear")


# --------------------------------------------------------------------------------------------------------------- needs
PLAIN: dict[str, tuple[Any, ...]] = {
    "model.norm": ("rmsnorm",),
    "model.embed_norm": (False,),
    "model.learned_positions": (False,),
}
