// Scan: cumulative operations along the last dimension. Floating values are carried in double, so a long float32 sum stays exact to
// an ulp.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "arithmetic.h"
#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

constexpr int64_t kChunk = 256;

double log_add_exp(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return a + b;
  double high = std::max(a, b);
  if (std::isinf(high)) return high;
  return high + std::log1p(std::exp(std::min(a, b) - high));
}

template <class T>
T step(Cumulative how, T a, T v) {
  if (how == Cumulative::kMax) return extremum<true>(a, v);
  if (how == Cumulative::kMin) return extremum<false>(a, v);
  if constexpr (std::is_integral_v<T>) {
    uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(v);
    return static_cast<T>(how == Cumulative::kSum ? x + y : x * y);
  } else {
    if (how == Cumulative::kLogSumExp) return log_add_exp(a, v);
    return how == Cumulative::kSum ? a + v : a * v;
  }
}

class ScanStep final : public Step {
 public:
  ScanStep(const Scan& s, const Compile& c)
      : how_(s.how),
        compute_(compute_type(s.x.ref.dtype)),
        item_(static_cast<int64_t>(item_size(s.x.ref.dtype))),
        n_(s.extents.back()),
        x_(s.x.ref, s.x.row_stride),
        out_(s.out.ref, s.out.row_stride),
        load_(c.table, compute_, s.x.ref.dtype, c.where),
        store_(c.table, s.x.ref.dtype, compute_, c.where) {
    std::vector<int64_t> outer(s.extents.begin(), s.extents.end() - 1), xs = byte_strides(s.x), os = byte_strides(s.out);
    stride_[0] = xs.back(), stride_[1] = os.back();
    xs.pop_back(), os.pop_back();
    if (s.reverse) {
      for (int k = 0; k < 2; ++k) first_[k] = (n_ - 1) * stride_[k], stride_[k] = -stride_[k];
    }
    nest_ = make_nest(outer, {xs, os});
    simplify(nest_);
    temp_bytes_ = 2 * kChunk * 8;
  }

  void run(const Context& c) const override {
    switch (compute_) {
      case DType::kI8: return scan<int8_t, int8_t>(c);
      case DType::kI16: return scan<int16_t, int16_t>(c);
      case DType::kI32: return scan<int32_t, int32_t>(c);
      case DType::kI64: return scan<int64_t, int64_t>(c);
      case DType::kU8: return scan<uint8_t, uint8_t>(c);
      case DType::kU16: return scan<uint16_t, uint16_t>(c);
      case DType::kU32: return scan<uint32_t, uint32_t>(c);
      case DType::kU64: return scan<uint64_t, uint64_t>(c);
      case DType::kF64: return scan<double, double>(c);
      default: return scan<float, double>(c);
    }
  }

 private:
  template <class T, class Carry>
  void scan(const Context& c) const {
    char* at[2] = {x_.of(c) + first_[0], out_.of(c) + first_[1]};
    int64_t index[kMaxLoopDims + 1];
    T* v = reinterpret_cast<T*>(c.temp);
    walk(nest_.data(), static_cast<int>(nest_.size()), c.rows, at, 2, index, [&] {
      Carry carry{};
      for (int64_t i = 0; i < n_; i += kChunk) {
        int64_t m = std::min(kChunk, n_ - i);
        load_(m, v, at[0] + i * stride_[0], stride_[0] / item_, c.temp + kChunk * 8);
        for (int64_t k = 0; k < m; ++k) {
          const T x = flushed(v[k]);  // the first element too, which no operation touches
          carry = i + k == 0 ? static_cast<Carry>(x) : step<Carry>(how_, carry, static_cast<Carry>(x));
          v[k] = static_cast<T>(carry);
        }
        store_(m, at[1] + i * stride_[1], stride_[1] / item_, v, c.temp + kChunk * 8);
      }
    });
  }

  Cumulative how_;
  DType compute_;
  int64_t item_, n_;
  Address x_, out_;
  Loader load_;
  Storer store_;
  int64_t stride_[2], first_[2] = {0, 0};
  Nest nest_;  // (rows, *extents but the last), operands x and out
};

}  // namespace

std::unique_ptr<const Step> compile(const Scan& s, const Compile& c) { return std::make_unique<ScanStep>(s, c); }

}  // namespace kitsune::cpu
