"""The types of the tile program's own instructions, which are no ops of the table.

Comes in: an instruction, the types of its operands, and the program around it. Goes out: the types of its results, or ``Wrong``,
whose message says which rule is broken. ``RULES`` has the rule of each kind of instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kitsune_jax.program.ir import FOLDED, Instr, SinkType, TileProgram, TileType

_INTEGERS = ("int", "uint")
Types = Sequence[TileType]
ACTIVATIONS = {  # activation of a product -> how many parameters it has; x is the sum that it is applied to
    "none": 0,  # x
    "relu": 0,  # max(x, 0)
    "leaky_relu": 1,  # x where it is positive, else a x
    "elu": 1,  # x where it is positive, else a (e**x - 1)
    "logistic": 0,
    "tanh": 0,
    "silu": 1,  # x logistic(a x)
    "gelu_tanh": 2,  # x logistic(a x + b x**3)
    "gelu_erf": 1,  # x (1 + erf(a x)) / 2
    "scale": 1,  # a x
}


class Wrong(ValueError):
    """A program breaks a rule; the message says which."""


def describe_types(types: Types) -> str:
    return ", ".join(map(str, types)) or "nothing"


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def _border(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    """A load or store of an array, a pop from or push to a queue."""
    what = "queue" if instr.kind in ("push", "pop") else "array"
    types = [q.tile for q in program.queues]
    if what == "array":
        types = [a.loaded for a in (program.inputs if instr.kind == "load" else program.outputs)]
    need(0 <= instr[what] < len(types), f"there is no {what} {instr[what]}")
    t = types[instr[what]]
    if instr.kind in ("load", "pop"):
        return [t]
    need(list(ins) == [t], f"{what} {instr[what]} takes {t}, not {describe_types(ins)}")
    return []


def _row_index(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(all(0 <= a < len(program.axes) for a in instr["axes"]), f"{instr['axes']} are not stream axes")
    need(len(outs) == 1 and outs[0].tile and not ins, "it makes one tile of nothing")
    return list(outs)


def _operands(ins: Types, *tiles: bool) -> None:
    wanted = " and ".join("a tile" if tile else "a stationary value" for tile in tiles)
    need([t.tile for t in ins] == list(tiles), f"it takes {wanted}, not {describe_types(ins)}")


def _product(x: TileType, y: TileType, instr: Instr, other: str) -> tuple[list[int], list[int], list[int]]:
    """Extents of (batch, free of x, free of y) of a product of x and y over rows-first dimensions."""
    sides = []
    for name, t in (("x", x), (other, y)):
        contract, batch = instr[f"{name}_contract"], instr[f"{name}_batch"]
        used, shape = (*contract, *batch), t.rows_first
        fit = len(set(used)) == len(used) and all(0 <= d < len(shape) for d in used)
        need(fit, f"{name} is {t}: {used} are not different dimensions of it")
        free = [n for d, n in enumerate(shape) if d not in used]
        sides.append(([shape[d] for d in contract], [shape[d] for d in batch], free))
    (contract_x, batch_x, free_x), (contract_y, batch_y, free_y) = sides
    need(contract_x == contract_y, f"x contracts dimensions of extents {contract_x}, {other} of {contract_y}")
    need(batch_x == batch_y, f"x has batch dimensions of extents {batch_x}, {other} of {batch_y}")
    need("accumulate" in dict(instr.params), "it does not say in what it accumulates")
    return batch_x, free_x, free_y


def _matmul(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(len(outs) == 1, "it makes one value")
    _operands(ins[:2], True, False)
    x, w = ins[:2]
    need(0 not in (*instr["x_contract"], *instr["x_batch"]), "it contracts or batches over the rows of a tile")
    batch, free_x, free_w = _product(x, w, instr, "w")
    falls_out, perm = [*batch, *free_x, *free_w], instr["out_perm"]
    need(sorted(perm) == list(range(len(falls_out))), f"{perm} is not an order of {len(falls_out)} dimensions")
    need(perm[0] == len(batch), "the rows are not the first dimension of its result")
    if len(ins) > 2:
        columns = tuple(falls_out[p] for p in perm if p >= len(falls_out) - len(free_w))
        fits = len(ins) == 3 and not ins[2].tile and ins[2].shape == columns
        need(fits, f"the bias is {ins[2]}, and must be a number for each of the columns {list(columns)}")
    name, parameters = instr.get("activation", "none"), instr.get("parameters", ())
    need(len(parameters) == ACTIVATIONS.get(name, -1), f"there is no activation {name} with parameters {parameters}")
    return [TileType(True, tuple(falls_out[p] for p in perm[1:]), outs[0].dtype)]


def _dot(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(len(outs) == 1, "it makes one value")
    _operands(ins, True, True)
    used = [d for name in ("x_contract", "x_batch", "y_contract", "y_batch") for d in instr[name]]
    need(0 not in used, "it contracts or batches over the rows of a tile")
    batch, free_x, free_y = _product(ins[0], ins[1], instr, "y")
    return [TileType(True, (*batch, *free_x[1:], *free_y[1:]), outs[0].dtype)]


def _gather(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _operands(ins, False, True)
    table, index = ins
    need(len(table.shape) > 0, "the table has no rows")
    _check_index(instr, table.shape[0], index)
    return [TileType(True, (*index.shape, *table.shape[1:]), table.dtype)]


def _check_index(instr: Instr, n: int, index: TileType) -> None:
    """Check the index of a ``gather`` or a ``take`` from ``n`` rows."""
    need(index.dtype.startswith(_INTEGERS), f"the index is {index}, and must be of integers")
    mode = instr["mode"]
    need(mode in ("clip", "fill", "promise_in_bounds"), f"there is no mode {mode!r}")
    need(mode == "fill" or n > 0, "a table of no row has no nearest one")
    need(mode != "fill" or instr.get("fill") is not None, "mode is fill, and there is no number to fill with")


def _take(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _operands(ins, True, False)
    x, index = ins
    d = instr["axis"] - 1
    need(0 <= d < len(x.shape), f"dimension {d + 1} of {x} is none that a row has")
    _check_index(instr, x.shape[d], index)
    return [TileType(True, (*x.shape[:d], *index.shape, *x.shape[d + 1 :]), x.dtype)]


def _put(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _operands(ins, True, False)
    x, index = ins
    d, n = instr["axis"] - 1, instr["n"]
    need(index.dtype.startswith(_INTEGERS), f"the index is {index}, and must be of integers")
    end = d + len(index.shape)
    need(
        d >= 0 and n >= 0 and x.shape[d:end] == index.shape, f"from dimension {d + 1} on {x} must have those of the index, {index}"
    )
    return [TileType(True, (*x.shape[:d], n, *x.shape[end:]), x.dtype)]


def _sink(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    """An instruction that folds into a sink: its operands have the sink's shape and kind of dtype."""
    k = instr["sink"]
    need(0 <= k < len(program.sinks), f"there is no sink {k}")
    sink = program.sinks[k]
    tiles = FOLDED.get(instr.kind, 3 if len(ins) > 2 else 2)
    if instr.get("dims") is not None:  # the other operands are numbers of loops
        need(instr.kind in FOLDED, "it folds into all of its sink")
        ins = ins[:tiles]
    _operands(ins, *(True,) * tiles)
    need(instr.kind in FOLDED or not program.outputs[sink.array].row_strides, f"sink {k} is one for each batch")
    shape, wanted = _SHAPES[instr.kind](sink, instr, ins), list(sink.shape)
    for d, size in zip(instr.get("dims", ()), instr.get("sizes", ()), strict=True):
        wanted[d] = size
    need(tuple(wanted) == shape, f"sink {k} has shape {wanted}, not {list(shape)}")
    dtypes = {t.dtype for t in (ins if instr.kind == "matmul_sink" else ins[:1])}
    widened = instr.kind == "matmul_sink" and all(d.startswith(_INTEGERS) for d in dtypes)
    alike = widened or all(d == sink.dtype or ("float" in d and "float" in sink.dtype) for d in dtypes)
    need(alike, f"sink {k} accumulates {sink.dtype}, not {', '.join(sorted(dtypes))}")
    return []


