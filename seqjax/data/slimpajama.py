"""SlimPajama's seven domains and the two regimes of the protocol.

*limited* trains on CommonCrawl and C4 and tests on them and, out of domain, on arXiv, GitHub and
StackExchange. *mixed* trains and tests on all seven. Tokens are drawn in the natural shares unless weights
are given.

`share` is the published share of bytes of the 627B-token corpus. Block corpora count their own tokens
instead; the streaming mode, which cannot count beforehand, uses these. Code and TeX have fewer bytes per
token than prose, so shares by tokens are somewhat higher for github and arxiv.

The Book domain contains books3. Leave it out with `--domains` of `seqjax.data.prepare` and
`config.data.train_domains`; the limited regime never reads it.
"""

import dataclasses

from seqjax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Domain:
    """One source of the corpus: our name, its `meta.redpajama_set_name`, its published share of bytes."""

    name: str
    set_name: str
    share: float


@dataclasses.dataclass(frozen=True)
class Regime:
    """What a run trains on and what it is tested on, by domain name."""

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
    """The domains to train on and to evaluate (in-domain first); explicit lists replace the regime's."""
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
