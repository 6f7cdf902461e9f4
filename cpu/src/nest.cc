#include "nest.h"

#include <cstddef>
#include <cstdlib>
#include <utility>

namespace kitsune::cpu {
namespace {

constexpr int64_t kShortLoop = 8;     // below this a loop is short however its operands lie
constexpr int64_t kMostColumns = 32;  // so many columns are kept one after the other (MOST_COLUMNS in memory.py)

// More operands have their neighbours along the outer loop than along the inner one.
bool lies_along(const Dim& outer, const Dim& inner) {
  int along = 0;
  for (size_t o = 0; o < inner.stride.size(); ++o) {
    const int64_t a = std::abs(outer.stride[o]), b = std::abs(inner.stride[o]);
    if (a != 0 && b != 0) along += a < b ? 1 : b < a ? -1 : 0;
  }
  return along > 0;
}

}  // namespace

std::vector<int64_t> byte_strides(const Operand& x) {
  int64_t item = static_cast<int64_t>(item_size(x.ref.dtype));
  std::vector<int64_t> s{x.row_stride * item};
  for (int64_t v : x.strides) s.push_back(v * item);
  return s;
}

Nest make_nest(const std::vector<int64_t>& extents, const std::vector<std::vector<int64_t>>& strides) {
  Nest nest;
  for (size_t d = 0; d <= extents.size(); ++d) {
    Dim dim{d == 0 ? 1 : extents[d - 1], d == 0, -1, {}};
    for (const auto& s : strides) dim.stride.push_back(s[d]);
    nest.push_back(std::move(dim));
  }
  return nest;
}

void fix_rows(Nest& nest, int64_t rows) {
  for (Dim& dim : nest)
    if (dim.rows) dim.n *= rows, dim.rows = false;
}

void simplify(Nest& nest) {
  Nest out;
  for (Dim& dim : nest) {
    if (dim.n == 1 && !dim.rows) continue;
    bool merge = !out.empty() && !dim.rows && dim.tag < 0 && out.back().tag < 0;
    if (merge)
      for (size_t o = 0; o < dim.stride.size(); ++o) merge = merge && out.back().stride[o] == dim.n * dim.stride[o];
    if (merge) {
      out.back().n *= dim.n;
      out.back().stride = dim.stride;
    } else {
      out.push_back(std::move(dim));
    }
  }
  nest = std::move(out);
}

bool join_short(Nest& nest) {
  if (nest.size() < 3 || nest.back().rows || nest.back().tag >= 0 || nest.back().n > kMostColumns) return false;
  for (size_t d = 0; d + 2 < nest.size(); ++d) {
    const Dim& inner = nest.back();
    bool one = nest[d].tag < 0;
    for (size_t o = 0; o < inner.stride.size(); ++o) one = one && nest[d].stride[o] == inner.n * inner.stride[o];
    if (!one) continue;
    Dim joined = nest[d];
    joined.n *= inner.n;
    joined.stride = inner.stride;
    nest.back() = std::move(joined);
    nest.erase(nest.begin() + static_cast<std::ptrdiff_t>(d));
    return true;
  }
  return false;
}

bool repeats_along(const Dim& outer, const Dim& inner, const std::vector<int64_t>& item_sizes) {
  if (inner.rows || inner.n < 2) return false;
  for (size_t o = 0; o < inner.stride.size(); ++o) {
    const bool dense = inner.stride[o] == item_sizes[o] && (outer.stride[o] == inner.n * item_sizes[o] || outer.stride[o] == 0);
    if (inner.stride[o] != 0 && !dense) return false;
  }
  return true;
}

void exchange_short(Nest& nest, int64_t tile_rows) {
  if (nest.size() < 2) return;
  Dim &outer = nest[nest.size() - 2], &inner = nest.back();
  if (inner.rows || outer.extent(tile_rows) <= inner.n || inner.n > kMostColumns) return;
  if (inner.n < kShortLoop || lies_along(outer, inner)) std::swap(outer, inner);
}

}  // namespace kitsune::cpu
