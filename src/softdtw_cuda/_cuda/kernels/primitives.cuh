// Everything that only a GPU can do, behind names that the kernels read like prose.
//
// The kernels include nothing else, so whoever supplies these names can run them: the test suite builds the same
// kernel sources for the host over its own version of this file (each lane a fiber) and checks every index and every
// hand-off without a GPU. Keep this file free of arithmetic that belongs to the recurrence.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE __device__ __forceinline__
#define METHOD __device__ __forceinline__  // the same, inside a struct
#define DEVICE_CALL __device__ __noinline__  // one copy, for what is rarely run: quicker to compile
#define THREADS_PER_BLOCK(threads, blocks_per_sm) __launch_bounds__(threads, blocks_per_sm)
#define GRID_CONSTANT __grid_constant__
#define UNROLL _Pragma("unroll")
#define UNROLL_BY(count) _Pragma(SOFTDTW_STRING(unroll count))
#define SOFTDTW_STRING(text) #text
// All shared memory of a block is one dynamic allocation; kernels carve it up by byte offset.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]

// ---- who am I
DEVICE u32 block_index() { return blockIdx.x; }
DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 lane_index() { return threadIdx.x & 31u; }
DEVICE u32 warp_index() { return threadIdx.x >> 5; }

// The same value, opaque to the compiler: what is computed from it is recomputed instead of being kept in registers from one
// iteration of a loop to the next.
DEVICE i32 opaque(i32 v) { asm volatile("" : "+r"(v)); return v; }
DEVICE u32 thread_index_opaque() { u32 v; asm volatile("mov.u32 %0,%%tid.x;" : "=r"(v)); return v; }

// ---- bits
DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float float_of(u32 v) { return __uint_as_float(v); }
DEVICE u64 bits_of(double v) { return (u64)__double_as_longlong(v); }
DEVICE double double_of(u64 v) { return __longlong_as_double((i64)v); }
DEVICE float half_to_float(u16 v) { float r; asm("cvt.f32.f16 %0,%1;" : "=f"(r) : "h"(v)); return r; }
DEVICE u16 float_to_half(float v) { u16 r; asm("cvt.rn.f16.f32 %0,%1;" : "=h"(r) : "f"(v)); return r; }

// ---- arithmetic with a hardware form
DEVICE float exp2_fast(float v) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v)); return r; }
DEVICE float reciprocal_fast(float v) { float r; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(v)); return r; }
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }  // the operand that is not NaN
DEVICE float min_of(float a, float b) { return fminf(a, b); }
DEVICE float max_or_nan(float a, float b) { float r; asm("max.NaN.f32 %0,%1,%2;" : "=f"(r) : "f"(a), "f"(b)); return r; }  // from 8.0 on
DEVICE float absolute(float v) { return fabsf(v); }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }  // never fused with a sum
DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
DEVICE double exp2_exact(double v) { return exp2(v); }
DEVICE double log2_exact(double v) { return log2(v); }
DEVICE double round_nearest(double v) { return rint(v); }
DEVICE i32 min_of3(i32 a, i32 b, i32 c) { return min(min(a, b), c); }
DEVICE i64 min_of3(i64 a, i64 b, i64 c) { return min(min(a, b), c); }
#if __CUDA_ARCH__ >= 900
DEVICE i32 add_then_min(i32 a, i32 b, i32 limit) { return __viaddmin_s32(a, b, limit); }
#else
DEVICE i32 add_then_min(i32 a, i32 b, i32 limit) { return min(a + b, limit); }
#endif
DEVICE i64 add_then_min(i64 a, i64 b, i64 limit) { return min(a + b, limit); }

