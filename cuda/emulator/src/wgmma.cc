// wgmma: matrix products that run beside the 128 threads that issue them.
//
// Comes in: the same call from every thread of a warpgroup, in the same order. Goes out: accumulators, at the wait. Invariant:
// between the first call that names them and the wait, the threads' accumulator registers hold a signalling NaN that is compared
// bit for bit at the wait (a quiet one would hide d *= 2); operands in shared memory are read when the operation lands, as late as
// the wait. Registers of A are copied at the call: whether a kernel overwrites them before the wait cannot be seen, because the
// compiler gives a C++ array that dies early the same place as its successor (ptxas renames registers and does see it).

#include <cstring>

#include "counters.h"
#include "emulator/convert.h"
#include "state.h"

namespace kitsune::emulator {

struct Accumulators {
  u32 n;
  u32 attached = 0;  // threads that gave their registers
  float sum[64 * 256];
};

struct Wgmma {
  WgmmaCall call;
  std::shared_ptr<Accumulators> tile;
  u32 calls = 0;
  u32 a[128][4];
  std::vector<u32> known;  // least of the warps' clocks
};

void delete_wgmma(Wgmma* operation) { delete operation; }

namespace {

constexpr u32 kPoison = 0x7fa5a5a5;

// --- operands

u32 depth(const WgmmaCall& call) { return call.type == Operand::tf32 ? 8 : 16; }

// Calls visit(offset of 16 bytes, first row (M or N) of it, first k) for all 16-byte chunks of an operand: `rows` x 32 bytes of K.
template <class F>
void each_chunk(u64 descriptor, u32 rows, bool transposed, Operand type, F visit) {
  if (descriptor >> 62 != 1) fail("wgmma: only descriptors of 128-byte-swizzled operands are emulated");
  if (descriptor >> 49 & 7) fail("wgmma: the descriptor has a base offset: the operand does not start at a multiple of 1024 bytes");
  u32 start = static_cast<u32>(descriptor & 0x3fff) << 4, lbo = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4,
      sbo = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
  auto swizzled = [](u32 at) { return at ^ (at >> 7 & 7) << 4; };
  if (!transposed) {
    u32 per_chunk = type == Operand::tf32 ? 4 : 8;
    for (u32 r = 0; r < rows; ++r)
      for (u32 c = 0; c < 2; ++c) visit(swizzled(start + r / 8 * sbo + r % 8 * 128 + c * 16), r, c * per_chunk);
  } else {
    for (u32 k = 0; k < 16; ++k)
      for (u32 r = 0; r < rows; r += 8) visit(swizzled(start + r / 64 * lbo + k / 8 * sbo + k % 8 * 128 + r % 64 * 2), r, k);
  }
}

void check_operand(Cta& cta, u64 descriptor, u32 rows, bool transposed, Operand type, const Actor& a) {
  each_chunk(descriptor, rows, transposed, type, [&](u32 at, u32 r, u32 k) {
    if (at < kReserved || at + 16 > cta.region.bytes)
      fail("wgmma: row %u, k %u of an operand lies outside the cta's shared memory (offset %d)", r, k,
           static_cast<i32>(at - kReserved));
    check_read(cta.region, at, 16, a);
  });
}

// Operand -> floats; to[k * rows + r] (B) or to[r * 16 + k] (A).
void read_operand(const Cta& cta, u64 descriptor, u32 rows, bool transposed, Operand type, bool k_first, float* to) {
  auto put = [&](u32 r, u32 k, float v) { to[k_first ? k * rows + r : r * 16 + k] = v; };
  each_chunk(descriptor, rows, transposed, type, [&](u32 at, u32 r, u32 k) {
    if (type == Operand::tf32) {
      u32 v[4];
      memcpy(v, cta.memory + at, 16);
      for (u32 i = 0; i < 4; ++i) put(r, k + i, tf32_to_float(v[i]));
      return;
    }
    u16 v[8];
    memcpy(v, cta.memory + at, 16);
    for (u32 i = 0; i < 8; ++i) {
      float f = type == Operand::bf16 ? bf16_to_float(v[i]) : f16_to_float(v[i]);
      transposed ? put(r + i, k, f) : put(r, k + i, f);
    }
  });
}

void read_registers(const Wgmma& op, float* to) {
  for (u32 t = 0; t < 128; ++t)
    for (u32 i = 0; i < 4; ++i) {
      u32 row = t / 32 * 16 + t % 32 / 4 + 8 * (i & 1), v = op.a[t][i];
      if (op.call.type == Operand::tf32) {
        to[row * 16 + t % 4 + 4 * (i >> 1)] = tf32_to_float(v);
        continue;
      }
      u32 k = t % 4 * 2 + 8 * (i >> 1);
      bool bf16 = op.call.type == Operand::bf16;
      to[row * 16 + k] = bf16 ? bf16_to_float(static_cast<u16>(v)) : f16_to_float(static_cast<u16>(v));
      to[row * 16 + k + 1] = bf16 ? bf16_to_float(static_cast<u16>(v >> 16)) : f16_to_float(static_cast<u16>(v >> 16));
    }
}

// --- arithmetic: sum (64 x n) += a (64 x depth, rows of 16) * b (depth x n). Products are exact in float, with FMA or without.

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("arch=haswell", "default")))
#endif
void multiply(float* sum, const float* a, const float* b, u32 n, u32 depth) {
  typedef float Vector __attribute__((vector_size(32), aligned(4), may_alias));
  for (u32 column = 0; column < n; column += 8)
    for (u32 row = 0; row < 64; row += 8) {
      Vector s[8];
      for (u32 i = 0; i < 8; ++i) s[i] = *reinterpret_cast<Vector*>(sum + (row + i) * n + column);
      for (u32 k = 0; k < depth; ++k) {
        Vector v = *reinterpret_cast<const Vector*>(b + k * n + column);
        for (u32 i = 0; i < 8; ++i) s[i] += a[(row + i) * 16 + k] * v;
      }
      for (u32 i = 0; i < 8; ++i) *reinterpret_cast<Vector*>(sum + (row + i) * n + column) = s[i];
    }
}

