// y[M, N] = x[M, K] @ W[N, K]^T for few tokens: weights stream past once, x stays in shared memory.
//
// A block keeps all its tokens for one slice of K and walks over units of WN * RT row tiles (16 rows each); its warps
// form a grid of WN (rows) x WK (columns of K). Every lane copies its own 16-byte pieces of the weight into a ring of
// STAGES slots with cp.async and reads back only what it copied, so the stream needs no barrier and never drains
// between units. Elements become exact bf16/fp16 operands of mma.m16n8k16 with float32 accumulation; a group's scale
// multiplies the group's sum, in float32, so the weight itself is never rounded. Warps of one row add up in shared
// memory in a fixed order: the result is the same in every run.
//
// Definitions beyond decode.cuh's: MT (8-token tiles), RT, WN, WK, STAGES, MIN_BLOCKS.
#include "decode.cuh"
#include "async.cuh"

#define WARPS (WN * WK)
#define THREADS (WARPS * 32)
#define TOKENS (8 * MT)
#define RED_STRIDE 20  // of a token's 16 rows: spreads a warp's stores over the banks
#define TILE_BYTES (16 * 64 * BITS / 8)
#define LANE_BYTES (TILE_BYTES / 32)
#define ZERO_BYTES (2 * GROUPS)
#define PIECE(bytes) ((bytes) < 4 ? 4 : (bytes))  // cp.async moves 4, 8 or 16 bytes
#define SLOT (32 * (LANE_BYTES + PIECE(SCALE_BYTES) + (ZERO_POINT ? PIECE(ZERO_BYTES) : 0)))
#define RING_BYTES (STAGES * RT * WARPS * SLOT)
#define RED_FLOATS (WARPS * RT * TOKENS * RED_STRIDE)

struct Arguments {
  const char *codes, *scale, *zero;
  const float *tensor_scale;
  const char *x;
  const unsigned short *bias, *table;  // table: a value in x's dtype for each of 16 codes
  void *y;  // x's dtype [M, N], or float32 [splits, M, N] when K is split over blocks
  long long x_row, x_column;
  int M, N, K, tiles, chunks, slice, shift;  // chunks: 64 columns; slice: chunks a block; shift: log2(chunks a group)
  float factor;
};

struct SumArguments {
  const float *parts;
  const unsigned short *bias;
  unsigned short *y;
  long long count;  // M * N
  int N, slices;
};

struct Position {  // where in its stream a warp is: a unit of rows, and a column chunk of it
  int unit, chunk;
};

__device__ __forceinline__ void copy_tile(char *slot, const Arguments &p, int tile, int chunk, int lane) {
  const long long index = (long long)tile * p.chunks + chunk;
  const char *codes = p.codes + index * TILE_BYTES;
  char *to = slot;
#if BITS == 3
  async_copy<8>(to + lane * 8, codes + lane * 8), async_copy<4>(to + 256 + lane * 4, codes + 256 + lane * 4);
#elif BITS == 2
  async_copy<8>(to + lane * 8, codes + lane * 8);
#else
#pragma unroll
  for (int i = 0; i < LANE_BYTES / 16; ++i) async_copy<16>(to + i * 512 + lane * 16, codes + i * 512 + lane * 16);
#endif
  to += 32 * LANE_BYTES;
  const int groups = ((p.chunks - 1) >> p.shift) + 1;
  const long long group = ((long long)tile * groups + (chunk >> p.shift)) * 8 + (lane >> 2);
  async_pieces<PIECE(SCALE_BYTES)>(to, lane, p.scale + (group * SCALE_BYTES & ~3ll));
#if ZERO_POINT
  async_pieces<PIECE(ZERO_BYTES)>(to + 32 * PIECE(SCALE_BYTES), lane, p.zero + (group * ZERO_BYTES & ~3ll));
#endif
}

__device__ __forceinline__ void read_tile(const char *slot, int lane, u32 *codes, u32 *scale, u32 *zero) {
#if BITS == 3
  read_words<2>(codes, slot + lane * 8), read_words<1>(codes + 2, slot + 256 + lane * 4);
#elif BITS == 2
  read_words<2>(codes, slot + lane * 8);
#else
#pragma unroll
  for (int i = 0; i < LANE_BYTES / 16; ++i) read_words<4>(codes + 4 * i, slot + i * 512 + lane * 16);
#endif
  slot += 32 * LANE_BYTES;
  read_pieces<PIECE(SCALE_BYTES)>(scale, slot, lane);
  if (SCALE_BYTES == 2) scale[0] >>= (lane >> 2 & 1) * 16;
#if ZERO_POINT
  read_pieces<PIECE(ZERO_BYTES)>(zero, slot + 32 * PIECE(SCALE_BYTES), lane);
  if (ZERO_BYTES == 2) zero[0] >>= (lane >> 2 & 1) * 16;
#endif
}

// sum[rt][mt] += scale * (tile of W) @ (tokens' columns), group by group.
__device__ __forceinline__ void multiply(float (*sum)[4], const u32 *codes, const u32 *scale, const u32 *zero,
                                         const u32 (*x)[8], const u32 *table) {
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    u32 terms[2] = {0, 0};
#if CODE == INT
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int byte = r * GROUPS + group;
      terms[r] = zero_term(ZERO_POINT ? (int)(signed char)(zero[byte >> 2] >> (8 * (byte & 3))) : 0);
    }
#endif
    float part[MT][4] = {};
