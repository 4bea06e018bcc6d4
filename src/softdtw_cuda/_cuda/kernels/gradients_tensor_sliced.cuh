// Gradients on tensor cores DIMS features at a time, D > DIMS. For the interface see tiled.cu.
//
// Of this many features the sums of gX are in memory, each element one thread's own. Slices have two buffers, as for costs.
#pragma once

struct GradShared {
  alignas(16) PlaneRow x[2][PLANES * STRIP_ROWS];
  float centre[DIMS];
  alignas(16) PlaneRow y[2][PLANES * 32];
};
struct ClosingShared { float sum[STRIP_ROWS]; };

// ---- gX
struct GradX {
  float row_sum[2];       // of E
  RowBlock next;          // y of the next slice
  RowPointers next_rows;  // where that is
};
DEVICE void prefetch_tile(GradX& maker, const Params& p, const Strip&, const Normalization& normalization, i32 tile, i32 thread) {
  maker.next_rows = pointers_to(normalization.y, tile * 32, thread);
  maker.next = fetch_slice(maker.next_rows, 0, p.d, thread);
}
DEVICE GradX open_grad_x(const Params& p, const Strip& s, const Normalization& normalization, GradShared&, i32 first, i32 thread) {
  GradX maker;
  prefetch_tile(maker, p, s, normalization, first, thread);
  maker.row_sum[0] = maker.row_sum[1] = 0.0f;
  return maker;
}
// first_time: the sums in memory are not there yet.
DEVICE void make_grad_x(GradX& maker, const Params& p, const Strip& s, const Normalization& normalization, GradShared& shared,
                        const Step* ring, i32 tile, bool first_time, i32 thread) {
  const GradXPlace at(tile, thread);
  const float scale = scale_of(normalization);
  u32 e_rows[2][ALIGN_PLANES][4];
  UNROLL for (int k_step = 0; k_step < 2; k_step++) read_align_rows(e_rows[k_step], maker.row_sum, ring, at, k_step * 16);
  float* sums[2];
  bool there[2];
  UNROLL for (int h = 0; h < 2; h++) {
    const i32 row = s.first_row + at.row_tile + at.g + h * 8;
    there[h] = p.grad_x && row < s.n;
    sums[h] = (float*)p.sum_x + ((i64)s.pair * p.n + row) * p.d + at.first_tile_of_warp * 8 + 2 * at.t;
  }
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    const float* centre = normalization.centre + slice * DIMS;
    PlaneRow* y_planes = shared.y[slice & 1];
    if (!has_centres(slice)) {
      set_centre(shared.centre, p, s, slice, thread);
      gradients_barrier();
      centre = shared.centre;
    }
    stage_rows(y_planes, 32, maker.next, p.d, shift_of(centre, scale, thread), scale, slice, thread);
    const bool last = (slice + 1) * DIMS >= p.d;  // then the next is the following tile's first
    if (last && tile > first_tile(s)) maker.next_rows = pointers_to(normalization.y, (tile - 1) * 32, thread);
    maker.next = fetch_slice(maker.next_rows, last ? 0 : slice + 1, p.d, thread);
    gradients_barrier();
    if (p.grad_x)
      UNROLL for (int first = 0; first < GX_TILES; first += GX_TILES_AT_A_TIME) {
        float c[GX_TILES_AT_A_TIME][4], cross[GX_TILES_AT_A_TIME][4];
        clear(c);
        clear(cross);
        UNROLL for (int k_step = 0; k_step < 2; k_step++) {
          u32 b[PLANES][GX_TILES_AT_A_TIME / 2][4];
          read_y(b, y_planes, at, k_step, first);
          multiply_planes(c, cross, e_rows[k_step], b);
        }
        UNROLL for (int i = 0; i < GX_TILES_AT_A_TIME; i++)
          UNROLL for (int h = 0; h < 2; h++) {
            const i32 k = slice * DIMS + (first + i) * 8;
            if (there[h])
              put_sum(sums[h] + k, p.d - k - at.first_tile_of_warp * 8 - 2 * at.t, first_time,
                      Float2{c[i][h * 2] + cross[i][h * 2] * LOW_PLANE, c[i][h * 2 + 1] + cross[i][h * 2 + 1] * LOW_PLANE});
          }
      }
  }
}
DEVICE void leave_sums(GradX& maker, GradShared&, ClosingShared& rows, i32 thread) { leave_row_sums(maker.row_sum, rows.sum, thread); }
template <int THREADS>
DEVICE void close_grad_x(const Params& p, const Strip& s, const Normalization& normalization, const GradShared&, const ClosingShared& rows) {
  close_rows<THREADS>(p, s, normalization, rows.sum, [&](i32, i32, i64 at) { return load_fresh((const float*)p.sum_x + at); },
                      [&](const Features& x, i32 k) { return centre_at(normalization, x, x, s, k); });
}

// ---- gY
struct GradY {
  OwnRows own;  // x of the next slice
  OwnPointers own_rows;
};
DEVICE GradY open_grad_y(const Params& p, const Strip& s, i32 thread) {
  const OwnPointers rows = pointers_to_x(p, s, thread);
  return GradY{fetch_x(rows, 0, p.d, thread), rows};
}
DEVICE void make_grad_y(GradY& maker, const Params& p, const Strip& s, const GradYOrder& order, const Normalization& normalization,
                        GradShared& shared, const Step* ring, i32 tile, float factor, i32 thread) {
  const GradYPlace at(s, tile, thread);
  float column_sum[2] = {0.0f, 0.0f};
  u32 e_tile[STRIP_ROWS / 16][ALIGN_PLANES][4];  // the same for every slice
  if (p.grad_y) {
    UNROLL for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++) read_align_columns(e_tile[k_step], column_sum, ring, at, k_step * 16);
    sum_over_lanes(column_sum);
  }
  const i32 first_feature_tile = (at.warp >> 1) * GY_TILES;
  const i64 of_columns[2] = {start_of_column(p, s, at, tile, 0) + first_feature_tile * 8 + 2 * at.t,
                             start_of_column(p, s, at, tile, 1) + first_feature_tile * 8 + 2 * at.t};
  const float scale = scale_of(normalization), twice = 2.0f * factor * unscale_of(normalization);
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    PlaneRow* x_planes = shared.x[slice & 1];
    if (!has_centres(slice)) gradients_barrier();  // as the other group does
    if (p.grad_y)
      stage_x(x_planes, maker.own, p.d, shift_of(has_centres(slice) ? normalization.centre + slice * DIMS : shared.centre, scale, thread),
              scale, slice, thread);
    const i64 starts[2] = {of_columns[0] + slice * DIMS, of_columns[1] + slice * DIMS};
    Float2 old[2][GY_TILES];
    read_sums(old, p, order, starts, at, first_feature_tile, slice);
    if (p.grad_y) maker.own = fetch_x(maker.own_rows, (slice + 1) * DIMS < p.d ? slice + 1 : 0, p.d, thread);
    gradients_barrier();  // this slice of x and y is there
    if (p.grad_y) {  // k runs over rows
      float c[GY_TILES][4], cross[GY_TILES][4];
      UNROLL for (int i = 0; i < GY_TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = cross[i][e] = 0.0f;
      UNROLL for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++)
        add_grad_y_product(c, cross, e_tile[k_step], x_planes, at, k_step, first_feature_tile);
      put_grad_y(p, order, old, starts, c, cross, column_sum, shared.y[slice & 1], at, first_feature_tile, slice, twice);
    }
  }
}
