// The firing rule: which (stage, tile) of a program may run now. Bookkeeping only; the caller holds a lock.
//
// A stage may take a tile when all its input slots are full, its output slots are free and, if it folds into a sink, the tile
// before it in the same lane is done. Tiles go by *position* in the order of the program: position p is slot p % depth of every
// queue.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "executor_internal.h"

namespace kitsune::cpu {

// Lanes are runs of consecutive tiles; positions visit them in turn, so that several lanes are under way at once.
class LaneOrder {
 public:
  LaneOrder(int64_t tiles, int64_t lanes) : tiles_(tiles), lanes_(lanes) {}
  int64_t lane(int64_t position) const { return lanes_ == 0 ? 0 : position % lanes_; }
  int64_t tile(int64_t position) const { return lanes_ == 0 ? position : first_tile(position % lanes_) + position / lanes_; }
  int64_t first_tile(int64_t lane) const { return lane * (tiles_ / lanes_) + std::min(lane, tiles_ % lanes_); }

 private:
  int64_t tiles_, lanes_;
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
