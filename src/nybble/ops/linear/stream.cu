// y[M, N] = x[M, K] @ W[N, K]^T for few tokens: weights stream past once, x stays in shared memory.
//
// A block keeps all its tokens for one slice of K and walks over units of WN * RT row tiles (16 rows each); its warps
// form a grid of WN (rows) x WK (columns of K). Every lane copies its own pieces of the weight into a ring of STAGES
// slots with cp.async and reads back only what it copied, so the stream needs no barrier and never drains between
// units. Elements become exact bf16/fp16 operands of mma.m16n8k16 with float32 accumulation; a group's scale
// multiplies the group's sum, in float32, so the weight itself is never rounded. Warps of one row add up in shared
// memory in a fixed order: the result is the same in every run.
//
// Definitions beyond decode.cuh's: MT (8-token tiles), RT, WN, WK, STAGES, TOKENS (columns of the products that are
// kept), PLACES (blocks that share a processor). Two more put ops of their own into this kernel (around.cuh), where one
// block has all of K: NORM, the tokens whose RMSNorm is x, with PIECES; GATE, 1 if W is [gate | up] and the result
// silu(gate) * up. A unit then has as many tiles of gate rows as of the up rows that belong to them.
#ifndef NORM
#define NORM 0
#define GATE 0
#endif
#include "decode.cuh"
#include "async.cuh"
#include "weights.cuh"

#define WARPS (WN * WK)
#define THREADS (WARPS * 32)
#include "around.cuh"
#define UNIT_ROWS (WN * RT * 16)
#define CHAINS (RT == 1 && GROUPS == 1 ? 2 : 1)  // independent sums of a tile, to keep the tensor cores' latency hidden
#define RED_STRIDE 20  // of a token's 16 rows: spreads a warp's stores over the banks
#define RED_FLOATS (WARPS * RT * TOKENS * RED_STRIDE)
#define TABLE_WORDS (CODE == TABLE ? 2 * 256 * 32 : 0)
#define STAGE_BYTES (WARPS * RT * SLOT)
#define RING_BYTES (STAGES * STAGE_BYTES)

struct Arguments {
  const char *codes, *scale, *zero;
  const float *tensor_scale;
  const char *x;
  const float *table;  // the values of 16 codes
  const unsigned short *bias;
  void *y;                             // x's dtype [M, N], or float32 [slices, M, N] when K is split over blocks
  long long x_row, x_column;
  int M, N, K, tiles, chunks, slice, shift;  // chunks: of 128 columns; slice: a block's; shift: log2(chunks in a group)
  float factor;
#if NORM
  const char *residual, *gain;  // [M, K], or null for zeros; [K]
  unsigned short *h;            // x + residual, [M, K]; null without a residual
  float eps;
#endif
};

struct SumArguments {
  const float *parts;
  const unsigned short *bias;
  unsigned short *y;
  long long count;  // M * N
  int N, slices;
};

// sum[rt][mt] += scale * (tile of W) @ (tokens' columns), group by group; independent sums take turns.
__device__ __forceinline__ void multiply(float (*sum)[MT][4], const Tile *tiles, const u32 (*x)[2 * STEPS],
                                         const u32 *table) {
  constexpr int steps = STEPS / GROUPS;  // of a group
  float part[RT][CHAINS][MT][4];
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    const int group = j / steps;
#pragma unroll
    for (int rt = 0; rt < RT; ++rt) {
#pragma unroll
      for (int i = 0; i < MT * 4; ++i)
        if (j % steps < CHAINS) part[rt][j % CHAINS][i / 4][i % 4] = 0;
      u32 a[4], terms[2];
      tiles[rt].terms(group, terms);
      decode_step(tiles[rt].codes, j, terms, terms, table, a);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
        mma(FOLD ? sum[rt][mt] : part[rt][j % CHAINS][mt], a, x[mt][2 * j], x[mt][2 * j + 1]);
#if CODE == TABLE
      decode_step(tiles[rt].codes, j, terms, terms, table + TABLE_WORDS / 2, a);  // what rounding left of the values
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) mma(part[rt][j % CHAINS][mt], a, x[mt][2 * j], x[mt][2 * j + 1]);
#endif
      if (FOLD || j % steps != steps - 1) continue;
      const float low = ROW_SCALE ? 1.f : scale_value(tiles[rt].scale, group);
      const float high = ROW_SCALE ? 1.f : scale_value(tiles[rt].scale, GROUPS + group);
#pragma unroll
      for (int i = 0; i < CHAINS * MT * 4; ++i)
        sum[rt][i / 4 % MT][i % 4] += (i % 4 < 2 ? low : high) * part[rt][i / 4 / MT][i / 4 % MT][i % 4];
    }
  }
}

