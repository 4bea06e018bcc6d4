// Scaled numbers Z = f * 2^-n, and the arithmetic of eqs. (5) to (7) on them.
//
// Narrow numbers never hold f = 0: "no path" is n = NO_PATH with any ordinary f, and a term shifted past MAX_SHIFT
// weighs 2^-100 of the largest, far below the last bit of any sum. That lets a shift be one integer multiply-add on
// the float's bits. Wide numbers shift by multiplication, so that zeros and NaN mean what they should.
#pragma once

#if WIDE
typedef double real;
typedef i64 exponent;
#define NO_PATH ((i64)1 << 60)
#define FORBIDDEN_FROM 4503599627370496.0  // 2^52: beyond it a cost forbids its cell, as +inf does
#define MAX_SHIFT ((i64)1023)
#define EMPTY_FRACTION 0.0
static_assert(BANDED, "wide kernels allow for forbidden cells");
#else
typedef float real;
typedef i32 exponent;
#define NO_PATH (1 << 30)
#define FORBIDDEN_FROM 4194304.0f  // 2^22, the end of the rounding trick's range
#define MAX_SHIFT 100
#define EMPTY_FRACTION 1.0f
#endif

struct Scaled { real f; exponent n; };
struct Weight { real v; exponent n; };                         // 2^-s as v * 2^-n, v within [0.7, 1.42]: eq. (6)
struct Terms { real up, left, diagonal; exponent m; };         // of eq. (5), brought to the exponent m
struct Shares { real up, left, diagonal; };                    // of eq. (7)

DEVICE Scaled no_path() { return Scaled{(real)EMPTY_FRACTION, (exponent)NO_PATH}; }
DEVICE Scaled one() { return Scaled{(real)1, (exponent)0}; }

#if WIDE
DEVICE double shifted(double f, i64 k) { return f * double_of((u64)(1023 - k) << 52); }  // k = 1023 gives exactly zero
DEVICE Weight weight_of(double s) {
  if (s != s || s < -FORBIDDEN_FROM) return Weight{(s - s) / (s - s), 0};  // NaN poisons the sample; so does what is as good as -inf
  if (s >= FORBIDDEN_FROM) return Weight{0.0, NO_PATH};
  double whole = round_nearest(s);
  return Weight{exp2_exact(whole - s), (i64)whole};
}
DEVICE void renormalize(Scaled& z) {
  i64 e = (i64)((bits_of(z.f) >> 52) & 2047) - 1023;
  if (e == -1023 || e == 1024) return;  // zero or NaN
  z.f = double_of(bits_of(z.f) - ((u64)e << 52));
  z.n = add_then_min(z.n, -e, (i64)NO_PATH);
}
// A sum of zero has no predecessor and passes nothing on.
DEVICE Shares shares_of(const Terms& t, double sum) {
  if (sum == 0.0) return Shares{0.0, 0.0, 0.0};
  return Shares{t.up / sum, t.left / sum, t.diagonal / sum};
}
#else
DEVICE float shifted(float f, i32 k) { return float_of(bits_of(f) - ((u32)k << 23)); }
DEVICE Weight weight_of(float s) {
  bool forbidden = false;
  if constexpr (BANDED) {
    forbidden = !(s < FORBIDDEN_FROM);
    s = min_of(s, FORBIDDEN_FROM);
  }
  // Adding 1.5 * 2^23 leaves round(s) in the low bits of the sum.
  const float magic = 12582912.0f;
  float shifted_s = s + magic;
  i32 whole = (i32)(bits_of(shifted_s) - bits_of(magic));
  float v = exp2_fast((shifted_s - magic) - s);
  if constexpr (BANDED) whole = forbidden ? NO_PATH - 1 : whole;  // added to NO_PATH it just fits 32 bits
  return Weight{v, whole};
}
// Moves f's exponent into n; done every 16 steps, in which f grows by 4.3^16 = 2^34 at most.
DEVICE void renormalize(Scaled& z) {
  i32 e = (i32)(bits_of(z.f) >> 23) - 127;
  z.f = float_of(bits_of(z.f) - ((u32)e << 23));
  z.n = add_then_min(z.n, -e, (i32)NO_PATH);
}
DEVICE Shares shares_of(const Terms& t, float sum) {
  // A lone path must keep all of its weight: the product of a number and its reciprocal is often 1 - 2^-24. A thousand
  // such steps upwards lose 10^-5 or more, and what diagonal steps lose goes left, to cells that may be 1000 times as far
  // apart as those of the path are. So these two shares are divided exactly; the left one is what they leave.
  const float inverse = reciprocal_fast(sum);
  auto divided = [&](float term) {
    const float quotient = term * inverse;
    return multiply_add(multiply_add(-quotient, sum, term), inverse, quotient);
  };
  Shares share{divided(t.up), t.left * inverse, divided(t.diagonal)};
  // From a forbidden cell (at most 2^-66 by now) nothing comes at all.
  if constexpr (BANDED) share.left = share.left < 1.0e-19f ? 0.0f : 1.0f - share.up - share.diagonal;
  return share;
}
#endif

DEVICE Terms terms_of(const Scaled& up, const Scaled& left, const Scaled& diagonal) {
  Terms t;
  t.m = min_of3(up.n, left.n, diagonal.n);
  t.up = shifted(up.f, add_then_min(up.n, -t.m, (exponent)MAX_SHIFT));
  t.left = shifted(left.f, add_then_min(left.n, -t.m, (exponent)MAX_SHIFT));
  t.diagonal = shifted(diagonal.f, add_then_min(diagonal.n, -t.m, (exponent)MAX_SHIFT));
  return t;
}
DEVICE real sum_of(const Terms& t) { return t.up + (t.left + t.diagonal); }
DEVICE Scaled times(real sum, exponent m, const Weight& w) {  // eq. (6)
  // The limit also catches sums beyond 32 bits: they end at NO_PATH, and the result tells.
  if constexpr (BANDED) return Scaled{sum * w.v, add_then_min(m, w.n, (exponent)NO_PATH)};
  // No forbidden cells: 16 steps add 2^25 at most, and renormalize has the limit.
  return Scaled{sum * w.v, m + w.n};
}
// The value of a path's sum: eq. (6) undone.
DEVICE double value_of(const Scaled& z, double unscale) { return ((double)z.n - log2_exact((double)z.f)) * unscale; }
