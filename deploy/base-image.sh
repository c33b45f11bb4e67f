#!/usr/bin/env bash
# Makes debian:bookworm-slim out of Debian's packages, for machines that reach a package mirror but no image registry.
# As root, with debootstrap and an engine; does nothing where the image is there. MIRROR=http://... names another mirror
# than this host's own.
set -euo pipefail
tag=debian:bookworm-slim
docker image inspect "$tag" >/dev/null 2>&1 && exit 0

first() { grep --no-filename --only-matching --max-count 1 -P "$1" "${@:2}" 2>/dev/null | head -n 1 || true; }
mirror=${MIRROR:-$(first '^URIs: *\K\S+' /etc/apt/sources.list.d/*.sources)}
mirror=${mirror:-$(first '^deb (\[[^]]*\] )?\K\S+' /etc/apt/sources.list)}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --merged-usr bookworm "$root" "${mirror:-http://deb.debian.org/debian}" >"$root.log" 2>&1 ||
  { cat "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/var/log/*.log \
  "$root"/usr/share/{doc,man,info,locale,lintian}/*
rm -f "$root/etc/apt/sources.list"
cat >"$root/etc/apt/sources.list.d/debian.sources" <<'SOURCES'
Types: deb
URIs: http://deb.debian.org/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
tar --numeric-owner -C "$root" -c . | docker import --change 'CMD ["bash"]' - "$tag"
