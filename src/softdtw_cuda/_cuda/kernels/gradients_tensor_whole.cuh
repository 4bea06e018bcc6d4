// Gradients on tensor cores where all features of a row fit shared memory, D <= DIMS. For the interface see tiled.cu.
#pragma once

struct GradShared { alignas(16) PlaneRow y[1][PLANES * 32]; };
struct ClosingShared {
  float sum[STRIP_ROWS];
  alignas(8) float product[STRIP_ROWS][DIMS + 8];
};

// ---- gX
#if PREFETCHES_Y
struct GradX {
  float row_sum[2];  // of E
  float sum[GX_TILES][4];
  RowBlock next;  // y of the next tile
};
DEVICE void prefetch_tile(GradX& maker, const Params&, const Strip&, const Normalization& normalization, i32 tile, i32 thread) {
  maker.next = fetch_rows(normalization.y, tile * 32, thread);
}
DEVICE void stage_y(GradX& maker, const Params& p, const Strip& s, const Normalization& normalization, PlaneRow* y_planes, i32 tile, i32 thread) {
  const float scale = scale_of(normalization);
  stage_rows(y_planes, 32, maker.next, p.d, shift_of(normalization.centre, scale, thread), scale, 0, thread);
  if (tile > first_tile(s)) maker.next = fetch_rows(normalization.y, (tile - 1) * 32, thread);
}
#else
struct GradX {
  float row_sum[2];  // of E
  float sum[GX_TILES][4];
};
DEVICE void prefetch_tile(GradX&, const Params&, const Strip&, const Normalization&, i32, i32) {}
DEVICE void stage_y(GradX&, const Params& p, const Strip&, const Normalization& normalization, PlaneRow* y_planes, i32 tile, i32 thread) {
  const float scale = scale_of(normalization);
  if constexpr (DIMS <= 64) {
    const RowBlock block = fetch_rows(normalization.y, tile * 32, thread);
    stage_rows(y_planes, 32, block, p.d, shift_of(normalization.centre, scale, thread), scale, 0, thread);
  } else {
    UNROLL_BY(1) for (i32 half = 0; half < 2; half++) {
      const Rows<16> block = fetch_rows<16>(normalization.y, tile * 32 + half * 16, thread);
      stage_rows(y_planes + half * 16, 32, block, p.d, shift_of(normalization.centre, scale, thread), scale, 0, thread);
    }
  }
}
#endif
DEVICE GradX open_grad_x(const Params& p, const Strip& s, const Normalization& normalization, GradShared&, i32 first, i32 thread) {
  GradX maker;
  prefetch_tile(maker, p, s, normalization, first, thread);
  maker.row_sum[0] = maker.row_sum[1] = 0.0f;
  clear(maker.sum);
  return maker;
}
// The same product as multiply_in_place makes, with one plane of y at a time, the first of which is read twice.
DEVICE void multiply_plane_by_plane(float (&c)[GX_TILES_AT_A_TIME][4], const u32 (&e_rows)[ALIGN_PLANES][4], const PlaneRow* y_planes,
                                    const GradXPlace& at, i32 k_step, int first) {
  u32 b[4];
  auto add_product = [&](const u32 (&a)[4]) {
    UNROLL for (int i = 0; i < GX_TILES_AT_A_TIME; i++) mma_input(c[i], a, b[i * 2], b[i * 2 + 1]);
  };
  read_y_plane(b, y_planes, at, 0, k_step, first);
  add_product(e_rows[1]);
  if constexpr (PLANES > 1) {
    read_y_plane(b, y_planes, at, 1, k_step, first);
    add_product(e_rows[0]);
  }
  UNROLL for (int i = 0; i < GX_TILES_AT_A_TIME; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] *= LOW_PLANE;
  if constexpr (PLANES > 1) read_y_plane(b, y_planes, at, 0, k_step, first);
  add_product(e_rows[0]);
}
DEVICE void make_grad_x(GradX& maker, const Params& p, const Strip& s, const Normalization& normalization, GradShared& shared,
                        const Step* ring, i32 tile, bool, i32 thread) {
  const GradXPlace at(tile, thread);
  stage_y(maker, p, s, normalization, shared.y[0], tile, thread);
  gradients_barrier();
  if (!p.grad_x) return;
  UNROLL_BY(GRAD_X_HALVES_UNROLLED) for (i32 k_step = 0; k_step < 2; k_step++) {
    u32 e_rows[ALIGN_PLANES][4];
    read_align_rows(e_rows, maker.row_sum, ring, at, k_step * 16);
    UNROLL for (int first = 0; first < GX_TILES; first += GX_TILES_AT_A_TIME) {
      float c[GX_TILES_AT_A_TIME][4];
      clear(c);
      if constexpr (GRAD_X_PLANE_BY_PLANE) {
        multiply_plane_by_plane(c, e_rows, shared.y[0], at, k_step, first);
      } else {
        u32 b[PLANES][GX_TILES_AT_A_TIME / 2][4];
        read_y(b, shared.y[0], at, k_step, first);
        multiply_in_place(c, e_rows, b);
      }
      UNROLL for (int i = 0; i < GX_TILES_AT_A_TIME; i++)
        UNROLL for (int e = 0; e < 4; e++) maker.sum[first + i][e] += c[i][e];
    }
  }
}
// Leaves the group's sums in shared memory, for the whole block to close the strip.
DEVICE void leave_sums(GradX& maker, GradShared&, ClosingShared& rows, i32 thread) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5), g = lane >> 2, t = lane & 3, row_tile = (warp % ROW_TILES) * 16;
  leave_row_sums(maker.row_sum, rows.sum, thread);
  UNROLL for (int i = 0; i < GX_TILES; i++)
    UNROLL for (int h = 0; h < 2; h++)
      *(Float2*)&rows.product[row_tile + g + h * 8][(warp / ROW_TILES * GX_TILES + i) * 8 + 2 * t] =
          Float2{maker.sum[i][h * 2], maker.sum[i][h * 2 + 1]};
}
template <int THREADS>
DEVICE void close_grad_x(const Params& p, const Strip& s, const Normalization& normalization, const GradShared&, const ClosingShared& rows) {
  close_rows<THREADS>(p, s, normalization, rows.sum, [&](i32 row, i32 k, i64) { return rows.product[row][k]; },
                      [&](const Features&, i32 k) { return normalization.centre[k]; });
}

