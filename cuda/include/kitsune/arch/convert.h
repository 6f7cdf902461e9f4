// Conversions between number formats, bit casts and the fast elementary functions.
//
// Comes in and goes out: values in registers. Invariant: to_bf16, to_f16 and the packs round to nearest even and keep Inf and NaN;
// of a pair of 16-bit values the lower half is the first. Nothing here is volatile: the compiler may move and merge.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

KITSUNE_DEVICE u32 bits(float v) { return __float_as_uint(v); }
KITSUNE_DEVICE float from_bits(u32 v) { return __uint_as_float(v); }
KITSUNE_DEVICE u32 popc(u32 v) { return static_cast<u32>(__popc(v)); }
KITSUNE_DEVICE u32 clz(u32 v) { return static_cast<u32>(__clz(v)); }

// Both halves of a product of two words, by one multiplication: of two expressions the compiler makes two.
struct Halves {
  u32 low, high;
};
KITSUNE_DEVICE Halves product_halves(u32 x, u32 y) {
  Halves r;
  asm("{\n  .reg .b64 p;\n  mul.wide.u32 p, %2, %3;\n  mov.b64 {%0, %1}, p;\n}" : "=r"(r.low), "=r"(r.high) : "r"(x), "r"(y));
  return r;
}

// The first source operand of a packing cvt is the upper half ("PTX ISA, cvt").
KITSUNE_DEVICE u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
KITSUNE_DEVICE u32 pack_f16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
KITSUNE_DEVICE u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
KITSUNE_DEVICE u16 to_f16(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

// bfloat16 is the upper half of a float, so widening is a shift (cvt.f32.bf16 needs sm_90).
KITSUNE_DEVICE float from_bf16(u16 v) { return from_bits(static_cast<u32>(v) << 16); }
KITSUNE_DEVICE float bf16_lo(u32 v) { return from_bits(v << 16); }
KITSUNE_DEVICE float bf16_hi(u32 v) { return from_bits(v & 0xffff0000u); }
KITSUNE_DEVICE float from_f16(u16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}
KITSUNE_DEVICE float f16_lo(u32 v) { return from_f16(static_cast<u16>(v)); }
KITSUNE_DEVICE float f16_hi(u32 v) { return from_f16(static_cast<u16>(v >> 16)); }

// To nearest, ties away from zero: the only rounding that sm_80 has.
KITSUNE_DEVICE u32 to_tf32(float v) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
  return r;
}

// Approximations by the special function unit (MUFU). ex2 and rcp flush subnormals and err by 1 or 2 units in the last place; tanh
// errs by up to 2^-11, relative: enough for 16-bit results only. rsqrt keeps subnormals, at the cost of two multiplications.
KITSUNE_DEVICE float fast_exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
KITSUNE_DEVICE float fast_rcp(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
KITSUNE_DEVICE float fast_tanh(float v) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
KITSUNE_DEVICE float fast_rsqrt(float v) {
  float r;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// Rounded by themselves: the compiler makes one operation of a plain multiplication and an addition that reads it, in one place and
// perhaps not in another, and ptxas does so across empty asm statements as well.
KITSUNE_DEVICE float add_rounded(float x, float y) { return __fadd_rn(x, y); }
KITSUNE_DEVICE float mul_rounded(float x, float y) { return __fmul_rn(x, y); }

// NaN if either is NaN; fmaxf and fminf would drop it.
KITSUNE_DEVICE float max_nan(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
KITSUNE_DEVICE float min_nan(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

}  // namespace kitsune::arch
