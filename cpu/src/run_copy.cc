// Elements brought from one place to another: strided copies, and those that indices choose.

#include <algorithm>
#include <cstring>
#include <utility>

#include "executor_internal.h"
#include "indices.h"
#include "run_vector.h"

namespace kitsune::cpu {

// StridedLoad and StridedStore: copies between a tile and an array whose element address is not linear in the row: it has several
// stream axes, or the stream has an order of its own.

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

// Take and Put: elements of a dimension, selected and put back by indices that no row changes.

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

// Gather: rows of a table, chosen by a tile of indices.

namespace {

// Byte strides of (rows, *index_extents) of an operand that loops over (rows, *index_extents, *extents).
std::vector<int64_t> outer_strides(const Operand& x, size_t outer) {
  std::vector<int64_t> s = byte_strides(x);
  s.resize(outer + 1);
  return s;
}

// The nest of one row of the table and of the tile, in bytes; at least one dimension.
Nest row_nest(const Gather& g, int64_t item) {
  Nest nest;
  for (size_t d = 0; d < g.extents.size(); ++d)
    nest.push_back({g.extents[d], false, -1, {g.table.strides[d] * item, g.out.strides[g.index_extents.size() + d] * item}});
  simplify(nest);
  if (nest.empty()) nest.push_back({1, false, -1, {item, item}});
  return nest;
}

class GatherStep final : public Step {
 public:
  GatherStep(const Gather& g, const Compile& c)
      : indices_(c.table, g.index, g.out, g.index_extents, g.count),
        table_(g.table.ref, 0),
        item_(static_cast<int64_t>(item_size(g.table.ref.dtype))),
        row_bytes_(g.table.row_stride * item_),
        last_(g.count - 1),
        clip_(g.mode == OutOfRange::kClip),
        nest_(row_nest(g, item_)),
        gather_(c.table.gather_rows) {
    const Dim& inner = nest_.back();
    dense_ = nest_.size() == 1 && inner.stride[0] == item_ && inner.stride[1] == item_;
    const DType type = g.out.ref.dtype, compute = compute_type(type);
    char value[8], spare[8];
    fill_constant(compute, value, 1, g.fill);
    Storer(c.table, type, compute, c.where)(1, fill_, 1, value, spare);
  }

  void run(const Context& c) const override {
    const char* table = table_.of(c);
    int64_t at[kIndexBlock];
    indices_.blocks(c, [&](int64_t n, const int64_t* index, bool inside, char* out, int64_t step) {
      if (inside)
        for (int64_t i = 0; i < n; ++i) at[i] = index[i] * row_bytes_;
      else
        for (int64_t i = 0; i < n; ++i) at[i] = std::clamp<int64_t>(index[i], 0, last_) * row_bytes_;
      if (dense_) {
        gather_(n, at, table, out, step, nest_.back().n * item_);
      } else {
        for (int64_t i = 0; i < n; ++i) copy(table + at[i], out + i * step, nest_.back().stride[0]);
      }
      if (inside || clip_) return;
      for (int64_t i = 0; i < n; ++i)
        if (index[i] < 0 || index[i] > last_) fill(out + i * step);
    });
  }

 private:
  void fill(char* to) const { walk_row(fill_, to, 0, true); }
  void copy(const char* from, char* to, int64_t stride) const { walk_row(from, to, stride, false); }

  // A row to `to`, element by element: from `from` on, or `from` alone where it is `still`.
  void walk_row(const char* from, char* to, int64_t stride, bool still) const {
    const Dim& inner = nest_.back();
    char* at[2] = {const_cast<char*>(from), to};
    int64_t counter[kMaxLoopDims];
    walk(nest_.data(), static_cast<int>(nest_.size()) - 1, 1, at, 2, counter, [&] {
      const char* first = still ? from : at[0];
      switch (item_) {
        case 1: return move<uint8_t>(inner.n, first, stride, at[1], inner.stride[1]);
        case 2: return move<uint16_t>(inner.n, first, stride, at[1], inner.stride[1]);
        case 4: return move<uint32_t>(inner.n, first, stride, at[1], inner.stride[1]);
        default: return move<uint64_t>(inner.n, first, stride, at[1], inner.stride[1]);
      }
    });
  }
  template <class T>
  static void move(int64_t n, const char* from, int64_t stride, char* to, int64_t to_stride) {
    for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * to_stride, from + i * stride, sizeof(T));
  }

