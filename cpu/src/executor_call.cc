// A call: its parts one after the other or together, each of them as rounds of jobs that workers share, and what is said where one
// fails.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include "executor_internal.h"
#include "executor_memory.h"
#include "huge_pages.h"
#include "pause.h"
#include "rounds.h"
#include "segments.h"
#include "timeline.h"

namespace kitsune::cpu {

namespace {

// The firing rule: which (stage, tile) of a program may run now. Bookkeeping only; the caller holds a lock.
//
// A stage may take a tile when all its input slots are full, its output slots are free and, if it folds into a sink, the tile
// before it in the same strand is done. Tiles go by *position* in the order of the program: position p is slot p % depth of every
// queue.

// Strands are runs of consecutive tiles, `unit` of which are never in two; positions visit them in turn, so that several strands
// are under way at once. Where tiles are asked for by position, the units are shared out evenly.
class StrandOrder {
 public:
  explicit StrandOrder(const Plan& plan) : StrandOrder(plan.program.tiles, plan.strands, plan.strand_unit) {}
  StrandOrder(int64_t tiles, int64_t strands, int64_t unit = 1) : units_(tiles / unit), strands_(strands), unit_(unit) {}
  int64_t strand(int64_t position) const { return strands_ == 0 ? 0 : position % strands_; }
  int64_t tile(int64_t position) const { return strands_ == 0 ? position : first_tile(position % strands_) + position / strands_; }
  int64_t first_tile(int64_t strand) const { return unit_ * (strand * (units_ / strands_) + std::min(strand, units_ % strands_)); }

 private:
  int64_t units_, strands_, unit_;
};

class Pipeline {
 public:
  explicit Pipeline(const Plan& plan);
  // Finds a stage and a position that may run, and marks them as running.
  bool take(int64_t* stage, int64_t* position);
  void complete(int64_t stage, int64_t position);
  bool finished() const { return left_ == 0; }
  // The stage furthest downstream that has tiles left and none ready, and the queue that keeps it: an empty one in front of it, or
  // a full one behind; -1 where a partial sum does, or nothing.
  void blocked(int64_t* stage, int64_t* queue) const;

 private:
  enum State : uint8_t { kIdle, kRunning, kDone };
  struct StageState {
    int64_t low = 0;            // first position not done
    int64_t first_idle = 0;     // first position not started
    std::vector<State> states;  // of positions [low, low + window), by position % window
  };
  struct Slot {
    int64_t full = -1;  // the position it holds
    int64_t next;       // the position that may write it
    int64_t pending = 0;
  };
  bool ready(int64_t stage, int64_t position) const;
  State& state(int64_t s, int64_t position) { return stages_[s].states[position % plan_.window]; }

