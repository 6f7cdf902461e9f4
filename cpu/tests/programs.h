// Programs of every kind of instruction, in random layouts: what test_executor runs against the reference and test_fuzz mutates.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "executor_check.h"

namespace kitsune::cpu::test {

constexpr DType F32 = DType::kF32, F64 = DType::kF64, BF16 = DType::kBF16, I32 = DType::kI32, BOOL = DType::kBool;

// dense -> relu -> (multicast: the next stage, and a skip) -> dense -> add + row sum + column-sum sink.
inline Program residual_pipeline(int64_t rows, int64_t tile_rows, int64_t depth) {
  constexpr int64_t K = 12, N = 20;
  Program p{};
  p.name = "residual";
  p.axes = {rows};
  p.tile_rows = tile_rows;
  p.inputs = {{F32, rows * K}, {F32, K * N}, {F32, N}, {F32, N * N}};
  p.outputs = {{F32, rows * N}, {F32, rows}, {F32, N}};
  p.preps = {weight(1, F32, K, N), dense(2, F32, F32, {N}, {1}), weight(3, F32, N, N)};
  p.sinks = {{Reduction::kSum, F32, N, 2}};
  p.queues = {{0, {1, 2}, depth, tile_rows * N * 4}, {1, {2}, depth + 1, tile_rows * N * 4}};
  auto queue = [](int64_t q) { return operand(Space::kQueue, q, F32, 0, N, {1}); };
  auto scratch = operand(Space::kScratch, 0, F32, 0, N, {1});
  p.stages.push_back(
      {"first",
       0,
       {Matmul{operand(Space::kIn, 0, F32, 0, K, {0}), 1, 1, 0, 1, Activation::kRelu, operand(Space::kQueue, 0, F32, 0, N, {0})}}});
  p.stages.push_back({"second",
                      0,
                      {Matmul{operand(Space::kQueue, 0, F32, 0, N, {0}), 1, 1, 2, -1, Activation::kNone,
                              operand(Space::kQueue, 1, F32, 0, N, {0})}}});
  Vector add{{N}, true, {queue(0), queue(1)}, {operand(Space::kOut, 0, F32, 0, N, {1}), scratch}, {}};
  add.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_add, F32, 2, 0, 1),
              micro(Opcode::op_store, F32, 0, 0, 2), micro(Opcode::op_store, F32, 0, 1, 2)};
  p.stages.push_back(
      {"third",
       tile_rows * N * 4,
       {add, Reduce{Reduction::kSum, {}, {N}, scratch, operand(Space::kOut, 1, F32, 0, 1, {})}, Accumulate{0, {N}, {}, scratch}}});
  return p;
}

// The same, then a phase that reads the row sums and the sink.
inline Call residual_call(int64_t rows, int64_t tile_rows, int64_t depth) {
  Call c = one_part(residual_pipeline(rows, tile_rows, depth));
  Vector after{{},
               false,
               {operand(Space::kIn, 0, F32, 0, 1, {}), operand(Space::kIn, 1, F32, 3, 0, {})},
               {operand(Space::kOut, 0, F32, 0, 1, {})},
               {}};
  after.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_sub, F32, 0, 0, 1),
                micro(Opcode::op_store, F32, 0, 0, 0)};
  c.arrays.push_back({F32, rows});
  ++c.results;
  c.parts.push_back({1, {5, 6}, {7}, program({rows}, tile_rows, {c.arrays[5], c.arrays[6]}, {c.arrays[7]}, {after})});
  return c;
}

// Phases that each subtract two arrays of one length: operands, or what random phases before made; the last ones make the results.
// `reach`: how many phases ago an array may have been made. `together`: one part for each length is a phase.
inline Call random_phases(std::mt19937& rng, int64_t phases, int64_t reach, std::vector<int64_t> lengths, bool together = false) {
  Call c;
  c.name = "phases";
  for (int64_t n : lengths) c.arrays.push_back({F32, n});
  c.operands = static_cast<int64_t>(lengths.size());
  auto any = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint32_t>(n)); };
  const int64_t kinds = c.operands;
  std::vector<std::vector<int64_t>> made(lengths.size());  // by length
  for (int64_t k = 0; k < kinds; ++k) made[static_cast<size_t>(k)] = {k};
  c.results = std::min(kinds, phases);
  for (int64_t p = 0; p < phases; ++p) {
    const size_t kind = static_cast<size_t>(p % kinds);
    std::vector<int64_t>& known = made[kind];
    auto read = [&] {
      return known[known.size() - 1 - static_cast<size_t>(any(std::min(reach, static_cast<int64_t>(known.size()))))];
    };
    const bool last = p + c.results >= phases;
    // Results stand behind the operands, and inner arrays behind those.
    const int64_t number = last ? kinds + (p + c.results - phases) : kinds + c.results + p;
    const Array a{F32, lengths[kind]};
    Vector sub{{},
               false,
               {operand(Space::kIn, 0, F32, 0, 1, {}), operand(Space::kIn, 1, F32, 0, 1, {})},
               {operand(Space::kOut, 0, F32, 0, 1, {})},
               {}};
    sub.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_sub, F32, 0, 0, 1),
                micro(Opcode::op_store, F32, 0, 0, 0)};
    c.parts.push_back({together ? p / kinds : p, {read(), read()}, {number}, program({a.elements}, 16, {a, a}, {a}, {sub})});
    known.push_back(number);
  }
  c.arrays.resize(static_cast<size_t>(kinds + phases));
  for (const Part& part : c.parts) c.arrays[static_cast<size_t>(part.writes[0])] = part.program.outputs[0];
  return c;
}

