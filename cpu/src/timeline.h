// When each worker ran and waited, recorded while somebody asks for it.
//
// Comes in: spans, from any thread. Goes out: events, all at once. Invariant: while nobody asks, a span is one relaxed load; what
// is recorded changes no result and no order of work. A thread keeps a bounded number of events and counts those beyond.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu::timeline {

enum class Kind : int64_t { kCall, kPrepare, kTile, kCombine, kWait };

struct Event {
  int64_t begin_ns, end_ns;  // now_ns()
  int64_t thread;            // in the order of their first event
  int64_t kind;
  int64_t name, stage;  // indices of names; stage -1 where there is none
  int64_t tile;         // its number, or of a wait the queue; -1 where there is none
};

struct Recording {
  std::vector<std::string> names;
  std::vector<Event> events;
  int64_t dropped = 0;
};

inline std::atomic<int64_t> session{0};  // odd while events are recorded
inline bool on() { return session.load(std::memory_order_relaxed) & 1; }

int64_t now_ns();
void start(int64_t most_events_of_a_thread);
Recording stop();

// The names of a program and of its stages for the session that runs, if one does.
class Names {
 public:
  Names() = default;
  explicit Names(const std::string& call);
  explicit Names(const Program& program);
  int64_t of_session() const { return session_; }
  int64_t name() const { return name_; }
  int64_t stage(int64_t s) const { return s < 0 || stages_.empty() ? -1 : stages_[static_cast<size_t>(s)]; }

 private:
  int64_t session_ = 0, name_ = -1;
  std::vector<int64_t> stages_;
};

// Records the time from its construction to its end.
class Span {
 public:
  Span(Kind kind, const Names& names, int64_t stage = -1, int64_t tile = -1)
      : names_(on() ? &names : nullptr), kind_(kind), stage_(stage), tile_(tile) {
    if (names_ != nullptr) begin_ns_ = now_ns();
  }
  ~Span() {
    if (names_ != nullptr) record();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void record() const noexcept;

  const Names* names_;
  Kind kind_;
  int64_t stage_, tile_, begin_ns_ = 0;
};

}  // namespace kitsune::cpu::timeline
