// The firing rule: which (stage, tile) of a program may run now. Bookkeeping only; the caller holds a lock.
//
// A stage may take a tile when all its input slots are full, its output slots are free and, if it folds into a sink, the tile
// before it in the same strand is done. Tiles go by *position* in the order of the program: position p is slot p % depth of every
// queue.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "executor_internal.h"

namespace kitsune::cpu {

// Strands are runs of consecutive tiles, `unit` of which are never in two; positions visit them in turn, so that several strands
// are under way at once. Where tiles are asked for by position, the units are shared out evenly.
class StrandOrder {
 public:
  explicit StrandOrder(const Plan& plan) : StrandOrder(plan.program.tiles, plan.strands, plan.strand_unit) {}
  StrandOrder(int64_t tiles, int64_t strands, int64_t unit = 1) : units_(tiles / unit), strands_(strands), unit_(unit) {}
  int64_t strand(int64_t position) const { return strands_ == 0 ? 0 : position % strands_; }
  int64_t tile(int64_t position) const { return strands_ == 0 ? position : first_tile(position % strands_) + position / strands_; }
  int64_t first_tile(int64_t strand) const { return unit_ * (strand * (units_ / strands_) + std::min(strand, units_ % strands_)); }

 private:
  int64_t units_, strands_, unit_;
};

class Pipeline {
 public:
  explicit Pipeline(const Plan& plan);
  // Finds a stage and a position that may run, and marks them as running.
  bool take(int64_t* stage, int64_t* position);
  void complete(int64_t stage, int64_t position);
  bool finished() const { return left_ == 0; }

 private:
  enum State : uint8_t { kIdle, kRunning, kDone };
  struct StageState {
    int64_t low = 0;            // first position not done
    int64_t first_idle = 0;     // first position not started
    std::vector<State> states;  // of positions [low, low + window), by position % window
  };
  struct Slot {
    int64_t full = -1;  // the position it holds
    int64_t next;       // the position that may write it
    int64_t pending = 0;
  };
  bool ready(int64_t stage, int64_t position) const;
  State& state(int64_t s, int64_t position) { return stages_[s].states[position % plan_.window]; }

  const Plan& plan_;
  int64_t tiles_, left_, reach_;
  std::vector<StageState> stages_;        // by stage
  std::vector<std::vector<Slot>> slots_;  // by queue
};

}  // namespace kitsune::cpu
