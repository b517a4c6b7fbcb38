#!/usr/bin/env bash
# Train on this host. One host needs no Ray.
#
#   examples/launch/single_host.sh [options of `shmstage run`]
#   HOSTS=2 examples/launch/single_host.sh …      the same with so many Ray nodes on this machine, to try `launch` out
#
# OUT (default runs/single) is where the run lies; started again, it goes on from its newest checkpoint.
set -euo pipefail

OUT=${OUT:-runs/single}
HOSTS=${HOSTS:-1}

resume=()
if compgen -G "$OUT/checkpoints/*" >/dev/null; then
  resume=(--resume)
fi
if [ "$HOSTS" -eq 1 ]; then
  exec shmstage run --out "$OUT" --checkpoint-every 5 "${resume[@]}" "$@"
fi
exec shmstage launch --local-cluster --hosts "$HOSTS" --out "$OUT" --checkpoint-every 5 "${resume[@]}" "$@"
