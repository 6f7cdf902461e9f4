// A naive interpreter of Programs, element by element in double, stage after stage: what the executor is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "activated.h"
#include "kitsune_cpu/program.h"
#include "reference_online.h"
#include "reference_values.h"

namespace kitsune::cpu::test {

class Reference {
 public:
  Reference(const Program& p, std::vector<Bytes>& ins, std::vector<Bytes>& outs) : p_(p), ins_(ins), outs_(outs) {}

  void run() {
    for (const Ring& q : p_.queues) queues_.emplace_back(static_cast<size_t>(p_.tiles), Bytes(static_cast<size_t>(q.entry_bytes)));
    sinks_.resize(p_.sinks.size());
    // Any order of stages that respects the queues will do: repeat until each has run.
    std::vector<char> done(p_.stages.size(), 0);
    for (size_t pass = 0; pass < p_.stages.size(); ++pass)
      for (size_t s = 0; s < p_.stages.size(); ++s) {
        if (done[s]) continue;
        bool ready = true;
        for (const Ring& q : p_.queues)
          if (std::count(q.consumers.begin(), q.consumers.end(), static_cast<int64_t>(s))) ready = ready && done[q.producer];
        if (!ready) continue;
        done[s] = 1;
        scratch_.assign(static_cast<size_t>(p_.stages[s].scratch_bytes), 0);
        for (tile_ = 0; tile_ < p_.tiles; ++tile_) {
          row0_ = tile_ % p_.batch_tiles * p_.tile_rows;
          rows_ = std::min(p_.tile_rows, p_.batch_rows - row0_);
          first_row_ = tile_ / p_.batch_tiles * p_.batch_rows + row0_;
          batch_.assign(static_cast<size_t>(p_.batch_axes), 0);
          for (int64_t a = p_.batch_axes, number = tile_ / p_.batch_tiles; a-- > 0; number /= p_.axes[a])
            batch_[a] = number % p_.axes[a];
          body(p_.stages[s].body, 0, p_.stages[s].body.size());
        }
      }
    for (size_t i = 0; i < p_.sinks.size(); ++i) {
      const Sink& s = p_.sinks[i];
      DType t = p_.outputs[s.out].dtype;
      if (scaled_.count(static_cast<int64_t>(i)) > 0) scaled_[static_cast<int64_t>(i)].close(sinks_[i]);
      for (size_t e = 0; e < sinks_[i].size(); ++e) {
        const size_t n = static_cast<size_t>(s.elements);
        set(t, &outs_[s.out][(start(s, static_cast<int64_t>(e / n)) + e % n) * item_size(t)], sinks_[i][e]);
      }
    }
  }

 private:
  // Does a tile run iteration `number`?
  bool meets(const Within& w, int64_t number) const {
    int64_t x = w.extent, y = -1;
    for (int64_t r = row0_; r < row0_ + rows_; ++r) {
      x = std::min(x, r / w.divisor % w.extent);
      y = std::max(y, r / w.divisor % w.extent);
    }
    const int64_t first = number * w.step, last = first + w.step - 1;
    const int64_t begin = number / w.together * w.together * w.step, end = begin + w.together * w.step - 1;
    const bool met = x + w.low <= last && first <= y + w.high, whole = y + w.low <= begin && end <= x + w.high;
    return w.which == 0 ? met : w.which == 1 ? whole : met && !whole;
  }

  void body(const std::vector<Instruction>& all, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (const auto* loop = std::get_if<Loop>(&all[i])) {
        for (int64_t n = 0; n < loop->count; ++n) {
          const int64_t number = loop->reverse ? loop->count - 1 - n : n;
          if (loop->within && !meets(*loop->within, number)) continue;
          loops_.push_back(number);
          body(all, i + 1, i + 1 + static_cast<size_t>(loop->length));
          loops_.pop_back();
        }
        i += static_cast<size_t>(loop->length);
      } else if (const auto* one = std::get_if<Stationary>(&all[i])) {
        int64_t rows = std::exchange(rows_, 1);
        body(all, i + 1, i + 1 + static_cast<size_t>(one->length));
        rows_ = rows;
        i += static_cast<size_t>(one->length);
      } else {
        std::visit([this](const auto& x) { step(x); }, all[i]);
      }
    }
  }
  void step(const Loop&) {}
  void step(const Stationary&) {}

