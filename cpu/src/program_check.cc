// The validator: every reference stays inside its memory, types agree, and the stages can always make progress.
//
// Why a checked program cannot deadlock: a (stage, tile) waits for its producers at the same tile and, for a free slot, for its
// consumers at tile - depth. With a depth of at least 1 and an acyclic stage graph, both come earlier in the order (tile,
// topological position), so the least unfinished one can always run.
//
// All address arithmetic is in 128 bits over operands bounded by kMaxCount, so it cannot overflow.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

__extension__ typedef __int128 Wide;

template <class T>
std::string str(T v) {
  return std::to_string(v);
}

[[noreturn]] inline void reject(const std::string& where, const std::string& what) { throw ProgramError(where + ": " + what); }

class Checker {
 public:
  explicit Checker(Program& program) : p(program), written(program.outputs.size(), 0), sink_stage(program.sinks.size(), -1) {}
  void all();

 private:
  Program& p;
  std::vector<char> written;        // per output array
  std::vector<int64_t> sink_stage;  // the stage that folds into each sink, or -1
  std::string where;                // the stage and instruction at hand
  int64_t stage = 0;
  int64_t tile_rows = 0;        // rows of the largest tile
  std::vector<int64_t> counts;  // of the enclosing loops
  bool stationary = false;      // is this inside of Stationary?
  std::vector<char> packed;     // prepared operands that a Pack before this has prepared, in this stage

  // The program and its stages.
  void arrays();
  void sink(const Sink& s) const;
  void preps();
  void queues();
  void prep(const Prep& x);
  // The instructions [begin, end) of the stage at hand.
  void body(size_t begin, size_t end);

  // Operands.
  void bound(const std::string& what, int64_t v, int64_t low, int64_t high) const;
  // The product of extents.
  int64_t count(const std::string& what, const std::vector<int64_t>& extents) const;
  // The lowest and highest element that `offset + sum(i_d * strides_d)` names lie in the reference's memory.
  void reach(const std::string& what, const Ref& ref, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides,
             const char* verb) const;
  // Elements of the memory a reference names, after checking that it exists and has the reference's type.
  int64_t capacity(const std::string& what, const Ref& ref) const;
  void access(const std::string& what, const Ref& ref, bool write);
  // An operand that loops over (rows * row_multiple, *extents).
  void operand(const std::string& what, const Operand& x, const std::vector<int64_t>& extents, bool write,
               int64_t row_multiple = 1);

  // Instructions.
  void check(const StridedLoad& x) { copy(x, true); }
  void check(const StridedStore& x) { copy(x, false); }
  void check(const Matmul& x);
  void check(const Reduce& x);
  void check(const Scan& x);
  void check(const Accumulate& x);
  void check(const AccumulateMatmul& x);
  void check(const Gather& x);
  void check(const AccumulateAt& x);
  void check(const AccumulateScaled& x);
  void check(const AccumulateTaken& x);
  void check(const TakenDot& x);
  void check(const ExpRows& x);
  void check(const RunMax& x);
  void check(const Take& x);
  void check(const Put& x);
  void check(const Pack& x);
  void check(const Dot& x);
  void check(const Loop&) {}
  void check(const Stationary&) {}
  void tiles_only() const;
  void prepared(int64_t prep) const;
  void select(const Select& x, bool takes);
  void filled(const std::vector<double>& fill) const;
  void table(const char* what, const Operand& x, int64_t rows, const std::vector<int64_t>& row);
  void folds(const AccumulateAt& x);
  void rows_of(const AccumulateAt& x);
  void scaled(const AccumulateScaled& x);
  void indexed(const Operand& index, int64_t count, const std::vector<int64_t>& index_extents);
  void copy(const Copy& x, bool load);
  void activation(const Matmul& x, bool wide) const;
  void multiplied(Product product, DType t) const;
  std::vector<int64_t> loops(const std::vector<int64_t>& kept, const std::vector<int64_t>& reduced) const;
  void foldable(Reduction how, DType t) const;
  void fold_into(int64_t sink, Fold fed);
  void sums(const Sums& x, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides, int64_t elements) const;

  // Vector programs.
  void check(const Vector& x);
  void source(int64_t r, DType type, const std::vector<int>& types) const;
  void micro(const Vector& x, const Micro& m, std::vector<int>& types) const;
  void immediates(const Micro& m) const;
};

void Checker::preps() {
  Wide indices = 0;
  for (size_t i = 0; i < p.preps.size(); ++i) {
    const Prep& x = p.preps[i];
    where = "kitsune program: prepared operand " + str(i);
    count("b", x.b_extents), count("k", x.k_extents), count("n", x.n_extents);
    if (x.kind == PrepKind::kWeight) {
      indices += Wide{product(x.b_extents)} + product(x.k_extents) + product(x.n_extents);
      if (indices > kMaxWeightIndices) reject(where, "the sides of the weights so far have more than 2**24 indices together");
    }
    if (x.local) continue;  // checked where it is packed
    if (x.source.space != Space::kIn) reject(where, "its source is not an input");
    if (!x.source.batch_strides.empty()) reject(where, "depends on the batch, and is prepared once for a call");
    prep(x);
  }
}