// A random layout of a value over (rows, *extents): dense, padded, transposed, reversed or broadcast.
inline Operand random_layout(std::mt19937& rng, Space space, int64_t index, DType t, int64_t rows,
                             const std::vector<int64_t>& extents, bool write, int64_t* elements) {
  std::vector<int64_t> all = extents;
  all.insert(all.begin(), rows);
  std::vector<size_t> order(all.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  int kind = static_cast<int>(rng() % 5);
  if (kind == 1) std::shuffle(order.begin(), order.end(), rng);
  std::vector<int64_t> strides(all.size(), 0);
  int64_t step = kind == 2 ? 3 : 1, offset = static_cast<int64_t>(rng() % 3);
  for (size_t i = order.size(); i-- > 0;) {
    size_t d = order[i];
    if (kind == 3 && !write && rng() % 2) continue;  // broadcast
    strides[d] = step;
    if (kind == 4 && rng() % 2) {
      offset += step * (all[d] - 1);
      strides[d] = -step;
    }
    step *= all[d];
    if (kind == 2) step += static_cast<int64_t>(rng() % 3);
  }
  *elements = 4;
  int64_t high = offset;
  for (size_t d = 0; d < all.size(); ++d) high += std::max<int64_t>(0, strides[d] * (all[d] - 1));
  *elements = std::max(*elements, high + 1);
  return operand(space, index, t, offset, strides[0], {strides.begin() + 1, strides.end()});
}

inline std::vector<int64_t> random_extents(std::mt19937& rng, int64_t least) {
  std::vector<int64_t> extents;
  static constexpr int64_t kSizes[] = {1, 2, 3, 5, 16, 33, 70};
  for (int64_t d = static_cast<int64_t>(rng() % 3) + least; d > 0; --d) extents.push_back(kSizes[rng() % 7]);
  while (product(extents) > 350) extents.pop_back();  // the reference, under a sanitizer, sets the size
  return extents;
}

inline Program random_vector(unsigned seed) {
  constexpr DType kTypes[] = {F32, BF16, F64, I32};
  std::mt19937 rng(seed);
  int64_t rows = 1 + static_cast<int64_t>(rng() % 40), tile_rows = 1 + static_cast<int64_t>(rng() % 17), n;
  std::vector<int64_t> extents = random_extents(rng, 0);
  Program p = program({rows}, tile_rows, {}, {}, {});
  Vector v{extents, false, {}, {}, {}};
  for (int64_t i = 0; i < 3; ++i) {
    DType t = kTypes[rng() % 4];
    v.loads.push_back(random_layout(rng, Space::kIn, i, t, rows, extents, false, &n));
    p.inputs.push_back({t, n});
    v.code.push_back(micro(Opcode::op_load, compute_type(t), 10 + i, i));
    v.code.push_back(convert(F32, compute_type(t), i, 10 + i));
  }
  v.code.push_back(micro(Opcode::op_index, I32, 3, static_cast<int64_t>(rng() % (extents.size() + 1)), 1 + rng() % 2, 5));
  v.code.push_back(convert(F32, I32, 3, 3));
  v.code.push_back(micro(Opcode::op_const, F32, 4, 0, 0, 0, {0.25}));
  v.code.push_back(micro(Opcode::op_mul, F32, 1, 1, 4));
  v.code.push_back(micro(Opcode::op_add, F32, 5, 0, 1));
  v.code.push_back(micro(Opcode::op_max, F32, 6, 5, 2));
  v.code.push_back(micro(Opcode::op_lt, F32, 7, 0, 2));
  v.code.push_back(micro(Opcode::op_select, F32, 8, 7, 6, 3));
  v.code.push_back(micro(Opcode::op_sub, F32, 8, 8, 1));
  v.stores.push_back(random_layout(rng, Space::kOut, 0, F32, rows, extents, true, &n));
  p.outputs.push_back({F32, n});
  v.code.push_back(micro(Opcode::op_store, F32, 0, 0, 8));
  v.stores.push_back(random_layout(rng, Space::kOut, 1, BOOL, rows, extents, true, &n));
  p.outputs.push_back({BOOL, n});
  v.code.push_back(micro(Opcode::op_store, F32, 0, 1, 7));
  v.stores.push_back(random_layout(rng, Space::kOut, 2, BF16, rows, extents, true, &n));
  p.outputs.push_back({BF16, n});
  v.code.push_back(micro(Opcode::op_store, F32, 0, 2, 5));
  p.stages[0].body.push_back(v);
  return p;
}

// Updates of scratch in place: what is read after a write must be the new value, and what is read before it the old one.
inline Program in_place() {
  constexpr int64_t N = 50;
  auto scratch = operand(Space::kScratch, 0, F32, 0, N, {1}), shifted = operand(Space::kScratch, 0, F32, 400, N, {1});
  auto in = operand(Space::kIn, 0, F32, 0, N, {1}), out = operand(Space::kOut, 0, F32, 0, N, {1});
  auto load = [](int64_t dst, int64_t a) { return micro(Opcode::op_load, F32, dst, a); };
  auto store = [](int64_t a, int64_t b) { return micro(Opcode::op_store, F32, 0, a, b); };
  Vector fill{{N}, true, {in}, {scratch, shifted}, {load(0, 0), store(0, 0), micro(Opcode::op_neg, F32, 1, 0), store(1, 1)}};
  Vector update{{N}, true, {scratch}, {scratch}, {load(0, 0), micro(Opcode::op_add, F32, 1, 0, 0), store(0, 1)}};
  Vector keep_old{
      {N},
      true,
      {scratch, shifted},
      {scratch, out},
      {load(0, 0), load(2, 1), micro(Opcode::op_mul, F32, 1, 0, 2), store(0, 1), micro(Opcode::op_add, F32, 3, 0, 1), store(1, 3)}};
  Vector swap{{N},
              true,
              {scratch, shifted},
              {scratch, shifted, operand(Space::kOut, 1, F32, 0, N, {1})},
              {load(0, 0), load(1, 1), store(0, 1), store(1, 0), micro(Opcode::op_sub, F32, 2, 0, 1), store(2, 2)}};
  Vector result{{N}, true, {scratch}, {operand(Space::kOut, 2, F32, 0, N, {1})}, {load(0, 0), store(0, 0)}};
  Array a{F32, 13 * N};
  return program({13}, 8, {a}, {a, a, a}, {fill, update, keep_old, swap, result}, 800 * 4);
}

inline Program random_copy(unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<int64_t> axes;
  for (int d = static_cast<int>(rng() % 3); d >= 0; --d) axes.push_back(1 + static_cast<int64_t>(rng() % 6));
  std::vector<int64_t> extents = random_extents(rng, 0), all = axes;
  all.insert(all.end(), extents.begin(), extents.end());
  std::vector<size_t> order(all.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  if (rng() % 2) std::shuffle(order.begin(), order.end(), rng);
  std::vector<int64_t> strides(all.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0; step *= all[order[i]]) strides[order[i]] = step;
  DType t = rng() % 2 ? F32 : BF16;
  int64_t row = product(extents), tile_rows = 1 + static_cast<int64_t>(rng() % 9);
  std::vector<int64_t> dense_strides(extents.size());
  int64_t inner = 1;
  for (size_t d = extents.size(); d-- > 0; inner *= extents[d]) dense_strides[d] = inner;
  std::vector<int64_t> axis_strides(strides.begin(), strides.begin() + static_cast<std::ptrdiff_t>(axes.size()));
  std::vector<int64_t> array_strides(strides.begin() + static_cast<std::ptrdiff_t>(axes.size()), strides.end());
  auto tile = operand(Space::kScratch, 0, t, 1, row, dense_strides);
  StridedLoad g{{{Space::kIn, 0, 0, t}, axis_strides, extents, array_strides, tile}};
  StridedStore back{{{Space::kOut, 0, 0, t}, axis_strides, extents, array_strides, tile}};
  StridedStore flat{{{Space::kOut, 1, 0, t}, {}, extents, dense_strides, tile}};
  int64_t stride = row;
  for (size_t j = axes.size(); j-- > 0; stride *= axes[j]) flat.axis_strides.insert(flat.axis_strides.begin(), stride);
  Array a{t, step};
  return program(axes, tile_rows, {a}, {a, a}, {g, back, flat}, (tile_rows * row + 1) * 4);
}

inline Program matmul(DType t, int64_t n, int64_t batch, Product product = Product::kBest, Activation act = Activation::kRelu) {
  constexpr int64_t R = 19, K = 13, M = 2;
  DType bias = t == F64 ? F64 : F32;
  Program p = program({R}, 8, {{t, R * M * batch * K}, {t, batch * K * n}, {t, n}}, {{t, R * M * batch * n}}, {});
  // The weight is stored as [k][batch][n]; its columns are two extents, the last one reversed.
  int64_t outer = n % 5 == 0 ? 5 : 1, last = n / outer;
  p.preps = {
      {PrepKind::kWeight, {Space::kIn, 1, last - 1, t}, t, {batch}, {n}, {K}, {batch * n}, {outer, last}, {last, -1}, product},
      dense(2, t, bias, {n}, {1})};
  p.stages[0].body = {Matmul{operand(Space::kIn, 0, t, 0, batch * K, {K}), M, batch, 0, 1, n % 2 ? act : Activation::kNone,
                             operand(Space::kOut, 0, t, 0, batch * n, {n})}};
  if (n % 2) {
    const float* parameters = usual_parameters(act);
    std::get<Matmul>(p.stages[0].body[0]).parameters.assign(parameters, parameters + kActivationParameters[static_cast<int>(act)]);
  }
  return p;
}

// y = relu(x a + bias + x b), of which the second product adds to what the first has stored.
inline Program sum_of_products(int64_t n, Space space) {
  constexpr int64_t R = 29, K = 13;
  Program p = program({R}, 8, {{F32, R * K}, {F32, K * n}, {F32, K * n}, {F32, n}}, {{F32, R * n}}, {}, 8 * n * 4);
  p.preps = {weight(1, F32, K, n), weight(2, F32, K, n), dense(3, F32, F32, {n}, {1})};
  const Operand x = operand(Space::kIn, 0, F32, 0, K, {0}), y = operand(space, 0, F32, 0, n, {0});
  Matmul second{x, 1, 1, 1, -1, Activation::kRelu, y};
  second.adds = true;
  p.stages[0].body = {Matmul{x, 1, 1, 0, 2, Activation::kNone, y}, second};
  if (space == Space::kScratch) {
    Vector out{{n}, false, {operand(space, 0, F32, 0, n, {1})}, {operand(Space::kOut, 0, F32, 0, n, {1})}, {}};
    out.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_store, F32, 0, 0, 0)};
    p.stages[0].body.push_back(out);
  }
  return p;
}

