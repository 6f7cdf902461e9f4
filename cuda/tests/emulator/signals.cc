// CTAs that signal through counters in global memory, and the rules of global memory; warps and the registers that they share.

#include "check.h"

namespace {

using namespace check;

enum Bug {
  kNone,
  kReleaseBeforeRead,
  kPlainFlag,
  kNoBarrierBeforeSignal,
  kNoGlobalFence,
  kConstantLoad,
  kOutside,
  kQueueTooShallow,
  kNotCooperative,
  kNotAtomic,
  kReadTooEarly,
};

constexpr u32 kWords = 512, kTiles = 6;

// --- an L2 ring from CTA 0 to CTA 1, read by ordinary loads or by bulk copies.
struct Shared {
  alignas(128) u32 block[kWords];
  Mbar full;
};
struct Params {
  const u32* x;
  u32 *ring, *y, *head, *tail;
};

template <bool Bulk, int Bug>
void ring(const Params& p) {
  constexpr u32 kDepth = 2;
  auto& s = shared<Shared>();
  u32 t = thread_id();
  if (t == 0) {
    mbar_init(s.full, 1);
    name(&s.full, "full");
    fence_mbar_init();
  }
  block_sync();
  for (u32 n = 0; n < kTiles; ++n) {
    u32* slot = p.ring + n % kDepth * kWords;
    if (block_id() == 0) {
      if (t == 0 && n >= kDepth) wait_ge(p.tail, n - kDepth + 1);
      bar_sync(1, 64);
      for (u32 i = t; i < kWords; i += 64) st_global(slot + i, ld_global(p.x + n * kWords + i));
      if (Bulk && Bug != kNoGlobalFence) fence_proxy_async_global();
      if (Bug != kNoBarrierBeforeSignal) bar_sync(1, 64);
      if (t == 0) {
        if (Bug == kPlainFlag)
          st_global(p.head, n + 1);
        else
          red_add_release(p.head, 1);
      }
      continue;
    }
    if (t == 0) wait_ge(p.head, n + 1);
    if (Bulk) {
      if (t == 0) {
        if (Bug != kNoGlobalFence) fence_proxy_async_global();
        mbar_expect_tx(s.full, kWords * 4);
        bulk_load(s.block, slot, kWords * 4, s.full);
        if (Bug == kReleaseBeforeRead) red_add_release(p.tail, 1);
      }
      mbar_wait(s.full, n & 1);
    } else {
      bar_sync(1, 64);
      if (Bug == kReleaseBeforeRead && t == 0) red_add_release(p.tail, 1);
    }
    for (u32 i = t; i < kWords; i += 64) {
      u32 v = Bulk ? ld_shared(s.block + i) : Bug == kConstantLoad ? ld_global(slot + i) : ld_l2(slot + i);
      st_global(p.y + n * kWords + i + (Bug == kOutside && n == kTiles - 1 ? 1 : 0), v + 1);
    }
    bar_sync(1, 64);
    if (t == 0 && Bug != kReleaseBeforeRead) red_add_release(p.tail, 1);
  }
}

template <bool Bulk, int Bug>
Result ring_trial(u64 seed, bool& right) {
  std::vector<u32> x(kTiles * kWords), y(x.size()), slots(2 * kWords), flags(64);
  for (u32 i = 0; i < x.size(); ++i) x[i] = i * 7;
  use(x, "x");
  use(y, "y");
  use(slots, "ring");
  use(flags, "flags");
  Params p{x.data(), slots.data(), y.data(), flags.data(), flags.data() + 32};
  Result r = launch({2, 64, 1, sizeof(Shared), true}, seed, [&] { ring<Bulk, Bug>(p); });
  right = true;
  for (u32 i = 0; i < x.size(); ++i) right &= y[i] == x[i] + 1;
  return r;
}

// --- A -> B -> C with a skip connection A -> C: it must be as deep as the path that it bypasses.
template <int SkipDepth>
struct Skip {
  u32 path[2][32], skip[SkipDepth][32];
  Mbar path_full[2][2], path_empty[2][2], skip_full[SkipDepth], skip_empty[SkipDepth];
  u32 between[2][32];
};
template <int SkipDepth>
Result skip_trial(u64 seed, bool& right) {
  std::vector<u32> y(8 * 32);
  use(y, "y");
  Result r = launch({1, 96, 1, sizeof(Skip<SkipDepth>)}, seed, [&] {
    auto& s = shared<Skip<SkipDepth>>();
    u32 role = thread_id() / 32, l = lane_id();
    if (thread_id() == 0) {
      for (auto& stage : s.path_full)
        for (Mbar& b : stage) mbar_init(b, 32);
      for (auto& stage : s.path_empty)
        for (Mbar& b : stage) mbar_init(b, 32);
      for (Mbar& b : s.skip_full) mbar_init(b, 32);
      for (Mbar& b : s.skip_empty) mbar_init(b, 32);
      name(s.skip_empty, "skip_empty");
      name(s.skip_full, "skip_full");
    }
    block_sync();
    // B works on groups of two tiles, so C's first tile comes after A's second.
    for (u32 n = 0; n < 8; ++n) {
      u32 slot = n % 2, parity = n / 2 & 1, skip = n % SkipDepth, skip_parity = n / SkipDepth & 1;
      if (role == 0) {
        mbar_wait(s.skip_empty[skip], skip_parity ^ 1);
        st_shared(&s.skip[skip][l], n * 100 + l);
        mbar_arrive(s.skip_full[skip]);
        mbar_wait(s.path_empty[0][slot], parity ^ 1);
        st_shared(&s.path[slot][l], n + l);
        mbar_arrive(s.path_full[0][slot]);
      } else if (role == 1) {
        if (slot == 0) continue;
        for (u32 i = 0; i < 2; ++i) mbar_wait(s.path_full[0][i], parity);
        for (u32 i = 0; i < 2; ++i) {
          mbar_wait(s.path_empty[1][i], parity ^ 1);
          st_shared(&s.between[i][l], 2 * ld_shared(&s.path[i][l]));
          mbar_arrive(s.path_full[1][i]);
          mbar_arrive(s.path_empty[0][i]);
        }
      } else {
        mbar_wait(s.path_full[1][slot], parity);
        mbar_wait(s.skip_full[skip], skip_parity);
        st_global(&y[n * 32 + l], ld_shared(&s.between[slot][l]) + ld_shared(&s.skip[skip][l]));
        mbar_arrive(s.path_empty[1][slot]);
        mbar_arrive(s.skip_empty[skip]);
      }
    }
  });
  right = true;
  for (u32 i = 0; i < y.size(); ++i) right &= y[i] == 2 * (i / 32 + i % 32) + i / 32 * 100 + i % 32;
  return r;
}

// --- the last CTA to finish adds up: atomic_add_acq_rel orders the others' stores. No CTA waits, so the launch need not be
// cooperative.
template <int Bug>
Result last_trial(u64 seed, bool& right) {
  constexpr u32 kBlocks = 40;
  std::vector<u32> parts(kBlocks * 32), counter(1), y(32);
  use(parts, "parts");
  use(counter, "counter");
  use(y, "y");
  struct S {
    u32 last;
  };
  Result r = launch({kBlocks, 64, 1, sizeof(S)}, seed, [&] {
    auto& s = shared<S>();
    u32 t = thread_id();
    if (t < 32) st_global(&parts[block_id() * 32 + t], block_id() + t);
    block_sync();
    if (t == 0) st_shared(&s.last, u32{atomic_add_acq_rel(counter.data(), 1) + 1 == kBlocks});
    if (Bug == kNotCooperative && t == 0) wait_ge(counter.data(), kBlocks);
    block_sync();
    if (!ld_shared(&s.last) || t >= 32) return;
    u32 sum = 0;
    for (u32 b = 0; b < kBlocks; ++b) sum += ld_l2(&parts[b * 32 + t]);
    st_global(&y[t], sum);
  });
  right = true;
  for (u32 t = 0; t < 32; ++t) right &= y[t] == kBlocks * (kBlocks - 1) / 2 + kBlocks * t;
  return r;
}

// --- CTAs add to the same floats; the last one to finish reads them. Additions race with everything but additions.
template <int Bug>
Result adding_trial(u64 seed, bool& right) {
  constexpr u32 kBlocks = 6;
  std::vector<float> sums(64);
  std::vector<u32> counter(1);
  std::vector<float> y(64);
  use(sums, "sums");
  use(counter, "counter");
  use(y, "y");
  struct S {
    u32 last;
  };
  Result r = launch({kBlocks, 32, 1, sizeof(S)}, seed, [&] {
    auto& s = shared<S>();
    u32 t = thread_id();
    float* const mine = sums.data() + t % 8 * 4;
    red_add(mine, {1.0f, 2.0f, 3.0f, 4.0f});
    if (Bug == kNotAtomic && block_id() == 1 && t == 3) st_global(mine, ld_l2(mine) + 1);
    if (Bug != kNotAtomic || block_id() != 1 || t != 3) red_add(mine, 1.0f);
    red_add(sums.data() + 32 + t % 16 * 2, {1.0f, 0.5f});
    block_sync();
    if (t == 0) st_shared(&s.last, u32{Bug == kReadTooEarly || atomic_add_acq_rel(counter.data(), 1) + 1 == kBlocks});
    block_sync();
    if (!ld_shared(&s.last)) return;
    for (u32 i = t; i < 64; i += 32) st_global(&y[i], ld_l2(&sums[i]));
  });
  right = true;
  for (u32 i = 0; i < 64; ++i) {
    const float four = static_cast<float>(kBlocks * 4), two = static_cast<float>(kBlocks * 2);
    right &= y[i] == (i < 32 ? four * (static_cast<float>(i % 4 + 1) + (i % 4 ? 0 : 1)) : two * (i % 2 ? 0.5f : 1));
  }
  return r;
}

// --- warps: shuffles, and a syncwarp that must not be left out.
template <bool Sync>
Result warp_trial(u64 seed, bool& right) {
  std::vector<float> y(32);
  use(y, "y");
  struct S {
    float v[32];
  };
  Result r = launch({1, 32, 1, sizeof(S)}, seed, [&] {
    auto& s = shared<S>();
    u32 l = lane_id();
    float sum = static_cast<float>(l);
    for (u32 m = 1; m < 32; m *= 2) sum += shfl_xor(sum, m);
    st_shared(&s.v[l], sum + static_cast<float>(shfl(l, 5)));
    if (Sync) syncwarp();
    st_global(&y[l], ld_shared(&s.v[31 - l]) + static_cast<float>(l));
  });
  right = true;
  for (u32 l = 0; l < 32; ++l) right &= y[l] == static_cast<float>(496 + 5 + l);
  return r;
}

// --- registers: a loader gives up some of its share of the launch (384 threads of 168), two consumers wait for theirs.
template <int Loader, int Consumer>
Result registers_trial(u64 seed, bool& right) {
  std::vector<u32> y(384);
  use(y, "y");
  Result r = launch({1, 384, 1, 0}, seed, [&] {
    if (thread_id() < 128)
      reg_dec<Loader>();
    else
      reg_inc<Consumer>();
    st_global(&y[thread_id()], thread_id());
  });
  right = true;
  for (u32 t = 0; t < 384; ++t) right &= y[t] == t;
  return r;
}
// Warps of one warpgroup that do not agree.
template <int Other>
Result half_trial(u64 seed, bool& right) {
  right = false;
  return launch({1, 128, 1, 0}, seed, [&] {
    if (thread_id() < 64) reg_dec<40>();
    if (thread_id() >= 64 && Other) reg_dec<Other ? Other : 24>();
  });
}

Case all[] = {
    {"correct registers, 24 and twice 240", registers_trial<24, 240>},
    {"correct registers, 40 and twice 232", registers_trial<40, 232>},
    {"registers of the SM that the launch does not have", registers_trial<32, 240>},
    {"setmaxnreg by half a warpgroup", half_trial<0>},
    {"two setmaxnreg in one warpgroup", half_trial<32>},
    {"correct ring, loads", ring_trial<false, kNone>},
    {"correct ring, bulk copies", ring_trial<true, kNone>},
    {"slot released before it is read", ring_trial<false, kReleaseBeforeRead>},
    {"slot released before the copy has landed", ring_trial<true, kReleaseBeforeRead>},
    {"no release on the flag", ring_trial<false, kPlainFlag>},
    {"no barrier before the flag", ring_trial<false, kNoBarrierBeforeSignal>},
    {"no global proxy fence", ring_trial<true, kNoGlobalFence>},
    {"constant load of written data", ring_trial<false, kConstantLoad>},
    {"store outside of a buffer", ring_trial<false, kOutside>},
    {"correct skip connection", skip_trial<2>},
    {"skip queue too shallow", skip_trial<1>},
    {"correct last block", last_trial<kNone>},
    {"waiting for blocks that are not resident", last_trial<kNotCooperative>},
    {"correct additions", adding_trial<kNone>},
    {"a load and a store beside additions", adding_trial<kNotAtomic>},
    {"sums read before all have added", adding_trial<kReadTooEarly>},
    {"correct shuffles", warp_trial<true>},
    {"no syncwarp", warp_trial<false>},
};

}  // namespace
