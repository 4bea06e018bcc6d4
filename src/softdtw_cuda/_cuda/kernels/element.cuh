// Element types: how inputs are read, and gradients stored.
#pragma once

#if INPUT == FLOAT32
typedef float element;
DEVICE float to_float(element v) { return v; }
#elif INPUT == FLOAT64
typedef double element;
DEVICE double to_float(element v) { return v; }
#elif INPUT == FLOAT16
typedef u16 element;
DEVICE float to_float(element v) { return half_to_float(v); }
#elif INPUT == BFLOAT16
typedef u16 element;
DEVICE float to_float(element v) { return float_of((u32)v << 16); }
#endif
#if INPUT == FLOAT64
typedef double result_type;  // of values and of summed gradients
#else
typedef float result_type;
#endif

DEVICE result_type gradient_of_value(const Params& p, i32 pair) {
  return p.grad ? ((const result_type*)p.grad)[pair * p.grad_stride] : (result_type)1;
}
DEVICE u16 to_bfloat16(float v) {
  const u32 bits = bits_of(v);
  return v != v ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// wide: a 16-bit input whose gradient is stored in float32.
DEVICE void store_gradient(void* base, i64 index, result_type v, i32 wide) {
  if constexpr (INPUT == FLOAT16) {
    if (wide) ((float*)base)[index] = (float)v; else ((u16*)base)[index] = float_to_half((float)v);
  } else if constexpr (INPUT == BFLOAT16) {
    if (wide) ((float*)base)[index] = (float)v; else ((u16*)base)[index] = to_bfloat16((float)v);
  } else {
    ((result_type*)base)[index] = v;
  }
}
DEVICE void store_invalid_value(const Params& p, i32 pair) {
  ((result_type*)p.value)[pair] = (result_type)double_of(0x7ff8000000000000ull);
}
