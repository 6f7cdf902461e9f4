// Helpers of test_executor: building programs, random arrays, and the comparison of the executor with the reference.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kitsune_cpu/executor.h"
#include "program_words.h"
#include "reference.h"
#include "thread_pool.h"

namespace kitsune::cpu::test {

inline int failures = 0;

#define CHECK(condition, ...)                            \
  do {                                                   \
    if (!(condition)) {                                  \
      ++kitsune::cpu::test::failures;                    \
      std::printf("FAILED %s:%d: ", __FILE__, __LINE__); \
      std::printf(__VA_ARGS__);                          \
      std::printf("\n");                                 \
    }                                                    \
  } while (0)

inline Operand operand(Space space, int64_t index, DType t, int64_t offset, int64_t row_stride, std::vector<int64_t> strides) {
  return {{space, index, offset, t}, row_stride, std::move(strides)};
}

inline Prep weight(int64_t input, DType t, int64_t k, int64_t n) {
  return {PrepKind::kWeight, {Space::kIn, input, 0, t}, t, {}, {}, {k}, {n}, {n}, {1}};
}

inline Prep dense(int64_t input, DType from, DType to, std::vector<int64_t> extents, std::vector<int64_t> strides) {
  return {PrepKind::kDense, {Space::kIn, input, 0, from}, to, {}, {}, {}, {}, std::move(extents), std::move(strides)};
}

inline Micro micro(Opcode op, DType t, int64_t dst, int64_t a = 0, int64_t b = 0, int64_t c = 0, std::vector<double> imm = {}) {
  return {op, t, dst, a, b, c, 0, t, std::move(imm)};
}

inline Micro convert(DType to, DType from, int64_t dst, int64_t a) { return {Opcode::op_convert, to, dst, a, 0, 0, 0, from, {}}; }

inline Program program(std::vector<int64_t> axes, int64_t tile_rows, std::vector<Array> inputs, std::vector<Array> outputs,
                       std::vector<Instruction> body, int64_t scratch_bytes = 0) {
  Program p{};
  p.name = "test";
  p.axes = std::move(axes);
  p.tile_rows = tile_rows;
  p.inputs = std::move(inputs);
  p.outputs = std::move(outputs);
  p.stages.push_back({"only", scratch_bytes, std::move(body)});
  return p;
}

// Small integers and halves are exact in every type and keep sums exact, whatever their order.
inline Bytes random_array(const Array& a, unsigned seed, bool small) {
  std::mt19937 rng(seed);
  std::uniform_int_distribution<int> whole(-4, 4);
  std::uniform_real_distribution<double> real(-1, 1);
  Bytes out(static_cast<size_t>(a.elements) * item_size(a.dtype) + 1);
  for (int64_t i = 0; i < a.elements; ++i) {
    double v = a.dtype == DType::kBool ? whole(rng) > 0 : is_float(a.dtype) && !small ? real(rng) : whole(rng);
    set(a.dtype, &out[static_cast<size_t>(i) * item_size(a.dtype)], v);
  }
  return out;
}

inline Bytes zeros(const Array& a) { return Bytes(static_cast<size_t>(a.elements) * item_size(a.dtype) + 1, 0); }

// Runs each part by the reference.
inline void refer(const Call& c, const std::vector<Bytes>& ins, std::vector<Bytes>& outs) {
  std::vector<Bytes> arrays = ins;
  for (size_t k = ins.size(); k < c.arrays.size(); ++k) arrays.push_back(zeros(c.arrays[k]));
  for (const Part& part : c.parts) {
    std::vector<Bytes> in, out;
    for (int64_t k : part.reads) in.push_back(arrays[k]);
    for (int64_t k : part.writes) out.push_back(arrays[k]);
    Reference(part.program, in, out).run();
    for (size_t i = 0; i < out.size(); ++i) arrays[part.writes[i]] = out[i];
  }
  for (size_t i = 0; i < outs.size(); ++i) outs[i] = arrays[ins.size() + i];
}

// A program with an order gets a permutation; one with sorted indices has them in input 1, and gets them sorted in its order.
inline void arrange(const Call& c, std::vector<Bytes>& ins, unsigned seed) {
  for (const Part& part : c.parts) {
    const Program& p = part.program;
    std::vector<int32_t> order(static_cast<size_t>(p.rows));
    std::iota(order.begin(), order.end(), 0);
    if (p.order >= 0) {
      std::shuffle(order.begin(), order.end(), std::mt19937(seed));
      std::memcpy(ins[part.reads[p.order]].data(), order.data(), order.size() * 4);
    }
    for (const Instruction& i : p.stages[0].body) {
      const auto* a = std::get_if<AccumulateAt>(&i);
      if (!std::holds_alternative<AccumulateScaled>(i) && !std::holds_alternative<AccumulateTaken>(i) &&
          (a == nullptr || !a->sorted))
        continue;
      std::vector<int32_t> ids(order.size()), sorted(order.size());
      std::memcpy(sorted.data(), ins[part.reads[1]].data(), ids.size() * 4);
      std::sort(sorted.begin(), sorted.end());
      for (size_t r = 0; r < ids.size(); ++r) ids[static_cast<size_t>(order[r])] = sorted[r];
      std::memcpy(ins[part.reads[1]].data(), ids.data(), ids.size() * 4);
    }
  }
}

struct Arrays {
  std::vector<Bytes> ins, outs;
  std::vector<const void*> in_pointers;
  std::vector<void*> out_pointers;
  Arrays(const Call& c, unsigned seed, bool small = false) {
    for (int64_t i = 0; i < c.operands; ++i) ins.push_back(random_array(c.arrays[i], ++seed * 7919, small));
    arrange(c, ins, seed);
    for (int64_t i = 0; i < c.results; ++i) outs.push_back(zeros(c.arrays[c.operands + i]));
    for (Bytes& b : ins) in_pointers.push_back(b.data());
    for (Bytes& b : outs) out_pointers.push_back(b.data());
  }
};

// Runs the call as parsed from its words on each number of threads; every output must be within `tolerance` of the reference,
// and the same bits for any number of threads.
inline void compare(const char* name, const Call& source, double tolerance, unsigned seed = 1, bool small = false,
                    std::vector<int64_t> threads = {1, 3}) {
  std::vector<int64_t> words = encode(source);
  try {
    Executable exe(parse(words.data(), words.size()));
    const Call& c = exe.call();
    Arrays want(c, seed, small);
    refer(c, want.ins, want.outs);
    std::vector<Bytes> first;
    for (int64_t t : threads) {
      Arrays got(c, seed, small);
      ThreadPool pool(t);
      std::string error = exe.run(got.in_pointers.data(), got.out_pointers.data(), pool);
      CHECK(error.empty(), "%s: %s", name, error.c_str());
      for (size_t o = 0; o < got.outs.size(); ++o) {
        const Array& array = c.arrays[got.ins.size() + o];
        DType type = array.dtype;
        for (int64_t i = 0; i < array.elements; ++i) {
          size_t byte = static_cast<size_t>(i) * item_size(type);
          double a = get(type, &want.outs[o][byte]), b = get(type, &got.outs[o][byte]);
          bool close = std::isnan(a) ? std::isnan(b) : a == b || std::abs(a - b) <= tolerance * (1 + std::abs(a));
          CHECK(close, "%s: output %zu element %lld: %.9g, expected %.9g (%lld threads)", name, o, static_cast<long long>(i), b, a,
                static_cast<long long>(t));
          if (!close) return;
        }
      }
      if (first.empty()) first = got.outs;
      CHECK(first == got.outs, "%s: %lld threads give other bits than %lld", name, static_cast<long long>(t),
            static_cast<long long>(threads[0]));
    }
  } catch (const std::exception& e) {
    CHECK(false, "%s: %s", name, e.what());
  }
}

inline void compare(const char* name, const Program& source, double tolerance, unsigned seed = 1, bool small = false,
                    std::vector<int64_t> threads = {1, 3}) {
  compare(name, one_part(source), tolerance, seed, small, std::move(threads));
}

inline void section(const char* name, void (*test)()) {
  auto start = std::chrono::steady_clock::now();
  test();
  std::printf("  %-18s %6.2f s\n", name, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::fflush(stdout);
}

}  // namespace kitsune::cpu::test
