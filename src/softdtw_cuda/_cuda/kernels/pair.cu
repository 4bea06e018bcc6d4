// Soft-DTW of many pairs of few features: one warp walks one whole pair, strip after strip, so that nothing is handed
// from block to block and no warp ever waits. Narrow arithmetic, no band.
//
// The forward saves the lanes' state every 32 steps and each strip's bottom row, from where the next strip reads it. Every
// sum of the backward has a fixed order.
#define WIDE 0
#define SOURCE_NAME "pair"
#include "primitives.cuh"
#include "common.cuh"
#include "pruning.cuh"
#include "pair_rows.cuh"
#include "costs_registers.cuh"
#include "forward_pair.cuh"
#include "backward_pair.cuh"

static_assert(!BANDED, "other calls have other kernels");

#if HAS_PART(FORWARD_PART)
KERNEL THREADS_PER_BLOCK(32, PAIR_FORWARD_BLOCKS) pair_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  ForwardShared& shared = *(ForwardShared*)memory;
  const i32 pair = (i32)block_index();
  prepare_rerun(p, pair);
  const Strip first = strip_of(p, pair, 0);
  if (!first.valid) {
    if (lane_index() == 0) store_invalid_value(p, pair);
    return;
  }
  const Point reference = read_features(x_of(p, first), 0, first.n, p.d);
  // Columns left of the first: as good as any, but for their range.
  UNROLL for (int i = 0; i < WINDOW / 32; i++) put_features(shared.y, i * 32 + (i32)lane_index(), reference);
  bool bad = false;
  for (i32 index = 0; index * STRIP_ROWS < first.n; index++) {
    warp_barrier();
    forward_strip(p, strip_of(p, pair, index), reference, shared, bad);
  }
  if (bad) flag_out_of_range(p, pair);
}
#endif

#if HAS_PART(BACKWARD_PART)
KERNEL THREADS_PER_BLOCK(32, PAIR_BACKWARD_BLOCKS) pair_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  BackwardShared& shared = *(BackwardShared*)memory;
  const i32 pair = (i32)block_index(), lane = (i32)lane_index();
  prepare_rerun(p, pair);
  const Strip first = strip_of(p, pair, 0);
  if (!first.valid || !is_in_range(p, pair)) return;
  const float value = ((const float*)p.value)[pair];
  const float seed = seed_of(value);
  const float factor = 2.0f * gradient_of_value(p, pair);
  const i32 numbers = first.m * p.d;
  float* sums = (float*)p.sum_y + (i64)pair * p.m * p.d;
  if (p.grad_y)
    for (i32 i = lane; i < numbers; i += 32) sums[i] = 0.0f;
  Range received{0, -1};
  for (i32 index = (first.n - 1) / STRIP_ROWS; index >= 0; index--) {
    warp_barrier();
    received = backward_strip(p, strip_of(p, pair, index), received, seed, factor, shared);
  }
  if (INPUT != FLOAT32 && p.grad_y) {
    warp_barrier();
    for (i32 i = lane; i < numbers; i += 32) store_gradient(p.grad_y, (i64)pair * p.m * p.d + i, sums[i], p.grad_y_wide);
  }
}
#endif