  const Plan& plan_;
  int64_t tiles_, left_, reach_;
  std::vector<StageState> stages_;        // by stage
  std::vector<std::vector<Slot>> slots_;  // by queue
};

Pipeline::Pipeline(const Plan& plan) : plan_(plan), tiles_(plan.program.tiles) {
  left_ = tiles_ * static_cast<int64_t>(plan.stages.size());
  reach_ = std::max<int64_t>(1, plan.strands);
  stages_.resize(plan.stages.size());
  slots_.resize(plan.program.queues.size());
  for (StageState& s : stages_) s.states.assign(static_cast<size_t>(plan.window), kIdle);
  for (size_t q = 0; q < slots_.size(); ++q) {
    int64_t depth = plan.program.queues[q].depth;
    reach_ = std::max(reach_, depth);
    for (int64_t i = 0; i < std::min(depth, tiles_); ++i) slots_[q].push_back({-1, i, 0});
  }
}

bool Pipeline::ready(int64_t s, int64_t position) const {
  const StagePlan& stage = plan_.stages[s];
  if (!stage.sinks.empty() && position >= plan_.strands) {
    int64_t before = position - plan_.strands;
    if (before >= stages_[s].low && stages_[s].states[before % plan_.window] != kDone) return false;
  }
  for (int64_t q : stage.inputs)
    if (slots_[q][position % plan_.program.queues[q].depth].full != position) return false;
  for (int64_t q : stage.outputs)
    if (slots_[q][position % plan_.program.queues[q].depth].next != position) return false;
  return true;
}

bool Pipeline::take(int64_t* stage, int64_t* position) {
  for (int64_t s : plan_.order) {
    StageState& st = stages_[s];
    int64_t end = std::min({tiles_, st.low + plan_.window, st.first_idle + reach_});
    for (int64_t p = st.first_idle; p < end; ++p) {
      if (state(s, p) != kIdle || !ready(s, p)) continue;
      state(s, p) = kRunning;
      while (st.first_idle < std::min(tiles_, st.low + plan_.window) && state(s, st.first_idle) != kIdle) ++st.first_idle;
      *stage = s;
      *position = p;
      return true;
    }
  }
  return false;
}

void Pipeline::blocked(int64_t* stage, int64_t* queue) const {
  for (int64_t s : plan_.order) {
    const int64_t p = stages_[s].first_idle;
    if (p >= tiles_) continue;
    *stage = s;
    for (int64_t q : plan_.stages[s].inputs)
      if (slots_[q][p % plan_.program.queues[q].depth].full != p) *queue = q;
    for (int64_t q : plan_.stages[s].outputs)
      if (*queue < 0 && slots_[q][p % plan_.program.queues[q].depth].next != p) *queue = q;
    return;
  }
}

void Pipeline::complete(int64_t s, int64_t position) {
  StageState& st = stages_[s];
  state(s, position) = kDone;
  while (st.low < tiles_ && state(s, st.low) == kDone) state(s, st.low++) = kIdle;
  // A full window stops the search for the first idle position; it goes on where the window now begins.
  while (st.first_idle < std::min(tiles_, st.low + plan_.window) && state(s, st.first_idle) != kIdle) ++st.first_idle;
  st.first_idle = std::max(st.first_idle, st.low);
  for (int64_t q : plan_.stages[s].inputs) {
    int64_t depth = plan_.program.queues[q].depth;
    Slot& slot = slots_[q][position % depth];
    if (--slot.pending > 0) continue;
    slot.full = -1;
    slot.next = position + depth;
  }
  for (int64_t q : plan_.stages[s].outputs) {
    Slot& slot = slots_[q][position % plan_.program.queues[q].depth];
    slot.full = position;
    slot.next = -1;
    slot.pending = static_cast<int64_t>(plan_.program.queues[q].consumers.size());
  }
  --left_;
}

// Sums of batches: sinks that have one sum for each batch.
//
// A strand stores the sums of a batch whose tiles are all its own straight to the result, when it is through with the last one. Of
// its first batch, if that began in the strand before, and of its last one, if that goes on in the next, it keeps the sums; in the
// end those of each such batch are added up in the order of the strands and stored. So the bits do not depend on the threads.

constexpr int64_t kChunk = 1024;  // elements stored at once: a conversion has temporary memory for so many

// The number of a tile in its batch, and whether the batch began in another strand.
struct Place {
  int64_t number, first_of_strand;
  bool shared;
  Place(const Plan& plan, int64_t tile, int64_t strand) {
    const int64_t tiles = plan.program.batch_tiles;
    first_of_strand = StrandOrder(plan).first_tile(strand);
    number = tile % tiles;
    shared = tile / tiles == first_of_strand / tiles && first_of_strand % tiles != 0;
  }
};

char* kept(const Plan& plan, char* strand, bool shared) { return strand + plan.stream_bytes + (shared ? plan.batch_bytes : 0); }

// Elements [begin, end) of the sums of batch `number`, which start at `sums`, to the result.
void store_batch(const Plan& plan, int64_t k, int64_t number, int64_t begin, int64_t end, const char* sums, char* const* outs,
                 char* temp) {
  const Sink& sink = plan.program.sinks[k];
  const DType acc = plan.sinks[k].acc, type = plan.program.outputs[sink.out].dtype;
  int64_t at = 0;
  for (int64_t a = plan.program.batch_axes; a-- > 0; number /= plan.program.axes[a])
    at += number % plan.program.axes[a] * sink.batch_strides[a];
  const size_t item = item_size(type), sum_item = item_size(acc);
  const Storer store(plan.table, type, acc, "");
  char* out = outs[sink.out] + static_cast<size_t>(at) * item;
  for (int64_t e = begin; e < end; e += kChunk)
    store_sums(sink, {e, std::min(end, e + kChunk)}, store, sums + static_cast<size_t>(e - begin) * sum_item, sum_item, out, item,
               temp);
}

// In front of tile `tile`: where its batch is summed, which is set to the identity if the strand has none of it yet.
void open_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, Context& c) {
  const Place at(plan, tile, strand);
  c.batch_sums = kept(plan, c.strand, at.shared);
  if (at.number != 0 && tile != at.first_of_strand) return;
  for (int64_t k : plan.stages[stage].batch_sinks) {
    const Sink& sink = plan.program.sinks[k];
    fill_identity(sink.how, plan.sinks[k].acc, sink.elements, c.batch_sums + plan.sinks[k].offset);
  }
}

// Behind it: what is complete is stored.
void close_batch(const Plan& plan, int64_t stage, int64_t tile, int64_t strand, const Context& c) {
  const Place at(plan, tile, strand);
  if (at.shared || at.number + 1 != plan.program.batch_tiles) return;
  for (int64_t k : plan.stages[stage].batch_sinks)
    store_batch(plan, k, tile / plan.program.batch_tiles, 0, plan.program.sinks[k].elements, c.batch_sums + plan.sinks[k].offset,
                c.outs, c.temp);
}

// A batch that several strands share: those from `first` to `last`.
struct SharedBatch {
  int64_t batch, first, last;
};

std::vector<SharedBatch> shared_batches(const Plan& plan) {
  std::vector<SharedBatch> found;
  const StrandOrder order(plan);
  const int64_t tiles = plan.program.batch_tiles;
  for (int64_t s = 1; s < plan.strands; ++s) {
    const int64_t first = order.first_tile(s), batch = first / tiles;
    if (first % tiles == 0) continue;
    if (found.empty() || found.back().batch != batch) found.push_back({batch, s - 1, s});
    found.back().last = s;
  }
  return found;
}

// Adds up the sums that strands keep of elements [begin, end) of a sink, and stores them.
void finish_batch(const Plan& plan, int64_t sink, const SharedBatch& of, int64_t begin, int64_t end, char* strands,
                  char* const* outs, char* temp) {
  const SinkPlan& s = plan.sinks[sink];
  auto sums = [&](int64_t strand) {
    char* const at = strands + static_cast<size_t>(strand) * plan.strand_bytes;
    return kept(plan, at, strand != of.first) + s.offset + static_cast<size_t>(begin) * item_size(s.acc);
  };
  char* total = sums(of.first);
  for (int64_t l = of.first + 1; l <= of.last; ++l) combine(plan.program.sinks[sink].how, s.acc, end - begin, total, sums(l));
  store_batch(plan, sink, of.batch, begin, end, total, outs, temp);
}

// The last step of a sink: the sums of all strands are added up, in the order of the strands, and stored.

constexpr int64_t kCombineChunk = 4096;  // elements of a sink combined by one job

// Elements [begin, end) of sink k, which is one of the whole stream and not of segments. temp: kPrepTempBytes.
//
// The sums of the strands but the last are added up beside them: another core may have the lines of the first one, and writing
// there would take them away from it. The last one is added on the way to the array, where that is of the same type.
void combine_sums(const Plan& plan, int64_t k, int64_t begin, int64_t end, const char* strands, char* array, char* temp) {
  constexpr int64_t kPiece = 1024;
  static_assert(kPiece * 8 <= kPrepTempBytes / 2);
  const Sink& sink = plan.program.sinks[k];
  const SinkPlan& s = plan.sinks[k];
  const DType type = plan.program.outputs[sink.out].dtype;
  const size_t sum = item_size(s.acc), item = item_size(type);
  const Storer store(plan.table, type, s.acc, "");
  const VectorFn add =
      sink.how == Reduction::kSum && s.acc == type && is_float(type) ? plan.table.vector(Opcode::op_add, type) : nullptr;
  const int64_t apart = add != nullptr ? plan.strands - 1 : plan.strands;  // strands that are added up beside the array
  char* const total = temp + kPrepTempBytes / 2;
  for (int64_t e = begin; e < end; e += kPiece) {
    const int64_t n = std::min(kPiece, end - e);
    const auto of = [&](int64_t strand) {
      return strands + static_cast<size_t>(strand) * plan.strand_bytes + s.offset + static_cast<size_t>(e) * sum;
    };
    const char* sums = of(0);
    for (int64_t l = 1; l < apart; ++l, sums = total) combine(sink.how, s.acc, n, total, sums, of(l));
    if (add == nullptr || plan.strands == 1) {
      store_sums(sink, {e, e + n}, store, sums, sum, array, item, temp);
      continue;
    }
    const char* last = of(plan.strands - 1);
    rows_of_sums(sink, e, n, [&](int64_t run, int64_t from, int64_t to) {
      const size_t at = static_cast<size_t>(from) * sum;
      add(run, array + static_cast<size_t>(to) * item, sums + at, last + at, nullptr, nullptr, nullptr);
    });
  }
}

// One run of a program: rounds (prepare, the tiles, the combination of sinks) that workers drain together, with a barrier between
// two.
//
// The caller is a worker, and the only one the call depends on: helpers are pool tasks that join when they start and find the call
// over if they start late. A worker waits only for jobs that are running, so no wait depends on the pool. Whoever joins asks the
// pool for a few more helpers first: handing the pool a task takes about a microsecond, and on 192 cores the caller would do
// nothing else for longer than a small call takes.

constexpr int kFanOut = 4;               // helpers that a worker asks for: 192 are there after four steps
thread_local bool scheduling = false;    // is this thread inside of Pool::schedule?
thread_local uint64_t scratch_user = 0;  // number of the call whose packed operands this thread's memory holds

struct Round {
  enum Kind { kPrepare, kTiles, kStrands, kPipeline, kCombine } kind;
  int64_t count;  // units: tasks, tiles, strands or chunks; 0 for a pipeline
};

struct Job {
  Round::Kind kind;
  int64_t begin, end;  // units; a pipeline's job is position `begin` of `stage`
  int64_t stage;
};

struct CombineJob {
  int64_t sink, begin, end;  // elements; rows of sorted indices
  int64_t shared = -1;       // the number of a batch that several strands share
};

class Run : public std::enable_shared_from_this<Run> {
 public:
  Run(const Plan& plan, char* const* ins, char* const* outs, char* prepared, char* rings, char* strands, int64_t workers,
      Pool& pool);
  // A thread's part: returns when the call is over, and to the caller when nobody uses its pool.
  void join(bool caller = false);
  const char* error() const { return error_; }

