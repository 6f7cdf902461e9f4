"""Runs a function as CUDA kernels in the emulator, under an arrangement of one's choice instead of the planner's.

``python -m tests.support.cuda_run SEEDS`` runs every small family, training steps among them, under every arrangement and that many
schedules.

Comes in: a function of arrays. Goes out: its ``Subject`` (the Graph, and the region that becomes one kernel), the ``arrangements``
that the code generator accepts for it, and the function's results under one of them (``run``). What lies outside of the region
is evaluated by JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kitsune_jax.capture.edit import Captured
from kitsune_jax.capture.jaxpr import capture
from kitsune_jax.capture.rewrites import RewriteContext
from kitsune_jax.frontend.route import PlannedRegion, StreamOrder
from kitsune_jax.ops.capabilities import TargetCapabilities
from kitsune_jax.ops.graph import Graph
from kitsune_jax.planning.plan import GpuPlan, Infeasible, Phase, Stage
from kitsune_jax.planning.stages import orders_of
from kitsune_jax.planning.streams import Region
from kitsune_jax.program.build import build
from kitsune_jax.program.ir import Program, TileProgram
from kitsune_jax.regions.select import select
from kitsune_jax.targets.cuda import lower, runtime, tiles
from kitsune_jax.targets.cuda import lower as cuda_lower
from kitsune_jax.targets.cuda import target as cuda_target
from kitsune_jax.targets.cuda.arrangement import Arrangement, kind_of
from kitsune_jax.targets.cuda.lower import generate_call_kernel, generate_kernel
from kitsune_jax.targets.cuda.planning.cost import GpuCost, is_splittable
from kitsune_jax.targets.cuda.planning.machines import A100, H200, GpuMachine
from kitsune_jax.targets.cuda.planning.planner import candidates, plans_in_batches
from reference import standalone
from reference.interpret import interpret

Array = Any


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """Kernels of this session are compiled once, whichever process asks first, and never into the user's cache: tests/conftest.py
    hands it to every test. ``TEST_KERNELS``: a folder that several sessions share, as those of .ci/run."""
    base = tmp_path_factory.getbasetemp()
    own = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "kernels"
    folder = pathlib.Path(os.environ.get("TEST_KERNELS") or own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KITSUNE_CACHE_DIR", str(folder))
        yield folder


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function at the shapes of ``args``: captured, with the largest region of it that has plans for a GPU."""

    captured: Captured
    region: Region
    args: tuple[Array, ...]
    _plans: dict[str, list[tuple[GpuCost, GpuPlan]]] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def graph(self) -> Graph:
        return self.captured.graph

    def plans(self, machine: GpuMachine) -> list[tuple[GpuCost, GpuPlan]]:
        """The planner's candidates for it, made once."""
        if machine.name not in self._plans:
            self._plans[machine.name] = plans(self.graph, self.region, machine)
        return self._plans[machine.name]

    def program(self, plan: GpuPlan) -> TileProgram:
        return build(self.graph, self.region, plan)

    def planned(self, plan: GpuPlan, target: str) -> PlannedRegion:
        """The region as a call of ``target``, with its code."""
        program = Program.of(self.program(plan))
        code = cuda_lower.generate(target, program, [plan], "region")
        folds = [self.graph.ops[i] for i in self.region.sinks if plan.order in self.graph.ops[i].inputs[1:]]
        orders = () if plan.order is None else (StreamOrder(plan.order, max(op["n"] for op in folds)),)
        return PlannedRegion("region", self.region, (Phase(0, self.region, plan),), program, target, code, orders)


def subject(fn: Callable[..., Any], *args: Array, batches: bool = False) -> Subject:
    """``batches``: a region whose tiles keep within a batch, where there is one."""
    captured = capture(
        jax.make_jaxpr(fn)(*args),
        context=RewriteContext(cuda_target.CUDA.capabilities),
    )
    graph = captured.graph
    regions: list[Region] = []

    def supports(i: int) -> str | None:
        op = graph.ops[i]
        return cuda_target.supports(op, [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs])

    def look(_: Graph, region: Region) -> str:
        regions.append(region)
        return "only looked at"

    select(graph, supports, look, TargetCapabilities(sums_by_batch=False), force=True)
    # Of equals the longer stream: a matmul may as well stream over the columns of its weights.
    for region in sorted(
        regions, key=lambda r: (batches and r.space.batch, _adds_up(graph, r), len(r.ops), r.space.rows), reverse=True
    ):
        of = Subject(captured, region, args)
        if of.plans(H200):  # another axis may stream as far, but end in a product over the rows
            return of
    raise AssertionError("no region is legal")


def _adds_up(graph: Graph, region: Region) -> bool:
    """Is it a loop with sums over its steps, as the reverse loop of a gradient?"""
    return bool(region.sinks) and any(graph.ops[i].body is not None for i in region.ops)


