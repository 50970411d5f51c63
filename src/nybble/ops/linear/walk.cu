// y[M, N] = x[M, K] @ W[N, K]^T for hundreds of tokens and more on Hopper: tile.cu's products by blocks that stay.
//
// A block makes 128 rows of W times TOKENS tokens: two warpgroups of 64 rows each decode their codes, hand them to wgmma as
// the register operand and multiply them by x in shared memory. Two lanes of a third warpgroup feed them: one asks for x,
// a ring of X_STAGES tiles of 64 columns, the other for the weight, a ring of W_STAGES chunks of 128. Two blocks form a
// cluster: each asks for half of the tokens' tile and the copy engine hands it to both. The first warpgroup starts SKEW
// chunks ahead of the second, so that one multiplies while the other stores.
//
// The first `shared` tiles are dealt out evenly whatever their number: cluster c gets chunks c / clusters to (c + 1) /
// clusters of them all put end to end, so that a tile's chunks may lie with several clusters. Each walks its part from
// the end: the piece it cannot finish, whose later chunks are with the next cluster, comes first and goes to memory in
// float32; the piece that ends a tile comes last and takes in what the clusters before have put down. Nobody waits but
// for blocks of lower number, which were started earlier and wait for nobody before they have put down theirs. Sums are
// added in a fixed order: the result is the same in every run. All other tiles go to the clusters in turn.
//
// Definitions beyond operands.cuh's: TOKENS (128 or 256), X_STAGES, W_STAGES.
#include "decode.cuh"
#include "async.cuh"
#include "weights.cuh"
#include "wgmma.cuh"
#include "wgmma_many.cuh"
#include "cluster.cuh"
#include "bands.cuh"
#include "operands.cuh"

#define ROWS 128
#define X_BYTES (TOKENS * 128)  // 64 columns, a row of 128 bytes a token
#define W_BYTES (2 * GROUP_BYTES)
#define SUMS_OF_THREAD (TOKENS / 2)  // of a thread
#define WARPS 8
#define THREADS (32 * WARPS + 128)
#define SKEW 1
// Registers of a thread: at the start, of feeders and of multipliers. More than the block has would be waited for for ever.
#define AT_START (65536 / THREADS / 8 * 8)
#define FEEDS 40
#define MULTIPLIES 232
static_assert(128 * FEEDS + 32 * WARPS * MULTIPLIES <= THREADS * AT_START, "registers that the block does not have");

struct Arguments {
  TensorMap x, y;  // boxes of half of TOKENS x 64, of OUT_TOKENS x 64
  const char *codes, *scale, *zero;
  const float *tensor_scale;
  const unsigned short *bias;
  float4 *parts;  // [blocks, 2, SUMS_OF_THREAD / 4, 128]
  u32 *ready;  // [blocks, 2], zeros: whether a block's part is there
  int M, N, blocks, chunks, shift, pairs, token_tiles, shared;
  float factor;
  const float *table;  // the values of 16 codes
};

// What a cluster does next: chunks [begin, end) of a tile.
struct Segments {
  int tile, begin, end;
  int low, high, whole, clusters;  // [low, high): what is left of its part of the shared tiles' chunks

  static __device__ __forceinline__ int first(const Arguments &p, int cluster, int clusters) {
    return (int)((long long)p.shared * p.chunks * cluster / clusters);
  }
  __device__ __forceinline__ Segments(const Arguments &p, int cluster, int clusters)
      : low(first(p, cluster, clusters)), high(first(p, cluster + 1, clusters)), whole(p.shared + cluster), clusters(clusters) {}
  __device__ __forceinline__ bool next(const Arguments &p) {
    if (high > low) {
      tile = (high - 1) / p.chunks, begin = max(low - tile * p.chunks, 0), end = high - tile * p.chunks;
      high = tile * p.chunks + begin;
      return true;
    }
    if (whole >= p.pairs * p.token_tiles) return false;
    tile = whole, begin = 0, end = p.chunks, whole += clusters;
    return true;
  }
  __device__ __forceinline__ bool last(const Arguments &p) const { return high == low && whole >= p.pairs * p.token_tiles; }
};

