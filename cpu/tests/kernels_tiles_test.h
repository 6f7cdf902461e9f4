// Products on tiles: what only they have. The models, and the instructions where there are any, must agree bit for bit on hostile
// numbers; small shapes go to other panels; tiles are configured once and released.
#pragma once

#include "amx_models.h"
#include "kernels_gemm_test.h"

namespace kitsune::cpu::test {

// The tables with tiles: the models, and "amx" where the CPU has it.
inline std::vector<const KernelTable*> tables_with_tiles() {
  std::vector<const KernelTable*> found;
  for (int i = 0; i < models().count; ++i) found.push_back(&models().all[i]->table);
  if (set_isa("amx")) found.push_back(&kernels());
  set_kernels(nullptr);
  return found;
}

// A bfloat16 of any kind: ordinary, of any exponent, denormal, zero, Inf, NaN; one of the last two is rare.
inline uint16_t hostile(Random& random) {
  const uint16_t bits = uint16_t(random.next() >> 20);
  switch (random.below(64)) {
    case 0: return uint16_t((bits & 0x8000) | 0x7f80);
    case 1: return uint16_t(bits | 0x7f80);
    case 2:
    case 3:
    case 4:
    case 5: return uint16_t(bits & 0x807f);
    case 6:
    case 7: return uint16_t(bits & 0x8000);
    case 8:
    case 9:
    case 10:
    case 11: return bits;
    default: return uint16_t((bits & 0x807f) | (119 + random.below(16)) << 7);
  }
}

inline void test_tiles_agree() {
  Random random;
  const std::vector<const KernelTable*> tables = tables_with_tiles();
  const int64_t shapes[][3] = {{16, 16, 32}, {17, 33, 45}, {50, 64, 96}, {5, 40, 70}, {64, 48, 31 + 64}};
  for (const auto& s : shapes) {
    const int64_t M = s[0], N = s[1], K = s[2];
    std::vector<uint16_t> x(size_t(M * K)), w(size_t(K * N)), y(size_t(M * N));
    std::vector<float> bias(static_cast<size_t>(N)), c0(static_cast<size_t>(K * N));
    for (auto* v : {&x, &w, &y})
      for (uint16_t& e : *v) e = hostile(random);
    for (float& b : bias) b = bfloat16_value(hostile(random));
    for (float& b : c0) b = bfloat16_value(hostile(random));
    std::vector<int64_t> ko(static_cast<size_t>(K)), no(static_cast<size_t>(N));
    for (int64_t k = 0; k < K; ++k) ko[size_t(k)] = k * N;
    for (int64_t n = 0; n < N; ++n) no[size_t(n)] = n;
    std::vector<float> first, first_outer;
    for (const KernelTable* kt : tables) {
      AlignedBuffer packed(kt->packed_bytes(Panel::kTiles, K, N));
      kt->pack(Panel::kTiles, {w.data(), DType::kBF16, K, N, ko.data(), no.data()}, 0, kt->panel_count(Panel::kTiles, N),
               packed.data);
      std::vector<float> c(size_t(M * N));
      GemmArgs g{M,        N,           K, x.data(), DType::kBF16, K, packed.data, Panel::kTiles, bias.data(), Activation::kNone,
                 c.data(), DType::kF32, N, nullptr};
      AlignedBuffer scratch(kt->gemm_scratch_bytes(g));
      g.scratch = scratch.data;
      kt->gemm(g);
      std::vector<float> d = c0;
      OuterArgs o{M, K, N, x.data(), y.data(), DType::kBF16, Panel::kTiles, K, N, d.data(), nullptr};
      AlignedBuffer more(kt->outer_scratch_bytes(o));
      o.scratch = more.data;
      kt->outer(o);
      kt->end_of_call();
      if (first.empty()) first = c, first_outer = d;
      check(std::memcmp(c.data(), first.data(), c.size() * 4) == 0, "gemm [%s] M %ld N %ld K %ld has other bits than [%s]", kt->isa,
            long(M), long(N), long(K), tables[0]->isa);
      check(std::memcmp(d.data(), first_outer.data(), d.size() * 4) == 0,
            "outer [%s] of %ld rows, %ld by %ld, has other bits than [%s]", kt->isa, long(M), long(K), long(N), tables[0]->isa);
    }
    // A NaN or Inf stays in its row: rows without either have finite sums, whatever lies in the other rows and beyond.
    for (int64_t m = 0; m < M; ++m) {
      auto finite = [](uint16_t b) { return (b & 0x7f80) != 0x7f80; };
      for (int64_t n = 0; n < N; ++n) {
        bool all = std::isfinite(bias[size_t(n)]);
        double size = all ? std::fabs(bias[size_t(n)]) : 0;
        for (int64_t k = 0; all && k < K; ++k) {
          all = finite(x[size_t(m * K + k)]) && finite(w[size_t(k * N + n)]);
          size += all ? std::fabs(double(bfloat16_value(x[size_t(m * K + k)])) * bfloat16_value(w[size_t(k * N + n)])) : 0;
        }
        if (all && size < 1e38)
          check(std::isfinite(first[size_t(m * N + n)]), "gemm of finite numbers: row %ld column %ld is %g", long(m), long(n),
                first[size_t(m * N + n)]);
      }
    }
  }
}

// Denormal operands are zeros, and denormal sums too.
inline void test_tiles_denormals() {
  for (const KernelTable* kt : tables_with_tiles()) {
    constexpr int64_t M = 16, N = 16, K = 32;
    std::vector<uint16_t> x(M * K, 0), w(K * N, 0);
    x[0] = 0x0001, w[0] = 0x7f00;                                                       // denormal times huge: row 0, column 0
    x[K] = 0x0080, x[K + 1] = 0x8080, w[N] = 0x3f80, w[1] = 0x3fc0, w[N + 1] = 0x3f80;  // (1.5 - 1) 2^-126: row 1, column 1
    x[2 * K] = 0x0080, w[2] = 0x3f80;                                                   // 2^-126 itself: row 2, column 2
    std::vector<int64_t> ko(K), no(N);
    for (int64_t k = 0; k < K; ++k) ko[size_t(k)] = k * N;
    for (int64_t n = 0; n < N; ++n) no[size_t(n)] = n;
    AlignedBuffer packed(kt->packed_bytes(Panel::kTiles, K, N));
    kt->pack(Panel::kTiles, {w.data(), DType::kBF16, K, N, ko.data(), no.data()}, 0, 1, packed.data);
    float c[M * N];
    GemmArgs g{M, N,           K, x.data(), DType::kBF16, K, packed.data, Panel::kTiles, nullptr, Activation::kNone,
               c, DType::kF32, N, nullptr};
    kt->gemm(g);
    kt->end_of_call();
    check(c[0] == 0 && c[N + 1] == 0 && c[2 * N + 2] == 0x1p-126f, "denormals on tiles [%s]: %a %a %a", kt->isa, c[0], c[N + 1],
          c[2 * N + 2]);
  }
}

// Every activation and type of result: as the table's own float32 product, of the same sums and an identity, has it.
inline void test_tiles_activations() {
  Random random;
  constexpr int64_t M = 37, N = 45, K = 70;
  for (const KernelTable* kt : tables_with_tiles()) {
    std::vector<uint16_t> x(M * K), w(K * N);
    std::vector<float> identity(N * N, 0.0f), bias(N), sums(M * N);
    for (auto* v : {&x, &w})
      for (uint16_t& e : *v) e = reference_bfloat16(random.symmetric());
    for (int64_t n = 0; n < N; ++n) identity[size_t(n * N + n)] = 1, bias[size_t(n)] = float(random.symmetric());
    std::vector<int64_t> by_row(K), by_column(N);
    for (int64_t k = 0; k < K; ++k) by_row[size_t(k)] = k * N;
    for (int64_t n = 0; n < N; ++n) by_column[size_t(n)] = n;
    AlignedBuffer tiles(kt->packed_bytes(Panel::kTiles, K, N)), floats(kt->packed_bytes(Panel::kF32, N, N));
    kt->pack(Panel::kTiles, {w.data(), DType::kBF16, K, N, by_row.data(), by_column.data()}, 0, 2, tiles.data);
    kt->pack(Panel::kF32, {identity.data(), DType::kF32, N, N, by_row.data(), by_column.data()}, 0, kt->panel_count(Panel::kF32, N),
             floats.data);
    GemmArgs on_tiles{
        M,           N,           K, x.data(), DType::kBF16, K, tiles.data, Panel::kTiles, bias.data(), Activation::kNone,
        sums.data(), DType::kF32, N, nullptr};
    AlignedBuffer scratch(kt->gemm_scratch_bytes(on_tiles));
    on_tiles.scratch = scratch.data;
    on_tiles.act_a = 0.75f, on_tiles.act_b = 0.05f;
    kt->gemm(on_tiles);
    GemmArgs on_floats{M,       N,           N, sums.data(), DType::kF32, N, floats.data, Panel::kF32, nullptr, Activation::kNone,
                       nullptr, DType::kF32, N, nullptr};
    on_floats.act_a = on_tiles.act_a, on_floats.act_b = on_tiles.act_b;
    for (int act = 0; act < kNumActivations; ++act) {
      for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
        std::vector<char> got(M * N * item_size(type)), want(got.size());
        on_tiles.act = on_floats.act = Activation(act);
        on_tiles.c_dtype = on_floats.c_dtype = type;
        on_tiles.c = got.data(), on_floats.c = want.data();
        kt->gemm(on_tiles);
        kt->gemm(on_floats);
        int64_t wrong = 0;
        double worst = 0, there = 0;  // the largest relative difference, and the value that it is of
        // Compilers may contract the two to different FMAs, and what then differs in f32 may round to neighbours in 16 bits. Of
        // silu and gelu the exponent, below 40 here, may be rounded differently, twice in gelu's (a square and a product).
        const double exact = Activation(act) >= Activation::kSilu ? 80 * 0x1p-24 : 1e-6;
        const double near = type == DType::kF32 ? exact : type == DType::kBF16 ? 0x1p-7 : 0x1p-10;
        for (int64_t i = 0; i < M * N; ++i) {
          const double a = element(got.data(), type, i), b = element(want.data(), type, i);
          wrong += !(std::fabs(a - b) <= near * std::fabs(b));
          if (std::fabs(a - b) > worst * std::fabs(b)) worst = std::fabs(a - b) / std::fabs(b), there = b;
        }
        check(wrong == 0, "activation %d to type %d on tiles [%s]: %ld of %ld wrong, at most by %g of %g", act, int(type), kt->isa,
              long(wrong), long(M * N), worst, there);
      }
    }
    kt->end_of_call();
  }
}

