// Tables of activations whose operand is rounded to 16 bits: the results of all 65 536 operands, made once in a process.
#pragma once

#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu {

// An activation of sums that are rounded to `rounds` (kBF16 or kF16). `coarse`: its results are stored in bfloat16.
struct RoundedActivation {
  Activation kind;
  float a, b;
  DType rounds;
  bool coarse;
};

// to[i] = the activation of from[i], i < n: whole vectors of the instruction set that it is compiled for.
using EvaluateRounded = void (*)(const RoundedActivation& of, int64_t n, const float* from, float* to);

// 65 536 floats: element i is the result for the operand whose bits are i. The pointer stays valid. nullptr where 64 other tables
// (256 KB each) exist or there is no memory for this one: then `evaluate` gives the same numbers.
const float* activation_table(const RoundedActivation& of, EvaluateRounded evaluate);

}  // namespace kitsune::cpu
