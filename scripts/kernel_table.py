"""Write the table of docs/kernels.md: what NVRTC makes of each kind of kernel.

Comes in: networks of ``tests/support/cuda_cases.py``, training steps of ``tests/support/cuda_training_cases.py``, and the
planner. Goes out:
docs/kernels.md, between markers. Needs NVRTC and a disassembler, and no GPU: nothing runs. ``--networks nerf,loss`` prints those
rows and writes nothing. ``--other FOLDER`` has a second NVRTC, which compiles the same kernels: a sentence says what it makes of
them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = {
    "loss": "MLP 32-64-16 into three sums",
    "edge-update": "MLP 384-128-128-128, LayerNorm, residual",
    "edge-phase": "edges of a graph: two gathers, MLP 384-128-128, LayerNorm, residual, segment sum",
    "interaction": "products of each two of 27 vectors of 128, 26 of them gathered; 351 are picked",
    "nerf": "NeRF 8 x 256",
    "swiglu": "SwiGLU 512-1408-512",
    "labels-step": "MLP 24-32-10, cross-entropy, training step",
    "edge-update-step": "MLP 384-128-128-128, LayerNorm, residual, training step",
}
ROWS = 262_144
_HEAD = (
    "network",
    "dtype",
    "kind",
    "lanes",
    "CTAs of a pipeline",
    "registers",
    "shared memory",
    "instructions",
    "HGMMA or HMMA",
    "left in flight",
    "pointwise beside",
    "hazards",
    "stack",
    "spilled",
    "ptxas complains",
    "NVRTC",
)
# Of the columns that the lint fills.
_LEGEND = """\
*Left in flight*: the most `HGMMA` that a wait leaves running, of those that run when it is reached. *Pointwise beside*: the share
of the floating-point instructions that are between the issue of a product and the wait that retires it (other lanes' run beside it
as well). *Hazards*: instructions that touch registers of a product in flight."""


@dataclass(frozen=True)
class Row:
    """One kernel. Registers are per thread as launched; stack and spills are per thread, and 0 in a good kernel.

    ``left``, ``arriving``: the most ``HGMMA`` that a wait leaves in flight, and how many are when it is reached. ``hidden`` of
    ``pointwise`` instructions run beside an ``HGMMA``.
    """

    network: str
    dtype: str
    kind: str
    lanes: int
    ctas: int
    registers: int
    shared_bytes: int
    instructions: int
    tensor: int
    left: int
    arriving: int
    pointwise: int
    hidden: int
    hazards: int
    stack_bytes: int
    spill_bytes: int
    complaints: tuple[str, ...]
    seconds: float

    def cells(self) -> tuple[str, ...]:
        return (
            NETWORKS[self.network],
            self.dtype,
            self.kind,
            str(self.lanes),
            str(self.ctas),
            str(self.registers),
            f"{self.shared_bytes / 1024:.0f} KiB",
            str(self.instructions),
            str(self.tensor),
            f"{self.left} of {self.arriving}" if self.arriving else "",
            f"{100 * self.hidden / self.pointwise:.0f} %" if self.arriving and self.pointwise else "",
            str(self.hazards),
            f"{self.stack_bytes} B" if self.stack_bytes else "0",
            f"{self.spill_bytes} B" if self.spill_bytes else "0",
            ", ".join(self.complaints) or "none",
            f"{self.seconds:.1f} s",
        )


def kind_of(plan: Any, portable: bool) -> str:
    """The section of docs/kernels.md that a plan's kernel belongs to."""
    if portable:
        return "portable"
    if plan.arrangement == "spatial":
        return "spatial, cluster" if any(q.place == "cluster" for q in plan.queues) else "spatial, L2"
    if plan.stages[0].resident:
        return "vertical, resident"
    return "vertical, streamed"


def rows(networks: Sequence[str], folders: Sequence[Path | None]) -> Iterator[list[Row]]:
    """For each network, dtype and kind that has a kernel: of the plan that the model takes for the fastest of its kind, a row for
    the NVRTC of each folder."""
    from kitsune_jax.targets.cuda.lower import check
    from kitsune_jax.targets.cuda.planning.machines import A100, H200
    from tests.support.cuda_cases import FAMILIES
    from tests.support.cuda_run import plans, subject
    from tests.support.cuda_training_cases import COMPILED, TRAINING

    families = {**FAMILIES, **TRAINING, **COMPILED}
    for network in networks:
        for dtype in families[network].dtypes:
            of = subject(families[network].function, *families[network].shapes(ROWS, dtype))
            seen: set[str] = set()
            for machine in (H200, A100):
                for _, plan in plans(of.graph, of.region, machine):
                    kind, program = kind_of(plan, machine is A100), of.program(plan)
                    if kind in seen or check(program, plan, "region") is not None:
                        continue
                    seen.add(kind)
                    yield [_measured(network, dtype, kind, program, plan, folder) for folder in folders]


