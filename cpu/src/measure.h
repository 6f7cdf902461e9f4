// How fast the kernels of the table in use are on this machine: what a machine profile is made of (targets/cpu/profile).
//
// Every function runs one kind of work on `threads` threads at once, each on memory of its own, because a core is slower when its
// neighbours (or the other hyperthread of it) are busy, and a pipeline keeps all of them so. It returns the seconds of one piece of
// work on one thread, once for each of several slices of time. Of work that takes long these are the seconds in which a thread ran,
// whoever else had its core meanwhile.
#pragma once

#include <cstdint>
#include <vector>

#include "kitsune_cpu/kernels.h"
#include "kitsune_cpu/opcodes.h"

namespace kitsune::cpu {

// Seconds; none where there is no such work for the dtype.
using Slices = std::vector<double>;

// act(X W + bias) of X[M][K] and W[K][N], all of `type`.
Slices measure_gemm(DType type, Product product, const ProductShape& s, Activation act, int64_t threads);
// X^T Y of X[K][M] and Y[K][N], all of `type`, added to a matrix of the accumulator type.
Slices measure_outer(DType type, Product product, const ProductShape& s, int64_t threads);
// Packing of W[K][N], which lies in memory as that or as its transpose.
Slices measure_pack(DType type, Product product, int64_t K, int64_t N, bool transposed, int64_t threads);
// `n` elements of a micro-operation on the compute type; empty where the table has none.
Slices measure_vector(Opcode op, DType type, int64_t n, int64_t threads);
// `n` elements of the storage type into its compute type, or back.
Slices measure_load(DType type, int64_t n, int64_t threads);
Slices measure_store(DType type, int64_t n, int64_t threads);
// `rows` rows of `n` elements folded along the row (how: index into REDUCTIONS of bytecode.py), or into one row.
Slices measure_fold(int how, DType type, int64_t rows, int64_t n, bool into_row, int64_t threads);
// Copies of `bytes` bytes between two blocks, and writes to as many bytes of fresh pages.
Slices measure_copy(int64_t bytes, int64_t threads);
Slices measure_touch(int64_t bytes, bool huge, int64_t threads);

}  // namespace kitsune::cpu
