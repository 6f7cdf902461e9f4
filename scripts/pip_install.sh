#!/usr/bin/env bash
# pip install into an environment, quietly:  scripts/pip_install.sh FOLDER ARGUMENTS...
# The whole output stays in FOLDER/install.log; where it fails, its end is shown.
set -u
venv=$1
shift
if ! "$venv/bin/python" -m pip install --disable-pip-version-check "$@" >"$venv/install.log" 2>&1; then
  tail -n 40 "$venv/install.log" >&2
  echo "pip install $* failed (above: the end of $venv/install.log). Without a network, set PIP_INDEX_URL or PIP_FIND_LINKS." >&2
  exit 1
fi
