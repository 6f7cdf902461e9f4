// Vector programs as instructions of strips, against the same programs without them: every bit must agree, with every kernel table.
#include <cmath>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "kitsune_cpu/strips.h"
#include "nest.h"
#include "programs.h"
#include "reciprocal.h"
#include "strips_check.h"

namespace kitsune::cpu::test {
namespace {

constexpr DType U32 = DType::kU32, F16 = DType::kF16;

struct Named {
  Opcode op;
  int operands;
};
const std::vector<Named> kOfFloats = {{Opcode::op_add, 2},   {Opcode::op_sub, 2},   {Opcode::op_mul, 2},    {Opcode::op_div, 2},
                                      {Opcode::op_max, 2},   {Opcode::op_min, 2},   {Opcode::op_neg, 1},    {Opcode::op_abs, 1},
                                      {Opcode::op_sign, 1},  {Opcode::op_sqrt, 1},  {Opcode::op_sin, 1},    {Opcode::op_cos, 1},
                                      {Opcode::op_exp, 1},   {Opcode::op_rsqrt, 1}, {Opcode::op_square, 1}, {Opcode::op_rem, 2},
                                      {Opcode::op_clamp, 3}, {Opcode::op_floor, 1}, {Opcode::op_tanh, 1},   {Opcode::op_pow, 2}};
const std::vector<Named> kOfIntegers = {
    {Opcode::op_add, 2}, {Opcode::op_sub, 2},   {Opcode::op_mul, 2},        {Opcode::op_div, 2},
    {Opcode::op_rem, 2}, {Opcode::op_max, 2},   {Opcode::op_min, 2},        {Opcode::op_neg, 1},
    {Opcode::op_abs, 1}, {Opcode::op_and, 2},   {Opcode::op_or, 2},         {Opcode::op_xor, 2},
    {Opcode::op_not, 1}, {Opcode::op_clamp, 3}, {Opcode::op_shift_left, 2}, {Opcode::op_shift_right_logical, 2},
    {Opcode::op_clz, 1}, {Opcode::op_mulhi, 2}, {Opcode::op_sign, 1},       {Opcode::op_shift_right_arithmetic, 2}};
const std::vector<Named> kOfBools = {{Opcode::op_and, 2}, {Opcode::op_or, 2}, {Opcode::op_xor, 2}, {Opcode::op_not, 1},
                                     {Opcode::op_eq, 2},  {Opcode::op_ne, 2}, {Opcode::op_max, 2}, {Opcode::op_mul, 2}};
const std::vector<Named> kComparisons = {{Opcode::op_eq, 2}, {Opcode::op_ne, 2}, {Opcode::op_lt, 2},
                                         {Opcode::op_le, 2}, {Opcode::op_gt, 2}, {Opcode::op_ge, 2}};

// Operations of any of these types on values of any of them, some of which are stored; some of those over what was loaded.
class Random {
 public:
  explicit Random(unsigned seed) : rng_(seed) {}

  Program program() {
    const int64_t rows = 1 + any(1300), tile = 64 + any(700), columns = any(2) == 0 ? 2 + any(any(2) ? 3 : 40) : 1;
    Program p = kitsune::cpu::test::program({rows}, tile, {}, {}, {}, 0);
    std::vector<int64_t> extents;
    if (columns > 1) extents = {columns};
    if (columns > 5 && columns % 2 == 0) extents = {2, columns / 2};
    v_ = Vector{extents, false, {}, {}, {}};
    for (DType t : {F32, F32, I32, U32, BOOL, F32, BF16, I32, F16, BF16}) {
      const int64_t i = static_cast<int64_t>(p.inputs.size());
      int64_t stride = any(8) == 0 ? 0 : 1;
      v_.loads.push_back(layout(Space::kIn, i, t, rows, extents, stride, true));
      p.inputs.push_back({t, rows * columns + 4});
      value(micro(Opcode::op_load, compute_type(t) == DType::kI8 ? I32 : compute_type(t), 0, i));
    }
    value(micro(Opcode::op_const, F32, 0, 0, 0, 0, {1.25}));
    value(micro(Opcode::op_const, I32, 0, 0, 0, 0, {-3}));
    if (columns == 1 || any(2)) {
      value(micro(Opcode::op_index, any(2) ? I32 : U32, 0, columns > 1 ? any(2) : 0, 1 + any(3), 1 + any(1000)));
      value(micro(Opcode::op_index, DType::kI64, 0, 0, 1, 1 << 20));
      value(convert(any(2) ? F32 : U32, DType::kI64, 0, last()));
    }
    while (registers_.size() < 31) operation();
    int64_t stored = 0;
    for (int64_t k = 0; k < 5; ++k) {
      int64_t r = any(2) ? last() : any(static_cast<int64_t>(registers_.size()));
      while (registers_[static_cast<size_t>(r)] == DType::kI64) r = last();
      const DType type = registers_[static_cast<size_t>(r)];
      const DType storage = type == F32 && any(3) == 0 ? (any(2) ? BF16 : F16) : type;
      v_.stores.push_back(layout(Space::kOut, stored, storage, rows, extents, 1, false));
      p.outputs.push_back({storage, rows * columns + 4});
      v_.code.push_back(micro(Opcode::op_store, type, 0, stored++, r));
    }
    p.stages[0].body.push_back(v_);
    return p;
  }