struct Place {
  int row0, token0;
};
__device__ __forceinline__ Place place(const Arguments &p, int tile, int rank) {
  return place_of<ROWS, TOKENS, Place>(tile, p.pairs, p.token_tiles, rank);
}

// Shared memory, from an address aligned for the swizzles.
struct Memory {
  u32 base;
  __device__ __forceinline__ u32 x(u32 stage) const { return base + stage * X_BYTES; }
  __device__ __forceinline__ u32 out(u32 group, u32 turn) const { return x(X_STAGES) + (group * 2 + turn) * OUT_BYTES; }
  __device__ __forceinline__ u32 w(u32 stage, u32 group) const { return out(2, 0) + stage * W_BYTES + group * GROUP_BYTES; }
  __device__ __forceinline__ u32 x_full(u32 stage) const { return w(W_STAGES, 0) + stage * 8; }
  __device__ __forceinline__ u32 x_empty(u32 stage) const { return x_full(X_STAGES) + stage * 8; }  // one more, for nothing
  __device__ __forceinline__ u32 w_full(u32 stage) const { return x_empty(X_STAGES + 1) + stage * 8; }
  // Every lane gives back what it has read, so that nothing but this barrier orders its reads before the next copy.
  __device__ __forceinline__ u32 w_empty(u32 stage) const { return w_full(W_STAGES) + stage * 8; }
};

// The lane that asks for x, in halves for both blocks, as stages come free in both.
__device__ __forceinline__ void feed_x(const Arguments &p, const Memory &memory, Segments segments, int rank) {
  Ring<X_STAGES> ring = {0, 1};
  wait_for_previous();
  while (segments.next(p)) {
    const int token0 = place(p, segments.tile, rank).token0 + rank * (TOKENS / CLUSTER);
#pragma unroll 1
    for (int half = 2 * segments.begin; half < 2 * segments.end; ++half, ring.next()) {
      barrier_wait(memory.x_empty(ring.stage), ring.phase);
      barrier_expect(memory.x_full(ring.stage), X_BYTES);
      tensor_to_both(memory.x(ring.stage) + rank * (X_BYTES / CLUSTER), &p.x, half * 64, token0, memory.x_full(ring.stage));
    }
  }
}

// The lane that asks for the block's 128 rows of the weight; past the end it repeats the last ones.
__device__ __forceinline__ void feed_w(const Arguments &p, const Memory &memory, Segments segments, int rank) {
  Ring<W_STAGES> ring = {0, 1};
  const int groups = ((p.chunks - 1) >> p.shift) + 1;
  while (segments.next(p)) {
    const int row0 = place(p, segments.tile, rank).row0;
#pragma unroll 1
    for (int chunk = segments.begin; chunk < segments.end; ++chunk, ring.next()) {
      const u32 full = memory.w_full(ring.stage);
      barrier_wait(memory.w_empty(ring.stage), ring.phase);
      barrier_expect(full, W_BYTES);
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        const long long block = min(row0 / 64 + group, p.blocks - 1), of_scales = block * groups + (chunk >> p.shift);
        const u32 to = memory.w(ring.stage, group), after = to + 4 * TILE_BYTES;
        bulk_copy<4 * TILE_BYTES>(to, p.codes + (block * p.chunks + chunk) * (4 * TILE_BYTES), full);
        if (SCALE_TILE) bulk_copy<4 * SCALE_TILE>(after, p.scale + of_scales * (4 * SCALE_TILE), full);
        if (ZERO_TILE) bulk_copy<4 * ZERO_TILE>(after + 4 * SCALE_TILE, p.zero + of_scales * (4 * ZERO_TILE), full);
      }
    }
  }
}

// A warpgroup's way through the chunks of its tiles.
struct Walk {
  const Memory &memory;
  int group, warp, lane;
  Ring<X_STAGES> x;
  Ring<W_STAGES> w;
  u32 before;  // the stage of x that is not yet given back

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane < CLUSTER) arrive_at(memory.x_empty(before), lane);
  }
  __device__ __forceinline__ Lookup lookup() const { return Lookup(memory.base - LOOKUP_BYTES, lane); }
  __device__ __forceinline__ void read(Tile &tile, u32 stage, u32 phase) const {
    barrier_wait(memory.w_full(stage), phase);
    read_tile<false>(tile, memory.w(stage, group), warp, 8 * warp + lane / 4, lane);
  }
  // Hands over the products of 64 columns.
  __device__ __forceinline__ void start(float *sum, u32 (*a)[4], bool keeps) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");  // made before the fence
    barrier_wait(memory.x_full(x.stage), x.phase);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma_registers(sum, a[i], row_descriptor(memory.x(x.stage) + i * 32), keeps || i);
    wgmma_commit();
  }
  // The stage before is done with, and this one comes next.
  __device__ __forceinline__ void move_on() {
    release();
    before = x.stage;
    x.next();
  }
