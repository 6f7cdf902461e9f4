"""Sharded functions in two processes, whose devices talk by Gloo, and their programs in JAX's persistent compilation cache."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kitsune_jax as kj
from tests.support.checks import close

# Arguments: the number of the process, the coordinator, the number of processes, files of operands and results, a cache or nothing.
PROGRAM = """
import logging, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

number, coordinator, processes, operands, results, cache = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 8 // int(processes))
if int(processes) > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(processes), int(number))
hits = []
if cache:
    class Hits(logging.Handler):
        def emit(self, record):
            if "cache hit for 'jit_step" in record.getMessage():
                hits.append(record.getMessage())

    log = logging.getLogger("jax._src.compiler")
    log.addHandler(Hits())
    log.setLevel(logging.DEBUG)
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

import kitsune_jax as kj

assert len(jax.devices()) == 8 and len(jax.local_devices()) == 8 // int(processes)
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
data = np.load(operands)
SHARDINGS = {
    "data_parallel": {"x": P("data"), "w1": P(), "w2": P()},
    "tensor_parallel": {"x": P("data"), "w1": P(None, "model"), "w2": P("model")},
}

def mlp(x, w1, w2):
    return jnp.tanh(x @ w1) @ w2

def gradient(x, w1, w2):
    return jax.grad(lambda *w: jnp.mean(mlp(x, *w) ** 2), (0, 1))(w1, w2)

found = {}
for name, function, placed in (
    ("data_parallel", mlp, "data_parallel"),
    ("tensor_parallel", mlp, "tensor_parallel"),
    ("gradient", gradient, "data_parallel"),
):
    step = kj.pipeline(function, force=True, strict=True)
    step.__name__ = "step"
    shardings = {k: NamedSharding(mesh, spec) for k, spec in SHARDINGS[placed].items()}
    args = [jax.make_array_from_callback(data[k].shape, s, lambda index, k=k: data[k][index]) for k, s in shardings.items()]
    compiled = jax.jit(step, out_shardings=NamedSharding(mesh, P())).lower(*args).compile()
    print(f"<{name} {compiled.as_text().count('custom_call_target=\\"kitsune_cpu\\"')}>")
    for k, out in enumerate(jax.tree.leaves(compiled(*args))):
        assert out.is_fully_replicated
        copies = [np.asarray(shard.data) for shard in out.addressable_shards]
        assert all((copy == copies[0]).all() for copy in copies)
        found[f"{name}{k}"] = copies[0]
print(f"<hits {len(hits)}>", kj.fallbacks() or "", flush=True)
np.savez(results, **found)
"""


# Arguments: the number of the process, the coordinator. The second process is on a host with older kernels and fewer cores.
UNLIKE = """
import hashlib, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

number, coordinator = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, number)

import kitsune_jax as kj
from kitsune_jax import _compat, _cpu
from kitsune_jax.targets.cpu.profile import profile, store

if number:
    assert _cpu.set_isa("generic")
    os.environ["KITSUNE_NUM_THREADS"] = "1"
own = profile.shipped("generic-1" if number else "zen5-8")
store._local_profile = lambda workers: store._FoundProfile(own, ())  # measured, as if it were this host's

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
x = np.linspace(-1, 1, 4096 * 64, dtype=np.float32).reshape(4096, 64)
w = np.cos(np.arange(64 * 64, dtype=np.float32)).reshape(64, 64)
place = [NamedSharding(mesh, spec) for spec in (P("data"), P())]
args = [jax.make_array_from_callback(a.shape, s, lambda index, a=a: a[index]) for a, s in zip((x, w), place)]

def compiled():
    def step(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum(0)

    return jax.jit(kj.pipeline(step, force=True, strict=True), out_shardings=place[1]).lower(*args).compile()

def digest(program):
    # Of the words of its calls.
    calls = [line.partition("backend_config=")[2] for line in program.as_text().splitlines() if "kitsune_cpu" in line]
    assert all("program" in call for call in calls)
    return hashlib.sha256("".join(calls).encode()).hexdigest()[:15]

program = compiled()
print(f"<digest {int(digest(program), 16)}> <calls {program.as_text().count('custom_call_target=\"kitsune_cpu\"')}>")
out = np.asarray(program(*args).addressable_shards[0].data)
np.testing.assert_allclose(out, np.tanh(np.tanh(x.astype(np.float64) @ w) @ w).sum(0), rtol=1e-4, atol=1e-2)
_compat.distributed_client = lambda: None  # with this host's own profile
store._known.clear()
jax.clear_caches()
from kitsune_jax.sharding import calls
from kitsune_jax.frontend import lowering
calls.forget_programs()
lowering._routed.cache_clear()
print(f"<alone {int(digest(compiled()), 16)}>", store.at_hand().name)
"""

# Functions of which XLA's own partition is compared with this package's, in processes of one device each. Arguments: the number of
# the process, the coordinator.
COMPARED = """
import hashlib, logging, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

number, coordinator = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(coordinator, 2, int(number))
import kitsune_jax as kj
from kitsune_jax import _compat

compared, told = [], []
by_xla = _compat.partition_by_xla
_compat.partition_by_xla = lambda *args: compared.append(by_xla(*args)) or compared[-1]
log = logging.getLogger("kitsune_jax")
log.addHandler(type("Told", (logging.Handler,), {"emit": lambda self, record: told.append(record.getMessage())})())
log.setLevel(logging.INFO)
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

def gradient(x, w, v):
    return jax.grad(lambda *a: jnp.mean((jax.nn.gelu(a[0] @ a[1], approximate=False) @ a[2]) ** 2), (0, 1, 2))(x, w, v)

def layer(x, w, v):
    return jnp.tanh(jnp.tanh(x @ w) @ v)

for name, function, shapes, specs in (
    ("gradient", gradient, [(4096, 64), (64, 256), (256, 64)], [P(), P(None, "x"), P("x")]),
    ("layer", layer, [(4096, 64), (64, 256), (256, 64)], [P("x"), P("x"), P("x")]),
):
    arrays = [np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape) for shape in shapes]
    placed = [NamedSharding(mesh, spec) for spec in specs]
    args = [jax.make_array_from_callback(a.shape, s, lambda index, a=a: a[index]) for a, s in zip(arrays, placed)]
    compiled = jax.jit(kj.pipeline(function)).lower(*args).compile()
    for out, usual in zip(*(jax.tree.leaves(f(*args)) for f in (compiled, jax.jit(function)))):
        mine, theirs = (np.asarray(x.addressable_shards[0].data) for x in (out, usual))
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())
    text = compiled.as_text()
    digest = int(hashlib.sha256(re.sub("metadata=.*|backend_config=.*", "", text).encode()).hexdigest()[:15], 16)
    print(f"<{name}_calls {text.count('custom_call_target=\\"kitsune_cpu\\"')}> <{name}_digest {digest}>")
    print(f"<{name}_compared {len(compared)}> <{name}_by_xla {sum('XLA divides' in line for line in told)}>")
    compared.clear(), told.clear()
