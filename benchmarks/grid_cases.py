"""What the grid measures: ordinary functions over widths, depths, rows, activations and dtypes. Knows no JAX.

Comes in: a number of cases and a seed. Goes out: ``Sample``: the cases that somebody reported (``NAMED``), the applications, some
reductions and programs, and a stratified sample of the product of all widths, depths, rows and so on, which is far too large to
measure: every level of every factor is drawn as often as any other. Invariant: equal arguments give the equal sample.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

ACTIVATIONS = ("relu", "silu", "gelu", "tanh", "none")
DTYPES = ("f32", "bf16", "f16")
MODES = ("infer", "train")
KINDS = ("mlp", "softmax", "pointwise", "app", "dlrm", "reduction", "program")
WIDTHS = (8, 16, 24, 32, 48, 64, 72, 96, 100, 128, 192, 200, 256, 320, 384, 512, 768, 1024, 1536, 2048)
DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8)
# From one row to a million. Primes and their like among them: the last tile of a pipeline is then a part of one.
ROWS = (1, 7, 32, 127, 509, 1024, 2003, 4001, 4096, 8009, 12_007, 20_011, 32_768, 65_537, 131_101, 262_144, 500_009, 1_000_003)
ITEM_BYTES = {"f32": 4, "bf16": 2, "f16": 2}
APP_ROWS = {"nerf": 16_381, "mgn": 50_021, "swiglu": 2_039}
# A deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091): the sizes reported, and the paper's top MLP.
DLRM_BOTTOM, DLRM_TABLES, DLRM_TOP = (13, 384, 64), (17, 50_000, 64), (512, 256, 1)


@dataclasses.dataclass(frozen=True)
class GridCase:
    """``kind`` "mlp": ``depth`` layers of ``width`` with ``activation`` behind each, and a layer norm between two with ``norm``.

    "pointwise": ``depth`` times a scale, a shift and ``activation``, over rows of ``width``. "softmax": over the same. "app": the
    application ``app`` of ``benchmarks.apps``. "dlrm": one training step. "reduction": ``app`` of ``grid_functions.REDUCTIONS``, of
    as many numbers as ``rows`` of ``width``; it has no mode "train". "program": loss and gradient of ``app`` of
    ``grid_functions.PROGRAMS``. ``mode`` "train": loss, gradient and SGD update (Adam for an application), in one function.
    """

    kind: str
    mode: str
    dtype: str
    rows: int
    width: int = 0
    depth: int = 1
    activation: str = "none"
    norm: bool = False
    app: str = ""
    named: bool = dataclasses.field(default=False, compare=False)

    @property
    def label(self) -> str:
        """What tells this case from every other: ``mlp 3 x 512 relu norm, 8009 rows, bf16, infer``."""
        what = {
            "mlp": f"mlp {self.depth} x {self.width} {self.activation}{' norm' if self.norm else ''}",
            "pointwise": f"pointwise {self.depth} x {self.activation}, width {self.width}",
            "softmax": f"softmax, width {self.width}",
            "app": self.app,
            "dlrm": "dlrm",
            "reduction": f"{self.app}, width {self.width}",
            "program": f"gradient of a {self.app}",
        }[self.kind]
        return f"{what}, {self.rows} rows, {self.dtype}, {self.mode}"

    def flops(self) -> float:
        """Multiply-adds of the matrix products, twice; of an elementwise operator 10. A gradient costs twice its forward pass."""
        elements = self.rows * self.width
        forward = {
            "mlp": elements * (2.0 * self.width + 10) * self.depth,
            "pointwise": 10.0 * elements * self.depth,
            "softmax": 20.0 * elements,
            "reduction": 3.0 * elements,
        }.get(self.kind, 0.0)
        return forward * (3 if self.mode == "train" else 1)

    def memory(self) -> int:
        """Bytes that the bulk-synchronous function has live at once, about: in training every layer's results, otherwise three."""
        size = ITEM_BYTES[self.dtype]
        live = 3 + (2 * self.depth if self.mode == "train" else 0)
        weights = 3 * self.depth * self.width**2 if self.kind == "mlp" else 0
        return size * (live * self.rows * self.width + weights)


def _mlp(depth: int, width: int, activation: str, rows: int, dtype: str, mode: str = "infer") -> GridCase:
    return GridCase("mlp", mode, dtype, rows, width, depth, activation, named=True)


