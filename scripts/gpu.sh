#!/bin/sh
# The measurements on a machine with one GPU, without a package registry: memory | identity | pd | bench.
#
#   MODEL=folder QUESTIONS=gsm8k.jsonl OUT=folder sh scripts/gpu.sh STAGE [--only NAMES] [--pairs 7] [--limit 64]
#
# kvx, vLLM, NIXL and cuda-bindings must be importable (PYTHONPATH). Each stage writes OUT/STAGE.json at once;
# scripts/merge_measurements.py makes docs/measurements.json of them.
set -u
stage=${1:?one of memory, identity, pd, bench}
python=${PYTHON:-python3}
here=$(dirname "$0")
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
mkdir -p "${OUT:?a folder for the results}"
shift
if [ "$stage" = memory ]; then
    "$python" "$here/gpu_memory.py" "$OUT/calls" 2>&1 | tee "$OUT/calls.log"
fi
exec "$python" "$here/gpu_stage.py" "$stage" "${MODEL:?a checkpoint folder}" "${QUESTIONS:?gsm8k JSONL}" "$OUT" "$@"
