// linear_exact for many tokens: tiles of 16 * TOKENS tokens x 16 * ROWS outputs, 256 threads, TOKENS * ROWS sums a thread.
//
// The tile walks chain after chain of the definition (reference.py), so a thread needs one running sum an output; a
// finished chain is added to the output's total, which waits in shared memory, a place of its thread's own. Two turns of
// a chain (16 columns) make a step: each thread fetches runs of eight columns for the next step, widens them once, and
// lays them into shared memory column by column, where neighbouring rows are read as the multiplications want them.
#include "numbers.cuh"

#define THREADS 256
#define OUTPUTS (16 * ROWS)
#define ROWS_X (16 * TOKENS)
#define W_RUNS (2 * OUTPUTS / THREADS)  // that a thread fetches for a step
#define STEP (2 * RUN)
#define WIDTH (TOKENS < 4 ? TOKENS : 4)
#define X_STRIDE (ROWS_X + 4)
#define W_STRIDE (OUTPUTS + 4)
#define PIECES (TOKENS * ROWS / 4)  // of four totals
#define ALL_FETCH_X (2 * ROWS_X >= THREADS)

// BYTES (4, 8, or a multiple of 16) to shared memory, asynchronously; zeros if not `there`. The compiler puts off loads
// into registers until they are needed, however early they are written down; it cannot put off these.
template <int BYTES> __device__ __forceinline__ void copy(u32 to, const char *from, bool there) {
  if (BYTES < 16)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES < 16 ? BYTES : 4),
                 "r"(there ? BYTES : 0) : "memory");
#pragma unroll
  for (int i = 0; i < BYTES / 16; ++i)  // a warp's 16-byte pieces lie together
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + i * (16 * THREADS)), "l"(from + i * 16),
                 "r"(there ? 16 : 0) : "memory");
}
template <int WORDS> __device__ __forceinline__ void read_back(u32 *to, const u32 *from) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) to[i] = from[WORDS < 4 ? i : i / 4 * (4 * THREADS) + i % 4];
}

__device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// What a thread fetches of the next step: runs of its own, in slots of its own, so that no barrier is needed before it reads
// them back. Pointers and limits of its rows are kept: a step then costs a comparison and an addition for each run.
struct Fetcher {
  u32 *x, *w;  // the slots
  const char *x_from, *w_from[W_RUNS];
  int x_columns, w_columns[W_RUNS];  // those left in the row, none where there is no row
  Scale scale[W_RUNS];

  __device__ __forceinline__ Fetcher(const Arguments &p, u32 *slots, int token0, int row0)
      : x(slots + threadIdx.x * 4), w(slots + X_WORDS * THREADS + threadIdx.x * (W_WORDS < 4 ? W_WORDS : 4)) {
    const int half = threadIdx.x / ROWS_X, token = token0 + threadIdx.x % ROWS_X;
    x_columns = (ALL_FETCH_X || half < 2) && token < p.M ? p.K - half * SPAN : 0;
    x_from = x_columns > 0 ? p.x + token * p.x_row + half * SPAN * X_BYTES : p.x;
#pragma unroll
    for (int i = 0; i < W_RUNS; ++i) {
      const int at = threadIdx.x + i * THREADS, row = row0 + at % OUTPUTS;
      w_columns[i] = row < p.N ? p.K - at / OUTPUTS * SPAN : 0;
      w_from[i] = w_columns[i] > 0 ? p.w + row * p.w_row + at / OUTPUTS * (SPAN / RUN * W_WORDS * 4) : p.w;
    }
  }

  // The columns `column` to `column` + RUN of the step's first half, and SPAN further of its second.
  __device__ __forceinline__ void fetch(const Arguments &p, int row0, int column) {
#pragma unroll
    for (int i = 0; i < W_RUNS; ++i) {
      const bool there = column < w_columns[i];
      copy<4 * W_WORDS>((u32)__cvta_generic_to_shared(w + i * (W_WORDS * THREADS)),
                        w_from[i] + (there ? column / RUN * (W_WORDS * 4) : 0), there);
      const int at = threadIdx.x + i * THREADS;
      scale[i] = there ? scale_of(p, row0 + at % OUTPUTS, column + at / OUTPUTS * SPAN) : Scale{};
    }
    const bool there = column < x_columns;
    copy<4 * X_WORDS>((u32)__cvta_generic_to_shared(x), x_from + (there ? column * X_BYTES : 0), there);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // Piece 0 is the run of x, the others are the weight's.
  __device__ __forceinline__ void put(float *x_tile, float *w_tile, int piece) const {
    float values[RUN];
    const int half = threadIdx.x / ROWS_X;
    if (piece == 0 && (ALL_FETCH_X || half < 2)) {
      u32 raw[X_WORDS];
      read_back<X_WORDS>(raw, x);
      widen<X_KIND>(values, raw);
#pragma unroll
      for (int i = 0; i < RUN; ++i) x_tile[(half * RUN + i) * X_STRIDE + threadIdx.x % ROWS_X] = values[i];
    }
    if (piece >= 1 && piece <= W_RUNS) {
      const int at = threadIdx.x + (piece - 1) * THREADS;
      u32 raw[W_WORDS];
      read_back<W_WORDS>(raw, w + (piece - 1) * (W_WORDS * THREADS));
      widen_weight(values, raw, scale[piece - 1]);
#pragma unroll
      for (int e = 0; e < RUN; ++e) w_tile[(at / OUTPUTS * RUN + e) * W_STRIDE + at % OUTPUTS] = values[e];
    }
  }
};

// Where a thread's sums lie: runs of neighbouring tokens, eight lanes' side by side, then the next; the same of outputs over
// four lanes. Lanes 2i and 2i + 1 read the same tokens and lanes i and i ^ 2 the same outputs, which lets a 16-byte read of
// shared memory serve a warp in two steps instead of four.
__device__ __forceinline__ int first_token() { return threadIdx.x / 128 * (8 * TOKENS) + threadIdx.x / 2 % 8 * WIDTH; }
__device__ __forceinline__ int first_output() { return threadIdx.x / 32 % 4 * (4 * ROWS) + threadIdx.x / 16 % 2 * 8 + threadIdx.x % 2 * 4; }
__device__ __forceinline__ int token_of(int m) { return first_token() + m / WIDTH * (8 * WIDTH) + m % WIDTH; }
__device__ __forceinline__ int output_of(int n) { return first_output() + n / 4 * 16 + n % 4; }

// A column of a thread's tokens and outputs.
struct Column {
  float a[TOKENS], b[ROWS];

