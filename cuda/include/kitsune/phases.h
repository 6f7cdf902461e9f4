// Calls of several phases in one kernel: which CTAs share out a part, and where all of them meet between two phases.
//
// Comes in: the CTAs of a cooperative launch, all of which run at the same time. Goes out: a part of a phase reads what parts of
// earlier phases have written. Invariants: all consumer threads of the grid meet at the end of a phase (`end_of_phase`), and all
// threads of a CTA between two parts (`end_of_part`), because the next part's loader writes to the shared memory of this one.
//
// What orders a read behind the write of another CTA: the writer's bar.sync, the release of one of its CTA's threads, the acquire
// of one thread of the reader's CTA, and the reader's bar.sync ("PTX ISA, Memory Consistency Model": release is cumulative). The
// acquire empties the L1, so ordinary loads see the data. Bulk copies read by another proxy and need its fence on both sides
// ("PTX ISA, Async proxy"). Loads through the non-coherent cache (ld.global.nc) never see it for certain: a kernel of several
// phases has none (KITSUNE_PHASES in arch/memory.h).
#pragma once

#include "kitsune/stage/gradient.h"

namespace kitsune {

constexpr u32 kWholeCta = 5;  // the named barrier of all warpgroups of a CTA; 1 to 4 are those of the consumers

// The CTAs that share out the tiles of a part: `blocks` of them, of which this is number `block`.
struct Share {
  u32 block, blocks;

  static KITSUNE_DEVICE Share all() { return {block_id(), grid_size()}; }
  // `most` CTAs from number `first` on, or as many whole instances of `ctas` as there are, and one of them at least.
  static KITSUNE_DEVICE Share of(u32 first, u32 most, u32 ctas) {
    const u32 grid = grid_size(), skipped = first % grid;
    const u32 block = block_id() >= skipped ? block_id() - skipped : block_id() + grid - skipped;
    return {block, (most < grid ? most : grid) / ctas * ctas};
  }
  KITSUNE_DEVICE bool is_mine() const { return block < blocks; }
};

// Where something lies: `byte` bytes behind the kernel's buffer number `buffer`.
struct Pointer {
  u32 buffer;
  i64 byte;
};
// `p`: the kernel's parameters, a pointer for each buffer.
template <class Params>
KITSUNE_DEVICE u8* pointer(const Params& p, const Pointer& at) {
  return reinterpret_cast<u8* const*>(&p)[at.buffer] + at.byte;
}

// By every thread of the CTA, when its role in a part is done.
template <int Lanes>
KITSUNE_DEVICE void end_of_part() {
  syncwarp();  // of the loader's warp one thread may have fetched
#if KITSUNE_SM >= 900
  fence_proxy_async();         // the next part's bulk copies write where ordinary stores have written
  fence_proxy_async_global();  // and read what they have written
#endif
  bar_sync(kWholeCta, (1 + Lanes) * kGroupThreads);
}

// By the consumers of every CTA, behind `end_of_part`: returns once those of all CTAs have ended phase number `phase`. `arrived`
// is zero when the kernel starts and counts CTAs, so a phase has ended when all have arrived once more. The loader need not wait:
// it fetches weights only, which no phase makes.
template <int Lanes>
KITSUNE_DEVICE void end_of_phase(u32* arrived, u32 phase) {
  if (thread_id() == kGroupThreads) {
    red_add_release(arrived, 1);
    wait_ge(arrived, (phase + 1) * grid_size());
  }
  bar_sync(kAllLanes, Lanes * kGroupThreads);
#if KITSUNE_SM >= 900
  fence_proxy_async_global();
#endif
}

}  // namespace kitsune