// ---- lanes of a warp
DEVICE void warp_barrier() { __syncwarp(); }
template <class T> DEVICE T from_lane_above(T v) { return __shfl_up_sync(0xffffffffu, v, 1); }    // lane 0 keeps its own
template <class T> DEVICE T from_lane_below(T v) { return __shfl_down_sync(0xffffffffu, v, 1); }  // lane 31 keeps its own
template <class T> DEVICE T from_lane(T v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
template <class T> DEVICE T from_lane_xor(T v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE bool any_lane(bool v) { return __any_sync(0xffffffffu, v); }
DEVICE u32 lanes_where(bool v) { return __ballot_sync(0xffffffffu, v); }  // bit by bit
DEVICE i32 highest_bit(u32 v) { return 31 - __clz((i32)v); }

// ---- warps of a block
DEVICE void block_barrier() { __syncthreads(); }
// Barrier `id` (1 to 15) among `threads` threads, whole warps, of the block.
DEVICE void group_barrier(u32 id, u32 threads) { asm volatile("bar.sync %0,%1;" ::"r"(id), "r"(threads) : "memory"); }

// Raises a word of shared memory to `v` if that is larger; the result does not depend on the order.
DEVICE void raise_to(u32* p, u32 v) { atomicMax(p, v); }

// ---- blocks of a grid
// Words that other blocks poll: relaxed, one indivisible access each, never cached in L1, so no fence is needed when
// the word itself says whether it is valid.
struct alignas(8) Word2 { u32 a, b; };
struct alignas(16) Word4 { u32 a, b, c, d; };
DEVICE Word2 load_relaxed(const Word2* p) {
  Word2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1},[%2];" : "=r"(v.a), "=r"(v.b) : "l"(p) : "memory");
  return v;
}
DEVICE void store_relaxed(Word2* p, Word2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v.a), "r"(v.b) : "memory");
}
// 16 bytes at a time, for speed; users rely on 8-byte halves being indivisible and no more, since the assembler narrows
// an access of which a part is not used.
DEVICE Word4 load_relaxed(const Word4* p) {
  u64 lo, hi;
  asm volatile("{.reg .b128 t; ld.relaxed.gpu.global.b128 t,[%2]; mov.b128 {%0,%1},t;}" : "=l"(lo), "=l"(hi) : "l"(p) : "memory");
  return Word4{(u32)lo, (u32)(lo >> 32), (u32)hi, (u32)(hi >> 32)};
}
DEVICE void store_relaxed(Word4* p, Word4 v) {
  u64 lo = v.a | ((u64)v.b << 32), hi = v.c | ((u64)v.d << 32);
  asm volatile("{.reg .b128 t; mov.b128 t,{%1,%2}; st.relaxed.gpu.global.b128 [%0],t;}" ::"l"(p), "l"(lo), "l"(hi) : "memory");
}
// Called once per failed poll.
DEVICE void wait_a_little() {}
// Ends the launch with an error, and says who waited for whom: for debug builds, see polling.cuh.
DEVICE void stop_waiting(const char* source, const char* what, i32 pair, i32 strip, i32 awaited, i32 place) {
  printf("softdtw_cuda: %s kernel, pair %d, strip %d, block %d, warp %d waits for %s: strip %d of the walk, place %d\n", source, pair,
         strip, (i32)blockIdx.x, (i32)(threadIdx.x >> 5), what, awaited, place);
  __trap();
}
DEVICE u32 fetch_add(u32* p, u32 v) { return atomicAdd(p, v); }
DEVICE void clear_bits(u32* p, u32 mask) { atomicAnd(p, ~mask); }
DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store_release(u32* p, u32 v) { asm volatile("st.release.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
// Loads that must see what another block stored before a flag that this thread (or one it has a barrier with) acquired.
DEVICE float load_fresh(const float* p) { return __ldcg(p); }
DEVICE double load_fresh(const double* p) { return __ldcg(p); }
struct alignas(8) Float2 { float a, b; };
DEVICE Float2 load_fresh(const Float2* p) {
  float2 v = __ldcg((const float2*)p);
  return Float2{v.x, v.y};
}
// Adds to memory without waiting for what is there. The order in which threads add to one place is theirs to settle: each
// must see a flag that the one before released, as for load_fresh. One thread's own additions keep their order. Subnormal
// numbers count as zeros.
DEVICE void add_to(float* p, float v) { asm volatile("red.relaxed.gpu.global.add.f32 [%0],%1;" ::"l"(p), "f"(v) : "memory"); }
// What adding to zero would leave there.
DEVICE float as_added(float v) { float r; asm("add.ftz.f32 %0,%1,0f00000000;" : "=f"(r) : "f"(v)); return r; }
DEVICE void add_to(Float2* p, Float2 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0],{%1,%2};" ::"l"(p), "f"(v.a), "f"(v.b) : "memory");
#else
  add_to(&p->a, v.a);
  add_to(&p->b, v.b);
#endif
}

// ---- tensor cores: D(16x8) += A(16x16) B(16x8), bf16 in, float32 accumulators, the fragments of PTX's mma.m16n8k16
#if __CUDA_ARCH__ >= 800
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Two floats rounded to nearest into one register of two 16-bit floats: `low` in the low half.
DEVICE u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEVICE u32 pack_f16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
#endif
// Four 8x8 matrices of 16-bit words from shared memory; lane l supplies the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&r)[4], const void* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row) {
  u32 address = (u32)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
