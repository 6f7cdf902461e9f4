// Memory that outlives a call: first touch of fresh pages is an order of magnitude slower than reuse, so blocks are kept and handed
// out again.
#pragma once

#include <cstddef>

namespace kitsune::cpu {

// An aligned block: 64 bytes, or 2 MiB with huge pages advised when it is that large. Throws std::bad_alloc.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes);
  Block(Block&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr, other.bytes_ = 0; }
  Block& operator=(Block&& other) noexcept;
  ~Block();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// A block lent by the process-wide cache and returned to it on destruction. The cache keeps at most kCacheBytes and frees the rest.
class CachedBlock {
 public:
  static constexpr size_t kCacheBytes = size_t{256} << 20;
  CachedBlock() = default;
  explicit CachedBlock(size_t bytes);
  CachedBlock(CachedBlock&&) = default;
  CachedBlock& operator=(CachedBlock&& other) noexcept;
  ~CachedBlock();
  char* data() const { return block_.data(); }

 private:
  Block block_;
};

// At least `bytes` of the calling thread's own memory, 64-byte aligned; valid until the thread asks for more, kept between calls.
char* thread_scratch(size_t bytes);

}  // namespace kitsune::cpu
