#!/usr/bin/env bash
# Prints the path of the newest usable CPython that JAX supports; says on stderr what is missing where there is none.
#
#   scripts/find_python.sh              newest of 3.14 .. 3.11
#   scripts/find_python.sh 3.11         exactly this version (exit status 1 where it is not here)
#   PYTHON=/path/to/python make test    overrides the search; the choice is still checked
#
# Usable: 64-bit CPython with `venv` and `ensurepip`, and with the C headers that the extension is compiled against.
set -u

SUPPORTED="3.14 3.13 3.12 3.11"
versions=${1:-$SUPPORTED}
problems=""

# Prints "ok", or what this interpreter lacks; nothing where it does not run or is another version.
check() {
  "$1" - "$2" 2>/dev/null <<'PY'
import os, sys, sysconfig
if "%d.%d" % sys.version_info[:2] not in sys.argv[1].split():
    sys.exit(0)
lacks = []
if sys.implementation.name != "cpython" or sys.maxsize < 2**32 or sysconfig.get_config_var("Py_GIL_DISABLED"):
    lacks.append("a 64-bit CPython with the GIL")
try:
    import ensurepip, venv
except ImportError:
    lacks.append("venv/ensurepip (Debian: apt install python%d.%d-venv)" % sys.version_info[:2])
if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    lacks.append("Python.h (Debian: apt install python%d.%d-dev)" % sys.version_info[:2])
print("; ".join(lacks) or "ok")
PY
}

try() { # path, wanted versions: prints the path and exits where it is usable
  command -v "$1" >/dev/null 2>&1 || return 0
  local verdict
  verdict=$(check "$1" "$2")
  case "$verdict" in
    ok) "$1" -c 'import sys; print(sys.executable)'; exit 0 ;; # not a shim: what it stands for
    "") ;;
    *) problems="$problems
  $(command -v "$1") lacks $verdict" ;;
  esac
}

if [ -n "${PYTHON:-}" ] && [ $# -eq 0 ]; then
  try "$PYTHON" "$versions"
  echo "PYTHON=$PYTHON is not a usable Python (one of: $SUPPORTED).$problems" >&2
  exit 1
fi

for version in $versions; do
  try "python$version" "$version"
  for path in "$HOME"/.pyenv/versions/"$version".*/bin/python "$HOME"/.local/share/uv/python/cpython-"$version".*/bin/python \
    /usr/bin/"python$version" /usr/local/bin/"python$version" /opt/homebrew/bin/"python$version"; do
    try "$path" "$version"
  done
done
for path in python3 /usr/bin/python3 /usr/local/bin/python3 python; do
  try "$path" "$versions"
done

{
  echo "No usable Python found (need one of: $versions)."
  if [ -n "$problems" ]; then
    echo "Looked at:$problems"
  else
    echo "Install one, for instance:  sudo apt install python3 python3-venv python3-dev   (or https://github.com/pyenv/pyenv)"
  fi
  echo "Or name one:  make PYTHON=/path/to/python3 test"
} >&2
exit 1
