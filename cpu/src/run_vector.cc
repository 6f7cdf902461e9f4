// Running of Vector programs: block by block with one kernel call per operation, or strip by strip in vector registers.
#include "run_vector.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu {

// Positions in a loop, as the operation `index` counts them.

namespace {

// out[i] <- out[i - period] for period <= i < n, where the first period is there.
template <class T>
void repeat(T* out, int64_t period, int64_t n) {
  for (int64_t done = period; done < n; done *= 2) std::copy_n(out, std::min(done, n - done), out + done);
}

// value, value + 1, ...
template <class T>
void ascend(T* out, int64_t n, int64_t value) {
  if constexpr (sizeof(T) == 4 && !std::is_floating_point_v<T>) {  // in lanes of its own width, which compilers vectorise
    const auto first = static_cast<uint32_t>(value), end = static_cast<uint32_t>(n);
    for (uint32_t k = 0; k < end; ++k) out[k] = static_cast<T>(first + k);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = static_cast<T>(value + k);
  }
}

// (position // divisor) % modulus along a run of positions.
template <class T>
void count_up(T* out, int64_t n, int64_t position, int64_t divisor, int64_t modulus) {
  int64_t rest = position % divisor, value = position / divisor % modulus;
  const bool repeats = modulus <= n / divisor;
  const int64_t head = repeats ? divisor * modulus : n;
  for (int64_t i = 0; i < head;) {
    const int64_t run = std::min(head - i, divisor == 1 ? modulus - value : divisor - rest);
    if (divisor == 1)
      ascend(out + i, run, value);
    else
      std::fill_n(out + i, run, static_cast<T>(value));
    i += run;
    rest = 0;
    value = divisor == 1 || value + 1 == modulus ? 0 : value + 1;
  }
  if (repeats) repeat(out, head, n);
}

template <class T>
void index_rows(char* to, int64_t m, int64_t n, int64_t position, int64_t row_step, bool along, int64_t divisor, int64_t modulus) {
  T* out = reinterpret_cast<T*>(to);
  if (along) {                                    // the same in every row
    if (divisor == 1 && position + n <= modulus)  // without the divisions of count_up
      ascend(out, n, position);
    else
      count_up(out, n, position, divisor, modulus);
    return repeat(out, n, m * n);
  }
  for (int64_t r = 0; r < m; ++r, out += n, position += row_step) std::fill_n(out, n, static_cast<T>(position / divisor % modulus));
}

// to[m][n] <- (p // divisor) % modulus. `along`: p counts up from `position` in each row; else it is `position` + r `step` in all
// of row r.
void count_positions(DType type, char* to, int64_t m, int64_t n, int64_t position, int64_t step, bool along, int64_t divisor,
                     int64_t modulus) {
  switch (type) {
    case DType::kI8: return index_rows<int8_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI16: return index_rows<int16_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI32: return index_rows<int32_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI64: return index_rows<int64_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU8: return index_rows<uint8_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU16: return index_rows<uint16_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU32: return index_rows<uint32_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU64: return index_rows<uint64_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kF32: return index_rows<float>(to, m, n, position, step, along, divisor, modulus);
    default: return index_rows<double>(to, m, n, position, step, along, divisor, modulus);
  }
}

}  // namespace

// Block by block: blocks of the loop nest that fit the first-level cache, one kernel call per operation and block.

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
    if (op.streams) ask_for(here(op.operand) + count * item_sizes_[op.operand], count * item_sizes_[op.operand]);
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

// Strip by strip: values that one operation hands to the next stay in vector registers.

namespace {

constexpr int64_t kLane = 4;  // bytes

// One number in all lanes of a strip, as bool is kept there: ones or zeros.
void spread(char* strip, int64_t elements, DType type) {
  uint32_t bits;
  if (type == DType::kBool)
    bits = *strip != 0 ? ~uint32_t{0} : 0;
  else
    std::memcpy(&bits, strip, sizeof bits);
  std::fill_n(reinterpret_cast<uint32_t*>(strip), elements, bits);
}

// The same of n bools.
void widen(char* strip, int64_t n) {
  for (int64_t k = n - 1; k >= 0; --k) {
    const uint32_t bits = strip[k] != 0 ? ~uint32_t{0} : 0;
    std::memcpy(strip + k * kLane, &bits, sizeof bits);
  }
}

// The last element again, up to a whole vector: what is computed of it is not read, and takes no longer than the others.
template <class T>
void pad(char* strip, int64_t n, int64_t padded) {
  T* x = reinterpret_cast<T*>(strip);
  std::fill(x + n, x + padded, x[n - 1]);
}

// An Address in the few instructions that a short step of a loop has for it: where the rows and one loop's number lead. `more`:
// where other loops move it, or batches.
struct Place {
  int64_t offset, row_bytes, loop_bytes = 0;
  int32_t space, index, loop = 0;
  bool of_tile;
  const Address* more = nullptr;

