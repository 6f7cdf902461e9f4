"""Sharded functions beside sharded ``jax.jit`` on several devices of one CPU: seconds, temporary memory, compilation.

    python -m benchmarks.devices                    # 2 devices; half a minute for each of five networks
    python -m benchmarks.devices --devices 4 --network nerf

Comes in: a network and a number of devices, among which its rows (edges) are divided. Goes out: a record in
``results/devices-<machine>-<date>.json``: the median and the least seconds of each column, measured in turns in one process, how
many times as fast the pipelines are, and the seconds to compile each with cold caches. Devices of one CPU share its cores, so the
seconds say nothing about scaling.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
MODES = ("inference", "training")
NETWORKS = ("nerf", "edges", "layer", "layer-bfloat16", "gat")


def networks() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...], tuple[int, ...]]]:
    """Name -> (function, arguments, those that are divided along their first dimension, those to differentiate)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.1).astype(np.float32)

    def nerf(x: Any, *weights: Any) -> Any:
        h = x
        for k, w in enumerate(weights[:-1]):
            h = jax.nn.relu((jnp.concatenate([h, x], -1) if k == 4 else h) @ w)
        return jax.nn.sigmoid(h @ weights[-1])

    def edges(e: Any, s: Any, r: Any, w1: Any, w2: Any, w3: Any) -> Any:
        h = jax.nn.relu(jax.nn.relu(jnp.concatenate([e, s, r], -1) @ w1) @ w2) @ w3
        h = h - jnp.mean(h, -1, keepdims=True)
        return e + h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)

    def layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, w1: Any, w2: Any, w3: Any) -> Any:
        n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        q, k, v = ((n @ w).reshape(*x.shape[:2], 8, 64) for w in (wq, wk, wv))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape) @ wo
        n = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x + (jax.nn.silu(n @ w1) * (n @ w3)) @ w2

    count, many = 20_000, 200_000
    index = tuple(rng.integers(0, count, many).astype(np.int32) for _ in range(2))

    def gat(nodes: Any, send: Any, receive: Any, w: Any, a: Any, b: Any) -> Any:
        h = nodes @ w
        scores = jax.nn.leaky_relu((h @ a)[send] + (h @ b)[receive])
        weights = jnp.exp(scores - jax.ops.segment_max(scores, receive, count)[receive])
        total = jax.ops.segment_sum(weights, receive, count)
        return jax.ops.segment_sum(h[send] * (weights / total[receive])[:, None], receive, count)

    hidden = [(64, 256), *[(256, 256)] * 3, (320, 256), *[(256, 256)] * 2, (256, 4)]
    swiglu = [(512, 1408), (1408, 512), (512, 1408)]
    of_edges = *(normal(50_000, 128) for _ in range(3)), normal(384, 128), normal(128, 128), normal(128, 128)
    of_layer = normal(4, 512, 512), *(normal(512, 512) for _ in range(4)), *(normal(*s) for s in swiglu)
    in_16_bits = tuple(x.astype(jnp.bfloat16) for x in of_layer)
    return {
        "nerf": (nerf, (normal(32_768, 64), *(normal(*s) for s in hidden)), (0,), tuple(range(1, 9))),
        "edges": (edges, of_edges, (0, 1, 2), (3, 4, 5)),
        "layer": (layer, of_layer, (0,), tuple(range(1, 8))),
        "layer-bfloat16": (layer, in_16_bits, (0,), tuple(range(1, 8))),
        "gat": (gat, (normal(count, 64), *index, normal(64, 64), normal(64), normal(64)), (1, 2), (0, 3, 4, 5)),
    }


