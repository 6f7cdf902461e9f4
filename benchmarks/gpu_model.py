"""The planner's model of a GPU beside what a run on that GPU measured: ``python -m benchmarks gpu_model``. No GPU is needed.

Comes in: the record of an H200 (``benchmarks/results/h200``), whose functions are planned again, in the same sizes. Goes out: a
``Comparison`` of each function and of each plan that was measured: modelled and measured seconds, and the bound by the model.
Nothing is computed or compiled; only shapes are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj
from benchmarks import store, table
from benchmarks.apps import APPS, DTYPES
from benchmarks.graphs.apps import GRAPH_APPS, case_of
from benchmarks.graphs.measure import train_step as graph_step
from benchmarks.sequences.apps import SEQUENCE_APPS
from benchmarks.training import initial_state, train_step

RECORD = store.RESULTS / "h200" / "2026-11-26.json"
DEVICE = "h200"
NEAR, FAR = 1.35, 2.0  # times too short or too long: most functions are to be within the first, all within the second
_WHOLE = 0.9  # of a function's operators: with so many in pipelines its call is compared, else the time of its kernels alone
_TOKENS, _WIDTH = 16_384, 2_048  # of attention in the record: in all, and of all heads


@dataclasses.dataclass(frozen=True)
class Comparison:
    """``modelled``, ``measured``: seconds. ``what``: "call", XLA's kernels around the pipelines with it; "kernels", without them;
    "plan", a call of a plan that was chosen by hand. ``bound``: what takes longest by the model."""

    name: str
    what: str
    modelled: float
    measured: float
    bound: str

    @property
    def ratio(self) -> float:
        """Modelled over measured time: below 1 the model promises too much."""
        return self.modelled / self.measured

    @property
    def off(self) -> float:
        """How many times too short or too long the modelled time is."""
        return max(self.ratio, 1 / self.ratio)


def comparable(record: dict[str, Any]) -> tuple[str, float] | None:
    """What of a case is compared, and its measured seconds; None where no kernel of this package ran, or none was timed."""
    train = record["mode"] == "train"
    if not record["calls"]:
        return None
    if (record["explain"]["whole"] if train else record["explain"])["coverage"] >= _WHOLE:
        return "call", record["columns"]["whole" if train else "pipeline"]["median"]
    kernels = [k for k in record["kernels"].get("pipeline", ()) if k["kernel"].startswith("kitsune")]
    return ("kernels", sum(k["calls"] * k["seconds"] for k in kernels)) if kernels else None


def name_of(record: dict[str, Any]) -> str:
    return f"{'training step: ' if record['mode'] == 'train' else ''}{table.what(record)}"


def compare(record: dict[str, Any]) -> Comparison | None:
    """A case of the record, planned again; None where nothing is compared, or the planner arranges the function otherwise now."""
    found = comparable(record)
    if found is None:
        return None
    what, measured = found
    function, args = _function(record)
    regions = kj.explain(function, platform="cuda", device=DEVICE)(*args).regions
    before = (record["explain"]["whole"] if record["mode"] == "train" else record["explain"])["regions"]
    if [r.arrangement for r in regions] != [r["arrangement"] for r in before]:
        return None
    longest = max(regions, key=lambda r: r.seconds)
    return Comparison(name_of(record), what, sum(r.seconds for r in regions), measured, longest.bound)


def compare_plans(name: str, plans: list[dict[str, Any]]) -> Iterator[Comparison]:
    """The measured plans of an application ("NeRF MLP 8 x 256, 262 144 rows, bfloat16"), made again."""
    from kitsune_jax.targets.cuda import lower

    title, rows, dtype = name.rsplit(", ", 2)
    app = next(app for app in APPS.values() if app.title == title)
    made = _candidates(app.name, dtype, int(rows.removesuffix(" rows").replace(" ", "")))
    found = {
        f"{lower.kind(p, gradients=False)} cluster{p.cluster} stages{len(p.stages)} split{max(s.split for s in p.stages)}": p
        for p in reversed(made)
    }
    for plan in plans:
        if plan["name"] in found:
            again = found[plan["name"]]
            yield Comparison(f"{name}: {plan['name']}", "plan", again.seconds, plan["seconds"], again.bound)


@functools.cache
def _candidates(app: str, dtype: str, rows: int) -> list[Any]:
    from kitsune_jax.capture.jaxpr import capture
    from kitsune_jax.capture.rewrites import RewriteContext
    from kitsune_jax.frontend.route import RouteOptions, route
    from kitsune_jax.targets import get
    from kitsune_jax.targets.cuda.planning.cost import GpuCost
    from kitsune_jax.targets.cuda.planning.machines import gpu
    from kitsune_jax.targets.cuda.planning.planner import candidates

    function, args = _of_rows(app, jnp.dtype(dtype), rows)
    asked = RouteOptions(device=DEVICE, code=False, force=True)
    captured = capture(jax.make_jaxpr(function)(*args), context=RewriteContext(get("cuda").capabilities, asked))
    regions = [planned.region for planned in route(captured.graph, "cuda", asked).regions]
    return candidates(GpuCost(captured.graph, max(regions, key=lambda r: len(r.ops)), gpu(DEVICE)))


# --- The functions of the record, with the shapes of their arguments --------------------------------------------------------------

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _function(record: dict[str, Any]) -> Made:
    name, dtype, rows, train = record["app"], DTYPES[record["dtype"]], record["rows"], record["mode"] == "train"
    if name in store.ATTENTION_NAMES:
        return _attention(name, rows)
    if name in APPS:
        function, (params, x) = _of_rows(name, dtype, rows)
        if not train:
            return function, (params, x)
        state = jax.eval_shape(lambda p: initial_state(p, np.random.default_rng(0)), params)
        return train_step(function), (state, x, jax.eval_shape(function, params, x))
    case = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[name], record["dtype"], rows)
    if not train:
        return case.function, (case.params, *case.inputs)
    return graph_step(case, case.function), (initial_state(case.params, np.random.default_rng(1)), case.inputs, case.targets)


def _of_rows(name: str, dtype: Any, rows: int) -> Made:
    app = APPS[name]
    params = {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in app.shapes.items()}
    return app.function, (params, jax.ShapeDtypeStruct((rows, app.width), dtype))


def _attention(name: str, tokens: int) -> Made:
    """As ``scripts/gpu/attention.py`` measures it: as many sequences as have ``_TOKENS`` tokens, of heads that are ``_WIDTH`` wide
    in all."""
    _, dim, mask, *gradient = name.split("_")

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=mask == "causal", implementation="xla")

    array = jax.ShapeDtypeStruct((_TOKENS // tokens, tokens, _WIDTH // int(dim), int(dim)), jnp.bfloat16)
    if not gradient:
        return attention, (array,) * 3
    return lambda q, k, v, do: jax.vjp(attention, q, k, v)[1](do), (array,) * 4


# --- The command ------------------------------------------------------------------------------------------------------------------


def comparisons(match: str = "") -> Iterator[Comparison]:
    """Every function and plan of the record whose name ``match``, a regular expression, finds."""
    content = store.load(RECORD)
    for record in content["cases"]:
        if not re.search(match, name_of(record)) or comparable(record) is None:
            continue
        if (found := compare(record)) is not None:
            yield found
        else:
            print(f"planned otherwise than in the record: {name_of(record)}")
    for name, plans in content["plans"].items():
        if re.search(match, f"{name}: plans"):
            yield from compare_plans(name, plans)


def run(args: argparse.Namespace) -> int:
    found = []
    print(f"{'modelled':>10} {'measured':>10} {'ratio':>6}  of     function or plan; what bounds it")
    for c in comparisons(args.match):
        found.append(c)
        print(f"{c.modelled * 1e3:7.3f} ms {c.measured * 1e3:7.3f} ms {c.ratio:6.2f}  {c.what:7}{c.name}; {c.bound}", flush=True)
    near, far = (sum(c.off <= bound for c in found) for bound in (NEAR, FAR))
    print(f"{near} of {len(found)} within {NEAR}x, {far} within {FAR:g}x")
    return 0
