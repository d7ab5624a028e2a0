#!/usr/bin/env bash
# Trains several architectures and looks at each through every window: loss by domain, a needle in a text (S-NIAH), tasks
# of lm-evaluation-harness that need no network, and small models of the same mixers on recall and state tasks.
#
#   launch/windows.sh --out=DIR [--configs=a,b] [--size=demo] [--lengths=512,1024] [--samples=N] [--tasks=local]
#                     [--recall=MODELS] [--recall_size=demo] [--dry_run] [--config.KEY=VALUE ...]
#
# --configs      configs to train (transformer_pp,top1_chunk,mamba2)
# --lengths      tokens of the S-NIAH prompts (1024), of which --samples each (100)
# --tasks        of `seqjax harness` (local)
# --recall       labels of `seqjax recall`, with ; between them; those of the three configs above without it
# --config.*     passed to the training of each, as in `seqjax train`
# --dry_run      print the commands and start nothing
#
# The same command goes on after an interruption. Results stay in DIR/CONFIG (report.md, niah.json, harness.json) and
# DIR/recall.
set -euo pipefail

out="" configs=transformer_pp,top1_chunk,mamba2 size=demo lengths=1024 samples=100 tasks=local
recall="Transformer++;Top-1 Chunk, exact;Mamba-2" recall_size=demo dry_run=false settings=()
for argument in "$@"; do
  value=${argument#*=}
  case $argument in
    --out=*) out=$value ;;
    --configs=*) configs=$value ;;
    --size=*) size=$value ;;
    --lengths=*) lengths=$value ;;
    --samples=*) samples=$value ;;
    --tasks=*) tasks=$value ;;
    --recall=*) recall=$value ;;
    --recall_size=*) recall_size=$value ;;
    --dry_run) dry_run=true ;;
    --config.*=*) settings+=("$argument") ;;
    *) echo "error: $argument is not an option; launch/windows.sh says at its top which there are." >&2; exit 2 ;;
  esac
done
if [[ -z $out ]]; then
  echo "error: say where results go: launch/windows.sh --out=runs/windows" >&2
  exit 2
fi

run() {
  printf '+ '; printf '%q ' "$@"; echo
  $dry_run || "$@"
}

for config in ${configs//,/ }; do
  workdir=$out/$config
  run python -m seqjax.main --config="$config:$size" --workdir="$workdir" ${settings[@]+"${settings[@]}"}
  run python -m seqjax.harness.niah --workdir="$workdir" --lengths="$lengths" --samples="$samples"
  run python -m seqjax.harness --workdir="$workdir" --tasks="$tasks"
done
run python -m seqjax.harness.recall --size="$recall_size" --models="$recall" --out="$out/recall"
