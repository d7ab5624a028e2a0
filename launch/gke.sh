#!/usr/bin/env bash
# Trains on a GKE cluster of TPUs or GPUs through xpk (https://github.com/AI-Hypercomputer/xpk, installed apart).
#
#   launch/gke.sh --cluster=NAME --workload=NAME --device=v5litepod-8 --image=IMAGE [--slices=N] [--dry_run] \
#     -- --config=NAME_OR_FILE[:SIZE] --workdir=DIR [--config.KEY=VALUE ...]
#
# --device   TPU type, or a GPU type as xpk names it (h100-80gb-8)
# --image    made from launch/Dockerfile and pushed where the cluster can read it
# --slices   slices of that type that train one model together; 1 without it
# --dry_run  print the command and start nothing
#
# DIR must be on a volume that every pod mounts.
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
    *) echo "error: $1 is unknown; what the training command gets stands after --." >&2; exit 2 ;;
  esac
  shift
done
for needed in cluster workload device image; do
  [[ -n ${!needed} ]] || { echo "error: --$needed= is missing; see the head of launch/gke.sh." >&2; exit 2; }
done
[[ " $* " =~ " --config=" && " $* " =~ " --workdir=" ]] ||
  { echo "error: give --config=... and --workdir=... after --." >&2; exit 2; }

# Words for another shell, which parses them once more.
quoted() { local word; for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done; }

# GPUs are requested with another flag of xpk, and counted in nodes.
case $device in
  h100-* | h200-* | b200-* | a100-* | l4-*) kind=(--device-type="$device" --num-nodes="$slices") ;;
  *) kind=(--tpu-type="$device" --num-slices="$slices") ;;
esac
# A restarted workload goes on in its workdir, so a preempted machine costs the steps since the last checkpoint. Pods wait
# for one another, because each of them may have to fetch the image first.
command=(xpk workload create --cluster "$cluster" --workload "$workload" "${kind[@]}" --docker-image "$image"
  --max-restarts 10 --command "python -m seqjax.main --distributed --start_timeout=600 $(quoted "$@")")
if $dry_run; then
  printf '%q ' "${command[@]}"; echo
else
  exec "${command[@]}"
fi
