#!/usr/bin/env bash
# Train on a Cloud TPU VM: create it, install a seqjax wheel on all workers, and start the run on all of them.
#
#   launch/tpu_vm.sh --name=NAME --zone=ZONE --type=v5litepod-8 --version=v2-alpha-tpuv5-lite --wheel=dist/seqjax-0.1.0-py3-none-any.whl \
#     [--dry_run] -- --config=NAME_OR_FILE[:SIZE] --workdir=DIR [--config.KEY=VALUE ...]
#
# --name, --zone, --type, --version   as in `gcloud compute tpus tpu-vm create`
# --wheel    build it with `python -m pip wheel . --no-deps --wheel-dir=dist`
# --dry_run  print the commands and start nothing
#
# With several workers (a pod slice), DIR must be on a disk that all workers mount, such as Filestore. The machine is
# not deleted at the end; the last output line has the command.
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
    *) echo "error: $1 is unknown; put arguments for the training command after --." >&2; exit 2 ;;
  esac
  shift
done
for needed in name zone type version wheel; do
  [[ -n ${!needed} ]] || { echo "error: --$needed= is missing; see the head of launch/tpu_vm.sh." >&2; exit 2; }
done
[[ " $* " =~ " --config=" && " $* " =~ " --workdir=" ]] ||
  { echo "error: give --config=... and --workdir=... after --." >&2; exit 2; }

# Quote words for another shell, which parses them again.
quoted() { local word; for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done; }
run() { if $dry_run; then printf '%q ' "$@"; echo; else "$@"; fi; }
tpu=(gcloud compute tpus tpu-vm)
on_all=("${tpu[@]}" ssh "$name" "--zone=$zone" --worker=all --command)

run "${tpu[@]}" create "$name" "--zone=$zone" "--accelerator-type=$type" "--version=$version"
run "${tpu[@]}" scp "$wheel" "$name:/tmp/" "--zone=$zone" --worker=all
run "${on_all[@]}" "python3 -m venv ~/seqjax && ~/seqjax/bin/pip install $(quoted "/tmp/$(basename -- "$wheel")[tpu]")"
# --distributed: a slice has one process per worker, and they find each other through TPU metadata. The start timeout is
# long because gcloud connects to the workers one at a time.
run "${on_all[@]}" "\$HOME/seqjax/bin/python -m seqjax.main --distributed --start_timeout=600 $(quoted "$@")"
echo "Delete the machine when it is no longer needed: gcloud compute tpus tpu-vm delete $(quoted "$name" "--zone=$zone")"