void Checker::prep(const Prep& x) {
  if (x.kind == PrepKind::kDense && (!x.b_extents.empty() || !x.k_extents.empty()))
    reject(where, "a dense operand has only n extents");
  if (x.kind == PrepKind::kDense && x.product != Product::kBest) reject(where, "a dense operand is no product");
  std::vector<int64_t> extents, strides;
  for (auto* list : {&x.b_extents, &x.k_extents, &x.n_extents}) extents.insert(extents.end(), list->begin(), list->end());
  for (auto* list : {&x.b_strides, &x.k_strides, &x.n_strides}) strides.insert(strides.end(), list->begin(), list->end());
  Wide n = 1;
  for (int64_t e : extents) n = std::min<Wide>(n * e, kMaxCount);
  if (n > kMaxCount / 4096) reject(where, "it covers more than 2**36 elements");
  if (x.b_strides.size() != x.b_extents.size() || x.k_strides.size() != x.k_extents.size())
    reject(where, "strides and extents differ in number");
  access("source", x.source, false);
  reach("source", x.source, extents, strides, "reads");
  if (x.kind != PrepKind::kWeight) return;
  DType s = x.source.dtype, t = x.dtype;
  bool widens = t == DType::kF64 || (t == DType::kF32 && s != DType::kF64);
  if (!is_float(s) || !is_float(t) || !(s == t || widens))
    reject(where, std::string("a weight of ") + dtype_name(s) + " cannot be prepared as " + dtype_name(t));
  multiplied(x.product, t);
}

void Checker::arrays() {
  where = "kitsune program";
  count("axes", p.axes);
  p.rows = product(p.axes);
  bound("tile_rows", p.tile_rows, 1, kMaxCount);
  bound("workers", p.workers, 1, kMaxWorkers);
  bound("batch_axes", p.batch_axes, 0, static_cast<int64_t>(p.axes.size()));
  bound("order", p.order, -1, static_cast<int64_t>(p.inputs.size()) - 1);
  if (p.order >= 0) {
    if (p.batch_axes > 0) reject(where, "a stream with batch axes has no order of its own");
    bound("rows of a stream with an order", p.rows, 1, INT32_MAX);
    const Array& order = p.inputs[p.order];
    if (order.dtype != DType::kI32 || order.elements != p.rows)
      reject(where,
             "the order is " + str(order.elements) + " of " + dtype_name(order.dtype) + ", not " + str(p.rows) + " of int32");
  }
  const int64_t batches = product({p.axes.begin(), p.axes.begin() + p.batch_axes});
  p.batch_rows = p.rows / batches;
  p.batch_tiles = (p.batch_rows + p.tile_rows - 1) / p.tile_rows;
  p.tiles = batches * p.batch_tiles;
  tile_rows = std::min(p.tile_rows, p.batch_rows);
  for (const Array& a : p.inputs) bound("elements of an input", a.elements, 0, kMaxCount);
  for (const Array& a : p.outputs) bound("elements of an output", a.elements, 0, kMaxCount);
  std::vector<char> taken(p.outputs.size(), 0);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    const Sink& s = p.sinks[i];
    where = "kitsune program: sink " + str(i);
    bound("output", s.out, 0, static_cast<int64_t>(p.outputs.size()) - 1);
    sink(s);
    if (taken[s.out]) reject(where, "output " + str(s.out) + " already belongs to another sink");
    foldable(s.how, s.dtype);
    taken[s.out] = written[s.out] = 1;
  }
}

// The sums of a sink fill its output; those of two batches never meet.
void Checker::sink(const Sink& s) const {
  Wide filled = s.elements;
  if (s.per_batch()) {
    if (s.batch_strides.size() != static_cast<size_t>(p.batch_axes))
      reject(where, "has " + str(s.batch_strides.size()) + " strides for " + str(p.batch_axes) + " batch axes");
    std::vector<std::pair<int64_t, int64_t>> axes;
    for (size_t a = 0; a < s.batch_strides.size(); ++a) {
      bound("batch stride", s.batch_strides[a], 0, kMaxCount);
      if (p.axes[a] > 1) axes.emplace_back(s.batch_strides[a], p.axes[a]);
    }
    std::sort(axes.begin(), axes.end());
    for (const auto& [stride, extent] : axes) {
      if (filled != stride) reject(where, "the sums of its batches do not fill output " + str(s.out) + ", each a part of its own");
      filled = std::min<Wide>(filled * extent, kMaxCount);
    }
  }
  if (s.elements < 1 || filled != p.outputs[s.out].elements)
    reject(where, "has " + str(static_cast<int64_t>(filled)) + " elements and output " + str(s.out) + " has " +
                      str(p.outputs[s.out].elements));
}

void Checker::queues() {
  int64_t stages = static_cast<int64_t>(p.stages.size());
  if (Wide{p.tiles} * stages > kMaxCount)
    reject("kitsune program", "there are more than 2**48 tiles, those of every stage counted");
  std::vector<std::vector<int64_t>> next(stages);
  std::vector<int64_t> read_by(stages, -1);  // the last queue that lists a stage
  for (size_t i = 0; i < p.queues.size(); ++i) {
    const Ring& q = p.queues[i];
    where = "kitsune program: queue " + str(i);
    bound("producer", q.producer, 0, stages - 1);
    bound("depth", q.depth, 1, int64_t{1} << 20);
    bound("entry_bytes", q.entry_bytes, 1, int64_t{1} << 40);
    if (Wide{q.depth} * q.entry_bytes > (Wide{1} << 44)) reject(where, "takes more than 2**44 bytes");
    if (q.consumers.empty()) reject(where, "has no consumer");
    for (int64_t s : q.consumers) {
      bound("consumer", s, 0, stages - 1);
      if (read_by[s] == static_cast<int64_t>(i)) reject(where, "lists consumer " + str(s) + " twice");
      read_by[s] = static_cast<int64_t>(i);
      next[q.producer].push_back(s);
    }
  }
  // Kahn's algorithm: what is left over lies on or behind a cycle.
  std::vector<int64_t> incoming(stages, 0), ready;
  for (auto& list : next)
    for (int64_t s : list) ++incoming[s];
  for (int64_t s = 0; s < stages; ++s)
    if (incoming[s] == 0) ready.push_back(s);
  for (size_t i = 0; i < ready.size(); ++i)
    for (int64_t s : next[ready[i]])
      if (--incoming[s] == 0) ready.push_back(s);
  for (int64_t s = 0; s < stages; ++s)
    if (incoming[s] != 0)
      reject("kitsune program",
             "stage " + str(s) + " '" + p.stages[s].name + "' waits for its own output: the queues form a cycle");
}