  explicit Place(const Address& a)
      : offset(a.offset_bytes),
        row_bytes(a.row_bytes),
        space(static_cast<int32_t>(a.space)),
        index(a.space == Space::kScratch ? 0 : a.index),
        of_tile(a.of_tile) {
    int moved = 0;
    for (size_t l = 0; l < a.loop_bytes.size(); ++l)
      if (a.loop_bytes[l] != 0) loop = static_cast<int32_t>(l), loop_bytes = a.loop_bytes[l], ++moved;
    if (moved > 1 || !a.batch_bytes.empty()) more = &a;
  }

  char* of(const Context& c, char* const* const* bases) const {
    if (more != nullptr) return more->of(c);
    return bases[space][index] + offset + (of_tile ? c.skipped : c.row0) * row_bytes +
           (loop_bytes != 0 ? c.loops[loop] * loop_bytes : 0);
  }
};

// The arrays of pointers that a Place's `space` counts.
#define KITSUNE_BASES(c) {(c).ins, (c).outs, &(c).scratch, (c).slots, (c).preps}
static_assert(int(Space::kIn) == 0 && int(Space::kOut) == 1 && int(Space::kScratch) == 2 && int(Space::kQueue) == 3 &&
              int(Space::kPrep) == 4);

class StripStep final : public Step {
 public:
  explicit StripStep(StripPlan plan)
      : plan_(std::move(plan)),
        strip_(plan_.kernels->strip),
        bytes_(static_cast<size_t>(strip_ * kLane)),
        step_(plan_.step),
        first_buffer_(plan_.constants.size()),
        slots_(first_buffer_ + static_cast<size_t>(plan_.buffers) + plan_.loads.size() + plan_.stores.size()) {
    for (Block& x : plan_.constants) constants_.push_back(x.data());
    for (const auto* list : {&plan_.loads, &plan_.stores})
      for (const StripOperand& x : *list) {
        const Copied copied{&x, operands_++};
        places_.emplace_back(x.address);
        if (x.number && list == &plan_.loads) numbers_.push_back(copied);
        if (x.rows.how == RowsOperand::kRepeated) repeated_.push_back(copied);
        if (!x.used || x.number || x.rows.how == RowsOperand::kRepeated) continue;
        const bool window = x.rows.how == RowsOperand::kPicked;
        if (x.direct) direct_.push_back({copied.number, x.slot, window ? step_ / plan_.row * x.rows.next : step_ * x.item});
        if (x.direct && x.streams) streamed_.push_back(direct_.back());
        (list == &plan_.loads ? loads_ : stores_)[1].push_back(copied);
        if (!x.direct) (list == &plan_.loads ? loads_ : stores_)[0].push_back(copied);
      }
    for (const StripOperand& x : plan_.loads) {
      const std::vector<int64_t>& moves = x.address.loop_bytes;
      if (x.used && x.direct && x.address.space == Space::kIn && plan_.nest.size() == 1 && !moves.empty() && moves.back() != 0)
        fetched_.emplace_back(&x, Place(x.address));
    }
    temp_bytes_ = buffers() * bytes_ + 3 * bytes_ + align_up(slots_ * sizeof(char*)) + align_up(operands_ * sizeof(char*));
    for (const StripSum& s : plan_.sums) temp_bytes_ += s.direct ? 0 : align_up(static_cast<size_t>(s.lanes) * sizeof(double));
  }

  bool fetches(int loop) const override {
    return std::any_of(fetched_.begin(), fetched_.end(),
                       [&](const auto& x) { return x.first->address.loop_bytes.size() == static_cast<size_t>(loop) + 1; });
  }

