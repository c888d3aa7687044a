#!/bin/sh
# setup_venv.sh PYTHON FOLDER [REQUIREMENT ...]: a virtual environment with this project, editable, and all that its
# development needs, in the versions of constraints.txt; a REQUIREMENT may fix another version of a package.
# EXTRA: of pyproject.toml, "dev" by default.
# UV: a uv to install with, which is quicker than pip and shares its files with other environments.
set -eu
python=$1
venv=$2
shift 2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo "error: Python 3.10 or newer is needed; $python is: $("$python" --version 2>&1 || true)" >&2
    echo "Name another one, for instance: make test PYTHON=python3.12" >&2
    exit 1
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    # Debian and Ubuntu keep this part of Python in a package of its own.
    if [ "$(id -u)" = 0 ] && [ "${KAFKA_CHUNKED_INSTALL:-yes}" != no ] && command -v apt-get >/dev/null; then
        echo "This Python cannot make virtual environments; installing python3-venv with apt for the whole system."
        echo "To refuse, stop this (Ctrl-C) and set KAFKA_CHUNKED_INSTALL=no."
        if [ -t 0 ]; then sleep 5; fi
        apt-get update -qq || echo "warning: apt-get update failed; trying with the lists at hand" >&2
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
    else
        echo "error: this Python cannot make virtual environments. On Debian and Ubuntu:" >&2
        echo "    sudo apt-get install -y python3-venv" >&2
        exit 1
    fi
fi

echo "Setting up $venv (once; PySpark alone is 450 MB, so some minutes on a slow line) ..."
"$python" -m venv ${UV:+--without-pip} "$venv"
constraints="$venv/constraints.txt"
cat constraints.txt > "$constraints"
for requirement in "$@"; do
    sed "/^${requirement%%[=<>~!]*}==/d" "$constraints" > "$constraints.rest"
    cat "$constraints.rest" > "$constraints"
done
set -- --quiet --constraint "$constraints" --editable ".[${EXTRA:-dev}]" --editable ./packages/local_kafka "$@"
if [ -n "${UV:-}" ]; then
    "$UV" pip install --python "$venv/bin/python" "$@"
else
    "$venv/bin/python" -m pip install --quiet --upgrade pip
    # Python compiles what is imported; all of it takes 20 s.
    "$venv/bin/python" -m pip install --progress-bar off --no-compile "$@"
fi
echo "$venv is ready."
