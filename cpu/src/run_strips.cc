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

// The last element again, up to a whole vector: what is computed of it is not read, and takes no longer than the others.
template <class T>
void pad(char* strip, int64_t n, int64_t padded) {
  T* x = reinterpret_cast<T*>(strip);
  std::fill(x + n, x + padded, x[n - 1]);
}

class StripStep final : public Step {
 public:
  explicit StripStep(StripPlan plan)
      : plan_(std::move(plan)),
        strip_(plan_.kernels->strip),
        bytes_(static_cast<size_t>(strip_ * kLane)),
        first_buffer_(plan_.constants.size()),
        slots_(first_buffer_ + static_cast<size_t>(plan_.buffers) + plan_.loads.size() + plan_.stores.size()) {
    for (const auto* list : {&plan_.loads, &plan_.stores})
      for (const StripOperand& x : *list) {
        const Copied copied{&x, operands_++};
        if (!x.used || x.number) continue;
        if (x.direct) direct_.push_back({copied.number, x.slot, strip_ * x.item});
        (list == &plan_.loads ? loads_ : stores_)[1].push_back(copied);
        if (!x.direct) (list == &plan_.loads ? loads_ : stores_)[0].push_back(copied);
      }
    for (const StripOperand& x : plan_.loads) {
      const std::vector<int64_t>& moves = x.address.loop_bytes;
      if (x.used && x.direct && x.address.space == Space::kIn && plan_.nest.size() == 1 && !moves.empty() && moves.back() != 0)
        fetched_.push_back(&x);
    }
    temp_bytes_ = buffers() * bytes_ + 2 * bytes_ + align_up(slots_ * sizeof(char*)) + align_up(operands_ * sizeof(char*));
  }

  bool fetches(int loop) const override {
    return std::any_of(fetched_.begin(), fetched_.end(),
                       [&](const StripOperand* x) { return x->address.loop_bytes.size() == static_cast<size_t>(loop) + 1; });
  }

  void fetch(const Context& c) const override {
    for (const StripOperand* x : fetched_) {
      const char* from = x->address.of(c);
      const int64_t bytes = plan_.nest.back().extent(c.rows) * x->item;
      for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(from + b, 0, 2);
    }
  }

  void run(const Context& c) const override {
    Frame f{c, c.temp, c.temp + buffers() * bytes_, nullptr, nullptr};
    f.at = reinterpret_cast<char**>(f.spare + 2 * bytes_);
    f.here = reinterpret_cast<char**>(reinterpret_cast<char*>(f.at) + align_up(slots_ * sizeof(char*)));
    for (size_t k = 0; k < first_buffer_; ++k) f.at[k] = plan_.constants[k].data();
    for (size_t k = first_buffer_; k < slots_; ++k) f.at[k] = buffer(f, static_cast<int32_t>(k));
    int operands = 0;
    for (const auto* list : {&plan_.loads, &plan_.stores})
      for (const StripOperand& x : *list) f.here[operands++] = x.address.of(c);
    const int last = static_cast<int>(plan_.nest.size()) - 1;
    const int64_t n = plan_.nest[last].extent(c.rows);
    int64_t index[kMaxLoopDims + 1];
    walk(plan_.nest.data(), last, c.rows, f.here, operands, index, [&] {
      for (size_t o = 0; o < plan_.loads.size(); ++o) {
        const StripOperand& x = plan_.loads[o];
        if (!x.number) continue;
        x.load(1, f.at[x.slot], f.here[o], 0, f.spare);
        if (x.spread) spread(f.at[x.slot], strip_, x.type);
      }
      for (const StripIndex& x : plan_.indices)
        if (x.dim != last) positions(x, f, x.dim < 0 ? 0 : index[x.dim], strip_, false);
      const int64_t whole = n / strip_ * strip_;
      for (const Direct& d : direct_) f.at[d.slot] = f.here[d.operand];
      for (int64_t j = 0; j < whole; j += strip_) {
        strip(f, j, strip_, loads_[0], stores_[0]);
        for (const Direct& d : direct_) f.at[d.slot] += d.step;
      }
      if (whole == n) return;
      for (const Direct& d : direct_) f.at[d.slot] = buffer(f, d.slot);
      strip(f, whole, n - whole, loads_[1], stores_[1]);
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

  // Elements j to j + n of the innermost loop. Operands that are copied: those in whose memory no instruction works.
  void strip(const Frame& f, int64_t j, int64_t n, const std::vector<Copied>& loads, const std::vector<Copied>& stores) const {
    const Dim& inner = plan_.nest.back();
    const int64_t lanes = strip_ / kStripVectors, vectors = (n + lanes - 1) / lanes;
    for (auto [x, o] : loads) {
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
  size_t first_buffer_, slots_, operands_ = 0;
  std::vector<Direct> direct_;
  std::vector<const StripOperand*> fetched_;  // slices of arrays by the number of the loop around
  std::vector<Copied> loads_[2], stores_[2];  // to copy: of a whole strip; of a shorter one
};

}  // namespace

std::unique_ptr<const Step> run_strips(StripPlan plan) { return std::make_unique<StripStep>(std::move(plan)); }

}  // namespace kitsune::cpu