  __device__ __forceinline__ void read(const float *x, const float *w) {
#pragma unroll
    for (int m = 0; m < TOKENS; m += WIDTH) {
      const float *from = x + m / WIDTH * (8 * WIDTH);
      if (WIDTH == 4)
        *(float4 *)(a + m) = *(const float4 *)from;
      else
        for (int i = 0; i < WIDTH; ++i) a[m + i] = from[i];
    }
#pragma unroll
    for (int n = 0; n < ROWS; n += 4) *(float4 *)(b + n) = *(const float4 *)(w + n * 4);
  }

  // Token by token, back and forth over the outputs: neighbouring instructions then share an operand, which the register file
  // need not deliver twice. It has two banks, and reads of one bank take turns.
  __device__ __forceinline__ void add_products(float (*sum)[ROWS]) const {
#pragma unroll
    for (int m = 0; m < TOKENS; ++m)
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int n = m % 2 ? ROWS - 1 - i : i;
        sum[m][n] = __fmaf_rn(a[m], b[n], sum[m][n]);
      }
  }
};

// A step; in its second half the next one is laid out, a piece a column, so that multiplications cover that too.
__device__ __forceinline__ void multiply(float (*sum)[ROWS], const float *x_tile, const float *w_tile, const Fetcher &next,
                                         float *next_x, float *next_w) {
  const float *x = x_tile + first_token(), *w = w_tile + first_output();
  Column columns[2];
  columns[0].read(x, w);
#pragma unroll
  for (int k = 0; k < STEP; ++k) {
    if (k + 1 < STEP) columns[(k + 1) % 2].read(x + (k + 1) * X_STRIDE, w + (k + 1) * W_STRIDE);
    columns[k % 2].add_products(sum);
    if (k == STEP / 2) wait();
    if (k >= STEP / 2) next.put(next_x, next_w, k - STEP / 2);
  }
}

// total += the finished chain; the next one starts at +0.
__device__ __forceinline__ void finish_chain(float (*sum)[ROWS], float4 *totals) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    float *s = &sum[i / (ROWS / 4)][i % (ROWS / 4) * 4];
    float4 t = totals[i * THREADS];
    t.x = __fadd_rn(t.x, s[0]), t.y = __fadd_rn(t.y, s[1]), t.z = __fadd_rn(t.z, s[2]), t.w = __fadd_rn(t.w, s[3]);
    totals[i * THREADS] = t;
    s[0] = s[1] = s[2] = s[3] = 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) linear_exact_tile(const Arguments p) {
  extern __shared__ float4 shared[];
  float4 *totals = shared + threadIdx.x;
  float *x_tile = (float *)(shared + PIECES * THREADS), *w_tile = x_tile + 2 * STEP * X_STRIDE;
  const int token0 = blockIdx.x * ROWS_X, row0 = blockIdx.y * OUTPUTS;
  const int runs = p.K / RUN, chains = min(runs, CHAINS);
  float sum[TOKENS][ROWS] = {};
#pragma unroll
  for (int i = 0; i < PIECES; ++i) totals[i * THREADS] = {0.f, 0.f, 0.f, 0.f};

  Fetcher next(p, (u32 *)(w_tile + 2 * STEP * W_STRIDE), token0, row0);
  int chain = 0, step = 0, buffer = 0;
  next.fetch(p, row0, 0);
  wait();
#pragma unroll
  for (int i = 0; i <= W_RUNS; ++i) next.put(x_tile, w_tile, i);
  __syncthreads();
#pragma unroll 1
  while (chain < chains) {
    const int turns = (runs - chain + CHAINS - 1) / CHAINS;
    const bool last = 2 * step + 2 >= turns;
    step = last ? 0 : step + 1, chain += last;
    if (chain < chains) next.fetch(p, row0, step * (2 * SPAN) + chain * RUN);
    const float *x = x_tile + buffer * STEP * X_STRIDE, *w = w_tile + buffer * STEP * W_STRIDE;
    buffer ^= 1;
    multiply(sum, x, w, next, x_tile + buffer * STEP * X_STRIDE, w_tile + buffer * STEP * W_STRIDE);
    if (last) finish_chain(sum, totals);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    const float4 t = totals[i * THREADS];
    const float four[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = token0 + token_of(i / (ROWS / 4)), row = row0 + output_of(i % (ROWS / 4) * 4 + e);
      if (token < p.M && row < p.N) store(p, token, row, four[e]);
    }
  }
}
