#!/usr/bin/env bash
# Installs the Debian packages that only the tests use, where they are missing and this user may.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v chromium >/dev/null || missing+=(chromium fonts-noto-cjk)
command -v mvn >/dev/null || missing+=(maven)
command -v npm >/dev/null || missing+=(npm)
command -v java >/dev/null || missing+=(openjdk-17-jre-headless)
# Prometheus is unpacked and not installed: its package would start a service. (apt checks what it downloads.)
prometheus=.cache/prometheus
if command -v promtool >/dev/null || [ -x "$prometheus/usr/bin/promtool" ]; then prometheus=; fi
[ ${#missing[@]} -eq 0 ] && [ -z "$prometheus" ] && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing ${missing[*]} ${prometheus:+prometheus}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  if [ -n "$prometheus" ]; then
    download=$(mktemp -d)
    trap 'rm -rf "$download"' EXIT
    (cd "$download" && apt-get download -qq prometheus 2>/dev/null) && mkdir -p "$prometheus" && dpkg -x "$download"/prometheus_*.deb "$prometheus"
  fi
  [ ${#missing[@]} -eq 0 ] || apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
  echo "missing: ${missing[*]} ${prometheus:+prometheus} (tests that need them will say so)" >&2
fi
