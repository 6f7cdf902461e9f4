#!/usr/bin/env bash
# Runs the CUDA target on the GPU of this machine and writes what it found into one folder: is it right, is it clean under
# compute-sanitizer, does it last, how fast is it. Needs no network; at most ten minutes a call, and a later call goes on.
#
#   scripts/gpu_check.sh [options] [FOLDER]     default: out/gpu-check; and FOLDER.tar.gz, the same in one file
#     --archive PATH      that file; it is renewed after every step
#     --resume-from PATH  such a file of an earlier call, where FOLDER is gone: what was done is not done again
#     --only a,b          these steps alone (--list shows all)
#     --again             what was done is done again
#     --limit SECONDS     for everything together (default 560); a step gets no more than what is left
#     --dry-run           no device: the emulator, tiny sizes, nothing timed; tests the check itself
#     --plant FAULT@STEP  in a dry run: hang, segv, abort, kill, full-disk
#   scripts/gpu_check.sh --prepare [options]     on a machine without a GPU: builds the extension and compiles every kernel for a
#                                                bare machine with a GPU into .gpu-check, which is to be taken along (--help)
#   PYTHON=/path/to/python3   use this interpreter
#
# A step that fails, hangs or runs out of time does not stop the next one; Ctrl-C does, and the summary is still written. Exit
# status: 0 when every step was right.
set -u
cd "$(dirname "$0")/.." || exit 2
exec </dev/null
case "$*" in -h | --help) sed -n '2,18s/^# \{0,1\}//p' scripts/gpu_check.sh; exit 0 ;; esac
for tools in /usr/local/cuda/bin /opt/nvidia/nsight-compute/*; do # where installers put what they leave off PATH
  [ ! -d "$tools" ] || PATH=$PATH:$tools
done
module=scripts.gpu.check
if [ "${1:-}" = --prepare ]; then
  module=scripts.gpu.prepare
  shift
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" -m "$module" "$@"
