#!/usr/bin/env bash
# Runs the CUDA target on the GPU of this machine and writes what it found into one folder: is every kernel right, how fast are the
# applications beside jax.jit, cuDNN and PyTorch, what did the model say, where does time go. Needs no network.
#
#   scripts/gpu_check.sh [options] [FOLDER]      default: out/gpu-check, with measured.json and summary.txt
#     --limit SECONDS     for everything together (default 420)
#     --stages a,b        these stages (--help names all)
#     --only TEXT         families and cases whose name holds this; "failed": those that FOLDER tells of
#     --since FILE        measured.json of an earlier check: programs that were right with the same kernels do not run
#     --dry-run           no device: the emulator, tiny sizes; tests the check itself
#   scripts/gpu_check.sh --prepare [options]     on a machine without a GPU: builds the extension and compiles every kernel for a
#                                                bare machine with a GPU into .gpu-check, which is to be taken along (--help)
#   PYTHON=/path/to/python3   use this interpreter
#
# A case that fails, hangs or crashes costs itself alone. Ctrl-C ends the check, and what was found is written.
set -u
cd "$(dirname "$0")/.." || exit 2
exec </dev/null
for tools in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do # where installers put what they leave off PATH
  [ ! -d "$tools" ] || PATH=$PATH:$tools
done
module=scripts.gpu.check
if [ "${1:-}" = --prepare ]; then
  module=scripts.gpu.prepare
  shift
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m "$module" "$@"
