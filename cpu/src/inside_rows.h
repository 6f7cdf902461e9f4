// The rows of a tile that fold into a sink by index, block by block, without those whose index is outside of it. They lie in a
// tile, in an input that is read in the order of the stream, or in a table, where a second index says which of its rows.
#pragma once

#include "indices.h"
#include "taken_rows.h"

namespace kitsune::cpu {

// Row i goes to index[i], lies at x + at[i], and is row[i] of the tile. `known`: rows whose place is in `at`, those of the next
// block among them.
struct Block {
  int64_t n, known;
  const int64_t *at, *index, *row;
  const char* x;
  Block part(int64_t begin, int64_t end) const { return {end - begin, known - begin, at + begin, index + begin, row + begin, x}; }
};

class InsideRows {
 public:
  InsideRows(const AccumulateAt& a, const Compile& c, const AccumulateTaken* taken = nullptr)
      : indices_(c.table, a.index, taken != nullptr ? a.index : a.x, a.index_extents, a.count),
        count_(static_cast<uint64_t>(a.count)),
        order_(a.ordered ? c.program.order : -1),
        rows_(static_cast<uint32_t>(c.program.rows)),
        row_bytes_(a.x.row_stride * static_cast<int64_t>(item_size(a.x.ref.dtype))),
        x_(a.x.ref, 0),
        far_(row_bytes_ > 0 && (taken != nullptr ? taken->rows : c.program.rows) > kNearTable / row_bytes_),
        taken_(taken != nullptr ? std::make_unique<const TakenRows>(rows_of(*taken), product(taken->extents), c) : nullptr) {}

  // Calls f(block) for blocks of kIndexBlock rows at most.
  template <class F>
  void blocks(const Context& c, F f) const {
    int64_t at[kIndexBlock + kMostAhead], inside[kIndexBlock], row[kIndexBlock];
    const int32_t* order = order_ < 0 ? nullptr : reinterpret_cast<const int32_t*>(c.ins[order_]) + c.first_row;
    int64_t first = 0, last = taken_ ? c.rows : rows_ - c.first_row;
    indices_.blocks(c, [&](int64_t n, const int64_t* index, bool all, char* x, int64_t step) {
      const int64_t known = apart() ? std::min(n + kMostAhead, last - first) : n;
      if (taken_) {
        taken_->find(c, first, known, at);
      } else if (order == nullptr) {
        for (int64_t i = 0; i < n; ++i) at[i] = i * step;
      } else {
        for (int64_t i = 0; i < known; ++i) at[i] = element_of(order[i], rows_) * row_bytes_;
        order += n;
      }
      for (int64_t i = 0; i < n; ++i) row[i] = first + i;
      first += n;
      const char* const base = taken_ ? taken_->table(c) : order == nullptr ? x : x_.of(c);
      if (all) return f(Block{n, known, at, index, row, base});
      int64_t m = 0;
      for (int64_t i = 0; i < n; ++i) {
        inside[m] = index[i];
        at[m] = at[i];
        row[m] = row[i];
        m += static_cast<uint64_t>(index[i]) < count_;
      }
      if (m > 0) f(Block{m, m, at, inside, row, base});
    });
  }
  // Do rows lie far from each other?
  bool apart() const { return order_ >= 0 || taken_ != nullptr; }
  // How those of a block are asked for before their turn.
  Ahead ahead(const Block& b) const { return {apart() ? b.known : 0, far_}; }

 private:
  // Rows of so large an array are taken to lie in memory: with 64 MiB (of a last level of 480) it did not matter how they were
  // asked for, with 128 it did.
  static constexpr int64_t kNearTable = int64_t{96} << 20;
  static Rows rows_of(const AccumulateTaken& a) { return {a.x, a.rows, a.mode, a.fill, a.taken}; }

  Indices indices_;
  uint64_t count_;
  int64_t order_;  // the input through which rows are read, or -1
  uint32_t rows_;
  int64_t row_bytes_;
  Address x_;
  bool far_;
  std::unique_ptr<const TakenRows> taken_;
};

}  // namespace kitsune::cpu