 private:
  int64_t any(int64_t n) { return static_cast<int64_t>(rng_() % static_cast<uint32_t>(n)); }
  int64_t last() const { return static_cast<int64_t>(registers_.size()) - 1; }

  // Row by row, or column by column; or, of what is read, the same in all rows, in some loops, or everywhere.
  Operand layout(Space space, int64_t index, DType t, int64_t rows, const std::vector<int64_t>& extents, int64_t stride,
                 bool read) {
    const int64_t offset = any(4);
    if (extents.empty()) return operand(space, index, t, offset, stride, {});
    if (extents.size() == 1 && any(4) == 0) return operand(space, index, t, offset, stride, {stride * rows});
    const bool some = read && any(2);
    std::vector<int64_t> strides(extents.size());
    int64_t dense = 1;
    for (size_t d = extents.size(); d-- > 0;)
      if (!some || any(2)) strides[d] = dense, dense *= extents[d];
    return operand(space, index, t, offset, some && any(2) ? 0 : dense, strides);
  }

  void value(Micro m) {
    m.dst = static_cast<int64_t>(registers_.size());
    registers_.push_back(gives_bool(m.op) ? BOOL : m.type);
    v_.code.push_back(std::move(m));
  }

  // A register of this type, recent ones rather than others.
  int64_t of(DType type) {
    std::vector<int64_t> found;
    for (size_t r = 0; r < registers_.size(); ++r)
      if (registers_[r] == type) found.push_back(static_cast<int64_t>(r));
    return any(2) ? found.back() : found[static_cast<size_t>(any(static_cast<int64_t>(found.size())))];
  }

  void operation() {
    const DType types[] = {F32, F32, F32, I32, U32, BOOL};
    const DType type = types[any(6)];
    switch (any(8)) {
      case 0: return value(micro(Opcode::op_select, type, 0, of(BOOL), of(type), of(type)));
      case 1: {
        const DType from = types[any(6)];
        return value(convert(type, from, 0, of(from)));
      }
      case 2: {
        const DType t = type == BOOL ? F32 : type;
        return apply(kComparisons[static_cast<size_t>(any(6))], t);
      }
      case 3: return value(micro(Opcode::op_integer_pow, F32, 0, of(F32), 0, 0, {static_cast<double>(any(6)) - 1}));
      default: {
        const auto& ops = type == F32 ? kOfFloats : type == BOOL ? kOfBools : kOfIntegers;
        return apply(ops[static_cast<size_t>(any(static_cast<int64_t>(ops.size())))], type);
      }
    }
  }

  void apply(const Named& op, DType type) {
    const int64_t a = of(type), b = op.operands > 1 ? of(type) : 0, c = op.operands > 2 ? of(type) : 0;
    value(micro(op.op, type, 0, a, b, c));
  }

