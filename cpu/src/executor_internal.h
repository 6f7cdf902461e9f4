// What an Executable is made of: one Step per instruction, with kernels and loop nests resolved, and the memory layout of a call.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "checked.h"
#include "kitsune_cpu/executor.h"
#include "nest.h"

namespace kitsune::cpu {

constexpr size_t kAlign = 64;
constexpr int64_t kLine = 64;  // bytes of a cache line
// How far in front of what it reads of an array a step asks memory for more, in bytes: the hardware does not look beyond a page,
// and a core that waits for a strip sees little of the next one. A mean of squared differences of two arrays of 34 MB took 2.4 ms
// with 2 048 to 8 192 bytes, 3.0 with 1 024 and 4.8 without (Zen 4).
constexpr int64_t kAhead = 4096;
// Arrays of fewer bytes are taken to lie in a cache, where asking takes longer than waiting: a pointwise function of two arrays of
// 4 MB took 0.20 ms with it and 0.17 without.
constexpr size_t kStreamedFrom = size_t{8} << 20;
inline void ask_for(const char* from, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += kLine) __builtin_prefetch(from + b, 0, 2);
}
constexpr size_t kMostScratch = size_t{1} << 30;  // of all threads of a call together, beside the bytes of its arrays
inline size_t align_up(size_t n) { return rounded_up(n, kAlign); }

// What a step sees: one stage on one tile, in one worker.
struct Context {
  int64_t row0;  // in its batch
  int64_t rows;
  int64_t first_row;  // in the whole stream
  int64_t* batch;     // indices of the batch axes
  int64_t* loops;     // numbers of the enclosing loops, outermost first
  char* const* ins;
  char* const* outs;
  char* scratch;
  char* const* slots;        // per queue: the slot of this tile
  char* const* preps;        // per prepared operand
  char* strand;              // the sink accumulators of this tile's strand
  char* batch_sums;          // ... those of this tile's batch, of sinks that have one for each
  char* packed;              // what Pack has prepared
  const char** packed_from;  // per slot of it: where that came from
  char* temp;                // Step::temp_bytes() bytes, 64-byte aligned
  bool first_of_strand = false;
  int64_t skipped = 0;  // rows of the tile before row0: an iteration of a loop may run on a part of its rows
};

// Where an operand of a tile starts: resolved form of a Ref whose row stride is `row_bytes`.
struct Address {
  Space space;
  bool moves;  // with loops or batches
  int32_t index;
  int64_t offset_bytes;
  int64_t row_bytes;
  bool of_tile;  // rows count from the tile's start, not from the batch's
  std::vector<int64_t> loop_bytes, batch_bytes;
  Address(const Ref& ref, int64_t row_stride);
  char* of(const Context& c) const {
    int64_t at = offset_bytes + (of_tile ? c.skipped : c.row0) * row_bytes;
    if (moves) {
      for (size_t l = 0; l < loop_bytes.size(); ++l) at += c.loops[l] * loop_bytes[l];
      for (size_t a = 0; a < batch_bytes.size(); ++a) at += c.batch[a] * batch_bytes[a];
    }
    switch (space) {
      case Space::kIn: return c.ins[index] + at;
      case Space::kOut: return c.outs[index] + at;
      case Space::kScratch: return c.scratch + at;
      case Space::kQueue: return c.slots[index] + at;
      default: return c.preps[index] + at;
    }
  }
};

// The element of streamed arrays that a row of the stream is, by the array that holds their order: whatever is in it, one of
// `rows`.
inline int64_t element_of(int32_t order, uint32_t rows) { return std::min(static_cast<uint32_t>(order), rows - 1); }

class Step {
 public:
  virtual ~Step() = default;
  virtual void run(const Context& c) const = 0;
  // Asks memory for what this reads at the iteration that `c` says, the loop's next one: its slices of arrays lie too far from each
  // other for the hardware to foresee them. `fetches`: there is something to ask for at iterations of the loop of that number.
  virtual void fetch(const Context&) const {}
  virtual bool fetches(int /*loop*/) const { return false; }
  size_t temp_bytes() const { return temp_bytes_; }

 protected:
  size_t temp_bytes_ = 0;
};

