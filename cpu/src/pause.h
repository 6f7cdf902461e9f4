// What a worker does before it sleeps.
#pragma once

#include <thread>

namespace kitsune::cpu {

constexpr int kSpins = 256;  // about 5 us before a worker sleeps

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace kitsune::cpu
