// Rows of a table, named by a tile of indices: where they lie.
#pragma once

#include <algorithm>

#include "executor_internal.h"

namespace kitsune::cpu {

// Where a table has the rows that a tile's indices name.
class TakenRows {
 public:
  TakenRows(const Rows& a, int64_t width, const Compile& c)
      : index_(a.taken.ref, a.taken.row_stride),
        read_(c.table.read_indices(a.taken.ref.dtype)),
        step_(a.taken.row_stride * static_cast<int64_t>(item_size(a.taken.ref.dtype))),
        count_(a.rows),
        row_bytes_(a.x.row_stride * static_cast<int64_t>(item_size(a.x.ref.dtype))),
        table_(a.x.ref, 0),
        clip_(a.mode == OutOfRange::kClip),
        fill_(static_cast<size_t>(width) * item_size(a.x.ref.dtype)) {
    const DType type = a.x.ref.dtype, compute = compute_type(type);
    std::vector<char> value(static_cast<size_t>(width) * 8), spare(static_cast<size_t>(width) * 8);
    fill_constant(compute, value.data(), width, a.fill);
    Storer(c.table, type, compute, c.where)(width, fill_.data(), 1, value.data(), spare.data());
  }
  const char* table(const Context& c) const { return table_.of(c); }
  // at[i] <- where the row lies that row first + i of the tile takes, in bytes behind table().
  void find(const Context& c, int64_t first, int64_t n, int64_t* at) const {
    if (read_(n, index_.of(c) + first * step_, step_, count_, at)) {
      for (int64_t i = 0; i < n; ++i) at[i] *= row_bytes_;
      return;
    }
    const int64_t filled = static_cast<int64_t>(reinterpret_cast<intptr_t>(fill_.data()) - reinterpret_cast<intptr_t>(table(c)));
    for (int64_t i = 0; i < n; ++i) {
      const int64_t nearest = std::clamp<int64_t>(at[i], 0, count_ - 1);
      at[i] = clip_ || nearest == at[i] ? nearest * row_bytes_ : filled;
    }
  }

 private:
  Address index_;
  ReadIndicesFn read_;
  int64_t step_, count_, row_bytes_;
  Address table_;
  bool clip_;
  std::vector<char> fill_;  // a row of what stands for rows that the table has not
};

}  // namespace kitsune::cpu
