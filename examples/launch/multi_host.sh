#!/usr/bin/env bash
# Train on hosts that are yours to log in to, without a scheduler.
#
#   export RAY_AUTH_TOKEN=$(openssl rand -hex 32)               once; the same on every host
#   examples/launch/multi_host.sh join HEAD_ADDRESS             on every host but the first: stays until the cluster ends
#   examples/launch/multi_host.sh head HOSTS [options of `shmstage run`]     on the first: trains, then stops its Ray
#
# The first host is one of the HOSTS, too. OUT must be a directory that all of them share. Every host's name has to
# resolve to the address by which the others reach it (`getent hosts "$(hostname)"`), not to 127.0.x.x: gloo and NCCL
# tell each other names. The ports between the hosts must be open.
set -euo pipefail

: "${RAY_AUTH_TOKEN:?a secret that all hosts share: export RAY_AUTH_TOKEN=\$(openssl rand -hex 32) on one, copy it}"
# Ray would start its workers, and with them the trainers, at nice 15
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_worker_niceness=0
OUT=${OUT:-runs/multi}
PORT=${PORT:-6379}
ADDRESS=${ADDRESS:-$(getent hosts "$(hostname)" | awk '{print $1; exit}')}
# Ray's object store and the pool of micro-batches share /dev/shm; `shmstage budget` says how much the pool needs
STORE_NBYTES=${STORE_NBYTES:-1000000000}
NODE=(--node-ip-address="$ADDRESS" --object-store-memory="$STORE_NBYTES" --disable-usage-stats)

case "${1:-}" in
  head)
    hosts=${2:?how many hosts}
    shift 2
    ray start --head --port="$PORT" --include-dashboard=false "${NODE[@]}"
    trap 'ray stop' EXIT
    resume=()
    if compgen -G "$OUT/checkpoints/*" >/dev/null; then
      resume=(--resume)
    fi
    # waits up to --start-timeout-s until all hosts have joined
    shmstage launch --address "$ADDRESS:$PORT" --hosts "$hosts" --out "$OUT" --checkpoint-every 5 "${resume[@]}" "$@"
    ;;
  join)
    head=${2:?address of the head}
    until ray status --address "$head:$PORT" >/dev/null 2>&1; do
      sleep 2
    done
    exec ray start --address="$head:$PORT" --block "${NODE[@]}"
    ;;
  *)
    echo "usage: $0 head HOSTS [options of shmstage run] | join HEAD_ADDRESS" >&2
    exit 2
    ;;
esac
