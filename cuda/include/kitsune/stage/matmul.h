// A matmul of a tile with stationary weights: 64 rows x K by K x N, accumulated in float registers.
//
// Comes in: the tile's K columns in pieces (a concatenation costs nothing), in registers or where they lie in shared memory, and
// packed weights. Goes out: accumulators in the tile layout. The weights are packed into *chunks* of 128 bytes of K (64 16-bit or
// 32 tf32 values) by N columns with the 128-byte swizzle, which wgmma reads through a descriptor and mma.sync through ldmatrix
// alike. They stay in shared memory (`ResidentWeights`) or pass through it (`StreamedWeights`).
//
// `Product` is one block of N <= 256 columns in flight: feed it pieces, then `complete` it. Between the two its accumulators belong
// to the tensor core, and so do the registers of A. A `Rolling` product waits as it goes, for operands that are fetched on the way
// and for rings of weights shorter than K.
#pragma once

#include "kitsune/global.h"
#include "kitsune/queue/smem.h"
#include "kitsune/stage/image.h"

namespace kitsune {

// What the tensor core makes of 32 columns of K.
template <class T>
struct Operand {
  static constexpr int kStep = 16;           // columns of one instruction
  static constexpr int kBlocksPerChunk = 2;  // blocks of 32 columns in 128 bytes
};
template <>
struct Operand<Tf32> {
  static constexpr int kStep = 8;
  static constexpr int kBlocksPerChunk = 1;
};

// --- where A comes from. Each source gives the instruction operands of its block b: words [step][4].

// Instructions for a block of a tile of width W: a 16-bit tile of width 8 fills half of one.
template <class T, int W>
constexpr int kSteps = (kBlock<W> + Operand<T>::kStep - 1) / Operand<T>::kStep;

// 16-bit values in registers.
template <class T, int W>
struct RegisterSource {
  using Type = T;
  static constexpr int kBlocks = W / kBlock<W>, kStepsPerBlock = kSteps<T, W>;
  static constexpr bool kFetched = false;
  const u32 (&v)[W / 4];

  KITSUNE_DEVICE void block(u32 (&a)[kStepsPerBlock][4], int b) const {
    if constexpr (W == 8) {
      const u32 zero = opaque_zero();
      a[0][0] = v[2 * b], a[0][1] = v[2 * b + 1], a[0][2] = zero, a[0][3] = zero;
    } else {
      KITSUNE_UNROLL
      for (int s = 0; s < kStepsPerBlock; ++s) KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i) a[s][i] = v[(b * kStepsPerBlock + s) * 4 + i];
    }
  }
};

// f32 values in registers, for tf32 products. Element order of the instruction: (row, e) = (g, 0) (g + 8, 0) (g, 1) (g + 8, 1).
template <int W>
struct RegisterSource<Tf32, W> {
  using Type = Tf32;
  static constexpr int kBlocks = W / kBlock<W>, kStepsPerBlock = kSteps<Tf32, W>;
  static constexpr bool kFetched = false;
  const float (&v)[W / 2];

  KITSUNE_DEVICE void block(u32 (&a)[kStepsPerBlock][4], int b) const {
    KITSUNE_UNROLL
    for (int s = 0; s < kStepsPerBlock; ++s) {
      int k = (b * kStepsPerBlock + s) * 4;
      a[s][0] = to_tf32(v[k]), a[s][1] = to_tf32(v[k + 2]), a[s][2] = to_tf32(v[k + 1]), a[s][3] = to_tf32(v[k + 3]);
    }
  }
};

// A register image: `Image` in shared memory, or an entry of a queue. `Get` gives vector i.
template <class T, int W, class Get>
struct ImageSource {
  using Type = T;
  static constexpr int kBlocks = W / kBlock<W>, kStepsPerBlock = kSteps<T, W>;
  static constexpr bool kFetched = true;
  Get get;

  KITSUNE_DEVICE void block(u32 (&a)[kStepsPerBlock][4], int b) const {
    KITSUNE_UNROLL
    for (int s = 0; s < kStepsPerBlock; ++s) {
      U4 v = get(b * kStepsPerBlock + s);
      if constexpr (Operand<T>::kStep == 8) {
        a[s][0] = to_tf32(from_bits(v.x)), a[s][1] = to_tf32(from_bits(v.z)), a[s][2] = to_tf32(from_bits(v.y)),
        a[s][3] = to_tf32(from_bits(v.w));
      } else {
        a[s][0] = v.x, a[s][1] = v.y, a[s][2] = v.z, a[s][3] = v.w;
      }
    }
  }
};
template <class T, int W, class Get>
KITSUNE_DEVICE ImageSource<T, W, Get> image_source(Get get) {
  return {get};
}

