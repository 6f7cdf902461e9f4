// Counts as text: JSON for each launch, and the functions by which Python asks for it.
//
// Comes in: a finished launch that counted. Goes out: one JSON object, in a list of all launches since counting started. Invariant:
// names and order of the fields are those of kernel_checks/counters.py.

#include <cstring>
#include <mutex>

#include "counts.h"
#include "state.h"

namespace kitsune::emulator {

namespace counters {

namespace {

const char* const kOps[] = {"ld_global", "ld_l2",      "st_global",  "red_add",  "cp_async", "ld_shared",
                            "st_shared", "ld_cluster", "st_cluster", "st_async", "ldmatrix", "stmatrix"};

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 32 ? ' ' : c;
  }
  return out + '"';
}

std::string section_fields(const Section& s) {
  return format("\"stage\": %d, \"role\": %d, \"finish\": %s", static_cast<i32>(s.stage), static_cast<i32>(s.role),
                s.finish ? "true" : "false");
}

// "stage/gradient.h": the path behind the last "kitsune/", or the file's name.
std::string short_path(const std::string& file) {
  size_t at = file.rfind("kitsune/");
  if (at != std::string::npos) return file.substr(at + strlen("kitsune/"));
  at = file.rfind('/');
  return at == std::string::npos ? file : file.substr(at + 1);
}

template <class List, class F>
std::string joined(const List& list, F text) {
  std::string all;
  for (const auto& item : list) all += (all.empty() ? "" : ",\n") + text(item);
  return "[" + all + "]";
}

std::string reports;

}  // namespace

void end(bool ok) {
  const Counting& c = *counting;
  const std::vector<Traffic>& buffers = counting->memory->finish();
  auto name = [&](u32 buffer) { return buffer == ~0u ? std::string() : buffers[buffer].name; };
  std::string text = format(
      "{\"grid\": %u, \"block\": %u, \"cluster\": %u, \"shared_bytes\": %u, \"seed\": %llu, \"l1\": %zu, \"l2\": %zu, \"ok\": "
      "%s,\n",
      c.launch.grid, c.launch.block, c.launch.cluster, c.launch.shared_bytes, c.seed, c.l1, c.l2, ok ? "true" : "false");
  text += "\"accesses\": " + joined(c.accesses, [&](const auto& item) {
            const auto& [k, a] = item;
            return "{" + section_fields(k.section) +
                   format(", \"op\": \"%s\", \"width\": %u, \"buffer\": ", kOps[static_cast<u32>(k.op)], k.width) +
                   quoted(name(k.buffer)) + ", \"file\": " + quoted(short_path(k.file)) +
                   format(", \"line\": %u, \"requests\": %llu, \"threads\": %llu, \"bytes\": %llu, \"sectors\": %llu", k.line,
                          a.requests, a.threads, a.bytes, a.sectors) +
                   format(", \"wavefronts\": %llu, \"ideal\": %llu}", a.wavefronts, a.ideal);
          });
  text += ",\n\"events\": " + joined(c.events, [&](const auto& item) {
            const auto& [k, e] = item;
            return "{" + section_fields(k.first) + ", \"name\": " + quoted(k.second) +
                   format(", \"count\": %llu, \"threads\": %llu, \"amount\": %llu}", e.count, e.threads, e.amount);
          });
  text += ",\n\"buffers\": " + joined(buffers, [&](const Traffic& t) {
            return "{\"name\": " + quoted(t.name) +
                   format(", \"bytes\": %zu, \"wanted\": %llu, \"l2_read\": %llu, \"l2_written\": %llu", t.bytes, t.wanted,
                          t.l2_read, t.l2_written) +
                   format(", \"memory_read\": %llu, \"memory_written\": %llu}", t.memory_read, t.memory_written);
          });
  reports += (reports.empty() ? "" : ",\n") + text + "}";
  counting.reset();
}

}  // namespace counters

static CountOptions count_options;

void start_counting(const CountOptions& options) {
  count_options = options;
  counters::reports.clear();
  counters::on = true;
}

std::string stop_counting() {
  counters::on = false;
  return "[" + std::move(counters::reports) + "]";
}

const CountOptions& counting_options() { return count_options; }

}  // namespace kitsune::emulator

// Launches from now on count, with caches of these sizes in bytes: L1 and shared memory of an SM together, L2.
extern "C" __attribute__((visibility("default"))) void kitsune_emulator_start_counting(unsigned long long l1,
                                                                                       unsigned long long l2) {
  kitsune::emulator::start_counting({l1, l2});
}

// Ends that, and gives what they counted as a JSON list. The text stays valid until this OS thread asks again.
extern "C" __attribute__((visibility("default"))) const char* kitsune_emulator_stop_counting() {
  static thread_local std::string text;
  text = kitsune::emulator::stop_counting();
  return text.c_str();
}
