#include "batch_sums.h"

#include <algorithm>

#include "pipeline.h"

namespace kitsune::cpu {
namespace {

constexpr int64_t kChunk = 1024;  // elements stored at once: a conversion has temporary memory for so many

// The number of a tile in its batch, and whether the batch began in another strand.
struct Place {
  int64_t number, first_of_strand;
  bool shared;
  Place(const Plan& plan, int64_t tile, int64_t strand) {
    const int64_t tiles = plan.program.batch_tiles;
    first_of_strand = StrandOrder(plan).first_tile(strand);
    number = tile % tiles;
    shared = tile / tiles == first_of_strand / tiles && first_of_strand % tiles != 0;
  }
};

char* kept(const Plan& plan, char* strand, bool shared) { return strand + plan.stream_bytes + (shared ? plan.batch_bytes : 0); }

// Elements [begin, end) of the sums of batch `number`, which start at `sums`, to the result.
void store_batch(const Plan& plan, int64_t k, int64_t number, int64_t begin, int64_t end, const char* sums, char* const* outs,
                 char* temp) {
  const Sink& sink = plan.program.sinks[k];
  const DType acc = plan.sinks[k].acc, type = plan.program.outputs[sink.out].dtype;
  int64_t at = 0;
  for (int64_t a = plan.program.batch_axes; a-- > 0; number /= plan.program.axes[a])
    at += number % plan.program.axes[a] * sink.batch_strides[a];
  const size_t item = item_size(type), sum_item = item_size(acc);
  const Storer store(plan.table, type, acc, "");
  char* out = outs[sink.out] + static_cast<size_t>(at) * item;
  for (int64_t e = begin; e < end; e += kChunk)
    store_sums(sink, {e, std::min(end, e + kChunk)}, store, sums + static_cast<size_t>(e - begin) * sum_item, sum_item, out, item,
               temp);
}

}  // namespace

void open_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, Context& c) {
  const Place at(plan, tile, strand);
  c.batch_sums = kept(plan, c.strand, at.shared);
  if (at.number != 0 && tile != at.first_of_strand) return;
  for (int64_t k : plan.stages[stage].batch_sinks) {
    const Sink& sink = plan.program.sinks[k];
    fill_identity(sink.how, plan.sinks[k].acc, sink.elements, c.batch_sums + plan.sinks[k].offset);
  }
}

void close_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, const Context& c) {
  const Place at(plan, tile, strand);
  if (at.shared || at.number + 1 != plan.program.batch_tiles) return;
  for (int64_t k : plan.stages[stage].batch_sinks)
    store_batch(plan, k, tile / plan.program.batch_tiles, 0, plan.program.sinks[k].elements, c.batch_sums + plan.sinks[k].offset,
                c.outs, c.temp);
}

std::vector<SharedBatch> shared_batches(const Plan& plan) {
  std::vector<SharedBatch> found;
  const StrandOrder order(plan);
  const int64_t tiles = plan.program.batch_tiles;
  for (int64_t s = 1; s < plan.strands; ++s) {
    const int64_t first = order.first_tile(s), batch = first / tiles;
    if (first % tiles == 0) continue;
    if (found.empty() || found.back().batch != batch) found.push_back({batch, s - 1, s});
    found.back().last = s;
  }
  return found;
}

void finish_batch(const Plan& plan, int64_t sink, const SharedBatch& of, int64_t begin, int64_t end, char* strands,
                  char* const* outs, char* temp) {
  const SinkPlan& s = plan.sinks[sink];
  auto sums = [&](int64_t strand) {
    char* const at = strands + static_cast<size_t>(strand) * plan.strand_bytes;
    return kept(plan, at, strand != of.first) + s.offset + static_cast<size_t>(begin) * item_size(s.acc);
  };
  char* total = sums(of.first);
  for (int64_t l = of.first + 1; l <= of.last; ++l) combine(plan.program.sinks[sink].how, s.acc, end - begin, total, sums(l));
  store_batch(plan, sink, of.batch, begin, end, total, outs, temp);
}

}  // namespace kitsune::cpu
