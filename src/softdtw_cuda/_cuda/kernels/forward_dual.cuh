// The forward of a strip by a block: warp 0 walks a chunk of 32 steps while warps 1 to 4 make the entries of the next one.
#pragma once

#define FORWARD_THREADS (32 + 4 * 32)
struct alignas(16) ForwardShared {
  CostShared<32> making;
  Entry entries[2][32 * 32];
  Above top[32], bottom[32];
  u32 ticket;
};
static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "config_dual.py has another size of shared memory");

DEVICE void walk_forward(const Params& p, const Strip& s, ForwardShared& shared, i32 begin, i32 finish) {
  const i32 lane = (i32)lane_index();
  Word4* row = handoff_row(p, s.pair);
  SavedBound* bound = saved_bound(p, s, s.index);
  const i32 end = s.is_last ? final_step(s) : -1, last_lane = s.is_last ? s.n - 1 - s.first_row : 31;
  Walker w = first_walker(s);
  Above result = nothing_above();
  const u32 owner_in = (u32)(s.index - 1), owner_out = (u32)s.index;
  // The row above is loaded 32 columns before it is needed; only if it was not there yet is it polled.
  RowWord<STATE_PARTS> ahead{};
  bool wanted = false;
  auto load_ahead = [&](i32 base) {
    wanted = s.index > 0 && in_band(s, s.first_row - 1, base + lane);
    if (wanted) ahead = load_word<STATE_PARTS>(row, base + lane, owner_in);
  };
  load_ahead(begin * 32);
  block_barrier();
  for (i32 chunk = begin; chunk <= finish; chunk++) {
    const i32 base = chunk * 32;
    if (base % CHECKPOINT == 0) save_checkpoint(p, s, base / CHECKPOINT, w);
    if (wanted && !ahead.there) ahead = await_word<STATE_PARTS>(row, base + lane, owner_in, Waiter{"the row above", s.pair, s.index});
    shared.top[lane] = wanted ? unpack_state(ahead) : nothing_above();
    load_ahead(base + 32);
    warp_barrier();
    const Entry* entries = shared.entries[chunk & 1] + lane;
    UNROLL_BY(1) for (i32 half = 0; half < 32; half += 16) {
      UNROLL_BY(1) for (i32 first = half; first < half + 16; first += GROUP_STEPS) {
        Entry entry[GROUP_STEPS];
        Above top[GROUP_STEPS];
        UNROLL for (int k = 0; k < GROUP_STEPS; k++) {
          entry[k] = entries[(first + k) * 32];
          top[k] = shared.top[first + k];
        }
        UNROLL for (int k = 0; k < GROUP_STEPS; k++) {
          advance<true>(w, entry[k], top[k], [](const Shares&, real, real) {});
          if (lane == last_lane) shared.bottom[first + k] = Above{w.current, w.v, w.total};
        }
      }
      renormalize(w);
    }
    warp_barrier();
    const i32 column = base + lane - 31;
    if (!s.is_last && in_band(s, s.first_row + 31, column)) {
      const Above z = shared.bottom[lane];
      store_word(row, column, owner_out, pack_state(z));
      if (p.save) bound[column] = SavedBound{z.z.n, z.z.f, z.v};
    }
    if (end >= base && end < base + 32) result = shared.bottom[end - base];
    block_barrier();
  }
  if (!s.is_last || lane != 0) return;
  const result_type value = (result_type)value_of(result.z, p.unscale);
  ((result_type*)p.value)[s.pair] = value;
  // No path: nothing to sum. NaN stays NaN.
  ((result_type*)p.dot)[s.pair] = value - value == 0 ? (result_type)result.total : value != value ? value : (result_type)0;
}
DEVICE void forward_pass(const Params& p, ForwardShared& shared) {
  if (thread_index() == 0) shared.ticket = next_ticket(p);
  block_barrier();
  const Assignment mine = assignment_of(p, shared.ticket);
  const Strip s = strip_of(p, mine.pair, mine.position);
  if (!s.valid) {
    if (s.index == 0 && thread_index() == 0) {
      store_invalid_value(p, s.pair);
      ((result_type*)p.dot)[s.pair] = ((result_type*)p.value)[s.pair];
    }
    return;
  }
  if (!s.present) return;
  const i32 begin = first_checkpoint(s) * CHECKPOINT / 32, finish = last_step(s) / 32;
  if (warp_index() == 0) {
    walk_forward(p, s, shared, begin, finish);
    return;
  }
  const i32 thread = (i32)thread_index() - 32;
  for (i32 chunk = begin; chunk <= finish + 1; chunk++) {
    if (chunk <= finish) make_entries<32>(shared.entries[chunk & 1], shared.making, p, s, chunk * 32, 1, thread);
    block_barrier();
  }
}
