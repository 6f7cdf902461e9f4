// A kernel as the driver shim loads it: one parameter struct of pointers, shared memory, a sum over a cluster.

#include "kitsune/arch/arch.h"

using namespace kitsune::arch;

struct Params {
  const float* x;
  float* y;
};
struct Shared {
  float part;
};

// y[b] = the sum of the x of b's cluster.
KITSUNE_KERNEL(kitsune_region, Params, p, 64) {
  auto& s = shared<Shared>();
  if (thread_id() == 0) st_shared(&s.part, ld_global(p.x + block_id()));
  cluster_sync();
  if (thread_id() == 0) {
    float sum = 0;
    for (u32 r = 0; r < cluster_size(); ++r) sum += ld_cluster(&s.part, r);
    st_global(p.y + block_id(), sum);
  }
#if !defined(EXIT_EARLY)
  cluster_sync();
#endif
}
