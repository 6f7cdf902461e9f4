// Gather: rows of a table, chosen by a tile of indices.
#include "indices.h"

namespace kitsune::cpu {
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

std::unique_ptr<const Step> compile(const Gather& x, const Compile& c) { return std::make_unique<GatherStep>(x, c); }

}  // namespace kitsune::cpu
