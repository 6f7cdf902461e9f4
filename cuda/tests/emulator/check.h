// What the emulator's tests share: a registry of kernels, and a main that runs one of them under many seeds.
//
// Comes in: `list`, or the name of a case and a number of seeds. Goes out: one line of counts (right results, reported errors,
// wrong results), and the first message. Invariant: inputs are small integers, so that every order of summation gives the same
// bits.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "emulator/emulator.h"
#include "kitsune/arch/arch.h"

namespace check {

using namespace kitsune::arch;
using kitsune::emulator::Launch;
using kitsune::emulator::Options;
using kitsune::emulator::Result;

// Returns what the launch said, and sets `right`.
using Trial = std::function<Result(u64 seed, bool& right)>;

inline std::vector<std::pair<std::string, Trial>>& cases() {
  static std::vector<std::pair<std::string, Trial>> all;
  return all;
}
struct Case {
  Case(const char* name, Trial trial) { cases().emplace_back(name, std::move(trial)); }
};

// Small integers: every product and sum is exact in bf16, f16 and tf32.
struct Integers {
  u32 state = 12345;
  float next(int range) {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int>(state >> 16) % (2 * range + 1) - range);
  }
};
template <class T>
T encode(float v);
template <>
inline u16 encode<u16>(float v) {
  return to_bf16(v);
}
template <>
inline float encode<float>(float v) {
  return v;
}

template <class T>
void use(std::vector<T>& v, const char* name) {
  kitsune::emulator::register_global(v.data(), v.size() * sizeof(T), name);
}

inline size_t clock_bytes = Options().clock_bytes;
// The same trial with one vector clock for each warp, as launches of very many threads have.
inline Result with_warp_clocks(Result (*trial)(u64, bool&), u64 seed, bool& right) {
  clock_bytes = 0;
  Result r = trial(seed, right);
  clock_bytes = Options().clock_bytes;
  if (r.lane_clocks) right = false;
  return r;
}

template <class Body>
Result launch(Launch l, u64 seed, Body body) {
  Options options;
  options.seed = seed;
  options.clock_bytes = clock_bytes;
  Result r = kitsune::emulator::run(l, body, options);
  kitsune::emulator::clear_globals();
  return r;
}

// Byte offset of byte `column` of row `row` in a tile of 128-byte rows with the 128-byte swizzle.
inline u32 swizzled(u32 row, u32 column) {
  u32 at = row * 128 + column;
  return at ^ (at >> 7 & 7) << 4;
}

}  // namespace check

int main(int count, char** arguments) {
  using namespace check;
  if (count == 2 && !strcmp(arguments[1], "list")) {
    for (auto& c : cases()) puts(c.first.c_str());
    return 0;
  }
  if (count < 3) return 2;
  int seeds = atoi(arguments[2]);
  for (auto& c : cases()) {
    if (c.first != arguments[1] && strcmp(arguments[1], "all")) continue;
    int right = 0, reported = 0, wrong = 0;
    double seconds = 0;
    std::string message;
    for (int seed = 1; seed <= seeds; ++seed) {
      bool is_right = false;
      Result r = c.second(static_cast<u64>(seed), is_right);
      seconds += r.seconds;
      if (!r.ok && message.empty()) message = r.message;
      ++(!r.ok ? reported : is_right ? right : wrong);
    }
    printf("%-40s right %d reported %d wrong %d  %.2f ms a launch  %s\n", c.first.c_str(), right, reported, wrong,
           1e3 * seconds / seeds, message.c_str());
  }
  return 0;
}
