#!/usr/bin/env bash
# Does an installed wheel work where there is no compiler?  scripts/check_wheel.sh FOLDER [WHEEL]
# Runs the README's quick start with the environment in FOLDER, where no program is on PATH, and says what fails. With WHEEL the
# environment is made if need be, and the wheel is installed into it first, without a PATH too: it has to bring all that is compiled.
set -eu
venv=$1 wheel=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
[ -z "$wheel" ] || "$here/make_venv.sh" "$venv"
python=$(cd "$venv/bin" && pwd)/python
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/empty"
alone() { env -u PYTHONPATH -u CC -u CXX PATH="$scratch/empty" "$@"; }
if [ -n "$wheel" ]; then
  alone "$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps "$wheel"
  alone "$python" -m pip install --quiet --disable-pip-version-check --only-binary :all: "$wheel"
fi
"$python" - "$here/../README.md" >"$scratch/quickstart.py" <<'PY'
import re, sys
print(re.search(r"<!-- quickstart: begin -->\s*```python\n(.*?)```", open(sys.argv[1], encoding="utf-8").read(), re.DOTALL)[1])
print('''
import os, shutil, sys
assert not any(map(shutil.which, ("c++", "g++", "clang++", "cc", "gcc", "clang"))), "a compiler was found"
assert os.path.realpath(kj.__file__).startswith(os.path.realpath(sys.prefix)), f"{kj.__file__} was imported, not the wheel"
assert not kj.fallbacks(), kj.fallbacks()
assert kj.explain(mlp)(params, x).ops_pipelined, "nothing was pipelined"
assert jnp.allclose(out, jax.jit(mlp.__wrapped__)(params, x), rtol=1e-4, atol=1e-4), "a wrong result"
''')
PY
cd "$scratch" && alone "$python" -W "error:kitsune_jax could not" quickstart.py
