"""Types of the tile program's own instructions (those that are no ops of the table): what each takes, and what it makes of it.

Comes in: an instruction and the types of its operands. Goes out: the types of its results, or ``Wrong``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kitsune_jax.program.ir import Instr, TileProgram, TileType
from kitsune_jax.program.passes import activations

_INTEGERS = ("int", "uint")
Types = Sequence[TileType]


class Wrong(ValueError):
    """A program breaks a rule; says which."""


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def _load(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(0 <= instr["array"] < len(program.inputs), f"there is no input {instr['array']}")
    return [program.inputs[instr["array"]].loaded]


def _store(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(0 <= instr["array"] < len(program.outputs), f"there is no output {instr['array']}")
    want = program.outputs[instr["array"]].loaded
    need(list(ins) == [want], f"output {instr['array']} takes {want}, not {_told(ins)}")
    return []


def _push(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(0 <= instr["queue"] < len(program.queues), f"there is no queue {instr['queue']}")
    want = program.queues[instr["queue"]].tile
    need(list(ins) == [want], f"queue {instr['queue']} takes {want}, not {_told(ins)}")
    return []


def _pop(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(0 <= instr["queue"] < len(program.queues), f"there is no queue {instr['queue']}")
    return [program.queues[instr["queue"]].tile]


def _row_index(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    need(all(0 <= a < len(program.axes) for a in instr["axes"]), f"{instr['axes']} are not stream axes")
    need(len(outs) == 1 and outs[0].tile and not ins, "it makes one tile of nothing")
    return list(outs)


def _operands(ins: Types, *tiles: bool) -> None:
    wanted = " and ".join("a tile" if tile else "a stationary value" for tile in tiles)
    need([t.tile for t in ins] == list(tiles), f"it takes {wanted}, not {_told(ins)}")


def _product(x: TileType, y: TileType, instr: Instr, other: str) -> tuple[list[int], list[int], list[int]]:
    """Extents of (batch, free of x, free of y) of a product over dimensions of x and y, whichever of them are rows-first."""
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
    need(len(parameters) == activations.PARAMETERS.get(name, -1), f"there is no activation {name} with parameters {parameters}")
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
    need(index.dtype.startswith(_INTEGERS), f"the index is {index}, and must be of integers")
    mode = instr["mode"]
    need(mode in ("clip", "fill", "promise_in_bounds"), f"there is no mode {mode!r}")
    need(mode == "fill" or table.shape[0] > 0, "a table of no row has no nearest one")
    need(mode != "fill" or instr.get("fill") is not None, "mode is fill, and there is no number to fill with")
    return [TileType(True, (*index.shape, *table.shape[1:]), table.dtype)]


def _into(program: TileProgram, instr: Instr, shape: tuple[int, ...], dtypes: set[str]) -> list[TileType]:
    k = instr["sink"]
    sink = program.sinks[k]
    need(sink.shape == shape, f"sink {k} has shape {list(sink.shape)}, not {list(shape)}")
    alike = all(d == sink.dtype or ("float" in d and "float" in sink.dtype) for d in dtypes)
    need(alike, f"sink {k} accumulates {sink.dtype}, not {', '.join(sorted(dtypes))}")
    return []


def _sink(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _known_sink(program, instr)
    _operands(ins, True)
    axes, (x,) = instr["axes"], ins
    need(
        0 in axes and all(0 <= a <= len(x.shape) for a in axes), f"it reduces dimensions {axes} of {x}: the rows must be among them"
    )
    return _into(program, instr, tuple(n for d, n in enumerate(x.shape, 1) if d not in axes), {x.dtype})


def _matmul_sink(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _known_sink(program, instr)
    _operands(ins, True, True)
    rows = (0, 0) in zip(instr["x_contract"], instr["y_contract"], strict=True)
    need(rows, "it does not contract the rows of both tiles")
    need(program.sinks[instr["sink"]].how == "sum", "products are added up, and its sink folds otherwise")
    batch, free_x, free_y = _product(ins[0], ins[1], instr, "y")
    integer = {t.dtype for t in ins if t.dtype.startswith(_INTEGERS)}
    return _into(program, instr, (*batch, *free_x, *free_y), set() if integer else {t.dtype for t in ins})


def _sink_at(program: TileProgram, instr: Instr, ins: Types, outs: Types) -> list[TileType]:
    _known_sink(program, instr)
    _operands(ins, True, True)
    x, index = ins
    need(index.dtype.startswith(_INTEGERS), f"the index is {index}, and must be of integers")
    rank = len(index.shape)
    need(x.shape[:rank] == index.shape, f"the value is {x}; it must begin with the dimensions of the index, {index}")
    shape = program.sinks[instr["sink"]].shape
    need(len(shape) > 0, "its sink has no rows")
    return _into(program, instr, (shape[0], *x.shape[rank:]), {x.dtype})


def _known_sink(program: TileProgram, instr: Instr) -> None:
    need(0 <= instr["sink"] < len(program.sinks), f"there is no sink {instr['sink']}")


def _told(types: Types) -> str:
    return ", ".join(map(str, types)) or "nothing"


RULES: Mapping[str, Callable[[TileProgram, Instr, Types, Types], list[TileType]]] = {
    "load": _load,
    "store": _store,
    "push": _push,
    "pop": _pop,
    "row_index": _row_index,
    "matmul": _matmul,
    "dot": _dot,
    "gather": _gather,
    "sink": _sink,
    "matmul_sink": _matmul_sink,
    "sink_at": _sink_at,
}
