// Opcode x compute type -> a loop over dense arrays: float functions in vectors, the rest as loops that the compiler vectorises.
// dst may be the same array as an operand.
#pragma once

#include "division.h"
#include "load_store.h"
#include "pointwise.h"
#include "rounding.h"
#include "special.h"
#include "threefry.h"
#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

// ---- loops over scalars

template <class Op, class T>
void map_unary(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  auto* d = static_cast<decltype(Op::apply(T{}))*>(dst);
  const T* x = static_cast<const T*>(a);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = Op::apply(x[i]);
}

template <class Op, class T>
KITSUNE_ONCE void map_binary(int64_t n, void* dst, const void* a, const void* b, const void*, const void*, const double*) {
  auto* d = static_cast<decltype(Op::apply(T{}, T{}))*>(dst);
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = Op::apply(x[i], y[i]);
}

// x > y is y < x, and x >= y is y <= x.
template <class Op, class T>
void map_swapped(int64_t n, void* dst, const void* a, const void* b, const void* c, const void* d, const double* imm) {
  map_binary<Op, T>(n, dst, b, a, c, d, imm);
}

template <class T>
void map_clamp(int64_t n, void* dst, const void* a, const void* b, const void* c, const void*, const double*) {
  T* d = static_cast<T*>(dst);
  const T *low = static_cast<const T*>(a), *x = static_cast<const T*>(b), *high = static_cast<const T*>(c);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = Clamp::apply(low[i], x[i], high[i]);
}

template <class T>  // an unsigned integer of the element's size: selection only moves bits
void map_select(int64_t n, void* dst, const void* a, const void* b, const void* c, const void*, const double*) {
  T* d = static_cast<T*>(dst);
  const uint8_t* predicate = static_cast<const uint8_t*>(a);
  const T *on_false = static_cast<const T*>(b), *on_true = static_cast<const T*>(c);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) {
    T no = on_false[i], yes = on_true[i];
    d[i] = predicate[i] ? yes : no;
  }
}

template <class T>  // as above
void map_bits(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  T* d = static_cast<T*>(dst);
  const T* x = static_cast<const T*>(a);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = x[i];
}

template <class T>
void map_integer_pow(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double* imm) {
  T* d = static_cast<T*>(dst);
  const T* x = static_cast<const T*>(a);
  const int64_t y = int64_t(imm[0]);
  switch (y) {
    case 2:
      KITSUNE_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) d[i] = Mul::apply(x[i], x[i]);
      return;
    case 3:
      KITSUNE_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) d[i] = Mul::apply(x[i], Mul::apply(x[i], x[i]));
      return;
    case -1:
      KITSUNE_INDEPENDENT
      for (int64_t i = 0; i < n; ++i) d[i] = Div::apply(T(1), x[i]);
      return;
    default:
      for (int64_t i = 0; i < n; ++i) d[i] = integer_power(x[i], y);
  }
}

template <class T>
void map_reduce_precision(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double* imm) {
  T* d = static_cast<T*>(dst);
  const T* x = static_cast<const T*>(a);
  const int exponent = int(imm[0]), mantissa = int(imm[1]);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) d[i] = reduce_precision(x[i], exponent, mantissa);
}

// libm and the special functions, in double. They look at the bits of their operand, so they would see a denormal where this thread
// takes it for a zero (log of a negative one: NaN rather than -inf).
template <double (*F)(double), class T>
void map_double(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  for (int64_t i = 0; i < n; ++i) static_cast<T*>(dst)[i] = T(F(flushed(double(static_cast<const T*>(a)[i]))));
}

// Functions that near 0 are their operand and hand it on, denormal or not.
template <double (*F)(double)>
void map_identity_at_zero(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  for (int64_t i = 0; i < n; ++i) {
    double x = static_cast<const double*>(a)[i];
    static_cast<double*>(dst)[i] = x == 0 ? x : F(x);
  }
}

template <double (*F)(double, double), class T>
void map_double2(int64_t n, void* dst, const void* a, const void* b, const void*, const void*, const double*) {
  for (int64_t i = 0; i < n; ++i) {
    static_cast<T*>(dst)[i] = T(F(double(static_cast<const T*>(a)[i]), double(static_cast<const T*>(b)[i])));
  }
}

template <double (*F)(double, double, double), class T>
void map_double3(int64_t n, void* dst, const void* a, const void* b, const void* c, const void*, const double*) {
  for (int64_t i = 0; i < n; ++i) {
    double x = double(static_cast<const T*>(a)[i]), y = double(static_cast<const T*>(b)[i]),
           z = double(static_cast<const T*>(c)[i]);
    static_cast<T*>(dst)[i] = T(F(x, y, z));
  }
}

// ---- loops over operations that pointwise.h declares by their opcode

