// Conversions and functions on threads that flush denormals, as XLA's do: no value may depend on where in a row it stands, or on
// the width of the row; float16 keeps its denormals, which are normal numbers of float32.
#pragma once

#include <limits>
#include <vector>

#include "arithmetic.h"
#include "kernels_check.h"
#include "kernels_pointwise_test.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace kitsune::cpu::test {

// While it lives, this thread takes denormal operands for zeros and makes none (FTZ and DAZ of MXCSR; FZ of FPCR).
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(before_));
    set(before_ | uint64_t{1} << 24);
  }
  ~FlushDenormals() { set(before_); }
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__SSE2__)
  unsigned before_;
#else
  void set(uint64_t fpcr) { __asm__ __volatile__("msr fpcr, %0" : : "r"(fpcr)); }
  uint64_t before_;
#endif
};

constexpr int64_t kWidths = 33;

// Calls f(first, width) for the pieces of [0, n) of each width from 1 to kWidths.
template <class F>
void each_piece(int64_t width, int64_t n, F f) {
  for (int64_t i = 0; i < n; i += width) f(i, std::min(width, n - i));
}

// The same value, NaN for NaN; bits, so that flushing cannot make denormals equal.
template <class T>
bool same_bits(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    uint32_t x = bits_as<uint32_t>(a), y = bits_as<uint32_t>(b);
    return x == y || ((x & 0x7fffffff) > 0x7f800000 && (y & 0x7fffffff) > 0x7f800000);
  } else if constexpr (std::is_same_v<T, double>) {
    uint64_t x = bits_as<uint64_t>(a), y = bits_as<uint64_t>(b), infinity = uint64_t{0x7ff} << 52;
    return x == y || ((x & INT64_MAX) > infinity && (y & INT64_MAX) > infinity);
  } else {
    return a == b;
  }
}

template <class T>
size_t count_different(const std::vector<T>& a, const std::vector<T>& b, size_t* where) {
  size_t wrong = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) ++wrong, *where = i;
  }
  return wrong;
}

// Loads of every 16-bit pattern as `To`.
template <class To>
void check_sixteen_loads(DType storage, const std::vector<To>& expected) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = uint16_t(i);
  std::vector<double> temp(all.size());
  const Loader load(kernels(), dtype_of<To>(), storage, "");
  for (int64_t width = 1; width <= kWidths; ++width) {
    std::vector<To> got(all.size());
    {
      FlushDenormals flush;
      each_piece(width, 65536, [&](int64_t i, int64_t n) { load(n, got.data() + i, all.data() + i, 1, temp.data()); });
    }
    size_t where = 0, wrong = count_different(got, expected, &where);
    if (!check(wrong == 0, "type %d as type %d [%s], width %ld: %zu wrong, %04zx gives %a, expected %a", int(storage),
               int(dtype_of<To>()), kernels().isa, long(width), wrong, where, double(got[where]), double(expected[where])))
      return;
  }
}

inline void test_sixteen_loads() {
  std::vector<float> half(65536), brain(65536);
  std::vector<double> half64(65536), brain64(65536);
  std::vector<int32_t> half_integer(65536);
  for (size_t i = 0; i < 65536; ++i) {
    half64[i] = half_value(uint16_t(i));
    half[i] = float(half64[i]);
    half_integer[i] = saturate<int32_t>(half64[i]);
    brain[i] = bfloat16_value(uint16_t(i));  // only moved, so denormals stay
    const bool denormal = std::fpclassify(brain[i]) == FP_SUBNORMAL;
    brain64[i] = denormal ? std::copysign(0.0, double(brain[i])) : double(brain[i]);
  }
  check_sixteen_loads<float>(DType::kF16, half);
  check_sixteen_loads<double>(DType::kF16, half64);
  check_sixteen_loads<int32_t>(DType::kF16, half_integer);
  check_sixteen_loads<float>(DType::kBF16, brain);
  check_sixteen_loads<double>(DType::kBF16, brain64);
}

