#!/usr/bin/env bash
# Starts everything on this machine: Postgres, a model, the API on port 8000 and one worker.
# What is there already is used. Ctrl-C ends what was started; the data stay in .local.
set -euo pipefail

if [ -n "${ORCHESTRATOR_CONFIG:-}" ]; then # relative to where the user stands, not to here
    ORCHESTRATOR_CONFIG="$(realpath "$ORCHESTRATOR_CONFIG")"
    export ORCHESTRATOR_CONFIG
fi
cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/venv.sh

ensure_venv requirements.txt requirements-agents.txt requirements-local.txt
exec .venv/bin/python -m local.start "$@"
