#include "executor_memory.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "checked.h"
#include "huge_pages.h"

namespace kitsune::cpu {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kHugeFrom = kHugePage / 4;
// Under a sanitizer every block is as long as was asked for and nothing is kept, so that it sees each access beyond the end.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kExact = true;
#else
constexpr bool kExact = false;
#endif
constexpr size_t kKeptBlocks = kExact ? 0 : 64;
constexpr size_t kKeptScratch = size_t{64} << 20;
constexpr size_t kAllKeptScratch = size_t{4} << 30, kLeastKeptScratch = size_t{8} << 20;
thread_local Block scratch;

struct Cache {
  std::mutex mutex;
  std::vector<Block> blocks;
  size_t bytes = 0;
};

// Never destroyed: pool threads may return blocks while the process exits.
Cache& cache() {
  static Cache* c = new Cache;
  return *c;
}

size_t memory_of_the_machine() {
#if defined(__unix__) || defined(__APPLE__)
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0) return static_cast<size_t>(pages) * static_cast<size_t>(page);
#endif
  return 0;
}

std::align_val_t alignment(size_t bytes) { return std::align_val_t{bytes >= kHugeFrom ? kHugePage : kLine}; }

}  // namespace

size_t most_cached(size_t memory) { return std::clamp(memory / 16, size_t{256} << 20, size_t{2} << 30); }

void free_cached_blocks() {
  std::vector<Block> freed;
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  freed.swap(c.blocks);
  c.bytes = 0;
}

OutOfMemory::OutOfMemory(size_t bytes, const char* what) noexcept {
  std::snprintf(text_, sizeof text_, "there is no memory for %zu bytes of %s", bytes, what);
}

Block::Block(size_t bytes, const char* what) {
  // A worker's scratch of 1 MB in 4 KiB pages lies in the second-level cache as the pages fall, and evicts itself.
  bool huge = bytes >= kHugeFrom;
  size_t rounded = bytes == 0 ? 1 : kExact ? bytes : rounded_up(bytes, huge ? kHugePage : kLine);
  data_ = static_cast<char*>(::operator new(rounded, alignment(rounded), std::nothrow));
  if (data_ == nullptr) {
    free_cached_blocks();
    data_ = static_cast<char*>(::operator new(rounded, alignment(rounded), std::nothrow));
  }
  if (data_ == nullptr) throw OutOfMemory(bytes, what);
  bytes_ = rounded;
  if (huge) advise_huge_pages(data_, bytes_);
}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Block::~Block() {
  if (data_ != nullptr) ::operator delete(data_, alignment(bytes_));
}

CachedBlock::CachedBlock(size_t bytes, const char* what) {
  if (bytes == 0) return;
  {
    Cache& c = cache();
    std::lock_guard<std::mutex> lock(c.mutex);
    size_t best = c.blocks.size();
    for (size_t i = 0; i < c.blocks.size(); ++i) {
      size_t size = c.blocks[i].bytes();
      if (size >= bytes && size <= 2 * bytes + kHugePage && (best == c.blocks.size() || size < c.blocks[best].bytes())) best = i;
    }
    if (best < c.blocks.size()) {
      block_ = std::move(c.blocks[best]);
      c.blocks.erase(c.blocks.begin() + static_cast<std::ptrdiff_t>(best));
      c.bytes -= block_.bytes();
      return;
    }
  }
  block_ = Block(bytes, what);
}

CachedBlock& CachedBlock::operator=(CachedBlock&& other) noexcept {
  std::swap(block_, other.block_);
  return *this;
}

CachedBlock::~CachedBlock() {
  if (block_.bytes() == 0) return;
  static const size_t most = most_cached(memory_of_the_machine());
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (c.bytes + block_.bytes() > most || c.blocks.size() >= kKeptBlocks) return;
  size_t size = block_.bytes();
  try {
    c.blocks.push_back(std::move(block_));
    c.bytes += size;
  } catch (const std::bad_alloc&) {  // the block is freed instead
  }
}

char* thread_scratch(size_t bytes) {
  Block& block = scratch;
  bool oversized = block.bytes() > kKeptScratch && bytes < kKeptScratch / 4;
  if (block.bytes() < bytes || oversized || (kExact && block.bytes() != bytes)) {
    block = Block();  // first free, then allocate
    block = Block(bytes, "a thread's temporary memory");
  }
  return block.data();
}

size_t kept_scratch(size_t threads) { return std::max(kLeastKeptScratch, kAllKeptScratch / std::max<size_t>(1, threads)); }

void trim_thread_scratch() {
  static const size_t most = kept_scratch(std::thread::hardware_concurrency());
  if (scratch.bytes() > most) scratch = Block();
}

}  // namespace kitsune::cpu
