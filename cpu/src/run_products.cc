// Products of a tile: Matmul, AccumulateMatmul, Dot and TakenDot; their operands packed before, and Loop, Stationary and Pack,
// which pack others while a tile is at work.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "executor_internal.h"
#include "indices.h"
#include "taken_rows.h"

namespace kitsune::cpu {

// Prepared operands: weights packed into the panels of the ISA at hand, dense operands gathered and converted, as tasks that
// several workers share.

namespace {

constexpr int64_t kTaskBytes = 128 << 10;

// The element offset of every mixed-radix index, last extent fastest.
std::vector<int64_t> offsets(const std::vector<int64_t>& extents, const std::vector<int64_t>& strides) {
  std::vector<int64_t> out{0};
  for (size_t d = 0; d < extents.size(); ++d) {
    std::vector<int64_t> next;
    next.reserve(out.size() * static_cast<size_t>(extents[d]));
    for (int64_t base : out)
      for (int64_t i = 0; i < extents[d]; ++i) next.push_back(base + i * strides[d]);
    out = std::move(next);
  }
  return out;
}

// bfloat16 panels hold a weight exactly, but the kernels round x to bfloat16 to use them: only when every x already is.
struct Uses {
  bool only_bfloat16_rows = true;
  int64_t rows = 1;  // the most that one product with this weight has
};

Uses uses_of(const Program& p, int64_t prep) {
  Uses uses;
  for (const Stage& s : p.stages)
    for (const Instruction& i : s.body)
      if (const auto* m = std::get_if<Matmul>(&i); m != nullptr && m->weight == prep) {
        uses.only_bfloat16_rows &= m->x.ref.dtype == DType::kBF16;
        uses.rows = std::max(uses.rows, std::min(p.tile_rows, p.batch_rows) * m->row_multiple);
      }
  return uses;
}

// Cuts an operand of `units` pieces into tasks that are worth a thread's while, and not too many.
void add_tasks(Plan& plan, int64_t index, int64_t units, int64_t unit_bytes) {
  int64_t step = std::max({int64_t{1}, kTaskBytes / std::max<int64_t>(1, unit_bytes), (units - 1) / kMostPrepTasks + 1});
  for (int64_t begin = 0; begin < units; begin += step) plan.prep_tasks.push_back({index, begin, std::min(units, begin + step)});
}

void plan_weight(Plan& plan, int64_t index) {
  const Prep& x = plan.program.preps[index];
  PrepPlan& w = plan.preps[index];
  w.K = product(x.k_extents);
  w.N = product(x.n_extents);
  w.batch = product(x.b_extents);
  const Uses uses = uses_of(plan.program, index);
  bool narrow = x.dtype == DType::kBF16 && uses.only_bfloat16_rows;
  DType type = narrow ? DType::kBF16 : x.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  w.panel = plan.table.panel_for(type, x.product, {uses.rows, w.N, w.K});
  w.k_offset = offsets(x.k_extents, x.k_strides);
  w.n_offset = offsets(x.n_extents, x.n_strides);
  w.b_offset = offsets(x.b_extents, x.b_strides);
  w.batch_bytes = align_up(plan.table.packed_bytes(w.panel, w.K, w.N));
  w.bytes = times(w.batch_bytes, static_cast<size_t>(w.batch));
  w.panels = plan.table.panel_count(w.panel, w.N);
  int64_t panel_bytes = std::max<int64_t>(1, static_cast<int64_t>(w.batch_bytes) / std::max<int64_t>(1, w.panels));
  if (!x.local) add_tasks(plan, index, w.batch * w.panels, panel_bytes);
}

void plan_dense(Plan& plan, int64_t index) {
  const Prep& x = plan.program.preps[index];
  PrepPlan& d = plan.preps[index];
  int64_t n = product(x.n_extents), item = static_cast<int64_t>(item_size(x.dtype));
  d.bytes = align_up(static_cast<size_t>(n * item));
  // Checks now that the conversion exists.
  std::string where = "kitsune program: prepared operand " + std::to_string(index);
  Loader(plan.table, compute_type(x.dtype), x.source.dtype, where);
  Storer(plan.table, x.dtype, compute_type(x.dtype), where);
  int64_t outer = x.n_extents.empty() ? 1 : x.n_extents[0];
  d.panels = outer;
  if (!x.local) add_tasks(plan, index, outer, n / outer * item);
}

void prepare_dense(const Prep& x, const KernelTable& table, int64_t begin, int64_t end, const char* source, char* out, char* temp) {
  const int64_t item = static_cast<int64_t>(item_size(x.dtype)), from = static_cast<int64_t>(item_size(x.source.dtype));
  const DType compute = compute_type(x.dtype);
  Loader load(table, compute, x.source.dtype, "");
  Storer store(table, x.dtype, compute, "");
  char* values = temp;
  char* spare = temp + kPrepChunk * 8;
  // Operands: source, destination; the first extent covers [begin, end).
  std::vector<int64_t> extents = x.n_extents, source_bytes{0}, out_bytes{0};
  if (extents.empty()) extents.push_back(1);
  int64_t dense = item;
  for (size_t d = 0; d < extents.size(); ++d) {
    source_bytes.push_back(x.n_extents.empty() ? 0 : x.n_strides[d] * from);
    out_bytes.push_back(0);
  }
  for (size_t d = extents.size(); d-- > 0; dense *= extents[d]) out_bytes[d + 1] = dense;
  char* at[2] = {const_cast<char*>(source) + begin * source_bytes[1], out + begin * out_bytes[1]};
  extents[0] = end - begin;
  Nest nest = make_nest(extents, {source_bytes, out_bytes});
  nest.erase(nest.begin());  // no rows
  simplify(nest);
  if (nest.empty()) nest.push_back({1, false, -1, {from, item}});
  const Dim inner = nest.back();
  int64_t index[kMaxLoopDims + 1];
  walk(nest.data(), static_cast<int>(nest.size()) - 1, 1, at, 2, index, [&] {
    if (x.dtype == x.source.dtype && inner.stride[0] == item && inner.stride[1] == item) {
      std::memcpy(at[1], at[0], static_cast<size_t>(inner.n * item));
      return;
    }
    for (int64_t i = 0; i < inner.n; i += kPrepChunk) {
      int64_t n = std::min(kPrepChunk, inner.n - i);
      load(n, values, at[0] + i * inner.stride[0], inner.stride[0] / from, spare);
      store(n, at[1] + i * inner.stride[1], inner.stride[1] / item, values, spare);
    }
  });
}

// A worker keeps so many bytes of what it has packed.
constexpr size_t kKeptPacked = size_t{4} << 20;

// Slots of what Pack instructions prepare inside of loops: all blocks of a batch, if there is space.
void plan_slots(Plan& plan, const Pack& pack, const std::vector<int64_t>& counts) {
  const Prep& x = plan.program.preps[pack.prep];
  PrepPlan& w = plan.preps[pack.prep];
  std::vector<size_t> moving;
  for (size_t l = 0; l < x.source.loop_strides.size(); ++l)
    if (x.source.loop_strides[l] != 0) moving.push_back(l);
  w.kept = x.source.space == Space::kIn;
  if (!w.kept || moving.size() != 1) return;
  int64_t local = 0;
  for (const Prep& p : plan.program.preps) local += p.local;
  const int64_t most = static_cast<int64_t>(kKeptPacked / std::max<size_t>(w.bytes, 1)) / local;
  w.loop = moving[0];
  w.slots = std::max(w.slots, std::clamp<int64_t>(most, 1, counts[w.loop]));
}

void plan_slots(Plan& plan) {
  for (const Stage& stage : plan.program.stages) {
    std::vector<int64_t> counts;
    std::vector<size_t> ends;
    for (size_t i = 0; i < stage.body.size(); ++i) {
      while (!ends.empty() && ends.back() == i) ends.pop_back(), counts.pop_back();
      if (const auto* loop = std::get_if<Loop>(&stage.body[i])) {
        counts.push_back(loop->count);
        ends.push_back(i + 1 + static_cast<size_t>(loop->length));
      } else if (const auto* pack = std::get_if<Pack>(&stage.body[i])) {
        plan_slots(plan, *pack, counts);
      }
    }
  }
}

}  // namespace

void plan_preps(Plan& plan) {
  plan.preps.resize(plan.program.preps.size());
  for (size_t i = 0; i < plan.preps.size(); ++i) {
    if (plan.program.preps[i].kind == PrepKind::kWeight)
      plan_weight(plan, static_cast<int64_t>(i));
    else
      plan_dense(plan, static_cast<int64_t>(i));
    plan.preps[i].local = plan.program.preps[i].local;
  }
  plan_slots(plan);
  for (PrepPlan& w : plan.preps) {
    size_t& bytes = w.local ? plan.packed_bytes : plan.prep_bytes;
    w.offset = bytes;
    bytes = plus(bytes, times(w.bytes, static_cast<size_t>(w.slots)));
    w.first_slot = plan.packed_slots;
    if (w.local) plan.packed_slots += w.slots;
  }
  limit_memory(plan.prep_bytes, plan.program.inputs, plan.program.outputs, "packed weights");
}

void prepare(const Prep& x, const PrepPlan& w, const KernelTable& table, int64_t begin, int64_t end, const char* source, char* out,
             char* temp) {
  if (x.kind == PrepKind::kDense) return prepare_dense(x, table, begin, end, source, out, temp);
  const int64_t item = static_cast<int64_t>(item_size(x.source.dtype));
  for (int64_t at = begin; at < end;) {
    int64_t batch = at / w.panels, first = at % w.panels, last = std::min(w.panels, first + end - at);
    PackSource pack{source + w.b_offset[batch] * item, x.source.dtype, w.K, w.N, w.k_offset.data(), w.n_offset.data()};
    table.pack(w.panel, pack, first, last, out + static_cast<size_t>(batch) * w.batch_bytes);
    at += last - first;
  }
}

void run_prep_task(const Plan& plan, const PrepTask& t, char* const* ins, char* prepared, char* temp) {
  const Prep& x = plan.program.preps[t.prep];
  const PrepPlan& w = plan.preps[t.prep];
  const char* source = ins[x.source.index] + x.source.offset * static_cast<int64_t>(item_size(x.source.dtype));
  prepare(x, w, plan.table, t.begin, t.end, source, prepared + w.offset, temp);
}

// Matmul: one gemm call per batch, on panels packed before. AccumulateMatmul: one outer product per batch, into the
// strand. Its sums lie in groups of columns (kSumGroup); store_sums makes dense rows of them.

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
    // A power of two changes no bit of a bfloat16 number but its exponent: storing rounds the product as it would have rounded the
    // sum.
    int exponent = 0;
    const bool exact = m.activation == Activation::kScale && std::frexp(std::abs(m.parameters[0]), &exponent) == 0.5;
    if (exact && m.bias < 0 && m.rounds == DType::kBF16 && m.out.ref.dtype == DType::kBF16) args_.rounds = DType::kF32;
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

// Dot: a product for each row of two tiles. Small matrices are multiplied as they lie; of others, Y of one row and batch is packed
// as a weight would be, then the gemm of weights runs.

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

// TakenDot: for each row of a tile and each head the product of two rows, read where they lie in a tile or a table.

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

// Loop, Stationary and Pack: what runs other steps again, and what is prepared for products while a tile is at work.

namespace {

class LoopStep final : public Step {
 public:
  LoopStep(const Loop& x, int depth, Steps body)
      : count_(x.count), reverse_(x.reverse), within_(x.within), depth_(depth), body_(std::move(body)) {
    for (const auto& step : body_)
      if (step->fetches(depth_)) fetching_.push_back(step.get());
  }

