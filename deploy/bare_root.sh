#!/bin/sh
# Makes a bare Debian root with a clone of this checkout in /srv/sla, runs a command, and removes the root. As root.
# Usage: deploy/bare_root.sh ROOT COMMAND [ARGUMENT...]
#   ROOT     a directory that does not exist yet; the command gets it as its last argument
# What the root needs to reach package archives is this machine's: /etc/apt, pip's configuration, certificates, names.
# All of that is copied when it runs, and so is nothing of it in the repository.
# Run it through: make first-steps-try, which gives it mounts and processes of its own: none outlives it
set -eu
say() { printf '==> %s\n' "$*"; }
fail() { printf 'bare_root.sh: %s\n' "$*" >&2; exit 69; }
[ $# -ge 2 ] || fail "usage: bare_root.sh ROOT COMMAND [ARGUMENT...]"
[ "$(id -u)" = 0 ] || fail "it needs root: a root of its own"
[ "$$" -lt 100 ] || fail "it needs processes of its own: run it through make first-steps-try"
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
[ ! -e "$1" ] || fail "$1 exists: remove it first"
checkout=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
bare=$(cd "$1" && pwd)
shift

end() {
    cd /
    for process in /proc/[0-9]*; do # what the command left running in the root
        id=${process#/proc/}
        [ "$id" = "$$" ] || [ "$(readlink "$process/root" 2>/dev/null)" != "$bare" ] || kill -KILL "$id" 2>/dev/null || true
    done
    umount -R -l "$bare" 2>/dev/null || true
    if grep -q " $bare" /proc/self/mounts; then
        printf 'bare_root.sh: %s is still mounted, and was left\n' "$bare" >&2
    else
        rm -rf "$bare"
    fi
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

. /etc/os-release
archive=$(apt-get indextargets --format '$(REPO_URI)' 'Codename: '"$VERSION_CODENAME" 2>/dev/null | head -n 1)
say "making a bare $PRETTY_NAME in $bare"
debootstrap --variant=minbase "$VERSION_CODENAME" "$bare" "${archive:-}" >"$bare.log" 2>&1 ||
    { tail -n 5 "$bare.log" >&2; fail "debootstrap failed: see $bare.log"; }
rm -f "$bare.log"

copy() { # what exists here, to where it is here
    for path; do
        [ ! -e "$path" ] || { mkdir -p "$bare$(dirname "$path")" && cp -rL "$path" "$bare$(dirname "$path")/"; }
    done
}
rm -rf "$bare/etc/apt"
copy /etc/apt /etc/hosts /etc/resolv.conf /etc/pip.conf /usr/share/keyrings \
    /usr/local/share/ca-certificates /etc/ssl/certs/ca-certificates.crt # an administrator's own authorities, too
pip_of_user=${XDG_CONFIG_HOME:-${HOME:-/root}/.config}/pip/pip.conf
[ ! -e "$pip_of_user" ] || { mkdir -p "$bare/root/.config/pip" && cp "$pip_of_user" "$bare/root/.config/pip/"; }

mount --bind "$bare" "$bare" # one place to unmount all of it
mount -t proc proc "$bare/proc"
mount -t sysfs -o ro sysfs "$bare/sys"
mkdir -p "$bare/dev/shm" "$bare/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$bare/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$bare/dev/pts"
# Files and folders that the configuration of pip names, and those of the environment: certificates are copied,
# folders with packages are shown read-only.
named=$(cat /etc/pip.conf "$pip_of_user" 2>/dev/null | tr ' =' '\n\n' | sed -n 's#^\(file://\)\{0,1\}\(/[^ ]*\)$#\2#p'
    env | sed -n 's#^\(PIP_[A-Z_]*\|SSL_CERT_[A-Z]*\|CURL_CA_BUNDLE\|REQUESTS_CA_BUNDLE\)=\(/[^ ]*\)$#\2#p')
for path in $(printf '%s\n' "$named" | sort -u); do
    if [ -d "$path" ] && [ "$path" != /etc/ssl/certs ]; then
        top=/$(printf '%s' "$path" | cut -d / -f 2-3) # an index has its files beside it
        if [ -d "$bare$top" ]; then continue; fi
        mkdir -p "$bare$top"
        mount --bind "$top" "$bare$top"
        mount -o remount,bind,ro "$bare$top"
    elif [ ! -e "$bare$path" ]; then
        copy "$path"
    fi
done

say "a clone of what is committed"
git -c safe.directory='*' clone -q --no-hardlinks "$checkout" "$bare/srv/sla"
# A bare machine has a network and nothing of ours: no python3-venv, no make, no interpreter at all.
[ ! -e "$bare/usr/bin/python3" ] && [ ! -e "$bare/usr/bin/make" ] || fail "$bare is not bare"
"$@" "$bare"