 private:
  void work(std::unique_lock<std::mutex>& lock);
  // Under the mutex.
  void start_helpers(std::unique_lock<std::mutex>& lock);
  bool take(Job* job);
  void finish_job(const Job& job);
  void begin_round();
  void wait(std::unique_lock<std::mutex>& lock);
  void fail(const std::exception& why) noexcept;
  // Without it.
  void execute(const Job& job);
  void find_batch(int64_t number, Context& c) const;
  void run_tile(Context& c, int64_t stage, int64_t tile, int64_t strand, bool first_of_strand) const;
  timeline::Span waiting() const;
  void run_pipeline(Context& c, std::vector<char*>& slots, const Job& job) const;
  void run_strand(Context& c, int64_t strand) const;
  void combine_strands(const CombineJob& job, char* temp) const;

  const Plan& plan_;
  const timeline::Names names_;
  const uint64_t number_ = ++calls_;
  inline static std::atomic<uint64_t> calls_{0};
  void (*end_of_call_)();
  char* const* ins_;
  char* const* outs_;
  char* prepared_;
  char* rings_;
  char* strands_;
  int64_t workers_;
  Pool& pool_;  // lives as long as the call: used only while `starting_` keeps the caller
  std::vector<char*> preps_;
  std::vector<Round> rounds_;
  std::vector<CombineJob> combines_;
  std::vector<SharedBatch> shared_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> epoch_{0};  // grows whenever a job may have become available, or the call ends
  size_t round_ = 0;
  int64_t next_ = 0, done_ = 0, running_ = 0, idle_ = 0;
  int64_t wanted_, starting_ = 0;  // helpers not asked for yet; workers that are asking for some
  std::optional<Pipeline> pipeline_;
  bool finished_ = false, failed_ = false;
  char error_[kErrorBytes] = "";  // "" or what went wrong: there may be no memory for a string
};

Run::Run(const Plan& plan, char* const* ins, char* const* outs, char* prepared, char* rings, char* strands, int64_t workers,
         Pool& pool)
    : plan_(plan),
      names_(plan.program),
      end_of_call_(plan.table.end_of_call),
      ins_(ins),
      outs_(outs),
      prepared_(prepared),
      rings_(rings),
      strands_(strands),
      workers_(workers),
      pool_(pool),
      wanted_(workers - 1) {
  for (const PrepPlan& p : plan.preps) preps_.push_back(prepared + p.offset);
  if (!plan.prep_tasks.empty()) rounds_.push_back({Round::kPrepare, static_cast<int64_t>(plan.prep_tasks.size())});
  if (plan.stages.size() > 1)
    rounds_.push_back({Round::kPipeline, 0});
  else if (plan.strands > 0)
    rounds_.push_back({Round::kStrands, plan.strands});
  else
    rounds_.push_back({Round::kTiles, plan.program.tiles});
  if (plan.batch_bytes > 0) shared_ = shared_batches(plan);
  for (size_t k = 0; k < plan.sinks.size(); ++k) {
    const Sink& sink = plan.program.sinks[k];
    if (sink.per_batch()) {
      for (size_t b = 0; b < shared_.size(); ++b)
        for (int64_t e = 0; e < sink.elements; e += kCombineChunk)
          combines_.push_back({static_cast<int64_t>(k), e, std::min(sink.elements, e + kCombineChunk), static_cast<int64_t>(b)});
      continue;
    }
    const bool segments = sink.fed == Fold::kSegments;
    const int64_t n = segments ? sink.rows : sink.elements;
    const int64_t row_bytes = n > 0 ? sink.elements / n * static_cast<int64_t>(item_size(plan.program.outputs[sink.out].dtype)) : 0;
    const int64_t chunk = segments ? segment_piece(n, row_bytes) : kCombineChunk;
    for (int64_t e = 0; e < n; e += chunk) combines_.push_back({static_cast<int64_t>(k), e, std::min(n, e + chunk)});
  }
  if (!combines_.empty()) rounds_.push_back({Round::kCombine, static_cast<int64_t>(combines_.size())});
  begin_round();
}

void Run::begin_round() {
  next_ = done_ = 0;
  pipeline_.reset();
  if (round_ == rounds_.size()) {
    finished_ = true;
  } else if (rounds_[round_].kind == Round::kPipeline) {
    pipeline_.emplace(plan_);
  }
}

bool Run::take(Job* job) {
  if (finished_ || failed_) return false;
  const Round& r = rounds_[round_];
  *job = {r.kind, 0, 0, 0};
  if (pipeline_) {
    if (!pipeline_->take(&job->stage, &job->begin)) return false;
    if (idle_ > 0) wake_.notify_one();  // there may be more than one
  } else {
    if (next_ == r.count) return false;
    // Guided: large pieces first, single units at the end.
    int64_t n = std::max<int64_t>(1, (r.count - next_) / (4 * workers_));
    job->begin = next_;
    job->end = next_ += n;
  }
  ++running_;
  return true;
}

void Run::finish_job(const Job& job) {
  --running_;
  bool over = false;
  if (pipeline_) {
    pipeline_->complete(job.stage, job.begin);
    over = pipeline_->finished();
  } else {
    done_ += job.end - job.begin;
    over = done_ == rounds_[round_].count;
  }
  if (over && !failed_) {
    ++round_;
    try {
      begin_round();
    } catch (const std::exception& e) {
      fail(e);
    }
  }
  if (failed_ && running_ == 0) finished_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  if (over || finished_)
    wake_.notify_all();
  else if (idle_ > 0 && pipeline_)
    wake_.notify_one();
}

void Run::fail(const std::exception& why) noexcept {
  if (!failed_) describe(why, plan_.program.name.c_str(), error_, sizeof error_);
  failed_ = true;
}

void Run::wait(std::unique_lock<std::mutex>& lock) {
  const timeline::Span span = waiting();
  uint64_t seen = epoch_.load(std::memory_order_relaxed);
  lock.unlock();
  for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++i) pause();
  lock.lock();
  ++idle_;
  wake_.wait(lock, [&] { return finished_ || epoch_.load(std::memory_order_relaxed) != seen; });
  --idle_;
}

