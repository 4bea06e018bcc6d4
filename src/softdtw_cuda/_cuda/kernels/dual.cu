// Second order: <E, Omega> and its gradients, equations (9) to (19), for any direction Omega on the costs. One block has one
// strip of 32 rows of one pair.
//
//   MODE        COST_MATRIX, or DIRECT for squared Euclidean distances of any number of features
//   KIND        what Omega is
//   INPUT       FLOAT32 or FLOAT64, which is the type of everything, exponents excepted
//   CHECKPOINT  steps from one saved state to the next
//   DIMS        features that are in shared memory at a time
//   PIPELINED   1 when the backward's warps have roles of their own
#define LANE_ROWS 1
#define SOURCE_NAME "dual"
#include "primitives.cuh"
#include "build.cuh"
// KIND
#define TANGENTS 0  // 2 (x_i - y_j).(a_i - b_j)
#define MATRIX 1    // a
#define FEATURES 2  // |a_i - b_j|^2
#define POSITION 3  // (i / N - j / M)^2
#include "params_dual.cuh"
#include "polling.cuh"
#include "element.cuh"
#include "scaled_dual.cuh"
#include "strip.cuh"
#include "handoff_dual.cuh"
#include "tickets.cuh"
#include "walker_dual.cuh"
#include "costs_dual.cuh"
#if HAS_PART(FORWARD_PART)
#include "forward_dual.cuh"
KERNEL THREADS_PER_BLOCK(FORWARD_THREADS, FORWARD_BLOCKS) dual_forward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  forward_pass(p, *(ForwardShared*)memory);
}
#endif
#if HAS_PART(BACKWARD_PART)
#include "gradients_dual.cuh"
#include "schedule_dual.cuh"
#include "backward_dual.cuh"
KERNEL THREADS_PER_BLOCK(BACKWARD_THREADS, BACKWARD_BLOCKS) dual_backward(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(memory);
  backward_pass(p, *(BackwardShared*)memory);
}
#endif
