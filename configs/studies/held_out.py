"""Six 110M models trained on all domains except one, and tested on this domain.

    seqjax study --study=held_out:demo --out=runs/held_out                 without GitHub (demo: Python)
    seqjax study --study=held_out:small,arxiv --out=runs/held_out-arxiv    without another domain

The paper's limited regime changes the training and the test domains at once. Here the training mix is as wide as
possible. Models are compared on the held-out domain at equal mean loss on the other domains.

Results: lab/results/index.md
"""

from seqjax import presets

HELD_OUT = {"demo": "python", "small": "github", "paper": "github"}


def get_study(size="demo"):
    """Return the study for SIZE[,DOMAIN].

    SIZE is demo, small or paper; DOMAIN is held out.
    """
    paper = presets.load("studies/_paper")
    size, _, domain = size.partition(",")
    known = sum(paper.domains(size), ())
    domain = presets.pick(dict.fromkeys(known, domain), domain, kind="domain") if domain else HELD_OUT[size]
    others = tuple(name for name in known if name != domain)
    return paper.study(
        f"Six models at 110M, trained without {domain}",
        paper.SIX,
        size=size,
        regime="mixed",
        settings=f"data.train_domains={others!r}",
        folder=f"without-{domain}",
        domains=(domain,),
        against=others,
    )
