// TMA: boxes of 2-D tensors to and from shared memory.
//
// Comes in: tensor maps of make_tensor_map and coordinates (x: element of the inner dimension, y: row; both may lie outside). Goes
// out: the box in shared memory, 16-byte chunks where the swizzle puts them, zero where the tensor ends; or the part of the box
// that lies inside the tensor. Invariant: as for bulk copies (copies.cc). A barrier counts the bytes of the whole box.

#include <cstring>

#include "copies.h"
#include "counters.h"

namespace kitsune::emulator {

namespace {

struct Map {
  u64 magic, base, width, height, pitch;
  u32 box_width, box_height, element, type;
  u64 swizzle128;
};
static_assert(sizeof(Map) <= sizeof(TensorMap));
constexpr u64 kMapMagic = 0x6b69'7473'756e'6532;

Map decode(const TensorMap& map, const void* shared, const char* what) {
  Map m;
  memcpy(&m, &map, sizeof m);
  if (m.magic != kMapMagic) fail("%s: %p is not a tensor map", what, static_cast<const void*>(&map));
  u32 alignment = m.swizzle128 ? 1024 : 128;  // of a 128-byte-swizzled box: the pattern's 8 rows
  if (reinterpret_cast<size_t>(shared) % alignment)
    fail("%s: %p in shared memory is not aligned to %u bytes", what, shared, alignment);
  return m;
}

// The in-range part of one row of a box: `bytes` at `global`, beginning `skip` bytes into the row. Nothing: bytes is 0.
struct Row {
  char* global;
  u32 skip, bytes;
};
Row row_of(const Map& m, i32 x, i32 y, u32 row) {
  i64 at = static_cast<i64>(y) + row, first = x, last = first + m.box_width;
  if (first < 0) first = 0;
  if (last > static_cast<i64>(m.width)) last = static_cast<i64>(m.width);
  if (at < 0 || at >= static_cast<i64>(m.height) || first >= last) return {nullptr, 0, 0};
  return {reinterpret_cast<char*>(m.base) + static_cast<u64>(at) * m.pitch + static_cast<u64>(first) * m.element,
          static_cast<u32>(first - x) * m.element, static_cast<u32>(last - first) * m.element};
}

// Where byte `i` of a box lies.
u32 place(const Map& m, u32 offset, u32 i) {
  u32 at = offset + i;
  return m.swizzle128 ? at ^ (at >> 7 & 7) << 4 : at;
}

void load_row(const Map& m, char* memory, u32 offset, i32 x, i32 y, u32 row) {
  u32 row_bytes = m.box_width * m.element;
  std::vector<char> data(row_bytes, 0);
  Row r = row_of(m, x, y, row);
  if (r.bytes) memcpy(data.data() + r.skip, r.global, r.bytes);
  for (u32 i = 0; i < row_bytes; i += 16) memcpy(memory + place(m, offset, row * row_bytes + i), data.data() + i, 16);
}

void store_row(const Map& m, const std::vector<char>& box, u32 offset, i32 x, i32 y, u32 row, bool add) {
  u32 row_bytes = m.box_width * m.element;
  Row r = row_of(m, x, y, row);
  for (u32 i = 0; i < r.bytes; i += m.element) {
    const char* from = box.data() + place(m, offset, row * row_bytes + r.skip + i) - offset;
    if (add) {
      float sum, v;
      memcpy(&sum, r.global + i, 4);
      memcpy(&v, from, 4);
      sum += v;
      memcpy(r.global + i, &sum, 4);
    } else {
      memcpy(r.global + i, from, m.element);
    }
  }
}

}  // namespace

TensorMap make_tensor_map(void* base, TileType type, u64 width, u64 height, u64 pitch, u32 box_width, u32 box_height,
                          bool swizzle128) {
  Map m{kMapMagic,
        reinterpret_cast<u64>(base),
        width,
        height,
        pitch,
        box_width,
        box_height,
        type == TileType::f32 ? 4u : 2u,
        static_cast<u32>(type),
        swizzle128};
  TensorMap map;
  memset(&map, 0, sizeof map);
  // The limits of cuTensorMapEncodeTiled; a map that breaks them is left invalid.
  u32 row = box_width * m.element;
  if (row % 16 == 0 && box_width <= 256 && box_height <= 256 && pitch % 16 == 0 && m.base % 16 == 0 && (!swizzle128 || row == 128))
    memcpy(&map, &m, sizeof m);
  return map;
}

void tile_load(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y, u32 mask) {
  const char* what = mask ? "tma_load_2d_multicast" : "tma_load_2d";
  Map m = decode(map, dst, what);
  Thread& t = self();
  preempt();
  u32 row_bytes = m.box_width * m.element, bytes = row_bytes * m.box_height, offset = offset_in(own_cta(dst, bytes, what), dst);
  std::vector<Destination> all;
  destinations(all, bar, mask, what);
  if (counters::on)
    for (u32 row = 0; row < m.box_height; ++row)
      if (Row r = row_of(m, x, y, row); r.bytes) counters::copy_in(what, r.global, r.bytes, static_cast<u32>(all.size()));
  for (const Destination& to : all) {
    Actor a = copy_actor(t, *to.barrier, what);
    for (u32 row = 0; row < m.box_height; ++row)
      if (Row r = row_of(m, x, y, row); r.bytes) {
        Region& region = global_region(r.global, r.bytes, what);
        check_read(region, static_cast<size_t>(r.global - region.begin), r.bytes, a);
      }
    begin_write(to, offset, bytes, a);
    // Pieces end at multiples of 8 rows: a swizzle pattern permutes chunks within a row only, but marks are per 16 bytes.
    u32 rows = (random_cut(m.box_height) + 7) / 8 * 8;
    for (u32 first = 0; first < m.box_height; first += rows) {
      u32 last = first + rows < m.box_height ? first + rows : m.box_height;
      ++to.cta->in_flight;
      post(machine->step + random_delay(), [=] {
        for (u32 row = first; row < last; ++row) load_row(m, to.cta->memory, offset, x, y, row);
        end_write(to, offset + first * row_bytes, (last - first) * row_bytes);
        --to.cta->in_flight;
        barrier_complete(*to.barrier, (last - first) * row_bytes);
      });
    }
  }
}

void tile_store(const TensorMap& map, const void* src, i32 x, i32 y, bool add) {
  const char* what = add ? "tma_reduce_add_2d" : "tma_store_2d";
  Map m = decode(map, src, what);
  if (add && m.type != static_cast<u32>(TileType::f32)) fail("%s: the emulator adds float only", what);
  Thread& t = self();
  preempt();
  u32 row_bytes = m.box_width * m.element, bytes = row_bytes * m.box_height;
  Cta* own = &own_cta(src, bytes, what);
  u32 offset = offset_in(*own, src);
  open_group(t.bulk_open);
  auto group = t.bulk_open;
  Actor a = async_actor(t, t.agent, t.clock[t.agent], what);
  begin_source(*group, own->region, offset, bytes, a);
  if (add) a.flags |= kReduce;
  for (u32 row = 0; row < m.box_height; ++row)
    if (Row r = row_of(m, x, y, row); r.bytes) {
      Region& region = global_region(r.global, r.bytes, what);
      if (counters::on) counters::copy_out(what, r.global, r.bytes);
      begin_target(*group, region, static_cast<size_t>(r.global - region.begin), r.bytes, a, add);
    }
  ++group->reading;
  ++group->writing;
  ++own->in_flight;
  post(machine->step + random_delay(), [=] {
    std::vector<char> box(own->memory + offset, own->memory + offset + bytes);
    --own->in_flight;
    --group->reading;
    group_progress(*group);
    post(machine->step + random_delay(), [=] {
      for (u32 row = 0; row < m.box_height; ++row) store_row(m, box, offset, x, y, row, add);
      --group->writing;
      group_progress(*group);
    });
  });
}

}  // namespace kitsune::emulator