def _measured(network: str, dtype: str, kind: str, program: Any, plan: Any, folder: Path | None) -> Row:
    from kernel_checks import sass
    from kernel_checks.lint import flow, in_flight
    from kitsune_jax.targets.cuda import lower, nvrtc
    from kitsune_jax.targets.cuda.arrangement import arrangement_of

    arrangement = arrangement_of(plan, program)
    made = lower.generate_kernel(program, arrangement, "region")
    start = time.process_time()  # of this process: others may load the machine
    compiled = nvrtc.compile(made.source, "sm_90a" if arrangement.sm == 900 else "sm_80", folder=folder)
    seconds = time.process_time() - start
    code, used = sass.disassemble(compiled.cubin, "kitsune_region"), sass.resources(compiled.log, compiled.cubin)
    products = in_flight(flow(code.instructions))
    waits = [(max(w.left_products), max(w.arriving_products)) for w in products.waits]
    left, arriving = max(waits, default=(0, 0))
    return Row(
        network,
        dtype,
        kind,
        plan.lanes,
        arrangement.ctas,
        used.registers,
        made.shared_bytes,
        len(code.instructions),
        code.count("HGMMA.") + code.count("HMMA."),
        left,
        arriving,
        products.pointwise,
        products.hidden,
        len(products.hazards),
        code.stack,
        used.spill_bytes,
        tuple(sorted(set(re.findall(r"\((C7\d+)\)", compiled.log)))),
        seconds,
    )


def markdown(measured: Sequence[Row], version: tuple[int, int]) -> str:
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|---|" + "---:|" * (len(_HEAD) - 3)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in measured]
    where = (
        f"NVRTC {version[0]}.{version[1]}, {ROWS} rows. "
        "Figures of emulated and disassembled code, not of a run: [gpu-verified.md](gpu-verified.md) says which kernels have run."
    )
    return "\n".join([where, _LEGEND, "", *lines])


def comparison(measured: Sequence[Row], others: Sequence[Row], version: tuple[int, int]) -> str:
    """A sentence on what another NVRTC makes of the same kernels."""
    total, all_instructions = sum(row.instructions for row in measured), sum(row.instructions for row in others)
    spilling = [sum(row.stack_bytes > 0 for row in some) for some in (others, measured)]
    complaints = sum(bool(row.complaints) for row in others)
    return (
        f"NVRTC {version[0]}.{version[1]} makes of the same {len(others)} kernels: {sum(row.hazards for row in others)} hazards, "
        f"{complaints} of which ptxas complains, {spilling[0]} with a stack (above: {spilling[1]}), and "
        f"{100 * (all_instructions / total - 1):+.1f} % instructions."
    )


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    from benchmarks import table
    from kernel_checks import sass
    from kitsune_jax.targets.cuda import nvrtc

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", help="only these, printed and not written")
    parser.add_argument("--other", type=Path, help="the folder of a second NVRTC")
    arguments = parser.parse_args()
    only, folders = arguments.networks, [None, *([arguments.other] if arguments.other else [])]
    if why := next(filter(None, map(nvrtc.why_not, folders)), None):
        raise SystemExit(why)
    if not sass.available():
        raise SystemExit("no cuobjdump: pip install triton")
    for folder in folders:  # the first call in a process loads the compiler
        nvrtc.compile('extern "C" __global__ void kitsune_region() {}', "sm_90a", folder=folder)
    measured: list[list[Row]] = []
    for both in rows(only.split(",") if only else tuple(NETWORKS), folders):
        measured.append(both)
        for row in both:
            print(" | ".join(row.cells()), file=sys.stderr, flush=True)
    first, *others = zip(*measured, strict=True)
    text = markdown(first, nvrtc.version())
    for other in others:
        text += "\n\n" + comparison(first, other, nvrtc.version(arguments.other))
    if only:
        print(text)
    else:
        changed = table.update(ROOT / "docs" / "kernels.md", text, "kernels")
        print(f"docs/kernels.md {'updated' if changed else 'is up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
