// Gradients on tensor cores, gX = E Y and gY = E' X: what whole rows and slices of features have in common.
#pragma once

#define GX_TILES ((DIMS / 8) / WARPS_PER_ROW_TILE)  // 8 features each, per warp
#define GX_TILES_AT_A_TIME 2  // more than these there are no registers for beside the sums
#define GY_TILES (DIMS < 64 ? DIMS / 16 : 4)     // and at a time, of which there are GY_PASSES
#define GY_PASSES (DIMS / 16 / GY_TILES)
#define CLOSES_GRAD_X true

// A thread's place in a group for gX: 16 rows of the strip, and some tiles of features.
struct GradXPlace {
  i32 start, lane, warp, g, t, matrix, row_tile, first_tile_of_warp;
  METHOD GradXPlace(i32 tile, i32 thread) {
    start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
    g = lane >> 2, t = lane & 3, matrix = lane >> 3;
    row_tile = (warp % ROW_TILES) * 16, first_tile_of_warp = warp / ROW_TILES * GX_TILES;
  }
};
// 16 columns of the strip's rows of E as a fragment of A, added to the sums of rows.
DEVICE void read_align_rows(u32 (&e)[ALIGN_PLANES][4], float (&row_sum)[2], const Step* ring, const GradXPlace& at, i32 first_column) {
  const i32 lane = GRAD_X_PLANE_BY_PLANE ? (i32)(thread_index_opaque() & 31u) : at.lane, g = lane >> 2, t = lane & 3;
  UNROLL for (int r = 0; r < 4; r++) {
    i32 row = at.row_tile + g + (r & 1) * 8, column = first_column + 2 * t + (r >> 1) * 8;
    float a = align_at(ring, at.start, row, column), b = align_at(ring, at.start, row, column + 1);
    row_sum[r & 1] += a + b;
    u32 planes[ALIGN_PLANES];
    split(planes, a, b);
    UNROLL for (int plane = 0; plane < ALIGN_PLANES; plane++) e[plane][r] = planes[plane];
  }
}
// k runs over columns, so y's planes are read transposed.
DEVICE void read_y_plane(u32 (&b)[4], const PlaneRow* y_planes, const GradXPlace& at, int plane, i32 k_step, int first) {
  load_matrices_transposed(b, &y_planes[plane * 32 + k_step * 16 + (at.matrix & 1) * 8 + (at.lane & 7)]
                                       [(at.first_tile_of_warp + first + (at.matrix >> 1)) * 8]);
}
DEVICE void read_y(u32 (&b)[PLANES][GX_TILES_AT_A_TIME / 2][4], const PlaneRow* y_planes, const GradXPlace& at, i32 k_step, int first) {
  UNROLL for (int plane = 0; plane < PLANES; plane++)
    UNROLL for (int pair = 0; pair < GX_TILES_AT_A_TIME / 2; pair++) read_y_plane(b[plane][pair], y_planes, at, plane, k_step, first + pair * 2);
}
// Each row's sum of E, left in shared memory.
DEVICE void leave_row_sums(float (&row_sum)[2], float* sums, i32 thread) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5), g = lane >> 2, t = lane & 3, row_tile = (warp % ROW_TILES) * 16;
  UNROLL for (int h = 0; h < 2; h++) {
    row_sum[h] += from_lane_xor(row_sum[h], 1);
    row_sum[h] += from_lane_xor(row_sum[h], 2);
  }
  if (t == 0 && warp < ROW_TILES)  // with fewer tiles than warps two have the same rows
    UNROLL for (int h = 0; h < 2; h++) sums[row_tile + g + h * 8] = row_sum[h];
}
// gX of the strip, by all THREADS threads of a block: product(row, k, at) is the strip's sum of E y, of which element `at` of
// grad_x is made, centre(k) what was subtracted from the features. A warp has eight rows, and 32 neighbouring features at a
// time.
template <int THREADS, class Product, class Centre>
DEVICE void close_rows(const Params& p, const Strip& s, const Normalization& normalization, const float* row_sums, Product product_at,
                       Centre centre_at_feature) {
  const float factor = gradient_of_value(p, s.pair);
  constexpr i32 EIGHTS = STRIP_ROWS / 8;
  const i32 own = (i32)thread_index_opaque(), lane = own & 31, warp = own >> 5, first = warp % EIGHTS * 8;
  const i32 count = s.n - s.first_row - first;  // of the eight, those that there are
  if (count <= 0) return;
  Features x = features_x(p, s);
  const float unscale = unscale_of(normalization);
  const i64 start = ((i64)s.pair * p.n + s.first_row + first) * p.d;
  const element* from = x.rows + (i64)(s.first_row + first) * p.d;
  UNROLL_BY(1) for (i32 k = warp / EIGHTS * 32 + lane; k < p.d; k += THREADS / EIGHTS) {
    element v[8];
    float product[8];
    UNROLL for (int i = 0; i < 8; i++) {
      const i32 offset = (i < count ? i : count - 1) * p.d + k;
      v[i] = from[offset];
      product[i] = product_at(first + i, k, start + offset);
    }
    const float centre = centre_at_feature(x, k);
    UNROLL for (int i = 0; i < 8; i++)
      if (i < count)
        store_gradient(p.grad_x, start + i * p.d + k,
                       2.0f * factor * ((to_float(v[i]) - centre) * row_sums[first + i] - product[i] * unscale), p.grad_x_wide);
  }
}

