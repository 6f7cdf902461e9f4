// Programs with sums of batches, and with sums that loops make part by part.
#pragma once

#include "structured_programs.h"

namespace kitsune::cpu::test {

// Of x [outer, rows, inner, M] and y [inner, outer, rows, N], whose batches are (outer, inner): x^T y for each batch, [inner,
// outer, M, N]; the largest x of each column, [outer, inner, M]; and the sum of all y, [N].
inline Program batch_sums(DType t, int64_t outer, int64_t inner, int64_t rows, int64_t tile_rows, int64_t workers) {
  constexpr int64_t M = 5, N = 40;
  const int64_t batches = outer * inner;
  Program p = program({outer, inner, rows}, tile_rows, {{t, batches * rows * M}, {t, batches * rows * N}},
                      {{F32, batches * M * N}, {t, batches * M}, {t, N}}, {});
  p.batch_axes = 2;
  p.workers = workers;
  p.sinks = {{Reduction::kSum, t == F64 ? F64 : F32, M * N, 0, {M * N, outer * M * N}},
             {Reduction::kMax, t, M, 1, {inner * M, M}},
             {Reduction::kSum, t, N, 2}};
  if (t == F64) p.outputs[0].dtype = F64;
  Operand x{moving(Space::kIn, 0, t, {}, {rows * inner * M, M}), inner * M, {1}};
  Operand y{moving(Space::kIn, 1, t, {}, {rows * N, outer * rows * N}), N, {1}};
  Operand xs = x, ys = y;
  xs.strides = ys.strides = {0};
  p.stages[0].body = {AccumulateMatmul{0, 1, 1, M, N, xs, ys}, Accumulate{1, {M}, {}, x}, Accumulate{2, {N}, {}, y}};
  return p;
}

// The same sums of x [batches, rows, M] and y [batches, rows, N], where a loop makes `part` rows of x^T y at a time, and one `part`
// columns of y^T x; what is left of them stands behind. And the sums of x, `part` at a time, each in two places.
inline Program sums_in_parts(DType t, int64_t batches, int64_t rows, int64_t tile_rows, int64_t M, int64_t part) {
  constexpr int64_t N = 35;
  const int64_t whole = M / part, rest = M % part;
  Program p = program({batches, rows}, tile_rows, {{t, batches * rows * M}, {t, batches * rows * N}},
                      {{F32, batches * M * N}, {F32, batches * M * N}, {t, batches * 2 * M}}, {});
  p.batch_axes = 1;
  p.workers = 2;
  p.sinks = {{Reduction::kSum, F32, M * N, 0, {M * N}},
             {Reduction::kSum, F32, M * N, 1, {M * N}},
             {Reduction::kSum, t, 2 * M, 2, {2 * M}}};
  Operand x{moving(Space::kIn, 0, t, {part}, {rows * M}), M, {0}}, y{moving(Space::kIn, 1, t, {}, {rows * N}), N, {0}};
  Operand pair = x;
  pair.strides = {0, 1};
  auto body = [&](int64_t m, const Sums& of_rows, const Sums& of_columns, const Sums& of_values) {
    AccumulateMatmul down{0, 1, 1, m, N, x, y}, across{1, 1, 1, N, m, y, x};
    down.sums = of_rows, down.matrices = {M, part, N};
    across.sums = of_columns, across.matrices = {N, N, M};
    return std::vector<Instruction>{down, across, Accumulate{2, {2, m}, {}, pair, of_values, {M, 1}}};
  };
  auto& code = p.stages[0].body;
  code = body(part, {0, {part * N}}, {0, {part * N}}, {0, {part}});
  code.insert(code.begin(), Loop{whole, false, std::nullopt, 3});
  if (rest > 0) {
    x.ref.loop_strides = pair.ref.loop_strides = {};
    x.ref.offset = pair.ref.offset = whole * part;
    for (const Instruction& i : body(rest, {whole * part * N}, {whole * part * N}, {whole * part})) code.push_back(i);
  }
  return p;
}

}  // namespace kitsune::cpu::test
