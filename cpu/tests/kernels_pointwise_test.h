// Integers, comparisons, rounding, selection, conversions, loads and stores, folds: against plain scalar definitions.
#pragma once

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "executor_internal.h"
#include "kernels_check.h"
#include "kitsune_cpu/kernels.h"
#include "kitsune_cpu/opcodes.h"

namespace kitsune::cpu::test {

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, int8_t>)
    return DType::kI8;
  else if constexpr (std::is_same_v<T, int16_t>)
    return DType::kI16;
  else if constexpr (std::is_same_v<T, int32_t>)
    return DType::kI32;
  else if constexpr (std::is_same_v<T, int64_t>)
    return DType::kI64;
  else if constexpr (std::is_same_v<T, uint8_t>)
    return DType::kU8;
  else if constexpr (std::is_same_v<T, uint16_t>)
    return DType::kU16;
  else if constexpr (std::is_same_v<T, uint32_t>)
    return DType::kU32;
  else if constexpr (std::is_same_v<T, uint64_t>)
    return DType::kU64;
  else if constexpr (std::is_same_v<T, float>)
    return DType::kF32;
  else
    return DType::kF64;
}

template <class T>
bool same_value(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return (a != a && b != b) || (a == b && std::signbit(a) == std::signbit(b));
  } else {
    return a == b;
  }
}

template <class R, class T>
void check_op(const char* name, Opcode op, const std::vector<T>& a, const std::vector<T>& b, const std::vector<T>& c,
              R (*expected)(T, T, T), const double* imm = nullptr) {
  VectorFn f = kernels().vector(op, dtype_of<T>());
  if (!check(f != nullptr, "%s on type %d: no kernel", name, int(dtype_of<T>()))) return;
  std::vector<R> out(a.size() + 1, R(77));
  f(int64_t(a.size()), out.data(), a.data(), b.data(), c.data(), nullptr, imm);
  size_t wrong = 0, where = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_value(out[i], expected(a[i], b[i], c[i]))) ++wrong, where = i;
  }
  check(wrong == 0 && out[a.size()] == R(77), "%s [%s] on type %d: %zu wrong, (%g, %g, %g) gives %g, expected %g", name,
        kernels().isa, int(dtype_of<T>()), wrong, double(a[where]), double(b[where]), double(c[where]), double(out[where]),
        double(expected(a[where], b[where], c[where])));
}

template <class T>
struct Triples {
  std::vector<T> a, b, c;
};

template <class T>
Triples<T> triples() {
  std::vector<T> v = {
      T(0), T(1), T(2), T(3), T(7), T(8), T(31), T(63), T(100), std::numeric_limits<T>::max(), std::numeric_limits<T>::lowest()};
  if constexpr (std::is_signed_v<T> || std::is_floating_point_v<T>) v.insert(v.end(), {T(-1), T(-2), T(-5), T(-100)});
  if constexpr (std::is_floating_point_v<T>) {
    const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    v.insert(v.end(), {T(-0.0), T(0.5), T(-0.5), T(1.5), T(2.5), T(-2.5), T(0.49999997), std::numeric_limits<T>::denorm_min(), inf,
                       -inf, nan, T(8388609.0)});
  }
  Triples<T> t;
  for (T a : v) {
    for (T b : v) t.a.push_back(a), t.b.push_back(b), t.c.push_back(v[(t.a.size() * 7) % v.size()]);
  }
  return t;
}

template <class T>
T ieee_maximum(T a, T b) {
  if (a != a || b != b) return a != a ? a : b;
  if (a == b) return std::is_floating_point_v<T> && std::signbit(double(a)) ? b : a;
  return a > b ? a : b;
}
template <class T>
T ieee_minimum(T a, T b) {
  if (a != a || b != b) return a != a ? a : b;
  if (a == b) return std::is_floating_point_v<T> && std::signbit(double(a)) ? a : b;
  return a < b ? a : b;
}

