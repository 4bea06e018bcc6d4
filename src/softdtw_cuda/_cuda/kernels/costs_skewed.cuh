// Costs of a matrix for one warp that walks a whole pair: 32 steps of all rows at a time.
//
// Row r of the strip is at columns base - r to base - r + 31 in these steps: 32 neighbours in memory, one for each lane, which
// is also the number of the step. So a lane reads one step of all rows, and what it reads of a lane's rows goes to shared
// memory in one access. Cells outside the matrix repeat the nearest, though no path goes through them.
#pragma once

// One step of half of the rows on its way to shared memory: as many registers as there are to spare.
struct HalfStep { element v[16 * LANE_ROWS]; };
DEVICE HalfStep fetch_half(const Params& p, const Strip& s, i32 base, i32 half) {
  const i32 first = opaque(s.first_row + half * (STRIP_ROWS / 2));  // else the address of every row is kept in registers
  const i64 last = s.n - 1;
  const element* row = (const element*)p.x + s.pair * p.x_stride + (first < last ? first : last) * p.m;
  HalfStep next;
  UNROLL for (int r = 0; r < STRIP_ROWS / 2; r++) {
    const i32 column = base + (i32)lane_index() - half * (STRIP_ROWS / 2) - r;
    next.v[r] = row[column < 0 ? 0 : column < s.m ? column : s.m - 1];
    if (first + r < last) row += p.m;
  }
  return next;
}
// Puts it where the walk finds it, each cost as `scaled` makes it.
template <class Chunk, class Scale> DEVICE void put_half(Chunk& chunk, const HalfStep& next, i32 half, Scale scaled) {
  UNROLL for (int i = 0; i < 16; i++) {
    LaneReals rows;
    UNROLL for (int q = 0; q < LANE_ROWS; q++) rows.row[q] = scaled(to_float(next.v[i * LANE_ROWS + q]));
    *chunk.at((i32)lane_index(), half * 16 + i) = rows;
  }
}

// log2(e) / gamma in two floats: the product with a cost is rounded once, or nearly so.
struct CostScale {
  float high, low;
  float least;  // of the scaled costs: keeps a path of negative ones from running away
};
DEVICE CostScale cost_scale(const Params& p, const Strip& s) {
  const float high = (float)p.scale;
  return CostScale{high, (float)(p.scale - (double)high), -268435456.0f / (float)(s.n + s.m)};
}
// Infinite costs become infinite or NaN, both of which forbid their cells.
DEVICE float scaled_by(const CostScale& scale, float cost) { return multiply_add(cost, scale.high, cost * scale.low); }
// In the forward, which flags pairs beyond the range.
DEVICE float checked_cost(const CostScale& scale, float cost, bool& bad) {
  const float v = scaled_by(scale, cost);
  const bool wrong = !(v < FORBIDDEN_FROM && v > scale.least) && !(cost > 3.4028235e38f);
  bad |= wrong;
  return wrong ? 0.0f : v;
}

// What the walker needs; see walk(). `Chunk` says where in shared memory a step of a lane's rows is.
template <class Chunk> struct SkewedSteps {
  const Chunk& chunk;
  const StoredState* above;
  struct Group { LaneReals cost[8]; StoredState top[8]; };
  METHOD void seek() {}
  METHOD Group read(i32 first) const {
    Group ahead;
    UNROLL for (int k = 0; k < 8; k++) ahead.cost[k] = *chunk.at(first + k, (i32)lane_index());
    UNROLL for (int k = 0; k < 8; k++) ahead.top[k] = above[first + k];
    return ahead;
  }
  METHOD void costs(real (&cost)[LANE_ROWS], const Group& group, i32, i32 k) const {
    UNROLL for (int q = 0; q < LANE_ROWS; q++) cost[q] = group.cost[k].row[q];
  }
  METHOD const StoredState& top(const Group& group, i32, i32 k) const { return group.top[k]; }
};
