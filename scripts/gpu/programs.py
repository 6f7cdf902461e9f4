"""What the steps run: kernel families of the tests, planned and under forced arrangements, as jitted functions.

Comes in: whether a device or the emulator runs them. Goes out: ``Program``: a case by name, its function, its arguments by seed.
Invariant: the same list in every process, so that what ``precompile`` compiles is what the others find in the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

import kitsune_jax as kj
from kitsune_jax.planning.plan import GpuPlan
from kitsune_jax.targets.cuda import lower as cuda_lower
from kitsune_jax.targets.cuda import nvrtc, runtime
from reference import standalone
from tests.support import cuda_run
from tests.support.cuda_attention_cases import ATTENTION, ATTENTION_GRADIENTS
from tests.support.cuda_call_cases import CALLS
from tests.support.cuda_cases import FAMILIES, Family
from tests.support.cuda_recurrent_cases import RECURRENT
from tests.support.cuda_training_cases import TRAINING

PLANNED = "planned"
_FORCED_ROWS = 333  # several tiles for the one pipeline instance of a forced plan, the last of them not full
_PLANNED_ROWS = (1, 20_011)  # less than a tile; more tiles than a device has workers
_DRY_FAMILIES = ("dense",)
_LONGER_ROWS = 4_099  # of loops and whole steps: their references in float64 keep every step
_DRY_KINDS = ("sm90-vertical-resident-lanes1", "sm90-spatial-l2-lanes1")
# Training steps under forced arrangements, the first and every n-th of some twenty: their plans take a second each to make in every
# process, their kernels seconds to compile.
_FORCED_STEPS = {"tanh-step": 4, "labels-step": 5, "layer-norm-step": 6, "skip-step": 4, "softmax-step": 7, "heads-step": 5}
# As few of loops and of attention, whose blocks and lanes vary.
_FORCED_STEPS |= {name: 3 for name in RECURRENT} | {name: 4 for name in (*ATTENTION, *ATTENTION_GRADIENTS)}
_STEPS = {**TRAINING, **RECURRENT}  # large kernels: not in every dtype
_ALL = {**FAMILIES, **TRAINING, **RECURRENT, **ATTENTION, **ATTENTION_GRADIENTS, **CALLS}


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
        return cuda_lower.kind(self.plan, gradients) if self.plan is not None else ""

    def arguments(self, seed: int) -> tuple[Any, ...]:
        return self.family.arguments(self.rows, self.dtype, seed)

    @functools.cached_property
    def function(self) -> Any:
        """Jitted; compiles the kernel when it is first called. Gives what the family's function gives."""
        if self.plan is None:
            emulator = "emulator" if self.target == "emulator" else None
            return jax.jit(self._pipeline(emulator))
        of = self._subject()
        planned = of.planned(self.plan, self.target)
        return jax.jit(lambda *args: standalone.run(of.captured, [planned], args))

    def compile_kernel(self) -> None:
        """Puts the device's code into the cache on disk. Needs no device."""
        if self.plan is None:
            jax.jit(self._pipeline(None)).trace(*self.arguments(0)).lower(lowering_platforms=("cuda",))
        else:
            self._subject().planned(self.plan, self.target)

    def _pipeline(self, target: str | None) -> Any:
        f = self.family
        return kj.pipeline(f.function, force=True, strict=True, target=target, deterministic=f.deterministic)

    def _subject(self) -> cuda_run.Subject:
        return _subject_of(self.family, self.rows, self.dtype)


def programs(dry_run: bool, only: str = "") -> list[Program]:
    """Planned ones first, then forced ones for the architecture at hand, without the kinds that ``KITSUNE_CUDA_AVOID`` rules out;
    ``only``: those whose name holds it."""
    target = "emulator" if dry_run else "cuda"
    made = (*_planned(target, dry_run), *_forced(target, dry_run))
    return [p for p in made if only in p.name]


def smoke_programs(dry_run: bool, only_family: str = "") -> list[Program]:
    """One for each kind of kernel, of the first family that admits it; of ``only_family`` all kinds. Not without the kinds that are
    ruled out: this is where they are found."""
    target, rows = ("emulator", 130) if dry_run else ("cuda", _FORCED_ROWS)
    families = [f for f in (*FAMILIES.values(), *TRAINING.values()) if f.small and (not only_family or f.name == only_family)]
    found: dict[str, Program] = {}
    for family in [f for f in families if f.name in _DRY_FAMILIES] if dry_run else families:
        plans = cuda_run.arrangements(cuda_run.subject(family.function, *family.arguments(rows, "bfloat16")))
        for name, plan in plans.items():
            program = Program(family, "bfloat16", rows, target, name, plan)
            found.setdefault(name if only_family else program.kind, program)
    chosen = sorted(found.values(), key=lambda p: not p.kind.startswith("sm90"))
    return [p for p in chosen if p.kind in _DRY_KINDS] if dry_run else chosen


def few(among: list[Program]) -> list[Program]:
    """Of each small family three programs in a few rows, of a training step one, in bfloat16, so that every arrangement occurs: for
    tools that slow a device down a hundred times."""
    chosen = []
    for k, family in enumerate((*FAMILIES.values(), *TRAINING.values())):
        here = [p for p in among if p.family is family and family.small and p.dtype == "bfloat16" and p.rows < 1000]
        forced = [p for p in here if p.plan is not None]
        if family.name in TRAINING:
            chosen += [forced[k % len(forced)]] if forced else []
            continue
        chosen += [p for p in here if p.plan is None]
        chosen += [forced[i] for i in sorted({2 * k % len(forced), (2 * k + 1) % len(forced)})] if forced else []
    return chosen


def _planned(target: str, dry_run: bool) -> Iterator[Program]:
    for family in _families(dry_run):
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
    return _PLANNED_ROWS[-1:] if family.name in TRAINING else _PLANNED_ROWS


def _forced(target: str, dry_run: bool) -> Iterator[Program]:
    """Large families and training steps in bfloat16 only: each kernel takes seconds to compile."""
    generation = "sm90" if dry_run or nvrtc.sm_of(runtime.arch()) == 900 else "sm80"
    families = [f for f in _families(dry_run) if f.name not in CALLS and (f.name not in TRAINING or f.name in _FORCED_STEPS)]
    for family in families[:1] if dry_run else families:
        rows = 130 if dry_run else _FORCED_ROWS
        narrow = family.name in _FORCED_STEPS or not family.small
        dtypes = [d for d in family.dtypes if d == "bfloat16" or d == family.dtypes[0] or (d == "float32" and not narrow)]
        for dtype in dtypes[:1] if dry_run else dtypes:
            plans = cuda_run.arrangements(_subject_of(family, rows, dtype))
            names = [name for name in plans if name.startswith(generation)]
            names = names[:: _FORCED_STEPS.get(family.name, 1)]
            if dry_run:
                names = [name for name in names if name in _DRY_KINDS][:1]
            yield from (Program(family, dtype, rows, target, name, plans[name]) for name in names)


def _subject_of(family: Family, rows: int, dtype: str) -> cuda_run.Subject:
    batches = family.name in ATTENTION or family.name in ATTENTION_GRADIENTS
    return cuda_run.subject(family.function, *family.arguments(rows, dtype), batches=batches)


def _families(dry_run: bool) -> list[Family]:
    return [family for name, family in _ALL.items() if not dry_run or name in (*_DRY_FAMILIES, *CALLS)]
