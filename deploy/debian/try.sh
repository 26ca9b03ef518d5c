#!/bin/sh
# Tries packages in a clean root: installs, runs, upgrades, removes, purges. As root.
# Usage: deploy/debian/try.sh SERVER.deb NEWER-SERVER.deb ROOT
# ROOT is a directory with a minimal Debian, see root.sh.
# Run it through: make deb-try, which gives it mounts and a network of its own
set -eu
say() { printf '==> %s\n' "$*"; }
fail() { printf 'try.sh: %s\n' "$*" >&2; exit 1; }
[ $# = 3 ] || fail "usage: try.sh SERVER.deb NEWER-SERVER.deb ROOT"
[ "$(id -u)" = 0 ] || fail "it needs root: a root of its own, and users in it"
first=$1 newer=$2 clean=$3

[ -x "$clean/usr/bin/dpkg" ] || fail "$clean is no Debian: deploy/debian/root.sh $clean makes it"
mount --bind "$clean" "$clean"
trap 'umount -R "$clean"' EXIT
mount -t proc proc "$clean/proc"
mount -t tmpfs tmpfs "$clean/dev/shm" 2>/dev/null || { mkdir -p "$clean/dev/shm"; mount -t tmpfs tmpfs "$clean/dev/shm"; }
cp "$first" "$clean/first.deb"
cp "$newer" "$clean/newer.deb"
in_root() { chroot "$clean" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "$@"; }
as_sla() { in_root setpriv --reuid sla --regid sla --init-groups --no-new-privs --bounding-set=-all "$@"; }
server() { # as its unit runs it: its user, no rights beyond it
    in_root install -d -m 0700 -o sla -g sla /run/sla-server
    as_sla sla-server "$@" --config /etc/sla/server.toml
}

ip link set lo up # of the network that make deb-try gives it, where nobody else has the ports
in_root dpkg -P storage-sla-server >/dev/null 2>&1 || true # of a try that was ended

say "install"
in_root dpkg -i /first.deb
in_root sla-server --version
in_root python3 -c "import pwd; [pwd.getpwnam(n) for n in ('sla', 'sla-policy', 'sla-relay', 'sla-agent')]"
[ "$(in_root stat -c '%U:%G %a' /etc/sla/server.toml)" = "root:sla 640" ] || fail "server.toml is open"
[ "$(in_root stat -c '%U %a' /var/lib/sla-server)" = "sla 700" ] || fail "the data directory is open"
server start --check-config
say "start, status, stop"
server start --background
server status
server stop
say "upgrade: a changed configuration and the data stay"
echo '# of the administrator' >>"$clean/etc/sla/server.toml"
in_root dpkg -i --force-confold /newer.deb
grep -q administrator "$clean/etc/sla/server.toml" || fail "the configuration was replaced"
server start --background
server status
server stop
say "removal: data and configuration stay"
in_root dpkg -r storage-sla-server
[ ! -e "$clean/usr/bin/sla-server" ] || fail "programs are left"
[ ! -e "$clean/opt/sla" ] || fail "files are left: $(find "$clean/opt/sla" | head -n 5)"
[ -e "$clean/var/lib/sla-server/sla.db" ] || fail "the data are gone"
[ -e "$clean/etc/sla/server.toml" ] || fail "the configuration is gone"
say "purge: nothing stays"
in_root dpkg -P storage-sla-server
[ ! -e "$clean/var/lib/sla-server" ] || fail "data are left"
[ ! -e "$clean/etc/sla" ] || fail "the configuration is left"
say "all as it must be"