  std::mt19937 rng_;
  std::vector<DType> registers_;
  Vector v_;
};

// Loops over a state in place: what is read of the state before is not what was written.
Program recurrence(int64_t rows, int64_t tile) {
  auto place = [&](int64_t k) { return operand(Space::kScratch, 0, F32, k * tile, 1, {}); };
  auto load = [](int64_t dst, int64_t a) { return micro(Opcode::op_load, F32, dst, a); };
  auto store = [](int64_t a, int64_t b) { return micro(Opcode::op_store, F32, 0, a, b); };
  Vector begin{{}, false, {operand(Space::kIn, 0, F32, 0, 1, {})}, {place(0), place(1)}, {}};
  begin.code = {load(0, 0), store(0, 0), micro(Opcode::op_neg, F32, 1, 0), store(1, 1)};
  Vector turn{{}, false, {place(0), place(1)}, {place(0), place(1)}, {}};
  turn.code = {load(0, 0),
               load(1, 1),
               micro(Opcode::op_const, F32, 2, 0, 0, 0, {0.25}),
               micro(Opcode::op_mul, F32, 3, 1, 2),
               micro(Opcode::op_add, F32, 4, 0, 3),
               store(0, 4),
               micro(Opcode::op_mul, F32, 5, 0, 2),
               micro(Opcode::op_sin, F32, 6, 5),
               micro(Opcode::op_cos, F32, 7, 5),
               micro(Opcode::op_mul, F32, 8, 6, 7),
               micro(Opcode::op_sub, F32, 9, 1, 8),
               store(1, 9)};
  Vector end{{}, false, {place(0), place(1)}, {operand(Space::kOut, 0, F32, 0, 1, {}), operand(Space::kOut, 1, F32, 0, 1, {})}, {}};
  end.code = {load(0, 0), load(1, 1), micro(Opcode::op_add, F32, 2, 0, 1), store(0, 2), micro(Opcode::op_abs, F32, 3, 1),
              store(1, 3)};
  const Array a{F32, rows};
  return program({rows}, tile, {a}, {a, a}, {begin, Loop{5, false, {}, 1}, turn, end}, 2 * tile * 4);
}

float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A number x for which x / y is as near to the middle of two floats as it can be, up to powers of two: (x's integer) 2^25 and (y's)
// times an odd integer of 25 bits differ by 1.
float hardest(float y) {
  uint32_t bits, middle = 1;
  std::memcpy(&bits, &y, sizeof bits);
  const uint32_t integer = (bits & 0x7fffffu) | 0x800001u;
  for (int k = 0; k < 5; ++k) middle *= 2 - integer * middle;  // 1 / integer modulo 2^32, by Newton's iteration
  middle &= 0x1ffffffu;
  if (middle < 1u << 24) middle = (1u << 25) - middle;
  return static_cast<float>((uint64_t{integer} * middle + 1) >> 25);
}

// Numbers divided by one number for each row, from memory and from registers. Quotients next to the middle of two floats, zeros of
// either sign, subnormal numbers, infinities and NaN are among them.
void test_quotients(unsigned seed) {
  constexpr int64_t kRows = 500, kColumns = 300;
  std::mt19937 rng(seed);
  auto any_of = [&] { return float_of(rng()); };
  auto moderate = [&] { return float_of((rng() & 0x807fffffu) | 1 | ((87 + rng() % 80) << 23)); };
  std::vector<float> x(kRows * kColumns), y(kRows);
  for (size_t r = 0; r < kRows; ++r) {
    const float corners[] = {1.0f, -2.0f, 1.1f, 0x1.fffffep0f, 0x1.000002p-3f, 0x1p-20f, 0x1p40f, 3.0f};
    y[r] = r % 4 == 0 ? corners[r / 4 % 8] : r % 4 == 3 ? any_of() : moderate();
    for (size_t k = 0; k < kColumns; ++k) {
      const double middle = double(moderate()) * (1 + (rng() % 2 ? 0x1p-24 : -0x1p-24));
      const float odd[] = {0.0f, -0.0f, float_of(rng() & 0x807fffffu), any_of(), INFINITY, -NAN};
      float v = static_cast<float>(middle * static_cast<double>(y[r]));
      if (rng() % 16 == 0) v = std::ldexp(hardest(y[r]), static_cast<int>(rng() % 40) - 20);
      if (r % 5 == 1 && rng() % 9 == 0) v = odd[rng() % 2];
      if (r % 5 == 2) v = rng() % 50 == 0 ? odd[rng() % 6] : v;
      if (r % 5 == 3) v = any_of();
      x[r * kColumns + k] = v;
    }
  }
  Vector v{{kColumns},
           false,
           {operand(Space::kIn, 0, F32, 0, kColumns, {1}), operand(Space::kIn, 1, F32, 0, 1, {0})},
           {operand(Space::kOut, 0, F32, 0, kColumns, {1}), operand(Space::kOut, 1, F32, 0, kColumns, {1})},
           {}};
  v.code = {micro(Opcode::op_load, F32, 0, 0),     micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_div, F32, 2, 0, 1),
            micro(Opcode::op_store, F32, 0, 0, 2), micro(Opcode::op_neg, F32, 3, 0),  micro(Opcode::op_div, F32, 4, 3, 1),
            micro(Opcode::op_store, F32, 0, 1, 4)};
  const Array a{F32, kRows * kColumns};
  const Call call = one_part(program({kRows}, 100, {a, {F32, kRows}}, {a, a}, {v}));
  std::vector<int64_t> words = encode(call);
  Executable exe(parse(words.data(), words.size()));
  Arrays arrays(exe.call(), seed);
  std::memcpy(arrays.ins[0].data(), x.data(), x.size() * sizeof(float));
  std::memcpy(arrays.ins[1].data(), y.data(), y.size() * sizeof(float));
  ThreadPool pool(1);
  const std::string error = exe.run(arrays.in_pointers.data(), arrays.out_pointers.data(), pool);
  CHECK(error.empty(), "%s", error.c_str());
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t o = 0; o < 2; ++o) {
      const float want = (o == 0 ? x[i] : -x[i]) / y[i / kColumns];
      float got;
      std::memcpy(&got, &arrays.outs[o][i * sizeof(float)], sizeof got);
      if (same(F32, reinterpret_cast<const char*>(&got), reinterpret_cast<const char*>(&want))) continue;
      CHECK(false, "%a / %a [%s] is %a, not %a", double(o == 0 ? x[i] : -x[i]), double(y[i / kColumns]), kernels().isa, double(got),
            double(want));
      return;
    }
}

