"""The timed cases: applications, training steps, attention beside cuDNN, tokens of a language model, and the planner's candidates.

Comes in: a name. Goes out: ``Built``: functions that compute the same (columns), and arguments that take turns. Names:

    nerf bf16 262144                      an application of the benchmarks: dtype and rows
    train nerf bf16 262144                a training step of it, Adam included
    attention 4096 128 causal gradient    tokens, head size; 16 384 tokens in all, as in FlashAttention-3's paper
    token 8192 8                          one token of a Llama 3 8B layer: keys in the cache, heads of keys
    plans nerf bf16 262144                the planner's best candidate of each kind, each as a column
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kitsune_jax as kj

# In the order in which they are timed; those of ``LATER`` take long, because XLA's own programs do.
CASES = (
    "nerf bf16 262144",
    "train nerf bf16 262144",
    "mgn bf16 200000",
    "train mgn bf16 200000",
    "meshgraphnets bf16 200000",
    "gat f32 1000000",
    "attention 4096 128 causal",
    "lstm_256 bf16 256",
    "dlrm bf16 65536",
    "swiglu bf16 65536",
    "train swiglu bf16 65536",
    "gat bf16 1000000",
    "plans nerf bf16 262144",
    "plans mgn bf16 200000",
    "plans swiglu bf16 65536",
    "plans gat f32 1000000",
    "plans lstm_256 bf16 256",
    "plans train mgn bf16 200000",
    "plans train nerf bf16 262144",
    "attention 4096 128 full",
    "attention 4096 64 causal",
    "attention 4096 64 full",
    "attention 1024 128 causal",
    "attention 4096 128 causal gradient",
    "attention 4096 64 full gradient",
    "token 2048 8",
    "token 8192 8",
    "token 4096 32",
    "transformer_layer bf16 1024",
    "transformer_layer f32 1024",
    "train transformer_layer bf16 1024",
    "nerf f32 262144",
    "mgn f32 200000",
    "swiglu f32 65536",
    "meshgraphnets f32 200000",
    "graphcast_processor bf16 81900",
    "graphcast_processor f32 81900",
    "dlrm f32 65536",
    "lstm_64 f32 256",
    "gru_256 bf16 256",
    "train lstm_256 bf16 256",
    "cartpole f32 65536",
    "cartpole_policy f32 65536",
    "pendulum f32 65536",
    "nerf bf16 1048576",
    "mgn bf16 1000000",
)
LATER = ("train gat bf16 1000000", "train meshgraphnets bf16 200000", "train dlrm bf16 65536")
DRY_CASES = ("mgn f32 64", "train mgn f32 64", "attention 320 64 causal", "plans mgn bf16 64")
TUNED = (
    "train nerf",
    "train mgn",
    "meshgraphnets bf16",
    "gat",
    "lstm_256",
    "nerf bf16 262144",
    "mgn bf16 200000",
    "dlrm bf16",
    "cartpole",
)

TOKENS, WIDTH = 16_384, 2_048  # of attention
_L2_BYTES = 200 << 20  # inputs that take turns hold this much, so that none waits in the L2 cache
_MOST_PLANS = 9


@dataclasses.dataclass
class Built:
    """``columns``: jittable functions of the same arguments. ``arguments``: they take turns. ``about``: of a column, what the
    planner says of it."""

    columns: dict[str, Callable[..., Any]]
    arguments: list[tuple[Any, ...]]
    flops: float = 0.0
    about: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


def build(name: str, dry_run: bool = False) -> Built:
    """Raises ``KeyError`` for an unknown application."""
    first, *rest = name.split()
    if first == "plans":
        return _plans(rest, "emulator" if dry_run else "cuda")
    if first == "attention":
        return Attention.of(name).built(dry_run)
    if first == "token":
        return _token(*map(int, rest))
    return _application(rest if first == "train" else [first, *rest], train=first == "train")


def _application(words: list[str], train: bool) -> Built:
    from benchmarks.apps import APPS, make_case
    from benchmarks.graphs.apps import GRAPH_APPS, case_of
    from benchmarks.sequences.apps import SEQUENCE_APPS
    from benchmarks.training import initial_state, make_train_case, train_step

    app, dtype, rows = words[0], words[1], int(words[2])
    if app in APPS and train:
        of = make_train_case(app, dtype, rows)
        step, network = train_step(of.case.app.function), train_step(kj.pipeline(of.case.app.function))
        columns: dict[str, Callable[..., Any]] = {"pipeline": kj.pipeline(step), "network": network, "jit": step}
        return Built(columns, [(of.state, of.case.x, of.y)], 3.0 * of.case.app.flops * rows)
    if app in APPS:
        case = make_case(app, dtype, rows)
        inputs = [case.x, *(case.x + 0 for _ in range(_L2_BYTES // case.x.nbytes if rows > 10_000 else 0))]
        function = case.app.function
        columns = {"pipeline": kj.pipeline(function), "jit": function}
        return Built(columns, [(case.params, x) for x in inputs], float(case.app.flops) * rows)
    graph = case_of({**GRAPH_APPS, **SEQUENCE_APPS}[app], dtype, rows)
    if train:
        from benchmarks.graphs.measure import train_step as graph_step

        args = (initial_state(graph.params, np.random.default_rng(1)), graph.inputs, graph.targets)
        of_graph = graph_step(graph, graph.function)
        return Built({"pipeline": kj.pipeline(of_graph), "jit": of_graph}, [args])
    return Built({"pipeline": kj.pipeline(graph.function), "jit": graph.function}, [(graph.params, *graph.inputs)])


@dataclasses.dataclass(frozen=True)
class Attention:
    tokens: int
    dim: int
    causal: bool
    gradient: bool

    @staticmethod
    def of(name: str) -> Attention:
        found = re.fullmatch(r"attention (\d+) (\d+) (causal|full)( gradient)?", name)
        if found is None:
            raise KeyError(name)
        return Attention(int(found[1]), int(found[2]), found[3] == "causal", bool(found[4]))

    @property
    def flops(self) -> float:
        """Of the products, half of them where the mask hides half. A gradient has two, and five in its backward pass, however
        many a kernel makes again."""
        size = TOKENS * self.tokens * WIDTH
        return 2.0 * (7 if self.gradient else 2) * size * (0.5 if self.causal else 1.0)

    def function(self, implementation: Any, pipelined: bool = False) -> Callable[..., Any]:
        """Of q, k, v, and of the result's cotangent for a gradient."""

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(q, k, v, is_causal=self.causal, implementation=implementation)

        made = kj.pipeline(attention) if pipelined else attention
        return (lambda q, k, v, do: jax.vjp(made, q, k, v)[1](do)) if self.gradient else made

    def built(self, dry_run: bool) -> Built:
        tokens, width = (self.tokens, 2 * self.dim) if dry_run else (TOKENS, WIDTH)
        shape = (tokens // self.tokens, self.tokens, width // self.dim, self.dim)
        keys = jax.random.split(jax.random.key(0), 4 if self.gradient else 3)
        columns = {"pipeline": self.function("xla", pipelined=True), "jit": self.function("xla")}
        if not dry_run:
            columns["cudnn"] = self.function("cudnn")
        return Built(columns, [tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)], self.flops)


