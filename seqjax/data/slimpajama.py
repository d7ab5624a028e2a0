"""SlimPajama's seven domains with their published shares.

`share` is a domain's published share of the bytes in the 627B-token corpus. Prepared blocks count their actual tokens
instead. Streaming cannot count in advance and uses these shares. Code and TeX have fewer bytes per token than prose, so
the token shares of github and arxiv are somewhat higher.

The Book domain contains books3. To leave it out, use `--domains` of `seqjax prepare` and `config.data.train_domains`.
The limited regime never reads it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Domain:
    """A domain's name here, its `meta.redpajama_set_name`, and its byte share."""

    name: str
    set_name: str
    share: float


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
