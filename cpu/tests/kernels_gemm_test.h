// Matmuls against double references: awkward shapes, every type of X, W and C, strides, packing layouts; nothing outside is
// touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "activated.h"
#include "kernels_check.h"
#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu::test {

struct AlignedBuffer {  // 64-byte aligned
  explicit AlignedBuffer(size_t bytes) : data(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) {}
  ~AlignedBuffer() { std::free(data); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  void* data;
};

inline double element(const void* p, DType t, int64_t i) {
  switch (t) {
    case DType::kF32: return static_cast<const float*>(p)[i];
    case DType::kF64: return static_cast<const double*>(p)[i];
    case DType::kF16: return half_value(static_cast<const uint16_t*>(p)[i]);
    default: return bfloat16_value(static_cast<const uint16_t*>(p)[i]);
  }
}

inline void set_element(void* p, DType t, int64_t i, double v) {
  switch (t) {
    case DType::kF32: static_cast<float*>(p)[i] = float(v); return;
    case DType::kF64: static_cast<double*>(p)[i] = v; return;
    case DType::kF16: static_cast<uint16_t*>(p)[i] = reference_half(v); return;
    default: static_cast<uint16_t*>(p)[i] = reference_bfloat16(v); return;
  }
}

inline void end_of_call(const KernelTable& kt) {
  if (kt.end_of_call != nullptr) kt.end_of_call();
}

// Elements of one type that end where memory ends: what reads on beyond them is a fault.
struct Guarded {
  explicit Guarded(size_t bytes) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + size_ - page, page, PROT_NONE) != 0) std::abort();
    data = base_ + size_ - page - bytes;
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  char* get() { return data; }
  char* data;

 private:
  char* base_;
  size_t size_;
};

struct GemmCase {
  int64_t M, N, K;
  DType x, w, c;
  bool bias;
  Activation act;
  bool transposed, strided;
  Product product = Product::kBest;
  bool adds = false;
};

