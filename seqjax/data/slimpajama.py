"""SlimPajama's seven domains and the two regimes of the protocol.

*limited* trains on CommonCrawl and C4 and tests on both and, out of domain, on arXiv, GitHub and
StackExchange. *mixed* trains and tests on all seven. Tokens are drawn in their natural shares unless weights
are given.

`share` is the published share of a domain in the bytes of the 627B-token corpus. Block corpora count their own tokens
instead; the streaming mode, which cannot count in advance, uses these. Code and TeX have fewer bytes per
token than prose, so the token shares of github and arxiv are somewhat higher.

The Book domain contains books3. It can be left out with `--domains` of `seqjax.data.prepare` and
`config.data.train_domains`; the limited regime never reads it.
"""

import dataclasses
from collections.abc import Collection

from seqjax.config import DataConfig
from seqjax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Domain:
    """One domain of the corpus: its name here, its `meta.redpajama_set_name` and its published share of bytes."""

    name: str
    set_name: str
    share: float


@dataclasses.dataclass(frozen=True)
class Regime:
    """The names of the domains that a run trains on and of those that it is evaluated on."""

    train: tuple[str, ...]
    eval: tuple[str, ...]


DOMAINS = (
    Domain("commoncrawl", "RedPajamaCommonCrawl", 0.522),
    Domain("c4", "RedPajamaC4", 0.267),
    Domain("github", "RedPajamaGithub", 0.052),
    Domain("arxiv", "RedPajamaArXiv", 0.046),
    Domain("book", "RedPajamaBook", 0.042),
    Domain("wikipedia", "RedPajamaWikipedia", 0.038),
    Domain("stackexchange", "RedPajamaStackExchange", 0.033),
)
NAMES = tuple(d.name for d in DOMAINS)
BY_SET_NAME = {d.set_name: d.name for d in DOMAINS}
SHARES = {d.name: d.share for d in DOMAINS}

REGIMES = {
    "limited": Regime(
        train=("commoncrawl", "c4"),
        eval=("commoncrawl", "c4", "arxiv", "github", "stackexchange"),
    ),
    "mixed": Regime(train=NAMES, eval=NAMES),
}


def resolve(
    regime: Regime, *, train: tuple[str, ...], evaluate: tuple[str, ...], known: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the domains to train on and to evaluate (in-domain first); explicit lists replace the regime's.

    Raises `UserError` for a domain that is not in `known` or that is listed twice.
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
    """Return the domains to train on and to evaluate, of a corpus with certain ones to train on and to evaluate on.

    If all are SlimPajama's, the regime says which; a corpus with domains of its own has them all evaluated. Raises
    `UserError` for a domain that the corpus lacks, with `where` it is and how to `fix` that, or if nothing says which
    of its own domains to train on.
    """
    known = {*train, *evaluate}
    own = not known <= set(NAMES)
    if own and config.regime != "mixed" and len(known) > 1 and not config.train_domains:
        raise UserError(
            f"{where} has the domains {', '.join(sorted(known))}: name those to train on in config.data.train_domains; "
            "the others are evaluated out of domain. config.data.regime='mixed' trains on all."
        )
    domains = tuple(sorted(known))
    chosen = resolve(
        Regime(train=domains, eval=domains) if own else REGIMES[config.regime],
        train=config.train_domains,
        evaluate=config.eval_domains,
        known=domains if own else NAMES,
    )
    for key, wanted, present in (("train", chosen[0], train), ("eval", chosen[1], evaluate)):
        absent = [domain for domain in wanted if domain not in present]
        if absent:
            splits = "train" if key == "train" else "validation or train"
            raise UserError(
                f"{where} has no {splits} blocks of {', '.join(absent)}, which config.data.regime={config.regime!r} "
                f"needs; {fix}, or name those to use in config.data.{key}_domains. "
                f"Present: {', '.join(sorted(present)) or 'none'}."
            )
    return chosen
