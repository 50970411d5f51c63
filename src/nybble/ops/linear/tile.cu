// y[M, N] = x[M, K] @ W[N, K]^T for many tokens on Hopper: the tensor cores take W from registers and x from shared memory.
//
// A block makes 64 * RT * ROW_GROUPS rows of W times TOKENS tokens. Four warps feed it: for each stage of SPLIT chunks of
// 128 columns they ask the copy engine for x's tiles (swizzled) and for the weight's tiles, STAGES stages ahead. A
// warpgroup owns 64 * RT rows and one chunk of every stage: its lanes decode their codes, multiply them by their scale
// (operands.cuh) and hand them to wgmma as the register operand, while the tensor cores still work on the chunk before.
// Warpgroups meet only at the stages' barriers, so one decodes while another multiplies. 16 tokens go through mma
// instead, which reads x once for RT tiles of rows. In the end the SPLIT warpgroups of the same rows and the CLUSTER
// blocks among which K is split add up through (distributed) shared memory, in a fixed order: the result is the same in
// every run.
//
// Definitions beyond decode.cuh's: ROW_GROUPS, SPLIT, RT (1 but for 16 tokens), TOKENS_N (tokens of one wgmma), TOKENS_B
// (wgmmas side by side), STAGES, CLUSTER, REGISTERS (what the warpgroups raise theirs to; 0: nothing moves), operands.cuh's.
#include "decode.cuh"
#include "async.cuh"
#include "weights.cuh"
#include "wgmma.cuh"
#include "operands.cuh"

#define GROUPS_OF_WARPS (ROW_GROUPS * SPLIT)
#define WARPS (4 * GROUPS_OF_WARPS)
#define THREADS (32 * WARPS + 128)  // a warpgroup that feeds, and those it feeds
#define CONSUMERS (32 * WARPS)
#define ROWS (64 * RT * ROW_GROUPS)
#define TOKENS (TOKENS_N * TOKENS_B)  // 16 go through mma, more through wgmma
#define X_HALF (TOKENS * 128)  // 64 columns of x, a row of 128 bytes a token
#define CHUNK_BYTES (2 * X_HALF + RT * ROW_GROUPS * GROUP_BYTES)
#define RING_BYTES (STAGES * SPLIT * CHUNK_BYTES)
#define TOGETHER (TOKENS_N == 16)  // whether lanes share the work on scales
#define SUM_STRIDE (ROWS + 4)  // of a token's sums: spreads a warp's stores over the banks
#define SUM_BYTES (TOKENS * SUM_STRIDE * 4)

struct Arguments {
  TensorMap x;  // [M, K], boxes of TOKENS x 64
  const char *codes, *scale, *zero;
  const float *tensor_scale;
  const unsigned short *bias;
  unsigned short *y;
  int M, N, blocks, chunks, slice, shift, token_tiles;
  float factor;
  const float *table;  // the values of 16 codes
};

// Where the chunk of warpgroup `group` lies in a stage: x's tile and the 64 rows `rt` of the weight. All of x, aligned for
// the swizzle, comes before all of the weight.
__device__ __forceinline__ u32 x_at(u32 base, u32 stage, u32 group) {
  return base + (stage * SPLIT + group % SPLIT) * (2 * X_HALF);
}
__device__ __forceinline__ u32 weights_at(u32 base, u32 stage, u32 group, u32 rt) {
  return base + STAGES * SPLIT * (2 * X_HALF) + ((stage * GROUPS_OF_WARPS + group) * RT + rt) * GROUP_BYTES;
}

