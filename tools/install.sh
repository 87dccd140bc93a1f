#!/bin/sh
# Installs heddle into .venv at exactly the versions of constraints.txt: `sh tools/install.sh core` or `... dev`.
# A receipt is written last and holds what was installed, from where; while it still holds, nothing is done. A mark stands
# while pip works: found at the start, it means that an install was cut short, and .venv is made anew.
# Read from the environment: PYTHON, TORCH_INDEX (one more index, for torch alone), PIP_ARGS (words for every pip call),
# HASHES (not empty: .venv is made anew from the files of hashes.txt, which pip compares by SHA-256), TORCH (another version
# of torch than that of constraints.txt: 2.14.1, say, or newest).
set -u
cd "$(dirname "$0")/.." || exit 1

extra=${1:-core}
python=${PYTHON:-python3}
mark=.venv/installing
log=.venv/install.log
export PIP_DISABLE_PIP_VERSION_CHECK=1

stop() {
    echo "heddle: $*" >&2
    exit 1
}

version() { # 3.11, or whatever else the interpreter answers
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&1 | tail -n 1
}

same_python() { # the default takes whatever .venv has; a named interpreter must be of .venv's version
    [ "$python" = python3 ] || [ "$(version "$python")" = "$(version .venv/bin/python)" ]
}

wanted() {
    pwd
    cksum pyproject.toml constraints.txt ${HASHES:+hashes.txt}
    echo "${TORCH:-}"
}

install() { # a name for the message, then pip's arguments
    what=$1
    shift
    echo "heddle: installing $what"
    # shellcheck disable=SC2086  # PIP_ARGS is a list of words
    .venv/bin/python -m pip install -q --no-input ${PIP_ARGS:-} "$@" >>"$log" 2>&1 && return
    rm -f "$mark"
    grep -q 'connection broken' "$log" && stop "pip could not install $what: no package index answers (see $log)."
    stop "pip could not install $what: $(grep -i '^ *error:' "$log" | head -n 1) (see $log)"
}

if .venv/bin/python -c '' 2>/dev/null && same_python; then
    for receipt in ".venv/$extra.receipt" .venv/dev.receipt; do # dev holds core
        [ "$(wanted)" = "$(cat "$receipt" 2>/dev/null)" ] && exit 0
    done
fi

command -v "$python" >/dev/null 2>&1 ||
    stop "Python 3.11 or newer is needed and '$python' is not there; install it, or name one as in: make test PYTHON=python3.12."
answer=$(version "$python")
case $answer in
3.[0-9] | 3.10) stop "Python 3.11 or newer is needed and '$python' is $answer; name a newer one as in: make test PYTHON=python3.12." ;;
3.[1-9][0-9]) ;;
*) stop "Python 3.11 or newer is needed and '$python', asked for its version, answered '$answer'; name another as in: make test PYTHON=python3.12." ;;
esac

if [ -n "${HASHES:-}" ] || [ -e "$mark" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1 || ! same_python; then
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        stop "'$python' cannot make a virtual environment, its venv or ensurepip module is missing; on Debian or Ubuntu: apt-get install python3-venv."
    echo "heddle: making .venv with $python ($answer)"
    rm -rf .venv
    answer=$("$python" -m venv .venv 2>&1) || stop "'$python' could not make .venv: $(echo "$answer" | tail -n 1)"
fi

if [ -n "${HASHES:-}" ] && [ -n "${TORCH:-}" ]; then
    stop "HASHES and TORCH: hashes.txt holds the files of one version of torch; leave one of them out."
fi

rm -f .venv/*.receipt
: >"$mark"
: >"$log"
constraints=constraints.txt
torch=$(grep '^torch==' constraints.txt)
if [ -n "${TORCH:-}" ]; then
    constraints=.venv/constraints.txt
    grep -v '^torch==' constraints.txt >"$constraints"
    torch="torch==$TORCH"
    [ "$TORCH" = newest ] && torch=torch
fi
size=": torch is most of it, gigabytes on Linux unless TORCH_INDEX names a CPU-only index"
ls -d .venv/lib/python*/site-packages/"torch-${torch#torch==}"[+.]* >/dev/null 2>&1 && size=" (torch is there)"
echo "heddle: filling .venv once, for '$extra'$size;"
echo "heddle: minutes, or a quarter of an hour on a slow network. pip writes its errors to $log."
if [ -n "${HASHES:-}" ]; then # setuptools first: it builds the packages that have no wheel
    sed -n '/^setuptools==/,/[^\\]$/p' hashes.txt >.venv/setuptools.txt
    install setuptools --require-hashes --no-deps -r .venv/setuptools.txt
    install "the files of hashes.txt" --require-hashes --no-deps --no-build-isolation \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r hashes.txt
    .venv/bin/python -m pip check >>"$log" 2>&1 ||
        echo "heddle: this build of torch brings libraries that hashes.txt does not hold; they are not compared"
else
    install torch -c "$constraints" --upgrade ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$torch" setuptools
fi
case $extra in
core) install "heddle and what it needs" -c "$constraints" --no-build-isolation -e . ;;
*) install "heddle and its '$extra' tools" -c "$constraints" --no-build-isolation -e ".[$extra]" ;;
esac
wanted >".venv/$extra.receipt"
rm -f "$mark"
