// Running of Vector programs strip by strip: values that one operation hands to the next stay in vector registers.
#include "run_strips.h"

#include <algorithm>
#include <cstring>

#include "positions.h"

namespace kitsune::cpu {
namespace {

constexpr int64_t kLane = 4;   // bytes
constexpr int64_t kLine = 64;  // bytes of a cache line

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
  const Address* more = nullptr;

  explicit Place(const Address& a)
      : offset(a.offset_bytes),
        row_bytes(a.row_bytes),
        space(static_cast<int32_t>(a.space)),
        index(a.space == Space::kScratch ? 0 : a.index) {
    int moved = 0;
    for (size_t l = 0; l < a.loop_bytes.size(); ++l)
      if (a.loop_bytes[l] != 0) loop = static_cast<int32_t>(l), loop_bytes = a.loop_bytes[l], ++moved;
    if (moved > 1 || !a.batch_bytes.empty()) more = &a;
  }

  char* of(const Context& c, char* const* const* bases) const {
    if (more != nullptr) return more->of(c);
    return bases[space][index] + offset + c.row0 * row_bytes + (loop_bytes != 0 ? c.loops[loop] * loop_bytes : 0);
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
        (list == &plan_.loads ? loads_ : stores_)[1].push_back(copied);
        if (!x.direct) (list == &plan_.loads ? loads_ : stores_)[0].push_back(copied);
      }
    for (const StripOperand& x : plan_.loads) {
      const std::vector<int64_t>& moves = x.address.loop_bytes;
      if (x.used && x.direct && x.address.space == Space::kIn && plan_.nest.size() == 1 && !moves.empty() && moves.back() != 0)
        fetched_.emplace_back(&x, Place(x.address));
    }
    temp_bytes_ = buffers() * bytes_ + 3 * bytes_ + align_up(slots_ * sizeof(char*)) + align_up(operands_ * sizeof(char*));
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
      for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(from + b, 0, 2);
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
      for (; j + strip_ <= n; j += step_) {  // instructions that work in memory read all of a strip's lanes
        strip(f, j, step_, vectors(step_), loads_[0], stores_[0]);
        for (const Direct& d : direct_) f.at[d.slot] += d.step;
      }
      if (j == n) return;
      for (const Direct& d : direct_) f.at[d.slot] = buffer(f, d.slot);
      for (; j < n; j += step_) strip(f, j, std::min(step_, n - j), vectors(std::min(step_, n - j)), loads_[1], stores_[1]);
    });
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
  std::vector<Direct> direct_;
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
