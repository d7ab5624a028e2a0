"""Run lm-evaluation-harness's own command line with the model type `seqjax`.

`python -m seqjax.evals.lm_eval.cli run --model seqjax --model_args workdir=runs/x --tasks arc_easy` equals `lm_eval
run` with these arguments. lm_eval knows models from other packages only after their import, so this module imports it
first.
"""

from lm_eval.__main__ import cli_evaluate

from seqjax.evals.lm_eval import lm as lm  # registers the model

if __name__ == "__main__":
    cli_evaluate()