// Puts two neighbours of a sum of gradients into memory or adds them there, as many as are `left` in their row.
DEVICE void put_sum(float* at, i32 left, bool first, Float2 v) {
  if constexpr (FIT != ANY_ROWS) {
    if (FIT != WHOLE_SLICES && left < 2) return;
    if (first) *(Float2*)at = Float2{as_added(v.a), as_added(v.b)};
    else add_to((Float2*)at, v);
  } else {
    if (left >= 1) { if (first) at[0] = as_added(v.a); else add_to(at, v.a); }
    if (left >= 2) { if (first) at[1] = as_added(v.b); else add_to(at + 1, v.b); }
  }
}

// ---- gY
// Two neighbours of gY, as many of them as there are.
DEVICE Float2 get_gy(const Params& p, i64 at, i32 left) {
  const float* from = (const float*)p.sum_y + at;
  if (GY_PASSES > 1 && left < 1) return Float2{0.0f, 0.0f};  // a warp ahead may be writing there already
  if constexpr (FIT == WHOLE_SLICES) return load_fresh((const Float2*)from);
  else if constexpr (FIT == WHOLE_QUADS) return load_fresh((const Float2*)(left >= 2 ? from : from + left - 2));
  // Past the last feature, that one again: it is this strip's turn to read it.
  else return Float2{load_fresh(left >= 1 ? from : from + left - 1), load_fresh(left >= 2 ? from + 1 : from + left - 1)};
}
DEVICE void put_gy(const Params& p, const GradYOrder& order, i64 at, i32 left, Float2 v) {
  if (INPUT != FLOAT32 && order.last) {
    if (FIT == WHOLE_SLICES || left >= 1) store_gradient(p.grad_y, at, v.a, p.grad_y_wide);
    if (FIT == WHOLE_SLICES || left >= 2) store_gradient(p.grad_y, at + 1, v.b, p.grad_y_wide);
  } else {
    put_sum((float*)p.sum_y + at, left, order.first, v);  // of float32, sum_y is grad_y
  }
}

