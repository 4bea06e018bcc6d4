// Small kernels that exercise one thing each: what the emulator must do right, and what it must detect.
#include "primitives.cuh"

struct Params {
  const u32* in;
  u32* out;
  u32* counter;
  Word2* words;
  Word4* wide;
  u32 n, option;
};

#define KERNEL_OF_WARPS(warps) KERNEL THREADS_PER_BLOCK(32 * (warps), 1)

// ---- what must work

template <class T, class Bits> DEVICE void all_shuffles(const Params& p, u64 (&seen)[4]) {
  u32 lane = lane_index();
  u64 pattern = (u64)p.in[lane] << 32 | p.in[lane + 32];
  Bits bits = (Bits)pattern;
  T v = *(T*)&bits;
  T results[4] = {from_lane_above(v), from_lane_below(v), from_lane(v, (lane * 7 + p.option) % 64),
                  from_lane_xor(v, p.option % 32)};
  for (u32 i = 0; i < 4; ++i) seen[i] = (u64)*(Bits*)&results[i];
}
KERNEL_OF_WARPS(1) shuffles(GRID_CONSTANT const Params p) {
  u64 seen[4];
  if (p.n == 0) all_shuffles<float, u32>(p, seen);
  if (p.n == 1) all_shuffles<i32, u32>(p, seen);
  if (p.n == 2) all_shuffles<double, u64>(p, seen);
  if (p.n == 3) all_shuffles<i64, u64>(p, seen);
  for (u32 i = 0; i < 4; ++i) {
    p.out[(i * 32 + lane_index()) * 2] = (u32)seen[i];
    p.out[(i * 32 + lane_index()) * 2 + 1] = (u32)(seen[i] >> 32);
  }
}

KERNEL_OF_WARPS(1) many_shuffles(GRID_CONSTANT const Params p) {
  float v = (float)lane_index();
  for (u32 i = 0; i < p.n; ++i) v = from_lane_above(v) + 1.0f;
  p.out[thread_index()] = bits_of(v);
}

KERNEL_OF_WARPS(1) arithmetic(GRID_CONSTANT const Params p) {
  for (u32 i = lane_index(); i < p.n; i += 32) {
    u32 bits = p.in[i];
    float v = float_of(bits);
    u32 r = 0;
    if (p.option == 0) r = bits_of(half_to_float((u16)bits));
    if (p.option == 1) r = float_to_half(v);
    if (p.option == 2) r = pack_bf16(v, -v);
    if (p.option == 3) r = bits_of(exp2_fast(v));
    if (p.option == 4) r = bits_of(reciprocal_fast(v));
    if (p.option == 5) r = bits_of(max_of(v, 1.0f));
    if (p.option == 6) r = bits_of(min_of(v, 1.0f));
    if (p.option == 7) r = (u32)add_then_min((i32)bits, 5, 100);
    if (p.option == 9) r = pack_f16(v, -v);
    if (p.option == 10) r = bits_of(max_or_nan(v, 0.0f));
    if (p.option == 11) r = bits_of(absolute(v));
    if (p.option == 8) r = (u32)min_of3((i32)bits, 7, -3);
    p.out[i] = r;
  }
}

// C (16x8, float) += A (16x16, row-major) B (16x8, row-major), bf16 or f16, by fragments gathered by hand.
KERNEL_OF_WARPS(1) product(GRID_CONSTANT const Params p) {
  u32 g = lane_index() / 4, t = lane_index() % 4;
  const u16* a16 = (const u16*)p.in;
  const u16* b16 = a16 + 16 * 16;
  u32 a[4];
  for (u32 i = 0; i < 4; ++i) {
    const u16* at = a16 + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
    a[i] = at[0] | (u32)at[1] << 16;
  }
  u32 b[2];
  for (u32 i = 0; i < 2; ++i) b[i] = b16[(2 * t + 8 * i) * 8 + g] | (u32)b16[(2 * t + 8 * i + 1) * 8 + g] << 16;
  float c[4];
  for (u32 i = 0; i < 4; ++i) c[i] = float_of(p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2]);
  if (p.option) mma_f16(c, a, b[0], b[1]);
  else mma_bf16(c, a, b[0], b[1]);
  for (u32 i = 0; i < 4; ++i) p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = bits_of(c[i]);
}

