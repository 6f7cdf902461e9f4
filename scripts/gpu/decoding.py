"""One token of a Llama layer against its cache: with weights that are asked for ahead, without, and by ``jax.jit``.

Comes in: sizes. Goes out: for each what is asked for and what the model says that this gains, and on a device the times of all
three, measured in turn, and how often the pipeline that asks is as fast as the one that does not. Both must have the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks.graphs.apps import example
from benchmarks.timing import calls_to_fill, interleaved, paired_speedup, summary
from scripts.gpu.record import Record, arguments

CASE_SECONDS = 40.0
TOLERANCE = 3e-2  # of the largest number: activations are rounded to bfloat16 by either, and not in the same places


@dataclasses.dataclass(frozen=True)
class Size:
    """Of one layer of ``width``, whose weights do not fit the L2. ``keys``: in the cache, of ``kv_heads`` heads each."""

    keys: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    dtype: Any = jnp.bfloat16

    @property
    def name(self) -> str:
        dtype = "bf16" if self.dtype == jnp.bfloat16 else "f32"
        return f"token {dtype} width {self.width} cache {self.keys} of {self.kv_heads} heads"

    @property
    def function(self) -> Callable[..., jax.Array]:
        module = example("llama")
        head = self.width // self.heads
        sizes = dataclasses.replace(
            module.FULL,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head=head,
            hidden=self.hidden,
            context=self.keys,
        )
        return lambda params, x, keys, values, position: module.layer(params, x, position[None], sizes, (keys, values))[0]

    @property
    def shapes(self) -> tuple[Any, ...]:
        module, head = example("llama"), self.width // self.heads
        sizes = dataclasses.replace(
            module.FULL, width=self.width, heads=self.heads, kv_heads=self.kv_heads, head=head, hidden=self.hidden
        )
        params = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in module.layer_shapes(sizes).items()}
        cache = jax.ShapeDtypeStruct((1, self.keys, self.kv_heads, head), self.dtype)
        token = jax.ShapeDtypeStruct((1, 1, self.width), self.dtype)
        return params, token, cache, cache, jax.ShapeDtypeStruct((), jnp.int32)

    def arguments(self) -> tuple[Any, ...]:
        rng = np.random.default_rng(0)

        def made(shape: jax.ShapeDtypeStruct) -> jax.Array:
            if shape.dtype == jnp.int32:
                return jnp.int32(self.keys - 1)
            spread = shape.shape[0] ** -0.5 if len(shape.shape) == 2 else 1.0
            return jnp.asarray(rng.standard_normal(shape.shape, np.float32) * spread, shape.dtype)

        return jax.tree.map(made, self.shapes)


# Llama 3 8B, whose queries share heads of keys, and a layer of Llama 2 7B, whose attention is a call itself.
SIZES = (*(Size(n, 4096, 32, 8, 14_336) for n in (2048, 8192)), *(Size(n, 4096, 32, 32, 11_008) for n in (1024, 4096)))
_DRY_SIZES = (Size(1024, 48, 3, 3, 70_001, jnp.float32),)


def modelled(size: Size, target: str | None) -> dict[str, Any]:
    """By the planner's model of an H200, which no device has confirmed."""
    report = kj.explain(
        kj.pipeline(size.function, target=target, fetch_ahead=True), platform="cuda" if target is None else None, device="h200"
    )(*size.shapes)
    asked = [region.ahead for region in report.regions if region.ahead is not None]
    found = {"kernels": len(report.regions), "modelled_seconds": sum(region.seconds for region in report.regions)}
    return found | {"asked_bytes": sum(a.bytes for a in asked), "modelled_gain_seconds": sum(a.seconds for a in asked)}


def compile_size(size: Size) -> dict[str, Any]:
    """Puts the kernels of a size into the cache on disk, those that ask and those that do not. Needs no device."""
    regions = 0
    for fetch_ahead in (True, False):
        traced = jax.jit(kj.pipeline(size.function, fetch_ahead=fetch_ahead)).trace(*size.shapes)
        regions += traced.lower(lowering_platforms=("cuda",)).as_text().count("@kitsune_cuda")
    return {"regions": regions}


def check(size: Size, device: bool) -> dict[str, Any]:
    args, target = size.arguments(), None if device else "emulator"
    columns: dict[str, Any] = {"jit": jax.jit(size.function).lower(*args).compile()}
    for name, fetch_ahead in (("pipeline", True), ("without", False)):
        columns[name] = jax.jit(kj.pipeline(size.function, target=target, fetch_ahead=fetch_ahead)).lower(*args).compile()
    asks, without, want = (np.asarray(columns[name](*args)) for name in ("pipeline", "without", "jit"))
    error = float(np.abs(asks.astype(np.float64) - want.astype(np.float64)).max() / np.abs(want.astype(np.float64)).max())
    same = asks.tobytes() == without.tobytes()
    found: dict[str, Any] = {"ok": error < TOLERANCE and same, "error_beside_jit": error, "same_bits": same}
    if device:
        thunks = {name: functools.partial(run, *args) for name, run in columns.items()}
        times = interleaved(thunks, rounds=40, seconds=8.0, calls=calls_to_fill(thunks, 2e-3))
        found["seconds"] = {name: summary(of) for name, of in times.items()}
        found["speedup"] = {name: paired_speedup(of, times["pipeline"]) for name, of in times.items() if name != "pipeline"}
    return found


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    record = Record("decoding", args.output, patience=args.patience)
    sizes = _DRY_SIZES if args.dry_run else SIZES
    record.content["expected"] = len(sizes)
    for size in sizes:
        if record.wants(size.name):
            with record.case(size.name, CASE_SECONDS):
                target = "emulator" if args.dry_run else None
                found = {"name": size.name, **modelled(size, target), **check(size, not args.dry_run)}
            record.tell(found)
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())
