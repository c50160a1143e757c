#!/usr/bin/env bash
# Crash recovery, shown and asserted: a worker is killed in the middle of a task, its lease runs
# out, and a fresh worker finishes the task. Everything runs on a database, a model and ports of
# its own, so no other worker can take the task; nothing is left behind. About a minute and a half.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/venv.sh

ensure_venv requirements.txt requirements-agents.txt requirements-local.txt
exec .venv/bin/python -m local.demo