// Stores of floats of every exponent, and of ties, as 16-bit floats.
template <class From>
void check_sixteen_stores(DType storage, const std::vector<From>& x) {
  StoreFn store = kernels().store(storage, dtype_of<From>());
  const bool half = storage == DType::kF16;
  const uint16_t infinity = half ? 0x7c00 : 0x7f80;
  std::vector<uint16_t> expected(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    expected[i] = half ? reference_half(x[i]) : reference_bfloat16(x[i]);
    if (!half && std::is_same_v<From, double> && std::fabs(x[i]) < 0x1p-126) expected[i] &= 0x8000;  // through a float, flushed
  }
  for (int64_t width = 1; width <= kWidths; ++width) {
    std::vector<uint16_t> got(x.size());
    {
      FlushDenormals flush;
      each_piece(width, int64_t(x.size()), [&](int64_t i, int64_t n) { store(n, got.data() + i, 1, x.data() + i); });
    }
    size_t wrong = 0, where = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      const bool nan = x[i] != x[i];
      if (nan ? (got[i] & 0x7fff) <= infinity : got[i] != expected[i]) ++wrong, where = i;
    }
    if (!check(wrong == 0, "type %d to type %d [%s], width %ld: %zu wrong, %a gives %04x, expected %04x", int(dtype_of<From>()),
               int(storage), kernels().isa, long(width), wrong, double(x[where]), got[where], expected[where]))
      return;
  }
}

// Rounding to a 16-bit float in a register: as a store and a load would.
inline void check_rounding(bool half, const std::vector<float>& numbers) {
  std::vector<float> x;
  for (float v : numbers)
    if (half || v == 0 || std::fabs(v) >= 0x1p-126f || v != v) x.push_back(v);  // VCVTNEPS2BF16 takes denormals for zeros
  std::vector<float> expected(x.size()), got(x.size());
  for (size_t i = 0; i < x.size(); ++i)
    expected[i] = half ? float(half_value(reference_half(x[i]))) : bfloat16_value(reference_bfloat16(x[i]));
  const Opcode op = half ? Opcode::op_to_float16 : Opcode::op_to_bfloat16;
  for (int64_t width = 1; width <= kWidths; ++width) {
    {
      FlushDenormals flush;
      each_piece(width, int64_t(x.size()), [&](int64_t i, int64_t n) {
        kernels().vector(op, DType::kF32)(n, got.data() + i, x.data() + i, nullptr, nullptr, nullptr, nullptr);
      });
    }
    size_t where = 0, wrong = count_different(got, expected, &where);
    if (!check(wrong == 0, "%s [%s], width %ld: %zu wrong, %a gives %a, expected %a", half ? "to_float16" : "to_bfloat16",
               kernels().isa, long(width), wrong, double(x[where]), double(got[where]), double(expected[where])))
      return;
  }
}

inline void test_sixteen_stores() {
  Random random;
  std::vector<float> x;
  std::vector<double> d;
  for (uint32_t e = 0; e < 256; ++e) {
    for (int i = 0; i < 48; ++i) {
      uint32_t f = uint32_t(random.next() >> 41);
      if (i % 3 == 1) f = (f & 0x7fe000) | 0x1000;  // a tie of f16
      if (i % 3 == 2) f = (f & 0x7f0000) | 0x8000;  // a tie of bf16
      x.push_back(bits_as<float>(e << 23 | f | (i % 2 ? 0x80000000u : 0)));
      d.push_back(double(x.back()) * (1 + 0x1p-40 * (i % 5 - 2)));
    }
  }
  for (uint16_t h = 0; h < 0x800; ++h) {  // denormals of f16, and the ties between them
    x.push_back(float(half_value(h)));
    x.push_back(-float(half_value(h)) - 0x1p-25f);
  }
  for (float v : x) d.push_back(double(v));
  check_rounding(true, x);
  check_rounding(false, x);
  check_sixteen_stores(DType::kF16, x);
  check_sixteen_stores(DType::kBF16, x);
  check_sixteen_stores(DType::kF16, d);
  check_sixteen_stores(DType::kBF16, d);
}

