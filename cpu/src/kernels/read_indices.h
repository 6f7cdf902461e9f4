// Indices of any integer type, brought to one type and compared with what they may name.
#pragma once

#include "scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

template <class T>
bool read_indices(int64_t n, const void* from_, int64_t step, int64_t count, int64_t* to) {
  const char* from = static_cast<const char*>(from_);
  uint64_t outside = 0;
  auto read = [&](int64_t stride) {
    KITSUNE_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
      T v;
      __builtin_memcpy(&v, from + i * stride, sizeof v);
      int64_t wide = int64_t(v);
      if constexpr (kSame<T, uint64_t>) wide = v > uint64_t(INT64_MAX) ? INT64_MAX : wide;
      to[i] = wide;
      outside |= uint64_t(wide) >= uint64_t(count);
    }
  };
  if (step == int64_t(sizeof(T)))
    read(sizeof(T));
  else
    read(step);
  return outside == 0;
}

inline ReadIndicesFn read_indices_function(DType type) {
  return with_type<ReadIndicesFn>(type, [](auto tag) -> ReadIndicesFn {
    using T = typename decltype(tag)::type;
    if constexpr (TypeTraits<T>::kFloating || TypeTraits<T>::kBool) {
      return nullptr;
    } else {
      return &read_indices<T>;
    }
  });
}

}  // namespace kitsune::cpu::KITSUNE_ISA
