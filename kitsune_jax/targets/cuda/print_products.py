"""Products for each row as C++.

Comes in: nodes of ``product_ir.py``. Goes out: lines. Nothing is decided here.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda import product_ir as pr
from kitsune_jax.targets.cuda.device_ir import Node
from kitsune_jax.targets.cuda.print_loops import Spelling, name


def lines(at: Spelling, node: Node) -> list[str]:
    match node:
        case pr.RowMemory(addresses, offset, work, size):
            found = [f"u8* const row_work = scratch + {work} + thread_id() % kGroupThreads / 32 * {size // 4};"]
            if addresses:
                type_ = f"RowAddresses<{addresses}>"
                found.append(f"const {type_} row_addresses = {type_}::at(scratch + {offset});")
                found.append(f"static_assert({type_}::kBytes == {pr.address_bytes(addresses)});")
            return found
        case pr.KeepAddress(ref, number, stored):
            rows = [f"{f'!valid[{h}] ? nullptr : ' if stored else ''}{name(ref)}_row[{h}]" for h in range(2)]
            return [f"row_addresses.keep(lane, {number}, {', '.join(rows)});"]
        case pr.RowProduct():
            return _product(at, node)
    return []


def _product(at: Spelling, node: pr.RowProduct) -> list[str]:
    x, y = node.x, node.others
    flags = ", ".join(str(flag).lower() for flag in (x.across, y.across, node.y is None))
    type_ = f"RowProduct<{pointwise.OPERAND[node.dtype]}, {x.free}, {y.free}, {node.k}, {flags}, {node.slots}>"
    columns = "const AllColumns columns;"
    if node.picks is not None:
        assert node.fill is not None
        columns = f"const PickedColumns columns{{{at.address(node.picks)}, {at.expression(node.fill)}}};"
    element = pointwise.ELEMENT[node.out]
    match node.to:
        case pr.ToRows(number, pairs):
            where = f"row_addresses.get(row, {number})"
            put = f"store_product<{element}, {node.columns}, {str(pairs).lower()}>({where}, "
        case to:
            put = f"put_row<{element}, {tiles.padded(node.columns)}, {node.columns}>({name(to)}, row, "
    return [
        "{",
        f"  using Rows = {type_};",
        f"  static_assert(Rows::kBytes == {node.bytes});",
        f"  {columns}",
        "  Rows{row_work}.rows(",
        "      [&](int row, const Rows::X& x, const Rows::Y& y) {",
        "        (void)row, (void)y;",
        *(f"        {line}" for line in _copies("x", x)),
        *(f"        {line}" for line in (_copies("y", node.y) if node.y is not None else [])),
        "      },",
        f"      [&](int row, const u32* sums) {{ {put}[&](int c) {{ return columns.get(sums, c); }}); }});",
        "}",
    ]


def _copies(operand: str, x: pr.RowOperand) -> list[str]:
    found = []
    for how, source, pieces, first, count in ((c.how, c.source, c.pieces, c.first, c.count) for c in x.copied):
        if how == "scratch":
            found.append(f"{operand}.copy_scratch<{first}, {count}>(rows.base + row * rows.pitch + {source});")
            continue
        where = f"[&](int piece) {{ return row_addresses.get(row, {source} + piece); }}"
        if how == "async":
            found.append(f"{operand}.copy_async<{first}, {count}, {pieces}>({where});")
        else:
            found.append(f"{operand}.copy<{first}, {count}, {pieces}, {str(how == 'staged').lower()}>({where});")
    return found
