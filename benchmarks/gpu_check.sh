#!/usr/bin/env bash
# Checks and measures octavo on this machine's GPU, in under eight minutes; see gpu_check.py.
#
#   benchmarks/gpu_check.sh [--dry-run] [--sections card,twins,...] [--json PATH]
#
# Wants Python with torch 2.11, triton 3.6, transformers 5 or later and nothing of octavo's other dependencies; uses
# no network and installs nothing: octavo is imported through a temporary folder with a link to it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

imports=$(mktemp -d)
trap 'rm -rf "$imports"' EXIT
ln -s "$root/octavo" "$imports/octavo"

export PYTHONSAFEPATH=1 PYTHONPATH="$imports" PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
for argument in "$@"; do
    if [ "$argument" = --dry-run ]; then export TRITON_INTERPRET=1; fi
done

"${PYTHON:-python3}" "$root/benchmarks/gpu_check.py" "$@"
