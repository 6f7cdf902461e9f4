#include <algorithm>

#include "pipeline.h"

namespace kitsune::cpu {

Pipeline::Pipeline(const Plan& plan) : plan_(plan), tiles_(plan.program.tiles) {
  left_ = tiles_ * static_cast<int64_t>(plan.stages.size());
  reach_ = std::max<int64_t>(1, plan.strands);
  stages_.resize(plan.stages.size());
  slots_.resize(plan.program.queues.size());
  for (StageState& s : stages_) s.states.assign(static_cast<size_t>(plan.window), kIdle);
  for (size_t q = 0; q < slots_.size(); ++q) {
    int64_t depth = plan.program.queues[q].depth;
    reach_ = std::max(reach_, depth);
    for (int64_t i = 0; i < std::min(depth, tiles_); ++i) slots_[q].push_back({-1, i, 0});
  }
}

bool Pipeline::ready(int64_t s, int64_t position) const {
  const StagePlan& stage = plan_.stages[s];
  if (!stage.sinks.empty() && position >= plan_.strands) {
    int64_t before = position - plan_.strands;
    if (before >= stages_[s].low && stages_[s].states[before % plan_.window] != kDone) return false;
  }
  for (int64_t q : stage.inputs)
    if (slots_[q][position % plan_.program.queues[q].depth].full != position) return false;
  for (int64_t q : stage.outputs)
    if (slots_[q][position % plan_.program.queues[q].depth].next != position) return false;
  return true;
}

bool Pipeline::take(int64_t* stage, int64_t* position) {
  for (int64_t s : plan_.order) {
    StageState& st = stages_[s];
    int64_t end = std::min({tiles_, st.low + plan_.window, st.first_idle + reach_});
    for (int64_t p = st.first_idle; p < end; ++p) {
      if (state(s, p) != kIdle || !ready(s, p)) continue;
      state(s, p) = kRunning;
      while (st.first_idle < std::min(tiles_, st.low + plan_.window) && state(s, st.first_idle) != kIdle) ++st.first_idle;
      *stage = s;
      *position = p;
      return true;
    }
  }
  return false;
}

void Pipeline::complete(int64_t s, int64_t position) {
  StageState& st = stages_[s];
  state(s, position) = kDone;
  while (st.low < tiles_ && state(s, st.low) == kDone) state(s, st.low++) = kIdle;
  // A full window stops the search for the first idle position; it goes on where the window now begins.
  while (st.first_idle < std::min(tiles_, st.low + plan_.window) && state(s, st.first_idle) != kIdle) ++st.first_idle;
  st.first_idle = std::max(st.first_idle, st.low);
  for (int64_t q : plan_.stages[s].inputs) {
    int64_t depth = plan_.program.queues[q].depth;
    Slot& slot = slots_[q][position % depth];
    if (--slot.pending > 0) continue;
    slot.full = -1;
    slot.next = position + depth;
  }
  for (int64_t q : plan_.stages[s].outputs) {
    Slot& slot = slots_[q][position % plan_.program.queues[q].depth];
    slot.full = position;
    slot.next = -1;
    slot.pending = static_cast<int64_t>(plan_.program.queues[q].consumers.size());
  }
  --left_;
}

}  // namespace kitsune::cpu
