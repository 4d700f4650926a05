#!/bin/sh
# The measurements on a machine with GPUs, without a package registry. STAGE is one of
#   memory | identity | bench | pd       vLLM engines on one GPU
#   transfer | offload | tests           copies, and tests that need a GPU
#   two-gpus                             copies and a prefill/decode pair from GPU 0 to GPU 1
#
#   MODEL=folder QUESTIONS=gsm8k.jsonl OUT=folder sh scripts/gpu.sh STAGE [--only NAMES] [--pairs 7] [--limit 64]
#                                                                         [--minutes 8] [--resume] [--logs FOLDER]
#
# kvx (installed: its entry points are needed), vLLM, NIXL, cuda-bindings, pytest and hypothesis must be importable
# (PYTHONPATH). Each stage writes OUT/STAGE.json as it comes; scripts/merge_measurements.py makes docs/measurements.json
# of them.
set -u
stage=${1:?one of memory, identity, bench, pd, transfer, offload, tests, two-gpus}
python=${PYTHON:-python3}
here=$(dirname "$0")
export VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
export VLLM_ALLREDUCE_USE_SYMM_MEM=0 NCCL_NVLS_ENABLE=0 # NVLink multicast belongs to the whole host
export UCX_TLS="${UCX_TLS:-tcp,self,cma,cuda_copy,cuda_ipc}"
mkdir -p "${OUT:?a folder for the results}"
shift
case "$stage $*" in
    transfer* | offload*) MODEL=${MODEL:-none} QUESTIONS=${QUESTIONS:-none} ;;
    memory*--only*) ;; # engines alone
    memory*) "$python" "$here/gpu_memory.py" "$OUT/calls" 2>&1 | tee "$OUT/calls.log" ;;
esac
exec "$python" "$here/gpu_stage.py" "$stage" "${MODEL:?a checkpoint folder}" "${QUESTIONS:?gsm8k JSONL}" "$OUT" "$@"