def plans(graph: Graph, region: Region, machine: GpuMachine) -> list[tuple[GpuCost, GpuPlan]]:
    """The planner's candidates, in each order in which the rows may stream, with the costs that they were made of."""
    found: list[tuple[GpuCost, GpuPlan]] = []
    for order in () if region.space.batch else (None, *orders_of(graph, region)):
        cost = GpuCost(graph, region, machine, order)
        with contextlib.suppress(Infeasible):
            found += [(cost, plan) for plan in candidates(cost)]
    if region.space.batch:
        with contextlib.suppress(Infeasible):
            cost = GpuCost(graph, region, machine)
            found += [(cost, plan) for plan in plans_in_batches(cost)]
    return found


class Arrangements(Mapping[str, GpuPlan]):
    """Every kind of plan, by name, that has a kernel; one pipeline instance each, so that a worker gets several tiles. The code of
    one is generated when it is first asked for: most tests ask for one of some thirty."""

    def __init__(self, of: Subject):
        self.of = of
        self._admitted: dict[str, GpuPlan | None] = {}
        self._candidates = {machine.name: functools.cache(functools.partial(_candidates, of, machine)) for machine in (H200, A100)}

    def __getitem__(self, name: str) -> GpuPlan:
        if name not in self._admitted:
            made = self._candidates[(H200 if name.startswith("sm90") else A100).name]()
            admitted = (p for at, p in made if at == name and cuda_lower.check(self.of.program(p), p, "region") is None)
            self._admitted[name] = next(admitted, None)
        if (plan := self._admitted[name]) is None:
            raise KeyError(name)
        return plan

    def names(self) -> list[str]:
        """Of all kinds, those included that turn out to have no kernel."""
        return list(dict.fromkeys(name for made in self._candidates.values() for name, _ in made()))

    def __iter__(self) -> Iterator[str]:
        for made in self._candidates.values():
            yield from (name for name, plan in made() if self.get(name) is plan)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def arrangements(of: Subject) -> Arrangements:
    return Arrangements(of)


def _candidates(of: Subject, machine: GpuMachine) -> list[tuple[str, GpuPlan]]:
    """Plans by name, of which the first that has a kernel is taken."""
    found: list[tuple[str, GpuPlan]] = []
    made = of.plans(machine)
    folds = bool(orders_of(of.graph, of.region))
    for _, plan in sorted(made, key=lambda pair: -len(pair[1].stages)):  # of spatial ones the longest chain
        # Rows that are folded by indices stream in their order, or in none, into a table of each lane.
        blocks = "" if plan.blocks is None else f"-blocks{plan.blocks[2]}"
        found.append((f"{_name(plan)}{'-unordered' if folds and plan.order is None else ''}{blocks}", plan))
    for cost, plan in made:
        if plan.queues and plan.queues[0].place == "l2" and plan.lanes == 1 and (plan.order is not None or not folds):
            for ways in (2, 4):
                split = dataclasses.replace(plan, stages=tuple(_split(cost, s, ways) for s in plan.stages))
                if any(s.split > 1 for s in split.stages):
                    found.append((f"{_name(plan)}-split{ways}", split))
    return [(name, dataclasses.replace(plan, replicas=1)) for name, plan in found]


def _name(plan: GpuPlan) -> str:
    """The kind of its kernels; a plan that the planner has split is not told apart."""
    return kind_of(plan, gradients=False).removesuffix("-split")


def _split(cost: GpuCost, stage: Stage, ways: int) -> Stage:
    """``stage`` over ``ways`` CTAs by columns of its result, where that can be."""
    return dataclasses.replace(stage, split=ways, workers=ways) if is_splittable(cost, stage.ops) else stage


class Kernel:
    """A subject compiled for one plan; ``code.kernel.source`` is what was generated."""

    def __init__(self, of: Subject, plan: GpuPlan):
        self.args, planned = of.args, of.planned(plan, "emulator")
        self.code = planned.code
        self.executable = jax.jit(lambda *args: standalone.run(of.captured, [planned], args)).lower(*of.args).compile()

    def __call__(self, *args: Array, seed: int = 1) -> list[np.ndarray]:
        """The function's results under the emulator's schedule ``seed``, of ``args`` or of the subject's own."""
        runtime.set_emulator_seed(seed)
        before = runtime.calls()
        outs = [np.asarray(x) for x in self.executable(*(args or self.args))]
        assert runtime.calls() == before + 1, "not one kernel was called"
        return outs


def run(of: Subject, plan: GpuPlan, *, seed: int = 1) -> list[np.ndarray]:
    """The function's results with its region as one kernel arranged as ``plan`` says."""
    return Kernel(of, plan)(seed=seed)


def run_program(program: TileProgram, *arrays: Array, seed: int = 1, **how: Any) -> list[np.ndarray]:
    """The results of a tile program written by hand, arranged as ``runner`` says, under the emulator's schedule ``seed``."""
    return runner(program, *arrays, **how)(seed)


def check_bits(program: TileProgram, arrays: list[np.ndarray], **how: int) -> None:
    """The results of ``run_program`` are those of the interpreter, bit for bit."""
    for k, (g, w) in enumerate(zip(run_program(program, *arrays, **how), interpret(program, arrays), strict=True)):
        np.testing.assert_array_equal(g.astype(np.float64), w.astype(np.float64), err_msg=f"result {k}\n{program}")