  char* at(const Ref& r, int64_t element) {
    char* base = nullptr;
    for (size_t l = 0; l < r.loop_strides.size(); ++l) element += r.loop_strides[l] * loops_[l];
    for (size_t a = 0; a < r.batch_strides.size(); ++a) element += r.batch_strides[a] * batch_[a];
    switch (r.space) {
      case Space::kIn: base = ins_[r.index].data(); break;
      case Space::kOut: base = outs_[r.index].data(); break;
      case Space::kScratch: base = scratch_.data(); break;
      case Space::kQueue: base = queues_[r.index][static_cast<size_t>(tile_)].data(); break;
      default: base = prep(r.index).data(); break;
    }
    return base + (r.offset + element) * static_cast<int64_t>(item_size(r.dtype));
  }
  char* at(const Operand& o, int64_t row, const std::vector<int64_t>& index, int64_t multiple = 1) {
    bool global = o.ref.space == Space::kIn || o.ref.space == Space::kOut;
    int64_t e = (row + (global ? row0_ * multiple : 0)) * o.row_stride;
    for (size_t d = 0; d < index.size(); ++d) e += index[d] * o.strides[d];
    return at(o.ref, e);
  }
  Bytes& prep(int64_t i) {
    const Prep& x = p_.preps[i];
    if (!preps_.count(i)) {
      Bytes& out = preps_[i];
      auto strides = joined(joined(x.b_strides, x.k_strides), x.n_strides);
      loop(joined(joined(x.b_extents, x.k_extents), x.n_extents), [&](const auto& index) {
        int64_t e = 0;
        for (size_t d = 0; d < index.size(); ++d) e += index[d] * strides[d];
        out.resize(out.size() + item_size(x.dtype));
        set(x.dtype, &out[out.size() - item_size(x.dtype)], get(x.source.dtype, at(x.source, e)));
      });
    }
    return preps_[i];
  }

