// LRU caches of sectored lines (see caches.h).

#include "caches.h"

namespace kitsune::emulator {

namespace {
constexpr u64 kPerLine = kLine / kSector;
constexpr u32 kBufferShift = 40;  // a buffer has less than 2^40 bytes
u8 bit_of(u64 sector) { return static_cast<u8>(1u << sector % kPerLine); }
}  // namespace

Cache::Line* Cache::find(u64 line) {
  if (!lines_) return nullptr;
  if (auto it = at_.find(line); it != at_.end()) {
    order_.splice(order_.begin(), order_, it->second);
    return &order_.front();
  }
  if (order_.size() == lines_) {
    evict(order_.back());
    at_.erase(order_.back().key);
    order_.pop_back();
  }
  order_.push_front({line});
  at_[line] = order_.begin();
  return &order_.front();
}

void Cache::evict(const Line& line) {
  for (u64 s = 0; s < kPerLine; ++s)
    if (line.dirty >> s & 1) written_back_.push_back(line.key * kPerLine + s);
}

bool Cache::read(u64 sector) {
  Line* line = find(sector / kPerLine);
  if (!line) return false;
  bool hit = line->present & bit_of(sector);
  line->present |= bit_of(sector);
  return hit;
}

void Cache::write(u64 sector) {
  if (Line* line = find(sector / kPerLine)) {
    line->present |= bit_of(sector);
    line->dirty |= bit_of(sector);
  } else {
    written_back_.push_back(sector);
  }
}

void Cache::clear() {
  for (const Line& line : order_) evict(line);
  order_.clear();
  at_.clear();
}

Memory::Memory(size_t l1_bytes, size_t l2_bytes, u32 ctas) : l1_bytes_(l1_bytes), l1_(ctas, Cache(l1_bytes)), l2_(l2_bytes) {}

u32 Memory::add_buffer(const std::string& name, size_t bytes) {
  traffic_.push_back({name, bytes});
  return static_cast<u32>(traffic_.size() - 1);
}

void Memory::load(u32 cta, u32 buffer, u64 offset, u64 bytes, bool through_l1) {
  Traffic& t = traffic_[buffer];
  u64 base = static_cast<u64>(buffer) << kBufferShift;
  for (u64 s = (base + offset) / kSector; s <= (base + offset + bytes - 1) / kSector; ++s) {
    if (through_l1) {
      t.wanted += kSector;
      if (l1_[cta].read(s)) continue;
    }
    t.l2_read += kSector;
    if (!l2_.read(s)) t.memory_read += kSector;
  }
  write_back();
}

void Memory::prefetch(u32 buffer, u64 offset, u64 bytes) {
  u64 base = static_cast<u64>(buffer) << kBufferShift;
  for (u64 s = (base + offset) / kSector; s <= (base + offset + bytes - 1) / kSector; ++s)
    if (!l2_.read(s)) traffic_[buffer].memory_read += kSector;
  write_back();
}

void Memory::store(u32 buffer, u64 offset, u64 bytes) {
  u64 base = static_cast<u64>(buffer) << kBufferShift;
  for (u64 s = (base + offset) / kSector; s <= (base + offset + bytes - 1) / kSector; ++s) {
    traffic_[buffer].l2_written += kSector;
    l2_.write(s);
  }
  write_back();
}

void Memory::write_back() {
  for (u64 sector : l2_.written_back()) traffic_[sector * kSector >> kBufferShift].memory_written += kSector;
}

const std::vector<Traffic>& Memory::finish() {
  l2_.clear();
  write_back();
  return traffic_;
}

}  // namespace kitsune::emulator
