// Gather and AccumulateAt: rows of a table, or of a sink, chosen by a tile of indices.
#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

template <class T>
int64_t read_index(const char* at) {
  T v;
  std::memcpy(&v, at, sizeof v);
  if constexpr (sizeof(T) == 8 && !std::is_signed_v<T>) return v > static_cast<T>(INT64_MAX) ? INT64_MAX : static_cast<int64_t>(v);
  return static_cast<int64_t>(v);
}

using ReadIndex = int64_t (*)(const char*);

ReadIndex reader(DType t) {
  switch (t) {
    case DType::kI8: return read_index<int8_t>;
    case DType::kI16: return read_index<int16_t>;
    case DType::kI32: return read_index<int32_t>;
    case DType::kI64: return read_index<int64_t>;
    case DType::kU8: return read_index<uint8_t>;
    case DType::kU16: return read_index<uint16_t>;
    case DType::kU32: return read_index<uint32_t>;
    default: return read_index<uint64_t>;
  }
}

// Byte strides of (rows, *index_extents) of an operand that loops over (rows, *index_extents, *extents).
std::vector<int64_t> outer_strides(const Operand& x, size_t outer) {
  std::vector<int64_t> s = byte_strides(x);
  s.resize(outer + 1);
  return s;
}

// The nest of one row: `strides` in elements per operand, whose items have so many bytes; at least one dimension.
Nest row_nest(const std::vector<int64_t>& extents, const std::vector<std::pair<const int64_t*, int64_t>>& strides) {
  Nest nest;
  for (size_t d = 0; d < extents.size(); ++d) {
    Dim dim{extents[d], false, -1, {}};
    for (auto [s, item] : strides) dim.stride.push_back(s[d] * item);
    nest.push_back(std::move(dim));
  }
  simplify(nest);
  if (nest.empty()) {
    nest.push_back({1, false, -1, {}});
    for (auto [_, item] : strides) nest.back().stride.push_back(item);
  }
  return nest;
}

constexpr int64_t kAhead = 8;           // indices that a row is fetched into the cache before its turn
constexpr int64_t kFetchedBytes = 512;  // of a row; the hardware fetches the rest of a long one

// Walks the indices of a tile; f(at, i) gets the second operand's pointer and the index. `rows` is where the rows lie that indices
// name, `row_bytes` apart.
class Indices {
 public:
  Indices(const Operand& index, const Operand& x, const std::vector<int64_t>& extents, int64_t count)
      : address_(index.ref, index.row_stride), x_(x.ref, x.row_stride), read_(reader(index.ref.dtype)), count_(count) {
    nest_ = make_nest(extents, {byte_strides(index), outer_strides(x, extents.size())});
    simplify(nest_);
  }
  template <class F>
  void walk_tile(const Context& c, const char* rows, int64_t row_bytes, F f) const {
    char* at[2] = {address_.of(c), x_.of(c)};
    int64_t index[kMaxLoopDims + 1];
    if (nest_.size() == 1) {
      const int64_t n = nest_[0].extent(c.rows), step = nest_[0].stride[0], x_step = nest_[0].stride[1];
      for (int64_t i = 0; i < n; ++i) {
        if (i + kAhead < n) fetch(read_(at[0] + (i + kAhead) * step), rows, row_bytes);
        f(at[1] + i * x_step, read_(at[0] + i * step));
      }
      return;
    }
    walk(nest_.data(), static_cast<int>(nest_.size()), c.rows, at, 2, index, [&] { f(at[1], read_(at[0])); });
  }
  int64_t count() const { return count_; }

 private:
  void fetch(int64_t i, const char* rows, int64_t row_bytes) const {
    if (i < 0 || i >= count_) return;
    for (int64_t b = 0, n = std::min(row_bytes, kFetchedBytes); b < n; b += 64) __builtin_prefetch(rows + i * row_bytes + b);
  }

  Address address_, x_;
  ReadIndex read_;
  int64_t count_;
  Nest nest_;
};

class GatherStep final : public Step {
 public:
  GatherStep(const Gather& g, const Compile& c)
      : indices_(g.index, g.out, g.index_extents, g.count),
        table_(g.table.ref, 0),
        item_(static_cast<int64_t>(item_size(g.table.ref.dtype))),
        row_bytes_(g.table.row_stride * item_),
        clip_(g.mode == OutOfRange::kClip),
        nest_(row_nest(g.extents, {{g.table.strides.data(), item_}, {g.out.strides.data() + g.index_extents.size(), item_}})),
        still_(nest_) {
    const Dim& inner = nest_.back();
    dense_ = inner.stride[0] == item_ && inner.stride[1] == item_;
    const DType type = g.out.ref.dtype, compute = compute_type(type);
    char value[8], spare[8];
    fill_constant(compute, value, 1, g.fill);
    Storer(c.table, type, compute, c.where)(1, fill_, 1, value, spare);
    for (Dim& d : still_) d.stride[0] = 0;
  }

