// The instructions of strips (kitsune_cpu/strips.h). Each is a function that takes the held strip as arguments, which calling
// conventions pass in vector registers, and ends with a call of the next one, of which compilers make a jump.
#pragma once

#include "kitsune_cpu/strips.h"
#include "strip_ops.h"

namespace kitsune::cpu::KITSUNE_ISA::strips {

#define KITSUNE_HELD VF v0, VF v1, VF v2, VF v3, VF v4, VF v5, VF v6, VF v7
#define KITSUNE_FIRST(f) f(0) f(1) f(2) f(3)
#define KITSUNE_SECOND(f) f(4) f(5) f(6) f(7)
#define KITSUNE_EACH(f) KITSUNE_FIRST(f) KITSUNE_SECOND(f)
using Threaded = void (*)(const StripInstruction*, char* const*, int64_t, KITSUNE_HELD);
#define KITSUNE_NEXT return reinterpret_cast<Threaded>(i[1].fn)(i + 1, at, vectors, v0, v1, v2, v3, v4, v5, v6, v7)
#define KITSUNE_INSTRUCTION(name) void name(const StripInstruction* i, char* const* at, int64_t vectors, KITSUNE_HELD)

static_assert(kStripVectors == 8, "the held strip is eight arguments");

// Of one number only its first lane is there. As bits: lanes may be integers.
KITSUNE_INLINE VF number(const char* p) {
  int32_t bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return (VF)splat<VI>(bits);
}

template <From F, int K>
KITSUNE_INLINE VF operand(VF held, const char* memory, VF one) {
  if constexpr (F == From::kHeld) return held;
  if constexpr (F == From::kMemory) return load_vector<VF>(memory + K * kVectorBytes);
  return one;
}

template <class Op, From A>
KITSUNE_INSTRUCTION(unary) {
  const char* a = A == From::kHeld ? nullptr : at[i->operands[0]];
  const VF one = A == From::kNumber ? number(a) : VF{};
#define KITSUNE_LANE(k) v##k = Op::apply(operand<A, k>(v##k, a, one));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// Of a function that takes long: the second half of a strip whose vectors nobody looks at stays as it is.
template <class Op, From A>
KITSUNE_INSTRUCTION(function) {
  const char* a = A == From::kHeld ? nullptr : at[i->operands[0]];
  const VF one = A == From::kNumber ? number(a) : VF{};
#define KITSUNE_LANE(k) v##k = Op::apply(operand<A, k>(v##k, a, one));
  KITSUNE_FIRST(KITSUNE_LANE)
  if (vectors > kStripVectors / 2) {
    KITSUNE_SECOND(KITSUNE_LANE)
  }
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// The results of numbers that `Round` leaves as they are, by table.
template <class Round, From A>
KITSUNE_INSTRUCTION(tabled) {
  const char* a = A == From::kHeld ? nullptr : at[i->operands[0]];
  const VF one = A == From::kNumber ? number(a) : VF{};
  const float* table = i->table;
#define KITSUNE_LANE(k) v##k = look_up(table, Round::bits_of_exact(operand<A, k>(v##k, a, one)));
  KITSUNE_FIRST(KITSUNE_LANE)
  if (vectors > kStripVectors / 2) {
    KITSUNE_SECOND(KITSUNE_LANE)
  }
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

template <class Op, From A, From B>
KITSUNE_INSTRUCTION(binary) {
  const char *a = A == From::kHeld ? nullptr : at[i->operands[0]], *b = B == From::kHeld ? nullptr : at[i->operands[1]];
  const VF one_a = A == From::kNumber ? number(a) : VF{}, one_b = B == From::kNumber ? number(b) : VF{};
#define KITSUNE_LANE(k) v##k = Op::apply(operand<A, k>(v##k, a, one_a), operand<B, k>(v##k, b, one_b));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

template <class Op, From A, From B, From C>
KITSUNE_INSTRUCTION(ternary) {
  const char *a = A == From::kHeld ? nullptr : at[i->operands[0]], *b = B == From::kHeld ? nullptr : at[i->operands[1]],
             *c = C == From::kHeld ? nullptr : at[i->operands[2]];
  const VF one_a = A == From::kNumber ? number(a) : VF{}, one_b = B == From::kNumber ? number(b) : VF{},
           one_c = C == From::kNumber ? number(c) : VF{};
#define KITSUNE_LANE(k) \
  v##k = Op::apply(operand<A, k>(v##k, a, one_a), operand<B, k>(v##k, b, one_b), operand<C, k>(v##k, c, one_c));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// ---- instructions of their own

inline KITSUNE_INSTRUCTION(end) {
  (void)i, (void)at, (void)vectors;
  (void)v0, (void)v1, (void)v2, (void)v3, (void)v4, (void)v5, (void)v6, (void)v7;
#if defined(__AVX__)
  // Compilers do this where a function returns, but not where it ends with a jump or takes vectors. Without it the SSE code of the
  // caller would wait for the upper parts of its registers: the next row's addresses for the memory that the last one was read
  // from.
  _mm256_zeroupper();
#endif
}

inline KITSUNE_INSTRUCTION(store) {
  char* to = at[i->to];
#define KITSUNE_LANE(k) store_vector(to + k * kVectorBytes, v##k);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// kFloats bytes of bools as lanes of ones or zeros, and back.
KITSUNE_INLINE VI load_bools(const char* p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)) != 0;
#elif defined(__AVX2__)
  return (VI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)) != 0;
#else
  VI x;
  for (int k = 0; k < kFloats; ++k) x[k] = p[k];
  return x != 0;
#endif
}

KITSUNE_INLINE void store_bools(char* p, VI x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)(x & 1)));
#else
  for (int k = 0; k < kFloats; ++k) p[k] = char(x[k] & 1);
#endif
}

inline KITSUNE_INSTRUCTION(load_bool) {
  const char* from = at[i->operands[0]];
#define KITSUNE_LANE(k) v##k = (VF)load_bools(from + k * kFloats);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(store_bool) {
  char* to = at[i->to];
#define KITSUNE_LANE(k) store_bools(to + k * kFloats, (VI)v##k);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// kFloats numbers of 16 bits as floats, and their bits back: without a pass over memory of their own.
using Bits16 = VectorOf<uint16_t, kFloats * 2>::type;

template <class Narrow>
KITSUNE_INLINE VF load_narrow(const char* p) {
  if constexpr (kSame<Narrow, BFloat16>) return (VF)(__builtin_convertvector(load_vector<Bits16>(p), VU) << 16);
#if defined(__AVX512F__)
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(KITSUNE_NEON)
  return (VF)vcvt_f32_f16((float16x4_t)load_vector<Bits16>(p));
#else
  VF v;
  for (int k = 0; k < kFloats; ++k) v[k] = to_float(reinterpret_cast<const Half*>(p)[k]);
  return v;
#endif
}

template <class Narrow>
KITSUNE_INSTRUCTION(load_16) {
  const char* from = at[i->operands[0]];
#define KITSUNE_LANE(k) v##k = load_narrow<Narrow>(from + k * kFloats * 2);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// Exact: the numbers have no more bits.
template <class Round, bool kExact>
KITSUNE_INSTRUCTION(store_16) {
  char* to = at[i->to];
#define KITSUNE_LANE(k) \
  store_vector(to + k * kFloats * 2, __builtin_convertvector(kExact ? Round::bits_of_exact(v##k) : Round::bits(v##k), Bits16));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

KITSUNE_INLINE void add_to(double* to, VF v) {
  store_vector(to, load_vector<VD>(to) + widen(low_half(v)));
  store_vector(to + kDoubles, load_vector<VD>(to + kDoubles) + widen(high_half(v)));
}

// A strip that has not all its elements.
KITSUNE_ONCE void add_in_part(double* sums, const SumPlace& place, const float* x) {
  int64_t at = place.first;
  for (int64_t k = 0; k < place.elements; ++k) {
    sums[at] += x[k];
    if (++at == place.period) at = 0;
  }
}

// A whole one that lies across their end.
KITSUNE_ONCE void add_in_turn(double* sums, const SumPlace& place, const float* x) {
  int64_t at = place.first;
  for (int64_t k = 0; k < kStripVectors; ++k) {
    add_to(sums + at, load_vector<VF>(x + k * kFloats));
    at += kFloats;
    if (at == place.period) at = 0;
  }
}

// The strips that `sum` leaves: in a function of its own, because memory for a strip would cost each call of `sum` a frame.
KITSUNE_ONCE KITSUNE_INSTRUCTION(sum_in_pieces) {
  double* sums = reinterpret_cast<double*>(at[i->to]);
  SumPlace place;
  __builtin_memcpy(&place, at[i->to2], sizeof place);
  alignas(kVectorBytes) float x[kStripVectors * kFloats];
#define KITSUNE_LANE(k) store_vector(x + k * kFloats, v##k);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  if (place.elements == kStripVectors * kFloats)
    add_in_turn(sums, place, x);
  else
    add_in_part(sums, place, x);
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(sum) {
  double* sums = reinterpret_cast<double*>(at[i->to]);
  const SumPlace& place = *reinterpret_cast<const SumPlace*>(at[i->to2]);
  if (__builtin_expect(place.elements != kStripVectors * kFloats, 0))
    return sum_in_pieces(i, at, vectors, v0, v1, v2, v3, v4, v5, v6, v7);
  if (place.period == kFloats) {  // all vectors lie on the same accumulators, and are added to each other first
    auto pair = [](VF x, VF y, auto half) { return widen(half(x)) + widen(half(y)); };
    auto all = [&](auto half) { return (pair(v0, v1, half) + pair(v2, v3, half)) + (pair(v4, v5, half) + pair(v6, v7, half)); };
    store_vector(sums, load_vector<VD>(sums) + all([](VF x) { return low_half(x); }));
    store_vector(sums + kDoubles, load_vector<VD>(sums + kDoubles) + all([](VF x) { return high_half(x); }));
    KITSUNE_NEXT;
  }
  if (__builtin_expect(place.first + kStripVectors * kFloats > place.period, 0))
    return sum_in_pieces(i, at, vectors, v0, v1, v2, v3, v4, v5, v6, v7);
  sums += place.first;
#define KITSUNE_LANE(k) add_to(sums + k * kFloats, v##k);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(call) {
  auto value = [&](int k) { return at[i->operands[k]]; };
  i->call(vectors * kFloats, at[i->to], value(0), value(1), value(2), value(3), i->imm);
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(sin_cos) {
  const char* x = at[i->operands[0]];
  char *sine = at[i->to], *cosine = at[i->to2];
  for (int64_t k = 0; k < vectors * kVectorBytes; k += kVectorBytes) {
    VF s, c;
    sin_and_cos(load_vector<VF>(x + k), &s, &c);
    store_vector(sine + k, s);
    store_vector(cosine + k, c);
  }
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(pick) {
  const char* from = at[i->operands[0]];
  const PickTable table(at[i->operands[1]], kStripVectors * kFloats);
  auto vector = [&](int k) {
    const float* first = reinterpret_cast<const float*>(from) + table.first[k];
#if defined(__AVX512F__)
    const __m512 window = _mm512_maskz_loadu_ps(__mmask16(table.read[k]), first);
    return (VF)_mm512_permutexvar_ps(_mm512_loadu_si512(table.place + k * kFloats), window);
#else
    VF x;
    for (int j = 0; j < kFloats; ++j) x[j] = first[table.place[k * kFloats + j]];
    return x;
#endif
  };
#define KITSUNE_LANE(k) v##k = vector(k);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

inline KITSUNE_INSTRUCTION(pick_one) {
  const char* from = at[i->operands[0]];
  const PickTable table(at[i->operands[1]], kStripVectors * kFloats);
#define KITSUNE_LANE(k) v##k = number(from + table.first[k] * int64_t(sizeof(float)));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

#if defined(__AVX512F__)
// By one number, faster than by dividing; what it has not the bits of is left to the next of its kinds, which takes longer.
template <From A, bool kZeros>
KITSUNE_INSTRUCTION(divide_by_number) {
  const char* a = A == From::kHeld ? nullptr : at[i->operands[0]];
  const VF y = number(at[i->operands[1]]);
  const Inverse inverse(y);
  __mmask16 right = 0xffff;
#define KITSUNE_LANE(k) const VF q##k = inverse.divide<kZeros>(operand<A, k>(v##k, a, y), &right);
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  if (__builtin_expect(right != 0xffff || !inverse.moderate, 0)) {
    constexpr Threaded kNext = kZeros ? &binary<DivF, A, From::kNumber> : &divide_by_number<A, true>;
    return kNext(i, at, vectors, v0, v1, v2, v3, v4, v5, v6, v7);
  }
#define KITSUNE_LANE(k) v##k = q##k;
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}

// By a constant, with the factors that reciprocal.h has found for it. The least of eight magnitudes says whether they were all
// large enough; NaN is none, and right.
template <From A>
KITSUNE_INSTRUCTION(divide_by_constant) {
  const char* a = A == From::kHeld ? nullptr : at[i->operands[0]];
  const __m512 high = _mm512_set1_ps(float(i->imm[0])), low = _mm512_set1_ps(float(i->imm[1]));
#define KITSUNE_LANE(k) \
  const __m512 x##k = (__m512)operand<A, k>(v##k, a, v##k), q##k = _mm512_fmadd_ps(x##k, high, _mm512_mul_ps(x##k, low));
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  auto less = [](__m512 x, __m512 y) { return _mm512_range_ps(x, y, 0b1010); };
  const __m512 least = less(less(less(q0, q1), less(q2, q3)), less(less(q4, q5), less(q6, q7)));
  if (__builtin_expect(_mm512_cmp_ps_mask(least, _mm512_set1_ps(0x1p-60f), _CMP_GE_OQ) != 0xffff, 0))
    return divide_by_number<A, true>(i, at, vectors, v0, v1, v2, v3, v4, v5, v6, v7);
#define KITSUNE_LANE(k) v##k = (VF)q##k;
  KITSUNE_EACH(KITSUNE_LANE)
#undef KITSUNE_LANE
  KITSUNE_NEXT;
}
#endif

inline void run(const StripInstruction* i, char* const* at, int64_t vectors) {
  const VF v{};
  reinterpret_cast<Threaded>(i->fn)(i, at, vectors, v, v, v, v, v, v, v, v);
}

#undef KITSUNE_NEXT
#undef KITSUNE_INSTRUCTION
#undef KITSUNE_EACH
#undef KITSUNE_SECOND
#undef KITSUNE_FIRST
#undef KITSUNE_HELD

}  // namespace kitsune::cpu::KITSUNE_ISA::strips
