// W[N, K] in x's dtype from its codes and scales, for products of so many tokens that a plain one is worth it.
//
// A warp decodes a tile of 16 rows x 128 columns, multiplies elements by their scale in float32 and rounds once; rows
// of 256 bytes then leave through shared memory, since a lane holds neighbours in pairs only. Bound by what it writes.
#include "decode.cuh"
#include "async.cuh"
#include "weights.cuh"

#define WARPS 4
#define ROW_STRIDE (2 * COLUMNS + 16)  // of a row on its way out: spreads a warp's stores over the banks
#define TABLE_WORDS (CODE == TABLE ? 2 * 256 * 32 : 0)

struct Arguments {
  const char *codes, *scale, *zero;
  const float *tensor_scale, *table;
  unsigned short *w;
  int N, K, chunks, shift;
  float factor;
};

// Two elements, and what their rounding lost, times both factors, the second of which could overflow the first.
__device__ __forceinline__ u32 scaled(u32 pair, u32 lost, float scale, float factor) {
  const float low = (x_float(pair & 0xFFFF) + x_float(lost & 0xFFFF)) * scale * factor;
  const float high = (x_float(pair >> 16) + x_float(lost >> 16)) * scale * factor;
  return float_x(low) | (u32)float_x(high) << 16;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_widen(const Arguments p) {
  extern __shared__ __align__(128) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = blockIdx.x, row0 = blockIdx.y * 64 + warp * 16;
  u32 *table = (u32 *)shared;
  const u32 slot = shared_address(shared) + TABLE_WORDS * 4 + warp * (SLOT + 16 * ROW_STRIDE), out = slot + SLOT;
  launch_dependents();
  wait_for_previous();
  TileRow from;
  from.enter(p.codes, p.scale, p.zero, blockIdx.y * 4 + warp, p.chunks, p.shift, lane);
  from.copy(slot, lane, chunk, p.shift);
  async_commit();
#if CODE == TABLE
  fill_table(table, p.table, TABLE_WORDS / 2, 32 * WARPS);
#endif
  const float factor = p.factor * (p.tensor_scale ? *p.tensor_scale : 1.f);
  float rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) rows[r] = ROW_SCALE ? row_scale(p.scale, row0 + lane / 4 + 8 * r) : 1.f;
  async_wait<0>();
  __syncthreads();
  Tile tile;
  read_copied_tile(tile, slot, lane);
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    const int group = j * GROUPS / STEPS;
    u32 a[4], lost[4] = {}, terms[2];
    tile.terms(group, terms);
    decode_step(tile.codes, j, terms, terms, table + lane, a);
#if CODE == TABLE
    decode_step(tile.codes, j, terms, terms, table + TABLE_WORDS / 2 + lane, lost);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i & 1;
      const float scale = FOLD || ROW_SCALE ? rows[r] : scale_value(tile.scale, r * GROUPS + group);
      const u32 to = out + (lane / 4 + 8 * r) * ROW_STRIDE + (16 * j + i / 2 * 8 + lane % 4 * 2) * 2;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(scaled(a[i], lost[i], scale, factor)) : "memory");
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i * 2 + lane / 16, n = row0 + row, k = chunk * COLUMNS + lane % 16 * 8;
    u32 words[4];
    read_words<4>(words, out + row * ROW_STRIDE + lane % 16 * 16);
    if (n >= p.N) continue;
    unsigned short *to = p.w + (long long)n * p.K + k;
    if (p.K % 8 == 0 && k < p.K)
      *(uint4 *)to = {words[0], words[1], words[2], words[3]};
    else
      for (int e = 0; e < 8 && k + e < p.K; ++e) to[e] = words[e / 2] >> (16 * (e & 1));
  }
}
