"""Choose the training and evaluation domains of the protocol's two regimes.

*limited* trains on CommonCrawl and C4. It evaluates on both, and out of domain on arXiv, GitHub and StackExchange.
*mixed* trains and evaluates on all seven SlimPajama domains. Without explicit weights, domains have their natural token
shares.
"""

import dataclasses
from collections.abc import Collection

from seqjax.config import DataConfig
from seqjax.data import slimpajama
from seqjax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Regime:
    """The training domains and the evaluated domains of a run."""

    train: tuple[str, ...]
    eval: tuple[str, ...]


REGIMES = {
    "limited": Regime(
        train=("commoncrawl", "c4"),
        eval=("commoncrawl", "c4", "arxiv", "github", "stackexchange"),
    ),
    "mixed": Regime(train=slimpajama.NAMES, eval=slimpajama.NAMES),
}


def resolve(
    regime: Regime, *, train: tuple[str, ...], evaluate: tuple[str, ...], known: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the training and evaluated domains, in-domain ones first.

    Explicit lists replace the regime's lists. Raises `UserError` if a domain is not in `known` or is listed twice.
    """
    chosen_train = train or regime.train
    chosen_eval = evaluate or tuple(dict.fromkeys(chosen_train + regime.eval if train else regime.eval))
    for key, names in (("train_domains", chosen_train), ("eval_domains", chosen_eval)):
        for name in names:
            if name not in known:
                raise UserError(f"config.data.{key}: {name!r} is not a domain of this corpus.{nearest(name, known)}")
        if len(set(names)) != len(names):
            raise UserError(f"config.data.{key} names a domain twice: {', '.join(names)}.")
    in_domain = [name for name in chosen_eval if name in chosen_train]
    return chosen_train, tuple(in_domain + [name for name in chosen_eval if name not in in_domain])


def choose(
    config: DataConfig, *, train: Collection[str], evaluate: Collection[str], where: str, fix: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the training and evaluated domains, given a corpus's available domains.

    The regime decides if all available domains belong to SlimPajama. Otherwise all domains are evaluated, and a corpus
    with several domains needs regime `mixed` or `config.data.train_domains`.

    Args:
        config: The data settings.
        train: The domains that can be trained on.
        evaluate: The domains that can be evaluated.
        where: The corpus location, for error messages.
        fix: How to add a missing domain, for error messages.

    Raises:
        UserError: The corpus lacks a domain, or no setting selects the training domains.
    """
    known = {*train, *evaluate}
    is_custom = not known <= set(slimpajama.NAMES)
    if is_custom and config.regime != "mixed" and len(known) > 1 and not config.train_domains:
        raise UserError(
            f"{where} has the domains {', '.join(sorted(known))}: name those to train on in config.data.train_domains; "
            "the remaining domains are evaluated out of domain. config.data.regime='mixed' trains on all."
        )
    domains = tuple(sorted(known))
    chosen = resolve(
        Regime(train=domains, eval=domains) if is_custom else REGIMES[config.regime],
        train=config.train_domains,
        evaluate=config.eval_domains,
        known=domains if is_custom else slimpajama.NAMES,
    )
    for key, chosen_domains, present in (("train", chosen[0], train), ("eval", chosen[1], evaluate)):
        absent = [domain for domain in chosen_domains if domain not in present]
        if absent:
            splits = "train" if key == "train" else "validation or train"
            raise UserError(
                f"{where} has no {splits} blocks of {', '.join(absent)}, which config.data.regime={config.regime!r} "
                f"needs; {fix}, or list other domains in config.data.{key}_domains. "
                f"Present: {', '.join(sorted(present)) or 'none'}."
            )
    return chosen