  void fetch(const Context& c) const override {
    char* const* const bases[] = KITSUNE_BASES(c);
    for (const auto& [x, place] : fetched_) {
      const char* from = place.of(c, bases);
      const int64_t elements = plan_.nest.back().extent(c.rows);
      const int64_t bytes = x->rows.how == RowsOperand::kPicked ? elements / plan_.row * x->rows.next : elements * x->item;
      ask_for(from, bytes);
    }
  }

  void run(const Context& c) const override {
    Frame f{c, c.temp, c.temp + buffers() * bytes_, nullptr, nullptr};
    f.at = reinterpret_cast<char**>(f.spare + 3 * bytes_);
    f.here = reinterpret_cast<char**>(reinterpret_cast<char*>(f.at) + align_up(slots_ * sizeof(char*)));
    std::copy_n(constants_.data(), first_buffer_, f.at);
    for (size_t k = first_buffer_; k < slots_; ++k) f.at[k] = buffer(f, static_cast<int32_t>(k));
    char* const* const bases[] = KITSUNE_BASES(c);
    for (size_t o = 0; o < operands_; ++o) f.here[o] = places_[o].of(c, bases);
    char* own = reinterpret_cast<char*>(f.here) + align_up(operands_ * sizeof(char*));
    for (const StripSum& s : plan_.sums) {
      f.at[s.slot] = s.direct ? s.sums.of(c) : own;
      if (s.direct) continue;
      std::fill_n(reinterpret_cast<double*>(own), s.lanes, 0.0);
      own += align_up(static_cast<size_t>(s.lanes) * sizeof(double));
    }
    const int last = static_cast<int>(plan_.nest.size()) - 1;
    const int64_t n = plan_.nest[last].extent(c.rows);
    int64_t index[kMaxLoopDims + 1];
    walk(plan_.nest.data(), last, c.rows, f.here, static_cast<int>(operands_), index, [&] {
      for (auto [x, o] : numbers_) {
        x->load(1, f.at[x->slot], f.here[o], 0, f.spare);
        if (x->spread) spread(f.at[x->slot], strip_, x->type);
      }
      for (auto [x, o] : repeated_) repeat(*x, f, o);
      for (const StripIndex& x : plan_.indices)
        if (x.dim != last) positions(x, f, x.dim < 0 ? 0 : index[x.dim], strip_, false);
      const int64_t lanes = strip_ / kStripVectors;
      auto vectors = [&](int64_t elements) { return (elements + lanes - 1) / lanes; };
      for (const Direct& d : direct_) f.at[d.slot] = f.here[d.operand];
      int64_t j = 0;
      const int64_t whole = vectors(step_);
      for (const StripSum& s : plan_.sums) *place(f, s) = {step_, 0, s.lanes};
      for (; j + strip_ <= n; j += step_) {  // instructions that work in memory read all of a strip's lanes
        for (const Direct& d : streamed_) ask_for(f.at[d.slot] + kAhead, d.step);
        strip(f, j, step_, whole, loads_[0], stores_[0]);
        for (const Direct& d : direct_) f.at[d.slot] += d.step;
        for (const StripSum& s : plan_.sums) {
          int64_t& first = place(f, s)->first;
          first += s.step;
          if (first >= s.lanes) first -= s.lanes;
        }
      }
      if (j == n) return;
      for (const Direct& d : direct_) f.at[d.slot] = buffer(f, d.slot);
      for (; j < n; j += step_) {
        const int64_t left = std::min(step_, n - j);
        for (const StripSum& s : plan_.sums) *place(f, s) = {left, j % s.lanes, s.lanes};
        strip(f, j, left, vectors(left), loads_[1], stores_[1]);
      }
    });
    for (const StripSum& s : plan_.sums) {
      if (s.direct) continue;
      double* from = reinterpret_cast<double*>(f.at[s.slot]);
      int64_t lanes = s.lanes;
      for (; lanes % (2 * s.period) == 0; lanes /= 2)  // side by side, not one after another
        for (int64_t k = 0; k < lanes / 2; ++k) from[k] += from[lanes / 2 + k];
      double* to = reinterpret_cast<double*>(s.sums.of(c));
      for (int64_t k = 0; k < lanes; k += s.period)
        for (int64_t p = 0; p < s.period; ++p) to[p] += from[k + p];
    }
  }