// The same product, its fragments fetched by matrix loads: A as stored, B transposed.
KERNEL_OF_WARPS(1) product_of_matrices(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u16* a16 = (u16*)shared;
  u16* b16 = a16 + 16 * 16;
  for (u32 i = lane_index(); i < (16 * 16 + 16 * 8) / 2; i += 32) ((u32*)shared)[i] = p.in[i];
  warp_barrier();
  u32 lane = lane_index();
  u32 a[4], b[4];
  load_matrices(a, a16 + (lane % 16) * 16 + lane / 16 * 8);
  load_matrices_transposed(b, b16 + (lane % 16) * 8);
  u32 g = lane / 4, t = lane % 4;
  float c[4];
  for (u32 i = 0; i < 4; ++i) c[i] = float_of(p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2]);
  if (p.option) mma_f16(c, a, b[0], b[1]);
  else mma_bf16(c, a, b[0], b[1]);
  for (u32 i = 0; i < 4; ++i) p.out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = bits_of(c[i]);
}

// Four 8x8 matrices of 16-bit words, stored one after the other, and every lane's four registers.
KERNEL_OF_WARPS(1) matrices(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  for (u32 i = lane_index(); i < 128; i += 32) ((u32*)shared)[i] = p.in[i];
  warp_barrier();
  u32 r[4];
  if (p.option) load_matrices_transposed(r, shared + lane_index() * 16);
  else load_matrices(r, shared + lane_index() * 16);
  for (u32 i = 0; i < 4; ++i) p.out[lane_index() * 4 + i] = r[i];
}

KERNEL_OF_WARPS(4) uninitialised(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  for (u32 i = thread_index(); i < p.n; i += 128) p.out[i] = ((u32*)shared)[i];
}

// Every thread's number goes around the block, a barrier between each two steps.
KERNEL_OF_WARPS(4) rotation(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32* values = (u32*)shared;
  u32 v = p.in[thread_index()];
  for (u32 i = 0; i < p.n; ++i) {
    values[thread_index()] = v;
    block_barrier();
    v = values[(thread_index() + 33) % 128];
    if (p.option == 0) block_barrier();  // without it the next round's writes overtake this round's reads
  }
  p.out[thread_index()] = v;
}

// Warps 0 and 1 hand numbers to warps 2 and 3 through one slot, with two named barriers: full and empty.
KERNEL_OF_WARPS(4) producer_consumer(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32* slot = (u32*)shared;
  if (warp_index() < 2) {
    for (u32 i = 0; i < p.n; ++i) {
      slot[thread_index()] = p.in[thread_index()] + i;
      group_barrier(1, 128);
      group_barrier(2, 128);
    }
  } else {
    u32 sum = 0;
    for (u32 i = 0; i < p.n; ++i) {
      group_barrier(1, 128);
      sum += slot[(thread_index() + 5) % 64] * (i + 1);
      group_barrier(2, 128);
    }
    p.out[thread_index() - 64] = sum;
  }
}

// Two pairs of warps that meet at different barriers, at different paces.
KERNEL_OF_WARPS(4) two_groups(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32* values = (u32*)shared;
  u32 group = warp_index() / 2, member = thread_index() % 64, v = p.in[thread_index()];
  for (u32 i = 0; i < p.n * (group + 1); ++i) {
    values[thread_index()] = v;
    group_barrier(1 + group, 64);
    v = values[group * 64 + (member + 31) % 64] + 1;
    group_barrier(1 + group, 64);
  }
  block_barrier();
  p.out[thread_index()] = v;
}

// Blocks in a chain, in the order of their tickets: each waits for its predecessor's words, one per lane.
KERNEL_OF_WARPS(1) chain(GRID_CONSTANT const Params p) {
  for (;;) {
    u32 ticket = 0;
    if (lane_index() == 0) ticket = fetch_add(p.counter, 1);
    ticket = from_lane(ticket, 0);
    if (ticket >= p.n) return;
    Word2 v = {1, lane_index()};
    if (ticket > 0) {
      const Word2* above = p.words + (ticket - 1) * 32 + lane_index();
      for (v = load_relaxed(above); v.a == 0; v = load_relaxed(above)) wait_a_little();
    }
    u32 right = from_lane_below(v.b);
    store_relaxed(p.words + ticket * 32 + lane_index(), Word2{v.a + 1, v.b * 3 + right + ticket});
  }
}

KERNEL_OF_WARPS(1) wide_chain(GRID_CONSTANT const Params p) {
  u32 ticket = 0;
  if (lane_index() == 0) ticket = fetch_add(p.counter, 1);
  ticket = from_lane(ticket, 0);
  Word4 v = {1, 2, 3, lane_index()};
  if (ticket > 0) {
    const Word4* above = p.wide + (ticket - 1) * 32 + lane_index();
    for (v = load_relaxed(above); v.a == 0; v = load_relaxed(above)) wait_a_little();
  }
  store_relaxed(p.wide + ticket * 32 + lane_index(), Word4{v.a + 1, v.b + v.a, v.c ^ v.b, v.d + v.c});
}

