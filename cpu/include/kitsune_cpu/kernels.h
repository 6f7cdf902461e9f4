// The micro-kernels of one instruction set, as a table of functions. The executor knows nothing else about the machine.
//
// One translation unit per ISA (src/isa_*.cc, each compiled with its own flags, all including the same kernel templates) defines a
// table; `kernels()` picks the best one the CPU at hand supports, once. Nothing here depends on XLA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kitsune::cpu {

// Same order as DTYPES in kitsune_jax/targets/cpu/bytecode.py.
enum class DType : int8_t { kBool, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kF16, kBF16, kF32, kF64 };
constexpr int kNumDTypes = 13;
constexpr size_t kItemSize[kNumDTypes] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
inline size_t item_size(DType t) { return kItemSize[static_cast<int>(t)]; }

enum class Opcode : int16_t;  // opcodes.h
struct StripKernels;          // strips.h

// How W[k][n] is stored for a matmul: panels of `panel_width` columns, each K (padded to the ISA's k-step) deep, padded with zeros.
// kTiles is of bfloat16, for X of bfloat16.
enum class Panel : int8_t { kF32, kBF16, kF64, kTiles };

// How a product of bfloat16 operands is multiplied: as widened f32 (FMA), by the instructions that add pairs of bfloat16 products
// to f32 (VDPBF16PS), or by tiles of a matrix unit (AMX). kBest leaves it to the table. What a table does not have falls back to
// the next of tiles, dots, widened that it has. Same order as PRODUCTS in kitsune_jax/targets/cpu/bytecode.py.
enum class Product : int8_t { kBest, kWidened, kDots, kTiles };
constexpr int kNumProducts = 4;

// C[M][N] = X[M][K] W[K][N]; of a weight gradient, C[M][N] += X[K][M]^T Y[K][N].
struct ProductShape {
  int64_t M, N, K;
};

struct PackSource {  // element (k, n) is src[k_offset[k] + n_offset[n]]
  const void* src;
  DType dtype;
  int64_t K, N;
  const int64_t* k_offset;  // K element offsets
  const int64_t* n_offset;  // N element offsets
};

// What a matmul makes of its sums; bytecode.py says what each one computes. float64 sums take kNone and kRelu only.
enum class Activation : int8_t { kNone, kRelu, kLeakyRelu, kElu, kLogistic, kTanh, kSilu, kGeluTanh, kGeluErf, kScale };
constexpr int kNumActivations = 10;
constexpr size_t kActivationParameters[kNumActivations] = {0, 0, 1, 1, 0, 0, 1, 2, 1, 1};

// C[m][n] = act(sum_k X[m][k] * W[k][n] + bias[n]), accumulated in f32 (f64 for kF64 panels), for any M >= 1, N >= 1, K >= 1.
// X and C rows have no alignment requirement; nothing outside C[0..M)[0..N) is written and nothing outside X[0..M)[0..K) is read.
struct GemmArgs {
  int64_t M, N, K;
  const void* x;
  DType x_dtype;  // kF32, kBF16, kF16 or kF64 (kF64 panels only)
  int64_t lda;    // elements between rows of X
  const void* w;  // packed
  Panel panel;
  const void* bias;  // N floats (doubles for kF64 panels), or nullptr
  Activation act;
  void* c;
  DType c_dtype;  // kF32, kBF16, kF16, kF64
  int64_t ldc;
  void* scratch;               // 64-byte aligned, gemm_scratch_bytes(args) bytes
  float act_a = 0, act_b = 0;  // parameters of `act`
  bool adds = false;           // C, which is float32, is part of the sums; not of kF64 panels
  // kF16 or kBF16: sums are rounded to it before the bias is added, and again before `act`; kF32: they are not. Not of kF64 panels.
  DType rounds = DType::kF32;
};

// How the sums C[M][N] of a weight gradient lie: groups of this many columns one after the other, in each of them row after row.
// The blocks that a kernel adds to then follow each other in memory. In dense rows of a wide C every row of a block is on a page of
// its own, and the lines of all rows compete for the same places of the caches.
constexpr int64_t kSumGroup = 32;
// Columns of the group that begins at column n, or has it.
inline int64_t group_columns(int64_t N, int64_t n) {
  const int64_t left = N - n / kSumGroup * kSumGroup;
  return left < kSumGroup ? left : kSumGroup;
}
// Where the sum (m, n) is.
inline int64_t sum_offset(int64_t M, int64_t N, int64_t m, int64_t n) {
  return n / kSumGroup * kSumGroup * M + m * group_columns(N, n) + n % kSumGroup;
}