// The wait of a worker that begins now: of a pipeline for the queue that keeps the stage furthest downstream, else for the others
// to end the round. Under the mutex.
timeline::Span Run::waiting() const {
  int64_t stage = -1, queue = -1;
  if (timeline::on() && pipeline_) pipeline_->blocked(&stage, &queue);
  return timeline::Span(timeline::Kind::kWait, names_, stage, queue);
}

// What a thread keeps beyond what it may goes with its part of a call, however that ends.
struct TrimScratch {
  ~TrimScratch() {
    trim_thread_scratch();
    scratch_user = 0;
  }
};

// A pool may run a task inside of schedule, on the thread that gives it. That thread is in the call already: the task does nothing.
void Run::start_helpers(std::unique_lock<std::mutex>& lock) {
  for (int i = 0; i < kFanOut && wanted_ > 0 && !finished_ && !failed_; ++i) {
    --wanted_;
    ++starting_;
    lock.unlock();
    try {
      std::function<void()> helper = [call = shared_from_this()] {
        if (!scheduling) call->join();
      };
      scheduling = true;
      pool_.schedule(std::move(helper));
    } catch (const std::exception&) {  // fewer helpers: the call does not depend on them
    }
    scheduling = false;
    lock.lock();
    if (--starting_ == 0 && finished_) wake_.notify_all();
  }
}

