#!/usr/bin/env bash
# Train on a GKE cluster with TPUs or GPUs through xpk (https://github.com/AI-Hypercomputer/xpk; install it separately).
#
#   launch/gke.sh --cluster=NAME --workload=NAME --device=v5litepod-8 --image=IMAGE [--slices=N] [--dry_run] \
#     -- --config=NAME_OR_FILE[:SIZE] --workdir=DIR [--config.KEY=VALUE ...]
#
# --device   TPU type, or a GPU type as xpk names it (h100-80gb-8)
# --image    built from launch/Dockerfile, in a registry that the cluster can read
# --slices   number of slices that train one model together (1)
# --dry_run  print the command and start nothing
#
# DIR must be on a volume that all pods mount.
set -euo pipefail

cluster="" workload="" device="" image="" slices=1 dry_run=false
while (( $# )); do
  case $1 in
    --cluster=*) cluster=${1#*=} ;;
    --workload=*) workload=${1#*=} ;;
    --device=*) device=${1#*=} ;;
    --image=*) image=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    --dry_run) dry_run=true ;;
    --) shift; break ;;
    *) echo "error: $1 is unknown; put arguments for the training command after --." >&2; exit 2 ;;
  esac
  shift
done
for needed in cluster workload device image; do
  [[ -n ${!needed} ]] || { echo "error: --$needed= is missing; see the head of launch/gke.sh." >&2; exit 2; }
done
[[ " $* " =~ " --config=" && " $* " =~ " --workdir=" ]] ||
  { echo "error: give --config=... and --workdir=... after --." >&2; exit 2; }

# Quote words for another shell, which parses them again.
quoted() { local word; for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done; }

# xpk has a different flag for GPUs, and counts nodes instead of slices.
case $device in
  h100-* | h200-* | b200-* | a100-* | l4-*) kind=(--device-type="$device" --num-nodes="$slices") ;;
  *) kind=(--tpu-type="$device" --num-slices="$slices") ;;
esac
# A restarted workload resumes from its workdir, so a preemption only costs the steps since the last checkpoint. The
# start timeout is long because each pod may have to pull the image first.
command=(xpk workload create --cluster "$cluster" --workload "$workload" "${kind[@]}" --docker-image "$image"
  --max-restarts 10 --command "python -m seqjax.main --distributed --start_timeout=600 $(quoted "$@")")
if $dry_run; then
  printf '%q ' "${command[@]}"; echo
else
  exec "${command[@]}"
fi
