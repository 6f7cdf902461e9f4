// Take and Put: elements of a dimension, selected and put back by indices that no row changes.
#include <cstring>
#include <utility>

#include "indices.h"

namespace kitsune::cpu {
namespace {

// What both have: the loops around the selection, and the indices as int32, -1 for those out of range.
class Selection {
 public:
  Selection(const Select& s, const KernelTable& table)
      : index_(s.index.ref, 0),
        read_(table.read_indices(s.index.ref.dtype)),
        index_step_(s.index.strides[0] * static_cast<int64_t>(item_size(s.index.ref.dtype))),
        x_(s.x.ref, s.x.row_stride),
        out_(s.out.ref, s.out.row_stride),
        count_(s.count),
        indices_(s.indices) {
    std::vector<int64_t> x = byte_strides(s.x), out = byte_strides(s.out);
    x.pop_back(), out.pop_back();
    nest_ = make_nest(s.outer, {x, out});
    simplify(nest_);
  }

  void resolve(const Context& c, int32_t* to, bool clip) const {
    int64_t block[kIndexBlock];
    const char* from = index_.of(c);
    for (int64_t i = 0; i < indices_; i += kIndexBlock) {
      const int64_t n = std::min(kIndexBlock, indices_ - i);
      read_(n, from + i * index_step_, index_step_, count_, block);
      for (int64_t k = 0; k < n; ++k) {
        const int64_t nearest = std::clamp<int64_t>(block[k], 0, count_ - 1);
        to[i + k] = clip || nearest == block[k] ? static_cast<int32_t>(nearest) : -1;
      }
    }
  }

  // Calls f(x, out) for every row of the tile and every index of the loops around the selection.
  template <class F>
  void each(const Context& c, F f) const {
    char* at[2] = {x_.of(c), out_.of(c)};
    int64_t counter[kMaxLoopDims + 1];
    walk(nest_.data(), static_cast<int>(nest_.size()), c.rows, at, 2, counter, [&] { f(at[0], at[1]); });
  }

 private:
  Address index_;
  ReadIndicesFn read_;
  int64_t index_step_;
  Address x_, out_;
  int64_t count_, indices_;
  Nest nest_;
};

// out[i] <- x[at[i]], `inner` elements each, or 0 where at[i] is -1.
class Taker {
 public:
  Taker(const KernelTable& table, int64_t item, int64_t inner, int64_t n)
      : one_(table.take(item)), rows_(table.gather_rows), bytes_(item * inner), n_(n), single_(inner == 1) {}
  // For the offsets of rows of several elements.
  size_t temp_bytes() const { return single_ ? 0 : align_up(times(static_cast<size_t>(n_), sizeof(int64_t))); }
  // Once for a tile; `offsets` has temp_bytes().
  void prepare(const int32_t* at, char* offsets) const {
    if (single_) return;
    int64_t* to = reinterpret_cast<int64_t*>(offsets);
    for (int64_t i = 0; i < n_; ++i) to[i] = std::max<int64_t>(at[i], 0) * bytes_;
  }
  void operator()(const int32_t* at, const char* offsets, const char* x, char* out) const {
    if (single_) return one_(n_, at, x, out);
    rows_(n_, reinterpret_cast<const int64_t*>(offsets), x, out, bytes_, bytes_);
    for (int64_t i = 0; i < n_; ++i)
      if (at[i] < 0) std::memset(out + i * bytes_, 0, static_cast<size_t>(bytes_));
  }

 private:
  TakeFn one_;
  GatherRowsFn rows_;
  int64_t bytes_, n_;
  bool single_;
};

class TakeStep final : public Step {
 public:
  TakeStep(const Take& t, const Compile& c)
      : selection_(t, c.table),
        item_(static_cast<int64_t>(item_size(t.x.ref.dtype))),
        take_(c.table, item_, t.inner, t.indices),
        n_(t.indices),
        inner_(t.inner),
        clip_(t.mode == OutOfRange::kClip) {
    const DType type = t.out.ref.dtype, compute = compute_type(type);
    char value[8], spare[8];
    fill_constant(compute, value, 1, t.fill);
    Storer(c.table, type, compute, c.where)(1, fill_, 1, value, spare);
    at_bytes_ = align_up(times(static_cast<size_t>(n_), sizeof(int32_t)));
    temp_bytes_ = plus(at_bytes_, take_.temp_bytes());
  }