void Run::join(bool caller) {
  TrimScratch trim;
  ThreadsPart part(end_of_call_);  // not the plan's: a helper that starts late comes here when the plan is gone
  std::unique_lock<std::mutex> lock(mutex_);
  start_helpers(lock);
  work(lock);
  if (caller) wake_.wait(lock, [&] { return starting_ == 0; });
}

void Run::work(std::unique_lock<std::mutex>& lock) {
  while (!finished_) {
    Job job;
    bool taken = false;
    try {
      taken = take(&job);
      if (taken) {
        lock.unlock();
        execute(job);
        lock.lock();
      }
    } catch (const std::exception& e) {
      if (!lock.owns_lock()) lock.lock();
      fail(e);
    }
    if (taken)
      finish_job(job);
    else if (!finished_)
      wait(lock);
  }
}

void Run::execute(const Job& job) {
  char* scratch = thread_scratch(plan_.scratch_bytes);
  const char** packed_from = reinterpret_cast<const char**>(scratch + plan_.packed_from_offset);
  if (scratch_user != number_) std::fill_n(packed_from, plan_.packed_slots, nullptr);
  scratch_user = number_;
  int64_t batch[kMaxLoopDims], loops[kMaxLoops];
  Context c{0,
            0,
            0,
            batch,
            loops,
            ins_,
            outs_,
            scratch,
            nullptr,
            preps_.data(),
            strands_,
            strands_,
            scratch + plan_.packed_offset,
            packed_from,
            scratch + plan_.temp_offset};
  if (job.kind == Round::kPipeline) {
    thread_local std::vector<char*> slots;
    return run_pipeline(c, slots, job);
  }
  for (int64_t i = job.begin; i < job.end; ++i) {
    switch (job.kind) {
      case Round::kPrepare: {
        const timeline::Span span(timeline::Kind::kPrepare, names_, -1, i);
        run_prep_task(plan_, plan_.prep_tasks[i], ins_, prepared_, c.temp);
        break;
      }
      case Round::kTiles: run_tile(c, 0, i, 0, false); break;
      case Round::kStrands: run_strand(c, i); break;
      default: {
        const timeline::Span span(timeline::Kind::kCombine, names_, -1, i);
        combine_strands(combines_[i], c.temp);
        break;
      }
    }
  }
}

