// Positions in a loop, as the operation `index` counts them.
#include "positions.h"

#include <algorithm>
#include <type_traits>

namespace kitsune::cpu {
namespace {

// out[i] <- out[i - period] for period <= i < n, where the first period is there.
template <class T>
void repeat(T* out, int64_t period, int64_t n) {
  for (int64_t done = period; done < n; done *= 2) std::copy_n(out, std::min(done, n - done), out + done);
}

// value, value + 1, ...
template <class T>
void ascend(T* out, int64_t n, int64_t value) {
  if constexpr (sizeof(T) == 4 && !std::is_floating_point_v<T>) {  // in lanes of its own width, which compilers vectorise
    const auto first = static_cast<uint32_t>(value), end = static_cast<uint32_t>(n);
    for (uint32_t k = 0; k < end; ++k) out[k] = static_cast<T>(first + k);
  } else {
    for (int64_t k = 0; k < n; ++k) out[k] = static_cast<T>(value + k);
  }
}

// (position // divisor) % modulus along a run of positions.
template <class T>
void count_up(T* out, int64_t n, int64_t position, int64_t divisor, int64_t modulus) {
  int64_t rest = position % divisor, value = position / divisor % modulus;
  const bool repeats = modulus <= n / divisor;
  const int64_t head = repeats ? divisor * modulus : n;
  for (int64_t i = 0; i < head;) {
    const int64_t run = std::min(head - i, divisor == 1 ? modulus - value : divisor - rest);
    if (divisor == 1)
      ascend(out + i, run, value);
    else
      std::fill_n(out + i, run, static_cast<T>(value));
    i += run;
    rest = 0;
    value = divisor == 1 || value + 1 == modulus ? 0 : value + 1;
  }
  if (repeats) repeat(out, head, n);
}

template <class T>
void index_rows(char* to, int64_t m, int64_t n, int64_t position, int64_t row_step, bool along, int64_t divisor, int64_t modulus) {
  T* out = reinterpret_cast<T*>(to);
  if (along) {  // the same in every row
    count_up(out, n, position, divisor, modulus);
    return repeat(out, n, m * n);
  }
  for (int64_t r = 0; r < m; ++r, out += n, position += row_step) std::fill_n(out, n, static_cast<T>(position / divisor % modulus));
}

}  // namespace

void count_positions(DType type, char* to, int64_t m, int64_t n, int64_t position, int64_t step, bool along, int64_t divisor,
                     int64_t modulus) {
  switch (type) {
    case DType::kI8: return index_rows<int8_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI16: return index_rows<int16_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI32: return index_rows<int32_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kI64: return index_rows<int64_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU8: return index_rows<uint8_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU16: return index_rows<uint16_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU32: return index_rows<uint32_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kU64: return index_rows<uint64_t>(to, m, n, position, step, along, divisor, modulus);
    case DType::kF32: return index_rows<float>(to, m, n, position, step, along, divisor, modulus);
    default: return index_rows<double>(to, m, n, position, step, along, divisor, modulus);
  }
}

}  // namespace kitsune::cpu
