// quantize_rows: a thread takes 16 neighbours of a row, as pairs of 16-bit values in eight words.
//
// Where a scale or a mean spans the row a block takes a whole row, SETS times 16 columns a thread; otherwise blocks take
// pieces of rows, CHUNKS to a row. Blocks of columns are lanes next to each other, so that nothing but a row's sum and largest magnitude
// leaves a warp. PROLOGUE: 0 none, 1 RMSNorm, 2 silu(gate) * up; RESIDUAL: whether one is added, and written.
#include "codes.cuh"

#define COLUMNS 16
#define WORDS (COLUMNS / 2)
#define WARPS (THREADS / 32)
#define LOG2_E FLOAT(0x3FB8AA3B)

struct Arguments {
  const u16 *x, *residual, *gain;
  u16 *h;
  u8 *codes;
  void *scale;
  const float *amax;
  float *tensor;
  long long x_row, residual_row;
  int columns;
  float eps;
};

struct Words {
  u32 w[WORDS];

  __device__ __forceinline__ void load(const u16 *from, bool inside) {
    const uint4 none = {0, 0, 0, 0}, *at = (const uint4 *)from;
    const uint4 a = inside ? at[0] : none, b = inside ? at[1] : none;
    w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
  }
  __device__ __forceinline__ void store(u16 *to) const {
    ((uint4 *)to)[0] = {w[0], w[1], w[2], w[3]};
    ((uint4 *)to)[1] = {w[4], w[5], w[6], w[7]};
  }
};

#if PROLOGUE == 2
// As ops/silu_mul's kernel has it, whose exponential and quotient are the device's own.
__device__ __forceinline__ float silu(float gate) {
  float power, y;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-gate, LOG2_E)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(gate), "f"(__fadd_rn(1.f, power)));
  return y;
}

__device__ __forceinline__ void gate(Words &v, const Words &up) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const u32 s = rounded(silu(low_of(v.w[i])), silu(high_of(v.w[i])));
    v.w[i] = rounded(__fmul_rn(low_of(s), low_of(up.w[i])), __fmul_rn(high_of(s), high_of(up.w[i])));
  }
}
#else
__device__ __forceinline__ void gate(Words &v, const Words &up) {}
#endif

__device__ __forceinline__ void add(Words &v, const Words &other) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    v.w[i] = rounded(__fadd_rn(low_of(v.w[i]), low_of(other.w[i])), __fadd_rn(high_of(v.w[i]), high_of(other.w[i])));
}

// The squares of eight neighbours as a tree, the two trees' sum in double.
__device__ __forceinline__ double squares(const Words &v) {
  float pair[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const float low = low_of(v.w[i]), high = high_of(v.w[i]);
    pair[i] = __fadd_rn(__fmul_rn(low, low), __fmul_rn(high, high));
  }
  const float a = __fadd_rn(__fadd_rn(pair[0], pair[1]), __fadd_rn(pair[2], pair[3]));
  const float b = __fadd_rn(__fadd_rn(pair[4], pair[5]), __fadd_rn(pair[6], pair[7]));
  return (double)a + (double)b;
}

__device__ __forceinline__ double sum_of_block(double part) {
  __shared__ double parts[WARPS];
#pragma unroll
  for (int apart = 16; apart; apart >>= 1) part += __shfl_xor_sync(0xFFFFFFFFu, part, apart);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
  __syncthreads();
  double total = parts[0];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) total += parts[i];
  return total;
}

__device__ __forceinline__ u32 most_of_block(u32 most) {
  __shared__ u32 parts[WARPS];
  most = __reduce_max_sync(0xFFFFFFFFu, most);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < WARPS; ++i) most = max(most, parts[i]);
  return most;
}

__device__ __forceinline__ void normalize(Words &v, const Words &gain, float inverse) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    const u32 s = rounded(__fmul_rn(low_of(v.w[i]), inverse), __fmul_rn(high_of(v.w[i]), inverse));
    v.w[i] = rounded(__fmul_rn(low_of(gain.w[i]), low_of(s)), __fmul_rn(high_of(gain.w[i]), high_of(s)));
  }
}

// Sums and differences of neighbours 1, 2, 4, ... apart: within the thread, then between lanes.
__device__ __forceinline__ void rotate(Words &v) {
  float t[COLUMNS];
#pragma unroll
  for (int i = 0; i < WORDS; ++i) t[2 * i] = low_of(v.w[i]), t[2 * i + 1] = high_of(v.w[i]);
#pragma unroll
  for (int apart = 1; apart < COLUMNS; apart *= 2)
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i)
      if (!(i & apart)) {
        const float a = t[i], b = t[i + apart];
        t[i] = __fadd_rn(a, b), t[i + apart] = __fsub_rn(a, b);
      }