struct SinkPlan {
  DType acc;      // accumulator type
  size_t offset;  // in a strand; of a sink for each batch, in the sums of one
  int64_t stage;
  bool per_batch = false;
  // One product makes all of it once for each tile: the first tile of a strand writes, so nobody has to fill it with zeros.
  bool written = false;
};

// A weight's panels for all batches, or a dense operand.
struct PrepPlan {
  size_t offset = 0;  // of the call's prepared memory, or of the worker's
  size_t bytes = 0;   // of one slot
  bool local = false;
  // In a worker: a slot for each iteration of the enclosing loop with whose number the source moves (the last slot for all that
  // have none of their own). What comes from an array of the call stays in its slot until another batch comes.
  int64_t slots = 1, first_slot = 0;
  size_t loop = 0;
  bool kept = false;
  int64_t slot(const int64_t* loops) const { return slots == 1 ? 0 : std::min(loops[loop], slots - 1); }
  Panel panel = Panel::kF32;
  int64_t K = 0, N = 0, batch = 1;
  size_t batch_bytes = 0;
  int64_t panels = 0;                                 // of one batch
  std::vector<int64_t> k_offset, n_offset, b_offset;  // elements
};

struct PrepTask {
  int64_t prep, begin, end;  // panels [begin, end) of a weight, batch after batch; rows of the outermost loop of a dense operand
};

struct StagePlan {
  std::vector<std::unique_ptr<const Step>> steps;
  std::vector<int64_t> inputs, outputs;  // queues
  std::vector<int64_t> sinks, batch_sinks;
};

// How the program of a part runs.
struct Plan {
  Plan(const Program& program, const KernelTable& table);
  const Program& program;
  const KernelTable& table;
  std::vector<StagePlan> stages;
  std::vector<int64_t> order;  // stages, most downstream first
  int64_t strands = 0;         // partial sums beside each other; 0 without sinks
  int64_t strand_unit = 1;     // tiles that no two strands share: one, or those of a batch
  size_t strand_bytes = 0;     // what the whole stream folds into, then the sums of one batch or of two
  size_t stream_bytes = 0, batch_bytes = 0;
  int64_t window = 0;  // tiles a stage may be ahead of its first unfinished one
  std::vector<PrepPlan> preps;
  std::vector<PrepTask> prep_tasks;
  std::vector<SinkPlan> sinks;
  std::vector<size_t> ring_offset;  // in the call's ring memory
  std::vector<size_t> entry_stride;
  size_t ring_bytes = 0, prep_bytes = 0, strands_bytes = 0;
  size_t packed_bytes = 0;  // of a worker, for what Pack prepares
  int64_t packed_slots = 0;
  size_t scratch_bytes = 0;  // of a worker: the stage's scratch, what Pack prepares, then the steps' temporary memory
  size_t packed_offset = 0, packed_from_offset = 0, temp_offset = 0;
  int64_t most_workers = 1;  // as many as can be busy at once, and whose temporary memory together is in proportion to the arrays
  double estimated_ns = 0, shared_ns = 0;  // of one thread; the part of it that several could take
  size_t memory_bytes() const { return plus(plus(prep_bytes, ring_bytes), plus(strands_bytes, scratch_bytes)); }
};

// Runs a program once. ins[i] and outs[i] are its inputs and outputs; the result is as that of Executable::run.
std::string run_program(const Plan& plan, char* const* ins, char* const* outs, Pool& pool);

// Why a call of the program `name` failed and how to go on, into `out`; allocates nothing.
constexpr size_t kErrorBytes = 512;
void describe(const std::exception& why, const char* name, char* out, size_t bytes) noexcept;
// As text. Needs no memory.
std::string error_text(const std::exception& why, const char* name) noexcept;

// Bytes of a call's arrays.
size_t array_bytes(const std::vector<Array>& operands, const std::vector<Array>& results);

// Throws ProgramError if `bytes` of what a call allocates are out of proportion to its arrays: a program of a few words, whoever
// wrote it, cannot ask for all of the machine's memory.
void limit_memory(size_t bytes, const std::vector<Array>& operands, const std::vector<Array>& results, const char* what);

// One factory per instruction; `where` opens the message of a ProgramError.
struct Compile {
  const Program& program;
  const KernelTable& table;
  const std::vector<PrepPlan>& preps;
  const std::vector<SinkPlan>& sinks;
  std::string where;
  const std::vector<bool>& read;  // for each input whether an earlier instruction of the stage reads it

