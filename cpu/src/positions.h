// Positions in a loop, as the operation `index` counts them.
#pragma once

#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu {

// to[m][n] <- (p // divisor) % modulus. `along`: p counts up from `position` in each row; else it is `position` + r `step` in all
// of row r.
void count_positions(DType type, char* to, int64_t m, int64_t n, int64_t position, int64_t step, bool along, int64_t divisor,
                     int64_t modulus);

}  // namespace kitsune::cpu