template <class T>
void test_common() {
  Triples<T> t = triples<T>();
  check_op<uint8_t, T>("eq", Opcode::op_eq, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a == b); });
  check_op<uint8_t, T>("ne", Opcode::op_ne, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a != b); });
  check_op<uint8_t, T>("lt", Opcode::op_lt, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a < b); });
  check_op<uint8_t, T>("le", Opcode::op_le, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a <= b); });
  check_op<uint8_t, T>("gt", Opcode::op_gt, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a > b); });
  check_op<uint8_t, T>("ge", Opcode::op_ge, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(a >= b); });
  check_op<T, T>("max", Opcode::op_max, t.a, t.b, t.c, [](T a, T b, T) { return ieee_maximum(a, b); });
  check_op<T, T>("min", Opcode::op_min, t.a, t.b, t.c, [](T a, T b, T) { return ieee_minimum(a, b); });
  check_op<T, T>("clamp", Opcode::op_clamp, t.a, t.b, t.c, [](T a, T b, T c) { return ieee_minimum(ieee_maximum(a, b), c); });
  std::vector<uint8_t> predicate(t.a.size());
  std::vector<T> out(t.a.size());
  for (size_t i = 0; i < predicate.size(); ++i) predicate[i] = i % 3 == 0;
  kernels().vector(Opcode::op_select, dtype_of<T>())(int64_t(out.size()), out.data(), predicate.data(), t.a.data(), t.b.data(),
                                                     nullptr, nullptr);
  size_t wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) wrong += !same_value(out[i], i % 3 == 0 ? t.b[i] : t.a[i]);
  check(wrong == 0, "select on type %d: %zu wrong", int(dtype_of<T>()), wrong);
}

template <class T>  // twice as wide as any T
using Wide128 = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;

// Quotients and remainders of 32 bits, which are computed in double: at the edges of integers and of divisors, and at random; with
// a divisor for each element, and with one for all.
template <class T>
void test_division() {
  using Wide = __int128;
  std::vector<T> edges;
  for (uint64_t power = 1; power <= uint64_t(1) << 32; power *= 2)
    for (int64_t off = -2; off <= 2; ++off) edges.push_back(T(power + uint64_t(off))), edges.push_back(T(uint64_t(off) - power));
  Random random;
  std::vector<T> a, b;
  for (T x : edges)
    for (T y : edges) a.push_back(x), b.push_back(y);
  for (int i = 0; i < 200000; ++i) {
    a.push_back(T(random.next() >> 32)), b.push_back(T(T(random.next() >> 32) >> (i % 32)));
    if (i % 3 == 0 && b.back() != 0)
      a.back() = T(uint64_t(a.back() / (b.back() == T(-1) ? T(1) : b.back())) * uint64_t(b.back()) - i % 2);
  }
  auto quotient = [](T x, T y, T) { return y == 0 ? T(-1) : T(Wide(x) / Wide(y)); };
  auto rest = [](T x, T y, T) { return y == 0 ? x : T(Wide(x) % Wide(y)); };
  check_op<T, T>("div", Opcode::op_div, a, b, b, quotient);
  check_op<T, T>("rem", Opcode::op_rem, a, b, b, rest);
  for (T y : edges) {
    std::vector<T> q(edges.size()), r(edges.size());
    const auto n = int64_t(edges.size());
    kernels().vector_with(Opcode::op_div, dtype_of<T>(), 2)(n, q.data(), edges.data(), &y, nullptr, nullptr, nullptr);
    kernels().vector_with(Opcode::op_rem, dtype_of<T>(), 2)(n, r.data(), edges.data(), &y, nullptr, nullptr, nullptr);
    size_t wrong = 0;
    for (size_t i = 0; i < edges.size(); ++i) wrong += q[i] != quotient(edges[i], y, y) || r[i] != rest(edges[i], y, y);
    check(wrong == 0, "division by %g on type %d [%s]: %zu wrong", double(y), int(dtype_of<T>()), kernels().isa, wrong);
  }
}