// Rows of an array of the operand's own type in global memory, or of its staged tile: `row` are this thread's two rows.
template <class T, class E, int W, int Bytes>
struct RowSource {
  using Type = T;
  static constexpr int kBlocks = W / kBlock<W>, kStepsPerBlock = kSteps<T, W>, kColumns = kOwned<W>;
  static constexpr bool kFetched = true;
  const void* row[2];
  bool valid[2];
  int columns;
  Lane lane;

  KITSUNE_DEVICE void block(u32 (&a)[kStepsPerBlock][4], int b) const {
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      int column = first_column<W>(lane, b);
      if constexpr (Operand<T>::kStep == 8) {
        float x[kColumns];
        load_row<E, kColumns, Bytes>(x, row[h], column, columns, valid[h]);
        KITSUNE_UNROLL
        for (int s = 0; s < kStepsPerBlock; ++s) a[s][h] = to_tf32(x[2 * s]), a[s][2 + h] = to_tf32(x[2 * s + 1]);
      } else {
        u32 x[kColumns / 2];
        load_halves<kColumns, Bytes>(x, row[h], column, columns, valid[h]);
        KITSUNE_UNROLL
        for (int s = 0; s < kStepsPerBlock; ++s)
          a[s][h] = x[2 * s], a[s][2 + h] = W == 8 ? opaque_zero() : x[W == 8 ? 0 : 2 * s + 1];
      }
    }
  }
};

// A tile of 32 rows: the tensor core multiplies each thread's row twice, and nobody reads the second product. A row of zeros would
// be registers of A that ptxas knows (arch/wgmma.h).
template <class Source>
struct OneRow {
  using Type = typename Source::Type;
  static constexpr int kBlocks = Source::kBlocks, kStepsPerBlock = Source::kStepsPerBlock;
  static constexpr bool kFetched = Source::kFetched;
  Source source;

  KITSUNE_DEVICE void block(u32 (&a)[kStepsPerBlock][4], int b) const {
    source.block(a, b);
    KITSUNE_UNROLL
    for (int s = 0; s < kStepsPerBlock; ++s) a[s][1] = a[s][0], a[s][3] = a[s][2];
  }
};
template <class Source>
KITSUNE_DEVICE OneRow<Source> one_row(const Source& source) {
  return {source};
}

// Are operands read where they lie in shared memory?
template <class Source>
constexpr bool kInPlace = false;

#if KITSUNE_SM >= 900

// Boxes of a tile in shared memory, which the tensor core reads where they lie. Their columns are in the order of memory, and so
// are the rows of the weights that they are multiplied with.
template <class T, int W>
struct BoxSource {
  static_assert(W % kBoxColumns == 0);
  using Type = T;
  static constexpr int kBlocks = W / 32, kStepsPerBlock = 2;
  static constexpr bool kFetched = false;
  const u8* boxes;

  // Of step `s` of block `b`. An address ends far below the upper word, whose bits the compiler knows.
  KITSUNE_DEVICE u64 descriptor(int b, int s) const {
    const u64 first = desc_k128(boxes);
    return first >> 32 << 32 | static_cast<u32>(first + b / 2 * (kBoxBytes / 16) + b % 2 * 4 + 2 * s);
  }
};
template <class T, int W>
constexpr bool kInPlace<BoxSource<T, W>> = true;

#endif

// --- where B comes from: chunks of K in order. `N`: columns of a chunk.

template <int N>
struct ResidentWeights {
  static constexpr bool kAwaited = false, kStreamed = false;
  const u8* image;
  KITSUNE_DEVICE const u8* next(int c) { return image + c * N * 128; }
  KITSUNE_DEVICE void finish() {}
  KITSUNE_DEVICE void release() {}
};

// A consumer's place in the ring of weights: chunks are taken in order, and given back in the same order, later.
template <class Queue>
struct StreamedWeights {
  static constexpr bool kAwaited = false, kStreamed = true;
  Queue queue;
  typename Queue::At taken = {};
  typename Queue::At returned = {};

  KITSUNE_DEVICE const u8* next(int) {
    queue.rd_acquire(taken);
    const u8* chunk = queue.entry(taken);
    taken.advance();
    return chunk;
  }
  KITSUNE_DEVICE void finish() { queue.rd_finish(); }
  KITSUNE_DEVICE void release() {
    queue.rd_release(returned);
    returned.advance();
  }
};

// The next chunks of streamed weights, all of which are there before the product begins: no wait parts its instructions, and it
// ends as one group, which a wait can leave in flight as a whole.
template <int Chunks, class Weights>
struct AwaitedWeights {
  static constexpr bool kAwaited = true, kStreamed = true;
  const u8* chunk[Chunks];

  KITSUNE_DEVICE explicit AwaitedWeights(Weights& weights) {
    KITSUNE_UNROLL
    for (int c = 0; c < Chunks; ++c) chunk[c] = weights.next(c);
  }
  KITSUNE_DEVICE const u8* next(int c) const { return chunk[c]; }
};

