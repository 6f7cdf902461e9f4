#!/usr/bin/env bash
# Makes a virtual environment:  scripts/make_venv.sh FOLDER [VERSION]
# Keeps a folder that already works; a broken one (its Python is gone) is made anew. Installs nothing but a current pip.
set -eu
venv=$1
here=$(cd "$(dirname "$0")" && pwd)
if "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  exit 0
fi
python=$("$here/find_python.sh" ${2:+"$2"})
echo "making $venv with $("$python" --version) ($python)" >&2
rm -rf "$venv"
"$python" -m venv "$venv" || {
  echo "$python could not make a virtual environment (Debian: apt install python3-venv)." >&2
  exit 1
}
"$here/pip_install.sh" "$venv" --upgrade pip