template <class T>
void test_integer() {
  using Wide = __int128;
  using U = std::make_unsigned_t<T>;
  static constexpr int kBits = sizeof(T) * 8;
  Triples<T> t = triples<T>();
  test_common<T>();
  check_op<T, T>("add", Opcode::op_add, t.a, t.b, t.c, [](T a, T b, T) { return T(Wide(a) + Wide(b)); });
  check_op<T, T>("sub", Opcode::op_sub, t.a, t.b, t.c, [](T a, T b, T) { return T(Wide(a) - Wide(b)); });
  check_op<T, T>("mul", Opcode::op_mul, t.a, t.b, t.c,
                 [](T a, T b, T) { return T((unsigned __int128)(a) * (unsigned __int128)(b)); });
  check_op<T, T>("mulhi", Opcode::op_mulhi, t.a, t.b, t.c, [](T a, T b, T) { return T((Wide128<T>(a) * b) >> kBits); });
  check_op<T, T>("div", Opcode::op_div, t.a, t.b, t.c, [](T a, T b, T) { return b == 0 ? T(-1) : T(Wide(a) / Wide(b)); });
  check_op<T, T>("rem", Opcode::op_rem, t.a, t.b, t.c, [](T a, T b, T) { return b == 0 ? a : T(Wide(a) % Wide(b)); });
  check_op<T, T>("neg", Opcode::op_neg, t.a, t.b, t.c, [](T a, T, T) { return T(-Wide(a)); });
  check_op<T, T>("abs", Opcode::op_abs, t.a, t.b, t.c, [](T a, T, T) { return T(a < 0 ? -Wide(a) : Wide(a)); });
  check_op<T, T>("sign", Opcode::op_sign, t.a, t.b, t.c, [](T a, T, T) { return T(a > 0 ? 1 : a < 0 ? -1 : 0); });
  check_op<T, T>("not", Opcode::op_not, t.a, t.b, t.c, [](T a, T, T) { return T(~a); });
  check_op<T, T>("xor", Opcode::op_xor, t.a, t.b, t.c, [](T a, T b, T) { return T(a ^ b); });
  check_op<T, T>("shl", Opcode::op_shift_left, t.a, t.b, t.c,
                 [](T a, T b, T) { return Wide(b) >= 0 && Wide(b) < kBits ? T((unsigned __int128)(U(a)) << int(b)) : T(0); });
  check_op<T, T>("shr", Opcode::op_shift_right_logical, t.a, t.b, t.c,
                 [](T a, T b, T) { return Wide(b) >= 0 && Wide(b) < kBits ? T(U(a) >> int(b)) : T(0); });
  check_op<T, T>("sar", Opcode::op_shift_right_arithmetic, t.a, t.b, t.c, [](T a, T b, T) {
    auto s = std::make_signed_t<T>(a);
    return T(Wide(b) >= 0 && Wide(b) < kBits ? s >> int(b) : s < 0 ? -1 : 0);
  });
  check_op<T, T>("popcnt", Opcode::op_popcnt, t.a, t.b, t.c, [](T a, T, T) {
    int count = 0;
    for (int i = 0; i < kBits; ++i) count += (U(a) >> i) & 1;
    return T(count);
  });
  check_op<T, T>("clz", Opcode::op_clz, t.a, t.b, t.c, [](T a, T, T) {
    int count = 0;
    for (int i = kBits - 1; i >= 0 && !((U(a) >> i) & 1); --i) ++count;
    return T(count);
  });
  if constexpr (sizeof(T) == 4) test_division<T>();
  const double five = 5;
  check_op<T, T>(
      "pow5", Opcode::op_integer_pow, t.a, t.b, t.c,
      [](T a, T, T) {
        unsigned __int128 x = (unsigned __int128)(Wide(a));
        return T(x * x * x * x * x);
      },
      &five);
}

// fmod, on random bits, on quotients next to an integer, and on large ones.
inline void test_remainder() {
  Triples<float> t = triples<float>();
  std::vector<float> a = t.a, b = t.b;
  Random random;
  for (int i = 0; i < 300000; ++i) {
    float x = bits_as<float>(uint32_t(random.next() >> 32)), y = bits_as<float>(uint32_t(random.next() >> 32));
    if (i % 3 == 1) x = bits_as<float>((uint32_t(random.next() >> 41)) | (0x41000000u + (uint32_t(i % 12) << 23))), y = 6.2831855f;
    if (i % 3 == 2) x = y * float(i % 4096);  // next to a multiple
    a.push_back(x), b.push_back(y);
  }
  check_op<float, float>("rem", Opcode::op_rem, a, b, b, [](float x, float y, float) { return std::fmod(x, y); });
}