// A feeding warp, one lane of it: warp i asks for the weight of warpgroup i, and for x where a warpgroup is left over
// (or again from the first on). Four share the work because the copy engine takes a request from a warp only every
// hundred cycles or so.
__device__ __forceinline__ void feed(const Arguments &p, u32 base, u32 full, u32 empty, int block, int token0, int first,
                                     int last, int feeder) {
  const int x_part = (feeder - GROUPS_OF_WARPS) & 3, part = feeder % SPLIT, groups = ((p.chunks - 1) >> p.shift) + 1;
  const char *codes[RT], *scale[RT], *zero[RT];
#pragma unroll
  for (int rt = 0; rt < RT; ++rt) {
    const long long mine = min(block + feeder / SPLIT * RT + rt, p.blocks - 1);
    codes[rt] = p.codes + mine * p.chunks * (4 * TILE_BYTES);
    scale[rt] = p.scale + mine * groups * (4 * SCALE_TILE), zero[rt] = p.zero + mine * groups * (4 * ZERO_TILE);
    if (feeder < GROUPS_OF_WARPS)
      for (int chunk = first + part; chunk < min(first + STAGES * SPLIT, last); chunk += SPLIT)
        prefetch_bulk<4 * TILE_BYTES>(codes[rt] + (u32)(chunk * 4 * TILE_BYTES));
  }
  wait_for_previous();
  u32 stage = 0, phase = 1;
#pragma unroll 1
  for (int start = first; start < last; start += SPLIT) {
    barrier_wait(empty + stage * 8, phase);
    const u32 arrived = full + stage * 8;
    if (x_part == 0) barrier_expect(arrived, min(SPLIT, last - start) * CHUNK_BYTES);
    if (x_part < SPLIT && start + x_part < last) {
      const u32 x = x_at(base, stage, x_part), column = (start + x_part) * COLUMNS;
      bulk_tensor(x, &p.x, column, token0, arrived);
      bulk_tensor(x + X_HALF, &p.x, column + COLUMNS / 2, token0, arrived);
    }
    const int chunk = start + part;
    if (feeder < GROUPS_OF_WARPS && chunk < last) {
      const u32 group = chunk >> p.shift;
#pragma unroll
      for (int rt = 0; rt < RT; ++rt) {
        const u32 slot = weights_at(base, stage, feeder, rt), after = slot + 4 * TILE_BYTES;
        bulk_copy<4 * TILE_BYTES>(slot, codes[rt] + (u32)(chunk * 4 * TILE_BYTES), arrived);
        if (SCALE_TILE) bulk_copy<4 * SCALE_TILE>(after, scale[rt] + group * (4 * SCALE_TILE), arrived);
        if (ZERO_TILE) bulk_copy<4 * ZERO_TILE>(after + 4 * SCALE_TILE, zero[rt] + group * (4 * ZERO_TILE), arrived);
      }
    }
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
}

// Hands over the products of 64 columns.
__device__ __forceinline__ void start_half(float (*sum)[TOKENS_N / 2], u32 (*a)[4], u32 x) {
#pragma unroll
  for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");  // made before the fence
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4 * TOKENS_B; ++i)
    wgmma(sum[i % TOKENS_B], a[i / TOKENS_B], row_descriptor(x + i % TOKENS_B * TOKENS_N * 128 + i / TOKENS_B * 32));
  wgmma_commit();
}
// sum += the products of 64 columns, started and left running; what was started before is done afterwards.
template <int HALF>
__device__ __forceinline__ void start_half(float (*sum)[TOKENS_N / 2], u32 (*a)[4], const Tile &tile, u32 x,
                                           const Lookup &lookup) {
  operands<HALF>(a, tile, lookup);
  start_half(sum, a, x + HALF * X_HALF);
  wgmma_wait<1>();
}

// The same for 16 tokens and RT tiles with mma, which is done when it returns.
template <int HALF>
__device__ __forceinline__ void multiply_half(float (*sum)[TOKENS_N / 2], const Tile *tiles, u32 x, int lane,
                                              const Lookup &lookup) {
  u32 a[RT][4][4];
#pragma unroll
  for (int rt = 0; rt < RT; ++rt) operands<HALF>(a[rt], tiles[rt], lookup);
  const u32 token = (lane >> 4) * 8 + (lane & 7), piece = lane >> 3 & 1;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 b[4];
    load_matrices(b, x + HALF * X_HALF + token * 128 + ((2 * j + piece) ^ (lane & 7)) * 16);
#pragma unroll
    for (int rt = 0; rt < RT; ++rt) mma(sum[rt], a[rt][j], b[0], b[1]), mma(sum[rt] + 4, a[rt][j], b[2], b[3]);
  }
}