// `again`: the sums of each tile are added a second time, by another product or, as the third time, by a loop of two.
inline Program weight_gradient(DType t, int64_t n, int64_t batch, Product product = Product::kBest, int64_t again = 0) {
  constexpr int64_t R = 23, K = 13, M = 2;
  DType sum = t == F64 ? F64 : F32;
  Program p = program({R}, 4, {{t, R * M * batch * K}, {t, R * M * batch * n}}, {{sum, batch * K * n}}, {});
  p.sinks = {{Reduction::kSum, sum, batch * K * n, 0}};
  p.stages[0].body = {AccumulateMatmul{0, M, batch, K, n, operand(Space::kIn, 0, t, 0, batch * K, {K}),
                                       operand(Space::kIn, 1, t, 0, batch * n, {n}), product}};
  if (again > 0) p.stages[0].body.push_back(p.stages[0].body[0]);
  if (again > 1) p.stages[0].body[0] = Loop{2, false, std::nullopt, 1};
  return p;
}

// Two phases of two stages each, whose products of bfloat16 are large enough for tiles: two layers and the gradient of the second's
// weight, then the same layers on what the first made.
inline Call tile_network(int64_t rows, int64_t tile_rows) {
  constexpr int64_t K = 45, N = 70;
  Program p{};
  p.name = "tiles";
  p.axes = {rows};
  p.tile_rows = tile_rows;
  p.inputs = {{BF16, rows * K}, {BF16, K * N}, {F32, N}, {BF16, N * K}};
  p.preps = {weight(1, BF16, K, N), dense(2, F32, F32, {N}, {1}), weight(3, BF16, N, K)};
  p.queues = {{0, {1}, 3, tile_rows * N * 2}};
  auto matrix = [](Space space, DType t, int64_t width) { return operand(space, 0, t, 0, width, {0}); };
  Operand x = matrix(Space::kIn, BF16, K), hidden = matrix(Space::kQueue, BF16, N), y = matrix(Space::kOut, BF16, K);
  p.stages = {{"first", 0, {Matmul{x, 1, 1, 0, 1, Activation::kRelu, hidden}}}, {"second", 0, {}}};
  Program again = p;
  p.outputs = {{BF16, rows * K}, {F32, N * K}};
  p.sinks = {{Reduction::kSum, F32, N * K, 1}};
  p.stages[1].body = {Matmul{hidden, 1, 1, 2, -1, Activation::kNone, y}, AccumulateMatmul{0, 1, 1, N, K, hidden, y}};
  again.outputs = {{F32, rows * K}};
  again.stages[1].body = {Matmul{hidden, 1, 1, 2, -1, Activation::kNone, matrix(Space::kOut, F32, K)}};
  Call c = one_part(p);
  c.arrays.push_back(again.outputs[0]);
  ++c.results;
  c.parts.push_back({1, {4, 1, 2, 3}, {6}, again});
  return c;
}

