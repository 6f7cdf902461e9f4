// A tile of indices, read block by block, each with the place of the row that belongs to it.
#pragma once

#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {

constexpr int64_t kIndexBlock = 256;  // at most so many at a time

// n indices at `step` bytes as int64; what is beyond int64 becomes its largest number.
using ReadIndices = void (*)(int64_t n, const char* from, int64_t step, int64_t* to);
ReadIndices index_reader(DType type);

class Indices {
 public:
  // `x` is the operand whose rows belong to the indices; its first strides are those of `extents`.
  Indices(const Operand& index, const Operand& x, const std::vector<int64_t>& extents);

  // Calls f(n, indices, place, step): the row of the i-th index lies at place + i * step bytes.
  template <class F>
  void blocks(const Context& c, F f) const {
    int64_t index[kIndexBlock], counter[kMaxLoopDims + 1];
    char* at[2] = {address_.of(c), x_.of(c)};
    const Dim& inner = nest_.back();
    const int64_t n = inner.extent(c.rows), step = inner.stride[0], x_step = inner.stride[1];
    walk(nest_.data(), static_cast<int>(nest_.size()) - 1, c.rows, at, 2, counter, [&] {
      for (int64_t i = 0; i < n; i += kIndexBlock) {
        const int64_t m = std::min(kIndexBlock, n - i);
        read_(m, at[0] + i * step, step, index);
        f(m, index, at[1] + i * x_step, x_step);
      }
    });
  }

 private:
  Address address_, x_;
  ReadIndices read_;
  Nest nest_;  // operands: the index, x
};

}  // namespace kitsune::cpu
