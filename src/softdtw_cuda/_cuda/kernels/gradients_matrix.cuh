// The gradient of a cost matrix is E itself: each group writes half of a tile's rows. For the interface see tiled.cu.
#pragma once

struct GradShared { float nothing; };
struct ClosingShared {};
struct GradX {};
struct GradY {};
#define CLOSES_GRAD_X false

DEVICE void prefetch_tile(GradX&, const Params&, const Strip&, const Normalization&, i32, i32) {}
DEVICE GradX open_grad_x(const Params&, const Strip&, const Normalization&, GradShared&, i32, i32) { return GradX{}; }
DEVICE GradY open_grad_y(const Params&, const Strip&, i32) { return GradY{}; }

DEVICE void write_alignment(const Params& p, const Strip& s, const Step* ring, i32 tile, float factor, i32 half, i32 thread) {
  const i32 start = ring_start(tile, ALIGN_CHUNKS), lane = thread & 31, column = tile * 32 + lane;
  for (i32 r = half * 4 + (thread >> 5); r < STRIP_ROWS; r += 8) {
    i32 row = s.first_row + r;
    if (row < s.n && column < s.m) {
      float e = align_at(ring, start, r, lane);
      // At most 2^-66 leaks through forbidden cells, far below the last bit of anything: exactly zero.
      e = in_band(s, row, column) && !(e < 1.0e-19f) ? e * factor : 0.0f;
      store_gradient(p.grad_x, ((i64)s.pair * p.n + row) * p.m + column, e, p.grad_x_wide);
    }
  }
}
DEVICE void make_grad_x(GradX&, const Params& p, const Strip& s, const Normalization&, GradShared&, const Step* ring, i32 tile, bool,
                        i32 thread) {
  write_alignment(p, s, ring, tile, gradient_of_value(p, s.pair), 0, thread);
}
DEVICE void make_grad_y(GradY&, const Params& p, const Strip& s, const GradYOrder&, const Normalization&, GradShared&, const Step* ring,
                        i32 tile, float factor, i32 thread) {
  write_alignment(p, s, ring, tile, factor, 1, thread);
}
DEVICE void leave_sums(GradX&, GradShared&, ClosingShared&, i32) {}
template <int THREADS>
DEVICE void close_grad_x(const Params&, const Strip&, const Normalization&, const GradShared&, const ClosingShared&) {}
