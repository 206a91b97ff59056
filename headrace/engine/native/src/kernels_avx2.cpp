#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>

#include "runtime.h"

#define ISA AVX2
#pragma GCC target("avx2,fma,f16c")

namespace headrace_avx2 {
#include "kernels.inc"
#include "forward.inc"
}  // namespace headrace_avx2
#endif
