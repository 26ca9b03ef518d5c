#!/bin/sh
# Makes the clean root that try.sh needs: a minimal Debian, by debootstrap from this machine's own archive. As root.
# Usage: deploy/debian/root.sh ROOT
#   ROOT   a directory; one that has a Debian already is left as it is
set -eu
fail() { printf 'root.sh: %s\n' "$*" >&2; exit 1; }
[ $# = 1 ] || fail "usage: root.sh ROOT"
[ "$(id -u)" = 0 ] || fail "it needs root: a root of its own"
[ ! -x "$1/usr/bin/dpkg" ] || exit 0
[ ! -e "$1" ] || fail "$1 exists and has no Debian: remove it first"
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
. /etc/os-release
archive=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: '"$VERSION_CODENAME" 2>/dev/null | head -n 1)
printf '==> making %s with debootstrap (%s)\n' "$1" "$VERSION_CODENAME"
rm -rf "$1.part"
debootstrap --variant=minbase --include=adduser,python3 "$VERSION_CODENAME" "$1.part" "${archive:-}" >&2
mv "$1.part" "$1"