  // Does an instruction that reads `x` row by row read it from memory, where no loop moves it?
  bool streams(const Operand& x) const {
    const auto& moves = x.ref.loop_strides;
    if (x.ref.space != Space::kIn || x.row_stride == 0 || read[static_cast<size_t>(x.ref.index)]) return false;
    const Array& array = program.inputs[static_cast<size_t>(x.ref.index)];
    return times(static_cast<size_t>(array.elements), item_size(array.dtype)) >= kStreamedFrom &&
           std::all_of(moves.begin(), moves.end(), [](int64_t s) { return s == 0; });
  }
};
std::unique_ptr<const Step> compile(const StridedLoad&, const Compile&);
std::unique_ptr<const Step> compile(const StridedStore&, const Compile&);
std::unique_ptr<const Step> compile(const Matmul&, const Compile&);
std::unique_ptr<const Step> compile(const Vector&, const Compile&);
// The Vector, and the folds behind it of values that it makes for them alone, in registers; nullptr where they can't be.
std::unique_ptr<const Step> compile_summed(const Vector&, const std::vector<const Accumulate*>&, const Compile&);
std::unique_ptr<const Step> compile(const Reduce&, const Compile&);
std::unique_ptr<const Step> compile(const ExpRows&, const Compile&);
std::unique_ptr<const Step> compile(const Scan&, const Compile&);
std::unique_ptr<const Step> compile(const Accumulate&, const Compile&);
std::unique_ptr<const Step> compile(const AccumulateMatmul&, const Compile&);
std::unique_ptr<const Step> compile(const Gather&, const Compile&);
std::unique_ptr<const Step> compile(const AccumulateAt&, const Compile&);
std::unique_ptr<const Step> compile(const AccumulateScaled&, const Compile&);
std::unique_ptr<const Step> compile(const AccumulateTaken&, const Compile&);
std::unique_ptr<const Step> compile(const TakenDot&, const Compile&);
std::unique_ptr<const Step> compile(const RunMax&, const Compile&);
std::unique_ptr<const Step> compile(const Take&, const Compile&);
std::unique_ptr<const Step> compile(const Put&, const Compile&);
std::unique_ptr<const Step> compile(const Pack&, const Compile&);
std::unique_ptr<const Step> compile(const Dot&, const Compile&);

using Steps = std::vector<std::unique_ptr<const Step>>;
// Steps that run again for every iteration of a loop `depth` deep, or once on one row (run_products.cc).
std::unique_ptr<const Step> compile(const Loop&, int depth, Steps body);
std::unique_ptr<const Step> compile(const Stationary&, Steps body);

// Where an instruction folds into a sink's accumulators.
class SumsAddress {
 public:
  SumsAddress(const Sums& sums, const Compile& c, int64_t sink)
      : per_batch_(c.sinks[sink].per_batch), offset_(c.sinks[sink].offset) {
    const int64_t item = static_cast<int64_t>(item_size(c.sinks[sink].acc));
    offset_ += static_cast<size_t>(sums.offset * item);
    for (int64_t s : sums.loop_strides) loop_bytes_.push_back(s * item);
  }
  char* of(const Context& c) const {
    char* at = (per_batch_ ? c.batch_sums : c.strand) + offset_;
    for (size_t l = 0; l < loop_bytes_.size(); ++l) at += c.loops[l] * loop_bytes_[l];
    return at;
  }

 private:
  bool per_batch_;
  size_t offset_;
  std::vector<int64_t> loop_bytes_;
};

// Where the prepared operand of a product lies: in the call's memory or in the worker's.
class Prepared {
 public:
  explicit Prepared(const PrepPlan& p, int64_t index) : plan_(&p), index_(index) {}
  const char* of(const Context& c) const { return plan_->local ? packed(*plan_, c) : c.preps[index_]; }
  static char* packed(const PrepPlan& p, const Context& c) {
    return c.packed + p.offset + static_cast<size_t>(p.slot(c.loops)) * p.bytes;
  }

 private:
  const PrepPlan* plan_;  // of the plan that owns this step
  int64_t index_;
};

