#!/usr/bin/env bash
# Builds the image, as $IMAGE (default hurray-transfer), with the base image if there is none and no registry reachable, and
# with this host's own ways to packages: its certificates, pip.conf and Debian mirror. Arguments go to docker build.
set -euo pipefail
cd "$(dirname "$0")/.."

# BuildKit is in Debian's client, and beside newer ones as the plugin buildx.
for docker in $(which -a docker); do
  major=$("$docker" version --format '{{.Client.Version}}' 2>/dev/null | cut -d. -f1) || true
  if [ -n "$major" ] && { [ "$major" -lt 23 ] || "$docker" buildx version >/dev/null 2>&1; }; then break; fi
  docker=
done
if [ -z "${docker:-}" ]; then
  echo "No docker client here has BuildKit: install docker-buildx" >&2
  exit 1
fi

"$docker" image inspect debian:bookworm-slim >/dev/null 2>&1 || "$docker" pull --quiet debian:bookworm-slim 2>/dev/null ||
  deploy/base-image.sh

secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT
cat "${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}" >"$secrets/ca" 2>/dev/null || : >"$secrets/ca"
python3 - >"$secrets/pip" <<'PIP'
import configparser, os, pathlib
settings = {}
for path in ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"):
    parser = configparser.RawConfigParser()
    parser.read(pathlib.Path(path).expanduser())
    if parser.has_section("global"):
        settings.update(parser["global"])
settings.update({name: os.environ[f"PIP_{name.upper().replace('-', '_')}"] for name in ("index-url", "trusted-host", "timeout")
                 if f"PIP_{name.upper().replace('-', '_')}" in os.environ})
print("[global]\ncert = /etc/ssl/certs/ca-certificates.crt")
for name in ("index-url", "trusted-host", "timeout"):
    if name in settings:
        print(f"{name} = {settings[name]}")
PIP
cat /etc/apt/sources.list.d/debian.sources >"$secrets/apt" 2>/dev/null || : >"$secrets/apt"

DOCKER_BUILDKIT=1 "$docker" build --network host --progress plain --file deploy/Dockerfile --tag "${IMAGE:-hurray-transfer}" \
  --secret id=ca,src="$secrets/ca" --secret id=pip,src="$secrets/pip" --secret id=apt,src="$secrets/apt" "$@" .