def _reduced(sink: SinkType, instr: Instr, ins: Types) -> tuple[int, ...]:
    axes, (x,) = instr["axes"], ins
    need(
        0 in axes and all(0 <= a <= len(x.shape) for a in axes), f"it reduces dimensions {axes} of {x}: the rows must be among them"
    )
    return tuple(n for d, n in enumerate(x.shape, 1) if d not in axes)


def _multiplied(sink: SinkType, instr: Instr, ins: Types) -> tuple[int, ...]:
    rows = (0, 0) in zip(instr["x_contract"], instr["y_contract"], strict=True)
    need(rows, "it does not contract the rows of both tiles")
    need(sink.how == "sum", "products are added up, and its sink folds otherwise")
    batch, free_x, free_y = _product(ins[0], ins[1], instr, "y")
    return (*batch, *free_x, *free_y)


def _indexed(sink: SinkType, instr: Instr, ins: Types) -> tuple[int, ...]:
    x, index, *tops = ins
    rank = len(index.shape)
    need(index.dtype.startswith(_INTEGERS), f"the index is {index}, and must be of integers")
    for t in tops:
        need(sink.how == "sum" and sink.dtype == "float32", f"a scaled sink folds a {sink.how} of {sink.dtype}")
        need(instr["sorted"] is True and not index.shape, "a scaled sink takes sorted indices, one for each row")
        need(x.shape[: len(t.shape)] == t.shape and "float" in t.dtype, f"the tops are {t}, and the value is {x}")
        need(isinstance(instr["finite"], bool), "it does not say whether its tops count where they are not finite")
    need(x.shape[:rank] == index.shape, f"the value is {x}; it must begin with the dimensions of the index, {index}")
    need(len(sink.shape) > 0, "its sink has no rows")
    need(isinstance(instr["sorted"], bool), "it does not say whether its indices are sorted")
    free = sink.how in ("sum", "max", "min") and not tops
    need(not instr.get("unordered") or free, f"a {sink.how} may not fold its rows in whatever order")
    return (sink.shape[0], *x.shape[rank:])


