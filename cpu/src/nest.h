// Loop nests over (rows, *extents) with byte strides per operand: normalised once, walked by carry.
#pragma once

#include <cstdint>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

struct Dim {
  int64_t n;  // extent; times the tile's rows when `rows`
  bool rows = false;
  int tag = -1;                 // the loop dimension an `index` operation names; such a dimension is never merged
  std::vector<int64_t> stride;  // bytes, per operand
  int64_t extent(int64_t tile_rows) const { return rows ? n * tile_rows : n; }
};

using Nest = std::vector<Dim>;

// The nest (rows, *extents) of operands whose strides are given in bytes: strides[o][0] for the row, then one per extent.
Nest make_nest(const std::vector<int64_t>& extents, const std::vector<std::vector<int64_t>>& strides);

// The nest of tiles that have all their `rows`: the rows are a loop like others, which merges with what lies around it.
void fix_rows(Nest& nest, int64_t rows);

// Drops dimensions of extent 1 and merges neighbours that are one loop for every operand.
void simplify(Nest& nest);

// A short innermost loop, and one further out that is one loop with it for every operand, become one: the elements of [steps, rows,
// 6] in a tile of some rows are pieces of 6 x rows, however many steps there are.
bool join_short(Nest& nest);

// Every operand is dense in both loops, or one number or one row is repeated: a block of both is made of whole rows.
bool repeats_along(const Dim& outer, const Dim& inner, const std::vector<int64_t>& item_sizes);

// Exchanges the innermost loop with the one around it where that is longer, and the innermost one is short, or more of the operands
// lie along the outer one (a few columns, each of them dense).
void exchange_short(Nest& nest, int64_t tile_rows);

// Byte strides of an operand: (row, *strides).
std::vector<int64_t> byte_strides(const Operand& x);

// Calls f() for every index of the outer dimensions dims[0..count), the last fastest; `pointers` move along.
template <class F>
void walk(const Dim* dims, int count, int64_t rows, char** pointers, int operands, int64_t* index, F&& f) {
  for (int d = 0; d < count; ++d) index[d] = 0;
  for (;;) {
    f();
    int d = count - 1;
    for (; d >= 0; --d) {
      int64_t n = dims[d].extent(rows);
      if (++index[d] < n) {
        for (int o = 0; o < operands; ++o) pointers[o] += dims[d].stride[o];
        break;
      }
      for (int o = 0; o < operands; ++o) pointers[o] -= dims[d].stride[o] * (n - 1);
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace kitsune::cpu
