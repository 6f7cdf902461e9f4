// Parts of a call that run together: tiles of several programs as the units of one round.
//
// The updates of a training step are a part for each parameter. Alone, most of them are too short to wake a thread for, and each of
// the others ends with a barrier.
#pragma once

#include <memory>
#include <vector>

#include "executor_internal.h"

namespace kitsune::cpu {

// The ends of the groups that the parts of `call` run in, in order. Parts of a group are neighbours in one phase, so none reads
// what another writes (the checker), and each is nothing but tiles of one stage.
std::vector<size_t> groups_of(const Call& call, const std::vector<std::unique_ptr<const Plan>>& plans);

// One part of a group, and its arrays.
struct Member {
  const Plan* plan;
  std::vector<char*> ins, outs;
};

// Runs a group once; the result is as that of Executable::run.
std::string run_together(const std::vector<Member>& members, const char* name, Pool& pool);

}  // namespace kitsune::cpu