def _run_max(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _operands(ins, True, True)
    x, index = ins
    need(index.dtype.startswith(_INTEGERS) and not index.shape, f"the index is {index}, and must be one integer for each row")
    need("float" in x.dtype, f"the largest of {x.dtype}")
    need(instr["n"] > 0, "no index has rows")
    return [x]


def _cut(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    x = ins[0]
    need(len(x.shape) > 0, f"{x} has no dimension to cut")
    return [TileType(x.tile, x.shape[1:], x.dtype)]


def _paste(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    x, part = ins[:2]
    (wanted,) = _cut(program, instr, ins, outs)
    need(part == wanted, f"the part is {part}, and must be {wanted}")
    return [x]


def _empty(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(len(outs) == 1 and not ins, "it makes one value of nothing")
    return list(outs)


_SHAPES: Mapping[str, Callable[[SinkType, Instr, Types], tuple[int, ...]]] = {
    "sink": _reduced,
    "matmul_sink": _multiplied,
    "sink_at": _indexed,
}
RULES: Mapping[str, Callable[[TileProgram, Instr, Types, Types], list[TileType]]] = {
    **dict.fromkeys(("load", "store", "push", "pop"), _border),
    "row_index": _row_index,
    "matmul": _matmul,
    "dot": _dot,
    "gather": _gather,
    "take": _take,
    "put": _put,
    "run_max": _run_max,
    "cut": _cut,
    "paste": _paste,
    "empty": _empty,
    **dict.fromkeys(_SHAPES, _sink),
}