void Checker::all() {
  arrays();
  preps();
  where = "kitsune program";
  if (p.stages.empty()) reject(where, "there is no stage");
  for (stage = 0; stage < static_cast<int64_t>(p.stages.size()); ++stage) {
    where = "kitsune program: stage " + str(stage) + " '" + p.stages[stage].name + "'";
    bound("scratch_bytes", p.stages[stage].scratch_bytes, 0, int64_t{1} << 40);
  }
  queues();
  for (stage = 0; stage < static_cast<int64_t>(p.stages.size()); ++stage) {
    Stage& s = p.stages[stage];
    packed.assign(p.preps.size(), 0);
    body(0, s.body.size());
  }
  where = "kitsune program";
  for (size_t i = 0; i < p.outputs.size(); ++i)
    if (!written[i] && p.outputs[i].elements > 0) reject(where, "output " + str(i) + " is never written");
}

void Checker::body(size_t begin, size_t end) {
  const Stage& s = p.stages[stage];
  for (size_t i = begin; i < end; ++i) {
    const Instruction& x = s.body[i];
    where = "kitsune program: stage " + str(stage) + " '" + s.name + "' instruction " + str(i) + " (" +
            kInstructionNames[x.index()] + ")";
    std::visit([this](const auto& v) { check(v); }, x);
    if (const auto* loop = std::get_if<Loop>(&x)) {
      bound("count", loop->count, 1, kMaxCount);
      bound("length", loop->length, 1, kMaxCount);
      if (loop->within) {
        for (int64_t n : {loop->within->divisor, loop->within->extent, loop->within->step}) bound("within", n, 1, kMaxCount);
        bound("within", loop->within->together, 1, kMaxCount / loop->within->step);
        for (int64_t n : {loop->within->low, loop->within->high}) bound("within", n, -kMaxCount, kMaxCount);
        bound("within", loop->within->which, 0, 2);
      }
      if (counts.size() == kMaxLoops) reject(where, "more than " + str(kMaxLoops) + " loops are nested");
      Wide iterations = p.tiles;
      for (int64_t n : counts) iterations *= n;
      if (iterations * loop->count > kMaxCount) reject(where, "runs more than 2**48 times, those of every tile counted");
      counts.push_back(loop->count);
      body(i + 1, i + 1 + static_cast<size_t>(loop->length));
      counts.pop_back();
      i += static_cast<size_t>(loop->length);
    } else if (const auto* one = std::get_if<Stationary>(&x)) {
      if (stationary) reject(where, "stands in another one");
      bound("length", one->length, 1, kMaxCount);
      stationary = true;
      body(i + 1, i + 1 + static_cast<size_t>(one->length));
      stationary = false;
      i += static_cast<size_t>(one->length);
    }
  }
}

void validate(Program& program) { Checker(program).all(); }

void validate(const Call& c) {
  const std::string where = "kitsune program '" + c.name + "'";
  auto reject_call = [&](const std::string& what) { reject(where, what); };
  const int64_t n = static_cast<int64_t>(c.arrays.size());
  if (c.operands < 0 || c.results < 0 || c.operands > n || c.results > n - c.operands)
    reject_call(str(c.operands) + " operands and " + str(c.results) + " results of " + str(n) + " arrays");
  constexpr int64_t kBefore = -1, kNever = kMaxPhases + 1;
  std::vector<int64_t> made(c.arrays.size(), kNever);  // the phase that writes each array
  std::fill_n(made.begin(), c.operands, kBefore);
  auto text = [](const Array& a) { return str(a.elements) + " of " + dtype_name(a.dtype); };
  auto match = [&](const Part& part, const char* verb, const std::vector<int64_t>& numbers, const std::vector<Array>& wanted) {
    const std::string who = "'" + part.program.name + "' " + verb + " ";
    if (numbers.size() != wanted.size())
      reject_call(who + str(numbers.size()) + " arrays, but the program wants " + str(wanted.size()));
    for (size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] < 0 || numbers[i] >= n) reject_call(who + "array " + str(numbers[i]) + ", but there are " + str(n));
      const Array &a = c.arrays[static_cast<size_t>(numbers[i])], &b = wanted[i];
      if (a.dtype != b.dtype || a.elements != b.elements)
        reject_call(who + "array " + str(numbers[i]) + ", which has " + text(a) + ", as " + text(b));
    }
  };
  int64_t last = 0;
  for (const Part& part : c.parts) {
    if (part.phase < last || part.phase > kMaxPhases)
      reject_call("'" + part.program.name + "' runs in phase " + str(part.phase) + ", which is not in " + str(last) + ".." +
                  str(kMaxPhases));
    last = part.phase;
    match(part, "reads", part.reads, part.program.inputs);
    match(part, "writes", part.writes, part.program.outputs);
    for (int64_t k : part.reads)
      if (made[static_cast<size_t>(k)] >= part.phase)
        reject_call("'" + part.program.name + "' reads array " + str(k) + ", which no earlier phase writes");
    for (int64_t k : part.writes) {
      int64_t& phase = made[static_cast<size_t>(k)];
      if (phase != kNever) reject_call("'" + part.program.name + "' writes array " + str(k) + ", which is there already");
      phase = part.phase;
    }
  }
  for (size_t i = 0; i < made.size(); ++i)
    if (made[i] == kNever) reject_call("array " + str(i) + " is never written");
}

// Where operands reach: every element that an instruction names lies in memory of the stage, for all rows and indices.

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

// Whether an instruction's types, sizes and operands fit together.

