// The forward of one pair by one warp, strip after strip.
#pragma once

struct alignas(64) ForwardShared {
  Window y;
  PairRows rows;
};

DEVICE void forward_strip(const Params& p, const Strip& s, const Point& reference, ForwardShared& shared, bool& bad) {
  const i32 lane = (i32)lane_index();
  LaneSeries own;
  read_rows(own, p, s);
  const float scale = (float)p.scale;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) bad |= out_of_range(own.x[q], reference, scale);
  const StoredState* above = bottom_row(p, s, s.index - 1);
  StoredState* below = bottom_row(p, s, s.index);
  Walker w = first_walker(s);
  UNROLL_BY(1) for (i32 base = 0; base <= last_step(s); base += 32) {
    const Point entering = read_features(y_of(p, s), base + lane, s.m, p.d);
    bad |= out_of_range(entering, reference, scale);
    warp_barrier();
    put_features(shared.y, base + lane, entering);
    shared.rows.top[lane] = row_above(above, s, base + lane);
    save_checkpoint(p, s, base / 32, w);
    warp_barrier();
    FeatureSteps steps{own, shared.y, base, shared.rows.top, scale};
    walk_forward_chunk<PAIR_STEPS>(p, s, w, base, steps, shared.rows, below, bad);
  }
}

static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "kernel.py has another size of shared memory");
