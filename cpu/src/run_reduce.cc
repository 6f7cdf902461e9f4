// Folds and cumulative operations of a tile.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "arithmetic.h"
#include "executor_internal.h"

namespace kitsune::cpu {

// Reduce and Accumulate: folds along a dimension, or row by row into a dense array of accumulators, whichever loop is longer.

namespace {

constexpr int64_t kChunk = 256;      // accumulators, or elements of an arg-reduction or a scan, worked on at once
constexpr int64_t kShortFold = 16;   // below this many elements, fold rows instead
constexpr int64_t kFewestShort = 4;  // so many short rows are folded at once rather than one by one

// Calls f with a value of the C++ type that holds `t` in a register.
template <class F>
void with_type(DType t, F&& f) {
  switch (t) {
    case DType::kBool: return f(uint8_t{});
    case DType::kI8: return f(int8_t{});
    case DType::kI16: return f(int16_t{});
    case DType::kI32: return f(int32_t{});
    case DType::kI64: return f(int64_t{});
    case DType::kU8: return f(uint8_t{});
    case DType::kU16: return f(uint16_t{});
    case DType::kU32: return f(uint32_t{});
    case DType::kU64: return f(uint64_t{});
    case DType::kF64: return f(double{});
    default: return f(float{});
  }
}

template <class T>
T wrap_add(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else
    return a + b;
}

template <class T>
T wrap_mul(T a, T b) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else
    return a * b;
}

template <class T>
T identity(Reduction how, bool boolean) {
  using Limits = std::numeric_limits<T>;
  switch (how) {
    case Reduction::kMax: return Limits::has_infinity ? -Limits::infinity() : Limits::lowest();
    case Reduction::kMin: return boolean ? T{1} : Limits::has_infinity ? Limits::infinity() : Limits::max();
    case Reduction::kProd: return T{1};
    case Reduction::kAnd: return boolean ? T{1} : static_cast<T>(-1);
    default: return T{0};
  }
}

// The nest of reduced dimensions alone, of one operand; at least one dimension.
Nest reduced_nest(const std::vector<int64_t>& reduced, const Operand& x) {
  int64_t item = static_cast<int64_t>(item_size(x.ref.dtype));
  size_t kept = x.strides.size() - reduced.size();
  Nest nest;
  for (size_t d = 0; d < reduced.size(); ++d) nest.push_back({reduced[d], false, -1, {x.strides[kept + d] * item}});
  simplify(nest);
  if (nest.empty()) nest.push_back({1, false, -1, {item}});
  return nest;
}

// The nest of (rows, *kept) of x and out.
Nest kept_nest(const std::vector<int64_t>& kept, const Operand& x, const Operand& out) {
  std::vector<int64_t> xs = byte_strides(x);
  xs.resize(kept.size() + 1);
  Nest nest = make_nest(kept, {xs, byte_strides(out)});
  simplify(nest);
  return nest;
}

class ReduceStep final : public Step {
 public:
  ReduceStep(const Reduce& r, const Compile& c)
      : how_(r.how),
        item_(static_cast<int64_t>(item_size(r.x.ref.dtype))),
        out_item_(static_cast<int64_t>(item_size(r.out.ref.dtype))),
        acc_(accumulator_type(r.how, r.x.ref.dtype, false)),
        x_(r.x.ref, r.x.row_stride),
        out_(r.out.ref, r.out.row_stride),
        outer_(kept_nest(r.kept, r.x, r.out)),
        reduced_(reduced_nest(r.reduced, r.x)),
        streams_(c.streams(r.x)) {
    int how = static_cast<int>(r.how);
    fold_ = c.table.fold(how, r.x.ref.dtype, false);
    fold_row_ = c.table.fold_row(how, r.x.ref.dtype, false);
    if (fold_ == nullptr || fold_row_ == nullptr)
      throw ProgramError(c.where + ": this reduction is not defined for " + dtype_name(r.x.ref.dtype));
    store_ = Storer(c.table, r.out.ref.dtype, acc_, c.where);
    const int64_t rows = std::min(c.program.tile_rows, c.program.batch_rows);
    const bool dense_fold = std::abs(reduced_.back().stride[0]) == item_;
    if (reduced_.size() == 1 && reduced_[0].stride[0] == item_) fold_short_ = c.table.fold_short(how, r.x.ref.dtype, reduced_[0].n);
    const bool short_fold = reduced_.back().n < kShortFold || fold_short_ != nullptr;
    if (short_fold && outer_.back().extent(rows) < kShortFold) {  // the longest goes innermost, such as the rows of small matrices
      auto longest = std::max_element(outer_.begin(), outer_.end(),
                                      [&](const Dim& a, const Dim& b) { return a.extent(rows) <= b.extent(rows); });
      std::rotate(longest, longest + 1, outer_.end());
    }
    int64_t along = outer_.back().extent(rows);
    const bool dense_rows = std::abs(outer_.back().stride[0]) == item_;
    if (along < kFewestShort || outer_.back().stride[0] % item_ != 0) fold_short_ = nullptr;
    by_rows_ = along >= kShortFold ? reduced_.back().n < kShortFold || (dense_rows && !dense_fold) : reduced_.back().n <= along;
    acc_bytes_ = static_cast<int64_t>(item_size(acc_));
    temp_bytes_ = 2 * kChunk * 8;
  }

