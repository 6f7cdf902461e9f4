// Loop, Stationary and Pack: what runs other steps again, and what is prepared for products while a tile is at work.
#include <algorithm>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

class LoopStep final : public Step {
 public:
  LoopStep(const Loop& x, int depth, Steps body)
      : count_(x.count), reverse_(x.reverse), within_(x.within), depth_(depth), body_(std::move(body)) {
    for (const auto& step : body_)
      if (step->fetches(depth_)) fetching_.push_back(step.get());
  }

  void run(const Context& c) const override {
    Bounds b{0, count_, 0, 0};
    if (within_) b = bounds(c, *within_);
    for (int64_t n = b.first; n < b.end; ++n) {
      const int64_t i = reverse_ ? b.end - 1 - (n - b.first) : n;
      if (b.left_out <= i && i < b.left_out_end) continue;
      if (!fetching_.empty() && n + 1 < b.end) {
        c.loops[depth_] = reverse_ ? i - 1 : i + 1;
        for (const Step* step : fetching_) step->fetch(c);
      }
      c.loops[depth_] = i;
      for (const auto& step : body_) step->run(c);
    }
  }

 private:
  struct Bounds {
    int64_t first, end, left_out, left_out_end;
  };

  Bounds bounds(const Context& c, const Within& w) const {
    int64_t x = c.row0 / w.divisor, y = (c.row0 + c.rows - 1) / w.divisor;
    const bool wraps = y - x >= w.extent || x % w.extent > y % w.extent;
    x = wraps ? 0 : x % w.extent;
    y = wraps ? w.extent - 1 : y % w.extent;
    auto up_to = [&](int64_t elements) { return std::clamp<int64_t>(elements < 0 ? 0 : elements / w.step, 0, count_); };
    const int64_t first = up_to(x + w.low), end = up_to(y + w.high + w.step);
    const int64_t whole = up_to(y + w.low + w.step - 1), whole_end = std::max(whole, up_to(x + w.high + 1));
    if (w.which == 1) return {whole, whole_end, 0, 0};
    if (w.which == 2) return {first, end, whole, whole_end};
    return {first, end, 0, 0};
  }

  int64_t count_;
  bool reverse_;
  std::optional<Within> within_;
  int depth_;
  Steps body_;
  std::vector<const Step*> fetching_;
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
    const char* source = source_.of(c);
    if (plan_.kept) {
      const char*& from = c.packed_from[plan_.first_slot + plan_.slot(c.loops)];
      if (from == source) return;
      from = source;
    }
    prepare(prep_, plan_, table_, 0, units_, source, Prepared::packed(plan_, c), c.temp);
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