// IEEE 754's total order: NaN of either sign stands at its end, -0 before 0.
template <class T>
bool before(T a, T b) {
  auto place = [](T x) { return (std::signbit(x) ? -1 : 1) * (std::isnan(x) ? 4 : std::isinf(x) ? 3 : x != 0 ? 2 : 1); };
  return place(a) != place(b) ? place(a) < place(b) : a < b;
}

template <class T>
void test_floating() {
  Triples<T> t = triples<T>();
  test_common<T>();
  check_op<T, T>("sign", Opcode::op_sign, t.a, t.b, t.c, [](T a, T, T) { return a > 0 ? T(1) : a < 0 ? T(-1) : a; });
  check_op<T, T>("abs", Opcode::op_abs, t.a, t.b, t.c, [](T a, T, T) { return std::fabs(a); });
  check_op<T, T>("neg", Opcode::op_neg, t.a, t.b, t.c, [](T a, T, T) { return -a; });
  check_op<uint8_t, T>("lt_to", Opcode::op_lt_to, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(before(a, b)); });
  check_op<uint8_t, T>("le_to", Opcode::op_le_to, t.a, t.b, t.c, [](T a, T b, T) { return uint8_t(!before(b, a)); });
  check_op<T, T>("bitcast", Opcode::op_bitcast, t.a, t.b, t.c, [](T a, T, T) { return a; });
  check_op<T, T>("floor", Opcode::op_floor, t.a, t.b, t.c, [](T a, T, T) { return std::floor(a); });
  check_op<T, T>("ceil", Opcode::op_ceil, t.a, t.b, t.c, [](T a, T, T) { return std::ceil(a); });
  check_op<T, T>("round_away", Opcode::op_round_away, t.a, t.b, t.c, [](T a, T, T) { return std::round(a); });
  check_op<T, T>("round_even", Opcode::op_round_even, t.a, t.b, t.c, [](T a, T, T) { return std::nearbyint(a); });
  check_op<uint8_t, T>("is_finite", Opcode::op_is_finite, t.a, t.b, t.c, [](T a, T, T) { return uint8_t(std::isfinite(a)); });
  check_op<T, T>("nextafter", Opcode::op_nextafter, t.a, t.b, t.c, [](T a, T b, T) { return std::nextafter(a, b); });
  check_op<T, T>("div", Opcode::op_div, t.a, t.b, t.c, [](T a, T b, T) { return a / b; });
  const double inverse_square = -2;
  check_op<T, T>("pow-2", Opcode::op_integer_pow, t.a, t.b, t.c, [](T a, T, T) { return T(1) / (a * a); }, &inverse_square);
}

// The known answers of Random123 (kat_vectors), in rows of every width up to two blocks of the widest vectors.
inline void test_threefry() {
  const uint32_t answers[][6] = {{0, 0, 0, 0, 0x6b200159, 0x99ba4efe},
                                 {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x1cb996fc, 0xbb002be7},
                                 {0x13198a2e, 0x03707344, 0x243f6a88, 0x85a308d3, 0xc4923a9c, 0x483df7a0}};
  for (size_t n = 1; n <= 140; ++n) {
    std::vector<uint32_t> in[4], out(n + 1), want[3];
    for (size_t i = 0; i < n; ++i) {
      const uint32_t* a = answers[i % 3];
      for (int k = 0; k < 4; ++k) in[k].push_back(a[k]);
      want[0].push_back(a[4]), want[1].push_back(a[5]), want[2].push_back(a[4] ^ a[5]);
    }
    const Opcode words[] = {Opcode::op_threefry_first, Opcode::op_threefry_second, Opcode::op_threefry_xor};
    for (int w = 0; w < 3; ++w) {
      out[n] = 77;
      kernels().vector(words[w], DType::kU32)(int64_t(n), out.data(), in[0].data(), in[1].data(), in[2].data(), in[3].data(),
                                              nullptr);
      check(std::equal(want[w].begin(), want[w].end(), out.begin()) && out[n] == 77, "threefry [%s], word %d of %zu", kernels().isa,
            w, n);
    }
  }
}

