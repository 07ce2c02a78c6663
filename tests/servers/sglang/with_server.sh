#!/usr/bin/env bash
# with_server.sh COMMAND...: installs SGLang into ${SGLANG_FOLDER:-.cache/sglang} if need be, starts it on a free port, runs
# the command with SGLANG_TEST_URL set, and stops it. The exit code is the command's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${SGLANG_FOLDER:-.cache/sglang}
log=$folder/server.log
"$here/install.sh" "$folder"
PORT=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export PORT SGLANG_TEST_URL=http://127.0.0.1:$PORT
SECONDS=0
"$here/start.sh" "$folder" >"$log" 2>&1 &
server=$!
# SGLang ends its own child processes when it is asked to stop.
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true' EXIT
until curl --silent --fail --max-time 2 --output /dev/null "$SGLANG_TEST_URL/ready"; do
  if [ "$SECONDS" -gt "${START_SECONDS:-900}" ] || ! kill -0 "$server" 2>/dev/null; then
    tail -n 20 "$log" >&2
    echo "SGLang did not start, see $log" >&2
    exit 1
  fi
  sleep 1
done
"$@"
