#!/bin/sh
# Builds a Debian package: deploy/debian/build.sh server|agent DIRECTORY, from a checkout. Prints the package's path.
#   server  storage-sla-server: server, page, reports, command line (/opt/sla)
#   agent   storage-sla-agent: the gateway agent alone (/opt/sla-agent)
# The package holds a virtual environment of the machine's own Python, so it is for this release of Debian.
#   EXTRAS   of the server (default: server,reports; with the policy job: server,reports,policy, 0.5 GB more)
#   PYTHON   the interpreter that the package is for (default: /usr/bin/python3)
#   VERSION  of the package (default: the release's)
#   VENV     an environment to take in place of a new one, for tests
set -eu
fail() { printf 'build.sh: %s\n' "$*" >&2; exit 64; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
[ $# = 2 ] || fail "usage: build.sh server|agent DIRECTORY"
kind=$1
python=${PYTHON:-/usr/bin/python3}
case $kind in
server) name=storage-sla-server prefix=/opt/sla extras=${EXTRAS:-server,reports} programs="sla sla-server" ;;
agent) name=storage-sla-agent prefix=/opt/sla-agent extras="" programs=gateway-agent ;;
*) fail "$kind is neither server nor agent" ;;
esac
command -v dpkg-deb >/dev/null || fail "dpkg-deb is missing: it comes with Debian and Ubuntu"
release=$("$python" -c 'import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb"))["project"]["version"])' "$root/pyproject.toml")
version=${VERSION:-$release}
minor=$("$python" -c 'import sys; print(sys.version_info[1])')
mkdir -p "$2"
out=$(cd "$2" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
umask 022
chmod 0755 "$tree"

if [ -n "${VENV:-}" ]; then
    mkdir -p "$tree$prefix"
    cp -R "$VENV/." "$tree$prefix"
else
    wheel=$("$root/deploy/wheel.sh" "$tree/wheel")
    "$python" -m venv --without-pip "$tree$prefix"
    "${PIP_PYTHON:-$root/.venv/bin/python}" -m pip --python "$tree$prefix/bin/python" install --quiet --no-compile \
        --disable-pip-version-check -c "$root/constraints.txt" "$wheel${extras:+[$extras]}" >&2
    rm -rf "$tree/wheel"
    # Programs name their interpreter where it will be; modules are compiled now, because nobody may write there later.
    # The interpreter stays a link to Debian's own, which gets Debian's security updates: sed would put a copy there.
    find "$tree$prefix/bin" -type f -exec sed -i "1s|^#!$tree|#!|" {} +
    rm -f "$tree$prefix"/bin/activate* "$tree$prefix"/bin/Activate*
    sed -i '/^command = /d' "$tree$prefix/pyvenv.cfg"
    "$tree$prefix/bin/python" -m compileall -q -s "$tree" -p / "$tree$prefix/lib" || true
    man=$tree$prefix/share/man/man1
    if [ -d "$man" ]; then
        mkdir -p "$tree/usr/share/man/man1"
        for page in "$man"/*.1; do
            is_agents=$(case $page in */gateway-agent*) echo agent ;; *) echo server ;; esac)
            [ "$is_agents" != "$kind" ] || gzip -9nc "$page" >"$tree/usr/share/man/man1/${page##*/}.gz"
        done
        rm -rf "$tree$prefix/share"
    fi
fi

mkdir -p "$tree/DEBIAN" "$tree/usr/bin" "$tree/lib/systemd/system" "$tree/usr/share/doc/$name"
for program in $programs; do
    ln -s "$prefix/bin/$program" "$tree/usr/bin/$program"
done
case $kind in
server)
    cp "$root"/deploy/systemd/sla-*.service "$root"/deploy/systemd/sla-*.timer "$tree/lib/systemd/system"
    mkdir -p "$tree/etc/sla" "$tree/usr/share/$name"
    cp "$here/server/server.toml" "$tree/etc/sla/server.toml"
    printf '/etc/sla/server.toml\n' >"$tree/DEBIAN/conffiles"
    cp -R "$root/deploy/prometheus" "$root/deploy/grafana" "$root/sql/roles.sql" "$tree/usr/share/$name"
    ;;
agent)
    sed "s|/opt/sla/|$prefix/|" "$root/deploy/systemd/gateway-agent.service" >"$tree/lib/systemd/system/gateway-agent.service"
    mkdir -p "$tree/usr/share/doc/$name/examples"
    cp "$here/agent/agent.toml" "$tree/usr/share/doc/$name/examples"
    ;;
esac
cp "$root/LICENSE" "$tree/usr/share/doc/$name/copyright"
gzip -9nc "$root/CHANGELOG.md" >"$tree/usr/share/doc/$name/changelog.gz"
chmod -R u+rwX,go+rX,go-w "$tree"

size=$(du -k -s "$tree" | cut -f 1)
sed -e "s/@VERSION@/$version/" -e "s/@SIZE@/$size/" -e "s/@ARCHITECTURE@/$(dpkg --print-architecture)/" \
    -e "s/@PYTHON@/python3 (>= 3.$minor), python3 (<< 3.$((minor + 1)))/" "$here/$kind/control" >"$tree/DEBIAN/control"
for script in postinst prerm postrm; do
    install -m 0755 "$here/$kind/$script" "$tree/DEBIAN/$script"
done
package=$out/${name}_${version}_$(dpkg --print-architecture).deb
dpkg-deb --root-owner-group -Zzstd -z3 --build "$tree" "$package" >&2
printf '%s\n' "$package"
