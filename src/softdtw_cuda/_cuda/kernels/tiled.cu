// Soft-DTW with costs made tile by tile by helper warps while one warp walks. Narrow arithmetic; wide.cu covers the rest,
// univariate.cu series of one feature. One block has one strip (STRIP_ROWS rows) of one pair.
//
//   MODE    COST_MATRIX, DIRECT (D <= DIMS) or TENSOR (DIMS features at a time)
//   SLICED  1 when D > DIMS
//
// A mode is two files, one for costs and one for gradients, with one interface:
//   Normalization, make_normalization                  what a strip needs to know of its features
//   CostShared, CostMaker, open_costs, make_costs      the costs of a tile, by a group of 128 threads; `following` is the tile
//                                                      that will be wanted next, so that it can be fetched meanwhile
//   GradShared, GradX, open_grad_x, prefetch_tile, make_grad_x, leave_sums, close_grad_x       a tile's part of gX
//   GradY, open_grad_y, make_grad_y                                                            and of gY
#define WIDE 0
#define PACKED 0
#define SOURCE_NAME "tiled"
#define TILED
#include "primitives.cuh"
#include "common.cuh"
#include "pruning.cuh"
#include "tile.cuh"
#if MODE == COST_MATRIX
#include "costs_matrix.cuh"
#else
#include "features.cuh"
#if MODE == DIRECT
#include "costs_direct.cuh"
#else
#include "planes.cuh"
#include "staging.cuh"
#include "normalization.cuh"
#include "costs_tensor.cuh"
#if SLICED
#include "costs_tensor_sliced.cuh"
#else
#include "costs_tensor_whole.cuh"
#endif
#endif
#endif
#include "gradients.cuh"
#include "alone.cuh"
#if MODE == COST_MATRIX
#include "gradients_matrix.cuh"
#elif MODE == DIRECT
#include "gradients_direct.cuh"
#else
#include "gradients_tensor.cuh"
#if SLICED
#include "gradients_tensor_sliced.cuh"
#else
#include "gradients_tensor_whole.cuh"
#endif
#endif
#include "schedule.cuh"
#include "forward_tiled.cuh"
#include "backward_tiled.cuh"

#if HAS_PART(FORWARD_PART)
KERNEL THREADS_PER_BLOCK(FORWARD_THREADS, FORWARD_BLOCKS) tiled_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  forward_pass<FORWARD_THREADS, false>(p, *(ForwardShared*)memory);
}
#endif

#if HAS_PART(BACKWARD_PART)
KERNEL THREADS_PER_BLOCK(BACKWARD_THREADS, 1) tiled_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  backward_pass<false>(p, *(BackwardShared*)memory);
}
#endif

#if HAS_PART(FORWARD_BACKWARD_PART) && MODE != COST_MATRIX && !SLICED
// Value and gradient in one launch, for pairs of one strip. No block waits for another.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the passes share their memory");
KERNEL THREADS_PER_BLOCK(BACKWARD_THREADS, 1) tiled_forward_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  forward_pass<BACKWARD_THREADS, true>(p, *(ForwardShared*)memory);
  block_barrier();
  backward_pass<true>(p, *(BackwardShared*)memory);
}
#endif
