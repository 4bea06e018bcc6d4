// Gradients by differences, D <= DIMS. For the interface see tiled.cu.
#pragma once

struct GradShared {
  float x[STRIP_ROWS][DIMS];
  float y[32][DIMS];
  float part[4][STRIP_ROWS][DIMS + 1];  // each warp's sums of gX
};
struct ClosingShared {};
#define CLOSES_GRAD_X true

// ---- gX
struct GradX {
  float sum[LANE_ROWS][DIMS], x[LANE_ROWS][DIMS];
  DirectRows next;  // y of the next tile
};
DEVICE void prefetch_tile(GradX& maker, const Params& p, const Strip& s, const Normalization&, i32 tile, i32 thread) {
  maker.next = fetch_direct(features_y(p, s), tile, thread);
}
DEVICE GradX open_grad_x(const Params& p, const Strip& s, const Normalization& normalization, GradShared& shared, i32 first, i32 thread) {
  GradX maker;
  prefetch_tile(maker, p, s, normalization, first, thread);
  Features x = features_x(p, s);
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) {
      maker.sum[q][k] = 0.0f;
      maker.x[q][k] = feature(x, s.first_row + (thread & 31) + q * 32, k);
    }
  for (i32 i = thread; i < STRIP_ROWS * DIMS; i += GROUP) shared.x[i / DIMS][i % DIMS] = feature(x, s.first_row + i / DIMS, i % DIMS);
  return maker;
}
DEVICE void make_grad_x(GradX& maker, const Params& p, const Strip& s, const Normalization&, GradShared& shared, const Step* ring, i32 tile,
                        bool, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  Features y = features_y(p, s);
  stage_direct(shared.y, maker.next, y, thread);
  if (tile > first_tile(s)) maker.next = fetch_direct(y, tile - 1, thread);
  gradients_barrier();
  if (!p.grad_x) return;
  UNROLL_BY(2) for (int c = 0; c < 8; c++) {
    i32 column = warp * 8 + c;
    float e[LANE_ROWS];
    UNROLL for (int q = 0; q < LANE_ROWS; q++) e[q] = align_at(ring, start, lane + q * 32, column);
    UNROLL for (int k = 0; k < DIMS; k++) {
      float y = shared.y[column][k];
      UNROLL for (int q = 0; q < LANE_ROWS; q++) maker.sum[q][k] += e[q] * (maker.x[q][k] - y);
    }
  }
}
// Leaves the group's sums in shared memory, for the whole block to close the strip.
DEVICE void leave_sums(GradX& maker, GradShared& shared, ClosingShared&, i32 thread) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5);
  UNROLL for (int q = 0; q < LANE_ROWS; q++)
    UNROLL for (int k = 0; k < DIMS; k++) shared.part[warp][lane + q * 32][k] = maker.sum[q][k];
}
// gX of the strip from its sums, by all THREADS threads of a block.
template <int THREADS>
DEVICE void close_grad_x(const Params& p, const Strip& s, const Normalization&, const GradShared& shared, const ClosingShared&) {
  const float factor = gradient_of_value(p, s.pair);
  for (i32 i = (i32)thread_index_opaque(); i < STRIP_ROWS * DIMS; i += THREADS) {
    i32 r = i / DIMS, k = i % DIMS;
    float sum = (shared.part[0][r][k] + shared.part[1][r][k]) + (shared.part[2][r][k] + shared.part[3][r][k]);
    if (s.first_row + r < s.n && k < p.d)
      store_gradient(p.grad_x, ((i64)s.pair * p.n + s.first_row + r) * p.d + k, 2.0f * factor * sum, p.grad_x_wide);
  }
}

// ---- gY
#define FEATURES_PER_WARP (DIMS / 4)
struct GradY {};
DEVICE GradY open_grad_y(const Params&, const Strip&, i32) { return GradY{}; }
DEVICE void make_grad_y(GradY&, const Params& p, const Strip& s, const GradYOrder& order, const Normalization&, GradShared& shared,
                        const Step* ring, i32 tile, float factor, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
  const i32 columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32, first_feature = warp * FEATURES_PER_WARP;
  const i64 at = ((i64)s.pair * p.m + tile * 32 + (lane < columns ? lane : columns - 1)) * p.d;
  float old[FEATURES_PER_WARP], own[FEATURES_PER_WARP], sum[FEATURES_PER_WARP];
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) old[i] = sum[i] = 0.0f;
  if (p.grad_y && must_read(order))
    UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++)
      old[i] = load_fresh((const float*)p.sum_y + at + (first_feature + i < p.d ? first_feature + i : p.d - 1));
  gradients_barrier();
  if (!p.grad_y) return;
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) own[i] = shared.y[lane][first_feature + i];
  UNROLL_BY(8) for (int r = STRIP_ROWS - 1; r >= 0; r--) {
    float e = align_at(ring, start, r, lane);
    UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++) sum[i] += e * (own[i] - shared.x[r][first_feature + i]);
  }
  UNROLL for (int i = 0; i < FEATURES_PER_WARP; i++)
    if (first_feature + i < p.d && lane < columns) {
      const float part = 2.0f * factor * sum[i];
      float* total = (float*)p.sum_y + at + first_feature + i;
      if (INPUT != FLOAT32 && order.last) store_gradient(p.grad_y, at + first_feature + i, old[i] + part, p.grad_y_wide);
      else if (order.first) *total = as_added(part);
      else add_to(total, part);
    }
}
