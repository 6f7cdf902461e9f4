#include "nest.h"

#include <cstddef>

namespace kitsune::cpu {

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

}  // namespace kitsune::cpu
