"""How long a function takes to trace, lower and compile, against ``jax.jit``.

    python -m benchmarks.lower                              # all networks at their default lengths
    python -m benchmarks.lower --network gradient --layers 20 80

Comes in: a network and a number of layers. Goes out: a record of the CPU seconds of each phase, by column, in
``results/lower-<machine>-<date>.json``. Seconds are those of this process's threads together, the least of the rounds: other load
on the machine changes them little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import kitsune_jax as kj
from benchmarks.machine import describe_commit, describe_machine, describe_software, machine_slug, today
from benchmarks.store import RESULTS
from kitsune_jax.frontend import lowering, route

FORMAT = 1
PHASES = ("trace", "lower", "compile")
Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def blocks(params: Any, x: Any) -> Any:
    """Residual layers of a dense product, a GELU and a layer norm."""
    for w, b, gain in params:
        h = jax.nn.gelu(x @ w + b)
        h = h - h.mean(-1, keepdims=True)
        x = x + h * jax.lax.rsqrt((h**2).mean(-1, keepdims=True) + 1e-5) * gain
    return x


def passing(params: Any, nodes: Any, edges: Any, senders: Any, receivers: Any) -> Any:
    """Message passing: an update of the edges from their ends, then of the nodes from the sum of their edges."""
    for w1, w2, w3, w4 in params:
        edges = edges + jax.nn.gelu(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1) @ w1) @ w2
        sums = jax.ops.segment_sum(edges, receivers, nodes.shape[0])
        nodes = nodes + jax.nn.gelu(jnp.concatenate([nodes, sums], -1) @ w3) @ w4
    return nodes


def _adam(loss: Callable[[Any], Any], params: Any, mean: Any, square: Any) -> Any:
    grads = jax.grad(loss)(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, grads)
    return jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, mean, square), mean, square


def _layers(n: int, rows: int = 4096, width: int = 96) -> tuple[Any, Any]:
    return [(_f32(width, width), _f32(width), _f32(width)) for _ in range(n)], _f32(rows, width)


def _steps(n: int, nodes: int = 2048, edges: int = 8192, width: int = 64) -> tuple[Any, ...]:
    index = jax.ShapeDtypeStruct((edges,), jnp.int32)
    sizes = [_f32(3 * width, width), _f32(width, width), _f32(2 * width, width), _f32(width, width)]
    return [tuple(sizes) for _ in range(n)], _f32(nodes, width), _f32(edges, width), index, index


@dataclasses.dataclass(frozen=True)
class Network:
    """``make(transform, n)``: the function with its network transformed, and abstract arguments for ``n`` layers."""

    title: str
    layers: tuple[int, ...]
    make: Callable[[Transform, int], tuple[Callable[..., Any], Sequence[Any]]]


def _forward(transform: Transform, n: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    return transform(lambda p, x: blocks(p, x)), _layers(n)


def _gradient(transform: Transform, n: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    network = transform(lambda p, x: blocks(p, x))
    return lambda p, x: jax.grad(lambda p: (network(p, x) ** 2).mean())(p), _layers(n)


def _step(transform: Transform, n: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    params, x = _layers(n)
    return transform(lambda p, m, v, x: _adam(lambda p: (blocks(p, x) ** 2).mean(), p, m, v)), (params, params, params, x)


def _passing(transform: Transform, n: int) -> tuple[Callable[..., Any], Sequence[Any]]:
    network = transform(lambda p, *graph: passing(p, *graph))
    return lambda p, *graph: jax.grad(lambda p: (network(p, *graph) ** 2).mean())(p), _steps(n)


NETWORKS = {
    "forward": Network("residual MLP, forward", (20, 80, 200), _forward),
    "gradient": Network("residual MLP, gradient", (20, 80, 200), _gradient),
    "step": Network("residual MLP, training step", (20, 80), _step),
    "passing": Network("message passing, gradient", (15, 60), _passing),
}
COLUMNS: dict[str, Transform] = {"jit": lambda f: f, "pipeline": kj.pipeline}


def measure(name: str, layers: int, rounds: int) -> dict[str, Any]:
    """The least CPU seconds of each phase in ``rounds`` rounds, by column, and how many times ``jit``'s the pipeline takes."""
    columns: dict[str, dict[str, float]] = {}
    for column, transform in COLUMNS.items():
        found = [_seconds(*NETWORKS[name].make(transform, layers)) for _ in range(rounds)]
        columns[column] = min(found, key=lambda seconds: sum(seconds.values()))
    total = {column: sum(seconds.values()) for column, seconds in columns.items()}
    return {"network": name, "layers": layers, "columns": columns, "ratio": total["pipeline"] / total["jit"]}


def _seconds(f: Callable[..., Any], args: Sequence[Any]) -> dict[str, float]:
    jax.clear_caches()
    lowering._routed.cache_clear()
    route._known_plans.cache_clear()
    at = [time.process_time()]
    traced = jax.jit(f).trace(*args)
    at.append(time.process_time())
    lowered = traced.lower()
    at.append(time.process_time())
    lowered.compile()
    at.append(time.process_time())
    return {phase: end - start for phase, start, end in zip(PHASES, at, at[1:], strict=False)}


def save(records: Sequence[dict[str, Any]], folder: Path = RESULTS) -> Path:
    """Write ``records`` as today's of this machine; earlier ones of the same network and length are replaced."""
    machine = describe_machine()
    path = folder / f"lower-{machine_slug(machine)}-{today()}.json"
    new = [{**record, **describe_commit(), "versions": describe_software()} for record in records]
    old = json.loads(path.read_text())["cases"] if path.exists() else []
    kept = {(r["network"], r["layers"]): r for r in (*old, *new)}
    cases = [kept[key] for key in sorted(kept, key=lambda key: (list(NETWORKS).index(key[0]), key[1]))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": FORMAT, "machine": machine, "date": today(), "cases": cases}, indent=1) + "\n")
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lower", description="Time to trace, lower and compile.")
    parser.add_argument("--network", choices=NETWORKS, help="default: all")
    parser.add_argument("--layers", type=int, nargs="+", help="default: the network's own lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    records = []
    for name in [args.network] if args.network else NETWORKS:
        measure(name, 1, 1)  # imports, and what is worked out once
        for layers in args.layers or NETWORKS[name].layers:
            record = measure(name, layers, args.rounds)
            records.append(record)
            for column, seconds in record["columns"].items():
                phases = ", ".join(f"{phase} {t:.2f} s" for phase, t in seconds.items())
                print(f"{NETWORKS[name].title}, {layers} layers, {column}: {phases}", flush=True)
            print(f"  {record['ratio']:.2f} times jax.jit", flush=True)
    print(f"-> {save(records, args.results).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
