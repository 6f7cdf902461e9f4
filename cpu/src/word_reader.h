// Words of an attribute, read one field at a time: every length is checked against what is left before anything is allocated.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu {

constexpr size_t kMostNameBytes = size_t{1} << 16;

bool is_utf8(const std::string& text);

class Reader {
 public:
  Reader(const int64_t* words, size_t count) : words_(words), count_(count) {}

  int64_t word(const char* field) {
    if (next_ >= count_) fail(field, "the words end here");
    return words_[next_++];
  }
  int64_t in_range(const char* field, int64_t low, int64_t high) {
    int64_t v = word(field);
    if (v < low || v > high) fail(field, std::to_string(v) + " is not in " + std::to_string(low) + ".." + std::to_string(high));
    return v;
  }
  bool flag(const char* field) { return in_range(field, 0, 1) != 0; }
  DType dtype(const char* field) { return static_cast<DType>(in_range(field, 0, kNumDTypes - 1)); }
  double real(const char* field) {
    int64_t bits = word(field);
    double v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
  }
  // Every element takes at least one word, so a length beyond what is left is damage, and nothing is allocated for it.
  size_t length(const char* field) {
    int64_t n = word(field);
    if (n < 0 || static_cast<uint64_t>(n) > count_ - next_)
      fail(field, "a list of " + std::to_string(n) + " does not fit in the " + std::to_string(count_ - next_) + " words left");
    return static_cast<size_t>(n);
  }
  // UTF-8 without a zero, because names go into messages, which are C strings that Python decodes.
  std::string text(const char* field) {
    size_t n = length(field);
    if (n > kMostNameBytes)
      fail(field, "a name of " + std::to_string(n) + " bytes is longer than " + std::to_string(kMostNameBytes));
    std::string s;
    s.reserve(n);
    for (size_t i = 0; i < n; ++i) s.push_back(static_cast<char>(in_range(field, 1, 255)));
    if (!is_utf8(s)) fail(field, "the name is not UTF-8");
    return s;
  }
  std::vector<int64_t> list(const char* field) {
    size_t n = length(field);
    std::vector<int64_t> v(words_ + next_, words_ + next_ + n);
    next_ += n;
    return v;
  }
  template <class F>
  auto many(const char* field, F one) -> std::vector<decltype(one())> {
    size_t n = length(field);
    std::vector<decltype(one())> v;
    for (size_t i = 0; i < n; ++i) v.push_back(one());
    return v;
  }
  void check(const char* field, bool fine, const char* what) const {
    if (!fine) fail(field, what);
  }
  bool at_end() const { return next_ == count_; }
  size_t left() const { return count_ - next_; }

 private:
  [[noreturn]] void fail(const char* field, const std::string& what) const {
    throw ProgramError("kitsune program: word " + std::to_string(next_ + kHeaderWords) + " (" + field + "): " + what);
  }
  const int64_t* words_;
  size_t count_;
  size_t next_ = 0;
};

// A reader behind the header of `count` words, after checking the header: magic number, version, length, checksum. Throws
// ProgramError.
Reader open_words(const int64_t* words, size_t count);

}  // namespace kitsune::cpu
