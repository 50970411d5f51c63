// y[M, N] = x[M, K] @ W[N, K]^T for x and W in eight bits (W in four if NIBBLES) on Hopper, rescaled as it leaves.
//
// Rows of W are the tensor cores' 64 rows, tokens their columns. A block makes 128 rows times TOKENS tokens: two
// warpgroups of 64 rows each multiply, one lane of a third feeds them, STAGES chunks of 128 columns ahead. Two blocks
// form a cluster: each asks for half of the tokens' tile and the copy engine hands it to both, so that a byte of x
// crosses from the L2 cache once for 256 rows. Blocks stay and walk over tiles (BAND tiles of tokens at a time, so that
// what is being read fits the L2 cache); the first warpgroup starts SKEW chunks ahead of the second, so that one
// multiplies while the other rescales and stores.
//
// Sums are exact in int32 where a scale covers a row. With FOLD they are taken out every FOLD steps of 32 columns,
// multiplied by the group's scales and added up in float32, while the tensor cores fill a second set. 4-bit codes are
// widened in registers, to sixteen times their value: `nibble << 4` is a byte of two's complement, and 1/16 goes into the
// last factor.
//
// Definitions: FLOAT8 (e4m3, else int8), NIBBLES, TOKENS (128, 192, 256; with FOLD 128), STAGES, FOLD (0: never, 1, 2, 4),
// W_GROUPED, X_GROUPED (whether scales change along K, with FOLD), W_BLOCKS (whether 128 rows share a scale), W_SCALE (0
// bf16, 1 fp16, 2 fp32), Y_FP16.
typedef unsigned int u32;
typedef unsigned long long u64;
#include "async.cuh"
#include "wgmma.cuh"
#include "wgmma_many.cuh"
#include "cluster.cuh"
#include "bands.cuh"
#include "narrow.cuh"

#define ROWS 128
#define CHUNK 128  // columns, and bytes of a row of x
#define W_ROW (NIBBLES ? 64 : 128)  // bytes of a row of W in a chunk
#define W_BYTES (ROWS * W_ROW)
#define X_BYTES (TOKENS * CHUNK)
#define GROUPS (X_GROUPED && FOLD < 4 ? 4 / FOLD : 1)  // of x's scales in a chunk
#define SCALE_BYTES (X_GROUPED ? GROUPS * TOKENS * 4 : 0)
#define SUMS_OF_THREAD (TOKENS / 2)
#define BURST (FOLD ? FOLD : NIBBLES ? 2 : 4)  // steps that wgmma is given at once
#define WARPS 8
#define THREADS (32 * WARPS + 128)
#define SKEW 1

struct Arguments {
  TensorMap w, x, y;  // boxes of ROWS rows, of half of TOKENS, of OUT_TOKENS x 64
  const char *w_scale;  // [N >> w_shift, groups]
  const float *x_scale;  // [M], or with X_GROUPED [groups, pitch]
  const unsigned short *bias;
  int M, N, chunks, pairs, token_tiles, groups, pitch, w_shift;
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
  __device__ __forceinline__ u32 w(u32 stage) const { return base + stage * (W_BYTES + X_BYTES); }
  __device__ __forceinline__ u32 x(u32 stage) const { return w(stage) + W_BYTES; }
  __device__ __forceinline__ u32 out(u32 group, u32 turn) const { return w(STAGES) + (group * 2 + turn) * OUT_BYTES; }
  __device__ __forceinline__ u32 scale(u32 stage) const { return out(2, 0) + stage * SCALE_BYTES; }
  __device__ __forceinline__ u32 row(u32 group) const { return scale(STAGES) + group * TOKENS * 4; }
  __device__ __forceinline__ u32 full(u32 stage) const { return row(2) + stage * 8; }
  __device__ __forceinline__ u32 empty(u32 stage) const { return full(STAGES) + stage * 8; }  // one more, for nothing
};

