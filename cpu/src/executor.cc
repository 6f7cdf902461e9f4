// Program -> Plan: every instruction resolved against a kernel table, loop nests normalised, queues and sinks laid out. Everything
// here happens once per compiled executable.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <utility>

#include "executor_internal.h"
#include "nest.h"
#include "segments.h"

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

namespace {

// How many partial sums of `bytes` a program keeps beside each other, where its work takes one thread `ns`. A function of
// the program, never of the schedule, the pool or the machine, so that equal inputs give equal bits.
//
// L strands keep L threads busy, but each is written once and read once more when all are added up: ns / L + L * bytes / rate is
// least at L = sqrt(ns * rate / bytes), and a worker beyond that costs more than it does. Where every worker has a strand, more of
// them only even out workers of different speed, which is worth some kUneven of the work. Two for a worker even out nothing as long
// as none is twice as fast as another: each of them takes its second one before any is free for a third.
int64_t strands_for(const Program& p, size_t bytes, double ns) {
  constexpr size_t kMost = size_t{256} << 20, kMostSpare = size_t{64} << 20;  // beside the arrays; of strands for evenness
  constexpr double kWorkerRate = 8, kMostRate = 200, kChunkBytes = 8192;      // bytes per ns; of a piece that one thread adds up
  constexpr double kUneven = 0.15, kStrandBytes = 1024;                       // what starting a strand costs, in bytes
  double size = static_cast<double>(bytes) + kStrandBytes, adders = std::min(static_cast<double>(p.workers), size / kChunkBytes);
  double rate = std::min(kMostRate, kWorkerRate * std::max(1.0, adders));
  double useful = std::sqrt(ns * rate / size), even = std::sqrt(kUneven) * useful;
  int64_t strands = std::min(p.workers, static_cast<int64_t>(std::min(useful, double{kMaxWorkers})));
  if (strands == p.workers) {
    double spare =
        std::min({even, static_cast<double>(std::max<int64_t>(64, 8 * strands)), static_cast<double>(kMostSpare) / size});
    const int64_t each = static_cast<int64_t>(spare) / strands;  // as many for every worker
    strands *= each > 2 ? each : 1;
  }
  size_t most = kMost;  // and the bytes of the arrays, as if of the 32 bits that their sums have
  for (const auto* list : {&p.inputs, &p.outputs})
    for (const Array& a : *list) most = plus(most, times(static_cast<size_t>(a.elements), std::max<size_t>(4, item_size(a.dtype))));
  strands = std::min(strands, static_cast<int64_t>(std::min<size_t>(most / std::max<size_t>(bytes, 1), kMaxWorkers)));
  return std::clamp<int64_t>(strands, 1, p.tiles);
}

// Where there are batches enough for all workers, strands end where batches do: their sums are stored as they are complete, and no
// strand keeps any. A few strands for each worker even out workers of different speed.
void strands_of_batches(Plan& plan) {
  constexpr int64_t kEach = 4;
  constexpr size_t kMost = size_t{256} << 20;
  const Program& p = plan.program;
  const int64_t batches = p.tiles / p.batch_tiles;
  if (batches < p.workers || (batches % p.workers != 0 && batches < kEach * p.workers)) return;
  const size_t bytes = plus(plan.stream_bytes, plan.batch_bytes);
  const int64_t most = static_cast<int64_t>(std::min<size_t>(plus(kMost, array_bytes(p.inputs, p.outputs)) / bytes, kMaxWorkers));
  int64_t strands = p.workers;
  while (strands + p.workers <= std::min({most, batches, kEach * p.workers})) strands += p.workers;
  if (p.workers == 1) strands = 1;
  if (strands > std::max<int64_t>(1, most) || (p.stages.size() > 1 && batches % strands != 0)) return;
  plan.strands = strands, plan.strand_unit = p.batch_tiles, plan.strand_bytes = bytes;
}

// Finds the sinks of which one product, outside of all loops, makes every element of every tile.
void find_written(Plan& plan) {
  const Program& p = plan.program;
  std::vector<int64_t> products(p.sinks.size(), 0);
  std::vector<bool> whole(p.sinks.size(), false);
  for (const Stage& s : p.stages) {
    size_t end = 0;  // of the loops and single rows so far
    for (size_t i = 0; i < s.body.size(); ++i) {
      const auto* loop = std::get_if<Loop>(&s.body[i]);
      const auto* one = std::get_if<Stationary>(&s.body[i]);
      const int64_t length = loop != nullptr ? loop->length : one != nullptr ? one->length : 0;
      const bool inside = i < end;
      end = std::max(end, i + 1 + static_cast<size_t>(length));
      const auto* m = std::get_if<AccumulateMatmul>(&s.body[i]);
      if (m == nullptr) continue;
      ++products[m->sink];
      whole[m->sink] = !inside && m->batch * m->m * m->n == p.sinks[m->sink].elements;
    }
  }
  // All that folds into a sink that products are folded into are products (the checker).
  for (size_t k = 0; k < p.sinks.size(); ++k) plan.sinks[k].written = whole[k] && products[k] == 1 && !p.sinks[k].per_batch();
}

void plan_sinks(Plan& plan, double ns) {
  const Program& p = plan.program;
  // Few rows of a sink take many of the tile's each, and their sums are in float64, as those of values are; many take few.
  constexpr int64_t kFewElements = 4096;
  for (const Sink& s : p.sinks) {
    const bool wide = s.fed == Fold::kValues || s.fed == Fold::kSegments || (s.fed == Fold::kRows && s.elements <= kFewElements);
    // One that nothing is folded into is any stage's.
    plan.sinks.push_back({accumulator_type(s.how, s.dtype, wide), 0, 0, s.per_batch()});
  }
  for (size_t s = 0; s < p.stages.size(); ++s)
    for (const Instruction& i : p.stages[s].body) {
      if (const auto* a = std::get_if<Accumulate>(&i)) plan.sinks[a->sink].stage = static_cast<int64_t>(s);
      if (const auto* a = std::get_if<AccumulateMatmul>(&i)) plan.sinks[a->sink].stage = static_cast<int64_t>(s);
      if (const auto* a = std::get_if<AccumulateAt>(&i)) plan.sinks[a->sink].stage = static_cast<int64_t>(s);
      if (const auto* a = std::get_if<AccumulateScaled>(&i)) plan.sinks[a->sink].stage = static_cast<int64_t>(s);
      if (const auto* a = std::get_if<AccumulateTaken>(&i)) plan.sinks[a->sink].stage = static_cast<int64_t>(s);
    }
  find_written(plan);
  for (size_t i = 0; i < p.sinks.size(); ++i) {
    SinkPlan& s = plan.sinks[i];
    Storer(plan.table, p.outputs[p.sinks[i].out].dtype, s.acc,
           "kitsune program: sink " + std::to_string(i));  // checks that it exists
    size_t& bytes = s.per_batch ? plan.batch_bytes : plan.stream_bytes;
    s.offset = bytes;
    const int64_t elements = p.sinks[i].elements;
    bytes = plus(bytes, p.sinks[i].fed == Fold::kSegments ? Segments::bytes(elements / p.sinks[i].rows, s.acc, p.sinks[i].heads)
                                                          : align_up(times(static_cast<size_t>(elements), item_size(s.acc))));
    auto& sinks = s.per_batch ? plan.stages[s.stage].batch_sinks : plan.stages[s.stage].sinks;
    sinks.push_back(static_cast<int64_t>(i));
  }
  plan.strand_bytes = plus(plan.stream_bytes, times(2, plan.batch_bytes));
  if (!p.sinks.empty()) plan.strands = strands_for(p, plan.strand_bytes, ns);
  if (plan.batch_bytes > 0) strands_of_batches(plan);
  plan.strands_bytes = times(plan.strand_bytes, static_cast<size_t>(plan.strands));
  limit_memory(plan.strands_bytes, p.inputs, p.outputs, "partial sums");
}

void plan_queues(Plan& plan) {
  const Program& p = plan.program;
  for (size_t i = 0; i < p.queues.size(); ++i) {
    const Ring& q = p.queues[i];
    plan.entry_stride.push_back(align_up(static_cast<size_t>(q.entry_bytes)));
    plan.ring_offset.push_back(plan.ring_bytes);
    plan.ring_bytes = plus(plan.ring_bytes, times(plan.entry_stride.back(), static_cast<size_t>(q.depth)));
    plan.stages[q.producer].outputs.push_back(static_cast<int64_t>(i));
    for (int64_t s : q.consumers) plan.stages[s].inputs.push_back(static_cast<int64_t>(i));
  }
  limit_memory(plan.ring_bytes, p.inputs, p.outputs, "queues");
}

// Stages, most downstream first: a stage is listed when everything that consumes from it is.
void order_stages(Plan& plan) {
  const Program& p = plan.program;
  std::vector<int64_t> waiting(p.stages.size(), 0);
  std::vector<int64_t>& order = plan.order;
  for (const Ring& q : p.queues) waiting[q.producer] += static_cast<int64_t>(q.consumers.size());
  for (size_t s = p.stages.size(); s-- > 0;)
    if (waiting[s] == 0) order.push_back(static_cast<int64_t>(s));
  for (size_t i = 0; i < order.size(); ++i)
    for (int64_t q : plan.stages[order[i]].inputs)
      if (--waiting[p.queues[q].producer] == 0) order.push_back(p.queues[q].producer);
  int64_t deepest = 1;
  for (const Ring& q : p.queues) deepest = std::max(deepest, q.depth);
  plan.window = std::min<int64_t>(p.tiles, 2 * std::max({deepest, plan.strands, int64_t{64}}));
}

// The folds right behind instruction `i` of `body`, a Vector, of values that nothing else reads; none of another one.
std::vector<const Accumulate*> folds_behind(const std::vector<Instruction>& body, size_t i, size_t end) {
  std::vector<const Accumulate*> found;
  if (!std::holds_alternative<Vector>(body[i])) return found;
  for (size_t k = i + 1; k < end; ++k) {
    const auto* fold = std::get_if<Accumulate>(&body[k]);
    if (fold == nullptr || !fold->only) break;
    found.push_back(fold);
  }
  return found;
}

// Marks the inputs whose rows `x` reads.
void mark_read(const Instruction& x, std::vector<bool>& read) {
  auto mark = [&](const Ref& r) {
    if (r.space == Space::kIn) read[static_cast<size_t>(r.index)] = true;
  };
  if (const auto* copy = std::get_if<StridedLoad>(&x)) mark(copy->array);
  if (const auto* product = std::get_if<Matmul>(&x)) mark(product->x.ref);
  if (const auto* fold = std::get_if<Reduce>(&x)) mark(fold->x.ref);
  if (const auto* exponentials = std::get_if<ExpRows>(&x)) mark(exponentials->x.ref);
  if (const auto* scan = std::get_if<Scan>(&x)) mark(scan->x.ref);
  if (const auto* fold = std::get_if<Accumulate>(&x)) mark(fold->x.ref);
  if (const auto* gradient = std::get_if<AccumulateMatmul>(&x)) mark(gradient->x.ref), mark(gradient->y.ref);
  if (const auto* vector = std::get_if<Vector>(&x))
    for (const Operand& load : vector->loads) mark(load.ref);
}

// Steps of the instructions [begin, end) of stage `s`, inside of `depth` loops; `temp` grows to what they need. `read`: the inputs
// that the instructions in front read.
Steps compile_body(const Plan& plan, size_t s, size_t begin, size_t end, int depth, size_t* temp, std::vector<bool>& read) {
  const Program& p = plan.program;
  Steps steps;
  for (size_t i = begin; i < end; ++i) {
    const Instruction& x = p.stages[s].body[i];
    auto inner = [&](int64_t length, int deeper) {
      size_t first = i + 1, last = i += static_cast<size_t>(length);
      return compile_body(plan, s, first, last + 1, deeper, temp, read);
    };
    if (const auto* loop = std::get_if<Loop>(&x)) {
      steps.push_back(compile(*loop, depth, inner(loop->length, depth + 1)));
    } else if (const auto* one = std::get_if<Stationary>(&x)) {
      steps.push_back(compile(*one, inner(one->length, depth)));
    } else {
      Compile c{p,
                plan.table,
                plan.preps,
                plan.sinks,
                "kitsune program: stage " + std::to_string(s) + " '" + p.stages[s].name + "' instruction " + std::to_string(i) +
                    " (" + kInstructionNames[x.index()] + ")",
                read};
      if (const auto folds = folds_behind(p.stages[s].body, i, end); !folds.empty())
        if (auto step = compile_summed(std::get<Vector>(x), folds, c)) {
          steps.push_back(std::move(step));
          *temp = std::max(*temp, align_up(steps.back()->temp_bytes()));
          mark_read(x, read);
          i += folds.size();
          continue;
        }
      steps.push_back(std::visit(
          [&](const auto& v) -> std::unique_ptr<const Step> {
            using T = std::decay_t<decltype(v)>;
            if constexpr (!std::is_same_v<T, Loop> && !std::is_same_v<T, Stationary>) return compile(v, c);
            return nullptr;
          },
          x));
      *temp = std::max(*temp, align_up(steps.back()->temp_bytes()));
      mark_read(x, read);
    }
  }
  return steps;
}

void compile_stages(Plan& plan) {
  const Program& p = plan.program;
  size_t scratch = 0, temp = plan.preps.empty() && p.sinks.empty() ? 0 : kPrepTempBytes;
  for (size_t s = 0; s < p.stages.size(); ++s) {
    scratch = std::max(scratch, align_up(static_cast<size_t>(p.stages[s].scratch_bytes)));
    std::vector<bool> read(p.inputs.size(), false);
    plan.stages[s].steps = compile_body(plan, s, 0, p.stages[s].body.size(), 0, &temp, read);
  }
  plan.packed_offset = scratch;
  plan.packed_from_offset = plus(scratch, plan.packed_bytes);
  plan.temp_offset = plus(plan.packed_from_offset, align_up(static_cast<size_t>(plan.packed_slots) * sizeof(char*)));
  plan.scratch_bytes = plus(plan.temp_offset, temp);
  limit_memory(plan.scratch_bytes, p.inputs, p.outputs, "temporary memory of a thread");
  size_t most = plus(kMostScratch, array_bytes(p.inputs, p.outputs));
  plan.most_workers =
      std::max<int64_t>(1, static_cast<int64_t>(std::min<size_t>(most / std::max<size_t>(plan.scratch_bytes, 1), kMaxWorkers)));
}

int64_t busiest(const Plan& plan) {
  int64_t stages = static_cast<int64_t>(plan.stages.size());
  int64_t tiles = plan.strands > 0 && stages == 1 ? plan.strands : plan.program.tiles;
  return std::max(static_cast<int64_t>(plan.prep_tasks.size()), std::min<int64_t>(tiles, 4096) * stages);
}

// Of an instruction, for one row: at 200 GFLOP/s, 8 register elements and 4 moved elements a ns, about the best a core of today
// does.
struct Cost {
  const Program& p;
  static double of(const std::vector<int64_t>& extents) { return static_cast<double>(product(extents)); }
  static double flops(int64_t rows, double k, double n) { return 2 * static_cast<double>(rows) * k * n / 200; }
  double operator()(const Matmul& m) const {
    const Prep& w = p.preps[m.weight];
    return flops(m.row_multiple * m.batch, of(w.k_extents), of(w.n_extents));
  }
  double operator()(const Vector& v) const { return of(v.extents) * static_cast<double>(v.code.size()) / 8; }
  double operator()(const Copy& c) const { return of(c.extents) / 4; }
  double operator()(const Reduce& r) const { return of(r.kept) * of(r.reduced) / 4; }
  double operator()(const ExpRows& e) const { return of(e.kept) * static_cast<double>(e.n); }
  double operator()(const Accumulate& r) const { return of(r.kept) * of(r.reduced) / 4; }
  double operator()(const AccumulateMatmul& m) const {
    return flops(m.row_multiple * m.batch, static_cast<double>(m.m), static_cast<double>(m.n));
  }
  double operator()(const Scan& s) const { return of(s.extents); }
  double operator()(const Gather& g) const { return of(g.index_extents) * of(g.extents) / 4; }
  double operator()(const AccumulateAt& a) const { return of(a.index_extents) * of(a.extents) / 4; }
  double operator()(const AccumulateScaled& a) const { return of(a.extents) / 4; }
  double operator()(const AccumulateTaken& a) const { return of(a.extents) / 2; }
  double operator()(const TakenDot& d) const { return static_cast<double>(d.heads * d.inner) / 2; }
  double operator()(const RunMax& m) const { return of(m.extents) / 2; }
  double operator()(const Take& t) const { return of(t.outer) * static_cast<double>(t.indices * t.inner) / 4; }
  double operator()(const Put& t) const { return of(t.outer) * static_cast<double>(t.count * t.inner) / 4; }
  double operator()(const Dot& d) const { return flops(d.batch * d.m, static_cast<double>(d.k), static_cast<double>(d.n)); }
  double operator()(const Pack&) const { return 0; }
  double operator()(const Loop&) const { return 0; }
  double operator()(const Stationary&) const { return 0; }
};

// Of the instructions [begin, end) of a body that runs on so many rows, all iterations counted. `each`: what one of them costs
// beside its work, for a tile.
double estimate(const Cost& cost, const std::vector<Instruction>& body, size_t begin, size_t end, double rows, double each) {
  double ns = 0;
  for (size_t i = begin; i < end; ++i) {
    const auto* loop = std::get_if<Loop>(&body[i]);
    const auto* one = std::get_if<Stationary>(&body[i]);
    const size_t length = static_cast<size_t>(loop != nullptr ? loop->length : one != nullptr ? one->length : 0);
    const auto* pack = std::get_if<Pack>(&body[i]);
    if (pack != nullptr) {  // once for a tile; 24 bytes a ns
      const Prep& x = cost.p.preps[pack->prep];
      ns +=
          rows / static_cast<double>(cost.p.tile_rows) * Cost::of(x.b_extents) * Cost::of(x.k_extents) * Cost::of(x.n_extents) / 6;
    }
    ns += std::visit(cost, body[i]) * rows + each * rows / static_cast<double>(cost.p.tile_rows);
    double again = loop != nullptr ? rows * static_cast<double>(loop->count) : rows / static_cast<double>(cost.p.tile_rows);
    if (length > 0) ns += estimate(cost, body, i + 1, i + 1 + length, again, 10);
    i += length;
  }
  return ns;
}

double estimate(const Program& p) {
  double ns = 0;
  for (const Stage& s : p.stages) ns += estimate(Cost{p}, s.body, 0, s.body.size(), static_cast<double>(p.rows), 0);
  return ns;
}

}  // namespace