"""


def _run(folder: Path, processes: int, cache: Path | str = "") -> list[tuple[dict[str, int], dict[str, np.ndarray]]]:
    """Of each process: (what it counted, its results)."""
    if not (folder / "operands.npz").exists():
        np.savez(folder / "operands.npz", **_operands())
    files = [[str(folder / "operands.npz"), str(folder / f"{i}.npz"), str(cache)] for i in range(processes)]
    found = []
    for i, counted in enumerate(_started(PROGRAM, [[str(processes), *file] for file in files])):
        with np.load(folder / f"{i}.npz") as results:
            found.append((counted, {name: results[name] for name in results.files}))
    return found


def _started(program: str, arguments: list[list[str]], **variables: str | None) -> list[dict[str, int]]:
    """Of each process: the numbers that it printed. Its first arguments are its number and the coordinator."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", ""))
    root = str(Path(kj.__file__).resolve().parents[1])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    for name, value in variables.items():
        env.pop(name, None)
        env |= {} if value is None else {name: value}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(i), coordinator, *more],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, more in enumerate(arguments)
    ]
    try:
        told = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, err) in zip(started, told, strict=True):
        assert process.returncode == 0, err[-4000:]
    return [{name: int(n) for name, n in re.findall(r"<(\w+) (\d+)>", out)} for out, _ in told]


def _operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (48, 32), "w1": (32, 64), "w2": (64, 16)}
    return {name: (rng.standard_normal(shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def _expected() -> dict[str, Any]:
    """By NumPy in float64."""
    x, w1, w2 = (a.astype(np.float64) for a in _operands().values())
    h = np.tanh(x @ w1)
    y = h @ w2
    dy = 2 * y / y.size
    return {"data_parallel0": y, "tensor_parallel0": y, "gradient0": x.T @ (dy @ w2.T * (1 - h**2)), "gradient1": h.T @ dy}


def test_two_processes(tmp_path: Path) -> None:
    (counted, results), (counted_there, results_there) = _run(tmp_path, 2)
    for name in ("data_parallel", "tensor_parallel", "gradient"):
        assert counted[name] == counted_there[name] > 0
    close(results, _expected())
    for name, array in results.items():
        np.testing.assert_array_equal(array, results_there[name])


def test_unlike_hosts_have_the_same_plan() -> None:
    """The first process's: its cores and kernels, which the others need not have."""
    first, second = _started(UNLIKE, [[], []], KITSUNE_PROFILE=None, KITSUNE_NUM_THREADS=None)
    assert first["digest"] == second["digest"] and first["calls"] == second["calls"] > 0
    assert first["alone"] == first["digest"] != second["alone"]


def test_two_processes_choose_the_same_partition() -> None:
    """XLA's where this package's needs more memory, and this package's where it does not."""
    first, second = _started(COMPARED, [[], []], KITSUNE_PROFILE="zen5-2")
    assert first == second
    assert first["gradient_compared"] == first["gradient_by_xla"] == 1 and first["gradient_calls"] == 0
    assert first["layer_compared"] == 1 and first["layer_by_xla"] == 0 and first["layer_calls"] > 0


def test_a_second_process_hits_the_persistent_cache(tmp_path: Path) -> None:
    ((first, once),) = _run(tmp_path, 1, tmp_path / "cache")
    ((second, again),) = _run(tmp_path, 1, tmp_path / "cache")
    assert first.pop("hits") == 0
    assert second.pop("hits") == 3
    assert first == second
    assert all(n > 0 for n in first.values())
    for name, array in once.items():
        np.testing.assert_array_equal(array, again[name])
    close(once, _expected())
