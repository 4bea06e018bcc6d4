// Scaled numbers Z = f * 2^-n with 64-bit exponents, and eqs. (5) to (7) on them.
//
// One arithmetic for every range: no pair has to be computed a second time. f is a float, or a double for float64 input;
// "no path" is f = 0. Zeros are exact, so that nothing leaks into forbidden cells.
#pragma once

#if INPUT == FLOAT64
typedef double real;
#define MAX_SHIFT 1023
DEVICE real power_of_half(i32 k) { return double_of((u64)(1023 - k) << 52); }  // k = 1023 gives zero
#else
typedef float real;
#define MAX_SHIFT 127
DEVICE real power_of_half(i32 k) { return float_of((u32)(127 - k) << 23); }  // k = 127 gives zero
#endif
#define NO_PATH ((i64)1 << 60)
#define FORBIDDEN_FROM 4503599627370496.0  // 2^52: beyond it a cost forbids its cell, as +inf does

struct Scaled { real f; i64 n; };
struct Weight { real v; i64 n; };                    // 2^-s as v * 2^-n, v within [0.7, 1.42]: eq. (6)
struct Shares { real up, left, diagonal; };          // of eq. (7)

DEVICE Scaled no_path() { return Scaled{(real)0, NO_PATH}; }
DEVICE Weight forbidden() { return Weight{(real)0, NO_PATH}; }
DEVICE Weight weight_of(double s) {
  if (s != s || s < -FORBIDDEN_FROM) return Weight{(real)((s - s) / (s - s)), 0};  // NaN poisons the sample; so does what is as good as -inf
  if (s >= FORBIDDEN_FROM) return forbidden();
  const double whole = round_nearest(s);
#if INPUT == FLOAT64
  return Weight{exp2_exact(whole - s), (i64)whole};
#else
  return Weight{exp2_fast((float)(whole - s)), (i64)whole};
#endif
}
// Moves f's exponent into n; done every 16 steps, in which f grows by 4.3^16 = 2^34 at most.
DEVICE void renormalize(Scaled& z) {
#if INPUT == FLOAT64
  const i32 e = (i32)((bits_of(z.f) >> 52) & 2047) - 1023;
  if (e == -1023 || e == 1024) return;  // zero or NaN
  z.f = double_of(bits_of(z.f) - ((u64)(i64)e << 52));
#else
  const i32 e = (i32)((bits_of(z.f) >> 23) & 255) - 127;
  if (e == -127 || e == 128) return;
  z.f = float_of(bits_of(z.f) - ((u32)e << 23));
#endif
  z.n = add_then_min(z.n, -(i64)e, (i64)NO_PATH);
}
DEVICE real shifted(const Scaled& z, i64 m) {
  const u64 k = (u64)(z.n - m);
  return z.f * power_of_half(k < (u64)MAX_SHIFT ? (i32)k : MAX_SHIFT);
}
struct Terms { real up, left, diagonal, sum; i64 m; };  // of eq. (5), brought to the exponent m
DEVICE Terms terms_of(const Scaled& up, const Scaled& left, const Scaled& diagonal) {
  Terms t;
  t.m = min_of3(left.n, diagonal.n, up.n);  // what comes from the lane above comes last
  t.up = shifted(up, t.m);
  t.left = shifted(left, t.m);
  t.diagonal = shifted(diagonal, t.m);
  t.sum = t.up + (t.left + t.diagonal);
  return t;
}
DEVICE Scaled times(const Terms& t, const Weight& w) {  // eq. (6)
  return Scaled{t.sum * w.v, add_then_min(t.m, w.n, (i64)NO_PATH)};
}
// A cell that no path reaches passes nothing on, but U and V of the cells around it must add up: see docs/math.md.
DEVICE Shares shares_of(const Terms& t) {
  const bool reached = t.sum != (real)0;
#if INPUT == FLOAT64
  auto divided = [&](double term) { return term / t.sum; };
#else
  // Divided exactly: a lone path must keep all of its weight.
  const float inverse = reciprocal_fast(t.sum);
  auto divided = [&](float term) {
    const float quotient = term * inverse;
    return multiply_add(multiply_add(-quotient, t.sum, term), inverse, quotient);
  };
#endif
  // Selected, not branched to: a branch in every step of the walk takes longer than what it leaves out.
  const Shares share{divided(t.up), divided(t.left), divided(t.diagonal)};
  return Shares{reached ? share.up : (real)0, reached ? share.left : (real)0, reached ? share.diagonal : (real)1};
}
// The value of a path's sum: eq. (6) undone.
DEVICE double value_of(const Scaled& z, double unscale) { return ((double)z.n - log2_exact((double)z.f)) * unscale; }
