#!/usr/bin/env bash
# Measures how fast this is, beside other queues on the same machine: see docs/performance.md.
# Every measure has a Postgres of its own; nothing is left behind but bench/results, and the
# installed peers in $BENCH_DIR (by default a folder in the system's temporary one).
#
#   bench/run.sh                   everything
#   bench/run.sh --quick           fewer repetitions, and shorter ones; it says what it leaves out
#   bench/run.sh --check           exit 1 if a goal is missed; the last line lists the ratios
#   bench/run.sh drain submit      these measures only
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

ensure_venv requirements.txt requirements-agents.txt requirements-local.txt
exec .venv/bin/python -m bench "$@"
