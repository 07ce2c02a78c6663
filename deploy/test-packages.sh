#!/usr/bin/env bash
# Installs the Debian packages that only the tests use, where they are missing and this user may.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v chromium >/dev/null || missing+=(chromium fonts-noto-cjk)
command -v mvn >/dev/null || missing+=(maven)
command -v java >/dev/null || missing+=(openjdk-17-jre-headless)
[ ${#missing[@]} -eq 0 ] && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "missing: ${missing[*]} (tests that need them will say so)" >&2
fi
