// Value and gradient in one launch, for pairs of one strip: block b has pair b, and shares nothing with another block. So it
// prepares for itself what elsewhere is filled before the launch.
#pragma once

// Zeros, for what lies behind a pair's own steps.
template <int THREADS> DEVICE void clear_padding(const Params& p, void* gradients, i32 pair, i32 steps, i32 padded) {
  float* own = (float*)gradients + (i64)pair * padded * p.d;
  if (gradients)
    UNROLL_BY(1) for (i32 i = steps * p.d + (i32)thread_index(); i < padded * p.d; i += THREADS) own[i] = 0.0f;
}
// By all THREADS threads of a block, which need a barrier before one of them flags the pair.
template <int THREADS> DEVICE void open_pair(const Params& p) {
  const Strip s = strip_of(p, (i32)block_index(), 0);
  if (thread_index() == 0) p.range_flags[s.pair] = ~0u;
  clear_padding<THREADS>(p, p.grad_x, s.pair, s.valid ? s.n : 0, p.n);
  clear_padding<THREADS>(p, p.grad_y, s.pair, s.valid ? s.m : 0, p.m);
}
