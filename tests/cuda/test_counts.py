"""What kernels do with memory, counted in the emulator: bounds that a defect breaks.

A bound that a family does not keep stands in a table here with the figure that it has, which may only go down.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest

from kitsune_jax.targets.cuda import hostcc, runtime
from scripts import kernel_counts
from scripts.kernel_counts import Kernel
from tests.support.cuda_cases import FAMILIES
from tests.support.cuda_run import arrangements, kernel_cache, subject  # noqa: F401  (a fixture)
from tests.support.cuda_training_cases import TRAINING

pytestmark = [
    pytest.mark.skipif(not hostcc.available(), reason=hostcc.why_not() or ""),
    pytest.mark.skipif(not runtime.available(), reason="no CUDA extension"),
    pytest.mark.usefixtures("kernel_cache"),
]

TILES = 12  # every lane of every arrangement has at least two
HALF, FLOAT = "bfloat16", "float32"
RESIDENT, STREAMED, CLUSTER, L2, PORTABLE = (
    "sm90-vertical-resident",
    "sm90-vertical-streamed-cluster2",
    "sm90-spatial-cluster",
    "sm90-spatial-l2",
    "sm80-spatial-l2",
)

FAST = [
    ("nerf", HALF, STREAMED),
    ("edge-update", HALF, RESIDENT),
    ("mlp", HALF, CLUSTER),
    ("edge-update-small", FLOAT, RESIDENT),
    ("loss", HALF, RESIDENT),
    ("rms-norm", HALF, RESIDENT),
    ("mixed", HALF, RESIDENT),
    ("swiglu-small", HALF, PORTABLE),
    ("labels-step", HALF, RESIDENT),
    ("skip-step", HALF, L2),
]
# Of "dense" with so few rows, the columns of its weights are the longer stream.
SLOW = [
    (f.name, dtype, kind)
    for f in {**FAMILIES, **TRAINING}.values()
    if f.small and f.name != "dense"
    for dtype in sorted({HALF, FLOAT}.intersection(f.dtypes))
    for kind in (RESIDENT, PORTABLE)
    if (f.name, dtype, kind) not in FAST
]

_counted: dict[tuple[str, str, str], list[Kernel]] = {}


def kernels(case: tuple[str, str, str]) -> list[Kernel]:
    """The family's kernels of a kind, with the most lanes that there are: none, or one."""
    if case not in _counted:
        name, dtype, kind = case
        family = {**FAMILIES, **TRAINING}[name]
        of = subject(family.function, *family.arguments(64 * TILES, dtype))
        found = arrangements(of)
        names = [at for at in found.names() if at.startswith(kind) and "split" not in at and "unordered" not in at]
        plans = {at: found[at] for at in names if at in found}
        most = max(plans, key=lambda at: plans[at].lanes, default=None)
        _counted[case] = [] if most is None else [kernel_counts.run(name, dtype, most, of, plans[most])]
    return _counted[case]


def all_cases(test: Any) -> Any:
    cases = [
        pytest.param(case, id=" ".join(case), marks=marks)
        for some, marks in ((FAST, []), (SLOW, [pytest.mark.slow]))
        for case in some
    ]
    return pytest.mark.parametrize("case", cases)(test)


# -- bank conflicts

# Wavefronts for one without conflicts, by dtype, file, instruction and width: rearranged columns, staged rows.
CONFLICTS = {
    (HALF, "stage/scratch.h", "ld_shared", 4): 2.0,
    (HALF, "stage/scratch.h", "st_shared", 4): 1.1,
    (FLOAT, "stage/scratch.h", "ld_shared", 4): 1.2,
    (FLOAT, "stage/scratch.h", "st_shared", 4): 1.1,
    (HALF, "global.h", "ld_shared", 4): 2.2,
    (FLOAT, "global.h", "ld_shared", 4): 1.7,
    # Tiles in the ring, whose rows lie a multiple of 128 bytes apart: two of the rows that a quarter of a warp reads are in a bank.
    (HALF, "global.h", "ld_shared", 16): 2.0,
    (FLOAT, "global.h", "ld_shared", 16): 2.0,
    # Addresses of rows and results of products for each row, 64 and 128 wavefronts a tile; a row of 16 numbers that is copied.
    ("interaction-small", "stage/row_product.h", "st_shared", 8): 2.0,
    ("interaction-small", "stage/scratch.h", "st_shared", 4): 2.0,
    # Scores of four heads: a warp folds four runs of eight columns in each of its rows.
    ("heads", "stage/scratch.h", "ld_shared", 4): 2.0,
    ("heads", "stage/scratch.h", "st_shared", 4): 1.34,
}