// Numbers at the edges of a float type, of both signs: denormals, the smallest normal ones, neighbours of 1, the largest.
template <class T>
std::vector<T> edge_values() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> v = {T(0),
                      Limits::denorm_min(),
                      Limits::min() / 2,
                      std::nextafter(Limits::min(), T(0)),
                      Limits::min(),
                      std::nextafter(Limits::min(), T(1)),
                      T(0.5),
                      T(0.75),
                      std::nextafter(T(1), T(0)),
                      T(1),
                      std::nextafter(T(1), T(2)),
                      T(1.5),
                      T(2),
                      T(2.5),
                      T(3),
                      T(100),
                      T(1e6),
                      T(1e9),
                      T(8388607.5),
                      T(1e30),
                      Limits::max(),
                      Limits::infinity()};
  for (size_t i = 0, n = v.size(); i < n; ++i) v.push_back(-v[i]);
  v.push_back(Limits::quiet_NaN());
  return v;
}

// Each micro-operation on every pair of edge values, in rows of every width.
template <class T, class R>
void check_widths(const char* name, Opcode op, const double* imm) {
  VectorFn f = kernels().vector(op, dtype_of<T>());
  const std::vector<T> v = edge_values<T>();
  std::vector<T> a, b, c;
  for (T x : v) {
    for (T y : v) a.push_back(x), b.push_back(y), c.push_back(v[(a.size() * 7) % v.size()]);
  }
  const int64_t n = int64_t(a.size());
  std::vector<R> whole(a.size()), got(a.size());
  FlushDenormals flush;
  f(n, whole.data(), a.data(), b.data(), c.data(), a.data(), imm);
  for (int64_t width = 1; width <= kWidths; ++width) {
    each_piece(width, n,
               [&](int64_t i, int64_t m) { f(m, got.data() + i, a.data() + i, b.data() + i, c.data() + i, a.data() + i, imm); });
    size_t where = 0, wrong = count_different(got, whole, &where);
    if (!check(wrong == 0, "%s on type %d [%s], width %ld: %zu differ from a wide row, (%a, %a) gives %a, there %a", name,
               int(dtype_of<T>()), kernels().isa, long(width), wrong, double(a[where]), double(b[where]), double(got[where]),
               double(whole[where])))
      return;
  }
}

template <class T>
void test_widths() {
  struct Operation {
    const char* name;
    Opcode op;
  };
#define KITSUNE_TEST_OPERATION(name, operands, gives_bool) {#name, Opcode::op_##name},
  static const Operation operations[] = {KITSUNE_OPCODES(KITSUNE_TEST_OPERATION)};
#undef KITSUNE_TEST_OPERATION
  const double cube[] = {3.0, 0.0}, format[] = {5.0, 7.0};
  int tried = 0;
  for (const Operation& o : operations) {
    // Select reads bools; the series of igamma and its like are long, and have no vector code.
    if (kernels().vector(o.op, dtype_of<T>()) == nullptr || o.op == Opcode::op_select || o.op == Opcode::op_igamma ||
        o.op == Opcode::op_igammac || o.op == Opcode::op_zeta || o.op == Opcode::op_polygamma ||
        o.op == Opcode::op_regularized_incomplete_beta)
      continue;
    const double* imm = o.op == Opcode::op_reduce_precision ? format : cube;
    gives_bool(o.op) ? check_widths<T, uint8_t>(o.name, o.op, imm) : check_widths<T, T>(o.name, o.op, imm);
    ++tried;
  }
  check(tried > 45, "%d operations on type %d", tried, int(dtype_of<T>()));
}

