// RunMax: for each row of a tile the largest of its run, which are the rows around it that have its index.
#include <cstring>

#include "indices.h"
#include "online.h"

namespace kitsune::cpu {
namespace {

// Rows of W floats: the largest of rows [begin, end), element by element, to all of them. A NaN wins.
template <int W>
void spread_largest(const char* x, int64_t x_row, char* out, int64_t out_row, int64_t begin, int64_t end) {
  float largest[W];
  std::memcpy(largest, x + begin * x_row, sizeof largest);
  for (int64_t r = begin + 1; r < end; ++r) {
    const auto* row = reinterpret_cast<const float*>(x + r * x_row);
    for (int j = 0; j < W; ++j) largest[j] = higher(largest[j], row[j]);
  }
  for (int64_t r = begin; r < end; ++r) std::memcpy(out + r * out_row, largest, sizeof largest);
}

// For the numbers of heads that networks have; nullptr for others.
using SpreadFn = void (*)(const char* x, int64_t x_row, char* out, int64_t out_row, int64_t begin, int64_t end);
SpreadFn spread_function(DType type, int64_t width) {
  if (type != DType::kF32) return nullptr;
  switch (width) {
    case 1: return &spread_largest<1>;
    case 2: return &spread_largest<2>;
    case 4: return &spread_largest<4>;
    case 8: return &spread_largest<8>;
    case 16: return &spread_largest<16>;
    default: return nullptr;
  }
}

class RunMaxStep final : public Step {
 public:
  RunMaxStep(const RunMax& a, const Compile& c)
      : indices_(c.table, a.index, a.x, {}, a.count),
        x_(a.x.ref, a.x.row_stride),
        out_(a.out.ref, a.out.row_stride),
        width_(product(a.extents)),
        x_row_(a.x.row_stride * static_cast<int64_t>(item_size(a.x.ref.dtype))),
        out_row_(a.out.row_stride * static_cast<int64_t>(item_size(a.out.ref.dtype))),
        fold_(c.table.fold_runs(static_cast<int>(Reduction::kMax), a.x.ref.dtype)),
        spread_(spread_function(a.x.ref.dtype, width_)),
        store_(c.table, a.out.ref.dtype, DType::kF32, c.where) {
    row_bytes_ = static_cast<size_t>(width_) * item_size(a.out.ref.dtype);
    run_bytes_ = align_up(times(static_cast<size_t>(width_), sizeof(float)));
    spare_bytes_ = align_up(times(static_cast<size_t>(width_), 8));
    rows_bytes_ = align_up(times(static_cast<size_t>(c.program.tile_rows), sizeof(int64_t)));
    temp_bytes_ = plus(times(2, rows_bytes_), plus(spare_bytes_, times(kIndexBlock, run_bytes_)));
  }

  void run(const Context& c) const override {
    auto* const ids = reinterpret_cast<int64_t*>(c.temp);
    auto* const at = reinterpret_cast<int64_t*>(c.temp + rows_bytes_);
    char* const spare = c.temp + 2 * rows_bytes_;
    char* const runs = spare + spare_bytes_;
    int64_t rows = 0;
    indices_.blocks(c, [&](int64_t n, const int64_t* index, bool, const char*, int64_t) {
      std::memcpy(ids + rows, index, static_cast<size_t>(n) * sizeof(int64_t));
      rows += n;
    });
    const char* const x = x_.of(c);
    char* const out = out_.of(c);
    if (spread_ != nullptr) {
      for (int64_t first = 0, end; first < rows; first = end) {
        for (end = first + 1; end < rows && ids[end] == ids[first];) ++end;
        spread_(x, x_row_, out, out_row_, first, end);
      }
      return;
    }
    for (int64_t r = 0; r < rows; ++r) at[r] = r * x_row_;
    for (int64_t row = 0; row < rows;) {
      int64_t start[kIndexBlock + 1], count = 0;
      void* into[kIndexBlock];
      start[0] = row;
      while (row < rows && count < kIndexBlock) {
        const int64_t id = ids[row];
        while (row < rows && ids[row] == id) ++row;
        into[count] = runs + static_cast<size_t>(count) * run_bytes_;
        start[++count] = row;
      }
      fold_(count, start, at, x, width_, {}, into);
      for (int64_t k = 0; k < count; ++k) {
        char* const first = out + start[k] * out_row_;
        store_(width_, first, 1, into[k], spare);
        for (int64_t r = start[k] + 1; r < start[k + 1]; ++r) std::memcpy(out + r * out_row_, first, row_bytes_);
      }
    }
  }

 private:
  Indices indices_;
  Address x_, out_;
  int64_t width_, x_row_, out_row_;
  FoldRunsFn fold_;
  SpreadFn spread_;
  Storer store_;
  size_t row_bytes_, run_bytes_, spare_bytes_, rows_bytes_;
};

}  // namespace

std::unique_ptr<const Step> compile(const RunMax& x, const Compile& c) { return std::make_unique<RunMaxStep>(x, c); }

}  // namespace kitsune::cpu