void land(Warpgroup& group, Wgmma& op) {
  static float a[64 * 16], b[16 * 256];
  const WgmmaCall& call = op.call;
  if (call.a)
    read_registers(op, a);
  else
    read_operand(*group.cta, call.desc_a, 64, call.trans_a, call.type, false, a);
  read_operand(*group.cta, call.desc_b, call.n, call.trans_b, call.type, true, b);
  if (!call.accumulate) memset(op.tile->sum, 0, 64 * call.n * sizeof(float));
  multiply(op.tile->sum, a, b, call.n, depth(call));
  machine->flops += 2.0 * 64 * call.n * depth(call);
  ++group.landed;
  while (!group.queue.empty() && group.first < group.landed) {
    group.queue.pop_front();
    ++group.first;
  }
  wake_all(group.waiting);
}

// --- registers

template <class F>
void each_accumulator(u32 n, F visit) {
  Thread& t = self();
  u32 row = t.thread % 128 / 32 * 16 + t.lane / 4, column = t.lane % 4 * 2;
  for (u32 i = 0; i < n / 2; ++i) visit(i, (row + (i >> 1 & 1) * 8) * n + column + (i & 1) + i / 4 * 8);
}

void give_registers(Accumulators& tile, float* d) {
  each_accumulator(tile.n, [&](u32 i, u32 at) {
    memcpy(&tile.sum[at], &d[i], 4);
    memcpy(&d[i], &kPoison, 4);
  });
}

void take_registers(const Accumulators& tile, float* d) {
  each_accumulator(tile.n, [&](u32 i, u32 at) {
    u32 held;
    memcpy(&held, &d[i], 4);
    if (held != kPoison) fail("wgmma: accumulator d[%u] was written before wgmma_wait", i);
    memcpy(&d[i], &tile.sum[at], 4);
  });
}

ActiveAccumulators& attach(Thread& t, Wgmma& op, float* d) {
  u32 n = op.call.n;
  for (ActiveAccumulators& active : t.active) {
    if (active.registers == d && active.tile->n == n) {
      if (!op.tile) op.tile = active.tile;
      if (op.tile != active.tile) fail("wgmma: the threads of the warpgroup name different accumulators");
      return active;
    }
    if (d < active.registers + active.tile->n / 2 && active.registers < d + n / 2)
      fail("wgmma: the accumulators overlap others that are in use, in another shape");
  }
  if (!t.wgmma_fenced) fail("wgmma: no wgmma_fence since the accumulators were last touched");
  if (!op.tile) {
    op.tile = std::make_shared<Accumulators>();
    op.tile->n = n;
  }
  if (op.tile->n != n || op.tile->attached >= 128) fail("wgmma: the threads of the warpgroup name different accumulators");
  ++op.tile->attached;
  give_registers(*op.tile, d);
  t.active.push_back({op.tile, d, 0});
  return t.active.back();
}

