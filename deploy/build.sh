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

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 - >"$folder/pip" <<'PIP'
import configparser, os, pathlib
settings = {"cert": "/etc/ssl/certs/ca-certificates.crt"}
for path in ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf"):
    parser = configparser.RawConfigParser()
    parser.read(pathlib.Path(path).expanduser())
    if parser.has_section("global"):
        settings |= {name: parser["global"][name] for name in ("index-url", "trusted-host") if name in parser["global"]}
for name in ("INDEX_URL", "TRUSTED_HOST", "TIMEOUT"):
    if value := os.environ.get(f"PIP_{name}"):
        settings[name.lower().replace("_", "-")] = value
print("[global]", *(f"{name} = {value}" for name, value in settings.items()), sep="\n")
PIP
secrets=(--secret "id=pip,src=$folder/pip")
ca=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
if [ -f "$ca" ]; then secrets+=(--secret "id=ca,src=$ca"); fi
sources=/etc/apt/sources.list.d/debian.sources
if [ -f "$sources" ]; then secrets+=(--secret "id=apt,src=$sources"); fi

DOCKER_BUILDKIT=1 "$docker" build --network host --progress plain --file deploy/Dockerfile \
  --tag "${IMAGE:-hurray-transfer}" "${secrets[@]}" "$@" .
