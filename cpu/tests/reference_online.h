// The state of online sums, in double: each head's sum of a row, and the top that it is scaled by.
#pragma once

#include <cmath>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu::test {

class ScaledSums {
 public:
  void open(const AccumulateScaled& a, std::vector<double>& sums) {
    heads_ = a.heads, finite_ = a.finite, inner_ = product(a.extents) / a.heads;
    sums.resize(static_cast<size_t>(a.count * heads_ * inner_));
    tops_.resize(static_cast<size_t>(a.count * heads_), -INFINITY);
    rows_.resize(static_cast<size_t>(a.count));
  }
  int64_t head(int64_t e) const { return e / inner_; }
  // Element e of row i: x, scaled by `own`. Elements of a row come in their order.
  void add(std::vector<double>& sums, int64_t i, int64_t e, double x, double own) {
    double& top = tops_[static_cast<size_t>(i * heads_ + head(e))];
    double& sum = sums[static_cast<size_t>(i * heads_ * inner_ + e)];
    const double to = std::isnan(top) || top > own ? top : own;
    sum = sum * factor(top, to) + x * factor(own, to);
    rows_[static_cast<size_t>(i)] = 1;
    if ((e + 1) % inner_ == 0) top = to;
  }
  void close(std::vector<double>& sums) const {
    for (size_t h = 0; h < tops_.size(); ++h)
      for (size_t j = 0; !finite_ && rows_[h / static_cast<size_t>(heads_)] && !std::isfinite(tops_[h]) && j < inner(); ++j)
        sums[h * inner() + j] = NAN;
  }

 private:
  size_t inner() const { return static_cast<size_t>(inner_); }
  static double factor(double top, double to) {
    auto used = [](double t) { return std::isfinite(t) ? t : 0; };
    return top == to || top == -INFINITY || std::isnan(to) ? 1 : std::exp(used(top) - used(to));
  }

  int64_t heads_ = 1, inner_ = 1;
  bool finite_ = false;
  std::vector<double> tops_;
  std::vector<char> rows_;
};

}  // namespace kitsune::cpu::test
