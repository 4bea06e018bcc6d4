// What a strip of the backward publishes for the strips above it, to prune where E has no weight.
//
// E, the alignment weight, is next to nothing but for a neighbourhood of the likely paths. A strip leaves the rest out,
// and publishes by two words behind the pair's hand-off row where its active region begins and where it has ended.
// backward_tiled.cuh and backward_univariate.cuh say what that means to each of them. What comes in from the strip below
// counts from LEAST_WEIGHT on, and is nothing below that. Narrow kernels only.
#pragma once

#define LEAST_WEIGHT 8.8817842e-16f  // 2^-50 of the whole; more than what leaks through forbidden cells
#define NOWHERE (-1)

DEVICE void publish_begin(const Params& p, const HandoffRow& row, i32 walk_index, i32 where) {
  store_word(row, p.m + walk_index, pack((u32)where, 0u, (u32)walk_index));
}
DEVICE i32 await_begin(const Params& p, const Strip& s, const HandoffRow& row, i32 walk_index) {
  return (i32)await_word(row, p.m + walk_index, (u32)walk_index, Waiter{"where a strip below begins", s.pair, s.index}).a;
}
// All ones, NOWHERE, until its strip releases it.
DEVICE u32* end_of(const Params& p, const HandoffRow& row, i32 walk_index) { return (u32*)(row.first + p.m + p.strips + walk_index); }
// For a reader that reads nothing else on the strength of it.
DEVICE i32 peek_end(const u32* end) { return (i32)load_relaxed((const Word2*)end).a; }

// What the strip below passes up at a column: nothing if it has ended before.
struct Received { Flow flow; bool there; };
DEVICE Received await_flow(const Strip& s, const HandoffRow& row, i32 column, u32 owner, const u32* end) {
  Poll poll(Waiter{"what the strip below passes up", s.pair, s.index}, (i32)owner, column);
  for (;;) {
    RowWord w = load_word(row, column);
    if (!is_from(w, owner) && load_acquire(end) != ~0u) {
      w = load_word(row, column);
      if (!is_from(w, owner)) return Received{Flow{0, 0}, false};
    }
    if (is_from(w, owner)) return Received{unpack_flow(w), true};
    poll.failed();
  }
}
