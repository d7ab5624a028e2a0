#!/usr/bin/env bash
# Trains on a Cloud TPU VM: creates it, installs a wheel of seqjax on every worker, starts the run on all of them.
#
#   launch/tpu_vm.sh --name=NAME --zone=ZONE --type=v5litepod-8 --version=v2-alpha-tpuv5-lite --wheel=dist/seqjax-0.1.0-py3-none-any.whl \
#     [--dry_run] -- --config=NAME_OR_FILE[:SIZE] --workdir=DIR [--config.KEY=VALUE ...]
#
# --name, --zone, --type, --version   as in `gcloud compute tpus tpu-vm create`
# --wheel    made by `python -m pip wheel . --no-deps --wheel-dir=dist`
# --dry_run  print the commands and start nothing
#
# On several workers (a pod slice) DIR must be on a disk that all of them mount, e.g. Filestore. The machine is not
# deleted at the end: the last line says how.
set -euo pipefail

name="" zone="" type="" version="" wheel="" dry_run=false
while (( $# )); do
  case $1 in
    --name=*) name=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --wheel=*) wheel=${1#*=} ;;
    --dry_run) dry_run=true ;;
    --) shift; break ;;
    *) echo "error: $1 is unknown; what the training command gets stands after --." >&2; exit 2 ;;
  esac
  shift
done
for needed in name zone type version wheel; do
  [[ -n ${!needed} ]] || { echo "error: --$needed= is missing; see the head of launch/tpu_vm.sh." >&2; exit 2; }
done
[[ " $* " =~ " --config=" && " $* " =~ " --workdir=" ]] ||
  { echo "error: give --config=... and --workdir=... after --." >&2; exit 2; }

# Words for another shell, which parses them once more.
quoted() { local word; for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done; }
run() { if $dry_run; then printf '%q ' "$@"; echo; else "$@"; fi; }
tpu=(gcloud compute tpus tpu-vm)
on_all=("${tpu[@]}" ssh "$name" "--zone=$zone" --worker=all --command)

run "${tpu[@]}" create "$name" "--zone=$zone" "--accelerator-type=$type" "--version=$version"
run "${tpu[@]}" scp "$wheel" "$name:/tmp/" "--zone=$zone" --worker=all
run "${on_all[@]}" "python3 -m venv ~/seqjax && ~/seqjax/bin/pip install $(quoted "/tmp/$(basename -- "$wheel")[tpu]")"
# --distributed: a slice has one process per worker; TPU metadata tells each of the others. They wait for one another,
# because gcloud reaches them one after the other.
run "${on_all[@]}" "\$HOME/seqjax/bin/python -m seqjax.main --distributed --start_timeout=600 $(quoted "$@")"
echo "Delete the machine when it is no longer needed: gcloud compute tpus tpu-vm delete $(quoted "$name" "--zone=$zone")"
