// The names of primitives.cuh for the host: the same signatures and meanings over the fibers of scheduler.h.
//
// A kernel source whose include of primitives.cuh is replaced by this file builds as a shared library. Where a
// primitive is a call of a hardware instruction, the PTX manual's definition is followed to the bit, except that the
// approximate 2^x and 1/x are correctly rounded or nearly so, and that a matrix product is summed in the order of k.
// Plain arithmetic is this machine's: the bits of a NaN differ (a GPU makes 0x7fffffff of every one, x86 keeps those
// of the operand), and a product and a sum written apart are not fused.
#pragma once

#include <math.h>

#include "pending_stores.h"
#include "races.h"
#include "scheduler.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

#define KERNEL extern "C" __attribute__((used)) void
#define DEVICE static inline __attribute__((unused))
#define METHOD inline __attribute__((unused))
#define DEVICE_CALL static __attribute__((noinline, unused))
#define THREADS_PER_BLOCK(threads, blocks_per_sm)
#define GRID_CONSTANT
#define UNROLL
#define UNROLL_BY(count)
// Inside a function only: every block has its own buffer.
#define SHARED_MEMORY(name) u8* const name = (u8*)emulator::machine.current->warp->block->shared

// Filled in by the compiler with the place of the call.
#define EMULATOR_SITE const char *file = __builtin_FILE(), u32 line = __builtin_LINE()

// ---- what CUDA C++ brings without a header
DEVICE i32 min(i32 a, i32 b) { return b < a ? b : a; }
DEVICE u32 min(u32 a, u32 b) { return b < a ? b : a; }
DEVICE i64 min(i64 a, i64 b) { return b < a ? b : a; }
DEVICE u64 min(u64 a, u64 b) { return b < a ? b : a; }
DEVICE float min(float a, float b) { return fminf(a, b); }
DEVICE double min(double a, double b) { return fmin(a, b); }
DEVICE i32 max(i32 a, i32 b) { return a < b ? b : a; }
DEVICE u32 max(u32 a, u32 b) { return a < b ? b : a; }
DEVICE i64 max(i64 a, i64 b) { return a < b ? b : a; }
DEVICE u64 max(u64 a, u64 b) { return a < b ? b : a; }
DEVICE float max(float a, float b) { return fmaxf(a, b); }
DEVICE double max(double a, double b) { return fmax(a, b); }

// ---- who am I
DEVICE u32 block_index() { return emulator::machine.current->warp->block->index; }
DEVICE u32 thread_index() { return emulator::machine.current->thread; }
DEVICE i32 opaque(i32 v) { return v; }
DEVICE u32 thread_index_opaque() { return thread_index(); }
DEVICE u32 lane_index() { return emulator::machine.current->thread & 31u; }
DEVICE u32 warp_index() { return emulator::machine.current->thread >> 5; }

// ---- bits
DEVICE u32 bits_of(float v) { u32 r; memcpy(&r, &v, 4); return r; }
DEVICE float float_of(u32 v) { float r; memcpy(&r, &v, 4); return r; }
DEVICE u64 bits_of(double v) { u64 r; memcpy(&r, &v, 8); return r; }
DEVICE double double_of(u64 v) { double r; memcpy(&r, &v, 8); return r; }
DEVICE float half_to_float(u16 v) {
  u32 sign = (u32)(v & 0x8000u) << 16, exponent = v >> 10 & 31u, fraction = v & 0x3ffu;
  if (exponent == 31) return fraction ? float_of(0x7fffffffu) : float_of(sign | 0x7f800000u);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | fraction << 13);
  float magnitude = (float)fraction * 0x1p-24f;
  return sign ? -magnitude : magnitude;
}
DEVICE u16 float_to_half(float v) {
  u32 bits = bits_of(v), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return (u16)(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 0.5 = 2^23 spacings of 2^-24 rounds there, to nearest even.
    float shifted = float_of(magnitude) + 0.5f;
    return (u16)(sign | (bits_of(shifted) - bits_of(0.5f)));
  }
  u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return (u16)(sign | (rounded - (112u << 23)) >> 13);
}

