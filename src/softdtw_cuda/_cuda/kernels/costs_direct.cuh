// Costs of a tile by differences, D <= DIMS: every digit of nearly equal series is kept. For the interface see tiled.cu.
#pragma once

struct Normalization { float nothing; };
template <int THREADS> DEVICE void make_normalization(Normalization&, const Params&, const Strip&) {}

// y of a tile on its way to shared memory.
#define DIRECT_PER_THREAD ((32 * DIMS + GROUP - 1) / GROUP)
struct DirectRows { element v[DIRECT_PER_THREAD]; };
DEVICE DirectRows fetch_direct(const Features& f, i32 tile, i32 thread) {
  DirectRows block;
  UNROLL for (int i = 0; i < DIRECT_PER_THREAD; i++) {
    i32 index = thread + i * GROUP, row = tile * 32 + index / DIMS, k = index % DIMS;
    block.v[i] = f.rows[(i64)(row < f.count ? row : f.count - 1) * f.d + (k < f.d ? k : f.d - 1)];
  }
  return block;
}
DEVICE void stage_direct(float (*rows)[DIMS], const DirectRows& block, const Features& f, i32 thread) {
  UNROLL for (int i = 0; i < DIRECT_PER_THREAD; i++) {
    i32 index = thread + i * GROUP, k = index % DIMS;
    rows[index / DIMS][k] = k < f.d ? to_float(block.v[i]) : 0.0f;
  }
}

struct CostShared { float y[32][DIMS]; };
struct CostMaker {
  float x[LANE_ROWS][DIMS];   // rows lane, lane + 32
  DirectRows next;            // y of the next tile
  u32 barrier;                // of the group
  bool bad;
};

DEVICE CostMaker open_costs(const Params& p, const Strip& s, const Normalization&, u32 barrier, i32 first, i32 thread) {
  CostMaker maker;
  maker.barrier = barrier;
  maker.bad = false;
  Features x = features_x(p, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) maker.x[q][k] = feature(x, s.first_row + (thread & 31) + q * 32, k);
  maker.next = fetch_direct(features_y(p, s), first, thread);
  return maker;
}

DEVICE void make_costs(CostMaker& maker, const Params& p, const Strip& s, const Normalization&, CostShared& shared, Step* ring,
                       i32 chunks, i32 tile, i32 following, i32 thread) {
  const i32 start = ring_start(tile, chunks);
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5);
  Features y = features_y(p, s);
  stage_direct(shared.y, maker.next, y, thread);
  if (following >= 0) maker.next = fetch_direct(y, following, thread);
  group_barrier(maker.barrier, GROUP);
  const float scale = (float)p.scale;
  UNROLL_BY(2) for (int c = 0; c < 8; c++) {
    i32 column = warp * 8 + c;
    float sum[LANE_ROWS], lost[LANE_ROWS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) sum[q] = lost[q] = 0.0f;
    UNROLL for (int k = 0; k < DIMS; k++) {
      float v = shared.y[column][k];
      UNROLL for (int q = 0; q < LANE_ROWS; q++) {
        float difference = maker.x[q][k] - v;
        if constexpr (DIMS > 4) {
          // Kahan's sum: the last bits of a distance decide between nearly equal paths.
          float term = multiply_add(difference, difference, -lost[q]);
          float total = sum[q] + term;
          lost[q] = (total - sum[q]) - term;
          sum[q] = total;
        } else {
          sum[q] = multiply_add(difference, difference, sum[q]);
        }
      }
    }
    UNROLL for (int q = 0; q < LANE_ROWS; q++)
      put_cost(ring, start, chunks, s, lane + q * 32, column, tile, sum[q] * scale, maker.bad);
  }
}
