#!/usr/bin/env bash
# Runs the CUDA target on the GPU of this machine and writes what it found into one folder: is it right, is it clean under
# compute-sanitizer, does it last, how fast is it. Needs no network; ten minutes at most.
#
#   scripts/gpu_check.sh [options] [FOLDER]     default: out/gpu-check; and FOLDER.tar.gz, the same in one file
#     --only a,b       these steps alone: build environment precompile correctness training benchmarks train-benchmarks micro
#                      sanitizer soak traffic portable
#     --limit SECONDS  for everything together (default 570); a step gets no more than what is left
#     --dry-run        no device: the emulator, tiny sizes, nothing timed; tests the script itself
#   PYTHON=/path/to/python3   use this interpreter
#
# A step that fails or runs out of time does not stop the next one; Ctrl-C does, and the summary is still written. Exit status: 0 when
# every step that ran was right.
set -u
cd "$(dirname "$0")/.." || exit 2
exec </dev/null

LIMIT=570 ONLY="" DRY="" FOLDER=out/gpu-check
while [ $# -gt 0 ]; do
  case $1 in
    --only) ONLY=",${2:?--only needs steps},"; shift ;;
    --limit) LIMIT=${2:?--limit needs seconds}; shift ;;
    --dry-run) DRY=--dry-run ;;
    -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) echo "unknown option $1: try --help" >&2; exit 2 ;;
    *) FOLDER=$1 ;;
  esac
  shift
done
PYTHON=${PYTHON:-python3}
for tools in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do # where installers put what they leave off PATH
  [ ! -d "$tools" ] || PATH=$PATH:$tools
done
mkdir -p "$FOLDER/logs" || exit 2
FOLDER=$(cd "$FOLDER" && pwd)
rm -f "$FOLDER"/*.json "$FOLDER"/status.tsv
: >"$FOLDER/status.tsv"

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# Steps share kernels, and a kernel of another run is never taken for one of this.
export KITSUNE_CACHE_DIR=${KITSUNE_CACHE_DIR:-$FOLDER/cache}
# Several processes take turns with the device: none may keep most of its memory.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
[ -z "$DRY" ] || export JAX_PLATFORMS=cpu

failed=0 interrupted="" child=""
trap 'interrupted=1; [ -z "$child" ] || kill -INT "$child" 2>/dev/null' INT TERM

wanted() { [ -z "$ONLY" ] || [[ $ONLY == *",$1,"* ]]; }

# step NAME SECONDS COMMAND...: runs it with a time limit, its output in logs/NAME.log.
step() {
  local name=$1 limit=$2 left=$((LIMIT - SECONDS)) start=$SECONDS status
  shift 2
  [ -z "$interrupted" ] && wanted "$name" || return 0
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -lt 5 ]; then
    echo "=== $name: no time left"
    status=124
  else
    echo "=== $name (at most $limit s)"
    # In the background, because bash runs a trap only between commands and in wait.
    timeout --kill-after=5 "$limit" "$@" >"$FOLDER/logs/$name.log" 2>&1 &
    child=$!
    wait "$child"
    status=$?
    [ -z "$interrupted" ] || { wait "$child" 2>/dev/null; status=130; }
    child=""
    tail -n 4 "$FOLDER/logs/$name.log"
  fi
  printf '%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - start))" >>"$FOLDER/status.tsv"
  [ "$status" -eq 0 ] || failed=1
  return "$status"
}

# A step in Python, which writes FOLDER/NAME.json.
check() { # name, seconds, module, arguments...
  local name=$1 limit=$2 module=$3
  shift 3
  step "$name" "$limit" "$PYTHON" -m "scripts.gpu.$module" $DRY --output "$FOLDER/$name.json" "$@"
}

build() {
  "$PYTHON" - <<'PY' || return 2
import importlib.util, sys
missing = [m for m in ("nanobind", "setuptools", "jaxlib") if importlib.util.find_spec(m) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}, which the extension is built with: pip install {' '.join(missing)}")
PY
  scripts/check_compiler.sh || return 2
  "$PYTHON" setup.py build_ext --inplace
}
export -f build
export PYTHON

# Kernels in compute-sanitizer's eyes only: XLA's own need no check here, and each tool slows what it watches. The option that selects
# them has had two names.
sanitize() {
  local tool=$1 json=$2 filter=()
  if ! command -v compute-sanitizer >/dev/null; then
    echo '{"findings": [{"name": "compute-sanitizer", "ok": true, "skipped": "there is no compute-sanitizer on PATH"}]}' >"$json"
    return 0
  fi
  local help
  help=$(compute-sanitizer --help 2>&1)
  if grep -q -- '--kernel-name' <<<"$help"; then
    filter=(--kernel-name kernel_substring=kitsune_region)
  elif grep -q -- '--kernel-regex' <<<"$help"; then
    filter=(--kernel-regex kns=kitsune_region)
  fi
  compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 "${filter[@]}" \
    "$PYTHON" -m scripts.gpu.correctness --few --output "$json"
}
export -f sanitize

# Training steps, each in a process of its own: what one has compiled and allocated stays on the device as long as its process.
train_benchmarks() {
  local case failed=0
  for case in "nerf 262144" "mgn 200000" "swiglu 65536"; do
    "$PYTHON" -m benchmarks run --mode train --platform cuda --app "${case% *}" --rows "${case#* }" --dtype bf16 \
      --rounds 20 --seconds 4 --results "$FOLDER/results" || failed=1
  done
  return "$failed"
}
export -f train_benchmarks
export FOLDER

# What matters most comes first: the last steps get what time is left.
[ -n "$DRY" ] || step build 120 bash -c build
check environment 60 environment
if [ -z "$DRY" ]; then
  JAX_PLATFORMS=cpu check precompile 150 precompile
  check correctness 140 correctness
  check training 100 training
  step benchmarks 150 "$PYTHON" -m benchmarks run --all --platform cuda --rounds 20 --seconds 4 --results "$FOLDER/results"
  step train-benchmarks 120 bash -c train_benchmarks
  step micro 60 "$PYTHON" -m benchmarks.micro --output "$FOLDER/micro.json"
  for tool in memcheck racecheck synccheck; do
    wanted sanitizer || break
    [ -z "$ONLY" ] || ONLY="$ONLY$tool,"
    step "$tool" 60 bash -c 'sanitize "$@"' sanitize "$tool" "$FOLDER/$tool.json"
  done
else
  check precompile 60 precompile --only planned
  check correctness 120 correctness
  check training 120 training
  step micro 60 "$PYTHON" -m benchmarks.micro --backend emulator --output "$FOLDER/micro.json"
  step benchmarks 60 "$PYTHON" -m benchmarks run --app mgn --dtype f32 --rows 64 --rounds 3 --seconds 1 --no-child \
    --results "$FOLDER/results"
fi
check soak 50 soak --seconds 30
check traffic 120 traffic --seconds 40
# The path for every device from compute capability 8.0 on also runs on later ones; a process of its own, because one has one architecture.
[ -n "$DRY" ] || KITSUNE_CUDA_ARCH=sm_90 check portable 90 correctness --only "bfloat16 333 sm80" --processes 8

"$PYTHON" -m scripts.gpu.summary "$FOLDER" || failed=1
tar -czf "$FOLDER.tar.gz" -C "$(dirname "$FOLDER")" --exclude=cache "$(basename "$FOLDER")" && echo "everything: $FOLDER.tar.gz"
[ -z "$interrupted" ] || exit 130
exit $failed
