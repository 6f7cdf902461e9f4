// The order of a stream by ids: a stable sort of positions, as a radix sort of counted digits. Nothing here depends on XLA.
#pragma once

#include <cstdint>
#include <string>

#include "kitsune_cpu/executor.h"

namespace kitsune::cpu {

constexpr int64_t kMostOrdered = INT32_MAX;     // positions are int32
constexpr int64_t kMostOrderKeys = UINT32_MAX;  // n: a key is an id, or n

// out[0..rows) <- the positions 0..rows-1 by their id: those of equal ids in their own order, those of ids outside of [0, n) last.
// `type`, of the ids, is an integer type; rows <= kMostOrdered, n <= kMostOrderKeys. Takes memory in proportion to the rows. Any
// number of threads gives the same result. Returns an empty string, or what went wrong (out of memory).
std::string order_by(DType type, const void* ids, int64_t rows, int64_t n, int32_t* out, Pool& pool);

}  // namespace kitsune::cpu