#if KITSUNE_SM < 900

// One step of a warp on mma.sync: ldmatrix brings B for 8 columns and 64 bytes of K at a time.
template <class T, int N, int Steps>
KITSUNE_DEVICE void multiply_block(float (&d)[N / 2], const u32 (&a)[Steps][4], const u8* chunk, int half) {
  constexpr int kUnits = Operand<T>::kStep == 8 ? Steps * 2 : 4;  // 16-byte units of K in the block
  u32 lane = lane_id();
  KITSUNE_UNROLL
  for (int n = 0; n < N / 8; ++n) KITSUNE_UNROLL
  for (int u = 0; u < kUnits; u += 4) {
    u32 row = n * 8 + lane % 8, unit = half * 4 + u + lane / 8;
    u32 b[4];
    ldmatrix_x4(b, chunk + row * 128 + ((unit ^ (row & 7)) & 7) * 16);
    float c[4] = {d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]};
    KITSUNE_UNROLL
    for (int s = 0; s < 2; ++s)
      if (u / 2 + s < Steps) {
        u32 pair[2] = {b[2 * s], b[2 * s + 1]};
        mma<T>(c, a[u / 2 + s], pair);
      }
    d[4 * n] = c[0], d[4 * n + 1] = c[1], d[4 * n + 2] = c[2], d[4 * n + 3] = c[3];
  }
}

#endif

// Accumulators of N columns, from block `first` of a tile of width W on, that start from a stationary vector: a bias for nothing.
template <int N, int W>
KITSUNE_DEVICE void start_from(float (&d)[N / 2], const float* vector, const Lane& lane, int first) {
  constexpr int kOwn = kOwned<W>;
  KITSUNE_UNROLL
  for (int b = 0; b < N / kBlock<W>; ++b) {
    float x[kOwn];
    load_vector<kOwn>(x, vector, first_column<W>(lane, first + b));
    KITSUNE_UNROLL
    for (int i = 0; i < 2 * kOwn; ++i) d[2 * kOwn * b + i] = x[2 * (i / 4) + i % 2];
  }
}

#if KITSUNE_SM >= 900

// wgmma_wait<pending>, for a number that the compiler knows once loops are unrolled.
template <int N = 0>
KITSUNE_DEVICE void wait_for(int pending) {
  if constexpr (N < 7) {
    if (pending != N) return wait_for<N + 1>(pending);
  }
  wgmma_wait<N>();
}

#endif

// Until at most `pending` of the latest products are in flight.
template <int N>
KITSUNE_DEVICE void await(float (&d)[N], int pending) {
#if KITSUNE_SM >= 900
  wait_for(pending);
  pin(d);
#endif
}

// Gives back the chunks [From, To) of weights, which products have read.
template <int From, int To, class Weights>
KITSUNE_DEVICE void release(Weights& weights) {
  if constexpr (To > From) weights.finish();
  KITSUNE_UNROLL
  for (int c = From; c < To; ++c) weights.release();
}

// The results of a product are there once this returns: the latest `pending` ones may still be in flight. `Done` of its `Blocks`
// of K were complete before, so their weights are given back already; resident ones never are.
template <int N>
KITSUNE_DEVICE void complete(float (&d)[N], int pending) {
  await(d, pending);
}
template <class T, int Done, int Blocks, int N, class Weights>
KITSUNE_DEVICE void complete(float (&d)[N], int pending, Weights& weights) {
  constexpr int kPerChunk = Operand<T>::kBlocksPerChunk;
  await(d, pending);
  release<Done / kPerChunk, (Blocks + kPerChunk - 1) / kPerChunk>(weights);
}

// One block of N columns of a matmul, in flight. `Started`: the accumulators hold what the product is added to. Positions are
// template parameters (`First`: blocks of K issued before this piece, `Done`: blocks known to be complete), because the code
// generator knows them, and the compiler would need long to find them out.
template <class T, int N, bool Rolling, bool Started, class Weights>
struct Product {
  static constexpr int kPerChunk = Operand<T>::kBlocksPerChunk;
  static constexpr int kGroup = 2;  // blocks between waits of a rolling product
  float (&d)[N / 2];
  Weights& weights;
  const u8* chunk = nullptr;  // the one that is being multiplied with

  KITSUNE_DEVICE Product(float (&accumulators)[N / 2], Weights& w) : d(accumulators), weights(w) {
#if KITSUNE_SM >= 900
    pin(d);
    wgmma_fence();
#else
    if constexpr (!Started) {
      KITSUNE_UNROLL
      for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
    }
#endif
  }