// A reduction, or the same operand into a sink.
inline Program random_reduction(unsigned seed, bool into_sink) {
  std::mt19937 rng(seed);
  constexpr DType kTypes[] = {F32, BF16, F64, I32, BOOL};
  Reduction how = static_cast<Reduction>(seed % 9);
  bool logical = how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor, arg = how >= Reduction::kArgMax;
  DType t = logical ? kTypes[3 + rng() % 2] : kTypes[rng() % 4];
  int64_t rows = 1 + static_cast<int64_t>(rng() % 30), n, m;
  std::vector<int64_t> kept = random_extents(rng, 0),
                       reduced = arg ? std::vector<int64_t>{1 + static_cast<int64_t>(rng() % 300)} : random_extents(rng, 0);
  if (how == Reduction::kProd && product(reduced) > 8) reduced = {3};
  std::vector<int64_t> all = kept;
  all.insert(all.end(), reduced.begin(), reduced.end());
  Operand x = random_layout(rng, Space::kIn, 0, t, rows, all, false, &n);
  Operand out = random_layout(rng, Space::kOut, 0, arg ? I32 : t, rows, kept, true, &m);
  if (!into_sink)
    return program({rows}, 1 + static_cast<int64_t>(rng() % 40), {{t, n}}, {{out.ref.dtype, m}},
                   {Reduce{how, kept, reduced, x, out}});
  rng();
  Program q =
      program({rows}, 1 + static_cast<int64_t>(rng() % 4), {{t, n}}, {{t, product(kept)}}, {Accumulate{0, kept, reduced, x}});
  q.sinks = {{how, t, product(kept), 0}};
  return q;
}

