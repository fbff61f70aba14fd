// Vectors of 16 float32 elements, and of 16 integers, on every instruction set: one file each has the same functions.
// All other code is independent of the instruction set but for a few sizes, which are defined there too:
//
//     FLOAT_TILE          most rows of a float product that are computed together: their sums stay in registers
//     INT_TILE            the same for int8 and int4
//     GEMM_ROWS           the same for training (gemm.c)
//     KEYS_AT_ONCE        keys whose products with a query are in registers
//     SUM_ROWS, _COLUMNS  queries, and vectors of each, whose sums over values are in registers
//     BYTE_OFFSET         what i_dot_bytes leaves added to every weight
//     BFLOAT16_DOT        1 if there is an instruction for products of bfloat16

#pragma once
#include <math.h>
#include <stdint.h>

#define LANES 16  // elements of a vector
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define FOR_LANES(n) for (int64_t k = 0; k < (n); k += LANES)

typedef uint16_t lanes;  // one bit per lane

INLINE lanes first_lanes(int64_t n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include "vector_neon.h"
#else
#error "the kernels need AVX2 with FMA and F16C, AVX-512, or NEON with dot products"
#endif
