#!/usr/bin/env bash
# Train on several nodes: run this on each, with its number and the first node's address.
#
#     RUN=/shared/runs/mine bash torchrun_two_nodes.sh NODE_RANK MASTER_ADDR preset:gqa-small --data /shared/books
#
# The rendezvous is static: the first node's address and port are given, and no node has to recognize itself.
set -euo pipefail

NODE_RANK=$1 MASTER_ADDR=$2
shift 2

# --shutdown-timeout: after a signal the ranks save together, which may take longer than torchrun's 30 seconds.
exec "${TORCHRUN:-torchrun}" \
  --nnodes "${NODES:-2}" \
  --nproc-per-node "${RANKS_PER_NODE:-8}" \
  --node-rank "$NODE_RANK" \
  --master-addr "$MASTER_ADDR" \
  --master-port "${MASTER_PORT:-29500}" \
  --max-restarts "${RESTARTS:-3}" \
  --shutdown-timeout 600 \
  -m heddle train "$@" --out "${RUN:?the run, in a folder that all nodes see}"