// C[m][n] += sum_r X[r][m] * Y[r][n], r < R: the product of a weight gradient. C is float (double for kF64 X and Y), in groups of
// columns.
struct OuterArgs {
  int64_t R, M, N;
  const void* x;
  const void* y;
  DType dtype;       // of X and Y: kF32, kBF16, kF16 or kF64
  Panel panel;       // panel_for(dtype, ...)
  int64_t ldx, ldy;  // elements between rows
  void* c;
  void* scratch;       // 64-byte aligned, outer_scratch_bytes(args) bytes
  bool first = false;  // C is written, whatever lies there, not added to
};

// dst, a, b, c, d: dense arrays of `n` elements of the compute type (bool as 0/1 bytes; float16/bfloat16 never). imm: Micro.imm.
using VectorFn = void (*)(int64_t n, void* dst, const void* a, const void* b, const void* c, const void* d, const double* imm);
// dense dst[n] of the compute type <- strided src of the storage type (stride in elements, may be 0 or negative), and the reverse.
using LoadFn = void (*)(int64_t n, void* dst, const void* src, int64_t stride);
using StoreFn = void (*)(int64_t n, void* dst, int64_t stride, const void* src);
// Folds n elements of the storage type at `stride` into *acc (accumulator type: double for floating sums/products when `wide`, else
// float for f16/bf16/f32, else the type itself).
using FoldFn = void (*)(int64_t n, const void* src, int64_t stride, void* acc);
// acc[i] = acc[i] (how) src[i * stride], i < n, same accumulator types: for reductions over rows.
using FoldRowFn = void (*)(int64_t n, const void* src, int64_t stride, void* acc);
// acc[r] = the fold of the n elements at src + r * row, r < count, which lie one after the other.
using FoldShortFn = void (*)(int64_t count, int64_t n, const void* src, int64_t row, void* acc);
// Rows at offsets in bytes, each `bytes` long and dense. Row i: to + i * step <- from + at[i], or the reverse.
using GatherRowsFn = void (*)(int64_t n, const int64_t* at, const void* from, void* to, int64_t step, int64_t bytes);
using ScatterRowsFn = void (*)(int64_t n, const int64_t* at, const void* from, int64_t step, void* to, int64_t bytes);
// to[i][j] = from[j][i] for i < rows, j < columns; the steps are bytes from a row to the next, whose elements lie side by side.
using TransposeFn = void (*)(int64_t rows, int64_t columns, const void* from, int64_t from_step, void* to, int64_t to_step);
// Rows that lie far from each other are asked for before their turn. `known`: at[0..known) says where rows lie, those of later
// calls among them; 0: the rows lie one after another. `far`: they come from memory and not from a cache.
struct Ahead {
  int64_t known = 0;
  bool far = false;
};
constexpr int64_t kMostAhead = 96;  // rows that are asked for before their turn
// into[r] <- the fold of the dense rows of `width` elements at from + at[i], start[r] <= i < start[r + 1], in their order; no run
// is empty. Accumulator types as of FoldFn, narrow.
using FoldRunsFn = void (*)(int64_t runs, const int64_t* start, const int64_t* at, const void* from, int64_t width, Ahead ahead,
                            void* const* into);
// As FoldRunsFn of sums in float32, of float rows that lie apart and are multiplied: row i is row row[i] of a tile, whose elements
// are multiplied by the `factors` numbers at factor + row[i] * step, each by one of them, width / factors elements by the same.
using FoldScaledFn = void (*)(int64_t runs, const int64_t* start, const int64_t* at, const void* from, int64_t width,
                              const int64_t* row, const float* factor, int64_t step, int64_t factors, Ahead ahead,
                              void* const* into);
// out[i * step + h] <- the sum, in float32, of the products of elements [h * inner, (h + 1) * inner) of the float rows at
// x + x_at[i] and y + y_at[i], h < heads.
using DotRowsFn = void (*)(int64_t n, const int64_t* x_at, const void* x, const int64_t* y_at, const void* y, int64_t heads,
                           int64_t inner, float* out, int64_t step);
// As FoldRunsFn for whole runs of narrow rows, by their indices, straight into the dense rows of `table`: row index[i] <- the fold
// of its run. The rows from *filled + 1 up to the first index beyond it, and so on, that no index names get the identity; *filled
// is the largest index so far.
constexpr int64_t kNarrow = 16;  // elements
using FoldNarrowFn = void (*)(int64_t n, const int64_t* index, const int64_t* at, const void* from, int64_t width, void* table,
                              int64_t* filled);
// n indices at `step` bytes as int64 (what is beyond becomes its largest number). Returns whether all are in [0, count).
using ReadIndicesFn = bool (*)(int64_t n, const void* from, int64_t step, int64_t count, int64_t* to);
// The row at from + at[i] is folded into the accumulators at table + to[i], for i < n in order. Accumulator types as of FoldFn.
using FoldTableFn = void (*)(int64_t n, const int64_t* at, const int64_t* to, const void* from, int64_t width, void* table);
// out[i] <- row[at[i]], or 0 where at[i] < 0.
using TakeFn = void (*)(int64_t n, const int32_t* at, const void* row, void* out);