// A consumer warp: sum += its rows' products over its chunks of the slice.
#if SUM_SCALE && TOKENS_N > 16
// After each chunk, sums are read: brought into the units of the next. Its first operands are made before that, while the
// tensor cores are at work; after the last chunk, from what is there once more.
__device__ __forceinline__ void consume(float (*sum)[TOKENS_N / 2], u32 base, u32 full, u32 empty, int first, int last,
                                        int warp, int lane, const Lookup &lookup) {
  u32 a[4][4], b[4][4], stage = 0, phase = 0;
  const u32 in_group = warp % 4, row = in_group * 8 + lane / 4;
  int chunk = first + warp / 4 % SPLIT;
  if (chunk >= last) return;
  Tile tile;
  barrier_wait(full, 0);
  read_tile<false>(tile, weights_at(base, 0, warp / 4, 0), in_group, row, lane);
  operands<0>(a, tile, lookup);
#pragma unroll 1
  for (; chunk < last; chunk += SPLIT) {
    const bool more = chunk + SPLIT < last;
    const Units units(tile);
    const u32 mine = stage, x = x_at(base, mine, warp / 4);
    start_half(sum, a, x);
    operands<1>(b, tile, lookup);
    start_half(sum, b, x + X_HALF);
    wgmma_wait<1>();
    if (more && ++stage == STAGES) stage = 0, phase ^= 1;
    barrier_wait(full + stage * 8, phase);
    read_tile<false>(tile, weights_at(base, stage, warp / 4, 0), in_group, row, lane);
    operands<0>(a, tile, lookup);
    wgmma_wait<0>();
    rescale<TOKENS / 2>(sum[0], units, more ? Units(tile) : Units());
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + mine * 8);
  }
}
#else
__device__ __forceinline__ void consume(float (*sum)[TOKENS_N / 2], u32 base, u32 full, u32 empty, int first, int last,
                                        int warp, int lane, const Lookup &lookup) {
  [[maybe_unused]] u32 a[4][4], b[4][4], before = STAGES;  // the last barrier is for the stage that never was
  u32 stage = 0, phase = 0;
  const u32 in_group = warp % 4, row = in_group * 8 + lane / 4;
#if SUM_SCALE
  Units units[RT];
#endif
#pragma unroll 1
  for (int chunk = first + warp / 4 % SPLIT; chunk < last; chunk += SPLIT) {
    const u32 x = x_at(base, stage, warp / 4);
    Tile tiles[RT];
    barrier_wait(full + stage * 8, phase);
#pragma unroll
    for (int rt = 0; rt < RT; ++rt)
      read_tile<TOGETHER>(tiles[rt], weights_at(base, stage, warp / 4, rt), in_group, row, lane);
#if SUM_SCALE
#pragma unroll
    for (int rt = 0; rt < RT; ++rt) rescale<TOKENS / 2>(sum[rt], units[rt], Units(tiles[rt])), units[rt] = Units(tiles[rt]);
#endif
#if TOKENS_N == 16
    multiply_half<0>(sum, tiles, x, lane, lookup), multiply_half<1>(sum, tiles, x, lane, lookup);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + stage * 8);
#else
    start_half<0>(sum, a, tiles[0], x, lookup);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + before * 8);  // nothing reads the stage before any more
    start_half<1>(sum, b, tiles[0], x, lookup);
#endif
    before = stage;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
#if SUM_SCALE
#pragma unroll
  for (int rt = 0; rt < RT; ++rt) rescale<TOKENS / 2>(sum[rt], units[rt], Units());
#endif
}
#endif