size_t array_bytes(const std::vector<Array>& operands, const std::vector<Array>& results) {
  size_t bytes = 0;
  for (const auto* list : {&operands, &results})
    for (const Array& a : *list) bytes = plus(bytes, times(static_cast<size_t>(a.elements), item_size(a.dtype)));
  return bytes;
}

void limit_memory(size_t bytes, const std::vector<Array>& operands, const std::vector<Array>& results, const char* what) {
  constexpr size_t kMost = size_t{1} << 40, kFree = size_t{1} << 30, kTimes = 256;
  size_t arrays = array_bytes(operands, results);
  size_t most = std::min(kMost, plus(kFree, times(arrays, kTimes)));
  if (bytes <= most) return;
  std::string need = bytes == kTooLarge ? "more than 2**64" : std::to_string(bytes);
  throw ProgramError("kitsune program: the " + std::string(what) + " would take " + need + " bytes, more than " +
                     std::to_string(most) + ", which is the most for a call with " + std::to_string(arrays) + " bytes of arrays");
}

Address::Address(const Ref& ref, int64_t row_stride) : space(ref.space), index(static_cast<int32_t>(ref.index)) {
  int64_t item = static_cast<int64_t>(item_size(ref.dtype));
  offset_bytes = ref.offset * item;
  row_bytes = row_stride * item;
  of_tile = space != Space::kIn && space != Space::kOut;
  for (int64_t s : ref.loop_strides) loop_bytes.push_back(s * item);
  for (int64_t s : ref.batch_strides) batch_bytes.push_back(s * item);
  moves = !loop_bytes.empty() || !batch_bytes.empty();
}

