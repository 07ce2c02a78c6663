#!/usr/bin/env bash
# with_server.sh COMMAND...: installs vLLM into ${VLLM_FOLDER:-.cache/vllm} if need be, starts it on a free port, runs
# the command with VLLM_TEST_URL set, and stops it. The exit code is the command's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${VLLM_FOLDER:-.cache/vllm}
log=$folder/server.log
"$here/install.sh" "$folder"
PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PORT VLLM_TEST_URL=http://127.0.0.1:$PORT
SECONDS=0
read -r -a flags <<<"${VLLM_FLAGS:-}"
"$here/start.sh" "$folder" "${flags[@]}" >"$log" 2>&1 &
server=$!
# vLLM ends its own child processes when it is asked to stop.
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true' EXIT
until curl --silent --fail --max-time 2 --output /dev/null "$VLLM_TEST_URL/health"; do
  if [ "$SECONDS" -gt "${START_SECONDS:-900}" ] || ! kill -0 "$server" 2>/dev/null; then
    tail -n 20 "$log" >&2
    echo "vLLM did not start, see $log" >&2
    exit 1
  fi
  sleep 1
done
"$@"
