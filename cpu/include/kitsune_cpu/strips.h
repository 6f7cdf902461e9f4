// Pointwise code that keeps values in vector registers: the interface between its planner (plan_strips.cc) and the kernels of an
// instruction set (kernels/strips.h).
//
// A strip is `KernelTable::strip` elements of 32 bits, kStripVectors vectors. An instruction works on a whole strip and jumps to
// the next one; the strip that it makes stays *held* in registers, where the next instruction may take it as an operand. Other
// operands lie in memory: strips, or vectors with one number in all lanes. A bool is a lane of ones or of zeros.
#pragma once

#include "kernels.h"

namespace kitsune::cpu {

constexpr int kStripVectors = 8;

enum class From : int8_t {
  kHeld,    // the strip that the instruction before this has left in registers
  kMemory,  // a strip
  kNumber,  // a vector whose lanes are equal
};
constexpr int kNumFrom = 3;

using StripFn = void (*)();  // of a type that the instruction set knows

struct StripInstruction {
  StripFn fn;
  int32_t operands[4];  // slots
  int32_t to, to2;      // slots, of what is written to memory
  VectorFn call;
  double imm[2];
  const float* table;  // of `tabled`
};

// Instructions that are no opcode's.
enum class StripKind : int8_t {
  kEnd,
  kLoad,          // held <- operands[0]
  kStore,         // to <- held
  kLoadBool,      // held <- the bytes of operands[0]
  kStoreBool,     // the bytes of `to` <- held
  kLoadBFloat16,  // held <- the 16-bit numbers of operands[0]
  kLoadFloat16,
  kStoreBFloat16,  // the 16-bit numbers of `to` <- held, rounded
  kStoreFloat16,
  kStoreExactBFloat16,  // the same of numbers that have no more bits
  kCall,                // to <- call(operands); nothing is held afterwards
  kSinCos,              // held <- sin(operands[0]); to2 <- cos(operands[0])
  kPick,                // held <- elements of the window operands[0], as the PickTable operands[1] says
  kPickOne,             // the same, where the lanes of each vector are one element
  kSum,                 // the doubles of `to` <- themselves + held, as the SumPlace `to2` says; the strip stays held
};

// Which accumulators the elements of a strip are added to: element k to number (first + k) % period. `first` and `period` are
// multiples of a vector's lanes. Elements from `elements` on are added to none.
struct SumPlace {
  int64_t elements, first, period;
};

// Which elements of a window the lanes of a strip are: `strip` places, counted from the first element that their vector picks, then
// for each vector that first element, and a bit for each element from there on that it reads.
struct PickTable {
  const int32_t *place, *first, *read;
  PickTable(const void* table, int64_t strip)
      : place(static_cast<const int32_t*>(table)), first(place + strip), read(first + kStripVectors) {}
};

struct StripKernels {
  int64_t strip;  // elements
  // nullptr: there is no such instruction, and a kCall may do. `from`: of each operand.
  StripFn (*of)(Opcode, DType, const From* from);
  StripFn (*convert)(DType to, DType type, From from);
  StripFn (*special)(StripKind);
  // held <- operands[0] / operands[1], which is a constant with factors imm[0] and imm[1] (reciprocal.h). nullptr: there is none.
  StripFn (*divide_by_constant)(From);
  // held <- table[the bits of operands[0]], whose numbers all are of the type `narrow` (kBF16 or kF16).
  StripFn (*tabled)(DType narrow, From);
  // Runs instructions up to a kEnd; `at`: where each slot is; `vectors`: how many vectors of the strip anybody looks at.
  void (*run)(const StripInstruction*, char* const* at, int64_t vectors);
};

}  // namespace kitsune::cpu