// Typed loads and stores that go through a register type the table may lack a direct path for. Throws ProgramError when there is
// none.
class Loader {
 public:
  Loader() = default;
  Loader(const KernelTable& table, DType compute, DType storage, const std::string& where);
  // dst[n] dense of the compute type <- src; temp: n * 8 bytes, used only when two steps are needed.
  void operator()(int64_t n, void* dst, const void* src, int64_t stride, void* temp) const {
    if (convert_ == nullptr) return load_(n, dst, src, stride);
    load_(n, temp, src, stride);
    convert_(n, dst, temp, nullptr, nullptr, nullptr, nullptr);
  }

 private:
  LoadFn load_ = nullptr;
  VectorFn convert_ = nullptr;
};

class Storer {
 public:
  Storer() = default;
  Storer(const KernelTable& table, DType storage, DType compute, const std::string& where);
  void operator()(int64_t n, void* dst, int64_t stride, const void* src, void* temp) const {
    if (convert_ == nullptr) return store_(n, dst, stride, src);
    convert_(n, temp, src, nullptr, nullptr, nullptr, nullptr);
    store_(n, dst, stride, temp);
  }

 private:
  StoreFn store_ = nullptr;
  VectorFn convert_ = nullptr;
};

// n elements of a register type, of the value of Micro.imm.
void fill_constant(DType type, void* out, int64_t n, const std::vector<double>& imm);

// Reductions: accumulator type, identity, combination of accumulators (run_reduce.cc).
DType accumulator_type(Reduction how, DType values, bool wide);
void fill_identity(Reduction how, DType acc, int64_t n, void* out);
// to[i] = a[i] (how) b[i]; `to` may be `a`.
void combine(Reduction how, DType acc, int64_t n, void* to, const void* a, const void* b);
inline void combine(Reduction how, DType acc, int64_t n, void* into, const void* from) { combine(how, acc, n, into, into, from); }
// Where `count` accumulators of a sink belong, from number `first` on: calls f(run, from, to) for runs of them that lie together in
// its array too, `from` counted from the first one, `to` an element of the array.
template <class F>
void rows_of_sums(const Sink& sink, int64_t begin, int64_t count, F&& f) {
  const int64_t wide = sink.columns;
  if (wide <= kSumGroup) return f(count, 0, begin);  // no weight gradient, or one of dense rows
  // Where the first one lies; from there on by steps, because five divisions for each row of a group took as long as a narrow
  // product.
  const int64_t matrix = sink.height * wide, at = begin % matrix;
  int64_t first = at / (sink.rows * wide) * sink.rows, rows = std::min(sink.rows, sink.height - first);
  int64_t in = at - first * wide;
  int64_t group = in / rows / kSumGroup * kSumGroup, columns = group_columns(wide, group);
  int64_t row = (in - group * rows) / columns, column = (in - group * rows) % columns;
  int64_t block = begin - in;  // rows `first` and on of a matrix
  for (int64_t from = 0; from < count;) {
    for (; row < rows && from < count; ++row) {  // the columns of one group in one row
      const int64_t run = std::min(columns - column, count - from);
      f(run, from, block + row * wide + group + column);
      from += run;
      column = 0;
    }
    row = 0;
    group += columns;
    if (group == wide) {
      group = 0;
      block += rows * wide;
      first = first + rows < sink.height ? first + rows : 0;
      rows = std::min(sink.rows, sink.height - first);
    }
    columns = group_columns(wide, group);
  }
}
// The accumulators of a sink in the range `of`, `sum_bytes` each, to where they belong in its array, `item_bytes` each
// (run_products.cc).
void store_sums(const Sink& sink, std::pair<int64_t, int64_t> of, const Storer& store, const char* sums, size_t sum_bytes,
                char* array, size_t item_bytes, char* temp);

// Prepared operands (run_products.cc).
void plan_preps(Plan& plan);
void run_prep_task(const Plan& plan, const PrepTask& task, char* const* ins, char* prepared, char* temp);
// The panels [begin, end) of a weight, or rows of the outermost loop of a dense operand, from `source` to `out`.
void prepare(const Prep& x, const PrepPlan& plan, const KernelTable& table, int64_t begin, int64_t end, const char* source,
             char* out, char* temp);
constexpr int64_t kMostPrepTasks = 4096;  // for one operand
constexpr int64_t kPrepChunk = 1024;      // elements a dense operand is converted by
constexpr size_t kPrepTempBytes = 2 * kPrepChunk * 8;

}  // namespace kitsune::cpu
