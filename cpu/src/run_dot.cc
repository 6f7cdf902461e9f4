// Dot: a product for each row of two tiles. Small matrices are multiplied as they lie; of others, Y of one row and batch is packed
// as a weight would be, then the gemm of weights runs.
#include <algorithm>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

struct Bytes {
  int64_t row, batch;
};
Bytes bytes_of(const Operand& x) {
  const int64_t item = static_cast<int64_t>(item_size(x.ref.dtype));
  return {x.row_stride * item, x.strides[0] * item};
}

// Packing Y pays where its panels are read by many rows of X, and more so where they do not stay in the first-level cache as they
// lie.
bool small(const Dot& d) { return d.m <= 8 || (d.m <= 64 && d.n * d.k <= 8192); }

class SmallDotStep final : public Step {
 public:
  SmallDotStep(const Dot& d, DotFn dot)
      : dot_(dot),
        x_(d.x.ref, d.x.row_stride),
        y_(d.y.ref, d.y.row_stride),
        out_(d.out.ref, d.out.row_stride),
        batch_(d.batch),
        x_bytes_(bytes_of(d.x)),
        y_bytes_(bytes_of(d.y)),
        out_bytes_(bytes_of(d.out)) {
    const Ref &a = d.x.ref, &b = d.y.ref;
    const bool same = a.space == b.space && a.index == b.index && a.offset == b.offset && a.loop_strides == b.loop_strides &&
                      a.batch_strides == b.batch_strides && d.x.row_stride == d.y.row_stride;
    args_ = {d.m,
             d.n,
             d.k,
             nullptr,
             d.x.strides[1],
             nullptr,
             d.y.strides[1],
             d.y.strides[2],
             nullptr,
             d.out.ref.dtype,
             d.out.strides[1],
             false,
             nullptr};
    args_.symmetric =
        same && d.m == d.n && d.y.strides[2] == 1 && d.x.strides[0] == d.y.strides[0] && d.x.strides[1] == d.y.strides[1];
    temp_bytes_ = align_up(static_cast<size_t>(d.m * (d.k + d.n)) * sizeof(float));
  }

  void run(const Context& c) const override {
    DotArgs a = args_;
    a.scratch = c.temp;
    const char *x = x_.of(c), *y = y_.of(c);
    char* out = out_.of(c);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t b = 0; b < batch_; ++b) {
        a.x = x + r * x_bytes_.row + b * x_bytes_.batch;
        a.y = y + r * y_bytes_.row + b * y_bytes_.batch;
        a.c = out + r * out_bytes_.row + b * out_bytes_.batch;
        dot_(a);
      }
  }

 private:
  DotFn dot_;
  Address x_, y_, out_;
  int64_t batch_;
  Bytes x_bytes_, y_bytes_, out_bytes_;
  DotArgs args_;
};

class DotStep final : public Step {
 public:
  DotStep(const Dot& d, const Compile& c)
      : table_(c.table),
        x_(d.x.ref, d.x.row_stride),
        y_(d.y.ref, d.y.row_stride),
        out_(d.out.ref, d.out.row_stride),
        batch_(d.batch) {
    const DType type = d.x.ref.dtype;
    x_bytes_ = bytes_of(d.x), y_bytes_ = bytes_of(d.y), out_bytes_ = bytes_of(d.out);
    for (int64_t k = 0; k < d.k; ++k) k_offset_.push_back(k * d.y.strides[2]);
    for (int64_t n = 0; n < d.n; ++n) n_offset_.push_back(n * d.y.strides[1]);
    pack_ = {nullptr, type, d.k, d.n, k_offset_.data(), n_offset_.data()};
    const DType weight = type == DType::kF16 ? DType::kF32 : type;
    args_.M = d.m, args_.N = d.n, args_.K = d.k;
    args_.x_dtype = type;
    args_.lda = d.x.strides[1];
    args_.panel = table_.panel_for(weight, Product::kBest, {d.m, d.n, d.k});
    args_.act = Activation::kNone;
    args_.c_dtype = d.out.ref.dtype;
    args_.ldc = d.out.strides[1];
    panels_ = table_.panel_count(args_.panel, d.n);
    packed_bytes_ = align_up(table_.packed_bytes(args_.panel, d.k, d.n));
    temp_bytes_ = plus(packed_bytes_, table_.gemm_scratch_bytes(args_));
  }

  void run(const Context& c) const override {
    GemmArgs a = args_;
    PackSource y = pack_;
    a.w = c.temp;
    a.scratch = c.temp + packed_bytes_;
    const char *x0 = x_.of(c), *y0 = y_.of(c);
    char* out = out_.of(c);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t b = 0; b < batch_; ++b) {
        y.src = y0 + r * y_bytes_.row + b * y_bytes_.batch;
        table_.pack(a.panel, y, 0, panels_, c.temp);
        a.x = x0 + r * x_bytes_.row + b * x_bytes_.batch;
        a.c = out + r * out_bytes_.row + b * out_bytes_.batch;
        table_.gemm(a);
      }
  }

 private:
  const KernelTable& table_;
  Address x_, y_, out_;
  int64_t batch_, panels_ = 0;
  Bytes x_bytes_, y_bytes_, out_bytes_;
  std::vector<int64_t> k_offset_, n_offset_;
  PackSource pack_;
  size_t packed_bytes_ = 0;
  GemmArgs args_{};
};

}  // namespace

std::unique_ptr<const Step> compile(const Dot& x, const Compile& c) {
  const DotFn dot = c.table.dot(x.x.ref.dtype);
  const bool lies_well = x.y.strides[1] == 1 || x.y.strides[2] == 1;
  if (dot != nullptr && lies_well && small(x)) return std::make_unique<SmallDotStep>(x, dot);
  return std::make_unique<DotStep>(x, c);
}

}  // namespace kitsune::cpu
