#!/usr/bin/env bash
# Evaluation suite: train several architectures, and evaluate the loss by domain, a needle in a text (S-NIAH), and
# lm-evaluation-harness tasks that need no network. Also train small models with the same mixers on recall and state
# tasks.
#
#   lab/suite/suite.sh --out=DIR [--configs=a,b] [--size=demo] [--jobs=N] [--lengths=512,1024] [--samples=N] [--tasks=local]
#                     [--recall=MODELS] [--recall_size=demo] [--dry_run] [--config.KEY=VALUE ...]
#
# --configs      configs to train (transformer_pp,top1_chunk,mamba2)
# --jobs         parallel configs, and parallel recall processes (1); GPUs are assigned in turn and shared if needed
# --lengths      S-NIAH prompt lengths in tokens (1024)
# --samples      S-NIAH samples per length (100)
# --tasks        tasks for `seqjax harness` (local)
# --recall       labels for `seqjax recall`, separated by ; (the mixers of the three default configs)
# --config.*     passed to each training, as in `seqjax train`
# --dry_run      print the commands and start nothing
#
# DIR/report.md is the summary (data: runs.json). DIR/CONFIG (report.md, niah.json, harness/table.md) and DIR/recall
# have the details. With --jobs, the output for a config goes to DIR/CONFIG.log. The same command resumes after an
# interruption.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

out="" configs=transformer_pp,top1_chunk,mamba2 size=demo jobs=1 lengths=1024 samples=100 tasks=local
recall="Transformer++;Top-1 Chunk, exact;Mamba-2" recall_size=demo dry_run=false settings=()
for argument in "$@"; do
  value=${argument#*=}
  case $argument in
    --out=*) out=$value ;;
    --configs=*) configs=$value ;;
    --size=*) size=$value ;;
    --jobs=*) jobs=$value ;;
    --lengths=*) lengths=$value ;;
    --samples=*) samples=$value ;;
    --tasks=*) tasks=$value ;;
    --recall=*) recall=$value ;;
    --recall_size=*) recall_size=$value ;;
    --dry_run) dry_run=true ;;
    --config.*=*) settings+=("$argument") ;;
    *) echo "error: $argument is not an option; the top of lab/suite/suite.sh lists the options." >&2; exit 2 ;;
  esac
done
if [[ -z $out ]]; then
  echo "error: --out is missing; give a directory, such as --out=runs/suite." >&2
  exit 2
fi
if [[ ! $jobs =~ ^[1-9][0-9]*$ ]]; then
  echo "error: --jobs=$jobs is not a number of processes; give --jobs=1 or more." >&2
  exit 2
fi

run() {
  printf '+ '; printf '%q ' "$@"; echo
  $dry_run || "$@"
}

# Train and evaluate one config.
evaluate_run() {
  local workdir=$out/$1
  run python -m seqjax.main --config="$1:$size" --workdir="$workdir" ${settings[@]+"${settings[@]}"}
  run python -m seqjax.evals.niah --workdir="$workdir" --lengths="$lengths" --samples="$samples" --batch_size=32
  run python -m seqjax.evals --workdir="$workdir" --tasks="$tasks"
}

# Assign the n-th GPU to the next process, with a share of its memory if there are fewer GPUs than jobs.
take_gpu() {
  local gpus n
  if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
    IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
  else
    n=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU') || return 0
    read -ra gpus <<< "$(seq -s ' ' 0 $((n - 1)))"
  fi
  n=${#gpus[@]}
  export CUDA_VISIBLE_DEVICES=${gpus[$1 % n]}
  export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION-.$((90 / ((jobs + n - 1) / n)))}
}

IFS=, read -ra names <<< "$configs"
if ((jobs == 1)) || $dry_run; then
  for name in "${names[@]}"; do evaluate_run "$name"; done
else
  # Each job has a separate process group, so a signal to this script can be forwarded to all of its processes.
  set -m
  mkdir -p "$out"
  groups=() failed=()
  stop() {
    for group in ${groups[@]+"${groups[@]}"}; do kill -TERM -- "-$group" 2>/dev/null || true; done
    wait
    exit 130
  }
  trap stop INT TERM
  for ((first = 0; first < ${#names[@]}; first += jobs)); do
    groups=() now=("${names[@]:first:jobs}")
    for slot in "${!now[@]}"; do
      (take_gpu "$slot"; evaluate_run "${now[$slot]}") > "$out/${now[$slot]}.log" 2>&1 &
      groups+=($!)
      echo "${now[$slot]}: $out/${now[$slot]}.log"
    done
    for slot in "${!now[@]}"; do wait "${groups[$slot]}" || failed+=("${now[$slot]}"); done
  done
  trap - INT TERM
  set +m
  if ((${#failed[@]})); then
    for name in "${failed[@]}"; do tail -n 5 "$out/$name.log" >&2; done
    echo "error: failed: ${failed[*]}; see their logs in $out. The same command resumes." >&2
    exit 1
  fi
fi
run python -m seqjax.evals.recall --size="$recall_size" --models="$recall" --jobs="$jobs" --out="$out/recall"
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} run python -m lab.suite --out="$out"
