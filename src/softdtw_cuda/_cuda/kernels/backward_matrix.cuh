// The backward of one cost matrix by one warp, from its last strip to its first.
//
// 32 steps at a time from right to left: they are recomputed, which leaves the shares (7) in shared memory, and (8) is swept
// through them in reverse. In shared memory a step of a lane's rows has one place: its costs make room for its shares, and
// these for its E, which is the gradient. What a strip passes up to the next goes through a row of floats in memory.
//
// Pruning is that of backward_pair.cuh. Every cell of the gradient is written, by zeros where nothing is visited.
#pragma once

// Numbers as wide as a lane's rows are in one half of their place or in the other: which, alternates along rows and columns so
// that neither meet in a bank.
struct ShareChunk {
  LaneShares step[32][33];
  METHOD LaneReals* at(i32 k, i32 lane) const {
    return (LaneReals*)&step[k][lane] + (((u32)(k ^ lane) >> (LANE_ROWS == 2 ? 3 : 4)) & 1u);
  }
};
struct alignas(64) BackwardShared {
  ShareChunk chunk;
  StoredState top[32];
  float passed_in[32], passed_out[32];
};

// Stores 32 steps of the gradient; rows(i) has this lane's step of lane i's rows.
template <class Rows> DEVICE void store_chunk(const Params& p, const Strip& s, i32 base, Rows rows) {
  UNROLL_BY(8) for (i32 i = 0; i < 32; i++) {
    const LaneReals e = rows(i);
    UNROLL for (int q = 0; q < LANE_ROWS; q++) {
      const i32 r = i * LANE_ROWS + q, row = s.first_row + r, column = base + (i32)lane_index() - r;
      if (row < s.n && column >= 0 && column < s.m)
        store_gradient(p.grad_x, ((i64)s.pair * p.n + row) * p.m + column, e.row[q], p.grad_x_wide);
    }
  }
}
DEVICE void store_no_weight(const Params& p, const Strip& s, i32 base) {
  store_chunk(p, s, base, [](i32) { return LaneReals{}; });
}

// Sweeps (8) through the 32 steps from `base` on, last step first. `end`: the step, if it is among these, at which the pair's
// last cell has its weight, `seed`.
DEVICE void sweep_chunk(Outflow& sweep, BackwardShared& shared, const Strip& s, i32 base, i32 end, float seed) {
  const i32 lane = (i32)lane_index();
  auto sweep_eight = [&](auto with_end, i32 first) {
    LaneShares shares[8];
    float in[8];
    UNROLL for (int k = 0; k < 8; k++) {
      shares[k] = shared.chunk.step[first + k][lane];
      in[k] = shared.passed_in[first + k];
    }
    UNROLL for (i32 k = 7; k >= 0; k--) {
      const LaneShares& share = shares[k];
      float passed = from_lane_below(sweep.pass[0]);
      if (lane == 31) passed = in[k];
      LaneReals e;
      // Rows in order: row q reads what row q + 1 passed in the step before, which must not be overwritten yet.
      UNROLL for (int q = 0; q < LANE_ROWS; q++) {
        e.row[q] = sweep.left[q] + (q + 1 < LANE_ROWS ? sweep.pass[q + 1 < LANE_ROWS ? q + 1 : q] : passed);
        if (decltype(with_end)::value && base + first + k == end && s.first_row + lane * LANE_ROWS + q == s.n - 1) e.row[q] = seed;
        const float up = float_of(bits_of(share.up[q]) & 0x7fffffffu);
        const float left = leave_left(e.row[q], up, share.diagonal[q]);
        sweep.left[q] = bits_of(share.up[q]) >> 31 ? 0.0f : left;
        pass_on(e.row[q], up, share.diagonal[q], sweep.pass[q], sweep.diagonal[q]);
      }
      *shared.chunk.at(first + k, lane) = e;
      if (lane == 0) shared.passed_out[first + k] = sweep.pass[0];
    }
  };
  UNROLL_BY(1) for (i32 first = 24; first >= 0; first -= 8) {
    if (end >= base + first && end < base + first + 8) sweep_eight(Yes{}, first);
    else sweep_eight(No{}, first);
  }
}

