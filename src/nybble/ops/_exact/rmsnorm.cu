// add_rmsnorm_exact: a block a row, a thread a lane.
#include "exact.cuh"

struct Arguments {
  const T *x, *residual, *weight;
  T *y, *h;
  int columns;
  float eps;
};

extern "C" __global__ void __launch_bounds__(LANES) add_rmsnorm_exact(const Arguments a) {
  __shared__ float room[LANES];
  const long long row = (long long)blockIdx.x * a.columns;
  float lane = 0.0f;
  for (int c = threadIdx.x; c < a.columns; c += LANES) {
    float v = wide(a.x[row + c]);
    if (a.residual) v = __fadd_rn(v, wide(a.residual[row + c]));
    const T h = narrow(v);
    a.h[row + c] = h;
    lane = __fadd_rn(lane, __fmul_rn(wide(h), wide(h)));
  }
  const float mean = __fdiv_rn(fold<LANES>(lane, room), (float)a.columns);
  const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, a.eps)));
  for (int c = threadIdx.x; c < a.columns; c += LANES) {
    const float scaled = wide(narrow(__fmul_rn(wide(a.h[row + c]), scale)));
    a.y[row + c] = narrow(__fmul_rn(wide(a.weight[c]), scaled));
  }
}
