// The forward of a strip by a block: in the slot of chunk c warp 0 walks c, and warps 1 to 4 make the costs of tile c + 1.
#pragma once

struct alignas(16) ForwardShared {
  alignas(16) Step costs[FORWARD_CHUNKS * 32];
  Normalization normalization;
  CostShared making;
  StoredState top[32], bottom[32];
  Strip strip;
  u32 ticket;
};
static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "kernel.py has another size of shared memory");

#define FORWARD_THREADS (32 * 5)
DEVICE void walk_forward(const Params& p, const Strip& s, ForwardShared& shared, i32 begin, i32 finish) {
  ForwardWalk f = open_forward(p, s);
  load_row_above(f, s, begin * 32);
  block_barrier();
  for (i32 chunk = begin; chunk <= finish; chunk++) {
    if (chunk % CHUNKS_PER_CHECKPOINT == 0) save_checkpoint(p, s, chunk / CHUNKS_PER_CHECKPOINT, f.walker);
    walk_chunk(f, p, s, chunk * 32, shared.top, shared.bottom, TileSteps{shared.costs + ring_start(chunk, FORWARD_CHUNKS), shared.top});
    block_barrier();
  }
  store_value(f, p, s);
}
DEVICE void make_forward_costs(const Params& p, const Strip& s, ForwardShared& shared, i32 begin, i32 finish, i32 tiles_end, u32 barrier,
                               i32 thread) {
  CostMaker maker = open_costs(p, s, shared.normalization, barrier, begin, thread);
  for (i32 chunk = begin - 1; chunk <= finish; chunk++) {
    const i32 tile = chunk + 1;
    if (tile <= tiles_end)
      make_costs(maker, p, s, shared.normalization, shared.making, shared.costs, FORWARD_CHUNKS, tile, tile < tiles_end ? tile + 1 : -1,
                 FORWARD_COST_ADDRESSES_RECOMPUTED ? opaque(thread) : thread);
    block_barrier();
  }
  if (maker.bad) flag_out_of_range(p, s.pair);
}

// By all THREADS threads of a block, of which the first FORWARD_THREADS work. ALONE: every pair is one strip, and the
// block's is the pair of its own number.
template <int THREADS, bool ALONE> DEVICE void forward_pass(const Params& p, ForwardShared& shared) {
  if (ALONE) open_pair<THREADS>(p);
  else if (thread_index() == 0) shared.ticket = next_ticket(p);
  fill_ring<THREADS>(&shared.costs[0][0], FORWARD_CHUNKS * 32 * STEP_STRIDE, BLANK_COST);
  block_barrier();
  const Assignment mine = ALONE ? Assignment{(i32)block_index(), 0} : assignment_of(p, shared.ticket);
  const Strip s = strip_of(p, mine.pair, mine.position);
  if (!s.valid) {
    if (s.index == 0 && thread_index() == 0) store_invalid_value(p, s.pair);
    return;
  }
  if (!s.present) return;
  if (!FORWARD_COSTS_COPY_STRIP && thread_index() == 0) shared.strip = s;  // make_normalization has barriers then
  make_normalization<THREADS>(shared.normalization, p, s);
  const i32 warp = (i32)warp_index(), begin = first_chunk(s), finish = last_step(s) / 32, tiles_end = last_tile(s);
  if (THREADS > FORWARD_THREADS && warp >= FORWARD_THREADS / 32) {
    for (i32 chunk = begin - 1; chunk <= finish; chunk++) block_barrier();
  } else if (warp > 0) {
    make_forward_costs(p, FORWARD_COSTS_COPY_STRIP ? s : shared.strip, shared, begin, finish, tiles_end, ALONE ? FORWARD_COST_BARRIER : COST_BARRIER, (i32)thread_index() - 32);
  } else {
    walk_forward(p, s, shared, begin, finish);
  }
}
