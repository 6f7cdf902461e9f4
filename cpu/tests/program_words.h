// Call -> words, for tests: the C++ twin of kitsune_jax/targets/cpu/bytecode.py's encode.
#pragma once

#include <cstring>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu::test {

class Words {
 public:
  std::vector<int64_t> of(const Call& c) {
    text(c.name), arrays(c.arrays), add(c.operands), add(c.results);
    each(c.parts, [&](const Part& part) { add(part.phase), list(part.reads), list(part.writes), program(part.program); });
    std::vector<int64_t> out{kMagic, kFormatVersion, static_cast<int64_t>(w_.size()) + kHeaderWords, crc32(w_.data(), w_.size())};
    out.insert(out.end(), w_.begin(), w_.end());
    return out;
  }

 private:
  void program(const Program& p) {
    text(p.name), list(p.axes), add(p.batch_axes), add(p.tile_rows), add(p.workers);
    arrays(p.inputs), arrays(p.outputs);
    each(p.preps, [&](const Prep& x) {
      add(x.kind), ref(x.source), add(x.dtype);
      list(x.b_extents), list(x.b_strides), list(x.k_extents), list(x.k_strides), list(x.n_extents), list(x.n_strides);
      add(x.product), add(x.local);
    });
    each(p.sinks, [&](const Sink& x) { add(x.how), add(x.dtype), add(x.elements), add(x.out), list(x.batch_strides); });
    each(p.queues, [&](const Ring& x) { add(x.producer), list(x.consumers), add(x.depth), add(x.entry_bytes); });
    each(p.stages, [&](const Stage& x) {
      text(x.name), add(x.scratch_bytes);
      body(x.body, 0, x.body.size());
    });
    add(p.order);
  }

