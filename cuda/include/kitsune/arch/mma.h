// Warp-wide matmuls and their shared-memory operands, sm_80 and later: mma.sync, ldmatrix, stmatrix.
//
// Comes in: fragments in registers, all 32 lanes together. With g = lane / 4 and t = lane % 4, of m16n8k16 a lane holds
//   a[0], a[2]: A[g][2t, 2t+1], A[g][2t+8, 2t+9];   a[1], a[3]: the same of row g + 8;   b[0], b[1]: B[2t, 2t+1][g], B[2t+8,
//   2t+9][g] c[0], c[1]: C[g][2t, 2t+1];   c[2], c[3]: the same of row g + 8
// and of m16n8k8 (Tf32): a[0], a[2]: A[g][t], A[g][t+4];   a[1], a[3]: the same of row g + 8;   b[0], b[1]: B[t][g], B[t+4][g]
// ("PTX ISA, Matrix Fragments for mma.m16n8k16 / .m16n8k8"). Goes out: c += A * B, accumulated in float.
// Invariant: operands of Tf32 are rounded already (to_tf32); the hardware ignores the lower 13 bits.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

namespace detail {

#define KITSUNE_DEFINE_MMA(Type, shape, type)                                           \
  KITSUNE_DEVICE void mma(Type, float (&c)[4], const u32(&a)[4], const u32(&b)[2]) {    \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
KITSUNE_DEFINE_MMA(Bf16, "m16n8k16", "bf16")
KITSUNE_DEFINE_MMA(F16, "m16n8k16", "f16")
KITSUNE_DEFINE_MMA(Tf32, "m16n8k8", "tf32")
#undef KITSUNE_DEFINE_MMA

}  // namespace detail

template <class T>
KITSUNE_DEVICE void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  detail::mma(T{}, c, a, b);
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i to 8i+7 give the addresses of the rows of matrix i, 16-byte aligned; lane l gets
// elements 2(l%4) and 2(l%4)+1 of row l/4 of each (_trans: of column l/4).
KITSUNE_DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
KITSUNE_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

#if KITSUNE_SM == 900
KITSUNE_DEVICE void stmatrix_x4(void* row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

}  // namespace kitsune::arch
