// Costs on tensor cores DIMS features at a time, D > DIMS. For the interface see tiled.cu.
//
// Slices have two buffers: one is filled while the other is read, with one barrier a slice.
#pragma once

struct CostShared {
  alignas(16) PlaneRow y[2][PLANES * 32];
  float y_squares[32];
  alignas(16) PlaneRow x[2][PLANES * STRIP_ROWS];
  float centre[DIMS];
};
struct CostMaker {
  RowBlock next;              // y of the next slice
  RowPointers next_rows;      // where that is
  OwnRows own;                // and x of the next slice
  OwnPointers own_rows;
  u32 barrier;                // of the group
  bool bad;
};

DEVICE CostMaker open_costs(const Params& p, const Strip& s, const Normalization& normalization, u32 barrier, i32 first, i32 thread) {
  CostMaker maker;
  maker.barrier = barrier;
  maker.bad = false;
  maker.own_rows = pointers_to_x(p, s, thread);
  maker.own = fetch_x(maker.own_rows, 0, p.d, thread);
  maker.next_rows = pointers_to(normalization.y, first * 32, thread);
  maker.next = fetch_slice(maker.next_rows, 0, p.d, thread);
  return maker;
}

DEVICE void make_costs(CostMaker& maker, const Params& p, const Strip& s, const Normalization& normalization, CostShared& shared,
                       Step* ring, i32 chunks, i32 tile, i32 following, i32 thread) {
  const i32 start = ring_start(tile, chunks);
  const float factor = scale_of(normalization);
  SlicedSquares squares{shared.y_squares, {}};
  // Tensor cores truncate their sums: slices are summed outside of them.
  float total[COLUMN_TILES][4];
  clear(total);
  UNROLL_BY(1) for (i32 slice = 0; slice * DIMS < p.d; slice++) {
    const float* centre = normalization.centre + slice * DIMS;
    // Whoever is here has passed the barrier of the slice before, so all are done with the products of the one before it.
    PlaneRow* x_planes = shared.x[slice & 1];
    PlaneRow* y_planes = shared.y[slice & 1];
    if (!has_centres(slice)) {
      set_centre(shared.centre, p, s, slice, thread);
      group_barrier(maker.barrier, GROUP);
      centre = shared.centre;
    }
    const Quad shift = shift_of(centre, factor, thread);
    maker.bad |= stage_rows(y_planes, 32, maker.next, p.d, shift, factor, squares, slice, thread);
    stage_x(x_planes, maker.own, p.d, shift, factor, slice, thread);
    const bool last = (slice + 1) * DIMS >= p.d;  // then the next is the following tile's first
    if (last && following >= 0) maker.next_rows = pointers_to(normalization.y, following * 32, thread);
    maker.own = fetch_x(maker.own_rows, last ? 0 : slice + 1, p.d, thread);
    maker.next = fetch_slice(maker.next_rows, last ? 0 : slice + 1, p.d, thread);
    group_barrier(maker.barrier, GROUP);
    UNROLL for (int pair = 0; pair < COLUMN_TILES / 2; pair++) {  // one at a time, for want of registers
      float product[2][4], cross[2][4];
      clear(product);
      clear(cross);
      UNROLL_BY(2) for (i32 k_step = 0; k_step < K_STEPS; k_step++) {
        u32 x[PLANES][4], b[PLANES][1][4];
        load_x_fragment(x, x_planes, k_step, thread);
        UNROLL for (int plane = 0; plane < PLANES; plane++) load_y_fragment(b[plane][0], y_planes, plane, pair, k_step, thread);
        multiply_planes(product, cross, x, b);
      }
      UNROLL for (int c = 0; c < 2; c++) UNROLL for (int e = 0; e < 4; e++) total[pair * 2 + c][e] += product[c][e] + cross[c][e] * LOW_PLANE;
    }
  }
  put_costs(p, s, normalization, shared.y_squares, ring, start, chunks, tile, thread, maker.bad, [&](int c, int e) { return total[c][e]; });
}
