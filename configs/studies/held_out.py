"""Six models at 110M trained on all domains but one, and tested on that one.

    seqjax study --study=held_out:demo --out=runs/held_out                 without GitHub (demo: Python)
    seqjax study --study=held_out:small,arxiv --out=runs/held_out-arxiv    without a domain of one's choice

The paper's limited regime changes what is trained on and what is tested at once. Here the training mix is as wide as
it can be, and models are compared on the domain left out at the same mean loss of the others.

Results: lab/results/index.md
"""

from seqjax import presets

HELD_OUT = {"demo": "python", "small": "github", "paper": "github"}


def get_study(size="demo"):
    """Return the study of SIZE[,DOMAIN]: demo, small or paper, and the domain that is left out."""
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
