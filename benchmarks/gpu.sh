#!/usr/bin/env bash
# A 7B-shaped model in bf16 and NF4 on one GPU, ours and TRL 1.12's; over within eight minutes. See gpu_bench.py.
# PYTHON names the interpreter, `python` by default.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec timeout 480 "${PYTHON:-python}" benchmarks/gpu_bench.py "$@"