// The feeding lane: asks for every chunk of every tile, as stages come free in both blocks.
__device__ __forceinline__ void feed(const Arguments &p, const Memory &memory, int first, int step, int rank) {
  Ring<STAGES> turn = {0, 1};
#pragma unroll 1
  for (int tile = first; tile < p.pairs * p.token_tiles; tile += step) {
    const Place at = place(p, tile, rank);
#pragma unroll 1
    for (int chunk = 0; chunk < p.chunks; ++chunk, turn.next()) {
      const u32 full = memory.full(turn.stage);
      barrier_wait(memory.empty(turn.stage), turn.phase);
      barrier_expect(full, W_BYTES + X_BYTES + SCALE_BYTES);
      bulk_tensor(memory.w(turn.stage), &p.w, chunk * W_ROW, at.row0, full);
      tensor_to_both(memory.x(turn.stage) + rank * (X_BYTES / 2), &p.x, chunk * CHUNK, at.token0 + rank * (TOKENS / 2), full);
      for (int i = 0; i < GROUPS && X_GROUPED; ++i) {
        const float *from = p.x_scale + (long long)min(chunk * GROUPS + i, p.groups - 1) * p.pitch + at.token0;
        bulk_copy<TOKENS * 4>(memory.scale(turn.stage) + i * TOKENS * 4, (const char *)from, full);
      }
    }
  }
}

// A warpgroup's rows of W in a chunk, as the register operands of its four steps: the low nibbles of a row are the
// first 64 columns, the high ones the last; a row's 64 bytes are swizzled by XOR of its 16-byte pieces with row / 2 % 4.
struct Nibbles {
  u32 words[2][4];
  __device__ __forceinline__ void read(u32 from, int warp, int lane) {
    const u32 row = warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 at = from + (row + i / 4 * 8) * 64 + (i % 4 ^ row / 2 % 4) * 16 + lane % 4 * 4;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[i / 4][i % 4]) : "r"(at));
    }
  }
  __device__ __forceinline__ void operand(int step, u32 *a) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = words[i & 1][step % 2 * 2 + i / 2];
      a[i] = (step < 2 ? word << 4 : word) & 0xF0F0F0F0;
      asm volatile("" : "+r"(a[i])::"memory");  // made before the fence
    }
  }
};

// A warpgroup's way through the chunks of its tiles.
struct Walk {
  const Arguments &p;
  const Memory &memory;
  int group, warp, lane;
  Ring<STAGES> turn;
  u32 before;  // the stage that is not yet given back

  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane < CLUSTER) arrive_at(memory.empty(before), lane);
  }
  // Hands BURST steps of a chunk to the tensor cores, from `first` on.
  __device__ __forceinline__ void start(Sum *sum, const u32 (*a)[4], int first, bool keeps) const {
    const u32 weights = memory.w(turn.stage) + group * 64 * W_ROW, tokens = memory.x(turn.stage);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BURST; ++i) {
      const int step = (first + i) * 32, keep = keeps || i;
      if (NIBBLES)
        wgmma_registers(sum, a[i], row_descriptor(tokens + step), keep);
      else
        wgmma_shared(sum, row_descriptor(weights + step), row_descriptor(tokens + step), keep);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void next() {
    before = turn.stage;
    turn.next();
  }
};

// Sums of whole rows, exact; the warpgroup that leads lets the other one start SKEW chunks later.
__device__ __forceinline__ void multiply_rows(Walk &walk, Sum *sum, bool leads) {
  u32 a[2][BURST][4];
#pragma unroll 1
  for (int chunk = 0; chunk < walk.p.chunks; ++chunk, walk.next()) {
    Nibbles nibbles;
    barrier_wait(walk.memory.full(walk.turn.stage), walk.turn.phase);
    if (NIBBLES) nibbles.read(walk.memory.w(walk.turn.stage) + walk.group * 64 * W_ROW, walk.warp, walk.lane);
#pragma unroll
    for (int burst = 0; burst < 4 / BURST; ++burst) {
      for (int i = 0; i < BURST && NIBBLES; ++i) nibbles.operand(burst * BURST + i, a[burst][i]);
      walk.start(sum, a[burst], burst * BURST, chunk || burst);
      wgmma_wait<1>();
      if (burst == 0) walk.release();  // nothing reads the stage before any more
    }
    if (leads && chunk + 1 == min(SKEW, walk.p.chunks)) arrive(3, 256);
  }
  wgmma_wait<0>();
  settle<SUMS_OF_THREAD>(sum);
  walk.release();
  walk.before = STAGES;
}

