// Soft-DTW of many cost matrices: one warp walks one whole matrix, strip after strip, so that nothing is handed from block to
// block and no warp ever waits. Narrow arithmetic, no band; infinite costs forbid cells.
//
// The forward saves the lanes' state every 32 steps and each strip's bottom row, from where the next strip reads it.
#define WIDE 0
#define SOURCE_NAME "matrix"
#include "primitives.cuh"
#include "common.cuh"
#include "pruning.cuh"
#include "pair_rows.cuh"
#include "costs_skewed.cuh"
#include "forward_matrix.cuh"
#include "backward_matrix.cuh"

static_assert(BANDED && MODE == COST_MATRIX, "cells can be forbidden");

#if HAS_PART(FORWARD_PART)
KERNEL THREADS_PER_BLOCK(32, MATRIX_FORWARD_BLOCKS) matrix_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  ForwardShared& shared = *(ForwardShared*)memory;
  const i32 pair = (i32)block_index();
  prepare_rerun(p, pair);
  const Strip first = strip_of(p, pair, 0);
  if (!first.valid) {
    if (lane_index() == 0) store_invalid_value(p, pair);
    return;
  }
  bool bad = false;
  for (i32 index = 0; index * STRIP_ROWS < first.n; index++) {
    warp_barrier();
    forward_strip(p, strip_of(p, pair, index), shared, bad);
  }
  if (bad) flag_out_of_range(p, pair);
}
#endif

#if HAS_PART(BACKWARD_PART)
KERNEL THREADS_PER_BLOCK(32, MATRIX_BACKWARD_BLOCKS) matrix_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  BackwardShared& shared = *(BackwardShared*)memory;
  const i32 pair = (i32)block_index();
  prepare_rerun(p, pair);
  const Strip first = strip_of(p, pair, 0);
  if (!first.valid) return;
  if (!is_in_range(p, pair)) {  // its rerun stores the weight that there is
    const i64 begin = (i64)pair * p.n * p.m, count = (i64)p.n * p.m;
    for (i64 i = lane_index(); i < count; i += 32) store_gradient(p.grad_x, begin + i, 0.0f, p.grad_x_wide);
    return;
  }
  const float seed = seed_of(((const float*)p.value)[pair]);
  const float factor = gradient_of_value(p, pair);
  Range received{0, -1};
  for (i32 index = (first.n - 1) / STRIP_ROWS; index >= 0; index--) {
    warp_barrier();
    received = backward_strip(p, strip_of(p, pair, index), received, seed, factor, shared);
  }
}
#endif
