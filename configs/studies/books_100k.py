r"""Figure 7 at its length: the models of studies/books_16k at 102,400 tokens.

    seqjax prepare --source=CORPUS --out=data/books-102400 --tokenizer=mixtral --seq_len=102400 \
                   --domains=book,arxiv,github
    seqjax study --study=books_100k --out=runs/books_100k --jobs=2
    seqjax repeats --workdir=runs/books_100k/Mamba-2 --lengths=2048,102400

The models are trained on books. Top-1 Chunk with exact selection is a second reference and shows the loss from cheaper
rules. Each step has one sequence, so the same number of tokens takes a third fewer steps than in books_16k.
`model.remat=dots` saves matrix products for the backward pass and recomputes the rest; a model then takes 25 to 30 GiB.

Paper: arXiv 2505.18522, figure 7. Results: lab/results/books_100k
"""

from seqjax import presets

LONG = "train.steps=1000,train.batch_size=1,optim.warmup_steps=100,eval.tokens=819200,model.remat=dots"


def get_study():
    """Return the study at 102,400 tokens."""
    books = presets.load("studies/books_16k")
    base = "model.mixer.rope_base=1e6"
    models = books.models(base)
    models["RWKV-7"] = ("rwkv7:110m", 1)  # at 2e-3 its loss is not finite at step 117
    shell = f"rwkv7_shell:110m,{base},model.mixer.core=full,model.mixer.qk_norm=True"
    models["RWKV-7 shell, full attention"] = (shell, 1)
    references = (books.REFERENCE, "Top-1 Chunk, exact")
    return books.study("books_100k", models, seq_len=102400, common=LONG, references=references)