void Checker::copy(const Copy& x, bool load) {
  tiles_only();
  count("extents", x.extents);
  if (x.array.space != (load ? Space::kIn : Space::kOut) && !(load && x.array.space == Space::kOut))
    reject(where, std::string("the array is a ") + space_name(x.array.space) + ", not an " + (load ? "input or output" : "output"));
  if (x.array.dtype != x.tile.ref.dtype)
    reject(where, std::string("the array is ") + dtype_name(x.array.dtype) + " and the tile " + dtype_name(x.tile.ref.dtype) +
                      ": there is no conversion here");
  access("array", x.array, !load);
  if (x.axis_strides.size() != p.axes.size())
    reject(where, "there are " + str(x.axis_strides.size()) + " axis strides for " + str(p.axes.size()) + " axes");
  std::vector<int64_t> extents = p.axes, strides = x.axis_strides;
  extents.insert(extents.end(), x.extents.begin(), x.extents.end());
  strides.insert(strides.end(), x.array_strides.begin(), x.array_strides.end());
  for (size_t j = 0; j < p.axes.size(); ++j)
    if (!load && x.axis_strides[j] == 0 && p.axes[j] > 1) reject(where, "array writes every row of an axis to the same place");
  reach("array", x.array, extents, strides, load ? "reads" : "writes");
  operand("tile", x.tile, x.extents, load);
}
void Checker::check(const Matmul& x) {
  bound("row_multiple", x.row_multiple, 1, kMaxCount);
  if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
  bound("batch", x.batch, 1, kMaxCount);
  bound("weight", x.weight, 0, static_cast<int64_t>(p.preps.size()) - 1);
  const Prep& w = p.preps[x.weight];
  if (w.kind != PrepKind::kWeight) reject(where, "prepared operand " + str(x.weight) + " is not a weight");
  prepared(x.weight);
  if (product(w.b_extents) != x.batch)
    reject(where, "batch " + str(x.batch) + ", but weight " + str(x.weight) + " has " + str(product(w.b_extents)));
  int64_t k = product(w.k_extents), n = product(w.n_extents);
  if (x.x.strides.size() != 1 || x.out.strides.size() != 1) reject(where, "x and out each have one batch stride");
  bool wide = w.dtype == DType::kF64;
  for (DType t : {x.x.ref.dtype, x.out.ref.dtype})
    if (!is_float(t) || (t == DType::kF64) != wide)
      reject(where, std::string("a ") + dtype_name(t) + " operand with a " + dtype_name(w.dtype) + " weight");
  auto with = [](Operand o) { return o.strides.push_back(1), o; };
  operand("x", with(x.x), {x.batch, k}, false, x.row_multiple);
  operand("out", with(x.out), {x.batch, n}, true, x.row_multiple);
  if (x.adds && x.out.ref.dtype != DType::kF32) reject(where, "only a product whose result is float32 adds to what is in out");
  if (x.rounds != DType::kF32 && (wide || x.adds || (x.rounds != DType::kF16 && x.rounds != DType::kBF16)))
    reject(where, std::string("sums of ") + dtype_name(w.dtype) + " that are rounded to " + dtype_name(x.rounds));
  activation(x, wide);
  bound("bias", x.bias, -1, static_cast<int64_t>(p.preps.size()) - 1);
  if (x.bias < 0) return;
  const Prep& b = p.preps[x.bias];
  prepared(x.bias);
  if (b.kind != PrepKind::kDense || product(b.n_extents) != n || b.dtype != (wide ? DType::kF64 : DType::kF32))
    reject(where, "bias " + str(x.bias) + " is not a dense operand of " + str(n) + (wide ? " float64" : " float32") + " elements");
}

void Checker::activation(const Matmul& x, bool wide) const {
  const size_t want = kActivationParameters[static_cast<int>(x.activation)];
  if (x.parameters.size() != want)
    reject(where, "its activation takes " + str(want) + " parameters, not " + str(x.parameters.size()));
  for (double v : x.parameters) {
    const double size = x.activation == Activation::kScale ? std::abs(v) : v;
    if (!(size >= 0x1p-100 && size <= 0x1p100)) reject(where, "a parameter of its activation is not in 2**-100..2**100");
  }
  if (wide && x.activation > Activation::kRelu) reject(where, "float64 sums have no such activation");
}

// Only products of bfloat16 can be multiplied in more than one way.
void Checker::multiplied(Product product, DType t) const {
  if (product != Product::kBest && t != DType::kBF16)
    reject(where,
           "product is " + str(static_cast<int64_t>(product)) + ", which only bfloat16 can have, and this is " + dtype_name(t));
}

std::vector<int64_t> Checker::loops(const std::vector<int64_t>& kept, const std::vector<int64_t>& reduced) const {
  std::vector<int64_t> all = kept;
  all.insert(all.end(), reduced.begin(), reduced.end());
  count("kept and reduced", all);
  return all;
}

void Checker::foldable(Reduction how, DType t) const {
  bool logical = how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor;
  if (logical ? is_float(t) : t == DType::kBool && how != Reduction::kMax && how != Reduction::kMin)
    reject(where, std::string(dtype_name(t)) + " values have no such reduction");
}

void Checker::check(const Reduce& x) {
  operand("x", x.x, loops(x.kept, x.reduced), false);
  operand("out", x.out, x.kept, true);
  if (x.how < Reduction::kArgMax) return foldable(x.how, x.x.ref.dtype);
  DType t = x.out.ref.dtype;
  if (x.reduced.size() != 1 || is_float(t) || t == DType::kBool)
    reject(where, "argmax and argmin reduce one dimension to an integer");
}