@all_cases
def test_no_access_to_shared_memory_in_the_loop_over_tiles_conflicts(case: tuple[str, str, str]) -> None:
    for kernel in kernels(case):
        by_place: dict[tuple[str, str, int], list[int]] = collections.defaultdict(lambda: [0, 0])
        for a in kernel.loop:
            if not a.buffer:
                both = by_place[a.file, a.op, a.width]
                both[0] += a.wavefronts
                both[1] += a.ideal
        for place, (wavefronts, ideal) in by_place.items():
            known = CONFLICTS.get((case[0], *place)) or CONFLICTS.get((case[1], *place), 1.0)
            assert wavefronts <= known * ideal, place


# -- narrow accesses

# Requests of warps a tile, by bytes of a row, where the pitch is no multiple of 16: results of one or three columns, targets.
ODD = {
    "mlp": {6: 16},
    "nerf-small": {18: 32, 2: 8, 6: 16},
    "nerf": {2: 8, 6: 16},
    "skip-step": {8: 16},
    "gelu-step": {6: 16},
    "binary-step": {10: 16},
    "regression-step": {26: 64, 2: 8},
    "interaction-small": {26: 32},
}


@all_cases
def test_rows_are_read_and_written_by_as_many_bytes_as_their_pitch_allows(case: tuple[str, str, str]) -> None:
    for kernel in kernels(case):
        requests: collections.Counter[int] = collections.Counter()
        for a in kernel.loop:
            if a.width <= 2 and a.buffer.startswith(("in", "out")):
                requests[kernel.counts.buffer(a.buffer).bytes // (64 * kernel.tiles)] += a.requests
        spatial = "spatial" in case[2]  # stages each read what they need
        for pitch, count in requests.items():
            known = ODD.get(case[0], {}).get(pitch, 0)
            assert count <= known * kernel.tiles * (len(kernel.plan.stages) if spatial else 1), pitch


# -- traffic

# Times that the bytes of an input come from L2. A third of the 384 columns are read again for the residual. On the portable path,
# whose waits at gpu scope empty L1, products whose columns are made in blocks read it for each block.
FROM_L2 = {
    ("edge-update", HALF, RESIDENT): 1.334,
    ("mlp", HALF, PORTABLE): 2.0,
    ("loss", HALF, PORTABLE): 2.0,
    ("gated-step", FLOAT, PORTABLE): 4.55,
    ("edge-phase-small", HALF, RESIDENT): 1.167,  # lines of L1 hold rows of other tiles
}
_SECTOR = 32  # bytes that a load brings at least: where rows stream in an order of their own, neighbours belong to other tiles


@all_cases
def test_inputs_are_read_once(case: tuple[str, str, str]) -> None:
    for kernel in kernels(case):
        for b in kernel.streamed("in"):
            assert b.memory_read <= b.bytes + 32, b.name
            times = FROM_L2.get(case, float(kernel.loads(b.name)))
            row = b.bytes // kernel.program.rows
            apart = max(1, _SECTOR // row) if kernel.program.order is not None and b.name != f"in{kernel.program.order}" else 1
            assert b.l2_read <= times * apart * (b.bytes + 32), b.name


@all_cases
def test_results_go_to_memory_once(case: tuple[str, str, str]) -> None:
    for kernel in kernels(case):
        for b in kernel.streamed("out"):
            assert b.memory_written <= b.bytes + 32, b.name
            assert b.memory_read <= 32, b.name


# -- fences

# A loop's instructions of this name for a warp and a tile.
FENCES = {("nerf", HALF, STREAMED): {"fence.release.sync_restrict": 19.0}}


@pytest.mark.parametrize("case", FENCES, ids=" ".join)
def test_fences_of_a_warp(case: tuple[str, str, str]) -> None:
    (kernel,) = kernels(case)
    for name, most in FENCES[case].items():
        assert kernel.events(name) <= most * 4 * kernel.tiles


@pytest.mark.parametrize("case", FAST, ids=" ".join)
def test_there_is_such_a_kernel(case: tuple[str, str, str]) -> None:
    assert kernels(case)


def test_the_tables_have_a_cell_for_each_title() -> None:
    (kernel,) = kernels(("loss", HALF, RESIDENT))
    for table in (kernel_counts.markdown([kernel]), kernel_counts.traffic_markdown([kernel])):
        head, rule, row = table.splitlines()
        assert head.count("|") == rule.count("|") == row.count("|")
    for what in ("lanes ld_global 16 in0", "lanes wgmma m64n64k16 bf16, A in registers", "loader bulk_load"):
        assert what in kernel_counts.details(kernel)


def test_counts_of_a_few_tiles_stand_for_those_of_the_whole_plan() -> None:
    """A vertical plan with resident weights moves its arrays once and has the weights once for each CTA."""
    (kernel,) = kernels(("loss", HALF, RESIDENT))
    memory, _ = kernel.extrapolated()
    rows, weights = 64 * TILES * (32 + 16) * 2, kernel.counts.buffer("weights0").bytes
    assert memory == rows + weights
