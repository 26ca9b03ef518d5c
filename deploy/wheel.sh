#!/bin/sh
# Builds the wheel from a copy of the sources, so that nothing is left among them. Usage: deploy/wheel.sh DIRECTORY
# PYTHON: an interpreter with pip (default: that of .venv). Prints the wheel's path.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
mkdir -p "$1"
out=$(cd "$1" && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
cd "$root"
mkdir "$copy/docs"
cp -R pyproject.toml README.md LICENSE pmdaemon sla_server gateway_agent dashboard sql "$copy"
cp -R docs/man "$copy/docs"
find "$copy" -name __pycache__ -prune -exec rm -rf {} +
"$python" -m pip wheel --disable-pip-version-check --quiet --no-deps --wheel-dir "$out" "$copy" >&2
ls -t "$out"/storage_sla_server-*.whl | head -n 1
