// Words -> operands, and the instructions that go by indices: the fields in the order bytecode.py declares them.
#pragma once

#include "kitsune_cpu/program.h"
#include "words.h"

namespace kitsune::cpu {

inline Ref read_ref(Reader& r) {
  Ref x;
  x.space = static_cast<Space>(r.in_range("Ref.space", 0, 4));
  x.index = r.word("Ref.index");
  x.offset = r.word("Ref.offset");
  x.dtype = r.dtype("Ref.dtype");
  x.loop_strides = r.list("Ref.loop_strides");
  x.batch_strides = r.list("Ref.batch_strides");
  return x;
}

inline Operand read_operand(Reader& r) {
  Operand x;
  x.ref = read_ref(r);
  x.row_stride = r.word("Operand.row_stride");
  x.strides = r.list("Operand.strides");
  return x;
}

inline Gather read_gather(Reader& r) {
  Gather x;
  x.table = read_operand(r);
  x.count = r.word("Gather.count");
  x.mode = static_cast<OutOfRange>(r.in_range("Gather.mode", 0, 1));
  x.fill = r.many("Gather.fill", [&] { return r.real("Gather.fill"); });
  x.index_extents = r.list("Gather.index_extents");
  x.extents = r.list("Gather.extents");
  x.index = read_operand(r);
  x.out = read_operand(r);
  return x;
}

inline AccumulateAt read_accumulate_at(Reader& r) {
  AccumulateAt x;
  x.sink = r.word("AccumulateAt.sink");
  x.count = r.word("AccumulateAt.count");
  x.index_extents = r.list("AccumulateAt.index_extents");
  x.extents = r.list("AccumulateAt.extents");
  x.index = read_operand(r);
  x.x = read_operand(r);
  x.sorted = r.flag("AccumulateAt.sorted");
  x.ordered = r.flag("AccumulateAt.ordered");
  return x;
}

inline AccumulateScaled read_accumulate_scaled(Reader& r) {
  AccumulateScaled x{read_accumulate_at(r), read_operand(r)};
  x.heads = r.word("AccumulateScaled.heads");
  x.finite = r.flag("AccumulateScaled.finite");
  return x;
}

inline AccumulateTaken read_accumulate_taken(Reader& r) {
  AccumulateTaken x{read_accumulate_scaled(r), 0, OutOfRange::kClip, {}, {}, {}, 0};
  x.rows = r.word("AccumulateTaken.rows");
  x.mode = static_cast<OutOfRange>(r.in_range("AccumulateTaken.mode", 0, 1));
  x.fill = r.many("AccumulateTaken.fill", [&] { return r.real("AccumulateTaken.fill"); });
  x.taken = read_operand(r);
  x.factor = read_operand(r);
  x.factors = r.word("AccumulateTaken.factors");
  return x;
}

inline Rows read_rows(Reader& r) {
  Rows x;
  x.x = read_operand(r);
  x.rows = r.word("rows");
  x.mode = static_cast<OutOfRange>(r.in_range("mode", 0, 1));
  x.fill = r.many("fill", [&] { return r.real("fill"); });
  x.taken = read_operand(r);
  return x;
}

inline TakenDot read_taken_dot(Reader& r) {
  TakenDot x;
  x.heads = r.word("TakenDot.heads");
  x.inner = r.word("TakenDot.inner");
  x.x = read_rows(r), x.y = read_rows(r);
  x.out = read_operand(r);
  return x;
}

inline RunMax read_run_max(Reader& r) {
  return {r.word("RunMax.count"), r.list("RunMax.extents"), read_operand(r), read_operand(r), read_operand(r)};
}

inline void read_select(Reader& r, Select& x) {
  x.count = r.word("count");
  x.indices = r.word("indices");
  x.inner = r.word("inner");
  x.outer = r.list("outer");
  x.index = read_operand(r);
  x.x = read_operand(r);
  x.out = read_operand(r);
}

inline Take read_take(Reader& r) {
  Take x;
  read_select(r, x);
  x.mode = static_cast<OutOfRange>(r.in_range("Take.mode", 0, 1));
  x.fill = r.many("Take.fill", [&] { return r.real("Take.fill"); });
  return x;
}

inline Put read_put(Reader& r) {
  Put x;
  read_select(r, x);
  return x;
}

}  // namespace kitsune::cpu
