// Throughput on one thread: GF/s of matmuls, ns per element of functions. Best of several repetitions, operands in the cache as in
// a pipeline.
#pragma once

#include <chrono>
#include <vector>

#include "kernels_gemm_test.h"
#include "kitsune_cpu/opcodes.h"

namespace kitsune::cpu::test {

template <class F>
double best_seconds(F f) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9, total = 0;
  for (int i = 0; i < 400 && (i < 5 || total < 0.15); ++i) {
    auto start = Clock::now();
    f();
    double s = std::chrono::duration<double>(Clock::now() - start).count();
    best = s < best ? s : best;
    total += s;
  }
  return best;
}

inline void bench_gemm() {
  const KernelTable& kt = kernels();
  ThreadsPart part(kt);
  const int64_t shapes[][2] = {{256, 256}, {63, 256}, {319, 256}, {384, 128}, {128, 128}, {512, 1408}, {1408, 512}};
  for (DType type : {DType::kF32, DType::kBF16}) {
    for (const auto& s : shapes) {
      const int64_t K = s[0], N = s[1];
      const Panel panel = kt.panel_for(type, Product::kBest, {96, N, K});
      for (int64_t M : {int64_t(96), int64_t(128)}) {
        AlignedBuffer x(size_t(M * K) * 4), w(size_t(K * N) * 4), c(size_t(M * N) * 4), packed(kt.packed_bytes(panel, K, N)),
            bias(size_t(N) * 4);
        Random random;
        for (int64_t i = 0; i < M * K; ++i) set_element(x.data, type, i, random.symmetric());
        for (int64_t i = 0; i < K * N; ++i) set_element(w.data, type, i, random.symmetric());
        for (int64_t i = 0; i < N; ++i) set_element(bias.data, DType::kF32, i, random.symmetric());
        std::vector<int64_t> ko(static_cast<size_t>(K)), no(static_cast<size_t>(N));
        for (int64_t k = 0; k < K; ++k) ko[size_t(k)] = k * N;
        for (int64_t n = 0; n < N; ++n) no[size_t(n)] = n;
        PackSource source{w.data, type, K, N, ko.data(), no.data()};
        double pack = best_seconds([&] { kt.pack(panel, source, 0, kt.panel_count(panel, N), packed.data); });
        GemmArgs args{M, N, K, x.data, type, K, packed.data, panel, bias.data, Activation::kRelu, c.data, type, N, nullptr};
        AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
        args.scratch = scratch.data;
        double t = best_seconds([&] { kt.gemm(args); });
        std::printf("%-10s %s M %3ld K %4ld N %4ld: %6.1f GF/s   (pack %.2f ns/element)\n", kt.isa,
                    type == DType::kF32 ? "f32 " : "bf16", long(M), long(K), long(N), 2e-9 * double(M * N * K) / t,
                    pack * 1e9 / double(K * N));
      }
    }
  }
}

// What an activation adds to a product, in ns for each element of its result.
inline void bench_activations() {
  const KernelTable& kt = kernels();
  const int64_t M = 96, N = 256, K = 256;
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
    const Panel panel = kt.panel_for(type, Product::kBest, {M, N, K});
    AlignedBuffer x(size_t(M * K) * 4), w(size_t(K * N) * 4), c(size_t(M * N) * 4), packed(kt.packed_bytes(panel, K, N));
    Random random;
    for (int64_t i = 0; i < M * K; ++i) set_element(x.data, type, i, random.symmetric());
    for (int64_t i = 0; i < K * N; ++i) set_element(w.data, type, i, random.symmetric() * 0.2);
    std::vector<int64_t> ko(static_cast<size_t>(K)), no(static_cast<size_t>(N));
    for (int64_t k = 0; k < K; ++k) ko[size_t(k)] = k * N;
    for (int64_t n = 0; n < N; ++n) no[size_t(n)] = n;
    kt.pack(panel, PackSource{w.data, type, K, N, ko.data(), no.data()}, 0, kt.panel_count(panel, N), packed.data);
    double seconds[kNumActivations];
    for (int kind = 0; kind < kNumActivations; ++kind) {
      const float* p = usual_parameters(Activation(kind));
      GemmArgs args{M, N, K, x.data, type, K, packed.data, panel, nullptr, Activation(kind), c.data, type, N, nullptr, p[0], p[1]};
      AlignedBuffer scratch(kt.gemm_scratch_bytes(args));
      args.scratch = scratch.data;
      seconds[kind] = best_seconds([&] { kt.gemm(args); });
    }
    for (int kind = 0; kind < kNumActivations; ++kind)
      std::printf("%-10s dtype %2d activation %d: %.3f times relu, %6.3f ns/element more\n", kt.isa, int(type), kind,
                  seconds[kind] / seconds[1], (seconds[kind] - seconds[1]) * 1e9 / double(M * N));
  }
}

inline void bench_vector() {
  struct Case {
    const char* name;
    Opcode op;
  };
#define KITSUNE_CASE(name, operands, gives_bool) {#name, Opcode::op_##name},
  const Case cases[] = {KITSUNE_OPCODES(KITSUNE_CASE)};
#undef KITSUNE_CASE
  const int64_t n = 2048;
  std::vector<float> a(static_cast<size_t>(n)), b(a.size()), d(a.size());
  std::vector<uint16_t> h(a.size());
  Random random;
  for (size_t i = 0; i < a.size(); ++i) a[i] = float(random.uniform() * 0.9 + 0.05), b[i] = float(random.symmetric() * 3);
  const double imm[] = {3, 7};
  auto report = [&](const char* name, double seconds) {
    std::printf("%-10s %-22s %7.3f ns/element\n", kernels().isa, name, seconds * 1e9 / double(n));
  };
  for (const Case& c : cases) {
    VectorFn f = kernels().vector(c.op, DType::kF32);
    if (!f || c.op == Opcode::op_polygamma || c.op == Opcode::op_zeta) continue;
    report(c.name, best_seconds([&] { f(n, d.data(), a.data(), b.data(), a.data(), b.data(), imm); }));
  }
  report("store bf16", best_seconds([&] { kernels().store(DType::kBF16, DType::kF32)(n, h.data(), 1, a.data()); }));
  report("load bf16", best_seconds([&] { kernels().load(DType::kF32, DType::kBF16)(n, d.data(), h.data(), 1); }));
  report("store f16", best_seconds([&] { kernels().store(DType::kF16, DType::kF32)(n, h.data(), 1, a.data()); }));
  report("load f16", best_seconds([&] { kernels().load(DType::kF32, DType::kF16)(n, d.data(), h.data(), 1); }));
  double total = 0;
  float narrow = 0;
  std::vector<double> rows(a.size());
  report("sum f32", best_seconds([&] { kernels().fold(0, DType::kF32, false)(n, a.data(), 1, &narrow); }));
  report("sum f32 wide", best_seconds([&] { kernels().fold(0, DType::kF32, true)(n, a.data(), 1, &total); }));
  report("max f32", best_seconds([&] { kernels().fold(1, DType::kF32, false)(n, a.data(), 1, &narrow); }));
  report("sum rows wide", best_seconds([&] { kernels().fold_row(0, DType::kF32, true)(n, a.data(), 1, rows.data()); }));
}

}  // namespace kitsune::cpu::test
