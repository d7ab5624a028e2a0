"""The commands of lm-evaluation-harness itself, with `seqjax` among its models.

`python -m seqjax.evals.lm_eval.cli run --model seqjax --model_args workdir=runs/x --tasks arc_easy` is `lm_eval run`
with them. lm_eval finds models of other packages only after their import, which happens here first.
"""

from lm_eval.__main__ import cli_evaluate

from seqjax.evals.lm_eval import lm as lm  # registers the model

if __name__ == "__main__":
    cli_evaluate()
