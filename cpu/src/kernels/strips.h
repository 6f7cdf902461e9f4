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

// ---- lookup

template <class Op>
StripFn unary_from(From a) {
  constexpr Threaded kAll[] = {&unary<Op, From::kHeld>, &unary<Op, From::kMemory>, &unary<Op, From::kNumber>};
  return reinterpret_cast<StripFn>(kAll[int(a)]);
}

template <class Op>
StripFn function_from(From a) {
  constexpr Threaded kAll[] = {&function<Op, From::kHeld>, &function<Op, From::kMemory>, &function<Op, From::kNumber>};
  return reinterpret_cast<StripFn>(kAll[int(a)]);
}

template <class Op, From A>
Threaded binary_from(From b) {
  constexpr Threaded kAll[] = {&binary<Op, A, From::kHeld>, &binary<Op, A, From::kMemory>, &binary<Op, A, From::kNumber>};
  return kAll[int(b)];
}

template <class Op>
StripFn binary_from(const From* from) {
  switch (from[0]) {
    case From::kHeld: return reinterpret_cast<StripFn>(binary_from<Op, From::kHeld>(from[1]));
    case From::kMemory: return reinterpret_cast<StripFn>(binary_from<Op, From::kMemory>(from[1]));
    default: return reinterpret_cast<StripFn>(binary_from<Op, From::kNumber>(from[1]));
  }
}

template <class Op, From A, From B>
Threaded ternary_from(From c) {
  constexpr Threaded kAll[] = {&ternary<Op, A, B, From::kHeld>, &ternary<Op, A, B, From::kMemory>,
                               &ternary<Op, A, B, From::kNumber>};
  return kAll[int(c)];
}

template <class Op, From A>
Threaded ternary_from(From b, From c) {
  switch (b) {
    case From::kHeld: return ternary_from<Op, A, From::kHeld>(c);
    case From::kMemory: return ternary_from<Op, A, From::kMemory>(c);
    default: return ternary_from<Op, A, From::kNumber>(c);
  }
}

template <class Op>
StripFn ternary_from(const From* from) {
  switch (from[0]) {
    case From::kHeld: return reinterpret_cast<StripFn>(ternary_from<Op, From::kHeld>(from[1], from[2]));
    case From::kMemory: return reinterpret_cast<StripFn>(ternary_from<Op, From::kMemory>(from[1], from[2]));
    default: return reinterpret_cast<StripFn>(ternary_from<Op, From::kNumber>(from[1], from[2]));
  }
}

inline StripFn division(const From* from) {
#if defined(__AVX512F__)
  if (from[1] == From::kNumber && from[0] == From::kHeld) return reinterpret_cast<StripFn>(&divide_by_number<From::kHeld, false>);
  if (from[1] == From::kNumber && from[0] == From::kMemory)
    return reinterpret_cast<StripFn>(&divide_by_number<From::kMemory, false>);
#endif
  return binary_from<DivF>(from);
}

inline StripFn division_by_constant(From a) {
#if defined(__AVX512F__)
  if (a == From::kHeld) return reinterpret_cast<StripFn>(&divide_by_constant<From::kHeld>);
  if (a == From::kMemory) return reinterpret_cast<StripFn>(&divide_by_constant<From::kMemory>);
#endif
  (void)a;
  return nullptr;
}

inline StripFn float_instruction(Opcode op, const From* from) {
  switch (op) {
    case Opcode::op_neg: return unary_from<NegF>(from[0]);
    case Opcode::op_abs: return unary_from<AbsF>(from[0]);
    case Opcode::op_sign: return unary_from<SignF>(from[0]);
    case Opcode::op_is_finite: return unary_from<IsFiniteF>(from[0]);
    case Opcode::op_sqrt: return unary_from<SqrtF>(from[0]);
    case Opcode::op_rsqrt: return unary_from<RsqrtF>(from[0]);
    case Opcode::op_exp: return function_from<ExpF>(from[0]);
    case Opcode::op_square: return unary_from<SquareF>(from[0]);
    case Opcode::op_add: return binary_from<AddF>(from);
    case Opcode::op_sub: return binary_from<SubF>(from);
    case Opcode::op_mul: return binary_from<MulF>(from);
    case Opcode::op_div: return division(from);
    case Opcode::op_max: return binary_from<ExtremumF<true>>(from);
    case Opcode::op_min: return binary_from<ExtremumF<false>>(from);
    case Opcode::op_eq: return binary_from<EqF>(from);
    case Opcode::op_ne: return binary_from<NeF>(from);
    case Opcode::op_lt: return binary_from<LtF>(from);
    case Opcode::op_le: return binary_from<LeF>(from);
    case Opcode::op_gt: return binary_from<GtF>(from);
    case Opcode::op_ge: return binary_from<GeF>(from);
    case Opcode::op_clamp: return ternary_from<ClampF>(from);
    default: return nullptr;
  }
}

