"""Writes cuda/include/kitsune/arch/wgmma_instances.h: one specialisation of wgmma_rs and wgmma_ss for each shape that kernels use.

Comes in: the tables below. Goes out: the header, on standard output or (--write) in its place. Invariant: the header is exactly
what this script prints; a test compares them. An asm statement has no arrays, so the N / 2 accumulators must be written out one by
one: that is the whole reason for a generator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HEADER = Path(__file__).resolve().parent.parent / "cuda" / "include" / "kitsune" / "arch" / "wgmma_instances.h"

# Any multiple of 8 up to 256 is legal (PTX ISA, "Matrix Shape" of wgmma). Every instance costs compile time in every kernel.
N_16BIT = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
N_TRANSPOSED = (64, 96, 128, 192, 256)  # every orientation of both operands
N_TF32 = (8, 16, 32, 64, 96, 128, 256)  # K-major only: the hardware transposes 16-bit types alone

PROLOGUE = """\
// The instances of wgmma_rs and wgmma_ss. Written by scripts/gen_wgmma.py: change that, then run it with --write.
//
// Comes in: the primary templates of wgmma.h. Goes out: their specialisations. Invariant: operands 0 to N/2-1 of each asm are the
// accumulators; A, B and the predicate follow. The immediates after the predicate are scale-a, scale-b (1: no negation) and, for
// 16-bit types, trans-a (unless A is in registers) and trans-b (1: MN-major).
// clang-format off
#pragma once

namespace kitsune::arch {

#define KITSUNE_WGMMA(N, k_type, a, b, p, trans)                                       \\
  "{\\n.reg .pred accumulate;\\nsetp.ne.b32 accumulate, " p ", 0;\\n"                     \\
  "wgmma.mma_async.sync.aligned.m64n" #N k_type " " KITSUNE_WGMMA_D##N ", " a ", " b   \\
  ", accumulate, 1, 1" trans ";\\n}"
#define KITSUNE_WGMMA_RS(T, N, k_type, a_regs, b, p, trans)                                                             \\
  template <>                                                                                                           \\
  KITSUNE_DEVICE void wgmma_rs<T, N>(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {               \\
    asm volatile(KITSUNE_WGMMA(N, k_type, a_regs, b, p, trans)                                                          \\
                 : KITSUNE_WGMMA_OUT##N                                                                                 \\
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(static_cast<u32>(accumulate)));         \\
  }
#define KITSUNE_WGMMA_SS(T, N, TransA, TransB, k_type, a, b, p, trans)                                                  \\
  template <>                                                                                                           \\
  KITSUNE_DEVICE void wgmma_ss<T, N, TransA, TransB>(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {      \\
    asm volatile(KITSUNE_WGMMA(N, k_type, a, b, p, trans)                                                               \\
                 : KITSUNE_WGMMA_OUT##N                                                                                 \\
                 : "l"(desc_a), "l"(desc_b), "r"(static_cast<u32>(accumulate)));                                        \\
  }
"""

EPILOGUE = """
#undef KITSUNE_WGMMA
#undef KITSUNE_WGMMA_RS
#undef KITSUNE_WGMMA_SS

}  // namespace kitsune::arch
"""


def rs(tag: str, n: int, k_type: str, trans: str) -> str:
    at = n // 2
    a = ", ".join(f"%{at + i}" for i in range(4))
    return f'KITSUNE_WGMMA_RS({tag}, {n}, "{k_type}", "{{{a}}}", "%{at + 4}", "%{at + 5}", "{trans}")'


def ss(tag: str, n: int, trans_a: bool, trans_b: bool, k_type: str, trans: str) -> str:
    at = n // 2
    flags = f"{str(trans_a).lower()}, {str(trans_b).lower()}"
    return f'KITSUNE_WGMMA_SS({tag}, {n}, {flags}, "{k_type}", "%{at}", "%{at + 1}", "%{at + 2}", "{trans}")'


def shape(n: int) -> Iterator[str]:
    """The lines of one N: its accumulator operands, written once, and the instances that share them."""
    yield ""
    yield f'#define KITSUNE_WGMMA_D{n} "{{{", ".join(f"%{i}" for i in range(n // 2))}}}"'
    yield f"#define KITSUNE_WGMMA_OUT{n} " + ", ".join(f'"+f"(d[{i}])' for i in range(n // 2))
    if n in N_16BIT:
        for tag, k_type in (("Bf16", "k16.f32.bf16.bf16"), ("F16", "k16.f32.f16.f16")):
            yield rs(tag, n, k_type, ", 0")
            for trans_a, trans_b in ((0, 0), (0, 1), (1, 0), (1, 1)) if n in N_TRANSPOSED else ((0, 0),):
                yield ss(tag, n, bool(trans_a), bool(trans_b), k_type, f", {trans_a}, {trans_b}")
    if n in N_TF32:
        yield rs("Tf32", n, "k8.f32.tf32.tf32", "")
        yield ss("Tf32", n, False, False, "k8.f32.tf32.tf32", "")
    yield f"#undef KITSUNE_WGMMA_D{n}"
    yield f"#undef KITSUNE_WGMMA_OUT{n}"


def generate() -> str:
    sizes = sorted({*N_16BIT, *N_TRANSPOSED, *N_TF32})
    return PROLOGUE + "\n".join(line for n in sizes for line in shape(n)) + "\n" + EPILOGUE


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(generate(), encoding="utf-8")
    else:
        sys.stdout.write(generate())
