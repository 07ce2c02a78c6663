#!/usr/bin/env bash
# install.sh [FOLDER]: a real SGLang 0.5.23 for the CPU, from Python packages alone: no GPU, no compiler, no model hub.
# Linux x86-64, glibc 2.34 or newer, Python 3.11. About 7 GB of disk and 5-10 minutes. What it scores are the unmodified
# server's scores; its speed means nothing.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-.cache/sglang}
if [ -f "$folder/installed" ] && cmp -s "$folder/installed" "$here/requirements.txt"; then
  echo "SGLang is installed in $folder"
  exit 0
fi
mkdir -p "$folder"
"${PYTHON:-python3.11}" -m venv --clear "$folder/venv"
python="$folder/venv/bin/python"
# The list is complete, so nothing is resolved: SGLang's own requirements ask for GPU kernels that are not needed here.
"$python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp "$here/sitecustomize.py" "$packages/"
mkdir -p "$packages/sgl_kernel"
cp "$here/sgl_kernel/__init__.py" "$packages/sgl_kernel/"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" "$here/make_model.py" "$folder/models/gemma3-270m"
cp "$here/requirements.txt" "$folder/installed"