// Sums that are rounded, as on every other table.
inline void test_tiles_round() {
  for (const KernelTable* kt : tables_with_tiles()) {
    set_kernels(kt);
    test_gemm_rounds();
  }
  set_kernels(nullptr);
}

inline void test_tiles_choice() {
  for (const KernelTable* kt : tables_with_tiles()) {
    auto panel = [&](DType t, Product p, int64_t M, int64_t N, int64_t K) { return kt->panel_for(t, p, {M, N, K}); };
    for (Product p : {Product::kBest, Product::kTiles}) {
      check(panel(DType::kBF16, p, 16, 16, 32) == Panel::kTiles, "16 x 16 x 32 is worth a tile [%s]", kt->isa);
      const Panel pairs = panel(DType::kBF16, Product::kDots, 16, 16, 32);
      check(pairs != Panel::kTiles, "dots are not tiles [%s]", kt->isa);
      check(panel(DType::kBF16, p, 15, 16, 32) == pairs && panel(DType::kBF16, p, 16, 15, 32) == pairs &&
                panel(DType::kBF16, p, 16, 16, 31) == pairs,
            "less than a tile is for other panels [%s]", kt->isa);
      check(panel(DType::kF16, p, 64, 64, 64) == Panel::kF32 && panel(DType::kF32, p, 64, 64, 64) == Panel::kF32,
            "only bfloat16 is for tiles [%s]", kt->isa);
    }
    check(panel(DType::kBF16, Product::kWidened, 64, 64, 64) == Panel::kF32, "widened products are of f32 [%s]", kt->isa);
  }
}