  void run(const Context& c) const override {
    char* table = table_.of(c);
    const int64_t last = indices_.count() - 1;
    indices_.walk_tile(c, table, row_bytes_, [&](char* out, int64_t i) {
      if (i < 0 || i > last) {
        if (!clip_) return fill(out);
        i = i < 0 ? 0 : last;
      }
      copy(table + i * row_bytes_, out);
    });
  }

 private:
  void copy(char* from, char* to) const {
    const Dim& inner = nest_.back();
    if (dense_ && nest_.size() == 1) return void(std::memcpy(to, from, static_cast<size_t>(inner.n * item_)));
    char* at[2] = {from, to};
    int64_t index[kMaxLoopDims];
    walk(nest_.data(), static_cast<int>(nest_.size()) - 1, 1, at, 2, index, [&] {
      if (dense_) return void(std::memcpy(at[1], at[0], static_cast<size_t>(inner.n * item_)));
      for (int64_t e = 0; e < inner.n; ++e)
        std::memcpy(at[1] + e * inner.stride[1], at[0] + e * inner.stride[0], static_cast<size_t>(item_));
    });
  }
  void fill(char* to) const {
    char* at[2] = {const_cast<char*>(fill_), to};
    int64_t index[kMaxLoopDims];
    walk(still_.data(), static_cast<int>(still_.size()), 1, at, 2, index,
         [&] { std::memcpy(at[1], at[0], static_cast<size_t>(item_)); });
  }

  Indices indices_;
  Address table_;
  int64_t item_, row_bytes_;
  bool clip_, dense_ = false;
  Nest nest_;   // operands: table, out
  Nest still_;  // where the first operand is one element
  char fill_[8];
};

class AccumulateAtStep final : public Step {
 public:
  AccumulateAtStep(const AccumulateAt& a, const Compile& c)
      : indices_(a.index, a.x, a.index_extents, a.count),
        item_(static_cast<int64_t>(item_size(a.x.ref.dtype))),
        strand_offset_(c.sinks[a.sink].offset),
        fold_row_(
            c.table.fold_row(static_cast<int>(c.program.sinks[a.sink].how), a.x.ref.dtype, c.sinks[a.sink].acc == DType::kF64)) {
    if (fold_row_ == nullptr) throw ProgramError(c.where + ": this reduction is not defined for " + dtype_name(a.x.ref.dtype));
    const int64_t acc = static_cast<int64_t>(item_size(c.sinks[a.sink].acc));
    std::vector<int64_t> dense(a.extents.size());
    int64_t step = 1;
    for (size_t d = dense.size(); d-- > 0; step *= a.extents[d]) dense[d] = step;
    row_bytes_ = step * acc;
    nest_ = row_nest(a.extents, {{a.x.strides.data() + a.index_extents.size(), item_}, {dense.data(), acc}});
  }

  void run(const Context& c) const override {
    char* sink = c.strand + strand_offset_;
    const Dim& inner = nest_.back();
    const int outer = static_cast<int>(nest_.size()) - 1;
    const int64_t stride = inner.stride[0] / item_;
    indices_.walk_tile(c, sink, row_bytes_, [&](char* x, int64_t i) {
      if (i < 0 || i >= indices_.count()) return;
      if (outer == 0) return fold_row_(inner.n, x, stride, sink + i * row_bytes_);
      char* at[2] = {x, sink + i * row_bytes_};
      int64_t index[kMaxLoopDims];
      walk(nest_.data(), outer, 1, at, 2, index, [&] { fold_row_(inner.n, at[0], stride, at[1]); });
    });
  }

 private:
  Indices indices_;
  int64_t item_;
  size_t strand_offset_;
  FoldRowFn fold_row_;
  int64_t row_bytes_ = 0;
  Nest nest_;  // operands: x, the sink; its last dimension is dense in the sink
};

}  // namespace

std::unique_ptr<const Step> compile(const Gather& x, const Compile& c) { return std::make_unique<GatherStep>(x, c); }
std::unique_ptr<const Step> compile(const AccumulateAt& x, const Compile& c) { return std::make_unique<AccumulateAtStep>(x, c); }

}  // namespace kitsune::cpu