 private:
  struct Frame {
    const Context& context;
    char *buffers, *spare;
    char **at, **here;  // of each slot; of each operand, for the outer index at hand
  };

  struct Copied {
    const StripOperand* operand;
    size_t number;
  };

  char* buffer(const Frame& f, int32_t slot) const { return f.buffers + (static_cast<size_t>(slot) - first_buffer_) * bytes_; }
  size_t buffers() const { return slots_ - first_buffer_; }

  SumPlace* place(const Frame& f, const StripSum& s) const { return reinterpret_cast<SumPlace*>(f.at[s.place]); }

  void positions(const StripIndex& x, const Frame& f, int64_t position, int64_t n, bool along) const {
    position += x.tag == 0 ? f.context.first_row : x.tag < 0 ? f.context.loops[-x.tag - 1] : 0;
    count_positions(x.type, f.at[x.slot], 1, n, position, 0, along, x.divisor, x.modulus);
  }

  // The elements of a window that all strips pick.
  void repeat(const StripOperand& x, const Frame& f, size_t operand) const {
    const int64_t n = x.rows.window.back();
    char *window = f.spare + 2 * bytes_, *to = f.at[x.slot];
    x.load(n, window, f.here[operand], 1, f.spare);
    if (x.type == DType::kBool) widen(window, n);
    for (int64_t k = 0; k < strip_; ++k) std::memcpy(to + k * kLane, window + x.rows.picks[static_cast<size_t>(k)] * kLane, kLane);
  }

  // Elements j to j + n of the innermost loop, which are so many vectors. Operands that are copied: those in whose memory no
  // instruction works.
  void strip(const Frame& f, int64_t j, int64_t n, int64_t vectors, const std::vector<Copied>& loads,
             const std::vector<Copied>& stores) const {
    const Dim& inner = plan_.nest.back();
    const int64_t lanes = strip_ / kStripVectors;
    for (auto [x, o] : loads) {
      if (x->rows.how == RowsOperand::kPicked) {
        const int64_t r = j / plan_.row, window = x->rows.window[static_cast<size_t>(n / plan_.row)];
        x->load(window, f.at[x->slot], f.here[o] + r * x->rows.next, 1, f.spare);
        if (x->type == DType::kBool) widen(f.at[x->slot], window);
        continue;
      }
      x->load(n, f.at[x->slot], f.here[o] + j * inner.stride[o], inner.stride[o] / x->item, f.spare);
      if (n == vectors * lanes) continue;
      if (x->type == DType::kBool)
        pad<uint8_t>(f.at[x->slot], n, vectors * lanes);
      else if (x->type == DType::kU16)
        pad<uint16_t>(f.at[x->slot], n, vectors * lanes);
      else
        pad<uint32_t>(f.at[x->slot], n, vectors * lanes);
    }
    for (const StripIndex& x : plan_.indices)
      if (x.dim == static_cast<int>(plan_.nest.size()) - 1) positions(x, f, j, vectors * lanes, true);
    plan_.kernels->run(plan_.code.data(), f.at, vectors);
    for (auto [x, o] : stores) x->store(n, f.here[o] + j * inner.stride[o], inner.stride[o] / x->item, f.at[x->slot], f.spare);
  }

  struct Direct {  // an operand in whose memory instructions work
    size_t operand;
    int32_t slot;
    int64_t step;  // bytes from a strip to the next
  };

  StripPlan plan_;
  int64_t strip_;  // elements
  size_t bytes_;   // of a strip
  int64_t step_;   // elements that are worked off with each
  size_t first_buffer_, slots_, operands_ = 0;
  std::vector<Direct> direct_, streamed_;
  std::vector<char*> constants_;
  std::vector<Place> places_;                                   // of each operand
  std::vector<Copied> numbers_;                                 // loads of one number along the innermost loop
  std::vector<Copied> repeated_;                                // loads of which all strips pick the same
  std::vector<std::pair<const StripOperand*, Place>> fetched_;  // slices of arrays by the number of the loop around
  std::vector<Copied> loads_[2], stores_[2];                    // to copy: of a whole strip; of a shorter one
};

}  // namespace

std::unique_ptr<const Step> run_strips(StripPlan plan) { return std::make_unique<StripStep>(std::move(plan)); }

}  // namespace kitsune::cpu
