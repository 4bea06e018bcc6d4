// Finds races: two accesses to the same bytes by different threads, at least one a write, at least one of them not a
// primitive for words shared between blocks, with nothing that orders them. Built in when EMULATOR_RACES is defined.
//
// The compiler's thread sanitizer reports every load and store of the kernel to the functions __tsan_*; they are defined
// here and look up, for each four bytes, who touched them last. What orders accesses, as in CUDA's memory model: a
// barrier of the warp, of the block or of a group; a store_release and the load_acquire that sees it. Shuffles and
// matrix products order nothing. A race is found whatever the order in which this run happened to execute it.
//
// Time is counted per warp and advances at each of its barriers. A view says of every warp of the grid up to which time
// all its accesses come before. In the same warp, other lanes' accesses come before if their time has passed. A thread
// that releases a flag also publishes its own accesses since the last barrier, not those of its warp: these are the
// extras of a view. Where an access has more predecessors than the tables hold, races may be missed, never invented.
#pragma once

#include "scheduler.h"

#ifdef EMULATOR_RACES

namespace emulator {

constexpr uint32_t MAX_WATCHED_WARPS = 4096;
constexpr uint32_t EXTRAS = 8;

struct Extra {
  uint32_t warp, lane, time;
};

struct View {
  uint32_t* seen;  // by warp of the grid: accesses with an earlier time come before
  Extra extra[EXTRAS];
  uint32_t extras;
};

struct Access {
  uint32_t warp;  // of the grid, counted from 1; 0 is none
  uint32_t time;
  uint32_t lanes;
  int32_t place;  // of the instruction, relative to emulator_launch
  uint8_t bytes;  // mask within the four
  uint8_t strong;
};

struct Cell {
  Access writes[2];
  Access reads[4];
};

struct Watched {
  const char* begin;
  size_t bytes;
  Cell* cells;
};

struct Flag {
  const void* address;
  View view;
};

struct RaceDetector {
  uint32_t warps;     // of the whole grid
  View* views;        // by warp of the grid
  uint32_t* times;    // likewise
  View* lane_views;   // by slot, warp and lane: what a lane has acquired since its last barrier
  Watched* globals;
  uint32_t global_count;
  const char *lowest, *highest;
  Cell** shared;      // by slot
  Flag* flags;
  uint32_t flag_count, flag_room;
};

static RaceDetector races;

UNWATCHED inline uint32_t warp_of_grid(const Warp* warp) { return warp->block->index * warp->block->warps + warp->index; }

UNWATCHED inline View* lane_view(const Lane* lane) {
  uint32_t slot = (uint32_t)(lane->warp->block - machine.slots);
  return &races.lane_views[slot * machine.options.threads + lane->thread];
}

UNWATCHED inline void add_extra(View* view, Extra extra) {
  for (uint32_t i = 0; i < view->extras; ++i)
    if (view->extra[i].warp == extra.warp && view->extra[i].lane == extra.lane) {
      if (view->extra[i].time < extra.time) view->extra[i].time = extra.time;
      return;
    }
  if (view->extras < EXTRAS) {
    view->extra[view->extras++] = extra;
  } else if (view->seen[extra.warp] <= extra.time) {
    view->seen[extra.warp] = extra.time + 1;
  }
}

UNWATCHED inline void join(View* view, const View& other) {
  if (!other.seen) return;
  if (!view->seen) view->seen = (uint32_t*)calloc(races.warps, sizeof(uint32_t));
  for (uint32_t w = 0; w < races.warps; ++w)
    if (view->seen[w] < other.seen[w]) view->seen[w] = other.seen[w];
  for (uint32_t i = 0; i < other.extras; ++i) add_extra(view, other.extra[i]);
}

UNWATCHED inline bool knows(const View& view, uint32_t warp, const Access& access) {
  if (!view.seen) return false;
  if (view.seen[warp] > access.time) return true;
  uint32_t known = 0;
  for (uint32_t i = 0; i < view.extras; ++i)
    if (view.extra[i].warp == warp && view.extra[i].time >= access.time) known |= 1u << view.extra[i].lane;
  return (access.lanes & ~known) == 0;
}

UNWATCHED inline bool comes_before(const Access& access, const Lane* me) {
  uint32_t warp = access.warp - 1, mine = warp_of_grid(me->warp);
  if (warp == mine) return access.time < races.times[mine] || (access.lanes & ~(1u << me->thread % WARP)) == 0;
  return knows(races.views[mine], warp, access) || knows(*lane_view(me), warp, access);
}

[[noreturn]] UNWATCHED inline void fail_race(const Lane* me, const Access& earlier, const Access& now, bool wrote,
                                             bool writes, const Watched* watched, const char* address) {
  uint32_t warps = me->warp->block->warps, other = earlier.warp - 1;
  append("race: ");
  append_who(me);
  append(" %s what block %u, warp %u, lane %d %s with nothing that orders the two", writes ? "writes" : "reads",
         other / warps, other % warps, __builtin_ctz(earlier.lanes), wrote ? "wrote" : "read");
  if (!watched) {
    append(", shared memory of block %u %+lld, size %u", me->warp->block->index,
           (long long)(address - me->warp->block->shared), machine.options.shared_bytes);
  } else {
    machine.report->faulted = 1;
    machine.report->fault_address = (uint64_t)address;
  }
  machine.report->fault_instruction = (uint64_t)now.place + (uint64_t)&emulator_launch;
  machine.report->other_instruction = (uint64_t)earlier.place + (uint64_t)&emulator_launch;
  leave();
}

UNWATCHED inline void remember_write(Cell* cell, const Access& now) {
  uint32_t free_slot = 2;
  for (uint32_t i = 0; i < 2; ++i) {
    Access& old = cell->writes[i];
    if (old.warp == 0 || (old.bytes & ~now.bytes) == 0) {
      old.warp = 0;
      free_slot = i;
    }
  }
  cell->writes[free_slot < 2 ? free_slot : machine.random.state & 1] = now;
}

UNWATCHED inline void remember_read(Cell* cell, const Access& now) {
  uint32_t free_slot = 4;
  for (uint32_t i = 0; i < 4; ++i) {
    Access& old = cell->reads[i];
    if (old.warp == now.warp && old.bytes == now.bytes && old.strong == now.strong) {
      uint32_t lanes = old.time == now.time ? old.lanes : 0;
      old = now;
      old.lanes |= lanes;
      return;
    }
    if (old.warp == 0) free_slot = i;
  }
  cell->reads[free_slot < 4 ? free_slot : machine.random.state >> 1 & 3] = now;
}

UNWATCHED inline void watch_cell(const Lane* me, Cell* cell, const Access& now, bool writes, const Watched* watched,
                                 const char* address) {
  for (uint32_t i = 0; i < 2; ++i) {
    const Access& old = cell->writes[i];
    if (old.warp && (old.bytes & now.bytes) && !(old.strong && now.strong) && !comes_before(old, me))
      fail_race(me, old, now, true, writes, watched, address);
  }
  if (!writes) {
    remember_read(cell, now);
    return;
  }
  for (uint32_t i = 0; i < 4; ++i) {
    Access& old = cell->reads[i];
    if (!old.warp || !(old.bytes & now.bytes)) continue;
    if (comes_before(old, me)) {
      if ((old.bytes & ~now.bytes) == 0) old.warp = 0;  // whoever comes after this write comes after that read
    } else if (!(old.strong && now.strong)) {
      fail_race(me, old, now, false, writes, watched, address);
    }
  }
  remember_write(cell, now);
}

UNWATCHED inline void watch(const void* address, size_t bytes, bool writes, bool strong, const void* instruction) {
  if (!machine.running_fiber) return;
  const Lane* me = machine.current;
  const char* at = (const char*)address;
  const Block* block = me->warp->block;
  const Watched* watched = nullptr;
  Cell* cells;
  size_t offset;
  if (at >= block->shared && at < block->shared + machine.options.shared_bytes) {
    cells = races.shared[block - machine.slots];
    offset = (size_t)(at - block->shared);
  } else {
    if (at < races.lowest || at >= races.highest) return;
    for (uint32_t i = 0; i < races.global_count && !watched; ++i)
      if (at >= races.globals[i].begin && at < races.globals[i].begin + races.globals[i].bytes)
        watched = &races.globals[i];
    if (!watched) return;
    cells = watched->cells;
    offset = (size_t)(at - watched->begin);
  }
  uint32_t warp = warp_of_grid(me->warp);
  Access now = {warp + 1, races.times[warp], 1u << me->thread % WARP,
                (int32_t)((intptr_t)instruction - 1 - (intptr_t)&emulator_launch), 0, strong};  // 1: inside the call
  while (bytes) {
    size_t within = offset % 4, part = bytes < 4 - within ? bytes : 4 - within;
    now.bytes = (uint8_t)(((1u << part) - 1) << within);
    watch_cell(me, &cells[offset / 4], now, writes, watched, at);
    offset += part;
    at += part;
    bytes -= part;
  }
}

UNWATCHED inline Flag* flag_at(const void* address, bool make) {
  for (uint32_t i = 0; i < races.flag_count; ++i)
    if (races.flags[i].address == address) return &races.flags[i];
  if (!make) return nullptr;
  if (races.flag_count == races.flag_room) {
    races.flag_room = 2 * races.flag_room + 16;
    races.flags = (Flag*)realloc(races.flags, races.flag_room * sizeof(Flag));
  }
  Flag* flag = &races.flags[races.flag_count++];
  memset(flag, 0, sizeof *flag);
  flag->address = address;
  return flag;
}

UNWATCHED inline void watch_release(const void* p) {
  Uninterrupted guard;
  const Lane* me = machine.current;
  uint32_t warp = warp_of_grid(me->warp);
  View* view = &flag_at(p, true)->view;
  if (view->seen) memset(view->seen, 0, races.warps * sizeof(uint32_t));
  view->extras = 0;
  join(view, races.views[warp]);
  join(view, *lane_view(me));
  view->seen[warp] = races.times[warp];
  add_extra(view, Extra{warp, me->thread % WARP, races.times[warp]});
}

UNWATCHED inline void watch_acquire(const void* p) {
  Uninterrupted guard;
  const Flag* flag = flag_at(p, false);
  if (flag) join(lane_view(machine.current), flag->view);
}

UNWATCHED inline void watch_meeting(const Block* block, uint32_t warps) {
  Uninterrupted guard;
  View all = {};
  uint32_t slot = (uint32_t)(block - machine.slots), first = block->index * block->warps;
  bool several = warps & (warps - 1);
  for (uint32_t w = 0; w < block->warps; ++w) {
    if (!(warps >> w & 1)) continue;
    View* view = &races.views[first + w];
    for (uint32_t lane = 0; lane < WARP; ++lane) {
      View* acquired = &races.lane_views[slot * machine.options.threads + w * WARP + lane];
      if (!acquired->seen) continue;
      join(view, *acquired);
      free(acquired->seen);
      memset(acquired, 0, sizeof *acquired);
    }
    view->seen[first + w] = ++races.times[first + w];
    if (several) join(&all, *view);
  }
  if (!several) return;
  for (uint32_t w = 0; w < block->warps; ++w)
    if (warps >> w & 1) join(&races.views[first + w], all);
  free(all.seen);
}

UNWATCHED inline void watch_block_start(const Block* block) {
  uint32_t slot = (uint32_t)(block - machine.slots);
  size_t cells = (machine.options.shared_bytes + 3) / 4;
  if (cells) memset(races.shared[slot], 0, cells * sizeof(Cell));
  for (uint32_t i = 0; i < machine.options.threads; ++i) {
    View* view = &races.lane_views[slot * machine.options.threads + i];
    free(view->seen);
    memset(view, 0, sizeof *view);
  }
}

inline Cell* new_cells(size_t bytes) {
  void* cells = mmap(nullptr, ((bytes + 3) / 4 + 1) * sizeof(Cell), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return cells == MAP_FAILED ? nullptr : (Cell*)cells;
}

inline void delete_cells(Cell* cells, size_t bytes) {
  if (cells) munmap(cells, ((bytes + 3) / 4 + 1) * sizeof(Cell));
}

inline bool start_watching() {
  const LaunchOptions& options = machine.options;
  memset(&races, 0, sizeof races);
  uint64_t warps = (uint64_t)options.blocks * (options.threads / WARP);
  if (warps > MAX_WATCHED_WARPS) {
    append("races can be looked for among at most %u warps, the grid has %llu", MAX_WATCHED_WARPS,
           (unsigned long long)warps);
    return false;
  }
  races.warps = (uint32_t)warps;
  races.views = (View*)calloc(warps, sizeof(View));
  races.times = (uint32_t*)calloc(warps, sizeof(uint32_t));
  for (uint32_t w = 0; w < warps; ++w) races.views[w].seen = (uint32_t*)calloc(warps, sizeof(uint32_t));
  races.lane_views = (View*)calloc((size_t)machine.slot_count * options.threads, sizeof(View));
  races.shared = (Cell**)calloc(machine.slot_count, sizeof(Cell*));
  for (uint32_t s = 0; s < machine.slot_count; ++s) races.shared[s] = new_cells(options.shared_bytes);
  races.global_count = options.range_count;
  races.globals = (Watched*)calloc(options.range_count + 1, sizeof(Watched));
  for (uint32_t i = 0; i < options.range_count; ++i) {
    Watched* watched = &races.globals[i];
    watched->begin = (const char*)options.ranges[i].begin;
    watched->bytes = options.ranges[i].bytes;
    watched->cells = new_cells(watched->bytes);
    if (!races.lowest || watched->begin < races.lowest) races.lowest = watched->begin;
    if (watched->begin + watched->bytes > races.highest) races.highest = watched->begin + watched->bytes;
  }
  return true;
}

inline void stop_watching() {
  for (uint32_t w = 0; races.views && w < races.warps; ++w) free(races.views[w].seen);
  for (uint32_t i = 0; races.lane_views && i < machine.slot_count * machine.options.threads; ++i)
    free(races.lane_views[i].seen);
  for (uint32_t s = 0; races.shared && s < machine.slot_count; ++s)
    delete_cells(races.shared[s], machine.options.shared_bytes);
  for (uint32_t i = 0; i < races.global_count; ++i) delete_cells(races.globals[i].cells, races.globals[i].bytes);
  for (uint32_t i = 0; i < races.flag_count; ++i) free(races.flags[i].view.seen);
  free(races.views);
  free(races.times);
  free(races.lane_views);
  free(races.shared);
  free(races.globals);
  free(races.flags);
  memset(&races, 0, sizeof races);
}

}  // namespace emulator

// What -fsanitize=thread calls.
#define EMULATOR_HOOK extern "C" UNWATCHED __attribute__((used, noinline)) void
#define EMULATOR_WATCH(name, bytes, writes) \
  EMULATOR_HOOK name(void* p) { emulator::watch(p, bytes, writes, false, __builtin_return_address(0)); }
#define EMULATOR_WATCH_BOTH(kind, bytes)             \
  EMULATOR_WATCH(__tsan_##kind##read##bytes, bytes, false) \
  EMULATOR_WATCH(__tsan_##kind##write##bytes, bytes, true)
EMULATOR_WATCH_BOTH(, 1)
EMULATOR_WATCH_BOTH(, 2)
EMULATOR_WATCH_BOTH(, 4)
EMULATOR_WATCH_BOTH(, 8)
EMULATOR_WATCH_BOTH(, 16)
EMULATOR_WATCH_BOTH(unaligned_, 2)
EMULATOR_WATCH_BOTH(unaligned_, 4)
EMULATOR_WATCH_BOTH(unaligned_, 8)
EMULATOR_WATCH_BOTH(unaligned_, 16)
EMULATOR_HOOK __tsan_read_range(void* p, long bytes) {
  emulator::watch(p, (size_t)bytes, false, false, __builtin_return_address(0));
}
EMULATOR_HOOK __tsan_write_range(void* p, long bytes) {
  emulator::watch(p, (size_t)bytes, true, false, __builtin_return_address(0));
}
EMULATOR_HOOK __tsan_init() {}
EMULATOR_HOOK __tsan_func_entry(void*) {}
EMULATOR_HOOK __tsan_func_exit() {}

#else

namespace emulator {
inline void watch(const void*, size_t, bool, bool, const void*) {}
inline void watch_release(const void*) {}
inline void watch_acquire(const void*) {}
inline void watch_meeting(const Block*, uint32_t) {}
inline void watch_block_start(const Block*) {}
inline bool start_watching() { return true; }
inline void stop_watching() {}
}  // namespace emulator

#endif