template <class Op, class T, int Operands, class = void>
struct Declared {  // no such operation, or not for this type
  static constexpr VectorFn kLoop = nullptr;
};
template <class Op, class T>
struct Declared<Op, T, 1, decltype(void(Op::apply(T{})))> {
  static constexpr VectorFn kLoop = &map_unary<Op, T>;
};
template <class Op, class T>
struct Declared<Op, T, 2, decltype(void(Op::apply(T{}, T{})))> {
  static constexpr VectorFn kLoop = &map_binary<Op, T>;
};

template <class T>
VectorFn declared_function(Opcode op) {
  if constexpr (!TypeTraits<T>::kBool) {
    switch (op) {
#define KITSUNE_DECLARED(name, operands, gives_bool) \
  case Opcode::op_##name: return Declared<Operation<Opcode::op_##name>, T, operands>::kLoop;
      KITSUNE_OPCODES(KITSUNE_DECLARED)
#undef KITSUNE_DECLARED
      default: break;
    }
  }
  return nullptr;
}

// ---- loops over float vectors; the tail goes through a zero-padded vector

template <VF (*F)(VF)>
void map_vector(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  float* d = static_cast<float*>(dst);
  const float* x = static_cast<const float*>(a);
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) store_vector(d + i, F(load_vector<VF>(x + i)));
  if (i < n) {
    VF v{};
    __builtin_memcpy(&v, x + i, size_t(n - i) * 4);
    v = F(v);
    __builtin_memcpy(d + i, &v, size_t(n - i) * 4);
  }
}

template <VF (*F)(VF, VF)>
void map_vector2(int64_t n, void* dst, const void* a, const void* b, const void*, const void*, const double*) {
  float* d = static_cast<float*>(dst);
  const float *x = static_cast<const float*>(a), *y = static_cast<const float*>(b);
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) store_vector(d + i, F(load_vector<VF>(x + i), load_vector<VF>(y + i)));
  if (i < n) {
    VF v{}, w{};
    __builtin_memcpy(&v, x + i, size_t(n - i) * 4);
    __builtin_memcpy(&w, y + i, size_t(n - i) * 4);
    v = F(v, w);
    __builtin_memcpy(d + i, &v, size_t(n - i) * 4);
  }
}

// ---- the functions of one float type

template <class T>
VectorFn special_function(Opcode op) {
  switch (op) {
    case Opcode::op_lgamma: return &map_double<special::lgamma, T>;
    case Opcode::op_digamma: return &map_double<special::digamma, T>;
    case Opcode::op_bessel_i0e: return &map_double<special::bessel_ie<0>, T>;
    case Opcode::op_bessel_i1e: return &map_double<special::bessel_ie<1>, T>;
    case Opcode::op_igamma: return &map_double2<special::igamma, T>;
    case Opcode::op_igammac: return &map_double2<special::igammac, T>;
    case Opcode::op_zeta: return &map_double2<special::zeta, T>;
    case Opcode::op_polygamma: return &map_double2<special::polygamma, T>;
    case Opcode::op_regularized_incomplete_beta: return &map_double3<special::incomplete_beta, T>;
    default: return nullptr;
  }
}

template <class T>
VectorFn elementary_function(Opcode op);

template <>
inline VectorFn elementary_function<double>(Opcode op) {
  switch (op) {
    case Opcode::op_exp: return &map_double<libm_exp, double>;
    case Opcode::op_exp2: return &map_double<libm_exp2, double>;
    case Opcode::op_expm1: return &map_identity_at_zero<libm_expm1>;
    case Opcode::op_log: return &map_double<libm_log, double>;
    case Opcode::op_log1p: return &map_double<libm_log1p, double>;
    case Opcode::op_cbrt: return &map_double<libm_cbrt, double>;
    case Opcode::op_logistic: return &map_double<libm_logistic, double>;
    case Opcode::op_tanh: return &map_double<libm_tanh, double>;
    case Opcode::op_sin: return &map_identity_at_zero<libm_sin>;
    case Opcode::op_cos: return &map_double<libm_cos, double>;
    case Opcode::op_tan: return &map_identity_at_zero<libm_tan>;
    case Opcode::op_asin: return &map_double<libm_asin, double>;
    case Opcode::op_acos: return &map_double<libm_acos, double>;
    case Opcode::op_atan: return &map_double<libm_atan, double>;
    case Opcode::op_sinh: return &map_double<libm_sinh, double>;
    case Opcode::op_cosh: return &map_double<libm_cosh, double>;
    case Opcode::op_asinh: return &map_double<libm_asinh, double>;
    case Opcode::op_acosh: return &map_double<libm_acosh, double>;
    case Opcode::op_atanh: return &map_double<libm_atanh, double>;
    case Opcode::op_erf: return &map_double<libm_erf, double>;
    case Opcode::op_erfc: return &map_double<libm_erfc, double>;
    case Opcode::op_erf_inv: return &map_double<special::erf_inv, double>;
    case Opcode::op_pow: return &map_double2<libm_pow, double>;
    case Opcode::op_atan2: return &map_double2<libm_atan2, double>;
    default: return special_function<double>(op);
  }
}

