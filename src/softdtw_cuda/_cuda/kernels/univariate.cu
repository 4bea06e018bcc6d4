// Soft-DTW of univariate series, whose costs are three instructions: one warp per strip does everything. Narrow arithmetic.
#define WIDE 0
#define SOURCE_NAME "univariate"
#include "primitives.cuh"
#include "common.cuh"
#include "pruning.cuh"
#include "alone.cuh"
#include "costs_univariate.cuh"
#include "forward_univariate.cuh"
#include "backward_univariate.cuh"

#if HAS_PART(FORWARD_PART)
KERNEL THREADS_PER_BLOCK(32, UNIVARIATE_FORWARD_BLOCKS) univariate_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  const Assignment mine = assignment_of(p, next_ticket_of_warp(p));
  const Strip s = strip_of(p, mine.pair, mine.position);
  if (!s.valid) {
    if (s.index == 0 && lane_index() == 0) store_invalid_value(p, s.pair);
    return;
  }
  if (s.present) forward_strip(p, s, *(ForwardShared*)memory);
}
#endif

#if HAS_PART(BACKWARD_PART)
KERNEL THREADS_PER_BLOCK(32, UNIVARIATE_BACKWARD_BLOCKS) univariate_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  const Assignment mine = assignment_of(p, next_ticket_of_warp(p));
  const Strip s = strip_of(p, mine.pair, p.strips - 1 - mine.position);
  if (is_in_range(p, s.pair) && s.valid && s.present) backward_strip(p, s, *(BackwardShared*)memory);
}
#endif

#if HAS_PART(FORWARD_BACKWARD_PART)
// Value and gradient in one launch, for pairs of one strip. No block waits for another.
static_assert(sizeof(ForwardShared) <= BACKWARD_SHARED, "the passes share their memory");
KERNEL THREADS_PER_BLOCK(32, UNIVARIATE_BACKWARD_BLOCKS) univariate_forward_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  open_pair<32>(p);
  warp_barrier();
  const Strip s = strip_of(p, (i32)block_index(), 0);
  if (!s.valid) {
    if (lane_index() == 0) store_invalid_value(p, s.pair);
    return;
  }
  forward_strip(p, s, *(ForwardShared*)memory);
  warp_barrier();
  if (is_in_range(p, s.pair)) backward_strip(p, s, *(BackwardShared*)memory);
}
#endif