// reduce_precision to f16's and bf16's formats agrees with the conversions wherever the format's numbers are normal.
inline void test_reduce_precision() {
  std::vector<float> x, y;
  Random random;
  for (int i = 0; i < 4000; ++i) x.push_back(bits_as<float>(uint32_t(random.next() >> 32)));
  y.resize(x.size());
  for (bool half : {true, false}) {
    const double imm[] = {half ? 5.0 : 8.0, half ? 10.0 : 7.0};
    kernels().vector(Opcode::op_reduce_precision, DType::kF32)(int64_t(x.size()), y.data(), x.data(), nullptr, nullptr, nullptr,
                                                               imm);
    size_t wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      float expected = half ? float(half_value(reference_half(x[i]))) : bfloat16_value(reference_bfloat16(x[i]));
      if (half && std::fabs(expected) < 0x1p-14f) expected = std::copysign(0.0f, x[i]);
      wrong += !same_value(y[i], expected) && std::fabs(expected) != 0x1p-14f;
    }
    check(wrong == 0, "reduce_precision [%s] half %d: %zu wrong", kernels().isa, half, wrong);
  }
}

inline void test_sixteen_bits() {
  std::vector<uint16_t> all(65536);
  std::vector<float> floats(65536);
  for (int i = 0; i < 65536; ++i) all[size_t(i)] = uint16_t(i);
  size_t wrong = 0;
  kernels().load(DType::kF32, DType::kF16)(65536, floats.data(), all.data(), 1);
  for (int i = 0; i < 65536; ++i) wrong += !same_value(floats[size_t(i)], float(half_value(uint16_t(i))));
  kernels().load(DType::kF32, DType::kBF16)(65536, floats.data(), all.data(), 1);
  for (int i = 0; i < 65536; ++i) wrong += !same_value(floats[size_t(i)], bfloat16_value(uint16_t(i)));
  check(wrong == 0, "16-bit loads [%s]: %zu wrong", kernels().isa, wrong);

  Random random;
  std::vector<float> x;
  std::vector<double> d;
  for (uint32_t e = 0; e < 256; ++e) {
    for (int i = 0; i < 600; ++i) {
      uint32_t f = uint32_t(random.next() >> 41);
      if (i % 3 == 1) f = (f & 0x7fe000) | 0x1000;  // a tie of f16
      if (i % 3 == 2) f = (f & 0x7f0000) | 0x8000;  // a tie of bf16
      x.push_back(bits_as<float>(e << 23 | f | (i % 2 ? 0x80000000u : 0)));
      d.push_back(double(x.back()) * (1 + 0x1p-40 * (i % 5 - 2)));
    }
  }
  const int64_t n = int64_t(x.size());
  std::vector<uint16_t> h(x.size()), b(x.size()), hd(x.size()), bd(x.size());
  kernels().store(DType::kF16, DType::kF32)(n, h.data(), 1, x.data());
  kernels().store(DType::kBF16, DType::kF32)(n, b.data(), 1, x.data());
  kernels().store(DType::kF16, DType::kF64)(n, hd.data(), 1, d.data());
  kernels().store(DType::kBF16, DType::kF64)(n, bd.data(), 1, d.data());
  size_t w1 = 0, w2 = 0, w3 = 0, w4 = 0;
  auto is_nan_half = [](uint16_t v) { return (v & 0x7fff) > 0x7c00; };
  auto is_nan_bf16 = [](uint16_t v) { return (v & 0x7fff) > 0x7f80; };
  for (size_t i = 0; i < x.size(); ++i) {
    bool nan = x[i] != x[i];
    w1 += nan ? !is_nan_half(h[i]) : h[i] != reference_half(x[i]);
    w2 += nan ? !is_nan_bf16(b[i]) : b[i] != reference_bfloat16(x[i]);
    w3 += nan ? !is_nan_half(hd[i]) : hd[i] != reference_half(d[i]);
    w4 += nan ? !is_nan_bf16(bd[i]) : bd[i] != reference_bfloat16(d[i]);
  }
  check(w1 + w2 + w3 + w4 == 0, "16-bit stores [%s]: f32->f16 %zu, f32->bf16 %zu, f64->f16 %zu, f64->bf16 %zu wrong", kernels().isa,
        w1, w2, w3, w4);
}

