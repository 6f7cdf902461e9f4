"""Kernel families of the tests, planned and under forced arrangements, as jitted functions.

Comes in: a family, and whether a device or the emulator runs it. Goes out: ``Program``: its name, its function, its arguments by
seed. Invariant: the same list in every process, so that the kernels that were prepared are those that the others find in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax

import kitsune_jax as kj
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.targets.cuda import nvrtc, runtime
from kitsune_jax.targets.cuda.arrangement import kind_of
from reference import standalone
from tests.support import cuda_run
from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
from tests.support.cuda_call_cases import CALLS
from tests.support.cuda_cases import FAMILIES, Family
from tests.support.cuda_recurrent_cases import RECURRENT
from tests.support.cuda_training_cases import TRAINING

PLANNED, FORCED = "planned", "forced"
_FORCED_ROWS = 333  # several tiles for the one pipeline instance of a forced plan, the last of them not full
_PLANNED_ROWS = (1, 20_011)  # less than a tile; more tiles than a device has workers
DRY_FAMILIES = ("dense",)
_ATTENTION_ROWS = 2_003  # scores are rows by rows
_LONGER_ROWS = 4_099  # of loops and whole steps: their references in float64 keep every step
_DRY_KINDS = ("sm90-vertical-resident-lanes1", "sm90-spatial-l2-lanes1")
# Training steps under forced arrangements, the first and every n-th of some twenty: their plans take a second each to make in every
# process, their kernels seconds to compile.
_FORCED_STEPS = {"tanh-step": 4, "labels-step": 5, "layer-norm-step": 6, "skip-step": 4, "softmax-step": 7, "heads-step": 5}
# As few of loops and of attention, whose blocks and lanes vary.
_FORCED_STEPS |= {name: 3 for name in RECURRENT} | {name: 4 for name in (*ATTENTION, *ATTENTION_GRADIENTS)}
_STEPS = {**TRAINING, **RECURRENT}  # large kernels: not in every dtype
_BATCHED = {**ATTENTION, **ATTENTION_GRADIENTS}
ALL = {**FAMILIES, **TRAINING, **RECURRENT, **ATTENTION, **ATTENTION_GRADIENTS, **CALLS}


@dataclasses.dataclass(frozen=True)
class Program:
    """``plan``: what is forced, or None for the planner's choice."""

    family: Family
    dtype: str
    rows: int
    target: str
    arrangement: str = PLANNED
    plan: GpuPlan | None = None

    @property
    def name(self) -> str:
        return f"{self.family.name} {self.dtype} {self.rows} {self.arrangement}"

    @property
    def kind(self) -> str:
        """As ``targets.cuda.kind`` names it; "" for the planner's choice."""
        gradients = self.family.name in TRAINING
        return kind_of(self.plan, gradients) if self.plan is not None else ""

    def arguments(self, seed: int) -> tuple[Any, ...]:
        return self.family.arguments(self.rows, self.dtype, seed)

    @functools.cached_property
    def function(self) -> Any:
        """Jitted; compiles the kernel when it is first called. Gives what the family's function gives."""
        if self.plan is None:
            return jax.jit(self._pipeline("emulator" if self.target == "emulator" else None))
        of = _subject_of(self.family, self.rows, self.dtype)
        planned = of.planned(self.plan, self.target)
        return jax.jit(lambda *args: standalone.run(of.captured, [planned], args))

    def compile_kernel(self) -> None:
        """Puts the device's code into the cache on disk. Needs no device."""
        if self.plan is None:
            jax.jit(self._pipeline(None)).trace(*self.arguments(0)).lower(lowering_platforms=("cuda",))
        else:
            _subject_of(self.family, self.rows, self.dtype).planned(self.plan, self.target)

    def _pipeline(self, target: Literal["emulator"] | None) -> Any:
        f = self.family
        return kj.pipeline(f.function, force=True, strict=True, target=target, deterministic=f.deterministic)


def programs(kinds: str, family: str, dry_run: bool) -> list[Program]:
    """Those of a family: the planner's choices ("planned"), or all arrangements for the architecture at hand ("forced")."""
    target = "emulator" if dry_run else "cuda"
    return list({PLANNED: _planned, FORCED: _forced}[kinds](ALL[family], target, dry_run))


def _planned(family: Family, target: str, dry_run: bool) -> Iterator[Program]:
    for dtype in family.dtypes[:1] if dry_run else _dtypes(family):
        for rows in (family.rows[:1] or (65,)) if dry_run else _rows(family):
            yield Program(family, dtype, rows, target)


def _dtypes(family: Family) -> tuple[str, ...]:
    """Of large kernels those that differ most."""
    return tuple(d for d in family.dtypes if d != "float16") if family.name in _STEPS else family.dtypes


def _rows(family: Family) -> tuple[int, ...]:
    if family.rows:
        return family.rows
    if family.name in CALLS:
        return (_PLANNED_ROWS[0], _LONGER_ROWS)
    if family.name in RECURRENT:
        return (_LONGER_ROWS,)
    if family.name in _BATCHED:
        return (_PLANNED_ROWS[0], _ATTENTION_ROWS)
    return _PLANNED_ROWS[-1:] if family.name in TRAINING else _PLANNED_ROWS


def _forced(family: Family, target: str, dry_run: bool) -> Iterator[Program]:
    """Large families and training steps in bfloat16 only: each kernel takes seconds to compile."""
    if family.name in CALLS or (family.name in TRAINING and family.name not in _FORCED_STEPS):
        return
    generation = "sm90" if dry_run or nvrtc.sm_of(runtime.arch()) == 900 else "sm80"
    rows = 130 if dry_run else _FORCED_ROWS
    narrow = family.name in _FORCED_STEPS or not family.small
    dtypes = [d for d in family.dtypes if d == "bfloat16" or d == family.dtypes[0] or (d == "float32" and not narrow)]
    for dtype in dtypes[:1] if dry_run else dtypes:
        plans = cuda_run.arrangements(_subject_of(family, rows, dtype))
        names = [name for name in plans.names() if name.startswith(generation)][:: _FORCED_STEPS.get(family.name, 1)]
        if dry_run:
            names = [name for name in names if name in _DRY_KINDS][:1]
        yield from (Program(family, dtype, rows, target, name, plans[name]) for name in names if name in plans)


@functools.lru_cache(maxsize=4)
def _subject_of(family: Family, rows: int, dtype: str) -> cuda_run.Subject:
    return cuda_run.subject(family.function, *family.arguments(rows, dtype), batches=family.name in _BATCHED)