  void run(const Context& c) const override {
    char* at[2] = {x_.of(c), out_.of(c)};
    int64_t index[kMaxLoopDims + 1];
    const Dim& inner = outer_.back();
    const int64_t n = inner.extent(c.rows);
    walk(outer_.data(), static_cast<int>(outer_.size()) - 1, c.rows, at, 2, index, [&] {
      for (int64_t i = 0; i < n; i += kChunk) {
        int64_t m = std::min(kChunk, n - i);
        fold(m, at[0] + i * inner.stride[0], c.temp);
        store_(m, at[1] + i * inner.stride[1], inner.stride[1] / out_item_, c.temp, c.temp + kChunk * 8);
      }
    });
  }

 private:
  void fold(int64_t m, char* x, char* acc) const {
    const Dim& inner = reduced_.back();
    const int64_t step = outer_.back().stride[0];
    const int dims = static_cast<int>(reduced_.size());
    int64_t index[kMaxLoopDims];
    if (streams_ && fold_short_ != nullptr) ask_for(x + kAhead, std::min(kAhead, m * step));
    if (fold_short_ != nullptr) return fold_short_(m, inner.n, x, step / item_, acc);
    fill_identity(how_, acc_, m, acc);
    if (by_rows_) {
      walk(reduced_.data(), dims, 1, &x, 1, index, [&] { fold_row_(m, x, step / item_, acc); });
      return;
    }
    for (int64_t e = 0; e < m; ++e) {
      char* from = x + e * step;
      if (streams_ && inner.stride[0] == item_) ask_for(from + kAhead, std::min(kAhead, inner.n * item_));
      walk(reduced_.data(), dims - 1, 1, &from, 1, index,
           [&] { fold_(inner.n, from, inner.stride[0] / item_, acc + e * acc_bytes_); });
    }
  }

  Reduction how_;
  int64_t item_, out_item_, acc_bytes_ = 0;
  DType acc_;
  Address x_, out_;
  Nest outer_, reduced_;
  FoldFn fold_;
  FoldRowFn fold_row_;
  FoldShortFn fold_short_ = nullptr;
  Storer store_;
  bool by_rows_ = false;
  bool streams_ = false;
};

class ArgReduceStep final : public Step {
 public:
  ArgReduceStep(const Reduce& r, const Compile& c)
      : how_(r.how == Reduction::kArgMax ? Reduction::kMax : Reduction::kMin),
        compute_(compute_type(r.x.ref.dtype)),
        out_type_(r.out.ref.dtype),
        item_(static_cast<int64_t>(item_size(r.x.ref.dtype))),
        x_(r.x.ref, r.x.row_stride),
        out_(r.out.ref, r.out.row_stride),
        load_(c.table, compute_, r.x.ref.dtype, c.where),
        outer_(kept_nest(r.kept, r.x, r.out)),
        reduced_(reduced_nest(r.reduced, r.x)) {
    if (accumulator_type(how_, r.x.ref.dtype, false) == compute_)
      fold_ = c.table.fold(static_cast<int>(how_), r.x.ref.dtype, false);
    temp_bytes_ = 2 * kChunk * 8;
  }

  void run(const Context& c) const override {
    char* at[2] = {x_.of(c), out_.of(c)};
    int64_t index[kMaxLoopDims + 1];
    walk(outer_.data(), static_cast<int>(outer_.size()), c.rows, at, 2, index, [&] {
      int64_t best = 0;
      with_type(compute_, [&](auto v) { best = search<decltype(v)>(at[0], c.temp); });
      with_type(out_type_, [&](auto v) { *reinterpret_cast<decltype(v)*>(at[1]) = static_cast<decltype(v)>(best); });
    });
  }

 private:
  template <class T>
  int64_t search(const char* x, char* temp) const {
    const Dim& d = reduced_.back();
    const T* v = reinterpret_cast<const T*>(temp);
    const bool largest = how_ == Reduction::kMax;
    T best{};
    int64_t where = -1;
    for (int64_t i = 0; i < d.n; i += kChunk) {
      int64_t m = std::min(kChunk, d.n - i);
      if (where >= 0 && fold_ != nullptr) {  // few chunks hold a better element than those before them
        T here = identity<T>(how_, compute_ == DType::kBool);
        fold_(m, x + i * d.stride[0], d.stride[0] / item_, &here);
        if (here == here && !(largest ? here > best : here < best)) continue;
      }
      load_(m, temp, x + i * d.stride[0], d.stride[0] / item_, temp + kChunk * 8);
      for (int64_t k = 0; k < m; ++k) {
        if (v[k] != v[k]) return i + k;
        if (where < 0 || (largest ? v[k] > best : v[k] < best)) best = v[k], where = i + k;
      }
    }
    return where;
  }

