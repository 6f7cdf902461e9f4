// One kernel for each function whose machine code is dear when it is spelled wrongly. For inspection only.
#include "kitsune/arch/arch.h"

using namespace kitsune::arch;

struct Params {
  u32* words;
};

struct Storage {
  u32 words[32];
  Mbar bar;
};

// The data of the function under test must be read before it, and used after it, so that the order is a matter of the function.
KITSUNE_KERNEL(k_mbar_wait, Params, p, 128) {
  Storage& s = shared<Storage>();
  mbar_wait(s.bar, 1);
  st_global(p.words, ld_shared(s.words));
}

KITSUNE_KERNEL(k_mbar_arrive, Params, p, 128) {
  Storage& s = shared<Storage>();
  const u32 v = ld_shared(s.words);
  mbar_arrive(s.bar);
  st_global(p.words, v);
}

KITSUNE_KERNEL(k_wait_ge, Params, p, 128) {
  wait_ge(p.words, 7);
  st_global(p.words + 2, ld_l2(p.words + 1));
}

KITSUNE_KERNEL(k_red_add_release, Params, p, 128) {
  st_global(p.words + 1, 5u);
  red_add_release(p.words, 1);
}

#if KITSUNE_SM == 900
KITSUNE_KERNEL(k_mbar_wait_cluster, Params, p, 128) {
  Storage& s = shared<Storage>();
  mbar_wait_cluster(s.bar, 1);
  st_global(p.words, ld_shared(s.words));
}

KITSUNE_KERNEL(k_mbar_arrive_remote, Params, p, 128) {
  Storage& s = shared<Storage>();
  const u32 v = ld_shared(s.words);
  mbar_arrive_remote(s.bar, 1);
  st_global(p.words, v);
}

KITSUNE_KERNEL(k_st_async, Params, p, 128) {
  Storage& s = shared<Storage>();
  const u32 v = ld_global(p.words);
  st_async(reinterpret_cast<U4*>(s.words), 1, U4{v, v, v, v}, s.bar);
}

KITSUNE_KERNEL(k_fence_proxy_async, Params, p, 128) {
  Storage& s = shared<Storage>();
  st_shared(s.words, 1u);
  fence_proxy_async();
  st_global(p.words, 1u);
}

KITSUNE_KERNEL(k_fence_proxy_async_global, Params, p, 128) {
  st_global(p.words, 1u);
  fence_proxy_async_global();
  st_global(p.words, 2u);
}
#endif
