// Costs on tensor cores where all features of a row fit shared memory, D <= DIMS. For the interface see tiled.cu.
#pragma once

struct CostShared {
  alignas(16) PlaneRow y[1][PLANES * 32];
  float y_squares[32];
};
struct CostMaker {
  u32 x[KEEP_X ? K_STEPS : 1][PLANES][4];  // the warp's 16 rows as fragments of A, if they are kept
  RowBlock next;                           // y of the next tile
  u32 barrier;                             // of the group
  bool bad;
};

DEVICE CostMaker open_costs(const Params& p, const Strip& s, const Normalization& normalization, u32 barrier, i32 first, i32 thread) {
  CostMaker maker;
  maker.barrier = barrier;
  maker.bad = false;
  if constexpr (KEEP_X)
    UNROLL for (int k_step = 0; k_step < K_STEPS; k_step++) load_x_fragment(maker.x[k_step], normalization.x, k_step, thread);
  maker.next = fetch_rows(normalization.y, first * 32, thread);
  return maker;
}

DEVICE void make_costs(CostMaker& maker, const Params& p, const Strip& s, const Normalization& normalization, CostShared& shared,
                       Step* ring, i32 chunks, i32 tile, i32 following, i32 thread) {
  const i32 start = ring_start(tile, chunks);
  const float factor = scale_of(normalization);
  float product[COLUMN_TILES][4], cross[COLUMN_TILES][4];
  clear(product);
  clear(cross);
  RowSquares squares{shared.y_squares};
  maker.bad |= stage_rows(shared.y[0], 32, maker.next, p.d, shift_of(normalization.centre, factor, thread), factor, squares, 0, thread);
  if (following >= 0) maker.next = fetch_rows(normalization.y, following * 32, thread);
  group_barrier(maker.barrier, GROUP);
  auto add_product = [&](const u32 (&x)[PLANES][4], i32 k_step) {
    u32 b[PLANES][COLUMN_TILES / 2][4];
    UNROLL for (int plane = 0; plane < PLANES; plane++)
      UNROLL for (int pair = 0; pair < COLUMN_TILES / 2; pair++) load_y_fragment(b[plane][pair], shared.y[0], plane, pair, k_step, thread);
    multiply_planes(product, cross, x, b);
  };
  if constexpr (KEEP_X) {
    UNROLL for (int k_step = 0; k_step < K_STEPS; k_step++) add_product(maker.x[k_step], k_step);
  } else {
    const i32 k_steps = FIT == WHOLE_SLICES ? K_STEPS : (p.d + 15) / 16;
    UNROLL_BY(2) for (i32 k_step = 0; k_step < k_steps; k_step++) {
      u32 x[PLANES][4];
      load_x_fragment(x, normalization.x, k_step, thread);
      add_product(x, k_step);
    }
  }
  put_costs(p, s, normalization, shared.y_squares, ring, start, chunks, tile, thread, maker.bad,
            [&](int c, int e) { return product[c][e] + cross[c][e] * LOW_PLANE; });
}