// X and W lie at the very end of what may be read, X with NaN between its rows; C has guard values around.
inline void test_gemm_case(const GemmCase& t, Random& random) {
  const KernelTable& kt = kernels();
  const Panel panel = kt.panel_for(t.w, t.product, {t.M, t.N, t.K});
  const int64_t lda = t.K + (t.strided ? 3 : 0), ldc = t.N + (t.strided ? 5 : 0);
  const int64_t x_elements = (t.M - 1) * lda + t.K;
  Guarded x(size_t(x_elements) * item_size(t.x)), w(size_t(t.K * t.N) * item_size(t.w));
  for (int64_t i = 0; i < x_elements; ++i) set_element(x.get(), t.x, i, i % lda < t.K ? random.symmetric() : NAN);
  for (int64_t i = 0; i < t.K * t.N; ++i) set_element(w.get(), t.w, i, random.symmetric());
  const bool wide = panel == Panel::kF64;
  std::unique_ptr<char[]> bias(new char[size_t(t.N) * (wide ? 8 : 4)]);
  for (int64_t i = 0; i < t.N; ++i) set_element(bias.get(), wide ? DType::kF64 : DType::kF32, i, random.symmetric());

  std::vector<int64_t> k_offset(static_cast<size_t>(t.K)), n_offset(static_cast<size_t>(t.N));
  for (int64_t k = 0; k < t.K; ++k) k_offset[size_t(k)] = t.transposed ? k : k * t.N;
  for (int64_t n = 0; n < t.N; ++n) n_offset[size_t(n)] = t.transposed ? n * t.K : n;
  AlignedBuffer packed(kt.packed_bytes(panel, t.K, t.N));
  std::memset(packed.data, 0xff, kt.packed_bytes(panel, t.K, t.N));
  PackSource source{w.get(), t.w, t.K, t.N, k_offset.data(), n_offset.data()};
  const int64_t panels = kt.panel_count(panel, t.N), middle = panels / 2;
  kt.pack(panel, source, middle, panels, packed.data);
  kt.pack(panel, source, 0, middle, packed.data);

  const int64_t guard = 64, c_elements = (t.M - 1) * ldc + t.N;
  std::vector<char> c(size_t(c_elements + 2 * guard) * item_size(t.c), char(0x5a));
  char* c0 = c.data() + size_t(guard) * item_size(t.c);
  for (int64_t i = 0; t.adds && i < c_elements; ++i)
    if (i % ldc < t.N) set_element(c0, t.c, i, random.symmetric());
  const std::vector<char> before = c;
  GemmArgs args{t.M,
                t.N,
                t.K,
                x.get(),
                t.x,
                lda,
                packed.data,
                panel,
                t.bias ? bias.get() : nullptr,
                t.act,
                c0,
                t.c,
                ldc,
                nullptr,
                usual_parameters(t.act)[0],
                usual_parameters(t.act)[1],
                t.adds};
  AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
  args.scratch = scratch.data;
  kt.gemm(args);
  end_of_call(kt);

  int64_t wrong = 0, touched = 0;
  double worst = 0;
  const double step = t.c == DType::kBF16 ? 0x1p-8 : t.c == DType::kF16 ? 0x1p-11 : wide && t.c == DType::kF64 ? 0x1p-53 : 0x1p-24;
  const double sum_step = wide ? 0x1p-53 : 0x1p-24;
  for (int64_t i = -guard; i < c_elements + guard; ++i) {
    int64_t m = i < 0 ? -1 : i / ldc, n = i < 0 ? 0 : i % ldc;
    if (m < 0 || m >= t.M || n >= t.N) {
      const char* p = c0 + i * int64_t(item_size(t.c));
      for (size_t b = 0; b < item_size(t.c); ++b) touched += p[b] != 0x5a;
      continue;
    }
    double sum = t.bias ? element(bias.get(), wide ? DType::kF64 : DType::kF32, n) : 0, size = std::fabs(sum);
    if (t.adds) sum += element(&before[size_t(guard) * item_size(t.c)], t.c, i), size = std::fabs(sum) + size;
    for (int64_t k = 0; k < t.K; ++k) {
      double product = element(x.get(), t.x, m * lda + k) * element(w.get(), t.w, k_offset[size_t(k)] + n_offset[size_t(n)]);
      sum += product;
      size += std::fabs(product);
    }
    // The slope of every activation is below 1.3; its own error is a few units in the last place, and that of its exponent.
    const double x_squared = sum * sum;
    sum = activated(t.act, usual_parameters(t.act), sum);
    const double own = t.act <= Activation::kRelu ? 0 : (4 + 2 * x_squared) * 0x1p-24 * std::fabs(sum);
    double got = element(c0, t.c, i),
           tolerance = 1.3 * (t.K + 2) * sum_step * size + own + 1.01 * step * std::fabs(sum) + 1e-7 * (t.c == DType::kF16);
    if (!(std::fabs(got - sum) <= tolerance)) ++wrong, worst = std::fabs(got - sum) > worst ? std::fabs(got - sum) : worst;
  }
  check(wrong == 0 && touched == 0,
        "gemm [%s] M %ld N %ld K %ld x %d w %d c %d bias %d act %d transposed %d strided %d product %d: %ld wrong (by %g), %ld "
        "bytes outside "
        "touched",
        kt.isa, long(t.M), long(t.N), long(t.K), int(t.x), int(t.w), int(t.c), t.bias, int(t.act), t.transposed, t.strided,
        int(t.product), long(wrong), worst, long(touched));
}

inline void test_gemm_nan() {
  const KernelTable& kt = kernels();
  for (DType type : {DType::kF32, DType::kBF16}) {
    const Panel panel = kt.panel_for(type, Product::kBest, {3, 1, 1});
    alignas(64) char x[256] = {}, w[256] = {}, c[256] = {}, scratch[256] = {};
    set_element(x, type, 0, NAN), set_element(x, type, 1, -1), set_element(x, type, 2, 1);
    set_element(w, type, 0, 1);
    int64_t zero = 0;
    AlignedBuffer packed(kt.packed_bytes(panel, 1, 1));
    kt.pack(panel, PackSource{w, type, 1, 1, &zero, &zero}, 0, 1, packed.data);
    for (DType out : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
      kt.gemm(GemmArgs{3, 1, 1, x, type, 1, packed.data, panel, nullptr, Activation::kRelu, c, out, 1, scratch});
      check(std::isnan(element(c, out, 0)) && element(c, out, 1) == 0 && element(c, out, 2) == 1, "relu [%s] x %d c %d: %g %g %g",
            kt.isa, int(type), int(out), element(c, out, 0), element(c, out, 1), element(c, out, 2));
    }
  }
}

