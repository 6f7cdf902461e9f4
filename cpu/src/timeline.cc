#include "timeline.h"

#include <chrono>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace kitsune::cpu::timeline {

namespace {

// The events of a thread. Its mutex is taken by that thread for each event, and by others only where a session starts or stops.
struct Buffer {
  std::mutex mutex;
  int64_t thread = 0;
  std::vector<Event> events;
  int64_t dropped = 0;
};

struct Registry {
  std::mutex mutex;
  std::vector<std::shared_ptr<Buffer>> buffers;  // of threads that may be gone
  std::vector<std::string> names;
  std::unordered_map<std::string, int64_t> index;
  std::atomic<int64_t> most{0};
};

Registry& registry() {
  static Registry* const found = new Registry;  // pool threads may outlive the statics of this library
  return *found;
}

Buffer& buffer_of_thread() {
  thread_local const std::shared_ptr<Buffer> mine = [] {
    auto made = std::make_shared<Buffer>();
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    made->thread = static_cast<int64_t>(r.buffers.size());
    r.buffers.push_back(made);
    return made;
  }();
  return *mine;
}

int64_t intern(Registry& r, const std::string& name) {
  auto [at, fresh] = r.index.emplace(name, static_cast<int64_t>(r.names.size()));
  if (fresh) r.names.push_back(name);
  return at->second;
}

}  // namespace

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void start(int64_t most_events_of_a_thread) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (on()) session.fetch_add(1);  // the one that runs ends, and its events are lost
  r.names.clear();
  r.index.clear();
  for (auto& b : r.buffers) {
    std::lock_guard<std::mutex> own(b->mutex);
    b->events.clear();
    b->dropped = 0;
  }
  r.most = most_events_of_a_thread;
  session.fetch_add(1);
}

Recording stop() {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  if (on()) session.fetch_add(1);
  Recording found;
  found.names = std::move(r.names);
  r.names.clear();
  r.index.clear();
  for (auto& b : r.buffers) {
    std::lock_guard<std::mutex> own(b->mutex);
    found.events.insert(found.events.end(), b->events.begin(), b->events.end());
    found.dropped += b->dropped;
    b->events = {};
    b->dropped = 0;
  }
  return found;
}

Names::Names(const std::string& call) {
  if (!on()) return;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  session_ = session.load();
  name_ = intern(r, call);
}

Names::Names(const Program& program) : Names(program.name) {
  if (session_ == 0) return;
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  for (const Stage& s : program.stages) stages_.push_back(intern(r, s.name));
}

void Span::record() const noexcept {
  const int64_t end_ns = now_ns();
  try {
    Buffer& b = buffer_of_thread();
    std::lock_guard<std::mutex> lock(b.mutex);
    if (names_->of_session() != session.load()) return;  // names are those of an older session, or there are none
    if (static_cast<int64_t>(b.events.size()) >= registry().most) {
      ++b.dropped;
      return;
    }
    b.events.push_back({begin_ns_, end_ns, b.thread, static_cast<int64_t>(kind_), names_->name(), names_->stage(stage_), tile_});
  } catch (const std::exception&) {  // no memory for an event: it is left out
  }
}

}  // namespace kitsune::cpu::timeline
