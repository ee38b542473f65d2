#!/bin/sh
# Prints the path of a Python >= 3.12 that can make virtual environments, or says what is missing.
# Looks at $PYTHON, the PATH, and the versions that pyenv has installed.

good() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

if [ -n "$PYTHON" ]; then
    good "$PYTHON" && { command -v "$PYTHON"; exit 0; }
    echo "PYTHON=$PYTHON is not a Python >= 3.12 with venv; name another, or leave it out" >&2
    exit 1
fi
for candidate in python3.12 python3.13 python3.14 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    good "$path" && { echo "$path"; exit 0; }
done
echo "no Python >= 3.12 with venv found: looked at python3.12 to 3.14, python3 and python on the" \
    "PATH and at pyenv's versions; install one (for instance: pyenv install 3.12), or run" \
    "make with PYTHON=/path/to/python3.12" >&2
exit 1