// Infinities, NaN, zeros and numbers whose squares, cubes and exponentials overflow or vanish: the sums are the numbers themselves.
inline void test_gemm_activation_of_special_numbers() {
  const KernelTable& kt = kernels();
  const double numbers[] = {INFINITY, -INFINITY, NAN,  0.0,   -0.0, 1e30,  -1e30, 3e38, -3e38, 1e-30, -1e-30, 88,
                            -88,      -104,      -105, -1000, 1000, -1e10, 1e10,  12.5, -12.5, 0.5,   -0.5,   -3.25};
  constexpr int64_t M = sizeof numbers / sizeof numbers[0];
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Panel panel = kt.panel_for(type, Product::kBest, {M, 1, 1});
    alignas(8) char x[M * 8] = {}, w[8] = {}, c[M * 8];
    for (int64_t i = 0; i < M; ++i) set_element(x, type, i, numbers[i]);
    set_element(w, type, 0, 1);
    int64_t zero = 0;
    AlignedBuffer packed(kt.packed_bytes(panel, 1, 1));
    kt.pack(panel, PackSource{w, type, 1, 1, &zero, &zero}, 0, 1, packed.data);
    for (int kind = 2; kind < kNumActivations; ++kind) {
      const float* p = usual_parameters(Activation(kind));
      GemmArgs args{M, 1, 1, x, type, 1, packed.data, panel, nullptr, Activation(kind), c, DType::kF32, 1, nullptr, p[0], p[1]};
      AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
      args.scratch = scratch.data;
      kt.gemm(args);
      for (int64_t i = 0; i < M; ++i) {
        const double v = element(x, type, i), want = activated(Activation(kind), p, v), got = element(c, DType::kF32, i);
        const double error = (4 + 2 * std::min(v * v, 1e4)) * 0x1p-23 * std::fabs(want) + 1e-35;
        const bool same = std::isnan(want) ? std::isnan(got) : std::isinf(want) ? got == want : std::fabs(got - want) <= error;
        check(same, "activation %d [%s] of %g: %g, not %g", kind, kt.isa, v, got, want);
        if (v == 0 && kind != int(Activation::kLogistic) && panel != Panel::kBF16)
          check(got == 0, "activation %d [%s] of %g: %g", kind, kt.isa, v, got);
      }
    }
  }
}

// Results in bfloat16 may come from shorter polynomials, but they are the correctly rounded ones but for a few, which are
// neighbours.
inline void test_gemm_activation_in_bfloat16() {
  const KernelTable& kt = kernels();
  constexpr int64_t M = 3001;
  const Panel panel = kt.panel_for(DType::kF32, Product::kBest, {M, 1, 1});
  std::vector<float> x(M);
  std::vector<uint16_t> c(M);
  for (int64_t i = 0; i < M; ++i)
    x[size_t(i)] = float(double(i - M / 2) / (M / 2) * 6 * (i % 3 == 0 ? 1 : i % 3 == 1 ? 0.25 : 0.01));
  const float one = 1;
  int64_t zero = 0;
  AlignedBuffer packed(kt.packed_bytes(panel, 1, 1));
  kt.pack(panel, PackSource{&one, DType::kF32, 1, 1, &zero, &zero}, 0, 1, packed.data);
  for (int kind = 2; kind < kNumActivations; ++kind) {
    const float* p = usual_parameters(Activation(kind));
    kt.gemm({M, 1, 1, x.data(), DType::kF32, 1, packed.data, panel, nullptr, Activation(kind), c.data(), DType::kBF16, 1, nullptr,
             p[0], p[1]});
    int64_t off = 0, far = 0;
    for (int64_t i = 0; i < M; ++i) {
      const int difference = c[size_t(i)] - reference_bfloat16(activated(Activation(kind), p, double(x[size_t(i)])));
      off += difference != 0;
      far += difference < -1 || difference > 1;
    }
    check(off * 20 <= M && far == 0, "activation %d [%s] in bfloat16: %ld of %ld differ, %ld of them by more than a unit", kind,
          kt.isa, long(off), long(M), long(far));
  }
}

