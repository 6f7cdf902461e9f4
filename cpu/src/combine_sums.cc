#include "combine_sums.h"

#include <algorithm>

namespace kitsune::cpu {

// The sums of the strands but the last are added up beside them: another core may have the lines of the first one, and writing
// there would take them away from it. The last one is added on the way to the array, where that is of the same type.
void combine_sums(const Plan& plan, int64_t k, int64_t begin, int64_t end, const char* strands, char* array, char* temp) {
  constexpr int64_t kPiece = 1024;
  static_assert(kPiece * 8 <= kPrepTempBytes / 2);
  const Sink& sink = plan.program.sinks[k];
  const SinkPlan& s = plan.sinks[k];
  const DType type = plan.program.outputs[sink.out].dtype;
  const size_t sum = item_size(s.acc), item = item_size(type);
  const Storer store(plan.table, type, s.acc, "");
  const VectorFn add =
      sink.how == Reduction::kSum && s.acc == type && is_float(type) ? plan.table.vector(Opcode::op_add, type) : nullptr;
  const int64_t apart = add != nullptr ? plan.strands - 1 : plan.strands;  // strands that are added up beside the array
  char* const total = temp + kPrepTempBytes / 2;
  for (int64_t e = begin; e < end; e += kPiece) {
    const int64_t n = std::min(kPiece, end - e);
    const auto of = [&](int64_t strand) {
      return strands + static_cast<size_t>(strand) * plan.strand_bytes + s.offset + static_cast<size_t>(e) * sum;
    };
    const char* sums = of(0);
    for (int64_t l = 1; l < apart; ++l, sums = total) combine(sink.how, s.acc, n, total, sums, of(l));
    if (add == nullptr || plan.strands == 1) {
      store_sums(sink, {e, e + n}, store, sums, sum, array, item, temp);
      continue;
    }
    const char* last = of(plan.strands - 1);
    rows_of_sums(sink, e, n, [&](int64_t run, int64_t from, int64_t to) {
      const size_t at = static_cast<size_t>(from) * sum;
      add(run, array + static_cast<size_t>(to) * item, sums + at, last + at, nullptr, nullptr, nullptr);
    });
  }
}

}  // namespace kitsune::cpu
