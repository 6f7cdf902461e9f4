// What the lanes of a warp do together: shuffles, syncwarp, mma.sync, ldmatrix, stmatrix.
//
// Comes in: one call from each lane. Goes out: results to all, when the last has come. Invariant: the lanes of a warp are in the
// same operation, or the warp has diverged and that is an error. Only syncwarp orders memory.

#include <cstring>

#include "counters.h"
#include "emulator/convert.h"
#include "state.h"

namespace kitsune::emulator {

bool warp_meet(const char* operation, void* slot) {
  Thread& t = self();
  Warp& w = *t.warp;
  if (counters::on) counters::together();
  if (w.arrived == 0) w.operation = operation;
  if (w.operation != operation) fail("the warp has diverged: this lane is in %s, others in %s", operation, w.operation);
  w.slots[t.lane] = slot;
  if (++w.arrived == 32) return true;
  block(
      [](const Thread& lane) {
        return format("the other lanes of its warp in %s: %u have come", lane.warp->operation, lane.warp->arrived);
      },
      &w, 0);
  return false;
}

void warp_release() {
  Thread& t = self();
  t.warp->arrived = 0;
  for (Thread* lane : t.warp->lanes)
    if (lane != &t) make_ready(lane);
}

u32 shuffle(u32 value, u32 source_lane) {
  struct Shuffle {
    u32 value, source, result;
  } mine{value, source_lane & 31, 0};
  if (warp_meet("a shuffle", &mine)) {
    void** slots = self().warp->slots;
    for (u32 i = 0; i < 32; ++i) {
      auto& lane = *static_cast<Shuffle*>(slots[i]);
      lane.result = static_cast<Shuffle*>(slots[lane.source])->value;
    }
    warp_release();
  }
  return mine.result;
}

// All lanes learn what each knew. Where nobody has learned anything from outside since the last time, only the lanes' own clocks
// are new.
void warp_sync() {
  if (!warp_meet("syncwarp", nullptr)) return;
  Machine& m = *machine;
  Thread& t = self();
  auto& lanes = t.warp->lanes;
  if (m.lane_clocks) {
    bool learned = false;
    Scope scope;
    for (Thread* lane : lanes) {
      learned |= lane->learned;
      scope.raise(lane->scope);
    }
    if (learned)
      for (Thread* lane : lanes)
        if (lane != &t) join(t.clock, lane->clock);
    for (Thread* lane : lanes) {
      if (learned && lane != &t) memcpy(lane->clock, t.clock, m.agents * sizeof(u32));
      lane->scope = scope;
      lane->learned = false;
    }
    if (!learned) {
      u32 own[32];
      for (u32 i = 0; i < 32; ++i) own[i] = lanes[i]->clock[lanes[i]->agent];
      for (Thread* lane : lanes)
        for (u32 i = 0; i < 32; ++i) lane->clock[lanes[i]->agent] = own[i];
    }
    for (Thread* lane : lanes) tick(*lane);
  } else {
    Scope scope;
    for (Thread* lane : lanes) scope.raise(lane->scope);
    for (Thread* lane : lanes) lane->scope = scope;
  }
  ++m.time;
  warp_release();
}

// --- mma.sync. Fragments as in kitsune/arch/mma.h.

namespace {

struct Mma {
  Operand type;
  float* c;
  const u32 *a, *b;
};

float half_of(Operand type, u32 pair, u32 upper) {
  u16 h = static_cast<u16>(upper ? pair >> 16 : pair);
  return type == Operand::bf16 ? bf16_to_float(h) : f16_to_float(h);
}

void multiply(void** slots) {
  auto lane = [&](u32 i) -> Mma& { return *static_cast<Mma*>(slots[i]); };
  Operand type = lane(0).type;
  bool tf32 = type == Operand::tf32;
  u32 depth = tf32 ? 8 : 16;
  float a[16][16], b[16][8];
  for (u32 l = 0; l < 32; ++l) {
    u32 g = l / 4, t = l % 4;
    if (lane(l).type != type) fail("mma: the lanes name different types");
    for (u32 i = 0; i < 4; ++i) {
      u32 row = g + 8 * (i & 1);
      if (tf32) {
        a[row][t + 4 * (i >> 1)] = tf32_to_float(lane(l).a[i]);
        if (i < 2) b[t + 4 * i][g] = tf32_to_float(lane(l).b[i]);
        continue;
      }
      for (u32 e = 0; e < 2; ++e) {
        a[row][2 * t + e + 8 * (i >> 1)] = half_of(type, lane(l).a[i], e);
        if (i < 2) b[2 * t + e + 8 * i][g] = half_of(type, lane(l).b[i], e);
      }
    }
  }
  for (u32 l = 0; l < 32; ++l)
    for (u32 i = 0; i < 4; ++i) {
      u32 row = l / 4 + 8 * (i >> 1), column = l % 4 * 2 + (i & 1);
      float sum = lane(l).c[i];
      for (u32 k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
      lane(l).c[i] = sum;
    }
  machine->flops += 2.0 * 16 * 8 * depth;
}

}  // namespace

void warp_mma(Operand type, float* c, const u32* a, const u32* b) {
  Mma mine{type, c, a, b};
  if (warp_meet("mma", &mine)) {
    multiply(self().warp->slots);
    if (counters::on)
      counters::event(std::string("mma.sync m16n8") + (type == Operand::tf32   ? "k8 tf32"
                                                       : type == Operand::bf16 ? "k16 bf16"
                                                                               : "k16 f16"));
    warp_release();
  }
}

// --- ldmatrix, stmatrix

namespace {
struct Rows {
  u32* registers;
  char* row;
};

char* checked_row(const void* row, const char* what, bool write) {
  if (reinterpret_cast<size_t>(row) % 16) fail("%s: the row %p is not aligned to 16 bytes", what, row);
  if (write)
    check_store(const_cast<void*>(row), 16);
  else
    check_load(row, 16);
  return static_cast<char*>(const_cast<void*>(row));
}

void count_rows(counters::Op op, const Site& at) {
  if (!counters::on) return;
  const char* rows[32];
  for (u32 i = 0; i < 32; ++i) rows[i] = static_cast<Rows*>(self().warp->slots[i])->row;
  counters::rows(op, rows, at);
}

// Element pair `lane` of matrix i: row lane/4, elements 2(lane%4), +1; transposed: column lane/4, rows 2(lane%4), +1.
void each_pair(void** slots, bool transpose, void (*move)(u32& register_, u32 upper, char* element)) {
  for (u32 l = 0; l < 32; ++l)
    for (u32 i = 0; i < 4; ++i)
      for (u32 e = 0; e < 2; ++e) {
        u32 row = l / 4, column = l % 4 * 2 + e;
        if (transpose) std::swap(row, column);
        move(static_cast<Rows*>(slots[l])->registers[i], e, static_cast<Rows*>(slots[8 * i + row])->row + 2 * column);
      }
}
}  // namespace

void matrix_load(u32* r, const void* row, bool transpose, const Site& at) {
  Rows mine{r, checked_row(row, "ldmatrix", false)};
  if (warp_meet(transpose ? "ldmatrix.trans" : "ldmatrix", &mine)) {
    count_rows(counters::Op::ldmatrix, at);
    each_pair(self().warp->slots, transpose, [](u32& pair, u32 upper, char* element) {
      u16 v;
      memcpy(&v, element, 2);
      pair = upper ? (pair & 0xffffu) | static_cast<u32>(v) << 16 : (pair & 0xffff0000u) | v;
    });
    warp_release();
  }
}

void matrix_store(void* row, const u32* r, const Site& at) {
  Rows mine{const_cast<u32*>(r), checked_row(row, "stmatrix", true)};
  if (warp_meet("stmatrix", &mine)) {
    count_rows(counters::Op::stmatrix, at);
    each_pair(self().warp->slots, false, [](u32& pair, u32 upper, char* element) {
      u16 v = static_cast<u16>(upper ? pair >> 16 : pair);
      memcpy(element, &v, 2);
    });
    warp_release();
  }
}

}  // namespace kitsune::emulator
