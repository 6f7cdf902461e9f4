// Which instruction of strips (strips.h) an operation is, by its operands' types and by where they are.
#pragma once

#include "strips.h"

namespace kitsune::cpu::KITSUNE_ISA::strips {

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

template <class Round>
StripFn tabled_from(From a) {
  constexpr Threaded kAll[] = {&tabled<Round, From::kHeld>, &tabled<Round, From::kMemory>, &tabled<Round, From::kNumber>};
  return reinterpret_cast<StripFn>(kAll[int(a)]);
}

inline StripFn table_instruction(DType narrow, From a) {
  return narrow == DType::kBF16 ? tabled_from<ToBFloat16>(a) : tabled_from<ToFloat16>(a);
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
    case Opcode::op_to_float16: return unary_from<ToFloat16>(from[0]);
    case Opcode::op_to_bfloat16: return unary_from<ToBFloat16>(from[0]);
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
    case StripKind::kLoadBFloat16: return reinterpret_cast<StripFn>(&load_16<BFloat16>);
    case StripKind::kLoadFloat16: return reinterpret_cast<StripFn>(&load_16<Half>);
    case StripKind::kStoreBFloat16: return reinterpret_cast<StripFn>(&store_16<ToBFloat16, false>);
    case StripKind::kStoreFloat16: return reinterpret_cast<StripFn>(&store_16<ToFloat16, false>);
    case StripKind::kStoreExactBFloat16: return reinterpret_cast<StripFn>(&store_16<ToBFloat16, true>);
    case StripKind::kCall: return reinterpret_cast<StripFn>(&call);
    case StripKind::kSinCos: return reinterpret_cast<StripFn>(&sin_cos);
    case StripKind::kPick: return reinterpret_cast<StripFn>(&pick);
    case StripKind::kPickOne: return reinterpret_cast<StripFn>(&pick_one);
    case StripKind::kSum: return reinterpret_cast<StripFn>(&sum);
  }
  return nullptr;
}

}  // namespace kitsune::cpu::KITSUNE_ISA::strips
