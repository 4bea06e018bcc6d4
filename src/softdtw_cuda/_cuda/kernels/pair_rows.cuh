// What kernels of whole pairs share: the rows between strips, which one warp writes and reads itself, and alignment weight.
#pragma once

static_assert(CHECKPOINT == 32, "a checkpoint for every chunk");

// Of a chunk's 32 steps: the row above the strip, and the row that leaves it.
struct PairRows { StoredState top[32], bottom[32]; };

// The row above the strip at a column of a chunk.
DEVICE StoredState row_above(const StoredState* bound, const Strip& s, i32 column) {
  return s.index > 0 && column < s.m ? bound[column] : StoredState{(real)EMPTY_FRACTION, (exponent)NO_PATH};
}
// Strip `index`'s bottom row: saved, or in the pair's row of scratch, where a column is read 32 columns before it is written.
DEVICE StoredState* bottom_row(const Params& p, const Strip& s, i32 index) {
  return p.save ? saved_bound(p, s, index) : (StoredState*)(p.rows + s.pair * p.row_bytes);
}
// Walks the 32 steps from `base` on, stores the row that leaves the strip at `below`, and the pair's value where it ends here.
template <int STEPS, class Inputs>
DEVICE void walk_forward_chunk(const Params& p, const Strip& s, Walker& w, i32 base, Inputs& steps, PairRows& rows, StoredState* below, bool& bad) {
  const i32 lane = (i32)lane_index();
  const i32 end = s.is_last ? final_step(s) : -1, leaving = s.n - 1 - s.first_row;
  steps.seek();
  auto walk_steps = [&](auto last_strip) {
    walk<STEPS>(w, 32, steps, [](int, const Terms&, real) {}, [&](i32 k) {
      // The row that leaves the strip: the bottom one for the next strip, or the pair's last for its result.
      if (decltype(last_strip)::value) {
        if (lane == leaving / LANE_ROWS) rows.bottom[k] = row_of(w, leaving % LANE_ROWS);
      } else {
        if (lane == 31) rows.bottom[k] = row_of(w, LANE_ROWS - 1);
      }
    });
  };
  if (s.is_last) walk_steps(Yes{});
  else walk_steps(No{});
  warp_barrier();
  const i32 column = base + lane - (STRIP_ROWS - 1);
  if (!s.is_last && column >= 0 && column < s.m) below[column] = rows.bottom[lane];
  if (end >= base && end < base + 32 && lane == 0) {
    const StoredState z = rows.bottom[end - base];
    ((result_type*)p.value)[s.pair] = (result_type)value_of(Scaled{z.f, z.n}, p.unscale);
    bad |= z.n >= 1 << 29;
  }
}

// What the rows' last cells of a backward pass on.
struct Outflow { float left[LANE_ROWS], diagonal[LANE_ROWS], pass[LANE_ROWS]; };
DEVICE void clear_weight(Outflow& out) { UNROLL for (int q = 0; q < LANE_ROWS; q++) out.left[q] = out.diagonal[q] = out.pass[q] = 0.0f; }
DEVICE bool has_weight(const Outflow& out) {
  bool some = false;
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    some |= !(out.left[q] < LEAST_WEIGHT && out.diagonal[q] < LEAST_WEIGHT && out.pass[q] < LEAST_WEIGHT);
  return some;
}
// Columns whose weight the strip below has stored: none at first.
struct Range { i32 first, last; };
// What the strip below passed up at the column of our last row, at step base + lane.
DEVICE float weight_from_below(const Strip& s, const float* row, const Range& received, i32 base) {
  const i32 column = base + (i32)lane_index() - (STRIP_ROWS - 1);
  float weight = 0.0f;
  if (!s.is_last && column >= received.first && column <= received.last) weight = row[column];
  return weight < LEAST_WEIGHT ? 0.0f : weight;
}
// The step at which a strip can first have weight.
DEVICE i32 first_weight(const Strip& s, const Range& received) {
  const i32 start = last_step(s);
  return !s.is_last && received.last + STRIP_ROWS - 1 < start ? received.last + STRIP_ROWS - 1 : start;
}

// These kernels take no tickets, but the wide rerun that follows them does.
DEVICE void prepare_rerun(const Params& p, i32 pair) {
  if (pair == 0 && lane_index() == 0) *p.other_tickets = ~0u;
}
