// Folds of rows that indices put together, and the largest element of each run of equal indices.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "indices.h"
#include "segments.h"
#include "taken_rows.h"

namespace kitsune::cpu {

namespace {

// Sums of rows that were scaled by e^-top, where a tile knows only the largest score of its own rows: the state of an online
// softmax. Each head's sum has a top of its own. Two sums are added up at the larger of their tops, to which each is scaled first.

// What rows are scaled by: no infinity, and no NaN.
double scaled_by(float top) { return std::isfinite(top) ? static_cast<double>(top) : 0.0; }

// What a sum at `top` is multiplied by to be one at `to`. Rows whose scores are all -inf have added up to 0, or to a NaN.
double rescaling(float top, float to) {
  if (top == to || top == -std::numeric_limits<float>::infinity() || std::isnan(to)) return 1.0;
  return std::exp(scaled_by(top) - scaled_by(to));
}

// A NaN among the scores stays.
float higher(float a, float b) { return a > b || a != a ? a : b; }

// into and its tops <- the sum of both.
void add_scaled(int64_t heads, int64_t inner, double* into, float* top, const double* from, const float* from_top) {
  for (int64_t h = 0; h < heads; ++h, into += inner, from += inner) {
    const float to = higher(top[h], from_top[h]);
    const double mine = rescaling(top[h], to), other = rescaling(from_top[h], to);
    for (int64_t j = 0; j < inner; ++j) into[j] = into[j] * mine + from[j] * other;
    top[h] = to;
  }
}

bool all_finite(int64_t n, const float* top) {
  bool finite = true;
  for (int64_t h = 0; h < n; ++h) finite &= std::isfinite(top[h]);
  return finite;
}

// A softmax of scores whose largest is an infinity or a NaN is NaN.
template <class T>
void spoil(int64_t heads, int64_t inner, T* sum, const float* top) {
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t j = 0; j < inner && !std::isfinite(top[h]); ++j) sum[h * inner + j] = std::numeric_limits<T>::quiet_NaN();
}

// The rows of a tile that fold into a sink by index, block by block, without those whose index is outside of it. They lie in a
// tile, in an input that is read in the order of the stream, or in a table, where a second index says which of its rows.

// Row i goes to index[i], lies at x + at[i], and is row[i] of the tile. `known`: rows whose place is in `at`, those of the next
// block among them.
struct RowBlock {
  int64_t n, known;
  const int64_t *at, *index, *row;
  const char* x;
  RowBlock part(int64_t begin, int64_t end) const {
    return {end - begin, known - begin, at + begin, index + begin, row + begin, x};
  }
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
      if (all) return f(RowBlock{n, known, at, index, row, base});
      int64_t m = 0;
      for (int64_t i = 0; i < n; ++i) {
        inside[m] = index[i];
        at[m] = at[i];
        row[m] = row[i];
        m += static_cast<uint64_t>(index[i]) < count_;
      }
      if (m > 0) f(RowBlock{m, m, at, inside, row, base});
    });
  }
  // Do rows lie far from each other?
  bool apart() const { return order_ >= 0 || taken_ != nullptr; }
  // How those of a block are asked for before their turn.
  Ahead ahead(const RowBlock& b) const { return {apart() ? b.known : 0, far_}; }

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

// RunMax: for each row of a tile the largest of its run, which are the rows around it that have its index.

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

// AccumulateAt: rows of a tile folded into the rows of a sink that a tile of indices names. Sorted indices make runs (segments.h);
// others fold into a table of the strand's own. AccumulateTaken reads its rows where a table has them.

namespace {

// The tops of a scaled sum's rows.
class Tops {
 public:
  Tops(const AccumulateScaled& a, const Compile& c)
      : top_(a.top.ref, a.top.row_stride),
        row_bytes_(a.top.row_stride * static_cast<int64_t>(item_size(a.top.ref.dtype))),
        step_(a.top.strides[0]),
        heads_(a.heads),
        inner_(product(a.extents) / a.heads),
        finite_(a.finite),
        dense_(a.top.ref.dtype == DType::kF32 && (step_ == 1 || heads_ == 1)),
        load_(c.table, DType::kF32, a.top.ref.dtype, c.where) {}