void Checker::check(const ExpRows& x) {
  bound("n", x.n, 1, kMaxCount);
  if (x.sums.size() > 1) reject(where, "the sums of a row have one place");
  const std::vector<int64_t> all = loops(x.kept, {x.n});
  operand("x", x.x, all, false);
  operand("shift", x.shift, x.kept, false);
  operand("out", x.out, all, true);
  for (const Operand& s : x.sums) operand("sums", s, x.kept, true);
  if ((x.x.strides.back() != 1 || x.out.strides.back() != 1) && x.n > 1) reject(where, "the elements of a row are not dense");
  for (const Operand* o : {&x.x, &x.out})
    if (!is_float(o->ref.dtype) || compute_type(o->ref.dtype) != DType::kF32)
      reject(where, std::string("makes ") + dtype_name(x.out.ref.dtype) + " of " + dtype_name(x.x.ref.dtype));
  if (x.shift.ref.dtype != DType::kF32 || (!x.sums.empty() && x.sums[0].ref.dtype != DType::kF32))
    reject(where, "shift and sums are float32");
}

void Checker::check(const Scan& x) {
  count("extents", x.extents);
  if (x.extents.empty()) reject(where, "there is no dimension to scan");
  operand("x", x.x, x.extents, false);
  operand("out", x.out, x.extents, true);
  if (x.x.ref.dtype != x.out.ref.dtype) reject(where, "x and out differ in type");
  if (x.x.ref.dtype == DType::kBool || (x.how == Cumulative::kLogSumExp && !is_float(x.x.ref.dtype)))
    reject(where, std::string(dtype_name(x.x.ref.dtype)) + " values have no such cumulative operation");
}

void Checker::check(const Accumulate& x) {
  tiles_only();
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  const Sink& s = p.sinks[x.sink];
  operand("x", x.x, loops(x.kept, x.reduced), false);
  std::vector<int64_t> strides = x.sum_strides;
  if (strides.empty()) {
    if (product(x.kept) != s.elements)
      reject(where, "folds " + str(product(x.kept)) + " elements into a sink of " + str(s.elements));
    strides.assign(x.kept.size(), 0);
    for (size_t d = x.kept.size(), step = 1; d-- > 0; step *= static_cast<size_t>(x.kept[d]))
      strides[d] = static_cast<int64_t>(step);
  }
  sums(x.sums, x.kept, strides, s.elements);
  if (x.x.ref.dtype != s.dtype)
    reject(where, std::string("folds ") + dtype_name(x.x.ref.dtype) + " into a sink of " + dtype_name(s.dtype));
  fold_into(x.sink, Fold::kValues);
}

void Checker::check(const AccumulateMatmul& x) {
  tiles_only();
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  bound("row_multiple", x.row_multiple, 1, kMaxCount);
  if (Wide{p.rows} * x.row_multiple > kMaxCount) reject(where, "rows times row_multiple is more than 2**48");
  count("product", {x.batch, x.m, x.n});
  Sink& s = p.sinks[x.sink];
  std::vector<int64_t> of = x.matrices.empty() ? std::vector<int64_t>{x.m, x.m, x.n} : x.matrices;
  if (of.size() != 3) reject(where, "matrices has neither 0 nor 3 numbers");
  const Wide each = count("matrices", {of[0], of[2]});
  bound("matrices", of[1], 1, of[0]);
  if (each * x.batch != s.elements)
    reject(where, "adds " + str(x.batch) + " matrices of " + str(static_cast<int64_t>(each)) + " elements to a sink of " +
                      str(s.elements));
  if (s.columns != 0 && (s.height != of[0] || s.rows != of[1] || s.columns != of[2]))
    reject(where, "sink " + str(x.sink) + " is fed by products of other shapes");
  s.height = of[0], s.rows = of[1], s.columns = of[2];
  const bool of_rows = x.n == s.columns && (x.m == s.rows || x.m == s.height % s.rows);
  const bool of_columns = x.m == s.height && x.m == s.rows && x.n <= s.columns;
  if (!of_rows && !of_columns) reject(where, "a product of " + str(x.m) + " x " + str(x.n) + " is no part of its sink's matrices");
  sums(x.sums, {x.batch, x.m * x.n}, {static_cast<int64_t>(each), 1}, s.elements);
  const int64_t part = of_rows ? s.rows * s.columns : kSumGroup * s.height;
  bool aligned = x.sums.offset % part == 0;
  for (int64_t stride : x.sums.loop_strides) aligned &= stride % part == 0;
  if (!aligned) reject(where, "sums do not begin with a part of its sink's matrices");
  DType t = x.x.ref.dtype;
  if (!is_float(t) || x.y.ref.dtype != t)
    reject(where, std::string("multiplies ") + dtype_name(t) + " and " + dtype_name(x.y.ref.dtype));
  if (s.how != Reduction::kSum || s.dtype != (t == DType::kF64 ? DType::kF64 : DType::kF32))
    reject(where, std::string("a product of ") + dtype_name(t) + " cannot be added to a sink of " + dtype_name(s.dtype));
  multiplied(x.product, t);
  if (x.x.strides.size() != 1 || x.y.strides.size() != 1) reject(where, "x and y each have one batch stride");
  auto with = [](Operand o) { return o.strides.push_back(1), o; };
  operand("x", with(x.x), {x.batch, x.m}, false, x.row_multiple);
  operand("y", with(x.y), {x.batch, x.n}, false, x.row_multiple);
  fold_into(x.sink, Fold::kProducts);
}

// Accumulators over `extents` at `strides`, from where `x` says, are those of a sink of `elements`.
void Checker::sums(const Sums& x, const std::vector<int64_t>& extents, const std::vector<int64_t>& strides,
                   int64_t elements) const {
  if (strides.size() != extents.size()) reject(where, "sums has " + str(strides.size()) + " strides, not " + str(extents.size()));
  if (x.loop_strides.size() > counts.size())
    reject(where, "sums has strides for " + str(x.loop_strides.size()) + " loops, inside of " + str(counts.size()));
  bound("sums offset", x.offset, 0, kMaxCount);
  Wide last = x.offset;
  auto extend = [&](int64_t extent, int64_t stride) {
    bound("sums stride", stride, 0, kMaxCount);
    last += Wide{stride} * (extent - 1);
  };
  for (size_t d = 0; d < extents.size(); ++d) extend(extents[d], strides[d]);
  for (size_t l = 0; l < x.loop_strides.size(); ++l) extend(counts[l], x.loop_strides[l]);
  if (last >= elements) reject(where, "folds beyond the " + str(elements) + " elements of its sink");
}