template <class To, class From>
To saturate(From x) {
  if (x != x) return 0;
  long double v = x;
  if (v >= (long double)std::numeric_limits<To>::max()) return std::numeric_limits<To>::max();
  if (v <= (long double)std::numeric_limits<To>::lowest()) return std::numeric_limits<To>::lowest();
  return To(x);
}

template <class To>
void test_saturation() {
  for (auto values : {triples<float>().a}) {
    std::vector<float> x = values;
    for (double v : {127.5, 128.0, 255.9, 256.0, -129.0, -0.9, 32768.0, 65536.0, 2147483647.0, 2147483648.0, 4294967296.0, 9.3e18,
                     1.9e19, -9.4e18, 1e30})
      x.push_back(float(v));
    std::vector<To> y(x.size());
    kernels().convert(dtype_of<To>(), DType::kF32)(int64_t(x.size()), y.data(), x.data(), nullptr, nullptr, nullptr, nullptr);
    size_t wrong = 0, where = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (y[i] != saturate<To>(x[i])) ++wrong, where = i;
    }
    check(wrong == 0, "f32 -> type %d [%s]: %zu wrong, %g gives %Lg", int(dtype_of<To>()), kernels().isa, wrong, double(x[where]),
          (long double)y[where]);
    std::vector<double> d(x.begin(), x.end());
    kernels().convert(dtype_of<To>(), DType::kF64)(int64_t(x.size()), y.data(), d.data(), nullptr, nullptr, nullptr, nullptr);
    wrong = 0;
    for (size_t i = 0; i < x.size(); ++i) wrong += y[i] != saturate<To>(d[i]);
    check(wrong == 0, "f64 -> type %d [%s]: %zu wrong", int(dtype_of<To>()), kernels().isa, wrong);
  }
}

inline void test_strides() {
  for (int64_t n : {int64_t(1), int64_t(5), int64_t(300), int64_t(1000)}) {
    for (int64_t stride : {int64_t(0), int64_t(1), int64_t(2), int64_t(3), int64_t(-1), int64_t(-4)}) {
      std::vector<int16_t> memory(size_t(5 * n + 8));
      for (size_t i = 0; i < memory.size(); ++i) memory[i] = int16_t(i * 7 + 1);
      const int64_t first = stride < 0 ? -stride * (n - 1) : 0;
      std::vector<float> y(size_t(n + 1), -1.0f);
      std::vector<int16_t> z(size_t(n + 1), int16_t(-1)), back(memory.size(), int16_t(-3));
      std::vector<double> temp(static_cast<size_t>(n));
      Loader(kernels(), DType::kF32, DType::kI16, "")(n, y.data(), memory.data() + first, stride, temp.data());
      kernels().load(DType::kI16, DType::kI16)(n, z.data(), memory.data() + first, stride);
      Storer(kernels(), DType::kI16, DType::kF32, "")(n, back.data() + first, stride, y.data(), temp.data());
      size_t wrong = (y[size_t(n)] != -1.0f) + (z[size_t(n)] != -1), written = 0;
      for (int64_t i = 0; i < n; ++i) {
        int16_t expected = memory[size_t(first + i * stride)];
        wrong += y[size_t(i)] != expected || z[size_t(i)] != expected || (back[size_t(first + i * stride)] != expected);
      }
      for (int16_t v : back) written += v != -3;
      check(wrong == 0 && written == size_t(stride == 0 ? 1 : n), "stride %ld, n %ld [%s]: %zu wrong, %zu written", long(stride),
            long(n), kernels().isa, wrong, written);
    }
  }
}