template <>
inline VectorFn elementary_function<float>(Opcode op) {
  switch (op) {
    case Opcode::op_exp: return &map_vector<exp>;
    case Opcode::op_exp2: return &map_vector<exp2>;
    case Opcode::op_expm1: return &map_vector<expm1>;
    case Opcode::op_log: return &map_vector<log>;
    case Opcode::op_log1p: return &map_vector<through_double<wide::log1p>>;
    case Opcode::op_cbrt: return &map_vector<through_double<wide::cbrt>>;
    case Opcode::op_logistic: return &map_vector<logistic>;
    case Opcode::op_tanh: return &map_vector<tanh>;
    case Opcode::op_sin: return &map_vector<sin>;
    case Opcode::op_cos: return &map_vector<cos>;
    case Opcode::op_tan: return &map_vector<tan>;
    case Opcode::op_asin: return &map_vector<through_double<wide::asin>>;
    case Opcode::op_acos: return &map_vector<through_double<wide::acos>>;
    case Opcode::op_atan: return &map_vector<through_double<wide::atan>>;
    case Opcode::op_sinh: return &map_vector<through_double<wide::sinh>>;
    case Opcode::op_cosh: return &map_vector<through_double<wide::cosh>>;
    case Opcode::op_asinh: return &map_vector<through_double<wide::asinh>>;
    case Opcode::op_acosh: return &map_vector<through_double<wide::acosh>>;
    case Opcode::op_atanh: return &map_vector<through_double<wide::atanh>>;
    case Opcode::op_erf: return &map_vector<erf>;
    case Opcode::op_erfc: return &map_vector<through_double<wide::erfc>>;
    case Opcode::op_erf_inv: return &map_vector<through_double<wide::erf_inv>>;
    case Opcode::op_to_float16: return &map_vector<ToFloat16::apply>;
    case Opcode::op_to_bfloat16: return &map_vector<ToBFloat16::apply>;
    case Opcode::op_pow: return &map_vector2<pow>;
    case Opcode::op_atan2: return &map_vector2<atan2>;
    default: return special_function<float>(op);
  }
}

template <class T>
VectorFn float_function(Opcode op) {
  switch (op) {
    case Opcode::op_floor: return &map_unary<Floor, T>;
    case Opcode::op_ceil: return &map_unary<Ceil, T>;
    case Opcode::op_round_away: return &map_unary<RoundAway, T>;
    case Opcode::op_round_even: return &map_unary<RoundEven, T>;
    case Opcode::op_is_finite: return &map_unary<IsFinite, T>;
    case Opcode::op_sqrt: return &map_unary<Sqrt, T>;
    case Opcode::op_rsqrt: return &map_unary<Rsqrt, T>;
    case Opcode::op_reduce_precision: return &map_reduce_precision<T>;
    case Opcode::op_nextafter: return &map_binary<NextAfter, T>;
    case Opcode::op_eq_to: return &map_binary<Eq, typename Bits<T>::type>;  // floats of the same place have the same bits
    case Opcode::op_lt_to: return &map_binary<TotalOrder<Lt>, T>;
    case Opcode::op_le_to: return &map_binary<TotalOrder<Le>, T>;
    default: return elementary_function<T>(op);
  }
}

// Integers of any width. What does the same to the bits of both signs is compiled for the unsigned type alone.
template <class T>
VectorFn bitwise_function(Opcode op) {
  using U = UnsignedOf<T>;
  switch (op) {
    case Opcode::op_not: return &map_unary<Not, U>;
    case Opcode::op_and: return &map_binary<And, U>;
    case Opcode::op_or: return &map_binary<Or, U>;
    case Opcode::op_xor: return &map_binary<Xor, U>;
    case Opcode::op_popcnt: return &map_unary<PopCount, U>;
    case Opcode::op_clz: return &map_unary<CountLeadingZeros, U>;
    case Opcode::op_mulhi: return &map_binary<MultiplyHigh, T>;
    case Opcode::op_shift_left: return &map_binary<ShiftLeft, U>;
    case Opcode::op_shift_right_logical: return &map_binary<ShiftRightLogical, U>;
    case Opcode::op_shift_right_arithmetic: return &map_binary<ShiftRightArithmetic, U>;
    case Opcode::op_eq_to: return &map_binary<Eq, U>;  // the total order of integers is their only one
    case Opcode::op_lt_to: return &map_binary<Lt, T>;
    case Opcode::op_le_to: return &map_binary<Le, T>;
    default: break;
  }
  if constexpr (kSame<T, uint32_t>) {
    switch (op) {
      case Opcode::op_threefry_first: return &map_threefry<Word::kFirst>;
      case Opcode::op_threefry_second: return &map_threefry<Word::kSecond>;
      case Opcode::op_threefry_xor: return &map_threefry<Word::kXor>;
      default: break;
    }
  }
  return nullptr;
}

