// A Vector program as instructions of strips: what the planning half (plan_strips.cc) hands to the running half (run_strips.cc).
#pragma once

#include "executor_internal.h"
#include "executor_memory.h"
#include "kitsune_cpu/strips.h"
#include "strip_rows.h"

namespace kitsune::cpu {

// Where operands of instructions are: slots [0, constants), then buffers of the worker, then one for each load and store, which is
// the strip at hand in the operand's memory, or a buffer where that is not dense, or not of the register's type.
struct StripOperand {
  Address address;
  int64_t item = 0;  // bytes
  bool used = false;
  bool direct = false;  // instructions may work in the operand's memory
  bool number = false;  // a load of one number along the innermost loop
  bool spread = false;  // of such a number: somebody reads it as a whole strip
  RowsOperand rows;     // in strips of short rows
  DType type{};         // of the register
  int32_t slot = 0;
  Loader load{};
  Storer store{};
};

struct StripIndex {
  DType type;
  int32_t slot;
  int dim;      // of the nest; -1: it does not move inside the Vector
  int64_t tag;  // Micro.a: 0 counts from the stream's first row, negative ones are loops around
  int64_t divisor, modulus;
};

struct StripPlan {
  Nest nest;         // the last dimension is cut into strips
  int64_t step = 0;  // elements of each
  int64_t row = 1;   // elements of the short rows that they are made of
  std::vector<StripOperand> loads, stores;
  std::vector<StripIndex> indices;
  std::vector<StripInstruction> code;
  std::vector<Block> constants;
  std::vector<std::shared_ptr<const float>> tables;
  int32_t buffers = 0;
  const StripKernels* kernels = nullptr;
};

// The plan of `x`, or nothing where it has operations that strips do not have, or loops too short for them. `whole`: of tiles that
// have all their rows.
std::optional<StripPlan> plan_strips(const Vector& x, const Compile& c, bool whole);

std::unique_ptr<const Step> run_strips(StripPlan plan);

}  // namespace kitsune::cpu
