// StridedLoad and StridedStore: copies between a tile and an array whose element address is not linear in the row: it has several
// stream axes, or the stream has an order of its own.
#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

template <class T>
void strided(int64_t n, char* to, int64_t to_stride, const char* from, int64_t from_stride) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, sizeof(T));
}

class CopyStep final : public Step {
 public:
  CopyStep(const Copy& x, bool gather, const Program& p, const KernelTable& table)
      : gather_(gather),
        order_(p.order),
        elements_(static_cast<uint32_t>(p.rows)),
        gather_rows_(table.gather_rows),
        scatter_rows_(table.scatter_rows),
        item_(static_cast<int64_t>(item_size(x.array.dtype))),
        array_(x.array, 0),
        tile_(x.tile.ref, x.tile.row_stride),
        tile_row_bytes_(x.tile.row_stride * item_) {
    for (size_t j = 0; j < p.axes.size(); ++j) {
      int64_t n = p.axes[j], s = x.axis_strides[j] * item_;
      if (n == 1) continue;
      if (!axes_.empty() && axis_bytes_.back() == n * s) {
        axes_.back() *= n;
        axis_bytes_.back() = s;
      } else {
        axes_.push_back(n);
        axis_bytes_.push_back(s);
      }
    }
    if (axes_.empty()) axes_.push_back(1), axis_bytes_.push_back(0);
    std::vector<int64_t> array{axis_bytes_.back()};
    for (int64_t s : x.array_strides) array.push_back(s * item_);
    nest_ = make_nest(x.extents, {array, byte_strides(x.tile)});
    simplify(nest_);
    std::vector<int64_t>& last = nest_.back().stride;
    dense_ = last[0] == item_ && last[1] == item_;
    find_row(x);
  }

  void run(const Context& c) const override {
    if (order_ >= 0) return run_ordered(c);
    int k = static_cast<int>(axes_.size());
    int64_t index[kMaxLoopDims];
    char* array = array_.of(c);
    for (int64_t r = c.first_row, j = k - 1; j >= 0; --j) {
      index[j] = r % axes_[j];
      r /= axes_[j];
      array += index[j] * axis_bytes_[j];
    }
    char* tile = tile_.of(c);
    for (int64_t left = c.rows; left > 0;) {
      int64_t run = std::min(left, axes_[k - 1] - index[k - 1]);
      block(run, array, tile);
      left -= run;
      tile += run * tile_row_bytes_;
      array += run * axis_bytes_[k - 1];
      index[k - 1] += run;
      for (int j = k - 1; j > 0 && index[j] == axes_[j]; --j) {
        array += axis_bytes_[j - 1] - axes_[j] * axis_bytes_[j];
        index[j] = 0;
        ++index[j - 1];
      }
    }
  }

 private:
  void block(int64_t rows, char* array, char* tile) const {
    char* at[2] = {array, tile};
    int64_t index[kMaxLoopDims + 1];
    int outer = static_cast<int>(nest_.size()) - 1;
    const Dim& inner = nest_.back();
    int64_t n = inner.extent(rows);
    walk(nest_.data(), outer, rows, at, 2, index, [&] {
      char* to = at[gather_ ? 1 : 0];
      const char* from = at[gather_ ? 0 : 1];
      if (dense_) {
        std::memmove(to, from, static_cast<size_t>(n * item_));  // an altered program may copy an array onto itself
        return;
      }
      int64_t ts = inner.stride[gather_ ? 1 : 0], fs = inner.stride[gather_ ? 0 : 1];
      switch (item_) {
        case 1: return strided<uint8_t>(n, to, ts, from, fs);
        case 2: return strided<uint16_t>(n, to, ts, from, fs);
        case 4: return strided<uint32_t>(n, to, ts, from, fs);
        default: return strided<uint64_t>(n, to, ts, from, fs);
      }
    });
  }

  // Bytes of a row, if it is one dense run of elements in the array and in the tile.
  void find_row(const Copy& x) {
    Nest row;
    for (size_t d = 0; d < x.extents.size(); ++d)
      row.push_back({x.extents[d], false, -1, {x.array_strides[d] * item_, x.tile.strides[d] * item_}});
    simplify(row);
    if (row.empty()) row_bytes_ = item_;
    if (row.size() == 1 && row[0].stride[0] == item_ && row[0].stride[1] == item_) row_bytes_ = row[0].n * item_;
  }

  // Where element `e` of the array lies.
  int64_t offset_of(int64_t e) const {
    int64_t at = 0;
    for (size_t j = axes_.size(); --j > 0; e /= axes_[j]) at += e % axes_[j] * axis_bytes_[j];
    return at + e * axis_bytes_[0];
  }

  void run_ordered(const Context& c) const {
    const int32_t* order = reinterpret_cast<const int32_t*>(c.ins[order_]) + c.first_row;
    char *array = array_.of(c), *tile = tile_.of(c);
    constexpr int64_t kBlock = 512;
    int64_t at[kBlock];
    for (int64_t i = 0; i < c.rows; i += kBlock) {
      const int64_t n = std::min(kBlock, c.rows - i);
      char* first = tile + i * tile_row_bytes_;
      for (int64_t k = 0; k < n; ++k) at[k] = offset_of(element_of(order[i + k], elements_));
      if (row_bytes_ == 0)
        for (int64_t k = 0; k < n; ++k) block(1, array + at[k], first + k * tile_row_bytes_);
      else if (gather_)
        gather_rows_(n, at, array, first, tile_row_bytes_, row_bytes_);
      else
        scatter_rows_(n, at, first, tile_row_bytes_, array, row_bytes_);
    }
  }

  bool gather_;
  int64_t order_;  // the input that holds the order of the stream, or -1
  uint32_t elements_;
  GatherRowsFn gather_rows_;
  ScatterRowsFn scatter_rows_;
  int64_t row_bytes_ = 0;  // 0 where a row is no dense run
  int64_t item_;
  Address array_, tile_;
  int64_t tile_row_bytes_;
  std::vector<int64_t> axes_, axis_bytes_;
  Nest nest_;  // operands: array, tile
  bool dense_ = false;
};

}  // namespace

std::unique_ptr<const Step> compile(const StridedLoad& x, const Compile& c) {
  return std::make_unique<CopyStep>(x, true, c.program, c.table);
}
std::unique_ptr<const Step> compile(const StridedStore& x, const Compile& c) {
  return std::make_unique<CopyStep>(x, false, c.program, c.table);
}

}  // namespace kitsune::cpu
