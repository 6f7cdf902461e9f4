// A program with all of a kernel table and without a part of it, as a rule the strips: every bit must agree.
#pragma once

#include <cmath>
#include <cstring>

#include "programs.h"

namespace kitsune::cpu::test {

inline std::vector<Bytes> outputs(const Call& source, unsigned seed) {
  std::vector<int64_t> words = encode(source);
  Executable exe(parse(words.data(), words.size()));
  Arrays arrays(exe.call(), seed);
  ThreadPool pool(1);
  std::string error = exe.run(arrays.in_pointers.data(), arrays.out_pointers.data(), pool);
  CHECK(error.empty(), "%s", error.c_str());
  return arrays.outs;
}

inline bool same(DType type, const char* a, const char* b) {
  if (std::memcmp(a, b, item_size(type)) == 0) return true;
  return is_float(type) && std::isnan(get(type, a)) && std::isnan(get(type, b));
}

inline void compare_without(
    const char* name, const Call& call, unsigned seed,
    void (*leave_out)(KernelTable&) = [](KernelTable& table) { table.strips = nullptr; }) {
  const KernelTable with = kernels();
  KernelTable without = with;
  leave_out(without);
  set_kernels(&without);
  const std::vector<Bytes> want = outputs(call, seed);
  set_kernels(&with);
  const std::vector<Bytes> got = outputs(call, seed);
  set_kernels(nullptr);
  set_isa(with.isa);
  for (size_t o = 0; o < want.size(); ++o) {
    const Array& array = call.arrays[static_cast<size_t>(call.operands) + o];
    for (int64_t i = 0; i < array.elements; ++i) {
      const size_t byte = static_cast<size_t>(i) * item_size(array.dtype);
      if (same(array.dtype, &want[o][byte], &got[o][byte])) continue;
      CHECK(false, "%s [%s], seed %u: result %zu of type %s is %g at %lld, not %g", name, with.isa, seed, o,
            dtype_name(array.dtype), get(array.dtype, &got[o][byte]), static_cast<long long>(i), get(array.dtype, &want[o][byte]));
      break;
    }
  }
}

}  // namespace kitsune::cpu::test