// One stage owns a sink, and folds into it in one way: products accumulate in the sink's type, sums of values in a wider one.
void Checker::fold_into(int64_t sink, Fold fed) {
  int64_t& owner = sink_stage[sink];
  if (owner >= 0 && owner != stage) reject(where, "sink " + str(sink) + " is already folded by stage " + str(owner));
  if (owner >= 0 && p.sinks[sink].fed != fed) reject(where, "sink " + str(sink) + " is fed in two ways");
  if (p.sinks[sink].per_batch() && fed != Fold::kValues && fed != Fold::kProducts)
    reject(where, "sink " + str(sink) + " is one for each batch, and folds by indices");
  owner = stage;
  p.sinks[sink].fed = fed;
}

void Checker::tiles_only() const {
  if (stationary) reject(where, "works on tiles, and stands where there are no rows");
}

void Checker::prepared(int64_t prep) const {
  if (p.preps[prep].local && !packed[prep]) reject(where, "prepared operand " + str(prep) + " is not packed before");
}

void Checker::indexed(const Operand& index, int64_t rows, const std::vector<int64_t>& index_extents) {
  DType t = index.ref.dtype;
  if (is_float(t) || t == DType::kBool) reject(where, std::string("an index cannot be ") + dtype_name(t));
  bound("count", rows, 1, kMaxCount);
  count("index_extents", index_extents);
  operand("index", index, index_extents, false);
}

void Checker::filled(const std::vector<double>& fill) const {
  if (fill.size() != 1 && fill.size() != 2) reject(where, "fill is one number, or two for a large integer");
}

// A table of `rows` rows, any of which is read.
void Checker::table(const char* what, const Operand& x, int64_t rows, const std::vector<int64_t>& row) {
  access(what, x.ref, false);
  std::vector<int64_t> extents{rows}, strides{x.row_stride};
  extents.insert(extents.end(), row.begin(), row.end());
  strides.insert(strides.end(), x.strides.begin(), x.strides.end());
  count("extents", row);
  reach(what, x.ref, extents, strides, "reads");
}

void Checker::check(const Gather& x) {
  indexed(x.index, x.count, x.index_extents);
  DType t = x.out.ref.dtype;
  if (x.table.ref.dtype != t)
    reject(where, std::string("the table is ") + dtype_name(x.table.ref.dtype) + " and the tile " + dtype_name(t));
  filled(x.fill);
  table("table", x.table, x.count, x.extents);
  operand("out", x.out, loops(x.index_extents, x.extents), true);
}

void Checker::folds(const AccumulateAt& x) {
  tiles_only();
  indexed(x.index, x.count, x.index_extents);
  bound("sink", x.sink, 0, static_cast<int64_t>(p.sinks.size()) - 1);
  const Sink& s = p.sinks[x.sink];
  Wide elements = Wide{x.count} * count("extents", x.extents);
  if (elements != s.elements)
    reject(where, "folds into " + str(x.count) + " rows that are not those of a sink of " + str(s.elements));
  if (x.x.ref.dtype != s.dtype && compute_type(x.x.ref.dtype) != s.dtype)
    reject(where, std::string("folds ") + dtype_name(x.x.ref.dtype) + " into a sink of " + dtype_name(s.dtype));
}

void Checker::check(const AccumulateAt& x) {
  folds(x);
  operand("x", x.x, loops(x.index_extents, x.extents), false);
  rows_of(x);
}

// What is asked of the rows that are folded, once they are known to lie in memory.
void Checker::rows_of(const AccumulateAt& x) {
  const Reduction how = p.sinks[x.sink].how;
  if (how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor)
    reject(where, "rows have no logical fold by index");
  int64_t step = 1;
  for (size_t d = x.extents.size(); d-- > 0; step *= x.extents[d])
    if (x.extents[d] > 1 && x.x.strides[x.index_extents.size() + d] != step)
      reject(where, "the elements of a row of x are not dense");
  if (x.ordered && (p.order < 0 || x.x.ref.space != Space::kIn || product(x.index_extents) != 1))
    reject(where, "x is read in the order of the stream; it must be an input with one index for each row");
  if (x.sorted && (sink_stage[x.sink] >= 0 || !counts.empty()))
    reject(where, "sink " + str(x.sink) + " with sorted indices is fed twice");
  fold_into(x.sink, x.sorted ? Fold::kSegments : Fold::kRows);
  p.sinks[x.sink].rows = x.count;
}

void Checker::check(const AccumulateScaled& x) {
  check(static_cast<const AccumulateAt&>(x));
  scaled(x);
}

void Checker::scaled(const AccumulateScaled& x) {
  Sink& s = p.sinks[x.sink];
  if (!x.sorted || x.ordered || !x.index_extents.empty() || x.x.row_stride <= 0)
    reject(where, "a scaled sum takes rows of a tile by sorted indices, one for each row");
  if (s.how != Reduction::kSum || s.dtype != DType::kF32) reject(where, "a scaled sum is of float32");
  const DType t = x.top.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32) reject(where, std::string("its tops are ") + dtype_name(t));
  bound("heads", x.heads, 1, product(x.extents));
  if (product(x.extents) % x.heads != 0) reject(where, str(x.heads) + " heads do not share out a row");
  operand("top", x.top, {x.heads}, false);
  s.heads = x.heads, s.finite = x.finite;
}