// The same numbers divided by constants, most of which have factors (reciprocal.h): what these do not divide is left to others.
void test_constants(unsigned seed) {
  std::mt19937 rng(seed);
  for (int k = 0; k < 40; ++k) {
    const float corners[] = {1.1f, 3.0f, -0.7f, 0x1.fffffep0f, 0x1.000002p-3f, 2.0f, 0x1p-21f, 0x1p41f, NAN, 0.0f};
    const float y = k < 10 ? corners[k] : float_of((rng() & 0x807fffffu) | ((107 + rng() % 60) << 23));
    constexpr int64_t kRows = 1000;
    std::vector<float> x(kRows);
    for (float& v : x) {
      const float odd[] = {0.0f, -0.0f, float_of(rng() & 0x807fffffu), INFINITY, -INFINITY, NAN};
      const int kind = static_cast<int>(rng() % 64);
      v = std::ldexp(static_cast<float>(rng() >> 8), static_cast<int>(rng() % 80) - 60);
      if (rng() % 4 == 0 && y != 0) v = std::ldexp(hardest(y), static_cast<int>(rng() % 40) - 20);
      if (kind == 0 && seed % 2 == 0) v = odd[rng() % 6];
      if (kind == 1 && seed % 2 == 0) v = std::ldexp(v, rng() % 2 ? 100 : -100);
    }
    Vector v{{},
             false,
             {operand(Space::kIn, 0, F32, 0, 1, {})},
             {operand(Space::kOut, 0, F32, 0, 1, {}), operand(Space::kOut, 1, F32, 0, 1, {})},
             {}};
    v.code = {micro(Opcode::op_load, F32, 0, 0),    micro(Opcode::op_const, F32, 1, 0, 0, 0, {static_cast<double>(y)}),
              micro(Opcode::op_div, F32, 2, 0, 1),  micro(Opcode::op_store, F32, 0, 0, 2),
              micro(Opcode::op_neg, F32, 3, 0),     micro(Opcode::op_div, F32, 4, 3, 1),
              micro(Opcode::op_store, F32, 0, 1, 4)};
    const Call call = one_part(program({kRows}, 300, {{F32, kRows}}, {{F32, kRows}, {F32, kRows}}, {v}));
    std::vector<int64_t> words = encode(call);
    Executable exe(parse(words.data(), words.size()));
    Arrays arrays(exe.call(), seed);
    std::memcpy(arrays.ins[0].data(), x.data(), x.size() * sizeof(float));
    ThreadPool pool(1);
    const std::string error = exe.run(arrays.in_pointers.data(), arrays.out_pointers.data(), pool);
    CHECK(error.empty(), "%s", error.c_str());
    for (size_t i = 0; i < 2 * x.size(); ++i) {
      const float of = i < x.size() ? x[i] : -x[i - x.size()], want = of / y;
      float got;
      std::memcpy(&got, &arrays.outs[i / x.size()][i % x.size() * sizeof(float)], sizeof got);
      if (same(F32, reinterpret_cast<const char*>(&got), reinterpret_cast<const char*>(&want))) continue;
      CHECK(false, "%a / %a [%s] is %a, not %a", double(of), double(y), kernels().isa, double(got), double(want));
      return;
    }
  }
}

