// silu_mul_exact: a thread a value of the result.
#include "exact.cuh"

struct Arguments {
  const T *x;
  T *y;
  long long count;
  int columns;
};

extern "C" __global__ void __launch_bounds__(THREADS) silu_mul_exact(const Arguments a) {
  const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (at >= a.count) return;
  const long long from = at / a.columns * 2 * a.columns + at % a.columns;
  const float gate = wide(a.x[from]), up = wide(a.x[from + a.columns]);
  const float silu = __fdiv_rn(gate, __fadd_rn(exact_exp(-gate), 1.0f));
  a.y[at] = narrow(__fmul_rn(wide(narrow(silu)), up));
}
