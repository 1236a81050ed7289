"""The beginning of every CUDA module: types, vectors, bits of doubles, 16-bit floats.

It includes no header, since NVRTC has none. Conversions are exact or round to nearest, ties to
even; NaN stays NaN.
"""

from __future__ import annotations

PRELUDE = r"""
#pragma nv_diag_suppress 177
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

template <typename T, int N> struct __align__(sizeof(T) * N) gf_pack { T v[N]; };

static __device__ __forceinline__ u64 gf_bits_of(const double x) {
  return (u64)__double_as_longlong(x);
}
static __device__ __forceinline__ double gf_double_of(const u64 x) {
  return __longlong_as_double((s64)x);
}
static __device__ __forceinline__ float gf_from_bfloat(const u16 x) {
  return __uint_as_float((u32)x << 16);
}
static __device__ __forceinline__ u16 gf_to_bfloat(const float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
static __device__ __forceinline__ float gf_from_half(const u16 x) {
  const u32 sign = (u32)(x & 0x8000u) << 16, size = x & 0x7FFFu;
  if (size >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | ((size & 0x3FFu) << 13));
  if (size >= 0x400u) return __uint_as_float(sign | ((size << 13) + 0x38000000u));
  const float small = __fmul_rn((float)size, 5.9604644775390625e-08f);
  return __uint_as_float(sign | __float_as_uint(small));
}
static __device__ __forceinline__ u16 gf_to_half(const float x) {
  const u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > 0x7F800000u) return (u16)(sign | 0x7E00u | ((size >> 13) & 0x3FFu));
  if (size >= 0x477FF000u) return (u16)(sign | 0x7C00u);
  if (size >= 0x38800000u) {
    return (u16)(sign | ((size - 0x38000000u + 0xFFFu + ((size >> 13) & 1u)) >> 13));
  }
  // Adding ½ leaves a denormal, rounded, in the lowest bits.
  const float moved = __fadd_rn(__uint_as_float(size), 0.5f);
  return (u16)(sign | (__float_as_uint(moved) - 0x3F000000u));
}
"""
