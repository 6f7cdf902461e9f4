// Kernel tables with tile products on a model of the instructions (tile_model.h), for tests on machines without them.
#pragma once

#include "kitsune_cpu/kernels.h"

namespace kitsune::cpu::test {

struct Model {
  KernelTable table;
  const int64_t *configured, *released;  // how often, by all threads together
  bool (*holds_tiles)();                 // does this thread?
};

}  // namespace kitsune::cpu::test

namespace kitsune::cpu::amx_model {
test::Model make_model();  // beside generic kernels
}
#if defined(__x86_64__)
namespace kitsune::cpu::amx_model_avx512 {
test::Model make_model();  // beside those of avx512bf16
}
#endif

namespace kitsune::cpu::test {

struct Models {
  const Model* all[2];
  int count = 0;
};

// Those whose vector instructions this CPU has.
inline const Models& models() {
  static const Models m = [] {
    Models found;
    static const Model plain = amx_model::make_model();
    found.all[found.count++] = &plain;
#if defined(__x86_64__)
    const char* isas[8];
    for (int i = 0, n = available_isas(isas, 8); i < n; ++i) {
      if (__builtin_strcmp(isas[i], "avx512bf16") != 0) continue;
      static const Model wide = amx_model_avx512::make_model();
      found.all[found.count++] = &wide;
    }
#endif
    return found;
  }();
  return m;
}

}  // namespace kitsune::cpu::test
