// Programs with loops, batches, indexed rows and products that are packed where they are used.
#pragma once

#include "programs.h"

namespace kitsune::cpu::test {

inline Ref moving(Space space, int64_t index, DType t, std::vector<int64_t> loops, std::vector<int64_t> batches = {}) {
  return {space, index, 0, t, std::move(loops), std::move(batches)};
}

inline Micro load(int64_t dst, int64_t a, DType t = F32) { return micro(Opcode::op_load, t, dst, a); }
inline Micro store(int64_t a, int64_t b, DType t = F32) { return micro(Opcode::op_store, t, 0, a, b); }

// out[h, g, r, :] = sum over blocks i of x[h, g, r, :] W[h, i] (i + 1): W depends on the first batch axis, and is packed for each
// tile and block; the sum is carried in scratch.
inline Program batched_loop(DType t, int64_t heads, int64_t groups, int64_t rows, int64_t tile_rows, bool reverse) {
  constexpr int64_t K = 5, N = 19, blocks = 3;
  Program p = program({heads, groups, rows}, tile_rows, {{t, heads * groups * rows * K}, {t, heads * blocks * K * N}},
                      {{F32, heads * groups * rows * N}}, {}, 2 * tile_rows * N * 4);
  p.batch_axes = 2;
  Prep w{PrepKind::kWeight, moving(Space::kIn, 1, t, {K * N}, {blocks * K * N, 0}), t, {}, {}, {K}, {N}, {N}, {1}};
  w.local = true;
  p.preps = {w};
  Operand x{moving(Space::kIn, 0, t, {}, {groups * rows * K, rows * K}), K, {0}};
  Operand out{moving(Space::kOut, 0, F32, {}, {groups * rows * N, rows * N}), N, {1}};
  Operand sum = operand(Space::kScratch, 0, F32, 0, N, {1}), part = operand(Space::kScratch, 0, F32, tile_rows * N, N, {1});
  Operand result = operand(Space::kScratch, 0, F32, tile_rows * N, N, {0});
  Vector zero{{N}, true, {}, {sum}, {micro(Opcode::op_const, F32, 0, 0, 0, 0, {0}), store(0, 0)}};
  Vector add{{N}, false, {sum, part}, {sum}, {load(0, 0), load(1, 1), micro(Opcode::op_index, F32, 2, -1, 1, 1000)}};
  add.code.push_back(micro(Opcode::op_mul, F32, 3, 1, 2));
  add.code.push_back(micro(Opcode::op_add, F32, 4, 3, 1));
  add.code.push_back(micro(Opcode::op_add, F32, 5, 4, 0));
  add.code.push_back(store(0, 5));
  Vector write{{N}, true, {sum}, {out}, {load(0, 0), store(0, 0)}};
  p.stages[0].body = {zero, Loop{blocks, reverse, std::nullopt, 3}, Pack{0}, Matmul{x, 1, 1, 0, -1, Activation::kNone, result}, add,
                      write};
  return p;
}

// out[r, 2 o + c] = sum over blocks i of x[r, 3 i : 3 i + 3] . w[3 i : 3 i + 3, 2 o + c], by two nested loops; w doubled on one
// row.
inline Program nested_loops(int64_t rows, int64_t tile_rows) {
  constexpr int64_t K = 12, N = 8, B = 3, C = 2;
  Program p = program({rows}, tile_rows, {{F32, rows * K}, {F32, K * N}}, {{F32, rows * N}}, {}, (2 * tile_rows * C + B * C) * 4);
  Operand sum = operand(Space::kScratch, 0, F32, 0, C, {1}), part = operand(Space::kScratch, 0, F32, tile_rows * C, C, {1});
  Operand doubled = operand(Space::kScratch, 0, F32, 2 * tile_rows * C, 0, {C, 1});
  Prep w{PrepKind::kWeight, {Space::kScratch, 0, 2 * tile_rows * C, F32}, F32, {}, {}, {B}, {C}, {C}, {1}};
  w.local = true;
  p.preps = {w};
  Operand source{moving(Space::kIn, 1, F32, {C, B * N}), 0, {N, 1}}, x{moving(Space::kIn, 0, F32, {0, B}), K, {0}};
  Operand out{moving(Space::kOut, 0, F32, {C}), N, {1}}, product = part;
  product.strides = {0};
  Vector zero{{C}, true, {}, {sum}, {micro(Opcode::op_const, F32, 0, 0, 0, 0, {0}), store(0, 0)}};
  Vector twice{{B, C}, false, {source}, {doubled}, {load(0, 0), micro(Opcode::op_add, F32, 1, 0, 0), store(0, 1)}};
  Vector add{{C}, true, {sum, part}, {sum}, {load(0, 0), load(1, 1), micro(Opcode::op_add, F32, 2, 0, 1), store(0, 2)}};
  Vector write{{C}, false, {sum}, {out}, {load(0, 0), store(0, 0)}};
  p.stages[0].body = {Loop{N / C, true, std::nullopt, 8},
                      zero,
                      Loop{K / B, false, std::nullopt, 5},
                      Stationary{1},
                      twice,
                      Pack{0},
                      Matmul{x, 1, 1, 0, -1, Activation::kNone, product},
                      add,
                      write};
  return p;
}

// Rows of x folded into `count` rows by indices from -2 to count + 1, which a gather then reads out of a table.
inline Program segments(Reduction how, DType t, DType index, int64_t rows, int64_t tile_rows, int64_t count, OutOfRange mode) {
  constexpr int64_t S = 2, M = 3, N = 7;
  Program p = program({rows}, tile_rows, {{t, rows * S * M * N}, {index, rows * S}, {t, count * M * N}},
                      {{t, count * M * N}, {t, rows * S * M * N}}, {});
  p.sinks = {{how, t, count * M * N, 0}};
  Operand i = operand(Space::kIn, 1, index, 0, S, {1}), x = operand(Space::kIn, 0, t, 0, S * M * N, {M * N, N, 1});
  Operand table = operand(Space::kIn, 2, t, 0, N, {count * N, 1});  // [M, count, N]
  Operand out = operand(Space::kOut, 1, t, 0, S * M * N, {M * N, 1, M});
  p.stages[0].body = {AccumulateAt{0, count, {S}, {M, N}, i, x}, Gather{table, count, mode, {-1}, {S}, {M, N}, i, out}};
  return p;
}

// Rows of x in an order of their own: folded into `count` rows by indices from -4 to 4, which are sorted in that order, and stored
// again. `straight`: the sums read x itself, not the tile.
inline Program ordered_segments(Reduction how, DType t, int64_t rows, int64_t tile_rows, int64_t count, bool straight,
                                DType result) {
  constexpr int64_t N = 19;
  const int64_t ids = tile_rows * N * 2;  // behind x, whatever its type
  Program p = program({rows}, tile_rows, {{t, rows * N}, {I32, rows}, {I32, rows}}, {{result, count * N}, {t, rows * N}}, {},
                      (ids + tile_rows) * 4);
  p.order = 2;
  p.workers = 3;
  p.sinks = {{how, t, count * N, 0}};
  Operand x = operand(Space::kScratch, 0, t, 0, N, {1}), index = operand(Space::kScratch, 0, I32, ids, 1, {});
  Operand source = straight ? operand(Space::kIn, 0, t, 0, N, {1}) : x;
  p.stages[0].body = {
      StridedLoad{{{Space::kIn, 0, 0, t}, {N}, {N}, {1}, x}}, StridedLoad{{{Space::kIn, 1, 0, I32}, {1}, {}, {}, index}},
      AccumulateAt{0, count, {}, {N}, index, source, true, straight}, StridedStore{{{Space::kOut, 1, 0, t}, {N}, {N}, {1}, x}}};
  return p;
}

// Sums of rows of x, scaled by what the largest rows of a tile are, in an order of the stream in which the indices are sorted.
inline Program online_sums(DType t, int64_t rows, int64_t tile_rows, int64_t count, int64_t heads, int64_t inner, bool finite) {
  const int64_t width = heads * inner, tops = tile_rows * width * 2, x_at = tops * 2, ids = x_at * 2;
  Program p = program({rows}, tile_rows, {{t, rows * width}, {I32, rows}, {I32, rows}, {t, rows * heads}}, {{F32, count * width}},
                      {}, (ids + tile_rows) * 4);
  p.order = 2;
  p.workers = 3;
  p.sinks = {{Reduction::kSum, F32, count * width, 0}};
  Operand x = operand(Space::kScratch, 0, t, x_at, width, {1}), index = operand(Space::kScratch, 0, I32, ids, 1, {});
  Operand s = operand(Space::kScratch, 0, t, 0, heads, {1}), top = operand(Space::kScratch, 0, t, tops, heads, {1});
  AccumulateScaled sum{{0, count, {}, {heads, inner}, index, operand(Space::kScratch, 0, t, x_at, width, {inner, 1}), true, false},
                       top};
  sum.heads = heads, sum.finite = finite;
  p.stages[0].body = {StridedLoad{{{Space::kIn, 0, 0, t}, {width}, {width}, {1}, x}},
                      StridedLoad{{{Space::kIn, 1, 0, I32}, {1}, {}, {}, index}},
                      StridedLoad{{{Space::kIn, 3, 0, t}, {heads}, {heads}, {1}, s}}, RunMax{count, {heads}, index, s, top}, sum};
  return p;
}

// Sums of rows of a table, chosen by indices from -4 to 4 and multiplied by `factors` numbers each, in an order of the stream in
// which the indices of the sums are sorted. `heads`: as of online_sums, whose tops are of the first numbers; 0: plain sums.
inline Program taken_sums(DType t, int64_t rows, int64_t tile_rows, int64_t count, int64_t table_rows, int64_t width,
                          int64_t factors, int64_t heads, OutOfRange mode) {
  const int64_t numbers = std::max<int64_t>(1, std::max(factors, heads)), tops = tile_rows * numbers, ids = 2 * tops;
  Program p = program({rows}, tile_rows, {{F32, rows * numbers}, {I32, rows}, {I32, rows}, {t, table_rows * width}, {I32, rows}},
                      {{F32, count * width}}, {}, (ids + 2 * tile_rows) * 4);
  p.order = 2;
  p.workers = 3;
  p.sinks = {{Reduction::kSum, F32, count * width, 0}};
  Operand index = operand(Space::kScratch, 0, I32, ids, 1, {}), taken = operand(Space::kScratch, 0, I32, ids + tile_rows, 1, {});
  Operand factor = operand(Space::kScratch, 0, F32, 0, numbers, {1}), top = operand(Space::kScratch, 0, F32, tops, numbers, {1});
  AccumulateTaken sum{
      {{0, count, {}, {width}, index, operand(Space::kIn, 3, t, 0, width, {1}), true, false}, heads > 0 ? top : factor},
      table_rows,
      mode,
      {-1},
      taken,
      factor,
      factors};
  sum.heads = heads, sum.finite = false;
  auto load = [](int64_t array, DType type, const Operand& to, std::vector<int64_t> extents, std::vector<int64_t> strides) {
    return StridedLoad{{{Space::kIn, array, 0, type}, {extents.empty() ? 1 : extents[0]}, extents, strides, to}};
  };
  p.stages[0].body = {load(0, F32, factor, {numbers}, {1}), load(1, I32, index, {}, {}), load(4, I32, taken, {}, {})};
  if (heads > 0) p.stages[0].body.push_back(RunMax{count, {numbers}, index, factor, top});
  p.stages[0].body.push_back(sum);
  return p;
}

// Products by heads of rows of a table, chosen by indices from -4 to 4, with rows of another one (`both`) or of the tile.
inline Program taken_dots(DType t, DType out, int64_t rows, int64_t tile_rows, int64_t table_rows, int64_t heads, int64_t inner,
                          bool both, OutOfRange mode) {
  const int64_t width = heads * inner;
  Program p = program({rows}, tile_rows, {{t, rows * width}, {I32, rows}, {DType::kI8, rows}, {t, table_rows * width}},
                      {{out, rows * (heads + 1)}}, {});
  Operand table = operand(Space::kIn, 3, t, 0, width, {1}), tile = operand(Space::kIn, 0, t, 0, width, {1});
  Operand first = operand(Space::kIn, 1, I32, 0, 1, {}), second = operand(Space::kIn, 2, DType::kI8, 0, 1, {});
  p.stages[0].body = {TakenDot{heads,
                               inner,
                               {table, table_rows, mode, {-1}, first},
                               both ? Rows{table, table_rows, OutOfRange::kClip, {0}, second} : Rows{tile, 0, mode, {0}, first},
                               operand(Space::kOut, 0, out, 1, heads + 1, {1})}};
  return p;
}

// Exponentials of rows of `heads` times n elements, of which a number for each head is taken off, and their sums.
inline Program exponentials(DType t, DType result, int64_t rows, int64_t tile_rows, int64_t heads, int64_t n, bool summed) {
  const int64_t width = heads * n;
  Program p =
      program({rows}, tile_rows, {{t, rows * width}, {F32, rows * heads}}, {{result, rows * width}, {F32, rows * heads}}, {});
  ExpRows e{{heads},
            n,
            -0.375,
            operand(Space::kIn, 0, t, 0, width, {n, 1}),
            operand(Space::kIn, 1, F32, 0, heads, {1}),
            operand(Space::kOut, 0, result, 0, width, {n, 1}),
            {operand(Space::kOut, 1, F32, 0, heads, {1})}};
  if (!summed) {
    e.sums = {};
    p.outputs.pop_back();
  }
  p.stages[0].body = {e};
  return p;
}

// Elements of a row that indices from -4 to 4 name, and the sums of elements put back by them.
inline Program selection(DType t, int64_t rows, int64_t tile_rows, int64_t count, int64_t indices, int64_t inner, OutOfRange mode) {
  constexpr int64_t O = 2;
  const int64_t x = O * count * inner, y = O * indices * inner;
  Program p = program({rows}, tile_rows, {{t, rows * x}, {DType::kI8, indices}, {t, rows * y}}, {{t, rows * y}, {t, rows * x}}, {});
  Operand index = operand(Space::kIn, 1, DType::kI8, 0, 0, {1});
  Operand from = operand(Space::kIn, 0, t, 0, x, {count * inner, inner}),
          out = operand(Space::kOut, 0, t, 0, y, {indices * inner, inner});
  Operand more = operand(Space::kIn, 2, t, 0, y, {indices * inner, inner}),
          put = operand(Space::kOut, 1, t, 0, x, {count * inner, inner});
  p.stages[0].body = {Take{{count, indices, inner, {O}, index, from, out}, mode, {-1}},
                      Put{{count, indices, inner, {O}, index, more, put}}};
  return p;
}

// A product for each row and batch: [M, K] by [N, K], of which y lies transposed.
inline Program row_products(DType t, int64_t rows, int64_t tile_rows) {
  constexpr int64_t B = 2, M = 5, N = 6, K = 9;
  Program p = program({rows}, tile_rows, {{t, rows * B * M * K}, {t, rows * B * N * K}}, {{t, rows * B * M * N}}, {});
  Operand x = operand(Space::kIn, 0, t, 0, B * M * K, {M * K, K}), y = operand(Space::kIn, 1, t, 0, B * N * K, {N * K, 1, N});
  p.stages[0].body = {Dot{B, M, N, K, x, y, operand(Space::kOut, 0, t, 0, B * M * N, {M * N, N})}};
  return p;
}

// [M, K] by [N, K] for each row, K contiguous in both; or [M, K] by itself.
inline Program row_products_along(DType t, DType result, int64_t rows, int64_t m, int64_t n, int64_t k, bool itself) {
  Program p = program({rows}, 4, {{t, rows * m * k}, {t, rows * n * k}}, {{result, rows * m * n}}, {});
  Operand x = operand(Space::kIn, 0, t, 0, m * k, {0, k});
  Operand y = itself ? operand(Space::kIn, 0, t, 0, m * k, {0, k, 1}) : operand(Space::kIn, 1, t, 0, n * k, {0, k, 1});
  p.stages[0].body = {Dot{1, m, n, k, x, y, operand(Space::kOut, 0, result, 0, m * n, {0, n})}};
  return p;
}

}  // namespace kitsune::cpu::test