void Run::run_strand(Context& c, int64_t strand) const {
  StrandOrder order(plan_);
  int64_t first = order.first_tile(strand), end = order.first_tile(strand + 1);
  for (int64_t t = first; t < end; ++t) run_tile(c, 0, t, strand, t == first);
}

void Run::run_pipeline(Context& c, std::vector<char*>& slots, const Job& job) const {
  const StagePlan& stage = plan_.stages[job.stage];
  StrandOrder order(plan_);
  slots.resize(plan_.program.queues.size());
  for (const auto* list : {&stage.inputs, &stage.outputs})
    for (int64_t q : *list) {
      size_t slot = static_cast<size_t>(job.begin % plan_.program.queues[q].depth);
      slots[q] = rings_ + plan_.ring_offset[q] + slot * plan_.entry_stride[q];
    }
  c.slots = slots.data();
  run_tile(c, job.stage, order.tile(job.begin), order.strand(job.begin), job.begin < plan_.strands);
}

// What depends on the batch `number` of a tile.
void Run::find_batch(int64_t number, Context& c) const {
  const Program& p = plan_.program;
  c.first_row += number * p.batch_rows;
  for (int64_t a = p.batch_axes; a-- > 0; number /= p.axes[a]) c.batch[a] = number % p.axes[a];
}

void Run::run_tile(Context& c, int64_t s, int64_t tile, int64_t strand, bool first_of_strand) const {
  const timeline::Span span(timeline::Kind::kTile, names_, s, tile);
  const Program& p = plan_.program;
  const StagePlan& stage = plan_.stages[s];
  int64_t number = p.batch_axes > 0 ? tile % p.batch_tiles : tile;
  c.row0 = number * p.tile_rows;
  c.rows = std::min(p.tile_rows, p.batch_rows - c.row0);
  c.first_row = c.row0;
  if (p.batch_axes > 0) find_batch(tile / p.batch_tiles, c);
  c.strand = strands_ + static_cast<size_t>(strand) * plan_.strand_bytes;
  c.first_of_strand = first_of_strand;
  if (first_of_strand)
    for (int64_t k : stage.sinks) {
      char* sums = c.strand + plan_.sinks[k].offset;
      if (p.sinks[k].fed == Fold::kSegments)
        *reinterpret_cast<Segments*>(sums) = {-1, -1, -1, -1};
      else if (!plan_.sinks[k].written)
        fill_identity(p.sinks[k].how, plan_.sinks[k].acc, p.sinks[k].elements, sums);
    }
  if (!stage.batch_sinks.empty()) open_batch(plan_, s, tile, strand, c);
  for (const auto& step : stage.steps) step->run(c);
  if (!stage.batch_sinks.empty()) close_batch(plan_, s, tile, strand, c);
}

void Run::combine_strands(const CombineJob& job, char* temp) const {
  const Sink& sink = plan_.program.sinks[job.sink];
  if (sink.fed == Fold::kSegments) return finish_segments(plan_, job.sink, job.begin, job.end, strands_, outs_[sink.out]);
  if (job.shared >= 0)
    return finish_batch(plan_, job.sink, shared_[static_cast<size_t>(job.shared)], job.begin, job.end, strands_, outs_, temp);
  combine_sums(plan_, job.sink, job.begin, job.end, strands_, outs_[sink.out], temp);
}

}  // namespace

std::string run_program(const Plan& plan, char* const* ins, char* const* outs, Pool& pool) {
  try {
    CachedBlock prepared(plan.prep_bytes, "packed weights"), rings(plan.ring_bytes, "queues");
    CachedBlock strands(plan.strands_bytes, "partial sums");
    int64_t workers = std::clamp<int64_t>(pool.num_threads(plan.shared_ns), 1, plan.most_workers);
    auto run = std::make_shared<Run>(plan, ins, outs, prepared.data(), rings.data(), strands.data(), workers, pool);
    run->join(true);
    return run->error();
  } catch (const std::exception& e) {
    return error_text(e, plan.program.name.c_str());
  }
}

