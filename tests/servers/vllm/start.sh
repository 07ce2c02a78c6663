#!/usr/bin/env bash
# start.sh [FOLDER] [server flags]: serves the model on 127.0.0.1:${PORT:-8000}; ready when GET /health answers 200 (1-3 minutes).
# It becomes the server process: end it by ending this pid. About 4 GB of memory.
set -euo pipefail
folder=${1:-.cache/vllm}
shift || true
export VLLM_TARGET_DEVICE=cpu VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Nothing is looked up on a model hub, and nothing is reported.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# Its command `vllm` looks for a distribution of that name, which vllm-cpu is not.
exec nice -n "${NICE:-10}" "$folder/venv/bin/python" -m vllm.entrypoints.openai.api_server \
  --model "${MODEL:-$folder/models/gemma3-270m}" --served-model-name "${NAME:-gemma3-270m}" \
  --host 127.0.0.1 --port "${PORT:-8000}" --dtype bfloat16 --max-model-len 1024 --max-num-seqs 16 --enforce-eager "$@"