  void run(const Context& c) const override {
    Bounds b{0, count_, 0, 0};
    if (within_) b = bounds(c, *within_);
    Context part = c;
    for (int64_t n = b.first; n < b.end; ++n) {
      const int64_t i = reverse_ ? b.end - 1 - (n - b.first) : n;
      if (b.left_out <= i && i < b.left_out_end) continue;
      if (!fetching_.empty() && n + 1 < b.end) {
        c.loops[depth_] = reverse_ ? i - 1 : i + 1;
        for (const Step* step : fetching_) step->fetch(c);
      }
      c.loops[depth_] = i;
      if (within_) take_rows(c, *within_, i, part);
      for (const auto& step : body_) step->run(part);
    }
  }

 private:
  struct Bounds {
    int64_t first, end, left_out, left_out_end;
  };

  // The smallest and the largest index of the tile's rows. `wraps`: all indices, because the tile has the end of the axis in it.
  struct Span {
    int64_t x, y;
    bool wraps;
  };
  static Span span(const Context& c, const Within& w) {
    const int64_t x = c.row0 / w.divisor, y = (c.row0 + c.rows - 1) / w.divisor;
    if (y - x >= w.extent || x % w.extent > y % w.extent) return {0, w.extent - 1, true};
    return {x % w.extent, y % w.extent, false};
  }