// ---- gY
struct GradY {};
DEVICE GradY open_grad_y(const Params&, const Strip&, i32) { return GradY{}; }
DEVICE void make_grad_y(GradY&, const Params& p, const Strip& s, const GradYOrder& order, const Normalization& normalization,
                        GradShared& shared, const Step* ring, i32 tile, float factor, i32 thread) {
  const GradYPlace at(s, tile, thread);
  float column_sum[2] = {0.0f, 0.0f};
  UNROLL_BY(1) for (i32 pass = 0; pass < GY_PASSES; pass++) {
    const i32 first_feature_tile = ((at.warp >> 1) * GY_PASSES + pass) * GY_TILES;
    const i64 starts[2] = {start_of_column(p, s, at, tile, 0) + first_feature_tile * 8 + 2 * at.t,
                           start_of_column(p, s, at, tile, 1) + first_feature_tile * 8 + 2 * at.t};
    Float2 old[2][GY_TILES];
    read_sums(old, p, order, starts, at, first_feature_tile, 0);
    float c[GY_TILES][4], cross[GY_TILES][4];
    if (p.grad_y) {  // k runs over rows
      UNROLL for (int i = 0; i < GY_TILES; i++) UNROLL for (int e = 0; e < 4; e++) c[i][e] = cross[i][e] = 0.0f;
      column_sum[0] = column_sum[1] = 0.0f;
      UNROLL_BY(2) for (int k_step = 0; k_step < STRIP_ROWS / 16; k_step++) {
        u32 e_columns[ALIGN_PLANES][4];
        read_align_columns(e_columns, column_sum, ring, at, k_step * 16);
        add_grad_y_product(c, cross, e_columns, normalization.x, at, k_step, first_feature_tile);
      }
      sum_over_lanes(column_sum);
    }
    if (pass == 0) gradients_barrier();  // y is there; the products did not need it
    if (p.grad_y)
      put_grad_y(p, order, old, starts, c, cross, column_sum, shared.y[0], at, first_feature_tile, 0, 2.0f * factor * unscale_of(normalization));
  }
}