// A thread's place in a group for gY: 16 columns of the tile, and some tiles of features.
struct GradYPlace {
  i32 start, lane, warp, g, t, matrix, columns, column_tile;
  METHOD GradYPlace(const Strip& s, i32 tile, i32 thread) {
    start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, warp = (i32)((u32)thread >> 5);
    g = lane >> 2, t = lane & 3, matrix = lane >> 3;
    columns = s.m - tile * 32 < 32 ? s.m - tile * 32 : 32;
    column_tile = (warp & 1) * 16;
  }
};
// Where a column's features begin in memory.
DEVICE i64 start_of_column(const Params& p, const Strip& s, const GradYPlace& at, i32 tile, int h) {
  const i32 column = at.column_tile + at.g + h * 8;
  return ((i64)s.pair * p.m + tile * 32 + (column < at.columns ? column : at.columns - 1)) * p.d;
}
// 16 rows of the tile's E as a fragment of A, transposed, added to the sums of columns.
DEVICE void read_align_columns(u32 (&e)[ALIGN_PLANES][4], float (&column_sum)[2], const Step* ring, const GradYPlace& at, i32 first_row) {
  UNROLL for (int r = 0; r < 4; r++) {
    i32 column = at.column_tile + at.g + (r & 1) * 8, row = first_row + 2 * at.t + (r >> 1) * 8;
    float low = align_at(ring, at.start, row, column), high = align_at(ring, at.start, row + 1, column);
    column_sum[r & 1] += low + high;
    u32 planes[ALIGN_PLANES];
    split(planes, low, high);
    UNROLL for (int plane = 0; plane < ALIGN_PLANES; plane++) e[plane][r] = planes[plane];
  }
}
DEVICE void sum_over_lanes(float (&column_sum)[2]) {
  UNROLL for (int h = 0; h < 2; h++) {
    column_sum[h] += from_lane_xor(column_sum[h], 1);
    column_sum[h] += from_lane_xor(column_sum[h], 2);
  }
}
// What the strips below have summed, if it has to be read: loaded before the products and used after them.
DEVICE void read_sums(Float2 (&old)[2][GY_TILES], const Params& p, const GradYOrder& order, const i64 (&starts)[2], const GradYPlace& at,
                      i32 first_feature_tile, i32 slice) {
  UNROLL for (int h = 0; h < 2; h++)
    UNROLL for (int i = 0; i < GY_TILES; i++) old[h][i] = Float2{0.0f, 0.0f};
  if (p.grad_y && must_read(order))
    UNROLL for (int h = 0; h < 2; h++)
      UNROLL for (int i = 0; i < GY_TILES; i++)
        if (GY_PASSES == 1 || at.column_tile + at.g + h * 8 < at.columns)
          old[h][i] = get_gy(p, starts[h] + i * 8, p.d - slice * DIMS - (first_feature_tile + i) * 8 - 2 * at.t);
}
// c, cross += E' X for 16 of the strip's rows.
DEVICE void add_grad_y_product(float (&c)[GY_TILES][4], float (&cross)[GY_TILES][4], const u32 (&e_columns)[ALIGN_PLANES][4],
                               const PlaneRow* x_planes, const GradYPlace& at, int k_step, i32 first_feature_tile) {
  u32 b[PLANES][GY_TILES / 2][4];
  UNROLL for (int plane = 0; plane < PLANES; plane++)
    UNROLL for (int pair = 0; pair < GY_TILES / 2; pair++)
      load_matrices_transposed(b[plane][pair], &x_planes[plane * STRIP_ROWS + k_step * 16 + (at.matrix & 1) * 8 + (at.lane & 7)]
                                                        [(first_feature_tile + pair * 2 + (at.matrix >> 1)) * 8]);
  multiply_planes(c, cross, e_columns, b);
}
DEVICE void put_grad_y(const Params& p, const GradYOrder& order, const Float2 (&old)[2][GY_TILES], const i64 (&starts)[2],
                       const float (&c)[GY_TILES][4], const float (&cross)[GY_TILES][4], const float (&column_sum)[2], const PlaneRow* y_planes,
                       const GradYPlace& at, i32 first_feature_tile, i32 slice, float twice) {
  UNROLL for (int h = 0; h < 2; h++) {
    const i32 column = at.column_tile + at.g + h * 8;
    if (column < at.columns)
      UNROLL for (int i = 0; i < GY_TILES; i++) {
        const i32 k = (first_feature_tile + i) * 8 + 2 * at.t;
        u32 pair = *(const u32*)&y_planes[column][k];
        float low = low_of(pair), high = high_of(pair);
        if constexpr (PLANES > 1) {
          pair = *(const u32*)&y_planes[32 + column][k];
          low += low_of(pair) * LOW_PLANE;
          high += high_of(pair) * LOW_PLANE;
        }
        put_gy(p, order, starts[h] + i * 8, p.d - slice * DIMS - k,
               Float2{old[h][i].a + twice * (low * column_sum[h] - (c[i][h * 2] + cross[i][h * 2] * LOW_PLANE)),
                      old[h][i].b + twice * (high * column_sum[h] - (c[i][h * 2 + 1] + cross[i][h * 2 + 1] * LOW_PLANE))});
      }
  }
}