  Bounds bounds(const Context& c, const Within& w) const {
    const auto [x, y, wraps] = span(c, w);
    auto up_to = [&](int64_t elements, int64_t iterations) {
      const int64_t n = elements < 0 ? 0 : elements / (w.step * iterations);
      return std::clamp<int64_t>(n * iterations, 0, count_);
    };
    const int64_t first = up_to(x + w.low, 1), end = up_to(y + w.high + w.step, 1);
    const int64_t whole = up_to(y + w.low + w.step * w.together - 1, w.together);
    const int64_t whole_end = std::max(whole, up_to(x + w.high + 1, w.together));
    if (w.which == 1) return {whole, whole_end, 0, 0};
    if (w.which == 2) return {first, end, whole, whole_end};
    return {first, end, 0, 0};
  }

  // The rows of the tile that see an element of iteration i, and others beside them up to whole blocks of products.
  void take_rows(const Context& c, const Within& w, int64_t i, Context& part) const {
    constexpr int64_t kUnit = 32;
    const auto [x, y, wraps] = span(c, w);
    const int64_t from = std::max(x, i * w.step - w.high), to = std::min(y, (i + 1) * w.step - 1 - w.low);
    int64_t first = 0, end = c.rows;
    if (!wraps && w.which != 1 && from <= to) {
      const int64_t index0 = (c.row0 / w.divisor - x) * w.divisor - c.row0;  // the row of index 0
      first = std::max<int64_t>(0, index0 + from * w.divisor) / kUnit * kUnit;
      end = std::min(end, (index0 + (to + 1) * w.divisor + kUnit - 1) / kUnit * kUnit);
    }
    part.skipped = c.skipped + first;
    part.row0 = c.row0 + first;
    part.first_row = c.first_row + first;
    part.rows = end - first;
  }

