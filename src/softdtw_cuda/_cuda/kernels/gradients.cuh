// Gradients of the tile that the sweep has just completed: what every mode has in common.
//
//   gX_i = 2 g sum_j E_ij (x_i - y_j)      gY_j = -2 g sum_i E_ij (x_i - y_j)
//
// gX is made by one group of 128 threads, which also brings the tile's y to shared memory, gY by another. gX of a strip is
// its own. gY is summed by all strips of a pair, from the bottom up: the first stores, the others add, in a fixed order.
#pragma once

// Whether a strip is the first, and the last, of those that add to a tile of gY.
struct GradYOrder { i32 first, last; };
// Only the last strip of 16-bit gradients has to read the sum, for it stores it elsewhere.
DEVICE bool must_read(const GradYOrder& order) { return INPUT != FLOAT32 && order.last && !order.first; }

DEVICE float align_at(const Step* ring, i32 start, i32 row, i32 column) {
  return ring[ring_step(start, column + row, ALIGN_CHUNKS)][row];
}
// Of both groups.
DEVICE void gradients_barrier() { group_barrier(GRAD_BARRIER, 2 * GROUP); }