  void run(const Context& c) const override {
    int32_t* at = reinterpret_cast<int32_t*>(c.temp);
    char* offsets = c.temp + at_bytes_;
    selection_.resolve(c, at, clip_);
    take_.prepare(at, offsets);
    bool outside = false;
    for (int64_t i = 0; i < n_ && !clip_; ++i) outside |= at[i] < 0;
    selection_.each(c, [&](const char* x, char* out) {
      take_(at, offsets, x, out);
      if (outside) fill(at, out);
    });
  }

 private:
  void fill(const int32_t* at, char* out) const {
    for (int64_t i = 0; i < n_; ++i)
      for (int64_t e = 0; at[i] < 0 && e < inner_; ++e)
        std::memcpy(out + (i * inner_ + e) * item_, fill_, static_cast<size_t>(item_));
  }

  Selection selection_;
  int64_t item_;
  Taker take_;
  int64_t n_, inner_;
  bool clip_;
  size_t at_bytes_ = 0;
  char fill_[8];
};

// Where no index is there twice, putting is taking by the inverse of the indices. Else the elements are added up, in their order.
class PutStep final : public Step {
 public:
  PutStep(const Put& t, const Compile& c)
      : selection_(t, c.table),
        item_(static_cast<int64_t>(item_size(t.x.ref.dtype))),
        take_(c.table, item_, t.inner, t.count),
        n_(t.indices),
        count_(t.count),
        inner_(t.inner),
        type_(accumulator_type(Reduction::kSum, t.x.ref.dtype, false)),
        acc_item_(static_cast<int64_t>(item_size(type_))),
        add_(c.table.fold_table(static_cast<int>(Reduction::kSum), t.x.ref.dtype, false)),
        store_(c.table, t.out.ref.dtype, type_, c.where) {
    const size_t offsets = align_up(times(static_cast<size_t>(n_), sizeof(int64_t)));
    at_bytes_ = align_up(times(static_cast<size_t>(n_), sizeof(int32_t)));
    inverse_bytes_ = align_up(times(static_cast<size_t>(count_), sizeof(int32_t)));
    offsets_bytes_ = std::max(offsets, take_.temp_bytes());
    sum_bytes_ = align_up(times(static_cast<size_t>(count_ * inner_), 8));
    temp_bytes_ = plus(plus(at_bytes_, inverse_bytes_), plus(times(2, offsets_bytes_), times(2, sum_bytes_)));
  }

  void run(const Context& c) const override {
    int32_t* at = reinterpret_cast<int32_t*>(c.temp);
    int32_t* inverse = reinterpret_cast<int32_t*>(c.temp + at_bytes_);
    char* offsets = c.temp + at_bytes_ + inverse_bytes_;
    selection_.resolve(c, at, false);
    std::fill_n(inverse, count_, -1);
    bool twice = false;
    for (int64_t i = 0; i < n_; ++i)
      if (at[i] >= 0) twice |= std::exchange(inverse[at[i]], static_cast<int32_t>(i)) >= 0;
    if (twice) return sum(c, at, offsets);
    take_.prepare(inverse, offsets);
    selection_.each(c, [&](const char* x, char* out) { take_(inverse, offsets, x, out); });
  }

 private:
  void sum(const Context& c, const int32_t* at, char* offsets) const {
    int64_t *from = reinterpret_cast<int64_t*>(offsets), *to = reinterpret_cast<int64_t*>(offsets + offsets_bytes_);
    char *sums = offsets + 2 * offsets_bytes_, *spare = sums + sum_bytes_;
    int64_t m = 0;
    for (int64_t i = 0; i < n_; ++i) {
      from[m] = i * inner_ * item_;
      to[m] = at[i] * inner_ * acc_item_;
      m += at[i] >= 0;
    }
    const int64_t elements = count_ * inner_;
    selection_.each(c, [&](const char* x, char* out) {
      std::memset(sums, 0, static_cast<size_t>(elements * acc_item_));
      add_(m, from, to, x, inner_, sums);
      store_(elements, out, 1, sums, spare);
    });
  }

  Selection selection_;
  int64_t item_;
  Taker take_;
  int64_t n_, count_, inner_;
  DType type_;
  int64_t acc_item_;
  FoldTableFn add_;
  Storer store_;
  size_t at_bytes_ = 0, inverse_bytes_ = 0, offsets_bytes_ = 0, sum_bytes_ = 0;
};

}  // namespace

std::unique_ptr<const Step> compile(const Take& x, const Compile& c) { return std::make_unique<TakeStep>(x, c); }
std::unique_ptr<const Step> compile(const Put& x, const Compile& c) { return std::make_unique<PutStep>(x, c); }

}  // namespace kitsune::cpu
