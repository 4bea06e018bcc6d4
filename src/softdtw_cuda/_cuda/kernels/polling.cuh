// Waiting for another block. Built with POLL_LIMIT (compile.py reads it from SOFTDTW_CUDA_POLL_LIMIT), a launch in which
// one wait has polled that often prints who waits for whom, and ends; without it a Poll is nothing.
#pragma once

#ifndef POLL_LIMIT
#define POLL_LIMIT 0
#endif

// A strip that waits, and what for.
struct Waiter { const char* what; i32 pair, strip; };

struct Poll {
  Waiter waiter;
  i32 awaited;  // the strip that is waited for, as a number in the order of the walk
  i32 place;    // which column, tile or count of strips
  u32 count;
  METHOD Poll(const Waiter& waiter, i32 awaited, i32 place) : waiter(waiter), awaited(awaited), place(place), count(0) {}
  METHOD void failed() {
    wait_a_little();
    if constexpr (POLL_LIMIT > 0)
      if (++count == (u32)POLL_LIMIT) stop_waiting(SOURCE_NAME, waiter.what, waiter.pair, waiter.strip, awaited, place);
  }
};
