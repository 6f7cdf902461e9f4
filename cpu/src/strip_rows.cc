// Joining short loops into one whose strips are whole rows.
#include "strip_rows.h"

#include <algorithm>

#include "kitsune_cpu/strips.h"

namespace kitsune::cpu {
namespace {

// Offsets in elements of the first `strip` elements of the loops from `first` on, whose outermost one may run further than it does;
// nothing where an offset is negative or no element's.
std::optional<std::vector<int64_t>> offsets(const Nest& nest, size_t first, size_t operand, int64_t item, int64_t strip) {
  std::vector<int64_t> found;
  for (int64_t e = 0; e < strip; ++e) {
    int64_t left = e, bytes = 0;
    for (size_t d = nest.size(); d-- > first;) {
      const int64_t n = d == first ? left + 1 : nest[d].n;
      bytes += left % n * nest[d].stride[operand];
      left /= n;
    }
    if (bytes < 0 || bytes % item != 0) return std::nullopt;
    found.push_back(bytes / item);
  }
  return found;
}

// An operand of the loops from `first` on, of which a strip has `step` elements. Nothing where the window would be longer than a
// strip.
std::optional<RowsOperand> operand_of(const Nest& nest, size_t first, size_t operand, int64_t item, int64_t step, int64_t row,
                                      int64_t strip) {
  const auto at = offsets(nest, first, operand, item, step);
  if (!at) return std::nullopt;
  const int64_t stride = nest[first].stride[operand], most = *std::max_element(at->begin(), at->end());
  RowsOperand found;
  found.next = stride;
  if (most == 0 && stride == 0) {
    found.how = RowsOperand::kNumber;
    return found;
  }
  bool dense = stride == row * item;
  for (int64_t e = 0; e < step; ++e) dense = dense && (*at)[static_cast<size_t>(e)] == e;
  if (dense) return found;
  found.how = stride == 0 ? RowsOperand::kRepeated : RowsOperand::kPicked;
  if (most >= strip) return std::nullopt;
  found.window = {0};
  for (int64_t rows = 1; rows <= step / row; ++rows)
    found.window.push_back(*std::max_element(at->begin(), at->begin() + static_cast<std::ptrdiff_t>(rows * row)) + 1);
  for (int64_t e = 0; e < strip; ++e)
    found.picks.push_back(static_cast<int32_t>((*at)[static_cast<size_t>(std::min(e, step - 1))]));
  // No vector picks elements that lie further apart than it has lanes.
  const int64_t lanes = strip / kStripVectors;
  for (int64_t k = 0; found.how == RowsOperand::kPicked && k < strip; k += lanes) {
    const auto [least, most_here] = std::minmax_element(found.picks.begin() + k, found.picks.begin() + k + lanes);
    if (*most_here - *least >= lanes) return std::nullopt;
  }
  return found;
}

std::optional<ShortRows> joined_from(const Nest& nest, size_t first, const std::vector<int64_t>& item_sizes, size_t loads,
                                     int64_t strip) {
  ShortRows found;
  found.row = 1;
  for (size_t d = first + 1; d < nest.size(); ++d) {
    if (nest[d].rows || nest[d].tag >= 0) return std::nullopt;
    found.row *= nest[d].n;
    if (found.row > strip) return std::nullopt;
  }
  found.step = strip / found.row * found.row;
  found.nest.assign(nest.begin(), nest.begin() + static_cast<std::ptrdiff_t>(first) + 1);
  found.nest.back().n *= found.row;
  for (size_t o = 0; o < item_sizes.size(); ++o) {
    auto operand = operand_of(nest, first, o, item_sizes[o], found.step, found.row, strip);
    if (!operand || (o >= loads && operand->how != RowsOperand::kDense)) return std::nullopt;
    found.nest.back().stride[o] = operand->how == RowsOperand::kDense ? item_sizes[o] : 0;
    found.operands.push_back(std::move(*operand));
  }
  return found;
}

}  // namespace

std::optional<ShortRows> short_rows(const Nest& nest, const std::vector<int64_t>& item_sizes, size_t loads, int64_t tile_rows,
                                    int64_t strip) {
  for (size_t first = nest.size() - 1; first-- > 0;) {
    if (nest[first].tag >= 0 || nest.back().tag >= 0) return std::nullopt;
    auto found = joined_from(nest, first, item_sizes, loads, strip);
    if (!found) return std::nullopt;
    if (found->nest.back().extent(tile_rows) >= 2 * strip) return found;
  }
  return std::nullopt;
}

bool lie_apart(const Nest& nest, const std::vector<int64_t>& item_sizes, int64_t row) {
  const Dim &inner = nest.back(), &outer = nest[nest.size() - 2];
  for (size_t o = 0; o < item_sizes.size(); ++o)
    if (inner.stride[o] == item_sizes[o] && outer.stride[o] != 0 && outer.stride[o] != row * item_sizes[o]) return true;
  return false;
}

Block pick_table(const RowsOperand& x, int64_t strip) {
  const int64_t lanes = strip / kStripVectors;
  Block block(static_cast<size_t>(strip + 2 * kStripVectors) * sizeof(int32_t), "constants");
  auto* place = static_cast<int32_t*>(static_cast<void*>(block.data()));
  int32_t *first = place + strip, *read = first + kStripVectors;
  for (int64_t k = 0; k < kStripVectors; ++k) {
    const auto begin = x.picks.begin() + k * lanes;
    const auto [least, most] = std::minmax_element(begin, begin + lanes);
    for (int64_t j = 0; j < lanes; ++j) place[k * lanes + j] = begin[j] - *least;
    first[k] = *least, read[k] = (2 << (*most - *least)) - 1;
  }
  return block;
}

}  // namespace kitsune::cpu