// Returns the columns at which the strip passes weight up.
DEVICE Range backward_strip(const Params& p, const Strip& s, const Range& received, float seed, float factor,
                            BackwardShared& shared) {
  const i32 lane = (i32)lane_index();
  const StoredState* bound = saved_bound(p, s, s.index - 1);
  float* row = (float*)(p.rows + s.pair * p.row_bytes);
  const CostScale scale = cost_scale(p, s);
  auto scaled = [&](float cost) { return scaled_by(scale, cost); };
  Outflow sweep;
  clear_weight(sweep);
  const i32 end = s.is_last ? final_step(s) : -1, start = first_weight(s, received) / 32 * 32;
  Range passed{s.m, -1};
  i32 base = last_step(s) / 32 * 32;
  for (; base > start; base -= 32) store_no_weight(p, s, base);
  HalfStep next = fetch_half(p, s, base, 0);
  i32 fetched = base;
  UNROLL_BY(1) for (; base >= 0; base -= 32) {
    const float from_below = weight_from_below(s, row, received, base);
    const bool at_end = end >= base && end < base + 32;
    if (!at_end && !any_lane(from_below != 0.0f || has_weight(sweep))) {
      clear_weight(sweep);
      if (s.is_last ? base < end : base - STRIP_ROWS < received.first) break;
      store_no_weight(p, s, base);
      if (s.index > 0 && base + lane < s.m) row[base + lane] = 0.0f;
      passed.first = base;
      continue;
    }
    if (fetched != base) next = fetch_half(p, s, base, 0);
    const HalfStep rest = fetch_half(p, s, base, 1);
    warp_barrier();
    put_half(shared.chunk, next, 0, scaled);
    put_half(shared.chunk, rest, 1, scaled);
    shared.passed_in[lane] = from_below;
    shared.top[lane] = row_above(bound, s, base + lane);
    Walker w = load_checkpoint(p, s, base / 32);
    warp_barrier();
    if (base > 0) {
      fetched = base - 32;
      next = fetch_half(p, s, fetched, 0);
    }
    LaneShares rows;
    SkewedSteps<ShareChunk> steps{shared.chunk, shared.top};
    walk<8>(w, 32, steps,
            [&](int q, const Terms& t, real sum) {
              const Shares share = shares_of(t, sum);
              // A share is not negative: the sign says that nothing goes left.
              rows.up[q] = share.left == 0.0f ? -share.up : share.up;
              rows.diagonal[q] = share.diagonal;
            },
            [&](i32 k) { shared.chunk.step[k][lane] = rows; });
    sweep_chunk(sweep, shared, s, base, end, seed);
    warp_barrier();
    store_chunk(p, s, base, [&](i32 i) {
      LaneReals e = *shared.chunk.at(lane, i);
      // At most 2^-66 leaks through forbidden cells, far below the last bit of anything: exactly zero.
      UNROLL for (int q = 0; q < LANE_ROWS; q++) e.row[q] = !(e.row[q] < 1.0e-19f) ? e.row[q] * factor : 0.0f;
      return e;
    });
    const i32 column = base + lane;
    if (s.index > 0 && column < s.m) row[column] = shared.passed_out[lane];
    const u32 some = lanes_where(column < s.m && !(shared.passed_out[lane] < LEAST_WEIGHT));
    if (some && passed.last < 0) passed.last = base + highest_bit(some);
    passed.first = base;
  }
  for (; base >= 0; base -= 32) store_no_weight(p, s, base);
  return passed;
}

static_assert(sizeof(BackwardShared) == BACKWARD_SHARED, "kernel.py has another size of shared memory");