// The block's share of the tile's tokens, four rows a thread: sums over the cluster, scaled, shifted, rounded.
__device__ __forceinline__ void store(const Arguments &p, u32 sums, int row0, int token0, int rank) {
  const float factor = p.factor * (p.tensor_scale ? *p.tensor_scale : 1.f);
  constexpr int quads = ROWS / 4, share = TOKENS / CLUSTER;
#pragma unroll 2
  for (int i = threadIdx.x; i < share * quads && threadIdx.x < CONSUMERS; i += CONSUMERS) {
    const int column = rank * share + i / quads, token = token0 + column, row = i % quads * 4, n = row0 + row;
    if (token >= p.M || n >= p.N) continue;
    float total[4] = {};
#pragma unroll
    for (int r = 0; r < CLUSTER * SPLIT; ++r)
      add_four<(CLUSTER > 1)>(total, sums + r % SPLIT * SUM_BYTES + (column * SUM_STRIDE + row) * 4, r / SPLIT);
    unsigned short out[4];
    const int rows = min(4, p.N - n);
    for (int e = 0; e < 4; ++e) {
      const int at = n + min(e, rows - 1);
      const float scale = ROW_SCALE ? row_scale(p.scale, at) * factor : factor;
      out[e] = float_x(total[e] * scale + (p.bias ? x_float(p.bias[at]) : 0.f));
    }
    unsigned short *to = p.y + (long long)token * p.N + n;
    if (p.N % 4 == 0)
      *(uint2 *)to = {out[0] | (u32)out[1] << 16, out[2] | (u32)out[3] << 16};
    else
      for (int e = 0; e < rows; ++e) to[e] = out[e];
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    linear_tile(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x / CLUSTER;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int token0 = block % p.token_tiles * TOKENS, row0 = block / p.token_tiles * ROWS;
  const int first = rank * p.slice, last = max(first, min(first + p.slice, p.chunks));
  const u32 start = shared_address(shared), base = behind_lookup(start);
  const u32 full = base + RING_BYTES, empty = full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 1);
    for (int i = 0; i <= STAGES; ++i) barrier_init(empty + i * 8, WARPS);
    barrier_init_fence();
  }
#if CODE == TABLE
  fill_lookup(base - LOOKUP_BYTES, p.table, THREADS);
#endif
  __syncthreads();

  if (warp >= WARPS) {
    keep_registers<24, REGISTERS != 0, false>();
    if (lane == 0) feed(p, base, full, empty, row0 / 64, token0, first, last, warp - WARPS);
    __syncwarp();
    launch_dependents();
  } else {
    keep_registers<REGISTERS, REGISTERS != 0, true>();
    float sum[RT * TOKENS_B][TOKENS_N / 2] = {};
    consume(sum, base, full, empty, first, last, warp, lane, Lookup(base - LOOKUP_BYTES, lane));
    wait_for_previous();
    // Not earlier: blocks of the next kernel would take the places left on some processors and crowd there.
    launch_dependents();
    consumers_sync<CONSUMERS>();  // every copy has arrived and been read: the ring's memory now takes the sums
    // ptxas serializes every wgmma where it has to compute more than this between the last one and the sums' stores.
    const int rows = RT * SPLIT == 1 ? warp * 16 : warp / 4 / SPLIT * (64 * RT) + warp % 4 * 16, row = rows + lane / 4;
    float *mine = (float *)(shared + (base - start) + warp / 4 % SPLIT * SUM_BYTES) + (lane % 4 * 2) * SUM_STRIDE + row;
#pragma unroll
    for (int b = 0; b < RT * TOKENS_B; ++b)
#pragma unroll
      for (int i = 0; i < TOKENS_N / 2; ++i)
        mine[(b / RT * TOKENS_N + i / 4 * 8 + (i & 1)) * SUM_STRIDE + b % RT * 64 + (i >> 1 & 1) * 8] = sum[b][i];
  }
  if (CLUSTER > 1)
    cluster_sync();
  else
    __syncthreads();
  store(p, base, row0, token0, rank);
  if (CLUSTER > 1) cluster_sync();  // nobody leaves while its sums are still being read
}
