"""SlimPajama's seven domains.

`share` is the published share of a domain in the bytes of the 627B-token corpus. Block corpora count their own tokens
instead; the streaming mode, which cannot count in advance, uses these. Code and TeX have fewer bytes per
token than prose, so the token shares of github and arxiv are somewhat higher.

The Book domain contains books3. It can be left out with `--domains` of `seqjax.data.prepare` and
`config.data.train_domains`; the limited regime never reads it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Domain:
    """One domain of the corpus: its name here, its `meta.redpajama_set_name` and its published share of bytes."""

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