  // The instructions [begin, end), a loop's with it.
  void body(const std::vector<Instruction>& all, size_t begin, size_t end) {
    const size_t count = w_.size();
    add(0);
    for (size_t i = begin; i < end; ++i, ++w_[count]) {
      add(all[i].index() + 1);
      std::visit([&](const auto& v) { instruction(v); }, all[i]);
      const auto* loop = std::get_if<Loop>(&all[i]);
      const auto* one = std::get_if<Stationary>(&all[i]);
      if (loop == nullptr && one == nullptr) continue;
      const size_t length = static_cast<size_t>(loop != nullptr ? loop->length : one->length);
      body(all, i + 1, i + 1 + length);
      i += length;
    }
  }
  template <class T>
  void add(T v) {
    w_.push_back(static_cast<int64_t>(v));
  }
  template <class T, class F>
  void each(const std::vector<T>& v, F f) {
    add(v.size());
    for (const T& x : v) f(x);
  }
  void list(const std::vector<int64_t>& v) {
    each(v, [&](int64_t x) { add(x); });
  }
  void text(const std::string& s) {
    add(s.size());
    for (unsigned char c : s) add(c);
  }
  void arrays(const std::vector<Array>& v) {
    each(v, [&](const Array& a) { add(a.dtype), add(a.elements); });
  }
  void real(double v) {
    int64_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    add(bits);
  }
  void ref(const Ref& r) { add(r.space), add(r.index), add(r.offset), add(r.dtype), list(r.loop_strides), list(r.batch_strides); }
  void operand(const Operand& o) { ref(o.ref), add(o.row_stride), list(o.strides); }
  void instruction(const Copy& x) { ref(x.array), list(x.axis_strides), list(x.extents), list(x.array_strides), operand(x.tile); }
  void instruction(const Matmul& x) {
    operand(x.x), add(x.row_multiple), add(x.batch), add(x.weight), add(x.bias), add(x.activation);
    operand(x.out);
    each(x.parameters, [&](double v) { real(v); });
    add(x.adds), add(x.rounds);
  }
  void instruction(const Vector& x) {
    list(x.extents), add(x.collapse_rows);
    each(x.loads, [&](const Operand& o) { operand(o); });
    each(x.stores, [&](const Operand& o) { operand(o); });
    each(x.code, [&](const Micro& m) {
      add(m.op), add(m.type), add(m.dst), add(m.a), add(m.b), add(m.c), add(m.d), add(m.from_type);
      each(m.imm, [&](double v) { real(v); });
    });
  }
  void instruction(const Reduce& x) { add(x.how), list(x.kept), list(x.reduced), operand(x.x), operand(x.out); }
  void instruction(const Scan& x) { add(x.how), add(x.reverse), list(x.extents), operand(x.x), operand(x.out); }
  void sums(const Sums& x) { add(x.offset), list(x.loop_strides); }
  void instruction(const AccumulateMatmul& x) {
    add(x.sink), add(x.row_multiple), add(x.batch), add(x.m), add(x.n), operand(x.x), operand(x.y);
    add(x.product), sums(x.sums), list(x.matrices);
  }
  void instruction(const Gather& x) {
    operand(x.table), add(x.count), add(x.mode);
    each(x.fill, [&](double v) { real(v); });
    list(x.index_extents), list(x.extents), operand(x.index), operand(x.out);
  }
  void instruction(const AccumulateAt& x) {
    add(x.sink), add(x.count), list(x.index_extents), list(x.extents), operand(x.index), operand(x.x);
    add(x.sorted), add(x.ordered);
  }
  void instruction(const AccumulateScaled& x) {
    instruction(static_cast<const AccumulateAt&>(x));
    operand(x.top), add(x.heads), add(x.finite);
  }
  void instruction(const AccumulateTaken& x) {
    instruction(static_cast<const AccumulateScaled&>(x));
    add(x.rows), add(x.mode);
    each(x.fill, [&](double v) { real(v); });
    operand(x.taken), operand(x.factor), add(x.factors);
  }
  void rows(const Rows& x) {
    operand(x.x), add(x.rows), add(x.mode);
    each(x.fill, [&](double v) { real(v); });
    operand(x.taken);
  }
  void instruction(const TakenDot& x) { add(x.heads), add(x.inner), rows(x.x), rows(x.y), operand(x.out); }
  void instruction(const ExpRows& x) {
    list(x.kept), add(x.n), real(x.factor), operand(x.x), operand(x.shift), operand(x.out);
    each(x.sums, [&](const Operand& s) { operand(s); });
  }
  void instruction(const RunMax& x) { add(x.count), list(x.extents), operand(x.index), operand(x.x), operand(x.out); }
  void select(const Select& x) {
    add(x.count), add(x.indices), add(x.inner), list(x.outer), operand(x.index), operand(x.x), operand(x.out);
  }
  void instruction(const Take& x) {
    select(x), add(x.mode);
    each(x.fill, [&](double v) { real(v); });
  }
  void instruction(const Put& x) { select(x); }
  void instruction(const Pack& x) { add(x.prep); }
  void instruction(const Dot& x) { add(x.batch), add(x.m), add(x.n), add(x.k), operand(x.x), operand(x.y), operand(x.out); }
  void instruction(const Loop& x) {
    add(x.count), add(x.reverse), add(x.within ? 7 : 0);
    if (x.within)
      for (int64_t n : {x.within->divisor, x.within->extent, x.within->step, x.within->low, x.within->high, x.within->which,
                        x.within->together})
        add(n);
  }
  void instruction(const Stationary&) {}
  void instruction(const Accumulate& x) {
    add(x.sink), list(x.kept), list(x.reduced), operand(x.x), sums(x.sums), list(x.sum_strides), add(x.only);
  }

  std::vector<int64_t> w_;
};

// The call of a program alone: its inputs are the operands, its outputs the results.
inline Call one_part(const Program& p) {
  Call c{p.name, p.inputs, static_cast<int64_t>(p.inputs.size()), static_cast<int64_t>(p.outputs.size()), {{0, {}, {}, p}}};
  c.arrays.insert(c.arrays.end(), p.outputs.begin(), p.outputs.end());
  for (int64_t k = 0; k < c.operands; ++k) c.parts[0].reads.push_back(k);
  for (int64_t k = 0; k < c.results; ++k) c.parts[0].writes.push_back(c.operands + k);
  return c;
}

inline std::vector<int64_t> encode(const Call& c) { return Words().of(c); }
inline std::vector<int64_t> encode(const Program& p) { return encode(one_part(p)); }

// After a change to the words: makes the header agree again, so that the parser and the validator see the change.
inline void reseal(std::vector<int64_t>& w) {
  w[2] = static_cast<int64_t>(w.size());
  w[3] = crc32(w.data() + kHeaderWords, w.size() - kHeaderWords);
}

}  // namespace kitsune::cpu::test
