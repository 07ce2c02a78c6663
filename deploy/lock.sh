#!/bin/sh
# Writes the lock files in requirements/: every version and hash that pip and uv may install, on Python 3.11 and later.
#
#   deploy/lock.sh              keep what is locked, add and drop what pyproject.toml asks for
#   deploy/lock.sh --upgrade    take the newest versions that pyproject.toml allows
#
# UV names the uv to use; by default the one in the virtual environment, else the one on PATH.
set -eu
cd "$(dirname "$0")/.."

uv=${UV:-}
if [ -z "$uv" ]; then
    uv=.venv/bin/uv
    [ -x "$uv" ] || uv=uv
fi

# Settings of this machine must not leak into files that hold on every other one.
unset PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL UV_FIND_LINKS UV_INDEX UV_DEFAULT_INDEX UV_EXTRA_INDEX_URL

lock() {
    name=$1
    shift
    "$uv" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-header --output-file "requirements/$name.lock" "$@"
    # A host name here would make everybody's installs depend on the mirror of whoever ran this.
    if grep -nE '[a-z]+://|^ *(-f|-i|--find-links|--index-url|--extra-index-url) ' "requirements/$name.lock"; then
        echo "requirements/$name.lock names a place to install from; nobody else may have it" >&2
        exit 1
    fi
}

mkdir -p requirements
# dev first and the others held to it: the tests run on exactly what is shipped.
lock dev --all-extras "$@" pyproject.toml
lock embedded --extra embedded --constraints requirements/dev.lock pyproject.toml
lock runtime --constraints requirements/dev.lock pyproject.toml

# What builds the package itself, for images that install nothing unpinned. uv has no option for it.
build_requires=$(mktemp)
trap 'rm -f "$build_requires"' EXIT
"$uv" run --quiet --no-project --no-config python - >"$build_requires" <<'PYTHON'
import tomllib

with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["build-system"]["requires"], sep="\n")
PYTHON
lock build --no-annotate --constraints requirements/dev.lock "$@" "$build_requires"
