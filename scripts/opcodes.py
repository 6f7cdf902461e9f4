"""Writes cpu/include/kitsune_cpu/opcodes.h: the micro-operations of a CPU program, as the op table's entries name them.

Run it after an entry's ``opcodes`` changed (a test compares the file with what this would write), then build the extension::

    python -m scripts.opcodes
"""

from __future__ import annotations

from pathlib import Path

from kitsune_jax.ops.table import OPS
from kitsune_jax.targets.cpu.bytecode import OPCODES

HEADER = Path(__file__).parents[1] / "cpu/include/kitsune_cpu/opcodes.h"

_TEXT = """\
// Micro-operations of a Vector program. Written by scripts/opcodes.py from the entries of kitsune_jax/ops/: change those.
// kitsune_jax/targets/cpu/bytecode.py says what each one means.
#pragma once

#include <cstdint>

// X(name, registers that it reads, whether its result is bool). Of load, store and the like it is not the registers.
// clang-format off: it takes the list for one expression
#define KITSUNE_OPCODES(X) \\
{lines}
// clang-format on

namespace kitsune::cpu {{

enum class Opcode : int16_t {{
#define KITSUNE_OPCODE(name, operands, gives_bool) op_##name,
  KITSUNE_OPCODES(KITSUNE_OPCODE)
#undef KITSUNE_OPCODE
      kCount
}};

constexpr int operands_of(Opcode op) {{
#define KITSUNE_OPCODE(name, operands, gives_bool) operands,
  constexpr int8_t kOperands[] = {{KITSUNE_OPCODES(KITSUNE_OPCODE)}};
#undef KITSUNE_OPCODE
  return kOperands[static_cast<int>(op)];
}}

constexpr bool gives_bool(Opcode op) {{
#define KITSUNE_OPCODE(name, operands, gives_bool) gives_bool,
  constexpr bool kGivesBool[] = {{KITSUNE_OPCODES(KITSUNE_OPCODE)}};
#undef KITSUNE_OPCODE
  return kGivesBool[static_cast<int>(op)];
}}

}}  // namespace kitsune::cpu
"""


def header() -> str:
    """The text of the header."""
    entries = {name: spec for spec in OPS.values() for name in spec.opcodes}
    lines = []
    for name in OPCODES:
        spec = entries.get(name)
        operands, gives_bool = (spec.arity, spec.gives == "bool") if spec else (0, False)
        lines.append(f"  X({name}, {operands}, {str(gives_bool).lower()})")
    return _TEXT.format(lines=" \\\n".join(lines))


if __name__ == "__main__":
    HEADER.write_text(header())