#if SUM_SCALE
  // sum = the products of `chunks` chunks. After each, sums are read: brought into the units of the next. Its first operands
  // are made before that, while the tensor cores are at work; after the last chunk, from what is there once more. The other
  // warpgroup starts half a chunk later, and multiplies while this one reads.
  __device__ __forceinline__ void multiply(float *sum, int chunks, bool leads) {
    u32 a[4][4], b[4][4];
    Tile tile;
    read(tile, w.stage, w.phase);
    operands<0>(a, tile, lookup());
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const bool more = chunk + 1 < chunks;
      const Units units(tile);
      const u32 stage = w.stage, phase = w.phase;
      start(sum, a, chunk);
      operands<1>(b, tile, lookup());
      move_on();
      start(sum, b, true);
      if (leads && chunk == 0) arrive(3, 256);
      wgmma_wait<1>();
      w.next();
      read(tile, more ? w.stage : stage, more ? w.phase : phase);
      move_on();
      barrier_arrive(memory.w_empty(stage));
      operands<0>(a, tile, lookup());
      wgmma_wait<0>();
      rescale<SUMS_OF_THREAD>(sum, units, more ? Units(tile) : Units());
    }
    release();
    before = X_STAGES;
  }
#else
  // The same, after which what was handed over before is done.
  template <int HALF> __device__ __forceinline__ void start(float *sum, u32 (*a)[4], const Tile &tile, bool keeps) {
    operands<HALF>(a, tile, lookup());
    start(sum, a, keeps);
    wgmma_wait<1>();
    move_on();
  }
  // sum = the products of `chunks` chunks; the warpgroup that leads lets the other one start SKEW chunks later.
  __device__ __forceinline__ void multiply(float *sum, int chunks, bool leads) {
    u32 a[4][4], b[4][4];
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, w.next()) {
      Tile tile;
      read(tile, w.stage, w.phase);
      start<0>(sum, a, tile, chunk);
      barrier_arrive(memory.w_empty(w.stage));
      start<1>(sum, b, tile, true);
      if (leads && chunk + 1 == min(SKEW, chunks)) arrive(3, 256);
    }
    wgmma_wait<0>();
    settle<SUMS_OF_THREAD>(sum);
    release();
    before = X_STAGES;
  }
#endif
};

// Puts down the sums of a piece that another cluster finishes, by a warpgroup.
__device__ __forceinline__ void put_down(const Arguments &p, const float *sum, int group, int mine) {
  const int at = blockIdx.x * 2 + group;
  float4 *to = p.parts + (long long)at * (SUMS_OF_THREAD / 4 * 128) + mine;
#pragma unroll
  for (int i = 0; i < SUMS_OF_THREAD / 4; ++i) to[i * 128] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
  __threadfence();
  meet(1 + group, 128);
  if (mine == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.ready + at), "r"(1) : "memory");
}

// Takes in what the clusters before have put down of the tile that begins at chunk `start` of the shared ones.
__device__ __forceinline__ void take_in(const Arguments &p, float *sum, int start, int rank, int group, int mine) {
  const int clusters = gridDim.x / CLUSTER;
  int cluster = blockIdx.x / CLUSTER;
#pragma unroll 1
  do {
    const int at = (--cluster * CLUSTER + rank) * 2 + group;
    if (mine == 0) {
      u32 there = 0;
      while (!there) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(p.ready + at) : "memory");
    }
    meet(1 + group, 128);
    const float4 *from = p.parts + (long long)at * (SUMS_OF_THREAD / 4 * 128) + mine;
#pragma unroll
    for (int i = 0; i < SUMS_OF_THREAD / 4; ++i) {
      float4 part;
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "l"(from + i * 128) : "memory");
      sum[4 * i] += part.x, sum[4 * i + 1] += part.y, sum[4 * i + 2] += part.z, sum[4 * i + 3] += part.w;
    }
  } while (Segments::first(p, cluster, clusters) > start);
}

