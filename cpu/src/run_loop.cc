// Loop, Stationary and Pack: what runs other steps again, and what is prepared for products while a tile is at work.
#include <algorithm>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

class LoopStep final : public Step {
 public:
  LoopStep(const Loop& x, int depth, Steps body)
      : count_(x.count), reverse_(x.reverse), within_(x.within), depth_(depth), body_(std::move(body)) {}

  void run(const Context& c) const override {
    int64_t first = 0, last = count_ - 1;
    if (within_) bounds(c, &first, &last);
    for (int64_t i = first; i <= last; ++i) {
      c.loops[depth_] = reverse_ ? last - (i - first) : i;
      for (const auto& step : body_) step->run(c);
    }
  }

 private:
  void bounds(const Context& c, int64_t* first, int64_t* last) const {
    const Within& w = *within_;
    int64_t x = c.row0 / w.divisor, y = (c.row0 + c.rows - 1) / w.divisor;
    const bool wraps = y - x >= w.extent || x % w.extent > y % w.extent;
    x = wraps ? 0 : x % w.extent;
    y = wraps ? w.extent - 1 : y % w.extent;
    if (x + w.low > 0) *first = (x + w.low) / w.step;
    *last = y + w.high < 0 ? -1 : std::min(*last, (y + w.high) / w.step);
  }

  int64_t count_;
  bool reverse_;
  std::optional<Within> within_;
  int depth_;
  Steps body_;
};

class StationaryStep final : public Step {
 public:
  explicit StationaryStep(Steps body) : body_(std::move(body)) {}

  void run(const Context& c) const override {
    Context one = c;
    one.rows = 1;
    for (const auto& step : body_) step->run(one);
  }

 private:
  Steps body_;
};

class PackStep final : public Step {
 public:
  PackStep(const Prep& x, const PrepPlan& plan, const KernelTable& table)
      : prep_(x), plan_(plan), table_(table), source_(x.source, 0), units_(std::max<int64_t>(1, plan.panels) * plan.batch) {
    temp_bytes_ = kPrepTempBytes;
  }

  void run(const Context& c) const override {
    prepare(prep_, plan_, table_, 0, units_, source_.of(c), c.packed + plan_.offset, c.temp);
  }

 private:
  const Prep& prep_;  // of the program, which lives as long as the plan that owns this step
  const PrepPlan& plan_;
  const KernelTable& table_;
  Address source_;
  int64_t units_;
};

}  // namespace

std::unique_ptr<const Step> compile(const Loop& x, int depth, Steps body) {
  return std::make_unique<LoopStep>(x, depth, std::move(body));
}

std::unique_ptr<const Step> compile(const Stationary&, Steps body) { return std::make_unique<StationaryStep>(std::move(body)); }

std::unique_ptr<const Step> compile(const Pack& x, const Compile& c) {
  return std::make_unique<PackStep>(c.program.preps[x.prep], c.preps[x.prep], c.table);
}

}  // namespace kitsune::cpu
