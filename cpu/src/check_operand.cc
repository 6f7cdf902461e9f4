// Where operands reach: every element that an instruction names lies in memory of the stage, for all rows and indices.
#include <algorithm>

#include "checker.h"

namespace kitsune::cpu {

void Checker::bound(const std::string& what, int64_t v, int64_t low, int64_t high) const {
  if (v < low || v > high) reject(where, what + " is " + str(v) + ", not in " + str(low) + ".." + str(high));
}

int64_t Checker::count(const std::string& what, const std::vector<int64_t>& extents) const {
  if (extents.size() > kMaxLoopDims)
    reject(where, what + " has " + str(extents.size()) + " dimensions, more than " + str(kMaxLoopDims));
  Wide n = 1;
  for (int64_t e : extents) {
    bound(what + " extent", e, 1, kMaxCount);
    n *= e;
    if (n > kMaxCount) reject(where, what + " covers more than 2**48 elements");
  }
  return static_cast<int64_t>(n);
}

void Checker::reach(const std::string& what, const Ref& ref, const std::vector<int64_t>& extents,
                    const std::vector<int64_t>& strides, const char* verb) const {
  const bool array = ref.space == Space::kIn || ref.space == Space::kOut;
  if (ref.loop_strides.size() > counts.size())
    reject(where, what + " has strides for " + str(ref.loop_strides.size()) + " loops, inside of " + str(counts.size()));
  if (!ref.batch_strides.empty() && (!array || ref.batch_strides.size() != static_cast<size_t>(p.batch_axes)))
    reject(where, what + " has " + str(ref.batch_strides.size()) + " strides for " + str(p.batch_axes) + " batch axes" +
                      (array ? "" : ", and is no array"));
  if (strides.size() != extents.size())
    reject(where, what + " has " + str(strides.size()) + " strides for " + str(extents.size()) + " dimensions");
  bound(what + " offset", ref.offset, -kMaxCount, kMaxCount);
  Wide low = ref.offset, high = ref.offset;
  auto extend = [&](int64_t extent, int64_t stride) {
    bound(what + " stride", stride, -kMaxCount, kMaxCount);
    (stride < 0 ? low : high) += Wide{stride} * (extent - 1);
  };
  for (size_t d = 0; d < extents.size(); ++d) extend(extents[d], strides[d]);
  for (size_t l = 0; l < ref.loop_strides.size(); ++l) extend(counts[l], ref.loop_strides[l]);
  for (size_t a = 0; a < ref.batch_strides.size(); ++a) extend(p.axes[a], ref.batch_strides[a]);
  int64_t size = capacity(what, ref);
  if (low >= 0 && high < size) return;
  Wide bad = low < 0 ? low : high;
  std::string which =
      bad > kMaxCount * Wide{4096} || bad < -kMaxCount * Wide{4096} ? "far outside" : str(static_cast<int64_t>(bad)) + " of";
  std::string index = ref.space == Space::kScratch ? "" : " " + str(ref.index);
  reject(where, what + " " + verb + " element " + which + " " + space_name(ref.space) + index + ", which has " + str(size));
}

int64_t Checker::capacity(const std::string& what, const Ref& ref) const {
  auto exists = [&](size_t n) {
    if (ref.index < 0 || static_cast<size_t>(ref.index) >= n)
      reject(where, what + " names " + space_name(ref.space) + " " + str(ref.index) + ", but there are " + str(n));
  };
  auto typed = [&](DType t) {
    if (t != ref.dtype)
      reject(where, what + " takes " + space_name(ref.space) + " " + str(ref.index) + " as " + dtype_name(ref.dtype) +
                        ", but it is " + dtype_name(t));
  };
  int64_t item = static_cast<int64_t>(item_size(ref.dtype));
  switch (ref.space) {
    case Space::kIn:
      exists(p.inputs.size());
      typed(p.inputs[ref.index].dtype);
      return p.inputs[ref.index].elements;
    case Space::kOut:
      exists(p.outputs.size());
      typed(p.outputs[ref.index].dtype);
      return p.outputs[ref.index].elements;
    case Space::kScratch: exists(1); return p.stages[stage].scratch_bytes / item;
    case Space::kQueue: exists(p.queues.size()); return p.queues[ref.index].entry_bytes / item;
    default: {
      exists(p.preps.size());
      const Prep& prep = p.preps[ref.index];
      if (prep.local) reject(where, what + " names prepared operand " + str(ref.index) + ", which is packed for products only");
      if (prep.kind != PrepKind::kDense) reject(where, what + " names prepared operand " + str(ref.index) + ", a packed weight");
      typed(prep.dtype);
      return product(prep.n_extents);
    }
  }
}

void Checker::access(const std::string& what, const Ref& ref, bool write) {
  if (ref.space == Space::kQueue && ref.index >= 0 && static_cast<size_t>(ref.index) < p.queues.size()) {
    const Ring& q = p.queues[ref.index];
    bool producer = q.producer == stage;
    bool consumer = std::find(q.consumers.begin(), q.consumers.end(), stage) != q.consumers.end();
    if (write ? !producer : !producer && !consumer)
      reject(where, what + (write ? " writes queue " : " reads queue ") + str(ref.index) + ", of which this stage is not the " +
                        (write ? "producer" : "producer or a consumer"));
  }
  if (write && (ref.space == Space::kIn || ref.space == Space::kPrep))
    reject(where, what + " writes " + space_name(ref.space) + " " + str(ref.index) + ", which is read-only");
  if (write && ref.space == Space::kOut && ref.index >= 0 && static_cast<size_t>(ref.index) < written.size())
    written[ref.index] = 1;
}

void Checker::operand(const std::string& what, const Operand& x, const std::vector<int64_t>& extents, bool write,
                      int64_t row_multiple) {
  access(what, x.ref, write);
  bool global = x.ref.space == Space::kIn || x.ref.space == Space::kOut;
  if (x.ref.space == Space::kPrep && x.row_stride != 0)
    reject(where, what + " has row stride " + str(x.row_stride) + " in a prepared operand, which has no rows");
  if (stationary && x.row_stride != 0) reject(where, what + " has row stride " + str(x.row_stride) + " where there are no rows");
  int64_t rows = stationary ? 1 : global ? p.batch_rows : tile_rows;
  std::vector<int64_t> all_extents{rows * row_multiple}, all_strides{x.row_stride};
  all_extents.insert(all_extents.end(), extents.begin(), extents.end());
  all_strides.insert(all_strides.end(), x.strides.begin(), x.strides.end());
  Wide walked = 1;  // each factor is at most kMaxCount, and so is what precedes it
  for (int64_t e : all_extents)
    if ((walked *= e) > kMaxCount) reject(where, what + " is walked over more than 2**48 elements, rows included");
  if (write && x.ref.space == Space::kOut) {
    if (x.row_stride == 0 && (all_extents[0] > 1 || p.batch_rows > tile_rows))
      reject(where, what + " writes every row to the same place");
    for (int64_t a = 0; a < p.batch_axes; ++a)
      if (p.axes[a] > 1 && (x.ref.batch_strides.empty() || x.ref.batch_strides[a] == 0))
        reject(where, what + " writes every batch to the same place");
  }
  reach(what, x.ref, all_extents, all_strides, write ? "writes" : "reads");
}

}  // namespace kitsune::cpu
