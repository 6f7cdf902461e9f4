// Micro-operations of a Vector program: X(name). Same names, same order as OPCODES in kitsune_jax/targets/cpu/bytecode.py, which
// also says what each one means (a test compares the two lists).
#pragma once

#include <cstdint>

// clang-format off: it takes the list for one expression
#define KITSUNE_OPCODES(X) \
  X(load) X(store) X(const) X(convert) X(index) X(neg) \
  X(sign) X(abs) X(floor) X(ceil) X(round_away) X(round_even) \
  X(is_finite) X(not) X(popcnt) X(clz) X(square) X(exp) \
  X(exp2) X(expm1) X(log) X(log1p) X(sqrt) X(rsqrt) \
  X(cbrt) X(logistic) X(tanh) X(sin) X(cos) X(tan) \
  X(asin) X(acos) X(atan) X(sinh) X(cosh) X(asinh) \
  X(acosh) X(atanh) X(erf) X(erfc) X(erf_inv) X(lgamma) \
  X(digamma) X(bessel_i0e) X(bessel_i1e) X(integer_pow) X(reduce_precision) X(to_float16) \
  X(add) X(sub) X(mul) X(div) X(rem) X(max) X(min) \
  X(pow) X(atan2) X(nextafter) X(and) X(or) X(xor) \
  X(shift_left) X(shift_right_logical) X(shift_right_arithmetic) X(eq) X(ne) X(lt) \
  X(le) X(gt) X(ge) X(igamma) X(igammac) X(zeta) \
  X(polygamma) X(select) X(clamp) X(regularized_incomplete_beta)
// clang-format on

namespace kitsune::cpu {

enum class Opcode : int16_t {
#define KITSUNE_OPCODE(name) op_##name,
  KITSUNE_OPCODES(KITSUNE_OPCODE)
#undef KITSUNE_OPCODE
      kCount
};

}  // namespace kitsune::cpu
