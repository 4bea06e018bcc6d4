// Costs of a tile from a given matrix. For the interface see tiled.cu.
#pragma once

struct Normalization { float nothing; };
template <int THREADS> DEVICE void make_normalization(Normalization&, const Params&, const Strip&) {}

struct CostShared { float nothing; };
struct CostMaker {
  element next[STRIP_ROWS / 4];  // costs of the next tile: rows warp, warp + 4, ...
  u32 barrier;                   // of the group
  bool bad;
};

// Each thread reads one column of every fourth row, from the nearest cell there is.
DEVICE void fetch_costs(element (&next)[STRIP_ROWS / 4], const Params& p, const Strip& s, i32 tile, i32 thread) {
  const element* cost = (const element*)p.x + s.pair * p.x_stride;
  const i32 column = tile * 32 + (thread & 31);
  const element* at = cost + (column < s.m ? column : s.m - 1);
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) {
    i32 row = s.first_row + (thread >> 5) + i * 4;
    next[i] = at[(i64)(row < s.n ? row : s.n - 1) * p.m];
  }
}

DEVICE CostMaker open_costs(const Params& p, const Strip& s, const Normalization&, u32 barrier, i32 first, i32 thread) {
  CostMaker maker;
  maker.barrier = barrier;
  maker.bad = false;
  fetch_costs(maker.next, p, s, first, thread);
  return maker;
}

DEVICE void make_costs(CostMaker& maker, const Params& p, const Strip& s, const Normalization&, CostShared&, Step* ring, i32 chunks,
                       i32 tile, i32 following, i32 thread) {
  const i32 start = ring_start(tile, chunks);
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5);
  const float least = -268435456.0f / (float)(s.n + s.m);  // keeps a path of negative costs from running away
  float costs[STRIP_ROWS / 4];
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) costs[i] = to_float(maker.next[i]);
  if (following >= 0) fetch_costs(maker.next, p, s, following, thread);
  UNROLL for (int i = 0; i < STRIP_ROWS / 4; i++) {
    i32 r = warp + i * 4, row = s.first_row + r;
    float v = 2.0f * FORBIDDEN_FROM;
    if (row < s.n && in_band(s, row, tile * 32 + lane)) {
      v = (float)((double)costs[i] * p.scale);
      bool infinite = costs[i] > 3.4028235e38f;
      maker.bad |= !infinite && !(v < FORBIDDEN_FROM && v > least);
      if (!(v > -FORBIDDEN_FROM)) v = 0.0f;
    }
    ring[ring_step(start, lane + r, chunks)][r] = v;
  }
}