template <class T>
VectorFn number_function(Opcode op) {
  using U = UnsignedOf<T>;
  switch (op) {
    case Opcode::op_neg: return &map_unary<Neg, U>;
    case Opcode::op_sign: return &map_unary<Sign, T>;
    case Opcode::op_abs: return &map_unary<Abs, T>;
    case Opcode::op_square: return &map_unary<Square, U>;
    case Opcode::op_integer_pow: return &map_integer_pow<T>;
    case Opcode::op_add: return &map_binary<Add, U>;
    case Opcode::op_sub: return &map_binary<Sub, U>;
    case Opcode::op_mul: return &map_binary<Mul, U>;
    case Opcode::op_max: return &map_binary<Max, T>;
    case Opcode::op_min: return &map_binary<Min, T>;
    case Opcode::op_eq: return &map_binary<Eq, U>;
    case Opcode::op_ne: return &map_binary<Ne, U>;
    case Opcode::op_lt: return &map_binary<Lt, T>;
    case Opcode::op_le: return &map_binary<Le, T>;
    case Opcode::op_gt: return &map_swapped<Lt, T>;
    case Opcode::op_ge: return &map_swapped<Le, T>;
    case Opcode::op_clamp: return &map_clamp<T>;
    default: break;
  }
  constexpr bool kWord = kSame<T, int32_t> || kSame<T, uint32_t>;
  const bool rest = op == Opcode::op_rem;
  if (op != Opcode::op_div && !rest) return nullptr;
  if constexpr (kWord)
    return rest ? &map_divided<kSigned<T>, true, false> : &map_divided<kSigned<T>, false, false>;
  else if constexpr (kSame<T, float>)
    return rest ? &map_vector2<remainder> : &map_binary<Div, T>;
  else
    return rest ? &map_binary<Rem, T> : &map_binary<Div, T>;
}

// Bools are bytes of 0 or 1, and have the loops of bytes: add and max are or, mul and min are and, as XLA has it.
inline VectorFn bool_function(Opcode op) {
  switch (op) {
    case Opcode::op_not: return &map_unary<Not, Bool>;
    case Opcode::op_add:
    case Opcode::op_max:
    case Opcode::op_or: return &map_binary<Or, uint8_t>;
    case Opcode::op_mul:
    case Opcode::op_min:
    case Opcode::op_and: return &map_binary<And, uint8_t>;
    case Opcode::op_xor: return &map_binary<Xor, uint8_t>;
    case Opcode::op_eq:
    case Opcode::op_eq_to: return &map_binary<Eq, uint8_t>;
    case Opcode::op_ne: return &map_binary<Ne, uint8_t>;
    case Opcode::op_lt:
    case Opcode::op_lt_to: return &map_binary<Lt, uint8_t>;
    case Opcode::op_le:
    case Opcode::op_le_to: return &map_binary<Le, uint8_t>;
    case Opcode::op_gt: return &map_swapped<Lt, uint8_t>;
    case Opcode::op_ge: return &map_swapped<Le, uint8_t>;
    case Opcode::op_clamp: return &map_clamp<uint8_t>;
    default: return nullptr;
  }
}

template <class T>
VectorFn function_of(Opcode op) {
  using U = typename BitsOfSize<sizeof(T)>::type;
  if (op == Opcode::op_bitcast) return &map_bits<U>;
  if (op == Opcode::op_select) return &map_select<U>;
  if constexpr (TypeTraits<T>::kBool) {
    return bool_function(op);
  } else {
    if (VectorFn f = number_function<T>(op)) return f;
    if constexpr (TypeTraits<T>::kFloating) {
      return float_function<T>(op);
    } else {
      return bitwise_function<T>(op);
    }
  }
}

inline VectorFn vector_function(Opcode op, DType compute) {
  return with_type<VectorFn>(compute, [op](auto tag) -> VectorFn {
    using T = typename decltype(tag)::type;
    if constexpr (TypeTraits<T>::kSixteen) {
      return nullptr;
    } else {
      const VectorFn function = function_of<T>(op);
      return function ? function : declared_function<T>(op);
    }
  });
}

}  // namespace kitsune::cpu::KITSUNE_ISA