// Sums that are rounded before their bias is added, and again before the activation. Sums of small integers are exact in any order,
// so the expected numbers are exact.
inline void test_gemm_rounds(int64_t M, int64_t N, int64_t K, DType type, DType rounds, DType out, bool with_bias, Activation act,
                             Product product, Random& random) {
  const KernelTable& kt = kernels();
  const Panel panel = kt.panel_for(type, product, {M, N, K});
  const int64_t ldc = N + (M % 2 ? 0 : 3);
  std::vector<char> x(size_t(M * K) * item_size(type)), w(size_t(K * N) * item_size(type));
  std::vector<char> c(size_t(M * ldc) * item_size(out));
  std::vector<float> bias(static_cast<size_t>(N));
  auto number = [&] { return std::floor(random.symmetric() * 15); };
  for (int64_t i = 0; i < M * K; ++i) set_element(x.data(), type, i, number());
  for (int64_t i = 0; i < K * N; ++i) set_element(w.data(), type, i, number());
  for (float& b : bias) b = float(number() + 0.1015625);
  std::vector<int64_t> k_offset(static_cast<size_t>(K)), n_offset(static_cast<size_t>(N));
  for (int64_t k = 0; k < K; ++k) k_offset[size_t(k)] = k * N;
  for (int64_t n = 0; n < N; ++n) n_offset[size_t(n)] = n;
  AlignedBuffer packed(kt.packed_bytes(panel, K, N));
  kt.pack(panel, PackSource{w.data(), type, K, N, k_offset.data(), n_offset.data()}, 0, kt.panel_count(panel, N), packed.data);
  GemmArgs args{M,   N,        K,   x.data(), type,   K, packed.data, panel, with_bias ? bias.data() : nullptr,
                act, c.data(), out, ldc,      nullptr};
  args.rounds = rounds;
  AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
  args.scratch = scratch.data;
  kt.gemm(args);
  end_of_call(kt);
  auto rounded = [&](double v) {
    return rounds == DType::kF16 ? half_value(reference_half(v)) : double(bfloat16_value(reference_bfloat16(v)));
  };
  int64_t wrong = 0;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += element(x.data(), type, m * K + k) * element(w.data(), type, k * N + n);
      sum = rounded(sum);
      if (with_bias) sum = rounded(sum + double(bias[size_t(n)]));
      if (act == Activation::kRelu) sum = std::max(sum, 0.0);
      wrong += element(c.data(), out, m * ldc + n) != sum;
    }
  check(wrong == 0, "gemm that rounds [%s] M %ld N %ld K %ld type %d rounds %d c %d bias %d act %d product %d: %ld wrong", kt.isa,
        long(M), long(N), long(K), int(type), int(rounds), int(out), with_bias, int(act), int(product), long(wrong));
}

inline void test_gemm_rounds() {
  Random random;
  int64_t turn = 0;
  for (DType type : {DType::kBF16, DType::kF16, DType::kF32})
    for (DType rounds : {DType::kBF16, DType::kF16})
      for (int64_t M : {1, 6, 13, 16, 17, 47, 131})
        for (int64_t N : {1, 3, 16, 31, 33, 70}) {
          const DType out = turn % 4 == 0 ? DType::kF32 : rounds;
          const Product product = type == DType::kBF16 ? Product(turn % kNumProducts) : Product::kBest;
          test_gemm_rounds(M, N, turn % 3 ? 37 : 64, type, rounds, out, turn % 5 != 0,
                           turn % 2 ? Activation::kRelu : Activation::kNone, product, random);
          ++turn;
        }
}

