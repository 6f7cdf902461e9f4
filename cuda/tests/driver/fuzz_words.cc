// Launch words and an image (a file, the argument) with some bytes altered, cut or added: each is refused with a sentence, or keeps
// every limit. Compiled with the address and undefined-behaviour sanitizers.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>

#include "launch_words.h"

using namespace kitsune::cuda;

namespace {

constexpr int kMutations = 100000;
constexpr uint64_t kValues[] = {0, 1, 2, 63, 64, 65, 255, 1 << 16, 1u << 31, uint64_t{1} << 48, uint64_t{1} << 62, ~uint64_t{0}};

int fail(int mutation, const std::string& what) {
  std::printf("mutation %d: %s\n", mutation, what.c_str());
  return 1;
}

bool kept(const Launch& l) {
  bool sized = l.bytes.empty() || static_cast<int64_t>(l.bytes.size()) == l.operands + l.results;
  for (const Part& p : l.pointers)
    sized &= p.buffer >= 0 && p.buffer < l.operands + l.results && p.first >= 0 && p.bytes >= 0 &&
             p.first + p.bytes <= l.bytes[static_cast<size_t>(p.buffer)];
  for (const Map& m : l.maps) {
    const auto at = static_cast<size_t>(m.pointer);
    const bool there = m.pointer >= 0 && at < (l.pointers.empty() ? l.bytes.size() : l.pointers.size());
    sized &= there && m.columns > 0 && m.rows > 0 && m.rows <= INT32_MAX &&
             2 * m.columns * m.rows <= (l.pointers.empty() ? l.bytes[at] : l.pointers[at].bytes);
  }
  sized &= l.pack_blocks == 0 || (l.pack_blocks > 0 && l.table >= 0 && l.table < l.operands && !l.pointers.empty());
  return sized && l.grid >= 1 && l.grid <= INT32_MAX && l.block >= 32 && l.block <= 1024 && l.grid % l.cluster == 0 &&
         l.shared_bytes <= 227 * 1024 && l.operands + l.results <= 512 && l.workspace_zero_bytes >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argc > 1 ? argv[1] : "", std::ios::binary);
  const std::string image{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!check_image(image, true).empty()) return fail(-1, check_image(image, true));
  const std::vector<int64_t> plain{6, 900, 132, 384, 2, 1024, 0, 2, 2, 3, 64, 4096, 128, 64, 32, 64};
  std::vector<int64_t> packs = plain;  // with a packing kernel and two pointers
  packs.insert(packs.end(), {7, 1, 0, 0, 4096, 4, 16, 48});
  std::vector<int64_t> maps = packs;  // and with a tensor map
  maps[6] = 4;
  maps.insert(maps.end(), {0, 64, 31});
  int launches = 0, images = 0;
  for (int m = 0; m < kMutations; ++m) {
    std::mt19937_64 rng(static_cast<uint64_t>(m));
    const std::vector<int64_t>& words = rng() % 2 ? packs : rng() % 2 ? plain : maps;
    std::vector<int64_t> w = words;
    if (rng() % 4 == 0) w.resize(rng() % 31);
    for (size_t edits = rng() % 3; edits > 0 && !w.empty(); --edits)
      w[rng() % w.size()] =
          rng() % 2 ? static_cast<int64_t>(kValues[rng() % 12]) : w[rng() % w.size()] + static_cast<int64_t>(rng() % 3) - 1;
    try {
      // A copy of exactly its size, so that a sanitizer sees a word beyond.
      std::unique_ptr<int64_t[]> exact(new int64_t[w.size()]);
      std::copy(w.begin(), w.end(), exact.get());
      Launch launch = parse_launch(exact.get(), w.size());
      if (!kept(launch)) return fail(m, "a launch beyond its limits: " + geometry(launch));
      ++launches;
    } catch (const std::invalid_argument& e) {
      if (std::strlen(e.what()) < 20) return fail(m, "no message");
    }
    std::string bytes = image;
    if (rng() % 4 == 0) bytes.resize(rng() % (image.size() + 64));
    for (size_t edits = rng() % 3; edits > 0 && bytes.size() >= 8; --edits) {
      uint64_t value = rng() % 2 ? kValues[rng() % 12] : rng();
      size_t n = size_t{1} << rng() % 4;
      std::memcpy(&bytes[rng() % (bytes.size() - n + 1)], &value, n);
    }
    bytes.shrink_to_fit();
    images += check_image(bytes, rng() % 2).empty();
  }
  if (launches < kMutations / 100 || images < kMutations / 100)
    return fail(kMutations, "nearly all were refused: the test does not test");
  std::printf("%d launches and %d images of %d were accepted\n", launches, images, kMutations);
  return 0;
}
