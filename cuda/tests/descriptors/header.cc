// The functions of kitsune/arch/wgmma.h on the host: prints descriptors of addresses in shared memory. Its assembly is left out.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#define KITSUNE_SM 900
#define __device__
#define __forceinline__ inline
static size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
static size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }

// `asm volatile(...)` becomes a call of `removed`, `asm(...)` nothing.
static void removed(int) {}
#define removed(...) static_cast<void>(0)
#define asm removed
#define volatile(...) (0)
#include "kitsune/arch/wgmma.h"
#undef asm

using namespace kitsune::arch;

int main() {
  for (size_t address = 0; address < 232448; address += 1024) {
    const void* p = reinterpret_cast<const void*>(address);
    std::printf("%zu 16 1024 %llu\n", address, static_cast<unsigned long long>(desc_k128(p)));
    for (u32 leading : {1024u, 8192u, 16384u})
      for (u32 stride : {1024u, 2048u})
        std::printf("%zu %u %u %llu\n", address, leading, stride, static_cast<unsigned long long>(desc_mn128(p, leading, stride)));
  }
}
