"""Write the second table of docs/kernels.md: the calls that the planner makes of whole functions, with their modelled times.

Comes in: functions of sequences and graphs at sizes of the benchmarks, and the planner, for an H200. Goes out: docs/kernels.md,
between markers: for each call its arrangement, what NVRTC makes of it, and what the model says of it and of XLA's kernels. Needs
NVRTC and a disassembler, and no GPU: nothing runs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parents[1]
_HEAD = (
    *("function", "dtype", "call", "lanes", "keys of a block", "registers", "shared memory"),
    *("instructions", "spilled", "modelled", "XLA, modelled"),
)
Array = Any


def attention(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attention_gradients(q: Array, k: Array, v: Array, do: Array) -> Any:
    return jax.vjp(attention, q, k, v)[1](do)


def one_token(q: Array, k: Array, v: Array, last: Array) -> Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.arange(k.shape[1]) <= last[0], scores.astype(jnp.float32), -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def softmax_sums(values: Array, scores: Array, index: Array) -> Array:
    n = 100_000
    e = jnp.exp(scores - jax.lax.stop_gradient(jax.ops.segment_max(scores, index, n))[index])
    return jax.ops.segment_sum(values * e[..., None], index, n) / jax.ops.segment_sum(e, index, n)[..., None]


def both_ends(w: Array, nodes: Array, edges: Array, senders: Array, receivers: Array) -> Any:
    messages = jax.nn.relu(jnp.concatenate([nodes[senders], edges], -1) @ w)
    return jax.ops.segment_sum(messages, receivers, len(nodes)), jax.ops.segment_max(messages, senders, len(nodes))


def cases() -> Iterator[tuple[str, Callable[..., Any], str, tuple[tuple[int, ...] | int, ...], dict[str, Any]]]:
    """(name, function, dtype, shapes of its arguments or numbers of indices, options of the capture). ``rows``: elements of long
    reductions become rows."""
    from tests.support.cuda_recurrent_cases import loss, lstm

    for heads, dim in ((16, 128), (16, 64), (1, 64)):
        qkv = ((1, 4096, heads, dim),) * 4
        yield f"attention, 4 096 tokens, {heads} x {dim}, causal", attention, "bfloat16", qkv[:3], {}
        yield f"its gradient, {heads} x {dim}", attention_gradients, "bfloat16", qkv, {}
    for batch, keys, heads in ((1, 32_768, 8), (32, 4_096, 8)):
        cache = batch, keys, heads, 128
        name = f"{batch} token{'s' if batch > 1 else ''}, {keys} keys of {heads} x 128 each"
        yield name, one_token, "bfloat16", ((batch, 1, heads, 128), cache, cache, 1), {"rows": True}
    for hidden, steps, rows in ((32, 100, 8192), (64, 100, 8192), (128, 128, 256)):
        shapes = ((hidden, 4 * hidden),) * 2 + ((4 * hidden,), *((rows, hidden),) * 2, (steps, rows, hidden))
        for dtype in ("bfloat16", "float32"):
            sequences = f"{rows:,}".replace(",", " ")
            yield f"LSTM {hidden} wide, {steps} steps of {sequences}", lstm, dtype, shapes, {}
            step = jax.grad(functools.partial(loss, lstm), (0, 1, 2))
            yield f"its gradient, {hidden} wide", step, dtype, shapes, {}
    edges = (1_000_000, 8, 16), (1_000_000, 8), 1_000_000
    yield "segment softmax, 10^6 edges, 8 x 16", softmax_sums, "float32", edges, {}
    graph = (256, 128), (10_000, 128), (100_000, 128), 100_000, 100_000
    yield "edges, sums and maxima by both ends", both_ends, "float32", graph, {}
    by_sums = jax.grad(lambda *args: jnp.sum(both_ends(*args)[0] ** 2), (0, 1))
    yield "its gradient, atomic sums", by_sums, "float32", graph, {"unordered": True}


def rows() -> Iterator[tuple[str, ...]]:
    from kernel_checks import sass
    from kitsune_jax.capture.jaxpr import capture
    from kitsune_jax.capture.rewrites import RewriteContext
    from kitsune_jax.config import planner_options
    from kitsune_jax.frontend.lowering import split_few_rows
    from kitsune_jax.frontend.route import RouteOptions, route
    from kitsune_jax.planning.plan import GpuPlan
    from kitsune_jax.targets import get
    from kitsune_jax.targets.cuda import lower, nvrtc
    from kitsune_jax.targets.cuda.arrangement import arrangement_of

    cuda = get("cuda")
    for name, function, dtype, shapes, options in cases():
        indices = [isinstance(s, int) for s in shapes]
        args = [
            jax.ShapeDtypeStruct((s,) if isinstance(s, int) else s, "int32" if index else dtype)
            for s, index in zip(shapes, indices, strict=True)
        ]
        jaxpr = jax.make_jaxpr(function)(*args)
        by_rows = options.pop("rows", False)
        asked = RouteOptions(device="h200", code=False, deterministic=not options.get("unordered", False))
        captured = capture(jaxpr, context=RewriteContext(cuda.capabilities, asked))
        graph, as_it_was = captured.graph, 0.0
        if by_rows:  # XLA's times are those of the function itself
            machine = cuda.machine("h200")
            program = cuda.program_context(graph, machine, planner_options(asked), body=False)
            as_it_was = cuda.unpipelined_seconds(graph, range(len(graph.ops)), machine, program)
            graph = split_few_rows(captured, "cuda", "h200").graph
        for k, region in enumerate(route(graph, "cuda", asked).regions, 1):
            plans = [phase.plan for phase in region.phases if isinstance(phase.plan, GpuPlan)]
            arranged = tuple(arrangement_of(p, part.program) for p, part in zip(plans, region.program.parts, strict=True))
            alone = len(arranged) == 1
            only = region.program.parts[0].program
            made = (
                lower.generate_kernel(only, arranged[0], "region")
                if alone
                else lower.generate_call_kernel(region.program, arranged, "region")
            )
            compiled = nvrtc.compile(made.source, "sm_90a")
            code, used = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
            plan, phases = plans[0], f", {len(plans)} phases" if len(plans) > 1 else ""
            where = f", clusters of {plan.cluster}" if plan.cluster > 1 else ""
            what = f"{k}: {plan.arrangement}, {'resident' if plan.stages[0].resident else 'streamed'}{where}{phases}"
            yield (
                *(name, dtype, what, str(plan.lanes), str(plan.blocks[2]) if plan.blocks else "", str(used.registers)),
                *(f"{made.shared_bytes / 1024:.0f} KiB", str(len(code.instructions))),
                f"{used.spill_bytes} B" if used.spill_bytes else "0",
                f"{1e6 * sum(p.seconds for p in plans):.0f} us",
                f"{1e6 * (as_it_was or sum(p.baseline_seconds for p in plans)):.0f} us",
            )


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks import table
    from kernel_checks import sass
    from kitsune_jax.targets.cuda import nvrtc

    if why := nvrtc.why_not():
        raise SystemExit(why)
    if not sass.available():
        raise SystemExit("no cuobjdump: pip install triton")
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|---|" + "---:|" * (len(_HEAD) - 3)]
    for row in rows():
        lines.append("| " + " | ".join(row) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    version = nvrtc.version()
    where = (
        f"NVRTC {version[0]}.{version[1]}, planned for an H200. "
        "Figures of emulated and disassembled code, not of a run: [gpu-verified.md](gpu-verified.md) says which kernels have run."
    )
    changed = table.update(ROOT / "docs" / "kernels.md", "\n".join([where, "", *lines]), "planned")
    print(f"docs/kernels.md {'updated' if changed else 'is up to date'}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    raise SystemExit(main())
