"""Compare recall scores with the losses of finished studies.

    python -m lab.foretell --size=small --out=runs/recall --study=lab/results/trunks_110m --study=lab/results/hybrids

This reads the results of `seqjax recall --size=SIZE --out=OUT` and the studies. Their models must have the labels of
`seqjax recall`. It writes report.md, foretell.csv and foretell.png to OUT/foretell, and trains nothing.
"""

import sys

from lab.foretell import page
from seqjax import store
from seqjax.command_line import command_parser, run_command
from seqjax.evals.recall.__main__ import known, labels, require_same_settings
from seqjax.evals.recall.setups import MODELS, SETUPS


def main(argv: list[str]) -> None:
    """Write the report."""
    parser = command_parser("foretell", description=__doc__)
    parser.prog = "python -m lab.foretell"
    parser.add_argument("--size", required=True, help=" or ".join(SETUPS))
    parser.add_argument("--out", default="runs/recall", help="the directory of the recall results (runs/recall)")
    parser.add_argument("--models", default="", help="labels separated by ; or , (all models of the studies)")
    help_text = "results of `seqjax study`; repeat it to add the models of another study"
    parser.add_argument("--study", action="append", required=True, help=help_text)
    args = parser.parse_args(argv)
    setup = SETUPS[known("size", [args.size], SETUPS)[0]]
    chosen = known("models", labels(args.models), MODELS) if args.models else None
    out, studies = store.local(args.out, "--out"), [store.local(study, "--study") for study in args.study]
    require_same_settings(setup, out)
    sys.stdout.write(f"Wrote {page.write(out, studies, setup, chosen=chosen)}\n")


if __name__ == "__main__":
    run_command(main)
