"""A call that finds no memory: XLA's error says how much was wanted, what for, and how to go on; the next call works.

Each case limits the address space of a process of its own. The C++ tests (``cpu/tests/test_memory.cc``) fail every allocation of a
call in turn.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc and RLIMIT_AS")
ROOT = pathlib.Path(__file__).resolve().parents[2]

PROGRAM = """
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
import kitsune_jax as kj

case, margin = sys.argv[1], int(sys.argv[2])
N = 1536
rng = np.random.default_rng(0)
x, w, v = (rng.standard_normal(s).astype(np.float32) / 64 for s in ((400, N), (N, N), (N, N)))

def weights(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)

def sums(x, w, v):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) * x))(w)

def phases(x, w, v):
    return w - 0.5 * sums(x, w, v)

xd, wd, vd = (a.astype(np.float64) for a in (x, w, v))
gradient = xd.T @ (xd * (1 - np.tanh(xd @ wd) ** 2))
want = {"weights": np.tanh(np.tanh(xd @ wd) @ vd), "sums": gradient, "phases": wd - 0.5 * gradient}[case]
args = [jnp.asarray(a) for a in (x, w, v)]
call = jax.jit(kj.pipeline(globals()[case], force=True)).lower(*args).compile()
jax.block_until_ready(jax.jit(globals()[case])(*args))  # threads, which have address space of their own
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + margin, hard))
errors = []
for _ in range(2):
    try:
        call(*args).block_until_ready()
        errors.append("no error")
    except jax.errors.JaxRuntimeError as error:
        errors.append(str(error))
resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
worst = float(np.abs(np.asarray(call(*args)) - want).max())
print(json.dumps({"errors": errors, "worst": worst}))
"""


@pytest.mark.parametrize(
    "case,margin,what",
    [
        ("weights", 8 << 20, f"{2 * 1536 * 1536 * 4} bytes of packed weights"),
        ("sums", 40 << 20, "bytes of partial sums"),
        ("phases", 64 << 20, r"\d+ bytes of (arrays between phases|packed weights|partial sums)"),
    ],
)
def test_a_call_without_memory_says_what_it_wanted(case: str, margin: int, what: str) -> None:
    # A plan for many cores keeps many partial sums, so that what is wanted stands out from what the process happens to have.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "KITSUNE_PROFILE": "zen5-16"}
    env.pop("XLA_FLAGS", None)
    env["MALLOC_ARENA_MAX"] = "1"  # address space that glibc reserves for threads is inside the limit, and would serve the call
    done = subprocess.run([sys.executable, "-c", PROGRAM, case, str(margin)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    for error in seen["errors"]:
        assert error.startswith("RESOURCE_EXHAUSTED: kitsune: out of memory in 'region0"), error
        assert re.search(what, error) and "KITSUNE_DISABLE=1" in error, error
    assert seen["worst"] < 1e-5
