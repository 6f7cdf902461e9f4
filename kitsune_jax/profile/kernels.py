"""Our own side of a profile: the micro-kernels, moved bytes and the hand-over of a call.

Comes in: the CPU extension. Goes out: numbers by name, as ``profile.model`` lists them.
"""

from __future__ import annotations

import functools
from typing import Any

from kitsune_jax.ops.table import OPS
from kitsune_jax.profile.timing import Log
from kitsune_jax.targets.cpu.bytecode import ACTIVATIONS, DTYPES, OPCODES, PRODUCTS, SPECIAL_OPS

# Kernel tables that multiply pairs of bfloat16, and those with tiles.
DOTS = frozenset({"avx512bf16", "amx", "neonbf16"})
TILES = frozenset({"amx"})
TILE, SHORT = 96, 8
DEPTHS, WIDTHS = (8, 64, 512), (16, 64, 512)
_GRADIENTS = ((16, 16), (64, 64), (512, 512))
_ELEMENTS, _FEW = 1024, 16
_SQUARE = 256
_WIDE = 1024  # columns of a weight that one row is multiplied by
_SHALLOW = 16  # of a product that is nothing beside its activation
# More threads than these tell nothing new about a core, and take long to start.
_MOST_THREADS = 16
# Plans do not depend on the exact time of these.
_UNMEASURED = frozenset(name for spec in OPS.values() if not spec.measured for name in spec.opcodes)
# What no float has and is long: of the others the time is that of an addition.
_OF_INTEGERS = frozenset(n for s in OPS.values() if "float32" not in s.dtypes and s.flops > 4 for n in s.opcodes)
_NO_WORK = frozenset({*SPECIAL_OPS, "reduce_precision"})
_DOUBLE = ("add", "div", "sqrt", "exp", "log", "tanh")
_COPIES = {"l1": 4 << 10, "l2": 128 << 10}  # bytes of each thread
_SHARED_COPIES = {"l3": 4 << 20, "dram": 96 << 20}  # of all threads together
_FRESH = 32 << 20
_MOMENT = 0.012  # seconds: some turns of the scheduler
_MOMENTS = 3


def measure(extension: Any, workers: int, log: Log) -> dict[str, float]:
    """Numbers of the kernel table in use, with ``workers`` threads busy."""
    threads = min(workers, _MOST_THREADS)
    found: dict[str, float] = {}

    def note(key: str, elements: float, function: Any, *args: Any) -> None:
        seconds = log.quiet(key, lambda: function(*args, threads))
        if seconds is not None:
            found[key] = seconds / elements

    code = {name: k for k, name in enumerate(DTYPES)}
    for dtype, product in products(extension):
        here = (code[dtype], product_code(product))
        for k in DEPTHS:
            for n in WIDTHS:
                note(f"gemm/{dtype}/{product}/{k}x{n}", 1, extension.measure_gemm, *here, TILE, k, n, 0)
        for k, n in _GRADIENTS:
            note(f"outer/{dtype}/{product}/{k}x{n}", 1, extension.measure_outer, *here, TILE, k, n)
        note(f"outer_short/{dtype}/{product}", 1, extension.measure_outer, *here, SHORT, _SQUARE, _SQUARE)
        note(f"short/{dtype}/{product}", 1, extension.measure_gemm, *here, 1, _SQUARE, _SQUARE, 0)
        for name, transposed in (("pack", False), ("pack_t", True)):
            note(f"{name}/{dtype}/{product}", _SQUARE * _SQUARE, extension.measure_pack, *here, _SQUARE, _SQUARE, transposed)
    for dtype in ("float32", "bfloat16"):
        shape = (code[dtype], product_code("best"), TILE, _SHALLOW, _SQUARE)
        relu = log.quiet("activation", functools.partial(extension.measure_gemm, *shape, ACTIVATIONS.index("relu"), threads)) or 0.0
        for k, name in enumerate(ACTIVATIONS):
            if name in ("none", "relu"):
                continue
            seconds = log.quiet(name, functools.partial(extension.measure_gemm, *shape, k, threads))
            if seconds is not None:
                found[f"activation/{name}/{dtype}"] = max(seconds - relu, 0.02 * seconds) / (TILE * _SQUARE)
    for k, name in enumerate(OPCODES):
        if name not in _UNMEASURED and name not in _NO_WORK:
            dtype = "uint32" if name in _OF_INTEGERS else "float32"
            note(f"vector/{name}", _ELEMENTS, extension.measure_vector, k, code[dtype], _ELEMENTS)
        if name in _DOUBLE:
            note(f"vector64/{name}", _ELEMENTS, extension.measure_vector, k, code["float64"], _ELEMENTS)
    for dtype in ("float32", "bfloat16", "float16"):
        for what in ("load", "store"):
            note(f"{what}/{dtype}", _ELEMENTS, extension.measure_move, what, code[dtype], _ELEMENTS)
        one_row = (code[dtype], product_code("widened"), TILE, 1, _WIDE)
        note(f"few/{dtype}", TILE * _WIDE, extension.measure_outer, *one_row)
        note(f"fold/short/{dtype}", 64, extension.measure_fold, 0, code[dtype], 64, _FEW, False)
        note(f"load/short/{dtype}", 1, extension.measure_move, "load", code[dtype], _FEW)
        for which in ("row", "column"):
            note(f"fold/{which}/{dtype}", 16 * 256, extension.measure_fold, 0, code[dtype], 16, 256, which == "column")
    # More workers than were measured share what these had of the memory: it has fewer channels than a large machine has cores.
    crowd = workers / threads
    shared = {level: size // threads for level, size in _SHARED_COPIES.items()}
    for level, size in (_COPIES | shared).items():
        note(f"copy/{level}", size / crowd if level == "dram" else size, extension.measure_copy, size)
    for name, huge in (("touch", False), ("touch/huge", True)):
        note(name, _FRESH // threads / crowd, extension.measure_touch, _FRESH // threads, huge)
    return found


def share(extension: Any, workers: int, enough: float) -> float:
    """Of a moment, the least that one of so many busy threads ran: near 1 where nothing else does.

    Up to three moments, until one gives ``enough``: a scheduler may start two threads on one core and needs a turn to part them,
    which looks like another program; another program is still there a moment later."""
    best = 0.0
    for _ in range(_MOMENTS):
        best = max(best, float(extension.measure_share(_MOMENT, min(workers, _MOST_THREADS))))
        if best >= enough:
            break
    return best


def products(extension: Any) -> list[tuple[str, str]]:
    """(dtype, product) of every kind of matmul that the kernel table in use has."""
    isa = extension.isa()
    narrow = ["widened", *(["dots"] if isa in DOTS else []), *(["tiles"] if isa in TILES else [])]
    return [("float32", "widened"), ("float16", "widened"), ("float64", "widened"), *(("bfloat16", p) for p in narrow)]


def product_code(product: str) -> int:
    return PRODUCTS.index(product)