// Parts of a call that run together: tiles of several programs as the units of one round.
//
// The updates of a training step are a part for each parameter. Alone, most of them are too short to wake a thread for, and each of
// the others ends with a barrier.

namespace {

// One part of a group, and its arrays.
struct Member {
  const Plan* plan;
  timeline::Names names;
  std::vector<char*> ins, outs;
};

constexpr size_t kMostTemporary = size_t{1} << 20;  // of a thread, which keeps it
constexpr double kAskNs = 1000;                     // for handing the pool a task

bool is_tiles_alone(const Plan& plan) {
  const Program& p = plan.program;
  return plan.stages.size() == 1 && plan.sinks.empty() && plan.preps.empty() && plan.packed_slots == 0 && p.queues.empty() &&
         p.batch_axes == 0 && plan.scratch_bytes <= kMostTemporary;
}

void run_tile(const Member& m, int64_t tile) {
  const timeline::Span span(timeline::Kind::kTile, m.names, 0, tile);
  const Plan& plan = *m.plan;
  const Program& p = plan.program;
  char* scratch = thread_scratch(plan.scratch_bytes);
  int64_t batch[kMaxLoopDims] = {}, loops[kMaxLoops] = {};
  Context c{};
  c.row0 = c.first_row = tile * p.tile_rows;
  c.rows = std::min(p.tile_rows, p.batch_rows - c.row0);
  c.batch = batch;
  c.loops = loops;
  c.ins = m.ins.data();
  c.outs = m.outs.data();
  c.scratch = scratch;
  c.packed = scratch + plan.packed_offset;
  c.temp = scratch + plan.temp_offset;
  for (const auto& step : plan.stages[0].steps) step->run(c);
}

// The ends of the groups that the parts of `call` run in, in order. Parts of a group are neighbours in one phase, so none reads
// what another writes (the checker), and each is nothing but tiles of one stage.
std::vector<size_t> groups_of(const Call& call, const std::vector<std::unique_ptr<const Plan>>& plans) {
  std::vector<size_t> ends;
  for (size_t i = 1; i < plans.size(); ++i)
    if (call.parts[i - 1].phase != call.parts[i].phase || !is_tiles_alone(*plans[i - 1]) || !is_tiles_alone(*plans[i]))
      ends.push_back(i);
  if (!plans.empty()) ends.push_back(plans.size());
  return ends;
}

// Runs a group once; the result is as that of Executable::run.
std::string run_together(const std::vector<Member>& members, const char* name, Pool& pool) {
  std::vector<int64_t> ends;  // of the tiles of each member among those of all
  int64_t tiles = 0;
  double ns = 0;
  for (const Member& m : members) {
    ends.push_back(tiles += m.plan->program.tiles);
    ns += m.plan->estimated_ns;
  }
  std::atomic<bool> failed{false};
  char error[kErrorBytes] = "";  // of the first that fails: there may be no memory for a string
  // Asking for w threads takes w kAskNs, their work ns / w.
  const int64_t worth = static_cast<int64_t>(std::sqrt(ns / kAskNs));
  const int64_t workers = std::clamp<int64_t>(std::min(worth, pool.num_threads(ns)), 1, tiles);
  run_rounds(pool, workers, {tiles}, [&](size_t, int64_t i) {
    if (failed.load(std::memory_order_relaxed)) return;
    const size_t k = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    try {
      run_tile(members[k], i - (k > 0 ? ends[k - 1] : 0));
    } catch (const std::exception& e) {
      if (!failed.exchange(true)) describe(e, name, error, sizeof error);
    }
  });
  return error;
}

}  // namespace

// Why a call failed, in words.

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

// A call: its parts one after the other, and the memory of the arrays between them.

namespace {

std::vector<Array> from(const std::vector<Array>& arrays, int64_t first, int64_t count) {
  return {arrays.begin() + first, arrays.begin() + first + count};
}

// Places for arrays in one block, in the order in which they are made: the smallest gap that is large enough, or the end.
class Places {
 public:
  size_t take(size_t bytes) {
    auto best = free_.end();
    for (auto gap = free_.begin(); gap != free_.end(); ++gap)
      if (gap->second >= bytes && (best == free_.end() || gap->second < best->second)) best = gap;
    if (best == free_.end()) {  // the last gap may reach the end
      size_t at = end_;
      if (!free_.empty() && free_.rbegin()->first + free_.rbegin()->second == end_) {
        at = free_.rbegin()->first;
        free_.erase(std::prev(free_.end()));
      }
      end_ = plus(at, bytes);
      return at;
    }
    const auto [at, size] = *best;
    free_.erase(best);
    if (size > bytes) free_[at + bytes] = size - bytes;
    return at;
  }