// Factors are found for a divisor where they give every quotient, and only there.
void test_reciprocals() {
  int with = 0;
  for (uint32_t bits : {0x3f8ccccdu, 0x3f333333u, 0x40400000u, 0xbfc00000u, 0x3fb504f3u, 0x3fffffffu, 0x3f800001u, 0x3fef7427u}) {
    const float y = float_of(bits);
    const std::optional<Reciprocal> found = reciprocal_of(y);
    const double inverse = 1.0 / static_cast<double>(y);
    Reciprocal r{};
    r.high = static_cast<float>(inverse);
    if (std::fabs(static_cast<double>(r.high)) > std::fabs(inverse)) r.high = std::nextafter(r.high, 0.0f);
    r.low = static_cast<float>(inverse - static_cast<double>(r.high));
    int wrong = 0;
    for (uint32_t m = 0; m < 1u << 23; ++m) {
      const float x = float_of(0x3f800000u | m);
      wrong += std::fma(x, r.high, x * r.low) != x / y;
    }
    CHECK((wrong == 0) == found.has_value(), "%a: %d quotients are wrong", double(y), wrong);
    with += found.has_value();
  }
  CHECK(with > 0 && with < 8, "of 8 divisors %d have factors", with);
  for (float y : {0.0f, 2.0f, -0.25f, 0x1.8p-21f, 0x1.8p41f, INFINITY, NAN}) CHECK(!reciprocal_of(y), "%a", double(y));
}

#if defined(__x86_64__)
// Whether the upper halves of this thread's vector registers are in use, as far as the CPU keeps track of it.
bool upper_halves_in_use() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return (low & 4) != 0;
}

// Code for SSE follows strips. It would wait for whatever the upper halves wait for.
void test_upper_halves_are_clean() {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__builtin_cpu_supports("avx") || !__get_cpuid_count(13, 1, &a, &b, &c, &d) || (a & 4) == 0) return;
  __asm__ volatile("vzeroupper" ::: "memory");
  if (upper_halves_in_use()) return;  // it does not
  constexpr int64_t kRows = 9, kColumns = 512;
  const Operand x = operand(Space::kIn, 0, F32, 0, kColumns, {1}), y = operand(Space::kOut, 0, F32, 0, kColumns, {1});
  Vector v{{kColumns}, false, {x, operand(Space::kIn, 1, F32, 0, 1, {0})}, {y}, {}};
  v.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_sub, F32, 2, 0, 1),
            micro(Opcode::op_mul, F32, 3, 2, 1), micro(Opcode::op_store, F32, 0, 0, 3)};
  const Array all{F32, kRows * kColumns};
  const Call call = one_part(program({kRows}, kRows, {all, {F32, kRows}}, {all}, {v}));
  std::vector<int64_t> words = encode(call);
  Executable exe(parse(words.data(), words.size()));
  Arrays arrays(exe.call(), 1);
  ThreadPool pool(1);
  __asm__ volatile("vzeroupper" ::: "memory");
  const std::string error = exe.run(arrays.in_pointers.data(), arrays.out_pointers.data(), pool);
  const bool used = upper_halves_in_use();
  CHECK(error.empty() && !used, "strips leave the upper halves of vector registers in use [%s]", kernels().isa);
}
#endif

void test_random(unsigned seeds) {
  for (unsigned seed = 1; seed <= seeds; ++seed) compare_without("random", one_part(Random(seed).program()), seed);
}

