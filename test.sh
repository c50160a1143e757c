#!/usr/bin/env bash
# Proves it: installs what the tests need into .venv and runs them all. A skip is a failure here.
#
#   ./test.sh                       everything, some tests beside each other
#   ./test.sh tests/unit -k route   what follows goes to pytest, which runs one test at a time
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/venv.sh

ensure_venv requirements-dev.txt

# Most tests wait more than they compute. Which of them stay together: tests/conftest.py.
if [ $# -eq 0 ]; then
    set -- --numprocesses=auto --dist=loadgroup --no-loadscope-reorder
fi

SECONDS=0
status=0
# No test takes ten minutes: one that hangs says where it does, instead of hanging for ever.
SKIPS_ARE_FAILURES=1 .venv/bin/python -m pytest --timeout=600 "$@" || status=$?
echo "The tests took $((SECONDS / 60)) min $((SECONDS % 60)) s."
exit "$status"