// ---- arithmetic with a hardware form
namespace emulator {
DEVICE float flushed(float v) { return fabsf(v) < 0x1p-126f ? copysignf(0.0f, v) : v; }  // NaN stays
}
DEVICE float exp2_fast(float v) { return emulator::flushed(exp2f(emulator::flushed(v))); }
// A quarter of a unit in the last place too small in the mean: hardware is allowed that and has some of it, and what
// adds up over many steps must not depend on it.
DEVICE float reciprocal_fast(float v) { return emulator::flushed((float)(1.0 / (double)emulator::flushed(v) * (1.0 - 1.5e-8))); }
// The operand that is not NaN, signalling NaN included, which the C library sees differently; +0 is above -0.
DEVICE float max_of(float a, float b) {
  if (isnan(a)) return isnan(b) ? float_of(0x7fffffffu) : b;
  return isnan(b) || a > b || (a == b && signbit(b)) ? a : b;
}
DEVICE float min_of(float a, float b) {
  if (isnan(a)) return isnan(b) ? float_of(0x7fffffffu) : b;
  return isnan(b) || a < b || (a == b && signbit(a)) ? a : b;
}
DEVICE float max_or_nan(float a, float b) { return isnan(a) || isnan(b) ? float_of(0x7fffffffu) : max_of(a, b); }
DEVICE float absolute(float v) { return __builtin_fabsf(v); }
DEVICE float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return __builtin_fma(a, b, c); }
DEVICE float multiply(float a, float b) { return a * b; }  // built with -ffp-contract=off
DEVICE double exp2_exact(double v) { return exp2(v); }
DEVICE double log2_exact(double v) { return log2(v); }
DEVICE double round_nearest(double v) { return rint(v); }
DEVICE i32 min_of3(i32 a, i32 b, i32 c) { return min(min(a, b), c); }
DEVICE i64 min_of3(i64 a, i64 b, i64 c) { return min(min(a, b), c); }
DEVICE i32 add_then_min(i32 a, i32 b, i32 limit) { return min((i32)((u32)a + (u32)b), limit); }
DEVICE i64 add_then_min(i64 a, i64 b, i64 limit) { return min((i64)((u64)a + (u64)b), limit); }

// ---- lanes of a warp
DEVICE void warp_barrier(EMULATOR_SITE) {
  emulator::warp_meeting(emulator::machine.current, file, line);
}
namespace emulator {
template <class T> DEVICE T shuffle(T v, u32 source, Operation operation, const char* file, u32 line) {
  static_assert(!__is_class(T) && sizeof(T) <= 8, "shuffles move numbers of at most 8 bytes");
  Lane* me = machine.current;
  Exchange* exchange = exchange_of(me);
  memcpy(exchange->words[me->thread & 31u], &v, sizeof v);
  collective(me, operation, file, line);
  memcpy(&v, exchange->words[source], sizeof v);
  return v;
}
}  // namespace emulator
template <class T> DEVICE T from_lane_above(T v, EMULATOR_SITE) {
  u32 lane = lane_index();
  return emulator::shuffle(v, lane ? lane - 1 : 0, emulator::Operation::from_lane_above, file, line);
}
template <class T> DEVICE T from_lane_below(T v, EMULATOR_SITE) {
  u32 lane = lane_index();
  return emulator::shuffle(v, lane < 31 ? lane + 1 : 31, emulator::Operation::from_lane_below, file, line);
}
template <class T> DEVICE T from_lane(T v, u32 lane, EMULATOR_SITE) {
  return emulator::shuffle(v, lane & 31u, emulator::Operation::from_lane, file, line);
}
template <class T> DEVICE T from_lane_xor(T v, u32 mask, EMULATOR_SITE) {
  return emulator::shuffle(v, (lane_index() ^ mask) & 31u, emulator::Operation::from_lane_xor, file, line);
}
DEVICE bool any_lane(bool v, EMULATOR_SITE) {
  u32 any = v;
  for (u32 mask = 16; mask > 0; mask /= 2)
    any |= emulator::shuffle(any, lane_index() ^ mask, emulator::Operation::any_lane, file, line);
  return any != 0;
}
DEVICE u32 lanes_where(bool v, EMULATOR_SITE) {
  u32 bits = (u32)v << lane_index();
  for (u32 mask = 16; mask > 0; mask /= 2)
    bits |= emulator::shuffle(bits, lane_index() ^ mask, emulator::Operation::any_lane, file, line);
  return bits;
}
DEVICE i32 highest_bit(u32 v) { return 31 - __builtin_clz(v); }