  int64_t heads() const { return heads_; }
  int64_t inner() const { return inner_; }
  // Tops of a row, [heads]: where they lie, or in `to`, by way of `spare`.
  const float* of(const Context& c, int64_t row, float* to, char* spare) const {
    const char* const at = top_.of(c) + row * row_bytes_;
    if (dense_) return reinterpret_cast<const float*>(at);
    load_(heads_, to, at, step_, spare);
    return to;
  }
  // May a sum at these tops be stored as it is?
  bool plain(const float* top) const { return finite_ || all_finite(heads_, top); }

 private:
  Address top_;
  int64_t row_bytes_, step_, heads_, inner_;
  bool finite_, dense_;
  Loader load_;
};

// The numbers that rows are multiplied by.
struct Factors {
  Address first;
  int64_t n, step;  // of a row; from one row to the next
  FoldScaledFn fold;
  Factors(const AccumulateTaken& a, const KernelTable& table)
      : first(a.factor.ref, a.factor.row_stride), n(a.factors), step(a.factor.row_stride), fold(table.fold_scaled(a.x.ref.dtype)) {}
};

class TableStep final : public Step {
 public:
  TableStep(const AccumulateAt& a, const Compile& c) : rows_(a, c), offset_(c.sinks[a.sink].offset), width_(product(a.extents)) {
    const DType acc = c.sinks[a.sink].acc;
    row_bytes_ = width_ * static_cast<int64_t>(item_size(acc));
    fold_ = c.table.fold_table(static_cast<int>(c.program.sinks[a.sink].how), a.x.ref.dtype, acc == DType::kF64);
    if (fold_ == nullptr) throw ProgramError(c.where + ": this reduction is not defined for " + dtype_name(a.x.ref.dtype));
  }

  void run(const Context& c) const override {
    int64_t to[kIndexBlock];
    rows_.blocks(c, [&](const RowBlock& b) {
      for (int64_t i = 0; i < b.n; ++i) to[i] = b.index[i] * row_bytes_;
      fold_(b.n, b.at, to, b.x, width_, c.strand + offset_);
    });
  }

 private:
  InsideRows rows_;
  size_t offset_;
  int64_t width_, row_bytes_;
  FoldTableFn fold_;
};

// A run that ends inside of its block is folded into the result at once; the first of a strand and the last of a block, which may
// go on, into sums in the accumulator's wide type. So no more than a block of rows is added up in float32.
class SegmentsStep final : public Step {
 public:
  SegmentsStep(const AccumulateAt& a, const Compile& c, std::unique_ptr<const Tops> tops = nullptr,
               const AccumulateTaken* taken = nullptr)
      : tops_(std::move(tops)),
        rows_(a, c, taken),
        how_(c.program.sinks[a.sink].how),
        offset_(c.sinks[a.sink].offset),
        width_(product(a.extents)),
        out_(c.program.sinks[a.sink].out),
        sum_type_(c.sinks[a.sink].acc),
        sum_bytes_(Segments::sum_bytes(width_, sum_type_)),
        type_(accumulator_type(how_, a.x.ref.dtype, false)),
        fold_(c.table.fold_runs(static_cast<int>(how_), a.x.ref.dtype)),
        fold_narrow_(c.table.fold_narrow(static_cast<int>(how_), a.x.ref.dtype)) {
    if (taken != nullptr && taken->factors > 0) factors_ = std::make_unique<const Factors>(*taken, c.table);
    if (fold_ == nullptr) throw ProgramError(c.where + ": this reduction is not defined for " + dtype_name(a.x.ref.dtype));
    const DType result = c.program.outputs[out_].dtype;
    widen_ = Loader(c.table, sum_type_, type_, c.where);
    store_ = Storer(c.table, result, type_, c.where);
    store_sum_ = Storer(c.table, result, sum_type_, c.where);
    result_bytes_ = static_cast<size_t>(width_) * item_size(result);
    straight_ = result == type_;
    run_bytes_ = align_up(times(static_cast<size_t>(width_), item_size(type_)));
    spare_bytes_ = align_up(times(static_cast<size_t>(width_), 8));
    top_bytes_ = tops_ ? Segments::top_bytes(tops_->heads()) : 0;
    temp_bytes_ =
        plus(times(static_cast<size_t>(straight_ ? 2 : kIndexBlock), run_bytes_), plus(times(2, spare_bytes_), top_bytes_));
    // The identity, as the result has it.
    std::vector<char> value(spare_bytes_), spare(spare_bytes_);
    identity_.resize(result_bytes_);
    fill_identity(how_, type_, width_, value.data());
    store_(width_, identity_.data(), 1, value.data(), spare.data());
  }

