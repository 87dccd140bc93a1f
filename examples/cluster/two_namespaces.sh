#!/usr/bin/env bash
# Try two nodes on one Linux machine: two network namespaces that reach each other by one cable, and nothing else.
#
#     sudo RUN=$PWD/run TORCHRUN=$(which torchrun) bash two_namespaces.sh preset:mqa-tiny --data README.md --device cpu
set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
A=heddle-a-$$ B=heddle-b-$$

trap 'ip netns delete "$A"; ip netns delete "$B"' EXIT

ip netns add "$A"
ip netns add "$B"
ip link add "a$$" netns "$A" type veth peer name "b$$" netns "$B"
ip -n "$A" address add 10.77.0.1/24 dev "a$$"
ip -n "$B" address add 10.77.0.2/24 dev "b$$"
for end in "$A a$$" "$B b$$"; do
  read -r namespace cable <<<"$end"
  ip -n "$namespace" link set lo up
  ip -n "$namespace" link set "$cable" up
done

export RANKS_PER_NODE=${RANKS_PER_NODE:-2}
ip netns exec "$A" env GLOO_SOCKET_IFNAME="a$$" bash "$HERE/torchrun_two_nodes.sh" 0 10.77.0.1 "$@" &
FIRST=$!
ip netns exec "$B" env GLOO_SOCKET_IFNAME="b$$" bash "$HERE/torchrun_two_nodes.sh" 1 10.77.0.1 "$@" &
SECOND=$!
CODE=0
wait "$FIRST" || CODE=$?
wait "$SECOND" || CODE=$?
exit "$CODE"