  template <int First, int Done, class Source>
  KITSUNE_DEVICE void feed(const Source& source) {
    static_assert(!Source::kFetched || Rolling, "operands fetched on the way need a rolling product");
    if constexpr (Source::kFetched) {
      feed_fetched<First, Done>(source);
    } else if constexpr (Rolling) {
      feed_rolling<First, Done, 0>(source);
    } else {
      KITSUNE_UNROLL
      for (int b = 0; b < Source::kBlocks; ++b) issue_from(source, b, First + b);
    }
  }

  // After the last piece. A rolling product closes its groups as it goes, and an empty one would be a wgmma of its own.
  KITSUNE_DEVICE void commit() {
    if constexpr (!Rolling) close_group();
  }

 private:
  // Block `b` of a source, which is the product's block `block`.
  template <class Source>
  KITSUNE_DEVICE void issue_from(const Source& source, int b, int block) {
    if constexpr (kInPlace<Source>) {
      u64 a[Source::kStepsPerBlock];
      KITSUNE_UNROLL
      for (int s = 0; s < Source::kStepsPerBlock; ++s) a[s] = source.descriptor(b, s);
      issue(a, block);
    } else {
      u32 a[Source::kStepsPerBlock][4];
      source.block(a, b);
      issue(a, block);
    }
  }

  // `a`: of each step the four words of a thread, or a descriptor.
  template <class A, int Steps>
  KITSUNE_DEVICE void issue(const A (&a)[Steps], int block) {
    const int half = block % kPerChunk;
    if (half == 0) chunk = weights.next(block / kPerChunk);
#if KITSUNE_SM >= 900
    // The wait for weights is a loop, and ptxas moves copies of A across it: the constructor's fence no longer orders them, and
    // ptxas would put its own into the loop, where it may not stand (C7519: every wgmma serialised). Without a wait and without
    // registers of A it is left out: each fence ends a group.
    constexpr bool kCopies = sizeof(A) != sizeof(u64);
    if (Rolling || (half == 0 && !Weights::kAwaited && (kCopies || Weights::kStreamed))) wgmma_fence();
    const u64 b = desc_k128(chunk) + half * 4;
    KITSUNE_UNROLL
    for (int s = 0; s < Steps; ++s) {
      const bool adds = Started || block != 0 || s != 0;
      if constexpr (kCopies)
        wgmma_rs<T, N>(d, a[s], b + 2 * s, adds);
      else
        wgmma_ss<T, N, false, false>(d, a[s], b + 2 * s, adds);
    }
#else
    multiply_block<T, N, Steps>(d, a, chunk, half);
#endif
  }

  KITSUNE_DEVICE void close_group() {
#if KITSUNE_SM >= 900
    wgmma_commit();
#endif
  }

  // Operands that stay in registers: one group may be in flight while the next is issued.
  template <int First, int Done, int From, class Source>
  KITSUNE_DEVICE void feed_rolling(const Source& source) {
    KITSUNE_UNROLL
    for (int b = From; b < From + kGroup; ++b)
      if (b < Source::kBlocks) issue_from(source, b, First + b);
    close_group();
#if KITSUNE_SM >= 900
    wgmma_wait<1>();  // the accumulators themselves are still in flight: no pin
#endif
    release<Done / kPerChunk, (First + From) / kPerChunk>(weights);
    if constexpr (From + kGroup < Source::kBlocks) feed_rolling<First, First + From, From + kGroup>(source);
  }

  // The next group is fetched while the tensor core works on this one. It goes to other registers, and the wait is for all:
  // registers of A that are loaded again while a wgmma may read them rely on the compiler to keep them apart.
  template <int First, int Done, class Source>
  KITSUNE_DEVICE void feed_fetched(const Source& source) {
    u32 a[kGroup][Source::kStepsPerBlock][4];
    fetch(a, source, 0);
    step_fetched<First, Done, 0>(source, a);
  }
  template <int First, int Done, int From, int Steps, class Source>
  KITSUNE_DEVICE void step_fetched(const Source& source, const u32 (&a)[kGroup][Steps][4]) {
    constexpr int kNext = From + kGroup < Source::kBlocks ? From + kGroup : Source::kBlocks;
    KITSUNE_UNROLL
    for (int b = From; b < kNext; ++b) issue(a[b - From], First + b);
    close_group();
    u32 next[kGroup][Steps][4];
    if constexpr (kNext < Source::kBlocks) fetch(next, source, kNext);
    await(d, 0);
    release<Done / kPerChunk, (First + kNext) / kPerChunk>(weights);
    if constexpr (kNext < Source::kBlocks) step_fetched<First, First + kNext, kNext>(source, next);
  }
  template <int Steps, class Source>
  KITSUNE_DEVICE void fetch(u32 (&a)[kGroup][Steps][4], const Source& source, int first) {
    KITSUNE_UNROLL
    for (int i = 0; i < kGroup; ++i)
      if (first + i < Source::kBlocks) source.block(a[i], first + i);
  }
};

}  // namespace kitsune
