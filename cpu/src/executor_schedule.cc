// One run of a program: rounds (prepare, the tiles, the combination of sinks) that workers drain together, with a barrier between
// two.
//
// The caller is a worker, and the only one the call depends on: helpers are pool tasks that join when they start and find the call
// over if they start late. A worker waits only for jobs that are running, so no wait depends on the pool. Whoever joins asks the
// pool for a few more helpers first: handing the pool a task takes about a microsecond, and on 192 cores the caller would do
// nothing else for longer than a small call takes.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>

#include "batch_sums.h"
#include "combine_sums.h"
#include "executor_memory.h"
#include "pause.h"
#include "pipeline.h"
#include "segments.h"

namespace kitsune::cpu {
namespace {

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
  void run_pipeline(Context& c, std::vector<char*>& slots, const Job& job) const;
  void run_strand(Context& c, int64_t strand) const;
  void combine_strands(const CombineJob& job, char* temp) const;

  const Plan& plan_;
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
  uint64_t seen = epoch_.load(std::memory_order_relaxed);
  lock.unlock();
  for (int i = 0; i < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++i) pause();
  lock.lock();
  ++idle_;
  wake_.wait(lock, [&] { return finished_ || epoch_.load(std::memory_order_relaxed) != seen; });
  --idle_;
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
      case Round::kPrepare: run_prep_task(plan_, plan_.prep_tasks[i], ins_, prepared_, c.temp); break;
      case Round::kTiles: run_tile(c, 0, i, 0, false); break;
      case Round::kStrands: run_strand(c, i); break;
      default: combine_strands(combines_[i], c.temp); break;
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

}  // namespace kitsune::cpu