  Reduction how_;
  FoldFn fold_ = nullptr;
  DType compute_, out_type_;
  int64_t item_;
  Address x_, out_;
  Loader load_;
  Nest outer_, reduced_;
};

class AccumulateStep final : public Step {
 public:
  AccumulateStep(const Accumulate& a, const Compile& c)
      : item_(static_cast<int64_t>(item_size(a.x.ref.dtype))),
        x_(a.x.ref, a.x.row_stride),
        sums_(a.sums, c, a.sink),
        streams_(c.streams(a.x)) {
    const int how = static_cast<int>(c.program.sinks[a.sink].how);
    fold_ = c.table.fold(how, a.x.ref.dtype, true);
    fold_row_ = c.table.fold_row(how, a.x.ref.dtype, true);
    if (fold_ == nullptr || fold_row_ == nullptr)
      throw ProgramError(c.where + ": this reduction is not defined for " + dtype_name(a.x.ref.dtype));
    const int64_t acc = static_cast<int64_t>(item_size(c.sinks[a.sink].acc));
    std::vector<int64_t> extents = a.kept, acc_strides(a.kept.size() + a.reduced.size() + 1, 0);
    extents.insert(extents.end(), a.reduced.begin(), a.reduced.end());
    int64_t dense = acc;
    for (size_t d = a.kept.size(); d-- > 0; dense *= a.kept[d])
      acc_strides[d + 1] = a.sum_strides.empty() ? dense : a.sum_strides[d] * acc;
    nest_ = make_nest(extents, {byte_strides(a.x), acc_strides});
    simplify(nest_);
    // The innermost loop: the last kept dimension if it is long enough, else the longest folded one.
    const int64_t rows = std::min(c.program.tile_rows, c.program.batch_rows);
    size_t row = nest_.size(), along = nest_.size();
    for (size_t d = 0; d < nest_.size(); ++d) {
      if (nest_[d].stride[1] == acc) row = d;
      if (nest_[d].stride[1] == 0 && (along == nest_.size() || nest_[d].extent(rows) > nest_[along].extent(rows))) along = d;
    }
    by_rows_ = row < nest_.size() && (along == nest_.size() || nest_[row].extent(rows) >= kShortFold ||
                                      nest_[row].extent(rows) >= nest_[along].extent(rows));
    std::rotate(nest_.begin() + static_cast<std::ptrdiff_t>(by_rows_ ? row : along),
                nest_.begin() + static_cast<std::ptrdiff_t>(by_rows_ ? row : along) + 1, nest_.end());
  }

  void run(const Context& c) const override {
    char* at[2] = {x_.of(c), sums_.of(c)};
    int64_t index[kMaxLoopDims + 1];
    const Dim& inner = nest_.back();
    const int64_t n = inner.extent(c.rows), stride = inner.stride[0] / item_;
    const int outer = static_cast<int>(nest_.size()) - 1;
    const int64_t ahead = streams_ && stride == 1 ? std::min(kAhead, n * item_) : 0;
    walk(nest_.data(), outer, c.rows, at, 2, index, [&] {
      ask_for(at[0] + kAhead, ahead);
      (by_rows_ ? fold_row_(n, at[0], stride, at[1]) : fold_(n, at[0], stride, at[1]));
    });
  }

 private:
  int64_t item_;
  Address x_;
  SumsAddress sums_;
  Nest nest_;
  FoldFn fold_;
  FoldRowFn fold_row_;
  bool by_rows_ = false;
  bool streams_;
};

}  // namespace

DType accumulator_type(Reduction how, DType values, bool wide) {
  if (!is_float(values)) return values;
  if (wide && (how == Reduction::kSum || how == Reduction::kProd)) return DType::kF64;
  return compute_type(values);
}

void fill_identity(Reduction how, DType acc, int64_t n, void* out) {
  with_type(acc, [&](auto v) {
    using T = decltype(v);
    std::fill_n(static_cast<T*>(out), n, identity<T>(how, acc == DType::kBool));
  });
}

