#!/usr/bin/env bash
# Proves it: installs what the tests need into .venv and runs them all. A skip is a failure here.
#
#   ./test.sh                          everything, several tests at a time
#   ./test.sh --ignore=tests/browser   options are pytest's (-n 0: one test at a time)
#   ./test.sh tests/unit -k route      a choice of tests runs one at a time
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"
source scripts/venv.sh

ensure_venv requirements-dev.txt

# Many tests wait more than they compute. Which of them stay together: tests/support/groups.py.
chosen=""
for argument in "$@"; do
    case "$argument" in
    -*) ;;
    *) chosen=yes ;;
    esac
done
if [ -z "$chosen" ]; then
    set -- --numprocesses=auto --dist=loadfile --no-loadscope-reorder "$@"
fi

SECONDS=0
status=0
# No test takes ten minutes: one that hangs says where it does, instead of hanging for ever.
SKIPS_ARE_FAILURES=1 .venv/bin/python -m pytest --timeout=600 "$@" || status=$?
echo "The tests took $((SECONDS / 60)) min $((SECONDS % 60)) s."
exit "$status"
