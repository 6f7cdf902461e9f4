// What bulk copies, TMA and cp.async share.
#pragma once

#include "state.h"

namespace kitsune::emulator {

// A copy that completes on a barrier: where the bytes go, and which barrier counts them.
struct Destination {
  Cta* cta;
  Barrier* barrier;
};
// The CTAs of a multicast mask, or the own one; the barrier at the same offset of each.
void destinations(std::vector<Destination>& to, const Mbar& bar, u32 mask, const char* what);

// Marks the bytes in flight, checks that they may be written, and that the exit of a CTA waits for them.
void begin_write(const Destination& to, size_t offset, size_t bytes, const Actor& actor);
void end_write(const Destination& to, size_t offset, size_t bytes);

// Cuts `units` into one to three pieces.
u32 random_cut(u32 units);

// The open group of a thread: bulk copies have one, cp.async another.
CopyGroup& open_group(std::shared_ptr<CopyGroup>& open);
void begin_source(CopyGroup& group, Region& region, size_t offset, size_t bytes, const Actor& actor);
void begin_target(CopyGroup& group, Region& region, size_t offset, size_t bytes, const Actor& actor, bool add);
void end_sources(CopyGroup& group, Thread& thread);
void end_targets(CopyGroup& group, Thread& thread);
void group_progress(CopyGroup& group);  // wakes who waits for it

}  // namespace kitsune::emulator
