#include "executor_together.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "executor_memory.h"
#include "rounds.h"

namespace kitsune::cpu {
namespace {

constexpr size_t kMostTemporary = size_t{1} << 20;  // of a thread, which keeps it
constexpr double kAskNs = 1000;                     // for handing the pool a task

bool is_tiles_alone(const Plan& plan) {
  const Program& p = plan.program;
  return plan.stages.size() == 1 && plan.sinks.empty() && plan.preps.empty() && plan.packed_slots == 0 && p.queues.empty() &&
         p.batch_axes == 0 && plan.scratch_bytes <= kMostTemporary;
}

void run_tile(const Member& m, int64_t tile) {
  const Plan& plan = *m.plan;
  const Program& p = plan.program;
  char* scratch = thread_scratch(plan.scratch_bytes);
  int64_t batch[kMaxLoopDims] = {}, loops[kMaxLoops] = {};
  Context c{};
  c.row0 = c.first_row = tile * p.tile_rows;
  c.rows = std::min(p.tile_rows, p.batch_rows - c.row0);
  c.batch = batch;
  c.loops = loops;
  c.ins = m.ins.data();
  c.outs = m.outs.data();
  c.scratch = scratch;
  c.packed = scratch + plan.packed_offset;
  c.temp = scratch + plan.temp_offset;
  for (const auto& step : plan.stages[0].steps) step->run(c);
}

}  // namespace

std::vector<size_t> groups_of(const Call& call, const std::vector<std::unique_ptr<const Plan>>& plans) {
  std::vector<size_t> ends;
  for (size_t i = 1; i < plans.size(); ++i)
    if (call.parts[i - 1].phase != call.parts[i].phase || !is_tiles_alone(*plans[i - 1]) || !is_tiles_alone(*plans[i]))
      ends.push_back(i);
  if (!plans.empty()) ends.push_back(plans.size());
  return ends;
}

std::string run_together(const std::vector<Member>& members, const char* name, Pool& pool) {
  std::vector<int64_t> ends;  // of the tiles of each member among those of all
  int64_t tiles = 0;
  double ns = 0;
  for (const Member& m : members) {
    ends.push_back(tiles += m.plan->program.tiles);
    ns += m.plan->estimated_ns;
  }
  std::atomic<bool> failed{false};
  char error[kErrorBytes] = "";  // of the first that fails: there may be no memory for a string
  // Asking for w threads takes w kAskNs, their work ns / w.
  const int64_t worth = static_cast<int64_t>(std::sqrt(ns / kAskNs));
  const int64_t workers = std::clamp<int64_t>(std::min(worth, pool.num_threads(ns)), 1, tiles);
  run_rounds(pool, workers, {tiles}, [&](size_t, int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    const size_t k = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    try {
      run_tile(members[k], i - (k > 0 ? ends[k - 1] : 0));
    } catch (const std::exception& e) {
      if (!failed.exchange(true)) describe(e, name, error, sizeof error);
    }
  });
  return error;
}

}  // namespace kitsune::cpu