// With the bytes of shared memory that it reads.
void count(const WgmmaCall& call) {
  const char* type = call.type == Operand::tf32 ? "tf32" : call.type == Operand::bf16 ? "bf16" : "f16";
  std::string name = format("wgmma m64n%uk%u %s, A in %s", call.n, depth(call), type, call.a ? "registers" : "shared memory");
  counters::event(name, (call.n + (call.a ? 0 : 64)) * 32);
}

void issue(Thread& t, Warpgroup& group, Wgmma& op) {
  Cta& cta = *t.cta;
  u32 number = ++group.issued;
  Actor a{op.known.data(), group.agent, number, kAsync, &t, "wgmma"};
  if (!op.call.a) check_operand(cta, op.call.desc_a, 64, op.call.trans_a, op.call.type, a);
  check_operand(cta, op.call.desc_b, op.call.n, op.call.trans_b, op.call.type, a);
  if (counters::on) count(op.call);
  u64 due = machine->step + random_delay();
  if (due < group.last_due) due = group.last_due;  // in order within a warpgroup
  group.last_due = due;
  post(due, [&group, &op] { land(group, op); });
}

}  // namespace

void wgmma(float* d, const WgmmaCall& call) {
  Thread& t = self();
  Warpgroup& group = *t.warpgroup;
  if (t.thread / 128 * 128 + 128 > machine->launch.block) fail("wgmma: the last warpgroup of the cta is not complete");
  u32 number = t.wgmma_issued++;
  while (number - group.first >= group.queue.size()) group.queue.emplace_back(new Wgmma);
  Wgmma& op = *group.queue[number - group.first];
  if (op.calls == 0) {
    op.call = call;
  } else if (op.call.n != call.n || op.call.type != call.type || op.call.trans_a != call.trans_a ||
             op.call.trans_b != call.trans_b || op.call.accumulate != call.accumulate || !op.call.a != !call.a ||
             op.call.desc_a != call.desc_a || op.call.desc_b != call.desc_b) {
    fail("wgmma: the threads of the warpgroup give different arguments");
  }
  // Accumulators that are in flight already need no new fence; registers of A do, since nobody knows when they were written.
  if (call.a && !t.wgmma_fenced) fail("wgmma: no wgmma_fence since registers were last touched");
  attach(t, op, d).group = static_cast<u32>(t.wgmma_groups.size()) + 1;
  if (call.a) memcpy(op.a[t.thread % 128], call.a, sizeof op.a[0]);
  // Each warp must know that the operands are there; any lane stands for its warp, and the seed says which.
  if (t.lane == machine->options.seed % 32) {
    if (op.known.empty()) {
      op.known.assign(t.clock, t.clock + machine->agents);
    } else {
      for (u32 i = 0; i < machine->agents; ++i)
        if (t.clock[i] < op.known[i]) op.known[i] = t.clock[i];
    }
  }
  if (++op.calls == 128) issue(t, group, op);
}

void wgmma_register_fence() {
  if (counters::on) counters::together();
  self().wgmma_fenced = true;
}

void wgmma_group_commit() {
  if (counters::on) counters::together();
  self().wgmma_groups.push_back(self().wgmma_issued);
}

void wgmma_group_wait(u32 pending) {
  Thread& t = self();
  Warpgroup& group = *t.warpgroup;
  if (counters::on) counters::together();
  preempt();
  u32 groups = static_cast<u32>(t.wgmma_groups.size()), done = groups > pending ? groups - pending : 0;
  u32 need = done ? t.wgmma_groups[done - 1] : t.wgmma_waited;
  while (static_cast<i32>(group.landed - need) < 0) {
    group.waiting.push_back(&t);
    block(
        [](const Thread& w) {
          return format("wgmma_wait: operation %u, %u have landed", static_cast<u32>(w.argument), w.warpgroup->landed);
        },
        &group, need);
  }
  if (static_cast<i32>(need - t.wgmma_waited) > 0) t.wgmma_waited = need;
  if (t.clock[group.agent] < need) t.clock[group.agent] = need;
  t.learned = true;
  for (size_t i = 0; i < t.active.size();) {
    if (t.active[i].group > done) {
      ++i;
      continue;
    }
    take_registers(*t.active[i].tile, t.active[i].registers);
    t.wgmma_fenced = false;
    t.active[i] = std::move(t.active.back());
    t.active.pop_back();
  }
}

void thread_exit_wgmma(Thread& thread) {
  if (!thread.active.empty() || thread.wgmma_waited != thread.wgmma_issued)
    fail("the thread exits with wgmma operations that it has not waited for (or not committed)");
}

}  // namespace kitsune::emulator
