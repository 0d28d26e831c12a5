#!/bin/sh
# Install Surogate into a virtual environment, with uv if it is installed and otherwise with venv and pip.
#
#   sh install.sh                    from this checkout; outside of one, from the package index
#   sh install.sh --wheels dist      from a directory of wheels (make dist)
#   sh install.sh --dir DIR          the environment; default: surogate-env
#   sh install.sh --extra trackers   more extras, separated by commas
#   sh install.sh --dry-run          print the commands only
#   sh install.sh --cuda|--torch     print what was found: cuda13, cuda12 or cpu; the torch that fits
#
# PYTHON= names another Python than python3.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
python=${PYTHON:-python3}
dir=surogate-env
wheels=
extra=
dry=

fail() {
    echo "install.sh: $1" >&2
    exit 2
}

# The newest CUDA that the driver runs, as the name of an extra. A driver before CUDA 12 runs none of them.
cuda() {
    major=
    if command -v nvidia-smi >/dev/null 2>&1; then
        major=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9][0-9]*\)\..*/\1/p' | head -n 1)
    fi
    if [ "${major:-0}" -ge 13 ]; then
        echo cuda13
    elif [ "${major:-0}" -eq 12 ]; then
        echo cuda12
    else
        echo cpu
    fi
}

# What pip installs. The wheels of torch 2.13 on PyPI need CUDA 13; 2.11 is the last with wheels for CUDA 12.8.
torch() {
    case $1 in
        cuda12) echo "torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128" ;;
        *) echo "torch==2.13.0" ;;
    esac
}

run() {
    echo "+ $*"
    [ -n "$dry" ] || "$@"
}

while [ $# -gt 0 ]; do
    case $1 in
        --cuda) cuda; exit ;;
        --torch) torch "$(cuda)"; exit ;;
        --dry-run) dry=yes ;;
        --dir | --wheels | --extra)
            [ $# -gt 1 ] || fail "$1: a value must follow"
            case $1 in
                --dir) dir=$2 ;;
                --wheels) wheels=$2 ;;
                --extra) extra=$2 ;;
            esac
            shift
            ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit ;;
        *) fail "$1 is not known. Fix: sh install.sh --help" ;;
    esac
    shift
done

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is needed. Fix: PYTHON=/path/to/python3.11 sh install.sh"
found=$(cuda)
echo "found: $found"
if [ "$found" != cpu ]; then
    extra=$found${extra:+,$extra}
fi
what=surogate
set --
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || fail "--wheels $wheels: there is no such directory. Fix: make dist"
    set -- --find-links "$wheels"
elif [ -f "$here/core/pyproject.toml" ]; then
    what=$here
fi

if command -v uv >/dev/null 2>&1; then
    run uv venv --python "$python" "$dir"
    # shellcheck disable=SC2046  # options and versions are words of their own
    run uv pip install --python "$dir/bin/python" $(torch "$found")
    run uv pip install --python "$dir/bin/python" "$@" "$what${extra:+[$extra]}"
else
    run "$python" -m venv "$dir"
    # shellcheck disable=SC2046
    run "$dir/bin/python" -m pip install $(torch "$found")
    run "$dir/bin/python" -m pip install "$@" "$what${extra:+[$extra]}"
fi
echo "next: $dir/bin/surogate demo"
