#!/usr/bin/env bash
# The chaos test: three workers run graphs of steps, some of which fail at first, and are killed or
# frozen at random for a minute; then the database is asked whether every run came to its right end.
# Everything runs on a database and ports of its own; nothing is left behind.
#
#   ./chaos.sh                              a minute, by dice of its own; it prints the seed
#   ./chaos.sh --seed 7 --seconds 20        --runs N and --workers N can be said, too
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/venv.sh

ensure_venv requirements.txt requirements-agents.txt requirements-local.txt
exec .venv/bin/python -m local.chaos "$@"
