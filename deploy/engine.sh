#!/usr/bin/env bash
# Container engine for tests, on hosts without one (Debian, as root): `engine.sh start` installs and starts dockerd unless
# one answers, and says why where it cannot; `engine.sh stop` ends the one that it started.
set -euo pipefail
pid_file=/run/hurray-test-engine.pid

start() {
  if docker version >/dev/null 2>&1; then return; fi
  if [ "$(id -u)" != 0 ]; then echo "No container engine: not root" >&2; return; fi
  missing=()
  command -v dockerd >/dev/null || missing+=(docker.io iptables)
  command -v docker-compose >/dev/null || missing+=(docker-compose)
  command -v debootstrap >/dev/null || missing+=(debootstrap)
  command -v tc >/dev/null || missing+=(iproute2)
  command -v nft >/dev/null || missing+=(nftables)
  compgen -G "/usr/lib/*/faketime/libfaketimeMT.so.1" >/dev/null || missing+=(libfaketime)
  if ((${#missing[@]})); then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install --yes -qq --no-install-recommends "${missing[@]}" >/dev/null ||
      { echo "No container engine: it cannot be installed" >&2; return; }
  fi
  pgrep -x dockerd >/dev/null || rm -f /run/docker.pid /run/docker/containerd/containerd.pid
  setsid dockerd --log-level warn >/var/log/hurray-test-engine.log 2>&1 </dev/null &
  echo $! >"$pid_file"
  for _ in $(seq 120); do
    if docker version >/dev/null 2>&1; then return; fi
    if ! kill -0 "$(cat "$pid_file")" 2>/dev/null; then break; fi
    sleep 0.25
  done
  echo "No container engine: dockerd does not start" >&2
  tail -n 20 /var/log/hurray-test-engine.log >&2
  stop
}

stop() {
  [ -f "$pid_file" ] || return 0
  pid=$(cat "$pid_file")
  rm -f "$pid_file"
  kill "$pid" 2>/dev/null || return 0
  for _ in $(seq 120); do kill -0 "$pid" 2>/dev/null || return 0; sleep 0.25; done
  kill -KILL "$pid"
}

case "${1:-}" in
  start | stop) "$1" ;;
  *) echo "usage: $0 start|stop" >&2; exit 2 ;;
esac
