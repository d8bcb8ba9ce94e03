#!/usr/bin/env bash
# Compiles the kernels of csrc/cuda for AMD cards with csrc/hip's headers, and prints a table of what came out; but for those in
# chunks, which are CUDA's alone. Nothing is linked
# and nothing runs: no card is needed. Knows nothing of torch.
#
#   ci/check_hip.sh [--require] [target ...]      all targets if none is named
#
# A target whose compiler is missing is not checked, which is an error only with --require. Debian has the compilers:
#   apt-get install --no-install-recommends hipcc lld-15 clang-19 lld-19
# Variables: HIPCC (hipcc), HIP_CLANG (clang-19), MAX_JOBS (2).
set -euo pipefail
cd "$(dirname "$0")/.."

# hipcc 5.2.3 has the device libraries of the older cards only, so for the others clang stops before they would be linked.
declare -A KIND=([gfx90a]=object [gfx1030]=object [gfx1100]=assembly [gfx942]=assembly)
ORDER="gfx90a gfx1030 gfx1100 gfx942"
export HIPCC="${HIPCC:-hipcc}" HIP_CLANG="${HIP_CLANG:-clang-19}" HIP_PLATFORM=amd  # hipcc would choose an nvcc it finds

is_required=no
targets=""
for argument in "$@"; do
  if [[ $argument == --require ]]; then
    is_required=yes
  elif [[ -n ${KIND[$argument]:-} ]]; then
    targets+=" $argument"
  else
    echo "A target must be one of $ORDER, found '$argument'." >&2
    exit 2
  fi
done
targets=${targets:-$ORDER}

sources=$(grep -L '"chunk_' csrc/cuda/*.cu || true)  # its status is that of finding some
work=$(mktemp -d)
export work
trap 'rm -rf "$work"' EXIT

# The numbers that Python and the kernels share, as CMakeLists.txt writes them.
script=""
for name in $(grep -o '@[A-Z_]*@' csrc/constants.h.in | tr -d @); do
  value=$(sed -nE "s/^$name = ([0-9.e-]+).*/\1/p" python/albatross/constants.py)
  [[ -n $value ]] || { echo "python/albatross/constants.py must have a number $name for csrc/constants.h.in." >&2; exit 1; }
  script+="s/@$name@/$value/;"
done
sed "$script" csrc/constants.h.in > "$work/constants.h"

# compile TARGET KIND SOURCE: leaves a word for the table in $work/SOURCE.TARGET.result.
compile() {
  local target=$1 kind=$2 source=$3 out
  out="$work/$(basename "$source").$target"
  # Numbers are read as the words they are packed in. What the optimizer declines to unroll is no fault.
  local flags=(-x hip --offload-arch="$target" -std=c++17 -O3 -Wall -Wextra -Werror -Wno-pass-failed -fno-strict-aliasing
    -Icsrc/hip -Icsrc -Icsrc/cuda -I"$work")
  if [[ $kind == object ]]; then
    "$HIPCC" "${flags[@]}" -c "$source" -o "$out" 2> "$out.log" && grep -qa "amdgcn-amd-amdhsa--$target" "$out"
  else
    "$HIP_CLANG" "${flags[@]}" -nogpulib --offload-device-only -S "$source" -o "$out" 2> "$out.log" &&
      grep -q "amdgcn-amd-amdhsa--$target" "$out"
  fi && echo "$kind" > "$out.result" || echo failed > "$out.result"
}
export -f compile

jobs=""
for target in $targets; do
  tool=$([[ ${KIND[$target]} == object ]] && echo "$HIPCC" || echo "$HIP_CLANG")
  if command -v "$tool" > /dev/null; then
    for source in $sources; do jobs+="$target ${KIND[$target]} $source"$'\n'; done
  else
    echo "$target is not checked: $tool was not found."
  fi
done
printf %s "$jobs" | xargs -r -P "${MAX_JOBS:-2}" -L 1 bash -c 'compile "$@"' compile

row() { printf '%-20s' "$1"; shift; printf '%-14s' "$@"; echo; }
# shellcheck disable=SC2086
row kernel $targets
status=0
for source in $sources; do
  results=()
  for target in $targets; do
    out="$work/$(basename "$source").$target"
    result=$(cat "$out.result" 2> /dev/null || echo "not checked")
    [[ $result != failed ]] || { status=1; echo "--- $source for $target"; cat "$out.log"; } >&2
    [[ $result != "not checked" || $is_required == no ]] || status=1
    results+=("$result")
  done
  row "$(basename "$source")" "${results[@]}"
done
exit $status