// ---- warps of a block
DEVICE void block_barrier(EMULATOR_SITE) {
  emulator::block_rendezvous({emulator::Operation::block_barrier, line, file}, 0, emulator::machine.options.threads);
}
DEVICE void group_barrier(u32 id, u32 threads, EMULATOR_SITE) {
  emulator::block_rendezvous({emulator::Operation::group_barrier, line, file}, id, threads);
}

// ---- blocks of a grid
struct alignas(8) Word2 { u32 a, b; };
struct alignas(16) Word4 { u32 a, b, c, d; };
#ifdef EMULATOR_RACES
#define OUT_OF_LINE __attribute__((noinline))  // so that the return address is a place in the kernel
#else
#define OUT_OF_LINE
#endif
namespace emulator {
template <class T> DEVICE void check_aligned(const T* p, Operation operation, const char* file, u32 line) {
  if ((uintptr_t)p % sizeof(T) == 0) return;
  append("misaligned address: ");
  append_who(machine.current);
  append(" calls ");
  append_site({operation, line, file});
  append(" with %p, a multiple of %zu is needed", (const void*)p, sizeof(T));
  leave();
}
template <class T>
UNWATCHED OUT_OF_LINE DEVICE T observed_load(const T* p, Operation operation, const char* file, u32 line) {
  observe(operation, file, line);
  check_aligned(p, operation, file, line);
  watch(p, sizeof *p, false, operation != Operation::load_fresh, __builtin_return_address(0));
  T v;
  memcpy(&v, p, sizeof v);
  if (machine.pending_count) see_own_stores(machine.current, p, &v, sizeof v);
  if (operation == Operation::load_acquire) watch_acquire(p);
  return v;
}
template <class T>
UNWATCHED OUT_OF_LINE DEVICE void observed_store(T* p, T v, Operation operation, const char* file, u32 line) {
  observe(operation, file, line);
  check_aligned(p, operation, file, line);
  watch(p, sizeof v, true, true, __builtin_return_address(0));
  if (machine.options.relaxed && operation == Operation::store_relaxed) {
    delay_store(machine.current, p, &v, sizeof v);
    return;
  }
  if (machine.pending_count) {
    if (operation == Operation::store_release) deliver_preceding(machine.current);
    deliver_overlapping(p, sizeof v);
  }
  if (operation == Operation::store_release) watch_release(p);
  memcpy(p, &v, sizeof v);
  ++machine.epoch;
}
template <class Change>
UNWATCHED OUT_OF_LINE DEVICE u32 observed_change(u32* p, Change change, Operation operation, const char* file,
                                                 u32 line) {
  observe(operation, file, line);
  check_aligned(p, operation, file, line);
  watch(p, sizeof *p, true, true, __builtin_return_address(0));
  deliver_overlapping(p, sizeof *p);
  u32 old = *p;
  *p = change(old);
  ++machine.epoch;
  return old;
}
template <class T> UNWATCHED OUT_OF_LINE DEVICE void observed_add(T* p, T v, const char* file, u32 line) {
  observe(Operation::add_to, file, line);
  check_aligned(p, Operation::add_to, file, line);
  watch(p, sizeof v, true, false, __builtin_return_address(0));  // additions that nothing orders are a race
  deliver_overlapping(p, sizeof v);
  float* sum = (float*)p;
  const float* part = (const float*)&v;
  for (u32 i = 0; i < sizeof v / sizeof *sum; ++i) sum[i] = flushed(flushed(sum[i]) + flushed(part[i]));
  ++machine.epoch;
}
}  // namespace emulator
DEVICE Word2 load_relaxed(const Word2* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_relaxed, file, line);
}
DEVICE void store_relaxed(Word2* p, Word2 v, EMULATOR_SITE) {
  emulator::observed_store(p, v, emulator::Operation::store_relaxed, file, line);
}
DEVICE Word4 load_relaxed(const Word4* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_relaxed, file, line);
}
DEVICE void store_relaxed(Word4* p, Word4 v, EMULATOR_SITE) {
  emulator::observed_store(p, v, emulator::Operation::store_relaxed, file, line);
}
DEVICE void wait_a_little(EMULATOR_SITE) { emulator::poll_failed(file, line); }
DEVICE void stop_waiting(const char* source, const char* what, i32 pair, i32 strip, i32 awaited, i32 place) {
  emulator::append("%s kernel, pair %d, strip %d, ", source, pair, strip);
  emulator::append_who(emulator::machine.current);
  emulator::append(" waits for %s: strip %d of the walk, place %d", what, awaited, place);
  emulator::leave();
}
DEVICE u32 fetch_add(u32* p, u32 v, EMULATOR_SITE) {
  return emulator::observed_change(p, [v](u32 old) { return old + v; }, emulator::Operation::fetch_add, file, line);
}
DEVICE void clear_bits(u32* p, u32 mask, EMULATOR_SITE) {
  emulator::observed_change(p, [mask](u32 old) { return old & ~mask; }, emulator::Operation::clear_bits, file, line);
}
DEVICE void raise_to(u32* p, u32 v, EMULATOR_SITE) {
  emulator::observed_change(p, [v](u32 old) { return old > v ? old : v; }, emulator::Operation::raise_to, file, line);
}
DEVICE u32 load_acquire(const u32* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_acquire, file, line);
}
DEVICE void store_release(u32* p, u32 v, EMULATOR_SITE) {
  emulator::observed_store(p, v, emulator::Operation::store_release, file, line);
}
DEVICE float load_fresh(const float* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_fresh, file, line);
}
DEVICE double load_fresh(const double* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_fresh, file, line);
}
struct alignas(8) Float2 { float a, b; };
DEVICE Float2 load_fresh(const Float2* p, EMULATOR_SITE) {
  return emulator::observed_load(p, emulator::Operation::load_fresh, file, line);
}
DEVICE float as_added(float v) { return __builtin_fabsf(v) < 1.17549435e-38f ? 0.0f : v; }
DEVICE void add_to(float* p, float v, EMULATOR_SITE) { emulator::observed_add(p, v, file, line); }
DEVICE void add_to(Float2* p, Float2 v, EMULATOR_SITE) { emulator::observed_add(p, v, file, line); }

