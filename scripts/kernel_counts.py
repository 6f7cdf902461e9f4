"""Count what the CUDA kernels do, in the emulator, as a profiler would on a device; writes the tables of counts of the docs.

Comes in: networks of ``tests/support/cuda_cases.py``, training steps of ``tests/support/cuda_training_cases.py``, and the
planner. Goes out:
docs/kernels.md and docs/offchip.md, between markers. Needs a C++ compiler, and no GPU. ``--networks nerf,loss`` prints those rows
and writes nothing; ``--kinds``, ``--dtypes`` choose further; ``--details`` prints every access by place of the source, and
``--json FILE`` writes everything that was counted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_checks.counters import Access, Counts, Event, Traffic

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts.kernel_table import NETWORKS, ROWS, kind_of  # noqa: E402

KINDS = ("vertical, resident", "vertical, streamed", "spatial, cluster", "spatial, L2", "portable")
ROUNDS = 3  # of tiles, for every lane
MOST_CTAS = 32  # of a pipeline: larger ones take the emulator minutes
_HEAD = (
    "network",
    "dtype",
    "kind",
    "inputs from memory",
    "inputs from L2",
    "L1 sectors",
    "results to L2",
    "weights from L2",
    "rings in L2",
    "between CTAs",
    "accesses of 1 or 2 bytes",
    "wavefronts",
    "fences",
    "waits",
    "matrix instructions",
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that ran, and what it counted. ``tiles`` of 64 rows went through it."""

    network: str
    dtype: str
    kind: str
    tiles: int
    lanes: int
    counts: Counts
    plan: Any  # as the planner made it, for ``ROWS`` rows and all SMs
    program: Any

    def loads(self, buffer: str) -> int:
        """How many stages load an input, or slices of it: each on its own."""
        from kitsune_jax.program.ir import walk

        kinds = ("load", "load_slice")
        of = [{f"in{i['array']}" for i in walk(stage.body) if i.kind in kinds} for stage in self.program.stages]
        return sum(not names.isdisjoint(buffer.split("/")) for names in of)

    @property
    def loop(self) -> list[Access]:
        """The accesses of the loop over tiles."""
        return [a for a in self.counts.accesses if a.role >= 0 and not a.finish]

    @property
    def narrow(self) -> int:
        """Warps' loads and stores of global memory by one or two bytes a thread."""
        return sum(a.requests for a in self.loop if a.buffer and a.width <= 2)

    @property
    def conflicts(self) -> tuple[int, int]:
        """Wavefronts of shared memory, and what they were without conflicts."""
        shared = [a for a in self.loop if not a.buffer]
        return sum(a.wavefronts for a in shared), sum(a.ideal for a in shared)

    def streamed(self, prefix: str) -> list[Traffic]:
        """The inputs ("in") or results ("out") that have a row for each of the stream."""
        sinks = {sink.array for sink in self.program.sinks}
        names = {f"in{k}" for k, array in enumerate(self.program.inputs) if array.streamed}
        names |= {f"out{k}" for k in range(len(self.program.outputs)) if k not in sinks}
        wanted = {name for name in names if name.startswith(prefix)}
        return [b for b in self.counts.buffers if not wanted.isdisjoint(b.name.split("/"))]

    def share(self, prefix: str, field: str) -> float | None:
        """Bytes of streamed arrays in relation to their size."""
        found = self.streamed(prefix)
        return sum(getattr(b, field) for b in found) / sum(b.bytes for b in found) if found else None

    def events(self, *prefixes: str) -> int:
        """How often events happened in the loop over tiles."""
        return sum(e.count for e in self.counts.events if e.role >= 0 and not e.finish and e.name.startswith(prefixes))

    def extrapolated(self) -> tuple[float, float]:
        """Bytes from and to memory, and through the L2, that the plan would move: the counts of its tiles as often as it has tiles,
        and of weights that stay as often as there are instances. Sums over the rows, at the end, are not in it."""
        memory = l2 = 0.0
        for b in self.streamed("in") + self.streamed("out"):
            memory += (b.memory_read + b.memory_written) / self.tiles * self.plan.tiles
            l2 += (b.l2_read + b.l2_written) / self.tiles * self.plan.tiles
        resident = all(s.resident for s in self.plan.stages)
        for b in self.counts.buffers:
            if b.name.startswith("weights"):
                memory += b.memory_read
                l2 += b.l2_read * (self.plan.replicas if resident else self.plan.tiles / self.tiles)
        rings = sum(a.bytes for a in self.loop if a.buffer == "workspace")
        return memory, l2 + rings / self.tiles * self.plan.tiles

    def modelled(self) -> tuple[str, ...]:
        memory, l2 = self.extrapolated()
        name = NETWORKS.get(self.network, self.network)
        figures = (self.plan.bytes_moved, memory, self.plan.l2_bytes, l2)
        return (name, self.dtype, self.kind, *(f"{n / 1e6:.0f} MB" for n in figures))

    def cells(self) -> tuple[str, ...]:
        wavefronts, ideal = self.conflicts
        between = sum(a.bytes for a in self.counts.accesses if a.op in ("st_async", "st_cluster", "ld_cluster"))
        between += self.counts.amount("bulk_push")
        weights = sum(b.l2_read for b in self.counts.buffers if b.name.startswith("weights"))
        return (
            NETWORKS.get(self.network, self.network),
            self.dtype,
            self.kind,
            _times(self.share("in", "memory_read")),
            _times(self.share("in", "l2_read")),
            _times(self.share("in", "wanted")),
            _times(self.share("out", "l2_written")),
            "once" if all(s.resident for s in self.plan.stages) else _kib(weights / self.tiles),
            _kib(sum(a.bytes for a in self.loop if a.buffer == "workspace") / self.tiles),
            _kib(between / self.tiles),
            f"{self.narrow / self.tiles:.0f}",
            f"{wavefronts / ideal:.2f}" if ideal else "none",
            f"{self.events('fence.', 'red.', 'atom.') / self.tiles:.1f}",
            f"{self.events('mbar_wait', 'wait_ge') / self.tiles:.1f}",
            f"{self.events('wgmma', 'mma.sync') / self.tiles:.0f}",
        )


