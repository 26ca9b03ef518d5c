# Two commands matter: `make demo` and `make test`. Each sets up what it needs.
.DEFAULT_GOAL := help
PY := .venv/bin/python
ARGS ?=
TWO := -n 2 --dist loadfile
THREE := -n 3 --dist loadfile
FOUR := -n 4 --dist loadfile
CODE := pmdaemon sla_server gateway_agent dashboard
REAL := tests/crash tests/e2e tests/integration
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
unexport PYTHONDONTWRITEBYTECODE # some hundred interpreters start: each would compile everything again
.PHONY: help demo demo-cluster test test-loaded setup setup-bench crash crash-events chaos chaos-cluster upgrade-cluster fuzz bench-mailbox bench-queue bench-poll bench-fleet bench-cluster bench-spark bench-spark_large bench-spark_fleet fmt lint types check unit bench docs wheel deb deb-try first-steps-try screenshots clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## the whole cycle on this machine; ARGS="--for 60" ends by itself
	@deploy/setup.sh demo
	@$(PY) -m benchmarks.demonstration $(ARGS)

demo-cluster: ## three nodes on this machine, one is killed, nothing acknowledged is lost; ARGS="--tls --for 10"
	@deploy/setup.sh demo
	@$(PY) -m benchmarks.cluster_demo $(ARGS)

# Two runs at once. Tests of processes and databases wait for them much of the time; those of tests/unit never wait and
# give way to them. Which files go first: tests/conftest.py. ARGS="tests/e2e -k name": some.
# The first time the tests are collected once alone: six workers at once would each compile all of them.
test: setup ## everything: lint, types, unit, integration, crash, end to end, browser, Spark
ifdef ARGS
	@$(MAKE) --no-print-directory lint
	@$(PY) -m pytest $(ARGS)
else
	@failed=0; log=$$(mktemp); trap 'rm -f $$log' EXIT; \
	nice -n 5 $(MAKE) --no-print-directory lint types & checks=$$!; \
	[ -d tests/__pycache__ ] || { $(PY) -m pytest -q --collect-only tests/unit >/dev/null & \
		$(PY) -m pytest -q --collect-only $(REAL) >/dev/null || true; wait $$! || true; }; \
	nice -n 5 $(PY) -m pytest -q $(TWO) --durations=20 -o cache_dir=.pytest_cache/unit tests/unit >$$log 2>&1 & unit=$$!; \
	$(PY) -m pytest $(FOUR) --no-loadscope-reorder --durations=30 $(REAL) || failed=1; \
	wait $$unit || failed=1; cat $$log; \
	wait $$checks || { echo "lint or types failed: see above, or make check"; failed=1; }; \
	[ $$failed = 0 ] || echo "tests or checks failed: see above"; exit $$failed
endif

test-loaded: ## the same with two busy loops beside it, as on a shared machine
	@for loop in 1 2; do timeout 7200 bash -c 'while :; do :; done' & done; trap 'kill $$(jobs -p)' EXIT; \
	$(MAKE) --no-print-directory test

setup:
	@deploy/setup.sh test

fmt: setup ## format the code, and fill lines of the documents
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix-only .
	@$(PY) -m docs.reflow

lint: setup ## style, spelling, import directions, names
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m ruff check --quiet .
	@.venv/bin/lint-imports --no-cache | tail -n 1
	@$(PY) -m docs.house_lint
	@.venv/bin/codespell $(CODE) docs README.md tests benchmarks sql

types: setup ## mypy --strict
	@$(PY) -m mypy

unit: setup
	@$(PY) -m pytest -q $(THREE) tests/unit

check: lint types unit ## what every commit passes

crash: setup ## kill processes at every pair of stores, and at random for ten minutes
	@SLA_CRASH_S=300 $(PY) -m pytest -q tests/crash $(ARGS)

crash-events: setup ## kill event delivery 1,000 times: every accepted event arrives, in order; KILLS=100
	@DELIVERY_KILLS=$(or $(KILLS),1000) RELAY_KILL_EVERY=1 $(PY) -m pytest -q -s tests/crash/test_delivery_kills.py \
		tests/crash/test_relay_kills.py $(ARGS)

