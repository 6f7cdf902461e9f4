// Sums of batches: sinks that have one sum for each batch.
//
// A strand stores the sums of a batch whose tiles are all its own straight to the result, when it is through with the last one. Of
// its first batch, if that began in the strand before, and of its last one, if that goes on in the next, it keeps the sums; in the
// end those of each such batch are added up in the order of the strands and stored. So the bits do not depend on the threads.
#pragma once

#include "executor_internal.h"

namespace kitsune::cpu {

// In front of tile `tile`: where its batch is summed, which is set to the identity if the strand has none of it yet.
void open_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, Context& c);
// Behind it: what is complete is stored.
void close_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, const Context& c);

// A batch that several strands share: those from `first` to `last`.
struct SharedBatch {
  int64_t batch, first, last;
};
std::vector<SharedBatch> shared_batches(const Plan& plan);

// Adds up the sums that strands keep of elements [begin, end) of a sink, and stores them.
void finish_batch(const Plan& plan, int64_t sink, const SharedBatch& of, int64_t begin, int64_t end, char* strands,
                  char* const* outs, char* temp);

}  // namespace kitsune::cpu
