// Matmul: one gemm call per batch, on panels packed before. AccumulateMatmul: one outer product per batch, into the
// strand. Its sums lie in groups of columns (kSumGroup); store_sums makes dense rows of them.
#include <algorithm>
#include <optional>
#include <utility>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

class MatmulStep final : public Step {
 public:
  MatmulStep(const Matmul& m, const Compile& c)
      : gemm_(c.table.gemm),
        x_(m.x.ref, m.x.row_stride * m.row_multiple),
        out_(m.out.ref, m.out.row_stride * m.row_multiple),
        row_multiple_(m.row_multiple),
        batch_(m.batch),
        weight_(c.preps[m.weight], m.weight) {
    const PrepPlan& w = c.preps[m.weight];
    if (m.bias >= 0) bias_.emplace(c.preps[m.bias], m.bias);
    x_batch_bytes_ = m.x.strides[0] * static_cast<int64_t>(item_size(m.x.ref.dtype));
    out_batch_bytes_ = m.out.strides[0] * static_cast<int64_t>(item_size(m.out.ref.dtype));
    weight_batch_bytes_ = static_cast<int64_t>(w.batch_bytes);
    args_.N = w.N;
    args_.K = w.K;
    args_.x_dtype = m.x.ref.dtype;
    args_.lda = m.x.row_stride;
    args_.panel = w.panel;
    args_.act = m.activation;
    if (m.parameters.size() > 0) args_.act_a = static_cast<float>(m.parameters[0]);
    if (m.parameters.size() > 1) args_.act_b = static_cast<float>(m.parameters[1]);
    args_.c_dtype = m.out.ref.dtype;
    args_.ldc = m.out.row_stride;
    args_.adds = m.adds;
    args_.rounds = m.rounds;
    // The last tile is shorter; ask for both, and say where a bias would be so that its space is counted.
    const Program& p = c.program;
    args_.bias = bias_ ? static_cast<const void*>(&args_) : nullptr;
    for (int64_t rows : {std::min(p.tile_rows, p.batch_rows), p.batch_rows - (p.batch_tiles - 1) * p.tile_rows}) {
      args_.M = rows * row_multiple_;
      temp_bytes_ = std::max(temp_bytes_, c.table.gemm_scratch_bytes(args_));
    }
  }

  void run(const Context& c) const override {
    GemmArgs a = args_;
    a.M = c.rows * row_multiple_;
    a.bias = bias_ ? bias_->of(c) : nullptr;
    a.scratch = c.temp;
    const char* x = x_.of(c);
    const char* w = weight_.of(c);
    char* out = out_.of(c);
    for (int64_t b = 0; b < batch_; ++b) {
      a.x = x + b * x_batch_bytes_;
      a.w = w + b * weight_batch_bytes_;
      a.c = out + b * out_batch_bytes_;
      gemm_(a);
    }
  }

 private:
  void (*gemm_)(const GemmArgs&);
  Address x_, out_;
  int64_t row_multiple_, batch_;
  Prepared weight_;
  std::optional<Prepared> bias_;
  int64_t x_batch_bytes_, out_batch_bytes_, weight_batch_bytes_;
  GemmArgs args_{};
};

class AccumulateMatmulStep final : public Step {
 public:
  AccumulateMatmulStep(const AccumulateMatmul& m, const Compile& c)
      : outer_(c.table.outer),
        x_(m.x.ref, m.x.row_stride * m.row_multiple),
        y_(m.y.ref, m.y.row_stride * m.row_multiple),
        row_multiple_(m.row_multiple),
        batch_(m.batch),
        sums_(m.sums, c, m.sink),
        writes_(c.sinks[m.sink].written) {
    const int64_t item = static_cast<int64_t>(item_size(m.x.ref.dtype));
    x_batch_bytes_ = m.x.strides[0] * item;
    y_batch_bytes_ = m.y.strides[0] * item;
    const Sink& sink = c.program.sinks[m.sink];
    c_batch_bytes_ = sink.height * sink.columns * static_cast<int64_t>(item_size(c.sinks[m.sink].acc));
    args_.M = m.m;
    args_.N = m.n;
    args_.dtype = m.x.ref.dtype;
    args_.ldx = m.x.row_stride;
    args_.ldy = m.y.row_stride;
    args_.R = std::min(c.program.tile_rows, c.program.batch_rows) * row_multiple_;
    args_.panel = c.table.panel_for(args_.dtype, m.product, {args_.M, args_.N, args_.R});
    temp_bytes_ = c.table.outer_scratch_bytes(args_);
  }

  void run(const Context& c) const override {
    OuterArgs a = args_;
    a.R = c.rows * row_multiple_;
    a.scratch = c.temp;
    a.first = writes_ && c.first_of_strand;
    const char *x = x_.of(c), *y = y_.of(c);
    char* into = sums_.of(c);
    for (int64_t b = 0; b < batch_; ++b) {
      a.x = x + b * x_batch_bytes_;
      a.y = y + b * y_batch_bytes_;
      a.c = into + b * c_batch_bytes_;
      outer_(a);
    }
  }

 private:
  void (*outer_)(const OuterArgs&);
  Address x_, y_;
  int64_t row_multiple_, batch_;
  SumsAddress sums_;
  bool writes_;
  int64_t x_batch_bytes_, y_batch_bytes_, c_batch_bytes_;
  OuterArgs args_{};
};

}  // namespace

void store_sums(const Sink& sink, std::pair<int64_t, int64_t> of, const Storer& store, const char* sums, size_t sum_bytes,
                char* array, size_t item_bytes, char* temp) {
  rows_of_sums(sink, of.first, of.second - of.first, [&](int64_t run, int64_t from, int64_t to) {
    store(run, array + static_cast<size_t>(to) * item_bytes, 1, sums + static_cast<size_t>(from) * sum_bytes, temp);
  });
}

std::unique_ptr<const Step> compile(const AccumulateMatmul& m, const Compile& c) {
  return std::make_unique<AccumulateMatmulStep>(m, c);
}

std::unique_ptr<const Step> compile(const Matmul& m, const Compile& c) { return std::make_unique<MatmulStep>(m, c); }

}  // namespace kitsune::cpu
