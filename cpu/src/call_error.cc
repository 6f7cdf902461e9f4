// Why a call failed, in words.
#include <cstdio>
#include <cstring>
#include <new>

#include "executor_internal.h"
#include "executor_memory.h"

namespace kitsune::cpu {
namespace {

// The bytes of `text` that are shown: the whole, or what ends with a character of UTF-8 before `most`.
int shown(const char* text, int most) noexcept {
  int n = static_cast<int>(strnlen(text, static_cast<size_t>(most) + 1));
  if (n <= most) return n;
  for (n = most; n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80;) --n;
  return n;
}

}  // namespace

void describe(const std::exception& why, const char* name, char* out, size_t bytes) noexcept {
  constexpr int kMostName = 150;
  const bool memory = dynamic_cast<const std::bad_alloc*>(&why) != nullptr,
             sized = dynamic_cast<const OutOfMemory*>(&why) != nullptr;
  const char* what = memory && !sized ? "there is no memory for its bookkeeping" : why.what();
  std::snprintf(out, bytes, "kitsune: %s'%.*s': %.*s%s", memory ? "out of memory in " : "", shown(name, kMostName), name,
                shown(what, 200), what,
                memory ? "; set KITSUNE_DISABLE=1 to run without pipelines, which need memory beside their arrays" : "");
}

std::string error_text(const std::exception& why, const char* name) noexcept {
  char text[kErrorBytes];
  describe(why, name, text, sizeof text);
  try {
    return text;
  } catch (const std::bad_alloc&) {
    return "out of memory";  // short enough to need none
  }
}

}  // namespace kitsune::cpu