# Cases that users reported as slower than ``jax.jit``, or as left to XLA though they would have won.
NAMED = (
    _mlp(3, 512, "relu", 8_009, "bf16"),
    _mlp(5, 200, "silu", 12_007, "bf16"),
    _mlp(3, 128, "relu", 4_001, "f32"),
    _mlp(6, 72, "silu", 20_011, "f32"),
    _mlp(2, 1024, "relu", 2_003, "bf16", "train"),
    _mlp(8, 256, "gelu", 32_768, "f32"),
    _mlp(8, 256, "relu", 32_768, "f32"),
    GridCase("dlrm", "train", "f32", 12_007, named=True),
)
APPLICATIONS = tuple(GridCase("app", m, d, r, app=a) for a, r in APP_ROWS.items() for m in MODES for d in ("f32", "bf16"))
# Reductions of what is computed of their operands, over leading, middle and all dimensions, of 1 to 64 MB.
_REDUCED = (
    ("mean of squares, leading", "f32", 1024, 256),
    ("mean of squares, leading", "bf16", 131_101, 256),
    ("variance, leading", "f32", 65_537, 256),
    ("variance, leading", "bf16", 16_411, 256),
    ("sum of absolute values, middle", "f32", 8_192, 256),
    ("mean of squares, middle", "bf16", 32_768, 256),
    ("squared difference, all", "f32", 32_771, 256),
    ("squared difference, all", "bf16", 16_411, 256),
    ("sum of absolute values, all", "f32", 2_053, 512),
    ("mean of squares, all", "bf16", 65_537, 512),
    ("squared difference of neighbours", "f32", 65_536, 256),
    ("squared difference of neighbours", "bf16", 65_536, 256),
)
REDUCTIONS = tuple(GridCase("reduction", "infer", dtype, rows, width, app=name) for name, dtype, rows, width in _REDUCED)
# Gradients of which a pipeline gets a small part only, or calls inside of loops that XLA runs: planned by the model alone they took
# 0.84 to 0.88 of ``jax.jit``'s speed. And of a table that is also the last layer, whose sums are larger than all caches: 0.92.
_GRADIENTS = (
    ("hash-grid field", "f32", 8_192),
    ("Gaussian process", "f32", 1_024),
    ("differential equation", "f32", 1_024),
    ("language model", "f32", 512),
    ("language model", "bf16", 512),
)
PROGRAMS = tuple(GridCase("program", "train", dtype, rows, app=name) for name, dtype, rows in _GRADIENTS)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one call of one case may take at most."""

    flops: float = 40e9
    memory: int = 1 << 30

    def admit(self, case: GridCase) -> bool:
        return case.flops() <= self.flops and case.memory() <= self.memory


@dataclasses.dataclass(frozen=True)
class Sample:
    """``too_large``: how many drawn cases were beyond the limits, and are not among ``cases``."""

    cases: tuple[GridCase, ...]
    too_large: int


class _Deck:
    """Deals ``levels`` in a random order, all of them before one comes again."""

    def __init__(self, levels: Sequence[Any], rng: random.Random):
        self.levels, self.rng, self.left = list(levels), rng, list[Any]()

    def deal(self) -> Any:
        if not self.left:
            self.left = self.rng.sample(self.levels, len(self.levels))
        return self.left.pop()


# Of ten drawn cases eight are MLPs.
_KIND_LEVELS = ("mlp",) * 8 + ("softmax", "pointwise")


def draw(count: int, seed: int, limits: Limits | None = None) -> Sample:
    """``count`` different cases: named ones first, then applications, reductions and programs, then drawn ones; fewer where the
    limits admit no more."""
    limits = limits or Limits()
    rng = random.Random(seed)
    decks = {
        name: _Deck(levels, rng)
        for name, levels in {
            "kind": _KIND_LEVELS,
            "mode": MODES,
            "dtype": DTYPES,
            "width": WIDTHS,
            "depth": DEPTHS,
            "rows": ROWS,
            "activation": ACTIVATIONS,
            "norm": (False, False, True),
        }.items()
    }
    cases = dict.fromkeys((*NAMED, *APPLICATIONS, *REDUCTIONS, *PROGRAMS))
    too_large = 0
    for _ in range(50 * count):
        if len(cases) >= count:
            break
        case = _sensible(GridCase(**{name: deck.deal() for name, deck in decks.items()}))
        if limits.admit(case):
            cases.setdefault(case)
        else:
            too_large += 1
    return Sample(tuple(cases)[:count], too_large)


def _sensible(case: GridCase) -> GridCase:
    """``case`` without the factors that its kind does not have."""
    if case.kind == "softmax":
        return dataclasses.replace(case, depth=1, activation="none", norm=False)
    if case.kind == "pointwise":
        return dataclasses.replace(case, norm=False)
    return dataclasses.replace(case, norm=case.norm and case.depth > 1)
