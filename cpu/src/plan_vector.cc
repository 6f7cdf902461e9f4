// Planning of Vector programs that run block by block, and what planning strip by strip (plan_strips.cc) asks about loops and
// constants. Everything here happens once per compiled executable.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "arithmetic.h"
#include "kitsune_cpu/strips.h"
#include "reciprocal.h"
#include "run_vector.h"
#include "strip_rows.h"

namespace kitsune::cpu {

namespace {

constexpr int64_t kLeast = int64_t{1} << 23, kMost = int64_t{1} << 24;  // of a float's significand as an integer

// 1 / y modulo 2^64, of an odd number, by Newton's iteration.
uint64_t inverse_of_odd(uint64_t y) {
  uint64_t x = y;
  for (int k = 0; k < 6; ++k) x *= 2 - y * x;
  return x;
}

}  // namespace

std::optional<Reciprocal> reciprocal_of(float y) {
  if (!(std::fabs(y) >= 0x1p-20f && std::fabs(y) <= 0x1p40f)) return std::nullopt;
  int exponent;
  const auto integer = static_cast<int64_t>(std::ldexp(std::frexp(std::fabs(y), &exponent), 24));
  if (integer == kLeast) return std::nullopt;
  const double inverse = 1.0 / static_cast<double>(y);
  float high = static_cast<float>(inverse);
  if (std::fabs(static_cast<double>(high)) > std::fabs(inverse)) high = std::nextafter(high, 0.0f);
  const Reciprocal r{high, static_cast<float>(inverse - static_cast<double>(high))};

  // Before its last rounding the sum is within 2^-46 of the quotient, so only one that lies so near to the middle of two floats
  // can be rounded to the wrong one. With x and y as integers of 24 bits and an odd middle of 25 bits, 2^wide x - middle y = rest
  // is at most 8 then. There are few such x.
  int even = 0;
  while (((integer >> even) & 1) == 0) ++even;
  const uint64_t inverse_odd = inverse_of_odd(static_cast<uint64_t>(integer >> even));
  for (const int wide : {24, 25})  // quotients of 1 and more, and smaller ones
    for (int64_t rest = -8; rest <= 8; ++rest) {
      if (rest == 0 || even > 3 || rest % (int64_t{1} << even) != 0) continue;
      const uint64_t period = uint64_t{1} << (wide - even);
      const auto first =
          static_cast<int64_t>((uint64_t(0) - static_cast<uint64_t>(rest / (int64_t{1} << even)) * inverse_odd) & (period - 1));
      for (int64_t middle = first; middle < 2 * kMost; middle += static_cast<int64_t>(period)) {
        if (middle < kMost || middle % 2 == 0) continue;
        const int64_t x = (middle * integer + rest) >> wide;
        if (x < kLeast || x >= kMost) continue;
        const auto value = static_cast<float>(x);
        if (std::fma(value, r.high, value * r.low) != value / y) return std::nullopt;
      }
    }
  return r;
}

// Joining short loops into one whose strips are whole rows.

namespace {

// Offsets in elements of the first `strip` elements of the loops from `first` on, whose outermost one may run further than it does;
// nothing where an offset is negative or no element's.
std::optional<std::vector<int64_t>> offsets(const Nest& nest, size_t first, size_t operand, int64_t item, int64_t strip) {
  std::vector<int64_t> found;
  for (int64_t e = 0; e < strip; ++e) {
    int64_t left = e, bytes = 0;
    for (size_t d = nest.size(); d-- > first;) {
      const int64_t n = d == first ? left + 1 : nest[d].n;
      bytes += left % n * nest[d].stride[operand];
      left /= n;
    }
    if (bytes < 0 || bytes % item != 0) return std::nullopt;
    found.push_back(bytes / item);
  }
  return found;
}

// An operand of the loops from `first` on, of which a strip has `step` elements. Nothing where the window would be longer than a
// strip.
std::optional<RowsOperand> operand_of(const Nest& nest, size_t first, size_t operand, int64_t item, int64_t step, int64_t row,
                                      int64_t strip) {
  const auto at = offsets(nest, first, operand, item, step);
  if (!at) return std::nullopt;
  const int64_t stride = nest[first].stride[operand], most = *std::max_element(at->begin(), at->end());
  RowsOperand found;
  found.next = stride;
  if (most == 0 && stride == 0) {
    found.how = RowsOperand::kNumber;
    return found;
  }
  bool dense = stride == row * item;
  for (int64_t e = 0; e < step; ++e) dense = dense && (*at)[static_cast<size_t>(e)] == e;
  if (dense) return found;
  found.how = stride == 0 ? RowsOperand::kRepeated : RowsOperand::kPicked;
  if (most >= strip) return std::nullopt;
  found.window = {0};
  for (int64_t rows = 1; rows <= step / row; ++rows)
    found.window.push_back(*std::max_element(at->begin(), at->begin() + static_cast<std::ptrdiff_t>(rows * row)) + 1);
  for (int64_t e = 0; e < strip; ++e)
    found.picks.push_back(static_cast<int32_t>((*at)[static_cast<size_t>(std::min(e, step - 1))]));
  // No vector picks elements that lie further apart than it has lanes.
  const int64_t lanes = strip / kStripVectors;
  for (int64_t k = 0; found.how == RowsOperand::kPicked && k < strip; k += lanes) {
    const auto [least, most_here] = std::minmax_element(found.picks.begin() + k, found.picks.begin() + k + lanes);
    if (*most_here - *least >= lanes) return std::nullopt;
  }
  return found;
}

std::optional<ShortRows> joined_from(const Nest& nest, size_t first, const std::vector<int64_t>& item_sizes, size_t loads,
                                     int64_t strip) {
  ShortRows found;
  found.row = 1;
  for (size_t d = first + 1; d < nest.size(); ++d) {
    if (nest[d].rows || nest[d].tag >= 0) return std::nullopt;
    found.row *= nest[d].n;
    if (found.row > strip) return std::nullopt;
  }
  found.step = strip / found.row * found.row;
  found.nest.assign(nest.begin(), nest.begin() + static_cast<std::ptrdiff_t>(first) + 1);
  found.nest.back().n *= found.row;
  for (size_t o = 0; o < item_sizes.size(); ++o) {
    auto operand = operand_of(nest, first, o, item_sizes[o], found.step, found.row, strip);
    if (!operand || (o >= loads && operand->how != RowsOperand::kDense)) return std::nullopt;
    found.nest.back().stride[o] = operand->how == RowsOperand::kDense ? item_sizes[o] : 0;
    found.operands.push_back(std::move(*operand));
  }
  return found;
}

}  // namespace

std::optional<ShortRows> short_rows(const Nest& nest, const std::vector<int64_t>& item_sizes, size_t loads, int64_t tile_rows,
                                    int64_t strip) {
  for (size_t first = nest.size() - 1; first-- > 0;) {
    if (nest[first].tag >= 0 || nest.back().tag >= 0) return std::nullopt;
    auto found = joined_from(nest, first, item_sizes, loads, strip);
    if (!found) return std::nullopt;
    if (found->nest.back().extent(tile_rows) >= 2 * strip) return found;
  }
  return std::nullopt;
}

bool lie_apart(const Nest& nest, const std::vector<int64_t>& item_sizes, int64_t row) {
  const Dim &inner = nest.back(), &outer = nest[nest.size() - 2];
  for (size_t o = 0; o < item_sizes.size(); ++o)
    if (inner.stride[o] == item_sizes[o] && outer.stride[o] != 0 && outer.stride[o] != row * item_sizes[o]) return true;
  return false;
}

Block pick_table(const RowsOperand& x, int64_t strip) {
  const int64_t lanes = strip / kStripVectors;
  Block block(static_cast<size_t>(strip + 2 * kStripVectors) * sizeof(int32_t), "constants");
  auto* place = static_cast<int32_t*>(static_cast<void*>(block.data()));
  int32_t *first = place + strip, *read = first + kStripVectors;
  for (int64_t k = 0; k < kStripVectors; ++k) {
    const auto begin = x.picks.begin() + k * lanes;
    const auto [least, most] = std::minmax_element(begin, begin + lanes);
    for (int64_t j = 0; j < lanes; ++j) place[k * lanes + j] = begin[j] - *least;
    first[k] = *least, read[k] = (2 << (*most - *least)) - 1;
  }
  return block;
}

// Block by block: which loop is innermost, how much of it a block covers, which loads and stores need no copy, and
// which buffers the remaining values share.

namespace {

constexpr int64_t kL1Bytes = 24 << 10;  // of the 32 KiB or more that cores have, for the values of one block

template <class T>
void fill(void* out, int64_t n, T v) {
  std::fill_n(static_cast<T*>(out), n, v);
}

template <class T>
T saturate(double v) {
  if (std::isnan(v)) return 0;
  if (v <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (v >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return static_cast<T>(v);
}

template <class T>
void fill_integer(void* out, int64_t n, const std::vector<double>& imm) {
  if (imm.size() == 1) return fill<T>(out, n, saturate<T>(imm[0]));
  uint64_t high = static_cast<uint64_t>(saturate<int64_t>(imm[0])), low = static_cast<uint64_t>(saturate<int64_t>(imm[1]));
  fill<T>(out, n, static_cast<T>(high << 32 | (low & 0xFFFFFFFFu)));
}

}  // namespace

void fill_constant(DType type, void* out, int64_t n, const std::vector<double>& imm) {
  switch (type) {
    case DType::kBool: return fill<uint8_t>(out, n, imm[0] != 0);
    case DType::kI8: return fill_integer<int8_t>(out, n, imm);
    case DType::kI16: return fill_integer<int16_t>(out, n, imm);
    case DType::kI32: return fill_integer<int32_t>(out, n, imm);
    case DType::kI64: return fill_integer<int64_t>(out, n, imm);
    case DType::kU8: return fill_integer<uint8_t>(out, n, imm);
    case DType::kU16: return fill_integer<uint16_t>(out, n, imm);
    case DType::kU32: return fill_integer<uint32_t>(out, n, imm);
    case DType::kU64: return fill_integer<uint64_t>(out, n, imm);
    case DType::kF32: return fill<float>(out, n, float_constant(imm[0]));
    default: return fill<double>(out, n, imm[0]);
  }
}

VectorStep::VectorStep(const Vector& x, const Compile& c, bool whole) {
  loads_ = static_cast<int>(x.loads.size());
  operands_ = loads_ + static_cast<int>(x.stores.size());
  for (const auto* list : {&x.loads, &x.stores})
    for (const Operand& o : *list) {
      addresses_.emplace_back(o.ref, o.row_stride);
      item_sizes_.push_back(static_cast<int64_t>(item_size(o.ref.dtype)));
      storage_.push_back(o.ref.dtype);
    }
  plan_values(x, c);
  use_numbers(c);
  plan_loops(x, c, whole);
  for (size_t i = 0; i < ops_.size(); ++i) {
    if (ops_[i].place != Place::kConstant) continue;
    const int64_t n = ops_[i].single ? 1 : chunk_;
    constants_.emplace_back(static_cast<size_t>(n) * item_size(ops_[i].type), "constants");
    fill_constant(ops_[i].type, constants_.back().data(), n, x.code[static_cast<size_t>(ops_[i].operand)].imm);
    initial_[i] = constants_.back().data();
  }
  elide_stores(x, c);
  elide_loads(x, c);
  find_invariant_loads(x, c);
  for (VectorOp& op : ops_)
    op.streams = op.kind == VectorOp::kLoad && !op.once && dense(op.operand) && c.streams(x.loads[op.operand]);
  assign_buffers();
  temp_bytes_ = align_up(static_cast<size_t>(chunk_) * item_) * static_cast<size_t>(buffers_) +
                align_up(static_cast<size_t>(chunk_) * 8) + align_up(ops_.size() * sizeof(void*)) +
                align_up(static_cast<size_t>(operands_) * sizeof(void*));
}

// Registers become values: each operation that defines one is a value of its own, so buffers can be shared by liveness alone.
void VectorStep::plan_values(const Vector& x, const Compile& c) {
  std::vector<int32_t> defined(kMaxRegisters, -1);
  for (const Micro& m : x.code) {
    if (m.op == Opcode::op_convert && m.from_type == m.type) {
      defined[m.dst] = defined[m.a];
      continue;
    }
    VectorOp op = make_op(x, m, defined, c);
    if (m.op == Opcode::op_const) {
      op.place = Place::kConstant;
      op.operand = static_cast<int32_t>(&m - x.code.data());
    }
    if (op.kind != VectorOp::kStore) {
      defined[m.dst] = static_cast<int32_t>(ops_.size());
      item_ = std::max(item_, gives_bool(m.op) ? size_t{1} : item_size(op.type));
    }
    ops_.push_back(op);
  }
  last_use_.assign(ops_.size(), -1);
  for (size_t i = 0; i < ops_.size(); ++i)
    for (int32_t v : {ops_[i].a, ops_[i].b, ops_[i].c, ops_[i].d})
      if (v >= 0) last_use_[v] = static_cast<int32_t>(i);
  initial_.assign(ops_.size(), nullptr);
}

// Operations that take their constants as one number each. A constant that all of its readers take so is `single`.
void VectorStep::use_numbers(const Compile& c) {
  for (VectorOp& op : ops_)
    if (op.place == Place::kConstant) op.single = true;
  for (VectorOp& op : ops_) {
    unsigned constants = 0;
    int k = 0;
    for (int32_t v : {op.a, op.b, op.c, op.d}) constants |= unsigned{v >= 0 && ops_[v].place == Place::kConstant} << k++;
    if (constants == 0) continue;
    const VectorFn fn = op.kind == VectorOp::kCompute ? c.table.vector_with(op.opcode, op.operand_type, constants) : nullptr;
    if (fn != nullptr) {
      op.fn = fn;
      continue;
    }
    for (int32_t v : {op.a, op.b, op.c, op.d})
      if (v >= 0 && ops_[v].place == Place::kConstant) ops_[v].single = false;
  }
}

VectorOp VectorStep::make_op(const Vector& x, const Micro& m, std::vector<int32_t>& defined, const Compile& c) {
  auto missing = [&] {
    throw ProgramError(c.where + " operation " + std::to_string(&m - x.code.data()) + ": " + opcode_name(m.op) +
                       " is not defined for " + dtype_name(m.type));
  };
  VectorOp op{};
  op.kind = VectorOp::kCompute;
  op.type = m.type;
  for (size_t i = 0; i < m.imm.size() && i < 2; ++i) op.imm[i] = m.imm[i];
  switch (m.op) {
    case Opcode::op_load:
      op.kind = VectorOp::kLoad;
      op.operand = static_cast<int32_t>(m.a);
      op.load = Loader(c.table, m.type, storage_[m.a], c.where);
      return op;
    case Opcode::op_store:
      op.kind = VectorOp::kStore;
      op.operand = static_cast<int32_t>(loads_ + m.a);
      op.a = defined[m.b];
      op.type = ops_[op.a].type;
      op.store = Storer(c.table, storage_[op.operand], op.type, c.where);
      return op;
    case Opcode::op_const: return op;
    case Opcode::op_index:
      op.kind = VectorOp::kIndex;
      op.index_dim = m.a, op.divisor = m.b, op.modulus = m.c;
      return op;
    case Opcode::op_convert:
      op.fn = c.table.convert(m.type, m.from_type);
      if (op.fn == nullptr) missing();
      op.a = defined[m.a];
      return op;
    default: break;
  }
  op.fn = c.table.vector(m.op, m.type);
  if (op.fn == nullptr) missing();
  op.opcode = m.op, op.operand_type = m.type;
  op.a = defined[m.a];
  if (operands_of(m.op) > 1) op.b = defined[m.b];
  if (operands_of(m.op) > 2) op.c = defined[m.c];
  if (operands_of(m.op) > 3) op.d = defined[m.d];
  if (gives_bool(m.op)) op.type = DType::kBool;
  return op;
}

void VectorStep::plan_loops(const Vector& x, const Compile& c, bool whole) {
  std::vector<std::vector<int64_t>> strides;
  for (const auto* list : {&x.loads, &x.stores})
    for (const Operand& o : *list) strides.push_back(byte_strides(o));
  nest_ = make_nest(x.extents, strides);
  for (const VectorOp& op : ops_)
    if (op.kind == VectorOp::kIndex && op.index_dim >= 0) nest_[op.index_dim].tag = static_cast<int>(op.index_dim);
  const int64_t tile_rows = std::min(c.program.tile_rows, c.program.batch_rows);
  if (whole) fix_rows(nest_, tile_rows);
  simplify(nest_);
  const bool joined = join_short(nest_);
  size_t k = nest_.size();
  if (!joined && (k < 2 || !repeats_along(nest_[k - 2], nest_[k - 1], item_sizes_))) exchange_short(nest_, tile_rows);
  if (whole) simplify(nest_), k = nest_.size();  // columns one after the other, each of all rows
  // Values alive at once, at most: what a block must fit in the first-level cache.
  int64_t live = 1, most = 1;
  std::vector<int64_t> ends(ops_.size() + 1, 0);
  for (size_t i = 0; i < ops_.size(); ++i) {
    const bool constant = ops_[i].place == Place::kConstant;
    bool kept = constant || (ops_[i].kind == VectorOp::kLoad && x.loads[ops_[i].operand].row_stride == 0);
    if (last_use_[i] >= 0 && !ops_[i].single) {
      ++live;
      if (!kept) ++ends[last_use_[i]];
    }
    most = std::max(most, live);
    live -= ends[i];
  }
  chunk_ = std::clamp<int64_t>(kL1Bytes / (most * static_cast<int64_t>(item_)) / 64 * 64, 128, 2048);
  const Dim& inner = nest_.back();
  const int64_t columns = inner.extent(tile_rows);
  bool blocked = k >= 2 && (joined || !inner.rows) && columns * 2 <= chunk_;
  rows_per_block_ = blocked ? chunk_ / columns : 0;
  outer_ = static_cast<int>(k) - (blocked ? 2 : 1);
}

// The elements of a block, rows and columns, are consecutive in the operand's memory.
bool VectorStep::dense(int o) const {
  const Dim& inner = nest_.back();
  if (inner.stride[o] != item_sizes_[o]) return false;
  return rows_per_block_ == 0 || (!inner.rows && nest_[nest_.size() - 2].stride[o] == inner.n * item_sizes_[o]);
}

bool may_overlap(const Vector& x, int load, int store, const Compile& c) {
  const Operand& a = x.loads[load];
  const Operand& b = x.stores[store];
  if (a.ref.space != b.ref.space || a.ref.index != b.ref.index) return false;
  if (a.ref.space == Space::kOut || a.ref.loop_strides != b.ref.loop_strides) return true;
  auto range = [&](const Operand& o) {
    int64_t item = static_cast<int64_t>(item_size(o.ref.dtype));
    int64_t low = o.ref.offset * item, high = low + item;
    auto extend = [&](int64_t n, int64_t stride) { (stride < 0 ? low : high) += (n - 1) * stride * item; };
    extend(std::min(c.program.tile_rows, c.program.batch_rows), o.row_stride);
    for (size_t d = 0; d < o.strides.size(); ++d) extend(x.extents[d], o.strides[d]);
    return std::pair{low, high};
  };
  auto [a_low, a_high] = range(a);
  auto [b_low, b_high] = range(b);
  return a_low < b_high && b_low < a_high;
}

bool in_place(const Vector& x, int load, int store) {
  const Operand &a = x.loads[load], &b = x.stores[store];
  return a.ref.offset == b.ref.offset && a.ref.loop_strides == b.ref.loop_strides && a.ref.batch_strides == b.ref.batch_strides &&
         a.ref.dtype == b.ref.dtype && a.row_stride == b.row_stride && a.strides == b.strides;
}

// A store of a dense value of the stored type: the operation that computes the value writes it there, if nothing that is read
// between the two, or any other store, shares the memory.
void VectorStep::elide_stores(const Vector& x, const Compile& c) {
  int stores = operands_ - loads_;
  std::vector<int> uses(stores, 0);
  for (const VectorOp& op : ops_)
    if (op.kind == VectorOp::kStore) ++uses[op.operand - loads_];
  auto shared = [&](int s) {
    const Ref& r = x.stores[s].ref;
    for (int t = 0; t < stores; ++t)
      if (t != s && x.stores[t].ref.space == r.space && x.stores[t].ref.index == r.index) {
        Vector other = {x.extents, false, {x.stores[t]}, {x.stores[s]}, {}};
        if (may_overlap(other, 0, 0, c)) return true;
      }
    return false;
  };
  for (VectorOp& op : ops_) {
    if (op.kind != VectorOp::kStore) continue;
    int s = op.operand - loads_;
    VectorOp& value = ops_[op.a];
    bool computed = value.kind == VectorOp::kCompute || value.kind == VectorOp::kIndex;
    if (!computed || value.place != Place::kBuffer || value.type != storage_[op.operand]) continue;
    if (!dense(op.operand) || uses[s] != 1 || shared(s)) continue;
    bool safe = true;
    for (size_t i = 0; i < ops_.size(); ++i)
      if (ops_[i].kind == VectorOp::kLoad && may_overlap(x, ops_[i].operand, s, c))
        safe = safe && static_cast<int32_t>(i) < op.a &&
               (last_use_[i] < op.a || (last_use_[i] == op.a && in_place(x, ops_[i].operand, s)));
    if (!safe) continue;
    value.place = Place::kOperand;
    value.operand = op.operand;
    op.place = Place::kOperand;  // nothing is left to do
  }
}

// A load of dense memory of the register's type: the value is the memory itself, if no store changes it before its last use.
void VectorStep::elide_loads(const Vector& x, const Compile& c) {
  for (size_t i = 0; i < ops_.size(); ++i) {
    VectorOp& op = ops_[i];
    if (op.kind != VectorOp::kLoad || op.type != storage_[op.operand] || !dense(op.operand)) continue;
    bool safe = true;
    for (size_t j = 0; j < ops_.size(); ++j) {
      const VectorOp& other = ops_[j];
      if (other.kind != VectorOp::kStore || !may_overlap(x, op.operand, other.operand - loads_, c)) continue;
      int32_t when = other.place == Place::kOperand ? other.a : static_cast<int32_t>(j);
      bool exact = other.place == Place::kOperand && in_place(x, op.operand, other.operand - loads_);
      safe = safe && (last_use_[i] < when || (exact && last_use_[i] == when));
    }
    if (safe) op.place = Place::kOperand;
  }
}

// A load that repeats for every row (a bias, a scale) is expanded to a whole block once, not once per block.
void VectorStep::find_invariant_loads(const Vector& x, const Compile& c) {
  if (rows_per_block_ == 0) return;
  for (VectorOp& op : ops_) {
    if (op.kind != VectorOp::kLoad || op.place != Place::kBuffer) continue;
    op.once = true;
    for (size_t d = 0; d + 1 < nest_.size(); ++d) op.once = op.once && nest_[d].stride[op.operand] == 0;
    for (int s = 0; s < operands_ - loads_; ++s) op.once = op.once && !may_overlap(x, op.operand, s, c);
  }
}

void VectorStep::assign_buffers() {
  std::vector<int32_t> free;
  for (size_t i = 0; i < ops_.size(); ++i) {
    VectorOp& op = ops_[i];
    if (op.kind != VectorOp::kStore && op.place == Place::kBuffer) {
      if (free.empty() || op.once) free.push_back(buffers_++);  // a reused buffer would lose a value kept for all blocks
      op.buffer = free.back();
      free.pop_back();
    }
    // Operands are released after the result has its buffer: results may be wider than what they are computed from.
    int32_t used[4] = {op.a, op.b, op.c, op.d};
    std::sort(used, used + 4);
    for (int k = 0; k < 4; ++k)
      if (used[k] >= 0 && (k == 0 || used[k] != used[k - 1]) && last_use_[used[k]] == static_cast<int32_t>(i) &&
          ops_[used[k]].buffer >= 0 && !ops_[used[k]].once)
        free.push_back(ops_[used[k]].buffer);
    if (op.buffer >= 0 && last_use_[i] < 0 && !op.once) free.push_back(op.buffer);
  }
}

namespace {

// Some operand lies column by column: how long a column is decides whether columns are one loop.
bool lies_by_columns(const Vector& x) {
  for (const auto* list : {&x.loads, &x.stores})
    for (const Operand& o : *list)
      for (size_t d = 0; d < o.strides.size(); ++d)
        if (o.row_stride != 0 && x.extents[d] > 1 && std::abs(o.strides[d]) > std::abs(o.row_stride)) return true;
  return false;
}

// One Vector program as two: for tiles that have all their rows, and for the last one of a batch.
class ByRowsStep final : public Step {
 public:
  ByRowsStep(int64_t rows, std::unique_ptr<const Step> whole, std::unique_ptr<const Step> part)
      : rows_(rows), whole_(std::move(whole)), part_(std::move(part)) {
    temp_bytes_ = std::max(whole_->temp_bytes(), part_->temp_bytes());
  }
  void run(const Context& c) const override { of(c).run(c); }
  void fetch(const Context& c) const override { of(c).fetch(c); }
  bool fetches(int loop) const override { return whole_->fetches(loop) || part_->fetches(loop); }

 private:
  const Step& of(const Context& c) const { return c.rows == rows_ ? *whole_ : *part_; }

  int64_t rows_;
  std::unique_ptr<const Step> whole_, part_;
};

bool is_same(const Operand& a, const Operand& b) {
  return a.ref.space == b.ref.space && a.ref.index == b.ref.index && a.ref.offset == b.ref.offset && a.ref.dtype == b.ref.dtype &&
         a.ref.loop_strides == b.ref.loop_strides && a.ref.batch_strides == b.ref.batch_strides && a.row_stride == b.row_stride;
}

// Are float32 numbers added to doubles?
bool adds_doubles(const Accumulate& a, const Compile& c) {
  return c.program.sinks[a.sink].how == Reduction::kSum && c.sinks[a.sink].acc == DType::kF64 && a.x.ref.dtype == DType::kF32;
}

// Do the accumulators lie in the order of the kept dimensions?
bool dense_sums(const Accumulate& a) {
  int64_t step = 1;
  for (size_t d = a.kept.size(); d-- > 0; step *= a.kept[d])
    if (!a.sum_strides.empty() && a.kept[d] > 1 && a.sum_strides[d] != step) return false;
  return true;
}

std::unique_ptr<const Step> compile(const Vector& x, const Compile& c, bool whole) {
  if (std::optional<StripPlan> strips = plan_strips(x, c, whole)) return run_strips(std::move(*strips));
  return std::make_unique<VectorStep>(x, c, whole);
}

}  // namespace

std::unique_ptr<const Step> compile_summed(const Vector& x, const std::vector<const Accumulate*>& folds, const Compile& c) {
  if (lies_by_columns(x)) return nullptr;  // tiles that have all their rows may have better loops
  std::vector<SummedStore> summed;
  for (const Accumulate* a : folds) {
    const auto store = std::find_if(x.stores.begin(), x.stores.end(), [&](const Operand& o) { return is_same(o, a->x); });
    const int64_t number = store - x.stores.begin();
    const bool again = std::any_of(summed.begin(), summed.end(), [&](const SummedStore& s) { return s.store == number; });
    if (store == x.stores.end() || again || !adds_doubles(*a, c)) return nullptr;
    // The kept dimensions are the last ones of the Vector's, and the others are reduced.
    const size_t kept = a->kept.size();
    std::vector<int64_t> strides = a->x.strides, extents = a->reduced;
    std::rotate(strides.begin(), strides.begin() + static_cast<std::ptrdiff_t>(kept), strides.end());
    extents.insert(extents.end(), a->kept.begin(), a->kept.end());
    if (strides != store->strides || extents != x.extents || !dense_sums(*a)) return nullptr;
    summed.push_back({number, SumsAddress(a->sums, c, a->sink), product(a->kept)});
  }
  std::optional<StripPlan> plan = plan_strips(x, c, false, summed);
  return plan ? run_strips(std::move(*plan)) : nullptr;
}

std::unique_ptr<const Step> compile(const Vector& x, const Compile& c) {
  if (auto step = transposition(x, c)) return step;
  if (!lies_by_columns(x)) return compile(x, c, false);
  return std::make_unique<ByRowsStep>(std::min(c.program.tile_rows, c.program.batch_rows), compile(x, c, true),
                                      compile(x, c, false));
}

}  // namespace kitsune::cpu
