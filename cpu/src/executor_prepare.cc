// Prepared operands: weights packed into the panels of the ISA at hand, dense operands gathered and converted, as tasks that
// several workers share.
#include <algorithm>
#include <cstring>

#include "executor_internal.h"

namespace kitsune::cpu {
namespace {

constexpr int64_t kTaskBytes = 128 << 10;

// The element offset of every mixed-radix index, last extent fastest.
std::vector<int64_t> offsets(const std::vector<int64_t>& extents, const std::vector<int64_t>& strides) {
  std::vector<int64_t> out{0};
  for (size_t d = 0; d < extents.size(); ++d) {
    std::vector<int64_t> next;
    next.reserve(out.size() * static_cast<size_t>(extents[d]));
    for (int64_t base : out)
      for (int64_t i = 0; i < extents[d]; ++i) next.push_back(base + i * strides[d]);
    out = std::move(next);
  }
  return out;
}

// bfloat16 panels hold a weight exactly, but the kernels round x to bfloat16 to use them: only when every x already is.
struct Uses {
  bool only_bfloat16_rows = true;
  int64_t rows = 1;  // the most that one product with this weight has
};

Uses uses_of(const Program& p, int64_t prep) {
  Uses uses;
  for (const Stage& s : p.stages)
    for (const Instruction& i : s.body)
      if (const auto* m = std::get_if<Matmul>(&i); m != nullptr && m->weight == prep) {
        uses.only_bfloat16_rows &= m->x.ref.dtype == DType::kBF16;
        uses.rows = std::max(uses.rows, std::min(p.tile_rows, p.batch_rows) * m->row_multiple);
      }
  return uses;
}

// Cuts an operand of `units` pieces into tasks that are worth a thread's while, and not too many.
void add_tasks(Plan& plan, int64_t index, int64_t units, int64_t unit_bytes) {
  int64_t step = std::max({int64_t{1}, kTaskBytes / std::max<int64_t>(1, unit_bytes), (units - 1) / kMostPrepTasks + 1});
  for (int64_t begin = 0; begin < units; begin += step) plan.prep_tasks.push_back({index, begin, std::min(units, begin + step)});
}

void plan_weight(Plan& plan, int64_t index) {
  const Prep& x = plan.program.preps[index];
  PrepPlan& w = plan.preps[index];
  w.K = product(x.k_extents);
  w.N = product(x.n_extents);
  w.batch = product(x.b_extents);
  const Uses uses = uses_of(plan.program, index);
  bool narrow = x.dtype == DType::kBF16 && uses.only_bfloat16_rows;
  DType type = narrow ? DType::kBF16 : x.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  w.panel = plan.table.panel_for(type, x.product, {uses.rows, w.N, w.K});
  w.k_offset = offsets(x.k_extents, x.k_strides);
  w.n_offset = offsets(x.n_extents, x.n_strides);
  w.b_offset = offsets(x.b_extents, x.b_strides);
  w.batch_bytes = align_up(plan.table.packed_bytes(w.panel, w.K, w.N));
  w.bytes = times(w.batch_bytes, static_cast<size_t>(w.batch));
  w.panels = plan.table.panel_count(w.panel, w.N);
  int64_t panel_bytes = std::max<int64_t>(1, static_cast<int64_t>(w.batch_bytes) / std::max<int64_t>(1, w.panels));
  if (!x.local) add_tasks(plan, index, w.batch * w.panels, panel_bytes);
}

void plan_dense(Plan& plan, int64_t index) {
  const Prep& x = plan.program.preps[index];
  PrepPlan& d = plan.preps[index];
  int64_t n = product(x.n_extents), item = static_cast<int64_t>(item_size(x.dtype));
  d.bytes = align_up(static_cast<size_t>(n * item));
  // Checks now that the conversion exists.
  std::string where = "kitsune program: prepared operand " + std::to_string(index);
  Loader(plan.table, compute_type(x.dtype), x.source.dtype, where);
  Storer(plan.table, x.dtype, compute_type(x.dtype), where);
  int64_t outer = x.n_extents.empty() ? 1 : x.n_extents[0];
  d.panels = outer;
  if (!x.local) add_tasks(plan, index, outer, n / outer * item);
}

void prepare_dense(const Prep& x, const KernelTable& table, int64_t begin, int64_t end, const char* source, char* out, char* temp) {
  const int64_t item = static_cast<int64_t>(item_size(x.dtype)), from = static_cast<int64_t>(item_size(x.source.dtype));
  const DType compute = compute_type(x.dtype);
  Loader load(table, compute, x.source.dtype, "");
  Storer store(table, x.dtype, compute, "");
  char* values = temp;
  char* spare = temp + kPrepChunk * 8;
  // Operands: source, destination; the first extent covers [begin, end).
  std::vector<int64_t> extents = x.n_extents, source_bytes{0}, out_bytes{0};
  if (extents.empty()) extents.push_back(1);
  int64_t dense = item;
  for (size_t d = 0; d < extents.size(); ++d) {
    source_bytes.push_back(x.n_extents.empty() ? 0 : x.n_strides[d] * from);
    out_bytes.push_back(0);
  }
  for (size_t d = extents.size(); d-- > 0; dense *= extents[d]) out_bytes[d + 1] = dense;
  char* at[2] = {const_cast<char*>(source) + begin * source_bytes[1], out + begin * out_bytes[1]};
  extents[0] = end - begin;
  Nest nest = make_nest(extents, {source_bytes, out_bytes});
  nest.erase(nest.begin());  // no rows
  simplify(nest);
  if (nest.empty()) nest.push_back({1, false, -1, {from, item}});
  const Dim inner = nest.back();
  int64_t index[kMaxLoopDims + 1];
  walk(nest.data(), static_cast<int>(nest.size()) - 1, 1, at, 2, index, [&] {
    if (x.dtype == x.source.dtype && inner.stride[0] == item && inner.stride[1] == item) {
      std::memcpy(at[1], at[0], static_cast<size_t>(inner.n * item));
      return;
    }
    for (int64_t i = 0; i < inner.n; i += kPrepChunk) {
      int64_t n = std::min(kPrepChunk, inner.n - i);
      load(n, values, at[0] + i * inner.stride[0], inner.stride[0] / from, spare);
      store(n, at[1] + i * inner.stride[1], inner.stride[1] / item, values, spare);
    }
  });
}

// A worker keeps so many bytes of what it has packed.
constexpr size_t kKeptPacked = size_t{4} << 20;

// Slots of what Pack instructions prepare inside of loops: all blocks of a batch, if there is space.
void plan_slots(Plan& plan, const Pack& pack, const std::vector<int64_t>& counts) {
  const Prep& x = plan.program.preps[pack.prep];
  PrepPlan& w = plan.preps[pack.prep];
  std::vector<size_t> moving;
  for (size_t l = 0; l < x.source.loop_strides.size(); ++l)
    if (x.source.loop_strides[l] != 0) moving.push_back(l);
  w.kept = x.source.space == Space::kIn;
  if (!w.kept || moving.size() != 1) return;
  int64_t local = 0;
  for (const Prep& p : plan.program.preps) local += p.local;
  const int64_t most = static_cast<int64_t>(kKeptPacked / std::max<size_t>(w.bytes, 1)) / local;
  w.loop = moving[0];
  w.slots = std::max(w.slots, std::clamp<int64_t>(most, 1, counts[w.loop]));
}

void plan_slots(Plan& plan) {
  for (const Stage& stage : plan.program.stages) {
    std::vector<int64_t> counts;
    std::vector<size_t> ends;
    for (size_t i = 0; i < stage.body.size(); ++i) {
      while (!ends.empty() && ends.back() == i) ends.pop_back(), counts.pop_back();
      if (const auto* loop = std::get_if<Loop>(&stage.body[i])) {
        counts.push_back(loop->count);
        ends.push_back(i + 1 + static_cast<size_t>(loop->length));
      } else if (const auto* pack = std::get_if<Pack>(&stage.body[i])) {
        plan_slots(plan, *pack, counts);
      }
    }
  }
}

}  // namespace

void plan_preps(Plan& plan) {
  plan.preps.resize(plan.program.preps.size());
  for (size_t i = 0; i < plan.preps.size(); ++i) {
    if (plan.program.preps[i].kind == PrepKind::kWeight)
      plan_weight(plan, static_cast<int64_t>(i));
    else
      plan_dense(plan, static_cast<int64_t>(i));
    plan.preps[i].local = plan.program.preps[i].local;
  }
  plan_slots(plan);
  for (PrepPlan& w : plan.preps) {
    size_t& bytes = w.local ? plan.packed_bytes : plan.prep_bytes;
    w.offset = bytes;
    bytes = plus(bytes, times(w.bytes, static_cast<size_t>(w.slots)));
    w.first_slot = plan.packed_slots;
    if (w.local) plan.packed_slots += w.slots;
  }
  limit_memory(plan.prep_bytes, plan.program.inputs, plan.program.outputs, "packed weights");
}

void prepare(const Prep& x, const PrepPlan& w, const KernelTable& table, int64_t begin, int64_t end, const char* source, char* out,
             char* temp) {
  if (x.kind == PrepKind::kDense) return prepare_dense(x, table, begin, end, source, out, temp);
  const int64_t item = static_cast<int64_t>(item_size(x.source.dtype));
  for (int64_t at = begin; at < end;) {
    int64_t batch = at / w.panels, first = at % w.panels, last = std::min(w.panels, first + end - at);
    PackSource pack{source + w.b_offset[batch] * item, x.source.dtype, w.K, w.N, w.k_offset.data(), w.n_offset.data()};
    table.pack(w.panel, pack, first, last, out + static_cast<size_t>(batch) * w.batch_bytes);
    at += last - first;
  }
}

void run_prep_task(const Plan& plan, const PrepTask& t, char* const* ins, char* prepared, char* temp) {
  const Prep& x = plan.program.preps[t.prep];
  const PrepPlan& w = plan.preps[t.prep];
  const char* source = ins[x.source.index] + x.source.offset * static_cast<int64_t>(item_size(x.source.dtype));
  prepare(x, w, plan.table, t.begin, t.end, source, prepared + w.offset, temp);
}

}  // namespace kitsune::cpu
