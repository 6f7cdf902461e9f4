"""Attention beside cuDNN's kernel on the same device, at the sizes of FlashAttention-3's paper: 16 384 tokens in all, width 2 048;
and its gradient by queries, keys and values, the forward pass with it.

Comes in: sizes. Goes out: for each the modelled time, cuDNN's published rate, and on a device the times of the pipeline, of
``jax.jit`` and of ``jax.nn.dot_product_attention(implementation="cudnn")``, with the pipeline's error beside cuDNN's result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks.timing import calls_to_fill, interleaved, paired_speedup, summary
from scripts.gpu.goals import CUDNN_TFLOPS
from scripts.gpu.record import Record, arguments

TOKENS, WIDTH = 16_384, 2_048
CASE_SECONDS = 40.0
TOLERANCE = 2e-2  # of the largest number: probabilities are rounded to bfloat16


@dataclasses.dataclass(frozen=True)
class Size:
    tokens: int
    dim: int
    causal: bool
    batch: int = 0
    heads: int = 0
    gradient: bool = False

    @property
    def name(self) -> str:
        return f"attention bf16 {self.tokens} heads of {self.dim}{' causal' * self.causal}{' gradient' * self.gradient}"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch or TOKENS // self.tokens, self.tokens, self.heads or WIDTH // self.dim, self.dim

    @property
    def flops(self) -> float:
        """Of the products, half of them where the mask hides half. A gradient has two, and five in its backward pass, however
        many a kernel makes again."""
        b, t, h, d = self.shape
        return 2.0 * (7 if self.gradient else 2) * b * h * t * t * d * (0.5 if self.causal else 1.0)

    def function(self, implementation: Literal["xla", "cudnn"], options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
        """Of q, k, v, and of the result's cotangent for a gradient. ``options``: those of a pipeline."""

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=self.causal, implementation=implementation)

        made = attention if options is None else kj.pipeline(attention, **options)
        return (lambda q, k, v, do: jax.vjp(made, q, k, v)[1](do)) if self.gradient else made

    @property
    def arrays(self) -> int:
        return 4 if self.gradient else 3


_ALL = tuple((t, d, causal) for d in (128, 64) for causal in (True, False) for t in (1024, 4096))
SIZES = (*(Size(*of) for of in _ALL), *(Size(*of, gradient=True) for of in _ALL if of[0] == 4096))
_DRY_SIZES = (Size(320, 64, True, 1, 2), Size(272, 32, True, 1, 2, gradient=True))


def modelled(size: Size) -> dict[str, Any]:
    """By the planner's model of an H200, which no device has confirmed; published: of an H100."""
    arrays = [jax.ShapeDtypeStruct(size.shape, jnp.bfloat16)] * size.arrays
    report = kj.explain(size.function("xla", {}), platform="cuda", device="h200")(*arrays)
    seconds = sum(region.seconds for region in report.regions)
    published = None if size.gradient else CUDNN_TFLOPS.get((size.tokens, size.dim, size.causal))
    found = {"kernels": len(report.regions), "modelled_seconds": seconds, "cudnn_published": published}
    return found | ({"modelled_tflops": size.flops / seconds / 1e12} if seconds else {})


def compile_size(size: Size) -> dict[str, Any]:
    """Puts the kernels of a size into the cache on disk. Needs no device."""
    arrays = [jax.ShapeDtypeStruct(size.shape, jnp.bfloat16)] * size.arrays
    pipelined = jax.jit(size.function("xla", {}))
    return {"regions": pipelined.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text().count("@kitsune_cuda")}


def _error(got: Any, want: Any) -> float:
    """The largest of all arrays, beside the largest number of each."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]
    return max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in pairs)


def check(size: Size, device: bool) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), size.arrays)
    args = tuple(jax.random.normal(key, size.shape, jnp.bfloat16) for key in keys)
    pipelined = jax.jit(size.function("xla", {"target": None if device else "emulator", "force": not device}))
    columns = {"pipeline": pipelined, "jit": jax.jit(size.function("xla"))}
    if device:
        columns["cudnn"] = jax.jit(size.function("cudnn"))
    error = _error(columns["pipeline"](*args), columns["cudnn" if device else "jit"](*args))
    found: dict[str, Any] = {"ok": error < TOLERANCE, "error_beside_cudnn": error}
    if device:
        thunks = {name: functools.partial(run, *args) for name, run in columns.items()}
        times = interleaved(thunks, rounds=20, seconds=6.0, calls=calls_to_fill(thunks, 2e-3))
        found["seconds"] = {name: summary(of) for name, of in times.items()}
        found["speedup"] = {name: paired_speedup(of, times["pipeline"]) for name, of in times.items() if name != "pipeline"}
        found["tflops"] = {name: size.flops / of["median"] / 1e12 for name, of in found["seconds"].items()}
    return found


def main() -> int:
    args = arguments(__doc__ or "").parse_args()
    record = Record("attention", args.output, patience=args.patience)
    sizes = _DRY_SIZES if args.dry_run else SIZES
    record.content["expected"] = len(sizes)
    for size in sizes:
        if record.wants(size.name):
            with record.case(size.name, CASE_SECONDS * (1 + size.gradient)):
                found = {"name": size.name, **modelled(size), **check(size, not args.dry_run)}
            record.tell(found)
    return record.finish()


if __name__ == "__main__":
    raise SystemExit(main())
