#!/usr/bin/env bash
# Train on the GPUs of this machine, in one process.
#
#   launch/local.sh [--gpus=N] [--dry_run] --config=NAME_OR_FILE[:SIZE] [--workdir=DIR] [--config.KEY=VALUE ...]
#
# --gpus     use the first N visible GPUs (all)
# --dry_run  print the command and start nothing
set -euo pipefail

gpus="" dry_run=false arguments=()
for argument in "$@"; do
  case $argument in
    --gpus=*) gpus=${argument#*=} ;;
    --dry_run) dry_run=true ;;
    *) arguments+=("$argument") ;;
  esac
done
if [[ ! " ${arguments[*]-} " =~ " --config=" ]]; then
  echo "error: say what to train: launch/local.sh --config=top1_chunk:110m" >&2
  exit 2
fi
if [[ -n $gpus && ! $gpus =~ ^[1-9][0-9]*$ ]]; then
  echo "error: --gpus=$gpus is not a number of GPUs; give --gpus=1 or more." >&2
  exit 2
fi

# By default JAX reserves 75% of a GPU's memory. On GPUs with 80 GB, the largest 110M models need more.
environment=(XLA_PYTHON_CLIENT_MEM_FRACTION=0.92)
if [[ -n $gpus ]]; then
  IFS=, read -ra visible <<< "${CUDA_VISIBLE_DEVICES-$(seq -s, 0 $((gpus - 1)))}"
  if (( gpus > ${#visible[@]} )); then
    echo "error: --gpus=$gpus, but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES names ${#visible[@]}." >&2
    exit 2
  fi
  environment+=("CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${visible[*]:0:gpus}")")
fi
command=(env "${environment[@]}" python -m seqjax.main "${arguments[@]}")
if $dry_run; then
  printf '%q ' "${command[@]}"; echo
else
  exec "${command[@]}"
fi
