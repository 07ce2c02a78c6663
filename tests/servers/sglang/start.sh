#!/usr/bin/env bash
# start.sh [FOLDER] [server flags]: serves the model on 127.0.0.1:${PORT:-30000}; ready when GET /ready answers 200 (1-3 minutes).
# It becomes the server process: end it by ending this pid. About 6 GB of memory, one core busy while it scores.
set -euo pipefail
folder=${1:-.cache/sglang}
shift || true
# No kernels for the CPU are installed (see sgl_kernel): plain PyTorch, one thread unless told otherwise.
export SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Nothing is looked up on a model hub.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec nice -n "${NICE:-10}" "$folder/venv/bin/python" -m sglang.launch_server \
  --model-path "${MODEL:-$folder/models/gemma3-270m}" --served-model-name "${NAME:-gemma3-270m}" \
  --host 127.0.0.1 --port "${PORT:-30000}" \
  --device cpu --attention-backend torch_native --dtype bfloat16 \
  --context-length 4096 --chunked-prefill-size 4096 --max-total-tokens 65536 --max-running-requests 64 \
  --mem-fraction-static 0.5 --disable-overlap-schedule --cuda-graph-backend-decode=disabled \
  --cuda-graph-backend-prefill=disabled --sleep-on-idle "$@"