// Several products of a call, one configuration; none without a product on tiles.
inline void test_tiles_are_configured_once() {
  for (int i = 0; i < models().count; ++i) {
    const Model& model = *models().all[i];
    const KernelTable& kt = model.table;
    const int64_t before = *model.configured;
    auto multiply = [&](Panel panel) {
      alignas(64) static uint16_t x[64 * 64], w[64 * 64];
      static float c[64 * 64];
      int64_t ko[64], no[64];
      for (int64_t k = 0; k < 64; ++k) ko[k] = k * 64, no[k] = k;
      AlignedBuffer packed(kt.packed_bytes(panel, 64, 64)), scratch(64 * 64 * 4);
      kt.pack(panel, {w, DType::kBF16, 64, 64, ko, no}, 0, kt.panel_count(panel, 64), packed.data);
      kt.gemm({40, 64, 64, x, DType::kBF16, 64, packed.data, panel, nullptr, Activation::kNone, c, DType::kF32, 64, scratch.data});
    };
    multiply(Panel::kF32);
    check(*model.configured == before && !model.holds_tiles(), "a product without tiles configures them [%s]", kt.isa);
    kt.end_of_call();
    for (int call = 1; call <= 2; ++call) {
      for (int product = 0; product < 3; ++product) multiply(Panel::kTiles);
      check(*model.configured == before + call && model.holds_tiles(), "call %d: %ld configurations [%s]", call,
            long(*model.configured - before), kt.isa);
      kt.end_of_call();
      check(*model.released == *model.configured && !model.holds_tiles(), "call %d: tiles are not released [%s]", call, kt.isa);
    }
  }
}

inline void test_tiles() {
  test_tiles_agree();
  test_tiles_denormals();
  test_tiles_activations();
  test_tiles_round();
  test_tiles_choice();
  test_tiles_are_configured_once();
}

}  // namespace kitsune::cpu::test