  void run(const Context& c) const override {
    Segments& kept = *reinterpret_cast<Segments*>(c.strand + offset_);
    const bool narrow = straight_ && width_ <= kNarrow && !rows_.apart();
    rows_.blocks(c, [&](const RowBlock& b) {
      const int64_t n = b.n, *const index = b.index;
      if (!narrow || kept.first < 0 || index[0] == index[n - 1] || (tops_ && !plain(c, b))) return block(c, kept, b);
      // The run that goes on from the block before, whole runs at once, and the run that may go on.
      int64_t begin = 0, end = n - 1;
      while (index[begin] == kept.last) ++begin;
      while (index[end - 1] == index[n - 1]) --end;
      if (begin > 0) block(c, kept, b.part(0, begin));
      if (begin < end) {
        close(c, kept, c.temp, false);
        fold_narrow_(end - begin, index + begin, b.at + begin, b.x, width_, c.outs[out_], &kept.filled);
        kept.last = kept.stored = index[end - 1];
      }
      block(c, kept, b.part(end, n));
    });
  }

 private:
  void block(const Context& c, Segments& kept, const RowBlock& b) const {
    const int64_t n = b.n, *const index = b.index;
    char* const runs = c.temp;
    char* const spare = runs + static_cast<size_t>(straight_ ? 2 : kIndexBlock) * run_bytes_;
    int64_t start[kIndexBlock + 1], count = 0;
    for (int64_t i = 0; i < n; ++i) {
      start[count] = i;
      count += i + 1 == n || index[i + 1] != index[i];
    }
    // start[k] is now the last row of run k; its first one is behind the last of run k - 1.
    for (int64_t k = count; k > 0; --k) start[k] = start[k - 1] + 1;
    start[0] = 0;
    void* into[kIndexBlock];
    const bool goes_on = kept.last == index[0], aside = goes_on || kept.first < 0;
    for (int64_t k = 0; k < count; ++k) {
      const bool direct = straight_ && k + 1 < count && !(k == 0 && aside);
      const size_t place = straight_ ? (k == 0 && count > 1 ? 0 : 1) : static_cast<size_t>(k);
      into[k] = direct ? row(c, index[start[k]]) : runs + place * run_bytes_;
    }
    if (factors_)
      factors_->fold(count, start, b.at, b.x, width_, b.row, reinterpret_cast<const float*>(factors_->first.of(c)), factors_->step,
                     factors_->n, rows_.ahead(b), into);
    else
      fold_(count, start, b.at, b.x, width_, rows_.ahead(b), into);
    auto* const loaded = reinterpret_cast<float*>(spare + 2 * spare_bytes_);
    for (int64_t k = 0; k < count; ++k) {
      const int64_t segment = index[start[k]];
      const float* const top = tops_ ? tops_->of(c, b.row[start[k]], loaded, spare) : nullptr;
      if (k == 0 && goes_on) {
        widen_(width_, spare, into[0], 1, spare + spare_bytes_);
        add(kept, spare, top);
        continue;
      }
      close(c, kept, spare, k > 1 || (k == 1 && !goes_on));
      fill(c, kept, segment);
      const bool first = kept.first < 0;
      if (first) kept.first = segment;
      kept.last = segment;
      if (first || k + 1 == count) {
        widen_(width_, open(kept), into[k], 1, spare);
        if (tops_) std::memcpy(open_top(kept), top, static_cast<size_t>(tops_->heads()) * sizeof(float));
        continue;
      }
      if (tops_ && !tops_->plain(top)) spoil(tops_->heads(), tops_->inner(), static_cast<float*>(into[k]), top);
      if (!straight_) store_(width_, row(c, segment), 1, into[k], spare);
    }
  }