void test_recurrences() {
  for (int64_t rows : {1, 15, 16, 127, 128, 129, 1000})
    for (int64_t tile : {1, 100, 300}) compare_without("recurrence", one_part(recurrence(rows, tile)), 3);
}

// The rows are the innermost loop where columns are dense, or a row is short; the columns where rows are dense.
void test_loops_along_columns() {
  auto innermost_rows = [](int64_t columns, bool dense_columns, int64_t tile_rows) {
    const std::vector<int64_t> lies =
        dense_columns ? std::vector<int64_t>{4, 4 * 1024} : std::vector<int64_t>{4 * (columns + 1), 4};
    Nest nest = make_nest({columns}, {lies, lies, {4, 0}});
    simplify(nest);
    exchange_short(nest, tile_rows);
    return nest.back().rows;
  };
  CHECK(innermost_rows(12, true, 256), "%s", "12 dense columns");
  CHECK(innermost_rows(31, true, 256), "%s", "31 dense columns");
  CHECK(innermost_rows(5, false, 256), "%s", "rows of 5");
  CHECK(!innermost_rows(12, false, 256), "%s", "dense rows of 12");
  CHECK(!innermost_rows(12, true, 7), "%s", "7 rows");
  CHECK(!innermost_rows(64, true, 256), "%s", "64 columns");
}

// Of [steps, rows, columns] with the rows of a tile: rows and columns are one loop where that holds for every operand.
void test_loops_that_stand_apart() {
  auto joins = [](std::vector<std::vector<int64_t>> strides, int64_t columns) {
    Nest nest = make_nest({255, columns}, strides);
    simplify(nest);
    const bool joined = join_short(nest);
    CHECK(joined == (nest.size() == 2), "%d loops", static_cast<int>(nest.size()));
    if (joined) CHECK(nest.back().rows && nest.back().n == columns && nest.front().n == 255, "%s", "the wrong loops are one");
    return joined;
  };
  const std::vector<int64_t> one{24, 24 * 37, 4}, wider{24, 24 * 64, 4}, broadcast{4, 4 * 37, 0}, bias{0, 0, 4}, same{0, 0, 0};
  CHECK(joins({one, wider, same}, 6), "%s", "rows of one block");
  CHECK(!joins({one, one, broadcast}, 6), "%s", "a number for each row");
  CHECK(!joins({one, one, bias}, 6), "%s", "a number for each column");
  CHECK(!joins({{4 * 64, 4 * 64 * 37, 4}}, 64), "%s", "64 columns");
}

// A number or a row that is repeated leaves the rows where they are, what lies column by column does not.
void test_repeated_operands() {
  auto repeats = [](std::vector<std::vector<int64_t>> strides) {
    Nest nest = make_nest({6}, strides);
    return repeats_along(nest[0], nest[1], std::vector<int64_t>(strides.size(), 4));
  };
  CHECK(repeats({{24, 4}, {4, 0}, {24, 4}}), "%s", "a number for each row");
  CHECK(repeats({{24, 4}, {0, 4}, {24, 4}}), "%s", "a number for each column");
  CHECK(!repeats({{28, 4}, {4, 0}, {28, 4}}), "%s", "rows that lie apart");
  CHECK(!repeats({{4, 1024}, {4, 0}, {4, 1024}}), "%s", "dense columns");
}

