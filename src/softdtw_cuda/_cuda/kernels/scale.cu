// The backward of small problems, whose forward has kept the gradients for a `grad` of 1: both sides times `grad`, number by
// number. A zero stays a zero whatever the factor is, in the padding and in a pair whose value is infinite.
#include "primitives.cuh"
#include "build.cuh"
#include "params.cuh"
#include "element.cuh"

// What a thread reads and writes in one access.
template <int COUNT> struct alignas(4 * COUNT) Numbers { float v[COUNT]; };

// `size` numbers of each pair, a multiple of COUNT. There are less than 2^31 of them in all.
template <int COUNT> DEVICE void scale_numbers(const Params& p, const Numbers<COUNT>* kept, Numbers<COUNT>* scaled, u32 size) {
  for (u32 i = block_index() * SCALE_THREADS + thread_index(); i < (u32)p.batch * size / COUNT; i += (u32)p.blocks * SCALE_THREADS) {
    const float factor = gradient_of_value(p, (i32)(i * COUNT / size));
    Numbers<COUNT> numbers = kept[i];
    UNROLL for (int k = 0; k < COUNT; k++)
      if (numbers.v[k] != 0.0f) numbers.v[k] *= factor;
    scaled[i] = numbers;
  }
}
DEVICE void scale_side(const Params& p, const void* kept, void* scaled, i32 steps) {
  const u32 size = (u32)steps * (u32)p.d;
  if (!scaled) return;
  if (size % 4 || (u64)kept % 16) scale_numbers(p, (const Numbers<1>*)kept, (Numbers<1>*)scaled, size);
  else scale_numbers(p, (const Numbers<4>*)kept, (Numbers<4>*)scaled, size);
}

KERNEL THREADS_PER_BLOCK(SCALE_THREADS, 1) scale_backward(GRID_CONSTANT const Params p) {
  scale_side(p, p.sum_x, p.grad_x, p.n);
  scale_side(p, p.sum_y, p.grad_y, p.m);
}
