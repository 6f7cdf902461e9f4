// StridedLoad and StridedStore: copies between a tile and an array whose element address is not linear in the row.
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
  CopyStep(const Copy& x, bool gather, const Program& p)
      : gather_(gather),
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
  }

  void run(const Context& c) const override {
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

  bool gather_;
  int64_t item_;
  Address array_, tile_;
  int64_t tile_row_bytes_;
  std::vector<int64_t> axes_, axis_bytes_;
  Nest nest_;  // operands: array, tile
  bool dense_ = false;
};

}  // namespace

std::unique_ptr<const Step> compile(const StridedLoad& x, const Compile& c) {
  return std::make_unique<CopyStep>(x, true, c.program);
}
std::unique_ptr<const Step> compile(const StridedStore& x, const Compile& c) {
  return std::make_unique<CopyStep>(x, false, c.program);
}

}  // namespace kitsune::cpu
