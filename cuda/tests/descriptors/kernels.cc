// Three kernels around the device library's own products, one of which each case runs. KERNEL and the CASE_... macros say which.
#include "recorded.h"

namespace {

using namespace kitsune;

constexpr u32 kThreads = CASE_LANES * 128;

struct Params {
  const u8* in;  // weights: an image; panels: nothing; products: the shared memory
  u64* records;
  u8* out;  // the shared memory after all is written, or the products
  u8* workspace;
};
struct alignas(1024) Memory {
  u8 bytes[CASE_BYTES];
};

[[maybe_unused]] void fill(u8* to, const u8* from, u32 bytes) {
  for (u32 i = thread_id() * 16; i < bytes; i += kThreads * 16)
    st_shared(reinterpret_cast<U4*>(to + i), ld_global(reinterpret_cast<const U4*>(from + i)));
  fence_proxy_async();
  block_sync();
}

#if defined(KERNEL_WEIGHTS)

// A tile of one or two pieces times CASE_N columns.
void run(const Params& p, u8* base) {
  fill(base, p.in, CASE_BYTES);
  ResidentWeights<CASE_N> weights{base};
  float d[CASE_N / 2];
  Product<CASE_TYPE, CASE_N, false, false, ResidentWeights<CASE_N>> product(d, weights);
  using Value = decltype(CASE_TYPE{}, Element<CASE_ELEMENT>::Bits{});
  constexpr bool kHalf = sizeof(Value) == 2;
  using Register = std::conditional_t<kHalf, u32, float>;
  constexpr int kFirst = CASE_K0 / kBlock<CASE_K0>;
  Register v0[kHalf ? CASE_K0 / 4 : CASE_K0 / 2] = {};
  product.template feed<0, 0>(RegisterSource<CASE_TYPE, CASE_K0>{v0});
#if CASE_K1
  Register v1[kHalf ? CASE_K1 / 4 : CASE_K1 / 2] = {};
  product.template feed<kFirst, 0>(RegisterSource<CASE_TYPE, CASE_K1>{v1});
  constexpr int kBlocks = kFirst + CASE_K1 / kBlock<CASE_K1>;
#else
  constexpr int kBlocks = kFirst;
#endif
  product.commit();
  complete<CASE_TYPE, 0, kBlocks>(d, 0, weights);
}

#elif defined(KERNEL_PANELS)

// Elements say where they come from: 1 + (lane * 64 + row) * width + column.
template <int W>
void put(const Panel<CASE_TYPE, W>& panel, const Lane& lane, u32 group) {
  panel.clear(lane, 1 + group);
  const bool valid[2] = {true, true};
  for (int b = 0; b < W / kBlock<W>; ++b) {
    u32 pairs[kOwned<W>];
    for (int i = 0; i < kOwned<W>; ++i) {
      u32 code = 1 + (group * 64 + lane.row + 8 * (i % 2)) * W + first_column<W>(lane, b) + i / 2 * 2;
      pairs[i] = code | (code + 1) << 16;
    }
    panel.put(lane, b, pairs, valid);
  }
}

void run(const Params& p, u8* base) {
  const Lane lane = Lane::mine();
  constexpr u32 kX = (CASE_K0 + 63) / 64 * kPanelBlock, kY = (CASE_K1 + 63) / 64 * kPanelBlock;
  constexpr int kAll = (CASE_K0 + 63) / 64, kBlocks = (kAll + CASE_LANES - 1) / CASE_LANES;
  const u32 group = thread_id() / kGroupThreads;
  const Panels panels{base, kX + kY, group};
  put(Panel<CASE_TYPE, CASE_K0>{panels.mine()}, lane, group);
  put(Panel<CASE_TYPE, CASE_K1>{panels.mine() + kX}, lane, group);
  const Gradient<CASE_TYPE, CASE_K0, CASE_K1, kBlocks, kAll, CASE_N, CASE_LANES> gradient{base, base + kX, panels.stride,
                                                                                          group * kBlocks};
  float sum[kBlocks][CASE_N / 2];
  for (auto& block : sum)
    for (float& v : block) v = 0.0f;
  gradient.add(sum, [] {});
  block_sync();
  if (thread_id() == 0) memcpy(p.out, base, CASE_BYTES);
}

#else

// One wgmma of descriptors that the test gives, as offsets from the memory's start.
void run(const Params& p, u8* base) {
  fill(base, p.in, CASE_BYTES);
  float d[CASE_N / 2];
  pin(d);
  wgmma_fence();
  u64 at = emulator::shared_offset(base) >> 4;
  wgmma_ss<CASE_TYPE, CASE_N, CASE_TRANS_A, CASE_TRANS_B>(d, u64{CASE_A} + at, u64{CASE_B} + at, false);
  wgmma_commit();
  wgmma_wait<0>();
  const Lane lane = Lane::mine();
  for (int i = 0; i < CASE_N / 2; ++i)
    memcpy(p.out + ((lane.row + 8 * (i / 2 % 2)) * CASE_N + i / 4 * 8 + lane.q * 2 + i % 2) * 4, &d[i], 4);
}

#endif

}  // namespace

KITSUNE_KERNEL(kitsune_region, Params, p, kThreads) {
  u8* const base = shared<Memory>().bytes;
  start_records(p.records, base);
  block_sync();
  run(p, base);
}