// An activation of rounded sums, one for each 16-bit number of ordinary size: from a table, or without one. Its definition in
// double, but for the rounding of its result and, of a silu, of its logistic.
inline void test_rounded_activation(Activation act, float a, DType rounds) {
  const KernelTable& kt = kernels();
  constexpr int64_t N = 16;
  std::vector<uint16_t> x;
  for (int64_t i = 0; i < 65536; ++i) {
    const uint16_t bits = uint16_t(i);
    const double v = std::fabs(element(&bits, rounds, 0));
    if (v >= 0x1p-8 && v <= 16) x.push_back(bits);
  }
  const int64_t M = int64_t(x.size());
  std::vector<char> w(size_t(N) * item_size(rounds)), c(size_t(M * N) * item_size(rounds));
  std::vector<int64_t> columns(static_cast<size_t>(N));
  for (int64_t n = 0; n < N; ++n) columns[size_t(n)] = n, set_element(w.data(), rounds, n, 1);
  const int64_t zero = 0;
  const Panel panel = kt.panel_for(rounds, Product::kWidened, {M, N, 1});
  AlignedBuffer packed(kt.packed_bytes(panel, 1, N));
  kt.pack(panel, PackSource{w.data(), rounds, 1, N, &zero, columns.data()}, 0, kt.panel_count(panel, N), packed.data);
  GemmArgs args{M, N, 1, x.data(), rounds, 1, packed.data, panel, nullptr, act, c.data(), rounds, N, nullptr};
  args.act_a = a, args.rounds = rounds;
  AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
  args.scratch = scratch.data;
  kt.gemm(args);
  end_of_call(kt);
  const double half_unit = rounds == DType::kBF16 ? 0x1p-8 : 0x1p-11,
               near = half_unit * (act == Activation::kSilu ? 2 : 1) + 0x1p-12;
  int64_t wrong = 0;
  for (int64_t m = 0; m < M; ++m) {
    const double v = element(x.data(), rounds, m), want = activated(act, &a, v);
    const double least = (1 + std::fabs(v)) * 0x1p-24;  // a small logistic is a subnormal float16
    for (int64_t n = 0; n < N; ++n)
      wrong += !(std::fabs(element(c.data(), rounds, m * N + n) - want) <= near * std::fabs(want) + least);
  }
  check(wrong == 0, "activation %d of a = %g, rounded to %d [%s]: %ld of %ld wrong", int(act), double(a), int(rounds), kt.isa,
        long(wrong), long(M * N));
}

inline void test_rounded_activations() {
  for (DType rounds : {DType::kBF16, DType::kF16})
    for (Activation act : {Activation::kLogistic, Activation::kTanh, Activation::kSilu, Activation::kElu})
      test_rounded_activation(act, 1.0f, rounds);
}

// More of them than there are tables.
inline void test_more_activations_than_tables() {
  for (int i = 0; i < 70; ++i) test_rounded_activation(Activation::kElu, 1.0f + float(i) / 64, i % 2 ? DType::kBF16 : DType::kF16);
}

// Instructions that multiply bfloat16 take subnormal operands for zeros on any thread; widened operands are f32's, which keep
// theirs where the thread does.
inline void test_gemm_subnormal() {
  const KernelTable& kt = kernels();
  const int64_t zero = 0;
  for (Product product : {Product::kWidened, Product::kDots}) {
    const Panel panel = kt.panel_for(DType::kBF16, product, {1, 1, 1});
    uint16_t x = 0x0040, w = 0x3f80;  // 2^-127, 1
    float c = 7;
    AlignedBuffer packed(kt.packed_bytes(panel, 1, 1));
    kt.pack(panel, PackSource{&w, DType::kBF16, 1, 1, &zero, &zero}, 0, 1, packed.data);
    GemmArgs args{};
    args.M = args.N = args.K = args.lda = args.ldc = 1;
    args.x = &x, args.x_dtype = DType::kBF16, args.w = packed.data, args.panel = panel, args.c = &c, args.c_dtype = DType::kF32;
    AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
    args.scratch = scratch.data;
    kt.gemm(args);
    check(c == (panel == Panel::kF32 ? 0x1p-127f : 0.0f), "subnormal bfloat16 [%s] product %d: %a", kt.isa, int(product),
          double(c));
  }
}