def _times(n: float | None) -> str:
    return "none" if n is None else f"{n:.2f}"


def _kib(n: float) -> str:
    return f"{n / 1024:.1f} KiB" if n else "0"


def kernels(
    networks: Sequence[str], kinds: Sequence[str] = KINDS, dtypes: Sequence[str] = (), rounds: int = ROUNDS
) -> Iterator[Kernel]:
    """Runs a kernel for each network, dtype and kind: of the plan that the planner takes for the fastest of its kind at ``ROWS``
    rows, with one instance of the pipeline and so many rows that every lane has ``rounds`` tiles or a multiple of them."""
    from kitsune_jax.targets.cuda.lower import check
    from kitsune_jax.targets.cuda.planning.machines import A100, H200
    from tests.support.cuda_cases import FAMILIES
    from tests.support.cuda_run import plans, subject
    from tests.support.cuda_training_cases import COMPILED, TRAINING

    families = {**FAMILIES, **TRAINING, **COMPILED}
    for network in networks:
        for dtype in families[network].dtypes:
            if dtypes and dtype not in dtypes:
                continue
            of = subject(families[network].function, *families[network].shapes(ROWS, dtype))
            seen: set[str] = set()
            for machine in (H200, A100):
                for _, plan in plans(of.graph, of.region, machine):
                    kind = kind_of(plan, machine is A100)
                    if kind in seen or kind not in kinds or check(of.program(plan), plan, "region") is not None:
                        continue
                    seen.add(kind)
                    if sum(s.split for s in plan.stages) > MOST_CTAS:
                        continue
                    rows = 64 * plan.lanes * (1 if plan.arrangement == "spatial" else plan.cluster) * rounds
                    rows *= -(-(_widest(families[network]) + 1) // rows)
                    arguments = families[network].arguments(rows, dtype)
                    yield run(network, dtype, kind, subject(families[network].function, *arguments), plan)


def _widest(family: Any) -> int:
    """With fewer rows than the widest weight has columns, those would be what streams."""
    return max(n for a in family.args for n in a.shape)


def run(network: str, dtype: str, kind: str, of: Any, plan: Any) -> Kernel:
    """One launch of ``of`` under ``plan`` with one instance of the pipeline, counted."""
    from kernel_checks import counters
    from tests.support import cuda_run

    tiles = of.region.space.rows // plan.tile_rows
    one = dataclasses.replace(plan, replicas=1, tiles=tiles)
    kernel, program = cuda_run.Kernel(of, one), of.program(one)
    with counters.counting(kernel.code.kernel.launch[1]) as found:
        kernel()
    counts = found[-1]  # behind that of the packing kernel
    named = counts.named(counters.buffer_names(kernel.code.kernel))
    return Kernel(network, dtype, kind, tiles, plan.lanes, named, plan, program)


def details(kernel: Kernel) -> str:
    """Every access by place, and every event, summed over stages and lanes."""
    fields = ("requests", "threads", "bytes", "sectors", "wavefronts", "ideal")
    rows: dict[tuple[Any, ...], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for a in kernel.counts.accesses:
        rows[(_role(a), a.op, a.width, a.buffer, a.place)].update({f: getattr(a, f) for f in fields})
    lines = [f"{kernel.network} {kernel.dtype} {kernel.kind}: {kernel.tiles} tiles, {kernel.lanes} lanes"]
    lines += [" ".join(map(str, (*key, *(f"{f} {n[f]}" for f in fields if n[f])))) for key, n in sorted(rows.items())]
    events: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for e in kernel.counts.events:
        events[(_role(e), e.name)].update({f: getattr(e, f) for f in ("count", "threads", "amount")})
    lines += [
        f"{role} {name}: {n['count']} ({n['threads']} threads, amount {n['amount']})" for (role, name), n in sorted(events.items())
    ]
    lines += [f"{b.name}: {dataclasses.asdict(b)}" for b in kernel.counts.buffers]
    return "\n  ".join(lines)


def _role(of: Access | Event) -> str:
    return "before" if of.role < 0 else "finish" if of.finish else "lanes" if of.role else "loader"


def markdown(counted: Sequence[Kernel]) -> str:
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|---|" + "---:|" * (len(_HEAD) - 3)]
    return "\n".join([*lines, *("| " + " | ".join(k.cells()) + " |" for k in counted)])


def traffic_markdown(counted: Sequence[Kernel]) -> str:
    head = ("network", "dtype", "kind", "memory, modelled", "memory, counted", "L2, modelled", "L2, counted")
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---:|---:|---:|---:|"]
    return "\n".join([*lines, *("| " + " | ".join(k.modelled()) + " |" for k in counted)])


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks import table
    from kitsune_jax.targets.cuda import hostcc

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", help="only these, printed and not written")
    parser.add_argument("--kinds", help=f"only these, by their numbers: {', '.join(f'{i} {k}' for i, k in enumerate(KINDS))}")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--details", action="store_true", help="print every access by place of the source")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    chosen = parser.parse_args()
    if why := hostcc.why_not():
        raise SystemExit(why)
    counted = []
    kinds = [KINDS[int(i)] for i in chosen.kinds.split(",")] if chosen.kinds else KINDS
    start = time.monotonic()
    for kernel in kernels(chosen.networks.split(",") if chosen.networks else tuple(NETWORKS), kinds, chosen.dtypes.split(",")):
        counted.append(kernel)
        print(" | ".join(kernel.cells()), f"| {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        if chosen.details:
            print(details(kernel), flush=True)
    if chosen.json:
        chosen.json.write_text(
            json.dumps(
                [{**dataclasses.asdict(dataclasses.replace(k, program=None)), "program": None} for k in counted],
                indent=1,
                default=str,
            )
        )
    if chosen.networks or chosen.kinds:
        print(markdown(counted), traffic_markdown(counted), sep="\n\n")
    else:
        for page, text, name in (("kernels.md", markdown(counted), "counts"), ("offchip.md", traffic_markdown(counted), "gpu")):
            changed = table.update(ROOT / "docs" / page, text, name)
            print(f"docs/{page} {'updated' if changed else 'is up to date'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