def runner(
    program: TileProgram, *arrays: Array, sm: int = 900, lanes: int = 1, replicas: int = 1,
    resident: bool = True, change: Callable[[str], str] = str, shared_bytes: int = 0, cluster: int = 1,
) -> Callable[[int], list[np.ndarray]]:  # fmt: skip
    """A tile program written by hand as a function of the emulator's schedule: of one stage vertically, or split over a
    ``cluster``, of several over the L2. ``resident``: weights stay in shared memory; ``change``: made to the source;
    ``shared_bytes``: of a CTA, if not all that it can have."""
    arrangement = by_hand(program, sm, lanes, replicas, resident)
    if cluster > 1:
        arrangement = dataclasses.replace(arrangement, spatial=True, cluster=cluster, split=(cluster,))
    arrangement = dataclasses.replace(arrangement, shared_bytes=shared_bytes or arrangement.shared_bytes)
    made = generate_kernel(program, arrangement, "program")
    code = lower.emulated_code(dataclasses.replace(made, source=change(made.source)), "program")

    def call(*args: Array) -> list[Array]:
        avals = [jax.core.ShapedArray(t.shape, jnp.dtype(t.dtype)) for t in program.outputs]
        return lower.call("emulator", code, Program.of(program), args, avals, _nothing_else)

    executable = jax.jit(call).lower(*arrays).compile()

    def run(seed: int) -> list[np.ndarray]:
        runtime.set_emulator_seed(seed)
        return [np.asarray(x) for x in executable(*arrays)]

    return run


def run_call(call: Program, *arrays: Array, sm: int = 900, lanes: int = 2, replicas: int = 2, seed: int = 1) -> list[np.ndarray]:
    """The results of a call of several parts written by hand, each arranged as ``run_program`` does."""
    return called(call, *arrays, code=code_of(call, sm=sm, lanes=lanes, replicas=replicas), seed=seed)


def code_of(
    call: Program, *, sm: int = 900, lanes: int = 2, replicas: int = 2, change: Callable[[str], str] = str
) -> lower.KernelCode:
    """The kernel of such a call, with ``change`` made to its source."""
    made = generate_call_kernel(tiled(call), tuple(by_hand(part.program, sm, lanes, replicas) for part in call.parts), "program")
    made = dataclasses.replace(made, source=change(made.source))
    return lower.emulated_code(made, "program")


def called(call: Program, *arrays: Array, code: lower.KernelCode, seed: int = 1) -> list[np.ndarray]:
    """The results of ``call``, whose kernel is ``code``."""
    avals = [jax.ShapeDtypeStruct(a.shape, jnp.dtype(a.dtype)) for a in call.arrays[call.operands : call.operands + call.results]]
    executable = jax.jit(lambda *args: lower.call("emulator", code, call, args, avals, _nothing_else)).lower(*arrays).compile()
    runtime.set_emulator_seed(seed)
    return [np.asarray(x) for x in executable(*arrays)]


def tiled(call: Program) -> Program:
    """``call`` with the GPU's tiles."""
    parts = [dataclasses.replace(p, program=dataclasses.replace(p.program, tile_rows=tiles.TILE_ROWS)) for p in call.parts]
    return dataclasses.replace(call, parts=tuple(parts))


def by_hand(program: TileProgram, sm: int, lanes: int, replicas: int, resident: bool = True) -> Arrangement:
    machine, stages = H200 if sm == 900 else A100, len(program.stages)
    places = ("l2",) * len(program.queues)
    return Arrangement(stages > 1, sm, lanes, 1, replicas, (resident,) * stages, (1,) * stages, places, machine.local_bytes)


def _nothing_else(op: int, operands: Any) -> Any:
    raise AssertionError("a tile program written by hand has no ops outside")


def fuzz(seeds: int) -> int:
    """How many kernels of the small families fail or give other bits under one of ``seeds`` schedules."""
    from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
    from tests.support.cuda_cases import FAMILIES
    from tests.support.cuda_recurrent_cases import RECURRENT
    from tests.support.cuda_training_cases import TRAINING

    wrong = 0
    attention = {**ATTENTION, **ATTENTION_GRADIENTS}
    for family in (*attention.values(), *FAMILIES.values(), *TRAINING.values(), *RECURRENT.values()):
        if not family.small:
            continue
        of = subject(family.function, *family.arguments(257, family.dtypes[0]), batches=family.name in attention)
        for name, plan in arrangements(of).items():
            kernel = Kernel(of, plan)
            want = [x.tobytes() for x in kernel(seed=0)]
            for seed in range(1, seeds + 1):
                try:
                    right = [x.tobytes() for x in kernel(seed=seed)] == want
                    why = "other bits than with seed 0"
                except Exception as e:  # of XLA: a race, a deadlock or a bad access that the emulator has found
                    right, why = False, str(e)
                if not right:
                    wrong += 1
                    print(f"{family.name} {name}, seed {seed}: {why}", flush=True)
                    break
        print(f"{family.name}: {seeds} schedules", flush=True)
    return wrong


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    sys.exit(fuzz(int(sys.argv[1]) if len(sys.argv) > 1 else 20) > 0)