inline void test_gemm() {
  Random random;
  const int64_t sizes[] = {1, 2, 3, 7, 31, 33, 97};
  const DType inputs[][2] = {
      {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kF16, DType::kF16}, {DType::kF64, DType::kF64}};
  int64_t turn = 0;
  for (int64_t M : sizes) {
    for (int64_t N : sizes) {
      for (int64_t K : sizes) {
        const DType* in = inputs[turn % 4];
        const DType outputs[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
        test_gemm_case(
            {M, N, K, in[0], in[1], outputs[turn / 4 % 4], turn % 3 != 0, turn % 5 < 2 ? Activation::kRelu : Activation::kNone,
             turn % 7 < 3, turn % 2 == 0, Product(turn / 4 % kNumProducts)},
            random);
        ++turn;
      }
    }
  }
  for (int64_t M = 1; M <= 30; ++M) {  // every remainder of the row blocks
    for (const auto& in : inputs) test_gemm_case({M, 34, 5, in[0], in[1], in[0], true, Activation::kNone, false, true}, random);
  }
  for (const auto& in : inputs)
    test_gemm_case({300, 40, 1409, in[0], in[1], in[0], true, Activation::kRelu, true, false}, random);  // several row blocks
  for (int i = 0; i < kNumProducts; ++i) {
    const Product product = Product(i);
    for (DType x : {DType::kBF16, DType::kF32, DType::kF16})  // rows that are not bfloat16 meet widened weights
      test_gemm_case(
          {50, 47, 61, x, x == DType::kBF16 ? x : DType::kF32, DType::kF32, true, Activation::kNone, true, true, product}, random);
    test_gemm_case({300, 40, 1409, DType::kBF16, DType::kBF16, DType::kBF16, true, Activation::kRelu, true, false, product},
                   random);
  }
  for (int64_t M : {1, 15, 16, 17, 31, 32, 33, 48, 50, 97}) {  // whole tiles and parts of them, added to what is there
    for (int64_t N : {1, 16, 33, 64}) {
      for (int i = 0; i < kNumProducts; ++i) {
        const bool bias = (M + N + i) % 2 == 0;
        const Activation act = (M + i) % 3 == 0 ? Activation::kRelu : (M + i) % 3 == 1 ? Activation::kScale : Activation::kNone;
        test_gemm_case({M, N, N + 31, DType::kBF16, DType::kBF16, DType::kF32, bias, act, false, i % 2 == 0, Product(i), true},
                       random);
      }
      test_gemm_case(
          {M, N, 40, DType::kF16, DType::kF16, DType::kF32, N == 33, Activation::kNone, true, true, Product::kBest, true}, random);
    }
  }
  test_gemm_nan();
  test_gemm_rounds();
  test_rounded_activations();
  test_gemm_subnormal();
  // A column or a few, whose products go along K: rows that are not a multiple of 4 or fill more than one run, every end of K.
  int64_t depth = 16;
  for (int64_t N = 1; N <= 5; ++N) {
    for (int64_t M : {7, 8, 10, 67, 129}) {
      for (const auto& in : inputs) {
        for (DType out : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
          test_gemm_case({M, N, depth % 16 == 3 ? 1009 + depth % 32 : depth, in[0], in[1], out, depth % 2 == 0,
                          depth % 3 == 0 ? Activation::kRelu : Activation::kNone, depth % 5 < 2, depth % 7 == 0, Product::kWidened},
                         random);
          depth = depth % 90 + 1;
        }
      }
    }
    if (N > 1) continue;
    for (int kind = 2; kind < kNumActivations; ++kind)
      test_gemm_case({70, 1, 35, DType::kF32, DType::kF32, DType::kF32, true, Activation(kind), false, false}, random);
  }
  // Products that are added to what is there: every height of a block, and widths around those of a vector and a panel.
  for (int64_t M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 61})
    for (int64_t N : {1, 3, 8, 16, 17, 31, 32, 33, 70})
      for (Activation act : {Activation::kNone, Activation::kRelu, Activation::kTanh})
        test_gemm_case({M, N, M % 2 ? 20 : 3, M % 3 ? DType::kF32 : DType::kBF16, DType::kF32, DType::kF32, N % 2 == 0, act, false,
                        M % 2 == 0, Product::kBest, true},
                       random);
  // Widths around those of a vector and a panel, for every activation and every type that its result is stored as.
  int64_t width = 1;
  for (int kind = 2; kind < kNumActivations; ++kind) {
    for (const auto& in : inputs) {
      if (in[0] == DType::kF64) continue;
      for (DType out : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
        for (int64_t M : {1, 5, 13, 29}) {
          test_gemm_case({M, width, 19, in[0], in[1], out, true, Activation(kind), false, width % 2 == 0}, random);
          width = width % 70 + 1;
        }
      }
    }
  }
  test_gemm_activation_of_special_numbers();
  test_gemm_activation_in_bfloat16();
}

}  // namespace kitsune::cpu::test