  void give_back(size_t at, size_t bytes) {
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == at) {
        before->second += bytes;
        return;
      }
    }
    free_[at] = bytes;
  }

  size_t end() const { return end_; }

 private:
  std::map<size_t, size_t> free_;  // place -> bytes, no two of them side by side
  size_t end_ = 0;
};

// Where the arrays that live during the call only lie in the memory between phases. Two of them share bytes only where one is read
// for the last time by a group of parts before the one that makes the other.
std::vector<size_t> place_inner(const Call& call, const std::vector<size_t>& ends, size_t* bytes) {
  const size_t outer = static_cast<size_t>(call.operands + call.results), none = call.parts.size();
  std::vector<size_t> last(call.arrays.size(), none), at(call.arrays.size() - outer);
  for (size_t p = 0; p < call.parts.size(); ++p)
    for (const auto* arrays : {&call.parts[p].reads, &call.parts[p].writes})
      for (int64_t k : *arrays) last[static_cast<size_t>(k)] = p;
  auto size_of = [&](size_t k) {
    return align_up(times(static_cast<size_t>(call.arrays[k].elements), item_size(call.arrays[k].dtype)));
  };
  Places places;
  std::vector<size_t> dying;
  auto end = ends.begin();
  for (size_t p = 0; p < call.parts.size() && places.end() != kTooLarge; ++p) {
    for (int64_t k : call.parts[p].writes)
      if (static_cast<size_t>(k) >= outer) at[static_cast<size_t>(k) - outer] = places.take(size_of(static_cast<size_t>(k)));
    for (const auto* arrays : {&call.parts[p].reads, &call.parts[p].writes})
      for (int64_t k : *arrays)
        if (static_cast<size_t>(k) >= outer && last[static_cast<size_t>(k)] == p) {
          dying.push_back(static_cast<size_t>(k));
          last[static_cast<size_t>(k)] = none;  // a part may read an array twice
        }
    if (p + 1 < *end) continue;
    for (size_t k : dying) places.give_back(at[k - outer], size_of(k));
    dying.clear();
    ++end;
  }
  *bytes = places.end();
  return at;
}

}  // namespace

Executable::Executable(Call call, const KernelTable& table) : call_(std::move(call)) {
  for (const Part& part : call_.parts) plans_.push_back(std::make_unique<const Plan>(part.program, table));
  const int64_t outer = call_.operands + call_.results;
  group_ends_ = groups_of(call_, plans_);
  inner_offset_ = place_inner(call_, group_ends_, &inner_bytes_);
  limit_memory(inner_bytes_, from(call_.arrays, 0, outer), {}, "arrays between phases");
}

Executable::~Executable() = default;

double Executable::estimated_ns() const {
  double ns = 0;
  for (const auto& plan : plans_) ns += plan->estimated_ns;
  return ns;
}

size_t Executable::memory_bytes() const {
  size_t most = 0;
  for (const auto& plan : plans_) most = std::max(most, plan->memory_bytes());
  return plus(inner_bytes_, most);
}

std::string Executable::run(const void* const* ins, void* const* outs, Pool& pool) const {
  try {
    const timeline::Names names(call_.name);
    const timeline::Span span(timeline::Kind::kCall, names);
    CachedBlock inner(inner_bytes_, "arrays between phases");
    std::vector<char*> arrays;
    arrays.reserve(call_.arrays.size());
    for (int64_t i = 0; i < call_.operands; ++i) arrays.push_back(const_cast<char*>(static_cast<const char*>(ins[i])));
    for (int64_t i = 0; i < call_.results; ++i) {
      const Array& a = call_.arrays[static_cast<size_t>(call_.operands + i)];
      advise_huge_pages(outs[i], static_cast<size_t>(a.elements) * item_size(a.dtype));
      arrays.push_back(static_cast<char*>(outs[i]));
    }
    for (size_t offset : inner_offset_) arrays.push_back(inner.data() + offset);
    std::vector<Member> members;
    size_t begin = 0;
    for (size_t end : group_ends_) {
      members.clear();
      for (size_t i = begin; i < end; ++i) {
        Member& m = members.emplace_back(Member{plans_[i].get(), timeline::Names(plans_[i]->program), {}, {}});
        for (int64_t k : call_.parts[i].reads) m.ins.push_back(arrays[static_cast<size_t>(k)]);
        for (int64_t k : call_.parts[i].writes) m.outs.push_back(arrays[static_cast<size_t>(k)]);
      }
      const Member& first = members.front();
      std::string error = end - begin == 1 ? run_program(*first.plan, first.ins.data(), first.outs.data(), pool)
                                           : run_together(members, call_.name.c_str(), pool);
      if (!error.empty()) return error;
      begin = end;
    }
    return "";
  } catch (const std::exception& e) {
    return error_text(e, call_.name.c_str());
  }
}

}  // namespace kitsune::cpu