// ---- tensor cores
namespace emulator {
typedef float Vector8 __attribute__((vector_size(32)));

DEVICE float bf16_to_float(u16 v) { return float_of((u32)v << 16); }

// Run by the last lane to arrive: exchange->product += A B, where lane l of group g = l / 4, t = l % 4 holds
//   a[0] = A(g, 2t..2t+1)  a[1] = A(g+8, 2t..)  a[2] = A(g, 2t+8..)  a[3] = A(g+8, 2t+8..)
//   b0 = B(2t..2t+1, g)    b1 = B(2t+8.., g)    c = C(g, 2t), C(g, 2t+1), C(g+8, 2t), C(g+8, 2t+1)
// with the element of smaller k in the low half.
template <float (*widen)(u16)> __attribute__((noinline)) void multiply(Exchange* exchange) {
  float a[16][16];
  alignas(32) float b[16][8];
  for (u32 lane = 0; lane < WARP; ++lane) {
    const u32* words = exchange->words[lane];
    u32 g = lane / 4, k = lane % 4 * 2;
    for (u32 half = 0; half < 2; ++half)
      for (u32 low = 0; low < 2; ++low) {
        u32 pair = words[half * 2 + low];
        a[g + low * 8][k + half * 8] = widen((u16)pair);
        a[g + low * 8][k + half * 8 + 1] = widen((u16)(pair >> 16));
      }
    for (u32 half = 0; half < 2; ++half) {
      b[k + half * 8][g] = widen((u16)words[4 + half]);
      b[k + half * 8 + 1][g] = widen((u16)(words[4 + half] >> 16));
    }
    memcpy(&exchange->product[g][k], &words[6], 8);
    memcpy(&exchange->product[g + 8][k], &words[8], 8);
  }
  for (u32 row = 0; row < 16; ++row) {
    Vector8 sum;
    memcpy(&sum, exchange->product[row], sizeof sum);
    for (u32 k = 0; k < 16; ++k) {
      Vector8 column;
      memcpy(&column, b[k], sizeof column);
      sum += a[row][k] * column;
    }
    memcpy(exchange->product[row], &sum, sizeof sum);
  }
}

template <float (*widen)(u16)>
DEVICE void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  Lane* me = machine.current;
  Exchange* exchange = exchange_of(me);
  u32 lane = me->thread & 31u;
  u32* words = exchange->words[lane];
  memcpy(words, a, 16);
  words[4] = b0;
  words[5] = b1;
  memcpy(words + 6, c, 16);
  if (rendezvous(me, site, 0)) {
    multiply<widen>(exchange);
    preempt_sometimes(1);
  }
  memcpy(c, &exchange->product[lane / 4][lane % 4 * 2], 8);
  memcpy(c + 2, &exchange->product[lane / 4 + 8][lane % 4 * 2], 8);
}

