// The last step of a sink: the sums of all strands are added up, in the order of the strands, and stored.
#pragma once

#include "executor_internal.h"

namespace kitsune::cpu {

constexpr int64_t kCombineChunk = 4096;  // elements of a sink combined by one job

// Elements [begin, end) of `sink`, which is one of the whole stream and not of segments. temp: kPrepTempBytes.
void combine_sums(const Plan& plan, int64_t sink, int64_t begin, int64_t end, const char* strands, char* array, char* temp);

}  // namespace kitsune::cpu