Loader::Loader(const KernelTable& table, DType compute, DType storage, const std::string& where)
    : load_(table.load(compute, storage)) {
  if (load_ != nullptr) return;
  DType natural = compute_type(storage);
  load_ = table.load(natural, storage);
  convert_ = table.convert(compute, natural);
  if (load_ == nullptr || convert_ == nullptr)
    throw ProgramError(where + ": a " + dtype_name(storage) + " cannot be loaded as " + dtype_name(compute));
}

Storer::Storer(const KernelTable& table, DType storage, DType compute, const std::string& where)
    : store_(table.store(storage, compute)) {
  if (store_ != nullptr) return;
  DType natural = compute_type(storage);
  store_ = table.store(storage, natural);
  convert_ = table.convert(natural, compute);
  if (store_ == nullptr || convert_ == nullptr)
    throw ProgramError(where + ": a " + dtype_name(compute) + " cannot be stored as " + dtype_name(storage));
}

Plan::Plan(const Program& p, const KernelTable& kernel_table) : program(p), table(kernel_table) {
  stages.resize(p.stages.size());
  plan_queues(*this);
  const double ns = estimate(p);
  plan_sinks(*this, ns);
  order_stages(*this);
  plan_preps(*this);
  compile_stages(*this);
  most_workers = std::min(most_workers, busiest(*this));
  // Packed bytes are made at some 24 a ns. A single tile has one thread, however long it takes: helpers only pack.
  const bool one_tile = p.tiles == 1 && p.queues.empty();
  const double packing = static_cast<double>(prep_bytes) / 24;
  estimated_ns = ns + packing;
  shared_ns = one_tile ? packing : estimated_ns;
}

}  // namespace kitsune::cpu
