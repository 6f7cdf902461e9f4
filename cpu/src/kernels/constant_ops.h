// Operations on dense arrays of which some operands are one number each: a constant table would take the place of other values in
// the first-level cache.
#pragma once

#include "vector_ops.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Side 0: a is the number; 1: b is.
template <class Op, class T, int Side>
KITSUNE_ONCE void map_binary_with(int64_t n, void* dst, const void* a, const void* b, const void*, const void*, const double*) {
  auto* d = static_cast<decltype(Op::apply(T{}, T{}))*>(dst);
  const T* x = static_cast<const T*>(Side == 0 ? b : a);
  const T one = *static_cast<const T*>(Side == 0 ? a : b);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = Side == 0 ? Op::apply(one, x[i]) : Op::apply(x[i], one);
}

// What is selected where the predicate is false, or true, is one number.
template <class T, bool False, bool True>
void map_select_with(int64_t n, void* dst, const void* a, const void* b, const void* c, const void*, const double*) {
  T* d = static_cast<T*>(dst);
  const uint8_t* predicate = static_cast<const uint8_t*>(a);
  const T *on_false = static_cast<const T*>(b), *on_true = static_cast<const T*>(c);
  const T one_false = on_false[0], one_true = on_true[0];
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    T no = False ? one_false : on_false[i], yes = True ? one_true : on_true[i];
    d[i] = predicate[i] ? yes : no;
  }
}

template <class T>
void map_clamp_with(int64_t n, void* dst, const void* a, const void* b, const void* c, const void*, const double*) {
  T* d = static_cast<T*>(dst);
  const T* x = static_cast<const T*>(b);
  const T low = *static_cast<const T*>(a), high = *static_cast<const T*>(c);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = Clamp::apply(low, x[i], high);
}

template <class Op, class T>
VectorFn binary_with(unsigned constants) {
  return constants == 1 ? &map_binary_with<Op, T, 0> : constants == 2 ? &map_binary_with<Op, T, 1> : nullptr;
}

template <class Op, class T, int Side>
void map_swapped_with(int64_t n, void* dst, const void* a, const void* b, const void* c, const void* d, const double* imm) {
  map_binary_with<Op, T, 1 - Side>(n, dst, b, a, c, d, imm);
}

template <class Op, class T>
VectorFn swapped_with(unsigned constants) {
  return constants == 1 ? &map_swapped_with<Op, T, 0> : constants == 2 ? &map_swapped_with<Op, T, 1> : nullptr;
}

template <class T>
VectorFn constant_function_of(Opcode op, unsigned constants) {
  using U = UnsignedOf<T>;  // of what does the same to the bits of both signs
  using Raw = typename BitsOfSize<sizeof(T)>::type;
  switch (op) {
    case Opcode::op_add: return binary_with<Add, U>(constants);
    case Opcode::op_sub: return binary_with<Sub, U>(constants);
    case Opcode::op_mul: return binary_with<Mul, U>(constants);
    case Opcode::op_div:
      if constexpr (kSame<T, int32_t> || kSame<T, uint32_t>)
        return constants == 2 ? &map_divided<kSigned<T>, false, true> : nullptr;
      else
        return binary_with<Div, T>(constants);
    case Opcode::op_rem:
      if constexpr (kSame<T, int32_t> || kSame<T, uint32_t>)
        return constants == 2 ? &map_divided<kSigned<T>, true, true> : nullptr;
      else
        return nullptr;
    case Opcode::op_max: return binary_with<Max, T>(constants);
    case Opcode::op_min: return binary_with<Min, T>(constants);
    case Opcode::op_eq: return binary_with<Eq, U>(constants);
    case Opcode::op_ne: return binary_with<Ne, U>(constants);
    case Opcode::op_lt: return binary_with<Lt, T>(constants);
    case Opcode::op_le: return binary_with<Le, T>(constants);
    case Opcode::op_gt: return swapped_with<Lt, T>(constants);
    case Opcode::op_ge: return swapped_with<Le, T>(constants);
    case Opcode::op_clamp: return constants == 5 ? &map_clamp_with<T> : nullptr;
    case Opcode::op_select:
      if (constants == 2) return &map_select_with<Raw, true, false>;
      if (constants == 4) return &map_select_with<Raw, false, true>;
      return constants == 6 ? &map_select_with<Raw, true, true> : nullptr;
    default: break;
  }
  if constexpr (!TypeTraits<T>::kFloating) {
    switch (op) {
      case Opcode::op_and: return binary_with<And, U>(constants);
      case Opcode::op_or: return binary_with<Or, U>(constants);
      case Opcode::op_xor: return binary_with<Xor, U>(constants);
      case Opcode::op_shift_left: return binary_with<ShiftLeft, U>(constants);
      case Opcode::op_shift_right_logical: return binary_with<ShiftRightLogical, U>(constants);
      case Opcode::op_shift_right_arithmetic: return binary_with<ShiftRightArithmetic, U>(constants);
      default: break;
    }
  }
  return nullptr;
}

// Bit k of `constants`: operand k is one number. nullptr: there is no such code.
inline VectorFn constant_function(Opcode op, DType compute, unsigned constants) {
  switch (compute) {
    case DType::kF32: return constant_function_of<float>(op, constants);
    case DType::kF64: return constant_function_of<double>(op, constants);
    case DType::kI32: return constant_function_of<int32_t>(op, constants);
    case DType::kU32: return constant_function_of<uint32_t>(op, constants);
    default: return nullptr;
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