  int64_t count_;
  bool reverse_;
  std::optional<Within> within_;
  int depth_;
  Steps body_;
  std::vector<const Step*> fetching_;
};

class StationaryStep final : public Step {
 public:
  explicit StationaryStep(Steps body) : body_(std::move(body)) {}

  void run(const Context& c) const override {
    Context one = c;
    one.rows = 1;
    for (const auto& step : body_) step->run(one);
  }

 private:
  Steps body_;
};

class PackStep final : public Step {
 public:
  PackStep(const Prep& x, const PrepPlan& plan, const KernelTable& table)
      : prep_(x), plan_(plan), table_(table), source_(x.source, 0), units_(std::max<int64_t>(1, plan.panels) * plan.batch) {
    temp_bytes_ = kPrepTempBytes;
  }

  void run(const Context& c) const override {
    const char* source = source_.of(c);
    if (plan_.kept) {
      const char*& from = c.packed_from[plan_.first_slot + plan_.slot(c.loops)];
      if (from == source) return;
      from = source;
    }
    prepare(prep_, plan_, table_, 0, units_, source, Prepared::packed(plan_, c), c.temp);
  }

 private:
  const Prep& prep_;  // of the program, which lives as long as the plan that owns this step
  const PrepPlan& plan_;
  const KernelTable& table_;
  Address source_;
  int64_t units_;
};

}  // namespace

std::unique_ptr<const Step> compile(const Loop& x, int depth, Steps body) {
  return std::make_unique<LoopStep>(x, depth, std::move(body));
}

std::unique_ptr<const Step> compile(const Stationary&, Steps body) { return std::make_unique<StationaryStep>(std::move(body)); }

std::unique_ptr<const Step> compile(const Pack& x, const Compile& c) {
  return std::make_unique<PackStep>(c.program.preps[x.prep], c.preps[x.prep], c.table);
}

}  // namespace kitsune::cpu
