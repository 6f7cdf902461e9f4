// Memory that outlives a call: first touch of fresh pages is an order of magnitude slower than reuse, so blocks are kept and handed
// out again.
#pragma once

#include <cstddef>
#include <new>

namespace kitsune::cpu {

// What a failed allocation was: how many bytes, and for what. The text is made without allocating.
class OutOfMemory : public std::bad_alloc {
 public:
  OutOfMemory(size_t bytes, const char* what) noexcept;
  const char* what() const noexcept override { return text_; }

 private:
  char text_[160];
};

// An aligned block: 64 bytes, or 2 MiB with huge pages advised when it is that large. `what` it is for, in words, is told by the
// OutOfMemory that it throws.
class Block {
 public:
  Block() = default;
  Block(size_t bytes, const char* what);
  Block(Block&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr, other.bytes_ = 0; }
  Block& operator=(Block&& other) noexcept;
  ~Block();
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// A block lent by the process-wide cache and returned to it on destruction. The cache keeps at most `most_cached` of the machine's
// memory and frees the rest; when memory runs out it frees all of them.
class CachedBlock {
 public:
  CachedBlock() = default;
  CachedBlock(size_t bytes, const char* what);
  CachedBlock(CachedBlock&&) = default;
  CachedBlock& operator=(CachedBlock&& other) noexcept;
  ~CachedBlock();
  char* data() const { return block_.data(); }

 private:
  Block block_;
};

// Bytes that the cache keeps where the machine has `memory`: a sixteenth, but 256 MB at least and 2 GB at most. Activations between
// the forward and the backward pass of a training step lie there, and page faults take longer than to write and read them.
size_t most_cached(size_t memory);

// Frees what the cache keeps.
void free_cached_blocks();

// At least `bytes` of the calling thread's own memory, 64-byte aligned; valid until the thread asks for more, kept between calls.
char* thread_scratch(size_t bytes);

// Bytes of it that a thread keeps for the next call, where the machine has `threads`: a share of what all of them may keep
// together.
size_t kept_scratch(size_t threads);
// Frees the calling thread's own memory where it is more than that.
void trim_thread_scratch();

}  // namespace kitsune::cpu
