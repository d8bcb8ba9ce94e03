#!/usr/bin/env bash
# Builds the package, runs the GPU tests and the end-to-end tests on the card, and measures; for a machine with a CUDA card.
#
#   ci/gpu_check.sh [--skip PART]... [--only PART]... [FOLDER]
#
# Results go to FOLDER/<card>-<date>.json, by default bench/results; what a file of the same commit has from other parts stays.
# Parts, in their order: build tests wheel older golden drift chunks tmix linear sampling decode prefill engine interference workers
# serve.
# `older` builds for compute_80 alone, which the driver then compiles for the card: the code that sm_80 cards run. `wheel` loads and
# runs ALBATROSS_WHEEL in an environment of its own and enters that into manifest/checks.json. `workers` needs two cards.
#
# Environment: PYTHON, an interpreter that has torch and the package's dependencies (default python3); ALBATROSS_WHEEL, a
# finished wheel to install instead of building one; COMMIT, what to note in the results where there is no repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
all="build tests wheel older golden drift chunks tmix linear sampling decode prefill engine interference workers serve"
skip="" only="" results="bench/results"

is_in() { [[ " $2 " == *" $1 "* ]]; }

while [ $# -gt 0 ]; do
  case $1 in
    --skip | --only)
      is_in "${2:-}" "$all" || { echo "$1 takes one of: $all; found '${2:-}'." >&2; exit 2; }
      if [ "$1" = --skip ]; then skip+=" $2"; else only+=" $2"; fi
      shift 2 ;;
    -*) echo "There is no option $1; see the head of this file." >&2; exit 2 ;;
    *) results=$1; shift ;;
  esac
done

card=$("$python" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()))')
out="$results/$card-$(date -u +%F).json"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
mkdir -p "$results"

is_wanted() { ! is_in "$1" "$skip" && { [ -z "$only" ] || is_in "$1" "$only"; }; }

# measure PART NAME ARGUMENT...: runs bench.PART; NAME tells its report from others of the part.
measure() {
  is_wanted "$1" || return 0
  echo "== bench.$1 ${*:3}"
  "$python" -m "bench.$1" "${@:3}" --out "$parts/$1-$2.json"
}

if is_wanted build; then
  # All architectures that are shipped, whatever the machine is set to build.
  env -u TORCH_CUDA_ARCH_LIST "$python" -m pip install --no-deps --no-build-isolation --force-reinstall --quiet "${ALBATROSS_WHEEL:-.}"
fi
"$python" -m albatross
if is_wanted tests; then
  "$python" -m pytest tests/gpu tests/ops tests/e2e -q
fi
if is_wanted wheel && [ -n "${ALBATROSS_WHEEL:-}" ]; then
  "$python" ci/verify_wheel.py --only load --torch "$(command -v "$python")" "$ALBATROSS_WHEEL"
fi
if is_wanted older; then
  TORCH_CUDA_ARCH_LIST="8.0+PTX" ALBATROSS_PTX_ONLY=1 "$python" -m pip install --no-deps --no-build-isolation --quiet --target "$parts/older" .
  ALBATROSS_LIB="$parts/older/albatross/_native/librwkv7_state_fwd_fp16.so" \
    "$python" -m pytest tests/gpu -q -k "linear or tmix or norm or wkv7 or sampling or test_model"
  rm -rf "$parts/older"
fi

measure golden all --device cuda
measure drift all --device cuda
measure chunks all --device cuda
measure tmix all
measure linear all
measure sampling all
measure decode fp16 --profile 1 32 256 960
measure decode fp32 --models 7.2b --rows 1 32 256 960 --state-dtype float32
measure prefill all --device cuda --profile 1x4096 8x512
measure engine demo --device cuda --concurrency 1 32 256
measure engine 1.5b --device cuda --model 1.5b --concurrency 1 8 32 256 960 --continuous --repeats 3
measure engine 7.2b --device cuda --model 7.2b --concurrency 1 8 32 128 256 960 --continuous --repeats 3
measure engine 7.2b-generation --device cuda --model 7.2b --generation --concurrency 128 512 --top-p 0.3 --repeats 3
measure interference 7.2b --device cuda --model 7.2b
if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -ge 2 ]; then
  measure workers 1.5b --model 1.5b --workers 1 2 --concurrency 256
fi
measure serve demo --device cuda --clients 64 --tokens 256

if [ -n "$(ls "$parts")" ]; then
  "$python" -m bench.merge "$out" "$parts"/*.json
fi