void Checker::check(const AccumulateTaken& x) {
  folds(x);
  table("x", x.x, x.rows, x.extents);
  if (!x.sorted || x.ordered || !x.index_extents.empty() || x.x.row_stride <= 0 || p.sinks[x.sink].how != Reduction::kSum ||
      p.sinks[x.sink].dtype != DType::kF32)
    reject(where, "rows of a table are added up by sorted indices, one for each row of the tile, in float32");
  rows_of(x);
  bound("heads", x.heads, 0, kMaxCount);
  if (x.heads > 0) scaled(x);
  filled(x.fill);
  indexed(x.taken, x.rows, {});
  bound("factors", x.factors, 0, product(x.extents));
  if (x.factors == 0) return;
  if (product(x.extents) % x.factors != 0) reject(where, str(x.factors) + " factors do not share out a row");
  if (x.factor.ref.dtype != DType::kF32) reject(where, std::string("its factors are ") + dtype_name(x.factor.ref.dtype));
  operand("factor", x.factor, {x.factors}, false);
  if (x.factors > 1 && x.factor.strides[0] != 1) reject(where, "the factors of a row are not dense");
}

void Checker::check(const TakenDot& x) {
  tiles_only();
  bound("heads", x.heads, 1, kMaxCount);
  bound("inner", x.inner, 1, kMaxCount);
  const int64_t width = count("heads and inner", {x.heads, x.inner});
  const DType t = x.x.x.ref.dtype, out = x.out.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32 || x.y.x.ref.dtype != t || !is_float(out) || compute_type(out) != DType::kF32)
    reject(where, std::string("makes ") + dtype_name(out) + " of " + dtype_name(t) + " and " + dtype_name(x.y.x.ref.dtype));
  for (const Rows* r : {&x.x, &x.y}) {
    const char* const what = r == &x.x ? "x" : "y";
    if (r->x.strides != std::vector<int64_t>{1}) reject(where, std::string("the elements of a row of ") + what + " are not dense");
    if (r->rows == 0) {
      operand(what, r->x, {width}, false);
      continue;
    }
    indexed(r->taken, r->rows, {});
    filled(r->fill);
    table(what, r->x, r->rows, {width});
  }
  operand("out", x.out, {x.heads}, true);
  if (x.out.strides[0] != 1 || x.out.row_stride < x.heads) reject(where, "rows of out overlap, or are not dense");
}

void Checker::check(const RunMax& x) {
  tiles_only();
  indexed(x.index, x.count, {});
  const DType t = x.x.ref.dtype;
  if (!is_float(t) || compute_type(t) != DType::kF32 || x.out.ref.dtype != t)
    reject(where, std::string("makes ") + dtype_name(x.out.ref.dtype) + " of " + dtype_name(t));
  count("extents", x.extents);
  operand("x", x.x, x.extents, false);
  operand("out", x.out, x.extents, true);
  if (x.out.row_stride < product(x.extents)) reject(where, "rows of out overlap");
  for (const Operand* o : {&x.x, &x.out}) {
    int64_t step = 1;
    for (size_t d = x.extents.size(); d-- > 0; step *= x.extents[d])
      if (x.extents[d] > 1 && o->strides[d] != step) reject(where, "the elements of a row are not dense");
  }
}

void Checker::select(const Select& x, bool takes) {
  bound("inner", x.inner, 1, kMaxCount);
  bound("indices", x.indices, 1, kMaxCount);
  indexed(x.index, x.count, {x.indices});
  if (x.index.row_stride != 0) reject(where, "its indices depend on the row");
  if (Wide{x.count} * x.inner > INT32_MAX || Wide{x.indices} * x.inner > INT32_MAX) reject(where, "a dimension is too long");
  if (x.x.ref.dtype != x.out.ref.dtype)
    reject(where, std::string("selects ") + dtype_name(x.x.ref.dtype) + " as " + dtype_name(x.out.ref.dtype));
  auto check = [&](const char* what, const Operand& o, int64_t extent, bool write) {
    const size_t rank = x.outer.size() + 1;
    if (o.strides.size() != rank) reject(where, std::string(what) + " has " + str(o.strides.size()) + " strides, not " + str(rank));
    Operand with = o;
    std::vector<int64_t> extents = x.outer;
    extents.insert(extents.end(), {extent, x.inner});
    with.strides.push_back(1);
    count(what, extents);
    operand(what, with, extents, write);
    if (extent > 1 && o.strides.back() != x.inner) reject(where, std::string(what) + " is not dense along what is selected");
  };
  check("x", x.x, takes ? x.count : x.indices, false);
  check("out", x.out, takes ? x.indices : x.count, true);
}

void Checker::check(const Take& x) {
  filled(x.fill);
  select(x, true);
}

void Checker::check(const Put& x) {
  if (x.x.ref.dtype == DType::kBool) reject(where, "bool values have no sum");
  select(x, false);
}

void Checker::check(const Pack& x) {
  bound("prep", x.prep, 0, static_cast<int64_t>(p.preps.size()) - 1);
  if (!p.preps[x.prep].local) reject(where, "prepared operand " + str(x.prep) + " is prepared before any stage runs");
  prep(p.preps[x.prep]);
  packed[x.prep] = 1;
}

void Checker::check(const Dot& x) {
  count("product", {x.batch, x.m, x.n, x.k});
  DType t = x.x.ref.dtype;
  bool wide = t == DType::kF64;
  if (!is_float(t) || x.y.ref.dtype != t)
    reject(where, std::string("multiplies ") + dtype_name(t) + " and " + dtype_name(x.y.ref.dtype));
  if (!is_float(x.out.ref.dtype) || (x.out.ref.dtype == DType::kF64) != wide)
    reject(where, std::string("a ") + dtype_name(x.out.ref.dtype) + " result of " + dtype_name(t) + " operands");
  if (x.x.strides.size() != 2 || x.y.strides.size() != 3 || x.out.strides.size() != 2)
    reject(where, "x and out have two strides, and y three");
  auto with = [](Operand o) { return o.strides.push_back(1), o; };
  operand("x", with(x.x), {x.batch, x.m, x.k}, false);
  operand("y", x.y, {x.batch, x.n, x.k}, false);
  operand("out", with(x.out), {x.batch, x.m, x.n}, true);
  if (x.k > (int64_t{1} << 24) || x.n > (int64_t{1} << 24)) reject(where, "a side of y has more than 2**24 elements");
}

