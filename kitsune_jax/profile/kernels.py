"""Our own side of a profile: the micro-kernels, moved bytes and the hand-over of a call.

Comes in: the CPU extension. Goes out: pieces of work to be timed, and the numbers that are made of their times, as
``profile.model`` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

from kitsune_jax.ops.table import OPS
from kitsune_jax.profile.timing import Piece
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
_RELU = "activation/relu/"  # beyond which the others are counted


def pieces(extension: Any, workers: int) -> list[Piece]:
    """All that is measured of the kernel table in use, with ``workers`` threads busy."""
    threads = min(workers, _MOST_THREADS)
    found: list[Piece] = []

    def note(key: str, elements: float, function: Any, *args: Any) -> None:
        found.append(Piece(key, functools.partial(_least, function, *args, threads), elements))

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
        for k, name in enumerate(ACTIVATIONS):
            if name != "none":
                note(f"activation/{name}/{dtype}", TILE * _SQUARE, extension.measure_gemm, *shape, k)
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


def numbers(pieces: Iterable[Piece], seconds: Mapping[str, float]) -> dict[str, float]:
    """The numbers of a profile, of the ``seconds`` that those of the pieces took that there are."""
    found: dict[str, float] = {}
    for piece in pieces:
        taken = seconds.get(piece.key)
        if taken is None or piece.key.startswith(_RELU):
            continue
        if piece.key.startswith("activation/"):
            taken = max(taken - seconds[_RELU + piece.key.split("/")[2]], 0.02 * taken)
        found[piece.key] = taken / piece.elements
    return found


def reference(extension: Any, workers: int) -> float:
    """Seconds of work in registers, the same at every call, with all workers busy: as fast as the cores are just now."""
    threads = min(workers, _MOST_THREADS)
    taken = _least(extension.measure_vector, OPCODES.index("exp"), DTYPES.index("float32"), _ELEMENTS, threads)
    assert taken is not None  # every table has an exponential
    return taken


def _least(function: Any, *args: Any) -> float | None:
    return min(function(*args), default=None)


def products(extension: Any) -> list[tuple[str, str]]:
    """(dtype, product) of every kind of matmul that the kernel table in use has."""
    isa = extension.isa()
    narrow = ["widened", *(["dots"] if isa in DOTS else []), *(["tiles"] if isa in TILES else [])]
    return [("float32", "widened"), ("float16", "widened"), ("float64", "widened"), *(("bfloat16", p) for p in narrow)]


def product_code(product: str) -> int:
    return PRODUCTS.index(product)