// Sums of a group that wait to be added up, and where their scales are.
struct Pending {
  float w[2];
  u32 scales;

  // total += the sums times their scales. A thread has, of tokens 8j + 2t and the next, its rows g and g + 8.
  __device__ __forceinline__ void fold(float *total, Sum *sum, int lane) const {
    settle<SUMS_OF_THREAD>(sum);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j) {
      const float2 x = X_GROUPED ? read_two(scales + (8 * j + lane % 4 * 2) * 4) : make_float2(1.f, 1.f);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = (i & 1 ? x.y : x.x) * (W_GROUPED ? w[W_BLOCKS ? 0 : i / 2] : 1.f);
        total[4 * j + i] = fmaf((float)sum[4 * j + i], scale, total[4 * j + i]);
      }
    }
    settle<SUMS_OF_THREAD>(total);
  }
};

// Sums by groups, four in a row: the tensor cores fill one set of sums while the other is added up. At the end of the
// row both are: the compiler takes no sums in flight round a loop that also reads sums.
__device__ __forceinline__ void multiply_groups(Walk &walk, float *total, int row0) {
  Sum sum[2][SUMS_OF_THREAD];
  u32 a[2][BURST][4];
  Nibbles nibbles;
  Pending pending[2];
  const int row = row0 + walk.warp * 16 + walk.lane / 4;
#pragma unroll 1
  for (int chunk = 0; chunk < walk.p.chunks; chunk += BURST) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = i * BURST % 4, side = i & 1, group = (chunk * 4 + i * BURST) / BURST;
      Pending &mine = pending[side];
      for (int r = 0; r < 2 && W_GROUPED; ++r) mine.w[r] = w_scale(walk.p, row + 8 * r, group);
      if (first == 0) {
        if (i) walk.next();
        barrier_wait(walk.memory.full(walk.turn.stage), walk.turn.phase);
        if (NIBBLES) nibbles.read(walk.memory.w(walk.turn.stage) + walk.group * 64 * W_ROW, walk.warp, walk.lane);
      }
      mine.scales = walk.memory.scale(walk.turn.stage) + first / BURST * TOKENS * 4;
      for (int step = 0; step < BURST && NIBBLES; ++step) nibbles.operand(first + step, a[side][step]);
      walk.start(sum[side], a[side], first, false);
      if (i) {
        wgmma_wait<1>();
        pending[side ^ 1].fold(total, sum[side ^ 1], walk.lane);
        if (first == 0) walk.release();
      }
    }
    wgmma_wait<0>();
    pending[1].fold(total, sum[1], walk.lane);
    walk.next();
    walk.release();
  }
  walk.before = STAGES;
}

// What a thread needs to know of its tile's scales: fetched before the sums, which hide the way to memory.
struct Factors {
  float x[2], w[2], bias[2];
  __device__ __forceinline__ Factors(const Arguments &p, const Place &at, int group, int warp, int lane) {
    const int row = at.row0 + group * 64 + warp * 16 + lane / 4, mine = warp * 32 + lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int n = row + 8 * i, token = at.token0 + i * 128 + mine;
      x[i] = X_GROUPED || token >= p.M || i * 128 + mine >= TOKENS ? 1.f : p.x_scale[token];
      x[i] *= NIBBLES ? 0.0625f : 1.f;
      w[i] = W_GROUPED ? 1.f : w_scale(p, n, 0);
      bias[i] = p.bias && n < p.N ? half_float(p.bias[n], Y_FP16) : 0.f;
    }
  }
};

