// Costs of a tile as |x|^2 + |y|^2 - 2 x y on tensor cores: what whole rows and slices of features have in common.
#pragma once

#define COLUMN_TILES (4 / WARPS_PER_ROW_TILE)  // 8 columns each, per warp
DEVICE i32 first_column_tile(i32 warp) { return warp / ROW_TILES * COLUMN_TILES; }

// As load_x_fragment, for y: features 0-7 and 8-15, columns 0-7 and 8-15 of a pair of column tiles.
DEVICE void load_y_fragment(u32 (&b)[4], const PlaneRow* y, int plane, i32 pair, i32 k_step, i32 thread) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5), matrix = lane >> 3;
  load_matrices(b, &y[plane * 32 + (first_column_tile(warp) + pair * 2 + (matrix >> 1)) * 8 + (lane & 7)][k_step * 16 + (matrix & 1) * 8]);
}

// Puts the costs of a warp's part of a tile into the ring; inner(c, e) is an inner product of normalized features.
template <class Inner>
DEVICE void put_costs(const Params& p, const Strip& s, const Normalization& normalization, const float* y_squares_of, Step* ring, i32 start,
                      i32 chunks, i32 tile, i32 thread, bool& bad, Inner inner) {
  const i32 lane = thread & 31, warp = (i32)((u32)thread >> 5), g = lane >> 2, t = lane & 3;
  const float scale = (float)p.scale, unscale = unscale_of(normalization), twice = 2.0f * unscale * unscale;
  const i32 first_row = (warp % ROW_TILES) * 16 + g;
  float x_squares[2] = {normalization.x_squares[first_row], normalization.x_squares[first_row + 8]}, y_squares[COLUMN_TILES][2];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++)
    UNROLL for (int e = 0; e < 2; e++) y_squares[c][e] = y_squares_of[(first_column_tile(warp) + c) * 8 + 2 * t + e];
  UNROLL for (int c = 0; c < COLUMN_TILES; c++)
    UNROLL for (int e = 0; e < 4; e++) {
      i32 row = first_row + (e >> 1) * 8, column = (first_column_tile(warp) + c) * 8 + 2 * t + (e & 1);
      const float distance = (x_squares[e >> 1] + y_squares[c][e & 1]) - twice * inner(c, e);
      put_cost(ring, start, chunks, s, row, column, tile, distance * scale, bad);
    }
}
