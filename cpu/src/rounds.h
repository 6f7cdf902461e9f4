// Rounds of units on a pool, with a barrier between two rounds: for work that is no tile program.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "kitsune_cpu/executor.h"

namespace kitsune::cpu {

// Calls unit(round, i) for every i < counts[round], round after round, on at most `workers` threads. `unit` must not throw. The
// caller takes part, and never waits for a task of the pool that has not started: such a task finds the work done and returns.
void run_rounds(Pool& pool, int64_t workers, std::vector<int64_t> counts, const std::function<void(size_t, int64_t)>& unit);

}  // namespace kitsune::cpu