inline Program random_scan(unsigned seed) {
  std::mt19937 rng(seed);
  Cumulative how = static_cast<Cumulative>(seed % 5);
  constexpr DType kTypes[] = {F32, F64, BF16, I32};
  DType t = kTypes[rng() % (how == Cumulative::kLogSumExp ? 3 : 4)];
  int64_t rows = 1 + static_cast<int64_t>(rng() % 12), n, m;
  std::vector<int64_t> extents = random_extents(rng, 1);
  extents.back() = how == Cumulative::kProd ? 5 : 1 + static_cast<int64_t>(rng() % 300);
  Operand x = random_layout(rng, Space::kIn, 0, t, rows, extents, false, &n),
          out = random_layout(rng, Space::kOut, 0, t, rows, extents, true, &m);
  return program({rows}, 5, {{t, n}}, {{t, m}}, {Scan{how, rng() % 2 == 0, extents, x, out}});
}

// Two programs one after the other, through an array that lives during the call only.
inline Call two_phases() {
  Program first = random_scan(8);
  Scan& scan = std::get<Scan>(first.stages[0].body[0]);  // of one dimension; without gaps in its result, which is read whole
  DType type = first.outputs[0].dtype;
  scan.out = operand(Space::kOut, 0, type, 0, scan.extents[0], {1});
  first.outputs = {{type, first.axes[0] * scan.extents[0]}};
  const Array between = first.outputs[0];
  Operand whole = operand(Space::kIn, 0, type, 0, 0, {1}), out = operand(Space::kOut, 0, type, 0, 0, {});
  Program second = program({1}, 1, {between}, {{type, 1}}, {Reduce{Reduction::kMax, {}, {between.elements}, whole, out}});
  return {"two phases", {first.inputs[0], second.outputs[0], between}, 1, 1, {{0, {0}, {2}, first}, {1, {2}, {1}, second}}};
}

}  // namespace kitsune::cpu::test