// c[i][j] = sum_k x[i][k] y[j][k], summed in f32, of matrices that are used once: y is not packed. One of y_n and y_k is 1.
struct DotArgs {
  int64_t m, n, k;
  const void* x;
  int64_t ldx;  // elements between rows of x, whose K elements are contiguous
  const void* y;
  int64_t y_n, y_k;
  void* c;
  DType c_dtype;  // kF32, kBF16 or kF16
  int64_t ldc;
  bool symmetric;  // are x and y one matrix? y_k is 1 then
  void* scratch;   // m * (k + n) floats, 64-byte aligned
};
using DotFn = void (*)(const DotArgs&);

// out[j] <- e^(x[j] factor - shift) for j < n, and their sum in float32, before they are rounded. `out` may be `x`.
using ExpRowFn = float (*)(int64_t n, const void* x, float factor, float shift, void* out);

struct KernelTable {
  const char* isa;  // "amx", "avx512bf16", "avx512", "avx2", "generic"
  // Panels used for a product with a weight of this dtype, of this shape (for a tile of rows; shorter ones use the same panels).
  // `product` matters for bf16 only: other weights have one kind of panel.
  Panel (*panel_for)(DType weight, Product product, const ProductShape& shape);
  size_t (*packed_bytes)(Panel, int64_t K, int64_t N);
  // Packs the panels [panel_begin, panel_end) (so that several threads can share one weight).
  int64_t (*panel_count)(Panel, int64_t N);
  void (*pack)(Panel, const PackSource&, int64_t panel_begin, int64_t panel_end, void* out);
  size_t (*gemm_scratch_bytes)(const GemmArgs&);
  void (*gemm)(const GemmArgs&);
  VectorFn (*vector)(Opcode, DType compute);  // nullptr: not defined for this type
  // Where bit k of `constants` is set, operand k is one number, not an array of n. nullptr: there is no code for those.
  VectorFn (*vector_with)(Opcode, DType compute, unsigned constants);
  VectorFn (*convert)(DType to, DType from);  // compute types; float -> int saturates, NaN -> 0, as XLA does
  LoadFn (*load)(DType compute, DType storage);
  StoreFn (*store)(DType storage, DType compute);
  FoldFn (*fold)(int how, DType storage, bool wide);  // how: index into REDUCTIONS of bytecode.py (not arg*)
  FoldRowFn (*fold_row)(int how, DType storage, bool wide);
  FoldShortFn (*fold_short)(int how, DType storage, int64_t longest);  // of rows of 1 to `longest` elements; nullptr: there is none
  size_t (*outer_scratch_bytes)(const OuterArgs&);
  void (*outer)(const OuterArgs&);
  GatherRowsFn gather_rows;
  ScatterRowsFn scatter_rows;
  TransposeFn (*transpose)(int64_t item_bytes);  // nullptr: there is none for elements of this size
  FoldRunsFn (*fold_runs)(int how, DType storage);
  FoldNarrowFn (*fold_narrow)(int how, DType storage);
  FoldScaledFn (*fold_scaled)(DType storage);  // nullptr: no 16-bit or 32-bit float
  DotRowsFn (*dot_rows)(DType storage);        // as fold_scaled
  ReadIndicesFn (*read_indices)(DType integer);
  FoldTableFn (*fold_table)(int how, DType storage, bool wide);
  TakeFn (*take)(int64_t item_bytes);
  DotFn (*dot)(DType);                      // of x and y; nullptr: there is none, and y is packed
  ExpRowFn (*exp_row)(DType x, DType out);  // nullptr: there is none for these; there is one for float32
  const StripKernels* strips;
  // Called by a thread that has used gemm or outer, when it is done with its part of a call (ThreadsPart does); nullptr where there
  // is nothing to do.
  void (*end_of_call)();
};

// In whose life a thread uses gemm or outer: what the table keeps for the thread meanwhile goes with it, however that ends.
class ThreadsPart {
 public:
  explicit ThreadsPart(const KernelTable& table) : end_(table.end_of_call) {}
  explicit ThreadsPart(void (*end_of_call)()) : end_(end_of_call) {}
  ThreadsPart(const ThreadsPart&) = delete;
  ThreadsPart& operator=(const ThreadsPart&) = delete;
  ~ThreadsPart() {
    if (end_ != nullptr) end_();
  }

 private:
  void (*end_)();
};

const KernelTable& kernels();                // the best for this CPU, or the one named by set_isa
bool set_isa(const char* name);              // for tests; false if this CPU cannot run it (or it was not built)
void set_kernels(const KernelTable* table);  // for tests: a table of their own, which lives on; nullptr: the best
int available_isas(const char** names, int capacity);

}  // namespace kitsune::cpu