// Scales a warpgroup's sums, lays them down with tokens as rows, and has the copy engine store them.
__device__ __forceinline__ void store(const Arguments &p, const Memory &memory, const float *sum, const Place &at, int group,
                                      int warp, int lane, u32 &turn) {
  const bool first = warp == 0 && lane == 0;
  const u32 token = (lane >> 4) * 8 + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
  const float factor = p.factor * (p.tensor_scale ? *p.tensor_scale : 1.f);
  float scale[2], bias[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = min(at.row0 + group * 64 + warp * 16 + lane / 4 + 8 * i, p.N - 1);
    scale[i] = ROW_SCALE ? row_scale(p.scale, n) * factor : factor;
    bias[i] = p.bias ? x_float(p.bias[n]) : 0.f;
  }
#pragma unroll
  for (int pass = 0; pass < TOKENS / OUT_TOKENS; ++pass, turn ^= 1) {
    const u32 out = memory.out(group, turn);
    if (first) stored_wait<1>();
    meet(1 + group, 128);
#pragma unroll
    for (int pair = 0; pair < OUT_TOKENS / 16; ++pair) {
      u32 halves[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float *two = sum + 4 * (pass * (OUT_TOKENS / 8) + pair * 2 + i / 2) + i % 2 * 2;
        halves[i] = pack<X_FP16>(two[0] * scale[i % 2] + bias[i % 2], two[1] * scale[i % 2] + bias[i % 2]);
      }
      const u32 at_token = pair * 16 + token;
      store_matrices(out + at_token * 128 + (piece ^ (at_token & 7)) * 16, halves);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet(1 + group, 128);
    if (first) store_tensor(&p.y, out, at.row0 + group * 64, at.token0 + pass * OUT_TOKENS);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    linear_walk(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank(), group = warp / 4;
  const Memory memory = {behind_lookup(shared_address(shared))};
  Segments segments(p, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
  if (threadIdx.x == 0) {
    for (int i = 0; i < X_STAGES; ++i) barrier_init(memory.x_full(i), 1);
    for (int i = 0; i <= X_STAGES; ++i) barrier_init(memory.x_empty(i), CLUSTER * WARPS);
    for (int i = 0; i < W_STAGES; ++i) barrier_init(memory.w_full(i), 1), barrier_init(memory.w_empty(i), 32 * WARPS);
    barrier_init_fence();
  }
#if CODE == TABLE
  fill_lookup(memory.base - LOOKUP_BYTES, p.table, THREADS);
#endif
  cluster_sync();
  if (warp >= WARPS) {
    keep_registers<FEEDS, true, false>();
    if (warp == WARPS && lane == 0) feed_x(p, memory, segments, rank);
    if (warp == WARPS + 1 && lane == 0) feed_w(p, memory, segments, rank);
    __syncwarp();
  } else {
    keep_registers<MULTIPLIES, true, true>();
    Walk walk = {memory, group, warp % 4, lane, {0, 0}, {0, 0}, X_STAGES};
    u32 out_turn = 0;
    wait_for_previous();
    bool leads = group == 0;
    if (!leads) meet(3, 256);
#pragma unroll 1
    while (segments.next(p)) {
      float sum[SUMS_OF_THREAD];
      walk.multiply(sum, segments.end - segments.begin, leads);
      leads = false;
      if (segments.last(p)) launch_dependents();
      if (segments.end < p.chunks) {
        put_down(p, sum, group, threadIdx.x % 128);
      } else {
        if (segments.begin) take_in(p, sum, segments.tile * p.chunks, rank, group, threadIdx.x % 128);
        store(p, memory, sum, place(p, segments.tile, rank), group, walk.warp, lane, out_turn);
      }
    }
    if (threadIdx.x % 128 == 0) stored_wait<0>();
  }
  cluster_sync();  // nobody leaves while the other block may still copy or arrive here
}
