// Words on their way to memory, for launches with relaxed = 1.
//
// A word that store_relaxed stores is seen by other threads at a random later time, in any order relative to other
// words. Kept in order, as the memory model demands: stores to the same word; a thread's store and its own later loads
// (and those of threads that it has met at a barrier since); everything before a store_release, by the same thread or
// by threads it has met at a barrier since, and that store. Every word arrives in the end.
#pragma once

#include "scheduler.h"

namespace emulator {

UNWATCHED inline bool precedes(const PendingStore& store, const Lane* lane) {
  const Warp* warp = lane->warp;
  return store.block == warp->block->index && (store.thread == lane->thread || (store.met >> warp->index & 1));
}

UNWATCHED inline bool overlap(const PendingStore& store, const void* p, size_t bytes) {
  return (const char*)p < store.address + store.bytes && store.address < (const char*)p + bytes;
}

UNWATCHED inline void deliver(uint32_t i) {
  PendingStore& store = machine.pending[i];
  memcpy(store.address, store.value, store.bytes);
  ++machine.epoch;
  --machine.pending_count;
  memmove(&store, &store + 1, (machine.pending_count - i) * sizeof store);
}

// One word at random, or the oldest of those to the same place.
UNWATCHED inline void deliver_any() {
  uint32_t i = machine.random.below(machine.pending_count);
  const PendingStore& chosen = machine.pending[i];
  for (uint32_t older = 0; older < i; ++older)
    if (overlap(machine.pending[older], chosen.address, chosen.bytes)) {
      deliver(older);
      return;
    }
  deliver(i);
}

UNWATCHED inline void deliver_all() {
  while (machine.pending_count) deliver_any();
}

UNWATCHED inline void deliver_sometimes() {
  while (machine.pending_count && machine.random.below(machine.mean_delay) == 0) deliver_any();
}

UNWATCHED inline void deliver_overlapping(const void* p, size_t bytes) {
  for (uint32_t i = 0; i < machine.pending_count;)
    if (overlap(machine.pending[i], p, bytes)) deliver(i);
    else ++i;
}

UNWATCHED inline void deliver_preceding(const Lane* lane) {
  for (uint32_t i = 0; i < machine.pending_count;) {
    if (!precedes(machine.pending[i], lane)) {
      ++i;
      continue;
    }
    char* address = machine.pending[i].address;
    uint32_t bytes = machine.pending[i].bytes;
    deliver_overlapping(address, bytes);  // the older ones to this place, then this one
    i = 0;
  }
}

UNWATCHED inline void delay_store(Lane* lane, void* p, const void* value, uint32_t bytes) {
  // A bad address must fault here, in the lane that made it.
  *(volatile uint32_t*)p = *(volatile uint32_t*)p;
  if (machine.pending_count == MAX_PENDING) deliver_any();
  PendingStore& store = machine.pending[machine.pending_count++];
  store.address = (char*)p;
  store.bytes = bytes;
  store.block = lane->warp->block->index;
  store.thread = lane->thread;
  store.met = 0;
  memcpy(store.value, value, bytes);
}

// If a store of `lane`, or of a thread it has met, is still on its way to p, `lane` must see it: it arrives now.
UNWATCHED inline void see_own_stores(const Lane* lane, const void* p, void* value, uint32_t bytes) {
  for (uint32_t i = machine.pending_count; i-- > 0;) {
    const PendingStore& store = machine.pending[i];
    if (!precedes(store, lane) || !overlap(store, p, bytes)) continue;
    deliver_overlapping(store.address, store.bytes);
    memcpy(value, p, bytes);
    return;
  }
}

}  // namespace emulator
