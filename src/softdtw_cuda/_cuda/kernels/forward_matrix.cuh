// The forward of one cost matrix by one warp, strip after strip.
#pragma once

// One number more to a row than there are lanes, so that neither rows nor columns meet in a bank.
struct CostChunk {
  LaneReals step[32][33];
  METHOD LaneReals* at(i32 k, i32 lane) { return &step[k][lane]; }
  METHOD const LaneReals* at(i32 k, i32 lane) const { return &step[k][lane]; }
};
struct alignas(64) ForwardShared {
  CostChunk costs;
  PairRows rows;
};

DEVICE void forward_strip(const Params& p, const Strip& s, ForwardShared& shared, bool& bad) {
  const i32 lane = (i32)lane_index();
  const CostScale scale = cost_scale(p, s);
  const StoredState* above = bottom_row(p, s, s.index - 1);
  StoredState* below = bottom_row(p, s, s.index);
  Walker w = first_walker(s);
  HalfStep next = fetch_half(p, s, 0, 0);
  auto checked = [&](float cost) { return checked_cost(scale, cost, bad); };
  UNROLL_BY(1) for (i32 base = 0; base <= last_step(s); base += 32) {
    warp_barrier();
    put_half(shared.costs, next, 0, checked);
    put_half(shared.costs, fetch_half(p, s, base, 1), 1, checked);
    shared.rows.top[lane] = row_above(above, s, base + lane);
    save_checkpoint(p, s, base / 32, w);
    warp_barrier();
    next = fetch_half(p, s, base + 32, 0);  // beyond the last step too, where nothing reads it
    SkewedSteps<CostChunk> steps{shared.costs, shared.rows.top};
    walk_forward_chunk<8>(p, s, w, base, steps, shared.rows, below, bad);
  }
}

static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "kernel.py has another size of shared memory");