#pragma unroll
  for (int apart = 1; apart * COLUMNS < HADAMARD; apart *= 2) {
    const float sign = threadIdx.x & apart ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) t[i] = __fmaf_rn(t[i], sign, __shfl_xor_sync(0xFFFFFFFFu, t[i], apart));
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i)
    v.w[i] = rounded(__fmul_rn(t[2 * i], FLOAT(ROOT)), __fmul_rn(t[2 * i + 1], FLOAT(ROOT)));
}

// The bits, as a float32, of the largest magnitude; those of 16-bit floats are in the order of the numbers, NaN above.
__device__ __forceinline__ u32 largest_of(const Words &v) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) most = __vmaxu2(most, v.w[i] & 0x7FFF7FFFu);
  return __float_as_uint(low_of(max(most & 0xFFFFu, most >> 16)));
}

template <bool USUAL> __device__ __forceinline__ void write_codes(const Words &v, const Divisor &by, u8 *to) {
#if BITS == 8
  u32 codes[WORDS / 2];
#pragma unroll
  for (int i = 0; i < WORDS / 2; ++i)
    codes[i] = __byte_perm(two_codes<USUAL>(v.w[2 * i], by), two_codes<USUAL>(v.w[2 * i + 1], by), 0x5410);
  *(uint4 *)to = {codes[0], codes[1], codes[2], codes[3]};
#else
  *(uint2 *)to = {eight_codes<USUAL>(v.w, by), eight_codes<USUAL>(v.w + 4, by)};
#endif
}

__device__ __forceinline__ void write_scale(void *scale, long long at, u32 stored) {
#if S_BITS == 8
  ((u8 *)scale)[at] = (u8)stored;
#elif S_BITS == 16
  ((u16 *)scale)[at] = (u16)stored;
#else
  ((u32 *)scale)[at] = stored;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_rows(const Arguments p) {
  const long long row = blockIdx.x / CHUNKS;
  const int first = (blockIdx.x % CHUNKS * SETS * THREADS + threadIdx.x) * COLUMNS, step = THREADS * COLUMNS;
  Words v[SETS];
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    const int at = first + s * step;
    const bool inside = at < p.columns;
    v[s].load(p.x + row * p.x_row + at, inside);
    if (PROLOGUE == 2 || RESIDUAL) {
      Words other;
      other.load(PROLOGUE == 2 ? p.x + row * p.x_row + p.columns + at : p.residual + row * p.residual_row + at, inside);
      if (PROLOGUE == 2) gate(v[s], other);
      else add(v[s], other);
      if (RESIDUAL && inside) v[s].store(p.h + row * p.columns + at);
    }
  }
#if PROLOGUE == 1
  double total = 0.;
#pragma unroll
  for (int s = 0; s < SETS; ++s) total += squares(v[s]);
  const float mean = __fdiv_rn((float)sum_of_block(total), (float)p.columns);
  const float inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, p.eps)));
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    Words gain;
    gain.load(p.gain + first + s * step, first + s * step < p.columns);
    normalize(v[s], gain, inverse);
  }
#endif
  float encode = 1.f, decode = 1.f;
  if (TARGET) {
    const float amax = *p.amax, factor = __fdiv_rn(FLOAT(TARGET), amax);
    encode = amax == 0.f ? 1.f : factor > FLOAT(MOST) ? FLOAT(MOST) : factor;
    decode = __fdiv_rn(1.f, encode);
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.tensor = decode;
  }
  u32 largest = 0;
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    if (HADAMARD) rotate(v[s]);
    if (BLOCK == 0) largest = max(largest, largest_of(v[s]));
  }
#if BLOCK == 0
  const Scale scale = block_scale(most_of_block(largest), encode, decode);
  const Divisor by(scale.e);
  if (threadIdx.x == 0) write_scale(p.scale, row, scale.stored);
#endif
#pragma unroll
  for (int s = 0; s < SETS; ++s) {
    const int at = first + s * step;
#if BLOCK > 0
    largest = largest_of(v[s]);
#pragma unroll
    for (int apart = 1; apart * COLUMNS < BLOCK; apart *= 2) largest = max(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, apart));
    const Scale scale = block_scale(largest, encode, decode);
    const Divisor by(scale.e);
    if (at < p.columns && at % BLOCK == 0) write_scale(p.scale, row * ((p.columns + BLOCK - 1) / BLOCK) + at / BLOCK, scale.stored);
#endif
    if (at >= p.columns) continue;
    u8 *to = p.codes + (row * p.columns + at) * BITS / 8;
    if (by.usual) write_codes<true>(v[s], by, to);
    else write_codes<false>(v[s], by, to);
  }
}