  // Adds a run to the sum of the segment that it goes on with.
  void add(Segments& kept, const char* run, const float* top) const {
    if (!tops_) return combine(how_, sum_type_, width_, open(kept), run);
    add_scaled(tops_->heads(), tops_->inner(), reinterpret_cast<double*>(open(kept)), open_top(kept),
               reinterpret_cast<const double*>(run), top);
  }

  // Are the sums of all runs of a block what is stored?
  bool plain(const Context& c, const RowBlock& b) const {
    char* const spare = c.temp + static_cast<size_t>(straight_ ? 2 : kIndexBlock) * run_bytes_;
    auto* const loaded = reinterpret_cast<float*>(spare + 2 * spare_bytes_);
    bool all = true;
    for (int64_t i = 0; i < b.n && all; ++i) {
      if (i > 0 && b.index[i] == b.index[i - 1]) continue;
      all = tops_->plain(tops_->of(c, b.row[i], loaded, spare));
    }
    return all;
  }

  char* row(const Context& c, int64_t segment) const { return c.outs[out_] + static_cast<size_t>(segment) * result_bytes_; }
  // The sum of the segment that may go on.
  char* open(Segments& kept) const { return kept.sum(kept.last != kept.first, sum_bytes_); }
  float* open_top(Segments& kept) const { return kept.top(kept.last != kept.first, sum_bytes_, tops_->heads()); }

  // The segment that was open has ended. One that a block met the end of is stored already, and the first one is kept.
  void close(const Context& c, Segments& kept, char* spare, bool stored) const {
    if (stored || kept.first < 0 || kept.last == kept.first || kept.last == kept.stored) return;
    if (tops_ && !tops_->plain(open_top(kept)))
      spoil(tops_->heads(), tops_->inner(), reinterpret_cast<double*>(open(kept)), open_top(kept));
    store_sum_(width_, row(c, kept.last), 1, open(kept), spare);
  }
  // The rows up to the next segment.
  void fill(const Context& c, Segments& kept, int64_t next) const {
    if (kept.first >= 0) fill_rows(row(c, kept.filled + 1), next - kept.filled - 1, identity_.data(), result_bytes_);
    kept.filled = std::max(kept.filled, next);
  }

  std::unique_ptr<const Tops> tops_;  // of a scaled sum
  InsideRows rows_;
  Reduction how_;
  size_t offset_;
  int64_t width_, out_;
  DType sum_type_;  // of what is kept
  size_t sum_bytes_;
  DType type_;  // of a run
  FoldRunsFn fold_;
  FoldNarrowFn fold_narrow_;
  std::unique_ptr<const Factors> factors_;  // of rows that are multiplied
  Loader widen_;
  Storer store_, store_sum_;
  size_t result_bytes_, run_bytes_, spare_bytes_, top_bytes_;
  bool straight_;  // is a run's type that of the result?
  std::vector<char> identity_;
};

}  // namespace

