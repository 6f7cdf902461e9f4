// Micro-operations of a Vector program. Written by scripts/opcodes.py from the entries of kitsune_jax/ops/: change those.
// kitsune_jax/targets/cpu/bytecode.py says what each one means.
#pragma once

#include <cstdint>

// X(name, registers that it reads, whether its result is bool). Of load, store and the like it is not the registers.
// clang-format off: it takes the list for one expression
#define KITSUNE_OPCODES(X) \
  X(load, 0, false) \
  X(store, 0, false) \
  X(const, 0, false) \
  X(convert, 0, false) \
  X(index, 0, false) \
  X(neg, 1, false) \
  X(sign, 1, false) \
  X(abs, 1, false) \
  X(floor, 1, false) \
  X(ceil, 1, false) \
  X(round_away, 1, false) \
  X(round_even, 1, false) \
  X(is_finite, 1, true) \
  X(not, 1, false) \
  X(popcnt, 1, false) \
  X(clz, 1, false) \
  X(square, 1, false) \
  X(exp, 1, false) \
  X(exp2, 1, false) \
  X(expm1, 1, false) \
  X(log, 1, false) \
  X(log1p, 1, false) \
  X(sqrt, 1, false) \
  X(rsqrt, 1, false) \
  X(cbrt, 1, false) \
  X(logistic, 1, false) \
  X(tanh, 1, false) \
  X(sin, 1, false) \
  X(cos, 1, false) \
  X(tan, 1, false) \
  X(asin, 1, false) \
  X(acos, 1, false) \
  X(atan, 1, false) \
  X(sinh, 1, false) \
  X(cosh, 1, false) \
  X(asinh, 1, false) \
  X(acosh, 1, false) \
  X(atanh, 1, false) \
  X(erf, 1, false) \
  X(erfc, 1, false) \
  X(erf_inv, 1, false) \
  X(lgamma, 1, false) \
  X(digamma, 1, false) \
  X(bessel_i0e, 1, false) \
  X(bessel_i1e, 1, false) \
  X(integer_pow, 1, false) \
  X(reduce_precision, 1, false) \
  X(to_float16, 1, false) \
  X(to_bfloat16, 1, false) \
  X(bitcast, 1, false) \
  X(add, 2, false) \
  X(sub, 2, false) \
  X(mul, 2, false) \
  X(div, 2, false) \
  X(rem, 2, false) \
  X(max, 2, false) \
  X(min, 2, false) \
  X(pow, 2, false) \
  X(atan2, 2, false) \
  X(nextafter, 2, false) \
  X(and, 2, false) \
  X(or, 2, false) \
  X(xor, 2, false) \
  X(shift_left, 2, false) \
  X(shift_right_logical, 2, false) \
  X(shift_right_arithmetic, 2, false) \
  X(mulhi, 2, false) \
  X(eq, 2, true) \
  X(ne, 2, true) \
  X(lt, 2, true) \
  X(le, 2, true) \
  X(gt, 2, true) \
  X(ge, 2, true) \
  X(eq_to, 2, true) \
  X(lt_to, 2, true) \
  X(le_to, 2, true) \
  X(igamma, 2, false) \
  X(igammac, 2, false) \
  X(zeta, 2, false) \
  X(polygamma, 2, false) \
  X(select, 3, false) \
  X(clamp, 3, false) \
  X(regularized_incomplete_beta, 3, false) \
  X(threefry_first, 4, false) \
  X(threefry_second, 4, false) \
  X(threefry_xor, 4, false)
// clang-format on

namespace kitsune::cpu {

enum class Opcode : int16_t {
#define KITSUNE_OPCODE(name, operands, gives_bool) op_##name,
  KITSUNE_OPCODES(KITSUNE_OPCODE)
#undef KITSUNE_OPCODE
      kCount
};

constexpr int operands_of(Opcode op) {
#define KITSUNE_OPCODE(name, operands, gives_bool) operands,
  constexpr int8_t kOperands[] = {KITSUNE_OPCODES(KITSUNE_OPCODE)};
#undef KITSUNE_OPCODE
  return kOperands[static_cast<int>(op)];
}

constexpr bool gives_bool(Opcode op) {
#define KITSUNE_OPCODE(name, operands, gives_bool) gives_bool,
  constexpr bool kGivesBool[] = {KITSUNE_OPCODES(KITSUNE_OPCODE)};
#undef KITSUNE_OPCODE
  return kGivesBool[static_cast<int>(op)];
}

}  // namespace kitsune::cpu