// Of bfloat16 numbers, which kernels may compare as integers: of all kinds, at every length about that of vectors.
inline void test_extrema_of_bfloat16() {
  Random random;
  const uint16_t odd[] = {0x0000, 0x8000, 0x7f80, 0xff80, 0x7fc0, 0xffc0, 0x0001, 0x8001, 0x7f81, 0xffff};
  for (int64_t n : {1, 2, 15, 31, 32, 33, 63, 64, 65, 96, 127, 200, 517}) {
    for (int trial = 0; trial < 40; ++trial) {
      std::vector<uint16_t> row(static_cast<size_t>(n));
      for (uint16_t& v : row) v = reference_bfloat16(trial % 2 ? random.symmetric() : -std::fabs(random.symmetric()));
      if (trial >= 20) row[size_t(random.below(n))] = odd[random.below(int64_t(sizeof odd / sizeof odd[0]))];
      float high = -INFINITY, low = INFINITY, most = -INFINITY, least = INFINITY;
      bool nan = false;
      for (uint16_t bits : row) {  // std::max keeps the first operand beside a NaN
        const float v = bfloat16_value(bits);
        nan |= std::isnan(v);
        most = std::max(most, v), least = std::min(least, v);
      }
      kernels().fold(1, DType::kBF16, false)(n, row.data(), 1, &high);
      kernels().fold(2, DType::kBF16, false)(n, row.data(), 1, &low);
      check(nan ? std::isnan(high) && std::isnan(low) : high == most && low == least,
            "extrema of %ld bfloat16 [%s]: %g %g, not %g %g", long(n), kernels().isa, double(high), double(low), double(most),
            double(least));
    }
  }
}

