#!/bin/sh
# find_python.sh VERSION: prints a python of this version (3.10, say) that starts; fails where there is none.
# A name on PATH is not enough: pyenv puts one there for every version that it could start.
set -u
version=$1
for found in "$(command -v "python$version" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
    if [ -n "$found" ] && "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
        echo "$found"
        exit 0
    fi
done
exit 1