#pragma unroll
    for (int j = group * 4 / GROUPS; j < (group + 1) * 4 / GROUPS; ++j) {
      u32 a[4];
      decode_step(codes, j, terms, table, a);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) mma(part[mt], a, x[mt][2 * j], x[mt][2 * j + 1]);
    }
    const float low = scale_value(scale, group), high = scale_value(scale, GROUPS + group);
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      sum[mt][0] += low * part[mt][0], sum[mt][1] += low * part[mt][1];
      sum[mt][2] += high * part[mt][2], sum[mt][3] += high * part[mt][3];
    }
  }
}

__device__ __forceinline__ void finish(const Arguments &p, const float *red, int unit, float factor) {
  constexpr int rows = WN * RT * 16;
  for (int i = threadIdx.x; i < rows * p.M; i += THREADS) {
    const int row = i % rows, token = i / rows, n = unit * rows + row;
    if (n >= p.N) continue;
    float total = 0;
#pragma unroll
    for (int k = 0; k < WK; ++k) total += red[((row / 16 / RT * WK + k) * RT + row / 16 % RT) * TOKENS * RED_STRIDE + token * RED_STRIDE + row % 16];
    if (gridDim.y > 1) {
      ((float *)p.y)[((long long)blockIdx.y * p.M + token) * p.N + n] = total * factor;
    } else {
      const float shift = p.bias ? x_float(p.bias[n]) : 0.f;
      ((unsigned short *)p.y)[(long long)token * p.N + n] = float_x(total * factor + shift);
    }
  }
}

__device__ __forceinline__ void fill_table(u32 *to, const unsigned short *values) {
  for (int i = threadIdx.x; i < 256 * 32; i += THREADS) {
    const int pair = i / 32;
    to[i] = values[pair & 15] | (u32)values[pair >> 4] << 16;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) linear_stream(const Arguments p) {
  extern __shared__ __align__(128) char shared[];
  char *ring = shared;
  float *red = (float *)(shared + RING_BYTES);
  u32 *table = (u32 *)(red + 2 * RED_FLOATS);
  char *x_shared = (char *)(table + (CODE == TABLE ? 256 * 32 : 0));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wn = warp / WK, wk = warp % WK;
  const int first = blockIdx.y * p.slice, last = min(first + p.slice, p.chunks);
  const int units = (p.tiles + WN * RT - 1) / (WN * RT), x_stride = p.slice * 128 + 16;
  launch_dependents();

  // Weights may be fetched into L2 before the previous kernel has ended: nothing is read from there yet.
  Position ahead = {(int)blockIdx.x, first + wk};
  auto next = [&](int stage, bool copy) {
    if (ahead.unit < units && ahead.chunk < last) {
#pragma unroll
      for (int rt = 0; rt < RT; ++rt) {
        const int tile = min((ahead.unit * WN + wn) * RT + rt, p.tiles - 1);
        if (copy)
          copy_tile(ring + ((stage * RT + rt) * WARPS + warp) * SLOT, p, tile, ahead.chunk, lane);
        else if (lane < TILE_BYTES / 128)
          prefetch_l2(p.codes + ((long long)tile * p.chunks + ahead.chunk) * TILE_BYTES + lane * 128);
      }
    }
    ahead.chunk += WK;
    if (ahead.chunk - wk >= last) ahead.unit += gridDim.x, ahead.chunk = first + wk;
  };
  const Position start = ahead;
  for (int stage = 0; stage < PREFETCH; ++stage) next(stage, false);
  ahead = start;
  wait_for_previous();
  load_x(x_shared, x_stride, p.x, p.x_row, p.x_column, p.M, first * 64, min(last * 64, p.K), (last - first) * 64, THREADS);
  async_commit();
  for (int stage = 0; stage < STAGES - 1; ++stage) next(stage, true), async_commit();
#if CODE == TABLE
  fill_table(table, p.table);
#endif
  async_wait<STAGES - 1>();
  __syncthreads();

  const float factor = p.factor * (p.tensor_scale ? *p.tensor_scale : 1.f);
  int stage = 0, buffer = 0;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x, buffer ^= 1) {
    float sum[RT][MT][4] = {};
    for (int chunk = first + wk; chunk - wk < last; chunk += WK) {
      async_wait<STAGES - 2>();
      const int refill = stage == 0 ? STAGES - 1 : stage - 1;
      next(refill, true);
      async_commit();
      if (chunk < last) {
        u32 x[MT][8];
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          const int token = min(mt * 8 + (lane & 7), p.M - 1);
          const char *from = x_shared + token * x_stride + (chunk - first) * 128 + (lane >> 3) * 16;
          load_matrices(x[mt], from), load_matrices(x[mt] + 4, from + 64);
        }
#pragma unroll
        for (int rt = 0; rt < RT; ++rt) {
          u32 codes[BITS < 4 ? 4 : BITS], scale[(SCALE_BYTES + 3) / 4], zero[(ZERO_BYTES + 3) / 4];
          read_tile(ring + ((stage * RT + rt) * WARPS + warp) * SLOT, lane, codes, scale, zero);
          multiply(sum[rt], codes, scale, zero, x, table + lane);
        }
      }
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    float *mine = red + buffer * RED_FLOATS + warp * RT * TOKENS * RED_STRIDE + (lane & 3) * 2 * RED_STRIDE + (lane >> 2);
#pragma unroll
    for (int rt = 0; rt < RT; ++rt)
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) mine[(rt * TOKENS + mt * 8 + (i & 1)) * RED_STRIDE + (i >> 1) * 8] = sum[rt][mt][i];
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