inline void test_folds() {
  enum { kSum, kMax, kMin, kProd, kAnd, kOr, kXor };
  Random random;
  for (int64_t n : {int64_t(1), int64_t(3), int64_t(64), int64_t(129), int64_t(5000)}) {
    for (int64_t stride : {int64_t(1), int64_t(3), int64_t(-1), int64_t(0)}) {
      std::vector<float> x(size_t(3 * n + 4));
      for (float& v : x) v = float(random.uniform() + 0.5);
      const float* first = x.data() + (stride < 0 ? n - 1 : 0);
      double sum = 0.25, product = 1, largest = -INFINITY;
      for (int64_t i = 0; i < n; ++i) sum += first[i * stride], largest = std::max(largest, double(first[i * stride]));
      for (int64_t i = 0; i < std::min<int64_t>(n, 64); ++i) product *= first[i * stride];
      float narrow = 0.25f, most = -INFINITY;
      double wide = 0.25, wide_product = 1;
      kernels().fold(kSum, DType::kF32, false)(n, first, stride, &narrow);
      kernels().fold(kSum, DType::kF32, true)(n, first, stride, &wide);
      kernels().fold(kMax, DType::kF32, true)(n, first, stride, &most);
      kernels().fold(kProd, DType::kF32, true)(std::min<int64_t>(n, 64), first, stride, &wide_product);
      check(std::fabs(narrow - sum) <= 4e-7 * sum && std::fabs(wide - sum) <= 1e-13 * sum && most == float(largest) &&
                std::fabs(wide_product - product) <= 1e-13 * product,
            "fold n %ld stride %ld [%s]: %g %g (%g), %g (%g), %g (%g)", long(n), long(stride), kernels().isa, double(narrow), wide,
            sum, double(most), largest, wide_product, product);
      std::vector<double> row(size_t(n), 1.0);
      std::vector<float> row_min(size_t(n), 0.75f);
      kernels().fold_row(kSum, DType::kF32, true)(n, first, stride, row.data());
      kernels().fold_row(kMin, DType::kF32, false)(n, first, stride, row_min.data());
      size_t wrong = 0;
      for (int64_t i = 0; i < n; ++i)
        wrong += row[size_t(i)] != 1.0 + first[i * stride] || row_min[size_t(i)] != std::min(0.75f, first[i * stride]);
      check(wrong == 0, "fold_row n %ld stride %ld [%s]: %zu wrong", long(n), long(stride), kernels().isa, wrong);
    }
  }
  float values[] = {1, NAN, 3}, most = 0, least = 0;
  kernels().fold(kMax, DType::kF32, false)(3, values, 1, &most);
  kernels().fold(kMin, DType::kF32, false)(3, values, 1, &least);
  check(std::isnan(most) && std::isnan(least), "fold max/min of NaN: %g %g", double(most), double(least));
  for (float odd : {float(NAN), -float(NAN), -0.0f, 0.0f, -INFINITY, INFINITY, -2.0f, 7.0f})
    for (float rest : {-1.0f, -0.0f, 1.0f, -INFINITY, INFINITY})
      for (size_t at : {0, 1, 63, 64, 130, 199}) {
        std::vector<float> row(200, rest);
        row[at] = odd;
        float high = -INFINITY, low = INFINITY;
        kernels().fold(kMax, DType::kF32, false)(200, row.data(), 1, &high);
        kernels().fold(kMin, DType::kF32, false)(200, row.data(), 1, &low);
        const bool zeros = odd == 0 && rest == 0, negative = std::signbit(odd) || std::signbit(rest);
        const bool right = std::isnan(odd) ? std::isnan(high) && std::isnan(low)
                                           : high == std::max(odd, rest) && low == std::min(odd, rest) &&
                                                 (!zeros || (std::signbit(low) == negative &&
                                                             std::signbit(high) == (std::signbit(odd) && std::signbit(rest))));
        check(right, "fold max/min of %g among %g at %zu [%s]: %g %g", double(odd), double(rest), at, kernels().isa, double(high),
              double(low));
      }
  test_extrema_of_bfloat16();
  std::vector<int8_t> bytes(1000, int8_t(3));
  int8_t sum = 1, all = -1, parity = 0;
  kernels().fold(kSum, DType::kI8, false)(1000, bytes.data(), 1, &sum);
  kernels().fold(kAnd, DType::kI8, false)(1000, bytes.data(), 1, &all);
  kernels().fold(kXor, DType::kI8, false)(999, bytes.data(), 1, &parity);
  check(sum == int8_t(3001) && all == 3 && parity == 3, "int8 folds: %d %d %d", sum, all, parity);
  std::vector<uint8_t> flags(100, uint8_t(1));
  uint8_t every = 1, some = 0;
  flags[50] = 0;
  kernels().fold(kAnd, DType::kBool, false)(100, flags.data(), 1, &every);
  kernels().fold(kOr, DType::kBool, false)(100, flags.data(), 1, &some);
  check(every == 0 && some == 1, "bool folds: %d %d", every, some);
  check(kernels().fold(kAnd, DType::kF32, false) == nullptr && kernels().fold(7, DType::kF32, false) == nullptr, "undefined folds");
  std::vector<uint16_t> bf(1 << 16, uint16_t(0x3f80));  // 65536 ones, beyond what bf16 or f16 could count
  float ones = 0;
  kernels().fold(kSum, DType::kBF16, false)(1 << 16, bf.data(), 1, &ones);
  check(ones == 65536.0f, "bf16 sum of ones: %g", double(ones));
}

inline void test_pointwise() {
  test_integer<int8_t>();
  test_integer<int16_t>();
  test_integer<int32_t>();
  test_integer<int64_t>();
  test_integer<uint8_t>();
  test_integer<uint16_t>();
  test_integer<uint32_t>();
  test_integer<uint64_t>();
  test_floating<float>();
  test_floating<double>();
  test_saturation<int8_t>();
  test_saturation<int16_t>();
  test_saturation<int32_t>();
  test_saturation<int64_t>();
  test_saturation<uint8_t>();
  test_saturation<uint16_t>();
  test_saturation<uint32_t>();
  test_saturation<uint64_t>();
  test_remainder();
  test_reduce_precision();
  test_threefry();
  test_sixteen_bits();
  test_strides();
  test_folds();
}

}  // namespace kitsune::cpu::test
