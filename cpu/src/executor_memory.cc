#include "executor_memory.h"

#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kitsune::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kLine = 64;
constexpr size_t kKeptBlocks = 64;
constexpr size_t kKeptScratch = size_t{64} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

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

}  // namespace

Block::Block(size_t bytes) {
  // A worker's scratch of 1 MB in 4 KiB pages lies in the second-level cache as the pages fall, and evicts itself.
  bool huge = bytes >= kHugePage / 4;
  bytes_ = round_up(bytes == 0 ? 1 : bytes, huge ? kHugePage : kLine);
  data_ = static_cast<char*>(std::aligned_alloc(huge ? kHugePage : kLine, bytes_));
  if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (huge) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
}

Block& Block::operator=(Block&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Block::~Block() { std::free(data_); }

CachedBlock::CachedBlock(size_t bytes) {
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
  block_ = Block(bytes);
}

CachedBlock& CachedBlock::operator=(CachedBlock&& other) noexcept {
  std::swap(block_, other.block_);
  return *this;
}

CachedBlock::~CachedBlock() {
  if (block_.bytes() == 0) return;
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  if (c.bytes + block_.bytes() > kCacheBytes || c.blocks.size() >= kKeptBlocks) return;
  size_t size = block_.bytes();
  try {
    c.blocks.push_back(std::move(block_));
    c.bytes += size;
  } catch (const std::bad_alloc&) {  // the block is freed instead
  }
}

char* thread_scratch(size_t bytes) {
  static thread_local Block block;
  bool oversized = block.bytes() > kKeptScratch && bytes < kKeptScratch / 4;
  if (block.bytes() < bytes || oversized) {
    block = Block();  // first free, then allocate
    block = Block(bytes);
  }
  return block.data();
}

}  // namespace kitsune::cpu
