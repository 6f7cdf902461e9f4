#include "launch_words.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace kitsune::cuda {
namespace {

constexpr int64_t kMaxGrid = std::numeric_limits<int32_t>::max();  // x dimension, CUDA C++ guide, "Technical Specifications"
constexpr int64_t kWarp = 32;
constexpr int64_t kMaxBlock = 1024;
constexpr int64_t kMaxCluster = 16;              // non-portable size on Hopper (Hopper tuning guide, "Thread Block Clusters")
constexpr int64_t kMaxSharedBytes = 227 * 1024;  // compute capability 9.0, the most of any
constexpr int64_t kMaxParameters = 4096 / 8;     // pointers in the 4 KB of parameters that every driver of CUDA 12 takes

constexpr int64_t kMaxMaps = 16;
constexpr int64_t kMaxMapRows = std::numeric_limits<int32_t>::max();  // coordinates have 32 bits
constexpr int64_t kMaxMapColumns = 1 << 16;
constexpr int64_t kMaxBufferBytes = int64_t{1} << 50;

// A field of an image whose place was checked.
template <class T>
T field(const std::string& image, size_t at) {
  T value;
  std::memcpy(&value, image.data() + at, sizeof value);
  return value;
}

// [at, at + count * each) lies in an image of `size` bytes, without overflow.
bool inside(uint64_t at, uint64_t count, uint64_t each, size_t size) {
  uint64_t bytes = 0, end = 0;
  return !__builtin_mul_overflow(count, each, &bytes) && !__builtin_add_overflow(at, bytes, &end) && end <= size;
}

int64_t checked(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw std::invalid_argument("launch words: " + std::string(what) + " is " + std::to_string(value) + ", not between " +
                                std::to_string(low) + " and " + std::to_string(high));
  return value;
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument("launch words: " + std::string(what));
}

}  // namespace

bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    auto byte = [&](size_t k) { return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u; };
    unsigned lead = byte(0);
    size_t more = lead < 0x80                   ? 0
                  : lead >= 0xC2 && lead < 0xE0 ? 1
                  : (lead & 0xF0) == 0xE0       ? 2
                  : lead >= 0xF0 && lead < 0xF5 ? 3
                                                : 4;
    if (more == 4) return false;
    unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80, high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    for (size_t k = 1; k <= more; ++k, low = 0x80, high = 0xBF)
      if (byte(k) < low || byte(k) > high) return false;
    i += more + 1;
  }
  return true;
}

// The layout of ELF64 (System V ABI, chapters 4 and 5): cubins and shared libraries are little-endian files of that class.
std::string check_image(const std::string& image, bool emulated) {
  constexpr size_t kHeader = 64, kSection = 64, kSegment = 56;
  constexpr uint32_t kNoBits = 8;  // a section that has a size, but no bytes in the file
  if (image.empty()) return "the image is empty";
  if (image.compare(0, 4, "\177ELF") != 0) {
    if (emulated) return "the image is not a shared library";
    return image.find('\0') == std::string::npos ? "" : "the image is neither an ELF file nor text";
  }
  const size_t size = image.size();
  if (size < kHeader || field<uint8_t>(image, 4) != 2) return "the image is cut off, or not a 64-bit ELF file";
  auto segments = field<uint64_t>(image, 32), sections = field<uint64_t>(image, 40);
  auto segment_bytes = field<uint16_t>(image, 54), segment_count = field<uint16_t>(image, 56);
  auto section_bytes = field<uint16_t>(image, 58), section_count = field<uint16_t>(image, 60);
  bool tables = (segment_count == 0 || segment_bytes == kSegment) && (section_count == 0 || section_bytes == kSection) &&
                inside(segments, segment_count, segment_bytes, size) && inside(sections, section_count, section_bytes, size);
  if (!tables) return "the image is cut off: its tables end beyond its " + std::to_string(size) + " bytes";
  for (size_t i = 0; i < segment_count; ++i) {
    size_t at = segments + i * kSegment;
    if (!inside(field<uint64_t>(image, at + 8), 1, field<uint64_t>(image, at + 32), size))
      return "the image is cut off: segment " + std::to_string(i) + " ends beyond its " + std::to_string(size) + " bytes";
  }
  for (size_t i = 0; i < section_count; ++i) {
    size_t at = sections + i * kSection;
    if (field<uint32_t>(image, at + 4) != kNoBits &&
        !inside(field<uint64_t>(image, at + 24), 1, field<uint64_t>(image, at + 32), size))
      return "the image is cut off: section " + std::to_string(i) + " ends beyond its " + std::to_string(size) + " bytes";
  }
  return "";
}

