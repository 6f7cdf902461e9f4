// Microbenchmark of the L2 queue's signal: one thread of every CTA adds to a counter of its own, which nobody else touches.
//
// Comes in: settings: additions, and 1 to wait for each old value. Goes out: the counters (a cache line apart) and cycles of each
// CTA.
#include "kitsune/kitsune.h"

using namespace kitsune;

struct Params {
  const u32* settings;
  U2* cycles;
  u32* counters;
};

KITSUNE_KERNEL(kitsune_region, Params, p, 32) {
  u32 additions = ld_global(p.settings), fetch = ld_global(p.settings + 1);
  u32* counter = p.counters + block_id() * kCounterWords;
  if (thread_id() != 0) return;
  u64 start = cycles();
  for (u32 i = 0; i < additions; ++i) {
    if (fetch)
      atomic_add_acq_rel(counter, 1);
    else
      red_add_release(counter, 1);
  }
  u64 spent = cycles() - start;
  st_global(p.cycles + block_id(), U2{static_cast<u32>(spent), static_cast<u32>(spent >> 32)});
}