def measure(name: str, mode: str, devices: int, rounds: int, compilations: int = 3) -> dict[str, Any]:
    """Both columns in turns, after one call of each. ``compilations``: of each column."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import kitsune_jax as kj
    from benchmarks.timing import rest

    function, given, divided, wrt = networks()[name]
    run = function if mode == "inference" else jax.value_and_grad(lambda *a: jnp.mean(function(*a) ** 2), wrt)
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    places = [NamedSharding(mesh, P("data") if k in divided else P()) for k in range(len(given))]
    args = [jax.device_put(x, place) for x, place in zip(given, places, strict=True)]
    columns = {"jit": jax.jit(run), "pipeline": jax.jit(kj.pipeline(run))}
    seconds: dict[str, list[float]] = {column: [] for column in columns}
    compiled = {column: f.lower(*args).compile() for column, f in columns.items()}
    compilation = cold_seconds(columns, args, compilations)
    for f in compiled.values():
        jax.block_until_ready(f(*args))
    for k in range(rounds):
        for column in list(columns)[:: 1 if k % 2 else -1]:
            rest()
            start = time.perf_counter()
            jax.block_until_ready(compiled[column](*args))
            seconds[column].append(time.perf_counter() - start)
    median = {column: statistics.median(found) for column, found in seconds.items()}
    return {
        "network": name,
        "mode": mode,
        "devices": devices,
        "median_seconds": median,
        "least_seconds": {column: min(found) for column, found in seconds.items()},
        "temporary_bytes": {column: temporary_bytes(c) for column, c in compiled.items()},
        "compile_seconds": compilation,
        "compile_ratio": compilation["pipeline"] / compilation["jit"],
        "speedup": median["jit"] / median["pipeline"],
    }


def cold_seconds(columns: dict[str, Any], args: Sequence[Any], rounds: int) -> dict[str, float]:
    """The least seconds to trace, lower and compile each of ``columns`` in ``rounds`` rounds in turns, with no trace, plan, program
    of a shard or executable in a cache. What is measured once for a machine (its profile) has to be there already."""
    import jax

    from kitsune_jax.frontend import lowering
    from kitsune_jax.sharding import calls

    least: dict[str, float] = {}
    for k in range(rounds):
        for column in list(columns)[:: 1 if k % 2 else -1]:
            jax.clear_caches()
            lowering._routed.cache_clear()
            calls.forget_programs()
            start = time.perf_counter()
            columns[column].lower(*args).compile()
            took = time.perf_counter() - start
            least[column] = min(took, least.get(column, took))
    return least


def temporary_bytes(compiled: Any) -> int:
    """Of one device, beside arguments and results; what a call keeps for itself does not count."""
    found = compiled.memory_analysis()
    return 0 if found is None else int(found.temp_size_in_bytes)


def save(records: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Write ``records`` as today's of this machine; earlier ones of the same cases are replaced."""
    from benchmarks.machine import describe_commit, describe_machine, describe_software, machine_slug, today

    machine = describe_machine()
    path = folder / f"devices-{machine_slug(machine)}-{today()}.json"
    old = json.loads(path.read_text())["cases"] if path.exists() else []
    new = [{**record, **describe_commit(), "versions": describe_software()} for record in records]
    kept = {(r["network"], r["mode"], r["devices"]): r for r in (*old, *new)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"format": FORMAT, "machine": machine, "date": today(), "cases": list(kept.values())}, indent=1) + "\n"
    )
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description="Sharded functions beside sharded jax.jit.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, help="default: all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args(argv)
    if args.devices < 2 or args.rounds < 1:
        parser.error("it takes at least 2 devices and 1 round")
    # Before JAX is imported.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}".strip()
    records = []
    for name in [args.network] if args.network else NETWORKS:
        for mode in MODES:
            record = measure(name, mode, args.devices, args.rounds)
            records.append(record)
            ours, jit = (1e3 * record["median_seconds"][column] for column in ("pipeline", "jit"))
            print(
                f"{name}, {mode}, {args.devices} devices: {ours:.1f} ms, jax.jit {jit:.1f} ms: {record['speedup']:.2f}x; "
                f"compiled in {record['compile_seconds']['pipeline']:.2f} s, {record['compile_ratio']:.2f} times jax.jit",
                flush=True,
            )
    print(f"-> {save(records, args.results).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