// Integers of 32 bits.
inline StripFn integer_instruction(Opcode op, bool is_signed, const From* from) {
  switch (op) {
    case Opcode::op_neg: return unary_from<NegI>(from[0]);
    case Opcode::op_abs: return is_signed ? unary_from<AbsI>(from[0]) : unary_from<Same>(from[0]);
    case Opcode::op_not: return unary_from<NotI>(from[0]);
    case Opcode::op_add: return binary_from<AddI>(from);
    case Opcode::op_sub: return binary_from<SubI>(from);
    case Opcode::op_mul: return binary_from<MulI>(from);
    case Opcode::op_mulhi: return is_signed ? binary_from<MulHighI<true>>(from) : binary_from<MulHighI<false>>(from);
    case Opcode::op_and: return binary_from<AndI>(from);
    case Opcode::op_or: return binary_from<OrI>(from);
    case Opcode::op_xor: return binary_from<XorI>(from);
    case Opcode::op_shift_left: return binary_from<ShiftLeftI>(from);
    case Opcode::op_shift_right_logical: return binary_from<ShiftRightLogicalI>(from);
    case Opcode::op_shift_right_arithmetic: return binary_from<ShiftRightArithmeticI>(from);
    case Opcode::op_max: return is_signed ? binary_from<MaxI>(from) : binary_from<MaxU>(from);
    case Opcode::op_min: return is_signed ? binary_from<MinI>(from) : binary_from<MinU>(from);
    case Opcode::op_eq: return binary_from<EqI>(from);
    case Opcode::op_ne: return binary_from<NeI>(from);
    case Opcode::op_lt: return is_signed ? binary_from<LtI>(from) : binary_from<LtU>(from);
    case Opcode::op_le: return is_signed ? binary_from<LeI>(from) : binary_from<LeU>(from);
    case Opcode::op_gt: return is_signed ? binary_from<GtI>(from) : binary_from<GtU>(from);
    case Opcode::op_ge: return is_signed ? binary_from<GeI>(from) : binary_from<GeU>(from);
    case Opcode::op_clamp: return is_signed ? ternary_from<ClampI>(from) : ternary_from<ClampU>(from);
    default: return nullptr;
  }
}

inline StripFn bool_instruction(Opcode op, const From* from) {
  switch (op) {
    case Opcode::op_not: return unary_from<NotI>(from[0]);
    case Opcode::op_and:
    case Opcode::op_mul:
    case Opcode::op_min: return binary_from<AndI>(from);
    case Opcode::op_or:
    case Opcode::op_add:
    case Opcode::op_max: return binary_from<OrI>(from);
    case Opcode::op_xor:
    case Opcode::op_ne: return binary_from<XorI>(from);
    case Opcode::op_eq: return binary_from<SameB>(from);
    default: return nullptr;
  }
}

inline StripFn instruction(Opcode op, DType type, const From* from) {
  if (op == Opcode::op_select) return item_size(type) == 4 || type == DType::kBool ? ternary_from<Select>(from) : nullptr;
  if (op == Opcode::op_bitcast) return item_size(type) == 4 ? unary_from<Same>(from[0]) : nullptr;
  switch (type) {
    case DType::kF32: return float_instruction(op, from);
    case DType::kI32: return integer_instruction(op, true, from);
    case DType::kU32: return integer_instruction(op, false, from);
    case DType::kBool: return bool_instruction(op, from);
    default: return nullptr;
  }
}

inline StripFn conversion(DType to, DType type, From from) {
  const bool integer = to == DType::kI32 || to == DType::kU32, of_integer = type == DType::kI32 || type == DType::kU32;
  if (type == DType::kBool) return to == DType::kF32 ? unary_from<BoolToF>(from) : integer ? unary_from<BoolToI>(from) : nullptr;
  if (to == DType::kBool) return type == DType::kF32 ? unary_from<FToBool>(from) : of_integer ? unary_from<IToBool>(from) : nullptr;
  if (integer && of_integer) return unary_from<Same>(from);
  if (to != DType::kF32) return nullptr;
  return type == DType::kI32 ? unary_from<IToF>(from) : type == DType::kU32 ? unary_from<UToF>(from) : nullptr;
}

inline StripFn special(StripKind kind) {
  switch (kind) {
    case StripKind::kEnd: return reinterpret_cast<StripFn>(&end);
    case StripKind::kLoad: return unary_from<Same>(From::kMemory);
    case StripKind::kStore: return reinterpret_cast<StripFn>(&store);
    case StripKind::kLoadBool: return reinterpret_cast<StripFn>(&load_bool);
    case StripKind::kStoreBool: return reinterpret_cast<StripFn>(&store_bool);
    case StripKind::kCall: return reinterpret_cast<StripFn>(&call);
    case StripKind::kSinCos: return reinterpret_cast<StripFn>(&sin_cos);
  }
  return nullptr;
}

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
