// Running of Vector programs: blocks of the loop nest that fit the first-level cache, one kernel call per operation and block.
#include "run_vector.h"

#include <algorithm>
#include <cstring>

#include "positions.h"

namespace kitsune::cpu {
namespace {

// Each of m numbers n times, by writes of `Width` numbers that the next row overwrites in part.
template <class T, int64_t Width>
void repeat(int64_t m, int64_t n, char* to, const char* from, int64_t row) {
  int64_t r = 0;
  for (; r * n + Width <= m * n; ++r) {
    T x, wide[Width];
    std::memcpy(&x, from + r * row, sizeof x);
    std::fill_n(wide, Width, x);
    std::memcpy(to + r * n * static_cast<int64_t>(sizeof x), wide, sizeof wide);
  }
  for (; r < m; ++r)
    for (int64_t j = 0; j < n; ++j) std::memcpy(to + (r * n + j) * static_cast<int64_t>(sizeof(T)), from + r * row, sizeof(T));
}

}  // namespace

struct VectorStep::Frame {
  char** at;            // per operand, for the outer index at hand
  const void** values;  // per operation
  char* buffers;
  char* spare;
  size_t buffer_bytes;
  const int64_t* index;  // outer index
  const Context* context;
};

void VectorStep::run(const Context& c) const {
  Frame f;
  f.buffer_bytes = align_up(static_cast<size_t>(chunk_) * item_);
  char* temp = c.temp;
  f.buffers = temp;
  temp += f.buffer_bytes * static_cast<size_t>(buffers_);
  f.spare = temp;
  temp += align_up(static_cast<size_t>(chunk_) * 8);
  f.values = reinterpret_cast<const void**>(temp);
  temp += align_up(ops_.size() * sizeof(void*));
  f.at = reinterpret_cast<char**>(temp);
  int64_t index[kMaxLoopDims + 1];
  f.index = index;
  f.context = &c;
  for (int o = 0; o < operands_; ++o) f.at[o] = addresses_[o].of(c);
  // Values that never move are set once.
  for (size_t i = 0; i < ops_.size(); ++i)
    f.values[i] = ops_[i].buffer >= 0 ? f.buffers + static_cast<size_t>(ops_[i].buffer) * f.buffer_bytes : initial_[i];
  const int64_t columns = nest_.back().extent(c.rows);
  const int64_t rows = rows_per_block_ > 0 ? nest_[nest_.size() - 2].extent(c.rows) : 1;
  const int64_t row_step = std::max<int64_t>(1, rows_per_block_);
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (!ops_[i].once) continue;
    char* to = f.buffers + static_cast<size_t>(ops_[i].buffer) * f.buffer_bytes;
    load(ops_[i], to, f.at[ops_[i].operand], std::min(row_step, rows), columns, f.spare);
  }
  walk(nest_.data(), outer_, c.rows, f.at, operands_, index, [&] {
    for (int64_t i = 0; i < rows; i += row_step)
      for (int64_t j = 0; j < columns; j += chunk_) block(f, i, j, std::min(row_step, rows - i), std::min(chunk_, columns - j));
  });
}

void VectorStep::block(const Frame& f, int64_t i, int64_t j, int64_t m, int64_t n) const {
  const Dim& inner = nest_.back();
  const int64_t* row_stride = rows_per_block_ > 0 ? nest_[nest_.size() - 2].stride.data() : nullptr;
  const int64_t count = m * n;
  auto here = [&](int32_t o) { return f.at[o] + j * inner.stride[o] + (row_stride != nullptr ? i * row_stride[o] : 0); };
  for (size_t k = 0; k < ops_.size(); ++k) {
    const VectorOp& op = ops_[k];
    if (op.place == Place::kConstant || op.once) continue;
    if (op.kind == VectorOp::kStore) {
      if (op.place != Place::kOperand) store(op, here(op.operand), static_cast<const char*>(f.values[op.a]), m, n, f.spare);
      continue;
    }
    if (op.place == Place::kOperand) f.values[k] = here(op.operand);
    char* to = const_cast<char*>(static_cast<const char*>(f.values[k]));
    if (op.kind == VectorOp::kCompute) {
      auto value = [&](int32_t v) { return v >= 0 ? f.values[v] : nullptr; };
      op.fn(count, to, value(op.a), value(op.b), value(op.c), value(op.d), op.imm);
    } else if (op.kind == VectorOp::kIndex) {
      fill_index(f, op, to, i, j, m, n);
    } else if (op.place != Place::kOperand) {
      load(op, to, here(op.operand), m, n, f.spare);
    }
  }
}

void VectorStep::load(const VectorOp& op, char* to, const char* from, int64_t m, int64_t n, char* spare) const {
  int64_t item = item_sizes_[op.operand], stride = nest_.back().stride[op.operand];
  int64_t row = rows_per_block_ > 0 ? nest_[nest_.size() - 2].stride[op.operand] : 0;
  if (m == 1 || row == n * stride) return op.load(m * n, to, from, stride / item, spare);
  if (stride == 0 && item == 4 && op.type == storage_[op.operand] && n <= 16)
    return n <= 8 ? repeat<uint32_t, 8>(m, n, to, from, row) : repeat<uint32_t, 16>(m, n, to, from, row);
  size_t width = static_cast<size_t>(n) * item_size(op.type);
  for (int64_t r = 0; r < m; ++r) op.load(n, to + static_cast<size_t>(r) * width, from + r * row, stride / item, spare);
}

void VectorStep::store(const VectorOp& op, char* to, const char* from, int64_t m, int64_t n, char* spare) const {
  int64_t item = item_sizes_[op.operand], stride = nest_.back().stride[op.operand];
  int64_t row = rows_per_block_ > 0 ? nest_[nest_.size() - 2].stride[op.operand] : 0;
  if (m == 1 || row == n * stride) return op.store(m * n, to, stride / item, from, spare);
  size_t width = static_cast<size_t>(n) * item_size(op.type);
  for (int64_t r = 0; r < m; ++r) op.store(n, to + r * row, stride / item, from + static_cast<size_t>(r) * width, spare);
}

void VectorStep::fill_index(const Frame& f, const VectorOp& op, char* to, int64_t i, int64_t j, int64_t m, int64_t n) const {
  int tag = static_cast<int>(op.index_dim), last = static_cast<int>(nest_.size()) - 1, where = -1;
  for (int d = 0; d <= last; ++d)
    if (tag >= 0 && nest_[d].tag == tag) where = d;  // absent: an extent of 1, position 0
  bool along = where == last, down = rows_per_block_ > 0 && where == last - 1;
  int64_t position = tag == 0 ? f.context->first_row : tag < 0 ? f.context->loops[-tag - 1] : 0;
  position += along ? j : down ? i : where >= 0 ? f.index[where] : 0;
  int64_t step = down ? 1 : 0;
  count_positions(op.type, to, m, n, position, step, along, op.divisor, op.modulus);
}

}  // namespace kitsune::cpu