// The tile of rows that a warp's tile `rt` of a unit is; past the last one it is repeated, and nothing is stored.
__device__ __forceinline__ int tile_of(const Arguments &p, int unit, int wn, int rt) {
#if GATE
  constexpr int pairs = WN * RT / 2;
  const int of_unit = wn * RT + rt, half = p.tiles / 2;
  return of_unit / pairs * half + min(unit * pairs + of_unit % pairs, half - 1);
#else
  return min((unit * WN + wn) * RT + rt, p.tiles - 1);
#endif
}

// What the WK warps of a unit's row, which is row n of W, have together.
__device__ __forceinline__ float add_up(const Arguments &p, const float *red, int row, int token, int n) {
  const int tile = row / 16;
  const float *from = red + ((tile / RT * WK * RT + tile % RT) * TOKENS + token) * RED_STRIDE + row % 16;
  float total = 0;
#pragma unroll
  for (int k = 0; k < WK; ++k) total += from[k * RT * TOKENS * RED_STRIDE];
  return ROW_SCALE ? total * row_scale(p.scale, n) : total;
}

#if GATE
// Stores a unit's results.
__device__ __forceinline__ void finish(const Arguments &p, const float *red, int unit, float factor) {
  constexpr int rows = UNIT_ROWS / 2;
  const int outputs = p.N / 2;
#pragma unroll 1
  for (int i = threadIdx.x; i < UNIT_ROWS * p.M; i += THREADS) {  // a warp: 16 gates, and what they let through
    const int part = i / 16 % 2, row = i / 32 * 16 % rows + i % 16, token = i / UNIT_ROWS, n = unit * rows + row;
    if (n >= outputs) continue;  // all of a warp
    const int of_w = n + part * outputs;
    const float total = add_up(p, red, row + part * rows, token, of_w);
    const float value = x_float(float_x(total * factor + (p.bias ? x_float(p.bias[of_w]) : 0.f)));
    const float up = __shfl_xor_sync(0xFFFFFFFFu, value, 16);
    if (part == 0) ((unsigned short *)p.y)[(long long)token * outputs + n] = gated(value, up);
  }
}
#else
// Stores a unit's results.
__device__ __forceinline__ void finish(const Arguments &p, const float *red, int unit, float factor) {
#pragma unroll 1
  for (int i = threadIdx.x; i < UNIT_ROWS * p.M; i += THREADS) {
    const int row = i % UNIT_ROWS, token = i / UNIT_ROWS, n = unit * UNIT_ROWS + row;
    if (n >= p.N) continue;
    const float total = add_up(p, red, row, token, n);
    const long long at = (long long)token * p.N + n;
    if (gridDim.y > 1)
      ((float *)p.y)[(long long)blockIdx.y * p.M * p.N + at] = total * factor;
    else
      ((unsigned short *)p.y)[at] = float_x(total * factor + (p.bias ? x_float(p.bias[n]) : 0.f));
  }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, PLACES) linear_stream(const Arguments p) {
  extern __shared__ __align__(128) char shared[];
  float *red = (float *)(shared + RING_BYTES);
  u32 *table = (u32 *)(red + 2 * RED_FLOATS);
  char *x_shared = (char *)(table + TABLE_WORDS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wn = warp / WK, wk = warp % WK;
  const int first = blockIdx.y * p.slice, last = min(first + p.slice, p.chunks);
  const int units = (p.tiles + WN * RT - 1) / (WN * RT), x_stride = p.slice * (2 * COLUMNS) + 16;
  launch_dependents();

  const u32 ring = shared_address(shared) + warp * RT * SLOT;
  TileRow ahead[RT];
  int ahead_unit, ahead_chunk;
  auto enter = [&](int unit) {
    ahead_unit = unit, ahead_chunk = first + wk;
#pragma unroll
    for (int rt = 0; rt < RT; ++rt)
      ahead[rt].enter(p.codes, p.scale, p.zero, tile_of(p, unit, wn, rt), p.chunks, p.shift, lane);
  };
  auto next = [&] {
    ahead_chunk += WK;
    if (ahead_chunk >= last + wk) enter(ahead_unit + gridDim.x);
  };
  auto fetch = [&](u32 slot) {
    if (ahead_chunk < last && ahead_unit < units)
#pragma unroll
      for (int rt = 0; rt < RT; ++rt) ahead[rt].copy(slot + rt * SLOT, lane, ahead_chunk, p.shift);
    async_commit();
    next();
  };
  enter(blockIdx.x);
#pragma unroll 1
  for (int i = 0; i < STAGES - 1 && ahead_unit < units; ++i, next())
#pragma unroll
    for (int rt = 0; rt < RT; ++rt)
      if (ahead_chunk < last && lane < TILE_BYTES / 128)
        prefetch_l2(ahead[rt].codes + (u32)(ahead_chunk * 4 * TILE_BYTES) + lane * (128 - 16));
#if NORM
  for (int line = threadIdx.x; blockIdx.x == 0 && line < p.K / 64; line += THREADS) prefetch_l2(p.gain + line * 128ll);
#endif
  wait_for_previous();
#if NORM
  Rows rows;
  rows.ask(p.x, p.x_row, p.residual, p.gain, p.K);
#else
  load_x(x_shared, x_stride, p.x, p.x_row, p.x_column, p.M, first * COLUMNS,
         min(last * COLUMNS, p.K), (last - first) * COLUMNS, THREADS);
  async_commit();
#endif
  enter(blockIdx.x);
#pragma unroll 1
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(ring + stage * STAGE_BYTES);
#if CODE == TABLE
  fill_table(table, p.table, TABLE_WORDS / 2, THREADS);
#endif
#if NORM
  rows.add(blockIdx.x ? nullptr : p.h, red, p.K);
  __syncthreads();
  rows.normalize(shared_address(x_shared), x_stride, red, p.eps, p.K, p.chunks * COLUMNS);
#else
  async_wait<STAGES - 1>();
#endif
  __syncthreads();

  const float factor = p.factor * (p.tensor_scale ? *p.tensor_scale : 1.f);
  const u32 ring_end = ring + RING_BYTES;
  u32 slot = ring, refill = ring_end - STAGE_BYTES, x_lane[MT];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
    x_lane[mt] = shared_address(x_shared) + min(mt * 8 + (lane & 7), p.M - 1) * x_stride + (lane >> 3) * 16 + wk * 256;
#pragma unroll 1
  for (int unit = blockIdx.x, buffer = 0; unit < units; unit += gridDim.x, buffer ^= 1) {
    float sum[RT][MT][4] = {};
    u32 x_offset = 0;
#pragma unroll 1
    for (int chunk = first; chunk < last; chunk += WK, x_offset += WK * 2 * COLUMNS) {
      async_wait<STAGES - 2>();
      fetch(refill);
      if (chunk + wk < last) {
        Tile tiles[RT];
        u32 x[MT][2 * STEPS];
#pragma unroll
        for (int rt = 0; rt < RT; ++rt) read_copied_tile(tiles[rt], slot + rt * SLOT, lane);
#pragma unroll
        for (int i = 0; i < MT * 4; ++i) load_matrices(x[i / 4] + i % 4 * 4, x_lane[i / 4] + x_offset + i % 4 * 64);
        multiply(sum, tiles, x, table + lane);
      }
      refill = slot;
      slot += STAGE_BYTES;
      if (slot == ring_end) slot = ring;
    }
    float *mine = red + buffer * RED_FLOATS + warp * RT * TOKENS * RED_STRIDE + (lane & 3) * 2 * RED_STRIDE + (lane >> 2);
    if ((lane & 3) * 2 < TOKENS)
#pragma unroll
      for (int i = 0; i < RT * MT * 4; ++i)
        mine[(i / 4 / MT * TOKENS + i / 4 % MT * 8 + (i & 1)) * RED_STRIDE + (i >> 1 & 1) * 8] = sum[i / 4 / MT][i / 4 % MT][i % 4];
    __syncthreads();
    finish(p, red + buffer * RED_FLOATS, unit, factor);
  }
}

// The slices' sums, in the order of the slices.
extern "C" __global__ void __launch_bounds__(256) linear_stream_sum(const SumArguments p) {
  launch_dependents();
  wait_for_previous();
  const long long i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= p.count) return;
  float total = p.bias ? x_float(p.bias[i % p.N]) : 0.f;
  for (int slice = 0; slice < p.slices; ++slice) total += p.parts[slice * p.count + i];
  p.y[i] = float_x(total);
}
