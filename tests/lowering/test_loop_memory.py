"""Memory of gradients through time: saved for every step it grows with the steps, recomputed by groups with their square root."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("kitsune_jax._cpu", reason="the extension is not built: pip install -e .")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: /proc")
ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS, WIDTH = 1024, 64
STATE = 4 * ROWS * WIDTH  # bytes

PROGRAM = f"""
import json, sys
import jax, jax.numpy as jnp, numpy as np
import kitsune_jax as kj
from benchmarks.memory import rise

groups, each, again = map(int, sys.argv[1:])

def loss(w, h):
    def group(h, _):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w + 0.1), None), h, length=each)[0], None

    return jnp.mean(jax.lax.scan(jax.checkpoint(group) if again else group, h, length=groups)[0] ** 2)

rng = np.random.default_rng(0)
w, h = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in (({WIDTH}, {WIDTH}), ({ROWS}, {WIDTH})))
step = jax.jit(kj.pipeline(jax.grad(loss, argnums=(0, 1)), force=True, strict=True)).lower(w, h).compile()
found = rise(lambda: step(w, h))
got, want = step(w, h), jax.jit(jax.grad(loss, argnums=(0, 1)))(w, h)
worst = float(np.max([jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in zip(got, want)]))  # NaN where one is
print(json.dumps({{"bytes": found, "worst": worst}}))
"""


def rise(groups: int, each: int, again: bool) -> int:
    """Bytes by which a process grows in its first gradient through ``groups`` times ``each`` steps."""
    command = [sys.executable, "-c", PROGRAM, str(groups), str(each), str(int(again))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["worst"] < 1e-4
    if found["bytes"] is None:
        pytest.skip("the peak of this process's memory cannot be reset here")
    return int(found["bytes"])


@pytest.mark.slow
def test_a_recomputed_loop_keeps_the_square_root_of_its_steps() -> None:
    few, many = rise(16, 16, again=True), rise(32, 32, again=True)
    saved = rise(32, 32, again=False)
    assert saved > 1024 * STATE  # one state for each step, at least
    assert many - few < 3 * (32 - 16) * STATE  # of four times as many steps: a state for each group, and what a group makes
    assert many < saved / 4
