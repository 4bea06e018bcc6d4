// The forward of one pair by one warp, strip after strip.
#pragma once

// The row above the strip at the columns of a chunk.
DEVICE StoredState row_above(const StoredState* bound, const Strip& s, i32 column) {
  return s.index > 0 && column < s.m ? bound[column] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
}

struct alignas(64) ForwardShared {
  Window y;
  StoredState top[32], bottom[32];
};
// Strip `index`'s bottom row: saved, or in the pair's row of scratch, where a column is read 32 columns before it is written.
DEVICE StoredState* bottom_row(const Params& p, const Strip& s, i32 index) {
  return p.save ? saved_bound(p, s, index) : (StoredState*)(p.rows + s.pair * p.row_bytes);
}

DEVICE void forward_strip(const Params& p, const Strip& s, const Features& reference, ForwardShared& shared, bool& bad) {
  const i32 lane = (i32)lane_index();
  LaneSeries own;
  read_rows(own, p, s);
  const float scale = (float)p.scale;
  UNROLL for (int q = 0; q < LANE_ROWS; q++) bad |= out_of_range(own.x[q], reference, scale);
  const StoredState* above = bottom_row(p, s, s.index - 1);
  StoredState* below = bottom_row(p, s, s.index);
  Walker w = first_walker(s);
  const i32 end = s.is_last ? final_step(s) : -1, leaving = s.n - 1 - s.first_row;
  UNROLL_BY(1) for (i32 base = 0; base <= last_step(s); base += 32) {
    const Features entering = read_features(y_of(p, s), base + lane, s.m, p.d);
    bad |= out_of_range(entering, reference, scale);
    warp_barrier();
    put_features(shared.y, base + lane, entering);
    shared.top[lane] = row_above(above, s, base + lane);
    save_checkpoint(p, s, base / 32, w);
    warp_barrier();
    FeatureSteps steps{own, shared.y, base, shared.top, scale};
    steps.seek();
    auto walk_chunk = [&](auto last_strip) {
      walk<PAIR_STEPS>(w, 32, steps, [](int, const Terms&, real) {}, [&](i32 k) {
        // The row that leaves the strip: the bottom one for the next strip, or the pair's last for its result.
        if (decltype(last_strip)::value) {
          if (lane == leaving / LANE_ROWS) shared.bottom[k] = row_of(w, leaving % LANE_ROWS);
        } else {
          if (lane == 31) shared.bottom[k] = row_of(w, LANE_ROWS - 1);
        }
      });
    };
    if (s.is_last) walk_chunk(Yes{});
    else walk_chunk(No{});
    warp_barrier();
    const i32 column = base + lane - (STRIP_ROWS - 1);
    if (!s.is_last && column >= 0 && column < s.m) below[column] = shared.bottom[lane];
    if (end >= base && end < base + 32 && lane == 0) {
      const StoredState z = shared.bottom[end - base];
      ((result_type*)p.value)[s.pair] = (result_type)value_of(Scaled{z.f, z.n}, p.unscale);
      bad |= z.n >= 1 << 29;
    }
  }
}

static_assert(sizeof(ForwardShared) == FORWARD_SHARED, "config.py has another size of shared memory");
