// The validator: every reference stays inside its memory, types agree, and the stages can always make progress.
//
// Why a checked program cannot deadlock: a (stage, tile) waits for its producers at the same tile and, for a free slot, for its
// consumers at tile - depth. With a depth of at least 1 and an acyclic stage graph, both come earlier in the order (tile,
// topological position), so the least unfinished one can always run.
#include <algorithm>

#include "checker.h"

namespace kitsune::cpu {

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

}  // namespace kitsune::cpu