void combine(Reduction how, DType acc, int64_t n, void* to, const void* a, const void* b) {
  with_type(acc, [&](auto zero) {
    using T = decltype(zero);
    T* out = static_cast<T*>(to);
    const T *x = static_cast<const T*>(a), *y = static_cast<const T*>(b);
    auto each = [&](auto f) {
      for (int64_t i = 0; i < n; ++i) out[i] = f(x[i], y[i]);
    };
    switch (how) {
      case Reduction::kSum: return each([](T x, T y) { return wrap_add(x, y); });
      case Reduction::kProd: return each([](T x, T y) { return wrap_mul(x, y); });
      case Reduction::kMax: return each([](T x, T y) { return extremum<true>(x, y); });
      case Reduction::kMin: return each([](T x, T y) { return extremum<false>(x, y); });
      default:
        if constexpr (std::is_integral_v<T>) {
          if (how == Reduction::kAnd) return each([](T x, T y) { return static_cast<T>(x & y); });
          if (how == Reduction::kOr) return each([](T x, T y) { return static_cast<T>(x | y); });
          return each([](T x, T y) { return static_cast<T>(x ^ y); });
        }
    }
  });
}

std::unique_ptr<const Step> compile(const Reduce& r, const Compile& c) {
  if (r.how >= Reduction::kArgMax) return std::make_unique<ArgReduceStep>(r, c);
  return std::make_unique<ReduceStep>(r, c);
}

std::unique_ptr<const Step> compile(const Accumulate& a, const Compile& c) { return std::make_unique<AccumulateStep>(a, c); }

// ExpRows: e^(x factor - shift) of rows, a chunk at a time where x or out has 16 bits, with their sums.

namespace {

class ExpRowsStep final : public Step {
 public:
  ExpRowsStep(const ExpRows& e, const Compile& c)
      : n_(e.n),
        factor_(static_cast<float>(e.factor)),
        summed_(!e.sums.empty()),
        item_{static_cast<int64_t>(item_size(e.x.ref.dtype)), static_cast<int64_t>(item_size(e.out.ref.dtype))},
        row_(c.table.exp_row(e.x.ref.dtype, e.out.ref.dtype)),
        straight_{row_ != nullptr || e.x.ref.dtype == DType::kF32, row_ != nullptr || e.out.ref.dtype == DType::kF32},
        x_(e.x.ref, e.x.row_stride),
        shift_(e.shift.ref, e.shift.row_stride),
        out_(e.out.ref, e.out.row_stride),
        sums_(summed_ ? Address(e.sums[0].ref, e.sums[0].row_stride) : shift_),
        load_(c.table, DType::kF32, e.x.ref.dtype, c.where),
        store_(c.table, e.out.ref.dtype, DType::kF32, c.where) {
    if (row_ == nullptr) row_ = c.table.exp_row(DType::kF32, DType::kF32);
    std::vector<int64_t> xs = byte_strides(e.x), os = byte_strides(e.out);
    xs.pop_back(), os.pop_back();
    const Operand& sums = summed_ ? e.sums[0] : e.shift;
    nest_ = make_nest(e.kept, {xs, byte_strides(e.shift), os, byte_strides(sums)});
    simplify(nest_);
    temp_bytes_ = 2 * kChunk * 8;
  }

  void run(const Context& c) const override {
    char* at[4] = {x_.of(c), shift_.of(c), out_.of(c), sums_.of(c)};
    int64_t index[kMaxLoopDims + 1];
    const int64_t step = straight_[0] && straight_[1] ? n_ : kChunk;
    float* const values = reinterpret_cast<float*>(c.temp);
    walk(nest_.data(), static_cast<int>(nest_.size()), c.rows, at, 4, index, [&] {
      const float shift = *reinterpret_cast<const float*>(at[1]);
      float sum = 0;
      for (int64_t i = 0; i < n_; i += step) {
        const int64_t m = std::min(step, n_ - i);
        char *const from = at[0] + i * item_[0], *const to = at[2] + i * item_[1];
        if (!straight_[0]) load_(m, values, from, 1, c.temp + kChunk * 8);
        sum += row_(m, straight_[0] ? from : static_cast<void*>(values), factor_, shift,
                    straight_[1] ? to : static_cast<void*>(values));
        if (!straight_[1]) store_(m, to, 1, values, c.temp + kChunk * 8);
      }
      if (summed_) *reinterpret_cast<float*>(at[3]) = sum;
    });
  }

 private:
  int64_t n_;
  float factor_;
  bool summed_;
  int64_t item_[2];
  ExpRowFn row_;
  bool straight_[2];  // x and out are read and written by row_, not through a chunk of float32
  Address x_, shift_, out_, sums_;
  Loader load_;
  Storer store_;
  Nest nest_;  // (rows, *kept), operands x, shift, out and sums
};

}  // namespace

std::unique_ptr<const Step> compile(const ExpRows& e, const Compile& c) { return std::make_unique<ExpRowsStep>(e, c); }

// Scan: cumulative operations along the last dimension. Floating values are carried in double, so a long float32 sum stays exact to
// an ulp.

namespace {

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