// Vector programs: registers have a value of the right type before they are read.

void Checker::check(const Vector& x) {
  count("extents", x.extents);
  for (size_t i = 0; i < x.loads.size(); ++i) operand("load " + str(i), x.loads[i], x.extents, false);
  for (size_t i = 0; i < x.stores.size(); ++i) operand("store " + str(i), x.stores[i], x.extents, true);
  if (x.collapse_rows) {
    for (const auto* list : {&x.loads, &x.stores})
      for (const Operand& o : *list)
        if (x.extents.empty() || Wide{x.extents[0]} * o.strides[0] != o.row_stride)
          reject(where, "collapse_rows, but an operand's rows and first extent are not one loop");
  }
  std::vector<int> types(kMaxRegisters, -1);
  std::string instruction = where;
  for (size_t i = 0; i < x.code.size(); ++i) {
    where = instruction + " operation " + str(i) + " (" + opcode_name(x.code[i].op) + ")";
    micro(x, x.code[i], types);
  }
  where = instruction;
}

void Checker::source(int64_t r, DType type, const std::vector<int>& types) const {
  bound("register", r, 0, kMaxRegisters - 1);
  if (types[r] < 0) reject(where, "register " + str(r) + " has no value yet");
  if (types[r] != static_cast<int>(type))
    reject(where, "register " + str(r) + " is " + dtype_name(static_cast<DType>(types[r])) + ", not " + dtype_name(type));
}

// How many of the numbers a to d an operation reads.
static int numbers_of(Opcode op) {
  switch (op) {
    case Opcode::op_const: return 0;
    case Opcode::op_load:
    case Opcode::op_convert: return 1;
    case Opcode::op_store: return 2;
    case Opcode::op_index: return 3;
    default: return operands_of(op);
  }
}

void Checker::micro(const Vector& x, const Micro& m, std::vector<int>& types) const {
  const int64_t numbers[] = {m.a, m.b, m.c, m.d};
  for (int i = numbers_of(m.op); i < 4; ++i)
    if (numbers[i] != 0) reject(where, "operand " + str(i) + ", which it has not, is " + str(numbers[i]) + " instead of 0");
  auto half = [](DType t) { return t == DType::kF16 || t == DType::kBF16; };
  if (m.op == Opcode::op_store) {
    bound("operand", m.a, 0, static_cast<int64_t>(x.stores.size()) - 1);
    bound("register", m.b, 0, kMaxRegisters - 1);
    if (types[m.b] < 0) reject(where, "register " + str(m.b) + " has no value yet");
    return;
  }
  if (half(m.type)) reject(where, std::string("a register cannot be ") + dtype_name(m.type));
  bound("register", m.dst, 0, kMaxRegisters - 1);
  DType result = m.type;
  if (m.op == Opcode::op_load) {
    bound("operand", m.a, 0, static_cast<int64_t>(x.loads.size()) - 1);
  } else if (m.op == Opcode::op_const) {
    if (m.imm.empty() || m.imm.size() > 2) reject(where, "a constant is one number, or two for a large integer");
  } else if (m.op == Opcode::op_convert) {
    if (static_cast<int>(m.from_type) < 0 || half(m.from_type)) reject(where, "the type to convert from is not a register's");
    source(m.a, m.from_type, types);
  } else if (m.op == Opcode::op_index) {
    bound("loop dimension", m.a, -static_cast<int64_t>(counts.size()), static_cast<int64_t>(x.extents.size()));
    bound("divisor", m.b, 1, kMaxCount);
    bound("modulus", m.c, 1, kMaxCount);
    if (m.type == DType::kBool) reject(where, "an index cannot be bool");
  } else {
    const bool bits = m.op == Opcode::op_bitcast;
    auto number = [&](DType t) { return static_cast<int>(t) > static_cast<int>(DType::kBool) && !half(t); };
    if (bits && (!number(m.from_type) || !number(m.type) || item_size(m.from_type) != item_size(m.type)))
      reject(where, "the bits of its operand are not those of a " + std::string(dtype_name(m.type)));
    source(m.a, bits ? m.from_type : m.op == Opcode::op_select ? DType::kBool : m.type, types);
    if (operands_of(m.op) > 1) source(m.b, m.type, types);
    if (operands_of(m.op) > 2) source(m.c, m.type, types);
    if (operands_of(m.op) > 3) source(m.d, m.type, types);
    if (gives_bool(m.op)) result = DType::kBool;
    immediates(m);
  }
  types[m.dst] = static_cast<int>(result);
}

void Checker::immediates(const Micro& m) const {
  auto whole = [&](size_t i, double low, double high) {
    double v = m.imm[i];
    if (!(v >= low && v <= high) || v != std::floor(v)) reject(where, "parameter " + str(i) + " is out of range");
  };
  size_t want = m.op == Opcode::op_integer_pow ? 1 : m.op == Opcode::op_reduce_precision ? 2 : m.imm.size();
  if (m.imm.size() != want) reject(where, "it takes " + str(want) + " parameters, not " + str(m.imm.size()));
  if (m.op == Opcode::op_integer_pow) whole(0, -2147483648.0, 2147483647.0);
  if (m.op == Opcode::op_reduce_precision) whole(0, 1, 11), whole(1, 0, 52);
}

}  // namespace kitsune::cpu