// Rescales a warpgroup's sums, lays them down with tokens as rows, and has the copy engine store them.
__device__ __forceinline__ void store(const Arguments &p, const Memory &memory, const Sum *sum, const float *total,
                                      const Factors &factors, const Place &at, int group, int warp, int lane, u32 &turn) {
  const u32 mine = warp * 32 + lane, row = memory.row(group);
  const u32 token = (lane >> 4) * 8 + (lane & 7), piece = 2 * warp + (lane >> 3 & 1);
  for (int i = 0; i < 2; ++i)
    if (mine + i * 128 < TOKENS) asm volatile("st.shared.f32 [%0], %1;" ::"r"(row + (mine + i * 128) * 4), "f"(factors.x[i]));
#pragma unroll
  for (int pass = 0; pass < TOKENS / OUT_TOKENS; ++pass, turn ^= 1) {
    const u32 out = memory.out(group, turn);
    if (mine == 0) stored_wait<1>();
    meet(1 + group, 128);
#pragma unroll
    for (int pair = 0; pair < OUT_TOKENS / 16; ++pair) {
      u32 halves[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = pass * (OUT_TOKENS / 8) + pair * 2 + i / 2, first = 4 * j + i % 2 * 2;
        const float2 x = read_two(row + (8 * j + lane % 4 * 2) * 4);
        const float low = FOLD ? total[first] : (float)sum[first], high = FOLD ? total[first + 1] : (float)sum[first + 1];
        const float w = factors.w[i % 2], bias = factors.bias[i % 2];
        halves[i] = pack<Y_FP16>(__fadd_rn(__fmul_rn(__fmul_rn(low, x.x), w), bias), __fadd_rn(__fmul_rn(__fmul_rn(high, x.y), w), bias));
      }
      const u32 at_token = pair * 16 + token;
      store_matrices(out + at_token * 128 + (piece ^ (at_token & 7)) * 16, halves);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    meet(1 + group, 128);
    if (mine == 0) store_tensor(&p.y, out, at.row0 + group * 64, at.token0 + pass * OUT_TOKENS);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(THREADS, 1)
    linear_narrow(const __grid_constant__ Arguments p) {
  extern __shared__ __align__(1024) char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank(), group = warp / 4;
  const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const Memory memory = {(shared_address(shared) + 1023) & ~1023u};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(memory.full(i), 1);
    for (int i = 0; i <= STAGES; ++i) barrier_init(memory.empty(i), CLUSTER * WARPS);
    barrier_init_fence();
  }
  cluster_sync();
  wait_for_previous();
  if (warp >= WARPS) {
    keep_registers<24, true, false>();
    if (warp == WARPS && lane == 0) feed(p, memory, first, step, rank);
    __syncwarp();
  } else {
    keep_registers<240, true, true>();
    Walk walk = {p, memory, group, warp % 4, lane, {0, 0}, STAGES};
    u32 out_turn = 0;
    if (group == 1 && FOLD == 0) meet(3, 256);
#pragma unroll 1
    for (int tile = first; tile < p.pairs * p.token_tiles; tile += step) {
      const Place at = place(p, tile, rank);
      const Factors factors(p, at, group, warp % 4, lane);
      Sum sum[SUMS_OF_THREAD];
      float total[FOLD ? SUMS_OF_THREAD : 1] = {};
      if (FOLD)
        multiply_groups(walk, total, at.row0 + group * 64);
      else
        multiply_rows(walk, sum, group == 0 && tile == first);
      if (tile + step >= p.pairs * p.token_tiles) launch_dependents();
      store(p, memory, sum, total, factors, at, group, warp % 4, lane, out_turn);
    }
    if (threadIdx.x % 128 == 0) stored_wait<0>();
  }
  cluster_sync();  // nobody leaves while the other block may still copy or arrive here
}