// Results that once were those of the denormal itself: arithmetic takes it for the zero of its sign.
template <class T>
void check_flushed(const char* name, Opcode op, T x, T y, double expected) {
  T got = T(7), z = T(1);
  {
    FlushDenormals flush;
    kernels().vector(op, dtype_of<T>())(1, &got, &x, &y, &z, nullptr, nullptr);
  }
  check(same_bits(got, T(expected)), "%s(%a, %a) on type %d [%s], denormals flushed: %a, expected %a", name, double(x), double(y),
        int(dtype_of<T>()), kernels().isa, double(got), expected);
}

template <class T>
void test_flushed() {
  const T low = std::numeric_limits<T>::denorm_min(), high = std::nextafter(std::numeric_limits<T>::min(), T(0));
  check_flushed<T>("max", Opcode::op_max, low, T(-1), 0.0);
  check_flushed<T>("max", Opcode::op_max, T(-1), -high, -0.0);
  check_flushed<T>("max", Opcode::op_max, -low, high, 0.0);
  check_flushed<T>("max", Opcode::op_max, -low, -high, -0.0);
  check_flushed<T>("min", Opcode::op_min, low, T(1), 0.0);
  check_flushed<T>("min", Opcode::op_min, high, -low, -0.0);
  check_flushed<T>("min", Opcode::op_min, low, high, 0.0);
  check_flushed<T>("clamp", Opcode::op_clamp, T(-1), -high, -0.0);
  check_flushed<T>("log", Opcode::op_log, -low, T(0), -INFINITY);
  check_flushed<T>("sqrt", Opcode::op_sqrt, -high, T(0), -0.0);
  check_flushed<T>("sign", Opcode::op_sign, -high, T(0), -0.0);
  check_flushed<T>("erf", Opcode::op_erf, -high, T(0), -0.0);
  check_flushed<T>("log1p", Opcode::op_log1p, high, T(0), 0.0);
  check_flushed<T>("neg", Opcode::op_neg, low, T(0), -double(low));  // only moves bits
  check_flushed<T>("abs", Opcode::op_abs, -high, T(0), double(high));
  check_flushed<T>("expm1", Opcode::op_expm1, -high, T(0), -double(high));  // its operand near 0
}

// What the executor's own loops and constants compute.
inline void test_arithmetic() {
  // Read at run time: the compiler computes with denormals.
  volatile uint32_t least = 1, most = 0x7fffff;
  const float low = bits_as<float>(uint32_t(least)), high = bits_as<float>(uint32_t(most));
  FlushDenormals flush;
  check(same_bits(float_constant(0x1p-149), low) && same_bits(float_constant(-0x1.fffffcp-127), -high), "constants: %a %a",
        double(float_constant(0x1p-149)), double(float_constant(-0x1.fffffcp-127)));
  check(same_bits(float_constant(-0.0), -0.0f) && same_bits(float_constant(0x1p-126), 0x1p-126f),
        "constants that are no denormals");
  check(same_bits(float_constant(1e39), INFINITY) && same_bits(float_constant(NAN), NAN), "constants that are not finite");
  check(same_bits(flushed(-high), -0.0f) && same_bits(flushed(low), 0.0f) && flushed(1.5f) == 1.5f && flushed(7) == 7, "flushed");
  check(same_bits(extremum<true>(-low, high), 0.0f) && same_bits(extremum<true>(-high, -1.0f), -0.0f), "maximum of denormals");
  check(same_bits(extremum<false>(0.0f, -0.0f), -0.0f) && same_bits(extremum<false>(low, 1.0f), 0.0f), "minimum of denormals");
  check(same_bits(extremum<true>(NAN, 1.0f), NAN) && same_bits(extremum<false>(1.0, double(NAN)), double(NAN)), "extrema of NaN");
}

inline void test_edges() {
  test_arithmetic();
  test_sixteen_loads();
  test_sixteen_stores();
  test_widths<float>();
  test_widths<double>();
  test_flushed<float>();
  test_flushed<double>();
}

}  // namespace kitsune::cpu::test