  Indices indices_;
  Address table_;
  int64_t item_, row_bytes_, last_;
  bool clip_, dense_ = false;
  Nest nest_;  // of a row: table, out
  GatherRowsFn gather_;
  char fill_[8];
};

}  // namespace

Indices::Indices(const KernelTable& table, const Operand& index, const Operand& x, const std::vector<int64_t>& extents,
                 int64_t count)
    : address_(index.ref, index.row_stride), x_(x.ref, x.row_stride), read_(table.read_indices(index.ref.dtype)), count_(count) {
  nest_ = make_nest(extents, {byte_strides(index), outer_strides(x, extents.size())});
  simplify(nest_);
}

// A Vector that only moves elements, from where they lie side by side along one loop to where they do along another.

namespace {

constexpr int64_t kLeastSide = 8;  // of both loops: below, squares of 16 x 16 would be mostly empty

class TransposeStep final : public Step {
 public:
  TransposeStep(const Vector& x, Nest nest, TransposeFn transpose)
      : from_(x.loads[0].ref, x.loads[0].row_stride),
        to_(x.stores[0].ref, x.stores[0].row_stride),
        nest_(std::move(nest)),
        transpose_(transpose) {}

  void run(const Context& c) const override {
    char* at[2] = {from_.of(c), to_.of(c)};
    const Dim &along = nest_[nest_.size() - 2], &across = nest_.back();
    int64_t index[kMaxLoopDims + 1];
    walk(nest_.data(), static_cast<int>(nest_.size()) - 2, c.rows, at, 2, index,
         [&] { transpose_(along.extent(c.rows), across.extent(c.rows), at[0], across.stride[0], at[1], along.stride[1]); });
  }

 private:
  Address from_, to_;
  Nest nest_;  // the last two loops: elements lie side by side along the first one where they are read, and along the other one
  TransposeFn transpose_;
};

}  // namespace

std::unique_ptr<const Step> transposition(const Vector& x, const Compile& c) {
  bool copies = x.code.size() == 2 && x.loads.size() == 1 && x.stores.size() == 1;
  copies = copies && x.code[0].op == Opcode::op_load && x.code[1].op == Opcode::op_store;
  if (!copies || x.loads[0].ref.dtype != x.stores[0].ref.dtype || may_overlap(x, 0, 0, c)) return nullptr;
  const auto item = static_cast<int64_t>(item_size(x.loads[0].ref.dtype));
  const TransposeFn transpose = c.table.transpose != nullptr ? c.table.transpose(item) : nullptr;
  if (transpose == nullptr) return nullptr;
  Nest nest = make_nest(x.extents, {byte_strides(x.loads[0]), byte_strides(x.stores[0])});
  simplify(nest);
  const int64_t rows = std::min(c.program.tile_rows, c.program.batch_rows);
  auto last = [&](size_t operand, size_t end) {  // puts the loop along which the operand's elements lie side by side there
    for (size_t d = 0; d < end; ++d)
      if (nest[d].stride[operand] == item && nest[d].extent(rows) >= kLeastSide)
        return std::rotate(nest.begin() + static_cast<std::ptrdiff_t>(d), nest.begin() + static_cast<std::ptrdiff_t>(d) + 1,
                           nest.begin() + static_cast<std::ptrdiff_t>(end)),
               true;
    return false;
  };
  if (nest.size() < 2 || !last(1, nest.size()) || nest.back().stride[0] == item || !last(0, nest.size() - 1)) return nullptr;
  return std::make_unique<TransposeStep>(x, std::move(nest), transpose);
}

std::unique_ptr<const Step> compile(const Gather& x, const Compile& c) { return std::make_unique<GatherStep>(x, c); }

}  // namespace kitsune::cpu
