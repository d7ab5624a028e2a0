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