KERNEL_OF_WARPS(1) clear(GRID_CONSTANT const Params p) { clear_bits(p.counter, 1u << lane_index() & p.option); }

// A block writes data in plain stores, its first thread raises a flag; the next block's first thread sees the flag,
// then the whole block reads.
KERNEL_OF_WARPS(2) released_chain(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32* ticket = (u32*)shared;
  if (thread_index() == 0) *ticket = fetch_add(p.counter, 1);
  block_barrier();
  u32 me = *ticket;
  if (me > 0) {
    if (thread_index() == 0)
      while (load_acquire(p.counter + me) == 0) wait_a_little();
    if (!(p.option & 1)) block_barrier();
    else warp_barrier();
  }
  const float* above = (const float*)p.out + (me - 1) * 64;
  float v = me ? load_fresh(above + (thread_index() + 1) % 64) : (float)thread_index();
  p.out[me * 64 + thread_index()] = bits_of(v + 1.0f);
  if (!(p.option & 2)) block_barrier();
  if (thread_index() == 0) {
    if (p.option & 4) fetch_add(p.counter + me + 1, 1);  // seen by the poll, but orders nothing
    else store_release(p.counter + me + 1, 1);
  }
}

// Blocks take turns at adding in[k] to the same places, one float at a time and two: the first stores.
KERNEL_OF_WARPS(2) sums_in_turn(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32* ticket = (u32*)shared;
  if (thread_index() == 0) *ticket = fetch_add(p.counter, 1);
  block_barrier();
  const u32 me = *ticket;
  if (me > 0 && thread_index() == 0 && p.option == 0)
    while (load_acquire(p.counter + me) == 0) wait_a_little();
  block_barrier();
  float* single = (float*)p.out + thread_index();
  Float2* pair = (Float2*)(p.out + 64) + thread_index();
  const float part = float_of(p.in[me]);
  if (me == 0) {
    *single = part;
    *pair = Float2{part, -part};
  } else {
    add_to(single, part);
    add_to(pair, Float2{part, -part});
  }
  block_barrier();
  if (thread_index() == 0) store_release(p.counter + me + 1, 1);
}

// ---- what the memory model allows

// Lane `option` stores a word; lane 0 raises a flag in another word, in the manner of `n`; block 1 reads both.
KERNEL_OF_WARPS(1) message(GRID_CONSTANT const Params p) {
  u32 ticket = 0;
  if (lane_index() == 0) ticket = fetch_add(p.counter, 1);
  ticket = from_lane(ticket, 0);
  u32* flag = p.counter + 2;
  if (ticket == 0) {
    if (lane_index() == p.option) store_relaxed(p.words, Word2{7, 7});
    if (p.n == 2) warp_barrier();
    if (lane_index() == 0) {
      if (p.n == 0) store_relaxed((Word2*)flag, Word2{1, 1});
      else store_release(flag, 1);
    }
  } else if (lane_index() == 0) {
    while (load_acquire(flag) == 0) wait_a_little();
    p.out[0] = load_relaxed(p.words).a;
  }
}

// A thread sees its own words, and those of threads it has met at a barrier, and words of the same place in order.
KERNEL_OF_WARPS(2) coherent(GRID_CONSTANT const Params p) {
  for (u32 i = 0; i < p.n; ++i) {
    store_relaxed(p.words + thread_index(), Word2{2 * i, 0});
    store_relaxed(p.words + thread_index(), Word2{2 * i + 1, 0});
    if (load_relaxed(p.words + thread_index()).a != 2 * i + 1) fetch_add(p.counter, 1);
    block_barrier();
    if (load_relaxed(p.words + (thread_index() + 32) % 64).a != 2 * i + 1) fetch_add(p.counter, 1);
    block_barrier();
  }
}

// ---- what must be detected

// A lane's neighbour reads what the lane wrote.
KERNEL_OF_WARPS(1) neighbours(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32 lane = lane_index(), other = (lane + 1) % 32, v = 0;
  u32* values = (u32*)shared;
  values[lane] = lane;
  if (p.option == 0) warp_barrier();
  if (p.option == 2) v = from_lane_xor(lane, 1);  // meets the others, but orders no memory
  v += values[p.option == 4 ? lane : other];
  if (p.option == 3) values[lane] = v;
  if (p.option == 5) p.out[0] = 1;
  p.out[lane] = v;
}