chaos: setup ## kill, cut, fill, step clocks for minutes, then prove every cut; ARGS="--seed 2 --for 60"
	@$(PY) -m benchmarks.chaos $(ARGS)

fuzz: setup ## random gateways, clients and documents for minutes; ARGS="--for 600 --only wire --seed 1"
	@$(PY) -m tests.fuzz $(ARGS)

bench: bench-demo bench-sla bench-gateway bench-nbd bench-control bench-mailbox bench-queue bench-ingest bench-query bench-poll bench-tls bench-events bench-idle ## all benchmarks of this release

setup-bench:
	@deploy/setup.sh bench

bench-mailbox: setup-bench ## the mailbox against the queues of Python's world
	@$(PY) -m benchmarks.mailbox $(ARGS)

bench-poll: setup-bench ## polling 50 to 4000 gateways against other ways, a C loop and Prometheus
	@$(PY) -m benchmarks.poll $(ARGS)

bench-fleet: setup-bench ## the whole server under 4,000 simulated gateways for ten minutes; ARGS="--for 60"
	@$(PY) -m benchmarks.fleet $(ARGS)

chaos-cluster: setup ## kill, stop, cut off, fill and step two servers and their nodes, then prove every count; ARGS="--seed 2 --for 60"
	@$(PY) -m benchmarks.cluster_chaos $(ARGS)

upgrade-cluster: setup ## two servers go from the former release to this one under load, then prove every count; ARGS="--from COMMIT"
	@$(PY) -m benchmarks.cluster_upgrade $(ARGS)

bench-cluster: setup ## messages on three nodes: rates, failover, kills, transactions, an hour; ARGS="--only small"
	@$(PY) -m benchmarks.cluster $(ARGS)

bench-spark: setup-bench ## the policy job on 1 M rollups on Spark beside DuckDB and Polars, five minutes
	@$(PY) -m benchmarks.spark $(ARGS)

bench-spark_large: setup-bench ## the same on 10 M and on 50 M; ARGS="--rows 10000000"
	@$(PY) -m benchmarks.spark_large $(ARGS)

bench-spark_fleet: setup-bench ## the policy job on 86 M hours of 4,000 gateways, and its memory
	@$(PY) -m benchmarks.spark_fleet $(ARGS)

bench-queue: setup-bench ## the disk queue against files, SQLite and persist-queue
	@$(PY) -m benchmarks.queue $(ARGS)

bench-%: setup ## one benchmark: demo, sla, gateway, nbd, control, capacity, policy, ingest, query, tls, events, forecast, idle, spark_start
	@$(PY) -m benchmarks.$* $(ARGS)

docs: setup ## regenerate the configuration reference, the messages, the schema, manuals and docs/measurements
	@$(PY) -m docs.reference
	@$(PY) -m docs.messages
	@$(PY) -m docs.documents_schema
	@$(PY) -m docs.report_schema
	@$(PY) -m docs.events
	@$(PY) -m docs.man
	@$(PY) -m docs.measurements

screenshots: setup ## each view of the page in docs/screenshots: wide and phone, light and dark
	@mkdir -p docs/screenshots
	@SLA_SCREENSHOTS=$(CURDIR)/docs/screenshots $(PY) -m pytest -q tests/e2e/test_views.py -k each_view

wheel: setup ## the wheel, in dist
	@deploy/wheel.sh dist

deb: setup ## Debian packages of server and agent, in dist; EXTRAS=server,reports,policy with the policy job
	@deploy/debian/build.sh server dist
	@deploy/debian/build.sh agent dist

deb-try: setup ## install, run, upgrade, remove and purge the server's package in a clean root (as root)
	@first=$$(deploy/debian/build.sh server dist); newer=$$(VERSION=9.9 deploy/debian/build.sh server dist); \
	deploy/debian/root.sh dist/root && unshare --mount --net deploy/debian/try.sh "$$first" "$$newer" dist/root

first-steps-try: setup ## README's lines in a bare Debian root: what it installs, the demo, the first steps (as root)
	@unshare --mount --pid --fork --kill-child --mount-proc deploy/bare_root.sh dist/bare $(PY) -m tests.bare_machine

clean: ## remove .venv and caches
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-data
