// A tile of indices, read block by block, each with the place of the row that belongs to it.
#pragma once

#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {

constexpr int64_t kIndexBlock = 256;  // at most so many at a time

class Indices {
 public:
  // `x` is the operand whose rows belong to the indices; its first strides are those of `extents`.
  // Indices are below `count` and not below 0, or outside.
  Indices(const KernelTable& table, const Operand& index, const Operand& x, const std::vector<int64_t>& extents, int64_t count);

  // Calls f(n, indices, inside, place, step): the row of the i-th index lies at place + i * step bytes; are all indices inside?
  template <class F>
  void blocks(const Context& c, F f) const {
    int64_t index[kIndexBlock], counter[kMaxLoopDims + 1];
    char* at[2] = {address_.of(c), x_.of(c)};
    const Dim& inner = nest_.back();
    const int64_t n = inner.extent(c.rows), step = inner.stride[0], x_step = inner.stride[1];
    walk(nest_.data(), static_cast<int>(nest_.size()) - 1, c.rows, at, 2, counter, [&] {
      for (int64_t i = 0; i < n; i += kIndexBlock) {
        const int64_t m = std::min(kIndexBlock, n - i);
        const bool inside = read_(m, at[0] + i * step, step, count_, index);
        f(m, index, inside, at[1] + i * x_step, x_step);
      }
    });
  }

 private:
  Address address_, x_;
  ReadIndicesFn read_;
  int64_t count_;
  Nest nest_;  // operands: the index, x
};

}  // namespace kitsune::cpu