// Lanes of all warps write next to each other, in halves and in bytes: no two touch the same byte.
KERNEL_OF_WARPS(2) close_together(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  ((u16*)shared)[thread_index()] = (u16)thread_index();
  (shared + 128)[thread_index()] = (u8)thread_index();
  block_barrier();
  p.out[thread_index()] = ((u16*)shared)[63 - thread_index()] + (shared + 128)[63 - thread_index()];
}

// A word that other blocks poll, but stored plainly.
KERNEL_OF_WARPS(1) plain_word(GRID_CONSTANT const Params p) {
  u32 ticket = 0;
  if (lane_index() == 0) ticket = fetch_add(p.counter, 1);
  ticket = from_lane(ticket, 0);
  if (lane_index()) return;
  if (ticket == 0) p.words[0] = Word2{1, 1};
  else p.out[0] = load_relaxed(p.words).a;
}

KERNEL_OF_WARPS(1) diverges(GRID_CONSTANT const Params p) {
  u32 lane = lane_index(), v = lane;
  if (p.option == 0 && lane == 5) {
    warp_barrier();
  } else if (p.option == 1 && lane == 5) {
    v = from_lane_xor(v, 1);
  } else if (p.option == 2 && lane == 5) {
    return;
  }
  v = from_lane_xor(v, 1);
  if (p.option == 3 && lane == 7) return;
  if (p.option == 4) group_barrier(1 + (lane == 9), 32);
  p.out[lane] = from_lane(v, 0);
}

KERNEL_OF_WARPS(1) touches(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  i32 at = (i32)p.n;
  if (lane_index() != 3) return;
  if (p.option == 0) p.out[at] = 1;
  if (p.option == 1) p.out[0] = p.in[at];
  if (p.option == 2) ((u32*)shared)[at] = 1;
  if (p.option == 3) p.out[0] = ((u32*)shared)[at];
  if (p.option == 4) store_relaxed((Word2*)((u32*)p.words + at), Word2{1, 1});
}

struct TwoArrays {
  u32 first[8], second[8];
};
KERNEL_OF_WARPS(1) undefined(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  TwoArrays& arrays = *(TwoArrays*)shared;
  u32 local[4] = {1, 2, 3, 4};
  if (p.option == 0) arrays.first[p.n] = 1;  // still inside shared memory
  if (p.option == 1) p.out[0] = local[p.n];
  if (p.option == 2) p.out[0] = 1u << p.n;
  if (p.option == 3) p.out[0] = (u32)(i32)((float)p.n * 1e9f);
  if (p.option == 4) p.out[0] = (u32)*(const u64*)((const u8*)p.in + p.n);
  if (p.option == 5) p.out[0] = 7 / p.n;
}

KERNEL_OF_WARPS(1) loads_matrices_at(GRID_CONSTANT const Params p) {
  SHARED_MEMORY(shared);
  u32 r[4];
  load_matrices(r, shared + lane_index() * 16 + p.n);
  p.out[lane_index()] = r[0];
}

// All blocks of the grid must be resident at once for this to end: no ticket orders them.
KERNEL_OF_WARPS(1) grid_barrier(GRID_CONSTANT const Params p) {
  if (lane_index() == 0) {
    fetch_add(p.counter, 1);
    while (load_acquire(p.counter) < p.n) wait_a_little();
  }
  warp_barrier();
}

KERNEL_OF_WARPS(2) lonely_barrier(GRID_CONSTANT const Params p) {
  if (p.option == 0 && warp_index() == 0) group_barrier(3, 64);
  if (p.option == 1) group_barrier(3, warp_index() ? 96 : 64);
  if (p.option == 2) group_barrier(p.n, 64);
  if (p.option == 3 && warp_index() == 0) block_barrier();  // the other warp returns: that counts as having been here
}

KERNEL_OF_WARPS(1) endless(GRID_CONSTANT const Params p) {
  for (u32 i = 0; p.option == 0 || from_lane(i, 0) + 1; ++i) *(volatile u32*)p.out = i;
}

#ifndef __CUDACC_RTC__
DEVICE __attribute__((noinline)) u32 recursion(u32 depth) {
  volatile u32 frame[256];
  frame[depth % 256] = depth;
  return depth == 0 ? 0 : recursion(depth - 1) + frame[depth % 256];
}
KERNEL_OF_WARPS(1) deep(GRID_CONSTANT const Params p) { p.out[0] = recursion(p.n); }
#endif