void finish_segments(const Plan& plan, int64_t sink, int64_t begin, int64_t end, char* strands, char* out) {
  const Sink& s = plan.program.sinks[sink];
  const SinkPlan& at = plan.sinks[sink];
  const int64_t width = s.elements / s.rows;
  const DType result = plan.program.outputs[s.out].dtype;
  const size_t row_bytes = static_cast<size_t>(width) * item_size(result), sum_bytes = Segments::sum_bytes(width, at.acc);
  const Storer store(plan.table, result, at.acc, "");
  // Written before they are read: zeros in them would take longer than the rows of a piece.
  const std::unique_ptr<char[]> sum(new char[sum_bytes]), spare(new char[sum_bytes]);
  std::unique_ptr<char[]> nothing;
  int64_t pending = -1;  // the segment whose sum is in `sum`, if it is one of these rows
  std::vector<float> top(static_cast<size_t>(s.heads));
  const int64_t inner = s.heads > 0 ? width / s.heads : 0;
  auto here = [&](int64_t segment) { return segment >= begin && segment < end; };
  auto flush = [&] {
    if (!here(pending)) return;
    if (!s.finite) spoil(s.heads, inner, reinterpret_cast<double*>(sum.get()), top.data());
    store(width, out + static_cast<size_t>(pending) * row_bytes, 1, sum.get(), spare.get());
  };
  auto fill = [&](int64_t from, int64_t to) {
    from = std::max(from, begin), to = std::min(to, end);
    if (from >= to) return;
    if (!nothing) {
      const std::unique_ptr<char[]> identity(new char[sum_bytes]);
      nothing.reset(new char[row_bytes]);
      fill_identity(s.how, at.acc, width, identity.get());
      store(width, nothing.get(), 1, identity.get(), spare.get());
    }
    fill_rows(out + static_cast<size_t>(from) * row_bytes, to - from, nothing.get(), row_bytes);
  };
  // Every piece of the result meets the sums of all strands, and touches only its own: they may be as large as the result.
  auto add = [&](int64_t segment, Segments& kept, bool second) {
    const char* const from = kept.sum(second, sum_bytes);
    const float* const from_top = kept.top(second, sum_bytes, s.heads);
    const bool goes_on = segment == pending;
    if (!goes_on) flush();
    pending = segment;
    if (!here(segment)) return;
    if (goes_on && s.heads > 0)
      return add_scaled(s.heads, inner, reinterpret_cast<double*>(sum.get()), top.data(), reinterpret_cast<const double*>(from),
                        from_top);
    if (goes_on) return combine(s.how, at.acc, width, sum.get(), from);
    std::memcpy(sum.get(), from, static_cast<size_t>(width) * item_size(at.acc));
    std::copy_n(from_top, s.heads, top.begin());
  };
  int64_t last = -1;
  for (int64_t l = 0; l < plan.strands; ++l) {
    Segments& kept = *reinterpret_cast<Segments*>(strands + static_cast<size_t>(l) * plan.strand_bytes + at.offset);
    if (kept.first < 0) continue;
    fill(last + 1, kept.first);
    add(kept.first, kept, false);
    if (kept.last != kept.first) add(kept.last, kept, true);
    last = kept.last;
  }
  flush();
  fill(last + 1, s.rows);
}

std::unique_ptr<const Step> compile(const AccumulateAt& x, const Compile& c) {
  if (x.sorted) return std::make_unique<SegmentsStep>(x, c);
  return std::make_unique<TableStep>(x, c);
}

std::unique_ptr<const Step> compile(const AccumulateScaled& x, const Compile& c) {
  return std::make_unique<SegmentsStep>(x, c, std::make_unique<Tops>(x, c));
}

std::unique_ptr<const Step> compile(const AccumulateTaken& x, const Compile& c) {
  return std::make_unique<SegmentsStep>(x, c, x.heads > 0 ? std::make_unique<Tops>(x, c) : nullptr, &x);
}

}  // namespace kitsune::cpu