DEVICE u32 to_bf16(float v) {
  u32 bits = bits_of(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// The 16 bytes that each lane's address points to, exchanged among the lanes.
DEVICE Exchange* exchange_rows(const void* row, Operation operation, const char* file, u32 line) {
  Lane* me = machine.current;
  const char* begin = me->warp->block->shared;
  const char* address = (const char*)row;
  if ((uintptr_t)address % 16 || address < begin || address + 16 > begin + machine.options.shared_bytes) {
    append("bad address: ");
    append_who(me);
    append(" calls ");
    append_site({operation, line, file});
    append(" with shared memory %+lld; 16 bytes at a multiple of 16 inside its %u bytes are needed",
           (long long)(address - begin), machine.options.shared_bytes);
    leave();
  }
  Exchange* exchange = exchange_of(me);
  memcpy(exchange->words[me->thread & 31u], row, 16);
  collective(me, operation, file, line);
  return exchange;
}
}  // namespace emulator

#if __CUDA_ARCH__ >= 800
DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  emulator::product<emulator::bf16_to_float>(c, a, b0, b1, {emulator::Operation::mma_bf16, line, file});
}
DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, EMULATOR_SITE) {
  emulator::product<half_to_float>(c, a, b0, b1, {emulator::Operation::mma_f16, line, file});
}
DEVICE u32 pack_bf16(float low, float high) { return emulator::to_bf16(high) << 16 | emulator::to_bf16(low); }
DEVICE u32 pack_f16(float low, float high) { return (u32)float_to_half(high) << 16 | float_to_half(low); }
#endif
DEVICE void load_matrices(u32 (&r)[4], const void* row, EMULATOR_SITE) {
  emulator::Exchange* exchange =
      emulator::exchange_rows(row, emulator::Operation::load_matrices, file, line);
  u32 lane = lane_index();
  for (u32 i = 0; i < 4; ++i) r[i] = exchange->words[8 * i + lane / 4][lane % 4];
}
DEVICE void load_matrices_transposed(u32 (&r)[4], const void* row, EMULATOR_SITE) {
  emulator::Exchange* exchange =
      emulator::exchange_rows(row, emulator::Operation::load_matrices_transposed, file, line);
  u32 lane = lane_index();
  for (u32 i = 0; i < 4; ++i) {
    u16 low, high;
    memcpy(&low, (const u8*)exchange->words[8 * i + lane % 4 * 2] + lane / 4 * 2, 2);
    memcpy(&high, (const u8*)exchange->words[8 * i + lane % 4 * 2 + 1] + lane / 4 * 2, 2);
    r[i] = (u32)high << 16 | low;
  }
}

// The driver adds one of these for every kernel of the source.
namespace emulator {
template <class Params> DEVICE void call(void (*kernel)(Params), const void* params) {
  kernel(*(const Params*)params);
}
template <class Params> constexpr u32 bytes_of_params(void (*)(Params)) { return sizeof(Params); }
}  // namespace emulator
#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default"), used))