Launch parse_launch(const int64_t* words, size_t count) {
  if (count < kLaunchWords)
    throw std::invalid_argument("launch words: there are " + std::to_string(count) + ", not " + std::to_string(kLaunchWords) +
                                " or more");
  if (words[0] != kLaunchVersion)
    throw std::invalid_argument("launch words: version " + std::to_string(words[0]) + ", but this extension reads version " +
                                std::to_string(kLaunchVersion) + ": the program was made by another version of kitsune_jax");
  require(words[1] == kSm90a || words[1] == kPortable, "the architecture is neither 900 nor 800");
  Launch launch{};
  launch.sm = words[1];
  launch.grid = checked("the grid", words[2], 1, kMaxGrid);
  launch.block = checked("the block", words[3], kWarp, kMaxBlock);
  launch.cluster = checked("the cluster", words[4], 1, kMaxCluster);
  launch.shared_bytes = checked("the shared memory", words[5], 0, kMaxSharedBytes);
  const int64_t flags = checked("the flags (1: cooperative, 2: stamped, 4 for each tensor map)", words[6], 0, 4 * kMaxMaps + 3);
  const int64_t maps = flags / 4;
  launch.cooperative = (flags & 1) != 0;
  launch.stamped = (flags & 2) != 0;
  launch.instance = checked("the blocks of an instance", words[7], 0, launch.grid);
  launch.operands = checked("the number of operands", words[8], 0, kMaxParameters);
  launch.results = checked("the number of results", words[9], 1, kMaxParameters);
  launch.workspace_zero_bytes = checked("the zeroed part of the workspace", words[10], 0, std::numeric_limits<int64_t>::max());
  require(launch.block % kWarp == 0, "the block is not a multiple of a warp");
  require(launch.grid % launch.cluster == 0, "the grid is not a multiple of the cluster");
  require(launch.instance == 0 || launch.grid % launch.instance == 0, "the grid is not a multiple of an instance");
  require(launch.instance % launch.cluster == 0, "an instance is not a multiple of the cluster");
  require(launch.sm == kSm90a || launch.cluster == 1, "clusters need architecture 900");
  const int64_t beside = 2 * launch.stamped + maps * (kMapBytes / 8);
  require(launch.operands + launch.results + beside <= kMaxParameters, "more operands and results than a kernel has parameters");
  require(launch.sm == kSm90a || maps == 0, "tensor maps need architecture 900");
  const size_t map_words = static_cast<size_t>(maps) * 3;
  if (maps > 0 && count < kLaunchWords + map_words)
    throw std::invalid_argument("launch words: those of " + std::to_string(maps) + " tensor maps are missing");
  count -= map_words;
  size_t buffers = static_cast<size_t>(launch.operands + launch.results), sized = kLaunchWords + buffers;
  bool packs = count > sized && (count - sized) % 3 == 2;
  if (count != kLaunchWords && count != sized && !packs)
    throw std::invalid_argument("launch words: there are " + std::to_string(count + map_words) + ", not " +
                                std::to_string(kLaunchWords) + ", or " + std::to_string(sized) +
                                " with the bytes of every buffer, or 2 and 3 for each pointer" + " more with a packing kernel");
  for (size_t i = kLaunchWords; i < std::min(count, sized); ++i)
    launch.bytes.push_back(checked("the size of a buffer", words[i], 0, kMaxBufferBytes));
  if (!launch.bytes.empty())
    require(launch.workspace_zero_bytes <= launch.bytes.back(), "the zeroed part of the workspace is larger than the workspace");
  auto read_maps = [&](int64_t pointers) {
    require(maps == 0 || !launch.bytes.empty(), "tensor maps without the bytes of the buffers");
    for (size_t i = count; i < count + map_words; i += 3) {
      Map map{};
      map.pointer = checked("the pointer of a tensor map", words[i], 0, pointers - 1);
      map.columns = checked("the columns of a tensor map", words[i + 1], 8, kMaxMapColumns);
      map.rows = checked("the rows of a tensor map", words[i + 2], 1, kMaxMapRows);
      const auto at = static_cast<size_t>(map.pointer);
      const int64_t bytes = launch.pointers.empty() ? launch.bytes[at] : launch.pointers[at].bytes;
      require(map.columns % 8 == 0, "the rows of a tensor map are not a multiple of 16 bytes");
      require(map.columns * 2 * map.rows <= bytes, "a tensor map is larger than its array");
      launch.maps.push_back(map);
    }
  };
  if (!packs) {
    read_maps(launch.operands + launch.results);
    return launch;
  }
  require(static_cast<int64_t>(buffers) < kMaxParameters, "more operands and results than the packing kernel has parameters");
  launch.pack_blocks = checked("the grid of the packing kernel", words[sized], 1, kMaxGrid);
  launch.table = checked("the operand with the table of the packing kernel", words[sized + 1], 0, launch.operands - 1);
  checked("the number of the kernel's pointers", static_cast<int64_t>((count - sized - 2) / 3), 1, kMaxParameters - beside);
  for (size_t i = sized + 2; i < count; i += 3) {
    Part part{};
    part.buffer = checked("the buffer of a pointer", words[i], 0, launch.operands + launch.results - 1);
    int64_t bytes = launch.bytes[static_cast<size_t>(part.buffer)];
    part.first = checked("the first byte of a pointer", words[i + 1], 0, bytes);
    part.bytes = checked("the bytes of a pointer", words[i + 2], 0, bytes - part.first);
    launch.pointers.push_back(part);
  }
  read_maps(static_cast<int64_t>(launch.pointers.size()));
  return launch;
}

std::string geometry(const Launch& launch) {
  std::string text = "grid " + std::to_string(launch.grid) + ", block " + std::to_string(launch.block);
  if (launch.cluster > 1) text += ", clusters of " + std::to_string(launch.cluster);
  text += ", " + std::to_string(launch.shared_bytes) + " bytes of shared memory";
  return launch.cooperative ? text + ", cooperative" : text;
}

}  // namespace kitsune::cuda
