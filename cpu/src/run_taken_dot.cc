// TakenDot: for each row of a tile and each head the product of two rows, read where they lie in a tile or a table.
#include "indices.h"
#include "taken_rows.h"

namespace kitsune::cpu {
namespace {

// One operand: rows of the tile, or of a table.
class Side {
 public:
  Side(const Rows& r, int64_t width, const Compile& c)
      : tile_(r.x.ref, r.x.row_stride),
        row_bytes_(r.x.row_stride * static_cast<int64_t>(item_size(r.x.ref.dtype))),
        taken_(r.rows > 0 ? std::make_unique<const TakenRows>(r, width, c) : nullptr) {}
  // Where rows [first, first + n) of the tile lie behind base(), in bytes.
  void find(const Context& c, int64_t first, int64_t n, int64_t* at) const {
    if (taken_) return taken_->find(c, first, n, at);
    for (int64_t i = 0; i < n; ++i) at[i] = (first + i) * row_bytes_;
  }
  const char* base(const Context& c) const { return taken_ ? taken_->table(c) : tile_.of(c); }

 private:
  Address tile_;
  int64_t row_bytes_;
  std::unique_ptr<const TakenRows> taken_;
};

class TakenDotStep final : public Step {
 public:
  TakenDotStep(const TakenDot& d, const Compile& c)
      : x_(d.x, d.heads * d.inner, c),
        y_(d.y, d.heads * d.inner, c),
        heads_(d.heads),
        inner_(d.inner),
        dot_(c.table.dot_rows(d.x.x.ref.dtype)),
        out_(d.out.ref, d.out.row_stride),
        straight_(d.out.ref.dtype == DType::kF32),
        step_(d.out.row_stride),
        row_bytes_(d.out.row_stride * static_cast<int64_t>(item_size(d.out.ref.dtype))),
        store_(c.table, d.out.ref.dtype, DType::kF32, c.where) {
    const size_t row = align_up(times(static_cast<size_t>(heads_), sizeof(double)));
    sums_bytes_ = straight_ ? 0 : times(static_cast<size_t>(kIndexBlock), row);
    temp_bytes_ = straight_ ? 0 : plus(sums_bytes_, row);
  }

  void run(const Context& c) const override {
    int64_t x_at[kIndexBlock], y_at[kIndexBlock];
    const char *x = x_.base(c), *y = y_.base(c);
    char* const out = out_.of(c);
    for (int64_t first = 0; first < c.rows; first += kIndexBlock) {
      const int64_t n = std::min(kIndexBlock, c.rows - first);
      x_.find(c, first, n, x_at);
      y_.find(c, first, n, y_at);
      char* const to = out + first * row_bytes_;
      if (straight_) {
        dot_(n, x_at, x, y_at, y, heads_, inner_, reinterpret_cast<float*>(to), step_);
        continue;
      }
      float* const sums = reinterpret_cast<float*>(c.temp);
      dot_(n, x_at, x, y_at, y, heads_, inner_, sums, heads_);
      for (int64_t i = 0; i < n; ++i) store_(heads_, to + i * row_bytes_, 1, sums + i * heads_, c.temp + sums_bytes_);
    }
  }

 private:
  Side x_, y_;
  int64_t heads_, inner_;
  DotRowsFn dot_;
  Address out_;
  bool straight_;
  int64_t step_, row_bytes_;
  Storer store_;
  size_t sums_bytes_ = 0;
};

}  // namespace

std::unique_ptr<const Step> compile(const TakenDot& x, const Compile& c) { return std::make_unique<TakenDotStep>(x, c); }

}  // namespace kitsune::cpu