  // The element of streamed arrays that a row of the stream is.
  int64_t element(int64_t row) {
    if (p_.order < 0) return row;
    int32_t at;
    std::memcpy(&at, &ins_[p_.order][static_cast<size_t>(row) * 4], 4);
    return at;
  }
  void copy(const Copy& x, bool gather) {
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t base = 0, row = element(first_row_ + r);
      for (size_t j = p_.axes.size(); j-- > 0; row /= p_.axes[j]) base += row % p_.axes[j] * x.axis_strides[j];
      loop(x.extents, [&](const auto& index) {
        int64_t e = base;
        for (size_t d = 0; d < index.size(); ++d) e += index[d] * x.array_strides[d];
        char *a = at(x.array, e), *t = at(x.tile, r, index);
        std::memcpy(gather ? t : a, gather ? a : t, item_size(x.array.dtype));
      });
    }
  }
  void step(const StridedLoad& x) { copy(x, true); }
  void step(const StridedStore& x) { copy(x, false); }

  void step(const Matmul& m) {
    const Prep& w = p_.preps[m.weight];
    int64_t K = product(w.k_extents), N = product(w.n_extents), size = static_cast<int64_t>(item_size(w.dtype));
    int64_t xs = static_cast<int64_t>(item_size(m.x.ref.dtype)), os = static_cast<int64_t>(item_size(m.out.ref.dtype));
    const char* weights = prep(m.weight).data();
    for (int64_t b = 0; b < m.batch; ++b)
      for (int64_t r = 0; r < rows_ * m.row_multiple; ++r)
        for (int64_t n = 0; n < N; ++n) {
          const double bias =
              m.bias < 0 ? 0
                         : get(p_.preps[m.bias].dtype, &prep(m.bias)[static_cast<size_t>(n) * item_size(p_.preps[m.bias].dtype)]);
          auto rounded = [&](double v) {
            uint16_t bits[4];  // a number of any type
            return m.rounds == DType::kF32
                       ? v
                       : (set(m.rounds, reinterpret_cast<char*>(bits), v), get(m.rounds, reinterpret_cast<char*>(bits)));
          };
          double sum = 0;
          const char* x = at(m.x, r, {b}, m.row_multiple);
          for (int64_t k = 0; k < K; ++k)
            sum += get(m.x.ref.dtype, x + k * xs) * get(w.dtype, weights + ((b * K + k) * N + n) * size);
          if (m.adds) sum += get(m.out.ref.dtype, at(m.out, r, {b}, m.row_multiple) + n * os);
          sum = rounded(rounded(sum) + bias);
          sum = activated(m.activation, m.parameters.data(), sum);
          set(m.out.ref.dtype, at(m.out, r, {b}, m.row_multiple) + n * os, sum);
        }
  }

  void step(const Vector& v) {
    for (int64_t r = 0; r < rows_; ++r)
      loop(v.extents, [&](const auto& index) {
        double reg[kMaxRegisters] = {};
        for (const Micro& m : v.code) micro(v, m, r, index, reg);
      });
  }
  void micro(const Vector& v, const Micro& m, int64_t r, const std::vector<int64_t>& index, double* reg) {
    double a = reg[m.a & 31], b = reg[m.b & 31], c = reg[m.c & 31];
    switch (m.op) {
      case Opcode::op_load: reg[m.dst] = get(v.loads[m.a].ref.dtype, at(v.loads[m.a], r, index)); break;
      case Opcode::op_store: set(v.stores[m.a].ref.dtype, at(v.stores[m.a], r, index), reg[m.b]); return;
      case Opcode::op_const: reg[m.dst] = m.imm[0]; break;
      case Opcode::op_convert: reg[m.dst] = a; break;
      case Opcode::op_index:
        reg[m.dst] = static_cast<double>((m.a < 0 ? loops_[-m.a - 1] : m.a == 0 ? first_row_ + r : index[m.a - 1]) / m.b % m.c);
        break;
      case Opcode::op_neg: reg[m.dst] = -a; break;
      case Opcode::op_exp: reg[m.dst] = std::exp(a); break;
      case Opcode::op_add: reg[m.dst] = a + b; break;
      case Opcode::op_sub: reg[m.dst] = a - b; break;
      case Opcode::op_mul: reg[m.dst] = a * b; break;
      case Opcode::op_max: reg[m.dst] = std::max(a, b); break;
      case Opcode::op_lt: reg[m.dst] = a < b; return;
      case Opcode::op_select: reg[m.dst] = a != 0 ? c : b; break;
      default: throw std::logic_error("the reference does not know this operation");
    }
    char rounded[8];
    set(m.type, rounded, reg[m.dst]);
    reg[m.dst] = get(m.type, rounded);
  }

  void step(const Reduce& x) {
    for (int64_t r = 0; r < rows_; ++r)
      loop(x.kept, [&](const auto& kept) {
        double acc = NAN;
        int64_t count = 0, best = 0;
        loop(x.reduced, [&](const auto& reduced) {
          double v = get(x.x.ref.dtype, at(x.x, r, joined(kept, reduced)));
          if (x.how >= Reduction::kArgMax) {
            bool better = x.how == Reduction::kArgMax ? v > acc : v < acc;
            if (count == 0 || (!std::isnan(acc) && (better || std::isnan(v)))) acc = v, best = count;
          } else {
            acc = count == 0 ? v : fold(x.how, acc, v);
          }
          ++count;
        });
        set(x.out.ref.dtype, at(x.out, r, kept), x.how >= Reduction::kArgMax ? static_cast<double>(best) : acc);
      });
  }

  void step(const ExpRows& x) {
    for (int64_t r = 0; r < rows_; ++r)
      loop(x.kept, [&](const auto& kept) {
        const double shift = get(DType::kF32, at(x.shift, r, kept));
        double sum = 0;
        for (int64_t i = 0; i < x.n; ++i) {
          const double e = std::exp(get(x.x.ref.dtype, at(x.x, r, joined(kept, {i}))) * x.factor - shift);
          set(x.out.ref.dtype, at(x.out, r, joined(kept, {i})), e);
          sum += e;
        }
        for (const Operand& s : x.sums) set(DType::kF32, at(s, r, kept), sum);
      });
  }

  void step(const Scan& x) {
    std::vector<int64_t> outer(x.extents.begin(), x.extents.end() - 1);
    int64_t n = x.extents.back();
    for (int64_t r = 0; r < rows_; ++r)
      loop(outer, [&](const auto& index) {
        double acc = 0;
        for (int64_t i = 0; i < n; ++i) {
          auto here = joined(index, {x.reverse ? n - 1 - i : i});
          double v = get(x.x.ref.dtype, at(x.x, r, here));
          constexpr Reduction kHow[] = {Reduction::kSum, Reduction::kProd, Reduction::kMax, Reduction::kMin};
          if (i == 0)
            acc = v;
          else if (x.how == Cumulative::kLogSumExp)
            acc = std::log(std::exp(acc) + std::exp(v));
          else
            acc = fold(kHow[static_cast<int>(x.how)], acc, v);
          set(x.out.ref.dtype, at(x.out, r, here), acc);
        }
      });
  }

  // The sums of the tile's batch, or of the whole stream.
  double* sums(int64_t sink) {
    const Sink& s = p_.sinks[sink];
    auto& all = sinks_[sink];
    const int64_t batches = s.per_batch() ? p_.tiles / p_.batch_tiles : 1;
    if (all.empty()) all.assign(static_cast<size_t>(s.elements * batches), identity(s.how, s.dtype));
    return all.data() + (s.per_batch() ? tile_ / p_.batch_tiles * s.elements : 0);
  }
  // The element of the result at which those of batch `number` begin.
  size_t start(const Sink& s, int64_t number) const {
    int64_t e = 0;
    for (size_t a = s.batch_strides.size(); a-- > 0; number /= p_.axes[a]) e += number % p_.axes[a] * s.batch_strides[a];
    return static_cast<size_t>(e);
  }
  int64_t moved(const Sums& x) const {
    int64_t e = x.offset;
    for (size_t l = 0; l < x.loop_strides.size(); ++l) e += x.loop_strides[l] * loops_[l];
    return e;
  }
  void step(const Accumulate& x) {
    double* acc = sums(x.sink);
    const Reduction how = p_.sinks[x.sink].how;
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t dense = 0;
      loop(x.kept, [&](const auto& kept) {
        int64_t e = x.sum_strides.empty() ? dense++ : 0;
        for (size_t d = 0; d < x.sum_strides.size(); ++d) e += kept[d] * x.sum_strides[d];
        double& sum = acc[e + moved(x.sums)];
        loop(x.reduced, [&](const auto& reduced) { sum = fold(how, sum, get(x.x.ref.dtype, at(x.x, r, joined(kept, reduced)))); });
      });
    }
  }

  void step(const AccumulateMatmul& a) {
    double* acc = sums(a.sink);
    const Sink& s = p_.sinks[a.sink];
    // The first row or column of the matrices that the product is added to.
    const int64_t from = moved(a.sums), column = a.n < s.columns ? from / s.height : 0,
                  row = a.n < s.columns ? 0 : from / s.columns;
    auto value = [](const Operand& o, const char* p, int64_t i) {
      return get(o.ref.dtype, p + i * static_cast<int64_t>(item_size(o.ref.dtype)));
    };
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t r = 0; r < rows_ * a.row_multiple; ++r) {
        const char *x = at(a.x, r, {b}, a.row_multiple), *y = at(a.y, r, {b}, a.row_multiple);
        for (int64_t i = 0; i < a.m; ++i)
          for (int64_t j = 0; j < a.n; ++j)
            acc[(b * s.height + row + i) * s.columns + column + j] += value(a.x, x, i) * value(a.y, y, j);
      }
  }

  double value(const Operand& o, int64_t r, const std::vector<int64_t>& i) { return get(o.ref.dtype, at(o, r, i)); }
  int64_t index_at(const Operand& o, int64_t r, const std::vector<int64_t>& i) { return static_cast<int64_t>(value(o, r, i)); }
  void step(const Gather& g) {
    for (int64_t r = 0; r < rows_; ++r)
      loop(g.index_extents, [&](const auto& outer) {
        int64_t i = index_at(g.index, r, outer);
        bool inside = i >= 0 && i < g.count;
        i = std::clamp<int64_t>(i, 0, g.count - 1);
        loop(g.extents, [&](const auto& inner) {
          int64_t e = i * g.table.row_stride;
          for (size_t d = 0; d < inner.size(); ++d) e += inner[d] * g.table.strides[d];
          double v = inside || g.mode == OutOfRange::kClip ? get(g.table.ref.dtype, at(g.table.ref, e)) : g.fill[0];
          set(g.out.ref.dtype, at(g.out, r, joined(outer, inner)), v);
        });
      });
  }
  void step(const AccumulateAt& a) {
    const Sink& s = p_.sinks[a.sink];
    auto& acc = sinks_[a.sink];
    if (acc.empty()) acc.assign(static_cast<size_t>(s.elements), identity(s.how, s.dtype));
    for (int64_t r = 0; r < rows_; ++r)
      loop(a.index_extents, [&](const auto& outer) {
        int64_t i = index_at(a.index, r, outer);
        if (i < 0 || i >= a.count) return;
        double* to = &acc[static_cast<size_t>(i * product(a.extents))];
        int64_t row = a.ordered ? element(first_row_ + r) - row0_ : r;
        loop(a.extents, [&](const auto& inner) { *to = fold(s.how, *to, value(a.x, row, joined(outer, inner))), ++to; });
      });
  }
  void step(const RunMax& m) {
    for (int64_t first = 0, end; first < rows_; first = end) {
      for (end = first + 1; end < rows_ && index_at(m.index, end, {}) == index_at(m.index, first, {});) ++end;
      loop(m.extents, [&](const auto& of) {
        double largest = -INFINITY;
        for (int64_t r = first; r < end; ++r) largest = fold(Reduction::kMax, largest, get(m.x.ref.dtype, at(m.x, r, of)));
        for (int64_t r = first; r < end; ++r) set(m.out.ref.dtype, at(m.out, r, of), largest);
      });
    }
  }
  void step(const AccumulateScaled& a) {
    ScaledSums& scaled = scaled_[a.sink];
    scaled.open(a, sinks_[a.sink]);
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t e = 0, i = index_at(a.index, r, {});
      if (i < 0 || i >= a.count) continue;
      loop(a.extents, [&](const auto& of) {
        const double top = value(a.top, r, {scaled.head(e)});
        scaled.add(sinks_[a.sink], i, e++, value(a.x, r, of), top);
      });
    }
  }
  double element(const Rows& a, int64_t r, int64_t e) {
    if (a.rows == 0) return value(a.x, r, {e});
    const int64_t from = index_at(a.taken, r, {}), row = std::clamp<int64_t>(from, 0, a.rows - 1);
    return from == row || a.mode == OutOfRange::kClip ? get(a.x.ref.dtype, at(a.x.ref, row * a.x.row_stride + e)) : a.fill[0];
  }
  void step(const TakenDot& d) {
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t h = 0; h < d.heads; ++h) {
        double sum = 0;
        for (int64_t e = h * d.inner; e < (h + 1) * d.inner; ++e) sum += element(d.x, r, e) * element(d.y, r, e);
        set(d.out.ref.dtype, at(d.out, r, {h}), sum);
      }
  }
  void step(const AccumulateTaken& a) {
    auto& sums = sinks_[a.sink];
    if (a.heads > 0) scaled_[a.sink].open(a, sums);
    sums.resize(static_cast<size_t>(a.count * product(a.extents)));
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t e = 0, width = product(a.extents), i = index_at(a.index, r, {}); i >= 0 && i < a.count && e < width; ++e) {
        double x = element({a.x, a.rows, a.mode, a.fill, a.taken}, r, e);
        if (a.factors > 0) x *= value(a.factor, r, {e / (width / a.factors)});
        if (a.heads == 0) sums[static_cast<size_t>(i * width + e)] += x;
        if (a.heads > 0) scaled_[a.sink].add(sums, i, e, x, value(a.top, r, {scaled_[a.sink].head(e)}));
      }
  }
  // f(outer index, i, the place that index i names or -1)
  template <class F>
  void select(const Select& s, int64_t r, F f) {
    loop(s.outer, [&](const auto& outer) {
      for (int64_t i = 0; i < s.indices; ++i) f(outer, i, index_at(s.index, r, {i}));
    });
  }
  char* selected(const Operand& o, int64_t r, std::vector<int64_t> index, int64_t k, int64_t e) {
    Operand with = o;
    with.strides.push_back(1);
    return at(with, r, joined(std::move(index), {k, e}));
  }
  void step(const Take& t) {
    const DType type = t.x.ref.dtype;
    for (int64_t r = 0; r < rows_; ++r)
      select(t, r, [&](const auto& outer, int64_t i, int64_t k) {
        const int64_t nearest = std::clamp<int64_t>(k, 0, t.count - 1);
        for (int64_t e = 0; e < t.inner; ++e) {
          double v = t.fill[0];
          if (nearest == k || t.mode == OutOfRange::kClip) v = get(type, selected(t.x, r, outer, nearest, e));
          set(type, selected(t.out, r, outer, i, e), v);
        }
      });
  }
  void step(const Put& t) {
    const DType type = t.x.ref.dtype;
    for (int64_t r = 0; r < rows_; ++r) {
      std::map<std::vector<int64_t>, double> sums;
      select(t, r, [&](const auto& outer, int64_t i, int64_t k) {
        for (int64_t e = 0; k >= 0 && k < t.count && e < t.inner; ++e)
          sums[joined(outer, {k, e})] += get(type, selected(t.x, r, outer, i, e));
      });
      loop(joined(t.outer, {t.count, t.inner}), [&](const std::vector<int64_t>& index) {
        const std::vector<int64_t> outer(index.begin(), index.end() - 2);
        set(type, selected(t.out, r, outer, index[index.size() - 2], index.back()), sums[index]);
      });
    }
  }
  void step(const Pack& x) {
    preps_.erase(x.prep);
    prep(x.prep);
  }
  void step(const Dot& d) {
    auto with = [](Operand o) { return o.strides.push_back(1), o; };
    Operand x = with(d.x), out = with(d.out);
    for (int64_t r = 0; r < rows_; ++r)
      loop({d.batch, d.m, d.n}, [&](const auto& i) {
        double sum = 0;
        for (int64_t k = 0; k < d.k; ++k) sum += value(x, r, {i[0], i[1], k}) * value(d.y, r, {i[0], i[2], k});
        set(out.ref.dtype, at(out, r, i), sum);
      });
  }

  const Program& p_;
  std::vector<Bytes>& ins_;
  std::vector<Bytes>& outs_;
  std::vector<std::vector<Bytes>> queues_;
  std::vector<std::vector<double>> sinks_;
  std::map<int64_t, ScaledSums> scaled_;  // by sink
  std::map<int64_t, Bytes> preps_;
  Bytes scratch_;
  int64_t tile_ = 0, row0_ = 0, first_row_ = 0, rows_ = 0;
  std::vector<int64_t> batch_, loops_;
};

}  // namespace kitsune::cpu::test
