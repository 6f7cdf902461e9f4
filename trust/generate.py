"""Random programs as a function of a seed and a number, so that a program can be drawn again anywhere."""

from __future__ import annotations

import dataclasses
import random

from trust.build import FORWARD_ONLY, OPERATORS
from trust.program import Op, Program
from trust.transforms import REVERSE, TRANSFORMS

DTYPES = {"float32": 9, "bfloat16": 4, "float16": 4, "float64": 2}
ROWS = (0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 37, 64, 97, 128, 200)
MANY_ROWS = (257, 600, 1025, 2051)  # several tiles, the last of them not full
FEATURES = (*range(1, 18), 24, 31, 32, 33)
WEIGHTS = {
    "unary": 5,
    "binary": 5,
    "compensated": 4,
    "dense": 6,
    "odd_product": 4,
    "columns": 5,
    "select": 3,
    "norm": 3,
    "inner": 2,
    "sorted": 1,
    "pair": 2,
    "table": 3,
    "segment": 3,
    "message": 3,
    "interaction": 2,
}
LOOPS = {"none": 22, "scan": 4, "fori": 2, "fori_traced": 2, "while": 4, "while_of_scan": 1, "nested": 1, "map": 1, "branch": 2}
LIKELY = {"none": 8, "grad": 5, "value_and_grad": 4, "train": 5, "vmap": 3, "jvp": 3}


def _weighted(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _lead(rng: random.Random) -> tuple[int, ...]:
    kind = rng.random()
    if kind < 0.06:
        return (rng.choice(MANY_ROWS),)
    if kind < 0.72:
        return (rng.choice(ROWS),)
    if kind < 0.95:
        return (rng.choice((1, 2, 3, 5)), rng.choice((1, 2, 7, 16, 19)))
    return (rng.choice((1, 2)), rng.choice((2, 3)), rng.choice((1, 4, 5)))


def draw(seed: int, number: int) -> Program:
    """Program ``number`` of ``seed``."""
    rng = random.Random(f"{seed}:{number}")
    dtype = _weighted(rng, DTYPES)
    loop = _weighted(rng, LOOPS)
    lead = _lead(rng)
    weights = {name: LIKELY.get(name, 1) for name in TRANSFORMS if loop not in FORWARD_ONLY or name not in REVERSE}
    transform = _weighted(rng, weights)
    # XLA simplifies short loop bodies most, so they have few operators, often one.
    most = rng.choice((1, 2, 4, 6, 9)) if loop == "none" else rng.choice((1, 1, 2, 4))
    likely = {name: WEIGHTS.get(name, 2) * (8 if loop != "none" and name in ("pair", "binary") else 1) for name in OPERATORS}
    ops = tuple(
        Op(_weighted(rng, likely), rng.choice((0, 0, 0, 1, 2, 5)), rng.randrange(4), rng.randrange(1 << 20))
        for _ in range(rng.randint(1, most))
    )
    if dtype in ("bfloat16", "float16") and rng.random() < 0.2:  # a chain whose every bit is determined
        ops = tuple(dataclasses.replace(op, name="compensated") for op in ops)
    several = loop != "none" and rng.random() < 0.6
    outputs = tuple(rng.choice((0, 0, 1, 2, 3)) for _ in range(rng.choice((1, 1, 2, 3))))
    if several and rng.random() < 0.7:
        outputs = tuple(range(rng.randint(1, 5)))
    return Program(
        dtype=dtype,
        lead=lead,
        features=rng.choice(FEATURES if lead[0] <= 200 else FEATURES[:9]),
        ops=ops,
        inputs=rng.randint(2, 5) if several else rng.choice((1, 1, 2, 2, 3)),
        outputs=outputs,
        constants=tuple(sorted(rng.sample(range(6), rng.choice((0, 0, 0, 1, 2))))),
        spare=rng.random() < 0.1,
        magnitude=rng.choice((1.0,) * 12 + (1e-3, 10.0, 2.0**-18)) if dtype != "bfloat16" else 1.0,
        loop=loop,
        loop_choice=rng.randrange(1 << 20),
        transform=transform,
        transform_choice=rng.randrange(1 << 24),
        pipelined=rng.choice(("body", "loop", "whole", "whole", "all")),
        force=rng.random() < 0.8,
        residuals="recompute" if rng.random() < 0.15 else "save",
        seed=rng.randrange(1 << 16),
    )