def _token(keys: int, kv_heads: int) -> Built:
    """A layer whose weights do not fit the L2: Llama 3 8B with 8 heads of keys, Llama 2 7B with 32."""
    from benchmarks.graphs.apps import example

    width, heads = 4096, 32
    module, head, hidden = example("llama"), width // heads, 14_336 if kv_heads == 8 else 11_008
    sizes = dataclasses.replace(module.FULL, width=width, heads=heads, kv_heads=kv_heads, head=head, hidden=hidden, context=keys)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        spread = shape[0] ** -0.5 if len(shape) == 2 else 1.0
        return jnp.asarray(rng.standard_normal(shape, np.float32) * spread, jnp.bfloat16)

    params = {name: normal(*shape) for name, shape in module.layer_shapes(sizes).items()}
    cache = normal(1, keys, kv_heads, head)

    def function(params: Any, x: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array) -> jax.Array:
        return module.layer(params, x, position[None], sizes, (keys, values))[0]

    columns: dict[str, Callable[..., Any]] = {"pipeline": kj.pipeline(function), "jit": function}
    return Built(columns, [(params, normal(1, 1, width), cache, cache, jnp.int32(keys - 1))])


def _plans(words: list[str], target: str) -> Built:
    """The best candidate of each kind by the model, of the largest region, and "jit"."""
    from kitsune_jax.targets.cuda import lower as cuda_lower
    from kitsune_jax.targets.cuda.arrangement import kind_of
    from kitsune_jax.targets.cuda.planning.machines import gpu
    from reference import standalone
    from tests.support import cuda_run

    train = words[0] == "train"
    built = _application(words[1:] if train else words, train)
    of = cuda_run.subject(built.columns["jit"], *built.arguments[0])
    made: dict[str, Any] = {}
    most = 2 if target == "emulator" else _MOST_PLANS - 3 * train
    for _, plan in sorted(cuda_run.plans(of.graph, of.region, gpu(None)), key=lambda pair: pair[1].seconds):
        split = max(stage.split for stage in plan.stages)
        kind = kind_of(plan, gradients=False)
        name = f"{kind} cluster{plan.cluster} stages{len(plan.stages)} split{split}"
        if len(made) < most and name not in made and cuda_lower.check(of.program(plan), plan, "region") is None:
            made[name] = plan

    def column(plan: Any, *args: Any) -> Any:
        return standalone.run(of.captured, [of.planned(plan, target)], jax.tree.leaves(args))

    about = {
        name: {"modelled_ms": 1e3 * plan.seconds, "replicas": plan.replicas, "lanes": plan.lanes} for name, plan in made.items()
    }
    columns = {name: functools.partial(column, plan) for name, plan in made.items()}
    return Built({**columns, "jit": built.columns["jit"]}, built.arguments, built.flops, about)
