#!/usr/bin/env bash
# Builds the package, runs the GPU tests and the end-to-end tests on the card, and measures; for a machine with a CUDA card.
#
#   ci/gpu_check.sh [FOLDER]     results go to FOLDER/<card>-<date>.json, by default bench/results
#
# Environment: PYTHON, an interpreter that has torch and the package's dependencies (default python3); ALBATROSS_WHEEL, a
# finished wheel to install instead of building one; COMMIT, what to note in the results where there is no repository;
# QUICK=1 leaves out the large model.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
results=${1:-bench/results}

card=$("$python" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()))')
out="$results/$card-$(date -u +%F)"
mkdir -p "$results"

# All architectures that are shipped, whatever the machine is set to build.
env -u TORCH_CUDA_ARCH_LIST "$python" -m pip install --no-deps --no-build-isolation --force-reinstall --quiet "${ALBATROSS_WHEEL:-.}"
"$python" -m albatross
"$python" -m pytest tests/gpu tests/ops tests/e2e -q

"$python" -m bench.golden --device cuda --out "$out-golden.json"
"$python" -m bench.wkv7 --out "$out-wkv7.json"
"$python" -m bench.engine --device cuda --concurrency 1 32 256 --out "$out-engine-demo.json"
if [ "${QUICK:-0}" != 1 ]; then
  "$python" -m bench.engine --device cuda --model 1.5b --concurrency 1 32 128 256 --out "$out-engine-1.5b.json"
fi
"$python" -m bench.merge "$out.json" "$out"-*.json