// Functions of every number of a 16-bit type, which strips take from tables, where denormals are zeros: alone, of a rounded sum
// with another operand, and two of one operand.
void test_functions_of_16_bits(DType narrow) {
  constexpr int64_t kRows = 512, kColumns = 128;
  const Opcode round = narrow == DType::kBF16 ? Opcode::op_to_bfloat16 : Opcode::op_to_float16;
  Vector v{{kColumns}, false, {}, {}, {}};
  for (int64_t i = 0; i < 2; ++i) v.loads.push_back(operand(Space::kIn, i, narrow, 0, i == 0 ? kColumns : 0, {1}));
  for (int64_t o = 0; o < 3; ++o) v.stores.push_back(operand(Space::kOut, o, o == 2 ? F32 : narrow, 0, kColumns, {1}));
  v.code = {micro(Opcode::op_load, F32, 0, 0),
            micro(Opcode::op_load, F32, 1, 1),
            micro(Opcode::op_logistic, F32, 2, 0),
            micro(round, F32, 2, 2),
            micro(Opcode::op_mul, F32, 2, 2, 0),
            micro(round, F32, 2, 2),
            micro(Opcode::op_store, F32, 0, 0, 2),
            micro(Opcode::op_add, F32, 3, 2, 1),
            micro(round, F32, 3, 3),
            micro(Opcode::op_tanh, F32, 4, 3),
            micro(Opcode::op_store, F32, 0, 1, 4),
            micro(Opcode::op_const, F32, 5, 0, 0, 0, {0.5}),
            micro(Opcode::op_lt, F32, 6, 0, 5),
            micro(Opcode::op_exp, F32, 7, 0),
            micro(Opcode::op_pow, F32, 8, 5, 0),
            micro(Opcode::op_select, F32, 9, 6, 7, 8),
            micro(Opcode::op_store, F32, 0, 2, 9)};
  const Array all{narrow, kRows * kColumns};
  const Call call = one_part(program({kRows}, 96, {all, {narrow, kColumns}}, {all, all, {F32, kRows * kColumns}}, {v}));
  auto results = [&] {
    std::vector<int64_t> words = encode(call);
    Executable exe(parse(words.data(), words.size()));
    std::vector<uint16_t> every(static_cast<size_t>(all.elements));
    for (size_t i = 0; i < every.size(); ++i) every[i] = static_cast<uint16_t>(i);
    std::vector<Bytes> outs;
    for (int64_t k = exe.call().operands; k < exe.call().operands + 3; ++k)
      outs.emplace_back(static_cast<size_t>(all.elements) * item_size(exe.call().arrays[static_cast<size_t>(k)].dtype));
    const void* in[] = {every.data(), every.data() + 0x3000};  // of the second operand ordinary numbers
    void* out[] = {outs[0].data(), outs[1].data(), outs[2].data()};
    ThreadPool pool(1);
    const std::string error = exe.run(in, out, pool);
    CHECK(error.empty(), "%s", error.c_str());
    return outs;
  };
  const KernelTable with = kernels();
  KernelTable without = with;
  without.strips = nullptr;
  set_kernels(&without);
  const std::vector<Bytes> want = results();
  set_kernels(&with);
  const std::vector<Bytes> got = results();
  set_kernels(nullptr);
  set_isa(with.isa);
  for (size_t o = 0; o < 3; ++o)
    for (int64_t i = 0; i < all.elements; ++i) {
      const DType type = o == 2 ? F32 : narrow;
      const size_t byte = static_cast<size_t>(i) * item_size(type);
      uint32_t bits[2] = {0, 0};
      std::memcpy(&bits[0], &want[o][byte], item_size(type));
      std::memcpy(&bits[1], &got[o][byte], item_size(type));
      const uint32_t infinity = o == 2 ? 0x7f800000 : narrow == DType::kBF16 ? 0x7f80 : 0x7c00;
      auto nan = [&](uint32_t x) { return (x & (o == 2 ? 0x7fffffff : 0x7fff)) > infinity; };
      if (bits[0] == bits[1] || (nan(bits[0]) && nan(bits[1]))) continue;
      CHECK(false, "%s [%s]: result %zu of operand %04x is %08x, not %08x", dtype_name(narrow), with.isa, o, unsigned(i), bits[1],
            bits[0]);
      break;
    }
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu;
  using namespace kitsune::cpu::test;
  const char* names[8];
  const int count = available_isas(names, 8);
  test_loops_along_columns();
  test_reciprocals();
  test_loops_that_stand_apart();
  test_repeated_operands();
  for (int i = 0; i < count; ++i) {
    set_isa(names[i]);
    test_random(400);
    test_recurrences();
#if defined(__x86_64__)
    test_upper_halves_are_clean();
#endif
    for (unsigned seed = 1; seed <= 4; ++seed) {
      test_quotients(seed);
      test_constants(seed);
#if defined(__SSE__)  // as XLA's threads compute
      const unsigned csr = _mm_getcsr();
      _mm_setcsr(csr | 0x8040);
      test_quotients(seed + 4);
      test_constants(seed);
      for (DType narrow : {BF16, DType::kF16}) test_functions_of_16_bits(narrow);
      _mm_setcsr(csr);
#endif
    }
  }
  std::printf("strips: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
